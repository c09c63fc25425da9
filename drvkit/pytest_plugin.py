"""Tests on the CPU device with all checks, and under hostile schedules and weak memory.

    @pytest.mark.drvkit_check
    def test_rows_are_summed(): ...

    @pytest.mark.drvkit_explore(schedules=200, ranks=2)
    def test_a_message_arrives_whole(): ...

What ``python -m drvkit check`` and ``explore`` do to a script is done to the test, with its fixtures and parameters, in
new processes: a driver that one process has used cannot go on in another. So devices are made in fixtures and tests,
not when a module is imported. An explored test fails if it does so in any schedule. It says in how many, and how to see
one again: ``pytest "tests/test_x.py::test_y" --drvkit-seed 17`` runs it once, here, where the debugger and prints work.

Two fixtures run scripts so, for tests that want to know how they end::

    def test_the_fence_is_needed(drvkit_explore):
        assert any(outcome.failed for outcome in drvkit_explore("message.py", "no_fence", ranks=2))
"""

from __future__ import annotations

import math
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from .cpu.explore import (
    SKIPPED,
    Outcome,
    apart,
    asked,
    environment,
    explore,
    failures,
    first_line,
    follow,
    script_runs,
    summary,
    untold,
)

__all__ = ["Check", "Explore"]

_HERE = pytest.StashKey[bool]()  # marked tests run in this process
_RUNS = pytest.StashKey[list["_Runs"]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("drvkit").addoption(
        "--drvkit-seed", type=int, metavar="S", help="run one explored test once, here, in the schedule of this seed"
    )


def pytest_configure(config: pytest.Config) -> None:
    for line in (
        "drvkit_check: run the test in a new process, on the CPU device with all checks",
        "drvkit_explore(schedules=100, ranks=None, timeout=60): run the test in so many new processes, on the CPU"
        " device under hostile schedules and weak memory; with so many devices; for so many seconds each",
    ):
        config.addinivalue_line("markers", line)


@dataclass(frozen=True)
class _Runs:
    """How often a test is to be run, and how: the meaning of a marker with its arguments."""

    mode: str
    seeds: Sequence[int | None]
    ranks: int | None
    timeout: float

    @staticmethod
    def checked() -> _Runs:
        return _Runs("raced", [None], None, math.inf)

    @staticmethod
    def explored(*, schedules: int = 100, ranks: int | None = None, timeout: float = 60) -> _Runs:
        given = [("schedules", schedules, int), ("timeout", timeout, int | float)]
        for name, value, kind in given if ranks is None else [*given, ("ranks", ranks, int)]:
            if not isinstance(value, kind) or value <= 0:
                raise TypeError(f"{name}: wanted a positive number, got {value!r}")
        return _Runs("explored", range(schedules), ranks, timeout)


_MARKERS: dict[str, Callable[..., _Runs]] = {"drvkit_check": _Runs.checked, "drvkit_explore": _Runs.explored}


def _runs(item: pytest.Item) -> list[_Runs]:
    """What its markers ask for."""
    found = []
    for name, read in _MARKERS.items():
        mark = item.get_closest_marker(name)
        if mark is not None:
            try:
                found.append(read(*mark.args, **mark.kwargs))
            except TypeError as error:
                said = str(error).replace(f"{read.__qualname__}()", "it")
                raise pytest.fail.Exception(f"{item.nodeid}: marker {name}: {said}", pytrace=False) from None
    return found


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    if _HERE in session.config.stash:
        return
    seed = session.config.getoption("drvkit_seed")
    if seed is not None:
        _replay(session, seed)
        return
    for item in session.items:
        if isinstance(item, pytest.Function) and any(map(item.get_closest_marker, _MARKERS)):
            item.__class__ = _Apart


class _Apart(pytest.Function):
    """A marked test: its fixtures are made and it is called in other processes; here is only what came of it."""

    def setup(self) -> None:
        self.stash[_RUNS] = _runs(self)

    def runtest(self) -> None:
        for runs in self.stash[_RUNS]:
            self._judge(runs)

    def _judge(self, runs: _Runs) -> None:
        params, name = self.config.invocation_params, self.nodeid.partition("::")[2]
        args = list(params.args)  # the same session, but of one test
        args.insert(args.index("--") if "--" in args else len(args), "--capture=no")
        code = f"import os, pytest; os.chdir({str(params.dir)!r}); pytest.main({args!r})"
        outcomes: list[Outcome] = []
        with tempfile.TemporaryDirectory() as folder:
            env = environment(runs.mode, runs.ranks) | {"PYTEST_DEBUG_TEMPROOT": folder}
            sent = apart(code, (f"{self.path}::{name}", runs), env=env)
            try:
                for outcome in sent:
                    if outcome.code == SKIPPED:
                        sent.close()
                        pytest.skip(outcome.why)
                    outcomes.append(outcome)
            except ChildProcessError as error:
                raise pytest.fail.Exception(f"the test was not run:\n{error}", pytrace=False) from None
        failed = failures(outcomes)
        if not failed:
            return
        first = failed[0]
        if first.seed is None:
            pytest.fail(f"{first.why}\n\n{first.said.rstrip().removesuffix(first.why)}", pytrace=False)
        test = shlex.quote(f"{os.path.relpath(self.path, params.dir)}::{name}")
        again = f"python -m pytest {test} --drvkit-seed {first.seed}"
        said = f"seed {first.seed}:\n{first.said.rstrip()}"
        pytest.fail(f"{summary(outcomes)}\n\n{said}\n\nagain: {again}", pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if isinstance(item, _Apart) and report.when == "call" and isinstance(report.longrepr, tuple):
        report.longrepr = str(item.path), (item.location[1] or 0) + 1, report.longrepr[2]  # not in this file
    return report


@pytest.hookimpl(wrapper=True)
def pytest_cmdline_main(config: pytest.Config) -> Generator[None, Any, Any]:
    given = asked()
    if given is not None:
        (name, runs), answer = given
        config.pluginmanager.register(_Session(runs, answer))
        config.stash[_HERE] = True
        config.args = [name]
        for option, value in (
            ("numprocesses", None),  # of xdist
            ("dist", "no"),
            ("usepdb", False),
            ("trace", False),
            ("basetemp", None),  # each process makes its own
            ("log_file", os.devnull),  # the one that asks writes there
        ):
            setattr(config.option, option, value)
    return (yield)


class _Session:
    """What is different in a session that another one has asked for: its test is run in forks of its process."""

    def __init__(self, runs: _Runs, answer: Callable[..., None]) -> None:
        self.runs, self.answer = runs, answer

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed or not session.items:
            return None  # it says why
        (item,) = session.items
        _must_be_unused(item)
        session.config.option.runxfail = True  # whether it was to fail is asked of all runs together
        for outcome in explore(lambda: _attempt(item), self.runs.seeds, jobs=_jobs(), timeout_s=self.runs.timeout):
            self.answer(outcome)
        self.answer()
        return True


def _attempt(item: pytest.Item) -> int:
    """Run a test with its fixtures, and print how it ended."""
    reports = runtestprotocol(item, log=False, nextitem=None)
    failed = [report for report in reports if report.failed]
    for report in failed:
        for title, text in report.sections:
            print(f"--- {title}\n{text}")
        print(report.longreprtext)
    if failed:
        crash = getattr(failed[0].longrepr, "reprcrash", None)
        print(first_line(crash.message if crash else failed[0].longreprtext))
        return 1
    for report in reports:
        if report.skipped:
            print(report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else "")
            return SKIPPED
    return 0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    result = yield
    if _HERE in item.config.stash and (finding := untold()):
        pytest.fail(finding, pytrace=False)
    return result


def _replay(session: pytest.Session, seed: int) -> None:
    """The one test is run in this process, in the schedule of a seed."""
    if len(session.items) != 1 or session.items[0].get_closest_marker("drvkit_explore") is None:
        raise pytest.UsageError("--drvkit-seed: wanted one test that is marked drvkit_explore, and no others")
    (item,) = session.items
    runs = _runs(item)[-1]
    os.environ.update(environment(runs.mode, runs.ranks))
    _must_be_unused(item)
    session.config.stash[_HERE] = True
    follow(seed)


def _must_be_unused(item: pytest.Item) -> None:
    base = sys.modules.get("drvkit.cpu.calls.base")
    if base is None:
        return
    ranks = os.environ.get("DRVKIT_CPU_DEVICES")
    if base.state.initialized:
        raise pytest.UsageError(
            f"{item.nodeid}: a CPU device was made when its module or a conftest.py was imported; make it in a fixture"
        )
    if ranks and int(ranks) != base.DEVICES:
        raise pytest.UsageError(f"{item.nodeid}: set DRVKIT_CPU_DEVICES={ranks}: drvkit.cpu was imported before")


class Explore:
    """The fixture `drvkit_explore`: the outcomes of a script under these schedules, as they come."""

    def __call__(
        self,
        script: str | os.PathLike[str],
        *arguments: str,
        seeds: Sequence[int] = range(100),
        ranks: int | None = None,
        timeout: float = 60,
    ) -> Generator[Outcome, None, None]:
        return script_runs(
            os.fspath(script), arguments, seeds, mode="explored", ranks=ranks, jobs=_jobs(), timeout_s=timeout
        )


class Check:
    """The fixture `drvkit_check`: how a script ends with all checks."""

    def __call__(
        self, script: str | os.PathLike[str], *arguments: str, ranks: int | None = None, timeout: float = 60
    ) -> Outcome:
        (outcome,) = script_runs(os.fspath(script), arguments, [None], mode="raced", ranks=ranks, timeout_s=timeout)
        return outcome


@pytest.fixture(scope="session")
def drvkit_explore() -> Explore:
    """``drvkit_explore(script, *arguments, seeds=range(100), ranks=None, timeout=60)``: the outcomes, as they come."""
    return Explore()


@pytest.fixture(scope="session")
def drvkit_check() -> Check:
    """``drvkit_check(script, *arguments, ranks=None, timeout=60)``: how a script ends with all checks."""
    return Check()


def _jobs() -> int:
    """Runs at a time: the other processes of xdist want theirs."""
    return max(1, (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
