"""Queries and the latent row of keys and values of a step: normalised, turned by position, the row into its window.

One launch for both; one node serves every step::

    window = Pages(KV_FP8, pool, block_table, page_size=64)
    query_kv(graph, tokens, q, kv, weight, cos_sin, window, after=listed)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from ..records import KV_BF16, KV_FP8, Pages
from . import (
    Where,
    aligned,
    angles,
    apart,
    array,
    eps_of,
    is_a,
    launch,
    paged,
    shaped,
    span,
    token_rows,
    token_stride,
)
from .step_tokens import StepTokens

if TYPE_CHECKING:
    from ..graph import After
    from ..node import Node

__all__ = ["query_kv"]

BFLOAT16, FLOAT32, INT32 = (np.dtype(t) for t in (ml_dtypes.bfloat16, np.float32, np.int32))
DIM = 512
MOST_HEADS = 256
WARPS = 8  # of a block; each has a row


def query_kv(
    where: Where,
    tokens: StepTokens,
    q: Any,
    kv: Any,
    weight: Any,
    cos_sin: Any,
    window: Pages,
    *,
    out: Any = None,
    eps: float = 1e-6,
    after: After = None,
    name: str | None = None,
) -> Node | None:
    """``out = turned(q / sqrt(mean(q^2) + eps))`` for each head; the same of ``kv``, times ``weight`` before it is
    turned, into the window.

    Args:
        tokens: which token each row is, from `plan_tokens`.
        q, out: bfloat16 [max_tokens, heads, 512], up to 256 heads; ``out`` is ``q`` by default. The heads of a token
            are contiguous, tokens need not be: they may be parts of the rows of one projection. Of padding ``out`` is
            0.
        kv: bfloat16 [max_tokens, 512], tokens likewise.
        weight: float32 [512].
        cos_sin: float32 [max_position, 64], see `cos_sin_table`: turns the last 64 elements, neighbours being pairs. A
            position that it lacks becomes the nearest that it has; the CPU device reports it.
        window: KV_FP8 or KV_BF16. The row of position p is entry p of its request. A table shorter than the request is
            a ring: rows of a step that a later row of the step would replace are not written.

    All of it is in float32, and rounded to bfloat16 once, before a row is encoded; a row whose squares add up to more
    than 3.4e38 becomes 0. ``out`` overlaps nothing but ``q``, where it is that. The bits of a row depend on itself, its
    position and ``weight`` alone.
    """
    op = "query_kv"
    is_a(StepTokens, op, "tokens", tokens)
    queries = token_rows(f"{op}: q", q, [BFLOAT16])
    heads = queries.shape[1]
    if queries.shape != (tokens.max_tokens, heads, DIM) or not 1 <= heads <= MOST_HEADS:
        wanted = f"({tokens.max_tokens}, 1 to {MOST_HEADS} heads, {DIM})"
        raise ValueError(f"{op}: q: wanted shape {wanted}, got {queries.shape}")
    rows = token_rows(f"{op}: kv", kv, [BFLOAT16], axes=("tokens", "dim"))
    shaped(f"{op}: kv", rows, (tokens.max_tokens, DIM))
    out = q if out is None else out
    result = token_rows(f"{op}: out", out, [BFLOAT16])
    shaped(f"{op}: out", result, queries.shape)
    if token_stride(result) < heads * DIM:
        raise ValueError(f"{op}: out: tokens overlap: strides {result.strides} of shape {result.shape}")
    scale = aligned(f"{op}: weight", array(f"{op}: weight", weight, [FLOAT32]))
    shaped(f"{op}: weight", scale, (DIM,))
    table = angles(op, cos_sin)
    eps = eps_of(op, eps)

    read = {"kv": rows, "weight": scale, "cos_sin": table, "tokens": array(f"{op}: tokens", tokens.rows, [INT32])}
    put = paged(op, "window", window, (KV_FP8, KV_BF16), tokens.max_requests)
    read["window.block_table"] = put.block_table
    written = {"out": result, "window.pool": put.pool}
    if (result.address, token_stride(result)) != (queries.address, token_stride(queries)):
        read["q"] = queries
    apart(f"{op}: out", result, "window.pool", put.pool)
    for role, seen in written.items():
        for other, operand in read.items():
            apart(f"{op}: {role}", seen, other, operand)

    args = (
        *(tokens.rows, span(q, queries), span(kv, rows), weight, cos_sin, span(out, result), *put.args),
        *(heads, table.shape[0], token_stride(queries), token_stride(rows), token_stride(result), eps),
    )
    grid = (tokens.max_tokens, -(-(heads + 1) // WARPS))
    return launch(where, op, f"{op}<{window.format.number}>", grid, 32 * WARPS, args, after=after, name=name)
