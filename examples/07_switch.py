"""One of four bodies, chosen by an integer in device memory. An index beyond the last body runs none.

A body may hold kernels, copies, fills, and further conditional nodes. A negative index is no body either.
"""

from __future__ import annotations

import numpy as np
from _common import check, open_device

import drvkit as dk

N = 8


def main() -> None:
    dev = open_device()
    scale = dev.module("scale").kernel("scale<float>")
    add_scalar = dev.module("add").kernel("add_scalar<float>")
    numbers = np.arange(1, N + 1, dtype=np.float32)
    x, y, choice = dev.array(numbers), dev.empty(N, np.float32), dev.empty(1, np.int32)

    graph = dk.Graph(dev, "choose")
    clear = graph.memset(y, 0, name="clear")
    condition = graph.condition(name="choice")
    test = graph.set_condition(condition, choice, after=clear, name="test")
    bodies = graph.switch(condition, 4, after=test, name="switch")
    bodies[0].memcpy(y, x, name="copy")
    bodies[1].kernel(scale, grid=1, block=32, args=(x, y, N, 2.0), name="double")
    bodies[2].kernel(add_scalar, grid=1, block=32, args=(x, y, N, 10.0), name="plus ten")
    bodies[3].memset(y, 7, name="seven")
    print(graph)

    wanted = {
        0: numbers,
        1: 2 * numbers,
        2: numbers + 10,
        3: np.full(N, 7, np.float32),
        4: np.zeros(N, np.float32),
        -1: np.zeros(N, np.float32),
    }
    exe = graph.instantiate()
    with dev.stream() as stream:
        for index, want in wanted.items():
            choice.fill(index, stream)
            exe.launch(stream)
            got = y.numpy(stream)
            print(f"choice {index}: y = {got}")
            check(f"body {index}" if index in range(4) else f"no body for {index}: y stays clear", got, want)
    print("ok")


if __name__ == "__main__":
    main()
