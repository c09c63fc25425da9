"""Rows over the root of their mean square (RMSNorm)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["rms_norm"]


def rms_norm(x: NDArray[Any], weight: NDArray[np.float32], *, eps: float = 1e-6) -> NDArray[np.float64]:
    """``weight * x / sqrt(mean(x^2) + eps)`` of rows ``x`` [tokens, dim] and ``weight`` [dim], not rounded."""
    exact = x.astype(np.float64)
    with np.errstate(all="ignore"):
        exact /= np.sqrt(np.mean(exact**2, axis=-1, keepdims=True) + eps)
        exact *= weight
    return exact
