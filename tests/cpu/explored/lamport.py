"""A Lamport all-reduce between two ranks: ``lamport.py BUFFERS CLEARED``.

-0.0 in an inbox says "not there yet". With one buffer, with two, and with three of which the wrong one is cleared, a
rank that is ahead of the other loses data; with three and the one before cleared all is well.
"""

from __future__ import annotations

import sys

import numpy as np

import drvkit as dk

BUFFERS, CLEARED = int(sys.argv[1]), int(sys.argv[2])
RANKS, N, ITERATIONS = 2, 32, 6
SOURCE = """
template <int BUFFERS, int CLEARED>
__global__ void lamport(float* out, const float* in, float* const* inbox, int n, int rank, int ranks, int iteration) {
  int now = iteration % BUFFERS, cleared = (iteration + BUFFERS - CLEARED) % BUFFERS;
  int i = threadIdx.x;
  float v = in[i];
  for (int p = 0; p < ranks; p++) ((volatile float*)inbox[p])[(now * ranks + rank) * n + i] = v;
  if (BUFFERS > 1)
    for (int p = 0; p < ranks; p++) ((volatile float*)inbox[rank])[(cleared * ranks + p) * n + i] = -0.f;
  float sum = 0.f;
  for (int p = 0; p < ranks; p++) {
    volatile float* source = inbox[rank] + (now * ranks + p) * n + i;
    float x;
    do x = *source;
    while (__float_as_uint(x) == 0x80000000u);
    sum += x;
    if (BUFFERS == 1) *source = -0.f;
  }
  out[i] = sum;
}"""

devices = [dk.Device(f"cpu:{rank}") for rank in range(RANKS)]
name = f"lamport<{BUFFERS},{CLEARED}>"
kernels = [device.module(dk.Source.from_text(SOURCE, "lamport.cu"), [name]).kernel(name) for device in devices]
inboxes = [device.array(np.full(BUFFERS * RANKS * N, -0.0, np.float32)) for device in devices]
tables = [device.array(np.array([inbox.address for inbox in inboxes], np.uint64)) for device in devices]
given = np.random.default_rng(1).standard_normal((ITERATIONS, RANKS, N)).astype(np.float32)
ins = [[device.array(given[i, rank]) for rank, device in enumerate(devices)] for i in range(ITERATIONS)]
outs = [[device.zeros(N, np.float32) for device in devices] for _ in range(ITERATIONS)]
streams = [device.stream() for device in devices]
for i in range(ITERATIONS):
    for rank in range(RANKS):
        args = (outs[i][rank], ins[i][rank], tables[rank], N, rank, RANKS, i)
        kernels[rank].launch(streams[rank], grid=1, block=N, args=args)
for stream in streams:
    stream.synchronize()
for i in range(ITERATIONS):
    for rank in range(RANKS):
        np.testing.assert_array_equal(outs[i][rank].numpy(), given[i, 0] + given[i, 1])
