"""What becomes of ranks whose kernels wait for each other, when one of them is killed, late, interrupted, or does
something else: the others hear of it within the deadline, and by name.

Every spawned world does several things, as most of a test's time goes into processes that start.
"""

from __future__ import annotations

import gc
import itertools
import json
import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from drvkit import ops, rendezvous
from drvkit.channel import Channel
from drvkit.cpu import compiler
from drvkit.device import Device, Stream
from drvkit.graph import Graph
from drvkit.lifetime import live
from drvkit.ops.allreduce_rmsnorm import AllReduce, allreduce_rmsnorm
from drvkit.ops.collectives import AllGather, all_gather, allreduce, barrier
from drvkit.ops.ulysses import Ulysses, ulysses_to_heads, ulysses_to_tokens
from drvkit.world import World, WorldError

f32 = np.float32
T = 0.5  # seconds that a kernel waits in most of these tests,
SLACK = 1.0  # and what a rank has besides, from there on until it was told
PATIENT = 60.0  # for what is not to end by a deadline
HIDDEN = 384  # three warps, so that each of three ranks has words to sum up in two shots
TOKENS = {"packets": 1, "lamport": 3, "two_shot": 4}


Told = tuple[float, int | None, str]  # after how many seconds, who caused it, and why


def ranks_of(device: Device, most: int) -> int:
    """Of a world: two at least."""
    count = device.driver.cuDeviceGetCount() if device.driver.kind == "cuda" else most
    if count < 2:
        pytest.skip("needs 2 GPUs")
    return min(count, most)


class Here:
    """This process's rank of a spawned world: a group, a stream, and calls."""

    def __init__(self, world: World, made: ExitStack) -> None:
        compiler.LONG = 0  # as in conftest.py, which new processes do not know
        self.world, self.size = world, world.size
        (self.me,), (self.device,) = world.ranks, world.devices
        self.group = made.enter_context(
            AllReduce(world, max_tokens=4, hidden=HIDDEN, dtype=f32, protocols=TOKENS, timeout_s=PATIENT)
        )
        self.stream = made.enter_context(self.device.stream())
        self.turns = itertools.count()

    def call(self, tokens: int = 3) -> tuple[Any, NDArray[Any]]:
        """An all-reduce on the stream; gives its result, which is poisoned at first, and what that has to be."""
        turn = next(self.turns)
        shape = tokens, HIDDEN
        x = np.arange(tokens * HIDDEN, dtype=f32).reshape(shape)
        out = self.device.array(np.full(shape, 7.0, f32))
        allreduce(self.stream, self.group, self.device.array(x * (self.me + 1) + turn), out)
        return out, x * sum(range(1, self.size + 1)) + turn * self.size

    def is_right(self, tokens: int = 3) -> bool:
        out, wanted = self.call(tokens)
        self.stream.synchronize()
        self.group.check()
        return np.array_equal(out.numpy(), wanted)

    def told(self, group: Channel, call: Callable[[], Any]) -> tuple[Any, Told]:
        """What a call gives, and what is said of it when it has ended."""
        began = time.monotonic()
        made, who, why = call(), None, "nothing"
        self.stream.synchronize()
        try:
            group.check()
        except WorldError as error:
            who, why = error.rank, error.reason
        return made, (time.monotonic() - began, who, why)

    def wait_until_in_a_call(self, *others: int, number: int) -> None:
        """By what they tell as they begin it."""
        began, lines = time.monotonic(), self.group.memory.part(self.me, (3, 8), np.uint64)
        while not all((lines.numpy() >> np.uint64(32) == number).any(axis=0)[list(others)]):
            assert time.monotonic() - began < PATIENT
            time.sleep(0.005)


@contextmanager
def deadline(group: Channel, seconds: float) -> Iterator[None]:
    """Of the calls that are made within. Others shall not fail where a host is slow."""
    before, group.limit_ns = group.limit_ns, round(seconds * 1e9)
    yield
    group.limit_ns = before


# ---- ranks that are killed -----------------------------------------------------------------------------------------


def killed(world: World, place: str) -> None:
    """Rank 1 is killed between two calls. The others write down what they saw."""
    with ExitStack() as made:
        saw = {"killed": survived(Here(world, made), inside=False)}
    leave(world, place, saw)


def survived(here: Here, inside: bool) -> dict[str, Any]:
    world, me, third = here.world, here.me, 2
    here.group.reset()
    pids = world.gather([os.getpid()])
    saw: dict[str, Any] = {"pids": pids, "right": [here.is_right(tokens) for tokens in (3, 4)]}
    world.barrier()
    if me == (third if inside else 1):  # when all others are in the call
        here.wait_until_in_a_call(*((0, 1) if inside else (0,)), number=3)
        os.kill(pids[1], signal.SIGKILL)
        time.sleep(0.2)
    saw["came"] = time.monotonic()
    with deadline(here.group, PATIENT if inside and me != third else T):  # else it is the third one that is late
        for what in ("told", "told again"):
            (out, wanted), saw[what] = here.told(here.group, lambda: here.call(4))
            got = out.numpy()
            saw[f"{what}: nothing came"] = np.isnan(got).all(axis=0).tolist()
            saw[f"{what}: else right"] = bool((np.isnan(got) | (got == wanted)).all())
    try:
        here.group.reset()
    except WorldError as error:
        saw["reset"] = error.rank
    return saw


def leave(world: World, place: str, saw: dict[str, Any]) -> None:
    """Write down what was seen, and what is left, when everything was closed."""
    ops.release()
    gc.collect()
    Path(place, str(world.ranks[0])).write_text(json.dumps(saw | {"left": list(map(str, live()))}))
    world.barrier()


def spawn(function: Callable[..., None], device: Device, most: int, place: Path, message: str) -> list[dict[str, Any]]:
    """What the ranks of a world have seen that fails with a message; nothing of one that was killed."""
    size = ranks_of(device, most)
    before, rendezvous.END_S = rendezvous.END_S, PATIENT  # however slow the host is
    try:
        with pytest.raises(WorldError, match=message):
            World.spawn(function, size, str(place), devices=device.driver.kind, timeout_s=PATIENT)
    finally:
        rendezvous.END_S = before
    assert not multiprocessing.active_children()
    files = [place / str(rank) for rank in range(size)]
    return [json.loads(file.read_text()) if file.exists() else {} for file in files]


def check_survivors(saw: list[dict[str, Any]], inside: bool) -> None:
    for pid in saw[0]["killed"]["pids"]:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    for rank, seen in enumerate(saw):
        if rank == 1:
            continue
        each = seen["killed"]
        took, who, reason = each["told"]
        assert each["right"] == [True, True]
        assert who == 1, reason
        assert f"rank {rank} " in reason
        assert "call 3" in reason
        assert "for rank 1" in reason
        waited_from = max(each["came"], saw[2]["killed"]["came"]) if inside else each["came"]
        assert each["came"] + took - waited_from < T + SLACK
        # What a rank sums up did not come from one that was killed; what it sent before that is of use.
        columns = slice(HIDDEN // 3, HIDDEN * 2 // 3) if inside else slice(None)
        assert all(each["told: nothing came"][columns]), "nobody takes it for a result"
        assert each["told: else right"]
        took, who, _ = each["told again"]
        assert who == 1
        assert took < T, "who has failed waits for nobody"
        assert all(each["told again: nothing came"])
        assert each["reset"] == 1
        assert seen["left"] == []


def test_a_killed_rank_is_named_to_kernels_that_wait_for_it(device: Device, tmp_path: Path) -> None:
    check_survivors(spawn(killed, device, 2, tmp_path, "rank 1 died by SIGKILL"), inside=False)


# ---- ranks that go on afterwards -----------------------------------------------------------------------------------


def faults(world: World, place: str) -> None:
    """Faults after which a world goes on, one after the other; at the end rank 1 is killed inside of a call, if a third
    one is there to do it."""
    saw: dict[str, Any] = {}
    with ExitStack() as made:
        here = Here(world, made)
        saw["late"] = late(here, made)
        saw["other calls"] = other_calls(here, made)
        saw["groups"] = groups(here)
        saw["seen by rank"] = world.gather([saw])
        if world.size > 2:
            saw["killed"] = survived(here, inside=True)
        elif here.me == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    del here
    leave(world, place, saw)


def late(here: Here, made: ExitStack) -> dict[str, Any]:
    """Rank 1 makes its fifth call when the others have been told that it did not. In two shots some of what they wait
    for is made by those that wait for rank 1 themselves."""
    saw: dict[str, Any] = {}
    x, out = (here.device.zeros((3, HIDDEN), f32) for _ in range(2))
    graph = made.enter_context(Graph(here.device, "before"))
    allreduce(graph, here.group, x, out)
    exe = made.enter_context(graph.instantiate())

    def replay_is_right(value: int) -> bool:
        x.fill(float(value + here.me))
        exe.launch(here.stream)
        here.stream.synchronize()
        here.group.check()
        return bool((out.numpy() == sum(value + rank for rank in range(here.size))).all())

    saw["right before"] = [replay_is_right(3), here.is_right(), replay_is_right(4), here.is_right(4)]
    base = here.group.memory.base
    here.world.barrier()
    if here.me == 1:
        here.world.barrier()
    with deadline(here.group, T):
        saw["told"] = here.told(here.group, lambda: here.call(4))[1]
    if here.me != 1:
        here.world.barrier()
    here.group.reset()
    saw["right after"] = [replay_is_right(5), here.is_right(), replay_is_right(6), here.is_right(1)]
    saw["same place"] = here.group.memory.base == base
    return saw


def other_calls(here: Here, made: ExitStack) -> dict[str, Any]:
    """Rank 1 makes another call than all others."""
    size, device, stream, group = here.size, here.device, here.stream, here.group
    how: dict[str, Any] = {"max_tokens": 4 * size, "heads": size, "kv_heads": size, "dim": 8, "dtype": f32}
    by_packets = made.enter_context(Ulysses(here.world, timeout_s=PATIENT, **how))
    by_flags = made.enter_context(Ulysses(here.world, timeout_s=PATIENT, packets_up_to=0, **how))
    gather = made.enter_context(AllGather(here.world, max_bytes=64, timeout_s=PATIENT))
    rows = [device.zeros((count, HIDDEN), f32) for count in (2, 2, 2)]
    weight, heads = device.zeros(HIDDEN, f32), device.zeros((3, size, 8), f32)
    mine, words = device.zeros((3 * size, 1, 8), f32), device.zeros(16, np.uint32)
    gathered = device.zeros((size, 16), np.uint32)

    def norm() -> None:
        allreduce_rmsnorm(stream, group, rows[0], rows[1], weight, rows[0], rows[1])

    def to_heads(group: Ulysses, *tokens: int) -> Callable[[], Any]:
        shares = [*tokens, 3][:size]
        x = heads[: shares[here.me]]
        return lambda: ulysses_to_heads(stream, group, x, x, x, shares)

    def to_tokens() -> None:
        ulysses_to_tokens(stream, by_packets, mine)

    def of_words(count: int) -> Callable[[], Any]:
        return lambda: all_gather(
            stream, gather, words[:count], gathered.reshape(-1)[: size * count].reshape(size, count)
        )

    saw: dict[str, Any] = {}
    for what, each, usual, other in (
        ("another op", group, lambda: here.call(2), norm),
        ("other tokens", group, lambda: here.call(2), lambda: here.call(3)),
        ("another protocol", group, lambda: here.call(1), lambda: here.call(4)),
        ("a barrier", group, lambda: here.call(2), lambda: barrier(stream, group)),
        ("other words", gather, of_words(16), of_words(8)),
        ("other tokens, packets", by_packets, to_heads(by_packets, 3, 3), to_heads(by_packets, 2, 3)),
        ("other tokens, flags", by_flags, to_heads(by_flags, 3, 3), to_heads(by_flags, 2, 3)),
        ("the other way", by_packets, to_heads(by_packets, 3, 3), to_tokens),
    ):
        alike = [here.told(each, call)[1][2] for call in (usual, other)]  # compiles them
        here.world.barrier()
        with deadline(each, 10 * T):
            saw[what] = alike, *here.told(each, other if here.me == 1 else usual)[1]
        each.reset()
    here.turns = itertools.count(100)  # rank 1 has counted others
    saw["right after"] = here.is_right(2)
    return saw


def groups(here: Here) -> list[int]:
    """What 20 groups leave behind: open files and live objects."""

    def count() -> NDArray[Any]:
        gc.collect()
        return np.array([len(os.listdir("/proc/self/fd")), len(live())])

    def make(times: int) -> None:
        for _ in range(times):
            AllReduce(here.world, max_tokens=1, hidden=8).close()

    make(2)
    before = count()
    make(20)
    left: list[int] = (count() - before).tolist()
    return left


@pytest.fixture(scope="module")
def survivors(device: Device, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return spawn(faults, device, 3, tmp_path_factory.mktemp("faults"), "rank 1 died by SIGKILL")


@pytest.fixture
def saw(survivors: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each rank saw of `faults`."""
    every: list[dict[str, Any]] = survivors[0]["seen by rank"]
    return every


def test_a_rank_that_is_killed_in_its_kernel_is_named_to_the_others(survivors: list[dict[str, Any]]) -> None:
    if len(survivors) < 3:
        pytest.skip("needs 3 GPUs")
    check_survivors(survivors, inside=True)


def test_a_late_rank_is_named_and_a_reset_makes_graphs_right_again(saw: list[dict[str, Any]]) -> None:
    for rank, each in enumerate(told["late"] for told in saw):
        assert each["right before"] == [True] * 4
        took, who, reason = each["told"]
        assert who == 1, reason
        found = f"AllReduce: rank {rank} waited in call 5 for rank 1, which did not come within {T:g} s"
        heard = [f"AllReduce: rank {rank} ended call 5, as rank {by} had waited for rank 1 in vain" for by in (0, 2)]
        assert reason.startswith(tuple(heard) if rank == 1 else (found, *heard))
        assert not reason.startswith(found) or reason.endswith("its newest call was 4)")
        assert took < T if rank == 1 else T / 2 < took < T + SLACK
        assert each["right after"] == [True] * 4
        assert each["same place"]
    assert any("did not come" in told["late"]["told"][2] for told in saw)


def test_ranks_that_make_other_calls_are_told_so_without_a_deadline(saw: list[dict[str, Any]]) -> None:
    for what in [what for what in saw[0]["other calls"] if what != "right after"]:
        told = [each["other calls"][what] for each in saw]
        assert [alike for alike, *_ in told] == [["nothing", "nothing"]] * len(saw), what
        reasons = [reason for *_, reason in told]
        assert max(took for _, took, *_ in told) < 5 * T, what
        assert any("which made another call" in reason for reason in reasons), (what, reasons)
        for rank, reason in enumerate(reasons):
            assert f" rank {rank} " in reason, (what, reasons)
            assert "which made another call" in reason or "in vain" in reason, (what, reasons)
    assert [each["other calls"]["right after"] for each in saw] == [True] * len(saw)


def test_groups_of_processes_leave_nothing(saw: list[dict[str, Any]]) -> None:
    assert [each["groups"] for each in saw] == [[0, 0]] * len(saw)


# ---- ranks that are interrupted ------------------------------------------------------------------------------------


def interrupted(world: World, place: str) -> None:
    """Rank 0 is interrupted as it waits for rank 1 in `Stream.synchronize`; rank 1 hears of that, and raises it; a
    third one waits for rank 1 all the time."""
    me, saw = world.ranks[0], dict[str, Any]()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what shells start in the background ignores it
    pids = world.gather([os.getpid()])
    try:
        with ExitStack() as made:
            here = Here(world, made)
            saw["right"] = here.is_right()  # in a world that was made directly after another one failed
            world.barrier()
            if me == 1:
                here.wait_until_in_a_call(*{*range(world.size)} - {1}, number=2)
                saw["sent"] = time.monotonic()
                os.kill(pids[0], signal.SIGINT)
                world.barrier()
            with deadline(here.group, 2 * T):
                if me == 0:
                    here.call()
                    here.stream.synchronize()
                else:
                    saw["told"] = here.told(here.group, here.call)[1]
                    world.barrier()
    except BaseException as error:
        saw["raised"] = repr(error)
        raise
    finally:
        saw["when"] = time.monotonic()
        Path(place, str(me)).write_text(json.dumps(saw))


def test_a_rank_that_is_interrupted_while_it_waits_leaves_and_the_others_are_told(
    device: Device, tmp_path: Path
) -> None:
    saw = spawn(interrupted, device, 3, tmp_path, "rank 0 failed: KeyboardInterrupt")
    first, second, *third = saw
    assert [each["right"] for each in saw] == [True] * len(saw)
    assert first["raised"] == "KeyboardInterrupt()"
    assert first["when"] - second["sent"] < 2 * T + SLACK, "it leaves when its kernel has ended"
    for each in (second, *third):
        assert "rank 0 failed: KeyboardInterrupt" in each["raised"]
        assert each["when"] - first["when"] < SLACK
    for each in third:
        took, who, reason = each["told"]
        assert who == 1, reason
        assert took < 2 * T + SLACK


# ---- many groups ---------------------------------------------------------------------------------------------------


def resident() -> int:
    """Bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_many_groups_leave_nothing(device: Device) -> None:
    """No file, no object, no mapping, and no memory of the device or of the host."""
    count = 1000 if device.driver.kind == "cuda" else 150

    def look() -> tuple[Any, ...]:
        gc.collect()
        with device.context:
            free, _ = device.driver.cuMemGetInfo()
        files, mappings = len(os.listdir("/proc/self/fd")), len(Path("/proc/self/maps").read_text().splitlines())
        return Counter(live()), files, int(free), mappings, sys.getallocatedblocks(), resident()

    def make(count: int) -> None:
        for _ in range(count):
            AllReduce(world, max_tokens=1, hidden=8).close()

    with World.of_virtual(device, 2) as world:
        for _ in range(2):  # the interpreter and its caches come to rest
            make(20)
            objects, files, free, mappings, blocks, nbytes = look()
        make(count)
        after = look()
    assert after[:2] == (objects, files)
    assert free - after[2] < 1 << 20
    assert after[3] - mappings < count / 4
    assert after[4] - blocks < count, "less than an object of Python for each group"
    assert after[5] - nbytes < count << 12, "less than a page for each group"


# ---- several streams -----------------------------------------------------------------------------------------------


def gate(stream: Stream) -> Any:
    """Page-locked memory at which a stream waits until it is 1."""
    made = stream.device.pinned(1, np.uint32)
    made.host[:] = 0
    driver, flags = stream.device.driver, stream.device.driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ
    with stream.device.context:
        driver.cuStreamWaitValue32(stream.handle, made.address, 1, flags)
    return made


def test_calls_on_several_streams_of_a_rank_keep_their_order(device: Device) -> None:
    """What a rank makes on its second stream waits for what is on its first. Graphs are left to who launches them."""
    devices = [Device(f"{device.driver.kind}:{rank}") for rank in range(ranks_of(device, 2))]
    with (
        World.of_devices(devices) as world,
        AllReduce(world, max_tokens=1, hidden=8, dtype=f32) as group,
        ExitStack() as made,
    ):
        streams = [[made.enter_context(each.stream()) for _ in range(2)] for each in devices]

        def arrays(value: float) -> list[tuple[Any, Any]]:
            given = [np.full((1, 8), value * rank, f32) for rank in (1, 2)]
            return [(each.array(x), each.zeros((1, 8), f32)) for each, x in zip(devices, given, strict=True)]

        calls = [arrays(value) for value in (1.0, 10.0, 100.0, 1000.0, 10000.0)]
        executables = []
        for place, operands in enumerate(calls[2]):
            graph = made.enter_context(Graph(devices[place], "between"))
            allreduce(graph, group, *operands)
            executables.append(made.enter_context(graph.instantiate()))
        closed = gate(streams[0][0])  # rank 0's first stream stands still, its second one does not; rank 1 is ahead
        made.callback(closed.host.fill, 1)
        for place, (first, second) in enumerate(streams):
            allreduce(first, group, *calls[0][place])
            allreduce(second, group, *calls[1][place])
            executables[place].launch(second)
            first.wait(second.record())  # for the group knows of no graph
            allreduce(first, group, *calls[3][place])
            allreduce(second, group, *calls[4][place])
        time.sleep(0.05)
        assert not any(stream.done for stream in itertools.chain(*streams))
        closed.host.fill(1)
        for stream in itertools.chain(*streams):
            stream.synchronize()
        group.check()
        for value, every in zip((3, 30, 300, 3000, 30000), calls, strict=True):
            for _, out in every:
                assert (out.numpy() == value).all()
