"""Memory that every rank of a world maps: the same bytes, at one distance from rank to rank.

Rank r's part begins at ``base + r * stride`` of this process's addresses, so that a kernel needs two numbers to reach
all ranks. The parts are physical memory of their ranks' devices (VMM). Between processes it travels as file
descriptors; whoever maps it keeps it, so a part outlives the process that made it, and closing waits for nobody.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike

from .device import Device
from .driver import DriverError
from .lifetime import Owned
from .memory import Buffer
from .world import WorldError

if TYPE_CHECKING:
    from .world import World

__all__ = ["SymmetricMemory"]


class SymmetricMemory(Owned):
    """``nbytes`` of each rank's device, mapped by all; zero at first. Every rank makes it at the same time, with the
    same size; either all have it or all get a `WorldError`.

    Attributes:
        world: whose it is.
        nbytes: of one rank's part, as they were asked for.
        base: the address of rank 0's part in this process.
        stride: bytes from one rank's part to the next one's.
    """

    kind = "symmetric memory"

    def __init__(self, world: World, nbytes: int) -> None:
        if nbytes < 1:
            raise ValueError(f"SymmetricMemory: nbytes: wanted at least 1, got {nbytes!r}")
        self.world, self.nbytes = world, nbytes
        _differ(world)
        world.agree("bytes of symmetric memory", nbytes)
        with ExitStack() as undo:
            self.stride = max(_outcome(world, lambda: [_rounded(nbytes, device) for device in world.devices]))
            handles = _outcome(world, lambda: self._create(undo), told=False)
            with ExitStack() as descriptors:
                every = self._exchange(handles, descriptors)
                self.base = _outcome(world, lambda: self._map(every, undo), told=False)
            release, devices = undo.pop_all(), list(dict.fromkeys(world.devices))
            release.callback(_settle, devices)
            self._own(self.base, release.close, f"of {world.size} x {nbytes} bytes")
        for rank in world.ranks:
            self.part(rank, nbytes, np.uint8).fill_bytes(0)
        for device in devices:
            device.synchronize()
        world.barrier()

    def part(
        self, rank: int, shape: int | Sequence[int], dtype: DTypeLike, *, offset: int = 0, of: int | None = None
    ) -> Buffer:
        """A window onto ``rank``'s part, ``offset`` bytes from its beginning, for kernels of the local rank ``of``; by
        default of ``rank`` itself where it is local, else of the first local one."""
        box = self._in_use()
        if not 0 <= rank < self.world.size:
            raise ValueError(f"rank: wanted 0 to {self.world.size - 1}, got {rank!r}")
        local = of if of is not None else rank if rank in self.world.ranks else self.world.ranks[0]
        if local not in self.world.ranks:
            raise ValueError(f"of: wanted a rank of this process, {self.world.ranks}, got {of!r}")
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        if offset < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"{nbytes} bytes at {offset} of a part of {self.nbytes} bytes")
        device = self.world.devices[self.world.ranks.index(local)]
        address = self.base + rank * self.stride + offset
        return Buffer.borrow(device, address, shape, dtype, where="symmetric", owner=box)

    def every(self, of: int) -> Buffer:
        """All parts, as bytes, for kernels of the local rank ``of``."""
        device = self.world.devices[self.world.ranks.index(of)]
        count = self.world.size * self.stride
        return Buffer.borrow(device, self.base, count, np.uint8, where="symmetric", owner=self._in_use())

    # Making it

    def _create(self, undo: ExitStack) -> list[Any]:
        """The physical memory of each local rank."""
        handles = []
        for device in self.world.devices:
            driver = device.driver
            with device.context:
                handle = driver.cuMemCreate(self.stride, _properties(device), 0)
            undo.callback(driver.cuMemRelease, handle)
            handles.append(handle)
        return handles

    def _exchange(self, handles: list[Any], descriptors: ExitStack) -> list[Any]:
        """A handle of each rank's part: the local ones as they are, the others through file descriptors."""
        world = self.world
        if len(world.ranks) == world.size:
            return handles
        driver = world.devices[0].driver

        def exported() -> list[int]:
            made = []
            for handle in handles:
                made.append(int(driver.cuMemExportToShareableHandle(handle, _file_descriptor(driver), 0)))
                descriptors.callback(os.close, made[-1])
            return made

        received = world.exchange_fds(_outcome(world, exported, told=False))
        for each in received:
            for fd in each:
                descriptors.callback(os.close, fd)

        def imported() -> list[Any]:
            made = []
            for rank in range(world.size):
                if rank in world.ranks:
                    made.append(handles[world.ranks.index(rank)])
                    continue
                handle = driver.cuMemImportFromShareableHandle(received[0][rank], _file_descriptor(driver))
                descriptors.callback(driver.cuMemRelease, handle)
                made.append(handle)
            return made

        every: list[Any] = _outcome(world, imported, told=False)
        return every

    def _map(self, every: list[Any], undo: ExitStack) -> int:
        """Map each rank's part behind the one before, for all local devices."""
        devices = list(dict.fromkeys(self.world.devices))
        driver, total = devices[0].driver, self.world.size * self.stride
        with devices[0].context:
            base = int(driver.cuMemAddressReserve(total, 0, 0, 0))
            undo.callback(devices[0].context.call, driver.cuMemAddressFree, base, total)
            for rank, handle in enumerate(every):
                at = base + rank * self.stride
                driver.cuMemMap(at, self.stride, 0, handle, 0)
                undo.callback(devices[0].context.call, driver.cuMemUnmap, at, self.stride)
            access = []
            for device in devices:
                each = driver.CUmemAccessDesc()
                each.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
                each.location.id = device.ordinal
                each.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
                access.append(each)
            driver.cuMemSetAccess(base, total, access, len(access))
        return base


def _properties(device: Device) -> Any:
    driver = device.driver
    made = driver.CUmemAllocationProp()
    made.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    made.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    made.location.id = device.ordinal
    made.requestedHandleTypes = _file_descriptor(driver)
    return made


def _file_descriptor(driver: Any) -> Any:
    return driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def _rounded(nbytes: int, device: Device) -> int:
    option = device.driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
    with device.context:
        granularity = int(device.driver.cuMemGetAllocationGranularity(_properties(device), option))
    return -(-nbytes // granularity) * granularity


def _settle(devices: list[Device]) -> None:
    """What kernels still do with the memory comes before it goes."""
    for device in devices:
        device.context.call(device.driver.cuCtxSynchronize)


def _differ(world: World) -> None:
    """Refuse two ranks of one GPU: they would wait for each other without end. Virtual ranks are one launch."""
    if world.virtual:
        return
    own = [
        device.driver.cuDeviceGetUuid(device.handle).bytes.hex() if device.driver.kind == "cuda" else None
        for device in world.devices
    ]
    every = world.gather(own)
    for rank, each in enumerate(every):
        if each is not None and each in every[:rank]:
            first = every.index(each)
            raise WorldError(rank, f"ranks {first} and {rank} have one GPU ({each}): virtual ranks share one")


def _outcome(world: World, work: Callable[[], Any], *, told: bool = True) -> Any:
    """All ranks do a step: its result (of all ranks, if ``told``), or on every rank an error of where it failed."""
    result: Any = None
    error: Exception | None = None
    try:
        result = work()
    except (DriverError, OSError) as failure:
        error = failure
    values = result if told and error is None else [None] * len(world.ranks)
    outcomes = world.gather([[str(error) if error else None, value] for value in values])
    for rank, (failed, _) in enumerate(outcomes):
        if failed:
            raise WorldError(rank, failed) from error
    return [value for _, value in outcomes] if told else result
