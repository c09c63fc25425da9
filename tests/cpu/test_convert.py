"""Conversions: types of later processors, registers wider than the type, and what is refused."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from one_warp import Words, kernel, run

from drvkit.cpu.fault import ImageError
from drvkit.cpu.program import load

RANDOM = np.random.default_rng()
SMALL = {
    "e5m2x2": np.dtype(ml_dtypes.float8_e5m2),
    "e4m3x2": np.dtype(ml_dtypes.float8_e4m3fn),
    "e3m2x2": np.dtype(ml_dtypes.float6_e3m2fn),
    "e2m3x2": np.dtype(ml_dtypes.float6_e2m3fn),
    "e2m1x2": np.dtype(ml_dtypes.float4_e2m1fn),
}
LARGEST = {"e5m2x2": 57344.0, "e4m3x2": 448.0, "e3m2x2": 28.0, "e2m3x2": 7.5, "e2m1x2": 6.0}


def small_bits(type_: str) -> int:
    return {"e2m1x2": 4, "e2m3x2": 6, "e3m2x2": 6}.get(type_, 8)


def stored(type_: str) -> str:
    """The statements around a conversion to or from a register of 8 or 16 bits."""
    return ".reg .b8 %small;" if type_ == "e2m1x2" else ".reg .b16 %small;"


def codes(type_: str, values: NDArray[np.float32]) -> NDArray[np.uint32]:
    """The bits of numbers, the largest where they are too large."""
    dtype = SMALL[type_]
    largest = LARGEST[type_]
    return np.clip(values, -largest, largest).astype(dtype).view(np.uint8).astype(np.uint32)


def interesting(count: int = 512) -> NDArray[np.float32]:
    """Numbers that the small formats hold, ties between them, and others."""
    grid = np.arange(-40, 41) / 16
    around = np.ldexp(RANDOM.standard_normal(count - 2 * 81 - 8), RANDOM.integers(-20, 20, count - 2 * 81 - 8))
    special = [0.0, -0.0, np.inf, -np.inf, 1e-40, -1e-40, 448.0, 464.0]
    return np.concatenate([grid, grid * 2.0**-6, around, special]).astype(np.float32)


def run_all(body: str, *operands: Words, results: int = 1) -> Words:
    """Any number of operands, 32 at a time."""
    parts = [run(body, np.array(rows), results) for rows in zip(*(o.reshape(-1, 32) for o in operands), strict=True)]
    return np.concatenate(parts, axis=1)


@pytest.mark.parametrize("type_", SMALL)
def test_small_formats_round_to_the_nearest(type_: str) -> None:
    a, c = interesting(), RANDOM.permutation(interesting())
    body = f"{stored(type_)} cvt.rn.satfinite.{type_}.f32 %small, %a0, %a1; cvt.u32.u16 %d0, %small;"
    if type_ == "e2m1x2":
        body = body.replace("cvt.u32.u16", "cvt.u32.u8")
    (found,) = run_all(body, a.view(np.uint32), c.view(np.uint32))
    room = 4 if type_ == "e2m1x2" else 8
    np.testing.assert_array_equal(found, codes(type_, a) << room | codes(type_, c))


@pytest.mark.parametrize("source", ["f16x2", "bf16x2"])
@pytest.mark.parametrize("type_", SMALL)
def test_small_formats_are_made_of_halves(type_: str, source: str) -> None:
    dtype = np.dtype(np.float16 if source == "f16x2" else ml_dtypes.bfloat16)
    with np.errstate(over="ignore"):
        halves = interesting(1024).astype(dtype)
    take = "u8" if type_ == "e2m1x2" else "u16"
    body = f"{stored(type_)} cvt.rn.relu.satfinite.{type_}.{source} %small, %a0; cvt.u32.{take} %d0, %small;"
    (found,) = run_all(body, halves.view(np.uint32))
    each = codes(type_, np.maximum(halves.astype(np.float32), 0)).reshape(-1, 2)
    np.testing.assert_array_equal(found, each[:, 1] << (4 if type_ == "e2m1x2" else 8) | each[:, 0])


@pytest.mark.parametrize("type_", SMALL)
def test_every_number_of_a_small_format_is_an_f16(type_: str) -> None:
    count = 1 << small_bits(type_)
    low = np.resize(np.arange(count, dtype=np.uint32), max(count, 32))
    high = low[::-1]
    room = 4 if type_ == "e2m1x2" else 8
    take = "cvt.u8.u32" if type_ == "e2m1x2" else "cvt.u16.u32"
    body = f"{stored(type_)} {take} %small, %a0; cvt.rn.f16x2.{type_} %d0, %small;"
    (found,) = run_all(body, np.asarray(high << room | low, np.uint32))
    halves = np.stack([low, high], 1).astype(np.uint8).view(SMALL[type_]).astype(np.float16)
    expected = np.where(np.isnan(halves), np.uint16(0x7FFF), halves.view(np.uint16))
    np.testing.assert_array_equal(found, expected[:, 0] | expected[:, 1].astype(np.uint32) << 16)


@pytest.mark.parametrize("type_", SMALL)
def test_a_nan_becomes_a_nan_or_the_largest_number(type_: str) -> None:
    body = f"{stored(type_)} cvt.rn.satfinite.{type_}.f32 %small, %a0, %a0; cvt.u32.{{}} %d0, %small;"
    (found,) = run(body.format("u8" if type_ == "e2m1x2" else "u16"), np.full((1, 32), 0xFFC00001))
    assert found[0] == {"e2m1x2": 0x77, "e2m3x2": 0x1F1F, "e3m2x2": 0x1F1F}.get(type_, 0x7F7F)


def test_scales_are_powers_of_two_below_or_above() -> None:
    exponents = np.ldexp(1.0, np.arange(-149, 128)).astype(np.float32)
    x = np.resize(np.concatenate([exponents, np.nextafter(exponents, np.float32(np.inf))]), 576)
    below, above = run_all(
        ".reg .b16 %h<2>; cvt.rz.ue8m0x2.f32 %h0, %a0, %a0; cvt.rp.satfinite.ue8m0x2.f32 %h1, %a0, %a0; "
        "cvt.u32.u16 %d0, %h0; cvt.u32.u16 %d1, %h1;",
        x.view(np.uint32), results=2,
    )  # fmt: skip
    floor = np.clip(np.frexp(x)[1] - 1 + 127, 0, 254)
    up = np.clip(np.ceil(np.log2(x.astype(np.float64))).astype(int) + 127, 0, 254)
    np.testing.assert_array_equal(below, floor * 0x101)
    np.testing.assert_array_equal(above, up * 0x101)
    special = np.resize(np.array([np.inf, -np.inf, np.nan, -4.0], np.float32), 32).view(np.uint32)
    (kept,) = run(".reg .b16 %h; cvt.rz.ue8m0x2.f32 %h, %a0, %a0; cvt.u32.u16 %d0, %h;", special[None])
    (finite,) = run(".reg .b16 %h; cvt.rp.satfinite.ue8m0x2.f32 %h, %a0, %a0; cvt.u32.u16 %d0, %h;", special[None])
    assert list(kept[:4] & 0xFF) == [255, 255, 255, 129]
    assert list(finite[:4] & 0xFF) == [254, 254, 255, 129]


def test_scales_become_bf16() -> None:
    scales = np.arange(256, dtype=np.uint32)
    (found,) = run_all(
        ".reg .b16 %h; cvt.u16.u32 %h, %a0; cvt.rn.bf16x2.ue8m0x2 %d0, %h;", np.asarray(scales << 8 | 127, np.uint32)
    )
    expected = scales.astype(np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(ml_dtypes.bfloat16).view(np.uint16)
    expected[255] = 0x7FFF
    np.testing.assert_array_equal(found, expected.astype(np.uint32) << 16 | 0x3F80)


def test_registers_wider_than_the_type_are_cut_and_extended() -> None:
    x = RANDOM.integers(0, 1 << 32, 32, dtype=np.uint32)
    body = "cvt.s8.s32 %w0, %a0; mov.b64 {%d0, %d1}, %w0; cvt.u16.u32 %w1, %a0; mov.b64 {%d2, %d3}, %w1;"
    low, high, cut, zero = run(body, x[None], 4)
    np.testing.assert_array_equal(low, x.astype(np.int8).astype(np.int32).view(np.uint32))
    np.testing.assert_array_equal(high, np.where(x & 0x80, 0xFFFFFFFF, 0))
    np.testing.assert_array_equal(cut, x & 0xFFFF)
    assert not zero.any()


@pytest.mark.parametrize(
    "opcode", ["cvt.rs.f16x2.f32", "cvt.rn.satfinite.s2f6x2.f32", "cvt.rna.bf16.f32", "cvt.pack.sat.u8.u32.b32"]
)
def test_what_is_not_done_is_refused_by_name(opcode: str) -> None:
    with pytest.raises(ImageError, match=opcode):
        load(kernel(f"{opcode} %d0, %a0, %a1, %a2;", 3, 1))
