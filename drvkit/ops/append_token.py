"""What follows the choice of a token: it joins its request, which goes on or ends, all decided on the device.

    requests = Requests(device, rows=32, capacity=1024, ends=[2])
    body = graph.while_(goes_on)
    ...  # a step, by requests.tokens and lengths, and the choice of the next token of each
    append_token(body, requests, chosen, condition=goes_on, after=sampled)

The host sees tokens as they come: `Requests.appended`, while the loop runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..device import Device, Stream
from ..graph import Condition
from ..memory import Keeper
from . import Where, apart, array, is_a, launch, whole

if TYPE_CHECKING:
    from ..graph import After
    from ..node import Node

__all__ = ["Requests", "append_token"]

INT32 = np.dtype(np.int32)
MOST_ROWS = 1024  # threads of a block


class Requests(Keeper):
    """Requests of which each has a row of every step, in device memory.

    Args:
        device: where.
        rows: how many at most.
        capacity: tokens that can be appended to each.
        ends: tokens that end a request.

    Attributes:
        tokens, lengths: int32 [rows], of each request its newest token, and how many it has; -1 and 0 for who has
            ended, and at first.
        counts, limits: int32 [rows], how many were appended, and how many can be.
        going: int32 [1]: whether any goes on, as the newest append found it.
    """

    def __init__(self, device: Device, *, rows: int, capacity: int, ends: Sequence[int]) -> None:
        super().__init__()
        what = type(self).__name__
        for name, number, most in (("rows", rows, MOST_ROWS), ("capacity", capacity, 2**30)):
            if not 1 <= whole(f"{what}: {name}", number) <= most:
                raise ValueError(f"{what}: {name}: wanted 1 to {most}, got {number!r}")
        tokens = [whole(f"{what}: ends", token) for token in ends]
        if not all(0 <= token < 2**31 for token in tokens):
            raise ValueError(f"{what}: ends: wanted tokens from 0 on, got {list(ends)!r}")
        self.device, self.rows, self.capacity = device, rows, capacity
        state = np.zeros((4, rows), np.int32)
        state[0] = -1
        self._state = self._keep(device.array(state))
        self.tokens, self.lengths, self.counts, self.limits = (self._state[i] for i in range(4))
        self.going = self._keep(device.zeros(1, np.int32))
        self._end_count = len(tokens)
        self._ends = self._keep(device.array(np.array(tokens or [-1], np.int32)))
        self._log = self._keep(device.pinned((rows, capacity), np.int32))
        self._published, self._stop = (self._keep(device.pinned(n, np.uint32)) for n in (rows, 1))
        self._published.host[:] = self._stop.host[:] = 0

    def begin(self, stream: Stream, lengths: Sequence[int], limits: Sequence[int]) -> None:
        """For the requests of the first rows, of ``lengths`` tokens each (0: it does not take part yet): forget what
        was appended; up to ``limits`` can be."""
        what = f"{type(self).__name__}.begin"
        if len(lengths) != len(limits) or len(lengths) > self.rows:
            raise ValueError(
                f"{what}: wanted as many limits as lengths, up to {self.rows}, got {len(limits)} and {len(lengths)}"
            )
        for length in lengths:
            if whole(f"{what}: lengths", length) < 0:
                raise ValueError(f"{what}: lengths: wanted 0 or more, got {length!r}")
        for limit in limits:
            if not 1 <= whole(f"{what}: limits", limit) <= self.capacity:
                raise ValueError(f"{what}: limits: wanted 1 to {self.capacity}, got {limit!r}")
        stream.synchronize()
        state = np.zeros((4, self.rows), np.int32)
        state[0] = -1
        state[1, : len(lengths)], state[3, : len(limits)] = lengths, limits
        self._published.host[:] = self._stop.host[:] = 0
        self._state.copy_from(state, stream)

    def appended(self, row: int, since: int = 0) -> list[int]:
        """The tokens that a request has got, from number ``since`` on, as far as they have come by now."""
        if not 0 <= row < self.rows:
            raise IndexError(f"{type(self).__name__}: row {row} of {self.rows}")
        count = int(self._published.host[row])
        tokens: list[int] = self._log.host[row, since:count].tolist()
        return tokens

    def stop(self) -> None:
        """All requests end with the next token that they get."""
        self._stop.host[0] = 1


def append_token(
    where: Where,
    requests: Requests,
    chosen: Any,
    *,
    condition: Condition | None = None,
    after: After = None,
    name: str | None = None,
) -> Node | None:
    """Append ``chosen`` int32 [n], of the first n rows, each to its request, unless it is negative.

    A request ends with a token of ``ends``, when it has as many as its limit says, and when the host says `stop`. It
    has length 0 then. ``condition``, of the graph, is set to whether any of the n requests goes on.
    """
    op = "append_token"
    is_a(Requests, op, "requests", requests)
    seen = array(f"{op}: chosen", chosen, [INT32])
    rows = seen.shape[0] if len(seen.shape) == 1 else 0
    if not 1 <= rows <= requests.rows:
        raise ValueError(f"{op}: chosen: wanted shape (up to {requests.rows} rows,), got {seen.shape}")
    apart(f"{op}: requests", array(op, requests._state, [INT32]), "chosen", seen)
    args: tuple[Any, ...] = (
        *(chosen, requests.tokens, requests.lengths, requests.counts, requests.limits),
        *(requests._log, requests._published, requests._stop, requests._ends, requests.going),
        *(rows, requests.capacity, requests._end_count),
    )
    function = op
    if condition is not None:
        is_a(Condition, op, "condition", condition)
        function, args = f"{op}_while", (condition, *args)
    return launch(where, op, function, 1, -(-rows // 32) * 32, args, after=after, name=name, op=op)
