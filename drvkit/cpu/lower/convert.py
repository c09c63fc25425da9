"""Conversions between all types.

Those that only later processors have (fp4, fp6, ue8m0) are done as those do them.

Source: PTX ISA, "cvt", "cvt.pack".
"""

from __future__ import annotations

from typing import NamedTuple

from ..ir import Builder, Value
from ..ptx import Instruction
from .core import Lower, kind_of, lowers
from .float import (
    FORMATS,
    ROUNDINGS,
    narrow,
    number,
    odd,
    read_numbers,
    relu,
    round_off,
    rounded,
    saturate,
    widen,
    word,
    words,
)

__all__: list[str] = []

_TO_INTEGER = {"rni": "roundeven", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}
_KNOWN = {*_TO_INTEGER, *ROUNDINGS, "rna", "ftz", "sat", "satfinite", "relu"}
_INTEGERS = {f"{sign}{bits}" for sign in "su" for bits in (8, 16, 32, 64)}


class _Small(NamedTuple):
    """A format of at most 8 bits; a number of it has a sign and then a magnitude."""

    bits: int
    fraction: int  # bits of it
    bias: int
    largest: int  # magnitude of a finite number
    nan: int | None = None

    @property
    def room(self) -> int:
        """The bits that a number takes in a register."""
        return 4 if self.bits == 4 else 8


_SMALL = {
    "e5m2x2": _Small(8, 2, 15, 0x7B, 0x7F),
    "e4m3x2": _Small(8, 3, 7, 0x7E, 0x7F),
    "e3m2x2": _Small(6, 2, 3, 0x1F),
    "e2m3x2": _Small(6, 3, 1, 0x1F),
    "e2m1x2": _Small(4, 1, 1, 0x7),
}


@lowers("cvt")
def cvt(e: Lower, i: Instruction) -> None:
    if i.modifiers[0] == "pack":
        _pack(e, i)
        return
    *modifiers, to, source = i.modifiers
    for modifier in modifiers:
        if modifier not in _KNOWN:
            raise e.unsupported(why=f".{modifier}")
    if to in _INTEGERS and source in _INTEGERS:
        _integer_to_integer(e, i, to, source)
    elif to in _INTEGERS and source in FORMATS:
        _float_to_integer(e, i, to, source)
    elif to in FORMATS and source in _INTEGERS:
        _integer_to_float(e, i, to, source)
    elif to == "f32" and source == "bf16" and not modifiers:
        e.write(i.operands[0], read_numbers(e, i.operands[1], source), to)  # a NaN too keeps its bits
    elif to in FORMATS and source in FORMATS:
        flushes = "ftz" in modifiers and source == "f32" and to != "f16"
        value = read_numbers(e, i.operands[1], source, ftz=flushes)
        e.write(i.operands[0], _float_bits(e, i, value, to), to)
    elif to == "tf32" and source == "f32":
        e.write(i.operands[0], _tf32(e, i, read_numbers(e, i.operands[1], "f32")), "b32")
    elif to in ("f16x2", "bf16x2") and source == "f32":
        _write_pair(e, i, [_float_bits(e, i, value, to[:-2]) for value in _read_pair(e, i, source)], 16)
    elif to in _SMALL and source in ("f32", "f16x2", "bf16x2"):
        small = _SMALL[to]
        _write_pair(e, i, [_to_small(e, i, value, small) for value in _read_pair(e, i, source)], small.room)
    elif to == "f16x2" and source in _SMALL:
        small = _SMALL[source]
        _write_pair(e, i, [_from_small(e, i, bits, small) for bits in _halves(e, i, small.room)], 16)
    elif to == "ue8m0x2" and source in ("f32", "bf16x2"):
        _write_pair(e, i, [_to_exponent(e, i, value) for value in _read_pair(e, i, source)], 8)
    elif to == "bf16x2" and source == "ue8m0x2":
        _write_pair(e, i, [_from_exponent(e.b, bits) for bits in _halves(e, i, 8)], 16)
    else:
        raise e.unsupported()


# Integers


def _limits(type_: str) -> tuple[int, int]:
    bits = int(type_[1:])
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if type_[0] == "s" else (0, (1 << bits) - 1)


def _clamped(b: Builder, value: Value, to: str, source: str) -> Value:
    """Integers of one type in the limits of another."""
    (low, high), (least, most) = _limits(to), _limits(source)
    sign = source[0]
    if high < most:
        value = b.intrinsic(f"{sign}min", value, word(value, high))
    if low > least:
        value = b.intrinsic(f"{sign}max", value, word(value, low))
    return value


def _integer_to_integer(e: Lower, i: Instruction, to: str, source: str) -> None:
    value = e.read(i.operands[1], source)
    if "sat" in i.modifiers:
        value = _clamped(e.b, value, to, source)
    e.write(i.operands[0], e.b.resize(value, kind_of(to), signed=source[0] == "s"), to)


def _pack(e: Lower, i: Instruction) -> None:
    """Two saturated integers, above them what the third operand holds."""
    b, to, source = e.b, i.modifiers[2], i.modifiers[3]
    if i.modifiers[1] != "sat" or source != "s32":
        raise e.unsupported()
    bits = int(to[1:])
    above, low = (_clamped(b, e.read(operand, source), to, source) for operand in i.operands[1:3])
    low = b.op("and", low, word(low, (1 << bits) - 1))
    result = b.op("or", b.op("shl", above, word(above, bits)), low)
    if bits < 16:
        result = b.op("and", result, word(result, (1 << 2 * bits) - 1))
        rest = b.op("shl", e.read(i.operands[3], "b32"), word(result, 2 * bits))
        result = b.op("or", result, rest)
    e.write(i.operands[0], result, "b32")


def _float_to_integer(e: Lower, i: Instruction, to: str, source: str) -> None:
    """Clamped. A NaN becomes 0, or the lowest integer where f64 or 64 bits take part."""
    b, bits, signed = e.b, int(to[1:]), to[0] == "s"
    value = read_numbers(e, i.operands[1], source, ftz="ftz" in i.modifiers and source == "f32")
    value = b.intrinsic(next(_TO_INTEGER[m] for m in i.modifiers if m in _TO_INTEGER), value)
    low, high = _limits(to)
    fits = b.op(
        "and",
        b.compare("fcmp oge", value, number(value, float(low))),
        b.compare("fcmp olt", value, number(value, float(high + 1))),
    )
    safe = b.select(fits, value, number(value, 0.0))
    kind = f"i{max(bits, 32)}"
    result = b.cast("fptosi" if signed or bits < 32 else "fptoui", safe, kind)
    lost = 1 << (bits - 1) if source == "f64" or bits == 64 else 0
    beyond = b.select(b.compare("fcmp ogt", value, number(value, 0.0)), word(result, high), word(result, low))
    beyond = b.select(b.compare("fcmp uno", value, value), word(result, lost), beyond)
    e.write(i.operands[0], b.resize(b.select(fits, result, beyond), kind_of(to)), to)


def _integer_to_float(e: Lower, i: Instruction, to: str, source: str) -> None:
    b, bits = e.b, int(source[1:])
    signed = source[0] == "s"
    rounding = next((m for m in i.modifiers if m in ROUNDINGS), "rn")
    convert = "sitofp" if signed else "uitofp"
    value = e.read(i.operands[1], source)
    if bits < 32 or (to == "f32" and rounding == "rn"):
        result = b.cast(convert, value, "float")
    elif bits == 32 or (to == "f64" and rounding == "rn"):
        result = b.cast(convert, value, "double")
    else:  # the sum of two halves that are exact
        high = b.cast(convert, b.op("ashr" if signed else "lshr", value, word(value, 32)), "double")
        high = b.op("fmul", high, number(high, 2.0**32))
        low = b.cast("uitofp", b.op("and", value, word(value, 0xFFFFFFFF)), "double")
        result = rounded(e, "fadd", rounding, high, low) if to == "f64" else odd(e, "fadd", high, low)
        if rounding == "rm":
            result = b.select(b.compare("icmp eq", value, word(value, 0)), number(result, 0.0), result)
    e.write(i.operands[0], _float_bits(e, i, result, to), to)


# Floating point


def _float_bits(e: Lower, i: Instruction, value: Value, to: str) -> Value:
    """f32 or f64 numbers as `narrow` gives them, by the instruction's modifiers."""
    b, modifiers = e.b, i.modifiers
    whole = next((_TO_INTEGER[m] for m in modifiers if m in _TO_INTEGER), None)
    if whole:
        value = b.intrinsic(whole, value)
    if "sat" in modifiers:
        value = saturate(b, value)
    if "relu" in modifiers:
        value = relu(b, value)
    if to == "f64":
        return b.cast("fpext", value, "double")
    rounding = next((m for m in modifiers if m in (*ROUNDINGS, "rna")), "rn")
    if rounding == "rna":
        raise e.unsupported(why=".rna")
    bits = narrow(e, value, to, rounding, ftz="ftz" in modifiers)
    return _finite(b, bits, to) if "satfinite" in modifiers else bits


def _finite(b: Builder, bits: Value, name: str, step: int = 1) -> Value:
    """Infinities become the largest numbers."""
    magnitude = b.op("and", bits, word(bits, FORMATS[name].sign - 1))
    infinite = b.compare("icmp eq", magnitude, word(bits, FORMATS[name].infinity))
    return b.select(infinite, b.op("sub", bits, word(bits, step)), bits)


def _tf32(e: Lower, i: Instruction, value: Value) -> Value:
    """f32 with the 10 highest bits of the fraction; of a NaN, ``.rna`` only cuts the others."""
    b = e.b
    if "relu" in i.modifiers:
        value = relu(b, value)
    rounding = next(m for m in i.modifiers if m in ("rn", "rz", "rna"))
    bits = words(b, value)
    result = b.op("shl", round_off(b, bits, 13, rounding), word(bits, 13))
    cut = word(bits, -1 << 13)
    nan = b.op("and", bits if rounding == "rna" else word(bits, FORMATS["f32"].nan), cut)
    lost = b.compare("fcmp uno", value, value)
    if "satfinite" in i.modifiers:
        result = _finite(b, result, "f32", 1 << 13)
        nan = b.op("sub", nan, word(nan, 1 << 13)) if rounding == "rna" else nan
    return b.select(lost, nan, result)


# Pairs: the first of two operands goes to the upper half


def _read_pair(e: Lower, i: Instruction, source: str) -> list[Value]:
    """The numbers for the lower and the upper half."""
    if source == "f32":
        return [read_numbers(e, i.operands[2], source), read_numbers(e, i.operands[1], source)]
    return [widen(e.b, e.b.cast("trunc", bits, "i16"), source[:-2]) for bits in _halves(e, i, 16)]


def _halves(e: Lower, i: Instruction, bits: int) -> list[Value]:
    """The lower and the upper ``bits`` of the operand, each in a word."""
    b = e.b
    whole = b.resize(e.read(i.operands[1], f"b{2 * bits}"), "i32")
    low = b.op("and", whole, word(whole, (1 << bits) - 1))
    return [low, b.op("lshr", whole, word(whole, bits))]


def _write_pair(e: Lower, i: Instruction, halves: list[Value], bits: int) -> None:
    b = e.b
    low, high = (b.resize(half, "i32") for half in halves)
    whole = b.op("or", low, b.op("shl", high, word(high, bits)))
    type_ = f"b{2 * bits}"
    e.write(i.operands[0], b.resize(whole, kind_of(type_)), type_)


def _to_small(e: Lower, i: Instruction, value: Value, small: _Small) -> Value:
    """To the nearest number, in a word; what is too large becomes the largest one.

    Adding a power of two so large that its last place is the last place of the result makes the processor round there.
    """
    b = e.b
    bits = words(b, value)
    unit = 23 - small.fraction
    magnitude = b.op("and", bits, word(bits, (1 << 31) - 1))
    magnitude = b.intrinsic("umin", magnitude, word(bits, (127 + 17) << 23))  # 2^17 is too large for all
    least = (127 + 1 - small.bias) << 23
    exponent = b.op("and", magnitude, word(bits, 0xFF << 23))
    exponent = b.intrinsic("umax", exponent, word(bits, least))
    anchor = b.op("add", exponent, word(bits, unit << 23))
    total = b.op("fadd", b.cast("bitcast", magnitude, "float"), b.cast("bitcast", anchor, "float"))
    steps = b.op("sub", words(b, total), anchor)
    scale = b.op("lshr", b.op("sub", exponent, word(bits, least)), word(bits, unit))
    result = b.intrinsic("umin", b.op("add", steps, scale), word(bits, small.largest))
    negative = b.compare("icmp slt", bits, word(bits, 0))
    if "relu" in i.modifiers:
        result = b.select(negative, word(bits, 0), result)
    else:
        result = b.op("or", result, b.select(negative, word(bits, 1 << (small.bits - 1)), word(bits, 0)))
    nan = small.largest if small.nan is None else small.nan
    return b.select(b.compare("fcmp uno", value, value), word(bits, nan), result)


def _from_small(e: Lower, i: Instruction, bits: Value, small: _Small) -> Value:
    """To the bits of f16 numbers."""
    b = e.b
    sign = 1 << (small.bits - 1)
    magnitude = b.op("and", bits, word(bits, sign - 1))
    value = b.cast("bitcast", b.op("shl", magnitude, word(bits, 23 - small.fraction)), "float")
    value = b.op("fmul", value, number(value, 2.0 ** (127 - small.bias)))
    minus = b.compare("icmp ne", b.op("and", bits, word(bits, sign)), word(bits, 0))
    value = b.select(minus, b.value(value.type, f"fneg {value}"), value)
    if "relu" in i.modifiers:
        value = relu(b, value)
    result = narrow(e, value, "f16")
    if small.nan is None:
        return result
    infinity = small.largest + 1 if small.bits - small.fraction == 6 else small.largest  # only e5m2 has one
    nan = b.compare("icmp ugt", magnitude, word(bits, infinity))
    return b.select(nan, word(result, FORMATS["f16"].nan), result)


def _to_exponent(e: Lower, i: Instruction, value: Value) -> Value:
    """To a power of two from 2^-127 on (ue8m0), without the sign."""
    b, bits = e.b, words(e.b, value)
    if "relu" in i.modifiers or not {"rz", "rp"} & set(i.modifiers):
        raise e.unsupported()
    magnitude = b.op("and", bits, word(bits, (1 << 31) - 1))
    result = b.op("lshr", magnitude, word(bits, 23))
    infinity = word(bits, FORMATS["f32"].infinity)
    if "rp" in i.modifiers:
        inexact = b.compare("icmp ne", b.op("and", bits, word(bits, (1 << 23) - 1)), word(bits, 0))
        above = b.compare("icmp ugt", magnitude, word(bits, 1 << 22))
        inexact = b.op("and", inexact, b.op("and", above, b.compare("icmp ult", magnitude, infinity)))
        result = b.op("add", result, b.cast("zext", inexact, "i32"))
    if "satfinite" in i.modifiers:
        finite = b.intrinsic("umin", result, word(bits, 254))
        result = b.select(b.compare("icmp ule", magnitude, infinity), finite, result)
    return result


def _from_exponent(b: Builder, bits: Value) -> Value:
    """To the bits of bf16 numbers."""
    result = b.op("shl", bits, word(bits, 7))
    result = b.select(b.compare("icmp eq", bits, word(bits, 0)), word(bits, 0x40), result)
    return b.select(b.compare("icmp eq", bits, word(bits, 0xFF)), word(bits, FORMATS["bf16"].nan), result)
