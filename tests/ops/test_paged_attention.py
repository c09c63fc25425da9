"""Paged attention of a step of decoding: the references against each other, the checks, the kernels, the plan."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from compare import assert_close, assert_equal_bits
from numpy.typing import NDArray

from drvkit.device import Device, Stream
from drvkit.driver import DriverError
from drvkit.graph import Graph
from drvkit.memory import Buffer
from drvkit.ops.kv_write import kv_write
from drvkit.ops.paged_attention import DecodePlan, merge_attention, paged_attention, plan_decode
from drvkit.ops.prefill_attention import PrefillPlan
from drvkit.ref import paged_attention as ref
from drvkit.source import Source

bf16, f16, e4m3 = ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn

BAD_PAGE = 0x7FFFFFFF  # what no pool has
RAGGED = [1, 0, 15, 16, 17, 63, 64, 65, 200, 513]

# The probabilities are rounded to the type of the products once (by 2^-9 or 2^-12 of each), the output once.
TOLERANCE = {np.dtype(bf16): 2**-7, np.dtype(f16): 2**-9}
WHY = "one rounding of the probabilities and one of the result"


@dataclass
class Step:
    """A step's operands on the host, everything that must not be read poisoned."""

    lengths: list[int]
    rng: np.random.Generator
    dtype: Any = bf16
    kv_dtype: Any = None
    group: int = 4
    kv_heads: int = 2
    dim: int = 128
    page_size: int = 16
    q_len: int = 1
    layout: str = "HND"
    window: int | None = None
    soft_cap: float | None = None
    scaled: bool = False
    with_sinks: bool = False
    batch_invariant: bool = False
    width: int = 0
    optional: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng, dim = self.rng, self.dim
        self.kv_dtype = self.kv_dtype or self.dtype
        needs = [-(-length // self.page_size) for length in self.lengths]
        self.width = self.width or max([*needs, 1]) + 2
        pages = sum(needs) + 3
        shuffled = rng.permutation(pages).astype(np.int32)
        self.table = np.full((len(self.lengths), self.width), BAD_PAGE, np.int32)
        ends = list(itertools.accumulate(needs, initial=0))
        for row, (start, need) in enumerate(zip(ends, needs, strict=False)):
            self.table[row, :need] = shuffled[start : start + need]
        self.k, self.v = (self._pool(pages, needs) for _ in range(2))
        heads = self.kv_heads * self.group
        self.q = rng.normal(size=(len(self.lengths), self.q_len, heads, dim)).astype(np.float32).astype(self.dtype)
        if self.scaled:
            for name in ("k_scale", "v_scale"):
                self.optional[name] = rng.uniform(0.5, 2, self.kv_heads).astype(np.float32)
        if self.with_sinks:
            self.optional["sinks"] = rng.normal(size=heads).astype(np.float32)

    def _pool(self, pages: int, needs: list[int]) -> NDArray[Any]:
        """NaN everywhere but where a request has a token that a query attends to."""
        pool = np.full((pages, self.kv_heads, self.page_size, self.dim), np.nan, np.float32).astype(self.kv_dtype)
        for row, length in enumerate(self.lengths):
            first = 0 if self.window is None else max(0, length - self.q_len - self.window)
            for token in range(first, length):
                values = self.rng.normal(size=(self.kv_heads, self.dim)).astype(np.float32)
                pool[self.table[row, token // self.page_size], :, token % self.page_size] = values.astype(self.kv_dtype)
            self.table[row, : first // self.page_size] = BAD_PAGE  # pages that slid out of the window may be anybody's
        return pool if self.layout == "HND" else np.ascontiguousarray(pool.transpose(0, 2, 1, 3))

    def plan(self, device: Device) -> DecodePlan:
        plan = DecodePlan(
            device,
            requests=len(self.lengths),
            q_heads=self.kv_heads * self.group,
            kv_heads=self.kv_heads,
            dim=self.dim,
            page_size=self.page_size,
            table_width=self.width,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            q_len=self.q_len,
            window=self.window,
            batch_invariant=self.batch_invariant,
        )
        plan.partials.copy_from(np.full(plan.partials.shape, np.nan, np.float32))
        return plan

    def run(self, stream: Stream, plan: DecodePlan, times: int = 1) -> tuple[NDArray[Any], NDArray[Any]]:
        device = stream.device
        host = {"q": self.q, "k": self.k, "v": self.v, "table": self.table, **self.optional}
        made: dict[str, Buffer] = {name: device.array(each) for name, each in host.items()}
        out = device.array(np.full(self.q.shape, np.nan, np.float32).astype(self.dtype))
        lse = device.array(np.full(self.q.shape[:3], np.nan, np.float32))
        lengths = device.array(np.array(self.lengths, np.int32))
        optional: dict[str, Any] = {name: made[name] for name in self.optional}
        try:
            for _ in range(times):
                plan_decode(stream, plan, lengths)
                paged_attention(
                    *(stream, plan, made["q"], made["k"], made["v"], made["table"], out),
                    lse=lse,
                    layout=self.layout,
                    soft_cap=self.soft_cap,
                    **optional,
                )
            stream.synchronize()
            return out.numpy(), lse.numpy()
        finally:
            for buffer in (*made.values(), out, lse, lengths):
                buffer.close()

    def wanted(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        table = np.where(self.table == BAD_PAGE, 0, self.table)
        k, v = (np.nan_to_num(pool.astype(np.float32), nan=0.0) for pool in (self.k, self.v))
        how: dict[str, Any] = {"layout": self.layout, "window": self.window, "soft_cap": self.soft_cap}
        return ref.paged_attention(self.q, k, v, table, np.array(self.lengths, np.int32), **how, **self.optional)

    def check(self, got: tuple[NDArray[Any], NDArray[Any]]) -> None:
        out, lse = self.wanted()
        close = TOLERANCE[np.dtype(self.dtype)]
        largest = float(np.abs(out).max(initial=0.0))
        assert_close(got[0].astype(np.float64), out, rtol=close, atol=close * max(largest, 1e-3) / 2, why=WHY)
        assert_close(got[1].astype(np.float64), lse, rtol=1e-5, atol=1e-5, why="float32, exp2 and log2 approximated")
        empty = [row for row, length in enumerate(self.lengths) if not length]
        assert not got[0][empty].view(np.uint16).any(), "padding gets exact zeros"


# ---- the references ------------------------------------------------------------------------------------------------


def brute_force(
    q: Any, k: Any, v: Any, scale: float, window: int | None, cap: float | None, sink: float
) -> list[float]:
    """One query of the last position over all tokens, by Python's floats."""
    tokens = range(0 if window is None else max(0, len(k) - 1 - window), len(k))
    logits = [scale * float(sum(float(a) * float(b) for a, b in zip(q, k[t], strict=True))) for t in tokens]
    logits = [cap * float(np.tanh(x / cap)) if cap else x for x in logits]
    weights = [float(np.exp(x)) for x in logits]
    below = sum(weights) + float(np.exp(sink))
    return [sum(w * float(v[t][d]) for w, t in zip(weights, tokens, strict=True)) / below for d in range(len(q))]


@pytest.mark.parametrize(("window", "cap"), [(None, None), (3, None), (0, 2.0), (100, 2.0)])
def test_the_dense_reference_is_the_formula(rng: np.random.Generator, window: int | None, cap: float | None) -> None:
    q, k, v = rng.normal(size=(1, 4, 8)), rng.normal(size=(11, 2, 8)), rng.normal(size=(11, 2, 8))
    sinks = rng.normal(size=4)
    out, _ = ref.dense_attention(q, k, v, scale=0.3, window=window, soft_cap=cap, sinks=sinks)
    for head in range(4):
        want = brute_force(q[0, head], k[:, head // 2], v[:, head // 2], 0.3, window, cap, float(sinks[head]))
        np.testing.assert_allclose(out[0, head], want, rtol=1e-12)


def test_queries_see_what_stands_before_them(rng: np.random.Generator) -> None:
    q, k, v = rng.normal(size=(3, 2, 8)), rng.normal(size=(7, 1, 8)), rng.normal(size=(7, 1, 8))
    out, lse = ref.dense_attention(q, k, v)
    for i in range(3):
        one, one_lse = ref.dense_attention(q[i : i + 1], k[: 5 + i], v[: 5 + i])
        np.testing.assert_allclose(out[i], one[0], rtol=1e-12)
        np.testing.assert_allclose(lse[i], one_lse[0], rtol=1e-12)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_the_paged_reference_is_the_dense_one(rng: np.random.Generator, layout: str) -> None:
    step = Step([0, 1, 16, 33], rng, layout=layout, page_size=8, dim=64)
    out, lse = step.wanted()
    for row, length in enumerate(step.lengths):
        k, v = (ref.gather_pages(pool, step.table[row], length, layout) for pool in (step.k, step.v))
        assert len(k) == length
        if length:
            dense = ref.dense_attention(step.q[row], k, v)
            np.testing.assert_array_equal(out[row], dense[0])
            np.testing.assert_array_equal(lse[row], dense[1])
        else:
            assert not out[row].any()
            assert (lse[row] == -np.inf).all()


def test_merging_parts_is_attention_to_all(rng: np.random.Generator) -> None:
    q, k, v = rng.normal(size=(1, 2, 8)), rng.normal(size=(9, 2, 8)), rng.normal(size=(9, 2, 8))
    parts = [ref.dense_attention(q, k[a:b], v[a:b]) for a, b in ((0, 4), (4, 4), (4, 9))]
    out, lse = ref.merge(np.array([part[0] for part in parts]), np.array([part[1] for part in parts]))
    whole = ref.dense_attention(q, k, v)
    np.testing.assert_allclose(out, whole[0], rtol=1e-12)
    np.testing.assert_allclose(lse, whole[1], rtol=1e-12)


# ---- the checks ----------------------------------------------------------------------------------------------------

SHAPE = ("q_heads", "kv_heads", "dim", "page_size", "table_width")
PLAN: dict[str, Any] = {"requests": 2, "q_heads": 8, "kv_heads": 2, "dim": 128, "page_size": 16, "table_width": 4}


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"dtype": np.float32}, TypeError, "dtype: wanted float16 or bfloat16, got float32"),
        ({"kv_dtype": np.float16}, TypeError, "kv_dtype: wanted bfloat16 or float8_e4m3fn, got float16"),
        ({"dim": 96}, ValueError, "dim: wanted one of 64, 128, 256, got 96"),
        ({"page_size": 24}, ValueError, "page_size: wanted one of 8, 16, 32, 64, 128, got 24"),
        ({"q_heads": 7}, ValueError, "q_heads: wanted a multiple of 2 KV heads, got 7"),
        ({"q_heads": 130}, ValueError, "q_heads: wanted at most 64 for each of 2 KV heads, got 130"),
        ({"q_len": 5}, ValueError, "q_len: wanted 1 to 4, got 5"),
        ({"requests": 0}, ValueError, "requests: wanted at least 1, got 0"),
        ({"window": -1}, ValueError, "window: wanted None or at least 0, got -1"),
        ({"window": 2.5}, TypeError, "window: wanted an integer, got 2.5"),
        ({"page_size": 16.0}, TypeError, "page_size: wanted an integer, got 16.0"),
        ({"requests": "3"}, TypeError, "requests: wanted an integer, got '3'"),
        ({"q_len": True}, TypeError, "q_len: wanted an integer, got True"),
        ({"requests": 2**20, "table_width": 2**20}, ValueError, r"fewer than 2\*\*31 can be planned"),
    ],
    ids=str,
)
def test_a_plan_that_cannot_be_is_refused(
    device: Device, wrong: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^DecodePlan: .*{message}"):
        DecodePlan(device, **PLAN | wrong)


def test_two_slots_a_block_are_enough_for_any_lengths(device: Device) -> None:
    for requests, width in ((1, 1), (500, 10), (7, 10_000)):
        with DecodePlan(device, **PLAN | {"requests": requests, "table_width": width}) as plan:
            assert plan.slots == 2 * plan.blocks
            assert plan.partials.size == plan.slots * plan.rows * (plan.dim + 2)
    with DecodePlan(device, **PLAN, batch_invariant=True) as plan:
        assert plan.slots <= 64 * plan.requests * plan.heads


def operands(device: Device) -> dict[str, Any]:
    pool = device.zeros((3, 2, 16, 128), bf16)
    return {
        "q": device.zeros((2, 1, 8, 128), bf16),
        "k": pool,
        "v": device.zeros((3, 2, 16, 128), bf16),
        "block_table": device.zeros((2, 4), np.int32),
        "out": device.zeros((2, 1, 8, 128), bf16),
    }


@pytest.mark.parametrize(
    ("role", "shape", "dtype", "error", "message"),
    [
        ("q", (2, 1, 8, 64), bf16, ValueError, r"q: wanted shape \(2, 1, 8, 128\), got \(2, 1, 8, 64\)"),
        ("q", (2, 1, 8, 128), np.float16, TypeError, "q: wanted a device array of bfloat16, got float16"),
        ("out", (1, 1, 8, 128), bf16, ValueError, r"out: wanted shape \(2, 1, 8, 128\)"),
        ("k", (3, 16, 2, 128), bf16, ValueError, r"k: wanted shape \(pages, 2, 16, 128\), got \(3, 16, 2, 128\)"),
        ("k", (0, 2, 16, 128), bf16, ValueError, r"k: wanted shape \(pages, 2, 16, 128\), got \(0, 2, 16, 128\)"),
        ("v", (4, 2, 16, 128), bf16, ValueError, r"v has shape \(4, 2, 16, 128\), strides .*; k \(3, 2, 16, 128\)"),
        ("v", (3, 2, 16, 128), np.uint8, TypeError, "v: wanted a device array of bfloat16, got uint8"),
        ("block_table", (2, 5), np.int32, ValueError, r"block_table: wanted shape \(2, 4\), got \(2, 5\)"),
        ("block_table", (2, 4), np.int64, TypeError, "block_table: wanted a device array of int32, got int64"),
        ("lse", (2, 8), np.float32, ValueError, r"lse: wanted shape \(2, 1, 8\), got \(2, 8\)"),
        ("sinks", (2,), np.float32, ValueError, r"sinks: wanted shape \(8,\), got \(2,\)"),
        ("k_scale", (2,), np.float32, ValueError, "v_scale is missing: wanted both or none"),
    ],
)
def test_operands_that_do_not_fit_are_refused(
    device: Device, graph: Graph, role: str, shape: tuple[int, ...], dtype: Any, error: type[Exception], message: str
) -> None:
    with DecodePlan(device, **PLAN) as plan:
        given_right = operands(device)
        given = given_right | {role: device.zeros(shape, dtype)}
        with pytest.raises(error, match=f"^paged_attention: {message}"):
            paged_attention(graph, plan, **given)
        row = device.zeros((2, 1, 10, 256), bf16)
        with pytest.raises(ValueError, match=r"^paged_attention: q: wanted contiguous tokens, got strides \(5120, "):
            paged_attention(graph, plan, **given_right | {"q": row[:, :, :8, :128]})
        with pytest.raises(ValueError, match=r"^paged_attention: out: wanted .*contiguous"):
            paged_attention(graph, plan, **given_right | {"out": row[:, :, :8, :128]})
        with pytest.raises(TypeError, match=r"^paged_attention: scale: wanted None or a number, got 'a'"):
            paged_attention(graph, plan, **given_right, scale="a")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"^paged_attention: scale: wanted None or a positive number of float32"):
            paged_attention(graph, plan, **given_right, scale=1e-60)
        with pytest.raises(ValueError, match="soft_cap: wanted None or a positive number of float32, got 0"):
            paged_attention(graph, plan, **operands(device), soft_cap=0)
        with pytest.raises(ValueError, match="layout: wanted HND or NHD, got 'DNH'"):
            paged_attention(graph, plan, **operands(device), layout="DNH")
        with pytest.raises(ValueError, match=r"plan_decode: lengths: wanted shape \(2,\), got \(3,\)"):
            plan_decode(graph, plan, device.zeros(3, np.int32))
        with (
            PrefillPlan(device, max_tokens=2, max_requests=2, **{name: PLAN[name] for name in SHAPE}) as other,
            pytest.raises(TypeError, match=r"^paged_attention: plan: wanted a DecodePlan, got PrefillPlan"),
        ):
            paged_attention(graph, other, **given_right)  # type: ignore[arg-type]
    assert not graph.nodes


def test_tokens_of_queries_lie_at_one_distance(device: Device, graph: Graph) -> None:
    given = operands(device)
    q, out = device.zeros((2, 3, 8, 128), bf16), device.zeros((2, 2, 8, 128), bf16)
    with DecodePlan(device, **PLAN) as one, DecodePlan(device, **PLAN, q_len=2) as two:
        assert paged_attention(graph, one, **given | {"q": q[:, 1:2]})
        with pytest.raises(ValueError, match=r"^paged_attention: q: wanted tokens at one distance, got strides"):
            paged_attention(graph, two, **given | {"q": q[:, :2], "out": out})


def test_results_overlap_nothing_but_the_queries(device: Device, graph: Graph) -> None:
    given = operands(device)
    both = device.zeros((3, 1, 8, 128), bf16)
    floats = device.zeros(16, np.float32)
    with DecodePlan(device, **PLAN) as plan:
        assert paged_attention(graph, plan, **given | {"q": both[:2], "out": both[:2]})
        wrong: dict[str, dict[str, Any]] = {
            r"out .* overlaps q": {"q": both[1:], "out": both[:2]},
            "out .* overlaps k": {"out": given["k"].reshape(-1)[: 2 * 8 * 128].reshape(2, 1, 8, 128)},
            "out .* overlaps its parts": {"out": plan.partials.view(bf16)[: 2 * 8 * 128].reshape(2, 1, 8, 128)},
            "lse .* overlaps out": {"lse": given["out"].view(np.float32).reshape(-1)[:16].reshape(2, 1, 8)},
            "lse .* overlaps sinks": {"lse": floats.reshape(2, 1, 8), "sinks": floats[:8]},
        }
        for message, changes in wrong.items():
            with pytest.raises(ValueError, match=f"^paged_attention: {message}"):
                paged_attention(graph, plan, **given | changes)
    outs, lses = device.zeros((2, 4, 64), bf16), device.zeros((2, 4), np.float32)
    arrays: dict[str, Any] = {"outs": outs, "lses": lses}
    arrays |= {"out": device.zeros((4, 64), bf16), "lse": device.zeros(4, np.float32)}
    for message, changes in {
        "out .* overlaps outs": {"out": outs[0]},
        "lse .* overlaps lses": {"lse": lses[1]},
        "outs: wanted an address aligned to 16": {"outs": device.zeros(2 * 4 * 64 + 1, bf16)[1:].reshape(2, 4, 64)},
    }.items():
        with pytest.raises(ValueError, match=f"^merge_attention: {message}"):
            merge_attention(graph, **arrays | changes)


OUTSIDE: dict[str, tuple[int, int, str]] = {
    "page": (33, BAD_PAGE, rf"block_table\[1\]\[1\] is {BAD_PAGE}: the pool has \d+ pages"),
    "negative page": (33, -1, r"block_table\[1\]\[1\] is -1: the pool has \d+ pages"),
    "length": (1000, 0, r"lengths\[1\] is 1000: the block table has room for 80 tokens"),
    "negative length": (-1, 0, r"lengths\[1\] is -1: the block table has room for 80 tokens"),
}


def step_outside(rng: np.random.Generator, length: int, page: int) -> Step:
    """The second request has a page, or a length, that cannot be."""
    step = Step([20, 33], rng)
    step.lengths[1], step.table[1, 1] = length, page
    step.table[1, 3:] = 0
    return step


@pytest.mark.parametrize(("length", "page", "told"), OUTSIDE.values(), ids=OUTSIDE)
def test_the_cpu_device_reports_what_only_the_device_can_know(
    rng: np.random.Generator, capsys: pytest.CaptureFixture[str], length: int, page: int, told: str
) -> None:
    victim = Device("cpu:5")
    step = step_outside(rng, length, page)
    with step.plan(victim) as plan, victim.stream() as stream:
        try:
            with pytest.raises(DriverError, match="LAUNCH_FAILED"):
                step.run(stream, plan)
        finally:
            victim.driver.cuDevicePrimaryCtxReset(victim.handle)
    assert re.search(f"^{told}$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(("length", "page"), [case[:2] for case in OUTSIDE.values()], ids=OUTSIDE)
def test_a_gpu_stays_inside_its_memory(
    device: Device, stream: Stream, rng: np.random.Generator, length: int, page: int
) -> None:
    if device.driver.kind == "cpu":
        pytest.skip("the CPU device reports it instead")
    step = step_outside(rng, length, page)
    with step.plan(device) as plan:
        out, _ = step.run(stream, plan)
    step.lengths[1] = 0
    assert_close(out[0].astype(np.float64), step.wanted()[0][0], rtol=2**-7, atol=2**-7, why=WHY)


HALVES = """
#include "dk/attention.cuh"
__global__ void convert(unsigned* told, unsigned* by_bits) {
  const unsigned pair = blockIdx.x * blockDim.x + threadIdx.x;
  told[pair] = dk::halves(pair), by_bits[pair] = dk::halves_by_bits(pair);
}
"""


def test_eight_bits_are_widened_exactly_with_and_without_the_instruction(device: Device, stream: Stream) -> None:
    pairs = np.arange(2**16, dtype=np.uint16).view(e4m3)
    with (
        device.module(Source.from_text(HALVES, "halves.cu")) as module,
        device.zeros(2**16, np.uint32) as told,
        device.zeros(2**16, np.uint32) as by_bits,
    ):
        module.kernel("convert").launch(stream, grid=256, block=256, args=(told, by_bits))
        for each in (told, by_bits):
            assert_equal_bits(each.numpy(stream).view(f16), pairs.astype(f16), any_nan=True)


# ---- the plan ------------------------------------------------------------------------------------------------------

WALK = """
#include "dk/attention_plan.cuh"

// Each block tells of its segments: request, head, tiles, slots of the work, its own slot, and all of them.
__global__ void walk(const int* plan_data, int* log, int most, int heads, int abreast, int q_len, int window) {
  const dk::Plan plan(plan_data, abreast);
  int* row = log + 1ll * blockIdx.x * most * 64;
  for (dk::Cursor<1> at(plan, heads, 1, q_len, window); at.left; at.advance()) {
    if (at.opens()) row[0] = at.request, row[1] = at.head(), row[2] = at.tile;
    if (!at.closes()) continue;
    const dk::Slots slots(plan, at);
    row[3] = at.end, row[4] = slots.count, row[5] = slots.mine;
    for (int i = 0; i < min(slots.count, 58); ++i) row[6 + i] = slots[i];
    row += 64;
  }
}
"""


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("window", [None, 100])
def test_a_plan_covers_all_work_once_and_gives_every_part_a_slot(
    device: Device, stream: Stream, rng: np.random.Generator, batch_invariant: bool, window: int | None
) -> None:
    how: dict[str, Any] = {**PLAN, "requests": 60, "table_width": 60, "window": window}
    source = Source.from_text(WALK, "walk.cu")
    with device.module(source) as module, DecodePlan(device, **how, batch_invariant=batch_invariant) as plan:
        walk = module.kernel("walk")
        most = -(-60 * plan.heads * 15 // plan.blocks)  # segments of a block
        for share in (0.1, 0.5, 1, 1, 1):
            few = rng.integers(0, 960, 60) * (rng.random(60) < share)
            with (
                device.array(few.astype(np.int32)) as lengths,
                device.array(np.full((plan.blocks, most, 64), -1, np.int32)) as log,
            ):
                plan_decode(stream, plan, lengths)
                reach = -1 if window is None else window
                args = (plan.schedule, log, most, plan.heads, plan.abreast, plan.q_len, reach)
                walk.launch(stream, grid=plan.blocks, block=1, args=args)
                told = log.numpy(stream)
            segments = sorted(map(tuple, told[told[:, :, 0] >= 0].tolist()))
            partial = [segment[5] for segment in segments if segment[4] > 1]
            assert len(set(partial)) == len(partial), "no two parts have one slot"
            assert all(0 <= slot < plan.slots for slot in partial)
            for request, length in enumerate(few.tolist()):
                first = 0 if window is None else max(0, length - 1 - window) // 64
                for head in range(plan.heads):
                    own = [segment for segment in segments if segment[:2] == (request, head)]
                    ends = [own[0][2], *(segment[3] for segment in own)]
                    assert [segment[2] for segment in own] == ends[:-1], "one follows the other"
                    assert (ends[0], ends[-1]) == (first, max(-(-length // 64), first + 1))
                    assert {segment[4] for segment in own} == {len(own)}
                    if len(own) > 1:
                        assert {segment[6 : 6 + len(own)] for segment in own} == {tuple(each[5] for each in own)}


# ---- the kernels ---------------------------------------------------------------------------------------------------

# On the CPU device each instance takes seconds to compile: there a few of them stand for all.
FEW: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "NHD, pages of 64, dim 64": {"layout": "NHD", "page_size": 64, "dim": 64, "dtype": f16},
    "e4m3 with everything": {
        "kv_dtype": e4m3,
        "scaled": True,
        "with_sinks": True,
        "soft_cap": 5.0,
        "page_size": 8,
        "window": 70,
        "q_len": 2,
        "group": 1,
    },
    "16 rows": {"group": 7, "q_len": 3, "kv_heads": 1, "with_sinks": True},
}
MANY: dict[str, dict[str, Any]] = {
    **{f"page {size}": {"page_size": size} for size in (8, 32, 64, 128)},
    **{f"dim {dim} {np.dtype(kv).name}": {"dim": dim, "kv_dtype": kv} for dim in (64, 128, 256) for kv in (bf16, e4m3)},
    **{f"group {group}": {"group": group} for group in (1, 2, 3, 8, 9, 16, 17, 33, 64)},
    **{f"q_len {n}": {"q_len": n, "group": 2} for n in (2, 3, 4)},
    **{f"window {n}": {"window": n} for n in (0, 15, 16, 17, 511, 512, 513, 1000)},
    "float16": {"dtype": f16},
    "float16 e4m3": {"dtype": f16, "kv_dtype": e4m3},
    "soft cap": {"soft_cap": 3.0},
    "sinks": {"with_sinks": True},
    "NHD": {"layout": "NHD"},
    "NHD e4m3": {"layout": "NHD", "kv_dtype": e4m3, "scaled": True},
}


@pytest.mark.parametrize("how", [*FEW.values(), *MANY.values()], ids=[*FEW, *MANY])
def test_ragged_lengths(
    device: Device, stream: Stream, rng: np.random.Generator, how: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    if device.driver.kind == "cpu" and how not in FEW.values():
        pytest.skip("an instance takes seconds to compile for the CPU device: a few stand for all there")
    lengths = RAGGED if device.driver.kind == "cpu" else [*RAGGED, 4000, 20_000]
    step = Step(lengths, rng, **how)
    with step.plan(device) as plan:
        step.check(step.run(stream, plan, times=2))
        assert not plan.arrivals.numpy().any(), "the counters are ready for the next launch"


@pytest.mark.parametrize("lengths", [[0, 0, 0], [1], [64], [0, 700, 0], [128] * 9, [2] * 70], ids=str)
def test_batches_of_every_kind(device: Device, stream: Stream, rng: np.random.Generator, lengths: list[int]) -> None:
    step = Step(lengths, rng)
    with step.plan(device) as plan:
        step.check(step.run(stream, plan))


def test_one_graph_serves_all_lengths(device: Device, stream: Stream, rng: np.random.Generator) -> None:
    first = Step([300, 5, 0, 64], rng, width=40)
    second = Step([0, 640, 17, 1], rng, width=40)
    pages = max(len(first.k), len(second.k))

    def padded(pool: NDArray[Any]) -> NDArray[Any]:
        return np.concatenate([pool, np.full((pages - len(pool), *pool.shape[1:]), np.nan, np.float32).astype(bf16)])

    with first.plan(device) as plan, Graph(device, "step") as graph:
        q, out = device.array(first.q), device.array(first.q)
        k, v = device.array(padded(first.k)), device.array(padded(first.v))
        table, lengths = device.array(first.table), device.array(np.array(first.lengths, np.int32))
        lse = device.zeros(first.q.shape[:3], np.float32)
        planned = plan_decode(graph, plan, lengths, name="plan")
        layer = paged_attention(graph, plan, q, k, v, table, out, lse=lse, after=planned, name="layer 0")
        assert layer is not None
        paged_attention(graph, plan, q, k, v, table, out, lse=lse, after=layer.port("programmatic"), name="layer 1")
        with graph.instantiate() as exe:
            for step in (first, second, first):
                for buffer, host in ((q, step.q), (k, padded(step.k)), (v, padded(step.v)), (table, step.table)):
                    buffer.copy_from(host)
                lengths.copy_from(np.array(step.lengths, np.int32))
                out.copy_from(np.full(step.q.shape, np.nan, np.float32).astype(bf16))
                exe.launch(stream)
                stream.synchronize()
                step.check((out.numpy(), lse.numpy()))
        for buffer in (q, out, k, v, table, lengths, lse):
            buffer.close()


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_one_plan_gives_the_same_bits_each_time(
    device: Device, stream: Stream, rng: np.random.Generator, batch_invariant: bool
) -> None:
    step = Step([1000, 3, 77], rng, batch_invariant=batch_invariant)
    with step.plan(device) as plan:
        out, lse = step.run(stream, plan)
        step.check((out, lse))
        for _ in range(3):
            again = step.run(stream, plan)
            assert_equal_bits(again[0], out)
            assert_equal_bits(again[1], lse)


def test_a_batch_invariant_row_does_not_see_its_neighbours(
    device: Device, stream: Stream, rng: np.random.Generator
) -> None:
    """Padded or not, beside long or short requests: the same bits."""
    step = Step([700, 33, 260], rng, batch_invariant=True, width=64)
    alone = []
    with step.plan(device) as plan:
        together = step.run(stream, plan)
        step.check(together)
        for row, length in enumerate(step.lengths):
            step.lengths = [length if i == row else 0 for i in range(3)]
            alone.append([part[row] for part in step.run(stream, plan)])
    for row in range(3):
        for part in range(2):
            assert_equal_bits(alone[row][part], together[part][row])


def test_a_long_request_is_merged_of_more_parts_than_a_warp_has_lanes(
    device: Device, stream: Stream, rng: np.random.Generator
) -> None:
    step = Step([64 * 40], rng, kv_heads=1)
    with step.plan(device) as plan:
        assert plan.blocks >= 40
        step.check(step.run(stream, plan))


def test_a_large_logit_after_many_small_ones_and_before(
    device: Device, stream: Stream, rng: np.random.Generator
) -> None:
    """The maximum a sum is taken by grows in small steps, in large ones, and not at all; halves have no more room."""
    step = Step([700], rng, **FEW["NHD, pages of 64, dim 64"])
    aim = step.q[0, 0, :: step.group].astype(np.float32)  # of each KV head's first query
    for token, logit in ((20, 3), (100, 8), (200, 14), (300, 29), (301, 30), (500, 20)):
        page, place = step.table[0, token // 64], token % 64
        step.k[page, place] = (aim * (logit * 8 / np.sum(aim**2, axis=-1, keepdims=True))).astype(f16)
    with step.plan(device) as plan:
        step.check(step.run(stream, plan))


@pytest.mark.parametrize("window", [2**31 - 1, 2**40])
def test_a_window_of_any_size_is_none_for_short_requests(
    device: Device, stream: Stream, rng: np.random.Generator, window: int
) -> None:
    step = Step([1, 2, 5], rng, **FEW["16 rows"])
    step.lengths = [3, 4, 5]
    step = Step(step.lengths, rng, **FEW["16 rows"], window=window)
    with step.plan(device) as plan:
        step.check(step.run(stream, plan))


def test_a_kernel_before_may_write_the_newest_token_and_the_queries(
    device: Device, stream: Stream, rng: np.random.Generator
) -> None:
    """By a programmatic edge: older tokens are read before it has ended, and these not."""
    step = Step([130, 7, 64], rng)
    pool = {name: getattr(step, name) for name in ("k", "v")}
    newest: dict[str, Any] = {}
    slots = np.zeros(3, np.int64)
    poisoned = {name: each.copy() for name, each in pool.items()}
    for name, each in pool.items():
        rows = []
        for request, length in enumerate(step.lengths):
            page, place = step.table[request, (length - 1) // 16], (length - 1) % 16
            slots[request] = page * 16 + place
            rows.append(each[page, :, place].copy())
            poisoned[name][page, :, place] = np.nan
        newest[name] = np.array(rows)
    with step.plan(device) as plan, Graph(device, "step") as graph:
        of = {name: device.array(each) for name, each in poisoned.items()}
        new = {name: device.array(each) for name, each in newest.items()}
        q, out = device.array(step.q), device.zeros(step.q.shape, bf16)
        lse = device.zeros(step.q.shape[:3], np.float32)
        table, lengths = device.array(step.table), device.array(np.array(step.lengths, np.int32))
        planned = plan_decode(graph, plan, lengths)
        written = kv_write(graph, new["k"], new["v"], of["k"], of["v"], device.array(slots), after=planned)
        assert written is not None
        paged_attention(graph, plan, q, of["k"], of["v"], table, out, lse=lse, after=written.port("programmatic"))
        with graph.instantiate() as exe:
            for _ in range(3):
                for name, each in poisoned.items():
                    of[name].copy_from(each)
                exe.launch(stream)
                stream.synchronize()
                step.check((out.numpy(), lse.numpy()))


def test_the_cpu_device_reports_a_scale_that_is_not_positive(
    rng: np.random.Generator, capsys: pytest.CaptureFixture[str]
) -> None:
    victim = Device("cpu:5")
    step = Step([20, 33], rng, **FEW["e4m3 with everything"])
    step.optional["k_scale"][1] = 0
    with step.plan(victim) as plan, victim.stream() as stream:
        try:
            with pytest.raises(DriverError, match="LAUNCH_FAILED"):
                step.run(stream, plan)
        finally:
            victim.driver.cuDevicePrimaryCtxReset(victim.handle)
    assert "the scale of head 1 is 0.000000: wanted a positive one" in capsys.readouterr().out


def test_operands_may_be_parts_of_larger_arrays(device: Device, stream: Stream, rng: np.random.Generator) -> None:
    """Pools the halves of one array, queries the first heads of the rows of a projection."""
    step = Step([40, 7], rng)
    both = np.stack([step.k, step.v], axis=1)
    heads = step.q.shape[2]
    projection = np.concatenate([step.q, np.full_like(step.q, np.nan)], axis=2)
    with (
        step.plan(device) as plan,
        device.array(both) as pool,
        device.array(projection) as qkv,
        device.zeros(step.q.shape, bf16) as out,
        device.zeros(step.q.shape[:3], np.float32) as lse,
        device.array(step.table) as table,
        device.array(np.array(step.lengths, np.int32)) as lengths,
    ):
        plan_decode(stream, plan, lengths)
        paged_attention(stream, plan, qkv[:, :, :heads], pool[:, 0], pool[:, 1], table, out, lse=lse)
        stream.synchronize()
        step.check((out.numpy(), lse.numpy()))


@pytest.mark.parametrize("dtype", [bf16, f16])
def test_merge_attention(device: Device, stream: Stream, rng: np.random.Generator, dtype: Any) -> None:
    if device.driver.kind == "cpu" and dtype is f16:
        pytest.skip("an instance takes seconds to compile for the CPU device: a few stand for all there")
    outs = rng.normal(size=(3, 50, 72)).astype(np.float32).astype(dtype)
    lses = rng.normal(size=(3, 50)).astype(np.float32) * 10
    lses[rng.random((3, 50)) < 0.4] = -np.inf
    outs[lses == -np.inf] = np.nan
    with (
        device.array(outs) as a,
        device.array(lses) as b,
        device.zeros((50, 72), dtype) as out,
        device.zeros(50, np.float32) as lse,
    ):
        merge_attention(stream, a, b, out, lse)
        stream.synchronize()
        want, want_lse = ref.merge(np.where(lses[..., None] == -np.inf, 0, outs.astype(np.float32)), lses)
        close = TOLERANCE[np.dtype(dtype)]
        assert_close(out.numpy().astype(np.float64), want, rtol=close, atol=close / 100, why="one rounding")
        assert_close(lse.numpy().astype(np.float64), want_lse, rtol=1e-5, atol=1e-5, why="float32")
