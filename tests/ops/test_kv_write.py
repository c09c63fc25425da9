"""Writing keys and values: the references against brute force, the checks of the ops, and the kernels against the
references."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from compare import assert_close, assert_equal_bits
from numpy.typing import NDArray
from standins import Foreign

from drvkit import ops
from drvkit.build import build
from drvkit.device import Device, Stream
from drvkit.driver import DriverError
from drvkit.memory import Buffer
from drvkit.ops.kv_write import kv_write, slot_mapping
from drvkit.ref import kv_write as ref
from drvkit.ref.paged_attention import gather_pages
from drvkit.source import Source

if TYPE_CHECKING:
    from conftest import Values, WithOption

    from drvkit.graph import Graph

bfloat16, e4m3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
each_style = pytest.mark.parametrize("style", ["neox", "gptj"])
each_layout = pytest.mark.parametrize("layout", ["HND", "NHD"])


# ---- the references ------------------------------------------------------------------------------------------------


@each_style
def test_the_reference_turns_pairs_as_complex_numbers(rng: np.random.Generator, style: str) -> None:
    tokens, heads, dim, rotary = 7, 3, 64, 48
    x, angles = rng.normal(size=(tokens, heads, dim)), rng.uniform(-9, 9, size=(20, rotary // 2))
    positions = rng.integers(0, 20, tokens, np.int32)
    cos_sin = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    want = x.copy()
    for t in range(tokens):
        for h in range(heads):
            for i in range(rotary // 2):
                a, b = (i, i + rotary // 2) if style == "neox" else (2 * i, 2 * i + 1)
                turned = complex(x[t, h, a], x[t, h, b]) * np.exp(1j * angles[positions[t], i])
                want[t, h, a], want[t, h, b] = turned.real, turned.imag
    got = ref.rotate(x.astype(np.float32), positions, cos_sin, style)
    assert_close(got, want.astype(np.float32), rtol=0, atol=2e-6, why="a few roundings of numbers up to 8")
    assert_equal_bits(got[..., rotary:], x[..., rotary:].astype(np.float32))


def test_the_reference_quantises_to_the_nearest() -> None:
    numbers = np.arange(256, dtype=np.uint8).view(e4m3).astype(np.float64)
    numbers = np.unique(numbers[np.isfinite(numbers)])  # of both zeros one
    codes = numbers.astype(e4m3).view(np.uint8)
    # All numbers, all ties between two, and what is a little beside a tie.
    ties = (numbers[1:] + numbers[:-1]) / 2
    x = np.concatenate([numbers, ties, np.nextafter(ties.astype(np.float32), np.float32(1e9))]).astype(np.float32)
    got = ref.quantise(x, np.ones((), np.float32))
    for value, code in zip(x.tolist(), got.view(np.uint8).tolist(), strict=True):
        distance = np.abs(numbers - value)
        best = [c for c, d in zip(codes.tolist(), distance.tolist(), strict=True) if d == distance.min()]
        even = [c for c in best if c % 2 == 0 or len(best) == 1]
        assert code & 0x7F in {c & 0x7F for c in even}, value
        assert np.signbit(value) == code >> 7 or value == 0


@pytest.mark.parametrize(
    ("x", "scale", "stored"),
    [(448, 1, 448), (464.5, 1, 448), (1e30, 1, 448), (-np.inf, 1, -448), (1, 1e-9, 448), (896, 4, 224), (1, -2, -0.5)],
)
def test_the_reference_saturates(x: float, scale: float, stored: float) -> None:
    assert ref.quantise(np.array([x], np.float32), np.float32(scale)) == [stored]  # type: ignore[arg-type]


def test_the_reference_keeps_nan() -> None:
    assert np.isnan(ref.quantise(np.array([np.nan, -np.nan], np.float32), np.ones(1, np.float32))).all()


@each_layout
def test_what_the_references_write_is_what_attention_gathers(rng: np.random.Generator, layout: str) -> None:
    page, heads, dim, width, lengths = 8, 2, 64, 3, np.array([17, 0, 24, 8], np.int32)
    table = rng.permutation(len(lengths) * width).astype(np.int32).reshape(len(lengths), width)
    shape = (table.size, heads, page, dim) if layout == "HND" else (table.size, page, heads, dim)
    pools = [np.full(shape, -99, np.float16), np.full(shape, -99, np.float16)]
    requests = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    positions = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    order = rng.permutation(len(positions))
    k, v = rng.normal(size=(2, len(positions), heads, dim)).astype(np.float16)
    slots = ref.slot_mapping(table, page, len(order), positions=positions[order], requests=requests[order])
    new_k, new_v, _ = ref.kv_write(k[order], v[order], pools[0], pools[1], slots, layout=layout)
    for request, length in enumerate(lengths.tolist()):
        for pool, rows in ((new_k, k), (new_v, v)):
            assert_equal_bits(gather_pages(pool, table[request], length, layout), rows[requests == request])
    assert np.count_nonzero(new_k == -99) == (table.size * page - lengths.sum()) * heads * dim


def test_the_reference_has_minus_one_for_what_has_no_place() -> None:
    table = np.array([[5, 3], [2, -1]], np.int32)
    positions, requests = np.array([9, 16, 3, 8, -1, 0], np.int32), np.array([0, 0, 1, 1, 7, 2], np.int32)
    slots = ref.slot_mapping(table, 8, 6, positions=positions, requests=requests)
    assert slots.tolist() == [25, -1, 19, -1, -1, -1]
    assert ref.slot_mapping(table, 8, 6, positions=positions, requests=requests, count=1).tolist() == [25] + [-1] * 5
    lengths = np.array([10, 1], np.int32)
    assert ref.slot_mapping(table, 8, 4, lengths=lengths).tolist() == [24, 25, -1, 16]


# ---- the ops' checks, without a device -------------------------------------------------------------------------------


def fit(**changes: Any) -> dict[str, Any]:
    """Operands that fit, far from each other, save for ``changes``."""
    operands = {
        "k": Foreign((4, 2, 128), np.float16, 1 << 20),
        "v": Foreign((4, 2, 128), np.float16, 2 << 20),
        "k_pool": Foreign((9, 2, 16, 128), np.float16, 3 << 20),
        "v_pool": Foreign((9, 2, 16, 128), np.float16, 4 << 20),
        "slots": Foreign((4,), np.int64, 5 << 20),
    }
    return operands | changes


POSITIONS, COS_SIN = Foreign((4,), np.int32, 6 << 20), Foreign((99, 64), np.float32, 7 << 20)
ROPE = {"positions": POSITIONS, "cos_sin": COS_SIN}
Q = Foreign((4, 6, 128), np.float16, 8 << 20)
SCALE = Foreign((2,), np.float32, 9 << 20)
NARROW = {f"{x}_pool": Foreign((9, 2, 16, 128), np.uint8, (10 + i) << 20) for i, x in enumerate("kv")}


@pytest.mark.parametrize(
    ("changes", "function", "rows"),
    [
        ({}, "__half,__half,0", 4),
        (ROPE, "__half,__half,1", 4),
        (ROPE | {"style": "gptj", "q": Q}, "__half,__half,2", 10),
        (NARROW | {"k_scale": SCALE, "v_scale": SCALE}, "__half,__nv_fp8_e4m3,0", 4),
    ],
)
def test_the_kernel_goes_by_the_operands(recorder: Any, changes: Any, function: str, rows: int) -> None:
    assert kv_write(recorder, **fit(**changes), after="before", name="write") == "kernel node"  # type: ignore[comparison-overlap]
    ((kernel, how),) = recorder.calls
    assert kernel == f"kv_write: kv_write<{function}>"
    assert (how["grid"], how["block"]) == (-(-4 * rows * 16 // 256), 256)
    assert (how["after"], how["name"]) == ("before", "write")


def test_no_tokens_are_an_empty_node(recorder: Any) -> None:
    nothing = {role: Foreign((0, 2, 128), np.float16) for role in ("k", "v")} | {"slots": Foreign((0,), np.int64)}
    kv_write(recorder, **fit(**nothing), name="write")
    slot_mapping(recorder, TABLE, Foreign((0,), np.int64), page_size=8, lengths=LENGTHS, name="map")
    assert recorder.calls == [("empty", {"after": None, "name": name}) for name in ("write", "map")]


def pool(shape: Any = (9, 2, 16, 128), dtype: Any = np.float16, **how: Any) -> Foreign:
    return Foreign(shape, dtype, how.pop("address", 3 << 20), **how)


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no layout": ({"layout": "NDH"}, ValueError, "layout: wanted HND or NHD, got 'NDH'"),
    "no style": ({"style": "llama"}, ValueError, "style: wanted neox or gptj, got 'llama'"),
    "float32": ({"k": Foreign((4, 2, 128), np.float32)}, TypeError, "kv_write: k: .*got float32"),
    "host memory": ({"v": np.zeros((4, 2, 128), np.float16)}, TypeError, r"kv_write: v: .*in host memory"),
    "flat": (
        {"k": Foreign((4, 256), np.float16)},
        ValueError,
        r"k: wanted shape \(tokens, heads, dim\), got \(4, 256\)",
    ),
    "dim 96": ({"k": Foreign((4, 2, 96), np.float16)}, ValueError, r"k: wanted shape .*got \(4, 2, 96\)"),
    "two dtypes": ({"v": Foreign((4, 2, 128), np.uint16)}, TypeError, "v: .*of float16, got uint16"),
    "two shapes": ({"v": Foreign((4, 3, 128), np.float16)}, ValueError, r"v: wanted shape \(4, 2, 128\), got \(4, 3,"),
    "gaps in a token": (
        {"k": Foreign((4, 2, 128), np.float16, 1 << 20, (1024, 512, 2))},
        ValueError,
        r"k: wanted contiguous tokens, got strides \(1024, 512, 2\)",
    ),
    "odd stride": (
        {"k": Foreign((4, 2, 128), np.float16, 1 << 20, (520, 256, 2))},
        ValueError,
        "k: .*multiples of 16 bytes, got 0x100000 and",
    ),
    "odd address": ({"k": Foreign((4, 2, 128), np.float16, 8)}, ValueError, "k: .*multiples of 16 bytes, got 0x8"),
    "pool of another dtype": (
        {"k_pool": pool(dtype=np.uint16)},
        TypeError,
        "k_pool: .*float16 or float8.*got uint16",
    ),
    "pool of 3 axes": ({"k_pool": pool((9, 32, 128))}, ValueError, r"k_pool: wanted 4 axes, got shape \(9, 32, 128\)"),
    "pool of other heads": ({"k_pool": pool((9, 4, 16, 128))}, ValueError, r"k_pool: wanted shape \(pages, 2, .*HND"),
    "pool of the other layout": (
        {"layout": "NHD"},
        ValueError,
        r"k_pool: wanted shape .*, 2, 128\) for NHD, got \(9, 2",
    ),
    "page of 4": ({"k_pool": pool((9, 2, 4, 128))}, ValueError, "k_pool: wanted shape .*a page of 8, 16"),
    "pool of gaps": (
        {"k_pool": pool(strides=(16384, 8192, 512, 4))},
        ValueError,
        "k_pool: wanted contiguous rows of 128",
    ),
    "pool repeated": ({"k_pool": pool(strides=(0, 4096, 256, 2))}, ValueError, "k_pool: rows overlap: strides"),
    "two pools": ({"v_pool": pool((8, 2, 16, 128))}, ValueError, r"v_pool has shape \(8, 2, 16, 128\), k_pool has"),
    "two strides": ({"v_pool": pool(strides=(16384, 4096, 256, 2))}, ValueError, "v_pool has strides"),
    "two dtypes of pools": ({"v_pool": pool(dtype=np.uint8)}, ValueError, "v_pool has dtype float8_e4m3fn, k_pool has"),
    "slots of 32 bits": ({"slots": Foreign((4,), np.int32)}, TypeError, "slots: .*int64, got int32"),
    "too few slots": ({"slots": Foreign((3,), np.int64)}, ValueError, r"slots: wanted shape \(4,\), got \(3,\)"),
    "no scale": (NARROW | {"k_scale": SCALE}, ValueError, "v_scale is missing: a pool of float8_e4m3fn needs it"),
    "a scale too many": ({"k_scale": SCALE}, ValueError, "k_scale is given without a pool of float8_e4m3fn"),
    "scales of another length": (
        NARROW | {"k_scale": SCALE, "v_scale": Foreign((1,), np.float32)},
        ValueError,
        r"v_scale: wanted shape \(2,\), got \(1,\)",
    ),
    "no positions": ({"cos_sin": COS_SIN}, ValueError, "positions is missing: cos_sin needs it"),
    "positions alone": ({"positions": POSITIONS}, ValueError, "positions is given without cos_sin"),
    "positions of 64 bits": (ROPE | {"positions": Foreign((4,), np.int64)}, TypeError, "positions: .*got int64"),
    "a table of one axis": (ROPE | {"cos_sin": Foreign((64,), np.float32)}, ValueError, r"cos_sin: .*got \(64,\)"),
    "rotary_dim 24": (
        ROPE | {"cos_sin": Foreign((9, 24), np.float32)},
        ValueError,
        r"cos_sin: .*of 16 up to 128\), got",
    ),
    "rotary_dim 256": (ROPE | {"cos_sin": Foreign((9, 256), np.float32)}, ValueError, r"cos_sin: .*got \(9, 256\)"),
    "no angles": (ROPE | {"cos_sin": Foreign((0, 64), np.float32)}, ValueError, r"cos_sin: .*got \(0, 64\)"),
    "q without angles": ({"q": Q}, ValueError, "q is given without cos_sin"),
    "q_out alone": (ROPE | {"q_out": Q}, ValueError, "q_out is given without q"),
    "q of other tokens": (
        ROPE | {"q": Foreign((5, 6, 128), np.float16)},
        ValueError,
        r"q: wanted shape \(4, 6, 128\), got \(5, 6, 128\)",
    ),
    "q_out of other heads": (
        ROPE | {"q": Q, "q_out": Foreign((4, 5, 128), np.float16)},
        ValueError,
        r"q_out: wanted shape \(4, 6, 128\), got \(4, 5, 128\)",
    ),
    "tokens of q_out in each other": (
        ROPE | {"q": Q, "q_out": Foreign((4, 6, 128), np.float16, 0, (256, 256, 2))},
        ValueError,
        "q_out: tokens overlap",
    ),
    "one pool": ({"v_pool": pool()}, ValueError, "k_pool at 0x300000 .* overlaps v_pool at 0x300000"),
    "pools in each other": ({"v_pool": pool(address=(3 << 20) + 256)}, ValueError, "k_pool at .* overlaps v_pool"),
    "k in the pool": ({"k": Foreign((4, 2, 128), np.float16, 3 << 20)}, ValueError, "k_pool at .* overlaps k at"),
    "slots in the pool": ({"slots": Foreign((4,), np.int64, 4 << 20)}, ValueError, "v_pool at .* overlaps slots at"),
    "q_out beside q": (
        ROPE | {"q": Q, "q_out": Foreign((4, 6, 128), np.float16, (8 << 20) + 256)},
        ValueError,
        "q_out at .* overlaps q at",
    ),
    "q in k": (ROPE | {"q": Foreign((4, 6, 128), np.float16, 1 << 20)}, ValueError, "q_out at .* overlaps k at"),
}


@pytest.mark.parametrize(("changes", "error", "message"), WRONG.values(), ids=WRONG)
def test_operands_that_do_not_fit_are_refused(
    recorder: Any, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        kv_write(recorder, **fit(**changes))
    assert not recorder.calls


def test_arrays_between_each_others_rows_do_not_overlap(recorder: Any) -> None:
    row = (6 + 2 + 2) * 128 * 2
    heads = {"q": (6, 0), "k": (2, 6), "v": (2, 8)}
    fused = {
        role: Foreign((4, n, 128), np.float16, (1 << 20) + first * 256, (row, 256, 2))
        for role, (n, first) in heads.items()
    }
    page = 2 * 16 * 128 * 2
    halves = {
        f"{x}_pool": pool(address=(3 << 20) + i * page, strides=(2 * page, 4096, 256, 2)) for i, x in enumerate("kv")
    }
    assert kv_write(recorder, **fit(**fused, **halves, **ROPE))
    interleaved = {
        f"{x}_pool": pool(address=(3 << 20) + i * 4096, strides=(2 * page, 8192, 256, 2)) for i, x in enumerate("kv")
    }
    assert kv_write(recorder, **fit(**interleaved))
    one_on = Foreign((4, 6, 128), np.float16, (1 << 20) + 256, (row, 256, 2))
    with pytest.raises(ValueError, match=r"q_out at .* overlaps k at"):
        kv_write(recorder, **fit(**{**fused, "q": one_on}, **ROPE))
    one_page_more = pool(address=(3 << 20) + 2 * page, strides=(2 * page, 4096, 256, 2))
    with pytest.raises(ValueError, match=r"k_pool at .* overlaps v_pool"):
        kv_write(recorder, **fit(**{**halves, "v_pool": one_page_more}))


TABLE, LENGTHS = Foreign((3, 5), np.int32, 64), Foreign((3,), np.int32, 1 << 20)
SLOTS = Foreign((6,), np.int64, 2 << 20)
SIX = Foreign((6,), np.int32, 3 << 20)
WRONG_SLOTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "page of 12": ({"page_size": 12, "positions": SIX}, ValueError, "page_size: wanted one of 8, 16, .*got 12"),
    "nowhere": ({}, ValueError, "wanted either positions or lengths, got neither"),
    "both": ({"positions": SIX, "lengths": LENGTHS}, ValueError, "wanted either positions or lengths, got both"),
    "requests of lengths": ({"requests": SIX, "lengths": LENGTHS}, ValueError, "requests is for positions"),
    "a flat table": ({"block_table": SIX, "lengths": LENGTHS}, ValueError, r"block_table: wanted .*got \(6,\)"),
    "slots of two axes": (
        {"slots": Foreign((2, 3), np.int64), "positions": SIX},
        ValueError,
        r"slots: wanted shape \(tokens,\), got",
    ),
    "slots of 32 bits": ({"slots": SIX, "lengths": LENGTHS}, TypeError, "slots: .*int64, got int32"),
    "uneven": ({"slots": Foreign((5,), np.int64), "lengths": LENGTHS}, ValueError, "5 tokens are not as many for each"),
    "few positions": ({"positions": LENGTHS}, ValueError, r"positions: wanted shape \(6,\), got \(3,\)"),
    "few requests": ({"positions": SIX, "requests": LENGTHS}, ValueError, r"requests: wanted shape \(6,\), got \(3,\)"),
    "many lengths": ({"lengths": SIX}, ValueError, r"lengths: wanted shape \(3,\), got \(6,\)"),
    "two counts": ({"lengths": LENGTHS, "count": SIX}, ValueError, r"count: wanted shape \(1,\), got \(6,\)"),
    "a wide table": (
        {"block_table": Foreign((1, 2**28), np.int32), "lengths": Foreign((1,), np.int32)},
        ValueError,
        "a position has 31 bits",
    ),
    "in the table": ({"slots": Foreign((6,), np.int64, 96), "positions": SIX}, ValueError, "slots at .* block_table"),
}


@pytest.mark.parametrize(("changes", "error", "message"), WRONG_SLOTS.values(), ids=WRONG_SLOTS)
def test_a_mapping_that_cannot_be_is_refused(
    recorder: Any, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    operands: dict[str, Any] = {"block_table": TABLE, "slots": SLOTS, "page_size": 8} | changes
    with pytest.raises(error, match=f"slot_mapping: .*{message}"):
        slot_mapping(recorder, **operands)
    assert not recorder.calls


@pytest.mark.parametrize("types", ["__half,__half,0", "__nv_bfloat16,__nv_bfloat16,1", "__half,__half,2"])
def test_rows_move_by_16_bytes_at_once(types: str) -> None:
    image = build(Source.find("kv_write"), [f"kv_write<{types}>"], arch="compute_90a", kind="ptx")
    entry = image.data.decode().split(".entry " + image.symbol(f"kv_write<{types}>"))[1]
    assert re.search(r"\bld(\.global)?\.v4\.[ubf]32", entry)
    assert re.search(r"\bst(\.global)?\.v4\.[ubf]32", entry)
    assert not re.search(r"\bst(\.global)?\.(v2\.)?[ubf]\d+", entry)


# ---- the kernels ---------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A shape of everything. The few kernels (dtype, kv_dtype, style) are each compiled for the CPU device."""

    dtype: Any
    kv_dtype: Any
    style: str | None
    layout: str
    page_size: int
    dim: int
    rotary_dim: int = 0
    halves: bool = False  # pools are the halves of the pages of one array
    q: str | None = None  # "own", "in place", "fused": in place, and with k and v in rows of one projection

    def __str__(self) -> str:
        words = (
            np.dtype(self.dtype),
            np.dtype(self.kv_dtype),
            self.style,
            self.layout,
            self.page_size,
            self.dim,
            self.q,
        )
        return "-".join(str(word) for word in words if word)


CASES = [
    Case(bfloat16, bfloat16, None, "HND", 8, 64),
    Case(bfloat16, bfloat16, None, "NHD", 32, 128, halves=True),
    Case(bfloat16, bfloat16, None, "HND", 128, 256, halves=True),
    Case(bfloat16, bfloat16, "neox", "HND", 16, 128, 128, halves=True, q="fused"),
    Case(bfloat16, bfloat16, "neox", "NHD", 16, 64, 32, q="own"),
    Case(bfloat16, bfloat16, "neox", "HND", 64, 256, 192, q="in place"),
    Case(bfloat16, e4m3, "neox", "HND", 16, 128, 96, halves=True, q="own"),
    Case(bfloat16, e4m3, "neox", "NHD", 128, 256, 256, q="fused"),
    Case(np.float16, np.float16, "gptj", "NHD", 64, 256, 64, q="fused"),
    Case(np.float16, np.float16, "gptj", "HND", 8, 64, 64),
    Case(np.float16, e4m3, None, "NHD", 32, 64, halves=True),
    Case(np.float16, e4m3, None, "HND", 128, 128),
]
PADDING = (-1, -7, -(2**63))


def part(whole: Any, case: Case, which: int) -> Any:
    """One pool of all the memory of both; around it lies what must stay."""
    return whole[1:-1, which] if case.halves else whole[which, 1:-1]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_go_where_their_slots_say(
    device: Device, stream: Stream, values: Values, rng: np.random.Generator, case: Case
) -> None:
    tokens, kv_heads, q_heads, pages, page = 37, 3, 5, 11, case.page_size
    k_first = q_heads if case.q == "fused" else 0
    projection = values(tokens * (k_first + 2 * kv_heads) * case.dim, case.dtype).reshape(tokens, -1, case.dim)
    own = values(tokens * q_heads * case.dim, case.dtype).reshape(tokens, q_heads, case.dim)
    rows = {"q": projection[:, :k_first] if case.q == "fused" else own}
    rows |= {x: projection[:, first : first + kv_heads] for x, first in (("k", k_first), ("v", k_first + kv_heads))}

    inner = (kv_heads, page) if case.layout == "HND" else (page, kv_heads)
    outer = (pages + 2, 2) if case.halves else (2, pages + 2)
    whole = rng.normal(size=(*outer, *inner, case.dim)).astype(case.kv_dtype)
    slots = rng.permutation(pages * page)[:tokens].astype(np.int64)
    is_padding = rng.random(tokens) < 0.2
    slots[is_padding] = rng.choice(PADDING, is_padding.sum())
    how: dict[str, Any] = {}
    if case.kv_dtype is e4m3:
        how |= {role: np.exp2(rng.uniform(-9, 2, kv_heads)).astype(np.float32) for role in ("k_scale", "v_scale")}
    if case.style:
        how["cos_sin"] = rng.uniform(-1, 1, size=(50, case.rotary_dim)).astype(np.float32)
        how["positions"] = np.where(is_padding, 2**31 - 1, rng.integers(0, 50, tokens)).astype(np.int32)

    on = device.array
    with on(whole) as memory, on(projection) as fused, on(own) as queries, on(slots) as to:
        made = {role: on(array) for role, array in how.items()}
        out = device.empty(own.shape, case.dtype)
        given: dict[str, Any] = dict(made)
        if case.q:
            given["q"] = fused[:, :k_first] if case.q == "fused" else queries
        if case.q == "own":
            given["q_out"] = out
        styles: dict[str, Any] = {"layout": case.layout} | ({"style": case.style} if case.style else {})
        k, v = fused[:, k_first : k_first + kv_heads], fused[:, k_first + kv_heads :]
        kv_write(stream, k, v, part(memory, case, 0), part(memory, case, 1), to, **styles, **given)
        got, got_fused, got_q = memory.numpy(stream), fused.numpy(stream), queries.numpy(stream)
        if case.q == "own":
            assert_equal_bits(got_q, own)
            got_q = out.numpy(stream)
        for buffer in (out, *made.values()):
            buffer.close()

    before, q = (part(whole, case, 0), part(whole, case, 1)), rows["q"] if case.q else None
    keys, values_, turned = ref.kv_write(rows["k"], rows["v"], before[0], before[1], slots, **styles, **how, q=q)
    before[0][...], before[1][...] = keys, values_
    changed = bool(case.style) or case.kv_dtype is e4m3
    assert_equal_bits(got, whole, any_nan=changed)
    if case.q == "fused":
        projection[:, :k_first] = turned
    elif case.q:
        assert turned is not None
        assert_equal_bits(got_q, turned, any_nan=True)
    assert_equal_bits(got_fused, projection, any_nan=True)


def test_padding_is_neither_read_nor_written(device: Device, stream: Stream) -> None:
    tokens, heads, dim = 5, 2, 64
    pool = np.full((4, heads, 16, dim), 7, bfloat16)
    with (
        device.empty((tokens, heads, dim), bfloat16) as k,  # memory that the CPU device lets nobody read
        device.empty((tokens, heads, dim), bfloat16) as v,
        device.empty((tokens, heads, dim), bfloat16) as q,
        device.empty(tokens, np.int32) as positions,
        device.array(pool) as k_pool,
        device.array(pool) as v_pool,
        device.array(np.ones((3, dim), np.float32)) as cos_sin,
        device.array(np.full(tokens, -1, np.int64)) as slots,
    ):
        kv_write(stream, k, v, k_pool, v_pool, slots, positions=positions, cos_sin=cos_sin, q=q)
        assert_equal_bits(k_pool.numpy(stream), pool)
        assert_equal_bits(v_pool.numpy(stream), pool)
        assert_equal_bits(q.numpy(stream), np.zeros(q.shape, bfloat16))


def test_every_float16_is_quantised_as_the_reference_has_it(device: Device, stream: Stream) -> None:
    tokens, heads, dim, page = 256, 4, 64, 8
    k = np.arange(2**16, dtype=np.uint16).view(np.float16).reshape(tokens, heads, dim)
    scale, ones = np.array([1, 0.37, -3, 2**-8], np.float32), np.ones(heads, np.float32)
    pool, slots = np.zeros((tokens // page, heads, page, dim), e4m3), np.arange(tokens)[::-1].copy()
    on = device.array
    with on(k) as new, on(pool) as k_pool, on(pool) as v_pool, on(slots) as to, on(scale) as by, on(ones) as one:
        kv_write(stream, new, new, k_pool, v_pool, to, k_scale=by, v_scale=one)
        want = ref.kv_write(k, k, pool, pool, slots, k_scale=scale, v_scale=ones)
        assert_equal_bits(k_pool.numpy(stream), want[0], any_nan=True)
        assert_equal_bits(v_pool.numpy(stream), want[1], any_nan=True)
        assert not np.isin(want[1].view(np.uint8) & 0x7F, 0x7F)[~np.isnan(want[1])].any()


def test_arrays_of_other_libraries_may_be_strided(device: Device, stream: Stream, rng: np.random.Generator) -> None:
    def foreign(buffer: Buffer) -> Foreign:
        return Foreign(buffer.shape, f"u{buffer.dtype.itemsize}", buffer.address, buffer.strides)

    kv, pools = rng.normal(size=(3, 4, 64)).astype(bfloat16), np.zeros((2, 2, 2, 8, 64), e4m3)
    slots, scale, positions = np.array([9, 0, 15]), np.ones(2, np.float32), np.array([2, 0, 1], np.int32)
    cos_sin = rng.normal(size=(3, 64)).astype(np.float32)
    on = device.array
    with on(kv) as rows, on(pools) as memory, on(slots) as to, on(scale) as one, on(positions) as at, on(cos_sin) as by:
        k, v, k_pool, v_pool = map(foreign, (rows[:, :2], rows[:, 2:], memory[:, 0], memory[:, 1]))
        kv_write(stream, k, v, k_pool, v_pool, to, k_scale=one, v_scale=one, positions=at, cos_sin=by)
        how: dict[str, Any] = {"k_scale": scale, "v_scale": scale, "positions": positions, "cos_sin": cos_sin}
        keys, values, _ = ref.kv_write(kv[:, :2], kv[:, 2:], pools[:, 0], pools[:, 1], slots, **how)
        pools[:, 0], pools[:, 1] = keys, values
        assert_equal_bits(memory.numpy(stream), pools)


@pytest.mark.parametrize("page_size", [8, 128])
@pytest.mark.parametrize("count", [None, 0, 301, 2000])
def test_slots_of_positions(
    device: Device, stream: Stream, rng: np.random.Generator, page_size: int, count: int | None
) -> None:
    tokens, rows, width = 600, 20, 7
    table = rng.integers(0, 2**31, (rows, width), np.int32)  # slots have 64 bits
    positions = rng.integers(-5, width * page_size, tokens, np.int32)
    requests = rng.integers(0, rows, tokens, np.int32)
    requests[positions < 0] = 2**31 - 1
    on = device.array
    with on(table) as pages, on(positions) as at, on(requests) as of, on(np.zeros(tokens, np.int64)) as slots:
        number = None if count is None else on(np.array([count], np.int32))
        how: dict[str, Any] = {"page_size": page_size, "count": number}
        slot_mapping(stream, pages, slots, positions=at, requests=of, **how)
        want = ref.slot_mapping(table, page_size, tokens, positions=positions, requests=requests, count=count)
        assert_equal_bits(slots.numpy(stream), want)
        slot_mapping(stream, pages, slots, positions=at, **how)
        want = ref.slot_mapping(table, page_size, tokens, positions=positions, count=count)
        assert_equal_bits(slots.numpy(stream), want)
        if number is not None:
            number.close()


@pytest.mark.parametrize("each", [1, 3])
def test_slots_of_the_last_tokens(device: Device, stream: Stream, rng: np.random.Generator, each: int) -> None:
    lengths = np.array([0, 1, 2, 16, 17, 48, 0], np.int32)
    table = rng.permutation(len(lengths) * 3).astype(np.int32).reshape(len(lengths), 3)
    table[np.arange(3) >= -(-lengths // 16)[:, None]] = 2**31 - 1
    on = device.array
    with on(table) as pages, on(lengths) as ends, on(np.zeros(len(lengths) * each, np.int64)) as slots:
        slot_mapping(stream, pages, slots, page_size=16, lengths=ends)
        assert_equal_bits(slots.numpy(stream), ref.slot_mapping(table, 16, len(lengths) * each, lengths=lengths))


@pytest.mark.parametrize("port", ["full", "programmatic"])
def test_one_graph_serves_every_step(
    device: Device, stream: Stream, graph: Graph, rng: np.random.Generator, port: str
) -> None:
    requests, page, width, heads, dim = 4, 16, 2, 2, 64
    table = rng.permutation(requests * width).astype(np.int32).reshape(requests, width)
    pools = [np.zeros((requests * width, heads, page, dim), bfloat16) for _ in range(2)]
    on = device.array
    with (
        on(table) as pages,
        on(np.zeros(requests, np.int32)) as lengths,
        device.empty(requests, np.int64) as slots,
        device.empty((requests, heads, dim), bfloat16) as k,
        device.empty((requests, heads, dim), bfloat16) as v,
        on(pools[0]) as k_pool,
        on(pools[1]) as v_pool,
    ):
        node = slot_mapping(graph, pages, slots, page_size=page, lengths=lengths, name="slots")
        assert node is not None
        kv_write(graph, k, v, k_pool, v_pool, slots, after=node.port(port), name="write")
        with graph.instantiate() as exe:
            ops.release()  # the nodes hold what they use
            for now in ([15, 32, 0, 1], [16, 0, 0, 2], [17, 0, 31, 3]):
                step, new = np.array(now, np.int32), rng.normal(size=(2, requests, heads, dim)).astype(bfloat16)
                lengths.copy_from(step)
                k.copy_from(new[0])
                v.copy_from(new[1])
                exe.launch(stream)
                to = ref.slot_mapping(table, page, requests, lengths=step)
                pools[0], pools[1], _ = ref.kv_write(new[0], new[1], pools[0], pools[1], to)
                assert_equal_bits(k_pool.numpy(stream), pools[0])
                assert_equal_bits(v_pool.numpy(stream), pools[1])


def test_nothing_is_launched_for_no_tokens(device: Device, stream: Stream) -> None:
    with device.zeros((2, 1, 8, 64), np.float16) as k_pool, device.zeros((2, 1, 8, 64), np.float16) as v_pool:
        none, slots = k_pool[:0, :, 0], device.empty(0, np.int64)
        assert kv_write(stream, none, none, k_pool, v_pool, slots) is None
        slots.close()


# ---- what only the device can know to be wrong -----------------------------------------------------------------------


OUTSIDE: dict[str, tuple[list[int], list[int], str]] = {
    "slot": ([3, -1, 32], [0, 9, 3], r"slots\[2\] is 32: the pool has 2 pages of 16 tokens"),
    "large slot": ([3, 2**40, 1], [0, 0, 3], r"slots\[1\] is 1099511627776: the pool has 2"),
    "position": ([3, -1, 31], [0, 9, 4], r"positions\[2\] is 4: cos_sin has 4 rows"),
    "negative position": ([3, -1, 31], [-2, 9, 3], r"positions\[0\] is -2: cos_sin has 4 rows"),
}


def write_outside(device: Device, slots: list[int], positions: list[int]) -> tuple[NDArray[Any], NDArray[Any]]:
    """The pool of keys and the one that is wanted."""
    k, pool = np.arange(3 * 2 * 64).reshape(3, 2, 64).astype(bfloat16), np.zeros((2, 2, 16, 64), bfloat16)
    cos_sin, to, at = np.arange(4 * 64, dtype=np.float32).reshape(4, 64), np.array(slots), np.array(positions, np.int32)
    buffers = [device.array(x) for x in (k, pool, pool, to, at, cos_sin)]
    new, k_pool, v_pool, where, positions_, angles = buffers
    try:
        with device.stream() as stream:
            kv_write(stream, new, new, k_pool, v_pool, where, positions=positions_, cos_sin=angles)
            stream.synchronize()
            got = k_pool.numpy()
    except DriverError:
        device.driver.cuDevicePrimaryCtxReset(device.handle)
        raise
    finally:
        for buffer in buffers:
            buffer.close()
    return got, ref.kv_write(k, k, pool, pool, to, positions=at, cos_sin=cos_sin)[0]


@pytest.mark.parametrize(("slots", "positions", "told"), OUTSIDE.values(), ids=OUTSIDE)
def test_the_cpu_device_reports_what_is_outside(
    with_option: WithOption, capsys: pytest.CaptureFixture[str], slots: list[int], positions: list[int], told: str
) -> None:
    victim = Device("cpu:5")
    with_option(victim, "kv_write", "-DDRVKIT_CPU_DEVICE")
    with pytest.raises(DriverError, match="LAUNCH_FAILED"):
        write_outside(victim, slots, positions)
    assert re.fullmatch(f"{told}.*\n", capsys.readouterr().out)


@pytest.mark.parametrize(("slots", "positions", "told"), OUTSIDE.values(), ids=OUTSIDE)
def test_a_gpu_stays_inside_its_memory(
    device: Device, with_option: WithOption, slots: list[int], positions: list[int], told: str
) -> None:
    with_option(device, "kv_write", "-UDRVKIT_CPU_DEVICE")
    got, want = write_outside(device, slots, positions)
    assert_equal_bits(got, want, any_nan=True)


NO_PLACE: dict[str, tuple[list[int], list[int], str]] = {
    "position": ([15, 16], [0, 1], r"token 1 is at position 16: the block table has room for 16\n"),
    "request": ([0, 3], [0, 2], r"requests\[1\] is 2: the block table has 2 rows\n"),
    "negative request": ([0, 3], [-1, 1], r"requests\[0\] is -1: the block table has 2 rows\n"),
    "page": ([0, 9], [0, 1], r"block_table\[1\]\[1\] is -4\n"),
}


def map_nowhere(device: Device, positions: list[int], requests: list[int]) -> tuple[NDArray[Any], NDArray[Any]]:
    table = np.array([[7, 3], [1, -4]], np.int32)
    at, of = np.array(positions, np.int32), np.array(requests, np.int32)
    buffers = [device.array(x) for x in (table, np.zeros(2, np.int64), at, of)]
    pages, slots, places, rows = buffers
    try:
        with device.stream() as stream:
            slot_mapping(stream, pages, slots, page_size=8, positions=places, requests=rows)
            stream.synchronize()
            got = slots.numpy()
    except DriverError:
        device.driver.cuDevicePrimaryCtxReset(device.handle)
        raise
    finally:
        for buffer in buffers:
            buffer.close()
    return got, ref.slot_mapping(table, 8, 2, positions=at, requests=of)


@pytest.mark.parametrize(("positions", "requests", "told"), NO_PLACE.values(), ids=NO_PLACE)
def test_the_cpu_device_reports_a_token_without_a_place(
    with_option: WithOption, capsys: pytest.CaptureFixture[str], positions: list[int], requests: list[int], told: str
) -> None:
    victim = Device("cpu:5")
    with_option(victim, "kv_write", "-DDRVKIT_CPU_DEVICE")
    with pytest.raises(DriverError, match="LAUNCH_FAILED"):
        map_nowhere(victim, positions, requests)
    assert re.fullmatch(told, capsys.readouterr().out)


@pytest.mark.parametrize(("positions", "requests", "told"), NO_PLACE.values(), ids=NO_PLACE)
def test_a_gpu_takes_a_token_without_a_place_for_padding(
    device: Device, with_option: WithOption, positions: list[int], requests: list[int], told: str
) -> None:
    with_option(device, "kv_write", "-UDRVKIT_CPU_DEVICE")
    got, want = map_nowhere(device, positions, requests)
    assert -1 in want
    assert_equal_bits(got, want)
