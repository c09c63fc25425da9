"""Entries of a compressed cache: the reference against its definition, the checks of the ops, and the kernels against
the reference and against themselves, however the tokens come."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
from compare import assert_close, assert_equal_bits
from numpy.typing import NDArray
from standins import Foreign, Recorder

from drvkit import ops
from drvkit.device import Device, Stream
from drvkit.driver import DriverError
from drvkit.graph import Graph
from drvkit.memory import Buffer
from drvkit.ops.kv_compress import kv_compress, kv_save
from drvkit.ops.step_tokens import StepTokens, plan_tokens
from drvkit.records import KEY_BF16, KEY_FP8, KEY_MXFP4, KV_BF16, KV_FP8, Format, Pages
from drvkit.ref import kv_compress as ref
from drvkit.ref.step_tokens import step_tokens
from drvkit.rope import Yarn, cos_sin_table

if TYPE_CHECKING:
    from conftest import WithOption

Float32 = NDArray[np.float32]

POISON = 0xA5
NOWHERE = -(10**6)  # in a block table where nobody looks


class Layer(NamedTuple):
    """What a compressor is made of."""

    ratio: int
    format: Format
    hadamard: bool
    ape: Float32
    weight: Float32
    cos_sin: Float32

    @property
    def columns(self) -> int:
        return int(self.ape.shape[1])

    def entries(self, x: Float32) -> Float32:
        """By the reference, all of a sequence [tokens, 2 * columns]."""
        tokens = np.array([[0, position, 0, len(x)] for position in range(len(x))], np.int32).reshape(-1, 4)
        state = np.full((1, 1, 2 * self.columns), np.nan, np.float32)
        return ref.entries(
            tokens, x, state, np.zeros(1, np.int32), *self[3:], ratio=self.ratio, hadamard=self.hadamard
        )[1]


@pytest.fixture
def without_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for devices before sm_90."""
    monkeypatch.setattr("drvkit.ops.kv_compress.CLUSTER", 1)


def layer(rng: np.random.Generator, ratio: int, format: Format, hadamard: bool = False) -> Layer:
    columns = format.dim * (2 if ratio == 4 else 1)
    ape, weight = rng.normal(size=(ratio, columns)), rng.normal(size=format.dim)
    table = cos_sin_table(1100, theta=160000, yarn=Yarn())
    return Layer(ratio, format, hadamard, ape.astype(np.float32), weight.astype(np.float32), table)


def sequence(rng: np.random.Generator, like: Layer, length: int) -> Float32:
    return rng.normal(size=(length, 2 * like.columns)).astype(np.float32)


class Requests:
    """Of one compressor, with their rings and pages; rings, pages and what no step has are poisoned."""

    def __init__(
        self,
        device: Device,
        of: Layer,
        rng: np.random.Generator,
        requests: int,
        max_tokens: int,
        cap: int,
        width: int = 3,
        page_size: int | None = None,
    ) -> None:
        self.layer, self.page_size = of, page_size or (4 if of.ratio == 4 else 2)
        self.tokens = StepTokens(device, max_tokens=max_tokens, max_requests=requests)
        self.ring_of = rng.permutation(requests + 1)[:requests].astype(np.int32)
        self.table = rng.permutation(requests * width + 2)[: requests * width].reshape(requests, width).astype(np.int32)
        pool = np.full((requests * width + 2, of.format.page_bytes(self.page_size)), POISON, np.uint8)
        self.saved = np.full((requests + 1, cap, 2 * of.columns), np.nan, np.float32)
        self.device, self.made = device, list[Buffer]()
        self.q_starts, self.lengths = self.array(np.zeros(requests + 1, np.int32)), self.array(self.ring_of)
        self.host = np.full((max_tokens, 2 * of.columns), np.nan, np.float32)
        self.ug, self.state, self.rings = self.array(self.host), self.array(self.saved), self.array(self.ring_of)
        self.weights = tuple(self.array(each) for each in (of.ape, of.weight, of.cos_sin))
        self.pool, self.block_table = self.array(pool), self.array(self.table)
        self.pages = Pages(of.format, self.pool, self.block_table, self.page_size)

    def array(self, host: NDArray[Any]) -> Buffer:
        self.made.append(self.device.array(host))
        return self.made[-1]

    def __enter__(self) -> Requests:
        return self

    def __exit__(self, *_: object) -> None:
        self.tokens.close()
        for each in self.made:
            each.close()

    def bring(self, rows: Sequence[Float32], starts: Sequence[int]) -> NDArray[np.int32]:
        """The rows of each request, the first one at its position; gives them as the kernels will see them."""
        counts = [len(each) for each in rows]
        q_starts = np.append(0, np.cumsum(counts)).astype(np.int32)
        lengths = np.array([start + n if n else -5 for start, n in zip(starts, counts, strict=True)], np.int32)
        self.host = np.full_like(self.host, np.nan)
        self.host[: q_starts[-1]] = np.concatenate(rows)
        self.ug.copy_from(self.host)
        self.q_starts.copy_from(q_starts)
        self.lengths.copy_from(lengths)
        # Pages that this step does not need are not there.
        table = np.full(self.table.shape, NOWHERE, np.int32)
        for request, (start, n) in enumerate(zip(starts, counts, strict=True)):
            entries = np.arange(start // self.layer.ratio, (start + n) // self.layer.ratio)
            at = entries // self.page_size % table.shape[1]
            table[request, at] = self.table[request, at]
        self.block_table.copy_from(table)
        return step_tokens(q_starts, lengths, self.tokens.max_tokens)[0]

    def compress(self, where: Stream | Graph, **how: Any) -> Any:
        ratio, hadamard = self.layer.ratio, self.layer.hadamard
        ape, weight, cos_sin = self.weights
        operands = (self.tokens, self.ug, self.state, self.rings, ape, weight, cos_sin, self.pages)
        return kv_compress(where, *operands, ratio=ratio, hadamard=hadamard, **how)

    def step(self, stream: Stream, rows: Sequence[Float32], starts: Sequence[int]) -> None:
        tokens = self.bring(rows, starts)
        plan_tokens(stream, self.tokens, self.q_starts, self.lengths)
        self.compress(stream)
        self.expect_saved(stream, tokens)

    def expect_saved(self, stream: Stream, tokens: NDArray[np.int32]) -> None:
        self.saved = ref.kv_save(tokens, self.host, self.saved, self.ring_of)
        assert_equal_bits(self.state.numpy(stream), self.saved)

    def records(self, stream: Stream, counts: Sequence[int]) -> list[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
        """Values and scales of so many entries of each request; nothing else was touched."""
        pool = self.pool.numpy(stream)
        numbers = [np.arange(count) for count in counts]
        slots = [
            self.table[request, each // self.page_size % self.table.shape[1]] * self.page_size + each % self.page_size
            for request, each in enumerate(numbers)
        ]
        found = [self.layer.format.rows(pool, each, self.page_size) for each in slots]
        blank = np.full_like(pool, POISON)
        for each, (values, scales) in zip(slots, found, strict=True):
            self.layer.format.put(blank, each, self.page_size, values, scales)
        assert_equal_bits(pool, blank)
        return found

    def rows(self, stream: Stream, counts: Sequence[int]) -> list[Float32]:
        return [self.layer.format.decode(*each) for each in self.records(stream, counts)]


def assert_rows(got: Float32, want: Float32) -> None:
    """Of a bfloat16 format."""
    error = np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)
    assert error.max(initial=0) < 5e-3
    assert_close(got, want, rtol=2**-8, atol=2e-5, why="one rounding to bfloat16, and sums of float32")


def chunks(rng: np.random.Generator, length: int, most: int) -> list[int]:
    """Where a sequence of this length may be cut."""
    cuts = [0]
    while cuts[-1] < length:
        cuts.append(min(length, cuts[-1] + int(rng.integers(1, most + 1))))
    return cuts


# ---- the reference -------------------------------------------------------------------------------------------------


def by_definition(of: Layer, x: Float32, j: int, mistake: str = "") -> NDArray[np.float64]:
    """Entry j of a sequence, slot by slot."""
    ratio, dim = of.ratio, len(of.weight)
    u, g = x[:, : of.columns].astype(np.float64), x[:, of.columns :].astype(np.float64)
    slots = []  # token, and the first of its columns
    if ratio == 4 and mistake != "nothing of the tokens before":
        slots += [(4 * (j - 1) + i, 0) for i in range(4)]
    slots += [(ratio * j + i, dim if ratio == 4 else 0) for i in range(ratio)]
    if mistake == "halves swapped":
        slots = [(token, dim - column) for token, column in slots]
    values, scores = [], []
    for token, first in slots:
        columns = slice(first, first + dim)
        if token < 0:
            if mistake == "a score of 0 before the first token":
                values.append(np.zeros(dim))
                scores.append(np.zeros(dim))
            continue
        bias = of.ape[(token + (mistake == "ape of the next token")) % ratio, columns]
        values.append(u[token, columns])
        scores.append(g[token, columns] + (bias if mistake != "no ape" else 0))
    weights = np.exp(scores) / np.exp(scores).sum(axis=0)
    p = (weights * values).sum(axis=0)
    y: NDArray[np.float64] = of.weight * p / np.sqrt((p**2).mean() + (1e-6 if mistake != "no norm" else 1e9))
    anchor = {"turned by the last token": ratio * j + ratio - 1, "turned by the number": j}.get(mistake, ratio * j)
    if mistake != "not turned":
        cos, sin = np.split(of.cos_sin[anchor].astype(np.float64), 2)
        turned = (y[-64::2] + 1j * y[-63::2]) * (cos + 1j * sin)
        y[-64::2], y[-63::2] = turned.real, turned.imag
    return y


LENGTHS = {4: 22, 128: 600}  # of a sequence of five or four entries


def off_by(got: NDArray[Any], want: NDArray[Any]) -> float:
    return float((np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)).max())


@pytest.mark.parametrize("ratio", [4, 128])
def test_the_reference_is_what_is_defined(rng: np.random.Generator, ratio: int) -> None:
    of = layer(rng, ratio, KV_BF16)
    x = sequence(rng, of, LENGTHS[ratio])
    want = np.array([by_definition(of, x, j) for j in range(len(x) // ratio)])
    assert off_by(of.entries(x), want) < 1e-6


MISTAKES = {
    4: ("halves swapped", "nothing of the tokens before", "a score of 0 before the first token"),
    128: ("no norm",),
}
EITHER = ("no ape", "ape of the next token", "turned by the last token", "turned by the number", "not turned")


@pytest.mark.parametrize(
    ("ratio", "mistake"), [(ratio, mistake) for ratio, own in MISTAKES.items() for mistake in own + EITHER]
)
def test_a_mistake_is_larger_than_what_is_allowed(rng: np.random.Generator, ratio: int, mistake: str) -> None:
    of = layer(rng, ratio, KV_BF16)
    x = sequence(rng, of, LENGTHS[ratio])
    wrong = np.array([by_definition(of, x, j, mistake) for j in range(len(x) // ratio)], np.float32)
    assert off_by(wrong, of.entries(x)) > 0.05
    with pytest.raises(AssertionError):
        assert_rows(wrong, of.entries(x))


@pytest.mark.parametrize("ratio", [4, 128])
def test_the_reference_makes_the_same_of_any_chunks(rng: np.random.Generator, ratio: int) -> None:
    of = layer(rng, ratio, KV_BF16)
    x = sequence(rng, of, LENGTHS[ratio])
    cap = 2 * ratio
    state, rings = np.full((3, cap, 2 * of.columns), np.nan, np.float32), np.array([9, 2], np.int32)
    cuts = chunks(rng, len(x), 3 * ratio)
    found = []
    for start, end in pairwise(cuts):
        tokens = np.array([[1, position, start, end] for position in range(start, end)], np.int32)
        made, rows = ref.entries(tokens, x[start:end], state, rings, *of[3:], ratio=ratio)
        assert made.tolist() == [[1, j] for j in range(start // ratio, end // ratio)]
        found.append(rows)
        state = ref.kv_save(tokens, x[start:end], state, rings)
    assert_equal_bits(np.concatenate(found), of.entries(x))
    assert np.isnan(state[:2]).all()


# ---- the ops' checks -----------------------------------------------------------------------------------------------


class Gpu(Recorder):
    """A graph of a device that is not there."""

    def __init__(self, *capability: int) -> None:
        super().__init__()
        self.device: Any = SimpleNamespace(compute_capability=capability)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    monkeypatch.setattr(ops, "kernel", lambda device, source, name: f"{source}: {name}")
    return Gpu(9, 0)


MAX_TOKENS, MAX_REQUESTS = 5000, 3


@pytest.fixture
def tokens(device: Device) -> Iterator[StepTokens]:
    with StepTokens(device, max_tokens=MAX_TOKENS, max_requests=MAX_REQUESTS) as tokens:
        yield tokens


FLOAT = np.float32
KEYS = {
    "ug": Foreign((MAX_TOKENS, 512), FLOAT, 1 << 30),
    "state": Foreign((7, 8, 512), FLOAT, 2 << 30),
    "ape": Foreign((4, 256), FLOAT, 3 << 30),
    "weight": Foreign((128,), FLOAT, 4 << 30),
}
OF_128 = {
    "ug": Foreign((MAX_TOKENS, 1024), FLOAT, 1 << 30),
    "state": Foreign((7, 128, 1024), FLOAT, 2 << 30),
    "ape": Foreign((128, 512), FLOAT, 3 << 30),
    "ratio": 128,
}


def pages(format: Format, page_size: int = 64, requests: int = MAX_REQUESTS, address: int = 5 << 30) -> Pages:
    pool = Foreign((9, format.page_bytes(page_size)), np.uint8, address)
    return Pages(format, pool, Foreign((requests, 4), np.int32, 6 << 30), page_size)


def fit(**changes: Any) -> dict[str, Any]:
    """Operands that fit, far from each other, save for ``changes``."""
    operands = {
        "ug": Foreign((MAX_TOKENS, 2048), FLOAT, 1 << 30),
        "state": Foreign((7, 8, 2048), FLOAT, 2 << 30),
        "rings": Foreign((MAX_REQUESTS,), np.int32, 7 << 30),
        "ape": Foreign((4, 1024), FLOAT, 3 << 30),
        "weight": Foreign((512,), FLOAT, 4 << 30),
        "cos_sin": Foreign((99, 64), FLOAT, 8 << 30),
        "entries": pages(KV_FP8),
        "ratio": 4,
    }
    return operands | changes


@pytest.mark.parametrize(
    ("changes", "capability", "function", "grid", "block"),
    [
        ({}, (9, 0), "4,0,false,1", 1250, 256),
        ({"entries": pages(KV_BF16)}, (9, 0), "4,1,false,1", 1250, 256),
        (KEYS | {"entries": pages(KEY_MXFP4), "hadamard": True}, (9, 0), "4,2,true,1", 313, 128),
        (KEYS | {"entries": pages(KEY_FP8)}, (9, 0), "4,3,false,1", 313, 128),
        (KEYS | {"entries": pages(KEY_BF16)}, (9, 0), "4,4,false,1", 313, 128),
        (OF_128, (9, 0), "128,0,false,8", 8 * 157, 256),
        (OF_128, (12, 0), "128,0,false,8", 8 * 157, 256),
        (OF_128, (8, 9), "128,0,false,1", 157, 256),
    ],
)
def test_the_kernel_goes_by_the_operands(
    gpu: Any,
    tokens: StepTokens,
    changes: dict[str, Any],
    capability: tuple[int, int],
    function: str,
    grid: int,
    block: int,
) -> None:
    gpu.device.compute_capability = capability
    kv_compress(gpu, tokens, **fit(**changes), after="before", name="made")
    ((kernel, how),) = gpu.calls
    assert kernel == f"kv_compress: kv_compress<{function}>"
    assert (how["grid"], how["block"], how["after"], how["name"]) == (grid, block, "before", "made")
    assert how.get("cluster", 1) == int(function[-1])


def test_a_team_has_a_row_of_a_small_step(gpu: Any, device: Device) -> None:
    for max_tokens, grids in ((1, (1, 8)), (100, (100, 800)), (1030, (515, 8 * 115))):
        with StepTokens(device, max_tokens=max_tokens, max_requests=MAX_REQUESTS) as tokens:
            for changes, grid in zip(({}, OF_128), grids, strict=True):
                ug = Foreign((max_tokens, 1024 if changes else 2048), FLOAT, 1 << 30)
                kv_compress(gpu, tokens, **fit(**(changes | {"ug": ug})))
                assert gpu.calls[-1][1]["grid"] == grid


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no ratio": ({"ratio": 8}, ValueError, "ratio: wanted 4 or 128, got 8"),
    "half a ratio": ({"ratio": 4.0}, TypeError, "ratio: wanted an integer, got 4.0"),
    "no tokens": ({"tokens": 5}, TypeError, "tokens: wanted a StepTokens, got int"),
    "ug in host memory": ({"ug": np.zeros((MAX_TOKENS, 2048), FLOAT)}, TypeError, "ug: .*in host memory"),
    "ug of half": ({"ug": Foreign((MAX_TOKENS, 2048), np.float16)}, TypeError, "ug: .*float32, got float16"),
    "few rows": (
        {"ug": Foreign((MAX_TOKENS - 1, 2048), FLOAT)},
        ValueError,
        r"ug: wanted shape \(5000, 512 or 2048\), got \(4999, 2048\)",
    ),
    "columns of keys": (
        {role: KEYS[role] for role in ("ug", "state")},
        ValueError,
        r"ug: wanted shape \(5000, 2048\), got \(5000, 512\)",
    ),
    "columns of 128": ({"ug": OF_128["ug"]}, ValueError, r"ug: wanted shape .* got \(5000, 1024\)"),
    "odd address": ({"ug": Foreign((MAX_TOKENS, 2048), FLOAT, 8)}, ValueError, "ug: wanted an address aligned to 16"),
    "a short ring": (
        {"state": Foreign((7, 7, 2048), FLOAT)},
        ValueError,
        r"state: wanted shape \(rings, 8 or more, 2048\), got \(7, 7, 2048\)",
    ),
    "a short ring of 128": (
        OF_128 | {"state": Foreign((7, 127, 1024), FLOAT)},
        ValueError,
        r"state: wanted shape \(rings, 128 or more, 1024\)",
    ),
    "no rings": ({"state": Foreign((0, 8, 2048), FLOAT)}, ValueError, "state: wanted shape .rings"),
    "few rings": ({"rings": Foreign((2,), np.int32)}, ValueError, r"rings: wanted shape \(3,\), got \(2,\)"),
    "rings of 64 bits": ({"rings": Foreign((3,), np.int64)}, TypeError, "rings: .*int32, got int64"),
    "ape of 128": ({"ape": OF_128["ape"]}, ValueError, r"ape: wanted shape \(4, 1024\), got \(128, 512\)"),
    "weight of keys": ({"weight": KEYS["weight"]}, ValueError, r"weight: wanted shape \(512,\), got \(128,\)"),
    "angles of 128": ({"cos_sin": Foreign((99, 128), FLOAT)}, ValueError, r"cos_sin: wanted .*got \(99, 128\)"),
    "no angles": ({"cos_sin": Foreign((0, 64), FLOAT)}, ValueError, r"cos_sin: wanted shape \(max_position, 64\)"),
    "no pages": ({"entries": 5}, TypeError, "entries: wanted a Pages, got int"),
    "keys of 128 tokens": (
        OF_128 | {"entries": pages(KEY_FP8)},
        ValueError,
        "entries: wanted rows of fp8 of 512 or bf16 of 512, got fp8 of 128",
    ),
    "another table": ({"entries": pages(KV_FP8, requests=2)}, ValueError, "entries: block_table: wanted shape .3, "),
    "a wide transform": ({"hadamard": True}, ValueError, "hadamard is for rows of 128 elements, got 512"),
    "eps": ({"eps": -1e-6}, ValueError, "eps: wanted a number from 0 on, got -1e-06"),
    "NaN": ({"eps": float("nan")}, ValueError, "eps: wanted a number from 0 on, got nan"),
    "state in ug": ({"state": Foreign((7, 8, 2048), FLOAT, 1 << 30)}, ValueError, "state at .* overlaps ug at"),
    "pool in state": (
        {"entries": pages(KV_FP8, address=2 << 30)},
        ValueError,
        "state at .* overlaps entries.pool at",
    ),
    "pool in ape": ({"entries": pages(KV_FP8, address=3 << 30)}, ValueError, "entries.pool at .* overlaps ape at"),
}


@pytest.mark.parametrize(("changes", "error", "message"), WRONG.values(), ids=WRONG)
def test_operands_that_do_not_fit_are_refused(
    gpu: Any, tokens: StepTokens, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^kv_compress: {message}"):
        kv_compress(gpu, **({"tokens": tokens} | fit(**changes)))
    assert not gpu.calls


def test_what_is_saved_overlaps_nothing(gpu: Any, tokens: StepTokens) -> None:
    operands = {role: fit()[role] for role in ("ug", "rings", "ratio")}
    state = Foreign((2, 8, 2048), FLOAT, (1 << 30) + 4096)
    with pytest.raises(ValueError, match=r"^kv_save: state at .* overlaps ug at"):
        kv_save(gpu, tokens, state=state, **operands)
    with pytest.raises(ValueError, match=r"^kv_save: state: wanted shape \(rings, 8 or more, 2048\)"):
        kv_save(gpu, tokens, state=Foreign((2, 8, 512), FLOAT, 2 << 30), **operands)


# ---- the kernels ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ratio", "format", "length"), [(4, KV_BF16, 17), (128, KV_FP8, 260)])
def test_a_prompt_may_be_split_anywhere(
    device: Device, stream: Stream, rng: np.random.Generator, ratio: int, format: Format, length: int
) -> None:
    """The longer one at 29 places: those beside entries' ends, and others each time."""
    of = layer(rng, ratio, format)
    x = sequence(rng, of, length)
    splits = list(range(length + 1))
    if length > 100:
        ends = [0, 1, 2, 126, 127, 128, 129, 254, 255, 256, 257, 259, 260]
        splits = ends + rng.permutation([n for n in splits if n not in ends])[: 29 - len(ends)].tolist()
    whole: tuple[NDArray[np.uint8], ...] = ()
    with Requests(device, of, rng, len(splits), len(splits) * length + 3, 2 * 4 if ratio == 4 else 128) as requests:
        requests.step(stream, [x[:split] for split in splits], [0] * len(splits))
        requests.step(stream, [x[split:] for split in splits], splits)
        for record in requests.records(stream, [length // ratio] * len(splits)):
            whole = whole or record
            for part, of_whole in zip(record, whole, strict=True):
                assert_equal_bits(part, of_whole)
    got, want = format.decode(*whole), of.entries(x)
    if format == KV_BF16:
        assert_rows(got, want)
    else:
        assert off_by(got, want) < 0.04  # of e4m3: half a unit in the last place is up to 1/16


@pytest.mark.parametrize(
    ("ratio", "format", "most", "max_tokens"), [(4, KV_BF16, 3, 1030), (4, KV_BF16, 40, 250), (128, KV_BF16, 300, 1210)]
)
def test_ragged_steps_give_the_rows_of_the_reference(
    device: Device,
    stream: Stream,
    rng: np.random.Generator,
    without_cluster: None,
    ratio: int,
    format: Format,
    most: int,
    max_tokens: int,
) -> None:
    """A team of threads may have several rows that end an entry: where there is room for 1210 and 128 make one, ten."""
    of = layer(rng, ratio, format)
    lengths = [9, 0, 46, 3, 47, 24] if ratio == 4 else [127, 383, 0, 257]
    x = [sequence(rng, of, length) for length in lengths]
    cap = int(rng.choice([8, 11])) if ratio == 4 else 128
    with Requests(device, of, rng, len(x), max_tokens, cap, width=6) as requests:
        at = [0] * len(x)
        while at != lengths:
            ends = [min(n, start + int(rng.integers(0, most + 1))) for n, start in zip(lengths, at, strict=True)]
            requests.step(stream, [each[i:j] for each, i, j in zip(x, at, ends, strict=True)], at)
            at = ends
        for got, each in zip(requests.rows(stream, [n // ratio for n in lengths]), x, strict=True):
            assert_rows(got, of.entries(each))


def test_a_record_is_the_row_encoded(
    device: Device, stream: Stream, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with one block for each and with a cluster, which so give the same bits."""
    narrow = layer(rng, 128, KV_FP8)
    narrow.weight[3:70] *= np.float32(1e-4)  # a block of elements so small that its scale is not less
    x = [sequence(rng, narrow, n * 128) for n in (3, 2)]
    records = []
    for of in (narrow, narrow._replace(format=KV_BF16)):
        monkeypatch.setattr("drvkit.ops.kv_compress.CLUSTER", 8 if of is narrow else 1)
        with Requests(device, of, rng, len(x), sum(map(len, x)) + 3, 128, width=4) as requests:
            requests.step(stream, x, [0] * len(x))
            records.append(requests.records(stream, [3, 2]))
    for (values, scales), wide in zip(*records, strict=True):
        want_values, want_scales = KV_FP8.encode(KV_BF16.decode(*wide))
        assert_equal_bits(values, want_values)
        assert_equal_bits(scales, want_scales)


def from_ties(x: Float32) -> NDArray[np.float64]:
    """How far each is from the middle between two bfloat16."""
    middle = ((x.view(np.uint32) & 0xFFFF0000) + 0x8000).view(np.float32)
    return np.abs(x.astype(np.float64) - middle)


@pytest.mark.parametrize("format", [KEY_MXFP4, KEY_FP8, KV_FP8], ids=["mxfp4", "fp8", "rows"])
def test_bytes_are_those_of_the_reference_but_for_ties(
    device: Device, stream: Stream, rng: np.random.Generator, format: Format
) -> None:
    """Where an element is within float32's errors of the middle between two bfloat16; they are listed."""
    of = layer(rng, 4, format, hadamard=format == KEY_MXFP4)
    x = [sequence(rng, of, n) for n in (150, 3, 163)]
    pages = {"width": 1, "page_size": 512} if format == KEY_FP8 else {"width": 11}  # one for each, or more
    with Requests(device, of, rng, 3, 320, 8, **pages) as requests:
        requests.step(stream, [each[:70] for each in x], [0] * 3)
        requests.step(stream, [each[70:] for each in x], [min(70, len(each)) for each in x])
        records = requests.records(stream, [len(each) // 4 for each in x])
    got = [np.concatenate(each) for each in zip(*records, strict=True)]
    rows = np.concatenate([of.entries(each) for each in x])
    want = format.encode(rows)
    assert_equal_bits(got[1], want[1])
    differ = np.nonzero(format.decode(*got) != format.decode(*want))
    print(*(f"entry {row}, element {i}: {rows[row, i]!r}" for row, i in zip(*differ, strict=True)), sep="\n")
    assert (from_ties(rows)[differ] < 2**-20 * np.sqrt((rows**2).mean(axis=1))[differ[0]]).all()
    assert len(differ[0]) < 2e-3 * rows.size


def test_scores_of_any_size(device: Device, stream: Stream, rng: np.random.Generator) -> None:
    of = layer(rng, 4, KV_BF16)
    x = sequence(rng, of, 40)
    x[:, of.columns :] *= np.array([1, 1e3, 1e30, 0, 1e-30] * 8, np.float32)[:, None]
    # Of one channel, in the first halves of tokens 3 and 13: entries 1 and 4 have it, and no others.
    x[[3, 13], 5] = np.nan
    with Requests(device, of, rng, 1, 40, 8) as requests:
        requests.step(stream, [x], [0])
        (got,) = requests.rows(stream, [10])
    nan = np.isnan(got).all(axis=1)
    assert nan.tolist() == [j in (1, 4) for j in range(10)]
    assert_rows(got[~nan], of.entries(x)[~nan])


def in_pieces(
    device: Device,
    stream: Stream,
    rng: np.random.Generator,
    of: Layer,
    x: Float32,
    start: int,
    cap: int,
    pieces: int,
    width: int = 999,
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Entries of a sequence whose second step begins at ``start`` and has a launch for each piece, the last first."""
    count = len(x) // of.ratio
    with Requests(device, of, rng, 1, len(x), cap, width) as requests:
        requests.step(stream, [x[:start]], [0])
        tokens = requests.bring([x[start:]], [start])
        for piece in reversed(np.array_split(np.arange(len(x) - start), pieces)):
            some = np.tile(np.array([-1, 0, 0, 0], np.int32), (len(x), 1))
            some[piece] = tokens[piece]
            requests.tokens.rows.copy_from(some)
            requests.compress(stream)
        requests.expect_saved(stream, tokens)
        (found,) = requests.records(stream, [min(count, width * requests.page_size)])
        return found


@pytest.mark.parametrize(("ratio", "format", "cap"), [(4, KV_BF16, 8), (4, KV_BF16, 13), (128, KV_FP8, 130)])
def test_rows_of_a_step_may_go_in_any_order(
    device: Device, stream: Stream, rng: np.random.Generator, ratio: int, format: Format, cap: int
) -> None:
    """Nothing orders the blocks of a launch: none may replace what another one has yet to read."""
    of = layer(rng, ratio, format)
    for start in rng.choice(np.arange(ratio - 1, 3 * ratio), 3 if ratio == 4 else 1, replace=False).tolist():
        for rows in (ratio + 1, cap + 2, 2 * cap + ratio):
            x = sequence(rng, of, start + rows)
            want, want_scales = in_pieces(device, stream, rng, of, x, start, cap, 1)
            got, scales = in_pieces(device, stream, rng, of, x, start, cap, min(rows, 9 if ratio == 4 else 4))
            assert_equal_bits(got, want)
            assert_equal_bits(scales, want_scales)


@pytest.mark.drvkit_check
def test_no_two_warps_race() -> None:
    rng, device = np.random.default_rng(), Device("cpu")
    of = layer(rng, 128, KV_FP8)
    x = [sequence(rng, of, n) for n in (262, 3)]
    with device.stream() as stream, Requests(device, of, rng, 2, 300, 130) as requests:
        requests.step(stream, [x[0][:100], x[1]], [0, 0])
        requests.step(stream, [x[0][100:], x[1][3:]], [100, 3])
        for each, (values, _) in zip(x, requests.records(stream, [2, 0]), strict=True):
            assert (values != of.format.encode(of.entries(each))[0]).sum() < 5
        requests.step(stream, [x[0][:1], x[1][:1]], [511, 127])  # of two entries, one after the other


def taken_back(
    device: Device, stream: Stream, rng: np.random.Generator, of: Layer, cap: int, drafts: int, start: int
) -> tuple[Float32, Float32]:
    """Rows where of a step from ``start`` on all tokens but the first are taken back, and by the reference."""
    x = sequence(rng, of, start + 1 + of.ratio)
    with Requests(device, of, rng, 1, len(x) + drafts, cap, width=99) as requests:
        requests.step(stream, [x[:start]], [0])
        wrong = sequence(rng, of, 1 + drafts)
        wrong[0] = x[start]
        requests.step(stream, [wrong], [start])
        requests.step(stream, [x[start + 1 :]], [start + 1])
        (got,) = requests.rows(stream, [max(len(x), start + 1 + drafts) // of.ratio])
    return got[: len(x) // of.ratio], of.entries(x)


@pytest.mark.parametrize("ratio", [4, 128])
def test_tokens_may_be_taken_back(
    device: Device, stream: Stream, rng: np.random.Generator, without_cluster: None, ratio: int
) -> None:
    of, window = layer(rng, ratio, KV_BF16), 8 if ratio == 4 else 128
    for drafts in (1, 3, 6):
        for start in range(4 * ratio - 6, 4 * ratio):
            if ratio == 4 or start % 5 == 0 or start % ratio == ratio - 2:
                assert_rows(*taken_back(device, stream, rng, of, window + drafts - 1, drafts, start))
        if drafts > 1:  # a ring that has a place less
            with pytest.raises(AssertionError):
                assert_rows(*taken_back(device, stream, rng, of, window + drafts - 2, drafts, 4 * ratio - 2))


def test_a_ring_may_have_been_another_requests(device: Device, stream: Stream, rng: np.random.Generator) -> None:
    of = layer(rng, 4, KV_BF16)
    with Requests(device, of, rng, 2, 40, 9, width=4) as requests:
        for lengths in ((13, 6), (2, 17), (30, 21)):
            x = [sequence(rng, of, n) for n in lengths]
            for start, end in ((0, 2), (2, 3), (3, 16), (16, 30)):
                requests.step(stream, [each[start:end] for each in x], [min(start, n) for n in lengths])
        for got, each in zip(requests.rows(stream, [7, 5]), x, strict=True):
            assert_rows(got, of.entries(each))


@pytest.mark.parametrize(("ratio", "format"), [(4, KV_BF16), (128, KV_FP8)])
def test_one_graph_serves_any_step(
    device: Device, stream: Stream, graph: Graph, rng: np.random.Generator, ratio: int, format: Format
) -> None:
    of = layer(rng, ratio, format)
    x = [sequence(rng, of, 2 * ratio + n) for n in (1, 0, 3)]
    ends = [
        [ratio + 1, 0, 2],
        [ratio + 2, 0, 3],
        [2 * ratio + 1, 5, 3],
        [2 * ratio + 1, 5, 3],
        [2 * ratio + 1, 6, 2 * ratio + 3],
    ]
    with Requests(device, of, rng, 3, 4 * ratio, 2 * ratio) as requests:
        planned = plan_tokens(graph, requests.tokens, requests.q_starts, requests.lengths)
        requests.compress(graph, after=planned, name="compress")
        with graph.instantiate() as exe:
            at = [0, 0, 0]
            for end in ends:
                tokens = requests.bring([each[i:j] for each, i, j in zip(x, at, end, strict=True)], at)
                exe.launch(stream)
                requests.expect_saved(stream, tokens)
                at = end
        del exe
        graphed = requests.records(stream, [n // ratio for n in at])
    with Requests(device, of, rng, 3, 6 * ratio + 4, 2 * ratio) as requests:
        requests.step(stream, [each[:n] for each, n in zip(x, at, strict=True)], [0, 0, 0])
        for got, want in zip(graphed, requests.records(stream, [n // ratio for n in at]), strict=True):
            for part, whole in zip(got, want, strict=True):
                assert_equal_bits(part, whole)


@pytest.mark.parametrize("ratio", [4, 128])
def test_saving_alone(device: Device, stream: Stream, rng: np.random.Generator, ratio: int) -> None:
    of = layer(rng, ratio, KV_BF16)
    cap = 11 if ratio == 4 else 128
    with Requests(device, of, rng, 4, 2 * cap + 20, cap) as requests:
        for starts, counts in (([0, 5, 9, 2], [3, 0, 1, 2]), ([3, 5, 1000, 0], [1, 2, cap + 7, cap])):
            tokens = requests.bring([sequence(rng, of, n) for n in counts], starts)
            plan_tokens(stream, requests.tokens, requests.q_starts, requests.lengths)
            kv_save(stream, requests.tokens, requests.ug, requests.state, requests.rings, ratio=ratio)
            requests.expect_saved(stream, tokens)
        requests.records(stream, [0] * 4)


def test_a_short_table_is_a_ring(device: Device, stream: Stream, rng: np.random.Generator) -> None:
    of = layer(rng, 4, KV_BF16)
    x = sequence(rng, of, 4 * 21)
    want = of.entries(x)[[16, 17, 18, 19, 20, 13, 14, 15]]
    for pieces in (1, 7):  # in one launch nothing orders the entries of one place
        assert_rows(KV_BF16.decode(*in_pieces(device, stream, rng, of, x, 10, 8, pieces, width=2)), want)


# ---- what only the device can see wrong ----------------------------------------------------------------------------


def step_without(device: Device, what: str, of: Layer, x: Float32) -> tuple[Float32, NDArray[np.uint8]]:
    """State, and the record of entry 2, after a step of request 0 at positions 3 to 11 that lacks something."""
    of = of._replace(cos_sin=of.cos_sin[: 8 if what == "cos_sin" else 12])
    requests = Requests(device, of, np.random.default_rng(5), 2, 9, 8)
    try:
        with device.stream() as stream:
            requests.bring([x[3:], x[:0]], [3, 0])
            requests.rings.copy_from(np.array([-1 if what == "ring" else 2, 99], np.int32))
            if what == "page":
                requests.block_table.copy_from(np.full((2, 3), 99, np.int32))
            plan_tokens(stream, requests.tokens, requests.q_starts, requests.lengths)
            requests.compress(stream)
            at = requests.table[0, :1] * requests.page_size + 2
            values, scales = of.format.rows(requests.pool.numpy(stream), at, requests.page_size)
            return requests.state.numpy(stream), np.concatenate([values[0], scales[0]])
    except DriverError:
        device.driver.cuDevicePrimaryCtxReset(device.handle)
        raise
    finally:
        ops.release(device)
        requests.__exit__()


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("ring", r"rings\[0\] is -1: there are 3"),
        ("page", r"block_table\[0\]\[0\] is 99: the pool has 8 pages"),
        ("cos_sin", "request 0 has an entry at position 8: cos_sin has 8 rows"),
    ],
)
def test_the_cpu_device_reports_what_is_missing(
    capfd: pytest.CaptureFixture[str], rng: np.random.Generator, what: str, told: str
) -> None:
    of = layer(rng, 4, KEY_MXFP4, hadamard=True)
    with pytest.raises(DriverError, match="LAUNCH_FAILED"):
        step_without(Device("cpu:5"), what, of, sequence(rng, of, 12))
    assert re.search(told, capfd.readouterr().out)


def test_a_gpu_stays_inside_its_memory(device: Device, rng: np.random.Generator, with_option: WithOption) -> None:
    of = layer(rng, 4, KEY_FP8)
    x = sequence(rng, of, 12)
    with_option(device, "kv_compress", "-UDRVKIT_CPU_DEVICE")
    state, record = step_without(device, "ring", of, x)
    assert np.isnan(state).all()
    assert (record[:128] == POISON).all()
    state, record = step_without(device, "page", of, x)
    assert (record == POISON).all()
    assert_equal_bits(state[2], np.roll(x[4:], 4, axis=0))
    state, record = step_without(device, "cos_sin", of, x)
    assert_equal_bits(state[2], np.roll(x[4:], 4, axis=0))
    of.cos_sin[8] = of.cos_sin[7]
    values, scales = KEY_FP8.encode(of.entries(x)[2:])
    assert_equal_bits(record[128:], scales[0])
    assert (record[:128] != values[0]).sum() < 5  # float32's errors, where an element is between two numbers
