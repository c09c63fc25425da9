"""Memory on a device: what is written is read back, through every window, in every direction and by every library."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import drvkit as dk
from drvkit import dlpack
from drvkit.scalars import Unfit, bits

if TYPE_CHECKING:
    from conftest import Arrays

RECORD = np.dtype([("a", "i4"), ("b", "f8"), ("c", "i2", (3,))], align=True)
PLAIN = ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16"]
SMALL = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn", "int4"]
GUARD = 0x5A


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name) if name in SMALL else name)


def some(rng: np.random.Generator, shape: Any, dtype: Any) -> NDArray[Any]:
    """Any bytes that are values of the dtype."""
    dtype = np.dtype(dtype)
    raw = rng.integers(0, 2 if dtype.kind == "b" else 256, (*np.atleast_1d(shape), dtype.itemsize), np.uint8)
    values: NDArray[Any] = raw.view(dtype)[..., 0]
    return values


def same(got: NDArray[Any], want: NDArray[Any]) -> None:
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    assert got.tobytes() == want.tobytes()


# ---- round trips ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*PLAIN, *SMALL, "S5", "V3"])
@pytest.mark.parametrize("shape", [7, (3, 5), (2, 3, 4), ()], ids=str)
def test_arrays_of_every_dtype(device: dk.Device, rng: np.random.Generator, name: str, shape: Any) -> None:
    host = some(rng, shape, dtype_of(name)).reshape(shape)
    buffer = device.array(host)
    assert (buffer.dtype, buffer.shape, buffer.nbytes, buffer.where) == (host.dtype, host.shape, host.nbytes, "device")
    assert buffer.contiguous
    same(buffer.numpy(), host)


def test_a_structured_array(device: dk.Device) -> None:
    host = np.zeros(5, RECORD)
    host["a"], host["b"], host["c"] = np.arange(5), np.linspace(0, 1, 5), np.arange(15).reshape(5, 3)
    got = device.array(host).numpy()
    assert got.dtype == RECORD
    for field in "abc":
        np.testing.assert_array_equal(got[field], host[field])


def test_what_becomes_an_array(device: dk.Device) -> None:
    same(device.array([1, 2, 3], np.int16).numpy(), np.array([1, 2, 3], np.int16))
    same(device.array(2.5).numpy(), np.array(2.5))
    same(device.array(np.arange(12).reshape(3, 4).T).numpy(), np.ascontiguousarray(np.arange(12).reshape(3, 4).T))
    same(device.array(np.arange(10)[::-2]).numpy(), np.array([9, 7, 5, 3, 1]))
    same(device.zeros((2, 3), np.float32).numpy(), np.zeros((2, 3), np.float32))


@pytest.mark.parametrize("shape", [0, (0, 3), (3, 0), (2, 0, 4)], ids=str)
def test_an_empty_array(device: dk.Device, stream: dk.Stream, shape: Any) -> None:
    host = np.zeros(shape, np.float32)
    buffer = device.array(host)
    assert (buffer.shape, buffer.nbytes, buffer.size) == (host.shape, 0, 0)
    assert buffer.address
    same(buffer.numpy(), host)
    same(device.zeros(shape, np.float32).numpy(stream), host)
    buffer.copy_from(host).copy_to(host, stream)
    buffer.fill_bytes(1)
    assert len(buffer.reshape(-1) if 0 in buffer.shape and buffer.ndim == 1 else buffer.reshape(0)) == 0


def test_a_large_array(device: dk.Device, rng: np.random.Generator) -> None:
    host = rng.integers(0, 2**63, 2**22, np.int64)
    same(device.array(host).numpy(), host)


# ---- windows -------------------------------------------------------------------------------------------------------

WINDOWS: list[Any] = [
    np.s_[2],
    np.s_[-1],
    np.s_[1:3],
    np.s_[::2],
    np.s_[:, 3],
    np.s_[1:4, 2:5],
    np.s_[..., 1],
    np.s_[3, ..., 2],
    np.s_[None, 1:3],
    np.s_[:, None, 2:4],
    np.s_[4:1],
    np.s_[np.int64(2), 1:],
    np.s_[2, 3, 1],
    np.s_[:, ::3, ::2],
    np.s_[1:, 2:, :1],
    np.s_[:, :, ::-1],
    np.s_[::-1],
    np.s_[5:1:-2, 1],
    (),
]


@pytest.mark.parametrize("index", WINDOWS, ids=str)
def test_a_window_is_where_numpy_has_it(device: dk.Device, index: Any) -> None:
    host = np.arange(6 * 8 * 4, dtype=np.int32).reshape(6, 8, 4)
    buffer = device.array(host)
    window, want = buffer[index], host[index]
    assert window.shape == np.shape(want)
    if want.size and isinstance(want, np.ndarray):
        assert window.strides == want.strides
        assert window.address - buffer.address == want.ctypes.data - host.ctypes.data
    positive = all(stride >= 0 for stride in window.strides)
    if positive and sum(extent > 1 for extent in window.shape) < 3:
        same(window.numpy(), np.ascontiguousarray(want).reshape(np.shape(want)))


def test_windows_of_windows(device: dk.Device) -> None:
    host = np.arange(60, dtype=np.int32).reshape(6, 10)
    window = device.array(host)[1:5][:, 2:8][1:, ::2]
    same(window.numpy(), np.ascontiguousarray(host[1:5][:, 2:8][1:, ::2]))
    assert not window.contiguous
    assert window[0, 1:2].contiguous


def test_writing_through_a_window(device: dk.Device) -> None:
    host = np.zeros((4, 6), np.int32)
    buffer = device.array(host)
    buffer[1:3, 2:5].copy_from(np.arange(6, dtype=np.int32).reshape(2, 3))
    buffer[3].fill(7)
    buffer[:, 0].fill(-1)
    host[1:3, 2:5], host[3], host[:, 0] = np.arange(6).reshape(2, 3), 7, -1
    same(buffer.numpy(), host)


def test_reshape_and_view(device: dk.Device) -> None:
    host = np.arange(24, dtype=np.int32)
    buffer = device.array(host)
    same(buffer.reshape(2, 3, 4).numpy(), host.reshape(2, 3, 4))
    same(buffer.reshape(4, -1)[1:3].reshape(-1).numpy(), host[6:18])
    same(buffer.reshape(2, 12).view(np.uint8).numpy(), host.reshape(2, 12).view(np.uint8))
    same(buffer.view(np.int64).numpy(), host.view(np.int64))
    same(buffer.view(ml_dtypes.bfloat16).view(np.int32).numpy(), host)
    same(buffer[5].view(np.float32).numpy(), host[5:6].view(np.float32).reshape(()))
    assert buffer.reshape(6, 4).address == buffer.address


def test_closing_one_window_closes_all(device: dk.Device) -> None:
    buffer = device.zeros(8, np.float32)
    window = buffer[2:4]
    window.close()
    assert buffer.closed
    assert window.closed


# ---- pitched copies ------------------------------------------------------------------------------------------------

BOXES: dict[str, tuple[tuple[int, ...], Any, Any]] = {
    "row": ((8, 10), np.s_[2, 1:7], np.s_[5, 3:9]),
    "column": ((8, 10), np.s_[:, 3], np.s_[:, 7]),
    "rectangle": ((8, 10), np.s_[1:5, 2:9], np.s_[4:8, 3:10]),
    "to contiguous": ((8, 10), np.s_[1:5, 2:9], None),
    "from contiguous": ((8, 10), None, np.s_[1:5, 2:9]),
    "box": ((4, 6, 8), np.s_[1:3, 2:5, 1:6], np.s_[0:2, 0:3, 3:8]),
    "slabs": ((4, 6, 8), np.s_[::2, 1:4], np.s_[1::2, 3:6]),
    "box to contiguous": ((4, 6, 8), np.s_[1:3, 2:5, 1:6], None),
}


@pytest.mark.parametrize("ends", [*itertools.product(["host", "device", "pinned"], repeat=2)], ids="-".join)
@pytest.mark.parametrize("name", BOXES)
@pytest.mark.parametrize("queued", [False, True], ids=["at once", "queued"])
def test_a_copy_of_strides_touches_nothing_else(
    device: dk.Device, stream: dk.Stream, rng: np.random.Generator, name: str, ends: tuple[str, str], queued: bool
) -> None:
    shape, from_, to = BOXES[name]
    values = some(rng, shape, np.int16)
    part = values[from_] if from_ is not None else values[to]
    source_host = values if from_ is not None else np.ascontiguousarray(part)
    target_host = np.full(shape if to is not None else part.shape, GUARD, np.int16)

    def make(where: str, host: NDArray[Any]) -> Any:
        if where == "host":
            return host.copy()
        if where == "device":
            return device.array(host)
        pinned = device.pinned(host.shape, host.dtype)
        pinned.host[...] = host
        return pinned

    source, target = make(ends[0], source_host), make(ends[1], target_host)
    source_part = source[from_] if from_ is not None else source
    target_part = target[to] if to is not None else target
    if ends == ("host", "host"):
        buffer = device.empty(part.shape, np.int16)
        buffer.copy_from(source_part, stream if queued else None).copy_to(target_part, stream if queued else None)
    elif ends[1] == "host":
        source_part.copy_to(target_part, stream if queued else None)
    else:
        target_part.copy_from(source_part, stream if queued else None)
    stream.synchronize()
    if to is not None:
        target_host[to] = part
    else:
        target_host[...] = part
    same(target if ends[1] == "host" else target.numpy(), target_host)


def test_what_was_copied_without_a_stream_is_there_for_all_streams(
    device: dk.Device, stream: dk.Stream, rng: np.random.Generator
) -> None:
    """Though the driver returns from such a copy before the device has it; streams here do not wait for stream 0."""
    got = np.empty(3000, np.int16)
    with device.empty(got.shape, got.dtype) as target:
        for _ in range(50):
            values = some(rng, got.shape, np.int16)
            with device.array(values) as buffer:
                buffer.copy_to(got, stream)
                stream.synchronize()
                same(got, values)
                target.copy_from(buffer).copy_to(got, stream)
                stream.synchronize()
                same(got, values)


@pytest.mark.parametrize("way", ["copy_from", "queued", "memcpy"])
def test_a_broadcast_source_is_refused(
    device: dk.Device, graph: dk.Graph, stream: dk.Stream, rng: np.random.Generator, way: str
) -> None:
    target = device.array(some(rng, (4, 6), np.int32))
    before = target.numpy()
    act: Callable[[Any], Any] = {
        "copy_from": target.copy_from,
        "queued": lambda source: target.copy_from(source, stream),
        "memcpy": lambda source: graph.memcpy(target, source),
    }[way]
    for source in (np.broadcast_to(np.int32(7), (4, 6)), np.broadcast_to(np.arange(6, dtype=np.int32), (4, 6))):
        with pytest.raises(ValueError, match=r"copy source: strides .* repeat elements \(broadcast\)"):
            act(source)
    stream.synchronize()
    same(target.numpy(), before)
    assert len(graph) == 0


@pytest.mark.parametrize("way", ["copy_from", "copy_to", "memcpy"])
def test_a_copy_onto_itself_is_refused(device: dk.Device, graph: dk.Graph, way: str) -> None:
    x = device.array(np.arange(10, dtype=np.int32))
    act: Callable[[dk.Buffer, dk.Buffer], Any] = {
        "copy_from": lambda to, from_: to.copy_from(from_),
        "copy_to": lambda to, from_: from_.copy_to(to),
        "memcpy": graph.memcpy,
    }[way]
    for to, from_ in ((x[:6], x[3:9]), (x[4:], x[:6]), (x, x), (x[:2], x[1:3])):
        with pytest.raises(ValueError, match="overlaps"):
            act(to, from_)
    x[:5].copy_from(x[5:])  # side by side is fine
    assert x.numpy().tolist() == [5, 6, 7, 8, 9] * 2


# ---- fills ---------------------------------------------------------------------------------------------------------

FILLS: list[tuple[str, Any]] = [
    *(("?", value) for value in (True, False)),
    *(("i1", value) for value in (-1, 127)),
    ("u1", 200),
    ("i2", -300),
    ("u2", 0xABCD),
    ("i4", -(2**31)),
    ("u4", 2**32 - 1),
    *(("i8", value) for value in (0, -1, 0x0101010101010101)),
    ("f2", 1.5),
    *(("f4", value) for value in (0.1, -0.0, float("inf"), float("nan"))),
    *(("f8", value) for value in (0, float(np.array(0x3FF000003FF00000).view(np.float64)))),
    ("c8", 0),
    ("bfloat16", 3.0),
    ("float8_e4m3fn", -2.0),
]


@pytest.mark.parametrize(("name", "value"), FILLS)
@pytest.mark.parametrize("queued", [False, True], ids=["at once", "queued"])
def test_a_fill(device: dk.Device, stream: dk.Stream, name: str, value: Any, queued: bool) -> None:
    dtype = dtype_of(name)
    host = np.full((4, 6), 1, dtype)
    buffer = device.array(host)
    assert buffer.fill(value, stream if queued else None) is buffer
    stream.synchronize()
    same(buffer.numpy(), np.full((4, 6), value, dtype))
    buffer.copy_from(host)
    buffer[1:3, 2:5].fill(value)
    host[1:3, 2:5] = value
    same(buffer.numpy(), host)


UNFIT: list[tuple[str, Any, str]] = [
    *(("f4", value, "wanted float32, a number") for value in (None, "1.5", 1j, True, [1.0], np.zeros(1))),
    *(("i4", value, "wanted int32, an integer in") for value in (None, "1", 0.5, 1.0, True, 2**31)),
    *(("?", value, "wanted bool") for value in (None, 1, 2**70, 0.0, "yes")),
    *(("i8", value, "wanted int64") for value in (2**70, -(2**70))),
    ("u4", -1, "wanted uint32"),
    ("f4", 1e40, "wanted a value of float32"),
    ("f2", 1e6, "wanted a value of float16"),
    ("f4", 2**24 + 1, "which cannot hold this integer exactly"),
    ("c8", "1", "wanted float32, a number"),
    ("c8", 1j, "no period"),
    ("V3", 0, "wanted a value of"),
    ("int4", 8, r"wanted int4, an integer in \[-8, 7\]"),
    ("int4", -9, r"wanted int4, an integer in \[-8, 7\]"),
    ("float8_e4m3fn", 1000.0, "at most 448 in size"),
    ("float8_e5m2", -1e6, "at most 57344 in size"),
    ("float4_e2m1fn", 100, "float4_e2m1fn"),
    *(("float8_e8m0fnu", value, "float8_e8m0fnu, positive") for value in (-1.0, 0.0, 1e39)),
    ("bfloat16", 1e39, "wanted bfloat16"),
]


@pytest.mark.parametrize(("name", "value", "said"), UNFIT, ids=str)
def test_a_fill_takes_what_is_exactly_a_value(
    device: dk.Device, graph: dk.Graph, stream: dk.Stream, name: str, value: Any, said: str
) -> None:
    buffer = device.zeros(8, dtype_of(name))
    for queue in (None, stream):
        with pytest.raises(ValueError, match=f"^fill: .*{said}"):
            buffer.fill(value, queue)
    with pytest.raises(ValueError, match=f"memset node 'fill': fill: .*{said}"):
        graph.memset(buffer, value, name="fill")
    assert not any(buffer.numpy().tobytes())
    assert len(graph) == 0


@pytest.mark.parametrize("index", [np.s_[::-1], np.s_[:, ::-1], np.s_[::-2, 1:3]], ids=str)
def test_a_fill_backwards_is_refused(device: dk.Device, index: Any) -> None:
    buffer = device.zeros((4, 6), np.int32)
    with pytest.raises(ValueError, match="are no 2-D rows"):
        buffer[index].fill(1)
    assert not buffer.numpy().any()


def test_a_fill_of_int4(device: dk.Device) -> None:
    for value in (-8, -1, 0, 7):
        got = device.zeros(5, ml_dtypes.int4).fill(value).numpy()
        assert (got.dtype, got.astype(int).tolist()) == (ml_dtypes.int4, [value] * 5)


@pytest.mark.parametrize("index", [np.s_[:0], np.s_[:, 3:3], np.s_[1:1, ::2]], ids=str)
def test_a_fill_of_nothing_does_nothing(device: dk.Device, stream: dk.Stream, index: Any) -> None:
    buffer = device.zeros((4, 6), np.int32)
    for queue in (None, stream):
        part = buffer[index]
        assert part.fill(7, queue) is part
        with pytest.raises(ValueError, match="fill: wanted int32"):
            part.fill(None, queue)
    stream.synchronize()
    assert not buffer.numpy().any()


def test_filling_bytes(device: dk.Device, stream: dk.Stream) -> None:
    buffer = device.zeros(5, RECORD)
    buffer.fill_bytes(0xAB)
    assert set(buffer.numpy().tobytes()) == {0xAB}
    buffer[1:3].fill_bytes(0, stream)
    stream.synchronize()
    assert np.frombuffer(buffer.numpy().tobytes(), np.uint8).reshape(5, -1).max(axis=1).tolist() == [
        171,
        0,
        0,
        171,
        171,
    ]


# ---- what a Buffer is not ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("act", [np.asarray, np.array, lambda buffer: np.add(buffer, 1)])
def test_a_buffer_does_not_become_a_numpy_array_by_itself(device: dk.Device, act: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"use \.numpy\(\)"):
        act(device.zeros(4, np.float32))


def test_a_buffer_is_neither_true_nor_a_sequence(device: dk.Device) -> None:
    buffer = device.zeros(4, np.float32)
    with pytest.raises(TypeError, match="no truth value"):
        bool(buffer)
    with pytest.raises(TypeError):
        iter(buffer)


def test_reshape_takes_integers_or_one_sequence_of_them(device: dk.Device) -> None:
    buffer = device.array(np.arange(12, dtype=np.int32))
    assert buffer.reshape((3, 4)).shape == buffer.reshape(3, 4).shape == buffer.reshape((3, -1)).shape == (3, 4)
    right: list[Any] = [(np.int64(2), 6), [2, 6]]
    for extents in right:
        assert buffer.reshape(extents).shape == (2, 6)
    wrong: list[Any] = [(3.0, 4), (12.0,), (True, 12), (np.True_, 12), ("12",)]
    for extents in wrong:
        for given in (extents, (extents,)):
            with pytest.raises(TypeError, match="reshape: wanted integers"):
                buffer.reshape(*given)


def test_a_masked_array_is_refused(device: dk.Device) -> None:
    masked = np.ma.masked_array(np.arange(4, dtype=np.float32), [False, True, False, False])
    with pytest.raises(TypeError, match="masked array"):
        device.array(masked)


# ---- pinned memory and pools ---------------------------------------------------------------------------------------


def test_pinned_memory_is_seen_from_both_sides(device: dk.Device, module: dk.Module, stream: dk.Stream) -> None:
    pinned = device.pinned((4, 250), np.float32)
    assert pinned.where == "pinned"
    pinned.host[...] = np.arange(1000).reshape(4, 250)
    module.kernel("scale").launch(stream, grid=4, block=256, args=(pinned, pinned, 1000, 2.0))
    stream.synchronize()
    np.testing.assert_array_equal(pinned.host, 2 * np.arange(1000).reshape(4, 250))
    window = pinned[1:3, ::2].host
    assert np.shares_memory(window, pinned.host)
    np.testing.assert_array_equal(window, pinned.host[1:3, ::2])


def test_memory_of_a_pool(device: dk.Device, stream: dk.Stream) -> None:
    host = np.arange(2**20, dtype=np.float32)
    with device.pool(release_threshold_bytes=2**26) as pool:
        assert (pool.used_bytes, pool.reserved_bytes) == (0, 0)
        first = pool.empty(2**20, np.float32, stream)
        assert (first.where, first.shape) == ("pool", (2**20,))
        first.copy_from(host, stream)
        same(first.numpy(stream), host)
        assert pool.used_bytes >= first.nbytes
        reserved = pool.reserved_bytes
        first.close()
        second = pool.empty(2**20, np.float32, stream)
        assert pool.reserved_bytes == reserved, "it is free again in the order of the stream"
        second.close()
        stream.synchronize()
        assert pool.used_bytes == 0
        assert pool.reserved_bytes >= 2**22
        pool.trim()
        assert pool.reserved_bytes == 0


def test_memory_of_a_pool_may_outlive_its_stream_and_pool(device: dk.Device) -> None:
    with device.stream() as stream:
        pool = device.pool()
        buffer = pool.empty(10, np.int32, stream)
        buffer.fill(3, stream)
        pool.close()
    assert buffer.numpy().tolist() == [3] * 10
    buffer.close()


# ---- other libraries -----------------------------------------------------------------------------------------------


def test_the_interface_of_cuda_arrays(device: dk.Device) -> None:
    buffer = device.zeros((4, 6), np.float32)
    if device.driver.kind != "cuda":  # whoever asked would take it for CUDA memory
        with pytest.raises(AttributeError, match="is no CUDA memory"):
            _ = buffer.__cuda_array_interface__
        return
    assert buffer.__cuda_array_interface__ == {
        "version": 3,
        "data": (buffer.address, False),
        "typestr": "<f4",
        "shape": (4, 6),
        "strides": None,
        "stream": None,
    }
    assert buffer[:, 1:3].__cuda_array_interface__["strides"] == (24, 4)
    assert buffer[:0].__cuda_array_interface__["data"] == (0, False)
    assert device.zeros(4, ml_dtypes.bfloat16).__cuda_array_interface__["typestr"] == "<u2"


def test_dlpack_of_pinned_memory_is_read_by_numpy(device: dk.Device) -> None:
    pinned = device.pinned((3, 4), np.float32)
    pinned.host[...] = np.arange(12).reshape(3, 4)
    assert pinned.__dlpack_device__() == (3, 0)
    seen = np.from_dlpack(pinned[1:, ::2])
    same(seen, np.arange(12, dtype=np.float32).reshape(3, 4)[1:, ::2])
    pinned.host[1, 2] = -1
    assert seen[0, 1] == -1, "it is the same memory"
    before = len(dk.live())
    pinned.close()
    assert len(dk.live()) == before
    del seen
    assert len(dk.live()) == before - 1


def test_what_numpy_saw_of_pinned_memory_stays_after_close(device: dk.Device) -> None:
    pinned = device.pinned(1000, np.int32)
    pinned.host[:] = np.arange(1000)
    seen = np.from_dlpack(pinned)
    pinned.close()
    del pinned
    poison = [device.pinned(1000, np.int32) for _ in range(8)]
    for buffer in poison:
        buffer.host[:] = -1
    same(seen, np.arange(1000, dtype=np.int32))
    del poison, buffer


def test_dlpack_of_device_memory_is_refused_by_numpy_and_leaves_nothing(device: dk.Device) -> None:
    before = len(dk.live())
    buffer = device.zeros(4, np.float32)
    for _ in range(3):
        with pytest.raises((RuntimeError, ValueError, BufferError, TypeError)) as told:
            np.from_dlpack(buffer)
        assert not isinstance(told.value, SystemError)
    assert len(dk.live()) == before + 1
    del told
    buffer.close()
    assert len(dk.live()) == before


def test_a_dlpack_capsule_that_nobody_takes_keeps_memory_only_as_long_as_it_is_there(device: dk.Device) -> None:
    before, other = len(dk.live()), device.zeros(1, np.int32)
    capsule = device.zeros(4, np.float32).__dlpack__()
    other[:1].__dlpack__()  # looks for what was dropped
    assert len(dk.live()) == before + 2
    del capsule
    other.close()
    assert len(dk.live()) == before


class WithOffset:
    """A producer whose elements begin some bytes behind the address that it names."""

    def __init__(self, buffer: dk.Buffer, skip: int) -> None:
        self.buffer, self.skip = buffer, skip

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.buffer.__dlpack_device__()

    def __dlpack__(self, **how: Any) -> Any:
        capsule = self.buffer[: -self.skip].__dlpack__(**how)
        tensor = dlpack._Managed.from_address(dlpack._pointer(capsule, b"dltensor")).tensor
        tensor.byte_offset = self.skip * self.buffer.dtype.itemsize
        return capsule


def test_the_offset_of_a_producer_counts(device: dk.Device) -> None:
    whole = device.array(np.arange(10, dtype=np.int32))
    foreign = WithOffset(whole, 4)
    assert device.zeros(6, np.int32).copy_from(foreign).numpy().tolist() == [4, 5, 6, 7, 8, 9]
    device.array(np.full(6, -1, np.int32)).copy_to(foreign)
    assert whole.numpy().tolist() == [0, 1, 2, 3, -1, -1, -1, -1, -1, -1]
    whole.close()


@pytest.mark.parametrize("dtype", ["?", "i1", "u2", "i4", "u8", "f2", "f4", "f8", "c8"])
def test_cupy_shares_our_memory(device: dk.Device, dtype: str, cupy: Any) -> None:
    host = np.arange(24).reshape(4, 6).astype(dtype)
    buffer = device.array(host)
    for window in (buffer, buffer[1:3, ::2], buffer[2]):
        for theirs in (cupy.asarray(window), cupy.from_dlpack(window)):
            assert (theirs.data.ptr, theirs.shape, theirs.strides) == (window.address, window.shape, window.strides)
            assert theirs.dtype == dtype
    same(cupy.asnumpy(cupy.asarray(buffer)), host)
    cupy.from_dlpack(buffer).set(np.ones((4, 6), dtype))
    device.synchronize()
    same(buffer.numpy(), np.ones((4, 6), dtype))


@pytest.mark.parametrize("protocol", ["asarray", "from_dlpack"])
def test_what_cupy_shares_keeps_our_memory(device: dk.Device, protocol: str, cupy: Any) -> None:
    before = len(dk.live())
    theirs = getattr(cupy, protocol)(device.array(np.arange(10, dtype=np.float32)))
    gc.collect()
    assert len(dk.live()) == before + 1
    poison = [device.empty(10, np.float32).fill(-1.0) for _ in range(8)]
    assert cupy.asnumpy(theirs).tolist() == list(range(10))
    del theirs, poison
    gc.collect()
    assert len(dk.live()) == before


class OnlyDLPack:
    """An array of a library that knows no other protocol."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **how: Any) -> Any:
        return self.array.__dlpack__(**how)


@pytest.mark.parametrize("wrap", [lambda array: array, OnlyDLPack], ids=["interface", "DLPack"])
def test_foreign_arrays_are_taken_wherever_a_buffer_is(
    device: dk.Device, module: dk.Module, stream: dk.Stream, arrays: Arrays, wrap: Callable[[Any], Any]
) -> None:
    host = np.arange(1000, dtype=np.float32)
    x, y = arrays.to_device(host), arrays.full(1000, np.float32, np.nan)
    module.kernel("scale").launch(stream, grid=4, block=256, args=(wrap(x), wrap(y), 1000, 2.0))
    stream.synchronize()
    same(arrays.numpy(y), host * 2)
    ours = device.zeros(1000, np.float32).copy_from(wrap(y), stream)
    same(ours.numpy(stream), host * 2)
    ours.fill(5.0, stream).copy_to(wrap(x), stream)
    stream.synchronize()
    same(arrays.numpy(x), np.full(1000, 5, np.float32))
    with dk.Graph(device, "foreign") as graph:
        filled = graph.memset(wrap(x), 3.0)
        graph.memcpy(wrap(y), wrap(x), after=filled)
        with graph.instantiate() as exe:
            exe.launch(stream)
            stream.synchronize()
    same(arrays.numpy(y), np.full(1000, 3, np.float32))


def test_bfloat16_travels_as_uint16_through_cupy(device: dk.Device, stream: dk.Stream, cupy: Any) -> None:
    ours = device.array(np.arange(8).astype(ml_dtypes.bfloat16))
    theirs = cupy.asarray(ours)
    assert theirs.dtype == np.uint16
    same(cupy.asnumpy(theirs).view(ml_dtypes.bfloat16), ours.numpy())


def test_strided_arrays_of_cupy_are_copied(device: dk.Device, cupy: Any) -> None:
    theirs = cupy.arange(48, dtype=np.int32).reshape(6, 8)
    device.synchronize()
    ours = device.zeros((3, 4), np.int32).copy_from(theirs[1:4, 2:6])
    same(ours.numpy(), np.ascontiguousarray(np.arange(48, dtype=np.int32).reshape(6, 8)[1:4, 2:6]))
    ours.fill(-1).copy_to(theirs[:3, :4])
    assert cupy.asnumpy(theirs)[:3, :4].tolist() == [[-1] * 4] * 3
    assert cupy.asnumpy(theirs)[3:].min() == 24


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("float4_e2m1fn", 100.0),
        ("float4_e2m1fn", float("inf")),
        ("float4_e2m1fn", float("nan")),
        ("float6_e2m3fn", 100.0),
        ("float8_e4m3fn", float("inf")),
        ("complex64", 10**400),
        ("complex64", 2**24 + 1),
        ("complex64", complex(float("inf"), 1e300)),
    ],
)
def test_values_that_a_narrow_type_lacks_are_refused(dtype: str, value: complex) -> None:
    with pytest.raises(Unfit):
        bits(value, dtype_of(dtype) if dtype == "complex64" else np.dtype(getattr(ml_dtypes, dtype)))


@pytest.mark.parametrize(
    ("dtype", "value", "largest"),
    [("float4_e2m1fn", 6.9, 6.0), ("float6_e2m3fn", 7.55, 7.5), ("float8_e4m3fn", 448.0, 448.0)],
)
def test_the_largest_values_of_narrow_types_are_reached(dtype: str, value: float, largest: float) -> None:
    narrow = np.dtype(getattr(ml_dtypes, dtype))
    assert float(np.frombuffer(bits(value, narrow), narrow)[0]) == largest
