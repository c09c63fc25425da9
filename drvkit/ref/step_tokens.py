"""Which token of which request each row of a step is."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["step_tokens"]

Int32 = NDArray[np.int32]


def step_tokens(q_starts: Int32, lengths: Int32, max_tokens: int) -> tuple[Int32, dict[int, Int32], Int32]:
    """``tokens`` [max_tokens, 4]: request, position, the position of the request's first row, its length; -1, 0, 0, 0
    for padding. ``entries[ratio]`` [max_tokens]: entries of so many tokens that end no later than the row's token does.
    ``completed`` [2]: entries of 4 and of 128 tokens that end in this step."""
    tokens = np.zeros((max_tokens, 4), np.int32)
    tokens[:, 0] = -1
    completed = np.zeros(2, np.int32)
    for request, (first, end) in enumerate(zip(q_starts[:-1].tolist(), q_starts[1:].tolist(), strict=True)):
        if first == end:
            continue
        length = int(lengths[request])
        start = length - (end - first)
        for row in range(first, end):
            tokens[row] = request, start + row - first, start, length
        completed += [length // ratio - start // ratio for ratio in (4, 128)]
    real = tokens[:, 0] >= 0
    entries = {ratio: np.where(real, (tokens[:, 1] + 1) // ratio, 0).astype(np.int32) for ratio in (4, 128)}
    return tokens, entries, completed
