"""Queries and window rows: the references by brute force, the checks of the op, the kernel against the references."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

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
from drvkit.memory import Buffer
from drvkit.ops.query_kv import query_kv
from drvkit.ops.step_tokens import StepTokens, plan_tokens
from drvkit.records import KEY_FP8, KV_BF16, KV_FP8, Format, Pages
from drvkit.ref import query_kv as ref
from drvkit.ref.step_tokens import step_tokens
from drvkit.rope import cos_sin_table

if TYPE_CHECKING:
    from conftest import WithOption

bfloat16 = ml_dtypes.bfloat16
POISON = 0xA5
TABLE = cos_sin_table(2000, theta=10000.0)
ONE_ROUNDING = {
    "rtol": 2**-8 * 1.001,
    "atol": 1e-5,
    "why": "half a unit in the last place of bfloat16; beside it float32's errors, of pairs up to 30",
}
OF_E4M3 = {"rtol": 0.067, "atol": 1e-3, "why": "half a unit in the last place of e4m3, and of bfloat16 before"}


def step(rows: list[int], lengths: list[int], max_tokens: int) -> NDArray[np.int32]:
    """tokens [max_tokens, 4] of requests with so many rows, their last ones."""
    return step_tokens(np.append(0, np.cumsum(rows)).astype(np.int32), np.array(lengths, np.int32), max_tokens)[0]


def table_of(rng: np.random.Generator, requests: int, width: int, spare: int = 3) -> tuple[NDArray[np.int32], int]:
    """A block table of pages in any order, and how many pages there are, some of which nobody has."""
    pages = requests * width + spare
    return rng.permutation(pages)[: requests * width].astype(np.int32).reshape(requests, width), pages


def as_bf16(x: NDArray[Any]) -> NDArray[Any]:
    with np.errstate(all="ignore"):
        return x.astype(bfloat16)


# ---- the references ------------------------------------------------------------------------------------------------


def test_the_reference_norms_a_row_and_turns_its_last_pairs_as_complex_numbers(rng: np.random.Generator) -> None:
    x, weight = rng.normal(size=(5, 512)) * 3, rng.normal(size=512).astype(np.float32)
    positions = rng.integers(0, 2000, 5, np.int32)
    want = np.empty_like(x)
    for t, position in enumerate(positions.tolist()):
        norm = np.sqrt(sum(value * value for value in x[t].tolist()) / 512 + 1e-6)
        want[t] = x[t] / norm * weight
        for i in range(32):
            at = 448 + 2 * i
            angle = complex(TABLE[position, i], TABLE[position, 32 + i])
            turned = complex(want[t, at], want[t, at + 1]) * angle
            want[t, at], want[t, at + 1] = turned.real, turned.imag
    got = ref.normalised_and_turned(x, positions, TABLE, weight)
    assert_close(got, want, rtol=1e-12, atol=1e-12, why="float64")
    heads = ref.normalised_and_turned(np.stack([x, 2 * x], axis=1), positions, TABLE, eps=0)
    assert_close(heads[:, 0], heads[:, 1], rtol=1e-12, atol=1e-12, why="a head's size does not matter")


def test_the_reference_puts_the_last_rows_of_a_step_into_a_ring() -> None:
    table = np.array([[7, 2], [0, 5]], np.int32)
    tokens = np.array([[0, p, 3, 9] for p in range(3, 9)] + [[-1, 0, 0, 0], [1, 12, 12, 13]], np.int32)
    slots = ref.window_slots(tokens, table, 2)
    assert slots.tolist() == [-1, -1, 15, 4, 5, 14, -1, 0]


# ---- the op's checks -------------------------------------------------------------------------------------------------


@pytest.fixture
def tokens(device: Device) -> Iterator[StepTokens]:
    with StepTokens(device, max_tokens=4, max_requests=3) as tokens:
        yield tokens


def fit(**changes: Any) -> dict[str, Any]:
    """Operands that fit, far from each other, save for ``changes``."""
    operands = {
        "q": Foreign((4, 6, 512), np.uint16, 1 << 20),
        "kv": Foreign((4, 512), np.uint16, 2 << 20),
        "weight": Foreign((512,), np.float32, 3 << 20),
        "cos_sin": Foreign((99, 64), np.float32, 4 << 20),
        "window": window(),
    }
    return operands | changes


def window(format: Format = KV_FP8, **changes: Any) -> Pages:
    given: dict[str, Any] = {
        "pool": Foreign((9, format.page_bytes(64)), np.uint8, 5 << 20),
        "block_table": Foreign((3, 2), np.int32, 6 << 20),
        "page_size": 64,
    } | changes
    return Pages(format, **given)


HALF = Foreign((4, 6, 512), np.uint16, 7 << 20, (2048 * 6, 1024, 2))
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no tokens": ({"tokens": 4}, TypeError, "tokens: wanted a StepTokens, got int"),
    "float16": ({"q": Foreign((4, 6, 512), np.float16)}, TypeError, "q: .*bfloat16, got float16"),
    "host memory": ({"kv": np.zeros((4, 512), bfloat16)}, TypeError, "kv: .*in host memory"),
    "other tokens": (
        {"q": Foreign((5, 6, 512), np.uint16)},
        ValueError,
        r"q: wanted shape \(4, 1 to 256 heads, 512\), got \(5, 6, 512\)",
    ),
    "other dim": ({"kv": Foreign((4, 576), np.uint16)}, ValueError, r"kv: wanted shape \(4, 512\), got \(4, 576\)"),
    "kv of heads": (
        {"kv": Foreign((4, 1, 512), np.uint16)},
        ValueError,
        r"kv: wanted shape \(tokens, dim\), got \(4, 1,",
    ),
    "no heads": ({"q": Foreign((4, 0, 512), np.uint16)}, ValueError, r"q: wanted .* heads, 512\), got \(4, 0, 512\)"),
    "many heads": ({"q": Foreign((4, 257, 512), np.uint16)}, ValueError, r"q: wanted .* heads, 512\), got \(4, 257,"),
    "gaps in a token": (
        {"q": Foreign((4, 6, 512), np.uint16, 1 << 20, (12288, 2048, 2))},
        ValueError,
        r"q: wanted contiguous tokens, got strides \(12288, 2048, 2\)",
    ),
    "odd stride": (
        {"kv": Foreign((4, 512), np.uint16, 2 << 20, (1032, 2))},
        ValueError,
        r"kv: .*multiples of 16 bytes, got 0x200000 and \(1032, 2\)",
    ),
    "odd address": ({"kv": Foreign((4, 512), np.uint16, 8)}, ValueError, "kv: .*multiples of 16 bytes, got 0x8"),
    "bfloat16 weight": ({"weight": Foreign((512,), np.uint16)}, TypeError, "weight: .*float32, got uint16"),
    "short weight": ({"weight": Foreign((448,), np.float32)}, ValueError, r"weight: wanted shape \(512,\), got"),
    "wide angles": ({"cos_sin": Foreign((9, 128), np.float32)}, ValueError, r"cos_sin: wanted .*64\), got \(9, 128\)"),
    "no angles": ({"cos_sin": Foreign((0, 64), np.float32)}, ValueError, r"cos_sin: wanted .*got \(0, 64\)"),
    "eps": ({"eps": -1e-6}, ValueError, "eps: wanted a number from 0 on, got -1e-06"),
    "eps that is none": ({"eps": float("nan")}, ValueError, "eps: wanted a number from 0 on, got nan"),
    "keys": ({"window": window(KEY_FP8)}, ValueError, "window: wanted rows of fp8 of 512 or .*, got fp8 of 128"),
    "other heads out": (
        {"out": Foreign((4, 5, 512), np.uint16)},
        ValueError,
        r"out: wanted shape \(4, 6, 512\), got \(4, 5, 512\)",
    ),
    "tokens in each other": (
        {"out": Foreign((4, 6, 512), np.uint16, 8 << 20, (1024, 1024, 2))},
        ValueError,
        "out: tokens overlap",
    ),
    "one token for all, in place": (
        {"q": Foreign((4, 6, 512), np.uint16, 1 << 20, (0, 1024, 2))},
        ValueError,
        "out: tokens overlap",
    ),
    "out beside q": (
        {"out": Foreign((4, 6, 512), np.uint16, (1 << 20) + 1024)},
        ValueError,
        "out at 0x100400 .* overlaps q at 0x100000",
    ),
    "out at other strides": ({"q": HALF, "out": Foreign((4, 6, 512), np.uint16, 7 << 20)}, ValueError, "overlaps q at"),
    "kv in q": ({"kv": Foreign((4, 512), np.uint16, 1 << 20)}, ValueError, "out at .* overlaps kv at"),
    "out in the pool": ({"out": Foreign((4, 6, 512), np.uint16, 5 << 20)}, ValueError, "overlaps window.pool at"),
    "kv in the pool": ({"kv": Foreign((4, 512), np.uint16, 5 << 20)}, ValueError, "window.pool at .* overlaps kv at"),
    "its own table": (
        {"window": window(block_table=Foreign((3, 2), np.int32, 5 << 20))},
        ValueError,
        "window.pool at .* overlaps window.block_table at",
    ),
    "weight in out": ({"weight": Foreign((512,), np.float32, 1 << 20)}, ValueError, "out at .* overlaps weight at"),
    "angles in out": ({"cos_sin": Foreign((9, 64), np.float32, 1 << 20)}, ValueError, "out at .* overlaps cos_sin at"),
}


@pytest.mark.parametrize(("changes", "error", "message"), WRONG.values(), ids=WRONG)
def test_operands_that_do_not_fit_are_refused(
    recorder: Any, tokens: StepTokens, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^query_kv: .*{message}"):
        query_kv(recorder, **({"tokens": tokens} | fit(**changes)))
    assert not recorder.calls


def test_the_rows_of_a_step_are_never_written(recorder: Any, tokens: StepTokens) -> None:
    out = Foreign((4, 6, 512), np.uint16, tokens.rows.address)
    with pytest.raises(ValueError, match=r"out at .* overlaps tokens at"):
        query_kv(recorder, tokens, **fit(out=out))


@pytest.mark.parametrize(("format", "heads", "groups"), [(KV_FP8, 6, 1), (KV_BF16, 7, 1), (KV_FP8, 64, 9)])
def test_the_grid_goes_by_rows_and_heads(
    recorder: Any, tokens: StepTokens, format: Format, heads: int, groups: int
) -> None:
    q = Foreign((4, heads, 512), np.uint16, 1 << 20)
    kv = Foreign((4, 512), np.uint16, 8 << 20)
    node = query_kv(recorder, tokens, **fit(q=q, kv=kv, window=window(format)), after="before", name="q")
    assert node == "kernel node"  # type: ignore[comparison-overlap]
    ((kernel, how),) = recorder.calls
    assert kernel == f"query_kv: query_kv<{format.number}>"
    assert (how["grid"], how["block"], how["after"], how["name"]) == ((4, groups), 256, "before", "q")


def test_queries_and_rows_of_one_projection_do_not_overlap(recorder: Any, tokens: StepTokens) -> None:
    row = 7 * 1024
    q = Foreign((4, 6, 512), np.uint16, 1 << 20, (row, 1024, 2))
    kv = Foreign((4, 512), np.uint16, (1 << 20) + 6 * 1024, (row, 2))
    assert query_kv(recorder, tokens, **fit(q=q, kv=kv))
    with pytest.raises(ValueError, match=r"out at .* overlaps kv at"):
        query_kv(recorder, tokens, **fit(q=q, kv=Foreign((4, 512), np.uint16, (1 << 20) + 5 * 1024, (row, 2))))


# ---- the kernel ------------------------------------------------------------------------------------------------------


class Step:
    """Operands of one launch in device memory, whose padding nobody may read; all are closed with it.

    ``rows`` [max_tokens, 4] says which tokens there are, ``x`` [max_tokens, heads + 1, 512] has queries and, last, kv.
    """

    def __init__(self, device: Device, rows: NDArray[np.int32], x: NDArray[Any], weight: NDArray[np.float32]) -> None:
        max_tokens, heads = x.shape[0], x.shape[1] - 1
        self.tokens = StepTokens(device, max_tokens=max_tokens, max_requests=int(rows[:, 0].max(initial=0)) + 1)
        self.tokens.rows.copy_from(rows)
        self.projection = device.empty(x.shape, bfloat16)
        for t in np.flatnonzero(rows[:, 0] >= 0).tolist():
            self.projection[t].copy_from(x[t])
        self.q, self.kv = self.projection[:, :heads], self.projection[:, heads]
        self.weight, self.cos_sin = device.array(weight), device.array(TABLE)
        self.out = device.array(np.full((max_tokens, heads, 512), np.nan, bfloat16))

    def __enter__(self) -> Step:
        return self

    def __exit__(self, *_: object) -> None:
        for each in (self.tokens, self.projection, self.weight, self.cos_sin, self.out):
            each.close()

    def run(
        self,
        stream: Stream,
        format: Format,
        pool: NDArray[np.uint8],
        table: NDArray[np.int32],
        page_size: int,
        out: Buffer | None = None,
    ) -> tuple[NDArray[Any], NDArray[np.uint8]]:
        """Queries, and what becomes of the pool."""
        device = self.tokens.device
        with device.array(pool) as memory, device.array(table) as block_table:
            window = Pages(format, memory, block_table, page_size)
            to = self.out if out is None else out
            query_kv(stream, self.tokens, self.q, self.kv, self.weight, self.cos_sin, window, out=to)
            return to.numpy(stream), memory.numpy(stream)


def poisoned(format: Format, pages: int, page_size: int) -> NDArray[np.uint8]:
    return np.full((pages, format.page_bytes(page_size)), POISON, np.uint8)


def stored(rows: NDArray[Any], slots: NDArray[np.int64], format: Format, pages: int, size: int) -> NDArray[np.uint8]:
    """A poisoned pool with ``rows`` at ``slots``."""
    pool = poisoned(format, pages, size)
    format.put(pool, slots, size, *format.encode(rows))
    return pool


@pytest.mark.parametrize(("heads", "page_size"), [(1, 64), (8, 2), (13, 256)])
def test_any_step_is_as_the_reference_has_it(
    device: Device, stream: Stream, rng: np.random.Generator, heads: int, page_size: int
) -> None:
    lengths = [9, 0, 700, 70, 1]
    rows = step([3, 0, 1, 5, 1], lengths, 14)
    rows = rows[np.r_[0:4, 12, 4:12, 13]]  # padding also between requests
    table, pages = table_of(rng, len(lengths), -(-max(lengths) // page_size))
    x = as_bf16(rng.normal(size=(len(rows), heads + 1, 512)) * np.exp2(rng.integers(-9, 9, (len(rows), heads + 1, 1))))
    weight = rng.normal(size=512).astype(np.float32)
    with Step(device, rows, x, weight) as given:
        queries, plain = given.run(stream, KV_BF16, poisoned(KV_BF16, pages, page_size), table, page_size)
        again, narrow = given.run(stream, KV_FP8, poisoned(KV_FP8, pages, page_size), table, page_size)
    want, want_rows = ref.query_kv(rows, x[:, :-1], x[:, -1], weight, TABLE)
    assert_close(queries.astype(np.float64), want, **ONE_ROUNDING)  # type: ignore[arg-type]
    assert_equal_bits(queries[rows[:, 0] < 0], np.zeros_like(queries[rows[:, 0] < 0]))
    assert_equal_bits(again, queries)
    slots = ref.window_slots(rows, table, page_size)
    kept = KV_BF16.decode(*KV_BF16.rows(plain, slots, page_size))
    assert_close(kept[slots >= 0].astype(np.float64), want_rows[slots >= 0], **ONE_ROUNDING)  # type: ignore[arg-type]
    assert_equal_bits(plain, stored(kept, slots, KV_BF16, pages, page_size))
    assert_equal_bits(narrow, stored(kept, slots, KV_FP8, pages, page_size))


def test_queries_may_become_their_own_results(device: Device, stream: Stream, rng: np.random.Generator) -> None:
    rows, (table, pages) = step([2, 1], [2, 65], 4), table_of(rng, 2, 2)
    x, weight = as_bf16(rng.normal(size=(4, 4, 512))), np.ones(512, np.float32)
    with Step(device, rows, x, weight) as given:
        want, pool = given.run(stream, KV_BF16, poisoned(KV_BF16, pages, 64), table, 64)
        got, same = given.run(stream, KV_BF16, poisoned(KV_BF16, pages, 64), table, 64, out=given.q)
        assert_equal_bits(got, want)
        assert_equal_bits(same, pool)
        kv = given.kv[:3].numpy(stream)
        assert_equal_bits(kv, x[:3, -1])


@pytest.mark.parametrize("page_size", [1, 64])
def test_a_ring_has_the_last_rows_however_a_prompt_comes(
    device: Device, stream: Stream, rng: np.random.Generator, page_size: int
) -> None:
    length, width = 3 * page_size + 5, 2
    table, pages = table_of(rng, 2, width)
    x, weight = as_bf16(rng.normal(size=(length, 2, 512))), rng.normal(size=512).astype(np.float32)
    other = as_bf16(rng.normal(size=(length, 2, 512)))
    tokens = step([length], [length], length)
    with Step(device, tokens[::-1].copy(), x[::-1].copy(), weight) as given:  # blocks may run in any order
        queries, at_once = given.run(stream, KV_FP8, poisoned(KV_FP8, pages, page_size), table[:1], page_size)

    pool, done, parts = poisoned(KV_FP8, pages, page_size), 0, []
    for chunk in (1, page_size, page_size + 1, 2, page_size + 1):  # behind a token of another request, before padding
        rows = step([1, chunk], [done + 1, done + chunk], chunk + 2)
        new = np.concatenate([other[done : done + 1], x[done : done + chunk], other[:1]])
        with Step(device, rows, new, weight) as given:
            part, pool = given.run(stream, KV_FP8, pool, table[::-1].copy(), page_size)
        parts.append(part[1:-1])
        done += chunk
    assert done == length
    assert_equal_bits(np.concatenate(parts), queries[::-1])
    assert (pool[np.setdiff1d(np.arange(pages), table)] == POISON).all()

    slots = []  # of the last positions, newest first
    for position in range(length - 1, length - 1 - width * page_size, -1):
        slots.append(table[0, position // page_size % width] * page_size + position % page_size)
    ring = KV_FP8.rows(pool, np.array(slots), page_size)
    want = ref.normalised_and_turned(x[:, -1], tokens[:, 1], TABLE, weight)[::-1][: len(slots)]
    assert_close(KV_FP8.decode(*ring).astype(np.float64), want, **OF_E4M3)  # type: ignore[arg-type]
    for got, same in zip(ring, KV_FP8.rows(at_once, np.array(slots), page_size), strict=True):
        assert_equal_bits(got, same)


def test_rows_of_zeros_nan_and_infinity_and_very_small_and_large_ones(
    device: Device, stream: Stream, rng: np.random.Generator
) -> None:
    rows, (table, pages) = step([5], [69], 5), table_of(rng, 1, 2)
    x = as_bf16(rng.normal(size=(5, 2, 512)))
    x[0], x[1, :, 77], x[2, :, 500], x[3], x[4] = 0, np.nan, np.inf, 1e-30, x[4] * bfloat16(1e17)
    with Step(device, rows, x, np.full(512, -1, np.float32)) as given:
        queries, plain = given.run(stream, KV_BF16, poisoned(KV_BF16, pages, 64), table, 64)
        _, narrow = given.run(stream, KV_FP8, poisoned(KV_FP8, pages, 64), table, 64)
    want, _ = ref.query_kv(rows, x[:, :-1], x[:, -1], np.full(512, -1, np.float32), TABLE)
    assert_close(queries.astype(np.float64), want, **ONE_ROUNDING)  # type: ignore[arg-type]
    slots = ref.window_slots(rows, table, 64)
    kept = KV_BF16.decode(*KV_BF16.rows(plain, slots, 64))
    values, scales = KV_FP8.rows(narrow, slots, 64)
    want_values, want_scales = KV_FP8.encode(kept)
    assert_equal_bits(scales, want_scales)
    assert_equal_bits(values[[0, 3, 4]], want_values[[0, 3, 4]])
    assert_equal_bits(np.isnan(KV_FP8.decode(values, scales)), np.isnan(kept))


@pytest.mark.parametrize("port", ["full", "programmatic"])
def test_one_graph_serves_every_step(
    device: Device, stream: Stream, graph: Graph, rng: np.random.Generator, port: str
) -> None:
    requests, max_tokens, heads = 3, 6, 2
    table, pages = table_of(rng, requests, 2)
    pool, weight = poisoned(KV_FP8, pages, 64), rng.normal(size=512).astype(np.float32)
    x = as_bf16(rng.normal(size=(max_tokens, heads + 1, 512)))
    with (
        Step(device, step([1] * max_tokens, [1] * max_tokens, max_tokens), x, weight) as given,
        StepTokens(device, max_tokens=max_tokens, max_requests=requests) as tokens,
        device.zeros(requests + 1, np.int32) as q_starts,
        device.zeros(requests, np.int32) as lengths,
        device.array(pool) as memory,
        device.array(table) as block_table,
    ):
        listed = plan_tokens(graph, tokens, q_starts, lengths)
        assert listed is not None
        window = Pages(KV_FP8, memory, block_table, 64)
        operands = (tokens, given.q, given.kv, given.weight, given.cos_sin, window)
        query_kv(graph, *operands, out=given.out, after=listed.port(port))
        with graph.instantiate() as exe:
            ops.release()  # the nodes hold what they use
            for now, ends in (([4, 1, 1], [4, 130, 63]), ([1, 0, 1], [5, 130, 64]), ([0, 0, 0], [0, 0, 0])):
                x = as_bf16(rng.normal(size=x.shape))
                given.projection.copy_from(x)
                q_starts.copy_from(np.append(0, np.cumsum(now)).astype(np.int32))
                lengths.copy_from(np.array(ends, np.int32))
                exe.launch(stream)
                rows = step(now, ends, max_tokens)
                want, want_rows = ref.query_kv(rows, x[:, :-1], x[:, -1], weight, TABLE)
                assert_close(given.out.numpy(stream).astype(np.float64), want, **ONE_ROUNDING)  # type: ignore[arg-type]
                slots, got = ref.window_slots(rows, table, 64), memory.numpy(stream)
                new = KV_FP8.rows(got, slots, 64)
                KV_FP8.put(pool, slots, 64, *new)
                assert_equal_bits(got, pool)
                decoded = KV_FP8.decode(*new).astype(np.float64)
                assert_close(decoded[slots >= 0], want_rows[slots >= 0], **OF_E4M3)  # type: ignore[arg-type]
        del exe


# ---- what only the device can know to be wrong -----------------------------------------------------------------------


OUTSIDE: dict[str, tuple[int, int, str]] = {
    "position": (2000, 1, r"row 1 is at position 2000: cos_sin has 2000 rows"),
    "page": (70, 9, r"block_table\[0\]\[1\] is 9: the pool has 9 pages"),
    "negative page": (70, -1, r"block_table\[0\]\[1\] is -1: the pool has 9 pages"),
}


def run_outside(device: Device, position: int, page: int) -> tuple[NDArray[Any], ...]:
    """Queries, the pool, and those that are wanted, of three rows, the second of which is wrong."""
    rows = np.array([[1, 3, 3, 4], [0, position, position, position + 1], [-1, 0, 0, 0]], np.int32)
    table = np.array([[0, page], [3, 4]], np.int32)
    x = as_bf16(np.arange(3 * 2 * 512).reshape(3, 2, 512) % 7)
    weight = np.ones(512, np.float32)
    given = Step(device, rows, x, weight)
    try:
        with device.stream() as stream:
            queries, pool = given.run(stream, KV_BF16, poisoned(KV_BF16, 9, 64), table, 64)
    except DriverError:
        device.driver.cuDevicePrimaryCtxReset(device.handle)
        raise
    finally:
        given.__exit__()
    want, want_rows = ref.query_kv(rows, x[:, :-1], x[:, -1], weight, TABLE)
    slots = ref.window_slots(rows, table, 64)
    slots[(slots < 0) | (slots >= 9 * 64)] = -1
    got = KV_BF16.decode(*KV_BF16.rows(pool, slots, 64))
    assert_close(got[slots >= 0].astype(np.float64), want_rows[slots >= 0], **ONE_ROUNDING)  # type: ignore[arg-type]
    return queries, pool, want, stored(got, slots, KV_BF16, 9, 64)


@pytest.mark.parametrize(("position", "page", "told"), OUTSIDE.values(), ids=OUTSIDE)
def test_the_cpu_device_reports_what_is_outside(
    with_option: WithOption, capsys: pytest.CaptureFixture[str], position: int, page: int, told: str
) -> None:
    victim = Device("cpu:5")
    with_option(victim, "query_kv", "-DDRVKIT_CPU_DEVICE")
    with pytest.raises(DriverError, match="LAUNCH_FAILED"):
        run_outside(victim, position, page)
    assert re.match(told, capsys.readouterr().out)


@pytest.mark.parametrize(("position", "page", "told"), OUTSIDE.values(), ids=OUTSIDE)
def test_a_gpu_stays_inside_its_memory(
    device: Device, with_option: WithOption, position: int, page: int, told: str
) -> None:
    with_option(device, "query_kv", "-UDRVKIT_CPU_DEVICE")
    queries, pool, want, want_pool = run_outside(device, position, page)
    assert_close(queries.astype(np.float64), want, **ONE_ROUNDING)  # type: ignore[arg-type]
    assert_equal_bits(pool, want_pool)
