"""Attention of a step's tokens to rows that each has chosen, where a row is both key and value: the window of positions
up to its own, and compressed entries, all that it sees or those of a list.

Prompts, chunks of them and decoding are one kernel, mixed as they come; see `drvkit.ops.step_tokens` for the rows of a
step and `drvkit.ref.sparse_attention` for the formula. All that changes from step to step is the contents of device
memory.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from ..device import Device
from ..memory import View
from ..records import KV_BF16, KV_FP8, Pages
from . import (
    Where,
    aligned,
    angles,
    apart,
    array,
    device_of,
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

__all__ = ["sparse_attention"]

DIM, HEADS, ROWS = 512, 64, 64  # of a block, and of a tile of rows
THREADS, SHARED_BYTES = 512, 223832
MOST_SPLITS = 8  # blocks of a cluster

bfloat16, float32, int32 = (np.dtype(each) for each in (ml_dtypes.bfloat16, np.float32, np.int32))


def sparse_attention(
    where: Where,
    tokens: StepTokens,
    q: Any,
    window: Pages,
    out: Any,
    *,
    window_size: int = 128,
    entries: Pages | None = None,
    ratio: int | None = None,
    indices: Any = None,
    sinks: Any = None,
    cos_sin: Any = None,
    lse: Any = None,
    scale: float | None = None,
    after: After = None,
    name: str | None = None,
) -> Node | None:
    """``out = sum exp(scale * q r) r / (sum exp(scale * q r) + exp(sink))`` over the rows r that a token attends to.

    Args:
        q, out: bfloat16 [max_tokens, heads, 512]. The heads of a token are contiguous; in ``q`` tokens may be parts of
            the rows of one projection, in ``out`` they follow each other. ``out`` may be ``q``.
        window: rows of `KV_FP8` or `KV_BF16`, of each position one: that of position p is entry p of its request, so a
            block table of fewer pages is a ring. It has room for the ``window_size`` positions up to that of a
            request's first row, and for its other rows; the CPU device reports it if it has not.
        entries: compressed ones, of the same format; ``ratio`` (4 or 128) says of how many tokens each. A token at
            position p sees the first ``(p + 1) // ratio`` of its request. The block table has room for all of
            ``tokens.max_length``.
        indices: int32 [max_tokens, k], of those the ones that count; None: all. Of a token that sees n the first
            min(k, n) are read, as `drvkit.ops.top_k` writes them; a negative one is none. Of one that it does not see
            the row means nothing; the CPU device reports it.
        sinks: float32 [heads]; exp(sink) is added to the sum below. -inf adds nothing, inf makes the output 0.
        cos_sin: float32 [max_position, 64]: the last 64 elements of an output are turned back by the token's position.
            One that it lacks becomes the nearest that it has; the CPU device reports it.
        lse: float32 [max_tokens, heads]: the natural logarithm of the sum of exp(scale * q r), without the sink.
        scale: of the logits; 512 ** -0.5 by default.

    Without rows, and for padding, out is 0 and lse -inf. Rows of `KV_FP8`, queries and probabilities are multiplied as
    float16 (so what is above 65504 in size is infinite, and of a block whose scale is above 2**15 even zeros are NaN),
    those of `KV_BF16` as bfloat16; sums are float32. Bits depend on the shapes and the number of multiprocessors, which
    say how rows are shared between blocks, but not on other requests.

    Needs compute capability 9.0; `ValueError` elsewhere.
    """
    op = "sparse_attention"
    device = device_of(op, where)
    is_a(StepTokens, op, "tokens", tokens)
    count = tokens.max_tokens
    seen = token_rows(f"{op}: q", q, [bfloat16])
    heads = seen.shape[1]
    shaped(f"{op}: q", seen, (count, max(heads, 1), DIM))
    read: dict[str, View] = {"q": seen, "tokens": array(f"{op}: tokens", tokens.rows, [int32])}
    last = given = paged(op, "window", window, [KV_FP8, KV_BF16], tokens.max_requests)
    read |= {"window.pool": last.pool, "window.block_table": last.block_table}
    if not 1 <= whole(f"{op}: window_size", window_size) <= last.room:
        raise ValueError(
            f"{op}: window_size: wanted 1 to {last.room}, as the window's block table has, got {window_size}"
        )
    width, visible = 0, None
    if entries is None:
        for role, operand in (("ratio", ratio), ("indices", indices)):
            if operand is not None:
                raise ValueError(f"{op}: {role} is given without entries")
    else:
        given = paged(op, "entries", entries, [window.format], tokens.max_requests)
        read |= {"entries.pool": given.pool, "entries.block_table": given.block_table}
        if ratio is None or whole(f"{op}: ratio", ratio) not in tokens.entries:
            raise ValueError(f"{op}: ratio: wanted one of {', '.join(map(str, tokens.entries))}, got {ratio!r}")
        holds_all(f"{op}: entries", given, tokens.max_length, ratio)
        visible, width = tokens.entries[ratio], tokens.max_length // ratio
        if indices is not None:
            read["indices"] = listed = array(f"{op}: indices", indices, [int32])
            if len(listed.shape) != 2 or listed.shape[0] != count or not listed.shape[1]:
                raise ValueError(f"{op}: indices: wanted shape ({count}, k), got {listed.shape}")
            width = listed.shape[1]
    if sinks is not None:
        read["sinks"] = array(f"{op}: sinks", sinks, [float32])
        shaped(f"{op}: sinks", read["sinks"], (heads,))
    if cos_sin is not None:
        read["cos_sin"] = angles(op, cos_sin)
    written = {"out": aligned(f"{op}: out", array(f"{op}: out", out, [bfloat16]))}
    shaped(f"{op}: out", written["out"], seen.shape)
    if lse is not None:
        written["lse"] = array(f"{op}: lse", lse, [float32])
        shaped(f"{op}: lse", written["lse"], (count, heads))
        apart(f"{op}: lse", written["lse"], "out", written["out"])
    for role, result in written.items():
        for other, operand in read.items():
            if (
                other == "q"
                and role == "out"
                and (operand.address, operand.strides) == (result.address, result.strides)
            ):
                continue
            apart(f"{op}: {role}", result, other, operand)
    if scale is None:
        scale = DIM**-0.5
    elif isinstance(scale, bool) or not isinstance(scale, int | float | np.integer | np.floating):
        raise TypeError(f"{op}: scale: wanted None or a number, got {scale!r}")
    elif not 0 < scale < math.inf:
        raise ValueError(f"{op}: scale: wanted None or a positive number, got {scale!r}")
    if device.compute_capability != (9, 0):
        has = ".".join(map(str, device.compute_capability))
        raise ValueError(f"{op}: {device.id} has compute capability {has}: wanted 9.0")
    blocks = -(-heads // HEADS)
    splits = _splits(device, count * blocks, -(-(window_size + width) // ROWS))
    at_once = count if splits > 1 else min(count, max(1, device.multiprocessors // blocks))  # tokens
    args = (
        *(span(q, seen), tokens.rows, *last.args, *given.args),
        *(visible, indices, sinks, cos_sin, out, lse),
        *(
            count,
            heads,
            window_size,
            width,
            token_stride(seen),
            0 if cos_sin is None else read["cos_sin"].shape[0],
            scale,
        ),
    )
    function = f"{op}<{window.format.number},{'false' if indices is None else 'true'}>"
    return launch(
        *(where, op, function, (splits, blocks, at_once), THREADS, args),
        shared_mem_bytes=SHARED_BYTES,
        after=after,
        name=name,
        cluster=(splits, 1, 1),
    )


def _splits(device: Device, blocks: int, tiles: int) -> int:
    """How many blocks share a token's rows, of which there are up to so many tiles: while multiprocessors have none."""
    splits = 1
    while 2 * splits <= min(MOST_SPLITS, tiles) and 2 * splits * blocks <= device.multiprocessors:
        splits *= 2
    return splits
