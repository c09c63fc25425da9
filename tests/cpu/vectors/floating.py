"""Floating point instructions: exact ones of every rounding, comparisons, and the approximate functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import floats
from .case import AnyNaN, Near, Oracle, Table, halves, ulp
from .floats import BF16, F16, F32, F64, ROUNDINGS, Bits, Format, Reals, Truths, arithmetic, extremum

FLOATING = Table("floating")
case = FLOATING

SLOW = 1 << 14  # float64 goes by Python integers


def subtract(format: Format, a: Bits, b: Bits, rounding: str) -> Bits:
    return floats.add(format, a, floats.negated(format, b), rounding)


def reciprocal(format: Format, a: Bits, rounding: str) -> Bits:
    return floats.div(format, np.full_like(a, format.of(np.ones(1))[0]), a, rounding)


def nan_free(format: Format, oracle: Oracle) -> Oracle:
    """Where the bits of a NaN result are not defined."""
    return lambda *inputs: AnyNaN(format, oracle(*inputs))


def exact(
    opcode: str, format: Format, operation: Callable[..., Bits], arity: int, *modifiers: str, packed: bool = False
) -> None:
    """A case of one operation with the modifiers that its name tells."""
    name = ".".join([opcode, *filter(None, modifiers), format.name + ("x2" if packed else "")])
    rounding = next((m for m in modifiers if m in ROUNDINGS), "rn")
    given = {m: True for m in modifiers if m in ("ftz", "sat", "relu")}
    oracle: Oracle = lambda *x: arithmetic(format, operation, *x, rounding=rounding, **given)  # noqa: E731
    oracle = halves(oracle) if packed else oracle
    kind = format.name + ("x2" if packed else "")
    width = format.width * (2 if packed else 1)
    wide = format is F64
    case(
        name, " ".join([kind] * arity), width, nan_free(F64, oracle) if wide else oracle, most=SLOW if wide else 1 << 20
    )


# ---- one rounding --------------------------------------------------------------------------------------------------

BINARY: dict[str, Callable[..., Bits]] = {"add": floats.add, "sub": subtract, "mul": floats.mul}
for name, operation in BINARY.items():
    for rounding in ("", *ROUNDINGS):
        for ftz in ("", "ftz"):
            for sat in ("", "sat"):
                exact(name, F32, operation, 2, rounding, ftz, sat)
        exact(name, F64, operation, 2, rounding)
    for packed in (False, True):
        for ftz in ("", "ftz"):
            for sat in ("", "sat"):
                exact(name, F16, operation, 2, ftz, sat, packed=packed)
        exact(name, F16, operation, 2, "rn", packed=packed)
        exact(name, BF16, operation, 2, packed=packed)
        exact(name, BF16, operation, 2, "rn", packed=packed)
for rounding in ROUNDINGS:
    for ftz in ("", "ftz"):
        for sat in ("", "sat"):
            exact("fma", F32, floats.fma, 3, rounding, ftz, sat)
        exact("div", F32, floats.div, 2, rounding, ftz)
        exact("rcp", F32, reciprocal, 1, rounding, ftz)
        exact("sqrt", F32, floats.sqrt, 1, rounding, ftz)
    exact("fma", F64, floats.fma, 3, rounding)
    exact("mad", F32, floats.fma, 3, rounding)
    exact("mad", F64, floats.fma, 3, rounding)
    exact("div", F64, floats.div, 2, rounding)
    exact("rcp", F64, reciprocal, 1, rounding)
    exact("sqrt", F64, floats.sqrt, 1, rounding)
for packed in (False, True):
    for ftz in ("", "ftz"):
        for clamp in ("", "sat", "relu"):
            exact("fma", F16, floats.fma, 3, "rn", ftz, clamp, packed=packed)
    for clamp in ("", "relu"):
        exact("fma", BF16, floats.fma, 3, "rn", clamp, packed=packed)

# ---- sign, minimum and maximum -------------------------------------------------------------------------------------

for format in (F16, BF16, F32, F64):
    for packed in (False, True) if format.width == 16 else (False,):
        pack: Callable[[Oracle], Oracle] = halves if packed else (lambda oracle: oracle)
        kind = format.name + ("x2" if packed else "")
        width = format.width * (1 + packed)
        flushes = (False, True) if format in (F16, F32) else (False,)
        for flushing in flushes:
            dot = ".ftz" if flushing else ""
            flush: Callable[[Bits], Bits] = format.flushed if flushing else (lambda a: a)
            # a NaN stays some NaN
            case(f"abs{dot}.{kind}", kind, width,
                 nan_free(format, pack(lambda a, f=format, x=flush: f.magnitude(x(a)))))  # fmt: skip
            case(f"neg{dot}.{kind}", kind, width,
                 nan_free(format, pack(lambda a, f=format, x=flush: floats.negated(f, x(a)))))  # fmt: skip
            for name in ("min", "max"):
                for nan in (False, True) if format is not F64 else (False,):
                    for xorsign in (False, True) if format is not F64 else (False,):
                        modifiers = dot + (".NaN" if nan else "") + (".xorsign.abs" if xorsign else "")
                        oracle: Oracle = lambda a, b, f=format, n=name, given=(flushing, nan, xorsign): extremum(  # noqa: E731
                            f, a, b, largest=n == "max", ftz=given[0], nan=given[1], xorsign=given[2])  # fmt: skip
                        oracle = pack(oracle)
                        case(f"{name}{modifiers}.{kind}", f"{kind} {kind}", width,
                             nan_free(F64, oracle) if format is F64 else oracle)  # fmt: skip
for format in (F32, F64):
    width = format.width
    case(f"copysign.{format.name}", f"{format.name} {format.name}", width,
         lambda a, b, f=format: f.sign(a) | f.magnitude(b))  # fmt: skip
    tests: dict[str, Callable[..., Truths]] = {
        "finite": lambda f, a: f.is_finite(a),
        "infinite": lambda f, a: f.magnitude(a) == f.infinity,
        "number": lambda f, a: ~f.is_nan(a),
        "notanumber": lambda f, a: f.is_nan(a),
        "normal": lambda f, a: f.is_finite(a) & ~f.is_subnormal(a),  # zero is normal
        "subnormal": lambda f, a: f.is_subnormal(a),
    }
    for name, test in tests.items():
        case(f"testp.{name}.{format.name}", format.name, 32, lambda a, f=format, test=test: test(f, a),
             "OP p, a; selp.u32 d, 1, 0, p")  # fmt: skip

# ---- comparison ----------------------------------------------------------------------------------------------------

NUMBERS = ("eq", "ne", "lt", "le", "gt", "ge")
COMPARISONS = (*NUMBERS, *(f"{name}u" for name in NUMBERS), "num", "nan")


@np.errstate(invalid="ignore")
def compare(format: Format, name: str, a: Bits, b: Bits, *, ftz: bool = False) -> Truths:
    """Ordered comparisons are false with a NaN, those ending in u true."""
    x, y = (format.value(format.flushed(v) if ftz else v) for v in (a, b))
    either = np.isnan(x) | np.isnan(y)
    if name in ("num", "nan"):
        return either if name == "nan" else ~either
    relation = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
                "ge": np.greater_equal}[name[:2]]  # fmt: skip
    return np.asarray(relation(x, y) & ~either | (either if name.endswith("u") else False))


for format in (F16, BF16, F32, F64):
    for flushing in (False, True) if format in (F16, F32) else (False,):
        dot, kinds = ".ftz" if flushing else "", f"{format.name} {format.name}"
        for name in COMPARISONS:
            case(f"setp.{name}{dot}.{format.name}", kinds, 32,
                 lambda a, b, f=format, n=name, z=flushing: compare(f, n, a, b, ftz=z),
                 "OP p, a, b; selp.u32 d, 1, 0, p")  # fmt: skip
        for name in ("lt", "geu"):
            for logic in ("and", "or", "xor"):
                combine: dict[str, Any] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
                if format.width == 16:  # has no second predicate
                    case(f"setp.{name}.{logic}{dot}.{format.name}", f"{kinds} truth", 32,
                         lambda a, b, c, f=format, n=name, z=flushing, g=combine[logic]:
                             g(compare(f, n, a, b, ftz=z), c != 0),
                         "setp.ne.u32 r, c, 0; OP p, a, b, r; selp.u32 d, 1, 0, p")  # fmt: skip
                    continue
                case(f"setp.{name}.{logic}{dot}.{format.name}", f"{kinds} truth", (32, 32),
                     lambda a, b, c, f=format, n=name, z=flushing, g=combine[logic]:
                         (g(compare(f, n, a, b, ftz=z), c != 0), g(~compare(f, n, a, b, ftz=z), c != 0)),
                     "setp.ne.u32 r, c, 0; OP p|q, a, b, r; selp.u32 d, 1, 0, p; selp.u32 e, 1, 0, q")  # fmt: skip
            for result, true in {"u32": 0xFFFFFFFF, "s32": 0xFFFFFFFF, "f32": 0x3F800000}.items():
                if format.width == 16 and result == "f32":
                    continue
                case(f"set.{name}{dot}.{result}.{format.name}", kinds, 32,
                     lambda a, b, f=format, n=name, z=flushing, true=true:
                         np.where(compare(f, n, a, b, ftz=z), np.uint32(true), 0))  # fmt: skip
for format, one in ((F16, 0x3C00), (BF16, 0x3F80)):
    kind = f"{format.name}x2"
    for name in ("eq", "ltu", "ge"):
        test = lambda a, b, f=format, n=name: compare(f, n, a, b)  # noqa: E731
        case(f"set.{name}.{format.name}.{format.name}", f"{format.name} {format.name}", 16,
             lambda a, b, t=test, one=one: np.where(t(a, b), one, 0))  # fmt: skip
        case(f"set.{name}.{kind}.{kind}", f"{kind} {kind}", 32,
             halves(lambda a, b, t=test, one=one: np.where(t(a, b), one, 0)))  # fmt: skip
        case(f"setp.{name}.{kind}", f"{kind} {kind}", (32, 32),
             lambda a, b, t=test: tuple(t(*(np.ascontiguousarray(x).view(np.uint16)[at::2] for x in (a, b)))
                                        for at in (0, 1)),
             "OP p|q, a, b; selp.u32 d, 1, 0, p; selp.u32 e, 1, 0, q")  # fmt: skip

# ---- approximate functions: the bounds are those of the ISA, but where an H200 was measured to exceed them ----------

Bound = Callable[..., Reals]  # wanted, inputs -> how far off


def within(ulps: float = 0.0, relative: float = 0.0, absolute: float = 0.0) -> Callable[[Format], Bound]:
    """As the ISA says it; a relative bound leaves at least half a unit in the last place."""

    def of_format(format: Format) -> Bound:
        def bound(want: Reals, *_: Reals) -> Reals:
            share = np.where(np.isfinite(want), np.abs(want), 0.0) * relative
            if relative or absolute:
                share = np.maximum(share, 0.5 * ulp(format, want))
            return ulps * ulp(format, want) + share + absolute

        return bound

    return of_format


@np.errstate(all="ignore")
def approximate(
    name: str,
    format: Format,
    kinds: str,
    function: Callable[..., Reals],
    bound: Callable[[Format], Bound],
    *,
    tag: str = "",
) -> None:
    """A case of a function of real numbers; ``.ftz`` in its name flushes what goes in and out."""
    packed, ftz = name.endswith("x2"), ".ftz" in name

    def oracle(*inputs: Bits) -> Near:
        parts = [np.ascontiguousarray(x).view(format.word) for x in inputs]
        reals = [format.value(format.flushed(part) if ftz else part) for part in parts]
        want = function(*reals)
        shape = (len(inputs[0]), 2) if packed else (len(inputs[0]),)
        return Near(format, want.reshape(shape), bound(format)(want, *reals).reshape(shape), ftz)

    case(name + tag, kinds, format.width * (1 + packed), oracle)


def logarithm_bound(format: Format) -> Bound:
    """2^-22 absolute between 1/2 and 2, relative elsewhere."""

    def bound(want: Reals, x: Reals) -> Reals:
        near_one = (x > 0.5) & (x < 2)
        share = np.where(np.isfinite(want), np.abs(want), 0.0)
        return np.maximum(2.0**-22 * np.where(near_one, 1.0, share), 0.5 * ulp(format, want))

    return bound


def exponential_bound(format: Format) -> Bound:
    """2^-9.9 relative as the ISA has it; an H200 cuts subnormal results toward zero, so one unit in the last place."""
    normal, smallest = within(relative=2.0**-9.9)(format), 2.0 ** (format.lowest + format.fraction_bits)
    return lambda want, *_: np.where(np.abs(want) < smallest, ulp(format, want), normal(want))


def angle(function: Callable[[Reals], Any]) -> Callable[[Reals], Reals]:
    """NaN for infinities."""
    return lambda x: np.where(np.isfinite(x), function(np.where(np.isfinite(x), x, 0.0)), np.nan)


for dot in ("", ".ftz"):
    approximate(f"rcp.approx{dot}.f32", F32, "f32", lambda x: 1 / x, within(ulps=1))
    approximate(f"sqrt.approx{dot}.f32", F32, "f32", np.sqrt, within(relative=2.0**-23, ulps=0.5))
    approximate(f"rsqrt.approx{dot}.f32", F32, "f32", lambda x: 1 / np.sqrt(x), within(relative=2.0**-22.9))
    approximate(f"lg2.approx{dot}.f32", F32, "f32", np.log2, logarithm_bound)
    approximate(f"ex2.approx{dot}.f32", F32, "f32", np.exp2, within(ulps=2.5))
    approximate(f"ex2.approx{dot}.f32", F32, "exponent", np.exp2, within(ulps=2.5), tag=":ordinary")
    # cos: the ISA says 2^-20.5; 10 of 2^20 results of an H200, near 3 pi / 2, are off by up to 2^-20.44
    for name, wave, error in (("sin", np.sin, 2.0**-20.5), ("cos", np.cos, 2.0**-20.4)):
        opcode = f"{name}.approx{dot}.f32"
        approximate(opcode, F32, "angle2pi", angle(wave), within(absolute=error), tag=":2pi")
        approximate(opcode, F32, "angle100pi", angle(wave), within(absolute=2.0**-14.7), tag=":100pi")
    approximate(f"div.approx{dot}.f32", F32, "f32 divisor", np.divide, within(ulps=2.5))
    approximate(f"div.full{dot}.f32", F32, "f32 f32", np.divide, within(ulps=2.5))
approximate("tanh.approx.f32", F32, "f32", np.tanh, within(relative=2.0**-11))
for kind in ("f16", "f16x2"):
    approximate(f"tanh.approx.{kind}", F16, kind, np.tanh, within(absolute=2.0**-10.987))
    approximate(f"ex2.approx.{kind}", F16, kind, np.exp2, exponential_bound)
for kind in ("bf16", "bf16x2"):
    approximate(f"tanh.approx.{kind}", BF16, kind, np.tanh, within(absolute=2.0**-8))
    approximate(f"ex2.approx.ftz.{kind}", BF16, kind, np.exp2, within(relative=2.0**-7))


def upper_word(function: Callable[[Reals], Reals]) -> Oracle:
    """Of float64 numbers of which only the upper 32 bits are looked at and made; subnormal ones are 0.

    So a NaN that has nothing but zeros there counts as infinity.
    """

    def oracle(a: Bits) -> Near:
        upper: NDArray[np.uint64] = F64.flushed(a & np.uint64(0xFFFFFFFF00000000))
        want = function(F64.value(upper))
        return Near(F64, want, np.where(np.isfinite(want), np.abs(want), 0.0) * 2.0**-19, ftz=True)

    return oracle


case("rcp.approx.ftz.f64", "f64", 64, upper_word(lambda x: 1 / x))
case("rsqrt.approx.ftz.f64", "f64", 64, upper_word(lambda x: 1 / np.sqrt(x)))
