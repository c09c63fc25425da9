"""Causal attention of many queries a request to keys and values in pages, inside of one graph: prompts, chunks of
prompts behind what is there already, and requests that decode, mixed as they come.

The queries of request r are the rows ``q_starts[r]`` to ``q_starts[r + 1]``, its last tokens, whose keys and values are
in the pools already; see `drvkit.ref.prefill_attention` for the formula. All that changes from step to step is the
contents of device memory: a graph with these nodes is replayed for any lengths, any split of up to ``max_tokens`` rows
among up to ``max_requests`` requests. A request without queries costs nothing. Rows from the last start on are padding:
they get zeros and an lse of -inf, and nothing is read for them.

`plan_prefill` makes the list of a step's tiles of queries, those with the most tokens first; all layers share it.
`prefill_attention` has blocks for as many tiles as there can be, and those without one leave at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from ..device import Device
from . import POOLS, Where, array, is_a, launch, shaped
from .paged_attention import THREADS, AttentionPlan, options, pools, queries, results

if TYPE_CHECKING:
    from ..graph import After
    from ..node import Node

__all__ = ["PrefillPlan", "plan_prefill", "prefill_attention"]

# By dim: queries of a tile, and tokens that go by at once.
TILES = {64: (128, 64), 128: (128, 64), 256: (64, 32)}
MOST_TILES = 2**16 - 1  # of a grid's last axis


class PrefillPlan(AttentionPlan):
    """The tiles of a step, and the room for them. One plan may serve all layers of a step, and any step.

    Args:
        device: where.
        max_tokens: rows of queries and outputs.
        max_requests: how many at most.
        q_heads, kv_heads, dim: of the attention; dim is 64, 128 or 256.
        page_size: tokens of a page: 8, 16, 32, 64 or 128.
        table_width: pages of a request at most: columns of the block table.
        dtype, kv_dtype: of queries (float16 or bfloat16) and of the pools (the same, or float8_e4m3fn).
        window: a query attends to so many tokens before its own; None: to all.

    Attributes:
        rows: of a tile.
        tiles: at most, whatever the starts are.
    """

    def __init__(
        self,
        device: Device,
        *,
        max_tokens: int,
        max_requests: int,
        q_heads: int,
        kv_heads: int,
        dim: int,
        page_size: int,
        table_width: int,
        dtype: DTypeLike = ml_dtypes.bfloat16,
        kv_dtype: DTypeLike | None = None,
        window: int | None = None,
    ) -> None:
        what = type(self).__name__
        super().__init__(
            device,
            q_heads=q_heads,
            kv_heads=kv_heads,
            dim=dim,
            page_size=page_size,
            table_width=table_width,
            dtype=dtype,
            kv_dtype=kv_dtype,
            window=window,
            max_tokens=max_tokens,
            max_requests=max_requests,
        )
        self.max_tokens, self.max_requests = max_tokens, max_requests

        self.rows, tokens = TILES[dim]
        # A request, or the padding, has rows - 1 rows less than its tiles have room for, at most.
        self.tiles = (max_tokens + min(max_requests + 1, max_tokens) * (self.rows - 1)) // self.rows
        if self.tiles > MOST_TILES:
            raise ValueError(
                f"{what}: {max_tokens} tokens of {max_requests} requests are up to {self.tiles} tiles: more than "
                f"{MOST_TILES}"
            )
        self.shared_mem_bytes = (self.rows + 4 * tokens) * dim * self.dtype.itemsize
        if self.kv_dtype.itemsize == 1:
            self.shared_mem_bytes += 2 * tokens * dim
        self.schedule = self._keep(device.zeros(4 * self.tiles, np.int32))
        self.nothing = self._keep(device.zeros(1, np.float32))  # for a parameter that an instance does not use


def plan_prefill(
    where: Where, plan: PrefillPlan, q_starts: Any, lengths: Any, *, after: After = None, name: str | None = None
) -> Node | None:
    """List the tiles of a step. One node for all layers.

    Args:
        q_starts: int32 [max_requests + 1], the row of each request's first query, 0 for the first; equal to the next
            one for a request without queries. The last one is the number of rows that are not padding.
        lengths: int32 [max_requests], tokens of each request that has queries, these among them.

    Starts that decrease, lengths below the number of queries or beyond the block table: the CPU device reports them. On
    a GPU they are cut to what there is room for, and the outputs mean nothing.
    """
    op, ints = "plan_prefill", [np.dtype(np.int32)]
    shaped(f"{op}: q_starts", array(f"{op}: q_starts", q_starts, ints), (plan.max_requests + 1,))
    shaped(f"{op}: lengths", array(f"{op}: lengths", lengths, ints), (plan.max_requests,))
    is_a(PrefillPlan, op, "plan", plan)
    args = (
        *(q_starts, lengths, plan.schedule, plan.max_requests, plan.max_tokens, plan.capacity, plan.reach),
        *(plan.rows, plan.tiles),
    )
    return launch(where, "prefill_attention", "plan_prefill_attention", 1, 1024, args, after=after, name=name)


def prefill_attention(
    where: Where,
    plan: PrefillPlan,
    q: Any,
    k: Any,
    v: Any,
    block_table: Any,
    out: Any,
    *,
    lse: Any = None,
    layout: str = "HND",
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    after: After = None,
    name: str | None = None,
) -> Node | None:
    """``out = softmax(scale * q k^T) v`` for the step that ``plan`` was made for by `plan_prefill`.

    Args:
        q, out: [max_tokens, q_heads, dim] of the plan's dtype. The heads of a token are contiguous; in ``q`` tokens may
            be parts of the rows of one projection, in ``out`` they follow each other.
        k, v: pools of the plan's kv_dtype, [pages, kv_heads, page_size, dim] ("HND") or [pages, page_size, kv_heads,
            dim] ("NHD"), of the same strides; a token's row is contiguous.
        block_table: int32 [max_requests, table_width]; entries behind a request's last page, and before its first
            query's window, are not read.
        lse: float32 [max_tokens, q_heads]: the natural logarithm of the sum of exp(logit), without the sink.
        scale: of the logits; 1 / sqrt(dim) by default.
        soft_cap: ``x`` becomes ``soft_cap * tanh(x / soft_cap)``.
        sinks: float32 [q_heads]: exp(sink) is added to the sum below.
        k_scale, v_scale: float32 [kv_heads], positive, both or none: multiply keys and values.

    ``out`` may be ``q``, and overlaps nothing else. The bits of a row depend on its query and the tokens up to its own,
    not on how a prompt is cut into chunks nor on the other requests.
    """
    op = "prefill_attention"
    is_a(PrefillPlan, op, "plan", plan)
    shape = (plan.max_tokens, plan.q_heads, plan.dim)
    q_pointer, q_stride = queries(f"{op}: q", plan, q, shape)
    pointers, geometry = pools(op, plan, k, v, layout)
    table = array(f"{op}: block_table", block_table, [np.dtype(np.int32)])
    shaped(f"{op}: block_table", table, (plan.max_requests, plan.table_width))
    given = {"lse": lse, "k_scale": k_scale, "v_scale": v_scale, "sinks": sinks}
    results(
        op, plan, out, shape, given, {"q": q, "k": k, "v": v, "block_table": block_table, "the plan": plan.schedule}
    )
    flags, factors = options(op, plan, shape[:2], given, scale, soft_cap)
    args = (
        *(q_pointer, *pointers, block_table, plan.schedule, out),
        *(plan.nothing if each is None else each for each in given.values()),
        *(*geometry, plan.table_width, q_stride),
        *(plan.reach, *factors),
    )
    types = f"{POOLS[plan.dtype]},{POOLS[plan.kv_dtype]}"
    return launch(
        *(where, op, f"{op}<{types},{plan.dim},{plan.page_size},{flags}>"),
        *((plan.group, plan.kv_heads, plan.tiles), THREADS, args),
        shared_mem_bytes=plan.shared_mem_bytes,
        after=after,
        name=name,
    )
