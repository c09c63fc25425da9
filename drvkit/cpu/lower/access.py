"""Memory: loads, stores, atomics, addresses.

Source: PTX ISA, "Data Movement and Conversion Instructions", "Parallel Synchronization and Communication Instructions".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..ir import Builder, Value, constant, element, lanes_of, vector
from ..memory import ALLOCATED, WRITTEN
from ..ptx import SIZES, Instruction, Memory, Operand, Symbol
from ..state import Access
from .core import WARP, Lower, bits_of, kind_of, lowers, vector_elements

__all__ = [
    "atomic_lanes",
    "load_bytes",
    "load_interleaved",
    "send",
    "space_of",
    "store_bytes",
    "store_interleaved",
    "watch",
]

_SPACES = ("param", "global", "shared", "local", "const")
STRONG = ("volatile", "relaxed", "acquire", "release", "acq_rel", "mmio", "sc")


def space_of(i: Instruction) -> str:
    """The state space that an instruction names, or means; "" for a generic address."""
    if i.opcode == "wgmma":
        return "shared"
    return next((m.split("::")[0] for m in i.modifiers if m.split("::")[0] in _SPACES), "")


def load_bytes(
    e: Lower, addresses: Value, nbytes: int, mask_bits: Value | None = None, *, into: Value | None = None
) -> Value:
    """``nbytes`` a lane, in a buffer (a ptr) of 32 x nbytes."""
    return _access(e, "load", addresses, nbytes, into or e.buffer(f"[{nbytes} x i8]"), mask_bits)


def store_bytes(e: Lower, addresses: Value, nbytes: int, values: Value, mask_bits: Value | None = None) -> None:
    """What `load_bytes` gives, the other way."""
    _access(e, "store", addresses, nbytes, values, mask_bits)


def _access(e: Lower, verb: str, addresses: Value, nbytes: int, values: Value, mask_bits: Value | None) -> Value:
    b = e.b
    place = constant("i32", e.place(e.i))
    at = e.buffer("i64")
    b.store(addresses, at, align=64)
    if verb == "load":
        e.look(addresses)
    arguments = [e.grid, at, mask_bits or e.mask_bits, values, place]
    suffix = "" if e.checks else "_unchecked"
    if e.weak and space_of(e.i) not in ("shared", "local", "param", "const"):
        suffix = "_weak"
        arguments.append(constant("i32", SIZES[e.i.types[-1]] if e.i.types else min(nbytes, 8)))
    e.fail_if(b.call("i32", f"drvkit_{verb}_{nbytes}{suffix}", *arguments))
    watch(e, at, nbytes, Access.READS if verb == "load" else Access.WRITES, mask_bits)
    return values


def watch(e: Lower, addresses: Value, nbytes: int, how: int, mask_bits: Value | None = None) -> None:
    """Where races are looked for: the current instruction accesses ``nbytes`` a lane; ``addresses`` are in memory."""
    if not e.raced or space_of(e.i) in ("local", "param"):
        return
    modifiers = set(e.i.modifiers)
    if e.i.opcode == "atom" or "red" in (e.i.opcode, *modifiers) or modifiers & {*STRONG, "test_wait", "try_wait"}:
        how |= Access.STRONG
    if modifiers & {"acquire", "acq_rel", "sc"}:
        how |= Access.ACQUIRE
    if modifiers & {"release", "acq_rel", "sc"}:
        how |= Access.RELEASE
    if e.i.opcode == "mbarrier":
        how |= Access.APART
    e.granule = min(e.granule, nbytes)
    sizes = constant("i32", nbytes), constant("i32", e.place(e.i)), constant("i32", how)
    e.fail_if(e.b.call("i32", "drvkit_race_access", e.grid, addresses, mask_bits or e.mask_bits, *sizes))


def scope_of(i: Instruction) -> int:
    """Who is to see it: 0 the block, 1 the device, 2 everybody."""
    if i.opcode == "membar":
        return {"cta": 0, "gl": 1, "sys": 2}.get(i.modifiers[0], 2)
    if "sys" in i.modifiers or {"volatile", "mmio"} & set(i.modifiers):
        return 2
    return 1 if {"gpu", "cluster"} & set(i.modifiers) else 0 if "cta" in i.modifiers else 1


def send(e: Lower, i: Instruction) -> None:
    """Where memory is weak: let the scope of ``i`` see all that the block has stored and seen."""
    if e.weak and scope_of(i):
        e.b.call("void", "drvkit_fence", e.grid, e.block, constant("i32", scope_of(i)))


def _parts(i: Instruction) -> int:
    return next((int(m[1:]) for m in i.modifiers if m in ("v2", "v4", "v8")), 1)


@lowers("ld", "ldu")
def ld(e: Lower, i: Instruction) -> None:
    b, type_, space = e.b, i.types[-1], space_of(i)
    source = i.operands[1]
    assert isinstance(source, Memory)
    targets = vector_elements(i.operands[0])
    size = SIZES[type_]
    base = source.base
    if space == "param" and isinstance(base, Symbol) and base.name in e.parameters and base.name not in e.offsets:
        params = b.value("ptr", f"inttoptr {e.grid_field('params')} to ptr")
        for position, target in enumerate(targets):
            offset = e.parameters[base.name] + source.offset + size * position
            e.write(target, b.load(kind_of(type_), b.at(params, offset), align=1), type_)
        return
    addresses = e.address(source, space)
    if len(targets) * size > 32:
        raise e.unsupported(why="more than 32 bytes a lane")
    values = load_bytes(e, addresses, len(targets) * size)
    load_interleaved(e, values, targets, type_)
    if "acquire" in i.modifiers:
        b.line("fence acquire")


def load_interleaved(e: Lower, values: Value, targets: Sequence[Operand], type_: str) -> None:
    """Registers from a buffer that has their values lane by lane."""
    b, kind, count = e.b, kind_of(type_), len(targets)
    if kind == "i128":
        e.write(targets[0], b.load(vector(kind, WARP), values, align=64), type_)
        return
    together = b.load(f"<{WARP * count} x {kind}>", values, align=64)
    for position, target in enumerate(targets):
        each = together if count == 1 else b.shuffle(together, range(position, WARP * count, count))
        e.write(target, each, type_)


@lowers("st")
def st(e: Lower, i: Instruction) -> None:
    b, type_, space = e.b, i.types[-1], space_of(i)
    target = i.operands[0]
    sources = vector_elements(i.operands[1])
    size = SIZES[type_]
    if len(sources) * size > 32:
        raise e.unsupported(why="more than 32 bytes a lane")
    addresses = e.address(target, space)
    if "release" in i.modifiers:
        b.line("fence release")
        send(e, i)
    values = e.buffer(f"[{len(sources) * size} x i8]")
    store_interleaved(e, values, [e.read(source, type_) for source in sources])
    store_bytes(e, addresses, len(sources) * size, values)
    if "release" in i.modifiers:
        send(e, i)


def store_interleaved(e: Lower, values: Value, parts: Sequence[Value]) -> None:
    """Registers into a buffer, lane by lane."""
    b = e.b
    if len(parts) == 1:
        b.store(parts[0], values, align=64)
        return
    level = list(parts)
    while len(level) > 1:  # v0 v2 / v1 v3 -> pairs, then pairs of pairs
        half = len(level) // 2
        level = [_zip(b, level[k], level[k + half]) for k in range(half)]
    b.store(level[0], values, align=64)


def _zip(b: Builder, first: Value, second: Value) -> Value:
    lanes = int(first.type[1 : first.type.index(" ")])
    return b.shuffle(first, [index for lane in range(lanes) for index in (lane, lane + lanes)], second)


# Atomics

_ATOMIC_INTEGER = {"add": "add", "and": "and", "or": "or", "xor": "xor"}
_ATOMIC_OTHER = ("min", "max", "inc", "dec", "exch", "cas")


@lowers("atom", "red")
def atom(e: Lower, i: Instruction) -> None:
    """Lane after lane, the lowest first."""
    b, type_, space = e.b, i.types[-1], space_of(i)
    operation = next((m for m in i.modifiers if m in (*_ATOMIC_INTEGER, *_ATOMIC_OTHER)), None)
    returns = i.opcode == "atom"
    operands = i.operands[1:] if returns else i.operands
    if operation is None:
        raise e.unsupported()
    targets = vector_elements(i.operands[0]) if returns else ()
    parts = _parts(i)
    sources = [vector_elements(operand) for operand in operands[1:]]
    addresses = e.address(operands[0], space)
    if any(order in i.modifiers for order in ("release", "acq_rel", "sc")):
        b.line("fence seq_cst")
        send(e, i)
    for part in range(parts):
        values = [e.read(source[part], type_) for source in sources]
        at = b.op("add", addresses, constant(addresses.type, SIZES[type_] * part)) if part else addresses
        old = atomic_lanes(e, operation, type_, at, values)
        if returns:
            e.write(targets[part], old, type_)
    if any(order in i.modifiers for order in ("acquire", "acq_rel", "sc")):
        b.line("fence seq_cst")


def atomic_lanes(
    e: Lower, operation: str, type_: str, addresses: Value, values: Sequence[Value], mask_bits: Value | None = None
) -> Value:
    """An operation lane after lane; gives the old values."""
    b, kind = e.b, kind_of(type_)
    size = SIZES[type_]
    at = e.buffer("i64")
    b.store(addresses, at, align=64)
    e.look(addresses)
    given = []
    for number, value in enumerate(values):
        given.append(e.buffer(f"[{size} x i8]", WARP + number))  # a buffer of its own for each
        b.store(value, given[-1], align=64)
    old = e.buffer(f"[{size} x i8]", WARP + 3)
    b.store(constant(vector(kind, WARP), 0) if kind[0] == "i" else Value("zeroinitializer", vector(kind, WARP)), old)
    place = constant("i32", e.place(e.i))
    needs = ALLOCATED if operation == "exch" else ALLOCATED | WRITTEN
    with e.active(mask_bits or e.mask_bits) as lane:
        index = b.cast("zext", lane, "i64")
        address = b.load("i64", b.at(at, index, "i64"), align=8)
        if e.checks:
            check = b.call(
                "i32", "drvkit_check", e.grid, address, lane, place, constant("i32", size), constant("i8", needs),
                constant("i8", WRITTEN),
            )  # fmt: skip
            e.fail_if(check)
        if e.weak:
            for buffer in (e.block_field("buffer"), e.grid_field("device_buffer")):
                where = b.value("ptr", f"inttoptr {buffer} to ptr")
                b.call("void", "drvkit_flush", e.grid, where, address, constant("i64", size))
        pointer = b.value("ptr", f"inttoptr {address} to ptr")
        operands = [b.load(kind, b.at(each, index, kind), align=1) for each in given]
        before = _atomic(e, operation, type_, pointer, operands)
        b.store(before, b.at(old, index, kind), align=1)
        _note_change(e, address, pointer, b.cast("bitcast", before, f"i{8 * size}"))
    watch(e, at, size, Access.READS | Access.WRITES, mask_bits)
    return b.load(vector(kind, WARP), old, align=64)


def _note_change(e: Lower, address: Value, pointer: Value, before: Value) -> None:
    """Who polls may find something new where an atomic changed memory; not where another one has undone that."""
    b = e.b
    change = b.op("sub", b.load(before.type, pointer, align=1), before)
    if before.type == "i128":
        change = b.op("add", change, b.op("mul", b.op("lshr", change, constant("i128", 64)), constant("i128", _ODD)))
    factor = b.op("mul", address, constant("i64", _ODD))
    factor = b.op("mul", b.op("xor", factor, b.op("lshr", factor, constant("i64", 29))), constant("i64", _ODD))
    amount = b.op("mul", b.resize(change, "i64", signed=True), b.op("or", factor, constant("i64", 1)))
    b.store(b.op("add", e.grid_field("stores"), amount), e.grid_place("stores"), align=8)


_ODD = 0x9E3779B97F4A7C15  # of many bits, to tell addresses apart


def _atomic(e: Lower, operation: str, type_: str, pointer: Value, values: Sequence[Value]) -> Value:
    b, kind = e.b, kind_of(type_)
    size = SIZES[type_]
    integer = f"i{8 * size}"
    if operation == "cas":
        expected, new = (b.cast("bitcast", value, integer) for value in values)
        pair = b.value(f"{{ {integer}, i1 }}", f"cmpxchg {pointer}, {expected}, {new} seq_cst seq_cst, align {size}")
        return b.cast("bitcast", b.value(integer, f"extractvalue {pair}, 0"), kind)
    (value,) = values
    if type_ in ("f16x2", "bf16x2", "f16", "bf16", "f32", "f64") and operation != "exch":
        return _float_atomic(e, operation, type_, pointer, value)
    if operation == "exch":
        old = b.value(integer, f"atomicrmw xchg {pointer}, {b.cast('bitcast', value, integer)} seq_cst, align {size}")
        return b.cast("bitcast", old, kind)
    if operation in ("inc", "dec"):
        return _update(e, pointer, kind, size, lambda old: _wrapped(b, operation, old, value))
    opcode = _ATOMIC_INTEGER.get(operation) or f"{'' if type_[0] == 's' else 'u'}{operation}"
    return b.value(kind, f"atomicrmw {opcode} {pointer}, {value} seq_cst, align {size}")


def _wrapped(b: Builder, operation: str, old: Value, limit: Value) -> Value:
    one, zero = constant(old.type, 1), constant(old.type, 0)
    if operation == "inc":  # old >= limit ? 0 : old + 1
        return b.select(b.compare("icmp uge", old, limit), zero, b.op("add", old, one))
    over = b.op("or", b.compare("icmp eq", old, zero), b.compare("icmp ugt", old, limit))
    return b.select(over, limit, b.op("sub", old, one))


def _update(e: Lower, pointer: Value, kind: str, size: int, change: Callable[[Value], Value]) -> Value:
    """A loop of compare-and-swap; gives the old value, of an integer kind."""
    b = e.b
    again, done = b.name("again"), b.name("done")
    slot = b.alloca(kind, 16)
    b.store(b.load(kind, pointer, align=size), slot, align=size)
    b.jump(again)
    b.label(again)
    old = b.load(kind, slot, align=size)
    new = change(old)
    pair = b.value(f"{{ {kind}, i1 }}", f"cmpxchg {pointer}, {old}, {new} seq_cst seq_cst, align {size}")
    b.store(b.value(kind, f"extractvalue {pair}, 0"), slot, align=size)
    b.branch(b.value("i1", f"extractvalue {pair}, 1"), done, again)
    b.label(done)
    return old


def _float_atomic(e: Lower, operation: str, type_: str, pointer: Value, value: Value) -> Value:
    b = e.b
    size = SIZES[type_]
    integer = f"i{8 * size}"
    ftz = None
    if type_ == "f32" and space_of(e.i) != "shared":
        # The units at the L2 cache flush subnormal numbers, those of shared memory do not.
        ftz = constant("i1", 1) if space_of(e.i) else _in_no_block(e, b.value("i64", f"ptrtoint {pointer} to i64"))

    def change(old: Value) -> Value:
        return combine(b, operation, type_, old, b.cast("bitcast", value, integer), ftz=ftz)

    old = _update(e, pointer, integer, size, change)
    return b.cast("bitcast", old, kind_of(type_))


_INFINITY = {"f16": 0x7C00, "bf16": 0x7F80, "f32": 0x7F800000, "f64": 0x7FF << 52}


def combine(b: Builder, operation: str, type_: str, x: Value, y: Value, *, ftz: Value | None = None) -> Value:
    """``x + y``, or the lesser or greater, of scalars given as the integers of their bits.

    ``ftz`` (an i1) is whether subnormal f32 numbers are flushed. A NaN is the one that instructions give; of f64 that
    of an operand.
    """
    if type_ in ("f16x2", "bf16x2"):
        halves = []
        for shift in (0, 16):
            parts = [b.cast("trunc", b.op("lshr", each, constant("i32", shift)), "i16") for each in (x, y)]
            halves.append(b.cast("zext", combine(b, operation, type_[:-2], *parts), "i32"))
        return b.op("or", halves[0], b.op("shl", halves[1], constant("i32", 16)))
    if ftz is not None:
        x, y = _flushed(b, x, ftz), _flushed(b, y, ftz)
    numbers = [_number(b, type_, each) for each in (x, y)]
    if operation == "add":
        result = _bits(b, type_, b.op("fadd", *numbers))
    else:
        result = _bits(b, type_, b.intrinsic(f"{operation}num", *numbers))
        zeros = b.op("or" if operation == "min" else "and", x, y)  # -0 is less than +0
        result = b.select(b.compare("fcmp oeq", *numbers), zeros, result)
    if ftz is not None:
        result = _flushed(b, result, ftz)
    if type_ == "f64":
        return result
    magnitude = b.op("and", result, constant(x.type, (1 << (bits_of(x.type) - 1)) - 1))
    nan = b.compare("icmp ugt", magnitude, constant(x.type, _INFINITY[type_]))
    return b.select(nan, constant(x.type, (1 << (bits_of(x.type) - 1)) - 1), result)


def _number(b: Builder, type_: str, bits: Value) -> Value:
    """As f32 or f64; the sum of two narrower ones, rounded to f32 and then to their format, is rounded right."""
    if type_ == "bf16":
        return b.cast("bitcast", b.op("shl", b.cast("zext", bits, "i32"), constant("i32", 16)), "float")
    if type_ == "f16":
        return b.cast("fpext", b.cast("bitcast", bits, "half"), "float")
    return b.cast("bitcast", bits, {"f32": "float", "f64": "double"}[type_])


def _bits(b: Builder, type_: str, number: Value) -> Value:
    """The other way; of a NaN those of any."""
    if type_ == "f16":
        return b.cast("bitcast", b.cast("fptrunc", number, "half"), "i16")
    if type_ != "bf16":
        return b.cast("bitcast", number, {"f32": "i32", "f64": "i64"}[type_])
    whole = b.cast("bitcast", number, "i32")
    odd = b.op("and", b.op("lshr", whole, constant("i32", 16)), constant("i32", 1))
    rounded = b.op("add", whole, b.op("add", odd, constant("i32", 0x7FFF)))
    nan = b.compare("fcmp uno", number, number)
    return b.cast("trunc", b.op("lshr", b.select(nan, whole, rounded), constant("i32", 16)), "i16")


def _flushed(b: Builder, bits: Value, ftz: Value) -> Value:
    """A subnormal f32 number as a zero of its sign, if ``ftz`` says so."""
    exponent = b.op("and", bits, constant("i32", 0x7F800000))
    sign = b.op("and", bits, constant("i32", 1 << 31))
    return b.select(b.op("and", b.compare("icmp eq", exponent, constant("i32", 0)), ftz), sign, bits)


# Addresses


@lowers("cvta")
def cvta(e: Lower, i: Instruction) -> None:
    """Between an address in a window and a generic one."""
    b, space = e.b, space_of(i)
    value = e.read(i.operands[1], i.types[-1])
    value = b.resize(value, "i64") if element(value.type) != "i64" else value
    if space in ("shared", "local"):
        base = e.shared_base if space == "shared" else e.local_base
        base = base if base.type == value.type else b.splat(base, e.lanes)
        value = b.op("sub" if "to" in i.modifiers else "add", value, base)
    e.write(i.operands[0], value, "u64")


@lowers("isspacep")
def isspacep(e: Lower, i: Instruction) -> None:
    b, space = e.b, space_of(i)
    value = e.read(i.operands[1], "u64")
    if space == "shared":
        own = b.op("sub", value, b.splat(e.shared_base, e.lanes))
        if "shared::cluster" in i.modifiers:
            limit = _window_bytes(e)
        else:
            own = b.op("sub", own, b.splat(b.cast("zext", e.shared_offset, "i64"), e.lanes))
            limit = e.grid_field("shared_bytes")
        result = b.compare("icmp ult", own, b.splat(b.cast("zext", limit, "i64"), e.lanes))
    elif space == "local":
        if not e.local_bytes:
            result = e.const("i1", 0)
        else:
            own = b.op("sub", value, e.local_base)
            result = b.compare("icmp ult", own, e.const("i64", e.local_bytes))
    elif space in ("const", "param"):
        result = e.const("i1", 0)
    else:  # global: what is in no window
        result = _in_no_block(e, value)
        if e.local_bytes:
            own = b.op("sub", value, e.local_base)
            result = b.op("and", result, b.compare("icmp uge", own, e.const("i64", e.local_bytes)))
    e.write(i.operands[0], result, "pred")


def _in_no_block(e: Lower, address: Value) -> Value:
    """Whether a generic address is outside of the cluster's shared memory."""
    b, lanes = e.b, lanes_of(address.type)
    inside = b.op("sub", address, b.splat(e.shared_base, lanes))
    return b.compare("icmp uge", inside, b.splat(b.cast("zext", _window_bytes(e), "i64"), lanes))


def _window_bytes(e: Lower) -> Value:
    """Of a cluster's shared memory, from the first block's first byte to the last one's last."""
    others = e.b.op("sub", e.grid_field("cluster_blocks"), constant("i32", 1))
    return e.b.op("add", e.b.op("mul", others, constant("i32", 1 << 18)), e.grid_field("shared_bytes"))


@lowers("mapa")
def mapa(e: Lower, i: Instruction) -> None:
    """The same place in another block of the cluster."""
    b, type_ = e.b, i.types[-1]
    kind = kind_of(type_)
    value, rank = e.read(i.operands[1], type_), e.read(i.operands[2], "u32")
    move = b.op("sub", rank, b.splat(e.block_field("cluster_rank"), e.lanes))
    step = b.op("mul", b.resize(move, kind, signed=True), e.const(kind, 1 << 18))
    e.write(i.operands[0], b.op("add", value, step), type_)


@lowers("getctarank")
def getctarank(e: Lower, i: Instruction) -> None:
    b, type_ = e.b, i.types[-1]
    value = e.read(i.operands[1], type_)
    if space_of(i) != "shared":
        value = b.op("sub", value, b.splat(e.shared_base, e.lanes))
    e.write(i.operands[0], b.resize(b.op("lshr", value, e.const(kind_of(type_), 18)), "i32"), "u32")


@lowers("createpolicy")
def createpolicy(e: Lower, i: Instruction) -> None:
    """Whatever it is: nothing depends on a policy."""
    e.write(i.operands[0], e.const("i64", 0), "b64")


@lowers("prefetch", "prefetchu", "applypriority", "discard")
def hint(e: Lower, i: Instruction) -> None:
    """Hints change nothing that can be seen."""
    if i.opcode == "discard":
        raise e.unsupported()
