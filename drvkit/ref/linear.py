"""A matrix of weights times each token."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["linear"]


def linear(x: NDArray[Any], weight: NDArray[Any]) -> NDArray[np.float64]:
    """``out[t][n] = sum over k of x[t][k] * weight[n][k]`` of ``x`` [tokens, inputs] and ``weight`` [outputs, inputs],
    not rounded."""
    with np.errstate(all="ignore"):
        return x.astype(np.float64) @ weight.astype(np.float64).T
