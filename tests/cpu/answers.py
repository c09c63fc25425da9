"""What the functions of the driver answer, in words."""

from __future__ import annotations

from typing import Any


def code(result: tuple[Any, ...]) -> str:
    """The status of a call, without the beginning that all share."""
    name: str = result[0].name
    return name.removeprefix("CUDA_ERROR_").removeprefix("CUDA_")
