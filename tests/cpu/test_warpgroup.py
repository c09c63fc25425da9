"""wgmma: every layout of a matrix in shared memory, every type, A in registers; and what is wrong is found."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray
from one_warp import kernel, run
from test_matrix import TYPES

import drvkit as dk
from drvkit.cpu.fault import Fault, ImageError
from drvkit.cpu.program import load

M, THREADS = 64, 128
RANDOM = np.random.default_rng()


class Product(NamedTuple):
    """One kernel's instruction; it takes ``steps`` along k."""

    columns: int
    a: str = "bf16"
    b: str = "bf16"
    d: str = "f32"
    a_in_registers: bool = False
    signs: tuple[int, int] = (1, 1)
    mn_major: tuple[bool, bool] = (False, False)

    @property
    def depth(self) -> int:
        return int(32 // TYPES[self.a].itemsize)

    @property
    def registers(self) -> int:
        """Of D."""
        return self.columns // (4 if self.d == "f16" else 2)

    def source(self) -> dk.Source:
        """Shared memory is a copy of ``image``; descriptors count from its beginning."""
        a_count = 4 if self.a_in_registers else 1
        names = [f"%{at}" for at in range(self.registers + a_count + 2)]
        d, a = ", ".join(names[: self.registers]), ", ".join(names[self.registers : -2])
        numbers: list[int] = [*self.signs]
        if TYPES[self.a].itemsize == 2:
            numbers += self.mn_major[1:] if self.a_in_registers else self.mn_major
        letter = "r" if self.d == "f16" else "f"
        inputs = [f'"r"(a[{at}])' for at in range(4)] if self.a_in_registers else ['"l"(a_at)']
        instruction = f"wgmma.mma_async.sync.aligned.m64n{self.columns}k{self.depth}.{self.d}.{self.a}.{self.b}"
        text = f"""
using Word = {"unsigned" if self.d == "f16" else "float"};
__global__ void product(const uint4* image, int chunks, unsigned long long a_at, unsigned long long b_at,
                        unsigned long long advance, int steps, int adds, const unsigned* fragment, Word* d) {{
  extern __shared__ __align__(1024) uint4 tile[];
#pragma unroll 1
  for (int i = threadIdx.x; i < chunks; i += {THREADS}) tile[i] = image[i];
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  const unsigned base = (unsigned)__cvta_generic_to_shared(tile) >> 4;
  {"unsigned a[4];" if self.a_in_registers else ""}
  {f"for (int i = 0; i < 4; i++) a[i] = fragment[i * {THREADS} + threadIdx.x];" if self.a_in_registers else ""}
  Word r[{self.registers}];
#pragma unroll
  for (int i = 0; i < {self.registers}; i++) r[i] = d[i * {THREADS} + threadIdx.x];
  a_at += base, b_at += base;
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll 1
  for (int i = 0; i < steps; i++, a_at += advance, b_at += advance)
    asm volatile("{{ .reg .pred p; setp.ne.b32 p, {names[-1]}, 0; "
                 "{instruction} {{{d}}}, {"{" + a + "}" if self.a_in_registers else a}, {names[-2]}, p, "
                 "{", ".join(str(int(number)) for number in numbers)}; }}"
                 : {", ".join(f'"+{letter}"(r[{at}])' for at in range(self.registers))}
                 : {", ".join(inputs)}, "l"(b_at), "r"(int(adds || i)));
  asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int i = 0; i < {self.registers}; i++) d[i * {THREADS} + threadIdx.x] = r[i];
}}
"""
        return dk.Source.from_text(text, "product.cu")


class Layout(NamedTuple):
    """How a matrix lies in shared memory; rows are those of A, or columns of B."""

    swizzle: int = 128  # bytes; 16 is none
    mn_major: bool = False
    start: int = 0
    leading: int = 16
    stride: int = 1024
    base: int = 0

    @property
    def descriptor(self) -> int:
        mode = {16: 0, 128: 1, 64: 2, 32: 3}[self.swizzle]
        strides = self.leading >> 4 << 16 | self.stride >> 4 << 32
        return self.start >> 4 | strides | self.base << 49 | mode << 62

    def put(self, matrix: NDArray[Any], image: NDArray[np.uint8]) -> None:
        """``matrix[row, k]``, as the ISA's canonical layouts have it."""
        size = matrix.dtype.itemsize
        chunks, per = self.swizzle // 16, 16 // size
        grid = np.indices(matrix.shape)
        row, k = grid[0], grid[1]
        if self.mn_major:
            chunk, within = row // per, row % per * size
            panel, step = (self.stride, self.leading) if chunks == 1 else (self.leading, self.stride)
            place = chunk // chunks * panel + chunk % chunks * 16 + k % 8 * self.swizzle + k // 8 * step
        else:
            chunk, within = k // per, k % per * size
            place = row % 8 * self.swizzle + row // 8 * self.stride
            place += chunk * (self.leading if chunks == 1 else 16)
        place ^= (place >> 7 & chunks - 1) << 4
        at = self.start + place + within
        assert len(np.unique(at)) == at.size, "numbers lie on each other"
        data = np.ascontiguousarray(matrix).view(np.uint8).reshape(*matrix.shape, size)
        image[at[..., None] + np.arange(size)] = data


def numbers(shape: tuple[int, int], type_: str) -> NDArray[Any]:
    """Of integers so small that all sums are exact."""
    return RANDOM.integers(-4, 5, shape).astype(TYPES[type_])


def to_registers(d: NDArray[Any], type_: str) -> NDArray[Any]:
    """What each thread has of D: [register, thread]; f16 has two numbers in one."""
    of_warps = d.reshape(4, 2, 8, -1, 4, 2)  # warp, half, g, block of 8 columns, t, which
    if type_ == "f16":
        pairs = np.ascontiguousarray(of_warps).view(np.uint32)[..., 0]
        return np.ascontiguousarray(pairs.transpose(3, 1, 0, 2, 4)).reshape(-1, THREADS)
    return np.ascontiguousarray(of_warps.transpose(3, 1, 5, 0, 2, 4)).reshape(-1, THREADS)


def fragment(a: NDArray[Any]) -> NDArray[np.uint32]:
    """What each thread has of A: [register, thread]."""
    words = np.ascontiguousarray(a).view(np.uint32).reshape(4, 2, 8, 2, 4)  # warp, half, g, half of k, t
    return np.ascontiguousarray(words.transpose(3, 1, 0, 2, 4)).reshape(4, THREADS)


def multiplied(
    device: dk.Device,
    product: Product,
    a: NDArray[Any],
    b: NDArray[Any],
    c: NDArray[Any],
    layouts: tuple[Layout, Layout],
    *,
    nbytes: int = 36864,
    adds: bool = True,
    advance: int = 0,
) -> NDArray[Any]:
    """The registers of D, of one launch; ``a[row, k]`` and ``b[column, k]``."""
    if device.compute_capability != (9, 0):
        pytest.skip("needs a GPU of sm_90")
    image = np.full(nbytes, 0xFF, np.uint8)  # NaN in all types
    for matrix, layout in zip((a, b), layouts, strict=True):
        layout.put(matrix, image)
    steps = a.shape[1] // product.depth
    registers = to_registers(c, product.d)
    with device.module(product.source()) as module, device.stream() as stream:
        d = device.array(registers)
        held = fragment(a) if product.a_in_registers else np.zeros((4, THREADS), np.uint32)
        at = (layouts[0].descriptor, layouts[1].descriptor)
        args = (device.array(image.view(np.uint32)), nbytes // 16, *at, advance >> 4, steps, int(adds))
        module.kernel("product").launch(
            stream, grid=1, block=THREADS, shared_mem_bytes=nbytes, args=(*args, device.array(held), d)
        )
        return d.numpy(stream)


def check(
    device: dk.Device,
    product: Product,
    layouts: tuple[Layout, Layout],
    *,
    steps: int = 1,
    adds: bool = True,
    advance: int = 0,
) -> None:
    a, b = numbers((M, product.depth * steps), product.a), numbers((product.columns, product.depth * steps), product.b)
    c = numbers((M, product.columns), product.d)
    found = multiplied(device, product, a, b, c, layouts, adds=adds, advance=advance)
    sign = product.signs[0] * product.signs[1]
    want = sign * (a.astype(np.float64) @ b.astype(np.float64).T) + (c.astype(np.float64) if adds else 0)
    np.testing.assert_array_equal(found, to_registers(want.astype(TYPES[product.d]), product.d))


K_MAJOR = [
    Layout(16, leading=128, stride=272),
    Layout(16, leading=4096, stride=128),
    Layout(32, stride=512),
    Layout(64, stride=512),
    Layout(128, stride=2048),
]
MN_MAJOR = [
    Layout(16, True, leading=128, stride=272),
    Layout(16, True, leading=4096, stride=144),
    Layout(32, True, leading=512, stride=256),
    Layout(64, True, leading=1024, stride=512),
    Layout(128, True, leading=4096, stride=1024),
]


@pytest.mark.parametrize("of_a", [K_MAJOR, MN_MAJOR], ids=["a_k", "a_m"])
@pytest.mark.parametrize("of_b", [K_MAJOR, MN_MAJOR], ids=["b_k", "b_n"])
def test_a_matrix_lies_as_its_descriptor_says(device: dk.Device, of_a: list[Layout], of_b: list[Layout]) -> None:
    """72 columns: one block of 8 more than a panel of the widest swizzle has."""
    product = Product(72, mn_major=(of_a[0].mn_major, of_b[0].mn_major))
    for number, layout in enumerate(of_a):
        second = of_b[(number + 1) % len(of_b)]
        check(device, product, (layout, second._replace(start=16384)))


@pytest.mark.parametrize("swizzle", [32, 64, 128])
def test_a_pattern_may_start_anywhere_with_a_base_offset(device: dk.Device, swizzle: int) -> None:
    first, second = Layout(swizzle, start=384, base=3), Layout(swizzle, start=16384 + 640, base=5)
    check(device, Product(72), (first, second))


def test_k_advances_inside_a_swizzled_row(device: dk.Device) -> None:
    check(device, Product(72), (Layout(), Layout(start=16384)), steps=4, advance=32)


def test_256_columns_in_four_panels(device: dk.Device) -> None:
    """As probabilities times values are: B is 16 rows of 256 numbers."""
    product = Product(256, mn_major=(False, True))
    check(device, product, (Layout(), Layout(128, True, start=16384, leading=2048, stride=1024)))


@pytest.mark.parametrize(
    ("a", "b", "d"),
    [("f16", "f16", "f32"), ("f16", "f16", "f16"), ("tf32", "tf32", "f32"), ("e4m3", "e5m2", "f32"),
     ("e5m2", "e4m3", "f16")],
)  # fmt: skip
def test_types(device: dk.Device, a: str, b: str, d: str) -> None:
    check(device, Product(24, a, b, d), (Layout(), Layout(32, start=16384, stride=256)))


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("signs", [(1, 1), (-1, 1), (-1, -1)])
def test_a_in_registers_with_signs(device: dk.Device, signs: tuple[int, int], adds: bool) -> None:
    product = Product(16, a_in_registers=True, signs=signs, mn_major=(False, True))
    check(device, product, (Layout(start=16384), Layout(32, True, leading=512, stride=256)), adds=adds)


def test_what_is_not_added_is_not_looked_at(device: dk.Device) -> None:
    product, layouts = Product(72), (Layout(), Layout(start=16384))
    a, b = numbers((M, 16), "bf16"), numbers((72, 16), "bf16")
    c = np.full((M, 72), np.nan, np.float32)
    found = multiplied(device, product, a, b, c, layouts, adds=False)
    want = a.astype(np.float32) @ b.astype(np.float32).T
    np.testing.assert_array_equal(found, to_registers(want, "f32"))
    added = multiplied(device, product, a, b, c, layouts)
    np.testing.assert_array_equal(added.view(np.uint32), 0x7FFFFFFF)


def test_sums_are_as_good_as_those_of_f32(device: dk.Device) -> None:
    """Each of 17 terms errs by one unit in the last place of all magnitudes at most: hardware truncates."""
    product = Product(72)
    a, b = (RANDOM.standard_normal((rows, 16)).astype(TYPES["bf16"]) for rows in (M, 72))
    c = RANDOM.standard_normal((M, 72)).astype(np.float32)
    found = multiplied(device, product, a, b, c, (Layout(), Layout(start=16384)))
    left, right = a.astype(np.float64), b.astype(np.float64)
    magnitude = np.abs(left) @ np.abs(right).T + np.abs(c)
    far = np.abs(found - to_registers(left @ right.T + c, "f32"))
    assert np.all(far <= to_registers(magnitude, "f32") * 17 * 2.0**-23)


# What is wrong. The tile of `one_warp` has 2048 bytes

FILL = """
    mov.u32 %r1, tile; shl.b32 %r2, %lane, 4; add.u32 %r1, %r1, %r2; mov.b32 %r3, 0;
    st.shared.v4.b32 [%r1], {%r3, %r3, %r3, %r3};
"""
MULTIPLY = """
    mov.u64 %w1, tile; shr.b64 %w1, %w1, 4; or.b64 %w1, %w1, 0xDESCRIPTOR;
    mov.b32 %f0, 0f00000000; mov.b32 %f1, 0f00000000; mov.b32 %f2, 0f00000000; mov.b32 %f3, 0f00000000;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3}, %w1, %w1, 1, 1, 1, 0, 0;
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    mov.b32 %d0, %f0;
"""
WHOLE = Layout(16, leading=128, stride=256)  # 64 rows of 32 bytes


def multiply(layout: Layout = WHOLE) -> str:
    return MULTIPLY.replace("DESCRIPTOR", f"{layout.descriptor:x}")


def test_a_barrier_before_a_product_is_missed() -> None:
    run(FILL + "bar.sync 0;" + multiply(), threads=THREADS, mode="raced")
    report = r"wgmma\.mma_async.*race: it reads 16 bytes .*byte 0 of 2048.*warp 0 .*writes"
    with pytest.raises(Fault, match=report):
        run(FILL + "bar.arrive 1, 128;" + multiply(), threads=THREADS, mode="raced")


def test_a_tile_is_not_written_anew_before_all_have_read_it() -> None:
    body = FILL + "bar.sync 0;" + multiply()
    run(body + "bar.sync 0;" + FILL, threads=THREADS, mode="raced")
    with pytest.raises(Fault, match=r"race: it .*(reads|writes) 16 bytes.*(reads|writes), and no barrier") as told:
        run(body + FILL, threads=THREADS, mode="raced")
    assert "wgmma" in str(told.value)


@pytest.mark.parametrize(
    ("layout", "report"),
    [
        (WHOLE._replace(stride=272), r"thread \(\d+, 0, 0\): reads 16 bytes .*byte 2048 of 2048 bytes of shared"),
        (WHOLE._replace(start=128), r"thread \(\d+, 0, 0\): reads 16 bytes .*byte 2048 of 2048 bytes of shared"),
        (WHOLE._replace(leading=4096), r"thread \(8, 0, 0\): reads 16 bytes"),
    ],
)
def test_a_descriptor_that_leaves_shared_memory_is_a_fault(layout: Layout, report: str) -> None:
    with pytest.raises(Fault, match=f"wgmma.*{report}"):
        run(FILL + "bar.sync 0;" + multiply(layout), threads=THREADS)


def test_what_nobody_wrote_is_not_multiplied() -> None:
    with pytest.raises(Fault, match=r"wgmma.*nothing was written"):
        run("setp.lt.u32 %p1, %lane, 100; @%p1 bra filled; bra done; filled:" + FILL + "done: bar.sync 0;" + multiply(),
            threads=THREADS)  # fmt: skip


@pytest.mark.parametrize(("threads", "report"), [(96, "not all warps of the warpgroup"), (100, "lanes 4-31 ended")])
def test_a_warpgroup_is_whole(threads: int, report: str) -> None:
    with pytest.raises(Fault, match=f"wgmma.*{report}"):
        run(FILL + "bar.sync 0;" + multiply(), threads=threads)


def test_lanes_that_are_elsewhere_are_missed() -> None:
    body = FILL + "bar.sync 0; and.b32 %r5, %lane, 1; setp.eq.u32 %p1, %r5, 0; @%p1 bra skip;" + multiply() + "skip:"
    with pytest.raises(Fault, match=r"wgmma.*lanes that its mask names are elsewhere"):
        run(body, threads=THREADS)


@pytest.mark.parametrize(
    "instruction",
    [
        "wgmma.mma_async.sync.aligned.m64n12k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3}, %w1, %w1, 1, 1, 1, 0, 0;",
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3}, %w1, %w1, 1, 1, 1, 0, 0;",
        "wgmma.mma_async.sync.aligned.m64n8k16.f16.bf16.bf16 {%r0, %r1}, %w1, %w1, 1, 1, 1, 0, 0;",
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.f16 {%f0, %f1, %f2, %f3}, %w1, %w1, 1, 1, 1, 0, 0;",
        "wgmma.mma_async.sync.aligned.m64n8k32.s32.s8.s8 {%r0, %r1, %r2, %r3}, %w1, %w1, 1;",
        "wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.bf16.bf16 {%f0, %f1, %f2, %f3}, %w1, %w1, %r1, 0, 1, 1, 1, 0, 0;",
    ],
)
def test_other_products_are_refused_by_name(instruction: str) -> None:
    name = instruction.split()[0].replace(".", r"\.")
    with pytest.raises(ImageError, match=f"{name} is not supported"):
        load(kernel(instruction, 0, 0))
