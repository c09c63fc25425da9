"""All-reduce, residual and RMSNorm between spawned ranks: a graph of chained calls, replayed, checked and timed."""

from __future__ import annotations

import ml_dtypes
import numpy as np

import drvkit as dk
from drvkit.ops.allreduce_rmsnorm import AllReduce, allreduce_rmsnorm
from drvkit.ref import allreduce_rmsnorm as ref

TOKENS, HIDDEN, LAYERS, REPLAYS = 4, 1024, 6, 3
bfloat16 = ml_dtypes.bfloat16


def work(world: dk.World) -> str:
    """What each rank does: its own numbers go in, the same sums come out on all."""
    (rank,), (device,) = world.ranks, world.devices
    rng = np.random.default_rng(0)  # the same on all ranks, so that each can check the whole
    x, residual = rng.normal(size=(2, world.size, TOKENS, HIDDEN)).astype(np.float32).astype(bfloat16)
    weight = rng.normal(size=HIDDEN).astype(np.float32).astype(bfloat16)
    _, h = ref.allreduce_rmsnorm(x, residual, weight)

    with AllReduce(world, max_tokens=TOKENS, hidden=HIDDEN) as group, dk.Graph(device, "layers") as graph:
        own, old, scale = device.array(x[rank]), device.array(residual[rank]), device.array(weight)
        out, residual_out = device.zeros((TOKENS, HIDDEN), bfloat16), device.zeros((TOKENS, HIDDEN), bfloat16)
        last = None
        for layer in range(LAYERS):
            after = last.port("programmatic") if last else None  # the next one starts early, and waits where it must
            last = allreduce_rmsnorm(
                graph, group, own, old, scale, out, residual_out, after=after, name=f"layer {layer}"
            )
        with graph.instantiate() as exe, device.stream() as stream:
            times = []
            for _ in range(REPLAYS):
                world.barrier()  # so that no time is of waiting for a rank that is late
                begin = stream.record()
                exe.launch(stream)
                end = stream.record()
                stream.synchronize()
                group.check()
                times.append(begin.elapsed_ms(end) * 1e3 / LAYERS)
            wrong = np.count_nonzero(residual_out.numpy().view(np.uint16) != h[rank].view(np.uint16))
        world.barrier()  # nobody leaves while another still reads his memory
    assert not wrong, f"rank {rank}: {wrong} elements are wrong"
    return f"rank {rank} on {device.id}: {TOKENS} x {HIDDEN} right to the bit, {min(times):.1f} us a call"


if __name__ == "__main__":
    for line in dk.World.spawn(work, 2):
        print(line)
    print("ok")
