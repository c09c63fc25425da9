"""Sums, made in float32 and then rounded once to the type of the operands."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["add", "add_scalar"]


def add(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    """``a + b``, in the dtype of ``a``."""
    with np.errstate(all="ignore"):
        return np.asarray(a.astype(np.float32) + b.astype(np.float32), a.dtype)


def add_scalar(x: NDArray[Any], c: float) -> NDArray[Any]:
    """``x + c``, in the dtype of ``x``."""
    with np.errstate(all="ignore"):
        return np.asarray(x.astype(np.float32) + np.float32(c), x.dtype)
