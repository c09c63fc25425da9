"""The indexer: by which score each token of a step chooses the entries that it attends to.

Queries are turned by position and made as narrow as the keys are, which lie in pages; then every query looks through
the keys of its request. One queries' memory may serve all layers, and one node serves every step::

    queries = IndexerQueries(device, max_tokens=64, format=KEY_MXFP4)
    ready = indexer_query(graph, tokens, q, weights, cos_sin, queries, after=listed)
    scored = indexer_logits(graph, tokens, queries, keys, logits, skip_up_to=512, after=ready)
    top_k(graph, logits, tokens.entries[4], chosen, after=scored)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from ..device import Device
from ..memory import Keeper, View
from ..records import KEY_BF16, KEY_FP8, KEY_MXFP4, Format, Pages
from . import (
    Where,
    angles,
    apart,
    array,
    holds_all,
    is_a,
    launch,
    paged,
    shaped,
    span,
    token_rows,
    token_stride,
    whole,
)
from .step_tokens import StepTokens

if TYPE_CHECKING:
    from ..graph import After
    from ..node import Node

__all__ = ["IndexerQueries", "indexer_logits", "indexer_query"]

BFLOAT16, FLOAT32, INT32, UINT8 = (np.dtype(t) for t in (ml_dtypes.bfloat16, np.float32, np.int32, np.uint8))
WEIGHTS = {FLOAT32: "float", BFLOAT16: "__nv_bfloat16"}
FORMATS = (KEY_MXFP4, KEY_FP8, KEY_BF16)
DIM = 128
MOST_HEADS = 64
RATIO = 4  # tokens of an entry

# Of the kernel of scores: see indexer.cu.
THREADS, ENTRIES = 256, 256  # entries that a block goes through at a time
SHARED_BYTES = 4 * MOST_HEADS * (2 * DIM + 4)
RESIDENT = 2  # blocks that a multiprocessor holds
LEAST = 8  # blocks for each token: where most of max_tokens are padding, the others still have some


class IndexerQueries(Keeper):
    """The queries of a step as `indexer_query` makes them and `indexer_logits` takes them, in device memory.

    Args:
        device: where.
        max_tokens: rows, as of the step's `StepTokens`.
        format: that of the keys: KEY_MXFP4, KEY_FP8 or KEY_BF16.
        heads: a multiple of 8 up to 64.

    Attributes:
        values: uint8 [max_tokens, heads, format.value_bytes].
        scales: uint8 [max_tokens, heads, 4], of KEY_MXFP4; None for the others.
        weights: float32 [max_tokens, heads], which multiply what is positive of a query's dot product. A scale of
            KEY_FP8 is in them.
    """

    def __init__(self, device: Device, *, max_tokens: int, format: Format, heads: int = MOST_HEADS) -> None:
        super().__init__()
        what = type(self).__name__
        if not 1 <= whole(f"{what}: max_tokens", max_tokens) < 2**30:
            raise ValueError(f"{what}: max_tokens: wanted 1 to 2**30 - 1, got {max_tokens!r}")
        if not 1 <= whole(f"{what}: heads", heads) <= MOST_HEADS or heads % 8:
            raise ValueError(f"{what}: heads: wanted a multiple of 8 up to {MOST_HEADS}, got {heads!r}")
        is_a(Format, what, "format", format)
        if format not in FORMATS:
            raise ValueError(f"{what}: format: wanted that of keys, of {DIM}, got {format.name} of {format.dim}")
        self.device, self.max_tokens, self.heads, self.format = device, max_tokens, heads, format
        rows, scale_bytes = max_tokens * heads, format.scale_bytes if format == KEY_MXFP4 else 0
        self._whole = self._keep(device.empty(rows * (format.value_bytes + 4 + scale_bytes), UINT8))
        ends = rows * format.value_bytes, rows * (format.value_bytes + 4)
        self.values = self._whole[: ends[0]].reshape(max_tokens, heads, format.value_bytes)
        self.weights = self._whole[ends[0] : ends[1]].view(FLOAT32).reshape(max_tokens, heads)
        self.scales = self._whole[ends[1] :].reshape(max_tokens, heads, scale_bytes) if scale_bytes else None


def indexer_query(
    where: Where,
    tokens: StepTokens,
    q: Any,
    weights: Any,
    cos_sin: Any,
    queries: IndexerQueries,
    *,
    hadamard: bool = False,
    after: After = None,
    name: str | None = None,
) -> Node | None:
    """``queries = encoded(turned(q))``, and their weights ``weights / sqrt(128 * heads)``.

    Args:
        tokens: which token each row is, from `plan_tokens`.
        q: bfloat16 [max_tokens, heads, 128]. The heads of a token are contiguous, tokens need not be: they may be parts
            of the rows of one projection.
        weights: bfloat16 or float32 [max_tokens, heads].
        cos_sin: float32 [max_position, 64], see `cos_sin_table`: turns the last 64 elements, neighbours being pairs. A
            position that it lacks becomes the nearest that it has; the CPU device reports it.
        hadamard: multiply rows by the Hadamard matrix of 128 (Sylvester's order) / sqrt(128) once they are turned, as
            the keys have been: dot products stay as they are, and rounding costs them less.

    In float32 inside; rows are rounded to bfloat16 once, before they are encoded as `Format.encode` has it. Of padding
    all is 0, whatever ``q`` and ``weights`` have there; they are read.
    """
    op = "indexer_query"
    rows = _of_step(op, tokens, queries)
    heads = queries.heads
    seen = token_rows(f"{op}: q", q, [BFLOAT16])
    shaped(f"{op}: q", seen, (tokens.max_tokens, heads, DIM))
    table = angles(op, cos_sin)
    of_heads = array(f"{op}: weights", weights, WEIGHTS)
    shaped(f"{op}: weights", of_heads, (tokens.max_tokens, heads))
    read = {"q": seen, "weights": of_heads, "cos_sin": table, "tokens": rows}
    for role, operand in read.items():
        apart(f"{op}: queries", array(op, queries._whole, [UINT8]), role, operand)
    args = (
        *(tokens.rows, span(q, seen), weights, cos_sin, queries.values, queries.scales, queries.weights),
        *(token_stride(seen), table.shape[0], (DIM * heads) ** -0.5, bool(hadamard)),
    )
    function = f"{op}<{WEIGHTS[of_heads.dtype]},{queries.format.number}>"
    return launch(where, "indexer", function, tokens.max_tokens, 8 * heads, args, after=after, name=name)


def indexer_logits(
    where: Where,
    tokens: StepTokens,
    queries: IndexerQueries,
    keys: Pages,
    logits: Any,
    *,
    skip_up_to: int = 0,
    after: After = None,
    name: str | None = None,
) -> Node | None:
    """``logits[t, j] = sum over heads of weight * max(0, query . key j)`` for the entries j that token t sees: the
    ``tokens.entries[4][t]`` that end no later than it does.

    Args:
        keys: of the format of ``queries``: entry j of a request is the key of its tokens 4j to 4j + 3. The block table
            has room for all entries of ``tokens.max_length``: a ring would have lost some.
        logits: float32 [max_tokens, width], of as much room. What a token does not see is not written.
        skip_up_to: nothing is written for tokens that see no more entries than this: who chooses so many takes all.

    Products are exact, sums in float32 on tensor cores. The bits of a score depend on its query and its key alone.
    """
    op = "indexer_logits"
    rows = _of_step(op, tokens, queries)
    if not 0 <= whole(f"{op}: skip_up_to", skip_up_to) < 2**31:
        raise ValueError(f"{op}: skip_up_to: wanted 0 to 2**31 - 1, got {skip_up_to!r}")
    looked_through = paged(op, "keys", keys, [queries.format], tokens.max_requests)
    holds_all(f"{op}: keys", looked_through, tokens.max_length, RATIO)
    entries = tokens.max_length // RATIO
    result = array(f"{op}: logits", logits, [FLOAT32])
    if len(result.shape) != 2 or result.shape[0] != tokens.max_tokens or not max(1, entries) <= result.shape[1] < 2**31:
        raise ValueError(
            f"{op}: logits: wanted shape ({tokens.max_tokens}, {entries} or more: the entries of {tokens.max_length} "
            f"tokens), got {result.shape}"
        )
    read = {"queries": array(op, queries._whole, [UINT8]), "tokens": rows}
    read |= {"keys.pool": looked_through.pool, "keys.block_table": looked_through.block_table}
    for role, operand in read.items():
        apart(f"{op}: logits", result, role, operand)
    width, (pool, table, *sizes) = result.shape[1], looked_through.args
    resident = RESIDENT * tokens.device.multiprocessors
    blocks = min(-(-width // ENTRIES), max(LEAST, resident // tokens.max_tokens))
    args = (
        *(tokens.rows, queries.values, queries.scales, queries.weights, pool, table, logits),
        *(*sizes, queries.heads, width, skip_up_to),
    )
    return launch(
        *(where, "indexer", f"{op}<{queries.format.number}>", (tokens.max_tokens, blocks), THREADS, args),
        shared_mem_bytes=SHARED_BYTES,
        after=after,
        name=name,
    )


def _of_step(op: str, tokens: StepTokens, queries: IndexerQueries) -> View:
    """The step's rows, which these queries must be of."""
    is_a(StepTokens, op, "tokens", tokens)
    is_a(IndexerQueries, op, "queries", queries)
    if queries.max_tokens != tokens.max_tokens:
        raise ValueError(f"{op}: queries: wanted those of {tokens.max_tokens} tokens, got {queries.max_tokens}")
    return array(f"{op}: tokens", tokens.rows, [INT32])
