"""Weights of the attention of a layer, by the names that checkpoints have below ``attn.``; and random ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .models import OVERLAP, Model

__all__ = ["Weights", "random_weights", "shapes"]

Weights: TypeAlias = Mapping[str, NDArray[Any]]


def shapes(model: Model, ratio: int) -> dict[str, tuple[int, ...]]:
    """Of the weights of a layer of ``ratio``. Matrices are [outputs, inputs] in bfloat16; `attn_sink`, norms, and `ape`
    of compressors are float32."""
    of = {
        "wq_a": (model.q_latent, model.hidden),
        "q_norm": (model.q_latent,),
        "wq_b": (model.heads * model.dim, model.q_latent),
        "wkv": (model.dim, model.hidden),
        "kv_norm": (model.dim,),
        "attn_sink": (model.heads,),
        "wo_a": (model.groups * model.o_latent, model.heads // model.groups * model.dim),
        "wo_b": (model.hidden, model.groups * model.o_latent),
    }
    if ratio:
        of |= _of_compressor("compressor", model, ratio, model.dim)
    if ratio == model.indexed:
        of["indexer.wq_b"] = (model.indexer_heads * model.indexer_dim, model.q_latent)
        of["indexer.weights_proj"] = (model.indexer_heads, model.hidden)
        of |= _of_compressor("indexer.compressor", model, ratio, model.indexer_dim)
    return of


def _of_compressor(prefix: str, model: Model, ratio: int, dim: int) -> dict[str, tuple[int, ...]]:
    columns = OVERLAP[ratio] * dim
    return {
        f"{prefix}.ape": (ratio, columns),
        f"{prefix}.norm": (dim,),
        f"{prefix}.wgate": (columns, model.hidden),
        f"{prefix}.wkv": (columns, model.hidden),
    }


def dtype_of(name: str) -> np.dtype[Any]:
    """What a weight of this name is in."""
    is_float = name == "attn_sink" or name.endswith(("norm", "ape"))
    return np.dtype(np.float32 if is_float else ml_dtypes.bfloat16)


def random_weights(model: Model, ratio: int, rng: np.random.Generator) -> Weights:
    """Of a scale that keeps what is projected near 1: matrices of variance 1 / inputs, norms around 1."""
    made = {}
    for name, shape in shapes(model, ratio).items():
        values = rng.normal(size=shape)
        if dtype_of(name) == ml_dtypes.bfloat16:
            values /= np.sqrt(shape[-1])
        elif name.endswith("norm"):
            values = 1 + values / 4
        made[name] = values.astype(dtype_of(name))
    return made
