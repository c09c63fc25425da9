"""What stands for a device array and for a graph where an op is checked without a device."""

from __future__ import annotations

from typing import Any

import numpy as np

from drvkit.device import Device


class Foreign:
    """A device array of another library, that nobody touches."""

    def __init__(
        self, shape: Any, dtype: Any, address: int = 0x10000, strides: Any = None, readonly: bool = False
    ) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "data": (address, readonly),
            "typestr": np.dtype(dtype).str,
            "shape": shape,
            "strides": strides,
        }


class Recorder:
    """Stands for a graph."""

    def __init__(self, device: Device | None = None) -> None:
        self.device = device
        self.calls: list[Any] = []

    def kernel(self, kernel: Any, **how: Any) -> str:
        self.calls.append((kernel, how))
        return "kernel node"

    def empty(self, **how: Any) -> str:
        self.calls.append(("empty", how))
        return "empty node"
