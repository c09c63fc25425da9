"""Exchanges of Ulysses, some there and some back, by the shipped kernels: ``ulysses.py RANKS PROTOCOL [BUG]``.

PROTOCOL is "packets" or "flags". Bugs: "eager": a rank sends before the receiver has begun the call; "no meeting": a
call ends before all have made it, so that who gets nothing may be several calls ahead.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from drvkit import ops
from drvkit.channel import PROTOCOLS
from drvkit.cpu.explore import once
from drvkit.device import Device
from drvkit.ops import ulysses as op
from drvkit.ops.scale import scale
from drvkit.ops.ulysses import Ulysses, ulysses_to_heads, ulysses_to_tokens
from drvkit.ref import ulysses as ref
from drvkit.source import Source
from drvkit.world import World

RANKS, PROTOCOL = int(sys.argv[1]), sys.argv[2]
CALLS, DIM = 5, 4
TOKENS = [2 - 2 * (rank % 2) for rank in range(RANKS)]  # every second rank sends nothing
f32 = np.float32
op.BLOCK = 32  # more threads have nothing to do
BUGS = {
    "eager": "          while (!call.has_come(thread))\n            if (!call.again(thread)) break;\n",
    "no meeting": "  call.meet();\n",
}


class Call(NamedTuple):
    """Of each rank: q, k and v; what they become; what of q comes back; and what all that should be."""

    given: list[Any]
    heads: list[Any]
    tokens: list[Any]
    wanted: list[Any]


with once():
    rng = np.random.default_rng(1)
    devices = [Device(f"cpu:{rank}") for rank in range(RANKS)]
    streams = [device.stream() for device in devices]
    for device in devices:
        if len(sys.argv) > 3:
            source, bug = Source.find("ulysses"), BUGS[sys.argv[3]]
            assert bug in source.text
            ops._modules[device, "ulysses"] = device.module(replace(source, text=source.text.replace(bug, "")))
        ops.kernel(device, "scale", "scale<float,1>").occupancy(256)
        for way in ("ulysses_to_heads", "ulysses_to_tokens"):
            ops.kernel(device, "ulysses", f"{way}<{PROTOCOLS.index(PROTOCOL)},{RANKS}>").occupancy(op.BLOCK)
    calls: list[Call] = []
    for _ in range(CALLS):
        q, k, v = ([rng.normal(size=(n, RANKS, DIM)).astype(f32) for n in TOKENS] for _ in range(3))
        wanted = ref.to_heads(q, k, v)
        back = ref.to_tokens([each[0] for each in wanted], TOKENS)
        calls.append(
            Call(
                [[device.array(each[rank]) for each in (q, k, v)] for rank, device in enumerate(devices)],
                [[device.zeros(each.shape, f32) for each in wanted[0]] for device in devices],
                [device.zeros(q[rank].shape, f32) for rank, device in enumerate(devices)],
                [[*wanted[rank], back[rank]] for rank in range(RANKS)],
            )
        )

total = sum(TOKENS)
how: dict[str, Any] = {"heads": RANKS, "kv_heads": RANKS, "dim": DIM, "dtype": f32, "timeout_s": 30}
up_to = 1 << 10 if PROTOCOL == "packets" else 0
with World.of_devices(devices) as world, Ulysses(world, max_tokens=total, packets_up_to=up_to, **how) as group:
    for call in calls:
        for rank, stream in enumerate(streams):
            q, k, v = call.given[rank]
            ulysses_to_heads(stream, group, q, k, v, TOKENS)
            for result, name in zip(call.heads[rank], "qkv", strict=True):  # by a kernel: a copy would wait
                scale(stream, getattr(group, name)(total, rank), result, 1.0)
    for call in calls:
        for rank, stream in enumerate(streams):
            ulysses_to_tokens(stream, group, call.heads[rank][0], TOKENS)
            scale(stream, group.o(TOKENS[rank], rank), call.tokens[rank], 1.0)
    for stream in streams:
        stream.synchronize()
    group.check()
    for call in calls:
        for rank in range(RANKS):
            for result, want in zip([*call.heads[rank], call.tokens[rank]], call.wanted[rank], strict=True):
                np.testing.assert_array_equal(result.numpy(), want)
