"""Marked tests are run with all checks and under hostile schedules, each in a process of its own."""

from __future__ import annotations

import os
import re
import sys

import pytest

KERNELS = '''
import ctypes
import time

import numpy as np
import pytest

import drvkit as dk

SOURCE = """
__global__ void turn(int* out, int synchronized) {
  __shared__ int s[64];
  s[threadIdx.x] = threadIdx.x;
  if (synchronized) __syncthreads();
  out[threadIdx.x] = s[63 - threadIdx.x];
}
__global__ void message(int* data, volatile int* flag, int* out, int rank, int fenced) {
  if (rank == 0) {
    data[0] = 7;
    if (fenced) __threadfence_system();
    *flag = 1;
  } else {
    while (*flag == 0);
    out[0] = data[0];
  }
}
"""


@pytest.fixture
def devices():
    devices = [dk.Device(f"cpu:{rank}") for rank in range(2)]
    yield [(device, device.module(dk.Source.from_text(SOURCE, "kernels.cu"))) for device in devices]


def turn(devices, synchronized):
    device, module = devices[0]
    with device.stream() as stream, device.zeros(64, np.int32) as out:
        module.kernel("turn").launch(stream, grid=1, block=64, args=(out, synchronized))
        stream.synchronize()
        assert out.numpy().tolist() == list(range(63, -1, -1))


def message(devices, fenced):
    device = devices[1][0]
    data, flag, out = (device.zeros(1, np.int32) for _ in range(3))
    shared = [ctypes.c_void_p(buffer.address) for buffer in (data, flag, out)]
    streams = [each.stream() for each, _ in devices]
    for rank, (stream, (_, module)) in enumerate(zip(streams, devices)):
        module.kernel("message").launch(stream, grid=1, block=1, args=(*shared, rank, fenced))
    for stream in streams:
        stream.synchronize()
    assert out.numpy()[0] == 7
'''


@pytest.fixture(autouse=True)
def same_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The inner runs stand in other folders, and a relative path would lead nowhere."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(os.path.abspath(each) for each in sys.path))


def run(pytester: pytest.Pytester, tests: str, *options: str) -> pytest.RunResult:
    pytester.makeconftest('pytest_plugins = ["drvkit.pytest_plugin"]')
    pytester.makepyfile(test_marked=KERNELS + tests)
    return pytester.runpytest_subprocess("-q", "-rfs", "-W", "error", "--strict-markers", *options)


def test_a_race_fails_under_check_with_its_line_and_the_right_twin_passes(pytester: pytest.Pytester) -> None:
    done = run(
        pytester,
        """
@pytest.mark.drvkit_check
@pytest.mark.parametrize("synchronized", [0, 1])
def test_turn(devices, synchronized):
    turn(devices, synchronized)

@pytest.mark.drvkit_check
def test_skipped(devices):
    pytest.skip("for a reason")
""",
    )
    done.assert_outcomes(passed=1, failed=1, skipped=1)
    said = done.stdout.str()
    assert re.search(r"turn.*kernels\.cu:[46]\b", said), said
    assert "FAILED test_marked.py::test_turn[0]" in said
    assert "for a reason" in said


def test_a_missing_fence_fails_under_explore_and_its_seed_fails_again(pytester: pytest.Pytester) -> None:
    tests = """
@pytest.mark.drvkit_explore(schedules=30, ranks=2)
@pytest.mark.parametrize("fenced", [0, 1])
def test_message(devices, fenced):
    message(devices, fenced)
"""
    done = run(pytester, tests, "-n", "2")
    done.assert_outcomes(passed=1, failed=1)
    said = done.stdout.str()
    assert "of 30 schedules failed" in said
    again = re.search(r"again: pytest '([^']+)' --drvkit-seed (\d+)", said)
    assert again, said
    assert again[1] == "test_marked.py::test_message[0]"
    replayed = run(pytester, tests, again[1], "--drvkit-seed", again[2])
    replayed.assert_outcomes(failed=1)


def test_wrong_markers_are_told_by_the_name_of_the_test(pytester: pytest.Pytester) -> None:
    done = run(
        pytester,
        """
@pytest.mark.drvkit_explore(shedules=3)
def test_misspelt(): pass

@pytest.mark.drvkit_explore(schedules=0)
def test_none(): pass

@pytest.mark.drvkit_check
@pytest.mark.drvkit_explore
def test_both(): pass
""",
    )
    done.assert_outcomes(failed=3)
    done.stdout.fnmatch_lines(
        [
            "*::test_misspelt: drvkit_explore does not take shedules; it takes schedules, ranks, timeout",
            "*::test_none: drvkit_explore: schedules is a positive number, not 0",
            "*::test_both is marked drvkit_*",
        ]
    )


def test_a_test_that_takes_too_long_or_dies_has_failed(pytester: pytest.Pytester) -> None:
    done = run(
        pytester,
        """
@pytest.mark.drvkit_explore(schedules=1, timeout=1)
def test_slow(): time.sleep(30)

@pytest.mark.drvkit_check
def test_dies():
    import os
    os.kill(os.getpid(), 9)
""",
    )
    done.assert_outcomes(failed=2)
    done.stdout.fnmatch_lines(["*not done after 1 s*", "*ended before its test did*"], consecutive=False)
