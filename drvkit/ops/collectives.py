"""All-reduce, reduce-scatter, all-gather and barrier between the ranks of a world.

The first two are calls of an `AllReduce`, between its others; all-gather has an `AllGather` of its own, for it moves
any bits; a barrier is a call of whatever group. Every rank makes the same calls in the same order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..channel import GENERATIONS, Channel
from ..memory import View, view_of
from ..world import World
from . import FLOATS, Where, aligned, apart, array, kernel, launch, shaped, whole
from .allreduce_rmsnorm import PROTOCOLS, AllReduce

if TYPE_CHECKING:
    from ..graph import After
    from ..node import Node

__all__ = ["AllGather", "all_gather", "allreduce", "barrier", "reduce_scatter"]

BLOCK = 256


def allreduce(
    where: Where, group: AllReduce, x: Any, out: Any, *, after: After = None, name: str | None = None
) -> Node | None:
    """``out = sum over ranks of x``, in rank order in float32, rounded once; see `drvkit.ref.collectives.allreduce`.

    x, out: [tokens, hidden], with virtual ranks [ranks, tokens, hidden]; ``out`` may be ``x``. Otherwise as
    `drvkit.ops.allreduce_rmsnorm`.
    """
    op = "allreduce"
    seen, tokens = group.rows(op, "x", x)
    result = aligned(f"{op}: out", array(f"{op}: out", out, [group.dtype]))
    shaped(f"{op}: out", result, seen.shape)
    if seen.address != result.address:
        apart(f"{op}: out", result, "x", seen)
    types, protocol = FLOATS[group.dtype], group.protocol_of(tokens)
    return group.submit(where, "collectives", op, types, tokens, protocol, (x, out), after=after, name=name)


def reduce_scatter(
    where: Where, group: AllReduce, x: Any, out: Any, *, after: After = None, name: str | None = None
) -> Node | None:
    """``out = sum over ranks r of what r's x has for this rank``, the bits of `allreduce`.

    x: [ranks, tokens, hidden]; out: [tokens, hidden]; with virtual ranks both have a first axis more, of the ranks. The
    group needs mailboxes of "lamport" or "two_shot" for so many tokens.
    """
    op, size = "reduce_scatter", group.world.size
    result, tokens = group.rows(op, "out", out)
    seen = aligned(f"{op}: x", array(f"{op}: x", x, [group.dtype]))
    shaped(f"{op}: x", seen, (*result.shape[:-2], size, *result.shape[-2:]))
    apart(f"{op}: out", result, "x", seen)
    room = group.capacity.get("emptied", 0)
    if tokens > room:
        raise ValueError(f"{op}: out has {tokens} tokens: the group's protocols {group.protocols} have room for {room}")
    if group.multicast:
        raise ValueError(f"{op}: each rank gets other rows: wanted a group without multicast")
    return group.submit(
        where, "collectives", op, FLOATS[group.dtype], tokens, "lamport", (x, out), after=after, name=name
    )


class AllGather(Channel):
    """What all-gathers share.

    Args:
        max_bytes: of one rank, at most.
        packets_up_to: bytes of one rank up to which each word travels beside the number of its call, which needs one
            flight, but twice the bytes; above, a flag follows the data.
        world, timeout_s, multicast: as of `AllReduce`.
    """

    def __init__(
        self,
        world: World,
        *,
        max_bytes: int,
        packets_up_to: int = 64 << 10,
        timeout_s: float = 10.0,
        multicast: bool = False,
    ) -> None:
        what = type(self).__name__
        for name, number, least in (("max_bytes", max_bytes, 1), ("packets_up_to", packets_up_to, 0)):
            if whole(f"{what}: {name}", number) < least:
                raise ValueError(f"{what}: {name}: wanted at least {least}, got {number}")
        world.agree(f"{what} (max_bytes, packets_up_to, multicast)", [max_bytes, packets_up_to, multicast])
        self.max_bytes, self.packets_up_to = max_bytes, packets_up_to
        self.units = {"packets": -(-min(max_bytes, packets_up_to) // 16), "flags": -(-max_bytes // 16)}
        if max_bytes <= packets_up_to:
            del self.units["flags"]
        slots = {name: GENERATIONS * world.size * units for name, units in self.units.items()}
        super().__init__(
            world,
            {name: (count * (32 if name == "packets" else 16), 0) for name, count in slots.items()},
            blocks=max(2 * device.multiprocessors for device in world.devices) if "flags" in slots else 0,
            timeout_s=timeout_s,
            multicast=multicast,
        )


def all_gather(
    where: Where, group: AllGather, x: Any, out: Any, *, after: After = None, name: str | None = None
) -> Node | None:
    """``out[r] = x of rank r``, whatever the bits are.

    x: any shape and dtype, of a multiple of 16 bytes; out: [ranks, shape of x]; with virtual ranks both have a first
    axis more, of the ranks.
    """
    op, size, virtual = "all_gather", group.world.size, group.world.virtual
    seen, result = _any(f"{op}: x", x), _any(f"{op}: out", out)
    if virtual and seen.shape[:1] != (size,):
        raise ValueError(f"{op}: x: wanted a first axis of {size} virtual ranks, got shape {seen.shape}")
    inner = seen.shape[1:] if virtual else seen.shape
    shaped(f"{op}: out", result, (*seen.shape[: len(seen.shape) - len(inner)], size, *inner))
    if result.dtype != seen.dtype:
        raise TypeError(f"{op}: out is {result.dtype}, x is {seen.dtype}")
    apart(f"{op}: out", result, "x", seen)
    nbytes = seen.nbytes // (size if virtual else 1)
    if nbytes % 16 or nbytes > group.max_bytes:
        raise ValueError(f"{op}: x: wanted a multiple of 16 bytes up to {group.max_bytes}, got {nbytes}")
    area, device, units = "packets" if nbytes <= group.packets_up_to else "flags", where.device, nbytes // 16
    place = group.place(op, device)
    function = f"{op}<{PROTOCOLS.index(area)},{str(group.multicast).lower()},{size}>"
    resident = min(kernel(device, "collectives", function).occupancy(BLOCK), 2) * device.multiprocessors
    blocks = min(-(-units // BLOCK), resident // (size if virtual else 1))
    kind = group.args(place, op, area, units, blocks)
    args = (x, out, units, group.offsets[area], group.units[area], *kind)
    grid: Any = (blocks, size) if virtual else blocks
    group.follow(place, where)
    attributes = {"cooperative": True} if virtual else {}
    return launch(
        where, "collectives", function, grid if units else 0, BLOCK, args, after=after, name=name, **attributes
    )


def barrier(where: Where, group: Channel, *, after: After = None, name: str | None = None) -> Node | None:
    """Ends when all ranks have begun it. What kernels before it wrote is seen by kernels behind it, of all ranks."""
    op, virtual = "barrier", group.world.virtual
    place = group.place(op, where.device)
    group.follow(place, where)
    attributes = {"cooperative": True} if virtual else {}
    grid: Any = (1, group.world.size) if virtual else 1
    function, args = f"{op}<{group.world.size}>", group.args(place, op)
    return launch(where, "collectives", function, grid, 32, args, after=after, name=name, **attributes)


def _any(label: str, operand: Any) -> View:
    """A contiguous device array, of whatever dtype."""
    seen = view_of(operand)
    if seen is None or seen.on_host:
        raise TypeError(f"{label}: wanted a device array, got {type(operand).__name__}")
    return aligned(label, array(label, operand, [seen.dtype]))
