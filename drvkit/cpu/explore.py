"""Running a script or a test under hostile schedules and weak memory, again and again.

Each run is a process of its own, forked from one that has imported everything. Its seed decides all: which work, block
and warp goes on, where it is interrupted (at every volatile access, atomic and fence), and when whose stores are seen.
A seed replays its run.

The idea of picking schedules at random, but not evenly: S. Burckhardt et al., "A Randomized Scheduler with
Probabilistic Guarantees of Finding Bugs", ASPLOS 2010.
"""

from __future__ import annotations

import os
import random
import runpy
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import NoReturn

__all__ = ["SKIPPED", "Outcome", "Schedule", "explore", "follow", "run", "summary", "unseen_fault"]

LATE = 124  # the code of a run that took too long
SKIPPED = 77  # the exit code of a run that found that it has nothing to do

STICKS = (1, 4, 16, 64, 256, 1024)  # for how many choices a schedule favours one place
STRENGTHS = (0.5, 0.9, 1.0)  # and how often it then takes that


class Schedule:
    """Choices that a seed decides: mostly one place again and again, for a while.

    Choices among different numbers of things are of different kinds, each with a place of its own.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._kinds: dict[int, tuple[int, float, float]] = {}  # choices left, the place, how often it is taken

    def __call__(self, n: int) -> int:
        """One of ``n``."""
        if n < 2:
            return 0
        pick = self._random
        left, place, strength = self._kinds.get(n, (0, 0.0, 0.0))
        if not left:
            left, place, strength = pick.choice(STICKS), pick.random(), pick.choice(STRENGTHS)
        self._kinds[n] = left - 1, place, strength
        return int((place if pick.random() < strength else pick.random()) * n)


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    seed: int
    code: int  # of its exit; negative, a signal's; `LATE`
    said: str  # what it printed
    why: str  # the last line of that

    @property
    def failed(self) -> bool:
        return self.code not in (0, SKIPPED)


def follow(seed: int) -> None:
    """From here on, the schedule of a seed."""
    from .machine import machine

    machine.background = False
    machine.choose = Schedule(seed)


def unseen_fault() -> str | None:
    """What went wrong so far, also in work that nobody has waited for."""
    from .machine import machine

    machine.wait(lambda: not any(machine.left.values()))
    return None if machine.newest_fault is None else str(machine.newest_fault)


def run(script: str, arguments: Sequence[str]) -> int:
    """A script as if Python had been called with it; its exit code, also if work that it did not wait for fails."""
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as exit_:
        if exit_.code is not None and not isinstance(exit_.code, int):
            print(exit_.code, file=sys.stderr)
        code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    fault = unseen_fault()
    if not code and fault:
        print(fault, file=sys.stderr)
        code = 1
    return code


def _child(body: Callable[[], int], seed: int, output: int) -> NoReturn:
    code = 70
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        follow(seed)
        code = body()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def explore(
    body: Callable[[], int], seeds: Sequence[int], *, jobs: int = 1, timeout_s: float = 60.0
) -> Generator[Outcome, None, None]:
    """Run ``body``, which gives an exit code, once for each seed, ``jobs`` at a time; the outcomes as they come.

    A run that takes longer than ``timeout_s`` is ended, and has failed.
    """
    from . import compiler, driver  # what every run needs: imported once, before the processes part

    compiler.runtime()
    del driver
    waiting = list(reversed(seeds))
    running: dict[int, tuple[int, int, float]] = {}  # pid -> seed, file, start
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                seed = waiting.pop()
                with tempfile.TemporaryFile() as file:
                    output = os.dup(file.fileno())
                sys.stdout.flush()
                sys.stderr.flush()
                pid = os.fork()
                if not pid:
                    _child(body, seed, output)
                running[pid] = seed, output, time.monotonic()
            for pid, (seed, output, start) in list(running.items()):
                late = time.monotonic() - start > timeout_s
                if late:
                    os.kill(pid, signal.SIGKILL)
                ended, status = os.waitpid(pid, 0 if late else os.WNOHANG)
                if ended:
                    del running[pid]
                    yield _outcome(seed, output, status, timeout_s if late else None)
            time.sleep(0.001)
    finally:
        for pid, (_, output, _) in running.items():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(output)


def _outcome(seed: int, output: int, status: int, timeout_s: float | None) -> Outcome:
    said = os.pread(output, 1 << 20, 0).decode(errors="replace")
    os.close(output)
    code = os.waitstatus_to_exitcode(status)
    if timeout_s is not None:
        code = LATE
        said += f"not done after {timeout_s:g} s\n"
    elif code < 0:
        said += f"killed by {signal.Signals(-code).name}\n"
    lines = said.strip().splitlines()
    return Outcome(seed, code, said, lines[-1] if lines and code else "")


def summary(outcomes: Sequence[Outcome]) -> str:
    """How many failed, and how."""
    failed = [outcome for outcome in outcomes if outcome.failed]
    if not failed:
        return f"{len(outcomes)} schedules, none failed"
    lines = [f"{len(failed)} of {len(outcomes)} schedules failed"]
    for why, count in Counter(outcome.why for outcome in failed).most_common(5):
        seeds = [str(outcome.seed) for outcome in failed if outcome.why == why]
        more = ", ..." if len(seeds) > 5 else ""
        lines.append(f"  {count} x {why[:200]} (seeds {', '.join(seeds[:5])}{more})")
    return "\n".join(lines)
