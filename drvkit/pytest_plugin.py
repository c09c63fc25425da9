"""Tests on the CPU device with all checks, and under hostile schedules and weak memory.

    @pytest.mark.drvkit_check
    def test_rows_are_summed(): ...

    @pytest.mark.drvkit_explore(schedules=200, ranks=2)
    def test_a_message_arrives_whole(): ...

What ``python -m drvkit check`` and ``explore`` do to a script is done to the test, with its fixtures and parameters, in
a process of its own: a driver that one process has used cannot go on in another. An explored test fails with the first
schedule that fails, says how many did, and how to run that one again: ``pytest "tests/test_x.py::test_y" --drvkit-seed
17``, where the debugger and prints work.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any, Literal

import pytest
from _pytest.runner import runtestprotocol

__all__ = ["pytest_addoption", "pytest_configure", "pytest_runtest_protocol"]

MARKERS = {"drvkit_check": "raced", "drvkit_explore": "explored"}  # -> DRVKIT_CPU_MODE
ANSWER = "DRVKIT_PYTEST_ANSWER"  # in the process of one marked test: the file that gets its result


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("drvkit")
    group.addoption("--drvkit-seed", type=int, metavar="S", help="run explored tests in the schedule of this seed only")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "drvkit_check(ranks=8): run on the CPU device with all checks")
    config.addinivalue_line(
        "markers",
        "drvkit_explore(schedules=100, ranks=8, timeout=60): run under so many hostile schedules and weak memory, each"
        " for at most so many seconds",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    found = [mark for name in MARKERS for mark in item.iter_markers(name)]
    if not found:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    if ANSWER in os.environ:
        answer = _here(item, found[0])
        Path(os.environ[ANSWER]).write_text(json.dumps(answer))
    else:
        answer = _elsewhere(item, found)
    outcome, said = answer
    where = (str(item.path), item.location[1] or 0, said)
    report = pytest.TestReport(
        item.nodeid, item.location, dict.fromkeys(item.keywords, 1), outcome, where if outcome == "skipped" else said,
        "call",
    )  # fmt: skip
    item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


Answer = tuple[
    Literal["passed", "failed", "skipped"], str
]  # how the test ended (passed, failed, skipped), and what it said


def _elsewhere(item: pytest.Item, marks: list[pytest.Mark]) -> Answer:
    """Run a marked test in a process of its own."""
    if len(marks) > 1:
        return "failed", f"{item.nodeid} is marked {' and '.join(mark.name for mark in marks)}: one of them, please"
    (mark,) = marks
    wrong = _wrong(mark)
    if wrong:
        return "failed", f"{item.nodeid}: {wrong}"
    config = item.config
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["--rootdir", str(config.rootpath), *(["-c", str(config.inipath)] if config.inipath else [])]
    seed = config.getoption("drvkit_seed")
    if seed is not None:
        command += ["--drvkit-seed", str(seed)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "answer.json")
        environment = os.environ | {
            "DRVKIT_DEVICE": "cpu",
            "DRVKIT_CPU_MODE": MARKERS[mark.name],
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            ANSWER: str(file),
        }
        if "ranks" in mark.kwargs:
            environment["DRVKIT_CPU_DEVICES"] = str(mark.kwargs["ranks"])
        again = [*command, item.nodeid]
        alone = seed is not None and not config.pluginmanager.hasplugin("dsession")
        if alone:  # the debugger and prints work
            capture = config.pluginmanager.getplugin("capturemanager")
            with capture.global_and_fixture_disabled():
                subprocess.run(again, cwd=config.rootpath, env=environment, check=False)
            said = "what it said stands above"
        else:
            done = subprocess.run(
                again, cwd=config.rootpath, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, check=False,
            )  # fmt: skip
            said = done.stdout.decode(errors="replace")
        if not file.exists():
            return "failed", f"the process of {item.nodeid} ended before its test did:\n{said}"
        outcome, text = json.loads(file.read_text())
    return outcome, text


def _wrong(mark: pytest.Mark) -> str | None:
    """What is wrong with the arguments of a marker."""
    allowed = {"drvkit_check": ("ranks",), "drvkit_explore": ("schedules", "ranks", "timeout")}[mark.name]
    if mark.args:
        return f"{mark.name} takes {', '.join(allowed)} by name"
    for name, value in mark.kwargs.items():
        if name not in allowed:
            return f"{mark.name} does not take {name}; it takes {', '.join(allowed)}"
        if not isinstance(value, int | float if name == "timeout" else int) or value <= 0:
            return f"{mark.name}: {name} is a positive number, not {value!r}"
    return None


def _here(item: pytest.Item, mark: pytest.Mark) -> Answer:
    """Run a marked test in this process, or in forks of it."""
    from .cpu import explore

    seed = item.config.getoption("drvkit_seed")
    if mark.name == "drvkit_check":
        return _attempt(item)
    if seed is not None:
        explore.follow(seed)
        return _attempt(item)
    schedules, timeout_s = mark.kwargs.get("schedules", 100), mark.kwargs.get("timeout", 60)
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    jobs = max(1, (os.cpu_count() or 1) // workers)

    def body() -> int:
        outcome, said = _attempt(item)
        print(said)
        return {"passed": 0, "skipped": explore.SKIPPED}.get(outcome, 1)

    outcomes = []
    runs: Generator[Any] = explore.explore(body, range(schedules), jobs=jobs, timeout_s=timeout_s)
    for outcome in runs:
        outcomes.append(outcome)
        if outcome.code == explore.SKIPPED:
            runs.close()
            return "skipped", outcome.said.strip()
    failed = min((outcome for outcome in outcomes if outcome.failed), key=lambda outcome: outcome.seed, default=None)
    if failed is None:
        return "passed", ""
    again = f"pytest {shlex.quote(item.nodeid)} --drvkit-seed {failed.seed}"
    return "failed", f"{failed.said.rstrip()}\n\n{explore.summary(outcomes)}\nagain: {again}"


def _attempt(item: pytest.Item) -> Answer:
    """The test with its fixtures; it has failed too if something that it did not wait for fails."""
    from .cpu.explore import unseen_fault

    reports = runtestprotocol(item, log=False, nextitem=None)
    failed = [report for report in reports if report.failed]
    if failed:
        return "failed", "\n".join(report.longreprtext for report in failed)
    for report in reports:
        if report.skipped:
            return "skipped", report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
    fault = unseen_fault()
    return ("failed", fault) if fault else ("passed", "")
