"""`drvkit.signature`: which values fit which parameter, and the bytes that they become. No device is needed."""

from __future__ import annotations

import ctypes
import gc
import pickle
import re
import struct
import weakref
from types import SimpleNamespace
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest
from cuda.bindings.driver import CUdeviceptr, CUgraphConditionalHandle
from hypothesis import given
from hypothesis import strategies as st

from drvkit.device import Device
from drvkit.memory import Buffer
from drvkit.signature import ArgumentError, Arguments, CType, Signature, declared_types, kernel_label, mangled_types

CUDA = cast(Device, SimpleNamespace(driver=SimpleNamespace(kind="cuda"), id="cuda:0", ordinal=0))
CPU = cast(Device, SimpleNamespace(driver=SimpleNamespace(kind="cpu"), id="cpu:0", ordinal=0))

INTEGERS = {
    "signed char": "i1",
    "char": "i1",
    "unsigned char": "u1",
    "short": "i2",
    "unsigned short": "u2",
    "int": "i4",
    "unsigned": "u4",
    "long": "i8",
    "unsigned long": "u8",
    "long long": "i8",
    "unsigned long long": "u8",
}
FLOATS = {"float": "f4", "double": "f8", "__half": "f2"}
SMALL_FLOATS = {
    "__nv_bfloat16": ml_dtypes.bfloat16,
    "__nv_fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "__nv_fp8_e5m2": ml_dtypes.float8_e5m2,
    "__nv_fp8_e8m0": ml_dtypes.float8_e8m0fnu,
    "__nv_fp4_e2m1": ml_dtypes.float4_e2m1fn,
}


def buffer(shape: Any = 4, dtype: Any = np.float32, address: int = 0x1000, device: Device = CUDA) -> Buffer:
    """A Buffer that says it is there; nothing follows its address."""
    return Buffer.borrow(device, address, shape, dtype)


class Foreign:
    """Another library's array."""

    def __init__(
        self, dtype: Any = "<f4", *, readonly: bool = False, strides: Any = None, address: int = 0x2000
    ) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "data": (address, readonly),
            "typestr": np.dtype(dtype).str,
            "shape": (4,),
            "strides": strides,
        }


class OnlyDLPack:
    """Another library's array that knows no other protocol."""

    def __init__(self, behind: Buffer) -> None:
        self.behind = behind

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.behind.__dlpack_device__()

    def __dlpack__(self, **how: Any) -> Any:
        return self.behind.__dlpack__(**how)


class Index:
    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


def signature(*types: str, sizes: tuple[int, ...] = (), names: Any = None) -> Signature:
    """Of a kernel ``k`` with parameters of these types; ``sizes`` are those of the types that have none."""
    parsed, unknown, layout, end = [CType.parse(text) for text in types], list(sizes), [], 0
    for ctype in parsed:
        size = ctype.size or unknown.pop(0)
        start = -(-end // min(size, 8)) * min(size, 8)
        layout.append((start, size))
        end = start + size
    return Signature("k", parsed, names, layout)


def packed(ctype: str, value: Any, size: int = 0) -> bytes:
    """``value`` as it lies in memory for a parameter of this type, by both ways that pack it."""
    made = signature(ctype, sizes=(size,), names=["p"])
    arguments = Arguments(made)
    arguments.pack((value,))
    assert made.value(0, value) == arguments.packed
    return bytes(arguments.packed)


def refusal(ctype: str, value: Any, size: int = 0) -> str:
    made = signature(ctype, sizes=(size,), names=["p"])
    with pytest.raises(ArgumentError) as told:
        Arguments(made).pack((value,))
    assert (told.value.kernel, told.value.position, told.value.name) == ("k", 0, "p")
    with pytest.raises(ArgumentError):
        made.value(0, value)
    return str(told.value)


# ---- numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ctype", INTEGERS)
@given(value=st.integers(-(2**66), 2**66) | st.integers(-300, 300) | st.sampled_from([2**k - 1 for k in range(66)]))
def test_an_integer_is_packed_exactly_or_refused(ctype: str, value: int) -> None:
    info = np.iinfo(INTEGERS[ctype])
    if info.min <= value <= info.max:
        want = value.to_bytes(info.bits // 8, "little", signed=info.min < 0)
        assert packed(ctype, value) == packed(ctype, Index(value)) == want
    else:
        assert f"got int {value}" in refusal(ctype, value)
        refusal(ctype, Index(value))


@pytest.mark.parametrize("ctype", INTEGERS)
@pytest.mark.parametrize("given_type", "bBhHiIqQ")
def test_an_integer_of_numpy_or_ctypes_is_a_value_and_not_a_width(ctype: str, given_type: str) -> None:
    dtype = np.dtype(given_type)
    assert packed(ctype, dtype.type(7)) == packed(ctype, 7)
    assert packed(ctype, np.ctypeslib.as_ctypes_type(dtype)(7)) == packed(ctype, 7)
    largest = int(np.iinfo(dtype).max)
    if largest > np.iinfo(INTEGERS[ctype]).max:
        refusal(ctype, dtype.type(largest))


@pytest.mark.parametrize("ctype", INTEGERS)
@pytest.mark.parametrize("value", [True, np.True_, 1.0, np.float32(1), "1", None, 1j, np.array(1), b"\1"])
def test_what_is_no_integer_is_refused(ctype: str, value: Any) -> None:
    assert "args[0] 'p' wanted" in refusal(ctype, value)


@pytest.mark.parametrize("ctype", FLOATS)
@given(value=st.floats())
def test_a_float_is_rounded_once_or_refused(ctype: str, value: float) -> None:
    dtype = np.dtype(FLOATS[ctype])
    with np.errstate(over="ignore", under="ignore"):
        want = np.float64(value).astype(dtype)
    if np.isfinite(value) and not np.isfinite(want):
        assert "in range" in refusal(ctype, value)
        return
    for given_value in (value, np.float64(value), ctypes.c_double(value)):
        got = np.frombuffer(packed(ctype, given_value), dtype)[0]
        assert got.tobytes() == want.tobytes() or (np.isnan(got) and np.isnan(want))


@pytest.mark.parametrize("ctype", SMALL_FLOATS)
@given(value=st.floats(allow_nan=False, allow_infinity=False) | st.floats(-500, 500))
def test_a_small_float_becomes_its_nearest_neighbour_or_is_refused(ctype: str, value: float) -> None:
    dtype = np.dtype(SMALL_FLOATS[ctype])
    codes = np.arange(2 ** (16 if dtype.itemsize == 2 else 4 if "fp4" in ctype else 8))
    with np.errstate(invalid="ignore"):
        values = codes.astype(f"u{dtype.itemsize}").view(dtype).astype(np.float64)
    values = values[np.isfinite(values)]
    try:
        got = float(np.frombuffer(packed(ctype, value), dtype)[0])
    except ArgumentError:
        assert "at most" in refusal(ctype, value)
        # Only what is farther away than half a step, or than any value (a type without sign or zero), has no neighbour.
        top, below = np.sort(values)[-1], np.sort(values)[-2]
        assert abs(value) >= top + (top - below) / 2 or (values.min() > 0 and value <= values.min())
    else:
        with np.errstate(over="ignore"):
            assert abs(got - value) == np.abs(values - value).min()


@pytest.mark.parametrize(
    ("ctype", "value", "bits"),
    [
        ("__nv_bfloat16", 1.5, "c03f"),
        ("__nv_bfloat16", -2, "00c0"),
        ("__nv_bfloat16", 1 + 2**-8 + 2**-40, "813f"),  # by way of float it would be 1.0
        ("__nv_bfloat16", ml_dtypes.bfloat16(1.5), "c03f"),
        ("__nv_bfloat16", float("inf"), "807f"),
        ("__half", 1.5, "003e"),
        ("__half", np.float16(-0.0), "0080"),
        ("half", 65504, "ff7b"),
        ("__nv_fp8_e4m3", 1.0, "38"),
        ("__nv_fp8_e4m3", 448, "7e"),
        ("__nv_fp8_e5m2", -1.0, "bc"),
        ("__nv_fp8_e8m0", 2.0, "80"),
        ("__nv_fp8_e8m0", 1.4 * 2.0**-127, "00"),  # no normal float32
        ("__nv_fp8_e8m0", 1.5 * 2.0**-127, "01"),
        ("__nv_fp4_e2m1", 6.0, "07"),
        ("float", np.float64(0.1), "cdcccc3d"),
        ("double", np.float32(0.5), "000000000000e03f"),
        ("double", 2**53, "0000000000004043"),
        ("bool", True, "01"),
        ("bool", np.False_, "00"),
        ("bool", ctypes.c_bool(True), "01"),
    ],
)
def test_known_bits(ctype: str, value: Any, bits: str) -> None:
    assert packed(ctype, value).hex() == bits


@pytest.mark.parametrize(
    ("ctype", "exact", "inexact"),
    [
        ("float", 2**24, 2**24 + 1),
        ("float", 2**100, -(2**24) - 1),
        ("double", 2**53, 2**53 + 1),
        ("double", 2**200, 10**400),
        ("__half", 2**11, 2**11 + 1),
        ("__half", 65504, 10**6),
        ("__half", -4096, 10**400),
        ("__nv_bfloat16", 256, 257),
        ("__nv_bfloat16", 2**40, 10**30),
        ("__nv_fp8_e4m3", 448, 17),
    ],
)
def test_an_integer_that_a_float_cannot_hold_is_refused(ctype: str, exact: int, inexact: int) -> None:
    packed(ctype, exact)
    refusal(ctype, inexact)


@pytest.mark.parametrize("ctype", [*FLOATS, *SMALL_FLOATS])
@pytest.mark.parametrize(
    "value", [True, np.True_, 1j, np.complex64(1), "1", None, np.array(1.0), CUdeviceptr(1), buffer()]
)
def test_what_is_no_number_is_refused(ctype: str, value: Any) -> None:
    assert "a number" in refusal(ctype, value)


@pytest.mark.parametrize("value", [0, 1, 1.0, None, "True", np.uint8(1)])
def test_a_bool_is_nothing_else(value: Any) -> None:
    assert "wanted bool" in refusal("bool", value)


def test_a_conditional_handle_is_64_bits_of_anything_with_an_index() -> None:
    handle = 2**63 + 5
    for value in (handle, Index(handle), CUgraphConditionalHandle(handle), np.uint64(handle)):
        assert packed("cudaGraphConditionalHandle", value) == handle.to_bytes(8, "little")
    assert signature("cudaGraphConditionalHandle").takes_handles
    assert not signature("const unsigned long long*", "long long").takes_handles


# ---- structs -------------------------------------------------------------------------------------------------------


class Triple(ctypes.Structure):
    _fields_ = (("a", ctypes.c_int), ("b", ctypes.c_float), ("c", ctypes.c_short))


TRIPLE = np.dtype([("a", "i4"), ("b", "f4"), ("c", "i2")], align=True)
THREE = struct.pack("<ifhxx", -1, 0.5, 7)


@pytest.mark.parametrize(
    "value",
    [
        Triple(-1, 0.5, 7),
        np.array((-1, 0.5, 7), TRIPLE)[()],
        THREE,
        bytearray(THREE),
        memoryview(THREE),
        (ctypes.c_char * 12).from_buffer_copy(THREE),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_struct_is_passed_by_value(value: Any) -> None:
    assert packed("Triple", value, 12)[:10] == THREE[:10]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (THREE[:11], "11 bytes"),
        (Triple, "Triple of 12 bytes, by value"),
        (np.zeros(1, TRIPLE), "by value (a ctypes structure, a numpy scalar or bytes)"),
        (buffer(1, TRIPLE), "by value"),
        ((1, 2, 3), "by value"),
        (None, "got None"),
        (np.int32(1), "4 bytes"),
    ],
    ids=str,
)
def test_a_struct_is_nothing_else(value: Any, said: str) -> None:
    assert said in refusal("Triple", value, 12)


def test_a_vector_type_is_passed_as_a_struct() -> None:
    assert packed("float2", np.array([1, 2], np.float32).tobytes()) == struct.pack("<2f", 1, 2)
    assert "8 bytes" in refusal("float2", 1.0)


# ---- pointers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ctype", "dtypes"),
    [
        ("float*", ["f4"]),
        ("const float*", ["f4"]),
        ("double*", ["f8"]),
        ("int*", ["i4"]),
        ("unsigned*", ["u4"]),
        ("bool*", ["?"]),
        ("char*", ["i1", "u1"]),
        ("unsigned char*", ["u1"]),
        ("long*", ["i8"]),
        ("long long*", ["i8"]),
        ("__half*", ["f2"]),
        ("__nv_bfloat16*", [ml_dtypes.bfloat16, "u2", "V2"]),
        ("__nv_fp8_e4m3*", [ml_dtypes.float8_e4m3fn, "u1", "V1"]),
        ("float4*", ["f4"]),
        ("float2*", ["f4", "c8"]),
        ("double2*", ["f8", "c16"]),
        ("__half2*", ["f2"]),
        ("float**", ["u8", "i8"]),
        ("Triple*", [TRIPLE, "u1"]),
    ],
)
def test_a_pointer_takes_arrays_of_its_pointee_only(ctype: str, dtypes: list[Any]) -> None:
    takes = {np.dtype(dtype) for dtype in dtypes}
    others = {np.dtype(code) for code in "?bBhHiIqQefdFD"} | {np.dtype(ml_dtypes.bfloat16), np.dtype("V2")}
    for dtype in takes:
        assert packed(ctype, buffer(4, dtype)) == (0x1000).to_bytes(8, "little")
    for dtype in others - takes:
        assert "a device array of" in refusal(ctype, buffer(4, dtype))


@pytest.mark.parametrize("dtype", ["?", "i1", "f4", "c16", ml_dtypes.bfloat16, TRIPLE])
def test_a_void_pointer_takes_any_array(dtype: Any) -> None:
    assert packed("const void*", buffer(4, dtype)) == (0x1000).to_bytes(8, "little")


def test_pointers_that_are_no_arrays() -> None:
    assert packed("float*", None) == bytes(8)
    assert packed("float*", ctypes.c_void_p(0x3000)) == (0x3000).to_bytes(8, "little")
    assert packed("float*", ctypes.c_void_p()) == bytes(8)
    assert packed("float*", CUdeviceptr(0x4000)) == (0x4000).to_bytes(8, "little")


def test_foreign_arrays_by_protocol() -> None:
    assert packed("float*", Foreign()) == (0x2000).to_bytes(8, "little")
    assert packed("float*", OnlyDLPack(buffer())) == (0x1000).to_bytes(8, "little")
    assert packed("__nv_bfloat16*", OnlyDLPack(buffer(4, ml_dtypes.bfloat16))) == (0x1000).to_bytes(8, "little")
    assert packed("const float*", Foreign(readonly=True)) == (0x2000).to_bytes(8, "little")


@pytest.mark.parametrize(
    ("ctype", "value", "said"),
    [
        ("float*", 4096, "got int 4096; a bare address is given as ctypes.c_void_p"),
        ("float*", np.uint64(4096), "a bare address is given as ctypes.c_void_p"),
        ("float*", np.zeros(4, np.float32), "in host memory"),
        ("float*", "x", "got 'x'"),
        ("float*", 1.0, "got float 1.0"),
        ("float*", [1.0], "got builtins.list"),
        ("float*", Foreign("<f8"), "got float64"),
        ("float*", Foreign(strides=(8,)), "contiguous, got strides (8,) of shape (4,)"),
        ("float*", Foreign(readonly=True), "writable, got read-only"),
        ("float*", Foreign(address=0x2002), "aligned to 4 bytes, got address 0x2002"),
        ("float*", buffer((4, 4))[:, 1], "contiguous, got strides (16,) of shape (4,)"),
        ("float*", buffer(4, address=0x1001), "aligned to 4 bytes"),
        ("float4*", buffer(4, address=0x1004), "aligned to 16 bytes, got address 0x1004"),
        ("double2*", buffer(4, "f8", address=0x1008), "aligned to 16 bytes"),
        ("float*", buffer(device=CPU), "on cuda:0"),
        ("float**", buffer(4, "f4"), "a device array of uint64 or int64, got float32"),
    ],
)
def test_pointers_that_do_not_fit(ctype: str, value: Any, said: str) -> None:
    assert said in refusal(ctype, value)


def test_a_closed_buffer_says_so() -> None:
    closed = buffer()
    closed.close()
    assert "closed" in refusal("float*", closed)
    assert "closed" in refusal("void*", closed)


def test_what_pointers_point_to_is_given_back_to_be_held() -> None:
    made, x, y = signature("const float*", "int", "float*"), Foreign(), buffer()
    box, alive = y.box, weakref.ref(x)
    held = Arguments(made).pack((x, 3, y))
    assert box in held
    del x
    gc.collect()
    assert alive() is not None
    y.close()
    assert box in held, "closing a Buffer does not undo what was packed"
    assert not any(isinstance(thing, Buffer) for thing in held), "holding a Buffer would not survive its close"


@pytest.mark.parametrize("namespace", ["cuda::std", "std", "thrust"])
@pytest.mark.parametrize(("part", "dtype"), [("float", np.complex64), ("double", np.complex128)])
def test_complex_numbers(namespace: str, part: str, dtype: Any) -> None:
    ctype, size = f"{namespace}::complex<{part}>", np.dtype(dtype).itemsize
    assert packed(f"{ctype}*", buffer(dtype=dtype)) == (0x1000).to_bytes(8, "little")
    assert packed(f"{ctype}*", Foreign(dtype)) == (0x2000).to_bytes(8, "little")
    other = {np.complex64: np.complex128, np.complex128: np.complex64}[dtype]
    for array in (buffer(dtype=other), buffer(dtype=np.float32), Foreign("<f8")):
        assert f"a device array of {np.dtype(dtype).name}" in refusal(f"{ctype}*", array)
    if part == "double":
        assert "aligned to 16 bytes" in refusal(f"{ctype}*", buffer(dtype=dtype, address=0x1008))
    want = dtype(1.5 - 2j)
    for value in (1.5 - 2j, np.complex64(1.5 - 2j), np.complex128(1.5 - 2j), want.tobytes()):
        assert packed(ctype, value) == want.tobytes()
    assert packed(ctype, 3) == packed(ctype, 3.0) == dtype(3).tobytes()
    for value in (True, "1", None, bytes(size - 1), np.zeros(1, dtype), buffer(dtype=dtype)):
        assert "args[0] 'p' wanted" in refusal(ctype, value)
    assert signature(ctype).parameters[0].unpack(want.tobytes()) == want


@pytest.mark.parametrize("ctype", ["id<float>::type*", "const Traits::type*", "dk::Box<float, 4>*"])
def test_a_pointer_to_what_only_the_compiler_knows_takes_any_dtype(ctype: str) -> None:
    for dtype in (np.float32, np.int64, np.complex64, np.uint8):
        assert packed(ctype, buffer(dtype=dtype)) == (0x1000).to_bytes(8, "little")
    assert "got float32" in refusal("Plain*", buffer()), "a struct of one name takes records and bytes"


class Elsewhere:
    """An array of a library that says by DLPack on which device it is."""

    def __init__(self, kind: int, ordinal: int) -> None:
        self.place = (kind, ordinal)
        self.behind = buffer()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.place

    def __dlpack__(self, **how: Any) -> Any:
        return self.behind.__dlpack__()


@pytest.mark.parametrize("types", [[CType("float", 1)], None])
def test_a_foreign_array_of_another_device_is_refused(types: Any) -> None:
    asked: list[int] = []

    def locate(address: int) -> int | None:
        asked.append(address)
        return {0x2000: 1, 0x3000: 0}.get(address)

    arguments = Arguments(Signature("k", types, ["p"], [(0, 8)], "cuda:1", locate))
    device = cast(Device, SimpleNamespace(driver=SimpleNamespace(kind="cuda"), id="cuda:1", ordinal=1))
    everywhere: list[Any] = [Elsewhere(3, 0), Elsewhere(13, 0)]
    here: Any
    for here in (Elsewhere(2, 1), buffer(device=device), *everywhere):
        arguments.pack((here,))
    assert set(asked) <= {0x1000}, "of page-locked and managed memory, which is everywhere"
    for here in (Foreign(), Foreign(address=0x4000)):  # on the device; unknown to the driver
        arguments.pack((here,))
    there: Any
    for there in (Elsewhere(2, 0), Foreign(address=0x3000)):
        with pytest.raises(ArgumentError, match=r"args\[0\] 'p' wanted .* on cuda:1, got .* on cuda:0"):
            arguments.pack((there,))


# ---- parameters of which only the size is known --------------------------------------------------------------------


def test_untyped_parameters_take_typed_values_of_their_size() -> None:
    made = Signature("plain", None, ["x", "y", "n"], [(0, 8), (8, 8), (16, 4)])
    arguments = Arguments(made)
    arguments.pack((buffer(), None, np.int32(-5)))
    assert arguments.packed == struct.pack("<QQi", 0x1000, 0, -5)
    arguments.pack((np.float64(0.5), Foreign(), ctypes.c_float(0.5)))
    assert arguments.packed == struct.pack("<dQf", 0.5, 0x2000, 0.5)
    arguments.pack((ctypes.c_void_p(0x3000), OnlyDLPack(buffer()), b"abcd"))
    assert arguments.packed == struct.pack("<QQ4s", 0x3000, 0x1000, b"abcd")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((5, None, np.int32(1)), "args[0] 'x' wanted a typed value of 8 bytes (np.int32(...), a Buffer, ...; or"),
        ((None, 0.5, np.int32(1)), "args[1] 'y' wanted a typed value of 8 bytes"),
        ((None, None, 5), "args[2] 'n' wanted a typed value of 4 bytes"),
        (
            (None, None, np.int64(5)),
            "args[2] 'n' wanted an untyped parameter of 4 bytes, by value, got np.int64(5)",
        ),
        ((None, None, buffer()), "args[2] 'n' wanted"),
        ((None, np.zeros(1), np.int32(1)), "in host memory"),
        ((None, buffer((4, 4))[:, 1], np.int32(1)), "contiguous"),
        ((None, None, None), "args[2] 'n' wanted"),
    ],
)
def test_untyped_parameters_refuse_what_has_no_size(args: tuple[Any, ...], said: str) -> None:
    with pytest.raises(ArgumentError) as told:
        Arguments(Signature("plain", None, ["x", "y", "n"], [(0, 8), (8, 8), (16, 4)])).pack(args)
    assert said in str(told.value)


# ---- the block -----------------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from([*INTEGERS, *FLOATS, "bool", "float*", "Args"]), max_size=12), st.data())
def test_every_value_is_where_the_driver_looks_for_it(types: list[str], data: st.DataObject) -> None:
    made = signature(*types, sizes=(24,) * types.count("Args"))
    values: list[Any] = []
    for ctype in types:
        if ctype in INTEGERS:
            values.append(data.draw(st.integers(0, 127)))
        else:
            values.append({"bool": True, "float*": buffer(), "Args": bytes(range(24))}.get(ctype, 0.5))
    arguments = Arguments(made)
    arguments.pack(values)
    assert bool(arguments.address) == bool(types)
    pointers: Any = (ctypes.c_void_p * len(types)).from_address(arguments.address) if types else []
    for parameter, pointer, value in zip(made.parameters, pointers, values, strict=True):
        assert pointer % min(parameter.size & -parameter.size, 8) == 0
        assert ctypes.string_at(pointer, parameter.size) == made.value(parameter.index, value)


def test_offsets_are_the_drivers() -> None:
    made = Signature("k", [CType.parse(t) for t in ("bool", "double", "Wide")], None, [(0, 1), (8, 8), (64, 32)])
    arguments = Arguments(made)
    arguments.pack((True, 0.5, bytes(range(32))))
    assert arguments.packed == struct.pack("<?7xd48x32s", True, 0.5, bytes(range(32)))
    wide = (ctypes.c_void_p * 3).from_address(arguments.address)[2]
    assert wide is not None
    assert wide % 64 == 0


def test_a_block_is_written_over_in_place() -> None:
    made = signature("int", "float")
    arguments = Arguments(made)
    arguments.pack((1, 0.5))
    address, first = arguments.address, bytes(arguments.packed)
    arguments.pack((2, 1.5))
    assert arguments.swap(0, made.value(0, 7)) == struct.pack("<i", 2)
    assert (arguments.address, bytes(arguments.packed)) == (address, struct.pack("<if", 7, 1.5))
    arguments.packed = first
    assert arguments.packed == struct.pack("<if", 1, 0.5)


def test_a_kernel_without_parameters() -> None:
    arguments = Arguments(signature())
    assert arguments.pack(()) == ()
    assert (arguments.address, bytes(arguments.packed)) == (0, b"")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "kernel k: wanted 2 arguments (int n, float alpha), got 0"),
        ((1,), "kernel k: wanted 2 arguments (int n, float alpha), got 1"),
        ((1, 2.0, 3), "kernel k: wanted 2 arguments (int n, float alpha), got 3"),
        (5, "kernel k: wanted a tuple of arguments (int n, float alpha), got int 5"),
        (None, "kernel k: wanted a tuple of arguments (int n, float alpha), got None"),
    ],
)
def test_the_number_of_arguments(args: Any, said: str) -> None:
    with pytest.raises(ArgumentError) as told:
        Arguments(signature("int", "float", names=["n", "alpha"])).pack(args)
    assert str(told.value) == said
    assert told.value.position is None


def test_an_argument_error_tells_all_and_travels() -> None:
    with pytest.raises(ArgumentError) as told:
        Arguments(signature("int", "float", names=["n", "alpha"])).pack((2**31, 1.0))
    want = "kernel k: args[0] 'n' wanted int32, an integer in [-2147483648, 2147483647], got int 2147483648"
    copy = pickle.loads(pickle.dumps(told.value))
    assert isinstance(told.value, TypeError)
    error: ArgumentError
    for error in (told.value, copy):
        assert str(error) == want
        assert (error.kernel, error.position, error.name) == ("k", 0, "n")
        assert (error.wanted, error.got) == ("int32, an integer in [-2147483648, 2147483647]", "int 2147483648")


def test_parameters_are_found_by_name_or_position() -> None:
    made = signature("int", "float", names=["n", ""])
    assert (made.locate("n"), made.locate(1)) == (0, 1)
    for missing in ("alpha", "", 2, -1):
        with pytest.raises(ArgumentError, match=r"kernel k: wanted a parameter of \(int n, float\)"):
            made.locate(missing)


# ---- types ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("symbol", "types"),
    [
        ("_Z5scaleIfEvPKT_PS0_if", ["const float*", "float*", "int", "float"]),
        ("_Z1kv", []),
        ("_Z1kPKvDhDF16_", None),  # the types that no CUDA compiler writes
        ("_Z1kI13__nv_bfloat16EvPT_S0_", ["__nv_bfloat16*", "__nv_bfloat16"]),
        ("_Z1k6__halfP13__nv_fp8_e4m3", ["__half", "__nv_fp8_e4m3*"]),
        ("_Z3fooP6float4PPfbaxy", ["float4*", "float**", "bool", "signed char", "long long", "unsigned long long"]),
        ("_Z1kPKPKf", ["float* const*"]),
        ("_Z2k4IJEEvDpT_", []),
        ("_Z2k4IJiPfPKdEEvDpT_", ["int", "float*", "const double*"]),
        ("_Z2k4IJifEEviDpPKT_", ["int", "const int*", "const float*"]),
        ("_Z2k6IiJPfdEEvT_DpT0_f", ["int", "float*", "double", "float"]),
        ("_Z2k5IJifEEvDp3BoxIT_E", None),  # how many there are is lost
        ("_Z2k8PA4_fPA4_KfPFviEPf", ["void*", "void*", "void*", "float*"]),  # to arrays and to a function
        ("_Z1kM1Sfi", ["None", "int"]),  # a pointer to a member
        (
            "_Z2k7N4cuda3std3__47complexIdEEPKNS2_IfEE",
            ["cuda::std::complex<double>", "const cuda::std::complex<float>*"],
        ),
        (
            "_Z1kPN6thrust23THRUST_300000_SM_900_NS7complexIfEE",
            ["thrust::complex<float>*"],
        ),
        ("_Z1kN2dk4ArgsE", ["dk::Args"]),
        (
            "_Z1khstjlmdc",
            ["unsigned char", "short", "unsigned short", "unsigned int", "long", "unsigned long", "double", "char"],
        ),
        ("plain", None),
        ("", None),
        ("_Z", None),
    ],
)
def test_types_out_of_a_mangled_name(symbol: str, types: list[str] | None) -> None:
    got = mangled_types(symbol)
    if symbol == "_Z1kPKvDhDF16_":
        assert got is None or str(got[0]) == "const void*"
    else:
        assert (None if got is None else [str(ctype) for ctype in got]) == types


def test_the_label_of_a_symbol() -> None:
    assert kernel_label("_Z5scaleIfEvPKT_PS0_if") == "scale<float>"
    assert kernel_label("_ZN5inner1kIN5outer1TELin3ELb1ELj7EEEvT_") == "inner::k<outer::T, -3, true, 7>"
    assert kernel_label("plain") == "plain"


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("const float* __restrict__", "const float*"),
        ("float const *", "const float*"),
        ("float * const", "float*"),
        ("const int", "int"),
        ("unsigned", "unsigned int"),
        ("long long unsigned int", "unsigned long long"),
        ("std::uint32_t", "unsigned int"),
        ("int64_t*", "long*"),
        ("size_t", "unsigned long"),
        ("half2", "__half2"),
        ("cudaGraphConditionalHandle", "unsigned long long"),
        ("const struct dk::Args*", "const dk::Args*"),
        ("float const *const *", "float* const*"),
        ("std::size_t*", "unsigned long*"),
        ("const cuda::std::complex<float>*", "const cuda::std::complex<float>*"),
        ("thrust::complex<double>", "thrust::complex<double>"),
        ("std::complex< float >", "std::complex<float>"),
    ],
)
def test_types_as_declared(text: str, want: str) -> None:
    assert str(CType.parse(text)) == want


def test_a_declaration_that_only_a_compiler_reads_is_not_guessed() -> None:
    assert declared_types(["int", "void (*)(int)", "real", "real"]) == [CType("int"), None, None, None]
    assert declared_types(["const real*", "Args*"]) == [CType("void", 1, True), CType("void", 1)]
    assert declared_types(["const float[]", "float [4]"]) == [CType("float", 1, True), CType("float", 1)]
    assert declared_types([]) == []


@pytest.mark.parametrize(
    ("declared", "argument", "want"),
    [
        ("T", "float", "float"),
        ("T*", "float", "float*"),
        ("const T*", "half", "const __half*"),
        ("T*", "const float", "const float*"),
        ("T", "const float*", "const float*"),
        ("const T*", "float*", "float* const*"),
        ("T*", "float*", "float**"),
        ("T**", "const float", "float**"),
        ("T* const*", "int", "int* const*"),
        ("const T*", "Other", "const void*"),
        ("T", "Other", "None"),
        ("T*", "float&", "None"),
        ("cuda::std::complex<T>*", "float", "cuda::std::complex<float>*"),
        ("const dk::V<T,N>*", "float", "const void*"),
        ("typename T::type", "Other", "None"),
        ("int", "float", "int"),
    ],
)
def test_a_template_argument_stands_for_its_parameter(declared: str, argument: str, want: str) -> None:
    assert [str(ctype) for ctype in declared_types([declared], {"T": argument, "N": "4"})] == [want]


@pytest.mark.parametrize(
    ("types", "names", "layout", "said"),
    [
        (["int"], None, [(0, 4), (4, 4)], "kernel k: 1 parameter types (int), but the compiled kernel takes 2"),
        (None, ["a", "b"], [(0, 4)], "kernel k: 2 parameter names (a, b), but the compiled kernel takes 1"),
        (["int"], ["n"], [(0, 8)], "parameter 0 is int n, 4 bytes, but the compiled kernel takes 8 bytes there"),
        (["float*"], None, [(0, 4)], "parameter 0 is float*, 8 bytes, but the compiled kernel takes 4 bytes there"),
    ],
)
def test_types_must_agree_with_the_compiled_kernel(types: Any, names: Any, layout: Any, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        Signature("k", types and [CType.parse(text) for text in types], names, layout)


def test_a_kernel_writes_through_pointers_to_what_is_not_const() -> None:
    made = signature("const float*", "float*", "int", "void*", "const void*", "float**")
    assert [p.written for p in made.parameters] == [False, True, False, True, False, True]
    assert [p.is_pointer for p in made.parameters] == [True, True, False, True, True, True]


@pytest.mark.parametrize("ctype", [*INTEGERS, "float", "double", "__half", "__nv_bfloat16"])
def test_what_was_packed_is_unpacked(ctype: str) -> None:
    parameter = signature(ctype).parameters[0]
    assert parameter.unpack(packed(ctype, 5)) == 5
