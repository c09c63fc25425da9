"""DLPack: the C structures by which array libraries hand each other memory, in both directions.

Source: the DLPack ABI, version 0.x (``DLManagedTensor``), which every consumer still takes.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import ml_dtypes
import numpy as np

__all__ = ["CUDA", "CUDA_HOST", "CUDA_MANAGED", "export", "read", "sweep"]

CUDA, CUDA_HOST, CUDA_MANAGED = 2, 3, 13  # DLDeviceType

_KINDS = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}  # numpy kind -> DLDataTypeCode
_BFLOAT16 = 4
_ML_CODES = {
    "bfloat16": _BFLOAT16,
    "float8_e3m4": 7,
    "float8_e4m3": 8,
    "float8_e4m3b11fnuz": 9,
    "float8_e4m3fn": 10,
    "float8_e4m3fnuz": 11,
    "float8_e5m2": 12,
    "float8_e5m2fnuz": 13,
    "float8_e8m0fnu": 14,
}


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("id", ctypes.c_int32)]


class _DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),  # in elements; null means C order
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]

_NAME = b"dltensor"  # of a capsule that nobody has consumed yet

_new = ctypes.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_valid = ctypes.pythonapi.PyCapsule_IsValid
_valid.restype, _valid.argtypes = ctypes.c_int, [ctypes.py_object, ctypes.c_char_p]

# What is handed out and not yet given back: address of the struct -> (capsule, struct, shape and strides, owner).
_exported: dict[int, tuple[Any, ...]] = {}


@_Deleter  # type: ignore[untyped-decorator]
def _delete(managed: Any) -> None:
    _exported.pop(ctypes.addressof(managed.contents), None)


def sweep() -> None:
    """Take back what was never consumed and is held by nobody any more.

    A capsule could do that itself by a destructor; but that runs while a refusing consumer's exception is on its way,
    which code in Python would destroy.
    """
    for where, entry in list(_exported.items()):
        if sys.getrefcount(entry[0]) == _UNHELD and _valid(entry[0], _NAME):
            _exported.pop(where, None)


def _unheld() -> int:
    """The reference count that `sweep` sees of a capsule that only ``_exported`` holds."""
    _exported[0] = (object(),)
    for _, entry in list(_exported.items()):
        count = sys.getrefcount(entry[0])
    del _exported[0]
    return count


_UNHELD = _unheld()


def export(
    owner: object,
    address: int,
    device: tuple[int, int],
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
) -> Any:
    """A capsule for memory that ``owner`` keeps alive; ``strides`` in bytes. `BufferError` if the dtype has no code."""
    sweep()
    ndim = len(shape)
    extents = (ctypes.c_int64 * max(2 * ndim, 1))(*shape, *(stride // dtype.itemsize for stride in strides))
    managed = _Managed()
    tensor = managed.tensor
    tensor.data, tensor.ndim, tensor.byte_offset = address, ndim, 0
    tensor.device = _Device(*device)
    tensor.dtype = _DataType(_code(dtype), dtype.itemsize * 8, 1)
    first = ctypes.addressof(extents)
    tensor.shape = ctypes.cast(first, ctypes.POINTER(ctypes.c_int64))
    tensor.strides = ctypes.cast(first + 8 * ndim, ctypes.POINTER(ctypes.c_int64))
    managed.deleter = _delete
    where = ctypes.addressof(managed)
    capsule = _new(where, _NAME, None)
    _exported[where] = (capsule, managed, extents, owner)
    return capsule


def _code(dtype: np.dtype[Any]) -> int:
    code = _ML_CODES.get(dtype.name, None if dtype.name in vars(ml_dtypes) else _KINDS.get(dtype.kind))
    if code is None:
        raise BufferError(f"DLPack has no code for dtype {dtype}")
    return code


def read(producer: Any) -> tuple[int, np.dtype[Any], tuple[int, ...], tuple[int, ...]]:
    """Address, dtype, shape and byte strides of what ``producer`` exports.

    The capsule is looked at and given back unused: whoever uses the address must hold ``producer``.
    """
    capsule = producer.__dlpack__()
    tensor = _Managed.from_address(_pointer(capsule, _NAME)).tensor
    dtype = _dtype(tensor.dtype)
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    if tensor.strides:
        strides = tuple(tensor.strides[i] * dtype.itemsize for i in range(tensor.ndim))
    else:
        strides, step = (), dtype.itemsize
        for extent in reversed(shape):
            strides, step = (step, *strides), step * max(extent, 1)
    address = (tensor.data or 0) + tensor.byte_offset
    del tensor, capsule
    sweep()  # the producer may be a wrapper of what was exported here
    return address, dtype, shape, strides


def _dtype(code: _DataType) -> np.dtype[Any]:
    name = None
    if code.lanes == 1:
        ml_name = next((name for name, value in _ML_CODES.items() if value == code.code), None)
        if ml_name and np.dtype(ml_name).itemsize * 8 == code.bits:
            return np.dtype(ml_name)
        kind = next((kind for kind, value in _KINDS.items() if value == code.code), None)
        if kind == "b":
            name = "?"
        elif kind and code.bits % 8 == 0:
            name = f"{kind}{code.bits // 8}"
    if name is None:
        raise TypeError(f"DLPack type code {code.code} of {code.bits} bits x {code.lanes} has no numpy dtype")
    return np.dtype(name)
