"""Attention to chosen rows: the reference against brute force, the checks of the op, and the kernel against the
reference."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from compare import assert_close, assert_equal_bits
from numpy.typing import NDArray
from standins import Foreign

from drvkit import ops
from drvkit.device import Device, Stream
from drvkit.driver import DriverError
from drvkit.graph import Graph
from drvkit.ops.sparse_attention import sparse_attention
from drvkit.ops.step_tokens import StepTokens, plan_tokens
from drvkit.records import KEY_FP8, KV_BF16, KV_FP8, Format, Pages
from drvkit.ref import sparse_attention as ref
from drvkit.ref.step_tokens import step_tokens
from drvkit.rope import Yarn, cos_sin_table

bf16 = ml_dtypes.bfloat16
COS_SIN = cos_sin_table(1200, theta=160000, yarn=Yarn())
Requests = list[tuple[int, int]]  # rows in the step, tokens with them


@dataclass
class Step:
    """The operands of a step, on the host. What nobody may read is NaN, or a page that there is not."""

    rng: np.random.Generator
    requests: Requests
    form: Format = KV_FP8
    heads: int = 64
    padding: int = 0
    window_size: int = 128
    window_pages: int = 8
    ratio: int | None = 4
    k: int | None = 96  # None: all entries
    spread: float = 1.0  # of queries and rows
    page_size: int | None = None  # of entries; None: those of 256 tokens
    sinks: Any = None
    arrays: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng, count = self.rng, len(self.requests)
        self.q_starts = np.append(0, np.cumsum([rows for rows, _ in self.requests])).astype(np.int32)
        self.lengths = np.array([length for _, length in self.requests], np.int32)
        self.rows = int(self.q_starts[-1]) + self.padding
        self.tokens, visible, _ = step_tokens(self.q_starts, self.lengths, self.rows)
        self.q = (self.spread * rng.normal(size=(self.rows, self.heads, 512))).astype(bf16)
        self.q[self.q_starts[-1] :] = np.nan
        self.window = self._pages(64, self.window_pages, [(max(0, n - m - 127), n) for m, n in self.requests])
        self.entries, self.visible, self.indices = None, None, None
        if self.ratio is not None:
            size = self.page_size or 256 // self.ratio
            ends = [length // self.ratio for length in self.lengths.tolist()]
            self.entries = self._pages(size, max(1, -(-max(ends) // size)), [(0, end) for end in ends])
            self.visible = visible[self.ratio]
            if self.k is not None:
                self.indices = np.full((self.rows, self.k), -7, np.int32)
                for t, seen in enumerate(self.visible.tolist()):
                    chosen = rng.permutation(seen)[: self.k]
                    self.indices[t, : len(chosen)] = np.where(rng.random(len(chosen)) < 0.1, -1, chosen)
                    self.indices[t, seen:] = 2**30 - 1
        self.cos_sin = COS_SIN
        assert count

    def _pages(self, size: int, width: int, filled: list[tuple[int, int]]) -> Pages:
        """Random rows from the first entry to before the last one of each request."""
        rng, form = self.rng, self.form
        table = rng.permutation(len(filled) * width + 3)[: len(filled) * width].astype(np.int32)
        table = table.reshape(len(filled), width)
        pool = np.full((table.size + 3, form.page_bytes(size)), 0xFF, np.uint8)  # NaN in all formats
        for request, (first, end) in enumerate(filled):
            entries = np.arange(first, end)[-width * size :]
            slots = table[request, entries // size % width].astype(np.int64) * size + entries % size
            rows = self.spread * rng.normal(size=(len(entries), form.dim))
            form.put(pool, slots, size, *form.encode(rows.astype(np.float32)))
        return Pages(form, pool, table, size)

    def want(self) -> tuple[NDArray[Any], NDArray[Any]]:
        how: dict[str, Any] = {"window_size": self.window_size, "sinks": self.sinks, "cos_sin": self.cos_sin}
        if self.entries is not None:
            how |= {"entries": self.entries, "visible": self.visible, "indices": self.indices}
        q = np.nan_to_num(self.q.astype(np.float32), nan=0.0)
        return ref.sparse_attention(q, self.tokens, self.window, **how)


class Operands:
    """The same on a device, with poisoned outputs."""

    def __init__(self, stack: ExitStack, device: Device, step: Step) -> None:
        self.step, self.stack, self.device = step, stack, device
        sizes = {"max_tokens": step.rows, "max_requests": len(step.requests), "max_length": step.lengths.max()}
        self.tokens = stack.enter_context(StepTokens(device, **sizes))
        self.q_starts, self.lengths, self.q = map(self.put, (step.q_starts, step.lengths, step.q))
        self.window = self.pages(step.window)
        self.out = self.put(np.full(step.q.shape, np.nan, bf16))
        self.lse = self.put(np.full(step.q.shape[:2], np.nan, np.float32))
        self.how: dict[str, Any] = {"window_size": step.window_size, "lse": self.lse}
        self.how["cos_sin"] = None if step.cos_sin is None else self.put(step.cos_sin)
        if step.sinks is not None:
            self.how["sinks"] = self.put(step.sinks)
        if step.entries is not None:
            self.how |= {"entries": self.pages(step.entries), "ratio": step.ratio}
            if step.indices is not None:
                self.how["indices"] = self.put(step.indices)

    def put(self, array: Any) -> Any:
        return self.stack.enter_context(self.device.array(array))

    def pages(self, pages: Pages) -> Pages:
        return Pages(pages.format, self.put(pages.pool), self.put(pages.block_table), pages.page_size)

    def submit(self, where: Any) -> Any:
        listed = plan_tokens(where, self.tokens, self.q_starts, self.lengths)
        how = self.how | ({} if listed is None else {"after": listed})
        return sparse_attention(where, self.tokens, self.q, self.window, self.out, **how)

    def results(self, stream: Stream) -> tuple[NDArray[Any], NDArray[Any]]:
        return self.out.numpy(stream), self.lse.numpy(stream)


def run(stream: Stream, step: Step) -> tuple[NDArray[Any], NDArray[Any]]:
    with ExitStack() as stack:
        operands = Operands(stack, stream.device, step)
        operands.submit(stream)
        return operands.results(stream)


def check(step: Step, got: tuple[NDArray[Any], NDArray[Any]]) -> None:
    out, lse = step.want()
    real = step.tokens[:, 0] >= 0
    # FlashMLA's bounds. Where rows are bfloat16 so are probabilities, and few rows may cancel each other: errors go by
    # the size of rows, which are tenths in FlashMLA's tests.
    atol, why = 1e-3, "11 bits of probabilities, one rounding"
    if step.form == KV_BF16:
        atol, why = max(atol, 8e-3 * step.spread), "2^-9 of p * 4"
    assert_close(got[0].astype(np.float64)[real], out[real], rtol=2.01 / 128, atol=atol, why=why)
    assert_close(got[1].astype(np.float64), lse, rtol=1e-5, atol=2e-5, why="float32, exp2 and log2 approximated")
    a, b = got[0].astype(np.float64), out
    both = (a * a).sum() + (b * b).sum()
    assert both - 2 * (a * b).sum() <= 5e-6 * both
    assert_equal_bits(got[0][~real], np.zeros_like(got[0][~real]))


# ---- the reference -------------------------------------------------------------------------------------------------


def test_the_reference_is_a_softmax_with_one_logit_more(rng: np.random.Generator) -> None:
    step = Step(rng, [(2, 150), (1, 3)], k=20, sinks=rng.normal(size=64).astype(np.float32), heads=64)
    step.cos_sin = None  # type: ignore[assignment]
    out, lse = step.want()
    assert step.indices is not None
    assert step.entries is not None
    for t, (request, position, _, _) in enumerate(step.tokens.tolist()):
        seen = (position + 1) // 4
        entries = [e for e in step.indices[t, : min(20, seen)].tolist() if e >= 0]
        rows = [ref.rows_in_pages(step.window, request, np.arange(max(0, position - 127), position + 1))]
        rows.append(ref.rows_in_pages(step.entries, request, np.array(entries, int)))
        r = np.concatenate(rows).astype(np.float64)
        for head in (0, 63):
            logits = np.append(512**-0.5 * r @ step.q[t, head].astype(np.float64), step.sinks[head])
            p = np.exp(logits) / np.exp(logits).sum()
            np.testing.assert_allclose(out[t, head], p[:-1] @ r, rtol=1e-9, atol=1e-12)
            np.testing.assert_allclose(lse[t, head], np.log(np.exp(logits[:-1]).sum()), rtol=1e-9)


def test_the_reference_turns_back_by_the_position(rng: np.random.Generator) -> None:
    step = Step(rng, [(1, 70)], ratio=None)
    turned, _ = step.want()
    step.cos_sin = None  # type: ignore[assignment]
    plain, _ = step.want()
    pairs = [x[..., -64::2] + 1j * x[..., -63::2] for x in (turned, plain)]
    angle = COS_SIN[69, :32] - 1j * COS_SIN[69, 32:]
    np.testing.assert_allclose(pairs[0], pairs[1] * angle, rtol=1e-6, atol=1e-9)
    np.testing.assert_array_equal(turned[..., :448], plain[..., :448])


# ---- the kernel ----------------------------------------------------------------------------------------------------

MIXED: Requests = [(1, 1), (2, 200), (0, 0), (5, 5), (3, 700), (1, 63), (1, 64), (1, 65), (1, 512)]


def test_chosen_entries_and_a_window_of_ragged_requests(stream: Stream, rng: np.random.Generator) -> None:
    sinks = rng.normal(size=64).astype(np.float32)
    sinks[:3] = -np.inf, np.inf, 30
    step = Step(rng, MIXED, padding=2, sinks=sinks)
    got = run(stream, step)
    check(step, got)
    assert not got[0][:, 1].any(), "a sink of inf takes all"


@pytest.mark.parametrize("spread", [1.0, 0.1])
def test_all_entries_in_bfloat16(stream: Stream, rng: np.random.Generator, spread: float) -> None:
    requests = [(1, 127), (2, 700), (3, 130), (1, 1)]
    step = Step(rng, requests, form=KV_BF16, ratio=128, k=None, heads=40, spread=spread)
    check(step, run(stream, step))


@pytest.mark.parametrize("form", [KV_FP8, KV_BF16], ids=["fp8", "bf16"])
@pytest.mark.parametrize("source", ["none", "all", "listed"])
def test_every_source_on_a_gpu(
    device: Device, stream: Stream, rng: np.random.Generator, form: Any, source: str
) -> None:
    if device.driver.kind == "cpu":
        pytest.skip("each is compiled for longer than all others run")
    how: dict[str, Any] = {"none": {"ratio": None}, "all": {"k": None}, "listed": {}}[source]
    step = Step(rng, MIXED, form=form, heads=128, padding=1, sinks=rng.normal(size=128).astype(np.float32), **how)
    check(step, run(stream, step))


def test_a_window_may_be_a_ring_and_short(stream: Stream, rng: np.random.Generator) -> None:
    for size, pages in ((128, 2), (1, 1), (64, 1), (65, 2)):
        step = Step(rng, [(1, 1000), (1, 129), (1, 2)], window_size=size, window_pages=pages, k=3)
        check(step, run(stream, step))


def test_the_entries_of_a_request_may_be_contiguous(stream: Stream, rng: np.random.Generator) -> None:
    step = Step(rng, MIXED, page_size=1024)
    check(step, run(stream, step))


def test_one_token_is_shared_by_a_cluster(stream: Stream, rng: np.random.Generator) -> None:
    for length in (1, 20, 800):  # of which most blocks, some, and none have no row
        step = Step(rng, [(1, length)], k=300, sinks=rng.normal(size=64).astype(np.float32))
        check(step, run(stream, step))


def test_blocks_go_from_token_to_token(
    stream: Stream, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Step(rng, MIXED, padding=3)
    found = []
    for multiprocessors in (step.rows, 2):
        monkeypatch.setattr(Device, "multiprocessors", multiprocessors)
        found.append(run(stream, step))
    check(step, found[1])
    for got, want in zip(*found, strict=True):
        assert_equal_bits(got, want)


@pytest.mark.parametrize("form", [KV_FP8, KV_BF16], ids=["fp8", "bf16"])
def test_a_block_goes_through_tokens_of_any_number_of_tiles(
    stream: Stream, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, form: Format
) -> None:
    monkeypatch.setattr(Device, "multiprocessors", 1)
    lengths = (40, 700, 40, 200, 100, 1000, 40, 400)  # 1, 5, 1, 3, 2, 6, 1 and 4 tiles: pairs begin anywhere
    step = Step(rng, [(1, length) for length in lengths], form=form, k=300, padding=1, spread=0.1)
    check(step, run(stream, step))


@pytest.mark.drvkit_check
@pytest.mark.parametrize("form", [KV_FP8, KV_BF16], ids=["fp8", "bf16"])
def test_no_two_warps_race(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, form: Format) -> None:
    """Neither where a block goes from token to token (of 1, 5, 1, 3, 2 and 1 tiles), nor where a cluster shares one."""
    device = Device("cpu")
    monkeypatch.setattr(Device, "multiprocessors", 1)
    with device.stream() as stream:
        step = Step(rng, [(1, length) for length in (40, 700, 40, 200, 100, 40)], form=form, k=300, spread=0.1)
        check(step, run(stream, step))
        monkeypatch.setattr(Device, "multiprocessors", 132)
        step = Step(rng, [(1, 300)], form=form, spread=0.1)
        check(step, run(stream, step))


def test_the_bits_of_a_token_do_not_depend_on_others(stream: Stream, rng: np.random.Generator) -> None:
    step = Step(rng, [(1, 300), (4, 90), (1, 700)], padding=200)
    together = run(stream, step)
    step.lengths[1], step.lengths[2] = 17, 500  # fewer of their rows
    step.tokens, visible, _ = step_tokens(step.q_starts, step.lengths, step.rows)
    step.visible = visible[4]
    assert step.indices is not None
    step.indices[step.indices >= step.visible[:, None]] = -1
    apart = run(stream, step)
    assert_equal_bits(apart[0][0], together[0][0])
    assert (apart[0][5] != together[0][5]).any()


def test_a_graph_for_many_tokens_serves_fewer(
    device: Device, stream: Stream, graph: Graph, rng: np.random.Generator
) -> None:
    step = Step(rng, [(3, 500), (2, 90)], padding=2)
    with ExitStack() as stack:
        operands = Operands(stack, device, step)
        operands.submit(graph)
        with graph.instantiate() as exe:
            for rows in ([3, 2], [1, 0], [0, 0], [0, 2]):
                step.q_starts = np.append(0, np.cumsum(rows)).astype(np.int32)
                step.tokens, visible, _ = step_tokens(step.q_starts, step.lengths, step.rows)
                step.visible = visible[4]
                operands.q_starts.copy_from(step.q_starts)
                assert step.indices is not None
                for t, seen in enumerate(step.visible.tolist()):
                    chosen = rng.permutation(seen)[:96]
                    step.indices[t, : len(chosen)] = chosen
                operands.how["indices"].copy_from(step.indices)
                for poisoned in (operands.out, operands.lse):
                    poisoned.copy_from(np.full(poisoned.shape, np.nan, np.float32).astype(poisoned.dtype))
                exe.launch(stream)
                check(step, operands.results(stream))
        del exe


def test_sums_follow_a_maximum_that_grows(stream: Stream, rng: np.random.Generator) -> None:
    """The other tests' logits stay within the kernel's slack: their first maximum serves to the end."""
    for requests in (MIXED, [(1, 800)]):  # by blocks alone, by a cluster
        step = Step(rng, requests, k=300, sinks=rng.normal(size=64).astype(np.float32))
        step.q = (step.q.astype(np.float32) * 16).astype(bf16)
        check(step, run(stream, step))


@pytest.mark.parametrize("multiprocessors", [132, 1])
def test_results_may_be_where_the_queries_are(
    stream: Stream, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, multiprocessors: int
) -> None:
    """Of tokens that a cluster shares, and where a block copies the next queries while results go."""
    monkeypatch.setattr(Device, "multiprocessors", multiprocessors)
    step = Step(rng, [(1, 300), (1, 20)])
    want = run(stream, step)
    with ExitStack() as stack:
        operands = Operands(stack, stream.device, step)
        operands.out = operands.q
        operands.submit(stream)
        assert_equal_bits(operands.results(stream)[0], want[0])


@pytest.mark.parametrize(
    ("pages", "entry", "told"),
    [
        (4, 50, "row 0 attends to entry 50, and sees 50"),
        (2, 49, "row 0 attends to positions from 74 on, and its request has 203 tokens: the window has room for 128"),
    ],
)
def test_the_cpu_device_reports_rows_that_are_not_there(
    capfd: pytest.CaptureFixture[str], rng: np.random.Generator, pages: int, entry: int, told: str
) -> None:
    step = Step(rng, [(2, 203)], k=8, window_pages=pages)  # at positions 201 and 202
    assert step.indices is not None
    step.indices[0, 7] = entry
    victim = Device("cpu:5")
    with victim.stream() as stream, ExitStack() as stack:
        operands = Operands(stack, victim, step)
        operands.submit(stream)
        with pytest.raises(DriverError, match="LAUNCH_FAILED"):
            stream.synchronize()
        victim.driver.cuDevicePrimaryCtxReset(victim.handle)
    ops.release(victim)
    assert told in capfd.readouterr().out


# ---- the op's checks -----------------------------------------------------------------------------------------------


def pages(form: Format, size: Any, at: int, pages: int = 9, width: int = 4) -> Pages:
    pool = Foreign((pages, form.page_bytes(size)), np.uint8, at << 24)
    return Pages(form, pool, Foreign((3, width), np.int32, (at << 24) + (1 << 23)), size)


def fit(rows: StepTokens, **changes: Any) -> dict[str, Any]:
    operands: dict[str, Any] = {
        "tokens": rows,
        "q": Foreign((8, 64, 512), np.uint16, 1 << 24),
        "window": pages(KV_FP8, 64, 2),
        "out": Foreign((8, 64, 512), np.uint16, 3 << 24),
        "entries": pages(KV_FP8, 64, 4),
        "ratio": 4,
        "indices": Foreign((8, 32), np.int32, 5 << 24),
        "sinks": Foreign((64,), np.float32, 6 << 24),
        "cos_sin": Foreign((99, 64), np.float32, 7 << 24),
        "lse": Foreign((8, 64), np.float32, 8 << 24),
    }
    return operands | changes


@pytest.mark.parametrize(
    ("changes", "function", "blocks"),
    [
        ({}, "0,true", 1),
        ({"indices": None}, "0,false", 1),
        ({"entries": None, "indices": None, "ratio": None, "sinks": None, "cos_sin": None, "lse": None}, "0,false", 1),
        (
            {"window": pages(KV_BF16, np.int64(64), 2), "entries": pages(KV_BF16, 2, 4), "ratio": 128, "indices": None},
            "1,false",
            1,
        ),
        (
            {
                "q": Foreign((8, 65, 512), np.uint16, 1 << 24),
                "out": Foreign((8, 65, 512), np.uint16, 3 << 24),
                "sinks": Foreign((65,), np.float32, 6 << 24),
                "lse": Foreign((8, 65), np.float32, 8 << 24),
            },
            "0,true",
            2,
        ),
    ],
)
def test_the_kernel_goes_by_the_operands(
    device: Device, recorder: Any, changes: dict[str, Any], function: str, blocks: int
) -> None:
    with StepTokens(device, max_tokens=8, max_requests=3, max_length=1024) as tokens:
        assert sparse_attention(recorder, **fit(tokens, **changes), name="attend") == "kernel node"  # type: ignore[comparison-overlap]
        ((kernel, how),) = recorder.calls
        assert kernel == f"sparse_attention: sparse_attention<{function}>"
        splits, heads, count = how["grid"]
        assert (heads, count, how["cluster"]) == (blocks, 8, (splits, 1, 1))
        assert splits * heads * count <= device.multiprocessors
        assert how["name"] == "attend"


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "tokens": ({"tokens": 3}, TypeError, "tokens: wanted a StepTokens, got int"),
    "float32": ({"q": Foreign((8, 64, 512), np.float32)}, TypeError, "q: wanted a device array of bfloat16"),
    "dim": ({"q": Foreign((8, 64, 256), np.uint16)}, ValueError, r"q: wanted shape \(8, 64, 512\)"),
    "rows": ({"q": Foreign((7, 64, 512), np.uint16)}, ValueError, r"q: wanted shape \(8, 64, 512\), got \(7"),
    "out": ({"out": Foreign((8, 32, 512), np.uint16, 3 << 24)}, ValueError, r"out: wanted shape \(8, 64, 512\)"),
    "keys": ({"window": pages(KEY_FP8, 64, 2)}, ValueError, "window: wanted rows of fp8 of 512 or bf16 of 512"),
    "mixed": ({"entries": pages(KV_BF16, 64, 4)}, ValueError, "entries: wanted rows of fp8 of 512, got bf16"),
    "page": ({"window": pages(KV_FP8, 48, 2)}, ValueError, "window: page_size: wanted a power of two up to 1048576"),
    "window 0": ({"window_size": 0}, ValueError, "window_size: wanted 1 to 256, .* got 0"),
    "a long window": ({"window_size": 257}, ValueError, "window_size: wanted 1 to 256, .* got 257"),
    "half": ({"window_size": 1.5}, TypeError, "window_size: wanted an integer, got 1.5"),
    "ratio": ({"ratio": 8}, ValueError, "ratio: wanted one of 4, 128, got 8"),
    "no ratio": ({"ratio": None}, ValueError, "ratio: wanted one of 4, 128, got None"),
    "few entries": (
        {"entries": pages(KV_FP8, 64, 4, width=3)},
        ValueError,
        "entries: 1024 tokens have 256 entries, the block table room for 192",
    ),
    "no entries": ({"entries": None, "ratio": None}, ValueError, "indices is given without entries"),
    "indices": ({"indices": Foreign((7, 32), np.int32, 5 << 24)}, ValueError, r"indices: wanted shape \(8, k\)"),
    "sinks": ({"sinks": Foreign((63,), np.float32, 6 << 24)}, ValueError, r"sinks: wanted shape \(64,\)"),
    "cos_sin": (
        {"cos_sin": Foreign((99, 32), np.float32, 7 << 24)},
        ValueError,
        "cos_sin: wanted shape .max_position, 64",
    ),
    "lse": ({"lse": Foreign((8, 63), np.float32, 8 << 24)}, ValueError, r"lse: wanted shape \(8, 64\)"),
    "scale": ({"scale": -1.0}, ValueError, "scale: wanted None or a positive number, got -1.0"),
    "no scale": ({"scale": "1"}, TypeError, "scale: wanted None or a number, got '1'"),
    "out in q": ({"out": Foreign((8, 64, 512), np.uint16, (1 << 24) + 1024)}, ValueError, "out at .* overlaps q"),
    "out in lse": ({"lse": Foreign((8, 64), np.float32, 3 << 24)}, ValueError, "lse at .* overlaps out"),
    "out in the pool": (
        {"out": Foreign((8, 64, 512), np.uint16, 2 << 24)},
        ValueError,
        "out at .* overlaps window.pool",
    ),
}


@pytest.mark.parametrize(("changes", "error", "message"), WRONG.values(), ids=WRONG)
def test_an_operand_that_does_not_fit_is_named(
    device: Device, recorder: Any, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with (
        StepTokens(device, max_tokens=8, max_requests=3, max_length=1024) as tokens,
        pytest.raises(error, match=f"^sparse_attention: {message}"),
    ):
        sparse_attention(recorder, **fit(tokens, **changes))


def test_other_architectures_are_refused(device: Device, recorder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "compute_capability", property(lambda self: (8, 0)))
    with (
        StepTokens(device, max_tokens=8, max_requests=3, max_length=1024) as tokens,
        pytest.raises(ValueError, match=r"has compute capability 8\.0: wanted 9\.0"),
    ):
        sparse_attention(recorder, **fit(tokens))
