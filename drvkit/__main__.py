"""``python -m drvkit``: scripts on the CPU device, checked and explored; and what caches of latent attention take.

    python -m drvkit check SCRIPT [ARGUMENTS]
    python -m drvkit explore SCRIPT [ARGUMENTS] --ranks 4 --schedules 1000
    python -m drvkit explore SCRIPT [ARGUMENTS] --ranks 4 --seed 17
    python -m drvkit kvcache --model v4-pro --tokens 1048576

What its exit codes say is in `CODES`.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time

from . import account
from .cpu.explore import FAILED, FOUND, Outcome, environment, explore, failures, follow, run, summary

__all__ = ["main"]

CODES = """exit codes: 0, all went well; 1, a finding: of check, or a schedule of explore in which the script failed in
whatever way; 2, a wrong command line; 3, no finding of check, but the script failed by itself: by an exception or its
exit code"""
VERDICTS = {0: "no finding", FOUND: "a finding", FAILED: "no finding, but the script failed"}


def main(arguments: list[str] | None = None) -> int:
    """The command; gives its exit code."""
    parser = argparse.ArgumentParser(
        prog="drvkit",
        description="Scripts on the CPU device, checked and explored; and what caches of latent attention take.",
        epilog=CODES,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="run a script with all checks", epilog=CODES)
    search = commands.add_parser("explore", help="run a script under hostile schedules and weak memory", epilog=CODES)
    for command in (check, search):
        command.add_argument("script", help="a Python file")
        command.add_argument("--ranks", type=_count, metavar="N", help="how many CPU devices there are (default 8)")
    search.add_argument("--schedules", type=_count, default=100, metavar="M", help="how many runs (default 100)")
    search.add_argument("--seed", type=int, metavar="S", help="replay the run of this seed, with what it prints")
    search.add_argument("--until-failure", action="store_true", help="stop at the first failure")
    search.add_argument("--jobs", type=_count, default=os.cpu_count() or 1, help="runs at a time (default: all CPUs)")
    search.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="of a run (default 60)")
    cache = commands.add_parser("kvcache", help="what the caches of a model with latent attention take")
    cache.add_argument("--model", choices=account.MODELS, default="v4-pro", help="whose (default v4-pro)")
    cache.add_argument("--tokens", type=_count, default=2**20, metavar="N", help="of a request (default 1048576)")
    cache.add_argument("--requests", type=_count, default=1, metavar="N", help="how many (default 1)")
    given, rest = parser.parse_known_args(arguments)
    if given.command == "kvcache":
        if rest:
            parser.error(f"unrecognized arguments: {shlex.join(rest)}")
        return _account(given)
    if not os.path.isfile(given.script):
        parser.error(f"there is no file {given.script}")
    os.environ.update(environment("raced" if given.command == "check" else "explored", given.ranks))
    if given.command == "check":
        return _check(given.script, rest)
    if given.seed is not None:
        follow(given.seed)
        return FOUND if run(given.script, rest) else 0
    return _explore(given, rest)


def _count(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"wanted an integer, got {text!r}") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"wanted at least 1, got {number}")
    return number


def _account(given: argparse.Namespace) -> int:
    from rich.console import Console

    Console().print(account.table(account.MODELS[given.model], given.tokens, given.requests))
    return 0


def _check(script: str, arguments: list[str]) -> int:
    start = time.monotonic()
    code = run(script, arguments)
    said = f"drvkit check: {shlex.join([script, *arguments])}: {VERDICTS[code]}; {time.monotonic() - start:.1f} s"
    print(said, file=sys.stderr)
    return code


def _explore(given: argparse.Namespace, arguments: list[str]) -> int:
    outcomes: list[Outcome] = []
    start = time.monotonic()
    seeds = range(given.schedules)
    runs = explore(lambda: run(given.script, arguments), seeds, jobs=given.jobs, timeout_s=given.timeout)
    with _Progress(given.schedules) as progress:
        for outcome in runs:
            outcomes.append(outcome)
            failed = failures(outcomes)
            progress.show(len(outcomes), len(failed))
            if failed and given.until_failure:
                runs.close()
                break
    if failed:
        print(f"seed {failed[0].seed} failed:\n{failed[0].said.rstrip()}\n")
    print(f"{summary(outcomes)}; {time.monotonic() - start:.1f} s")
    if failed:
        ranks = f" --ranks {given.ranks}" if given.ranks else ""
        command = shlex.join([given.script, *arguments])
        print(f"again: python -m drvkit explore {command}{ranks} --seed {failed[0].seed}")
    return FOUND if failed else 0


class _Progress:
    """How far it is: a bar on a terminal, elsewhere a line every ten seconds."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._total, self._start = total, time.monotonic()
        self._told = self._start
        # No thread draws it and no stream is redirected: the process forks.
        self._bar = Progress(
            TextColumn("{task.completed} of {task.total} schedules, {task.fields[failed]} failed"),
            BarColumn(),
            TextColumn("{task.fields[rate]:.1f}/s"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bar.add_task("", total=total, failed=0, rate=0.0)
        self._terminal = self._bar.console.is_terminal

    def __enter__(self) -> _Progress:
        if self._terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.hide()

    def hide(self) -> None:
        """Until it is shown again."""
        self._bar.stop()

    def show(self, done: int, failed: int) -> None:
        now = time.monotonic()
        if self._terminal:
            self._bar.update(self._task, completed=done, failed=failed, rate=done / max(now - self._start, 1e-9))
            self._bar.start()
            if now - self._told > 0.1:
                self._told = now
                self._bar.refresh()
        elif now - self._told > 10:
            self._told = now
            print(f"{done} of {self._total} schedules, {failed} failed", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
