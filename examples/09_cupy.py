"""CuPy and drvkit on the same memory: y = 3 (2 x + 1), of which CuPy does the inner part.

Three meetings, none of which copies: CuPy views a Buffer; CuPy arrays are arguments of a kernel; and what CuPy queues
on a stream is captured into a graph, which becomes one node of another.
"""

from __future__ import annotations

import numpy as np
from _common import check, open_device

import drvkit as dk

N = 1024


def main() -> None:
    dev = open_device()
    if dev.id.startswith("cpu"):
        print("CuPy needs a GPU: nothing to show")
        return
    try:
        import cupy
    except ImportError:
        print("CuPy is not installed: nothing to show")
        return

    numbers = np.arange(N, dtype=np.float32)
    buffer = dev.array(numbers)
    x = cupy.asarray(buffer)
    if x.data.ptr != buffer.address or cupy.from_dlpack(buffer).data.ptr != buffer.address:
        raise ValueError("CuPy has copied the buffer")
    print(f"a view: the Buffer and the CuPy array are both at {buffer.address:#x}")

    t, z, y = (cupy.empty(N, np.float32) for _ in range(3))

    def compute() -> None:  # out= throughout: a capture must not allocate
        cupy.multiply(x, 2, out=t)
        cupy.add(t, 1, out=z)

    compute()  # CuPy compiles its kernels at their first use, which a capture must not see
    dev.synchronize()
    z.fill(0)
    dev.synchronize()  # CuPy's own stream does not wait for ours, nor ours for it

    inner = dk.Graph(dev, "cupy")
    with dev.stream() as stream:
        cupy_stream = cupy.cuda.Stream.from_external(stream)  # the same stream, as CuPy knows it
        with inner.capture(stream), cupy_stream:
            compute()  # the graph cannot know CuPy's arrays: we keep x, t and z for as long as it is used
        print(inner)

        outer = dk.Graph(dev, "outer")
        child = outer.child(inner, name="2 x + 1")
        scale = dev.module("scale").kernel("scale<float>")
        outer.kernel(scale, grid=4, block=256, args=(z, y, N, 3.0), after=child, name="triple")
        print(outer)

        exe = outer.instantiate()
        exe.launch(stream)
        stream.synchronize()
        check("y = 3 (2 x + 1), in a CuPy array", cupy.asnumpy(y), 3 * (2 * numbers + 1))

        buffer.copy_from(-numbers, stream)
        exe.launch(stream)
        stream.synchronize()
        check("new content in the Buffer that CuPy views", cupy.asnumpy(y), 3 * (-2 * numbers + 1))
    print("ok")


if __name__ == "__main__":
    main()
