"""Comparing arrays strictly: shape, dtype, where NaN and infinities are, every element; the worst one is told."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


@np.errstate(all="ignore")  # a signalling NaN is no reason to warn
def assert_close(got: NDArray[Any], want: NDArray[Any], *, rtol: float, atol: float, why: str) -> None:
    """Every finite element: ``|got - want| <= atol + rtol * |want|``. ``why`` is the reason for this tolerance."""
    _assert_same_kind(got, want)
    if got.dtype.kind in "iub":
        raise TypeError(f"{got.dtype} is exact: use assert_equal_bits")
    g, w = got.astype(np.float64), want.astype(np.float64)
    _assert_same_places("NaN", np.isnan(g), np.isnan(w), got, want)
    _assert_same_places("+inf", g == np.inf, w == np.inf, got, want)
    _assert_same_places("-inf", g == -np.inf, w == -np.inf, got, want)
    finite = np.isfinite(w)
    error, bound = np.zeros_like(w), np.zeros_like(w)
    np.subtract(g, w, out=error, where=finite)
    np.abs(error, out=error)
    bound[finite] = atol + rtol * np.abs(w[finite])
    excess = error - bound
    bad = int(np.count_nonzero(excess > 0))
    if bad:
        at = _index(int(np.argmax(excess)), got.shape)
        raise AssertionError(
            f"{bad} of {got.size} elements differ; the worst, {list(at)}: got {got[at]}, want {want[at]}, off by "
            f"{error[at]:.3g}, allowed {bound[at]:.3g} (rtol={rtol:g}, atol={atol:g}: {why})"
        )


@np.errstate(all="ignore")
def assert_equal_bits(got: NDArray[Any], want: NDArray[Any], *, any_nan: bool = False) -> None:
    """Every element has the same bits: -0.0 is not 0.0. With ``any_nan`` one NaN is as good as another."""
    _assert_same_kind(got, want)
    differs = (_bits(got) != _bits(want)).any(axis=-1)
    if any_nan:
        differs &= ~(np.isnan(got) & np.isnan(want))
    if differs.any():
        at = _index(int(np.argmax(differs)), got.shape)
        raise AssertionError(
            f"{np.count_nonzero(differs)} of {got.size} elements differ; the first, {list(at)}: "
            f"got {got[at]} (0x{_hex(got[at])}), want {want[at]} (0x{_hex(want[at])})"
        )


def _assert_same_kind(got: NDArray[Any], want: NDArray[Any]) -> None:
    if got.shape != want.shape:
        raise AssertionError(f"got shape {got.shape}, want {want.shape}")
    if got.dtype != want.dtype:
        raise AssertionError(f"got {got.dtype}, want {want.dtype}")


def _assert_same_places(what: str, g: NDArray[Any], w: NDArray[Any], got: NDArray[Any], want: NDArray[Any]) -> None:
    differs = g != w
    if differs.any():
        at = _index(int(np.argmax(differs)), got.shape)
        raise AssertionError(
            f"{what} at {np.count_nonzero(g)} places, want {np.count_nonzero(w)}; the first that differs, {list(at)}: "
            f"got {got[at]}, want {want[at]}"
        )


def _index(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(flat, shape))


def _bits(values: NDArray[Any]) -> NDArray[np.uint8]:
    flat = np.ascontiguousarray(values).reshape(*values.shape, 1)
    return flat.view(np.uint8)


def _hex(value: Any) -> str:
    return str(value.tobytes()[::-1].hex())
