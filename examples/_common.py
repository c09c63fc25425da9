"""What the examples share: a device, and a comparison with numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import drvkit as dk


def open_device() -> dk.Device:
    """The first GPU; where there is none, the CPU device."""
    dev = dk.Device()
    print(f"device: {dev.name} ({dev.id}, {dev.arch})")
    return dev


def check(name: str, got: NDArray[Any], want: NDArray[Any]) -> None:
    """Refuse ``got`` unless every element is exactly that of ``want``; numpy rounds float32 as the kernels do."""
    if got.shape != want.shape or got.dtype != want.dtype:
        raise ValueError(f"{name}: got {got.dtype} {got.shape}, numpy has {want.dtype} {want.shape}")
    wrong = np.flatnonzero(got != want)
    if wrong.size:
        first = wrong[0]
        values = f"{got.flat[first]}, numpy has {want.flat[first]}"
        raise ValueError(f"{name}: {wrong.size} of {want.size} elements are wrong; element {first} is {values}")
    print(f"checked: {name}")
