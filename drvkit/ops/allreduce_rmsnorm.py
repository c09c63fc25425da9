"""All-reduce between the ranks of a world, residual and RMSNorm, in one kernel.

An `AllReduce` is what calls need between them: mailboxes in symmetric memory, and the state of each rank. The number of
tokens may change from call to call, and with it the protocol that rows travel by; results do not depend on that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from ..channel import GENERATIONS, PROTOCOLS, Channel
from ..device import Device
from ..world import World
from . import FLOATS, Where, aligned, apart, array, device_of, eps_of, kernel, launch, shaped, whole

if TYPE_CHECKING:
    from ..graph import After
    from ..memory import View
    from ..node import Node

__all__ = ["AllReduce", "allreduce_rmsnorm"]

ABSENT = 0x80008000  # a word of an empty mailbox
# The bytes of a call's rows up to which a protocol is the fastest, by ranks; the last one has all above. Of two ranks
# measured on H200s; of more taken from what others report for such machines, as one-shot protocols send (ranks - 1)
# times the rows and two-shot less than twice.
FASTEST: dict[int, tuple[tuple[str, int], ...]] = {
    2: (("lamport", 4 << 20), ("two_shot", 1 << 62)),
    3: (("lamport", 1 << 20), ("two_shot", 1 << 62)),
    4: (("lamport", 384 << 10), ("two_shot", 1 << 62)),
    **dict.fromkeys((5, 6, 7, 8), (("lamport", 128 << 10), ("two_shot", 1 << 62))),
}
# A row of more parts of 16 bytes than THREADS has a cluster of blocks: of few tokens FEW_BLOCKS or more, which share
# the loads and the waiting; of many tokens as few as can be, for there are blocks enough.
THREADS, FEW_BLOCKS, MANY_TOKENS = 256, 4, 64
MOST_BLOCKS = 8  # of a cluster
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


class AllReduce(Channel):
    """What all-reduces of one row length and dtype share.

    Args:
        world: of 2 to 8 ranks. With virtual ranks all arrays have a first axis more, of the ranks.
        max_tokens: rows of a call at most.
        hidden: elements of a row, a multiple of 16 bytes, at most 128 KB of two ranks, 64 KB of up to four, else 32 KB.
        dtype: bfloat16, float16 or float32.
        protocols: the tokens up to which each protocol is taken, with rising numbers, the last at least
            ``max_tokens``: "lamport", "packets", "flags" and "two_shot", which ``cuda_src/dk/protocols.cuh`` describes.
            By default what is the fastest.
        timeout_s: how long a kernel waits for another rank.
        multicast: whether rows go to all ranks by one store. For hosts that are one's own, see `SymmetricMemory`.
    """

    def __init__(
        self,
        world: World,
        *,
        max_tokens: int,
        hidden: int,
        dtype: DTypeLike = ml_dtypes.bfloat16,
        protocols: Mapping[str, int] | None = None,
        timeout_s: float = 10.0,
        multicast: bool = False,
    ) -> None:
        what = type(self).__name__
        for name, number in (("max_tokens", max_tokens), ("hidden", hidden)):
            whole(f"{what}: {name}", number)
        self.max_tokens, self.hidden, self.dtype = max_tokens, hidden, np.dtype(dtype)
        if self.dtype not in FLOATS:
            raise TypeError(f"{what}: dtype: wanted {', '.join(map(str, FLOATS))}, got {self.dtype}")
        self.row_bytes = hidden * self.dtype.itemsize
        self.most_threads = 1024 if world.size == 2 else 512 if world.size <= 4 else 256  # of a block
        most = 16 * MOST_BLOCKS * self.most_threads
        if hidden < 1 or self.row_bytes % 16 or self.row_bytes > most:
            raise ValueError(
                f"{what}: hidden: wanted rows of a multiple of 16 bytes up to {most >> 10} KB, got {hidden!r}"
            )
        if max_tokens < 1:
            raise ValueError(f"{what}: max_tokens: wanted at least 1, got {max_tokens!r}")
        if protocols is None:
            fastest = FASTEST.get(world.size, ())
            protocols = {name: min(most // self.row_bytes, max_tokens) for name, most in fastest}
        if not isinstance(protocols, Mapping):
            raise TypeError(f"{what}: protocols: wanted a mapping of names to tokens, got {protocols!r}")
        self.protocols = {name: whole(f"{what}: protocols[{name!r}]", most) for name, most in protocols.items()}
        """The tokens up to which each protocol is taken."""
        unknown = set(self.protocols) - set(PROTOCOLS)
        if unknown:
            raise ValueError(f"{what}: protocols: wanted {', '.join(PROTOCOLS)}, got {sorted(unknown)}")
        mosts = list(self.protocols.values())
        if world.size in FASTEST and (mosts != sorted(mosts) or not mosts or mosts[0] < 0 or mosts[-1] < max_tokens):
            raise ValueError(f"{what}: protocols: wanted rising numbers up to {max_tokens}, got {self.protocols}")
        world.agree(
            f"{what} (max_tokens, hidden, dtype, protocols, multicast)",
            [max_tokens, hidden, str(self.dtype), self.protocols, multicast],
        )
        self._known: dict[tuple[Device, str, int], int] = {}
        # Mailboxes of one kind serve several protocols. Each has its rows in every generation of every rank.
        self.capacity = dict[str, int]()
        for name, most in self.protocols.items():
            area = self.area(name)
            self.capacity[area] = max(self.capacity.get(area, 0), min(most, max_tokens))
        rows = {area: GENERATIONS * world.size * count * self.row_bytes for area, count in self.capacity.items()}
        super().__init__(
            world,
            {
                area: (nbytes * (2 if area == "packets" else 1), ABSENT if area == "emptied" else 0)
                for area, nbytes in rows.items()
            },
            blocks=max_tokens * MOST_BLOCKS if "flags" in self.protocols else 0,
            timeout_s=timeout_s,
            multicast=multicast,
        )

    @staticmethod
    def area(protocol: str) -> str:
        """The mailboxes of a protocol."""
        return protocol if protocol in ("packets", "flags") else "emptied"

    def protocol_of(self, tokens: int) -> str:
        """How the rows of a call travel. Results do not depend on it."""
        return next(name for name, most in self.protocols.items() if tokens <= most)

    def launch_of(self, tokens: int) -> tuple[int, int]:
        """Blocks of a cluster, which has a row, and threads of a block. Results do not depend on it."""
        parts, many = self.row_bytes // 16, tokens >= MANY_TOKENS
        cluster = 1 if many or parts <= THREADS else FEW_BLOCKS
        while cluster < MOST_BLOCKS and cluster * (self.most_threads if many else THREADS) < parts:
            cluster *= 2
        return cluster, -(-parts // (32 * cluster)) * 32

    # For the ops

    def rows(self, op: str, role: str, operand: Any) -> tuple[View, int]:
        """A [tokens, hidden] operand, and its tokens."""
        seen = aligned(f"{op}: {role}", array(f"{op}: {role}", operand, [self.dtype]))
        ranks = (self.world.size,) if self.world.virtual else ()
        tokens = seen.shape[-2] if len(seen.shape) == 2 + len(ranks) else -1
        if tokens < 0 or seen.shape != (*ranks, tokens, self.hidden):
            wanted = ", ".join(map(str, (*ranks, "tokens", self.hidden)))
            raise ValueError(f"{op}: {role}: wanted shape ({wanted}), got {seen.shape}")
        if tokens > self.max_tokens:
            raise ValueError(f"{op}: {role} has {tokens} tokens: the group was made for {self.max_tokens}")
        return seen, tokens

    def submit(
        self,
        where: Where,
        source: str,
        op: str,
        types: str,
        tokens: int,
        protocol: str,
        operands: tuple[Any, ...],
        *kind: Any,
        after: After,
        name: str | None,
    ) -> Node | None:
        """Launch ``op<types, protocol, multicast, ranks, blocks of a cluster>``, a cluster for a row; its arguments
        begin with ``operands``. ``kind``: what else all ranks must have alike."""
        world, device = self.world, device_of(op, where)
        place, (cluster, block) = self.place(op, device), self.launch_of(tokens)
        multicast = str(self.multicast).lower()
        function = f"{op}<{types},{PROTOCOLS.index(protocol)},{multicast},{world.size},{cluster}>"
        clusters = min(tokens, self._resident(device, source, function, cluster, block))
        area = self.area(protocol)
        args = (
            *(*operands, tokens, self.hidden, self.offsets[area], self.capacity[area]),
            *self.args(place, op, types, protocol, tokens, self.hidden, clusters, cluster, *kind),
        )
        grid, _ = self.spread(clusters * cluster)
        self.follow(op, place, where)
        attributes = self._attributes(cluster)
        return launch(where, source, function, grid if tokens else 0, block, args, after=after, name=name, **attributes)

    def _attributes(self, cluster: int) -> dict[str, Any]:
        """Of a launch."""
        return self.spread(0)[1] | ({"cluster": cluster} if cluster > 1 else {})

    def _resident(self, device: Device, source: str, function: str, cluster: int, block: int) -> int:
        """Clusters of a rank that are on the device at a time. No call has more, for blocks wait for each other."""
        key = device, function, block
        if key not in self._known:
            ready, ranks = kernel(device, source, function), self.world.size if self.world.virtual else 1
            if cluster > 1:
                grid = (cluster, ranks) if self.world.virtual else cluster
                self._known[key] = ready.max_active_clusters(grid, block, **self._attributes(cluster)) // ranks
            else:
                self._known[key] = ready.occupancy(block) * device.multiprocessors // ranks
        return self._known[key]


def allreduce_rmsnorm(
    where: Where,
    group: AllReduce,
    x: Any,
    residual: Any,
    weight: Any,
    out: Any,
    residual_out: Any,
    *,
    out_scale: Any = None,
    eps: float = 1e-6,
    after: After = None,
    name: str | None = None,
) -> Node | None:
    """``h = sum over ranks of x + residual``, ``out = h * rsqrt(mean(h^2) + eps) * weight``, ``residual_out = h``; see
    `drvkit.ref.allreduce_rmsnorm` for the bits.

    Every rank makes the call with the same number of tokens; a rank that makes another one, or none, is found by the
    others within the group's ``timeout_s``: rows that did not come are NaN, `AllReduce.check` raises, which alone tells
    that others are of use, and `AllReduce.reset` makes the group usable again.

    Args:
        where: a stream or graph of the rank's device.
        x, residual, out, residual_out: [tokens, hidden], with virtual ranks [ranks, tokens, hidden]. ``out`` and
            ``residual_out`` may be ``x`` or ``residual``, and overlap nothing else. Without tokens nothing is launched,
            on no rank.
        weight: [hidden].
        out_scale: float32 [1], positive: then ``out`` is float8_e4m3fn, and has what it would have divided by this, at
            most 448 in size.
    """
    op = "allreduce_rmsnorm"
    AllReduce.wanted(op, group)
    eps = eps_of(op, eps)
    seen, tokens = group.rows(op, "x", x)
    views, narrow = {"x": seen}, out_scale is not None
    for role, operand in {"residual": residual, "weight": weight, "out": out, "residual_out": residual_out}.items():
        dtype = E4M3 if role == "out" and narrow else group.dtype
        views[role] = aligned(f"{op}: {role}", array(f"{op}: {role}", operand, [dtype]))
        shaped(f"{op}: {role}", views[role], (group.hidden,) if role == "weight" else seen.shape)
    if narrow:
        views["out_scale"] = array(f"{op}: out_scale", out_scale, [np.dtype(np.float32)])
        shaped(f"{op}: out_scale", views["out_scale"], (1,))
    for role in ("out", "residual_out"):
        for other in [each for each in views if each not in ("out", "residual_out")]:
            same = views[other].address == views[role].address and views[other].dtype == views[role].dtype
            if other in ("weight", "out_scale") or not same:
                apart(f"{op}: {role}", views[role], other, views[other])
    apart(f"{op}: residual_out", views["residual_out"], "out", views["out"])
    ctype = FLOATS[group.dtype]
    types = f"{ctype},{'__nv_fp8_e4m3' if narrow else ctype}"
    operands = (x, residual, weight, out, residual_out, out_scale, eps)
    protocol = group.protocol_of(tokens)
    return group.submit(where, op, op, types, tokens, protocol, operands, eps, after=after, name=name)
