"""All-reduce, residual and RMSNorm between spawned ranks: the same bits by each protocol, and NCCL beside them.

In a graph the residual goes on from call to call, so that one call that is wrong, in any replay, is seen at the end.
"""

from __future__ import annotations

import os

import numpy as np
from rich.console import Console
from rich.table import Table

import drvkit as dk
from drvkit.channel import PROTOCOLS
from drvkit.ops.allreduce_rmsnorm import AllReduce, allreduce_rmsnorm
from drvkit.ref import allreduce_rmsnorm as ref

RANKS, TOKENS, HIDDEN, CALLS, LAUNCHES = 2, 4, 1024, 8, 5
os.environ["NCCL_NVLS_ENABLE"] = "0"  # its multicast can take GPUs out of service; every rank imports this file
ADD_RMSNORM = """#include <cuda_fp16.h>  // what comes behind NCCL's sum, a block for each row; x is as it was again
__global__ void add_rmsnorm(__half* x, const __half* as_it_was, __half* h, const __half* weight, __half* out) {
  __shared__ float squares;
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  h[i] = __float2half(__half2float(x[i]) + __half2float(h[i]));
  x[i] = as_it_was[i];
  float mine = __half2float(h[i]), sum = mine * mine;
  for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (threadIdx.x == 0) squares = 0;
  __syncthreads();
  if (threadIdx.x % 32 == 0) atomicAdd(&squares, sum);
  __syncthreads();
  out[i] = __float2half(mine * rsqrtf(squares / blockDim.x + 1e-6f) * __half2float(weight[threadIdx.x]));
}"""


def work(world: dk.World) -> dict[str, tuple[int, float]]:
    """What each rank does. Gives of each way how many elements are wrong, and us a call."""
    (rank,), (device,) = world.ranks, world.devices
    rng = np.random.default_rng(0)  # the same on all ranks, so that each can tell what they make together
    xs, first = rng.normal(size=(2, world.size, TOKENS, HIDDEN)).astype(np.float16)
    gain, last = rng.normal(size=HIDDEN).astype(np.float16), first
    for _ in range(CALLS * LAUNCHES):
        normed, last = ref.allreduce_rmsnorm(xs, last, gain)
    x, weight = device.array(xs[rank]), device.array(gain)
    total, h, out = (device.zeros((TOKENS, HIDDEN), np.float16) for _ in range(3))

    def replay(graph: dk.Graph) -> tuple[int, float]:
        h.copy_from(first[rank])
        with graph.instantiate() as exe, device.stream() as stream:
            exe.launch(stream)  # the ranks meet in it; the others wait for nobody who is late
            us = exe.time_ms(stream, LAUNCHES - 1) * 1e3 / CALLS
        close = np.isclose(out.numpy(), normed[rank], rtol=2**-10, atol=1e-6)  # numpy has not rounded it
        return int(np.sum(h.numpy() != last[rank]) + np.sum(~close)), us

    found = {}
    for protocol in PROTOCOLS:  # who names none gets what is the fastest for so many tokens
        group = AllReduce(world, max_tokens=TOKENS, hidden=HIDDEN, dtype=np.float16, protocols={protocol: TOKENS})
        with group, dk.Graph(device, protocol) as graph:
            node = None
            for _ in range(CALLS):
                after = node.port("programmatic") if node else None  # starts early, and waits where it must
                node = allreduce_rmsnorm(graph, group, x, h, weight, out, h, after=after)
            found[protocol] = replay(graph)
            group.check()  # raises if a rank has waited in vain
    try:
        nccl = dk.Nccl(world)
    except (ImportError, ValueError) as why:
        if rank == 0:
            print(why)
        return found
    kernel = device.module(dk.Source.from_text(ADD_RMSNORM)).kernel("add_rmsnorm")
    with nccl, dk.Graph(device, "NCCL") as graph:
        node = None
        for call in range(CALLS):
            summed = nccl.allreduce(graph, total, after=node, name=f"sum {call}")
            node = graph.kernel(kernel, grid=TOKENS, block=HIDDEN, args=(total, x, h, weight, out), after=summed)
        total.copy_from(x)
        return found | {"NCCL": replay(graph)}


if __name__ == "__main__":
    ranks = dk.World.spawn(work, RANKS)
    table = Table("by", "wrong elements", "us a call", title=f"{RANKS} ranks, {TOKENS} x {HIDDEN}")
    for way in ranks[0]:
        wrong, us = (max(figures) for figures in zip(*(found[way] for found in ranks), strict=True))
        table.add_row(way, str(wrong), f"{us:.1f}")
    Console().print(table)
    assert not any(found[protocol][0] for found in ranks for protocol in PROTOCOLS)
    print("ok")
