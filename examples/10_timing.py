"""Twenty small kernels: launched one by one, as prepared launches, and as one graph launch.

Host time is what the calls take until they return. Device time is between two events around the work: where the host
is slower than the kernels, the device waits for it, and that is in there. Every figure is a median.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter

import numpy as np
from _common import check, open_device
from rich.console import Console
from rich.table import Table

import drvkit as dk

N, KERNELS = 1024, 20
WARM_UP, ROUNDS = 10, 101


def measure(dev: dk.Device, stream: dk.Stream, work: Callable[[], None]) -> tuple[float, float]:
    """Host and device time of ``work`` in microseconds."""
    host, device = [], []
    with dev.event() as start, dev.event() as end:
        for _ in range(WARM_UP + ROUNDS):
            start.record(stream)
            before = perf_counter()
            work()
            after = perf_counter()
            end.record(stream)
            stream.synchronize()
            host.append((after - before) * 1e6)
            device.append(start.elapsed_ms(end) * 1e3)
    return median(host[WARM_UP:]), median(device[WARM_UP:])


def main() -> None:
    dev = open_device()
    kernel = dev.module("add").kernel("add_scalar<float>")
    y = dev.zeros(N, np.float32)  # every kernel adds one
    args = (y, y, N, 1.0)

    graph = dk.Graph(dev, "twenty")
    last: dk.Node | None = None
    for i in range(KERNELS):
        last = graph.kernel(kernel, grid=4, block=256, args=args, after=last, name=f"plus one {i}")
    exe = graph.instantiate()
    print(f"{KERNELS} kernels of {N} elements; medians of {ROUNDS} rounds")

    with dev.stream() as stream:
        prepared = [kernel.prepare(stream, grid=4, block=256, args=args) for _ in range(KERNELS)]

        def one_by_one() -> None:
            for _ in range(KERNELS):
                kernel.launch(stream, grid=4, block=256, args=args)

        def ready() -> None:
            for launch in prepared:
                launch()

        def replay() -> None:
            exe.launch(stream)

        table = Table("way", "calls", "host µs", "device µs")
        for column in table.columns[1:]:
            column.justify = "right"
        for way, calls, work in (
            ("kernel.launch", KERNELS, one_by_one),
            ("prepared launch", KERNELS, ready),
            ("graph launch", 1, replay),
        ):
            y.fill(0)
            host, device = measure(dev, stream, work)
            check(way, y.numpy(), np.full(N, KERNELS * (WARM_UP + ROUNDS), np.float32))
            table.add_row(way, str(calls), f"{host:.1f}", f"{device:.1f}")
    Console().print(table)
    print("ok")


if __name__ == "__main__":
    main()
