"""Tokens times a matrix of weights that stay in the blocks of a file: Q4_1, Q8_0, or plain floats.

What stands before and behind the product in a Llama's layer is in the same launch::

    quantized_linear(graph, h, qkv, out, quant=Q4_1, norm=attn_norm)                 # RMSNorm before it
    quantized_linear(graph, attended, o, h, quant=Q4_1, residual=h)                  # added to what was there
    quantized_linear(graph, h, gate_up, act, quant=Q4_1, norm=ffn_norm, gated=True)  # silu(gate) * up
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..quants import Quant
from . import (
    FLOATS,
    Where,
    aligned,
    apart,
    array,
    device_of,
    eps_of,
    is_a,
    launch,
    shaped,
    span,
    token_rows,
    token_stride,
)

if TYPE_CHECKING:
    from ..graph import After
    from ..node import Node

__all__ = ["quantized_linear"]

FLOAT32, INT32, UINT8 = (np.dtype(t) for t in (np.float32, np.int32, np.uint8))
MOST = 2**20  # inputs, outputs
OUTPUTS = 16  # they are a multiple of: rows of weights of a product
FEW = (1, 2)  # tokens of a warp, where there are few
MANY = (1, 2, 4)  # by 8 tokens, of a block, where there are many
MOST_TOKENS = 65535 * 16  # blocks of a grid, each with as many tokens as those of plain floats can have
# See cuda_src/quantized_linear.cu.
WARPS_OF_FEW, RESIDENT = 4, 4  # of a block of few tokens; such blocks that a multiprocessor has registers for
DEEP = 768  # inputs, from which on a lane has twice as many of them on their way
MOST_WARPS, OF_WARP = 12, 64  # of a block of many tokens, of which it has one; inputs of a warp at a time


def quantized_linear(
    where: Where,
    x: Any,
    weight: Any,
    out: Any,
    *,
    quant: Quant,
    norm: Any = None,
    eps: float = 1e-5,
    residual: Any = None,
    gated: bool = False,
    count: Any = None,
    after: After = None,
    name: str | None = None,
) -> Node | None:
    """``y[t][n] = sum over k of x[t][k] * weight[n][k]``, in float32; ``out = residual + y``, rounded once.

    Args:
        x: [tokens, inputs], float32, float16 or bfloat16, inputs a multiple of 32. Tokens may be parts of wider rows.
        weight: uint8 [outputs, bytes of a row], blocks of ``quant`` as a GGUF file has them. With programmatic edges
            it and ``norm`` are read before the kernels before this one have ended: nothing in the same graph writes
            them.
        out: [tokens, outputs], float32, float16 or bfloat16, tokens likewise, outputs a multiple of 16.
        norm: float32 [inputs]: ``x`` is over the root of its mean square first, and times this (RMSNorm):
            ``x[t][k] * norm[k] / sqrt(mean(x[t]^2) + eps)``.
        residual: float32 [tokens, outputs], tokens likewise; it may be ``out`` itself.
        gated: weight has twice as many rows as there are outputs, first those of a gate a, then those of b, and
            ``out = a / (1 + exp(-a)) * b`` (SwiGLU).
        count: int32 [1]: of tokens from there on nothing is read or written.

    ``out`` overlaps nothing but ``residual``. Up to 2 tokens are multiplied in float32, more on the tensor cores, each
    factor as the sum of two bfloat16 (16 bits), where what is infinite becomes NaN. Beside that the bits of a token's
    results depend on the token and the matrices alone, whatever the other tokens are and however many.
    """
    op = "quantized_linear"
    device = device_of(op, where)
    is_a(Quant, op, "quant", quant)
    rows = token_rows(f"{op}: x", x, FLOATS, axes=("tokens", "dim"))
    tokens, inputs = rows.shape
    if inputs % 32 or not 0 < inputs <= MOST:
        raise ValueError(f"{op}: x: wanted a multiple of 32 inputs, from 32 to {MOST}, got {inputs}")
    if tokens > MOST_TOKENS:
        raise ValueError(f"{op}: x: wanted at most {MOST_TOKENS} tokens, got {tokens}")
    result = token_rows(f"{op}: out", out, FLOATS, axes=("tokens", "dim"))
    outputs = result.shape[1]
    if not 0 < outputs <= MOST or outputs % OUTPUTS:
        raise ValueError(f"{op}: out: wanted a multiple of {OUTPUTS} outputs, up to {MOST}, got {outputs}")
    shaped(f"{op}: out", result, (tokens, outputs))
    if token_stride(result) < outputs:
        raise ValueError(f"{op}: out: tokens overlap: strides {result.strides} of shape {result.shape}")
    matrix = aligned(f"{op}: weight", array(f"{op}: weight", weight, [UINT8]))
    shaped(f"{op}: weight", matrix, ((2 if gated else 1) * outputs, quant.row_bytes(inputs)))
    read = {"x": rows, "weight": matrix}
    if norm is not None:
        read["norm"] = aligned(f"{op}: norm", array(f"{op}: norm", norm, [FLOAT32]))
        shaped(f"{op}: norm", read["norm"], (inputs,))
    residual_row = 0
    if residual is not None:
        if gated:
            raise ValueError(f"{op}: residual: a gated product has none")
        before = token_rows(f"{op}: residual", residual, [FLOAT32], axes=("tokens", "dim"))
        shaped(f"{op}: residual", before, (tokens, outputs))
        residual_row = token_stride(before)
        if (before.address, residual_row, before.dtype) != (result.address, token_stride(result), result.dtype):
            read["residual"] = before
    if count is not None:
        read["count"] = array(f"{op}: count", count, [INT32])
        shaped(f"{op}: count", read["count"], (1,))
    for role, seen in read.items():
        apart(f"{op}: out", result, role, seen)

    if few := tokens <= FEW[-1]:
        size = next(each for each in FEW if tokens <= each)
        deep = size == 1 and inputs > DEEP and quant.elements > 1  # of plain floats there are too few registers
        groups, block, shape = 1, 32 * WARPS_OF_FEW, f"{size},{6 if deep else 3}"
        wanted = -(-outputs // (WARPS_OF_FEW if gated else 2 * WARPS_OF_FEW))
    else:
        sizes = MANY if quant.elements > 1 else MANY[:-1]  # of plain floats there are too few registers
        size = next((each for each in sizes if tokens <= 8 * each), sizes[-1])
        groups, block, shape = -(-tokens // (8 * size)), 32 * warps_of(inputs), f"{size}"
        wanted = outputs // (OUTPUTS // 2 if gated else OUTPUTS)
    most = (RESIDENT if few else 1) * device.multiprocessors // groups
    grid = (min(wanted, max(1, most)), groups) if tokens else 0
    args = (
        *(span(x, rows), weight, norm, None if residual is None else span(residual, before), count, span(out, result)),
        *(tokens, inputs, outputs, matrix.shape[1]),
        *(token_stride(rows), residual_row, token_stride(result), eps_of(op, eps)),
    )
    form = "kGated" if gated else "kProduct"
    kernel = f"{op}_few" if few else f"{op}_many"
    function = f"{kernel}<{quant.ctype},{FLOATS[rows.dtype]},{FLOATS[result.dtype]},{form},{shape}>"
    return launch(where, op, function, grid, block, args, after=after, name=name, op=op)


def warps_of(inputs: int) -> int:
    """Of a block of many tokens: as many as the inputs keep evenly busy. It decides the order of sums."""
    shares = -(-inputs // OF_WARP)
    turns = -(-shares // MOST_WARPS)
    return -(-shares // turns)
