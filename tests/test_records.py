"""Rows of latent caches: codes, scales, pages; numpy by exact arithmetic, and the device functions against numpy."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from compare import assert_equal_bits
from numpy.typing import NDArray

from drvkit.device import Device, Stream
from drvkit.records import KEY_BF16, KEY_FP8, KEY_MXFP4, KV_BF16, KV_FP8, Format, power_of_two_above
from drvkit.source import Source

bfloat16 = ml_dtypes.bfloat16
FORMATS = {"kv fp8": KV_FP8, "kv bf16": KV_BF16, "key mxfp4": KEY_MXFP4, "key fp8": KEY_FP8, "key bf16": KEY_BF16}
each_format = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)

# What codes stand for, by the formats' definitions. e4m3: 0x7f is NaN.
E4M3 = [m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][:127]
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]

EVERY_BF16 = np.arange(2**16, dtype=np.uint16).view(bfloat16).astype(np.float32)
POSITIVE = EVERY_BF16[:0x7F80]  # finite ones from 0 on


def nearest(x: float, numbers: list[float]) -> int:
    """The code of the number that is nearest to ``x``, from 0 on; of two the even one."""
    distance = [abs(number - x) for number in numbers]
    return min(range(len(numbers)), key=lambda code: (distance[code], code % 2))


def in_rows(x: NDArray[np.float32], format: Format, block: int, first: float) -> NDArray[np.float32]:
    """Rows whose blocks begin with ``first``, which gives them their scale, and go on with the values of ``x``."""
    blocks = np.zeros((-(-len(x) // (block - 1)), block), np.float32)
    blocks[:, 0] = first
    blocks[:, 1:] = np.pad(x, (0, blocks.size - len(blocks) - len(x))).reshape(-1, block - 1)
    per_row = (448 if format is KV_FP8 else format.dim) // block
    rows = np.zeros((-(-len(blocks) // per_row), format.dim), np.float32)
    for i, each in enumerate(blocks):
        rows[i // per_row, i % per_row * block :][:block] = each
    return rows


def out_of_rows(codes: NDArray[Any], block: int, count: int) -> list[int]:
    flat: list[int] = codes.reshape(-1, block)[:, 1:].reshape(-1)[:count].tolist()
    return flat


def nibbles(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The even element is the low one."""
    return np.stack([values & 0xF, values >> 4], axis=-1).reshape(*values.shape[:-1], -1)


def on_both_sides(numbers: list[float]) -> NDArray[np.float32]:
    """All numbers, all ties between two, what is a bfloat16 beside either, and the negative of each."""
    exact = np.array([*numbers, *((a + b) / 2 for a, b in pairwise(numbers))])
    assert (exact.astype(bfloat16) == exact).all()
    bits = exact.astype(bfloat16).view(np.uint16)
    beside = np.concatenate([bits, bits + 1, bits[exact > 0] - 1]).view(bfloat16).astype(np.float32)
    within: NDArray[np.float32] = beside[beside <= numbers[-1]]
    return np.concatenate([within, -within])


# ---- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exponent", [-18, 0, 100])
@pytest.mark.parametrize("format", [KV_FP8, KEY_FP8], ids=["kv", "key"])
def test_every_code_of_e4m3_and_every_tie(format: Format, exponent: int) -> None:
    block = 64 if format is KV_FP8 else 128
    x = on_both_sides(E4M3)
    rows = in_rows(x, format, block, 448) * np.float32(2.0**exponent)
    values, scales = format.encode(rows)
    narrow = values[:, :448] if format is KV_FP8 else values
    for value, code in zip(x.tolist(), out_of_rows(narrow, block, len(x)), strict=True):
        assert code & 0x7F == nearest(abs(value), E4M3), value
        assert code >> 7 == np.signbit(value), value
    assert set(range(127)) | {128 + code for code in range(127)} <= set(narrow.flatten().tolist())
    if format is KV_FP8:
        assert (scales[:-1, :7] == 127 + exponent).all()
        assert (scales[:, 7] == 0).all()
    else:
        assert (scales.copy().view(np.float32) == 2.0**exponent).all()
    decoded = format.decode(values, scales)[:, : narrow.shape[1]].reshape(-1, block)[:, 1:].reshape(-1)[: len(x)]
    exact = [E4M3[nearest(abs(value), E4M3)] * 2.0**exponent for value in x.tolist()]
    assert_equal_bits(decoded, np.copysign(np.array(exact, np.float32), x))


@pytest.mark.parametrize("exponent", [-126, 0, 100])
def test_every_code_of_e2m1_and_every_tie(exponent: int) -> None:
    x = on_both_sides([float(number) for number in E2M1])
    rows = in_rows(x, KEY_MXFP4, 32, 6) * np.float32(2.0**exponent)
    values, scales = KEY_MXFP4.encode(rows)
    codes = out_of_rows(nibbles(values), 32, len(x))
    subnormal = np.abs(x) * 2.0**exponent < 2.0**-126  # of bfloat16 and float32: some ties have no such neighbour
    for value, code, unsure in zip(x.tolist(), codes, subnormal.tolist(), strict=True):
        if not unsure:
            assert code == nearest(abs(value), list(map(float, E2M1))) | np.signbit(value) << 3, value
    if exponent != -126:
        assert set(codes) == set(range(16))
        decoded = KEY_MXFP4.decode(values, scales).reshape(-1, 32)[:, 1:].reshape(-1)[: len(x)]
        exact = [E2M1[code & 7] * 2.0**exponent for code in codes]
        assert_equal_bits(decoded, np.copysign(np.array(exact, np.float32), x))
    assert (scales[:-1] == 127 + exponent).all()


def test_the_ties_of_e2m1_by_name() -> None:
    x = np.zeros(128, np.float32)
    x[:9] = 6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.0
    values, _ = KEY_MXFP4.encode(x)
    assert nibbles(values)[:9].tolist() == [7, 0, 2, 2, 4, 4, 6, 6, 8]  # 6, 0, 1, 1, 2, 2, 4, 4, -0


@pytest.mark.parametrize(("format", "most", "floor"), [(KV_FP8, 448, 1e-4), (KEY_FP8, 448, 1e-4), (KEY_MXFP4, 6, 0)])
def test_a_scale_is_the_least_power_of_two_that_is_enough(format: Format, most: int, floor: float) -> None:
    block = {KV_FP8: 64, KEY_FP8: 128, KEY_MXFP4: 32}[format]
    per_row = (448 if format is KV_FP8 else format.dim) // block
    largest = np.pad(POSITIVE, (0, -len(POSITIVE) % per_row))
    rows = np.zeros((len(largest) // per_row, format.dim), np.float32)
    rows[:, 5 : per_row * block : block] = largest.reshape(-1, per_row)
    rows[::2] *= -1
    _, scales = format.encode(rows)
    if format is KEY_FP8:
        exponents = np.log2(scales.copy().view(np.float32).astype(np.float64)).reshape(-1)
        assert (exponents == np.floor(exponents)).all()
    else:
        exponents = scales[:, :per_row].reshape(-1).astype(np.float64) - 127
    size = largest.astype(np.float64)
    enough, half = most * np.exp2(exponents), most * np.exp2(exponents - 1)  # exact in float64
    assert (enough >= size).all()
    least = (half < size) | (half < floor) | (exponents == -126)
    assert least.all(), size[~least]
    if floor:
        assert exponents.min() == -22  # 448 * 2^-22 is the first one from 1e-4 on
    else:
        assert exponents.min() == -126


@pytest.mark.parametrize("exponent", [-20, 0, 9, 119])
def test_scales_at_their_boundaries(exponent: int) -> None:
    rows = np.zeros((3, 512), np.float32)
    edge = np.array([448 * 2.0**exponent], bfloat16).view(np.uint16)
    rows[:, 0] = np.concatenate([edge - 1, edge, edge + 1]).view(bfloat16).astype(np.float32)
    values, scales = KV_FP8.encode(rows)
    assert scales[:, 0].tolist() == [127 + exponent, 127 + exponent, 128 + exponent]
    assert values[:, 0].tolist() == [0x7E, 0x7E, 0x76]  # 448, 448, 224 of the next scale
    keys = rows[:, :128] * np.float32(6 / 448)
    assert KEY_MXFP4.encode(keys)[1][1, 0] == 127 + exponent


def test_a_block_of_nothing_has_the_least_scale() -> None:
    zero = np.zeros((1, 512), np.float32)
    values, scales = KV_FP8.encode(zero)
    assert not values.any()
    assert scales.tolist() == [[105] * 7 + [0]]
    assert KEY_MXFP4.encode(zero[:, :128])[1].tolist() == [[1] * 4]
    assert KEY_FP8.encode(zero[:, :128])[1].copy().view(np.float32) == 2.0**-22
    for format in FORMATS.values():
        assert_equal_bits(format.decode(*format.encode(zero[:, : format.dim])), zero[:, : format.dim])


def test_what_is_not_finite() -> None:
    rows = np.ones((1, 512), np.float32)
    rows[0, 0], rows[0, 64], rows[0, 65], rows[0, 128:192] = np.inf, -np.inf, np.nan, np.nan
    rows[0, 192], rows[0, 193], rows[0, 448], rows[0, 449] = 448, np.nan, np.inf, np.nan
    values, scales = KV_FP8.encode(rows)
    assert scales[0].tolist() == [247, 247, 247, 127, *[119] * 3, 0]  # infinity counts as the largest bfloat16
    assert values[0, [0, 64]].tolist() == [0x7E, 0xFE]
    decoded = KV_FP8.decode(values, scales)
    assert_equal_bits(np.isnan(decoded), np.isnan(rows))
    assert decoded[0, 194:256].tolist() == [1] * 62  # NaN does not count
    assert decoded[0, 448] == np.inf
    keys, exponents = KEY_MXFP4.encode(rows[:, :128])
    assert nibbles(keys)[0, [0, 64, 65]].tolist() == [7, 15, 7]  # e2m1 has no NaN: it becomes 6
    assert exponents[0].tolist() == [253, 125, 253, 125]


def test_rows_are_rounded_to_bfloat16_before_they_are_encoded(rng: np.random.Generator) -> None:
    x = np.ones((1, 512), np.float32)
    x[0, 1] = 1.0625 + 2.0**-12  # above a tie of e4m3, and on it once it is a bfloat16
    values, _ = KEY_FP8.encode(np.where(np.arange(128) == 0, 448, x[:, :128]))
    assert values[0, 1] == 0x38
    wide = rng.normal(size=(3, 512))
    for format in FORMATS.values():
        rows = wide[:, : format.dim]
        narrow = rows.astype(bfloat16)
        for got, want in zip(format.encode(rows), format.encode(narrow), strict=True):
            assert_equal_bits(got, want)
    assert_equal_bits(KV_BF16.decode(*KV_BF16.encode(wide)), wide.astype(bfloat16).astype(np.float32))


def test_where_the_parts_of_a_row_are() -> None:
    row = np.zeros((1, 512), np.float32)
    row[0, [0, 63, 64, 447, 448, 511]] = 448, -448, 896, 448 * 8, 1, -2
    values, scales = KV_FP8.encode(row)
    assert values.shape == (1, 576)
    assert np.flatnonzero(values).tolist() == [0, 63, 64, 447, 448, 449, 575]
    assert values[0, [0, 63, 64, 447]].tolist() == [0x7E, 0xFE, 0x7E, 0x7E]
    assert values[0, [448, 449, 574, 575]].tolist() == [0x80, 0x3F, 0x00, 0xC0]  # bfloat16 1 and -2
    assert scales[0].tolist() == [127, 128, 105, 105, 105, 105, 130, 0]
    key = np.zeros((1, 128), np.float32)
    key[0, [0, 1, 32, 127]] = 0.5, 6, -12, 3
    values, scales = KEY_MXFP4.encode(key)
    assert np.flatnonzero(values).tolist() == [0, 16, 63]
    assert values[0, [0, 16, 63]].tolist() == [0x71, 0x0F, 0x70]
    assert scales[0].tolist() == [127, 128, 1, 126]


def test_the_power_of_two_above() -> None:
    x = np.array([1, 1 + 2.0**-23, 2 - 2.0**-23, 2, 2.0**-126, 3e38], np.float32)
    powers, exponents = power_of_two_above(x)
    assert powers[:5].tolist() == [1, 2, 2, 2, 2.0**-126]
    assert exponents.tolist() == [127, 128, 128, 128, 1, 255]


# ---- pages -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format", "page_size", "nbytes"),
    [
        *((KV_FP8, 64, 37440), (KV_FP8, 2, 1728), (KV_FP8, 1, 1152), (KV_BF16, 64, 65536), (KEY_MXFP4, 64, 4352)),
        *((KEY_MXFP4, 1, 80), (KEY_FP8, 64, 8448), (KEY_BF16, 2, 512)),
    ],
)
def test_the_bytes_of_a_page(format: Format, page_size: int, nbytes: int) -> None:
    assert format.page_bytes(page_size) == nbytes


def test_the_bytes_of_a_row() -> None:
    assert [format.nbytes for format in FORMATS.values()] == [584, 1024, 68, 132, 256]


@each_format
@pytest.mark.parametrize("page_size", [1, 2, 64])
def test_rows_come_back_from_where_they_were_put(format: Format, page_size: int, rng: np.random.Generator) -> None:
    pages, count = 5, 2 * page_size
    slots = rng.permutation(pages * page_size)[:count]
    values = rng.integers(0, 256, (count + 1, format.value_bytes), np.uint8)
    scales = rng.integers(0, 256, (count + 1, format.scale_bytes), np.uint8)
    pool = np.full((pages, format.page_bytes(page_size)), 0xA5, np.uint8)
    format.put(pool, np.append(slots, -1), page_size, values, scales)
    got_values, got_scales = format.rows(pool, slots, page_size)
    assert_equal_bits(got_values, values[:count])
    assert_equal_bits(got_scales, scales[:count])

    want = np.full_like(pool, 0xA5)  # values of all entries, then scales of all
    for i, slot in enumerate(slots.tolist()):
        page, place = divmod(slot, page_size)
        want[page, place * format.value_bytes :][: format.value_bytes] = values[i]
        want[page, page_size * format.value_bytes + place * format.scale_bytes :][: format.scale_bytes] = scales[i]
    assert_equal_bits(pool, want)


# ---- on the device ---------------------------------------------------------------------------------------------------

KERNEL = Source.from_text(
    """
#include "dk/records.cuh"

// Of each x: the scale of a block of which it is the largest, for e4m3 and for e2m1; and both codes.
__global__ void codes(const float* x, unsigned char* made, int n) {
  const int i = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= n) return;
  const unsigned four = dk::e4m3_of(x[i], x[i + 1], x[i + 2], x[i + 3]);
  const unsigned nibbles =
      dk::e2m1_of(__floats2bfloat162_rn(x[i], x[i + 1]), __floats2bfloat162_rn(x[i + 2], x[i + 3]));
  for (int j = 0; j < 4; ++j) {
    const float size = fabsf(x[i + j]);
    unsigned char* const own = made + 4 * (i + j);
    own[0] = dk::exponent_of_e4m3(size);
    own[1] = dk::exponent_of_e2m1(size);
    own[2] = four >> 8 * j;
    own[3] = nibbles >> 4 * j & 0xf;
  }
}

// Powers of two and their inverses by exponent, from 1 to 253.
__global__ void powers(float* power, float* inverse) {
  const unsigned exponent = threadIdx.x + 1;
  power[threadIdx.x] = dk::power_of_two(exponent);
  inverse[threadIdx.x] = dk::inverse_power_of_two(exponent);
}
""",
    "records_of_tests.cu",
)


def in_numpy(x: NDArray[np.float32]) -> NDArray[np.uint8]:
    """What the kernel `codes` makes of ``x``, by the formats' own encoders."""
    made = np.empty((len(x), 4), np.uint8)
    count = -(-len(x) // 28) * 28  # 7 blocks of a row of the window, 4 of a key
    padded = np.pad(x, (0, count - len(x)))
    rows = np.zeros((count // 7, 512), np.float32)
    rows[:, :448] = np.repeat(padded.reshape(-1, 7), 64, axis=1)
    made[:, 0] = KV_FP8.encode(rows)[1][:, :7].reshape(-1)[: len(x)]
    keys = np.repeat(padded.reshape(-1, 4), 32, axis=1)
    made[:, 1] = KEY_MXFP4.encode(keys)[1].reshape(-1)[: len(x)]
    # Codes at scale 1, which a first element of its own sees to.
    within = np.clip(x, -448, 448)
    rows = in_rows(within, KV_FP8, 64, 448)
    made[:, 2] = out_of_rows(KV_FP8.encode(rows)[0][:, :448], 64, len(x))
    rows = in_rows(np.clip(x, -6, 6), KEY_MXFP4, 32, 6)
    made[:, 3] = out_of_rows(nibbles(KEY_MXFP4.encode(rows)[0]), 32, len(x))
    return made


def test_the_device_has_the_same_scales_and_codes_for_every_bfloat16(device: Device, stream: Stream) -> None:
    x = EVERY_BF16
    with (
        device.module(KERNEL) as module,
        device.array(x) as given,
        device.array(np.zeros((len(x), 4), np.uint8)) as made,
    ):
        module.kernel("codes").launch(stream, grid=len(x) // 1024, block=256, args=(given, made, len(x)))
        got = made.numpy(stream)
    want = in_numpy(x)
    want[np.isnan(x), 2] &= 0x7F  # the instruction's NaN has no sign, numpy's has
    for i, what in enumerate(("scale of e4m3", "scale of e2m1", "e4m3", "e2m1")):
        differs = got[:, i] != want[:, i]
        assert not differs.any(), (what, x[differs][:9], got[differs, i][:9], want[differs, i][:9])


def test_the_device_has_the_powers_of_two(device: Device, stream: Stream) -> None:
    with (
        device.module(KERNEL) as module,
        device.array(np.zeros(253, np.float32)) as power,
        device.array(np.zeros(253, np.float32)) as inverse,
    ):
        module.kernel("powers").launch(stream, grid=1, block=253, args=(power, inverse))
        exponents = np.arange(1, 254) - 127.0
        assert_equal_bits(power.numpy(stream), np.exp2(exponents).astype(np.float32))
        assert_equal_bits(inverse.numpy(stream), np.exp2(-exponents).astype(np.float32))
