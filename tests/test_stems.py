"""An operation is four files of one name."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Kernels without an op: what a conditional node is told belongs to the verbs of `Graph`.
NO_OP = {"set_condition"}

PLACES = {
    "cuda_src/{}.cu": {path.stem for path in (ROOT / "cuda_src").glob("*.cu")} - NO_OP,
    "drvkit/ops/{}.py": {path.stem for path in (ROOT / "drvkit/ops").glob("[!_]*.py")},
    "drvkit/ref/{}.py": {path.stem for path in (ROOT / "drvkit/ref").glob("[!_]*.py")},
    "tests/ops/test_{}.py": {path.stem.removeprefix("test_") for path in (ROOT / "tests/ops").glob("test_*.py")},
}


@pytest.mark.parametrize("stem", sorted(set().union(*PLACES.values())))
def test_an_op_has_its_four_files(stem: str) -> None:
    missing = [place.format(stem) for place, stems in PLACES.items() if stem not in stems]
    assert not missing, f"{stem} lacks {', '.join(missing)}"


def test_there_are_ops() -> None:
    assert {"scale", "add"} <= set.intersection(*PLACES.values())
