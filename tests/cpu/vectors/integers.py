"""Integer, bit, logic, shift, comparison and selection instructions."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .case import Table, halves
from .floats import F32, WORDS, Bits

INTEGERS = Table("integers")
case = INTEGERS

SIGNED: dict[int, type[Any]] = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}


def signed(x: Bits) -> NDArray[Any]:
    return x.view(SIGNED[x.dtype.itemsize * 8])


def reading(kind: str) -> Callable[[Bits], NDArray[Any]]:
    """Bits as the integers of a type such as ``s32``."""
    return signed if kind[0] == "s" else lambda x: x


def big(kind: str) -> Callable[[Bits], NDArray[Any]]:
    """The same, wide enough for products: int64, or Python integers for 64 bits."""
    read = reading(kind)
    return lambda x: np.asarray(read(x).astype(object if kind.endswith("64") else np.int64))


def clamped(x: NDArray[Any], low: int, high: int) -> NDArray[Any]:
    return np.asarray(np.minimum(np.maximum(x, low), high))


def ones(n: NDArray[Any], width: int) -> Bits:
    """``n`` low bits set, of ``width``."""
    n = np.minimum(n.astype(np.uint64), np.uint64(width))
    all_ones = np.uint64((1 << width) - 1)
    return np.where(n >= width, all_ones, (np.uint64(1) << np.minimum(n, np.uint64(63))) - np.uint64(1))


def left(x: Bits, n: NDArray[Any]) -> Bits:
    """Shifted left; by the width or more: 0."""
    width = x.dtype.itemsize * 8
    n = n.astype(np.uint64)
    return np.where(n >= width, 0, x << np.minimum(n, np.uint64(width - 1)).astype(x.dtype)).astype(x.dtype)


def right(x: NDArray[Any], n: NDArray[Any]) -> NDArray[Any]:
    """Shifted right; by the width or more: 0, or the sign everywhere."""
    width = x.dtype.itemsize * 8
    n = n.astype(np.uint64)
    shifted = x >> np.minimum(n, np.uint64(width - 1)).astype(x.dtype)
    return np.where(n >= width, 0, shifted).astype(x.dtype) if x.dtype.kind == "u" else shifted


def bits_of(x: Bits) -> NDArray[np.uint8]:
    """Each bit of each element, the lowest first, on a last axis."""
    width = x.dtype.itemsize * 8
    return np.asarray((x[..., None] >> np.arange(width).astype(x.dtype)) & x.dtype.type(1), np.uint8)


def from_bits(bits: NDArray[np.uint8]) -> Bits:
    width = bits.shape[-1]
    packed: Bits = np.packbits(bits, axis=-1, bitorder="little").reshape(len(bits), -1)
    return np.asarray(packed.view(WORDS[width])[:, 0])


TYPES = [f"{sign}{width}" for width in (16, 32, 64) for sign in "su"]

# ---- arithmetic ----------------------------------------------------------------------------------------------------

for kind in TYPES:
    w = int(kind[1:])
    two, three, x, big_x = f"b{w} b{w}", f"b{w} b{w} b{w}", reading(kind), big(kind)
    slow = 1 << (16 if w == 64 else 20)
    case(f"add.{kind}", two, w, lambda a, b: a + b)
    case(f"sub.{kind}", two, w, lambda a, b: a - b)
    case(f"mul.lo.{kind}", two, w, lambda a, b: a * b)
    case(f"mad.lo.{kind}", three, w, lambda a, b, c: a * b + c)
    case(f"mul.hi.{kind}", two, w, lambda a, b, x=big_x, w=w: (x(a) * x(b)) >> w, most=slow)
    case(f"mad.hi.{kind}", three, w, lambda a, b, c, x=big_x, w=w: ((x(a) * x(b)) >> w) + x(c), most=slow)
    case(f"sad.{kind}", three, w, lambda a, b, c, x=x: c + np.where(x(a) < x(b), b - a, a - b))
    case(f"min.{kind}", two, w, lambda a, b, x=x: np.minimum(x(a), x(b)))
    case(f"max.{kind}", two, w, lambda a, b, x=x: np.maximum(x(a), x(b)))
    if w < 64:
        case(f"mul.wide.{kind}", two, 2 * w, lambda a, b, x=big_x: x(a) * x(b))
        case(f"mad.wide.{kind}", f"{two} b{2 * w}", 2 * w, lambda a, b, c, x=big_x: (x(a) * x(b)).view(np.uint64) + c)
    # division by zero is unspecified
    quotient = two.replace(f" b{w}", f" nonzero{w}")
    if kind[0] == "u":
        case(f"div.{kind}", quotient, w, lambda a, b: a // b)
        case(f"rem.{kind}", quotient, w, lambda a, b: a % b)
    else:
        wide: Callable[[Bits], NDArray[Any]] = big_x
        truncated: Callable[..., Any] = lambda a, b: abs(a) // abs(b) * np.where((a < 0) == (b < 0), 1, -1)  # noqa: E731
        case(f"div.{kind}", quotient, w, lambda a, b, x=wide, q=truncated: q(x(a), x(b)), most=slow)
        case(f"rem.{kind}", quotient, w, lambda a, b, x=wide, q=truncated: x(a) - q(x(a), x(b)) * x(b), most=slow)
        case(f"abs.{kind}", f"b{w}", w, lambda a, x=x: np.abs(x(a)))
        case(f"neg.{kind}", f"b{w}", w, lambda a: ~a + a.dtype.type(1))

LOW, HIGH = -(1 << 31), (1 << 31) - 1
s32, u32 = big("s32"), big("u32")
case("add.sat.s32", "b32 b32", 32, lambda a, b: clamped(s32(a) + s32(b), LOW, HIGH))
case("sub.sat.s32", "b32 b32", 32, lambda a, b: clamped(s32(a) - s32(b), LOW, HIGH))
case("mad.hi.sat.s32", "b32 b32 b32", 32, lambda a, b, c: clamped((s32(a) * s32(b) >> 32) + s32(c), LOW, HIGH))
for name, pick in {"min": np.minimum, "max": np.maximum}.items():
    case(f"{name}.relu.s32", "b32 b32", 32, lambda a, b, pick=pick: np.maximum(pick(signed(a), signed(b)), 0))
    case(f"{name}.s16x2", "b16x2 b16x2", 32, halves(lambda a, b, pick=pick: pick(signed(a), signed(b))))
    case(f"{name}.u16x2", "b16x2 b16x2", 32, halves(lambda a, b, pick=pick: pick(a, b)))
    case(
        f"{name}.relu.s16x2",
        "b16x2 b16x2",
        32,
        halves(lambda a, b, pick=pick: np.maximum(pick(signed(a), signed(b)), 0)),
    )
for kind in ("u16x2", "s16x2"):
    case(f"add.{kind}", "b16x2 b16x2", 32, halves(lambda a, b: a + b))


def low24(x: Bits, kind: str) -> NDArray[Any]:
    low = (x & np.uint32(0xFFFFFF)).astype(np.int64)
    return np.where((kind == "s32") & (low >= 1 << 23), low - (1 << 24), low)


for kind in ("s32", "u32"):
    product: Callable[..., Any] = lambda a, b, kind=kind: low24(a, kind) * low24(b, kind)  # noqa: E731
    case(f"mul24.lo.{kind}", "b32 b32", 32, lambda a, b, f=product: f(a, b))
    case(f"mul24.hi.{kind}", "b32 b32", 32, lambda a, b, f=product: f(a, b) >> 16)
    case(f"mad24.lo.{kind}", "b32 b32 b32", 32, lambda a, b, c, f=product: f(a, b) + s32(c))
    case(f"mad24.hi.{kind}", "b32 b32 b32", 32, lambda a, b, c, f=product: (f(a, b) >> 16) + s32(c))
case("mad24.hi.sat.s32", "b32 b32 b32", 32,
     lambda a, b, c: clamped((low24(a, "s32") * low24(b, "s32") >> 16) + s32(c), LOW, HIGH))  # fmt: skip

# ---- carry chains --------------------------------------------------------------------------------------------------

for w in (32, 64):
    x = big(f"u{w}") if w == 32 else lambda v: v.astype(object)
    three, both, slow = f"b{w} b{w} b{w}", (w, w), 1 << (20 if w == 32 else 16)
    case(f"add.cc.u{w}", three, both, lambda a, b, c, x=x, w=w: (a + b, x(c) + ((x(a) + x(b)) >> w)),
         f"add.cc.u{w} d, a, b; addc.u{w} e, c, 0", most=slow)  # fmt: skip
    case(f"addc.cc.u{w}", three, both,
         lambda a, b, c, x=x, w=w: (x(c) + x(b) + ((x(a) + x(b)) >> w) >= 1 << w, x(c) + x(b) + ((x(a) + x(b)) >> w)),
         f"add.cc.u{w} d, a, b; addc.cc.u{w} e, c, b; addc.u{w} d, 0, 0", most=slow)  # fmt: skip
    case(f"sub.cc.u{w}", three, both, lambda a, b, c, x=x: (a - b, x(c) - (a < b)),
         f"sub.cc.u{w} d, a, b; subc.u{w} e, c, 0", most=slow)  # fmt: skip
    case(f"subc.cc.u{w}", three, both,
         lambda a, b, c, x=x: (x(c) - x(b) - (a < b), 0 - (x(c) - x(b) - (a < b) < 0).astype(np.int64)),
         f"sub.cc.u{w} d, a, b; subc.cc.u{w} d, c, b; subc.u{w} e, 0, 0", most=slow)  # fmt: skip
    case(f"mad.lo.cc.u{w}", three, both,
         lambda a, b, c, x=x, w=w: (a * b + c, ((x(a) * x(b) & ((1 << w) - 1)) + x(c)) >> w),
         f"mad.lo.cc.u{w} d, a, b, c; addc.u{w} e, 0, 0", most=1 << 16)  # fmt: skip
    case(f"madc.hi.u{w}", three, both,
         lambda a, b, c, w=w: (a * b + c, ((a.astype(object) * b.astype(object) + c.astype(object)) >> w)),
         f"mad.lo.cc.u{w} d, a, b, c; madc.hi.u{w} e, a, b, 0", most=1 << 16)  # fmt: skip
    case(f"madc.lo.u{w}", three, w,
         lambda a, b, c, x=x, w=w: x(a) * x(b) + x(c) + ((x(a) + x(b)) >> w),
         f"add.cc.u{w} d, a, b; madc.lo.u{w} d, a, b, c", most=1 << 16)  # fmt: skip
    case(f"madc.hi.cc.u{w}", three, both,
         lambda a, b, c, w=w: (
             ((a.astype(object) * b.astype(object) + c.astype(object)) >> w) + c.astype(object),
             (((a.astype(object) * b.astype(object) + c.astype(object)) >> w) + c.astype(object)) >> w),
         f"mad.lo.cc.u{w} d, a, b, c; madc.hi.cc.u{w} d, a, b, c; addc.u{w} e, 0, 0", most=1 << 16)  # fmt: skip

# ---- bits ----------------------------------------------------------------------------------------------------------


def leading(a: Bits) -> NDArray[Any]:
    """The position of the highest bit set, or -1."""
    set_bits = bits_of(a)
    width = set_bits.shape[-1]
    return np.where(a == 0, -1, width - 1 - np.argmax(set_bits[:, ::-1], axis=-1))


def significant(a: Bits, kind: str) -> Bits:
    """What ``bfind`` looks at: of a negative number its complement."""
    return np.where((kind[0] == "s") & (signed(a) < 0), ~a, a)


def shift_to_top(a: Bits) -> NDArray[Any]:
    """By how much to shift left so that the highest bit set is at the top, or -1."""
    return np.where(a == 0, -1, 8 * a.dtype.itemsize - 1 - leading(a))


def fns(mask: Bits, base: Bits, offset: Bits) -> Bits:
    position, remaining = signed(base).copy(), np.abs(signed(offset).astype(np.int64)) - 1
    step = np.sign(signed(offset)).astype(np.int32)
    here = (mask >> base) & 1
    found = np.where((offset == 0) & (here == 1), signed(base), -1)
    searching = offset != 0
    for _ in range(32):
        searching &= (position >= 0) & (position < 32)
        hit = searching & ((mask >> np.where(searching, position, 0).astype(np.uint32)) & 1 == 1)
        found = np.where(hit & (remaining == 0), position, found)
        searching &= ~(hit & (remaining == 0))
        remaining -= hit
        position += np.where(searching, step, 0)
    return np.asarray(found, np.int64).astype(np.uint32)


def bfe(a: Bits, b: Bits, c: Bits, kind: str) -> Bits:
    width = int(kind[1:])
    position, length = b & 0xFF, c & 0xFF
    last = np.minimum(position + length - 1, width - 1)
    sign = np.where((kind[0] == "s") & (length > 0), right(a, last) & a.dtype.type(1), 0)
    room = np.where(position < width, width - position.astype(np.int64), 0)
    valid = ones(np.minimum(length, room), width).astype(a.dtype)
    field: Bits = right(a, position) & valid
    return np.where(sign != 0, field | ~valid, field)


def bfi(a: Bits, b: Bits, c: Bits, d: Bits) -> Bits:
    position, length = c & 0xFF, d & 0xFF
    mask = left(ones(length, a.dtype.itemsize * 8).astype(a.dtype), position)
    return np.asarray((b & ~mask) | (left(a, position) & mask))


def szext(a: Bits, b: Bits, mode: str, kind: str) -> Bits:
    n = b & 31
    too_large = (b >= 32) & (mode == "clamp")
    mask = np.where(too_large, 0, left(np.full_like(a, 0xFFFFFFFF), n)).astype(np.uint32)
    negative = (kind == "s32") & (n != 0) & ~too_large & (right(a, (n - 1) & 31) & 1 == 1)
    return np.asarray((a & ~mask) | np.where(negative, mask, 0), np.uint32)


def bmsk(a: Bits, b: Bits, mode: str) -> Bits:
    start, width, full = a & 31, b & 31, np.full_like(a, 0xFFFFFFFF)
    below = left(full, start + width)
    if mode == "clamp":
        below = np.where(b >= 32, 0, below)
        below = np.where(a >= 32, full, below)
    return left(full, start) & ~below.astype(np.uint32)


for w in (32, 64):
    case(f"popc.b{w}", f"b{w}", 32, lambda a: bits_of(a).sum(axis=-1))
    case(f"clz.b{w}", f"b{w}", 32, lambda a, w=w: w - 1 - leading(a))
    case(f"brev.b{w}", f"b{w}", w, lambda a: from_bits(bits_of(a)[:, ::-1]))
    case(f"bfi.b{w}", f"a:b{w} b:b{w} c:field length:field", w, bfi, "OP d, a, b, c, length")
    for kind in (f"u{w}", f"s{w}"):
        case(f"bfind.{kind}", f"b{w}", 32, lambda a, kind=kind: leading(significant(a, kind)))
        case(f"bfind.shiftamt.{kind}", f"b{w}", 32, lambda a, kind=kind: shift_to_top(significant(a, kind)))
        case(f"bfe.{kind}", f"b{w} field field", w, lambda a, b, c, kind=kind: bfe(a, b, c, kind))
case("fns.b32", "b32 lane offset", 32, fns)
for mode in ("wrap", "clamp"):
    case(f"bmsk.{mode}.b32", "field field", 32, lambda a, b, mode=mode: bmsk(a, b, mode))
    for kind in ("u32", "s32"):
        case(f"szext.{mode}.{kind}", "b32 field", 32, lambda a, b, mode=mode, kind=kind: szext(a, b, mode, kind))


def bytes_of(x: Bits, kind: str = "u32") -> NDArray[np.int64]:
    return np.ascontiguousarray(x).view(np.int8 if kind == "s32" else np.uint8).reshape(len(x), 4).astype(np.int64)


def words_of(x: Bits, kind: str) -> NDArray[np.int64]:
    return np.ascontiguousarray(x).view(np.int16 if kind == "s32" else np.uint16).reshape(len(x), 2).astype(np.int64)


for p in ("u32", "s32"):
    for q in ("u32", "s32"):
        case(f"dp4a.{p}.{q}", "b32 b32 b32", 32,
             lambda a, b, c, p=p, q=q: (bytes_of(a, p) * bytes_of(b, q)).sum(axis=1) + s32(c))  # fmt: skip
        for at, part in enumerate(("lo", "hi")):
            case(f"dp2a.{part}.{p}.{q}", "b32 b32 b32", 32,
                 lambda a, b, c, p=p, q=q, at=2 * at:
                     (words_of(a, p) * bytes_of(b, q)[:, at : at + 2]).sum(axis=1) + s32(c))  # fmt: skip


def prmt(a: Bits, b: Bits, select: NDArray[np.int64]) -> Bits:
    """``select``: for each byte of the result one of the eight, and bit 3 to spread its sign."""
    eight = np.concatenate([bytes_of(a), bytes_of(b)], axis=1)
    chosen = np.take_along_axis(eight, select & 7, axis=1)
    chosen = np.where(select & 8, np.where(chosen & 0x80, 0xFF, 0), chosen)
    return chosen.astype(np.uint8).view(np.uint32)[:, 0]


PERMUTATIONS = {
    "f4e": ((0, 1, 2, 3), (1, 2, 3, 4), (2, 3, 4, 5), (3, 4, 5, 6)),
    "b4e": ((0, 7, 6, 5), (1, 0, 7, 6), (2, 1, 0, 7), (3, 2, 1, 0)),
    "rc8": ((0, 0, 0, 0), (1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 3, 3)),
    "ecl": ((0, 1, 2, 3), (1, 1, 2, 3), (2, 2, 2, 3), (3, 3, 3, 3)),
    "ecr": ((0, 0, 0, 0), (0, 1, 1, 1), (0, 1, 2, 2), (0, 1, 2, 3)),
    "rc16": ((0, 1, 0, 1), (2, 3, 2, 3), (0, 1, 0, 1), (2, 3, 2, 3)),
}
case("prmt.b32", "b32 b32 selector", 32,
     lambda a, b, c: prmt(a, b, np.stack([(c >> n) & 15 for n in (0, 4, 8, 12)], axis=1).astype(np.int64)))  # fmt: skip
for mode, rows in PERMUTATIONS.items():
    case(f"prmt.b32.{mode}", "b32 b32 selector", 32,
         lambda a, b, c, rows=rows: prmt(a, b, np.array(rows)[c & 3]))  # fmt: skip

# ---- logic and shifts ----------------------------------------------------------------------------------------------

LOGIC: dict[str, Callable[..., Any]] = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}
for w in (16, 32, 64):
    for name, logic in LOGIC.items():
        case(f"{name}.b{w}", f"b{w} b{w}", w, logic)
    case(f"not.b{w}", f"b{w}", w, lambda a: ~a)
    case(f"cnot.b{w}", f"b{w}", w, lambda a: a == 0)
    case(f"shl.b{w}", f"b{w} shift{w}", w, left)
    for kind in (f"b{w}", f"u{w}", f"s{w}"):
        case(f"shr.{kind}", f"b{w} shift{w}", w, lambda a, b, kind=kind: right(reading(kind)(a), b))
TWO = "setp.ne.u32 p, a, 0; setp.ne.u32 q, b, 0; "
for name, logic in LOGIC.items():
    case(f"{name}.pred", "truth truth", 32, logic, f"{TWO}{name}.pred r, p, q; selp.u32 d, 1, 0, r")
case("not.pred", "truth", 32, lambda a: a ^ 1, "setp.ne.u32 p, a, 0; not.pred q, p; selp.u32 d, 1, 0, q")
for table in (0x00, 0x01, 0x1A, 0x3C, 0x80, 0x96, 0xB8, 0xCA, 0xE8, 0xF8, 0xFE, 0xFF):
    case(f"lop3.b32:0x{table:02x}", "b32 b32 b32", 32,
         lambda a, b, c, table=table: np.bitwise_or.reduce(
             [np.full_like(a, 0), *(
                 (a if k & 4 else ~a) & (b if k & 2 else ~b) & (c if k & 1 else ~c)
                 for k in range(8) if table >> k & 1)]),
         f"lop3.b32 d, a, b, c, 0x{table:02x}")  # fmt: skip
for mode in ("wrap", "clamp"):
    bound: Callable[[Bits], NDArray[Any]] = (
        (lambda c: c & 31) if mode == "wrap" else lambda c: np.minimum(c, np.uint32(32))
    )
    both_words: Callable[[Bits, Bits], Bits] = lambda a, b: (b.astype(np.uint64) << np.uint64(32)) | a  # noqa: E731
    case(f"shf.l.{mode}.b32", "b32 b32 shift32", 32,
         lambda a, b, c, n=bound, x=both_words: (x(a, b) << n(c).astype(np.uint64)) >> np.uint64(32))  # fmt: skip
    case(f"shf.r.{mode}.b32", "b32 b32 shift32", 32,
         lambda a, b, c, n=bound, x=both_words: x(a, b) >> n(c).astype(np.uint64))  # fmt: skip

# ---- comparison and selection --------------------------------------------------------------------------------------

COMPARISONS: dict[str, Callable[..., Any]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge,
}  # fmt: skip
SIX = ("eq", "ne", "lt", "le", "gt", "ge")


def comparison(name: str, kind: str) -> Callable[[Bits, Bits], NDArray[np.bool_]]:
    read = reading(kind)
    return lambda a, b: np.asarray(COMPARISONS[name](read(a), read(b)))


BY_KIND = {"s": SIX, "u": (*SIX, "lo", "ls", "hi", "hs"), "b": ("eq", "ne")}
for w in (16, 32, 64):
    for sign, names in BY_KIND.items():
        for name in names:
            compare = comparison(name, sign)
            case(f"setp.{name}.{sign}{w}", f"b{w} b{w}", 32, compare, "OP p, a, b; selp.u32 d, 1, 0, p")
        ordered = "lt" if sign != "b" else "ne"
        compare = comparison(ordered, sign)
        for name, logic in LOGIC.items():
            case(f"setp.{ordered}.{name}.{sign}{w}", f"b{w} b{w} truth", (32, 32),
                 lambda a, b, c, f=compare, logic=logic: (logic(f(a, b), c != 0), logic(~f(a, b), c != 0)),
                 "setp.ne.u32 r, c, 0; OP p|q, a, b, r; selp.u32 d, 1, 0, p; selp.u32 e, 1, 0, q")  # fmt: skip
        case(f"set.{ordered}.u32.{sign}{w}", f"b{w} b{w}", 32,
             lambda a, b, f=compare: np.where(f(a, b), np.uint32(0xFFFFFFFF), 0))  # fmt: skip
        case(f"set.{ordered}.s32.{sign}{w}", f"b{w} b{w}", 32,
             lambda a, b, f=compare: np.where(f(a, b), np.uint32(0xFFFFFFFF), 0))  # fmt: skip
        case(f"set.{ordered}.f32.{sign}{w}", f"b{w} b{w}", 32,
             lambda a, b, f=compare: np.where(f(a, b), np.uint32(0x3F800000), 0))  # fmt: skip
    for kind in (f"b{w}", f"u{w}", f"s{w}", *((f"f{w}",) if w > 16 else ())):
        case(f"selp.{kind}", f"b{w} b{w} truth", w, lambda a, b, c: np.where(c != 0, a, b),
             "setp.ne.u32 p, c, 0; OP d, a, b, p")  # fmt: skip
        case(f"slct.{kind}.s32", f"b{w} b{w} b32", w, lambda a, b, c: np.where(signed(c) >= 0, a, b))
        # a NaN selects the second
        case(f"slct.{kind}.f32", f"b{w} b{w} f32", w, lambda a, b, c: np.where(F32.value(c) >= 0, a, b))
        case(f"slct.ftz.{kind}.f32", f"b{w} b{w} f32", w,
             lambda a, b, c: np.where(F32.value(F32.flushed(c)) >= 0, a, b))  # fmt: skip

# ---- packing, and four bytes at once -------------------------------------------------------------------------------

case("mov.b32:unpack", "b32", (16, 16), lambda a: (a, a >> 16), "mov.b32 {d, e}, a")
case("mov.b32:pack", "b16 b16", 32, lambda a, b: a.astype(np.uint32) | (b.astype(np.uint32) << 16), "mov.b32 d, {a, b}")
case("mov.b64:unpack", "b64", (32, 32), lambda a: (a, a >> np.uint64(32)), "mov.b64 {d, e}, a")
case("mov.b64:pack", "b32 b32", 64,
     lambda a, b: a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32)), "mov.b64 d, {a, b}")  # fmt: skip
case("mov.b64:unpack16", "b64", (16, 16, 16, 16),
     lambda a: tuple(a >> np.uint64(n) for n in (0, 16, 32, 48)), "mov.b64 {d, e, f, g}, a")  # fmt: skip
case("vabsdiff4.u32.u32.u32", "b32 b32 b32", 32,
     lambda a, b, c: halves(lambda x, y: np.where(x > y, x - y, y - x), 4)(a, b))  # fmt: skip
case("vabsdiff4.u32.u32.u32.add", "b32 b32 b32", 32,
     lambda a, b, c: np.abs(bytes_of(a) - bytes_of(b)).sum(axis=1) + s32(c))  # fmt: skip
case("vadd4.u32.u32.u32", "b32 b32 b32", 32, lambda a, b, c: halves(operator.add, 4)(a, b))
