"""All-reduces of changing sizes between ranks by the shipped kernel, or one with a bug: ``allreduce.py RANKS [BUG]``.

"one generation": mailboxes do not go round. "first word": of 16 bytes only the first four are looked at.
"""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np

from drvkit import ops
from drvkit.device import Device
from drvkit.ops.allreduce_rmsnorm import AllReduce, allreduce_rmsnorm
from drvkit.ref import allreduce_rmsnorm as ref
from drvkit.source import Source
from drvkit.world import World

BUGS = {
    "one generation": ("constexpr int kGenerations = 3;", "constexpr int kGenerations = 1;"),
    "first word": ("v.x == kAbsent || v.y == kAbsent || v.z == kAbsent || v.w == kAbsent", "v.x == kAbsent"),
}
RANKS, HIDDEN = int(sys.argv[1]), 16
SIZES = (1, 2, 2, 1, 2)
bf16 = ml_dtypes.bfloat16

rng = np.random.default_rng(1)
devices = [Device(f"cpu:{rank}") for rank in range(RANKS)]
streams = [device.stream() for device in devices]
if len(sys.argv) > 2:
    was, becomes = BUGS[sys.argv[2]]
    text = Source.find("allreduce_rmsnorm").text
    assert was in text
    for device in devices:
        source = Source.from_text(text.replace(was, becomes), "allreduce_rmsnorm.cu")
        ops._modules[device, "allreduce_rmsnorm"] = device.module(source)
weight = rng.normal(size=HIDDEN).astype(np.float32).astype(bf16)
with World.of_devices(devices) as world, AllReduce(world, max_tokens=2, hidden=HIDDEN) as group:
    calls = []
    for tokens in SIZES:
        x, residual = rng.normal(size=(2, RANKS, tokens, HIDDEN)).astype(np.float32).astype(bf16)
        arrays = []
        for rank, device in enumerate(devices):
            of: dict[str, Any] = {
                "x": device.array(x[rank]),
                "residual": device.array(residual[rank]),
                "weight": device.array(weight),
            }
            of |= {name: device.zeros(x[rank].shape, bf16) for name in ("out", "residual_out")}
            allreduce_rmsnorm(streams[rank], group, **of)
            arrays.append(of)
        calls.append((x, residual, arrays))
    for stream in streams:
        stream.synchronize()
    group.check()
    for x, residual, arrays in calls:
        _, h = ref.allreduce_rmsnorm(x, residual, weight)
        for rank, of in enumerate(arrays):
            np.testing.assert_array_equal(of["residual_out"].numpy().view(np.uint16), h[rank].view(np.uint16))
