"""An operation is four files of one name."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Kernels without an op: what a conditional node is told belongs to the verbs of `Graph`.
NO_OP = {"set_condition"}

# References of what is made of several ops, in a graph: no kernel of its own.
OF_SEVERAL = {"latent_attention", "llama"}

PLACES = {
    "cuda_src/{}.cu": {path.stem for path in (ROOT / "cuda_src").glob("*.cu")} - NO_OP,
    "drvkit/ops/{}.py": {path.stem for path in (ROOT / "drvkit/ops").glob("[!_]*.py")},
    "drvkit/ref/{}.py": {path.stem for path in (ROOT / "drvkit/ref").glob("[!_]*.py")} - OF_SEVERAL,
    "tests/ops/test_{}.py": {path.stem.removeprefix("test_") for path in (ROOT / "tests/ops").glob("test_*.py")},
}


@pytest.mark.parametrize("stem", sorted(set().union(*PLACES.values())))
def test_an_op_has_its_four_files(stem: str) -> None:
    missing = [place.format(stem) for place, stems in PLACES.items() if stem not in stems]
    assert not missing, f"{stem} lacks {', '.join(missing)}"


@pytest.mark.parametrize("stem", sorted(OF_SEVERAL))
def test_what_is_made_of_several_ops_has_its_three_files(stem: str) -> None:
    for place in ("drvkit/{}.py", "drvkit/ref/{}.py", "tests/test_{}.py"):
        assert (ROOT / place.format(stem)).exists()


def test_there_are_ops() -> None:
    assert {"scale", "add"} <= set.intersection(*PLACES.values())
