"""Attention to keys and values, dense and in pages: float64 inside, one rounding at the end.

Query i of a request's q_len queries stands at position ``p = length - q_len + i`` and attends to the tokens
``[p - window, p]``, from 0 on without a window. With ``x = scale * (q . k)``, or ``soft_cap * tanh(x / soft_cap)``:

    out = sum(exp(x) * v) / (sum(exp(x)) + exp(sink))        lse = log(sum(exp(x)))

A query that attends to nothing gives 0 and -inf.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["dense_attention", "gather_pages", "merge", "paged_attention"]


def dense_attention(
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: NDArray[Any] | None = None,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """One request: ``q`` [q_len, q_heads, dim], ``k`` and ``v`` [length, kv_heads, dim], ``sinks`` [q_heads].

    Gives the output [q_len, q_heads, dim] and lse [q_len, q_heads], not rounded. ``scale`` is ``1 / sqrt(dim)`` by
    default.
    """
    (q_len, q_heads, dim), (length, kv_heads, _) = q.shape, k.shape
    group = q_heads // kv_heads
    keys, values = (np.repeat(each.astype(np.float64), group, axis=1) for each in (k, v))
    x = np.einsum("qhd,thd->hqt", q.astype(np.float64), keys) * (1 / math.sqrt(dim) if scale is None else scale)
    if soft_cap is not None:
        x = soft_cap * np.tanh(x / soft_cap)
    position, token = np.arange(length - q_len, length)[:, None], np.arange(length)
    attends = token <= position
    if window is not None:
        attends &= token >= position - window
    x = np.where(attends, x, -np.inf)
    top = np.maximum(x.max(axis=-1, initial=-np.inf), np.finfo(np.float64).min)[..., None]
    p = np.exp(x - top)
    total = p.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        below = total if sinks is None else total + np.exp(sinks.astype(np.float64)[:, None, None] - top)
        weights = np.where(total > 0, p / below, 0.0)
        lse = np.where(total > 0, top + np.log(total), -np.inf)[..., 0]
    return np.einsum("hqt,thd->qhd", weights, values), lse.T


def gather_pages(pool: NDArray[Any], block_table: NDArray[np.int32], length: int, layout: str = "HND") -> NDArray[Any]:
    """The first ``length`` tokens [length, kv_heads, dim] of the request whose row of the block table is given."""
    page = pool.shape[2 if layout == "HND" else 1]
    pages = pool[block_table[: -(-length // page)]]
    tokens = pages.transpose(0, 2, 1, 3) if layout == "HND" else pages
    return tokens.reshape(-1, *tokens.shape[2:])[:length]


def paged_attention(
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    block_table: NDArray[np.int32],
    lengths: NDArray[np.int32],
    *,
    layout: str = "HND",
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: NDArray[Any] | None = None,
    k_scale: NDArray[Any] | None = None,
    v_scale: NDArray[Any] | None = None,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """A step of decoding: ``q`` [requests, q_len, q_heads, dim], ``k`` and ``v`` pools [pages, kv_heads, page, dim]
    ("HND") or [pages, page, kv_heads, dim] ("NHD"), ``block_table`` [requests, width], ``lengths`` [requests].

    ``k_scale`` and ``v_scale`` [kv_heads] multiply keys and values. Gives the output like ``q`` and lse [requests,
    q_len, q_heads], not rounded.
    """
    out, lse = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
    how: dict[str, Any] = {"scale": scale, "window": window, "soft_cap": soft_cap, "sinks": sinks}
    for request, length in enumerate(lengths):
        tokens = [gather_pages(pool, block_table[request], int(length), layout).astype(np.float64) for pool in (k, v)]
        for i, factor in enumerate((k_scale, v_scale)):
            if factor is not None:
                tokens[i] = tokens[i] * factor.astype(np.float64)[:, None]
        if length:
            out[request], lse[request] = dense_attention(q[request], *tokens, **how)
    return out, lse


def merge(outs: NDArray[Any], lses: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Attention to the union of disjoint parts of the tokens, of attention to each: ``outs`` [parts, ..., dim],
    ``lses`` [parts, ...], all without a sink."""
    lses = lses.astype(np.float64)
    top = np.maximum(lses.max(axis=0), np.finfo(np.float64).min)
    weights = np.exp(lses - top)
    total = weights.sum(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(total > 0, weights / total, 0.0)
        lse = np.where(total > 0, top + np.log(total), -np.inf)
    return (share[..., None] * outs.astype(np.float64)).sum(axis=0), lse
