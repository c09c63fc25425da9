"""Symmetric memory: every rank maps every rank's part, in one process and in several; all have it, or none."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from drvkit.device import Device
from drvkit.driver import DriverError
from drvkit.graph import Graph
from drvkit.lifetime import ClosedError, live
from drvkit.ops.scale import scale
from drvkit.symmetric import SymmetricMemory
from drvkit.world import World, WorldError

N = 1000


def worlds(device: Device, size: int) -> list[World]:
    """Of both kinds in one process; of devices where there are enough."""
    made = [World.of_virtual(device, size)]
    kind = device.driver.kind
    if kind == "cpu" or device.driver.cuDeviceGetCount() >= size:
        made.append(World.of_devices([Device(f"{kind}:{rank}") for rank in range(size)]))
    return made


def test_a_kernel_of_one_rank_writes_what_another_reads(device: Device) -> None:
    for world in worlds(device, 2):
        with world, SymmetricMemory(world, 4 * N) as memory:
            assert memory.stride >= 4 * N
            assert not memory.part(1, N, np.float32).numpy().any(), "zero at first"
            first = world.devices[0]
            with first.stream() as stream, first.array(np.arange(N, dtype=np.float32)) as x:
                scale(stream, x, memory.part(1, N, np.float32, of=0), 2.0)
                stream.synchronize()
            np.testing.assert_array_equal(memory.part(1, N, np.float32).numpy(), 2 * np.arange(N, dtype=np.float32))
            assert not memory.part(0, N, np.float32).numpy().any()


def test_parts_lie_at_one_distance(device: Device) -> None:
    for world in worlds(device, 3):
        with world, SymmetricMemory(world, 12) as memory:
            addresses = [memory.part(rank, 1, np.uint32, offset=8).address for rank in range(3)]
            assert addresses == [memory.base + rank * memory.stride + 8 for rank in range(3)]
            assert memory.every(0).nbytes == 3 * memory.stride


def test_what_is_not_there_is_refused(device: Device) -> None:
    with World.of_virtual(device, 2) as world:
        with pytest.raises(ValueError, match="nbytes: wanted at least 1, got 0"):
            SymmetricMemory(world, 0)
        with SymmetricMemory(world, 100) as memory:
            for wrong, message in (
                ({"rank": 2, "shape": 1}, "rank: wanted 0 to 1, got 2"),
                ({"rank": 0, "shape": 26}, "104 bytes at 0 of a part of 100 bytes"),
                ({"rank": 0, "shape": 1, "offset": 97}, "4 bytes at 97 of a part of 100 bytes"),
                ({"rank": 0, "shape": 1, "offset": -4}, "4 bytes at -4"),
                ({"rank": 0, "shape": 1, "of": 5}, r"of: wanted a rank of this process, \(0, 1\), got 5"),
            ):
                arguments: dict[str, Any] = wrong
                with pytest.raises(ValueError, match=message):
                    memory.part(arguments.pop("rank"), arguments.pop("shape"), np.float32, **arguments)
        with pytest.raises(ClosedError, match=r"symmetric memory .* is closed"):
            memory.part(0, 1, np.uint8)


def test_a_graph_keeps_the_mapping_alive(device: Device) -> None:
    with World.of_virtual(device, 2) as world, device.array(np.ones(N, np.float32)) as x:
        memory = SymmetricMemory(world, 4 * N)
        with Graph(device, "into symmetric memory") as graph, device.stream() as stream:
            scale(graph, x, memory.part(1, N, np.float32), 3.0)
            exe = graph.instantiate()
            memory.close()
            assert "symmetric memory" in {each.kind for each in live()}
            exe.launch(stream)
            stream.synchronize()
            exe.close()
        assert "symmetric memory" not in {each.kind for each in live()}


def test_one_that_cannot_be_had_leaves_nothing(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise DriverError("cuMemMap", "CUDA_ERROR_OUT_OF_MEMORY", "planted")

    with World.of_virtual(device, 2) as world:
        free = device.memory_bytes()[0]
        monkeypatch.setattr(device.driver, "cuMemMap", refused)
        with pytest.raises(WorldError, match="cuMemMap: CUDA_ERROR_OUT_OF_MEMORY: planted"):
            SymmetricMemory(world, 64 << 20)
        monkeypatch.undo()
        assert device.memory_bytes()[0] == free


def in_a_process(world: World) -> list[int]:
    """Each rank writes into the next one's part, and tells what it finds in its own; and its open files."""
    (rank,) = world.ranks
    before = len(os.listdir("/proc/self/fd"))
    with SymmetricMemory(world, 4 * N) as memory:
        memory.part((rank + 1) % world.size, N, np.uint32).copy_from(np.full(N, 100 + rank, np.uint32))
        world.devices[0].synchronize()
        world.barrier()
        found = np.unique(memory.part(rank, N, np.uint32).numpy()).tolist()
        world.barrier()
    return [*found, len(os.listdir("/proc/self/fd")) - before]


def test_processes_share_it(device: Device) -> None:
    kind = device.driver.kind
    if kind == "cuda" and device.driver.cuDeviceGetCount() < 2:
        pytest.skip("needs 2 GPUs")
    assert World.spawn(in_a_process, 2, devices=kind, timeout_s=60) == [[101, 0], [100, 0]]
