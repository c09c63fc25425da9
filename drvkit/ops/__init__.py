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
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, Union

import ml_dtypes
import numpy as np

from ..device import Device, Stream
from ..memory import Buffer, View, view_of
from ..module import Kernel, Module, shared_module
from ..records import ROTARY, Format, Pages

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
HALVES = {dtype: FLOATS[dtype] for dtype in (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))}
# Of keys and values in pools.
POOLS = HALVES | {np.dtype(ml_dtypes.float8_e4m3fn): "__nv_fp8_e4m3"}
DIMS, PAGE_SIZES = (64, 128, 256), (8, 16, 32, 64, 128)
MOST_OF_PAGE = 2**20  # entries of a latent cache
_CTYPES = FLOATS | INTS
# What others have where they cannot name the dtype.
_STAND_FOR = {
    **dict.fromkeys((np.dtype(np.uint16), np.dtype("V2")), np.dtype(ml_dtypes.bfloat16)),
    **dict.fromkeys((np.dtype(np.uint8), np.dtype("V1")), np.dtype(ml_dtypes.float8_e4m3fn)),
}

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
    seen = view(label, operand, dtypes)
    if not seen.contiguous:
        raise ValueError(f"{_wanted(label, dtypes)}, contiguous, got strides {seen.strides} of shape {seen.shape}")
    return seen


def view(label: str, operand: Any, dtypes: Collection[np.dtype[Any]]) -> View:
    """`array` of any strides."""
    wanted = _wanted(label, dtypes)
    seen = view_of(operand)
    if seen is None or seen.on_host:
        raise TypeError(f"{wanted}, got {type(operand).__name__}{' (in host memory)' if seen else ''}")
    if not isinstance(operand, Buffer) and _STAND_FOR.get(seen.dtype) in dtypes:
        seen = seen._replace(dtype=_STAND_FOR[seen.dtype])
    if seen.dtype not in dtypes:
        raise TypeError(f"{wanted}, got {seen.dtype}")
    return seen


def _wanted(label: str, dtypes: Collection[np.dtype[Any]]) -> str:
    return f"{label}: wanted a device array of {' or '.join(dtype.name for dtype in dtypes)}"


def is_a(kind: type, op: str, role: str, given: Any) -> None:
    """Refuse what was given in place of an object of drvkit's."""
    if not isinstance(given, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise TypeError(f"{op}: {role}: wanted {article} {kind.__name__}, got {type(given).__name__}")


class Paged(NamedTuple):
    """Checked rows in pages, as kernels take them."""

    pool: View
    block_table: View
    room: int  # entries that the table has pages for
    args: tuple[Any, ...]  # pool, block_table, pages, table_width, page_bits, page_bytes


def paged(op: str, role: str, pages: Pages, formats: Collection[Format], max_requests: int) -> Paged:
    """What a kernel reads or writes of rows in pages of one of ``formats``."""
    is_a(Pages, op, role, pages)
    if pages.format not in formats:
        wanted = " or ".join(f"{each.name} of {each.dim}" for each in formats)
        raise ValueError(f"{op}: {role}: wanted rows of {wanted}, got {pages.format.name} of {pages.format.dim}")
    size = whole(f"{op}: {role}: page_size", pages.page_size)
    if not 1 <= size <= MOST_OF_PAGE or size & (size - 1):
        raise ValueError(f"{op}: {role}: page_size: wanted a power of two up to {MOST_OF_PAGE}, got {size}")
    label = f"{op}: {role}: pool"
    pool = aligned(label, array(label, pages.pool, [np.dtype(np.uint8)]))
    page_bytes = pages.format.page_bytes(size)
    if len(pool.shape) != 2 or pool.shape[1] != page_bytes or not 0 < pool.shape[0] < 2**31:
        raise ValueError(
            f"{label}: wanted shape (pages, {page_bytes}): {size} rows of {pages.format.name} a page; got {pool.shape}"
        )
    label = f"{op}: {role}: block_table"
    table = array(label, pages.block_table, [np.dtype(np.int32)])
    if len(table.shape) != 2 or table.shape[0] != max_requests or not table.shape[1]:
        raise ValueError(f"{label}: wanted shape ({max_requests}, pages of a request), got {table.shape}")
    (count, _), width = pool.shape, table.shape[1]
    args = (pages.pool, pages.block_table, count, width, size.bit_length() - 1, page_bytes)
    return Paged(pool, table, size * width, args)


def holds_all(label: str, pages: Paged, max_length: int, ratio: int) -> None:
    """Refuse a table too short for the entries, of ``ratio`` tokens each, that a request can have."""
    if pages.room < max_length // ratio:
        raise ValueError(
            f"{label}: {max_length} tokens have {max_length // ratio} entries, the block table room for {pages.room}"
        )


def angles(op: str, cos_sin: Any) -> View:
    """The table by which rows of a latent cache, and their queries, are turned."""
    table = aligned(f"{op}: cos_sin", array(f"{op}: cos_sin", cos_sin, [np.dtype(np.float32)]))
    if len(table.shape) != 2 or table.shape[1] != ROTARY or not table.shape[0]:
        raise ValueError(f"{op}: cos_sin: wanted shape (max_position, {ROTARY}), got {table.shape}")
    return table


def whole(label: str, number: Any) -> int:
    """A count that was given; errors begin with ``label``."""
    if isinstance(number, bool) or not isinstance(number, int | np.integer):
        raise TypeError(f"{label}: wanted an integer, got {number!r}")
    return int(number)


def eps_of(op: str, eps: float) -> float:
    """What is added to a mean of squares."""
    if isinstance(eps, bool) or not isinstance(eps, int | float | np.integer | np.floating):
        raise TypeError(f"{op}: eps: wanted a number, got {eps!r}")
    if not 0 <= eps < math.inf:
        raise ValueError(f"{op}: eps: wanted a number from 0 on, got {eps!r}")
    return float(eps)


def aligned(label: str, seen: View) -> View:
    """Refuse an address that accesses of 16 bytes cannot have."""
    if seen.address % 16:
        raise ValueError(f"{label}: wanted an address aligned to 16 bytes, got {seen.address:#x}")
    return seen


def token_rows(
    label: str, operand: Any, dtypes: Collection[np.dtype[Any]], axes: tuple[str, ...] = ("tokens", "heads", "dim")
) -> View:
    """Contiguous tokens at any distance; their address and distances are multiples of 16 bytes."""
    seen = view(label, operand, dtypes)
    if len(seen.shape) != len(axes):
        raise ValueError(f"{label}: wanted shape ({', '.join(axes)}), got {seen.shape}")
    wanted = seen.dtype.itemsize
    for stride, extent in zip(reversed(seen.strides[1:]), reversed(seen.shape[1:]), strict=True):
        if seen.size and extent > 1 and stride != wanted:
            raise ValueError(f"{label}: wanted contiguous {axes[0]}, got strides {seen.strides} of shape {seen.shape}")
        wanted *= extent
    return aligned_strides(label, seen)


def token_stride(seen: View) -> int:
    """Elements from token to token of `token_rows`."""
    return seen.strides[0] // seen.dtype.itemsize if seen.shape[0] > 1 else math.prod(seen.shape[1:])


def aligned_strides(label: str, seen: View) -> View:
    """Refuse an address, or a distance between rows, that is no multiple of 16 bytes, or negative."""
    outer = [stride for stride, extent in zip(seen.strides[:-1], seen.shape, strict=False) if extent > 1]
    if seen.size and any(at % 16 or at < 0 for at in (seen.address, *outer)):
        raise ValueError(
            f"{label}: wanted an address and strides, none negative, that are multiples of 16 bytes, got "
            f"{seen.address:#x} and {seen.strides}"
        )
    return seen


def kv_pools(
    op: str, k_pool: Any, v_pool: Any, dtypes: Collection[np.dtype[Any]], layout: str, kv_heads: int, dim: int
) -> list[View]:
    """Checked pools of keys and values, [pages, kv_heads, page_size, dim] ("HND") or [pages, page_size, kv_heads, dim]
    ("NHD"), which are alike."""
    pools = [
        _pool(f"{op}: {role}", pool, dtypes, layout, kv_heads, dim)
        for role, pool in (("k_pool", k_pool), ("v_pool", v_pool))
    ]
    for what in ("dtype", "shape", "strides"):
        first, second = (getattr(pool, what) for pool in pools)
        if first != second:
            raise ValueError(f"{op}: v_pool has {what} {second}, k_pool has {first}")
    return pools


def _pool(label: str, operand: Any, dtypes: Collection[np.dtype[Any]], layout: str, kv_heads: int, dim: int) -> View:
    seen = view(label, operand, dtypes)
    shape = seen.shape
    if len(shape) != 4:
        raise ValueError(f"{label}: wanted 4 axes, got shape {shape}")
    heads, page_size = shape[1:3] if layout == "HND" else shape[2:0:-1]
    if (heads, shape[3]) != (kv_heads, dim) or page_size not in PAGE_SIZES:
        page = f"a page of {', '.join(map(str, PAGE_SIZES))}"
        axes = f"{kv_heads}, {page}" if layout == "HND" else f"{page}, {kv_heads}"
        raise ValueError(f"{label}: wanted shape (pages, {axes}, {dim}) for {layout}, got {shape}")
    if seen.strides[3] != seen.dtype.itemsize:
        raise ValueError(f"{label}: wanted contiguous rows of {dim}, got strides {seen.strides}")
    reach = dim * seen.dtype.itemsize
    for stride, extent in sorted(zip(seen.strides[:3], shape[:3], strict=True)):
        if extent > 1 and stride < reach:
            raise ValueError(f"{label}: rows overlap: strides {seen.strides} of shape {shape}")
        reach += stride * (extent - 1)
    return aligned_strides(label, seen)


def shaped(label: str, seen: View, shape: tuple[int, ...]) -> None:
    """Refuse any other shape."""
    if seen.shape != shape:
        raise ValueError(f"{label}: wanted shape {shape}, got {seen.shape}")


def apart(label: str, written: View, role: str, read: View) -> None:
    """Refuse ``written`` to overlap ``read``. Strided ones may lie between each other's rows."""
    if np.shares_memory(_as_numpy(written), _as_numpy(read)):
        raise ValueError(
            f"{label} at {written.address:#x} ({written.nbytes} bytes) overlaps {role} at {read.address:#x}"
        )


def span(operand: Any, seen: View) -> Any:
    """An operand as a pointer parameter takes it: a strided one as all that lies between its first and last element."""
    if seen.contiguous:
        return operand
    count = _reach(seen) // seen.dtype.itemsize
    if isinstance(operand, Buffer):
        return Buffer(operand.allocation, operand.box, seen.address, seen.dtype, (count,), (seen.dtype.itemsize,))
    return _Span(operand, seen, count)


class _Span:
    """Of another library's array."""

    def __init__(self, operand: Any, seen: View, count: int) -> None:
        self.operand = operand  # keeps the memory
        data = (seen.address, seen.readonly)
        self.__cuda_array_interface__ = {"version": 3, "data": data, "typestr": seen.dtype.str, "shape": (count,)}


def _as_numpy(seen: View) -> np.ndarray[Any, Any]:
    """Bytes at the same places, for numpy to compare; nobody reads them."""
    interface = {"version": 3, "data": (seen.address, True), "typestr": f"|V{seen.dtype.itemsize}"}
    return np.asarray(SimpleNamespace(__array_interface__=interface | {"shape": seen.shape, "strides": seen.strides}))


def _reach(seen: View) -> int:
    """Bytes from the first element to behind the last one."""
    return seen.dtype.itemsize + sum(stride * (n - 1) for stride, n in zip(seen.strides, seen.shape, strict=True))


def kernel(device: Device, source: str, name: str) -> Kernel:
    """A kernel of ``cuda_src``, out of the module that `release` lets go of."""
    module = _modules.get((device, source))
    if module is None:
        module = _modules[device, source] = shared_module(device, source)
    return module.kernel(name)


def submit(
    where: Where,
    source: str,
    function: str,
    threads: int,
    args: tuple[Any, ...],
    after: After,
    name: str | None,
    op: str | None = None,
) -> Node | None:
    """`launch` with a thread for each of ``threads``."""
    return launch(where, source, function, -(-threads // BLOCK), BLOCK, args, after=after, name=name, op=op)


def device_of(op: str, where: Any) -> Device:
    """That of a stream or graph."""
    if not isinstance(where, Stream) and not hasattr(where, "kernel"):
        raise TypeError(
            f"{op}: wanted a drvkit Stream or Graph, got {type(where).__name__}; "
            "dev.as_stream(stream) makes a Stream of another library's"
        )
    device: Device = where.device
    return device


def launch(
    where: Where,
    source: str,
    function: str,
    grid: int | tuple[int, ...],
    block: int,
    args: tuple[Any, ...],
    *,
    shared_mem_bytes: int = 0,
    after: After = None,
    name: str | None = None,
    op: str | None = None,
    **attributes: Any,
) -> Node | None:
    """Launch ``function`` of ``source``, or add it to a graph. For an empty grid nothing is launched; a graph gets an
    empty node, which edges can be drawn to. Errors begin with ``op``, by default the name of the function."""
    op = op or function.partition("<")[0]
    device = device_of(op, where)
    if isinstance(where, Stream):
        if after is not None or name is not None:
            raise TypeError(f"{op}: after= and name= are for nodes; a launch comes after what its stream has")
        where.handle  # noqa: B018 - refuses a closed one
        if grid:
            ready = kernel(device, source, function)
            ready.launch(where, grid=grid, block=block, shared_mem_bytes=shared_mem_bytes, args=args, **attributes)
        return None
    if not grid:
        return where.empty(after=after, name=name)
    ready = kernel(device, source, function)
    if shared_mem_bytes:
        attributes["shared_mem_bytes"] = shared_mem_bytes
    return where.kernel(ready, grid=grid, block=block, args=args, after=after, name=name, **attributes)
