"""Tables of cosines and sines for the rotation by position (RoPE), as the kernels take them.

One table, made here in float32, serves kernels and references: cosines of angles that are computed anew at another
precision differ by 0.04 at position 1e6.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Yarn", "cos_sin_table"]


class Yarn(NamedTuple):
    """How frequencies are stretched for positions beyond those of training (YaRN, arXiv:2309.00071)."""

    factor: float = 16.0
    trained: int = 65536  # positions
    beta_fast: float = 32.0  # pairs that turn more often than this in `trained` positions keep their frequency
    beta_slow: float = 1.0  # those that turn less often than this get it divided by `factor`


def cos_sin_table(
    positions: int, *, theta: float, rotary_dim: int = 64, yarn: Yarn | None = None
) -> NDArray[np.float32]:
    """float32 [positions, rotary_dim]: in each row the cosines of all pairs, then the sines.

    Pair i turns by ``position * theta ** (-2 i / rotary_dim)``: frequency and angle are rounded to float32, as models
    have them, cosine and sine are those of that angle. With ``yarn`` the frequency f of pair i becomes
    ``f * keep + f / factor * (1 - keep)``, where ``keep`` falls from 1 to 0 in a straight line between the pairs that
    turn ``beta_fast`` and ``beta_slow`` times in ``trained`` positions.
    """
    if rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(f"cos_sin_table: rotary_dim: wanted an even number, got {rotary_dim}")
    pairs = np.arange(rotary_dim // 2)
    frequencies = theta ** (-2.0 * pairs / rotary_dim)
    if yarn is not None:

        def pair(turns: float) -> float:
            return rotary_dim * math.log(yarn.trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = max(math.floor(pair(yarn.beta_fast)), 0), min(math.ceil(pair(yarn.beta_slow)), rotary_dim - 1)
        keep = 1 - np.clip((pairs - low) / max(high - low, 1e-3), 0, 1)
        frequencies = frequencies / yarn.factor * (1 - keep) + frequencies * keep
    angles = np.arange(positions, dtype=np.float32)[:, None] * frequencies.astype(np.float32)
    wide = angles.astype(np.float64)
    return np.concatenate([np.cos(wide), np.sin(wide)], axis=1).astype(np.float32)
