"""Functions that the ISA defines by a bound of their error, for vectors of f32.

The coefficients are minimax fits (Lawson's iteration over Chebyshev nodes).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence

from ..ir import Builder, Value, constant, lanes_of, vector
from .core import splat_constant

__all__ = ["FUNCTIONS"]


def _number(like: Value, x: float) -> Value:
    """A constant with as many lanes as ``like``."""
    (bits,) = struct.unpack("<I", struct.pack("<f", x))
    return splat_constant("float", bits, lanes_of(like.type))


def _integer(like: Value, x: int) -> Value:
    return constant(vector("i32", lanes_of(like.type)), x)


def _polynomial(b: Builder, x: Value, coefficients: Sequence[float]) -> Value:
    """By Horner's rule; the coefficient of the lowest power comes first."""
    result = _number(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result = b.intrinsic("fma", result, x, _number(x, coefficient))
    return result


def _limited(b: Builder, x: Value, most: float) -> Value:
    """Into [-most, most]; a NaN stays."""
    high, low = _number(x, most), _number(x, -most)
    x = b.select(b.compare("fcmp ogt", x, high), high, x)
    return b.select(b.compare("fcmp olt", x, low), low, x)


_INTEGER_MAGIC = 1.5 * 2.0**23  # added to a number below 2^22 it leaves the nearest integer in the low bits


def _ex2(b: Builder, x: Value) -> Value:
    x = _limited(b, x, 192.0)
    shifted = b.op("fadd", x, _number(x, _INTEGER_MAGIC))
    whole = b.op("fsub", shifted, _number(x, _INTEGER_MAGIC))
    rest = b.op("fsub", x, whole)
    power = _polynomial(
        b, rest, (1.0, 0.6931471824645996, 0.24022647738456726, 0.055503323674201965, 0.00961843691766262,
                  0.0013398875016719103, 0.00015353560504377633)
    )  # fmt: skip
    # in two steps, as neither 2^128 nor a subnormal power is a normal number
    exponent = b.op("sub", b.cast("bitcast", shifted, "i32"), _integer(x, 0x4B400000))
    half = b.op("ashr", exponent, _integer(x, 1))
    for step in (half, b.op("sub", exponent, half)):
        biased = b.op("shl", b.op("add", step, _integer(x, 127)), _integer(x, 23))
        power = b.op("fmul", power, b.cast("bitcast", biased, "float"))
    return power


def _lg2(b: Builder, x: Value) -> Value:
    tiny = b.compare("fcmp olt", x, _number(x, 2.0**-126))
    normal = b.select(tiny, b.op("fmul", x, _number(x, 2.0**24)), x)
    bits = b.cast("bitcast", normal, "i32")
    exponent = b.op("ashr", b.op("sub", bits, _integer(x, 0x3F3504F3)), _integer(x, 23))  # of a number from sqrt(1/2)
    mantissa = b.cast("bitcast", b.op("sub", bits, b.op("shl", exponent, _integer(x, 23))), "float")
    exponent = b.op("sub", exponent, b.select(tiny, _integer(x, 24), _integer(x, 0)))
    rest = b.op("fsub", mantissa, _number(x, 1.0))
    series = _polynomial(
        b, rest, (1.442694902420044, -0.7213471531867981, 0.48092252016067505, -0.3607212007045746, 0.2876565754413605,
                  -0.23851922154426575, 0.21738004684448242, -0.21030502021312714, 0.12541277706623077)
    )  # fmt: skip
    whole = b.value(x.type, f"sitofp {exponent} to {x.type}")
    result = b.intrinsic("fma", rest, series, whole)
    infinite = b.compare("fcmp oeq", x, _number(x, math.inf))
    result = b.select(infinite, x, result)
    result = b.select(b.compare("fcmp oeq", x, _number(x, 0.0)), _number(x, -math.inf), result)
    return b.select(b.compare("fcmp ult", x, _number(x, 0.0)), _number(x, math.nan), result)


def _wave(b: Builder, x: Value, quarter: int) -> Value:
    """The sine of ``x`` plus some quarters of a turn."""
    shifted = b.intrinsic("fma", x, _number(x, 2 / math.pi), _number(x, _INTEGER_MAGIC))
    turns = b.op("fsub", shifted, _number(x, _INTEGER_MAGIC))
    rest = b.intrinsic("fma", turns, _number(x, -1.5707962512969971), x)
    rest = _limited(b, b.intrinsic("fma", turns, _number(x, -7.549789954891882e-08), rest), 0.8)  # of huge ones
    square = b.op("fmul", rest, rest)
    sine = _polynomial(b, square, (1.0, -0.16666650772094727, 0.008331973105669022, -0.0001949494908330962))
    sine = b.op("fmul", rest, sine)  # keeps the sign of zero
    cosine = _polynomial(b, square, (1.0, -0.5, 0.04166664555668831, -0.001388736185617745, 2.4437727915938012e-05))
    quadrant = b.op("add", b.cast("bitcast", shifted, "i32"), _integer(x, quarter))
    swapped = b.compare("icmp ne", b.op("and", quadrant, _integer(x, 1)), _integer(x, 0))
    sign = b.op("and", b.op("shl", quadrant, _integer(x, 30)), _integer(x, 1 << 31))
    result = b.cast("bitcast", b.select(swapped, cosine, sine), "i32")
    return b.cast("bitcast", b.op("xor", result, sign), "float")


def _tanh(b: Builder, x: Value) -> Value:
    """The continued fraction x / (1 + x^2 / (3 + x^2 / (5 + ...))) to its seventh level."""
    inside = _limited(b, x, 5.0)  # where it passes 1
    square = b.op("fmul", inside, inside)
    above = b.op("fmul", inside, _polynomial(b, square, (135135.0, 17325.0, 378.0, 1.0)))
    below = _polynomial(b, square, (135135.0, 62370.0, 3150.0, 28.0))
    return _limited(b, b.op("fdiv", above, below), 1.0)


FUNCTIONS: dict[str, Callable[[Builder, Value], Value]] = {
    "ex2": _ex2,
    "lg2": _lg2,
    "sin": lambda b, x: _wave(b, x, 0),
    "cos": lambda b, x: _wave(b, x, 1),
    "tanh": _tanh,
}
