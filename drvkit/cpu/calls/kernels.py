"""Modules, kernels and launches."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..fault import ImageError
from ..graphs import LAUNCH_ORDER, PROGRAMMATIC, PROGRAMMATIC_START, EdgeData
from ..handles import RefusedError, handles
from ..machine import machine
from ..operations import (
    MULTIPROCESSORS,
    SHARED_PER_BLOCK,
    Attribute,
    Kernel,
    Launch,
    Library,
    LibraryKernel,
    Module,
    blocks_per_multiprocessor,
)
from ..program import Function, load
from ..streams import Event, Stream, guard
from .base import (
    call,
    context_on,
    cu,
    current,
    device_of,
    event_of,
    kernel_of,
    number_of,
    state,
    stream_of,
    thread_state,
    wait_for_device,
)


@call(1)
def cuModuleLoad(path: Any) -> Any:
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError:
        raise RefusedError("FILE_NOT_FOUND") from None
    return load_image(data, os.path.basename(os.fsdecode(path)))


@call(1)
def cuModuleLoadData(image: Any) -> Any:
    return load_image(image_of(image))


globals()["cuModuleLoadFatBinary"] = cuModuleLoadData


@call(1)
def cuModuleLoadDataEx(image: Any, count: int, options: Any, values: Any) -> Any:
    """Options are for a compiler that is not needed here."""
    return load_image(image_of(image))


def image_of(image: Any) -> bytes:
    """The bytes of an image that is given as such, or as an address: PTX ends with a zero byte."""
    if isinstance(image, (bytes, bytearray, memoryview)):
        return bytes(image)
    address = int(image)
    if not address:
        raise RefusedError("INVALID_VALUE")
    head = ctypes.string_at(address, 4)
    return ctypes.string_at(address, 64) if not head.isascii() or head == b"\x7fELF" else ctypes.string_at(address)


def load_image(data: bytes, name: str = "") -> Any:
    device = current().device
    with _images_refused():
        return cu.CUmodule(Module(device, load(data, name)).handle)


@contextmanager
def _images_refused() -> Iterator[None]:
    """What is wrong with an image is told."""
    try:
        yield
    except ImageError as error:
        raise RefusedError(error.code.removeprefix("CUDA_ERROR_"), str(error)) from None


def _module(handle: Any) -> Module:
    found = handles.find(number_of(handle), Module, "INVALID_HANDLE")
    context_on(found.device)
    return found


@call(locked=False)
def cuModuleUnload(module: Any) -> None:
    found = _module(module)
    if found.of_library:
        raise RefusedError("NOT_PERMITTED")
    guard()
    wait_for_device(context_on(found.device))
    with machine:
        found.unload()


@call(1)
def cuModuleGetFunction(module: Any, name: bytes) -> Any:
    return cu.CUfunction(_module(module).kernel(name.decode()).handle)


@call(1)
def cuModuleGetFunctionCount(module: Any) -> int:
    return len(_module(module).program.functions)


@call(1)
def cuModuleEnumerateFunctions(count: int, module: Any) -> list[Any]:
    found = _module(module)
    names = list(found.program.functions)[:count]
    return [cu.CUfunction(found.kernel(name).handle) for name in names]


@call(2)
def cuModuleGetGlobal(module: Any, name: bytes) -> tuple[Any, int]:
    variable = _module(module).program.variables.get(name.decode())
    if variable is None:
        raise RefusedError("NOT_FOUND")
    return cu.CUdeviceptr(variable[0]), variable[1]


# Libraries


def _library(handle: Any) -> Library:
    return handles.find(number_of(handle), Library, "INVALID_HANDLE")


def _library_kernel(handle: Any) -> LibraryKernel:
    return handles.find(number_of(handle), LibraryKernel, "INVALID_HANDLE")


@call(1)
def cuLibraryLoadData(
    code: Any, jit: Any, jit_values: Any, jit_count: int, options: Any, values: Any, count: int
) -> Any:
    """It belongs to no context. Its options are for a compiler that is not needed here."""
    return cu.CUlibrary(Library(image_of(code)).handle)


@call(locked=False)
def cuLibraryUnload(library: Any) -> None:
    found = _library(library)
    guard()
    for context in list(state.contexts.values()):
        if context.device in found.modules:
            wait_for_device(context)
    with machine:
        found.unload()


@call(1)
def cuLibraryGetModule(library: Any) -> Any:
    found, device = _library(library), current().device
    with _images_refused():
        return cu.CUmodule(found.on(device).handle)


@call(1)
def cuLibraryGetKernel(library: Any, name: bytes) -> Any:
    found, context = _library(library), thread_state.contexts[-1]
    with _images_refused():
        return cu.CUkernel(found.kernel(name.decode(), 0 if context is None else context.device).handle)


@call(1)
def cuKernelGetFunction(kernel: Any) -> Any:
    return cu.CUfunction(_library_kernel(kernel).on(current().device).handle)


@call(1)
def cuKernelGetAttribute(attribute: Any, kernel: Any, device: Any) -> int:
    return _attribute(_library_kernel(kernel).on(device_of(device)).function, attribute)


@call()
def cuKernelSetAttribute(attribute: Any, value: int, kernel: Any, device: Any) -> None:
    _set_attribute(_library_kernel(kernel).on(device_of(device)).function, attribute, value)


# Functions


@call(1)
def cuFuncGetName(function: Any) -> bytes:
    return kernel_of(function).function.name.encode()


@call(1)
def cuFuncGetModule(function: Any) -> Any:
    return cu.CUmodule(kernel_of(function).module.handle)


@call(2)
def cuFuncGetParamInfo(function: Any, index: int) -> tuple[int, int]:
    parameters = kernel_of(function).function.parameters
    if index >= len(parameters):
        raise RefusedError("INVALID_VALUE")
    offset, size = parameters[index]
    return offset, size


@call(1)
def cuFuncGetParamCount(function: Any) -> int:
    return len(kernel_of(function).function.parameters)


@call(1)
def cuFuncGetAttribute(attribute: Any, function: Any) -> int:
    return _attribute(kernel_of(function).function, attribute)


def _attribute(function: Function, attribute: Any) -> int:
    values = {
        "MAX_THREADS_PER_BLOCK": function.max_threads,
        "SHARED_SIZE_BYTES": function.shared_bytes,
        "CONST_SIZE_BYTES": function.const_bytes,
        "LOCAL_SIZE_BYTES": function.local_bytes,
        "NUM_REGS": function.registers,
        "PTX_VERSION": function.program.target,
        "BINARY_VERSION": 90,
        "CACHE_MODE_CA": 0,
        "MAX_DYNAMIC_SHARED_SIZE_BYTES": function.max_dynamic_shared,
        "CLUSTER_SIZE_MUST_BE_SET": int(function.explicit_cluster),
    } | function.settings
    name = cu.CUfunction_attribute(attribute).name.removeprefix("CU_FUNC_ATTRIBUTE_")
    if name not in values:  # newer bindings know of more
        raise RefusedError("INVALID_VALUE")
    return int(values[name])


@call()
def cuFuncSetAttribute(function: Any, attribute: Any, value: int) -> None:
    _set_attribute(kernel_of(function).function, attribute, value)


_ANY_COUNT = range(1 << 31)
_SETTINGS = {
    "REQUIRED_CLUSTER_WIDTH": _ANY_COUNT,  # launches find what is wrong with it
    "REQUIRED_CLUSTER_HEIGHT": _ANY_COUNT,
    "REQUIRED_CLUSTER_DEPTH": _ANY_COUNT,
    "PREFERRED_SHARED_MEMORY_CARVEOUT": range(-1, 101),
    "NON_PORTABLE_CLUSTER_SIZE_ALLOWED": range(-1 << 31, 1 << 31),
    "CLUSTER_SCHEDULING_POLICY_PREFERENCE": range(3),
}


def _set_attribute(function: Function, attribute: Any, value: int) -> None:
    name = cu.CUfunction_attribute(attribute).name.removeprefix("CU_FUNC_ATTRIBUTE_")
    if name == "MAX_DYNAMIC_SHARED_SIZE_BYTES":
        if not 0 <= value <= SHARED_PER_BLOCK - function.shared_bytes:
            raise RefusedError("INVALID_VALUE")
        function.max_dynamic_shared = value
    elif value not in _SETTINGS.get(name, ()) or (name.startswith("REQUIRED") and function.cluster_compiled_in):
        raise RefusedError("INVALID_VALUE")
    else:
        function.settings[name] = int(value != 0) if name.endswith("ALLOWED") else value


@call(1)
def cuOccupancyMaxActiveBlocksPerMultiprocessor(function: Any, threads: int, shared: int) -> int:
    current()
    if threads <= 0:
        raise RefusedError("INVALID_VALUE")
    return blocks_per_multiprocessor(kernel_of(function).function, threads, shared)


@call(1)
def cuOccupancyMaxActiveClusters(function: Any, config: Any) -> int:
    current()
    launch, _ = launch_of(int(config.getPtr()), kernel_of(function), 0)
    x, y, z = launch.cluster
    bx, by, bz = launch.block
    resident = blocks_per_multiprocessor(launch.kernel.function, bx * by * bz, launch.shared)
    return MULTIPROCESSORS * resident // (x * y * z)


# Launches

_CONFIG = struct.Struct("=7I4xQQI")  # CUlaunchConfig
_ATTRIBUTE_BYTES = 72  # of a CUlaunchAttribute: id, 4 bytes of padding, value


def packed_arguments(kernel: Kernel, params: int, extra: int) -> bytes:
    """The arguments of a launch, from the array ``kernelParams`` or from the buffer that ``extra`` names."""
    function = kernel.function
    if params:
        count = len(function.parameters)
        pointers = struct.unpack(f"={count}Q", ctypes.string_at(params, 8 * count))
        packed = bytearray(function.params_bytes)
        for (offset, size), pointer in zip(function.parameters, pointers, strict=True):
            packed[offset : offset + size] = ctypes.string_at(pointer, size)
        return bytes(packed)
    if not extra:
        if function.parameters:
            raise RefusedError("INVALID_VALUE")
        return b""
    address = nbytes = 0
    while (word := ctypes.c_uint64.from_address(extra).value) != 0:
        value = ctypes.c_uint64.from_address(extra + 8).value
        if word == 1:  # CU_LAUNCH_PARAM_BUFFER_POINTER
            address = value
        elif word == 2:  # CU_LAUNCH_PARAM_BUFFER_SIZE
            nbytes = ctypes.c_uint64.from_address(value).value
        extra += 16
    if not address or nbytes < function.params_bytes:
        raise RefusedError("INVALID_VALUE")
    return ctypes.string_at(address, function.params_bytes)


def launch_of(config: int, kernel: Kernel, params: int, extra: int = 0) -> tuple[Launch, int]:
    """A ``CUlaunchConfig``, and its stream."""
    gx, gy, gz, bx, by, bz, shared, stream, attributes, count = _CONFIG.unpack(ctypes.string_at(config, 52))
    packed = packed_arguments(kernel, params, extra) if params or extra or not kernel.function.parameters else b""
    raw = {}
    for at in range(attributes, attributes + count * _ATTRIBUTE_BYTES, _ATTRIBUTE_BYTES):
        raw[ctypes.c_int.from_address(at).value] = ctypes.string_at(at + 8, 64)
    return Launch(kernel, (gx, gy, gz), (bx, by, bz), shared, packed, raw), stream


def _queue_launch(launch: Launch, stream: Stream) -> None:
    if launch.kernel.module.device != stream.context.device:
        raise RefusedError("INVALID_HANDLE")
    launch.check()
    if launch.updatable and stream.capture is None:
        raise RefusedError("NOT_SUPPORTED")
    records = list(_moments(launch)) if launch.attributes else []
    work = stream.queue(launch)
    for event, port in records:
        stream.record_moment(event, work, port)


_EVENT_PORTS = {Attribute.PROGRAMMATIC_EVENT: PROGRAMMATIC, Attribute.LAUNCH_COMPLETION_EVENT: LAUNCH_ORDER}


def _moments(launch: Launch) -> Iterator[tuple[Event, EdgeData]]:
    """The events that it records, each with the port of the kernel that it stands for."""
    for attribute, port in _EVENT_PORTS.items():
        raw = launch.attributes.get(attribute)
        if raw is None:
            continue
        event = event_of(struct.unpack_from("=Q", raw)[0])
        if event.timing or event.records is not None:
            raise RefusedError("NOT_SUPPORTED")
        at_start = attribute == Attribute.PROGRAMMATIC_EVENT and launch.integer(attribute, 12)
        yield event, PROGRAMMATIC_START if at_start else port


@call()
def cuLaunchKernel(
    function: Any,
    gx: int,
    gy: int,
    gz: int,
    bx: int,
    by: int,
    bz: int,
    shared: int,
    stream: Any,
    params: Any,
    extra: Any,
) -> None:
    kernel = kernel_of(function)
    holder = cu.CUDA_KERNEL_NODE_PARAMS()  # its setter takes every form of arguments that the bindings take
    holder.kernelParams = params if params is not None else 0
    packed = packed_arguments(kernel, int(holder.kernelParams), number_of(extra))
    _queue_launch(Launch(kernel, (gx, gy, gz), (bx, by, bz), shared, packed), stream_of(stream))


@call()
def cuLaunchKernelEx(config: Any, function: Any, params: Any, extra: Any) -> None:
    holder = cu.CUDA_KERNEL_NODE_PARAMS()
    holder.kernelParams = params if params is not None else 0
    launch_kernel_ex(int(config.getPtr()), number_of(function), int(holder.kernelParams), number_of(extra))


def launch_kernel_ex(config: int, function: int, params: int, extra: int) -> None:
    kernel = kernel_of(function)
    launch, stream = launch_of(config, kernel, params, extra)
    if kernel.function.parameters and not params and not extra:
        raise RefusedError("INVALID_VALUE")
    _queue_launch(launch, stream_of(stream))
