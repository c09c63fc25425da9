"""Floating-point arithmetic, functions and comparisons.

Numbers of the narrow formats are computed with in f32 and rounded once: f32 holds them and their products exactly, and
has more than twice as many digits as a sum needs. Only ``fma`` needs an f32 that is rounded to odd.

Source: PTX ISA, "Floating Point Instructions", "Half Precision Floating Point Instructions", "Half Precision Comparison
Instructions".
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..ir import Builder, Value, constant, element, lanes_of, mangled, vector
from ..ptx import SIZES, Instruction, Operand, Register
from .approximate import FUNCTIONS
from .core import Lower, lowers, pair, splat_constant

__all__ = [
    "FORMATS",
    "ROUNDINGS",
    "extremum",
    "float_arithmetic",
    "float_compare",
    "flush",
    "is_float",
    "narrow",
    "number",
    "odd",
    "packed_set",
    "packed_setp",
    "read_numbers",
    "relu",
    "round_off",
    "rounded",
    "saturate",
    "widen",
    "word",
    "words",
]

_LLVM_ROUNDING = {"rz": 0, "rn": 1, "rp": 2, "rm": 3}  # as llvm.set.rounding numbers them
ROUNDINGS = tuple(_LLVM_ROUNDING)


class Format(NamedTuple):
    """A binary format, by its bits."""

    bits: int
    fraction: int  # bits of it
    nan: int  # the one that instructions give

    @property
    def word(self) -> str:
        return f"i{self.bits}"

    @property
    def sign(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def infinity(self) -> int:
        return self.sign - (1 << self.fraction)


FORMATS = {
    "f16": Format(16, 10, 0x7FFF),
    "bf16": Format(16, 7, 0x7FFF),
    "f32": Format(32, 23, 0x7FFFFFFF),
    "f64": Format(64, 52, 0xFFF8000000000000),
}


def is_float(type_: str) -> bool:
    return type_.removesuffix("x2") in FORMATS


def shape(type_: str) -> tuple[str, int]:
    """A type's format, and how many numbers of it a register holds."""
    name = type_.removesuffix("x2")
    return name, 1 if name == type_ else 2


# Constants and bits


def number(like: Value, x: float) -> Value:
    """A constant of the type of ``like``: f32 or f64."""
    kind = element(like.type)
    code, back = ("<f", "<I") if kind == "float" else ("<d", "<Q")
    (bits,) = struct.unpack(back, struct.pack(code, x))
    return splat_constant(kind, bits, lanes_of(like.type))


def word(like: Value, bits: int) -> Value:
    """A constant with the lanes of ``like`` and as many bits as its elements have."""
    kind = element(like.type)
    return constant(vector({"float": "i32", "double": "i64", "half": "i16"}.get(kind, kind), lanes_of(like.type)), bits)


def words(b: Builder, value: Value) -> Value:
    """The bits of numbers."""
    return b.cast("bitcast", value, element(word(value, 0).type))


def as_number(b: Builder, bits: Value) -> Value:
    """f32 or f64 numbers from their bits."""
    return b.cast("bitcast", bits, {"i32": "float", "i64": "double"}[element(bits.type)])


# Between formats, and between registers and numbers


def widen(b: Builder, value: Value, name: str) -> Value:
    """Numbers of a format as f32 or f64, which they are computed in."""
    if name == "f16":
        return b.cast("fpext", b.cast("bitcast", value, "half"), "float")
    if name == "bf16":
        wide = b.cast("zext", value, "i32")
        return as_number(b, b.op("shl", wide, word(wide, 16)))
    return b.cast("bitcast", value, "double" if name == "f64" else "float")


def narrow(e: Lower, value: Value, name: str, rounding: str = "rn", *, ftz: bool = False) -> Value:
    """The bits of numbers, rounded to a format that is no wider; f64 numbers as they are.

    A NaN becomes the one that instructions give; that of an f64 number keeps its sign and upper bits, and is quiet.
    """
    b, format_ = e.b, FORMATS[name]
    if name == "f64":
        return value
    lost = b.compare("fcmp uno", value, value)
    nan = constant(vector(format_.word, lanes_of(value.type)), format_.nan)
    if element(value.type) == "double":
        nan = _cut_nan(b, words(b, value), format_)
        value = odd(e, "fptrunc", value) if format_.bits == 16 else computed(e, "fptrunc", rounding, [value], name, ftz)
    if name == "f32":
        bits = words(b, value)
    elif name == "bf16":
        bits = b.cast("trunc", round_off(b, words(b, value), 16, rounding), "i16")
    else:
        half = b.cast("fptrunc", value, "half")
        bits = b.cast("bitcast", half, "i16")
        if rounding != "rn":
            bits = _step_back(b, bits, b.cast("fpext", half, "float"), value, rounding)
    return b.select(lost, nan, bits)  # of bits: LLVM does not tell one NaN from another


def _cut_nan(b: Builder, bits: Value, format_: Format) -> Value:
    """A quiet NaN of a format from the bits of f64 NaNs."""
    sign = b.op("lshr", bits, word(bits, 64 - format_.bits))
    upper = b.op("lshr", bits, word(bits, 52 - format_.fraction))
    sign, upper = (b.cast("trunc", value, format_.word) for value in (sign, upper))
    quiet = b.op("or", upper, word(upper, 1 << (format_.fraction - 1)))
    rest = b.op("and", quiet, word(upper, format_.sign - 1))
    return b.op("or", b.op("and", sign, word(sign, format_.sign)), rest)


def round_off(b: Builder, bits: Value, count: int, rounding: str) -> Value:
    """The bits of f32 numbers without the ``count`` lowest, shifted down; anything for a NaN."""
    below = (1 << count) - 1
    if rounding == "rn":
        last = b.op("and", b.op("lshr", bits, word(bits, count)), word(bits, 1))
        bits = b.op("add", bits, b.op("add", last, word(bits, below >> 1)))
    elif rounding == "rna":
        bits = b.op("add", bits, word(bits, (below >> 1) + 1))
    elif rounding != "rz":
        negative = b.op("ashr", bits, word(bits, 31))
        away = negative if rounding == "rm" else b.op("xor", negative, word(bits, -1))
        bits = b.op("add", bits, b.op("and", away, word(bits, below)))
    return b.op("lshr", bits, word(bits, count))


def _step_back(b: Builder, bits: Value, nearest: Value, exact: Value, rounding: str) -> Value:
    """Where the nearest number is on the wrong side of the exact one, the neighbour on the other side."""
    minus = b.compare("icmp slt", bits, word(bits, 0))
    toward_zero = word(bits, -1)
    if rounding == "rz":
        beyond = b.compare("fcmp ogt", b.intrinsic("fabs", nearest), b.intrinsic("fabs", exact))
        step = toward_zero
    else:
        beyond = b.compare("fcmp ogt" if rounding == "rm" else "fcmp olt", nearest, exact)
        away = word(bits, 1)
        step = b.select(minus, *((away, toward_zero) if rounding == "rm" else (toward_zero, away)))
    return b.select(beyond, b.op("add", bits, step), bits)


def read_numbers(e: Lower, operand: Operand, type_: str, *, ftz: bool = False) -> Value:
    """An operand as f32 or f64 numbers; of a packed type, two for each lane, the lower one first."""
    return _numbers(e, _register(e, operand, type_), type_, ftz)


def _register(e: Lower, operand: Operand, type_: str) -> Value:
    return e.read(operand, type_ if type_ in ("f32", "f64") else f"b{8 * SIZES[type_]}")


def _numbers(e: Lower, value: Value, type_: str, ftz: bool) -> Value:
    name, count = shape(type_)
    if count == 2:
        value = split(e, value, FORMATS[name].word)
    return widen(e.b, flush(e.b, value, name) if ftz else value, name)


def split(e: Lower, value: Value, kind: str) -> Value:
    """The parts of registers, the lowest first."""
    parts = int(element(value.type)[1:]) // int(kind[1:])
    type_ = vector(kind, parts * e.lanes)
    return value if value.type == type_ else e.b.value(type_, f"bitcast {value} to {type_}")


def join(e: Lower, parts: Value, kind: str) -> Value:
    """Registers from their parts."""
    type_ = vector(kind, e.lanes)
    return parts if parts.type == type_ else e.b.value(type_, f"bitcast {parts} to {type_}")


# What modifiers do


def flush(b: Builder, value: Value, name: str) -> Value:
    """Subnormal numbers of a format, or their bits, become zeros of their sign (``.ftz``)."""
    bits = words(b, value)
    exponent = b.op("and", bits, word(bits, FORMATS[name].infinity))
    zero = b.op("and", bits, word(bits, FORMATS[name].sign))
    return b.cast("bitcast", b.select(b.compare("icmp eq", exponent, word(bits, 0)), zero, bits), element(value.type))


def saturate(b: Builder, value: Value) -> Value:
    """Into [0, 1]; a NaN becomes 0 (``.sat``)."""
    zero, one = number(value, 0.0), number(value, 1.0)
    positive = b.select(b.compare("fcmp ogt", value, zero), value, zero)
    return b.select(b.compare("fcmp olt", positive, one), positive, one)


def relu(b: Builder, value: Value) -> Value:
    """Negative numbers become 0; a NaN stays (``.relu``)."""
    zero = number(value, 0.0)
    return b.select(b.compare("fcmp ole", value, zero), zero, value)


# Roundings that the processor has to be set to


def rounded(e: Lower, operation: str, rounding: str, *operands: Value) -> Value:
    """``fadd``, ``fsub``, ``fmul``, ``fdiv``, ``fma``, ``sqrt``, or ``fptrunc`` to f32, rounded as the ISA says."""
    b, type_ = e.b, operands[0].type
    result = vector("float", lanes_of(type_)) if operation == "fptrunc" else type_
    if rounding != "rn":
        name = f"{operation}_{rounding}_{mangled(type_)}"
        text = e.helper(name, lambda inner: _rounded_text(inner, name, operation, rounding, result, operands))
        return b.call(result, text, *operands)
    if operation in ("fma", "sqrt"):
        return b.intrinsic(operation, *operands)
    return b.op(operation, *operands) if len(operands) == 2 else b.cast(operation, operands[0], "float")


def odd(e: Lower, operation: str, *operands: Value) -> Value:
    """The same, rounded to odd: the exact result, or of its two neighbours the one whose bits end in 1.

    Rounding this again to fewer digits gives what rounding the exact result gives. (``fma`` is that of two numbers
    whose product f32 holds, as those of the narrow formats are.)
    """
    b = e.b
    if operation == "fma":
        return _odd_fma(b, *operands)
    down, up = (rounded(e, operation, rounding, *operands) for rounding in ("rm", "rp"))
    return b.select(b.cast("trunc", words(b, down), "i1"), down, up)


def _odd_fma(b: Builder, x: Value, y: Value, z: Value) -> Value:
    """The rounding error of a sum is a number, by Knuth's TwoSum; infinities make it a NaN.

    Products of bf16 numbers that overflow or lose digits do no harm: no such sum is inexact and half way between two
    numbers of bf16.
    """
    product, total = b.op("fmul", x, y), b.intrinsic("fma", x, y, z)
    of_z = b.op("fsub", total, product)
    error = b.op("fadd", b.op("fsub", product, b.op("fsub", total, of_z)), b.op("fsub", z, of_z))
    bits = words(b, total)
    inexact = b.compare("fcmp one", error, number(error, 0.0))
    even = b.compare("icmp eq", b.op("and", bits, word(bits, 1)), word(bits, 0))
    step = b.op("or", b.op("ashr", b.op("xor", bits, words(b, error)), word(bits, 31)), word(bits, 1))
    return as_number(b, b.select(b.op("and", inexact, even), b.op("add", bits, step), bits))


def _rounded_text(
    b: Builder, name: str, operation: str, rounding: str, result: str, operands: tuple[Value, ...]
) -> str:
    """A function of one operation: one, as LLVM 15 takes two of the same for one."""
    places = [Value(f"%x{position}", operand.type) for position, operand in enumerate(operands)]
    types = [result, *({operands[0].type} - {result})]
    function = f"llvm.experimental.constrained.{operation}.{'.'.join(map(mangled, types))}"
    b.declared[function] = f"declare {result} @{function}({', '.join(o.type for o in operands)}, metadata, metadata)"
    how = 'metadata !"round.dynamic", metadata !"fpexcept.ignore"'
    b.call("void", "llvm.set.rounding", constant("i32", _LLVM_ROUNDING[rounding]))
    found = b.value(result, f"call {result} @{function}({', '.join(map(str, places))}, {how}) strictfp")
    b.call("void", "llvm.set.rounding", constant("i32", _LLVM_ROUNDING["rn"]))
    b.line(f"ret {found}")
    signature = f"internal {result} @{name}({', '.join(map(str, places))})"
    return b.function(signature, attributes="noinline strictfp ")


def computed(e: Lower, operation: str, rounding: str, operands: list[Value], name: str, ftz: bool) -> Value:
    """The same in a format; if it is a narrow one, what is left is one rounding to it.

    ``ftz`` flushes what is subnormal when rounded as if exponents had no end. Where that is not the same as being
    subnormal at last, the operation is done on larger numbers too, with a result 2^32 times as large.
    """
    b, half = e.b, FORMATS[name].bits == 16
    result = odd(e, operation, *operands) if operation == "fma" and half else rounded(e, operation, rounding, *operands)
    if not ftz:
        return result
    size, least = result, 2.0**-126
    if half:
        least = 2.0**-14 * (1 - 2.0**-12)
    elif operation not in ("fadd", "fsub"):
        larger = [x if at == 1 else b.op("fmul", x, number(x, 2.0**32)) for at, x in enumerate(operands)]
        size, least = rounded(e, operation, rounding, *larger), 2.0 ** (32 - 126)
    tiny = b.compare("fcmp olt", b.intrinsic("fabs", size), number(size, least))
    return b.select(tiny, b.intrinsic("copysign", number(result, 0.0), result), result)


# Arithmetic

_OPERATIONS = {"add": "fadd", "sub": "fsub", "mul": "fmul", "fma": "fma", "mad": "fma", "div": "fdiv"}
_KNOWN = {*ROUNDINGS, "ftz", "sat", "relu", "NaN", "xorsign", "abs", "approx", "full", *SIZES}


def _rounding(e: Lower, i: Instruction) -> str:
    """That of an instruction, after a look at its modifiers."""
    for modifier in i.modifiers:
        if modifier not in _KNOWN:
            raise e.unsupported(why=f".{modifier}")
    rounding = next((m for m in i.modifiers if m in ROUNDINGS), "rn")
    if rounding != "rn" and shape(i.types[0])[0] in ("f16", "bf16"):
        raise e.unsupported(why=f".{rounding}")
    return rounding


def float_arithmetic(e: Lower, i: Instruction) -> None:
    """add, sub, mul, fma, mad, div, min, max, neg and abs of all floating-point types."""
    type_, rounding = i.types[0], _rounding(e, i)
    name, _ = shape(type_)
    types = [i.types[-1]] * (len(i.operands) - 2) + [type_]  # the last operand is as wide as the result
    ftz = "ftz" in i.modifiers

    def compute(b: Builder, values: list[Value]) -> Value:
        if i.opcode in ("min", "max"):
            result = extremum(b, i.opcode, values, i.modifiers)
        elif i.opcode in ("neg", "abs"):
            result = b.value(values[0].type, f"fneg {values[0]}") if i.opcode == "neg" else b.intrinsic("fabs", *values)
        elif {"approx", "full"} & set(i.modifiers):
            result = _quotient(b, i, *values)
        else:
            result = computed(e, _OPERATIONS[i.opcode], rounding, values, name, ftz)
        if "sat" in i.modifiers:
            result = saturate(b, result)
        return relu(b, result) if "relu" in i.modifiers else result

    _write(e, i, types, compute)


def _write(e: Lower, i: Instruction, types: list[str], compute: Callable[[Builder, list[Value]], Value]) -> None:
    """The result of an instruction, which ``compute`` makes of numbers; of narrow ones, in a function of its own."""
    type_, ftz, target = i.types[0], "ftz" in i.modifiers, i.operands[0]
    name, count = shape(type_)
    operands = [_register(e, operand, each) for operand, each in zip(i.operands[1:], types, strict=True)]
    flushed = [type_ == "f32" and _is_flushed(e, operand) for operand in i.operands[1:]]

    def whole(registers: list[Value]) -> Value:
        given = zip(registers, types, flushed, strict=True)
        result = narrow(
            e, compute(e.b, [_numbers(e, value, each, ftz and not done) for value, each, done in given]), name
        )
        return join(e, result, f"i{8 * SIZES[type_]}") if count == 2 else result

    if FORMATS[name].bits == 16 or i.opcode in FUNCTIONS:
        symbol = f"{i.name}.{e.lanes}" + ".flushed" * any(flushed)
        result = e.outlined(symbol, vector(f"i{8 * SIZES[type_]}", e.lanes), operands, whole)
    else:
        result = whole(operands)
    e.write(target, result, type_)
    if ftz and type_ == "f32" and isinstance(target, Register) and target in e.env and i.guard is None:
        e.flushed[target] = e.env[target]


def _is_flushed(e: Lower, operand: Operand) -> bool:
    return isinstance(operand, Register) and operand in e.flushed and e.flushed[operand] == e.env.get(operand)


def extremum(b: Builder, operation: str, values: list[Value], modifiers: Sequence[str] = ()) -> Value:
    """``min`` or ``max``. A NaN loses against a number, or wins (``.NaN``); -0 is below +0."""
    absolute = "abs" in modifiers
    operands = [b.intrinsic("fabs", value) for value in values] if absolute else values
    result = operands[0]
    for other in operands[1:]:
        first = b.compare("fcmp olt" if operation == "min" else "fcmp ogt", result, other)
        both = b.op("or" if operation == "min" else "and", words(b, result), words(b, other))  # of equal ones
        equal = b.compare("fcmp oeq", result, other)
        chosen = b.select(first, result, b.select(equal, as_number(b, both), other))
        if "NaN" in modifiers:
            result = b.select(b.compare("fcmp uno", result, other), number(result, math.nan), chosen)
        else:
            result = b.select(b.compare("fcmp uno", other, other), result, chosen)
    if "xorsign" in modifiers:
        sign = b.op("and", b.op("xor", *(words(b, value) for value in values)), word(result, FORMATS["f32"].sign))
        result = as_number(b, b.op("or", words(b, result), sign))
    return result


def _quotient(b: Builder, i: Instruction, a: Value, divisor: Value) -> Value:
    """Of ``div.approx`` and ``div.full``. The first multiplies by a reciprocal, which is 0 beyond 2^126."""
    result = b.op("fdiv", a, divisor)
    if "approx" in i.modifiers:
        size = b.intrinsic("fabs", divisor)
        large = b.compare("fcmp ogt", size, number(size, 2.0**126))
        sign = b.op("and", b.op("xor", words(b, a), words(b, divisor)), word(a, FORMATS["f32"].sign))
        finite = b.compare("fcmp olt", b.intrinsic("fabs", a), number(a, math.inf))
        result = b.select(large, b.select(finite, as_number(b, sign), number(a, math.nan)), result)
    return flush(b, result, "f32") if "ftz" in i.modifiers else result


# Functions


@lowers("rcp", "sqrt", "rsqrt", *FUNCTIONS)
def function(e: Lower, i: Instruction) -> None:
    type_, rounding = i.types[0], _rounding(e, i)
    approximate, ftz = "approx" in i.modifiers, "ftz" in i.modifiers

    def compute(b: Builder, values: list[Value]) -> Value:
        upper = approximate and ftz and type_ == "f64"
        x = _upper_word(b, values[0]) if upper else values[0]
        if i.opcode in FUNCTIONS:
            result = FUNCTIONS[i.opcode](b, x)
        elif i.opcode == "sqrt":
            result = rounded(e, "sqrt", rounding, x)
        elif i.opcode == "rsqrt":
            result = b.op("fdiv", number(x, 1.0), b.intrinsic("sqrt", x))
        else:
            result = computed(e, "fdiv", rounding, [number(x, 1.0), x], type_, ftz and not approximate)
        if ftz and approximate:
            result = flush(b, result, "f64" if upper else "f32")
        return _upper_word(b, result) if upper else result

    _write(e, i, [type_], compute)


def _upper_word(b: Builder, value: Value) -> Value:
    """f64 numbers without their lower 32 bits, which may make an infinity of a NaN."""
    bits = words(b, value)
    return as_number(b, b.op("and", bits, word(bits, 0xFFFFFFFF00000000)))


@lowers("copysign")
def copysign(e: Lower, i: Instruction) -> None:
    """The second operand with the sign of the first."""
    type_ = i.types[0]
    sign, value = (e.read(operand, type_) for operand in i.operands[1:])
    e.write(i.operands[0], e.b.intrinsic("copysign", value, sign), type_)


@lowers("testp")
def testp(e: Lower, i: Instruction) -> None:
    """Zeros count as normal."""
    b, test, format_ = e.b, i.modifiers[0], FORMATS[i.types[0]]
    bits = e.read(i.operands[1], f"b{format_.bits}")
    magnitude = b.op("and", bits, word(bits, format_.sign - 1))
    infinity = word(bits, format_.infinity)
    least_normal = word(bits, (1 << format_.fraction) - 1)
    below = b.op("sub", magnitude, word(bits, 1))  # zero comes out largest
    if test == "normal":
        finite = b.compare("icmp ult", magnitude, infinity)
        result = b.op("and", finite, b.compare("icmp uge", below, least_normal))
    elif test == "subnormal":
        result = b.compare("icmp ult", below, least_normal)
    else:
        relation = {"finite": "ult", "infinite": "eq", "number": "ule", "notanumber": "ugt"}[test]
        result = b.compare(f"icmp {relation}", magnitude, infinity)
    e.write(i.operands[0], result, "pred")


# Comparisons

_COMPARISONS = {
    **{name: f"fcmp o{name}" for name in ("eq", "lt", "le", "gt", "ge")},
    **{f"{name}u": f"fcmp u{name}" for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "ne": "fcmp one",
    "num": "fcmp ord",
    "nan": "fcmp uno",
}


def float_compare(e: Lower, comparison: str, a: Value, c: Value, type_: str, ftz: bool) -> Value:
    """Of values as they are in registers of a type that holds one number."""
    b = e.b
    if ftz:
        a, c = flush(b, a, type_), flush(b, c, type_)
    return b.compare(_COMPARISONS[comparison], widen(b, a, type_), widen(b, c, type_))


def _packed_compare(e: Lower, i: Instruction, type_: str) -> Value:
    """For both halves of each lane."""
    a, c = (split(e, e.read(operand, "b32"), "i16") for operand in i.operands[1:3])
    return float_compare(e, i.modifiers[0], a, c, shape(type_)[0], "ftz" in i.modifiers)


def _combining(i: Instruction) -> str | None:
    return next((m for m in i.modifiers[1:] if m in ("and", "or", "xor")), None)


def packed_setp(e: Lower, i: Instruction, type_: str) -> None:
    """``setp`` of two numbers: the first predicate is that of the lower half."""
    b = e.b
    both = _packed_compare(e, i, type_)
    halves = [b.extract(both, at) if e.lanes == 1 else b.shuffle(both, range(at, 2 * e.lanes, 2)) for at in (0, 1)]
    if operation := _combining(i):
        other = e.read(i.operands[3], "pred")
        halves = [b.op(operation, half, other) for half in halves]
    for target, half in zip(pair(i.operands[0]), halves, strict=True):
        e.write(target, half, "pred")


def packed_set(e: Lower, i: Instruction, result_type: str, type_: str) -> None:
    """``set`` of two numbers: halves of ones, or 1.0, where the comparison holds."""
    b = e.b
    both = _packed_compare(e, i, type_)
    if operation := _combining(i):
        other = e.read(i.operands[3], "pred")
        twice = b.cast("sext", other, "i2")
        both = b.op(operation, both, b.value(both.type, f"bitcast {twice} to {both.type}"))
    true = {"f16x2": 0x3C00, "bf16x2": 0x3F80}.get(result_type, 0xFFFF)
    halves = vector("i16", 2 * e.lanes)
    result = b.select(both, constant(halves, true), constant(halves, 0))
    e.write(i.operands[0], join(e, result, "i32"), "b32")
