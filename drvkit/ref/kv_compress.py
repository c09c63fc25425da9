"""Tokens of a step into entries of a compressed cache.

Everything is read before anything is written. Float64 up to the entry, which is made float32; the Hadamard transform
is in float32, stage by stage, as the kernel has it; rows are rounded to bfloat16 as they are encoded.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..records import ROTARY

__all__ = ["entries", "kv_save", "walsh_hadamard"]

Float32 = NDArray[np.float32]
Int32 = NDArray[np.int32]


def walsh_hadamard(x: NDArray[Any]) -> NDArray[Any]:
    """``H x / sqrt(n)`` on the last axis of n elements, a power of two, H in Sylvester's order."""
    n, h = x.shape[-1], 1
    while h < n:
        pairs = x.reshape(*x.shape[:-1], n // (2 * h), 2, h)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = np.stack([a + b, a - b], axis=-2).reshape(x.shape)
        h *= 2
    y: NDArray[Any] = x * x.dtype.type(n**-0.5)
    return y


def entries(
    tokens: Int32,
    ug: Float32,
    state: Float32,
    rings: Int32,
    ape: Float32,
    weight: Float32,
    cos_sin: Float32,
    *,
    ratio: int,
    hadamard: bool = False,
    eps: float = 1e-6,
) -> tuple[Int32, Float32]:
    """The entries that end in a step: request and number of each [n, 2], and its elements [n, dim]. Those of 4 tokens
    are of the first half of the columns of the 4 tokens before them, and of the second half of theirs."""
    columns, dim, cap = ape.shape[1], len(weight), state.shape[1]
    halves = columns // dim
    made: list[tuple[int, int]] = []
    rows = []
    for row, (request, position, start, _) in enumerate(tokens.tolist()):
        if request < 0 or (position + 1) % ratio:
            continue
        slots = np.arange(halves * ratio)
        positions = position + 1 - len(slots) + slots
        slots, positions = slots[positions >= 0], positions[positions >= 0]
        both = np.empty((len(slots), 2 * columns))
        new = positions >= start
        both[new] = ug[row + positions[new] - position]
        if not new.all():
            both[~new] = state[rings[request], positions[~new] % cap]
        at = (slots // ratio * dim)[:, None] + np.arange(dim)
        u = np.take_along_axis(both[:, :columns], at, axis=1)
        g = np.take_along_axis(both[:, columns:] + ape[slots % ratio], at, axis=1)
        weights = np.exp(g - g.max(axis=0))
        p = (weights / weights.sum(axis=0) * u).sum(axis=0)
        y = p / np.sqrt((p * p).mean() + eps) * weight
        cos, sin = np.split(cos_sin[position + 1 - ratio].astype(np.float64), 2)
        even, odd = y[-ROTARY::2].copy(), y[1 - ROTARY :: 2].copy()
        y[-ROTARY::2], y[1 - ROTARY :: 2] = even * cos - odd * sin, odd * cos + even * sin
        made.append((request, position // ratio))
        rows.append(y.astype(np.float32))
    result = np.array(rows, np.float32).reshape(-1, dim)
    return np.array(made, np.int32).reshape(-1, 2), walsh_hadamard(result) if hadamard else result


def kv_save(tokens: Int32, ug: Float32, state: Float32, rings: Int32) -> Float32:
    """What ``state`` becomes: position p of a request at place ``p % cap`` of its ring, of a step with more rows than
    that the last ones."""
    after, cap = state.copy(), state.shape[1]
    for row, (request, position, _, end) in enumerate(tokens.tolist()):
        if request >= 0 and position >= end - cap:
            after[rings[request], position % cap] = ug[row]
    return after
