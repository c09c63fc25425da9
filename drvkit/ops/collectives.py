"""All-reduce, reduce-scatter, all-gather and barrier between the ranks of a world, and all-reduce between hosts.

The first two are calls of an `AllReduce`, between its others; all-gather has an `AllGather` of its own, for it moves
any bits; a barrier is a call of whatever group. `AllReduceOfGroups` is made of those, and of NCCL where memory is not
shared. Every rank makes the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Self

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from ..channel import GENERATIONS, PER_MULTIPROCESSOR, PROTOCOLS, Channel
from ..device import Device, Stream
from ..memory import Buffer, View, holder, view_of
from ..nccl import Nccl
from ..world import World
from . import BLOCK, FLOATS, Where, aligned, apart, array, device_of, kernel, launch, shaped, whole
from .allreduce_rmsnorm import AllReduce

if TYPE_CHECKING:
    from ..graph import After
    from ..node import Node

__all__ = [
    "AllGather",
    "AllReduceOfGroups",
    "all_gather",
    "allreduce",
    "allreduce_of_groups",
    "barrier",
    "reduce_scatter",
]


def allreduce(
    where: Where, group: AllReduce, x: Any, out: Any, *, after: After = None, name: str | None = None
) -> Node | None:
    """``out = sum over ranks of x``, in rank order in float32, rounded once; see `drvkit.ref.collectives.allreduce`.

    x, out: [tokens, hidden], with virtual ranks [ranks, tokens, hidden]; ``out`` may be ``x``. Otherwise as
    `drvkit.ops.allreduce_rmsnorm`.
    """
    op = "allreduce"
    AllReduce.wanted(op, group)
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
    op = "reduce_scatter"
    AllReduce.wanted(op, group)
    size = group.world.size
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
            blocks=max(PER_MULTIPROCESSOR * device.multiprocessors for device in world.devices)
            if "flags" in slots
            else 0,
            timeout_s=timeout_s,
            multicast=multicast,
        )

    def kernel(self, area: str) -> str:
        """That which uses these mailboxes."""
        return f"all_gather<{PROTOCOLS.index(area)},{str(self.multicast).lower()},{self.world.size}>"


def all_gather(
    where: Where, group: AllGather, x: Any, out: Any, *, after: After = None, name: str | None = None
) -> Node | None:
    """``out[r] = x of rank r``, whatever the bits are.

    x: any shape and dtype, of a multiple of 16 bytes; out: [ranks, shape of x]; with virtual ranks both have a first
    axis more, of the ranks.
    """
    op = "all_gather"
    AllGather.wanted(op, group)
    device, size, virtual = device_of(op, where), group.world.size, group.world.virtual
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
    area, units = "packets" if nbytes <= group.packets_up_to else "flags", nbytes // 16
    place = group.place(op, device)
    function = group.kernel(area)
    blocks = group.blocks(kernel(device, "collectives", function), BLOCK, -(-units // BLOCK))
    kind = group.args(place, op, area, units, blocks)
    args = (x, out, units, group.offsets[area], group.units[area], *kind)
    grid, attributes = group.spread(blocks)
    group.follow(op, place, where)
    return launch(
        where, "collectives", function, grid if units else 0, BLOCK, args, after=after, name=name, **attributes
    )


def barrier(where: Where, group: Channel, *, after: After = None, name: str | None = None) -> Node | None:
    """Ends when all ranks have begun it. What kernels before it wrote is seen by kernels behind it, of all ranks."""
    op = "barrier"
    Channel.wanted(op, group)
    place, (grid, attributes) = group.place(op, device_of(op, where)), group.spread(1)
    group.follow(op, place, where)
    function, args = f"{op}<{group.world.size}>", group.args(place, op)
    return launch(where, "collectives", function, grid, 32, args, after=after, name=name, **attributes)


class AllReduceOfGroups:
    """What all-reduces over groups of ranks share, such as the GPUs of several hosts: a two-shot all-reduce in each
    group, with an exchange between the groups after its first half::

        host = world.split([socket.gethostname()])
        rail = world.split([host.ranks[0]])  # the ranks at the same place of each host
        groups = AllReduceOfGroups([host], [Nccl(rail)], max_tokens=128, hidden=7168)

    Each rank has a part of all rows' elements: it gets the group's sum of that part, the sum over all groups from those
    at its place in the others, and gives it to its group. So a rank sends 1/ranks of the bytes to other groups.

    Args:
        groups: the worlds that have ranks in this process, of those in which memory is shared. All groups have as many
            ranks, 2 to 8. With virtual ranks all arrays have a first axis more, of the ranks.
        between: what has ranks of this process, of those that are at the same place in each group: an `Nccl`, or a
            world in which memory is shared too, whose ranks then use an `AllReduce`. Of groups of virtual ranks: of
            their devices.
        max_tokens, dtype, timeout_s: as of `AllReduce`. NCCL's waits have no deadline.
        hidden: elements of a row, of which each rank of a group has a multiple of 16 bytes.
    """

    def __init__(
        self,
        groups: Sequence[World],
        between: Sequence[World | Nccl],
        *,
        max_tokens: int,
        hidden: int,
        dtype: DTypeLike = ml_dtypes.bfloat16,
        timeout_s: float = 10.0,
    ) -> None:
        what = type(self).__name__
        kinds = {(world.size, world.virtual) for world in groups}
        if len(kinds) != 1:
            raise ValueError(f"{what}: groups: wanted worlds of one size and kind, got {list(groups)}")
        ((self.size, self.virtual),) = kinds
        self.max_tokens, self.hidden, self.dtype = max_tokens, whole(f"{what}: hidden", hidden), np.dtype(dtype)
        if hidden < 1 or hidden * self.dtype.itemsize % (16 * self.size):
            raise ValueError(
                f"{what}: hidden: wanted rows of a multiple of 16 bytes for each of {self.size} ranks, got {hidden}"
            )
        self.width = hidden // self.size  # of a part of a row
        places = {d: r for world in groups for r, d in zip(world.ranks, world.devices, strict=True)}
        worlds = [each.world if isinstance(each, Nccl) else each for each in between]
        exchanging = [device for world in worlds for device in world.devices]
        if sorted(device.id for device in exchanging) != sorted(device.id for device in places):
            raise ValueError(f"{what}: between: wanted all devices of {list(groups)} once, got {worlds}")
        for world in worlds:
            at = {0 if self.virtual else places[device] for device in world.devices}
            if len(at) != 1:
                raise ValueError(f"{what}: between: wanted ranks at one place of their groups, got {world!r} at {at}")
            told = [max_tokens, hidden, str(self.dtype), self.size, self.virtual, *at]
            world.agree(f"{what} (max_tokens, hidden, dtype, ranks of a group, virtual, place)", told)
        rows = max_tokens * (self.size if self.virtual else 1)
        self._in, self._between = dict[Device, tuple[AllReduce, AllGather]](), dict[Device, AllReduce | Nccl]()
        with ExitStack() as made:
            for world in groups:
                how: dict[str, Any] = {"dtype": dtype, "timeout_s": timeout_s, "protocols": {"lamport": max_tokens}}
                sums = made.enter_context(AllReduce(world, max_tokens=max_tokens, hidden=self.width, **how))
                nbytes = max_tokens * sums.row_bytes
                gathers = made.enter_context(AllGather(world, max_bytes=nbytes, timeout_s=timeout_s))
                self._in |= dict.fromkeys(world.devices, (sums, gathers))
                for device in dict.fromkeys(world.devices):
                    for area in gathers.units:  # not when the exchange before it waits: that may hold up the loading
                        kernel(device, "collectives", gathers.kernel(area))
            for each in between:
                exchange: Any = each
                if isinstance(each, World):
                    how = {"dtype": dtype, "timeout_s": timeout_s}
                    exchange = made.enter_context(AllReduce(each, max_tokens=rows, hidden=self.width, **how))
                self._between |= dict.fromkeys(exchange.world.devices, exchange)
            self.parts = {device: made.enter_context(device.empty((rows, self.width), dtype)) for device in places}
            self._made = made.pop_all()

    def _channels(self) -> list[Channel]:
        every = [*(each for pair in self._in.values() for each in pair), *self._between.values()]
        return [each for each in dict.fromkeys(every) if isinstance(each, Channel)]

    def check(self) -> None:
        """As `AllReduce.check`."""
        for each in self._channels():
            each.check()

    def reset(self) -> None:
        """As `AllReduce.reset`."""
        for each in self._channels():
            each.reset()

    def close(self) -> None:
        """An `Nccl` stays open: it is its maker's."""
        self._made.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def allreduce_of_groups(
    where: Where, groups: AllReduceOfGroups, x: Any, out: Any, *, after: After = None, name: str | None = None
) -> Node | None:
    """``out = sum over all ranks of all groups of x``: over the ranks of a group in rank order in float32, rounded
    once; and those sums over the groups, likewise, or as NCCL does it. All ranks have the same bits; see
    `drvkit.ref.collectives.allreduce_of_groups`.

    x, out: [tokens, hidden], with virtual ranks [ranks, tokens, hidden]; ``out`` may be ``x``. Any number of tokens up
    to ``max_tokens``, the same on all ranks. Nodes: ``name.scatter``, ``name.between`` and ``name``, which is given.
    """
    op = "allreduce_of_groups"
    if not isinstance(groups, AllReduceOfGroups):
        raise TypeError(f"{op}: groups: wanted AllReduceOfGroups, got {type(groups).__name__}")
    device, size = device_of(op, where), groups.size
    if device not in groups.parts:
        raise ValueError(f"{op}: {device.id} is no device of these groups' ranks here")
    ranks = (size,) if groups.virtual else ()
    seen = {}
    for role, operand in {"x": x, "out": out}.items():
        seen[role] = view = aligned(f"{op}: {role}", array(f"{op}: {role}", operand, [groups.dtype]))
        tokens = view.shape[-2] if len(view.shape) == 2 + len(ranks) else -1
        if view.shape != (*ranks, tokens, groups.hidden):
            wanted = ", ".join(map(str, (*ranks, "tokens", groups.hidden)))
            raise ValueError(f"{op}: {role}: wanted shape ({wanted}), got {view.shape}")
        place = device.locate(view.address) if view.nbytes else None
        if place not in (None, device.ordinal):
            raise ValueError(f"{op}: {role} is on device {place}, {device.id} makes the call")
    if seen["out"].readonly:
        raise ValueError(f"{op}: out can only be read")
    shaped(f"{op}: out", seen["out"], seen["x"].shape)
    if seen["x"].address != seen["out"].address:
        apart(f"{op}: out", seen["out"], "x", seen["x"])
    if tokens > groups.max_tokens:
        raise ValueError(f"{op}: x has {tokens} tokens: the groups were made for {groups.max_tokens}")
    if not tokens:
        return None if isinstance(where, Stream) else where.empty(after=after, name=name)
    # A row need not divide: the elements of all rows, one behind the other, do.
    shape = (*ranks, size, tokens, groups.width)
    x, out = _reshaped(device, x, seen["x"], shape), _reshaped(device, out, seen["out"], shape)
    rows = groups.parts[device][: tokens * (size if ranks else 1)]
    part = rows.reshape(*ranks, tokens, groups.width)
    (sums, gathers), between = groups._in[device], groups._between[device]
    first, second = (f"{name}.{step}" if name is not None else None for step in ("scatter", "between"))
    last: Any = reduce_scatter(where, sums, x, part, after=after, name=first)
    if isinstance(between, Nccl):
        last = between.allreduce(where, rows, after=last, name=second)
    else:
        last = allreduce(where, between, rows, rows, after=last, name=second)
    return all_gather(where, gathers, part, out, after=last, name=name)


def _reshaped(device: Device, operand: Any, seen: View, shape: tuple[int, ...]) -> Buffer:
    if isinstance(operand, Buffer):
        return operand.reshape(shape)
    return Buffer.borrow(device, seen.address, shape, seen.dtype, owner=holder(operand))


def _any(label: str, operand: Any) -> View:
    """A contiguous device array, of whatever dtype."""
    seen = view_of(operand)
    if seen is None or seen.on_host:
        raise TypeError(f"{label}: wanted a device array, got {type(operand).__name__}")
    return aligned(label, array(label, operand, [seen.dtype]))
