"""Memory: what it is made of, how it is seen, how it is copied.

An `Allocation` is bytes with one owner. A `Buffer` is a typed window onto one: address, dtype, shape and strides.
Slicing a Buffer gives another window onto the same bytes. A `Keeper` has Buffers that are closed with it.
`view_of` reads the same facts off foreign objects (numpy, anything with ``__cuda_array_interface__`` or DLPack), so
that they are taken wherever a Buffer is.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, Self, TypeVar

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from . import dlpack
from .device import Device, Life
from .driver import Driver, DriverError
from .lifetime import Box, ClosedError, Live, Owned, caller
from .scalars import Unfit, bits, said

__all__ = ["Buffer", "Keeper", "MemoryPool", "View", "view_of"]

# What other libraries can name; ml_dtypes' types have no code there and travel as the unsigned type of their size.
_NAMELESS = {np.dtype(t) for t in vars(ml_dtypes).values() if isinstance(t, type) and issubclass(t, np.generic)}


class Allocation:
    """What all windows onto the same bytes share. The bytes themselves are in the windows' box."""

    def __init__(self, device: Device, address: int, nbytes: int, where: str) -> None:
        self.device, self.address, self.nbytes, self.where = device, address, nbytes, where
        self.info = Live("buffer", f"of {nbytes} bytes of {where} memory at {address:#x}", caller())
        self.windows: weakref.WeakSet[Buffer] = weakref.WeakSet()
        self.host_view: weakref.ref[_HostMemory] | None = None


class Buffer:
    """A typed window onto device (or page-locked host) memory.

    Attributes:
        dtype: any numpy or ml_dtypes dtype in native byte order.
        shape, strides: in elements and in bytes, as numpy has them.
        device: where it lives.
        where: ``"device"``, ``"pinned"``, ``"pool"``, ``"graph"``, ``"symmetric"``, ``"multicast"``, ``"peer"`` or
            ``"foreign"``.
    """

    __slots__ = ("__weakref__", "_address", "_packs_as", "allocation", "box", "device", "dtype", "shape", "strides")

    def __init__(
        self,
        allocation: Allocation,
        box: Box | None,
        address: int,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        strides: tuple[int, ...],
    ) -> None:
        self.allocation = allocation
        self.box = box  # whoever may still use the memory holds it
        self.device = allocation.device
        self.dtype, self.shape, self.strides = dtype, shape, strides
        self._address: int | None = address
        # What a pointer parameter accepts with one comparison: None while strided, misaligned or closed.
        plain = self.contiguous and address % dtype.alignment == 0
        self._packs_as = pointee(self.device.id, dtype) if plain else None
        allocation.windows.add(self)

    # Making

    @classmethod
    def empty(cls, device: Device, shape: int | Sequence[int], dtype: DTypeLike) -> Buffer:
        """Device memory, its contents undefined. An array of no elements has an address all the same."""
        shape, dtype, nbytes = _extent(shape, dtype)
        with device.context:
            try:
                address = int(device.driver.cuMemAlloc(max(nbytes, 1)))
            except DriverError as error:
                if error.code != "CUDA_ERROR_OUT_OF_MEMORY":
                    raise
                device.synchronize()  # lets go of what streams held for work that is done
                address = int(device.driver.cuMemAlloc(max(nbytes, 1)))
        release = partial(device.context.call, device.driver.cuMemFree, address)
        return cls._whole(Allocation(device, address, nbytes, "device"), release, dtype, shape)

    @classmethod
    def pinned(cls, device: Device, shape: int | Sequence[int], dtype: DTypeLike) -> Buffer:
        """Page-locked host memory, reachable by the device at the same address."""
        shape, dtype, nbytes = _extent(shape, dtype)
        with device.context:
            address = int(device.driver.cuMemHostAlloc(max(nbytes, 1), 0))
        release = partial(device.context.call, device.driver.cuMemFreeHost, address)
        return cls._whole(Allocation(device, address, nbytes, "pinned"), release, dtype, shape)

    @classmethod
    def borrow(
        cls,
        device: Device,
        address: int,
        shape: int | Sequence[int],
        dtype: DTypeLike,
        *,
        where: str = "foreign",
        owner: object = None,
    ) -> Buffer:
        """A window onto memory that somebody else owns; ``owner`` is what keeps it alive."""
        if not _is_integer(address):
            raise TypeError(f"address: wanted an integer, got {address!r}")
        address = int(address)
        shape, dtype, nbytes = _extent(shape, dtype)
        return cls._whole(Allocation(device, address, nbytes, where), None, dtype, shape, owner)

    @classmethod
    def _whole(
        cls,
        allocation: Allocation,
        release: Callable[[], Any] | None,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        owner: object = None,
    ) -> Buffer:
        box = Box(allocation.address, release, allocation.info, owner)
        return cls(allocation, box, allocation.address, dtype, shape, _c_strides(shape, dtype.itemsize))

    # Facts

    @property
    def address(self) -> int:
        """Where element 0 is."""
        if self._address is None:
            raise ClosedError(f"{self.allocation.info} is closed")
        return self._address

    handle = address

    @property
    def where(self) -> str:
        return self.allocation.where

    @property
    def closed(self) -> bool:
        return self._address is None

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def contiguous(self) -> bool:
        """Whether its elements lie in C order without gaps."""
        return _is_contiguous(self.shape, self.strides, self.dtype.itemsize)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a Buffer of shape () has no length")
        return self.shape[0]

    # Windows

    def __getitem__(self, index: Any) -> Buffer:
        """A window onto part of it, by integers, slices, ``...``; as numpy, without copying."""
        items = index if isinstance(index, tuple) else (index,)
        if not all(isinstance(item, (slice, type(...), type(None))) or _is_integer(item) for item in items):
            raise TypeError(f"{self!r}: index {index!r} would copy; a window takes integers, slices, ... and None")
        # numpy works it out on an array of one byte with these strides, of which no element is ever touched.
        probe = np.lib.stride_tricks.as_strided(_NOWHERE, self.shape, self.strides, writeable=False)
        part = probe[(*items, ...) if ... not in items else items]
        offset = part.__array_interface__["data"][0] - probe.__array_interface__["data"][0]
        return Buffer(self.allocation, self.box, self.address + offset, self.dtype, part.shape, part.strides)

    def reshape(self, *extents: int | Sequence[int]) -> Buffer:
        """The same elements with another shape (one extent may be -1); only of a contiguous Buffer."""
        self._must_be_contiguous("reshape")
        shape: Any = extents[0] if len(extents) == 1 and isinstance(extents[0], tuple | list) else extents
        if not all(map(_is_integer, shape)):
            raise TypeError(f"{self!r}: reshape: wanted integers, got {shape!r}")
        shape = tuple(int(n) for n in shape)
        known = math.prod(n for n in shape if n != -1)
        if shape.count(-1) == 1 and known and self.size % known == 0:
            shape = tuple(self.size // known if n == -1 else n for n in shape)
        if math.prod(shape) != self.size or any(n < 0 for n in shape):
            raise ValueError(f"{self!r} of {self.size} elements cannot be reshaped to {shape}")
        return Buffer(
            self.allocation, self.box, self.address, self.dtype, shape, _c_strides(shape, self.dtype.itemsize)
        )

    def view(self, dtype: DTypeLike) -> Buffer:
        """The same bytes as another dtype; the last extent changes with the size."""
        self._must_be_contiguous("view")
        dtype = _native(dtype)
        last = self.shape[-1] * self.dtype.itemsize if self.shape else self.dtype.itemsize
        if last % dtype.itemsize:
            raise ValueError(f"{self!r} cannot be viewed as {dtype}: rows of {last} bytes are no multiple of its size")
        shape = (*self.shape[:-1], last // dtype.itemsize) if self.shape or last != dtype.itemsize else ()
        return Buffer(self.allocation, self.box, self.address, dtype, shape, _c_strides(shape, dtype.itemsize))

    def _must_be_contiguous(self, verb: str) -> None:
        if not self.contiguous:
            raise ValueError(f"{self!r} is strided: {verb} needs contiguous memory")

    # Contents

    def copy_from(self, source: Any, stream: Any = None) -> Self:
        """Copy ``source`` (numpy, Buffer, any device array) of the same shape and dtype into it.

        With ``stream`` the copy is queued there and ``source`` is held until it is done. Without, everything on the
        device is waited for first, and the copy is complete on return.
        """
        copy(self, source, stream, self.device)
        return self

    def copy_to(self, target: Any, stream: Any = None) -> None:
        """Copy it into ``target`` of the same shape and dtype; `copy_from` says how ``stream`` works."""
        copy(target, self, stream, self.device)

    def numpy(self, stream: Any = None) -> NDArray[Any]:
        """A copy of its contents on the host, complete on return.

        With ``stream``: after the work that stream has now. Without: after everything on the device.
        """
        host = np.empty(self.shape, self.dtype)
        copy(host, self, stream, self.device)
        if stream is not None:
            self.device.as_stream(stream).synchronize()
        return host

    @property
    def host(self) -> NDArray[Any]:
        """Pinned memory as a numpy array, without copying. Order reads and writes against the device's yourself."""
        if self.where != "pinned":
            raise TypeError(f"{self!r} is not host memory: .numpy() copies it")
        view = self.allocation.host_view and self.allocation.host_view()
        if view is None:
            view = _HostMemory(self)
            self.allocation.host_view = weakref.ref(view)
        whole = np.asarray(view)
        offset = self.address - self.allocation.address
        return np.ndarray(self.shape, self.dtype, whole, offset, self.strides)

    def fill(self, value: Any, stream: Any = None) -> Self:
        """Set every element to ``value`` (exactly a value of its dtype), for dtypes of 1, 2 or 4 bytes, and for any
        value whose bytes repeat, such as 0. ``stream`` as in `copy_from`."""
        params = fill_params(self, value)
        driver = self.device.driver
        if self.size == 0:
            return self
        row = {1: driver.cuMemsetD2D8Async, 2: driver.cuMemsetD2D16Async, 4: driver.cuMemsetD2D32Async}[params.element]
        with self.device.context:
            if stream is None:
                self.device.synchronize()
                row(params.address, params.pitch, params.value, params.width, params.height, driver.CUstream(0))
                driver.cuStreamSynchronize(driver.CUstream(0))
            else:
                stream = self.device.as_stream(stream)
                row(params.address, params.pitch, params.value, params.width, params.height, stream.handle)
                stream.hold(self.box)
        return self

    def fill_bytes(self, byte: int, stream: Any = None) -> Self:
        """Set every byte to ``byte``, whatever the dtype; only of a contiguous Buffer. ``stream`` as in `copy_from`."""
        self._must_be_contiguous("fill_bytes")
        if self.size:
            Buffer(self.allocation, self.box, self.address, np.dtype(np.uint8), (self.nbytes,), (1,)).fill(byte, stream)
        return self

    # Giving it away, and back

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """For CuPy and others, which hold this Buffer as long as they view its memory. They do not notice `close`:
        close it when they are done, or hand it over by DLPack, which keeps the memory itself."""
        if self.device.driver.kind != "cuda":
            raise AttributeError(f"memory of {self.device.id} is no CUDA memory: use .numpy()")
        return {
            "version": 3,
            "data": (self.address if self.size else 0, False),
            "typestr": _foreign_dtype(self.dtype).str,
            "shape": self.shape,
            "strides": None if self.contiguous else self.strides,
            "stream": None,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        if self.where == "pinned":
            return dlpack.CUDA_HOST, 0
        return dlpack.CUDA, self.device.ordinal

    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: Any = None
    ) -> Any:
        """A DLPack capsule that keeps the memory alive. The stream is not waited on: order the work yourself."""
        if copy or (dl_device is not None and tuple(dl_device) != self.__dlpack_device__()):
            raise BufferError(f"{self!r}: drvkit exports its memory as it is, it does not copy")
        address = self.address if self.size else 0
        return dlpack.export(self.box, address, self.__dlpack_device__(), self.dtype, self.shape, self.strides)

    def close(self) -> None:
        """Refuse further use of it and of every other window onto the memory, and free that.

        It is freed now, which waits for the device, or when the last graph, launch in flight or numpy view that uses it
        is gone. Stream-ordered memory is freed in the order of the stream that it was allocated on.
        """
        for window in list(self.allocation.windows):
            window._address = window._packs_as = window.box = None
        dlpack.sweep()

    __iter__ = None  # no sequence of Buffers: numpy would take it for one, element by element

    def __array__(self, *_: Any, **__: Any) -> NDArray[Any]:
        raise TypeError(f"{self!r} does not become a numpy array by itself: use .numpy()")

    def __bool__(self) -> bool:
        raise TypeError(f"{self!r} has no truth value")

    def __enter__(self) -> Self:
        self.address  # noqa: B018 - refuses a closed one
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        extents = "x".join(map(str, self.shape)) or "scalar"
        state = " closed" if self.closed else f" at {self._address:#x}"
        return f"<Buffer {self.dtype} {extents} {self.where} {self.device.id}{state}>"


Kept = TypeVar("Kept", bound="Buffer | Keeper")


class Keeper:
    """What has memory of its own, which is closed with it."""

    def __init__(self) -> None:
        self._memory: list[Buffer | Keeper] = []

    def _keep(self, memory: Kept) -> Kept:
        self._memory.append(memory)
        return memory

    @property
    def nbytes(self) -> int:
        """Of all of it, the device's and what is page-locked."""
        return sum(memory.nbytes for memory in self._memory)

    def close(self) -> None:
        for memory in self._memory:
            memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class MemoryPool(Owned):
    """Stream-ordered allocation: memory is usable, and free again, in the order of a stream, without waiting."""

    kind = "memory pool"

    def __init__(self, device: Device, *, release_threshold_bytes: int = 0) -> None:
        self.device = device
        driver = device.driver
        _check_bytes("release_threshold_bytes", release_threshold_bytes)
        properties = driver.CUmemPoolProps()
        properties.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = device.ordinal
        with device.context:
            handle = driver.cuMemPoolCreate(properties)
        self._own(handle, partial(device.context.call, driver.cuMemPoolDestroy, handle))
        if release_threshold_bytes:
            threshold = driver.cuuint64_t(release_threshold_bytes)
            driver.cuMemPoolSetAttribute(handle, self._attribute("RELEASE_THRESHOLD"), threshold)

    def _attribute(self, name: str) -> Any:
        return self.device.driver.CUmemPool_attribute.__members__[f"CU_MEMPOOL_ATTR_{name}"]

    def empty(self, shape: int | Sequence[int], dtype: DTypeLike, stream: Any) -> Buffer:
        """Memory that exists from ``stream``'s work so far on. Closed or dropped, it is freed in the stream's order, or
        at once if the stream is gone."""
        shape, dtype, nbytes = _extent(shape, dtype)
        stream = self.device.as_stream(stream)
        if stream.capturing is not None:
            raise ValueError(f"stream {stream.name} is being captured: memory of a graph is made by graph.alloc()")
        address = int(self.device.driver.cuMemAllocFromPoolAsync(max(nbytes, 1), self.handle, stream.handle))
        free = partial(_free_async, self.device.driver, address, stream.handle, stream.life)
        release = partial(self.device.context.call, free)
        return Buffer._whole(Allocation(self.device, address, nbytes, "pool"), release, dtype, shape, self.box)

    @property
    def used_bytes(self) -> int:
        return int(self.device.driver.cuMemPoolGetAttribute(self.handle, self._attribute("USED_MEM_CURRENT")))

    @property
    def reserved_bytes(self) -> int:
        return int(self.device.driver.cuMemPoolGetAttribute(self.handle, self._attribute("RESERVED_MEM_CURRENT")))

    def trim(self, keep_bytes: int = 0) -> None:
        """Give memory that nobody uses back to the device, keeping at least ``keep_bytes``."""
        _check_bytes("keep_bytes", keep_bytes)
        self.device.driver.cuMemPoolTrimTo(self.handle, keep_bytes)


def _free_async(driver: Driver, address: int, stream: Any, life: Life) -> None:
    """In the order of the stream; of a stream that is gone, now."""
    if life.over:
        driver.cuMemFree(address)
    else:
        driver.cuMemFreeAsync(address, stream)


class _HostMemory:
    """What numpy holds on to when it views pinned memory."""

    def __init__(self, buffer: Buffer) -> None:
        self.box = buffer.box
        whole = buffer.allocation
        data = (whole.address, False)
        self.__array_interface__ = {"version": 3, "data": data, "typestr": "|u1", "shape": (whole.nbytes,)}


# Seeing what others have


class View(NamedTuple):
    """The facts about an array operand, whoever owns it."""

    address: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes
    on_host: bool = False  # host memory that the caller handed over as a host array
    readonly: bool = False
    device: int | None = None  # the ordinal of the device that it is on, where the operand says that

    @property
    def contiguous(self) -> bool:
        return _is_contiguous(self.shape, self.strides, self.dtype.itemsize)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


def view_of(operand: Any) -> View | None:
    """What ``operand`` shows of itself: a Buffer, a numpy array, or anything with ``__cuda_array_interface__`` or
    DLPack. None if it is nothing of that kind."""
    if isinstance(operand, Buffer):
        return View(operand.address, operand.dtype, operand.shape, operand.strides)
    if isinstance(operand, np.ma.MaskedArray):  # its memory says nothing of its mask
        return None
    if isinstance(operand, np.ndarray):
        readonly = not operand.flags.writeable
        return View(operand.ctypes.data, operand.dtype, operand.shape, operand.strides, True, readonly)
    interface = getattr(operand, "__cuda_array_interface__", None)
    if interface is not None and interface.get("mask") is None:
        dtype, shape = np.dtype(interface["typestr"]), tuple(interface["shape"])
        if interface.get("descr") and dtype.kind == "V":
            dtype = np.dtype([tuple(field) for field in interface["descr"]])
        strides = interface.get("strides") or _c_strides(shape, dtype.itemsize)
        address, readonly = interface["data"]
        return View(int(address or 0), dtype, shape, tuple(strides), False, bool(readonly))
    if hasattr(operand, "__dlpack__") and hasattr(operand, "__dlpack_device__"):
        kind, ordinal = operand.__dlpack_device__()
        address, dtype, shape, strides = dlpack.read(operand)
        on_host = kind not in (dlpack.CUDA, dlpack.CUDA_HOST, dlpack.CUDA_MANAGED)
        return View(address, dtype, shape, strides, on_host, device=ordinal if kind == dlpack.CUDA else None)
    return None


def holder(operand: Any) -> object:
    """What keeps the memory of ``operand`` alive, and nothing more: closing a Buffer must not be undone by it."""
    return operand.box if isinstance(operand, Buffer) else operand


@cache
def pointee(device: str, dtype: np.dtype[Any]) -> object:
    """One token per (device, dtype): comparing it checks both at once."""
    return object()


# Copies and fills, for streams and for graph nodes alike


def copy(target: Any, source: Any, stream: Any, device: Device) -> None:
    """Copy ``source`` into ``target``; `Buffer.copy_from` says what ``stream`` does."""
    driver = device.driver
    plan = copy_params(driver, target, source)
    if plan is None:
        return
    with device.context:
        if stream is None:
            device.synchronize()
            driver.cuMemcpy3D(plan)
            # It returns as soon as pageable memory was read, or a copy within the device was queued: what comes next on
            # a stream that does not wait for stream 0 could still meet what was there before.
            driver.cuStreamSynchronize(driver.CUstream(0))
        else:
            stream = device.as_stream(stream)
            driver.cuMemcpy3DAsync(plan, stream.handle)
            stream.hold((holder(target), holder(source)))


def copy_params(driver: Driver, target: Any, source: Any) -> Any:
    """The driver's ``CUDA_MEMCPY3D`` that copies ``source`` into ``target``; None if there is nothing to copy.

    Both must have the same shape and dtype. Their strides may differ as long as one 3-D copy can express them:
    `ValueError` otherwise. `TypeError` for an operand that is no array, or a target that is read-only.
    """
    views = []
    for role, operand in (("target", target), ("source", source)):
        view = view_of(operand)
        if view is None:
            raise TypeError(f"copy {role}: wanted a Buffer, a numpy array or a device array, got {said(operand)}")
        views.append(view)
    to, from_ = views
    if to.dtype != from_.dtype:
        raise TypeError(f"copy: target is {to.dtype}, source is {from_.dtype}; convert first")
    if to.shape != from_.shape:
        raise ValueError(f"copy: target has shape {to.shape}, source has shape {from_.shape}")
    if to.readonly:
        raise TypeError(f"copy target: the {said(target)} is read-only")
    if to.nbytes == 0:
        return None
    for role, view in (("target", to), ("source", from_)):
        if any(count > 1 and stride == 0 for count, stride in zip(view.shape, view.strides, strict=True)):
            raise ValueError(f"copy {role}: strides {view.strides} of shape {view.shape} repeat elements (broadcast)")
    if to.contiguous and from_.contiguous and abs(to.address - from_.address) < to.nbytes:
        raise ValueError(
            f"copy: target at {to.address:#x} overlaps source at {from_.address:#x}, {to.nbytes} bytes each"
        )
    width, rows = _rows(to, from_)
    while len(rows) < 2:
        rows.insert(0, (1, 0, 0))
    if len(rows) > 2:
        raise ValueError(f"copy: shape {to.shape} with strides {to.strides} <- {from_.strides} is no single 3-D copy")
    (depth, to_slice, from_slice), (height, to_pitch, from_pitch) = rows
    params = driver.CUDA_MEMCPY3D()
    params.WidthInBytes, params.Height, params.Depth = width, height, depth
    for side, view, pitch, slice_ in (("dst", to, to_pitch, to_slice), ("src", from_, from_pitch, from_slice)):
        pitch = pitch or width
        if pitch < width or slice_ % pitch or slice_ < 0 or (depth > 1 and slice_ // pitch < height):
            raise ValueError(f"copy: strides {view.strides} of shape {view.shape} are no pitches of a 3-D copy")
        setattr(params, f"{side}Pitch", pitch)
        setattr(params, f"{side}Height", slice_ // pitch or height)
        setattr(
            params,
            f"{side}MemoryType",
            getattr(driver.CUmemorytype, f"CU_MEMORYTYPE_{'HOST' if view.on_host else 'DEVICE'}"),
        )
        setattr(params, f"{side}Host" if view.on_host else f"{side}Device", view.address)
    return params


def _rows(to: View, from_: View) -> tuple[int, list[tuple[int, int, int]]]:
    """Fold a copy into contiguous runs: bytes of a run, then (count, target stride, source stride) outside in."""
    axes = [axis for axis in zip(to.shape, to.strides, from_.strides, strict=True) if axis[0] != 1]
    width = to.dtype.itemsize
    while axes and axes[-1][1] == axes[-1][2] == width:  # the innermost axis continues the run
        width *= axes.pop()[0]
    folded: list[tuple[int, int, int]] = []
    for count, to_stride, from_stride in axes:
        if folded and folded[-1][1] == count * to_stride and folded[-1][2] == count * from_stride:
            folded[-1] = (folded[-1][0] * count, to_stride, from_stride)
        else:
            folded.append((count, to_stride, from_stride))
    return width, folded


class FillParams(NamedTuple):
    """A 2-D fill as the driver takes it."""

    address: int
    value: int  # the element's bits
    element: int  # bytes: 1, 2 or 4
    width: int  # elements of a row
    height: int
    pitch: int  # bytes from row to row

    def params(self, driver: Driver) -> Any:
        """As a graph node takes it."""
        params = driver.CUDA_MEMSET_NODE_PARAMS()
        params.dst, params.value, params.elementSize = driver.CUdeviceptr(self.address), self.value, self.element
        params.width, params.height, params.pitch = self.width, self.height, self.pitch
        return params


def fill_params(target: Any, value: Any) -> FillParams:
    """How to set every element of ``target`` to ``value``: `ValueError` where one 2-D fill cannot."""
    view = view_of(target)
    if view is None or view.on_host:
        raise TypeError(f"fill target: wanted a Buffer or a device array, got {said(target)}")
    try:
        pattern = bits(value, view.dtype)
    except Unfit as unfit:
        wanted, got = unfit.args
        raise ValueError(f"fill: wanted {wanted}, got {got}") from None
    element = view.dtype.itemsize
    for size in (1, 2, 4):  # the smallest element whose repetition gives the value's bytes
        if len(pattern) % size == 0 and pattern == pattern[:size] * (len(pattern) // size):
            element = size
            break
    else:
        raise ValueError(f"fill: {value!r} as {view.dtype} has no period of 1, 2 or 4 bytes, which a fill needs")
    if view.nbytes == 0:
        return FillParams(view.address, int.from_bytes(pattern[:element], "little"), element, 0, 0, 0)
    run, rows = _rows(view, view)
    if len(rows) > 1 or any(pitch < run for _, pitch, _ in rows):
        raise ValueError(f"fill: strides {view.strides} of shape {view.shape} are no 2-D rows")
    height, pitch, _ = rows[0] if rows else (1, run, run)
    return FillParams(view.address, int.from_bytes(pattern[:element], "little"), element, run // element, height, pitch)


# dtypes and extents

_NOWHERE = np.zeros(1, np.uint8)


def _check_bytes(name: str, value: Any) -> None:
    if not _is_integer(value) or not 0 <= value < 1 << 63:
        raise ValueError(f"{name}: wanted a number of bytes, got {value!r}")


def _is_integer(item: object) -> bool:
    return isinstance(item, (int, np.integer)) and not isinstance(item, (bool, np.bool_))


def _native(dtype: DTypeLike) -> np.dtype[Any]:
    dtype = np.dtype(dtype)
    if dtype.hasobject:
        raise TypeError(f"dtype {dtype} holds Python objects, which device memory cannot")
    if not dtype.isnative:
        raise TypeError(f"dtype {dtype} is not in native byte order")
    if dtype.itemsize == 0 or dtype.kind in "UmM":
        raise TypeError(f"dtype {dtype} is no dtype of device memory")
    return dtype


def _extent(shape: int | Sequence[int], dtype: DTypeLike) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    dtype = _native(dtype)
    try:
        extents = tuple(int(n.__index__()) for n in ((shape,) if hasattr(shape, "__index__") else shape))
    except (TypeError, AttributeError):
        raise TypeError(f"shape: wanted an integer or a sequence of integers, got {shape!r}") from None
    if any(n < 0 for n in extents):
        raise ValueError(f"shape {extents} has a negative extent")
    nbytes = math.prod(extents) * dtype.itemsize
    if nbytes >= 1 << 63:
        raise ValueError(f"shape {extents} of {dtype} is {nbytes} bytes, more than there are addresses")
    return extents, dtype, nbytes


def _c_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides = []
    for extent in reversed(shape):
        strides.append(itemsize)
        itemsize *= max(extent, 1)
    return tuple(reversed(strides))


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent == 0:
            return True
        if extent != 1 and stride != itemsize:
            return False
        itemsize *= extent
    return True


def _foreign_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(f"u{dtype.itemsize}") if dtype in _NAMELESS else dtype
