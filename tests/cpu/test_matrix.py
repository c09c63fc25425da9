"""mma.sync of each shape and type, and the instructions that move its fragments."""

from __future__ import annotations

from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from one_warp import Words, kernel, run

from drvkit.cpu.fault import Fault, ImageError
from drvkit.cpu.program import load

RANDOM = np.random.default_rng()
LANES = np.arange(32)
G, T = LANES // 4, LANES % 4  # "groupID" and "threadID_in_group" of the ISA
TYPES = {
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "tf32": np.dtype(np.float32),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "s8": np.dtype(np.int8),
    "u8": np.dtype(np.uint8),
    "s32": np.dtype(np.int32),
}


class Form(NamedTuple):
    shape: str
    d: str
    a: str
    b: str

    @property
    def sizes(self) -> tuple[int, int]:
        """Rows of A, and k."""
        return int(self.shape[1 : self.shape.index("n")]), int(self.shape[self.shape.index("k") + 1 :])

    @property
    def instruction(self) -> str:
        return f"mma.sync.aligned.{self.shape}.row.col.{self.d}.{self.a}.{self.b}.{self.d}"


def forms() -> list[Form]:
    found = [Form(f"m16n8k{k}", d, "f16", "f16") for k in (8, 16) for d in ("f16", "f32")]
    found += [Form(f"m16n8k{k}", "f32", "bf16", "bf16") for k in (8, 16)]
    found += [Form(f"m16n8k{k}", "f32", "tf32", "tf32") for k in (4, 8)]
    found += [Form(f"m16n8k{k}", "s32", a, b) for k in (16, 32) for a in ("s8", "u8") for b in ("s8", "u8")]
    found += [Form("m8n8k16", "s32", "s8", "u8"), Form("m16n8k16", "f32", "e4m3", "e5m2")]
    fp8 = ("e4m3", "e5m2")
    found += [Form("m16n8k32", d, a, b) for d in ("f16", "f32") for a in fp8 for b in fp8]
    return found + [Form(shape, "f64", "f64", "f64") for shape in ("m8n8k4", "m16n8k4", "m16n8k8", "m16n8k16")]


FORMS = forms()


# Fragments: element i of lane l is matrix[rows[i, l], columns[i, l]], as the ISA's formulas have it


def places_of_a(form: Form) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    rows, depth = form.sizes
    per = max(1, 4 // TYPES[form.a].itemsize)  # elements of a register
    row, column = [], []
    for i in range(rows * depth // 32):
        register = i // per
        row.append(G + 8 * (register % 2 if rows == 16 else 0))
        column.append(per * T + i % per + 4 * per * (register // (rows // 8)))
    return np.array(row), np.array(column)


def places_of_b(form: Form) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    _, depth = form.sizes
    per = max(1, 4 // TYPES[form.b].itemsize)
    row = [per * T + i % per + 4 * per * (i // per) for i in range(depth * 8 // 32)]
    return np.array(row), np.array([G] * len(row))


def places_of_c(form: Form) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    rows, _ = form.sizes
    count = rows * 8 // 32
    return np.array([G + 8 * (i // 2) for i in range(count)]), np.array([2 * T + i % 2 for i in range(count)])


def to_words(matrix: NDArray[np.generic], places: tuple[NDArray[np.int64], NDArray[np.int64]]) -> Words:
    """The 32-bit registers of a matrix; a double takes two."""
    per_lane = np.ascontiguousarray(matrix[places].T)
    return np.ascontiguousarray(per_lane.view(np.uint32).T)


def from_words(found: Words, form: Form) -> NDArray[np.generic]:
    rows, _ = form.sizes
    per_lane = np.ascontiguousarray(found.T).view(TYPES[form.d])
    matrix = np.zeros((rows, 8), TYPES[form.d])
    matrix[places_of_c(form)] = per_lane.T
    return matrix


def multiplied(
    form: Form, a: NDArray[np.generic], b: NDArray[np.generic], c: NDArray[np.generic], modifier: str = ""
) -> NDArray[np.generic]:
    """D, from one run of the instruction."""
    fragments = [to_words(a, places_of_a(form)), to_words(b, places_of_b(form)), to_words(c, places_of_c(form))]
    at, body = 0, ""
    names: list[list[str]] = []
    for fragment in fragments:
        registers = [f"%a{at + n}" for n in range(len(fragment))]
        if form.d == "f64":
            doubles = [f"%g{len(names) * 8 + n}" for n in range(len(registers) // 2)]
            body += "".join(
                f"mov.b64 {g}, {{{registers[2 * n]}, {registers[2 * n + 1]}}};\n" for n, g in enumerate(doubles)
            )
            registers = doubles
        names.append(registers)
        at += len(fragment)
    count = len(fragments[2])
    results = [f"%d{n}" for n in range(count)] if form.d != "f64" else names[2]
    lists = [f"{{{', '.join(each)}}}" for each in (results, *names)]
    body += form.instruction.replace(".col.", f".col{modifier}.") + f" {', '.join(lists)};\n"
    if form.d == "f64":
        body += "".join(f"mov.b64 {{%d{2 * n}, %d{2 * n + 1}}}, {g};\n" for n, g in enumerate(results))
    return from_words(run(body, np.concatenate(fragments), count), form)


def matrices(form: Form, *, small: bool) -> list[NDArray[np.generic]]:
    """A, B and C at random; ``small``: of integers so small that all sums are exact."""
    rows, depth = form.sizes
    found = []
    for type_, shape in ((form.a, (rows, depth)), (form.b, (depth, 8)), (form.d, (rows, 8))):
        if small:
            low = 0 if type_ == "u8" else -4
            found.append(RANDOM.integers(low, 5, shape).astype(TYPES[type_]))
        elif type_ in ("s8", "u8", "s32"):
            info = np.iinfo(TYPES[type_])
            found.append(RANDOM.integers(info.min, info.max, shape, dtype=TYPES[type_], endpoint=True))
        else:
            found.append(RANDOM.standard_normal(shape).astype(np.float32).astype(TYPES[type_]))
    return found


def exact(a: NDArray[np.generic], b: NDArray[np.generic], c: NDArray[np.generic]) -> NDArray[np.float64]:
    left, right, addend = (each.astype(np.float64) for each in (a, b, c))
    return left @ right + addend


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.instruction[17:])
def test_sums_that_are_exact_are_exact(form: Form) -> None:
    a, b, c = matrices(form, small=True)
    np.testing.assert_array_equal(multiplied(form, a, b, c).astype(np.float64), exact(a, b, c))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.instruction[17:])
def test_sums_are_rounded_as_the_accumulator_is(form: Form) -> None:
    """Each of k sums in f32 errs by half a unit in the last place of all magnitudes at most; f16 is rounded to once."""
    a, b, c = matrices(form, small=False)
    if form.a == "tf32":
        a, b = (each.view(np.uint32) & np.uint32(0xFFFFE000) for each in (a, b))
        a, b = a.view(np.float32), b.view(np.float32)
    found = multiplied(form, a, b, c)
    if form.d == "s32":
        wide = a.astype(np.int64) @ b.astype(np.int64) + c.astype(np.int64)
        np.testing.assert_array_equal(found, wide.astype(np.int32))
        return
    magnitude = exact(np.abs(a.astype(np.float64)), np.abs(b.astype(np.float64)), np.abs(c.astype(np.float64)))
    _, depth = form.sizes
    allowed = magnitude * depth * 2.0 ** (-53 if form.d == "f64" else -24)
    expected = exact(a, b, c)
    if form.d == "f16":
        allowed += np.spacing(np.abs(expected).astype(np.float16)).astype(np.float64) / 2
    assert np.all(np.abs(found.astype(np.float64) - expected) <= allowed)


def test_low_bits_of_tf32_are_not_looked_at() -> None:
    form = Form("m16n8k8", "f32", "tf32", "tf32")
    a, b, c = matrices(form, small=False)
    noise = RANDOM.integers(0, 1 << 13, a.shape, dtype=np.uint32)
    cut = (a.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    noisy = (cut.view(np.uint32) | noise).view(np.float32)
    np.testing.assert_array_equal(multiplied(form, noisy, b, c), multiplied(form, cut, b, c))


@pytest.mark.parametrize("type_", ["e4m3", "e5m2", "f16", "bf16"])
def test_every_number_of_a_narrow_type_keeps_its_value(type_: str) -> None:
    """A times one: each element of A by itself, subnormals, infinities and NaN with it."""
    shape = "m16n8k32" if type_[0] == "e" else "m16n8k16"
    form = Form(shape, "f32", type_, type_)
    rows, depth = form.sizes
    bits = np.uint8 if type_[0] == "e" else np.uint16
    values = np.arange(256).astype(bits) * (1 if type_[0] == "e" else 257)
    numbers = values.astype(bits).view(TYPES[type_]).reshape(-1, 8)  # each row of B against a unit vector of A
    for first in range(0, 32, depth):
        b = numbers[first : first + depth]
        for half in range(0, depth, rows):
            a = np.zeros((rows, depth), TYPES[type_])
            a[np.arange(rows), half + np.arange(rows)] = 1
            part = np.zeros_like(b)
            part[half : half + rows] = b[half : half + rows]
            special = ~np.isfinite(part.astype(np.float32)).all(axis=0)
            found = multiplied(form, a, part, np.zeros((rows, 8), np.float32)).astype(np.float32)
            expected = part[half : half + rows].astype(np.float32)
            np.testing.assert_array_equal(found[:, ~special], expected[:, ~special])
            # zero times infinity is NaN, all over a column
            assert np.isnan(found[:, special]).sum() >= special.sum() * (rows - 1)


def test_nan_results_are_canonical() -> None:
    form = Form("m16n8k16", "f32", "f16", "f16")
    a, b, c = matrices(form, small=True)
    c[3, 5] = np.uint32(0xFFC12345).view(np.float32)
    a[7, 2] = np.inf
    found = multiplied(form, a, b, c)
    nan = np.isnan(found)
    assert nan[3, 5]
    np.testing.assert_array_equal(nan[7], b[2] == 0)
    np.testing.assert_array_equal(found.view(np.uint32)[nan], 0x7FFFFFFF)


def test_satfinite_stays_at_the_limits() -> None:
    form = Form("m16n8k32", "s32", "s8", "s8")
    a, b, c = matrices(form, small=True)
    limits = np.iinfo(np.int32)
    c[:8], c[8:] = limits.max - 3, limits.min + 3
    wide = a.astype(np.int64) @ b.astype(np.int64) + c.astype(np.int64)
    np.testing.assert_array_equal(multiplied(form, a, b, c, ".satfinite"), np.clip(wide, limits.min, limits.max))
    np.testing.assert_array_equal(multiplied(form, a, b, c), wide.astype(np.int32))


@pytest.mark.parametrize(
    ("instruction", "operands"),
    [
        ("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32", "{%f1,%f2}, {%r1}, {%r2}, {%f1,%f2}"),
        ("mma.sync.aligned.m16n8k64.row.col.s32.s4.s4.s32", "{%r1}, {%r1}, {%r1}, {%r1}"),
        ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f16", "{%r1}, {%r1}, {%r1}, {%r1}"),
        ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.f16.f32", "{%r1}, {%r1}, {%r1}, {%r1}"),
        ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "{%r1}, {%r1}, {%r1}, {%r1}"),
        ("mma.sp.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "{%r1}, {%r1}, {%r1}, {%r1}, %r2, 0"),
        ("ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8", "{%r1, %r2}, [%w1]"),
        ("ldmatrix.sync.aligned.m8n8.x2.shared.b16", "{%r1}, [%w1]"),
    ],
)
def test_other_forms_are_refused_by_name(instruction: str, operands: str) -> None:
    with pytest.raises(ImageError, match=instruction.replace(".", r"\.")):
        load(kernel(f"{instruction} {operands};", 0, 0))


def test_64_products_compile_into_one_function() -> None:
    """Each adds its product to the same C."""
    form = Form("m16n8k16", "f32", "f16", "f16")
    a, b, c = matrices(form, small=True)
    fragments = [to_words(a, places_of_a(form)), to_words(b, places_of_b(form)), to_words(c, places_of_c(form))]
    body = "".join(f"mov.b32 %f{n}, %a{6 + n};\n" for n in range(4))
    sums = "{%f0, %f1, %f2, %f3}"
    body += f"{form.instruction} {sums}, {{%a0, %a1, %a2, %a3}}, {{%a4, %a5}}, {sums};\n" * 64
    body += "".join(f"mov.b32 %d{n}, %f{n};\n" for n in range(4))
    found = from_words(run(body, np.concatenate(fragments), 4), form)
    expected = 64 * exact(a, b, np.zeros_like(c)) + c.astype(np.float64)
    np.testing.assert_array_equal(found.astype(np.float64), expected)


# Fragments in shared memory


def halves(found: Words) -> NDArray[np.uint16]:
    """The 8 x 8 matrix of one register."""
    return np.ascontiguousarray(found).view(np.uint16).reshape(8, 8)


STAGED = "mov.u32 %r1, tile; shl.b32 %r2, %lane, 4; add.u32 %r1, %r1, %r2;"  # lane l has row l of 16 bytes
SCATTERED = "mov.u32 %r3, tile; xor.b32 %r2, %lane, 5; shl.b32 %r2, %r2, 4; add.u32 %r3, %r3, %r2;"


@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix_gives_the_rows_that_lanes_point_at(count: int, trans: str) -> None:
    given = RANDOM.integers(0, 1 << 32, (4, 32), dtype=np.uint32)
    registers = ", ".join(f"%d{n}" for n in range(count))
    body = f"""{STAGED} {SCATTERED}
    st.shared.v4.b32 [%r1], {{%a0, %a1, %a2, %a3}};
    bar.warp.sync -1;
    ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{registers}}}, [%r3];
    """
    found = run(body, given, count)
    rows = np.ascontiguousarray(given.T).view(np.uint16)  # of 8 numbers each
    for number in range(count):
        matrix = rows[[(8 * number + r) ^ 5 for r in range(8)]]
        np.testing.assert_array_equal(halves(found[number]), matrix.T if trans else matrix)


@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix_puts_rows_where_lanes_point_at(count: int, trans: str) -> None:
    given = RANDOM.integers(0, 1 << 32, (4, 32), dtype=np.uint32)
    registers = ", ".join(f"%a{n}" for n in range(count))
    body = f"""{STAGED} {SCATTERED}
    mov.b32 %r4, 0;
    st.shared.v4.b32 [%r1], {{%r4, %r4, %r4, %r4}};
    bar.warp.sync -1;
    stmatrix.sync.aligned.m8n8.x{count}{trans}.shared::cta.b16 [%r3], {{{registers}}};
    bar.warp.sync -1;
    ld.shared.v4.b32 {{%d0, %d1, %d2, %d3}}, [%r1];
    """
    found = run(body, given, 4)
    rows = np.ascontiguousarray(found.T).view(np.uint16)
    for number in range(count):
        matrix = halves(given[number])
        np.testing.assert_array_equal(rows[[(8 * number + r) ^ 5 for r in range(8)]], matrix.T if trans else matrix)
    untouched = [r ^ 5 for r in range(8 * count, 32)]
    assert not rows[untouched].any()


def test_ldmatrix_looks_only_at_the_addresses_that_count() -> None:
    body = """
    mov.u32 %r1, tile; shl.b32 %r2, %lane, 4; add.u32 %r1, %r1, %r2;
    st.shared.v4.b32 [%r1], {%lane, %lane, %lane, %lane};
    setp.gt.u32 %p1, %lane, 7; selp.b32 %r1, 0x7ffffff3, %r1, %p1;
    ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%d0}, [%r1];
    """
    np.testing.assert_array_equal(run(body)[0], G)


def test_ldmatrix_takes_generic_addresses() -> None:
    body = """
    mov.u64 %w1, tile; cvta.shared.u64 %w1, %w1; mul.wide.u32 %w2, %lane, 16; add.s64 %w1, %w1, %w2;
    st.v4.b32 [%w1], {%lane, %lane, %lane, %lane};
    ldmatrix.sync.aligned.m8n8.x1.b16 {%d0}, [%w1];
    """
    np.testing.assert_array_equal(run(body)[0], G)


def test_ldmatrix_checks_its_rows() -> None:
    last_rows = "{%lane, %lane, %lane, %lane}"
    body = f"""
    mov.u32 %r1, tile; mad.lo.u32 %r1, %lane, 16, %r1; st.shared.v4.b32 [%r1+1536], {last_rows};
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%d0, %d1, %d2, %d3}}, [%r1+OFFSET];
    """
    for offset, report in {
        0: "nothing was written",
        1544: "not a multiple of 16",
        1792: r"thread \(16, 0, 0\).*byte 2048 of 2048 bytes of shared memory",
    }.items():
        with pytest.raises(Fault, match=f"ldmatrix.*{report}"):
            run(body.replace("OFFSET", str(offset)), results=4)


def test_movmatrix_transposes() -> None:
    given = RANDOM.integers(0, 1 << 32, (1, 32), dtype=np.uint32)
    found = run("movmatrix.sync.aligned.m8n8.trans.b16 %d0, %a0;", given)
    np.testing.assert_array_equal(halves(found[0]), halves(given[0]).T)
