"""The k largest scores of each row."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["top_k"]


def top_k(scores: NDArray[np.float32], lengths: NDArray[np.int32], k: int) -> NDArray[np.int32]:
    """Of the first ``lengths[r]`` scores of row r the k best: int32 [rows, k], indices in rising order, then -1.

    A larger score comes before a smaller one, of equal ones that of the smaller index; -0 equals +0. At most k scores
    are all taken; of more than k, NaN and -inf are not.
    """
    indices = np.full((len(scores), k), -1, np.int32)
    for row, (all_scores, length) in enumerate(zip(scores, lengths.tolist(), strict=True)):
        seen = all_scores[: max(length, 0)]
        candidates = np.arange(len(seen))
        if len(seen) > k:
            candidates = candidates[seen > -np.inf]
            by_score = np.lexsort((candidates, -seen[candidates]))
            candidates = np.sort(candidates[by_score[:k]])
        indices[row, : len(candidates)] = candidates
    return indices
