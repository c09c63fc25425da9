"""Floating point: what the table of vectors has no cases for."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from one_warp import Words, kernel, run

from drvkit.cpu.fault import ImageError
from drvkit.cpu.program import load

RANDOM = np.random.default_rng()
BF16 = np.dtype(ml_dtypes.bfloat16)
Reals = NDArray[np.float32]


def bits(*rows: NDArray[np.floating]) -> Words:
    """Rows of 32 f32 numbers as words."""
    return np.array([np.asarray(row, np.float32) for row in rows]).view(np.uint32)


def random_reals() -> Reals:
    return RANDOM.standard_normal(32, np.float32)


def narrow_words(dtype: np.dtype, row: Reals) -> tuple[NDArray[np.uint32], NDArray[np.float64]]:
    """Numbers of a 16-bit format in words, and what they are."""
    narrow = row.astype(dtype)
    return narrow.view(np.uint16).astype(np.uint32), narrow.astype(np.float64)


# Registers that are the same in every thread take another way through the code than those of lanes

UNIFORM = [
    *(f"{name}.{rounding}.f32" for name in ("add", "sub", "mul", "div") for rounding in ("rn", "rz", "rm", "rp")),
    *(f"{name}{kind}" for name in ("add", "sub", "mul", "min", "max") for kind in (".f16x2", ".bf16x2")),
    "add.sat.f32", "mul.ftz.f32", "min.NaN.f32", "max.xorsign.abs.f32", "neg.f32", "abs.f32", "neg.f16x2",
    "cvt.rn.bf16x2.f32", "cvt.rz.f16x2.f32", "cvt.rni.s32.f32", "cvt.rm.f32.u32", "cvt.rna.tf32.f32",
    "cvt.sat.f32.f32", "cvt.rzi.u32.f32", "cvt.sat.s16.s32", "cvt.rn.f16x2.e4m3x2",
]  # fmt: skip


@pytest.mark.parametrize("opcode", UNIFORM)
def test_an_instruction_on_constants_gives_what_it_gives_lane_by_lane(opcode: str) -> None:
    one = opcode.startswith(("neg", "abs", "cvt")) and "x2.f32" not in opcode
    pairs = [(0x3F800001, 0xBF7FFFFF), (0xC0490FDB, 0x00000001), (0x7F800000, 0xFF800000), (0x7FC12345, 0x3C003C01)]
    body = ""
    for n, (a, c) in enumerate(pairs):
        second = "" if one else f", %a{2 * n + 1}"
        body += f"{opcode} %d{n}, %a{2 * n}{second}; "
        body += f"mov.b32 %r{2 * n}, {a:#x}; mov.b32 %r{2 * n + 1}, {c:#x}; "
        body += f"{opcode} %r{8 + n}, %r{2 * n}{second.replace('a', 'r')}; mov.b32 %d{4 + n}, %r{8 + n}; "
    found = run(body, np.array([[word] * 32 for pair in pairs for word in pair]), 8)
    np.testing.assert_array_equal(found[4:], found[:4])


@pytest.mark.parametrize("opcode", ["setp.lt.f16x2", "setp.geu.bf16x2"])
def test_packed_comparisons_of_constants_give_both_halves(opcode: str) -> None:
    body = "{} %p0|%p1, {}, {}; selp.b32 %d0, 1, 0, %p0; selp.b32 %d1, 1, 0, %p1;"
    by_lane = run(body.format(opcode, "%a0", "%a1"), np.array([[0x3C004000] * 32, [0x40003C00] * 32]), 2)
    constant = run("mov.b32 %r0, 0x3C004000; mov.b32 %r1, 0x40003C00; " + body.format(opcode, "%r0", "%r1"), results=2)
    np.testing.assert_array_equal(constant, by_lane)
    assert by_lane[0, 0] != by_lane[1, 0]


# Types that only later processors have


@pytest.mark.parametrize("type_", ["f16", "bf16"])
def test_mixed_sums_widen_all_operands_but_the_last(type_: str) -> None:
    dtype = np.dtype(np.float16) if type_ == "f16" else BF16
    (a, x), (c, y), z = narrow_words(dtype, random_reals()), narrow_words(dtype, random_reals()), random_reals()
    body = f"add.f32.{type_} %d0, %a0, %a2; fma.rn.f32.{type_} %d1, %a0, %a1, %a2; sub.rz.f32.{type_} %d2, %a0, %a2;"
    total, product, difference = run(body, np.array([a, c, z.view(np.uint32)]), 3).view(np.float32)
    np.testing.assert_array_equal(total, (x + z).astype(np.float32))
    np.testing.assert_array_equal(product, (x * y + z).astype(np.float32))
    assert np.all(np.abs(difference) <= np.abs(x - z))


def test_pairs_of_f32_are_two_numbers() -> None:
    a, c, d, f = (random_reals() for _ in range(4))
    body = """mov.b64 %w0, {%a0, %a1}; mov.b64 %w1, {%a2, %a3};
        fma.rn.f32x2 %w2, %w0, %w1, %w0; mov.b64 {%d0, %d1}, %w2;
        mul.f32x2 %w3, %w0, %w1; mov.b64 {%d2, %d3}, %w3;"""
    low, high, low_product, high_product = run(body, bits(a, c, d, f), 4).view(np.float32)
    np.testing.assert_array_equal(low, (a.astype(np.float64) * d + a).astype(np.float32))
    np.testing.assert_array_equal(high, (c.astype(np.float64) * f + c).astype(np.float32))
    np.testing.assert_array_equal(low_product, a * d)
    np.testing.assert_array_equal(high_product, c * f)


def test_three_operands_have_one_minimum() -> None:
    a, c, d = (random_reals() for _ in range(3))
    c[0] = np.nan
    least, size, nan = run(
        "min.f32 %d0, %a0, %a1, %a2; max.abs.f32 %d1, %a0, %a1, %a2; min.NaN.f32 %d2, %a0, %a1, %a2;", bits(a, c, d), 3
    )
    np.testing.assert_array_equal(least.view(np.float32), np.fmin(np.fmin(a, c), d))
    np.testing.assert_array_equal(size.view(np.float32), np.fmax(np.fmax(np.abs(a), np.abs(c)), np.abs(d)))
    assert nan[0] == 0x7FFFFFFF
    np.testing.assert_array_equal(nan[1:].view(np.float32), np.minimum(np.minimum(a, c), d)[1:])


def test_packed_comparisons_give_masks_too() -> None:
    given = np.array([[0x3C007E00] * 32, [0x40003C00] * 32])
    mask, either = run(
        "set.lt.u32.f16x2 %d0, %a0, %a1; setp.ne.b32 %p0, %lane, 0; set.lt.and.u32.f16x2 %d1, %a0, %a1, %p0;", given, 2
    )
    assert set(mask) == {0xFFFF0000}  # the lower half has a NaN
    assert list(either) == [0] + [0xFFFF0000] * 31


# One rounding


def test_a_product_that_is_a_tie_of_bf16_is_decided_by_what_is_added() -> None:
    # (1 + 2^-7) * (1 + 2^-1) = 1 + 2^-1 + 2^-7 + 2^-8 lies between two numbers
    tie, tiny = np.full(32, 0x3FC03F81, np.uint32), np.array([0x00010001, 0x80018001] * 16, np.uint32)
    (result,) = run(
        """.reg .b16 %h<5>; mov.b32 {%h0, %h1}, %a0; mov.b32 {%h2, %h3}, %a1;
        fma.rn.bf16 %h4, %h0, %h1, %h2; mov.b32 %d0, {%h4, %h4};""",
        np.array([tie, tiny]),
    )
    assert list(result[:2] & 0xFFFF) == [0x3FC2, 0x3FC1]


# Functions


def test_powers_of_two_are_exact_where_the_exponent_is_an_integer() -> None:
    for first in range(-160, 160, 32):
        exponents = np.arange(first, first + 32)
        (found,) = run("ex2.approx.f32 %d0, %a0;", bits(exponents.astype(np.float32))).view(np.float32)
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(found, np.ldexp(1.0, exponents).astype(np.float32))


def test_logarithms_of_powers_of_two_are_exact() -> None:
    for first in range(-149, 128, 32):
        exponents = np.arange(first, min(first + 32, 128))
        (found,) = run("lg2.approx.f32 %d0, %a0;", bits(np.resize(np.ldexp(1.0, exponents), 32))).view(np.float32)
        np.testing.assert_array_equal(found, np.resize(exponents, 32))


def test_functions_of_special_numbers() -> None:
    x = np.resize([0.0, -0.0, math.inf, -math.inf, math.nan, -1.0, 1e-40, -1e-40], 32)
    opcodes = [
        "ex2.approx",
        "lg2.approx",
        "lg2.approx.ftz",
        "rsqrt.approx",
        "sin.approx",
        "tanh.approx",
        "rcp.approx.ftz",
    ]
    body = " ".join(f"{opcode}.f32 %d{n}, %a0;" for n, opcode in enumerate(opcodes))
    found = run(body, bits(x), len(opcodes)).view(np.float32)[:, :8]
    inf, nan = math.inf, math.nan
    lg2_of_tiny = np.float32(math.log2(np.float32(1e-40)))
    np.testing.assert_array_equal(found[0], [1, 1, inf, 0, nan, 0.5, 1, 1])
    np.testing.assert_array_equal(found[1], [-inf, -inf, inf, nan, nan, nan, lg2_of_tiny, nan])
    np.testing.assert_array_equal(found[2], [-inf, -inf, inf, nan, nan, nan, -inf, -inf])
    np.testing.assert_array_equal(found[3][:6], [inf, -inf, 0, nan, nan, nan])
    np.testing.assert_array_equal(found[4][:5], [0, -0.0, nan, nan, nan])
    np.testing.assert_array_equal(np.signbit(found[4][:2]), [False, True])
    np.testing.assert_array_equal(found[5][:5], [0, -0.0, 1, -1, nan])
    np.testing.assert_array_equal(found[6][6:], [inf, -inf])
    assert set(found.view(np.uint32)[np.isnan(found)]) == {0x7FFFFFFF}


def test_sines_of_huge_numbers_stay_between_their_bounds() -> None:
    x = np.ldexp(random_reals(), RANDOM.integers(20, 120, 32))
    sine, cosine = run("sin.approx.f32 %d0, %a0; cos.approx.f32 %d1, %a0;", bits(x), 2).view(np.float32)
    assert np.all(np.abs(sine) <= 1)
    assert np.all(np.abs(cosine) <= 1)


def test_a_guard_leaves_the_result_of_other_lanes() -> None:
    x = random_reals()
    body = (
        "mov.b32 %d0, 7; setp.lt.u32 %p0, %lane, 16; @%p0 ex2.approx.f32 %d0, %a0; @!%p0 fma.rm.f32 %d0, %a0, %a0, %a0;"
    )
    (found,) = run(body, bits(x)).view(np.float32)
    np.testing.assert_allclose(found[:16], np.exp2(x[:16]), rtol=3e-7)
    np.testing.assert_allclose(found[16:], x[16:] * x[16:] + x[16:], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("opcode", ["fma.rn.oob.f16", "add.rz.f16", "mul.rm.bf16x2", "cos.approx.wide.f32"])
def test_what_is_not_done_is_refused_by_name(opcode: str) -> None:
    with pytest.raises(ImageError, match=opcode):
        load(kernel(f"{opcode} %d0, %a0, %a1, %a2;", 3, 1))
