"""A step of one token a request: rotation, its key and value into their page, attention to all tokens so far."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .kv_write import kv_write, rotate, slot_mapping
from .paged_attention import paged_attention

__all__ = ["decode_attention"]


def decode_attention(
    qkv: NDArray[np.float32],
    k_pool: NDArray[Any],
    v_pool: NDArray[Any],
    block_table: NDArray[np.int32],
    lengths: NDArray[np.int32],
    cos_sin: NDArray[np.float32],
    *,
    q_heads: int,
    scale: float | None = None,
) -> tuple[NDArray[np.float64], NDArray[Any], NDArray[Any]]:
    """The output [requests, q_heads, dim], not rounded, and what the pools [pages, kv_heads, page_size, dim] become.

    ``qkv`` [requests, q_heads + 2 * kv_heads, dim]; pairs (2i, 2i + 1) of queries and keys are turned by
    ``lengths - 1``, keys and values rounded to the pools' dtype. Requests of length 0 or less give 0.
    """
    kv_heads = k_pool.shape[1]
    q, k, v = np.split(qkv, [q_heads, q_heads + kv_heads], axis=1)
    positions = np.maximum(lengths - 1, 0).astype(np.int32)
    turned_q, turned_k = (rotate(each, positions, cos_sin, "gptj") for each in (q, k))
    slots = slot_mapping(block_table, k_pool.shape[2], len(qkv), lengths=lengths)
    pools = kv_write(turned_k.astype(k_pool.dtype), v.astype(v_pool.dtype), k_pool, v_pool, slots)
    real = np.maximum(lengths, 0)
    out, _ = paged_attention(turned_q[:, None], *pools[:2], block_table, real, scale=scale)
    return out[:, 0], pools[0], pools[1]
