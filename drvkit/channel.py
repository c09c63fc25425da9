"""What kernels of several ranks have between them: mailboxes in symmetric memory, the number of each rank's next call,
and what failed. The device's side of it is ``cuda_src/dk/ranks.cuh``.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from .device import Device, Stream
from .lifetime import ClosedError
from .module import Kernel
from .symmetric import SymmetricMemory
from .world import World, WorldError, seconds

__all__ = ["Channel"]

MOST_RANKS, GENERATIONS = 8, 3
PROTOCOLS = ("lamport", "packets", "flags", "two_shot")  # by their number in dk/protocols.cuh
PER_MULTIPROCESSOR = 2  # blocks that are enough to keep the wire busy
# Of each rank's part, in bytes: the lines before the flags, the flags of a block, what areas begin at a multiple of.
LINES, FLAGS, ALIGNMENT = GENERATIONS * MOST_RANKS * 8 + 2 * MOST_RANKS * 4, MOST_RANKS * 4, 256
# By code, of ranks waiting, waited for and telling.
CAUSES = {
    1: "rank {me} waited in call {call} for rank {rank}, which did not come within {limit:g} s",
    2: "rank {me} waited in call {call} for rank {rank}, which made another call",
    3: "rank {me} ended call {call}, as rank {by} had waited for rank {rank} in vain",
}


class Channel:
    """What the calls of a group need: every rank makes it at the same time, and then the same calls in the same order,
    on streams or as nodes of graphs that are replayed any number of times. One call is in flight at a time: one that
    comes on another stream than the last waits for that; who launches graphs on several streams sees to it himself.
    A call may take a whole device: calls of two groups that could be on it at a time need an order of their own, the
    same on all ranks, by events or edges.

    Args:
        world: of 2 to 8 ranks.
        areas: the mailboxes: of each, by name, the bytes in one rank's part and the word that all are at first.
        blocks: of a launch, at most.
        timeout_s: how long a kernel waits for another rank.
        multicast: whether kernels may store to all ranks at once; see `SymmetricMemory`.
    """

    def __init__(
        self,
        world: World,
        areas: Mapping[str, tuple[int, int]],
        *,
        blocks: int,
        timeout_s: float,
        multicast: bool = False,
    ) -> None:
        what = type(self).__name__
        if not 2 <= world.size <= MOST_RANKS:
            raise ValueError(f"{what}: world: wanted 2 to {MOST_RANKS} ranks, got {world.size}")
        if not 1e-6 <= seconds(timeout_s) <= 1e6:
            raise ValueError(f"{what}: timeout_s: wanted 1e-6 to 1e6, got {timeout_s!r}")
        self.world, self.multicast, self.limit_ns = world, multicast, round(timeout_s * 1e9)
        self.areas, self.offsets, end = dict(areas), dict[str, int](), LINES + blocks * FLAGS
        for name, (nbytes, _) in areas.items():
            self.offsets[name] = -(-end // ALIGNMENT) * ALIGNMENT
            end = self.offsets[name] + nbytes
        self.devices: list[Device] = list(dict.fromkeys(world.devices))
        self._last: list[Stream | None] = [None] * len(self.devices)  # with the newest call
        self.memory = SymmetricMemory(world, end, multicast=multicast)
        of_launch = world.size if world.virtual else 1  # ranks of one launch
        self.states = [device.zeros((of_launch, 4), np.uint32) for device in self.devices]
        self.failures = [device.pinned((of_launch, 8), np.uint32) for device in self.devices]
        self.reset()

    def reset(self) -> None:
        """All ranks together: forget what failed, and begin anew. Graphs stay as they are, and valid."""
        for device in self.devices:
            device.synchronize()
        self.world.barrier()
        for rank in self.world.ranks:
            self.memory.part(rank, min(self.offsets.values()), np.uint8).fill_bytes(0)
            for name, (nbytes, word) in self.areas.items():
                self.memory.part(rank, nbytes // 4, np.uint32, offset=self.offsets[name]).fill(word)
        for state, failure in zip(self.states, self.failures, strict=True):
            state.fill_bytes(0)
            failure.host[:] = 0
        for device in self.devices:
            device.synchronize()
        self.world.barrier()

    def check(self) -> None:
        """Raise a `WorldError` for what a finished call of this process found wrong. Does not wait."""
        if self.memory.closed:
            raise ClosedError(f"{type(self).__name__} of {self.world!r} is closed")
        for place, failure in enumerate(self.failures):
            for virtual, (code, call, rank, by, block, thread, seen, _) in enumerate(failure.host.tolist()):
                if code:
                    me = virtual if self.world.virtual else self.world.ranks[place]
                    cause = CAUSES[code].format(me=me, rank=rank, by=by, call=call + 1, limit=self.limit_ns / 1e9)
                    newest = f"; its newest call was {seen}" if seen and code != 3 else ""
                    raise WorldError(rank, f"{type(self).__name__}: {cause} (block {block}, thread {thread}{newest})")

    # For the ops

    @classmethod
    def wanted(cls, op: str, group: object) -> None:
        """Refuse what is no group of this kind."""
        if not isinstance(group, cls):
            raise TypeError(f"{op}: group: wanted {cls.__name__}, got {type(group).__name__}")

    def place(self, op: str, device: Device) -> int:
        """Which of this process's devices it is."""
        if device not in self.devices:
            raise ValueError(f"{op}: {device.id} is no device of this world's ranks here")
        return self.devices.index(device)

    def args(self, place: int, *kind: Any) -> tuple[Any, ...]:
        """The last arguments of every kernel, from ``parts`` to ``limit_ns``. ``kind`` is what all ranks must have
        alike in a call."""
        own = self.world.ranks[place]
        number = zlib.crc32(json.dumps(kind).encode())
        return (
            *(self.memory.every(own), self.memory.everywhere(own) if self.multicast else None, self.memory.stride),
            *(self.states[place], self.failures[place], -1 if self.world.virtual else own, number, self.limit_ns),
        )

    def blocks(self, ready: Kernel, block: int, wanted: int) -> int:
        """Of a rank: no more than are on the device at a time, for they wait for each other."""
        resident = min(ready.occupancy(block), PER_MULTIPROCESSOR) * ready.device.multiprocessors
        return min(wanted, resident // (self.world.size if self.world.virtual else 1))

    def spread(self, blocks: int) -> tuple[Any, dict[str, Any]]:
        """The grid that gives each rank of a launch so many blocks, and its attributes."""
        return ((blocks, self.world.size), {"cooperative": True}) if self.world.virtual else (blocks, {})

    def follow(self, op: str, place: int, where: object) -> None:
        """The next call of a device comes on ``where``."""
        if not isinstance(where, Stream) or where.capturing is not None:
            return
        last = self._last[place]
        if last is not None and last is not where and not last.closed:
            if last.capturing is not None:
                raise ValueError(
                    f"{op}: the call before is on {last!r}, which is being captured: it cannot be waited for"
                )
            where.wait(last.record())
        self._last[place] = where

    def close(self) -> None:
        for each in (*self.states, *self.failures):
            each.close()
        self.memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
