"""Memory, where the table of vectors does not reach: generic addresses, and accesses that are not looked at."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray
from one_warp import run

from drvkit.cpu.memory import memory

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
