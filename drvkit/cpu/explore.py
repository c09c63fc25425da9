"""Running a script or a test under hostile schedules and weak memory, again and again.

Each run is a process of its own, forked from one that has imported everything. Its seed decides all: which work, block
and warp goes on, where it is interrupted (at every volatile access, atomic and fence), and when whose stores are seen.
A seed replays its run.

The idea of picking schedules at random, but not evenly: S. Burckhardt et al., "A Randomized Scheduler with
Probabilistic Guarantees of Finding Bugs", ASPLOS 2010.
"""

from __future__ import annotations

import errno
import gc
import math
import os
import pickle
import random
import re
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
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
    "once",
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
        self.seed = seed
        self._random = random.Random(seed)
        self._kinds: dict[int, list[float]] = {}  # choices left, the place, how often it is taken
        self._pace = self._random.choice(PACES)
        self._held, self._steps = Held(0, 0, 0), 0  # for so many more

    @property
    def begun(self) -> bool:
        """Whether it has decided anything."""
        return bool(self._kinds or self._steps)

    def __call__(self, n: int) -> int:
        """One of ``n``."""
        if n < 2:
            return 0
        pick, kind = self._random, self._kinds.get(n)
        if not kind or not kind[0]:
            kind = self._kinds[n] = [pick.choice(STICKS), pick.random(), pick.choice(STRENGTHS)]
        kind[0] -= 1
        return int((kind[1] if pick.random() < kind[2] else pick.random()) * n)

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


class _Run:
    """A process of its own, forked here and now, in the schedule of a seed: in itself, ``pid`` is 0."""

    def __init__(self, seed: int | None, timeout_s: float, said: bytes = b"") -> None:
        self.seed, self.timeout_s, self.end = seed, timeout_s, time.monotonic() + timeout_s
        self.output = os.memfd_create("said")
        os.write(self.output, said)
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid:
            self.ended = os.pidfd_open(self.pid)
            return
        os.dup2(self.output, 1)
        os.dup2(self.output, 2)
        os.close(self.output)
        if seed is not None:
            follow(seed)

    def outcome(self) -> Outcome:
        """How it ended. One that goes on at its ``end`` is late, and ended."""
        late = not _readable([self.ended], self.end)
        if late:
            os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        said = os.pread(self.output, 1 << 20, 0).decode(errors="replace")
        os.close(self.output)
        os.close(self.ended)
        if late:
            code = LATE
            said += f"not done after {self.timeout_s:g} s\n"
        elif code < 0:
            said += f"killed by {signal.Signals(-code).name}\n"
        lines = said.strip().splitlines()
        return Outcome(self.seed, code, said, lines[-1] if lines and code else "")


def _readable(files: Sequence[int], until: float) -> list[int]:
    """Those of which one can read, or whose process has ended: when there are some, or none until then."""
    seconds = max(0.0, until - time.monotonic()) if math.isfinite(until) else None
    return select.select(files, [], [], seconds)[0]


def _end(body: Callable[[], int]) -> NoReturn:
    """All that a run does."""
    code = 70
    try:
        code = body()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _runs(
    seeds: Sequence[int | None], jobs: int, timeout_s: float, said: bytes = b"", stop: Sequence[int] = ()
) -> Generator[Outcome | None, None, None]:
    """Fork for each seed, ``jobs`` at a time: the outcomes as they come, and None in the processes themselves.

    ``said``: what they have printed before. ``stop``: files; when one can be read, no more is wanted.
    """
    waiting = list(reversed(seeds))
    running: dict[int, _Run] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                run = _Run(waiting.pop(), timeout_s, said)
                if not run.pid:
                    running.clear()  # they are not its own
                    yield None
                running[run.ended] = run
            ready = _readable([*running, *stop], min(run.end for run in running.values()))
            if any(file in ready for file in stop):
                break
            for run in list(running.values()):
                if run.ended in ready or time.monotonic() > run.end:
                    del running[run.ended]
                    yield run.outcome()
    finally:
        for run in running.values():
            run.end = 0.0
            run.outcome()


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
    gc.freeze()  # of what is here no run has to look for garbage
    done = 0
    for outcome in _ahead(body, seeds, jobs, timeout_s):
        done += 1
        yield outcome
    for each in _runs(seeds[done:], jobs, timeout_s):
        if each is None:
            _end(body)
        yield each


_part: Callable[[], None] | None = None  # where this process is the first run, and has not come to the end of `once`


def _ahead(
    body: Callable[[], int], seeds: Sequence[int | None], jobs: int, timeout_s: float
) -> Generator[Outcome, None, None]:
    """The outcome of the first seed, whose run goes ahead: it may come to the end of `once`. Then of all seeds."""
    global _part
    if not seeds:
        return
    ours, theirs = socket.socketpair()
    run = _Run(seeds[0], timeout_s)
    if not run.pid:
        ours.close()
        _part = partial(_parted, seeds, jobs, timeout_s, theirs)
        _end(body)
    theirs.close()
    parted = False
    try:
        with ours, ours.makefile("rb") as told:  # when that is closed, who parted ends, too
            if ours.fileno() in _readable([ours.fileno(), run.ended], run.end) and told.read(1):
                parted, run.end = True, math.inf
                with suppress(EOFError):
                    while True:
                        yield pickle.load(told)
    except BaseException:
        if not parted:
            run.end = 0.0
        raise
    finally:
        outcome = run.outcome()
    if not parted:
        yield outcome
    elif outcome.code:
        raise ChildProcessError(outcome.said)


def _parted(seeds: Sequence[int | None], jobs: int, timeout_s: float, theirs: socket.socket) -> None:
    """Go on as many processes, one for each seed. This one tells how they end."""
    from .calls.base import state

    sys.stdout.flush()
    sys.stderr.flush()
    said = os.pread(1, 1 << 20, 0)
    gc.collect()
    gc.freeze()
    state.parts = True
    answers = theirs.makefile("wb")
    with suppress(BrokenPipeError):
        answers.write(b"\n")
        answers.flush()
        for outcome in _runs(seeds, jobs, timeout_s, said, [theirs.fileno()]):
            if outcome is None:
                state.parts = False
                answers.close()
                theirs.close()
                return
            pickle.dump(outcome, answers)
            answers.flush()
    os._exit(0)


@contextmanager
def once() -> Iterator[None]:
    """What all schedules have in common: `explore` runs this block once, and each schedule begins at its end, in a
    process forked there. It comes before all other work of devices, and its own is done when it ends.

    Worlds, threads, and memory that processes can share do not go along: they are made behind it. Where nothing is
    explored it is as if the block stood there alone.
    """
    from .handles import handles
    from .machine import machine
    from .operations import Kernel
    from .storage import shares

    schedule = machine.choose
    if not isinstance(schedule, Schedule):
        yield
        return
    if schedule.begun:
        raise RuntimeError("once: the schedule has decided something already; this block comes before other work")
    follow(0)
    yield
    settled = _settled()
    if shares() or threading.active_count() > 1:
        raise RuntimeError("once: threads, and memory that processes can share, do not go along: make them behind it")
    for kernel in handles.all(Kernel):
        kernel.function.address  # noqa: B018  # compiled, and linked
    global _part
    part, _part = _part, None
    if part is not None and settled.newest_fault is None:
        part()
    else:
        follow(schedule.seed)


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
