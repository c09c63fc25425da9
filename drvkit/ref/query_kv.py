"""Queries and the latent row of keys and values: normalised and turned by position; and where a window has the rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["normalised_and_turned", "query_kv", "window_slots"]

Float64 = NDArray[np.float64]
Int32 = NDArray[np.int32]


def normalised_and_turned(
    x: NDArray[Any],
    positions: Int32,
    cos_sin: NDArray[np.float32],
    weight: NDArray[np.float32] | None = None,
    *,
    eps: float = 1e-6,
) -> Float64:
    """``x / sqrt(mean(x^2) + eps) * weight`` of rows [tokens, ..., dim], not rounded, of which the last elements are
    turned: pairs (2i, 2i + 1) by the angles that ``cos_sin`` [max_position, rotary] has of the token's position, first
    all cosines, then the sines. A position that it lacks becomes the nearest that it has."""
    y = x.astype(np.float64)
    with np.errstate(all="ignore"):
        y /= np.sqrt(np.mean(y**2, axis=-1, keepdims=True) + eps)
        if weight is not None:
            y *= weight
        angles = cos_sin[np.clip(positions, 0, len(cos_sin) - 1)].astype(np.float64)
        cos, sin = np.split(angles.reshape(len(x), *[1] * (x.ndim - 2), -1), 2, axis=-1)
        rotary = cos_sin.shape[1]
        even, odd = y[..., -rotary::2].copy(), y[..., 1 - rotary :: 2].copy()
        y[..., -rotary::2] = even * cos - odd * sin
        y[..., 1 - rotary :: 2] = odd * cos + even * sin
    return y


def query_kv(
    tokens: Int32,
    q: NDArray[Any],
    kv: NDArray[Any],
    weight: NDArray[np.float32],
    cos_sin: NDArray[np.float32],
    *,
    eps: float = 1e-6,
) -> tuple[Float64, Float64]:
    """``q`` [tokens, heads, dim] and ``kv`` [tokens, dim] as the kernel has them, but not rounded; 0 for padding.

    ``tokens`` [tokens, 4] as `step_tokens` gives them. The rows of ``kv`` become those of the window by ``encode`` of
    its format, at `window_slots`.
    """
    positions, is_padding = tokens[:, 1], tokens[:, 0] < 0
    queries = normalised_and_turned(q, positions, cos_sin, eps=eps)
    rows = normalised_and_turned(kv, positions, cos_sin, weight, eps=eps)
    queries[is_padding], rows[is_padding] = 0, 0
    return queries, rows


def window_slots(tokens: Int32, block_table: Int32, page_size: int) -> NDArray[np.int64]:
    """Where the row of each token goes: page * page_size + place. -1 for padding, and for a row whose place a later one
    of this step has, where the table [requests, width] is a ring."""
    slots = np.full(len(tokens), -1, np.int64)
    width = block_table.shape[1]
    for row, (request, position, _, end) in enumerate(tokens.tolist()):
        if request >= 0 and position + width * page_size >= end:
            page = int(block_table[request, position // page_size % width])
            slots[row] = page * page_size + position % page_size
    return slots
