"""What follows the choice of a token: the reference by hand, the checks of the op, the kernel against the reference,
and a loop that it ends."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from compare import assert_equal_bits
from kernels import ints
from numpy.typing import NDArray
from standins import Foreign

from drvkit import ops
from drvkit.device import Device, Stream
from drvkit.driver import DriverError
from drvkit.graph import Graph
from drvkit.ops.append_token import Requests, append_token
from drvkit.ref import append_token as ref
from drvkit.source import Source

int32 = np.int32

NEXT = Source.from_text(
    """
    extern "C" __global__ void next(const int* tokens, const int* lengths, int* chosen) {
      chosen[threadIdx.x] = lengths[threadIdx.x] > 0 ? tokens[threadIdx.x] + 3 : -1;
    }
    """
)


def test_the_reference_by_hand() -> None:
    tokens, lengths, counts = (np.array(each, int32) for each in ([5, 6, -1, 8], [9, 9, 0, 9], [0, 1, 2, 0]))
    limits, log = np.full(4, 2, int32), np.zeros((4, 3), int32)
    state = (tokens, lengths, counts, limits, log)
    assert ref.append_token(np.array([7, 7, -1, 2], int32), *state, {2})
    assert (tokens.tolist(), lengths.tolist(), counts.tolist()) == ([7, -1, -1, -1], [10, 0, 0, 0], [1, 2, 2, 1])
    assert log.tolist() == [[7, 0, 0], [0, 7, 0], [0, 0, 0], [2, 0, 0]]
    assert not ref.append_token(np.array([7], int32), *state, {2}, stop=True)


@pytest.fixture
def requests(device: Device) -> Any:
    with Requests(device, rows=70, capacity=40, ends=[2, 11]) as requests:
        yield requests


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no rows": ({"rows": 0}, ValueError, "rows: wanted 1 to 1024, got 0"),
    "many rows": ({"rows": 1025}, ValueError, "rows: wanted 1 to 1024, got 1025"),
    "a number that is none": ({"capacity": 1.5}, TypeError, r"capacity: wanted an integer, got 1\.5"),
    "no room": ({"capacity": 0}, ValueError, "capacity: wanted 1 to 1073741824, got 0"),
    "negative ends": ({"ends": [2, -1]}, ValueError, r"ends: wanted tokens from 0 on, got \[2, -1\]"),
}


@pytest.mark.parametrize(("changes", "error", "message"), WRONG.values(), ids=WRONG)
def test_requests_that_cannot_be_are_refused(
    device: Device, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^Requests: {message}"):
        Requests(device, **(dict[str, Any](rows=4, capacity=8, ends=[2]) | changes))


def test_operands_that_do_not_fit_are_refused(recorder: Any, requests: Requests) -> None:
    for chosen, error, message in (
        (Foreign((4,), np.int64), TypeError, "chosen: .*int32, got int64"),
        (Foreign((71,), int32), ValueError, r"chosen: wanted shape \(up to 70 rows,\), got \(71,\)"),
        (Foreign((0,), int32), ValueError, r"chosen: wanted shape \(up to 70 rows,\), got \(0,\)"),
        (requests.tokens, ValueError, "requests at .* overlaps chosen"),
    ):
        with pytest.raises(error, match=f"^append_token: {message}"):
            append_token(recorder, requests, chosen)
    with pytest.raises(TypeError, match="condition: wanted a Condition, got int"):
        append_token(recorder, requests, Foreign((4,), int32), condition=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="requests: wanted a Requests, got str"):
        append_token(recorder, "four", Foreign((4,), int32))  # type: ignore[arg-type]


def test_limits_are_within_the_capacity(requests: Requests, stream: Stream) -> None:
    for lengths, limits, message in (
        ([1, 1], [1], "as many limits as lengths, up to 70, got 1 and 2"),
        ([1] * 71, [1] * 71, "up to 70, got 71 and 71"),
        ([1], [41], "limits: wanted 1 to 40, got 41"),
        ([1], [0], "limits: wanted 1 to 40, got 0"),
        ([-1], [4], "lengths: wanted 0 or more, got -1"),
    ):
        with pytest.raises(ValueError, match=message):
            requests.begin(stream, lengths, limits)
    with pytest.raises(IndexError, match="Requests: row -1 of 70"):
        requests.appended(-1)


def state(requests: Requests, rows: int, stream: Stream) -> list[NDArray[Any]]:
    parts = (requests.tokens, requests.lengths, requests.counts, requests.limits)
    return [part[:rows].numpy(stream) for part in parts]


@pytest.mark.parametrize("rows", [1, 33, 70])
def test_every_step_is_that_of_the_reference(
    device: Device, stream: Stream, rng: np.random.Generator, requests: Requests, rows: int
) -> None:
    requests.begin(stream, rng.integers(0, 9, rows).tolist(), rng.integers(1, 7, rows).tolist())
    now = state(requests, rows, stream)
    log, written = np.zeros((rows, 40), int32), [[0] * 0 for _ in range(rows)]
    with device.zeros(rows, int32) as chosen:
        for step in range(8):
            new = np.where((now[1] > 0) & (rng.random(rows) < 0.8), rng.integers(0, 13, rows), -3).astype(int32)
            chosen.copy_from(new, stream)
            if step == 7:
                requests.stop()
            append_token(stream, requests, chosen)
            tokens, lengths, counts, limits = now
            goes_on = ref.append_token(new, tokens, lengths, counts, limits, log, {2, 11}, stop=step == 7)
            for got, want in zip(state(requests, rows, stream), now, strict=True):
                assert_equal_bits(got, want)
            assert requests.going.numpy(stream).tolist() == [goes_on]
            for row in range(rows):
                written[row] += requests.appended(row, len(written[row]))
                assert written[row] == log[row, : counts[row]].tolist()


def test_a_loop_of_one_launch_ends_when_all_have(
    device: Device, stream: Stream, graph: Graph, requests: Requests
) -> None:
    """The next token is always the newest one and 3: the rows come to 2 or 11, or to their limits."""
    firsts, limits = [5, 1, 3, 12], [40, 9, 4, 40]
    with device.module(NEXT) as module, ints(device, *firsts) as chosen:
        requests.begin(stream, [1, 1, 1, 0], limits)
        chosen.copy_from(np.array([*firsts[:3], -1], int32), stream)
        append_token(stream, requests, chosen)
        goes_on = graph.condition(name="goes on")
        first = graph.set_condition(goes_on, requests.going)
        body = graph.while_(goes_on, after=first, name="loop")
        choose = body.kernel(module.kernel("next"), grid=1, block=4, args=(requests.tokens, requests.lengths, chosen))
        append_token(body, requests, chosen, condition=goes_on, after=choose)
        with graph.instantiate() as exe:
            exe.launch(stream)
            stream.synchronize()
            assert [requests.appended(row) for row in range(4)] == [
                [5, 8, 11],
                [1, 4, 7, 10, 13, 16, 19, 22, 25],
                [3, 6, 9, 12],
                [],
            ]
            assert requests.tokens[:4].numpy(stream).tolist() == [-1] * 4
            exe.launch(stream)  # none goes on: it has no turn
            stream.synchronize()
            assert requests.counts[:4].numpy(stream).tolist() == [3, 9, 4, 0]
        del exe


def test_the_host_sees_tokens_while_the_loop_runs_and_can_end_it(device: Device, stream: Stream, graph: Graph) -> None:
    with (
        Requests(device, rows=1, capacity=2**20, ends=[]) as requests,
        ints(device, 7) as chosen,
    ):
        requests.begin(stream, [1], [2**20])
        append_token(stream, requests, chosen)
        goes_on = graph.condition(name="goes on")
        body = graph.while_(goes_on, after=graph.set_condition(goes_on, requests.going), name="loop")
        append_token(body, requests, chosen, condition=goes_on)
        with graph.instantiate() as exe:
            exe.launch(stream)
            until = time.monotonic() + 60
            while len(requests.appended(0)) < 5 and time.monotonic() < until:
                time.sleep(1e-3)
            assert not stream.done
            requests.stop()
            stream.synchronize()
            tokens = requests.appended(0)
            assert 5 <= len(tokens) < 2**20
            assert set(tokens) == {7}
        del exe


def test_a_row_beyond_its_limit_is_told_by_the_cpu_device(capfd: pytest.CaptureFixture[str]) -> None:
    victim = Device("cpu:5")
    requests = Requests(victim, rows=1, capacity=4, ends=[])
    chosen = ints(victim, 7)
    with pytest.raises(DriverError, match="LAUNCH_FAILED"), victim.stream() as stream:
        append_token(stream, requests, chosen)  # nobody began
    victim.driver.cuDevicePrimaryCtxReset(victim.handle)
    ops.release(victim)
    requests.close()
    chosen.close()
    assert "row 0 has 0 tokens of at most 0: wanted fewer, and at most 4" in capfd.readouterr().out
