"""The next token of each row: the references by hand and against searches, Philox against its published vectors, the
checks of the ops, and the kernels against the references, of which no token may differ."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from compare import assert_equal_bits
from numpy.typing import NDArray
from standins import Foreign

from drvkit import ops
from drvkit.device import Device, Stream
from drvkit.driver import DriverError
from drvkit.graph import Graph
from drvkit.ops.sample import argmax, sample
from drvkit.ops.top_k import top_k
from drvkit.ref import sample as ref
from drvkit.ref.top_k import top_k as top_k_ref
from drvkit.source import Source

if TYPE_CHECKING:
    from conftest import WithOption

Rng = np.random.Generator
Logits = NDArray[np.float32]
f32, inf, nan = np.float32, np.inf, np.nan
POISON = -77


@pytest.fixture(autouse=True)
def few_instances(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the CPU device each takes a while to compile."""
    if "device" in request.fixturenames and request.getfixturevalue("device").driver.kind == "cpu":
        monkeypatch.setattr("drvkit.ops.top_k.MOST_BLOCKS", 2)


def among(*values: Any) -> Callable[[Rng, int], Logits]:
    return lambda rng, n: rng.choice(np.array(values, f32), n)


HARD: dict[str, Callable[[Rng, int], Logits]] = {
    "normal": lambda rng, n: rng.normal(size=n).astype(f32),
    "negative": lambda rng, n: -rng.exponential(size=n).astype(f32) - 1,
    "constant": among(-3.5),
    "zeros of both signs": among(0.0, -0.0),
    "two values": among(1.0, np.nextafter(f32(1), f32(2))),
    "around zero": among(1e-45, 0.0, -1e-45),
    "any bits": lambda rng, n: rng.integers(0, 2**32, n, np.uint32).view(f32),
    "mostly NaN": among(nan, nan, nan, 0.0, 1.0, -inf),
    "none": among(-inf, nan, -nan),
    "NaN": among(nan),
    "infinite": among(inf, -inf, 1.0),
    "lowest": among(-inf, np.finfo(f32).min),
    "rising": lambda rng, n: np.arange(n, dtype=f32),
    "falling": lambda rng, n: -np.arange(n, dtype=f32),
}


def hard_rows(rng: Rng, width: int) -> Logits:
    return np.stack([make(rng, width) for make in HARD.values()])


def run_argmax(stream: Stream, logits: Any, counts: list[int] | None = None) -> NDArray[np.int32]:
    device, rows = stream.device, len(logits)
    with (
        device.array(np.full(rows + 2, POISON, np.int32)) as memory,
        device.array(np.array(counts or [0], np.int32)) as lengths,
    ):
        argmax(stream, logits, memory[1:-1], counts=lengths if counts else None)
        got = memory.numpy(stream)
    assert got[0] == got[-1] == POISON
    return got[1:-1]


def best_of(stream: Stream, logits: Logits, counts: list[int] | None = None) -> NDArray[np.int32]:
    """By the kernel. Behind rows, and in rows that are padding, stands what the CPU device lets nobody read."""
    rows, width = logits.shape
    with stream.device.empty((rows, -(-width // 4) * 4 + 8), f32) as memory:
        for row, of_row in enumerate(logits):
            if counts is None or counts[row] > 0:
                memory[row, 4 : 4 + width].copy_from(of_row)
        return run_argmax(stream, memory[:, 4 : 4 + width], counts)


class Draw:
    """What `sample` takes, of the host."""

    def __init__(self, rng: Rng, rows: int, k: int, vocabulary: int, kind: str = "normal") -> None:
        self.logits = (
            np.stack([HARD[kind](rng, vocabulary) for _ in range(rows)]) if kind else hard_rows(rng, vocabulary)
        )
        rows = len(self.logits)
        self.candidates = np.full((rows, k), -1, np.int32)
        for of_row in self.candidates:
            count = min(k, vocabulary) if rng.random() < 0.5 else int(rng.integers(0, min(k, vocabulary) + 1))
            of_row[:count] = np.sort(rng.choice(vocabulary, count, replace=False))
        self.temperature = rng.choice(np.array([0.1, 0.7, 1, 1.5, 100, 0, -1, nan, inf, 1e-45], f32), rows)
        self.top_p = rng.choice(np.array([0, 0.1, 0.5, 0.9, 0.999, 1, 1.5, -1, nan], f32), rows)
        self.seeds = rng.integers(0, 2**64, rows, np.uint64)
        self.counters = rng.integers(1, 2**31, rows, np.int32)
        self.counters[rng.random(rows) < 0.1] = rng.choice([0, -1, -(2**31)])

    @property
    def per_row(self) -> dict[str, NDArray[Any]]:
        return {role: getattr(self, role) for role in ("temperature", "top_p", "seeds", "counters")}

    def want(self) -> NDArray[np.int32]:
        return ref.sample(self.logits, self.candidates, **self.per_row)


def drawn(stream: Stream, draw: Draw, at_once: bool = False) -> NDArray[np.int32]:
    """By the kernel. In rows that are padding, and beside candidates, stands what the CPU device lets nobody read; to
    copy the rest takes long, and ``at_once`` copies all."""
    device = stream.device
    rows, width = draw.logits.shape
    with (
        device.empty((rows, -(-width // 4) * 4 + 4), f32) as logits,
        device.empty(draw.candidates.shape, np.int32) as candidates,
        device.empty(rows, f32) as temperature,
        device.empty(rows, f32) as top_p,
        device.empty(rows, np.uint64) as seeds,
        device.array(draw.counters) as counters,
        device.array(np.full(rows + 2, POISON, np.int32)) as memory,
    ):
        per_row: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "seeds": seeds}
        for row in () if at_once else np.flatnonzero(draw.counters > 0).tolist():
            here = slice(row, row + 1)
            candidates[here].copy_from(draw.candidates[here])
            for role, to in per_row.items():
                to[here].copy_from(draw.per_row[role][here])
            for at in set(draw.candidates[row].tolist()) - {-1} if width < 100 else ():
                logits[here, at : at + 1].copy_from(draw.logits[here, at : at + 1])
            if width >= 100:
                logits[here, :width].copy_from(draw.logits[here])
        if at_once:
            logits[:, :width].copy_from(draw.logits)
            candidates.copy_from(draw.candidates)
            for role, to in per_row.items():
                to.copy_from(draw.per_row[role])
        sample(stream, logits[:, :width], candidates, memory[1:-1], counters=counters, **per_row)
        got = memory.numpy(stream)
    assert got[0] == got[-1] == POISON
    return got[1:-1]


# ---- the references ------------------------------------------------------------------------------------------------


def test_the_best_by_hand() -> None:
    logits = np.array([[1, 3, 2, 3], [-0.0, 0, -1, 0], [nan, -inf, -5, nan], [nan, -inf, nan, -inf]], f32)
    assert ref.argmax(logits).tolist() == [1, 0, 2, -1]
    assert ref.argmax(logits, np.array([0, 7, -1, 1], np.int32)).tolist() == [-1, 0, -1, -1]
    assert ref.argmax(np.array([[-1, inf, inf]], f32)).tolist() == [1]


def test_the_best_against_a_search(rng: Rng) -> None:
    logits = hard_rows(rng, 60)
    for row, got in enumerate(ref.argmax(logits)):
        best = -1
        for i, logit in enumerate(logits[row].tolist()):
            if logit > (logits[row, best] if best >= 0 else -inf):
                best = i
        assert got == best, list(HARD)[row]


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_what_random123_publishes(counter: str, key: str, words: str) -> None:
    def numbers(text: str) -> list[int]:
        return [int(word, 16) for word in text.split()]

    assert ref.philox(numbers(counter), numbers(key)) == numbers(words)


def test_weights_are_nearly_those_of_the_exact_exponential(rng: Rng) -> None:
    for temperature in (f32(0.05), f32(1), f32(30)):
        logits = np.sort(rng.normal(size=2000) * rng.choice([1e-3, 1, 9])).astype(f32)[::-1]
        exact = np.exp((logits.astype(np.float64) - logits[0]) / float(temperature))
        weights = ref.weights_of(logits, temperature)
        assert weights[0] == 2**30
        np.testing.assert_allclose(weights / 2**30, exact, rtol=0, atol=2**-22)


def test_the_kernel_has_the_powers_that_the_reference_has() -> None:
    """A last bit that differs would rarely change a token."""
    (listed,) = re.findall(r"kTaylor\[\] = \{(.*?)\}", Source.find("sample").text, re.DOTALL)
    assert [f32(number.strip().removesuffix("f")) for number in listed.split(",")] == ref.TAYLOR


def test_weights_by_hand() -> None:
    def weights(*logits: float, temperature: float = 1) -> list[int]:
        return [int(weight) for weight in ref.weights_of(np.array(logits, f32), f32(temperature))]

    assert weights(5, 5, -inf) == [2**30, 2**30, 0]
    assert weights(0, -math.log(2), -2 * math.log(2), temperature=1)[1:] == pytest.approx([2**29, 2**28], rel=2**-22)
    assert weights(0, -15, -15 * math.log(2), temperature=0.5)[1:] == [0, 1]  # 2^30 exp(-30) is 1e-4
    assert weights(0, *(math.log(part / 2**30) for part in (2.6, 0.75, 0.4)))[1:] == [3, 1, 0]
    assert weights(inf, inf, 3) == weights(inf, inf, 3, temperature=inf) == [2**30, 2**30, 0]
    assert weights(3e38, 0, -3e38, temperature=inf) == [2**30, 2**30, 0]  # the difference is infinite
    assert weights(1, 1, temperature=0) == weights(1, 1, temperature=-1) == weights(1, 1, temperature=nan) == [2**30, 0]


def test_what_is_kept_by_hand() -> None:
    def kept(top_p: float, *weights: int) -> int:
        return ref.kept_of(np.array(weights), f32(top_p))

    assert [kept(p, 4, 2, 2) for p in (-1, 0, 0.5, 0.51, 0.75, 0.76, 1, 2, nan)] == [1, 1, 1, 2, 2, 3, 3, 3, 3]
    assert kept(1, 4, 2, 0, 0) == 2  # nobody draws the others
    assert kept(1 / 3, 2**30, 2**30, 2**30) == 2  # in float32 the third is a little more, and its product is not


def test_a_draw_by_hand() -> None:
    """With counter 7 and seed 5 << 32 | 6 the first word of Philox is 0xa62e0d99: u is 0.649."""
    assert ref.philox((7, 0, 0, 0), (6, 5))[0] >> 8 == 0xA62E0D
    logits = np.array([[1, 9, nan, 1, 1, -inf, 1]], f32)

    def token(*candidates: int, temperature: float = 1, top_p: float = 1, counter: int = 7) -> int:
        heat, share = np.array([temperature], f32), np.array([top_p], f32)
        seeds, counters = np.array([5 << 32 | 6], np.uint64), np.array([counter], np.int32)
        return int(ref.sample(logits, np.array([candidates], np.int32), heat, share, seeds, counters)[0])

    assert token(0, 3, 4, 6) == token(6, 4, 0, 3, -1) == 4  # of sums 1/4, 1/2, 3/4 and 1
    assert token(0, 3, 4) == token(0, 3) == 3
    assert token(0, 2, 3, 4, 5, 6, -1, top_p=0.5) == 3  # of 0 and 3
    assert token(0, 2, 3, 4, 5, 6, -1, top_p=0.51) == 3  # of 0, 3 and 4
    assert token(0, 1) == 1  # nearly all
    assert token(0, 1, temperature=1e9) == 0  # behind 1
    assert token(0, 3, 4, 6, temperature=0) == token(0, 3, top_p=0.5) == 0
    assert token(2, 5, -1) == token(-1) == token(0, counter=0) == token(0, counter=-7) == -1


def test_draws_against_a_search_in_exact_numbers(rng: Rng) -> None:
    for _ in range(200):
        draw = Draw(rng, 1, int(rng.integers(1, 30)), 40, str(rng.choice(["normal", "negative", "constant"])))
        draw.temperature[:], draw.top_p[:] = rng.choice([0.5, 1, 2]), rng.choice([0.3, 0.9, 1])
        left = [(-float(draw.logits[0, i]), i) for i in draw.candidates[0].tolist() if i >= 0]
        left.sort()
        exact = [math.exp((left[0][0] - logit) / draw.temperature[0]) for logit, _ in left]
        total, kept = math.fsum(exact), 1
        while kept < len(exact) and math.fsum(exact[:kept]) < draw.top_p[0] * total - 1e-5:
            kept += 1
        seed, counter = int(draw.seeds[0]), int(draw.counters[0])
        (got,) = draw.want().tolist()
        if counter <= 0 or not left:
            assert got == -1
            continue
        u = (ref.philox((counter, 0, 0, 0), (seed & 0xFFFFFFFF, seed >> 32))[0] >> 8) / 2**24
        place = [index for _, index in left].index(got)
        # Where u, or what is kept, is within 1e-5 of another, both are right.
        fits = [n for n in range(kept, len(exact) + 1) if math.fsum(exact[: n - 1]) <= draw.top_p[0] * total + 1e-5]
        assert any(
            math.fsum(exact[:place]) - 1e-5 <= u * math.fsum(exact[:n]) < math.fsum(exact[: place + 1]) + 1e-5
            for n in fits
            if place < n
        )


# ---- the ops' checks, without a device -------------------------------------------------------------------------------


def fit(**changes: Any) -> dict[str, Any]:
    operands = {
        "logits": Foreign((4, 1000), f32, 1 << 20),
        "candidates": Foreign((4, 64), np.int32, 2 << 20),
        "tokens": Foreign((4,), np.int32, 3 << 20),
        "temperature": Foreign((4,), f32, 4 << 20),
        "top_p": Foreign((4,), f32, 5 << 20),
        "seeds": Foreign((4,), np.uint64, 6 << 20),
        "counters": Foreign((4,), np.int32, 7 << 20),
    }
    return operands | changes


Wrong = dict[str, tuple[dict[str, Any], type[Exception], str]]
WRONG_IN_BOTH: Wrong = {
    "float16": ({"logits": Foreign((4, 1000), np.float16)}, TypeError, "logits: wanted .*float32, got float16"),
    "flat": ({"logits": Foreign((4,), f32)}, ValueError, r"logits: wanted shape \(rows, vocabulary\), got \(4,\)"),
    "too wide": ({"logits": Foreign((4, 2**30), f32)}, ValueError, "logits: wanted fewer than .* rows"),
    "too many": ({"logits": Foreign((2**31, 4), f32)}, ValueError, "logits: wanted fewer than .* rows"),
    "gaps": ({"logits": Foreign((4, 1000), f32, 1 << 20, (8000, 8))}, ValueError, "logits: wanted contiguous"),
    "odd address": ({"logits": Foreign((4, 1000), f32, 8)}, ValueError, "logits: .*multiples of 16 bytes, got 0x8"),
    "odd rows": ({"logits": Foreign((4, 999), f32, 1 << 20)}, ValueError, "logits: .*multiples of 16 bytes"),
    "tokens of 64 bits": ({"tokens": Foreign((4,), np.int64)}, TypeError, "tokens: wanted .*int32, got int64"),
    "few tokens": ({"tokens": Foreign((3,), np.int32)}, ValueError, r"tokens: wanted shape \(4,\), got \(3,\)"),
    "in the logits": ({"tokens": Foreign((4,), np.int32, (1 << 20) + 15984)}, ValueError, "tokens .* logits"),
}
WRONG_ARGMAX: Wrong = WRONG_IN_BOTH | {
    "float counts": ({"counts": Foreign((4,), f32)}, TypeError, "counts: wanted .*int32, got float32"),
    "few counts": ({"counts": Foreign((3,), np.int32)}, ValueError, r"counts: wanted shape \(4,\), got \(3,\)"),
    "in the counts": ({"counts": Foreign((4,), np.int32, (3 << 20) - 4)}, ValueError, "tokens .* counts"),
}
WRONG_SAMPLE: Wrong = WRONG_IN_BOTH | {
    "long candidates": ({"candidates": Foreign((4, 64), np.int64)}, TypeError, "candidates: .*int32, got int64"),
    "other candidates": (
        {"candidates": Foreign((3, 64), np.int32)},
        ValueError,
        r"candidates: wanted shape \(4, 1 to 1024\), got \(3, 64\)",
    ),
    "no candidates": ({"candidates": Foreign((4, 0), np.int32)}, ValueError, r"candidates: .*got \(4, 0\)"),
    "many candidates": ({"candidates": Foreign((4, 1025), np.int32)}, ValueError, r"candidates: .*got \(4, 1025\)"),
    "flat candidates": ({"candidates": Foreign((4,), np.int32)}, ValueError, r"candidates: .*got \(4,\)"),
    "double temperature": ({"temperature": Foreign((4,), np.float64)}, TypeError, "temperature: .*got float64"),
    "one temperature": ({"temperature": 0.7}, TypeError, "temperature: wanted a device array of float32, got float"),
    "few top_p": ({"top_p": Foreign((1,), f32)}, ValueError, r"top_p: wanted shape \(4,\), got \(1,\)"),
    "signed seeds": ({"seeds": Foreign((4,), np.int64)}, TypeError, "seeds: wanted .*uint64, got int64"),
    "few seeds": ({"seeds": Foreign((2,), np.uint64)}, ValueError, r"seeds: wanted shape \(4,\), got \(2,\)"),
    "long counters": ({"counters": Foreign((4,), np.int64)}, TypeError, "counters: wanted .*int32, got int64"),
    "many counters": ({"counters": Foreign((5,), np.int32)}, ValueError, r"counters: wanted shape \(4,\), got"),
    "in the candidates": ({"candidates": Foreign((4, 64), np.int32, 3 << 20)}, ValueError, "tokens .* candidates"),
    "in the counters": ({"counters": Foreign((4,), np.int32, 3 << 20)}, ValueError, "tokens .* counters"),
    "in the seeds": ({"seeds": Foreign((4,), np.uint64, (3 << 20) - 24)}, ValueError, "tokens .* seeds"),
}


@pytest.mark.parametrize(("changes", "error", "message"), WRONG_ARGMAX.values(), ids=WRONG_ARGMAX)
def test_an_operand_that_does_not_fit_argmax_is_named(
    recorder: Any, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    operands = {role: operand for role, operand in fit().items() if role in ("logits", "tokens")}
    with pytest.raises(error, match=f"^argmax: {message}"):
        argmax(recorder, **operands | changes)
    assert not recorder.calls


@pytest.mark.parametrize(("changes", "error", "message"), WRONG_SAMPLE.values(), ids=WRONG_SAMPLE)
def test_an_operand_that_does_not_fit_sample_is_named(
    recorder: Any, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^sample: {message}"):
        sample(recorder, **fit(**changes))
    assert not recorder.calls


@pytest.mark.parametrize(("k", "block"), [(1, 32), (32, 32), (33, 64), (64, 64), (65, 128), (513, 1024), (1024, 1024)])
def test_each_candidate_has_a_thread(recorder: Any, k: int, block: int) -> None:
    sample(recorder, **fit(candidates=Foreign((4, k), np.int32, 8 << 20)), after="before", name="n")
    ((kernel, how),) = recorder.calls
    assert (kernel, how["grid"], how["block"]) == ("sample: sample", 4, block)
    assert (how["after"], how["name"]) == ("before", "n")


# ---- the kernels ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 2, 3, 4, 31, 2047, 2049, 5001, 8195, 9216, 17003])
def test_the_best_of_rows_that_are_hard(device: Device, stream: Stream, rng: Rng, width: int) -> None:
    logits = hard_rows(rng, width)
    assert_equal_bits(best_of(stream, logits), ref.argmax(logits))


@pytest.mark.parametrize("blocks", [1, 2, 4, 8])
def test_any_number_of_blocks_finds_the_first_of_the_best_wherever_it_is(
    device: Device, stream: Stream, rng: Rng, monkeypatch: pytest.MonkeyPatch, blocks: int
) -> None:
    if blocks > 1 and device.compute_capability < (9, 0):
        pytest.skip("this device has no clusters")
    monkeypatch.setattr("drvkit.ops.sample.blocks_of_row", lambda *shape: blocks)
    width, step = 4 * 2048 * blocks + 2051, 2048 * blocks
    places = [0, 1, 3, 4, 127, 128, 2047, 2048, step - 1, step, 4 * step - 1, 4 * step, width - 4, width - 2, width - 1]
    logits = np.full((len(places), width), -1, f32)
    for row, place in enumerate(places):
        logits[row, rng.integers(place, width, 3)] = 2
        logits[row, place] = 2
    assert_equal_bits(best_of(stream, logits), np.array(places, np.int32))
    logits = hard_rows(rng, width)
    assert_equal_bits(best_of(stream, logits), ref.argmax(logits))


def test_a_row_of_a_real_vocabulary(device: Device, stream: Stream, rng: Rng) -> None:
    logits = rng.normal(size=(2, 49152)).astype(f32)
    assert_equal_bits(best_of(stream, logits), ref.argmax(logits))


@pytest.mark.parametrize("width", [70, 8300])
def test_nothing_of_padding_is_read(device: Device, stream: Stream, rng: Rng, width: int) -> None:
    logits, counts = rng.normal(size=(5, width)).astype(f32), [1, 0, 2**31 - 1, -1, 3]
    assert_equal_bits(best_of(stream, logits, counts), ref.argmax(logits, np.array(counts, np.int32)))


@pytest.mark.parametrize("k", [1, 2, 31, 32, 33, 64, 100])
def test_draws_are_those_of_the_reference(device: Device, stream: Stream, rng: Rng, k: int) -> None:
    draw = Draw(rng, 24, k, 99)
    assert_equal_bits(drawn(stream, draw), draw.want())


@pytest.mark.parametrize(("k", "vocabulary"), [(24, 30), (500, 1023), (1024, 1500)])
def test_draws_from_rows_that_are_hard(device: Device, stream: Stream, rng: Rng, k: int, vocabulary: int) -> None:
    draw = Draw(rng, 0, k, vocabulary, kind="")
    assert_equal_bits(drawn(stream, draw), draw.want())


@pytest.mark.parametrize(("k", "rows"), [(64, 100), (1024, 20)])
def test_draws_from_many_candidates_with_nearly_the_same_weight(
    device: Device, stream: Stream, rng: Rng, k: int, rows: int
) -> None:
    draw = Draw(rng, rows, k, 1100)
    draw.candidates[:] = np.arange(k)
    draw.temperature[:] = rng.choice([3, 10, 30], rows)
    draw.top_p[:] = rng.uniform(0.3, 1, rows)
    assert_equal_bits(drawn(stream, draw), draw.want())


def test_weights_are_the_reference_s_up_to_the_last_bits(device: Device, stream: Stream, rng: Rng) -> None:
    """A row's top_p is the last one, or the first one, that lets only the better of two be kept, or both; and the draw
    is one that takes the other if it can."""
    draw = Draw(rng, 400, 2, 2)
    draw.logits[:, 0] = rng.normal(size=400)
    draw.logits[:, 1] = draw.logits[:, 0] - rng.uniform(0, 2, 400).astype(f32)
    draw.candidates[:], draw.seeds[:], draw.counters[:] = [0, 1], SEED, 73
    draw.temperature[:] = rng.uniform(0.5, 2, 400)
    assert draw_of(73) > 0.99 * 2**24
    want = np.arange(400, dtype=np.int32) % 2
    for row, other in enumerate(want):
        weights = ref.weights_of(draw.logits[row], draw.temperature[row])
        top_p = f32(weights[0] / weights.sum())
        while ref.kept_of(weights, top_p) == 2:
            top_p = np.nextafter(top_p, f32(0))
        while ref.kept_of(weights, np.nextafter(top_p, f32(1))) == 1:
            top_p = np.nextafter(top_p, f32(1))
        draw.top_p[row] = np.nextafter(top_p, f32(1)) if other else top_p
    assert_equal_bits(draw.want(), want)
    assert_equal_bits(drawn(stream, draw, at_once=True), want)


def test_a_draw_that_meets_a_sum_goes_to_the_next(device: Device, stream: Stream, rng: Rng) -> None:
    draw = many_draws(rng, 1, [0.0] * 1024, 1, 1)
    draw.counters[:] = 7064
    assert draw_of(7064) == 731 * 2**14
    assert drawn(stream, draw, at_once=True).tolist() == draw.want().tolist() == [731]


def test_many_of_which_none_weighs_much_are_drawn(device: Device, stream: Stream, rng: Rng) -> None:
    draw = many_draws(rng, 1, [0.0] + [-14.0] * 1023, 1, 1)  # 1023 of them weigh 8.5e-4 times as much as the best
    draw.counters[:] = next(counter for counter in itertools.count(1) if draw_of(counter) > (1 - 8e-4) * 2**24)
    (got,) = drawn(stream, draw, at_once=True).tolist()
    assert [got] == draw.want().tolist()
    assert got > 0


def test_infinite_logits_are_drawn_alike(device: Device, stream: Stream, rng: Rng) -> None:
    for temperature in (1, inf):
        draw = many_draws(rng, 60, [1, inf, 2, inf, -inf, inf, nan], temperature, 1)
        got = drawn(stream, draw, at_once=True)
        assert_equal_bits(got, draw.want())
        assert set(got.tolist()) == {1, 3, 5}


def test_a_share_is_not_rounded_to_a_float(device: Device, stream: Stream, rng: Rng) -> None:
    """A third of three, as a float32, is a little more than one of them."""
    draw = many_draws(rng, 60, [0.0] * 3, 1, 1 / 3)
    got = drawn(stream, draw, at_once=True)
    assert_equal_bits(got, draw.want())
    assert set(got.tolist()) == {0, 1}


def test_candidates_in_any_order_and_negative_ones_anywhere(device: Device, stream: Stream, rng: Rng) -> None:
    draw = Draw(rng, 12, 50, 80, "two values")
    want = draw.want()
    draw.candidates = rng.permuted(draw.candidates, axis=1)
    draw.candidates[draw.candidates < 0] = rng.choice([-1, -2, -(2**31)])
    assert_equal_bits(drawn(stream, draw), want)
    assert_equal_bits(draw.want(), want)


def test_without_heat_the_best_of_all_is_drawn(device: Device, stream: Stream, rng: Rng) -> None:
    draw = Draw(rng, 0, 60, 60, kind="")
    draw.candidates[:], draw.temperature[:], draw.counters[:] = np.arange(60), 0, 1
    assert_equal_bits(drawn(stream, draw), ref.argmax(draw.logits))


SEED = 20261201


def draw_of(counter: int) -> int:
    return ref.philox((counter, 0, 0, 0), (SEED, 0))[0] >> 8


def many_draws(rng: Rng, draws: int, logits: list[float], temperature: float, top_p: float) -> Draw:
    """From the same logits, with one seed and rising counters."""
    draw = Draw(rng, draws, len(logits), len(logits))
    draw.logits[:], draw.candidates[:] = logits, np.arange(len(logits))
    draw.temperature[:], draw.top_p[:] = temperature, top_p
    draw.seeds[:], draw.counters[:] = SEED, np.arange(1, draws + 1)
    return draw


def test_tokens_come_as_often_as_they_should(device: Device, stream: Stream, rng: Rng) -> None:
    """By chi-square: of 6 degrees of freedom it is above 22.5 once in a thousand times. These draws are always the
    same."""
    logits, draws = [0.3, 2.0, -1.0, 1.5, 1.5, 0.0, -4.0, 1.0, -6.0, 0.9], 3000
    chances = np.exp(np.array(logits) / 0.8)
    by_chance = np.argsort(-chances, kind="stable")
    kept = by_chance[: 1 + np.flatnonzero(np.cumsum(chances[by_chance]) >= 0.985 * chances.sum())[0]]
    assert len(kept) == 7
    expected = draws * chances[kept] / chances[kept].sum()
    got = np.bincount(drawn(stream, many_draws(rng, draws, logits, 0.8, 0.985), at_once=True), minlength=10)
    assert got.sum() == got[kept].sum() == draws
    assert ((got[kept] - expected) ** 2 / expected).sum() < 22.5


def test_a_seed_says_what_is_drawn(device: Device, stream: Stream, rng: Rng) -> None:
    draw = many_draws(rng, 60, [0.0] * 64, 1, 1)
    first = drawn(stream, draw, at_once=True)
    assert_equal_bits(drawn(stream, draw, at_once=True), first)
    for bit in (0, 31, 32, 63):
        draw.seeds[:] = SEED ^ 1 << bit
        assert (drawn(stream, draw, at_once=True) != first).mean() > 0.8
    draw.seeds[:] = SEED
    draw.counters += 1
    assert_equal_bits(drawn(stream, draw, at_once=True)[:-1], first[1:])


def test_one_graph_serves_every_step(device: Device, stream: Stream, graph: Graph, rng: Rng) -> None:
    """top_k and sample, and argmax beside them, with edges that let a kernel start before the one before has ended."""
    rows, width, k = 5, 1200, 40
    with (
        device.zeros((rows, width), f32) as logits,
        device.array(np.full(rows, width, np.int32)) as widths,
        device.zeros((rows, k), np.int32) as candidates,
        device.array(np.full(rows, 0.9, f32)) as temperature,
        device.array(np.full(rows, 0.95, f32)) as top_p,
        device.array(np.arange(rows, dtype=np.uint64)) as seeds,
        device.zeros(rows, np.int32) as counters,
        device.zeros(rows, np.int32) as best,
        device.zeros(rows, np.int32) as tokens,
    ):
        first = top_k(graph, logits, widths, candidates)
        assert first is not None
        per_row: Any = {"temperature": temperature, "top_p": top_p, "seeds": seeds, "counters": counters}
        second = sample(graph, logits, candidates, tokens, **per_row, after=first.port("programmatic"))
        assert second is not None
        argmax(graph, logits, best, counts=counters, after=second.port("programmatic"))
        with graph.instantiate() as exe:
            ops.release()  # the nodes hold what they use
            seen = set()
            now = rng.normal(size=(rows, width)).astype(f32)
            logits.copy_from(now)
            of_host = (temperature.numpy(), top_p.numpy(), seeds.numpy())
            for step in range(4):
                counts = np.where(rng.random(rows) < 0.2, 0, np.arange(rows) + 100 * step + 1).astype(np.int32)
                counters.copy_from(counts)
                tokens.fill(POISON)
                best.fill(POISON)
                exe.launch(stream)
                got = tokens.numpy(stream)
                chosen = top_k_ref(now, widths.numpy(), k)
                assert_equal_bits(got, ref.sample(now, chosen, *of_host, counts))
                assert_equal_bits(best.numpy(stream), ref.argmax(now, counts))
                seen.add(tuple(got.tolist()))
            assert len(seen) > 1
        del exe


def test_nothing_is_launched_for_no_rows_and_rows_may_be_empty(device: Device, stream: Stream, graph: Graph) -> None:
    with (
        device.empty((3, 0), f32) as logits,
        device.empty((0, 8), np.int32) as candidates,
        device.empty(0, np.int32) as whole,
        device.empty(0, f32) as real,
        device.empty(0, np.uint64) as seeds,
    ):
        per_row: Any = {"temperature": real, "top_p": real, "seeds": seeds, "counters": whole}
        assert argmax(stream, logits[:0], whole) is None
        assert sample(stream, logits[:0], candidates, whole, **per_row) is None
        for node in (argmax(graph, logits[:0], whole), sample(graph, logits[:0], candidates, whole, **per_row)):
            assert node is not None
            assert node.kind == "empty"
        assert run_argmax(stream, logits).tolist() == [-1, -1, -1]


@pytest.mark.drvkit_check
def test_no_two_threads_race(rng: Rng, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drvkit.ops.top_k.MOST_BLOCKS", 2)
    device = Device("cpu")
    with device.stream() as stream:
        for width in (700, 8200):
            logits = hard_rows(rng, width)[:4]
            assert_equal_bits(best_of(stream, logits, [1, 2, 0, 3]), ref.argmax(logits, np.array([1, 2, 0, 3])))
        for k in (20, 200):
            draw = Draw(rng, 6, k, 300)
            assert_equal_bits(drawn(stream, draw), draw.want())


@pytest.mark.drvkit_check
def test_a_kernel_waits_for_what_the_one_before_writes(rng: Rng, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drvkit.ops.top_k.MOST_BLOCKS", 2)
    device, rows = Device("cpu"), 2
    draw = many_draws(rng, rows, rng.normal(size=64).tolist(), 1, 1)
    with (
        device.stream() as stream,
        Graph(device, "chain") as graph,
        device.array(np.tile(rng.normal(size=8200).astype(f32), (rows, 1))) as logits,
        device.array(draw.candidates) as candidates,
        device.array(draw.temperature) as temperature,
        device.array(draw.top_p) as top_p,
        device.array(draw.seeds) as seeds,
        device.zeros((3, rows), np.int32) as tokens,
    ):
        per_row: Any = {"temperature": temperature, "top_p": top_p, "seeds": seeds, "counters": tokens[0]}
        node = argmax(graph, logits, tokens[0])
        assert node is not None
        node = sample(graph, logits, candidates, tokens[1], **per_row, after=node.port("programmatic"))
        assert node is not None
        argmax(graph, logits, tokens[2], counts=tokens[1], after=node.port("programmatic"))
        with graph.instantiate() as exe:
            exe.launch(stream)
            got = tokens.numpy(stream)
        draw.logits, draw.counters = logits.numpy(), got[0]
        assert_equal_bits(got, np.stack([ref.argmax(draw.logits), draw.want(), ref.argmax(draw.logits, got[1])]))


# ---- what only the device can know to be wrong -----------------------------------------------------------------------


def beyond() -> Draw:
    draw = Draw(np.random.default_rng(1), 2, 3, 8)
    draw.logits[:, :] = 0
    draw.candidates[:] = [[0, 5, 7], [6, 8, -1]]
    draw.temperature[:], draw.top_p[:], draw.counters[:] = 1, 1, 1
    return draw


def run_beyond(stream: Stream) -> NDArray[np.int32]:
    draw, device = beyond(), stream.device
    with (
        device.array(np.append(draw.logits, np.full((2, 8), 9, f32), axis=0)) as memory,
        device.array(draw.candidates) as candidates,
        device.array(draw.temperature) as temperature,
        device.array(draw.top_p) as top_p,
        device.array(draw.seeds) as seeds,
        device.array(draw.counters) as counters,
        device.zeros(2, np.int32) as tokens,
    ):
        per_row: Any = {"temperature": temperature, "top_p": top_p, "seeds": seeds, "counters": counters}
        sample(stream, memory[:2], candidates, tokens, **per_row)
        return tokens.numpy(stream)


def test_the_cpu_device_reports_a_candidate_beyond_the_row(capfd: pytest.CaptureFixture[str]) -> None:
    victim = Device("cpu:5")
    with pytest.raises(DriverError, match="LAUNCH_FAILED"), victim.stream() as stream:
        run_beyond(stream)
    victim.driver.cuDevicePrimaryCtxReset(victim.handle)
    ops.release(victim)
    assert re.search(r"candidates\[1, 1\] is 8: a row has 8 logits\n", capfd.readouterr().out)


def test_a_gpu_passes_over_a_candidate_beyond_the_row(device: Device, stream: Stream, with_option: WithOption) -> None:
    with_option(device, "sample", "-UDRVKIT_CPU_DEVICE")
    draw = beyond()
    draw.candidates[1, 1] = -1
    assert_equal_bits(run_beyond(stream), draw.want())
