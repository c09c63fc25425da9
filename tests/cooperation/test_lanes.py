"""Lanes of a warp: where they meet, and what they find out of each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cooperation import Kernels, RandomWords, Words, blank, equal, kernels
from numpy.typing import NDArray

# ---- lanes of a warp -------------------------------------------------------------------------------------------------

LANES = r"""
// Lanes of one part of a warp exchange through memory, `rounds` times.
__device__ u32 exchanged(u32* slots, u32 value, u32 first, u32 size, int rounds, u32 factor) {
  const u32 members = (size == 32 ? ~0u : (1u << size) - 1) << first, me = lane_id() - first;
#pragma unroll 1
  for (int r = 0; r < rounds; ++r) {
    slots[lane_id()] = value;
    __syncwarp(members);
    value = factor * value + slots[first + (me + r + 1) % size];
    __syncwarp(members);
  }
  return value;
}

// Two parts, each in a branch of its own, with as many rounds as its size.
__global__ void parts(const u32* x, u32* y, u32 cut) {
  extern __shared__ u32 memory[];
  u32* const slots = memory + threadIdx.x / 32 * 32;
  u32 value = x[thread()];
  if (lane_id() < cut) value = exchanged(slots, value, 0, cut, cut, 3);
  else value = exchanged(slots, value, cut, 32 - cut, 32 - cut, 5);
  __syncwarp();
  slots[lane_id()] = value;
  __syncwarp();
  y[thread()] = value + slots[31 - lane_id()];
}

// Four parts of eight lanes, each in a case of its own.
__global__ void cases(const u32* x, u32* y) {
  extern __shared__ u32 memory[];
  u32* const slots = memory + threadIdx.x / 32 * 32;
  u32 value = x[thread()];
  switch (lane_id() / 8) {
    case 0: value = exchanged(slots, value, 0, 8, 1, 3); break;
    case 1: value = exchanged(slots, value, 8, 8, 2, 5); break;
    case 2: value = exchanged(slots, value, 16, 8, 3, 7); break;
    default: value = exchanged(slots, value, 24, 8, 4, 9);
  }
  y[thread()] = value;
}

// Those that `members` names elect one of them, twice: who it is, and whether it is this lane.
__global__ void elected(const u32* members, u32* y) {
  const u32 mask = members[thread() / 32];
  if (~mask >> lane_id() & 1) return;
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    u32 who, me;
    asm volatile("{ .reg .pred p; elect.sync %0|p, %2; selp.u32 %1, 1, 0, p; }" : "=r"(who), "=r"(me) : "r"(mask));
    y[4 * thread() + 2 * i] = who;
    y[4 * thread() + 2 * i + 1] = me;
  }
}

// Lanes that have one key make a group, in which they reduce: seven answers each.
__global__ void reduce_groups(const u32* keys, const u32* x, u32* y) {
  const u32 key = keys[thread()], value = x[thread()];
  const u32 group = __match_any_sync(~0u, key);
  u32* const to = y + 8 * thread();
  to[0] = group;
  to[1] = __reduce_add_sync(group, value);
  to[2] = __reduce_min_sync(group, value);
  to[3] = static_cast<u32>(__reduce_max_sync(group, static_cast<int>(value)));
  to[4] = __reduce_and_sync(group, value);
  to[5] = __reduce_or_sync(group, value);
  to[6] = __reduce_xor_sync(group, value);
  to[7] = __popc(__match_any_sync(group, u64(value & 3) << 40));
}

// What lanes agree on, of those that `members` names.
__global__ void agree(const u32* members, const u32* x, u32* y) {
  const u32 mask = members[thread() / 32], value = x[thread()];
  if (~mask >> lane_id() & 1) return;
  int same;
  u32* const to = y + 6 * thread();
  to[0] = __match_all_sync(mask, value, &same);
  to[1] = same;
  to[2] = __ballot_sync(mask, value & 1);
  to[3] = __all_sync(mask, value & 1) + 2 * __any_sync(mask, value & 1) + 4 * __uni_sync(mask, value & 1);
  to[4] = __shfl_sync(mask, value, __ffs(mask) - 1);
  to[5] = __match_any_sync(mask, value);
}

// Who is active in each branch.
__global__ void active(const u32* x, u32* y) {
  u32 before = __activemask(), mask;
  if (x[thread()] & 1) mask = __activemask();
  else mask = ~__activemask();
  y[2 * thread()] = before;
  y[2 * thread() + 1] = mask;
}

// Lanes go round as often as each wants: in each round those that are left vote, shuffle and add up.
__global__ void go_round(const u32* trips, const u32* x, u32* y) {
  u32 left = trips[thread()], value = x[thread()], log = 0;
  u32 members = __ballot_sync(~0u, left > 0);
  if (left)
#pragma unroll 1  // else some lanes are in one copy of the loop and some in another
    while (true) {
      const u32 neighbour = __shfl_sync(members, value, __fns(members, lane_id(), 2) & 31);
      value = 3 * value + (lane_id() == 31 - __clz(members) ? 1 : neighbour);
      log = 7 * log + __popc(members) + __reduce_max_sync(members, value & 0xffff);
      --left;
      members = __ballot_sync(members, left > 0);
      if (!left) break;
    }
  __syncwarp();
  y[2 * thread()] = value + __shfl_xor_sync(~0u, value, 5);
  y[2 * thread() + 1] = log;
}

// Times as a thread reads them, with naps between, until the clock has gone on.
__global__ void clocks(u64* y, int count) {
  u64* const to = y + 2 * count * thread();
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    to[2 * i] = now();
    to[2 * i + 1] = clock64();
    __nanosleep(20 * (threadIdx.x % 3));
    if (i + 2 == count) until([&] { return now() > to[0] && clock64() > to[1]; });
  }
}
"""


def exchange_parts(x: Words, rounds: int, factor: int) -> Words:
    for r in range(rounds):
        x = np.uint32(factor) * x + np.roll(x, -(r + 1), axis=-1)
    return x


def truths(masks: Words) -> NDArray[np.bool_]:
    """The bits of masks as lanes."""
    lanes: NDArray[np.bool_] = (masks[..., None] >> np.arange(32, dtype=np.uint32) & 1).astype(bool)
    return lanes


def mask_of(lanes: NDArray[Any]) -> Words:
    """The other way."""
    masks: Words = (lanes.astype(np.uint32) << np.arange(32, dtype=np.uint32)).sum(axis=-1, dtype=np.uint32)
    return masks


@kernels("lanes", LANES)
@pytest.mark.parametrize("cut", [1, 7, 16, 31])
@pytest.mark.parametrize("shape", [(1, 1), (2, 3)], ids=str)
def test_parts_of_a_warp_meet_in_branches(run: Kernels, words: RandomWords, shape: tuple[int, int], cut: int) -> None:
    blocks, warps = shape
    x = words(blocks, warps, 32)
    how = {"grid": blocks, "block": 32 * warps, "shared_mem_bytes": 128 * warps}
    _, found = run("parts", x, blank(*x.shape), cut, **how)
    low, high = exchange_parts(x[..., :cut], cut, 3), exchange_parts(x[..., cut:], 32 - cut, 5)
    want = np.concatenate([low, high], axis=-1)
    equal(found, want + want[..., ::-1])


@kernels("lanes", LANES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 4)], ids=str)
def test_four_parts_of_a_warp_meet_in_cases(run: Kernels, words: RandomWords, shape: tuple[int, int]) -> None:
    blocks, warps = shape
    x = words(blocks, warps, 32)
    how = {"grid": blocks, "block": 32 * warps, "shared_mem_bytes": 128 * warps}
    _, found = run("cases", x, blank(*x.shape), **how)
    quarters = [exchange_parts(x[..., 8 * q : 8 * q + 8], q + 1, 3 + 2 * q) for q in range(4)]
    equal(found, np.concatenate(quarters, axis=-1))


def some_members(rng: np.random.Generator, warps: int) -> Words:
    masks = rng.integers(1, 1 << 32, warps, np.uint32)
    masks[:3] = 0xFFFFFFFF, 1 << rng.integers(32), 0xFFFF0000
    return masks


@kernels("lanes", LANES)
@pytest.mark.parametrize("shape", [(1, 4), (5, 8)], ids=str)
def test_members_elect_one_of_them(run: Kernels, rng: np.random.Generator, shape: tuple[int, int]) -> None:
    blocks, warps = shape
    masks = some_members(rng, blocks * warps)
    _, found = run("elected", masks, blank(len(masks), 32, 4), grid=blocks, block=32 * warps)
    for mask, answers in zip(truths(masks), found, strict=True):
        leader = answers[mask][0, 0]
        assert mask[leader]
        equal(answers[mask][:, 0::2], leader)
        equal(answers[mask][:, 1::2], (np.flatnonzero(mask) == leader)[:, None].repeat(2, axis=1))
        equal(answers[~mask], blank(int((~mask).sum()), 4))


@kernels("lanes", LANES)
@pytest.mark.parametrize("kinds", [1, 2, 5, 32])
@pytest.mark.parametrize("shape", [(1, 1), (3, 4)], ids=str)
def test_groups_of_one_key_reduce(
    run: Kernels, rng: np.random.Generator, words: RandomWords, shape: tuple[int, int], kinds: int
) -> None:
    blocks, warps = shape
    keys = words(kinds)[rng.integers(0, kinds, (blocks * warps, 32))]
    x = words(*keys.shape)
    found = run("reduce_groups", keys, x, blank(*keys.shape, 8), grid=blocks, block=32 * warps)[2]
    want = np.zeros_like(found)
    for w, lane in np.ndindex(*keys.shape):
        group = keys[w] == keys[w, lane]
        row = x[w][group]
        want[w, lane] = [
            mask_of(group), row.sum(dtype=np.uint32), row.min(), row.view(np.int32).max().astype(np.uint32),
            np.bitwise_and.reduce(row), np.bitwise_or.reduce(row), np.bitwise_xor.reduce(row),
            (row & 3 == x[w, lane] & 3).sum(),
        ]  # fmt: skip
    equal(found, want)


@kernels("lanes", LANES)
@pytest.mark.parametrize("kinds", [1, 2, 1 << 32])
@pytest.mark.parametrize("shape", [(1, 4), (4, 8)], ids=str)
def test_members_agree(run: Kernels, rng: np.random.Generator, shape: tuple[int, int], kinds: int) -> None:
    blocks, warps = shape
    masks = some_members(rng, blocks * warps)
    x = rng.integers(0, 1 << 32, (len(masks), 32), np.uint32) % np.uint64(kinds)
    x = (x + rng.integers(0, 2, (len(masks), 1), np.uint64)).astype(np.uint32)
    found = run("agree", masks, x, blank(*x.shape, 6), grid=blocks, block=32 * warps)[2]
    for mask, members, row, answers in zip(masks, truths(masks), x, found, strict=True):
        values, odd = row[members], (row & 1 == 1) & members
        same = bool((values == values[0]).all())
        votes = int(odd.sum() == members.sum()) + 2 * int(odd.any()) + 4 * int(odd.sum() in (0, members.sum()))
        equal(answers[members][:, :5], [[mask if same else 0, same, mask_of(odd), votes, values[0]]] * len(values))
        equal(answers[members][:, 5], [mask_of((row == value) & members) for value in values])


@kernels("lanes", LANES)
@pytest.mark.parametrize("shape", [(1, 32), (3, 96), (2, 40)], ids=str)
def test_the_active_lanes_of_a_branch_are_in_it(run: Kernels, words: RandomWords, shape: tuple[int, int]) -> None:
    blocks, threads = shape
    x = words(*shape)
    _, found = run("active", x, blank(*shape, 2), grid=blocks, block=threads)
    padded = np.zeros((blocks, -(-threads // 32) * 32), bool)
    for odd in (False, True):
        padded[:, :threads] = (x & 1 == 1) == odd
        branch = mask_of(padded.reshape(blocks, -1, 32)).repeat(32, axis=1)[:, :threads]
        lane = np.uint32(1) << (np.arange(threads, dtype=np.uint32) % 32)
        mask = np.where(odd, found[..., 1], ~found[..., 1])
        inside = (x & 1 == 1) == odd
        assert (mask & lane != 0)[inside].all(), "a lane is active itself"
        assert (mask & ~branch == 0)[inside].all(), "nobody is active in a branch that it did not take"
    padded[:, :threads] = True
    everybody = mask_of(padded.reshape(blocks, -1, 32)).repeat(32, axis=1)[:, :threads]
    assert (found[..., 0] & ~everybody == 0).all()
    assert (found[..., 0] & lane != 0).all()


@kernels("lanes", LANES)
@pytest.mark.parametrize("most", [1, 3, 17])
@pytest.mark.parametrize("shape", [(1, 1), (3, 4)], ids=str)
def test_lanes_that_are_left_go_on_together(
    run: Kernels, rng: np.random.Generator, words: RandomWords, shape: tuple[int, int], most: int
) -> None:
    blocks, warps = shape
    trips = rng.integers(0, most + 1, (blocks * warps, 32), np.uint32)
    x = words(*trips.shape)
    found = run("go_round", trips, x, blank(*trips.shape, 2), grid=blocks, block=32 * warps)[2]
    value, log = x.copy(), np.zeros_like(x)
    for w, row in enumerate(trips):
        for r in range(most):
            members = np.flatnonzero(row > r)
            if len(members):
                following = np.append(value[w, members[1:]], np.uint32(1))
                value[w, members] = np.uint32(3) * value[w, members] + following
                greatest = (value[w, members] & 0xFFFF).max()
                log[w, members] = np.uint32(7) * log[w, members] + np.uint32(len(members)) + greatest
    equal(found[..., 0], value + value[:, np.arange(32) ^ 5])
    equal(found[..., 1], log)


@kernels("lanes", LANES)
@pytest.mark.parametrize("shape", [(1, 32), (3, 64)], ids=str)
def test_clocks_never_go_back(run: Kernels, shape: tuple[int, int]) -> None:
    blocks, threads = shape
    (found,) = run("clocks", np.zeros((blocks * threads, 20, 2), np.uint64), 20, grid=blocks, block=threads)
    assert (found[:, 1:] >= found[:, :-1]).all()
    assert (found[:, -1] > found[:, 0]).all()
