"""What all kernels call: checked memory accesses, barriers, the clock, and the loop that runs resident blocks.

A memory access takes an address for each of 32 lanes. Lanes that are next to each other in memory, or all at one
address, are served at once; others one by one. A function gives 0, or 1 when it has recorded a fault in the grid.

A slot holds a cluster of blocks that is resident: their states, then their warps'. The loop runs the warps of a slot
in turn until its blocks have ended or all its warps wait; another cluster becomes resident when one has ended, or when
none of the resident ones can go on.
"""

from __future__ import annotations

import ctypes

from .ir import BRANCH_WEIGHTS, Builder, Value, constant, vector
from .lower.core import FAULTS, field_of
from .memory import ALLOCATED, WRITTEN
from .state import (
    COPIES,
    REGISTERS,
    SHARED_STRIDE,
    Access,
    BarrierState,
    BlockState,
    Code,
    CopyState,
    GridState,
    MulticastRange,
    SlotState,
    WarpState,
    WarpStatus,
)

__all__ = ["ACCESS_BYTES", "Function", "check_lane", "record_fault", "runtime_ir"]

ACCESS_BYTES = (1, 2, 4, 8, 16, 32)
PATIENCE = 64  # rounds of one slot before the others get their turn
BARRIERS = 16


class Function(Builder):
    """One function of the runtime."""

    def __init__(self, result: str, name: str, **parameters: str) -> None:
        super().__init__()
        self.head = f"{result} @{name}({', '.join(f'{kind} %{given}' for given, kind in parameters.items())})"
        self.args = {given: Value(f"%{given}", kind) for given, kind in parameters.items()}

    def __getitem__(self, name: str) -> Value:
        return self.args[name]

    def field(self, base: Value, structure: type[ctypes.Structure], name: str, index: Value | int = 0) -> Value:
        _, kind, size = field_of(structure, name)
        return self.load(kind, self.place(base, structure, name, index), align=size)

    def set(
        self, base: Value, structure: type[ctypes.Structure], name: str, value: Value | int, index: int = 0
    ) -> None:
        _, kind, size = field_of(structure, name)
        number = constant(kind, value) if isinstance(value, int) else value
        self.store(number, self.place(base, structure, name, index), align=size)

    def place(self, base: Value, structure: type[ctypes.Structure], name: str, index: Value | int = 0) -> Value:
        offset, _, size = field_of(structure, name)
        if isinstance(index, int):
            return self.at(base, offset + size * index)
        return self.at(self.at(base, offset), self.op("mul", index, constant(index.type, size)))

    def add_to(self, base: Value, structure: type[ctypes.Structure], name: str, amount: Value | int) -> Value:
        old = self.field(base, structure, name)
        new = self.op("add", old, constant(old.type, amount) if isinstance(amount, int) else amount)
        self.set(base, structure, name, new)
        return new

    def pointer(self, address: Value) -> Value:
        return self.value("ptr", f"inttoptr {address} to ptr")

    def ret(self, value: int | Value) -> None:
        self.line(f"ret {value if isinstance(value, Value) else f'i32 {value}'}")

    def is_(self, a: Value, value: int) -> Value:
        return self.compare("icmp eq", a, constant(a.type, value))

    def text(self, attributes: str = "") -> str:
        return self.function(self.head, attributes=attributes)


def runtime_ir() -> tuple[str, list[str]]:
    """The module's text, and the names of its functions."""
    from .races import race_functions
    from .weak import weak_functions

    functions = [_time(), _check(), _readable(), _peers(), _copy_bulk()]
    functions += [make(checked) for make in (_copy_begin, _copy_oldest, _copy_finish) for checked in (True, False)]
    functions += [_multicast(), _release(), _barrier(), _begin(), _ended(), _as_before(), _run_slot(), _run()]
    for nbytes in ACCESS_BYTES:
        for checked in (True, False):
            functions += [_access(nbytes, "load", checked), _access(nbytes, "store", checked)]
    functions += weak_functions() + race_functions()
    names = [function.head.split("@")[1].split("(")[0] for function in functions]
    declared: dict[str, str] = {}
    for function in functions:
        declared |= {name: text for name, text in function.declared.items() if name not in names}
    bodies = [function.text("noinline ") for function in functions]
    return "\n".join([BRANCH_WEIGHTS, *declared.values(), *bodies]), names


# Time


def _time() -> Function:
    f = Function("i64", "drvkit_time", grid="ptr")
    spec = f.alloca("[2 x i64]", 16)
    f.call("i32", "clock_gettime", constant("i32", 1), spec)
    seconds, nanoseconds = f.load("i64", spec, align=8), f.load("i64", f.at(spec, 8), align=8)
    now = f.op("add", f.op("mul", seconds, constant("i64", 10**9)), nanoseconds)
    f.ret(f.op("add", now, f.field(f["grid"], GridState, "time_shift")))
    return f


# Memory


def named(name: str, checked: bool) -> str:
    """A function of which there are two: one looks whether bytes may be touched, and one does not."""
    return f"drvkit_{name}{'' if checked else '_unchecked'}"


def record_fault(
    f: Function,
    kind: str | Value,
    lane: Value,
    place: Value,
    nbytes: int | Value,
    address: Value,
    verbs: int | Value | None = None,
) -> None:
    """``verbs`` as in the grid's ``fault_verbs``, if they are not there yet."""
    grid = f["grid"]
    f.set(grid, GridState, "fault_kind", FAULTS.index(kind) if isinstance(kind, str) else kind)
    f.set(grid, GridState, "fault_lane", lane)
    f.set(grid, GridState, "fault_place", place)
    f.set(grid, GridState, "fault_bytes", nbytes)
    f.set(grid, GridState, "fault_address", address)
    if verbs is not None:
        f.set(grid, GridState, "fault_verbs", verbs)


def _verbs(f: Function, needs: Value) -> Value:
    """Of an access that needs this of its bytes."""
    return f.cast("zext", f.is_(f.op("and", needs, constant("i8", WRITTEN)), 0), "i32")


def _shadow_word(f: Function, address: Value, nbytes: int) -> tuple[Value, Value]:
    """Where the shadow of some bytes is, and what it says, as one integer."""
    shadow = f.pointer(f.op("add", address, f.field(f["grid"], GridState, "shadow")))
    return shadow, f.load(f"i{8 * nbytes}", shadow, align=1)


def _every(nbytes: int, state: int) -> int:
    return int.from_bytes(bytes([state]) * nbytes, "little")


def _check() -> Function:
    """One lane's access of 1, 2, 4, 8 or 16 bytes that both reads and writes, as atomics do."""
    f = Function(
        "i32", "drvkit_check", grid="ptr", address="i64", lane="i32", place="i32", nbytes="i32", needs="i8", gives="i8"
    )
    grid, address, verbs = f["grid"], f["address"], _verbs(f, f["needs"])
    nbytes = f.cast("zext", f["nbytes"], "i64")
    inside = f.op("sub", address, f.field(grid, GridState, "memory_base"))
    with f.when(f.compare("icmp uge", inside, f.field(grid, GridState, "memory_bytes")), likely=False):
        record_fault(f, "not allocated", f["lane"], f["place"], f["nbytes"], address, verbs)
        f.ret(1)
    low = f.op("and", address, f.op("sub", nbytes, constant("i64", 1)))
    with f.when(f.compare("icmp ne", low, constant("i64", 0)), likely=False):
        record_fault(f, "misaligned", f["lane"], f["place"], f["nbytes"], address, verbs)
        f.ret(1)
    shadow = f.op("add", address, f.field(grid, GridState, "shadow"))
    with f.count(nbytes) as byte:
        place = f.pointer(f.op("add", shadow, byte))
        state = f.load("i8", place)
        with f.when(f.is_(f.op("and", state, constant("i8", ALLOCATED)), 0), likely=False):
            record_fault(f, "not allocated", f["lane"], f["place"], f["nbytes"], address, verbs)
            f.ret(1)
        with f.when(f.compare("icmp ne", f.op("and", state, f["needs"]), f["needs"]), likely=False):
            record_fault(f, "not written", f["lane"], f["place"], f["nbytes"], address, verbs)
            f.ret(1)
        f.store(f.op("or", state, f["gives"]), place)
    f.ret(0)
    return f


def _access(nbytes: int, verb: str, checked: bool) -> Function:
    f = Function(
        "i32",
        named(f"{verb}_{nbytes}", checked),
        grid="ptr",
        addresses="ptr",
        mask="i32",
        values="ptr",
        place="i32",
    )
    grid, mask = f["grid"], f["mask"]
    loads = verb == "load"
    needs = ALLOCATED | WRITTEN if loads else ALLOCATED
    if not loads:
        f.add_to(grid, GridState, "stores", 1)
    slow = f.name("slow")
    full = f.name("full")
    f.branch(f.is_(mask, -1), full, slow)
    f.label(full)
    addresses = f.load("<32 x i64>", f["addresses"], align=64)
    first = f.extract(addresses, 0)
    steps = Value(f"<{', '.join(f'i64 {nbytes * lane}' for lane in range(32))}>", "<32 x i64>")
    distance = f.op("sub", addresses, f.splat(first, 32))
    near = f.is_(f.bits(f.compare("icmp eq", distance, steps)), -1)
    fast, same = f.name("fast"), f.name("same")
    apart = f.name("apart") if loads else slow
    f.branch(near, fast, apart)
    total = 32 * nbytes

    f.label(fast)
    if checked:
        inside = f.op("sub", first, f.field(grid, GridState, "memory_base"))
        room = f.op("sub", f.field(grid, GridState, "memory_bytes"), constant("i64", total))
        good = f.compare("icmp ule", inside, room)
        good = f.op("and", good, f.is_(f.op("and", first, constant("i64", nbytes - 1)), 0))
        checked_label = f.name("checked")
        f.branch(good, checked_label, slow, likely=True)
        f.label(checked_label)
        shadow = f.pointer(f.op("add", first, f.field(grid, GridState, "shadow")))
        words = vector("i64", min(total, 256) // 8) if total >= 16 else f"i{8 * total}"
        state: Value | None = None
        for chunk in range(0, total, 256):
            each = f.load(words, f.at(shadow, chunk), align=1)
            state = each if state is None else f.op("and", state, each)
        assert state is not None
        pattern = constant(words, _every(8, needs))
        have = f.compare("icmp eq", f.op("and", state, pattern), pattern)
        copy = f.name("copy")
        lanes = total // 8 if total < 256 else 32
        f.branch(f.is_(f.value(f"i{lanes}", f"bitcast {have} to i{lanes}"), -1), copy, slow, likely=True)
        f.label(copy)
        if not loads:
            f.call("void", "llvm.memset.p0.i64", shadow, constant("i8", 3), constant("i64", total), constant("i1", 0))
    there = f.pointer(first)
    target, source = (f["values"], there) if loads else (there, f["values"])
    f.call("void", "llvm.memcpy.p0.p0.i64", target, source, constant("i64", total), constant("i1", 0))
    f.ret(0)

    if loads:
        f.label(apart)
        scattered = f.name("scattered") if nbytes <= 16 else slow
        f.branch(f.is_(f.bits(f.compare("icmp eq", distance, constant("<32 x i64>", 0))), -1), same, scattered)
        f.label(same)
        if checked:
            check_lane(f, first, constant("i32", 0), nbytes, needs)
        item = f.load(f"i{8 * nbytes}", f.pointer(first), align=1)
        if nbytes <= 8:
            f.store(f.splat(item, 32), f["values"], align=min(64, 32 * nbytes))
        else:
            for number in range(32):
                f.store(item, f.at(f["values"], nbytes * number), align=nbytes)
        f.ret(0)

        if scattered != slow:
            f.label(scattered)
            _gather(f, addresses, nbytes, needs if checked else 0, slow)

    f.label(slow)
    with f.each_bit(mask) as lane:
        wide = f.cast("zext", lane, "i64")
        address = f.load("i64", f.at(f["addresses"], wide, "i64"), align=8)
        if checked:
            check_lane(f, address, lane, nbytes, needs)
            if not loads:
                shadow = f.pointer(f.op("add", address, f.field(grid, GridState, "shadow")))
                f.store(constant(f"i{8 * nbytes}", _every(nbytes, 3)), shadow, align=1)
        here = f.at(f["values"], f.op("mul", wide, constant("i64", nbytes)))
        there = f.pointer(address)
        target, source = (here, there) if loads else (there, here)
        f.store(f.load(f"i{8 * nbytes}", source, align=1), target, align=1)
    f.ret(0)
    return f


def _gather(f: Function, addresses: Value, nbytes: int, needs: int, slow: str) -> None:
    """Load up to 16 bytes of each lane from anywhere, all lanes at once, and return; or go to ``slow`` if a lane may
    not, which says why."""
    grid, kind = f["grid"], f"i{8 * min(nbytes, 8)}"

    def parts(first: Value) -> list[Value]:
        """The 8 bytes, or fewer, from there on, and those behind them."""
        if nbytes < 4:  # part of a word, which is as aligned as they are
            start = f.op("and", first, constant(first.type, -4))
            past = f.cast("trunc", f.op("shl", f.op("sub", first, start), constant(first.type, 3)), "i32")
            return [f.cast("trunc", f.op("lshr", f.gather("i32", start), past), kind)]
        places = [first] if nbytes <= 8 else [first, f.op("add", first, constant(first.type, 8))]
        return [f.gather(kind, place) for place in places]

    if needs:
        inside = f.op("sub", addresses, f.splat(f.field(grid, GridState, "memory_base"), 32))
        room = f.op("sub", f.field(grid, GridState, "memory_bytes"), constant("i64", nbytes))
        good = f.compare("icmp ule", inside, f.splat(room, 32))
        low = f.op("and", addresses, constant(addresses.type, nbytes - 1))
        good = f.op("and", good, f.compare("icmp eq", low, constant(low.type, 0)))
        within = f.name("within")
        f.branch(f.is_(f.bits(good), -1), within, slow, likely=True)
        f.label(within)
        state, *others = parts(f.op("add", addresses, f.splat(f.field(grid, GridState, "shadow"), 32)))
        for other in others:
            state = f.op("and", state, other)
        pattern = constant(state.type, _every(min(nbytes, 8), needs))
        have = f.compare("icmp eq", f.op("and", state, pattern), pattern)
        copy = f.name("copy")
        f.branch(f.is_(f.bits(have), -1), copy, slow, likely=True)
        f.label(copy)
    values, *others = parts(addresses)
    if others:
        values = f.shuffle(values, [place for lane in range(32) for place in (lane, lane + 32)], others[0])
    f.store(values, f["values"], align=64)
    f.ret(0)


def check_lane(f: Function, address: Value, lane: Value, nbytes: int, needs: int) -> None:
    """Return a fault unless a lane may access its address."""
    grid, verbs = f["grid"], int(not needs & WRITTEN)
    inside = f.op("sub", address, f.field(grid, GridState, "memory_base"))
    room = f.op("sub", f.field(grid, GridState, "memory_bytes"), constant("i64", nbytes - 1))
    with f.when(f.compare("icmp uge", inside, room), likely=False):
        record_fault(f, "not allocated", lane, f["place"], nbytes, address, verbs)
        f.ret(1)
    if nbytes > 1:
        low = f.op("and", address, constant("i64", nbytes - 1))
        with f.when(f.compare("icmp ne", low, constant("i64", 0)), likely=False):
            record_fault(f, "misaligned", lane, f["place"], nbytes, address, verbs)
            f.ret(1)
    _, state = _shadow_word(f, address, nbytes)
    pattern = constant(state.type, _every(nbytes, needs))
    with f.when(f.compare("icmp ne", f.op("and", state, pattern), pattern), likely=False):
        allocated = constant(state.type, _every(nbytes, ALLOCATED))
        outside = f.compare("icmp ne", f.op("and", state, allocated), allocated)
        kind = f.select(
            outside,
            constant("i32", FAULTS.index("not allocated")),
            constant("i32", FAULTS.index("not written")),
        )
        record_fault(f, kind, lane, f["place"], nbytes, address, verbs)
        f.ret(1)


def _peers() -> Function:
    """Addresses that may be in shared memory of other blocks of the cluster: those must have begun, and not ended."""
    f = Function("i32", "drvkit_peers", grid="ptr", block="ptr", addresses="ptr", mask="i32", place="i32")
    grid, block = f["grid"], f["block"]
    blocks, own = f.field(grid, GridState, "cluster_blocks"), f.field(block, BlockState, "cluster_rank")
    with f.when(f.is_(blocks, 1)):
        f.ret(0)
    leader = f.pointer(f.field(block, BlockState, "leader"))
    with f.each_bit(f["mask"]) as lane:
        address = f.load("i64", f.at(f["addresses"], f.cast("zext", lane, "i64"), "i64"), align=8)
        inside = f.op("sub", address, f.field(block, BlockState, "shared_base"))
        rank = f.op("udiv", inside, constant("i64", SHARED_STRIDE))
        is_peer = f.op(
            "and",
            f.compare("icmp ult", rank, f.cast("zext", blocks, "i64")),
            f.compare("icmp ne", rank, f.cast("zext", own, "i64")),
        )
        with f.when(is_peer):
            peer = f.at(leader, f.op("mul", rank, f.field(grid, GridState, "block_bytes")))
            for kind, bad in (
                ("not begun", f.is_(f.field(block, BlockState, "met"), 0)),
                ("ended", f.is_(f.field(peer, BlockState, "live"), 0)),
            ):
                with f.when(bad, likely=False):
                    record_fault(f, kind, lane, f["place"], 0, address)
                    f.ret(1)
    f.ret(0)
    return f


def _multicast() -> Function:
    """Where device ``number`` of the team has its memory behind multicast addresses; gives the lanes that have some.

    The first one is asked for first: then a lane whose address has no memory of a team is a fault, and none is given.
    """
    f = Function(
        "i32", "drvkit_multicast", grid="ptr", addresses="ptr", mask="i32", number="i64", nbytes="i32", found="ptr",
        verbs="i32", place="i32",
    )  # fmt: skip
    grid, number = f["grid"], f["number"]
    ranges, lanes = f.pointer(f.field(grid, GridState, "multicast")), f.alloca("i32", 4)
    f.store(constant("i32", 0), lanes, align=4)
    with f.each_bit(f["mask"]) as lane:
        wide = f.cast("zext", lane, "i64")
        address = f.load("i64", f.at(f["addresses"], wide, "i64"), align=8)
        bit = f.op("shl", constant("i32", 1), lane)
        with f.count(f.field(grid, GridState, "multicast_count")) as index:
            range_ = f.at(ranges, f.op("mul", index, constant("i64", ctypes.sizeof(MulticastRange))))
            inside = f.op("sub", address, f.field(range_, MulticastRange, "start"))
            within = f.compare("icmp ult", inside, f.field(range_, MulticastRange, "nbytes"))
            has = f.compare("icmp ult", number, f.field(range_, MulticastRange, "count"))
            with f.when(f.op("and", within, has)):
                member = f.field(range_, MulticastRange, "members", number)
                f.store(f.op("add", member, inside), f.at(f["found"], wide, "i64"), align=8)
                f.store(f.op("or", f.load("i32", lanes, align=4), bit), lanes, align=4)
        with f.when(f.is_(number, 0), likely=False):
            nbytes = f.cast("zext", f["nbytes"], "i64")
            low = f.op("and", address, f.op("sub", nbytes, constant("i64", 1)))
            known = f.op("and", f.load("i32", lanes, align=4), bit)
            for kind, bad in (
                ("not allocated", f.is_(known, 0)),
                ("misaligned", f.compare("icmp ne", low, constant("i64", 0))),
            ):
                with f.when(bad, likely=False):
                    record_fault(f, kind, lane, f["place"], f["nbytes"], address, f["verbs"])
                    f.ret(0)
    f.ret(f.load("i32", lanes, align=4))
    return f


# Copies


def _copy_begin(checked: bool) -> Function:
    """Queue a cp.async of a warp; until it is finished its targets count as not written."""
    f = Function(
        "i32", named("copy_begin", checked), grid="ptr", warp="ptr", targets="ptr", sources="ptr", amounts="ptr",
        mask="i32", nbytes="i32", place="i32",
    )  # fmt: skip
    grid, warp = f["grid"], f["warp"]
    begun, done = f.field(warp, WarpState, "copies_begun"), f.field(warp, WarpState, "copies_done")
    with f.when(f.compare("icmp uge", f.op("sub", begun, done), constant("i32", COPIES)), likely=False):
        bad = f.call("i32", named("copy_oldest", checked), grid, warp)
        with f.when(f.compare("icmp ne", bad, constant("i32", 0)), likely=False):
            f.ret(1)
    entry = _entry_of(f, begun)
    for name, value in (("mask", f["mask"]), ("nbytes", f["nbytes"]), ("place", f["place"])):
        f.set(entry, CopyState, name, value)
    f.set(entry, CopyState, "group", f.field(warp, WarpState, "groups_committed"))
    for name, source, bytes_ in (
        ("target", "targets", 256),
        ("source", "sources", 256),
        ("source_bytes", "amounts", 128),
    ):
        target = f.place(entry, CopyState, name)
        f.call("void", "llvm.memcpy.p0.p0.i64", target, f[source], constant("i64", bytes_), constant("i1", 0))
    f.set(warp, WarpState, "copies_begun", f.op("add", begun, constant("i32", 1)))
    if not checked:
        f.ret(0)
        return f
    with f.each_bit(f["mask"]) as lane:
        address = f.load("i64", f.at(f["targets"], f.cast("zext", lane, "i64"), "i64"), align=8)
        arguments = (lane, f["place"], f["nbytes"], constant("i8", ALLOCATED), constant("i8", 0))
        with f.when(f.compare("icmp ne", f.call("i32", "drvkit_check", grid, address, *arguments), constant("i32", 0))):
            f.ret(1)
        shadow = f.pointer(f.op("add", address, f.field(grid, GridState, "shadow")))
        size = f.cast("zext", f["nbytes"], "i64")
        f.call("void", "llvm.memset.p0.i64", shadow, constant("i8", ALLOCATED), size, constant("i1", 0))
    f.ret(0)
    return f


def _entry_of(f: Function, number: Value) -> Value:
    index = f.op("mul", f.op("urem", number, constant("i32", COPIES)), constant("i32", ctypes.sizeof(CopyState)))
    return f.at(f.pointer(f.field(f["warp"], WarpState, "copies")), index)


def _copy_oldest(checked: bool) -> Function:
    """Do the oldest copy of a warp's queue."""
    f = Function("i32", named("copy_oldest", checked), grid="ptr", warp="ptr")
    grid = f["grid"]
    done = f.field(f["warp"], WarpState, "copies_done")
    f.set(f["warp"], WarpState, "copies_done", f.op("add", done, constant("i32", 1)))
    entry = _entry_of(f, done)
    nbytes, place = f.field(entry, CopyState, "nbytes"), f.field(entry, CopyState, "place")
    wide = f.cast("zext", nbytes, "i64")
    with f.each_bit(f.field(entry, CopyState, "mask")) as lane:
        target = f.field(entry, CopyState, "target", lane)
        source = f.field(entry, CopyState, "source", lane)
        amount = f.field(entry, CopyState, "source_bytes", lane)
        if checked:
            with f.when(f.compare("icmp ne", amount, constant("i32", 0))):
                needs = constant("i8", ALLOCATED | WRITTEN)
                bad = f.call("i32", "drvkit_readable", grid, source, lane, place, amount, needs)
                with f.when(f.compare("icmp ne", bad, constant("i32", 0)), likely=False):
                    f.ret(1)
                _watch_copy(f, source, amount, lane, place, Access.READS)
        there = f.pointer(target)
        f.call("void", "llvm.memset.p0.i64", there, constant("i8", 0), wide, constant("i1", 0))
        size = f.cast("zext", f.call("i32", "llvm.umin.i32", amount, nbytes), "i64")
        f.call("void", "llvm.memcpy.p0.p0.i64", there, f.pointer(source), size, constant("i1", 0))
        if checked:
            shadow = f.pointer(f.op("add", target, f.field(grid, GridState, "shadow")))
            f.call("void", "llvm.memset.p0.i64", shadow, constant("i8", 3), wide, constant("i1", 0))
            _watch_copy(f, target, nbytes, lane, place, Access.WRITES)
    f.add_to(grid, GridState, "stores", 1)
    f.ret(0)
    return f


def _watch_copy(f: Function, address: Value, nbytes: Value, lane: Value, place: Value, how: int) -> None:
    """Where races are looked for: what a copy reads or writes as it is done."""
    with f.when(f.compare("icmp ne", f.field(f["grid"], GridState, "watched"), constant("i32", 0))):
        bad = f.call("i32", "drvkit_race_lane", f["grid"], address, nbytes, lane, place, constant("i32", how))
        with f.when(f.compare("icmp ne", bad, constant("i32", 0)), likely=False):
            f.ret(1)


def _copy_finish(checked: bool) -> Function:
    """Do all copies but those of the newest ``keep`` groups; of -1, also those of no group yet."""
    f = Function("i32", named("copy_finish", checked), grid="ptr", warp="ptr", keep="i32")
    warp = f["warp"]
    every = f.is_(f["keep"], -1)
    limit = f.op("sub", f.field(warp, WarpState, "groups_committed"), f["keep"])
    again, work, end = f.name("again"), f.name("work"), f.name("end")
    f.jump(again)
    f.label(again)
    done, begun = f.field(warp, WarpState, "copies_done"), f.field(warp, WarpState, "copies_begun")
    old = f.compare("icmp slt", f.field(_entry_of(f, done), CopyState, "group"), limit)
    due = f.op("and", f.compare("icmp ne", done, begun), f.op("or", every, old))
    f.branch(due, work, end)
    f.label(work)
    bad = f.call("i32", named("copy_oldest", checked), f["grid"], warp)
    with f.when(f.compare("icmp ne", bad, constant("i32", 0)), likely=False):
        f.ret(1)
    f.jump(again)
    f.label(end)
    f.ret(0)
    return f


def _readable() -> Function:
    """Whether a run of bytes may be touched so; it need not be aligned."""
    f = Function("i32", "drvkit_readable", grid="ptr", address="i64", lane="i32", place="i32", nbytes="i32", needs="i8")
    grid, address, verbs = f["grid"], f["address"], _verbs(f, f["needs"])
    size = f.cast("zext", f["nbytes"], "i64")
    inside = f.op("sub", address, f.field(grid, GridState, "memory_base"))
    limit = f.op("sub", f.field(grid, GridState, "memory_bytes"), size)
    with f.when(f.compare("icmp ugt", inside, limit), likely=False):
        record_fault(f, "not allocated", f["lane"], f["place"], f["nbytes"], address, verbs)
        f.ret(1)
    shadow = f.op("add", address, f.field(grid, GridState, "shadow"))
    with f.count(size) as byte:
        state = f.load("i8", f.pointer(f.op("add", shadow, byte)))
        with f.when(f.compare("icmp ne", f.op("and", state, f["needs"]), f["needs"]), likely=False):
            outside = f.is_(f.op("and", state, constant("i8", ALLOCATED)), 0)
            kind = f.select(
                outside,
                constant("i32", FAULTS.index("not allocated")),
                constant("i32", FAULTS.index("not written")),
            )
            record_fault(f, kind, f["lane"], f["place"], f["nbytes"], f.op("add", address, byte), verbs)
            f.ret(1)
    f.ret(0)
    return f


def _copy_bulk() -> Function:
    """A run of bytes, of a cp.async.bulk: addresses and size are multiples of 16."""
    f = Function(
        "i32", "drvkit_copy_bulk", grid="ptr", target="i64", source="i64", nbytes="i32", lane="i32", place="i32"
    )
    grid = f["grid"]
    size = f.cast("zext", f["nbytes"], "i64")
    for name, state in (("source", ALLOCATED | WRITTEN), ("target", ALLOCATED)):
        low = f.op("and", f.op("or", f[name], size), constant("i64", 15))
        with f.when(f.compare("icmp ne", low, constant("i64", 0)), likely=False):
            record_fault(f, "misaligned", f["lane"], f["place"], f["nbytes"], f[name], int(name == "target"))
            f.ret(1)
        arguments = (f["lane"], f["place"], f["nbytes"], constant("i8", state))
        bad = f.call("i32", "drvkit_readable", grid, f[name], *arguments)
        with f.when(f.compare("icmp ne", bad, constant("i32", 0)), likely=False):
            f.ret(1)
    f.call("void", "llvm.memmove.p0.p0.i64", f.pointer(f["target"]), f.pointer(f["source"]), size, constant("i1", 0))
    shadow = f.pointer(f.op("add", f["target"], f.field(grid, GridState, "shadow")))
    f.call("void", "llvm.memset.p0.i64", shadow, constant("i8", 3), size, constant("i1", 0))
    f.add_to(grid, GridState, "stores", 1)
    f.ret(0)
    return f


# Barriers


def _release() -> Function:
    """Make the warps ready that wait for a barrier, if all who are expected have arrived."""
    f = Function("void", "drvkit_release", grid="ptr", block="ptr", id="i32")
    grid, block = f["grid"], f["block"]
    offset = BlockState.barriers.offset
    barrier = f.at(f.at(block, offset), f.op("mul", f["id"], constant("i32", ctypes.sizeof(BarrierState))))
    arrived = f.field(barrier, BarrierState, "arrived")
    expected = f.field(barrier, BarrierState, "expected")
    everybody = f.op("mul", f.field(block, BlockState, "live"), constant("i32", 32))
    needed = f.select(f.is_(expected, 0), everybody, expected)
    complete = f.op("and", f.compare("icmp uge", arrived, needed), f.compare("icmp ne", arrived, constant("i32", 0)))
    with f.when(complete):
        warp_bytes = f.field(grid, GridState, "warp_bytes")
        votes, threads = f.field(barrier, BarrierState, "votes"), f.field(barrier, BarrierState, "threads")
        first = f.at(block, _first_warp())
        watched = f.compare("icmp ne", f.field(grid, GridState, "watched"), constant("i32", 0))
        with f.when(f.op("and", watched, f.is_(expected, 0))):
            f.call("void", "drvkit_race_gone", grid, block, f["id"])
        with f.count(f.field(grid, GridState, "warps")) as number:
            warp = f.at(first, f.op("mul", f.cast("zext", number, "i64"), warp_bytes))
            waits = f.op(
                "and",
                f.is_(f.field(warp, WarpState, "status"), WarpStatus.WAITING),
                f.compare("icmp eq", f.field(warp, WarpState, "barrier"), f["id"]),
            )
            with f.when(waits):
                f.set(warp, WarpState, "status", WarpStatus.READY)
                f.set(warp, WarpState, "votes", votes)
                f.set(warp, WarpState, "participants", threads)
                with f.when(watched):
                    f.call("void", "drvkit_race_leave", block, warp, f["id"])
        with f.when(watched):
            f.call("void", "drvkit_race_reset", block, f["id"])
        for name in ("arrived", "expected", "votes", "threads"):
            f.set(barrier, BarrierState, name, 0)
    f.line("ret void")
    return f


def _first_warp() -> int:
    """Where the warps of a block begin."""
    return -(-ctypes.sizeof(BlockState) // 64) * 64


def _barrier() -> Function:
    """A warp arrives at a barrier, and waits there if it says so."""
    f = Function(
        "i32", "drvkit_barrier", grid="ptr", block="ptr", warp="ptr", id="i32", expected="i32", threads="i32",
        votes="i32", wait="i1", place="i32",
    )  # fmt: skip
    block, warp = f["block"], f["warp"]
    with f.when(f.compare("icmp uge", f["id"], constant("i32", BARRIERS)), likely=False):
        record_fault(f, "barrier", constant("i32", 0), f["place"], f["id"], constant("i64", 0))
        f.ret(1)
    offset = BlockState.barriers.offset
    barrier = f.at(f.at(block, offset), f.op("mul", f["id"], constant("i32", ctypes.sizeof(BarrierState))))
    f.add_to(barrier, BarrierState, "arrived", 32)
    f.add_to(barrier, BarrierState, "threads", f["threads"])
    f.add_to(barrier, BarrierState, "votes", f["votes"])
    with f.when(f.compare("icmp ne", f["expected"], constant("i32", 0))):
        f.set(barrier, BarrierState, "expected", f["expected"])
    with f.when(f.compare("icmp ne", f.field(f["grid"], GridState, "watched"), constant("i32", 0))):
        f.call("void", "drvkit_race_arrive", block, warp, f["id"])
    with f.when(f["wait"]):
        f.set(warp, WarpState, "status", WarpStatus.WAITING)
        f.set(warp, WarpState, "barrier", f["id"])
    f.call("void", "drvkit_release", f["grid"], block, f["id"])
    f.ret(0)
    return f


# The loop


def _begin() -> Function:
    """Put a cluster into a slot."""
    f = Function("void", "drvkit_begin", grid="ptr", slot="ptr", cluster="i64")
    grid, slot = f["grid"], f["slot"]
    f.set(slot, SlotState, "active", 1)
    size = [f.field(grid, GridState, "grid", axis) for axis in range(3)]
    shape = [f.field(grid, GridState, "cluster", axis) for axis in range(3)]
    across = [f.cast("zext", f.op("udiv", n, c), "i64") for n, c in zip(size, shape, strict=True)]
    at = [
        f.cast("trunc", f.op("urem", f["cluster"], across[0]), "i32"),
        f.cast("trunc", f.op("urem", f.op("udiv", f["cluster"], across[0]), across[1]), "i32"),
        f.cast("trunc", f.op("udiv", f.op("udiv", f["cluster"], across[0]), across[1]), "i32"),
    ]
    warps, warp_bytes = f.field(grid, GridState, "warps"), f.field(grid, GridState, "warp_bytes")
    shadow = f.field(grid, GridState, "shadow")
    local_bytes = f.cast("zext", f.field(grid, GridState, "local_bytes"), "i64")
    warp_local = f.op("mul", local_bytes, constant("i64", 32))
    block_bytes = f.field(grid, GridState, "block_bytes")
    leader = f.pointer(f.field(slot, SlotState, "blocks"))
    shared = f.field(slot, SlotState, "shared")
    blocks = f.field(grid, GridState, "cluster_blocks")
    with f.count(blocks) as rank:
        wide = f.cast("zext", rank, "i64")
        block = f.at(leader, f.op("mul", wide, block_bytes))
        f.call(
            "void", "llvm.memset.p0.i64", block, constant("i8", 0), constant("i64", ctypes.sizeof(BlockState)),
            constant("i1", 0),
        )  # fmt: skip
        inner = [
            f.op("urem", rank, shape[0]),
            f.op("urem", f.op("udiv", rank, shape[0]), shape[1]),
            f.op("udiv", f.op("udiv", rank, shape[0]), shape[1]),
        ]
        index = [f.op("add", f.op("mul", at[axis], shape[axis]), inner[axis]) for axis in range(3)]
        for axis in range(3):
            f.set(block, BlockState, "index", index[axis], axis)
            f.set(block, BlockState, "cluster_index", inner[axis], axis)
            f.set(block, BlockState, "cluster_id", at[axis], axis)
        wides = [f.cast("zext", value, "i64") for value in (*index, size[0], size[1])]
        number = f.op("add", f.op("mul", wides[2], wides[4]), wides[1])
        f.set(block, BlockState, "number", f.op("add", f.op("mul", number, wides[3]), wides[0]))
        f.set(block, BlockState, "cluster_rank", rank)
        f.set(block, BlockState, "shared_offset", f.op("mul", rank, constant("i32", SHARED_STRIDE)))
        f.set(block, BlockState, "live", warps)
        f.set(block, BlockState, "shared_base", shared)
        buffer = f.op(
            "add", f.field(slot, SlotState, "buffers"), f.op("mul", wide, f.field(grid, GridState, "buffer_bytes"))
        )
        f.set(block, BlockState, "buffer", buffer)
        f.set(block, BlockState, "clocks", f.field(slot, SlotState, "clocks"))
        f.set(block, BlockState, "leader", f.value("i64", f"ptrtoint {leader} to i64"))
        window = f.op("add", f.op("add", shared, shadow), f.op("mul", wide, constant("i64", SHARED_STRIDE)))
        shared_bytes = f.cast("zext", f.field(grid, GridState, "shared_bytes"), "i64")
        f.call(
            "void", "llvm.memset.p0.i64", f.pointer(window), constant("i8", ALLOCATED), shared_bytes, constant("i1", 0)
        )
        first = f.at(block, _first_warp())
        template = f.pointer(f.field(grid, GridState, "template"))
        with f.count(warps) as each:
            position = f.cast("zext", each, "i64")
            warp = f.at(first, f.op("mul", position, warp_bytes))
            begins = f.at(template, f.op("mul", position, constant("i64", REGISTERS)))
            f.call("void", "llvm.memcpy.p0.p0.i64", warp, begins, constant("i64", REGISTERS), constant("i1", 0))
            order = f.op("add", f.op("mul", wide, f.cast("zext", warps, "i64")), position)
            local = f.op("add", f.field(slot, SlotState, "local"), f.op("mul", order, warp_local))
            f.set(warp, WarpState, "local", local)
            f.set(warp, WarpState, "copies", f.op(
                "add", f.field(slot, SlotState, "copies"),
                f.op("mul", order, f.field(grid, GridState, "copies_bytes")),
            ))  # fmt: skip
            with f.when(f.compare("icmp ne", warp_local, constant("i64", 0))):
                f.call(
                    "void", "llvm.memset.p0.i64", f.pointer(f.op("add", local, shadow)), constant("i8", ALLOCATED),
                    warp_local, constant("i1", 0),
                )  # fmt: skip
    f.set(leader, BlockState, "cluster_live", f.op("mul", warps, blocks))
    with f.when(f.compare("icmp ne", f.field(grid, GridState, "watched"), constant("i32", 0))):
        f.call("void", "drvkit_race_begin", grid, slot)
    f.line("ret void")
    return f


def _ended() -> Function:
    """A warp has ended: those who wait for all that live may go on."""
    f = Function("void", "drvkit_ended", grid="ptr", block="ptr", warp="ptr")
    block = f["block"]
    f.set(f["warp"], WarpState, "status", WarpStatus.DONE)
    live = f.add_to(block, BlockState, "live", -1)
    _leave_cluster_barrier(f, f.pointer(f.field(block, BlockState, "leader")))
    untriggered = f.is_(f.field(block, BlockState, "triggered"), 0)
    with f.when(f.op("and", f.is_(live, 0), untriggered)):
        f.add_to(f["grid"], GridState, "triggered", 1)
        with f.when(f.compare("icmp ne", f.field(f["grid"], GridState, "watched"), constant("i32", 0))):
            f.call("void", "drvkit_race_trigger", f["grid"], block, f["warp"])
    buffered = f.compare("icmp ne", f.field(f["grid"], GridState, "buffer_bytes"), constant("i64", 0))
    with f.when(f.op("and", f.is_(live, 0), buffered)):
        f.call("void", "drvkit_drain", f["grid"], f.pointer(f.field(block, BlockState, "buffer")))
    with f.when(f.compare("icmp ne", live, constant("i32", 0))), f.count(constant("i32", BARRIERS)) as id_:
        offset = f.op("mul", id_, constant("i32", ctypes.sizeof(BarrierState)))
        arrived = f.field(f.at(f.at(block, BlockState.barriers.offset), offset), BarrierState, "arrived")
        with f.when(f.compare("icmp ne", arrived, constant("i32", 0))):
            f.call("void", "drvkit_release", f["grid"], block, id_)
    f.line("ret void")
    return f


def _leave_cluster_barrier(f: Function, leader: Value) -> None:
    """A warp that has ended is not waited for."""
    live = f.add_to(leader, BlockState, "cluster_live", -1)
    phase, arrived = f.field(leader, BlockState, "cluster_phase"), f.field(leader, BlockState, "cluster_arrived")
    following = f.op("add", phase, constant("i32", 1))
    took_part = f.compare("icmp eq", f.field(f["warp"], WarpState, "cluster_phase"), following)
    others = f.op("sub", arrived, f.cast("zext", took_part, "i32"))
    complete = f.op("and", f.compare("icmp uge", others, live), f.compare("icmp ne", others, constant("i32", 0)))
    f.set(leader, BlockState, "cluster_arrived", f.select(complete, constant("i32", 0), others))
    f.set(leader, BlockState, "cluster_phase", f.select(complete, following, phase))
    with f.when(f.compare("icmp ne", f.field(f["grid"], GridState, "watched"), constant("i32", 0))):
        f.call("void", "drvkit_race_cluster_arrive", f["grid"], phase, complete, constant("i1", 1))


def _as_before() -> Function:
    """Whether a warp that is sliced has all registers, and finds all memory, as when it was sliced before.

    Then it will go round and round until others change something, or, if it reads a clock, until it is late enough.
    """
    f = Function("i1", "drvkit_as_before", grid="ptr", warp="ptr")
    grid, warp = f["grid"], f["warp"]
    before = f.field(warp, WarpState, "sliced")
    f.set(warp, WarpState, "sliced", 0)
    total = f.alloca("i64", 8)
    f.store(f.field(grid, GridState, "stores"), total, align=8)
    with f.count(f.op("lshr", f.field(grid, GridState, "warp_bytes"), constant("i64", 3))) as index:
        word = f.load("i64", f.at(warp, index, "i64"), align=8)
        mixed = f.op("mul", f.op("xor", f.load("i64", total, align=8), word), constant("i64", 0x9E3779B97F4A7C15))
        f.store(f.op("xor", mixed, f.op("lshr", mixed, constant("i64", 32))), total, align=8)
    now = f.load("i64", total, align=8)
    f.set(warp, WarpState, "sliced", now)
    f.ret(f.compare("icmp eq", now, before))
    return f


def _run_slot() -> Function:
    """Run the warps of a slot in turn: until they have ended, all wait, one stops for good, or patience is over."""
    f = Function("i32", "drvkit_run_slot", grid="ptr", kernel="ptr", slot="ptr")
    grid = f["grid"]
    leader = f.pointer(f.field(f["slot"], SlotState, "blocks"))
    block_bytes, warp_bytes = f.field(grid, GridState, "block_bytes"), f.field(grid, GridState, "warp_bytes")
    blocks, warps = f.field(grid, GridState, "cluster_blocks"), f.field(grid, GridState, "warps")
    progress, ever, sliced, turned = (f.alloca("i32", 4) for _ in range(4))
    f.store(constant("i32", 0), ever, align=4)
    with f.count(constant("i32", PATIENCE)):
        f.store(constant("i32", 0), progress, align=4)
        f.store(constant("i32", 0), sliced, align=4)
        with f.count(blocks) as rank:
            block = f.at(leader, f.op("mul", f.cast("zext", rank, "i64"), block_bytes))
            first = f.at(block, _first_warp())
            with f.count(warps) as number:
                warp = f.at(first, f.op("mul", f.cast("zext", number, "i64"), warp_bytes))
                with f.when(f.is_(f.field(warp, WarpState, "status"), WarpStatus.READY)):
                    f.set(grid, GridState, "current", f.value("i64", f"ptrtoint {warp} to i64"))
                    f.set(grid, GridState, "current_block", f.value("i64", f"ptrtoint {block} to i64"))
                    before = f.field(grid, GridState, "stores")
                    code = f.value("i32", f"call i32 %kernel({warp}, {block}, {grid})")
                    f.store(code, turned, align=4)
                    with f.when(f.is_(code, Code.SLICED)):
                        in_vain = f.call("i1", "drvkit_as_before", grid, warp)
                        f.store(f.select(in_vain, constant("i32", Code.POLLING), code), turned, align=4)
                    code = f.load("i32", turned, align=4)
                    polled = f.is_(code, Code.POLLING)
                    stored = f.compare("icmp ne", f.field(grid, GridState, "stores"), before)
                    moved = f.select(polled, f.cast("zext", stored, "i32"), constant("i32", 1))
                    f.store(f.op("or", f.load("i32", progress, align=4), moved), progress, align=4)
                    with f.when(f.is_(code, Code.SLICED)):
                        f.store(constant("i32", 1), sliced, align=4)
                    with f.when(f.is_(code, Code.DONE)):
                        f.call("void", "drvkit_ended", grid, block, warp)
                    for stops in (Code.FAULT, Code.HOST):
                        with f.when(f.is_(code, stops), likely=False):
                            f.ret(stops)
        with f.when(f.is_(f.field(leader, BlockState, "cluster_live"), 0)):
            f.ret(Code.DONE)
        with f.when(f.compare("icmp ne", f.load("i32", sliced, align=4), constant("i32", 0))):
            f.ret(Code.SLICED)
        moved = f.load("i32", progress, align=4)
        f.store(f.op("or", f.load("i32", ever, align=4), moved), ever, align=4)
        with f.when(f.is_(moved, 0)):
            gone_on = f.compare("icmp ne", f.load("i32", ever, align=4), constant("i32", 0))
            f.ret(f.select(gone_on, constant("i32", Code.SLICED), constant("i32", Code.POLLING)))
    f.ret(Code.SLICED)
    return f


def _run() -> Function:
    """Run a launch.

    Gives `Code.DONE`; `Code.FAULT`; `Code.HOST`; `Code.SLICED` when ``budget`` clusters and turns are used up;
    `Code.POLLING` when nothing has changed in so many ``passes``, each of which moves the clock by ``step`` ns;
    `Code.WAITING` when another slot is wanted.
    """
    f = Function("i32", "drvkit_run", grid="ptr", kernel="ptr", budget="i64", passes="i64", step="i64")
    grid = f["grid"]
    budget, passes = f.alloca("i64", 8), f.alloca("i64", 8)
    progress, active, finished = f.alloca("i32", 4), f.alloca("i32", 4), f.alloca("i32", 4)
    f.store(f["budget"], budget, align=8)
    f.store(f["passes"], passes, align=8)
    again = f.name("again")
    f.jump(again)
    f.label(again)
    f.store(constant("i32", 0), progress, align=4)
    f.store(constant("i32", 0), active, align=4)
    f.store(constant("i32", 0), finished, align=4)
    slots = f.pointer(f.field(grid, GridState, "slots"))
    with f.count(f.field(grid, GridState, "in_use")) as number:
        slot = f.at(slots, f.op("mul", number, constant("i32", ctypes.sizeof(SlotState))))
        with f.when(f.compare("icmp ne", f.field(slot, SlotState, "active"), constant("i32", 0))):
            f.store(constant("i32", 1), active, align=4)
            code = f.call("i32", "drvkit_run_slot", grid, f["kernel"], slot)
            for stops in (Code.FAULT, Code.HOST):
                with f.when(f.is_(code, stops), likely=False):
                    f.ret(stops)
            with f.when(f.compare("icmp ne", code, constant("i32", Code.POLLING))):
                f.store(constant("i32", 1), progress, align=4)
                f.store(f.op("sub", f.load("i64", budget, align=8), constant("i64", 1)), budget, align=8)
            with f.when(f.is_(code, Code.DONE)):
                f.store(constant("i32", 1), finished, align=4)
                f.set(slot, SlotState, "active", 0)
                following = f.field(grid, GridState, "next_cluster")
                with f.when(f.compare("icmp ult", following, f.field(grid, GridState, "clusters"))):
                    f.set(grid, GridState, "next_cluster", f.op("add", following, constant("i64", 1)))
                    f.call("void", "drvkit_begin", grid, slot, following)
    moved = f.compare("icmp ne", f.load("i32", progress, align=4), constant("i32", 0))
    following = f.field(grid, GridState, "next_cluster")
    left = f.compare("icmp ult", following, f.field(grid, GridState, "clusters"))
    with f.when(f.op("and", f.is_(f.load("i32", active, align=4), 0), f.op("xor", left, constant("i1", 1)))):
        f.ret(Code.DONE)
    used, count = f.field(grid, GridState, "in_use"), f.field(grid, GridState, "slot_count")
    empty = f.compare("icmp ult", used, count)
    room = f.op("or", empty, f.compare("icmp ne", f.field(grid, GridState, "room"), constant("i32", 0)))
    unfinished = f.is_(f.load("i32", finished, align=4), 0)  # those that are resident may wait for others
    with f.when(f.op("and", f.op("and", unfinished, left), room)):
        with f.when(f.op("xor", empty, constant("i1", 1))):
            f.ret(Code.WAITING)
        slot = f.at(slots, f.op("mul", used, constant("i32", ctypes.sizeof(SlotState))))
        f.set(grid, GridState, "in_use", f.op("add", used, constant("i32", 1)))
        f.set(grid, GridState, "next_cluster", f.op("add", following, constant("i64", 1)))
        f.call("void", "drvkit_begin", grid, slot, following)
        f.jump(again)
    with f.when(f.op("xor", moved, constant("i1", 1))):
        f.add_to(grid, GridState, "time_shift", f["step"])
        rest = f.op("sub", f.load("i64", passes, align=8), constant("i64", 1))
        f.store(rest, passes, align=8)
        with f.when(f.compare("icmp sle", rest, constant("i64", 0))):
            f.ret(Code.POLLING)
    with f.when(f.compare("icmp sle", f.load("i64", budget, align=8), constant("i64", 0))):
        f.ret(Code.SLICED)
    f.jump(again)
    return f
