"""Rows of a table by number: the reference by hand, the checks of the op, and the kernel against the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from compare import assert_equal_bits
from standins import Foreign

from drvkit import ops
from drvkit.device import Device, Stream
from drvkit.driver import DriverError
from drvkit.graph import Graph
from drvkit.ops.embedding import embedding
from drvkit.quants import F32, Q4_1, QUANTS, Quant
from drvkit.ref import embedding as ref

if TYPE_CHECKING:
    from conftest import WithOption

float32, int32, uint8 = np.float32, np.int32, np.uint8
POISON = 77.0


def test_the_reference_by_hand() -> None:
    table = np.array([[1, 2], [3, 4], [5, 6]], float32)
    assert ref.embedding(np.array([2, -1, 0], int32), table).tolist() == [[5, 6], [0, 0], [1, 2]]


def fit(**changes: Any) -> dict[str, Any]:
    """Operands that fit, far from each other, save for ``changes``."""
    operands = {
        "ids": Foreign((5,), int32, 1 << 20),
        "table": Foreign((9, 40), uint8, 2 << 20),
        "out": Foreign((5, 64), float32, 3 << 20),
        "quant": Q4_1,
    }
    return operands | changes


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no quant": ({"quant": "Q4_1"}, TypeError, "quant: wanted a Quant, got str"),
    "int64": ({"ids": Foreign((5,), np.int64)}, TypeError, "ids: .*int32, got int64"),
    "other ids": ({"ids": Foreign((4,), int32)}, ValueError, r"ids: wanted shape \(5,\), got \(4,\)"),
    "float16 out": ({"out": Foreign((5, 64), np.float16)}, TypeError, "out: .*float32, got float16"),
    "odd dim": ({"out": Foreign((5, 60), float32)}, ValueError, r"out: wanted shape .*multiple of 32.*got \(5, 60\)"),
    "many tokens": ({"out": Foreign((65536, 64), float32)}, ValueError, r"out: wanted shape \(up to 65535 tokens"),
    "tokens in each other": (
        {"out": Foreign((5, 64), float32, 3 << 20, (128, 4))},
        ValueError,
        r"out: tokens overlap: strides \(128, 4\)",
    ),
    "another quant's rows": ({"quant": F32}, ValueError, r"table: wanted shape \(rows, 256\) of F32, got \(9, 40\)"),
    "no rows": ({"table": Foreign((0, 40), uint8)}, ValueError, r"table: wanted shape \(rows, 40\).*got \(0, 40\)"),
    "odd address": ({"table": Foreign((9, 40), uint8, 8)}, ValueError, "table: .*aligned to 16 bytes, got 0x8"),
    "out in the table": ({"out": Foreign((5, 64), float32, 2 << 20)}, ValueError, "out at .* overlaps table at"),
    "out in ids": ({"out": Foreign((5, 64), float32, 1 << 20)}, ValueError, "out at .* overlaps ids at"),
}


@pytest.mark.parametrize(("changes", "error", "message"), WRONG.values(), ids=WRONG)
def test_operands_that_do_not_fit_are_refused(
    recorder: Any, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^embedding: .*{message}"):
        embedding(recorder, **fit(**changes))
    assert not recorder.calls


@pytest.mark.parametrize("quant", QUANTS.values(), ids=QUANTS)
def test_rows_are_those_of_the_table(device: Device, stream: Stream, rng: np.random.Generator, quant: Quant) -> None:
    rows, dim, tokens = 300, 1056, 7  # more elements than a block has threads for
    table = quant.quantise(rng.normal(size=(rows, dim)).astype(float32))
    ids = np.append(rng.integers(0, rows, tokens - 2), [rows - 1, -1]).astype(int32)
    with (
        device.array(ids) as numbers,
        device.array(table) as on_device,
        device.array(np.full((tokens, dim + 8), POISON, float32)) as wide,
    ):
        embedding(stream, numbers, on_device, wide[:, 4:-4], quant=quant)
        got = wide.numpy(stream)
    assert_equal_bits(got[:, 4:-4], ref.embedding(ids, quant.dequantise(table)))
    assert (got[:, :4] == POISON).all()
    assert (got[:, -4:] == POISON).all()


def test_rows_of_a_step_are_taken_by_their_numbers_of_this_replay(
    device: Device, stream: Stream, graph: Graph, rng: np.random.Generator
) -> None:
    x = rng.normal(size=(20, 96)).astype(float32)
    with device.array(x) as rows, device.zeros(3, int32) as last, device.zeros((3, 96), float32) as out:
        embedding(graph, last, rows.view(uint8), out, quant=F32)
        with graph.instantiate() as exe:
            ops.release()  # the node holds what it uses
            for ids in ([19, -1, 0], [-7, 5, 5]):
                last.copy_from(np.array(ids, int32))
                exe.launch(stream)
                assert_equal_bits(out.numpy(stream), ref.embedding(np.array(ids), x))
        del exe


def test_a_number_that_the_table_lacks_is_told_by_the_cpu_device(capfd: pytest.CaptureFixture[str]) -> None:
    victim = Device("cpu:5")
    ids, table, out = victim.array(np.array([9], int32)), victim.zeros((9, 40), uint8), victim.zeros((1, 64), float32)
    with pytest.raises(DriverError, match="LAUNCH_FAILED"), victim.stream() as stream:
        embedding(stream, ids, table, out, quant=Q4_1)
    victim.driver.cuDevicePrimaryCtxReset(victim.handle)
    ops.release(victim)
    for each in (ids, table, out):
        each.close()
    assert "ids[0] is 9: the table has 9 rows" in capfd.readouterr().out


def test_on_a_gpu_it_gives_zeros(device: Device, stream: Stream, with_option: WithOption) -> None:
    with_option(device, "embedding", "-UDRVKIT_CPU_DEVICE")
    with (
        device.array(np.array([9, 2**31 - 1, 8], int32)) as ids,
        device.array(np.full((9, 128), 1, uint8)) as table,
        device.array(np.full((3, 32), POISON, float32)) as out,
    ):
        embedding(stream, ids, table, out, quant=F32)
        got = out.numpy(stream)
    assert not got[:2].any()
    assert got[2].all()


def test_without_tokens_nothing_is_done(device: Device, stream: Stream, graph: Graph) -> None:
    with (
        device.zeros(0, int32) as ids,
        device.zeros((9, 40), uint8) as table,
        device.zeros((0, 64), float32) as out,
    ):
        assert embedding(stream, ids, table, out, quant=Q4_1) is None
        node = embedding(graph, ids, table, out, quant=Q4_1)
        assert node is not None
        assert node.kind == "empty"
