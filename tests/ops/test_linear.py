"""Weights times tokens: the reference by hand, the checks of the ops, the kernel and cuBLAS against the reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from compare import assert_equal_bits
from cuda import pathfinder  # type: ignore[import-untyped]
from numpy.typing import NDArray
from standins import Foreign

from drvkit import ops
from drvkit.device import Device, Stream
from drvkit.graph import Graph
from drvkit.memory import Buffer
from drvkit.ops.linear import _Cublas, library_linear, linear
from drvkit.ref import linear as ref

bfloat16, float32 = ml_dtypes.bfloat16, np.float32
POISON = 77.0


def whole_numbers(rng: np.random.Generator, *shape: int) -> NDArray[Any]:
    """Of which float32 adds up all products exactly, in any order."""
    return rng.integers(-8, 9, shape).astype(bfloat16)


def exact(x: NDArray[Any], weight: NDArray[Any], dtype: Any) -> NDArray[Any]:
    with np.errstate(all="ignore"):
        rounded: NDArray[Any] = ref.linear(x, weight).astype(float32).astype(dtype)
        return rounded


def test_the_reference_by_hand() -> None:
    x, weight = np.array([[1, 2, 3], [0, -1, 4]], bfloat16), np.array([[1, 0, 2], [5, 6, 7]], bfloat16)
    assert ref.linear(x, weight).tolist() == [[7, 38], [8, 22]]


# ---- the ops' checks -------------------------------------------------------------------------------------------------


def fit(**changes: Any) -> dict[str, Any]:
    """Operands that fit, far from each other, save for ``changes``."""
    operands = {
        "x": Foreign((5, 72), np.uint16, 1 << 20),
        "weight": Foreign((24, 72), np.uint16, 2 << 20),
        "out": Foreign((5, 24), np.uint16, 3 << 20),
    }
    return operands | changes


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "float16": ({"x": Foreign((5, 72), np.float16)}, TypeError, "x: .*bfloat16, got float16"),
    "float32 weight": ({"weight": Foreign((24, 72), float32)}, TypeError, "weight: .*bfloat16, got float32"),
    "float16 out": ({"out": Foreign((5, 24), np.float16)}, TypeError, "out: .*bfloat16 or float32, got float16"),
    "host memory": ({"x": np.zeros((5, 72), bfloat16)}, TypeError, "x: .*in host memory"),
    "one token without an axis": ({"x": Foreign((72,), np.uint16)}, ValueError, r"x: wanted shape \(tokens, dim\)"),
    "odd stride": ({"x": Foreign((5, 72), np.uint16, 1 << 20, (152, 2))}, ValueError, "x: .*multiples of 16 bytes"),
    "odd address": ({"weight": Foreign((24, 72), np.uint16, 8)}, ValueError, "weight: .*aligned to 16 bytes, got 0x8"),
    "weights with gaps": (
        {"weight": Foreign((24, 72), np.uint16, 2 << 20, (160, 2))},
        ValueError,
        "weight: .*contiguous, got strides",
    ),
    "weight the other way": (
        {"weight": Foreign((72, 24), np.uint16, 2 << 20)},
        ValueError,
        r"weight: wanted shape \(outputs, 72\), got \(72, 24\)",
    ),
    "a vector of weights": ({"weight": Foreign((72,), np.uint16)}, ValueError, r"weight: .*, 72\), got \(72,\)"),
    "odd inputs": (
        {"x": Foreign((5, 76), np.uint16, 1 << 20, (160, 2)), "weight": Foreign((24, 76), np.uint16)},
        ValueError,
        "inputs: wanted a multiple of 8 from 8 to 1048576, got 76",
    ),
    "no inputs": (
        {"x": Foreign((5, 0), np.uint16), "weight": Foreign((24, 0), np.uint16)},
        ValueError,
        "inputs: wanted .*, got 0",
    ),
    "odd outputs": ({"weight": Foreign((28, 72), np.uint16)}, ValueError, "outputs: wanted a multiple of 8 .*, got 28"),
    "many tokens": (
        {"x": Foreign((65535 * 16 + 1, 72), np.uint16, 1 << 32)},
        ValueError,
        "x: wanted at most 1048560 tokens, got 1048561",
    ),
    "other tokens out": ({"out": Foreign((4, 24), np.uint16)}, ValueError, r"out: wanted shape \(5, 24\), got \(4, 24"),
    "other outputs": ({"out": Foreign((5, 32), np.uint16)}, ValueError, r"out: wanted shape \(5, 24\), got \(5, 32\)"),
    "tokens in each other": (
        {"out": Foreign((5, 24), float32, 3 << 20, (48, 4))},
        ValueError,
        r"out: tokens overlap: strides \(48, 4\) of shape \(5, 24\)",
    ),
    "out in x": ({"out": Foreign((5, 24), np.uint16, 1 << 20)}, ValueError, "out at 0x100000 .* overlaps x at"),
    "out in weight": ({"out": Foreign((5, 24), np.uint16, 2 << 20)}, ValueError, "out at .* overlaps weight at"),
}


@pytest.mark.parametrize(("changes", "error", "message"), WRONG.values(), ids=WRONG)
def test_operands_that_do_not_fit_are_refused(
    recorder: Any, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^linear: .*{message}"):
        linear(recorder, **fit(**changes))
    with pytest.raises(error, match=f"^library_linear: .*{message}"):
        library_linear(recorder, **fit(**changes), workspace=Foreign((16384,), np.uint8, 4 << 20))
    assert not recorder.calls


@pytest.mark.parametrize(
    ("tokens", "outputs", "inputs", "dtype", "instance", "grid", "block"),
    [
        (1, 32768, 1536, bfloat16, "__nv_bfloat16,16", (1, 1, 512), 256),
        (16, 7168, 16384, bfloat16, "__nv_bfloat16,16", (2, 1, 112), 256),
        (17, 7168, 16384, bfloat16, "__nv_bfloat16,32", (2, 1, 56), 512),
        (64, 1024, 7168, float32, "float,64", (8, 1, 8), 512),
        (65, 1024, 7168, float32, "float,64", (8, 2, 8), 512),
        (1, 512, 2048, float32, "float,16", (4, 1, 8), 256),
        (1, 64, 512, float32, "float,16", (1, 1, 1), 256),
    ],
)
def test_the_grid_goes_by_shapes_and_splits_by_weights_alone(
    recorder: Any, tokens: int, outputs: int, inputs: int, dtype: Any, instance: str, grid: tuple[int, ...], block: int
) -> None:
    operands = {
        "x": Foreign((tokens, inputs), np.uint16, 1 << 32),
        "weight": Foreign((outputs, inputs), np.uint16, 2 << 32),
        "out": Foreign((tokens, outputs), np.uint16 if dtype is bfloat16 else float32, 3 << 32),
    }
    node = linear(recorder, **operands, after="before", name="q")
    assert node == "kernel node"  # type: ignore[comparison-overlap]
    ((kernel, how),) = recorder.calls
    assert kernel == f"linear: linear<{instance}>"
    assert (how["grid"], how["block"], how["after"], how["name"]) == (grid, block, "before", "q")
    assert how.get("cluster", (1, 1, 1)) == (grid[0], 1, 1)


@pytest.mark.parametrize(
    ("attribute", "value", "kernel"),
    [
        ("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN", 101376, ("linear: linear<__nv_bfloat16,16>", (8, 4, 16))),
        ("COMPUTE_CAPABILITY_MAJOR", 8, ("linear: linear<__nv_bfloat16,64>", (1, 1, 8))),
    ],
)
def test_a_device_that_has_less_gets_smaller_blocks_or_no_clusters(
    recorder: Any, monkeypatch: pytest.MonkeyPatch, attribute: str, value: int, kernel: tuple[str, tuple[int, ...]]
) -> None:
    monkeypatch.setitem(recorder.device._attributes, attribute, value)
    x, weight = Foreign((50, 7168), np.uint16, 1 << 32), Foreign((1024, 7168), np.uint16, 2 << 32)
    linear(recorder, x, weight, Foreign((50, 1024), np.uint16, 3 << 32))
    ((name, how),) = recorder.calls
    assert (name, how["grid"]) == kernel
    assert ("cluster" in how) == (how["grid"][0] > 1)


def test_without_tokens_a_graph_gets_an_empty_node(recorder: Any) -> None:
    nothing = fit(x=Foreign((0, 72), np.uint16), out=Foreign((0, 24), np.uint16))
    assert linear(recorder, **nothing) == "empty node"  # type: ignore[comparison-overlap]


# ---- the kernel ------------------------------------------------------------------------------------------------------


class Operands:
    """In device memory; tokens are parts of wider rows, of which nobody may read the rest. All are closed with it."""

    def __init__(self, device: Device, x: NDArray[Any], weight: NDArray[Any], dtype: Any) -> None:
        (tokens, inputs), (outputs, _) = x.shape, weight.shape
        self.rows = device.empty((tokens, inputs + 24), bfloat16)
        self.x = self.rows[:, 8 : 8 + inputs]
        for t in range(tokens):
            self.x[t].copy_from(x[t])
        self.weight = device.array(weight)
        self.wide = device.array(np.full((tokens, outputs + 32), POISON, dtype))
        self.out = self.wide[:, 16 : 16 + outputs]

    def results(self, stream: Stream) -> NDArray[Any]:
        """What the op has made, where nothing else was written."""
        wide = self.wide.numpy(stream)
        assert (wide[:, :16] == POISON).all()
        assert (wide[:, -16:] == POISON).all()
        return wide[:, 16:-16]

    def __enter__(self) -> Operands:
        return self

    def __exit__(self, *_: object) -> None:
        for each in (self.rows, self.weight, self.wide):
            each.close()


def multiplied(device: Device, stream: Stream, x: NDArray[Any], weight: NDArray[Any], dtype: Any) -> NDArray[Any]:
    with Operands(device, x, weight, dtype) as given:
        linear(stream, given.x, given.weight, given.out)
        return given.results(stream)


@pytest.mark.parametrize(
    ("tokens", "outputs", "inputs", "dtype"),
    [
        (5, 72, 1112, float32),  # two blocks share the inputs
        (16, 8, 4096, float32),  # eight blocks
        (1, 64, 8, float32),
        (20, 136, 264, bfloat16),
        (70, 136, 648, float32),  # two tiles of 64
    ],
)
def test_results_are_those_of_the_reference(
    device: Device, stream: Stream, rng: np.random.Generator, tokens: int, outputs: int, inputs: int, dtype: Any
) -> None:
    x, weight = whole_numbers(rng, tokens, inputs), whole_numbers(rng, outputs, inputs)
    assert_equal_bits(multiplied(device, stream, x, weight, dtype), exact(x, weight, dtype))


def test_sums_are_in_float32(device: Device, stream: Stream, rng: np.random.Generator) -> None:
    x, weight = (rng.normal(size=shape).astype(bfloat16) for shape in ((9, 2000), (64, 2000)))
    got = multiplied(device, stream, x, weight, float32)
    sizes = ref.linear(np.abs(x), np.abs(weight))
    assert (np.abs(got - ref.linear(x, weight)) <= 2.0**-20 * sizes).all(), "some roundings of partial sums"


def test_bits_do_not_depend_on_other_tokens_nor_on_how_many(
    device: Device, stream: Stream, rng: np.random.Generator
) -> None:
    x, weight = (rng.normal(size=shape).astype(bfloat16) for shape in ((70, 2056), (40, 2056)))
    want = multiplied(device, stream, x, weight, float32)
    assert_equal_bits(multiplied(device, stream, x[69:], weight, float32), want[69:])
    assert_equal_bits(multiplied(device, stream, x[60:49:-1], weight, float32), want[60:49:-1])
    assert_equal_bits(multiplied(device, stream, x[20:50], weight, bfloat16), want[20:50].astype(bfloat16))
    x[10:60:7] = np.nan
    kept = ~np.isnan(x[:, 0].astype(float32))
    assert_equal_bits(multiplied(device, stream, x, weight, float32)[kept], want[kept])


def test_what_is_not_a_number_stays_where_it_is(device: Device, stream: Stream, rng: np.random.Generator) -> None:
    x, weight = whole_numbers(rng, 6, 200), whole_numbers(rng, 72, 200)
    x[1, 199], x[2, 7], x[3] = np.nan, np.inf, 1  # 199 is the last input, of a step that is not whole
    weight[5, 0], weight[9, 199], weight[71, 40] = np.inf, -np.inf, np.nan
    assert_equal_bits(multiplied(device, stream, x, weight, float32), exact(x, weight, float32), any_nan=True)


@pytest.mark.parametrize("port", ["full", "programmatic"])
def test_one_graph_serves_every_step(
    device: Device, stream: Stream, graph: Graph, rng: np.random.Generator, port: str
) -> None:
    tokens, widths = 20, (72, 1032, 64)
    weights = [whole_numbers(rng, *shape) for shape in ((1032, 72), (64, 1032))]
    with (
        device.zeros((tokens, widths[0]), bfloat16) as x,
        device.zeros((tokens, widths[1]), bfloat16) as inner,
        device.zeros((tokens, widths[2]), bfloat16) as out,
        device.array(weights[0]) as up,
        device.array(weights[1]) as down,
    ):
        # inner is exact in bfloat16 where only eight inputs are not 0, each -1, 0 or 1
        first = linear(graph, x, up, inner, name="up")
        assert first is not None
        assert first.name == "up"
        linear(graph, inner, down, out, after=first.port(port))
        with graph.instantiate() as exe:
            ops.release()  # the nodes hold what they use
            for _ in range(3):
                new = np.zeros((tokens, widths[0]), bfloat16)
                new[:, rng.permutation(72)[:8]] = rng.integers(-1, 2, (tokens, 8))
                x.copy_from(new)
                exe.launch(stream)
                want = exact(exact(new, weights[0], bfloat16), weights[1], bfloat16)
                assert_equal_bits(out.numpy(stream), want)
        del exe


# ---- cuBLAS ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def workspace(device: Device) -> Iterator[Buffer]:
    """Where cuBLAS can be used."""
    if device.driver.kind != "cuda":
        pytest.skip("cuBLAS is for GPUs")
    try:
        pathfinder.load_nvidia_dynamic_lib("cublas")
    except RuntimeError:
        pytest.skip("needs cuBLAS")
    with device.empty(32 << 20, np.uint8) as workspace:
        yield workspace


@pytest.mark.parametrize("dtype", [bfloat16, float32])
@pytest.mark.parametrize(("tokens", "outputs", "inputs"), [(100, 136, 264), (1, 8, 8), (300, 512, 7168)])
def test_cublas_has_the_same_results(
    device: Device,
    stream: Stream,
    rng: np.random.Generator,
    workspace: Buffer,
    tokens: int,
    outputs: int,
    inputs: int,
    dtype: Any,
) -> None:
    x, weight = whole_numbers(rng, tokens, inputs), whole_numbers(rng, outputs, inputs)
    with Operands(device, x, weight, dtype) as given:
        library_linear(stream, given.x, given.weight, given.out, workspace=workspace)
        assert_equal_bits(given.results(stream), exact(x, weight, dtype))


def test_cublas_is_a_child_of_a_graph(
    device: Device, stream: Stream, graph: Graph, rng: np.random.Generator, workspace: Buffer
) -> None:
    x, weight = whole_numbers(rng, 90, 2048), whole_numbers(rng, 64, 2048)
    with Operands(device, x, weight, float32) as given, device.zeros((90, 64), float32) as kept:
        made = library_linear(graph, given.x, given.weight, given.out, workspace=workspace, name="project")
        assert made is not None
        assert (made.name, made.kind) == ("project", "child")
        graph.memcpy(kept, given.out, after=made)
        with graph.instantiate() as exe:
            for _ in range(3):
                for t in range(len(x)):
                    x[t] = whole_numbers(rng, 2048)
                    given.x[t].copy_from(x[t])
                exe.launch(stream)
                assert_equal_bits(kept.numpy(stream), exact(x, weight, float32))
                assert_equal_bits(given.results(stream), exact(x, weight, float32))
        del exe


@pytest.mark.parametrize(
    ("workspace", "error", "message"),
    [
        (Foreign((16384,), np.float16, 4 << 20), TypeError, "wanted a device array of uint8, got float16"),
        (
            Foreign((16383,), np.uint8, 4 << 20),
            ValueError,
            "wanted 16384 bytes or more at a multiple of 256, got 16383",
        ),
        (Foreign((16384,), np.uint8, 128), ValueError, "multiple of 256, got 16384 at 0x80"),
        (Foreign((16384,), np.uint8, (1 << 20) - 16128), ValueError, "at 0xfc100 .* overlaps x at 0x100000"),
        (Foreign((16384,), np.uint8, 2 << 20), ValueError, "at 0x200000 .* overlaps weight at"),
        (Foreign((16384,), np.uint8, 3 << 20), ValueError, "at 0x300000 .* overlaps out at"),
    ],
)
def test_a_workspace_that_does_not_fit_is_refused(
    recorder: Any, workspace: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^library_linear: workspace.*{message}"):
        library_linear(recorder, **fit(), workspace=workspace)


def test_cublas_refuses_the_cpu_device_and_tokens_in_each_other(recorder: Any) -> None:
    workspace = Foreign((16384,), np.uint8, 4 << 20)
    with pytest.raises(ValueError, match=r"^library_linear: cpu:0 has no cuBLAS: wanted a GPU"):
        library_linear(recorder, **fit(), workspace=workspace)
    same = Foreign((5, 72), np.uint16, 1 << 20, (0, 2))
    with pytest.raises(ValueError, match=r"^library_linear: x: tokens overlap: strides \(0, 2\)"):
        library_linear(recorder, **fit(x=same), workspace=workspace)


def test_that_cublas_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> Any:
        raise pathfinder.DynamicLibNotFoundError(f"no {name}")

    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", find)
    with pytest.raises(ImportError, match=r"library_linear needs cuBLAS \(package nvidia-cublas\).*: no cublas"):
        _Cublas(Device("cpu"))
