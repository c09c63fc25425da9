"""The CPU device takes and refuses calls as an H200 does, with the same results."""

from __future__ import annotations

import json
import subprocess
import sys
from fnmatch import fnmatchcase
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

# Why the CPU device answers otherwise, by the place of the answer: a pattern stands for all below it, too.
DIFFERENT = {
    **{
        f"device_attributes/{name}": reason
        for reason, names in {
            "it has no textures, surfaces and arrays": (
                "MAXIMUM_TEXTURE*",
                "MAXIMUM_SURFACE*",
                "CAN_TEX2D_GATHER",
                "*_CUDA_ARRAY_SUPPORTED",
            ),
            "it has no managed memory": ("MANAGED_MEMORY", "CONCURRENT_MANAGED_ACCESS"),
            "kernels do not reach memory that the host did not get from it": (
                "*HOST_REGISTER_SUPPORTED",
                "CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM",
            ),
            "its pools and its physical memory are those of devices": (
                "HOST_*MEMORY_POOLS_SUPPORTED",
                "HOST_*VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
            ),
            "its pools are not shared": ("MEMPOOL_SUPPORTED_HANDLE_TYPES",),
            "no other machine and no other driver reaches its memory": (
                "GPU_DIRECT_RDMA_*",
                "DMA_BUF_SUPPORTED",
                "HANDLE_TYPE_FABRIC_SUPPORTED",
                "TIMELINE_SEMAPHORE_INTEROP_SUPPORTED",
            ),
            "memory is neither compressed nor corrected": ("GENERIC_COMPRESSION_SUPPORTED", "ECC_ENABLED"),
            "kernels with tensor maps or calls through pointers are refused": (
                "TENSOR_MAP_ACCESS_SUPPORTED",
                "UNIFIED_FUNCTION_POINTERS",
            ),
            "the bindings have no launch on several devices any more": ("COOPERATIVE_MULTI_DEVICE_LAUNCH",),
            "it has multicast objects; that H200 had no switch": ("MULTICAST_SUPPORTED",),
        }.items()
        for name in names
    },
    "func_attributes/*/NUM_REGS": "ptxas allocates registers, which the CPU device only estimates",
    "mem_query/9": "allocations lie apart, so that what runs over the end of one is seen",
    "wide_value/3": "what an element has no room for is dropped; the H200 adds it to the elements behind",
    **dict.fromkeys(
        ("alloc_update/0", "alloc_update/1"), "the memory of each graph begins a page; that of the H200 has 2 MiB"
    ),
    "moved_child": "the H200's driver crashed, and nothing else is recorded of it",
    **dict.fromkeys(
        (f"vmm/{place}" for place in (10, 14, 17, 21, 24, 26)),
        "a mapping that runs past the end of its reservation is refused, and so is not in the way of later ones",
    ),
    **dict.fromkeys(
        ("sticky/18", "sticky/19", "sticky/20", "sticky/22"),
        "a reset forgets what went wrong and takes nothing away, so that a process can go on after a fault",
    ),
    "host_calls/2/0/1": "the manual forbids host functions every call, and it refuses every call",
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


def by_place(answer: Any, at: str) -> dict[str, Any]:
    """Each single answer by its place: "pools/2/0"."""
    if not isinstance(answer, dict | list) or not answer:
        return {at: answer}
    below = answer.items() if isinstance(answer, dict) else enumerate(answer)
    return {place: value for name, part in below for place, value in by_place(part, f"{at}/{name}").items()}


def covers(pattern: str, place: str) -> bool:
    return fnmatchcase(place, pattern) or fnmatchcase(place, f"{pattern}/*")


def test_the_recording_is_of_these_cases(answers: dict[str, Any]) -> None:
    assert answers.keys() == RECORDED.keys()
    assert RECORDED.keys() >= {pattern.split("/")[0] for pattern in DIFFERENT}


@pytest.mark.parametrize("name", RECORDED)
def test_the_cpu_device_answers_as_an_h200_did(name: str, answers: dict[str, Any]) -> None:
    recorded = RECORDED[name]
    expected, answered = (by_place(comparable(answer, recorded), name) for answer in (recorded, answers[name]))
    nothing = "no answer"
    wrong = {
        place: (answered.get(place, nothing), expected.get(place, nothing))
        for place in sorted(expected.keys() | answered.keys())
        if answered.get(place, nothing) != expected.get(place, nothing)
    }
    explained = [pattern for pattern in DIFFERENT if pattern.split("/")[0] == name]
    assert {place: both for place, both in wrong.items() if not any(covers(p, place) for p in explained)} == {}
    right = [pattern for pattern in explained if not any(covers(pattern, place) for place in wrong)]
    assert right == [], "these are now answered as the H200 did: take them out of DIFFERENT"
