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

from drvkit.channel import Channel
from drvkit.device import Device
from drvkit.graph import Graph
from drvkit.ops.allreduce_rmsnorm import AllReduce
from drvkit.ops.collectives import AllGather, all_gather, allreduce, barrier, reduce_scatter
from drvkit.ref import collectives as ref
from drvkit.world import World, WorldError

bf16, f16, f32 = ml_dtypes.bfloat16, np.float16, np.float32
KINDS = ["virtual", "devices"]


def world_of(kind: str, device: Device, size: int) -> World:
    if kind == "virtual":
        return World.of_virtual(device, size)
    if device.driver.kind == "cpu":
        return World.of_devices([Device(f"cpu:{rank}") for rank in range(size)])
    count = device.driver.cuDeviceGetCount()
    if count < size:
        pytest.skip(f"needs {size} GPUs, there are {count}")
    return World.of_devices([Device(f"cuda:{rank}") for rank in range(size)])


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


def test_what_was_not_gathered_is_no_result(device: Device, made: ExitStack) -> None:
    world = made.enter_context(world_of("devices", device, 2))
    group = made.enter_context(AllGather(world, max_bytes=64, timeout_s=0.2))
    with group.devices[0].stream() as stream:
        x, out = group.devices[0].array(np.ones(16, f32)), group.devices[0].zeros((2, 16), f32)
        all_gather(stream, group, x, out)
        stream.synchronize()
        assert out.numpy()[0].tolist() == [1] * 16
        assert np.isnan(out.numpy()[1]).all()
        with pytest.raises(WorldError, match="rank 0 waited in call 1 for rank 1"):
            group.check()


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
