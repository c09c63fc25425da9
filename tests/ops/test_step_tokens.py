"""Listing the rows of a step: the reference by hand, the checks of the op, and the kernel against the reference."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from compare import assert_equal_bits
from numpy.typing import NDArray

from drvkit import ops
from drvkit.device import Device, Stream
from drvkit.driver import DriverError
from drvkit.graph import Graph
from drvkit.ops.step_tokens import StepTokens, plan_tokens
from drvkit.ref import step_tokens as ref

if TYPE_CHECKING:
    from conftest import WithOption


def starts_of(rows: list[int]) -> NDArray[np.int32]:
    return np.append(0, np.cumsum(rows)).astype(np.int32)


def results(tokens: StepTokens, stream: Stream) -> list[NDArray[np.int32]]:
    parts = (tokens.rows, tokens.entries[4], tokens.entries[128], tokens.completed[4], tokens.completed[128])
    rows, four, many, *completed = (each.numpy(stream) for each in parts)
    return [rows, four, many, np.concatenate(completed)]


def wanted(rows: list[int], lengths: list[int], max_tokens: int) -> list[NDArray[np.int32]]:
    tokens, entries, completed = ref.step_tokens(starts_of(rows), np.array(lengths, np.int32), max_tokens)
    return [tokens, entries[4], entries[128], completed]


def test_the_reference_by_hand() -> None:
    tokens, four, many, completed = wanted([3, 0, 1], [5, 9, 128], 6)
    assert tokens.tolist() == [
        [0, 2, 2, 5],
        [0, 3, 2, 5],
        [0, 4, 2, 5],
        [2, 127, 127, 128],
        [-1, 0, 0, 0],
        [-1, 0, 0, 0],
    ]
    assert four.tolist() == [0, 1, 1, 32, 0, 0]
    assert many.tolist() == [0, 0, 0, 1, 0, 0]
    assert completed.tolist() == [2, 1]


def test_any_step_of_one_graph(device: Device, stream: Stream, graph: Graph, rng: np.random.Generator) -> None:
    max_tokens, requests = 600, 300
    with (
        StepTokens(device, max_tokens=max_tokens, max_requests=requests) as tokens,
        device.zeros(requests + 1, np.int32) as q_starts,
        device.zeros(requests, np.int32) as lengths,
    ):
        plan_tokens(graph, tokens, q_starts, lengths)
        with graph.instantiate() as exe:
            for most in (1, 3, 600):
                rows = np.where(rng.random(requests) < 0.3, 0, rng.integers(0, most + 1, requests))
                rows[np.cumsum(rows) > max_tokens] = 0
                before = rng.choice([0, 1, 2, 3, 127, 128, 1000], requests)
                q_starts.copy_from(starts_of(rows.tolist()))
                lengths.copy_from(np.where(rows > 0, rows + before, -5).astype(np.int32))  # nobody reads the others
                tokens._whole.fill(-99)
                exe.launch(stream)
                for got, want in zip(
                    results(tokens, stream), wanted(rows.tolist(), lengths.numpy().tolist(), max_tokens), strict=True
                ):
                    assert_equal_bits(got, want)
        del exe


WRONG_STEPS: dict[str, tuple[list[int], list[int], str]] = {
    "decreasing": ([0, 9, 4, 9], [9, 9, 9], r"q_starts\[1\] is 9, behind it is 4"),
    "too many rows": ([0, 9, 20, 41], [9, 11, 21], r"q_starts\[2\] is 20, behind it is 41"),
    "not from 0": ([1, 9, 20, 30], [8, 11, 10], r"q_starts\[0\] is 1"),
    "too short": ([0, 9, 20, 30], [9, 10, 21], r"lengths\[1\] is 10: the request has 11 rows"),
    "too long": ([0, 9, 20, 30], [9, 11, 513], r"lengths\[2\] is 513: wanted at most 512"),
}


@pytest.mark.parametrize(("starts", "lengths", "message"), WRONG_STEPS.values(), ids=WRONG_STEPS)
def test_the_cpu_device_reports_a_step_that_cannot_be(
    capfd: pytest.CaptureFixture[str], starts: list[int], lengths: list[int], message: str
) -> None:
    victim = Device("cpu:5")
    tokens = StepTokens(victim, max_tokens=40, max_requests=3, max_length=512)
    arrays = [victim.array(np.array(each, np.int32)) for each in (starts, lengths)]
    with pytest.raises(DriverError, match="LAUNCH_FAILED"), victim.stream() as stream:
        plan_tokens(stream, tokens, *arrays)
    victim.driver.cuDevicePrimaryCtxReset(victim.handle)
    ops.release(victim)
    tokens.close()
    for each in arrays:
        each.close()
    assert re.search(message, capfd.readouterr().out)


@pytest.mark.parametrize(
    ("starts", "lengths", "told"),
    [
        ([0, 9, 20, 41], [9, 11, 21], [9, 11, 0]),
        ([0, 9, 20, 50], [9, 11, 30], [9, 11, 0]),
        ([-3, 9, 20, 30], [12, 11, 10], [0, 11, 10]),
        ([0, 9, 20, 30], [9, 10, 513], [9, 0, 0]),
        ([0, 9, 50, 2**31 - 1], [9, 41, 2**31 - 1], [9, 0, 0]),
        ([4, 9, 20, 30], [5, 11, 10], [5, 11, 10]),
    ],
)
def test_a_gpu_takes_the_rows_of_a_request_that_cannot_be_for_padding(
    device: Device, stream: Stream, with_option: WithOption, starts: list[int], lengths: list[int], told: list[int]
) -> None:
    with_option(device, "step_tokens", "-UDRVKIT_CPU_DEVICE")
    with (
        StepTokens(device, max_tokens=40, max_requests=3, max_length=512) as tokens,
        device.array(np.array(starts, np.int32)) as q_starts,
        device.array(np.array(lengths, np.int32)) as ends,
    ):
        plan_tokens(stream, tokens, q_starts, ends)
        rows, four, _, completed = results(tokens, stream)
    want = np.zeros((40, 4), np.int32)
    want[:, 0] = -1
    for request, (first, n) in enumerate(zip(starts, told, strict=False)):
        for i in range(n):
            want[first + i] = (request, lengths[request] - n + i, lengths[request] - n, lengths[request])
    assert_equal_bits(rows, want)
    assert_equal_bits(four, np.where(want[:, 0] < 0, 0, (want[:, 1] + 1) // 4).astype(np.int32))
    assert completed[0] == sum(length // 4 - (length - n) // 4 for length, n in zip(lengths, told, strict=True) if n)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q_starts": np.zeros(3, np.int32)}, ValueError, r"q_starts: wanted shape \(4,\), got \(3,\)"),
        ({"lengths": np.zeros(4, np.int32)}, ValueError, r"lengths: wanted shape \(3,\), got \(4,\)"),
        ({"lengths": np.zeros(3, np.int64)}, TypeError, "lengths: wanted a device array of int32, got int64"),
        ({"tokens": 5}, TypeError, "tokens: wanted a StepTokens, got int"),
    ],
)
def test_an_operand_that_does_not_fit_is_named(
    device: Device, stream: Stream, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with StepTokens(device, max_tokens=8, max_requests=3) as tokens:
        given: dict[str, Any] = {
            "tokens": tokens,
            "q_starts": np.zeros(4, np.int32),
            "lengths": np.zeros(3, np.int32),
        } | changes
        arrays = {name: device.array(each) if name != "tokens" else each for name, each in given.items()}
        with pytest.raises(error, match=f"^plan_tokens: {message}"):
            plan_tokens(stream, **arrays)  # type: ignore[arg-type]
        for name, each in arrays.items():
            if name != "tokens":
                each.close()


def test_what_is_written_is_not_read(device: Device, stream: Stream) -> None:
    with (
        StepTokens(device, max_tokens=8, max_requests=3) as tokens,
        pytest.raises(ValueError, match=r"^plan_tokens: tokens at .* overlaps q_starts"),
    ):
        plan_tokens(stream, tokens, tokens.entries[4][:4], tokens.entries[4][4:7])


@pytest.mark.parametrize("name", ["max_tokens", "max_requests", "max_length"])
def test_counts_that_cannot_be_are_refused(device: Device, name: str) -> None:
    for count, error in ((0, ValueError), (2**30, ValueError), (2.0, TypeError)):
        with pytest.raises(error, match=f"StepTokens: {name}: wanted"):
            StepTokens(device, **({"max_tokens": 8, "max_requests": 3} | {name: count}))  # type: ignore[arg-type]
