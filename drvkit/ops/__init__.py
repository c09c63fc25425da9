"""Ready-made operations: each checks its operands, chooses a kernel, and launches it or adds it to a graph.

One file for each op, of the op's name::

    from drvkit.ops.scale import scale

    scale(stream, x, y, 2.0)                                 # launches; gives None
    node = scale(graph, x, y, 2.0, after=h, name="double")   # gives the graph's new node

Operands are Buffers or any device arrays. bfloat16 travels as uint16 through libraries that cannot name it, so a uint16
array of theirs is taken for bfloat16. A Buffer can name it, and has to.

The module of a source is loaded at its first use on a device and kept until `release`; meanwhile `lifetime.live` lists
it. A node and a launch in flight hold what they use themselves, so releasing is safe at any time.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, Union

import ml_dtypes
import numpy as np

from ..device import Device, Stream
from ..memory import Buffer, View, view_of
from ..module import Kernel, Module, shared_module

if TYPE_CHECKING:
    from ..graph import After, Graph
    from ..node import Node

__all__ = ["release"]

Where: TypeAlias = Union[Stream, "Graph"]

BLOCK = 256

# What each dtype is in C++.
FLOATS = {
    np.dtype(np.float32): "float",
    np.dtype(np.float16): "__half",
    np.dtype(ml_dtypes.bfloat16): "__nv_bfloat16",
}
INTS = {np.dtype(np.int32): "int"}
_CTYPES = FLOATS | INTS
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_STANDS_FOR_BFLOAT16 = (np.dtype(np.uint16), np.dtype("V2"))

_modules: dict[tuple[Device, str], Module] = {}


def release(device: Device | None = None) -> None:
    """Let go of the modules loaded so far, on ``device`` or everywhere. An image that a graph or a launch still uses is
    unloaded with the last of them; the next use of an op loads its module again."""
    for key in list(_modules):
        if device in (None, key[0]):
            _modules.pop(key, None)


# What the ops are made of


class Operands(NamedTuple):
    """What the checked operands of an elementwise op have in common."""

    n: int
    ctype: str  # of an element, in C++
    width: int  # elements that 16 bytes hold; 1 if an address is not aligned to 16 bytes


def elementwise(op: str, dtypes: Collection[np.dtype[Any]], *, y: Any, **inputs: Any) -> Operands:
    """Check operands of one shape and dtype, of which ``y`` is written.

    `TypeError` or `ValueError` names the operand. ``y`` may be an input, but not overlap one in another way: a thread
    would read what another has written.
    """
    views = {role: array(f"{op}: {role}", operand, dtypes) for role, operand in (inputs | {"y": y}).items()}
    first, *_ = views
    like, out = views[first], views["y"]
    for role, view in views.items():
        if view.dtype != like.dtype:
            raise TypeError(f"{op}: {role} is {view.dtype}, {first} is {like.dtype}")
        if view.shape != like.shape:
            raise ValueError(f"{op}: {role} has shape {view.shape}, {first} has shape {like.shape}")
        if view.address != out.address:
            apart(f"{op}: y", out, role, view)
    n = math.prod(like.shape)
    if n >= 2**31:
        raise ValueError(f"{op}: {first} has {n} elements; a launch takes fewer than 2**31")
    aligned = all(view.address % 16 == 0 for view in views.values())
    return Operands(n, _CTYPES[like.dtype], 16 // like.dtype.itemsize if aligned else 1)


# From here on the kernel with 16-byte accesses. In graphs on an H200 both take the same time up to 2**17 elements;
# beyond, the wide one is faster: at 2**26 in 64% of the time (float32), or in 36% (16 bits).
WIDE_FROM = 2**18


def vectorised(kernel: str, operands: Operands) -> tuple[str, int, int]:
    """The instance of an elementwise kernel to take, its threads, and n."""
    n, ctype, width = operands
    per_thread = width if n >= WIDE_FROM else 1
    return f"{kernel}<{ctype},{per_thread}>", -(-n // per_thread), n


def array(label: str, operand: Any, dtypes: Collection[np.dtype[Any]]) -> View:
    """What a contiguous device array of one of ``dtypes`` shows of itself; errors begin with ``label``."""
    wanted = f"{label}: wanted a device array of {' or '.join(dtype.name for dtype in dtypes)}"
    view = view_of(operand)
    if view is None or view.on_host:
        raise TypeError(f"{wanted}, got {type(operand).__name__}{' (in host memory)' if view else ''}")
    if not isinstance(operand, Buffer) and view.dtype in _STANDS_FOR_BFLOAT16:
        view = view._replace(dtype=_BFLOAT16)
    if view.dtype not in dtypes:
        raise TypeError(f"{wanted}, got {view.dtype}")
    if not view.contiguous:
        raise ValueError(f"{wanted}, contiguous, got strides {view.strides} of shape {view.shape}")
    return view


def apart(label: str, written: View, role: str, read: View) -> None:
    """Refuse ``written`` to overlap ``read``."""
    if written.address < read.address + read.nbytes and read.address < written.address + written.nbytes:
        raise ValueError(
            f"{label} at {written.address:#x} ({written.nbytes} bytes) overlaps {role} at {read.address:#x}"
        )


def kernel(device: Device, source: str, name: str) -> Kernel:
    """A kernel of ``cuda_src``, out of the module that `release` lets go of."""
    module = _modules.get((device, source))
    if module is None:
        module = _modules[device, source] = shared_module(device, source)
    return module.kernel(name)


def submit(
    where: Where, source: str, function: str, threads: int, args: tuple[Any, ...], after: After, name: str | None
) -> Node | None:
    """Launch ``function`` of ``source`` with a thread for each of ``threads``, or add it to a graph.

    For no threads nothing is launched; a graph gets an empty node, which edges can be drawn to.
    """
    op, grid = function.partition("<")[0], -(-threads // BLOCK)
    if isinstance(where, Stream):
        if after is not None or name is not None:
            raise TypeError(f"{op}: after= and name= are for nodes; a launch comes after what its stream has")
        where.handle  # noqa: B018 - refuses a closed one
        if threads:
            kernel(where.device, source, function).launch(where, grid=grid, block=BLOCK, args=args)
        return None
    if not hasattr(where, "kernel"):
        raise TypeError(
            f"{op}: wanted a drvkit Stream or Graph, got {type(where).__name__}; "
            "dev.as_stream(stream) makes a Stream of another library's"
        )
    if not threads:
        return where.empty(after=after, name=name)
    ready = kernel(where.device, source, function)
    return where.kernel(ready, grid=grid, block=BLOCK, args=args, after=after, name=name)
