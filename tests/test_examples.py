"""Every example runs alone, in a process of its own, on each device, and checks itself."""

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
    if "World.spawn" in (HOME / "examples" / example).read_text() and device.driver.kind == "cuda":
        count = device.driver.cuDeviceGetCount()
        if count < 2:
            pytest.skip(f"needs 2 GPUs, there are {count}")
    done = run(example, DRVKIT_DEVICE=device.id)
    if "nothing to show" in done.stdout:
        pytest.skip("needs CuPy, and a GPU for it")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "ok"


def test_without_a_gpu_the_cpu_device_is_taken_and_said() -> None:
    done = run("01_launch.py", CUDA_VISIBLE_DEVICES="", DRVKIT_DEVICE="")  # no device, also where there is one
    assert done.returncode == 0, done.stdout + done.stderr
    assert "(cpu:0, compute_90a)" in done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith("drvkit: no GPU here (")
