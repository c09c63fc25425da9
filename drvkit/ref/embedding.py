"""Rows of a table by their numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["embedding"]


def embedding(ids: NDArray[np.int32], table: NDArray[Any]) -> NDArray[np.float32]:
    """``table[ids[t]]`` of ``table`` [rows, dim]; 0 where ``ids[t]`` is negative."""
    out = table[np.maximum(ids, 0)].astype(np.float32)
    out[ids < 0] = 0
    return out
