"""A Llama that generates text in two launches: prompts by one graph, and then all tokens by another, whose WHILE node
runs step after step until each request has ended.

    llama = Llama(device, GgufFile(path))
    with Generator(llama, requests=4, pages=256) as generator:
        sequence = generator.sequence(prompt)  # token ids
        for _, token in generator.generate([sequence], max_tokens=128):
            ...
        sequence.extend(more)  # what is in the cache stays there

Activations are float32, keys and values float16; weights stay in the blocks of their file.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from .buckets import Buckets, Key, Scratch
from .device import Device
from .gguf import GgufFile
from .graph import Graph
from .memory import Buffer
from .node import KernelNode, Node
from .ops.append_token import Requests, append_token
from .ops.decode_attention import decode_attention
from .ops.embedding import embedding
from .ops.kv_write import kv_write, slot_mapping
from .ops.prefill_attention import PrefillPlan, plan_prefill, prefill_attention
from .ops.quantized_linear import quantized_linear
from .ops.sample import argmax, sample
from .ops.top_k import top_k
from .quants import F32, Quant
from .rope import cos_sin_table

__all__ = ["Generator", "Llama", "Sampling", "TokenSequence"]

FLOAT16, FLOAT32, INT32 = np.float16, np.float32, np.int32
PAGE = 16  # tokens
PREFILL = (32, 128, 512)  # tokens of a prompt's graph
POLL_S, LOOK_S = 2e-4, 0.2  # between looks at what has come; at whether the device still works


class Matrix(NamedTuple):
    """Rows of weights on the device, in blocks of a file."""

    quant: Quant
    rows: Buffer


class Layer(NamedTuple):
    attn_norm: Buffer
    qkv: Matrix  # the rows of queries, keys and values
    out: Matrix
    ffn_norm: Buffer
    gate_up: Matrix  # the rows of the gate, then those of what it lets through
    down: Matrix


class Llama:
    """The weights of a file on a device, and the layers as nodes of graphs."""

    def __init__(self, device: Device, file: GgufFile) -> None:
        self.device, self.file, self.model = device, file, file.model
        self._memory: list[Buffer] = []
        model = self.model
        self.embedding = self._matrix("token_embd.weight")
        self.head = self._matrix("output.weight") if "output.weight" in file.tensors else self.embedding
        self.norm = self._floats("output_norm.weight")
        self.layers = [
            Layer(
                self._floats(f"blk.{i}.attn_norm.weight"),
                self._matrix(*(f"blk.{i}.attn_{part}.weight" for part in "qkv")),
                self._matrix(f"blk.{i}.attn_output.weight"),
                self._floats(f"blk.{i}.ffn_norm.weight"),
                self._matrix(*(f"blk.{i}.ffn_{part}.weight" for part in ("gate", "up"))),
                self._matrix(f"blk.{i}.ffn_down.weight"),
            )
            for i in range(model.layers)
        ]
        table = cos_sin_table(model.context, theta=model.theta, rotary_dim=model.dim)
        self.cos_sin = self._keep(device.array(table))

    def _keep(self, buffer: Buffer) -> Buffer:
        self._memory.append(buffer)
        return buffer

    def _floats(self, name: str) -> Buffer:
        return self._keep(self.device.array(np.asarray(self.file.tensors[name].rows).view(FLOAT32).reshape(-1)))

    def _matrix(self, *names: str) -> Matrix:
        """Those tensors, one below the other."""
        parts = [self.file.tensors[name] for name in names]
        quant = parts[0].quant
        for name, part in zip(names, parts, strict=True):
            if part.quant != quant:
                raise ValueError(
                    f"{self.file.path}: {name} is {part.quant.name}, {names[0]} is {quant.name}: wanted one"
                )
        return Matrix(quant, self._keep(self.device.array(np.concatenate([part.rows for part in parts]))))

    @property
    def nbytes(self) -> int:
        """Of device memory."""
        return sum(buffer.nbytes for buffer in self._memory)

    def close(self) -> None:
        for buffer in self._memory:
            buffer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Sampling(NamedTuple):
    """How a token is drawn: see `drvkit.ops.sample`."""

    temperature: float = 0.7
    top_p: float = 0.95
    seed: int = 0


class TokenSequence:
    """Tokens of a text so far, and where the keys and values of some of them are. `Generator.sequence` makes it.

    Attributes:
        tokens: all of them, generated ones too.
        cached: so many have their keys and values in the generator's pool.
    """

    def __init__(self, generator: Generator, tokens: Sequence[int]) -> None:
        self._generator = generator
        self.tokens: list[int] = []
        self.cached = 0
        self.pages: list[int] = []
        self.become(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens behind the others."""
        self._generator._settle()
        self.become([*self.tokens, *tokens])

    def become(self, tokens: Sequence[int]) -> None:
        """Be these tokens, such as those of a conversation with its next turn. What they begin with and the sequence
        began with stays in the cache."""
        self._generator._settle()
        vocabulary = self._generator.llama.model.vocabulary
        new = [int(token) for token in tokens]
        for token in new:
            if not 0 <= token < vocabulary:
                raise ValueError(f"sequence: wanted tokens from 0 to {vocabulary - 1}, got {token}")
        alike = zip(self.tokens[: self.cached], new, strict=False)
        self.cached = next((i for i, (old, now) in enumerate(alike) if old != now), min(self.cached, len(new)))
        self.tokens = new

    def close(self) -> None:
        """Give its pages back."""
        self._generator._settle()
        self._generator._free += self.pages
        self.pages, self.cached = [], 0


class Generator:
    """Sequences that grow by tokens of a model, on its device.

    Args:
        llama: the model.
        requests: sequences that can grow at the same time.
        pages: of the pool, of 16 tokens each, which all sequences share.
        max_new: tokens of a sequence that one call can generate.
        top_k: tokens that `Sampling` draws from.
    """

    def __init__(
        self, llama: Llama, *, requests: int = 1, pages: int = 128, max_new: int = 1024, top_k: int = 40
    ) -> None:
        what = type(self).__name__
        model, device = llama.model, llama.device
        if not 1 <= pages < 2**31 // PAGE:
            raise ValueError(f"{what}: pages: wanted 1 to {2**31 // PAGE - 1}, got {pages!r}")
        if not 1 <= top_k <= 1024:
            raise ValueError(f"{what}: top_k: wanted 1 to 1024, got {top_k!r}")
        self.llama, self.device, self.pages, self.top_k = llama, device, pages, top_k
        self.requests = Requests(device, rows=requests, capacity=max_new, ends=model.ends)
        self.width = min(pages, -(-model.context // PAGE))
        self._free = list(range(pages))[::-1]
        self._memory: list[Buffer] = []
        shape = (model.layers, 2, pages, model.kv_heads, PAGE, model.dim)
        self.pools = self._empty(shape, FLOAT16)
        self.table = self._empty((requests, self.width), INT32)
        # Of a prefill: of each row its token, place and request; how many rows there are; where each request's begin,
        # how many tokens it has then, its last row or -1, and its length where it gets a token, else 0.
        most = PREFILL[-1]
        self.ids, self.positions, self.owners = (self._empty(most, INT32) for _ in range(3))
        self.count, self.starts = self._empty(1, INT32), self._empty(requests + 1, INT32)
        self.lengths, self.last, self.ready = (self._empty(requests, INT32) for _ in range(3))
        self.temperature, self.top_p = (self._empty(requests, FLOAT32) for _ in range(2))
        self.seeds = self._empty(requests, np.uint64)
        self.chosen = self._empty(requests, INT32)
        self._plans: dict[Key, PrefillPlan] = {}
        self._graphs: dict[Key, Graph] = {}
        self._running: list[TokenSequence] = []
        sizes = [2**i for i in range(requests.bit_length()) if 2**i < requests] + [requests]
        few = sorted({1, requests})
        keys = [
            key
            for features in ((), ("sample",))
            for key in (
                *(Key(size, size, "decode", features) for size in sizes),
                *(Key(size, rows, "prefill", features) for size in PREFILL for rows in few if rows <= size),
            )
        ]
        self.buckets = Buckets(device, keys, self._build, name="llama")
        self.stream = device.stream()

    def _empty(self, shape: Any, dtype: Any) -> Buffer:
        buffer = self.device.empty(shape, dtype)
        self._memory.append(buffer)
        return buffer

    def sequence(self, tokens: Sequence[int] = ()) -> TokenSequence:
        """A new one."""
        return TokenSequence(self, tokens)

    def _pools(self, layer: int) -> tuple[Buffer, Buffer]:
        return self.pools[layer, 0], self.pools[layer, 1]

    # Graphs

    def decode_graph(self, sequences: int, *, sampled: bool = False) -> Graph:
        """That which lets so many sequences grow, once they have grown."""
        features = {"sample"} if sampled else frozenset()
        return self._graphs[self.buckets.key_for(tokens=sequences, mode="decode", features=features)]

    def _build(self, key: Key, scratch: Scratch) -> Graph:
        graph = self._graphs[key] = Graph(self.device, str(key))
        (self._decode if key.mode == "decode" else self._prefill)(graph, key, scratch)
        return graph

    def _decode(self, graph: Graph, key: Key, scratch: Scratch) -> None:
        """Steps of a token for each request, until all have ended."""
        goes_on = graph.condition(name="goes on")
        first = graph.set_condition(goes_on, self.requests.going, name="any goes on")
        chain = _Chain(graph.while_(goes_on, after=first, name="decode"))
        self._step(chain, key, scratch)
        chain(append_token, self.requests, self.chosen[: key.requests], condition=goes_on, name="append")

    def _step(self, chain: _Chain, key: Key, scratch: Scratch) -> None:
        """From the newest token of each request to the next one."""
        llama, rows, requests = self.llama, key.requests, self.requests
        lengths, table = requests.lengths[:rows], self.table[:rows]

        def attend(i: int, qkv: Buffer, out: Buffer) -> None:
            chain(decode_attention, qkv, *self._pools(i), table, lengths, llama.cos_sin, out, name=f"attention {i}")

        h = self._layers(chain, requests.tokens[:rows], attend, scratch, FLOAT32)
        self._choose(chain, key, h, lengths, scratch)

    def _prefill(self, graph: Graph, key: Key, scratch: Scratch) -> None:
        """Prompts, or parts of prompts, and the first token behind each that ends with it."""
        model, rows = self.llama.model, key.requests
        plan = PrefillPlan(
            self.device,
            max_tokens=key.tokens,
            max_requests=rows,
            q_heads=model.heads,
            kv_heads=model.kv_heads,
            dim=model.dim,
            page_size=PAGE,
            table_width=self.width,
            dtype=FLOAT16,
        )
        self._plans[key] = plan
        positions, owners, table = self.positions[: key.tokens], self.owners[: key.tokens], self.table[:rows]
        slots = scratch.empty(key.tokens, np.int64)
        chain = _Chain(graph)
        places = {"positions": positions, "requests": owners, "count": self.count}
        chain(slot_mapping, table, slots, page_size=PAGE, **places, name="slots")
        chain(plan_prefill, plan, self.starts[: rows + 1], self.lengths[:rows], name="plan")

        def attend(i: int, qkv: Buffer, out: Buffer) -> None:
            q, k, v = qkv[:, : model.heads], qkv[:, model.heads : -model.kv_heads], qkv[:, -model.kv_heads :]
            to = {"positions": positions, "cos_sin": self.llama.cos_sin, "style": "gptj", "q": q}
            chain(kv_write, k, v, *self._pools(i), slots, **to, name=f"write {i}")
            chain(prefill_attention, plan, q, *self._pools(i), table, out, name=f"attention {i}")

        h = self._layers(chain, self.ids[: key.tokens], attend, scratch, FLOAT16, self.count)
        ends = scratch.empty((rows, model.hidden), FLOAT32)
        chain(embedding, self.last[:rows], h.view(np.uint8), ends, quant=F32, name="last rows")
        self._choose(chain, key, ends, self.ready[:rows], scratch)
        chain(append_token, self.requests, self.chosen[:rows], name="append")

    def _layers(
        self, chain: _Chain, ids: Buffer, attend: Any, scratch: Scratch, dtype: Any, count: Buffer | None = None
    ) -> Buffer:
        """From tokens, the first ``count`` of them, to what the last layer gives, float32 [tokens, hidden].
        ``attend(i, qkv, out)`` adds a layer's attention, of operands of ``dtype``."""
        llama, model = self.llama, self.llama.model
        tokens, heads = ids.size, model.heads + 2 * model.kv_heads
        h = scratch.empty((tokens, model.hidden), FLOAT32)
        qkv = scratch.empty((tokens, heads, model.dim), dtype)
        attended = scratch.empty((tokens, model.heads, model.dim), dtype)
        inner = scratch.empty((tokens, model.ffn), FLOAT32)
        rows, sums = qkv.reshape(tokens, -1), attended.reshape(tokens, -1)

        def linear(x: Buffer, matrix: Matrix, out: Buffer, name: str, **how: Any) -> None:
            how |= {"quant": matrix.quant, "eps": model.eps, "count": count, "name": name}
            chain(quantized_linear, x, matrix.rows, out, **how)

        chain(embedding, ids, llama.embedding.rows, h, quant=llama.embedding.quant, name="embedding")
        for i, layer in enumerate(llama.layers):
            linear(h, layer.qkv, rows, f"qkv {i}", norm=layer.attn_norm)
            attend(i, qkv, attended)
            linear(sums, layer.out, h, f"out {i}", residual=h)
            linear(h, layer.gate_up, inner, f"gate, up {i}", norm=layer.ffn_norm, gated=True)
            linear(inner, layer.down, h, f"down {i}", residual=h)
        return h

    def _choose(self, chain: _Chain, key: Key, h: Buffer, counts: Buffer, scratch: Scratch) -> None:
        """The next token of each row, -1 where ``counts`` is 0."""
        llama, (rows, _) = self.llama, h.shape
        logits = scratch.empty((rows, llama.model.vocabulary), FLOAT32)
        of_head = {"quant": llama.head.quant, "norm": llama.norm, "eps": llama.model.eps}
        chain(quantized_linear, h, llama.head.rows, logits, **of_head, name="logits")
        chosen = self.chosen[:rows]
        if "sample" not in key.features:
            chain(argmax, logits, chosen, counts=counts, name="argmax")
            return
        candidates = scratch.empty((rows, self.top_k), INT32)
        widths = self._empty(rows, INT32).copy_from(np.full(rows, llama.model.vocabulary, INT32))
        chain(top_k, logits, widths, candidates, name="top k")
        chain(
            *(sample, logits, candidates, chosen),
            temperature=self.temperature[:rows],
            top_p=self.top_p[:rows],
            seeds=self.seeds[:rows],
            counters=counts,
            name="sample",
        )

    # Steps

    def generate(
        self, sequences: Sequence[TokenSequence], *, max_tokens: int, sampling: Sampling | None = None
    ) -> Iterator[tuple[int, int]]:
        """Let ``sequences`` grow, each by up to ``max_tokens`` tokens, or up to an end of the model's, which it keeps.

        Gives, as they come, the number of a sequence in ``sequences`` and its next token: the most likely one, or one
        drawn by ``sampling``. Leaving the iterator early, by an exception too, ends all sequences where they are.

        `ValueError` names a sequence that has nothing new, or for which the pool or the model's context is too small;
        then nothing has changed.
        """
        self._settle()
        self._take_pages(sequences, max_tokens)
        rows = len(sequences)
        features = () if sampling is None else ("sample",)
        if sampling is not None:
            for buffer, value in ((self.temperature, sampling.temperature), (self.top_p, sampling.top_p)):
                buffer.copy_from(np.full(buffer.shape, value, FLOAT32), self.stream)
            seeds = np.uint64(sampling.seed) + np.arange(self.requests.rows, dtype=np.uint64)
            self.seeds.copy_from(seeds, self.stream)
        table = np.full(self.table.shape, -1, INT32)
        for row, sequence in enumerate(sequences):
            table[row, : len(sequence.pages)] = sequence.pages
        self.table.copy_from(table, self.stream)
        self.requests.begin(self.stream, [len(sequence.tokens) for sequence in sequences], [max_tokens] * rows)
        self._running = list(sequences)
        while any(sequence.cached < len(sequence.tokens) for sequence in sequences):
            size = self._bring(sequences)
            self.buckets.run(self.stream, tokens=size, requests=rows, mode="prefill", features=features)
        self.buckets.run(self.stream, tokens=rows, mode="decode", features=features)
        return self._appended(rows, max_tokens)

    def _take_pages(self, sequences: Sequence[TokenSequence], max_tokens: int) -> None:
        what = f"{type(self).__name__}.generate"
        if not 1 <= len(sequences) <= self.requests.rows or len(set(map(id, sequences))) < len(sequences):
            raise ValueError(f"{what}: wanted 1 to {self.requests.rows} different sequences, got {len(sequences)}")
        if not 1 <= max_tokens <= self.requests.capacity:
            raise ValueError(f"{what}: max_tokens: wanted 1 to {self.requests.capacity}, got {max_tokens!r}")
        missing = []
        for i, sequence in enumerate(sequences):
            if sequence.cached == len(sequence.tokens):
                raise ValueError(f"{what}: sequence {i} has no token that is new")
            length = len(sequence.tokens) + max_tokens - 1  # the last one has no keys yet
            if length > min(self.llama.model.context, self.width * PAGE):
                most = min(self.llama.model.context, self.width * PAGE)
                raise ValueError(
                    f"{what}: sequence {i}: {len(sequence.tokens)} tokens and {max_tokens} new ones are more than the "
                    f"{most} that a sequence can have here"
                )
            missing.append(max(0, -(-length // PAGE) - len(sequence.pages)))
        if sum(missing) > len(self._free):
            raise ValueError(
                f"{what}: the sequences need {sum(missing)} more pages of {PAGE} tokens; of the pool's {self.pages} "
                f"are {len(self._free)} free"
            )
        for sequence, count in zip(sequences, missing, strict=True):
            sequence.pages += [self._free.pop() for _ in range(count)]

    def _bring(self, sequences: Sequence[TokenSequence]) -> int:
        """Write the inputs of the next prefill: as many tokens as the largest has room for, of one sequence after the
        other."""
        most, rows = PREFILL[-1], self.requests.rows
        ids, positions, owners = np.full(most, -1, INT32), np.zeros(most, INT32), np.zeros(most, INT32)
        starts, lengths = np.zeros(rows + 1, INT32), np.zeros(rows, INT32)
        last, ready = np.full(rows, -1, INT32), np.zeros(rows, INT32)
        size = 0
        for row, sequence in enumerate(sequences):
            new = sequence.tokens[sequence.cached :][: most - size]
            place = slice(size, size + len(new))
            ids[place], owners[place] = new, row
            positions[place] = np.arange(sequence.cached, sequence.cached + len(new))
            size += len(new)
            sequence.cached += len(new)
            lengths[row] = sequence.cached
            if new and sequence.cached == len(sequence.tokens):
                last[row], ready[row] = size - 1, sequence.cached
            starts[row + 1] = size
        starts[len(sequences) + 1 :] = size
        for buffer, values in (
            *((self.ids, ids), (self.positions, positions), (self.owners, owners), (self.starts, starts)),
            *((self.lengths, lengths), (self.last, last), (self.ready, ready), (self.count, np.array([size], INT32))),
        ):
            buffer.copy_from(values, self.stream)
        return size

    def _appended(self, rows: int, max_tokens: int) -> Iterator[tuple[int, int]]:
        given, ends, running = [0] * rows, self.llama.model.ends, set(range(rows))
        looked = time.monotonic()
        try:
            while running:
                ended = False
                if time.monotonic() - looked > LOOK_S:  # who reads what comes does not see that the device has failed
                    looked, ended = time.monotonic(), self.stream.done
                for row in sorted(running):
                    for token in self.requests.appended(row, given[row]):
                        given[row] += 1
                        if token in ends or given[row] == max_tokens:
                            running.remove(row)
                        yield row, token
                if ended:
                    return
                time.sleep(POLL_S)
        finally:
            self._settle()

    def _settle(self) -> None:
        """End what runs, and note what it has brought."""
        running, self._running = self._running, []
        if not running:
            return
        self.requests.stop()
        self.stream.synchronize()
        for row, sequence in enumerate(running):
            if new := self.requests.appended(row):
                sequence.tokens += new
                sequence.cached = len(sequence.tokens) - 1  # the newest was never a step's input

    def close(self) -> None:
        self._settle()
        self.buckets.close()
        for plan in self._plans.values():
            plan.close()
        self.stream.close()
        self.requests.close()
        for buffer in self._memory:
            buffer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Chain:
    """Nodes of a graph one after the other, by programmatic edges: a kernel gets ready while the one before it ends."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.last: Node | None = None

    def __call__(self, op: Any, *args: Any, **how: Any) -> None:
        last = self.last
        after = last.port("programmatic") if isinstance(last, KernelNode) else last
        self.last = op(self.graph, *args, after=after, **how)
