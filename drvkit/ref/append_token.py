"""What follows the choice of a token, of requests that go on or end."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

__all__ = ["append_token"]

Int32 = NDArray[np.int32]


def append_token(
    chosen: Int32,
    tokens: Int32,
    lengths: Int32,
    counts: Int32,
    limits: Int32,
    log: Int32,
    ends: Collection[int],
    stop: bool = False,
) -> bool:
    """Append ``chosen`` [rows] to ``log`` [rows, capacity], unless it is negative, and change ``tokens``, ``lengths``
    and ``counts`` [rows] in place: a request that ends has token -1 and length 0, another one token more. Returns
    whether any goes on."""
    for row, token in enumerate(chosen.tolist()):
        if token < 0:
            continue
        log[row, counts[row]] = token
        counts[row] += 1
        if stop or token in ends or counts[row] >= limits[row]:
            tokens[row], lengths[row] = -1, 0
        else:
            tokens[row] = token
            lengths[row] += 1
    return bool((lengths[: len(chosen)] > 0).any())
