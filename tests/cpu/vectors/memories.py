"""Loads, stores, atomics and asynchronous copies. The last argument of an oracle is global memory as it was before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import floats
from .case import AnyNaN, Memory, Oracle, Table, halves
from .floats import BF16, F16, F32, F64, Bits, Format, extremum
from .inputs import BLOCK
from .integers import reading, signed
from .warps import by_warp

MEMORIES = Table("memory")
case = MEMORIES

Update = Callable[..., Any]  # what was there, operands -> what is there now

# ---- atomics: each thread its own address --------------------------------------------------------------------------


def added(format: Format, *, ftz: bool = False, count: int = 1) -> Update:
    def update(old: Bits, a: Bits) -> Bits:
        return floats.arithmetic(format, floats.add, old, a, ftz=ftz)

    return halves(update, count) if count > 1 else update


def extreme(format: Format, *, largest: bool, count: int = 1) -> Update:
    def update(old: Bits, a: Bits) -> Bits:
        return extremum(format, old, a, largest=largest)

    return halves(update, count) if count > 1 else update


INTEGER: dict[str, Update] = {
    "add.u32": lambda old, a: old + a,
    "add.s32": lambda old, a: old + a,
    "add.u64": lambda old, a: old + a,
    "inc.u32": lambda old, a: np.where(old >= a, 0, old + np.uint32(1)),
    "dec.u32": lambda old, a: np.where((old == 0) | (old > a), a, old - np.uint32(1)),
    **{f"{name}.b{w}": logic for w in (32, 64) for name, logic in
       {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}.items()},
    **{f"{name}.{sign}{w}": (lambda old, a, s=sign, f=pick: f(reading(s)(old), reading(s)(a)))
       for w in (32, 64) for sign in "su" for name, pick in {"min": np.minimum, "max": np.maximum}.items()},
}  # fmt: skip
EXCHANGE: dict[str, Update] = {f"exch.b{w}": lambda old, a: a for w in (32, 64)}
HALF: dict[str, tuple[str, Update]] = {
    f"add.noftz.{format.name}{suffix}": (f"{format.name}{suffix}", added(format, count=count))
    for format in (F16, BF16)
    for count, suffix in ((1, ""), (2, "x2"))
}


def width_of(operation: str) -> int:
    return int("".join(filter(str.isdigit, operation.rpartition(".")[2])))


def atomics(operation: str, kind: str, width: int, update: Update, *, nan: Format | None = None) -> None:
    """``atom`` and ``red`` on global memory, ``atom`` and ``red`` on shared memory, each thread its own address."""
    loose: Callable[[Any], Any] = (lambda bits: AnyNaN(nan, bits)) if nan else (lambda bits: bits)
    case(f"atom.global.{operation}", kind, width, lambda a, old: (loose(old), loose(update(old, a))), "OP d, [m], a",
         memory=Memory(kind), most=1 << 16)  # fmt: skip
    if not operation.startswith("exch"):
        case(f"red.global.{operation}", kind, (), lambda a, old: (loose(update(old, a)),), "OP [m], a",
             memory=Memory(kind), most=1 << 16)  # fmt: skip


for operation, update in {**INTEGER, **EXCHANGE}.items():
    w = width_of(operation)
    atomics(operation, f"b{w}", w, update)
    slot = f"st.shared.b{w} [sp], b; OP d, [sp], a; ld.shared.b{w} e, [sp]"
    case(
        f"atom.shared.{operation}", f"b{w} b{w}", (w, w), lambda a, old, f=update: (old, f(old, a)), slot, most=1 << 16
    )
    if not operation.startswith("exch"):
        case(f"red.shared.{operation}", f"b{w} b{w}", w, lambda a, old, f=update: f(old, a),
             f"st.shared.b{w} [sp], b; OP [sp], a; ld.shared.b{w} d, [sp]", most=1 << 16)  # fmt: skip
# f32 in global memory flushes, in shared memory it does not
atomics("add.f32", "f32", 32, added(F32, ftz=True))
atomics("add.f64", "f64", 64, added(F64), nan=F64)
for operation, (kind, update) in HALF.items():
    atomics(operation, kind, 32 if kind.endswith("x2") else 16, update)
case("atom.shared.add.f32", "f32 f32", (32, 32), lambda a, old: (old, added(F32)(old, a)),
     "st.shared.b32 [sp], b; OP d, [sp], a; ld.shared.b32 e, [sp]", most=1 << 16)  # fmt: skip
case("atom.shared.add.f64", "f64 f64", (64, 64), lambda a, old: (old, AnyNaN(F64, added(F64)(old, a))),
     "st.shared.b64 [sp], b; OP d, [sp], a; ld.shared.b64 e, [sp]", most=1 << 14)  # fmt: skip
for operation, (kind, update) in HALF.items():
    w = 32 if kind.endswith("x2") else 16
    case(f"atom.shared.{operation}", f"{kind} {kind}", (w, w), lambda a, old, f=update: (old, f(old, a)),
         f"st.shared.b{w} [sp], b; OP d, [sp], a; ld.shared.b{w} e, [sp]", most=1 << 16)  # fmt: skip
for order in ("relaxed", "acquire", "release", "acq_rel"):
    for scope in ("cta", "cluster", "gpu", "sys"):
        case(f"atom.{order}.{scope}.global.add.u32", "b32", 32, lambda a, old: (old, old + a), "OP d, [m], a",
             memory=Memory("b32"), most=1 << 14)  # fmt: skip
        if order in ("relaxed", "release"):
            case(f"red.{order}.{scope}.global.add.u32", "b32", (), lambda a, old: (old + a,), "OP [m], a",
                 memory=Memory("b32"), most=1 << 14)  # fmt: skip
for w in (32, 64):
    case(f"atom.add.u{w}:generic", f"b{w}", w, lambda a, old: (old, old + a),
         f"cvta.global.u64 w0, m; atom.add.u{w} d, [w0], a", memory=Memory(f"b{w}"), most=1 << 14)  # fmt: skip
VECTORS = [
    ("add", 2, "f32"), ("add", 4, "f32"),
    *((name, count, kind) for kind in ("f16", "bf16") for count in (2, 4, 8) for name in ("add", "min", "max")),
    *((name, count, kind) for kind in ("f16x2", "bf16x2") for count in (2, 4) for name in ("add", "min", "max")),
]  # fmt: skip
for name, count, kind in VECTORS:
    scalar, _, packed = kind.partition("x")
    format = {"f32": F32, "f16": F16, "bf16": BF16}[scalar]
    lanes = 2 if packed else 1
    update = added(format, ftz=format is F32, count=lanes) if name == "add" else (
        extreme(format, largest=name == "max", count=lanes))  # fmt: skip

    def vector_update(*operands: Bits, update: Update = update) -> tuple[Any, ...]:
        *parts, old = operands
        return (update(old, np.ascontiguousarray(np.stack(parts, axis=1)).reshape(-1)),)

    names = [f"a{n}" for n in range(count)]
    case(f"red.global.{name}{'' if format is F32 else '.noftz'}.v{count}.{kind}",
         " ".join(f"{each}:{kind}" for each in names), (), vector_update, f"OP [m], {{{', '.join(names)}}}",
         memory=Memory(kind, count), most=1 << 14)  # fmt: skip

# ---- compare and swap ----------------------------------------------------------------------------------------------


def swapped(a: Bits, b: Bits, old: Bits) -> tuple[Bits, Bits]:
    """Even threads compare with what is there."""
    hits = (np.arange(len(a)) % 2 == 0) | (old == a)
    return old, np.where(hits, b, old)


for w in (16, 32, 64):
    kinds = f"b{w} b{w}"
    load = {16: "ld.global.b16 h0, [m]; and.b32 t0, i, 1; setp.eq.u32 p, t0, 0; @p mov.b16 a, h0; ",
            32: "ld.global.b32 t1, [m]; and.b32 t0, i, 1; setp.eq.u32 p, t0, 0; @p mov.b32 a, t1; ",
            64: "ld.global.b64 w0, [m]; and.b32 t0, i, 1; setp.eq.u32 p, t0, 0; @p mov.b64 a, w0; "}[w]  # fmt: skip
    for place in ("global", "relaxed.sys.global", "acquire.gpu.global", "acq_rel.gpu.global"):
        case(f"atom.{place}.cas.b{w}", kinds, w,
             swapped,
             f"{load}OP d, [m], a, b", memory=Memory(f"b{w}"), most=1 << 14)  # fmt: skip
    case(f"atom.shared.cas.b{w}", f"b{w} b{w} b{w}", (w, w),
         swapped,
         f"and.b32 t0, i, 1; setp.eq.u32 p, t0, 0; @p mov.b{w} a, c; st.shared.b{w} [sp], c; "
         f"OP d, [sp], a, b; ld.shared.b{w} e, [sp]", most=1 << 14)  # fmt: skip
WIDE = ".reg .b128 x, y, z; mov.b128 x, {a, b}; "


def exchanged128(a: Bits, b: Bits, old: Bits) -> tuple[Bits, ...]:
    was = old.reshape(-1, 2)
    return was[:, 0], was[:, 1], np.stack([a, b], axis=1)


def swapped128(a: Bits, b: Bits, old: Bits) -> tuple[Bits, ...]:
    was = old.reshape(-1, 2)
    hit = (np.arange(len(a)) % 2 == 0)[:, None] | ((was == 0).all(axis=1)[:, None])
    return was[:, 0], was[:, 1], np.where(hit, np.stack([a, b], axis=1), was)


case("atom.global.exch.b128", "b64 b64", (64, 64), exchanged128, f"{WIDE}OP z, [m], x; mov.b128 {{d, e}}, z",
     memory=Memory("b64", 2), most=1 << 14)  # fmt: skip
case("atom.global.cas.b128", "b64 b64", (64, 64), swapped128,
     f"{WIDE}ld.global.v2.b64 {{w0, w1}}, [m]; and.b32 t0, i, 1; setp.ne.u32 p, t0, 0; "
     f"@p mov.b64 w0, 0; @p mov.b64 w1, 0; mov.b128 y, {{w0, w1}}; OP z, [m], y, x; mov.b128 {{d, e}}, z",
     memory=Memory("b64", 2), most=1 << 14)  # fmt: skip

# ---- all threads of a block on one address -------------------------------------------------------------------------

ONE_ADDRESS: dict[str, Update] = {
    "add.u32": lambda a: a.sum(axis=1, dtype=np.uint32),
    "add.u64": lambda a: a.sum(axis=1, dtype=np.uint64),
    "min.s32": lambda a: np.minimum(signed(a).min(axis=1), 0),
    "max.s32": lambda a: np.maximum(signed(a).max(axis=1), 0),
    "max.u32": lambda a: a.max(axis=1),
    "max.u64": lambda a: a.max(axis=1),
    "min.s64": lambda a: np.minimum(signed(a).min(axis=1), 0),
    "or.b32": lambda a: np.bitwise_or.reduce(a, axis=1),
    "or.b64": lambda a: np.bitwise_or.reduce(a, axis=1),
    "xor.b32": lambda a: np.bitwise_xor.reduce(a, axis=1),
}
for operation, together in ONE_ADDRESS.items():
    w = width_of(operation)
    oracle: Oracle = by_warp(lambda a, f=together: f(a)[:, None], BLOCK)
    start = f"setp.eq.u32 p, tid, 0; @p st.shared.b{w} [window], 0; bar.sync 0; "
    end = f"; bar.sync 0; ld.shared.b{w} d, [window]"
    case(f"red.shared.{operation}:one address", f"b{w}", w, oracle, f"{start}OP [window], a{end}", most=1 << 14)
    nbytes = w // 8
    first = f"mul.wide.u32 w0, tid, {nbytes}; sub.s64 w0, m, w0; "

    def on_first(a: Bits, old: Bits, f: Update = together) -> tuple[Bits, Bits]:
        """All threads meet at the first element of their block, which the kernel sets to 0."""
        total = f(a.reshape(-1, BLOCK)).astype(a.dtype)
        after = old.copy().reshape(-1, BLOCK)
        after[:, 0] = total
        return np.broadcast_to(total[:, None], after.shape).reshape(-1), after.reshape(-1)

    case(f"red.global.{operation}:one address", f"b{w}", w, on_first,
         f"{first}setp.eq.u32 p, tid, 0; @p st.global.b{w} [w0], 0; bar.sync 0; OP [w0], a; bar.sync 0; "
         f"ld.global.cv.b{w} d, [w0]", memory=Memory(f"b{w}"), most=1 << 14)  # fmt: skip
case("atom.shared.add.u32:ticket", "b32", 32,
     by_warp(lambda a: np.full((len(a), 1), BLOCK * (BLOCK - 1) // 2), BLOCK),
     "setp.eq.u32 p, tid, 0; @p st.shared.v2.b32 [window], {0, 0}; bar.sync 0; atom.shared.add.u32 t0, [window], 1; "
     "red.shared.add.u32 [window + 4], t0; bar.sync 0; ld.shared.b32 d, [window + 4]", most=1 << 14)  # fmt: skip
case("atom.shared.cas.b32:loop", "b32", 32, by_warp(lambda a: a.sum(axis=1, dtype=np.uint32)[:, None], BLOCK),
     "setp.eq.u32 p, tid, 0; @p st.shared.b32 [window], 0; bar.sync 0; ld.shared.b32 t0, [window]; again: "
     "add.u32 t1, t0, a; atom.shared.cas.b32 t2, [window], t0, t1; setp.ne.u32 p, t2, t0; mov.b32 t0, t2; "
     "@p bra again; bar.sync 0; ld.shared.b32 d, [window]", most=1 << 14)  # fmt: skip

# ---- loads and stores ----------------------------------------------------------------------------------------------


def columns(count: int) -> Oracle:
    """The elements that each thread loads, and the memory unchanged."""
    return lambda old: (*(old.reshape(-1, count)[:, at] for at in range(count)), old)


CACHED_LOADS = ("global", "global.ca", "global.cg", "global.cs", "global.lu", "global.cv", "global.nc",
                "volatile.global", "relaxed.cta.global", "relaxed.gpu.global", "relaxed.sys.global",
                "acquire.cta.global", "acquire.cluster.global", "acquire.gpu.global", "acquire.sys.global",
                "weak.global", "global.L1::evict_last", "global.L1::no_allocate", "global.L1::evict_first",
                "global.L2::128B", "global.L2::256B", "global.nc.L1::no_allocate.L2::128B")  # fmt: skip
SHAPES = [(w, n) for w in (8, 16, 32, 64) for n in (1, 2, 4) if w * n <= 128]
SMALL = 1 << 13
DEPOT = ".local .align 16 .b8 depot[16]; mov.u64 w0, depot"


def vector(width: int, count: int) -> str:
    return f"v{count}.b{width}" if count > 1 else f"b{width}"


def operands(names: Sequence[str], count: int) -> str:
    return f"{{{', '.join(names[:count])}}}" if count > 1 else names[0]


for w, n in SHAPES:
    shape, d = vector(w, n), operands("defg", n)
    outputs = (w,) * n
    for place in CACHED_LOADS if (w, n) in ((32, 1), (32, 4), (64, 2)) else ("global", "global.nc", "volatile.global"):
        case(f"ld.{place}.{shape}", "", outputs, columns(n), f"OP {d}, [m]", memory=Memory(f"b{w}", n), most=SMALL)
    names = [f"a{at}" for at in range(n)]
    kinds, source = " ".join(f"{name}:b{w}" for name in names), operands(names, n)
    stores = ("global", "global.wb", "global.cg", "global.cs", "global.wt", "volatile.global", "relaxed.gpu.global",
              "relaxed.sys.global", "release.gpu.global", "release.sys.global", "weak.global",
              "global.L1::no_allocate")  # fmt: skip
    for place in stores if (w, n) in ((32, 1), (32, 4), (64, 2)) else ("global",):
        case(f"st.{place}.{shape}", kinds, (), lambda *x: (np.stack(x[:-1], axis=1),), f"OP [m], {source}",
             memory=Memory(f"b{w}", n), most=SMALL)  # fmt: skip
    for space in ("shared", "shared::cta", "volatile.shared"):
        case(f"ld.{space}.{shape}", kinds, outputs, lambda *x: x, f"st.shared.{shape} [sp], {source}; OP {d}, [sp]",
             most=SMALL)  # fmt: skip
        case(f"st.{space}.{shape}", kinds, outputs, lambda *x: x, f"OP [sp], {source}; ld.shared.{shape} {d}, [sp]",
             most=SMALL)  # fmt: skip
    case(f"ld.{shape}:generic", "", outputs, columns(n), f"cvta.global.u64 w0, m; ld.{shape} {d}, [w0]",
         memory=Memory(f"b{w}", n), most=SMALL)  # fmt: skip
    case(f"ld.{shape}:generic shared", kinds, outputs, lambda *x: x,
         f"st.shared.{shape} [sp], {source}; cvt.u64.u32 w0, sp; cvta.shared.u64 w0, w0; ld.{shape} {d}, [w0]",
         most=SMALL)  # fmt: skip
    case(f"st.local.{shape}", kinds, outputs, lambda *x: x,
         f"{DEPOT}; st.local.{shape} [w0], {source}; ld.local.{shape} {d}, [w0]",
         most=SMALL)  # fmt: skip

#: a register wider than what is loaded is extended by the sign or by zeros
for kind in ("u8", "s8", "u16", "s16", "u32", "s32"):
    for w in (16, 32, 64):
        if int(kind[1:]) <= w:
            case(f"ld.global.{kind}:to{w}", "", w, lambda old, k=kind: (reading(k)(old).astype(np.int64), old),
                 f"ld.global.{kind} d, [m]", memory=Memory(f"b{kind[1:]}"), most=SMALL)  # fmt: skip
            case(f"st.global.{kind}:from{w}", f"b{w}", (), lambda a, old: (a,), f"st.global.{kind} [m], a",
                 memory=Memory(f"b{kind[1:]}"), most=SMALL)  # fmt: skip
case("ld.global.b32:offset", "", (32, 32), lambda old: (old[1::2], old[0::2], old),
     "ld.global.b32 d, [m+4]; add.s64 w0, m, 4; ld.global.b32 e, [w0+-4]",
     memory=Memory("b32", 2), most=SMALL)  # fmt: skip
case("prefetch.global.L2", "b32", 32, lambda a, old: (a, old), "prefetch.global.L2 [m]; mov.b32 d, a",
     memory=Memory("b32"), most=SMALL)  # fmt: skip
for scope in ("cta", "gl", "sys"):
    case(f"membar.{scope}", "b32", 32, lambda a, old: (a, a), "st.global.b32 [m], a; OP; ld.global.b32 d, [m]",
         memory=Memory("b32"), most=SMALL)  # fmt: skip
for fence in (
    "acq_rel.cta",
    "acq_rel.gpu",
    "acq_rel.sys",
    "acq_rel.cluster",
    "sc.cta",
    "sc.gpu",
    "sc.sys",
    "proxy.async",
):
    case(f"fence.{fence}", "b32", 32, lambda a, old: (a, a), "st.global.b32 [m], a; OP; ld.global.b32 d, [m]",
         memory=Memory("b32"), most=SMALL)  # fmt: skip
for space in ("global", "shared", "local"):
    pointer = {"global": "cvta.global.u64 w0, m", "shared": "cvt.u64.u32 w0, sp; cvta.shared.u64 w0, w0",
               "local": f"{DEPOT}; cvta.local.u64 w0, w0"}[space]  # fmt: skip
    for asked in ("global", "shared", "local"):
        case(f"isspacep.{asked}:{space}", "b32", 32,
             lambda a, old, yes=asked == space: (np.full_like(a, yes), old),
             f"{pointer}; setp.eq.u64 q, w0, m; isspacep.{asked} p, w0; selp.u32 d, 1, 0, p",
             memory=Memory("b32"), most=SMALL)  # fmt: skip

# ---- between shared and global memory ------------------------------------------------------------------------------


def copied(nbytes: int) -> Oracle:
    def oracle(old: Bits) -> tuple[Any, ...]:
        rows = np.where(np.arange(16) < nbytes, np.ascontiguousarray(old).view(np.uint8).reshape(-1, 16), 0)
        return (*rows.astype(np.uint8).view(np.uint32).T, old)

    return oracle


CLEAR = "st.shared.v4.b32 [sp], {0, 0, 0, 0}; "
READ = "; cp.async.commit_group; cp.async.wait_group 0; ld.shared.v4.b32 {d, e, f, g}, [sp]"
FOUR = Memory("b32", 4)
for opcode, size in (("ca", 4), ("ca", 8), ("ca", 16), ("cg", 16)):
    name = f"cp.async.{opcode}.shared.global"
    case(
        f"{name}:{size}", "", (32,) * 4, copied(size), f"{CLEAR}{name} [sp], [m], {size}{READ}", memory=FOUR, most=SMALL
    )
    for taken in (0, size // 2, size):
        case(f"{name}:{size}of{taken}", "", (32,) * 4, copied(taken),
             f"{CLEAR}mov.u32 t0, {taken}; {name} [sp], [m], {size}, t0{READ}", memory=FOUR, most=SMALL)  # fmt: skip
case("cp.async.cg.shared.global.L2::128B", "", (32,) * 4, copied(16), f"{CLEAR}OP [sp], [m], 16{READ}",
     memory=FOUR, most=SMALL)  # fmt: skip
case("cp.async.wait_all", "", (32,) * 4, copied(16),
     f"{CLEAR}cp.async.cg.shared.global [sp], [m], 16; cp.async.wait_all; ld.shared.v4.b32 {{d, e, f, g}}, [sp]",
     memory=FOUR, most=SMALL)  # fmt: skip

# ---- matrices of 8 by 8 in shared memory ---------------------------------------------------------------------------


def spread(matrices: NDArray[Any]) -> list[Bits]:
    """What each lane has of each matrix of shape (warps, count, 8, 8): two elements of a row."""
    pairs = np.ascontiguousarray(matrices).view(np.uint32)
    return [pairs[:, at].reshape(-1) for at in range(matrices.shape[1])]


def loaded(count: int, transpose: bool, flip: int) -> Oracle:
    """Lane 8i + j says where row j of matrix i is: the slot of lane (8i + j) ^ flip."""

    def oracle(*inputs: Bits) -> tuple[Bits, ...]:
        rows = np.ascontiguousarray(np.stack(inputs, axis=1)).view(np.uint16).reshape(-1, 32, 8)
        matrices = rows[:, np.arange(32) ^ flip].reshape(-1, 4, 8, 8)[:, :count]
        return tuple(spread(matrices.transpose(0, 1, 3, 2) if transpose else matrices))

    return oracle


def stored(count: int, transpose: bool) -> Oracle:
    def oracle(*inputs: Bits) -> tuple[Bits, ...]:
        parts = np.stack([x.reshape(-1, 32) for x in inputs[:count]], axis=1)
        matrices = np.ascontiguousarray(parts).view(np.uint16).reshape(-1, count, 8, 8)
        matrices = matrices.transpose(0, 1, 3, 2) if transpose else matrices
        rows = np.zeros((len(matrices), 32, 8), np.uint16)
        rows[:, : 8 * count] = matrices.reshape(-1, 8 * count, 8)
        return tuple(np.ascontiguousarray(rows).view(np.uint32).reshape(-1, 4).T)

    return oracle


ROWS = " ".join(f"a{at}:b32" for at in range(4))
FILL = "st.shared.v4.b32 [sp], {a0, a1, a2, a3}; bar.warp.sync 0xffffffff; "
for count in (1, 2, 4):
    for transpose in (False, True):
        dot, d = ".trans" if transpose else "", operands("defg", count) if count > 1 else "{d}"
        a = f"{{{', '.join(f'a{at}' for at in range(count))}}}"
        name = f"matrix.sync.aligned.m8n8.x{count}{dot}"
        case(
            f"ld{name}.shared.b16", ROWS, (32,) * count, loaded(count, transpose, 0), f"{FILL}OP {d}, [sp]", most=SMALL
        )
        case(f"ld{name}.shared.b16:rows moved", ROWS, (32,) * count, loaded(count, transpose, 13),
             f"{FILL}xor.b32 t0, lane, 13; sub.s32 t0, t0, lane; mad.lo.s32 t0, t0, 16, sp; OP {d}, [t0]",
             most=SMALL)  # fmt: skip
        case(f"st{name}.shared.b16", ROWS, (32,) * 4, stored(count, transpose),
             f"{CLEAR}bar.warp.sync 0xffffffff; OP [sp], {a}; bar.warp.sync 0xffffffff; "
             "ld.shared.v4.b32 {d, e, f, g}, [sp]", most=SMALL)  # fmt: skip
