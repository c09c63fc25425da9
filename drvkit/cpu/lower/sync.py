"""Barriers, fences, asynchronous copies, calls to what the device itself has.

Source: PTX ISA, "Parallel Synchronization and Communication Instructions", "Data Movement and Conversion Instructions:
Asynchronous copy".
"""

from __future__ import annotations

from ..flow import callee_of
from ..ir import Value, constant, vector
from ..memory import ALLOCATED, WRITTEN
from ..ptx import SIZES, Immediate, Instruction, Memory, Negated, Operand, Register, Symbol, Vector
from ..state import SHARED_STRIDE, Access, BlockState, Code
from .access import _atomic, load_bytes, send, space_of, store_bytes, store_interleaved, watch
from .core import WARP, Lower, kind_of, lowers, vector_elements
from .warp import meet_at_barrier, warp_barrier

# Barriers


@lowers("bar", "barrier")
def barrier(e: Lower, i: Instruction) -> None:
    """A warp counts as 32 threads, whole or not."""
    modifiers = i.modifiers
    if "warp" in modifiers:
        warp_barrier(e, i)
        return
    if modifiers[0] == "cluster":
        _cluster_barrier(e, i)
        return
    b = e.b
    meet_at_barrier(e, i)
    arrive, reduce = "arrive" in modifiers, "red" in modifiers
    operands = list(i.operands[1:] if reduce else i.operands)
    predicate: Operand = operands.pop() if reduce else None
    number = first_lane(e, operands[0])
    expected = first_lane(e, operands[1]) if len(operands) > 1 else constant("i32", 0)
    votes = constant("i32", 0)
    if reduce:
        value = b.op("and", e.read(predicate, "pred"), e.mask)
        votes = b.call("i32", "llvm.ctpop.i32", b.bits(value))
    threads = b.call("i32", "llvm.ctpop.i32", e.mask_bits)
    if not arrive:  # before anything of the warp is released by others
        e._write_back(e.current.live_out)
    result = b.call(
        "i32", "drvkit_barrier", e.grid, e.block, e.warp, number, expected, threads, votes,
        constant("i1", 0 if arrive else 1), constant("i32", e.place(i)),
    )  # fmt: skip
    e.fail_if(result)
    if not arrive:
        e.suspend(Code.WAITING, i)


@lowers("barrier_result")
def barrier_result(e: Lower, i: Instruction) -> None:
    """What a ``bar.red`` gives, once the warp goes on."""
    b = e.b
    votes, threads = e.warp_field("votes"), e.warp_field("participants")
    if "popc" in i.modifiers:
        e.write(i.operands[0], votes, "u32")
    elif "and" in i.modifiers:
        e.write(i.operands[0], b.compare("icmp eq", votes, threads), "pred")
    else:
        e.write(i.operands[0], b.compare("icmp ne", votes, constant("i32", 0)), "pred")


def first_lane(e: Lower, operand: Operand) -> Value:
    """An operand that is the same in all running lanes, as a scalar."""
    b = e.b
    value = e._read(operand, "u32")
    if value.type == "i32":
        return value
    lane = b.call("i32", "llvm.cttz.i32", e.mask_bits, constant("i1", 0))
    return b.extract(value, lane)


def _cluster_barrier(e: Lower, i: Instruction) -> None:
    """All warps of the cluster that live arrive; the last one turns the phase."""
    b = e.b
    meet_at_barrier(e, i)
    leader = b.value("ptr", f"inttoptr {e.block_field('leader')} to ptr")
    phase_place = e._place(leader, BlockState, "cluster_phase", 0)
    if "arrive" in i.modifiers:
        releases = "relaxed" not in i.modifiers
        if releases:
            send(e, i)
        phase = b.load("i32", phase_place, align=4)
        following = b.op("add", phase, constant("i32", 1))
        b.store(following, e.warp_place("cluster_phase"), align=4)
        arrived_place = e._place(leader, BlockState, "cluster_arrived", 0)
        arrived = b.op("add", b.load("i32", arrived_place, align=4), constant("i32", 1))
        live = b.load("i32", e._place(leader, BlockState, "cluster_live", 0), align=4)
        complete = b.compare("icmp uge", arrived, live)
        b.store(b.select(complete, constant("i32", 0), arrived), arrived_place, align=4)
        b.store(b.select(complete, following, phase), phase_place, align=4)
        _changed(e)
        if e.raced:
            b.call("void", "drvkit_race_cluster_arrive", e.grid, phase, complete, constant("i1", int(releases)))
    else:  # a warp that has not arrived waits for ever
        phase = b.op("sub", e.warp_field("cluster_phase"), constant("i32", 1))
        e.stay(b.compare("icmp ule", b.load("i32", phase_place, align=4), phase), i)
        b.store(constant("i32", 1), e.block_place("met"), align=4)
        if e.raced:
            b.call("void", "drvkit_race_cluster_leave", e.grid, phase)


def _changed(e: Lower) -> None:
    """Who polls may find something new."""
    e.b.store(e.b.op("add", e.grid_field("stores"), constant("i64", 1)), e.grid_place("stores"), align=8)


# Fences and dependent launches


@lowers("membar", "fence")
def fence(e: Lower, i: Instruction) -> None:
    if "proxy" not in i.modifiers:
        e.b.line("fence seq_cst")
        send(e, i)
        if e.raced:
            e.b.call("void", "drvkit_race_fence", e.grid)


@lowers("griddepcontrol")
def griddepcontrol(e: Lower, i: Instruction) -> None:
    b = e.b
    if i.modifiers[0] == "wait":
        e.stay(b.compare("icmp eq", e.grid_field("dependencies_done"), constant("i32", 0)), i)
        if e.raced:
            b.call("void", "drvkit_race_passed", e.grid)
        return
    if e.raced:
        b.call("void", "drvkit_race_trigger", e.grid, e.block, e.warp)
    fresh = b.compare("icmp eq", e.block_field("triggered"), constant("i32", 0))
    b.store(constant("i32", 1), e.block_place("triggered"), align=4)
    count = b.op("add", e.grid_field("triggered"), b.cast("zext", fresh, "i32"))
    b.store(count, e.grid_place("triggered"), align=4)


@lowers("nanosleep", "pmevent")
def nanosleep(e: Lower, i: Instruction) -> None:
    """A hint: a loop around it lets the others run."""


@lowers("setmaxnreg")
def setmaxnreg(e: Lower, i: Instruction) -> None:
    """Registers are not scarce here."""


@lowers("brkpt")
def brkpt(e: Lower, i: Instruction) -> None:
    raise e.unsupported()


@lowers("trap")
def trap(e: Lower, i: Instruction) -> None:
    e.fault("trap", i)
    e.b.label(e.b.name("never"))


# Calls


@lowers("call")
def call(e: Lower, i: Instruction) -> None:
    b, name = e.b, callee_of(i)
    arguments = i.operands[-1]
    assert isinstance(arguments, Vector)
    at = [
        e.address(Memory(operand, 0), "param") if isinstance(operand, Symbol) else None
        for operand in arguments.elements
    ]
    if name == "cudaGraphSetConditional":
        handle = b.load(vector("i64", WARP), load_bytes(e, _known(at[0]), 8), align=64)
        values = load_bytes(e, _known(at[1]), 4)
        store_bytes(e, handle, 4, values)
        return
    if name == "vprintf":  # the third place is where its result goes
        result = i.operands[0]
        assert isinstance(result, Vector)
        at += [e.address(Memory(operand, 0), "param") for operand in result.elements if isinstance(operand, Symbol)]
    b.store(constant("i32", {"vprintf": 1, "__assertfail": 2}[name]), e.warp_place("host_call"), align=4)
    b.store(e.mask_bits, e.warp_place("host_mask"), align=4)
    for position, address in enumerate(at[:4]):
        lane0 = b.extract(_known(address), 0)  # of lane 0: the others' windows follow at equal distances
        b.store(lane0, e.warp_place("host_args", position), align=8)
    e.suspend(Code.HOST, i)


def _known(address: Value | None) -> Value:
    assert address is not None
    return address


# Asynchronous copies, stores and reductions

_OPERATIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")


@lowers("cp")
def cp(e: Lower, i: Instruction) -> None:
    """``cp.async`` copies as late as it may: when it is waited for. Bulk copies and reductions are done at once."""
    b, modifiers = e.b, i.modifiers
    if "tensor" in modifiers:
        raise e.unsupported(why="tensor maps are not executed")
    if e.weak:  # the copy reads memory itself
        b.call("void", "drvkit_fence", e.grid, e.block, constant("i32", 2))
    if "bulk" in modifiers:
        _bulk(e, i)
        return
    if modifiers[0] != "async":
        raise e.unsupported()
    if modifiers[1] == "commit_group":
        count = b.op("add", e.warp_field("groups_committed"), constant("i32", 1))
        b.store(count, e.warp_place("groups_committed"), align=4)
        return
    if modifiers[1] in ("wait_group", "wait_all"):
        keep = first_lane(e, i.operands[0]) if modifiers[1] == "wait_group" else constant("i32", -1)
        _copies(e, "finish", e.grid, e.warp, keep)
        return
    if modifiers[1] == "mbarrier":
        _copies(e, "finish", e.grid, e.warp, constant("i32", -1))
        at = e.address(i.operands[0], space_of(i))
        _mbarrier_update(e, at, constant("i32", 1), None, increments="noinc" not in modifiers)
        return
    size = i.operands[2]
    nbytes = size.bits if isinstance(size, Immediate) else 0
    if nbytes not in (4, 8, 16):
        raise e.unsupported()
    targets, sources = e.address(i.operands[0], "shared"), e.address(i.operands[1], "global")
    amount = constant(vector("i32", WARP), nbytes)
    if len(i.operands) > 3:
        given = i.operands[3]
        if isinstance(given, Negated) or (isinstance(given, Register) and given.type == "pred"):
            ignored = e.read(given, "pred")
            amount = b.select(ignored, constant(amount.type, 0), amount)
        else:
            amount = e.read(given, "u32")
    buffers = [e.buffer("i64", WARP), e.buffer("i64", WARP + 1), e.buffer("i32", WARP)]
    for buffer, value in zip(buffers, (targets, sources, amount), strict=True):
        b.store(value, buffer, align=64)
    e.uses_copies = True
    how = (e.mask_bits, constant("i32", nbytes), constant("i32", e.place(i)))
    _copies(e, "begin", e.grid, e.warp, *buffers, *how)
    watch(e, buffers[0], nbytes, Access.WRITES)


def _copies(e: Lower, verb: str, *arguments: Value) -> None:
    """``begin`` one of the warp's queue, or ``finish`` some."""
    e.fail_if(e.b.call("i32", f"drvkit_copy_{verb}{'' if e.checks else '_unchecked'}", *arguments))


def _bulk(e: Lower, i: Instruction) -> None:
    """One run of bytes, by each running lane."""
    b, modifiers = e.b, i.modifiers
    form = modifiers[modifiers.index("bulk") + 1 :]
    if form[0] in ("commit_group", "wait_group"):  # it is done already
        if e.raced and form[0] == "wait_group":
            b.call("void", "drvkit_race_bulk_wait", e.grid)
        return
    if form[0] == "prefetch":
        return
    target_space, source_space = (m.split("::")[0] for m in form[:2])
    targets, sources = e.address(i.operands[0], target_space), e.address(i.operands[1], source_space)
    sizes = e.read(i.operands[2], "u32")
    barriers = e.address(i.operands[3], "shared") if form[2].startswith("mbarrier") else None
    if "multicast::cluster" not in form:
        _runs(e, i, targets, sources, sizes, barriers, e.mask_bits)
        return
    assert barriers is not None
    ranks = b.resize(e.read(i.operands[4], "b16"), "i32")
    own = constant(targets.type, SHARED_STRIDE - 1)  # where it is in a block's memory, whichever block that is
    base = b.splat(e.shared_base, WARP)
    offsets = [b.op("and", b.op("sub", each, base), own) for each in (targets, barriers)]
    with b.count(e.grid_field("cluster_blocks")) as rank:
        window = b.op("add", e.shared_base, b.op("mul", b.cast("zext", rank, "i64"), constant("i64", SHARED_STRIDE)))
        there = [b.op("add", each, b.splat(window, WARP)) for each in offsets]
        chosen = b.cast("trunc", b.op("lshr", ranks, b.splat(rank, WARP)), "i1")
        _runs(e, i, there[0], sources, sizes, there[1], b.op("and", b.bits(chosen), e.mask_bits))


def _runs(
    e: Lower, i: Instruction, targets: Value, sources: Value, sizes: Value, barriers: Value | None, mask_bits: Value
) -> None:
    """Copies or reductions of these lanes."""
    b = e.b
    at = [e.buffer("i64", WARP), e.buffer("i64", WARP + 1), e.buffer("i32", WARP)]
    for buffer, value in zip(at, (targets, sources, sizes), strict=True):
        b.store(value, buffer, align=64)
    place = constant("i32", e.place(i))
    with e.active(mask_bits) as lane:
        index = b.cast("zext", lane, "i64")
        target, source = (b.load("i64", b.at(buffer, index, "i64"), align=8) for buffer in at[:2])
        size = b.load("i32", b.at(at[2], index, "i32"), align=4)
        if i.modifiers[0] == "reduce":
            _reduce_run(e, i, target, source, size, lane)
        elif e.checks:
            e.fail_if(b.call("i32", "drvkit_copy_bulk", e.grid, target, source, size, lane, place))
        else:
            there, here = (b.value("ptr", f"inttoptr {each} to ptr") for each in (target, source))
            b.call("void", "llvm.memmove.p0.p0.i64", there, here, b.cast("zext", size, "i64"), constant("i1", 0))
            _changed(e)
        if e.raced:
            e.fail_if(b.call("i32", "drvkit_race_bulk", e.grid, target, source, size, lane, place))
    if barriers is not None:
        done = b.op("sub", constant(sizes.type, 0), sizes)
        _mbarrier_update(e, barriers, constant("i32", 0), done, mask_bits=mask_bits)


def _reduce_run(e: Lower, i: Instruction, target: Value, source: Value, size: Value, lane: Value) -> None:
    """Element after element, each at once."""
    b, type_ = e.b, i.types[-1]
    operation = next(m for m in i.modifiers if m in _OPERATIONS)
    together = b.op("or", b.op("or", target, source), b.cast("zext", size, "i64"))
    with b.when(b.compare("icmp ne", b.op("and", together, constant("i64", 15)), constant("i64", 0)), likely=False):
        e.fault("misaligned", i)
    if e.checks:
        how = (lane, constant("i32", e.place(i)), size, constant("i8", ALLOCATED | WRITTEN))
        for address in (source, target):
            e.fail_if(b.call("i32", "drvkit_readable", e.grid, address, *how))
    kind = kind_of(type_)
    with b.count(b.op("udiv", size, constant("i32", SIZES[type_]))) as number:
        index = b.cast("zext", number, "i64")
        there, here = (b.at(b.value("ptr", f"inttoptr {each} to ptr"), index, kind) for each in (target, source))
        _atomic(e, operation, type_, there, [b.load(kind, here, align=SIZES[type_])])
    _changed(e)


@lowers("st.async", "red.async")
def asynchronous(e: Lower, i: Instruction) -> None:
    """Done at once; an mbarrier counts the bytes."""
    b, type_, reduces = e.b, i.types[-1], i.opcode == "red"
    target, value, barrier = i.operands
    parts = [e.read(part, type_) for part in vector_elements(value)]
    nbytes = SIZES[type_] * len(parts)
    at, values = e.buffer("i64"), e.buffer(f"[{nbytes} x i8]")
    b.store(e.address(target, space_of(i)), at, align=64)
    store_interleaved(e, values, parts)
    place, size = constant("i32", e.place(i)), constant("i32", nbytes)
    needs = constant("i8", ALLOCATED | WRITTEN if reduces else ALLOCATED)
    with e.active(e.mask_bits) as lane:
        index = b.cast("zext", lane, "i64")
        address = b.load("i64", b.at(at, index, "i64"), align=8)
        if e.checks:
            e.fail_if(b.call("i32", "drvkit_check", e.grid, address, lane, place, size, needs, constant("i8", WRITTEN)))
        there, here = b.value("ptr", f"inttoptr {address} to ptr"), b.at(values, index, f"[{nbytes} x i8]")
        if reduces:
            kind = kind_of(type_)
            operation = next(m for m in i.modifiers if m in _OPERATIONS)
            _atomic(e, operation, type_, there, [b.load(kind, here, align=SIZES[type_])])
        else:
            b.store(b.load(f"i{8 * nbytes}", here, align=1), there, align=1)
        if e.raced:  # like a bulk copy, it is nobody's until somebody waits
            e.fail_if(b.call("i32", "drvkit_race_bulk", e.grid, address, address, size, lane, place))
    _changed(e)
    _mbarrier_update(e, e.address(barrier, space_of(i)), constant("i32", 0), constant(vector("i32", WARP), -nbytes))


# mbarrier objects: bits 0-19 arrivals to come, 20-39 arrivals of a phase, 40 the phase, 41-63 bytes to come

_PENDING, _EXPECTED, _PHASE, _BYTES = 0, 20, 40, 41
_FIELD = (1 << 20) - 1


def told(word: int) -> str:
    """An mbarrier object, for a report."""
    arrivals = f"{word & _FIELD} of {word >> _EXPECTED & _FIELD} arrivals"
    return f"an mbarrier in phase {word >> _PHASE & 1}, to which {arrivals} and {word >> _BYTES} bytes are to come,"


@lowers("mbarrier")
def mbarrier(e: Lower, i: Instruction) -> None:
    b, verb = e.b, i.modifiers[0]
    space = space_of(i)
    if verb == "init":
        arrivals = b.cast("zext", e.read(i.operands[1], "u32"), "i64")
        word = b.op("or", arrivals, b.op("shl", arrivals, constant(arrivals.type, _EXPECTED)))
        values = e.buffer("[8 x i8]")
        b.store(word, values, align=64)
        store_bytes(e, e.address(i.operands[0], space), 8, values)
    elif verb == "inval":
        load_bytes(e, e.address(i.operands[0], space), 8)
    elif verb in ("arrive", "arrive_drop"):
        target, rest = (i.operands[0], i.operands[1:]) if not isinstance(i.operands[0], Memory) else (None, i.operands)
        expects: Value | None = None
        if "expect_tx" in i.modifiers:
            expects, count = e.read(rest[1], "u32"), constant("i32", 1)
        else:
            count = e.read(rest[1], "u32") if len(rest) > 1 else constant("i32", 1)
        drops = verb == "arrive_drop"
        if "cluster" in i.modifiers and "relaxed" not in i.modifiers:  # what a block has stored its threads see anyway
            send(e, i)
        old = _mbarrier_update(e, e.address(rest[0], space), count, expects, drops=drops)
        e.write(target, old, "b64")
    elif verb in ("expect_tx", "complete_tx"):
        amount = e.read(i.operands[1], "u32")
        if verb == "complete_tx":
            amount = b.op("sub", constant(amount.type, 0), amount)
        _mbarrier_update(e, e.address(i.operands[0], space), constant("i32", 0), amount)
    elif verb in ("test_wait", "try_wait"):
        word = b.load(vector("i64", WARP), load_bytes(e, e.address(i.operands[1], space), 8), align=64)
        phase = _phase(e, word)
        if "parity" in i.modifiers:
            waited = b.op("and", e.read(i.operands[2], "u32"), constant(vector("i32", WARP), 1))
            waited = b.cast("zext", waited, "i64")
        else:
            waited = _phase(e, e.read(i.operands[2], "b64"))
        over = b.compare("icmp ne", phase, waited)
        e.write(i.operands[0], over, "pred")
        b.line("fence acquire")
        if e.raced:
            with e.active(b.op("and", b.bits(over), e.mask_bits)) as lane:
                place = b.at(e.buffer("i64"), b.cast("zext", lane, "i64"), "i64")
                b.call("void", "drvkit_race_object_wait", e.grid, b.load("i64", place, align=8))
    elif verb == "pending_count":
        word = e.read(i.operands[1], "b64")
        pending = b.op("and", word, constant(word.type, _FIELD))
        e.write(i.operands[0], b.cast("trunc", pending, "i32"), "u32")
    else:
        raise e.unsupported()


def _phase(e: Lower, word: Value) -> Value:
    b = e.b
    return b.op("and", b.op("lshr", word, constant(word.type, _PHASE)), constant(word.type, 1))


def _mbarrier_update(
    e: Lower,
    addresses: Value,
    count: Value,
    tx: Value | None,
    *,
    increments: bool = False,
    drops: bool = False,
    mask_bits: Value | None = None,
) -> Value:
    """Arrive and expect bytes, lane after lane; gives the words before."""
    b = e.b
    at, counts, bytes_ = e.buffer("i64", WARP), e.buffer("i32", WARP), e.buffer("i32", WARP + 1)
    olds = e.buffer("i64", WARP + 2)
    b.store(addresses, at, align=64)
    b.store(b.splat(count, WARP) if count.type == "i32" else count, counts, align=64)
    nothing = constant(vector("i32", WARP), 0)
    amount = nothing if tx is None else tx
    b.store(b.splat(amount, WARP) if amount.type == "i32" else amount, bytes_, align=64)
    b.store(constant(vector("i64", WARP), 0), olds, align=64)
    place = constant("i32", e.place(e.i))
    with e.active(mask_bits or e.mask_bits) as lane:
        index = b.cast("zext", lane, "i64")
        address = b.load("i64", b.at(at, index, "i64"), align=8)
        if e.checks:
            check = b.call(
                "i32", "drvkit_check", e.grid, address, lane, place, constant("i32", 8),
                constant("i8", ALLOCATED | WRITTEN), constant("i8", WRITTEN),
            )  # fmt: skip
            e.fail_if(check)
        pointer = b.value("ptr", f"inttoptr {address} to ptr")
        old = b.load("i64", pointer, align=8)
        b.store(old, b.at(olds, index, "i64"), align=8)
        arrivals = b.cast("zext", b.load("i32", b.at(counts, index, "i32"), align=4), "i64")
        more = b.cast("sext", b.load("i32", b.at(bytes_, index, "i32"), align=4), "i64")
        word = b.op("add", old, b.op("shl", more, constant("i64", _BYTES)))
        if increments:
            word = b.op("add", word, constant("i64", 1))
        word = b.op("sub", word, arrivals)
        if drops:
            word = b.op("sub", word, b.op("shl", arrivals, constant("i64", _EXPECTED)))
        pending = b.op("and", word, constant("i64", _FIELD))
        left = b.op("ashr", word, constant("i64", _BYTES))
        complete = b.op(
            "and", b.compare("icmp eq", pending, constant("i64", 0)), b.compare("icmp eq", left, constant("i64", 0))
        )
        expected = b.op("and", b.op("lshr", word, constant("i64", _EXPECTED)), constant("i64", _FIELD))
        turned = b.op("or", b.op("xor", word, constant("i64", 1 << _PHASE)), expected)
        b.store(b.select(complete, turned, word), pointer, align=8)
        _changed(e)
        if e.raced:
            arrives = b.compare("icmp ne", arrivals, constant("i64", 0))
            copied = constant("i1", int(e.i.opcode != "mbarrier"))
            b.call("void", "drvkit_race_object_arrive", e.grid, address, arrives, copied, complete)
    watch(e, at, 8, Access.READS | Access.WRITES | Access.STRONG | Access.APART, mask_bits)
    return b.load(vector("i64", WARP), olds, align=64)
