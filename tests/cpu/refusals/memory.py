"""Memory, copies and fills, pools, virtual memory, memory of other processes."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from .world import World, alloc_params, case, copy_params, driver, instantiate, must, status


@case
def mem_alloc(world: World) -> Any:
    memory = must(driver.cuMemAlloc(100))
    return [
        status(driver.cuMemAlloc(0)),
        status(driver.cuMemAlloc(1 << 50)),
        status(driver.cuMemFree(driver.CUdeviceptr(5))),
        status(driver.cuMemFree(driver.CUdeviceptr(0))),
        status(driver.cuMemFree(driver.CUdeviceptr(int(memory) + 4))),
        status(driver.cuMemFree(memory)),
        status(driver.cuMemFree(memory)),
        status(driver.cuMemFree(driver.CUdeviceptr(world.pinned))),
        status(driver.cuMemFreeHost(int(world.memory))),
        status(driver.cuMemFreeHost(5)),
        status(driver.cuMemHostAlloc(0, 0)),
        status(driver.cuMemHostAlloc(16, 99)),
    ]


@case
def mem_query(world: World) -> Any:
    return [
        status(driver.cuMemGetAddressRange(driver.CUdeviceptr(5))),
        must(driver.cuMemGetAddressRange(driver.CUdeviceptr(int(world.memory) + 7)))[1],
        status(driver.cuMemHostGetDevicePointer(world.host.ctypes.data, 0)),
        status(driver.cuMemHostGetDevicePointer(world.pinned, 0)),
        status(driver.cuPointerGetAttribute(driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, 5)),
        str(driver.cuPointerGetAttribute(driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, world.memory)[1]),
        str(driver.cuPointerGetAttribute(driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, world.pinned)[1]),
        status(
            driver.cuPointerGetAttribute(driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_HOST_POINTER, world.memory)
        ),
        int(world.memory) % 512,
        int(world.other_memory) - int(world.memory),
    ]


@case
def copies(world: World) -> Any:
    return [
        status(driver.cuMemcpyDtoH(world.host, driver.CUdeviceptr(5), 4)),
        status(driver.cuMemcpyHtoD(driver.CUdeviceptr(5), world.host, 4)),
        status(driver.cuMemcpyDtoH(world.host, world.memory, 0)),
        status(driver.cuMemcpyDtoD(world.other_memory, driver.CUdeviceptr(5), 4)),
        status(driver.cuMemcpyDtoHAsync(world.host, driver.CUdeviceptr(5), 4, world.stream)),
        status(driver.cuMemcpyHtoDAsync(driver.CUdeviceptr(5), world.host, 4, world.stream)),
        status(driver.cuMemcpyDtoDAsync(world.other_memory, driver.CUdeviceptr(5), 4, world.stream)),
        status(driver.cuStreamSynchronize(world.stream)),
    ]


@case
def copies_long(world: World) -> Any:
    big = np.zeros(64 << 20, np.uint8)
    return [status(driver.cuMemcpyDtoH(big, world.memory, big.size))]


@case
def copies_3d(world: World) -> Any:
    return [
        status(driver.cuMemcpy3D(copy_params(world))),
        status(driver.cuMemcpy3D(copy_params(world, size=0))),
        status(driver.cuMemcpy3D(copy_params(world, height=0))),
        status(driver.cuMemcpy3D(copy_params(world, size=16, height=2, pitch=8))),
        status(driver.cuMemcpy3D(copy_params(world, size=16, height=2, pitch=16))),
        status(driver.cuMemcpy3D(copy_params(world, size=16, height=2, pitch=0))),
        status(driver.cuMemcpy3D(copy_params(world, src=driver.CUdeviceptr(5)))),
        status(driver.cuMemcpy3DAsync(copy_params(world, src=driver.CUdeviceptr(5)), world.stream)),
        status(driver.cuMemcpy3D(copy_params(world, dst=0, to_host=True))),
        status(driver.cuMemcpy3DAsync(copy_params(world, src=world.pinned, from_host=True), world.stream)),
    ]


@case
def fills(world: World) -> Any:
    return [
        status(driver.cuMemsetD32(world.memory, 1, 4)),
        status(driver.cuMemsetD32(driver.CUdeviceptr(int(world.memory) + 1), 1, 4)),
        status(driver.cuMemsetD16(driver.CUdeviceptr(int(world.memory) + 1), 1, 4)),
        status(driver.cuMemsetD8(driver.CUdeviceptr(5), 1, 4)),
        status(driver.cuMemsetD32(world.memory, 1, 0)),
        status(driver.cuMemsetD2D32(world.memory, 8, 1, 4, 2)),
        status(driver.cuMemsetD2D32(world.memory, 17, 1, 4, 2)),
        status(driver.cuMemsetD2D32(world.memory, 16, 1, 4, 0)),
        status(driver.cuMemsetD8Async(driver.CUdeviceptr(5), 1, 4, world.stream)),
        status(driver.cuMemsetD8(world.pinned, 1, 4)),
        status(driver.cuMemsetD32Async(world.memory, 1, 1 << 24, world.stream)),
        status(driver.cuStreamSynchronize(world.stream)),
    ]


@case
def pools(world: World) -> Any:
    attributes = driver.CUmemPool_attribute

    def attribute(pool: Any, name: Any) -> Any:
        return int(must(driver.cuMemPoolGetAttribute(pool, getattr(attributes, "CU_MEMPOOL_ATTR_" + name))))

    properties = driver.CUmemPoolProps()
    properties.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    pool = must(driver.cuMemPoolCreate(properties))

    def look() -> Any:
        return [
            attribute(pool, name)
            for name in ("USED_MEM_CURRENT", "RESERVED_MEM_CURRENT", "USED_MEM_HIGH", "RESERVED_MEM_HIGH")
        ]

    answers: list[Any] = [look()]
    first = must(driver.cuMemAllocFromPoolAsync(1000, pool, world.stream))
    answers.append(look())
    second = must(driver.cuMemAllocFromPoolAsync(5 << 20, pool, world.stream))
    answers.append(look())
    answers.append(status(driver.cuMemFreeAsync(first, world.stream)))
    answers.append(look())
    answers.append(status(driver.cuMemFreeAsync(first, world.stream)))
    must(driver.cuStreamSynchronize(world.stream))
    answers.append(look())
    answers.append(status(driver.cuMemFree(second)))
    answers.append(look())
    must(driver.cuStreamSynchronize(world.stream))
    answers.append(look())
    answers += [
        status(driver.cuMemAllocFromPoolAsync(0, pool, world.stream)),
        status(driver.cuMemAllocFromPoolAsync(1 << 50, pool, world.stream)),
        status(driver.cuMemFreeAsync(world.memory, world.stream)),
        status(driver.cuMemFreeAsync(driver.CUdeviceptr(5), world.stream)),
        status(driver.cuMemFreeAsync(driver.CUdeviceptr(0), world.stream)),
        status(driver.cuMemPoolTrimTo(pool, 0)),
        look(),
        status(driver.cuMemPoolDestroy(must(driver.cuDeviceGetDefaultMemPool(0)))),
        status(driver.cuMemPoolDestroy(pool)),
        status(driver.cuMemFreeHost(int(world.memory))),
    ]
    return answers


@case
def vmm(world: World) -> Any:
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.requestedHandleTypes = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    granularities = [
        must(driver.cuMemGetAllocationGranularity(properties, driver.CUmemAllocationGranularity_flags(index)))
        for index in (0, 1)
    ]
    granularity = granularities[0]
    access = driver.CUmemAccessDesc()
    access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    answers = [
        granularities,
        status(driver.cuMemCreate(granularity + 1, properties, 0)),
        status(driver.cuMemCreate(0, properties, 0)),
        status(driver.cuMemAddressReserve(granularity + 1, 0, 0, 0)),
        status(driver.cuMemAddressReserve(0, 0, 0, 0)),
        status(driver.cuMemAddressReserve(granularity, 3, 0, 0)),
    ]
    handle = must(driver.cuMemCreate(2 * granularity, properties, 0))
    base = must(driver.cuMemAddressReserve(4 * granularity, 0, 0, 0))

    def at(index: Any) -> Any:
        return driver.CUdeviceptr(int(base) + index * granularity)

    answers += [
        status(driver.cuMemMap(at(0), 3 * granularity, 0, handle, 0)),
        status(driver.cuMemMap(at(0), granularity, 1, handle, 0)),
        status(driver.cuMemMap(driver.CUdeviceptr(int(base) + 4096), granularity, 0, handle, 0)),
        status(driver.cuMemMap(driver.CUdeviceptr(int(world.memory)), granularity, 0, handle, 0)),
        status(driver.cuMemMap(at(3), 2 * granularity, 0, handle, 0)),
        status(driver.cuMemSetAccess(at(0), granularity, [access], 1)),
        status(driver.cuMemMap(at(0), 2 * granularity, 0, handle, 0)),
        status(driver.cuMemMap(at(1), granularity, 0, handle, 0)),
        status(driver.cuMemMap(at(2), 2 * granularity, 0, handle, 0)),
        status(driver.cuMemsetD8(at(0), 1, 16)),
        status(driver.cuMemSetAccess(at(0), granularity, [access], 1)),
        status(driver.cuMemSetAccess(at(0), 4 * granularity, [access], 1)),
        status(driver.cuMemSetAccess(at(0), 5 * granularity, [access], 1)),
        status(driver.cuMemsetD8(at(0), 1, 2 * granularity)),
        status(driver.cuMemUnmap(at(0), granularity)),
        status(driver.cuMemUnmap(at(0), 3 * granularity)),
        status(driver.cuMemAddressFree(at(0), 4 * granularity)),
        status(driver.cuMemRelease(handle)),
        status(driver.cuMemUnmap(at(0), 4 * granularity)),
        status(driver.cuMemAddressFree(at(0), 2 * granularity)),
        status(driver.cuMemAddressFree(at(0), 4 * granularity)),
        status(driver.cuMemUnmap(at(0), 4 * granularity)),
    ]
    return answers


@case
def vmm_share(world: World) -> Any:
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    handle = must(driver.cuMemCreate(1 << 21, properties, 0))
    handle_type = driver.CUmemAllocationHandleType
    answers = [
        status(driver.cuMemExportToShareableHandle(handle, handle_type.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0))
    ]
    properties.requestedHandleTypes = handle_type.CU_MEM_HANDLE_TYPE_FABRIC
    answers.append(status(driver.cuMemCreate(1 << 21, properties, 0)))
    properties.requestedHandleTypes = handle_type.CU_MEM_HANDLE_TYPE_WIN32
    answers.append(status(driver.cuMemCreate(1 << 21, properties, 0)))
    properties.requestedHandleTypes = handle_type.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    handle = must(driver.cuMemCreate(1 << 21, properties, 0))
    result = driver.cuMemExportToShareableHandle(handle, handle_type.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0)
    answers += [status(result), type(result[1]).__name__]
    result = driver.cuMemImportFromShareableHandle(int(result[1]), handle_type.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
    answers += [
        status(result),
        status(
            driver.cuMemImportFromShareableHandle(
                os.open("/dev/null", os.O_RDWR), handle_type.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
            )
        ),
        status(driver.cuMemExportToShareableHandle(handle, handle_type.CU_MEM_HANDLE_TYPE_FABRIC, 0)),
    ]
    return answers


@case
def ipc(world: World) -> Any:
    result = driver.cuIpcGetMemHandle(world.memory)
    answers = [
        status(result),
        status(driver.cuIpcOpenMemHandle(result[1], 1)),
        status(driver.cuIpcGetMemHandle(world.pinned)),
        status(driver.cuIpcGetMemHandle(driver.CUdeviceptr(int(world.memory) + 8))),
        status(driver.cuIpcCloseMemHandle(world.memory)),
        status(driver.cuIpcGetMemHandle(driver.CUdeviceptr(5))),
    ]
    pooled = must(driver.cuMemAllocAsync(100, world.stream))
    answers.append(status(driver.cuIpcGetMemHandle(pooled)))
    return answers


@case
def copies_without_pitch(world: World) -> Any:
    """Rows of which no pitch is said, from a place in the first one."""
    numbers = np.arange(256, dtype=np.uint8)
    must(driver.cuMemcpyHtoD(world.memory, numbers, numbers.nbytes))
    answers = []
    for x in (0, 4):
        rows = np.zeros((4, 8), np.uint8)
        params = copy_params(world, dst=rows.ctypes.data, to_host=True, size=8, height=4)
        params.srcXInBytes, params.dstPitch = x, 8
        answers.append([status(driver.cuMemcpy3D(params)), rows[:, 0].tolist()])
    return answers


@case
def no_bytes(world: World) -> Any:
    return [
        driver.cuMemHostAlloc(0, 0)[1],
        driver.cuMemAllocHost(0)[1],
        status(driver.cuMemFreeHost(0)),
        int(driver.cuMemAllocAsync(0, world.stream)[1]),
    ]


@case
def pool_trim(world: World) -> Any:
    """What a pool has in use and keeps, in MiB."""
    mebi = 1 << 20
    properties = driver.CUmemPoolProps()
    properties.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    pool = must(driver.cuMemPoolCreate(properties))

    def look() -> list[float]:
        names = ("CU_MEMPOOL_ATTR_USED_MEM_CURRENT", "CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT")
        return [
            int(must(driver.cuMemPoolGetAttribute(pool, driver.CUmemPool_attribute.__members__[name]))) / mebi
            for name in names
        ]

    memory = must(driver.cuMemAllocFromPoolAsync(33 * mebi, pool, world.stream))
    answers = [look()]
    must(driver.cuMemFreeAsync(memory, world.stream))
    answers.append(look())
    must(driver.cuMemPoolTrimTo(pool, 10 * mebi))
    answers.append(look())
    must(driver.cuStreamSynchronize(world.stream))
    answers.append(look())
    memory = must(driver.cuMemAllocFromPoolAsync(100 * mebi, pool, world.stream))
    answers.append(look())
    must(driver.cuMemFree(memory))
    return [*answers, look()]


@case
def map_past_the_end(world: World) -> Any:
    """A mapping in the last of three reservations of 8 MiB, and so many MiB behind its beginning."""
    mebi = 1 << 20
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    handle = must(driver.cuMemCreate(2 * mebi, properties, 0))
    base = [int(must(driver.cuMemAddressReserve(8 * mebi, 0, 0, 0))) for _ in range(3)][-1]
    answers = []
    for behind in (4, 8, 16, 30, 32):
        address = driver.CUdeviceptr(base + behind * mebi)
        answers.append([behind, status(driver.cuMemMap(address, 2 * mebi, 0, handle, 0))])
        if answers[-1][1] == "SUCCESS":
            must(driver.cuMemUnmap(address, 2 * mebi))
    return answers


@case
def import_closed(world: World) -> Any:
    file = os.open("/dev/null", os.O_RDWR)
    os.close(file)
    handle_type = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    return status(driver.cuMemImportFromShareableHandle(file, handle_type))


@case
def unheld_fill(world: World) -> Any:
    """Fills of a graph's memory at once: before, while and after a launch has it."""
    params = alloc_params()
    must(driver.cuGraphAddMemAllocNode(world.graph, None, 0, params))
    answers = [status(driver.cuMemsetD8(params.dptr, 1, 16))]
    must(driver.cuGraphLaunch(instantiate(world, world.graph, destroy=False), world.stream))
    must(driver.cuStreamSynchronize(world.stream))
    answers.append(status(driver.cuMemsetD8(params.dptr, 1, 16)))
    must(driver.cuMemFree(params.dptr))
    return [
        *answers,
        status(driver.cuMemsetD8(params.dptr, 1, 16)),
        status(driver.cuMemsetD8Async(params.dptr, 1, 16, world.stream)),
        status(driver.cuStreamSynchronize(world.stream)),
    ]


@case
def trimmed(world: World) -> Any:
    """What a pool keeps, in MiB, that is to keep all: when it is trimmed before the frees are done, and after."""
    properties = driver.CUmemPoolProps()
    properties.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    pool, attributes = must(driver.cuMemPoolCreate(properties)), driver.CUmemPool_attribute

    def look() -> int:
        return int(must(driver.cuMemPoolGetAttribute(pool, attributes.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT))) >> 20

    must(driver.cuMemPoolSetAttribute(pool, attributes.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, driver.cuuint64_t(1 << 40)))
    many = [must(driver.cuMemAllocFromPoolAsync(20 << 20, pool, world.stream)) for _ in range(4)]
    answers = [look()]
    for memory in many:
        must(driver.cuMemFreeAsync(memory, world.stream))
    must(driver.cuMemPoolTrimTo(pool, 10 << 20))
    answers.append(look())
    must(driver.cuStreamSynchronize(world.stream))
    answers.append(look())
    must(driver.cuMemPoolTrimTo(pool, 10 << 20))
    answers.append(look())
    memory = must(driver.cuMemAllocFromPoolAsync(100 << 20, pool, world.stream))
    must(driver.cuMemFreeAsync(memory, world.stream))
    must(driver.cuStreamSynchronize(world.stream))
    answers.append(look())
    must(driver.cuMemPoolTrimTo(pool, 10 << 20))
    return [*answers, look()]
