"""Floating point as the PTX ISA defines it, on raw bits: formats, exact arithmetic, rounding. Plain numpy.

Every operation here is one rounding of an exact value. Up to 32 bits the exact value stands in a float64 rounded to
odd, whose 53 bits decide any later rounding; for float64 it stands in Python integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[Any]  # raw bits, unsigned
Reals = NDArray[np.float64]
Truths = NDArray[np.bool_]

WORDS: dict[int, type[Any]] = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
ROUNDINGS = ("rn", "rz", "rm", "rp")

_bit_length = np.frompyfunc(int.bit_length, 1, 1)
_integer_sqrt = np.frompyfunc(math.isqrt, 1, 1)


def bit_length(m: NDArray[Any]) -> NDArray[np.int64]:
    """Of non-negative integers: of uint64, or of Python integers in an object array."""
    if m.dtype == object:
        lengths: NDArray[np.int64] = _bit_length(m).astype(np.int64)
        return lengths
    high, low = m >> np.uint64(32), m & np.uint64(0xFFFFFFFF)
    upper, lower = (np.frexp(half.astype(np.float64))[1].astype(np.int64) for half in (high, low))
    return np.where(high > 0, 32 + upper, lower)


@dataclass(frozen=True)
class Exact:
    """Non-negative ``m`` times 2 to the ``e``, with a sign. The lowest bit of ``m`` may stand for all bits below it."""

    negative: Truths
    m: NDArray[Any]  # uint64, or Python integers
    e: NDArray[np.int64]


@dataclass(frozen=True)
class Format:
    """A binary format: sign, exponent and fraction, from the highest bit down."""

    name: str
    exponent_bits: int
    fraction_bits: int
    has_infinity: bool = True
    low_zeros: int = 0  # bits below the fraction that are always 0
    flushes: bool = False  # subnormal results

    @property
    def width(self) -> int:
        return 1 + self.exponent_bits + self.fraction_bits + self.low_zeros

    @property
    def word(self) -> type[Any]:
        return WORDS[self.width]

    @property
    def sign_bit(self) -> int:
        return 1 << (self.exponent_bits + self.fraction_bits + self.low_zeros)

    @property
    def lowest(self) -> int:
        """The exponent of the last place of a subnormal number."""
        return 2 - (1 << (self.exponent_bits - 1)) - self.fraction_bits

    @property
    def infinity(self) -> int:
        return ((1 << self.exponent_bits) - 1) << (self.fraction_bits + self.low_zeros)

    @property
    def largest(self) -> int:
        """The bits of the largest finite number."""
        if self.has_infinity:
            return self.infinity - (1 << self.low_zeros)
        return self.sign_bit - 2

    @property
    def smallest_normal(self) -> int:
        return 1 << (self.fraction_bits + self.low_zeros)

    @property
    def nan(self) -> int:
        """The canonical NaN."""
        return self.sign_bit - (1 << self.low_zeros)

    @property
    def quiet_nan(self) -> int:
        """The NaN of no payload."""
        return self.infinity | (1 << (self.fraction_bits - 1 + self.low_zeros))

    # Bits and what they say

    def magnitude(self, bits: Bits) -> Bits:
        return np.asarray(bits & self.word(self.sign_bit - 1))

    def sign(self, bits: Bits) -> Bits:
        return np.asarray(bits & self.word(self.sign_bit))

    def is_nan(self, bits: Bits) -> Truths:
        limit = self.infinity if self.has_infinity else self.largest
        return np.asarray(self.magnitude(bits) > self.word(limit))

    def is_finite(self, bits: Bits) -> Truths:
        return np.asarray(self.magnitude(bits) <= self.word(self.largest))

    def is_subnormal(self, bits: Bits) -> Truths:
        magnitude = self.magnitude(bits)
        return np.asarray((magnitude > 0) & (magnitude < self.word(self.smallest_normal)))

    def flushed(self, bits: Bits) -> Bits:
        """Subnormal numbers as zeros of their sign."""
        return np.where(self.is_subnormal(bits), self.sign(bits), bits)

    def order(self, bits: Bits) -> NDArray[np.int64]:
        """Integers in the order of the numbers, -0 below +0."""
        magnitude = self.magnitude(bits).astype(np.int64)
        return np.where(self.sign(bits) != 0, -1 - magnitude, magnitude)

    def exact(self, bits: Bits, *, integers: Any = np.uint64) -> Exact:
        """Of finite numbers."""
        magnitude = (self.magnitude(bits) >> self.word(self.low_zeros)).astype(np.uint64)
        field = magnitude >> np.uint64(self.fraction_bits)
        fraction = magnitude & np.uint64((1 << self.fraction_bits) - 1)
        m = fraction | (np.minimum(field, np.uint64(1)) << np.uint64(self.fraction_bits))
        e = np.maximum(field.astype(np.int64), 1) - 1 + self.lowest
        return Exact(self.sign(bits) != 0, m.astype(integers), e)

    @np.errstate(all="ignore")
    def value(self, bits: Bits) -> Reals:
        """As float64, which is exact."""
        if self.width == 64:
            return bits.view(np.float64)
        exact = self.exact(bits)
        real = np.ldexp(exact.m.astype(np.float64), exact.e.astype(np.int32))
        real = np.where(self.is_nan(bits), np.nan, np.where(self.is_finite(bits), real, np.inf))
        return np.where(exact.negative, -real, real)

    def round(self, exact: Exact, rounding: str, *, finite: bool = False) -> Bits:
        """The one rounding. With ``finite`` what is too large becomes the largest finite number.

        Flushing is for what, rounded as if exponents had no lower limit, is below the smallest normal number.
        """
        m, negative = exact.m, exact.negative
        integer = np.dtype(m.dtype)
        one = np.ones(1, integer)
        last = bit_length(m) + exact.e - (self.fraction_bits + 1)
        last = np.where(m != 0, last if self.flushes else np.maximum(last, self.lowest), self.lowest)
        shift = last - exact.e
        most = 1 << 20 if integer.hasobject else 63
        up, down = np.maximum(-shift, 0).astype(integer), np.clip(shift, 0, most).astype(integer)
        whole = m << up
        kept = whole >> down
        rest, half = whole - (kept << down), (one << down) >> one
        inexact = rest != 0
        more = (
            inexact
            & {
                "rn": (rest > half) | ((rest == half) & ((kept & one) != 0)),
                "rna": rest >= half,
                "rz": np.bool_(False),
                "rm": negative,
                "rp": ~negative,
            }[rounding]
        )
        kept = kept + more.astype(integer)
        magnitude = (((last - self.lowest) << self.fraction_bits) + kept.astype(np.int64)) << self.low_zeros
        if self.flushes:
            magnitude = np.where((last <= self.lowest) & (magnitude < self.smallest_normal), 0, magnitude)
        # rz, and rm and rp on their far side, stop at the largest finite number
        stops = {"rz": True, "rm": ~negative, "rp": negative}.get(rounding, False)
        beyond = np.where(finite | np.asarray(stops), self.largest, self.infinity)
        magnitude = np.where((magnitude > self.largest) | (magnitude < 0), beyond, magnitude)
        return (magnitude.astype(np.uint64) | (negative.astype(np.uint64) * np.uint64(self.sign_bit))).astype(self.word)

    def of(self, reals: Reals, rounding: str = "rn", *, finite: bool = False) -> Bits:
        """Rounded from float64; a NaN becomes the canonical one."""
        bits = np.ascontiguousarray(reals, np.float64).view(np.uint64)
        infinite = np.isinf(reals)
        rounded = self.round(F64.exact(np.where(infinite, np.uint64(0), bits)), rounding, finite=finite)
        limit = self.largest if finite else self.infinity
        sign = (np.signbit(reals).astype(np.uint64) * np.uint64(self.sign_bit)).astype(self.word)
        rounded = np.where(infinite, sign | self.word(limit), rounded)
        return np.where(np.isnan(reals), self.word(self.nan), rounded)

    def of_integers(self, integers: NDArray[Any], rounding: str) -> Bits:
        """Rounded from integers of any type."""
        negative = np.asarray(integers < 0)
        wide = integers.astype(np.int64).view(np.uint64) if integers.dtype.kind == "i" else integers.astype(np.uint64)
        m = np.where(negative, (~wide) + np.uint64(1), wide)
        return self.round(Exact(negative, m, np.zeros(m.shape, np.int64)), rounding)


F16 = Format("f16", 5, 10)
BF16 = Format("bf16", 8, 7)
F32 = Format("f32", 8, 23)
F64 = Format("f64", 11, 52)
TF32 = Format("tf32", 8, 10, low_zeros=13)
E4M3 = Format("e4m3", 4, 3, has_infinity=False)
E5M2 = Format("e5m2", 5, 2)
FORMATS = {format.name: format for format in (F16, BF16, F32, F64, TF32, E4M3, E5M2)}


# ---- arithmetic ----------------------------------------------------------------------------------------------------


def _odd_sum(x: Reals, y: Reals) -> Reals:
    """``x + y`` rounded to odd: where inexact, the neighbour whose last bit is 1."""
    total = x + y
    of_y = total - x
    error = (x - (total - of_y)) + (y - of_y)
    bits = total.view(np.int64)
    away = np.where(np.signbit(error) == np.signbit(total), 1, -1)
    inexact = np.isfinite(total) & (error != 0)
    return np.where(inexact & (bits & 1 == 0), bits + away, bits).view(np.float64)


@np.errstate(all="ignore")
def fma(format: Format, a: Bits, b: Bits, c: Bits, rounding: str = "rn") -> Bits:
    """``a * b + c``, rounded once."""
    if format.width < 64:
        product, z = format.value(a) * format.value(b), format.value(c)  # the product is exact
        real = _odd_sum(product, z)
        if rounding == "rm":
            real = np.where((real == 0) & (np.signbit(product) != np.signbit(z)), -0.0, real)
        return format.of(real, rounding)
    u, v, w = (format.exact(bits, integers=object) for bits in (a, b, c))
    e = np.minimum(u.e + v.e, w.e)
    factors = (u.m * v.m) << (u.e + v.e - e).astype(object)
    addend = w.m << (w.e - e).astype(object)
    minus = u.negative != v.negative
    total = np.where(minus, -factors, factors) + np.where(w.negative, -addend, addend)
    zero = np.asarray(total == 0, np.bool_)
    negative = np.where(zero, np.where(minus == w.negative, minus, rounding == "rm"), np.asarray(total < 0, np.bool_))
    finite = format.is_finite(a) & format.is_finite(b) & format.is_finite(c)
    # finite factors stand as 0 or 1, so that no overflow of theirs hides an infinity
    p, q, r = (np.where(np.isfinite(x) & (x != 0), np.copysign(1.0, x), x) for x in map(format.value, (a, b, c)))
    special = (p * q + r).view(np.uint64)
    special = np.where(format.is_nan(special), format.word(format.nan), special)
    return np.where(finite, format.round(Exact(negative, np.abs(total), e), rounding), special)


def add(format: Format, a: Bits, b: Bits, rounding: str = "rn") -> Bits:
    return fma(format, a, np.full_like(a, format.of(np.ones(1))[0]), b, rounding)


def negated(format: Format, a: Bits) -> Bits:
    return np.asarray(a ^ format.word(format.sign_bit))


@np.errstate(all="ignore")
def mul(format: Format, a: Bits, b: Bits, rounding: str = "rn") -> Bits:
    if format.width < 64:
        return format.of(format.value(a) * format.value(b), rounding)
    # a zero of the product's own sign adds nothing and keeps the sign of zero
    return fma(format, a, b, (a ^ b) & format.word(format.sign_bit), rounding)


def _normalized(format: Format, bits: Bits) -> Exact:
    """With every bit of the fraction in use, also of subnormal numbers; 0 stays 0."""
    exact = format.exact(bits, integers=object if format.width == 64 else np.uint64)
    missing = np.where(exact.m != 0, format.fraction_bits + 1 - bit_length(exact.m), 0)
    return Exact(exact.negative, exact.m << missing.astype(exact.m.dtype), exact.e - missing)


@np.errstate(all="ignore")
def div(format: Format, a: Bits, b: Bits, rounding: str = "rn") -> Bits:
    x, y = _normalized(format, a), _normalized(format, b)
    extra = x.m.dtype.type(format.fraction_bits + 4) if x.m.dtype != object else format.fraction_bits + 4
    scaled = x.m << extra
    divisor = np.where(y.m != 0, y.m, x.m.dtype.type(1) if x.m.dtype != object else 1)
    quotient = scaled // divisor
    sticky = (quotient * divisor != scaled).astype(x.m.dtype)
    exact = Exact(x.negative != y.negative, quotient | sticky, x.e - y.e - int(extra))
    v, w = format.value(a), format.value(b)
    ordinary = np.isfinite(v) & np.isfinite(w) & (v != 0) & (w != 0)
    p, q = (np.where(np.isfinite(u) & (u != 0), np.copysign(1.0, u), u) for u in (v, w))
    return np.where(ordinary, format.round(exact, rounding), format.of(p / q))


@np.errstate(all="ignore")
def sqrt(format: Format, a: Bits, rounding: str = "rn") -> Bits:
    x = _normalized(format, a)
    extra = 28 + (x.e & 1) if format.width < 64 else 60 + (x.e & 1)  # leaves an even exponent
    scaled = x.m << extra.astype(x.m.dtype)
    if scaled.dtype == object:
        root = _integer_sqrt(scaled)
    else:
        root = np.sqrt(scaled.astype(np.float64)).astype(np.uint64)  # below 2^53: at most one too large
        root = root - (root * root > scaled).astype(np.uint64)
    sticky = (root * root != scaled).astype(x.m.dtype)
    exact = Exact(x.negative, root | sticky, (x.e - extra) >> 1)
    value = format.value(a)
    return np.where(np.isfinite(value) & (value > 0), format.round(exact, rounding), format.of(np.sqrt(value)))


# ---- what modifiers do ---------------------------------------------------------------------------------------------


def arithmetic(
    format: Format,
    operation: Callable[..., Bits],
    *operands: Bits,
    rounding: str = "rn",
    ftz: bool = False,
    sat: bool = False,
    relu: bool = False,
) -> Bits:
    """``operation`` with its modifiers: subnormal numbers flushed on both sides, the result clamped."""
    operands = tuple(map(format.flushed, operands)) if ftz else operands
    result = operation(replace(format, flushes=ftz), *operands, rounding)
    return modified(format, result, sat=sat, relu=relu)


def modified(format: Format, result: Bits, *, sat: bool = False, relu: bool = False) -> Bits:
    """``sat``: into [+0, 1], NaN to +0; ``relu``: negative ones to +0, NaN stays."""
    zero = format.word(0)
    if sat:
        one = format.of(np.ones(1))[0]
        low = format.is_nan(result) | (format.sign(result) != 0)
        result = np.where(low, zero, np.where(format.order(result) > int(one), one, result))
    if relu:
        result = np.where((format.sign(result) != 0) & ~format.is_nan(result), zero, result)
    return result


def extremum(
    format: Format,
    a: Bits,
    b: Bits,
    *,
    largest: bool,
    ftz: bool = False,
    nan: bool = False,
    xorsign: bool = False,
) -> Bits:
    """``min`` and ``max``: a NaN loses against a number, or wins with ``nan``; -0 is below +0."""
    a, b = (format.flushed(x) for x in (a, b)) if ftz else (a, b)
    sign = format.sign(a ^ b)
    p, q = (format.magnitude(a), format.magnitude(b)) if xorsign else (a, b)
    first = (format.order(p) > format.order(q)) == largest
    chosen = np.where(first, p, q)
    p_nan, q_nan = format.is_nan(p), format.is_nan(q)
    if not nan:
        chosen = np.where(p_nan, q, np.where(q_nan, p, chosen))
    if xorsign:
        chosen = format.magnitude(chosen) | sign
    lost = (p_nan | q_nan) if nan else (p_nan & q_nan)
    return np.where(lost, format.word(format.nan), chosen)


def to_integer(format: Format, bits: Bits, rounding: str, width: int, *, signed: bool) -> NDArray[Any]:
    """Rounded (``rni``, ``rzi``, ``rmi``, ``rpi``) and clamped to the integers of ``width`` bits, as their raw bits."""
    low, high = (-(1 << (width - 1)), (1 << (width - 1)) - 1) if signed else (0, (1 << width) - 1)
    whole = integral(format, bits, rounding)
    inside = (whole >= low) & (whole < float(high + 1))
    safe = np.where(inside, whole, 0.0)
    wide = safe.astype(np.int64).view(np.uint64) if signed else safe.astype(np.uint64)
    mask = (1 << width) - 1
    clamped = np.where(whole < low, np.uint64(low & mask), np.uint64(high))
    result = np.where(inside, wide & np.uint64(mask), clamped)
    lost = 1 << (width - 1) if format.width == 64 or width == 64 else 0
    return np.where(format.is_nan(bits), np.uint64(lost), result).astype(WORDS[width])


@np.errstate(all="ignore")
def integral(format: Format, bits: Bits, rounding: str) -> Reals:
    """The integer that it rounds to, as float64."""
    direction = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[rounding]
    rounded: Reals = direction(format.value(bits))
    return rounded
