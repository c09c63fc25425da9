"""Memory, where the table of vectors does not reach: generic addresses, and accesses that are not looked at."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from one_warp import run

from drvkit.cpu.memory import memory
from drvkit.device import Device
from drvkit.driver import DriverError
from drvkit.source import Source

RANDOM = np.random.default_rng()


@pytest.fixture
def fresh() -> Iterator[NDArray[np.uint32]]:
    """The address of device memory in which nothing was written, in two words."""
    allocation = memory.allocate(4096, "device")
    yield np.array([allocation.address & 0xFFFFFFFF, allocation.address >> 32], np.uint32)
    memory.free(allocation.address)


@pytest.mark.parametrize("mode", ["checked", "unchecked"])
@pytest.mark.parametrize("size", [4, 8, 16])
@pytest.mark.parametrize("copies", [1, 100], ids=["one copy", "more than a queue holds"])
def test_copies_of_threads_take_what_the_same_kernel_has_stored(
    mode: str, size: int, copies: int, fresh: NDArray[np.uint32]
) -> None:
    value = RANDOM.integers(0, 1 << 32, 32, dtype=np.uint32)
    body = f"""
    mov.b64 %w0, {{%a1, %a2}}; mul.wide.u32 %w1, %lane, 16; add.s64 %w0, %w0, %w1;
    st.global.v4.b32 [%w0], {{%a0, %a0, %a0, %a0}};
    mov.u32 %r1, tile; shl.b32 %r0, %lane, 4; add.u32 %r0, %r0, %r1; mov.b32 %r2, 0;
    MORE: cp.async.ca.shared.global [%r0], [%w0], {size};
    add.u32 %r2, %r2, 1; setp.lt.u32 %p0, %r2, {copies}; @%p0 bra MORE;
    cp.async.wait_all;
    ld.shared.b32 %d0, [%r0]; ld.shared.b32 %d1, [%r0+{size - 4}];
    """
    given = np.array([value, *(np.full(32, word) for word in fresh)], np.uint32)
    np.testing.assert_array_equal(run(body, given, 2, mode=mode), np.tile(value, (2, 1)))


def test_a_cache_policy_changes_nothing() -> None:
    """Of loads, stores, atomics and copies, with and without other operands after the address."""
    value = RANDOM.integers(0, 1 << 30, 32, dtype=np.uint32)
    body = """
    createpolicy.fractional.L2::evict_last.b64 %w1, 0f3F000000;
    createpolicy.fractional.L2::evict_last.L2::evict_unchanged.b64 %w2;
    createpolicy.range.global.L2::evict_last.L2::evict_first.b64 %w3, [%out], 64, 128;
    st.global.L2::cache_hint.b32 [%out], 7, %w1;
    atom.global.add.L2::cache_hint.u32 %r0, [%out], %a0, %w2;
    atom.global.cas.L2::cache_hint.b32 %d2, [%out], %lane, 1, %w2;
    red.global.add.L2::cache_hint.u32 [%out], 1, %w3;
    ld.global.L1::evict_first.L2::cache_hint.b32 %d0, [%out], %w1;
    mov.u32 %r1, tile; mul.lo.u32 %r2, %lane, 16; add.u32 %r1, %r1, %r2;
    and.b64 %w4, %out, -16;
    cp.async.cg.shared.global.L2::cache_hint [%r1], [%w4], 16, %w1;
    cp.async.ca.shared.global.L2::cache_hint [%r1+512], [%out], 4, 0, %w1;
    cp.async.wait_all; bar.warp.sync -1;
    and.b32 %r2, %lane, -4; sub.u32 %r3, %lane, %r2; shl.b32 %r3, %r3, 2; add.u32 %r3, %r1, %r3;
    ld.shared.b32 %d1, [%r3]; ld.shared.b32 %r4, [%r1+512]; add.u32 %d1, %d1, %r4;
    setp.ne.u32 %p1, %lane, 0; @%p1 bra WAIT;
    mov.u32 %r5, tile; mbarrier.init.shared.b64 [%r5+2040], 1;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r5+2040], 128;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint
        [%r5+1024], [%out], 128, [%r5+2040], %w1;
    WAIT: bar.warp.sync -1;
    mov.u32 %r5, tile; shl.b32 %r6, %lane, 2; add.u32 %r6, %r5, %r6; ld.shared.b32 %d3, [%r6+1024];
    """
    found = run(body, value[None], 4)
    want = value + np.uint32(8)
    for row, expected in zip(found, (want, want, value + np.uint32(7), want), strict=True):
        np.testing.assert_array_equal(row, expected)


SCATTERED = """
template <typename T> __global__ void load(const unsigned char* x, const int* offsets, T* y, unsigned lanes) {
  if (lanes >> threadIdx.x & 1) y[threadIdx.x] = *reinterpret_cast<const T*>(x + offsets[threadIdx.x]);
}
"""
WIDTHS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "unsigned long long", 16: "uint4"}
DTYPES: dict[int, Any] = {
    1: np.uint8,
    2: np.uint16,
    4: np.uint32,
    8: np.uint64,
    16: [(axis, np.uint32) for axis in "xyzw"],
}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("lanes", [0xFFFFFFFF, 0x10008421])
def test_lanes_load_from_anywhere(width: int, lanes: int) -> None:
    device = Device("cpu")
    content = RANDOM.integers(0, 256, 4096, np.uint8)
    offsets = RANDOM.permutation(4096 // width)[:32].astype(np.int32) * width
    with device.module(Source.from_text(SCATTERED)) as module, device.stream() as stream:
        x, at, y = device.array(content), device.array(offsets), device.zeros(32, DTYPES[width])
        module.kernel(f"load<{WIDTHS[width]}>").launch(stream, grid=1, block=32, args=(x, at, y, lanes))
        got = y.numpy(stream).view(np.uint8).reshape(32, width)
        for each in (x, at, y):
            each.close()
    want = np.stack([content[offset : offset + width] for offset in offsets])
    want[[lane for lane in range(32) if not lanes >> lane & 1]] = 0
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("lane", [0, 13, 31])
def test_of_lanes_that_load_from_anywhere_the_one_at_fault_is_told(width: int, lane: int) -> None:
    for offset, what in (
        (4096, "0 bytes past the end"),
        (2048, "where nothing was written"),
        (width // 2, "misaligned"),
    ):
        if width == 1 and what == "misaligned":
            continue
        victim = Device("cpu:5")
        offsets = (np.arange(32)[::-1] * 16).astype(np.int32)
        offsets[lane] = offset
        x, at, y = victim.empty(4096, np.uint8), victim.array(offsets), victim.zeros(32, DTYPES[width])
        x[:2048].fill(1)
        module = victim.module(Source.from_text(SCATTERED))
        kernel = module.kernel(f"load<{WIDTHS[width]}>")
        with pytest.raises(DriverError) as found, victim.stream() as stream:
            kernel.launch(stream, grid=1, block=32, args=(x, at, y, 0xFFFFFFFF))
        victim.driver.cuDevicePrimaryCtxReset(victim.handle)
        for each in (x, at, y, module):
            each.close()
        assert f"thread ({lane}, 0, 0): reads {width} byte" in str(found.value)
        assert what in str(found.value)


SUBNORMAL, LEAST = 0x00000003, 0x00800000  # LEAST: of the normal numbers


@pytest.mark.parametrize("operands", [(SUBNORMAL, SUBNORMAL), (0x80000005, SUBNORMAL), (LEAST, 0x80000001)])
def test_sums_at_generic_addresses_are_those_of_the_space_that_they_are_in(operands: tuple[int, int]) -> None:
    """Subnormal f32 numbers are flushed in global memory, and kept in shared memory: of even and of odd lanes."""
    old, value = operands
    body = f"""
    shl.b32 %r0, %lane, 2; mov.u32 %r1, tile; add.u32 %r0, %r0, %r1;
    cvt.u64.u32 %w0, %r0; cvta.shared.u64 %w0, %w0; add.u64 %w2, %w0, 128; cvta.global.u64 %w1, %out;
    and.b32 %r2, %lane, 1; setp.ne.u32 %p1, %r2, 0;
    selp.b64 %w0, %w0, %w1, %p1; add.u64 %w1, %w1, 128; selp.b64 %w2, %w2, %w1, %p1;
    mov.b32 %f0, {value:#x};
    st.b32 [%w0], {old:#x}; st.b32 [%w2], {old:#x};
    atom.add.f32 %f1, [%w0], %f0;
    red.add.f32 [%w2], %f0;
    mov.b32 %d2, %f1; ld.b32 %d0, [%w0]; ld.b32 %d1, [%w2];
    """
    found = run(body, results=3)
    numbers = np.array(operands, np.uint32).view(np.float32)
    kept = np.add(*numbers).view(np.uint32)
    flushed = np.where(np.abs(numbers) < np.float32(2.0**-126), np.copysign(np.float32(0), numbers), numbers)
    summed = np.add(*flushed).view(np.uint32)
    assert kept != summed
    np.testing.assert_array_equal(found[:2], np.tile(np.where(np.arange(32) % 2, kept, summed), (2, 1)))
    np.testing.assert_array_equal(found[2], old)
