"""C functions as Python functions, for the few calls whose host cost counts.

llvmlite compiles a built-in function around the C function: the arguments go from Python integers into registers, which
costs some 0.1 us less than what generic wrappers do, and the work of a launch is not much more than that. ctypes makes
the call where llvmlite cannot be used: where it or its library is missing, and where the system lets no process make
code. ``DRVKIT_NATIVE=0`` in the environment of the first use forces that.

Source: Python/C API, "Common Object Structures" (``METH_FASTCALL``).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

__all__ = ["how", "lock", "native"]

METH_FASTCALL = 0x80

lock = threading.RLock()  # around all use of LLVM and its one context; finalizers of anybody may run meanwhile
_forever: list[Any] = []  # code and definitions: the functions do not hold them


def native(name: str, address: int, parameters: int) -> Callable[..., int]:
    """The C function ``int name(uint64_t, ...)`` at ``address``, of so many ``parameters``.

    It takes integers in [0, 2^64) and gives the result. The GIL is released meanwhile.
    """
    with lock:
        compiler = _compiler()
        if compiler is not None:
            return compiler.built_in(name, address, parameters)
    return ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * parameters)(address)


def how() -> str:
    """What `native` gives here: ``"compiled"`` or ``"ctypes"``."""
    with lock:
        return "ctypes" if _compiler() is None else "compiled"


@cache
def _compiler() -> _Compiler | None:
    if os.environ.get("DRVKIT_NATIVE") == "0":
        return None
    try:
        return _Compiler()
    except (ImportError, OSError):
        return None


def _may_make_code() -> None:
    """`OSError` where written memory cannot become code, of which LLVM would die (``PR_SET_MDWE``, SELinux)."""
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        start = ctypes.c_char.from_buffer(page)
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        failed = protect(ctypes.addressof(start), mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC)
        del start  # the page cannot be given back while it is there
        if failed:
            raise OSError(ctypes.get_errno(), "memory that was written cannot be executed")


class _MethodDef(ctypes.Structure):
    """``PyMethodDef``."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    ]


class _Compiler:
    """llvmlite, set up for this processor."""

    def __init__(self) -> None:
        import llvmlite.binding as llvm

        _may_make_code()
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        self.llvm = llvm
        self.new = ctypes.pythonapi.PyCFunction_NewEx
        self.new.restype, self.new.argtypes = ctypes.py_object, [ctypes.c_void_p] * 3

    def built_in(self, name: str, address: int, parameters: int) -> Callable[..., int]:
        engine = self.llvm.create_mcjit_compiler(
            self.llvm.parse_assembly(_wrapper(address, parameters)),
            self.llvm.Target.from_default_triple().create_target_machine(opt=0),  # there is nothing to optimize
        )
        engine.finalize_object()
        definition = _MethodDef(name.encode(), engine.get_function_address("wrapper"), METH_FASTCALL, None)
        _forever.append((engine, definition))
        function: Callable[..., int] = self.new(ctypes.addressof(definition), None, None)
        return function


def _python(function: str, result: str, *types: str) -> str:
    """A function of the interpreter, as LLVM calls it."""
    return _at(ctypes.cast(ctypes.pythonapi[function], ctypes.c_void_p).value or 0, result, *types)


def _at(address: int, result: str, *types: str) -> str:
    return f"{result} inttoptr (i64 {address} to {result} ({', '.join(types)})*)"


def _wrapper(address: int, parameters: int) -> str:
    """LLVM IR of ``PyObject *wrapper(PyObject *self, PyObject *const *args, Py_ssize_t count)``."""
    lines = [
        "define i8* @wrapper(i8* %self, i8** %args, i64 %count) {",
        f"  %fits = icmp eq i64 %count, {parameters}",
        "  br i1 %fits, label %convert.0, label %miscounted",
        "miscounted:",
        f"  call {_python('PyErr_BadArgument', 'i32')}()",
        "  br label %fail",
        "fail:",  # an exception is set
        "  ret i8* null",
    ]
    for i in range(parameters):
        lines += [
            f"convert.{i}:",
            f"  %place.{i} = getelementptr i8*, i8** %args, i64 {i}",
            f"  %object.{i} = load i8*, i8** %place.{i}",
            f"  %value.{i} = call {_python('PyLong_AsUnsignedLongLong', 'i64', 'i8*')}(i8* %object.{i})",
            f"  %doubt.{i} = icmp eq i64 %value.{i}, -1",  # an error, or the value 2^64 - 1
            f"  br i1 %doubt.{i}, label %ask.{i}, label %convert.{i + 1}",
            f"ask.{i}:",
            f"  %error.{i} = call {_python('PyErr_Occurred', 'i8*')}()",
            f"  %none.{i} = icmp eq i8* %error.{i}, null",
            f"  br i1 %none.{i}, label %convert.{i + 1}, label %fail",
        ]
    values = ", ".join(f"i64 %value.{i}" for i in range(parameters))
    lines += [
        f"convert.{parameters}:",
        f"  %thread = call {_python('PyEval_SaveThread', 'i8*')}()",
        f"  %result = call {_at(address, 'i32', *['i64'] * parameters)}({values})",
        f"  call {_python('PyEval_RestoreThread', 'void', 'i8*')}(i8* %thread)",
        "  %wide = sext i32 %result to i64",
        f"  %number = call {_python('PyLong_FromLong', 'i8*', 'i64')}(i64 %wide)",
        "  ret i8* %number",
        "}",
    ]
    return "\n".join(lines)
