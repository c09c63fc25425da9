"""Planted bugs of protocols between ranks are found under hostile schedules; their corrected twins are clean."""

from __future__ import annotations

import ctypes
import itertools
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

import drvkit as dk
from drvkit import pytest_plugin
from drvkit.cpu.explore import Held, Schedule, failures, summary
from drvkit.cpu.explore import Outcome as Result
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
        ("message.py", ("device_fence",), "Mismatched elements"),
        ("message.py", ("one_word",), "Mismatched elements"),
    ],
)
def test_a_planted_bug_is_found_in_one_schedule_of_ten(
    script: str, arguments: tuple[str, ...], said: str, drvkit_explore: pytest_plugin.Explore
) -> None:
    path = EXPLORED / script
    found = failures(drvkit_explore(path, *arguments, ranks=2, seeds=range(20)))
    assert len(found) >= 2
    assert all(said in each.said for each in found)
    again = drvkit("explore", str(path), *arguments, "--ranks", "2", "--seed", str(found[0].seed))
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
    assert bad.stderr.splitlines()[-1].startswith(f"drvkit check: {path} forgotten: a finding")
    assert (good.returncode, bad.returncode) == (0, 1)


@pytest.mark.parametrize("ends", ["raise ValueError", "sys.exit(1)", "sys.exit('why')"])
def test_a_script_that_fails_by_itself_is_no_finding(tmp_path: Path, ends: str) -> None:
    script = tmp_path / "fails.py"
    script.write_text(f"import sys\nimport drvkit as dk\ndk.Device().zeros(4, int)\n{ends}\n")
    done = drvkit("check", str(script))
    assert (done.returncode, done.stderr.splitlines()[-1].split("; ")[0]) == (
        3,
        f"drvkit check: {script}: no finding, but the script failed",
    )


def test_a_script_that_dies_of_a_finding_is_one(tmp_path: Path) -> None:
    script = tmp_path / "dies.py"
    script.write_text(f"""import runpy, sys
import drvkit as dk
sys.argv = ["edge.py", "forgotten"]
try:
    runpy.run_path({str(EXPLORED / "edge.py")!r}, run_name="__main__")
except dk.DriverError:
    raise ValueError
""")
    assert drvkit("check", str(script)).returncode == 1


def test_the_exit_codes_are_told() -> None:
    for command in ((), ("check",), ("explore",)):
        said = " ".join(drvkit(*command, "--help").stdout.split())
        assert "1, a finding" in said
        assert "3, no finding of check, but the script failed by itself" in said


def test_the_mode_alone_makes_no_schedule(tmp_path: Path) -> None:
    script = tmp_path / "alone.py"
    script.write_text("import drvkit as dk\ndk.Device()\n")
    env = with_path() | {"DRVKIT_DEVICE": "cpu", "DRVKIT_CPU_MODE": "explored"}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "DRVKIT_CPU_MODE=explored, but there is no schedule to follow" in done.stderr
    assert drvkit("explore", str(script), "--seed", "1").returncode == 0


def test_fixtures_want_a_script_that_is_there(
    drvkit_check: pytest_plugin.Check, drvkit_explore: pytest_plugin.Explore
) -> None:
    for fixture in (drvkit_check, drvkit_explore):
        with pytest.raises(FileNotFoundError, match=r"'typo\.py'"):
            fixture("typo.py")


def test_the_lowest_seed_that_failed_is_shown_whole(tmp_path: Path) -> None:
    """Of two that run at once the second one fails first."""
    script = tmp_path / "fails.py"
    script.write_text("""import time
from drvkit.cpu.machine import machine
seed = machine.choose.seed
time.sleep(2 * (seed == 1))
if seed:
    raise ValueError("x" * 300 + ("the end" if seed == 1 else ""))
""")
    done = drvkit("explore", str(script), "--schedules", "3", "--jobs", "2")
    assert done.stdout.startswith("seed 1 failed:\n"), done.stdout
    assert "xthe end (seeds 1)" in done.stdout
    assert done.stdout.endswith(" --seed 1\n")


ONCE = """import os, sys, time
import numpy as np
import drvkit as dk
from drvkit.cpu.explore import once
from drvkit.cpu.machine import machine
with once():
    print("before", os.getpid())
    device = dk.Device()
    stream = device.stream()
    x = device.array(np.arange(32, dtype=np.int32))
    text = "__global__ void doubled(int* x) { x[threadIdx.x] *= 2; }"
    kernel = device.module(dk.Source.from_text(text, "doubled.cu")).kernel("doubled")
"""


def test_what_comes_once_is_done_once_and_each_schedule_begins_at_its_end(
    tmp_path: Path, drvkit_explore: pytest_plugin.Explore
) -> None:
    script = tmp_path / "doubles.py"
    script.write_text(
        ONCE
        + """
for _ in range(2):
    kernel.launch(stream, grid=1, block=32, args=(x,))
stream.synchronize()
print("after", os.getpid(), machine.choose.seed, *x.numpy()[:3])
raise SystemExit(3)
"""
    )
    said = [outcome.said.split() for outcome in drvkit_explore(script, seeds=range(5, 9))]
    assert len({before for _, before, *_ in said}) == 1
    assert len({after for _, _, _, after, *_ in said}) == 4
    assert sorted(words[4:] for words in said) == [[str(seed), "0", "4", "8"] for seed in range(5, 9)]
    again = drvkit("explore", str(script), "--seed", "7")
    assert again.stdout.split()[4:] == ["7", "0", "4", "8"], "and so it is where one seed is replayed"


def test_runs_that_parted_fail_are_late_and_end_like_others(
    tmp_path: Path, drvkit_explore: pytest_plugin.Explore
) -> None:
    script = tmp_path / "late.py"
    script.write_text(
        ONCE
        + f"""
open({str(tmp_path)!r} + f"/{{os.getpid()}}", "w").close()
if machine.choose.seed:
    time.sleep(60)
raise ValueError("why")
"""
    )
    runs = drvkit_explore(script, seeds=range(2), timeout=3)
    assert {outcome.seed: outcome.why for outcome in runs} == {0: "ValueError: why", 1: "not done after 3 s"}
    runs = drvkit_explore(script, seeds=[0, 1, 2])
    next(runs)
    runs.close()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{path.name}").exists() for path in tmp_path.glob("[0-9]*")):
        assert time.monotonic() < deadline, "nothing goes on when nobody wants to know"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("with once():\n    raise ValueError('early')", "ValueError: early"),
        (
            "with once():\n    import threading; threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
            "once: ",
        ),
        ("with once():\n    memory = dk.SymmetricMemory(dk.World.of_devices([device]), 16)", "once: "),
        ("machine.choose(2)\nwith once():\n    pass", "once: "),
    ],
)
def test_what_cannot_come_once_fails_in_each_schedule(
    tmp_path: Path, code: str, said: str, drvkit_explore: pytest_plugin.Explore
) -> None:
    script = tmp_path / "cannot.py"
    script.write_text(ONCE.partition("with once")[0] + "device = dk.Device()\n" + code)
    outcomes = list(drvkit_explore(script, seeds=range(2)))
    assert [outcome.seed for outcome in outcomes] == [0, 1]
    assert all(said in outcome.why for outcome in outcomes), outcomes


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
    results = [Result(2, 1, "y", "y"), Result(0, 0, "", ""), Result(1, 1, "x\ny\n", "y")]
    assert summary(results) == "2 of 3 schedules failed\n  2 x y (seeds 1, 2)"
    assert summary(results[1:2]) == "1 schedules, none failed"


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


class Holding(Schedule):
    """Of all choices the last; it holds all stores, until it is told which."""

    def __init__(self) -> None:
        super().__init__(0)
        self.held_back: Held | None = None

    def __call__(self, n: int) -> int:
        return n - 1

    def held(self) -> Held | None:
        return self.held_back


@pytest.mark.parametrize(("scope", "seen"), [(0, False), (1, False), (2, True), (3, False)])
def test_a_store_is_seen_by_all_when_a_fence_of_the_system_sends_it(scope: int, seen: bool) -> None:
    """Nothing else sends stores here, for which the block's end waits; the block itself sees them at once."""
    image = dk.build(dk.Source.from_text(FENCED), arch="compute_90a")
    program = load(image.data, mode="explored")
    x = memory.allocate(12, "device")
    memory.write(x.address, bytes(12))
    (function,) = program.functions.values()
    grid = function.grid((1, 1, 1), (1, 1, 1), struct.pack("<Qi4x", x.address, scope))
    schedule = Holding()
    states = []
    for _ in range(20):
        assert grid.step(schedule) != "done"
        states.append(struct.unpack("<3i", ctypes.string_at(x.address, 12)))
    assert ((1, 0, 0) in states) is seen
    assert all(state[1:] == (0, 0) for state in states), "stores behind the fence stay with the block"
    schedule.held_back = Held(0, 0, 0)
    assert grid.step(schedule) == "done"
    assert struct.unpack("<3i", ctypes.string_at(x.address, 12)) == (1, 1, 1)
    memory.free(x.address)
    program.unload()


ORDERED = """
__global__ void ordered(volatile int* x) {
  for (int i = 1; i <= 64; i++) x[threadIdx.x] = i;
}"""


def test_held_stores_are_overtaken_by_others_and_by_none_to_the_same_bytes() -> None:
    image = dk.build(dk.Source.from_text(ORDERED), arch="compute_90a")
    program = load(image.data, mode="explored")
    x = memory.allocate(128, "device")
    memory.write(x.address, bytes(128))
    (function,) = program.functions.values()
    grid = function.grid((1, 1, 1), (32, 1, 1), struct.pack("<Q", x.address))
    schedule = Holding()
    states = []
    for salt in range(8):
        schedule.held_back = Held(salt, 2, 128)
        for _ in range(8):
            grid.step(schedule)
            states.append(struct.unpack("<32i", ctypes.string_at(x.address, 128)))
    assert any(0 < state.count(0) < 32 for state in states)
    for before, after in itertools.pairwise(states):
        assert all(old <= new for old, new in zip(before, after, strict=True))
    schedule.held_back = Held(0, 0, 0)
    while grid.step(schedule) != "done":
        pass
    assert struct.unpack("<32i", ctypes.string_at(x.address, 128)) == (64,) * 32
    memory.free(x.address)
    program.unload()
