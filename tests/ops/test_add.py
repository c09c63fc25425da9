"""Sums: the references against exact arithmetic, the checks of the op, and the kernels against the references."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from compare import assert_equal_bits

from drvkit import ops
from drvkit.device import Device, Stream
from drvkit.ops.add import add, add_scalar
from drvkit.ref import add as ref

if TYPE_CHECKING:
    from conftest import Arrays, Values

each_float = pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
each_size = pytest.mark.parametrize("n", [0, 1, 255, 256, 257, 1_000_003])
each_offset = pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "misaligned"])

POISON = -777
GUARD = 16  # elements around what an op may write


# ---- the references ------------------------------------------------------------------------------------------------


def brute(a: Any, b: Any, dtype: Any) -> Any:
    """The exact sum, rounded to float32, then to the dtype."""
    # Python's float rounds it to 53 bits first. With more than twice float32's 24 that does not change what follows.
    return dtype(np.float32(float(a) + float(b)))


@each_float
def test_the_reference_is_the_exact_sum_rounded_twice(values: Values, rng: np.random.Generator, dtype: Any) -> None:
    a, b, c = values(500, dtype), values(500, dtype), float(np.float32(rng.normal()))
    with np.errstate(all="ignore"):
        sums = np.array([brute(*pair, dtype) for pair in zip(a, b, strict=True)], dtype)
        shifted = np.array([brute(value, c, dtype) for value in a], dtype)
    assert_equal_bits(ref.add(a, b), sums, any_nan=True)
    assert_equal_bits(ref.add_scalar(a, c), shifted, any_nan=True)


def test_the_float32_step_counts() -> None:
    # 1 + c is a little above 1 + 2**-11, the tie between two float16. In float32 it is the tie, which goes to even.
    c = 2**-11 + 2**-30
    assert np.float16(1 + c) == 1 + 2**-10
    assert ref.add_scalar(np.ones(1, np.float16), c)[0] == 1


# ---- the op's checks, without a device -----------------------------------------------------------------------------


class Foreign:
    """Four floats of another library, that nobody touches."""

    def __init__(self, address: int, shape: tuple[int, ...] = (4,)) -> None:
        self.__cuda_array_interface__ = {"version": 3, "data": (address, False), "typestr": "<f4", "shape": shape}


class Recorder:
    """Stands for a graph: its nodes are what it was told."""

    device = None

    def kernel(self, kernel: Any, **how: Any) -> Any:
        return kernel, how


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(ops, "kernel", lambda device, source, name: f"{source}: {name}")
    return Recorder()


def test_a_node_has_the_operands_in_the_kernels_order(graph: Any) -> None:
    a, b, y = Foreign(0x1000), Foreign(0x2000), Foreign(0x3000)
    how = {"grid": 1, "block": 256, "after": None, "name": "sum"}
    node: Any = add(graph, a, b, y, name="sum")
    assert node == ("add: add<float,1>", how | {"args": (a, b, y, 4)})
    node = add_scalar(graph, a, y, 1.5, name="sum")
    assert node == ("add: add_scalar<float,1>", how | {"args": (a, y, 4, 1.5)})


def test_large_arrays_take_wide_accesses(graph: Any) -> None:
    shape = (ops.WIDE_FROM,)
    a, b, y, odd = (Foreign(address << 40, shape) for address in (1, 2, 3, 4))
    node: Any = add(graph, a, b, y)
    assert (node[0], node[1]["grid"]) == ("add: add<float,4>", ops.WIDE_FROM // 1024)
    odd.__cuda_array_interface__["data"] = (4 << 40 | 4, False)
    node = add(graph, a, odd, y)
    assert (node[0], node[1]["grid"]) == ("add: add<float,1>", ops.WIDE_FROM // 256)


def test_operands_that_do_not_fit_are_refused_by_name(graph: Any) -> None:
    a, y = Foreign(0x1000), Foreign(0x3000)
    with pytest.raises(ValueError, match=r"add: b has shape \(5,\), a has shape \(4,\)"):
        add(graph, a, Foreign(0x2000, (5,)), y)
    with pytest.raises(ValueError, match=r"add: y at 0x3000 .* overlaps b at 0x3004"):
        add(graph, a, Foreign(0x3004), y)
    with pytest.raises(TypeError, match="add_scalar: x: wanted a device array"):
        add_scalar(graph, None, y, 1.0)
    assert add(graph, a, Foreign(0x1004), y)  # what is only read may overlap
    assert add(graph, y, y, y)


# ---- the kernels ---------------------------------------------------------------------------------------------------


@each_offset
@each_size
@each_float
def test_add(arrays: Arrays, stream: Stream, values: Values, dtype: Any, n: int, offset: int) -> None:
    part = slice(offset, offset + n)
    a, b = values(n + GUARD, dtype), values(n + GUARD, dtype)
    y = arrays.full(n + GUARD, dtype, POISON)
    assert add(stream, arrays.to_device(a)[part], arrays.to_device(b)[part], y[part]) is None
    stream.synchronize()
    want = np.full(n + GUARD, POISON, dtype)
    want[part] = ref.add(a[part], b[part])
    assert_equal_bits(arrays.numpy(y), want, any_nan=True)


@each_offset
@each_size
@each_float
def test_add_scalar(
    arrays: Arrays, stream: Stream, values: Values, rng: np.random.Generator, dtype: Any, n: int, offset: int
) -> None:
    part = slice(offset, offset + n)
    x, c = values(n + GUARD, dtype), float(rng.normal())
    y = arrays.full(n + GUARD, dtype, POISON)
    assert add_scalar(stream, arrays.to_device(x)[part], y[part], c) is None
    stream.synchronize()
    want = np.full(n + GUARD, POISON, dtype)
    want[part] = ref.add_scalar(x[part], c)
    assert_equal_bits(arrays.numpy(y), want, any_nan=True)


@each_float
def test_in_place(arrays: Arrays, stream: Stream, values: Values, dtype: Any) -> None:
    host_a, host_b = values(257, dtype), values(257, dtype)
    a, b = arrays.to_device(host_a), arrays.to_device(host_b)
    add(stream, a, b, b)
    add(stream, a, a, a)
    add_scalar(stream, a, a, 1.0)
    stream.synchronize()
    assert_equal_bits(arrays.numpy(b), ref.add(host_a, host_b), any_nan=True)
    assert_equal_bits(arrays.numpy(a), ref.add_scalar(ref.add(host_a, host_a), 1.0), any_nan=True)


def test_a_graph_takes_the_same_calls(device: Device, stream: Stream, values: Values) -> None:
    from drvkit.graph import Graph

    a, b = values(1000, np.float32), values(1000, np.float32)
    with (
        device.array(a) as first,
        device.array(b) as second,
        device.zeros(1000, np.float32) as result,
        Graph(device) as graph,
    ):
        total = add(graph, first, second, result, name="sum")
        add_scalar(graph, result, result, 1.0, after=total, name="plus")
        with graph.instantiate() as exe:
            exe.launch(stream)
            assert_equal_bits(result.numpy(stream), ref.add_scalar(ref.add(a, b), 1.0), any_nan=True)
