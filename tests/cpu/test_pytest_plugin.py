"""Marked tests are run with all checks and under hostile schedules, in other processes; a test can ask for the same."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable

import pytest

from drvkit.build import DEFAULT_CACHE

CACHE = str(DEFAULT_CACHE.directory)  # before pytester has another home
PRELUDE = '''
import ctypes
import os
import time

import numpy as np
import pytest

import drvkit as dk

SOURCE = """
__global__ void turn(int* out, int synchronized) {
  __shared__ int s[64];
  if (threadIdx.x < 32) s[threadIdx.x] = s[threadIdx.x + 32] = threadIdx.x;
  if (synchronized) __syncthreads();
  if (threadIdx.x >= 32) out[threadIdx.x] = s[63 - threadIdx.x];  // 6
}
__global__ void message(volatile int* data, volatile int* flag, int* out, int rank, int fenced) {
  if (rank == 0) {
    data[0] = 7;
    if (fenced) __threadfence_system();
    flag[0] = 1;
    while (flag[1] == 0);  // else its end would send what the fence did not
  } else {
    while (flag[0] == 0);
    out[0] = data[0];
    flag[1] = 1;
  }
}
"""


@pytest.fixture
def devices():
    devices = [dk.Device(f"cpu:{rank}") for rank in range(2)]
    yield [(device, device.module(dk.Source.from_text(SOURCE, "kernels.cu"))) for device in devices]


def turn(devices, synchronized, waits=True):
    device, module = devices[1]
    stream, out = device.stream(), device.zeros(64, np.int32)
    module.kernel("turn").launch(stream, grid=1, block=64, args=(out, synchronized))
    if waits:
        stream.synchronize()


def message(devices, fenced):
    device = devices[1][0]
    data, flag, out = (device.zeros(2, np.int32) for _ in range(3))
    shared = [ctypes.c_void_p(buffer.address) for buffer in (data, flag, out)]
    streams = [each.stream() for each, _ in devices]
    for rank, (stream, (_, module)) in enumerate(zip(streams, devices)):
        module.kernel("message").launch(stream, grid=1, block=1, args=(*shared, rank, fenced))
    for stream in streams:
        stream.synchronize()
    np.testing.assert_array_equal(out.numpy(), [7, 0])
'''

Run = Callable[..., pytest.RunResult]


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """``run(tests, *options)``: pytest, of these tests after what is above."""
    # It runs in another folder, where a relative path leads nowhere.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(os.path.abspath, sys.path)))
    monkeypatch.setenv("DRVKIT_CACHE_DIR", CACHE)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # whatever else is installed here, and warns

    def run(tests: str, *options: str) -> pytest.RunResult:
        pytester.makeconftest('pytest_plugins = ["drvkit.pytest_plugin"]')
        pytester.makepyfile(test_marked=PRELUDE + tests)
        return pytester.runpytest_subprocess("-q", "-rA", "-W", "error", "--strict-markers", *options)

    return run


def test_a_finding_fails_a_checked_test_unless_it_asked(run: Run) -> None:
    done = run(
        """
@pytest.mark.drvkit_check
@pytest.mark.parametrize("synchronized", [0, 1], ids=["none", "a [b::c]"])
def test_turn(devices, synchronized):
    turn(devices, synchronized)

@pytest.mark.drvkit_check
def test_asked(devices):
    with pytest.raises(dk.DriverError, match="race: it reads 4 bytes"):
        turn(devices, 0)

@pytest.mark.drvkit_check
def test_nobody_waits(devices):
    turn(devices, 0, waits=False)
""",
    )
    done.assert_outcomes(passed=2, failed=2)
    said = done.stdout.str()
    assert len(re.findall(r"kernels\.cu:6 .*race: it reads 4 bytes", said)) >= 2, said
    assert "FAILED test_marked.py::test_turn[none]" in said
    assert "FAILED test_marked.py::test_nobody_waits" in said


def test_a_missing_fence_fails_under_explore_and_what_it_says_fails_again(run: Run) -> None:
    tests = """
@pytest.mark.drvkit_explore(schedules=12, ranks=2)
@pytest.mark.parametrize("fenced", [0, 1])
def test_message(devices, fenced):
    assert len(devices) == devices[0][0].driver.cuDeviceGetCount()
    message(devices, fenced)
"""
    done = run(tests, "-p", "xdist.plugin", "-n", "2")
    done.assert_outcomes(passed=1, failed=1)
    said = done.stdout.str()
    assert re.search(r"\d of 12 schedules failed\n  \d x AssertionError: Arrays are not equal \(seeds \d", said), said
    again = re.search(r"again: python -m pytest (.* --drvkit-seed \d+)", said)
    assert again, said
    replayed = run(tests, *shlex.split(again[1]))
    replayed.assert_outcomes(failed=1)
    assert "Arrays are not equal" in replayed.stdout.str()


def test_marked_tests_are_tests_like_others(run: Run, pytester: pytest.Pytester) -> None:
    """Between others that share a fixture with them, with files of their own, skipped, expected to fail, the last."""
    pytester.makepyfile(test_next="def test_next(): pass")
    done = run(
        """
@pytest.fixture(scope="module")
def shared():
    return []

def test_before(shared): shared.append(1)

@pytest.mark.drvkit_explore(schedules=2)
def test_alone(shared, tmp_path):
    shared.append(2)
    assert shared == [2]
    (tmp_path / "new").touch(exist_ok=False)

def test_after(shared): assert shared == [1]

@pytest.mark.drvkit_explore(schedules=1)
def test_skipped(): pytest.skip("for a reason")

@pytest.mark.xfail(strict=True)
@pytest.mark.drvkit_check
@pytest.mark.drvkit_explore(schedules=1)
def test_expected():
    assert os.environ["DRVKIT_CPU_MODE"] == "raced"

@pytest.mark.drvkit_check
def test_last(shared): assert shared == []
""",
    )
    done.assert_outcomes(passed=5, skipped=1, xfailed=1)
    done.stdout.re_match_lines([r"SKIPPED \[1\] test_marked.py:\d+: for a reason"])


def test_what_cannot_be_run_is_told_by_the_name_of_the_test(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_early="""
import pytest
import drvkit as dk
dk.Device("cpu")
@pytest.mark.drvkit_check
def test_early(): pass
"""
    )
    done = run(
        """
@pytest.mark.drvkit_explore(shedules=3)
def test_misspelt(): pass

@pytest.mark.drvkit_explore(schedules=0)
def test_none(): pass

@pytest.mark.drvkit_explore(schedules=1, timeout=0.5)
def test_slow(): time.sleep(30)

@pytest.mark.drvkit_check
def test_dies(): os.kill(os.getpid(), 9)
""",
    )
    done.assert_outcomes(errors=2, failed=3)
    said = done.stdout.str()
    for words in (
        "test_misspelt: marker drvkit_explore: it got an unexpected keyword argument 'shedules'",
        "test_none: marker drvkit_explore: schedules: wanted a positive number, got 0",
        "test_early: a CPU device was made when its module or a conftest.py was imported",
        "not done after 0.5 s",
        "killed by SIGKILL",
    ):
        assert words in said, words


def test_a_seed_is_of_one_test(run: Run) -> None:
    done = run("@pytest.mark.drvkit_explore\ndef test_one(): pass\n\ndef test_two(): pass\n", "--drvkit-seed", "1")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    assert "wanted one test that is marked drvkit_explore" in done.stderr.str()
