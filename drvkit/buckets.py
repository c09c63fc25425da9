"""Graphs for a few sizes, of which each step takes the next larger one.

A graph is captured (built) for a number of tokens and requests; a step that has fewer runs it all the same, and what it
lacks is padding. `Buckets` has the graphs, chooses among them by a `Key`, and sees to it that padded rows hold what
kernels skip by (length 0, slot -1, ...) and never what an earlier step left there.
"""

from __future__ import annotations

import heapq
import math
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, Literal, NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from .device import Device, Event, Stream
from .graph import Graph
from .lifetime import ClosedError, Owned
from .memory import Buffer, fill_params, holder, view_of
from .replay import Exec
from .scalars import said

__all__ = ["Bucket", "BucketError", "Buckets", "Key", "Pad", "Ran", "Scratch"]

ALIGNMENT = 256  # bytes; of what `Scratch` gives, as of what the driver gives


class BucketError(LookupError):
    """There is no bucket for a step.

    Attributes:
        wanted: the step's own key.
        nearest: those that there are, the most alike first.
    """

    def __init__(self, message: str, wanted: Key, nearest: tuple[Key, ...] = ()) -> None:
        self.wanted, self.nearest = wanted, nearest
        super().__init__(message)


class _Key(NamedTuple):
    tokens: int
    requests: int
    mode: str
    features: frozenset[str]


class Key(_Key):
    """What a graph is built for, and what a step asks for.

    A graph serves steps of at most its tokens and its requests, and of its mode and features exactly: these are for
    whatever else graphs are built differently for.

    Args:
        tokens: rows of the step.
        requests: what they belong to; without it each token is a request of its own, as in decoding.
        mode: any word: ``"decode"``, ``"prefill"``, ``"mixed"``, ...
        features: any words: ``{"window"}``, ...
    """

    __slots__ = ()

    def __new__(
        cls, tokens: int, requests: int | None = None, mode: str = "decode", features: Iterable[str] = frozenset()
    ) -> Self:
        if requests is None:
            requests = tokens
        if tokens.__class__ is not int or requests.__class__ is not int or tokens < 0 or requests < 0:
            tokens, requests = _count("tokens", tokens), _count("requests", requests)
        if features.__class__ is not frozenset:
            if isinstance(features, str):  # a word of letters
                raise TypeError(f"features: wanted a set of words, got {features!r}")
            features = frozenset(features)
        if mode.__class__ is not str:
            raise TypeError(f"mode: wanted a word, got {mode!r}")
        return cls._make((tokens, requests, mode, features))

    def __str__(self) -> str:
        words = " ".join(sorted(self.features))
        sizes = f"{_counted(self.tokens, 'token')} of {_counted(self.requests, 'request')}"
        return f"{self.mode}, {sizes}{words and f', {words}'}"


class Pad(NamedTuple):
    """An input of the graphs, of one row a token or a request, whose padded rows a run fills.

    Attributes:
        name: what errors call it.
        array: a device array with rows enough for every key, each of them contiguous. The graphs read its first ones.
        fill: what every element of a padded row becomes; ``"tokens"``: how many tokens the step really has, of an int32
            array. (So where ``starts`` has the first token of each request and, behind the last, their number,
            ``Pad("starts", starts[1:], "tokens", by="requests")`` makes the padded requests empty.)
        by: what its rows are.
    """

    name: str
    array: Any
    fill: Any
    by: Literal["tokens", "requests"] = "tokens"


class Ran(NamedTuple):
    """What a run did.

    Attributes:
        key: that of the bucket; None where there was none, and ``eager`` ran.
        real: the step's own.
        how: ``"full"``: one graph; ``"piecewise"``: several, or functions besides; ``"eager"``: functions alone.
        padded: tokens of padding.
    """

    key: Key | None
    real: Key
    how: str
    padded: int


class Scratch:
    """Device memory for what a run needs between its kernels, the same for all keys.

    Every build has all of it anew, so graphs of different keys have the same memory: each run overwrites what the one
    before left there. What must last longer, such as counters that reset themselves, is memory of your own.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._blocks: list[Buffer] = []  # of bytes
        self._used: list[int] | None = None  # of each, by the build that is going on

    def empty(self, shape: int | Sequence[int], dtype: DTypeLike) -> Buffer:
        """Memory that nothing else of this build has, its contents undefined. It is closed with the `Buckets`.

        `RuntimeError` outside of a build: the memory is that of graphs that were built.
        """
        if self._used is None:
            raise RuntimeError("scratch.empty: no graph is being built; what lasts longer is memory of your own")
        outline = Buffer.borrow(self.device, 0, shape, dtype)
        nbytes = -(-max(outline.nbytes, 1) // ALIGNMENT) * ALIGNMENT
        room = [(block.size - used, i) for i, (block, used) in enumerate(zip(self._blocks, self._used, strict=True))]
        _, i = min((fit for fit in room if fit[0] >= nbytes), default=(0, len(room)))
        if i == len(room):  # none has room for it
            self._blocks.append(self.device.empty(nbytes, np.uint8))
            self._used.append(0)
        at = self._used[i]
        self._used[i] += nbytes
        return self._blocks[i][at : at + outline.nbytes].view(outline.dtype).reshape(outline.shape)

    @property
    def nbytes(self) -> int:
        return sum(block.size for block in self._blocks)

    def _begin(self) -> None:
        self._used = [0] * len(self._blocks)

    def _end(self) -> None:
        self._used = None

    def _close(self) -> None:
        for block in self._blocks:
            block.close()
        self._blocks, self._used = [], None


Eager: TypeAlias = Callable[[Stream, Key], Any]  # called with the stream and the step's own key
Piece: TypeAlias = Graph | Exec | Eager
Build: TypeAlias = Callable[[Key, Scratch], Piece | Sequence[Piece]]


class Bucket:
    """What there is for one key.

    Attributes:
        pieces: what a run launches, in order: execs, whose nodes can be changed by name, and functions. There are none
            before it is built.
        how: as in `Ran`; ``"not built"`` before.
        runs: how often it ran.
        padded: tokens of padding in all of them.
    """

    def __init__(self, key: Key) -> None:
        self.key = key
        self.pieces: tuple[Exec | Eager, ...] = ()
        self.how = "not built"
        self.runs = self.padded = 0
        self._graphs: list[Graph] = []

    @classmethod
    def eager(cls, function: Eager) -> Self:
        """One for all keys that there is no other for."""
        self = cls(Key(0))
        self.pieces, self.how = (function,), "eager"
        return self

    def _build(self, device: Device, build: Build, scratch: Scratch) -> None:
        pieces: list[Exec | Eager] = []
        try:
            built: Any = build(self.key, scratch)
            for piece in built if isinstance(built, Sequence) and not isinstance(built, str) else (built,):
                if isinstance(piece, Graph | Exec) and piece.device is not device:
                    raise ValueError(f"{piece!r} is on {piece.device.id}, the buckets on {device.id}")
                if isinstance(piece, Graph):
                    self._graphs.append(piece)
                    pieces.append(piece.instantiate())
                elif isinstance(piece, Exec) or callable(piece):
                    pieces.append(piece)
                else:
                    raise TypeError(f"wanted a Graph, an Exec or a function, or several, got {said(piece)}")
            if not pieces:
                raise TypeError("wanted a Graph, an Exec or a function, or several, got none")
        except BaseException as error:
            error.add_note(f"while building for {self.key}")
            self.pieces = tuple(pieces)
            self._close()
            raise
        graphs = sum(isinstance(piece, Exec) for piece in pieces)
        self.pieces = tuple(pieces)
        self.how = "eager" if not graphs else "full" if len(pieces) == 1 else "piecewise"

    def _close(self) -> None:
        for thing in (*self.pieces, *self._graphs):
            if isinstance(thing, Exec | Graph):
                thing.close()
        self.pieces = ()
        self._graphs.clear()

    def __repr__(self) -> str:
        return f"<Bucket {self.key}: {self.how}, {_counted(self.runs, 'run')}>"


class Buckets(Owned):
    """Graphs for a few keys; `run` takes the smallest that a step fits into.

    ::

        def build(key, scratch):  # one decode step of key.tokens rows, by the first rows of the inputs
            hidden = scratch.empty((key.tokens, 4096), np.float16)
            graph = dk.Graph(device, str(key))
            ...
            return graph

        pads = [dk.Pad("slots", slots, -1), dk.Pad("lengths", lengths, 0, by="requests")]
        buckets = dk.Buckets(device, [1, 2, 4, 8, 16, 32], build, pads=pads).build_all()
        ...  # write the first 13 rows of the inputs
        buckets.run(stream, tokens=13)  # the graph of 16; rows 13 to 15 are padding

    Args:
        device: where all of it runs.
        keys: what to build for; a number is that many tokens, decoded.
        build: ``build(key, scratch)`` gives the graph for a key, or several pieces to be launched one after the other:
            graphs (or execs), and functions ``piece(stream, real)``, which queue what no graph is to hold; ``real`` is
            the step's own key. Graphs and execs are closed with this.
        pads: the inputs whose padded rows are filled before a run, the same for all graphs.
        eager: ``eager(stream, real)`` runs the steps that there is no bucket for; without it they are refused.
        name: what errors call it.

    Attributes:
        scratch: the memory that the graphs share.

    Runs follow each other, on whatever streams, as they share inputs and memory. Who writes the inputs of a step on
    another stream than the run before has to wait for that run first; and only one thread at a time makes a step.
    """

    kind = "buckets"

    def __init__(
        self,
        device: Device,
        keys: Iterable[Key | int],
        build: Build,
        *,
        pads: Iterable[Pad] = (),
        eager: Eager | None = None,
        name: str = "buckets",
    ) -> None:
        self.device = device
        self.scratch = Scratch(device)
        self._build: Build | None = build
        for role, function in (("build", build), ("eager", build if eager is None else eager)):
            if not callable(function):
                raise TypeError(f"buckets {name!r}: {role}: wanted a function, got {said(function)}")
        wanted = [key if isinstance(key, Key) else Key(key) for key in keys]
        self._buckets: dict[Key, Bucket] = {}
        for key in sorted(wanted, key=lambda key: (key.mode, sorted(key.features), key.tokens, key.requests)):
            if not key.tokens or not key.requests:
                raise ValueError(f"buckets {name!r}: nothing can be built for {key}")
            if key in self._buckets:
                raise ValueError(f"buckets {name!r}: there are two keys {key}")
            self._buckets[key] = Bucket(key)
        if not self._buckets:
            raise ValueError(f"buckets {name!r}: there is no key")
        # By mode and features: the tokens of its buckets, and these, in ascending order.
        self._ladders: dict[tuple[str, frozenset[str]], tuple[list[int], list[Bucket]]] = {}
        for variant, group in groupby(self._buckets.values(), lambda bucket: (bucket.key.mode, bucket.key.features)):
            buckets = list(group)
            self._ladders[variant] = [bucket.key.tokens for bucket in buckets], buckets
        pads = tuple(pads)
        try:
            self._fills = [_Fill(device, pad, self._buckets) for pad in pads]
        except (TypeError, ValueError) as error:
            raise type(error)(f"buckets {name!r}: {error}") from None
        self._inputs = tuple(holder(pad.array) for pad in pads)
        self._others = None if eager is None else Bucket.eager(eager)
        self._plans: dict[tuple[Any, ...], _Plan] = {}  # by the step's own key
        self._newest: Stream | None = None  # of the newest run
        self._lock = threading.RLock()
        self._building = False
        self._own(None, None, name or self.kind)

    # What there is

    @property
    def keys(self) -> tuple[Key, ...]:
        """In ascending order, mode by mode."""
        return tuple(self._buckets)

    @property
    def misses(self) -> int:
        """How many steps ``eager`` ran, as there was no bucket for them."""
        return 0 if self._others is None else self._others.runs

    def __getitem__(self, key: Key | int) -> Bucket:
        """The bucket of exactly this key; `key_for` tells which one a step takes."""
        self._check_open()
        wanted = key if isinstance(key, Key) else Key(key)
        if wanted not in self._buckets:
            raise self._missing(wanted)
        return self._buckets[wanted]

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self._buckets.values())

    def __len__(self) -> int:
        return len(self._buckets)

    def key_for(
        self,
        tokens: int,
        requests: int | None = None,
        *,
        mode: str = "decode",
        features: Iterable[str] = frozenset(),
    ) -> Key:
        """The key of the bucket that such a step takes: that of the fewest tokens, then requests. `BucketError` names
        the nearest ones where there is none."""
        self._check_open()
        real = Key(tokens, requests, mode, features)
        bucket = self._choose(real)
        if bucket is None:
            raise self._missing(real)
        return bucket.key

    def _choose(self, real: Key) -> Bucket | None:
        ladder = self._ladders.get((real.mode, real.features))
        if ladder is not None:
            tokens, buckets = ladder
            for i in range(bisect_left(tokens, real.tokens), len(tokens)):
                if buckets[i].key.requests >= real.requests:
                    return buckets[i]
        return None

    def _missing(self, real: Key) -> BucketError:
        def unlike(key: Key) -> tuple[int, ...]:
            apart = abs(key.tokens - real.tokens), abs(key.requests - real.requests)
            return key.mode != real.mode, len(key.features ^ real.features), *apart

        nearest = tuple(heapq.nsmallest(3, self._buckets, key=unlike))
        return BucketError(
            f"buckets {self.name!r}: none for {real}; nearest: {'; '.join(map(str, nearest))}", real, nearest
        )

    # Building and running

    def build_all(self, *, upload: Any = None) -> Self:
        """Build what is not built yet, the largest first, so that the others find the memory that they share.

        ``upload`` is a stream on which to bring the graphs to the device now, rather than at their first launch.
        """
        with self._lock:
            self._check_open()
            for bucket in sorted(self, key=lambda bucket: (bucket.key.tokens, bucket.key.requests), reverse=True):
                if not bucket.pieces:
                    self._make(bucket)
                for piece in bucket.pieces:
                    if upload is not None and isinstance(piece, Exec):
                        piece.upload(upload)
        return self

    def _make(self, bucket: Bucket) -> None:
        if self._building:  # it would take the memory that the other build has
            raise BucketError(f"buckets {self.name!r}: a build needs {bucket.key}, which is not built", bucket.key)
        assert self._build is not None
        self._building = True
        self.scratch._begin()
        try:
            bucket._build(self.device, self._build, self.scratch)
        finally:
            self.scratch._end()
            self._building = False

    def run(
        self,
        stream: Any,
        tokens: int,
        requests: int | None = None,
        *,
        mode: str = "decode",
        features: Iterable[str] = frozenset(),
    ) -> Ran:
        """Queue a step of so many tokens and requests on ``stream``, whose inputs are in the first rows of theirs.

        It fills the rows from there to the bucket's size, then launches what the bucket has, which is built now if it
        was not before. A step of no tokens is one of padding alone. `BucketError` names the nearest keys where there is
        no bucket and no ``eager``.
        """
        if stream.__class__ is not Stream or stream.device is not self.device:
            stream = self.device.as_stream(stream)
        real: _Key | tuple[Any, ...] = (tokens, tokens if requests is None else requests, mode, features)
        if tokens.__class__ is not int or real[1].__class__ is not int or features.__class__ is not frozenset:
            real = Key(*real)
        if stream.capturing is not None or stream is not self._newest:
            self._follow(stream)
        plan = self._plans.get(real)
        if plan is None:
            with self._lock:
                plan = self._plan(Key(*real))
        bucket, pieces, ran, fills = plan
        if fills:
            self._fill(fills, stream)
        for piece in pieces:
            if isinstance(piece, Exec):
                piece.launch(stream)
            else:
                piece(stream, ran.real)
        bucket.runs += 1
        bucket.padded += ran.padded
        return ran

    def _plan(self, real: Key) -> _Plan:
        """How such a step runs, for this one and those to come."""
        self._check_open()
        bucket = self._choose(real) or self._others
        if bucket is None:
            raise self._missing(real)
        if not bucket.pieces:
            self._make(bucket)
        if bucket is self._others:
            plan = _Plan(bucket, bucket.pieces, Ran(None, real, bucket.how, 0), ())
        else:
            ran = Ran(bucket.key, real, bucket.how, bucket.key.tokens - real.tokens)
            fills = (fill.rows(real, bucket.key) for fill in self._fills)
            plan = _Plan(bucket, bucket.pieces, ran, tuple(filter(None, fills)))
        if len(self._plans) >= 4096:
            self._plans.clear()
        self._plans[real] = plan
        return plan

    def _follow(self, stream: Stream) -> None:
        """Put what ``stream`` gets from now on behind the runs so far: they have the same inputs and scratch memory."""
        self._check_open()
        newest = self._newest
        for one in (stream, newest):
            if one is not None and one.capturing is not None:  # the driver launches no graph into a capture
                raise ValueError(f"buckets {self.name!r}: stream {one.name} is being captured: no run meanwhile")
        if newest is not None and not newest.closed:  # a closed one has waited
            with Event(self.device, timing=False) as event:
                stream.wait(event.record(newest))
        self._newest = stream

    def _fill(self, fills: tuple[_Rows, ...], stream: Stream) -> None:
        inputs = self._inputs  # taken before it is looked whether another thread has closed this
        self._check_open()
        self.device.enter_thread()
        handle = stream.raw
        if handle is None:
            raise ClosedError(f"{stream.info} is closed")
        for fill, address, pitch, value, width, height in fills:
            code = fill.memset(address, pitch, value, width, height, handle)
            if code:
                error = self.device.driver.error(fill.call, code)
                error.add_note(f"while filling pad {fill.name!r} of buckets {self.name!r}")
                raise error
        stream.hold(inputs)

    def close(self) -> None:
        """Refuse further use of it, of its execs and graphs, and of the memory that they share, which is freed when the
        last launch is done."""
        with self._lock:
            if self.box is None:
                return
            super().close()
            for bucket in self._buckets.values():
                bucket._close()
            self.scratch._close()
            self._fills, self._inputs = [], ()
            self._newest = self._build = self._others = None
            self._plans.clear()

    def __str__(self) -> str:
        """One line a key: how it runs, how often it did, and how much of that was padding."""
        built = sum(bool(bucket.pieces) for bucket in self)
        width = max(len(str(key)) for key in self.keys)
        lines = [
            f"buckets {self.name!r} on {self.device.id}: {_counted(len(self), 'key')}, {built} built, "
            f"{self.scratch.nbytes} bytes of scratch memory"
        ]
        for bucket in self:
            share = bucket.padded / (bucket.key.tokens * bucket.runs) if bucket.runs else 0
            ran = f", {_counted(bucket.runs, 'run')}, {share:.0%} padding" if bucket.runs else ""
            lines.append(f"  {bucket.key!s:{width}}  {bucket.how}{ran}")
        if self._others is not None:
            ran = f", {_counted(self.misses, 'run')}" if self.misses else ""
            lines.append(f"  {'any other':{width}}  eager{ran}")
        return "\n".join(lines)


class _Fill:
    """Fills the padded rows of an input."""

    __slots__ = ("address", "call", "count", "element", "memset", "name", "pitch", "row", "value")

    def __init__(self, device: Device, pad: Pad, keys: Iterable[Key]) -> None:
        if not isinstance(pad, Pad):
            raise TypeError(f"pads: wanted a Pad, got {said(pad)}")
        self.name = pad.name
        if pad.by not in ("tokens", "requests"):
            raise ValueError(f"pad {pad.name!r}: by is 'tokens' or 'requests', not {pad.by!r}")
        self.count: Callable[[Key], int] = attrgetter(pad.by)
        view = view_of(pad.array)
        if view is None or view.on_host or view.readonly:
            raise TypeError(f"pad {pad.name!r}: wanted a device array that can be written, got {said(pad.array)}")
        if pad.fill == "tokens" and view.dtype not in (np.dtype(np.int32), np.dtype(np.uint32)):
            raise TypeError(f"pad {pad.name!r}: the number of tokens fills an array of int32, not of {view.dtype}")
        try:
            params = fill_params(pad.array, 0 if pad.fill == "tokens" else pad.fill)
        except (TypeError, ValueError) as error:
            raise type(error)(f"pad {pad.name!r}: {error}") from None
        self.value = None if pad.fill == "tokens" else params.value
        self.element = view.dtype.itemsize if pad.fill == "tokens" else params.element
        rows = view.shape[0] if view.shape else 0
        largest = max(keys, key=self.count)
        if rows < self.count(largest):
            raise ValueError(f"pad {pad.name!r}: it has {_counted(rows, 'row')}, too few for {largest}")
        if not view._replace(shape=view.shape[1:], strides=view.strides[1:]).contiguous:
            raise ValueError(f"pad {pad.name!r}: strides {view.strides} of shape {view.shape}: its rows have gaps")
        home = pad.array.device.id if isinstance(pad.array, Buffer) else device.id
        if home != device.id or device.locate(view.address) not in (None, device.ordinal):
            raise ValueError(f"pad {pad.name!r}: it is not on {device.id}")
        self.address = view.address
        self.row = math.prod(view.shape[1:]) * view.dtype.itemsize
        self.pitch = view.strides[0] if rows > 1 else self.row
        self.call = f"cuMemsetD2D{8 * self.element}Async"
        self.memset = device.driver.raw(self.call, 6)

    def rows(self, real: Key, key: Key) -> _Rows | None:
        """What fills the rows from the real ones to the bucket's; None where there is nothing to fill."""
        first = self.count(real)
        rows = self.count(key) - first
        width, pitch = self.row, self.pitch
        if not rows or not width:
            return None
        at, value = self.address + first * pitch, real.tokens if self.value is None else self.value
        if width == pitch:  # one run
            width, pitch, rows = width * rows, width * rows, 1
        return _Rows(self, at, pitch, value, width // self.element, rows)


class _Rows(NamedTuple):
    """A fill, and what the driver's memset takes before the stream."""

    fill: _Fill
    address: int
    pitch: int
    value: int
    width: int
    height: int


class _Plan(NamedTuple):
    """How a step runs."""

    bucket: Bucket
    pieces: tuple[Exec | Eager, ...]  # those of the bucket, until it is closed
    ran: Ran
    fills: tuple[_Rows, ...]


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}: wanted a number, got {value!r}")
    if value < 0:
        raise ValueError(f"{name}: wanted a number, 0 or more, got {value}")
    return int(value)


def _counted(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"
