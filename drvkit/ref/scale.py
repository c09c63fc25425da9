"""y = x * alpha: a multiplication in float32, then one rounding to the type of x."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["scale", "scale_dynamic", "scale_padded"]


def scale(x: NDArray[Any], alpha: float) -> NDArray[Any]:
    """``x * alpha``, in the dtype of ``x``."""
    with np.errstate(all="ignore"):
        return np.asarray(x.astype(np.float32) * np.float32(alpha), x.dtype)


def scale_dynamic(x: NDArray[Any], alpha: NDArray[np.float32]) -> NDArray[Any]:
    """``x * alpha``, with the one element of ``alpha``."""
    return scale(x, alpha.item())


def scale_padded(x: NDArray[Any], y: NDArray[Any], alpha: float) -> NDArray[Any]:
    """What ``y`` becomes: ``x * alpha`` where ``x`` is not zero, and as it was where it is.

    ``alpha`` is rounded to the dtype first, as the kernel's parameter is. int32 wraps.
    """
    factor = x.dtype.type(alpha)
    with np.errstate(all="ignore"):
        product = x * factor if x.dtype.kind == "i" else scale(x, float(factor))
        return np.where(x == 0, y, product)
