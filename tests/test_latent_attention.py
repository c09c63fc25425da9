"""The attention of whole layers: the reference against its definition, and layers of every kind in one graph, through
prompts and decoding, against the reference and against themselves, however tokens come and entries are made."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import combinations, product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from compare import assert_equal_bits
from numpy.typing import NDArray

from drvkit.device import Device, Stream
from drvkit.graph import Graph
from drvkit.latent_attention import Caches, LatentAttention, Workspace
from drvkit.memory import Buffer, view_of
from drvkit.models import Model
from drvkit.node import KernelNode
from drvkit.ops.step_tokens import StepTokens, plan_tokens
from drvkit.records import KEY_BF16, KEY_FP8, KV_BF16
from drvkit.ref.latent_attention import latent_attention
from drvkit.ref.top_k import top_k
from drvkit.weights import Weights, random_weights

bf16 = ml_dtypes.bfloat16
KINDS = (0, 4, 128)
MODEL = Model("small", 128, 4, 64, groups=2, o_latent=32, topk=8, ratios=KINDS, indexer_heads=8)
REQUESTS, TOKENS, LENGTH = 3, 32, 512
RING = 3  # pages of a window, which has those of a step and 127 before

# Of scores, relative to the sum of the magnitudes that they are made of: of 128 elements a few are on the edge of two
# codes of e2m1, up to half of one apart.
BOUND_OF_SCORES = 2**-5


def bounds(positions: NDArray[Any]) -> NDArray[Any]:
    """Of the errors of rows of y. Three roundings to bfloat16 that the reference makes of other numbers (probabilities,
    what the attention and the groups give) are 2**-9 each at most. An element on the edge of two codes of e4m3 is worth
    less than 2**-5 of a row of the window, which is one of many."""
    bound: NDArray[Any] = 2**-7 + 2**-5 / np.sqrt(np.minimum(positions + 1, MODEL.window))
    return bound


def hidden(rng: np.random.Generator, tokens: int) -> NDArray[Any]:
    return rng.normal(size=(tokens, MODEL.hidden)).astype(bf16)


def errors(got: NDArray[Any], want: NDArray[Any]) -> NDArray[Any]:
    """Of each row."""
    both = (each.astype(np.float64) for each in (got, want))
    got, want = both
    error: NDArray[Any] = np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)
    return error


# ---- the reference -------------------------------------------------------------------------------------------------


def by_definition(x: NDArray[Any], weights: Weights, ratio: int, chosen: Any, mistake: str = "") -> NDArray[Any]:
    """Token by token, in float64 and without any rounding."""
    of = {name: each.astype(np.float64) for name, each in weights.items()}
    x = x.astype(np.float64)
    table = MODEL.cos_sin(ratio, len(x)).astype(np.float64)

    def turned(row: NDArray[Any], position: int, by: int = 1) -> NDArray[Any]:
        pairs = row[..., -64::2] + 1j * row[..., -63::2]
        pairs = pairs * (table[position, :32] + by * 1j * table[position, 32:])
        row = row.copy()
        row[..., -64::2], row[..., -63::2] = pairs.real, pairs.imag
        return row

    def normalised(row: NDArray[Any]) -> NDArray[Any]:
        y: NDArray[Any] = row / np.sqrt((row**2).mean(-1, keepdims=True) + 1e-6)
        return y

    def entry(j: int) -> NDArray[Any]:
        tokens = [(ratio * j + i, slice(-512, None), i) for i in range(ratio)]
        if ratio == 4 and j:
            tokens += [(4 * (j - 1) + i, slice(0, 512), i) for i in range(4)]
        values = np.array([u[token, columns] for token, columns, _ in tokens])
        scores = np.array([g[token, columns] + of["compressor.ape"][i, columns] for token, columns, i in tokens])
        each = np.exp(scores)
        pooled = (each * values).sum(0) / each.sum(0)
        return turned(normalised(pooled) * of["compressor.norm"], ratio * j)

    if ratio:
        u, g = (x @ of[f"compressor.{name}"].T for name in ("wkv", "wgate"))
    queries = (normalised(x @ of["wq_a"].T) * of["q_norm"] @ of["wq_b"].T).reshape(-1, 4, 512)
    rows = [turned(normalised(each @ of["wkv"].T) * of["kv_norm"], t) for t, each in enumerate(x)]
    entries = [entry(j) for j in range(len(x) // ratio if ratio else 0)]
    y = []
    for t in range(len(x)):
        seen = [] if not ratio else [j for j in chosen[t] if j >= 0] if chosen is not None else range((t + 1) // ratio)
        r = np.array([*rows[max(0, t - (126 if mistake == "window" else 127)) : t + 1], *(entries[j] for j in seen)])
        out = []
        for head in range(4):
            p = np.exp(r @ turned(normalised(queries[t, head]), t) / np.sqrt(512))
            p /= p.sum() + (0 if mistake == "sink" else np.exp(of["attn_sink"][head]))
            out.append(turned(p @ r, t, by=1 if mistake == "turned back" else -1))
        halves = np.concatenate(out[:2]), np.concatenate(out[2:])
        z = [of["wo_a"][32 * group :][:32] @ halves[group] for group in (0, 1)]
        y.append(of["wo_b"] @ np.concatenate(z[::-1] if mistake == "groups" else z))
    return np.array(y)


@pytest.mark.parametrize("ratio", KINDS)
def test_the_reference_is_the_definition(rng: np.random.Generator, ratio: int) -> None:
    x, weights = hidden(rng, 133), random_weights(MODEL, ratio, rng)
    got = latent_attention(x, weights, MODEL, ratio, kv=KV_BF16, keys=KEY_BF16)
    want = by_definition(x, weights, ratio, got.chosen)
    bound = 2**-6  # eight roundings to bfloat16, one after the other
    assert errors(got.y, want).max() < bound
    for mistake in ("window", "sink", "turned back", "groups"):
        assert errors(by_definition(x, weights, ratio, got.chosen, mistake), want).max() > 2 * bound


@pytest.mark.parametrize("ratio", KINDS)
def test_the_reference_of_the_last_tokens_is_that_of_all(rng: np.random.Generator, ratio: int) -> None:
    x, weights = hidden(rng, 131), random_weights(MODEL, ratio, rng)
    whole, end = latent_attention(x, weights, MODEL, ratio), latent_attention(x, weights, MODEL, ratio, first=126)
    np.testing.assert_allclose(end.y, whole.y[126:], rtol=0, atol=1e-12)
    before = latent_attention(x[:70], weights, MODEL, ratio)
    np.testing.assert_allclose(before.y, whole.y[:70], rtol=0, atol=1e-12)


# ---- layers --------------------------------------------------------------------------------------------------------


class Layers:
    """One of each kind, one after the other in a graph: they share tokens, tables and workspace, but each has hidden
    states of its own. And the requests that came so far."""

    def __init__(
        self, device: Device, rng: np.random.Generator, kinds: Sequence[int], cublas_bytes: int = 0, **how: Any
    ) -> None:
        self.stack, self.device, self.kinds = ExitStack(), device, kinds
        put = self.put
        tokens = StepTokens(device, max_tokens=TOKENS, max_requests=REQUESTS, max_length=LENGTH)
        self.tokens = self.stack.enter_context(tokens)
        self.workspace = self.stack.enter_context(Workspace(MODEL, self.tokens, cublas_bytes=cublas_bytes))
        self.q_starts, self.lengths = put(np.zeros(REQUESTS + 1, np.int32)), put(np.zeros(REQUESTS, np.int32))
        window, pages = (
            rng.permutation(REQUESTS * width).astype(np.int32).reshape(REQUESTS, width)
            for width in (RING, LENGTH // 256)
        )
        rings = rng.permutation(REQUESTS).astype(np.int32)
        room: dict[str, Any] = {
            "window": (window.size, put(window)),
            "entries": (pages.size, put(pages)),
            "rings": (REQUESTS, put(rings)),
        }
        self.weights = [random_weights(MODEL, ratio, rng) for ratio in kinds]
        self.x = [put(np.zeros((TOKENS, MODEL.hidden), bf16)) for _ in kinds]
        self.y = [put(np.zeros((TOKENS, MODEL.hidden), np.float32)) for _ in kinds]
        self.caches: list[Caches] = []
        graph = self.graph = self.stack.enter_context(Graph(device, "layers"))
        last = plan_tokens(graph, self.tokens, self.q_starts, self.lengths)
        for ratio, weights, x, y in zip(kinds, self.weights, self.x, self.y, strict=True):
            cos_sin = put(MODEL.cos_sin(ratio, LENGTH))
            layer = self.stack.enter_context(LatentAttention(device, MODEL, ratio, weights, cos_sin))
            self.caches.append(self.stack.enter_context(layer.caches(**room)))
            assert last is not None
            after = last.port("programmatic")
            last = layer.add(graph, self.workspace, x, y, self.caches[-1], after=after, name=f"layer {ratio}", **how)
        self.exe = self.stack.enter_context(graph.instantiate())
        # Of each layer and request, what came so far.
        self.seen = [[hidden(rng, 0) for _ in range(REQUESTS)] for _ in kinds]

    def put(self, array: NDArray[Any]) -> Buffer:
        return self.stack.enter_context(self.device.array(array))

    def __enter__(self) -> Layers:
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()
        del self.exe, self.graph

    def step(self, stream: Stream, new: Sequence[Sequence[NDArray[Any]]]) -> list[NDArray[Any]]:
        """``new[layer][request]`` come; gives y of each layer. Of padding it is 0, whatever x has there."""
        counts = [len(each) for each in new[0]]
        for layer, each in enumerate(new):
            x = np.full((TOKENS, MODEL.hidden), np.nan, bf16)
            x[: sum(counts)] = np.concatenate(each)
            self.x[layer].copy_from(x)
            self.y[layer].fill_bytes(0xA5)
            self.seen[layer] = [np.concatenate(both) for both in zip(self.seen[layer], each, strict=True)]
        self.q_starts.copy_from(np.append(0, np.cumsum(counts)).astype(np.int32))
        self.lengths.copy_from(np.array([len(each) for each in self.seen[0]], np.int32))
        self.exe.launch(stream)
        results = [y.numpy(stream) for y in self.y]
        for y in results:
            assert_equal_bits(y[sum(counts) :], np.zeros_like(y[sum(counts) :]))
        return results


def memories(caches: Caches) -> Iterator[Buffer]:
    """Pools and states, without those of the tables that are for all layers."""
    yield caches.window.pool
    for each in (caches.entries, caches.keys):
        if each is not None:
            yield each.pages.pool
            yield each.state


# How many tokens of each request come in a step: over 4 tokens, 128, pages of 64 and of 256, and the window's ring.
STEPS = (
    *((29, 0, 3), (31, 1, 0), (32, 0, 0), (31, 1, 0), (3, 2, 2), (1, 1, 1), (1, 0, 1), (1, 2, 1), (0, 0, 0)),
    *((31, 0, 1), (32, 0, 0), (28, 1, 3), (31, 1, 0), (4, 1, 1), (1, 1, 0), (1, 0, 1), (1, 1, 1)),
)


@pytest.mark.parametrize("cublas_bytes", [0, 32 << 20])
def test_layers_of_every_kind_through_prompts_and_decoding(
    device: Device, stream: Stream, rng: np.random.Generator, cublas_bytes: int
) -> None:
    if cublas_bytes and device.driver.kind != "cuda":
        pytest.skip("cuBLAS is on a GPU")
    ends = set()
    with Layers(device, rng, KINDS, cublas_bytes) as layers:
        for number, counts in enumerate(STEPS):
            if number == 7:  # request 2 is over, and its pages and ring are another's
                for seen in layers.seen:
                    seen[2] = seen[2][:0]
            before = [len(each) for each in layers.seen[0]]
            results = layers.step(stream, [[hidden(rng, n) for n in counts] for _ in KINDS])
            chosen = layers.workspace.chosen.numpy(stream)
            logits = layers.workspace.logits.numpy(stream)
            at = 0
            for request, (first, n) in enumerate(zip(before, counts, strict=True)):
                rows, positions = slice(at, at + n), np.arange(first, first + n)
                at += n
                ends.add(first + n)
                for layer, ratio in enumerate(KINDS if n else ()):
                    what = f"step {number}, request {request} from {first} on, ratio {ratio}"
                    x, weights = layers.seen[layer][request], layers.weights[layer]
                    given = chosen[rows] if ratio == 4 else None
                    want = latent_attention(x, weights, MODEL, ratio, first=first, chosen=given)
                    assert (errors(results[layer][rows], want.y) < bounds(positions)).all(), what
                    if want.scores is not None and want.magnitudes is not None:
                        scored = ~np.isnan(want.scores)  # where it is not, anything may stand in logits
                        scores = logits[rows, : scored.shape[1]]
                        error = np.abs(scores[scored] - want.scores[scored]) / want.magnitudes[scored]
                        assert error.max(initial=0) < BOUND_OF_SCORES, what
                        visible = ((positions + 1) // 4).astype(np.int32)
                        assert_equal_bits(chosen[rows], top_k(scores, visible, MODEL.topk))
    assert {3, 4, 5, 127, 128, 129, 192, 255, 256, 257} <= ends


@pytest.mark.parametrize(
    ("ratio", "chunks", "others"),
    [(4, (6, 32, 1, 1, 1, 3, 1), (32, 13)), (128, (31, 32, 32, 32, 1, 1, 3), (1, 32, 32, 30, 32, 5))],
)
def test_bits_depend_neither_on_the_branch_nor_on_how_tokens_come(
    device: Device, stream: Stream, rng: np.random.Generator, ratio: int, chunks: Sequence[int], others: Sequence[int]
) -> None:
    seed = int(rng.integers(2**32))
    x, nothing = hidden(rng, sum(chunks)), hidden(rng, 0)
    outcomes = []
    for steps, branch in ((chunks, True), (chunks, False), (others, True)):
        with Layers(device, np.random.default_rng(seed), [ratio], branch=branch) as layers:
            for memory in memories(layers.caches[0]):
                memory.fill_bytes(0xA5)
            rows, at = [], 0
            for n in steps:
                (result,) = layers.step(stream, [[nothing, x[at : at + n], nothing]])
                rows.append(result[:n])
                at += n
            outcomes.append([np.concatenate(rows), *(each.numpy(stream) for each in memories(layers.caches[0]))])
    first, *rest = outcomes
    for other in rest:
        for got, want in zip(other, first, strict=True):
            assert_equal_bits(got, want, any_nan=True)


def touched(node: KernelNode) -> Iterator[tuple[int, int, bool]]:
    """From where to where, and whether it writes there."""
    for parameter, operand in zip(node.kernel.signature.parameters, node.args, strict=True):
        if (seen := view_of(operand)) is not None:
            yield seen.address, seen.address + seen.nbytes, parameter.written


@pytest.mark.parametrize("branch", [True, False])
def test_what_two_nodes_touch_they_touch_in_order(device: Device, rng: np.random.Generator, branch: bool) -> None:
    with Layers(device, rng, KINDS, branch=branch) as layers:
        before: dict[str, set[str]] = {}  # by the name of a node, those that have ended
        for node in layers.graph.nodes:
            dependencies = [each.name for each in node.dependencies]
            before[node.name] = {*dependencies}.union(*(before[each] for each in dependencies))
        nodes = [(path, node) for path, node in layers.graph.paths() if isinstance(node, KernelNode)]
        looked_at = 0
        for (path, node), (other_path, other) in combinations(nodes, 2):
            (own, *body), (theirs, *other_body) = path.split("/"), other_path.split("/")
            if own == theirs and body[0] != other_body[0]:  # one of both bodies runs
                continue
            if "wo_a" in own and "wo_a" in theirs and own[:-1] == theirs[:-1]:  # columns of the same rows
                continue
            for (a, b, writes), (c, d, also_writes) in product(touched(node), touched(other)):
                if a < d and c < b and (writes or also_writes):
                    looked_at += 1
                    assert own in before[theirs] or theirs in before[own], f"{path} and {other_path}"
        assert looked_at > 100
        del node, other, nodes


def test_what_does_not_fit_is_named(device: Device, graph: Graph, rng: np.random.Generator) -> None:
    weights = dict(random_weights(MODEL, 128, rng))
    half = dataclasses.replace(MODEL, name="half", heads=2)
    for change, message in (
        ({"wq_a": weights["wq_a"][:-1]}, r"'wq_a': wanted bfloat16 \(64, 128\), got bfloat16 \(63, 128\)"),
        ({"q_norm": weights["q_norm"].astype(bf16)}, r"'q_norm': wanted float32 \(64,\), got bfloat16 \(64,\)"),
        ({"indexer.wq_b": weights["wq_b"]}, "ratio 128: 'indexer.wq_b' is none of them"),
    ):
        with pytest.raises(ValueError, match=f"^LatentAttention: weights.*{message}"):
            LatentAttention(device, MODEL, 128, weights | change, None)
    with pytest.raises(ValueError, match=r"ratio 4: 'compressor.ape': wanted float32 \(4, 1024\)"):
        LatentAttention(device, MODEL, 4, weights, None)
    with pytest.raises(ValueError, match=r"^LatentAttention: ratio: small has layers of \[0, 4, 128\], got 8"):
        LatentAttention(device, MODEL, 8, weights, None)

    with (
        StepTokens(device, max_tokens=4, max_requests=1, max_length=64) as tokens,
        Workspace(MODEL, tokens) as workspace,
        Workspace(half, tokens, keys=KEY_FP8) as of_half,
        device.zeros((64, 64), np.float32) as cos_sin,
        device.zeros((1, 2), np.int32) as table,
        device.zeros(1, np.int32) as rings,
        device.zeros((4, 128), bf16) as x,
        device.zeros((4, 128), np.float32) as y,
        LatentAttention(device, MODEL, 128, weights, cos_sin) as layer,
        LatentAttention(device, MODEL, 128, weights, cos_sin[:63]) as of_fewer,
        layer.caches(window=(2, table), entries=(1, table), rings=(1, rings)) as caches,
        layer.caches(window=(2, table), entries=(1, table), rings=(1, rings), kv=KV_BF16) as of_bf16,
    ):
        assert caches.entries is not None
        assert of_bf16.entries is not None
        fits = {"workspace": workspace, "x": x, "y": y, "caches": caches}
        few = caches.entries._replace(state=caches.entries.state[:, :127])
        for changes, error, message in (
            ({"workspace": of_half}, ValueError, "workspace: wanted one of small, got one of half"),
            ({"workspace": 3}, TypeError, "workspace: wanted a Workspace, got int"),
            ({"caches": Caches(caches.window)}, ValueError, "caches: a layer of ratio 128 has entries alone"),
            ({"x": x[:3]}, ValueError, r"x: wanted shape \(4, 128\), got \(3, 128\)"),
            ({"x": y}, TypeError, "x: wanted a device array of bfloat16, got float32"),
            ({"y": rings}, TypeError, "y: wanted a device array of bfloat16 or float32, got int32"),
            ({"y": y[:, :64]}, ValueError, r"y: wanted shape \(4, 128\), got \(4, 64\)"),
            (
                {"caches": dataclasses.replace(caches, entries=of_bf16.entries)},
                ValueError,
                "entries: wanted rows of fp8 of 512, got bf16 of 512",
            ),
            (
                {"caches": dataclasses.replace(caches, rings=table)},
                ValueError,
                r"rings: wanted shape \(1,\), got \(1, 2\)",
            ),
            (
                {"caches": dataclasses.replace(caches, entries=few)},
                ValueError,
                "entries: state: wanted",
            ),
        ):
            with pytest.raises(error, match=f"^LatentAttention: {message}"):
                layer.add(graph, **(fits | changes))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"^LatentAttention: cos_sin: wanted 64 positions, got 63"):
            of_fewer.add(graph, **fits)  # type: ignore[arg-type]
        assert not graph.nodes, "of a layer that does not fit nothing is added"
        with pytest.raises(TypeError, match=r"^LatentAttention: window: wanted how many, and whose they are, got 3"):
            layer.caches(window=3, entries=(1, table), rings=(1, rings))  # type: ignore[arg-type]


def test_layers_that_no_kernel_has_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^Model: ratios: small: wanted 0, 4 or 128 for each layer, got 8"):
        dataclasses.replace(MODEL, ratios=(0, 8))
    with pytest.raises(ValueError, match=r"^Model: groups: small: 5 heads are not 2 groups of as many"):
        dataclasses.replace(MODEL, heads=5)
