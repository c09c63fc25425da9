"""``python -m drvkit``: scripts on the CPU device, checked and explored.

    python -m drvkit check SCRIPT [ARGUMENTS]
    python -m drvkit explore SCRIPT [ARGUMENTS] --ranks 4 --schedules 1000
    python -m drvkit explore SCRIPT [ARGUMENTS] --ranks 4 --seed 17

Exit codes: 0, all went well; 1, a finding; 2, a wrong command line.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import nullcontext

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """The command; gives its exit code."""
    parser = argparse.ArgumentParser(prog="drvkit", description="Scripts on the CPU device, checked and explored.")
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="run a script with all checks")
    explore = commands.add_parser("explore", help="run a script under hostile schedules and weak memory")
    for command in (check, explore):
        command.add_argument("script", help="a Python file")
        command.add_argument("--ranks", type=_count, metavar="N", help="how many CPU devices there are (default 8)")
    explore.add_argument("--schedules", type=_count, default=100, metavar="M", help="how many runs (default 100)")
    explore.add_argument("--seed", type=int, metavar="S", help="replay the run of this seed, with what it prints")
    explore.add_argument("--until-failure", action="store_true", help="stop at the first failure")
    explore.add_argument("--jobs", type=_count, default=os.cpu_count() or 1, help="runs at a time (default: all CPUs)")
    explore.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="of a run (default 60)")
    given, rest = parser.parse_known_args(arguments)
    if not os.path.isfile(given.script):
        parser.error(f"there is no file {given.script}")
    os.environ["DRVKIT_DEVICE"] = "cpu"
    if given.ranks:
        os.environ["DRVKIT_CPU_DEVICES"] = str(given.ranks)
    if given.command == "check":
        return _check(given.script, rest)
    os.environ["DRVKIT_CPU_MODE"] = "explored"
    if given.seed is not None:
        from .cpu.explore import follow, run

        follow(given.seed)
        return run(given.script, rest)
    return _explore(given, rest)


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"wanted at least 1, got {number}")
    return number


def _check(script: str, arguments: list[str]) -> int:
    os.environ["DRVKIT_CPU_MODE"] = "raced"
    from .cpu.explore import run

    code = run(script, arguments)
    print("drvkit check: " + ("no finding" if not code else "failed"), file=sys.stderr)
    return int(code != 0)


def _explore(given: argparse.Namespace, arguments: list[str]) -> int:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TimeRemainingColumn

    from .cpu.explore import explore, run, summary

    outcomes, failed, told, start = [], 0, time.monotonic(), time.monotonic()
    seeds = range(given.schedules)
    runs = explore(lambda: run(given.script, arguments), seeds, jobs=given.jobs, timeout_s=given.timeout)
    columns = (
        "{task.completed} of {task.total} schedules, {task.fields[failed]} failed",
        BarColumn(),
        TimeRemainingColumn(),
    )
    # Without a thread of its own: the process forks.
    progress = Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True)
    bar = progress.add_task("", total=given.schedules, failed=0)
    shown = sys.stderr.isatty()
    with progress if shown else nullcontext():
        for outcome in runs:
            outcomes.append(outcome)
            if outcome.failed and not failed:
                progress.stop()
                print(f"seed {outcome.seed} failed:\n{outcome.said.rstrip()}\n", flush=True)
                if shown:
                    progress.start()
            failed += outcome.failed
            progress.update(bar, completed=len(outcomes), failed=failed)
            if failed and given.until_failure:
                runs.close()
                break
            if time.monotonic() - told > (0.1 if shown else 10):
                told = time.monotonic()
                if shown:
                    progress.refresh()
                else:
                    print(
                        f"{len(outcomes)} of {given.schedules} schedules, {failed} failed", file=sys.stderr, flush=True
                    )
    print(f"{summary(outcomes)}; {time.monotonic() - start:.1f} s")
    if failed:
        first = next(outcome.seed for outcome in outcomes if outcome.failed)
        ranks = f" --ranks {given.ranks}" if given.ranks else ""
        print(f"again: python -m drvkit explore {' '.join([given.script, *arguments])}{ranks} --seed {first}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
