"""Attention of a step of decoding to keys and values in pages, inside of one graph.

A request of ``lengths[r]`` tokens has one to four queries a head, its last tokens; see `drvkit.ref.paged_attention` for
the formula. All that changes from step to step is the contents of device memory: lengths, block table, queries, pools.
A graph with these nodes is replayed for any lengths, and for any number of requests up to ``requests``: those beyond
have length 0, and get zeros and an lse of -inf.

`plan_decode` divides a step's tokens evenly among as many blocks as are resident on the device; all layers share the
plan. What a block computes of a sum that others have a part in goes to a slot, two for each block however long the
requests are, and the last one to bring a part merges them in a fixed order: the same bits on every run of one plan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from ..device import Device
from ..memory import Keeper, view_of
from . import (
    DIMS,
    HALVES,
    PAGE_SIZES,
    POOLS,
    Where,
    aligned,
    apart,
    array,
    is_a,
    launch,
    shaped,
    span,
    submit,
    view,
    whole,
)

if TYPE_CHECKING:
    from ..graph import After
    from ..node import Node

__all__ = ["DecodePlan", "merge_attention", "paged_attention", "plan_decode"]

TILE = 64  # tokens
THREADS, WARPS = 128, 4
FLAGS = {"soft_cap": 1, "sinks": 2, "k_scale": 4, "v_scale": 4, "lse": 8}  # see dk/attention.cuh
# By the bytes of a row of keys: tiles of a turn (for 8 queries), stages of the pipeline, and resident blocks of a
# multiprocessor.
PIPELINE = {64: (2, 4, 3), 128: (2, 3, 2), 256: (1, 2, 2), 512: (1, 3, 1)}
INVARIANT_UNITS = 64  # that a work has at most


class AttentionPlan(Keeper):
    """What the plans of decoding and of prefill share: what attention it is, and memory that goes with the plan."""

    def __init__(
        self,
        device: Device,
        *,
        q_heads: int,
        kv_heads: int,
        dim: int,
        page_size: int,
        table_width: int,
        dtype: DTypeLike,
        kv_dtype: DTypeLike | None,
        window: int | None,
        **counts: int,
    ) -> None:
        """``counts`` are those of the particular plan, which must be at least 1 as well."""
        super().__init__()
        self.device = device
        self.dtype = np.dtype(dtype)
        self.kv_dtype = self.dtype if kv_dtype is None else np.dtype(kv_dtype)
        what = type(self).__name__
        given = {"q_heads": q_heads, "kv_heads": kv_heads, "dim": dim, "page_size": page_size}
        for name, number in {**given, "table_width": table_width, **counts}.items():
            whole(f"{what}: {name}", number)
        if window is not None:
            whole(f"{what}: window", window)
        self.q_heads, self.kv_heads, self.dim = q_heads, kv_heads, dim
        self.page_size, self.table_width, self.window = page_size, table_width, window
        if self.dtype not in HALVES:
            raise TypeError(f"{what}: dtype: wanted float16 or bfloat16, got {self.dtype}")
        if self.kv_dtype not in (self.dtype, np.dtype(ml_dtypes.float8_e4m3fn)):
            raise TypeError(f"{what}: kv_dtype: wanted {self.dtype} or float8_e4m3fn, got {self.kv_dtype}")
        for name, number, allowed in (("dim", dim, DIMS), ("page_size", page_size, PAGE_SIZES)):
            if number not in allowed:
                raise ValueError(f"{what}: {name}: wanted one of {', '.join(map(str, allowed))}, got {number!r}")
        for name, number in {**counts, "kv_heads": kv_heads, "table_width": table_width}.items():
            if number < 1:
                raise ValueError(f"{what}: {name}: wanted at least 1, got {number!r}")
        if q_heads < 1 or q_heads % kv_heads:
            raise ValueError(f"{what}: q_heads: wanted a multiple of {kv_heads} KV heads, got {q_heads!r}")
        if window is not None and window < 0:
            raise ValueError(f"{what}: window: wanted None or at least 0, got {window!r}")
        self.capacity = page_size * table_width  # tokens of a request
        if self.capacity >= 2**30:
            raise ValueError(f"{what}: table_width: {table_width} pages are {self.capacity} tokens: 2**30 or more")
        self.reach = -1 if window is None else min(window, self.capacity)  # as kernels take the window

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.q_heads // self.kv_heads


class DecodePlan(AttentionPlan):
    """How the work of a step is divided, and the room for that. One plan may serve all layers of a step, and any step,
    one after the other: what launches bring together lies in the plan, so two that are in flight at once, by streams,
    graphs or branches of a graph, disturb each other.

    Args:
        device: where.
        requests: how many at most.
        q_heads, kv_heads, dim: of the attention; ``q_heads / kv_heads`` is at most 64, dim 64, 128 or 256.
        page_size: tokens of a page: 8, 16, 32, 64 or 128.
        table_width: pages of a request at most: columns of the block table.
        dtype, kv_dtype: of queries (float16 or bfloat16) and of the pools (the same, or float8_e4m3fn).
        q_len: queries of a request, 1 to 4.
        window: a query attends to so many tokens before its own; None: to all.
        batch_invariant: a request's bits do not depend on the other requests. Costs some speed, and slots for
            64 parts of each request and head.

    Attributes:
        blocks: of the attention kernel.
        slots: for parts of sums. ``2 * blocks``; if batch-invariant, at most ``64 * requests * heads``.
    """

    def __init__(
        self,
        device: Device,
        *,
        requests: int,
        q_heads: int,
        kv_heads: int,
        dim: int,
        page_size: int,
        table_width: int,
        dtype: DTypeLike = ml_dtypes.bfloat16,
        kv_dtype: DTypeLike | None = None,
        q_len: int = 1,
        window: int | None = None,
        batch_invariant: bool = False,
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
            requests=requests,
        )
        if self.group > 64:
            raise ValueError(f"{what}: q_heads: wanted at most 64 for each of {kv_heads} KV heads, got {q_heads!r}")
        if not 1 <= whole(f"{what}: q_len", q_len) <= 4:
            raise ValueError(f"{what}: q_len: wanted 1 to 4, got {q_len!r}")
        self.requests, self.q_len, self.batch_invariant = requests, q_len, batch_invariant

        queries = self.group * q_len
        self.rows = 8 if queries <= 8 or dim == 256 else 16  # with 16 of 256 dimensions there are too few registers
        self.parts = -(-queries // self.rows)
        self.heads = kv_heads * self.parts
        row_bytes = dim * self.kv_dtype.itemsize
        self.tiles, self.stages, self.resident = PIPELINE[row_bytes]
        if self.rows == 16:
            self.tiles = 1
        self.shared_mem_bytes = self.tiles * self.stages * 2 * TILE * row_bytes + WARPS * 4 * (dim + 10) * 4
        self.blocks = self.resident * device.multiprocessors
        self.abreast = math.gcd(self.heads, self.blocks)  # blocks of a team, see dk/attention_plan.cuh
        tiles = -(-self.capacity // TILE)
        self.unit_tiles = max(4, -(-tiles // INVARIANT_UNITS)) if batch_invariant else 1
        units = requests * self.heads * -(-tiles // self.unit_tiles)
        if units >= 2**31:
            size = f"{requests} requests x {self.heads} heads x {tiles} tiles"
            raise ValueError(f"{what}: {size} are {units} units of work; fewer than 2**31 can be planned")
        self.slots = units if batch_invariant else 2 * self.blocks
        self.schedule = self._keep(device.zeros(4 + 6 * (self.blocks // self.abreast) + 2 * requests, np.int32))
        self.partials = self._keep(device.empty(self.slots * self.rows * (dim + 2), np.float32))
        self.arrivals = self._keep(device.zeros(requests * self.heads, np.uint32))

    def reset(self, stream: Any = None) -> None:
        """After a launch that was aborted: parts that were brought are forgotten."""
        self.arrivals.fill(0, stream)


def plan_decode(
    where: Where, plan: DecodePlan, lengths: Any, *, after: After = None, name: str | None = None
) -> Node | None:
    """Divide the work of a step: ``lengths`` int32 [requests], the tokens of each request, its queries among them; 0
    for padding. One node for all layers; the attention nodes wait for it by full edges.

    A length beyond the block table is cut to it; the CPU device reports it.
    """
    shaped("plan_decode: lengths", array("plan_decode: lengths", lengths, [np.dtype(np.int32)]), (plan.requests,))
    is_a(DecodePlan, "plan_decode", "plan", plan)
    sets, teams = plan.heads // plan.abreast, plan.blocks // plan.abreast
    args = (
        *(lengths, plan.schedule, plan.requests, plan.capacity, sets, plan.q_len, plan.reach, plan.unit_tiles),
        *(int(plan.batch_invariant), teams),
    )
    return launch(where, "paged_attention", "plan_paged_attention", 1, 1024, args, after=after, name=name)


def paged_attention(
    where: Where,
    plan: DecodePlan,
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
    """``out = softmax(scale * q k^T) v`` for the step that ``plan`` was made for by `plan_decode`.

    Args:
        q, out: [requests, q_len, q_heads, dim] of the plan's dtype. The heads of a token are contiguous; in ``q``
            tokens may be parts of the rows of one projection, in ``out`` they follow each other.
        k, v: pools of the plan's kv_dtype, [pages, kv_heads, page_size, dim] ("HND") or [pages, page_size, kv_heads,
            dim] ("NHD"), of the same strides; a token's row is contiguous.
        block_table: int32 [requests, table_width]; entries behind a request's last page are not read.
        lse: float32 [requests, q_len, q_heads]: the natural logarithm of the sum of exp(logit), without the sink.
        scale: of the logits; 1 / sqrt(dim) by default.
        soft_cap: ``x`` becomes ``soft_cap * tanh(x / soft_cap)``.
        sinks: float32 [q_heads]: exp(sink) is added to the sum below.
        k_scale, v_scale: float32 [kv_heads], positive, both or none: multiply keys and values.

    ``out`` may be ``q``, and overlaps nothing else. With a programmatic edge from the node before, tokens before the
    queries' own are read before that node has ended: it may write queries and the step's new tokens, and nothing else
    that this reads.
    """
    op = "paged_attention"
    is_a(DecodePlan, op, "plan", plan)
    shape = (plan.requests, plan.q_len, plan.q_heads, plan.dim)
    q_pointer, q_stride = queries(f"{op}: q", plan, q, shape)
    pointers, geometry = pools(op, plan, k, v, layout)
    table = array(f"{op}: block_table", block_table, [np.dtype(np.int32)])
    shaped(f"{op}: block_table", table, (plan.requests, plan.table_width))
    given = {"lse": lse, "k_scale": k_scale, "v_scale": v_scale, "sinks": sinks}
    read = {"q": q, "k": k, "v": v, "block_table": block_table, "the plan": plan.schedule, "its parts": plan.partials}
    results(op, plan, out, shape, given, read)
    flags, factors = options(op, plan, shape[:3], given, scale, soft_cap)
    nothing = plan.partials  # for a parameter that this instance does not read
    args = (
        *(q_pointer, *pointers, block_table, plan.schedule, plan.partials, plan.arrivals, out),
        *(nothing if each is None else each for each in given.values()),
        *(*geometry, plan.table_width, plan.kv_heads),
        *(plan.group, plan.parts, plan.abreast, plan.q_len, q_stride),
        *(plan.reach, *factors),
    )
    types = f"{POOLS[plan.dtype]},{POOLS[plan.kv_dtype]}"
    sizes = f"{plan.dim},{plan.page_size},{plan.rows},{flags},{plan.tiles},{plan.stages},{plan.resident}"
    return launch(
        *(where, op, f"{op}<{types},{sizes}>", plan.blocks, THREADS, args),
        shared_mem_bytes=plan.shared_mem_bytes,
        after=after,
        name=name,
    )


def merge_attention(
    where: Where, outs: Any, lses: Any, out: Any, lse: Any, *, after: After = None, name: str | None = None
) -> Node | None:
    """Attention to the union of disjoint sets of tokens, of the attention to each (without sinks).

    Args:
        outs: [parts, rows, dim], ``out``: [rows, dim], float16 or bfloat16; dim a multiple of 8.
        lses: float32 [parts, rows], ``lse``: [rows]. Parts of lse -inf count nothing, and are not read.
    """
    op = "merge_attention"
    seen = array(f"{op}: outs", outs, HALVES)
    if len(seen.shape) != 3 or seen.shape[2] % 8:
        raise ValueError(f"{op}: outs: wanted shape (parts, rows, a multiple of 8), got {seen.shape}")
    aligned(f"{op}: outs", seen)
    parts, rows, dim = seen.shape
    floats = [np.dtype(np.float32)]
    logs, merged, log = (
        array(f"{op}: lses", lses, floats),
        array(f"{op}: out", out, [seen.dtype]),
        array(f"{op}: lse", lse, floats),
    )
    shaped(f"{op}: lses", logs, (parts, rows))
    shaped(f"{op}: out", aligned(f"{op}: out", merged), (rows, dim))
    shaped(f"{op}: lse", log, (rows,))
    for role, written in (("out", merged), ("lse", log)):
        for other, each in (("outs", seen), ("lses", logs)):
            apart(f"{op}: {role}", written, other, each)
    apart(f"{op}: lse", log, "out", merged)
    args = (outs, lses, out, lse, parts, rows, dim)
    function = f"{op}<{POOLS[seen.dtype]}>"
    return submit(where, "paged_attention", function, rows * 32, args, after, name)


def options(
    op: str,
    plan: AttentionPlan,
    rows: tuple[int, ...],
    given: Mapping[str, Any],
    scale: float | None,
    soft_cap: float | None,
) -> tuple[int, tuple[float, float]]:
    """Check what an attention may be given or not: the arrays by role, of which lse has the shape ``rows``, and two
    numbers. The flags of the kernel's instance, and the numbers as it takes them."""
    flags = 0
    wanted = {"lse": rows, "k_scale": (plan.kv_heads,), "v_scale": (plan.kv_heads,), "sinks": (plan.q_heads,)}
    for role, operand in given.items():
        if operand is not None:
            shaped(f"{op}: {role}", array(f"{op}: {role}", operand, [np.dtype(np.float32)]), wanted[role])
            flags |= FLAGS[role]
    if (given["k_scale"] is None) != (given["v_scale"] is None):
        missing = "k_scale" if given["k_scale"] is None else "v_scale"
        raise ValueError(f"{op}: {missing} is missing: wanted both or none")
    for name, number in (("scale", scale), ("soft_cap", soft_cap)):
        if number is None:
            continue
        if isinstance(number, bool) or not isinstance(number, int | float | np.integer | np.floating):
            raise TypeError(f"{op}: {name}: wanted None or a number, got {number!r}")
        with np.errstate(all="ignore"):
            if not 0 < np.float32(number) < np.inf:
                raise ValueError(f"{op}: {name}: wanted None or a positive number of float32, got {number!r}")
    if soft_cap is not None:
        flags |= FLAGS["soft_cap"]
    return flags, (1 / math.sqrt(plan.dim) if scale is None else scale, 0.0 if soft_cap is None else soft_cap)


def queries(label: str, plan: AttentionPlan, q: Any, shape: tuple[int, ...]) -> tuple[Any, int]:
    """Queries of ``shape`` as kernels take them: the pointer, and the elements from token to token."""
    seen = view(label, q, [plan.dtype])
    shaped(label, seen, shape)
    *tokens, heads, dim = shape
    item = seen.dtype.itemsize
    stride, count = heads * dim * item, 1
    for extent, step in zip(reversed(tokens), reversed(seen.strides[:-2]), strict=True):
        if extent > 1:
            stride = step if count == 1 else stride
            if step != stride * count:
                raise ValueError(f"{label}: wanted tokens at one distance, got strides {seen.strides} of shape {shape}")
            count *= extent
    if seen.strides[-1] != item or (heads > 1 and seen.strides[-2] != dim * item):
        raise ValueError(f"{label}: wanted contiguous tokens, got strides {seen.strides} of shape {shape}")
    if seen.address % 16 or stride % 16 or not 0 < stride // item < 2**24:
        raise ValueError(
            f"{label}: wanted an address and a distance of tokens that are multiples of 16 bytes, the distance below "
            f"2**24 elements, got {seen.address:#x} and {stride} bytes"
        )
    return span(q, seen), stride // item


def results(
    op: str, plan: AttentionPlan, out: Any, shape: tuple[int, ...], given: Mapping[str, Any], read: Mapping[str, Any]
) -> None:
    """Refuse what an attention cannot be written to: ``out`` of ``shape``, and lse if it is given, apart from what is
    read. ``out`` may be where the queries are."""
    written = {"out": aligned(f"{op}: out", array(f"{op}: out", out, [plan.dtype]))}
    shaped(f"{op}: out", written["out"], shape)
    if given["lse"] is not None:
        written["lse"] = array(f"{op}: lse", given["lse"], [np.dtype(np.float32)])
        apart(f"{op}: lse", written["lse"], "out", written["out"])
    others = {**read, **{role: each for role, each in given.items() if each is not None and role != "lse"}}
    for role, result in written.items():
        for other, operand in others.items():
            seen = view_of(operand)
            assert seen is not None
            if role == "out" and other == "q" and (seen.address, seen.strides) == (result.address, result.strides):
                continue
            apart(f"{op}: {role}", result, other, seen)


def pools(
    op: str, plan: AttentionPlan, k: Any, v: Any, layout: str
) -> tuple[tuple[Any, Any], tuple[int, int, int, int]]:
    """The pools of keys and values as kernels take them: their pointers; the strides, in elements, from page to page,
    head to head and token to token, which they share; and their pages. `TypeError` or `ValueError` names the one that
    does not fit."""
    shapes = {"HND": (plan.kv_heads, plan.page_size, plan.dim), "NHD": (plan.page_size, plan.kv_heads, plan.dim)}
    if layout not in tuple(shapes):
        raise ValueError(f"{op}: layout: wanted HND or NHD, got {layout!r}")
    wanted, item = shapes[layout], plan.kv_dtype.itemsize
    keys, values = (view(f"{op}: {role}", pool, [plan.kv_dtype]) for role, pool in (("k", k), ("v", v)))
    for role, seen in (("k", keys), ("v", values)):
        if len(seen.shape) != 4 or seen.shape[1:] != wanted or not seen.shape[0]:
            shape = ", ".join(map(str, wanted))
            raise ValueError(f"{op}: {role}: wanted shape (pages, {shape}), got {seen.shape}")
        if seen.strides[3] != item or any(each % 16 for each in (seen.address, *seen.strides[:3])):
            raise ValueError(
                f"{op}: {role}: wanted contiguous rows of {plan.dim} elements aligned to 16 bytes, got strides "
                f"{seen.strides} at {seen.address:#x}"
            )
        reach = sum(stride * (extent - 1) for stride, extent in zip(seen.strides[1:], seen.shape[1:], strict=True))
        if min(seen.strides) < 0 or reach >= 2**31:
            raise ValueError(f"{op}: {role}: wanted strides of pages within 2**31 bytes, got {seen.strides}")
    if keys.strides != values.strides or keys.shape != values.shape:
        raise ValueError(f"{op}: v has shape {values.shape}, strides {values.strides}; k {keys.shape}, {keys.strides}")
    page, first, second = (stride // item for stride in keys.strides[:3])
    head, token = (first, second) if layout == "HND" else (second, first)
    return (span(k, keys), span(v, values)), (page, head, token, keys.shape[0])
