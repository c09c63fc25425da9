"""The CPU devices behind the names of ``cuda.bindings.driver``: what stands in for that module.

Functions have the names, the arguments and the results of NVIDIA's bindings, whose enums, structs and handle types are
used as they are: they need no libcuda. What a function is given is checked when it is called; what its work does wrong
is told by later calls, as with a GPU. A name that is not here is refused by `drvkit.driver.Driver`, which says so.

Source: CUDA Driver API.
"""

from __future__ import annotations

import _thread
import ctypes
import struct
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from .calls import devices, graphs, kernels, memory, sharing, streams
from .calls.base import OK, code_of, cu, enter, graph_of, node_of, report, thread_state
from .calls.graphs import exec_kernel_node_set_params, graph_exec_update, graph_launch, launch_params
from .calls.kernels import image_of, launch_kernel_ex, load_image
from .calls.memory import pointer_attribute
from .graphs import EdgeData, Node
from .handles import RefusedError, handles
from .machine import machine

if TYPE_CHECKING:  # what is put here below

    def __getattr__(name: str) -> Any: ...


# Enums, structs, handle types and constants: all of the bindings that is no function.
globals().update(
    {
        name: member
        for name, member in vars(cu).items()
        if name[:2] in ("CU", "cu") and not (name.startswith("cu") and name[2:3].isupper())
    }
)
for _chapter in (devices, memory, sharing, streams, kernels, graphs):
    globals().update(
        {name: member for name, member in vars(_chapter).items() if name.startswith("cu") and name[2:3].isupper()}
    )


def explain(code: Any, *, told: bool = True) -> str | None:
    """What is known of the newest failure with this result code (the enum or its name): the device's own report, or
    why a call of this thread was refused.

    ``told``: somebody is given it.
    """
    name = code if isinstance(code, str) else cu.CUresult(code).name
    fault = machine.newest_fault
    if fault is not None and fault.code == name:
        fault.told |= told
        return str(fault)
    return thread_state.reports.get(name) or None


def name_node(node: Any, name: str) -> None:
    """How reports call a node of a graph that is not instantiated yet."""
    node_of(node).name = name


# Functions at addresses


def _graph_add_kernel_node(out: int, graph: int, dependencies: int, count: int, params: int) -> None:
    into = graph_of(graph)
    numbers = struct.unpack(f"={count}Q", ctypes.string_at(dependencies, 8 * count)) if count else ()
    edges: list[tuple[Node, EdgeData]] = [(handles.find(number, Node), (0, 0, 0)) for number in numbers]
    ctypes.c_uint64.from_address(out).value = into.add(launch_params(params), edges).handle


def _module_load_data_ex(out: int, image: int, count: int, options: int, values: int) -> None:
    names = (ctypes.c_int * count).from_address(options) if count else ()
    given = dict(zip(names, (ctypes.c_uint64 * count).from_address(values), strict=True)) if count else {}
    log, size = given.get(5, 0), given.get(6, 0)  # CU_JIT_ERROR_LOG_BUFFER, and its size
    try:
        ctypes.c_uint64.from_address(out).value = int(load_image(image_of(image)))
    except RefusedError as refused:
        text = refused.why.encode()[: max(size - 1, 0)]
        if log and size:
            ctypes.memmove(log, text + b"\0", len(text) + 1)
        raise


def _pointer_get_attribute(out: int, attribute: int, address: int) -> None:
    value = pointer_attribute(attribute, address)
    wide = cu.CUpointer_attribute(attribute).name.endswith(("CONTEXT", "POINTER", "ADDR", "SIZE"))
    (ctypes.c_uint64 if wide else ctypes.c_uint32).from_address(out).value = int(value)


class _Raw(NamedTuple):
    function: Callable[..., None]
    parameters: int


# Functions of integers: handles and addresses. What calls them cannot pass on what they raise.
_RAW = {
    "cuLaunchKernelEx": _Raw(launch_kernel_ex, 4),
    "cuGraphLaunch": _Raw(graph_launch, 2),
    "cuGraphAddKernelNode": _Raw(_graph_add_kernel_node, 5),
    "cuGraphExecKernelNodeSetParams": _Raw(exec_kernel_node_set_params, 3),
    "cuGraphExecUpdate": _Raw(graph_exec_update, 3),
    "cuModuleLoadDataEx": _Raw(_module_load_data_ex, 5),
    "cuPointerGetAttribute": _Raw(_pointer_get_attribute, 3),
    **{name: _Raw(vars(memory)[name].__wrapped__, 6) for name in (f"cuMemsetD2D{bits}Async" for bits in (8, 16, 32))},
}
_callbacks: dict[str, Any] = {}  # for ever: their addresses were given away


def cuGetProcAddress(name: bytes, version: int, flags: Any) -> tuple[Any, int | None, Any]:
    """The address of a C function that takes integers and gives the result code, for the few names that have one."""
    results, raw = cu.CUdriverProcAddressQueryResult, _RAW.get(name.decode())
    if raw is None:
        return code_of("NOT_FOUND"), 0, results.CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND
    if name.decode() not in _callbacks:
        prototype = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * raw.parameters)
        _callbacks[name.decode()] = prototype(_raw_call(raw.function))
    address = ctypes.cast(_callbacks[name.decode()], ctypes.c_void_p).value
    return OK, address, results.CU_GET_PROC_ADDRESS_SUCCESS


def _raw_call(function: Callable[..., None]) -> Callable[..., int]:
    def call(*args: int) -> int:
        try:
            enter()
            with machine:
                function(*args)
            machine.relieve()
        except RefusedError as refused:
            return int(report(refused))
        except KeyboardInterrupt:
            _thread.interrupt_main()  # it comes as soon as the caller is back in Python
            return int(code_of("UNKNOWN"))
        except BaseException as bug:
            text = "".join(traceback.format_exception(bug))
            print(text, file=sys.stderr)
            return int(report(RefusedError("UNKNOWN", text)))
        return 0

    return call
