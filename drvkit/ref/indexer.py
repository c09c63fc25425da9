"""The indexer: queries as narrow as the keys, and their scores of the entries that each token sees.

Queries go through float32, each product and sum rounded by itself, as the kernel has it, so that their bytes are its
bytes; scores are in float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..records import KEY_FP8, Bytes, Float32, Format
from .kv_compress import walsh_hadamard
from .kv_write import rotate

__all__ = ["indexer_logits", "indexer_query"]

Int32 = NDArray[np.int32]
Float64 = NDArray[np.float64]


def indexer_query(
    tokens: Int32,
    q: NDArray[Any],
    weights: NDArray[Any],
    cos_sin: Float32,
    format: Format,
    *,
    transformed: bool = False,
) -> tuple[Bytes, Bytes, Float32]:
    """Values [tokens, heads, value_bytes] and scales [tokens, heads, scale_bytes] of ``q`` [tokens, heads, 128], and
    its weights [tokens, heads]; of padding 0.

    ``tokens`` [tokens, 4] as `step_tokens` gives them. The last elements are turned by the position, pairs being
    neighbours; then rows are multiplied by the Hadamard matrix, if ``transformed``. Weights are divided by the root of
    128 * heads, and those of KEY_FP8 multiplied by the scale: it has no scales.
    """
    _, heads, dim = q.shape
    rotary = cos_sin.shape[1]
    with np.errstate(all="ignore"):
        rows = q.astype(np.float32)
        rows[..., -rotary:] = rotate(rows[..., -rotary:], tokens[:, 1], cos_sin, "gptj")
        if transformed:
            rows = walsh_hadamard(rows)
        values, scales = format.encode(rows)
        made = weights.astype(np.float32) * np.float32((dim * heads) ** -0.5)
        if format == KEY_FP8:
            made, scales = made * scales.view(np.float32)[..., 0], scales[..., :0]
    is_padding = tokens[:, 0] < 0
    values[is_padding], scales[is_padding], made[is_padding] = 0, 0, 0
    return values, scales, made


def indexer_logits(
    tokens: Int32,
    values: Bytes,
    scales: Bytes,
    weights: Float32,
    format: Format,
    pool: Bytes,
    block_table: Int32,
    page_size: int,
    width: int,
    *,
    skip_up_to: int = 0,
) -> tuple[Float64, Float64]:
    """``sum over heads of weight * max(0, query . key)`` [tokens, width], and what its rounding errors go by: the same
    of magnitudes, ``sum of |weight| * sum of |query| * |key|``. NaN where nothing is written: at entries that the token
    does not see, and at all of a token that sees no more than ``skip_up_to``.

    ``tokens``, ``values``, ``scales`` and ``weights`` are a step's, and of its queries; keys are in ``pool`` [pages,
    page_bytes] by ``block_table`` [requests, pages of a request].
    """
    if format == KEY_FP8:  # of which the weights have the scales
        scales = np.ones((*values.shape[:2], 1), np.float32).view(np.uint8)
    queries = format.decode(values, scales).astype(np.float64)
    logits, magnitudes = np.full((2, len(tokens), width), np.nan)
    for row, (request, position, _, _) in enumerate(tokens.tolist()):
        seen = (position + 1) // 4
        if request < 0 or seen <= skip_up_to:
            continue
        entries = np.arange(seen)
        slots = block_table[request, entries // page_size].astype(np.int64) * page_size + entries % page_size
        keys = format.decode(*format.rows(pool, slots, page_size)).astype(np.float64)
        dots = queries[row] @ keys.T
        logits[row, :seen] = weights[row].astype(np.float64) @ np.maximum(dots, 0)
        magnitudes[row, :seen] = np.abs(weights[row]).astype(np.float64) @ (np.abs(queries[row]) @ np.abs(keys.T))
    return logits, magnitudes
