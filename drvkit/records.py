"""How the rows of a latent cache lie in pages: compressed keys and values, and the keys that an indexer looks through.

A page of n entries has the values of all n, then the scales of all n, and ends at a multiple of what its format says.
Entry e of a request is in the page that its block table has at ``e // page_size % width``, at place
``e % page_size``: a table that is too short for all entries is a ring of its last pages.

    window = Pages(KV_FP8, device.zeros((pages, KV_FP8.page_bytes(64)), np.uint8), block_table, page_size=64)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

__all__ = ["KEY_BF16", "KEY_FP8", "KEY_MXFP4", "KV_BF16", "KV_FP8", "Format", "Pages", "power_of_two_above"]

ROTARY = 64  # elements of a row that are rotated by position, its last ones
E4M3_MAX, E2M1_MAX = 448, 6
FP8_FLOOR = 1e-4  # the least that a block's largest element counts as
FP4_FLOOR = E2M1_MAX * 2.0**-126
LARGEST = 2.0**128 - 2.0**120  # of bfloat16

Float32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Format:
    """Of a row.

    name: what the tables of the account call it.
    number: of the kernels' instances; see dk/records.cuh.
    dim: elements.
    value_bytes, scale_bytes: of a row.
    multiple: what the bytes of a page are one of.
    """

    name: str
    number: int
    dim: int
    value_bytes: int
    scale_bytes: int
    multiple: int

    @property
    def nbytes(self) -> int:
        """Of a row."""
        return self.value_bytes + self.scale_bytes

    def page_bytes(self, page_size: int) -> int:
        return -(-page_size * self.nbytes // self.multiple) * self.multiple

    def encode(self, rows: NDArray[Any]) -> tuple[Bytes, Bytes]:
        """Values [..., value_bytes] and scales [..., scale_bytes] of ``rows`` [..., dim], which are rounded to bfloat16
        first.

        Scales are powers of two: the least by which a block's largest element is no more than the type's largest
        number. Infinities become that number; NaN stays NaN where the type has it.
        """
        with np.errstate(all="ignore"):
            x = rows.astype(ml_dtypes.bfloat16).astype(np.float32)
            return _ENCODERS[self.number](x)

    def decode(self, values: Bytes, scales: Bytes) -> Float32:
        """The rows [..., dim] that values and scales stand for."""
        with np.errstate(all="ignore"):
            return _DECODERS[self.number](values, scales)

    def rows(self, pool: Bytes, slots: NDArray[Any], page_size: int) -> tuple[Bytes, Bytes]:
        """Values and scales of the rows at ``slots`` of a pool [pages, page_bytes]; slot = page * page_size + place."""
        pages, places = slots // page_size, slots % page_size
        values = pool[:, : page_size * self.value_bytes].reshape(len(pool), page_size, self.value_bytes)
        scales = pool[:, page_size * self.value_bytes : page_size * self.nbytes]
        return values[pages, places], scales.reshape(len(pool), page_size, self.scale_bytes)[pages, places]

    def put(self, pool: Bytes, slots: NDArray[Any], page_size: int, values: Bytes, scales: Bytes) -> None:
        """Write rows; those whose slot is negative go nowhere."""
        kept = slots >= 0
        pages, places = (slots // page_size)[kept, None], (slots % page_size)[kept, None]
        pool[pages, places * self.value_bytes + np.arange(self.value_bytes)] = values[kept]
        at = page_size * self.value_bytes + places * self.scale_bytes + np.arange(self.scale_bytes)
        pool[pages, at] = scales[kept]


@dataclass(frozen=True)
class Pages:
    """Rows of ``format`` in pages.

    pool: uint8 [pages, format.page_bytes(page_size)] on the device.
    block_table: int32 [requests, width], pages of each request.
    page_size: entries of a page, a power of two up to 2**20. With one page for each request its entries are contiguous.
    """

    format: Format
    pool: Any
    block_table: Any
    page_size: int


def power_of_two_above(x: Float32) -> tuple[Float32, Bytes]:
    """The least power of two that is not below each of ``x``, which are positive and normal; and its exponent + 127."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    exponents = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    return (exponents << 23).view(np.float32), exponents.astype(np.uint8)


def _scaled(x: Float32, block: int, most: int, floor: float) -> tuple[Float32, Bytes]:
    """Blocks [..., n, block] of x divided by their scales; the scales' exponents [..., n]."""
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // block, block)
    largest = np.fmin(np.fmax.reduce(np.abs(blocks), axis=-1), np.float32(LARGEST))
    scales, exponents = power_of_two_above(np.fmax(largest, np.float32(floor)) * np.float32(1 / most))
    return np.clip(blocks / scales[..., None], -most, most), exponents


def _powers(exponents: Bytes) -> Float32:
    return (exponents.astype(np.uint32) << 23).view(np.float32)


def _encode_kv_fp8(x: Float32) -> tuple[Bytes, Bytes]:
    blocks, exponents = _scaled(x[..., :-ROTARY], 64, E4M3_MAX, FP8_FLOOR)
    codes = blocks.astype(ml_dtypes.float8_e4m3fn).view(np.uint8).reshape(*x.shape[:-1], blocks.shape[-2] * 64)
    turned = np.ascontiguousarray(x[..., -ROTARY:].astype(ml_dtypes.bfloat16)).view(np.uint8)
    padding = np.zeros((*exponents.shape[:-1], 1), np.uint8)
    return np.concatenate([codes, turned], axis=-1), np.concatenate([exponents, padding], axis=-1)


def _decode_kv_fp8(values: Bytes, scales: Bytes) -> Float32:
    codes = np.ascontiguousarray(values[..., : -2 * ROTARY]).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    blocks = codes.reshape(*codes.shape[:-1], 7, 64) * _powers(scales[..., :-1])[..., None]
    turned = np.ascontiguousarray(values[..., -2 * ROTARY :]).view(ml_dtypes.bfloat16).astype(np.float32)
    return np.concatenate([blocks.reshape(codes.shape), turned], axis=-1)


def _encode_bf16(x: Float32) -> tuple[Bytes, Bytes]:
    values = np.ascontiguousarray(x.astype(ml_dtypes.bfloat16)).view(np.uint8)
    return values, np.zeros((*x.shape[:-1], 0), np.uint8)


def _decode_bf16(values: Bytes, scales: Bytes) -> Float32:
    rows: Float32 = np.ascontiguousarray(values).view(ml_dtypes.bfloat16).astype(np.float32)
    return rows


def _encode_key_fp8(x: Float32) -> tuple[Bytes, Bytes]:
    blocks, exponents = _scaled(x, x.shape[-1], E4M3_MAX, FP8_FLOOR)
    codes = blocks.astype(ml_dtypes.float8_e4m3fn).view(np.uint8).reshape(x.shape)
    return codes, np.ascontiguousarray(_powers(exponents)).view(np.uint8)


def _decode_key_fp8(values: Bytes, scales: Bytes) -> Float32:
    codes: Float32 = np.ascontiguousarray(values).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    rows: Float32 = codes * np.ascontiguousarray(scales).view(np.float32)
    return rows


def _encode_mxfp4(x: Float32) -> tuple[Bytes, Bytes]:
    blocks, exponents = _scaled(x, 32, E2M1_MAX, FP4_FLOOR)
    whole = np.where(np.isnan(blocks), np.float32(E2M1_MAX), blocks)  # what the instruction makes of NaN
    nibbles: Bytes = whole.astype(ml_dtypes.float4_e2m1fn).view(np.uint8).reshape(x.shape) & np.uint8(0xF)
    return nibbles[..., 0::2] | nibbles[..., 1::2] << np.uint8(4), exponents


def _decode_mxfp4(values: Bytes, scales: Bytes) -> Float32:
    nibbles = np.stack([values & 0xF, values >> 4], axis=-1).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    blocks = nibbles.reshape(*values.shape[:-1], 4, 32) * _powers(scales)[..., None]
    rows: Float32 = blocks.reshape(*values.shape[:-1], 128)
    return rows


# The row that queries attend to: 448 e4m3 in 7 blocks with ue8m0 scales (and a byte of 0), then 64 bfloat16.
KV_FP8 = Format("fp8", 0, 512, 576, 8, 576)
KV_BF16 = Format("bf16", 1, 512, 1024, 0, 16)
# A key of the indexer: e2m1, the even element in the low nibble, in 4 blocks with ue8m0 scales (OCP MXFP4); or e4m3
# with one float32 scale.
KEY_MXFP4 = Format("mxfp4", 2, 128, 64, 4, 16)
KEY_FP8 = Format("fp8", 3, 128, 128, 4, 16)
KEY_BF16 = Format("bf16", 4, 128, 256, 0, 16)

_ENCODERS = {0: _encode_kv_fp8, 1: _encode_bf16, 2: _encode_mxfp4, 3: _encode_key_fp8, 4: _encode_bf16}
_DECODERS = {0: _decode_kv_fp8, 1: _decode_bf16, 2: _decode_mxfp4, 3: _decode_key_fp8, 4: _decode_bf16}
