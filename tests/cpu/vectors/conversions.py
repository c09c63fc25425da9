"""Conversions between all integer and floating point types, packed and narrow ones included."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import floats
from .case import AnyNaN, Oracle, Table
from .floats import BF16, E4M3, E5M2, F16, F32, F64, ROUNDINGS, TF32, WORDS, Bits, Format, modified
from .integers import SIGNED, clamped, reading, signed

CONVERSIONS = Table("conversions")
case = CONVERSIONS

INTEGERS = [f"{sign}{width}" for width in (8, 16, 32, 64) for sign in "us"]
FLOATS = (F16, BF16, F32, F64)
SLOW = 1 << 16


def limits(kind: str) -> tuple[int, int]:
    width = int(kind[1:])
    return (-(1 << (width - 1)), (1 << (width - 1)) - 1) if kind[0] == "s" else (0, (1 << width) - 1)


def extended(x: NDArray[Any], kind: str) -> Bits:
    """The low bits as ``kind``, in a register that has at least 16."""
    width = int(kind[1:])
    low = x.astype(WORDS[width])
    return reading(kind)(low).astype(SIGNED[max(width, 16)]).view(WORDS[max(width, 16)]) if kind[0] == "s" else low


def register(kind: str) -> int:
    return max(int(kind[1:]), 16)


# ---- integer to integer --------------------------------------------------------------------------------------------

for source in INTEGERS:
    for target in INTEGERS:
        kinds, narrow = f"b{source[1:]}", limits(target)
        if source != target:
            case(f"cvt.{target}.{source}", kinds, register(target),
                 lambda a, s=source, t=target: extended(reading(s)(a).astype(np.int64), t))  # fmt: skip
        if limits(source)[0] < narrow[0] or limits(source)[1] > narrow[1]:
            case(f"cvt.sat.{target}.{source}", kinds, register(target),
                 lambda a, s=source, t=target, limit=narrow:
                     extended(clamped(reading(s)(a).astype(object), *limit).astype(np.int64), t),
                 most=SLOW)  # fmt: skip

# ---- between integers and floating point ---------------------------------------------------------------------------


def to_integer(format: Format, target: str, rounding: str, *, ftz: bool = False) -> Oracle:
    def oracle(a: Bits) -> Bits:
        a = format.flushed(a) if ftz else a
        return extended(floats.to_integer(format, a, rounding, int(target[1:]), signed=target[0] == "s"), target)

    return oracle


for format in FLOATS:
    for kind in INTEGERS if format is not BF16 else INTEGERS[2:]:  # no bf16 with 8 bits
        for rounding in ("rni", "rzi", "rmi", "rpi"):
            case(
                f"cvt.{rounding}.{kind}.{format.name}", format.name, register(kind), to_integer(format, kind, rounding)
            )
        if format is F32:
            for rounding in ("rzi", "rpi"):
                case(f"cvt.{rounding}.ftz.{kind}.f32", "f32", register(kind),
                     to_integer(F32, kind, rounding, ftz=True))  # fmt: skip
            case(f"cvt.rni.sat.{kind}.f32", "f32", register(kind), to_integer(F32, kind, "rni"))
        for rounding in ROUNDINGS:
            case(f"cvt.{rounding}.{format.name}.{kind}", f"b{kind[1:]}", format.width,
                 lambda a, f=format, k=kind, r=rounding: f.of_integers(reading(k)(a), r))  # fmt: skip
        if format in (F16, F32):
            case(f"cvt.rn.sat.{format.name}.{kind}", f"b{kind[1:]}", format.width,
                 lambda a, f=format, k=kind: modified(f, f.of_integers(reading(k)(a), "rn"), sat=True))  # fmt: skip

# ---- floating point to floating point ------------------------------------------------------------------------------


def nan_of(source: Format, target: Format, a: Bits, rounding: str, *, finite: bool) -> Bits:
    """What a GPU makes of a NaN, where the ISA leaves it open: mostly the canonical one."""
    if source is F64:  # quiet, with the sign and the upper bits of the payload
        payload = F64.magnitude(a) >> np.uint64(F64.fraction_bits - target.fraction_bits)
        sign = (F64.sign(a) >> np.uint64(64 - target.width)).astype(target.word)
        quiet: Bits = (payload.astype(target.word) & target.word(target.nan)) | target.word(target.quiet_nan)
        return sign | quiet
    if (source, target) == (BF16, F32):  # the same bits, signalling or not
        return a.astype(np.uint32) << np.uint32(16)
    if target is TF32 and rounding == "rna":  # cut, which can leave infinity, and one place less with satfinite
        return (a & np.uint32(0xFFFFE000)) - np.uint32(0x2000 if finite else 0)
    return np.full(a.shape, target.nan, target.word)


def converted(
    source: Format, target: Format, rounding: str, *, ftz: bool = False, sat: bool = False, relu: bool = False,
    finite: bool = False,
) -> Oracle:  # fmt: skip
    """``ftz`` flushes float32 on either side only, and nothing on the way to f16."""

    def oracle(a: Bits) -> Bits:
        a = F32.flushed(a) if ftz and source is F32 and target is not F16 else a
        rounded = replace(target, flushes=ftz and target is F32).of(source.value(a), rounding, finite=finite)
        result = np.where(source.is_nan(a), nan_of(source, target, a, rounding, finite=finite), rounded)
        return modified(target, result, sat=sat, relu=relu)

    return oracle


def any_nan(format: Format, oracle: Oracle) -> Oracle:
    return (lambda *x: AnyNaN(F64, oracle(*x))) if format is F64 else oracle


for origin, result in itertools.permutations(FLOATS, 2):
    narrows = origin.fraction_bits > result.fraction_bits or origin.exponent_bits > result.exponent_bits
    with_bf16 = BF16 in (origin, result)
    for rounding in ROUNDINGS if narrows else ("",):
        for ftz in (False, True) if F32 in (origin, result) and not with_bf16 else (False,):
            for sat in (False, True) if result is not F64 and not with_bf16 else (False,):
                dots = f"{'.' if rounding else ''}{rounding}{'.ftz' if ftz else ''}{'.sat' if sat else ''}"
                case(f"cvt{dots}.{result.name}.{origin.name}", origin.name, result.width,
                     any_nan(result, converted(origin, result, rounding or "rn", ftz=ftz, sat=sat)))  # fmt: skip


def rounded_to_integer(format: Format, rounding: str, *, ftz: bool, sat: bool) -> Oracle:
    def oracle(a: Bits) -> Bits:
        a = format.flushed(a) if ftz else a
        return modified(format, format.of(floats.integral(format, a, rounding)), sat=sat)

    return any_nan(format, oracle)


for format in FLOATS:
    for rounding in ("rni", "rzi", "rmi", "rpi"):
        for ftz in (False, True) if format is F32 else (False,):
            for sat in (False, True) if format in (F32, F16) else (False,):
                dots = f"{rounding}{'.ftz' if ftz else ''}{'.sat' if sat else ''}"
                case(f"cvt.{dots}.{format.name}.{format.name}", format.name, format.width,
                     rounded_to_integer(format, rounding, ftz=ftz, sat=sat))  # fmt: skip
for ftz in (False, True):
    case(f"cvt{'.ftz' if ftz else ''}.sat.f32.f32", "f32", 32, converted(F32, F32, "rn", ftz=ftz, sat=True))

# ---- narrow and packed ---------------------------------------------------------------------------------------------

Two = Callable[[Bits, Bits], Bits]


def paired(oracle: Oracle, width: int) -> Two:
    """The first operand goes to the upper half."""
    return lambda a, b: (oracle(a).astype(WORDS[2 * width]) << width) | oracle(b).astype(WORDS[2 * width])


for rounding in ("rn", "rz"):
    for relu in (False, True):
        for finite in (False, True):
            dots = f"{rounding}{'.relu' if relu else ''}{'.satfinite' if finite else ''}"
            for half in (F16, BF16):
                oracle = converted(F32, half, rounding, relu=relu, finite=finite)
                case(f"cvt.{dots}.{half.name}x2.f32", "f32 f32", 32, paired(oracle, 16))
                if relu or finite:
                    case(f"cvt.{dots}.{half.name}.f32", "f32", 16, oracle)
for dots, given in {"rna": {}, "rn": {}, "rz": {}, "rn.relu": {"relu": True}, "rz.relu": {"relu": True},
                    "rna.satfinite": {"finite": True}}.items():  # fmt: skip
    rounding = dots.partition(".")[0]
    case(f"cvt.{dots}.tf32.f32", "f32", 32, converted(F32, TF32, rounding, **given))
for narrow8 in (E4M3, E5M2):
    for relu in (False, True):
        dot = ".relu" if relu else ""
        oracle = converted(F32, narrow8, "rn", relu=relu, finite=True)
        case(f"cvt.rn.satfinite{dot}.{narrow8.name}x2.f32", "f32 f32", 16, paired(oracle, 8))
        from_half = converted(F16, narrow8, "rn", relu=relu, finite=True)

        def from_halves(a: Bits, oracle: Oracle = from_half) -> Bits:
            parts = oracle(np.ascontiguousarray(a).view(np.uint16))
            return np.ascontiguousarray(parts).view(np.uint16)

        case(f"cvt.rn.satfinite{dot}.{narrow8.name}x2.f16x2", "f16x2", 16, from_halves)

        widened = converted(narrow8, F16, "rn", relu=relu)

        def to_halves(a: Bits, oracle: Oracle = widened) -> Bits:
            parts = oracle(np.ascontiguousarray(a).view(np.uint8))
            return np.ascontiguousarray(parts).view(np.uint32)

        case(f"cvt.rn{dot}.f16x2.{narrow8.name}x2", f"{narrow8.name}x2", 32, to_halves)


def packed_integers(target: str, *operands: Bits) -> Bits:
    """``a`` above ``b``, saturated, below what is moved up from ``c``."""
    width, bits = int(target[1:]), np.uint32((1 << int(target[1:])) - 1)
    a, b = (clamped(signed(x).astype(np.int64), *limits(target)).astype(np.uint32) & bits
            for x in operands[:2])  # fmt: skip
    low = (a << np.uint32(width)) | b
    return low | (operands[2] << np.uint32(2 * width)) if len(operands) > 2 else low


for target in ("u16", "s16"):
    case(f"cvt.pack.sat.{target}.s32", "b32 b32", 32, lambda a, b, t=target: packed_integers(t, a, b))
for target in ("u8", "s8", "u4", "s4", "u2", "s2"):
    case(f"cvt.pack.sat.{target}.s32.b32", "b32 b32 b32", 32, lambda a, b, c, t=target: packed_integers(t, a, b, c))

# what changes no number, but may flush
case("cvt.ftz.f32.f32", "f32", 32, lambda a: AnyNaN(F32, F32.flushed(a)))
