"""Memory that all ranks reach, in one process and in several: symmetric memory, behind one multicast address too, and
arrays that were there before. All ranks have it, or none."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
from standins import Foreign

from drvkit.device import Device
from drvkit.driver import DriverError
from drvkit.graph import Graph
from drvkit.lifetime import ClosedError, Live, Owned, live
from drvkit.ops.scale import scale
from drvkit.source import Source
from drvkit.symmetric import PeerMemory, SymmetricMemory
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
        with pytest.raises(ValueError, match="nbytes: wanted an integer of at least 1, got 0"):
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


def share(world: World) -> list[int]:
    """Each rank writes into the next one's part, and tells what it finds in its own."""
    (rank,) = world.ranks
    with SymmetricMemory(world, 4 * N) as memory:
        memory.part((rank + 1) % world.size, N, np.uint32).copy_from(np.full(N, 100 + rank, np.uint32))
        world.devices[0].synchronize()
        world.barrier()
        found: list[int] = np.unique(memory.part(rank, N, np.uint32).numpy()).tolist()
        world.barrier()
    return found


def in_processes(world: World) -> list[Any]:
    found = [share(world), reach(world), come_and_go(world)]
    if world.devices[0].driver.kind == "cpu":  # elsewhere it can do harm to others
        stand_in_a_team(world)
    return found


@pytest.fixture(scope="module")
def processes(device: Device) -> list[tuple[Any, ...]]:
    """What two processes with a device each tell of what they did, by what that was. To start them takes long."""
    kind = device.driver.kind
    if kind == "cuda" and device.driver.cuDeviceGetCount() < 2:
        pytest.skip("needs 2 GPUs")
    with pytest.MonkeyPatch.context() as environment:
        if kind == "cpu":
            allow_multicast(environment)
        return list(zip(*World.spawn(in_processes, 2, devices=kind, timeout_s=60), strict=True))


def test_processes_share_it(processes: list[tuple[Any, ...]]) -> None:
    assert processes[0] == ([101], [100])


# ---- what is left ----------------------------------------------------------------------------------------------------


def resident_bytes() -> int:
    """Of the process; also what its CPU devices have."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def left(world: World) -> tuple[int, list[Live], list[int]]:
    """Open files, driver objects, free device memory."""
    return len(os.listdir("/proc/self/fd")), live(), [device.memory_bytes()[0] for device in world.devices]


def grown(world: World, times: int, act: Callable[[], None]) -> tuple[int, int, int]:
    """What there is more after doing something so many times than after doing it twice: open files, driver
    objects, MiB of memory."""
    for _ in range(2):
        act()
    files, objects, free = left(world)
    resident = resident_bytes()
    for _ in range(times):
        act()
    files_after, objects_after, free_after = left(world)
    nbytes = max(before - after for before, after in zip(free, free_after, strict=True))
    if world.devices[0].driver.kind == "cpu":
        nbytes = max(nbytes, resident_bytes() - resident)
    return files_after - files, len(objects_after) - len(objects), nbytes >> 20


def nothing(grown: tuple[int, int, int]) -> bool:
    """Not more than 8 MiB: the process and its driver keep some."""
    files, objects, mib = grown
    return files == objects == 0 and mib < 8


def test_a_thousand_groups_leave_nothing(device: Device) -> None:
    def come_and_go(world: World) -> None:
        SymmetricMemory(world, 4 * N).close()

    for world, times in ((World.of_devices([device]), 1000), (worlds(device, 2)[-1], 50)):
        with world:
            more = grown(world, times, partial(come_and_go, world))
            assert nothing(more), more


def come_and_go(world: World) -> tuple[int, int, int]:
    """Worlds of processes with several groups each."""
    with world.devices[0].zeros(N, np.float32) as array:

        def one() -> None:
            with world.split([0]) as part:
                for _ in range(2):
                    SymmetricMemory(part, 4 * N).close()
                PeerMemory(part, [array]).close()
                part.barrier()  # a rank that closes its world before another has its memory is missed there

        return grown(world, 20, one)


def test_worlds_of_processes_leave_nothing(processes: list[tuple[Any, ...]]) -> None:
    assert all(map(nothing, processes[2])), processes[2]


class Spy:
    """A driver that lists its calls, and refuses the one of a number."""

    def __init__(self, driver: Any, refused: int | None = None) -> None:
        self.driver, self.refused = driver, refused
        self.calls: list[tuple[str, Any]] = []  # names and first arguments

    def __getattr__(self, name: str) -> Any:
        member = getattr(self.driver, name)
        if not (name.startswith("cu") and name[2].isupper()) and name != "create_multicast":
            return member

        def call(*args: Any, **how: Any) -> Any:
            self.calls.append((name, args[0] if args else None))
            if len(self.calls) - 1 == self.refused:
                raise DriverError(name, "CUDA_ERROR_OUT_OF_MEMORY", "planted")
            return member(*args, **how)

        return call

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


@contextmanager
def spying(world: World, refused: int | None = None) -> Iterator[Spy]:
    """On what ranks of this process call."""
    driver = world.devices[0].driver
    spy: Any = Spy(driver, refused)
    for device in world.devices:
        device.driver = spy
    try:
        yield spy
    finally:
        for device in world.devices:
            device.driver = driver


def refuse_each_call(world: World, make: Callable[[], Owned], rank: int) -> list[str]:
    """All ranks make something again and again, while one of the calls that ``rank`` makes for it is refused, each in
    its turn: all hear of it, nothing is left, and the next time it goes further. Gives what was refused."""
    with spying(world) as spy:
        made = make()
    names: list[str] = world.gather([spy.names] * len(world.ranks))[rank]
    made.close()
    before = left(world)
    for number, name in enumerate(names):
        with spying(world, number if rank in world.ranks else None) as spy:
            with pytest.raises(WorldError, match=rf": rank \d: {name}: CUDA_ERROR_OUT_OF_MEMORY: planted") as told:
                make()
            assert len(world.ranks) > 1 or told.value.rank == rank
            del told
        if name == "cuMulticastAddDevice":
            assert "cuMulticastBindMem" not in spy.names, "it would wait for ever"
        assert left(world) == before, name
    make().close()
    assert left(world) == before
    return names


def test_whatever_call_is_refused_leaves_nothing(device: Device) -> None:
    for world in worlds(device, 2):
        with world:
            names = refuse_each_call(world, partial(SymmetricMemory, world, 4 * N), 0)
            assert {"cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess", "cuMemsetD8"} <= set(names)


# ---- multicast: on CPU devices alone, as elsewhere it can do harm to others ------------------------------------------

TEAM = Source.from_text(r"""
__global__ void sum(const unsigned* team, unsigned* total) {
  const size_t at = __cvta_generic_to_global(team + threadIdx.x);
  asm volatile("multimem.ld_reduce.relaxed.sys.global.add.u32 %0, [%1];"
               : "=r"(total[threadIdx.x]) : "l"(at) : "memory");
}

__global__ void store(unsigned* team, unsigned value) {
  const size_t at = __cvta_generic_to_global(team + threadIdx.x);
  asm volatile("multimem.st.relaxed.sys.global.u32 [%0], %1;" :: "l"(at), "r"(value) : "memory");
}
""")


def allow_multicast(environment: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST"):
        environment.delenv(name, raising=False)
    environment.setenv("DRVKIT_ENABLE_MULTICAST", "1")


@pytest.fixture
def cpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    allow_multicast(monkeypatch)
    with World.of_devices(["cpu:0", "cpu:1", "cpu:2"]) as world:
        yield world


def stand_behind_one_address(world: World) -> None:
    """Each rank adds up what all have at the address, and the last stores to all."""
    with SymmetricMemory(world, 128, multicast=True) as memory, ExitStack() as stack:
        modules = [stack.enter_context(device.module(TEAM)) for device in world.devices]
        for rank in world.ranks:
            memory.part(rank, 32, np.uint32).copy_from(np.arange(32, dtype=np.uint32) + 100**rank)
        world.barrier()
        for rank, device, module in zip(world.ranks, world.devices, modules, strict=True):
            team = memory.everywhere(rank).view(np.uint32)
            assert (team.address, team.nbytes) == (memory.multicast, memory.stride)
            with device.stream() as stream, device.empty(32, np.uint32) as total:
                module.kernel("sum").launch(stream, grid=1, block=32, args=(team, total))
                stream.synchronize()
                wanted = world.size * np.arange(32) + sum(100**each for each in range(world.size))
                np.testing.assert_array_equal(total.numpy(), wanted)
        world.barrier()
        if world.size - 1 in world.ranks:
            with world.devices[-1].stream() as stream:
                team = memory.everywhere(world.size - 1).view(np.uint32)
                modules[-1].kernel("store").launch(stream, grid=1, block=32, args=(team, 7))
        world.barrier()
        for rank in range(world.size):
            np.testing.assert_array_equal(memory.part(rank, 32, np.uint32).numpy(), 7)
        world.barrier()


def test_the_parts_of_devices_stand_behind_one_address(cpus: World) -> None:
    stand_behind_one_address(cpus)


def test_multicast_is_made_and_given_back_in_order(cpus: World) -> None:
    with spying(cpus) as spy:
        memory = SymmetricMemory(cpus, 100, multicast=True)
        made = spy.names[spy.names.index("create_multicast") :]
        del spy.calls[:]
        memory.close()
        released = [(name, first) for name, first in spy.calls if name != "cuCtxSynchronize"]
    mapped = ["cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"]
    assert made[:10] == ["create_multicast", *["cuMulticastAddDevice"] * 3, *["cuMulticastBindMem"] * 3, *mapped]
    assert spy.names[:3] == ["cuCtxSynchronize"] * 3
    assert [name for name, _ in released] == [
        *("cuMemUnmap", "cuMemAddressFree", *["cuMulticastUnbind"] * 3, "cuMemRelease"),
        *(*["cuMemUnmap"] * 3, "cuMemAddressFree", *["cuMemRelease"] * 3),
    ]
    assert released[0][1] == released[1][1] == memory.multicast


def test_whatever_call_is_refused_leaves_no_multicast(cpus: World) -> None:
    names = refuse_each_call(cpus, partial(SymmetricMemory, cpus, 4 * N, multicast=True), 0)
    assert {"create_multicast", "cuMulticastAddDevice", "cuMulticastBindMem", "cuMulticastGetGranularity"} <= set(names)


def stand_in_a_team(world: World) -> None:
    stand_behind_one_address(world)
    make = partial(SymmetricMemory, world, 4 * N, multicast=True)
    for rank in range(world.size):
        names = refuse_each_call(world, make, rank)
        assert ("create_multicast" in names) == (rank == 0)
        assert names.count("cuMemImportFromShareableHandle") == 2, "of the other's part, and of the team"
    with pytest.raises(WorldError, match=r"do not agree on symmetric memory .*: rank 0: \[4, true\]; rank 1: "):
        SymmetricMemory(world, 4, multicast=world.ranks == (0,))
    if world.ranks == (1,):
        del os.environ["DRVKIT_ENABLE_MULTICAST"]
    with (
        spying(world) as spy,
        pytest.raises(WorldError, match=r"rank 1: .* it wants DRVKIT_ENABLE_MULTICAST=1") as told,
    ):
        make()
    assert told.value.rank == 1
    assert set(spy.names) <= {"cuDeviceGetAttribute", "cuDeviceGetUuid"}


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_the_parts_of_processes_stand_behind_one_address_or_none_does(processes: list[tuple[Any, ...]]) -> None:
    assert processes


def test_multicast_is_refused_before_anything_is_made(cpus: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(rank: int, why: str) -> None:
        with spying(cpus) as spy, pytest.raises(WorldError, match=f"rank {rank}: .*NOT_ENABLED: {why}") as told:
            SymmetricMemory(cpus, 100, multicast=True)
        assert told.value.rank == rank
        assert set(spy.names) <= {"cuDeviceGetAttribute", "cuDeviceGetUuid"}

    with monkeypatch.context() as changed:
        changed.delenv("DRVKIT_ENABLE_MULTICAST")
        refused(0, "it wants DRVKIT_ENABLE_MULTICAST=1")
    with monkeypatch.context() as changed:
        changed.setenv("NCCL_NVLS_ENABLE", "0")
        refused(0, "NCCL_NVLS_ENABLE=0 forbids")
    with monkeypatch.context() as changed:
        changed.setattr(cpus.devices[2], "_attributes", {"MULTICAST_SUPPORTED": 0})
        refused(2, "cpu:2 has no multicast")
    for wrong in (World.of_virtual("cpu", 2), World.of_devices(["cpu:0"])):
        with wrong, pytest.raises(ValueError, match="multicast: wanted two devices or more, a rank each, got <World"):
            SymmetricMemory(wrong, 100, multicast=True)
    with SymmetricMemory(cpus, 100) as memory:
        assert memory.multicast == 0
        with pytest.raises(ValueError, match="was made without multicast"):
            memory.everywhere(0)


# ---- arrays that were there before -----------------------------------------------------------------------------------


def test_a_kernel_reaches_the_array_of_another_rank(device: Device) -> None:
    x = np.arange(N, dtype=np.float32)
    for world in worlds(device, 2):
        with world, ExitStack() as stack:
            arrays = [stack.enter_context(each.zeros((3, N), np.float32)) for each in world.devices]
            source = stack.enter_context(world.devices[0].array(x))
            with PeerMemory(world, [array[1] for array in arrays]) as peers, world.devices[0].stream() as stream:
                assert (peers.shape, peers.dtype) == ((N,), np.dtype(np.float32))
                assert [peers.part(rank).address for rank in range(2)] == [array[1].address for array in arrays]
                scale(stream, source, peers.part(1, of=0), 2.0)
                stream.synchronize()
                with pytest.raises(ValueError, match="rank: wanted 0 to 1, got 2"):
                    peers.part(2)
            assert not arrays[0].numpy().any()
            np.testing.assert_array_equal(arrays[1].numpy(), [0 * x, 2 * x, 0 * x])
            with pytest.raises(ClosedError, match=r"peer memory .* is closed"):
                peers.part(0)


def test_peer_memory_keeps_its_arrays(device: Device) -> None:
    with World.of_virtual(device, 2) as world:
        before = live()
        arrays = [device.array(np.full(N, rank, np.float32)) for rank in range(2)]
        peers = PeerMemory(world, arrays)
        for array in arrays:
            array.close()
        assert [float(peers.part(rank).numpy()[-1]) for rank in range(2)] == [0, 1]
        assert [each.kind for each in live()[len(before) :]] == ["buffer", "buffer", "peer memory"]
        peers.close()
        assert live() == before


def test_arrays_of_other_libraries_are_peer_memory(device: Device) -> None:
    with World.of_virtual(device, 2) as world, device.array(np.arange(2 * N, dtype=np.float32)) as whole:
        arrays = [Foreign((N,), np.float32, whole[rank * N :].address) for rank in range(2)]
        with PeerMemory(world, arrays) as peers:
            np.testing.assert_array_equal(peers.part(1).numpy(), np.arange(N, 2 * N))


def test_arrays_of_cupy_are_peer_memory(device: Device, cupy: Any) -> None:
    with World.of_virtual(device, 2) as world:
        arrays = [cupy.full(N, rank, np.float32) for rank in range(2)]
        device.synchronize()
        with PeerMemory(world, arrays) as peers:
            peers.part(1).copy_from(peers.part(0))
        assert not arrays[1].any()
        del arrays
        cupy.get_default_memory_pool().free_all_blocks()


def test_what_cannot_be_peer_memory_is_refused_by_rank(device: Device) -> None:
    with worlds(device, 2)[-1] as world, ExitStack() as stack:
        first, last = world.devices
        pool = stack.enter_context(last.pool())
        stream = stack.enter_context(last.stream())
        good = stack.enter_context(first.zeros(N, np.float32))
        table = stack.enter_context(last.zeros((N, 2), np.float32))
        symmetric = stack.enter_context(SymmetricMemory(world, 4 * N))
        closed = last.zeros(N, np.float32)
        closed.close()
        refused: list[tuple[Any, str]] = [
            ("text", "wanted a device array, got 'text'"),
            (np.zeros(N, np.float32), "wanted a device array, got numpy.ndarray"),
            (table[:, 0], "wanted an array with elements, contiguous, that can be written, got <Buffer float32 1000"),
            (table[:0], "wanted an array with elements"),
            (Foreign((N,), np.float32, table.address, readonly=True), "that can be written"),
            (
                stack.enter_context(last.pinned(N, np.float32)),
                "wanted memory of cuMemAlloc on .*, got <Buffer .* pinned",
            ),
            (stack.enter_context(pool.empty(N, np.float32, stream)), "wanted memory of cuMemAlloc on .* pool"),
            (symmetric.part(1, N, np.float32), "wanted memory of cuMemAlloc on .* symmetric"),
            (closed, "is closed"),
            (table, r"has an array of float32 \(1000, 2\), rank 0 of float32 \(1000,\)"),
            (table.view(np.int32), r"has an array of int32 \(1000, 2\), rank 0 of float32 \(1000,\)"),
        ]
        if not world.virtual:
            refused.append((good, f"wanted memory of cuMemAlloc on {last.id}, got <Buffer .* {first.id}"))
        for wrong, why in refused:
            with pytest.raises(WorldError, match=f"peer memory: rank 1.*{why}") as told:
                PeerMemory(world, [good, wrong])
            assert told.value.rank == 1
        with pytest.raises(ValueError, match="an array for each of 2 ranks, got 1"):
            PeerMemory(world, [good])


def test_whatever_call_is_refused_leaves_no_peer_memory(device: Device) -> None:
    for world in worlds(device, 2):
        with world, ExitStack() as stack:
            arrays = [stack.enter_context(each.zeros(N, np.float32)) for each in world.devices]
            names = refuse_each_call(world, partial(PeerMemory, world, arrays), 0)
            assert names.count("cuCtxEnablePeerAccess") == (0 if world.virtual else 2)


def reach(world: World) -> list[Any]:
    """Two arrays of one allocation are peer memory; it is open as long as one of them. Gives what is found in both."""
    (device,), (rank,) = world.devices, world.ranks
    with device.zeros((2, N), np.float32) as whole, device.array(np.full(N, 1 + rank, np.float32)) as x:
        with PeerMemory(world, [whole[0]]) as other, PeerMemory(world, [whole[1]]) as peers, device.stream() as stream:
            other.part(1 - rank).copy_from(x)
            there = other.part(1 - rank).address
            other.close()
            scale(stream, x, peers.part(1 - rank), 10.0)
            stream.synchronize()
            world.barrier()
            found = [np.unique(half.numpy()).tolist() for half in (whole[0], whole[1])]
            world.barrier()
        world.barrier()
        for blamed in range(world.size):
            names = refuse_each_call(world, partial(PeerMemory, world, [whole[0]]), blamed)
            assert names.count("cuIpcOpenMemHandle") == world.size - 1
        with device.pool() as pool, device.stream() as stream, pool.empty(N, np.float32, stream) as unfit:
            before = left(world)
            with pytest.raises(WorldError, match="peer memory: rank 1: wanted memory of cuMemAlloc") as told:
                PeerMemory(world, [unfit if rank == 1 else x])
            assert told.value.rank == 1
            assert left(world) == before
        with device.context, pytest.raises(DriverError):  # nothing of the other's is open any more
            device.driver.cuMemGetAddressRange(there)
        world.barrier()
    return found


def test_processes_reach_each_others_arrays(processes: list[tuple[Any, ...]]) -> None:
    assert processes[1] == ([[2], [20]], [[1], [10]])
