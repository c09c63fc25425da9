"""Every example runs alone, in a process of its own, on each device, and checks itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from drvkit.device import Device

HOME = Path(__file__).resolve().parent.parent
EXAMPLES = [path.name for path in sorted((HOME / "examples").glob("*.py")) if not path.name.startswith("_")]


def start(example: str, *args: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(HOME / "examples" / example), *args],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(HOME), os.environ.get("PYTHONPATH", "")])} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(example: str, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    with start(example, *args, **environment) as process:
        try:
            out, err = process.communicate(timeout=240)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


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


# ---- a language model ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model", "nowhere.gguf"], "nowhere.gguf: there is no such file"),
        (["--model", str(HOME / "README.md")], "README.md: this is no GGUF file"),
        (["--pages", "2", "What?"], "32 tokens and 128 new ones are more than the 32 that a sequence can have here"),
        (["--sample", "--seed", "-1"], "sampling.seed: wanted 0 to 2**32 - 1, got -1"),
        (["--pages", "5000000"], "OUT_OF_MEMORY"),
    ],
)
def test_what_the_model_cannot_do_is_told_in_a_line(args: list[str], message: str) -> None:
    done = run("smollm2.py", *args, DRVKIT_DEVICE="cpu")
    assert done.returncode == 1, done.stdout + done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("smollm2.py: ")
    assert message in last
    assert "Traceback" not in done.stderr


def test_conversations_of_a_batch_answer_each() -> None:
    prompts = ("What is the capital of France?", "Say 'naïve 東京'.")
    args = ("--batch", "--sample", "--show", "--max-tokens", "5", *prompts)
    first, second = (run("smollm2.py", *args, DRVKIT_DEVICE="cpu") for _ in range(2))
    assert first.returncode == 0, first.stdout + first.stderr
    lines = [line for line in first.stdout.splitlines() if line.startswith(("  0: ", "  1: "))]
    assert sorted(line[:5] for line in lines) == ["  0: ", "  1: "]
    assert sorted(lines) == sorted(line for line in second.stdout.splitlines() if line.startswith(("  0: ", "  1: ")))
    assert "launches" in first.stdout
    assert "attention 29" in first.stdout, "--show prints the graph"
    assert first.stdout.splitlines()[-1] == "ok"


def test_an_interrupted_answer_ends_cleanly() -> None:
    with start("smollm2.py", "Tell me a story.", DRVKIT_DEVICE="cpu") as process:
        assert process.stdout is not None
        text = ""
        while len(text.partition("answer: ")[2]) < 2:  # it has begun
            text += (got := process.stdout.read(1))
            assert got, f"it ended: {process.communicate()}"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 130, out + err
    assert out.splitlines()[-1] == "interrupted"
    assert "Traceback" not in err
