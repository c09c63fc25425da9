"""Worlds whose ranks are all of this process."""

from __future__ import annotations

import pytest

from drvkit.device import Device
from drvkit.world import World


def world_of(kind: str, device: Device, size: int) -> World:
    """Of ``size`` ranks: "virtual" ones on the device, or "devices" of its kind, if there are as many."""
    if kind == "virtual":
        return World.of_virtual(device, size)
    if device.driver.kind == "cpu":
        return World.of_devices([Device(f"cpu:{rank}") for rank in range(size)])
    count = device.driver.cuDeviceGetCount()
    if count < size:
        pytest.skip(f"needs {size} GPUs, there are {count}")
    return World.of_devices([Device(f"cuda:{rank}") for rank in range(size)])
