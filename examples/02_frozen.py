"""What a graph freezes, and how each of it is changed.

A kernel node keeps the values that its launch was given: pointers, scalars, grid. It keeps neither what the pointers
point to nor the Python names that the values came from.

| frozen              | what changes it without a new graph                                       |
|---------------------|---------------------------------------------------------------------------|
| a pointer           | the content of the buffer behind it; or ``exe[node].set(x=...)``          |
| a scalar            | ``exe[node].set(alpha=...)``; or a pointer to device memory in its place  |
| the shape (grid, n) | ``exe[node].configure(grid=...)`` and ``.set(n=...)``; or padding         |
"""

from __future__ import annotations

import numpy as np
from _common import check, open_device

import drvkit as dk


def pointer(dev: dk.Device, stream: dk.Stream, scale: dk.Kernel) -> None:
    print("\n1. The pointer is frozen, the content of the buffer is not.")
    first, second, third = (np.full(1024, value, np.float32) for value in (1, 2, 3))
    x, y = dev.array(first), dev.empty(1024, np.float32)
    graph = dk.Graph(dev, "pointer")
    graph.kernel(scale, grid=4, block=256, args=(x, y, 1024, 2.0), name="double")
    exe = graph.instantiate()
    fixed = x

    x = dev.array(second)  # another buffer under the same Python name: the graph does not know names
    exe.launch(stream)
    check("x bound to another buffer: the graph still reads the old one", y.numpy(stream), 2 * first)

    fixed.copy_from(third, stream)
    exe.launch(stream)
    check("new content in the fixed buffer: the graph reads it", y.numpy(stream), 2 * third)

    exe["double"].set(x=x)
    exe.launch(stream)
    check('exe["double"].set(x=...): the graph reads the other buffer', y.numpy(stream), 2 * second)


def scalar(dev: dk.Device, stream: dk.Stream, scale: dk.Kernel, scale_dynamic: dk.Kernel) -> None:
    print("\n2. A scalar is frozen. A scalar in device memory is content.")
    ones = np.ones(1024, np.float32)
    x, y = dev.array(ones), dev.empty(1024, np.float32)
    alpha = 2.0
    graph = dk.Graph(dev, "scalar")
    graph.kernel(scale, grid=4, block=256, args=(x, y, 1024, alpha), name="double")
    exe = graph.instantiate()

    alpha = 3.0  # the host's variable: the graph has its value of then
    exe.launch(stream)
    check("alpha = 3.0 on the host: the graph still multiplies by 2", y.numpy(stream), 2 * ones)

    exe["double"].set(alpha=alpha)
    exe.launch(stream)
    check('exe["double"].set(alpha=3.0): it multiplies by 3', y.numpy(stream), 3 * ones)

    factor = dev.array(np.array([4], np.float32))
    dynamic = dk.Graph(dev, "dynamic scalar")
    dynamic.kernel(scale_dynamic, grid=4, block=256, args=(x, y, 1024, factor), name="multiply")
    dynamic_exe = dynamic.instantiate()
    for value in (4, 5):
        factor.fill(value, stream)
        dynamic_exe.launch(stream)
        check(f"scale_dynamic with {value} in device memory", y.numpy(stream), np.float32(value) * ones)


def shape(dev: dk.Device, stream: dk.Stream, scale: dk.Kernel) -> None:
    print("\n3. The shape is frozen: grid 4 and n = 1024 were worked out by the host, once.")
    numbers = np.arange(2048, dtype=np.float32)
    x, y = dev.array(numbers), dev.empty(2048, np.float32)
    graph = dk.Graph(dev, "shape")
    graph.kernel(scale, grid=4, block=256, args=(x, y, 1024, 2.0), name="double")
    exe = graph.instantiate()

    y.fill(-1, stream)
    exe.launch(stream)
    want = np.concatenate([2 * numbers[:1024], np.full(1024, -1, np.float32)])
    check("2048 elements, the old graph: it does the first 1024 only", y.numpy(stream), want)

    exe["double"].configure(grid=8)
    exe["double"].set(n=2048)
    exe.launch(stream)
    check("grid 8 and n = 2048: it does all of them", y.numpy(stream), 2 * numbers)


def padding(dev: dk.Device, stream: dk.Stream, scale_padded: dk.Kernel) -> None:
    print("\n4. Padding: one shape for several lengths. Here a zero is padding, and its output is left alone.")
    x, y = dev.zeros(8, np.int32), dev.empty(8, np.int32)
    graph = dk.Graph(dev, "padding")
    graph.kernel(scale_padded, grid=1, block=8, args=(x, y, 8, 2), name="double")
    exe = graph.instantiate()
    for length in (5, 7):
        values = np.arange(1, 9, dtype=np.int32)
        values[length:] = 0
        x.copy_from(values, stream)
        y.fill(-1, stream)
        exe.launch(stream)
        got = y.numpy(stream)
        print(f"{values} -> {got}")
        check(f"length {length} in a buffer of 8", got, np.where(values != 0, 2 * values, np.int32(-1)))


def main() -> None:
    dev = open_device()
    module = dev.module("scale", ["scale<float>", "scale_dynamic<float>", "scale_padded<int>"])
    scale = module.kernel("scale<float>")
    with dev.stream() as stream:
        pointer(dev, stream, scale)
        scalar(dev, stream, scale, module.kernel("scale_dynamic<float>"))
        shape(dev, stream, scale)
        padding(dev, stream, module.kernel("scale_padded<int>"))
    print("ok")


if __name__ == "__main__":
    main()
