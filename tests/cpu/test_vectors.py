"""Each opcode on the CPU device answers as the ISA says and as a GPU did; and what says so is right itself."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from conftest import LONG
from vectors import golden
from vectors.case import Case, Expected, Near, input_width, module_ptx
from vectors.cases import BY_NAME, CASES, by_group
from vectors.floats import BF16, E4M3, E5M2, F16, F32, F64, ROUNDINGS, TF32, WORDS, Bits, Exact, Format, fma
from vectors.inputs import BLOCK, KINDS, inputs
from vectors.run import launch, loaded, operands

from drvkit.cpu import compiler
from drvkit.device import Device, Stream
from drvkit.driver import DriverError
from drvkit.module import Kernel

GROUPS = by_group()


@pytest.fixture(autouse=True)
def _compiled_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits are compared as users get them, not as other tests' kernels are compiled."""
    monkeypatch.setattr(compiler, "LONG", LONG)


# ---- on the CPU device ---------------------------------------------------------------------------------------------


class Kernels:
    """The cases of a group are loaded together, when the first of them is asked for."""

    def __init__(self, device: Device, stream: Stream, stack: ExitStack) -> None:
        self.device, self.stream, self.stack = device, stream, stack
        self.groups: dict[str, tuple[dict[str, Kernel], dict[str, str]]] = {}

    def __getitem__(self, case: Case) -> Kernel:
        if case.group not in self.groups:
            self.groups[case.group] = self.stack.enter_context(loaded(self.device, GROUPS[case.group]))
        kernels, refused = self.groups[case.group]
        assert case.name not in refused, refused[case.name]
        return kernels[case.name]


@pytest.fixture(scope="module")
def kernels() -> Iterator[Kernels]:
    try:
        device = Device("cpu")
    except (DriverError, ValueError, ImportError) as error:
        pytest.skip(f"needs the CPU device: {error}")
    with ExitStack() as stack:
        yield Kernels(device, stack.enter_context(device.stream()), stack)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_opcode(case: Case, kernels: Kernels) -> None:
    given = operands(case, golden.SHORT)
    outputs = launch(kernels[case], kernels.stream, case, given)
    expected = case.expected(*given)
    for at, (want, got) in enumerate(zip(expected, outputs, strict=True)):
        wrong = np.flatnonzero(~golden.agreement(want, got))
        assert not len(wrong), told(at, wrong, given, want, got)
    recorded = golden.records().get(case.name)
    if recorded and recorded.key == golden.key(case):
        # what is approximate keeps the bound that the GPU's answers keep too, see below
        assert golden.exact_digest(expected, outputs) == recorded.short


def told(at: int, wrong: Bits, given: tuple[Bits, ...], want: Expected, got: Bits) -> str:
    first = int(wrong[0])
    shown = [f"{x.reshape(-1)[first * len(x) // len(got)]:#x}" for x in given]
    wanted = want.want[first] if isinstance(want, Near) else np.asarray(getattr(want, "bits", want))[first]
    wanted = wanted if isinstance(want, Near) else f"{wanted:#x}"
    return f"output {at}: {len(wrong)} of {len(got)} differ; [{first}] {shown} -> {got[first]:#x}, want {wanted}"


# ---- what a GPU answered -------------------------------------------------------------------------------------------


def test_every_case_is_recorded() -> None:
    if not golden.records():
        pytest.skip("needs golden files")
    stale = [case.name for case in CASES if getattr(golden.records().get(case.name), "key", None) != golden.key(case)]
    assert not stale
    assert set(golden.records()) == set(BY_NAME)


@pytest.mark.parametrize("group", GROUPS)
def test_the_oracles_say_what_a_gpu_answered(group: str) -> None:
    if not golden.records():
        pytest.skip("needs golden files")
    recorded = golden.records()
    assert not [
        case.name for case in GROUPS[group] if not golden.oracle_agrees(case, recorded[case.name], golden.SHORT)
    ]


# ---- the table and the oracles themselves --------------------------------------------------------------------------


def test_names_are_unique() -> None:
    assert len(BY_NAME) == len(CASES)
    assert len({case.symbol for case in CASES}) == len(CASES)


@pytest.mark.parametrize("group", GROUPS)
def test_the_assembler_takes_every_case(group: str, tmp_path: Path) -> None:
    ptxas = shutil.which("ptxas")
    if ptxas is None:
        pytest.skip("needs ptxas")
    text = tmp_path / "cases.ptx"
    text.write_bytes(module_ptx(GROUPS[group]))
    done = subprocess.run(
        [ptxas, "-arch=sm_90a", "-O0", text, "-o", tmp_path / "cubin"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


KNOWN: list[tuple[str, tuple[int, ...], int]] = [
    ("mul.hi.s32", (0xFFFFFFFF, 2), 0xFFFFFFFF),
    ("mul.hi.u64", (1 << 63, 6), 3),
    ("mul.wide.s16", (0xFFFF, 0x7FFF), 0xFFFF8001),
    ("div.s32", (0xFFFFFFF9, 2), 0xFFFFFFFD),
    ("rem.s32", (0xFFFFFFF9, 2), 0xFFFFFFFF),
    ("sad.s16", (0x8000, 0x7FFF, 1), 0),
    ("add.sat.s32", (0x7FFFFFFF, 1), 0x7FFFFFFF),
    ("mul24.hi.s32", (0x00800000, 0x00800000), 0x40000000),
    ("popc.b64", (0xF00000000000000F,), 8),
    ("clz.b32", (0x00010000,), 15),
    ("bfind.s32", (0xFFFFFFFE,), 0),
    ("bfind.u32", (0,), 0xFFFFFFFF),
    ("bfind.shiftamt.u64", (1,), 63),
    ("fns.b32", (0b10110, 0, 2), 2),
    ("fns.b32", (0b10110, 4, 0xFFFFFFFF), 4),
    ("brev.b32", (0x1,), 0x80000000),
    ("bfe.s32", (0x00000F00, 8, 4), 0xFFFFFFFF),
    ("bfe.u32", (0x80000000, 28, 8), 8),
    ("bfi.b32", (0xFF, 0, 4, 4), 0xF0),
    ("prmt.b32", (0x33221100, 0x77665544, 0x7610), 0x77661100),
    ("prmt.b32", (0x80, 0, 0x8888), 0xFFFFFFFF),
    ("prmt.b32.b4e", (0x33221100, 0x77665544, 0), 0x55667700),
    ("dp4a.s32.s32", (0xFFFFFFFF, 0x01010101, 10), 6),
    ("dp2a.hi.u32.u32", (0x00020003, 0x04050000, 1), 24),
    ("lop3.b32:0x96", (0b1100, 0b1010, 0b0001), 0b0111),
    ("shf.l.clamp.b32", (0x80000000, 1, 33), 0x80000000),
    ("shf.r.wrap.b32", (2, 1, 33), 0x80000001),
    ("shl.b32", (1, 32), 0),
    ("shr.s32", (0x80000000, 99), 0xFFFFFFFF),
    ("szext.wrap.s32", (0x80, 8), 0xFFFFFF80),
    ("bmsk.clamp.b32", (4, 8), 0xFF0),
    ("setp.hi.u16", (0xFFFF, 1), 1),
    ("setp.gt.s16", (0xFFFF, 1), 0),
    ("slct.b32.f32", (1, 2, 0x80000000), 1),
    ("add.rn.f32", (0x3F800000, 0x33800000), 0x3F800000),
    ("add.rp.f32", (0x3F800000, 0x33800000), 0x3F800001),
    ("add.rm.f32", (0x3F800000, 0xBF800000), 0x80000000),
    ("add.f32", (0x7F800000, 0xFF800000), 0x7FFFFFFF),
    ("add.ftz.f32", (1, 1), 0),
    ("sub.sat.f32", (0x40400000, 0x3F800000), 0x3F800000),
    ("mul.rz.f32", (0x7F7FFFFF, 0x40000000), 0x7F7FFFFF),
    ("mul.rn.f32", (0x7F7FFFFF, 0x40000000), 0x7F800000),
    ("fma.rn.f32", (0x3F800001, 0x3F800001, 0xBF800002), 0x28800000),
    ("fma.rn.f64", (0x3FF0000000000001, 0x3FF0000000000001, 0xBFF0000000000002), 0x3970000000000000),
    ("div.rn.f32", (0x3F800000, 0x40400000), 0x3EAAAAAB),
    ("sqrt.rm.f32", (0x40000000,), 0x3FB504F3),
    ("min.f32", (0x7FC00000, 0x3F800000), 0x3F800000),
    ("min.NaN.f32", (0x7FC00000, 0x3F800000), 0x7FFFFFFF),
    ("max.f32", (0x80000000, 0), 0),
    ("max.xorsign.abs.f32", (0xC0000000, 0x3F800000), 0xC0000000),
    ("fma.rn.relu.f16", (0x3C00, 0xBC00, 0), 0),
    ("add.f16x2", (0x3C003C00, 0x3C004000), 0x40004200),
    ("setp.ltu.f32", (0x7FC00000, 0), 1),
    ("setp.lt.f32", (0x7FC00000, 0), 0),
    ("testp.subnormal.f32", (1,), 1),
    ("testp.subnormal.f32", (0,), 0),
    ("testp.normal.f32", (0x80000000,), 1),
    ("mul.rn.f32", (0x00800000, 0x3F7FFFFF), 0x00800000),  # what is a hair below the smallest normal number
    ("mul.rn.ftz.f32", (0x00800000, 0x3F7FFFFF), 0),
    ("fma.rm.ftz.f32", (0x00800000, 0x00800000, 0x80800000), 0x80800000),  # less than a hair
    ("div.rp.ftz.f32", (0x00800000, 0x3F800001), 0),
    ("cvt.sat.s8.s32", (0xFFFFFF00,), 0xFF80),
    ("cvt.s64.s8", (0x80,), 0xFFFFFFFFFFFFFF80),
    ("cvt.rzi.s32.f32", (0x4F000000,), 0x7FFFFFFF),
    ("cvt.rzi.u32.f32", (0xBF800000,), 0),
    ("cvt.rni.s32.f32", (0x40200000,), 2),
    ("cvt.rzi.s32.f32", (0x7FC00000,), 0),
    ("cvt.rzi.s64.f32", (0x7FC00000,), 1 << 63),
    ("cvt.rn.f32.s32", (0x7FFFFFFF,), 0x4F000000),
    ("cvt.rz.f32.u64", (0xFFFFFFFFFFFFFFFF,), 0x5F7FFFFF),
    ("cvt.rn.f16.f32", (0x477FF000,), 0x7C00),
    ("cvt.rz.f16.f32", (0x477FF000,), 0x7BFF),
    ("cvt.rp.ftz.f16.f32", (1,), 1),
    ("cvt.rn.f16.f32", (0x7F800001,), 0x7FFF),
    ("cvt.f32.bf16", (0xFF81,), 0xFF810000),
    ("cvt.rn.f32.f64", (0xFFF4123456789ABC,), 0xFFE091A2),
    ("cvt.rn.bf16.f64", (0x7FF0000000000001,), 0x7FC0),
    ("cvt.rz.tf32.f32", (0xFFC00000,), 0x7FFFE000),
    ("cvt.rna.tf32.f32", (0x7F800001,), 0x7F800000),
    ("cvt.rna.satfinite.tf32.f32", (0xFFC00000,), 0xFFBFE000),
    ("cvt.rn.bf16x2.f32", (0x3F800000, 0x40000000), 0x3F804000),
    ("cvt.rna.tf32.f32", (0x3F801000,), 0x3F802000),
    ("cvt.rn.satfinite.e4m3x2.f32", (0x7F800000, 0x3F800000), 0x7E38),
    ("cvt.rn.satfinite.e5m2x2.f32", (0xFF800000, 0x3F800000), 0xFB3C),
    ("cvt.rn.f16x2.e4m3x2", (0x3801,), 0x3C001800),
    ("cvt.pack.sat.s8.s32.b32", (1000, 0xFFFFFC18, 0x1234), 0x12347F80),
]


@pytest.mark.parametrize(("name", "given", "want"), KNOWN)
def test_an_oracle_knows(name: str, given: tuple[int, ...], want: int) -> None:
    case = BY_NAME[name]
    words = [np.full(BLOCK, value, WORDS[input_width(kind)]) for value, kind in zip(given, case.kinds, strict=True)]
    expected = case.expected(*words)[0]
    got = expected if isinstance(expected, np.ndarray) else getattr(expected, "bits")  # noqa: B009
    assert {int(value) for value in got} == {want}


@pytest.mark.parametrize("format", [F16, BF16, TF32, E4M3, E5M2, F32, F64], ids=lambda format: format.name)
def test_a_number_rounds_to_itself(format: Format) -> None:
    kind = KINDS[format.name if format is not TF32 else "f32"]
    bits = inputs((kind.name,), 1 << 12)[0]
    bits = bits & format.word(~((1 << format.low_zeros) - 1) & (2 * format.sign_bit - 1))
    finite = bits[format.is_finite(bits)]
    for rounding in (*ROUNDINGS, "rna"):
        np.testing.assert_array_equal(format.of(format.value(finite), rounding), finite)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_float32_rounds_alike_by_float64_and_by_integers(rounding: str) -> None:
    a, b, c = inputs(("f32", "f32", "f32"), 1 << 12)
    finite = F32.is_finite(a) & F32.is_finite(b) & F32.is_finite(c)
    x, y, z = (F32.exact(bits[finite], integers=object) for bits in (a, b, c))
    sign = [np.where(each.negative, -1, 1).astype(object) for each in (x, y, z)]
    e = np.minimum(x.e + y.e, z.e)
    total = sign[0] * sign[1] * ((x.m * y.m) << (x.e + y.e - e).astype(object))
    total = total + sign[2] * (z.m << (z.e - e).astype(object))
    whole = F32.round(Exact(np.asarray(total < 0, np.bool_), np.abs(total), e), rounding)
    fast = fma(F32, a, b, c, rounding)[finite]
    some = np.asarray(total != 0, np.bool_)
    np.testing.assert_array_equal(fast[some], whole[some])


def test_inputs_are_the_same_everywhere() -> None:
    digest = hashlib.blake2b(digest_size=8)
    for kind in KINDS:
        for array in (*inputs((kind,), BLOCK), *inputs((kind, kind, kind), 1 << 12)):
            digest.update(array.tobytes())
    assert digest.hexdigest() == "5338ab4ea779d862"


def test_small_domains_are_gone_through_whole() -> None:
    for kind in ("b8", "b16", "f16", "bf16", "e4m3"):
        assert len(np.unique(inputs((kind,), BLOCK)[0])) == 1 << KINDS[kind].width
    for half in np.ascontiguousarray(inputs(("f16x2",), BLOCK)[0]).view(np.uint16).reshape(-1, 2).T:
        assert len(np.unique(half)) == 1 << 16
