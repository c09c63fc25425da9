"""All-reduces of changing sizes by the shipped kernel, or one with a bug: ``allreduce.py RANKS PROTOCOL [BUG]``.

A protocol is one of `AllReduce`, its multicast twin has "+multicast" behind its name. Bugs: see `BUGS`.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from drvkit import ops
from drvkit.channel import PROTOCOLS
from drvkit.cpu.explore import once
from drvkit.device import Device
from drvkit.ops.allreduce_rmsnorm import AllReduce, allreduce_rmsnorm
from drvkit.ref import allreduce_rmsnorm as ref
from drvkit.source import Source
from drvkit.world import World

LACKS = "return v.x == kAbsent || v.y == kAbsent || v.z == kAbsent || v.w == kAbsent;"
WAIT = """      for (;;) {
        const unsigned seen = load_acquire_sys(flag(call.part(call.me), other));
        if (seen == call.number + 1 || seen == number_behind(call.number) + 1 || !call.again(other)) break;
      }
"""
BUGS = {
    # what was sent in the call before is taken for this one's, or overwritten before it was read
    "one generation": {"kGenerations = 3;": "kGenerations = 1;"},
    # the first of four words is there before the others
    "first word": {LACKS: "return v.x == kAbsent;"},
    # with subnormal numbers flushed, a zero is what a mailbox is that nothing came to
    "as float": {
        LACKS: """
  int same;
  asm volatile("{.reg .pred p, q; setp.eq.ftz.f32 p, %1, %5; setp.eq.ftz.or.f32 q, %2, %5, p; "
               "setp.eq.ftz.or.f32 p, %3, %5, q; setp.eq.ftz.or.f32 q, %4, %5, p; selp.s32 %0, 1, 0, q;}"
               : "=r"(same)
               : "f"(__uint_as_float(v.x)), "f"(__uint_as_float(v.y)), "f"(__uint_as_float(v.z)),
                 "f"(__uint_as_float(v.w)), "f"(__uint_as_float(kAbsent)));
  return same;
"""
    },
    # of four packets the first is looked at
    "first packet": {"return low.x >> 32 == number && low.y >> 32": "return low.x >> 32 == number || low.y >> 32"},
    # the flag may overtake the rows
    "no release": {
        "st.release.sys.global.u32": "st.relaxed.sys.global.u32",
        "multimem.st.release.sys.global.b32": "multimem.st.relaxed.sys.global.b32",
    },
    # a flag that was there is taken away, and forgotten when another one is not there yet
    "consumed flags": {
        WAIT: """
      for (bool all = other != (call.me == 0); !all;) {
        all = true;
        for (int rank = 0; rank < kRanks; ++rank)
          if (rank != call.me) {
            unsigned* const own = flag(call.part(call.me), rank);
            if (load_acquire_sys(own) == call.number + 1) store_relaxed_sys(own, 0);
            else if (all = false, !call.again(rank)) break;
          }
        if (call.failed) break;
      }
"""
    },
}
RANKS, (PROTOCOL, _, MULTICAST) = int(sys.argv[1]), sys.argv[2].partition("+")
HIDDEN = 264 if PROTOCOL == "two_shot" else 16  # two warps, of which each has another rank for its own
SIZES = (2, 1, 1, 2)  # the last has the mailboxes of the first
WAITS = 30 if len(sys.argv) == 3 else 2  # seconds: what a bug makes wait is not to take long
bf16 = ml_dtypes.bfloat16


def planted(bug: str) -> Source:
    """The shipped source with a bug."""
    source, left = Source.find("allreduce_rmsnorm"), set(BUGS[bug])
    headers = []
    for header in source.includes:
        text = header.text
        for was, becomes in BUGS[bug].items():
            if was in text:
                left.discard(was)
                text = text.replace(was, becomes)
        headers.append(replace(header, text=text))
    assert not left, left
    return replace(source, includes=tuple(headers))


with once():
    if MULTICAST:
        os.environ["DRVKIT_ENABLE_MULTICAST"] = "1"
        for name in ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST"):
            os.environ.pop(name, None)
    rng = np.random.default_rng(1)
    devices = [Device(f"cpu:{rank}") for rank in range(RANKS)]
    streams = [device.stream() for device in devices]
    instance = f"{PROTOCOLS.index(PROTOCOL)},{str(bool(MULTICAST)).lower()},{RANKS},1"
    for device in devices:
        if len(sys.argv) > 3:
            ops._modules[device, "allreduce_rmsnorm"] = device.module(planted(sys.argv[3]))
        ops.kernel(device, "allreduce_rmsnorm", f"allreduce_rmsnorm<__nv_bfloat16,__nv_bfloat16,{instance}>").occupancy(
            32
        )
    weight = np.ones(HIDDEN, bf16)
    calls = []
    for tokens in SIZES:
        x, residual = rng.integers(-8, 8, (2, RANKS, tokens, HIDDEN)).astype(np.float32).astype(bf16)
        x[..., :2] = 0
        h = ref.allreduce_rmsnorm(x, residual, weight)[1]
        for rank, device in enumerate(devices):
            of: dict[str, Any] = {"x": device.array(x[rank]), "residual": device.array(residual[rank])}
            of |= {name: device.zeros(x[rank].shape, bf16) for name in ("out", "residual_out")}
            calls.append((rank, of | {"weight": device.array(weight)}, h[rank]))

how: dict[str, Any] = {"max_tokens": 2, "hidden": HIDDEN, "protocols": {PROTOCOL: 2}, "timeout_s": WAITS}
with World.of_devices(devices) as world, AllReduce(world, **how, multicast=bool(MULTICAST)) as group:
    for rank, of, _h in calls:
        allreduce_rmsnorm(streams[rank], group, **of)
    for stream in streams:
        stream.synchronize()
    group.check()
    for _rank, of, h in calls:
        np.testing.assert_array_equal(of["residual_out"].numpy().view(np.uint16), h.view(np.uint16))
