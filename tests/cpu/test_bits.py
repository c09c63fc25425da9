"""Bits and carries: what the table of vectors has no cases for."""

from __future__ import annotations

import numpy as np
import pytest
from one_warp import kernel, run

from drvkit.cpu.fault import ImageError
from drvkit.cpu.program import load

RANDOM = np.random.default_rng()


def test_every_table_of_lop3() -> None:
    given = np.array([[0xF0] * 32, [0xCC] * 32, [0xAA] * 32])  # all eight combinations of three bits
    for first in range(0, 256, 64):
        body = " ".join(f"lop3.b32 %d{n}, %a0, %a1, %a2, {first + n:#x};" for n in range(64))
        found = run(body, given, 64)
        np.testing.assert_array_equal(found[:, 0] & 0xFF, np.arange(first, first + 64))


def test_lop3_gives_a_predicate() -> None:
    given = RANDOM.integers(0, 4, (3, 32), dtype=np.uint32)
    body = """setp.lt.u32 %p0, %lane, 16;
        lop3.and.b32 %d0|%p1, %a0, %a1, %a2, 0x80, %p0;
        lop3.or.b32 _|%p2, %a0, %a1, %a2, 0x80, %p0;
        selp.b32 %d1, 1, 0, %p1; selp.b32 %d2, 1, 0, %p2;"""
    value, both, either = run(body, given, 3)
    expected, first = given[0] & given[1] & given[2], np.arange(32) < 16
    np.testing.assert_array_equal(value, expected)
    np.testing.assert_array_equal(both, (expected != 0) & first)
    np.testing.assert_array_equal(either, (expected != 0) | first)


@pytest.mark.parametrize("mode", ["", ".f4e", ".b4e", ".rc8", ".ecl", ".ecr", ".rc16"])
def test_a_selector_that_is_a_number_does_what_one_in_a_register_does(mode: str) -> None:
    given = RANDOM.integers(0, 1 << 32, (2, 32), dtype=np.uint32)
    for selector in (0x3210, 0x7654, 0x0011, 0x89F4, 0x5142, 2, 3):
        constant, register = run(
            f"prmt.b32{mode} %d0, %a0, %a1, {selector:#x}; add.u32 %r0, %a0, {selector:#x}; sub.u32 %r0, %r0, %a0; "
            f"prmt.b32{mode} %d1, %a0, %a1, %r0;",
            given, 2,
        )  # fmt: skip
        np.testing.assert_array_equal(constant, register)


@pytest.mark.parametrize(
    "opcode", ["vadd4.s32.s32.s32.sat", "vsub4.u32.u32.u32.sat", "vabsdiff4.u32.s32.s32", "vmin4.s32.s32.s32"]
)
def test_four_bytes_at_once(opcode: str) -> None:
    given = RANDOM.integers(0, 1 << 32, (2, 32), dtype=np.uint32)
    (found,) = run(f"{opcode} %d0, %a0, %a1, %a0;", given)
    name, result_type, operand_type = opcode.split(".")[:3]
    a, c = (row.view(np.int8 if operand_type[0] == "s" else np.uint8).astype(int) for row in given)
    exact = {"vadd4": a + c, "vsub4": a - c, "vabsdiff4": np.abs(a - c), "vmin4": np.minimum(a, c)}[name]
    if opcode.endswith("sat"):
        exact = np.clip(exact, -128, 127) if result_type[0] == "s" else np.clip(exact, 0, 255)
    np.testing.assert_array_equal(found, (exact & 0xFF).astype(np.uint8).view(np.uint32))


def test_sums_of_many_words() -> None:
    given = RANDOM.choice(np.array([0, 1, 0xFFFFFFFF, 0x80000000], np.uint32), (8, 32))
    body = " ".join(
        f"{'add' if n == 0 else 'addc'}{'' if n == 3 else '.cc'}.u32 %d{n}, %a{n}, %a{n + 4};" for n in range(4)
    )
    difference = " ".join(
        f"{'sub' if n == 0 else 'subc'}{'' if n == 3 else '.cc'}.u32 %d{n + 4}, %a{n}, %a{n + 4};" for n in range(4)
    )
    found = run(body + difference, given, 8)
    for lane in range(32):
        x, y = (sum(int(given[first + n, lane]) << 32 * n for n in range(4)) for first in (0, 4))
        total, rest = (sum(int(found[first + n, lane]) << 32 * n for n in range(4)) for first in (0, 4))
        assert total == (x + y) % 2**128
        assert rest == (x - y) % 2**128


def test_a_guard_leaves_the_carry_of_other_lanes() -> None:
    ones = np.full((1, 32), 0xFFFFFFFF)
    body = """setp.lt.u32 %p0, %lane, 8; add.cc.u32 %r0, %a0, 1; @%p0 add.cc.u32 %r0, 0, 0; addc.u32 %d0, 0, 0;"""
    (found,) = run(body, ones)
    assert list(found) == [0] * 8 + [1] * 24


def test_a_carry_of_another_block_is_refused() -> None:
    body = """add.cc.u32 %d0, %a0, 1; setp.eq.u32 %p0, %a0, 7; @%p0 bra OVER;
        st.global.u32 [%out], %a0;
        OVER: addc.u32 %d0, 0, 0;"""
    with pytest.raises(ImageError, match=r"addc\.u32 is not supported .*carry"):
        load(kernel(body, 1, 1))


@pytest.mark.parametrize("opcode", ["vadd4.u32.u32.u32.sat.add", "vset4.u32.u32.eq", "vmad.u32.u32.u32"])
def test_what_is_not_done_is_refused_by_name(opcode: str) -> None:
    with pytest.raises(ImageError, match=opcode):
        load(kernel(f"{opcode} %d0, %a0, %a0, %a0;", 1, 1))
