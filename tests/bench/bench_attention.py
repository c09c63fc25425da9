"""What attention costs on a GPU: a step's layers in one graph, beside what reading as many bytes costs.

Run ``python tests/bench/bench_attention.py [--json FILE]`` where there is a GPU. Each row is one graph: a plan, then
layers, every one with keys and values of its own, in shuffled pages: at least 512 MB of them, so no layer finds its
tokens in the L2 cache. Layers follow each other by programmatic edges. A figure is the median over launches of the time
of a launch, divided by its layers: the plan is in it. Nothing is asserted.

Prefill is one prompt of so many tokens, causal, the plan included; its ceiling is the tensor cores' rate for dense
products, which is not measured here.

"read" is the time that a kernel takes to read as many bytes, of which it does nothing else, by the fastest of some
grids, in the same run. "peer" is the best of flashinfer 0.6.18 and FlashAttention-3, measured on another H200 by
the same protocol.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from rich.console import Console
from rich.table import Table

from drvkit.device import Device
from drvkit.graph import Graph
from drvkit.memory import Buffer
from drvkit.ops.paged_attention import DecodePlan, paged_attention, plan_decode
from drvkit.ops.prefill_attention import PrefillPlan, plan_prefill, prefill_attention
from drvkit.source import Source

bf16, e4m3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn

Q_HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
LEAST_BYTES = 512 << 20  # of all layers: several times the L2 cache
MOST_LAYERS = 128
LAUNCHES = 21

# requests, tokens, dtype of keys and values: the best peer, us a layer
PEERS: dict[tuple[int, int, Any], float] = {
    (1, 1024, bf16): 8.7,
    (1, 4096, bf16): 12.3,
    (1, 16384, bf16): 26.1,
    (1, 32768, bf16): 43.9,
    (8, 1024, bf16): 15.2,
    (8, 4096, bf16): 41.7,
    (8, 16384, bf16): 135.8,
    (8, 32768, bf16): 253.7,
    (16, 4096, bf16): 73.3,
    (32, 4096, bf16): 134.1,
    (64, 2048, bf16): 137.7,
    (1, 1024, e4m3): 6.6,
    (1, 4096, e4m3): 10.0,
    (1, 32768, e4m3): 36.3,
    (8, 4096, e4m3): 29.8,
    (8, 32768, e4m3): 189.0,
    (32, 4096, e4m3): 69.4,
}

PROMPTS: tuple[tuple[int, Any], ...] = ((2048, bf16), (8192, bf16), (16384, bf16), (8192, e4m3))

READ = """
__global__ void read(const unsigned* x, long long n, unsigned* y) {  // 16-byte parts
  const uint4* parts = reinterpret_cast<const uint4*>(x);
  const long long step = 1ll * gridDim.x * blockDim.x;
  unsigned all = 0;
  for (long long i = 1ll * blockIdx.x * blockDim.x + threadIdx.x; i < n; i += 8 * step) {
    uint4 part[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) part[j] = i + j * step < n ? __ldcs(parts + i + j * step) : uint4{};
#pragma unroll
    for (int j = 0; j < 8; ++j) all |= part[j].x ^ part[j].y ^ part[j].z ^ part[j].w;
  }
  if (all == 0x12345) *y = all;
}
"""


class Bench:
    def __init__(self) -> None:
        self.device = Device("cuda:0")
        self.stream = self.device.stream()
        self.rng = np.random.default_rng(0)
        self.reader = self.device.module(Source.from_text(READ, "read.cu")).kernel("read")
        self.nowhere = self.device.zeros(4, np.uint32)
        self.random = {
            bf16: self.device.array(self.rng.normal(size=1 << 23).astype(bf16)),
            e4m3: self.device.array(self.rng.normal(size=1 << 24).astype(np.float32).astype(e4m3)),
        }

    def pool(self, elements: int, dtype: Any) -> Buffer:
        """Random numbers, some of them more than once."""
        made, random = self.device.empty(elements, dtype), self.random[dtype]
        for start in range(0, elements, random.size):
            part = min(random.size, elements - start)
            made[start : start + part].copy_from(random[:part], self.stream)
        return made

    def median_us(self, graph: Graph) -> float:
        with graph.instantiate() as exe:
            exe.launch(self.stream)
            return statistics.median(exe.time_ms(self.stream) for _ in range(LAUNCHES)) * 1e3

    def read_us(self, nbytes: int) -> float:
        """Reading so many bytes, of four times the L2 cache at least, one after the other."""
        rounds = min(MOST_LAYERS, -(-LEAST_BYTES // nbytes))
        memory = [self.device.zeros(nbytes // 4, np.uint32) for _ in range(rounds)]
        best = float("inf")
        for waves in (2, 4, 8, 16):
            with Graph(self.device, "read") as graph:
                last = None
                for part in memory:
                    args = (part, nbytes // 16, self.nowhere)
                    last = graph.kernel(
                        self.reader, grid=self.device.multiprocessors * waves, block=256, args=args, after=last
                    )
                best = min(best, self.median_us(graph) / rounds)
        for part in memory:
            part.close()
        return best

    def decode_us(self, requests: int, tokens: int, kv_dtype: Any) -> tuple[float, int]:
        width = tokens // PAGE
        pages = requests * width
        shape = (pages, KV_HEADS, PAGE, DIM)
        elements = pages * KV_HEADS * PAGE * DIM
        nbytes = 2 * elements * np.dtype(kv_dtype).itemsize
        layers = min(MOST_LAYERS, max(4, -(-LEAST_BYTES // nbytes)))
        table = self.device.array(self.rng.permutation(pages).astype(np.int32).reshape(requests, width))
        lengths = self.device.array(np.full(requests, tokens, np.int32))
        q = self.device.array(self.rng.normal(size=(requests, 1, Q_HEADS, DIM)).astype(bf16))
        out = self.device.zeros(q.shape, bf16)
        pools = [self.pool(elements, kv_dtype).reshape(shape) for _ in range(2 * layers)]
        how: dict[str, Any] = {"requests": requests, "q_heads": Q_HEADS, "kv_heads": KV_HEADS, "dim": DIM}
        with (
            DecodePlan(self.device, **how, page_size=PAGE, table_width=width, kv_dtype=kv_dtype) as plan,
            Graph(self.device, "decode") as graph,
        ):
            last: Any = plan_decode(graph, plan, lengths, name="plan")
            for layer, (k, v) in enumerate(zip(pools[::2], pools[1::2], strict=True)):
                after = last.port("programmatic") if layer else last
                last = paged_attention(graph, plan, q, k, v, table, out, after=after, name=f"layer {layer}")
            us = self.median_us(graph) / layers
        for buffer in (*pools, table, lengths, q, out):
            buffer.close()
        return us, nbytes

    def prefill_us(self, tokens: int, kv_dtype: Any) -> float:
        width = tokens // PAGE
        elements = width * KV_HEADS * PAGE * DIM
        k, v = (self.pool(elements, kv_dtype).reshape((width, KV_HEADS, PAGE, DIM)) for _ in range(2))
        table = self.device.array(self.rng.permutation(width).astype(np.int32).reshape(1, width))
        starts, length = (self.device.array(np.array(each, np.int32)) for each in ([0, tokens], [tokens]))
        q = self.pool(tokens * Q_HEADS * DIM, bf16).reshape((tokens, Q_HEADS, DIM))
        out = self.device.zeros(q.shape, bf16)
        how: dict[str, Any] = {"q_heads": Q_HEADS, "kv_heads": KV_HEADS, "dim": DIM, "page_size": PAGE}
        how |= {"max_tokens": tokens, "max_requests": 1, "table_width": width, "kv_dtype": kv_dtype}
        with PrefillPlan(self.device, **how) as plan, Graph(self.device, "prefill") as graph:
            planned = plan_prefill(graph, plan, starts, length)
            prefill_attention(graph, plan, q, k, v, table, out, after=planned)
            us = self.median_us(graph)
        for buffer in (k, v, table, starts, length, q, out):
            buffer.close()
        return us


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    bench = Bench()
    title = f"decode, {Q_HEADS} query and {KV_HEADS} KV heads, dim {DIM}, page {PAGE}: us a layer"
    table = Table("KV", "requests", "tokens", "drvkit", "read", "of read", "GB/s", "peer", "of peer", title=title)
    rows: list[dict[str, Any]] = []
    reads: dict[int, float] = {}
    for (requests, tokens, dtype), peer in PEERS.items():
        us, nbytes = bench.decode_us(requests, tokens, dtype)
        if nbytes not in reads:
            reads[nbytes] = bench.read_us(nbytes)
        read = reads[nbytes]
        table.add_row(
            *(np.dtype(dtype).name, str(requests), str(tokens), f"{us:.2f}", f"{read:.2f}", f"{us / read:.2f}"),
            *(f"{nbytes / us / 1e3:.0f}", f"{peer:.1f}", f"{us / peer:.2f}"),
        )
        rows.append({"kv": np.dtype(dtype).name, "requests": requests, "tokens": tokens, "us": us, "read_us": read})
    prompts = Table("KV", "tokens", "us", "TFLOP/s", title="prefill, causal, of the same heads")
    for tokens, dtype in PROMPTS:
        us = bench.prefill_us(tokens, dtype)
        rate = 4 * (tokens * (tokens + 1) // 2) * Q_HEADS * DIM / us / 1e6
        prompts.add_row(np.dtype(dtype).name, str(tokens), f"{us:.1f}", f"{rate:.0f}")
        rows.append({"kv": np.dtype(dtype).name, "prompt": tokens, "us": us, "tflops": rate})
    for each in (table, prompts):
        Console(width=120).print(each)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
