"""Lanes of a warp meet: shuffles, votes, matches, reductions, elections, and who must be there."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from one_warp import Words, kernel, run

from drvkit.cpu.fault import Fault, ImageError
from drvkit.cpu.program import load

LANES = np.arange(32, dtype=np.uint32)
RANDOM = np.random.default_rng()
HALVES = np.where(LANES < 16, 0x0000FFFF, 0xFFFF0000).astype(np.uint32)  # each half of the warp names itself
PREDICATE = "selp.b32 {0}, 1, 0, {1};"


def words(*rows: NDArray[np.generic] | int) -> Words:
    return np.array([np.broadcast_to(np.asarray(row).astype(np.uint32), 32) for row in rows])


def random_words(high: int = 1 << 32) -> Words:
    return RANDOM.integers(0, high, 32, dtype=np.uint32)


# Shuffles


def shuffled(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """The source of a lane, as the ISA's pseudocode has it."""
    bval, cval, mask = b & 31, c & 31, (c >> 8) & 31
    max_lane = (lane & mask) | (cval & ~mask & 31)
    min_lane = lane & mask
    if mode == "up":
        j = lane - bval
        inside = j >= max_lane
    elif mode == "down":
        j = lane + bval
        inside = j <= max_lane
    elif mode == "bfly":
        j = lane ^ bval
        inside = j <= max_lane
    else:
        j = min_lane | (bval & ~mask & 31)
        inside = j <= max_lane
    return (j if inside else lane), inside


def clamp(mode: str, width: int) -> int:
    """Operand c, as __shfl_sync of a width has it."""
    return ((32 - width) << 8) | (0 if mode == "up" else 31)


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shuffle_by_constants_reads_the_lane_of_the_isa(mode: str) -> None:
    cases = [(b, clamp(mode, width)) for b, width in itertools.product((0, 1, 5, 16, 31, 33), (2, 8, 32))]
    cases += [(3, 7), (3, 0x0F13)]  # segments that no width gives
    body = ""
    for number, (b, c) in enumerate(cases):
        body += f"shfl.sync.{mode}.b32 %d{2 * number}|%p1, %a0, {b}, {c}, -1;\n"
        body += PREDICATE.format(f"%d{2 * number + 1}", "%p1")
    value = random_words()
    found = run(body, words(value), 2 * len(cases))
    for number, (b, c) in enumerate(cases):
        expected = [shuffled(mode, lane, b, c) for lane in range(32)]
        np.testing.assert_array_equal(found[2 * number], value[[j for j, _ in expected]])
        np.testing.assert_array_equal(found[2 * number + 1], [inside for _, inside in expected])


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shuffle_by_registers_reads_the_lane_of_the_isa(mode: str) -> None:
    value, b, c = random_words(), random_words(), random_words()
    body = f"shfl.sync.{mode}.b32 %d0|%p1, %a0, %a1, %a2, 0xffffffff;" + PREDICATE.format("%d1", "%p1")
    found = run(body, words(value, b, c), 2)
    expected = [shuffled(mode, lane, int(b[lane]), int(c[lane])) for lane in range(32)]
    np.testing.assert_array_equal(found[0], value[[j for j, _ in expected]])
    np.testing.assert_array_equal(found[1], [inside for _, inside in expected])


def test_shuffle_of_floats_keeps_their_bits() -> None:
    value = random_words()
    found = run("mov.b32 %f1, %a0; shfl.sync.bfly.b32 %f2, %f1, 8, 31, -1; mov.b32 %d0, %f2;", words(value))
    np.testing.assert_array_equal(found[0], value[LANES ^ 8])


def test_halves_of_a_warp_shuffle_on_their_own() -> None:
    value = random_words()
    found = run("shfl.sync.idx.b32 %d0, %a0, 3, 0x101f, %a1;", words(value, HALVES))
    np.testing.assert_array_equal(found[0], value[(LANES & 16) + 3])


def test_shuffle_under_a_guard_needs_its_members_only() -> None:
    value = random_words()
    body = "mov.b32 %d0, 7; setp.lt.u32 %p1, %lane, 8; @%p1 shfl.sync.idx.b32 %d0, %a0, 5, 31, 0xff;"
    np.testing.assert_array_equal(run(body, words(value))[0], np.where(LANES < 8, value[5], 7))


@pytest.mark.parametrize(
    "instruction",
    [
        "shfl.bfly.b32 %d0, %a0, 1, 31;",
        "vote.ballot.b32 %d0, %p1;",
        "redux.sync.add.b32 %d0, %a0, -1;",
        "redux.sync.add.f32 %f1, %f2, -1;",
        "match.sync.any.b32 %d0, %a0, -1;",
    ],
)
def test_what_is_not_known_is_refused_by_name(instruction: str) -> None:
    with pytest.raises(ImageError, match=instruction.split()[0]):
        load(kernel(instruction, 1, 1))


# Votes


@pytest.mark.parametrize("members", [0xFFFFFFFF, 0x00FF0F01])
@pytest.mark.parametrize("votes", [0, 0xFFFFFFFF, 0x00FF0F01, 0x8000_0100, 0x7FFFFFFE])
def test_votes_count_members_that_run(members: int, votes: int) -> None:
    body = f"""
    setp.ne.u32 %p1, %a0, 0; shr.u32 %r1, {members}, %lane; and.b32 %r1, %r1, 1; setp.ne.u32 %p2, %r1, 0;
    mov.b32 %d0, 9; mov.b32 %d1, 9; mov.b32 %d2, 9; mov.b32 %d3, 9; mov.b32 %d4, 9; mov.b32 %d5, 9;
    @!%p2 bra DONE;
    vote.sync.all.pred %p3, %p1, {members};
    vote.sync.any.pred %p4, %p1, {members};
    vote.sync.uni.pred %p5, %p1, {members};
    vote.sync.ballot.b32 %d3, %p1, {members};
    vote.sync.ballot.b32 %d4, !%p1, {members};
    vote.sync.all.pred %p6, !%p1, {members};
    selp.b32 %d0, 1, 0, %p3; selp.b32 %d1, 1, 0, %p4; selp.b32 %d2, 1, 0, %p5; selp.b32 %d5, 1, 0, %p6;
    DONE:
    """
    found = run(body, words((votes >> LANES) & 1), 6)
    given = votes & members
    expected = [given == members, given != 0, given in (0, members), given, members & ~votes, given == 0]
    takes_part = (members >> LANES) & 1 == 1
    for row, result in zip(found, expected, strict=True):
        np.testing.assert_array_equal(row, np.where(takes_part, int(result), 9))


def test_halves_of_a_warp_vote_on_their_own() -> None:
    votes = 0xFFFF0100
    body = "setp.ne.u32 %p1, %a0, 0; vote.sync.ballot.b32 %d0, %p1, %a1; vote.sync.all.pred %p2, %p1, %a1;"
    found = run(body + PREDICATE.format("%d1", "%p2"), words((votes >> LANES) & 1, HALVES), 2)
    np.testing.assert_array_equal(found[0], votes & HALVES)
    np.testing.assert_array_equal(found[1], LANES >= 16)


def test_lanes_that_have_ended_are_absent() -> None:
    body = """
    mov.b32 %d0, 0; mov.b32 %d1, 0; mov.b32 %d2, 0;
    setp.ge.u32 %p1, %lane, 20;
    @%p1 exit;
    vote.sync.ballot.b32 %d0, 1, -1;
    vote.sync.all.pred %p2, 1, -1;
    selp.b32 %d1, 1, 0, %p2;
    redux.sync.add.u32 %d2, 1, -1;
    """
    found = run(body, results=3)
    np.testing.assert_array_equal(found[0, :20], (1 << 20) - 1)
    np.testing.assert_array_equal(found[1, :20], 1)
    np.testing.assert_array_equal(found[2, :20], 20)


@pytest.mark.parametrize("negated", [False, True])
@pytest.mark.parametrize("barrier", ["", "bar.warp.sync -1;", "bar.sync 0;"])
def test_lanes_that_have_returned_early_are_absent(barrier: str, negated: bool) -> None:
    test, guard = ("lt", "!%p1") if negated else ("ge", "%p1")
    body = f"""
    setp.{test}.u32 %p1, %lane, 20; @{guard} bra END;
    {barrier}
    vote.sync.ballot.b32 %d0, 1, -1;
    st.global.u32 [%out], %d0;
    END: ret;
    """
    found = run(body)
    np.testing.assert_array_equal(found[0], np.where(LANES < 20, (1 << 20) - 1, 0xEEEEEEEE))


@pytest.mark.parametrize("leave", ["@%p1 bra END;", "@!%p1 bra MORE; bra END; MORE:", "@!%p1 bra MORE; ret; MORE:"])
def test_lanes_that_return_in_a_loop_are_absent(leave: str) -> None:
    body = f"""
    mov.b32 %r0, 20;
    AGAIN: setp.ge.u32 %p1, %lane, %r0;
    {leave}
    bar.sync 0; vote.sync.ballot.b32 %d0, 1, -1; st.global.u32 [%out], %d0;
    sub.u32 %r0, %r0, 1; setp.ne.u32 %p2, %r0, 0; @%p2 bra AGAIN;
    END: ret;
    """
    expected = np.where(LANES < 20, (2 << LANES) - 1, 0xEEEEEEEE)
    np.testing.assert_array_equal(run(body)[0], expected)


@pytest.mark.parametrize("first", ["@%p1 bra LEAVE;", "@!%p1 bra STAY; bra LEAVE;"])
def test_lanes_that_vote_before_they_return_are_absent(first: str) -> None:
    body = f"""
    setp.ge.u32 %p1, %lane, 20;
    {first}
    STAY: bar.sync 0; vote.sync.ballot.b32 %d0, 1, -1; st.global.u32 [%out], %d0; ret;
    LEAVE: vote.sync.ballot.b32 %d0, 1, 0xfff00000; st.global.u32 [%out], %d0; ret;
    """
    np.testing.assert_array_equal(run(body)[0], np.where(LANES < 20, (1 << 20) - 1, 0xFFF00000))


def test_lanes_that_return_by_a_table_are_absent() -> None:
    body = """
    setp.ge.u32 %p1, %lane, 20; selp.b32 %r0, 1, 0, %p1;
    TABLE: .branchtargets STAY, END;
    brx.idx %r0, TABLE;
    STAY: bar.sync 0; vote.sync.ballot.b32 %d0, 1, -1; st.global.u32 [%out], %d0;
    END: ret;
    """
    np.testing.assert_array_equal(run(body)[0], np.where(LANES < 20, (1 << 20) - 1, 0xEEEEEEEE))


def test_a_trap_in_a_loop_is_told_before_others_wait_for_its_lanes() -> None:
    body = """
    mov.b32 %r0, 3;
    AGAIN: add.u32 %r1, %lane, %r0;
    setp.ne.u32 %p1, %r1, 9; @%p1 bra GOOD;
    st.global.u32 [%out], 7; trap;
    GOOD: vote.sync.ballot.b32 %d0, 1, -1;
    sub.u32 %r0, %r0, 1; setp.ne.u32 %p2, %r0, 0; @%p2 bra AGAIN;
    ret;
    """
    with pytest.raises(Fault, match=r"thread \(6, 0, 0\): the kernel gave up"):
        run(body)


@pytest.mark.parametrize("mode", ["checked", "explored"])
def test_lanes_that_return_after_a_store_are_absent(mode: str) -> None:
    """Those of two branches that go to one store, and then from there to a ``ret`` that they share with the others."""
    body = """
    setp.ge.u32 %p1, %lane, 25; setp.ge.u32 %p2, %lane, 20;
    @%p1 bra LEAVE; bra MORE;
    MORE: @!%p2 bra STAY;
    LEAVE: st.volatile.global.u32 [%out], 7; bra END;
    STAY: bar.sync 0; vote.sync.ballot.b32 %d0, 1, -1; st.volatile.global.u32 [%out], %d0;
    END: ret;
    """
    found = run(body, mode=mode)[0]
    if mode == "checked":  # else the stores are still on their way
        np.testing.assert_array_equal(found, np.where(LANES < 20, (1 << 20) - 1, 7))


def test_lanes_that_a_block_does_not_have_are_absent() -> None:
    found = run("vote.sync.ballot.b32 %d0, 1, -1; activemask.b32 %d1;", results=2, threads=12)
    np.testing.assert_array_equal(found, (1 << 12) - 1)


def test_activemask_is_who_runs_here() -> None:
    body = """
    mov.b32 %d0, 0; activemask.b32 %d0;
    setp.lt.u32 %p1, %lane, 5; mov.b32 %d1, 77; @%p1 activemask.b32 %d1;
    setp.gt.u32 %p2, %lane, 9; @%p2 bra OTHER;
    activemask.b32 %d2; bra DONE; OTHER: activemask.b32 %d2; DONE:
    """
    found = run(body, results=3)
    np.testing.assert_array_equal(found[0], 0xFFFFFFFF)
    np.testing.assert_array_equal(found[1], np.where(LANES < 5, 31, 77))
    np.testing.assert_array_equal(found[2], np.where(LANES > 9, 0xFFFFFC00, 0x3FF))


# Matches


@pytest.mark.parametrize("members", ["everybody", "halves"])
@pytest.mark.parametrize("bits", [32, 64])
def test_match_any_names_the_lanes_with_the_same_value(bits: int, members: str) -> None:
    mask = HALVES if members == "halves" else np.full(32, 0xFFFFFFFF, np.uint32)
    low, high = random_words(4), random_words(2)
    body = "mov.b64 %w1, {%a0, %a1}; match.any.sync.b64 %d0, %w1, %a2;"
    if bits == 32:
        body, high = "match.any.sync.b32 %d0, %a0, %a2;", np.zeros(32, np.uint32)
    found = run(body, words(low, high, mask))
    same = (low[:, None] == low) & (high[:, None] == high)
    expected = (same << LANES.astype(np.uint64)).sum(axis=1).astype(np.uint32) & mask
    np.testing.assert_array_equal(found[0], expected)


def test_match_all_holds_where_all_members_agree() -> None:
    value = np.where(LANES < 16, LANES == 3, 5)
    body = "match.all.sync.b32 %d0|%p1, %a0, %a1; selp.b32 %d1, 1, 0, %p1; match.all.sync.b32 %d2, %a0, -1;"
    found = run(body, words(value, HALVES), 3)
    np.testing.assert_array_equal(found[0], np.where(LANES < 16, 0, 0xFFFF0000))
    np.testing.assert_array_equal(found[1], LANES >= 16)
    np.testing.assert_array_equal(found[2], 0)
    np.testing.assert_array_equal(run(body, words(7, HALVES), 3)[2], 0xFFFFFFFF)


# Reductions

REDUCTIONS: dict[str, Callable[[Words], np.uint32]] = {
    "add.u32": lambda x: x.sum(dtype=np.uint32),
    "add.s32": lambda x: x.sum(dtype=np.uint32),
    "min.u32": lambda x: x.min(),
    "max.u32": lambda x: x.max(),
    "min.s32": lambda x: x.view(np.int32).min().view(np.uint32),
    "max.s32": lambda x: x.view(np.int32).max().view(np.uint32),
    "and.b32": np.bitwise_and.reduce,
    "or.b32": np.bitwise_or.reduce,
    "xor.b32": np.bitwise_xor.reduce,
}


@pytest.mark.parametrize("operation", REDUCTIONS)
def test_redux_reduces_over_the_members(operation: str) -> None:
    value = random_words()
    value[3] |= 0xFFFF0000  # so that neither "and" nor "or" is trivial
    body = f"redux.sync.{operation} %d0, %a0, -1; redux.sync.{operation} %d1, %a0, %a1;"
    found = run(body, words(value | 0x1000, HALVES), 2)
    reduce = REDUCTIONS[operation]
    given = value | np.uint32(0x1000)
    np.testing.assert_array_equal(found[0], reduce(given))
    np.testing.assert_array_equal(found[1], np.where(LANES < 16, reduce(given[:16]), reduce(given[16:])))


NAN = 0x7FFFFFFF


@pytest.mark.parametrize(
    ("modifiers", "given", "expected"),
    [
        ("min", [1.5, -2.0, np.nan, 3.0], -2.0),
        ("max", [1.5, -2.0, np.nan, 3.0], 3.0),
        ("min.NaN", [1.5, -2.0, np.nan, 3.0], NAN),
        ("max.NaN", [1.5, -2.0, 2.0, 3.0], 3.0),
        ("max.abs", [1.5, -8.0, np.nan, 3.0], 8.0),
        ("min.abs.NaN", [1.5, -8.0, 0.25, 3.0], 0.25),
        ("min", [0.0, -0.0, 0.0, 1.0], -0.0),
        ("max", [-0.0, 0.0, -0.0, -1.0], 0.0),
        ("max", [-np.inf, -1e-45, -1.0, -np.inf], -1e-45),
        ("min", [np.nan] * 4, NAN),
        ("max", [-np.nan] * 4, NAN),
    ],
)
@pytest.mark.parametrize("mask", ["-1", "%a1"])
def test_redux_of_floats(modifiers: str, given: list[float], expected: float, mask: str) -> None:
    values = np.tile(np.array(given, np.float32), 8).view(np.uint32)
    body = f"mov.b32 %f1, %a0; redux.sync.{modifiers}.f32 %f2, %f1, {mask}; mov.b32 %d0, %f2;"
    bits = expected if isinstance(expected, int) else np.float32(expected).view(np.uint32)
    np.testing.assert_array_equal(run(body, words(values, HALVES))[0], bits)


# Elections


def test_elect_chooses_one_lane_of_each_group() -> None:
    body = "elect.sync %d0|%p1, %a0; selp.b32 %d1, 1, 0, %p1; elect.sync _|%p2, -1; selp.b32 %d2, 1, 0, %p2;"
    found = run(body, words(HALVES), 3)
    np.testing.assert_array_equal(found[0], np.where(LANES < 16, 0, 16))
    np.testing.assert_array_equal(found[1], LANES % 16 == 0)
    np.testing.assert_array_equal(found[2], LANES == 0)


# Who must be there


@pytest.mark.parametrize(
    "instruction",
    [
        "shfl.sync.bfly.b32 %d0, %lane, 1, 31, -1;",
        "vote.sync.ballot.b32 %d0, 1, 0xffff;",
        "vote.sync.ballot.b32 %d0, 1, %r1;",
        "bar.warp.sync 0xffffffff;",
        "barrier.warp.sync %r1;",
        "redux.sync.add.u32 %d0, %lane, -1;",
        "movmatrix.sync.aligned.m8n8.trans.b16 %d0, %lane;",
    ],
)
def test_a_member_that_is_elsewhere_is_a_fault(instruction: str) -> None:
    body = f"""
    mov.b32 %d0, 0; mov.b32 %d1, 0; or.b32 %r1, %lane, -1;
    setp.lt.u32 %p1, %lane, 8;
    @%p1 bra SOME;
    add.u32 %d1, %d1, 2; bra DONE;
    SOME: {instruction}
    DONE:
    """
    with pytest.raises(Fault, match=rf"{instruction.split()[0]}.*elsewhere: lanes 8-(15|31) ") as told:
        run(body, results=2)
    assert ("at PTX line 29 (st.global.b32)" in str(told.value)) == ("bar" not in instruction)
    assert ("ended" in str(told.value)) == ("bar" in instruction)


@pytest.mark.parametrize("instruction", ["shfl.sync.bfly.b32 %d0, %lane, 1, 31, 0xfffffffd;", "bar.warp.sync ~2;"])
def test_a_lane_outside_of_its_own_mask_is_a_fault(instruction: str) -> None:
    with pytest.raises(Fault, match=r"\(1, 0, 0\): it is not in its own mask, which names lanes 0, 2-31$"):
        run(instruction.replace("~2", "0xfffffffd"), results=0)


def test_an_aligned_instruction_needs_lanes_that_have_ended_too() -> None:
    body = "setp.eq.u32 %p1, %lane, 31; @%p1 exit; movmatrix.sync.aligned.m8n8.trans.b16 %d0, %lane;"
    with pytest.raises(Fault, match=r"movmatrix.*elsewhere"):
        run(body)


@pytest.mark.parametrize(
    ("first", "second", "others"),
    [
        ("elect.sync %d0|%p2, -1;", "elect.sync %d0|%p2, -1;", "0-7 at PTX line 24 (elect.sync)"),
        (
            "vote.sync.ballot.b32 %d0, 1, -1;",
            "bar.warp.sync -1;",
            "8-31 at PTX line 26 (bar.warp.sync), where they wait for lanes 0-31",
        ),
        ("bar.warp.sync -1;", "vote.sync.ballot.b32 %d0, 1, -1;", "0-7 at PTX line 24 (bar.warp.sync)"),
        (
            "bar.warp.sync -1;",
            "bar.warp.sync 0xffffff01;",
            "8-31 at PTX line 26 (bar.warp.sync), where they wait for lanes 0, 8-31",
        ),
    ],
)
def test_a_fault_says_where_the_others_are(first: str, second: str, others: str) -> None:
    body = f"""
    mov.b32 %d0, 0; setp.lt.u32 %p1, %lane, 8; @%p1 bra SOME; bra OTHERS;
    SOME:
    {first}
    bra DONE; OTHERS:
    {second}
    DONE:
    """
    with pytest.raises(Fault) as told:
        run(body)
    assert str(told.value).endswith(f": lanes that its mask names are elsewhere: lanes {others}")


# Barriers of a warp: by mask, wherever the lanes wait

EXCHANGED = "shl.b32 %r9, %lane, 2; mov.u32 %r8, tile; add.u32 %r9, %r9, %r8; xor.b32 %r7, %r9, 64;"


@pytest.mark.parametrize("mask", ["-1", "0xffffffff", "%a0"])
@pytest.mark.parametrize("before", ["", "ld.volatile.global.u32 %r5, [%out];"])
def test_lanes_meet_at_two_barriers(mask: str, before: str) -> None:
    """Halves of a warp exchange what they have stored before a barrier, each with its own copy of it."""
    body = f"""
    {EXCHANGED}
    setp.lt.u32 %p1, %lane, 16; @%p1 bra LOW;
    add.u32 %r1, %lane, 100; st.shared.u32 [%r9], %r1;
    barrier.warp.sync {mask};
    ld.shared.u32 %d0, [%r7]; add.u32 %d0, %d0, %r1; bra DONE;
    LOW: {before} add.u32 %r1, %lane, 200; st.shared.u32 [%r9], %r1;
    bar.warp.sync {mask};
    ld.shared.u32 %d0, [%r7]; add.u32 %d0, %d0, %r1;
    DONE: bar.warp.sync {mask}; shfl.sync.bfly.b32 %d1, %d0, 1, 31, -1;
    """
    found = run(body, words(0xFFFFFFFF), 2)
    expected = LANES + (LANES ^ 16) + 300
    np.testing.assert_array_equal(found, [expected, expected[LANES ^ 1]])


def test_a_barrier_waits_for_lanes_that_go_round_more_often() -> None:
    """Lanes wait at one barrier of two, in one round or another; those that wait for others wait apart."""
    body = """
    mov.b32 %r1, 0; mov.b32 %d0, 0;
    and.b32 %r2, %lane, 3;
    ROUND: setp.lt.u32 %p1, %r1, %r2; add.u32 %r1, %r1, 1; @%p1 bra ROUND;
    atom.shared.add.u32 %r3, [tile], 1;
    and.b32 %r4, %lane, 1; setp.eq.u32 %p2, %r4, 0; @%p2 bra EVEN;
    bar.warp.sync 0xaaaaaaaa; ld.shared.u32 %d0, [tile+4]; bar.warp.sync -1; bra DONE;
    EVEN: setp.eq.u32 %p3, %r2, 0; @%p3 bra FOURTH;
    bar.warp.sync 0x44444444; bar.warp.sync -1; bra DONE;
    FOURTH: bar.warp.sync 0x11111111; bar.warp.sync -1;
    DONE: ld.shared.u32 %d0, [tile];
    """
    body = f"setp.eq.u32 %p4, %lane, 0; @%p4 st.shared.v2.u32 [tile], {{0, 0}}; bar.warp.sync -1; {body}"
    np.testing.assert_array_equal(run(body)[0], 32)


def test_a_group_that_waits_lets_others_poll_for_what_it_does_next() -> None:
    """The low half waits at two barriers; the high half polls until lane 3 has stored, after its barrier."""
    body = """
    st.shared.u32 [tile], 0; bar.warp.sync -1;
    setp.ge.u32 %p1, %lane, 16; @%p1 bra HIGH;
    setp.ge.u32 %p2, %lane, 8; @%p2 bra MIDDLE;
    bar.warp.sync 0xffff; setp.eq.u32 %p3, %lane, 3; @%p3 st.volatile.shared.u32 [tile], 7; bra DONE;
    HIGH: ld.volatile.shared.u32 %r1, [tile]; setp.eq.u32 %p4, %r1, 0; @%p4 bra HIGH; bra DONE;
    MIDDLE: ld.volatile.shared.u32 %r2, [tile]; bar.warp.sync 0xffff;
    DONE: vote.sync.ballot.b32 %d0, 1, -1;
    ld.shared.u32 %d1, [tile];
    """
    np.testing.assert_array_equal(run(body, results=2), [[0xFFFFFFFF] * 32, [7] * 32])


def test_lanes_come_to_a_shuffle_from_a_barrier_that_waits_for_others() -> None:
    body = """
    setp.lt.u32 %p1, %lane, 8; @%p1 bra FIRST;
    setp.lt.u32 %p2, %lane, 16; @%p2 bra SECOND;
    bar.warp.sync 0xffffff00; bra MEET;
    SECOND: bar.warp.sync 0xffffff00;
    FIRST: MEET: shfl.sync.idx.b32 %d0, %lane, 17, 31, -1;
    """
    np.testing.assert_array_equal(run(body)[0], 17)


def test_lanes_that_have_ended_are_not_waited_for_at_a_barrier() -> None:
    body = """
    setp.ge.u32 %p1, %lane, 20; @%p1 exit;
    setp.ge.u32 %p2, %lane, 10; @%p2 bra OTHERS;
    bar.warp.sync -1; mov.b32 %d0, 1; bra DONE;
    OTHERS: bar.warp.sync -1; mov.b32 %d0, 2;
    DONE:
    """
    np.testing.assert_array_equal(run(body)[0, :20], [1] * 10 + [2] * 10)


def test_members_wait_for_a_lane_that_polls() -> None:
    body = """
    mov.u64 %w1, tile; cvta.shared.u64 %w1, %w1;
    mov.b32 %r1, 0;
    st.shared.u32 [tile], %r1;
    bar.warp.sync -1;
    setp.ne.u32 %p1, %lane, 0;
    @%p1 bra OTHERS;
    POLL: ld.volatile.shared.u32 %r2, [tile]; setp.eq.u32 %p2, %r2, 0; @%p2 bra POLL;
    bra MEET;
    OTHERS: setp.ne.u32 %p3, %lane, 1; @%p3 bra MEET;
    mov.b32 %r3, 5; st.volatile.shared.u32 [tile], %r3;
    MEET: add.u32 %r4, %lane, 100;
    shfl.sync.idx.b32 %d0, %r4, 0, 31, -1;
    vote.sync.ballot.b32 %d1, 1, -1;
    """
    found = run(body, results=2)
    np.testing.assert_array_equal(found, [[100] * 32, [0xFFFFFFFF] * 32])


@pytest.mark.parametrize("between", ["", "ld.volatile.shared.u32 %r5, [tile];", "bar.warp.sync 0x55555555;"])
def test_lanes_that_go_round_a_loop_in_two_places_meet_again_at_its_head(between: str) -> None:
    body = f"""
    st.shared.u32 [tile], %lane;
    and.b32 %r1, %lane, 1; setp.ne.u32 %p1, %r1, 0;
    mov.b32 %r2, 0; mov.b32 %d0, 0;
    ROUND: add.u32 %r2, %r2, 1;
    shfl.sync.idx.b32 %r3, %lane, 3, 31, -1;
    add.u32 %d0, %d0, %r3;
    setp.ge.u32 %p2, %r2, 4; @%p2 bra LEFT;
    @%p1 bra ROUND;
    add.u32 %d0, %d0, 100; {between}
    bra ROUND;
    LEFT:
    """
    np.testing.assert_array_equal(run(body)[0], [312, 12] * 16)


def test_members_wait_for_a_lane_that_polls_further_on_in_the_loop() -> None:
    """Lane 0 waits in its first round for what lane 1 stores in its second, before all meet."""
    body = """
    mov.b32 %r1, 0; st.shared.u32 [tile], %r1; mov.b32 %d0, 0;
    bar.warp.sync -1;
    ROUND: setp.eq.u32 %p1, %lane, 1; @%p1 st.volatile.shared.u32 [tile], %r1;
    shfl.sync.idx.b32 %r3, %r1, 5, 31, -1;
    add.u32 %d0, %d0, %r3;
    setp.ne.u32 %p2, %lane, 0; @%p2 bra NEXT;
    setp.ne.u32 %p2, %r1, 0; @%p2 bra NEXT;
    POLL: ld.volatile.shared.u32 %r2, [tile]; setp.lt.u32 %p3, %r2, 1; @%p3 bra POLL;
    NEXT: add.u32 %r1, %r1, 1; setp.lt.u32 %p4, %r1, 3; @%p4 bra ROUND;
    """
    np.testing.assert_array_equal(run(body)[0], [0 + 1 + 2] * 32)


@pytest.mark.parametrize("order", ["abs", "bas", "sab", "asb"])
def test_lanes_that_poll_in_two_loops_let_a_third_group_go_on(order: str) -> None:
    blocks = {
        "a": "A: ld.volatile.shared.u32 %r3, [tile]; setp.eq.u32 %p3, %r3, 0; @%p3 bra A; bra MEET;",
        "b": "B: ld.volatile.shared.u32 %r4, [tile+4]; setp.eq.u32 %p4, %r4, 0; @%p4 bra B; bra MEET;",
        "s": "S: st.volatile.shared.u32 [tile], 1; st.volatile.shared.u32 [tile+4], 1; bra MEET;",
    }
    conditions = {"a": 0, "b": 1, "s": 2}
    branches = [f"setp.eq.u32 %p1, %r0, {conditions[each]}; @%p1 bra {each.upper()};" for each in order]
    body = f"""
    st.shared.u32 [tile], 0; st.shared.u32 [tile+4], 0;
    bar.warp.sync -1;
    rem.u32 %r0, %lane, 3;
    {" ".join(branches)} bra MEET;
    {" ".join(blocks[each] for each in order)}
    MEET: bar.warp.sync -1;
    ld.shared.u32 %d0, [tile+4];
    """
    np.testing.assert_array_equal(run(body)[0], [1] * 32)
