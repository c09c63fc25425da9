"""How GGUF files store rows of weights: plain, or in blocks of 32 elements with a scale of their own.

As `ggml` defines them. The same in CUDA C++ is ``cuda_src/dk/quants.cuh``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

__all__ = ["BF16", "F16", "F32", "Q4_1", "Q8_0", "QUANTS", "Quant"]

Bytes: TypeAlias = NDArray[np.uint8]
Floats: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True)
class Quant:
    """A format of rows.

    Attributes:
        name: as files call it.
        elements: of a block; rows are whole blocks.
        nbytes: of a block.
        ctype: what kernels call it.
    """

    name: str
    elements: int
    nbytes: int
    _floats: Callable[[Bytes], Floats] = field(repr=False)  # of blocks [n, nbytes], [n, elements]
    _blocks: Callable[[Floats], Bytes] = field(repr=False)

    @property
    def ctype(self) -> str:
        return f"dk::{self.name}"

    def row_bytes(self, elements: int) -> int:
        """Of a row. `ValueError` where it is no whole number of blocks."""
        if elements % self.elements:
            raise ValueError(f"{self.name}: wanted rows of a multiple of {self.elements} elements, got {elements}")
        return elements // self.elements * self.nbytes

    def dequantise(self, rows: Bytes) -> Floats:
        """The values [..., elements] of rows [..., bytes]."""
        blocks = np.ascontiguousarray(rows).reshape(-1, self.nbytes)
        return self._floats(blocks).reshape(*rows.shape[:-1], -1)

    def quantise(self, values: NDArray[Any]) -> Bytes:
        """Rows [..., bytes] of values [..., elements], each element the nearest that there is for its block's scale."""
        nbytes = self.row_bytes(values.shape[-1])
        blocks = np.ascontiguousarray(values, np.float32).reshape(-1, self.elements)
        return self._blocks(blocks).reshape(*values.shape[:-1], nbytes)


def _halves(blocks: Bytes, start: int) -> Floats:
    """The float16 at byte ``start`` of each block, as a column."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)


def _q4_1_floats(blocks: Bytes) -> Floats:
    nibbles = blocks[:, 4:]
    q = np.concatenate([nibbles & 15, nibbles >> 4], axis=1).astype(np.float32)
    return _halves(blocks, 0) * q + _halves(blocks, 2)


def _q4_1_blocks(values: Floats) -> Bytes:
    low = values.min(axis=1, keepdims=True)
    d = (values.max(axis=1, keepdims=True) - low) / np.float32(15)
    with np.errstate(divide="ignore"):
        by = np.where(d == 0, np.float32(0), np.float32(1) / d)
    q = np.minimum((values - low) * by + np.float32(0.5), 15).astype(np.uint8)
    scales = np.concatenate([d, low], axis=1).astype(np.float16).view(np.uint8)
    return np.concatenate([scales, q[:, :16] | q[:, 16:] << 4], axis=1)


def _q8_0_floats(blocks: Bytes) -> Floats:
    return _halves(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _q8_0_blocks(values: Floats) -> Bytes:
    d = np.abs(values).max(axis=1, keepdims=True) / np.float32(127)
    with np.errstate(divide="ignore"):
        scaled = values * np.where(d == 0, np.float32(0), np.float32(1) / d)
    q = np.trunc(scaled + np.copysign(np.float32(0.5), scaled)).astype(np.int8)  # halves away from zero
    return np.concatenate([d.astype(np.float16).view(np.uint8), q.view(np.uint8)], axis=1)


def _plain(name: str, dtype: DTypeLike) -> Quant:
    kind = np.dtype(dtype)
    return Quant(
        name,
        1,
        kind.itemsize,
        lambda blocks: blocks.view(kind).astype(np.float32),
        lambda values: values.astype(kind).view(np.uint8),
    )


Q4_1 = Quant("Q4_1", 32, 20, _q4_1_floats, _q4_1_blocks)
Q8_0 = Quant("Q8_0", 32, 34, _q8_0_floats, _q8_0_blocks)
F32, F16, BF16 = (_plain(*each) for each in (("F32", np.float32), ("F16", np.float16), ("BF16", ml_dtypes.bfloat16)))
QUANTS = {quant.name: quant for quant in (Q4_1, Q8_0, F32, F16, BF16)}
