"""The two exchanges of Ulysses: from some tokens of all heads on each rank to all tokens of some heads, and back.

Between them each rank computes attention of its heads over all tokens: ranks share the work of a long sequence::

    ulysses_to_heads(stream, group, q, k, v)          # q: [tokens, heads, dim], of this rank's tokens
    attention(group.q(n), group.k(n), group.v(n), o)  # [n, heads of this rank, dim], of all n tokens
    ulysses_to_tokens(stream, group, o)
    group.o(tokens)                                   # [tokens, heads, dim]

Several sequences, one behind the other, may be shared out at any token. Heads need not be a multiple of the ranks, and
there may be fewer key heads than ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from ..channel import GENERATIONS, MOST_RANKS, PER_MULTIPROCESSOR, PROTOCOLS, Channel
from ..memory import Buffer, View, view_of
from ..ref.ulysses import heads_of, key_heads_of
from ..world import World
from . import Where, aligned, apart, device_of, kernel, launch, span, view, whole

if TYPE_CHECKING:
    from ..graph import After
    from ..node import Node

__all__ = ["Ulysses", "ulysses_to_heads", "ulysses_to_tokens"]

BLOCK = 512


class Ulysses(Channel):
    """What the exchanges share, and their results, in symmetric memory: they stay until the next exchange of that way.

    Args:
        world: of 2 to 8 ranks. Virtual ranks have as many tokens each, and operands a first axis more, of the ranks.
        max_tokens: of all ranks together, at most.
        max_local_tokens: of one rank, at most; by default as many.
        heads, kv_heads, dim: of the model: query heads, of which every heads / kv_heads share a key head; elements of a
            head, a multiple of 16 bytes.
        dtype: any; bits are kept.
        packets_up_to: the bytes, of what the pair of ranks with the most exchanges, or a rank keeps, up to which each
            word travels beside the number of its call, which needs one flight, but twice the bytes; above, a flag
            follows the data.
        timeout_s: how long a kernel waits for another rank.
    """

    def __init__(
        self,
        world: World,
        *,
        max_tokens: int,
        heads: int,
        kv_heads: int,
        dim: int,
        dtype: DTypeLike = ml_dtypes.bfloat16,
        max_local_tokens: int | None = None,
        packets_up_to: int = 512 << 10,
        timeout_s: float = 10.0,
    ) -> None:
        what = type(self).__name__
        max_local_tokens = max_tokens if max_local_tokens is None else max_local_tokens
        counts = {"max_tokens": max_tokens, "max_local_tokens": max_local_tokens, "heads": heads, "kv_heads": kv_heads}
        for name, number in (counts | {"dim": dim}).items():
            if whole(f"{what}: {name}", number) < 1:
                raise ValueError(f"{what}: {name}: wanted at least 1, got {number}")
        if whole(f"{what}: packets_up_to", packets_up_to) < 0:
            raise ValueError(f"{what}: packets_up_to: wanted at least 0, got {packets_up_to}")
        if heads % kv_heads:
            raise ValueError(
                f"{what}: wanted a whole number of query heads for each key head, got {heads} and {kv_heads}"
            )
        if heads < world.size:
            raise ValueError(f"{what}: heads: wanted one for each of {world.size} ranks or more, got {heads}")
        self.dtype = np.dtype(dtype)
        if self.dtype.hasobject:
            raise TypeError(f"{what}: dtype: wanted one of plain bits, got {self.dtype}")
        self.head_bytes = dim * self.dtype.itemsize
        if self.head_bytes % 16:
            raise ValueError(f"{what}: dim: wanted heads of a multiple of 16 bytes, got {dim} of {self.dtype}")
        self.max_tokens, self.max_local_tokens, self.packets_up_to = max_tokens, max_local_tokens, packets_up_to
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        self.heads_of = [heads_of(rank, world.size, heads) for rank in range(world.size)]
        """The query heads of each rank."""
        self.key_heads_of = [key_heads_of(rank, world.size, heads, kv_heads) for rank in range(world.size)]
        """The key head that each local one is, of each rank; see `drvkit.ref.ulysses`."""
        most, most_keys = len(self.heads_of[0]), max(map(len, self.key_heads_of))
        if max_tokens * (most + 2 * most_keys) * self.head_bytes >= 2**33:  # units are counted by int
            raise ValueError(f"{what}: max_tokens: {max_tokens} tokens of a rank's heads are 8 GB or more")
        world.agree(
            f"{what} {tuple(counts)}, dim, dtype, packets_up_to",
            [*counts.values(), dim, str(self.dtype), packets_up_to],
        )
        self.capacity = packets_up_to // 16
        slots = GENERATIONS * world.size * self.capacity
        results = {"q": max_tokens * most, "k": max_tokens * most_keys, "v": max_tokens * most_keys}
        results["o"] = max_local_tokens * heads
        super().__init__(
            world,
            {"packets": (slots * 32, 0)} | {name: (count * self.head_bytes, 0) for name, count in results.items()},
            blocks=max(PER_MULTIPROCESSOR * device.multiprocessors for device in world.devices),
            timeout_s=timeout_s,
        )

    def q(self, tokens: int, rank: int | None = None) -> Buffer:
        """[tokens, heads of the rank, dim]: queries of all tokens. ``rank`` is by default the first of this process."""
        return self._result("q", tokens, rank)

    def k(self, tokens: int, rank: int | None = None) -> Buffer:
        """[tokens, key heads of the rank, dim]."""
        return self._result("k", tokens, rank)

    def v(self, tokens: int, rank: int | None = None) -> Buffer:
        """[tokens, key heads of the rank, dim]."""
        return self._result("v", tokens, rank)

    def o(self, tokens: int, rank: int | None = None) -> Buffer:
        """[tokens, heads, dim], of the rank's own tokens."""
        return self._result("o", tokens, rank)

    def _result(self, name: str, tokens: int, rank: int | None) -> Buffer:
        rank = self.world.ranks[0] if rank is None else rank
        most = self.max_local_tokens if name == "o" else self.max_tokens
        if rank not in self.world.ranks:
            raise ValueError(f"Ulysses.{name}: rank: wanted one of this process, {self.world.ranks}, got {rank!r}")
        if not 0 <= whole(f"Ulysses.{name}: tokens", tokens) <= most:
            raise ValueError(f"Ulysses.{name}: tokens: wanted 0 to {most}, got {tokens}")
        heads = {"q": len(self.heads_of[rank]), "o": self.heads}.get(name, len(self.key_heads_of[rank]))
        return self.memory.part(rank, (tokens, heads, self.dim), self.dtype, offset=self.offsets[name])

    # For the ops

    def apart_from_results(self, op: str, place: int, views: dict[str, View], results: dict[str, int]) -> None:
        """Refuse operands inside of results that the call overwrites; ``results``: of so many tokens."""
        for rank in self.world.ranks if self.world.virtual else [self.world.ranks[place]]:
            for name, tokens in results.items():
                result = view_of(self._result(name, tokens, rank))
                for role, seen in views.items():
                    if result is not None and result.nbytes and seen.nbytes:
                        apart(f"{op}: group.{name}", result, role, seen)

    def operand(self, op: str, role: str, operand: Any, heads: int | None) -> tuple[View, int, int]:
        """A [tokens, heads, dim] operand; its tokens, and units from one to the next. Heads are contiguous."""
        seen = aligned(f"{op}: {role}", view(f"{op}: {role}", operand, [self.dtype]))
        axes = (self.world.size,) if self.world.virtual else ()
        size = self.dtype.itemsize
        if len(seen.shape) != len(axes) + 3 or seen.shape != (*axes, seen.shape[-3], heads, self.dim):
            wanted = ", ".join(map(str, (*axes, "tokens", heads, self.dim)))
            raise ValueError(f"{op}: {role}: wanted shape ({wanted}), got {seen.shape}")
        if 0 not in seen.shape and (
            seen.strides[-2:] != (self.head_bytes, size)
            or any(stride % 16 or stride < 0 for stride in seen.strides[:-2])
        ):
            raise ValueError(
                f"{op}: {role}: wanted heads one behind the other, and tokens a multiple of 16 bytes apart, got "
                f"strides {seen.strides} of shape {seen.shape}"
            )
        return seen, seen.shape[-3], seen.strides[-3] // 16

    def shares(self, op: str, tokens: Sequence[int]) -> list[int]:
        """The tokens of each rank, checked."""
        size = self.world.size
        if not isinstance(tokens, Sequence):
            raise TypeError(f"{op}: tokens: wanted the number of each rank's tokens, got {tokens!r}")
        made = [whole(f"{op}: tokens[{rank}]", each) for rank, each in enumerate(tokens)]
        if len(made) != size or min(made) < 0:
            raise ValueError(f"{op}: tokens: wanted the number of each of {size} ranks, got {made}")
        if self.world.virtual and len(set(made)) > 1:
            raise ValueError(f"{op}: tokens: wanted as many for each virtual rank, got {made}")
        if sum(made) > self.max_tokens or max(made) > self.max_local_tokens:
            raise ValueError(
                f"{op}: tokens: {made} are more than the {self.max_tokens} of all, or the {self.max_local_tokens} of "
                "one, that the group was made for"
            )
        return made

    def submit(
        self,
        where: Where,
        op: str,
        tokens: Sequence[int],
        pair: list[int],
        before: tuple[Any, ...],
        behind: tuple[Any, ...],
        *,
        after: After,
        name: str | None,
    ) -> Node | None:
        """Launch ``op``; ``pair`` has the units that go from each rank to each."""
        device = device_of(op, where)
        place, largest = self.place(op, device), max(pair)
        protocol = "packets" if largest * 16 <= self.packets_up_to else "flags"
        function = f"{op}<{PROTOCOLS.index(protocol)},{self.world.size}>"
        blocks = self.blocks(kernel(device, "ulysses", function), BLOCK, -(-largest // BLOCK))
        of_rank = [
            *([*itertools.accumulate(tokens, initial=0)][:-1], list(tokens)),
            *(
                [heads.start for heads in self.heads_of],
                list(map(len, self.heads_of)),
                list(map(len, self.key_heads_of)),
            ),
            [len(heads) // len(keys) for heads, keys in zip(self.heads_of, self.key_heads_of, strict=True)],
        ]
        ranks = np.zeros((len(of_rank), MOST_RANKS), np.int32)
        ranks[:, : self.world.size] = of_rank
        kind = self.args(place, op, protocol, list(tokens), blocks)
        args = (*before, ranks.tobytes(), *behind, self.offsets["packets"], self.capacity, *kind)
        grid, attributes = self.spread(blocks)
        self.follow(op, place, where)
        return launch(
            where, "ulysses", function, grid if largest else 0, BLOCK, args, after=after, name=name, **attributes
        )


def ulysses_to_heads(
    where: Where,
    group: Ulysses,
    q: Any,
    k: Any,
    v: Any,
    tokens: Sequence[int] | None = None,
    *,
    after: After = None,
    name: str | None = None,
) -> Node | None:
    """Queries, keys and values of this rank's tokens to the ranks that have their heads: the results are
    ``group.q(n)``, ``group.k(n)`` and ``group.v(n)``, of all n tokens, in the order of ranks.

    Every rank makes the call; a rank that makes another one, or none, is found by the others within the group's
    ``timeout_s``: then results are NaN (-1 of integers), and `Ulysses.check` raises. The results of the call before are
    overwritten when this rank's stream has come to this call.

    Args:
        where: a stream or graph of the rank's device.
        q: [tokens, heads, dim]; k, v: [tokens, kv_heads, dim]; with virtual ranks [ranks, tokens, ...]. Each may be a
            slice of a row that has all three.
        tokens: of each rank; by default as many as of this one. It is frozen into a graph.
    """
    op = "ulysses_to_heads"
    Ulysses.wanted(op, group)
    place = group.place(op, device_of(op, where))
    given = {"q": (q, group.heads), "k": (k, group.kv_heads), "v": (v, group.kv_heads)}
    views = {role: group.operand(op, role, operand, heads) for role, (operand, heads) in given.items()}
    local = views["q"][1]
    for role, (_, count, _) in views.items():
        if count != local:
            raise ValueError(f"{op}: {role} has {count} tokens, q has {local}")
    shares = group.shares(op, [local] * group.world.size if tokens is None else tokens)
    rank = group.world.ranks[place]
    if shares[rank] != local:
        raise ValueError(f"{op}: rank {rank} gives {local} tokens, tokens says {shares[rank]}")
    results = dict.fromkeys(given, sum(shares))
    group.apart_from_results(op, place, {role: seen for role, (seen, _, _) in views.items()}, results)
    units = group.head_bytes // 16
    pair = [
        count * (len(heads) + 2 * len(keys)) * units
        for count, (heads, keys) in itertools.product(shares, zip(group.heads_of, group.key_heads_of, strict=True))
    ]
    before = (
        *(span(operand, views[role][0]) for role, (operand, _) in given.items()),
        *(row for _, _, row in views.values()),
        *(seen.strides[0] // 16 if group.world.virtual else 0 for seen, _, _ in views.values()),
    )
    behind = (*(group.offsets[role] for role in given), group.heads // group.kv_heads, units)
    return group.submit(where, op, shares, pair, before, behind, after=after, name=name)


def ulysses_to_tokens(
    where: Where,
    group: Ulysses,
    o: Any,
    tokens: Sequence[int] | None = None,
    *,
    after: After = None,
    name: str | None = None,
) -> Node | None:
    """What attention made of this rank's heads to the ranks that have the tokens: the result is ``group.o(tokens)``.

    Otherwise as `ulysses_to_heads`.

    Args:
        o: [all tokens, heads of the rank, dim]; with virtual ranks, which then must have as many heads each, [ranks,
            all tokens, heads, dim].
        tokens: of each rank; by default all have as many.
    """
    op = "ulysses_to_tokens"
    Ulysses.wanted(op, group)
    place, size = group.place(op, device_of(op, where)), group.world.size
    counts = list(map(len, group.heads_of))
    if group.world.virtual and len(set(counts)) > 1:
        raise ValueError(f"{op}: wanted as many heads for each virtual rank, got {counts}")
    seen, count, row = group.operand(op, "o", o, counts[group.world.ranks[place]])
    if tokens is None and count % size:
        raise ValueError(f"{op}: o has {count} tokens, which {size} ranks cannot share alike: tokens= says how")
    shares = group.shares(op, [count // size] * size if tokens is None else tokens)
    if sum(shares) != count:
        raise ValueError(f"{op}: o has {count} tokens, tokens has {sum(shares)} together")
    group.apart_from_results(op, place, {"o": seen}, {"o": shares[group.world.ranks[place]]})
    units = group.head_bytes // 16
    pair = [heads * each * units for heads, each in itertools.product(counts, shares)]
    before = (span(o, seen), row, seen.strides[0] // 16 if group.world.virtual else 0)
    behind = (group.offsets["o"], group.heads, units)
    return group.submit(where, op, shares, pair, before, behind, after=after, name=name)
