"""The exchanges of Ulysses: who has what, and both ways between ranks of every kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
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
from drvkit.ops.ulysses import Ulysses, ulysses_to_heads, ulysses_to_tokens
from drvkit.pytest_plugin import Explore
from drvkit.ref import ulysses as ref
from drvkit.world import World, WorldError

bf16, f32, e4m3 = ml_dtypes.bfloat16, np.float32, ml_dtypes.float8_e4m3fn


def random_bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    made: NDArray[Any] = rng.integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8).view(dtype)[..., 0]
    return made


# ---- who has what --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "heads", "kv_heads", "own", "keys"),
    [
        (2, 8, 4, [4, 4], [[0, 1], [2, 3]]),
        (4, 8, 2, [2, 2, 2, 2], [[0], [0], [1], [1]]),  # fewer key heads than ranks
        (4, 7, 7, [2, 2, 2, 1], [[0, 1], [2, 3], [4, 5], [6]]),  # heads that ranks cannot share alike
        (2, 6, 2, [3, 3], [[0], [1]]),
        (4, 12, 4, [3, 3, 3, 3], [[0], [1], [2], [3]]),
        (
            2,
            9,
            3,
            [5, 4],
            [[0, 0, 0, 1, 1], [1, 2, 2, 2]],
        ),  # of 3 + 2 and 1 + 3 query heads: none has several in common
        (3, 4, 1, [2, 1, 1], [[0], [0], [0]]),
    ],
)
def test_every_rank_has_the_keys_of_its_queries(
    ranks: int, heads: int, kv_heads: int, own: list[int], keys: list[list[int]]
) -> None:
    of = [ref.heads_of(rank, ranks, heads) for rank in range(ranks)]
    assert [head for each in of for head in each] == list(range(heads))
    assert [len(each) for each in of] == own
    got = [ref.key_heads_of(rank, ranks, heads, kv_heads) for rank in range(ranks)]
    assert got == keys
    for each, local in zip(of, got, strict=True):
        per_key = len(each) // len(local)
        assert [local[i // per_key] for i in range(len(each))] == [head * kv_heads // heads for head in each]


def attention(q: NDArray[Any], k: NDArray[Any], v: NDArray[Any]) -> NDArray[np.float64]:
    """Of all tokens to all, in float64: q [tokens, heads, dim], k and v [tokens, kv_heads, dim]."""
    q, k, v = (each.astype(np.float64) for each in (q, k, v))
    k, v = (np.repeat(each, q.shape[1] // each.shape[1], axis=1) for each in (k, v))
    logits = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[2])
    weights = np.exp(logits - logits.max(axis=2, keepdims=True))
    made: NDArray[np.float64] = np.einsum("hqk,khd->qhd", weights / weights.sum(axis=2, keepdims=True), v)
    return made


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 4), (8, 2), (7, 7), (9, 3)])
def test_attention_between_the_references_is_attention(rng: np.random.Generator, heads: int, kv_heads: int) -> None:
    tokens, dim = [3, 0, 5, 2], 8
    q, k, v = ([rng.normal(size=(count, each, dim)) for count in tokens] for each in (heads, kv_heads, kv_heads))
    o = ref.to_tokens([attention(*each) for each in ref.to_heads(q, k, v)], tokens)
    wanted = attention(*(np.concatenate(each) for each in (q, k, v)))
    assert [len(each) for each in o] == tokens
    np.testing.assert_allclose(np.concatenate(o), wanted, rtol=1e-12, atol=1e-13)


# ---- the exchanges -------------------------------------------------------------------------------------------------


class Ranks:
    """All ranks of a world in this process."""

    def __init__(self, world: World, made: ExitStack, **how: Any) -> None:
        self.world = made.enter_context(world)
        self.group = made.enter_context(Ulysses(world, **how))
        self.streams = [device.stream() for device in self.group.devices]

    def given(self, arrays: Sequence[NDArray[Any]]) -> list[Any]:
        """On their devices."""
        if self.world.virtual:
            return [self.group.devices[0].array(np.array(arrays))]
        return [device.array(each) for device, each in zip(self.group.devices, arrays, strict=True)]

    def call(self, op: Callable[..., Any], operands: Sequence[list[Any]], tokens: list[int] | None) -> None:
        for place, stream in enumerate(self.streams):
            op(stream, self.group, *(each[place] for each in operands), tokens)

    def results(self, name: str, tokens: Sequence[int]) -> list[NDArray[Any]]:
        for stream in self.streams:
            stream.synchronize()
        self.group.check()
        result = getattr(self.group, name)
        return [result(count, rank).numpy() for rank, count in enumerate(tokens)]


SHAPES = [
    ("virtual", 2, 4, 2, [3, 3], bf16),
    ("virtual", 3, 6, 2, [2, 2, 2], f32),
    ("devices", 2, 5, 5, [7, 0], e4m3),
    ("devices", 3, 6, 2, [1, 5, 2], bf16),
]


@pytest.mark.parametrize(("kind", "size", "heads", "kv_heads", "tokens", "dtype"), SHAPES, ids=str)
def test_both_ways_keep_all_bits(
    device: Device, rng: np.random.Generator, kind: str, size: int, heads: int, kv_heads: int, tokens: Any, dtype: Any
) -> None:
    """By packets first, then, of more tokens, by flags, and again."""
    dim = 16
    with ExitStack() as made:
        most = 40 * sum(tokens)
        how = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "dtype": dtype, "packets_up_to": 2048}
        ranks = Ranks(world_of(kind, device, size), made, max_tokens=most, **how)
        for times in (1, 40, 1, 20, 2):
            counts = [times * count for count in tokens]
            q, k, v = (
                [random_bits(rng, (count, each, dim), dtype) for count in counts]
                for each in (heads, kv_heads, kv_heads)
            )
            ranks.call(ulysses_to_heads, [ranks.given(each) for each in (q, k, v)], counts)
            for name, wanted in zip("qkv", zip(*ref.to_heads(q, k, v), strict=True), strict=True):
                for got, want in zip(ranks.results(name, [sum(counts)] * size), wanted, strict=True):
                    assert_equal_bits(got, want)
            o = [random_bits(rng, (sum(counts), len(ref.heads_of(r, size, heads)), dim), dtype) for r in range(size)]
            ranks.call(ulysses_to_tokens, [ranks.given(o)], counts)
            for got, want in zip(ranks.results("o", counts), ref.to_tokens(o, counts), strict=True):
                assert_equal_bits(got, want)


@pytest.mark.parametrize("packets_up_to", [1 << 20, 0])
def test_units_are_taken_in_turns_where_not_all_have_a_block(
    device: Device, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, packets_up_to: int
) -> None:
    monkeypatch.setattr(Ulysses, "blocks", lambda *_: 1)
    with ExitStack() as made:
        how: dict[str, Any] = {"heads": 2, "kv_heads": 2, "dim": 8, "dtype": f32, "packets_up_to": packets_up_to}
        ranks = Ranks(world_of("devices", device, 2), made, max_tokens=2000, **how)
        q, k, v = ([random_bits(rng, (1000, 2, 8), f32) for _ in range(2)] for _ in range(3))  # 6000 units a pair
        ranks.call(ulysses_to_heads, [ranks.given(each) for each in (q, k, v)], None)
        for name, wanted in zip("qkv", zip(*ref.to_heads(q, k, v), strict=True), strict=True):
            for got, want in zip(ranks.results(name, [2000] * 2), wanted, strict=True):
                assert_equal_bits(got, want)


@pytest.mark.parametrize("packets_up_to", [1 << 20, 0])
def test_attention_between_them_is_that_of_one_device(
    device: Device, rng: np.random.Generator, packets_up_to: int
) -> None:
    """In a graph of each rank that is replayed on other tokens, with slices of one projection as operands."""
    tokens, heads, kv_heads, dim = 6, 4, 2, 8
    with ExitStack() as made:
        how: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "dtype": f32}
        ranks = Ranks(world_of("devices", device, 2), made, max_tokens=2 * tokens, packets_up_to=packets_up_to, **how)
        group, graphs, inputs, attended = ranks.group, [], [], []
        for rank, each in enumerate(group.devices):
            qkv = each.zeros((tokens, heads + 2 * kv_heads, dim), f32)
            o = each.zeros((2 * tokens, heads // 2, dim), f32)
            there, back = Graph(each, "there"), Graph(each, "back")
            first, second = heads, heads + kv_heads
            ulysses_to_heads(there, group, qkv[:, :first], qkv[:, first:second], qkv[:, second:])
            ulysses_to_tokens(back, group, o)
            graphs.append([made.enter_context(made.enter_context(graph).instantiate()) for graph in (there, back)])
            inputs.append(qkv)
            attended.append(o)
            del rank
        for _ in range(3):
            host = rng.normal(size=(2, tokens, heads + 2 * kv_heads, dim)).astype(f32)
            for qkv, values, stream in zip(inputs, host, ranks.streams, strict=True):
                qkv.copy_from(values, stream)
            for (go, _), stream in zip(graphs, ranks.streams, strict=True):
                go.launch(stream)
            q, k, v = (ranks.results(name, [2 * tokens] * 2) for name in "qkv")
            for rank, stream in enumerate(ranks.streams):
                attended[rank].copy_from(attention(q[rank], k[rank], v[rank]).astype(f32), stream)
            for (_, go), stream in zip(graphs, ranks.streams, strict=True):
                go.launch(stream)
            got = np.concatenate(ranks.results("o", [tokens] * 2))
            whole = np.concatenate(host)
            wanted = attention(whole[:, :heads], whole[:, heads : heads + kv_heads], whole[:, heads + kv_heads :])
            assert_close(got, wanted.astype(f32), rtol=1e-5, atol=1e-6, why="attention is computed in double")


def test_a_rank_that_does_not_come_leaves_no_result(device: Device, rng: np.random.Generator) -> None:
    for packets_up_to in (1 << 20, 0):
        with ExitStack() as made:
            how: dict[str, Any] = {"heads": 2, "kv_heads": 2, "dim": 8, "dtype": f32, "packets_up_to": packets_up_to}
            ranks = Ranks(world_of("devices", device, 2), made, max_tokens=8, timeout_s=0.2, **how)
            x = ranks.given(list(rng.normal(size=(2, 4, 2, 8)).astype(f32)))
            ranks.call(ulysses_to_heads, [x, x, x], None)
            assert not np.isnan(np.array(ranks.results("q", [8, 8]))).any()
            ulysses_to_heads(ranks.streams[0], ranks.group, x[0], x[0], x[0])
            ranks.streams[0].synchronize()
            for name in "qkv":
                theirs = getattr(ranks.group, name)(8, 0).numpy()[4:]
                assert np.isnan(theirs).all(), "what rank 1 did not send"
            with pytest.raises(WorldError, match=r"^Ulysses: rank 0 waited in call 2 for rank 1, which did not come"):
                ranks.group.check()
            ulysses_to_heads(ranks.streams[1], ranks.group, x[1], x[1], x[1])  # too late
            ranks.streams[1].synchronize()
            assert packets_up_to or np.isnan(ranks.group.q(8, 0).numpy()[4:]).all(), "rank 0 has failed: it stays"
            ranks.group.reset()
            ranks.call(ulysses_to_heads, [x, x, x], None)
            assert not np.isnan(np.array(ranks.results("q", [8, 8]))).any()


EXPLORED = Path(__file__).resolve().parent.parent / "cpu" / "explored" / "ulysses.py"


def test_no_schedule_makes_it_wrong(drvkit_explore: Explore) -> None:
    assert not failures(drvkit_explore(EXPLORED, "2", "flags", ranks=2, seeds=range(10)))
    assert not failures(drvkit_explore(EXPLORED, "2", "packets", ranks=2, seeds=range(10)))


@pytest.mark.parametrize(
    ("protocol", "bug", "said"),
    [("flags", "eager", "Arrays are not equal"), ("packets", "no meeting", "deadlock")],
)
def test_a_bug_is_found(drvkit_explore: Explore, protocol: str, bug: str, said: str) -> None:
    found = failures(drvkit_explore(EXPLORED, "2", protocol, bug, ranks=2, seeds=range(16)))
    assert found
    assert all(said in each.said for each in found)


# ---- refusals ------------------------------------------------------------------------------------------------------

GROUP: dict[str, Any] = {"max_tokens": 8, "heads": 4, "kv_heads": 2, "dim": 8}


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"heads": 5}, ValueError, "wanted a whole number of query heads for each key head, got 5 and 2"),
        ({"heads": 1, "kv_heads": 1}, ValueError, "heads: wanted one for each of 2 ranks or more, got 1"),
        ({"dim": 4}, ValueError, "dim: wanted heads of a multiple of 16 bytes, got 4 of bfloat16"),
        ({"max_tokens": 0}, ValueError, "max_tokens: wanted at least 1, got 0"),
        ({"max_tokens": 2**30}, ValueError, "max_tokens: 1073741824 tokens of a rank's heads are 8 GB or more"),
        ({"kv_heads": 2.0}, TypeError, "kv_heads: wanted an integer, got 2.0"),
        ({"packets_up_to": -1}, ValueError, "packets_up_to: wanted at least 0, got -1"),
    ],
    ids=str,
)
def test_a_group_that_cannot_be_is_refused(
    device: Device, wrong: dict[str, Any], error: type[Exception], message: str
) -> None:
    with World.of_virtual(device, 2) as world, pytest.raises(error, match=f"^Ulysses: {message}"):
        Ulysses(world, **GROUP | wrong)


def test_operands_that_do_not_fit_are_refused(device: Device, graph: Graph) -> None:
    with ExitStack() as made:
        ranks = Ranks(world_of("virtual", device, 2), made, **GROUP)
        group = ranks.group

        def of(*shape: int, dtype: Any = bf16) -> Any:
            return device.zeros(shape, dtype)

        q, k = of(2, 3, 4, 8), of(2, 3, 2, 8)
        for error, message, call in (
            (ValueError, r"q: wanted shape \(2, tokens, 4, 8\), got \(2, 3, 2, 8\)", (k, k, k)),
            (TypeError, "k: wanted a device array of bfloat16, got float32", (q, of(2, 3, 2, 8, dtype=f32), k)),
            (ValueError, "v has 4 tokens, q has 3", (q, k, of(2, 4, 2, 8))),
            (ValueError, "rank 0 gives 3 tokens, tokens says 2", (q, k, k, [2, 2])),
            (ValueError, r"tokens: wanted as many for each virtual rank, got \[3, 1\]", (q, k, k, [3, 1])),
            (ValueError, r"tokens: wanted the number of each of 2 ranks, got \[3\]", (q, k, k, [3])),
            (
                ValueError,
                r"tokens: \[5, 5\] are more than the 8 of all",
                (of(2, 5, 4, 8), of(2, 5, 2, 8), of(2, 5, 2, 8)),
            ),
            (ValueError, "q: wanted heads one behind the other", (of(2, 3, 4, 16)[..., :8], k, k)),
            (TypeError, "tokens: wanted the number of each rank's tokens, got 3", (q, k, k, 3)),
        ):
            with pytest.raises(error, match=f"^ulysses_to_heads: {message}"):
                ulysses_to_heads(graph, group, *call)
        for message, o, tokens in (
            (r"o: wanted shape \(2, tokens, 2, 8\)", q, None),
            ("o has 3 tokens, which 2 ranks cannot share alike", k, None),
            ("o has 3 tokens, tokens has 4 together", k, [2, 2]),
        ):
            with pytest.raises(ValueError, match=f"^ulysses_to_tokens: {message}"):
                ulysses_to_tokens(graph, group, o, tokens)
        assert not graph.nodes
        with pytest.raises(ValueError, match=r"^Ulysses\.o: tokens: wanted 0 to 8, got 9"):
            group.o(9)
        with pytest.raises(ValueError, match=r"^Ulysses\.o: rank: wanted one of this process, \(0, 1\), got 7"):
            group.o(1, 7)


def test_operands_are_not_where_results_go(device: Device) -> None:
    with ExitStack() as made:
        group = Ranks(world_of("devices", device, 2), made, **GROUP).group
        x: Any = group.devices[0].zeros((3, 4, 8), bf16)
        inside, graph = group.q(6).reshape(3, 4, 8), made.enter_context(Graph(group.devices[0], "aliases"))
        with pytest.raises(ValueError, match=r"^ulysses_to_heads: group\.q at .* overlaps q"):
            ulysses_to_heads(graph, group, inside, x[:, :2], x[:, 2:])
        with pytest.raises(ValueError, match=r"^ulysses_to_tokens: group\.o at .* overlaps o"):
            ulysses_to_tokens(graph, group, group.o(3).reshape(6, 2, 8))
        assert not graph.nodes
