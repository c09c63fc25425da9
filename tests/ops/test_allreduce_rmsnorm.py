"""All-reduce with residual and RMSNorm: the reference, the checks, and the kernel between ranks of every kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from compare import assert_close, assert_equal_bits
from numpy.typing import NDArray
from worlds import world_of

from drvkit.cpu.explore import failures
from drvkit.device import Device
from drvkit.graph import Graph
from drvkit.lifetime import ClosedError
from drvkit.ops.allreduce_rmsnorm import AllReduce, allreduce_rmsnorm
from drvkit.pytest_plugin import Explore
from drvkit.ref import allreduce_rmsnorm as ref
from drvkit.world import World, WorldError

bf16, f16, f32 = ml_dtypes.bfloat16, np.float16, np.float32
CLOSE = {np.dtype(bf16): 2**-8, np.dtype(f16): 2**-11, np.dtype(f32): 2**-20}
WHY = "a mean of squares in float, its root, and one rounding"


def given(rng: np.random.Generator, ranks: int, tokens: int, hidden: int, dtype: Any) -> dict[str, NDArray[Any]]:
    """Numbers of all magnitudes, with zeros of both signs, subnormal numbers and whole words of what is absent."""
    x = rng.normal(size=(ranks, tokens, hidden))
    x *= 10.0 ** rng.integers(-3, 3, x.shape)
    made = {"x": x.astype(f32).astype(dtype), "residual": rng.normal(size=x.shape).astype(f32).astype(dtype)}
    odd = made["x"].reshape(ranks, -1)
    for value in (0.0, -0.0, float(np.finfo(f32).tiny) / 4, -1e-7):
        odd[:, rng.integers(0, odd.shape[1], odd.shape[1] // 16)] = np.array(value, f32).astype(dtype)
    odd.view(np.uint32)[:, rng.integers(0, odd.view(np.uint32).shape[1], 3)] = ref.ABSENT
    if dtype is f32 and ranks > 1:  # no word means absent, but the sum does
        odd.view(np.uint32)[:, 0] = [0x80007FFF, 0x80000001, *[0] * (ranks - 2)]
        made["residual"].reshape(ranks, -1)[:, 0] = 0  # which else would hide it
    made["weight"] = rng.normal(size=hidden).astype(f32).astype(dtype)
    return made


def check(got: dict[str, NDArray[Any]], host: dict[str, NDArray[Any]]) -> None:
    """``got`` of all ranks, [ranks, tokens, hidden]."""
    out, h = ref.allreduce_rmsnorm(host["x"], host["residual"], host["weight"])
    assert_equal_bits(got["residual_out"], h, any_nan=True)
    close = CLOSE[h.dtype]
    assert_close(got["out"].astype(np.float64), out, rtol=close, atol=1e-30 if h.dtype == f32 else 1e-7, why=WHY)


class Ranks:
    """All ranks of a world in this process, and the arrays of a call."""

    def __init__(self, world: World, group: AllReduce) -> None:
        self.world, self.group = world, group
        self.streams = [device.stream() for device in group.devices]

    def arrays(self, host: dict[str, NDArray[Any]]) -> list[dict[str, Any]]:
        made = []
        for place, device in enumerate(self.group.devices):
            part = slice(None) if self.world.virtual else place
            of = {name: device.array(host[name][part]) for name in ("x", "residual")}
            of["weight"] = device.array(host["weight"])
            for name in ("out", "residual_out"):
                of[name] = device.array(np.full(host["x"][part].shape, np.nan, f32).astype(host["x"].dtype))
            made.append(of)
        return made

    def call(self, arrays: list[dict[str, Any]]) -> None:
        for stream, of in zip(self.streams, arrays, strict=True):
            allreduce_rmsnorm(stream, self.group, **of)

    def results(self, arrays: list[dict[str, Any]]) -> dict[str, NDArray[Any]]:
        for stream in self.streams:
            stream.synchronize()
        self.group.check()
        told = {name: [of[name].numpy() for of in arrays] for name in ("out", "residual_out")}
        return {name: each[0] if self.world.virtual else np.array(each) for name, each in told.items()}

    def close(self) -> None:
        for stream in self.streams:
            stream.close()
        self.group.close()
        self.world.close()


# ---- the reference and the checks ----------------------------------------------------------------------------------


def test_the_reference_is_the_formula(rng: np.random.Generator) -> None:
    x, residual = rng.normal(size=(3, 5, 8)).astype(f32), rng.normal(size=(3, 5, 8)).astype(f32)
    weight = rng.normal(size=8).astype(f32)
    out, h = ref.allreduce_rmsnorm(x, residual, weight, eps=0.25)
    for rank, token in np.ndindex(3, 5):
        want = [float(sum(float(x[r, token, i]) for r in range(3))) + float(residual[rank, token, i]) for i in range(8)]
        np.testing.assert_allclose(h[rank, token], want, rtol=1e-5, atol=1e-6)
        mean = sum(each**2 for each in want) / 8
        wanted = [each / (mean + 0.25) ** 0.5 * float(w) for each, w in zip(want, weight, strict=True)]
        np.testing.assert_allclose(out[rank, token], wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [bf16, f16, f32])
def test_only_words_that_mean_absent_travel_as_others(dtype: Any) -> None:
    words = np.array([0, 0x80000000, 0x8000, ref.ABSENT, ref.ABSENT + 1, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32)
    sent = ref.sent(words.view(dtype)).view(np.uint32)
    assert np.flatnonzero(sent != words).tolist() == [3]
    assert sent[3] == (ref.ABSENT + 1 if dtype is f32 else 0)


GROUP: dict[str, Any] = {"max_tokens": 4, "hidden": 64}


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"hidden": 60}, ValueError, "hidden: wanted rows of a multiple of 16 bytes up to 128 KB, got 60"),
        ({"hidden": 2**17}, ValueError, "hidden: wanted rows of a multiple of 16 bytes up to 128 KB, got 131072"),
        ({"max_tokens": 2.0}, TypeError, "max_tokens: wanted an integer, got 2.0"),
        ({"max_tokens": 0}, ValueError, "max_tokens: wanted at least 1, got 0"),
        ({"dtype": np.int32}, TypeError, "dtype: wanted float32, float16, bfloat16, got int32"),
        ({"protocols": {"lamport": 3}}, ValueError, r"protocols: wanted rising numbers up to 4, got {'lamport': 3}"),
        ({"protocols": {"lamport": 4, "flags": 2}}, ValueError, "protocols: wanted rising numbers up to 4"),
        ({"protocols": {"lamport": -1, "flags": 4}}, ValueError, "protocols: wanted rising numbers up to 4"),
        ({"protocols": ["lamport"]}, TypeError, "protocols: wanted a mapping of names to tokens"),
        ({"timeout_s": 1e12}, ValueError, "timeout_s: wanted 1e-6 to 1e6, got 1000000000000"),
        ({"protocols": {}}, ValueError, "protocols: wanted rising numbers up to 4, got {}"),
        (
            {"protocols": {"ring": 4}},
            ValueError,
            r"protocols: wanted lamport, packets, flags, two_shot, got \['ring'\]",
        ),
        ({"protocols": {"flags": 4.0}}, TypeError, r"protocols\['flags'\]: wanted an integer, got 4.0"),
    ],
    ids=str,
)
def test_a_group_that_cannot_be_is_refused(
    device: Device, wrong: dict[str, Any], error: type[Exception], message: str
) -> None:
    with World.of_virtual(device, 2) as world, pytest.raises(error, match=f"^AllReduce: {message}"):
        AllReduce(world, **GROUP | wrong)


def test_worlds_of_one_or_of_many_are_refused(device: Device) -> None:
    for size in (1, 9):
        with (
            World.of_virtual(device, size) as world,
            pytest.raises(ValueError, match=f"^AllReduce: world: wanted 2 to 8 ranks, got {size}"),
        ):
            AllReduce(world, **GROUP)


@pytest.mark.parametrize(
    ("role", "shape", "dtype", "error", "message"),
    [
        ("x", (2, 5, 64), bf16, ValueError, "x has 5 tokens: the group was made for 4"),
        ("x", (3, 64), bf16, ValueError, r"x: wanted shape \(2, tokens, 64\), got \(3, 64\)"),
        ("x", (3, 3, 64), bf16, ValueError, r"x: wanted shape \(2, tokens, 64\), got \(3, 3, 64\)"),
        ("residual", (2, 4, 64), bf16, ValueError, r"residual: wanted shape \(2, 3, 64\), got \(2, 4, 64\)"),
        ("out", (2, 3, 64), f16, TypeError, "out: wanted a device array of bfloat16, got float16"),
        ("weight", (2, 64), bf16, ValueError, r"weight: wanted shape \(64,\), got \(2, 64\)"),
    ],
)
def test_operands_that_do_not_fit_are_refused(
    device: Device, graph: Graph, role: str, shape: tuple[int, ...], dtype: Any, error: type[Exception], message: str
) -> None:
    with World.of_virtual(device, 2) as world, AllReduce(world, **GROUP) as group:
        names = ("x", "residual", "out", "residual_out")
        operands: dict[str, Any] = {name: device.zeros((2, 3, 64), bf16) for name in names}
        operands |= {"weight": device.zeros(64, bf16)} | {role: device.zeros(shape, dtype)}
        with pytest.raises(error, match=f"^allreduce_rmsnorm: {message}"):
            allreduce_rmsnorm(graph, group, **operands)
    assert not graph.nodes


def test_what_is_no_group_and_no_place_is_refused(device: Device, graph: Graph) -> None:
    with World.of_virtual(device, 2) as world, AllReduce(world, **GROUP) as group:
        x: Any = device.zeros((2, 3, 64), bf16)
        operands = {"x": x, "residual": x, "weight": device.zeros(64, bf16), "out": x}
        operands["residual_out"] = device.zeros((2, 3, 64), bf16)
        with pytest.raises(TypeError, match=r"^allreduce_rmsnorm: wanted a drvkit Stream or Graph, got int"):
            allreduce_rmsnorm(3, group, **operands)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"^allreduce_rmsnorm: group: wanted AllReduce, got World"):
            allreduce_rmsnorm(graph, world, **operands)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"^allreduce_rmsnorm: eps: wanted a number from 0 on, got -1"):
            allreduce_rmsnorm(graph, group, **operands, eps=-1)
        none = {name: each[:, :0] if each.shape != (64,) else each for name, each in operands.items()}
        empty = allreduce_rmsnorm(graph, group, **none, name="nothing")
        assert graph.nodes == (empty,)
    with pytest.raises(ClosedError, match=r"^AllReduce of <World of 2: .*> is closed"):
        group.check()


def test_a_call_does_not_go_ahead_of_one_that_cannot_be_waited_for(device: Device) -> None:
    with World.of_virtual(device, 2) as world, AllReduce(world, **GROUP) as group:
        x: Any = device.zeros((2, 3, 64), bf16)
        operands = {"x": x, "residual": x, "weight": device.zeros(64, bf16), "out": x}
        operands["residual_out"] = device.zeros((2, 3, 64), bf16)
        with device.stream() as first, device.stream() as second, Graph(device, "captured") as captured:
            allreduce_rmsnorm(first, group, **operands)
            with captured.capture(first), pytest.raises(ValueError, match=r"^allreduce_rmsnorm: the call before is on"):
                allreduce_rmsnorm(second, group, **operands)
            allreduce_rmsnorm(second, group, **operands)
            second.synchronize()
            group.check()
            assert group.states[0].numpy()[:, 0].tolist() == [2, 2]


def test_results_overlap_nothing_but_what_they_replace(device: Device, graph: Graph) -> None:
    with World.of_virtual(device, 2) as world, AllReduce(world, **GROUP) as group:
        names = ("x", "residual", "out", "residual_out")
        fit: dict[str, Any] = {name: device.zeros((2, 3, 64), bf16) for name in names} | {
            "weight": device.zeros(64, bf16)
        }
        assert allreduce_rmsnorm(graph, group, **fit | {"out": fit["x"], "residual_out": fit["residual"]})
        more = device.zeros(2 * 3 * 64 + 64, bf16)
        first, shifted = more[: 2 * 3 * 64].reshape(2, 3, 64), more[64:].reshape(2, 3, 64)
        odd = device.zeros(2 * 3 * 64 + 1, bf16)[1:].reshape(2, 3, 64)
        for message, changes in {
            "out .* overlaps x": {"x": first, "out": shifted},
            "residual_out .* overlaps residual": {"residual": first, "residual_out": shifted},
            "out .* overlaps weight": {"out": first, "weight": more[:64]},
            "residual_out .* overlaps out": {"out": first, "residual_out": first},
            "x: wanted an address aligned to 16 bytes": {"x": odd},
        }.items():
            with pytest.raises(ValueError, match=f"^allreduce_rmsnorm: {message}"):
                allreduce_rmsnorm(graph, group, **fit | changes)


# ---- hostile schedules ---------------------------------------------------------------------------------------------

EXPLORED = Path(__file__).resolve().parent.parent / "cpu" / "explored" / "allreduce.py"


@pytest.mark.parametrize("protocol", ["lamport", "packets", "flags", "two_shot", "flags+multicast"])
def test_no_schedule_makes_it_wrong(drvkit_explore: Explore, protocol: str) -> None:
    assert not failures(drvkit_explore(EXPLORED, "2", protocol, ranks=2, seeds=range(4)))


@pytest.mark.parametrize(
    ("protocol", "bug", "said"),
    [
        ("lamport", "first word", "Arrays are not equal"),
        ("packets", "first packet", "Arrays are not equal"),
        ("flags", "no release", "Arrays are not equal"),
    ],
)
def test_a_bug_is_found(drvkit_explore: Explore, protocol: str, bug: str, said: str) -> None:
    found = failures(drvkit_explore(EXPLORED, "2", protocol, bug, ranks=2, seeds=range(6)))
    assert found
    assert all(said in each.said for each in found)


# ---- the kernel ----------------------------------------------------------------------------------------------------

KINDS = ["virtual", "devices"]


def ranks_of(kind: str, device: Device, size: int, **how: Any) -> Ranks:
    world = world_of(kind, device, size)
    return Ranks(world, AllReduce(world, **how))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dtype", "size", "protocol"), [(bf16, 2, "lamport"), (f16, 3, "two_shot"), (f32, 4, "flags"), (bf16, 2, "packets")]
)
def test_sizes_that_change_from_call_to_call(
    device: Device, rng: np.random.Generator, kind: str, dtype: Any, size: int, protocol: str
) -> None:
    hidden = 2048 if dtype is bf16 else 608  # f16: 76 parts of 16 bytes, three warps
    ranks = ranks_of(kind, device, size, max_tokens=17, hidden=hidden, dtype=dtype, protocols={protocol: 17})
    try:
        for tokens in (1, 17, 2, 3, 3, 8):
            host = given(rng, size, tokens, hidden, dtype)
            arrays = ranks.arrays(host)
            ranks.call(arrays)
            check(ranks.results(arrays), host)
    finally:
        ranks.close()


MIXED = {"packets": 1, "lamport": 2, "flags": 4, "two_shot": 6}


def test_protocols_take_turns_and_give_the_same_bits(device: Device, rng: np.random.Generator) -> None:
    ranks = ranks_of("virtual", device, 2, max_tokens=6, hidden=600, protocols=MIXED)
    try:
        assert [ranks.group.protocol_of(tokens) for tokens in (1, 2, 3, 4, 5)] == [
            *("packets", "lamport", "flags", "flags", "two_shot")
        ]
        host = given(rng, 2, 5, 600, bf16)
        wanted: dict[str, NDArray[Any]] = {}
        for tokens in (5, 1, 2, 4, 1, 5, 2, 3, 5, 5, 5):
            arrays = ranks.arrays({name: each[:, :tokens] if each.ndim == 3 else each for name, each in host.items()})
            ranks.call(arrays)
            got = ranks.results(arrays)
            wanted = wanted or got
            for name, each in got.items():
                assert_equal_bits(each, wanted[name][:, :tokens])
        check(wanted, host)
    finally:
        ranks.close()


def test_rows_are_taken_in_turns_where_not_all_have_a_block(
    device: Device, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AllReduce, "_resident", lambda *_: 2)
    ranks = ranks_of("virtual", device, 2, max_tokens=9, hidden=64, protocols={"lamport": 7, "flags": 9})
    try:
        for tokens in (7, 9, 7):
            host = given(rng, 2, tokens, 64, bf16)
            arrays = ranks.arrays(host)
            ranks.call(arrays)
            check(ranks.results(arrays), host)
    finally:
        ranks.close()


def test_the_numbers_of_calls_go_round(device: Device, rng: np.random.Generator) -> None:
    """Far behind what flags were set by, and past the last number."""
    ranks = ranks_of("virtual", device, 2, max_tokens=6, hidden=64, protocols=MIXED)
    try:
        numbers = np.zeros((2, 4), np.uint32)
        numbers[:, 0] = (3 << 30) - 4
        ranks.group.states[0].copy_from(numbers)
        for tokens in (1, 4, 2, 4, 5, 1, 4, 6, 1):
            host = given(rng, 2, tokens, 64, bf16)
            arrays = ranks.arrays(host)
            ranks.call(arrays)
            check(ranks.results(arrays), host)
        assert ranks.group.states[0].numpy()[:, 0].tolist() == [5, 5]
    finally:
        ranks.close()


@pytest.mark.parametrize("protocol", MIXED)
def test_one_store_for_all_ranks_gives_the_same_bits(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    """Multicast objects are made on the CPU device alone: on a host that others use too they are not to be."""
    monkeypatch.setenv("DRVKIT_ENABLE_MULTICAST", "1")
    for name in ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST"):
        monkeypatch.delenv(name, raising=False)
    ranks = ranks_of("devices", Device("cpu"), 3, max_tokens=3, hidden=600, protocols={protocol: 3}, multicast=True)
    try:
        for tokens in (3, 1, 3, 2, 3):
            host = given(rng, 3, tokens, 600, bf16)
            arrays = ranks.arrays(host)
            ranks.call(arrays)
            check(ranks.results(arrays), host)
    finally:
        ranks.close()


def test_results_of_8_bits(device: Device, rng: np.random.Generator) -> None:
    ranks = ranks_of("virtual", device, 2, max_tokens=3, hidden=256)
    host = given(rng, 2, 3, 256, bf16)
    (of,) = ranks.arrays(host)
    scale = np.array([0.01], f32)  # the largest are beyond 448
    of |= {"out": device.zeros(host["x"].shape, ml_dtypes.float8_e4m3fn), "out_scale": device.array(scale)}
    try:
        ranks.call([of])
        got = ranks.results([of])
        out, h = ref.allreduce_rmsnorm(host["x"], host["residual"], host["weight"], out_scale=float(scale[0]))
        assert_equal_bits(got["residual_out"], h)
        assert np.abs(out).max() > 448
        assert_close(
            got["out"].astype(f32), np.clip(out, -448, 448).astype(f32), rtol=2**-4 + 2**-10, atol=2**-10, why="e4m3"
        )
    finally:
        ranks.close()


def test_a_row_has_the_same_bits_with_many_others(device: Device, rng: np.random.Generator) -> None:
    """Blocks of a row are more or fewer, by the number of rows; the order of all sums stays."""
    ranks = ranks_of("virtual", device, 2, max_tokens=64, hidden=4096)
    try:
        assert ranks.group.launch_of(1) != ranks.group.launch_of(64)
        host = given(rng, 2, 64, 4096, bf16)
        many = ranks.arrays(host)
        ranks.call(many)
        wanted = ranks.results(many)
        few = ranks.arrays({name: each[:, 9:10] if each.ndim == 3 else each for name, each in host.items()})
        ranks.call(few)
        for name, each in ranks.results(few).items():
            assert_equal_bits(each, wanted[name][:, 9:10])
    finally:
        ranks.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_is_replayed_between_other_calls(device: Device, rng: np.random.Generator, kind: str) -> None:
    """Seven calls in a graph that is replayed, with calls of another size in between."""
    ranks = ranks_of(kind, device, 2, max_tokens=8, hidden=256)
    host, other = given(rng, 2, 5, 256, bf16), given(rng, 2, 8, 256, bf16)
    arrays, others = ranks.arrays(host), ranks.arrays(other)
    graphs = []
    try:
        for of in arrays:
            graph = Graph(of["x"].device, "chain")
            last: Any = None
            for _ in range(7):
                after = last.port("programmatic") if last is not None and kind == "devices" else last
                last = allreduce_rmsnorm(graph, ranks.group, **of, after=after)
            graphs.append(graph)
        executables = [graph.instantiate() for graph in graphs]
        for _ in range(3):
            for exe, stream in zip(executables, ranks.streams, strict=True):
                exe.launch(stream)
            ranks.call(others)
            check(ranks.results(arrays), host)
            check(ranks.results(others), other)
        for exe, graph in zip(executables, graphs, strict=True):
            exe.close()
            graph.close()
    finally:
        ranks.close()


def test_a_rank_that_does_not_come_is_named_and_the_group_goes_on_after_a_reset(
    device: Device, rng: np.random.Generator
) -> None:
    ranks = ranks_of("devices", device, 2, max_tokens=4, hidden=64, timeout_s=0.2)
    host = given(rng, 2, 3, 64, bf16)
    arrays = ranks.arrays(host)
    try:
        ranks.call(arrays)
        check(ranks.results(arrays), host)
        allreduce_rmsnorm(ranks.streams[0], ranks.group, **arrays[0])  # and nobody else
        ranks.streams[0].synchronize()
        assert np.isnan(arrays[0]["out"].numpy().astype(f32)).all(), "nobody takes it for a result"
        with pytest.raises(
            WorldError, match=r"rank 0 waited in call 2 for rank 1, which did not come within 0\.2 s"
        ) as told:
            ranks.group.check()
        assert told.value.rank == 1
        ranks.call(arrays)  # ends at once: rank 0 has failed
        for stream in ranks.streams:
            stream.synchronize()
        ranks.group.reset()
        ranks.call(arrays)
        check(ranks.results(arrays), host)
    finally:
        ranks.close()


def test_all_ranks_are_told_who_did_not_come(device: Device, rng: np.random.Generator) -> None:
    """The one that waits longest hears of it from another one, which names who is missing."""
    ranks = ranks_of("devices", device, 3, max_tokens=4, hidden=64, timeout_s=0.2)
    arrays = ranks.arrays(given(rng, 3, 3, 64, bf16))
    try:
        ranks.group.limit_ns = 10**11
        allreduce_rmsnorm(ranks.streams[2], ranks.group, **arrays[2])  # would wait for a hundred seconds
        ranks.group.limit_ns = 2 * 10**8
        allreduce_rmsnorm(ranks.streams[0], ranks.group, **arrays[0])
        for stream in ranks.streams:
            stream.synchronize()
        assert np.isnan(arrays[2]["out"].numpy().astype(f32)).all()
        with pytest.raises(WorldError, match="rank 0 waited in call 1 for rank 1, which did not come") as told:
            ranks.group.check()
        assert told.value.rank == 1
        ranks.group.failures[0].host[:] = 0
        with pytest.raises(WorldError, match="rank 2 ended call 1, as rank 0 had waited for rank 1 in vain") as told:
            ranks.group.check()
        assert told.value.rank == 1
    finally:
        ranks.close()


def test_ranks_that_make_different_calls_are_told(device: Device, rng: np.random.Generator) -> None:
    ranks = ranks_of("devices", device, 2, max_tokens=4, hidden=64, timeout_s=0.2)
    few, many = ranks.arrays(given(rng, 2, 2, 64, bf16)), ranks.arrays(given(rng, 2, 3, 64, bf16))
    try:
        for stream, of, eps in zip(ranks.streams, few, (1e-6, 1e-5), strict=True):
            allreduce_rmsnorm(stream, ranks.group, **of, eps=eps)
        for stream in ranks.streams:
            stream.synchronize()
        with pytest.raises(WorldError, match="rank 0 waited in call 1 for rank 1, which made another call"):
            ranks.group.check()
        ranks.group.reset()
        for stream, of in zip(ranks.streams, (few[0], many[1]), strict=True):
            allreduce_rmsnorm(stream, ranks.group, **of)
        for stream in ranks.streams:
            stream.synchronize()
        with pytest.raises(WorldError, match="rank 0 waited in call 1 for rank 1, which made another call"):
            ranks.group.check()
    finally:
        ranks.close()


def in_a_process(world: World, seed: int) -> list[int]:
    """A rank's calls; gives how many elements have other bits than the reference's."""
    (rank,), (device,) = world.ranks, world.devices
    rng, wrong = np.random.default_rng(seed), []
    with AllReduce(world, max_tokens=4, hidden=256, timeout_s=30) as group, device.stream() as stream:
        for tokens in (1, 4, 2):
            host = given(rng, world.size, tokens, 256, bf16)
            of = {name: device.array(each[rank] if each.ndim == 3 else each) for name, each in host.items()}
            out, h = device.zeros((tokens, 256), bf16), device.zeros((tokens, 256), bf16)
            allreduce_rmsnorm(stream, group, of["x"], of["residual"], of["weight"], out, h)
            stream.synchronize()
            group.check()
            want = ref.allreduce_rmsnorm(host["x"], host["residual"], host["weight"])[1][rank]
            wrong.append(int(np.count_nonzero(h.numpy().view(np.uint16) != want.view(np.uint16))))
        world.barrier()
    return wrong


def test_ranks_may_be_processes(device: Device) -> None:
    kind = device.driver.kind
    if kind == "cuda" and device.driver.cuDeviceGetCount() < 2:
        pytest.skip("needs 2 GPUs")
    assert World.spawn(in_a_process, 2, 5, devices=kind, timeout_s=60) == [[0, 0, 0]] * 2
