"""Memory of each rank that all ranks of a world reach.

`SymmetricMemory` is made for that: rank r's part begins at ``base + r * stride`` of this process's addresses, so that a
kernel needs two numbers to reach all ranks. The parts are physical memory of their ranks' devices (VMM). Between
processes it travels as file descriptors; whoever maps it keeps it, so a part outlives the process that made it.

`PeerMemory` is arrays that were there before. Between processes they are opened by CUDA IPC, which keeps nothing.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import DTypeLike

from .device import Device
from .driver import DriverError, multicast_refusal
from .lifetime import Owned
from .memory import Buffer, View, holder, view_of
from .scalars import said
from .world import WorldError, this_host

if TYPE_CHECKING:
    from .world import World

__all__ = ["PeerMemory", "SymmetricMemory"]

T = TypeVar("T")


class _OfRanks(Owned):
    """What all ranks of a world make at the same time: either all have it, or all get a `WorldError`."""

    world: World

    def _all(self, *steps: Callable[[], T]) -> list[T]:
        """A step of each rank of this process, or one for all of them: what they gave, if no rank of the world failed.
        Else every rank raises which did, and why."""
        made: list[T] = []
        failed: list[str | None] = [None] * len(self.world.ranks)
        cause: Exception | None = None
        try:
            for step in steps:
                made.append(step())
        except Exception as error:
            failed[len(made)], cause = str(error), error
        try:
            for rank, why in enumerate(self.world.gather(failed, what=self.kind)):
                if why is not None:
                    raise WorldError(rank, f"{self.kind}: rank {rank}: {why}") from cause
        finally:
            cause = None  # it holds this frame, and by that itself and what the steps use
        return made

    def _distinct(self) -> None:
        """Refuse two ranks of one GPU: they would wait for each other without end (virtual ranks are one launch). And
        ranks of different kinds of devices."""
        world = self.world
        if world.virtual:
            return
        every = world.gather(self._all(*(partial(_identity, device) for device in world.devices)), what=self.kind)
        for rank, (kind, uuid) in enumerate(every):
            if kind != every[0][0]:
                raise WorldError(rank, f"rank 0 has a device of kind {every[0][0]!r}, rank {rank} of kind {kind!r}")
            first = every.index([kind, uuid])
            if kind == "cuda" and first < rank:
                raise WorldError(rank, f"ranks {first} and {rank} have one GPU ({uuid}): virtual ranks share one")

    def _user(self, rank: int, of: int | None) -> Device:
        """The device whose kernels use what ``rank`` has: that of the local rank ``of``, by default of ``rank`` itself
        where it is local, else of the first local one."""
        world = self.world
        if not 0 <= rank < world.size:
            raise ValueError(f"rank: wanted 0 to {world.size - 1}, got {rank!r}")
        local = of if of is not None else rank if rank in world.ranks else world.ranks[0]
        if local not in world.ranks:
            raise ValueError(f"of: wanted a rank of this process, {world.ranks}, got {of!r}")
        return world.devices[world.ranks.index(local)]


class SymmetricMemory(_OfRanks):
    """``nbytes`` of each rank's device, mapped by all; zero at first. Every rank makes it at the same time, with the
    same arguments. Closing waits for nobody.

    With ``multicast`` all parts also lie behind one range of addresses, for ``multimem`` instructions. On a host that
    others use too that can take GPUs out of their service: it is opted in to twice, by the argument and by
    ``DRVKIT_ENABLE_MULTICAST=1`` in the environment of every rank. A rank that closes takes its part out of the range:
    let no kernel of another rank use that any more.

    Attributes:
        world: whose it is.
        nbytes: of one rank's part, as they were asked for.
        base: the address of rank 0's part in this process.
        stride: bytes from one rank's part to the next one's.
        multicast: the address behind which all parts lie; 0 if there is none.
    """

    kind = "symmetric memory"

    def __init__(self, world: World, nbytes: int, *, multicast: bool = False) -> None:
        if isinstance(nbytes, bool) or not isinstance(nbytes, int | np.integer) or nbytes < 1:
            raise ValueError(f"SymmetricMemory: nbytes: wanted an integer of at least 1, got {nbytes!r}")
        if multicast and (world.virtual or world.size < 2):
            raise ValueError(f"SymmetricMemory: multicast: wanted two devices or more, a rank each, got {world!r}")
        self.world, self.nbytes = world, nbytes
        self._driver = world.devices[0].driver
        self._distinct()
        world.agree("symmetric memory (bytes, multicast)", [nbytes, multicast])
        if multicast:
            self._all(*(partial(_may_multicast, device) for device in world.devices))
        sizes = self._all(*(partial(self._granularity, device, multicast) for device in world.devices))
        self._grain = max(world.gather(sizes, what=self.kind))  # powers of two
        self.stride = -(-nbytes // self._grain) * self._grain
        context, devices = world.devices[0].context, list(dict.fromkeys(world.devices))
        with context, ExitStack() as undo:
            own = self._all(*(partial(self._create, device, undo) for device in world.devices))
            parts = dict(zip(world.ranks, own, strict=True))
            if others := [rank for rank in range(world.size) if rank not in parts]:
                parts |= self._exchange(own, others, undo)
            (self.base,) = self._all(lambda: self._map([parts[rank] for rank in range(world.size)], undo))
            self.multicast = self._bind(own, undo) if multicast else 0
            self._all(*(partial(self._clear, *each) for each in zip(world.ranks, world.devices, strict=True)))
            release = undo.pop_all()
            release.callback(_settle, devices)
            self._own(self.base, partial(context.call, release.close), f"of {world.size} x {nbytes} bytes")

    def part(
        self, rank: int, shape: int | Sequence[int], dtype: DTypeLike, *, offset: int = 0, of: int | None = None
    ) -> Buffer:
        """A window onto ``rank``'s part, ``offset`` bytes from its beginning, for kernels of the local rank ``of``; by
        default of ``rank`` itself where it is local, else of the first local one."""
        box, device = self._in_use(), self._user(rank, of)
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        if offset < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"{nbytes} bytes at {offset} of a part of {self.nbytes} bytes")
        address = self.base + rank * self.stride + offset
        return Buffer.borrow(device, address, shape, dtype, where="symmetric", owner=box)

    def every(self, of: int) -> Buffer:
        """All parts, as bytes, for kernels of the local rank ``of``."""
        box, nbytes = self._in_use(), self.world.size * self.stride
        return Buffer.borrow(self._user(of, of), self.base, nbytes, np.uint8, where="symmetric", owner=box)

    def everywhere(self, of: int) -> Buffer:
        """The bytes at the multicast address, each of which stands for that of every part, for ``multimem``
        instructions in kernels of the local rank ``of``."""
        box, device = self._in_use(), self._user(of, of)
        if not self.multicast:
            raise ValueError(f"{self.info} was made without multicast")
        return Buffer.borrow(device, self.multicast, self.stride, np.uint8, where="multicast", owner=box)

    # Making it

    def _granularity(self, device: Device, multicast: bool) -> int:
        driver = self._driver
        recommended = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        grain = int(driver.cuMemGetAllocationGranularity(_properties(device), recommended))
        if multicast:
            least = driver.CUmulticastGranularity_flags.CU_MULTICAST_GRANULARITY_MINIMUM
            team = self._team(-(-self.nbytes // grain) * grain)
            grain = max(grain, int(driver.cuMulticastGetGranularity(team, least)))
        return grain

    def _create(self, device: Device, undo: ExitStack) -> Any:
        """The physical memory of a local rank."""
        handle = self._driver.cuMemCreate(self.stride, _properties(device), 0)
        undo.callback(self._driver.cuMemRelease, handle)
        return handle

    def _exchange(self, own: Sequence[Any], wanted: Sequence[int], undo: ExitStack) -> dict[int, Any]:
        """Handles of what the ranks ``wanted`` have. Every rank gives its ``own``; who has nothing, None."""
        driver = self._driver
        with ExitStack() as opened:

            def exported(handle: Any) -> int:
                if handle is None:  # every rank sends a file; nobody looks at this one
                    fd = os.open(os.devnull, os.O_RDONLY)
                else:
                    fd = int(driver.cuMemExportToShareableHandle(handle, _file_descriptor(driver), 0))
                opened.callback(os.close, fd)
                return fd

            def imported() -> dict[int, Any]:
                handles = {}
                for rank in wanted:
                    handles[rank] = driver.cuMemImportFromShareableHandle(received[rank], _file_descriptor(driver))
                    undo.callback(driver.cuMemRelease, handles[rank])
                return handles

            (received,) = self.world.exchange_fds(self._all(*(partial(exported, handle) for handle in own)))
            for fd in received:
                opened.callback(os.close, fd)
            return self._all(imported)[0]

    def _map(self, handles: Sequence[Any], undo: ExitStack) -> int:
        """Map what has ``stride`` bytes each, one behind the other, for all local devices."""
        driver, total = self._driver, len(handles) * self.stride
        address = int(driver.cuMemAddressReserve(total, self._grain, 0, 0))
        undo.callback(driver.cuMemAddressFree, address, total)
        for at, handle in zip(range(address, address + total, self.stride), handles, strict=True):
            driver.cuMemMap(at, self.stride, 0, handle, 0)
            undo.callback(driver.cuMemUnmap, at, self.stride)
        access = []
        for device in dict.fromkeys(self.world.devices):
            each = driver.CUmemAccessDesc()
            each.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            each.location.id = device.ordinal
            each.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            access.append(each)
        driver.cuMemSetAccess(address, total, access, len(access))
        return address

    def _team(self, nbytes: int) -> Any:
        """A multicast object of all ranks' devices."""
        properties = self._driver.CUmulticastObjectProp()
        properties.numDevices, properties.size = self.world.size, nbytes
        properties.handleTypes = int(_file_descriptor(self._driver))
        return properties

    def _bind(self, own: Sequence[Any], undo: ExitStack) -> int:
        """The address behind which the parts of all ranks lie, after each has bound its ``own``."""
        world, driver = self.world, self._driver

        def created(rank: int) -> Any:
            if rank:
                return None
            handle = driver.create_multicast(self._team(self.stride), enable=True)
            undo.callback(driver.cuMemRelease, handle)
            return handle

        team, *others = self._all(*(partial(created, rank) for rank in world.ranks))
        if len(world.ranks) < world.size:  # rank 0 imports it too, and keeps what it made: else who is late has another
            team = self._exchange([team, *others], [0], undo)[0]
        self._all(*(partial(driver.cuMulticastAddDevice, team, device.handle) for device in world.devices))

        def bound(device: Device, part: Any) -> None:
            driver.cuMulticastBindMem(team, 0, part, 0, self.stride, 0)
            undo.callback(driver.cuMulticastUnbind, team, device.handle, 0, self.stride)

        # To bind or to map waits in the driver, for ever, until all devices were added. Now they were.
        self._all(*(partial(bound, *each) for each in zip(world.devices, own, strict=True)))
        return self._all(lambda: self._map([team], undo))[0]

    def _clear(self, rank: int, device: Device) -> None:
        driver = self._driver
        with device.context:
            driver.cuMemsetD8(self.base + rank * self.stride, 0, self.nbytes)
            driver.cuStreamSynchronize(driver.CUstream(0))


class PeerMemory(_OfRanks):
    """A device array of each rank, that somebody else allocated, where all ranks reach it. Every rank makes it at the
    same time, with an array for each rank of this process; shape and dtype are the same everywhere.

    The memory has to come from ``cuMemAlloc``, as that of `Device.empty` and of CuPy's usual pool does: between
    processes it is opened by CUDA IPC, and in one process the devices get access to each other, which they keep.

    Closing waits for nobody, and CUDA IPC keeps no memory for others: what happens if an array is freed while another
    rank has it open is undefined. This keeps the arrays of this process only until it is closed. Keep them yourself
    until all ranks have closed theirs: close, `World.barrier`, free.

    Attributes:
        world: whose it is.
        shape, dtype: of each array.
    """

    kind = "peer memory"

    def __init__(self, world: World, arrays: Sequence[Any]) -> None:
        if len(arrays) != len(world.ranks):
            raise ValueError(f"PeerMemory: wanted an array for each of {len(world.ranks)} ranks, got {len(arrays)}")
        self.world = world
        self._distinct()
        views = self._all(*(partial(_shareable, *each) for each in zip(world.devices, arrays, strict=True)))
        self.shape, self.dtype = views[0].shape, views[0].dtype
        given = world.gather([f"{view.dtype} {view.shape}" for view in views], what=self.kind)
        for rank, each in enumerate(given):
            if each != given[0]:
                raise WorldError(rank, f"{self.kind}: rank {rank} has an array of {each}, rank 0 of {given[0]}")
        context, devices = world.devices[0].context, list(dict.fromkeys(world.devices))
        with context, ExitStack() as undo:
            if len(world.ranks) == world.size:
                self._all(*(partial(_reach, device, devices) for device in devices))
                self._addresses = [view.address for view in views]
            else:
                self._addresses = self._opened(views[0].address, undo)
            release = undo.pop_all()
            release.callback(_settle, devices)
            name = f"of {world.size} x {self.dtype} {self.shape}"
            self._own(views[0].address, partial(context.call, release.close), name, [*map(holder, arrays)])

    def part(self, rank: int, *, of: int | None = None) -> Buffer:
        """``rank``'s array, for kernels of the local rank ``of``; by default of ``rank`` itself where it is local, else
        of the first local one."""
        box, device = self._in_use(), self._user(rank, of)
        return Buffer.borrow(device, self._addresses[rank], self.shape, self.dtype, where="peer", owner=box)

    def _opened(self, own: int, undo: ExitStack) -> list[int]:
        """Where this process has the arrays of all ranks, of which its ``own`` is one."""
        driver, (here,) = self.world.devices[0].driver, self.world.ranks
        self.world.agree("the host of peer memory", this_host())

        def exported() -> tuple[str, int]:
            """A handle stands for a whole allocation."""
            start, _ = driver.cuMemGetAddressRange(own)
            handle = driver.cuIpcGetMemHandle(start)
            return ctypes.string_at(int(handle.getPtr()), 64).hex(), own - int(start)

        def opened() -> list[int]:
            addresses = []
            for rank, (data, offset) in enumerate(every):
                if rank == here:  # who has exported memory cannot open it
                    addresses.append(own)
                    continue
                handle = driver.CUipcMemHandle()
                ctypes.memmove(int(handle.getPtr()), bytes.fromhex(data), 64)
                start = int(driver.cuIpcOpenMemHandle(handle, lazily.value))
                undo.callback(driver.cuIpcCloseMemHandle, start)
                addresses.append(start + offset)
            return addresses

        lazily = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        every = self.world.gather(self._all(exported), what=self.kind)
        return self._all(opened)[0]


def _identity(device: Device) -> tuple[str, str]:
    return device.driver.kind, device.driver.cuDeviceGetUuid(device.handle).bytes.hex()


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


def _may_multicast(device: Device) -> None:
    """Known without making anything: to try it could do harm."""
    why = multicast_refusal()
    if why is None and not device.attribute("MULTICAST_SUPPORTED"):
        why = f"{device.id} has no multicast"
    if why is not None:
        raise DriverError("cuMulticastCreate", "NOT_ENABLED", why)


def _shareable(device: Device, array: Any) -> View:
    """What is known of an array that other ranks can reach."""
    view = view_of(array)
    if view is None or view.on_host:
        raise TypeError(f"wanted a device array, got {said(array)}")
    if not view.nbytes or not view.contiguous or view.readonly:
        raise ValueError(f"wanted an array with elements, contiguous, that can be written, got {said(array)}")
    driver = device.driver
    with device.context:
        capable = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
        shareable = driver.cuPointerGetAttribute(capable, view.address)
    if not shareable or device.locate(view.address) not in (None, device.ordinal):
        raise ValueError(f"wanted memory of cuMemAlloc on {device.id}, got {said(array)}")
    return view


def _reach(device: Device, others: Sequence[Device]) -> None:
    """Let kernels of a device touch ordinary memory of the others of this process."""
    with device.context:
        for other in others:
            if other is not device:
                try:
                    device.driver.cuCtxEnablePeerAccess(other.context.handle, 0)
                except DriverError as error:
                    if error.code != "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED":
                        raise


def _settle(devices: Sequence[Device]) -> None:
    """What kernels still do with the memory comes before it goes."""
    for device in devices:
        device.context.call(device.driver.cuCtxSynchronize)
