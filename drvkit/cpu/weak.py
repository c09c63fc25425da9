"""Memory as weak as the scopes allow: what kernels call when they are explored.

A store to global memory is first seen by its block alone: it stands in the block's buffer. From there it goes to the
device's, where all blocks of the device see it, and from there to memory, where everybody does. It goes when a fence
of that scope sends it, or when the schedule does not hold it; stores to the same bytes stay in order, others do not.
Words of a vector store go one by one. Loads are not reordered.
"""

from __future__ import annotations

import ctypes

from .ir import Value, constant
from .memory import ALLOCATED, WRITTEN
from .runtime import ACCESS_BYTES, Function, check_lane
from .state import SHARED_STRIDE, BlockState, BufferedStore, GridState, StoreBuffer, WarpState

__all__ = ["weak_functions"]

ENTRIES = ctypes.sizeof(StoreBuffer)  # where they begin
FACTORS = 0x7FB5D329728EA185, 0x1B03738712FAD5C9  # odd ones, with bits everywhere, that mix an address


def weak_functions() -> list[Function]:
    functions = [_overlay(), _push(), _apply(), _drain(), _settle(), _deliver(), _flush(), _fence(), _private()]
    for nbytes in ACCESS_BYTES:
        functions += [_load(nbytes), _store(nbytes)]
    return functions


def _entry(f: Function, buffer: Value, index: Value) -> Value:
    offset = f.op("mul", f.cast("zext", index, "i64"), constant("i64", ctypes.sizeof(BufferedStore)))
    return f.at(f.at(buffer, ENTRIES), offset)


def _overlay() -> Function:
    """A value of ``nbytes`` as who looks through a buffer sees it."""
    f = Function("i64", "drvkit_overlay", buffer="ptr", address="i64", nbytes="i32", value="i64")
    seen = f.alloca("i64", 8)
    f.store(f["value"], seen, align=8)
    end = f.op("add", f["address"], f.cast("zext", f["nbytes"], "i64"))
    with f.count(f.field(f["buffer"], StoreBuffer, "count")) as index:
        entry = _entry(f, f["buffer"], index)
        start = f.field(entry, BufferedStore, "address")
        size = f.cast("zext", f.field(entry, BufferedStore, "nbytes"), "i64")
        before = f.compare("icmp ult", start, end)
        behind = f.compare("icmp ugt", f.op("add", start, size), f["address"])
        with f.when(f.op("and", before, behind)), f.count(size) as byte:
            at = f.op("sub", f.op("add", start, byte), f["address"])
            with f.when(f.compare("icmp ult", at, f.cast("zext", f["nbytes"], "i64"))):
                shift = f.op("mul", at, constant("i64", 8))
                take = f.op("mul", byte, constant("i64", 8))
                new = f.op("and", f.op("lshr", f.field(entry, BufferedStore, "value"), take), constant("i64", 255))
                hole = f.op("xor", f.op("shl", constant("i64", 255), shift), constant("i64", -1))
                kept = f.op("and", f.load("i64", seen, align=8), hole)
                f.store(f.op("or", kept, f.op("shl", new, shift)), seen, align=8)
    f.ret(f.load("i64", seen, align=8))
    return f


def _push() -> Function:
    """Add a store at the end of a buffer; a full one is emptied before."""
    f = Function("void", "drvkit_push", grid="ptr", buffer="ptr", address="i64", value="i64", nbytes="i32")
    buffer = f["buffer"]
    full = f.compare("icmp uge", f.field(buffer, StoreBuffer, "count"), f.field(buffer, StoreBuffer, "capacity"))
    with f.when(full, likely=False):
        f.call("void", "drvkit_drain", f["grid"], buffer)
    count = f.field(buffer, StoreBuffer, "count")
    entry = _entry(f, buffer, count)
    for name in ("address", "value", "nbytes"):
        f.set(entry, BufferedStore, name, f[name])
    f.set(buffer, StoreBuffer, "count", f.op("add", count, constant("i32", 1)))
    f.line("ret void")
    return f


def _apply() -> Function:
    """Hand one store on to the next buffer, or to memory."""
    f = Function("void", "drvkit_apply", grid="ptr", buffer="ptr", stored="ptr")
    entry = f["stored"]
    following = f.field(f["buffer"], StoreBuffer, "following")
    address, value = f.field(entry, BufferedStore, "address"), f.field(entry, BufferedStore, "value")
    nbytes = f.field(entry, BufferedStore, "nbytes")
    with f.when(f.compare("icmp ne", following, constant("i64", 0))):
        f.call("void", "drvkit_push", f["grid"], f.pointer(following), address, value, nbytes)
        f.line("ret void")
    source = f.place(entry, BufferedStore, "value")
    size = f.cast("zext", nbytes, "i64")
    f.call("void", "llvm.memcpy.p0.p0.i64", f.pointer(address), source, size, constant("i1", 0))
    f.add_to(f["grid"], GridState, "stores", 1)
    f.line("ret void")
    return f


def _drain() -> Function:
    """Hand all stores of a buffer on, in their order."""
    f = Function("void", "drvkit_drain", grid="ptr", buffer="ptr")
    with f.count(f.field(f["buffer"], StoreBuffer, "count")) as index:
        f.call("void", "drvkit_apply", f["grid"], f["buffer"], _entry(f, f["buffer"], index))
    f.set(f["buffer"], StoreBuffer, "count", 0)
    f.line("ret void")
    return f


def _settle() -> Function:
    """Hand on one store: the picked one, or the oldest one to the same bytes."""
    f = Function("void", "drvkit_settle", grid="ptr", buffer="ptr", picked="i32")
    buffer = f["buffer"]
    count = f.field(buffer, StoreBuffer, "count")
    with f.when(f.compare("icmp uge", f["picked"], count)):
        f.line("ret void")
    chosen = _entry(f, buffer, f["picked"])
    first, last = _range(f, chosen)
    place = f.alloca("i32", 4)
    f.store(f["picked"], place, align=4)
    with f.count(f["picked"]) as index:
        start, end = _range(f, _entry(f, buffer, index))
        overlaps = f.op("and", f.compare("icmp ult", start, last), f.compare("icmp ult", first, end))
        older = f.compare("icmp ult", index, f.load("i32", place, align=4))
        with f.when(f.op("and", overlaps, older)):
            f.store(index, place, align=4)
    at = f.load("i32", place, align=4)
    entry = _entry(f, buffer, at)
    f.call("void", "drvkit_apply", f["grid"], buffer, entry)
    rest = f.op("sub", f.op("sub", count, at), constant("i32", 1))
    size = f.op("mul", f.cast("zext", rest, "i64"), constant("i64", ctypes.sizeof(BufferedStore)))
    f.call("void", "llvm.memmove.p0.p0.i64", entry, f.at(entry, ctypes.sizeof(BufferedStore)), size, constant("i1", 0))
    f.set(buffer, StoreBuffer, "count", f.op("sub", count, constant("i32", 1)))
    f.line("ret void")
    return f


def _deliver() -> Function:
    """Hand on the stores of a buffer, but those that are held: of granules of 1 << ``shift`` bytes, ``odds`` of 256.

    Which ones follows from ``salt`` and their place in the address space, which is the same in all processes.
    """
    f = Function("void", "drvkit_deliver", grid="ptr", buffer="ptr", salt="i64", shift="i32", odds="i32")
    grid, buffer = f["grid"], f["buffer"]
    place = f.alloca("i32", 4)
    f.store(constant("i32", 0), place, align=4)
    again, one, end = f.name("again"), f.name("one"), f.name("end")
    f.jump(again)
    f.label(again)
    index = f.load("i32", place, align=4)
    f.branch(f.compare("icmp ult", index, f.field(buffer, StoreBuffer, "count")), one, end)
    f.label(one)
    offset = f.op(
        "sub", f.field(_entry(f, buffer, index), BufferedStore, "address"), f.field(grid, GridState, "memory_base")
    )
    mixed = f.op("xor", f.op("lshr", offset, f.cast("zext", f["shift"], "i64")), f["salt"])
    for factor in FACTORS:
        mixed = f.op("mul", f.op("xor", mixed, f.op("lshr", mixed, constant("i64", 32))), constant("i64", factor))
    drawn = f.cast("trunc", f.op("lshr", mixed, constant("i64", 56)), "i32")
    f.store(f.op("add", index, constant("i32", 1)), place, align=4)
    with f.when(f.compare("icmp uge", drawn, f["odds"])):
        f.call("void", "drvkit_settle", grid, buffer, index)
        # If an older store to the same bytes went first, this one has moved one place forward.
        before = f.op("sub", index, constant("i32", 1))
        f.store(f.select(f.is_(index, 0), index, before), place, align=4)
    f.jump(again)
    f.label(end)
    f.line("ret void")
    return f


def _range(f: Function, entry: Value) -> tuple[Value, Value]:
    start = f.field(entry, BufferedStore, "address")
    return start, f.op("add", start, f.cast("zext", f.field(entry, BufferedStore, "nbytes"), "i64"))


def _flush() -> Function:
    """Hand on all stores of a buffer that touch some bytes."""
    f = Function("void", "drvkit_flush", grid="ptr", buffer="ptr", address="i64", nbytes="i64")
    buffer = f["buffer"]
    again, end = f.name("again"), f.name("end")
    f.jump(again)
    f.label(again)
    finish = f.op("add", f["address"], f["nbytes"])
    with f.count(f.field(buffer, StoreBuffer, "count")) as index:
        start, last = _range(f, _entry(f, buffer, index))
        overlaps = f.op("and", f.compare("icmp ult", start, finish), f.compare("icmp ult", f["address"], last))
        with f.when(overlaps):
            f.call("void", "drvkit_settle", f["grid"], buffer, index)
            f.jump(again)
    f.jump(end)
    f.label(end)
    f.line("ret void")
    return f


def _fence() -> Function:
    """Let the device (scope 1) or everybody (scope 2) see what the block has stored and seen."""
    f = Function("void", "drvkit_fence", grid="ptr", block="ptr", scope="i32")
    f.call("void", "drvkit_drain", f["grid"], f.pointer(f.field(f["block"], BlockState, "buffer")))
    with f.when(f.compare("icmp uge", f["scope"], constant("i32", 2))):
        f.call("void", "drvkit_drain", f["grid"], f.pointer(f.field(f["grid"], GridState, "device_buffer")))
    f.line("ret void")
    return f


def _private() -> Function:
    """Whether an address is in the shared window of the running block's cluster or in its warp's local memory."""
    f = Function("i1", "drvkit_private", grid="ptr", address="i64")
    block = f.pointer(f.field(f["grid"], GridState, "current_block"))
    warp = f.pointer(f.field(f["grid"], GridState, "current"))
    blocks = f.cast("zext", f.field(f["grid"], GridState, "cluster_blocks"), "i64")
    window = f.op("mul", f.op("sub", blocks, constant("i64", 1)), constant("i64", SHARED_STRIDE))
    window = f.op("add", window, f.cast("zext", f.field(f["grid"], GridState, "shared_bytes"), "i64"))
    shared = f.compare("icmp ult", f.op("sub", f["address"], f.field(block, BlockState, "shared_base")), window)
    lanes = f.op("mul", f.cast("zext", f.field(f["grid"], GridState, "local_bytes"), "i64"), constant("i64", 32))
    local = f.compare("icmp ult", f.op("sub", f["address"], f.field(warp, WarpState, "local")), lanes)
    f.ret(f.op("or", shared, local))
    return f


def _load(nbytes: int) -> Function:
    f = Function(
        "i32", f"drvkit_load_{nbytes}_weak", grid="ptr", addresses="ptr", mask="i32", values="ptr", place="i32",
        word="i32",
    )  # fmt: skip
    grid = f["grid"]
    block = f.pointer(f.field(grid, GridState, "current_block"))
    own, device = f.pointer(f.field(block, BlockState, "buffer")), f.pointer(f.field(grid, GridState, "device_buffer"))
    with f.each_bit(f["mask"]) as lane:
        wide = f.cast("zext", lane, "i64")
        address = f.load("i64", f.at(f["addresses"], wide, "i64"), align=8)
        check_lane(f, address, lane, nbytes, ALLOCATED | WRITTEN)
        target = f.at(f["values"], f.op("mul", wide, constant("i64", nbytes)))
        private = f.call("i1", "drvkit_private", grid, address)
        piece = min(nbytes, 8)
        for offset in range(0, nbytes, piece):
            at = f.op("add", address, constant("i64", offset))
            value = f.load(f"i{8 * piece}", f.pointer(at), align=1)
            seen = f.cast("zext", value, "i64")
            for buffer in (device, own):
                seen = f.call("i64", "drvkit_overlay", buffer, at, constant("i32", piece), seen)
            result = f.select(private, value, f.cast("trunc", seen, f"i{8 * piece}"))
            f.store(result, f.at(target, offset), align=1)
    f.ret(0)
    return f


def _store(nbytes: int) -> Function:
    f = Function(
        "i32", f"drvkit_store_{nbytes}_weak", grid="ptr", addresses="ptr", mask="i32", values="ptr", place="i32",
        word="i32",
    )  # fmt: skip
    grid = f["grid"]
    block = f.pointer(f.field(grid, GridState, "current_block"))
    own = f.pointer(f.field(block, BlockState, "buffer"))
    f.add_to(grid, GridState, "stores", 1)
    with f.each_bit(f["mask"]) as lane:
        wide = f.cast("zext", lane, "i64")
        address = f.load("i64", f.at(f["addresses"], wide, "i64"), align=8)
        check_lane(f, address, lane, nbytes, ALLOCATED)
        shadow = f.pointer(f.op("add", address, f.field(grid, GridState, "shadow")))
        f.call("void", "llvm.memset.p0.i64", shadow, constant("i8", 3), constant("i64", nbytes), constant("i1", 0))
        source = f.at(f["values"], f.op("mul", wide, constant("i64", nbytes)))
        private = f.call("i1", "drvkit_private", grid, address)
        with f.when(private):
            size = constant("i64", nbytes)
            f.call("void", "llvm.memcpy.p0.p0.i64", f.pointer(address), source, size, constant("i1", 0))
        with f.when(f.op("xor", private, constant("i1", 1))):
            word = f.cast("zext", f["word"], "i64")
            with f.count(f.op("udiv", constant("i64", nbytes), word)) as number:
                offset = f.op("mul", number, word)
                whole = f.alloca("i64", 8)
                f.store(constant("i64", 0), whole, align=8)
                f.call("void", "llvm.memcpy.p0.p0.i64", whole, f.at(source, offset), word, constant("i1", 0))
                value = f.load("i64", whole, align=8)
                f.call("void", "drvkit_push", grid, own, f.op("add", address, offset), value, f["word"])
    f.ret(0)
    return f
