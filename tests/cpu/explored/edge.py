"""Two kernels of a graph, of which the second reads what the first writes: ``edge.py [forgotten]`` has no edge."""

from __future__ import annotations

import sys

import numpy as np

import drvkit as dk

device = dk.Device()
kernel = device.module("scale").kernel("scale<float>")
x, y, z = device.array(np.ones(1024, np.float32)), device.zeros(1024, np.float32), device.zeros(1024, np.float32)
with dk.Graph(device, "forward") as graph, device.stream() as stream:
    double = graph.kernel(kernel, grid=4, block=256, args=(x, y, 1024, 2.0), name="double")
    after = None if "forgotten" in sys.argv else double
    graph.kernel(kernel, grid=4, block=256, args=(y, z, 1024, 3.0), name="triple", after=after)
    with graph.instantiate() as exe:
        exe.launch(stream)
        stream.synchronize()
