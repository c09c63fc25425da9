"""Races: accesses to the same bytes, at least one of them a write, that nothing orders. Whichever came first is found.

Inside of a cluster: each warp has a vector clock, which barriers, fences and strong accesses hand on. Every granule of
shared memory knows its last writer and, for each warp, when that read it last.

Between works: each has a clock too (`order.py`), and a strong access that sees what another work, which nothing else
orders, has stored with one hands that on. Every granule of the address space knows its last writer and its last two
readers. Nothing is said of blocks of one launch.

Where it is not exact, races are missed, but none is told that is none.

Source: PTX ISA, "Memory Consistency Model"; C. Flanagan, S. Freund, "FastTrack: Efficient and Precise Dynamic Race
Detection", PLDI 2009.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from .ir import Value, constant
from .lower.core import FAULTS
from .runtime import Function, record_fault
from .state import (
    Access,
    BlockState,
    ClockState,
    GridState,
    OrderEntry,
    OrderState,
    SlotState,
    WarpState,
    WarpStatus,
)

__all__ = ["CHAINS", "Clocks", "race_functions"]

STEP = 16  # granules that are looked at together
WORDS, RECORDS = f"<{STEP} x i32>", f"<{STEP} x i64>"
PIECE = 8  # elements of a clock that are joined together
OBJECTS = 256  # addresses that hand clocks on, modulo
BARRIERS = 16  # of a block
CHAINS = 512  # of works; what does not fit in any counts as ordered


def race_functions() -> list[Function]:
    functions = [_join(), _begin(), _arrive(), _gone(), _leave(), _reset(), _cluster_arrive(), _cluster_leave()]
    functions += [_fence(), _sync(), _object_arrive(), _object_wait(), _bulk_wait(), _passed(), _trigger()]
    functions += [_shared(), _ordered(), _follow(), _global(), _range(), _lane(), _bulk(), _access()]
    return functions


# ---- clocks of warps -------------------------------------------------------------------------------------------------


def _join() -> Function:
    """Make a clock know all that another one knows."""
    f = Function("void", "drvkit_race_join", target="ptr", source="ptr", width="i32")
    kind = f"<{PIECE} x i32>"
    with f.count(f.op("udiv", f["width"], constant("i32", PIECE))) as piece:
        offset = f.op("mul", f.cast("zext", piece, "i64"), constant("i64", 4 * PIECE))
        target = f.at(f["target"], offset)
        known, more = f.load(kind, target, align=4), f.load(kind, f.at(f["source"], offset), align=4)
        f.store(f.intrinsic("umax", known, more), target, align=4)
    f.line("ret void")
    return f


class _Clocks:
    """The clocks of the cluster of a block, in a function that is written."""

    def __init__(self, f: Function, block: Value) -> None:
        self.f, self.block = f, block
        self.state = f.pointer(f.field(block, BlockState, "clocks"))
        self.width = f.field(self.state, ClockState, "width")

    def field(self, name: str) -> Value:
        return self.f.field(self.state, ClockState, name)

    def row(self, name: str, number: Value) -> Value:
        f = self.f
        offset = f.op("mul", f.op("mul", number, self.width), constant("i32", 4))
        return f.at(f.pointer(self.field(name)), f.cast("zext", offset, "i64"))

    def number(self, warp: Value) -> Value:
        """Of a warp of the block, in the cluster."""
        f = self.f
        per_block = f.op("udiv", self.field("count"), self.field("blocks"))
        first = f.op("mul", f.field(self.block, BlockState, "cluster_rank"), per_block)
        return f.op("add", first, f.field(warp, WarpState, "index"))

    def barrier(self, id_: Value) -> Value:
        f = self.f
        first = f.op("mul", f.field(self.block, BlockState, "cluster_rank"), constant("i32", BARRIERS))
        return self.row("barriers", f.op("add", first, id_))

    def join(self, target: Value, source: Value) -> None:
        self.f.call("void", "drvkit_race_join", target, source, self.width)

    def element(self, row: Value, number: Value) -> Value:
        return self.f.at(row, number, "i32")

    def now(self, row: Value, number: Value) -> Value:
        return self.f.load("i32", self.element(row, number), align=4)

    def tick(self, row: Value, number: Value) -> None:
        """What a warp does from now on is not what it has handed on."""
        f = self.f
        f.store(f.op("add", self.now(row, number), constant("i32", 1)), self.element(row, number), align=4)

    def clear(self, row: Value) -> None:
        f = self.f
        nbytes = f.op("mul", f.cast("zext", self.width, "i64"), constant("i64", 4))
        f.call("void", "llvm.memset.p0.i64", row, constant("i8", 0), nbytes, constant("i1", 0))

    def object(self, name: str, address: Value) -> Value:
        """What is handed on at an address of shared or global memory. Addresses that share it order too much."""
        f = self.f
        index = f.op("and", f.op("lshr", address, constant("i64", 2)), constant("i64", OBJECTS - 1))
        return self.row(name, f.cast("trunc", index, "i32"))

    def waited(self, row: Value) -> Value:
        """Whether a warp knows that the grids before this one have ended."""
        f = self.f
        knows = self.now(row, f.op("add", self.field("count"), constant("i32", 1)))
        return f.compare("icmp ugt", knows, self.field("base"))


def _running(f: Function) -> tuple[_Clocks, Value, Value]:
    """The clocks around the warp that runs, its number there, and its own clock."""
    grid = f["grid"]
    clocks = _Clocks(f, f.pointer(f.field(grid, GridState, "current_block")))
    number = clocks.number(f.pointer(f.field(grid, GridState, "current")))
    return clocks, number, clocks.row("warps", number)


def _begin() -> Function:
    """A cluster begins: its warps know all that was before, and nothing of each other."""
    f = Function("void", "drvkit_race_begin", grid="ptr", slot="ptr")
    leader = f.pointer(f.field(f["slot"], SlotState, "blocks"))
    clocks = _Clocks(f, leader)
    count = clocks.field("count")
    base = f.alloca("i32", 4)
    f.store(clocks.field("copies"), base, align=4)
    with f.count(count) as number:
        now = clocks.now(clocks.row("warps", number), number)
        f.store(f.intrinsic("umax", f.load("i32", base, align=4), now), base, align=4)
    newest = f.load("i32", base, align=4)
    f.set(clocks.state, ClockState, "base", newest)
    f.set(clocks.state, ClockState, "copies", newest)
    for name in ("warps", "fenced", "pending"):
        row = f.pointer(clocks.field(name))
        with f.count(f.op("mul", count, clocks.width)) as element:
            f.store(newest, f.at(row, element, "i32"), align=4)
    with f.count(count) as number:
        clocks.tick(clocks.row("warps", number), number)
    f.line("ret void")
    return f


def _arrive() -> Function:
    f = Function("void", "drvkit_race_arrive", block="ptr", warp="ptr", id="i32")
    clocks = _Clocks(f, f["block"])
    number = clocks.number(f["warp"])
    row = clocks.row("warps", number)
    clocks.join(clocks.barrier(f["id"]), row)
    clocks.tick(row, number)
    f.line("ret void")
    return f


def _gone() -> Function:
    """Warps that have ended count as arrived at a barrier for all."""
    f = Function("void", "drvkit_race_gone", grid="ptr", block="ptr", id="i32")
    clocks = _Clocks(f, f["block"])
    first = f.at(f["block"], _first_warp())
    with f.count(f.field(f["grid"], GridState, "warps")) as index:
        offset = f.op("mul", f.cast("zext", index, "i64"), f.field(f["grid"], GridState, "warp_bytes"))
        warp = f.at(first, offset)
        with f.when(f.is_(f.field(warp, WarpState, "status"), WarpStatus.DONE)):
            clocks.join(clocks.barrier(f["id"]), clocks.row("warps", clocks.number(warp)))
    f.line("ret void")
    return f


def _first_warp() -> int:
    return -(-ctypes.sizeof(BlockState) // 64) * 64


def _leave() -> Function:
    """A barrier is a fence, too."""
    f = Function("void", "drvkit_race_leave", block="ptr", warp="ptr", id="i32")
    clocks = _Clocks(f, f["block"])
    _learn_and_fence(clocks, clocks.number(f["warp"]), clocks.barrier(f["id"]))
    f.line("ret void")
    return f


def _learn_and_fence(clocks: _Clocks, number: Value, source: Value) -> None:
    row = clocks.row("warps", number)
    clocks.join(row, source)
    clocks.join(clocks.row("fenced", number), row)


def _reset() -> Function:
    f = Function("void", "drvkit_race_reset", block="ptr", id="i32")
    clocks = _Clocks(f, f["block"])
    clocks.clear(clocks.barrier(f["id"]))
    f.line("ret void")
    return f


def _phase_row(f: Function, clocks: _Clocks, phase: Value) -> Value:
    return clocks.row("cluster_barrier", f.op("and", phase, constant("i32", 1)))


def _cluster_arrive() -> Function:
    """``complete``: it was the last one to arrive in this phase, so nobody waits for the phase before any more."""
    f = Function("void", "drvkit_race_cluster_arrive", grid="ptr", phase="i32", complete="i1", release="i1")
    clocks, number, row = _running(f)
    clocks.join(_phase_row(f, clocks, f["phase"]), f.select(f["release"], row, clocks.row("fenced", number)))
    with f.when(f["release"]):
        clocks.tick(row, number)
    with f.when(f["complete"]):
        clocks.clear(_phase_row(f, clocks, f.op("add", f["phase"], constant("i32", 1))))
    f.line("ret void")
    return f


def _cluster_leave() -> Function:
    f = Function("void", "drvkit_race_cluster_leave", grid="ptr", phase="i32")
    clocks, number, _ = _running(f)
    _learn_and_fence(clocks, number, _phase_row(f, clocks, f["phase"]))
    f.line("ret void")
    return f


def _fence() -> Function:
    """What strong accesses have seen is known now, and what is known is handed on by those to come."""
    f = Function("void", "drvkit_race_fence", grid="ptr")
    clocks, number, row = _running(f)
    _learn_and_fence(clocks, number, clocks.row("pending", number))
    clocks.tick(row, number)
    f.line("ret void")
    return f


def _sync() -> Function:
    """A strong access hands clocks on: with release or acquire at once, else from and to fences."""
    f = Function("void", "drvkit_race_sync", grid="ptr", address="i64", how="i32")
    clocks, number, row = _running(f)
    there = clocks.object("released", f["address"])
    has = _asker(f, f["how"])
    with f.when(has(Access.READS)):
        clocks.join(f.select(has(Access.ACQUIRE), row, clocks.row("pending", number)), there)
    with f.when(has(Access.WRITES)):
        clocks.join(there, f.select(has(Access.RELEASE), row, clocks.row("fenced", number)))
        with f.when(has(Access.RELEASE)):
            clocks.tick(row, number)
    f.line("ret void")
    return f


def _object_arrive() -> Function:
    """An arrival at an mbarrier, of the warp or of its newest bulk copy; the last one of a phase lets others go on."""
    f = Function(
        "void", "drvkit_race_object_arrive", grid="ptr", address="i64", warp="i1", copy="i1", complete="i1"
    )  # fmt: skip
    clocks, number, row = _running(f)
    arrived = clocks.object("arrived", f["address"])
    with f.when(f["warp"]):
        clocks.join(arrived, row)
        clocks.tick(row, number)
    with f.when(f["copy"]):
        place = clocks.element(arrived, clocks.field("count"))
        f.store(f.intrinsic("umax", f.load("i32", place, align=4), clocks.field("copies")), place, align=4)
    with f.when(f["complete"]):
        clocks.join(clocks.object("released", f["address"]), arrived)
        clocks.clear(arrived)
    f.line("ret void")
    return f


def _object_wait() -> Function:
    """The warp has seen that a phase of an mbarrier is over."""
    f = Function("void", "drvkit_race_object_wait", grid="ptr", address="i64")
    clocks, _, row = _running(f)
    clocks.join(row, clocks.object("released", f["address"]))
    f.line("ret void")
    return f


def _bulk_wait() -> Function:
    """The warp has waited for its bulk copies."""
    f = Function("void", "drvkit_race_bulk_wait", grid="ptr")
    clocks, _, row = _running(f)
    f.store(clocks.field("copies"), clocks.element(row, clocks.field("count")), align=4)
    f.line("ret void")
    return f


def _passed() -> Function:
    """The warp has passed ``griddepcontrol.wait``."""
    f = Function("void", "drvkit_race_passed", grid="ptr")
    clocks, _, row = _running(f)
    place = clocks.element(row, f.op("add", clocks.field("count"), constant("i32", 1)))
    f.store(f.op("add", clocks.field("base"), constant("i32", 1)), place, align=4)
    f.line("ret void")
    return f


def _trigger() -> Function:
    """A block lets dependent grids begin, or ends."""
    f = Function("void", "drvkit_race_trigger", grid="ptr", block="ptr", warp="ptr")
    clocks = _Clocks(f, f["block"])
    waited = clocks.waited(clocks.row("warps", clocks.number(f["warp"])))
    order = f.field(f["grid"], GridState, "order")
    with f.when(f.op("and", f.compare("icmp ne", order, constant("i64", 0)), f.op("xor", waited, constant("i1", 1)))):
        f.set(f.pointer(order), OrderState, "triggered_early", 1)
    f.line("ret void")
    return f


# ---- granules --------------------------------------------------------------------------------------------------------


def _asker(f: Function, how: Value) -> Any:
    def has(bit: int) -> Value:
        return f.compare("icmp ne", f.op("and", how, constant("i32", bit)), constant("i32", 0))

    return has


@contextmanager
def _steps(f: Function, count: Value) -> Iterator[tuple[Value, Value]]:
    """Granules, ``STEP`` at a time: the number of the first, and which of them are meant."""
    lanes = Value(f"<{', '.join(f'i32 {lane}' for lane in range(STEP))}>", WORDS)
    steps = f.op("udiv", f.op("add", count, constant("i64", STEP - 1)), constant("i64", STEP))
    with f.count(steps) as step:
        first = f.op("mul", step, constant("i64", STEP))
        left = f.cast("trunc", f.op("sub", count, first), "i32")
        yield first, f.compare("icmp ult", lanes, f.splat(left, STEP))


@contextmanager
def _each_value(f: Function, words: Value, chosen: Value) -> Iterator[tuple[Value, Value, Value]]:
    """Each value among the chosen elements: it, the first element that has it (an i64), and all that do."""
    left = f.alloca(f"i{STEP}", 2)
    f.store(f.bits(chosen), left, align=2)
    head, body, done = f.name("values"), f.name("value"), f.name("done")
    f.jump(head)
    f.label(head)
    now = f.load(f"i{STEP}", left, align=2)
    f.branch(f.is_(now, 0), done, body)
    f.label(body)
    at = f.call(f"i{STEP}", f"llvm.cttz.i{STEP}", now, constant("i1", 1))
    first = f.cast("zext", at, "i64")
    value = f.extract(words, first)
    alike = f.op("and", f.bits(f.compare("icmp eq", words, f.splat(value, STEP))), now)
    f.store(f.op("xor", now, alike), left, align=2)
    yield value, first, f.lanes(alike)
    f.jump(head)
    f.label(done)


def _both(f: Function, *conditions: Value) -> Value:
    result = conditions[0]
    for condition in conditions[1:]:
        result = f.op("and", result, condition)
    return result


def _not_zero(f: Function, value: Value) -> Value:
    return f.compare("icmp ne", value, constant(value.type, 0))


def _shared() -> Function:
    """Bytes of shared memory are accessed by ``who``, a warp or the copies, of whom ``row`` tells what it knows."""
    f = Function(
        "i32", "drvkit_race_shared", grid="ptr", clocks="ptr", row="ptr", who="i32", now="i32", address="i64",
        nbytes="i64", how="i32",
    )  # fmt: skip
    state, row, who = f["clocks"], f["row"], f["who"]
    has = _asker(f, f["how"])
    strong, writes = has(Access.STRONG), has(Access.WRITES)
    shift = f.cast("zext", f.field(state, ClockState, "shift"), "i64")
    start = f.op("sub", f["address"], f.field(state, ClockState, "window"))
    begin = f.op("lshr", start, shift)
    end = f.op("lshr", f.op("add", start, f.op("sub", f["nbytes"], constant("i64", 1))), shift)
    count = f.op("add", f.op("sub", end, begin), constant("i64", 1))
    twice = f.op("shl", f["now"], constant("i32", 1))
    read = f.op("or", twice, f.cast("zext", f.op("xor", strong, constant("i1", 1)), "i32"))
    written = f.op("or", twice, f.cast("zext", strong, "i32"))
    written = f.op(
        "or", f.cast("zext", written, "i64"), f.op("shl", f.cast("zext", who, "i64"), constant("i64", 32))
    )  # fmt: skip
    weak = f.splat(f.op("xor", strong, constant("i1", 1)), STEP)
    readers = f.pointer(f.field(state, ClockState, "reads"))
    reader_bytes = f.field(state, ClockState, "reader_bytes")

    def race(granule: Value, other: Value, other_wrote: int) -> None:
        at = f.op("add", f.op("shl", granule, shift), f.field(state, ClockState, "window"))
        f.set(f["grid"], GridState, "fault_address", at)
        f.set(f["grid"], GridState, "fault_other", other)
        f.set(
            f["grid"],
            GridState,
            "fault_verbs",
            f.op("or", f.cast("zext", writes, "i32"), constant("i32", 2 * other_wrote)),
        )
        f.ret(1)

    with _steps(f, count) as (first, meant):
        granule = f.op("add", begin, first)
        records = f.at(f.pointer(f.field(state, ClockState, "writes")), f.op("shl", granule, constant("i64", 3)))
        record = f.load(RECORDS, records, align=8)
        owners = f.op("lshr", record, constant(RECORDS, 32))
        foreign = f.compare("icmp ne", owners, f.splat(f.cast("zext", who, "i64"), STEP))
        plain = f.op("or", weak, f.is_(f.op("and", record, constant(RECORDS, 1)), 0))
        with _each_value(f, record, _both(f, foreign, plain, meant)) as (value, at, _):
            other = f.cast("trunc", f.op("lshr", value, constant("i64", 32)), "i32")
            clock = f.op("lshr", f.cast("trunc", value, "i32"), constant("i32", 1))
            with f.when(f.compare("icmp ugt", clock, f.load("i32", f.at(row, other, "i32"), align=4)), likely=False):
                race(f.op("add", granule, at), other, 1)
        offset = f.op("shl", granule, constant("i64", 2))
        with f.when(writes):
            readers_count = f.op("add", f.field(state, ClockState, "count"), constant("i32", 1))
            with f.count(readers_count) as reader, f.when(f.compare("icmp ne", reader, who)):
                line = f.at(readers, f.op("add", f.op("mul", f.cast("zext", reader, "i64"), reader_bytes), offset))
                seen = f.load(WORDS, line, align=4)
                known = f.load("i32", f.at(row, reader, "i32"), align=4)
                late = f.compare("icmp ugt", f.op("lshr", seen, constant(WORDS, 1)), f.splat(known, STEP))
                plain = f.op(
                    "or", weak, f.compare("icmp ne", f.op("and", seen, constant(WORDS, 1)), constant(WORDS, 0))
                )
                bits = f.bits(_both(f, late, plain, meant))
                with f.when(_not_zero(f, bits), likely=False):
                    at = f.call(f"i{STEP}", f"llvm.cttz.i{STEP}", bits, constant("i1", 1))
                    race(f.op("add", granule, f.cast("zext", at, "i64")), reader, 0)
            f.store(f.select(meant, f.splat(written, STEP), record), records, align=8)
        with f.when(f.op("xor", writes, constant("i1", 1))):
            own = f.at(readers, f.op("add", f.op("mul", f.cast("zext", who, "i64"), reader_bytes), offset))
            seen = f.load(WORDS, own, align=4)
            newer = f.intrinsic("umax", seen, f.splat(read, STEP))
            f.store(f.select(meant, newer, seen), own, align=4)
    f.ret(0)
    return f


def _ordered() -> Function:
    """Whether a work comes before the one that runs. ``early``: the grids that it depends on may not have ended."""
    f = Function("i1", "drvkit_race_ordered", order="ptr", number="i32", early="i1")
    order = f["order"]
    own = f.compare("icmp eq", f["number"], f.field(order, OrderState, "number"))
    old = f.compare("icmp ult", f["number"], f.field(order, OrderState, "floor"))
    with f.when(f.op("or", own, old)):
        f.ret(constant("i1", 1))
    entry = _entry(f, order, f["number"])
    clock = f.pointer(
        f.select(f["early"], f.field(order, OrderState, "early"), f.field(order, OrderState, "clock"))
    )  # fmt: skip
    known = f.load("i32", f.at(clock, f.field(entry, OrderEntry, "chain"), "i32"), align=4)
    f.ret(f.compare("icmp uge", known, f.field(entry, OrderEntry, "index")))
    return f


def _entry(f: Function, order: Value, number: Value) -> Value:
    offset = f.op("mul", f.cast("zext", number, "i64"), constant("i64", ctypes.sizeof(OrderEntry)))
    return f.at(f.pointer(f.field(order, OrderState, "works")), offset)


def _follow() -> Function:
    """The work that runs has seen what another one stored for that: it comes after all that this one knows of."""
    f = Function("void", "drvkit_race_follow", order="ptr", number="i32")
    order = f["order"]
    own = f.compare("icmp eq", f["number"], f.field(order, OrderState, "number"))
    old = f.compare("icmp ult", f["number"], f.field(order, OrderState, "floor"))
    with f.when(f.op("or", own, old)):
        f.line("ret void")
    source = f.field(_entry(f, order, f["number"]), OrderEntry, "clock")
    with f.when(_not_zero(f, source)):
        for name in ("clock", "early"):
            target = f.pointer(f.field(order, OrderState, name))
            f.call("void", "drvkit_race_join", target, f.pointer(source), constant("i32", CHAINS))
    f.line("ret void")
    return f


def _global() -> Function:
    """The work that runs accesses bytes of the address space."""
    f = Function("i32", "drvkit_race_global", order="ptr", early="i1", address="i64", nbytes="i64", how="i32")
    order = f["order"]
    has = _asker(f, f["how"])
    strong, writes = has(Access.STRONG), has(Access.WRITES)
    weak = f.op("xor", strong, constant("i1", 1))
    begin = f.op("and", f["address"], constant("i64", -4))
    last = f.op("sub", f.op("add", f["address"], f["nbytes"]), constant("i64", 1))
    count = f.op("add", f.op("lshr", f.op("sub", last, begin), constant("i64", 2)), constant("i64", 1))
    head = f.op("shl", constant("i32", 30), f.cast("trunc", f.op("and", f["address"], constant("i64", 3)), "i32"))
    head = f.op("and", head, constant("i32", 30))
    tail = f.op("sub", constant("i32", 3), f.cast("trunc", f.op("and", last, constant("i64", 3)), "i32"))
    tail = f.op("and", f.op("lshr", constant("i32", 30), tail), constant("i32", 30))
    number = f.field(order, OrderState, "number")
    shifted = f.op("shl", number, constant("i32", 5))
    base = f.splat(f.op("or", shifted, f.cast("zext", strong, "i32")), STEP)
    kept = f.splat(f.select(strong, constant("i32", -1), constant("i32", -2)), STEP)  # strong only if all are
    weaks = f.splat(weak, STEP)
    numbers = f.splat(number, STEP)
    lanes = Value(f"<{', '.join(f'i32 {lane}' for lane in range(STEP))}>", WORDS)

    def race(granule: Value, record: Value, wrote: int) -> None:
        f.set(order, OrderState, "address", granule)
        f.set(order, OrderState, "other", f.op("lshr", record, constant("i32", 5)))
        f.set(order, OrderState, "other_wrote", wrote)
        f.ret(1)

    def owner(records: Value) -> Value:
        return f.op("lshr", records, constant(records.type, 5))

    with _steps(f, count) as (first, meant):
        at = f.op("add", begin, f.op("shl", first, constant("i64", 2)))
        final = f.cast("trunc", f.op("sub", f.op("sub", count, constant("i64", 1)), first), "i32")
        is_tail = f.compare("icmp eq", lanes, f.splat(final, STEP))
        place = f.op("add", lanes, f.splat(f.cast("trunc", first, "i32"), STEP))
        touched = f.select(f.is_(place, 0), f.splat(head, STEP), constant(WORDS, 30))
        touched = f.op("and", touched, f.select(is_tail, f.splat(tail, STEP), constant(WORDS, 30)))
        mine = f.op("or", base, touched)
        slots = {
            name: f.pointer(f.op("add", at, f.field(order, OrderState, name)))
            for name in ("writers", "readers", "others")
        }
        records = {name: f.load(WORDS, slot, align=4) for name, slot in slots.items()}

        def conflicts(record: Value, touched: Value = touched, meant: Value = meant) -> Value:
            foreign = f.compare("icmp ne", owner(record), numbers)
            plain = f.op("or", weaks, f.is_(f.op("and", record, constant(WORDS, 1)), 0))
            return _both(f, foreign, plain, meant, _not_zero(f, f.op("and", record, touched)))

        def check(name: str, wrote: int, at: Value = at, records: dict[str, Value] = records) -> None:
            with _each_value(f, records[name], conflicts(records[name])) as (value, lane, _):
                good = f.call("i1", "drvkit_race_ordered", order, owner(value), f["early"])
                with f.when(f.op("xor", good, constant("i1", 1)), likely=False):
                    race(f.op("add", at, f.op("shl", lane, constant("i64", 2))), value, wrote)

        check("writers", 1)
        with f.when(_both(f, strong, has(Access.READS))):
            seen = f.compare("icmp ne", f.op("and", records["writers"], constant(WORDS, 1)), constant(WORDS, 0))
            with _each_value(f, records["writers"], _both(f, seen, meant)) as (value, _, _):
                f.call("void", "drvkit_race_follow", order, owner(value))
        with f.when(writes):
            check("readers", 0)
            check("others", 0)
            again = f.compare("icmp eq", owner(records["writers"]), numbers)
            merged = f.op("and", f.op("or", records["writers"], mine), kept)
            new = f.select(again, merged, mine)
            f.store(f.select(meant, new, records["writers"]), slots["writers"], align=4)
            for name in ("readers", "others"):  # whoever comes after the write comes after them
                rest = f.op(
                    "and", f.op("and", records[name], constant(WORDS, 30)), f.op("xor", touched, constant(WORDS, -1))
                )
                covered = _both(f, meant, weaks, f.is_(rest, 0))
                f.store(f.select(covered, constant(WORDS, 0), records[name]), slots[name], align=4)
        with f.when(f.op("xor", writes, constant("i1", 1))):
            _note_reader(f, records, slots, mine, kept, numbers, meant)
    f.ret(0)
    return f


def _note_reader(
    f: Function,
    records: dict[str, Value],
    slots: dict[str, Value],
    mine: Value,
    kept: Value,
    numbers: Value,
    meant: Value,
) -> None:
    """The last two readers of each granule that nothing orders; one that comes before another is dropped."""
    first, second = f.alloca(WORDS), f.alloca(WORDS)
    f.store(records["readers"], first, align=64)
    f.store(records["others"], second, align=64)
    new = f.compare("icmp ne", records["readers"], mine)
    with f.when(_not_zero(f, f.bits(_both(f, new, meant)))):
        with _each_value(f, records["readers"], _both(f, new, meant)) as (value, _, alike):
            newest, older = f.load(WORDS, first, align=64), f.load(WORDS, second, align=64)
            number = f.op("lshr", value, constant("i32", 5))
            own = f.compare("icmp eq", number, f.extract(numbers, 0))
            none = f.is_(value, 0)
            gone = f.alloca("i1", 1)
            f.store(none, gone, align=1)
            with f.when(f.op("xor", f.op("or", own, none), constant("i1", 1))):
                before = f.call("i1", "drvkit_race_ordered", f["order"], number, f["early"])
                f.store(before, gone, align=1)
            replaced = f.load("i1", gone, align=1)
            merged = f.op("and", f.op("or", newest, mine), kept)
            f.store(f.select(alike, f.select(f.splat(own, STEP), merged, mine), newest), first, align=64)
            beside = f.op("xor", f.op("or", own, replaced), constant("i1", 1))
            with f.when(beside):
                mine_there = f.compare("icmp eq", f.op("lshr", older, constant(WORDS, 5)), numbers)
                combined = f.op("and", f.op("or", older, mine), kept)
                f.store(
                    f.select(_both(f, alike, mine_there), combined, f.load(WORDS, first, align=64)), first, align=64
                )
                f.store(f.select(alike, newest, older), second, align=64)
        f.store(f.load(WORDS, first, align=64), slots["readers"], align=4)
        f.store(f.load(WORDS, second, align=64), slots["others"], align=4)


# ---- accesses --------------------------------------------------------------------------------------------------------


def _range() -> Function:
    """The warp that runs accesses a run of bytes, all of which it may touch. ``copies``: its bulk copies do."""
    f = Function("i32", "drvkit_race_range", grid="ptr", address="i64", nbytes="i64", how="i32", copies="i1")
    grid, address = f["grid"], f["address"]
    clocks, number, row = _running(f)
    has = _asker(f, f["how"])
    inside = f.op("sub", address, clocks.field("window"))
    with f.when(f.compare("icmp ult", inside, clocks.field("window_bytes"))):
        who = f.select(f["copies"], clocks.field("count"), number)
        now = f.select(f["copies"], clocks.field("copies"), clocks.now(row, number))
        arguments = (clocks.state, row, who, now, address, f["nbytes"], f["how"])
        f.ret(f.call("i32", "drvkit_race_shared", grid, *arguments))
    warp = f.pointer(f.field(grid, GridState, "current"))
    lanes = f.op("mul", f.cast("zext", f.field(grid, GridState, "local_bytes"), "i64"), constant("i64", 32))
    local = f.compare("icmp ult", f.op("sub", address, f.field(warp, WarpState, "local")), lanes)
    order = f.field(grid, GridState, "order")
    with f.when(f.op("or", local, f.is_(order, 0))):
        f.ret(0)
    there = f.pointer(order)
    early = f.op("xor", clocks.waited(row), constant("i1", 1))
    bad = f.call("i32", "drvkit_race_global", there, early, address, f["nbytes"], f["how"])
    with f.when(_not_zero(f, bad), likely=False):
        f.set(grid, GridState, "fault_address", f.field(there, OrderState, "address"))
        f.set(grid, GridState, "fault_other", f.field(there, OrderState, "other"))
        wrote = f.op("shl", f.field(there, OrderState, "other_wrote"), constant("i32", 1))
        verbs = f.op("or", wrote, f.cast("zext", has(Access.WRITES), "i32"))
        f.set(grid, GridState, "fault_verbs", f.op("or", verbs, constant("i32", 4)))
    f.ret(bad)
    return f


def _record(f: Function, lane: Value, nbytes: Value) -> None:
    kind = f.is_(f.op("and", f.field(f["grid"], GridState, "fault_verbs"), constant("i32", 4)), 0)
    code = f.select(kind, constant("i32", FAULTS.index("race")), constant("i32", FAULTS.index("no order")))
    record_fault(f, code, lane, f["place"], nbytes, f.field(f["grid"], GridState, "fault_address"))


def _lane() -> Function:
    """One lane accesses a run of bytes."""
    f = Function(
        "i32", "drvkit_race_lane", grid="ptr", address="i64", nbytes="i32", lane="i32", place="i32", how="i32"
    )  # fmt: skip
    nbytes = f.cast("zext", f["nbytes"], "i64")
    bad = f.call("i32", "drvkit_race_range", f["grid"], f["address"], nbytes, f["how"], constant("i1", 0))
    with f.when(_not_zero(f, bad), likely=False):
        _record(f, f["lane"], f["nbytes"])
    f.ret(bad)
    return f


def _bulk() -> Function:
    """A bulk copy: it is nobody's, until somebody waits for it."""
    f = Function(
        "i32", "drvkit_race_bulk", grid="ptr", target="i64", source="i64", nbytes="i32", lane="i32", place="i32"
    )
    clocks, _, _ = _running(f)
    f.add_to(clocks.state, ClockState, "copies", 1)
    for name, how in (("source", Access.READS), ("target", Access.WRITES)):
        nbytes = f.cast("zext", f["nbytes"], "i64")
        bad = f.call("i32", "drvkit_race_range", f["grid"], f[name], nbytes, constant("i32", how), constant("i1", 1))
        with f.when(_not_zero(f, bad), likely=False):
            _record(f, f["lane"], f["nbytes"])
            f.ret(1)
    f.ret(0)
    return f


def _access() -> Function:
    """The lanes of ``mask`` access ``nbytes`` each, which they may touch."""
    f = Function(
        "i32", "drvkit_race_access", grid="ptr", addresses="ptr", mask="i32", nbytes="i32", place="i32", how="i32"
    )
    grid, nbytes, how = f["grid"], f["nbytes"], f["how"]
    has = _asker(f, how)
    wide = f.cast("zext", nbytes, "i64")

    def address_of(lane: Value) -> Value:
        return f.load("i64", f.at(f["addresses"], f.cast("zext", lane, "i64"), "i64"), align=8)

    begin, end = f.alloca("i64", 8), f.alloca("i64", 8)
    f.store(constant("i64", 0), begin, align=8)
    f.store(constant("i64", 0), end, align=8)
    slow, done = f.name("slow"), f.name("done")

    def flush() -> None:
        start = f.load("i64", begin, align=8)
        size = f.op("sub", f.load("i64", end, align=8), start)
        with f.when(_not_zero(f, size)):
            bad = f.call("i32", "drvkit_race_range", grid, start, size, how, constant("i1", 0))
            with f.when(_not_zero(f, bad), likely=False):
                f.jump(slow)

    with f.each_bit(f["mask"]) as lane:  # runs of lanes that are next to each other in memory
        address = address_of(lane)
        goes_on = f.compare("icmp eq", address, f.load("i64", end, align=8))
        same = f.compare("icmp eq", f.op("add", address, wide), f.load("i64", end, align=8))
        inside = f.op("and", same, f.compare("icmp uge", address, f.load("i64", begin, align=8)))
        with f.when(f.op("xor", f.op("or", goes_on, inside), constant("i1", 1))):
            flush()
            f.store(address, begin, align=8)
        f.store(f.op("add", address, wide), end, align=8)
    flush()
    f.jump(done)

    f.label(slow)  # whose access it is
    with f.each_bit(f["mask"]) as lane:
        bad = f.call("i32", "drvkit_race_lane", grid, address_of(lane), nbytes, lane, f["place"], how)
        with f.when(_not_zero(f, bad), likely=False):
            f.ret(1)
    f.jump(done)
    f.label(done)
    apart = has(Access.APART)
    with f.when(f.op("and", has(Access.STRONG), f.op("xor", apart, constant("i1", 1)))), f.each_bit(f["mask"]) as lane:
        f.call("void", "drvkit_race_sync", grid, address_of(lane), how)
    f.ret(0)
    return f


# ---- the host's side -------------------------------------------------------------------------------------------------

LARGEST_CLOCK = 1 << 29  # of a slot's warps; it gets new clocks then


class Clocks:
    """The `ClockState` of a slot."""

    def __init__(self, blocks: int, warps: int, shared_bytes: int, shift: int, window: int) -> None:
        count = blocks * warps
        width = -(-(count + 2) // PIECE) * PIECE
        granules = (shared_bytes >> shift) + 2 * STEP
        sizes = {
            "warps": count * width,
            "fenced": count * width,
            "pending": count * width,
            "barriers": blocks * BARRIERS * width,
            "cluster_barrier": 2 * width,
            "arrived": OBJECTS * width,
            "released": OBJECTS * width,
            "writes": 2 * granules,
            "reads": (count + 1) * granules,
        }
        self._arrays = {name: np.zeros(size, np.uint32) for name, size in sizes.items()}
        self.state = ClockState(
            **{name: array.ctypes.data for name, array in self._arrays.items()},
            reader_bytes=4 * granules,
            window=window,
            window_bytes=shared_bytes,
            width=width,
            count=count,
            blocks=blocks,
            shift=shift,
        )

    @property
    def worn(self) -> bool:
        return bool(self.state.base > LARGEST_CLOCK)
