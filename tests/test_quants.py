"""Formats of weights against those of the gguf package."""

from __future__ import annotations

import numpy as np
import pytest
from compare import assert_equal_bits

from drvkit.quants import F32, Q4_1, QUANTS, Quant

gguf = pytest.importorskip("gguf", reason="needs gguf (extra `examples`)")


@pytest.mark.parametrize("quant", QUANTS.values(), ids=QUANTS)
def test_rows_and_values_are_those_of_ggml(rng: np.random.Generator, quant: Quant) -> None:
    values = rng.normal(size=(40, 320)).astype(np.float32)
    values[3], values[4], values[5, :32], values[6] = 0, 5, -3, values[6] * 1e-3
    kind = gguf.GGMLQuantizationType[quant.name]
    rows = quant.quantise(values)
    assert_equal_bits(rows, np.ascontiguousarray(gguf.quants.quantize(values, kind)).view(np.uint8))
    want = gguf.quants.dequantize(rows if kind.name.startswith(("Q", "BF")) else _plain(rows, kind.name), kind)
    assert_equal_bits(quant.dequantise(rows), want.astype(np.float32))
    assert rows.shape == (40, quant.row_bytes(320))


def _plain(rows: np.ndarray, name: str) -> np.ndarray:
    return rows.view({"F32": np.float32, "F16": np.float16}[name])


def test_any_axes(rng: np.random.Generator) -> None:
    values = rng.normal(size=(2, 3, 64)).astype(np.float32)
    rows = Q4_1.quantise(values)
    assert rows.shape == (2, 3, 40)
    assert_equal_bits(Q4_1.dequantise(rows), Q4_1.dequantise(rows.reshape(6, 40)).reshape(2, 3, 64))
    assert_equal_bits(F32.dequantise(F32.quantise(values[0, 0])), values[0, 0])


def test_a_row_is_whole_blocks() -> None:
    assert (Q4_1.row_bytes(64), F32.row_bytes(5)) == (40, 20)
    with pytest.raises(ValueError, match="Q4_1: wanted rows of a multiple of 32 elements, got 48"):
        Q4_1.row_bytes(48)
