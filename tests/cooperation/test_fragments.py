"""Matrices whose elements lie in the lanes of a warp: loads, stores, transposes, products."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cooperation import Kernels, RandomWords, blank, equal, kernels
from numpy.typing import NDArray

# ---- matrices --------------------------------------------------------------------------------------------------------

FRAGMENTS = r"""
// Rows of 16 bytes, in the order that `where` tells, as fragments of 8 x 8 elements of 16 bits: y has the registers, z
// the rows that they are stored to. Each warp has 32 rows.
template <int count, bool transposed> __device__ void load(u32 (&a)[4], u32 from) {
#define LDMATRIX(form) "ldmatrix.sync.aligned.m8n8." form ".shared.b16 "
  if (count == 1 && !transposed) asm volatile(LDMATRIX("x1") "{%0}, [%1];" : "=r"(a[0]) : "r"(from) : "memory");
  if (count == 1 && transposed) asm volatile(LDMATRIX("x1.trans") "{%0}, [%1];" : "=r"(a[0]) : "r"(from) : "memory");
  if (count == 2 && !transposed)
    asm volatile(LDMATRIX("x2") "{%0, %1}, [%2];" : "=r"(a[0]), "=r"(a[1]) : "r"(from) : "memory");
  if (count == 2 && transposed)
    asm volatile(LDMATRIX("x2.trans") "{%0, %1}, [%2];" : "=r"(a[0]), "=r"(a[1]) : "r"(from) : "memory");
  if (count == 4 && !transposed)
    asm volatile(LDMATRIX("x4") "{%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(from) : "memory");
  if (count == 4 && transposed)
    asm volatile(LDMATRIX("x4.trans") "{%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(from) : "memory");
}
template <int count, bool transposed> __device__ void store(u32 to, const u32 (&a)[4]) {
#define STMATRIX(form) "stmatrix.sync.aligned.m8n8." form ".shared.b16 "
  if (count == 1 && !transposed) asm volatile(STMATRIX("x1") "[%0], {%1};" :: "r"(to), "r"(a[0]) : "memory");
  if (count == 1 && transposed) asm volatile(STMATRIX("x1.trans") "[%0], {%1};" :: "r"(to), "r"(a[0]) : "memory");
  if (count == 2 && !transposed)
    asm volatile(STMATRIX("x2") "[%0], {%1, %2};" :: "r"(to), "r"(a[0]), "r"(a[1]) : "memory");
  if (count == 2 && transposed)
    asm volatile(STMATRIX("x2.trans") "[%0], {%1, %2};" :: "r"(to), "r"(a[0]), "r"(a[1]) : "memory");
  if (count == 4 && !transposed)
    asm volatile(STMATRIX("x4") "[%0], {%1, %2, %3, %4};"
                 :: "r"(to), "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]) : "memory");
  if (count == 4 && transposed)
    asm volatile(STMATRIX("x4.trans") "[%0], {%1, %2, %3, %4};"
                 :: "r"(to), "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]) : "memory");
}

template <int count, bool in, bool out>
__global__ void move(const uint4* x, const u32* where, u32* y, uint4* z) {
  extern __shared__ uint4 rows[];
  uint4* const from = rows + threadIdx.x / 32 * 64;
  uint4* const to = from + 32;
  u32 a[4] = {};
  from[lane_id()] = x[thread()];
  to[lane_id()] = uint4{};
  __syncwarp();
  load<count, in>(a, at(from + where[thread()]));
  store<count, out>(at(to + where[thread()]), a);
  __syncwarp();
  for (int i = 0; i < 4; ++i) y[4 * thread() + i] = a[i];
  z[thread()] = to[lane_id()];
}

__global__ void turn(const u32* x, u32* y) {
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y[thread()]) : "r"(x[thread()]));
}
"""
MOVES = [(count, in_, out) for count in (1, 2, 4) for in_ in (False, True) for out in (False, True)]


@kernels("fragments", FRAGMENTS, *(f"move<{c}, {'true' if i else 'false'}, {'true' if o else 'false'}>"
                                   for c, i, o in MOVES))  # fmt: skip
@pytest.mark.parametrize("warps", [1, 3])
@pytest.mark.parametrize(("count", "turned_in", "turned_out"), MOVES, ids=str)
def test_fragments_are_loaded_and_stored(
    run: Kernels, rng: np.random.Generator, words: RandomWords, warps: int, count: int, turned_in: bool,
    turned_out: bool,
) -> None:  # fmt: skip
    x, where = words(warps, 32, 4), np.argsort(rng.random((warps, 32)), axis=1).astype(np.uint32)
    name = f"move<{count}, {str(turned_in).lower()}, {str(turned_out).lower()}>"
    how = {"grid": 1, "block": 32 * warps, "shared_mem_bytes": 1024 * warps}
    _, _, registers, rows = run(name, x, where, blank(warps, 32, 4), blank(*x.shape), **how)
    for w in range(warps):
        places = where[w, : 8 * count]
        matrices = x[w].view(np.uint16)[places].reshape(count, 8, 8)
        loaded = matrices.swapaxes(1, 2) if turned_in else matrices
        fragments = np.ascontiguousarray(loaded).view(np.uint32).reshape(count, 32)
        equal(registers[w, :, :count], fragments.T)
        stored = np.zeros((32, 8), np.uint16)
        stored[places] = (loaded.swapaxes(1, 2) if turned_out else loaded).reshape(8 * count, 8)
        equal(rows[w].view(np.uint16), stored)


@kernels("fragments", FRAGMENTS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 4)], ids=str)
def test_a_warp_turns_a_matrix(run: Kernels, words: RandomWords, shape: tuple[int, int]) -> None:
    blocks, warps = shape
    x = words(blocks * warps, 32)
    _, found = run("turn", x, blank(*x.shape), grid=blocks, block=32 * warps)
    equal(found.view(np.uint16).reshape(-1, 8, 8), x.view(np.uint16).reshape(-1, 8, 8).swapaxes(1, 2))


# mma.sync of 16 x 8 elements with 32 bytes of each row of A and of each column of B: the type of A and B, that of C
# and D, how their registers are told the compiler.
PRODUCTS = {
    "f16": ("m16n8k16", "f32"),
    "bf16": ("m16n8k16", "f32"),
    "tf32": ("m16n8k8", "f32"),
    "e4m3": ("m16n8k32", "f32"),
    "e5m2": ("m16n8k32", "f32"),
    "s8": ("m16n8k32", "s32"),
    "u8": ("m16n8k32", "s32"),
}
ELEMENTS = {
    "f16": np.float16, "bf16": ml_dtypes.bfloat16, "tf32": np.float32, "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2, "s8": np.int8, "u8": np.uint8,
}  # fmt: skip
PRODUCT = r"""
// D = A B + C of a warp, over `steps` pieces of 32 bytes of A's rows and B's columns.
__global__ void NAME(const uint4* a, const uint4* b, const TYPE* c, TYPE* d, int steps) {
  extern __shared__ uint4 tiles[];
  const u32 lane = lane_id(), warp = thread() / 32, row = lane / 4, column = lane % 4 * 2;
  uint4* const left = tiles + threadIdx.x / 32 * 48;  // 16 rows of 2, then 8 columns of 2
  uint4* const right = left + 32;
  const u32 offset = warp * 128 + row * 8 + column;
  TYPE sum[4] = {c[offset], c[offset + 1], c[offset + 64], c[offset + 65]};
#pragma unroll 1
  for (int s = 0; s < steps; ++s) {
    left[lane] = a[(warp * steps + s) * 32 + lane];
    if (lane < 16) right[lane] = b[(warp * steps + s) * 16 + lane];
    __syncwarp();
    u32 x[4], y[2];
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(at(left + lane % 16 * 2 + lane / 16)) : "memory");
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(y[0]), "=r"(y[1]) : "r"(at(right + lane % 8 * 2 + lane / 8 % 2)) : "memory");
    asm volatile("OPCODE {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+KIND"(sum[0]), "+KIND"(sum[1]), "+KIND"(sum[2]), "+KIND"(sum[3])
                 : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]));
    __syncwarp();
  }
  d[offset] = sum[0], d[offset + 1] = sum[1], d[offset + 64] = sum[2], d[offset + 65] = sum[3];
}
"""


def product(name: str) -> str:
    shape, kind = PRODUCTS[name]
    replaced = {
        "NAME": f"of_{name}",
        "TYPE": "int" if kind == "s32" else "float",
        "OPCODE": f"mma.sync.aligned.{shape}.row.col.{kind}.{name}.{name}.{kind}",
        "KIND": "r" if kind == "s32" else "f",
    }
    text = PRODUCT
    for key, value in replaced.items():
        text = text.replace(key, value)
    return text


def multiplied(
    run: Kernels, name: str, a: NDArray[Any], b: NDArray[Any], c: NDArray[Any], warps: int
) -> NDArray[np.float64]:
    """By a kernel: A of (products, steps, 16, k), B of (products, steps, 8, k), which has its columns as rows."""
    x, y = (np.ascontiguousarray(each).view(np.uint32).reshape(*each.shape[:3], 8) for each in (a, b))
    how = {"grid": len(a) // warps, "block": 32 * warps, "shared_mem_bytes": 768 * warps}
    d: NDArray[np.float64] = run(f"of_{name}", x, y, c, np.full_like(c, 77), a.shape[1], **how)[3].astype(np.float64)
    return d


WARPS_AND_STEPS = [(1, 1, 1), (2, 3, 2), (1, 4, 5)]


@kernels("products", "".join(map(product, PRODUCTS)))
@pytest.mark.parametrize("shape", WARPS_AND_STEPS, ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_small_integers_are_exact(
    run: Kernels, rng: np.random.Generator, shape: tuple[int, int, int], name: str
) -> None:
    blocks, warps, steps = shape
    element = np.dtype(ELEMENTS[name])
    low, high = {"s8": (-128, 128), "u8": (0, 256)}.get(name, (-4, 5))  # sums of 8-bit floats keep fewer bits than f32
    k = 32 // element.itemsize
    a, b = (rng.integers(low, high, (blocks * warps, steps, n, k)).astype(element) for n in (16, 8))
    c = rng.integers(-100, 100, (blocks * warps, 16, 8)).astype(np.int32 if PRODUCTS[name][1] == "s32" else "f4")
    found = multiplied(run, name, a, b, c, warps)
    want = (a.astype(np.float64) @ b.astype(np.float64).swapaxes(2, 3)).sum(axis=1) + c
    equal(found, want)


@kernels("products", "".join(map(product, PRODUCTS)))
@pytest.mark.parametrize("shape", WARPS_AND_STEPS, ids=str)
@pytest.mark.parametrize("name", [name for name, (_, kind) in PRODUCTS.items() if kind == "f32"])
def test_products_of_fractions_are_near(
    run: Kernels, rng: np.random.Generator, shape: tuple[int, int, int], name: str
) -> None:
    """The hardware aligns the products of a step to the largest and cuts off what is below its accumulator, which has
    fewer bits for elements of 8 bits; sums of one after another round instead."""
    blocks, warps, steps = shape
    element = np.dtype(ELEMENTS[name])
    k = 32 // element.itemsize
    a, b = (rng.normal(size=(blocks * warps, steps, n, k)).astype(element) for n in (16, 8))
    if name == "tf32":  # the low bits are not looked at
        a, b = ((each.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32) for each in (a, b))
    c = rng.normal(size=(blocks * warps, 16, 8)).astype(np.float32)
    found = multiplied(run, name, a, b, c, warps)
    x, y = a.astype(np.float64), b.astype(np.float64).swapaxes(2, 3)
    size = (np.abs(x) @ np.abs(y)).sum(axis=1) + np.abs(c)
    error = np.abs(found - ((x @ y).sum(axis=1) + c))
    allowed = steps * (2.0**-11 if element.itemsize == 1 else 2.0**-18)
    assert (error <= allowed * size).all(), (error / size).max()
