"""Which token of which request each row of a step is: what the ops of latent attention ask of it.

A step has rows for the new tokens of its requests, one or many of each, those of a prompt, of a chunk of it, or of
decoding, mixed as they come; the rest of its ``max_tokens`` rows is padding. All that changes from step to step is the
contents of device memory, so one graph serves every step::

    tokens = StepTokens(device, max_tokens=64, max_requests=64)
    listed = plan_tokens(graph, tokens, q_starts, lengths)
    kv_compress(graph, tokens, ..., after=listed)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..device import Device
from ..memory import Keeper
from . import Where, apart, array, is_a, shaped, submit, whole

if TYPE_CHECKING:
    from ..graph import After
    from ..node import Node

__all__ = ["StepTokens", "plan_tokens"]

RATIOS = (4, 128)  # tokens of an entry


class StepTokens(Keeper):
    """The rows of a step, in device memory.

    Args:
        device: where.
        max_tokens: rows.
        max_requests: how many at most.
        max_length: tokens of a request at most.

    Attributes:
        rows: int32 [max_tokens, 4]: request, position, the position of the request's first row, its length; of padding
            -1, 0, 0, 0.
        entries: by tokens of an entry (4, 128) int32 [max_tokens]: how many entries end no later than the row's token
            does, so that it sees them; 0 for padding.
        completed: likewise int32 [1]: how many entries end in this step. For a condition.
    """

    def __init__(self, device: Device, *, max_tokens: int, max_requests: int, max_length: int = 2**20) -> None:
        super().__init__()
        what = type(self).__name__
        for name, number in (("max_tokens", max_tokens), ("max_requests", max_requests), ("max_length", max_length)):
            if not 1 <= whole(f"{what}: {name}", number) < 2**30:
                raise ValueError(f"{what}: {name}: wanted 1 to 2**30 - 1, got {number!r}")
        self.device, self.max_tokens, self.max_requests, self.max_length = device, max_tokens, max_requests, max_length
        nothing = np.zeros(6 * max_tokens + 2, np.int32)
        nothing[: 4 * max_tokens : 4] = -1  # until they are planned all rows are padding
        self._whole = self._keep(device.array(nothing))
        self.rows = self._whole[: 4 * max_tokens].reshape(max_tokens, 4)
        counts = self._whole[4 * max_tokens : 6 * max_tokens].reshape(2, max_tokens)
        self.entries = {ratio: counts[i] for i, ratio in enumerate(RATIOS)}
        self._completed = self._whole[6 * max_tokens :]
        self.completed = {ratio: self._completed[i : i + 1] for i, ratio in enumerate(RATIOS)}


def plan_tokens(
    where: Where, tokens: StepTokens, q_starts: Any, lengths: Any, *, after: After = None, name: str | None = None
) -> Node | None:
    """List the rows of a step. One node for all layers.

    Args:
        q_starts: int32 [max_requests + 1], the first row of each request, 0 for the first; equal to the next one for a
            request without rows. The last one is the number of rows that are not padding.
        lengths: int32 [max_requests], tokens of each request that has rows, these among them.

    Starts that decrease or leave the rows, lengths below the number of rows or above ``max_length``: the CPU device
    reports them. On a GPU the rows of a request whose last row or length is wrong are padding; those of starts that
    decrease mean nothing, but what they stand for is inside of a request.
    """
    op, ints = "plan_tokens", [np.dtype(np.int32)]
    is_a(StepTokens, op, "tokens", tokens)
    for role, operand, shape in (
        ("q_starts", q_starts, (tokens.max_requests + 1,)),
        ("lengths", lengths, (tokens.max_requests,)),
    ):
        seen = array(f"{op}: {role}", operand, ints)
        shaped(f"{op}: {role}", seen, shape)
        apart(f"{op}: tokens", array(op, tokens._whole, ints), role, seen)
    counts = (*tokens.entries.values(), tokens._completed)
    args = (q_starts, lengths, tokens.rows, *counts, tokens.max_requests, tokens.max_tokens, tokens.max_length)
    return submit(where, "step_tokens", "step_tokens", tokens.max_tokens, args, after, name, op)
