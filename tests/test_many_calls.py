"""All-reduces without end: every size and dtype by every protocol, thousands of calls with delays, graphs replayed in
turns; between processes, and between virtual ranks.

On GPUs the whole of it, on the CPU device a little of each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from drvkit.channel import PROTOCOLS
from drvkit.device import Device
from drvkit.graph import Graph
from drvkit.ops.allreduce_rmsnorm import AllReduce, allreduce_rmsnorm
from drvkit.ref import allreduce_rmsnorm as ref
from drvkit.source import Source
from drvkit.world import World

bf16, f16, f32 = ml_dtypes.bfloat16, np.float16, np.float32


class Much(NamedTuple):
    """How much of everything."""

    tokens: tuple[int, ...]
    hidden: tuple[int, ...]
    dtypes: tuple[Any, ...]
    calls: int
    replays: int
    nodes: tuple[int, ...]


ALL = Much((1, 2, 3, 8, 17, 32, 128, 1024), (64, 2048, 4096, 5120, 8192), (bf16, f16, f32), 10_000, 1000, (1, 7, 200))
LITTLE = Much((1, 3), (64,), (bf16,), 20, 2, (1, 3))
LARGEST = {np.dtype(bf16): 3.38e38, np.dtype(f16): 65504.0, np.dtype(f32): 3.4e38}
MIXED = {"packets": 2, "lamport": 9, "flags": 14, "two_shot": 24}

TOOLS = Source.from_text(
    """
    #include "dk/memory_order.cuh"
    // Wait for so long.
    __global__ void delay(unsigned ns) {
      const unsigned long long end = dk::time_ns() + ns;
      while (dk::time_ns() < end) {}
    }
    // Count the words that differ.
    __global__ void differ(const unsigned* got, const unsigned* wanted, unsigned* count, int n) {
      const int i = blockIdx.x * blockDim.x + threadIdx.x;
      if (i < n && got[i] != wanted[i]) atomicAdd(count, 1);
    }
    """,
    "tools.cu",
)


def given(rng: np.random.Generator, ranks: int, tokens: int, hidden: int, dtype: Any, *, nan: bool) -> dict[str, Any]:
    """Numbers of all magnitudes, zeros of both signs, subnormal numbers, infinities, and words that mean absent."""
    x = rng.normal(size=(ranks, tokens, hidden)).astype(f32)
    x *= np.float32(10.0) ** rng.integers(-3, 3, x.shape).astype(f32)
    host = x.astype(dtype)
    flat = host.reshape(-1)
    odd = [0.0, -0.0, 1e-39, -1e-39, 6e-8, -6e-8]
    for value in [*odd, np.inf, -np.inf, np.nan] if nan else odd:
        flat[rng.integers(0, flat.size, flat.size // 64 + 1)] = np.array(value, f32).astype(dtype)
    flat.view(np.uint32)[rng.integers(0, flat.view(np.uint32).size, 5)] = ref.ABSENT
    residual, weight = (rng.normal(size=shape).astype(f32).astype(dtype) for shape in (x.shape, hidden))
    return {"x": host, "residual": residual, "weight": weight}


def bits(array: NDArray[Any]) -> NDArray[Any]:
    """With one NaN for all."""
    with np.errstate(all="ignore"):
        one = np.where(np.isnan(array.astype(f32)), np.array(np.nan, array.dtype), array)
    return one.view(f"u{array.dtype.itemsize}")


class Local:
    """What this process has of a world."""

    def __init__(self, world: World) -> None:
        self.world, self.device = world, world.devices[0]
        self.stream = self.device.stream()
        module = self.device.module(TOOLS)
        self.delay, self.differ = module.kernel("delay"), module.kernel("differ")
        self.wrong = self.device.zeros(1, np.uint32)

    def own(self, array: NDArray[Any]) -> NDArray[Any]:
        return array if self.world.virtual else array[self.world.ranks[0]]

    def arrays(self, host: dict[str, Any]) -> dict[str, Any]:
        made = {name: self.device.array(self.own(host[name])) for name in ("x", "residual")}
        made["weight"] = self.device.array(host["weight"])
        return made | {name: self.device.zeros(made["x"].shape, host["x"].dtype) for name in ("out", "residual_out")}

    def compare(self, where: Any, of: dict[str, Any], wanted: Any, **edges: Any) -> Any:
        """Count what differs from ``wanted`` in residual_out."""
        n = wanted.nbytes // 4
        got = of["residual_out"].reshape(-1).view(np.uint32)
        launch = where.kernel if isinstance(where, Graph) else self.differ.launch
        return launch(
            self.differ if isinstance(where, Graph) else where,
            grid=-(-n // 256),
            block=256,
            args=(got, wanted.reshape(-1).view(np.uint32), self.wrong, n),
            **edges,
        )


def matrix(world: World, much: Much, seed: int) -> list[str]:
    """Every size and dtype by every protocol; gives what is wrong."""
    here, rng, wrong = Local(world), np.random.default_rng(seed), []
    for hidden in much.hidden:
        for dtype in much.dtypes:
            most = max(much.tokens)
            how: dict[str, Any] = {"max_tokens": most, "hidden": hidden, "dtype": dtype, "timeout_s": 20}
            groups = [AllReduce(world, protocols={protocol: most}, **how) for protocol in PROTOCOLS]
            for tokens in much.tokens:
                host = given(rng, world.size, tokens, hidden, dtype, nan=True)
                with np.errstate(all="ignore"):
                    out, h = ref.allreduce_rmsnorm(host["x"], host["residual"], host["weight"])
                wanted_out, firsts = here.own(out), list[NDArray[Any]]()
                for group, protocol in zip(groups, PROTOCOLS, strict=True):
                    of = here.arrays(host)
                    allreduce_rmsnorm(here.stream, group, **of)
                    here.stream.synchronize()
                    group.check()
                    got = {name: of[name].numpy() for name in ("out", "residual_out")}
                    what = f"{protocol}, {tokens} x {hidden} {np.dtype(dtype)}"
                    if not np.array_equal(bits(got["residual_out"]), bits(here.own(h))):
                        wrong.append(f"{what}: residual_out")
                    firsts.append(got["out"])
                    if not np.array_equal(bits(got["out"]), bits(firsts[0])):
                        wrong.append(f"{what}: out is not that of {PROTOCOLS[0]}")
                with np.errstate(all="ignore"):
                    near = np.isclose(firsts[0].astype(np.float64), wanted_out, rtol=2**-7, atol=1e-6, equal_nan=True)
                    fits = np.abs(wanted_out) < LARGEST[np.dtype(dtype)]
                if not (near | ~fits).all():
                    wrong.append(f"{tokens} x {hidden} {np.dtype(dtype)}: out")
            for group in groups:
                group.close()
    world.barrier()
    return wrong


def random_calls(world: World, much: Much, seed: int) -> int:
    """Calls of random sizes with random delays before them, of each rank its own; gives the words that are wrong."""
    here, rng = Local(world), np.random.default_rng(seed)
    own = np.random.default_rng(world.ranks[0])
    with AllReduce(world, max_tokens=24, hidden=512, protocols=MIXED, timeout_s=20) as group:
        sets = []
        for tokens in rng.integers(1, 25, 24).tolist():
            host = given(rng, world.size, tokens, 512, bf16, nan=False)
            h = ref.allreduce_rmsnorm(host["x"], host["residual"], host["weight"])[1]
            sets.append((here.arrays(host), here.device.array(here.own(h))))
        for call in range(much.calls):
            of, wanted = sets[rng.integers(len(sets))]
            if own.integers(2):
                here.delay.launch(here.stream, grid=1, block=1, args=(int(own.integers(50_000)),))
            allreduce_rmsnorm(here.stream, group, **of)
            here.compare(here.stream, of, wanted)
            if call % 500 == 499:
                here.stream.synchronize()
                group.check()
        here.stream.synchronize()
        group.check()
        world.barrier()
    return int(here.wrong.numpy()[0])


def replays(world: World, much: Much, seed: int) -> int:
    """Graphs of several sizes and numbers of nodes, replayed in turns; gives the words that are wrong."""
    here, rng = Local(world), np.random.default_rng(seed)
    with AllReduce(world, max_tokens=24, hidden=512, protocols=MIXED, timeout_s=20) as group:
        made = []
        for count in much.nodes:
            for tokens in (2, 9, 13, 24):
                host = given(rng, world.size, tokens, 512, bf16, nan=False)
                wanted = ref.allreduce_rmsnorm(host["x"], host["residual"], host["weight"])[1]
                of, want = here.arrays(host), here.device.array(here.own(wanted))
                graph, last = Graph(here.device, f"{count} of {tokens}"), None
                for _ in range(count):
                    after: Any = last.port("programmatic") if last is not None and not world.virtual else last
                    last = allreduce_rmsnorm(graph, group, **of, after=after)
                here.compare(graph, of, want, after=last)
                made.append((graph, graph.instantiate(), of, want))
        for replay in range(much.replays):
            for which in rng.permutation(len(made)).tolist():
                made[which][1].launch(here.stream)
            if replay % 50 == 49:
                here.stream.synchronize()
                group.check()
        here.stream.synchronize()
        group.check()
        world.barrier()
        for graph, exe, *_ in made:
            exe.close()
            graph.close()
    return int(here.wrong.numpy()[0])


def processes(device: Device, work: Any, seed: int) -> list[Any]:
    kind = device.driver.kind
    if kind == "cuda" and device.driver.cuDeviceGetCount() < 2:
        pytest.skip("needs 2 GPUs")
    return World.spawn(work, 2, ALL if kind == "cuda" else LITTLE, seed, devices=kind, timeout_s=300)


def virtual(device: Device, work: Any, seed: int) -> Any:
    with World.of_virtual(device, 4 if device.driver.kind == "cuda" else 2) as world:
        return work(world, ALL if device.driver.kind == "cuda" else LITTLE, seed)


def test_every_size_and_dtype_by_every_protocol_between_processes(device: Device) -> None:
    assert processes(device, matrix, 1) == [[], []]


def test_every_size_and_dtype_by_every_protocol_between_virtual_ranks(device: Device) -> None:
    assert virtual(device, matrix, 1) == []


def test_thousands_of_calls_with_delays_between_processes(device: Device) -> None:
    assert processes(device, random_calls, 2) == [0, 0]


def test_thousands_of_calls_with_delays_between_virtual_ranks(device: Device) -> None:
    assert virtual(device, random_calls, 2) == 0


def test_graphs_are_replayed_in_turns_between_processes(device: Device) -> None:
    assert processes(device, replays, 3) == [0, 0]


def test_graphs_are_replayed_in_turns_between_virtual_ranks(device: Device) -> None:
    assert virtual(device, replays, 3) == 0
