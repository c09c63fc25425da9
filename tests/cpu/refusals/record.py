"""Record what a driver answers to each case: ``python -m tests.cpu.refusals.record OUT.json``, with a GPU.

With ``--device cpu`` the CPU device is asked.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
from pathlib import Path
from typing import Any

from . import captures, contexts, execs, graphs, launches, memory  # noqa: F401 - each adds its cases
from .world import CASES, Case, RefusedError, World, driver

DRIVERS = {"cuda": "cuda.bindings.driver", "cpu": "drvkit.cpu.driver"}


def answer(case: Case) -> Any:
    """What ``case`` gives in a forked process: what it breaks or leaves behind ends there."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            os.close(reading)
            try:
                result = case(World())
            except RefusedError as refused:
                result = f"Err {refused}"
            except BaseException as error:
                result = f"EXC {error!r}"
            with os.fdopen(writing, "w") as pipe:
                json.dump(result, pipe, default=str)
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    _, ended = os.waitpid(process, 0)
    return json.loads(text) if text else f"died {ended}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.cpu.refusals.record", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", choices=DRIVERS, default="cuda")
    options = parser.parse_args()
    driver.module = importlib.import_module(DRIVERS[options.device])
    answers = {case.__name__: answer(case) for case in CASES}
    options.out.write_text(json.dumps(answers, indent=1) + "\n")


if __name__ == "__main__":
    main()
