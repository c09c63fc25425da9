"""Rows of a table whose numbers come from device memory: embeddings of tokens, or some rows of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..quants import Quant
from . import Where, aligned, apart, array, is_a, launch, shaped, span, token_rows, token_stride

if TYPE_CHECKING:
    from ..graph import After
    from ..node import Node

__all__ = ["embedding"]

FLOAT32, INT32, UINT8 = np.dtype(np.float32), np.dtype(np.int32), np.dtype(np.uint8)
QUARTER, BLOCK = 8, 128  # elements of a thread; threads
MOST, MOST_TOKENS = 2**20, 65535


def embedding(
    where: Where, ids: Any, table: Any, out: Any, *, quant: Quant, after: After = None, name: str | None = None
) -> Node | None:
    """``out[t] = table[ids[t]]``, as floats; 0 where ``ids[t]`` is negative.

    Args:
        ids: int32 [tokens], at most 65535. One that the table lacks gives 0; the CPU device reports it.
        table: uint8 [rows, bytes of a row], blocks of ``quant`` as a GGUF file has them. Rows of a float32 array
            ``x`` are ``x.view(np.uint8)`` and ``F32``.
        out: float32 [tokens, dim], dim a multiple of 32; tokens may be parts of wider rows. It overlaps nothing else.
    """
    op = "embedding"
    is_a(Quant, op, "quant", quant)
    numbers = array(f"{op}: ids", ids, [INT32])
    result = token_rows(f"{op}: out", out, [FLOAT32], axes=("tokens", "dim"))
    tokens, dim = result.shape
    if dim % 32 or not 0 < dim <= MOST or tokens > MOST_TOKENS:
        wanted = f"(up to {MOST_TOKENS} tokens, a multiple of 32 up to {MOST})"
        raise ValueError(f"{op}: out: wanted shape {wanted}, got {result.shape}")
    if token_stride(result) < dim:
        raise ValueError(f"{op}: out: tokens overlap: strides {result.strides} of shape {result.shape}")
    shaped(f"{op}: ids", numbers, (tokens,))
    rows = aligned(f"{op}: table", array(f"{op}: table", table, [UINT8]))
    count = rows.shape[0] if len(rows.shape) == 2 else 0
    if not 0 < count < 2**31 or rows.shape[1] != quant.row_bytes(dim):
        raise ValueError(f"{op}: table: wanted shape (rows, {quant.row_bytes(dim)}) of {quant.name}, got {rows.shape}")
    for role, seen in (("ids", numbers), ("table", rows)):
        apart(f"{op}: out", result, role, seen)
    args = (ids, table, span(out, result), count, dim, rows.shape[1], token_stride(result))
    grid = (-(-dim // (QUARTER * BLOCK)), tokens) if tokens else 0
    return launch(where, op, f"{op}<{quant.ctype}>", grid, BLOCK, args, after=after, name=name)
