"""A Llama that generates text: prompts by a graph, up to 512 tokens at a time, and then all tokens by one launch of
another, whose WHILE node runs step after step until each request has ended.

    llama = Llama(device, GgufFile(path))
    with Generator(llama, requests=4, pages=256) as generator:
        sequence = generator.sequence(tokenizer.chat(messages))
        for _, token in generator.generate([sequence], max_tokens=128):
            ...
        sequence.become(tokenizer.chat(messages))  # with another turn: what it began with stays in the cache

Activations are float32, keys and values float16; weights stay in the blocks of their file.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from .buckets import Buckets, Key, Scratch
from .device import Device
from .gguf import GgufFile
from .graph import Graph
from .lifetime import ClosedError
from .memory import Buffer, Keeper
from .node import KernelNode, Node
from .ops import whole
from .ops.append_token import Requests, append_token
from .ops.decode_attention import DIMS, decode_attention
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


class Llama(Keeper):
    """The weights of a file on a device. `ValueError` names what of the file the kernels cannot do."""

    def __init__(self, device: Device, file: GgufFile) -> None:
        super().__init__()
        self.device, self.file, self.model = device, file, file.model
        model = self.model
        for what, fits, wanted in (
            (f"heads of {model.dim} elements", model.dim in DIMS, " or ".join(map(str, DIMS))),
            (f"{model.heads // model.kv_heads} queries to a key", model.heads <= 4 * model.kv_heads, "up to 4"),
            (f"{model.hidden} elements of a token", model.hidden % 32 == 0, "a multiple of 32"),
            (f"{model.ffn} elements inside of a layer", model.ffn % 32 == 0, "a multiple of 32"),
            (f"a vocabulary of {model.vocabulary}", model.vocabulary % 16 == 0, "a multiple of 16"),
        ):
            if not fits:
                raise ValueError(f"{file.path}: {what}: wanted {wanted}")
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
    def closed(self) -> bool:
        return self.cos_sin.closed


class Sampling(NamedTuple):
    """How a token is drawn, of the best ones: see `drvkit.ops.sample`. ``seed`` is below 2**32; each sequence of a call
    draws by numbers of its own, so what one gets depends on its place in the call too."""

    temperature: float = 0.7
    top_p: float = 0.95
    seed: int = 0


class TokenSequence:
    """Tokens of a text so far, and where the keys and values of some of them are. `Generator.sequence` makes it.

    Attributes:
        tokens: all of them, generated ones too.
        cached: so many have their keys and values in the generator's pool.
        pages: of the pool, where these are; they go back when it is closed, or nobody has it any more.
    """

    def __init__(self, generator: Generator, tokens: Sequence[int]) -> None:
        self._generator = generator
        self.tokens: list[int] = []
        self.cached = 0
        self.pages: list[int] = []
        self._gives_back = weakref.finalize(self, _give_back, self.pages, generator._free)
        self.become(tokens)

    @property
    def closed(self) -> bool:
        return not self._gives_back.alive

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens behind the others. If it grows just now that ends."""
        self._generator._end_run_of(self)
        self.become([*self.tokens, *tokens])

    def become(self, tokens: Sequence[int]) -> None:
        """Be these tokens, such as those of a conversation with its next turn. What they begin with and the sequence
        began with stays in the cache. If it grows just now that ends."""
        if self.closed:
            raise ClosedError("this sequence is closed")
        vocabulary = self._generator.llama.model.vocabulary
        new = [whole("sequence: a token", token) for token in tokens]
        for token in new:
            if not 0 <= token < vocabulary:
                raise ValueError(f"sequence: wanted tokens from 0 to {vocabulary - 1}, got {token}")
        self._generator._end_run_of(self)
        alike = zip(self.tokens[: self.cached], new, strict=False)
        self.cached = next((i for i, (old, now) in enumerate(alike) if old != now), min(self.cached, len(new)))
        self.tokens = new

    def close(self) -> None:
        """Give its pages back. If it grows just now that ends."""
        self._generator._end_run_of(self)
        self._gives_back()
        self.cached = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _give_back(pages: list[int], free: list[int]) -> None:
    free += pages
    pages.clear()


class _Run:
    """A call of `Generator.generate`, which is its generator's until it has been ended and noted."""

    def __init__(self, generator: Generator, sequences: Sequence[TokenSequence], max_tokens: int) -> None:
        self.generator, self.sequences, self.max_tokens = generator, list(sequences), max_tokens
        self._brought: list[list[int]] | None = None  # all, once it is over

    @property
    def over(self) -> bool:
        return self._brought is not None

    def appended(self, row: int, since: int) -> list[int]:
        return self.generator.requests.appended(row, since) if self._brought is None else self._brought[row][since:]

    def end(self) -> None:
        """End it where it is, and give its sequences what it has brought. Interrupted, it can be done again."""
        generator = self.generator
        if generator._run is not self:
            return
        generator.requests.stop()
        generator.stream.synchronize()
        brought = [generator.requests.appended(row) for row in range(len(self.sequences))]
        for sequence, new in zip(self.sequences, brought, strict=True):
            if new:
                sequence.tokens = [*sequence.tokens, *new]
                sequence.cached = len(sequence.tokens) - 1  # the newest was never a step's input
        self._brought, generator._run = brought, None


class Generator(Keeper):
    """Sequences that grow by tokens of a model, on its device.

    Args:
        llama: the model.
        requests: sequences that can grow at the same time, up to 512.
        pages: of the pool, of 16 tokens each, which all sequences share.
        max_new: tokens of a sequence that one call can generate.
        top_k: tokens that `Sampling` draws from.
    """

    def __init__(
        self, llama: Llama, *, requests: int = 1, pages: int = 128, max_new: int = 1024, top_k: int = 40
    ) -> None:
        super().__init__()
        what = type(self).__name__
        model, device = llama.model, llama.device
        for name, number, most in (
            *(("requests", requests, PREFILL[-1]), ("pages", pages, 2**31 // PAGE - 1)),
            *(("max_new", max_new, model.context), ("top_k", top_k, min(1024, model.vocabulary))),
        ):
            if not 1 <= whole(f"{what}: {name}", number) <= most:
                raise ValueError(f"{what}: {name}: wanted 1 to {most}, got {number!r}")
        self.llama, self.device, self.pages, self.top_k = llama, device, pages, top_k
        self.requests = self._keep(Requests(device, rows=requests, capacity=max_new, ends=model.ends))
        self.width = min(pages, -(-model.context // PAGE))
        self._free = list(range(pages))[::-1]
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
        self._graphs: dict[Key, Graph] = {}
        self._run: _Run | None = None
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
        return self._keep(self.device.empty(shape, dtype))

    def sequence(self, tokens: Sequence[int] = ()) -> TokenSequence:
        """A new one."""
        return TokenSequence(self, tokens)

    def _pools(self, layer: int) -> tuple[Buffer, Buffer]:
        return self.pools[layer, 0], self.pools[layer, 1]

    # Graphs

    def decode_graph(self, sequences: int, *, sampled: bool = False) -> Graph:
        """That which lets so many sequences grow. `LookupError` before they have grown."""
        features = {"sample"} if sampled else frozenset()
        key = self.buckets.key_for(tokens=sequences, mode="decode", features=features)
        if key not in self._graphs:
            raise LookupError(f"{type(self).__name__}: the graph for {key} is built when it is first needed")
        return self._graphs[key]

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
        self._keep(plan)
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
        drawn by ``sampling``. Leaving the iterator early, by an exception too, ends all sequences where they are, and
        so does the next call; they have then what came until then.

        `ValueError` and `TypeError` say what cannot grow, or be drawn so; then nothing has changed. If the call itself
        is interrupted, sequences have what is done, and can be given again.
        """
        self._check(sequences, max_tokens, sampling)
        self._settle()
        self._check_room(dict(enumerate(sequences)), max_tokens)
        self._take_pages(sequences, max_tokens)
        rows, features = len(sequences), () if sampling is None else ("sample",)
        if sampling is not None:
            for buffer, value in ((self.temperature, sampling.temperature), (self.top_p, sampling.top_p)):
                buffer.copy_from(np.full(buffer.shape, value, FLOAT32), self.stream)
            seeds = (np.uint64(sampling.seed) << np.uint64(32)) + np.arange(self.requests.rows, dtype=np.uint64)
            self.seeds.copy_from(seeds, self.stream)
        table = np.full(self.table.shape, -1, INT32)
        for row, sequence in enumerate(sequences):
            table[row, : len(sequence.pages)] = sequence.pages
        self.table.copy_from(table, self.stream)
        self.requests.begin(self.stream, [len(sequence.tokens) for sequence in sequences], [max_tokens] * rows)
        run = self._run = _Run(self, sequences, max_tokens)
        try:
            while any(sequence.cached < len(sequence.tokens) for sequence in sequences):
                new = self._bring(sequences)
                self.buckets.run(self.stream, tokens=sum(new), requests=rows, mode="prefill", features=features)
                for sequence, count in zip(sequences, new, strict=True):
                    sequence.cached += count
            self.buckets.run(self.stream, tokens=rows, mode="decode", features=features)
        except BaseException:
            run.end()
            raise
        return self._tokens(run)

    def _check(self, sequences: Sequence[TokenSequence], max_tokens: int, sampling: Sampling | None) -> None:
        what = f"{type(self).__name__}.generate"
        if self.llama.closed:
            raise ClosedError(f"{what}: the model is closed")
        if not 1 <= len(sequences) <= self.requests.rows or len(set(map(id, sequences))) < len(sequences):
            raise ValueError(f"{what}: wanted 1 to {self.requests.rows} different sequences, got {len(sequences)}")
        if not 1 <= whole(f"{what}: max_tokens", max_tokens) <= self.requests.capacity:
            raise ValueError(f"{what}: max_tokens: wanted 1 to {self.requests.capacity}, got {max_tokens!r}")
        for i, sequence in enumerate(sequences):
            if sequence._generator is not self:
                raise ValueError(f"{what}: sequence {i} is of another generator")
            if sequence.closed:
                raise ClosedError(f"{what}: sequence {i} is closed")
        if sampling is not None:
            if not 0 <= whole(f"{what}: sampling.seed", sampling.seed) < 2**32:
                raise ValueError(f"{what}: sampling.seed: wanted 0 to 2**32 - 1, got {sampling.seed!r}")
            for name in ("temperature", "top_p"):
                number = getattr(sampling, name)
                if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < np.inf:
                    raise ValueError(f"{what}: sampling.{name}: wanted a number from 0 on, got {number!r}")
        running = self._run.sequences if self._run is not None else ()
        self._check_room({i: each for i, each in enumerate(sequences) if each not in running}, max_tokens)

    def _check_room(self, sequences: Mapping[int, TokenSequence], max_tokens: int) -> None:
        what, most = f"{type(self).__name__}.generate", min(self.llama.model.context, self.width * PAGE)
        for i, sequence in sequences.items():
            if sequence.cached == len(sequence.tokens):
                raise ValueError(f"{what}: sequence {i} has no token that is new")
            if len(sequence.tokens) + max_tokens - 1 > most:  # the last one has no keys yet
                raise ValueError(
                    f"{what}: sequence {i}: {len(sequence.tokens)} tokens and {max_tokens} new ones are more than the "
                    f"{most} that a sequence can have here"
                )

    def _take_pages(self, sequences: Sequence[TokenSequence], max_tokens: int) -> None:
        needed = [-(-(len(sequence.tokens) + max_tokens - 1) // PAGE) for sequence in sequences]
        missing = [max(0, count - len(each.pages)) for each, count in zip(sequences, needed, strict=True)]
        if sum(missing) > len(self._free):
            raise ValueError(
                f"{type(self).__name__}.generate: the sequences need {sum(missing)} more pages of {PAGE} tokens; of "
                f"the pool's {self.pages} are {len(self._free)} free"
            )
        for sequence, count in zip(sequences, missing, strict=True):
            sequence.pages += [self._free.pop() for _ in range(count)]

    def _bring(self, sequences: Sequence[TokenSequence]) -> list[int]:
        """Write the inputs of the next prefill: as many tokens as the largest has room for, of one sequence after the
        other. Gives how many of each."""
        most, rows = PREFILL[-1], self.requests.rows
        ids, positions, owners = np.full(most, -1, INT32), np.zeros(most, INT32), np.zeros(most, INT32)
        starts, lengths = np.zeros(rows + 1, INT32), np.zeros(rows, INT32)
        last, ready = np.full(rows, -1, INT32), np.zeros(rows, INT32)
        size, counts = 0, []
        for row, sequence in enumerate(sequences):
            new = sequence.tokens[sequence.cached :][: most - size]
            place, length = slice(size, size + len(new)), sequence.cached + len(new)
            ids[place], owners[place], positions[place] = new, row, np.arange(sequence.cached, length)
            size += len(new)
            counts.append(len(new))
            lengths[row] = length
            if new and length == len(sequence.tokens):
                last[row], ready[row] = size - 1, length
            starts[row + 1] = size
        starts[len(sequences) + 1 :] = size
        for buffer, values in (
            *((self.ids, ids), (self.positions, positions), (self.owners, owners), (self.starts, starts)),
            *((self.lengths, lengths), (self.last, last), (self.ready, ready), (self.count, np.array([size], INT32))),
        ):
            buffer.copy_from(values, self.stream)
        return counts

    def _tokens(self, run: _Run) -> Iterator[tuple[int, int]]:
        given, ends, running = [0] * len(run.sequences), self.llama.model.ends, set(range(len(run.sequences)))
        looked = time.monotonic()
        try:
            while running:
                ended = run.over  # looked at first: then all has come
                if time.monotonic() - looked > LOOK_S:  # who reads what comes does not see that the device has failed
                    looked, ended = time.monotonic(), ended or self.stream.done
                for row in sorted(running):
                    for token in run.appended(row, given[row]):
                        given[row] += 1
                        if token in ends or given[row] == run.max_tokens:
                            running.remove(row)
                        yield row, token
                if ended:
                    return
                time.sleep(POLL_S)
        finally:
            run.end()

    def _settle(self) -> None:
        """End what runs, and note what it has brought."""
        if self._run is not None:
            self._run.end()

    def _end_run_of(self, sequence: TokenSequence) -> None:
        if self._run is not None and sequence in self._run.sequences:
            self._run.end()

    def close(self) -> None:
        """Its sequences are of no use then."""
        if self.buckets.closed:
            return
        try:
            self._settle()
        finally:
            self._run = None
            self.buckets.close()
            super().close()
            self.stream.close()


class _Chain:
    """Nodes of a graph one after the other, by programmatic edges: a kernel gets ready while the one before it ends."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.last: Node | None = None

    def __call__(self, op: Any, *args: Any, **how: Any) -> None:
        last = self.last
        after = last.port("programmatic") if isinstance(last, KernelNode) else last
        self.last = op(self.graph, *args, after=after, **how)
