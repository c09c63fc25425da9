"""Streams and events on a device: order, waiting, time, what a stream keeps alive, and threads."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from kernels import SOURCE, ints

import drvkit as dk
from drvkit.device import DEFAULT_STREAMS, HELD_PER_BATCH

N = 1000
X = np.arange(N, dtype=np.float32)


def spin(module: dk.Module, stream: Any, milliseconds: int) -> None:
    module.kernel("spin").launch(stream, grid=1, block=1, args=(milliseconds,))


# ---- order and time ------------------------------------------------------------------------------------------------


def test_launches_follow_each_other(device: dk.Device, module: dk.Module, stream: dk.Stream) -> None:
    order = device.zeros(2000, np.int32)
    for i in range(1500):
        module.kernel("append").launch(stream, grid=1, block=1, args=(order, i))
    stream.synchronize()
    assert order.numpy()[:1501].tolist() == [1500, *range(1500)]


def test_kernels_copies_and_fills_follow_each_other(device: dk.Device, module: dk.Module, stream: dk.Stream) -> None:
    x, y, host = device.array(X), device.zeros(N, np.float32), np.zeros_like(X)
    spin(module, stream, 5)
    y.fill(7.0, stream)
    y[: N // 2].copy_from(x[: N // 2], stream)
    module.kernel("scale").launch(stream, grid=4, block=256, args=(y, y, N, 2.0))
    y.copy_to(host, stream)
    stream.synchronize()
    np.testing.assert_array_equal(host, np.where(X < N // 2, 2 * X, 14))


def test_done_says_whether_work_is_left(device: dk.Device, graph: dk.Graph, stream: dk.Stream) -> None:
    gate = threading.Event()
    graph.host(gate.wait)
    event = device.event()
    assert stream.done
    assert event.done, "it was never recorded"
    with graph.instantiate() as exe:
        exe.launch(stream)
        event.record(stream)
        try:
            assert not stream.done
            assert not event.done
        finally:
            gate.set()
        event.synchronize()
        assert event.done
        assert stream.done


def test_the_time_between_events(device: dk.Device, module: dk.Module, stream: dk.Stream) -> None:
    start = stream.record()
    spin(module, stream, 10)
    end = stream.record(device.event())
    stream.synchronize()
    assert 9.9 <= start.elapsed_ms(end) < 1000
    assert start.elapsed_ms(start) == 0
    assert end.elapsed_ms(start) < 0


def test_a_stream_waits_for_another(device: dk.Device, module: dk.Module, stream: dk.Stream) -> None:
    x, y = ints(device, 0), ints(device, -1)
    with device.stream(priority=-1) as other:
        spin(module, stream, 20)
        x.fill(7, stream)
        other.wait(stream.record(device.event(timing=False)))
        y.copy_from(x, other)
        other.synchronize()
        assert y.numpy().tolist() == [7]


def test_streams_do_not_wait_without_being_told(device: dk.Device, module: dk.Module, stream: dk.Stream) -> None:
    x = ints(device, 0)
    spin(module, stream, 1)
    stream.synchronize()
    with device.stream() as other:
        spin(module, stream, 100)
        x.fill(7, other)
        other.synchronize()
        assert not stream.done
        assert x.numpy(other).tolist() == [7]


def test_reading_without_a_stream_waits_for_everything(device: dk.Device, module: dk.Module, stream: dk.Stream) -> None:
    x = ints(device, 0)
    spin(module, stream, 20)
    x.fill(7, stream)
    assert x.numpy().tolist() == [7]


def test_closing_a_stream_waits(device: dk.Device, module: dk.Module) -> None:
    x = ints(device, 0)
    with device.stream() as stream, device.stream() as reader:
        spin(module, stream, 20)
        x.fill(7, stream)
        stream.close()
        assert x.numpy(reader).tolist() == [7]


# ---- streams of others ---------------------------------------------------------------------------------------------


class Foreign:
    """Another library's stream."""

    def __init__(self, handle: int, *, is_property: bool = False) -> None:
        self.pair = (0, handle)
        if is_property:
            self.__cuda_stream__: Any = self.pair
        else:
            self.__cuda_stream__ = lambda: self.pair


@pytest.mark.parametrize("is_property", [False, True])
def test_a_foreign_stream_by_protocol(
    device: dk.Device, module: dk.Module, stream: dk.Stream, is_property: bool
) -> None:
    assert stream.__cuda_stream__() == (0, int(stream.handle))
    x, y = device.array(X), device.zeros(N, np.float32)
    foreign = Foreign(int(stream.handle), is_property=is_property)
    spin(module, foreign, 5)
    y.copy_from(x, foreign)
    assert device.as_stream(foreign) is device.as_stream(Foreign(int(stream.handle)))
    stream.synchronize()
    np.testing.assert_array_equal(y.numpy(), X)
    device.as_stream(foreign).close()
    assert stream.done, "it is not ours to destroy"


def test_a_stream_of_cupy(device: dk.Device, module: dk.Module, cupy: Any) -> None:
    theirs, y = cupy.cuda.Stream(non_blocking=True), cupy.zeros(N, np.float32)
    x = cupy.asarray(X)
    device.synchronize()
    spin(module, theirs, 5)
    module.kernel("scale").launch(theirs, grid=4, block=256, args=(x, y, N, 2.0))
    with dk.Graph(device, "on theirs") as graph:
        graph.kernel(module.kernel("add"), grid=4, block=256, args=(y, y, N, 1.0))
        with graph.instantiate() as exe:
            exe.launch(theirs)
            with theirs:
                y *= 2
            theirs.synchronize()
    np.testing.assert_array_equal(cupy.asnumpy(y), (X * 2 + 1) * 2)
    device.as_stream(theirs).close()
    theirs.synchronize()


def test_cupy_works_on_our_stream(device: dk.Device, module: dk.Module, stream: dk.Stream, cupy: Any) -> None:
    x, y = cupy.asarray(X), device.zeros(N, np.float32)
    device.synchronize()
    with cupy.cuda.Stream.from_external(stream):
        spin(module, stream, 5)
        module.kernel("scale").launch(stream, grid=4, block=256, args=(x, y, N, 2.0))
        total = cupy.asarray(y) + 1
    stream.synchronize()
    np.testing.assert_array_equal(cupy.asnumpy(total), X * 2 + 1)


# ---- what a stream keeps -------------------------------------------------------------------------------------------


class Array:
    """Another library's array, which is gone when nobody holds it."""

    def __init__(self, buffer: dk.Buffer) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "data": (buffer.address, False),
            "typestr": buffer.dtype.str,
            "shape": buffer.shape,
        }


@pytest.mark.parametrize("released_by", ["synchronize", "close"])
def test_a_stream_keeps_what_its_work_takes(device: dk.Device, module: dk.Module, released_by: str) -> None:
    x, y = device.array(X), device.zeros(N, np.float32)
    with device.stream() as stream:
        foreign = [Array(x), Array(y), Array(x)]
        alive = [weakref.ref(array) for array in foreign]
        module.kernel("scale").launch(stream, grid=4, block=256, args=(foreign[0], foreign[1], N, 2.0))
        foreign[1:] = [foreign[2]]
        y.copy_from(foreign[1], stream)
        foreign.clear()
        gc.collect()
        assert all(reference() is not None for reference in alive)
        getattr(stream, released_by)()
        gc.collect()
        assert all(reference() is None for reference in alive)


def test_a_stream_lets_go_without_being_synchronized(device: dk.Device, module: dk.Module, stream: dk.Stream) -> None:
    kernel, alive, most = module.kernel("store"), weakref.WeakSet[Array](), 0
    x = ints(device, 0)
    for i in range(3000):
        array = Array(x)
        alive.add(array)
        kernel.launch(stream, grid=1, block=1, args=(array, i))
        most = max(most, len(alive)) if i % 100 == 0 else most
    assert most < 2500
    stream.synchronize()
    del array
    assert len(alive) == 0
    assert x.numpy().tolist() == [2999]


def test_an_idle_stream_needs_no_synchronize_to_let_go(device: dk.Device, module: dk.Module, stream: dk.Stream) -> None:
    kernel, x = module.kernel("store"), ints(device, 0)
    first = Array(x)
    alive = weakref.ref(first)
    kernel.launch(stream, grid=1, block=1, args=(first, 1))
    del first
    deadline = time.monotonic() + 20
    while alive() is not None and time.monotonic() < deadline:
        kernel.launch(stream, grid=1, block=1, args=(x, 2))
    assert alive() is None


def test_more_launches_than_one_batch_keep_everything(device: dk.Device, module: dk.Module, stream: dk.Stream) -> None:
    count, kernel = HELD_PER_BATCH + 200, module.kernel("scale")
    inputs = [device.array(np.full(4, i, np.float32)) for i in range(count)]
    addresses = {x.address for x in inputs}
    y = device.zeros((count, 4), np.float32)
    kernel.launch(stream, grid=1, block=32, args=(inputs[0], y[0], 4, 2.0))  # loaded from now on
    with device.stream() as other:
        other.synchronize()
        gc.collect()
        spin(module, stream, 200)
        for i in range(count):
            kernel.launch(stream, grid=1, block=32, args=(inputs[-1], y[count - 1 - i], 4, 2.0))
            del inputs[-1]
        poison = [device.empty(4, np.float32).fill(-7.0, other) for _ in range(64)]
        assert not stream.done, "the launches were over too soon to show anything"
        assert addresses.isdisjoint(buffer.address for buffer in poison)
        stream.synchronize()
    np.testing.assert_array_equal(y.numpy()[:, 0], 2 * np.arange(count))
    del poison


def refuse(*_: Any) -> None:
    raise dk.DriverError("cuCall", "CUDA_ERROR_UNKNOWN", "of the test")


@pytest.mark.parametrize(
    ("call", "waits"), [("cuStreamSynchronize", "stream"), ("cuCtxSynchronize", "device"), ("cuEventRecord", "settle")]
)
def test_a_wait_that_fails_lets_go_of_nothing(
    device: dk.Device, stream: dk.Stream, monkeypatch: pytest.MonkeyPatch, call: str, waits: str
) -> None:
    x, y = device.array(X), device.zeros(N, np.float32)
    arrays = [Array(x) for _ in range(4)]
    alive = weakref.WeakSet(arrays)
    for array in arrays:
        y.copy_from(array, stream)
    arrays.clear()
    del array
    with monkeypatch.context() as patch:
        getattr(device.driver, call)  # its own error must not be kept
        patch.setattr(device.driver, call, refuse)
        for _ in range(2):
            with pytest.raises(dk.DriverError, match="of the test"):
                {"stream": stream.synchronize, "device": device.synchronize, "settle": stream.settle}[waits]()
    gc.collect()
    assert len(alive) == 4
    stream.synchronize()
    gc.collect()
    assert len(alive) == 0
    np.testing.assert_array_equal(y.numpy(), X)


def test_a_stream_whose_host_node_raised_is_closed_all_the_same(device: dk.Device) -> None:
    def fail() -> None:
        raise ValueError("of the host node")

    stream = device.stream()
    x = ints(device, 0)
    with dk.Graph(device, "failing") as graph:
        graph.memset(x, 1, after=graph.host(fail))
        with graph.instantiate() as exe:
            exe.launch(stream)
            with pytest.raises(ValueError, match="of the host node"):
                stream.close()
    assert stream.closed
    with pytest.raises(dk.ClosedError):
        stream.synchronize()
    stream.close()
    device.synchronize()
    assert x.numpy().tolist() == [1]


# ---- default streams and several devices ---------------------------------------------------------------------------


@pytest.fixture
def second(device: dk.Device) -> dk.Device:
    """Another device of the same kind."""
    if device.driver.cuDeviceGetCount() < 2:
        pytest.skip("needs two devices")
    return dk.Device(f"{device.driver.kind}:1")


@pytest.mark.usefixtures("races_on_purpose")
@pytest.mark.parametrize("handle", DEFAULT_STREAMS)
def test_a_default_stream_in_a_thread_that_never_touched_cuda(
    device: dk.Device, module: dk.Module, handle: int
) -> None:
    kernel, x, y = module.kernel("scale"), device.array(X), device.zeros((5, N), np.float32)
    how: dict[str, Any] = {"grid": 4, "block": 256}
    graph = dk.Graph(device, "on a default stream")
    graph.kernel(kernel, args=(x, y[1], N, 3.0), **how)
    exe, event = graph.instantiate(), device.event()
    prepared = kernel.prepare(Foreign(handle), args=(x, y[2], N, 4.0), **how)
    steps: list[Callable[[dk.Stream], Any]] = [
        lambda stream: kernel.launch(stream, args=(x, y[0], N, 2.0), **how),
        lambda stream: kernel.launch(stream, args=(x, y[0], N, 2.0), cooperative=True, **how),
        lambda stream: exe.upload(stream),
        lambda stream: exe.launch(stream),
        lambda stream: prepared(),
        lambda stream: y[3].copy_from(x, stream),
        lambda stream: y[4].fill(6.0, stream),
        lambda stream: event.record(stream),
        lambda stream: stream.wait(event),
        lambda stream: stream.done,
        lambda stream: stream.settle(),
        lambda stream: stream.synchronize(),
    ]
    stream = device.as_stream(Foreign(handle))
    for step in steps:
        in_threads(partial(step, stream))
        stream.synchronize()
    in_threads(*[partial(step, stream) for step in steps])
    device.synchronize()
    np.testing.assert_array_equal(y.numpy(), [X * 2, X * 3, X * 4, X, np.full_like(X, 6)])
    stream.close()


@pytest.mark.parametrize("handle", DEFAULT_STREAMS)
def test_default_streams_of_two_devices_in_one_thread(
    device: dk.Device, module: dk.Module, second: dk.Device, handle: int
) -> None:
    devices, modules = (device, second), (module, second.module(SOURCE))
    xs = [dev.array(X) for dev in devices]
    graphs = [dk.Graph(dev, dev.id) for dev in devices]
    for mod, x, graph in zip(modules, xs, graphs, strict=True):
        graph.kernel(mod.kernel("scale"), grid=4, block=256, args=(x, x, N, 0.5))
    execs = [graph.instantiate() for graph in graphs]
    streams = [dev.as_stream(Foreign(handle)) for dev in devices]
    for _ in range(2):
        for mod, x, exe, stream in zip(modules, xs, execs, streams, strict=True):
            mod.kernel("scale").launch(stream, grid=4, block=256, args=(x, x, N, 4.0))
            exe.launch(stream)
            exe.launch(stream)
    for stream, x in zip(streams, xs, strict=True):
        stream.synchronize()
        np.testing.assert_array_equal(x.numpy(), X)
        stream.close()


@pytest.mark.parametrize("handle", [*DEFAULT_STREAMS, None])
def test_a_stream_of_another_device_is_refused_the_first_time_and_after(
    device: dk.Device, module: dk.Module, second: dk.Device, handle: int | None
) -> None:
    ours = device.stream() if handle is None else device.as_stream(Foreign(handle))
    theirs = second.stream() if handle is None else second.as_stream(Foreign(handle))
    kernel, x = module.kernel("scale"), device.array(X)
    with dk.Graph(device, "here") as graph:
        graph.kernel(kernel, grid=1, block=1, args=(x, x, 1, 1.0))
        exe = graph.instantiate()
    for _ in range(3):
        for launch in (
            partial(kernel.launch, grid=4, block=256, args=(x, x, N, 1.0)),
            partial(kernel.prepare, grid=4, block=256, args=(x, x, N, 1.0)),
            exe.launch,
        ):
            launch(ours)
            with pytest.raises(ValueError, match=f"belongs to {second.id}, not to {device.id}"):
                launch(theirs)
    ours.close()
    theirs.close()


def test_streams_with_equal_handles_are_told_apart_by_a_launch(device: dk.Device, module: dk.Module) -> None:
    one, other = (device.as_stream(Foreign(handle)) for handle in DEFAULT_STREAMS[:2])
    assert one.raw is not dk.Stream._borrow(device, 0).raw
    assert other.raw == 1
    for stream in (one, other):
        stream.close()
        assert stream.raw is None


@pytest.mark.parametrize("grid", [4, np.int64(4)])
def test_a_closed_stream_is_not_taken_for_none(device: dk.Device, module: dk.Module, grid: Any) -> None:
    """Extents that are no plain integers leave a block filled for no stream, and a closed one has no handle."""
    kernel, x = module.kernel("scale"), device.array(X)
    given: dict[str, Any] = {"block": 256, "args": (x, x, N, 1.0)}
    with device.stream() as stream:
        kernel.launch(stream, grid=4, **given)
        kernel.launch(stream, grid=grid, **given)
        stream.synchronize()
    for _ in range(2):
        with pytest.raises(dk.ClosedError, match=f"stream {stream.name} .* is closed"):
            kernel.launch(stream, grid=4, **given)


def test_where_an_address_is(device: dk.Device, second: dk.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    for dev in (device, second):
        x = dev.zeros(N, np.float32)
        assert device.locate(x.address + 4) == second.locate(x.address) == dev.ordinal
        assert device.locate(dev.pinned(N, np.float32).address) is None
    assert device.locate(0) is None
    monkeypatch.setattr(device, "alone", True)
    monkeypatch.setattr(device, "driver", None)
    assert device.locate(x.address) is None, "there is nothing to ask"


# ---- threads -------------------------------------------------------------------------------------------------------


def in_threads(*works: Callable[[], Any]) -> None:
    """Run each in a thread of its own, at the same time; raise what the first of them raises."""
    failed: list[BaseException] = []

    def run(work: Callable[[], Any]) -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed.pop(0)


def launches(device: dk.Device, module: dk.Module, stream: dk.Stream, y: dk.Buffer) -> None:
    module.kernel("scale").launch(stream, grid=4, block=256, args=(y, y, N, 2.0))


def adds_nodes(device: dk.Device, module: dk.Module, stream: dk.Stream, y: dk.Buffer) -> None:
    with dk.Graph(device, "of a thread") as graph:
        graph.kernel(module.kernel("scale"), grid=4, block=256, args=(y, y, N, 2.0))
        with graph.instantiate() as exe:
            exe.launch(stream)
            stream.synchronize()


def copies(device: dk.Device, module: dk.Module, stream: dk.Stream, y: dk.Buffer) -> None:
    y.copy_from(device.array(2 * X), stream)
    stream.synchronize()


def makes_everything(device: dk.Device, module: dk.Module, stream: dk.Stream, y: dk.Buffer) -> None:
    with device.stream() as own, device.event() as event, device.module(SOURCE) as mine:
        mine.kernel("scale").launch(own, grid=4, block=256, args=(y, y, N, 2.0))
        stream.wait(event.record(own))
        own.synchronize()


class ChangesAnExec:
    """Every kind of change, of an exec that another thread made."""

    def __init__(self, device: dk.Device, module: dk.Module, y: dk.Buffer) -> None:
        graph, x, z = dk.Graph(device, "of another thread"), device.zeros(N, np.float32), device.zeros(N, np.float32)
        fill = graph.memset(z, 0.0, name="fill")
        copy = graph.memcpy(x, z, name="copy", after=fill)
        graph.kernel(module.kernel("scale"), grid=1, block=1, args=(x, y, 1, 0.0), name="scale", after=copy)
        self.exe, self.x, self.y = graph.instantiate(), x, y

    def __call__(self, device: dk.Device, module: dk.Module, stream: dk.Stream, y: dk.Buffer) -> None:
        self.exe["fill"].set(value=1.0)
        self.exe["fill"].disable()
        self.exe["copy"].set(source=y)
        self.exe["scale"].set(alpha=2.0, n=N)
        self.exe["scale"].configure(grid=4, block=256)
        self.exe.launch(stream)
        stream.synchronize()


def test_a_thread_that_never_touched_cuda_changes_an_exec(
    device: dk.Device, module: dk.Module, stream: dk.Stream
) -> None:
    y = device.array(X)
    work = ChangesAnExec(device, module, y)
    in_threads(lambda: work(device, module, stream, y))
    np.testing.assert_array_equal(y.numpy(), 2 * X)


@pytest.mark.parametrize("work", [launches, adds_nodes, copies, makes_everything])
def test_a_thread_that_never_touched_cuda(
    device: dk.Device, module: dk.Module, stream: dk.Stream, work: Callable[..., None]
) -> None:
    y = device.array(X)
    in_threads(lambda: work(device, module, stream, y))
    stream.synchronize()
    np.testing.assert_array_equal(y.numpy(), 2 * X)


def test_threads_that_launch_one_kernel_get_their_own_results(device: dk.Device, module: dk.Module) -> None:
    kernel, rounds, count = module.kernel("add"), 300, 4
    results = [device.zeros((rounds, N), np.float32) for _ in range(count)]
    x = device.array(X)

    def work(number: int) -> None:
        with device.stream() as stream:
            for i in range(rounds):
                args = (x, results[number][i], N, float(1000 * number + i))
                kernel.launch(stream, grid=4 + number, block=256, args=args)

    in_threads(*[lambda number=number: work(number) for number in range(count)])
    for number, result in enumerate(results):
        want = X + (1000 * number + np.arange(rounds, dtype=np.float32))[:, None]
        np.testing.assert_array_equal(result.numpy(), want)


def test_threads_that_build_graphs_of_one_kernel_get_their_own_results(device: dk.Device, module: dk.Module) -> None:
    kernel, nodes, count = module.kernel("add"), 200, 4
    results = [device.zeros((nodes, N), np.float32) for _ in range(count)]
    x = device.array(X)

    def work(number: int) -> None:
        with device.stream() as stream, dk.Graph(device, f"of thread {number}") as graph:
            for i in range(nodes):
                args = (x, results[number][i], N, float(1000 * number + i))
                graph.kernel(kernel, grid=4 + number, block=256, args=args)
            with graph.instantiate() as exe:
                exe.launch(stream)
                stream.synchronize()

    in_threads(*[lambda number=number: work(number) for number in range(count)])
    for number, result in enumerate(results):
        want = X + (1000 * number + np.arange(nodes, dtype=np.float32))[:, None]
        np.testing.assert_array_equal(result.numpy(), want)


def test_threads_that_share_a_stream(device: dk.Device, module: dk.Module, stream: dk.Stream) -> None:
    order = device.zeros(2000, np.int32)

    def work(number: int) -> None:
        for i in range(400):
            module.kernel("append").launch(stream, grid=1, block=1, args=(order, 1000 * number + i))

    in_threads(*[lambda number=number: work(number) for number in range(4)])
    stream.synchronize()
    total, *values = order.numpy()[:1601].tolist()
    assert total == 1600
    for number in range(4):
        mine = [value for value in values if value // 1000 == number]
        assert mine == [1000 * number + i for i in range(400)]


def test_threads_that_launch_one_exec_and_wait_for_its_stream(
    device: dk.Device, module: dk.Module, stream: dk.Stream
) -> None:
    order, calls, rounds = device.zeros(2000, np.int32), [], 200
    graph = dk.Graph(device, "shared")
    append = graph.kernel(module.kernel("append"), grid=1, block=1, args=(order, 1), name="append")
    graph.host(lambda: calls.append(1), after=append)
    exe = graph.instantiate()
    done = threading.Event()

    def launch() -> None:
        for _ in range(rounds):
            exe.launch(stream)

    def wait() -> None:
        while not done.is_set():
            stream.synchronize()

    waiting = threading.Thread(target=wait)
    waiting.start()
    try:
        in_threads(launch, launch)
    finally:
        done.set()
        waiting.join()
    exe.close()
    graph.close()
    stream.synchronize()
    assert len(calls) == 2 * rounds
    assert order.numpy()[0] == 2 * rounds
