"""Planted bugs of protocols between ranks are found under hostile schedules; their corrected twins are clean."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

import drvkit as dk
from drvkit.cpu.explore import Outcome as Result
from drvkit.cpu.explore import Schedule, summary
from drvkit.cpu.memory import memory
from drvkit.cpu.program import load

HERE = Path(__file__).resolve().parent
HOME = HERE.parents[1]


def drvkit(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line."""
    path = os.pathsep.join([str(HOME), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "drvkit", *arguments],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=280,
    )


def explore(script: str, *arguments: str, schedules: int) -> subprocess.CompletedProcess[str]:
    path = str(HERE / "explored" / script)
    return drvkit("explore", path, *arguments, "--ranks", "2", "--schedules", str(schedules), "--jobs", "2")


@pytest.mark.parametrize(
    ("script", "arguments", "said"),
    [
        ("lamport.py", ("1", "1"), "deadlock"),
        ("lamport.py", ("2", "1"), "deadlock"),
        ("lamport.py", ("3", "2"), "deadlock"),
        ("message.py", ("nofence",), "Mismatched elements"),
        ("message.py", ("one_word",), "Mismatched elements"),
    ],
)
def test_a_planted_bug_is_found(script: str, arguments: tuple[str, ...], said: str) -> None:
    done = explore(script, *arguments, "--until-failure", schedules=400)
    assert done.returncode == 1, done.stdout + done.stderr
    assert said in done.stdout
    seed = done.stdout.rsplit("--seed ", 1)[1].split()[0]
    path = str(HERE / "explored" / script)
    again = drvkit("explore", path, *arguments, "--ranks", "2", "--seed", seed)
    assert again.returncode == 1
    assert said in again.stdout + again.stderr, "a seed replays its run"


@pytest.mark.parametrize(
    ("script", "arguments"),
    [("lamport.py", ("3", "1")), ("message.py", ("fence",)), ("message.py", ("all_words",))],
)
def test_the_corrected_twin_is_clean(script: str, arguments: tuple[str, ...]) -> None:
    done = explore(script, *arguments, schedules=30)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "30 schedules, none failed" in done.stdout


def test_a_missing_edge_is_found_by_check() -> None:
    path = str(HERE / "explored" / "edge.py")
    good, bad = drvkit("check", path), drvkit("check", path, "forgotten")
    assert (good.returncode, good.stderr) == (0, "drvkit check: no finding\n"), good.stderr
    assert bad.returncode == 1
    for words in ("race: node 'triple' of graph 'forward'", "node 'double' of graph 'forward'", "made at edge.py:"):
        assert words in bad.stderr


def test_a_seed_decides_every_choice() -> None:
    kinds = [2, 5, 3, 2, 7, 1] * 200
    one, same, other = (list(map(Schedule(seed), kinds)) for seed in (1, 1, 2))
    assert one == same != other
    assert all(0 <= choice < n for choice, n in zip(one, kinds, strict=True))


def test_a_schedule_starves_and_is_fair_in_the_end() -> None:
    schedule = Schedule(3)
    picked = [schedule(2) for _ in range(20000)]
    longest = max(map(len, "".join(map(str, picked)).replace("01", "0 1").replace("10", "1 0").split()))
    assert longest > 100
    assert 0.1 < sum(picked) / len(picked) < 0.9


def test_a_summary_groups_failures() -> None:
    results = [Result(0, 0, "", ""), Result(1, 1, "x\ny\n", "y"), Result(2, 1, "y", "y")]
    assert summary(results) == "2 of 3 schedules failed\n  2 x y (seeds 1, 2)"
    assert summary(results[:1]) == "1 schedules, none failed"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("explore", "nowhere.py"), "there is no file nowhere.py"),
        (("explore", __file__, "--schedules", "0"), "wanted at least 1, got 0"),
        (("look", __file__), "invalid choice"),
    ],
)
def test_a_wrong_command_line(arguments: tuple[str, ...], said: str) -> None:
    done = drvkit(*arguments)
    assert done.returncode == 2
    assert said in done.stderr


FENCED = """
__global__ void fenced(int* x, int scope) {
  x[0] = 1;
  if (scope == 0) __threadfence_block();
  else if (scope == 1) __threadfence();
  else if (scope == 2) __threadfence_system();
  *(volatile int*)(x + 1) = 1;
  *(volatile int*)(x + 2) = x[0];
}"""


@pytest.mark.parametrize(("scope", "seen"), [(0, False), (1, False), (2, True), (3, False)])
def test_a_store_is_seen_by_all_when_a_fence_of_the_system_sends_it(scope: int, seen: bool) -> None:
    """Nothing else sends stores here before the kernel ends; its own block sees them at once."""
    image = dk.build(dk.Source.from_text(FENCED), arch="compute_90")
    program = load(image.data, mode="explored")
    x = memory.allocate(12, "device")
    memory.write(x.address, bytes(12))
    (function,) = program.functions.values()
    grid = function.grid((1, 1, 1), (1, 1, 1), struct.pack("<Qi4x", x.address, scope))
    states = []
    while grid.step(lambda n: n - 1) != "done":  # of all choices the last: no store goes on its way
        states.append(struct.unpack("<3i", ctypes.string_at(x.address, 12)))
    assert ((1, 0, 0) in states) is seen
    assert all(state[1:] == (0, 0) for state in states), "stores behind the fence stay with the block"
    assert struct.unpack("<3i", ctypes.string_at(x.address, 12)) == (1, 1, 1)
    memory.free(x.address)
    program.unload()
