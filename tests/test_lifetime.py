"""Who keeps what alive: nothing that work in flight may touch is freed early, and nothing stays behind.

A kernel that is busy for a while holds a stream while the objects behind it are dropped or closed.
"""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernels import SOURCE

import drvkit as dk

HERE = Path(__file__).resolve().parent
N = 1000
X = np.arange(N, dtype=np.float32)
BUSY_MS = 150
SLACK_BYTES = 4 * 2**20


@pytest.fixture(scope="module")
def module(device: dk.Device) -> Iterator[dk.Module]:
    with device.module(SOURCE) as module:
        for name in ("spin", "scale", "append"):  # a kernel is loaded when it is first asked for, which may wait
            module.kernel(name)
        Everything(device, module).close(*NAMES)  # what the driver keeps for good after the first of a kind
        gc.collect()
        gc.freeze()  # a collection while a kernel is busy must not take longer than that
        yield module
        gc.unfreeze()


def hold(module: dk.Module, stream: dk.Stream) -> None:
    """Keep the stream busy."""
    module.kernel("spin").launch(stream, grid=1, block=1, args=(BUSY_MS,))


def kinds() -> Counter[str]:
    """How many driver objects of each kind there are."""
    gc.collect()
    return Counter(thing.kind for thing in dk.live())


def free_bytes(device: dk.Device) -> int:
    gc.collect()
    device.synchronize()
    return device.memory_bytes()[0]


class Poison:
    """Takes what memory is free, and writes nonsense there, without waiting for other streams."""

    def __init__(self, device: dk.Device, stream: dk.Stream) -> None:
        self.buffers = [device.empty(N, np.float32).fill(-7.0, stream) for _ in range(16)]

    def missed(self, address: int) -> bool:
        return all(buffer.address != address for buffer in self.buffers)


def let_go(thing: Any, how: str) -> None:
    """What a caller who is done with it does; with "drop" the caller's last reference must go, too."""
    if how == "close":
        thing.close()


each_end = pytest.mark.parametrize("how", ["close", "drop"])


# ---- in flight -----------------------------------------------------------------------------------------------------


@each_end
def test_buffers_of_a_launch(device: dk.Device, module: dk.Module, stream: dk.Stream, how: str) -> None:
    x, y, scale = device.array(X), device.zeros(N, np.float32), module.kernel("scale")
    address, there = x.address, kinds()
    with device.stream() as other:
        hold(module, stream)
        scale.launch(stream, grid=4, block=256, args=(x, y, N, 2.0))
        let_go(x, how)
        del x
        gc.collect()
        poison = Poison(device, other)
        assert not stream.done, "the launch was over too soon to show anything"
        assert poison.missed(address)
        stream.synchronize()
    np.testing.assert_array_equal(y.numpy(), X * 2)
    del poison
    assert kinds() == there - Counter(buffer=1)


@each_end
def test_a_window_keeps_the_whole(device: dk.Device, module: dk.Module, stream: dk.Stream, how: str) -> None:
    x, y, scale = device.array(X), device.zeros(N, np.float32), module.kernel("scale")
    with device.stream() as other:
        hold(module, stream)
        scale.launch(stream, grid=4, block=256, args=(x[500:], y, 500, 2.0))
        let_go(x, how)
        del x
        poison = Poison(device, other)
        assert not stream.done
        stream.synchronize()
    np.testing.assert_array_equal(y.numpy()[:500], X[500:] * 2)
    del poison


def test_cupy_arrays_of_a_launch(device: dk.Device, module: dk.Module, stream: dk.Stream, cupy: Any) -> None:
    x, y, scale = cupy.asarray(X), device.zeros(N, np.float32), module.kernel("scale")
    cupy.full(N, -7, np.float32)  # compiles it, which takes longer than the stream is held
    device.synchronize()
    alive = weakref.ref(x)
    hold(module, stream)
    scale.launch(stream, grid=4, block=256, args=(x, y, N, 2.0))
    del x
    gc.collect()
    assert alive() is not None
    nonsense = [cupy.full(N, -7, np.float32) for _ in range(16)]
    assert not stream.done
    stream.synchronize()
    np.testing.assert_array_equal(y.numpy(), X * 2)
    gc.collect()
    assert alive() is None, "what is done is let go"
    del nonsense


@each_end
def test_buffers_and_arrays_of_a_copy(device: dk.Device, module: dk.Module, stream: dk.Stream, how: str) -> None:
    x, y, host = device.array(X), device.zeros(N, np.float32), np.zeros_like(X)
    pinned = device.pinned(N, np.float32)
    pinned.host[:] = -X
    alive = weakref.ref(host)
    with device.stream() as other:
        hold(module, stream)
        y.copy_from(pinned, stream)
        y[:500].copy_from(x[:500], stream)
        let_go(x, how)
        let_go(pinned, how)
        del x, pinned
        poison = Poison(device, other)
        assert not stream.done
        stream.synchronize()
    np.testing.assert_array_equal(y.numpy(), np.where(X < 500, X, -X))
    y.copy_to(host, stream)
    del host
    assert alive() is not None
    stream.synchronize()
    assert alive() is None
    del poison


@each_end
def test_a_module_of_a_launch(device: dk.Device, module: dk.Module, stream: dk.Stream, how: str) -> None:
    x, y = device.array(X), device.zeros(N, np.float32)
    own = device.module(SOURCE)
    scale = own.kernel("scale")
    there = kinds()
    hold(module, stream)
    scale.launch(stream, grid=4, block=256, args=(x, y, N, 2.0))
    let_go(own, how)
    del own, scale
    assert kinds() == there, "its image is loaded as long as it may run"
    assert not stream.done
    stream.synchronize()
    np.testing.assert_array_equal(y.numpy(), X * 2)
    assert kinds() == there - Counter(module=1)


@each_end
def test_everything_of_an_exec(device: dk.Device, module: dk.Module, stream: dk.Stream, how: str) -> None:
    before, y, seen = kinds(), device.zeros(N, np.float32), device.zeros(N, np.float32)
    own = device.module(SOURCE)
    x, event, graph = device.array(X), device.event(), dk.Graph(device, "in flight")
    address = x.address
    scaled = graph.kernel(own.kernel("scale"), grid=4, block=256, args=(x, y, N, 2.0))
    graph.memcpy(seen, y, after=graph.record(event, after=scaled))
    exe = graph.instantiate()
    with device.stream() as other:
        hold(module, stream)
        exe.launch(stream)
        for thing in (x, event, graph, own, exe):
            let_go(thing, how)
        del x, event, graph, own, exe, thing, scaled
        gc.collect()
        poison = Poison(device, other)
        assert not stream.done
        assert poison.missed(address)
        stream.synchronize()
    np.testing.assert_array_equal(seen.numpy(), X * 2)
    del poison
    assert kinds() == before + Counter(buffer=2)


def test_what_an_exec_was_changed_to_and_from(device: dk.Device, module: dk.Module, stream: dk.Stream) -> None:
    """A launch in flight still reads what a change replaced; a launch to come reads what the caller has dropped."""
    old, new = device.array(X), device.array(-X)
    results = [device.zeros(N, np.float32), device.zeros(N, np.float32)]
    with dk.Graph(device, "changing") as graph:
        spun = graph.kernel(module.kernel("spin"), grid=1, block=1, args=(BUSY_MS,))
        graph.kernel(module.kernel("scale"), grid=4, block=256, args=(old, results[0], N, 2.0), name="node", after=spun)
        with graph.instantiate() as exe, device.stream() as other:
            exe.launch(stream)
            exe["node"].set(x=new, y=results[1])
            old.close()
            new.close()
            poison = Poison(device, other)
            assert not stream.done
            exe.launch(stream)
            stream.synchronize()
    np.testing.assert_array_equal(results[0].numpy(), X * 2)
    np.testing.assert_array_equal(results[1].numpy(), X * -2)
    del poison


@each_end
def test_an_event_that_another_stream_waits_for(
    device: dk.Device, module: dk.Module, stream: dk.Stream, how: str
) -> None:
    x, y, z = device.array(X), device.zeros(N, np.float32), device.zeros(N, np.float32)
    with device.stream() as other:
        hold(module, stream)
        y.copy_from(x, stream)
        event = stream.record()
        other.wait(event)
        let_go(event, how)
        del event
        z.copy_from(y, other)
        assert not other.done
        other.synchronize()
    np.testing.assert_array_equal(z.numpy(), X)


@each_end
def test_a_stream_with_work(device: dk.Device, module: dk.Module, how: str) -> None:
    x, y, there = device.array(X), device.zeros(N, np.float32), kinds()
    scale = module.kernel("scale")
    stream = device.stream()
    hold(module, stream)
    scale.launch(stream, grid=4, block=256, args=(x, y, N, 2.0))
    let_go(stream, how)
    x.close()
    del stream
    assert kinds() == there - Counter(buffer=1), "nothing refers to the stream any more, and it ends"
    np.testing.assert_array_equal(y.numpy(), X * 2)


def test_a_prepared_launch_keeps_what_it_takes(device: dk.Device, module: dk.Module, stream: dk.Stream) -> None:
    x, y = device.array(X), device.zeros(N, np.float32)
    ready = module.kernel("scale").prepare(stream, grid=4, block=256, args=(x, y, N, 2.0))
    with device.stream() as other:
        hold(module, stream)
        ready()
        x.close()
        del ready
        poison = Poison(device, other)
        assert not stream.done
        stream.synchronize()
    np.testing.assert_array_equal(y.numpy(), X * 2)
    del poison


def test_memory_of_a_pool_is_freed_in_the_order_of_its_stream(
    device: dk.Device, module: dk.Module, stream: dk.Stream
) -> None:
    y, there = device.zeros(N, np.float32), kinds()
    with device.pool() as pool:
        hold(module, stream)
        x = pool.empty(N, np.float32, stream)
        x.fill(3.0, stream)
        y.copy_from(x, stream)
        x.close()
        assert not stream.done
    stream.synchronize()
    np.testing.assert_array_equal(y.numpy(), np.full(N, 3))
    del x, pool
    assert kinds() == there


# ---- owners --------------------------------------------------------------------------------------------------------


def test_a_node_keeps_what_it_takes(device: dk.Device, stream: dk.Stream) -> None:
    x, y = device.array(X), device.zeros(N, np.float32)
    own = device.module(SOURCE)
    with dk.Graph(device, "keeping") as graph:
        graph.kernel(own.kernel("scale"), grid=4, block=256, args=(x, y, N, 2.0))
        own.close()
        x.close()
        poison = Poison(device, stream)
        exe = graph.instantiate()
        graph.close()
        exe.launch(stream)
        stream.synchronize()
        exe.close()
    np.testing.assert_array_equal(y.numpy(), X * 2)
    del poison


class Closes:
    """An array of a library that closes a module when it is asked where it is."""

    def __init__(self, module: dk.Module, behind: dk.Buffer) -> None:
        self.module, self.behind = module, behind

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        self.module.close()
        data = (self.behind.address, False)
        return {"version": 3, "data": data, "typestr": self.behind.dtype.str, "shape": self.behind.shape}


@pytest.mark.parametrize("how", ["launch", "prepare", "node", "configure"])
def test_a_kernel_that_its_own_argument_closes(
    device: dk.Device, module: dk.Module, stream: dk.Stream, how: str
) -> None:
    """It is refused, or what was made of it holds its image; and it cannot be used again."""
    x, own = device.array(X), device.module(SOURCE)
    kernel = own.kernel("scale")
    given: dict[str, Any] = {"grid": 4, "block": 256}
    kernel.launch(stream, args=(x, x, N, 1.0), **given)
    with dk.Graph(device, "of a closed kernel") as graph:
        args = (Closes(own, x), x, N, 2.0)
        graph.kernel(module.kernel("scale"), args=(x, x, N, 1.0), name="first", **given)
        if how in ("launch", "prepare"):
            with pytest.raises(dk.ClosedError, match="and kernel 'scale' with it"):
                getattr(kernel, how)(stream, args=args, **given)
        elif how == "node":
            graph.kernel(kernel, args=args, after=graph["first"], **given)
        exe = graph.instantiate()
        if how == "configure":
            exe["first"].configure(kernel=kernel, args=args)
        exe.launch(stream)
        stream.synchronize()
        np.testing.assert_array_equal(x.numpy(), X * (1 if how in ("launch", "prepare") else 2))
        for again in (kernel.launch, kernel.prepare):
            with pytest.raises(dk.ClosedError, match="and kernel 'scale' with it"):
                again(stream, args=(x, x, N, 1.0), **given)
        with pytest.raises(dk.ClosedError, match="and kernel 'scale' with it"):
            graph.kernel(kernel, args=(x, x, N, 1.0), **given)
        exe.close()
    assert not kernel._free_blocks, "they know the function"


def test_a_view_of_pinned_memory_outlives_its_buffer(device: dk.Device) -> None:
    before = kinds()
    pinned = device.pinned(N, np.float32)
    view = pinned.host[10:20]
    view[:] = 5
    pinned.close()
    del pinned
    assert kinds() == before + Counter(buffer=1)
    assert view.tolist() == [5] * 10
    del view
    assert kinds() == before


def test_what_others_see_of_a_buffer_keeps_it(device: dk.Device) -> None:
    before = kinds()
    capsule = device.array(X).__dlpack__()
    other = device.empty(1, np.int32)
    assert kinds() == before + Counter(buffer=2)
    del capsule
    other.close()  # looks for what nobody took
    assert kinds() == before


def test_a_moved_child_belongs_to_its_parent(device: dk.Device, stream: dk.Stream) -> None:
    x, before = device.zeros(4, np.int32), kinds()
    inner, parent = dk.Graph(device, "inner"), dk.Graph(device, "parent")
    inner.memset(x, 1)
    parent.child(inner, move=True)
    inner.close()
    with parent.instantiate() as exe:
        exe.launch(stream)
        stream.synchronize()
    assert x.numpy().tolist() == [1] * 4
    del exe, inner
    parent.close()
    del parent
    assert kinds() == before


def test_a_body_holds_its_graph(device: dk.Device) -> None:
    before = kinds()
    graph = dk.Graph(device, "around")
    body = graph.if_(graph.condition(default=1))
    del graph
    assert kinds() == before + Counter(graph=1)
    del body
    assert kinds() == before


def test_live_tells_what_there_is_and_where_it_was_made(device: dk.Device) -> None:
    before = dk.live()
    buffer, graph = device.empty(N, np.float32), dk.Graph(device, "mine")
    with device.event() as event:
        made = dk.live()[len(before) :]
        assert [thing.kind for thing in made] == ["buffer", "graph", "event"]
        assert all(thing.made_at.startswith("test_lifetime.py:") for thing in made)
        assert made[1].name == "mine"
        assert "4000 bytes of device memory" in str(made[0])
    assert event.closed
    buffer.close()
    graph.close()
    assert dk.live() == before


# ---- nothing stays behind ------------------------------------------------------------------------------------------


class Everything:
    """One object of each kind, all entangled."""

    def __init__(self, device: dk.Device, module: dk.Module) -> None:
        self.stream, self.pool, self.event = device.stream(), device.pool(), device.event()
        self.module = device.module(module.loaded[0].image)
        self.x, self.y = device.array(X), device.zeros(N, np.float32)
        self.pinned = device.pinned(N, np.float32)
        self.graph = dk.Graph(device, "entangled")
        args = (self.x, self.y, N, 2.0)
        self.kernel = self.module.kernel("scale")
        self.node: Any = self.graph.kernel(self.kernel, grid=4, block=256, args=args, name="scale")
        body = self.graph.if_(self.graph.condition(default=1), after=self.graph.record(self.event, after=self.node))
        body.memset(self.y, 1.0)
        with dk.Graph(device, "inner") as inner:
            inner.memcpy(self.pinned, self.x)
            self.graph.child(inner)
        self.exec = self.graph.instantiate()
        self.exec["scale"].set(alpha=3.0, x=self.y)
        self.exec.launch(self.stream)
        self.kernel.launch(self.stream, grid=4, block=256, args=args)

    def close(self, *names: str) -> None:
        for name in names:
            getattr(self, name).close()


NAMES = ("x", "y", "pinned", "module", "graph", "exec", "event", "pool", "stream")


@pytest.mark.parametrize("last", ["module", "exec", "graph", "x"])
def test_closing_everything_is_enough(device: dk.Device, module: dk.Module, last: str) -> None:
    """The closed objects may live on, and what they made: nodes, kernels, nodes of execs."""
    there, free = kinds(), free_bytes(device)
    everything = Everything(device, module)
    large = device.empty(2**26, np.uint8)
    everything.graph.memset(large, 0)
    everything.close(*(name for name in NAMES if name != last), last)
    large.close()
    assert kinds() == there
    assert abs(free_bytes(device) - free) <= SLACK_BYTES
    assert everything.node.name == "scale"


def test_dropping_everything_is_enough(device: dk.Device, module: dk.Module) -> None:
    there, free = kinds(), free_bytes(device)
    for _ in range(5):
        Everything(device, module)
    assert kinds() == there
    assert abs(free_bytes(device) - free) <= SLACK_BYTES


def test_any_order_of_closing_will_do(device: dk.Device, module: dk.Module) -> None:
    there = kinds()
    for order in itertools.permutations(("x", "module", "graph", "exec", "stream")):
        everything = Everything(device, module)
        everything.close(*order, "y", "pinned", "event", "pool")
        everything.close(*reversed(NAMES))  # a second time does nothing
        del everything
    assert kinds() == there


def test_a_thousand_rounds_leak_nothing(device: dk.Device, module: dk.Module, stream: dk.Stream) -> None:
    scale, order = module.kernel("scale"), device.zeros(2000, np.int32)

    def rounds(count: int) -> None:
        for i in range(count):
            x, y = device.array(X), device.empty(N, np.float32)
            graph = dk.Graph(device, "round")
            last: Any = graph.kernel(scale, grid=4, block=256, args=(x, y, N, 2.0))
            body = graph.if_(graph.condition(default=1), after=last)
            body.kernel(module.kernel("append"), grid=1, block=1, args=(order, i))
            last = graph.memcpy(np.empty_like(X), y, after=body.node)
            graph.host(int, after=graph.record(device.event(), after=last))
            exe = graph.instantiate()
            exe.launch(stream)
            if i % 50 == 49:
                stream.synchronize()
        stream.synchronize()

    rounds(50)
    there, free = kinds(), free_bytes(device)
    order.fill(0)
    rounds(1000)
    assert kinds() == there
    assert abs(free_bytes(device) - free) <= SLACK_BYTES
    assert order.numpy()[:1001].tolist() == [1000, *range(1000)], "every one of them ran"


def test_a_stream_that_is_never_synchronized_lets_go(device: dk.Device, module: dk.Module, stream: dk.Stream) -> None:
    before = kinds()
    with dk.Graph(device, "short") as graph:
        graph.empty()
        for _ in range(3000):
            graph.instantiate().launch(stream)
    assert kinds()["exec"] - before["exec"] < 2000
    stream.synchronize()
    del graph
    assert kinds() == before


# ---- releases in awkward places ------------------------------------------------------------------------------------


MAKERS: dict[str, Callable[[dk.Device, dk.Module], Any]] = {
    "buffer": lambda device, module: device.array(X),
    "pinned buffer": lambda device, module: device.pinned(N, np.float32),
    "stream": lambda device, module: device.stream(),
    "event": lambda device, module: device.event(),
    "module": lambda device, module: device.module(module.loaded[0].image),
    "pool": lambda device, module: device.pool(),
    "graph": lambda device, module: dk.Graph(device, "released"),
    "everything": Everything,
}


@each_end
@pytest.mark.parametrize("what", MAKERS)
def test_a_thread_without_a_context_may_be_the_last(device: dk.Device, module: dk.Module, what: str, how: str) -> None:
    there, failed = kinds(), []
    things = [MAKERS[what](device, module)]

    def release() -> None:
        thing = things.pop()
        try:
            if how == "drop":
                return
            if isinstance(thing, Everything):
                thing.close(*NAMES)
            else:
                thing.close()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=release)
    thread.start()
    thread.join()
    assert not failed
    assert kinds() == there
    device.synchronize()


@each_end
@pytest.mark.parametrize("what", MAKERS)
def test_what_is_dropped_during_a_capture_does_not_break_it(
    device: dk.Device, module: dk.Module, stream: dk.Stream, what: str, how: str
) -> None:
    y, there = device.zeros(4, np.int32), kinds()
    things = [MAKERS[what](device, module)]
    if isinstance(things[0], Everything):
        things[0].stream.close()  # which waits, as the caller asks for
    with dk.Graph(device, "captured") as graph:
        with graph.capture(stream):
            y.fill(1, stream)
            thing = things.pop()
            cycle: list[Any] = [thing]
            cycle.append(cycle)
            if how == "close" and what != "stream":  # closing a stream waits, which no capture allows
                for part in [getattr(thing, name) for name in NAMES] if what == "everything" else [thing]:
                    part.close()
                del part
            del thing, cycle
            gc.collect()
            y[:2].fill(2, stream)
        assert kinds() == there + Counter(graph=1), "it is released as soon as the capture is over"
        with graph.instantiate() as exe:
            exe.launch(stream)
            stream.synchronize()
    assert y.numpy().tolist() == [2, 2, 1, 1]


def test_what_is_made_and_dropped_during_a_capture(device: dk.Device, stream: dk.Stream) -> None:
    y, there = device.zeros(4, np.int32), kinds()
    with dk.Graph(device, "captured") as graph:
        with graph.capture(stream, mode="relaxed"):
            for i in range(3):
                y.copy_from(device.empty(4, np.int32), stream)
                y.fill(i, stream)
        gc.collect()
        with graph.instantiate() as exe:
            exe.launch(stream)
            stream.synchronize()
    assert y.numpy().tolist() == [2] * 4
    del graph, exe
    assert kinds() == there


@each_end
def test_what_a_host_node_drops_is_released_later_by_another_thread(
    device: dk.Device, stream: dk.Stream, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    threads: list[int] = []
    free = device.driver.cuMemFree

    def watched(*args: Any) -> None:
        threads.append(threading.get_ident())
        free(*args)

    monkeypatch.setattr(device.driver, "cuMemFree", watched)
    there = kinds()
    things: list[Any] = [device.array(X), device.array(X), device.event(), dk.Graph(device, "dropped")]
    seen: list[int] = []

    def drop() -> None:
        while things:
            let_go(things.pop(), how)
        gc.collect()
        seen.append(len(threads))

    with dk.Graph(device, "dropping") as graph:
        graph.host(drop)
        with graph.instantiate() as exe:
            exe.launch(stream)
            stream.synchronize()
            assert kinds() == there + Counter(graph=1, exec=1)
    assert not things
    assert seen == [0], "on a thread of the driver nothing is released"
    assert threads == [threading.get_ident()] * 2


@pytest.fixture
def released(device: dk.Device, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The driver's calls that release something, in their order, of what is made from now on."""
    calls: list[str] = []

    def watch(name: str) -> None:
        call = getattr(device.driver, name)

        def watched(*args: Any) -> None:
            calls.append(name)
            call(*args)

        monkeypatch.setattr(device.driver, name, watched)

    for name in ("cuGraphExecDestroy", "cuGraphDestroy", "cuMemPoolDestroy", "cuStreamDestroy"):
        watch(name)
    for name in ("cuMemFreeAsync", "cuMemFree"):  # before and after the stream is gone
        watch(name)
    return calls


@pytest.mark.parametrize("by", ["reference", "collector"])
def test_what_waits_for_the_end_of_a_capture_is_released_children_first(
    device: dk.Device, stream: dk.Stream, released: list[str], by: str
) -> None:
    y, there = device.zeros(4, np.int32), kinds()
    graph, own, pool = dk.Graph(device, "dropped"), device.stream(), device.pool()
    graph.memset(y, 1)
    exe, memory = graph.instantiate(), pool.empty(4, np.int32, own)
    own.synchronize()
    with dk.Graph(device, "capturing") as capturing:
        with capturing.capture(stream):
            y.fill(1, stream)
            cycle: list[Any] = [pool, own, memory, graph, exe]
            if by == "collector":
                cycle.append(cycle)
            del pool, own, memory, graph, exe, cycle
            gc.collect()
            assert released == []
        assert kinds() == there + Counter(graph=1)
    order = {name: released.index(name) for name in released}
    assert len(order) == 5
    if by == "reference":  # the collector takes those apart in any order, which the driver allows
        assert order["cuGraphExecDestroy"] < order["cuGraphDestroy"]
    if "cuMemFree" in order:
        assert order["cuStreamDestroy"] < order["cuMemFree"]
    else:
        assert order["cuMemFreeAsync"] < order["cuStreamDestroy"]


@pytest.mark.parametrize("settled", [False, True])
def test_dropping_a_stream_with_pending_memory_of_a_pool(
    device: dk.Device, module: dk.Module, released: list[str], settled: bool
) -> None:
    y, there = device.zeros(N, np.float32), kinds()
    stream, pool = device.stream(), device.pool()
    x = pool.empty(N, np.float32, stream)
    hold(module, stream)
    x.fill(3.0, stream)
    y.copy_from(x, stream)
    if settled:
        stream.settle()
    del x, pool, stream
    assert kinds() == there
    assert len(released) == 3
    if "cuMemFree" in released:
        assert released.index("cuStreamDestroy") < released.index("cuMemFree")
    else:
        assert released.index("cuMemFreeAsync") < released.index("cuStreamDestroy")
    np.testing.assert_array_equal(y.numpy(), np.full(N, 3))


# ---- errors of host nodes ------------------------------------------------------------------------------------------


def fails(message: str) -> Callable[[], None]:
    def fail() -> None:
        raise ValueError(message)

    return fail


@pytest.mark.parametrize("place", ["stream", "event", "device", "numpy"])
def test_an_error_of_a_host_node_arrives_and_nothing_is_lost(device: dk.Device, stream: dk.Stream, place: str) -> None:
    x, calls = device.zeros(4, np.int32), []
    with dk.Graph(device, "failing") as graph:
        first = graph.host(fails("first"), name="broken")
        second = graph.host(fails("second"), after=first)
        last = graph.memset(x, 1, after=graph.host(lambda: calls.append(1), after=second))
        with graph.instantiate() as exe:
            exe.launch(stream)
            event = stream.record()
            wait: Any = {"stream": stream, "event": event, "device": device}.get(place)
            with pytest.raises(ValueError, match="first") as told:
                x.numpy(stream) if wait is None else wait.synchronize()
            assert told.value.__notes__ == ["raised in host node 'broken' of graph 'failing'"]
            with pytest.raises(ValueError, match="second"):
                stream.synchronize()
            stream.synchronize()
            assert last.kind == "memset"
    assert calls == [1]
    assert x.numpy().tolist() == [1] * 4, "the graph went on"


def test_every_launch_may_fail_anew(device: dk.Device, stream: dk.Stream) -> None:
    with dk.Graph(device, "failing") as graph:
        graph.host(fails("again"))
        with graph.instantiate() as exe:
            for _ in range(3):
                exe.launch(stream)
                with pytest.raises(ValueError, match="again"):
                    stream.synchronize()


# ---- the end of the process ----------------------------------------------------------------------------------------

START = """
import numpy as np
import drvkit as dk
from kernels import SOURCE
dev = dk.Device("DEVICE")
module = dev.module(SOURCE)
spin, scale = module.kernel("spin"), module.kernel("scale")
stream = dev.stream()
x, y = dev.zeros(1000, np.float32), dev.zeros(1000, np.float32)
spin.launch(stream, grid=1, block=1, args=(100,))
"""

ENDS = {
    "a launch": "scale.launch(stream, grid=4, block=256, args=(x, y, 1000, 2.0))",
    "an exec": """
graph = dk.Graph(dev)
graph.host(int, after=graph.kernel(scale, grid=4, block=256, args=(x, y, 1000, 2.0)))
exe = graph.instantiate()
exe["scale#0"].set(alpha=3.0)
exe.launch(stream)
""",
    "a pool": "pool = dev.pool(); z = pool.empty(1000, np.float32, stream); z.fill(0, stream)",
    "a reference cycle": "stream.cycle = [stream, x, module]",
    "a thread": """
import threading
threading.Thread(target=scale.launch, args=(stream,), kwargs=dict(grid=4, block=256, args=(x, y, 1000, 2.0))).start()
""",
    "a view of pinned memory": "view = dev.pinned(10, np.float32).host",
    "an exit": "raise SystemExit(0)",
}


@pytest.mark.parametrize("what", ENDS)
def test_the_process_ends_well_with_work_in_flight(device: dk.Device, module: dk.Module, what: str) -> None:
    places = os.pathsep.join([str(HERE), str(HERE.parent)])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", START.replace("DEVICE", device.id) + ENDS[what]],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([places, os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
