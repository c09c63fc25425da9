"""Two ranks share a prefill by Ulysses: each has some tokens of all heads, and attends with some heads to all tokens.

One graph of each rank: queries, keys and values go to the ranks that have their heads; there keys and values go into
pages, and the heads attend; what they made goes back to the ranks that have the tokens. Two prompts lie one behind the
other, and are cut in the middle of the first. Replays with new numbers give the bits that one device gives alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import drvkit as dk
from drvkit.ops.kv_write import kv_write
from drvkit.ops.prefill_attention import PrefillPlan, plan_prefill, prefill_attention
from drvkit.ops.ulysses import Ulysses, ulysses_to_heads, ulysses_to_tokens

PROMPTS, SHARES = (83, 37), (64, 56)  # tokens of each prompt, and of each rank
TOKENS, HEADS, KV_HEADS, DIM, PAGE, ROUNDS = sum(PROMPTS), 4, 2, 64, 16, 2


def attention(graph: dk.Graph, q: Any, k: Any, v: Any, after: Any = None) -> tuple[Any, dk.Buffer]:
    """Causal attention of all tokens, with the heads that are given: the last node, and the result."""
    device, heads, kv_heads, width = graph.device, q.shape[1], k.shape[1], -(-max(PROMPTS) // PAGE)
    table = np.random.default_rng(1).permutation(len(PROMPTS) * width).astype(np.int32).reshape(-1, width)
    slots = [int(table[row, at // PAGE]) * PAGE + at % PAGE for row, end in enumerate(PROMPTS) for at in range(end)]
    starts, lengths = np.cumsum((0, *PROMPTS), dtype=np.int32), np.array(PROMPTS, np.int32)
    k_pool, v_pool = (device.zeros((table.size, kv_heads, PAGE, DIM), np.float16) for _ in range(2))
    plan = PrefillPlan(device, max_tokens=TOKENS, max_requests=len(PROMPTS), q_heads=heads, kv_heads=kv_heads, dim=DIM,
                       page_size=PAGE, table_width=width, dtype=np.float16)  # fmt: skip
    planned = plan_prefill(graph, plan, device.array(starts), device.array(lengths))
    written = kv_write(graph, k, v, k_pool, v_pool, device.array(np.array(slots, np.int64)), after=after)
    out = device.zeros((TOKENS, heads, DIM), np.float16)
    both = planned, written
    return prefill_attention(graph, plan, q, k_pool, v_pool, device.array(table), out, after=both), out


def work(world: dk.World) -> list[tuple[str, ...]]:
    """What each rank does; to compare, it also computes all of it alone. Gives a row of the table for each round."""
    (rank,), (device,) = world.ranks, world.devices
    rng = np.random.default_rng(0)  # the same on all ranks
    own = slice(sum(SHARES[:rank]), sum(SHARES[: rank + 1]))
    qkv = [device.zeros((TOKENS, heads, DIM), np.float16) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    how: dict[str, Any] = {"heads": HEADS, "kv_heads": KV_HEADS, "dim": DIM, "dtype": np.float16}
    rows = []
    with (
        Ulysses(world, max_tokens=TOKENS, **how) as group,
        dk.Graph(device, "shared") as shared,
        dk.Graph(device, "alone") as alone,
    ):
        q, k, v = (each[own] for each in qkv)
        sent = ulysses_to_heads(shared, group, q, k, v, SHARES)
        done, o = attention(shared, group.q(TOKENS), group.k(TOKENS), group.v(TOKENS), after=sent)
        ulysses_to_tokens(shared, group, o, SHARES, after=done)
        _, whole = attention(alone, *qkv)
        with shared.instantiate() as together, alone.instantiate() as single, device.stream() as stream:
            for _ in range(ROUNDS):
                for each in qkv:
                    each.copy_from(rng.normal(size=each.shape).astype(np.float16), stream)
                for exe in (single, together):
                    exe.launch(stream)  # the ranks meet in it: what comes next waits for nobody who is late
                us = [f"{exe.time_ms(stream) * 1e3:.0f}" for exe in (together, single)]
                group.check()  # raises if a rank has waited in vain
                wrong = np.count_nonzero(group.o(SHARES[rank]).numpy() != whole[own].numpy())
                rows.append((device.id, f"{own.start} to {own.stop - 1}", str(wrong), *us))
                assert not wrong, rows
    return rows


if __name__ == "__main__":
    columns = "device", "its tokens", "wrong elements", "us, shared", "us, alone"
    table = Table(*columns, title=f"prompts of {PROMPTS[0]} and {PROMPTS[1]} tokens")
    for rows in dk.World.spawn(work, len(SHARES)):
        for row in rows:
            table.add_row(*row)
    Console().print(table)
    print("ok")
