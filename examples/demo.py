"""Data through the whole way: source -> image -> module -> kernel -> node -> graph -> exec -> replay -> result.

The graph computes, on the device alone:

    h = alpha x;  while any h > limit: h = h / 2;  z = h + 1 if flag else h - 1;  y = 3 z

It runs on a million random numbers and on eight ones, is changed by name and by content, and each result is compared
with numpy, bit for bit; on the CPU device where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import numpy as np
from _common import check, open_device
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

import drvkit as dk

BLOCK = 256
LIMIT = 100.0


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
        nbytes = sum(len(image.data) for image in images)
        said += [f"{len(images)} times {images[0].kind} for {dev.arch}, {nbytes} bytes"]
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


def main() -> None:
    run(open_device())
    print("ok")


if __name__ == "__main__":
    main()
