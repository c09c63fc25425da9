"""Keys and values of a step into pages, and the slots that they go to.

A token's slot is ``page * page_size + place``; a negative slot is padding: nothing of the token is read, nothing is
written. All that changes from step to step is the contents of device memory, so one node serves every step::

    to = slot_mapping(graph, block_table, slots, page_size=16, lengths=lengths)
    kv_write(graph, k, v, k_pool, v_pool, slots, positions=positions, cos_sin=cos_sin, q=q, after=to)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from . import (
    DIMS,
    HALVES,
    PAGE_SIZES,
    POOLS,
    Where,
    aligned_strides,
    apart,
    array,
    kv_pools,
    shaped,
    span,
    submit,
    token_rows,
    token_stride,
    whole,
)

if TYPE_CHECKING:
    from ..graph import After
    from ..node import Node

__all__ = ["kv_write", "slot_mapping"]

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
FLOAT32, INT32, INT64 = (np.dtype(t) for t in (np.float32, np.int32, np.int64))
STYLES = {"neox": 1, "gptj": 2}
PER_THREAD = 8  # elements


def kv_write(
    where: Where,
    k: Any,
    v: Any,
    k_pool: Any,
    v_pool: Any,
    slots: Any,
    *,
    layout: str = "HND",
    k_scale: Any = None,
    v_scale: Any = None,
    positions: Any = None,
    cos_sin: Any = None,
    style: str = "neox",
    q: Any = None,
    q_out: Any = None,
    after: After = None,
    name: str | None = None,
) -> Node | None:
    """``k_pool[slot] = k``, ``v_pool[slot] = v`` for each token; keys and queries rotated by position, if ``cos_sin``
    is given.

    Args:
        k, v: [tokens, kv_heads, dim], float16 or bfloat16, dim 64, 128 or 256; a token's heads are contiguous, tokens
            need not be: they may be part of the rows of one projection.
        k_pool, v_pool: [pages, kv_heads, page_size, dim] ("HND") or [pages, page_size, kv_heads, dim] ("NHD"), of the
            same shape and strides, page_size 8, 16, 32, 64 or 128; a row of dim is contiguous. Of the dtype of ``k``,
            or float8_e4m3fn.
        slots: int64 [tokens], as `slot_mapping` makes them. A slot beyond the pool is written nowhere; the CPU device
            reports it.
        k_scale, v_scale: float32 [kv_heads], for float8_e4m3fn: the nearest to ``k / k_scale`` is stored, ties to even,
            what is beyond as +-448. NaN stays NaN.
        positions: int32 [tokens], for the rotation. One that ``cos_sin`` lacks becomes the nearest that it has; the CPU
            device reports it.
        cos_sin: float32 [max_position, rotary_dim], in each row first the cosines of all pairs, then the sines.
            rotary_dim is a multiple of 16 up to dim; elements behind it stay as they are.
        style: which elements are a pair: (i, i + rotary_dim / 2) for "neox", (2i, 2i + 1) for "gptj".
        q, q_out: [tokens, q_heads, dim], as ``k``: queries to rotate, in place or into ``q_out``. Those of padding
            become 0.

    Addresses and strides are multiples of 16 bytes. Two tokens of one slot: either may win.
    """
    op = "kv_write"
    if layout not in ("HND", "NHD"):
        raise ValueError(f"{op}: layout: wanted HND or NHD, got {layout!r}")
    if style not in STYLES:
        raise ValueError(f"{op}: style: wanted neox or gptj, got {style!r}")
    keys = token_rows(f"{op}: k", k, HALVES)
    tokens, kv_heads, dim = keys.shape
    if dim not in DIMS or not kv_heads:
        raise ValueError(f"{op}: k: wanted shape (tokens, kv_heads, 64 or 128 or 256), got {keys.shape}")
    half = [keys.dtype]
    values = token_rows(f"{op}: v", v, half)
    shaped(f"{op}: v", values, keys.shape)

    kinds = [*half, E4M3]
    pools = kv_pools(op, k_pool, v_pool, kinds, layout, kv_heads, dim)
    stored = pools[0].dtype

    read = {"k": keys, "v": values, "slots": array(f"{op}: slots", slots, [INT64])}
    shaped(f"{op}: slots", read["slots"], (tokens,))
    _given_with(op, f"a pool of {E4M3}", stored == E4M3, k_scale=k_scale, v_scale=v_scale)
    _given_with(op, "cos_sin", cos_sin is not None, positions=positions)
    for role, operand, dtype, length in (
        ("k_scale", k_scale, FLOAT32, kv_heads),
        ("v_scale", v_scale, FLOAT32, kv_heads),
        ("positions", positions, INT32, tokens),
    ):
        if operand is not None:
            read[role] = array(f"{op}: {role}", operand, [dtype])
            shaped(f"{op}: {role}", read[role], (length,))
    max_position = rotary_dim = 0
    if cos_sin is not None:
        table = read["cos_sin"] = aligned_strides(f"{op}: cos_sin", array(f"{op}: cos_sin", cos_sin, [FLOAT32]))
        max_position, rotary_dim = table.shape if len(table.shape) == 2 else (0, 0)
        if not max_position or not rotary_dim or rotary_dim % 16 or rotary_dim > dim:
            wanted = f"(max_position, a multiple of 16 up to {dim})"
            raise ValueError(f"{op}: cos_sin: wanted shape {wanted}, got {table.shape}")

    written = {"k_pool": pools[0], "v_pool": pools[1]}
    q_heads = 0
    if q is None and q_out is not None:
        raise ValueError(f"{op}: q_out is given without q")
    if q is not None:
        if cos_sin is None:
            raise ValueError(f"{op}: q is given without cos_sin, which it is rotated by")
        queries = token_rows(f"{op}: q", q, half)
        q_heads = queries.shape[1]
        shaped(f"{op}: q", queries, (tokens, q_heads, dim))
        q_out = q if q_out is None else q_out
        rotated = token_rows(f"{op}: q_out", q_out, half)
        shaped(f"{op}: q_out", rotated, queries.shape)
        if token_stride(rotated) < q_heads * dim:
            raise ValueError(f"{op}: q_out: tokens overlap: strides {rotated.strides} of shape {rotated.shape}")
        written["q_out"] = rotated
        if (rotated.address, token_stride(rotated)) != (queries.address, token_stride(queries)):
            read["q"] = queries
    for role, result in written.items():
        others = {**read, **{other: seen for other, seen in written.items() if other > role}}
        for other, seen in others.items():
            apart(f"{op}: {role}", result, other, seen)

    rows = tokens * (2 * kv_heads + q_heads)
    if rows >= 2**31:
        raise ValueError(
            f"{op}: k has {tokens} tokens of {2 * kv_heads + q_heads} rows; a launch takes less than 2**31"
        )
    pages, *inner = pools[0].shape[:3]
    page_stride, *strides = (stride // stored.itemsize for stride in pools[0].strides[:3])
    page_size = inner[layout == "HND"]
    head_stride, place_stride = strides if layout == "HND" else reversed(strides)
    whole = [span(operand, seen) for operand, seen in ((k, keys), (v, values), (k_pool, pools[0]), (v_pool, pools[1]))]
    q_rows = (0, 0) if q is None else (token_stride(queries), token_stride(rotated))
    args = (
        *(*whole, slots),
        *((None, None) if q is None else (span(q, queries), span(q_out, rotated))),
        *(
            k_scale,
            v_scale,
            positions,
            cos_sin,
            tokens,
            kv_heads,
            q_heads,
            dim,
            token_stride(keys),
            token_stride(values),
            *q_rows,
        ),
        *(page_stride, head_stride, place_stride, pages, page_size.bit_length() - 1, rotary_dim, max_position),
    )
    function = f"{op}<{HALVES[keys.dtype]},{POOLS[stored]},{STYLES[style] if rotary_dim else 0}>"
    return submit(where, op, function, rows * dim // PER_THREAD, args, after, name)


def slot_mapping(
    where: Where,
    block_table: Any,
    slots: Any,
    *,
    page_size: int,
    positions: Any = None,
    requests: Any = None,
    lengths: Any = None,
    count: Any = None,
    after: After = None,
    name: str | None = None,
) -> Node | None:
    """``slots[t] = block_table[request, position // page_size] * page_size + position % page_size`` for each token t.

    Args:
        block_table: int32 [table_rows, width]: pages of each request; entries that no token needs are not read.
        slots: int64 [tokens]; of padding -1.
        positions: int32 [tokens]; negative for padding.
        requests: int32 [tokens]: the row of the table for each token. Without, tokens stand request by request, as many
            of each.
        lengths: int32 [table_rows], in place of ``positions`` and ``requests``: tokens are the last ones of each
            request. The tokens that a request is too short for are padding.
        count: int32 [1]: tokens from there on are padding, whatever their positions say.

    A place that the table lacks gets -1; the CPU device reports it.
    """
    op = "slot_mapping"
    if whole(f"{op}: page_size", page_size) not in PAGE_SIZES:
        raise ValueError(f"{op}: page_size: wanted one of {', '.join(map(str, PAGE_SIZES))}, got {page_size!r}")
    if (positions is None) == (lengths is None):
        raise ValueError(
            f"{op}: wanted either positions or lengths, got {'both' if lengths is not None else 'neither'}"
        )
    if lengths is not None and requests is not None:
        raise ValueError(f"{op}: requests is for positions: with lengths tokens stand request by request")
    table = array(f"{op}: block_table", block_table, [INT32])
    if len(table.shape) != 2 or not table.shape[0]:
        raise ValueError(f"{op}: block_table: wanted shape (table_rows, width), got {table.shape}")
    rows, width = table.shape
    result = array(f"{op}: slots", slots, [INT64])
    if len(result.shape) != 1:
        raise ValueError(f"{op}: slots: wanted shape (tokens,), got {result.shape}")
    (tokens,) = result.shape
    if tokens >= 2**31 or width * page_size >= 2**31:
        raise ValueError(f"{op}: {tokens} tokens, {width} pages of {page_size} tokens: a position has 31 bits")
    if requests is None and tokens % rows:
        raise ValueError(f"{op}: slots: {tokens} tokens are not as many for each of {rows} requests")
    read = {"block_table": table}
    for role, operand, length in (
        *(("positions", positions, tokens), ("requests", requests, tokens)),
        *(("lengths", lengths, rows), ("count", count, 1)),
    ):
        if operand is not None:
            read[role] = array(f"{op}: {role}", operand, [INT32])
            shaped(f"{op}: {role}", read[role], (length,))
    for role, seen in read.items():
        apart(f"{op}: slots", result, role, seen)
    args = (positions, requests, lengths, block_table, count, slots, tokens, rows, width, page_size.bit_length() - 1)
    return submit(where, "kv_write", op, tokens, args, after, name)


def _given_with(op: str, what: str, is_there: bool, **operands: Any) -> None:
    for role, operand in operands.items():
        if is_there and operand is None:
            raise ValueError(f"{op}: {role} is missing: {what} needs it")
        if not is_there and operand is not None:
            raise ValueError(f"{op}: {role} is given without {what}")
