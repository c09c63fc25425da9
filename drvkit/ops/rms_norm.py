"""Rows over the root of their mean square (RMSNorm), each element times its weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from . import Where, aligned, apart, array, eps_of, launch, shaped, span, token_rows, token_stride

if TYPE_CHECKING:
    from ..graph import After
    from ..node import Node

__all__ = ["rms_norm"]

BFLOAT16, FLOAT32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
MOST = 16384  # elements of a row
PIECE = 8  # elements of one access
MOST_THREADS = 1024


def rms_norm(
    where: Where,
    x: Any,
    weight: Any,
    out: Any,
    *,
    eps: float = 1e-6,
    after: After = None,
    name: str | None = None,
) -> Node | None:
    """``out = weight * x / sqrt(mean(x^2) + eps)`` of each row, in float32, rounded once.

    Args:
        x, out: bfloat16 [tokens, dim], dim a multiple of 8 up to 16384; tokens may be parts of wider rows. ``out`` may
            be ``x`` itself, and overlaps nothing else.
        weight: float32 [dim].

    A row whose squares add up to more than 3.4e38 becomes 0. The bits of a row depend on itself and ``weight`` alone.
    """
    op = "rms_norm"
    rows = token_rows(f"{op}: x", x, [BFLOAT16], axes=("tokens", "dim"))
    tokens, dim = rows.shape
    if dim % PIECE or not 0 < dim <= MOST:
        raise ValueError(f"{op}: x: wanted shape (tokens, a multiple of {PIECE} up to {MOST}), got {rows.shape}")
    result = token_rows(f"{op}: out", out, [BFLOAT16], axes=("tokens", "dim"))
    shaped(f"{op}: out", result, rows.shape)
    if token_stride(result) < dim:
        raise ValueError(f"{op}: out: tokens overlap: strides {result.strides} of shape {result.shape}")
    scale = aligned(f"{op}: weight", array(f"{op}: weight", weight, [FLOAT32]))
    shaped(f"{op}: weight", scale, (dim,))
    eps = eps_of(op, eps)
    apart(f"{op}: out", result, "weight", scale)
    if (result.address, token_stride(result)) != (rows.address, token_stride(rows)):
        apart(f"{op}: out", result, "x", rows)

    pieces = dim // PIECE
    per_thread = 1 if pieces <= MOST_THREADS else 2
    block = -(-pieces // (32 * per_thread)) * 32
    args = (span(x, rows), weight, span(out, result), dim, token_stride(rows), token_stride(result), eps)
    return launch(where, op, f"{op}<{per_thread}>", tokens, block, args, after=after, name=name)
