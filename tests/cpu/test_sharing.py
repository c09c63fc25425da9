"""Memory of the CPU devices that is mapped, pooled or shared: by handles, by processes, behind one address."""

from __future__ import annotations

import ctypes
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from answers import code

from drvkit.cpu import driver as cpu
from drvkit.cpu.memory import memory
from drvkit.cpu.storage import GRANULARITY, addresses
from drvkit.driver import Driver, DriverError, open_driver

ROOT = Path(__file__).resolve().parent.parent.parent
driver = open_driver("cpu")
MiB = 1 << 20


@pytest.fixture(autouse=True)
def context() -> Iterator[Any]:
    context = driver.cuDevicePrimaryCtxRetain(0)
    driver.cuCtxPushCurrent(context)
    yield context
    driver.cuCtxSynchronize()
    driver.cuCtxPopCurrent()
    driver.cuDevicePrimaryCtxRelease(0)


def read(address: Any, count: int) -> list[int]:
    host = np.zeros(count, np.uint32)
    driver.cuMemcpyDtoH(host, address, 4 * count)
    return [int(n) for n in host]


ADD = """.version 8.0
.target sm_90
.address_size 64
.visible .entry add(.param .u64 to)
{
  .reg .b64 %rd<4>; .reg .b32 %r<3>;
  ld.param.u64 %rd1, [to]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 4; add.u64 %rd3, %rd1, %rd2;
  ld.global.u32 %r2, [%rd3]; add.u32 %r2, %r2, 100; st.global.u32 [%rd3], %r2;
  ret;
}
"""


def add_to(address: Any, count: int) -> None:
    """Let a kernel add 100 to each of so many words, which it takes for undefined where nobody is known to write."""
    module = driver.cuModuleLoadData(ADD.encode() + b"\0")
    arguments = ((int(address),), (ctypes.c_uint64,))
    function = driver.cuModuleGetFunction(module, b"add")
    driver.cuLaunchKernel(function, 1, 1, 1, count, 1, 1, 0, cpu.CUstream(0), arguments, 0)
    driver.cuCtxSynchronize()
    driver.cuModuleUnload(module)


def properties(device: int = 0, *, shareable: bool = True) -> Any:
    made = cpu.CUmemAllocationProp()
    made.type = cpu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    made.location.type = cpu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    made.location.id = device
    if shareable:
        made.requestedHandleTypes = FD
    return made


FD = cpu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def access(*devices: int) -> list[Any]:
    descriptions = []
    for device in devices:
        description = cpu.CUmemAccessDesc()
        description.location.type = cpu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        description.location.id = device
        description.flags = cpu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        descriptions.append(description)
    return descriptions


def mapped(handle: Any, nbytes: int, *devices: int) -> Any:
    address = driver.cuMemAddressReserve(nbytes, 0, cpu.CUdeviceptr(0), 0)
    driver.cuMemMap(address, nbytes, 0, handle, 0)
    driver.cuMemSetAccess(address, nbytes, access(*devices or (0,)), len(devices or (0,)))
    return address


def unmap(address: Any, nbytes: int) -> None:
    driver.cuMemUnmap(address, nbytes)
    driver.cuMemAddressFree(address, nbytes)


def at(address: Any, offset: int) -> Any:
    return cpu.CUdeviceptr(int(address) + offset)


# ---- mapping -------------------------------------------------------------------------------------------------------


def test_memory_mapped_twice_is_the_same() -> None:
    size = driver.cuMemGetAllocationGranularity(properties(), cpu.CUmemAllocationGranularity_flags(0))
    assert size == GRANULARITY
    handle = driver.cuMemCreate(2 * size, properties(), 0)
    first, second = mapped(handle, 2 * size), mapped(handle, 2 * size)
    driver.cuMemRelease(handle)
    driver.cuMemsetD32(at(first, size), 7, 4)
    assert read(at(second, size), 4) == [7] * 4
    add_to(at(second, size), 4)
    assert read(at(first, size), 4) == [107] * 4
    unmap(first, 2 * size)
    driver.cuMemsetD32(second, 8, 1)
    assert read(second, 1) == [8], "it goes when it is mapped nowhere any more"
    unmap(second, 2 * size)


def test_free_memory_is_counted() -> None:
    before, _ = driver.cuMemGetInfo()
    handle = driver.cuMemCreate(64 * MiB, properties(), 0)
    assert before - driver.cuMemGetInfo()[0] == 64 * MiB
    address = mapped(handle, 64 * MiB)
    driver.cuMemRelease(handle)
    assert before - driver.cuMemGetInfo()[0] == 64 * MiB
    unmap(address, 64 * MiB)
    assert driver.cuMemGetInfo()[0] == before


def test_mapped_memory_is_touched_by_those_who_may() -> None:
    handle, address = driver.cuMemCreate(2 * MiB, properties(), 0), driver.cuMemAddressReserve(2 * MiB, 0, 0, 0)
    driver.cuMemMap(address, 2 * MiB, 0, handle, 0)
    (description,) = access(0)
    assert driver.cuMemGetAccess(description.location, address) == 0
    driver.cuMemSetAccess(address, 2 * MiB, [description], 1)
    assert driver.cuMemGetAccess(description.location, address) == 3
    driver.cuMemsetD32(address, 1, 1)
    assert read(address, 1) == [1]
    unmap(address, 2 * MiB)
    driver.cuMemRelease(handle)


def test_what_does_not_fit_is_refused() -> None:
    handle, address = driver.cuMemCreate(2 * MiB, properties(), 0), driver.cuMemAddressReserve(8 * MiB, 0, 0, 0)
    wrong = [
        cpu.cuMemCreate(2 * MiB + 1, properties(), 0),
        cpu.cuMemCreate(0, properties(), 0),
        cpu.cuMemAddressReserve(MiB, 0, 0, 0),
        cpu.cuMemMap(at(address, MiB), 2 * MiB, 0, handle, 0),
        cpu.cuMemMap(at(address, 8 * MiB), 2 * MiB, 0, handle, 0),
        cpu.cuMemSetAccess(address, 2 * MiB, access(0), 1),
        cpu.cuMemUnmap(address, 2 * MiB),
        cpu.cuMemAddressFree(address, 2 * MiB),
        cpu.cuMemsetD8(address, 0, 1),
    ]
    assert [code(result) for result in wrong] == ["INVALID_VALUE"] * len(wrong)
    driver.cuMemMap(address, 2 * MiB, 0, handle, 0)
    wrong = [cpu.cuMemMap(address, 2 * MiB, 0, handle, 0), cpu.cuMemAddressFree(address, 8 * MiB)]
    assert [code(result) for result in wrong] == ["INVALID_VALUE"] * 2
    assert code(cpu.cuMemsetD8(address, 0, 1)) == "INVALID_VALUE", "nobody may touch it yet"
    larger = driver.cuMemCreate(4 * MiB, properties(), 0)
    assert code(cpu.cuMemMap(at(address, 6 * MiB), 4 * MiB, 0, larger, 0)) == "INVALID_VALUE", "past the end"
    parts = [(address, 2 * MiB, 0), (at(address, 4 * MiB), 2 * MiB, 2 * MiB), (at(address, 2 * MiB), 6 * MiB, 0)]
    wrong = [cpu.cuMemMap(place, nbytes, offset, larger, 0) for place, nbytes, offset in parts]
    assert [code(result) for result in wrong] == ["NOT_SUPPORTED"] * 3, "memory is mapped whole"
    driver.cuMemRelease(larger)
    driver.cuMemUnmap(address, 2 * MiB)
    driver.cuMemAddressFree(address, 8 * MiB)
    driver.cuMemRelease(handle)
    assert code(cpu.cuMemRelease(handle)) == "INVALID_VALUE"


def test_several_pieces_behind_each_other() -> None:
    parts = [driver.cuMemCreate(2 * MiB, properties(device), 0) for device in range(3)]
    address = driver.cuMemAddressReserve(6 * MiB, 0, 0, 0)
    for i, part in enumerate(parts):
        driver.cuMemMap(at(address, 2 * i * MiB), 2 * MiB, 0, part, 0)
        driver.cuMemRelease(part)
    driver.cuMemSetAccess(address, 6 * MiB, access(0), 1)
    for i in range(3):
        driver.cuMemsetD32(at(address, 2 * i * MiB), i + 1, 2 * MiB // 4)
    for boundary in (2 * MiB, 4 * MiB):
        a, b = read(at(address, boundary - 4), 1) + read(at(address, boundary), 1)
        assert (a, b) == (boundary // (2 * MiB), boundary // (2 * MiB) + 1)
    ordinal = cpu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    driver.cuCtxPushCurrent(driver.cuDevicePrimaryCtxRetain(2))
    driver.cuCtxPushCurrent(driver.cuDevicePrimaryCtxRetain(1))
    assert [driver.cuPointerGetAttribute(ordinal, at(address, 2 * i * MiB)) for i in range(3)] == [0, 1, 2]
    driver.cuCtxPopCurrent()
    driver.cuCtxPopCurrent()
    unmap(address, 6 * MiB)


def test_a_range_may_have_gaps_but_no_part_of_a_mapping() -> None:
    handle, address = driver.cuMemCreate(4 * MiB, properties(), 0), driver.cuMemAddressReserve(16 * MiB, 0, 0, 0)
    first, second = address, at(address, 8 * MiB)
    for place in (first, second):
        driver.cuMemMap(place, 4 * MiB, 0, handle, 0)
    driver.cuMemRelease(handle)
    for nbytes in (2 * MiB, 10 * MiB):
        assert code(cpu.cuMemSetAccess(address, nbytes, access(0), 1)) == "INVALID_VALUE"
        assert code(cpu.cuMemUnmap(address, nbytes)) == "INVALID_VALUE"
    driver.cuMemSetAccess(address, 16 * MiB, access(0), 1)
    driver.cuMemsetD32(first, 7, 1)
    assert read(second, 1) == [7]
    driver.cuMemUnmap(address, 6 * MiB)
    assert read(second, 1) == [7]
    driver.cuMemUnmap(address, 16 * MiB)
    assert code(cpu.cuMemUnmap(address, 16 * MiB)) == "INVALID_VALUE", "nothing is there any more"
    driver.cuMemAddressFree(address, 16 * MiB)


def test_a_handle_is_found_by_an_address() -> None:
    handle = driver.cuMemCreate(2 * MiB, properties(), 0)
    address = mapped(handle, 2 * MiB)
    driver.cuMemRelease(handle)
    again = driver.cuMemRetainAllocationHandle(at(address, 100))
    other = mapped(again, 2 * MiB)
    driver.cuMemsetD32(address, 5, 1)
    assert read(other, 1) == [5]
    for place in (address, other):
        unmap(place, 2 * MiB)
    driver.cuMemRelease(again)


# ---- other processes -----------------------------------------------------------------------------------------------

CHILD = f"""
import ctypes
import sys
from typing import Any
import numpy as np
from drvkit.cpu import driver as cpu
from drvkit.driver import open_driver
driver = open_driver("cpu")
driver.cuCtxPushCurrent(driver.cuDevicePrimaryCtxRetain(1))
ADD = {ADD!r}
{inspect.getsource(add_to)}
"""


def child(script: str, *arguments: object, fds: tuple[int, ...] = ()) -> str:
    command = [sys.executable, "-c", CHILD + script, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, pass_fds=fds, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_another_process_maps_exported_memory() -> None:
    handle = driver.cuMemCreate(2 * MiB, properties(), 0)
    address = mapped(handle, 2 * MiB)
    driver.cuMemcpyHtoD(address, np.arange(8, dtype=np.uint32), 32)
    fd = driver.cuMemExportToShareableHandle(handle, FD, 0)
    child(
        """
fd, size, types = int(sys.argv[1]), 2 << 20, cpu.CUmemAllocationHandleType
handle = driver.cuMemImportFromShareableHandle(fd, types.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
address = driver.cuMemAddressReserve(size, 0, 0, 0)
driver.cuMemMap(address, size, 0, handle, 0)
access = cpu.CUmemAccessDesc()
access.location.type, access.location.id = cpu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, 1
access.flags = cpu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
driver.cuMemSetAccess(address, size, [access], 1)
add_to(address, 8)
driver.cuMemUnmap(address, size)
driver.cuMemRelease(handle)
""",
        fd,
        fds=(fd,),
    )
    os.close(fd)
    assert read(address, 8) == list(range(100, 108))
    unmap(address, 2 * MiB)
    driver.cuMemRelease(handle)


def test_what_is_no_exported_memory_is_refused() -> None:
    fd = os.open("/dev/null", os.O_RDWR)
    assert code(cpu.cuMemImportFromShareableHandle(fd, FD)) == "UNKNOWN"
    os.close(fd)
    assert code(cpu.cuMemImportFromShareableHandle(fd, FD)) == "UNKNOWN"
    handle = driver.cuMemCreate(2 * MiB, properties(shareable=False), 0)
    assert code(cpu.cuMemExportToShareableHandle(handle, FD, 0)) == "INVALID_VALUE"
    driver.cuMemRelease(handle)


def test_another_process_opens_an_ordinary_allocation() -> None:
    before, wanted, behind = (driver.cuMemAlloc(1000) for _ in range(3))
    for place, value in ((before, 1), (wanted, 2), (behind, 3)):
        driver.cuMemsetD32(place, value, 250)
    handle = driver.cuIpcGetMemHandle(wanted)
    raw = ctypes.string_at(int(handle.getPtr()), 64)
    assert ctypes.string_at(int(driver.cuIpcGetMemHandle(wanted).getPtr()), 64) == raw
    said = child(
        """
handle = cpu.CUipcMemHandle()
ctypes.memmove(int(handle.getPtr()), bytes.fromhex(sys.argv[1]), 64)
address, again = (driver.cuIpcOpenMemHandle(handle, 1) for _ in range(2))
print(int(address) == int(again))
driver.cuIpcCloseMemHandle(again)
add_to(address, 250)
driver.cuIpcCloseMemHandle(address)
print(cpu.cuIpcCloseMemHandle(address)[0].name)
""",
        raw.hex(),
    )
    assert said.split() == ["True", "CUDA_ERROR_INVALID_VALUE"]
    assert read(wanted, 250) == [102] * 250
    assert (read(before, 250), read(behind, 250)) == ([1] * 250, [3] * 250)
    assert code(cpu.cuIpcOpenMemHandle(handle, 1)) == "INVALID_CONTEXT", "this process has it already"
    for place in (before, wanted, behind):
        driver.cuMemFree(place)
    again = driver.cuMemAlloc(1000)
    driver.cuMemsetD32(again, 4, 250)
    assert read(again, 250) == [4] * 250
    driver.cuMemFree(again)


# ---- multicast -----------------------------------------------------------------------------------------------------


def team(devices: int, nbytes: int = 4 * MiB) -> Any:
    wanted = cpu.CUmulticastObjectProp()
    wanted.numDevices, wanted.size = devices, nbytes
    wanted.handleTypes = int(FD)
    assert driver.cuMulticastGetGranularity(wanted, cpu.CUmulticastGranularity_flags(0)) == GRANULARITY
    return driver.create_multicast(wanted, enable=True)


@pytest.fixture
def _multicast(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is allowed: this is the CPU device."""
    for name in ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DRVKIT_ENABLE_MULTICAST", "1")


def test_multicast_is_opted_in_to_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    api: Any = ModuleType("bindings")  # not the driver: nothing is created here

    def create(properties: Any) -> Any:
        made.append(properties)
        return cpu.CUresult(0), "handle"

    api.cuMulticastCreate = create
    door = Driver("cuda", api)
    for name in ("DRVKIT_ENABLE_MULTICAST", "NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST"):
        monkeypatch.delenv(name, raising=False)

    def refused(said: str, **how: bool) -> None:
        with pytest.raises(DriverError, match=f"cuMulticastCreate: NOT_ENABLED: .*{said}"):
            door.create_multicast("wanted", **how)

    with pytest.raises(DriverError, match="by create_multicast alone"):
        _ = door.cuMulticastCreate
    with pytest.raises(DriverError, match="by create_multicast alone"):
        door.raw("cuMulticastCreate", 2)
    refused("enable=True")
    refused("DRVKIT_ENABLE_MULTICAST=1", enable=True)
    assert code(cpu.cuMulticastCreate(cpu.CUmulticastObjectProp())) == "NOT_PERMITTED"
    monkeypatch.setenv("DRVKIT_ENABLE_MULTICAST", "1")
    refused("enable=True")
    for name, value in (("NCCL_NVLS_ENABLE", "0"), ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")):
        with monkeypatch.context() as forbidden:
            forbidden.setenv(name, value)
            refused(f"{name}={value} forbids", enable=True)
    assert made == []
    assert door.create_multicast("wanted", enable=True) == "handle"
    assert made == ["wanted"]


def words(address: int, count: int) -> list[int]:
    return list((ctypes.c_uint32 * count).from_address(address))


@pytest.mark.usefixtures("_multicast")
def test_an_address_of_a_multicast_object_stands_for_the_memory_of_all() -> None:
    handle = team(3)
    for device in range(3):
        driver.cuMulticastAddDevice(handle, device)
    parts = [driver.cuMemCreate(4 * MiB, properties(device), 0) for device in range(3)]
    views = [mapped(part, 4 * MiB, device) for device, part in enumerate(parts)]
    for device, (part, view) in enumerate(zip(parts, views, strict=True)):
        if device < 2:
            driver.cuMulticastBindMem(handle, 0, part, 0, 4 * MiB, 0)
        else:
            driver.cuMulticastBindAddr(handle, 0, view, 4 * MiB, 0)
        driver.cuMemsetD32(view, 10 + device, MiB)
    address = mapped(handle, 4 * MiB)
    members = addresses.multicast_members(int(address) + 2 * MiB, 16)
    assert [words(member, 4) for member in members] == [[10 + device] * 4 for device in range(3)]
    assert addresses.multicast_members(int(views[0]), 16) == []
    assert addresses.multicast_members(64, 16) == []
    assert int(address) in memory
    driver.cuMulticastUnbind(handle, 1, 0, 4 * MiB)
    assert [words(member, 1) for member in addresses.multicast_members(int(address), 4)] == [[10], [12]]
    unmap(address, 4 * MiB)
    driver.cuMemRelease(handle)
    for part, view in zip(parts, views, strict=True):
        unmap(view, 4 * MiB)
        driver.cuMemRelease(part)


@pytest.mark.usefixtures("_multicast")
def test_a_team_takes_its_devices_once_and_no_others() -> None:
    handle, part = team(2), driver.cuMemCreate(2 * MiB, properties(2), 0)
    driver.cuMulticastAddDevice(handle, 0)
    assert code(cpu.cuMulticastAddDevice(handle, 0)) == "INVALID_VALUE"
    driver.cuMulticastAddDevice(handle, 1)
    wrong = [
        cpu.cuMulticastAddDevice(handle, 2),
        cpu.cuMulticastBindMem(handle, 1, part, 0, 2 * MiB, 0),
        cpu.cuMulticastBindMem(handle, 4 * MiB, part, 0, 2 * MiB, 0),
        cpu.cuMulticastUnbind(handle, 0, 0, 2 * MiB),
    ]
    assert [code(result) for result in wrong] == ["INVALID_VALUE"] * 4
    assert code(cpu.cuMulticastBindMem(handle, 0, part, 0, 2 * MiB, 0)) == "INVALID_DEVICE"
    driver.cuMemRelease(part)
    driver.cuMemRelease(handle)


@pytest.mark.usefixtures("_multicast")
def test_processes_bind_their_memory_to_one_multicast_object() -> None:
    handle = team(2, 2 * MiB)
    driver.cuMulticastAddDevice(handle, 0)
    fd = driver.cuMemExportToShareableHandle(handle, FD, 0)
    script = """
fd, size = int(sys.argv[1]), 2 << 20
types = cpu.CUmemAllocationHandleType
multicast = driver.cuMemImportFromShareableHandle(fd, types.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
driver.cuMulticastAddDevice(multicast, 1)
wanted = cpu.CUmemAllocationProp()
wanted.type = cpu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
wanted.location.type, wanted.location.id = cpu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, 1
wanted.requestedHandleTypes = types.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
part = driver.cuMemCreate(size, wanted, 0)
driver.cuMulticastBindMem(multicast, 0, part, 0, size, 0)
address = driver.cuMemAddressReserve(size, 0, 0, 0)
driver.cuMemMap(address, size, 0, multicast, 0)
access = cpu.CUmemAccessDesc()
access.location.type, access.location.id = cpu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, 1
access.flags = cpu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
driver.cuMemSetAccess(address, size, [access], 1)
from drvkit.cpu.storage import addresses
import ctypes
print("bound", flush=True)
sys.stdin.readline()
for member in addresses.multicast_members(int(address), 4):
    ctypes.c_uint32.from_address(member).value += 7
print("added", flush=True)
sys.stdin.readline()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD + script, str(fd)],
        cwd=ROOT,
        pass_fds=(fd,),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    part = driver.cuMemCreate(2 * MiB, properties(), 0)
    driver.cuMulticastBindMem(handle, 0, part, 0, 2 * MiB, 0)  # waits until the other has added its device
    own, address = mapped(part, 2 * MiB), mapped(handle, 2 * MiB)
    driver.cuMemsetD32(own, 5, 1)
    assert process.stdout.readline() == "bound\n"
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "added\n"
    assert [words(member, 1) for member in addresses.multicast_members(int(address), 4)] == [[12], [7]]
    process.communicate("\n")
    os.close(fd)
    for place in (address, own):
        unmap(place, 2 * MiB)
    for thing in (handle, part):
        driver.cuMemRelease(thing)


# ---- pools ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def pool() -> Iterator[Any]:
    wanted = cpu.CUmemPoolProps()
    wanted.allocType = cpu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location.type, wanted.location.id = cpu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, 0
    pool = driver.cuMemPoolCreate(wanted)
    yield pool
    driver.cuMemPoolDestroy(pool)


@pytest.fixture
def stream() -> Iterator[Any]:
    stream = driver.cuStreamCreate(1)
    yield stream
    driver.cuStreamDestroy(stream)


def counts(pool: Any) -> list[int]:
    """Bytes that are used, those that are reserved, and the most that were used, in MiB."""
    members = ("USED_MEM_CURRENT", "RESERVED_MEM_CURRENT", "USED_MEM_HIGH")
    attributes = [getattr(cpu.CUmemPool_attribute, f"CU_MEMPOOL_ATTR_{name}") for name in members]
    return [int(driver.cuMemPoolGetAttribute(pool, attribute)) // MiB for attribute in attributes]


def test_what_a_pool_counts(pool: Any, stream: Any) -> None:
    assert counts(pool) == [0, 0, 0]
    first = driver.cuMemAllocFromPoolAsync(MiB, pool, stream)
    assert counts(pool) == [1, 32, 1]
    driver.cuMemFreeAsync(first, stream)
    second = driver.cuMemAllocFromPoolAsync(33 * MiB, pool, stream)
    assert counts(pool) == [33, 64, 33]
    assert code(cpu.cuMemFreeAsync(first, stream)) == "INVALID_VALUE"
    driver.cuMemFreeAsync(second, stream)
    assert counts(pool) == [0, 64, 33]
    driver.cuMemPoolTrimTo(pool, 10 * MiB)
    assert counts(pool) == [0, 64, 33], "the host has not seen yet that the memory is free"
    driver.cuStreamSynchronize(stream)
    assert counts(pool) == [0, 0, 33]


def test_a_pool_is_trimmed_to_what_it_shall_keep(pool: Any, stream: Any) -> None:
    threshold = cpu.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
    driver.cuMemPoolSetAttribute(pool, threshold, cpu.cuuint64_t(1 << 40))
    driver.cuMemFreeAsync(driver.cuMemAllocFromPoolAsync(70 * MiB, pool, stream), stream)
    driver.cuStreamSynchronize(stream)
    for keep, kept in ((1 << 40, 96), (10 * MiB, 32), (0, 0)):
        driver.cuMemPoolTrimTo(pool, keep)
        assert counts(pool)[1] == kept


def test_a_pool_releases_what_it_need_not_keep_when_the_host_waits(pool: Any, stream: Any) -> None:
    def use() -> None:
        driver.cuMemFreeAsync(driver.cuMemAllocFromPoolAsync(50 * MiB, pool, stream), stream)
        assert counts(pool)[:2] == [0, 64]
        driver.cuStreamSynchronize(stream)

    use()
    assert counts(pool)[:2] == [0, 0]
    threshold = cpu.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
    driver.cuMemPoolSetAttribute(pool, threshold, cpu.cuuint64_t(20 * MiB))
    use()
    assert counts(pool)[:2] == [0, 32]


def test_memory_of_a_pool_that_is_freed_at_once_goes_on_to_count_as_used(pool: Any, stream: Any) -> None:
    driver.cuMemFree(driver.cuMemAllocFromPoolAsync(MiB, pool, stream))
    assert counts(pool) == [1, 0, 1]


def test_the_default_pool_is_nobodys_to_destroy() -> None:
    default = driver.cuDeviceGetDefaultMemPool(0)
    assert int(driver.cuDeviceGetMemPool(0)) == int(default)
    assert code(cpu.cuMemPoolDestroy(default)) == "INVALID_VALUE"


def test_ordinary_memory_is_freed_in_the_order_of_a_stream_too(stream: Any) -> None:
    before, _ = driver.cuMemGetInfo()
    address, word = driver.cuMemAlloc(MiB), driver.cuMemHostAlloc(4, 0)
    ctypes.c_uint32.from_address(word).value = 0
    driver.cuStreamWaitValue32(stream, word, 1, 0)
    driver.cuMemsetD8Async(address, 1, MiB, stream)
    driver.cuMemFreeAsync(address, stream)
    assert driver.cuMemGetInfo()[0] == before
    assert code(cpu.cuMemFreeAsync(address, stream)) == "INVALID_VALUE"
    ctypes.c_uint32.from_address(word).value = 1
    driver.cuStreamSynchronize(stream)
    assert code(cpu.cuMemFree(address)) == "INVALID_VALUE"
    assert code(cpu.cuMemsetD8(address, 0, 1)) == "INVALID_VALUE"
    driver.cuMemFreeHost(word)


def test_no_bytes_of_a_pool_or_of_the_host_are_at_no_address(pool: Any, stream: Any) -> None:
    assert int(driver.cuMemAllocFromPoolAsync(0, pool, stream)) == int(driver.cuMemAllocAsync(0, stream)) == 0
    assert driver.cuMemHostAlloc(0, 0) == driver.cuMemAllocHost(0) == 0
    driver.cuMemFreeAsync(cpu.CUdeviceptr(0), stream)
    driver.cuMemFreeHost(0)
    assert counts(pool) == [0, 0, 0]


@pytest.mark.usefixtures("_multicast")
def test_a_late_access_to_freed_memory_of_a_pool_is_a_fault() -> None:
    stream = driver.cuStreamCreate(1)
    address = driver.cuMemAllocAsync(64, stream)
    driver.cuMemsetD32Async(address, 1, 16, stream)
    driver.cuMemFreeAsync(address, stream)
    driver.cuMemsetD32Async(address, 2, 16, stream)
    assert code(cpu.cuStreamSynchronize(stream)) == "ILLEGAL_ADDRESS"
    assert "which was freed" in str(cpu.explain("CUDA_ERROR_ILLEGAL_ADDRESS"))
    driver.cuDevicePrimaryCtxReset(0)
    driver.cuStreamDestroy(stream)


# ---- peers ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_multicast")
def test_devices_reach_each_other() -> None:
    assert driver.cuDeviceCanAccessPeer(0, 1) == 1
    assert driver.cuDeviceCanAccessPeer(0, 0) == 0
    other = driver.cuDevicePrimaryCtxRetain(1)
    cpu.cuCtxDisablePeerAccess(other)  # a world that was here before has left it so
    driver.cuCtxEnablePeerAccess(other, 0)
    assert code(cpu.cuCtxEnablePeerAccess(other, 0)) == "PEER_ACCESS_ALREADY_ENABLED"
    driver.cuCtxPushCurrent(other)
    theirs = driver.cuMemAlloc(64)
    driver.cuMemsetD32(theirs, 6, 16)
    driver.cuCtxPopCurrent()
    ours = driver.cuMemAlloc(64)
    driver.cuMemcpyPeer(ours, None, theirs, other, 64)
    assert read(ours, 16) == [6] * 16
    for place in (ours, theirs):
        driver.cuMemFree(place)
    driver.cuCtxDisablePeerAccess(other)
    driver.cuDevicePrimaryCtxRelease(1)
