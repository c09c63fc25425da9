"""A chain of three kernels, y = 3 (2 x + 1), of which the middle one is disabled and enabled again.

A disabled node stays in its place: what waits for it still waits for what it waited for.
"""

from __future__ import annotations

import numpy as np
from _common import check, open_device

import drvkit as dk


def main() -> None:
    dev = open_device()
    scale = dev.module("scale").kernel("scale<float>")
    add_scalar = dev.module("add").kernel("add_scalar<float>")
    numbers = np.arange(1024, dtype=np.float32)
    x, y = dev.array(numbers), dev.empty(1024, np.float32)

    graph = dk.Graph(dev, "chain")
    double = graph.kernel(scale, grid=4, block=256, args=(x, y, 1024, 2.0), name="double")
    plus = graph.kernel(add_scalar, grid=4, block=256, args=(y, y, 1024, 1.0), after=double, name="plus one")
    graph.kernel(scale, grid=4, block=256, args=(y, y, 1024, 3.0), after=plus, name="triple")
    print(graph)

    exe = graph.instantiate()
    with dev.stream() as stream:
        exe.launch(stream)
        check("y = 3 (2 x + 1)", y.numpy(stream), 3 * (2 * numbers + 1))

        exe["plus one"].disable()
        print(f"'plus one' is enabled: {exe['plus one'].enabled}")
        exe.launch(stream)
        check("y = 3 (2 x)", y.numpy(stream), 3 * (2 * numbers))

        exe["plus one"].enable()
        print(f"'plus one' is enabled: {exe['plus one'].enabled}")
        exe.launch(stream)
        check("y = 3 (2 x + 1), again", y.numpy(stream), 3 * (2 * numbers + 1))
    print("ok")


if __name__ == "__main__":
    main()
