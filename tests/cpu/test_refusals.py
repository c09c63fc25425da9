"""The CPU device takes and refuses calls as an H200 does, with the same results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
RECORDED: dict[str, Any] = json.loads((HERE / "refusals" / "h200.json").read_text())

# Which attributes are of the machine where it was recorded, and so are not compared.
OF_THE_MACHINE = {
    "PCI_BUS_ID",
    "PCI_DEVICE_ID",
    "PCI_DOMAIN_ID",
    "GPU_PCI_DEVICE_ID",
    "GPU_PCI_SUBSYSTEM_ID",
    "NUMA_ID",
    "HOST_NUMA_ID",
}

# Cases in which the CPU device answers something else than the H200: to be aligned, where no reason is given.
DIFFERENT = {
    "device_attributes",  # the CPU device has no textures and surfaces, among others
    "func_attributes",  # registers are counted otherwise
    "priorities",
    "launch_cluster",
    "occupancy",
    "mem_alloc",
    "mem_query",
    "copies_3d",
    "pools",
    "events",
    "stream_ops",
    "cap_other_sync",
    "cap_ctx_sync",
    "cap_alloc",
    "cap_thread",
    "cap_captured_event",
    "cap_captured_event_after",
    "cap_unrecorded",
    "cap_fork",
    "cap_instantiate",
    "cap_kinds",
    "cap_programmatic_event",
    "cap_to_graph",
    "edges",
    "self_cycle",
    "nodes_bad",
    "batch_bad",
    "cond_nested_handle",
    "cond_body_kinds",
    "exclusive",
    "moved_child",  # the H200's driver crashed, and nothing else is recorded of it
    "body_graph",
    "node_attributes",
    "execs",
    "updates",
    "update_more",
    "alloc_unlaunched",
    "flags",
    "vmm",
    "vmm_share",
    "modules",
    "contexts",
    "sticky",
    "host_calls",
    "zero_handles",
    "params_back",
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the CPU device answers, each case in a process forked where the device was not yet used."""
    out = tmp_path_factory.mktemp("refusals") / "cpu.json"
    command = [sys.executable, "-m", "tests.cpu.refusals.record", str(out), "--device", "cpu"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=240)
    answered: dict[str, Any] = json.loads(out.read_text())
    return answered


def comparable(answer: Any, names: Any) -> Any:
    """``answer`` without attributes that are of the machine, or that only newer bindings than the recording's know."""
    if not isinstance(answer, dict) or not isinstance(names, dict):
        return answer
    kept = names.keys() - OF_THE_MACHINE
    return {name: comparable(value, names[name]) for name, value in answer.items() if name in kept}


def test_the_recording_is_of_these_cases(answers: dict[str, Any]) -> None:
    assert answers.keys() == RECORDED.keys()
    assert RECORDED.keys() >= DIFFERENT


@pytest.mark.parametrize("name", RECORDED)
def test_the_cpu_device_answers_as_an_h200_did(name: str, answers: dict[str, Any]) -> None:
    recorded = RECORDED[name]
    expected, answered = comparable(recorded, recorded), comparable(answers[name], recorded)
    if name in DIFFERENT:
        assert answered != expected, f"{name} is now answered as the H200 did: take it out of DIFFERENT"
    else:
        assert answered == expected
