"""Executable graphs on a device: what is changed by name is changed for the launches to come, and nothing else is."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from compare import assert_equal_bits
from kernels import OUT, SOURCE, TRIPLE, ints, scaled

import drvkit as dk

N = 1000
X = np.arange(1, N + 1, dtype=np.float32)


def run(exe: dk.Exec, stream: dk.Stream) -> None:
    exe.launch(stream)
    stream.synchronize()


# ---- kernels -------------------------------------------------------------------------------------------------------


def test_every_type_of_argument_is_updated_by_its_name(
    device: dk.Device, module: dk.Module, graph: dk.Graph, stream: dk.Stream
) -> None:
    def triple(a: int, b: float, c: int) -> Any:
        return np.array((a, b, c), TRIPLE)[()]

    old, new, out = ints(device, 1), ints(device, -1), device.zeros(1, OUT)
    before = {"b": False, "i8": 1, "u8": 2, "i16": 3, "u16": 4, "i32": 5, "u32": 6, "i64": 7, "u64": 8}
    after = {"b": True, "i8": -128, "u8": 255, "i16": -(2**15), "u16": 2**16 - 1, "i32": -(2**31), "u32": 2**32 - 1}
    after |= {"i64": -(2**63), "u64": 2**64 - 1}
    floats: dict[str, Any] = {"f32": 1.5, "f64": 2.5, "f16": 3.5, "bf16": 4.5, "triple": triple(1, 0.5, 2)}
    args: dict[str, Any] = before | floats | {"pointed": old, "out": out}
    graph.kernel(module.kernel("every_type"), grid=1, block=1, args=tuple(args.values()), name="all")
    want: dict[str, Any] = before | floats | {"pointed": 1}

    def check() -> None:
        run(exe, stream)
        got = out.numpy()[0]
        for name, value in want.items():
            if name == "bf16":
                assert got[name] == ml_dtypes.bfloat16(value).view(np.uint16), name
            else:
                assert got[name] == value, name

    exe = graph.instantiate()
    check()
    changes = after | {"f32": -0.1, "f64": -0.1, "f16": -0.25, "bf16": -256.0, "triple": triple(-1, -0.5, -2)}
    for name, value in changes.items():
        exe["all"].set(**{name: value})
        want[name] = np.float32(value) if name == "f32" else value
        check()
    exe["all"].set(pointed=new)
    want["pointed"] = -1
    check()
    exe["all"].set(i8=1, bf16=2.0, pointed=old)
    want |= {"i8": 1, "bf16": 2.0, "pointed": 1}
    check()


def test_the_definition_and_other_execs_stay_as_they_were(
    device: dk.Device, module: dk.Module, graph: dk.Graph, stream: dk.Stream
) -> None:
    x, y = device.array(X), device.zeros(N, np.float32)
    node = scaled(graph, module, x, y, 2.0, name="scale")
    first, second = graph.instantiate(), graph.instantiate()
    first["scale"].set(alpha=3.0)
    assert node.parameters["args"]["alpha"] == 2.0
    for exe, alpha in ((first, 3), (second, 2), (graph.instantiate(), 2)):
        run(exe, stream)
        np.testing.assert_array_equal(y.numpy(), X * alpha)


def test_a_launch_is_configured_anew(device: dk.Device, module: dk.Module, graph: dk.Graph, stream: dk.Stream) -> None:
    count = ints(device, 0)
    graph.kernel(module.kernel("count_threads"), grid=1, block=1, args=(count,), name="count")
    exe = graph.instantiate()
    total = 0
    for change, threads in (({}, 1), ({"grid": 5}, 5), ({"block": (4, 8)}, 160), ({"grid": (2, 3), "block": 7}, 42)):
        exe["count"].configure(**change)
        run(exe, stream)
        total += threads
        assert count.numpy().tolist() == [total]


def test_another_kernel_takes_the_place_of_one(
    device: dk.Device, module: dk.Module, graph: dk.Graph, stream: dk.Stream
) -> None:
    x, y = device.array(X), device.zeros(N, np.float32)
    scaled(graph, module, x, y, 2.0, name="node")
    exe = graph.instantiate()
    exe["node"].configure(kernel=module.kernel("add"), args=(x, y, N, 5.0))
    run(exe, stream)
    np.testing.assert_array_equal(y.numpy(), X + 5)
    exe["node"].set(value=6.0)
    run(exe, stream)
    np.testing.assert_array_equal(y.numpy(), X + 6)


def test_shared_memory_is_configured_anew(
    device: dk.Device, module: dk.Module, graph: dk.Graph, stream: dk.Stream
) -> None:
    values = np.arange(25_600, dtype=np.int32)
    x, y = device.array(values), device.zeros(25_600, np.int32)
    graph.kernel(module.kernel("reverse"), grid=1, block=256, args=(x, y, 16), shared_mem_bytes=64, name="node")
    exe = graph.instantiate()
    exe["node"].configure(shared_mem_bytes=102_400, args=(x, y, 25_600))
    run(exe, stream)
    np.testing.assert_array_equal(y.numpy(), values[::-1])


# ---- other nodes ---------------------------------------------------------------------------------------------------


def test_a_copy_is_updated(device: dk.Device, graph: dk.Graph, stream: dk.Stream) -> None:
    a, b, c, d = (ints(device, value, value) for value in (1, 2, 0, 0))
    graph.memcpy(c, a, name="copy")
    exe = graph.instantiate()
    exe["copy"].set(source=b)
    run(exe, stream)
    assert (c.numpy().tolist(), d.numpy().tolist()) == ([2, 2], [0, 0])
    exe["copy"].set(target=d)
    run(exe, stream)
    assert d.numpy().tolist() == [2, 2], "the source is the one that was set before"
    exe["copy"].set(target=c[:1], source=a[:1])
    run(exe, stream)
    assert (c.numpy().tolist(), d.numpy().tolist()) == ([1, 2], [2, 2])


def test_a_copy_from_the_host_is_updated(device: dk.Device, graph: dk.Graph, stream: dk.Stream) -> None:
    target, first, second = ints(device, 0, 0), np.array([1, 2], np.int32), np.array([3, 4], np.int32)
    graph.memcpy(target, first, name="copy")
    exe = graph.instantiate()
    exe["copy"].set(source=second)
    second[0] = 5
    run(exe, stream)
    assert target.numpy().tolist() == [5, 4]


def test_a_fill_is_updated(device: dk.Device, graph: dk.Graph, stream: dk.Stream) -> None:
    x, y = ints(device, 0, 0), ints(device, 0, 0)
    graph.memset(x, 1, name="fill")
    exe = graph.instantiate()
    exe["fill"].set(value=-2)
    run(exe, stream)
    assert x.numpy().tolist() == [-2, -2]
    exe["fill"].set(target=y)
    run(exe, stream)
    assert y.numpy().tolist() == [-2, -2], "the value is the one that was set before"


def test_events_are_updated(device: dk.Device, module: dk.Module, graph: dk.Graph, stream: dk.Stream) -> None:
    first, second, third = device.event(), device.event(), device.event()
    start = graph.record(first, name="start")
    busy = graph.kernel(module.kernel("spin"), grid=1, block=1, args=(3,), after=start)
    graph.record(second, after=busy, name="end")
    graph.wait(first, name="wait")
    exe = graph.instantiate()
    exe["end"].set(event=third)
    exe["wait"].set(event=device.event())
    run(exe, stream)
    assert first.elapsed_ms(third) >= 2.9
    with pytest.raises(dk.DriverError, match="cuEventElapsedTime"):  # it was never recorded
        first.elapsed_ms(second)


def test_a_host_function_is_updated(graph: dk.Graph, stream: dk.Stream) -> None:
    calls: list[str] = []
    graph.host(lambda: calls.append("old"), name="call")
    exe = graph.instantiate()
    run(exe, stream)
    exe["call"].set(function=lambda: calls.append("new"))
    gc.collect()
    run(exe, stream)
    run(exe, stream)
    assert calls == ["old", "new", "new"]


def test_a_child_is_updated_by_a_graph(device: dk.Device, graph: dk.Graph, stream: dk.Stream) -> None:
    x = ints(device, 0)
    with dk.Graph(device, "a") as a, dk.Graph(device, "b") as b:
        a.memset(x, 1)
        b.memset(x, 2)
        graph.child(a, name="kid")
        exe = graph.instantiate()
        exe["kid"].set(graph=b)
    run(exe, stream)
    assert x.numpy().tolist() == [2]


def test_memory_operations_are_updated(device: dk.Device, graph: dk.Graph, stream: dk.Stream) -> None:
    x, y = ints(device, 0), ints(device, 0)
    graph.mem_ops([dk.WriteValue(x, 1)], name="ops")
    exe = graph.instantiate()
    exe["ops"].set(ops=[dk.WriteValue(y, 2)])
    run(exe, stream)
    assert (x.numpy().tolist(), y.numpy().tolist()) == ([0], [2])


def test_updates_reach_into_children_and_bodies_by_path(
    device: dk.Device, module: dk.Module, graph: dk.Graph, stream: dk.Stream
) -> None:
    x, y, z = device.array(X), device.zeros(N, np.float32), device.zeros(N, np.float32)
    with dk.Graph(device, "inner") as inner:
        scaled(inner, module, x, y, 2.0, name="scale")
        graph.child(inner, name="kid")
    body = graph.if_(graph.condition(default=1), name="branch")
    scaled(body, module, x, z, 2.0, name="scale")
    exe = graph.instantiate()
    exe["kid/scale"].set(alpha=3.0)
    exe["branch/then/scale"].set(alpha=4.0)
    run(exe, stream)
    np.testing.assert_array_equal(y.numpy(), X * 3)
    np.testing.assert_array_equal(z.numpy(), X * 4)


# ---- switching -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["kernel", "memcpy", "memset"])
def test_a_node_is_disabled_and_enabled(
    device: dk.Device, module: dk.Module, graph: dk.Graph, stream: dk.Stream, kind: str
) -> None:
    x, y, last = ints(device, 5), ints(device, 0), ints(device, 0)
    if kind == "kernel":
        node: Any = graph.kernel(module.kernel("store"), grid=1, block=1, args=(y, 5), name="node")
    elif kind == "memcpy":
        node = graph.memcpy(y, x, name="node")
    else:
        node = graph.memset(y, 5, name="node")
    graph.memcpy(last, x, after=node)
    exe = graph.instantiate()
    assert exe["node"].enabled
    exe["node"].disable()
    assert not exe["node"].enabled
    run(exe, stream)
    assert (y.numpy().tolist(), last.numpy().tolist()) == ([0], [5]), "what comes after it runs all the same"
    exe["node"].enable()
    assert exe["node"].enabled
    run(exe, stream)
    assert y.numpy().tolist() == [5]


def test_a_disabled_node_can_be_updated(device: dk.Device, graph: dk.Graph, stream: dk.Stream) -> None:
    x = ints(device, 0)
    graph.memset(x, 1, name="fill")
    exe = graph.instantiate()
    exe["fill"].disable()
    exe["fill"].set(value=2)
    exe["fill"].enable()
    run(exe, stream)
    assert x.numpy().tolist() == [2]


# ---- whole graphs --------------------------------------------------------------------------------------------------


def version(device: dk.Device, x: Any, y: Any, value: int) -> dk.Graph:
    """A fill of ``x`` and a copy of it to ``y``; all versions have the same structure."""
    graph = dk.Graph(device, f"version {value}")
    graph.memcpy(y, x, name="copy", after=graph.memset(x, value, name="fill"))
    return graph


def test_a_whole_graph_is_taken_over(device: dk.Device, stream: dk.Stream) -> None:
    x, y, u, v = (ints(device, 0) for _ in range(4))
    with version(device, x, y, 1) as old, old.instantiate() as exe:
        run(exe, stream)
        with version(device, u, v, 2) as new:
            exe.update(new)
        gc.collect()
        run(exe, stream)
    assert [b.numpy().tolist() for b in (x, y, u, v)] == [[1], [1], [2], [2]]


@pytest.mark.parametrize("found", ["before", "after"])
def test_what_is_not_named_after_an_update_is_what_it_took_over(
    device: dk.Device, stream: dk.Stream, found: str
) -> None:
    x, y, u, v = (ints(device, 0) for _ in range(4))
    with version(device, x, y, 1) as old, version(device, u, v, 2) as new, old.instantiate() as exe:
        if found == "before":
            exe["fill"].set(value=5)
        exe.update(new)
        exe["fill"].set(value=3)
        run(exe, stream)
    assert [b.numpy().tolist() for b in (x, y, u, v)] == [[0], [0], [3], [3]]


@pytest.mark.parametrize("found", ["before", "after"])
def test_a_kernel_argument_after_an_update(device: dk.Device, module: dk.Module, stream: dk.Stream, found: str) -> None:
    x, y, z = device.array(X), device.zeros(N, np.float32), device.zeros(N, np.float32)
    with dk.Graph(device, "old") as old, dk.Graph(device, "new") as new:
        scaled(old, module, x, y, 2.0, name="scale")
        scaled(new, module, x, z, 3.0, name="scale")
        with old.instantiate() as exe:
            if found == "before":
                exe["scale"].set(alpha=9.0)
            exe.update(new)
            run(exe, stream)
            np.testing.assert_array_equal(z.numpy(), X * 3)
            exe["scale"].set(alpha=4.0)
            run(exe, stream)
    np.testing.assert_array_equal(z.numpy(), X * 4)
    assert not y.numpy().any()


def test_an_update_that_is_refused_changes_nothing(device: dk.Device, stream: dk.Stream) -> None:
    x, y, z = (ints(device, 0) for _ in range(3))
    with version(device, x, y, 1) as old, dk.Graph(device, "other") as other, old.instantiate() as exe:
        other.memset(z, 2, name="fill")
        with pytest.raises(dk.GraphError, match="the structure differs"):
            exe.update(other)
        run(exe, stream)
    assert [b.numpy().tolist() for b in (x, y, z)] == [[1], [1], [0]]


def test_an_update_by_a_graph_with_other_names(
    device: dk.Device, module: dk.Module, graph: dk.Graph, stream: dk.Stream
) -> None:
    """Its parameters are taken over, but whose they are is not known: what is changed must be given whole."""
    x, y, z = device.array(X), device.zeros(N, np.float32), device.zeros(N, np.float32)
    u, v, w = ints(device, 0), ints(device, 0), ints(device, 5)

    def fill(graph: dk.Graph, names: str, to: dk.Buffer, alpha: float, a: dk.Buffer, b: dk.Buffer) -> None:
        first, second, third = names.split()
        last = scaled(graph, module, x, to, alpha, name=first)
        graph.memcpy(b, a, name=third, after=graph.memset(a, int(alpha), name=second, after=last))

    fill(graph, "scale fill copy", y, 2.0, u, v)
    exe = graph.instantiate()
    known = exe["scale"]
    with dk.Graph(device, "other") as other:
        fill(other, "a b c", z, 3.0, v, u)
        exe.update(other)
    run(exe, stream)
    np.testing.assert_array_equal(z.numpy(), X * 3)
    assert (u.numpy().tolist(), v.numpy().tolist()) == ([3], [3])
    assert not y.numpy().any()
    for node in (known, exe["scale"]):
        with pytest.raises(
            dk.GraphError, match=r"'scale': its parameters are not known .* give kernel, grid, block and args"
        ):
            node.set(alpha=4.0)
        with pytest.raises(dk.GraphError, match="give kernel, grid, block and args"):
            node.configure(grid=4)
    with pytest.raises(dk.GraphError, match=r"'fill': its parameters are not known .* give target and value"):
        exe["fill"].set(value=4)
    with pytest.raises(dk.GraphError, match=r"'copy': its parameters are not known .* give target and source"):
        exe["copy"].set(source=w)
    exe["scale"].configure(kernel=module.kernel("scale"), grid=4, block=256, args=(x, y, N, 4.0))
    exe["scale"].set(alpha=5.0)
    exe["fill"].set(target=u, value=6)
    exe["fill"].set(value=7)
    exe["copy"].set(target=v, source=w)
    run(exe, stream)
    np.testing.assert_array_equal(y.numpy(), X * 5)
    assert (u.numpy().tolist(), v.numpy().tolist()) == ([7], [5])


def test_an_update_by_a_graph_with_its_names_in_another_order(device: dk.Device, stream: dk.Stream) -> None:
    x, y, u, v = (ints(device, 0) for _ in range(4))
    with dk.Graph(device, "old") as old, dk.Graph(device, "new") as new:
        old.memset(x, 1, name="a")
        old.memset(y, 2, name="b")
        new.memset(v, 4, name="b")
        new.memset(u, 3, name="a")
        with old.instantiate() as exe:
            exe.update(new)
            run(exe, stream)
            assert [b.numpy().tolist() for b in (x, y, u, v)] == [[0], [0], [3], [4]]
            for name in "ab":
                with pytest.raises(dk.GraphError, match="give target and value"):
                    exe[name].set(value=5)
            exe["a"].set(target=x, value=5)
            exe["b"].set(target=y, value=6)
            run(exe, stream)
            assert [b.numpy().tolist() for b in (x, y, u, v)] == [[5], [6], [3], [4]]


@pytest.mark.parametrize("change", ["none", "order", "rewired"])
def test_an_update_by_a_graph_with_its_edges_in_another_order(
    device: dk.Device, stream: dk.Stream, change: str
) -> None:
    """The driver pairs nodes by the order of edges; which parameters a node has then is not told by its name."""
    x, y, z, u, v, w = (ints(device, 0) for _ in range(6))
    with dk.Graph(device, "old") as old, dk.Graph(device, "new") as new:
        for graph, (a, b, c) in ((old, (x, y, z)), (new, (u, v, w))):
            fills = [graph.memset(a, 1, name="a"), graph.memset(b, 2, name="b")]
            graph.memset(c, 3, name="c", after=fills if graph is old or change != "order" else fills[::-1])
        with old.instantiate() as exe:
            if change == "rewired":  # not what the exec was made of
                for name in "ab":
                    old.remove_edge(old[name], old["c"])
                    old.add_edge(old[name], old["c"])
            exe.update(new)
            if change == "none":
                exe["a"].set(value=5)
                run(exe, stream)
                assert [b.numpy().tolist() for b in (u, v, w)] == [[5], [2], [3]]
                return
            with pytest.raises(dk.GraphError, match="give target and value"):
                exe["a"].set(value=5)
            for name, target in zip("abc", (x, y, z), strict=True):
                exe[name].set(target=target, value=7)
            run(exe, stream)
    assert [b.numpy().tolist() for b in (x, y, z, u, v, w)] == [[7]] * 3 + [[0]] * 3


def test_an_argument_inside_of_a_child_that_was_updated(
    device: dk.Device, module: dk.Module, graph: dk.Graph, stream: dk.Stream
) -> None:
    x, y, z = device.array(X), device.zeros(N, np.float32), device.zeros(N, np.float32)
    u, v = ints(device, 0), ints(device, 0)
    with dk.Graph(device, "a") as a, dk.Graph(device, "b") as b:
        a.memset(u, 1, name="fill", after=scaled(a, module, x, y, 2.0, name="scale"))
        b.memset(v, 2, name="fill", after=scaled(b, module, x, z, 3.0, name="scale"))
        graph.child(a, name="kid")
        exe = graph.instantiate()
        exe["kid"].set(graph=b)
        exe["kid/scale"].set(alpha=4.0)
        exe["kid/fill"].set(value=5)
        run(exe, stream)
    np.testing.assert_array_equal(z.numpy(), X * 4)
    assert not y.numpy().any()
    assert (u.numpy().tolist(), v.numpy().tolist()) == ([0], [5])


# ---- a change that fails -------------------------------------------------------------------------------------------


class World:
    """A graph with nodes to be changed wrongly, and what it does when it is as it was."""

    def __init__(self, device: dk.Device, module: dk.Module) -> None:
        self.x, self.y = device.array(X), device.zeros(N, np.float32)
        self.filled, self.copied = ints(device, 0, 0), ints(device, 0, 0)
        self.doubles = device.zeros(2, np.float64)
        self.calls: list[int] = []
        self.graph = dk.Graph(device, "tested")
        scaled(self.graph, module, self.x, self.y, 2.0, name="scale")
        self.graph.memset(self.filled, 1, name="fill")
        self.graph.memcpy(self.copied, ints(device, 3, 4), name="copy")
        self.graph.host(lambda: self.calls.append(1), name="call")
        self.exe = self.graph.instantiate()

    def check(self, stream: dk.Stream) -> None:
        run(self.exe, stream)
        assert self.filled.numpy().tolist() == [1, 1]
        assert self.copied.numpy().tolist() == [3, 4]
        assert self.calls == [1]
        np.testing.assert_array_equal(self.y.numpy(), X * 2)


WRONG: list[tuple[str, Callable[[Any, World], Any]]] = [
    ("scale", lambda node, w: node.set(alpha=3.0, n="all")),
    ("scale", lambda node, w: node.set(alpha=3.0, beta=1.0)),
    ("scale", lambda node, w: node.set(alpha=3.0, y=w.doubles)),
    ("scale", lambda node, w: node.set(n=1, alpha=None)),
    ("scale", lambda node, w: node.configure(grid=1, args=(w.x, w.y, N))),
    ("scale", lambda node, w: node.configure(grid=1, block=10**6)),
    ("scale", lambda node, w: node.configure(shared_mem_bytes=10**9)),
    ("fill", lambda node, w: node.set(value=0.5)),
    ("fill", lambda node, w: node.set(value=2, target=np.zeros(2, np.int32))),
    ("copy", lambda node, w: node.set(source=w.doubles)),
    ("copy", lambda node, w: node.set(source=w.filled, other=1)),
    ("call", lambda node, w: node.set(function=5)),
    ("call", lambda node, w: node.disable()),
]


@pytest.mark.parametrize(("name", "act"), WRONG)
def test_a_change_that_fails_leaves_everything_as_it_was(
    device: dk.Device, module: dk.Module, stream: dk.Stream, name: str, act: Callable[..., Any]
) -> None:
    world = World(device, module)
    with pytest.raises((TypeError, ValueError, dk.GraphError)):
        act(world.exe[name], world)
    world.check(stream)


def test_a_right_change_after_a_wrong_one(
    device: dk.Device, module: dk.Module, graph: dk.Graph, stream: dk.Stream
) -> None:
    x, y = device.array(X), device.zeros(N, np.float32)
    scaled(graph, module, x, y, 2.0, name="scale")
    exe = graph.instantiate()
    with pytest.raises(dk.ArgumentError):
        exe["scale"].set(n=1, alpha="3")
    exe["scale"].set(alpha=3.0)
    run(exe, stream)
    np.testing.assert_array_equal(y.numpy(), X * 3)


class Broken:
    """Another library's array whose protocol fails."""

    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    @property
    def __cuda_array_interface__(self) -> Any:
        raise self.error("broken")


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyError, TypeError, MemoryError])
@pytest.mark.parametrize(
    ("name", "change"),
    [("scale", {"alpha": 3.0, "y": ...}), ("fill", {"value": 2, "target": ...}), ("copy", {"source": ...})],
)
def test_a_change_by_a_broken_array_leaves_everything_as_it_was(
    device: dk.Device,
    module: dk.Module,
    stream: dk.Stream,
    name: str,
    change: dict[str, Any],
    error: type[Exception],
) -> None:
    world = World(device, module)
    with pytest.raises(error, match="broken"):
        world.exe[name].set(**{key: Broken(error) if value is ... else value for key, value in change.items()})
    world.check(stream)


@pytest.mark.parametrize(
    "change",
    [{"alpha": 3.0, "n": "all"}, {"y": ..., "alpha": None}, {"n": 1, "beta": 1.0}, {"n": 1, "x": Broken(KeyError)}],
)
def test_a_prepared_launch_is_changed_as_a_whole_or_not_at_all(
    device: dk.Device, module: dk.Module, stream: dk.Stream, change: dict[str, Any]
) -> None:
    x, y, z = device.array(X), device.zeros(N, np.float32), device.zeros(N, np.float32)
    ready = module.kernel("scale").prepare(stream, grid=4, block=256, args=(x, y, N, 2.0))
    before = bytes(ready._arguments.memory)
    with pytest.raises((dk.ArgumentError, KeyError)):
        ready.set(**{key: z if value is ... else value for key, value in change.items()})
    assert bytes(ready._arguments.memory) == before
    ready()
    stream.synchronize()
    np.testing.assert_array_equal(y.numpy(), X * 2)
    assert not z.numpy().any()


def test_a_node_that_was_removed_cannot_be_changed_in_an_exec(
    device: dk.Device, module: dk.Module, graph: dk.Graph, stream: dk.Stream
) -> None:
    x, y, z = device.array(X), device.zeros(N, np.float32), ints(device, 0)
    nodes = [scaled(graph, module, x, y, 2.0, name="scale"), graph.memset(z, 1, name="fill")]
    exe = graph.instantiate()
    found = exe["scale"], exe["fill"]
    for node in nodes:
        graph.remove(node)
    changes: list[dict[str, Any]] = [{"alpha": 3.0}, {"value": 2}]
    for node, change in zip(found, changes, strict=True):
        with pytest.raises(dk.GraphError, match=r"exec of graph 'tested': .*it was removed from its graph"):
            node.set(**change)
        with pytest.raises(dk.GraphError, match=r"exec of graph 'tested': .*it was removed from its graph"):
            node.disable()
    with pytest.raises(dk.GraphError, match="removed"):
        found[0].configure(grid=1)
    graph.memset(z, 5, name="fill")  # another node of that name is not the one of the exec
    with pytest.raises(dk.GraphError):
        exe["fill"].set(value=6)
    run(exe, stream)
    assert z.numpy().tolist() == [1]
    np.testing.assert_array_equal(y.numpy(), X * 2)


# ---- what an exec keeps --------------------------------------------------------------------------------------------


def poison(device: dk.Device) -> list[dk.Buffer]:
    """Takes what memory is free, and writes nonsense there."""
    gc.collect()
    return [device.array(np.full(N, -7, np.float32)) for _ in range(16)]


def kinds() -> Counter[str]:
    """How many driver objects of each kind there are."""
    gc.collect()
    return Counter(thing.kind for thing in dk.live())


def test_replaced_buffers_are_kept_in_flight_and_let_go_afterwards(
    device: dk.Device, module: dk.Module, graph: dk.Graph, stream: dk.Stream
) -> None:
    swaps = 200
    inputs: list[Any] = [device.array(np.full(4, i, np.float32)) for i in range(swaps)]
    y = device.zeros((swaps, 4), np.float32)
    spun = graph.kernel(module.kernel("spin"), grid=1, block=1, args=(0,), name="spin")
    graph.kernel(module.kernel("scale"), grid=1, block=32, args=(inputs[0], y[0], 4, 2.0), name="scale", after=spun)
    exe = graph.instantiate()
    before = kinds()["buffer"]
    module.kernel("spin").launch(stream, grid=1, block=1, args=(100,))
    for i in range(swaps):
        exe["scale"].set(x=inputs[i], y=y[i])
        exe.launch(stream)
        inputs[i] = None
    assert kinds()["buffer"] == before, "they may be in use"
    stream.synchronize()
    assert kinds()["buffer"] <= before - swaps + 3
    np.testing.assert_array_equal(y.numpy()[:, 0], 2 * np.arange(swaps))
    for i in range(swaps):  # without a launch in between they are in nobody's way
        exe["scale"].set(x=device.array(np.full(4, i, np.float32)))
    assert kinds()["buffer"] <= before - swaps + 3


def test_another_kernel_in_an_exec_keeps_its_image(
    device: dk.Device, module: dk.Module, graph: dk.Graph, stream: dk.Stream
) -> None:
    x, y = device.array(X), device.zeros(N, np.float32)
    scaled(graph, module, x, y, 2.0, name="node")
    exe = graph.instantiate()
    before, own = kinds(), device.module(SOURCE)
    exe["node"].configure(kernel=own.kernel("add"), args=(x, y, N, 5.0))
    own.close()
    assert kinds() == before + Counter(module=1)
    exe["node"].set(value=6.0)
    exe["node"].configure(grid=5)
    run(exe, stream)
    np.testing.assert_array_equal(y.numpy(), X + 6)
    exe.close()
    assert kinds() == before - Counter(exec=1)


@pytest.mark.parametrize("found", ["before", "after"])
def test_a_node_of_a_closed_module_can_be_changed_in_an_exec(
    device: dk.Device, graph: dk.Graph, stream: dk.Stream, found: str
) -> None:
    x, y = device.array(X), device.zeros(N, np.float32)
    own = device.module(SOURCE)
    scaled(graph, own, x, y, 2.0, name="node")
    exe = graph.instantiate()
    if found == "before":
        exe["node"].set(alpha=9.0)
    own.close()
    exe["node"].set(alpha=3.0)
    exe["node"].configure(grid=5)
    run(exe, stream)
    np.testing.assert_array_equal(y.numpy(), X * 3)


@pytest.mark.parametrize("call", ["set", "launch", "update"])
def test_what_is_closed_during_a_call_outlives_it(
    device: dk.Device, module: dk.Module, stream: dk.Stream, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """As another thread may do, because the GIL is released meanwhile."""
    x, names = device.array(X), ("closed meanwhile", "other")
    graph, other = (dk.Graph(device, name) for name in names)
    for each in (graph, other):
        scaled(each, module, x, x, 1.0, name="node")
    exe = graph.instantiate()
    node = exe["node"]
    during: list[str] = []

    def there() -> list[str]:
        gc.collect()
        return sorted(f"{thing.kind} {thing.name}" for thing in dk.live() if thing.name in names)

    def closing(function: Callable[..., int]) -> Callable[..., int]:
        def closes(*args: int) -> int:
            for each in (exe, graph, other):
                each.close()
            during.extend(there())
            return function(*args)

        return closes

    if call == "set":
        monkeypatch.setattr(node, "_apply", closing(node._apply))
        node.set(alpha=2.0)
    elif call == "launch":
        monkeypatch.setattr(exe, "_launch", closing(exe._launch))
        exe.launch(stream)
        stream.synchronize()
    else:
        raw = device.driver.raw
        monkeypatch.setattr(device.driver, "raw", lambda *how: closing(raw(*how)))
        exe.update(other)
        monkeypatch.undo()
    used = ["exec closed meanwhile", "graph closed meanwhile"]
    assert during == (used if call != "update" else [*used, "graph other"])
    assert there() == []
    with pytest.raises(dk.ClosedError, match="exec of graph 'closed meanwhile' is closed"):
        node.set(alpha=3.0)


@pytest.mark.parametrize("way", ["update", "child"])
def test_an_update_keeps_the_memory_of_the_other_graph(
    device: dk.Device, module: dk.Module, graph: dk.Graph, stream: dk.Stream, way: str
) -> None:
    x, y, z = device.array(-X), device.zeros(N, np.float32), device.zeros(N, np.float32)
    new = device.array(X)
    with dk.Graph(device, "a") as a, dk.Graph(device, "b") as b:
        for part, source in ((a, x), (b, new)):
            part.memcpy(z, source, name="copy", after=scaled(part, module, source, y, 2.0, name="scale"))
        if way == "child":
            graph.child(a, name="kid")
        exe = (graph if way == "child" else a).instantiate()
        if way == "child":
            exe["kid"].set(graph=b)
        else:
            exe.update(b)
    new.close()
    del new, source, part, a, b
    taken = poison(device)
    run(exe, stream)
    np.testing.assert_array_equal(y.numpy(), X * 2)
    np.testing.assert_array_equal(z.numpy(), X)
    exe.close()
    del taken


def test_a_clone_keeps_its_memory(device: dk.Device, stream: dk.Stream) -> None:
    x, y, z = device.array(X), device.zeros(N, np.float32), device.zeros(N, np.float32)
    own = device.module(SOURCE)
    original, inner = dk.Graph(device, "original"), dk.Graph(device, "inner")
    inner.memcpy(z, x)
    original.child(inner, after=scaled(original, own, x, y, 2.0, name="scale"))
    copy, _ = original.clone("copy")
    for thing in (x, own, inner, original):
        thing.close()
    del x, inner, original, _
    taken = poison(device)
    with copy, copy.instantiate() as exe:
        run(exe, stream)
    np.testing.assert_array_equal(y.numpy(), X * 2)
    np.testing.assert_array_equal(z.numpy(), X)
    del taken


def test_fills_and_copies_keep_their_memory(device: dk.Device, graph: dk.Graph, stream: dk.Stream) -> None:
    x, y, z = device.array(X), device.empty(N, np.float32), device.zeros(N, np.float32)
    filled = graph.memset(y[N // 2 :], 5.0, after=graph.memcpy(y, x))
    graph.memcpy(z, y, after=filled)
    del x
    y.close()
    taken = poison(device)
    exe = graph.instantiate()
    graph.close()
    run(exe, stream)
    np.testing.assert_array_equal(z.numpy(), np.where(np.arange(N) < N // 2, X, 5))
    exe.close()
    del taken


def test_nodes_of_an_exec_can_be_changed_when_the_graph_is_closed(
    device: dk.Device, module: dk.Module, stream: dk.Stream
) -> None:
    x, y = device.array(X), device.zeros(N, np.float32)
    a, b, c = ints(device, 0), ints(device, 0), ints(device, 9)
    with dk.Graph(device, "closed") as graph:
        scaled(graph, module, x, y, 2.0, name="scale")
        graph.memset(a, 1, name="fill")
        graph.memcpy(b, a, name="copy")
        exe = graph.instantiate()
    exe["scale"].set(alpha=3.0)
    with pytest.raises(dk.GraphError, match=r"its parameters are not known.*: give target and value"):
        exe["fill"].set(value=4)
    exe["fill"].set(target=a, value=4)
    exe["copy"].set(target=b, source=c)
    exe["copy"].set(source=c)
    run(exe, stream)
    np.testing.assert_array_equal(y.numpy(), X * 3)
    assert (a.numpy().tolist(), b.numpy().tolist()) == ([4], [9])


def test_what_attributes_and_event_nodes_refer_to_is_held(
    device: dk.Device, module: dk.Module, stream: dk.Stream
) -> None:
    x, y, before = device.array(X), device.zeros(N, np.float32), kinds()
    graph, window, event = dk.Graph(device, "holding"), device.array(X), device.event()
    end = scaled(graph, module, x, y, 2.0, access_policy_window=dk.AccessPolicyWindow(window, 0.5))
    graph.record(event, after=end)
    del window, event, end
    held = kinds() - before
    assert held == Counter(graph=1, buffer=1, event=1)
    exe = graph.instantiate()
    graph.close()
    assert kinds() - before == held + Counter(exec=1)
    run(exe, stream)
    np.testing.assert_array_equal(y.numpy(), X * 2)
    exe.close()
    assert kinds() == before, "what is closed holds nothing"
    del graph, exe


def test_the_event_of_a_launch_is_held(device: dk.Device, module: dk.Module, stream: dk.Stream) -> None:
    x, y, before = device.array(X), device.zeros(N, np.float32), kinds()
    event = device.event(timing=False)
    module.kernel("scale").launch(stream, grid=4, block=256, args=(x, y, N, 2.0), launch_completion_event=event)
    del event
    assert kinds() == before + Counter(event=1)
    stream.synchronize()
    assert kinds() == before


# ---- launching -----------------------------------------------------------------------------------------------------


def test_a_change_is_for_the_launches_to_come(
    device: dk.Device, module: dk.Module, graph: dk.Graph, stream: dk.Stream
) -> None:
    x, results = device.array(X), [device.zeros(N, np.float32) for _ in range(3)]
    spun = graph.kernel(module.kernel("spin"), grid=1, block=1, args=(5,))
    scaled(graph, module, x, results[0], 1.0, name="scale", after=spun)
    exe = graph.instantiate()
    for i, result in enumerate(results):
        exe["scale"].set(y=result, alpha=float(i + 1))
        exe.launch(stream)
    stream.synchronize()
    for i, result in enumerate(results):
        np.testing.assert_array_equal(result.numpy(), X * (i + 1))


def test_launches_on_several_streams_follow_each_other(
    device: dk.Device, module: dk.Module, graph: dk.Graph, stream: dk.Stream
) -> None:
    order = device.zeros(64, np.int32)
    graph.kernel(module.kernel("append"), grid=1, block=1, args=(order, 1))
    exe = graph.instantiate()
    with device.stream() as other:
        for _ in range(10):
            exe.launch(stream)
            exe.launch(other)
        stream.synchronize()
        other.synchronize()
    assert order.numpy()[0] == 20, "two at a time would lose some"


def test_upload_brings_no_work(device: dk.Device, graph: dk.Graph, stream: dk.Stream) -> None:
    x = ints(device, 0)
    graph.memset(x, 1)
    exe = graph.instantiate()
    exe.upload(stream)
    stream.synchronize()
    assert x.numpy().tolist() == [0]
    run(exe, stream)
    assert x.numpy().tolist() == [1]


def test_the_time_of_a_launch(device: dk.Device, module: dk.Module, graph: dk.Graph, stream: dk.Stream) -> None:
    calls: list[int] = []
    spun = graph.kernel(module.kernel("spin"), grid=1, block=1, args=(2,))
    graph.host(lambda: calls.append(1), after=spun)
    exe = graph.instantiate()
    assert 1.9 <= exe.time_ms(stream, 3) < 100
    assert len(calls) == 3
    assert exe.time_ms(stream) >= 1.9


@pytest.mark.parametrize("flag", ["use_node_priority", "device_launch"])
def test_flags_of_instantiation(
    device: dk.Device, module: dk.Module, graph: dk.Graph, stream: dk.Stream, flag: str
) -> None:
    x, y = device.array(X), device.zeros(N, np.float32)
    scaled(graph, module, x, y, 2.0, **({"priority": -1} if flag == "use_node_priority" else {}))
    exe = graph.instantiate(**{flag: True}, upload=stream)
    if flag == "device_launch":  # the driver does not tell of the other one
        told = int(device.driver.cuGraphExecGetFlags(exe.handle))
        assert told & int(device.driver.CUgraphInstantiate_flags.CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH)
    run(exe, stream)
    np.testing.assert_array_equal(y.numpy(), X * 2)


def test_auto_free_frees_before_the_next_launch(device: dk.Device, graph: dk.Graph, stream: dk.Stream) -> None:
    y = ints(device, 0, 0)
    alloc = graph.alloc(2, np.int32)
    filled = graph.memset(alloc.buffer, 3, after=alloc)
    graph.memcpy(y, alloc.buffer, after=filled)
    exe = graph.instantiate(auto_free=True)
    for _ in range(3):
        run(exe, stream)
    assert y.numpy().tolist() == [3, 3]
    device.driver.cuMemFreeAsync(alloc.buffer.address, stream.handle)  # of the last launch, which no other follows


def test_memory_that_a_launch_leaves_is_used_by_the_next_graph(
    device: dk.Device, graph: dk.Graph, stream: dk.Stream
) -> None:
    y = ints(device, 0, 0)
    alloc = graph.alloc(2, np.int32)
    graph.memset(alloc.buffer, 3, after=alloc)
    with dk.Graph(device, "reader") as reader:
        reader.free(alloc.buffer, after=reader.memcpy(y, alloc.buffer))
        maker, user = graph.instantiate(), reader.instantiate()
        for _ in range(2):
            maker.launch(stream)
            user.launch(stream)
        stream.synchronize()
        maker.close()
        user.close()
    assert y.numpy().tolist() == [3, 3]


# ---- the same bits, and the same cost ------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 31, 1000, 1_000_003])
def test_plain_launches_a_graph_and_a_capture_give_the_same_bits(
    device: dk.Device, module: dk.Module, stream: dk.Stream, rng: np.random.Generator, n: int
) -> None:
    x = device.array(rng.standard_normal(n, np.float32))
    steps: list[tuple[str, float]] = [("scale", 1.1), ("add", -0.3), ("scale", 1e-3), ("add", 1e-7), ("scale", 3.0)]
    grid, results = -(-n // 256), {}

    for way in ("plain", "graph", "capture"):
        y = device.array(np.full(n, np.nan, np.float32))
        with dk.Graph(device, way) as graph:
            source, last = x, None
            if way == "capture":
                with graph.capture(stream):
                    for name, value in steps:
                        args = (source, y, n, value)
                        module.kernel(name).launch(stream, grid=grid, block=256, args=args)
                        source = y
            else:
                for name, value in steps:
                    args = (source, y, n, value)
                    if way == "plain":
                        module.kernel(name).launch(stream, grid=grid, block=256, args=args)
                    else:
                        last = graph.kernel(module.kernel(name), grid=grid, block=256, args=args, after=last)
                    source = y
            with graph.instantiate() as exe:
                run(exe, stream)  # of no nodes, where the launches were plain
        results[way] = y.numpy()
    assert_equal_bits(results["graph"], results["plain"])
    assert_equal_bits(results["capture"], results["plain"])


def test_building_and_instantiating_grow_with_the_number_of_nodes(
    device: dk.Device, module: dk.Module, stream: dk.Stream
) -> None:
    kernel, count = module.kernel("count_threads"), ints(device, 0)

    def cost(nodes: int) -> tuple[float, float]:
        """Seconds a node, of building and of instantiating."""
        with dk.Graph(device, "long") as graph:
            start = time.perf_counter()
            last = None
            for _ in range(nodes):
                last = graph.kernel(kernel, grid=1, block=1, args=(count,), after=last)
            built = time.perf_counter()
            with graph.instantiate() as exe:
                end = time.perf_counter()
                run(exe, stream)
        return (built - start) / nodes, (end - built) / nodes

    costs = {nodes: [cost(nodes) for _ in range(repeats)] for nodes, repeats in ((100, 10), (1000, 5), (10_000, 2))}
    best = {nodes: np.min(seen, axis=0) for nodes, seen in costs.items()}
    factor = 3 if device.driver.kind == "cuda" else 6  # the CPU device's nodes are the garbage collector's work too
    assert (best[10_000] <= factor * best[1000]).all(), best
    assert (best[1000] <= factor * best[100]).all(), best
    assert count.numpy().tolist() == [10 * 100 + 5 * 1000 + 2 * 10_000]


def test_a_launch_into_a_capture_is_refused_by_name(
    device: dk.Device, module: dk.Module, graph: dk.Graph, stream: dk.Stream
) -> None:
    x, z = device.array(X), device.zeros(N, np.float32)
    scaled(graph, module, x, z, 2.0, name="k")
    exe, outer = graph.instantiate(), dk.Graph(device, "outer")
    with pytest.raises(dk.GraphError, match="ended by cuGraphLaunch"), outer.capture(stream):
        exe.launch(stream)
    run(exe, stream)
    np.testing.assert_array_equal(z.numpy(), X * 2)
    outer.close()
