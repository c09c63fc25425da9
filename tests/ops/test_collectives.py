"""All-reduce, reduce-scatter, all-gather and barrier, between ranks of every kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from compare import assert_equal_bits
from numpy.typing import NDArray
from worlds import world_of

from drvkit.channel import Channel
from drvkit.device import Device
from drvkit.graph import Graph
from drvkit.nccl import Nccl, binding
from drvkit.ops.allreduce_rmsnorm import AllReduce
from drvkit.ops.collectives import (
    AllGather,
    AllReduceOfGroups,
    all_gather,
    allreduce,
    allreduce_of_groups,
    barrier,
    reduce_scatter,
)
from drvkit.ref import collectives as ref
from drvkit.world import World, WorldError

bf16, f16, f32 = ml_dtypes.bfloat16, np.float16, np.float32
KINDS = ["virtual", "devices"]


class Ranks:
    """All ranks of a world in this process."""

    def __init__(self, group: Channel) -> None:
        self.group, self.virtual = group, group.world.virtual
        self.streams = [device.stream() for device in group.devices]

    def call(self, op: Callable[..., Any], x: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        """``op(stream, group, x, out)`` by all ranks: ``x`` and the result have a first axis of ranks."""
        outs = []
        for place, stream in enumerate(self.streams):
            own = x if self.virtual else x[place]
            out = stream.device.array(np.full((len(x), *shape) if self.virtual else shape, 7).astype(x.dtype))
            op(stream, self.group, stream.device.array(own), out)
            outs.append(out)
        for stream in self.streams:
            stream.synchronize()
        self.group.check()
        return outs[0].numpy() if self.virtual else np.array([out.numpy() for out in outs])


@pytest.fixture
def made() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("kind", KINDS)
def test_allreduce_and_reduce_scatter_take_turns(
    device: Device, rng: np.random.Generator, made: ExitStack, kind: str
) -> None:
    world = made.enter_context(world_of(kind, device, 2))
    how: dict[str, Any] = {"max_tokens": 5, "hidden": 520, "protocols": {"lamport": 2, "flags": 3, "two_shot": 5}}
    ranks = Ranks(made.enter_context(AllReduce(world, dtype=f16, **how)))
    for tokens in (1, 5, 3, 2, 5):
        x = rng.normal(size=(2, tokens, 520)).astype(f16)
        wanted = ref.allreduce(x)
        for each in ranks.call(allreduce, x, (tokens, 520)):
            assert_equal_bits(each, wanted)
        x = rng.normal(size=(2, 2, tokens, 520)).astype(f16)
        assert_equal_bits(ranks.call(reduce_scatter, x, (tokens, 520)), ref.reduce_scatter(x))


@pytest.mark.parametrize("kind", KINDS)
def test_all_gather_keeps_all_bits(device: Device, rng: np.random.Generator, made: ExitStack, kind: str) -> None:
    world = made.enter_context(world_of(kind, device, 3))
    ranks = Ranks(made.enter_context(AllGather(world, max_bytes=9600, packets_up_to=64)))
    for count in (4, 2400, 8, 16, 20, 4):
        x = rng.integers(0, 2**32, (3, count), np.uint32)
        x[:, 1:3] = 0x80008000, 0xFFFFFFFF
        assert_equal_bits(ranks.call(all_gather, x, (3, count)), ref.all_gather(x))


def test_all_gather_by_multicast(rng: np.random.Generator, made: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRVKIT_ENABLE_MULTICAST", "1")
    for name in ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST"):
        monkeypatch.delenv(name, raising=False)
    world = made.enter_context(world_of("devices", Device("cpu"), 3))
    ranks = Ranks(made.enter_context(AllGather(world, max_bytes=256, packets_up_to=64, multicast=True)))
    for count in (4, 64, 16, 20):
        x = rng.integers(0, 2**32, (3, count), np.uint32)
        assert_equal_bits(ranks.call(all_gather, x, (3, count)), ref.all_gather(x))


def test_a_barrier_is_passed_when_all_are_there(device: Device, made: ExitStack) -> None:
    """Between a store to another rank's memory and that rank's load of it."""
    world = made.enter_context(world_of("devices", device, 2))
    group = made.enter_context(AllGather(world, max_bytes=16, timeout_s=0.5))
    streams = [device.stream() for device in group.devices]
    graphs = []
    got = [each.zeros(4, np.uint32) for each in group.devices]
    sent = [each.array(np.full(4, rank + 1, np.uint32)) for rank, each in enumerate(group.devices)]
    for rank, each in enumerate(group.devices):
        graph = made.enter_context(Graph(each, "through the barrier"))
        theirs = group.memory.part(1 - rank, 4, np.uint32, offset=group.offsets["packets"], of=rank)
        own = group.memory.part(rank, 4, np.uint32, offset=group.offsets["packets"])
        first = graph.memcpy(theirs, sent[rank])
        met = barrier(graph, group, after=first)
        barrier(graph, group, after=graph.memcpy(got[rank], own, after=met))
        graphs.append(made.enter_context(graph.instantiate()))
    for _ in range(3):
        for exe, stream in zip(graphs, streams, strict=True):
            exe.launch(stream)
        for stream in streams:
            stream.synchronize()
        group.check()
    assert [each.numpy().tolist() for each in got] == [[2] * 4, [1] * 4]

    barrier(streams[1], group)
    streams[1].synchronize()
    with pytest.raises(
        WorldError, match=r"^AllGather: rank 1 waited in call 7 for rank 0, which did not come within 0\.5"
    ):
        group.check()


@pytest.mark.parametrize("packets_up_to", [64, 0])
def test_what_was_not_gathered_is_no_result(device: Device, made: ExitStack, packets_up_to: int) -> None:
    world = made.enter_context(world_of("devices", device, 2))
    group = made.enter_context(AllGather(world, max_bytes=64, packets_up_to=packets_up_to, timeout_s=0.2))
    with group.devices[0].stream() as stream:
        x, out = group.devices[0].array(np.ones(16, f32)), group.devices[0].zeros((2, 16), f32)
        all_gather(stream, group, x, out)
        stream.synchronize()
        assert out.numpy()[0].tolist() == [1] * 16
        assert np.isnan(out.numpy()[1]).all()
        with pytest.raises(WorldError, match="rank 0 waited in call 1 for rank 1"):
            group.check()


def test_what_was_not_scattered_is_no_result(device: Device, made: ExitStack) -> None:
    world = made.enter_context(world_of("devices", device, 2))
    group = made.enter_context(AllReduce(world, max_tokens=2, hidden=8, dtype=f32, timeout_s=0.2))
    with group.devices[0].stream() as stream:
        out = group.devices[0].zeros((2, 8), f32)
        reduce_scatter(stream, group, group.devices[0].array(np.ones((2, 2, 8), f32)), out)
        stream.synchronize()
        assert np.isnan(out.numpy()).all()
        with pytest.raises(WorldError, match="rank 0 waited in call 1 for rank 1"):
            group.check()


def test_parts_are_taken_in_turns_where_not_all_have_a_block(
    device: Device, rng: np.random.Generator, made: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Channel, "blocks", lambda *_: 1)
    monkeypatch.setattr(AllReduce, "_resident", lambda *_: 1)
    world = made.enter_context(world_of("virtual", device, 2))
    sums = Ranks(made.enter_context(AllReduce(world, max_tokens=5, hidden=520, dtype=f16, protocols={"lamport": 5})))
    x = rng.normal(size=(2, 5, 520)).astype(f16)
    for each in sums.call(allreduce, x, (5, 520)):
        assert_equal_bits(each, ref.allreduce(x))
    x = rng.normal(size=(2, 2, 5, 520)).astype(f16)
    assert_equal_bits(sums.call(reduce_scatter, x, (5, 520)), ref.reduce_scatter(x))
    gathers = Ranks(made.enter_context(AllGather(world, max_bytes=9600, packets_up_to=4800)))
    for count in (1200, 2400):  # more than one block has threads
        x = rng.integers(0, 2**32, (2, count), np.uint32)
        assert_equal_bits(gathers.call(all_gather, x, (2, count)), ref.all_gather(x))


def test_operands_that_do_not_fit_are_refused(device: Device, graph: Graph, made: ExitStack) -> None:
    world = made.enter_context(world_of("virtual", device, 2))
    sums = made.enter_context(AllReduce(world, max_tokens=4, hidden=64, protocols={"lamport": 2, "flags": 4}))
    gathers = made.enter_context(AllGather(world, max_bytes=64))

    def of(*shape: int, dtype: Any = bf16) -> Any:
        return device.zeros(shape, dtype)

    both, bytes_ = of(2, 2, 64), of(2, 32, dtype=np.uint8)
    for error, message, call in (
        (
            ValueError,
            r"allreduce: out: wanted shape \(2, 3, 64\), got \(2, 4, 64\)",
            (allreduce, of(2, 3, 64), of(2, 4, 64)),
        ),
        (
            TypeError,
            "allreduce: x: wanted a device array of bfloat16, got float16",
            (allreduce, of(2, 3, 64, dtype=f16), both),
        ),
        (ValueError, r"reduce_scatter: x: wanted shape \(2, 2, 2, 64\)", (reduce_scatter, of(2, 2, 64), both)),
        (
            ValueError,
            "reduce_scatter: out has 3 tokens: the group's protocols",
            (reduce_scatter, of(2, 2, 3, 64), of(2, 3, 64)),
        ),
        (ValueError, r"all_gather: out: wanted shape \(2, 2, 32\)", (all_gather, bytes_, bytes_)),
        (TypeError, "all_gather: out is int8, x is uint8", (all_gather, bytes_, of(2, 2, 32, dtype=np.int8))),
        (
            ValueError,
            "all_gather: x: wanted a multiple of 16 bytes up to 64, got 8",
            (all_gather, of(2, 8, dtype=np.uint8), of(2, 2, 8, dtype=np.uint8)),
        ),
        (TypeError, "all_gather: x: wanted a device array, got ndarray", (all_gather, np.zeros(16), bytes_)),
    ):
        op, x, out = call
        group: Any = gathers if op is all_gather else sums
        with pytest.raises(error, match=f"^{message}"):
            op(graph, group, x, out)
    assert not graph.nodes


# Groups of groups


def two_groups(kind: str, device: Device, made: ExitStack) -> tuple[list[World], list[World | Nccl]]:
    """Of two ranks each, on two devices or on one; and what is between them."""
    if kind == "virtual, NCCL":
        if device.driver.kind == "cpu":
            pytest.skip("NCCL is for GPUs")
        try:
            binding()
        except ImportError as error:
            pytest.skip(str(error))
    every = made.enter_context(world_of("devices", device, 4 if kind == "devices" else 2))
    if kind == "devices":
        groups = [made.enter_context(World.of_devices(every.devices[i : i + 2])) for i in (0, 2)]
        return groups, [made.enter_context(World.of_devices(every.devices[i::2])) for i in range(2)]
    groups = [made.enter_context(World.of_virtual(each, 2)) for each in every.devices]
    return groups, [made.enter_context(Nccl(every)) if kind == "virtual, NCCL" else every]


@pytest.mark.parametrize("kind", ["devices", "virtual", "virtual, NCCL"])
def test_groups_of_ranks_have_one_sum(device: Device, rng: np.random.Generator, made: ExitStack, kind: str) -> None:
    worlds, between = two_groups(kind, device, made)
    groups = made.enter_context(AllReduceOfGroups(worlds, between, max_tokens=5, hidden=48, dtype=f16))
    places = [(g, ...) if world.virtual else (g, r) for g, world in enumerate(worlds) for r in world.ranks]
    places = list(dict.fromkeys(places))
    devices = list(groups.parts)
    streams = [made.enter_context(each.stream()) for each in devices]
    for tokens in (3, 5, 1):
        x = rng.normal(size=(2, 2, tokens, 48)).astype(f16)
        xs = [each.zeros(x[place].shape, f16) for each, place in zip(devices, places, strict=True)]
        outs, copies = ([each.device.array(np.full(each.shape, 7, f16)) for each in xs] for _ in range(2))
        exes = []
        for each, *arrays in zip(devices, xs, outs, copies, strict=True):
            graph = made.enter_context(Graph(each, "between hosts"))
            node = allreduce_of_groups(graph, groups, arrays[0], arrays[1], name="sum")
            graph.memcpy(arrays[2], arrays[1], after=node, name="use")
            exes.append(made.enter_context(graph.instantiate()))
        for _ in range(2):
            x = rng.normal(size=x.shape).astype(f16)
            for array, place in zip(xs, places, strict=True):
                array.copy_from(x[place])
            for exe, stream in zip(exes, streams, strict=True):
                exe.launch(stream)
            for stream in streams:
                stream.synchronize()
            groups.check()
            wanted = np.broadcast_to(ref.allreduce_of_groups(x), x.shape)
            for copy, place in zip(copies, places, strict=True):
                assert_equal_bits(copy.numpy(), wanted[place])
        for array, stream in zip(xs, streams, strict=True):  # in place, without a graph
            allreduce_of_groups(stream, groups, array, array)
        for array, stream, place in zip(xs, streams, places, strict=True):
            stream.synchronize()
            assert_equal_bits(array.numpy(), wanted[place])


def test_a_group_that_does_not_come_is_named(device: Device, made: ExitStack) -> None:
    worlds, between = two_groups("virtual", device, made)
    how: dict[str, Any] = {"max_tokens": 2, "hidden": 32, "dtype": f16, "timeout_s": 0.2}
    groups = made.enter_context(AllReduceOfGroups(worlds, between, **how))
    first, other = groups.parts
    with first.stream() as stream, other.stream() as theirs:
        x, out = first.array(np.ones((2, 2, 32), f16)), first.zeros((2, 2, 32), f16)
        allreduce_of_groups(stream, groups, x, out)
        stream.synchronize()
        assert np.isnan(out.numpy()).all()
        with pytest.raises(WorldError, match="rank 0 waited in call 1 for rank 1"):
            groups.check()
        groups.reset()
        y = other.array(np.ones((2, 2, 32), f16))
        for where, each in ((stream, x), (theirs, y)):
            allreduce_of_groups(where, groups, each, each)
        for where, each in ((stream, x), (theirs, y)):
            where.synchronize()
            assert (each.numpy() == 4).all()
        groups.check()


def test_groups_that_do_not_fit_are_refused(device: Device, made: ExitStack) -> None:
    worlds, between = two_groups("virtual", device, made)
    alone = made.enter_context(World.of_virtual(device, 4))
    how: dict[str, Any] = {"groups": worlds, "between": between, "max_tokens": 2, "hidden": 32, "dtype": f16}
    changes: list[tuple[str, dict[str, Any]]] = [
        ("groups: wanted worlds of one size and kind", {"groups": [worlds[0], alone]}),
        ("between: wanted all devices of .* once", {"between": []}),
        ("between: wanted all devices of .* once", {"between": between * 2}),
        ("hidden: wanted rows of a multiple of 16 bytes for each of 2 ranks, got 20", {"hidden": 20}),
    ]
    for message, changed in changes:
        with pytest.raises(ValueError, match=f"^AllReduceOfGroups: {message}"):
            AllReduceOfGroups(**(how | changed))
    groups = made.enter_context(AllReduceOfGroups(**how))
    with Graph(device, "refused") as graph:
        for message, shape in (("wanted shape \\(2, tokens, 32\\)", (2, 32)), ("x has 3 tokens", (2, 3, 32))):
            x = device.zeros(shape, f16)
            with pytest.raises(ValueError, match=f"^allreduce_of_groups: .*{message}"):
                allreduce_of_groups(graph, groups, x, x)
        assert not graph.nodes
        x = device.zeros((2, 0, 32), f16)
        assert [allreduce_of_groups(graph, groups, x, x, name="none")] == [graph["none"]]


def test_ranks_at_different_places_do_not_exchange(made: ExitStack) -> None:
    groups, _ = two_groups("devices", Device("cpu"), made)
    (first, second), crossed = groups[0].devices, groups[1].devices[::-1]
    between = [made.enter_context(World.of_devices(pair)) for pair in ((first, crossed[0]), (second, crossed[1]))]
    with pytest.raises(ValueError, match=r"^AllReduceOfGroups: between: wanted ranks at one place of their groups"):
        AllReduceOfGroups(groups, between, max_tokens=2, hidden=32)


def test_a_call_of_groups_that_is_refused_leaves_nothing(made: ExitStack) -> None:
    """It has three steps, and the operands of the last are looked at before the first."""
    devices = [Device(f"cpu:{rank}") for rank in range(4)]
    worlds = [made.enter_context(World.of_devices(devices[first : first + 2])) for first in (0, 2)]
    rails = [made.enter_context(World.of_devices(devices[first::2])) for first in (0, 1)]
    groups = made.enter_context(AllReduceOfGroups(worlds, rails, max_tokens=2, hidden=16, dtype=f32))
    graph = made.enter_context(Graph(devices[0], "refused"))
    x = devices[0].zeros((2, 16), f32)
    for error, message, out in (
        (ValueError, "out is on device 1, cpu:0 makes the call", devices[1].zeros((2, 16), f32)),
        (ValueError, r"out: wanted shape \(2, 16\), got \(1, 16\)", devices[0].zeros((1, 16), f32)),
        (TypeError, "out: wanted a device array of float32, got float16", devices[0].zeros((2, 16), f16)),
    ):
        with pytest.raises(error, match=f"^allreduce_of_groups: {message}"):
            allreduce_of_groups(graph, groups, x, out)
    assert not graph.nodes
