"""The stand-in for ``cuda.bindings.driver`` on its own: what it refuses, what a fault does, and functions at addresses.

What drvkit does with it, the tests of drvkit show on every device.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from answers import code

import drvkit as dk
from drvkit.cpu import driver as cpu
from drvkit.cpu.calls.base import DEVICES
from drvkit.cpu.machine import machine
from drvkit.driver import open_driver

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
driver = open_driver("cpu")

KERNELS = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry store(.param .u64 to, .param .u32 value)
{
  .reg .b64 %rd<3>; .reg .b32 %r<2>;
  ld.param.u64 %rd1, [to]; cvta.to.global.u64 %rd2, %rd1; ld.param.u32 %r1, [value];
  st.global.u32 [%rd2], %r1;
  ret;
}
.visible .entry bounded() .maxntid 128, 1, 1 { ret; }
.visible .entry wait_for(.param .u64 from, .param .u32 value)
{
  .reg .b64 %rd<3>; .reg .b32 %r<3>; .reg .pred %p1;
  ld.param.u64 %rd1, [from]; cvta.to.global.u64 %rd2, %rd1; ld.param.u32 %r1, [value];
again:
  ld.volatile.global.u32 %r2, [%rd2];
  setp.ne.u32 %p1, %r2, %r1;
  @%p1 bra again;
  ret;
}
"""


class Place:
    """A device with a stream, the kernels above, and 1024 bytes of memory."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.context = driver.cuDevicePrimaryCtxRetain(number)
        driver.cuCtxSetCurrent(self.context)
        self.stream = driver.cuStreamCreate(1)
        self.module = driver.cuModuleLoadData(KERNELS.encode() + b"\0")
        self.memory = driver.cuMemAlloc(1024)
        driver.cuMemsetD8(self.memory, 0, 1024)

    def kernel(self, name: str) -> Any:
        return driver.cuModuleGetFunction(self.module, name.encode())

    def launch(self, name: str, address: int, value: int, stream: Any = None) -> None:
        args = ((address, value), (ctypes.c_uint64, ctypes.c_uint32))
        stream = self.stream if stream is None else stream
        driver.cuLaunchKernel(self.kernel(name), 1, 1, 1, 1, 1, 1, 0, stream, args, 0)

    def read(self, count: int = 1) -> list[int]:
        host = np.zeros(count, np.uint32)
        driver.cuStreamSynchronize(self.stream)
        driver.cuMemcpyDtoH(host, self.memory, 4 * count)
        return [int(n) for n in host]

    def close(self) -> None:
        driver.cuCtxSetCurrent(self.context)
        driver.cuDevicePrimaryCtxReset(self.number)
        driver.cuMemFree(self.memory)
        driver.cuModuleUnload(self.module)
        driver.cuStreamDestroy(self.stream)
        driver.cuCtxSetCurrent(cpu.CUcontext(0))
        driver.cuDevicePrimaryCtxRelease(self.number)


@pytest.fixture
def place() -> Iterator[Place]:
    place = Place(DEVICES - 1)
    yield place
    place.close()


@pytest.fixture
def neighbour() -> Iterator[Place]:
    neighbour = Place(DEVICES - 2)
    yield neighbour
    neighbour.close()


# ---- names and results ---------------------------------------------------------------------------------------------


def test_a_free_that_is_refused_says_of_what(place: Place) -> None:
    def said(call: str, *args: Any) -> str:
        with pytest.raises(dk.DriverError, match=rf"{call}: CUDA_ERROR_INVALID_VALUE") as told:
            getattr(driver, call)(*args)
        return re.sub("test_calls.py:[0-9]+", "HERE", str(told.value).partition("invalid value")[2])

    address, pinned = int(driver.cuMemAlloc(100)), driver.cuMemHostAlloc(10, 0)
    what = "100-byte device allocation made at HERE"
    assert said("cuMemFree", address + 4) == f": {address + 4:#x} is 4 bytes into a {what}"
    of_pinned = "is for another call to free: 10-byte pinned allocation made at HERE"
    assert said("cuMemFree", pinned) == f": {pinned:#x} {of_pinned}"
    driver.cuMemFreeHost(pinned)
    driver.cuMemFree(address)
    assert said("cuMemFree", address) == f": {address:#x} was freed at HERE: {what}"
    assert said("cuMemAlloc", 0) == ""  # it is not about that
    queued = int(driver.cuMemAllocAsync(100, place.stream))
    place.launch("wait_for", int(place.memory), 1)
    driver.cuMemFreeAsync(queued, place.stream)  # which has not come to it yet
    what = "100-byte pool allocation made at HERE"
    assert said("cuMemFreeAsync", queued, place.stream) == f": {queued:#x} was freed at HERE: {what}"
    other = driver.cuStreamCreate(1)
    driver.cuStreamWriteValue32(other, place.memory, 1, 0)
    driver.cuStreamSynchronize(place.stream)
    driver.cuStreamDestroy(other)
    assert said("cuMemFreeAsync", queued, place.stream) == f": {queued:#x} was freed at HERE: {what}"


def test_enums_and_structs_are_the_bindings_own() -> None:
    from cuda.bindings import driver as bindings

    for name in ("CUresult", "CUlaunchConfig", "CUstream", "CUgraphNodeParams", "CU_GRAPH_COND_ASSIGN_DEFAULT"):
        assert getattr(cpu, name) is getattr(bindings, name)


def test_functions_have_the_names_and_parameters_of_the_bindings() -> None:
    from cuda.bindings import driver as bindings

    mine = {name for name in vars(cpu) if name.startswith("cu") and name[2:3].isupper()}
    assert len(mine) > 200
    for name in mine:
        theirs = getattr(bindings, name).__doc__ or ""
        signature = theirs[theirs.index("(") + 1 : theirs.index("\n")]
        count = 0 if signature.startswith(")") else _parameters(signature)
        own = getattr(cpu, name)
        own = getattr(own, "__wrapped__", own)
        assert own.__code__.co_argcount == count, name


def _parameters(signature: str) -> int:
    """How many there are, some of whose types have commas of their own."""
    depth = commas = 0
    for character in signature:
        depth += {"[": 1, "(": 1, "]": -1, ")": -1}.get(character, 0)
        commas += character == "," and not depth
    return commas + 1


def test_a_result_is_a_tuple_with_the_code_first(place: Place) -> None:
    assert cpu.cuMemFree(cpu.CUdeviceptr(0)) == (cpu.CUresult.CUDA_SUCCESS,)
    assert cpu.cuMemAlloc(0) == (cpu.CUresult.CUDA_ERROR_INVALID_VALUE, None)
    assert cpu.cuMemGetAddressRange(cpu.CUdeviceptr(5)) == (cpu.CUresult.CUDA_ERROR_NOT_FOUND, None, None)


def test_what_it_cannot_do_is_refused_by_name() -> None:
    with pytest.raises(dk.DriverError, match=r"cuTexObjectCreate: NO_FUNCTION: .* has no such name"):
        driver.cuTexObjectCreate  # noqa: B018 - the look-up is what fails


def test_it_looks_like_compute_capability_9(place: Place) -> None:
    names = cpu.CUdevice_attribute
    assert driver.cuDeviceGetName(64, place.number).rstrip(b"\0") == b"drvkit CPU device"
    assert driver.cuDeviceGetAttribute(names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, place.number) == 9
    assert driver.cuDeviceGetAttribute(names.CU_DEVICE_ATTRIBUTE_WARP_SIZE, place.number) == 32
    uuids = {bytes(driver.cuDeviceGetUuid(number).bytes) for number in range(DEVICES)}
    assert len(uuids) == DEVICES


REFUSED: list[tuple[str, Callable[[Place], Any], str]] = [
    ("device", lambda p: cpu.cuDeviceGet(DEVICES), "INVALID_DEVICE"),
    ("context", lambda p: cpu.cuCtxPushCurrent(cpu.CUcontext(5)), "INVALID_CONTEXT"),
    ("stream", lambda p: cpu.cuStreamSynchronize(cpu.CUstream(0x1234)), "INVALID_HANDLE"),
    ("event", lambda p: cpu.cuEventQuery(cpu.CUevent(0x1234)), "INVALID_HANDLE"),
    ("event that is a stream", lambda p: cpu.cuEventQuery(cpu.CUevent(int(p.stream))), "INVALID_HANDLE"),
    ("module", lambda p: cpu.cuModuleGetFunction(cpu.CUmodule(5), b"store"), "INVALID_HANDLE"),
    ("function", lambda p: cpu.cuModuleGetFunction(p.module, b"nope"), "NOT_FOUND"),
    ("variable", lambda p: cpu.cuModuleGetGlobal(p.module, b"nope"), "NOT_FOUND"),
    ("image", lambda p: cpu.cuModuleLoadData(b"nonsense\0"), "INVALID_IMAGE"),
    ("cubin", lambda p: cpu.cuModuleLoadData(b"\x7fELF" + bytes(100)), "NO_BINARY_FOR_GPU"),
    ("file", lambda p: cpu.cuModuleLoad(b"/no/such/file"), "FILE_NOT_FOUND"),
    ("graph", lambda p: cpu.cuGraphInstantiate(cpu.CUgraph(5), 0), "INVALID_VALUE"),
    ("no memory", lambda p: cpu.cuMemAlloc(1 << 60), "OUT_OF_MEMORY"),
    ("nothing", lambda p: cpu.cuMemAlloc(0), "INVALID_VALUE"),
    ("free of nonsense", lambda p: cpu.cuMemFree(cpu.CUdeviceptr(64)), "INVALID_VALUE"),
    ("free of a part", lambda p: cpu.cuMemFree(cpu.CUdeviceptr(int(p.memory) + 4)), "INVALID_VALUE"),
    ("free as pinned", lambda p: cpu.cuMemFreeHost(int(p.memory)), "INVALID_VALUE"),
    ("fill past the end", lambda p: cpu.cuMemsetD8(p.memory, 1, 1025), "INVALID_VALUE"),
    ("fill misaligned", lambda p: cpu.cuMemsetD32(cpu.CUdeviceptr(int(p.memory) + 2), 1, 1), "INVALID_VALUE"),
    ("copy from nowhere", lambda p: cpu.cuMemcpyDtoDAsync(p.memory, cpu.CUdeviceptr(64), 4, p.stream), "INVALID_VALUE"),
    ("copy past the end", lambda p: cpu.cuMemcpyDtoH(np.zeros(2000, "u1"), p.memory, 2000), "INVALID_VALUE"),
    ("empty block", lambda p: _launch(p, "bounded", block=(0, 1, 1)), "INVALID_VALUE"),
    ("large block", lambda p: _launch(p, "bounded", block=(129, 1, 1)), "INVALID_VALUE"),
    ("high grid", lambda p: _launch(p, "bounded", grid=(1, 65536, 1)), "INVALID_VALUE"),
    ("shared memory", lambda p: _launch(p, "bounded", shared=48 * 1024 + 1), "INVALID_VALUE"),
    ("arguments", lambda p: _launch(p, "store"), "INVALID_VALUE"),
    ("wait misaligned", lambda p: cpu.cuStreamWaitValue32(p.stream, int(p.memory) + 1, 0, 0), "INVALID_VALUE"),
    ("unrecorded event", lambda p: cpu.cuEventElapsedTime(*[driver.cuEventCreate(0)] * 2), "INVALID_HANDLE"),
    ("peer that is itself", lambda p: cpu.cuCtxEnablePeerAccess(p.context, 0), "PEER_ACCESS_UNSUPPORTED"),
    ("peer that is none", lambda p: cpu.cuCtxDisablePeerAccess(p.context), "PEER_ACCESS_NOT_ENABLED"),
    ("end of no capture", lambda p: cpu.cuStreamEndCapture(p.stream), "ILLEGAL_STATE"),
    (
        "capture of the default stream",
        lambda p: cpu.cuStreamBeginCapture(cpu.CUstream(0), 0),
        "STREAM_CAPTURE_UNSUPPORTED",
    ),
]


def _launch(place: Place, name: str, grid: Any = (1, 1, 1), block: Any = (1, 1, 1), shared: int = 0) -> Any:
    return cpu.cuLaunchKernel(place.kernel(name), *grid, *block, shared, place.stream, 0, 0)


@pytest.mark.parametrize(("what", "call", "refusal"), REFUSED, ids=[row[0] for row in REFUSED])
def test_what_is_wrong_is_refused_at_the_call(
    place: Place, what: str, call: Callable[[Place], Any], refusal: str
) -> None:
    assert code(call(place)) == refusal
    place.launch("store", int(place.memory), 5)
    assert place.read() == [5], "what is right still works"


@pytest.mark.parametrize("kind", ["2D", "3D"])
def test_rows_of_a_copy_without_a_pitch_lie_together(place: Place, kind: str) -> None:
    host, device = cpu.CUmemorytype.CU_MEMORYTYPE_HOST, cpu.CUmemorytype.CU_MEMORYTYPE_DEVICE
    driver.cuMemcpyHtoD(place.memory, np.arange(32, dtype=np.uint32), 128)
    taken = np.zeros((4, 2), np.uint32)
    params = getattr(cpu, f"CUDA_MEMCPY{kind}")()
    params.WidthInBytes, params.Height = 8, 4
    params.srcMemoryType, params.srcDevice, params.srcPitch, params.srcY = device, place.memory, 32, 0
    params.dstMemoryType, params.dstHost = host, taken.ctypes.data
    if kind == "3D":
        params.Depth = 1
    getattr(driver, f"cuMemcpy{kind}")(params)
    assert taken.tolist() == [[8 * row, 8 * row + 1] for row in range(4)]
    params.dstPitch = 4
    assert code(getattr(cpu, f"cuMemcpy{kind}")(params)) == "INVALID_VALUE"


def test_what_was_destroyed_is_known_no_more(place: Place) -> None:
    stream, event, graph = driver.cuStreamCreate(1), driver.cuEventCreate(0), driver.cuGraphCreate(0)
    driver.cuStreamDestroy(stream)
    driver.cuEventDestroy(event)
    driver.cuGraphDestroy(graph)
    assert code(cpu.cuStreamDestroy(stream)) == "INVALID_HANDLE"
    assert code(cpu.cuEventRecord(event, place.stream)) == "INVALID_HANDLE"
    assert code(cpu.cuGraphDestroy(graph)) == "INVALID_VALUE"
    memory = driver.cuMemAlloc(16)
    driver.cuMemFree(memory)
    assert code(cpu.cuMemFree(memory)) == "INVALID_VALUE"


def test_without_a_context_a_thread_can_do_little(place: Place) -> None:
    codes: list[str] = []
    freed = driver.cuMemAlloc(16)

    def work() -> None:
        codes.append(code(cpu.cuMemAlloc(16)))
        codes.append(code(cpu.cuCtxSynchronize()))
        codes.append(code(cpu.cuMemsetD8Async(place.memory, 1, 4, place.stream)))  # its stream has one
        codes.append(code(cpu.cuMemFree(freed)))  # and so has memory

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert codes == ["INVALID_CONTEXT", "INVALID_CONTEXT", "SUCCESS", "SUCCESS"]
    assert code(cpu.cuMemFree(freed)) == "INVALID_VALUE"


# ---- faults --------------------------------------------------------------------------------------------------------


def test_a_fault_is_told_by_every_later_call_until_the_reset(place: Place, neighbour: Place) -> None:
    driver.cuCtxSetCurrent(place.context)
    place.launch("store", 64, 1)
    place.launch("store", int(place.memory), 7)
    assert code(cpu.cuStreamSynchronize(place.stream)) == "ILLEGAL_ADDRESS"
    assert [code(r) for r in (cpu.cuMemAlloc(4), cpu.cuCtxSynchronize(), cpu.cuMemFree(place.memory))] == [
        "ILLEGAL_ADDRESS"
    ] * 3
    report = cpu.explain("CUDA_ERROR_ILLEGAL_ADDRESS")
    assert report is not None
    assert "kernel store" in report
    assert "0x40" in report
    assert cpu.explain(cpu.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS) == report
    assert cpu.explain("CUDA_ERROR_ECC_UNCORRECTABLE") is None
    driver.cuCtxSetCurrent(neighbour.context)
    neighbour.launch("store", int(neighbour.memory), 3)
    assert neighbour.read() == [3], "other devices go on"
    driver.cuDevicePrimaryCtxReset(place.number)
    driver.cuCtxSetCurrent(place.context)
    assert place.read() == [0], "what came after the fault was dropped"
    place.launch("store", int(place.memory), 8)
    assert place.read() == [8]


def test_a_fault_is_told_by_whatever_uses_its_context_and_by_nothing_else(place: Place, neighbour: Place) -> None:
    event, graph = driver.cuEventCreate(0), driver.cuGraphCreate(0)
    driver.cuCtxSetCurrent(place.context)
    lost = driver.cuEventCreate(0)
    place.launch("store", 64, 1)
    assert code(cpu.cuStreamSynchronize(place.stream)) == "ILLEGAL_ADDRESS"
    uses: list[Callable[[], Any]] = [
        lambda: cpu.cuEventQuery(lost),
        lambda: cpu.cuEventDestroy(lost),
        lambda: cpu.cuStreamDestroy(place.stream),
        lambda: cpu.cuModuleUnload(place.module),
        lambda: cpu.cuFuncGetAttribute(cpu.CUfunction_attribute(0), kernel),
        lambda: cpu.cuMemFree(place.memory),
        lambda: cpu.cuGraphAddKernelNode(graph, None, 0, params),
    ]
    driver.cuCtxSetCurrent(neighbour.context)
    kernel = neighbour.kernel("bounded")
    params = cpu.CUDA_KERNEL_NODE_PARAMS()
    params.gridDimX = params.gridDimY = params.gridDimZ = params.blockDimX = params.blockDimY = params.blockDimZ = 1
    params.func = kernel
    assert code(uses[-1]()) == "SUCCESS"
    driver.cuDevicePrimaryCtxReset(place.number)
    params.func = kernel = place.kernel("bounded")
    place.launch("store", 64, 1)
    assert code(cpu.cuStreamSynchronize(place.stream)) == "ILLEGAL_ADDRESS"
    assert [code(use()) for use in uses] == ["ILLEGAL_ADDRESS"] * len(uses), "by a handle, though another is current"
    assert code(cpu.cuEventRecord(event, neighbour.stream)) == "SUCCESS"
    driver.cuCtxSetCurrent(place.context)
    assert code(cpu.cuStreamSynchronize(neighbour.stream)) == "SUCCESS", "a handle of another"
    node = cpu.cuGraphAddEventRecordNode(graph, None, 0, lost)
    others = [node, cpu.cuGraphClone(graph), cpu.cuDeviceGetCount(), cpu.cuCtxGetDevice(), cpu.cuGraphDestroy(graph)]
    assert [code(result) for result in others] == ["SUCCESS"] * len(others)
    assert code(cpu.cuGraphInstantiate(driver.cuGraphCreate(0), 0)) == "ILLEGAL_ADDRESS"


def test_a_kernel_that_waits_for_nobody_is_a_deadlock_that_is_told(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "shared", False)  # tests before may have shared memory with other processes
    place.launch("wait_for", int(place.memory), 1)
    begin = time.perf_counter()
    assert code(cpu.cuStreamSynchronize(place.stream)) == "LAUNCH_TIMEOUT"
    assert time.perf_counter() - begin < 5
    report = cpu.explain("CUDA_ERROR_LAUNCH_TIMEOUT")
    assert report is not None
    assert "deadlock" in report
    assert "kernel wait_for" in report


def test_a_deadlock_is_told_also_where_another_process_might_end_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "shared", True)
    monkeypatch.setattr(machine, "patience_s", 0.5)
    place.launch("wait_for", int(place.memory), 1)
    begin = time.perf_counter()
    assert code(cpu.cuStreamSynchronize(place.stream)) == "LAUNCH_TIMEOUT"
    assert 0.5 <= time.perf_counter() - begin < 10


def test_a_kernel_that_waits_for_another_stream_or_device_is_none(place: Place, neighbour: Place) -> None:
    driver.cuCtxSetCurrent(place.context)
    place.launch("wait_for", int(neighbour.memory), 1)
    place.launch("store", int(place.memory), 5)
    driver.cuCtxSetCurrent(neighbour.context)
    neighbour.launch("store", int(neighbour.memory), 1)
    driver.cuCtxSetCurrent(place.context)
    assert place.read() == [5]


def test_an_unwritten_wait_value_is_a_deadlock(place: Place) -> None:
    driver.cuStreamWaitValue32(place.stream, place.memory, 1, 1)
    assert code(cpu.cuStreamSynchronize(place.stream)) == "LAUNCH_TIMEOUT"
    assert "wait until it is == 1" in str(cpu.explain("CUDA_ERROR_LAUNCH_TIMEOUT"))


def test_a_stream_that_waits_for_a_value_goes_on_when_it_comes(place: Place) -> None:
    other = driver.cuStreamCreate(1)
    driver.cuStreamWaitValue32(place.stream, place.memory, 3, 0)
    driver.cuMemsetD32Async(cpu.CUdeviceptr(int(place.memory) + 4), 9, 1, place.stream)
    driver.cuStreamWriteValue32(other, place.memory, 4, 0)
    driver.cuStreamSynchronize(place.stream)
    assert place.read(2) == [4, 9]
    driver.cuStreamDestroy(other)


def test_a_module_that_is_unloaded_waits_for_its_kernels(place: Place) -> None:
    module = driver.cuModuleLoadData(KERNELS.encode() + b"\0")
    store = driver.cuModuleGetFunction(module, b"store")
    args = ((int(place.memory), 6), (ctypes.c_uint64, ctypes.c_uint32))
    driver.cuLaunchKernel(store, 1, 1, 1, 1, 1, 1, 0, place.stream, args, 0)
    driver.cuModuleUnload(module)
    assert place.read() == [6]
    assert code(cpu.cuLaunchKernel(store, 1, 1, 1, 1, 1, 1, 0, place.stream, args, 0)) == "INVALID_HANDLE"


# ---- the host ------------------------------------------------------------------------------------------------------

_HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def test_pinned_memory_shows_progress_while_the_host_only_looks(place: Place) -> None:
    pinned = driver.cuMemHostAlloc(4, 0)
    word = ctypes.c_uint32.from_address(pinned)
    word.value = 0
    place.launch("store", pinned, 9)
    deadline = time.monotonic() + 10
    while word.value != 9 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert word.value == 9
    driver.cuMemFreeHost(pinned)


def test_a_kernel_sees_what_the_host_writes_to_pinned_memory(place: Place) -> None:
    pinned = driver.cuMemHostAlloc(4, 0)
    word = ctypes.c_uint32.from_address(pinned)
    word.value = 0
    place.launch("wait_for", pinned, 5)
    time.sleep(0.02)
    assert code(cpu.cuStreamQuery(place.stream)) == "NOT_READY"
    word.value = 5
    driver.cuStreamSynchronize(place.stream)
    driver.cuMemFreeHost(pinned)


def test_a_host_function_runs_on_a_thread_of_its_own_and_may_not_call_the_driver(place: Place) -> None:
    seen: list[Any] = []

    def function(data: int) -> None:
        seen.extend([data, threading.get_ident(), code(cpu.cuMemAlloc(4))])

    callback = _HostFunction(function)
    address = ctypes.cast(callback, ctypes.c_void_p).value
    driver.cuLaunchHostFunc(place.stream, cpu.CUhostFn(address), 77)
    driver.cuStreamSynchronize(place.stream)
    assert seen[0] == 77
    assert seen[1] != threading.get_ident()
    assert seen[2] == "NOT_PERMITTED"


@pytest.mark.usefixtures("races_on_purpose")
def test_the_default_stream_waits_for_blocking_streams_and_they_for_it(place: Place) -> None:
    blocking = driver.cuStreamCreate(0)
    pinned = driver.cuMemHostAlloc(4, 0)
    word = ctypes.c_uint32.from_address(pinned)
    word.value = 0
    driver.cuStreamWaitValue32(blocking, pinned, 1, 0)
    driver.cuMemsetD32Async(place.memory, 1, 1, cpu.CUstream(0))
    driver.cuMemsetD32Async(cpu.CUdeviceptr(int(place.memory) + 4), 2, 1, blocking)
    driver.cuMemsetD32Async(cpu.CUdeviceptr(int(place.memory) + 8), 3, 1, place.stream)
    driver.cuStreamSynchronize(place.stream)
    host = np.zeros(3, np.uint32)
    driver.cuMemcpyDtoHAsync(host, place.memory, 12, place.stream)
    driver.cuStreamSynchronize(place.stream)
    assert host.tolist() == [0, 0, 3]
    word.value = 1
    driver.cuCtxSynchronize()
    assert place.read(3) == [1, 2, 3]
    driver.cuStreamDestroy(blocking)
    driver.cuMemFreeHost(pinned)


def test_a_forked_process_cannot_use_the_driver() -> None:
    script = """
import os, sys
from drvkit.cpu import driver as cpu
cpu.cuInit(0)
pid = os.fork()
if not pid:
    os._exit(0 if int(cpu.cuInit(0)[0]) == int(cpu.cuDeviceGetCount()[0]) == 3 else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) or int(cpu.cuDeviceGetCount()[0]))
"""
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT).returncode == 0


# ---- functions at addresses ----------------------------------------------------------------------------------------


def raw(name: str, parameters: int) -> Callable[..., int]:
    return driver.raw(name, parameters)


def test_only_a_few_functions_have_an_address() -> None:
    status = cpu.CUdriverProcAddressQueryResult
    assert cpu.cuGetProcAddress(b"cuMemAlloc", 13000, 0)[1:] == (0, status.CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND)
    first, second = (cpu.cuGetProcAddress(b"cuGraphLaunch", 13000, 0)[1] for _ in range(2))
    assert first == second


def test_a_function_at_an_address_gives_the_code(place: Place) -> None:
    assert raw("cuGraphLaunch", 2)(5, int(place.stream)) == int(cpu.CUresult.CUDA_ERROR_INVALID_VALUE)
    assert raw("cuLaunchKernelEx", 4)(0, 5, 0, 0) == int(cpu.CUresult.CUDA_ERROR_INVALID_HANDLE)


def test_a_refused_image_writes_why_into_the_log(place: Place) -> None:
    text = ctypes.create_string_buffer(b".version 8.0\n.target sm_90\n.address_size 64\n.entry k() { frob.u32 %r1; }")
    log = ctypes.create_string_buffer(400)
    options = (ctypes.c_int * 2)(5, 6)
    values = (ctypes.c_uint64 * 2)(ctypes.addressof(log), len(log))
    handle = ctypes.c_uint64()
    at = ctypes.addressof
    result = raw("cuModuleLoadDataEx", 5)(at(handle), at(text), 2, at(options), at(values))
    assert result == int(cpu.CUresult.CUDA_ERROR_INVALID_PTX)
    assert b"frob" in log.value
    assert cpu.explain("CUDA_ERROR_INVALID_PTX") == log.value.decode()


def test_a_bug_behind_an_address_is_told_and_no_success(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = driver.cuGraphCreate(0)
    exec_ = driver.cuGraphInstantiate(graph, 0)
    monkeypatch.setattr(machine, "relieve", lambda: 1 // 0)
    assert raw("cuGraphLaunch", 2)(int(exec_), int(place.stream)) == int(cpu.CUresult.CUDA_ERROR_UNKNOWN)
    monkeypatch.undo()
    assert "ZeroDivisionError" in str(cpu.explain("CUDA_ERROR_UNKNOWN"))
    assert "ZeroDivisionError" in capsys.readouterr().err
    driver.cuGraphExecDestroy(exec_)
    driver.cuGraphDestroy(graph)


def test_a_bug_is_not_disguised_as_a_code(place: Place) -> None:
    with pytest.raises(TypeError):
        cpu.cuMemAlloc("much")
    with pytest.raises(AttributeError):
        cpu.cuMemcpy3D(5)


# ---- many at once --------------------------------------------------------------------------------------------------


def test_threads_use_their_own_devices_at_the_same_time() -> None:
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            place = Place(number)
            for i in range(50):
                place.launch("store", int(place.memory), i)
                if place.read() != [i]:
                    raise AssertionError(f"{number}: {i}")
            place.close()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_the_number_of_devices_can_be_set() -> None:
    script = "from drvkit.cpu import driver as cpu; cpu.cuInit(0); print(cpu.cuDeviceGetCount()[1])"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"DRVKIT_CPU_DEVICES": "3"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "3\n"
