"""Tokens times weights in blocks: the reference by hand, the checks of the op, and the kernel against the reference."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from compare import assert_close, assert_equal_bits
from kernels import replay
from numpy.typing import NDArray
from standins import Foreign

from drvkit import ops
from drvkit.device import Device, Stream
from drvkit.graph import Graph
from drvkit.ops.quantized_linear import quantized_linear, warps_of
from drvkit.quants import F16, F32, Q4_1, Q8_0, QUANTS, Quant
from drvkit.ref import quantized_linear as ref

bfloat16, float16, float32, uint8 = ml_dtypes.bfloat16, np.float16, np.float32, np.uint8
POISON = 77.0


def test_the_reference_by_hand() -> None:
    x, weight = np.array([[3, 4]], float32), np.array([[1, 0], [2, -1]], float32)
    assert ref.quantized_linear(x, weight).tolist() == [[3, 2]]
    assert ref.quantized_linear(x, weight, residual=np.array([[10, 20]], float32)).tolist() == [[13, 22]]
    normed = ref.quantized_linear(x, weight, norm=np.array([1, 10], float32), eps=0)
    assert normed.tolist() == [[3 / 12.5**0.5, (6 - 40) / 12.5**0.5]]
    ((gated,),) = ref.quantized_linear(x, weight, gated=True)
    assert gated == pytest.approx(3 / (1 + np.exp(-3)) * 2, rel=1e-15)


# ---- the op's checks -------------------------------------------------------------------------------------------------


def fit(**changes: Any) -> dict[str, Any]:
    """Operands that fit, far from each other, save for ``changes``."""
    operands = {
        "x": Foreign((5, 64), float32, 1 << 20),
        "weight": Foreign((32, 40), uint8, 2 << 20),
        "out": Foreign((5, 32), float32, 3 << 20),
        "quant": Q4_1,
    }
    return operands | changes


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no quant": ({"quant": 20}, TypeError, "quant: wanted a Quant, got int"),
    "float64": ({"x": Foreign((5, 64), np.float64)}, TypeError, "x: .*float32 or float16 or bfloat16, got float64"),
    "float32 weight": ({"weight": Foreign((32, 40), float32)}, TypeError, "weight: .*uint8, got float32"),
    "host memory": ({"x": np.zeros((5, 64), float32)}, TypeError, "x: .*in host memory"),
    "odd inputs": ({"x": Foreign((5, 48), float32)}, ValueError, "x: wanted a multiple of 32 inputs, .*got 48"),
    "no inputs": ({"x": Foreign((5, 0), float32)}, ValueError, "x: wanted a multiple of 32 inputs, .*got 0"),
    "many tokens": (
        {"x": Foreign((2**20, 64), float32)},
        ValueError,
        "x: wanted at most 1048560 tokens, got 1048576",
    ),
    "odd outputs": ({"out": Foreign((5, 24), float32, 3 << 20)}, ValueError, "out: wanted a multiple of 16 .*got 24"),
    "another quant's rows": ({"quant": Q8_0}, ValueError, r"weight: wanted shape \(32, 68\), got \(32, 40\)"),
    "a gate without rows": ({"gated": True}, ValueError, r"weight: wanted shape \(64, 40\), got \(32, 40\)"),
    "weights with gaps": (
        {"weight": Foreign((32, 40), uint8, 2 << 20, (48, 1))},
        ValueError,
        "weight: .*contiguous, got strides",
    ),
    "odd address": ({"weight": Foreign((32, 40), uint8, 8)}, ValueError, "weight: .*aligned to 16 bytes, got 0x8"),
    "odd stride": ({"x": Foreign((5, 64), float32, 1 << 20, (264, 4))}, ValueError, "x: .*multiples of 16 bytes"),
    "other tokens out": ({"out": Foreign((4, 32), float32)}, ValueError, r"out: wanted shape \(5, 32\), got \(4, 32"),
    "tokens in each other": (
        {"out": Foreign((5, 32), float32, 3 << 20, (48, 4))},
        ValueError,
        r"out: tokens overlap: strides \(48, 4\) of shape \(5, 32\)",
    ),
    "float16 norm": ({"norm": Foreign((64,), float16)}, TypeError, "norm: .*float32, got float16"),
    "other norm": ({"norm": Foreign((32,), float32)}, ValueError, r"norm: wanted shape \(64,\), got \(32,\)"),
    "eps": ({"eps": -1}, ValueError, "eps: wanted a number from 0 on, got -1"),
    "float16 residual": ({"residual": Foreign((5, 32), float16)}, TypeError, "residual: .*float32, got float16"),
    "other residual": ({"residual": Foreign((5, 24), float32)}, ValueError, r"residual: wanted shape \(5, 32\)"),
    "a gated residual": (
        {"residual": Foreign((5, 32), float32), "gated": True, "weight": Foreign((64, 40), uint8, 2 << 20)},
        ValueError,
        "residual: a gated product has none",
    ),
    "count": ({"count": Foreign((2,), np.int32)}, ValueError, r"count: wanted shape \(1,\), got \(2,\)"),
    "out in x": ({"out": Foreign((5, 32), float32, 1 << 20)}, ValueError, "out at 0x100000 .* overlaps x at"),
    "out in weight": ({"out": Foreign((5, 32), float32, 2 << 20)}, ValueError, "out at .* overlaps weight at"),
    "out beside residual": (
        {"residual": Foreign((5, 32), float32, (3 << 20) + 16)},
        ValueError,
        "out at .* overlaps residual at",
    ),
    "a narrower out where residual is": (
        {"residual": Foreign((5, 32), float32, 3 << 20), "out": Foreign((5, 32), float16, 3 << 20)},
        ValueError,
        "out at .* overlaps residual at",
    ),
}


@pytest.mark.parametrize(("changes", "error", "message"), WRONG.values(), ids=WRONG)
def test_operands_that_do_not_fit_are_refused(
    recorder: Any, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^quantized_linear: .*{message}"):
        quantized_linear(recorder, **fit(**changes))
    assert not recorder.calls


@pytest.mark.parametrize(
    ("tokens", "instance", "grid", "block"),
    [
        (1, "few<dk::Q4_1,__half,__nv_bfloat16,kProduct,1,3>", (36, 1), 128),
        (2, "few<dk::Q4_1,__half,__nv_bfloat16,kProduct,2,3>", (36, 1), 128),
        (3, "many<dk::Q4_1,__half,__nv_bfloat16,kProduct,1>", (18, 1), 288),
        (9, "many<dk::Q4_1,__half,__nv_bfloat16,kProduct,2>", (18, 1), 288),
        (32, "many<dk::Q4_1,__half,__nv_bfloat16,kProduct,4>", (18, 1), 288),
        (330, "many<dk::Q4_1,__half,__nv_bfloat16,kProduct,4>", (12, 11), 288),
    ],
)
def test_the_kernel_goes_by_the_number_of_tokens(
    recorder: Any, tokens: int, instance: str, grid: tuple[int, int], block: int
) -> None:
    operands = fit(
        x=Foreign((tokens, 576), float16, 1 << 20),
        weight=Foreign((288, 360), uint8, 2 << 20),
        out=Foreign((tokens, 288), np.uint16, 3 << 20),
    )
    node = quantized_linear(recorder, **operands, after="before", name="n")
    assert node == "kernel node"  # type: ignore[comparison-overlap]
    ((kernel, how),) = recorder.calls
    assert kernel == f"quantized_linear: quantized_linear_{instance}"
    assert (how["grid"], how["block"], how["after"], how["name"]) == (grid, block, "before", "n")


@pytest.mark.parametrize(("inputs", "warps"), [(32, 1), (576, 9), (1536, 12), (1600, 9), (4096, 11), (14336, 12)])
def test_warps_share_the_inputs_evenly(inputs: int, warps: int) -> None:
    assert warps_of(inputs) == warps


# ---- the kernel ------------------------------------------------------------------------------------------------------


def product(
    device: Device,
    stream: Stream,
    x: NDArray[Any],
    weight: NDArray[np.uint8],
    quant: Quant,
    dtype: Any = float32,
    *,
    norm: NDArray[Any] | None = None,
    residual: NDArray[Any] | None = None,
    **how: Any,
) -> NDArray[Any]:
    """What the kernel makes of it, all in wider rows, of which nobody may read or write the rest."""
    tokens, inputs = x.shape
    outputs = len(weight) // 2 if how.get("gated") else len(weight)
    with ExitStack() as stack:

        def on_device(values: NDArray[Any]) -> Any:
            return stack.enter_context(device.array(values))

        rows = stack.enter_context(device.empty((tokens, inputs + 24), x.dtype))
        for t in range(tokens):
            rows[t, 8 : 8 + inputs].copy_from(x[t])
        wide = on_device(np.full((tokens, outputs + 16), POISON, dtype))
        if norm is not None:
            how["norm"] = on_device(norm)
        if residual is not None:
            how["residual"] = on_device(residual)
        quantized_linear(stream, rows[:, 8 : 8 + inputs], on_device(weight), wide[:, 8:-8], quant=quant, **how)
        got = wide.numpy(stream)
    assert (got[:, :8] == POISON).all()
    assert (got[:, -8:] == POISON).all()
    made: NDArray[Any] = got[:, 8:-8]
    return made


def random(rng: np.random.Generator, quant: Quant, tokens: int, inputs: int, outputs: int) -> tuple[NDArray[Any], ...]:
    x = rng.normal(size=(tokens, inputs)).astype(float32)
    return x, quant.quantise((rng.normal(size=(outputs, inputs)) / inputs**0.5).astype(float32))


# Of sums of the size of 1.
SUMS: Any = {
    "rtol": 2.0**-15,
    "atol": 2.0**-15,
    "why": "each product is off by up to 2^-16 where factors are sums of two bfloat16; they cancel in part",
}


@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 11, 37])
@pytest.mark.parametrize("quant", QUANTS.values(), ids=QUANTS)
def test_products_are_those_of_the_reference(
    device: Device, stream: Stream, rng: np.random.Generator, quant: Quant, tokens: int
) -> None:
    x, weight = random(rng, quant, tokens, 576, 32)
    got = product(device, stream, x, weight, quant)
    assert_close(got, ref.quantized_linear(x, quant.dequantise(weight)).astype(float32), **SUMS)


@pytest.mark.parametrize("tokens", [2, 6])
@pytest.mark.parametrize("inputs", [32, 1536, 4096])
def test_any_number_of_inputs(
    device: Device, stream: Stream, rng: np.random.Generator, inputs: int, tokens: int
) -> None:
    x, weight = random(rng, Q4_1, tokens, inputs, 16)
    norm, residual = rng.normal(size=inputs).astype(float32), rng.normal(size=(tokens, 16)).astype(float32)
    got = product(device, stream, x, weight, Q4_1, norm=norm, residual=residual, eps=0.01)
    want = ref.quantized_linear(x, Q4_1.dequantise(weight), norm=norm, residual=residual, eps=0.01)
    assert_close(got, want.astype(float32), **SUMS)


@pytest.mark.parametrize("tokens", [1, 2, 6, 20])
def test_norm_gate_and_residual(device: Device, stream: Stream, rng: np.random.Generator, tokens: int) -> None:
    x, weight = random(rng, Q4_1, tokens, 576, 2 * 48)
    x *= np.exp2(rng.integers(-12, 12, (tokens, 1))).astype(float32)  # which the norm takes away
    norm, values = rng.normal(size=576).astype(float32), Q4_1.dequantise(weight)
    residual = rng.normal(size=(tokens, 96)).astype(float32)
    gated = product(device, stream, x, weight, Q4_1, norm=norm, gated=True)
    assert_close(gated, ref.quantized_linear(x, values, norm=norm, gated=True).astype(float32), **SUMS)
    added = product(device, stream, x, weight, Q4_1, norm=norm, residual=residual)
    assert_close(added, ref.quantized_linear(x, values, norm=norm, residual=residual).astype(float32), **SUMS)


@pytest.mark.parametrize(("of_x", "of_out"), [(float16, float32), (bfloat16, float16), (float32, bfloat16)])
def test_operands_of_sixteen_bits(
    device: Device, stream: Stream, rng: np.random.Generator, of_x: Any, of_out: Any
) -> None:
    x, weight = random(rng, Q8_0, 2, 96, 16)
    x = x.astype(of_x)
    got = product(device, stream, x, weight, Q8_0, of_out)
    want = ref.quantized_linear(x, Q8_0.dequantise(weight))
    half_a_unit = {float32: 0, float16: 2.0**-11, bfloat16: 2.0**-8}[of_out]
    assert_close(
        *(got.astype(np.float64), want), rtol=half_a_unit * 1.001, atol=2.0**-18, why="one rounding, of a float32 sum"
    )


@pytest.mark.parametrize("tokens", [[1, 2], [3, 9, 33]])
def test_bits_do_not_depend_on_other_tokens_nor_on_how_many(
    device: Device, stream: Stream, rng: np.random.Generator, tokens: list[int]
) -> None:
    x, weight = random(rng, Q4_1, tokens[-1], 1536, 16)
    norm = rng.normal(size=1536).astype(float32)
    want = product(device, stream, x, weight, Q4_1, norm=norm)
    for number in tokens[:-1]:
        for some in (slice(tokens[-1] - number, None), slice(number - 1, None, -1)):
            assert_equal_bits(product(device, stream, x[some], weight, Q4_1, norm=norm), want[some])
    x[1::5] = np.nan
    kept = ~np.isnan(x[:, 0])
    assert_equal_bits(product(device, stream, x, weight, Q4_1, norm=norm)[kept], want[kept])


@pytest.mark.parametrize("tokens", [2, 6])
def test_what_is_not_a_number_stays_where_it_is(
    device: Device, stream: Stream, rng: np.random.Generator, tokens: int
) -> None:
    x, weight = rng.normal(size=(tokens, 96)).astype(float32), rng.normal(size=(16, 96)).astype(float32)
    x[1, 95], x[0, 7], weight[5, 0], weight[15, 64] = np.nan, np.inf, np.inf, np.nan
    got = product(device, stream, x, F32.quantise(weight), F32)
    want = ref.quantized_linear(x, weight)
    if tokens > 2:
        want[np.isinf(want)] = np.nan
    assert_close(got, want.astype(float32), rtol=1e-4, atol=1e-3, why="sums of 96 of the size of 10")


@pytest.mark.parametrize(("tokens", "outputs"), [(1, 8 * 4), (6, 16)])  # of as many blocks as a multiprocessor has
def test_more_rows_than_blocks_can_have_at_once(
    device: Device, stream: Stream, rng: np.random.Generator, tokens: int, outputs: int
) -> None:
    outputs *= 2 * device.multiprocessors
    outputs += 48
    x, weight = random(rng, F16, tokens, 32, outputs)
    norm = rng.normal(size=32).astype(float32)
    got = product(device, stream, x, weight, F16, norm=norm)
    assert_close(got, ref.quantized_linear(x, F16.dequantise(weight), norm=norm).astype(float32), **SUMS)


@pytest.mark.parametrize(("tokens", "counts"), [(40, (33, 16, 5, 0)), (2, (2, 1, 0))])
def test_tokens_from_the_count_on_are_not_touched(
    device: Device, stream: Stream, graph: Graph, rng: np.random.Generator, tokens: int, counts: tuple[int, ...]
) -> None:
    x, weight = random(rng, Q4_1, tokens, 64, 16)
    want = ref.quantized_linear(x, Q4_1.dequantise(weight)).astype(float32)
    with (
        device.array(weight) as matrix,
        device.zeros(1, np.int32) as count,
        device.empty((tokens, 16), float32) as out,
        device.empty(x.shape, float32) as rows,  # of which the rest was never written: nobody may read it
    ):
        for number in sorted(counts):
            rows[:number].copy_from(x[:number])
            if not graph.nodes:
                quantized_linear(graph, rows, matrix, out, quant=Q4_1, count=count)
            count.copy_from(np.array([number], np.int32))
            out.fill(POISON)
            replay(graph, stream)
            got = out.numpy(stream)
            assert_close(got[:number], want[:number], **SUMS)
            assert (got[number:] == POISON).all()


def test_a_step_may_be_added_where_it_came_from(device: Device, stream: Stream, rng: np.random.Generator) -> None:
    x, weight = random(rng, Q4_1, 18, 96, 32)
    h = rng.normal(size=(18, 32)).astype(float32)
    with device.array(x) as rows, device.array(weight) as matrix, device.array(h) as sums:
        quantized_linear(stream, rows, matrix, sums, quant=Q4_1, residual=sums)
        got = sums.numpy(stream)
    assert_close(got, ref.quantized_linear(x, Q4_1.dequantise(weight), residual=h).astype(float32), **SUMS)


@pytest.mark.parametrize("port", ["full", "programmatic"])
def test_one_graph_serves_every_step(
    device: Device, stream: Stream, graph: Graph, rng: np.random.Generator, port: str
) -> None:
    (x, up), (_, down) = random(rng, Q4_1, 3, 64, 192), random(rng, Q8_0, 3, 96, 64)
    norm = rng.normal(size=64).astype(float32)
    with (
        device.zeros((3, 64), float32) as h,
        device.array(norm) as scale,
        device.array(up) as first,
        device.array(down) as second,
        device.zeros((3, 96), float32) as inner,
    ):
        node = quantized_linear(graph, h, first, inner, quant=Q4_1, norm=scale, gated=True, name="up")
        assert node is not None
        assert node.name == "up"
        quantized_linear(graph, inner, second, h, quant=Q8_0, residual=h, after=node.port(port))
        with graph.instantiate() as exe:
            ops.release()  # the nodes hold what they use
            for _ in range(3):
                x = rng.normal(size=(3, 64)).astype(float32)
                h.copy_from(x)
                exe.launch(stream)
                middle = ref.quantized_linear(x, Q4_1.dequantise(up), norm=norm, gated=True)
                want = ref.quantized_linear(middle, Q8_0.dequantise(down), residual=x)
                assert_close(h.numpy(stream), want.astype(float32), **SUMS)
        del exe


def test_without_tokens_nothing_is_done(device: Device, stream: Stream, graph: Graph) -> None:
    with (
        device.zeros((0, 64), float32) as x,
        device.zeros((32, 40), uint8) as weight,
        device.zeros((0, 32), float32) as out,
    ):
        assert quantized_linear(stream, x, weight, out, quant=Q4_1) is None
        node = quantized_linear(graph, x, weight, out, quant=Q4_1)
        assert node is not None
        assert node.kind == "empty"


@pytest.mark.drvkit_check
def test_no_two_warps_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that has a tile after the other."""
    device, rng = Device("cpu"), np.random.default_rng(1)
    monkeypatch.setattr(Device, "multiprocessors", 1)
    x, weight = random(rng, Q4_1, 20, 576, 16 * 3 * 2)
    with device.stream() as stream:
        product(device, stream, x, weight, Q4_1, norm=np.ones(576, float32), gated=True)
