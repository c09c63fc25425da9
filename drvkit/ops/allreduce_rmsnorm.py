"""All-reduce between the ranks of a world, residual and RMSNorm, in one kernel.

An `AllReduce` is what calls need between them: mailboxes in symmetric memory, and the state of each rank. Every rank
makes one at the same time, and then the same calls in the same order, on streams or as nodes of graphs that are
replayed any number of times; the number of tokens may change from call to call. One call is in flight at a time.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any, Self

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from ..device import Device
from ..symmetric import SymmetricMemory
from ..world import World, WorldError
from . import FLOATS, Where, aligned, apart, array, kernel, launch, shaped, whole

if TYPE_CHECKING:
    from ..graph import After
    from ..node import Node

__all__ = ["AllReduce", "allreduce_rmsnorm"]

GENERATIONS = 3
ABSENT = 0x80008000  # a word of an empty mailbox
# Threads of a block, where the row has as many parts of 16 bytes: few blocks want many neighbours, many want few.
THREADS, MANY_TOKENS, THREADS_OF_MANY = 256, 64, 1024
MOST_BLOCKS, MOST_THREADS = 8, 1024  # of a cluster, which has one row; of a block
CAUSES = {1: "did not come", 2: "made another call"}


class AllReduce:
    """What all-reduces of one row length and dtype share.

    Args:
        world: of 2 to 8 ranks. With virtual ranks all arrays have a first axis more, of the ranks.
        max_tokens: rows of a call at most.
        hidden: elements of a row, a multiple of 16 bytes, at most 128 KB.
        dtype: bfloat16, float16 or float32.
        timeout_s: how long a kernel waits for another rank.
    """

    def __init__(
        self,
        world: World,
        *,
        max_tokens: int,
        hidden: int,
        dtype: DTypeLike = ml_dtypes.bfloat16,
        timeout_s: float = 10.0,
    ) -> None:
        what = type(self).__name__
        for name, number in (("max_tokens", max_tokens), ("hidden", hidden)):
            whole(f"{what}: {name}", number)
        self.world, self.max_tokens, self.hidden, self.dtype = world, max_tokens, hidden, np.dtype(dtype)
        if not 2 <= world.size <= 8:
            raise ValueError(f"{what}: world: wanted 2 to 8 ranks, got {world.size}")
        if self.dtype not in FLOATS:
            raise TypeError(f"{what}: dtype: wanted {', '.join(map(str, FLOATS))}, got {self.dtype}")
        self.row_bytes = hidden * self.dtype.itemsize
        if hidden < 1 or self.row_bytes % 16 or self.row_bytes > 16 * MOST_BLOCKS * MOST_THREADS:
            raise ValueError(f"{what}: hidden: wanted rows of a multiple of 16 bytes up to 128 KB, got {hidden!r}")
        if max_tokens < 1:
            raise ValueError(f"{what}: max_tokens: wanted at least 1, got {max_tokens!r}")
        if not timeout_s > 0:
            raise ValueError(f"{what}: timeout_s: wanted more than 0, got {timeout_s!r}")
        self.limit_ns = round(timeout_s * 1e9)
        world.agree(f"{what} (max_tokens, hidden, dtype)", [max_tokens, hidden, str(self.dtype)])

        self.mailboxes = -(-GENERATIONS * world.size * 8 // 256) * 256
        slots = GENERATIONS * world.size * max_tokens
        self.memory = SymmetricMemory(world, self.mailboxes + slots * self.row_bytes)
        of_launch = world.size if world.virtual else 1  # ranks of one launch
        self.states = [device.zeros((of_launch, 4), np.uint32) for device in self.devices]
        self.failures = [device.pinned((of_launch, 8), np.uint32) for device in self.devices]
        self.reset()

    @property
    def devices(self) -> list[Device]:
        """Of this process, each once."""
        return list(dict.fromkeys(self.world.devices))

    def reset(self) -> None:
        """All ranks together: forget what failed, and begin anew. Graphs stay as they are, and valid."""
        for device in self.devices:
            device.synchronize()
        self.world.barrier()
        slots = GENERATIONS * self.world.size * self.max_tokens
        for rank in self.world.ranks:
            self.memory.part(rank, self.mailboxes, np.uint8).fill_bytes(0)
            self.memory.part(rank, slots * self.row_bytes // 4, np.uint32, offset=self.mailboxes).fill(ABSENT)
        for state, failure in zip(self.states, self.failures, strict=True):
            state.fill_bytes(0)
            failure.host[:] = 0
        for device in self.devices:
            device.synchronize()
        self.world.barrier()

    def launch_of(self, tokens: int) -> tuple[int, int]:
        """Blocks of a cluster, which has a row, and threads of a block. Results do not depend on it."""
        parts, cluster = self.row_bytes // 16, 1
        while cluster < MOST_BLOCKS and cluster * (THREADS if tokens < MANY_TOKENS else THREADS_OF_MANY) < parts:
            cluster *= 2
        return cluster, -(-parts // (32 * cluster)) * 32

    def check(self) -> None:
        """Raise a `WorldError` for what a finished call of this process found wrong. Does not wait."""
        for place, failure in enumerate(self.failures):
            for virtual, (code, call, other, block, thread, low, high, _) in enumerate(failure.host.tolist()):
                if code:
                    rank = virtual if self.world.virtual else self.world.ranks[place]
                    newest = f"; its newest call was {high}" if low or high else ""
                    raise WorldError(
                        other,
                        f"allreduce_rmsnorm: rank {rank} waited in call {call + 1} for rank {other}, which "
                        f"{CAUSES[code]} within {self.limit_ns / 1e9:g} s (block {block}, thread {thread}{newest})",
                    )

    def close(self) -> None:
        for each in (*self.states, *self.failures):
            each.close()
        self.memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def allreduce_rmsnorm(
    where: Where,
    group: AllReduce,
    x: Any,
    residual: Any,
    weight: Any,
    out: Any,
    residual_out: Any,
    *,
    eps: float = 1e-6,
    after: After = None,
    name: str | None = None,
) -> Node | None:
    """``h = sum over ranks of x + residual``, ``out = h * rsqrt(mean(h^2) + eps) * weight``, ``residual_out = h``; see
    `drvkit.ref.allreduce_rmsnorm` for the bits.

    Every rank makes the call with the same number of tokens; a rank that makes another one, or none, is found by the
    others within the group's ``timeout_s``: rows that did not come are NaN, `AllReduce.check` raises, and
    `AllReduce.reset` makes the group usable again.

    Args:
        where: a stream or graph of the rank's device.
        x, residual, out, residual_out: [tokens, hidden], with virtual ranks [ranks, tokens, hidden]. ``out`` and
            ``residual_out`` may be ``x`` or ``residual``, and overlap nothing else. Without tokens nothing is launched,
            on no rank.
        weight: [hidden].
    """
    op, world, device = "allreduce_rmsnorm", group.world, where.device
    if device not in world.devices:
        raise ValueError(f"{op}: {device.id} is no device of this world's ranks here")
    place = group.devices.index(device)
    first = array(f"{op}: x", x, [group.dtype])
    ranks = (world.size,) if world.virtual else ()
    tokens = first.shape[-2] if len(first.shape) == 2 + len(ranks) else -1
    shape = (*ranks, tokens, group.hidden)
    if tokens < 0 or first.shape != shape:
        raise ValueError(
            f"{op}: x: wanted shape ({', '.join(map(str, (*ranks, 'tokens', group.hidden)))}), got {first.shape}"
        )
    if tokens > group.max_tokens:
        raise ValueError(f"{op}: x has {tokens} tokens: the group was made for {group.max_tokens}")
    views = {"x": aligned(f"{op}: x", first)}
    others = {"residual": residual, "weight": weight, "out": out, "residual_out": residual_out}
    for role, operand in others.items():
        views[role] = aligned(f"{op}: {role}", array(f"{op}: {role}", operand, [group.dtype]))
        shaped(f"{op}: {role}", views[role], (group.hidden,) if role == "weight" else shape)
    for role in ("out", "residual_out"):
        for other in ("x", "residual", "weight"):
            if other == "weight" or views[other].address != views[role].address:
                apart(f"{op}: {role}", views[role], other, views[other])
    apart(f"{op}: residual_out", views["residual_out"], "out", views["out"])
    cluster, block = group.launch_of(tokens)
    function = f"{op}<{FLOATS[group.dtype]},{world.size},{cluster}>"
    resident = kernel(device, op, function).occupancy(block) * device.multiprocessors
    clusters = min(tokens, resident // (cluster * (world.size if world.virtual else 1)))
    kind = zlib.crc32(f"{op} {tokens} {group.hidden} {group.dtype}".encode())
    rank = -1 if world.virtual else world.ranks[place]
    own = world.ranks[place]
    args = (
        *(x, residual, weight, out, residual_out, group.memory.every(own), group.memory.stride, group.mailboxes),
        *(group.states[place], group.failures[place], rank, tokens, group.hidden, group.max_tokens, group.row_bytes),
        *(kind, group.limit_ns, eps),
    )
    attributes: dict[str, Any] = {"cluster": cluster} if cluster > 1 else {}
    if world.virtual:
        attributes["cooperative"] = True
    grid = (clusters * cluster, world.size) if world.virtual else clusters * cluster
    return launch(where, op, function, grid if tokens else 0, block, args, after=after, name=name, **attributes)
