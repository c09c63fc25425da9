"""All-reduce, residual and RMSNorm of all ranks at once, in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["allreduce", "allreduce_rmsnorm", "sent"]

ABSENT = 0x80008000  # what an empty word of a mailbox is


def sent(x: NDArray[Any]) -> NDArray[Any]:
    """``x`` as it travels, its last axis a whole number of 32-bit words: a word that says "absent" is replaced. In
    16-bit types that is a pair of -0, which becomes (+0, +0); in float32 it is -4.6e-41, which becomes its neighbour.
    """
    words = np.ascontiguousarray(x).view(np.uint32).copy()
    words[words == ABSENT] = ABSENT + 1 if x.dtype.itemsize == 4 else 0
    return words.view(x.dtype)


def allreduce(x: NDArray[Any]) -> NDArray[Any]:
    """The sum over ``x``'s first axis, in rank order in float32, rounded once; it travels too, see `sent`."""
    with np.errstate(all="ignore"):
        total = np.zeros(x.shape[1:], np.float32)
        for each in sent(x):
            total = total + each.astype(np.float32)
        return sent(total.astype(x.dtype))


def allreduce_rmsnorm(
    x: NDArray[Any], residual: NDArray[Any], weight: NDArray[Any], *, eps: float = 1e-6, out_scale: float = 1.0
) -> tuple[NDArray[np.float64], NDArray[Any]]:
    """``h = sum over ranks of x + residual``, ``out = h * rsqrt(mean(h^2) + eps) * weight``.

    Args:
        x: [ranks, tokens, hidden]. residual: [ranks, tokens, hidden], each rank's own. weight: [hidden].

    Returns:
        out and h, [ranks, tokens, hidden]; h has the bits that every kernel gives: `allreduce`, the residual added in
        float32, and the result rounded. out is divided by ``out_scale``, and not rounded.
    """
    with np.errstate(all="ignore"):
        h = (allreduce(x).astype(np.float32) + residual.astype(np.float32)).astype(x.dtype)
        exact = h.astype(np.float64)
        scale = 1 / np.sqrt(np.mean(exact**2, axis=-1, keepdims=True) + eps)
        return exact * scale * weight.astype(np.float64) / out_scale, h
