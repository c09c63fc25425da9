"""Modules, contexts, what is left after a fault, calls of host functions, handles that are zero."""

from __future__ import annotations

import ctypes
from typing import Any

from .world import PTX, World, case, driver, fill, must, status

HEAD = b".version 8.0\n.target sm_90\n.address_size 64\n"
OLDER = HEAD.replace(b"sm_90", b"sm_80") + b".visible .entry k() { ret; }\0"


@case
def modules(world: World) -> Any:
    return [
        status(driver.cuModuleGetFunction(world.module, b"nope")),
        status(driver.cuModuleGetGlobal(world.module, b"nope")),
        status(driver.cuModuleLoadData(b"nonsense\x00")),
        status(
            driver.cuModuleLoadData(
                b".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry k() { foo.bar %r1; }\x00"
            )
        ),
        status(driver.cuModuleLoad(b"/no/such/file")),
        status(driver.cuFuncGetParamInfo(world.empty, 0)),
        driver.cuFuncGetParamInfo(world.store, 1)[1:],
        must(driver.cuModuleGetFunctionCount(world.module)),
        status(
            driver.cuModuleLoadData(b".version 8.0\n.target sm_100\n.address_size 64\n.visible .entry k() { ret; }\x00")
        ),
        status(
            driver.cuModuleLoadData(b".version 99.0\n.target sm_90\n.address_size 64\n.visible .entry k() { ret; }\x00")
        ),
    ]


@case
def contexts(world: World) -> Any:
    return [
        status(driver.cuCtxPopCurrent()),
        status(driver.cuCtxPopCurrent()),
        status(driver.cuMemAlloc(16)),
        status(driver.cuCtxSynchronize()),
        status(driver.cuStreamCreate(0)),
        status(driver.cuMemcpyDtoH(world.host, world.memory, 4)),
        status(driver.cuStreamSynchronize(world.stream)),
        fill(world, world.stream),
        status(driver.cuEventCreate(0)),
        status(driver.cuGraphCreate(0)),
        status(driver.cuMemFree(world.memory)),
        status(driver.cuModuleLoadData(PTX)),
        status(driver.cuDeviceGet(99)),
        status(driver.cuDevicePrimaryCtxGetState(0)),
    ]


@case
def sticky(world: World) -> Any:
    return [
        status(
            driver.cuLaunchKernel(
                world.store, 1, 1, 1, 1, 1, 1, 0, world.stream, ((64, 1), (ctypes.c_uint64, ctypes.c_uint32)), 0
            )
        ),
        status(driver.cuStreamSynchronize(world.stream)),
        status(driver.cuStreamSynchronize(world.stream)),
        status(driver.cuMemAlloc(16)),
        status(driver.cuMemFree(world.memory)),
        status(driver.cuStreamQuery(world.other_stream)),
        status(driver.cuGraphCreate(0)),
        status(driver.cuEventCreate(0)),
        status(driver.cuCtxGetCurrent()),
        status(driver.cuDeviceGetAttribute(driver.CUdevice_attribute(1), 0)),
        status(driver.cuCtxSetCurrent(world.context)),
        status(driver.cuCtxPushCurrent(world.context)),
        status(driver.cuCtxPopCurrent()),
        status(driver.cuStreamDestroy(world.other_stream)),
        status(driver.cuModuleUnload(world.module)),
        status(driver.cuFuncGetAttribute(driver.CUfunction_attribute(0), world.empty)),
        status(driver.cuMemGetInfo()),
        status(driver.cuDevicePrimaryCtxReset(0)),
        status(driver.cuMemAlloc(16)),
        status(driver.cuCtxSynchronize()),
        status(driver.cuDevicePrimaryCtxRetain(0)),
        status(driver.cuCtxSetCurrent(world.context)),
        status(driver.cuMemAlloc(16)),
    ]


@case
def host_calls(world: World) -> Any:
    answers: list[Any] = []
    function_type = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

    def call(_: Any) -> None:
        answers.append(
            [
                status(driver.cuMemAlloc(16)),
                status(driver.cuStreamQuery(world.other_stream)),
                status(driver.cuEventCreate(0)),
                status(driver.cuCtxGetCurrent()),
                status(driver.cuDeviceGetCount()),
                status(driver.cuGraphCreate(0)),
            ]
        )

    function = function_type(call)
    launched = status(
        driver.cuLaunchHostFunc(world.stream, driver.CUhostFn(ctypes.cast(function, ctypes.c_void_p).value), 0)
    )
    synchronized = status(driver.cuStreamSynchronize(world.stream))
    return [launched, synchronized, answers]


@case
def zero_handles(world: World) -> Any:
    return [
        status(driver.cuGraphInstantiate(driver.CUgraph(0), 0)),
        status(driver.cuGraphLaunch(driver.CUgraphExec(0), world.stream)),
        status(driver.cuEventRecord(driver.CUevent(0), world.stream)),
        status(driver.cuLaunchKernel(driver.CUfunction(0), 1, 1, 1, 1, 1, 1, 0, world.stream, 0, 0)),
        status(driver.cuGraphAddEmptyNode(driver.CUgraph(0), None, 0)),
        status(driver.cuModuleGetFunction(driver.CUmodule(0), b"x")),
        status(driver.cuStreamDestroy(driver.CUstream(0))),
        status(driver.cuEventQuery(driver.CUevent(0))),
        status(driver.cuGraphNodeGetType(driver.CUgraphNode(0))),
        status(driver.cuCtxPushCurrent(driver.CUcontext(0))),
        status(driver.cuMemPoolDestroy(driver.CUmemoryPool(0))),
        status(driver.cuGraphExecDestroy(driver.CUgraphExec(0))),
        status(driver.cuGraphDestroy(driver.CUgraph(0))),
    ]


@case
def images(world: World) -> Any:
    """What passes for PTX."""
    return [
        status(driver.cuModuleLoadData(text + b"\0"))
        for text in (
            b"",
            b"/* a */ // b\n" + HEAD,
            b"// .version 8.0\n.target sm_90",
            HEAD + b"of another syntax",
            HEAD.replace(b"8.0", b"9.0"),
            HEAD.replace(b"8.0", b"10.0") + b"of another syntax",
        )
    ]


@case
def versions(world: World) -> Any:
    """Of a kernel for an older architecture."""
    function = must(driver.cuModuleGetFunction(must(driver.cuModuleLoadData(OLDER)), b"k"))
    attributes = driver.CUfunction_attribute
    return [
        driver.cuFuncGetAttribute(attribute, function)[1]
        for attribute in (attributes.CU_FUNC_ATTRIBUTE_PTX_VERSION, attributes.CU_FUNC_ATTRIBUTE_BINARY_VERSION)
    ]


@case
def libraries(world: World) -> Any:
    most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    library = must(driver.cuLibraryLoadData(OLDER, None, None, 0, None, None, 0))
    kernel = must(driver.cuLibraryGetKernel(library, b"k"))
    answers = [
        status(driver.cuModuleUnload(must(driver.cuLibraryGetModule(library)))),
        status(driver.cuLibraryGetKernel(library, b"nope")),
        status(driver.cuLaunchKernel(driver.CUfunction(int(kernel)), 1, 1, 1, 1, 1, 1, 0, world.stream, 0, 0)),
        status(driver.cuKernelSetAttribute(most, 100000, kernel, 0)),
        driver.cuKernelGetAttribute(most, kernel, 0)[1],
        driver.cuFuncGetAttribute(most, must(driver.cuKernelGetFunction(kernel)))[1],
    ]
    must(driver.cuCtxSetCurrent(driver.CUcontext(0)))
    answers += [status(driver.cuLibraryGetModule(library)), status(driver.cuKernelGetFunction(kernel))]
    must(driver.cuCtxSetCurrent(world.context))
    return [
        *answers,
        status(driver.cuLibraryLoadData(b"nonsense\0", None, None, 0, None, None, 0)),
        status(driver.cuLibraryUnload(library)),
    ]


@case
def nonsense_library(world: World) -> Any:
    """Whose image is first looked at when it is used."""

    def load(image: bytes) -> Any:
        return driver.cuLibraryLoadData(image, None, None, 0, None, None, 0)

    library = must(load(b"nonsense\0"))
    return [
        status(driver.cuLibraryGetKernel(library, b"k")),
        status(driver.cuLibraryGetModule(library)),
        status(driver.cuLibraryUnload(library)),
        status(load(b".version 8.0\n.target sm_90\n.address_size 64\nother syntax\0")),
        status(load(b"\0")),
    ]
