"""Graphs on a device: every kind of node does what it says, in the order of the edges, and is listed as given."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from kernels import ints, replay, scaled

import drvkit as dk

N = 1000
X = np.arange(N, dtype=np.float32)


def log(device: dk.Device) -> dk.Buffer:
    return device.zeros(64, np.int32)


def logged(buffer: dk.Buffer) -> list[int]:
    """What `append` kernels wrote, in their order."""
    values: list[int] = buffer.numpy().tolist()
    return values[1 : 1 + values[0]]


def append(graph: dk.Graph, module: dk.Module, to: dk.Buffer, value: int, **how: Any) -> Any:
    return graph.kernel(module.kernel("append"), grid=1, block=1, args=(to, value), **how)


# ---- every kind of node --------------------------------------------------------------------------------------------


def test_a_kernel_node(device: dk.Device, module: dk.Module, graph: dk.Graph, stream: dk.Stream) -> None:
    x, y = device.array(X), device.zeros(N, np.float32)
    node = scaled(graph, module, x, y, 1.5, name="scale")
    assert node.parameters == {
        "kernel": "scale",
        "grid": (4, 1, 1),
        "block": (256, 1, 1),
        "shared_mem_bytes": 0,
        "args": {"x": x.address, "y": y.address, "n": N, "alpha": 1.5},
    }
    assert (node.kind, node.name, node.path, node.graph) == ("kernel", "scale", "scale", graph)
    replay(graph, stream)
    np.testing.assert_array_equal(y.numpy(), X * np.float32(1.5))


@pytest.mark.parametrize("way", ["to device", "to host", "on device", "pinned"])
def test_a_memcpy_node(device: dk.Device, graph: dk.Graph, stream: dk.Stream, way: str) -> None:
    source: Any = X.copy() if way == "to device" else device.array(X)
    target: Any = np.zeros_like(X) if way == "to host" else device.zeros(N, np.float32)
    if way == "pinned":
        target = device.pinned(N, np.float32)
    node = graph.memcpy(target, source)
    said = node.parameters
    assert (said["width_bytes"], said["height"], said["depth"]) == (4 * N, 1, 1)
    assert (said["source_on_host"], said["target_on_host"]) == (way == "to device", way == "to host")
    assert said["source"] == (source.ctypes.data if way == "to device" else source.address)
    assert said["target"] == (target.ctypes.data if way == "to host" else target.address)
    replay(graph, stream)
    np.testing.assert_array_equal(target if way == "to host" else target.numpy(), X)


def test_a_memcpy_node_reads_the_host_when_it_runs(device: dk.Device, graph: dk.Graph, stream: dk.Stream) -> None:
    host, target = np.zeros(N, np.float32), device.zeros(N, np.float32)
    graph.memcpy(target, host)
    host[:] = X
    replay(graph, stream)
    np.testing.assert_array_equal(target.numpy(), X)


def test_a_memcpy_node_of_strides(device: dk.Device, graph: dk.Graph, stream: dk.Stream) -> None:
    values = np.arange(48, dtype=np.int32).reshape(6, 8)
    source, target = device.array(values), device.array(-values)
    node = graph.memcpy(target[1:4, 2:5], source[2:5, 4:7])
    said = node.parameters
    assert (said["width_bytes"], said["height"], said["source_pitch"], said["target_pitch"]) == (12, 3, 32, 32)
    replay(graph, stream)
    want = -values
    want[1:4, 2:5] = values[2:5, 4:7]
    np.testing.assert_array_equal(target.numpy(), want)


def test_a_memset_node(device: dk.Device, graph: dk.Graph, stream: dk.Stream) -> None:
    whole, rows = device.zeros((4, 6), np.int32), device.zeros((4, 6), np.int32)
    said = graph.memset(whole, -7).parameters
    assert (said["address"], said["value"], said["element"]) == (whole.address, 2**32 - 7, 4)
    assert (said["width"], said["height"]) == (24, 1)
    said = graph.memset(rows[1:3, 2:5], 9).parameters
    assert (said["address"], said["width"], said["height"], said["pitch"]) == (rows.address + 32, 3, 2, 24)
    replay(graph, stream)
    want = np.zeros((4, 6), np.int32)
    want[1:3, 2:5] = 9
    np.testing.assert_array_equal(whole.numpy(), np.full((4, 6), -7))
    np.testing.assert_array_equal(rows.numpy(), want)


def test_an_empty_node_joins_and_forks(
    device: dk.Device, module: dk.Module, graph: dk.Graph, stream: dk.Stream
) -> None:
    order = log(device)
    first = append(graph, module, order, 1)
    middle = graph.empty(after=append(graph, module, order, 2, after=first))
    assert (middle.kind, middle.parameters) == ("empty", {})
    append(graph, module, order, 3, after=middle)
    replay(graph, stream)
    assert logged(order) == [1, 2, 3]


def test_a_host_node(graph: dk.Graph, stream: dk.Stream) -> None:
    calls: list[int] = []
    first = graph.host(lambda: calls.append(1), name="first")
    graph.host(lambda: calls.append(2), after=first)
    assert first.parameters["function_address"]
    replay(graph, stream, launches=2)
    assert calls == [1, 2, 1, 2]


def test_a_host_node_sees_what_was_copied_before_it(device: dk.Device, graph: dk.Graph, stream: dk.Stream) -> None:
    host, seen = np.zeros(4, np.int32), []
    copied = graph.memcpy(host, ints(device, 1, 2, 3, 4))
    graph.host(lambda: seen.append(host.tolist()), after=copied)
    replay(graph, stream)
    assert seen == [[1, 2, 3, 4]]


def test_event_nodes(device: dk.Device, module: dk.Module, graph: dk.Graph, stream: dk.Stream) -> None:
    start, end = device.event(), device.event()
    first = graph.record(start)
    busy = graph.kernel(module.kernel("spin"), grid=1, block=1, args=(5,), after=first)
    last = graph.record(end, after=busy)
    assert first.parameters == {"event": int(start.handle)}
    assert last.parameters == {"event": int(end.handle)}
    replay(graph, stream)
    assert start.done
    assert end.done
    assert 4.9 <= start.elapsed_ms(end) < 1000


def test_a_wait_node_waits_for_another_stream(
    device: dk.Device, module: dk.Module, graph: dk.Graph, stream: dk.Stream
) -> None:
    value, seen = ints(device, 0), ints(device, -1)
    with device.stream() as other:
        event = device.event(timing=False)
        waits = graph.wait(event)
        assert waits.parameters == {"event": int(event.handle)}
        graph.memcpy(seen, value, after=waits)
        exe = graph.instantiate()
        module.kernel("spin").launch(other, grid=1, block=1, args=(20,))
        module.kernel("store").launch(other, grid=1, block=1, args=(value, 7))
        event.record(other)
        exe.launch(stream)
        stream.synchronize()
    assert seen.numpy().tolist() == [7]


def test_alloc_and_free_nodes(device: dk.Device, module: dk.Module, graph: dk.Graph, stream: dk.Stream) -> None:
    x, y = device.array(X), device.zeros(N, np.float32)
    alloc = graph.alloc(N, np.float32, name="scratch")
    scratch = alloc.buffer
    assert (scratch.shape, scratch.dtype.name, scratch.where) == ((N,), "float32", "graph")
    assert alloc.parameters == {"address": scratch.address, "nbytes": 4 * N}
    copied = graph.memcpy(scratch, x, after=alloc)
    back = graph.memcpy(y, scratch, after=copied)
    free = graph.free(alloc, after=back)
    assert free.parameters == {"address": scratch.address}
    replay(graph, stream, launches=3)
    np.testing.assert_array_equal(y.numpy(), X)


def test_memory_operations(device: dk.Device, graph: dk.Graph, stream: dk.Stream) -> None:
    small, large = ints(device, 0, 5), device.array(np.array([0, 2**40], np.uint64))
    ops: list[Any] = [dk.WriteValue(small[0], -3), dk.WaitValue(small[0], -3, "eq"), dk.WaitValue(small[1], 4, "geq")]
    ops += [dk.WriteValue(large[0], 2**63), dk.WaitValue(large[1], 2**40, "and"), dk.WaitValue(small[1], 2, "nor")]
    node = graph.mem_ops(ops)
    assert node.parameters == {"count": 6, "flags": 0}
    replay(graph, stream)
    assert small.numpy().tolist() == [-3, 5]
    assert large.numpy().tolist() == [2**63, 2**40]


WAITS = {  # compare, value: what does not satisfy it (and would satisfy "geq" but for the first), what does
    "geq": (4, 3, 5),
    "eq": (4, 5, 4),
    "and": (3, 4, 1),
    "nor": (-2, -1, 0),
}


@pytest.mark.parametrize("compare", WAITS)
def test_a_wait_compares_as_it_says(device: dk.Device, graph: dk.Graph, stream: dk.Stream, compare: str) -> None:
    value, before, after = WAITS[compare]
    word, x = device.pinned(1, np.int32), ints(device, 0)
    word.host[0] = before
    waits = graph.mem_ops([dk.WaitValue(word, value, compare)])
    graph.memset(x, 1, after=waits)
    with graph.instantiate() as exe:
        exe.launch(stream)
        time.sleep(0.05)
        waited = not stream.done
        for satisfies in (after, value, 0, 1, -1):  # the others only so that a wrong wait ends, too
            word.host[0] = satisfies
            deadline = time.monotonic() + 5
            while not stream.done and time.monotonic() < deadline:
                time.sleep(0.001)
            if stream.done:
                break
        stream.synchronize()
    assert waited
    assert satisfies == after
    assert x.numpy().tolist() == [1]


def test_nodes_are_listed_by_name_and_kind(device: dk.Device, module: dk.Module, graph: dk.Graph) -> None:
    x = device.array(X)
    empty = graph.empty(name="start")
    scaled(graph, module, x, x, 1.0, after=empty)
    graph.memcpy(x, X)
    graph.memset(x, 0.0, name="zero")
    body = graph.if_(graph.condition(default=0), name="branch")
    body.memset(x, 1.0, name="one")
    assert {node.name: node.kind for node in graph.nodes} == {
        "start": "empty",
        "scale#0": "kernel",
        "memcpy#1": "memcpy",
        "zero": "memset",
        "branch": "conditional",
    }
    assert [node.path for node in graph.walk()][-2:] == ["branch", "branch/then/one"]
    assert len(graph) == 5
    assert "branch/then/one" in graph
    assert "branch/then/two" not in graph
    assert graph["branch/then/one"] is body["one"]
    assert (body.node, body.root, body.path) == (graph["branch"], graph, "branch/then/")


def test_a_kernel_that_takes_every_type(device: dk.Device, module: dk.Module, graph: dk.Graph) -> None:
    """What the driver has is decoded to what was given."""
    args: Any = (True, -1, 2, -3, 4, -5, 6, -7, 2**63, 0.5, 0.25, 1.5, 2.5, bytes(range(12)), ints(device, 9), None)
    said = graph.kernel(module.kernel("every_type"), grid=1, block=1, args=args).parameters["args"]
    pointed = said.pop("pointed")
    assert tuple(said.values()) == (*args[:-2], 0)
    assert pointed == args[-2].address


# ---- edges ---------------------------------------------------------------------------------------------------------


def test_edges_are_added_removed_and_listed(
    device: dk.Device, module: dk.Module, graph: dk.Graph, stream: dk.Stream
) -> None:
    order = log(device)
    a, b, c = (append(graph, module, order, value, name=name) for value, name in ((1, "a"), (2, "b"), (3, "c")))
    assert graph.edges() == []
    graph.add_edge(c, b)
    graph.add_edge(a, c)
    graph.add_edge(a, b)
    assert set(graph.edges()) == {dk.Edge(c, b), dk.Edge(a, c), dk.Edge(a, b)}
    assert a.dependencies == []
    assert set(a.dependents) == {b, c}
    assert set(b.dependencies) == {a, c}
    graph.remove_edge(a, b)
    assert set(graph.edges()) == {dk.Edge(c, b), dk.Edge(a, c)}
    replay(graph, stream)
    assert logged(order) == [1, 3, 2]


def test_after_takes_one_several_or_none(device: dk.Device, graph: dk.Graph) -> None:
    x = device.zeros(4, np.int32)
    a, b = graph.memset(x, 1, name="a"), graph.memset(x, 2, name="b", after=None)
    one, both = graph.empty(after=a), graph.empty(after=[a, b])
    many, none = graph.empty(after=iter((a, b, a))), graph.empty(after=())
    waits = {node: set(node.dependencies) for node in (a, b, one, both, many, none)}
    assert waits == {a: set(), b: set(), one: {a}, both: {a, b}, many: {a, b}, none: set()}


def test_a_removed_node_is_gone_with_its_edges(
    device: dk.Device, module: dk.Module, graph: dk.Graph, stream: dk.Stream
) -> None:
    order = log(device)
    a = append(graph, module, order, 1, name="a")
    b = append(graph, module, order, 2, name="b", after=a)
    append(graph, module, order, 3, name="c", after=[a, b])
    graph.remove(b)
    assert [node.name for node in graph.nodes] == ["a", "c"]
    assert graph.edges() == [dk.Edge(a, graph["c"])]
    replay(graph, stream)
    assert logged(order) == [1, 3]
    append(graph, module, order, 4, name="b")


def test_a_removed_node_stays_removed_when_its_name_is_used_again(
    device: dk.Device, module: dk.Module, graph: dk.Graph, stream: dk.Stream
) -> None:
    order = log(device)
    old = append(graph, module, order, 1, name="b")
    graph.remove(old)
    new = append(graph, module, order, 2, name="b")
    for add in (lambda: append(graph, module, order, 3, after=old), lambda: graph.empty(after=[new, old])):
        with pytest.raises(dk.GraphError, match="graph 'tested': node 'b' was removed"):
            add()
    for act in (
        lambda: graph.add_edge(old, new),
        lambda: graph.remove(old),
        lambda: old.path,
        lambda: old.parameters,
        lambda: old.dependents,
        lambda: graph.capture(stream, after=old).__enter__(),
    ):
        with pytest.raises((dk.GraphError, dk.ClosedError), match=r"'b' was removed|no node of it"):
            act()
    assert "'b'" in repr(old)
    assert graph.nodes == (new,)
    assert new.dependents == []


def test_a_conditional_node_cannot_be_removed(device: dk.Device, graph: dk.Graph, stream: dk.Stream) -> None:
    x = ints(device, 0)
    body = graph.if_(graph.condition(default=1, name="flag"), name="branch")
    with pytest.raises(dk.GraphError, match="'branch': it cannot be removed: its condition would be left over"):
        graph.remove(graph["branch"])
    body.memset(x, 3, name="fill")
    replay(graph, stream)
    assert x.numpy().tolist() == [3]


def test_a_condition_that_nothing_tests_is_told(device: dk.Device, graph: dk.Graph, stream: dk.Stream) -> None:
    graph.memset(ints(device, 0), 1)
    graph.condition(default=0)
    with pytest.raises(dk.GraphError, match="every condition of the graph must be tested by a conditional node"):
        graph.instantiate()


def test_an_alloc_node_is_removed_with_its_buffer_or_not_at_all(
    device: dk.Device, graph: dk.Graph, stream: dk.Stream
) -> None:
    alloc = graph.alloc(4, np.int32, name="scratch")
    try:
        graph.remove(alloc)
    except (dk.DriverError, dk.GraphError):  # drivers keep the nodes of graphs that allocate
        assert not alloc.buffer.closed
        assert graph["scratch"] is alloc
    else:
        assert alloc.buffer.closed
        assert len(graph) == 0


def test_the_memory_of_a_graph_is_closed_with_it(device: dk.Device, stream: dk.Stream) -> None:
    y = ints(device, 0, 0)
    graph = dk.Graph(device, "allocating")
    alloc = graph.alloc(2, np.int32)
    window = alloc.buffer[1:]
    graph.free(alloc, after=graph.memcpy(y, alloc.buffer, after=graph.memset(alloc.buffer, 3, after=alloc)))
    exe = graph.instantiate()
    graph.close()
    assert alloc.buffer.closed
    assert window.closed
    with pytest.raises(dk.ClosedError):
        alloc.buffer.address  # noqa: B018 - the look-up is what fails
    exe.launch(stream)
    stream.synchronize()
    exe.close()
    assert y.numpy().tolist() == [3, 3], "execs go on"


def test_what_depends_on_what_inside_of_bodies_and_children(device: dk.Device, graph: dk.Graph) -> None:
    x = ints(device, 0)
    body = graph.if_(graph.condition(default=1), name="branch")
    a = body.memset(x, 1, name="a")
    b = body.empty(after=a, name="b")
    with dk.Graph(device, "inner") as inner:
        inner.empty(name="last", after=inner.empty(name="first"))
        kid = graph.child(inner, after=body.node, name="kid")
    assert (a.dependencies, a.dependents) == ([], [b])
    assert (b.dependencies, b.dependents) == ([a], [])
    assert (kid.dependencies, kid.dependents) == ([graph["branch"]], [])
    assert graph["branch"].dependents == [kid]
    assert graph["kid/last"].dependencies == [graph["kid/first"]]
    late = graph.empty(after=kid)
    assert kid.dependents == [late]
    graph.remove(late)
    assert kid.dependents == []


@pytest.mark.parametrize(
    "make", [list, iter, lambda args: (arg for arg in args)], ids=["list", "iterator", "generator"]
)
def test_arguments_in_a_list_or_from_a_generator(
    device: dk.Device, module: dk.Module, graph: dk.Graph, stream: dk.Stream, make: Any
) -> None:
    x, y, z = device.array(X), device.zeros(N, np.float32), device.zeros(N, np.float32)
    scale = module.kernel("scale")
    args = [x, y, N, 2.0]
    node = graph.kernel(scale, grid=4, block=256, args=make(args), name="scale")
    args[1] = None
    assert node.parameters["args"] == {"x": x.address, "y": y.address, "n": N, "alpha": 2.0}
    assert node.args == (x, y, N, 2.0)
    scale.launch(stream, grid=4, block=256, args=make([x, z, N, 3.0]))
    replay(graph, stream)
    np.testing.assert_array_equal(y.numpy(), X * 2)
    np.testing.assert_array_equal(z.numpy(), X * 3)


def test_a_programmatic_edge_starts_early_and_still_sees_the_result(
    device: dk.Device, module: dk.Module, graph: dk.Graph, stream: dk.Stream
) -> None:
    value, results = ints(device, -1), ints(device, -1, -1)
    before: Any = None
    for i in range(2):
        early = graph.kernel(module.kernel("early_trigger"), grid=1, block=1, args=(value, 10 * i), after=before)
        before = graph.kernel(
            module.kernel("late_reader"), grid=1, block=1, args=(value, results[i]), after=early.port("programmatic")
        )
        assert dk.Edge(early, before, "programmatic") in graph.edges()
        assert before.dependencies == [early]
    replay(graph, stream)
    assert results.numpy().tolist() == [1, 11]


def test_ports_and_nodes_mix_in_after(device: dk.Device, module: dk.Module, graph: dk.Graph) -> None:
    order = log(device)
    a, b, c = (append(graph, module, order, i) for i in range(3))
    last = append(graph, module, order, 3, after=[a, b.port("programmatic"), c.port("full")])
    assert set(graph.edges()) == {dk.Edge(a, last), dk.Edge(b, last, "programmatic"), dk.Edge(c, last)}
    graph.remove_edge(b.port("programmatic"), last)
    assert set(graph.edges()) == {dk.Edge(a, last), dk.Edge(c, last)}


def test_a_launch_order_edge(device: dk.Device, module: dk.Module, graph: dk.Graph, stream: dk.Stream) -> None:
    x, y = ints(device, 0), ints(device, 0)
    first = graph.kernel(module.kernel("store"), grid=1, block=1, args=(x, 1))
    second = graph.kernel(module.kernel("store"), grid=1, block=1, args=(y, 2), after=first.port("launch_order"))
    assert graph.edges() == [dk.Edge(first, second, "launch_order")]
    replay(graph, stream)
    assert (x.numpy().tolist(), y.numpy().tolist()) == ([1], [2])


# ---- graphs inside of graphs, and copies of graphs -----------------------------------------------------------------


def test_a_clone_is_independent_and_mapped(
    device: dk.Device, module: dk.Module, graph: dk.Graph, stream: dk.Stream
) -> None:
    x, y, z = device.array(X), device.zeros(N, np.float32), device.zeros(N, np.float32)
    with dk.Graph(device, "inner") as inner:
        inner.memset(z, 2.0, name="fill")
        kid = graph.child(inner, name="kid")
    copied = graph.memcpy(y, x, name="copy", after=kid)
    copy, twins = graph.clone("twin")
    with copy:
        assert copy.name == "twin"
        assert {a.path: b.path for a, b in twins.items()} == {path: path for path in ("kid", "kid/fill", "copy")}
        assert twins[copied] is copy["copy"]
        assert twins[graph["kid/fill"]] is copy["kid/fill"]
        assert copy.edges() == [dk.Edge(twins[kid], twins[copied])]
        graph.remove(copied)
        graph.memset(y, 5.0)
        graph.close()
        replay(copy, stream)
    np.testing.assert_array_equal(y.numpy(), X)
    np.testing.assert_array_equal(z.numpy(), np.full(N, 2))


def test_a_child_is_a_copy_of_what_the_graph_was(
    device: dk.Device, module: dk.Module, graph: dk.Graph, stream: dk.Stream
) -> None:
    x, y = ints(device, 0), ints(device, 0)
    inner = dk.Graph(device, "inner")
    inner.memset(x, 1, name="fill")
    kid = graph.child(inner, name="kid")
    inner.memset(y, 1, name="later")
    inner.close()
    assert [node.path for node in graph.walk()] == ["kid", "kid/fill"]
    assert (kid.inner.root, kid.inner.path) == (graph, "kid/")
    assert kid.parameters == {"graph": int(kid.inner.handle)}
    replay(graph, stream)
    assert (x.numpy().tolist(), y.numpy().tolist()) == ([1], [0])


def test_one_graph_may_be_a_child_many_times(
    device: dk.Device, module: dk.Module, graph: dk.Graph, stream: dk.Stream
) -> None:
    order = log(device)
    with dk.Graph(device, "inner") as inner, dk.Graph(device, "middle") as middle:
        append(inner, module, order, 1)
        first = middle.child(inner, name="a")
        middle.child(inner, name="b", after=first)
        graph.child(middle, name="twice", after=graph.child(inner, name="once"))
    assert {"once/append#0", "twice/a/append#0", "twice/b/append#0"} < {node.path for node in graph.walk()}
    replay(graph, stream)
    assert logged(order) == [1, 1, 1]


def test_a_moved_child_goes_on(device: dk.Device, module: dk.Module, graph: dk.Graph, stream: dk.Stream) -> None:
    x, y = (ints(device, 0) for _ in range(2))
    inner = dk.Graph(device, "inner")
    one = inner.memset(x, 1, name="one")
    kid = graph.child(inner, move=True, name="kid")
    assert kid.inner is inner
    assert (inner.node, inner.root) == (kid, graph)
    inner.memset(y, 3, name="added", after=one)
    assert graph["kid/added"].dependencies == [one]
    replay(graph, stream)
    assert [b.numpy().tolist() for b in (x, y)] == [[1], [3]]


@pytest.mark.parametrize("move", [False, True])
def test_a_child_with_conditional_nodes_is_refused_and_stays_as_it_was(
    device: dk.Device, graph: dk.Graph, stream: dk.Stream, move: bool
) -> None:
    x = ints(device, 0)
    inner = dk.Graph(device, "inner")
    inner.if_(inner.condition(default=1), name="branch").memset(x, 1)
    with pytest.raises(dk.GraphError, match=r"'kid'.*no conditional node can be in a child"):
        graph.child(inner, move=move, name="kid")
    assert len(graph) == 0
    replay(inner, stream)
    assert x.numpy().tolist() == [1]


def test_a_child_cannot_wait_for_a_port_and_is_not_moved_then(
    device: dk.Device, module: dk.Module, graph: dk.Graph, stream: dk.Stream
) -> None:
    x = ints(device, 0)
    first = append(graph, module, log(device), 1, name="first")
    inner = dk.Graph(device, "inner")
    inner.memset(x, 1, name="fill")
    for move in (True, False):
        with pytest.raises(dk.GraphError, match="port 'programmatic' of 'first' is for edges to kernel nodes"):
            graph.child(inner, move=move, after=first.port("programmatic"))
    assert (inner.node, inner.root, len(graph)) == (None, inner, 1)
    replay(inner, stream)
    assert x.numpy().tolist() == [1]
    graph.child(inner, move=True, after=first.port("full"), name="kid")
    assert inner.root is graph
    assert graph.edges() == [dk.Edge(first, graph["kid"])]


def test_a_moved_child_may_allocate(device: dk.Device, graph: dk.Graph, stream: dk.Stream) -> None:
    x = ints(device, 0)
    inner = dk.Graph(device, "inner")
    alloc = inner.alloc(1, np.int32)
    filled = inner.memset(alloc.buffer, 5, after=alloc)
    inner.free(alloc, after=inner.memcpy(x, alloc.buffer, after=filled))
    graph.child(inner, move=True)
    replay(graph, stream)
    assert x.numpy().tolist() == [5]


# ---- conditional nodes ---------------------------------------------------------------------------------------------


def decide(
    device: dk.Device, module: dk.Module, graph: dk.Graph, by: str, value: int
) -> tuple[dk.Condition, dk.Node | None]:
    """A condition of this value, and what its conditional node has to wait for."""
    if by == "default":
        return graph.condition(default=value), None
    condition = graph.condition(default=7)
    if by == "kernel":
        return condition, graph.kernel(module.kernel("set"), grid=1, block=1, args=(condition, value))
    dtype = np.int32 if by == "flag" else np.uint8
    return condition, graph.set_condition(condition, device.array(np.array([value], dtype)))


each_way = pytest.mark.parametrize("by", ["default", "kernel", "flag", "small flag"])


@each_way
@pytest.mark.parametrize("value", [0, 1, 5])
def test_if(device: dk.Device, module: dk.Module, graph: dk.Graph, stream: dk.Stream, by: str, value: int) -> None:
    x, last = ints(device, 0), ints(device, 0)
    condition, after = decide(device, module, graph, by, value)
    body = graph.if_(condition, after=after, name="branch")
    body.memset(x, 1)
    graph.memset(last, 1, after=body.node)
    node = graph["branch"]
    said = node.parameters
    assert (node.kind, said["variety"], said["bodies"]) == ("conditional", "if", ["then"])
    replay(graph, stream)
    assert (x.numpy().tolist(), last.numpy().tolist()) == ([int(value != 0)], [1])


@each_way
@pytest.mark.parametrize("value", [0, 1])
def test_if_else(device: dk.Device, module: dk.Module, graph: dk.Graph, stream: dk.Stream, by: str, value: int) -> None:
    x = ints(device, 0)
    condition, after = decide(device, module, graph, by, value)
    yes, no = graph.if_else(condition, after=after)
    yes.memset(x, 1)
    no.memset(x, 2)
    replay(graph, stream)
    assert x.numpy().tolist() == [1 if value else 2]


@each_way
@pytest.mark.parametrize("value", [0, 1, 2, 3])
def test_switch(device: dk.Device, module: dk.Module, graph: dk.Graph, stream: dk.Stream, by: str, value: int) -> None:
    x = ints(device, 0)
    condition, after = decide(device, module, graph, by, value)
    bodies = graph.switch(condition, 3, after=after, name="which")
    for i, body in enumerate(bodies):
        body.memset(x, 10 + i)
    assert graph["which"].parameters["bodies"] == ["0", "1", "2"]
    replay(graph, stream)
    assert x.numpy().tolist() == [10 + value if value < 3 else 0]


@pytest.mark.parametrize("turns", [1, 7])
def test_while(device: dk.Device, module: dk.Module, graph: dk.Graph, stream: dk.Stream, turns: int) -> None:
    left, order = ints(device, turns), log(device)
    condition = graph.condition(default=1)
    body = graph.while_(condition, name="loop")
    turn = append(body, module, order, 5)
    body.kernel(module.kernel("count_down"), grid=1, block=1, args=(condition, left), after=turn)
    append(graph, module, order, 9, after=body.node)
    replay(graph, stream)
    assert logged(order) == [5] * turns + [9]


def test_while_may_not_run_at_all(device: dk.Device, graph: dk.Graph, stream: dk.Stream) -> None:
    x = ints(device, 0)
    graph.while_(graph.condition(default=0)).memset(x, 1)
    replay(graph, stream)
    assert x.numpy().tolist() == [0]


def test_a_default_holds_at_every_launch(
    device: dk.Device, module: dk.Module, graph: dk.Graph, stream: dk.Stream
) -> None:
    order, left = log(device), ints(device, 3)
    condition = graph.condition(default=1)
    body = graph.while_(condition)
    count = body.kernel(module.kernel("count_down"), grid=1, block=1, args=(condition, left))
    append(body, module, order, 1, after=count)
    replay(graph, stream, launches=3)
    assert logged(order) == [1] * 5, "three turns, then one for each launch"


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_while_any_is_above(device: dk.Device, graph: dk.Graph, stream: dk.Stream, dtype: Any) -> None:
    x = device.array(np.array([3, 9, 0, -20], dtype))
    condition = graph.condition(name="above")
    first = graph.set_condition_above(condition, x, 4, name="test")
    body = graph.while_(condition, after=first, name="loop")
    filled = body.memset(x[1:2], 4, name="fill")
    body.set_condition_above(condition, x, 4, after=filled, name="test")
    replay(graph, stream)
    assert x.numpy().tolist() == [3, 4, 0, -20]


@pytest.mark.parametrize("turns", [1, 5])
def test_while_the_count_is_below(
    device: dk.Device, module: dk.Module, graph: dk.Graph, stream: dk.Stream, turns: int
) -> None:
    order, counter = log(device), ints(device, 0)
    condition = graph.condition(default=1)
    zero = graph.memset(counter, 0)
    body = graph.while_(condition, after=zero, name="loop")
    body.set_condition_below_count(condition, counter, turns, after=append(body, module, order, 7), name="count")
    replay(graph, stream, launches=2)
    assert logged(order) == [7] * (2 * turns)
    assert counter.numpy().tolist() == [turns]


@pytest.mark.parametrize("flag", [2**40, -1, 1, 0], ids=str)
def test_a_flag_of_64_bits(device: dk.Device, graph: dk.Graph, stream: dk.Stream, flag: int) -> None:
    x, condition = ints(device, 0), graph.condition(default=7)
    told = graph.set_condition(condition, device.array(np.array([flag], np.int64)))
    yes, no = graph.if_else(condition, after=told)
    yes.memset(x, 1)
    no.memset(x, 2)
    replay(graph, stream)
    assert x.numpy().tolist() == [1 if flag else 2]


def test_conditional_nodes_nest(device: dk.Device, module: dk.Module, graph: dk.Graph, stream: dk.Stream) -> None:
    order, left, flag = log(device), ints(device, 3), ints(device, 0)
    loop = graph.condition(default=1)
    body = graph.while_(loop, name="loop")
    inner = body.condition(default=0)
    told = body.set_condition(inner, flag)
    yes, no = body.if_else(inner, after=told, name="branch")
    append(yes, module, order, 1)
    append(no, module, order, 2, after=no.memset(flag, 1), name="second")
    body.kernel(module.kernel("count_down"), grid=1, block=1, args=(loop, left), after=yes.node)
    assert graph["loop/body/branch/else/second"].path == "loop/body/branch/else/second"
    replay(graph, stream)
    assert logged(order) == [2, 1, 1]


def test_nesting_by_defaults(device: dk.Device, graph: dk.Graph, stream: dk.Stream) -> None:
    x = ints(device, 0)
    outer = graph.if_(graph.condition(default=1), name="outer")
    inner = outer.switch(outer.condition(default=1), 2, name="inner")
    inner[1].if_(inner[1].condition(default=1), name="most").memset(x, 3, name="fill")
    assert graph["outer/then/inner/1/most/then/fill"].kind == "memset"
    replay(graph, stream)
    assert x.numpy().tolist() == [3]


def test_a_child_inside_a_body(device: dk.Device, graph: dk.Graph, stream: dk.Stream) -> None:
    x = ints(device, 0)
    body = graph.if_(graph.condition(default=1), name="branch")
    with dk.Graph(device, "inner") as inner:
        inner.memset(x, 4, name="fill")
        body.child(inner, name="kid")
    assert graph["branch/then/kid/fill"].kind == "memset"
    replay(graph, stream)
    assert x.numpy().tolist() == [4]


# ---- attributes ----------------------------------------------------------------------------------------------------

ATTRIBUTES: dict[str, tuple[dict[str, Any], str, Any]] = {
    "cluster": ({"cluster": 2}, "CLUSTER_DIMENSION", lambda v: (v.clusterDim.x, v.clusterDim.y) == (2, 1)),
    "cluster_scheduling": (
        {"cluster": 2, "cluster_scheduling": "spread"},
        "CLUSTER_SCHEDULING_POLICY_PREFERENCE",
        lambda v: int(v.clusterSchedulingPolicyPreference) == 1,
    ),
    "cooperative": ({"cooperative": True}, "COOPERATIVE", lambda v: v.cooperative == 1),
    "priority": ({"priority": -1}, "PRIORITY", lambda v: v.priority == -1),
    "mem_sync_domain": ({"mem_sync_domain": "remote"}, "MEM_SYNC_DOMAIN", lambda v: int(v.memSyncDomain) == 1),
    "mem_sync_domain_map": (
        {"mem_sync_domain_map": (0, 1)},
        "MEM_SYNC_DOMAIN_MAP",
        lambda v: (v.memSyncDomainMap.default_, v.memSyncDomainMap.remote) == (0, 1),
    ),
    "shared_carveout_percent": (
        {"shared_carveout_percent": 50},
        "PREFERRED_SHARED_MEMORY_CARVEOUT",
        lambda v: v.sharedMemCarveout == 50,
    ),
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_a_node_takes_an_attribute(
    device: dk.Device, module: dk.Module, graph: dk.Graph, stream: dk.Stream, name: str
) -> None:
    given, identity, holds = ATTRIBUTES[name]
    x, y = device.array(X), device.zeros(N, np.float32)
    node = scaled(graph, module, x, y, 2.0, **given)
    driver = device.driver
    attribute = driver.CUlaunchAttributeID.__members__[f"CU_LAUNCH_ATTRIBUTE_{identity}"]
    assert holds(driver.cuGraphKernelNodeGetAttribute(node.handle, attribute))
    replay(graph, stream)
    np.testing.assert_array_equal(y.numpy(), X * 2)


def test_a_node_takes_an_access_policy_window(
    device: dk.Device, module: dk.Module, graph: dk.Graph, stream: dk.Stream
) -> None:
    x, y = device.array(X), device.zeros(N, np.float32)
    node = scaled(graph, module, x, y, 2.0, access_policy_window=dk.AccessPolicyWindow(x, 0.5))
    driver = device.driver
    attribute = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW
    window = driver.cuGraphKernelNodeGetAttribute(node.handle, attribute).accessPolicyWindow
    assert (int(window.base_ptr), window.num_bytes, window.hitRatio) == (x.address, 4 * N, 0.5)
    replay(graph, stream)
    np.testing.assert_array_equal(y.numpy(), X * 2)


@pytest.mark.parametrize("given", [{"cluster": 1, "preferred_cluster": 2}, {"nvlink_centric": True}], ids=str)
def test_what_not_every_gpu_has_works_or_is_refused_by_name(
    device: dk.Device, module: dk.Module, graph: dk.Graph, stream: dk.Stream, given: dict[str, Any]
) -> None:
    x, y = device.array(X), device.zeros(N, np.float32)
    try:
        scaled(graph, module, x, y, 2.0, name="node", **given)
    except dk.GraphError as error:
        refusal = str(error)
    else:
        replay(graph, stream)
        np.testing.assert_array_equal(y.numpy(), X * 2)
        return
    assert re.search(r"kernel node 'node' cannot have attribute (preferred|nvlink)", refusal)
    assert len(graph) == 0, "what cannot have its attributes is not in the graph"


def test_clusters_are_what_the_kernel_sees(
    device: dk.Device, module: dk.Module, graph: dk.Graph, stream: dk.Stream
) -> None:
    extents = ints(device, 0, 0, 0)
    graph.kernel(module.kernel("cluster_extents"), grid=(4, 2), block=1, args=(extents,), cluster=(2, 2))
    replay(graph, stream)
    assert extents.numpy().tolist() == [2, 2, 1]


def test_a_device_updatable_node_has_a_handle_for_kernels(
    device: dk.Device, module: dk.Module, graph: dk.Graph, stream: dk.Stream
) -> None:
    x, y = device.array(X), device.zeros(N, np.float32)
    node = scaled(graph, module, x, y, 2.0, device_updatable=True, name="node")
    assert node.device_handle
    assert scaled(graph, module, x, y, 2.0, after=node).device_handle is None
    with graph.instantiate(upload=stream) as exe:
        exe.launch(stream)
        stream.synchronize()
    np.testing.assert_array_equal(y.numpy(), X * 2)


def test_a_device_updatable_node_exists_once_and_stays(device: dk.Device, module: dk.Module, graph: dk.Graph) -> None:
    x, y = device.array(X), device.zeros(N, np.float32)
    scaled(graph, module, x, y, 2.0, device_updatable=True, name="node")
    with pytest.raises(dk.GraphError, match="cannot be cloned: device-updatable node 'node' exists only once"):
        graph.clone()
    with pytest.raises(dk.GraphError, match="'node': it cannot be removed: it is device-updatable"):
        graph.remove(graph["node"])
    with (
        dk.Graph(device, "around") as around,
        pytest.raises(dk.GraphError, match="device-updatable node 'node' can be in a child only with move=True"),
    ):
        around.child(graph)


def test_a_device_updatable_node_that_is_refused_leaves_nothing(
    device: dk.Device, module: dk.Module, graph: dk.Graph
) -> None:
    x, y = device.array(X), device.zeros(N, np.float32)
    with pytest.raises(dk.GraphError, match="cannot have attribute preferred_cluster_dimension"):
        scaled(graph, module, x, y, 2.0, device_updatable=True, preferred_cluster=2)
    assert not graph.nodes
    assert graph.device.driver.cuGraphGetNodes(graph.handle)[1] == 0


# ---- capture -------------------------------------------------------------------------------------------------------


def test_captured_work_becomes_nodes(device: dk.Device, module: dk.Module, graph: dk.Graph, stream: dk.Stream) -> None:
    x, y, z = device.array(X), device.zeros(N, np.float32), device.zeros(N, np.float32)
    fill = graph.memset(z, 7.0, name="fill")
    with graph.capture(stream, after=fill, name="work") as same:
        assert same is stream
        y.copy_from(x, stream)
        module.kernel("scale").launch(stream, grid=4, block=256, args=(y, y, N, 2.0))
        z[:10].fill(1.0, stream)
    kinds = {node.name: node.kind for node in graph.nodes}
    assert kinds == {"fill": "memset", "work#0": "memcpy", "work#1": "kernel", "work#2": "memset"}
    assert {dk.Edge(fill, graph["work#0"]), dk.Edge(graph["work#0"], graph["work#1"])} < set(graph.edges())
    assert graph["work#1"].parameters["args"]["2"] == N
    assert graph["work#0"].parameters["width_bytes"] == 4 * N
    assert y.numpy().max() == 0, "nothing ran yet"
    replay(graph, stream)
    np.testing.assert_array_equal(y.numpy(), X * 2)
    np.testing.assert_array_equal(z.numpy(), [1.0] * 10 + [7.0] * (N - 10))


def test_captured_nodes_list_their_parameters(
    device: dk.Device, module: dk.Module, graph: dk.Graph, stream: dk.Stream
) -> None:
    x, y, z = device.array(X), device.zeros(N, np.float32), device.zeros((4, 6), np.int32)
    with graph.capture(stream, name="work"):
        module.kernel("scale").launch(stream, grid=4, block=256, args=(x, y, N, 1.5))
        y.copy_from(x, stream)
        z[1:3, 2:5].fill(9, stream)
    kernel, copy, fill = graph.nodes
    said = kernel.parameters
    assert (said["grid"], said["block"], said["shared_mem_bytes"]) == ((4, 1, 1), (256, 1, 1), 0)
    assert "scale" in said["kernel"]
    assert list(said["args"].values()) == [x.address, y.address, N, 1.5]
    said = copy.parameters
    assert (said["target"], said["source"], said["width_bytes"]) == (y.address, x.address, 4 * N)
    said = fill.parameters
    assert (said["address"], said["value"], said["width"], said["height"]) == (z.address + 32, 9, 3, 2)
    assert [node.dependencies for node in graph.nodes] == [[], [kernel], [copy]]
    for node in graph.nodes:
        assert node.name in str(graph)


def test_a_capture_takes_in_the_streams_that_join(
    device: dk.Device, module: dk.Module, graph: dk.Graph, stream: dk.Stream
) -> None:
    x, y, z = ints(device, 1), ints(device, 0), ints(device, 0)
    with device.stream() as other:
        with graph.capture(stream):
            y.copy_from(x, stream)
            other.wait(stream.record())
            z.copy_from(y, other)
            stream.wait(other.record())
            x.fill(5, stream)
        x.fill(3, other)
        other.synchronize()
        first, second, third = graph.nodes
        assert {dk.Edge(first, second), dk.Edge(second, third)} <= set(graph.edges())
        assert x.numpy().tolist() == [3], "the other stream is free again"
        replay(graph, stream)
    assert [b.numpy().tolist() for b in (x, y, z)] == [[5], [3], [3]]


def test_what_was_captured_stays_alive_with_the_graph(device: dk.Device, graph: dk.Graph, stream: dk.Stream) -> None:
    x, target = device.array(X), device.zeros(N, np.float32)
    with graph.capture(stream):
        target.copy_from(x, stream)
    x.close()
    del x
    poison = [device.array(-X) for _ in range(8)]
    replay(graph, stream)
    np.testing.assert_array_equal(target.numpy(), X)
    del poison


def test_an_error_of_the_block_keeps_what_was_captured(device: dk.Device, graph: dk.Graph, stream: dk.Stream) -> None:
    x = ints(device, 0)
    with pytest.raises(ZeroDivisionError), graph.capture(stream):  # noqa: PT012 - the block is what is tested
        x.fill(1, stream)
        raise ZeroDivisionError
    replay(graph, stream)
    assert x.numpy().tolist() == [1]


def test_a_body_can_be_captured_into(device: dk.Device, graph: dk.Graph, stream: dk.Stream) -> None:
    x = ints(device, 0)
    body = graph.if_(graph.condition(default=1), name="branch")
    with body.capture(stream):
        x.fill(1, stream)
    assert graph["branch/then/captured#0"].kind == "memset"
    replay(graph, stream)
    assert x.numpy().tolist() == [1]


def test_what_cupy_does_is_captured(device: dk.Device, graph: dk.Graph, stream: dk.Stream, cupy: Any) -> None:
    x, y = cupy.arange(N, dtype=np.float32), cupy.zeros(N, np.float32)
    cupy.multiply(x, 3, out=y)  # compiles, which a capture would not allow
    y[...] = 0
    device.synchronize()
    with graph.capture(stream), cupy.cuda.Stream.from_external(stream):
        cupy.multiply(x, 3, out=y)
        cupy.multiply(y, 3, out=y)
    assert [node.kind for node in graph.nodes] == ["kernel", "kernel"]
    assert "captured#1" in str(graph)
    replay(graph, stream)
    np.testing.assert_array_equal(cupy.asnumpy(y), X * 9)


# ---- pictures ------------------------------------------------------------------------------------------------------


@pytest.fixture
def pictured(
    device: dk.Device, module: dk.Module, graph: dk.Graph, request: pytest.FixtureRequest
) -> Iterator[dk.Graph]:
    x, y = device.array(X), device.zeros(N, np.float32)
    double = scaled(graph, module, x, y, 2.0, name="double")
    scaled(graph, module, x, y, 3.0, name="early", after=double.port("programmatic"))
    yes, no = graph.if_else(graph.condition(default=0, name="flag"), after=double, name='the "branch"')
    yes.memset(y, 1.0, name="fill")
    no.if_(no.condition(default=0), name="deep").memcpy(y, x, name="copy")
    with dk.Graph(device, "inner") as inner:
        inner.empty(name="nothing")
        graph.child(inner, name="kid")
    yield graph
    del request.node.funcargs["pictured"]


def test_a_graph_as_text(pictured: dk.Graph) -> None:
    lines = str(pictured).splitlines()
    assert lines[0] == f"graph 'tested' on {pictured.device.id}: 8 nodes, 2 edges"
    text = "\n".join(lines)
    for node in pictured.walk():
        assert node.name in text
    double, early = (next(line for line in lines if line.split()[0] == name) for name in ("double", "early"))
    assert re.search(r"kernel +scale\(x=float32\[1000\]@0x\w+, .* n=1000, alpha=2.0\) grid 4 block 256$", double)
    assert early.endswith("after double.programmatic")
    depth = {line.split()[0]: len(line) - len(line.lstrip()) for line in reversed(lines)}
    assert depth["double"] < depth["then:"] < depth["fill"]
    assert depth["fill"] < depth["copy"]
    assert depth["kid"] < depth["nothing"]


def test_a_graph_as_dot(pictured: dk.Graph) -> None:
    dot = pictured.dot()
    bare = re.sub(r'"(?:[^"\\]|\\.)*"', '""', dot)
    assert bare.count('"') % 2 == 0, "every quote is closed"
    depth = 0
    for mark in re.findall("[{}]", bare):
        depth += 1 if mark == "{" else -1
        assert depth >= 0
    assert depth == 0
    assert dot.startswith('digraph "tested" {')
    for node in pictured.walk():
        assert '"{}" ['.format(node.path.replace('"', '\\"')) in dot
    assert dot.count("subgraph") == 4
    assert '"double" -> "early" [style=dashed, label="programmatic"];' in dot
    assert '"double" -> "the \\"branch\\"";' in dot


@pytest.mark.parametrize("name", ["ends in \\", 'a "quoted" \\" one', r"\n", '"', "{", r"\\"])
def test_any_name_is_quoted_in_dot(device: dk.Device, name: str) -> None:
    with dk.Graph(device, name) as graph:
        body = graph.if_(graph.condition(default=1), name=name)
        body.empty(name=name)
        graph.empty(after=body.node, name="last")
        dot = graph.dot()
    bare = re.sub(r'"(?:[^"\\]|\\.)*"', '""', dot)
    assert bare.replace('""', "").count('"') == 0
    assert bare.count("{") == bare.count("}") == 2
    quoted = '"{}"'.format(name.replace("\\", "\\\\").replace('"', '\\"'))
    assert f"digraph {quoted} {{" in dot
    assert f'{quoted} -> "last";' in dot


# ---- what is over ----------------------------------------------------------------------------------------------------


def test_nodes_of_a_closed_graph_say_so(device: dk.Device) -> None:
    x = ints(device, 0)
    with dk.Graph(device, "over") as graph:
        first = graph.memset(x, 1, name="first")
        second = graph.memset(x, 2, name="second", after=first)
    for use in (lambda: second.parameters, lambda: second.dependencies, lambda: graph.remove(first), graph.edges):
        with pytest.raises(dk.ClosedError, match="graph over"):
            use()


def test_the_nodes_inside_of_a_removed_child_are_removed(device: dk.Device, graph: dk.Graph) -> None:
    x = ints(device, 0)
    with dk.Graph(device, "inner") as inner:
        inner.memset(x, 1, name="fill")
        child = graph.child(inner, name="kid")
    fill, exe = graph["kid/fill"], graph.instantiate()
    changed = exe["kid/fill"]
    graph.remove(child)
    assert "removed" in repr(fill)
    with pytest.raises(dk.ClosedError, match="removed"):
        fill.parameters  # noqa: B018 - the look-up is what fails
    with pytest.raises(dk.GraphError, match="removed"):
        changed.set(value=2)
    exe.close()


def test_bodies_of_a_graph_that_a_capture_destroyed_take_no_nodes(device: dk.Device, stream: dk.Stream) -> None:
    x = ints(device, 0)
    graph = dk.Graph(device, "broken")
    body = graph.if_(graph.condition(default=1))
    with pytest.raises(dk.GraphError, match="cuStreamSynchronize"), graph.capture(stream):
        stream.synchronize()
    for verb in (graph.empty, body.empty, lambda: body.memset(x, 1)):
        with pytest.raises(dk.GraphError, match="discarded by the driver"):
            verb()
    graph.close()


def test_every_kind_of_node_is_in_the_pictures(device: dk.Device, module: dk.Module, graph: dk.Graph) -> None:
    x, host = device.array(X), np.zeros(N, np.float32)
    alloc = graph.alloc(4, np.int32, name="scratch")
    graph.free(alloc, after=graph.memset(alloc.buffer, 1, after=alloc, name="fill"), name="give back")
    scaled(graph, module, x, x, 2.0, name="double")
    graph.memcpy(host, x, name="copy")
    graph.empty(name="nothing")
    graph.host(gc.collect, name="call")
    with device.event() as event:
        graph.record(event, name="mark")
        graph.wait(event, name="await")
    graph.mem_ops([dk.WriteValue(ints(device, 0), 1)], name="write")
    graph.if_(graph.condition(default=1, name="flag"), name="branch")
    with dk.Graph(device, "inner") as inner:
        graph.child(inner, name="kid")
    for picture in (str(graph), graph.dot()):
        for node in graph.nodes:
            assert node.name in picture
            assert node.kind in picture
    assert len({node.kind for node in graph.nodes}) == 12
