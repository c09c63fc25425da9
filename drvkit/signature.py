"""Kernel signatures, and arguments checked and packed against them.

The type of each parameter comes from the kernel's mangled name (which the compiler made); where that is not mangled
(``extern "C"``) or not understood, from the declaration in the source, with the arguments of its template put into it;
or from a declaration that the caller gives. Sizes and offsets come from the driver, out of the compiled kernel, and
must agree. So a Python number always has a C type to become, and a buffer a pointee to be compared with; what does not
fit is an `ArgumentError` before the driver sees it.
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import itanium_demangler
import ml_dtypes
import numpy as np

from .memory import Buffer, pointee, view_of
from .scalars import CLASSES, Unfit, bits, format_of, is_ml, packer, said

__all__ = ["UNFIT", "ArgumentError", "Arguments", "CType", "Parameter", "Signature"]


class ArgumentError(TypeError):
    """A value that a kernel's parameter cannot take.

    Attributes:
        kernel: the kernel's name.
        position: index into ``args``; None if the number of arguments is wrong.
        name: the parameter's name in the source, or None.
        wanted, got: in words.
    """

    def __init__(self, kernel: str, position: int | None, name: str | None, wanted: str, got: str) -> None:
        self.kernel, self.position, self.name, self.wanted, self.got = kernel, position, name, wanted, got
        place = "" if position is None else f" args[{position}]" + (f" {name!r}" if name else "")
        super().__init__(f"kernel {kernel}:{place} wanted {wanted}, got {got}")

    def __reduce__(self) -> tuple[type[ArgumentError], tuple[Any, ...]]:
        return type(self), (self.kernel, self.position, self.name, self.wanted, self.got)


# C++ types

_SCALARS: dict[str, np.dtype[Any]] = {
    "bool": np.dtype(np.bool_),
    "char": np.dtype(np.int8),
    "signed char": np.dtype(np.int8),
    "unsigned char": np.dtype(np.uint8),
    "short": np.dtype(np.int16),
    "unsigned short": np.dtype(np.uint16),
    "int": np.dtype(np.int32),
    "unsigned int": np.dtype(np.uint32),
    "long": np.dtype(np.int64),
    "unsigned long": np.dtype(np.uint64),
    "long long": np.dtype(np.int64),
    "unsigned long long": np.dtype(np.uint64),
    "float": np.dtype(np.float32),
    "double": np.dtype(np.float64),
    "__half": np.dtype(np.float16),
    "__nv_bfloat16": np.dtype(ml_dtypes.bfloat16),
    "__nv_fp8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "__nv_fp8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "__nv_fp8_e8m0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "__nv_fp4_e2m1": np.dtype(ml_dtypes.float4_e2m1fn),
}

_ALIASES = {
    "unsigned": "unsigned int",
    "signed": "int",
    "signed int": "int",
    "short int": "short",
    "unsigned short int": "unsigned short",
    "long int": "long",
    "unsigned long int": "unsigned long",
    "long long int": "long long",
    "unsigned long long int": "unsigned long long",
    "int8_t": "signed char",
    "uint8_t": "unsigned char",
    "int16_t": "short",
    "uint16_t": "unsigned short",
    "int32_t": "int",
    "uint32_t": "unsigned int",
    "int64_t": "long",
    "uint64_t": "unsigned long",
    "size_t": "unsigned long",
    "ptrdiff_t": "long",
    "intptr_t": "long",
    "uintptr_t": "unsigned long",
    "half": "__half",
    "nv_bfloat16": "__nv_bfloat16",
    "half2": "__half2",
    "nv_bfloat162": "__nv_bfloat162",
    "cudaGraphConditionalHandle": "unsigned long long",
}

_VECTORS: dict[str, tuple[np.dtype[Any], int]] = {"__half2": (_SCALARS["__half"], 2)}
_VECTORS["__nv_bfloat162"] = (_SCALARS["__nv_bfloat16"], 2)
for _short, _name in (
    *((f"{u}{n}", f"{'unsigned ' if u else ''}{n}") for n in ("char", "short", "int", "long") for u in ("", "u")),
    *(("longlong", "long long"), ("ulonglong", "unsigned long long"), ("float", "float"), ("double", "double")),
):
    for _lanes in (1, 2, 3, 4):
        _VECTORS[f"{_short}{_lanes}"] = (_SCALARS[_name], _lanes)

_COMPLEX = {
    f"{namespace}::complex<{part}>": np.dtype(dtype)
    for namespace in ("cuda::std", "std", "thrust")
    for part, dtype in (("float", np.complex64), ("double", np.complex128))
}
_INLINE_NAMESPACE = re.compile(r"\b(cuda::std|std|thrust)::(?:__\w+|THRUST_\w+)::(?=complex<)")


def _canonical(base: str) -> str:
    return _ALIASES.get(base) or _INLINE_NAMESPACE.sub(r"\1::", base)


@dataclass(frozen=True)
class CType:
    """A parameter's type, as far as packing needs it: a named type behind some pointers."""

    base: str  # "float", "__half", "dk::Args"; canonical for what is known
    pointers: int = 0
    const: bool = False  # of what the outermost pointer points to

    def __str__(self) -> str:
        if self.pointers > 1 and self.const:
            return f"{self.base}{'*' * (self.pointers - 1)} const*"
        return f"{'const ' if self.const else ''}{self.base}{'*' * self.pointers}"

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """The numpy dtype of ``base``, if that is a scalar."""
        return _SCALARS.get(self.base)

    @property
    def is_known(self) -> bool:
        """Whether it is no typedef, no struct and nothing else that only a compiler knows."""
        return self.base == "void" or any(self.base in table for table in (_SCALARS, _VECTORS, _COMPLEX))

    @property
    def size(self) -> int | None:
        """In bytes; None for types that only the compiler knows."""
        if self.pointers:
            return 8
        if self.base in _VECTORS:
            dtype, lanes = _VECTORS[self.base]
            return dtype.itemsize * lanes
        if self.base in _COMPLEX:
            return _COMPLEX[self.base].itemsize
        return self.dtype.itemsize if self.dtype is not None else None

    @classmethod
    def parse(cls, text: str) -> CType:
        """A type as written in C++: ``"const float* __restrict__"``, ``"unsigned"``, ``"dk::Args"``."""
        text = re.sub(r"\[\w*\]$", "*", text.strip())  # an array parameter is a pointer
        text = re.sub(r"\b(__restrict__|__restrict|restrict|volatile|struct|__grid_constant__)\b", " ", text)
        text = re.sub(r"\b(cuda::)?std::(?!(\w+::)*complex\b)", " ", text)
        head, *levels = text.split("*")
        const = bool(levels) and bool(re.search(r"\bconst\b", [head, *levels][len(levels) - 1]))
        words = re.sub(r"\bconst\b", " ", head).split()
        order = {"unsigned": 0, "signed": 0, "short": 1, "long": 1, "int": 2, "char": 2}
        if words and all(word in order for word in words):
            words.sort(key=order.__getitem__)
        base = re.sub(r" ?([<>,]) ?", r"\1", " ".join(words))
        if not base or not re.fullmatch(r"[\w:<>, ]+", base):
            raise ValueError(f"not a parameter type: {text.strip()!r}")
        return cls(_canonical(base), len(levels), const)

    def bound(self, arguments: Mapping[str, str]) -> CType:
        """It with the arguments of a template for the names of its parameters; `ValueError` as of `parse`."""
        if self.base not in arguments:
            base = re.sub(r"(?<!::)\b\w+\b(?!::)", lambda word: arguments.get(word[0], word[0]), self.base)
            return CType(_canonical(base), self.pointers, self.const) if "<" in base else self
        argument = arguments[self.base]
        if not self.pointers:
            return CType.parse(argument)
        pointer = CType.parse(f"{argument}*")
        levels = self.pointers - 1
        return CType(pointer.base, pointer.pointers + levels, self.const or (pointer.const and not levels))

    @classmethod
    def demangled(cls, node: Any) -> CType | None:
        """A type from the demangler's syntax tree. What is no named type stays open, as in `declared_types`."""
        pointers, const = 0, False
        while True:
            if node.kind == "cv_qual":
                const = "const" in node.qual if pointers == 1 else const
                node = node.value
            elif node.kind == "pointer":
                pointers += 1
                node = node.value
            elif node.kind in ("builtin", "name", "qual_name") and _is_spelled(node):
                return cls(_canonical(str(node)), pointers, const)
            else:
                return cls("void", pointers, const) if pointers else None


def _is_spelled(node: Any) -> bool:
    """Whether ``str`` of the demangler's node is C++."""
    if node.kind in ("qual_name", "tpl_args"):
        return all(map(_is_spelled, node.value))
    if node.kind in ("cv_qual", "pointer", "lvalue", "rvalue"):
        return _is_spelled(node.value)
    return node.kind in ("builtin", "name") or (node.kind == "literal" and _is_spelled(node.ty))


def _expanded(node: Any) -> list[Any]:
    """The types that a parameter stands for: itself, or, of a pack expansion, one for each element."""
    if node.kind != "expand_arg_pack":
        return [node]
    packs = []

    def look(part: Any) -> Any:
        if part.kind == "tpl_arg_pack":
            packs.append(part.value)
            return part
        return part.map(look)

    def pick(part: Any, index: int) -> Any:
        return part.value[index] if part.kind == "tpl_arg_pack" else part.map(partial(pick, index=index))

    look(node.value)
    (length,) = {len(pack) for pack in packs}
    return [pick(node.value, index) for index in range(length)]


def mangled_types(symbol: str) -> list[CType | None] | None:
    """Parameter types out of a mangled name; None if it is not mangled or says something that is not understood."""
    try:
        tree = itanium_demangler.parse(symbol)
        if tree is None or tree.kind != "func":
            return None
        types = [CType.demangled(node) for parameter in tree.arg_tys for node in _expanded(parameter)]
    except Exception:  # the parser has no error of its own: it fails with whatever it stumbles over
        return None
    return [] if types == [CType("void")] else types


def declared_types(texts: Sequence[str], arguments: Mapping[str, str] = {}) -> list[CType | None]:
    """Parameter types as declared, with the ``arguments`` of a template for the names of its parameters. What only a
    compiler knows (a typedef, a struct) stays open: None by value, and behind a pointer void, which takes any dtype."""
    types: list[CType | None] = []
    for text in texts:
        try:
            ctype = CType.parse(text).bound(arguments)
        except ValueError:
            types.append(None)
            continue
        if ctype.is_known and ctype != CType("void"):
            types.append(ctype)
        else:
            types.append(CType("void", ctype.pointers, ctype.const) if ctype.pointers else None)
    return types


def kernel_label(symbol: str) -> str:
    """What people call the kernel: ``scale<float, 4>`` for ``_Z5scaleIfLi4EEvPKT_PS0_if``."""
    try:
        tree = itanium_demangler.parse(symbol)
        return str(_plain(tree.name)) if tree is not None and tree.kind == "func" else symbol
    except Exception:
        return symbol


def _plain(node: Any) -> Any:
    """The demangler's tree with numbers as they are written in C++, without casts."""
    if node.kind != "literal":
        return node.map(_plain)
    value = {"0": "false", "1": "true"}[node.value] if str(node.ty) == "bool" else node.value.replace("n", "-")
    return itanium_demangler.Node("name", value)


# Parameters


@dataclass(frozen=True)
class Parameter:
    """One parameter of a compiled kernel."""

    index: int
    type: CType | None  # None where nothing but the size is known
    name: str | None
    offset: int  # bytes, in the packed block
    size: int

    @cached_property
    def is_pointer(self) -> bool:
        """Whether it may be one: it is declared so, or nothing but its size is known."""
        return self.type.pointers > 0 if self.type is not None else self.size == 8

    @property
    def written(self) -> bool:
        """Whether the kernel may write through it: a pointer to what is not const."""
        return self.type is not None and self.is_pointer and not self.type.const

    def __str__(self) -> str:
        return f"{self.type or f'{self.size} bytes'}{f' {self.name}' if self.name else ''}"

    def unpack(self, raw: bytes) -> Any:
        """The value in packed bytes: a number, an address, or the bytes themselves."""
        if self.type is not None and not self.type.pointers and self.type.base in _COMPLEX:
            return complex(np.frombuffer(raw, _COMPLEX[self.type.base])[0])
        if self.type is not None and not self.type.pointers and self.type.dtype is not None and is_ml(self.type.dtype):
            return np.frombuffer(raw, self.type.dtype)[0]
        return struct.unpack("<" + self.format, raw)[0]

    @property
    def format(self) -> str:
        """How `struct` packs the value that the parameter's packer gives."""
        if self.type is not None:
            if self.type.pointers:
                return "Q"
            dtype = self.type.dtype
            if dtype is not None:
                return format_of(dtype)
        return f"{self.size}s"


_Packer = Callable[[Any], Any]  # an argument -> what struct packs; raises Unfit
_Locate = Callable[[int], int | None]  # an address -> the ordinal of the device that it is on, if that is known


def _bytes_packer(size: int, label: str) -> _Packer:
    """By value, whatever it is: ctypes structures, numpy structured scalars, bytes; anything with a buffer."""

    def whole(value: Any) -> bytes:
        if not isinstance(value, (Buffer, np.ndarray)):
            try:
                data = memoryview(value).cast("B") if not isinstance(value, np.generic) else value.tobytes()
            except (TypeError, ValueError):
                data = None
            if data is not None:
                if len(data) == size:
                    return bytes(data)
                raise Unfit(f"{label} of {size} bytes, by value", f"{said(value)} of {len(data)} bytes")
        hint = "a ctypes structure, a numpy scalar or bytes"
        raise Unfit(f"{label} of {size} bytes, by value ({hint})", said(value))

    return whole


def _complex_packer(dtype: np.dtype[Any], label: str) -> _Packer:
    whole = _bytes_packer(dtype.itemsize, label)

    def number(value: Any) -> bytes:
        return bits(value, dtype) if isinstance(value, (int, float, complex, np.number)) else whole(value)

    return number


def _pointer_packer(ctype: CType, device: str, locate: _Locate) -> _Packer:
    dtypes, align = _pointees(ctype)
    token = pointee(device, dtypes[0]) if dtypes else None
    kind, _, ordinal = device.partition(":")
    wanted = f"{ctype}, a device array of {' or '.join(d.name for d in dtypes) if dtypes else 'any dtype'}"

    def pointer(value: Any) -> int:
        if token is not None and isinstance(value, Buffer) and value._packs_as is token and value.address % align == 0:
            return value.address
        if value is None:
            return 0
        if isinstance(value, Buffer):
            if value.closed:
                raise Unfit(wanted, f"{value!r} ({value.allocation.info})")
            if value.device.id != device and (value.where != "pinned" or value.device.driver.kind != kind):
                raise Unfit(f"{wanted} on {device}", repr(value))
        elif isinstance(value, ctypes.c_void_p):
            return value.value or 0
        elif type(value).__name__ == "CUdeviceptr":  # of the bindings
            return int(value)
        try:
            view = None if isinstance(value, np.generic) else view_of(value)
        except BufferError as error:  # by DLPack, such as of a tensor that requires grad
            raise Unfit(wanted, f"{said(value)}, which does not export its memory: {error}") from None
        if view is None:
            hint = "; a bare address is given as ctypes.c_void_p" if isinstance(value, (int, np.integer)) else ""
            raise Unfit(wanted, said(value) + hint)
        if view.on_host:
            raise Unfit(wanted, f"{said(value)} in host memory")
        if not isinstance(value, Buffer):
            where = locate(view.address) if view.device is None else view.device
            if where not in (None, int(ordinal)):
                raise Unfit(f"{wanted} on {device}", f"{said(value)} on {kind}:{where}")
        if dtypes and view.dtype not in dtypes and not (ctype.dtype is None and view.dtype.names):
            raise Unfit(wanted, f"{view.dtype} ({said(value)})")
        if not view.contiguous:
            raise Unfit(f"{wanted}, contiguous", f"strides {view.strides} of shape {view.shape}")
        if view.address % align:
            raise Unfit(f"{wanted}, aligned to {align} bytes", f"address {view.address:#x}")
        if view.readonly and not ctype.const:
            raise Unfit(f"{wanted}, writable", f"read-only {said(value)}")
        return view.address

    return pointer


def _pointees(ctype: CType) -> tuple[list[np.dtype[Any]], int]:
    """The dtypes that a pointer may point to, the natural one first (none: any dtype), and the alignment."""
    if ctype.pointers > 1:
        return [np.dtype(np.uint64), np.dtype(np.int64)], 8
    if ctype.base == "void":
        return [], 1
    if ctype.base in _VECTORS:
        dtype, lanes = _VECTORS[ctype.base]
        dtypes = [dtype]
        if lanes == 2 and dtype.char in "fd":
            dtypes.append(np.dtype(f"c{2 * dtype.itemsize}"))
        return dtypes, min(16, dtype.itemsize * (lanes if lanes != 3 else 1))
    if ctype.base in _COMPLEX:
        return [_COMPLEX[ctype.base]], _COMPLEX[ctype.base].itemsize
    if ctype.dtype is None and ("<" in ctype.base or ctype.base.endswith("::type")):  # a trait may name any type
        return [], 1
    if ctype.dtype is None:  # a struct: structured dtypes are taken, and raw bytes
        return [np.dtype(np.uint8)], 1
    dtype = ctype.dtype
    dtypes = [dtype]
    if is_ml(dtype):  # libraries that cannot name it carry it as unsigned integers or void
        dtypes += [np.dtype(f"u{dtype.itemsize}"), np.dtype(f"V{dtype.itemsize}")]
    if ctype.base == "char":
        dtypes.append(np.dtype(np.uint8))
    return dtypes, dtype.itemsize


def _untyped_packer(size: int, device: str, locate: _Locate) -> _Packer:
    """Only the size is known: typed values of that size, and device arrays where it is 8."""
    whole = _bytes_packer(size, "an untyped parameter")
    pointer = _pointer_packer(CType("void", 1), device, locate)

    def sized(value: Any) -> Any:
        if isinstance(value, np.generic):
            return whole(value)
        if size == 8 and (value is None or isinstance(value, Buffer) or view_of(value) is not None):
            return pointer(value).to_bytes(8, "little")
        if isinstance(value, (bool, int, float)):
            wanted = f"a typed value of {size} bytes (np.int32(...), a Buffer, ...; or declare signature=)"
            raise Unfit(wanted, said(value))
        return whole(value)

    return sized


def _packer_of(parameter: Parameter, device: str, locate: _Locate) -> _Packer:
    ctype = parameter.type
    if ctype is None:
        return _untyped_packer(parameter.size, device, locate)
    if ctype.pointers:
        return _pointer_packer(ctype, device, locate)
    if ctype.base in _COMPLEX:
        return _complex_packer(_COMPLEX[ctype.base], str(ctype))
    dtype = ctype.dtype
    if dtype is None:
        return _bytes_packer(parameter.size, str(ctype))
    pack = packer(dtype)
    assert pack is not None
    return pack


UNFIT = (Unfit, struct.error, OverflowError, ValueError, TypeError)  # what `Signature.write` and ``put`` raise


def _expression(p: Parameter, arg: str) -> str:
    """The value that struct packs for argument ``arg``, in the source of `Signature.write`."""
    common = None
    if p.type is not None and p.type.dtype is not None and not is_ml(p.type.dtype) and not p.type.pointers:
        common = f"{arg} if {arg}.__class__ is {CLASSES[p.type.dtype.kind]}"
    elif p.type is not None and p.type.dtype is not None and p.type.pointers == 1:
        common = f"{arg}._address if {arg}.__class__ is Buffer and {arg}._packs_as is token{p.index}"
    return f"{common} else pack{p.index}({arg})" if common else f"pack{p.index}({arg})"


class Signature:
    """What a kernel takes: ``parameters``, and how values are checked and packed.

    Args:
        kernel: the name that errors say.
        types: a type for each parameter, or None where only sizes are known.
        names: a name for each parameter, or None.
        layout: (offset, size) in bytes of each parameter in the compiled kernel.
        device: the device whose memory (or any pinned memory) pointers may point to.
        locate: `Device.locate` of it, for foreign arrays that do not say where they are.

    `ValueError` if types and layout disagree.
    """

    def __init__(
        self,
        kernel: str,
        types: Sequence[CType | None] | None,
        names: Sequence[str] | None,
        layout: Sequence[tuple[int, int]],
        device: str = "cuda:0",
        locate: _Locate = lambda address: None,
    ) -> None:
        self.kernel = kernel
        for what, given in (("types", types), ("names", names)):
            if given is not None and len(given) != len(layout):
                raise ValueError(
                    f"kernel {kernel}: {len(given)} parameter {what} ({', '.join(map(str, given))}), "
                    f"but the compiled kernel takes {len(layout)}"
                )
        self.parameters = tuple(
            Parameter(i, types[i] if types else None, (names[i] or None) if names else None, offset, size)
            for i, (offset, size) in enumerate(layout)
        )
        for parameter in self.parameters:
            expected = parameter.type.size if parameter.type is not None else None
            if expected not in (None, parameter.size):
                raise ValueError(
                    f"kernel {kernel}: parameter {parameter.index} is {parameter}, {expected} bytes, "
                    f"but the compiled kernel takes {parameter.size} bytes there"
                )
        self.index = {p.name: p.index for p in self.parameters if p.name}
        self._packers = tuple(_packer_of(p, device, locate) for p in self.parameters)
        self._structs = tuple(struct.Struct("<" + p.format) for p in self.parameters)
        self.nbytes = max((p.offset + p.size for p in self.parameters), default=0)
        self.takes_handles = any(p.type == CType("unsigned long long") for p in self.parameters)
        self._compile(device)

    def _compile(self, device: str) -> None:
        """Make ``write(args, memory, base, first)`` and ``put[i](memory, at, value)``, as dataclasses make methods.

        ``write`` packs all arguments and gives ``first`` and what keeps the memory behind the pointers alive; ``put``
        packs one. The common case of each parameter is tested in line (a Buffer of the right dtype, an int, a float)
        and all else goes to its packer: a third of the time of calling the packers one by one, at every launch.
        What they raise is one of `UNFIT`; `explain` and `value` then say what it was.
        """
        names: dict[str, Any] = {"Buffer": Buffer}
        layout, end = "<", 0
        puts = []
        for p, pack in zip(self.parameters, self._packers, strict=True):
            layout += f"{p.offset - end}x{p.format}"
            end = p.offset + p.size
            names[f"pack{p.index}"], names[f"put{p.index}_into"] = pack, self._structs[p.index].pack_into
            if p.type is not None and p.type.pointers == 1 and p.type.dtype is not None:
                names[f"token{p.index}"] = pointee(device, p.type.dtype)
            puts.append(f"def put{p.index}(memory, at, a): put{p.index}_into(memory, at, {_expression(p, 'a')})")
        names["pack_into"] = struct.Struct(layout).pack_into
        targets = "".join(f"a{p.index}, " for p in self.parameters) or "()"
        packed = "".join(f", {_expression(p, f'a{p.index}')}" for p in self.parameters)
        holders = "".join(
            f", a{p.index}.box if a{p.index}.__class__ is Buffer else a{p.index}"
            for p in self.parameters
            if p.is_pointer
        )
        lines = [
            "def write(args, memory, base, first):",
            f"    {targets} = args",
            f"    pack_into(memory, base{packed})",
            f"    return (first{holders},)",
            *puts,
        ]
        exec("\n".join(lines), names)
        self.write: Callable[[Sequence[Any], bytearray, int, object], tuple[object, ...]] = names["write"]
        self.put: list[Callable[[bytearray, int, Any], None]] = [names[f"put{p.index}"] for p in self.parameters]

    def explain(self, args: Sequence[Any]) -> ArgumentError:
        """Why ``args`` could not be packed."""
        try:
            count = len(args)
        except TypeError:
            return ArgumentError(self.kernel, None, None, f"a tuple of arguments {self}", said(args))
        if count != len(self.parameters):
            return ArgumentError(self.kernel, None, None, f"{len(self.parameters)} arguments {self}", str(count))
        for index, value in enumerate(args):
            try:
                self.value(index, value)
            except ArgumentError as error:
                return error
        raise AssertionError(f"kernel {self.kernel}: {args!r} fit one by one but not together")

    def value(self, index: int, value: Any) -> bytes:
        """One argument in its packed form."""
        parameter = self.parameters[index]
        try:
            return self._structs[index].pack(self._packers[index](value))
        except Unfit as unfit:
            wanted, got = unfit.args
        except (struct.error, OverflowError):
            wanted, got = f"{parameter.type}, which is in range", said(value)
        raise ArgumentError(self.kernel, index, parameter.name, wanted, got)

    def locate(self, name: str | int) -> int:
        """The index of a parameter, by its name in the source or by position."""
        if isinstance(name, int):
            if 0 <= name < len(self.parameters):
                return name
        elif name in self.index:
            return self.index[name]
        raise ArgumentError(self.kernel, None, None, f"a parameter of {self}", repr(name))

    def __len__(self) -> int:
        return len(self.parameters)

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.parameters))})"


class Arguments:
    """A block of packed arguments in the form that the driver takes: one address of pointers to values.

    It is made once and written over; its addresses stay.
    """

    __slots__ = ("_end", "_export", "address", "base", "memory", "signature")

    def __init__(self, signature: Signature) -> None:
        count = len(signature)
        room = -(-max(signature.nbytes, 1) // 64) * 64
        self.signature = signature
        self.memory = bytearray(64 + room + 8 * count)
        self._export = ctypes.c_char.from_buffer(self.memory)  # while it lives the memory cannot move
        start = ctypes.addressof(self._export)
        self.base = -start % 64  # the strictest alignment that a parameter can ask for
        self._end = self.base + signature.nbytes
        self.address = start + self.base + room if count else 0  # kernelParams
        pointers = [start + self.base + p.offset for p in signature.parameters]
        struct.pack_into(f"<{count}Q", self.memory, self.base + room, *pointers)

    def pack(self, args: Sequence[Any]) -> tuple[object, ...]:
        """Write all arguments. `ArgumentError` names the one that does not fit.

        Gives what must be held for as long as the kernel may use the memory that the arguments point to.
        """
        try:
            return self.signature.write(args, self.memory, self.base, None)[1:]
        except UNFIT:
            raise self.signature.explain(args) from None

    def swap(self, index: int, packed: bytes) -> bytes:
        """Write one argument in packed form, as `Signature.value` gives it, and give the one that was there."""
        start = self.base + self.signature.parameters[index].offset
        end = start + len(packed)
        before = bytes(self.memory[start:end])
        self.memory[start:end] = packed
        return before

    @property
    def packed(self) -> bytearray:
        """A copy of all values as they lie in memory."""
        return self.memory[self.base : self._end]

    @packed.setter
    def packed(self, values: bytes | bytearray) -> None:
        self.memory[self.base : self.base + len(values)] = values
