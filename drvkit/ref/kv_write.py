"""Keys and values of a step into pages: slots, rotation by position (RoPE), rounding to e4m3.

Float32 inside, each product and sum rounded by itself, as the kernel has it; one rounding to the stored dtype.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

__all__ = ["kv_write", "quantise", "rotate", "slot_mapping"]

E4M3_MAX = np.float32(448)


def rotate(
    x: NDArray[Any], positions: NDArray[np.int32], cos_sin: NDArray[np.float32], style: str = "neox"
) -> NDArray[np.float32]:
    """``x`` [tokens, heads, dim] with its pairs (a, b) turned to ``a * cos - b * sin, b * cos + a * sin``, not rounded.

    Of the first ``rotary_dim`` elements pairs are (i, i + rotary_dim / 2) for "neox", (2i, 2i + 1) for "gptj".
    ``cos_sin`` [max_position, rotary_dim] has in each row the cosines of all pairs, then the sines. A position that it
    lacks becomes the nearest that it has.
    """
    rotary = cos_sin.shape[1]
    angles = cos_sin[np.clip(positions, 0, len(cos_sin) - 1)][:, None]
    cos, sin = angles[..., : rotary // 2], angles[..., rotary // 2 :]
    y = x.astype(np.float32)
    if style == "neox":
        a, b = y[..., : rotary // 2].copy(), y[..., rotary // 2 : rotary].copy()
        places = slice(0, rotary // 2), slice(rotary // 2, rotary)
    else:
        a, b = y[..., 0:rotary:2].copy(), y[..., 1:rotary:2].copy()
        places = slice(0, rotary, 2), slice(1, rotary, 2)
    with np.errstate(all="ignore"):
        y[..., places[0]] = a * cos - b * sin
        y[..., places[1]] = b * cos + a * sin
    return y


def quantise(x: NDArray[Any], scale: NDArray[np.float32]) -> NDArray[Any]:
    """``x / scale`` as the nearest float8_e4m3fn, ties to even; infinities and what is beyond become +-448."""
    with np.errstate(all="ignore"):
        within: NDArray[Any] = np.clip(x.astype(np.float32) / scale, -E4M3_MAX, E4M3_MAX)
        return within.astype(ml_dtypes.float8_e4m3fn)


def kv_write(
    k: NDArray[Any],
    v: NDArray[Any],
    k_pool: NDArray[Any],
    v_pool: NDArray[Any],
    slots: NDArray[np.int64],
    *,
    layout: str = "HND",
    k_scale: NDArray[np.float32] | None = None,
    v_scale: NDArray[np.float32] | None = None,
    positions: NDArray[np.int32] | None = None,
    cos_sin: NDArray[np.float32] | None = None,
    style: str = "neox",
    q: NDArray[Any] | None = None,
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any] | None]:
    """What the pools and ``q`` become.

    ``k`` and ``v`` [tokens, kv_heads, dim], pools [pages, kv_heads, page_size, dim] ("HND") or [pages, page_size,
    kv_heads, dim] ("NHD"). The row of a token whose slot is negative, or beyond the pool, goes nowhere; where it is
    negative the row of ``q`` becomes 0.
    """
    pools = k_pool.copy(), v_pool.copy()
    queries = None if q is None else q.copy()
    if cos_sin is not None:
        assert positions is not None
        rotary = cos_sin.shape[1]
        # What passes keeps its bits: only a part goes through float32.
        turned = rotate(k, positions, cos_sin, style)
        if queries is not None:
            queries[..., :rotary] = _rounded(rotate(queries, positions, cos_sin, style)[..., :rotary], queries.dtype)
    else:
        rotary, turned = 0, k.astype(np.float32)
    if k_scale is not None and v_scale is not None:
        rows = [quantise(turned, k_scale[:, None]), quantise(v, v_scale[:, None])]
    else:
        keys = k.copy()
        keys[..., :rotary] = _rounded(turned[..., :rotary], k.dtype)
        rows = [keys, v]
    page_size = k_pool.shape[2 if layout == "HND" else 1]
    for pool, new in zip(pools, rows, strict=True):
        by_place = pool.swapaxes(1, 2) if layout == "HND" else pool
        for token, slot in enumerate(slots.tolist()):
            if 0 <= slot < len(pool) * page_size:
                by_place[slot // page_size, slot % page_size] = new[token]
    if queries is not None:
        queries[slots < 0] = 0
    return *pools, queries


def slot_mapping(
    block_table: NDArray[np.int32],
    page_size: int,
    tokens: int,
    *,
    positions: NDArray[np.int32] | None = None,
    requests: NDArray[np.int32] | None = None,
    lengths: NDArray[np.int32] | None = None,
    count: int | None = None,
) -> NDArray[np.int64]:
    """The slot of each of ``tokens`` tokens; -1 for padding, and for a place that the table [requests, width] lacks.

    Token t is at ``positions[t]`` of request ``requests[t]``. Without ``requests`` tokens stand request by request, as
    many of each; with ``lengths`` they are the last tokens of each request. Padding are negative positions, and the
    tokens from ``count`` on.
    """
    rows, width = block_table.shape
    slots = np.full(tokens, -1, np.int64)
    for token in range(tokens if count is None else min(count, tokens)):
        each = 1 if requests is not None else tokens // rows
        if lengths is not None:
            position = int(lengths[token // each]) - each + token % each
        else:
            assert positions is not None
            position = int(positions[token])
        if position < 0:
            continue
        request = token // each if requests is None else int(requests[token])
        if 0 <= request < rows and position < width * page_size:
            page = int(block_table[request, position // page_size])
            slots[token] = page * page_size + position % page_size if page >= 0 else -1
    return slots


def _rounded(x: NDArray[np.float32], dtype: np.dtype[Any]) -> NDArray[Any]:
    with np.errstate(all="ignore"):
        return x.astype(dtype)
