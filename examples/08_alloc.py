"""Memory that a graph allocates and frees itself: y = 3 (2 x + 1) with two temporaries.

The second temporary is allocated after the first one is freed, so the driver may give it the same memory: it knows the
lifetimes from the edges. Addresses are fixed when the nodes are added. The memory behind them comes later, with the
exec or its first launch, and then stays reserved for the launches to come.
"""

from __future__ import annotations

import numpy as np
from _common import check, open_device

import drvkit as dk

N = 2**24  # float32: 64 MiB
BLOCK = 256


def main() -> None:
    dev = open_device()
    scale = dev.module("scale").kernel("scale<float>")
    add_scalar = dev.module("add").kernel("add_scalar<float>")
    numbers = np.arange(N, dtype=np.float32) % 1000
    x, y = dev.array(numbers), dev.empty(N, np.float32)
    grid = -(-N // BLOCK)

    def say_free(when: str) -> None:
        free, total = dev.memory_bytes()
        print(f"memory {when}: {free / 2**20:.0f} of {total / 2**20:.0f} MiB free")

    say_free("before")
    graph = dk.Graph(dev, "temporaries")
    first = graph.alloc(N, np.float32, name="first")
    h = graph.kernel(scale, grid=grid, block=BLOCK, args=(x, first.buffer, N, 2.0), after=first, name="double")
    z = graph.kernel(add_scalar, grid=grid, block=BLOCK, args=(first.buffer, y, N, 1.0), after=h, name="plus one")
    free_first = graph.free(first, after=z, name="free first")

    second = graph.alloc(N, np.float32, after=free_first, name="second")
    t = graph.kernel(scale, grid=grid, block=BLOCK, args=(y, second.buffer, N, 3.0), after=second, name="triple")
    out = graph.memcpy(y, second.buffer, after=t, name="out")
    graph.free(second, after=out, name="free second")
    print(graph)

    print(f"first is at {first.buffer.address:#x}, second at {second.buffer.address:#x}")
    same = first.buffer.address == second.buffer.address
    print("they share their memory" if same else "the driver gave each its own memory")

    exe = graph.instantiate()
    say_free("with the exec")
    with dev.stream() as stream:
        for launch in (1, 2):
            exe.launch(stream)
            check(f"launch {launch}: y = 3 (2 x + 1)", y.numpy(stream), 3 * (2 * numbers + 1))
            say_free(f"after launch {launch}")
    print("ok")


if __name__ == "__main__":
    main()
