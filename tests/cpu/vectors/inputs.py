"""Inputs: for each kind of operand the values that matter, and random ones that every numpy makes alike.

Only integer arithmetic makes them. A small domain is gone through whole; otherwise all pairs and triples of special
values come first, then random ones.
"""

from __future__ import annotations

import itertools
import math
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .floats import BF16, E4M3, E5M2, F16, F32, F64, WORDS, Format

Bits = NDArray[Any]

BLOCK = 128  # threads; every number of inputs is a multiple of it


def random_words(count: int, label: str) -> NDArray[np.uint64]:
    """The splitmix64 sequence of a label."""
    seed = (zlib.crc32(label.encode()) << 32) | 0x9E3779B9
    z = (np.arange(1, count + 1, dtype=np.uint64) + np.uint64(seed)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@dataclass(frozen=True)
class Kind:
    """A set of operand values: its special ones, and random ones made of random words."""

    name: str
    width: int
    special: tuple[int, ...]
    draw: Callable[[NDArray[np.uint64]], NDArray[Any]]
    whole: int = 0  # the size of the domain 0 .. whole - 1, where it is small enough to go through

    @property
    def word(self) -> type[Any]:
        return WORDS[self.width]

    def random(self, count: int, label: str) -> Bits:
        return self.draw(random_words(count, f"{self.name} {label}")).astype(self.word)


def _float_kind(format: Format) -> Kind:
    """Any bits, and numbers near 1 so that sums and products of them meet."""
    one, last = int(format.of(np.ones(1))[0]), format.largest
    ordinary = [
        *(int(bits) for bits in format.of(np.array([0.5, 1.5, 2.0, 2.5, 3.0, -1.5, -2.0, 10.0, 1 / 3, 2 / 3]))),
        one - 1, one, one + 1, one | format.sign_bit, (one + 1) | format.sign_bit,
    ]  # fmt: skip
    edges = [0, 1, 2, format.smallest_normal - 1, format.smallest_normal, format.smallest_normal + 1, last - 1, last]
    if format.has_infinity:
        quiet = 1 << (format.fraction_bits - 1)
        edges += [format.infinity, format.infinity | 1, format.infinity | quiet, format.infinity | quiet | 5 % quiet]
    edges += [format.nan]
    integers = [2.0**k for k in (7, 8, 15, 16, 24, 31, 32, 53, 63, 64)]
    around = [int(bits) + step for bits in format.of(np.array(integers)) if bits < last for step in (-1, 0, 1)]
    special = dict.fromkeys([*edges, *(bits | format.sign_bit for bits in edges), *ordinary, *around])

    def draw(words: NDArray[np.uint64]) -> NDArray[Any]:
        mask = np.uint64((1 << (1 + format.exponent_bits + format.fraction_bits)) - 1)
        bits = words & mask
        fraction, sign = np.uint64((1 << format.fraction_bits) - 1), np.uint64(format.sign_bit)
        choice = words >> np.uint64(56)
        bias = (1 << (format.exponent_bits - 1)) - 1
        reach = min(8, bias)
        exponent = np.uint64(bias - reach // 2) + ((words >> np.uint64(40)) % np.uint64(reach))
        sparse = np.uint64(1) << ((words >> np.uint64(32)) % np.uint64(format.fraction_bits))
        near = (bits & (fraction | sign)) | (exponent << np.uint64(format.fraction_bits))
        tie = (bits & sign) | (exponent << np.uint64(format.fraction_bits)) | sparse
        return np.where(choice < 96, bits, np.where(choice < 224, near, tie))

    return Kind(format.name, format.width, tuple(special), draw, whole=1 << format.width if format.width <= 16 else 0)


def _integer_kind(width: int) -> Kind:
    top, mask = 1 << (width - 1), (1 << width) - 1
    powers = [1 << k for k in (4, 7, 8, 15, 16, 31, 32, 53) if k < width - 1]
    special = [0, 1, 2, 3, 5, 7, 10, mask, mask - 1, top, top - 1, top + 1, 0x55555555_55555555 & mask]
    special += [p + step for p in powers for step in (-1, 0, 1)] + [mask + 1 - p for p in powers]

    def draw(words: NDArray[np.uint64]) -> NDArray[Any]:
        """Of all magnitudes alike, as bits and as their complement."""
        shift = (words >> np.uint64(58)) % np.uint64(width)
        small = (words & np.uint64(mask)) >> shift
        return np.where((words >> np.uint64(57)) & np.uint64(1), small, ~small) & np.uint64(mask)

    return Kind(f"b{width}", width, tuple(dict.fromkeys(special)), draw, whole=1 << width if width <= 16 else 0)


def _below(name: str, width: int, limit: int, special: Sequence[int] = ()) -> Kind:
    return Kind(name, width, tuple(special) or tuple(range(min(limit, 40))), lambda words: words % np.uint64(limit))


def _shift_kind(width: int) -> Kind:
    """Amounts of a shift of ``width`` bits, and some too large."""
    edges = (0, 1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 255, 256, 0x10000, 0x80000000, 0xFFFFFFFF)
    draw: Callable[[NDArray[np.uint64]], NDArray[Any]] = lambda words: words % np.uint64(width + 8)  # noqa: E731
    return Kind(f"shift{width}", 32, edges, draw)


def _nonzero(kind: Kind) -> Kind:
    one = np.uint64(1)
    draw: Callable[[NDArray[np.uint64]], NDArray[Any]] = lambda words: np.maximum(kind.draw(words), one)  # noqa: E731
    return Kind(f"nonzero{kind.width}", kind.width, tuple(v for v in kind.special if v), draw)


def _real_range(name: str, low_exponent: int, high: int) -> Kind:
    """f32 numbers of both signs with a magnitude from 2^low_exponent up to the bits ``high``."""
    low = (127 + low_exponent) << 23

    def draw(words: NDArray[np.uint64]) -> NDArray[Any]:
        magnitude = np.uint64(low) + (words & np.uint64(0xFFFFFFFF)) % np.uint64(high - low + 1)
        return magnitude | ((words >> np.uint64(63)) << np.uint64(31))

    return Kind(name, 32, (low, high, low | 1 << 31, high | 1 << 31, 0x3F800000, 0xBF800000), draw)


def _small_reals(format: Format, name: str, limit: int) -> Kind:
    """Integers from -limit to limit, as floats: their products and sums are exact everywhere."""
    table = format.of(np.arange(-limit, limit + 1).astype(np.float64)).astype(np.uint64)
    return Kind(name, format.width, (), lambda words: table[(words % np.uint64(len(table))).astype(np.int64)])


def _gentle_reals(format: Format, name: str) -> Kind:
    """Any fraction, with magnitudes from 1/8 to 2."""
    base = int(format.of(np.array([0.125]))[0])
    span = int(format.of(np.array([2.0]))[0]) - base

    def draw(words: NDArray[np.uint64]) -> NDArray[Any]:
        sign = (words >> np.uint64(63)) * np.uint64(format.sign_bit)
        return (np.uint64(base) + (words & np.uint64(0xFFFFFFFF)) % np.uint64(span)) | sign

    return Kind(name, format.width, (), draw)


_FLOATS = [_float_kind(format) for format in (F16, BF16, F32, F64, E4M3, E5M2)]
_INTEGERS = [_integer_kind(width) for width in (8, 16, 32, 64)]
KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in [
        *_FLOATS,
        *_INTEGERS,
        *(_shift_kind(width) for width in (16, 32, 64)),
        *(_nonzero(kind) for kind in _INTEGERS),
        _below("lane", 32, 32),
        _below("bit", 32, 32),
        _below("field", 32, 40, (0, 1, 7, 8, 16, 31, 32, 33, 64, 127, 255)),
        Kind(
            "offset",
            32,
            tuple(n & 0xFFFFFFFF for n in (0, 1, -1, 2, -2, 31, -31, 32, -32, 33, -33)),
            lambda words: (words % np.uint64(41) - np.uint64(20)) & np.uint64(0xFFFFFFFF),
        ),
        _below("few", 32, 6),
        _below("few64", 64, 6),
        _below("truth", 32, 2),
        _below("clamp", 32, 1 << 13, tuple(32 - w << 8 | c for w in (32, 16, 8, 4, 2, 1) for c in (0, 31))),
        _below("mask8", 32, 256),
        _below("selector", 32, 1 << 16, (0, 0x3210, 0x0123, 0x7654, 0xFEDC, 0x89AB, 0x4567, 0x8888, 0xFFFF)),
        _real_range("angle2pi", -24, 0x40C90FDA),
        _real_range("angle100pi", -24, 0x439D1462),
        _real_range("divisor", -126, 0x7E800000),
        _real_range("huge", 127, 0x7F7FFFFF),
        _real_range("exponent", -12, 0x43180000),
        _small_reals(F16, "small_f16", 8),
        _small_reals(BF16, "small_bf16", 8),
        _small_reals(F32, "small_f32", 8),
        _small_reals(F64, "small_f64", 8),
        _small_reals(E4M3, "small_e4m3", 4),
        _small_reals(E5M2, "small_e5m2", 4),
        _gentle_reals(F16, "gentle_f16"),
        _gentle_reals(BF16, "gentle_bf16"),
        _gentle_reals(F32, "gentle_f32"),
        _gentle_reals(E4M3, "gentle_e4m3"),
        _gentle_reals(E5M2, "gentle_e5m2"),
    ]
}


@lru_cache(maxsize=24)
def inputs(kinds: tuple[str, ...], count: int) -> tuple[Bits, ...]:
    """One array for each operand: at least ``count`` threads' worth, and all of a small domain.

    ``"f16x2"`` packs two independent draws of ``"f16"`` into a register, ``"b8x4"`` four of ``"b8"``.
    """
    parts = [unpacked(kind) for kind in kinds]
    scalars, lanes = tuple(name for name, _ in parts), [n for _, n in parts]
    if max(lanes) == 1:
        return _scalars(scalars, count)
    draws = [_scalars(scalars, count, f"lane {lane}") for lane in range(max(lanes))]
    packed = []
    for at, (kind, n) in enumerate(parts):
        width = KINDS[kind].width
        word = WORDS[width * n]
        packed.append(sum((draws[lane][at].astype(word) << word(width * lane) for lane in range(n)), word(0)))
    return tuple(packed)


def unpacked(kind: str) -> tuple[str, int]:
    """``("f16", 2)`` of ``"f16x2"``, ``("f16", 1)`` of ``"f16"``."""
    match = re.fullmatch(r"(.+?)(?:x(\d+))?", kind)
    assert match
    return match[1], int(match[2] or 1)


def _scalars(names: tuple[str, ...], count: int, label: str = "lane 0") -> tuple[Bits, ...]:
    kinds = [KINDS[name] for name in names]
    if len(kinds) == 1 and kinds[0].whole:
        whole = np.arange(max(kinds[0].whole, BLOCK), dtype=np.uint64) % np.uint64(kinds[0].whole)
        if label != "lane 0":  # another order in each half of a register
            whole = (whole * np.uint64(40503) + np.uint64(zlib.crc32(label.encode()))) % np.uint64(kinds[0].whole)
        return (whole.astype(kinds[0].word),)
    lists, room = [kind.special for kind in kinds], count // 2
    if math.prod(map(len, lists)) <= room:
        special = np.array(list(itertools.product(*lists)), np.uint64).reshape(-1, len(kinds)).T
        special = np.roll(special, zlib.crc32(label.encode()) % max(special.shape[1], 1), axis=1)
    else:  # some of them
        columns = [random_words(room, f"special {at} {label}") % np.uint64(len(each)) for at, each in enumerate(lists)]
        special = np.stack(
            [np.array(each, np.uint64)[c.astype(np.int64)] for each, c in zip(lists, columns, strict=True)]
        )
    total = -(-count // BLOCK) * BLOCK
    return tuple(
        np.concatenate([values.astype(kind.word), kind.random(total - len(values), f"{at} of {len(kinds)} {label}")])
        for at, (kind, values) in enumerate(zip(kinds, special, strict=True))
    )
