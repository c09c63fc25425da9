"""A decode step's attention in one launch: rotation by position, the new token's place in its page, and attention to
all tokens so far. For models and batches so small that a launch takes longer than its work: `paged_attention` behind
`kv_write` is for the others, and has what this lacks (windows, sinks, 8-bit pools, several queries)::

    decode_attention(graph, qkv, k_pool, v_pool, block_table, lengths, cos_sin, out, after=projected)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from . import (
    HALVES,
    Where,
    aligned,
    apart,
    array,
    device_of,
    kv_pools,
    launch,
    shaped,
    span,
    token_rows,
    token_stride,
)

if TYPE_CHECKING:
    from ..graph import After
    from ..node import Node

__all__ = ["decode_attention"]

FLOAT32, INT32 = np.dtype(np.float32), np.dtype(np.int32)
DIMS = (64, 128)
MOST_GROUP = 4  # queries that a lane has registers for
THREADS, MOST_BLOCKS = 128, 8  # of a block; of a cluster, which shares a request's tokens
RESIDENT = 2  # blocks of a multiprocessor, up to which a request has more of them


def decode_attention(
    where: Where,
    qkv: Any,
    k_pool: Any,
    v_pool: Any,
    block_table: Any,
    lengths: Any,
    cos_sin: Any,
    out: Any,
    *,
    scale: float | None = None,
    after: After = None,
    name: str | None = None,
) -> Node | None:
    """``out = softmax(scale * q k^T) v`` for the last token of each request, whose key and value go into the pools.

    Args:
        qkv: float32 [requests, q_heads + 2 * kv_heads, dim], of each request its queries, keys and values; requests may
            be parts of wider rows. dim is 64 or 128, ``q_heads / kv_heads`` a whole number up to 4.
        k_pool, v_pool: float16 or bfloat16 [pages, kv_heads, page_size, dim], of the same shape and strides, page_size
            8, 16, 32, 64 or 128; a row of dim is contiguous.
        block_table: int32 [requests, table_width]: the pages of each request; entries behind its tokens are not read.
        lengths: int32 [requests]: tokens of each, the new one among them. 0 or less for padding: its output is 0, and
            nothing else of it is read or written. One beyond the block table or ``cos_sin`` counts as what there is
            room for; the CPU device reports it.
        cos_sin: float32 [max_position, dim], as of `kv_write`, whose "gptj" style this has: pairs are (2i, 2i + 1).
        out: float32 [requests, q_heads, dim], requests likewise.
        scale: of the logits; 1 / sqrt(dim) by default.

    Keys are turned and rounded once; queries, logits and sums are float32. The bits of a request depend on how many
    requests there are, not on what the others are. With a programmatic edge ``lengths``, ``block_table`` and the pools
    are read before the kernel before this one has ended: only ``qkv`` may be its work.
    """
    op = "decode_attention"
    device = device_of(op, where)
    rows = token_rows(f"{op}: qkv", qkv, [FLOAT32], axes=("requests", "heads", "dim"))
    requests, heads, dim = rows.shape
    result = token_rows(f"{op}: out", out, [FLOAT32], axes=("requests", "heads", "dim"))
    q_heads = result.shape[1]
    shaped(f"{op}: out", result, (requests, q_heads, dim))
    kv_heads = (heads - q_heads) // 2
    if dim not in DIMS or requests > 65535:
        raise ValueError(f"{op}: qkv: wanted shape (up to 65535 requests, heads, 64 or 128), got {rows.shape}")
    if (
        kv_heads < 1
        or 2 * kv_heads != heads - q_heads
        or q_heads % kv_heads
        or not 1 <= q_heads // kv_heads <= MOST_GROUP
    ):
        raise ValueError(
            f"{op}: qkv: {heads} heads for {q_heads} queries: wanted as many keys as values, and of queries 1 to "
            f"{MOST_GROUP} times as many"
        )
    if token_stride(result) < q_heads * dim:
        raise ValueError(f"{op}: out: requests overlap: strides {result.strides} of shape {result.shape}")
    pools = kv_pools(op, k_pool, v_pool, HALVES, "HND", kv_heads, dim)
    table = array(f"{op}: block_table", block_table, [INT32])
    if len(table.shape) != 2 or table.shape[0] != requests or not table.shape[1]:
        raise ValueError(f"{op}: block_table: wanted shape ({requests}, table_width), got {table.shape}")
    counts = array(f"{op}: lengths", lengths, [INT32])
    shaped(f"{op}: lengths", counts, (requests,))
    angles = aligned(f"{op}: cos_sin", array(f"{op}: cos_sin", cos_sin, [FLOAT32]))
    if len(angles.shape) != 2 or angles.shape[1] != dim or not angles.shape[0]:
        raise ValueError(f"{op}: cos_sin: wanted shape (max_position, {dim}), got {angles.shape}")
    width, page_size = table.shape[1], pools[0].shape[2]
    if width * page_size >= 2**30:
        raise ValueError(f"{op}: block_table: {width} pages are {width * page_size} tokens: 2**30 or more")
    if scale is not None and (
        isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale < math.inf
    ):
        raise ValueError(f"{op}: scale: wanted None or a positive number, got {scale!r}")
    read = {"qkv": rows, "block_table": table, "lengths": counts, "cos_sin": angles}
    written = {"out": result, "k_pool": pools[0], "v_pool": pools[1]}
    for role, seen in written.items():
        others = {**read, **{other: each for other, each in written.items() if other > role}}
        for other, each in others.items():
            apart(f"{op}: {role}", seen, other, each)

    blocks, most = 1, MOST_BLOCKS if device.compute_capability >= (9, 0) else 1
    while blocks < most and 2 * blocks * kv_heads * requests <= RESIDENT * device.multiprocessors:
        blocks *= 2
    page, head, token = (stride // pools[0].dtype.itemsize for stride in pools[0].strides[:3])
    args = (
        *(span(qkv, rows), span(k_pool, pools[0]), span(v_pool, pools[1]), block_table, lengths, cos_sin),
        *(span(out, result), token_stride(rows), token_stride(result), page, head, token),
        *(pools[0].shape[0], width, page_size.bit_length() - 1, angles.shape[0]),
        1 / math.sqrt(dim) if scale is None else scale,
    )
    attributes: dict[str, Any] = {"cluster": (blocks, 1, 1)} if blocks > 1 else {}
    function = f"{op}<{HALVES[pools[0].dtype]},{dim},{q_heads // kv_heads},{blocks}>"
    grid = (blocks, kv_heads, requests) if requests else 0
    return launch(where, op, function, grid, THREADS, args, after=after, name=name, **attributes)
