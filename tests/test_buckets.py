"""Buckets: which graph a step takes, what its padded rows hold, and what the graphs share."""

from __future__ import annotations

import gc
import itertools
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from kernels import SOURCE, ints

import drvkit as dk
from drvkit.buckets import Scratch

SIZES = (1, 2, 4, 8, 16)
POISON = 77


def nothing(key: dk.Key, scratch: Scratch) -> Any:
    """Builds what does nothing."""
    return lambda stream, real: None


class Doubling:
    """Builds graphs that double the first rows of ``x`` into ``y`` by way of scratch memory."""

    def __init__(self, module: dk.Module, rows: int = 16, width: int = 3) -> None:
        self.module, self.device = module, module.device
        self.x = self.device.array(np.full((rows, width), POISON, np.float32))
        self.y = self.device.array(np.full((rows, width), POISON, np.float32))
        self.built: list[dk.Key] = []
        self.scratches: dict[dk.Key, list[dk.Buffer]] = {}

    def __call__(self, key: dk.Key, scratch: Scratch) -> dk.Graph:
        self.built.append(key)
        t = scratch.empty((key.tokens, 3), np.float32)
        u = scratch.empty((key.tokens, 3), np.float32)
        self.scratches[key] = [t, u]
        graph = dk.Graph(self.device, str(key))
        scale = self.module.kernel("scale")
        first = graph.kernel(scale, grid=1, block=64, args=(self.x, t, t.size, 2.0), name="first")
        second = graph.kernel(scale, grid=1, block=64, args=(t, u, t.size, 1.0), after=first, name="second")
        graph.memcpy(self.y[: key.tokens], u, after=second, name="out")
        return graph


@pytest.fixture
def doubling(module: dk.Module) -> Iterator[Doubling]:
    doubling = Doubling(module)
    yield doubling
    doubling.x.close()
    doubling.y.close()


@pytest.fixture
def another(device: dk.Device) -> Iterator[dk.Stream]:
    with device.stream() as stream:
        yield stream


# ---- what a step takes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "takes"), [(0, 1), (1, 1), (2, 2), (3, 4), (8, 8), (9, 16), (13, 16), (16, 16)])
def test_a_step_takes_the_next_size(device: dk.Device, stream: dk.Stream, tokens: int, takes: int) -> None:
    with dk.Buckets(device, SIZES, nothing) as buckets:
        assert buckets.key_for(tokens) == dk.Key(takes)
        assert buckets.run(stream, tokens) == (dk.Key(takes), dk.Key(tokens), "eager", takes - tokens)


def test_the_order_of_keys_does_not_matter(device: dk.Device) -> None:
    with dk.Buckets(device, [8, 1, 16, 4], nothing) as buckets:
        assert [key.tokens for key in buckets.keys] == [1, 4, 8, 16]
        assert [buckets.key_for(n).tokens for n in (1, 2, 5, 9)] == [1, 4, 8, 16]


def test_tokens_and_requests_must_both_fit(device: dk.Device) -> None:
    keys = [dk.Key(*sizes, "prefill") for sizes in ((64, 4), (64, 16), (128, 2), (256, 16))]
    with dk.Buckets(device, keys, nothing) as buckets:

        def takes(tokens: int, requests: int) -> tuple[int, int]:
            key = buckets.key_for(tokens, requests, mode="prefill")
            return key.tokens, key.requests

        assert takes(64, 4) == (64, 4)
        assert takes(5, 5) == (64, 16)
        assert takes(65, 2) == (128, 2)
        assert takes(65, 3) == (256, 16)
        with pytest.raises(dk.BucketError):
            takes(2, 17)


def test_modes_and_features_must_be_the_same(device: dk.Device) -> None:
    keys = [
        dk.Key(8),
        dk.Key(16, features={"window"}),
        dk.Key(32, features={"window", "sinks"}),
        dk.Key(64, 8, "mixed"),
    ]
    with dk.Buckets(device, keys, nothing) as buckets:
        assert buckets.key_for(3) == keys[0]
        assert buckets.key_for(3, features=["window"]) == keys[1]
        assert buckets.key_for(3, features={"sinks", "window"}) == keys[2]
        assert buckets.key_for(3, mode="mixed") == keys[3]
        for wanted in ({"features": {"sinks"}}, {"mode": "mixed", "features": {"window"}}, {"mode": "prefill"}):
            with pytest.raises(dk.BucketError):
                buckets.key_for(3, **wanted)


def test_a_miss_names_the_nearest_keys(device: dk.Device, stream: dk.Stream) -> None:
    with dk.Buckets(device, [*SIZES, dk.Key(64, 8, "mixed")], nothing, name="step") as buckets:
        message = (
            "buckets 'step': none for decode, 17 tokens of 17 requests; nearest: decode, 16 tokens of 16 requests; "
        )
        for miss in (buckets.key_for, lambda tokens: buckets.run(stream, tokens)):
            with pytest.raises(dk.BucketError, match=re.escape(message)) as caught:
                miss(17)
            assert caught.value.wanted == dk.Key(17)
            assert caught.value.nearest == (dk.Key(16), dk.Key(8), dk.Key(4))
        with pytest.raises(dk.BucketError, match="none for mixed, 1 token of 1 request, window; nearest: mixed, 64 "):
            buckets.run(stream, 1, mode="mixed", features={"window"})


def test_what_has_no_bucket_runs_eagerly_as_it_is(device: dk.Device, stream: dk.Stream) -> None:
    seen = []
    slots = ints(device, 1, 2, 3, 4)
    pads = [dk.Pad("slots", slots, -1)]
    eager = lambda *args: seen.append(args)  # noqa: E731
    with dk.Buckets(device, [4], nothing, pads=pads, eager=eager) as buckets:
        real = dk.Key(100, 3, "prefill", {"window"})
        assert buckets.run(stream, 100, 3, mode="prefill", features={"window"}) == (None, real, "eager", 0)
        assert buckets.run(stream, 5).key is None
        assert buckets.run(stream, 4).key == dk.Key(4)
        assert seen == [(stream, real), (stream, dk.Key(5))]
        assert buckets.misses == 2
        with pytest.raises(dk.BucketError):
            buckets.key_for(5)
    assert slots.numpy().tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "features", [{"a", "b"}, ["b", "a"], ("a", "b", "a"), frozenset("ab")], ids=["set", "list", "tuple", "frozenset"]
)
def test_keys_are_equal_whatever_they_are_made_of(features: Any) -> None:
    key = dk.Key(np.int64(3), None, "decode", features)  # type: ignore[arg-type]
    assert key == dk.Key(3, 3, "decode", frozenset({"a", "b"}))
    assert hash(key) == hash(dk.Key(3, features=("b", "a")))
    assert type(key.tokens) is int
    assert str(key) == "decode, 3 tokens of 3 requests, a b"


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((-1,), ValueError, "tokens: .*got -1"),
        ((1, -1), ValueError, "requests: .*got -1"),
        ((1.0,), TypeError, "tokens: .*got 1.0"),
        ((True,), TypeError, "tokens: .*got True"),
        ((1, "2"), TypeError, "requests: .*got '2'"),
        ((1, 1, None), TypeError, "mode: .*got None"),
        ((1, 1, "decode", "window"), TypeError, "features: wanted a set of words, got 'window'"),
    ],
    ids=str,
)
def test_what_is_no_key_is_refused(
    device: dk.Device, stream: dk.Stream, args: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        dk.Key(*args)
    with dk.Buckets(device, [1], nothing) as buckets:
        buckets.run(stream, 1)  # what equals a key that is known is no key yet
        tokens, requests, mode, features = args + (None, "decode", frozenset())[len(args) - 1 :]
        with pytest.raises(error, match=message):
            buckets.run(stream, tokens, requests, mode=mode, features=features)


# ---- what is built -------------------------------------------------------------------------------------------------


def test_each_size_computes_the_same(stream: dk.Stream, doubling: Doubling, rng: np.random.Generator) -> None:
    with dk.Buckets(doubling.device, SIZES, doubling) as buckets:
        for tokens in rng.permutation(17):
            rows = rng.normal(size=(tokens, 3)).astype(np.float32)
            if tokens:
                doubling.x[:tokens].copy_from(rows)
            assert buckets.run(stream, int(tokens)).how == "full"
            np.testing.assert_array_equal(doubling.y.numpy(stream)[:tokens], 2 * rows)
    assert sorted(key.tokens for key in doubling.built) == list(SIZES)


def test_all_are_built_the_largest_first_and_once(stream: dk.Stream, doubling: Doubling) -> None:
    with dk.Buckets(doubling.device, SIZES, doubling) as buckets:
        assert all(bucket.how == "not built" for bucket in buckets)
        buckets.run(stream, 3)
        assert buckets.build_all(upload=stream) is buckets
        assert [key.tokens for key in doubling.built] == [4, 16, 8, 2, 1]
        buckets.build_all()
        buckets.run(stream, 16)
        assert len(doubling.built) == 5
        assert all(bucket.how == "full" for bucket in buckets)


def test_graphs_share_their_memory(stream: dk.Stream, doubling: Doubling) -> None:
    with dk.Buckets(doubling.device, SIZES, doubling) as buckets:
        buckets.build_all()
        addresses = [[buffer.address for buffer in buffers] for buffers in doubling.scratches.values()]
        assert len(addresses) == 5
        assert all(these[0] != these[1] for these in addresses)
        assert {address for these in addresses for address in these} == set(addresses[0])
        assert buckets.scratch.nbytes == 2 * 256  # what the largest needs


def test_scratch_memory_is_apart_within_a_build(device: dk.Device, rng: np.random.Generator) -> None:
    extents: list[tuple[int, int]] = []

    def build(key: dk.Key, scratch: Scratch) -> Any:
        extents.clear()
        for _ in range(20):
            buffer = scratch.empty((key.tokens, int(rng.integers(0, 400))), np.int8)
            assert buffer.address % 256 == 0
            extents.append((buffer.address, buffer.address + buffer.nbytes))
        assert scratch.empty((), np.float64).shape == ()
        extents.sort()
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(extents))
        return nothing(key, scratch)

    with dk.Buckets(device, SIZES, build) as buckets:
        buckets.build_all()


def test_scratch_memory_grows_where_the_largest_does_not_come_first(device: dk.Device, stream: dk.Stream) -> None:
    def build(key: dk.Key, scratch: Scratch) -> Any:
        scratch.empty(1024 * key.tokens, np.uint8)
        return nothing(key, scratch)

    with dk.Buckets(device, [1, 2], build) as buckets:
        buckets.run(stream, 1)
        assert buckets.scratch.nbytes == 1024
        buckets.run(stream, 2)
        assert buckets.scratch.nbytes == 3072


def test_scratch_memory_is_shared_whatever_the_order(device: dk.Device) -> None:
    def build(key: dk.Key, scratch: Scratch) -> Any:
        for nbytes in (1024, 256, 512) if key.tokens == 2 else (256, 500, 1000):
            scratch.empty(nbytes, np.uint8)
        return nothing(key, scratch)

    with dk.Buckets(device, [1, 2], build) as buckets:
        assert buckets.build_all().scratch.nbytes == 1024 + 256 + 512


def test_pieces_run_in_order(device: dk.Device, module: dk.Module, stream: dk.Stream) -> None:
    log, append, seen = device.zeros(8, np.int32), module.kernel("append"), []

    def graph(value: int) -> dk.Graph:
        piece = dk.Graph(device)
        piece.kernel(append, grid=1, block=1, args=(log, value))
        return piece

    def build(key: dk.Key, scratch: Scratch) -> Any:
        def between(stream: dk.Stream, real: dk.Key) -> None:
            seen.append(real)
            append.launch(stream, grid=1, block=1, args=(log, 10 * key.tokens + real.tokens))

        return [graph(1), between, graph(2).instantiate(), between]

    with dk.Buckets(device, [4], build) as buckets:
        assert buckets.run(stream, 3).how == "piecewise"
        assert log.numpy(stream).tolist() == [4, 1, 43, 2, 43, 0, 0, 0]
        assert seen == [dk.Key(3)] * 2
        assert [isinstance(piece, dk.Exec) for piece in buckets[4].pieces] == [True, False, True, False]


def test_how_a_bucket_runs(device: dk.Device) -> None:
    def function(stream: dk.Stream, real: dk.Key) -> None: ...

    made: dict[int, Callable[[], Any]] = {
        1: lambda: dk.Graph(device),
        2: lambda: (dk.Graph(device),),
        3: lambda: [dk.Graph(device), dk.Graph(device)],
        4: lambda: [function, dk.Graph(device)],
        5: lambda: function,
        6: lambda: [function, function],
        7: lambda: dk.Graph(device).instantiate(),
    }
    with dk.Buckets(device, made, lambda key, scratch: made[key.tokens]()) as buckets:
        hows = [bucket.how for bucket in buckets.build_all()]
    assert hows == ["full", "full", "piecewise", "piecewise", "eager", "eager", "full"]


def test_the_nodes_of_a_bucket_are_changed_by_name(stream: dk.Stream, doubling: Doubling) -> None:
    with dk.Buckets(doubling.device, [1, 2], doubling) as buckets:
        doubling.x.fill(1.0)
        buckets.build_all()[2].pieces[0]["first"].set(alpha=5.0)  # type: ignore[index]
        buckets.run(stream, 2)
        assert doubling.y.numpy(stream)[:3, 0].tolist() == [5, 5, POISON]
        buckets.run(stream, 1)
        assert doubling.y.numpy(stream)[:3, 0].tolist() == [2, 5, POISON]


@pytest.mark.parametrize(
    ("built", "got"),
    [(None, "None"), ([], "none"), ("graph", "'graph'"), ([nothing, 3], "3")],
    ids=["None", "nothing", "text", "a number"],
)
def test_what_cannot_be_launched_is_refused(device: dk.Device, stream: dk.Stream, built: Any, got: str) -> None:
    with dk.Buckets(device, [2], lambda key, scratch: built) as buckets:
        with pytest.raises(
            TypeError, match=f"wanted a Graph, an Exec or a function, or several, got .*{got}"
        ) as caught:
            buckets.run(stream, 1)
        assert caught.value.__notes__ == ["while building for decode, 2 tokens of 2 requests"]
        assert buckets[2].how == "not built"


def test_a_build_that_fails_leaves_nothing_and_may_be_tried_again(stream: dk.Stream, doubling: Doubling) -> None:
    graphs: list[dk.Graph] = []

    def build(key: dk.Key, scratch: Scratch) -> Any:
        graphs.append(doubling(key, scratch))
        return [graphs[-1], 3] if len(graphs) == 1 else graphs[-1]

    with dk.Buckets(doubling.device, [2], build) as buckets:
        with pytest.raises(TypeError):
            buckets.run(stream, 2)
        assert graphs[0].closed
        assert buckets.run(stream, 2).how == "full"
        assert doubling.y.numpy(stream)[:3, 0].tolist() == [2 * POISON, 2 * POISON, POISON]
        assert buckets.scratch.nbytes == 2 * 256


def test_a_build_cannot_build_another(device: dk.Device, stream: dk.Stream) -> None:
    def build(key: dk.Key, scratch: Scratch) -> Any:
        buckets.run(stream, 1 if key.tokens == 2 else 2)

    with (
        dk.Buckets(device, [1, 2], build) as buckets,
        pytest.raises(dk.BucketError, match="a build needs decode, 2 tokens of 2 requests, which is not built"),
    ):
        buckets.run(stream, 1)


def test_threads_build_a_size_once(stream: dk.Stream, doubling: Doubling) -> None:
    with dk.Buckets(doubling.device, [2], doubling) as buckets:
        threads = [threading.Thread(target=buckets.run, args=(stream, 2)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(doubling.built) == 1


# ---- padding -------------------------------------------------------------------------------------------------------


def test_padded_rows_are_filled_and_no_others(device: dk.Device, stream: dk.Stream) -> None:
    slots = device.array(np.full(20, POISON, np.int64))
    lengths = device.array(np.full(20, POISON, np.int32))
    starts = device.array(np.full(20, POISON, np.int32))
    positions = device.array(np.full((20, 3), POISON, np.int16))
    table = device.array(np.full((20, 5), POISON, np.int32))
    hidden = device.array(np.full((20, 2, 2), POISON, np.float32))
    flags = device.array(np.full((20, 3), POISON, np.uint8))
    pads = [
        dk.Pad("slots", slots, -1),
        dk.Pad("lengths", lengths, 0, by="requests"),
        dk.Pad("starts", starts[1:], "tokens", by="requests"),
        dk.Pad("positions", positions, -2),
        dk.Pad("table", table[:, :3], 0x7FFFFFFF, by="requests"),  # rows with gaps between
        dk.Pad("hidden", hidden, 0.5),
        dk.Pad("flags", flags[:, 1], 1),
    ]
    with dk.Buckets(device, [dk.Key(16, 8)], nothing, pads=pads) as buckets:
        buckets.run(stream, 13, 5)
    assert slots.numpy().tolist() == [POISON] * 13 + [-1] * 3 + [POISON] * 4
    assert lengths.numpy().tolist() == [POISON] * 5 + [0] * 3 + [POISON] * 12
    assert starts.numpy().tolist() == [POISON] * 6 + [13] * 3 + [POISON] * 11
    assert positions.numpy().tolist() == [[POISON] * 3] * 13 + [[-2] * 3] * 3 + [[POISON] * 3] * 4
    whole, filled = [POISON] * 5, [0x7FFFFFFF] * 3 + [POISON] * 2
    assert table.numpy().tolist() == [whole] * 5 + [filled] * 3 + [whole] * 12
    assert (hidden.numpy() == np.repeat([POISON, 0.5, POISON], [13, 3, 4])[:, None, None]).all()
    assert flags.numpy().tolist() == [[POISON] * 3] * 13 + [[POISON, 1, POISON]] * 3 + [[POISON] * 3] * 4


def test_rows_of_an_earlier_step_reach_no_kernel(stream: dk.Stream, doubling: Doubling) -> None:
    x, y = doubling.x, doubling.y
    with dk.Buckets(doubling.device, SIZES, doubling, pads=[dk.Pad("x", x, 0.0)]) as buckets:
        for tokens in (16, 13, 16, 5, 0, 7, 3):
            x.fill(float("nan"))
            y.fill(POISON)
            if tokens:
                x[:tokens].fill(1.0)
            size = buckets.run(stream, tokens).key.tokens  # type: ignore[union-attr]
            assert y.numpy(stream)[:, 0].tolist() == [2] * tokens + [0] * (size - tokens) + [POISON] * (16 - size)


def test_a_full_step_fills_nothing(device: dk.Device, stream: dk.Stream) -> None:
    slots, empty = ints(device, *range(4)), device.zeros((4, 0), np.int32)
    with dk.Buckets(device, [2, 4], nothing, pads=[dk.Pad("slots", slots, -1), dk.Pad("empty", empty, -1)]) as buckets:
        buckets.run(stream, 4)
        buckets.run(stream, 2)
        assert slots.numpy(stream).tolist() == [0, 1, 2, 3]
        buckets.run(stream, 3)
        assert slots.numpy(stream).tolist() == [0, 1, 2, -1]


def test_arrays_of_other_libraries_are_filled(device: dk.Device, stream: dk.Stream, arrays: Any) -> None:
    slots = arrays.to_device(np.arange(8, dtype=np.int64))
    with dk.Buckets(device, [8], nothing, pads=[dk.Pad("slots", slots, -1)]) as buckets:
        buckets.run(stream, 6)
        stream.synchronize()
        assert arrays.numpy(slots).tolist() == [0, 1, 2, 3, 4, 5, -1, -1]


def test_inputs_are_held_until_the_fill_is_done(device: dk.Device, module: dk.Module, stream: dk.Stream) -> None:
    slots = ints(device, *range(4))
    address = f"{slots.address:#x}"

    def there() -> bool:
        gc.collect()
        return any(address in thing.name for thing in dk.live())

    with dk.Buckets(device, [4], nothing, pads=[dk.Pad("slots", slots, -1)]) as buckets:
        slots.close()
        assert there()
        module.kernel("spin").launch(stream, grid=1, block=1, args=(20,))
        buckets.run(stream, 1)
    assert there()
    stream.synchronize()
    assert not there()


WRONG: dict[str, tuple[Callable[[dk.Device], Any], type[Exception], str]] = {
    "no pad": (lambda device: ("slots", ints(device, 1), -1), TypeError, "pads: wanted a Pad, got"),
    "on the host": (lambda device: dk.Pad("p", np.zeros(4), 0), TypeError, "pad 'p': wanted a device array"),
    "no array": (lambda device: dk.Pad("p", 3, 0), TypeError, "pad 'p': wanted a device array"),
    "too short": (
        lambda device: dk.Pad("p", ints(device, 1, 2, 3), -1),
        ValueError,
        "pad 'p': it has 3 rows, too few for decode, 4 tokens of 2 requests",
    ),
    "no rows": (lambda device: dk.Pad("p", device.zeros((), np.int32), 0), ValueError, "pad 'p': it has 0 rows"),
    "no such value": (lambda device: dk.Pad("p", ints(device, 1, 2, 3, 4), 0.5), ValueError, "pad 'p': fill: .*0.5"),
    "no period": (
        lambda device: dk.Pad("p", device.zeros(4, np.int64), 1),
        ValueError,
        "pad 'p': fill: 1 as int64 has no period",
    ),
    "no int32": (
        lambda device: dk.Pad("p", device.zeros(4, np.int64), "tokens"),
        TypeError,
        "pad 'p': the number of tokens fills an array of int32, not of int64",
    ),
    "rows with gaps": (
        lambda device: dk.Pad("p", device.zeros((4, 4), np.int32)[:, ::2], 0),
        ValueError,
        "pad 'p': .*its rows have gaps",
    ),
    "by something": (
        lambda device: dk.Pad("p", ints(device, 1), 0, by="pages"),  # type: ignore[arg-type]
        ValueError,
        "pad 'p': by is 'tokens' or 'requests', not 'pages'",
    ),
}


@pytest.mark.parametrize(("pad", "error", "message"), WRONG.values(), ids=WRONG)
def test_pads_that_cannot_be_filled_are_refused(
    device: dk.Device, pad: Callable[[dk.Device], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"buckets 'step': {message}"):
        dk.Buckets(device, [dk.Key(1), dk.Key(4, 2)], nothing, pads=[pad(device)], name="step")


def test_a_pad_by_requests_needs_no_more_rows_than_requests(device: dk.Device, stream: dk.Stream) -> None:
    lengths = ints(device, 5, 6)
    pads = [dk.Pad("lengths", lengths, 0, by="requests")]
    with dk.Buckets(device, [dk.Key(4, 2)], nothing, pads=pads) as buckets:
        buckets.run(stream, 4, 1)
        assert lengths.numpy(stream).tolist() == [5, 0]


# ---- order ---------------------------------------------------------------------------------------------------------


def run_on_two_streams(device: dk.Device, module: dk.Module, one: dk.Stream, other: dk.Stream) -> list[int]:
    """What runs of two sizes left behind, which share inputs and scratch memory."""
    log, slots = device.zeros(8, np.int32), ints(device, *range(4))
    append, spin, store = (module.kernel(name) for name in ("append", "spin", "store"))

    def build(key: dk.Key, scratch: Scratch) -> dk.Graph:
        graph, t = dk.Graph(device), scratch.empty(1, np.int32)
        first = graph.kernel(store, grid=1, block=1, args=(t, key.tokens))
        busy = graph.kernel(spin, grid=1, block=1, args=(20,), after=first)
        out = graph.kernel(append, grid=1, block=1, args=(log, key.tokens), after=busy)
        graph.memcpy(log[5:6] if key.tokens == 2 else log[6:7], t, after=out)
        return graph

    with dk.Buckets(device, [2, 4], build, pads=[dk.Pad("slots", slots, -1)]) as buckets:
        buckets.build_all()
        for tokens, where in ((1, one), (3, other), (2, one)):
            buckets.run(where, tokens)
        left: list[int] = log.numpy(one).tolist()
        return left


def test_runs_follow_each_other_on_whatever_streams(
    device: dk.Device, module: dk.Module, stream: dk.Stream, another: dk.Stream
) -> None:
    assert run_on_two_streams(device, module, stream, another) == [3, 2, 4, 2, 0, 2, 4, 0]


@pytest.mark.drvkit_check
def test_runs_on_different_streams_have_no_race() -> None:
    device = dk.Device("cpu")
    with device.module(SOURCE) as module, device.stream() as stream, device.stream() as another:
        run_on_two_streams(device, module, stream, another)


def test_a_stream_that_was_closed_needs_no_waiting(device: dk.Device, stream: dk.Stream, doubling: Doubling) -> None:
    with dk.Buckets(device, [2, 4], doubling) as buckets:
        with device.stream() as first:
            buckets.run(first, 4)
        buckets.run(stream, 2)
        assert doubling.y.numpy(stream)[:5, 0].tolist() == [2 * POISON] * 4 + [POISON]
        for use in (lambda: buckets.run(first, 1), lambda: buckets.build_all(upload=first)):
            with pytest.raises(dk.ClosedError, match=r"stream .* is closed"):
                use()


def test_there_is_no_run_while_its_stream_is_captured(
    device: dk.Device, graph: dk.Graph, stream: dk.Stream, another: dk.Stream
) -> None:
    with dk.Buckets(device, [2], nothing) as buckets:
        buckets.run(stream, 2)
        with graph.capture(stream):
            for where in (stream, another):  # it would have to come behind the newest run
                with pytest.raises(ValueError, match=f"stream {stream.name} is being captured: no run meanwhile"):
                    buckets.run(where, 2)
        assert buckets.run(another, 2).how == "eager"


# ---- looking at it, and its end ------------------------------------------------------------------------------------


def test_what_ran_is_counted_and_shown(device: dk.Device, stream: dk.Stream) -> None:
    keys = [dk.Key(1), dk.Key(4), dk.Key(64, 8, "mixed", {"window"})]
    with dk.Buckets(device, keys, nothing, eager=lambda stream, real: None, name="step") as buckets:
        for tokens in (3, 4, 2, 4, 100):
            buckets.run(stream, tokens)
        assert (buckets[4].runs, buckets[4].padded, buckets[dk.Key(1)].runs, buckets.misses) == (4, 3, 0, 1)
        assert str(buckets).splitlines() == [
            f"buckets 'step' on {device.id}: 3 keys, 1 built, 0 bytes of scratch memory",
            "  decode, 1 token of 1 request            not built",
            "  decode, 4 tokens of 4 requests          eager, 4 runs, 19% padding",
            "  mixed, 64 tokens of 8 requests, window  not built",
            "  any other                               eager, 1 run",
        ]
        with pytest.raises(dk.BucketError, match="none for decode, 2 tokens"):
            buckets[2]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ([], "there is no key"),
        ([0], "nothing can be built for decode, 0 tokens of 0 requests"),
        ([dk.Key(1, 0)], "nothing can be built for decode, 1 token of 0 requests"),
        ([4, dk.Key(4)], "there are two keys decode, 4 tokens of 4 requests"),
    ],
    ids=str,
)
def test_keys_that_cannot_be_are_refused(device: dk.Device, keys: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"buckets 'step': {message}"):
        dk.Buckets(device, keys, nothing, name="step")


def test_what_is_no_function_is_refused(device: dk.Device) -> None:
    with pytest.raises(TypeError, match="buckets 'buckets': build: wanted a function"):
        dk.Buckets(device, [1], None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="buckets 'buckets': eager: wanted a function"):
        dk.Buckets(device, [1], nothing, eager=True)  # type: ignore[arg-type]


def test_it_is_refused_when_closed_and_lets_go_of_everything(stream: dk.Stream, doubling: Doubling) -> None:
    stream.synchronize()
    gc.collect()
    before = dk.live()
    buckets = dk.Buckets(doubling.device, SIZES, doubling, pads=[dk.Pad("x", doubling.x, 0.0)], name="step")
    buckets.run(stream, 3)
    buckets.build_all()
    exe = buckets[4].pieces[0]
    scratch = doubling.scratches[dk.Key(4)][0]
    buckets.close()
    buckets.close()
    uses: list[Callable[[], Any]] = [
        lambda: buckets.run(stream, 3),
        lambda: buckets.run(stream, 2),
        lambda: buckets.key_for(1),
        lambda: buckets[4],
        buckets.build_all,
    ]
    for use in uses:
        with pytest.raises(dk.ClosedError, match=r"buckets step \(made at test_buckets.py:\d+\) is closed"):
            use()
    assert isinstance(exe, dk.Exec)
    assert exe.closed
    assert scratch.closed
    stream.synchronize()
    gc.collect()
    assert dk.live() == before


def test_a_run_in_flight_ends_well_though_all_is_closed(
    device: dk.Device, module: dk.Module, stream: dk.Stream, doubling: Doubling
) -> None:
    module.kernel("spin").launch(stream, grid=1, block=1, args=(20,))
    with dk.Buckets(device, SIZES, doubling, pads=[dk.Pad("x", doubling.x, 0.0)]) as buckets:
        buckets.run(stream, 3)
    doubling.scratches.clear()
    gc.collect()
    taken = [device.empty(16, np.float32).fill(-7.0, stream) for _ in range(4)]
    assert doubling.y.numpy(stream)[:5, 0].tolist() == [2 * POISON] * 3 + [0, POISON]
    del taken


def test_scratch_memory_is_given_to_builds_alone(device: dk.Device) -> None:
    with (
        dk.Buckets(device, SIZES, nothing) as buckets,
        pytest.raises(RuntimeError, match="no graph is being built"),
    ):
        buckets.scratch.empty(4, np.float32)
