"""LLVM IR as text: values that know their types, and structured control flow.

Text, because making it takes a fifth of the time that objects for each instruction take, and a kernel is some thousand
of them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

__all__ = ["Builder", "Value", "constant", "element", "lanes_of", "mangled", "vector"]


class Value(NamedTuple):
    """An operand: its text and its LLVM type."""

    text: str
    type: str

    def __str__(self) -> str:
        return f"{self.type} {self.text}"


def vector(element_type: str, lanes: int) -> str:
    """The type of ``lanes`` elements; of one, the element's own."""
    return element_type if lanes == 1 else f"<{lanes} x {element_type}>"


def lanes_of(type_: str) -> int:
    return int(type_[1 : type_.index(" ")]) if type_[0] == "<" else 1


def element(type_: str) -> str:
    """The element type of a vector type, or the type itself."""
    return type_[type_.index(" x ") + 3 : -1] if type_[0] == "<" else type_


def mangled(type_: str) -> str:
    """A type as the names of intrinsics have it: ``v32f32``."""
    short = _SHORT.get(element(type_), element(type_))
    return short if lanes_of(type_) == 1 else f"v{lanes_of(type_)}{short}"


def constant(type_: str, value: int | str) -> Value:
    """The same number in all lanes; floating-point numbers are given as LLVM writes them."""
    kind, lanes = element(type_), lanes_of(type_)
    if isinstance(value, int):
        if kind == "i1":
            text = "true" if value & 1 else "false"
        elif kind[0] == "i":
            bits = int(kind[1:])
            value &= (1 << bits) - 1
            text = str(value - (1 << bits) if value >> (bits - 1) else value)
        elif kind == "ptr":
            text = "null" if not value else f"inttoptr (i64 {value} to ptr)"
        else:
            text = f"{float(value):.1f}" if kind != "half" else f"0xH{_half_bits(value):04X}"
    else:
        text = value
    if lanes == 1:
        return Value(text, kind)
    if text in ("0", "false", "0.0"):
        return Value("zeroinitializer", type_)
    return Value(f"<{', '.join([f'{kind} {text}'] * lanes)}>", type_)


def _half_bits(value: int) -> int:
    return int(struct.unpack("<H", struct.pack("<e", float(value)))[0])


class Builder:
    """The body of one function, written from top to bottom."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.allocas: list[str] = []  # belong into the entry block
        self.declared: dict[str, str] = {}  # external functions: name -> declaration
        self._count = 0

    # Names and lines

    def name(self, hint: str = "t") -> str:
        self._count += 1
        return f"{hint}{self._count}"

    def line(self, text: str) -> None:
        self.lines.append(f"  {text}")

    def label(self, name: str) -> None:
        self.lines.append(f"{name}:")

    def value(self, type_: str, text: str) -> Value:
        """The result of an instruction."""
        name = f"%{self.name()}"
        self.lines.append(f"  {name} = {text}")
        return Value(name, type_)

    # Instructions

    def op(self, opcode: str, a: Value, b: Value) -> Value:
        """``add``, ``fmul``, ``shl``, ...: two operands and a result of one type."""
        return self.value(a.type, f"{opcode} {a}, {b.text}")

    def compare(self, predicate: str, a: Value, b: Value) -> Value:
        """``icmp``/``fcmp`` with a predicate such as ``"icmp ult"``."""
        return self.value(vector("i1", lanes_of(a.type)), f"{predicate} {a}, {b.text}")

    def select(self, condition: Value, a: Value, b: Value) -> Value:
        return self.value(a.type, f"select {condition}, {a}, {b}")

    def cast(self, opcode: str, a: Value, kind: str) -> Value:
        """``zext``, ``sext``, ``trunc``, ``bitcast``, ``fptosi``, ... to elements of type ``kind``."""
        to = kind if kind[0] == "<" else vector(kind, lanes_of(a.type))
        return a if a.type == to else self.value(to, f"{opcode} {a} to {to}")

    def resize(self, a: Value, kind: str, *, signed: bool = False) -> Value:
        """An integer of another width."""
        have, want = int(element(a.type)[1:]), int(kind[1:])
        if have == want:
            return a
        return self.cast("trunc" if have > want else "sext" if signed else "zext", a, kind)

    def splat(self, a: Value, lanes: int) -> Value:
        """A scalar in all lanes."""
        if lanes == 1:
            return a
        type_ = vector(a.type, lanes)
        first = self.value(type_, f"insertelement {type_} poison, {a}, i32 0")
        return self.value(type_, f"shufflevector {first}, {type_} poison, <{lanes} x i32> zeroinitializer")

    def shuffle(self, a: Value, indices: Sequence[int], b: Value | None = None) -> Value:
        second = str(b) if b is not None else f"{a.type} poison"
        mask = ", ".join(f"i32 {index}" for index in indices)
        type_ = vector(element(a.type), len(indices))
        return self.value(type_, f"shufflevector {a}, {second}, <{len(indices)} x i32> <{mask}>")

    def extract(self, a: Value, index: Value | int) -> Value:
        at = str(index) if isinstance(index, Value) else f"i32 {index}"
        return self.value(element(a.type), f"extractelement {a}, {at}")

    def insert(self, a: Value, item: Value, index: Value | int) -> Value:
        at = str(index) if isinstance(index, Value) else f"i32 {index}"
        return self.value(a.type, f"insertelement {a}, {item}, {at}")

    def call(self, type_: str, function: str, *args: Value) -> Value:
        """A function outside of this one: an intrinsic, or one of the runtime's."""
        types = ", ".join(arg.type for arg in args)
        self.declared.setdefault(function, f"declare {type_} @{function}({types})")
        text = f"call {type_} @{function}({', '.join(map(str, args))})"
        if type_ == "void":
            self.line(text)
            return Value("", "void")
        return self.value(type_, text)

    def intrinsic(self, name: str, *args: Value, type_: str | None = None) -> Value:
        """``llvm.NAME`` for the operands' type: ``fma``, ``ctpop``, ``minimum``, ..."""
        return self.call(type_ or args[0].type, f"llvm.{name}.{mangled(args[0].type)}", *args)

    def any(self, a: Value) -> Value:
        """Whether a bit of a vector of i1 is set."""
        lanes = lanes_of(a.type)
        if lanes == 1:
            return a
        return self.compare("icmp ne", self.bits(a), constant(f"i{lanes}", 0))

    def bits(self, a: Value) -> Value:
        """A vector of i1 as an integer, lane 0 the lowest bit."""
        lanes = lanes_of(a.type)
        return self.value(f"i{lanes}", f"bitcast {a} to i{lanes}")

    def lanes(self, a: Value) -> Value:
        """An integer as a vector of i1."""
        bits = int(a.type[1:])
        return self.value(f"<{bits} x i1>", f"bitcast {a} to <{bits} x i1>")

    # Memory that is not checked: the runtime's own

    def alloca(self, type_: str, align: int = 64) -> Value:
        name = f"%{self.name('m')}"
        self.allocas.append(f"  {name} = alloca {type_}, align {align}")
        return Value(name, "ptr")

    def at(self, base: Value, offset: Value | int, kind: str = "i8") -> Value:
        """The address of element ``offset``."""
        if isinstance(offset, int):
            if not offset:
                return base
            offset = constant("i64", offset)
        return self.value("ptr", f"getelementptr {kind}, {base}, {offset}")

    def load(self, type_: str, address: Value, *, align: int = 1, order: str = "") -> Value:
        if order:
            return self.value(type_, f"load atomic {type_}, {address} {order}, align {align}")
        return self.value(type_, f"load {type_}, {address}, align {align}")

    def gather(self, kind: str, addresses: Value) -> Value:
        """An integer from each of a vector of addresses."""
        lanes = lanes_of(addresses.type)
        pointers, every = self.cast("inttoptr", addresses, "ptr"), constant(vector("i1", lanes), 1)
        type_ = vector(kind, lanes)
        function = f"llvm.masked.gather.{mangled(type_)}.v{lanes}p0"
        return self.call(type_, function, pointers, constant("i32", 1), every, Value("poison", type_))

    def store(self, a: Value, address: Value, *, align: int = 1, order: str = "") -> None:
        if order:
            self.line(f"store atomic {a}, {address} {order}, align {align}")
        else:
            self.line(f"store {a}, {address}, align {align}")

    # Control flow

    def jump(self, label: str) -> None:
        self.line(f"br label %{label}")

    def branch(self, condition: Value, yes: str, no: str, *, likely: bool | None = None) -> None:
        weights = "" if likely is None else f", !prof !{0 if likely else 1}"
        self.line(f"br {condition}, label %{yes}, label %{no}{weights}")

    @contextmanager
    def when(self, condition: Value, *, likely: bool | None = None) -> Iterator[None]:
        """A part that runs if ``condition`` holds; it may leave the function."""
        inside, after = self.name("when"), self.name("after")
        self.branch(condition, inside, after, likely=likely)
        self.label(inside)
        yield
        if not self.lines[-1].lstrip().startswith(("ret ", "br ", "switch ", "unreachable")):
            self.jump(after)
        self.label(after)

    @contextmanager
    def each_bit(self, mask: Value) -> Iterator[Value]:
        """A loop over the set bits of an integer, lowest first; gives the number of the bit."""
        bits = int(mask.type[1:])
        head, body, done = self.name("bits"), self.name("bit"), self.name("done")
        left = self.alloca(mask.type, 8)
        self.store(mask, left, align=4)
        self.jump(head)
        self.label(head)
        now = self.load(mask.type, left, align=4)
        self.branch(self.compare("icmp eq", now, constant(mask.type, 0)), done, body)
        self.label(body)
        index = self.call(mask.type, f"llvm.cttz.i{bits}", now, constant("i1", 1))
        self.store(self.op("and", now, self.op("sub", now, constant(mask.type, 1))), left, align=4)
        yield index
        self.jump(head)
        self.label(done)

    @contextmanager
    def count(self, end: Value) -> Iterator[Value]:
        """A loop with ``0 <= i < end``; gives i."""
        head, body, done = self.name("loop"), self.name("body"), self.name("done")
        place = self.alloca(end.type, 8)
        self.store(constant(end.type, 0), place, align=4)
        self.jump(head)
        self.label(head)
        now = self.load(end.type, place, align=4)
        self.branch(self.compare("icmp ult", now, end), body, done)
        self.label(body)
        yield now
        self.store(self.op("add", now, constant(end.type, 1)), place, align=4)
        self.jump(head)
        self.label(done)

    def function(self, signature: str, *, attributes: str = "") -> str:
        """The whole text: ``define SIGNATURE { entry: ... }``."""
        return "\n".join([f"define {signature} {attributes}{{", "entry:", *self.allocas, *self.lines, "}"])


_SHORT = {"float": "f32", "double": "f64", "half": "f16", "bfloat": "bf16"}
BRANCH_WEIGHTS = '!0 = !{!"branch_weights", i32 100000, i32 1}\n!1 = !{!"branch_weights", i32 1, i32 100000}\n'
