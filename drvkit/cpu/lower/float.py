"""Floating-point arithmetic, functions and comparisons.

Numbers of the narrow formats are computed with in f32 and rounded once: f32 holds them and their products exactly, and
has more than twice as many digits as a sum needs. Only ``fma`` needs an f32 that is rounded to odd.

Source: PTX ISA, "Floating Point Instructions", "Half Precision Floating Point Instructions", "Half Precision Comparison
Instructions".
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from ..ir import Builder, Value, constant, element, lanes_of, mangled, vector
from ..ptx import SIZES, Instruction, Operand, Register
from .approximate import function_text
from .core import Lower, lowers, pair, splat_constant

__all__ = [
    "FORMATS",
    "ROUNDINGS",
    "Format",
    "computed",
    "float_arithmetic",
    "float_compare",
    "flush",
    "is_float",
    "join",
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
    "shape",
    "widen",
    "word",
    "words",
    "write_numbers",
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
    nan = word(value, format_.nan) if element(value.type) == "float" else words(b, value)
    nan = _cut_nan(b, nan, format_) if element(value.type) == "double" else b.cast("trunc", nan, format_.word)
    lost = b.compare("fcmp uno", value, value)
    if element(value.type) == "double":
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
    name, count = shape(type_)
    if count == 1:
        value = e.read(operand, name if name in ("f32", "f64") else "b16")
    else:
        value = split(e, e.read(operand, f"b{8 * SIZES[type_]}"), FORMATS[name].word)
    if isinstance(operand, Register) and type_ == "f32" and operand in e.flushed:
        ftz = ftz and e.flushed[operand] != e.env.get(operand)
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


def write_numbers(e: Lower, operand: Operand, value: Value, type_: str, *, ftz: bool = False) -> None:
    """A result, rounded to its type. With ``ftz`` it is known to have no subnormal numbers."""
    name, count = shape(type_)
    result = narrow(e, value, name)
    if count == 2:
        result = join(e, result, f"i{8 * SIZES[type_]}")
    e.write(operand, result, type_)
    if ftz and type_ == "f32" and isinstance(operand, Register) and operand in e.env and e.i.guard is None:
        e.flushed[operand] = e.env[operand]


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

    Rounding this again to fewer digits gives what rounding the exact result gives.
    """
    b = e.b
    down, up = (rounded(e, operation, rounding, *operands) for rounding in ("rm", "rp"))
    return b.select(b.cast("trunc", words(b, down), "i1"), down, up)


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
    b, type_, ftz = e.b, i.types[0], "ftz" in i.modifiers
    rounding = _rounding(e, i)
    name, _ = shape(type_)
    types = [i.types[-1]] * (len(i.operands) - 2) + [type_]  # the last operand is as wide as the result
    values = [read_numbers(e, operand, each, ftz=ftz) for operand, each in zip(i.operands[1:], types, strict=True)]
    if i.opcode in ("min", "max"):
        result = _extremum(b, i, values)
    elif i.opcode in ("neg", "abs"):
        result = b.value(values[0].type, f"fneg {values[0]}") if i.opcode == "neg" else b.intrinsic("fabs", *values)
    else:
        result = computed(e, _OPERATIONS[i.opcode], rounding, values, name, ftz)
        if "approx" in i.modifiers:
            result = _quotient_of_large(b, result, *values)
    if "sat" in i.modifiers:
        result = saturate(b, result)
    if "relu" in i.modifiers:
        result = relu(b, result)
    write_numbers(e, i.operands[0], result, type_, ftz=ftz)


def _extremum(b: Builder, i: Instruction, values: list[Value]) -> Value:
    """A NaN loses against a number, or wins (``.NaN``); -0 is below +0."""
    absolute = "abs" in i.modifiers
    operands = [b.intrinsic("fabs", value) for value in values] if absolute else values
    result = operands[0]
    for other in operands[1:]:
        first = b.compare("fcmp olt" if i.opcode == "min" else "fcmp ogt", result, other)
        both = b.op("or" if i.opcode == "min" else "and", words(b, result), words(b, other))  # of equal ones
        equal = b.compare("fcmp oeq", result, other)
        chosen = b.select(first, result, b.select(equal, as_number(b, both), other))
        if "NaN" in i.modifiers:
            result = b.select(b.compare("fcmp uno", result, other), _nan(result), chosen)
        else:
            result = b.select(b.compare("fcmp uno", other, other), result, chosen)
    if "xorsign" in i.modifiers:
        sign = b.op("and", b.op("xor", *(words(b, value) for value in values)), word(result, FORMATS["f32"].sign))
        result = as_number(b, b.op("or", words(b, result), sign))
    return result


def _quotient_of_large(b: Builder, quotient: Value, a: Value, divisor: Value) -> Value:
    """``div.approx`` multiplies by a reciprocal that is 0 for divisors beyond 2^126."""
    size = b.intrinsic("fabs", divisor)
    large = b.compare("fcmp ogt", size, number(size, 2.0**126))
    sign = b.op("and", b.op("xor", words(b, a), words(b, divisor)), word(a, FORMATS["f32"].sign))
    finite = b.compare("fcmp olt", b.intrinsic("fabs", a), number(a, float("inf")))
    none = b.select(finite, as_number(b, sign), _nan(a))
    return b.select(large, none, quotient)


# Functions


@lowers("rcp", "sqrt", "rsqrt", "sin", "cos", "ex2", "lg2", "tanh")
def function(e: Lower, i: Instruction) -> None:
    b, type_, ftz = e.b, i.types[0], "ftz" in i.modifiers
    rounding = _rounding(e, i)
    upper = type_ == "f64" and "approx" in i.modifiers and ftz
    x = read_numbers(e, i.operands[1], type_, ftz=ftz and not upper)
    if upper:
        x = flush(b, _upper_word(b, x), type_)
    if i.opcode == "rcp":
        result = computed(e, "fdiv", rounding, [number(x, 1.0), x], type_, ftz and not upper)
    elif i.opcode == "sqrt":
        result = rounded(e, "sqrt", rounding, x)
    elif i.opcode == "rsqrt":
        result = b.op("fdiv", number(x, 1.0), b.intrinsic("sqrt", x))
    else:
        symbol, kind = f"{i.opcode}_{mangled(x.type)}", x.type
        result = b.call(kind, e.helper(symbol, lambda inner: function_text(inner, i.opcode, symbol, kind)), x)
    if upper:
        result = flush(b, _upper_word(b, result), type_)
    elif ftz:
        result = flush(b, result, "f32")
    write_numbers(e, i.operands[0], result, type_, ftz=ftz)


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
    for half, target in enumerate(pair(i.operands[0])):
        result = b.extract(both, half) if e.lanes == 1 else b.shuffle(both, range(half, 2 * e.lanes, 2))
        if operation := _combining(i):
            result = b.op(operation, result, e.read(i.operands[3], "pred"))
        e.write(target, result, "pred")


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
