"""Elementwise sums, made in float32 and rounded once to the dtype, which all operands share: float32, float16 or
bfloat16."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import FLOATS, Where, elementwise, submit, vectorised

if TYPE_CHECKING:
    from ..graph import After
    from ..node import Node

__all__ = ["add", "add_scalar"]


def add(where: Where, a: Any, b: Any, y: Any, *, after: After = None, name: str | None = None) -> Node | None:
    """``y = a + b``; ``y`` may be ``a`` or ``b`` or both."""
    function, threads, n = vectorised("add", elementwise("add", FLOATS, a=a, b=b, y=y))
    return submit(where, "add", function, threads, (a, b, y, n), after, name)


def add_scalar(where: Where, x: Any, y: Any, c: float, *, after: After = None, name: str | None = None) -> Node | None:
    """``y = x + c``; ``y`` may be ``x``."""
    function, threads, n = vectorised("add_scalar", elementwise("add_scalar", FLOATS, x=x, y=y))
    return submit(where, "add", function, threads, (x, y, n, c), after, name)
