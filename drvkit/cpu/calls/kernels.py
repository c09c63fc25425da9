"""Modules, kernels and launches."""

from __future__ import annotations

import ctypes
import os
import struct
from typing import Any

from ..fault import ImageError
from ..handles import RefusedError, handles
from ..machine import START, TRIGGER, machine
from ..operations import MULTIPROCESSORS, SHARED_PER_BLOCK, Attribute, Kernel, Launch, Module, blocks_per_multiprocessor
from ..program import load
from ..streams import Stream, guard
from .base import call, cu, current, event_of, kernel_of, number_of, state, stream_of, wait_for_device


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
    guard()
    device = current().device
    try:
        program = load(data, name)
    except ImageError as error:
        state.reports[error.code] = str(error)
        raise RefusedError(error.code.removeprefix("CUDA_ERROR_")) from None
    module = Module(0, device, program)
    module.handle = handles.add(module)
    return cu.CUmodule(module.handle)


def _module(handle: Any) -> Module:
    return handles.find(number_of(handle), Module, "INVALID_HANDLE")


@call(locked=False)
def cuModuleUnload(module: Any) -> None:
    found = _module(module)
    guard()
    wait_for_device(current())
    with machine:
        handles.drop(found.handle)
        for kernel in found.kernels.values():
            handles.drop(kernel.handle)
        found.closed = True
        found.program.unload()


@call(1)
def cuModuleGetFunction(module: Any, name: bytes) -> Any:
    return cu.CUfunction(_kernel_of(_module(module), name.decode()).handle)


def _kernel_of(module: Module, name: str) -> Kernel:
    kernel = module.kernels.get(name)
    if kernel is None:
        function = module.program.functions.get(name)
        if function is None:
            raise RefusedError("NOT_FOUND")
        kernel = module.kernels[name] = Kernel(0, module, function)
        kernel.handle = handles.add(kernel)
    return kernel


@call(1)
def cuModuleGetFunctionCount(module: Any) -> int:
    return len(_module(module).program.functions)


@call(1)
def cuModuleEnumerateFunctions(count: int, module: Any) -> list[Any]:
    found = _module(module)
    names = list(found.program.functions)[:count]
    return [cu.CUfunction(_kernel_of(found, name).handle) for name in names]


@call(2)
def cuModuleGetGlobal(module: Any, name: bytes) -> tuple[Any, int]:
    variable = _module(module).program.variables.get(name.decode())
    if variable is None:
        raise RefusedError("NOT_FOUND")
    return cu.CUdeviceptr(variable[0]), variable[1]


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
    known = kernel_of(function).function
    width, height, depth = known.cluster or (0, 0, 0)
    values = {
        "MAX_THREADS_PER_BLOCK": known.max_threads,
        "SHARED_SIZE_BYTES": known.shared_bytes,
        "CONST_SIZE_BYTES": known.const_bytes,
        "LOCAL_SIZE_BYTES": known.local_bytes,
        "NUM_REGS": known.registers,
        "PTX_VERSION": 90,
        "BINARY_VERSION": 90,
        "MAX_DYNAMIC_SHARED_SIZE_BYTES": known.max_dynamic_shared,
        "PREFERRED_SHARED_MEMORY_CARVEOUT": -1,
        "CLUSTER_SIZE_MUST_BE_SET": int(known.cluster is not None),
        "REQUIRED_CLUSTER_WIDTH": width,
        "REQUIRED_CLUSTER_HEIGHT": height,
        "REQUIRED_CLUSTER_DEPTH": depth,
    }
    return int(values.get(cu.CUfunction_attribute(attribute).name.removeprefix("CU_FUNC_ATTRIBUTE_"), 0))


@call()
def cuFuncSetAttribute(function: Any, attribute: Any, value: int) -> None:
    known = kernel_of(function).function
    name = cu.CUfunction_attribute(attribute).name.removeprefix("CU_FUNC_ATTRIBUTE_")
    if name == "MAX_DYNAMIC_SHARED_SIZE_BYTES":
        if not 0 <= value <= SHARED_PER_BLOCK - known.shared_bytes:
            raise RefusedError("INVALID_VALUE")
        known.max_dynamic_shared = value
    elif name not in ("PREFERRED_SHARED_MEMORY_CARVEOUT", "NON_PORTABLE_CLUSTER_SIZE_ALLOWED"):
        raise RefusedError("INVALID_VALUE")


@call(1)
def cuOccupancyMaxActiveBlocksPerMultiprocessor(function: Any, threads: int, shared: int) -> int:
    if threads <= 0:
        raise RefusedError("INVALID_VALUE")
    return blocks_per_multiprocessor(kernel_of(function).function, threads, shared)


@call(1)
def cuOccupancyMaxActiveClusters(function: Any, config: Any) -> int:
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
        identity = ctypes.c_int.from_address(at).value
        if identity in (Attribute.PREFERRED_CLUSTER_DIMENSION, Attribute.DEVICE_UPDATABLE_KERNEL_NODE):
            raise RefusedError("INVALID_VALUE")
        raw[identity] = ctypes.string_at(at + 8, 64)
    return Launch(kernel, (gx, gy, gz), (bx, by, bz), shared, packed, raw), stream


def _queue_launch(launch: Launch, stream: Stream) -> None:
    if launch.kernel.module.device != stream.context.device:
        raise RefusedError("INVALID_HANDLE")
    launch.check()
    work = stream.queue(launch)
    if launch.attributes:
        for attribute, usual in ((Attribute.PROGRAMMATIC_EVENT, TRIGGER), (Attribute.LAUNCH_COMPLETION_EVENT, START)):
            raw = launch.attributes.get(attribute)
            if raw is not None:
                (event,) = struct.unpack_from("=Q", raw)
                at_start = attribute == Attribute.PROGRAMMATIC_EVENT and launch.integer(attribute, 12)
                stream.record_moment(event_of(event), work, START if at_start else usual)


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
