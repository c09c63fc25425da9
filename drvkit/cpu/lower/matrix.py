"""Matrix instructions of a warp: ``mma.sync`` and what moves its fragments.

A register of the warp holds 8 rows of A, or 8 columns of B, of four words each: lane 4g + t has word t of row g. A word
is one number or several that stand side by side; larger matrices take several registers. Of 8 rows of C and D lane
4g + t has the numbers 2t and 2t + 1 of row g: in one register as f16, else in two.

Products are exact. To C they are added one after another, k = 0 first, each sum rounded to nearest in the type of the
accumulator (f32 where that is f16, which is rounded to once, at the end). Hardware aligns several products and C to the
largest of them, drops what lies below, and truncates the sum, so the last bits differ where sums are not exact; its
sums of fp8 products keep fewer bits than f32.

Source: PTX ISA, "Warp Level Matrix Multiply-Accumulate Instructions".
"""

from __future__ import annotations

from typing import NamedTuple

from ..ir import Builder, Value, constant, vector
from ..ptx import Instruction
from .access import load_bytes, space_of, store_bytes
from .core import WARP, Lower, lowers, vector_elements
from .warp import meet_aligned

__all__ = ["Form", "accumulator", "numbers", "parts", "transposed"]

_TRANSPOSED = [8 * (2 * t + half) + g for g in range(8) for t in range(4) for half in range(2)]


class Form(NamedTuple):
    """What an ``mma`` or ``wgmma`` computes."""

    shape: str
    a: str  # types
    b: str
    accumulator: str
    saturates: bool

    @property
    def name(self) -> str:
        return "_".join(("mma", *self[:4])) + "_satfinite" * self.saturates

    @property
    def slabs(self) -> int:
        """Of 8 rows each."""
        return int(self.shape[1 : self.shape.index("n")]) // 8

    @property
    def depth(self) -> int:
        return int(self.shape[self.shape.index("k") + 1 :])

    @property
    def packed(self) -> int:
        """Numbers of A or B in a register."""
        return {"f16": 2, "bf16": 2, "tf32": 1, "f64": 1}.get(self.a, 4)

    @property
    def steps(self) -> int:
        """Words of a row of A, each of which meets one of a column of B."""
        return self.depth // self.packed

    @property
    def word(self) -> str:
        """A lane of a register."""
        return "i64" if self.a == "f64" else "i32"

    @property
    def nbytes(self) -> int:
        """Of a register."""
        return WARP * int(self.word[1:]) // 8

    @property
    def kind(self) -> str:
        """In which sums are made."""
        return {"s32": "i32", "f64": "double"}.get(self.accumulator, "float")

    @property
    def registers(self) -> tuple[int, int, int]:
        """Of A, B and C."""
        across = self.steps // 4
        return self.slabs * across, across, self.slabs * (1 if self.accumulator == "f16" else 2)


# Types of A and B that go together, their shapes, and the types of C.
_FORMS = (
    (("f16",), ("m16n8k8", "m16n8k16"), ("f16", "f32")),
    (("bf16",), ("m16n8k8", "m16n8k16"), ("f32",)),
    (("tf32",), ("m16n8k4", "m16n8k8"), ("f32",)),
    (("e4m3", "e5m2"), ("m16n8k16", "m16n8k32"), ("f16", "f32")),
    (("s8", "u8"), ("m8n8k16", "m16n8k16", "m16n8k32"), ("s32",)),
    (("f64",), ("m8n8k4", "m16n8k4", "m16n8k8", "m16n8k16"), ("f64",)),
)


@lowers("mma")
def mma(e: Lower, i: Instruction) -> None:
    form = _form(e, i)
    d, a, b_, c = map(vector_elements, i.operands)
    if (len(a), len(b_), len(c)) != form.registers or len(d) != len(c):
        raise e.unsupported(why="not as many registers as the shape has")
    meet_aligned(e, i)
    b, type_, nbytes = e.b, f"b{form.word[1:]}", form.nbytes
    given = (*a, *b_, *c)
    registers = e.buffer(form.word, WARP * len(given))
    for number, operand in enumerate(given):
        b.store(e.read(operand, type_), b.at(registers, nbytes * number), align=64)
    b.call("void", e.helper(form.name, lambda inner: _multiply(inner, form)), registers)
    for number, target in enumerate(d, len(given) - len(c)):
        e.write(target, b.load(vector(form.word, WARP), b.at(registers, nbytes * number), align=64), type_)


def _form(e: Lower, i: Instruction) -> Form:
    modifiers = [modifier for modifier in i.modifiers if modifier != "satfinite"]
    if modifiers[:2] != ["sync", "aligned"] or modifiers[3:5] != ["row", "col"] or len(modifiers) != 9:
        raise e.unsupported()
    _, _, shape, _, _, d, a, b, c = modifiers
    form = Form(shape, a, b, c, "satfinite" in i.modifiers)
    for types, shapes, accumulators in _FORMS:
        if a in types and b in types and shape in shapes and d == c in accumulators:
            if form.saturates and c != "s32":
                break
            return form
    raise e.unsupported()


def _multiply(b: Builder, form: Form) -> str:
    """A function of the registers of A, B and C in memory, one after another; those of C become D."""
    slabs, word = form.slabs, form.word
    of_a, of_b, of_c = form.registers
    each = of_c // slabs
    places = [b.at(Value("%registers", "ptr"), form.nbytes * number) for number in range(of_a + of_b + of_c)]
    rows = _staged(b, form, places[:of_a], slabs)
    columns = _staged(b, form, places[of_a : of_a + of_b], 1)
    places = places[of_a + of_b :]
    addends = [accumulator(b, form, places[each * slab : each * (slab + 1)]) for slab in range(slabs)]
    totals = [b.alloca(addend.type) for addend in addends]
    for total, addend in zip(totals, addends, strict=True):
        b.store(constant(addend.type, 0) if form.kind == "i32" else addend, total, align=64)
    with b.count(constant("i32", form.steps)) as step:
        left = b.load(vector(word, 8 * slabs), b.at(rows, step, f"[{8 * slabs} x {word}]"), align=32)
        right = b.load(vector(word, 8), b.at(columns, step, f"[8 x {word}]"), align=32)
        sums = [b.load(addend.type, total, align=64) for total, addend in zip(totals, addends, strict=True)]
        for position in range(form.packed):
            down = numbers(b, left, position, form.a)
            across = b.shuffle(numbers(b, right, position, form.b), [n for _ in range(8) for n in range(8)])
            for slab in range(slabs):
                factor = b.shuffle(down, [8 * slab + g for g in range(8) for _ in range(8)])
                if form.kind == "i32":
                    sums[slab] = b.op("add", sums[slab], b.op("mul", factor, across))
                else:
                    sums[slab] = b.intrinsic("fma", factor, across, sums[slab])
        for total, sum_ in zip(totals, sums, strict=True):
            b.store(sum_, total, align=64)
    for total, addend in zip(totals, addends, strict=True):
        result = b.load(addend.type, total, align=64)
        if form.kind == "i32":
            result = b.intrinsic("sadd.sat", result, addend) if form.saturates else b.op("add", result, addend)
        for words in parts(b, form, result):
            b.store(words, places.pop(0), align=64)
    b.line("ret void")
    return b.function(f"internal void @{form.name}(ptr noalias %registers)", attributes="noinline ")


_NAN = "0x7FFFFFFFE0000000"  # 0x7fffffff


def _staged(b: Builder, form: Form, places: list[Value], slabs: int) -> Value:
    """Memory with the words of one step after another: of each row of A, or of each column of B."""
    staged = b.alloca(f"[{form.steps} x [{8 * slabs} x {form.word}]]")
    for number, place in enumerate(places):
        words = b.load(vector(form.word, WARP), place, align=64)
        across, slab = divmod(number, slabs)
        for t in range(4):
            offset = form.nbytes // 4 * ((4 * across + t) * slabs + slab)
            b.store(b.shuffle(words, range(t, WARP, 4)), b.at(staged, offset), align=32)
    return staged


def accumulator(b: Builder, form: Form, places: list[Value]) -> Value:
    """8 rows of C, one after another."""
    words = [b.load(vector(form.word, WARP), place, align=64) for place in places]
    if form.accumulator == "f16":
        return b.cast("fpext", b.cast("bitcast", words[0], f"<{2 * WARP} x half>"), form.kind)
    mixed = b.shuffle(words[0], [lane + WARP * which for lane in range(WARP) for which in range(2)], words[1])
    return b.cast("bitcast", mixed, form.kind)


def parts(b: Builder, form: Form, rows: Value) -> list[Value]:
    """The registers of D: what `accumulator` does, backwards."""
    if form.kind == "float":
        rows = b.select(b.compare("fcmp uno", rows, rows), constant(rows.type, _NAN), rows)
    if form.accumulator == "f16":
        return [b.cast("bitcast", b.cast("fptrunc", rows, "half"), vector(form.word, WARP))]
    words = b.cast("bitcast", rows, form.word)
    return [b.shuffle(words, range(which, 2 * WARP, 2)) for which in range(2)]


def numbers(b: Builder, words: Value, position: int, type_: str) -> Value:
    """The number at ``position`` in each word, in the type of the accumulator."""

    def const(value: int) -> Value:
        return constant(words.type, value)

    if type_ == "f64":
        return b.cast("bitcast", words, "double")
    if type_ == "tf32":  # the low bits are not looked at
        return b.cast("bitcast", b.op("and", words, const(-1 << 13)), "float")
    if type_ == "bf16":
        bits = b.op("and", words, const(-1 << 16)) if position else b.op("shl", words, const(16))
        return b.cast("bitcast", bits, "float")
    if type_ in ("s8", "u8"):
        return b.op("ashr" if type_ == "s8" else "lshr", b.op("shl", words, const(24 - 8 * position)), const(24))
    width = 16 if type_ == "f16" else 8
    bits = b.cast("trunc", b.op("lshr", words, const(width * position)), "i16")
    short = bits.type
    if type_ == "e4m3":
        return _e4m3(b, bits)
    if type_ == "e5m2":
        bits = b.op("shl", bits, constant(short, 8))
    return b.cast("fpext", b.cast("bitcast", bits, "half"), "float")


def _e4m3(b: Builder, bits: Value) -> Value:
    """The low byte of each i16. As a half with the bits in their places it is a number of 2^-8 the size."""
    magnitude = b.op("and", bits, constant(bits.type, 0x7F))
    sign = b.op("shl", b.op("and", bits, constant(bits.type, 0x80)), constant(bits.type, 8))
    half = b.cast("bitcast", b.op("or", b.op("shl", magnitude, constant(bits.type, 7)), sign), "half")
    number = b.cast("fpext", half, "float")
    number = b.op("fmul", number, constant(number.type, 256))
    nan = b.compare("icmp eq", magnitude, constant(bits.type, 0x7F))
    return b.select(nan, constant(number.type, _NAN), number)


# Fragments


@lowers("ldmatrix")
def ldmatrix(e: Lower, i: Instruction) -> None:
    """Lane r of the m-th eight gives the address of row r of matrix m."""
    targets = vector_elements(i.operands[0])
    rows = _rows(e, i, len(targets))
    meet_aligned(e, i)
    values = load_bytes(e, e.address(i.operands[1], space_of(i)), 16, rows)
    for number, target in enumerate(targets):
        words = e.b.load(vector("i32", WARP), e.b.at(values, 4 * WARP * number), align=64)
        e.write(target, transposed(e.b, words) if "trans" in i.modifiers else words, "b32")


@lowers("stmatrix")
def stmatrix(e: Lower, i: Instruction) -> None:
    """`ldmatrix` the other way."""
    sources = vector_elements(i.operands[1])
    rows = _rows(e, i, len(sources))
    meet_aligned(e, i)
    values = e.buffer("[16 x i8]")
    for number, source in enumerate(sources):
        words = e.read(source, "b32")
        words = transposed(e.b, words) if "trans" in i.modifiers else words
        e.b.store(words, e.b.at(values, 4 * WARP * number), align=64)
    store_bytes(e, e.address(i.operands[0], space_of(i)), 16, values, rows)


def _rows(e: Lower, i: Instruction, registers: int) -> Value:
    """The lanes whose addresses count."""
    rest = [modifier for modifier in i.modifiers if modifier not in ("trans", "shared", "shared::cta")]
    if rest != ["sync", "aligned", "m8n8", f"x{registers}", "b16"] or registers not in (1, 2, 4):
        raise e.unsupported()
    return constant("i32", (1 << 8 * registers) - 1)


@lowers("movmatrix")
def movmatrix(e: Lower, i: Instruction) -> None:
    if i.modifiers != ("sync", "aligned", "m8n8", "trans", "b16"):
        raise e.unsupported()
    meet_aligned(e, i)
    e.write(i.operands[0], transposed(e.b, e.read(i.operands[1], "b32")), "b32")


def transposed(b: Builder, words: Value) -> Value:
    """A fragment of 8 x 8 numbers of 16 bits."""
    halves = b.cast("bitcast", words, f"<{2 * WARP} x i16>")
    return b.cast("bitcast", b.shuffle(halves, _TRANSPOSED), words.type)
