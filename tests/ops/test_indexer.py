"""The indexer: the references by brute force, the checks of the ops, and the kernels against the references."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

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
from drvkit.ops.indexer import IndexerQueries, indexer_logits, indexer_query
from drvkit.ops.step_tokens import StepTokens, plan_tokens
from drvkit.records import KEY_BF16, KEY_FP8, KEY_MXFP4, KV_BF16, Format, Pages
from drvkit.ref import indexer as ref
from drvkit.ref.kv_compress import walsh_hadamard
from drvkit.ref.step_tokens import step_tokens
from drvkit.rope import Yarn, cos_sin_table

if TYPE_CHECKING:
    from conftest import WithOption

bfloat16 = ml_dtypes.bfloat16
POISON = np.float32(-12345.5)
TABLE = cos_sin_table(2000, theta=160000.0, yarn=Yarn())
DIM = 128

# Each product and sum of the kernel, on tensor cores, is off by up to one unit in the last place (2^-23) of the sum of
# magnitudes: 128 in a dot product, then two roundings for each of 64 heads, some more where lanes meet.
BOUND = 2.0**-23 * (DIM + 2 * 64 + 8)

each_format = pytest.mark.parametrize("format", [KEY_MXFP4, KEY_FP8, KEY_BF16], ids=lambda format: str(format.name))


class Step(NamedTuple):
    """Requests with so many rows, their last ones."""

    rows: list[int]
    lengths: list[int]

    @property
    def starts(self) -> NDArray[np.int32]:
        return np.append(0, np.cumsum(self.rows)).astype(np.int32)

    def tokens(self, max_tokens: int) -> NDArray[np.int32]:
        return step_tokens(self.starts, np.array(self.lengths, np.int32), max_tokens)[0]


class Keys(NamedTuple):
    """Of requests, in pages in any order; what is no entry is poison, and what has no page is none of the pool's."""

    format: Format
    pool: NDArray[np.uint8]
    table: NDArray[np.int32]
    page_size: int

    @classmethod
    def of(
        cls, rng: np.random.Generator, format: Format, entries: list[int], page_size: int, *, spread: float = 1.0
    ) -> Keys:
        width = -(-max(entries) // page_size) + 1
        pages = len(entries) * width + 2
        pool = np.full((pages, format.page_bytes(page_size)), 0xFF, np.uint8)  # NaN, or 2^128 times 6
        table = rng.permutation(pages)[: len(entries) * width].astype(np.int32).reshape(len(entries), width)
        for request, count in enumerate(entries):
            rows = rng.normal(size=(count, DIM)) * np.exp(spread * rng.normal(size=(count, DIM)))
            made = cls(format, pool, table, page_size)
            format.put(pool, slots(made, request, count), page_size, *format.encode(rows))
            table[request, -(-count // page_size) :] = -(10**6)
        return cls(format, pool, table, page_size)


def slots(keys: Keys, request: int, count: int) -> NDArray[np.int64]:
    """Where the first entries of a request are."""
    every = np.arange(count)
    of_entries: NDArray[np.int64] = keys.table[request, every // keys.page_size] * np.int64(keys.page_size)
    return of_entries + every % keys.page_size


def close(*buffers: Any) -> None:
    for buffer in buffers:
        buffer.close()


def as_bytes(queries: IndexerQueries, stream: Stream) -> tuple[NDArray[np.uint8], ...]:
    """Values, scales and weights."""
    scales = np.zeros((*queries.values.shape[:2], 0), np.uint8)
    if queries.scales is not None:
        scales = queries.scales.numpy(stream)
    return queries.values.numpy(stream), scales, queries.weights.numpy(stream).view(np.uint8)


def fill(queries: IndexerQueries, made: tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.float32]]) -> None:
    values, scales, weights = made
    queries.values.copy_from(values)
    queries.weights.copy_from(weights)
    if queries.scales is not None:
        queries.scales.copy_from(scales)


def random_queries(
    rng: np.random.Generator, step: Step, max_tokens: int, format: Format, heads: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.float32]]:
    """As the reference makes them; weights of both signs."""
    q = (rng.normal(size=(max_tokens, heads, DIM)) * np.exp(rng.normal(size=(max_tokens, heads, DIM)))).astype(bfloat16)
    weights = rng.normal(size=(max_tokens, heads)).astype(np.float32)
    return ref.indexer_query(step.tokens(max_tokens), q, weights, TABLE, format)


def score(
    device: Device,
    stream: Stream,
    step: Step,
    made: tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.float32]],
    keys: Keys,
    **how: Any,
) -> NDArray[np.float32]:
    """The kernel's logits, of which nothing but poison was there before."""
    max_tokens, heads, _ = made[0].shape
    requests, room = len(step.rows), keys.table.shape[1] * keys.page_size
    with (
        StepTokens(device, max_tokens=max_tokens, max_requests=requests, max_length=4 * room) as tokens,
        IndexerQueries(device, max_tokens=max_tokens, format=keys.format, heads=heads) as queries,
        device.array(np.full((max_tokens, room), POISON)) as logits,
        device.array(keys.pool) as pool,
        device.array(keys.table) as table,
        device.array(step.starts) as starts,
        device.array(np.array(step.lengths, np.int32)) as lengths,
    ):
        plan_tokens(stream, tokens, starts, lengths)
        fill(queries, made)
        indexer_logits(stream, tokens, queries, Pages(keys.format, pool, table, keys.page_size), logits, **how)
        got = logits.numpy(stream)
        assert_equal_bits(pool.numpy(stream), keys.pool)
    return got


def wanted(
    step: Step,
    made: tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.float32]],
    keys: Keys,
    width: int,
    **how: Any,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    tokens = step.tokens(len(made[0]))
    return ref.indexer_logits(tokens, *made, *keys[:3], keys.page_size, width, **how)


def assert_scores(got: NDArray[np.float32], want: NDArray[np.float64], magnitudes: NDArray[np.float64]) -> None:
    """Each within its bound, and poison wherever there is none."""
    assert_equal_bits(got[np.isnan(want)], np.full(np.isnan(want).sum(), POISON))
    there = ~np.isnan(want)
    assert not np.isnan(got[there]).any()
    relative = np.abs(got[there] - want[there]) / np.maximum(magnitudes[there], 1e-30)
    assert not relative.size or relative.max() <= BOUND, f"off by {relative.max():.3g} of {BOUND:.3g}"


# ---- the references ------------------------------------------------------------------------------------------------


def test_the_reference_multiplies_by_sylvesters_matrix(rng: np.random.Generator) -> None:
    matrix: NDArray[Any] = np.ones((1, 1))
    while len(matrix) < DIM:
        matrix = np.kron([[1, 1], [1, -1]], matrix)
    x = rng.normal(size=(3, 5, DIM))
    assert_close(walsh_hadamard(x), x @ matrix / np.sqrt(DIM), rtol=0, atol=1e-13, why="float64")
    assert_close(walsh_hadamard(walsh_hadamard(x)), x, rtol=0, atol=1e-13, why="it is its own inverse")


def test_the_reference_turns_queries_by_their_own_position(rng: np.random.Generator) -> None:
    tokens = Step([3, 1], [9, 1500]).tokens(5)
    q, weights = rng.normal(size=(5, 8, DIM)).astype(bfloat16), rng.normal(size=(5, 8)).astype(bfloat16)
    values, scales, made = ref.indexer_query(tokens, q, weights, TABLE, KEY_BF16)
    rows = KEY_BF16.decode(values, scales)
    want = q.astype(np.float64)
    for t, position in enumerate([6, 7, 8, 1499]):
        pairs = want[t, :, 64::2] + 1j * want[t, :, 65::2]
        pairs = pairs * (TABLE[position, :32] + 1j * TABLE[position, 32:])
        want[t, :, 64::2], want[t, :, 65::2] = pairs.real, pairs.imag
    assert_close(rows[:4].astype(np.float64), want[:4], rtol=2**-8, atol=1e-6, why="one rounding to bfloat16")
    scaled = weights[:4].astype(np.float64) / np.sqrt(DIM * 8)
    assert_close(made[:4].astype(np.float64), scaled, rtol=1e-6, atol=0, why="float32")
    assert not rows[4].any()
    assert not made[4].any()


@each_format
def test_the_reference_scores_by_brute_force(rng: np.random.Generator, format: Format) -> None:
    step, heads = Step([2, 0, 9], [30, 5, 9]), 8
    keys = Keys.of(rng, format, [7, 1, 2], 4)
    q, weights = rng.normal(size=(12, heads, DIM)), rng.normal(size=(12, heads)).astype(np.float32)
    made = ref.indexer_query(step.tokens(12), q, weights, TABLE, format)
    got, magnitudes = wanted(step, made, keys, 9)
    turned = ref.indexer_query(step.tokens(12), q, weights, TABLE, KEY_BF16)[0]
    rows = format.decode(*format.encode(KEY_BF16.decode(turned, turned[..., :0])))
    for t, (request, position, *_) in enumerate(step.tokens(12).tolist()):
        seen = (position + 1) // 4 if request >= 0 else 0
        assert np.isnan(got[t, seen:]).all()
        for j in range(seen):
            page, place = keys.table[request, j // 4], j % 4
            key = format.decode(*format.rows(keys.pool, np.array([page * 4 + place]), 4))[0]
            want = sum(
                float(weights[t, h])
                / np.sqrt(DIM * heads)
                * max(0.0, float(rows[t, h].astype(float) @ key.astype(float)))
                for h in range(heads)
            )
            assert abs(got[t, j] - want) <= 1e-6 * magnitudes[t, j]


def test_a_transform_of_queries_and_keys_leaves_scores_as_they_are(rng: np.random.Generator) -> None:
    """And one of either alone does not."""
    step, max_tokens = Step([3], [150]), 3
    q, weights = rng.normal(size=(max_tokens, 8, DIM)).astype(bfloat16), rng.normal(size=(max_tokens, 8))
    rows = rng.normal(size=(37, DIM))
    keys = Keys.of(rng, KEY_BF16, [37], 4)
    got = {}
    for of_keys in (False, True):
        KEY_BF16.put(keys.pool, slots(keys, 0, 37), 4, *KEY_BF16.encode(walsh_hadamard(rows) if of_keys else rows))
        for of_queries in (False, True):
            made = ref.indexer_query(step.tokens(3), q, weights, TABLE, KEY_BF16, transformed=of_queries)
            got[of_keys, of_queries] = wanted(step, made, keys, 37)[0]
    size = np.abs(got[False, False]).max()
    assert_close(
        got[True, True], got[False, False], rtol=0, atol=0.02 * float(size), why="two roundings of rows to bfloat16"
    )
    for one in ((True, False), (False, True)):
        assert np.abs(got[one] - got[False, False]).max() > 0.2 * size


# ---- the ops' checks, without a device -------------------------------------------------------------------------------


@pytest.fixture
def tokens(device: Device) -> Iterator[StepTokens]:
    with StepTokens(device, max_tokens=6, max_requests=3, max_length=400) as tokens:
        yield tokens


@pytest.fixture
def queries(device: Device) -> Iterator[IndexerQueries]:
    with IndexerQueries(device, max_tokens=6, format=KEY_FP8) as queries:
        yield queries


def far(shape: Any, dtype: Any, number: int, strides: Any = None) -> Foreign:
    """Each far from all others, and from what a device has."""
    return Foreign(shape, dtype, (number << 30) + (1 << 20), strides)


def fit(tokens: StepTokens, queries: IndexerQueries, **changes: Any) -> dict[str, Any]:
    """Operands of `indexer_query`."""
    operands = {
        "tokens": tokens,
        "q": far((6, 64, DIM), np.uint16, 1),
        "weights": far((6, 64), np.float32, 2),
        "cos_sin": far((50, 64), np.float32, 3),
        "queries": queries,
    }
    return operands | changes


def fit_logits(tokens: StepTokens, queries: IndexerQueries, **changes: Any) -> dict[str, Any]:
    pool = far((9, KEY_FP8.page_bytes(64)), np.uint8, 4)
    operands = {
        "tokens": tokens,
        "queries": queries,
        "keys": Pages(KEY_FP8, pool, far((3, 2), np.int32, 5), 64),
        "logits": far((6, 100), np.float32, 6),
    }
    return operands | changes


def test_the_kernels_go_by_the_operands(
    device: Device, recorder: Any, tokens: StepTokens, queries: IndexerQueries
) -> None:
    indexer_query(recorder, **fit(tokens, queries, weights=far((6, 64), np.uint16, 2)), after="a", name="b")
    indexer_logits(recorder, **fit_logits(tokens, queries), after="a", name="c")
    (query, how), (logits, how_logits) = recorder.calls
    assert (query, how["grid"], how["block"]) == ("indexer: indexer_query<__nv_bfloat16,3>", 6, 512)
    assert (logits, how_logits["grid"]) == ("indexer: indexer_logits<3>", (6, 1))
    assert [(each["after"], each["name"]) for each in (how, how_logits)] == [("a", "b"), ("a", "c")]
    recorder.calls.clear()
    for max_tokens in (4096, 1):
        with (
            StepTokens(device, max_tokens=max_tokens, max_requests=3, max_length=2**20) as many,
            IndexerQueries(device, max_tokens=max_tokens, format=KEY_FP8) as of_many,
        ):
            wide = pages(width=4096)
            indexer_logits(recorder, many, of_many, wide, far((max_tokens, 2**18), np.float32, 9))
    assert [how["grid"] for _, how in recorder.calls] == [(4096, 8), (1, 2 * device.multiprocessors)]


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no tokens": ({"tokens": 3}, TypeError, "tokens: wanted a StepTokens, got int"),
    "no queries": ({"queries": None}, TypeError, "queries: wanted an IndexerQueries, got NoneType"),
    "float32": ({"q": far((6, 64, DIM), np.float32, 1)}, TypeError, "q: wanted .*bfloat16, got float32"),
    "other heads": ({"q": far((6, 32, DIM), np.uint16, 1)}, ValueError, r"q: wanted shape \(6, 64, 128\), got"),
    "other tokens": ({"q": far((5, 64, DIM), np.uint16, 1)}, ValueError, r"q: wanted shape \(6, 64, 128\), got"),
    "gaps in a token": (
        {"q": far((6, 64, DIM), np.uint16, 1, (64 * 512, 512, 2))},
        ValueError,
        r"q: wanted contiguous tokens, got strides \(32768, 512, 2\)",
    ),
    "odd stride": (
        {"q": far((6, 64, DIM), np.uint16, 1, (64 * 256 + 8, 256, 2))},
        ValueError,
        "q: wanted an address and strides, none negative, that are multiples of 16 bytes",
    ),
    "odd address": (
        {"q": Foreign((6, 64, DIM), np.uint16, 8)},
        ValueError,
        "q: wanted an address and strides, none negative, that are",
    ),
    "other weights": ({"weights": far((6, 32), np.float32, 2)}, ValueError, r"weights: wanted shape \(6, 64\), got"),
    "weights of float16": ({"weights": far((6, 64), np.float16, 2)}, TypeError, "weights: .*got float16"),
    "other angles": (
        {"cos_sin": far((50, 128), np.float32, 3)},
        ValueError,
        r"cos_sin: wanted shape \(max_position, 64",
    ),
    "no angles": ({"cos_sin": far((0, 64), np.float32, 3)}, ValueError, r"cos_sin: wanted shape"),
}


@pytest.mark.parametrize(("changes", "error", "message"), WRONG.values(), ids=WRONG)
def test_operands_of_queries_that_do_not_fit_are_refused(
    recorder: Any,
    tokens: StepTokens,
    queries: IndexerQueries,
    changes: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=f"^indexer_query: {message}"):
        indexer_query(recorder, **(fit(tokens, queries) | changes))
    assert not recorder.calls


def pages(format: Format = KEY_FP8, size: int = 64, width: int = 2, requests: int = 3, number: int = 4) -> Pages:
    pool = far((9, format.page_bytes(size)), np.uint8, number)
    return Pages(format, pool, far((requests, width), np.int32, 5), size)


WRONG_LOGITS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no queries": ({"queries": far((6, 64), np.uint8, 1)}, TypeError, "queries: wanted an IndexerQueries, got Foreign"),
    "another format": ({"keys": pages(KEY_MXFP4)}, ValueError, "keys: wanted rows of fp8 of 128, got mxfp4 of 128"),
    "no pages": ({"keys": 5}, TypeError, "keys: wanted a Pages, got int"),
    "other requests": ({"keys": pages(requests=2)}, ValueError, r"keys: block_table: wanted shape \(3, pages"),
    "a ring": (
        {"keys": pages(size=32)},
        ValueError,
        "keys: 400 tokens have 100 entries, the block table room for 64",
    ),
    "page of 12": ({"keys": pages(size=12)}, ValueError, "keys: page_size: wanted a power of two"),
    "narrow": (
        {"logits": far((6, 99), np.float32, 6)},
        ValueError,
        r"logits: wanted shape \(6, 100 or more: the entries of 400 tokens\), got \(6, 99\)",
    ),
    "other tokens": ({"logits": far((5, 100), np.float32, 6)}, ValueError, r"logits: wanted shape \(6, 100 or more"),
    "float64": ({"logits": far((6, 100), np.float64, 6)}, TypeError, "logits: .*got float64"),
    "strided": ({"logits": far((6, 100), np.float32, 6, (800, 4))}, ValueError, "logits: .*contiguous"),
    "negative": ({"skip_up_to": -1}, ValueError, "skip_up_to: wanted 0 to"),
    "a half": ({"skip_up_to": 0.5}, TypeError, "skip_up_to: wanted an integer"),
    "in the pool": ({"logits": far((6, 100), np.float32, 4)}, ValueError, "logits at .* overlaps keys.pool"),
    "in the table": ({"logits": far((6, 100), np.float32, 5)}, ValueError, "logits at .* overlaps keys.block_table"),
}


@pytest.mark.parametrize(("changes", "error", "message"), WRONG_LOGITS.values(), ids=WRONG_LOGITS)
def test_operands_of_scores_that_do_not_fit_are_refused(
    recorder: Any,
    tokens: StepTokens,
    queries: IndexerQueries,
    changes: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=f"^indexer_logits: {message}"):
        indexer_logits(recorder, **(fit_logits(tokens, queries) | changes))
    assert not recorder.calls


def test_results_do_not_overlap_operands(
    device: Device, recorder: Any, tokens: StepTokens, queries: IndexerQueries
) -> None:
    at = queries.values.address
    with pytest.raises(ValueError, match=r"^indexer_query: queries at .* overlaps q at"):
        indexer_query(recorder, **fit(tokens, queries, q=Foreign((6, 64, DIM), np.uint16, at)))
    with pytest.raises(ValueError, match=r"^indexer_query: queries at .* overlaps weights at"):
        indexer_query(recorder, **fit(tokens, queries, weights=queries.weights))
    with pytest.raises(ValueError, match=r"^indexer_logits: logits at .* overlaps queries at"):
        indexer_logits(recorder, **fit_logits(tokens, queries, logits=Foreign((6, 100), np.float32, at)))
    place = Foreign((6, 100), np.float32, tokens.rows.address - 2400 + 64)
    with pytest.raises(ValueError, match=r"^indexer_logits: logits at .* overlaps tokens at"):
        indexer_logits(recorder, **fit_logits(tokens, queries, logits=place))
    with IndexerQueries(device, max_tokens=5, format=KEY_FP8) as other:
        for op, operands in ((indexer_query, fit(tokens, other)), (indexer_logits, fit_logits(tokens, other))):
            with pytest.raises(ValueError, match="queries: wanted those of 6 tokens, got 5"):
                op(recorder, **operands)
    assert not recorder.calls


def test_queries_that_cannot_be_are_refused(device: Device) -> None:
    for how, error, message in (
        ({"max_tokens": 0}, ValueError, "max_tokens: wanted 1 to"),
        ({"max_tokens": 1.5}, TypeError, "max_tokens: wanted an integer"),
        ({"heads": 12}, ValueError, "heads: wanted a multiple of 8 up to 64, got 12"),
        ({"heads": 72}, ValueError, "heads: wanted a multiple of 8 up to 64, got 72"),
        ({"heads": 0}, ValueError, "heads: wanted a multiple of 8 up to 64, got 0"),
        ({"format": KV_BF16}, ValueError, "format: wanted that of keys, of 128, got bf16 of 512"),
        ({"format": "fp8"}, TypeError, "format: wanted a Format, got str"),
    ):
        operands: dict[str, Any] = {"max_tokens": 8, "format": KEY_FP8} | how
        with pytest.raises(error, match=f"^IndexerQueries: {message}"):
            IndexerQueries(device, **operands)


# ---- queries ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize(
    ("format", "weight", "heads"), [(KEY_MXFP4, bfloat16, 64), (KEY_FP8, np.float32, 24)], ids=["mxfp4", "fp8"]
)
def test_queries_are_what_the_format_makes_of_their_rows(
    device: Device,
    stream: Stream,
    rng: np.random.Generator,
    format: Format,
    weight: Any,
    heads: int,
    hadamard: bool,
) -> None:
    step, max_tokens = Step([9, 0, 2, 1], [9, 7, 777, 2000]), 14
    sizes = np.exp2(rng.integers(-20, 20, (max_tokens, heads + 8, 1)))
    fused = (rng.normal(size=(max_tokens, heads + 8, DIM)) * np.exp(rng.normal(size=(1, 1, DIM))) * sizes).astype(
        bfloat16
    )
    fused[1, 9], fused[3, 10, :5], fused[12:] = 0, [-0.0, 2.0**-130, 3e38, -3e38, 1.0], np.nan
    q, weights = fused[:, 8:], rng.normal(size=(max_tokens, heads)).astype(weight)
    weights[12:] = np.nan
    with (
        StepTokens(device, max_tokens=max_tokens, max_requests=4, max_length=2000) as tokens,
        IndexerQueries(device, max_tokens=max_tokens, format=format, heads=heads) as queries,
    ):
        buffers = [device.array(x) for x in (fused, weights, TABLE, step.starts, np.array(step.lengths, np.int32))]
        rows, of_heads, table, starts, lengths = buffers
        plan_tokens(stream, tokens, starts, lengths)
        queries._whole.fill(0xA5)
        indexer_query(stream, tokens, rows[:, 8:], of_heads, table, queries, hadamard=hadamard)
        got = as_bytes(queries, stream)
        close(*buffers)
    values, scales, made = ref.indexer_query(step.tokens(max_tokens), q, weights, TABLE, format, transformed=hadamard)
    assert_equal_bits(got[0], values)
    assert_equal_bits(got[1], scales if format == KEY_MXFP4 else scales[..., :0])
    assert_equal_bits(got[2].view(np.float32), made)
    assert not any(each[-2:].any() for each in got), "padding is 0"


# ---- scores ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format", "heads", "page_size"),
    [(KEY_MXFP4, 64, 16), (KEY_FP8, 24, 64), (KEY_FP8, 64, 512)],
    ids=["mxfp4", "fp8", "contiguous"],
)
def test_every_token_scores_what_it_sees(
    device: Device, stream: Stream, rng: np.random.Generator, format: Format, heads: int, page_size: int
) -> None:
    # From the first token on, a chunk in two blocks, one token of many entries, entries at tiles' ends.
    step = Step([9, 0, 6, 1, 1, 1], [9, 400, 135, 1200, 4 * 32, 4 * 33 - 1])
    keys = Keys.of(rng, format, [length // 4 for length in step.lengths], page_size)
    made = random_queries(rng, step, 20, format, heads)
    for row in (0, 18, 19):  # a token that sees nothing, and padding
        made[0][row], made[2][row] = 0xFF, np.nan
    got = score(device, stream, step, made, keys)
    want, magnitudes = wanted(step, made, keys, got.shape[1])
    assert [int((~np.isnan(row)).sum()) for row in want] == [
        *(0, 0, 0, 1, 1, 1, 1, 2, 2),
        *(32, 32, 33, 33, 33, 33),
        *(300, 32, 32, 0, 0),
    ]
    assert_scores(got, want, magnitudes)
    assert (want < 0).any()
    assert (want > 0).any()


def test_warps_go_on_where_there_are_more_entries_than_the_blocks_take_at_once(
    device: Device, stream: Stream, rng: np.random.Generator
) -> None:
    entries, max_tokens = 2300, 40  # 8 blocks for each of so many tokens, of 256 entries
    step = Step([3], [4 * entries])
    keys = Keys.of(rng, KEY_MXFP4, [entries], 64)
    made = random_queries(rng, step, max_tokens, KEY_MXFP4, 8)
    got = score(device, stream, step, made, keys)
    assert_scores(got, *wanted(step, made, keys, got.shape[1]))


def test_the_bound_sees_what_goes_wrong(rng: np.random.Generator) -> None:
    """Rounding is smaller than a head, or half of a row, that is missing or another's, and than no ReLU."""
    step, heads = Step([1], [400]), 64
    keys = Keys.of(rng, KEY_BF16, [100], 64, spread=0)
    values, scales, weights = made = random_queries(rng, step, 1, KEY_BF16, heads)
    (want,), (magnitudes,) = wanted(step, made, keys, 100)
    half, negated = values.copy(), weights.copy()
    half[..., :128] = 0
    negated[0, np.argsort(np.abs(weights[0]))[heads // 2]] *= -1
    for wrong in ((half, scales, weights), (np.roll(values, 1, axis=1), scales, weights), (values, scales, negated)):
        assert (np.abs(wanted(step, wrong, keys, 100)[0][0] - want) / magnitudes).max() > 2 * BOUND
    dots = KEY_BF16.decode(values, scales)[0] @ KEY_BF16.decode(*KEY_BF16.rows(keys.pool, slots(keys, 0, 100), 64)).T
    assert (np.abs(weights[0] @ dots - want) / magnitudes).max() > 2 * BOUND


def test_tokens_that_take_all_are_skipped(device: Device, stream: Stream, rng: np.random.Generator) -> None:
    chosen = 33  # tokens see 32, 33 and 34 entries
    step = Step([9, 1], [4 * 34 + 2, 4 * 33])
    keys = Keys.of(rng, KEY_MXFP4, [34, 33], 16)
    made = random_queries(rng, step, 10, KEY_MXFP4, 64)
    got = score(device, stream, step, made, keys, skip_up_to=chosen)
    want, magnitudes = wanted(step, made, keys, got.shape[1], skip_up_to=chosen)
    assert (~np.isnan(want)).any(axis=1).tolist() == [False] * 6 + [True] * 3 + [False]
    assert_scores(got, want, magnitudes)


def test_scores_may_all_be_zero(device: Device, stream: Stream, rng: np.random.Generator) -> None:
    step = Step([5], [80])
    keys = Keys.of(rng, KEY_MXFP4, [20], 16)
    q = np.zeros((5, 64, DIM), bfloat16)
    made = ref.indexer_query(step.tokens(5), q, rng.normal(size=(5, 64)), TABLE, KEY_MXFP4)
    got = score(device, stream, step, made, keys)
    assert not got[:, :19].any()
    assert (got[:, 20:] == POISON).all()


def test_the_best_are_those_of_the_reference_but_for_ties(
    device: Device, stream: Stream, rng: np.random.Generator
) -> None:
    step, count = Step([1], [1200]), 64
    keys = Keys.of(rng, KEY_MXFP4, [300], 16)
    made = random_queries(rng, step, 1, KEY_MXFP4, 64)
    (got,) = score(device, stream, step, made, keys)
    (want,), (magnitudes,) = wanted(step, made, keys, 300)
    best = np.argsort(-got[:300], kind="stable")[:count]
    least = np.sort(want)[-count]
    assert (want[best] >= least - 2 * BOUND * magnitudes.max()).all()
    assert len(set(best.tolist()) - set(np.argsort(-want)[:count].tolist())) <= 1


def test_bits_depend_neither_on_chunks_nor_on_other_requests(
    device: Device, stream: Stream, rng: np.random.Generator
) -> None:
    whole = Step([150], [150])
    keys = Keys.of(rng, KEY_MXFP4, [37], 16)
    made = random_queries(rng, whole, 150, KEY_MXFP4, 64)
    at_once = score(device, stream, whole, made, keys)
    for first, count in ((135, 7), (146, 1)):
        part = Step([0, 2, count], [0, 140, first + count])
        with_others = [np.concatenate([each[138:140], each[first : first + count]]) for each in made]
        table = np.concatenate([np.full_like(keys.table, -7), keys.table, keys.table])
        got = score(device, stream, part, tuple(with_others), keys._replace(table=table))  # type: ignore[arg-type]
        assert_equal_bits(got[:2], at_once[138:140])
        assert_equal_bits(got[2:], at_once[first : first + count])


@pytest.mark.parametrize("port", ["full", "programmatic"])
def test_one_graph_serves_every_step(
    device: Device, stream: Stream, graph: Graph, rng: np.random.Generator, port: str
) -> None:
    requests, max_tokens, format, heads = 3, 12, KEY_MXFP4, 64
    keys = Keys.of(rng, format, [60] * requests, 16)
    room = keys.table.shape[1] * keys.page_size
    with (
        StepTokens(device, max_tokens=max_tokens, max_requests=requests, max_length=4 * room) as tokens,
        IndexerQueries(device, max_tokens=max_tokens, format=format, heads=heads) as queries,
    ):
        contents = [
            *(np.zeros((max_tokens, heads, DIM), bfloat16), np.zeros((max_tokens, heads), bfloat16), TABLE),
            *(keys.pool, keys.table, np.zeros(requests + 1, np.int32), np.zeros(requests, np.int32)),
            np.full((max_tokens, room), POISON),
        ]
        buffers: list[Buffer] = [device.array(each) for each in contents]
        q, weights, table, pool, block_table, starts, lengths, logits = buffers
        listed = plan_tokens(graph, tokens, starts, lengths, name="list")
        assert listed is not None
        made = indexer_query(graph, tokens, q, weights, table, queries, hadamard=True, after=listed.port(port))
        assert made is not None
        where = Pages(format, pool, block_table, keys.page_size)
        indexer_logits(graph, tokens, queries, where, logits, skip_up_to=2, after=made.port(port), name="score")
        with graph.instantiate() as exe:
            ops.release()  # the nodes hold what they use
            for step in (Step([5, 0, 7], [240, 9, 17]), Step([1, 1, 1], [7, 12, 203]), Step([0, 0, 0], [9, 9, 9])):
                new = rng.normal(size=(max_tokens, heads, DIM)).astype(bfloat16)
                by = rng.normal(size=(max_tokens, heads)).astype(bfloat16)
                for buffer, content in (
                    *((q, new), (weights, by), (starts, step.starts), (lengths, np.array(step.lengths, np.int32))),
                    (logits, contents[-1]),
                ):
                    buffer.copy_from(content)
                exe.launch(stream)
                want = ref.indexer_query(step.tokens(max_tokens), new, by, TABLE, format, transformed=True)
                assert_equal_bits(as_bytes(queries, stream)[0], want[0])
                assert_scores(logits.numpy(stream), *wanted(step, want, keys, room, skip_up_to=2))
        close(*buffers)


# ---- what only the device can know to be wrong -----------------------------------------------------------------------


def score_outside(
    device: Device, format: Format, q: NDArray[Any], keys: NDArray[Any], position: int, page: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Values of a token's query, and logits of its 8 entries, where its position or the last of its pages is wrong."""
    pool, block_table = np.zeros((2, format.page_bytes(4)), np.uint8), np.array([[1, page]], np.int32)
    format.put(pool, np.arange(8), 4, *format.encode(keys))
    buffers = [device.array(x) for x in (q, np.ones((1, 8), bfloat16), TABLE[:50], pool, block_table)]
    rows, of_heads, table, of_pool, of_requests = buffers
    tokens = StepTokens(device, max_tokens=1, max_requests=1, max_length=32)
    queries, logits = (
        IndexerQueries(device, max_tokens=1, format=format, heads=8),
        device.array(np.full((1, 20), POISON)),
    )
    tokens.rows.copy_from(np.array([[0, position, position, position + 1]], np.int32))
    try:
        with device.stream() as stream:
            indexer_query(stream, tokens, rows, of_heads, table, queries)
            tokens.rows.copy_from(np.array([[0, 31, 31, 32]], np.int32), stream)
            indexer_logits(stream, tokens, queries, Pages(format, of_pool, of_requests, 4), logits)
            return queries.values.numpy(stream), logits.numpy(stream)
    except DriverError:
        device.driver.cuDevicePrimaryCtxReset(device.handle)
        ops.release(device)
        raise
    finally:
        close(*buffers, tokens, queries, logits)


OUTSIDE = {
    "position": (50, 0, r"row 0 is at position 50: cos_sin has 50 rows"),
    "page": (31, 2, r"block_table\[0\]\[1\] is 2: the pool has 2 pages"),
    "negative page": (31, -1, r"block_table\[0\]\[1\] is -1: the pool has 2 pages"),
}


@pytest.mark.parametrize(("position", "page", "told"), OUTSIDE.values(), ids=OUTSIDE)
def test_the_cpu_device_reports_what_is_outside(
    capfd: pytest.CaptureFixture[str], position: int, page: int, told: str
) -> None:
    with pytest.raises(DriverError, match="LAUNCH_FAILED"):
        score_outside(Device("cpu:5"), KEY_MXFP4, np.ones((1, 8, DIM), bfloat16), np.ones((8, DIM)), position, page)
    assert re.search(told, capfd.readouterr().out)


@pytest.mark.parametrize(("position", "page"), [each[:2] for each in OUTSIDE.values()], ids=OUTSIDE)
def test_a_gpu_stays_inside_its_memory(
    device: Device, with_option: WithOption, rng: np.random.Generator, position: int, page: int
) -> None:
    with_option(device, "indexer", "-UDRVKIT_CPU_DEVICE")
    q, keys = rng.normal(size=(1, 8, DIM)).astype(bfloat16), rng.normal(size=(8, DIM)).astype(bfloat16)
    values, logits = score_outside(device, KEY_BF16, q, keys, position, page)
    at = np.array([[0, min(position, 49), 0, 0]], np.int32)
    want, _, weights = ref.indexer_query(at, q, np.ones((1, 8)), TABLE, KEY_BF16)
    assert_equal_bits(values, want)
    dots = want.view(bfloat16)[0].astype(np.float64) @ keys.astype(np.float64).T
    scores = weights[0] @ np.maximum(dots, 0)
    there = np.append(scores[4:], scores[:4] if page == 0 else np.zeros(4))
    assert_close(logits[0, :8].astype(np.float64), there, rtol=1e-5, atol=1e-5, why="sums of float32")
    assert (logits[:, 8:] == POISON).all()
