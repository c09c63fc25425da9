"""200 steps of decoding: requests join, grow over page boundaries and leave, and a few captured graphs serve them all.

Each step appends a token to every running request and attends to all of its tokens. Addresses never change: queries,
pools, lengths, block table and slots lie where they lay when the graphs were built; only what is in them does. A step
of 5 requests runs the graph of 8: `Buckets` makes the other rows padding (length 0, slot -1), which the kernels skip.
Every step is checked against numpy.
"""

from __future__ import annotations

import numpy as np
from _common import open_device
from numpy.typing import NDArray

import drvkit as dk
from drvkit.buckets import Scratch
from drvkit.ops.kv_write import kv_write, slot_mapping
from drvkit.ops.paged_attention import DecodePlan, paged_attention, plan_decode
from drvkit.ref.paged_attention import dense_attention

STEPS, MOST, LAYERS = 200, 8, 2
Q_HEADS, KV_HEADS, DIM, PAGE, WIDTH, PAGES = 4, 2, 64, 8, 6, 40
SHAPE = (LAYERS, MOST, Q_HEADS + 2 * KV_HEADS, DIM)  # q, k and v of a step


class Pages:
    """Which pages are free; a request takes one when its tokens cross a boundary, and gives all back when it leaves."""

    def __init__(self) -> None:
        self.free = list(range(PAGES))
        self.of: dict[int, list[int]] = {}

    def grow(self, request: int, length: int) -> list[int]:
        pages = self.of.setdefault(request, [])
        while len(pages) * PAGE < length:
            pages.append(self.free.pop())
        return pages

    def release(self, request: int) -> None:
        self.free += self.of.pop(request)


def main() -> None:
    dev = open_device()
    rng = np.random.default_rng(7)
    pool_shape = (PAGES, KV_HEADS, PAGE, DIM)
    pools = [dev.array(np.full(pool_shape, np.nan, np.float16)) for _ in range(2 * LAYERS)]
    qkv, out = dev.zeros(SHAPE, np.float16), dev.zeros((LAYERS, MOST, 1, Q_HEADS, DIM), np.float16)
    table, lengths = dev.zeros((MOST, WIDTH), np.int32), dev.zeros(MOST, np.int32)

    def build(key: dk.Key, scratch: Scratch) -> dk.Graph:
        """A step: where its tokens go, how the work is divided, then layer after layer."""
        n = key.requests
        slots = scratch.empty(n, np.int64)
        plan = plans.setdefault(n, DecodePlan(dev, requests=n, q_heads=Q_HEADS, kv_heads=KV_HEADS, dim=DIM,
                                              page_size=PAGE, table_width=WIDTH, dtype=np.float16))  # fmt: skip
        graph = dk.Graph(dev, f"decode {n}")
        mapped = slot_mapping(graph, table[:n], slots, page_size=PAGE, lengths=lengths[:n], name="slots")
        last = plan_decode(graph, plan, lengths[:n], after=mapped, name="plan")
        for layer in range(LAYERS):
            rows, (k, v) = qkv[layer, :n], pools[2 * layer : 2 * layer + 2]
            new_k, new_v = rows[:, Q_HEADS : Q_HEADS + KV_HEADS], rows[:, Q_HEADS + KV_HEADS :]
            last = kv_write(graph, new_k, new_v, k, v, slots, after=last, name=f"write {layer}")
            last = paged_attention(graph, plan, queries[layer][:n], k, v, table[:n], out[layer, :n], after=last,
                                   name=f"attention {layer}")  # fmt: skip
        return graph

    plans: dict[int, DecodePlan] = {}
    queries = [dev.zeros((MOST, 1, Q_HEADS, DIM), np.float16) for _ in range(LAYERS)]
    pads = [dk.Pad("lengths", lengths, 0, by="requests")]
    buckets = dk.Buckets(dev, [1, 2, 4, MOST], build, pads=pads).build_all()

    pages = Pages()
    running: list[int] = []
    tokens: dict[int, list[NDArray[np.float16]]] = {}  # of each request, k and v of all layers
    leaves: dict[int, int] = {}
    joined = crossed = 0
    worst = 0.0
    with dev.stream() as stream:
        for step in range(STEPS):
            for request in [each for each in running if len(tokens[each]) == leaves[each]]:
                running.remove(request)
                pages.release(request)
            while len(running) < MOST and (not running or rng.random() < 0.2):
                running.append(joined)
                tokens[joined], leaves[joined] = [], int(rng.integers(1, PAGE * WIDTH))
                joined += 1

            n = len(running)
            new = rng.normal(size=(LAYERS, n, *SHAPE[2:])).astype(np.float16)
            now = np.full((MOST, WIDTH), 0x7FFFFFFF, np.int32)  # what no kernel may follow
            for row, request in enumerate(running):
                tokens[request].append(new[:, row, Q_HEADS:])
                mine = pages.grow(request, len(tokens[request]))
                crossed += len(tokens[request]) % PAGE == 1
                now[row, : len(mine)] = mine
            for layer in range(LAYERS):
                qkv[layer, :n].copy_from(new[layer], stream)
                queries[layer][:n].copy_from(new[layer, :, None, :Q_HEADS], stream)
            table.copy_from(now, stream)
            lengths[:n].copy_from(np.array([len(tokens[each]) for each in running], np.int32), stream)
            ran = buckets.run(stream, tokens=n)

            got = out.numpy(stream)
            for row, request in enumerate(running):
                for layer in range(LAYERS):
                    kv = np.stack(tokens[request])[:, layer]
                    want, _ = dense_attention(new[layer, row, None, :Q_HEADS], kv[:, :KV_HEADS], kv[:, KV_HEADS:])
                    worst = max(worst, float(np.abs(got[layer, row] - want).max()))
            assert ran.key is not None
            if got[:, n : ran.key.requests].any():
                raise ValueError(f"step {step}: a padded row is not zero")
            if worst > 4e-3:
                raise ValueError(f"step {step}: off by {worst}")
    print(buckets)
    print(f"{STEPS} steps, {joined} requests, {crossed} pages begun; the worst element is off by {worst:.1e}")
    buckets.close()
    print("ok")


if __name__ == "__main__":
    main()
