"""Prefill attention: the reference, the checks, the plan, and the kernels against the reference.

Everything that must not be read is poisoned: NaN in the pools, pages that no pool has in the tables.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from compare import assert_close, assert_equal_bits
from numpy.typing import NDArray

from drvkit import ops
from drvkit.device import Device, Stream
from drvkit.driver import DriverError
from drvkit.graph import Graph
from drvkit.ops import paged_attention as decode_ops
from drvkit.ops.prefill_attention import PrefillPlan, plan_prefill, prefill_attention
from drvkit.ref import paged_attention as decode
from drvkit.ref import prefill_attention as ref

bf16, f16, e4m3 = ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn

BAD_PAGE = 0x7FFFFFFF
# The probabilities are rounded to the type of the products once (by 2^-9 or 2^-12 of each), the output once.
TOLERANCE = {np.dtype(bf16): 2**-7, np.dtype(f16): 2**-10}
WHY = "one rounding of the probabilities and one of the result"

Requests = list[tuple[int, int]]  # queries and tokens of each


@dataclass
class Shape:
    """What a plan is made for; it may serve many steps."""

    max_tokens: int
    max_requests: int
    dtype: Any = bf16
    kv_dtype: Any = None
    group: int = 2
    kv_heads: int = 2
    dim: int = 128
    page_size: int = 16
    table_width: int = 32
    layout: str = "HND"
    window: int | None = None
    how: dict[str, Any] = field(default_factory=dict)  # scale, soft_cap

    def __post_init__(self) -> None:
        self.kv_dtype = self.kv_dtype or self.dtype
        self.q_heads = self.group * self.kv_heads
        self.rows = (self.max_tokens, self.q_heads)

    def plan(self, device: Device) -> PrefillPlan:
        return PrefillPlan(
            device,
            max_tokens=self.max_tokens,
            max_requests=self.max_requests,
            q_heads=self.q_heads,
            kv_heads=self.kv_heads,
            dim=self.dim,
            page_size=self.page_size,
            table_width=self.table_width,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            window=self.window,
        )

    def values(self, rng: np.random.Generator, *shape: int, dtype: Any = None) -> NDArray[Any]:
        return rng.normal(size=shape).astype(np.float32).astype(dtype or self.dtype)


@dataclass
class Step:
    """The operands of a step, on the host."""

    shape: Shape
    requests: Requests
    rng: np.random.Generator
    pages: int = 0
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)  # k_scale, v_scale, sinks

    def __post_init__(self) -> None:
        shape, rng = self.shape, self.rng
        absent = shape.max_requests - len(self.requests)
        q_lens = [q_len for q_len, _ in self.requests] + [0] * absent
        self.q_starts = np.array(list(itertools.accumulate(q_lens, initial=0)), np.int32)
        # Nobody reads the length of a request without queries.
        self.lengths = np.array([length for _, length in self.requests] + [BAD_PAGE] * absent, np.int32)
        self.q = shape.values(rng, *shape.rows, shape.dim)
        self.q[self.q_starts[-1] :] = np.nan
        needs = [-(-length // shape.page_size) for _, length in self.requests]
        self.pages = self.pages or sum(needs) + 3
        free = iter(rng.permutation(self.pages))
        self.table = np.full((shape.max_requests, shape.table_width), BAD_PAGE, np.int32)
        pool = (self.pages, shape.kv_heads, shape.page_size, shape.dim)
        self.k, self.v = (np.full(pool, np.nan, np.float32).astype(shape.kv_dtype) for _ in range(2))
        for row, ((q_len, length), need) in enumerate(zip(self.requests, needs, strict=True)):
            first = 0 if shape.window is None else max(0, length - q_len - shape.window)
            if not q_len:
                continue
            for place in range(first // shape.page_size, need):
                page = self.table[row, place] = next(free)
                begin, end = (
                    max(0, first - place * shape.page_size),
                    min(shape.page_size, length - place * shape.page_size),
                )
                for pool_ in (self.k, self.v):
                    size = (shape.kv_heads, end - begin, shape.dim)
                    pool_[page, :, begin:end] = shape.values(rng, *size, dtype=shape.kv_dtype)
        if shape.layout == "NHD":
            self.k, self.v = (np.ascontiguousarray(each.transpose(0, 2, 1, 3)) for each in (self.k, self.v))

    def operands(self, device: Device) -> Operands:
        names = ("q", "k", "v", "q_starts", "lengths", "table")
        return Operands(device, self.shape, {name: getattr(self, name) for name in names} | self.arrays)

    def check(self, got: tuple[NDArray[Any], NDArray[Any]]) -> None:
        shape = self.shape
        k, v = (np.nan_to_num(each.astype(np.float32), nan=0.0) for each in (self.k, self.v))
        table = np.where(self.table == BAD_PAGE, 0, self.table)
        how: dict[str, Any] = {"layout": shape.layout, "window": shape.window, **shape.how, **self.arrays}
        out, lse = ref.prefill_attention(self.q, k, v, self.q_starts, self.lengths, table, **how)
        close = TOLERANCE[np.dtype(shape.dtype)]
        largest = float(np.abs(out).max(initial=1e-3))
        assert_close(got[0].astype(np.float64), out, rtol=close, atol=close * largest / 2, why=WHY)
        assert_close(got[1].astype(np.float64), lse, rtol=1e-5, atol=1e-5, why="float32, exp2 and log2 approximated")
        padding = got[0][self.q_starts[-1] :]
        assert_equal_bits(padding, np.zeros_like(padding))


class Operands:
    """The same on a device, with poisoned outputs."""

    def __init__(self, device: Device, shape: Shape, arrays: dict[str, NDArray[Any]]) -> None:
        self.shape = shape
        self.of = {name: device.array(each) for name, each in arrays.items()}
        self.of["out"] = device.empty((*shape.rows, shape.dim), shape.dtype)
        self.of["lse"] = device.empty(shape.rows, np.float32)
        self.plan = shape.plan(device)
        self.poison()

    def poison(self) -> None:
        for name in ("out", "lse"):
            self.of[name].copy_from(np.full(self.of[name].shape, np.nan, np.float32).astype(self.of[name].dtype))
        self.plan.schedule.fill(BAD_PAGE)

    def submit(self, where: Any, *, after: Any = None, with_lse: bool = True) -> None:
        of, later = self.of, {} if after is None else {"after": after}
        node = plan_prefill(where, self.plan, of["q_starts"], of["lengths"], **later)
        optional: dict[str, Any] = {name: of[name] for name in ("sinks", "k_scale", "v_scale") if name in of}
        if with_lse:
            optional["lse"] = of["lse"]
        if node is not None:
            optional["after"] = node
        optional |= {"layout": self.shape.layout, **self.shape.how}
        prefill_attention(where, self.plan, of["q"], of["k"], of["v"], of["table"], of["out"], **optional)

    def results(self) -> tuple[NDArray[Any], NDArray[Any]]:
        return self.of["out"].numpy(), self.of["lse"].numpy()

    def __enter__(self) -> Operands:
        return self

    def __exit__(self, *_: object) -> None:
        self.plan.close()
        for each in self.of.values():
            each.close()


def run(stream: Stream, step: Step) -> tuple[NDArray[Any], NDArray[Any]]:
    with step.operands(stream.device) as operands:
        operands.submit(stream)
        stream.synchronize()
        return operands.results()


@contextmanager
def fails_on(victim: Device) -> Iterator[None]:
    """What traps on the CPU device, which can be used again afterwards."""
    with pytest.raises(DriverError, match="LAUNCH_FAILED"):
        yield
    victim.driver.cuDevicePrimaryCtxReset(victim.handle)
    ops.release(victim)


# ---- the reference -------------------------------------------------------------------------------------------------


def test_the_reference_takes_query_after_query_by_the_reference_of_decoding(rng: np.random.Generator) -> None:
    shape = Shape(20, 4, kv_heads=2, dim=64, page_size=8, window=9, how={"soft_cap": 5.0})
    step = Step(shape, [(5, 5), (0, 0), (7, 30)], rng, arrays={"sinks": rng.normal(size=4).astype(np.float32)})
    tables = [np.where(step.table == BAD_PAGE, 0, step.table)[[row]] for row in (0, 2)]
    k, v = (np.nan_to_num(each.astype(np.float32), nan=0.0) for each in (step.k, step.v))
    how: dict[str, Any] = {"window": 9, **shape.how, **step.arrays}
    table = np.where(step.table == BAD_PAGE, 0, step.table)
    out, lse = ref.prefill_attention(step.q, k, v, step.q_starts, step.lengths, table, **how)
    row = 0
    for (q_len, length), one in zip([(5, 5), (7, 30)], tables, strict=True):
        for position in range(length - q_len, length):
            want = decode.paged_attention(step.q[row][None, None], k, v, one, np.array([position + 1], np.int32), **how)
            np.testing.assert_allclose(out[row], want[0][0, 0], rtol=1e-12, atol=1e-14)
            np.testing.assert_allclose(lse[row], want[1][0, 0], rtol=1e-12, atol=1e-14)
            row += 1
    assert not out[row:].any()
    assert (lse[row:] == -np.inf).all()


# ---- the plan ------------------------------------------------------------------------------------------------------


def tiles_of(stream: Stream, shape: Shape, q_lens: list[int], lengths: list[int]) -> NDArray[np.int32]:
    """Of all that there is room for: request, first row, rows, position of the first query."""
    device = stream.device
    starts = np.array(list(itertools.accumulate(q_lens, initial=0)), np.int32)
    with (
        shape.plan(device) as plan,
        device.array(starts) as q_starts,
        device.array(np.array(lengths, np.int32)) as tokens,
    ):
        plan.schedule.fill(BAD_PAGE)
        plan_prefill(stream, plan, q_starts, tokens)
        return plan.schedule.numpy(stream).reshape(-1, 4)


@pytest.mark.parametrize("dim", [64, 256])
def test_every_row_is_in_one_tile_and_the_longest_come_first(
    device: Device, stream: Stream, rng: np.random.Generator, dim: int
) -> None:
    requests, width = 1100, 2**14
    q_lens = np.where(rng.random(requests) < 0.5, 0, rng.integers(1, 400, requests))
    lengths = q_lens + rng.integers(0, 16 * width - 400, requests)
    total = int(q_lens.sum())
    shape = Shape(total + 200, requests, dim=dim, table_width=width)
    tiles = tiles_of(stream, shape, q_lens.tolist(), lengths.tolist())
    used = tiles[tiles[:, 2] > 0]
    assert (tiles[len(used) :] == [-1, 0, 0, 0]).all(), "those without rows are the last"
    owner = np.full(shape.max_tokens, BAD_PAGE)
    position = np.full(shape.max_tokens, BAD_PAGE)
    for request, row, rows, first in used.tolist():
        assert 1 <= rows <= (64 if dim == 256 else 128)
        assert (owner[row : row + rows] == BAD_PAGE).all()
        owner[row : row + rows], position[row : row + rows] = request, first + np.arange(rows)
    assert_equal_bits(owner, np.append(np.repeat(np.arange(requests), q_lens), np.full(200, -1)))
    wanted = [np.arange(length - q_len, length) for q_len, length in zip(q_lens, lengths, strict=True)]
    assert_equal_bits(position[:total], np.concatenate(wanted))
    tokens = np.where(used[:, 0] < 0, 0, used[:, 3] + used[:, 2])
    of_bucket = 16 * width // 1024 + 1
    assert (np.diff(tokens // of_bucket) <= 0).all()


@pytest.mark.parametrize(("tokens", "requests"), [(1, 1), (127, 4), (128, 1), (129, 3), (640, 7)])
def test_there_is_room_for_the_tiles_of_the_worst_split(
    device: Device, stream: Stream, tokens: int, requests: int
) -> None:
    shape = Shape(tokens, requests)
    q_lens = [1] * min(requests, tokens - 1) + [0] * (requests - min(requests, tokens - 1))
    if tokens > 128 * requests:
        q_lens = [129] + [1] * (requests - 1)
    tiles = tiles_of(stream, shape, q_lens, [512] * requests)
    assert tiles[:, 2].sum() == tokens
    assert (tiles[:, 2] > 0).sum() <= len(tiles) <= -(-tokens // 128) + requests + 1


WRONG_STEPS: dict[str, tuple[list[int], list[int], str]] = {
    "decreasing": ([0, 9, 4, 9], [9, 9, 9], r"q_starts\[1\] is 9, behind it is 4"),
    "too many rows": ([0, 9, 20, 41], [9, 11, 21], r"q_starts\[3\] is 41"),
    "not from 0": ([1, 9, 20, 30], [9, 11, 21], r"q_starts\[0\] is 1"),
    "too few tokens": ([0, 9, 20, 30], [9, 10, 21], r"lengths\[1\] is 10: the request has 11 queries"),
    "too many tokens": ([0, 9, 20, 30], [9, 11, 513], r"lengths\[2\] is 513: the block table has room for 512"),
}


@pytest.mark.parametrize(("starts", "lengths", "message"), WRONG_STEPS.values(), ids=WRONG_STEPS)
def test_the_cpu_device_reports_a_step_that_cannot_be(
    capfd: pytest.CaptureFixture[str], starts: list[int], lengths: list[int], message: str
) -> None:
    victim = Device("cpu:5")
    plan = Shape(40, 3).plan(victim)
    arrays = [victim.array(np.array(each, np.int32)) for each in (starts, lengths)]
    with fails_on(victim), victim.stream() as stream:
        plan_prefill(stream, plan, *arrays)
    plan.close()
    for each in arrays:
        each.close()
    assert re.search(message, capfd.readouterr().out)


# ---- the op's checks -----------------------------------------------------------------------------------------------


WRONG_PLANS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "float32": ({"dtype": np.float32}, TypeError, "dtype: wanted float16 or bfloat16, got float32"),
    "two halves": ({"kv_dtype": f16}, TypeError, "kv_dtype: wanted bfloat16 or float8_e4m3fn, got float16"),
    "dim": ({"dim": 96}, ValueError, "dim: wanted one of 64, 128, 256, got 96"),
    "page": ({"page_size": 24}, ValueError, "page_size: wanted one of 8, 16, 32, 64, 128, got 24"),
    "no tokens": ({"max_tokens": 0}, ValueError, "max_tokens: wanted at least 1, got 0"),
    "no requests": ({"max_requests": 0}, ValueError, "max_requests: wanted at least 1, got 0"),
    "heads": ({"q_heads": 6, "kv_heads": 4}, ValueError, "q_heads: wanted a multiple of 4 KV heads, got 6"),
    "window": ({"window": -1}, ValueError, "window: wanted None or at least 0, got -1"),
    "a long table": ({"table_width": 2**26}, ValueError, r"table_width: 67108864 pages are 1073741824 tokens"),
    "many rows": ({"max_tokens": 2**23}, ValueError, "up to 65540 tiles: more than 65535"),
}


@pytest.mark.parametrize(("changes", "error", "message"), WRONG_PLANS.values(), ids=WRONG_PLANS)
def test_a_plan_that_cannot_be_is_refused(
    device: Device, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    sizes: dict[str, Any] = {"max_tokens": 64, "max_requests": 4, "q_heads": 4, "kv_heads": 2, "dim": 64}
    with pytest.raises(error, match=f"PrefillPlan: .*{message}"):
        PrefillPlan(device, **(sizes | {"page_size": 16, "table_width": 4} | changes))


@pytest.fixture
def operands(device: Device, rng: np.random.Generator) -> Iterator[Operands]:
    with Step(Shape(40, 3, dim=64), [(9, 9)], rng).operands(device) as operands:
        yield operands


def test_results_overlap_nothing_but_the_queries(operands: Operands, stream: Stream) -> None:
    of, q = operands.of, operands.of["q"]
    given = (of["k"], of["v"], of["table"])
    with stream.device.zeros((80, *q.shape[1:]), q.dtype) as both:
        with pytest.raises(ValueError, match=r"^prefill_attention: out .* overlaps q"):
            prefill_attention(stream, operands.plan, both[:40], *given, both[8:48])
        lse = both.view(np.float32).reshape(-1)[: of["lse"].size].reshape(of["lse"].shape)
        with pytest.raises(ValueError, match=r"^prefill_attention: lse .* overlaps out"):
            prefill_attention(stream, operands.plan, q, *given, both[:40], lse=lse)
    with (
        decode_ops.DecodePlan(
            stream.device, requests=2, q_heads=4, kv_heads=2, dim=64, page_size=16, table_width=4
        ) as other,
        pytest.raises(TypeError, match=r"^prefill_attention: plan: wanted a PrefillPlan, got DecodePlan"),
    ):
        prefill_attention(stream, other, q, *given, of["out"])  # type: ignore[arg-type]


WRONG_OPERANDS: dict[str, tuple[str, Any, str]] = {
    "q": ("q", lambda x: x[:39], r"q: wanted shape \(40, 4, 64\), got \(39, 4, 64\)"),
    "out": ("out", lambda x: x[1:], r"out: wanted shape \(40, 4, 64\)"),
    "k": ("k", lambda x: x[:, :1], r"k: wanted shape \(pages, 2, 16, 64\)"),
    "v": ("v", lambda x: x[1:], "v has shape"),
    "block_table": ("table", lambda x: x[:, :2], "block_table: wanted a device array of int32, contiguous"),
    "lse": ("lse", lambda x: x[1:], r"lse: wanted shape \(40, 4\)"),
    "q_starts": ("q_starts", lambda x: x[1:], r"q_starts: wanted shape \(4,\), got \(3,\)"),
    "lengths": ("lengths", lambda x: x[1:], r"lengths: wanted shape \(3,\), got \(2,\)"),
}


@pytest.mark.parametrize(("name", "change", "message"), WRONG_OPERANDS.values(), ids=WRONG_OPERANDS)
def test_an_operand_that_does_not_fit_is_named(
    stream: Stream, operands: Operands, name: str, change: Any, message: str
) -> None:
    whole = operands.of[name]
    operands.of[name] = change(whole)
    with pytest.raises(ValueError, match=message):
        operands.submit(stream)
    operands.of[name] = whole


def test_numbers_and_pairs_that_do_not_fit_are_named(device: Device, stream: Stream, operands: Operands) -> None:
    of = operands.of
    arrays = (operands.plan, of["q"], of["k"], of["v"], of["table"], of["out"])
    with pytest.raises(ValueError, match="layout: wanted HND or NHD, got 'DHN'"):
        prefill_attention(stream, *arrays, layout="DHN")
    for scale in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="scale: wanted None or a positive number"):
            prefill_attention(stream, *arrays, scale=scale)
        with pytest.raises(ValueError, match="soft_cap: wanted None or a positive number"):
            prefill_attention(stream, *arrays, soft_cap=scale)
    with device.zeros(2, np.float32) as scales:
        with pytest.raises(ValueError, match="v_scale is missing"):
            prefill_attention(stream, *arrays, k_scale=scales)
        with pytest.raises(ValueError, match="k_scale is missing"):
            prefill_attention(stream, *arrays, v_scale=scales)
        with pytest.raises(ValueError, match=r"sinks: wanted shape \(4,\), got \(2,\)"):
            prefill_attention(stream, *arrays, sinks=scales)
    with pytest.raises(TypeError, match="q: wanted a device array of bfloat16, got float32"):
        prefill_attention(stream, operands.plan, of["lse"], *arrays[2:])


# ---- the kernels ---------------------------------------------------------------------------------------------------

EDGES: Requests = [(length, length) for length in (1, 15, 16, 17, 63, 64, 65, 127, 128, 129)]
MIXED: Requests = [(1, 200), (0, 0), (70, 70), (1, 1), (0, 33), (130, 300), (1, 64), (1, 65), (33, 97), (64, 128)]


def test_prompts_of_lengths_around_tiles_and_pages(stream: Stream, rng: np.random.Generator) -> None:
    step = Step(Shape(700, 12), EDGES, rng)
    step.check(run(stream, step))


def test_chunks_and_decoding_requests_mixed(stream: Stream, rng: np.random.Generator) -> None:
    for group, kv_heads in ((1, 3), (4, 1), (8, 2)):
        step = Step(Shape(310, 11, group=group, kv_heads=kv_heads), MIXED, rng)
        step.check(run(stream, step))


def test_window(stream: Stream, rng: np.random.Generator) -> None:
    for window in (0, 1, 15, 16, 64, 100, 1000):
        step = Step(Shape(310, 10, kv_heads=1, window=window), MIXED, rng)
        print("window", window)
        step.check(run(stream, step))


def test_tokens_first_in_memory(stream: Stream, rng: np.random.Generator) -> None:
    step = Step(Shape(310, 10, layout="NHD"), MIXED, rng)
    step.check(run(stream, step))


def test_queries_may_be_parts_of_the_rows_of_a_projection(stream: Stream, rng: np.random.Generator) -> None:
    step = Step(Shape(310, 10, layout="NHD"), MIXED, rng)
    heads = step.q.shape[1]
    projection = np.concatenate([np.full_like(step.q, np.nan), step.q], axis=1)
    with step.operands(stream.device) as operands, stream.device.array(projection) as qkv:
        operands.of["q"].close()
        operands.of["q"] = qkv[:, heads:]
        operands.submit(stream)
        stream.synchronize()
        step.check(operands.results())


def test_a_step_of_padding_alone(stream: Stream, rng: np.random.Generator) -> None:
    requests: Requests
    for requests in ([], [(0, 0), (0, 100)]):
        step = Step(Shape(130, 2), requests, rng)
        step.check(run(stream, step))


FEATURES: dict[str, tuple[dict[str, Any], bool, bool]] = {
    # the shape; sinks; scales
    "everything, pages of 8": (
        {
            "dtype": f16,
            "dim": 64,
            "page_size": 8,
            "table_width": 40,
            "window": 90,
            "how": {"soft_cap": 3.0, "scale": 0.3},
        },
        *(True, True),
    ),
    "e4m3": ({"kv_dtype": e4m3}, False, True),
    "dim 256, pages of 64": ({"dim": 256, "page_size": 64, "kv_heads": 1}, False, False),
    "e4m3, dim 64, pages of 128": ({"dim": 64, "kv_dtype": e4m3, "page_size": 128, "dtype": f16}, False, True),
}

ON_A_GPU = ("dim 256, pages of 64", "e4m3")


@pytest.mark.parametrize(("changes", "with_sinks", "scaled"), FEATURES.values(), ids=FEATURES)
def test_features(
    stream: Stream, rng: np.random.Generator, changes: dict[str, Any], with_sinks: bool, scaled: bool
) -> None:
    if stream.device.driver.kind == "cpu" and changes in [FEATURES[name][0] for name in ON_A_GPU]:
        pytest.skip("an instance takes seconds to compile for the CPU device: a few stand for all there")
    step = Step(Shape(310, 10, **changes), MIXED, rng)
    if with_sinks:
        step.arrays["sinks"] = rng.normal(size=step.shape.q_heads).astype(np.float32)
    if scaled:
        for name in ("k_scale", "v_scale"):
            step.arrays[name] = rng.uniform(0.5, 2, step.shape.kv_heads).astype(np.float32)
    step.check(run(stream, step))


def test_one_graph_takes_any_split_of_its_rows(
    device: Device, stream: Stream, graph: Graph, rng: np.random.Generator
) -> None:
    shape = Shape(256, 3)
    splits: list[Requests] = [
        [(128, 128), (128, 128)],
        [(64, 64), (192, 192)],
        [(1, 300), (0, 0), (100, 101)],
        [],
        [(0, 0), (256, 512)],
        [(128, 128), (128, 128)],
    ]
    steps = [Step(shape, split, rng, pages=40) for split in splits]
    with steps[0].operands(device) as operands:
        operands.submit(graph)
        with graph.instantiate() as exe:
            for step in steps:
                for name in ("q", "k", "v", "q_starts", "lengths", "table"):
                    operands.of[name].copy_from(getattr(step, name))
                operands.poison()
                exe.launch(stream)
                stream.synchronize()
                step.check(operands.results())


@pytest.mark.parametrize("window", [None, 30])
def test_a_prompt_has_the_same_bits_in_chunks(stream: Stream, rng: np.random.Generator, window: int | None) -> None:
    step = Step(Shape(400, 3, window=window), [(200, 200), (77, 77), (123, 200)], rng)
    step.table[1:] = step.table[0]
    step.q[200:] = step.q[:200]
    out, lse = run(stream, step)
    assert_equal_bits(out[200:], out[:200])
    assert_equal_bits(lse[200:], lse[:200])


def test_a_large_logit_after_many_small_ones_and_before(stream: Stream, rng: np.random.Generator) -> None:
    """The maximum a sum is taken by grows in small steps, in large ones, and not at all."""
    step = Step(Shape(64, 1), [(64, 512)], rng)
    for token, factor in ((20, 1), (100, 2), (200, 4), (300, 60), (301, 70), (500, 30)):
        page, place = step.table[0, token // 16], token % 16
        step.k[page, :, place] = (step.q[::2, :2].astype(np.float32).mean(axis=0) * factor).astype(bf16)
    step.check(run(stream, step))


def test_a_page_that_no_pool_has_is_reported(capfd: pytest.CaptureFixture[str], rng: np.random.Generator) -> None:
    victim = Device("cpu:5")
    step = Step(Shape(40, 1), [(9, 40)], rng)
    step.table[0, 1] = step.pages
    with step.operands(victim) as operands, fails_on(victim), victim.stream() as stream:
        operands.submit(stream)
    assert f"block_table[0][1] is {step.pages}: the pool has {step.pages} pages" in capfd.readouterr().out
