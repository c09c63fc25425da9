"""NCCL through CuPy's binding: what it gives two GPUs, and what it is kept from."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import drvkit as dk
from drvkit.nccl import binding

bf16, f32 = ml_dtypes.bfloat16, np.float32


@pytest.fixture
def world(device: dk.Device) -> Iterator[dk.World]:
    """Two GPUs, where NCCL can be used."""
    if device.driver.kind != "cuda":
        pytest.skip("NCCL is for GPUs")
    if (count := device.driver.cuDeviceGetCount()) < 2:
        pytest.skip(f"needs 2 GPUs, there are {count}")
    try:
        binding()
    except ImportError as error:
        pytest.skip(str(error))
    with dk.World.of_devices(["cuda:0", "cuda:1"]) as world:
        yield world


def added(graph: dk.Graph, nccl: dk.Nccl, x: dk.Buffer, sums: dk.Buffer) -> None:
    """``sums = x`` of both ranks, between a copy before it and one behind it."""
    mine = graph.device.zeros(x.shape, x.dtype)
    first = nccl.allreduce(graph, mine, after=graph.memcpy(mine, x), name="sum")
    graph.memcpy(sums, mine, after=first)


@pytest.mark.parametrize("dtype", [bf16, f32])
def test_two_gpus_have_one_sum(world: dk.World, rng: np.random.Generator, dtype: Any) -> None:
    with dk.Nccl(world) as nccl:
        streams = [device.stream() for device in world.devices]
        for n in (1, 1000, 1 << 20):
            x = rng.integers(-9, 9, (2, n)).astype(dtype)
            xs = [device.array(each) for device, each in zip(world.devices, x, strict=True)]
            sums = [device.zeros(n, dtype) for device in world.devices]
            exes = []
            for device, *arrays in zip(world.devices, xs, sums, strict=True):
                with dk.Graph(device, "sum") as graph:
                    added(graph, nccl, *arrays)
                    exes.append(graph.instantiate())
            for _ in range(3):
                x = rng.integers(-9, 9, (2, n)).astype(dtype)
                for each, new in zip(xs, x, strict=True):
                    each.copy_from(new)
                for exe, stream in zip(exes, streams, strict=True):
                    exe.launch(stream)
                for stream, got in zip(streams, sums, strict=True):
                    stream.synchronize()
                    np.testing.assert_array_equal(got.numpy(), x[0] + x[1])
            for each, stream in zip(xs, streams, strict=True):  # without a graph
                assert nccl.allreduce(stream, each) is None
            for each, stream in zip(xs, streams, strict=True):
                stream.synchronize()
                np.testing.assert_array_equal(each.numpy(), x[0] + x[1])
            for exe in exes:
                exe.close()
        for stream in streams:
            stream.close()


def test_a_graph_may_have_several_calls(world: dk.World) -> None:
    with dk.Nccl(world) as nccl:
        streams, xs, exes = [], [], []
        for device in world.devices:
            xs.append(device.array(np.ones(1000, f32)))
            streams.append(device.stream())
            with dk.Graph(device, "sums") as graph:
                last = None
                for call in range(3):
                    last = nccl.allreduce(graph, xs[-1], after=last, name=f"sum {call}")
                exes.append(graph.instantiate())
        for replay in (1, 2):
            for exe, stream in zip(exes, streams, strict=True):
                exe.launch(stream)
            for stream, x in zip(streams, xs, strict=True):
                stream.synchronize()
                assert (x.numpy() == 8**replay).all()
        for each in (*exes, *streams):
            each.close()


def rank_of_its_own(world: dk.World) -> float:
    device = world.devices[0]
    with dk.Nccl(world) as nccl, device.stream() as stream:
        x = device.array(np.full(1000, world.ranks[0] + 1, f32))
        nccl.allreduce(stream, x)
        stream.synchronize()
        return float(x.numpy().sum())


def test_processes_have_one_sum(world: dk.World) -> None:
    assert dk.World.spawn(rank_of_its_own, 2, devices="cuda") == [3000, 3000]


def test_a_communicator_outlives_the_graphs_that_use_it(world: dk.World) -> None:
    """NCCL would wait for their end, and nothing could end them any more."""

    def communicators() -> int:
        return sum(each.kind == "NCCL communicator" for each in dk.live())

    nccl, exes, sums = dk.Nccl(world), [], []
    for device in world.devices:
        graph = dk.Graph(device, "sum")
        sums.append(device.zeros(100, f32))
        added(graph, nccl, device.array(np.ones(100, f32)), sums[-1])
        exes.append(graph.instantiate())
    nccl.close()
    with pytest.raises(dk.ClosedError):
        nccl.allreduce(graph, sums[-1])
    assert communicators() == 2
    streams = [device.stream() for device in world.devices]  # a dropped one waits for its work
    for exe, stream in zip(exes, streams, strict=True):
        exe.launch(stream)
    for got in sums:
        assert (got.numpy() == 2).all()
    for stream in streams:
        stream.close()
    del exe, exes, graph, nccl
    gc.collect()
    assert communicators() == 0


def test_operands_that_nccl_cannot_add_are_refused(world: dk.World) -> None:
    first, other = world.devices
    with dk.Nccl(world) as nccl, dk.Graph(first, "refused") as graph:
        for error, message, x in (
            (TypeError, "got ndarray", np.zeros(4, f32)),
            (TypeError, "got int8", first.zeros(4, np.int8)),
            (ValueError, "got strides", first.zeros((4, 4), f32)[:, :2]),
            (ValueError, "got one on device 1", other.zeros(4, f32)),
        ):
            with pytest.raises(error, match=f"^Nccl: x: wanted a contiguous array .*{message}"):
                nccl.allreduce(graph, x)
        assert not graph.nodes
        assert nccl.allreduce(graph, first.zeros(0, f32), name="none") == graph["none"]


def test_ranks_without_a_gpu_each_are_refused() -> None:
    for world in (dk.World.of_devices(["cpu:0", "cpu:1"]), dk.World.of_virtual("cpu", 2)):
        with world, pytest.raises(ValueError, match=r"^Nccl: wanted ranks with a GPU each, got <World of 2"):
            dk.Nccl(world)


def test_where_cupy_is_not_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_NVLS_ENABLE", "NCCL_RUNTIME_CONNECT"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", None)
    with pytest.raises(ImportError, match=r"^Nccl needs CuPy, which cannot be imported here"):
        binding()


@pytest.mark.parametrize("opted_in", [False, True])
def test_multicast_is_off_unless_it_is_opted_in_to(monkeypatch: pytest.MonkeyPatch, opted_in: bool) -> None:
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", None)  # nothing is to read it now
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    monkeypatch.setenv("NCCL_RUNTIME_CONNECT", "1")
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0")
    monkeypatch.setenv("DRVKIT_ENABLE_MULTICAST", "1" if opted_in else "0")
    with pytest.raises(ImportError):
        binding()
    assert os.environ["NCCL_NVLS_ENABLE"] == ("1" if opted_in else "0")
