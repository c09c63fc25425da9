"""``mma``, ``wgmma``: small integers as inputs, whose sums are exact in any order, and random ones with a tolerance.

A register holds E elements of a row of A or of a column of B: 1 of tf32, 2 of 16 bits, 4 of 8 bits. With g = lane / 4
and t = lane % 4, element i of register r of A is in row g + 8 (r & 1), column E t + i + 4 E (r >> 1); of B in row
E t + i + 4 E r, column g. Register r of C and D, of 32 bits, is in row g + 8 (r >> 1), column 2 t + (r & 1).

Each warp of a warpgroup has 16 rows of A, C and D like that; B is in shared memory, in slots of 16 bytes: slot g is the
first half of column g, slot 8 + g the second.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .case import Near, Table
from .floats import BF16, E4M3, E5M2, F16, F32, TF32, Bits, Format
from .integers import signed

MATRICES = Table("matrices")
case = MATRICES

G, T = np.arange(32) // 4, np.arange(32) % 4
M, N = 16, 8


@dataclass(frozen=True)
class Element:
    """An element type of A and B."""

    name: str
    count: int  # in a register
    format: Format | None = None  # of floating point

    def values(self, registers: list[Bits]) -> NDArray[Any]:
        """Numbers of shape (warps, registers, lanes, elements)."""
        words = np.ascontiguousarray(np.stack([x.reshape(-1, 32) for x in registers], axis=1))
        if self.format:
            parts = words if self.format is TF32 else words.view(self.format.word)
            real = (F32 if self.format is TF32 else self.format).value(parts)
            return real.reshape(*words.shape, self.count)
        narrow = words.view(np.int8 if self.name == "s8" else np.uint8)
        return narrow.reshape(*words.shape, self.count).astype(np.int64)


ELEMENTS = {
    e.name: e
    for e in (
        Element("f16", 2, F16), Element("bf16", 2, BF16), Element("tf32", 1, TF32), Element("e4m3", 4, E4M3),
        Element("e5m2", 4, E5M2), Element("s8", 4), Element("u8", 4),
    )
}  # fmt: skip


def matrix_a(element: Element, registers: list[Bits]) -> NDArray[Any]:
    values, e = element.values(registers), element.count
    matrix = np.zeros((len(values), M, 4 * e * len(registers) // 2), values.dtype)
    for r in range(len(registers)):
        for i in range(e):
            matrix[:, G + 8 * (r & 1), e * T + i + 4 * e * (r >> 1)] = values[:, r, :, i]
    return matrix


def matrix_b(element: Element, registers: list[Bits]) -> NDArray[Any]:
    values, e = element.values(registers), element.count
    matrix = np.zeros((len(values), 4 * e * len(registers), N), values.dtype)
    for r in range(len(registers)):
        for i in range(e):
            matrix[:, e * T + i + 4 * e * r, G] = values[:, r, :, i]
    return matrix


def shared_b(element: Element, registers: list[Bits]) -> NDArray[Any]:
    """Of a block of four warps, of which the first 16 threads filled the slots; the same for each warp."""
    slots = np.stack([x.reshape(-1, 128)[:, :16] for x in registers], axis=2)
    columns = slots.reshape(-1, 2, N, 4).transpose(0, 2, 1, 3)
    matrix = element.values([columns.reshape(-1)]).reshape(-1, N, 8 * element.count)
    return np.repeat(matrix.transpose(0, 2, 1), 4, axis=0)


Second = Callable[[Element, list[Bits]], NDArray[Any]]  # of B


def matrix_c(kind: str, registers: list[Bits]) -> NDArray[Any]:
    words = np.stack([x.reshape(-1, 32) for x in registers], axis=1)
    if kind == "f16":
        pairs = F16.value(np.ascontiguousarray(words).view(np.uint16)).reshape(*words.shape, 2)
        words = pairs.transpose(0, 1, 3, 2).reshape(len(words), 4, 32)  # the same order as registers of 32 bits
    values = F32.value(words) if kind == "f32" else signed(words).astype(np.int64) if kind == "s32" else words
    matrix = np.zeros((len(values), M, N), values.dtype)
    for r in range(4):
        matrix[:, G + 8 * (r >> 1), 2 * T + (r & 1)] = values[:, r]
    return matrix


def fragments(matrix: NDArray[Any]) -> list[NDArray[Any]]:
    """What each lane has of C and D, register by register of 32 bits."""
    return [matrix[:, G + 8 * (r >> 1), 2 * T + (r & 1)].reshape(-1) for r in range(4)]


def product(
    a: Element,
    b: Element,
    accumulator: str,
    counts: tuple[int, int, int],
    *,
    tolerance: float,
    saturate: bool = False,
    second: Second = matrix_b,
) -> Any:
    """The oracle of D = A B + C; ``tolerance`` times the sum of the magnitudes of all products is allowed."""

    def oracle(*inputs: Bits) -> tuple[Any, ...]:
        registers = list(inputs)
        left, right = registers[: counts[0]], registers[counts[0] : counts[0] + counts[1]]
        x, y, z = matrix_a(a, left), second(b, right), matrix_c(accumulator, registers[-counts[2] :])
        total = x @ y + z
        if accumulator == "s32":
            total = np.clip(total, -(1 << 31), (1 << 31) - 1) if saturate else total
            return tuple(part.astype(np.uint32) for part in fragments(total))
        format = F16 if accumulator == "f16" else F32
        if not tolerance:
            exact = [format.of(part) for part in fragments(total)]
            if format is F32:
                return tuple(exact)
            return tuple(exact[r].astype(np.uint32) | (exact[r + 1].astype(np.uint32) << 16) for r in (0, 2))
        allowed = tolerance * (np.abs(x) @ np.abs(y) + np.abs(z))
        want, error = fragments(total), fragments(allowed)
        if format is F32:
            return tuple(Near(F32, w, e) for w, e in zip(want, error, strict=True))
        return tuple(Near(F16, np.stack(want[r : r + 2], axis=1), np.stack(error[r : r + 2], axis=1)) for r in (0, 2))

    return oracle


def kinds_of(names: list[list[str]], x: Element, y: Element, accumulator: str, style: str = "") -> str:
    """The inputs: registers of A, B and C."""

    def of(element: Element) -> str:
        if element.format is None:
            return "b8x4"
        return f"{style}_{'f32' if element.format is TF32 else element.name + f'x{element.count}'}"

    third = "b32" if accumulator == "s32" else f"{style}_{accumulator}" + ("x2" if accumulator == "f16" else "")
    return " ".join(f"{name}:{kind}" for some, kind in zip(names, (of(x), of(y), third), strict=True) for name in some)


def floats(opcode: str, text: str, names: list[list[str]], types: tuple[str, str, str], second: Second) -> None:
    """The cases of floating point."""
    x, y, accumulator = ELEMENTS[types[0]], ELEMENTS[types[1]], types[2]
    counts = (len(names[0]), len(names[1]), len(names[2]))
    # the hardware drops low bits of products and of sums, and cuts tf32 from float32
    tolerance = {"f16": 2.0**-10, "f32": 2.0**-9 if x.format is TF32 else 2.0**-12 if x.count == 4 else 2.0**-20}[
        accumulator
    ]
    for style, what, allowed in (("small", "small integers", 0), ("gentle", "any fractions", tolerance)):
        oracle = product(x, y, accumulator, counts, tolerance=allowed, second=second)
        kinds = kinds_of(names, x, y, accumulator, style)
        case(f"{opcode}:{what}", kinds, (32,) * counts[2], oracle, text, most=THREADS)


THREADS = 1 << 13


def mma(shape: str, a: str, b: str, accumulator: str, counts: tuple[int, int], *, saturate: bool = False) -> None:
    """The cases of one shape and its types. ``counts``: registers of A and of B."""
    x, y, c = ELEMENTS[a], ELEMENTS[b], 2 if accumulator == "f16" else 4
    names = [[f"{letter}{at}" for at in range(n)] for letter, n in zip("abc", (*counts, c), strict=True)]
    finite = ".satfinite" if saturate else ""
    opcode = f"mma.sync.aligned.{shape}.row.col{finite}.{accumulator}.{a}.{b}.{accumulator}"
    text = f"OP {{{', '.join('defg'[:c])}}}, " + ", ".join(f"{{{', '.join(each)}}}" for each in names)
    if accumulator != "s32":
        floats(opcode, text, names, (a, b, accumulator), matrix_b)
        return
    oracle = product(x, y, accumulator, (*counts, c), tolerance=0, saturate=saturate)
    case(opcode, kinds_of(names, x, y, accumulator), (32,) * c, oracle, text, most=THREADS)


def wgmma(shape: str, a: str, b: str, accumulator: str) -> None:
    """The cases of 8 columns and some types: A in registers, B not swizzled."""
    d = "defg"[: 2 if accumulator == "f16" else 4]
    names = [[f"{letter}{at}" for at in range(n)] for letter, n in zip("abc", (4, 4, len(d)), strict=True)]
    opcode = f"wgmma.mma_async.sync.aligned.{shape}.{accumulator}.{a}.{b}"
    signs = "1, 1, 0" if ELEMENTS[a].count == 2 else "1, 1"
    text = "st.shared.v4.b32 [sp], {b0, b1, b2, b3}; fence.proxy.async.shared::cta; bar.sync 0; "
    text += "cvt.u64.u32 w0, window; and.b64 w0, w0, 0x3ffff; shr.u64 w0, w0, 4; or.b64 w0, w0, 0x80000; "  # 128 to k/2
    text += "".join(f"mov.b32 {to}, {c}; " for to, c in zip(d, names[2], strict=True))
    text += f"wgmma.fence.sync.aligned; OP {{{', '.join(d)}}}, {{{', '.join(names[0])}}}, w0, 1, {signs}; "
    text += "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0"
    floats(opcode, text, names, (a, b, accumulator), shared_b)


for shape, counts in {"m16n8k8": (2, 1), "m16n8k16": (4, 2)}.items():
    mma(shape, "f16", "f16", "f16", counts)
    mma(shape, "f16", "f16", "f32", counts)
    mma(shape, "bf16", "bf16", "f32", counts)
mma("m16n8k4", "tf32", "tf32", "f32", (2, 1))
mma("m16n8k8", "tf32", "tf32", "f32", (4, 2))
for first in ("e4m3", "e5m2"):
    for second in ("e4m3", "e5m2"):
        mma("m16n8k32", first, second, "f32", (4, 2))
for first in ("s8", "u8"):
    for second in ("s8", "u8"):
        for finite in (False, True):
            mma("m16n8k16", first, second, "s32", (2, 1), saturate=finite)
            mma("m16n8k32", first, second, "s32", (4, 2), saturate=finite)
for a, b, d in (("f16", "f16", "f16"), ("f16", "f16", "f32"), ("bf16", "bf16", "f32")):
    wgmma("m64n8k16", a, b, d)
wgmma("m64n8k8", "tf32", "tf32", "f32")
for first in ("e4m3", "e5m2"):
    for second in ("e4m3", "e5m2"):
        wgmma("m64n8k32", first, second, "f32")
