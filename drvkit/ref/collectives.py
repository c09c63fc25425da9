"""All-reduce, reduce-scatter and all-gather of all ranks at once, in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .allreduce_rmsnorm import allreduce

__all__ = ["all_gather", "allreduce", "reduce_scatter"]


def reduce_scatter(x: NDArray[Any]) -> NDArray[Any]:
    """``x`` is [ranks, ranks, tokens, hidden]: of each rank, what it has for each. Gives [ranks, tokens, hidden], the
    bits of `allreduce`."""
    return allreduce(x)


def all_gather(x: NDArray[Any]) -> NDArray[Any]:
    """``x`` is [ranks, ...]; every rank gets all of it."""
    return np.broadcast_to(x, (x.shape[0], *x.shape)).copy()
