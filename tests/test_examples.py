"""Every example runs alone, in a process of its own, and checks itself. Where no GPU is seen it says so and ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from drvkit.device import Device

HOME = Path(__file__).resolve().parent.parent
EXAMPLES = [path.name for path in sorted((HOME / "examples").glob("*.py")) if not path.name.startswith("_")]


def run(example: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(HOME / "examples" / example)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(HOME), os.environ.get("PYTHONPATH", "")])} | environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_there_are_examples() -> None:
    assert "demo.py" in EXAMPLES


@pytest.mark.parametrize("example", EXAMPLES)
def test_example(device: Device, example: str) -> None:
    done = run(example)
    if "CuPy is not installed" in done.stdout:
        pytest.skip("needs CuPy")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "ok"


@pytest.mark.parametrize("example", EXAMPLES)
def test_example_without_a_gpu(example: str) -> None:
    done = run(example, CUDA_VISIBLE_DEVICES="")  # no device, also where there is one
    said = done.stdout + done.stderr
    if example == "demo.py":
        assert done.returncode == 0, said
        assert "needs a device" in done.stdout
        return
    assert done.returncode == 2, said
    assert [line.startswith("needs a GPU: ") for line in said.splitlines()] == [True], said
