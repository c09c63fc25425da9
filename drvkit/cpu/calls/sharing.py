"""Memory of pools, physical memory that is mapped, and memory that processes and devices share."""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

from ...driver import multicast_refusal
from ..graphs import Graph
from ..handles import RefusedError, handles
from ..machine import machine
from ..memory import PAGE, memory
from ..operations import Act, Allocate, Free, GraphMemory
from ..order import tracker
from ..storage import GRANULARITY, Multicast, Physical, Pool, Shareable, addresses, heap, import_file
from ..streams import Stream, guard
from .base import (
    HOST_BYTES,
    call,
    cu,
    current,
    device_of,
    drain,
    host_address,
    number_of,
    state,
    stream_of,
    thread_state,
    wait_for_device,
)
from .memory import freeable, give_back, take

# Pools


def pool_of(handle: Any) -> Pool:
    return handles.find(number_of(handle), Pool)


def default_pool(device: int) -> Pool:
    if device not in state.default_pools:
        state.default_pools[device] = Pool(device)
    return state.default_pools[device]


@call(1)
def cuMemPoolCreate(properties: Any) -> Any:
    guard()
    location = properties.location
    if int(properties.allocType) != 1 or int(location.type) != 1:
        raise RefusedError("INVALID_VALUE" if int(properties.allocType) != 1 else "NOT_SUPPORTED")
    if int(properties.handleTypes):
        raise RefusedError("NOT_SUPPORTED")
    return cu.CUmemoryPool(Pool(device_of(location.id), maximum=int(properties.maxSize)).handle)


@call()
def cuMemPoolDestroy(pool: Any) -> None:
    """What was allocated from it goes on until it is freed."""
    guard()
    found = pool_of(pool)
    if found in state.default_pools.values():
        raise RefusedError("INVALID_VALUE")
    handles.drop(found.handle)


@call()
def cuMemPoolTrimTo(pool: Any, keep: int) -> None:
    guard()
    pool_of(pool).trim(keep)


@call(1)
def cuMemPoolGetAttribute(pool: Any, attribute: Any) -> Any:
    guard()
    found, name = pool_of(pool), cu.CUmemPool_attribute(attribute).name.removeprefix("CU_MEMPOOL_ATTR_")
    counts = {
        "RESERVED_MEM_CURRENT": found.reserved,
        "RESERVED_MEM_HIGH": found.reserved_high,
        "USED_MEM_CURRENT": found.used,
        "USED_MEM_HIGH": found.used_high,
    } | found.attributes
    if name not in counts:
        raise RefusedError("INVALID_VALUE")
    return counts[name] if name.startswith("REUSE") else cu.cuuint64_t(counts[name])


@call()
def cuMemPoolSetAttribute(pool: Any, attribute: Any, value: Any) -> None:
    guard()
    found, name = pool_of(pool), cu.CUmemPool_attribute(attribute).name.removeprefix("CU_MEMPOOL_ATTR_")
    if name in found.attributes:
        found.attributes[name] = int(value)
    elif name in ("RESERVED_MEM_HIGH", "USED_MEM_HIGH") and not int(value):
        found.reserved_high, found.used_high = found.reserved, found.used
    else:
        raise RefusedError("INVALID_VALUE")


@call(1)
def cuDeviceGetDefaultMemPool(device: Any) -> Any:
    return cu.CUmemoryPool(default_pool(device_of(device)).handle)


@call(1)
def cuDeviceGetMemPool(device: Any) -> Any:
    number = device_of(device)
    return cu.CUmemoryPool(state.pools.get(number, default_pool(number)).handle)


@call()
def cuDeviceSetMemPool(device: Any, pool: Any) -> None:
    guard()
    state.pools[device_of(device)] = pool_of(pool)


@call(1)
def cuMemAllocFromPoolAsync(nbytes: int, pool: Any, stream: Any) -> Any:
    return _allocate_async(nbytes, pool_of(pool), stream_of(stream))


@call(1)
def cuMemAllocAsync(nbytes: int, stream: Any) -> Any:
    queue = stream_of(stream)
    device = queue.context.device
    return _allocate_async(nbytes, state.pools.get(device, default_pool(device)), queue)


def _allocate_async(nbytes: int, pool: Pool, stream: Stream) -> Any:
    if stream.capture is None:
        guard()
    if not nbytes:
        return cu.CUdeviceptr(0)
    if stream.capture is not None:
        graph_memory = graph_memory_of(stream.capture.graph, pool.device, nbytes)
        stream.queue(Allocate(graph_memory))
        return cu.CUdeviceptr(graph_memory.address)
    if nbytes > HOST_BYTES - state.used[pool.device]:
        raise RefusedError("OUT_OF_MEMORY")
    allocation = pool.allocate(nbytes)
    state.used[pool.device] += nbytes
    state.pool_of[allocation.address] = pool
    if tracker.on:  # whoever uses it must come behind
        touch = functools.partial(tracker.touch, allocation.address, nbytes, write=True)
        stream.queue(Act(pool.device, f"allocation of {nbytes} bytes", touch))
    return cu.CUdeviceptr(allocation.address)


def graph_memory_of(graph: Graph, device: int, nbytes: int) -> GraphMemory:
    """The first memory of a graph begins a page; the rest stands behind it, at less even addresses."""
    if nbytes > HOST_BYTES:
        raise RefusedError("OUT_OF_MEMORY")
    first = all(node.kind != "mem_alloc" for node in graph.nodes)
    made = GraphMemory(device, nbytes, PAGE if first else 512, state.graph_memory.pop)
    state.graph_memory[made.address] = made
    return made


@call()
def cuMemFreeAsync(pointer: Any, stream: Any) -> None:
    queue, address = stream_of(stream), int(pointer)
    if queue.capture is None:
        guard()
    if not address:
        return
    device = queue.context.device
    graph_memory = state.graph_memory.get(address)
    if graph_memory is not None:
        if queue.capture is not None:
            queue.queue(Free(graph_memory))
        elif graph_memory.held:
            queue.queue(Act(device, f"free of {address:#x}", graph_memory.shut))
            graph_memory.hold(False)
        else:
            raise RefusedError("INVALID_VALUE", f"{address:#x} is {memory.place(address)}")
        return
    if queue.capture is not None:
        raise RefusedError("INVALID_VALUE")
    allocation = freeable(address, ("device", "pool"))
    give_back(allocation, in_order=True)
    state.freeing.add(address)
    queue.queue(Act(device, f"free of {address:#x}", functools.partial(_free, address, allocation.nbytes)))


def _free(address: int, nbytes: int) -> None:
    """The turn of a free has come."""
    state.freeing.discard(address)
    memory.check(address, nbytes, read=False, what=f"free of {address:#x}")
    memory.free(address)


@call()
def cuDeviceGraphMemTrim(device: Any) -> None:
    device_of(device)


# Physical memory, and what processes share


_FILE, _FABRIC = 1, 8  # CUmemAllocationHandleType


def _shareable(handle: Any) -> Shareable:
    return handles.find(number_of(handle), Shareable)


def _kept(shared: Shareable) -> Any:
    shared.keep()
    return cu.CUmemGenericAllocationHandle(handles.add(shared))


@call(1)
def cuMemGetAllocationGranularity(properties: Any, option: Any) -> int:
    device_of(properties.location.id)
    return GRANULARITY


@call(1)
def cuMemAddressReserve(nbytes: int, align: int, address: Any, flags: int) -> Any:
    if flags:
        raise RefusedError("INVALID_VALUE")
    return cu.CUdeviceptr(addresses.reserve(nbytes, align))


@call()
def cuMemAddressFree(address: Any, nbytes: int) -> None:
    addresses.free(int(address), nbytes)


@call(1)
def cuMemCreate(nbytes: int, properties: Any, flags: int) -> Any:
    if not nbytes or nbytes % GRANULARITY or flags or int(properties.type) != 1 or int(properties.location.type) != 1:
        raise RefusedError("INVALID_VALUE")
    if int(properties.requestedHandleTypes) & ~_FILE:
        raise RefusedError("NOT_PERMITTED" if int(properties.requestedHandleTypes) == _FABRIC else "INVALID_VALUE")
    device = device_of(properties.location.id)
    take(device, nbytes)
    shareable = bool(int(properties.requestedHandleTypes))

    def released() -> None:
        state.used[device] -= nbytes

    return _kept(Physical(device, nbytes, shareable=shareable, released=released))


@call()
def cuMemRelease(handle: Any) -> None:
    """Memory goes when it is mapped and bound nowhere any more."""
    shared = _shareable(handle)
    handles.drop(number_of(handle))
    shared.let_go()


@call(1)
def cuMemRetainAllocationHandle(address: Any) -> Any:
    return _kept(addresses.at(host_address(address)).shared)


@call()
def cuMemMap(address: Any, nbytes: int, offset: int, handle: Any, flags: int) -> None:
    if flags:
        raise RefusedError("INVALID_VALUE")
    addresses.map(int(address), nbytes, _shareable(handle), offset)


@call(locked=False)
def cuMemUnmap(address: Any, nbytes: int) -> None:
    context = thread_state.contexts[-1]
    if context is not None:
        drain(context.device)
    with machine:
        addresses.unmap(int(address), nbytes)


@call()
def cuMemSetAccess(address: Any, nbytes: int, descriptions: Any, count: int) -> None:
    devices: dict[int, bool] = {}
    for description in list(descriptions)[:count]:
        flags = int(description.flags)
        if flags not in (0, 1, 3) or int(description.location.type) != 1:
            raise RefusedError("INVALID_VALUE")
        devices[device_of(description.location.id)] = flags != 0
    addresses.set_access(int(address), nbytes, devices)


@call(1)
def cuMemGetAccess(location: Any, address: Any) -> int:
    return 3 if device_of(location.id) in addresses.at(int(address)).accessible else 0


@call(1)
def cuMemExportToShareableHandle(handle: Any, handle_type: Any, flags: int) -> int:
    shared = _shareable(handle)
    if flags or int(handle_type) != _FILE or not shared.shareable:
        raise RefusedError("INVALID_VALUE")
    machine.shared = True
    return os.dup(shared.fd)


@call(1)
def cuMemImportFromShareableHandle(handle: Any, handle_type: Any) -> Any:
    if int(handle_type) != _FILE:
        raise RefusedError("NOT_SUPPORTED")
    machine.shared = True
    return _kept(import_file(int(handle)))


@call(1)
def cuIpcGetMemHandle(pointer: Any) -> Any:
    current()
    allocation = memory.find(int(pointer))
    if allocation is None or allocation.freed or allocation.kind != "device":
        raise RefusedError("INVALID_VALUE")
    handle = cu.CUipcMemHandle()
    raw = heap.export(allocation).ljust(64, b"\0")
    ctypes.memmove(int(handle.getPtr()), raw, 64)
    return handle


@call(1)
def cuIpcOpenMemHandle(handle: Any, flags: int) -> Any:
    current()
    if flags != 1:
        raise RefusedError("INVALID_VALUE")
    return cu.CUdeviceptr(heap.open(ctypes.string_at(int(handle.getPtr()), 64)))


@call(locked=False)
def cuIpcCloseMemHandle(pointer: Any) -> None:
    wait_for_device(current())
    with machine:
        heap.close(int(pointer))


# Multicast


def _multicast(handle: Any) -> Multicast:
    return handles.find(number_of(handle), Multicast)


@call(1)
def cuMulticastGetGranularity(properties: Any, option: Any) -> int:
    return GRANULARITY


@call(1)
def cuMulticastCreate(properties: Any) -> Any:
    if multicast_refusal():  # harmless here, but what runs here is meant for a GPU
        raise RefusedError("NOT_PERMITTED")
    nbytes, devices = int(properties.size), int(properties.numDevices)
    if not nbytes or nbytes % GRANULARITY or not 0 < devices <= 64 or int(properties.flags):
        raise RefusedError("INVALID_VALUE")
    return _kept(Multicast(nbytes, devices, shareable=bool(int(properties.handleTypes) & 1)))


@call()
def cuMulticastAddDevice(handle: Any, device: Any) -> None:
    _multicast(handle).add_device(device_of(device))


@call(locked=False)
def cuMulticastBindMem(handle: Any, offset: int, physical: Any, at: int, nbytes: int, flags: int) -> None:
    with machine:
        multicast, found = _multicast(handle), handles.find(number_of(physical), Physical)
        if flags:
            raise RefusedError("INVALID_VALUE")
    machine.wait(multicast.is_complete)  # another process may have to add its device first
    with machine:
        multicast.bind(offset, found, at, nbytes)


@call(locked=False)
def cuMulticastBindAddr(handle: Any, offset: int, pointer: Any, nbytes: int, flags: int) -> None:
    with machine:
        multicast, mapping = _multicast(handle), addresses.at(int(pointer))
        if flags or not isinstance(mapping.shared, Physical):
            raise RefusedError("INVALID_VALUE")
    machine.wait(multicast.is_complete)
    with machine:
        multicast.bind(offset, mapping.shared, int(pointer) - mapping.address, nbytes)


@call()
def cuMulticastUnbind(handle: Any, device: Any, offset: int, nbytes: int) -> None:
    _multicast(handle).unbind(device_of(device), offset, nbytes)
