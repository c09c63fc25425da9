"""A loop that the device ends: halve all elements while any of them is above a limit.

A WHILE node tests its condition before each turn. A kernel sets the condition before the loop, so that it can have no
turn at all, and the last node of the body sets it for the next turn. The number of turns is known to the device alone:
a counter in its memory tells us.
"""

from __future__ import annotations

import numpy as np
from _common import check, open_device

import drvkit as dk

N, LIMIT = 1024, 1.0


def main() -> None:
    dev = open_device()
    scale = dev.module("scale").kernel("scale<float>")
    add_scalar = dev.module("add").kernel("add_scalar<float>")
    above = dev.module("set_condition").kernel("set_condition_above<float>")
    x, turns = dev.empty(N, np.float32), dev.empty(1, np.float32)

    graph = dk.Graph(dev, "shrink")
    again = graph.condition(name="any above")
    zero = graph.memset(turns, 0, name="zero turns")
    test = graph.kernel(above, grid=1, block=256, args=(again, x, N, LIMIT), after=zero, name="test")
    body = graph.while_(again, after=test, name="loop")
    halve = body.kernel(scale, grid=4, block=256, args=(x, x, N, 0.5), name="halve")
    count = body.kernel(add_scalar, grid=1, block=1, args=(turns, turns, 1, 1.0), after=halve, name="count")
    body.kernel(above, grid=1, block=256, args=(again, x, N, LIMIT), after=count, name="test")
    print(graph)

    exe = graph.instantiate()
    with dev.stream() as stream:
        for largest, expected in ((1000, 10), (3, 2), (1, 0)):
            values = np.linspace(0, largest, N, dtype=np.float32)
            x.copy_from(values, stream)
            exe.launch(stream)
            got, count_ = x.numpy(stream), int(turns.numpy(stream)[0])
            print(f"largest {largest}: {count_} turns, now the largest is {got.max()}")
            check(f"halved {expected} times", got, values * np.float32(0.5**expected))
            if count_ != expected:
                raise ValueError(f"{count_} turns; numpy needs {expected}")
    print("ok")


if __name__ == "__main__":
    main()
