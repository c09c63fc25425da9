"""Scaling: the references against exact arithmetic, the checks of the op, and the kernels against the references."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from compare import assert_equal_bits
from numpy.typing import NDArray
from standins import Foreign, Recorder

from drvkit import ops
from drvkit.build import build
from drvkit.device import Device, Stream
from drvkit.lifetime import live
from drvkit.ops import WIDE_FROM
from drvkit.ops.scale import scale, scale_dynamic, scale_padded
from drvkit.ref import scale as ref
from drvkit.source import Source

if TYPE_CHECKING:
    from conftest import Arrays, Values

bfloat16 = ml_dtypes.bfloat16

each_float = pytest.mark.parametrize("dtype", [np.float32, np.float16, bfloat16])
each_dtype = pytest.mark.parametrize("dtype", [np.float32, np.float16, bfloat16, np.int32])
each_size = pytest.mark.parametrize("n", [0, 1, 255, 256, 257, 1_000_003])
each_offset = pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "misaligned"])

POISON = -777
GUARD = 16  # elements around what an op may write


# ---- the references ------------------------------------------------------------------------------------------------


@each_float
def test_the_reference_is_the_exact_product_rounded_twice(values: Values, rng: np.random.Generator, dtype: Any) -> None:
    x, alpha = values(500, dtype), np.float32(rng.normal())
    got = ref.scale(x, float(alpha))
    with np.errstate(all="ignore"):
        # Two float32 have 48 bits together: the product of Python's floats is exact.
        want = np.array([dtype(np.float32(float(value) * float(alpha))) for value in x], dtype)
    assert_equal_bits(got, want, any_nan=True)
    assert_equal_bits(ref.scale_dynamic(x, np.array([alpha])), want, any_nan=True)


def test_the_float32_step_counts() -> None:
    # 7 * alpha is a little above 1 + 2**-11, the tie between two float16. In float32 it is the tie, which goes to even.
    alpha = float(np.float32((1 + 2**-11) / 7))
    assert 7 * alpha > 1 + 2**-11
    assert np.float16(7 * alpha) == 1 + 2**-10
    assert ref.scale(np.array([7], np.float16), alpha)[0] == 1


@each_dtype
def test_the_padded_reference_leaves_the_output_of_zeros(values: Values, dtype: Any) -> None:
    x, y = values(500, dtype), values(500, dtype)
    got = ref.scale_padded(x, y, 3)
    want = y.copy()
    for i, value in enumerate(x.tolist()):
        if value != 0 and dtype is np.int32:
            want[i] = (value * 3 + 2**31) % 2**32 - 2**31
        elif value != 0:
            with np.errstate(all="ignore"):
                want[i] = dtype(np.float32(value * 3.0))
    assert_equal_bits(got, want, any_nan=True)


# ---- the op's checks, without a device ------------------------------------------------------------------------------


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(ops, "kernel", lambda device, source, name: f"{source}: {name}")
    return Recorder()


FAR = 1 << 40


@pytest.mark.parametrize(
    ("n", "dtype", "address", "kernel", "grid"),
    [
        (1024, np.float32, FAR, "scale<float,1>", 4),
        (1025, np.float16, FAR, "scale<__half,1>", 5),
        (WIDE_FROM, np.float32, FAR, "scale<float,4>", WIDE_FROM // 1024),
        (WIDE_FROM + 1, np.uint16, FAR, "scale<__nv_bfloat16,8>", WIDE_FROM // 2048 + 1),
        (WIDE_FROM, np.float16, FAR + 2, "scale<__half,1>", WIDE_FROM // 256),
        (2**31 - 1, np.float16, FAR, "scale<__half,8>", 2**20),
    ],
)
def test_the_kernel_goes_by_size_and_alignment(
    graph: Any, n: int, dtype: Any, address: int, kernel: str, grid: int
) -> None:
    x, y = Foreign((n,), dtype, address), Foreign((n,), dtype, 2 * FAR)
    node: Any = scale(graph, x, y, 2.0, after="before", name="double")
    assert node == "kernel node"
    how = {"grid": grid, "block": 256, "args": (x, y, n, 2.0), "after": "before", "name": "double"}
    assert graph.calls == [(f"scale: {kernel}", how)]


def test_nothing_to_do_is_an_empty_node(graph: Any) -> None:
    nothing = Foreign((3, 0), np.float32, 0)
    node: Any = scale(graph, nothing, nothing, 2.0, after="before", name="double")
    assert node == "empty node"
    assert graph.calls == [("empty", {"after": "before", "name": "double"})]


X = Foreign((4, 6), np.float32)
WRONG: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "no array": (X, 3.0, TypeError, "scale: y: wanted a device array of float32 or .*, got float"),
    "host memory": (np.zeros(24, np.float32), X, TypeError, r"scale: x: .*ndarray \(in host memory\)"),
    "no such dtype": (X, Foreign((4, 6), np.float64, FAR), TypeError, "scale: y: .*got float64"),
    "int32": (Foreign((4, 6), np.int32), X, TypeError, "scale: x: .*got int32"),
    "two dtypes": (X, Foreign((4, 6), np.float16, FAR), TypeError, "scale: y is float16, x is float32"),
    "two shapes": (X, Foreign((24,), np.float32, FAR), ValueError, r"scale: y has shape \(24,\), x has shape \(4, 6\)"),
    "strided": (X, Foreign((4, 6), np.float32, FAR, (48, 8)), ValueError, r"scale: y: .*contiguous, got strides \(48,"),
    "too long": (
        Foreign((2**31,), np.uint16),
        Foreign((2**31,), np.uint16, FAR),
        ValueError,
        "scale: x has 2147483648",
    ),
    "one element on": (X, Foreign((4, 6), np.float32, 0x10004), ValueError, r"scale: y at 0x10004 .* overlaps x at"),
    "the last element": (X, Foreign((4, 6), np.float32, 0x10000 - 92), ValueError, "overlaps x"),
}


@pytest.mark.parametrize(("x", "y", "error", "message"), WRONG.values(), ids=WRONG)
def test_operands_that_do_not_fit_are_refused(graph: Any, x: Any, y: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        scale(graph, x, y, 2.0)
    assert not graph.calls


def test_arrays_side_by_side_do_not_overlap(graph: Any) -> None:
    assert scale(graph, X, Foreign((4, 6), np.float32, 0x10000 + 96), 2.0)
    assert scale(graph, X, Foreign((4, 6), np.float32, 0x10000 - 96), 2.0)


def test_a_factor_in_memory_is_one_float32_outside_of_the_output(graph: Any) -> None:
    y = Foreign((4, 6), np.float32, FAR)
    with pytest.raises(TypeError, match="scale_dynamic: alpha: wanted a device array of float32, got float16"):
        scale_dynamic(graph, X, y, Foreign((1,), np.float16, 64))
    with pytest.raises(ValueError, match=r"scale_dynamic: alpha: wanted one element, got shape \(2,\)"):
        scale_dynamic(graph, X, y, Foreign((2,), np.float32, 64))
    with pytest.raises(ValueError, match=r"scale_dynamic: y at .* overlaps alpha"):
        scale_dynamic(graph, X, y, Foreign((), np.float32, FAR + 8))
    assert scale_dynamic(graph, X, y, Foreign((), np.float32, 64))


@pytest.mark.parametrize("where", [None, "cuda", Foreign((1,), np.float32)])
def test_a_place_that_is_no_stream_and_no_graph_is_refused(where: Any) -> None:
    with pytest.raises(TypeError, match=r"scale: wanted a drvkit Stream or Graph, got .*dev\.as_stream\(stream\)"):
        scale(where, X, X, 2.0)


@pytest.mark.parametrize("name", ["scale<float,4>", "scale<__half,8>", "scale_dynamic<__nv_bfloat16,8>"])
def test_wide_kernels_access_16_bytes_at_once(name: str) -> None:
    image = build(Source.find("scale"), [name], arch="compute_90a", kind="ptx")
    assert re.search(rb"\bld(\.global)?\.v4\.[ubf]32", image.data)
    assert re.search(rb"\bst(\.global)?\.v4\.[ubf]32", image.data)


# ---- the kernels ---------------------------------------------------------------------------------------------------


def guarded(dtype: Any, part: slice, result: NDArray[Any]) -> NDArray[Any]:
    """The wanted output in the middle of poison that must stay."""
    want = np.full(len(result) + GUARD, POISON, dtype)
    want[part] = result
    return want


@each_offset
@each_size
@each_float
def test_scale(
    arrays: Arrays, stream: Stream, values: Values, rng: np.random.Generator, dtype: Any, n: int, offset: int
) -> None:
    part = slice(offset, offset + n)
    x, alpha = values(n + GUARD, dtype), float(rng.normal())
    y = arrays.full(n + GUARD, dtype, POISON)
    assert scale(stream, arrays.to_device(x)[part], y[part], alpha) is None
    stream.synchronize()
    assert_equal_bits(arrays.numpy(y), guarded(dtype, part, ref.scale(x[part], alpha)), any_nan=True)


@each_offset
@each_size
@each_float
def test_scale_dynamic(
    arrays: Arrays, stream: Stream, values: Values, rng: np.random.Generator, dtype: Any, n: int, offset: int
) -> None:
    part = slice(offset, offset + n)
    x, alpha = values(n + GUARD, dtype), rng.normal(size=1).astype(np.float32)
    y = arrays.full(n + GUARD, dtype, POISON)
    assert scale_dynamic(stream, arrays.to_device(x)[part], y[part], arrays.to_device(alpha)) is None
    stream.synchronize()
    assert_equal_bits(arrays.numpy(y), guarded(dtype, part, ref.scale_dynamic(x[part], alpha)), any_nan=True)


@each_offset
@each_size
@each_dtype
def test_scale_padded(
    arrays: Arrays, stream: Stream, values: Values, rng: np.random.Generator, dtype: Any, n: int, offset: int
) -> None:
    part = slice(offset, offset + n)
    x, alpha = values(n + GUARD, dtype), int(rng.integers(-100, 100))
    y = arrays.full(n + GUARD, dtype, POISON)
    assert scale_padded(stream, arrays.to_device(x)[part], y[part], alpha) is None
    stream.synchronize()
    want = ref.scale_padded(x[part], np.full(n, POISON, dtype), alpha)
    assert_equal_bits(arrays.numpy(y), guarded(dtype, part, want), any_nan=True)


@pytest.mark.parametrize("n", [257, 1_000_003])
@each_float
def test_in_place(arrays: Arrays, stream: Stream, values: Values, dtype: Any, n: int) -> None:
    x = values(n, dtype)
    y = arrays.to_device(x)
    scale(stream, y, y, 3.0)
    stream.synchronize()
    assert_equal_bits(arrays.numpy(y), ref.scale(x, 3.0), any_nan=True)


@each_float
def test_a_wide_kernel_is_right_for_pointers_that_are_not_aligned(
    device: Device, arrays: Arrays, stream: Stream, values: Values, dtype: Any
) -> None:
    n, width = 1001, 16 // np.dtype(dtype).itemsize
    x = values(n + GUARD, dtype)
    kernel = ops.kernel(device, "scale", f"scale<{ops.FLOATS[np.dtype(dtype)]},{width}>")
    for part in (slice(1, 1 + n), slice(width, width + n)):
        y = arrays.full(n + GUARD, dtype, POISON)
        args = (arrays.to_device(x)[part], y[part], n, 3.0)
        kernel.launch(stream, grid=-(-n // (256 * width)), block=256, args=args)
        stream.synchronize()
        assert_equal_bits(arrays.numpy(y), guarded(dtype, part, ref.scale(x[part], 3.0)), any_nan=True)


def test_arrays_of_any_shape(device: Device, stream: Stream) -> None:
    with device.array(np.arange(24, dtype=np.float32).reshape(2, 3, 4)) as x, device.empty((2, 3, 4), np.float32) as y:
        scale(stream, x, y, 0.5)
        assert_equal_bits(y.numpy(stream), np.arange(24, dtype=np.float32).reshape(2, 3, 4) / 2)


def test_a_graph_takes_the_same_calls(device: Device, stream: Stream, values: Values) -> None:
    from drvkit.graph import Graph

    x = values(1000, np.float32)
    with (
        device.array(x) as source,
        device.array(np.zeros(1000, np.float32)) as result,
        device.array(np.full(1, 3, np.float32)) as factor,
        Graph(device) as graph,
    ):
        double = scale(graph, source, result, 2.0, name="double")
        scale_dynamic(graph, result, result, factor, after=double, name="again")
        scale(graph, source[:0], result[:0], 2.0, name="nothing")
        with graph.instantiate() as exe:
            ops.release()  # the nodes hold what they use
            exe.launch(stream)
            assert_equal_bits(result.numpy(stream), ref.scale(ref.scale(x, 2.0), 3.0), any_nan=True)
            factor.fill(0.5)
            exe.launch(stream)
            assert_equal_bits(result.numpy(stream), ref.scale(ref.scale(x, 2.0), 0.5), any_nan=True)


def test_a_launch_is_not_named_or_ordered(device: Device, stream: Stream) -> None:
    with device.zeros(4, np.float32) as x:
        with pytest.raises(TypeError, match="after= and name= are for nodes"):
            scale(stream, x, x, 2.0, name="double")
        stream.close()
        with pytest.raises(RuntimeError, match="closed"):
            scale(stream, x[:0], x[:0], 2.0)


def test_a_uint16_buffer_is_not_taken_for_bfloat16(device: Device, stream: Stream) -> None:
    with device.zeros(4, np.uint16) as x, pytest.raises(TypeError, match="got uint16"):
        scale(stream, x, x, 2.0)


def test_release_lets_go_of_modules(device: Device, stream: Stream) -> None:
    def modules() -> int:
        return sum(entry.kind == "module" for entry in live())

    before = modules()
    with device.zeros(4, np.float32) as x:
        for _ in range(3):
            scale(stream, x, x, 2.0)
        assert modules() == before + 1
        ops.release(device)
        stream.synchronize()
        assert modules() == before
        scale(stream, x, x, 2.0)
        assert modules() == before + 1
