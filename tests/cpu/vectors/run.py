"""Running cases on a device, all that fit in one module at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np

from drvkit.device import Device, Stream
from drvkit.driver import DriverError
from drvkit.module import Kernel, Module

from .case import Case, module_ptx
from .floats import WORDS, Bits
from .inputs import BLOCK, KINDS, inputs

Outputs = tuple[Bits, ...]
POISON = 0xA5
PER_MODULE = 64  # kernels: looking one up takes time for each


@contextmanager
def loaded(device: Device, cases: Sequence[Case]) -> Iterator[tuple[dict[str, Kernel], dict[str, str]]]:
    """The kernels of the cases by their names, and what the driver said of those that it refuses."""
    kernels: dict[str, Kernel] = {}
    refused: dict[str, str] = {}
    with ExitStack() as stack:

        def load(some: Sequence[Case]) -> None:
            try:
                module = stack.enter_context(Module(device, module_ptx(some)))
            except DriverError as error:
                if len(some) == 1:
                    refused[some[0].name] = str(error)
                else:  # find out which
                    load(some[: len(some) // 2])
                    load(some[len(some) // 2 :])
            else:
                kernels.update((case.name, module.kernel(case.symbol, signature=case.signature)) for case in some)

        for start in range(0, len(cases), PER_MODULE):
            load(cases[start : start + PER_MODULE])
        yield kernels, refused


def operands(case: Case, count: int) -> tuple[Bits, ...]:
    """The inputs of a case for about ``count`` threads, and after them global memory as it is before."""
    count = min(count, case.most)
    given = inputs(case.kinds, count) if case.kinds else ()
    if case.memory is None:
        return given
    threads = len(given[0]) if given else -(-count // BLOCK) * BLOCK
    return (*given, memory_before(case, threads))


def memory_before(case: Case, threads: int) -> Bits:
    """Special values and random ones, in no order that the inputs have."""
    assert case.memory
    kind, lanes = case.memory.element
    size = threads * case.memory.extent * lanes
    special = np.array(KINDS[kind].special or (0,), np.uint64).astype(KINDS[kind].word)
    before = KINDS[kind].random(size, "memory")
    before[::5] = np.resize(special, len(before[::5]))
    return before.view(WORDS[case.memory.width])


def launch(kernel: Kernel, stream: Stream, case: Case, given: tuple[Bits, ...]) -> Outputs:
    """The outputs of one case, and after them the memory as it is then."""
    device = kernel.device
    threads = len(given[0]) if case.kinds else len(given[-1]) // case.memory.extent if case.memory else 0
    with ExitStack() as stack:
        buffers = [stack.enter_context(device.array(array)) for array in given]
        split = len(case.kinds)
        made = [stack.enter_context(device.empty(threads, WORDS[width]).fill_bytes(POISON)) for width in case.outputs]
        kernel.launch(stream, grid=threads // BLOCK, block=BLOCK, args=(*buffers[:split], *made, *buffers[split:]))
        return tuple(buffer.numpy(stream) for buffer in (*made, *buffers[split:]))


def run(device: Device, cases: Sequence[Case], count: int) -> dict[str, Outputs | str]:
    """For each case by its name the outputs of its inputs for ``count`` threads, or why the driver refuses it."""
    results: dict[str, Outputs | str] = {}
    with device.stream() as stream, loaded(device, cases) as (kernels, refused):
        results.update(refused)
        for case in cases:
            if case.name in kernels:
                results[case.name] = launch(kernels[case.name], stream, case, operands(case, count))
    return results
