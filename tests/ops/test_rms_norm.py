"""RMSNorm: the reference by hand, the checks of the op, and the kernel against the reference."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from compare import assert_close, assert_equal_bits
from numpy.typing import NDArray
from standins import Foreign

from drvkit import ops
from drvkit.device import Device, Stream
from drvkit.graph import Graph
from drvkit.ops.rms_norm import rms_norm
from drvkit.ref import rms_norm as ref

bfloat16, float32 = ml_dtypes.bfloat16, np.float32
POISON = 77.0
ONE_ROUNDING = {
    "rtol": 2**-8 * 1.001,
    "atol": 1e-40,
    "why": "half a unit in the last place of bfloat16, subnormal ones among them; beside it float32's errors",
}


def as_bf16(x: NDArray[Any]) -> NDArray[Any]:
    with np.errstate(all="ignore"):
        return x.astype(bfloat16)


def assert_normed(got: NDArray[Any], x: NDArray[Any], weight: NDArray[Any], **how: float) -> None:
    want = ref.rms_norm(x, weight, **how)
    assert_close(got.astype(np.float64), want, **ONE_ROUNDING)  # type: ignore[arg-type]


def test_the_reference_by_hand() -> None:
    weight = np.array([1, 10], float32)
    assert ref.rms_norm(np.array([[3, 4], [6, 8]], bfloat16), weight, eps=0).tolist() == [
        [3 / 12.5**0.5, 40 / 12.5**0.5],
        [6 / 50**0.5, 80 / 50**0.5],
    ]
    assert ref.rms_norm(np.array([[1, 1]], bfloat16), weight, eps=3).tolist() == [[0.5, 5]]


def fit(**changes: Any) -> dict[str, Any]:
    """Operands that fit, far from each other, save for ``changes``."""
    operands = {
        "x": Foreign((5, 72), np.uint16, 1 << 20),
        "weight": Foreign((72,), float32, 2 << 20),
        "out": Foreign((5, 72), np.uint16, 3 << 20),
    }
    return operands | changes


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "float16": ({"x": Foreign((5, 72), np.float16)}, TypeError, "x: .*bfloat16, got float16"),
    "float32 out": ({"out": Foreign((5, 72), float32)}, TypeError, "out: .*bfloat16, got float32"),
    "bfloat16 weight": ({"weight": Foreign((72,), np.uint16)}, TypeError, "weight: .*float32, got uint16"),
    "odd dim": (
        {"x": Foreign((5, 76), np.uint16, 1 << 20, (160, 2))},
        ValueError,
        r"x: wanted shape \(tokens, a multiple of 8 up to 16384\), got \(5, 76\)",
    ),
    "wide rows": ({"x": Foreign((5, 16392), np.uint16, 1 << 20)}, ValueError, r"x: wanted .*got \(5, 16392\)"),
    "no elements": ({"x": Foreign((5, 0), np.uint16, 1 << 20)}, ValueError, r"x: wanted .*got \(5, 0\)"),
    "odd stride": ({"x": Foreign((5, 72), np.uint16, 1 << 20, (152, 2))}, ValueError, "x: .*multiples of 16 bytes"),
    "odd address": ({"weight": Foreign((72,), float32, 8)}, ValueError, "weight: .*aligned to 16 bytes, got 0x8"),
    "long weight": ({"weight": Foreign((80,), float32, 2 << 20)}, ValueError, r"weight: wanted shape \(72,\), got"),
    "other tokens": ({"out": Foreign((6, 72), np.uint16)}, ValueError, r"out: wanted shape \(5, 72\), got \(6, 72\)"),
    "tokens in each other": (
        {"out": Foreign((5, 72), np.uint16, 3 << 20, (128, 2))},
        ValueError,
        r"out: tokens overlap: strides \(128, 2\)",
    ),
    "one token for all, in place": (
        dict.fromkeys(("x", "out"), Foreign((5, 72), np.uint16, 1 << 20, (0, 2))),
        ValueError,
        "out: tokens overlap",
    ),
    "out beside x": ({"out": Foreign((5, 72), np.uint16, (1 << 20) + 16)}, ValueError, "out at .* overlaps x at"),
    "out at other strides": (
        {"out": Foreign((5, 72), np.uint16, 1 << 20, (160, 2))},
        ValueError,
        "out at .* overlaps x at",
    ),
    "out in weight": ({"out": Foreign((5, 72), np.uint16, 2 << 20)}, ValueError, "out at .* overlaps weight at"),
    "eps": ({"eps": -1e-6}, ValueError, "eps: wanted a number from 0 on, got -1e-06"),
    "eps that is none": ({"eps": float("nan")}, ValueError, "eps: wanted a number from 0 on, got nan"),
}


@pytest.mark.parametrize(("changes", "error", "message"), WRONG.values(), ids=WRONG)
def test_operands_that_do_not_fit_are_refused(
    recorder: Any, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^rms_norm: .*{message}"):
        rms_norm(recorder, **fit(**changes))
    assert not recorder.calls


@pytest.mark.parametrize(
    ("dim", "instance", "block"),
    [(8, 1, 32), (256, 1, 32), (264, 1, 64), (7168, 1, 896), (8192, 1, 1024), (8200, 2, 544), (16384, 2, 1024)],
)
def test_a_row_has_a_block(recorder: Any, dim: int, instance: int, block: int) -> None:
    x, weight = Foreign((5, dim), np.uint16, 1 << 20), Foreign((dim,), float32, 2 << 20)
    out = Foreign((5, dim), np.uint16, 3 << 20)
    node = rms_norm(recorder, x, weight, out, after="before", name="n")
    assert node == "kernel node"  # type: ignore[comparison-overlap]
    ((kernel, how),) = recorder.calls
    assert kernel == f"rms_norm: rms_norm<{instance}>"
    assert (how["grid"], how["block"], how["after"], how["name"]) == (5, block, "before", "n")


@pytest.mark.parametrize("dim", [8, 520, 7168, 8200, 16384])
def test_rows_are_those_of_the_reference(device: Device, stream: Stream, rng: np.random.Generator, dim: int) -> None:
    tokens = 3
    x = as_bf16(rng.normal(size=(tokens, dim)) * np.exp2(rng.integers(-12, 12, (tokens, 1))))
    weight = rng.normal(size=dim).astype(float32)
    with (
        device.empty((tokens, dim + 24), bfloat16) as rows,  # of which nobody may read the rest
        device.array(weight) as scale,
        device.array(np.full((tokens, dim + 16), POISON, bfloat16)) as wide,
    ):
        for t in range(tokens):
            rows[t, 16 : 16 + dim].copy_from(x[t])
        rms_norm(stream, rows[:, 16 : 16 + dim], scale, wide[:, 8 : 8 + dim], eps=0.01)
        got = wide.numpy(stream)
    assert_normed(got[:, 8:-8], x, weight, eps=0.01)
    assert (got[:, :8] == POISON).all()
    assert (got[:, -8:] == POISON).all()


@pytest.mark.parametrize("dim", [72, 8200])
def test_rows_may_become_their_own_results(device: Device, stream: Stream, rng: np.random.Generator, dim: int) -> None:
    x, weight = as_bf16(rng.normal(size=(2, dim))), rng.normal(size=dim).astype(float32)
    with device.array(x) as rows, device.array(weight) as scale, device.zeros((2, dim), bfloat16) as out:
        rms_norm(stream, rows, scale, out)
        rms_norm(stream, rows, scale, rows)
        assert_equal_bits(rows.numpy(stream), out.numpy(stream))


def test_rows_of_zeros_nan_and_infinity_and_very_small_and_large_ones(
    device: Device, stream: Stream, rng: np.random.Generator
) -> None:
    x = as_bf16(rng.normal(size=(6, 72)))
    x[0], x[1, 5], x[2, 71], x[3], x[4] = 0, np.nan, np.inf, 1e-30, x[4] * bfloat16(1e17)
    x[5] = 2.0**-133  # subnormal
    weight = np.full(72, -1, float32)
    with device.array(x) as rows, device.array(weight) as scale, device.zeros((6, 72), bfloat16) as out:
        rms_norm(stream, rows, scale, out)
        assert_normed(out.numpy(stream), x, weight)
        rows[0].copy_from(as_bf16(np.full(72, 1e20)))
        rms_norm(stream, rows, scale, out)
        assert not out[0].numpy(stream).any()


@pytest.mark.parametrize("port", ["full", "programmatic"])
def test_one_graph_serves_every_step(
    device: Device, stream: Stream, graph: Graph, rng: np.random.Generator, port: str
) -> None:
    weight = rng.normal(size=264).astype(float32)
    with (
        device.zeros((3, 264), bfloat16) as rows,
        device.array(weight) as scale,
        device.zeros((3, 264), bfloat16) as once,
        device.zeros((3, 264), bfloat16) as twice,
    ):
        first = rms_norm(graph, rows, scale, once)
        assert first is not None
        rms_norm(graph, once, scale, twice, after=first.port(port))
        with graph.instantiate() as exe:
            ops.release()  # the nodes hold what they use
            for _ in range(3):
                x = as_bf16(rng.normal(size=(3, 264)))
                rows.copy_from(x)
                exe.launch(stream)
                assert_normed(once.numpy(stream), x, weight)
                assert_normed(twice.numpy(stream), once.numpy(stream), weight)
        del exe


def test_without_tokens_nothing_is_done(device: Device, stream: Stream, graph: Graph) -> None:
    with device.zeros((0, 72), bfloat16) as rows, device.zeros(72, float32) as scale:
        assert rms_norm(stream, rows, scale, rows) is None
        node = rms_norm(graph, rows, scale, rows)
        assert node is not None
        assert node.kind == "empty"
