"""`drvkit.driver`: whatever goes wrong behind the door has one form. Small modules stand for the bindings."""

from __future__ import annotations

import ctypes
import pickle
import subprocess
import sys
import threading
import time
from enum import IntEnum
from types import ModuleType
from typing import Any

import pytest

from drvkit.device import Context
from drvkit.driver import Driver, DriverError, Nvrtc, open_driver


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_FOUND = 500
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900


class nvrtcResult(IntEnum):  # noqa: N801 - the bindings' name
    NVRTC_SUCCESS = 0
    NVRTC_ERROR_COMPILATION = 6


class DynamicLibNotFoundError(RuntimeError):
    """What the bindings raise where there is no such library."""


class FunctionNotFoundError(RuntimeError):
    """What the bindings raise for a symbol that the library lacks."""


OK = CUresult.CUDA_SUCCESS
MEANINGS = {CUresult.CUDA_ERROR_OUT_OF_MEMORY: b"out of memory", CUresult.CUDA_ERROR_NOT_FOUND: None}


def driver(**functions: Any) -> Driver:
    api: Any = ModuleType("bindings.driver")
    api.CUresult = CUresult
    api.cuGetErrorString = lambda code: (OK, MEANINGS.get(code, b"a meaning"))
    vars(api).update(functions)
    return Driver("cuda", api)


def raises(error: Exception) -> Any:
    def call(*_: Any) -> Any:
        raise error

    return call


def test_what_is_left_of_a_result() -> None:
    door = driver(
        cuNone=lambda: (OK,), cuOne=lambda x: (OK, x), cuTwo=lambda x, y: (OK, x, y), cuEmpty=lambda: (OK, [])
    )
    assert door.cuNone() is None
    assert door.cuOne(5) == 5
    assert door.cuTwo(5, 6) == (5, 6)
    assert door.cuEmpty() == []


def test_what_is_no_function_of_the_api_passes_through() -> None:
    door = driver(CU_FLAG=7, cudaGraphConditionalHandle=int, cuuint64_t=float)
    assert door.CUresult is CUresult
    assert door.CU_FLAG == 7
    assert door.cuuint64_t is float
    assert door.cudaGraphConditionalHandle is int


def test_a_result_code_is_an_error_that_names_call_code_and_meaning() -> None:
    door = driver(cuMemAlloc=lambda n: (CUresult.CUDA_ERROR_OUT_OF_MEMORY, None))
    with pytest.raises(DriverError) as told:
        door.cuMemAlloc(5)
    error = told.value
    assert (error.call, error.code, error.meaning) == ("cuMemAlloc", "CUDA_ERROR_OUT_OF_MEMORY", "out of memory")
    assert str(error) == "cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY: out of memory"


@pytest.mark.parametrize(
    ("code", "name", "meaning"),
    [
        (CUresult.CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"),
        (2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"),
        (500, "CUDA_ERROR_NOT_FOUND", "no description"),
        (4711, "4711", "a result code that these bindings do not know"),
    ],
)
def test_a_result_code_as_enum_or_number(code: Any, name: str, meaning: str) -> None:
    error = driver().error("cuCall", code)
    assert (error.call, error.code, error.meaning) == ("cuCall", name, meaning)


def test_a_missing_library() -> None:
    door = driver(cuInit=raises(RuntimeError("Failed to dlopen libcuda.so.1\nlibcuda.so.1: no such file")))
    with pytest.raises(DriverError) as told:
        door.cuInit(0)
    assert str(told.value).startswith("cuInit: NO_LIBRARY: libcuda (NVIDIA's driver) was not found")
    assert "Failed to dlopen libcuda.so.1" in told.value.meaning
    assert "\n" not in str(told.value)
    with pytest.raises(DriverError, match="NO_LIBRARY"):
        driver(cuInit=raises(DynamicLibNotFoundError())).cuInit(0)


def test_a_missing_symbol() -> None:
    door = driver(cuNew=raises(FunctionNotFoundError("function cuNew is not found")))
    with pytest.raises(DriverError) as told:
        door.cuNew()
    want = "cuNew: NO_FUNCTION: this libcuda (NVIDIA's driver) does not have it (function cuNew is not found)"
    assert str(told.value) == want


def test_a_name_that_the_bindings_lack() -> None:
    with pytest.raises(DriverError) as told:
        driver().cuGraphNewThing  # noqa: B018 - the look-up is what fails
    assert str(told.value) == "cuGraphNewThing: NO_FUNCTION: bindings.driver has no such name"


def test_a_wrong_use_of_the_bindings_is_not_disguised() -> None:
    door = driver(cuCall=raises(TypeError("wanted int")))
    with pytest.raises(TypeError, match="wanted int"):
        door.cuCall("x")


@pytest.mark.parametrize("error", [RuntimeError(), RuntimeError("struct has no such member"), NotImplementedError("x")])
def test_other_errors_of_the_bindings_pass_through(error: RuntimeError) -> None:
    with pytest.raises(RuntimeError) as told:
        driver(cuCall=raises(error)).cuCall()
    assert told.value is error


def test_the_call_that_broke_a_capture_is_remembered_for_its_thread() -> None:
    door = driver(
        cuStreamSynchronize=lambda: (CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,),
        cuMemAlloc=lambda: (CUresult.CUDA_ERROR_OUT_OF_MEMORY,),
    )
    assert door.in_capture.refused is None
    for call in (door.cuStreamSynchronize, door.cuMemAlloc):
        with pytest.raises(DriverError):
            call()
    assert door.in_capture.refused is not None
    assert door.in_capture.refused.call == "cuStreamSynchronize"
    seen: list[Any] = [5]
    thread = threading.Thread(target=lambda: seen.append(door.in_capture.refused))
    thread.start()
    thread.join()
    assert seen == [5, None]


def test_errors_travel_between_processes() -> None:
    error = driver().error("cuMemAlloc", 2)
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, DriverError)
    assert (str(copy), copy.call, copy.code, copy.meaning) == (str(error), error.call, error.code, error.meaning)


def test_a_raw_function_takes_integers_and_gives_the_code() -> None:
    seen: list[tuple[str, Any]] = []

    def both(a: int, out: int) -> int:
        ctypes.cast(out, ctypes.POINTER(ctypes.c_int))[0] = 7
        return a

    function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p)(both)

    def find(name: bytes, version: int, flags: int) -> Any:
        seen.append((name.decode(), version))
        return OK, ctypes.cast(function, ctypes.c_void_p).value, "found"

    door = driver(cuGetProcAddress=find)
    out = ctypes.c_int()
    assert door.raw("cuThing", 2)(2, ctypes.addressof(out)) == 2
    assert door.raw("cuThing", 2)(0, ctypes.addressof(out)) == 0
    assert out.value == 7
    assert seen == [("cuThing", 13000)], "it is looked up once"


def test_threads_that_ask_for_a_raw_function_first_get_one_and_the_same() -> None:
    count, looked_up = 8, []
    function = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 0)

    def find(*_: Any) -> Any:
        looked_up.append(1)
        time.sleep(0.01)
        return OK, ctypes.cast(function, ctypes.c_void_p).value, "found"

    door, barrier, got = driver(cuGetProcAddress=find), threading.Barrier(count), []

    def work() -> None:
        barrier.wait()
        got.append(door.raw("cuThing", 0))

    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(looked_up) == 1
    assert got == [got[0]] * count


def test_the_context_that_was_entered_last_is_known_to_each_thread_for_all_devices() -> None:
    calls: list[tuple[Any, ...]] = []

    def called(name: str) -> Any:
        def call(*args: Any) -> Any:
            calls.append((name, *args))
            return (OK,)

        return call

    names = ("cuCtxSetCurrent", "cuCtxPushCurrent", "cuCtxPopCurrent")
    door = driver(**{name: called(name) for name in names})
    first, second = Context(door, 1), Context(door, 2)

    def work() -> None:
        for context in (first, first, second, second, first):
            context.enter_thread()
        with second:
            second.enter_thread()
            with first:
                first.enter_thread()
            second.enter_thread()
        first.enter_thread()

    want: list[tuple[Any, ...]] = [("cuCtxSetCurrent", 1), ("cuCtxSetCurrent", 2), ("cuCtxSetCurrent", 1)]
    want += [("cuCtxPushCurrent", 2), ("cuCtxPushCurrent", 1), ("cuCtxPopCurrent",), ("cuCtxPopCurrent",)]
    work()
    assert calls == want
    calls.clear()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert calls == want, "another thread has entered nothing yet"


def test_a_raw_function_that_the_driver_lacks() -> None:
    door = driver(cuGetProcAddress=lambda *_: (OK, 0, "CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND"))
    with pytest.raises(DriverError) as told:
        door.raw("cuThing", 2)
    assert (told.value.call, told.value.code) == ("cuThing", "NO_FUNCTION")
    assert "SYMBOL_NOT_FOUND" in told.value.meaning


def test_the_compiler_has_the_same_door() -> None:
    api: Any = ModuleType("bindings.nvrtc")
    api.nvrtcGetErrorString = lambda code: (nvrtcResult.NVRTC_SUCCESS, b"compilation")
    api.nvrtcCompileProgram = lambda *_: (nvrtcResult.NVRTC_ERROR_COMPILATION,)
    api.nvrtcVersion = lambda: (nvrtcResult.NVRTC_SUCCESS, 13, 0)
    api.nvrtcGetCUBIN = raises(DynamicLibNotFoundError("libnvrtc.so.13: cannot open"))
    door = Nvrtc(api)
    assert door.nvrtcVersion() == (13, 0)
    with pytest.raises(DriverError) as told:
        door.nvrtcCompileProgram()
    assert str(told.value) == "nvrtcCompileProgram: NVRTC_ERROR_COMPILATION: compilation"
    with pytest.raises(DriverError, match=r"NO_LIBRARY: libnvrtc \(package nvidia-cuda-nvrtc\) was not found"):
        door.nvrtcGetCUBIN()


def test_there_is_no_driver_for_other_kinds_of_devices() -> None:
    with pytest.raises(ValueError, match="no driver for device kind 'tpu'; there are 'cuda' and 'cpu'"):
        open_driver("tpu")


def test_importing_the_library_loads_no_driver() -> None:
    code = "import drvkit, sys; sys.exit('libcuda' in open('/proc/self/maps').read() or 'cupy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
