"""Who has which tokens and heads in Ulysses, and its exchanges of all ranks at once, in numpy.

DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["heads_of", "key_heads_of", "to_heads", "to_tokens"]


def heads_of(rank: int, ranks: int, heads: int) -> range:
    """The query heads of a rank: as many as of any other, or one more for the first ranks."""
    each, more = divmod(heads, ranks)
    first = rank * each + min(rank, more)
    return range(first, first + each + (rank < more))


def key_heads_of(rank: int, ranks: int, heads: int, kv_heads: int) -> list[int]:
    """The key and value head of each local one: every rank has those that its query heads use, so one may be on
    several ranks. Each is used by as many query heads, one behind the other; a head that more use stands there again.
    """
    group = heads // kv_heads
    used = [head // group for head in heads_of(rank, ranks, heads)]
    per_key = math.gcd(*(used.count(head) for head in used))
    return used[::per_key]


def to_heads(
    q: Sequence[NDArray[Any]], k: Sequence[NDArray[Any]], v: Sequence[NDArray[Any]]
) -> list[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]:
    """``q[j]`` is [tokens of rank j, heads, dim], ``k[j]`` and ``v[j]`` [tokens of rank j, kv_heads, dim]. Gives of
    each rank what it has of all tokens: [all tokens, heads of the rank, dim], and keys and values in the same way."""
    ranks, (_, heads, _), (_, kv_heads, _) = len(q), q[0].shape, k[0].shape
    whole = [np.concatenate(each) for each in (q, k, v)]
    made = []
    for rank in range(ranks):
        own, keys = list(heads_of(rank, ranks, heads)), key_heads_of(rank, ranks, heads, kv_heads)
        made.append((whole[0][:, own], whole[1][:, keys], whole[2][:, keys]))
    return made


def to_tokens(o: Sequence[NDArray[Any]], tokens: Sequence[int]) -> list[NDArray[Any]]:
    """``o[r]`` is [all tokens, heads of rank r, dim]. Gives of each rank [its tokens, all heads, dim]."""
    return np.split(np.concatenate(o, axis=1), np.cumsum(tokens)[:-1])
