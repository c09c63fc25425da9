"""Multicast: accesses to the memory of all devices of a team at once, behind one address.

Each is done to one device after the other, in the order of their numbers, as an ordinary load, store or atomic is. What
a load reduces is rounded after each step, with ``.acc::f32`` once at the end.

Source: PTX ISA, "multimem.ld_reduce, multimem.st, multimem.red", "Multimem Addresses".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from ..ir import Value, constant, vector
from ..ptx import SIZES, Instruction, Operand
from .access import atomic_lanes, load_bytes, load_interleaved, send, store_bytes, store_interleaved
from .core import WARP, Lower, lowers, vector_elements
from .float import extremum, is_float, narrow, widen

__all__: list[str] = []

_ORDERS = {
    "ld_reduce": ("weak", "relaxed", "acquire"),
    "st": ("weak", "relaxed", "release"),
    "red": ("relaxed", "release"),
}
_SCOPES = ("cta", "cluster", "gpu", "sys")
_HALVES = ("f16", "f16x2", "bf16", "bf16x2")
_EXTREMA = ("u32", "s32", "u64", "s64", *_HALVES)
_BITS = ("b32", "b64")
_TYPES = {
    "add": ("u32", "s32", "u64", *_HALVES, "f32", "f64"),
    **dict.fromkeys(("min", "max"), _EXTREMA),
    **dict.fromkeys(("and", "or", "xor"), _BITS),
    "": (*_EXTREMA, *_BITS, "f32", "f64"),  # of a store
}


class _Form(NamedTuple):
    """What the modifiers say."""

    order: str
    operation: str
    wide: bool  # .acc::f32
    type: str
    registers: int

    @property
    def nbytes(self) -> int:
        return SIZES[self.type] * self.registers


def _form(e: Lower, i: Instruction) -> _Form:
    """`UnsupportedError` for what the ISA does not have for sm_90."""
    verb, *rest = i.modifiers

    def take(*names: str) -> str:
        found = next((modifier for modifier in rest if modifier in names), "")
        if found:
            rest.remove(found)
        return found

    order, scope, _ = take(*_ORDERS.get(verb, ())), take(*_SCOPES), take("global")
    operation, wide = take(*_TYPES) if verb != "st" else "", bool(take("acc::f32"))
    form = _Form(order, operation, wide, take(*_TYPES[operation]), int(take("v2", "v4", "v8")[1:] or 1))
    number = is_float(form.type)
    legal = (
        verb in _ORDERS
        and not rest
        and form.type != ""
        and bool(operation) == (verb != "st")
        and bool(scope) == (order not in ("", "weak"))
        and form.nbytes in (4, 8, 16)
        and (form.registers == 1 or (number and form.type != "f64"))
        and (not form.wide or (verb == "ld_reduce" and operation == "add" and form.type in _HALVES))
        and (verb != "red" or operation == "add" or not number)
    )
    if not legal:
        raise e.unsupported(why="sm_90 has no such form")
    return form


@lowers("multimem")
def multimem(e: Lower, i: Instruction) -> None:
    form = _form(e, i)
    loads = i.modifiers[0] == "ld_reduce"
    address, registers = i.operands[int(loads)], vector_elements(i.operands[int(not loads)])
    if len(registers) != form.registers:
        raise e.unsupported(why=f"{len(registers)} registers")
    if loads:
        _ld_reduce(e, form, address, registers)
        return
    values = [e.read(register, form.type) for register in registers]
    if form.order == "release":
        e.b.line("fence release")
        send(e, i)
    if i.modifiers[0] == "red":
        _red(e, form, address, values)
        return
    _st(e, form, address, values)
    if form.order == "release":
        send(e, i)


@contextmanager
def _each_member(e: Lower, form: _Form, operand: Operand) -> Iterator[tuple[Value, Value, Value]]:
    """A loop over the devices of the team: a number from 0 on, the addresses of its memory, and whose they are."""
    b = e.b
    at, found, counter = e.buffer("i64", WARP + 3), e.buffer("i64", WARP + 4), e.buffer("i64", 1)
    b.store(e.address(operand, "global"), at, align=64)
    b.store(constant("i64", 0), counter, align=8)
    again, inside, done = b.name("team"), b.name("member"), b.name("done")
    b.jump(again)
    b.label(again)
    number = b.load("i64", counter, align=8)
    lanes = b.call(
        "i32", "drvkit_multicast", e.grid, at, e.mask_bits, number, constant("i32", form.nbytes), found,
        constant("i32", int(e.i.modifiers[0] == "st")), constant("i32", e.place(e.i)),
    )  # fmt: skip
    b.branch(b.compare("icmp eq", lanes, constant("i32", 0)), done, inside)
    b.label(inside)
    yield number, b.load(vector("i64", WARP), found, align=64), lanes
    b.store(b.op("add", number, constant("i64", 1)), counter, align=8)
    b.jump(again)
    b.label(done)
    e.fail_if(b.cast("zext", b.compare("icmp eq", number, constant("i64", 0)), "i32"))


def _st(e: Lower, form: _Form, address: Operand, values: list[Value]) -> None:
    buffer = e.buffer(f"[{form.nbytes} x i8]")
    store_interleaved(e, buffer, values)
    with _each_member(e, form, address) as (_, addresses, lanes):
        store_bytes(e, addresses, form.nbytes, buffer, lanes)


def _red(e: Lower, form: _Form, address: Operand, values: list[Value]) -> None:
    with _each_member(e, form, address) as (_, addresses, lanes):
        for position, value in enumerate(values):
            offset = constant(addresses.type, SIZES[form.type] * position)
            atomic_lanes(e, form.operation, form.type, e.b.op("add", addresses, offset), [value], lanes)


def _ld_reduce(e: Lower, form: _Form, address: Operand, targets: Sequence[Operand]) -> None:
    b = e.b
    name = form.type.removesuffix("x2")
    each = form.nbytes // SIZES[name]  # numbers of a lane
    bits = vector(f"i{8 * SIZES[name]}", each)
    kind = vector({"f64": "double"}.get(name, "float"), each) if is_float(name) else bits
    values, totals = e.buffer(f"[{form.nbytes} x i8]"), e.buffer(kind, WARP + 1)
    with _each_member(e, form, address) as (number, addresses, lanes):
        load_bytes(e, addresses, form.nbytes, lanes)
        first = b.compare("icmp eq", number, constant("i64", 0))
        with e.active(lanes) as lane:
            given, place = b.load(bits, b.at(values, lane, bits)), b.at(totals, lane, kind)
            given = widen(b, given, name) if is_float(name) else given
            total = b.load(kind, place)
            b.store(b.select(first, given, _reduced(e, form, name, total, given)), place)
    with e.active(e.mask_bits) as lane:
        total = b.load(kind, b.at(totals, lane, kind))
        b.store(narrow(e, total, name) if is_float(name) else total, b.at(values, lane, bits))
    load_interleaved(e, values, targets, form.type)
    if form.order == "acquire":
        b.line("fence acquire")


def _reduced(e: Lower, form: _Form, name: str, total: Value, given: Value) -> Value:
    b = e.b
    if not is_float(name):
        operation = form.operation
        if operation in ("min", "max"):
            return b.intrinsic(f"{name[0]}{operation}", total, given)
        return b.op(operation, total, given)
    if form.operation != "add":
        return extremum(b, form.operation, [total, given])
    total = b.op("fadd", total, given)
    return widen(b, narrow(e, total, name), name) if form.type in _HALVES and not form.wide else total
