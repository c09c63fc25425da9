"""Every example runs alone, in a process of its own, and checks itself. Where no GPU is seen it says so and ends."""

from __future__ import annotations

import importlib
import os
import re
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


def planned(plan: str) -> list[str]:
    """The names in the picture of the demo's graph: behind ``then:`` one ends at a comma, else at the first space."""
    lines = [line.strip() for line in plan.splitlines()]
    return [re.sub(r"\w+: +", "", line).split(",")[0] if ":" in line.split()[0] else line.split()[0] for line in lines]


def test_the_demo_shows_the_graph_that_it_builds(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HOME / "examples"))
    demo = importlib.import_module("demo")
    wanted = {"scale": ["scale<float>"], "add": ["add_scalar<float>"]}
    wanted["set_condition"] = ["set_condition_above<float>", "set_condition<bool>"]
    modules = {source: device.module(source, names) for source, names in wanted.items()}
    kernels = {name: modules[source].kernel(name) for source, names in wanted.items() for name in names}
    graph = demo.Forward(device, kernels, 8).graph
    assert planned(demo.PLAN) == [node.name for node in graph.walk()]
    for line, node in zip(demo.PLAN.splitlines(), graph.walk(), strict=True):
        after = [edge.source.name for edge in node.graph.edges() if edge.target is node]
        assert line.endswith(f" after {', '.join(after)}") if after else " after " not in line
        word = node.kernel.name + ":" if node.kind == "kernel" else getattr(node, "variety", node.kind).split("-")[0]
        assert f" {word} " in line.replace("WHILE", "while").replace("IF", "if")
    graph.close()
    for module in modules.values():
        module.close()


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
