"""Running a script or a test under hostile schedules and weak memory, again and again.

Each run is a process of its own, forked from one that has imported everything. Its seed decides all: which work, block
and warp goes on, where it is interrupted (at every volatile access, atomic and fence), and when whose stores are seen.
A seed replays its run.

The idea of picking schedules at random, but not evenly: S. Burckhardt et al., "A Randomized Scheduler with
Probabilistic Guarantees of Finding Bugs", ASPLOS 2010.
"""

from __future__ import annotations

import errno
import os
import pickle
import random
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from .machine import Machine

__all__ = [
    "FAILED",
    "FOUND",
    "LATE",
    "SKIPPED",
    "Held",
    "Outcome",
    "Schedule",
    "apart",
    "asked",
    "environment",
    "explore",
    "failures",
    "first_line",
    "follow",
    "run",
    "script_runs",
    "summary",
    "untold",
]

# The codes of runs: a fault of a device, or a failed schedule; the script failed, but no device; it took too long
FOUND, FAILED, LATE = 1, 3, 124
APART = "DRVKIT_APART"  # in the environment of a process of `apart`: the file of its answers
SKIPPED = 77  # the exit code of a run that found that it has nothing to do

PACES = (1, 4)  # after how many steps a schedule looks what may go
HOLDS = (32, 128)  # for how many steps the same stores are held
ODDS = (0, 64, 128, 192)  # that one is, of 256
SHIFTS = (2, 8)  # of bytes that are held together: a word's, a small buffer's

STICKS = (1, 4, 16, 64, 256, 1024)  # for how many choices a schedule favours one place
STRENGTHS = (0.5, 0.9, 1.0)  # and how often it then takes that


@dataclass(frozen=True)
class Held:
    """Which stores are held: granules of 1 << ``shift`` bytes, ``odds`` of 256, other ones for each ``salt``."""

    salt: int
    shift: int
    odds: int


class Schedule:
    """Choices that a seed decides: mostly one place again and again, for a while.

    Choices among different numbers of things are of different kinds, each with a place of its own.

    Some stores are held for a while, in each buffer those to other bytes, and all others pass at once: a flag that
    overtakes its data stays ahead of them long enough to be seen.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._kinds: dict[int, tuple[int, float, float]] = {}  # choices left, the place, how often it is taken
        self._pace = self._random.choice(PACES)
        self._held, self._steps = Held(0, 0, 0), 0  # for so many more

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

    def held(self) -> Held | None:
        """Which stores do not go on their way at the next step; None: all."""
        if not self._steps:
            pick = self._random
            self._held = Held(pick.getrandbits(62), pick.choice(SHIFTS), pick.choice(ODDS))
            self._steps = pick.choice(HOLDS)
        self._steps -= 1
        return self._held if self._steps % self._pace == 0 else None


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    seed: int | None
    code: int  # of its exit; negative, a signal's; `LATE`
    said: str  # what it printed
    why: str  # the last line of that, where it did not end well

    @property
    def failed(self) -> bool:
        return self.code not in (0, SKIPPED)


def follow(seed: int) -> None:
    """From here on, the schedule of a seed."""
    from .machine import machine

    machine.background = False
    machine.choose = Schedule(seed)


def environment(mode: str, ranks: int | None = None) -> dict[str, str]:
    """What lets a process find the CPU device alone, in a mode, so many times."""
    found = {"DRVKIT_DEVICE": "cpu", "DRVKIT_CPU_MODE": mode}
    return found | {"DRVKIT_CPU_DEVICES": str(ranks)} if ranks else found


def untold() -> str:
    """What went wrong and no call has said, also in work that nobody has waited for; nothing if all is well."""
    return "\n".join({str(fault): None for fault in _settled().faults.values() if not fault.told})


def _settled() -> Machine:
    """The machine, with nothing left to do."""
    from .machine import machine

    machine.wait(lambda: not any(machine.left.values()))
    return machine


def first_line(message: str) -> str:
    """An error's message in one line: what stands behind its name, which numpy leaves alone in the first."""
    found = re.match(r"(\S+:)?\s*(.*)", message)
    return " ".join(filter(None, found.groups())) if found else message


def run(script: str, arguments: Sequence[str]) -> int:
    """A script as if Python had been called with it: 0, `FOUND` or `FAILED`. What went wrong on a device is a finding,
    also if the script did not wait for it, or caught the error.

    The last line that is printed says why, unless the script chose to exit so.
    """
    from .machine import machine

    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    died = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as exit_:
        if exit_.code is not None and not isinstance(exit_.code, int):
            print(exit_.code, file=sys.stderr)
        died = FAILED if exit_.code not in (None, 0) else 0
    except BaseException as error:  # what it had begun may wait for what it has not: that is no finding
        traceback.print_exc()
        message = "".join(traceback.format_exception_only(error)).rstrip()
        if "\n" in message:
            print(first_line(message), file=sys.stderr)
        return FAILED if machine.newest_fault is None else FOUND
    fault = _settled().newest_fault
    if fault is None:
        return died
    if not died:
        print(fault, file=sys.stderr)
    return FOUND


def _child(body: Callable[[], int], seed: int | None, output: int) -> NoReturn:
    code = 70
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        if seed is not None:
            follow(seed)
        code = body()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def explore(
    body: Callable[[], int], seeds: Sequence[int | None], *, jobs: int = 1, timeout_s: float = 60.0
) -> Generator[Outcome, None, None]:
    """Run ``body``, which gives an exit code, once for each seed, ``jobs`` at a time; the outcomes as they come.

    None as a seed: in no particular schedule. A run that takes longer than ``timeout_s`` is ended, and has failed.
    """
    # What every run needs, and what most scripts import: once, before the processes part.
    for name in (".driver", ".launch", "..build", "..module", "..graph", "numpy.ma", "numpy.random", "numpy.testing"):
        import_module(name, __package__)
    from ..driver import open_nvrtc
    from . import compiler

    open_nvrtc()
    compiler.runtime()
    waiting = list(reversed(seeds))
    running: dict[int, tuple[int | None, int, float]] = {}  # pid -> seed, file, start
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


def _outcome(seed: int | None, output: int, status: int, timeout_s: float | None) -> Outcome:
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


def apart(code: str, question: object, *, env: Mapping[str, str]) -> Generator[Any, None, None]:
    """The answers of Python code, which looks at what is `asked`, in a new process with ``env`` in its environment.

    Closing this ends that process and its children. `ChildProcessError`, with all that it printed, if it dies.
    """
    reader, writer = os.pipe()
    with tempfile.TemporaryFile() as said, os.fdopen(reader, "rb") as answers:
        with os.fdopen(writer, "wb"):
            process = subprocess.Popen(
                [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {code}"],
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=said,
                pass_fds=[writer],
                env=os.environ | env | {APART: str(writer)},
                start_new_session=True,
            )
        with process:
            try:
                assert process.stdin is not None
                with suppress(BrokenPipeError), process.stdin as stdin:
                    pickle.dump(question, stdin)
                while sent := pickle.load(answers):
                    yield sent[0]
                process.wait()
            except EOFError:
                said.seek(0)
                raise ChildProcessError(said.read().decode(errors="replace")) from None
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def asked() -> tuple[Any, Callable[..., None]] | None:
    """The question of `apart` in its process, and what answers: the last time without an argument."""
    number = os.environ.pop(APART, "")
    if not number:
        return None
    os.set_inheritable(int(number), False)
    answers = os.fdopen(int(number), "wb")

    def answer(*sent: object) -> None:
        pickle.dump(sent, answers)
        answers.flush()

    return pickle.load(sys.stdin.buffer), answer


def script_runs(
    script: str,
    arguments: Sequence[str],
    seeds: Sequence[int | None],
    *,
    mode: str,
    ranks: int | None = None,
    jobs: int = 1,
    timeout_s: float = 60.0,
) -> Generator[Outcome, None, None]:
    """`explore` a script from a process that may have used the driver: in a new one."""
    if not os.path.isfile(script):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), script)
    code = f"from {__name__} import _script_runs; _script_runs()"
    return apart(code, (script, arguments, seeds, jobs, timeout_s), env=environment(mode, ranks))


def _script_runs() -> None:
    given = asked()
    assert given is not None
    (script, arguments, seeds, jobs, timeout_s), answer = given
    for outcome in explore(lambda: run(script, arguments), seeds, jobs=jobs, timeout_s=timeout_s):
        answer(outcome)
    answer()


def failures(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Those that failed, by seed, in whatever order they came."""
    return sorted((outcome for outcome in outcomes if outcome.failed), key=lambda outcome: outcome.seed or 0)


def summary(outcomes: Sequence[Outcome]) -> str:
    """How many failed, and how."""
    failed = failures(outcomes)
    if not failed:
        return f"{len(outcomes)} schedules, none failed"
    lines = [f"{len(failed)} of {len(outcomes)} schedules failed"]
    for why, count in Counter(outcome.why for outcome in failed).most_common(5):
        seeds = [str(outcome.seed) for outcome in failed if outcome.why == why]
        more = ", ..." if len(seeds) > 5 else ""
        lines.append(f"  {count} x {why} (seeds {', '.join(seeds[:5])}{more})")
    return "\n".join(lines)
