"""Planted bugs of protocols between ranks are found under hostile schedules; their corrected twins are clean."""

from __future__ import annotations

import ctypes
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
from pathlib import Path

import pytest

import drvkit as dk
from drvkit import pytest_plugin
from drvkit.cpu.explore import Outcome as Result
from drvkit.cpu.explore import Schedule, summary
from drvkit.cpu.memory import memory
from drvkit.cpu.program import load

EXPLORED = Path(__file__).resolve().parent / "explored"
HOME = EXPLORED.parents[2]


def with_path() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(HOME), os.environ.get("PYTHONPATH", "")])}


def drvkit(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line."""
    return subprocess.run(
        [sys.executable, "-m", "drvkit", *arguments],
        env=with_path(),
        capture_output=True,
        text=True,
        timeout=280,
    )


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
def test_a_planted_bug_is_found(
    script: str, arguments: tuple[str, ...], said: str, drvkit_explore: pytest_plugin.Explore
) -> None:
    path = EXPLORED / script
    found = next(o for o in drvkit_explore(path, *arguments, ranks=2, seeds=range(400)) if o.failed)
    assert said in found.said
    again = drvkit("explore", str(path), *arguments, "--ranks", "2", "--seed", str(found.seed))
    assert again.returncode == 1
    assert said in again.stdout + again.stderr, "a seed replays its run"


@pytest.mark.parametrize(
    ("script", "arguments"),
    [("lamport.py", ("3", "1")), ("message.py", ("fence",)), ("message.py", ("all_words",))],
)
def test_the_corrected_twin_is_clean(
    script: str, arguments: tuple[str, ...], drvkit_explore: pytest_plugin.Explore
) -> None:
    outcomes = list(drvkit_explore(EXPLORED / script, *arguments, ranks=2, seeds=range(30)))
    assert summary(outcomes) == "30 schedules, none failed"


def test_a_missing_edge_is_found_by_check(drvkit_check: pytest_plugin.Check) -> None:
    good, bad = drvkit_check(EXPLORED / "edge.py"), drvkit_check(EXPLORED / "edge.py", "forgotten")
    assert (good.code, good.said) == (0, "")
    assert bad.code == 1
    for words in ("race: node 'triple' of graph 'forward'", "node 'double' of graph 'forward'", "made at edge.py:"):
        assert words in bad.why


def test_a_script_that_catches_what_it_did_wrong_has_failed(tmp_path: Path, drvkit_check: pytest_plugin.Check) -> None:
    script = tmp_path / "catches.py"
    script.write_text(f"""import runpy, sys
import drvkit as dk
sys.argv = ["edge.py", "forgotten"]
try:
    runpy.run_path({str(EXPLORED / "edge.py")!r}, run_name="__main__")
except dk.DriverError:
    pass
""")
    outcome = drvkit_check(script)
    assert (outcome.code, "race: node 'triple'" in outcome.why) == (1, True), outcome.said


def test_the_command_says_what_it_ran_and_the_verdict() -> None:
    path = str(EXPLORED / "edge.py")
    good, bad = drvkit("check", path), drvkit("check", path, "forgotten")
    assert re.fullmatch(rf"drvkit check: {path}: no finding; [\d.]+ s\n", good.stderr), good.stderr
    assert bad.stderr.splitlines()[-1].startswith(f"drvkit check: {path} forgotten: failed")
    assert (good.returncode, bad.returncode) == (0, 1)


def test_the_command_stops_at_a_failure_and_says_how_to_see_it_again(tmp_path: Path) -> None:
    script = tmp_path / "a script.py"
    script.write_text("import sys\nraise ValueError('\\nwhy' if 'bad' in sys.argv else 'other')\n")
    done = drvkit("explore", str(script), "bad", "--schedules", "9", "--jobs", "1", "--until-failure")
    assert done.returncode == 1
    assert "1 of 1 schedules failed\n  1 x ValueError: why (seeds 0)" in done.stdout
    again = done.stdout.rsplit("again: python -m drvkit ", 1)[1].strip()
    assert drvkit(*shlex.split(again)).returncode == 1


def test_a_bar_is_drawn_on_a_terminal_and_not_into_what_runs_print(tmp_path: Path) -> None:
    script = tmp_path / "prints.py"
    script.write_text("print('printed')\nraise SystemExit(3)\n")
    master, terminal = pty.openpty()
    command = [sys.executable, "-m", "drvkit", "explore", str(script), "--schedules", "3", "--jobs", "1"]
    done = subprocess.run(command, env=with_path(), stdout=subprocess.PIPE, stderr=terminal, text=True, timeout=120)
    drawn = os.read(master, 1 << 16).decode()
    os.close(master)
    os.close(terminal)
    assert "0 of 3 schedules, 0 failed" in drawn
    assert done.stdout.startswith("seed 0 failed:\nprinted\n\n3 of 3 schedules failed\n")


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
