"""multimem: each form of the ISA beside numpy; what is refused, what is a fault; an all-reduce of several devices."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from team import Team

import drvkit as dk
from drvkit.cpu.explore import Schedule
from drvkit.cpu.fault import Fault, ImageError
from drvkit.cpu.memory import memory
from drvkit.cpu.order import tracker
from drvkit.cpu.program import load

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MODES = ("checked", "unchecked", "raced", "explored")
Bytes = NDArray[np.uint8]
Array = NDArray[Any]


@pytest.fixture(autouse=True)
def _multicast(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is allowed: this is the CPU device."""
    for name in ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DRVKIT_ENABLE_MULTICAST", "1")


@pytest.fixture
def team() -> Iterator[Callable[[int], Team]]:
    """``team(n)``: memory of n devices behind one address."""
    made: list[Team] = []

    def make(count: int, *, bound: bool = True) -> Team:
        made.append(Team(count, bound=bound))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture(autouse=True)
def _tracked_as_before() -> Iterator[None]:
    before = tracker.on
    yield
    if not before:
        tracker.end()


# ---- forms ---------------------------------------------------------------------------------------------------------

DTYPES: dict[str, Any] = {
    **{f"{kind}{bits}": np.dtype(f"{'i' if kind == 's' else 'u'}{bits // 8}") for kind in "usb" for bits in (32, 64)},
    **{f"f{bits}": np.dtype(f"f{bits // 8}") for bits in (16, 32, 64)},
    "bf16": np.dtype(ml_dtypes.bfloat16),
}
HALVES = ("f16", "bf16", "f16x2", "bf16x2")
VECTORS = {  # the types that go with each vector, as the ISA's table for sm_90 has them
    "": ("u32", "s32", "b32", "u64", "s64", "b64", "f16x2", "bf16x2", "f32", "f64"),
    "v2": (*HALVES, "f32"),
    "v4": (*HALVES, "f32"),
    "v8": ("f16", "bf16"),
}
OPERATIONS = {
    "add": ("u32", "s32", "u64", *HALVES, "f32", "f64"),
    **dict.fromkeys(("min", "max"), ("u32", "s32", "u64", "s64", *HALVES)),
    **dict.fromkeys(("and", "or", "xor"), ("b32", "b64")),
}


class Form(NamedTuple):
    verb: str
    operation: str
    wide: bool
    vector: str
    type: str

    @property
    def name(self) -> str:
        order = "relaxed.sys.global"
        parts = ("multimem", self.verb, order, self.operation, "acc::f32" * self.wide, self.vector, self.type)
        return ".".join(filter(None, parts))

    @property
    def dtype(self) -> Any:
        return DTYPES[self.type.removesuffix("x2")]

    @property
    def registers(self) -> int:
        return int(self.vector[1:] or 1)

    @property
    def size(self) -> int:
        """Bytes of a register."""
        return int(self.dtype.itemsize) * (1 + self.type.endswith("x2"))

    @property
    def nbytes(self) -> int:
        return self.registers * self.size


def forms(verb: str) -> list[Form]:
    """All that the ISA has; a reduction of floating-point numbers in memory only adds."""
    found = []
    for operation in OPERATIONS if verb != "st" else ("",):
        for vector, types in VECTORS.items():
            for type_ in types:
                halves, number = type_ in HALVES, type_ in (*HALVES, "f32", "f64")
                if type_ not in OPERATIONS.get(operation, types):
                    continue
                if verb == "red" and number and operation != "add":
                    continue
                found.append(Form(verb, operation, False, vector, type_))
                if verb == "ld_reduce" and operation == "add" and halves:
                    found.append(Form(verb, operation, True, vector, type_))
    return found


HEAD = """
.version 8.6
.target sm_90
.address_size 64
.visible .entry lanes(.param .u64 multicast, .param .u64 ordinary)
{
    .reg .b16 %h<8>;
    .reg .b32 %r<8>, %lane;
    .reg .b64 %w<8>, %m<32>, %o<32>, %multicast, %ordinary, %step;
    ld.param.u64 %multicast, [multicast];
    ld.param.u64 %ordinary, [ordinary];
"""
PLACES = "    mov.u32 %lane, %tid.x;"
for _nbytes in (4, 8, 16):
    PLACES += f"""
    mul.wide.u32 %step, %lane, {_nbytes};
    add.s64 %m{_nbytes}, %multicast, %step;
    add.s64 %o{_nbytes}, %ordinary, %step;
"""
ROOM = 512  # bytes for 32 lanes of a form


def kernel(tested: list[Form]) -> bytes:
    """Each form at a place of its own: loads go to ordinary memory, what is stored or added comes from there."""
    body = ""
    for place, form in enumerate(tested):
        registers = ", ".join(f"%{'hrw'[form.size // 4]}{n}" for n in range(form.registers))
        if form.vector:
            registers = f"{{{registers}}}"
        multicast, ordinary = (f"[%{base}{form.nbytes}+{ROOM * place}]" for base in "mo")
        plain = f"{'.' * bool(form.vector)}{form.vector}.b{8 * form.size}"
        if form.verb == "ld_reduce":
            body += f"{form.name} {registers}, {multicast};\nst.global{plain} {ordinary}, {registers};\n"
        else:
            body += f"ld.global{plain} {registers}, {ordinary};\n{form.name} {multicast}, {registers};\n"
    return f"{HEAD}{PLACES}{body}ret;\n}}".encode()


def launched(image: bytes, mode: str, *addresses: int, threads: int = 32) -> None:
    """Run a PTX kernel on cpu:0 below the driver, to its end."""
    program = load(image, mode=mode)
    try:
        params = b"".join(address.to_bytes(8, "little") for address in addresses)
        (function,) = program.functions.values()
        grid = function.grid((1, 1, 1), (threads, 1, 1), params)
        schedule = Schedule(int(np.random.default_rng().integers(1 << 30)))
        while (grid.step(schedule) if mode == "explored" else grid.advance()) != "done":
            pass
    finally:
        program.unload()


def values(form: Form, rng: np.random.Generator, *shape: int) -> Array:
    """Random ones in ``shape`` rooms, among the floating-point numbers infinities, NaN, zeros and large ones."""
    count = ROOM // form.dtype.itemsize
    if form.dtype.kind in "iu":
        bits = rng.integers(0, 256, (*shape, ROOM), np.uint8)
        return bits.view(form.dtype)
    drawn = rng.standard_normal((*shape, count)) * np.exp2(rng.integers(-6, 7, (*shape, count)))
    special = rng.choice([np.inf, -np.inf, np.nan, 0.0, -0.0, 3e4], (*shape, count))
    with np.errstate(over="ignore"):
        return np.where(rng.random((*shape, count)) < 0.1, special, drawn).astype(form.dtype)


def reduced(form: Form, members: Array) -> Array:
    """Member after member."""
    if form.operation in ("and", "or", "xor"):
        reduction = getattr(np, f"bitwise_{form.operation}").reduce(members)
    elif form.operation in ("min", "max"):
        extremum = getattr(np, f"f{form.operation}")
        exact = members.astype(np.float32) if form.dtype.itemsize == 2 else members
        reduction = extremum.reduce(exact)
    else:
        exact = members.astype(np.float32) if form.wide else members
        reduction = exact[0]
        with np.errstate(all="ignore"):
            for member in exact[1:]:
                reduction = reduction + member
    with np.errstate(over="ignore"):
        return np.asarray(reduction).astype(form.dtype)


def assert_same(form: Form, got: Array, wanted: Array) -> None:
    if form.dtype.itemsize == 2:
        got, wanted = got.astype(np.float32), wanted.astype(np.float32)
    np.testing.assert_array_equal(got, wanted, err_msg=form.name)


def used(form: Form) -> int:
    return 32 * form.nbytes // int(form.dtype.itemsize)


def peek(address: int, nbytes: int) -> Bytes:
    return np.frombuffer(ctypes.string_at(address, nbytes), np.uint8)


class Ordinary:
    """Memory of cpu:0."""

    def __init__(self, nbytes: int, data: bytes = b"") -> None:
        self._allocation = memory.allocate(nbytes, "device", written=True)
        self.address = self._allocation.address
        ctypes.memset(self.address, 0, nbytes)
        memory.write(self.address, data)

    def __enter__(self) -> int:
        return self.address

    def __exit__(self, *_: object) -> None:
        memory.free(self.address)


TEAMS = [("checked", count) for count in range(2, 9)] + [("unchecked", 3), ("raced", 4), ("explored", 2)]


def forms_in(mode: str, verb: str) -> list[Form]:
    """All are checked; each of the other modes, which only differ in how they touch memory, has its third of them."""
    return forms(verb)[MODES.index(mode) - 1 :: 3] if mode != "checked" else forms(verb)


@pytest.mark.parametrize(("mode", "count"), TEAMS)
def test_a_load_reduces_what_all_devices_have(mode: str, count: int, team: Any, rng: np.random.Generator) -> None:
    tested, members = forms_in(mode, "ld_reduce"), team(count)
    given = [values(form, rng, count) for form in tested]
    for device, view in enumerate(members.views):
        memory.write(view, b"".join(each[device].tobytes() for each in given))
    with Ordinary(ROOM * len(tested)) as results:
        launched(kernel(tested), mode, members.address, results)
        for place, (form, each) in enumerate(zip(tested, given, strict=True)):
            got = peek(results + ROOM * place, ROOM).view(form.dtype)
            assert_same(form, got[: used(form)], reduced(form, each)[: used(form)])


@pytest.mark.parametrize(("mode", "count"), TEAMS)
def test_a_store_goes_to_all_devices(mode: str, count: int, team: Any, rng: np.random.Generator) -> None:
    tested, members = forms_in(mode, "st"), team(count)
    given = rng.integers(0, 256, (len(tested), ROOM), np.uint8)
    with Ordinary(given.nbytes, given.tobytes()) as source:
        launched(kernel(tested), mode, members.address, source)
    wanted = given.copy()
    for place, form in enumerate(tested):
        wanted[place, 32 * form.nbytes :] = 0
    for view in members.views:
        np.testing.assert_array_equal(peek(view, given.nbytes).reshape(given.shape), wanted)


@pytest.mark.parametrize(("mode", "count"), TEAMS)
def test_a_reduction_changes_the_memory_of_all_devices(
    mode: str, count: int, team: Any, rng: np.random.Generator
) -> None:
    tested, members = forms_in(mode, "red"), team(count)
    before = [values(form, rng, count) for form in tested]
    given = [values(form, rng) for form in tested]
    for device, view in enumerate(members.views):
        memory.write(view, b"".join(each[device].tobytes() for each in before))
    with Ordinary(ROOM * len(tested), b"".join(each.tobytes() for each in given)) as source:
        launched(kernel(tested), mode, members.address, source)
    for device, view in enumerate(members.views):
        for place, (form, each, operand) in enumerate(zip(tested, before, given, strict=True)):
            got = peek(view + ROOM * place, ROOM).view(form.dtype)
            wanted = each[device].copy()
            wanted[: used(form)] = reduced(form, np.stack([each[device], operand]))[: used(form)]
            assert_same(form, got, wanted)


def test_a_sum_in_f32_is_rounded_once(team: Any) -> None:
    members = team(3)
    for view, x in zip(members.views, (256.0, 1.0, 1.0), strict=True):
        memory.write(view, np.full(64, x, ml_dtypes.bfloat16).tobytes())
    tested = [Form("ld_reduce", "add", wide, "", "bf16x2") for wide in (False, True)]
    for view in members.views:
        memory.copy(view + ROOM, view, ROOM)
    with Ordinary(2 * ROOM) as results:
        launched(kernel(tested), "checked", members.address, results)
        sums = [peek(results + ROOM * place, 2).view(ml_dtypes.bfloat16)[0] for place in (0, 1)]
    assert [float(total) for total in sums] == [256.0, 258.0]


# ---- what is refused -----------------------------------------------------------------------------------------------


def one(instruction: str) -> bytes:
    return f"{HEAD}{PLACES}{instruction}\nret;\n}}".encode()


def is_refused(instruction: str) -> bool:
    """Whether a module is refused that has it, by its name."""
    said = ""
    try:
        load(f"{HEAD}{instruction}\nret;\n}}".encode(), mode="unchecked").unload()
    except ImageError as error:
        said = str(error)
    named = f"kernel lanes: {instruction.split()[0]} is not supported" in said
    assert named or not said
    return named


@pytest.mark.parametrize("verb", ["ld_reduce", "st", "red"])
def test_no_other_combination_of_operation_vector_and_type_is_taken(verb: str) -> None:
    wanted, taken = {form.name for form in forms(verb)}, set()
    operations = (*OPERATIONS, "inc", "exch") if verb != "st" else ("",)
    types = (*dict.fromkeys((*DTYPES, *HALVES)), "b16", "e4m3x4")
    for operation, vector, type_ in itertools.product(operations, VECTORS, types):
        for wide in (False, True) if verb == "ld_reduce" else (False,):
            form = Form(verb, operation, wide, vector, type_)
            size = 2 if type_.endswith("16") else 8 if type_.endswith("64") else 4
            registers = ", ".join(f"%{'hrw'[size // 4]}{n}" for n in range(form.registers))
            registers = f"{{{registers}}}" if vector else registers
            operands = (registers, "[%multicast]") if verb == "ld_reduce" else ("[%multicast]", registers)
            if not is_refused(f"{form.name} {', '.join(operands)};"):
                taken.add(form.name)
    assert taken == wanted


@pytest.mark.parametrize(
    ("verb", "rest", "orders"),
    [
        ("ld_reduce", "add.u32 %r0, [%multicast];", ("weak", "relaxed", "acquire")),
        ("st", "u32 [%multicast], %r0;", ("weak", "relaxed", "release")),
        ("red", "add.u32 [%multicast], %r0;", ("relaxed", "release")),
    ],
)
def test_an_order_other_than_weak_goes_with_a_scope(verb: str, rest: str, orders: tuple[str, ...]) -> None:
    taken = set()
    for order in ("", "weak", "relaxed", "acquire", "release", "acq_rel", "volatile", "sc"):
        for scope in ("", "cta", "cluster", "gpu", "sys"):
            for space in ("", "global", "shared"):
                name = ".".join(filter(None, ("multimem", verb, order, scope, space)))
                if not is_refused(f"{name}.{rest}"):
                    taken.add((order, scope, space))
    scopes = ("cta", "cluster", "gpu", "sys")
    wanted = {(order, scope) for order in orders if order != "weak" for scope in scopes}
    wanted |= {(order, "") for order in ("", *orders) if order in ("", "weak")}
    assert taken == {(*each, space) for each in wanted for space in ("", "global")}


@pytest.mark.parametrize(
    "instruction",
    [
        "multimem.ld_reduce.add.acc::f16.v4.e4m3 {%h0, %h1, %h2, %h3}, [%multicast];",
        "multimem.ld_reduce.min.acc::f32.v2.f16x2 {%r0, %r1}, [%multicast];",
        "multimem.st.v2.f32 [%multicast], %r0;",
        "multimem.ld.add.u32 %r0, [%multicast];",
        "multimem.cp.async.bulk.bulk_group.global.shared::cta [%multicast], [%r0], 16;",
    ],
)
def test_what_sm_90_does_not_have_is_refused_by_name(instruction: str) -> None:
    assert is_refused(instruction)


# ---- faults --------------------------------------------------------------------------------------------------------


def fault(instruction: str, multicast: int, ordinary: int, mode: str = "checked") -> tuple[str, str]:
    with pytest.raises(Fault) as told:
        launched(one(instruction), mode, multicast, ordinary)
    return told.value.code.removeprefix("CUDA_ERROR_"), str(told.value)


@pytest.mark.parametrize(
    "instruction", ["ld.global.u32 %r0, [%m4];", "st.global.u32 [%m4], 1;", "red.add.u32 [%m4], 1;"]
)
def test_an_ordinary_access_to_a_multicast_address_is_a_fault(instruction: str, team: Any) -> None:
    members = team(2)
    code, said = fault(instruction, members.address, 0)
    assert code == "ILLEGAL_ADDRESS"
    assert f"at {members.address:#x}: 0 bytes into a 2097152-byte multicast allocation" in said
    assert "which multimem instructions alone may access" in said


def test_a_copy_from_a_multicast_address_is_a_fault(team: Any) -> None:
    members = team(2)
    with pytest.raises(Fault, match="which multimem instructions alone may access"):
        memory.check(members.address, 4, read=True, what="copy")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("instruction", "verb"),
    [
        ("multimem.ld_reduce.add.v2.f16x2 {%r0, %r1}, [%o8];", "reads"),
        ("multimem.st.u64 [%o8], %w0;", "writes"),
        ("multimem.red.add.u64 [%o8], %w0;", "reads"),
    ],
)
def test_an_ordinary_address_is_none_for_multimem(instruction: str, verb: str, mode: str) -> None:
    with Ordinary(256) as ordinary:
        code, said = fault(instruction, 0, ordinary, mode)
    assert code == "ILLEGAL_ADDRESS"
    who = f"kernel lanes, PTX line \\d+ \\({instruction.split()[0]}\\), block \\(0, 0, 0\\), thread \\(0, 0, 0\\)"
    assert re.match(f"{who}: {verb} 8 bytes at {ordinary:#x}: 0 bytes into a 256-byte device allocation", said), said
    assert said.endswith("; this is no multicast address that a device may access")


def test_only_lanes_that_run_are_looked_at(team: Any) -> None:
    members = team(2)
    body = """
    .reg .pred %p;
    setp.lt.u32 %p, %lane, 5;
    selp.b64 %step, %m4, 0, %p;
    @%p multimem.st.u32 [%step], %lane;
    """
    launched(one(body), "checked", members.address, 0)
    for view in members.views:
        assert list(peek(view, 28).view(np.uint32)) == [0, 1, 2, 3, 4, 0, 0]
    _, said = fault(body.replace("@%p", ""), members.address, 0)
    assert "thread (5, 0, 0): writes 4 bytes at 0x0: a null pointer" in said


def test_lanes_use_addresses_of_several_teams(team: Any) -> None:
    small, large = team(2), team(4)
    for number, view in enumerate((*small.views, *large.views)):
        memory.write(view, np.full(32, 1 << 4 * number, np.uint32).tobytes())
    body = """
    .reg .pred %p;
    and.b32 %r0, %lane, 1;
    setp.eq.u32 %p, %r0, 1;
    selp.b64 %step, %ordinary, %multicast, %p;
    multimem.ld_reduce.add.u32 %r1, [%step];
    mul.wide.u32 %w0, %lane, 4;
    add.s64 %w0, %w0, %step;
    multimem.st.u32 [%w0+1024], %r1;
    """
    launched(one(body), "checked", small.address, large.address)
    for members, first, total in ((small, 0, 0x11), (large, 1, 0x111100)):
        for view in members.views:
            found = peek(view + 1024, 128).view(np.uint32)
            assert (list(found[first::2]), list(found[1 - first :: 2])) == ([total] * 16, [0] * 16)


@pytest.mark.parametrize(
    "instruction",
    [
        "multimem.ld_reduce.add.v4.f32 {%r0, %r1, %r2, %r3}, [%multicast+8];",
        "multimem.st.v4.f32 [%multicast+8], {%r0, %r1, %r2, %r3};",
        "multimem.red.add.v4.f32 [%multicast+8], {%r0, %r1, %r2, %r3};",
    ],
)
def test_a_vector_is_aligned_as_a_whole(instruction: str, team: Any) -> None:
    members = team(2)
    code, said = fault(instruction, members.address, 0)
    assert code == "MISALIGNED_ADDRESS"
    assert f"16 bytes at {members.address + 8:#x}, which is not a multiple of 16: 8 bytes into a" in said
    launched(one(instruction.replace("+8", "+16")), "checked", members.address, 0)


def test_past_the_end_of_the_multicast_object(team: Any) -> None:
    members = team(2)
    _, said = fault("multimem.red.add.u32 [%multicast+2097152], 1;", members.address, 0)
    assert "0 bytes past the end of a 2097152-byte multicast allocation" in said


def test_memory_is_looked_up_anew_at_each_launch(team: Any) -> None:
    members = team(3, bound=False)
    add = one("multimem.red.add.u32 [%m4], 1;")

    def counts() -> list[int]:
        return [int(peek(view, 4).view(np.uint32)[0]) for view in members.views]

    for device, missing in ((2, "cpu:0, cpu:1"), (0, "cpu:1")):
        members.bind(device)
        with pytest.raises(Fault, match=f"multicast allocation.*; no memory of {missing} is bound there"):
            launched(add, "checked", members.address, 0)
    members.bind(1)
    launched(add, "checked", members.address, 0)
    assert counts() == [1, 1, 1]
    members.unbind(2)
    with pytest.raises(Fault, match="; no memory of cpu:2 is bound there"):
        launched(add, "checked", members.address, 0)
    members.bind(2)
    launched(add, "checked", members.address, 0)
    assert counts() == [2, 2, 2]


TWO_PROCESSES = """
import subprocess, sys
from team import Team
from test_multimem import launched, one, peek

rank = len(sys.argv) - 1
if rank:
    team, other = Team(2, own=[1], fd=int(sys.argv[1])), None
else:
    team = Team(2, own=[0], bound=False)
    fd = team.export()
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[fd], text=True)
    other = subprocess.Popen([sys.executable, *sys.orig_argv[1:], str(fd)], **pipes)
    team.bind(0)

def meet():
    for end in (0, 1):
        if rank == end:
            print("here", file=other.stdin if other else sys.stdout, flush=True)
        else:
            assert (other.stdout if other else sys.stdin).readline() == "here\\n"

meet()
launched(one(f"multimem.red.add.u32 [%m4], {rank + 1};"), "checked", team.address, 0)
meet()
load = one("multimem.ld_reduce.add.u32 %r0, [%m4]; st.global.u32 [%o4+1024], %r0;")
launched(load, "checked", team.address, team.views[0])
assert [int.from_bytes(peek(team.views[0] + at, 4).tobytes(), "little") for at in (0, 1024)] == [3, 6]
meet()
team.close()
if other:
    assert other.wait() == 0
"""


def test_processes_reach_each_others_memory() -> None:
    path = os.pathsep.join([str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")])
    command, env = [sys.executable, "-c", TWO_PROCESSES], os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# ---- real kernels --------------------------------------------------------------------------------------------------

SOURCE = r"""
struct alignas(16) Four { unsigned x, y, z, w; };
#define LOAD(NAME, FORM)                                                                            \
  __global__ void NAME(Four* out, const char* all, int n) {                                         \
    int i = blockIdx.x * blockDim.x + threadIdx.x;                                                  \
    if (i >= n) return;                                                                             \
    Four v;                                                                                         \
    asm volatile("multimem.ld_reduce.relaxed.sys.global.add." FORM " {%0, %1, %2, %3}, [%4];"       \
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"((const Four*)all + i) : "memory"); \
    out[i] = v;                                                                                     \
  }
LOAD(bf16, "acc::f32.v4.bf16x2")
LOAD(f16, "acc::f32.v4.f16x2")
__global__ void f32(float4* out, const char* all, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  float4 v;
  asm volatile("multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"((const float4*)all + i) : "memory");
  out[i] = v;
}
__global__ void store(const float4* in, char* all, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  float4 v = in[i];
  asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};"
               :: "l"((float4*)all + i), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}
__global__ void wait(char* all, unsigned wanted) {
  unsigned seen;
  do asm volatile("multimem.ld_reduce.acquire.sys.global.add.u32 %0, [%1];" : "=r"(seen) : "l"(all) : "memory");
  while (seen < wanted);
}
__global__ void fill(float4* own, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) own[i] = float4{1.f, 2.f, 3.f, 4.f};
}
__global__ void count(char* all) {
  unsigned* flag = (unsigned*)all;
  asm volatile("multimem.red.release.sys.global.add.u32 [%0], %1;" :: "l"(flag), "r"(1) : "memory");
  asm volatile("multimem.red.relaxed.gpu.add.u32 [%0], %1;" :: "l"(flag + 1), "r"(threadIdx.x) : "memory");
}
__global__ void most(char* all) {
  asm volatile("multimem.red.max.s32 [%0], %1;" :: "l"(all), "r"(threadIdx.x) : "memory");
}
"""


@pytest.fixture
def devices() -> list[dk.Device]:
    return [dk.Device(f"cpu:{rank}") for rank in range(4)]


def run(device: dk.Device, name: str, *args: Any, grid: int = 1, block: int = 32) -> None:
    with device.module(dk.Source.from_text(SOURCE, "multimem.cu")) as module, device.stream() as stream:
        module.kernel(name).launch(stream, grid=grid, block=block, args=args)
        stream.synchronize()


@pytest.mark.parametrize(("name", "dtype"), [("bf16", ml_dtypes.bfloat16), ("f16", np.float16), ("f32", np.float32)])
def test_what_nvrtc_makes_of_a_load_that_reduces(
    name: str, dtype: Any, devices: list[dk.Device], team: Any, rng: np.random.Generator
) -> None:
    members, n = team(len(devices)), 100
    given = rng.standard_normal((len(devices), n, 16 // np.dtype(dtype).itemsize)).astype(dtype)
    for view, each in zip(members.views, given, strict=True):
        memory.write(view, each.tobytes())
    total = given[0].astype(np.float32)
    for each in given[1:]:
        total += each.astype(np.float32)
    for device in devices[::3]:
        with Ordinary(16 * n) as out:
            run(device, name, ctypes.c_void_p(out), ctypes.c_void_p(members.address), n, grid=4)
            got = peek(out, 16 * n).view(dtype).reshape(n, -1)
        np.testing.assert_array_equal(got.astype(np.float32), total.astype(dtype).astype(np.float32))


def test_what_nvrtc_makes_of_stores_and_reductions(
    devices: list[dk.Device], team: Any, rng: np.random.Generator
) -> None:
    members, n = team(len(devices)), 50
    given = rng.standard_normal((n, 4)).astype(np.float32)
    with devices[1].array(given) as source:
        run(devices[1], "store", ctypes.c_void_p(source.address), ctypes.c_void_p(members.address), n, grid=2)
    for view in members.views:
        np.testing.assert_array_equal(peek(view, given.nbytes).view(np.float32).reshape(n, 4), given)
    for device in devices:
        run(device, "count", ctypes.c_void_p(members.address + 4096), grid=3)
        run(device, "most", ctypes.c_void_p(members.address + 4104))
    for view in members.views:
        assert list(peek(view + 4096, 12).view(np.uint32)) == [4 * 3 * 32, 4 * 3 * sum(range(32)), 31]


def test_a_loop_that_reduces_waits_for_others(devices: list[dk.Device], team: Any) -> None:
    members = team(2)
    place = ctypes.c_void_p(members.address)
    source = dk.Source.from_text(SOURCE, "multimem.cu")
    waits, counts = devices[2].module(source).kernel("wait"), devices[3].module(source).kernel("count")
    first, second = devices[2].stream(), devices[3].stream()
    waits.launch(first, grid=1, block=1, args=(place, 2))
    assert not first.done
    counts.launch(second, grid=1, block=1, args=(place,))
    first.synchronize()
    second.synchronize()
    victim = dk.Device("cpu:6")
    alone = victim.stream()
    victim.module(source).kernel("wait").launch(alone, grid=1, block=1, args=(place, 3))
    with pytest.raises(dk.DriverError, match="deadlock"):
        alone.synchronize()
    gc.collect()
    victim.driver.cuDevicePrimaryCtxReset(victim.handle)


def test_a_load_that_reduces_races_with_a_store_to_any_member(team: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRVKIT_CPU_MODE", "raced")
    members, n = team(3), 8
    victims = [dk.Device(f"cpu:{number}") for number in (6, 7)]
    source = dk.Source.from_text(SOURCE, "multimem.cu")
    fill, reduce = (d.module(source).kernel(name) for d, name in zip(victims, ("fill", "f32"), strict=True))
    atomics = [device.module(source).kernel("most") for device in victims]
    first, second = (device.stream() for device in victims)
    out = victims[1].zeros(4 * n, np.float32)

    def both(ordered: bool) -> None:
        fill.launch(first, grid=1, block=32, args=(ctypes.c_void_p(members.views[1]), n))
        if ordered:
            second.wait(first.record())
        reduce.launch(second, grid=1, block=32, args=(out, ctypes.c_void_p(members.address), n))
        first.synchronize()
        second.synchronize()

    both(ordered=True)
    for atomic, stream in zip(atomics, (first, second), strict=True):  # these do not race with each other
        atomic.launch(stream, grid=1, block=32, args=(ctypes.c_void_p(members.address + 4096),))
    for stream in (first, second):
        stream.synchronize()
    with pytest.raises(dk.DriverError, match="race: ") as told:
        both(ordered=False)
    gc.collect()
    assert "bytes into a 2097152-byte mapped allocation made at team.py" in str(told.value)
    for device in victims:
        device.driver.cuDevicePrimaryCtxReset(device.handle)


# ---- an all-reduce -------------------------------------------------------------------------------------------------


def drvkit(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "drvkit", *arguments, "--ranks", "4"]
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=280)


SCRIPT = str(HERE / "explored" / "multimem.py")


def test_an_all_reduce_is_right_under_hostile_schedules() -> None:
    done = drvkit("explore", SCRIPT, "right", "--schedules", "6", "--jobs", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 schedules, none failed" in done.stdout


@pytest.mark.parametrize("variant", ["relaxed", "early"])
def test_an_all_reduce_that_misses_an_order_is_found(variant: str) -> None:
    done = drvkit("explore", SCRIPT, variant, "--until-failure", "--schedules", "200", "--jobs", "2")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Mismatched elements" in done.stdout


def test_an_all_reduce_has_no_races() -> None:
    done = drvkit("check", SCRIPT, "right")
    assert re.fullmatch(r"drvkit check: .*multimem.py right: no finding; .*\n", done.stderr), done.stderr
    assert done.returncode == 0
