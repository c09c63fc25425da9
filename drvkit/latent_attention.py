"""The attention of a whole layer as nodes of one graph: from its hidden states to what is added to them.

Layers of DeepSeek V4 are of three kinds: window alone, or with an entry for every 4 tokens, of which an indexer chooses
(CSA), or for every 128 (HCA). Prompts, chunks of them and decoding, mixed as they come, are steps of the same graph::

    tokens = StepTokens(device, max_tokens=64, max_requests=16, max_length=8192)
    workspace = Workspace(model, tokens)  # one for all layers: they come one after the other
    layer = LatentAttention(device, model, ratio, weights, cos_sin)
    # Of each request 3 pages of 64 for its last 127 tokens and up to 64 new ones, and 32 of 256 for 8192 tokens.
    caches = layer.caches(window=(16 * 3, window_table), entries=(16 * 32, table), rings=(16, rings))

    last = plan_tokens(graph, tokens, q_starts, lengths)
    last = layer.add(graph, workspace, x, y, caches, after=last)

As `sparse_attention` does, a layer needs compute capability 9.0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import ml_dtypes
import numpy as np

from .account import PAGES, WINDOW_PAGE
from .device import Device
from .graph import After, Graph
from .memory import Buffer, Keeper
from .models import OVERLAP, Model
from .node import KernelNode, Node, Port
from .ops import angles, array, holds_all, is_a, paged, shaped, token_rows
from .ops.indexer import IndexerQueries, indexer_logits, indexer_query
from .ops.kv_compress import kv_compress, kv_save, rings_of
from .ops.linear import library_linear, linear
from .ops.query_kv import query_kv
from .ops.rms_norm import rms_norm
from .ops.sparse_attention import sparse_attention
from .ops.step_tokens import StepTokens
from .ops.top_k import top_k
from .records import KEY_MXFP4, KV_BF16, KV_FP8, Format, Pages
from .weights import Weights, dtype_of, shapes

__all__ = ["Caches", "Compressed", "LatentAttention", "Workspace"]

bfloat16, float32, int32 = (np.dtype(each) for each in (ml_dtypes.bfloat16, np.float32, np.int32))


class Compressed(NamedTuple):
    """Rows of which each stands for several tokens, and ``state``: what later ones need of the tokens that came. See
    `drvkit.ops.kv_compress`."""

    pages: Pages
    state: Any


@dataclass(frozen=True)
class Caches:
    """What a layer keeps of its requests.

    window: rows of the last tokens.
    entries, keys: compressed rows, and the keys by which the indexer chooses of them, as far as the layer has them.
    rings: int32 [max_requests], which ring of each ``state`` a request has.
    """

    window: Pages
    entries: Compressed | None = None
    keys: Compressed | None = None
    rings: Any = None

    def close(self) -> None:
        """Of pages and states; tables and rings are for other layers too."""
        self.window.pool.close()
        for each in (self.entries, self.keys):
            if each is not None:
                each.pages.pool.close()
                each.state.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Workspace(Keeper):
    """What is between the nodes of a layer, in device memory. Layers of any kind share it, if each comes after the one
    before; graphs that run at the same time do not.

    Args:
        model: of the layers; its ``ratios`` say of which kinds they are.
        tokens: the rows of the step.
        keys: the format of the indexer's keys. Those of KEY_MXFP4, and their queries, are transformed by Hadamard's
            matrix.
        cublas_bytes: cuBLAS makes all projections, one after the other, with so much memory of its own; see
            `library_linear`. By default `linear` does, which is made for up to 64 tokens.

    Attributes, where the model has layers with an indexer:
        logits: float32 [max_tokens, entries]: by what the last of them chose; see `indexer_logits`.
        chosen: int32 [max_tokens, topk]: what it chose.
    """

    def __init__(self, model: Model, tokens: StepTokens, *, keys: Format = KEY_MXFP4, cublas_bytes: int = 0) -> None:
        super().__init__()
        is_a(Model, "Workspace", "model", model)
        is_a(StepTokens, "Workspace", "tokens", tokens)
        self.model, self.tokens, self.device = model, tokens, tokens.device
        self.cublas: Buffer | None = None
        if cublas_bytes:
            self.cublas = self._keep(self.device.empty(cublas_bytes, np.uint8))
        self.down = self._rows(model.q_latent + model.dim)
        self.latent = self._rows(model.q_latent)
        self.q = self._rows(model.heads * model.dim)
        self.z = self._rows(model.groups * model.o_latent)
        self.ug = {}  # by ratio: of the compressor of entries, and of that of keys
        for ratio in sorted({*model.ratios} - {0}):
            dims = [model.dim, model.indexer_dim] if ratio == model.indexed else [model.dim]
            self.ug[ratio] = [self._rows(2 * OVERLAP[ratio] * dim, float32) for dim in dims]
        if model.indexed in self.ug:
            heads = model.indexer_heads
            self.index_q = self._rows(heads * model.indexer_dim)
            self.of_heads = self._rows(heads, float32)
            self.queries = self._keep(
                IndexerQueries(self.device, max_tokens=tokens.max_tokens, format=keys, heads=heads)
            )
            entries = max(1, tokens.max_length // model.indexed)
            self.logits = self._rows(-(-entries // 4) * 4, float32)  # rows of 16 bytes
            self.chosen = self._rows(model.topk, int32)

    def _rows(self, width: int, dtype: np.dtype[Any] = bfloat16) -> Buffer:
        return self._keep(self.device.empty((self.tokens.max_tokens, width), dtype))


class LatentAttention(Keeper):
    """The attention of a layer, with its weights on a device.

    Args:
        device: where.
        model, ratio: what the layer is like: 0 for its window alone, 4 or 128 tokens an entry.
        weights: see `drvkit.weights.shapes`.
        cos_sin: float32 [max_position, 64] on the device, ``model.cos_sin(ratio, max_position)``, for all layers of a
            kind.
    """

    def __init__(self, device: Device, model: Model, ratio: int, weights: Weights, cos_sin: Any) -> None:
        super().__init__()
        is_a(Model, "LatentAttention", "model", model)
        if ratio not in model.ratios:
            raise ValueError(
                f"LatentAttention: ratio: {model.name} has layers of {sorted({*model.ratios})}, got {ratio}"
            )
        is_a(Mapping, "LatentAttention", "weights", weights)
        _check_weights(model, ratio, weights)
        self.device, self.model, self.ratio, self.cos_sin = device, model, ratio, cos_sin

        def put(*names: str) -> Buffer:
            """Those of several names one below the other, for one projection."""
            rows = [weights[name] for name in names]
            return self._keep(device.array(np.concatenate(rows) if len(rows) > 1 else rows[0]))

        self.down, self.q_norm, self.wq_b = put("wq_a", "wkv"), put("q_norm"), put("wq_b")
        self.kv_norm, self.attn_sink = put("kv_norm"), put("attn_sink")
        self.wo_a, self.wo_b = put("wo_a"), put("wo_b")
        self.compressors = [
            _Compressor(put(f"{prefix}.wkv", f"{prefix}.wgate"), put(f"{prefix}.ape"), put(f"{prefix}.norm"))
            for prefix in ("compressor", "indexer.compressor")
            if f"{prefix}.ape" in weights
        ]
        self.is_indexed = ratio == model.indexed
        if self.is_indexed:
            self.index_wq_b, self.weights_proj = put("indexer.wq_b"), put("indexer.weights_proj")

    def caches(
        self,
        *,
        window: tuple[int, Any],
        entries: tuple[int, Any],
        rings: tuple[int, Any],
        kv: Format = KV_FP8,
        keys: Format = KEY_MXFP4,
    ) -> Caches:
        """Memory for requests, as far as a layer of this kind needs it; tables and rings serve all layers.

        Args:
            window: how many pages of 64 tokens, and int32 [max_requests, width]: those of each request. A ring, where
                they are fewer than its tokens fill; then they have room for those of a step and 127 before them, which
                the CPU device reports if they have not.
            entries: likewise pages of 256 tokens, for the entries of these and for their keys.
            rings: how many, and int32 [max_requests]: that of each request.
            kv, keys: their formats.

        A ring has room for the tokens that the next entry needs: where tokens of a step may be taken back, it has to be
        larger (see `kv_compress`), and `Caches` are yours to make.
        """

        for role, pair in (("window", window), ("entries", entries), ("rings", rings)):
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise TypeError(f"LatentAttention: {role}: wanted how many, and whose they are, got {pair!r}")

        def pages(format: Format, page_size: int, room: tuple[int, Any]) -> Pages:
            count, table = room
            return Pages(format, self.device.empty((count, format.page_bytes(page_size)), np.uint8), table, page_size)

        rows = pages(kv, WINDOW_PAGE, window)
        if not self.ratio:
            return Caches(rows)
        cap = OVERLAP[self.ratio] * self.ratio  # of a ring
        made = [
            Compressed(
                pages(format, PAGES[self.ratio], entries),
                self.device.empty((rings[0], cap, own.matrix.shape[0]), float32),
            )
            for own, format in zip(self.compressors, (kv, keys), strict=False)
        ]
        return Caches(rows, made[0], made[1] if self.is_indexed else None, rings[1])

    def add(
        self,
        graph: Graph,
        workspace: Workspace,
        x: Any,
        y: Any,
        caches: Caches,
        *,
        after: After = None,
        branch: bool = True,
        name: str = "attention",
    ) -> Node:
        """Add the layer to a graph; gives its last node, after which all of it is done.

        Args:
            workspace: what the step has; its ``tokens`` are those of `plan_tokens`.
            x: bfloat16 [max_tokens, hidden], normalised. Padding may have anything in it.
            y: bfloat16 or float32 [max_tokens, hidden]; 0 for padding.
            caches: those of this layer, of the formats of the workspace's keys.
            after: what has x and the rows of the step; a node, or its programmatic port.
            branch: whether compressors stand behind an IF node, so that a step in which no entry ends only saves its
                rows. Without, `kv_compress` finds that out in each of its blocks. Bits are the same. On an H200 the
                node costs more than it skips: a step of one token takes 121 us with it and 110 without in a layer of
                ratio 4, 104 and 99 in one of ratio 128, whether an entry ends or not.
            name: what names of nodes begin with.
        """
        is_a(Workspace, "LatentAttention", "workspace", workspace)
        is_a(Caches, "LatentAttention", "caches", caches)
        self._check(workspace, x, y, caches)
        model, tokens, of = self.model, workspace.tokens, workspace
        heads, eps, latent = model.heads, model.eps, model.q_latent
        project = _Projections(graph, of, name)

        down = project("down", x, self.down, of.down, after)
        normed = rms_norm(
            *(graph, of.down[:, :latent], self.q_norm, of.latent), eps=eps, after=_early(down), name=f"{name} q_norm"
        )
        which: dict[str, Any] = {}
        ready: list[Any] = []
        if self.ratio:
            assert caches.entries is not None
            which = {"entries": caches.entries.pages, "ratio": self.ratio}
            ready = self._compress(project, x, caches, after, branch)
            if self.is_indexed:
                ready = [self._index(project, x, caches, after, normed, ready)]
                which["indices"] = of.chosen
        wide = project("wq_b", of.latent, self.wq_b, of.q, _early(normed))
        q = of.q.reshape(tokens.max_tokens, heads, model.dim)
        turned = query_kv(
            *(graph, tokens, q, of.down[:, latent:], self.kv_norm, self.cos_sin, caches.window),
            eps=eps,
            after=_early(wide),
            name=f"{name} query_kv",
        )
        attended = sparse_attention(
            *(graph, tokens, q, caches.window, q),
            window_size=model.window,
            **which,
            sinks=self.attn_sink,
            cos_sin=self.cos_sin,
            after=_early(turned, *ready),
            name=f"{name} attention",
        )
        # The heads of a group are a block of columns of q, and become one of z.
        extents = heads // model.groups * model.dim, model.o_latent
        groups = []
        for group in range(model.groups):
            columns, rows = (slice(group * extent, (group + 1) * extent) for extent in extents)
            operands = of.q[:, columns], self.wo_a[rows], of.z[:, rows]
            groups.append(project(f"wo_a {group}", *operands, _early(attended)))
        return project("wo_b", of.z, self.wo_b, y, _early(*groups))

    def _compress(self, project: _Projections, x: Any, caches: Caches, after: After, branch: bool) -> list[Any]:
        """Make entries, and keys where the layer has them; gives the nodes after which they are there."""
        graph, of, name, ratio = project.graph, project.workspace, project.name, self.ratio
        tokens = of.tokens
        caches_of = (each for each in (caches.entries, caches.keys) if each is not None)
        parts = list(zip(self.compressors, caches_of, of.ug[ratio], ("entries", "keys"), strict=False))
        projected = [project(f"{what} wkv", x, own.matrix, ug, after) for own, _, ug, what in parts]

        def compress(where: Graph, waits: Iterable[Node | None]) -> list[Any]:
            return [
                kv_compress(
                    *(where, tokens, ug, state, caches.rings, own.ape, own.norm, self.cos_sin, pages),
                    ratio=ratio,
                    hadamard=pages.format == KEY_MXFP4,
                    eps=self.model.eps,
                    after=_early(each),
                    name=f"{name} {what}",
                )
                for (own, (pages, state), ug, what), each in zip(parts, waits, strict=True)
            ]

        if not branch:
            return compress(graph, projected)
        condition = graph.condition(name=f"{name}: an entry ends")
        # Its kernel looks at once, not when what comes before a programmatic edge has ended.
        test = graph.set_condition(condition, tokens.completed[ratio], after=_ends(after), name=f"{name} test")
        yes, no = graph.if_else(condition, after=[test, *projected], name=f"{name} entry ends")
        compress(yes, [None] * len(parts))
        for _, (_, state), ug, what in parts:
            kv_save(no, tokens, ug, state, caches.rings, ratio=ratio, name=f"{name} {what}")
        return [yes.node]

    def _index(self, project: _Projections, x: Any, caches: Caches, after: After, normed: Any, keys: list[Any]) -> Any:
        """Choose the entries of each token, once ``keys`` are there."""
        graph, of, name, model = project.graph, project.workspace, project.name, self.model
        tokens = of.tokens
        assert caches.keys is not None
        heads = project("weights_proj", x, self.weights_proj, of.of_heads, after)
        wide = project("index wq_b", of.latent, self.index_wq_b, of.index_q, _early(normed))
        q = of.index_q.reshape(tokens.max_tokens, model.indexer_heads, model.indexer_dim)
        ready = indexer_query(
            *(graph, tokens, q, of.of_heads, self.cos_sin, of.queries),
            hadamard=of.queries.format == KEY_MXFP4,
            after=_early(wide, heads),
            name=f"{name} indexer_query",
        )
        scored = indexer_logits(
            *(graph, tokens, of.queries, caches.keys.pages, of.logits),
            skip_up_to=model.topk,
            after=_early(ready, *keys),
            name=f"{name} indexer_logits",
        )
        entries = tokens.entries[self.ratio]
        return top_k(graph, of.logits, entries, of.chosen, after=_early(scored), name=f"{name} top_k")

    def _check(self, workspace: Workspace, x: Any, y: Any, caches: Caches) -> None:
        """All that a user gives: once nodes are added, they stay."""
        what, tokens = "LatentAttention", workspace.tokens
        if workspace.model != self.model:
            raise ValueError(
                f"LatentAttention: workspace: wanted one of {self.model.name}, got one of {workspace.model.name}"
            )
        given = [caches.entries is not None, caches.keys is not None]
        if given != [bool(self.ratio), self.is_indexed]:
            wanted = "entries and keys" if self.is_indexed else "entries alone" if self.ratio else "a window alone"
            raise ValueError(f"LatentAttention: caches: a layer of ratio {self.ratio} has {wanted}")
        for role, operand, dtypes in (("x", x, [bfloat16]), ("y", y, [bfloat16, float32])):
            seen = token_rows(f"{what}: {role}", operand, dtypes, axes=("tokens", "hidden"))
            shaped(f"{what}: {role}", seen, (tokens.max_tokens, self.model.hidden))
        positions = angles(what, self.cos_sin).shape[0]
        if positions < tokens.max_length:
            raise ValueError(f"{what}: cos_sin: wanted {tokens.max_length} positions, got {positions}")

        kv = caches.window.format
        paged(what, "window", caches.window, [KV_FP8, KV_BF16], tokens.max_requests)
        if self.ratio:
            numbers = array(f"{what}: rings", caches.rings, [int32])
            shaped(f"{what}: rings", numbers, (tokens.max_requests,))
        for role, each, format, own in (
            ("entries", caches.entries, kv, 0),
            ("keys", caches.keys, workspace.queries.format if self.is_indexed else kv, 1),
        ):
            if each is None:
                continue
            pages = paged(what, role, each.pages, [format], tokens.max_requests)
            holds_all(f"{what}: {role}", pages, tokens.max_length, self.ratio)
            rings_of(f"{what}: {role}: state", each.state, self.ratio, self.compressors[own].matrix.shape[0])


class _Projections:
    """Adds the projections of a layer to a graph."""

    def __init__(self, graph: Graph, workspace: Workspace, name: str) -> None:
        self.graph, self.workspace, self.name = graph, workspace, name
        self.last: Node | None = None  # by cuBLAS: all of them share its memory

    def __call__(self, part: str, x: Any, weight: Any, out: Any, after: After) -> Node:
        name, cublas = f"{self.name} {part}", self.workspace.cublas
        if cublas is None:
            node = linear(self.graph, x, weight, out, after=after, name=name)
        else:
            waits = [*_ends(after), *([self.last] if self.last else [])]
            node = self.last = library_linear(self.graph, x, weight, out, workspace=cublas, after=waits, name=name)
        assert node is not None
        return node


@dataclass(frozen=True)
class _Compressor:
    matrix: Buffer  # of projections, then of scores
    ape: Buffer
    norm: Buffer


def _check_weights(model: Model, ratio: int, weights: Weights) -> None:
    wanted = shapes(model, ratio)
    for name in sorted(wanted.keys() | weights.keys()):
        label = f"LatentAttention: weights of a layer of ratio {ratio}: {name!r}"
        if name not in weights or name not in wanted:
            raise ValueError(f"{label} {'is missing' if name in wanted else 'is none of them'}")
        given, dtype = weights[name], dtype_of(name)
        if (given.shape, given.dtype) != (wanted[name], dtype):
            raise ValueError(f"{label}: wanted {dtype} {wanted[name]}, got {given.dtype} {given.shape}")


def _early(*nodes: Any) -> list[Any]:
    """Edges from nodes of kernels that let those behind them start, who wait before they read."""
    return [node.port("programmatic") if isinstance(node, KernelNode) else node for node in nodes if node is not None]


def _ends(after: After) -> list[Any]:
    """The ends of nodes, for what no programmatic edge can lead to."""
    several = after if isinstance(after, Iterable) and not isinstance(after, Port) else (after,)
    return [each.node if isinstance(each, Port) else each for each in several if each is not None]
