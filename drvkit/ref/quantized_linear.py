"""Tokens times a matrix of weights, with what stands before and behind that in a Llama's layer."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["quantized_linear"]


def quantized_linear(
    x: NDArray[Any],
    weight: NDArray[np.float32],
    *,
    norm: NDArray[np.float32] | None = None,
    eps: float = 1e-5,
    residual: NDArray[np.float32] | None = None,
    gated: bool = False,
) -> NDArray[np.float64]:
    """``residual + n(x) @ weight^T`` of ``x`` [tokens, inputs] and ``weight`` [outputs, inputs], dequantised; not
    rounded.

    ``n(x) = norm * x / sqrt(mean(x^2) + eps)``, or ``x``. ``gated``: the first half of the products are a, the other
    b, and the result is ``a / (1 + exp(-a)) * b``.
    """
    with np.errstate(all="ignore"):
        rows = x.astype(np.float64)
        if norm is not None:
            rows = norm * rows / np.sqrt((rows**2).mean(axis=-1, keepdims=True) + eps)
        y = rows @ weight.astype(np.float64).T
        if gated:
            a, b = np.split(y, 2, axis=-1)
            y = a / (1 + np.exp(-a)) * b
        return y if residual is None else residual + y
