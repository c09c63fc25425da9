"""Fork and join, built twice: node by node with ``after=``, and by capturing two streams that events join.

                  +-- a = z + 1 --+
    z = 2 x ------|               |------ y = a + b
                  +-- b = 3 z ----+

Both graphs have the same four edges. ``a`` and ``b`` wait for ``z`` but not for each other.
"""

from __future__ import annotations

import numpy as np
from _common import check, open_device

import drvkit as dk

N = 1024


class Work:
    """The kernels and the buffers, which both graphs use."""

    def __init__(self, dev: dk.Device) -> None:
        self.dev = dev
        self.scale = dev.module("scale").kernel("scale<float>")
        self.add = dev.module("add").kernel("add<float>")
        self.add_scalar = dev.module("add").kernel("add_scalar<float>")
        self.x, self.z, self.a, self.b, self.y = (dev.empty(N, np.float32) for _ in range(5))


def explicit(work: Work) -> dk.Graph:
    graph = dk.Graph(work.dev, "explicit")
    z = graph.kernel(work.scale, grid=4, block=256, args=(work.x, work.z, N, 2.0), name="z")
    a = graph.kernel(work.add_scalar, grid=4, block=256, args=(work.z, work.a, N, 1.0), after=z, name="a")
    b = graph.kernel(work.scale, grid=4, block=256, args=(work.z, work.b, N, 3.0), after=z, name="b")
    graph.kernel(work.add, grid=4, block=256, args=(work.a, work.b, work.y, N), after=[a, b], name="y")
    return graph


def captured(work: Work) -> dk.Graph:
    dev, graph = work.dev, dk.Graph(work.dev, "captured")
    s0, s1 = dev.stream(), dev.stream()
    fork, join = dev.event(timing=False), dev.event(timing=False)
    with graph.capture(s0):
        work.scale.launch(s0, grid=4, block=256, args=(work.x, work.z, N, 2.0))
        s0.record(fork)
        s1.wait(fork)  # from here on s1 takes part in the capture
        work.add_scalar.launch(s0, grid=4, block=256, args=(work.z, work.a, N, 1.0))
        work.scale.launch(s1, grid=4, block=256, args=(work.z, work.b, N, 3.0))
        s1.record(join)
        s0.wait(join)  # it must come back before the capture ends
        work.add.launch(s0, grid=4, block=256, args=(work.a, work.b, work.y, N))
    return graph


def edges(graph: dk.Graph, work: Work) -> list[str]:
    """The edges, each node called by the buffer that it writes: the last pointer among its arguments."""
    names = {getattr(work, name).address: name for name in "xzaby"}

    def written(node: dk.Node) -> str:
        return [names[value] for value in node.parameters["args"].values() if value in names][-1]

    return sorted(f"{written(edge.source)} -> {written(edge.target)}" for edge in graph.edges())


def main() -> None:
    dev = open_device()
    work = Work(dev)
    numbers = np.arange(N, dtype=np.float32)
    work.x.copy_from(numbers)
    graphs = [explicit(work), captured(work)]
    with dev.stream() as stream:
        for graph in graphs:
            print(f"\n{graph}")
            print(f"edges: {', '.join(edges(graph, work))}")
            for buffer in (work.z, work.a, work.b, work.y):
                buffer.fill(-1, stream)
            graph.instantiate().launch(stream)
            check(f"{graph.name}: y = (2 x + 1) + 3 (2 x)", work.y.numpy(stream), 8 * numbers + 1)
    if edges(graphs[0], work) != edges(graphs[1], work):
        raise ValueError("the two graphs differ in their edges")
    print("\nboth graphs have the same four edges and the same result")
    print("ok")


if __name__ == "__main__":
    main()
