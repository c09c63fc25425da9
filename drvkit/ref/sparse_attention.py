"""Attention of a step's tokens to rows that each has chosen, where a row is both key and value."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..records import ROTARY, Pages

__all__ = ["rows_in_pages", "sparse_attention"]

Int32 = NDArray[np.int32]
Float64 = NDArray[np.float64]


def rows_in_pages(pages: Pages, request: int, entries: NDArray[Any]) -> NDArray[np.float32]:
    """The rows [n, dim] of the given entries of a request. ``pages`` has arrays of the host."""
    numbers = entries // pages.page_size % pages.block_table.shape[1]
    slots = pages.block_table[request, numbers].astype(np.int64) * pages.page_size + entries % pages.page_size
    return pages.format.decode(*pages.format.rows(pages.pool, slots, pages.page_size))


def sparse_attention(
    q: NDArray[Any],
    tokens: Int32,
    window: Pages,
    *,
    window_size: int = 128,
    entries: Pages | None = None,
    visible: Int32 | None = None,
    indices: Int32 | None = None,
    sinks: NDArray[np.float32] | None = None,
    cos_sin: NDArray[np.float32] | None = None,
    scale: float | None = None,
) -> tuple[Float64, Float64]:
    """``out`` [tokens, heads, dim] and ``lse`` [tokens, heads]; ``pages`` and all else of the host.

    The token of row t, at position p of its request (``tokens`` [tokens, 4], see `drvkit.ref.step_tokens`), attends to
    the entries p - window_size + 1 to p of ``window``, and of ``entries`` to the first ``visible[t]``, or, of those
    that ``indices`` [tokens, k] has among its first min(k, visible[t]), to all that are not negative. With r over these
    rows, as float64::

        out = sum exp(scale * q r) r / (sum exp(scale * q r) + exp(sink))
        lse = log(sum exp(scale * q r))

    With ``cos_sin`` the last 64 elements of out are turned back by p. Without rows out is 0, lse -inf.
    """
    rows, heads, dim = q.shape
    out, lse = np.zeros((rows, heads, dim)), np.full((rows, heads), -np.inf)
    scale = dim**-0.5 if scale is None else scale
    for t, (request, position, _, _) in enumerate(tokens.tolist()):
        if request < 0:
            continue
        chosen = [rows_in_pages(window, request, np.arange(max(0, position + 1 - window_size), position + 1))]
        if entries is not None:
            assert visible is not None
            which = np.arange(int(visible[t])) if indices is None else indices[t, : int(visible[t])]
            chosen.append(rows_in_pages(entries, request, which[which >= 0]))
        r = np.concatenate(chosen).astype(np.float64)
        if len(r):
            logits = scale * (q[t].astype(np.float64) @ r.T)
            most = logits.max(axis=1, keepdims=True)
            weights = np.exp(logits - most)
            total = weights.sum(axis=1)
            lse[t] = np.log(total) + most[:, 0]
            with np.errstate(over="ignore"):
                below = total + (0 if sinks is None else np.exp(sinks.astype(np.float64) - most[:, 0]))
            out[t] = weights @ r / below[:, None]
        if cos_sin is not None:
            cos, sin = cos_sin[position, : ROTARY // 2], cos_sin[position, ROTARY // 2 :]
            even, odd = out[t, :, -ROTARY::2].copy(), out[t, :, 1 - ROTARY :: 2].copy()
            out[t, :, -ROTARY::2], out[t, :, 1 - ROTARY :: 2] = even * cos + odd * sin, odd * cos - even * sin
    return out, lse
