"""The k largest scores of each row, exactly, whatever stands in it.

Rows may have any lengths, which are read from device memory, so one node serves every step::

    top_k(graph, scores, tokens.entries[4], indices, after=scored)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..device import Device
from . import Where, apart, array, device_of, launch, shaped, span, token_rows, token_stride

if TYPE_CHECKING:
    from ..graph import After
    from ..node import Node

__all__ = ["top_k"]

FLOAT32, INT32 = np.dtype(np.float32), np.dtype(np.int32)
THREADS, MOST_BLOCKS = 512, 8  # of a block; of a cluster, which has a row
ROUND, SHORT = 4 * THREADS, 4  # scores that a block reads at a time; how many times it can, to have them in registers
# Blocks of a cluster have at least so many scores each, and there are clusters only as far as rows alone leave a GPU
# idle: with BUSY blocks nothing is.
FEW, BUSY = 4096, 128
COUNTS = 32 << 10  # bytes of shared memory that lists cannot have
ENTRY = 8  # bytes of a score in a list


def top_k(
    where: Where, scores: Any, lengths: Any, indices: Any, *, after: After = None, name: str | None = None
) -> Node | None:
    """The indices of the ``k`` best of the first ``lengths[r]`` scores of each row r, in rising order, then -1.

    Args:
        scores: float32 [rows, width]; rows start at multiples of 16 bytes and may be longer than ``width``. What is
            behind a row's length is not read.
        lengths: int32 [rows]; 0 or less for an empty row. One above ``width`` counts as that; the CPU device reports
            it.
        indices: int32 [rows, k], written.

    A larger score comes before a smaller one, of equal ones that of the smaller index; -0 equals +0. A row of at most k
    scores is taken whole, without a look at them; of a longer one NaN and -inf are never taken, even if fewer than k
    are left.
    """
    op = "top_k"
    device = device_of(op, where)
    table = token_rows(f"{op}: scores", scores, [FLOAT32], axes=("rows", "width"))
    rows, width = table.shape
    if width >= 2**30:
        raise ValueError(f"{op}: scores: wanted rows of fewer than 2**30, got {width}")
    result = array(f"{op}: indices", indices, [INT32])
    if len(result.shape) != 2 or result.shape[0] != rows or not 1 <= result.shape[1] < 2**30:
        raise ValueError(f"{op}: indices: wanted shape ({rows}, k), got {result.shape}")
    counts = array(f"{op}: lengths", lengths, [INT32])
    shaped(f"{op}: lengths", counts, (rows,))
    apart(f"{op}: indices", result, "scores", table)
    apart(f"{op}: indices", result, "lengths", counts)

    if rows >= 2**31:
        raise ValueError(f"{op}: scores has {rows} rows; a launch takes fewer than {2**31}")
    k = result.shape[1]
    args: tuple[Any, ...] = (span(scores, table), lengths, indices, width, k, token_stride(table))
    if width <= SHORT * ROUND:
        function = f"{op}_short<{max(1, -(-width // ROUND))}>"
        return launch(where, op, function, rows, THREADS, args, after=after, name=name, op=op)
    blocks = blocks_of_row(device, rows, width)
    room = room_of_list(device, blocks, k)
    attributes: dict[str, Any] = {"shared_mem_bytes": room * ENTRY * blocks * THREADS // 32}
    if blocks > 1:
        attributes["cluster"] = blocks
    function, args = f"{op}_long<{blocks}>", (*args, room)
    return launch(where, op, function, rows * blocks, THREADS, args, after=after, name=name, op=op, **attributes)


def blocks_of_row(device: Device, rows: int, width: int) -> int:
    """Blocks that share a row that registers cannot have. Results do not depend on it."""
    blocks, most = 1, MOST_BLOCKS if device.compute_capability >= (9, 0) else 1
    while blocks < most and width > blocks * FEW and 2 * blocks * rows <= BUSY:
        blocks *= 2
    return blocks


def room_of_list(device: Device, blocks: int, k: int) -> int:
    """Scores for which each warp's list has room: about twice what is left of a row in random order, in all 6 k."""
    warps = blocks * THREADS // 32
    memory = device.attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN") - COUNTS
    return min(max(64, 6 * k // warps), memory // (ENTRY * warps))
