"""Images on the CPU devices: what is one, libraries of several devices, and what is known of a kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from answers import code

from drvkit.cpu import driver as cpu
from drvkit.cpu.calls.base import DEVICES
from drvkit.driver import open_driver

driver = open_driver("cpu")
Attribute = cpu.CUfunction_attribute

HEAD = ".version 8.0\n.target sm_90\n.address_size 64\n"
COUNT = (
    HEAD
    + """
.visible .global .align 4 .u32 counter;
.visible .entry count(.param .u32 by)
{
  .reg .b32 %r<4>;
  ld.param.u32 %r1, [by]; ld.global.u32 %r2, [counter]; add.u32 %r3, %r1, %r2; st.global.u32 [counter], %r3;
  ret;
}
"""
)


@pytest.fixture(autouse=True)
def contexts() -> Iterator[list[Any]]:
    """Of two devices; that of the first one is current."""
    numbers = (DEVICES - 1, DEVICES - 2)
    contexts = [driver.cuDevicePrimaryCtxRetain(number) for number in numbers]
    driver.cuCtxPushCurrent(contexts[0])
    yield contexts
    driver.cuCtxPopCurrent()
    for number in numbers:
        driver.cuDevicePrimaryCtxRelease(number)


def load(text: str) -> Any:
    return driver.cuModuleLoadData(text.encode() + b"\0")


# ---- images --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("/* a */ // .version 99.0\n" + HEAD, "SUCCESS"),
        (HEAD.replace("8.0", "9.0"), "SUCCESS"),
        (HEAD.replace("8.0", "9.1"), "UNSUPPORTED_PTX_VERSION"),
        (HEAD.replace("8.0", "10.0") + "of another syntax", "UNSUPPORTED_PTX_VERSION"),
        (HEAD.replace("sm_90", "sm_100"), "INVALID_PTX"),
        (HEAD + "of another syntax", "INVALID_PTX"),
        ("// .version 8.0\n.target sm_90", "INVALID_IMAGE"),
        ("/* a */" * 1000, "INVALID_IMAGE"),
        ("", "INVALID_IMAGE"),
    ],
)
def test_what_is_an_image(text: str, result: str) -> None:
    found = cpu.cuModuleLoadData(text.encode() + b"\0")
    assert code(found) == result
    if result == "SUCCESS":
        driver.cuModuleUnload(found[1])
    else:
        assert cpu.explain(found[0])


REFUSED = {  # what a kernel may not have, and what is said of it
    "frob.u32 %r1, %r2;": "frob.u32 is not supported",
    "add.u32 %r1, %r2;": "add.u32: these operands and modifiers are not understood",
    "add.rn.f33 %f1, %f2, %f3;": "add.rn.f33: these operands and modifiers are not understood",
    "mov.u32 %r1;": "mov.u32: these operands and modifiers are not understood",
    "ld %r1, [%rd1];": "ld: these operands and modifiers are not understood",
    "bra;": "bra: no label is named",
    "bra nowhere;": "there is no label nowhere",
    "brx.idx %r1, nowhere;": "there is no label nowhere",
    "tex.1d.v4.f32.s32 {%f1, %f2, %f3, %f4}, [%rd1, {%r1}];": "tex.1d.v4.f32.s32 is not supported",
    "suld.b.a2d.b32.trap {%r1}, [%rd1, {%r1, %r2, %r3, %r4}];": "suld.b.a2d.b32.trap is not supported",
    "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2, %r3}], [%r4];": (
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes is not supported "
        "(tensor maps are not executed)"
    ),
    "wgmma.mma_async.sync.aligned.m64n8k256.s32.b1.b1.and.popc {%r1, %r2, %r3, %r4}, %rd1, %rd2, 1;": (
        "wgmma.mma_async.sync.aligned.m64n8k256.s32.b1.b1.and.popc is not supported"
    ),
    "wmma.store.d.sync.aligned.row.m16n16k16.global.f32 [%rd1], {%f1, %f2, %f3, %f4, %f1, %f2, %f3, %f4}, %r1;": (
        "wmma.store.d.sync.aligned.row.m16n16k16.global.f32 is not supported"
    ),
    "{ .param .b32 p; made: .callprototype _ (.param .b32 _); call %rd1, (p), made; }": (
        "calls through pointers are not executed"
    ),
    "{ .param .b64 p, q; call (q), malloc, (p); }": "malloc on the device is not executed",
    "{ .param .b64 p; call free, (p); }": "malloc on the device is not executed",
    "{ .param .b64 p; call (p), cudaGetParameterBufferV2, (p); }": "launches from the device are not executed",
    "call;": "a call names a function",
    "call _Z5otherv;": "calls other, which is not defined",
    "call _Z5againi;": "again calls itself: recursion is not executed",
}


@pytest.mark.parametrize(("instruction", "why"), REFUSED.items(), ids=range(len(REFUSED)))
def test_what_is_refused_is_named_with_kernel_and_line(instruction: str, why: str) -> None:
    text = f"""{HEAD}
.func _Z5otherv;
.func _Z5againi() {{
.loc 1 7 3
call _Z5againi;
ret; }}
.visible .entry _ZN5inner5scaleIfLi4EEEvPT_() {{
.reg .b64 %rd<5>; .reg .b32 %r<5>; .reg .f32 %f<5>;
.loc 1 7 3
{instruction}
.loc 1 8 3
ret; }}
.file 1 "/at/home/kernels.cu"
"""
    found = cpu.cuModuleLoadData(text.encode() + b"\0")
    assert code(found) == "INVALID_PTX"
    assert cpu.explain(found[0]) == f"kernels.cu:7: kernel inner::scale<float, 4>: {why}"


def test_files_are_called_by_what_tells_them_apart() -> None:
    text = f"""{HEAD}
.visible .entry k() {{
.reg .b32 %r<5>;
.loc FILE 3 1
frob %r1;
ret; }}
.file 1 "/at/home/one/kernels.cu"
.file 2 "/at/home/two/kernels.cu"
.file 3 "/at/home/one/helpers.cuh"
.file 4 "helpers.cuh"
.file 5 "/at/home/alone.cuh"
"""
    said = []
    for number in "12345":
        found = cpu.cuModuleLoadData(text.replace("FILE", number).encode() + b"\0")
        said.append((cpu.explain(found[0]) or "").split(":")[0])
    assert said == ["one/kernels.cu", "two/kernels.cu", "one/helpers.cuh", "helpers.cuh", "alone.cuh"]


def test_text_that_ends_too_early_is_refused() -> None:
    for text in (".visible .entry k() { ret;", ".visible .entry k() { add.u32 1,", ".visible .entry k("):
        assert code(cpu.cuModuleLoadData((HEAD + text).encode() + b"\0")) == "INVALID_PTX"


def test_the_address_of_a_function_is_no_variables() -> None:
    found = cpu.cuModuleLoadData(f"{HEAD}.func _Z1fv() {{ ret; }} .visible .global .u64 table = _Z1fv;\0".encode())
    assert code(found) == "INVALID_PTX"
    said = "variable table holds the address of f: calls through pointers are not executed"
    assert cpu.explain(found[0]) == said


# ---- libraries -----------------------------------------------------------------------------------------------------


@pytest.fixture
def library() -> Iterator[Any]:
    library = driver.cuLibraryLoadData(COUNT.encode() + b"\0", None, None, 0, None, None, 0)
    yield library
    if code(cpu.cuLibraryGetModule(library)) == "SUCCESS":
        driver.cuLibraryUnload(library)


def count(function: Any, by: int) -> None:
    driver.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, cpu.CUstream(0), ((by,), (ctypes.c_uint32,)), 0)


def counted(library: Any) -> int:
    address, nbytes = driver.cuModuleGetGlobal(driver.cuLibraryGetModule(library), b"counter")
    host = np.zeros(1, np.uint32)
    driver.cuMemcpyDtoH(host, address, nbytes)
    return int(host[0])


def test_each_device_has_a_module_of_a_library(library: Any, contexts: list[Any]) -> None:
    kernel = driver.cuLibraryGetKernel(library, b"count")
    assert int(kernel) == int(driver.cuLibraryGetKernel(library, b"count"))
    functions = []
    for context, by in zip(contexts, (3, 4), strict=True):
        driver.cuCtxSetCurrent(context)
        functions.append(driver.cuKernelGetFunction(kernel))
        count(functions[-1], by)
        count(cpu.CUfunction(int(kernel)), 10)  # a kernel stands for the function of the current device
    for context, function, total in zip(contexts, functions, (13, 14), strict=True):
        driver.cuCtxSetCurrent(context)
        assert counted(library) == total
        assert int(driver.cuFuncGetModule(function)) == int(driver.cuLibraryGetModule(library))
    driver.cuCtxSetCurrent(contexts[0])


def test_a_library_is_unloaded_as_a_whole(library: Any) -> None:
    kernel, module = driver.cuLibraryGetKernel(library, b"count"), driver.cuLibraryGetModule(library)
    function = driver.cuKernelGetFunction(kernel)
    assert code(cpu.cuModuleUnload(module)) == "NOT_PERMITTED"
    count(function, 1)
    driver.cuLibraryUnload(library)
    gone = [
        cpu.cuLibraryUnload(library),
        cpu.cuLibraryGetKernel(library, b"count"),
        cpu.cuKernelGetFunction(kernel),
        cpu.cuModuleGetFunction(module, b"count"),
        cpu.cuFuncGetName(function),
        cpu.cuFuncGetName(cpu.CUfunction(int(kernel))),
    ]
    assert [code(result) for result in gone] == ["INVALID_HANDLE"] * len(gone)


def test_a_library_needs_no_context_but_its_functions_do(contexts: list[Any]) -> None:
    driver.cuCtxSetCurrent(cpu.CUcontext(0))
    library = driver.cuLibraryLoadData(COUNT.encode() + b"\0", None, None, 0, None, None, 0)
    kernel = driver.cuLibraryGetKernel(library, b"count")
    assert code(cpu.cuLibraryGetModule(library)) == code(cpu.cuKernelGetFunction(kernel)) == "INVALID_CONTEXT"
    assert code(cpu.cuLibraryGetKernel(library, b"nope")) == "NOT_FOUND"
    driver.cuLibraryUnload(library)
    driver.cuCtxSetCurrent(contexts[0])


def test_the_image_of_a_library_is_looked_at_when_it_is_needed(contexts: list[Any]) -> None:
    library = driver.cuLibraryLoadData(b"nonsense\0", None, None, 0, None, None, 0)
    assert code(cpu.cuLibraryGetKernel(library, b"count")) == code(cpu.cuLibraryGetModule(library)) == "INVALID_IMAGE"
    driver.cuLibraryUnload(library)


def test_attributes_of_a_librarys_kernel_are_of_a_device(library: Any) -> None:
    kernel, most = (
        driver.cuLibraryGetKernel(library, b"count"),
        Attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
    )
    driver.cuKernelSetAttribute(most, 100_000, kernel, DEVICES - 1)
    assert driver.cuKernelGetAttribute(most, kernel, DEVICES - 1) == 100_000
    assert driver.cuFuncGetAttribute(most, driver.cuKernelGetFunction(kernel)) == 100_000
    assert driver.cuKernelGetAttribute(most, kernel, DEVICES - 2) == 48 * 1024
    assert code(cpu.cuKernelGetAttribute(most, kernel, DEVICES)) == "INVALID_DEVICE"


# ---- kernels -------------------------------------------------------------------------------------------------------


@pytest.fixture
def module() -> Iterator[Any]:
    """With kernels that need few and many registers."""
    numbers = range(100)
    loads = "".join(f"ld.global.u32 %r{i}, [%rd1+{4 * i}]; " for i in numbers)
    stores = "".join(f"st.global.u32 [%rd1+{4 * i}], %r{i}; " for i in numbers)
    module = load(
        f"""{HEAD}
.visible .entry small() {{ ret; }}
.visible .entry large(.param .u64 at)
{{
  .reg .b64 %rd<2>; .reg .b32 %r<101>; .reg .pred %p1;
  ld.param.u64 %rd1, [at]; {loads}
  mov.u32 %r100, %tid.x; setp.eq.u32 %p1, %r100, 0;
  @%p1 bra behind;
  bar.sync 0;
behind:
  {stores}
  ret;
}}
"""
    )
    yield module
    driver.cuModuleUnload(module)


def blocks(function: Any, threads: int, shared: int = 0) -> int:
    return int(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, threads, shared))


def test_settings_of_a_kernel_are_told(module: Any) -> None:
    small = driver.cuModuleGetFunction(module, b"small")
    for name, usual, value, wrong in (
        ("PREFERRED_SHARED_MEMORY_CARVEOUT", -1, 50, 101),
        ("CLUSTER_SCHEDULING_POLICY_PREFERENCE", 0, 2, 3),
    ):
        attribute = Attribute.__members__[f"CU_FUNC_ATTRIBUTE_{name}"]
        assert driver.cuFuncGetAttribute(attribute, small) == usual
        driver.cuFuncSetAttribute(small, attribute, value)
        assert code(cpu.cuFuncSetAttribute(small, attribute, wrong)) == "INVALID_VALUE"
        assert driver.cuFuncGetAttribute(attribute, small) == value
    assert code(cpu.cuFuncSetAttribute(small, Attribute.CU_FUNC_ATTRIBUTE_PTX_VERSION, 80)) == "INVALID_VALUE"


def test_any_number_but_0_allows_non_portable_clusters(module: Any) -> None:
    small = driver.cuModuleGetFunction(module, b"small")
    allowed = Attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
    told = [driver.cuFuncGetAttribute(allowed, small)]
    for value in (2, 0, -1, 0):
        driver.cuFuncSetAttribute(small, allowed, value)
        told.append(driver.cuFuncGetAttribute(allowed, small))
    assert told == [0, 1, 0, 1, 0]


def test_a_required_cluster_is_set_once_or_compiled_in() -> None:
    clusters = [Attribute.__members__[f"CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_{name}"] for name in ("WIDTH", "HEIGHT")]
    must_be_set = Attribute.CU_FUNC_ATTRIBUTE_CLUSTER_SIZE_MUST_BE_SET
    module = load(
        f"{HEAD}.visible .entry compiled() .reqnctapercluster 2, 1, 1 {{ ret; }}.visible .entry set() {{ ret; }}"
        ".visible .entry explicit() .explicitcluster .reqnctapercluster 2, 1, 1 { ret; }"
    )
    compiled, function, explicit = (
        driver.cuModuleGetFunction(module, name) for name in (b"compiled", b"set", b"explicit")
    )
    for width in clusters:
        assert code(cpu.cuFuncSetAttribute(compiled, width, 4)) == "INVALID_VALUE"
        assert code(cpu.cuFuncSetAttribute(function, width, -1)) == "INVALID_VALUE"
    driver.cuFuncSetAttribute(function, clusters[0], 4)
    told = [
        [driver.cuFuncGetAttribute(each, f) for each in (*clusters, must_be_set)]
        for f in (compiled, function, explicit)
    ]
    assert told == [[2, 1, 0], [4, 0, 0], [2, 1, 1]]
    driver.cuModuleUnload(module)


def test_the_architecture_of_the_text_is_told() -> None:
    module = load(HEAD.replace("sm_90", "sm_80") + ".visible .entry k() { ret; }")
    function = driver.cuModuleGetFunction(module, b"k")
    versions = (Attribute.CU_FUNC_ATTRIBUTE_PTX_VERSION, Attribute.CU_FUNC_ATTRIBUTE_BINARY_VERSION)
    assert [driver.cuFuncGetAttribute(version, function) for version in versions] == [80, 90]
    driver.cuModuleUnload(module)


def test_shared_memory_counts_as_far_as_the_kernel_may_ask_for_it(module: Any) -> None:
    small = driver.cuModuleGetFunction(module, b"small")
    assert (blocks(small, 32, 10_000), blocks(small, 32, 100_000)) == (20, 0)
    driver.cuFuncSetAttribute(small, Attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 232_448)
    assert (blocks(small, 32, 100_000), blocks(small, 32, 232_448), blocks(small, 32, 232_449)) == (2, 1, 0)


def test_registers_bound_how_many_blocks_there_are(module: Any) -> None:
    small, large = (driver.cuModuleGetFunction(module, name) for name in (b"small", b"large"))
    registers = driver.cuFuncGetAttribute(Attribute.CU_FUNC_ATTRIBUTE_NUM_REGS, large)
    assert 100 <= registers < 128
    assert [blocks(small, threads) for threads in (32, 512, 1024)] == [32, 4, 2]
    assert [blocks(large, threads) for threads in (32, 512, 1024)] == [16, 1, 0]
