"""The comparators see what they must see: each mutation of a right answer is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from compare import assert_close, assert_equal_bits
from numpy.typing import NDArray

Mutation = Callable[[NDArray[Any]], NDArray[Any]]


def right(dtype: Any = np.float32) -> NDArray[Any]:
    values = np.linspace(-3, 3, 24).reshape(4, 6)
    values[0, 1], values[1, 2], values[2, 3], values[3, 4] = np.nan, np.inf, -np.inf, 0.0
    return values.astype(dtype)


def put(index: Any, value: float) -> Mutation:
    def mutate(values: NDArray[Any]) -> NDArray[Any]:
        values[index] = value
        return values

    return mutate


WRONG: dict[str, tuple[Mutation, str]] = {
    "one element off": (put((1, 1), 99.0), r"1 of 24 .* \[1, 1\]: got 99"),
    "NaN for a number": (put((2, 2), np.nan), r"\[2, 2\]"),
    "a number for NaN": (put((0, 1), 0.0), r"\[0, 1\]"),
    "all NaN": (put(..., np.nan), r"\[0, 0\]"),
    "inf of the other sign": (put((1, 2), -np.inf), r"\[1, 2\]"),
    "a large number for inf": (put((1, 2), 3e38), r"\[1, 2\]"),
    "inf for a number": (put((3, 5), np.inf), r"\[3, 5\]"),
    "all zero": (put(..., 0.0), r"\[0, "),
    "another shape": (lambda values: values.reshape(6, 4), r"shape \(6, 4\)"),
    "a row less": (lambda values: values[:-1], r"shape \(3, 6\)"),
    "an extent that would broadcast": (lambda values: values[:, :1], r"shape \(4, 1\)"),
    "another dtype": (lambda values: values.astype(np.float64), "float64"),
    "rows in another order": (lambda values: values[::-1].copy(), "differ"),
}


@pytest.mark.parametrize(("mutate", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_array_is_refused(mutate: Mutation, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_close(mutate(right()), right(), rtol=1e-6, atol=0, why="a test")
    with pytest.raises(AssertionError, match=message):
        assert_equal_bits(mutate(right()), right(), any_nan=True)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64, ml_dtypes.bfloat16])
def test_a_right_array_passes(dtype: Any) -> None:
    assert_close(right(dtype), right(dtype), rtol=0, atol=0, why="the same")
    assert_equal_bits(right(dtype), right(dtype))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0)])
def test_scalars_and_empty_arrays_are_compared(shape: tuple[int, ...]) -> None:
    values = np.zeros(shape, np.float32)
    assert_close(values, values.copy(), rtol=0, atol=0, why="the same")
    assert_equal_bits(values, values.copy())
    if values.size:
        with pytest.raises(AssertionError, match="1 of 1"):
            assert_close(values + np.float32(1), values, rtol=0.5, atol=0.5, why="a test")
        with pytest.raises(AssertionError, match="1 of 1"):
            assert_equal_bits(np.asarray(values + np.float32(1)), values)


def test_a_tolerance_is_relative_to_the_wanted_value_and_says_why() -> None:
    want = np.array([100.0, 1.0, 0.0], np.float32)
    got = want + np.array([0.5, 0.005, 0.01], np.float32)
    assert_close(got, want, rtol=0.01, atol=0.02, why="a test")
    with pytest.raises(AssertionError, match=r"1 of 3 .*\[2\].*the sum of three"):
        assert_close(got, want, rtol=0.01, atol=0, why="the sum of three")


def test_the_worst_element_is_told_not_the_first() -> None:
    want = np.zeros(5, np.float32)
    with pytest.raises(AssertionError, match=r"3 of 5 .*\[2\]: got 7"):
        assert_close(np.array([0, 1, 7, 2, 0], np.float32), want, rtol=0, atol=0.5, why="a test")


def test_bits_tell_zeros_and_nans_apart() -> None:
    zero, nan = np.zeros(2, np.float32), np.full(2, np.nan, np.float32)
    with pytest.raises(AssertionError, match=r"got -0\.0 \(0x80000000\), want 0\.0 \(0x00000000\)"):
        assert_equal_bits(-zero, zero)
    with pytest.raises(AssertionError, match="0xffc00000"):
        assert_equal_bits(-nan, nan)
    assert_equal_bits(-nan, nan, any_nan=True)
    assert_close(-zero, zero, rtol=0, atol=0, why="equal as numbers")


def test_exact_types_are_compared_by_bits() -> None:
    ints = np.array([2**31 - 1, -1], np.int32)
    with pytest.raises(TypeError, match="exact"):
        assert_close(ints, ints, rtol=0, atol=0, why="a test")
    with pytest.raises(AssertionError, match=r"\[1\]: got -2"):
        assert_equal_bits(ints - np.array([0, 1], np.int32), ints)
