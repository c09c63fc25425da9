"""y = x * alpha, elementwise: a product in float32, rounded once to the dtype, which ``x`` and ``y`` share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from . import FLOATS, INTS, Where, apart, array, elementwise, submit, vectorised

if TYPE_CHECKING:
    from ..graph import After
    from ..node import Node

__all__ = ["scale", "scale_dynamic", "scale_padded"]


def scale(where: Where, x: Any, y: Any, alpha: float, *, after: After = None, name: str | None = None) -> Node | None:
    """``y = x * alpha`` for float32, float16 or bfloat16; ``y`` may be ``x``."""
    function, threads, n = vectorised("scale", elementwise("scale", FLOATS, x=x, y=y))
    return submit(where, "scale", function, threads, (x, y, n, alpha), after, name)


def scale_dynamic(
    where: Where, x: Any, y: Any, alpha: Any, *, after: After = None, name: str | None = None
) -> Node | None:
    """`scale` by the one float32 that the device array ``alpha`` has when the kernel runs: in a graph, every time."""
    function, threads, n = vectorised("scale_dynamic", elementwise("scale_dynamic", FLOATS, x=x, y=y))
    factor = array("scale_dynamic: alpha", alpha, [np.dtype(np.float32)])
    if factor.nbytes != 4:
        raise ValueError(f"scale_dynamic: alpha: wanted one element, got shape {factor.shape}")
    apart("scale_dynamic: y", array("scale_dynamic: y", y, FLOATS), "alpha", factor)
    return submit(where, "scale", function, threads, (x, y, n, alpha), after, name)


def scale_padded(
    where: Where, x: Any, y: Any, alpha: float, *, after: After = None, name: str | None = None
) -> Node | None:
    """`scale`, except that where ``x`` is zero, of either sign, ``y`` keeps what it has.

    Takes int32 too, which wraps. ``alpha`` becomes a value of the dtype first.
    """
    operands = elementwise("scale_padded", FLOATS | INTS, x=x, y=y)
    function = f"scale_padded<{operands.ctype}>"
    return submit(where, "scale", function, operands.n, (x, y, operands.n, alpha), after, name)
