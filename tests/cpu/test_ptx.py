"""What the text of a kernel tells of its source."""

from __future__ import annotations

import pytest

from drvkit.cpu.ptx import Instruction, parse

TEXT = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry k() {
  .loc PLACE
  ret;
}
.file 1 "/home/me/k.cu"
.file 2 "/include/outer.cuh"
.file 3 "/include/inner.cuh"
"""
OWN = "1 5 1, function_name $f0, inlined_at 1 11 3"  # a function of the kernel's file
OUTER = "2 6 3, function_name $f1, inlined_at 1 10 3"
INNER = "3 4 34, function_name $f2 + 8, inlined_at 2 6 3"


@pytest.mark.parametrize(
    ("places", "told"),
    [
        (["1 10 3"], "k.cu:10"),
        ([OWN], "k.cu:5"),
        ([OUTER], "outer.cuh:6 inlined at k.cu:10"),
        ([OUTER, INNER], "inner.cuh:4 inlined at k.cu:10"),
        ([OWN, "2 7 1, function_name $f1, inlined_at 1 5 1"], "outer.cuh:7 inlined at k.cu:5"),
        ([OUTER, INNER, OUTER.replace("1 10", "1 12"), INNER], "inner.cuh:4 inlined at k.cu:12"),
        ([OUTER, "2 6 3"], "outer.cuh:6"),
    ],
)
def test_what_was_inlined_is_told_with_its_nearest_call_in_the_kernels_file(places: list[str], told: str) -> None:
    (ret,) = parse(TEXT.replace("PLACE", "\n  .loc ".join(places))).functions["k"].body
    assert isinstance(ret, Instruction)
    assert ret.where == told
