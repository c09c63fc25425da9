"""Causal attention of many queries a request, in pages: float64 inside, one rounding at the end. See
`drvkit.ref.paged_attention` for the formula: the rows ``[q_starts[r], q_starts[r + 1])`` are the last
tokens of request r.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .paged_attention import dense_attention, gather_pages

__all__ = ["prefill_attention"]


def prefill_attention(
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    q_starts: NDArray[np.int32],
    lengths: NDArray[np.int32],
    block_table: NDArray[np.int32],
    *,
    layout: str = "HND",
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: NDArray[Any] | None = None,
    k_scale: NDArray[Any] | None = None,
    v_scale: NDArray[Any] | None = None,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """``q`` [max_tokens, q_heads, dim], ``k`` and ``v`` pools [pages, kv_heads, page, dim] ("HND") or [pages, page,
    kv_heads, dim] ("NHD"), ``q_starts`` [requests + 1], ``lengths`` [requests], ``block_table`` [requests, width].

    ``k_scale`` and ``v_scale`` [kv_heads] multiply keys and values. Gives the output like ``q`` and lse [max_tokens,
    q_heads], not rounded; 0 and -inf for rows from ``q_starts[-1]`` on.
    """
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    how: dict[str, Any] = {"scale": scale, "window": window, "soft_cap": soft_cap, "sinks": sinks}
    for request, (begin, end) in enumerate(itertools.pairwise(q_starts)):
        if begin == end:
            continue
        keys, values = (
            gather_pages(pool, block_table[request], int(lengths[request]), layout).astype(np.float64)
            * (1.0 if factor is None else factor.astype(np.float64)[:, None])
            for pool, factor in ((k, k_scale), (v, v_scale))
        )
        out[begin:end], lse[begin:end] = dense_attention(q[begin:end], keys, values, **how)
    return out, lse
