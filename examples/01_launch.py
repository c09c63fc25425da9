"""One kernel launch, stage by stage: source -> image -> module -> kernel -> launch -> result.

Each stage gives an object that can be looked at. ``dev.module("scale").kernel("scale<float>")`` goes through the first
four in one line and keeps the image in the user's cache directory.
"""

from __future__ import annotations

from tempfile import TemporaryDirectory
from time import perf_counter

import numpy as np
from _common import check, open_device

import drvkit as dk


def main() -> None:
    dev = open_device()

    source = dk.Source.find("scale")
    kernels = ", ".join(kernel.qualified for kernel in source.kernels())
    print(f"source: {source.name} has the kernels {kernels}")

    with TemporaryDirectory() as directory:  # a cache of our own, empty, so that the first build has to compile
        cache = dk.Cache(directory)
        start = perf_counter()
        image = dk.build(source, ["scale<float>"], arch=dev.arch, cache=cache)
        compiled = perf_counter()
        again = dk.build(source, ["scale<float>"], arch=dev.arch, cache=cache)
        cached = perf_counter()
    print(f"image: a {image.kind} for {image.arch} of {len(image.data)} bytes")
    print(f"  not cached: compiled in {(compiled - start) * 1e3:.1f} ms")
    print(f"  cached: read from disk in {(cached - compiled) * 1e3:.1f} ms")
    if again.data != image.data:
        raise ValueError("the cache gave another image than the compiler")

    module = dev.module(image)
    print(f"module: loaded, with {', '.join(module.names())}")

    kernel = module.kernel("scale<float>")
    print(f"kernel: {kernel.name}{kernel.signature}")
    print(f"  symbol {kernel.symbol}")
    print(f"  {kernel.registers} registers and {kernel.local_bytes} bytes of local memory a thread")
    print(f"  {kernel.occupancy(256)} blocks of 256 threads fit on each of the {dev.multiprocessors} multiprocessors")

    x = np.arange(1024, dtype=np.float32)
    with dev.array(x) as x_dev, dev.empty(1024, np.float32) as y_dev, dev.stream() as stream:
        kernel.launch(stream, grid=4, block=256, args=(x_dev, y_dev, 1024, 2.0))
        print("launch: queued as grid 4, block 256: a thread for each of 1024 elements")
        stream.synchronize()
        y = y_dev.numpy()
    print(f"result: {y[:4]} ... {y[-2:]}")
    check("y = 2 x", y, x * np.float32(2))
    print("ok")


if __name__ == "__main__":
    main()
