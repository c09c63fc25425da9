"""The k largest of each row: the reference by hand and against a search, the checks of the op, and the kernel against
the reference on rows that are hard to select from."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from compare import assert_equal_bits
from numpy.typing import NDArray
from standins import Foreign, Recorder

from drvkit import ops
from drvkit.device import Device, Stream
from drvkit.driver import DriverError
from drvkit.graph import Graph
from drvkit.ops.top_k import blocks_of_row, top_k
from drvkit.ref import top_k as ref

if TYPE_CHECKING:
    from conftest import WithOption

Scores = NDArray[np.float32]
Rng = np.random.Generator
POISON = -77


def bits(low: int, high: int) -> Callable[[Rng, int], Scores]:
    """Scores of random bits from ``low`` to ``high``."""
    return lambda rng, n: rng.integers(low, high + 1, n, np.uint32).view(np.float32)


def among(*values: float) -> Callable[[Rng, int], Scores]:
    return lambda rng, n: rng.choice(np.array(values, np.float32), n)


def few_left(rng: Rng, n: int) -> Scores:
    """Less than a tenth of them may be chosen."""
    scores = rng.normal(size=n).astype(np.float32)
    scores[rng.random(n) > 0.05] = -np.inf
    scores[rng.random(n) > 0.95] = np.nan
    return scores


HARD: dict[str, Callable[[Rng, int], Scores]] = {
    "normal": lambda rng, n: rng.normal(size=n).astype(np.float32),
    "negative": lambda rng, n: -rng.exponential(size=n).astype(np.float32),
    "constant": among(-3.5),
    "zeros of both signs": among(0.0, -0.0),
    "zeros and more": lambda rng, n: np.maximum(rng.normal(size=n) - 2, -0.0).astype(np.float32),
    "three values": among(1.0, np.nextafter(np.float32(1), np.float32(2)), 2.0),
    "last two bits": bits(0x41234568, 0x4123456B),
    "last ten bits": bits(0xC1234400, 0xC12347FF),
    "last 21 bits": bits(0x41200000, 0x413FFFFF),
    "around zero": lambda rng, n: (bits(0, 3)(rng, n) * rng.choice([-1, 1], n)).astype(np.float32),
    "any bits": bits(0, 2**32 - 1),
    "few left": few_left,
    "none left": among(-np.inf, np.nan, -np.nan),
    "infinite": among(np.inf, -np.inf, 1.0),
    "rising": lambda rng, n: np.arange(n, dtype=np.float32),
    "falling": lambda rng, n: -np.arange(n, dtype=np.float32),
    "trend": lambda rng, n: (rng.normal(size=n) + np.linspace(0, 4, n)).astype(np.float32),
}


@pytest.fixture(autouse=True)
def few_instances(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the CPU device each takes seconds to compile."""
    if "device" in request.fixturenames and request.getfixturevalue("device").driver.kind == "cpu":
        monkeypatch.setattr("drvkit.ops.top_k.MOST_BLOCKS", 2)


def hard_rows(rng: Rng, width: int) -> Scores:
    return np.stack([make(rng, width) for make in HARD.values()])


def run(stream: Stream, scores: Any, lengths: list[int], k: int) -> NDArray[np.int32]:
    device = stream.device
    with (
        device.array(np.array(lengths, np.int32)) as counts,
        device.array(np.full((len(lengths), k), POISON, np.int32)) as indices,
    ):
        top_k(stream, scores, counts, indices)
        return indices.numpy(stream)


def select(stream: Stream, scores: Scores, lengths: list[int], k: int) -> NDArray[np.int32]:
    """By the kernel; what is behind a row's length would be the best of it."""
    rows, width = scores.shape
    with stream.device.array(np.full((rows, -(-width // 4) * 4), np.inf, np.float32)) as memory:
        host = memory.numpy()
        for row, length in enumerate(lengths):
            host[row, : max(length, 0)] = scores[row, : max(length, 0)]
        memory.copy_from(host)
        return run(stream, memory[:, :width], lengths, k)


# ---- the reference -------------------------------------------------------------------------------------------------


def test_the_reference_by_hand() -> None:
    nan, inf = np.nan, np.inf
    scores = np.array([[1, 3, 2, 3, 3, 9], [0, -0.0, 0, -1, 9, 9], [nan, -inf, 5, inf, nan, -inf]], np.float32)
    assert ref.top_k(scores, np.array([5, 4, 6], np.int32), 2).tolist() == [[1, 3], [0, 1], [2, 3]]
    assert ref.top_k(scores, np.array([4, 0, 6], np.int32), 3).tolist() == [[1, 2, 3], [-1, -1, -1], [2, 3, -1]]
    assert ref.top_k(scores, np.array([-9, 1, 2], np.int32), 2).tolist() == [[-1, -1], [0, -1], [0, 1]]


def test_the_reference_against_a_search_of_the_best(rng: Rng) -> None:
    scores = hard_rows(rng, 60)
    lengths = rng.integers(10, 61, len(scores), np.int32)
    for row, got in enumerate(ref.top_k(scores, lengths, 9)):
        left = {i: float(scores[row, i]) for i in range(lengths[row]) if scores[row, i] > -np.inf}
        best: list[int] = []
        while left and len(best) < 9:
            best.append(min(i for i, score in left.items() if score == max(left.values())))
            del left[best[-1]]
        assert got.tolist() == sorted(best) + [-1] * (9 - len(best)), list(HARD)[row]


# ---- the op's checks, without a device -------------------------------------------------------------------------------


def fit(**changes: Any) -> dict[str, Any]:
    operands = {
        "scores": Foreign((4, 1000), np.float32, 1 << 20),
        "lengths": Foreign((4,), np.int32, 2 << 20),
        "indices": Foreign((4, 64), np.int32, 3 << 20),
    }
    return operands | changes


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "float16": ({"scores": Foreign((4, 1000), np.float16)}, TypeError, "scores: wanted .*float32, got float16"),
    "flat": ({"scores": Foreign((4,), np.float32)}, ValueError, r"scores: wanted shape .*, got \(4,\)"),
    "too wide": ({"scores": Foreign((4, 2**30), np.float32)}, ValueError, "scores: wanted rows of fewer than 2"),
    "gaps": ({"scores": Foreign((4, 1000), np.float32, 1 << 20, (8000, 8))}, ValueError, "scores: wanted contiguous"),
    "odd address": ({"scores": Foreign((4, 1000), np.float32, 8)}, ValueError, "multiples of 16 bytes, got 0x8"),
    "odd rows": ({"scores": Foreign((4, 999), np.float32, 1 << 20)}, ValueError, "multiples of 16 bytes, got 0x100000"),
    "backwards": (
        {"scores": Foreign((4, 1000), np.float32, 1 << 20, (-4000, 4))},
        ValueError,
        "scores: .*multiples of 16 bytes",
    ),
    "lengths of 64 bits": ({"lengths": Foreign((4,), np.int64)}, TypeError, "lengths: .*int32, got int64"),
    "few lengths": ({"lengths": Foreign((3,), np.int32)}, ValueError, r"lengths: wanted shape \(4,\), got \(3,\)"),
    "indices of other rows": ({"indices": Foreign((3, 64), np.int32)}, ValueError, r"indices: wanted shape \(4, k\)"),
    "no indices": ({"indices": Foreign((4, 0), np.int32)}, ValueError, r"indices: wanted shape \(4, k\), got \(4, 0\)"),
    "long indices": ({"indices": Foreign((4, 64), np.int64)}, TypeError, "indices: .*int32, got int64"),
    "in the scores": ({"indices": Foreign((4, 64), np.int32, (1 << 20) + 15900)}, ValueError, "indices .* scores"),
    "in the lengths": ({"lengths": Foreign((4,), np.int32, (3 << 20) + 512)}, ValueError, "indices .* lengths"),
}


@pytest.mark.parametrize(("changes", "error", "message"), WRONG.values(), ids=WRONG)
def test_an_operand_that_does_not_fit_is_named(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    recorder: Any = Recorder()
    with pytest.raises(error, match=f"top_k: .*{message}"):
        top_k(recorder, **fit(**changes))
    assert not recorder.calls


@pytest.mark.parametrize(
    ("rows", "width", "blocks"),
    [
        *((4, 8193, 4), (4, 16384, 4), (4, 16385, 8), (16, 65536, 8), (17, 65536, 4), (1, 2**20, 8)),
        *((64, 65536, 2), (65, 65536, 1), (4096, 16384, 1), (4096, 2**20, 1)),
    ],
)
def test_blocks_share_a_long_row_where_rows_are_few(
    device: Device, monkeypatch: pytest.MonkeyPatch, rows: int, width: int, blocks: int
) -> None:
    monkeypatch.setattr("drvkit.ops.top_k.MOST_BLOCKS", 8)
    assert blocks_of_row(device, rows, width) == (blocks if device.compute_capability >= (9, 0) else 1)


# ---- the kernel ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "k"), [(2055, 512), (4096, 1), (9002, 1024), (8500, 7000)])
def test_rows_that_are_hard_to_select_from(device: Device, stream: Stream, rng: Rng, width: int, k: int) -> None:
    scores = hard_rows(rng, width)
    lengths = np.where(rng.random(len(scores)) < 0.5, width, rng.integers(k + 1, width + 1, len(scores)))
    assert_equal_bits(select(stream, scores, lengths.tolist(), k), ref.top_k(scores, lengths.astype(np.int32), k))


@pytest.mark.parametrize("width", [1531, 2048, 4097, 6144, 8191])
def test_any_number_of_steps_gives_the_same(device: Device, stream: Stream, rng: Rng, width: int) -> None:
    if device.driver.kind == "cpu":
        pytest.skip("the CPU device takes long to compile them")
    scores, k = hard_rows(rng, width), int(rng.integers(1, 1500))
    lengths = rng.integers(k, width + 1, len(scores), np.int32)
    assert_equal_bits(select(stream, scores, lengths.tolist(), k), ref.top_k(scores, lengths, k))


@pytest.mark.parametrize("room", [64, 6])
@pytest.mark.parametrize("blocks", [1, 2, 4, 8])
def test_lists_of_any_room_and_any_number_of_blocks_give_the_same(
    device: Device, stream: Stream, rng: Rng, monkeypatch: pytest.MonkeyPatch, blocks: int, room: int
) -> None:
    if blocks > 1 and device.compute_capability < (9, 0):
        pytest.skip("this device has no clusters")
    if blocks != 2 and device.driver.kind == "cpu":
        pytest.skip("the CPU device takes long to compile it")
    monkeypatch.setattr("drvkit.ops.top_k.blocks_of_row", lambda *shape: blocks)
    monkeypatch.setattr("drvkit.ops.top_k.room_of_list", lambda *shape: room)
    scores, k = hard_rows(rng, 8300), 64  # in random order a list of 64 is enough, and one of 6 is not
    lengths = rng.integers(4000, 8301, len(scores), np.int32)
    assert_equal_bits(select(stream, scores, lengths.tolist(), k), ref.top_k(scores, lengths, k))


@pytest.mark.parametrize("kind", ["normal", "last ten bits", "zeros and more"])
def test_a_long_row(device: Device, stream: Stream, rng: Rng, kind: str) -> None:
    n = 2**16 + int(rng.integers(1, 2**12))
    scores = HARD[kind](rng, n)[None]
    assert_equal_bits(select(stream, scores, [n], 512), ref.top_k(scores, np.array([n], np.int32), 512))


@pytest.mark.parametrize(("width", "k"), [(2200, 512), (9000, 1024)])
def test_rows_of_any_length(device: Device, stream: Stream, rng: Rng, width: int, k: int) -> None:
    lengths = [0, 1, k - 1, k, k + 1, k + 5, width, -3]
    scores = rng.normal(size=(len(lengths), width)).astype(np.float32)
    assert_equal_bits(select(stream, scores, lengths, k), ref.top_k(scores, np.array(lengths, np.int32), k))


def test_what_is_behind_a_length_is_not_read_nor_a_row_that_is_taken_whole(
    device: Device, stream: Stream, rng: Rng
) -> None:
    lengths, width, k = [600, 9001, 512, 0, 513], 9004, 512
    scores = rng.normal(size=(len(lengths), width)).astype(np.float32)
    with device.empty(scores.shape, np.float32) as memory:  # memory that the CPU device lets nobody read
        for row, length in enumerate(lengths):
            if length > k:
                memory[row, :length].copy_from(scores[row, :length])
        got = run(stream, memory, lengths, k)
    assert_equal_bits(got, ref.top_k(scores, np.array(lengths, np.int32), k))


@pytest.mark.parametrize("width", [3004, 9000])
def test_one_graph_serves_every_step(device: Device, stream: Stream, graph: Graph, rng: Rng, width: int) -> None:
    rows, k = 6, 96
    with (
        device.zeros((rows, width), np.float32) as scores,
        device.zeros(rows, np.int32) as lengths,
        device.zeros((rows, k), np.int32) as indices,
    ):
        node = top_k(graph, scores, lengths, indices, name="before")
        assert node is not None
        top_k(graph, scores, lengths, indices, after=node.port("programmatic"), name="behind")
        with graph.instantiate() as exe:
            ops.release()  # the nodes hold what they use
            for most in (width, k, 0, 200):
                now, counts = hard_rows(rng, width)[:rows], rng.integers(most // 2, most + 1, rows, np.int32)
                scores.copy_from(now)
                lengths.copy_from(counts)
                indices.fill(POISON)
                exe.launch(stream)
                assert_equal_bits(indices.numpy(stream), ref.top_k(now, counts, k))


def test_nothing_is_launched_for_no_rows_and_rows_may_be_empty(device: Device, stream: Stream) -> None:
    with device.empty((3, 0), np.float32) as scores, device.empty(0, np.int32) as none:
        with device.empty((0, 8), np.int32) as indices:
            assert top_k(stream, scores[:0], none, indices) is None
        assert (run(stream, scores, [0, 0, 0], 8) == -1).all()


# ---- what only the device can know to be wrong -----------------------------------------------------------------------


def test_the_cpu_device_reports_a_length_beyond_the_row(capfd: pytest.CaptureFixture[str]) -> None:
    victim = Device("cpu:5")
    with victim.zeros((2, 2052), np.float32) as scores:
        with pytest.raises(DriverError, match="LAUNCH_FAILED"), victim.stream() as stream:
            run(stream, scores, [2052, 2053], 8)
        victim.driver.cuDevicePrimaryCtxReset(victim.handle)
    ops.release(victim)
    assert re.search(r"lengths\[1\] is 2053: a row has 2052 scores\n", capfd.readouterr().out)


def test_a_gpu_takes_the_row_for_a_length_beyond_it(
    device: Device, stream: Stream, rng: Rng, with_option: WithOption
) -> None:
    scores = rng.normal(size=(2, 64)).astype(np.float32)
    with_option(device, "top_k", "-UDRVKIT_CPU_DEVICE")
    with device.array(np.append(scores, np.full_like(scores, np.inf), axis=0)) as memory:
        got = run(stream, memory[:2], [64, 2**31 - 1], 8)
    assert_equal_bits(got, ref.top_k(scores, np.array([64, 64], np.int32), 8))
