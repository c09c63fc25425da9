"""A case: one opcode with its modifiers, as PTX for one thread an element, and what numpy says of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .floats import WORDS, Bits, Format, Reals, Truths
from .inputs import BLOCK, KINDS, unpacked

VERSION = "8.6"  # of the PTX ISA: the first that knows every opcode here
TARGET = "sm_90a"
C_TYPES = {8: "unsigned char", 16: "unsigned short", 32: "unsigned int", 64: "unsigned long long"}
SLOT_BYTES = 16  # of shared memory, for each thread


@dataclass(frozen=True)
class AnyNaN:
    """Bits, where one NaN is as good as another."""

    format: Format
    bits: Bits

    def agrees(self, got: Bits) -> Truths:
        same = np.asarray(self.canonical(got) == self.canonical(self.bits))
        return np.asarray(same.reshape(len(got), -1).all(axis=1))

    def canonical(self, got: Bits) -> Bits:
        parts: Bits = np.ascontiguousarray(got).view(self.format.word)
        return np.where(self.format.is_nan(parts), self.format.word(self.format.nan), parts)


@dataclass(frozen=True)
class Near:
    """Real numbers, and how far from each a result may be. Packed results are the last axis."""

    format: Format
    want: Reals
    allowed: Reals
    ftz: bool = False

    @np.errstate(all="ignore")
    def agrees(self, got: Bits) -> Truths:
        format = self.format
        bits = np.ascontiguousarray(got).view(format.word).reshape(len(got), -1)
        want, allowed = self.want.reshape(bits.shape), self.allowed.reshape(bits.shape)
        value = format.value(bits)
        fits = self._distance(value, want) <= np.where(np.isinf(want), 0.0, allowed)
        if self.ftz:
            fits = (fits | self._flushed(value, want)) & ~format.is_subnormal(bits)
        fits &= (want != 0) | ((value == 0) & (np.signbit(value) == np.signbit(want)))
        return np.asarray(np.where(np.isnan(want), np.isnan(value), fits).all(axis=1))

    @np.errstate(all="ignore")
    def error_ulp(self, got: Bits) -> float:
        """The largest distance from what is wanted, in units of the last place of that."""
        bits = np.ascontiguousarray(got).view(self.format.word).reshape(len(got), -1)
        want = self.want.reshape(bits.shape)
        value = self.format.value(bits)
        off = self._distance(value, want) / ulp(self.format, want)
        counts = np.isfinite(want) & np.isfinite(off)
        if self.ftz:
            counts &= ~self._flushed(value, want)
        return float(off[counts].max(initial=0.0))

    def _flushed(self, value: Reals, want: Reals) -> Truths:
        """Zero for what is subnormal, or would be but for the last rounding."""
        tiny = 2.0 ** (self.format.lowest + self.format.fraction_bits) * (1 + 2.0**-20)
        return np.asarray((value == 0) & (np.abs(want) <= tiny) & (np.signbit(value) == np.signbit(want)))

    def _distance(self, value: Reals, want: Reals) -> Reals:
        """With infinity one place above the largest number, so that a result may overflow where it is near that."""
        beyond = np.nan_to_num(np.ldexp(1.0, 1 << (self.format.exponent_bits - 1)))
        return np.asarray(np.abs(np.clip(value, -beyond, beyond) - np.clip(want, -beyond, beyond)))


Expected = Bits | AnyNaN | Near
Oracle = Callable[..., Any]  # inputs, and the memory before if there is any -> Expected, or several


@np.errstate(all="ignore")
def ulp(format: Format, want: Reals) -> Reals:
    """The unit in the last place of the numbers of a format at ``want``."""
    exponent = np.frexp(np.where(np.isfinite(want), want, 1.0))[1] - 1
    highest = (1 << (format.exponent_bits - 1)) - 1
    return np.asarray(np.ldexp(1.0, np.maximum(np.minimum(exponent, highest) - format.fraction_bits, format.lowest)))


@dataclass(frozen=True)
class Memory:
    """``extent`` elements of global memory for each thread, of a kind, at the address in register ``m``."""

    kind: str
    extent: int = 1

    @property
    def element(self) -> tuple[str, int]:
        """The kind of what is packed in an element, and how many."""
        return unpacked(self.kind)

    @property
    def width(self) -> int:
        return input_width(self.kind)


@dataclass(frozen=True)
class Case:
    """One opcode with its modifiers; after a colon in the name, what is special about it.

    The registers ``a``, ``b``, ``c`` hold the inputs (or those that ``inputs`` names); ``d``, ``e``, ``f``, ``g`` the
    outputs. ``lane``, ``tid``, ``m`` (address in global memory), ``sp`` (address of this thread's slot of shared
    memory), ``window`` (where those slots begin) are there if the text says them, and ``p q r s``, ``h0-3``,
    ``t0-7``, ``w0-7`` are for its own use.
    """

    name: str
    text: str
    inputs: tuple[tuple[str, str], ...]  # register, kind
    outputs: tuple[int, ...]  # widths
    oracle: Oracle
    group: str
    memory: Memory | None = None
    most: int = 1 << 20  # threads, where the oracle is slow

    @property
    def opcode(self) -> str:
        return opcode_of(self.name)

    @property
    def symbol(self) -> str:
        return re.sub(r"\W+", "_", self.name)

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(kind for _, kind in self.inputs)

    @property
    def signature(self) -> str:
        parts = [f"const {C_TYPES[input_width(kind)]}* {name}" for name, kind in self.inputs]
        parts += [f"{C_TYPES[width]}* {name}" for name, width in zip("defg", self.outputs, strict=False)]
        parts += [f"{C_TYPES[self.memory.width]}* memory"] if self.memory else []
        return ", ".join(parts)

    def expected(self, *inputs: Bits) -> tuple[Expected, ...]:
        """What the outputs should be, and after them the memory."""
        with np.errstate(all="ignore"):
            result = self.oracle(*inputs)
        results = result if isinstance(result, tuple) else (result,)
        widths = [*self.outputs, *([self.memory.width] if self.memory else [])]
        return tuple(
            _as_word(value, width) if isinstance(value, np.ndarray) else value
            for value, width in zip(results, widths, strict=True)
        )

    def ptx(self) -> str:
        """The kernel."""
        says = {name: bool(re.search(rf"\b{name}\b", self.text)) for name in ("lane", "m", "sp", "window")}
        symbol, lines = self.symbol, list[str]()

        def declare(width: int, *names: str) -> None:
            lines.append(f".reg .b{max(width, 16)} {', '.join(names)};")

        def address(parameter: int, nbytes: int, register: str) -> None:
            lines.append(f"ld.param.u64 {register}, [{symbol}_param_{parameter}];")
            lines.append(f"cvta.to.global.u64 {register}, {register};")
            lines.append(f"mul.wide.u32 offset, i, {nbytes};")
            lines.append(f"add.s64 {register}, {register}, offset;")

        lines += [".reg .pred p, q, r, s;", ".reg .b16 h<4>;", ".reg .b32 t<8>, i, tid, cta;", ".reg .b64 w<8>;"]
        lines += [".reg .b64 at, offset;"]
        for register, kind in self.inputs:
            declare(input_width(kind), register)
        for register, width in zip("defg", self.outputs, strict=False):
            declare(width, register)
        lines += ["mov.u32 cta, %ctaid.x;", "mov.u32 tid, %tid.x;", f"mad.lo.s32 i, cta, {BLOCK}, tid;"]
        if says["lane"]:
            lines += [".reg .b32 lane;", "and.b32 lane, tid, 31;"]
        if says["sp"] or says["window"]:
            lines += [f".shared .align 16 .b8 {symbol}_window[{BLOCK * SLOT_BYTES}];", ".reg .b32 window, sp;"]
            lines += [f"mov.u32 window, {symbol}_window;", f"mad.lo.s32 sp, tid, {SLOT_BYTES}, window;"]
        for at, (register, kind) in enumerate(self.inputs):
            width = input_width(kind)
            address(at, width // 8, "at")
            lines.append(f"ld.global.{'u8' if width == 8 else f'b{width}'} {register}, [at];")
        if self.memory:
            lines.append(".reg .b64 m;")
            address(len(self.inputs) + len(self.outputs), self.memory.extent * self.memory.width // 8, "m")
        lines += [f"{line.strip()};" for line in self.text.split(";") if line.strip()]
        for at, (register, width) in enumerate(zip("defg", self.outputs, strict=False), len(self.inputs)):
            address(at, width // 8, "at")
            lines.append(f"st.global.{'u8' if width == 8 else f'b{width}'} [at], {register};")
        count = len(self.inputs) + len(self.outputs) + bool(self.memory)
        parameters = ",\n".join(f"\t.param .u64 {symbol}_param_{at}" for at in range(count))
        body = "\n".join(f"\t{line}" for line in [*lines, "ret;"])
        return f".visible .entry {symbol}(\n{parameters}\n)\n{{\n{body}\n}}\n"


def module_ptx(cases: Iterable[Case]) -> bytes:
    """One module with the kernels of the cases."""
    header = f".version {VERSION}\n.target {TARGET}\n.address_size 64\n\n"
    return (header + "\n".join(case.ptx() for case in cases)).encode()


def opcode_of(name: str) -> str:
    """What stands before the lone colon."""
    return re.split("(?<!:):(?!:)", name, maxsplit=1)[0]


def input_width(kind: str) -> int:
    name, count = unpacked(kind)
    return KINDS[name].width * count


def _as_word(value: NDArray[Any], width: int) -> Bits:
    word = WORDS[width]
    if value.dtype == object:
        value = (value & ((1 << 64) - 1)).astype(np.uint64)
    return value.astype(word).reshape(-1)


class Table(list[Case]):
    """The cases of one group; calling it adds one."""

    def __init__(self, group: str) -> None:
        super().__init__()
        self.group = group

    def __call__(
        self,
        name: str,
        inputs: str,
        output: int | tuple[int, ...],
        oracle: Oracle,
        text: str = "",
        *,
        memory: Memory | None = None,
        most: int = 1 << 20,
    ) -> None:
        """``inputs`` are kinds for the registers a, b, c, or ``register:kind``; the text is ``name d, a, b, c``."""
        pairs: list[tuple[str, str]] = []
        for each in inputs.split():
            register, _, kind = each.rpartition(":")
            pairs.append((register or "abc"[len(pairs)], kind))
        outputs = (output,) if isinstance(output, int) else output
        opcode = opcode_of(name)
        registers = [*"defg"[: len(outputs)], *(register for register, _ in pairs)]
        text = text.replace("OP", opcode) or f"{opcode} {', '.join(registers)}"
        self.append(Case(name, text, tuple(pairs), outputs, oracle, self.group, memory, most))


def halves(oracle: Oracle, count: int = 2) -> Oracle:
    """The same of each part of packed registers."""

    def packed(*inputs: Bits) -> Bits:
        width = inputs[0].dtype.itemsize * 8 // count
        parts = [np.ascontiguousarray(x).view(WORDS[width]) for x in inputs]
        result = np.ascontiguousarray(_as_word(oracle(*parts), width))
        return result.view(inputs[0].dtype)

    return packed
