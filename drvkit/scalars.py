"""Python and numpy values as values of a dtype: exactly, or refused.

The same rules hold for a kernel's arguments and for the value of a fill. An integer must be in range and exact in a
float type; a float is rounded, but must not overflow; a bool is a bool and nothing else.
"""

from __future__ import annotations

import ctypes
import math
import operator
import struct
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

__all__ = ["CLASSES", "Unfit", "bits", "format_of", "is_ml", "packer", "said"]

CLASSES = {"b": "bool", "i": "int", "u": "int", "f": "float"}  # kind: the class whose values struct checks by itself
_FORMATS = {("b", 1): "?", ("f", 2): "e", ("f", 4): "f", ("f", 8): "d"}
_FORMATS |= {("i", 1): "b", ("i", 2): "h", ("i", 4): "i", ("i", 8): "q"}
_FORMATS |= {("u", 1): "B", ("u", 2): "H", ("u", 4): "I", ("u", 8): "Q"}
_ML_FORMATS = {1: "B", 2: "H"}  # as bits: struct does not know these types


class Unfit(Exception):  # noqa: N818 - callers turn it into errors of their own
    """A value does not fit: (wanted, got), in words."""


def said(value: Any) -> str:
    """A value in an error message."""
    if type(value).__module__.startswith("drvkit"):
        return repr(value)
    if isinstance(value, (bool, int, float, complex, str, np.generic)):
        text = repr(value)
        return text if text.startswith(("np.", "'")) else f"{type(value).__name__} {text}"
    shape = getattr(value, "shape", None)
    dtype = getattr(value, "dtype", None)
    detail = f" of {dtype}, shape {tuple(shape)}" if shape is not None and dtype is not None else ""
    return "None" if value is None else f"{type(value).__module__}.{type(value).__name__}{detail}"


def is_ml(dtype: np.dtype[Any]) -> bool:
    """Whether the type is one of ml_dtypes', which numpy and struct do not know."""
    return hasattr(ml_dtypes, dtype.name)


def format_of(dtype: np.dtype[Any]) -> str:
    """How struct packs what a `packer` of the dtype gives."""
    return _ML_FORMATS[dtype.itemsize] if is_ml(dtype) else _FORMATS[dtype.kind, dtype.itemsize]


def packer(dtype: np.dtype[Any]) -> Callable[[Any], Any] | None:
    """A function from a value to what struct packs, which raises `Unfit`; None for dtypes that are no plain numbers."""
    if dtype.kind == "b":
        return _boolean
    if dtype.kind in "iu" or (is_ml(dtype) and dtype.name.lstrip("u").startswith("int")):
        return _integers(dtype)
    return _floats(dtype) if dtype.kind == "f" or is_ml(dtype) else None


def bits(value: Any, dtype: np.dtype[Any]) -> bytes:
    """The bytes of ``value`` as a value of the dtype; `Unfit` if it is none."""
    pack = packer(dtype)
    if pack is not None:
        try:
            return struct.pack("<" + format_of(dtype), pack(value))
        except (struct.error, OverflowError):
            raise Unfit(f"a value of {dtype}", said(value)) from None
    if dtype.kind == "c":
        part = np.dtype(f"f{dtype.itemsize // 2}")
        is_complex = isinstance(value, (complex, np.complexfloating))
        return b"".join(bits(x, part) for x in ((value.real, value.imag) if is_complex else (value, 0.0)))
    if isinstance(value, np.generic) and value.dtype == dtype:
        return value.tobytes()
    raise Unfit(f"a value of {dtype}", said(value))


def _boolean(value: Any) -> bool:
    if isinstance(value, ctypes.c_bool):
        value = value.value
    if not isinstance(value, (bool, np.bool_)):
        raise Unfit("bool", said(value))
    return bool(value)


def _integers(dtype: np.dtype[Any]) -> Callable[[Any], int]:
    limits: Any = (ml_dtypes if is_ml(dtype) else np).iinfo(dtype)
    low, high = int(limits.min), int(limits.max)
    wanted = f"{dtype.name}, an integer in [{low}, {high}]"
    ml = is_ml(dtype)

    def integer(value: Any) -> int:
        if value.__class__ is int:
            if low <= value <= high:
                return int(np.asarray(value).astype(dtype).view(f"u{dtype.itemsize}")) if ml else int(value)
            raise Unfit(wanted, said(value))
        if isinstance(value, ctypes._SimpleCData):
            value = value.value
        if type(value).__name__ in ("CUgraphConditionalHandle", "cuuint32_t", "cuuint64_t"):  # the bindings' integers
            value = int(value)
        if isinstance(value, (bool, np.bool_)) or _is_array(value):
            raise Unfit(wanted, said(value))
        try:
            return integer(operator.index(value))
        except TypeError:
            raise Unfit(wanted, said(value)) from None

    return integer


def _floats(dtype: np.dtype[Any]) -> Callable[[Any], Any]:
    ml = is_ml(dtype)
    limits: Any = (ml_dtypes if ml else np).finfo(dtype)
    exact = 1 << (limits.nmant + 1)
    # Beyond half a step above the largest value there is none; types without infinity would take the largest.
    most = float("inf") if not ml else float(limits.max) + 2.0 ** (math.floor(math.log2(limits.max)) - limits.nmant - 1)
    if ml and np.isinf(np.asarray(np.inf).astype(dtype).astype(np.float64)):
        most = float("inf")
    with np.errstate(all="ignore"):
        sign = "" if np.isfinite(np.asarray(-1.0).astype(dtype).astype(np.float64)) else "positive, "  # e8m0: no sign
    # ml_dtypes rounds what is no normal float32 up: to the second value of e8m0, whose first is not normal there.
    first = 1.5 * float(limits.smallest_normal) if sign else 0.0

    def real(value: Any) -> Any:
        if value.__class__ is not float:
            if isinstance(value, ctypes._SimpleCData):
                value = value.value
            if isinstance(value, (bool, np.bool_, complex, np.complexfloating, str, bytes)) or _is_array(value):
                raise Unfit(f"{dtype.name}, a number", said(value))
            if not hasattr(value, "__float__") or hasattr(value, "getPtr"):
                raise Unfit(f"{dtype.name}, a number", said(value))
            if (
                isinstance(value, (int, np.integer))
                and not -exact <= value <= exact
                and not _is_exact(int(value), dtype)
            ):
                raise Unfit(f"{dtype.name}, which cannot hold this integer exactly", said(value))
            value = float(value)
        if not ml:
            return value
        if 0.0 < value < first:
            return 0
        with np.errstate(all="ignore"):
            packed = _to_odd(value).astype(dtype)
        back = float(packed.astype(np.float64))
        if abs(value) > most or (math.isnan(value), math.isinf(value)) != (math.isnan(back), math.isinf(back)):
            raise Unfit(f"{dtype.name}, {sign}at most {float(limits.max):g} in size", said(value))
        return int(packed.view(f"u{dtype.itemsize}"))

    return real


def _is_array(value: Any) -> bool:
    """An array of no dimensions is none of its values: reading it may wait for a device."""
    return hasattr(value, "__cuda_array_interface__") or hasattr(value, "__dlpack__")


def _to_odd(value: float) -> Any:
    """A float32 from which ml_dtypes rounds as from the value itself: cut off, with the last bit set if it is inexact.

    ml_dtypes converts by way of the nearest float32, and rounding twice is not rounding once.
    """
    near = np.float32(value)
    if float(near) == value or not np.isfinite(value):
        return np.asarray(near)
    cut = near if abs(float(near)) < abs(value) else np.nextafter(near, np.float32(0))
    return (np.asarray(cut).view(np.uint32) | 1).view(np.float32)


def _is_exact(value: int, dtype: np.dtype[Any]) -> bool:
    """Whether a float type holds this integer."""
    with np.errstate(over="ignore"):
        nearest = float(np.asarray(float(value)).astype(dtype)) if abs(value) < 1 << 1000 else float("inf")
    return np.isfinite(nearest).item() and int(nearest) == value
