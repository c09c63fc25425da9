"""What the parts of DeepSeek V4's attention cost on a GPU, beside what their bytes or operations allow.

Run ``python tests/bench/bench_latent.py [--only PART] [--json FILE]`` where there is a GPU. Each row is one graph of as
many nodes as fit, every one with operands of its own, one after the other by programmatic edges; a launch comes after a
fill of 256 MB, so that nothing is in the L2 cache. A figure is the median over launches of the time of a launch, over
its nodes. Nothing is asserted.

"floor" is what the bytes that must move take at 4.3 TB/s, or the products at 800 TFLOP/s, whichever is longer.
"published" are figures of others for the same shapes, on other GPUs (vLLM #43584, FlagGems #3327, vLLM #42899,
SGLang #33237, SGLang #25751); those of attention of 4096 tokens are of 512 rows, scaled to 640.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from rich.console import Console
from rich.table import Table

from drvkit.device import Device
from drvkit.graph import Graph
from drvkit.latent_attention import LatentAttention, Workspace
from drvkit.models import V4_FLASH
from drvkit.ops.indexer import IndexerQueries, indexer_logits, indexer_query
from drvkit.ops.kv_compress import kv_compress, kv_save
from drvkit.ops.query_kv import query_kv
from drvkit.ops.sparse_attention import sparse_attention
from drvkit.ops.step_tokens import StepTokens, plan_tokens
from drvkit.ops.top_k import top_k
from drvkit.records import KEY_FP8, KEY_MXFP4, KV_BF16, KV_FP8, Format, Pages
from drvkit.rope import Yarn, cos_sin_table
from drvkit.weights import Weights, random_weights

bf16 = ml_dtypes.bfloat16
LAUNCHES, MOST_NODES = 15, 64
ROOM = 2 << 30  # bytes of all operands of a graph
BANDWIDTH, RATE = 4.3e12, 800e12
Add = Callable[..., Any]


class Part(NamedTuple):
    """A row of the table: its name, a published figure in us, and what makes it: how a node is added, how many nodes,
    and the bytes and operations of each."""

    name: str
    published: float | None
    make: Callable[[Bench], tuple[Add, float, float, float]]  # add(graph, node, after), nodes, bytes moved, operations


class Bench:
    def __init__(self, stack: ExitStack) -> None:
        self.stack, self.device = stack, Device()
        self.rng = np.random.default_rng(0)
        self.cos_sin = self.put(cos_sin_table(1 << 17, theta=160000, yarn=Yarn()))
        self.flush = self.put(np.zeros(256 << 20, np.uint8))

    def put(self, array: Any) -> Any:
        return self.stack.enter_context(self.device.array(array))

    def normal(self, *shape: int, dtype: Any = np.float32) -> Any:
        """Random ones; what is large repeats itself."""
        n = int(np.prod(shape))
        some = self.rng.normal(size=min(n, 1 << 20)).astype(dtype)
        return self.put(np.resize(some, n).reshape(shape))

    def step(self, each: int, requests: int, length: int) -> StepTokens:
        """Rows of a step in which so many requests of a length have as many new tokens."""
        tokens = StepTokens(self.device, max_tokens=each * requests, max_requests=requests, max_length=length)
        self.stack.enter_context(tokens)
        with self.device.stream() as stream:
            q_starts = self.put(np.arange(requests + 1, dtype=np.int32) * each)
            plan_tokens(stream, tokens, q_starts, self.put(np.full(requests, length, np.int32)))
            stream.synchronize()
        return tokens

    def pages(self, form: Format, page_size: int, requests: int, width: int) -> Pages:
        table = self.rng.permutation(requests * width).astype(np.int32).reshape(requests, width)
        rows = self.rng.normal(size=(64 * page_size, form.dim)).astype(np.float32)
        pool = np.zeros((64, form.page_bytes(page_size)), np.uint8)
        form.put(pool, np.arange(len(rows)), page_size, *form.encode(rows))
        return Pages(form, self.put(np.resize(pool, (table.size, pool.shape[1]))), self.put(table), page_size)

    def us(self, add: Add, nodes: int) -> float:
        with self.device.stream() as stream, Graph(self.device, "chain") as graph:
            last = None
            for node in range(nodes):
                last = add(graph, node, last.port("programmatic") if last is not None else None)
            with graph.instantiate() as exe:
                exe.launch(stream)
                times = []
                for _ in range(LAUNCHES):
                    self.flush.fill(0, stream)
                    times.append(exe.time_ms(stream))
        return statistics.median(times) * 1e3 / nodes


def compress(ratio: int, each: int, requests: int, length: int, form: Format = KV_FP8) -> Any:
    def make(bench: Bench) -> Any:
        wide = (2 if ratio == 4 else 1) * form.dim
        tokens, window = bench.step(each, requests, length), wide // form.dim * ratio
        page_size = 256 // ratio
        count = each * requests
        held = count * 2 * wide * 4 + requests * window * 2 * wide * 4 + requests * form.page_bytes(page_size)
        nodes = max(1, min(MOST_NODES, int(ROOM // held)))
        operands = [
            (
                bench.normal(count, 2 * wide),
                bench.normal(requests, window, 2 * wide),
                bench.pages(form, page_size, requests, max(1, -(-length // 256))),
            )
            for _ in range(nodes)
        ]
        rings = bench.put(np.arange(requests, dtype=np.int32))
        ape, weight = bench.normal(ratio, wide), bench.normal(form.dim)

        def add(graph: Graph, node: int, after: Any) -> Any:
            ug, state, entries = operands[node]
            how = {"ratio": ratio, "after": after}
            return kv_compress(graph, tokens, ug, state, rings, ape, weight, bench.cos_sin, entries, **how)

        first = length - each
        ended = length // ratio - first // ratio
        # Rows of the step, those that the first entry needs of the state (of 4 tokens a half of each), and those kept.
        overlap = wide // form.dim
        of_state = min(first, first % ratio + (overlap - 1) * ratio) / overlap if ended else 0
        kept = min(each, window)
        moved = requests * (each + of_state + kept) * 2 * wide * 4 + requests * ended * form.nbytes
        return add, nodes, moved, 0.0

    return make


def save(ratio: int) -> Any:
    def make(bench: Bench) -> Any:
        wide = 1024 if ratio == 4 else 512
        tokens = bench.step(1, 1, 1001)
        operands = [(bench.normal(1, 2 * wide), bench.normal(1, ratio * wide // 512, 2 * wide)) for _ in range(64)]
        rings = bench.put(np.zeros(1, np.int32))

        def add(graph: Graph, node: int, after: Any) -> Any:
            return kv_save(graph, tokens, *operands[node], rings, ratio=ratio, after=after)

        return add, 64, 4.0 * 4 * wide, 0.0

    return make


def queries(count: int, heads: int) -> Any:
    def make(bench: Bench) -> Any:
        tokens = bench.step(count, 1, count + 1000)
        nodes = max(1, min(MOST_NODES, int(ROOM // (count * (heads + 1) * 1024))))
        operands = [
            (
                bench.normal(count, heads, 512, dtype=bf16),
                bench.normal(count, 512, dtype=bf16),
                bench.pages(KV_FP8, 64, 1, -(-count // 64) + 3),
            )
            for _ in range(nodes)
        ]
        weight = bench.normal(512)

        def add(graph: Graph, node: int, after: Any) -> Any:
            q, kv, window = operands[node]
            return query_kv(graph, tokens, q, kv, weight, bench.cos_sin, window, after=after)

        return add, nodes, count * (heads * 2048.0 + 1024 + 584), 0.0

    return make


def index_queries(count: int, form: Format) -> Any:
    def make(bench: Bench) -> Any:
        tokens = bench.step(count, 1, count + 1000)
        nodes = max(1, min(MOST_NODES, int(ROOM // (count * 64 * 400))))
        operands = [
            (
                bench.normal(count, 64, 128, dtype=bf16),
                bench.normal(count, 64),
                bench.stack.enter_context(IndexerQueries(bench.device, max_tokens=count, format=form)),
            )
            for _ in range(nodes)
        ]

        def add(graph: Graph, node: int, after: Any) -> Any:
            q, weights, to = operands[node]
            how = {"hadamard": form is KEY_MXFP4, "after": after}
            return indexer_query(graph, tokens, q, weights, bench.cos_sin, to, **how)

        return add, nodes, count * 64 * (256.0 + 4 + form.nbytes), 0.0

    return make


def logits(each: int, requests: int, length: int, form: Format) -> Any:
    def make(bench: Bench) -> Any:
        tokens, count, entries = bench.step(each, requests, length), each * requests, length // 4
        to = bench.stack.enter_context(IndexerQueries(bench.device, max_tokens=count, format=form))
        with bench.device.stream() as stream:
            q = bench.normal(count, 64, 128, dtype=bf16)
            indexer_query(stream, tokens, q, bench.normal(count, 64), bench.cos_sin, to)
            stream.synchronize()
        held = requests * entries * form.nbytes + count * entries * 4
        nodes = max(1, min(MOST_NODES, int(ROOM // held)))
        operands = [
            (bench.pages(form, 64, requests, -(-entries // 64)), bench.normal(count, entries)) for _ in range(nodes)
        ]

        def add(graph: Graph, node: int, after: Any) -> Any:
            keys, result = operands[node]
            return indexer_logits(graph, tokens, to, keys, result, after=after)

        return add, nodes, float(held), count * entries * 16384.0

    return make


def choose(rows: int, width: int, k: int) -> Any:
    def make(bench: Bench) -> Any:
        nodes = max(1, min(MOST_NODES, int(ROOM // (rows * width * 4))))
        scores = [bench.normal(rows, width) for _ in range(nodes)]
        lengths, indices = bench.put(np.full(rows, width, np.int32)), bench.put(np.zeros((rows, k), np.int32))

        def add(graph: Graph, node: int, after: Any) -> Any:
            return top_k(graph, scores[node], lengths, indices, after=after)

        return add, nodes, rows * (width + k) * 4.0, 0.0

    return make


def attend(each: int, requests: int, heads: int, length: int, k: int | None, form: Format, ratio: int = 4) -> Any:
    def make(bench: Bench) -> Any:
        tokens, count = bench.step(each, requests, length), each * requests
        page_size, width = 256 // ratio, -(-length // 256)
        of_window = -(-(each + 127) // 64) + 1
        held = requests * (width * form.page_bytes(page_size) + of_window * form.page_bytes(64))
        held += 2 * count * heads * 1024
        nodes = max(1, min(MOST_NODES if count < 1000 else 4, int(ROOM // held)))
        operands = [
            (
                bench.normal(count, heads, 512, dtype=bf16),
                bench.put(np.zeros((count, heads, 512), bf16)),
                bench.pages(form, 64, requests, of_window),
                bench.pages(form, page_size, requests, width),
            )
            for _ in range(nodes)
        ]
        rows = 128 + (length // ratio if k is None else k)
        indices = None
        if k is not None:
            seen = (length - each + np.arange(count) % each + 1) // ratio
            chosen = [np.sort(bench.rng.permutation(int(n))[:k]) for n in seen[: min(count, 512)]]
            indices = bench.put(np.resize(np.array(chosen, np.int32), (count, k)))
        sinks = bench.normal(heads)

        def add(graph: Graph, node: int, after: Any) -> Any:
            q, out, window, entries = operands[node]
            how: dict[str, Any] = {"entries": entries, "ratio": ratio, "indices": indices, "sinks": sinks}
            return sparse_attention(graph, tokens, q, window, out, **how, cos_sin=bench.cos_sin, after=after)

        distinct = count * rows if each == 1 else min(count * rows, requests * (length // ratio + each + 127))
        return add, nodes, distinct * form.nbytes + count * heads * 2048.0, count * heads * rows * 2048.0

    return make


@cache
def weights_of(ratio: int) -> Weights:
    return random_weights(V4_FLASH, ratio, np.random.default_rng(ratio))


def layer(ratio: int, length: int, branch: bool) -> Any:
    """A token through a whole layer; its weights alone are more than the L2 cache has."""

    def make(bench: Bench) -> Any:
        tokens, width = bench.step(1, 1, length), -(-length // 256)
        workspace = bench.stack.enter_context(Workspace(V4_FLASH, tokens))
        made = LatentAttention(bench.device, V4_FLASH, ratio, weights_of(ratio), bench.cos_sin)
        bench.stack.enter_context(made)
        window, pages = (bench.put(np.arange(n, dtype=np.int32)[None]) for n in (2, width))
        rings = bench.put(np.zeros(1, np.int32))
        caches = made.caches(window=(2, window), entries=(width, pages), rings=(1, rings))
        bench.stack.enter_context(caches)
        caches.window.pool.fill_bytes(0)
        for each in (caches.entries, caches.keys):
            if each is not None:
                each.pages.pool.fill_bytes(0)
                each.state.fill_bytes(0)
        x, y = bench.normal(1, V4_FLASH.hidden, dtype=ml_dtypes.bfloat16), bench.normal(1, V4_FLASH.hidden)

        def add(graph: Graph, node: int, after: Any) -> Any:
            return made.add(graph, workspace, x, y, caches, after=after, branch=branch, name=f"layer {node}")

        return add, 8, made.nbytes, 0.0

    return make


PARTS: tuple[Part, ...] = (
    Part("compress c4, 1 token that ends an entry", 10.0, compress(4, 1, 1, 1000)),
    Part("compress c4, 1 token that ends none", None, compress(4, 1, 1, 1001)),
    Part("save c4, 1 token", None, save(4)),
    Part("compress c4, 1024 tokens", 15.6, compress(4, 1024, 1, 2048)),
    Part("compress c4, 4096 tokens", 47.8, compress(4, 4096, 1, 8192)),
    Part("compress c4 keys, 4096 tokens", None, compress(4, 4096, 1, 8192, KEY_MXFP4)),
    Part("compress c128, 1 token that ends an entry", 12.6, compress(128, 1, 1, 1024)),
    Part("compress c128, 1 token that ends none", None, compress(128, 1, 1, 1025)),
    Part("save c128, 1 token", None, save(128)),
    Part("compress c128, 128 tokens of a request", None, compress(128, 128, 1, 1024)),
    Part("compress c128, 128 requests, an entry each", 28.2, compress(128, 1, 128, 1024)),
    Part("query_kv, 1 token, 64 heads", 6.98, queries(1, 64)),
    Part("query_kv, 1 token, 128 heads", 7.04, queries(1, 128)),
    Part("query_kv, 1024 tokens, 64 heads", None, queries(1024, 64)),
    Part("indexer query, 1 token, fp8", 8.3, index_queries(1, KEY_FP8)),
    Part("indexer query, 1024 tokens, fp8", 10.1, index_queries(1024, KEY_FP8)),
    Part("indexer query, 1024 tokens, mxfp4 + Hadamard", None, index_queries(1024, KEY_MXFP4)),
    Part("indexer logits, 1 token, 262144 entries, fp8", None, logits(1, 1, 1 << 20, KEY_FP8)),
    Part("indexer logits, 1 token, 262144 entries, mxfp4", None, logits(1, 1, 1 << 20, KEY_MXFP4)),
    Part("indexer logits, 1024 tokens, 16384 entries, fp8", None, logits(1024, 1, 1 << 16, KEY_FP8)),
    Part("top 512 of 4 x 8192", 5.0, choose(4, 8192, 512)),
    Part("top 512 of 4 x 65536", 11.3, choose(4, 65536, 512)),
    Part("top 512 of 16 x 65536", 16.7, choose(16, 65536, 512)),
    Part("top 512 of 1 x 262144", None, choose(1, 262144, 512)),
    Part("top 512 of 1024 x 16384", None, choose(1024, 16384, 512)),
    Part("attention fp8, 64 x 1 token, 64 heads, 640 rows", None, attend(1, 64, 64, 16384, 512, KV_FP8)),
    Part("attention fp8, 1 token, 64 heads, 640 rows", None, attend(1, 1, 64, 65536, 512, KV_FP8)),
    Part("attention fp8, 8 x 1 token, 128 heads, 1152 rows", None, attend(1, 8, 128, 65536, 1024, KV_FP8)),
    Part("attention fp8, 1 token, 64 heads, all of 1M / 128", None, attend(1, 1, 64, 1 << 20, None, KV_FP8, 128)),
    Part("attention fp8, 4096 tokens, 64 heads, 640 rows", 488 * 640 / 512, attend(4096, 1, 64, 32768, 512, KV_FP8)),
    Part("attention bf16, 4096 tokens, 64 heads, 640 rows", 602 * 640 / 512, attend(4096, 1, 64, 32768, 512, KV_BF16)),
    *(
        Part(f"{kind} layer, 1 token that ends {ends}, compressors {how}", None, layer(ratio, length, branch))
        for kind, ratio in (("CSA", 4), ("HCA", 128))
        for ends, length in (("none", 4097), ("an entry", 4096))
        for how, branch in (("behind an IF", True), ("always launched", False))
    ),
)


def rows(only: str) -> Iterator[dict[str, Any]]:
    for part in PARTS:
        if only not in part.name:
            continue
        with ExitStack() as stack:
            bench = Bench(stack)
            add, nodes, moved, operations = part.make(bench)
            us = bench.us(add, int(nodes))
        floor = max(moved / BANDWIDTH, operations / RATE) * 1e6
        yield {"part": part.name, "us": us, "floor": floor, "published": part.published, "bytes": moved} | (
            {"TFLOP/s": operations / us / 1e6} if operations else {}
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="parts whose names have this")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    table = Table("part", "us", "floor, us", "GB/s", "TFLOP/s", "published, us")
    table.title = "DeepSeek V4 attention, cold L2"
    found = []
    for row in rows(options.only):
        found.append(row)
        rate = f"{row['TFLOP/s']:.0f}" if "TFLOP/s" in row else ""
        published = "" if row["published"] is None else f"{row['published']:g}"
        figures = (f"{row['us']:.2f}", f"{row['floor']:.2f}", f"{row['bytes'] / row['us'] / 1e3:.0f}")
        table.add_row(row["part"], *figures, rate, published)
    Console(width=140).print(table)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
