"""Data through the whole way: source -> image -> module -> kernel -> node -> graph -> exec -> replay -> result.

The graph computes, on the device alone:

    h = alpha x;  while any h > limit: h = h / 2;  z = h + 1 if flag else h - 1;  y = 3 z

It runs on a million random numbers and on eight ones, is changed by name and by content, and each result is compared
with numpy, bit for bit. Where there is no GPU the kernels are compiled all the same, and the demo ends there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import numpy as np
from _common import NO_GPU, check
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

import drvkit as dk

BLOCK = 256
LIMIT = 100.0
PLAN = """\
  zero    memset turns <- 0
  double  scale<float>: h = 2 x                              after zero
  test    set_condition_above<float>: any h > limit          after double
  shrink  WHILE any h > limit                                after test
    halve   scale<float>: h = h / 2
    turn    add_scalar<float>: turns = turns + 1             after halve
    test    set_condition_above<float>: any h > limit        after turn
  decide  set_condition<bool>: flag                          after shrink
  branch  IF flag                                            after decide
    then:   plus one, add_scalar<float>: z = h + 1
    else:   minus one, add_scalar<float>: z = h - 1
  triple  scale<float>: y = 3 z                              after branch"""

# What stands for T in the kernels that do not take float.
TYPES = {"set_condition": "int", "set_condition_below_count": "int"}


class Stages:
    """What has been done, and how long it took."""

    def __init__(self) -> None:
        self.table = Table("stage", "what came out of it", "ms")
        self.table.columns[2].justify = "right"

    @contextmanager
    def stage(self, name: str) -> Iterator[list[str]]:
        """Time the block; it puts words for what came out of it into the list."""
        words: list[str] = []
        start = perf_counter()
        yield words
        ms = (perf_counter() - start) * 1e3
        self.add(name, " ".join(words), ms)

    def add(self, name: str, what: str, ms: float) -> None:
        print(f"{name}: {what} ({ms:.3f} ms)")
        self.table.add_row(name, what, f"{ms:.3f}")


class Forward:
    """The graph for ``n`` elements, with its buffers."""

    def __init__(self, dev: dk.Device, kernels: dict[str, dk.Kernel], n: int) -> None:
        scale, add_scalar = kernels["scale<float>"], kernels["add_scalar<float>"]
        above, set_condition = kernels["set_condition_above<float>"], kernels["set_condition<bool>"]
        grid = -(-n // BLOCK)
        self.x, self.h, self.z, self.y = (dev.empty(n, np.float32) for _ in range(4))
        self.turns, self.flag = dev.empty(1, np.float32), dev.array(np.array([True]))
        x, h, z, y, turns = self.x, self.h, self.z, self.y, self.turns

        self.graph = g = dk.Graph(dev, f"forward {n}")
        zero = g.memset(turns, 0, name="zero")
        double = g.kernel(scale, grid=grid, block=BLOCK, args=(x, h, n, 2.0), after=zero, name="double")
        any_above = g.condition(name="any above")
        test = g.kernel(above, grid=1, block=1024, args=(any_above, h, n, LIMIT), after=double, name="test")

        body = g.while_(any_above, after=test, name="shrink")
        halve = body.kernel(scale, grid=grid, block=BLOCK, args=(h, h, n, 0.5), name="halve")
        turn = body.kernel(add_scalar, grid=1, block=1, args=(turns, turns, 1, 1.0), after=halve, name="turn")
        body.kernel(above, grid=1, block=1024, args=(any_above, h, n, LIMIT), after=turn, name="test")

        is_set = g.condition(name="flag is set")
        decide = g.kernel(set_condition, grid=1, block=1, args=(is_set, self.flag), after=body.node, name="decide")
        yes, no = g.if_else(is_set, after=decide, name="branch")
        yes.kernel(add_scalar, grid=grid, block=BLOCK, args=(h, z, n, 1.0), name="plus one")
        no.kernel(add_scalar, grid=grid, block=BLOCK, args=(h, z, n, -1.0), name="minus one")
        g.kernel(scale, grid=grid, block=BLOCK, args=(z, y, n, 3.0), after=yes.node, name="triple")


def reference(x: NDArray[np.float32], alpha: float, flag: bool) -> tuple[NDArray[Any], int]:
    """``y`` and the number of turns."""
    h = x * np.float32(alpha)
    turns = 0
    while (h > LIMIT).any():
        h *= np.float32(0.5)
        turns += 1
    z = h + np.float32(1 if flag else -1)
    return z * np.float32(3), turns


def run(dev: dk.Device) -> None:
    stages, n = Stages(), 1_000_000
    x = np.random.default_rng(1).uniform(-1000, 1000, n).astype(np.float32)

    with stages.stage("source") as said:
        sources = [dk.Source.find(name) for name in ("scale", "add", "set_condition")]
        said += [", ".join(source.name for source in sources)]
    names = (["scale<float>"], ["add_scalar<float>"], ["set_condition_above<float>", "set_condition<bool>"])
    with stages.stage("image") as said:
        images = [dk.build(source, wanted, arch=dev.arch) for source, wanted in zip(sources, names, strict=True)]
        said += [f"{len(images)} cubins for {dev.arch}, {sum(len(image.data) for image in images)} bytes"]
    with stages.stage("module") as said:
        modules = [dev.module(image) for image in images]
        said += [f"{len(modules)} loaded"]
    with stages.stage("kernel") as said:
        kernels = {name: m.kernel(name) for m, wanted in zip(modules, names, strict=True) for name in wanted}
        said += [", ".join(f"{name} ({kernel.registers} registers)" for name, kernel in kernels.items())]
    with stages.stage("node, graph") as said:
        forward = Forward(dev, kernels, n)
        said += [f"{sum(1 for _ in forward.graph.walk())} nodes, with their buffers"]
    with stages.stage("exec") as said:
        exe = forward.graph.instantiate()
        said += ["the graph, checked and made executable"]

    with dev.stream() as stream:

        def replay(name: str, alpha: float, flag: bool) -> None:
            y, turns = reference(x, alpha, flag)
            with stages.stage(name) as said:
                exe.launch(stream)
                stream.synchronize()
                said += [f"alpha {alpha}, flag {flag}"]
            check(f"{n} elements of y", forward.y.numpy(stream), y)
            check(f"{turns} turns of the loop", forward.turns.numpy(stream), np.array([turns], np.float32))

        with stages.stage("input") as said:
            forward.x.copy_from(x, stream)
            stream.synchronize()
            said += [f"{x.nbytes} bytes to the device"]
        replay("first replay", 2.0, True)
        with stages.stage("change a content") as said:
            forward.flag.fill(False, stream)
            said += ["flag = False, in device memory"]
        replay("replay", 2.0, False)
        with stages.stage("change by name") as said:
            exe["double"].set(alpha=8.0)
            said += ['exe["double"].set(alpha=8.0)']
        replay("replay", 8.0, False)
        stages.add("replay", "time on the device, mean of 20", exe.time_ms(stream, 20))
        with stages.stage("result") as said:
            y = forward.y.numpy(stream)
            said += [f"{y.nbytes} bytes to the host"]

        small = Forward(dev, kernels, 8)
        print(f"\n{small.graph}")
        small_exe = small.graph.instantiate()
        small.x.copy_from(np.ones(8, np.float32), stream)
        for flag, want in ((True, 9), (False, 3)):
            small.flag.fill(flag, stream)
            small_exe.launch(stream)
            y = small.y.numpy(stream)
            print(f"x = 1, flag {flag}: y = {y}")
            check("8 elements of y", y, np.full(8, want, np.float32))
    print()
    Console().print(stages.table)


def compile_only(arch: str) -> None:
    table = Table("file", "kernel", "bytes", "ms")
    for column in table.columns[2:]:
        column.justify = "right"
    place = dk.Source.find("scale").path
    assert place is not None
    for path in sorted(place.parent.glob("*.cu")):
        source = dk.Source.find(path)
        for kernel in source.kernels():
            name = kernel.qualified
            if kernel.template:
                name += f"<{TYPES.get(name, 'float')}>"
            start = perf_counter()
            image = dk.build(source, [name], arch=arch, cache=None)
            table.add_row(path.name, name, str(len(image.data)), f"{(perf_counter() - start) * 1e3:.0f}")
    Console().print(table)


def main() -> None:
    try:
        dev = dk.Device()
    except dk.DriverError as error:
        if error.code not in NO_GPU:
            raise
        print(f"no GPU here: {error}")
        print("compiling every kernel for sm_90a, which needs none:")
        compile_only("sm_90a")
        print(f"the graph itself needs a device. There it would be:\n{PLAN}")
        return
    print(f"device: {dev.name} ({dev.id}, {dev.arch})")
    run(dev)
    print("ok")


if __name__ == "__main__":
    main()
