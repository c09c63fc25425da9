"""The next token of each row of logits: the best one, or one drawn from the best.

In both a larger logit comes before a smaller one, of equal ones that of the smaller index; -0 equals +0. NaN and -inf
are never taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["argmax", "kept_of", "philox", "sample", "weights_of"]

Float32 = NDArray[np.float32]
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

ONE = 30  # 2**ONE is the weight of the best
LOG2E = np.float32(1 / math.log(2))
TAYLOR = [np.float32(math.log(2) ** i / math.factorial(i)) for i in range(8)]  # of 2**x at 0


def argmax(logits: Float32, counts: Int32 | None = None) -> Int32:
    """The index of the best logit of each row, int32 [rows]; -1 where none can be taken, or ``counts[r] <= 0``."""
    tokens = np.full(len(logits), -1, np.int32)
    for row, of_row in enumerate(logits):
        there = np.flatnonzero(of_row > -np.inf)
        if len(there) and (counts is None or counts[row] > 0):
            tokens[row] = there[np.argmax(of_row[there])]
    return tokens


def philox(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Philox4x32-10: the four words that a counter of four and a key of two words give."""
    (a, b, c, d), (low, high) = counter, key
    for _ in range(10):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = second >> 32 ^ b ^ low, second % 2**32, first >> 32 ^ d ^ high, first % 2**32
        low, high = (low + 0x9E3779B9) % 2**32, (high + 0xBB67AE85) % 2**32
    return [a, b, c, d]


@np.errstate(all="ignore")
def weights_of(logits: Float32, temperature: np.float32) -> Int64:
    """The weights of candidates with such logits, in their order: 2^30 exp((l[i] - l[0]) / temperature), whole numbers.

    With y = (l[i] - l[0]) / temperature * log2(e), y = n + x, n whole, 2^x is a sum of powers of x up to the seventh.
    Each step is rounded to float32, and the weight to the nearest whole number. Where l[i] equals l[0] y is 0; of y up
    to -32, or NaN, the weight is 0.
    """
    if not temperature > 0:
        return np.array([2**ONE] + [0] * (len(logits) - 1))
    y = np.where(logits == logits[0], np.float32(0), (logits - logits[0]) / temperature) * LOG2E
    is_there = y > -32
    n = np.rint(np.where(is_there, y, 0))
    x = np.where(is_there, y, 0) - n
    power = np.full_like(x, TAYLOR[-1])
    for factor in TAYLOR[-2::-1]:
        power = power * x + factor
    assert power.dtype == np.float32
    weights = np.rint(np.ldexp(power, n.astype(np.int32) + ONE)).astype(np.int64)
    return np.where(is_there, weights, 0)


def kept_of(weights: Int64, top_p: np.float32) -> int:
    """How many of the candidates are kept: the first, as few as have together at least ``top_p`` times the sum of all,
    a product in float64; one at least, and all where they have less, or ``top_p`` is NaN."""
    enough = float(top_p) * float(weights.sum())
    has_enough = np.flatnonzero(np.cumsum(weights) >= enough)
    return int(has_enough[0]) + 1 if len(has_enough) else len(weights)


def sample(
    logits: Float32,
    candidates: Int32,
    temperature: Float32,
    top_p: Float32,
    seeds: NDArray[np.uint64],
    counters: Int32,
) -> Int32:
    """One of the candidates [rows, k] of each row, int32 [rows]; -1 where none can be taken or ``counters[r] <= 0``.

    Candidates in their order have `weights_of` their logits, and of these the first `kept_of` are kept. The token is
    the first of them whose sum with those before is above ``draw * (sum of the kept) / 2^24``, where draw is the upper
    24 bits of the first word of `philox` with key ``seeds[r]``, its low word first, and counter ``(counters[r], 0, 0,
    0)``.
    """
    tokens = np.full(len(logits), -1, np.int32)
    for row in np.flatnonzero(counters > 0):
        of_row = candidates[row][candidates[row] >= 0]
        of_row = of_row[logits[row, of_row] > -np.inf]
        if not len(of_row):
            continue
        of_row = of_row[np.lexsort((of_row, -logits[row, of_row]))]
        weights = weights_of(logits[row, of_row], temperature[row])
        sums = np.cumsum(weights[: kept_of(weights, top_p[row])]).tolist()
        seed = int(seeds[row])
        draw = philox((int(counters[row]), 0, 0, 0), (seed % 2**32, seed >> 32))[0] >> 8
        tokens[row] = of_row[next(i for i, up_to in enumerate(sums) if up_to * 2**24 > draw * sums[-1])]
    return tokens
