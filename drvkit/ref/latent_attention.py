"""The attention of a whole layer: from the hidden states of a sequence to what is added to them.

Without caches: all that a token attends to is made of the whole sequence, each time. What is between two projections is
rounded to bfloat16, as between the nodes on a device; compressors' projections and the inside of the parts are not.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ..models import Model
from ..records import KEY_MXFP4, KV_FP8, Format, Pages
from ..weights import Weights
from .indexer import indexer_logits, indexer_query
from .kv_compress import entries
from .linear import linear
from .query_kv import normalised_and_turned
from .rms_norm import rms_norm
from .sparse_attention import sparse_attention
from .top_k import top_k

__all__ = ["Attended", "latent_attention"]

Float64 = NDArray[np.float64]
Int32 = NDArray[np.int32]
PAGE = 64


class Attended(NamedTuple):
    """What comes out.

    y: [tokens, hidden], not rounded.
    chosen: int32 [tokens, topk], entries that each token attends to; None where the layer has no indexer.
    scores, magnitudes: [tokens, entries], by which they were chosen, and what errors of them go by; NaN where a token
        sees no more than topk.
    """

    y: Float64
    chosen: Int32 | None = None
    scores: Float64 | None = None
    magnitudes: Float64 | None = None


def latent_attention(
    x: NDArray[Any],
    weights: Weights,
    model: Model,
    ratio: int,
    *,
    first: int = 0,
    kv: Format = KV_FP8,
    keys: Format = KEY_MXFP4,
    chosen: Int32 | None = None,
) -> Attended:
    """Of the tokens from ``first`` on of a sequence ``x`` [tokens, hidden], in a layer of ``ratio``.

    ``kv`` and ``keys`` are the formats of its caches; keys of KEY_MXFP4 are transformed by Hadamard's matrix. With
    ``chosen`` [tokens, topk] tokens attend to these entries, whatever their scores.
    """
    length = len(x)
    every = np.array([[0, position, 0, length] for position in range(length)], np.int32).reshape(-1, 4)
    tokens, new = every[first:], x[first:]
    cos_sin = model.cos_sin(ratio, length)

    latent = _bf16(rms_norm(_bf16(linear(new, weights["wq_a"])), weights["q_norm"], eps=model.eps))
    q = _bf16(linear(latent, weights["wq_b"])).reshape(-1, model.heads, model.dim)
    q = _bf16(normalised_and_turned(q, tokens[:, 1], cos_sin, eps=model.eps))
    rows = _bf16(linear(x, weights["wkv"]))
    window = in_pages(kv, normalised_and_turned(rows, every[:, 1], cos_sin, weights["kv_norm"], eps=model.eps))

    def compressed(format: Format, prefix: str) -> Pages:
        """The entries of the whole sequence."""
        matrix = np.concatenate([weights[f"{prefix}.wkv"], weights[f"{prefix}.wgate"]])
        ug = linear(x, matrix).astype(np.float32)
        nothing_before = np.empty((1, 1, len(matrix)), np.float32)
        _, made = entries(
            *(every, ug, nothing_before, np.zeros(1, np.int32)),
            *(weights[f"{prefix}.ape"], weights[f"{prefix}.norm"], cos_sin),
            ratio=ratio,
            hadamard=format == KEY_MXFP4,
            eps=model.eps,
        )
        return in_pages(format, made)

    which: dict[str, Any] = {}
    scores = magnitudes = None
    if ratio:
        which = {"entries": compressed(kv, "compressor"), "visible": ((tokens[:, 1] + 1) // ratio).astype(np.int32)}
    if ratio == model.indexed:
        indexed = _bf16(linear(latent, weights["indexer.wq_b"])).reshape(-1, model.indexer_heads, model.indexer_dim)
        of_heads = linear(new, weights["indexer.weights_proj"]).astype(np.float32)
        queries = indexer_query(tokens, indexed, of_heads, cos_sin, keys, transformed=keys == KEY_MXFP4)
        pages = compressed(keys, "indexer.compressor")
        scores, magnitudes = indexer_logits(
            *(tokens, *queries, keys, pages.pool, pages.block_table, PAGE, max(1, length // ratio)),
            skip_up_to=model.topk,
        )
        if chosen is None:
            chosen = top_k(scores.astype(np.float32), which["visible"], model.topk)
        which["indices"] = chosen

    out, _ = sparse_attention(
        q, tokens, window, window_size=model.window, sinks=weights["attn_sink"], cos_sin=cos_sin, **which
    )
    of_groups = np.split(_bf16(out).reshape(len(new), -1), model.groups, axis=1)
    matrices = np.split(weights["wo_a"], model.groups)
    z = [_bf16(linear(each, matrix)) for each, matrix in zip(of_groups, matrices, strict=True)]
    y = linear(np.concatenate(z, axis=1), weights["wo_b"])
    return Attended(y, chosen, scores, magnitudes) if ratio == model.indexed else Attended(y)


def in_pages(format: Format, rows: NDArray[Any]) -> Pages:
    """Rows [n, dim] as those of request 0."""
    count = max(1, -(-len(rows) // PAGE))
    pool = np.zeros((count, format.page_bytes(PAGE)), np.uint8)
    format.put(pool, np.arange(len(rows)), PAGE, *format.encode(rows))
    return Pages(format, pool, np.arange(count, dtype=np.int32)[None], PAGE)


def _bf16(x: NDArray[Any]) -> NDArray[Any]:
    return x.astype(ml_dtypes.bfloat16)
