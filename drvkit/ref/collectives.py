"""All-reduce, reduce-scatter and all-gather of all ranks at once, in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .allreduce_rmsnorm import allreduce

__all__ = ["all_gather", "allreduce", "allreduce_of_groups", "reduce_scatter"]


def allreduce_of_groups(x: NDArray[Any]) -> NDArray[Any]:
    """``x`` is [groups, ranks, tokens, hidden]: the sums of the groups, each rounded, are summed in the order of the
    groups; both sums are `allreduce`. Between two groups NCCL gives the same bits; between more it has an order of its
    own, and rounds after each step."""
    return allreduce(np.stack([allreduce(group) for group in x]))


def reduce_scatter(x: NDArray[Any]) -> NDArray[Any]:
    """``x`` is [ranks, ranks, tokens, hidden]: of each rank, what it has for each. Gives [ranks, tokens, hidden], the
    bits of `allreduce`."""
    return allreduce(x)


def all_gather(x: NDArray[Any]) -> NDArray[Any]:
    """``x`` is [ranks, ...]; every rank gets all of it."""
    return np.broadcast_to(x, (x.shape[0], *x.shape)).copy()
