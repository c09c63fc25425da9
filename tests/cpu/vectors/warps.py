"""Instructions by which the threads of a warp or a block exchange values. Oracles see 32 lanes on the last axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .case import Oracle, Table
from .floats import Bits
from .inputs import BLOCK
from .integers import signed

WARPS = Table("warps")
case = WARPS

FULL = "0xffffffff"
LANES = np.arange(32)
PREDICATES = "selp.u32 d, 1, 0, p"


def by_warp(oracle: Oracle, size: int = 32) -> Oracle:
    """``oracle`` of arrays of shape (warps, lanes)."""

    def whole(*inputs: Bits) -> Any:
        result = oracle(*(x.reshape(-1, size) for x in inputs))
        results = result if isinstance(result, tuple) else (result,)
        flat = tuple(np.broadcast_to(each, inputs[0].reshape(-1, size).shape).reshape(-1) for each in results)
        return flat if isinstance(result, tuple) else flat[0]

    return whole


# ---- shuffles ------------------------------------------------------------------------------------------------------


def shuffled(mode: str, a: Bits, b: Bits, c: Bits) -> tuple[Bits, NDArray[Any]]:
    """The value, and whether the lane asked for is in the segment."""
    lane, bval, cval, mask = LANES, (b & 31).astype(int), (c & 31).astype(int), ((c >> 8) & 31).astype(int)
    highest = (lane & mask) | (cval & ~mask)
    lowest = lane & mask
    source: NDArray[Any] = {
        "up": lane - bval, "down": lane + bval, "bfly": lane ^ bval, "idx": lowest | (bval & ~mask),
    }[mode]  # fmt: skip
    inside = source >= highest if mode == "up" else source <= highest
    return np.take_along_axis(a, np.where(inside, source, lane), axis=1), inside


for mode in ("up", "down", "bfly", "idx"):
    oracle: Oracle = by_warp(lambda a, b, c, m=mode: shuffled(m, a, b, c))
    case(f"shfl.sync.{mode}.b32:any", "b32 b32 clamp", (32, 32), oracle,
         f"OP d|p, a, b, c, {FULL}; selp.u32 e, 1, 0, p")  # fmt: skip
    for width in (32, 16, 8, 4, 2):
        clamp = (32 - width) << 8 | (0 if mode == "up" else 31)
        for step in {1, width // 2, width - 1}:
            case(f"shfl.sync.{mode}.b32:width{width}by{step}", "b32", (32, 32),
                 by_warp(lambda a, m=mode, s=step, c=clamp: shuffled(m, a, np.full_like(a, s), np.full_like(a, c))),
                 f"OP d|p, a, {step}, {clamp}, {FULL}; selp.u32 e, 1, 0, p")  # fmt: skip
    case(f"shfl.sync.{mode}.b32:nopredicate", "b32", 32,
         by_warp(lambda a, m=mode: shuffled(m, a, np.full_like(a, 1), np.full_like(a, 0 if m == "up" else 31))[0]),
         f"OP d, a, 1, {0 if mode == 'up' else 31}, {FULL}")  # fmt: skip
    halved = 16 << 8 | (0 if mode == "up" else 31)
    case(f"shfl.sync.{mode}.b32:half", "b32", 32,
         by_warp(lambda a, m=mode, c=halved: np.where(
             LANES < 16, shuffled(m, a, np.full_like(a, 3), np.full_like(a, c))[0], a)),
         f"mov.b32 d, a; setp.lt.u32 q, lane, 16; @q OP d, a, 3, {halved}, 0xffff")  # fmt: skip

# ---- votes, matches, reductions ------------------------------------------------------------------------------------


def ballot(truths: NDArray[Any]) -> NDArray[np.uint32]:
    """One word a warp, the same for all lanes."""
    words: NDArray[np.uint32] = (truths.astype(np.uint32) << LANES.astype(np.uint32)).sum(axis=1, dtype=np.uint32)
    return words[:, None]


VOTES: dict[str, Callable[[NDArray[Any]], NDArray[Any]]] = {
    "all": lambda t: np.all(t, axis=1), "any": lambda t: np.any(t, axis=1),
    "uni": lambda t: np.all(t, axis=1) | ~np.any(t, axis=1),
}  # fmt: skip
SOME = "setp.lt.u32 q, a, "  # how many of 256 values are true, so that some warps agree
for name, vote in VOTES.items():
    for limit in (2, 128, 254):
        case(f"vote.sync.{name}.pred:{limit}", "mask8", 32,
             by_warp(lambda a, f=vote, n=limit: f(a < n)[:, None]),
             f"{SOME}{limit}; OP p, q, {FULL}; {PREDICATES}")  # fmt: skip
    case(f"vote.sync.{name}.pred:half", "mask8", 32,
         by_warp(lambda a, f=vote: np.where(LANES < 16, f(a[:, :16] < 240)[:, None], 2)),
         f"mov.b32 d, 2; {SOME}240; setp.lt.u32 r, lane, 16; @r OP p, q, 0xffff; @r {PREDICATES}")  # fmt: skip
case("vote.sync.ballot.b32", "mask8", 32, by_warp(lambda a: ballot(a < 128)), f"{SOME}128; OP d, q, {FULL}")
case("vote.sync.ballot.b32:half", "mask8", 32,
     by_warp(lambda a: np.where(LANES >= 16, ballot((a < 128) & (LANES >= 16)), 2)),
     f"mov.b32 d, 2; {SOME}128; setp.ge.u32 r, lane, 16; @r OP d, q, 0xffff0000")  # fmt: skip


def same(a: Bits) -> NDArray[np.uint32]:
    """For each lane, which lanes have its value."""
    equal = a[:, :, None] == a[:, None, :]
    lanes: NDArray[np.uint32] = (equal.astype(np.uint32) << LANES.astype(np.uint32)).sum(axis=2, dtype=np.uint32)
    return lanes


for w, kind in ((32, "few"), (64, "few64")):
    case(f"match.any.sync.b{w}", kind, 32, by_warp(same), f"OP d, a, {FULL}")
    case(f"match.all.sync.b{w}", kind, (32, 32),
         by_warp(lambda a: (np.where((a == a[:, :1]).all(axis=1), np.uint32(0xFFFFFFFF), 0)[:, None],
                            (a == a[:, :1]).all(axis=1)[:, None])),
         f"OP d|p, a, {FULL}; selp.u32 e, 1, 0, p")  # fmt: skip
    case(f"match.all.sync.b{w}:alike", kind, (32, 32),
         by_warp(lambda a: (np.full_like(a, 0xFFFFFFFF), np.full_like(a, 1))),
         f"and.b{w} a, a, 0; OP d|p, a, {FULL}; selp.u32 e, 1, 0, p")  # fmt: skip
case("match.any.sync.b32:half", "few", 32,
     by_warp(lambda a: np.where(LANES < 16, same(a) & 0xFFFF, 2)),
     "mov.b32 d, 2; setp.lt.u32 r, lane, 16; @r OP d, a, 0xffff")  # fmt: skip

REDUCTIONS: dict[str, Callable[[Bits], NDArray[Any]]] = {
    "add.u32": lambda a: a.sum(axis=1, dtype=np.uint32),
    "add.s32": lambda a: a.sum(axis=1, dtype=np.uint32),
    "min.u32": lambda a: a.min(axis=1),
    "max.u32": lambda a: a.max(axis=1),
    "min.s32": lambda a: signed(a).min(axis=1),
    "max.s32": lambda a: signed(a).max(axis=1),
    "and.b32": lambda a: np.bitwise_and.reduce(a, axis=1),
    "or.b32": lambda a: np.bitwise_or.reduce(a, axis=1),
    "xor.b32": lambda a: np.bitwise_xor.reduce(a, axis=1),
}
for name, reduce in REDUCTIONS.items():
    case(f"redux.sync.{name}", "b32", 32, by_warp(lambda a, f=reduce: f(a)[:, None]), f"OP d, a, {FULL}")
    case(f"redux.sync.{name}:half", "b32", 32,
         by_warp(lambda a, f=reduce: np.where(LANES < 16, f(np.ascontiguousarray(a[:, :16]))[:, None], 2)),
         "mov.b32 d, 2; setp.lt.u32 r, lane, 16; @r OP d, a, 0xffff")  # fmt: skip
case("activemask.b32", "b32", 32, lambda a: np.full_like(a, 0xFFFFFFFF), "OP d")
case("elect.sync", "b32", (32, 32),
     by_warp(lambda a: (np.zeros_like(a), np.broadcast_to(LANES == 0, a.shape))),
     f"OP d|p, {FULL}; selp.u32 e, 1, 0, p")  # fmt: skip
case("elect.sync:upper", "b32", (32, 32),
     by_warp(lambda a: (np.where(LANES < 16, 2, np.full_like(a, 16)),
                        np.where(LANES < 16, 2, np.broadcast_to(LANES == 16, a.shape)))),
     "mov.b32 d, 2; mov.b32 e, 2; setp.ge.u32 r, lane, 16; @r OP d|p, 0xffff0000; @r selp.u32 e, 1, 0, p")  # fmt: skip

# ---- lane masks, barriers that reduce ------------------------------------------------------------------------------

lane_masks: dict[str, Callable[[Any], Any]] = {
    "eq": lambda n: 1 << n, "lt": lambda n: (1 << n) - 1, "le": lambda n: (2 << n) - 1,
    "gt": lambda n: ~((2 << n) - 1), "ge": lambda n: ~((1 << n) - 1),
}  # fmt: skip
case("mov.u32:laneid", "b32", 32, by_warp(lambda a: np.broadcast_to(LANES, a.shape)), "OP d, %laneid")
for name, lane_mask in lane_masks.items():
    case(f"mov.u32:lanemask_{name}", "b32", 32,
         by_warp(lambda a, f=lane_mask: np.broadcast_to(f(LANES.astype(np.int64)) & 0xFFFFFFFF, a.shape)),
         f"OP d, %lanemask_{name}")  # fmt: skip
block_wide: dict[str, Callable[[NDArray[Any]], NDArray[Any]]] = {
    "popc.u32": lambda t: np.sum(t, axis=1), "and.pred": lambda t: np.all(t, axis=1),
    "or.pred": lambda t: np.any(t, axis=1),
}  # fmt: skip
for name, reduce in block_wide.items():
    for limit in (1, 128, 255):
        to, after = ("d", "") if name == "popc.u32" else ("p", f"; {PREDICATES}")
        case(f"bar.red.{name}:{limit}", "mask8", 32,
             by_warp(lambda a, f=reduce, n=limit: f(a < n)[:, None], BLOCK),
             f"{SOME}{limit}; OP {to}, 0, q{after}")  # fmt: skip
BUTTERFLY = "; ".join(f"OP t0, d, {n}, 31, {FULL}; add.u32 d, d, t0" for n in (16, 8, 4, 2, 1))
case("shfl.sync.bfly.b32:sum", "b32", 32, by_warp(lambda a: a.sum(axis=1, dtype=np.uint32)[:, None]),
     f"mov.b32 d, a; {BUTTERFLY}")  # fmt: skip

# ---- a matrix of 8 by 8 turned by a warp ---------------------------------------------------------------------------


def transposed(a: Bits) -> Bits:
    """Each lane has two elements of a row; four lanes a row."""
    matrix = np.ascontiguousarray(a).view(np.uint16).reshape(-1, 8, 8)
    return np.ascontiguousarray(matrix.transpose(0, 2, 1)).view(np.uint32).reshape(-1)


case("movmatrix.sync.aligned.m8n8.trans.b16", "b32", 32, transposed)
