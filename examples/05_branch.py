"""A branch that the device decides: h = 2 x; z = h + 1 or h - 1, as a flag says; y = 3 z.

One graph has both branches. What changes between its launches is the content of the flag: the host neither looks at it
nor builds anything anew. For x = 1 the results are 9 and 3.
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
    x, h, z, y = dev.array(np.ones(N, np.float32)), *(dev.empty(N, np.float32) for _ in range(3))
    flag = dev.array(np.array([True]))

    graph = dk.Graph(dev, "forward")
    double = graph.kernel(scale, grid=1, block=32, args=(x, h, N, 2.0), name="double")
    condition = graph.condition(name="flag is set")
    test = graph.set_condition(condition, flag, after=double, name="test")
    yes, no = graph.if_else(condition, after=test, name="branch")
    yes.kernel(add_scalar, grid=1, block=32, args=(h, z, N, 1.0), name="plus one")
    no.kernel(add_scalar, grid=1, block=32, args=(h, z, N, -1.0), name="minus one")
    graph.kernel(scale, grid=1, block=32, args=(z, y, N, 3.0), after=yes.node, name="triple")
    print(graph)

    exe = graph.instantiate()
    with dev.stream() as stream:
        for value, want in ((True, 9), (False, 3), (True, 9)):
            flag.fill(value, stream)
            exe.launch(stream)
            got = y.numpy(stream)
            print(f"flag {value}: y = {got}")
            check(f"the branch for {value}", got, np.full(N, want, np.float32))
    print("ok")


if __name__ == "__main__":
    main()
