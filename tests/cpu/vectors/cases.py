"""The table of all cases, and what is left out.

Left out, since sm_90a has no such instruction: conversions to and from e2m1x2, e2m3x2, e3m2x2 and ue8m0x2, ``cvt.rs``,
``cvt.{rn,rz}.satfinite.tf32``, ``cvt.pack.sat`` from u32, bf16 from and to integers of 8 bits, ``set.f32.f16``,
packed f32x2 arithmetic, mixed ``add.f32.f16``, ``min`` and ``max`` of three operands, ``redux.sync`` of f32.
Left out, since this project has no use for them: mma of m8n8k4, of 4 bits and 1 bit, of f64 and sparse ones, wgmma of
integers, texture, surface and video instructions except for two, ``fma.oob``.
Left out, since one launch does not show what they do: mbarrier, bulk copies, clusters, multimem, griddepcontrol.
"""

from __future__ import annotations

from .case import Case
from .conversions import CONVERSIONS
from .floating import FLOATING
from .integers import INTEGERS
from .matrices import MATRICES
from .memories import MEMORIES
from .warps import WARPS

CASES: list[Case] = [*INTEGERS, *FLOATING, *CONVERSIONS, *WARPS, *MEMORIES, *MATRICES]
BY_NAME: dict[str, Case] = {case.name: case for case in CASES}


def by_group() -> dict[str, list[Case]]:
    """The cases of each group, which are one module."""
    groups: dict[str, list[Case]] = {}
    for case in CASES:
        groups.setdefault(case.group, []).append(case)
    return groups
