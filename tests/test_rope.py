"""Tables of cosines and sines: frequencies by their definition, YaRN, and angles that are rounded to float32."""

from __future__ import annotations

import numpy as np
import pytest
from compare import assert_close, assert_equal_bits
from numpy.typing import NDArray

from drvkit.rope import Yarn, cos_sin_table

BASES = (10000.0, 160000.0)


def frequencies(theta: float, yarn: Yarn | None = None) -> NDArray[np.float64]:
    """Of all pairs, out of the sines and cosines of position 1, where every angle is at most 1."""
    row = cos_sin_table(2, theta=theta, yarn=yarn)[1].astype(np.float64)
    angles: NDArray[np.float64] = np.arctan2(row[32:], row[:32])
    return angles


@pytest.mark.parametrize("theta", BASES)
def test_angles_of_small_positions_are_exact(theta: float) -> None:
    table = cos_sin_table(100, theta=theta)
    assert table.shape == (100, 64)
    assert table.dtype == np.float32
    for position in (0, 1, 2, 7, 99):
        for pair in range(32):
            angle = position * theta ** (-pair / 32)
            got = table[position, [pair, 32 + pair]].astype(np.float64)
            why = "an angle up to 99, rounded to float32 twice, and one more rounding"
            assert_close(got, np.array([np.cos(angle), np.sin(angle)]), rtol=0, atol=1.3e-5, why=why)
    assert_equal_bits(table[0], np.repeat(np.array([1, 0], np.float32), 32))


def test_yarn_leaves_fast_pairs_and_slows_down_slow_ones() -> None:
    plain, yarn = frequencies(160000.0), frequencies(160000.0, Yarn())
    ratio = plain / yarn
    assert ratio[:16] == pytest.approx(np.ones(16), rel=1e-6)
    assert ratio[25:] == pytest.approx(np.full(7, 16.0), rel=1e-6)
    keep = 1 - (np.arange(16, 25) - 15) / 10  # a straight line between them
    assert 1 / ratio[16:25] == pytest.approx(keep + (1 - keep) / 16, rel=1e-6)


def test_where_yarn_begins_goes_by_turns() -> None:
    factor, trained = 4.0, 1024
    plain, yarn = frequencies(10000.0), frequencies(10000.0, Yarn(factor, trained, beta_fast=8, beta_slow=2))
    turns = trained * plain / (2 * np.pi)
    ratio = plain / yarn
    fast, slow = np.flatnonzero(turns > 8), np.flatnonzero(turns < 2)
    assert ratio[fast] == pytest.approx(np.ones(len(fast)), rel=1e-6)
    assert ratio[slow] == pytest.approx(np.full(len(slow), factor), rel=1e-6)
    assert (np.diff(ratio) > -1e-6).all()
    between = np.setdiff1d(np.arange(32), [*fast, *slow])
    assert between.tolist() == [11, 12, 13, 14, 15]
    assert ((ratio[between] > 1) & (ratio[between] < factor)).all()


def test_yarn_of_no_width_is_a_step() -> None:
    ratio = frequencies(10000.0) / frequencies(10000.0, Yarn(8.0, 4, 1e9, 1e9))
    assert ratio[1:] == pytest.approx(np.full(31, 8.0), rel=1e-6)


def test_far_angles_are_those_that_float32_has() -> None:
    position, theta = 999999, 10.0  # eight fast pairs: as good as 64, and a table of a million rows is small
    table = cos_sin_table(position + 1, theta=theta, rotary_dim=16)
    exact = np.array([theta ** (-pair / 8) for pair in range(8)])
    rounded = (np.float32(position) * exact.astype(np.float32)).astype(np.float64)
    assert_equal_bits(table[-1], np.concatenate([np.cos(rounded), np.sin(rounded)]).astype(np.float32))
    off = np.abs(table[-1, :8] - np.cos(position * exact)).max()
    assert 0.01 < off < 0.1  # so much would a kernel be off that computes its angles in float64


@pytest.mark.parametrize("rotary_dim", [2, 64, 128])
def test_a_table_has_as_many_pairs_as_it_is_asked_for(rotary_dim: int) -> None:
    table = cos_sin_table(3, theta=10000.0, rotary_dim=rotary_dim)
    assert table.shape == (3, rotary_dim)
    pairs = rotary_dim // 2
    assert_close(
        (table[:, :pairs] ** 2 + table[:, pairs:] ** 2).astype(np.float64),
        np.ones((3, pairs)),
        rtol=0,
        atol=3e-7,
        why="of one angle, in float32",
    )
    assert table[1, pairs] == np.float32(np.sin(1.0))


@pytest.mark.parametrize("rotary_dim", [0, 3, -2])
def test_pairs_that_cannot_be_are_refused(rotary_dim: int) -> None:
    with pytest.raises(ValueError, match=f"rotary_dim: wanted an even number, got {rotary_dim}"):
        cos_sin_table(3, theta=10000.0, rotary_dim=rotary_dim)
