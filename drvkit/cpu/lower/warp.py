"""Instructions in which the lanes of a warp meet: shuffles, votes, matches, reductions, elections.

A lane that has ended counts as absent from every member mask. Registers of lanes that do not take part are read as
they are.

Source: PTX ISA, "Data Movement and Conversion Instructions: shfl.sync", "Parallel Synchronization and Communication
Instructions".
"""

from __future__ import annotations

from ..flow import holds
from ..ir import Builder, Value, constant, lanes_of
from ..ptx import Immediate, Instruction, Operand, Register
from ..state import EXITED, HELD
from .core import WARP, Lower, lowers, pair

__all__ = ["meet", "meet_aligned", "warp_barrier"]

_LANES = f"<{WARP} x i32>"
_ALL = constant("i32", -1)
_OWN = Value(f"<{', '.join(str(constant('i32', 1 << lane)) for lane in range(WARP))}>", _LANES)  # a lane's own bit
# What the runtime does with a warp at an instruction that some members have not reached.
_HERE, _WAITS, _DIVERGED = 0, 1, 2


# Members


def meet(e: Lower, i: Instruction, mask: Operand) -> Value:
    """See that the members of ``mask`` are here; gives the mask, as a scalar where it is a constant.

    A member may be on its way, since it polls or is held: then the warp comes back. One from where no way leads here
    has passed by: a fault, and so is a lane that is no member of its own mask.
    """
    b = e.b
    members = _members(e, mask)
    everybody = members == _ALL
    if everybody and e.gathered:
        return members
    elsewhere = b.load("i32", e.other_slot, align=4)
    suspect = b.compare("icmp ne", elsewhere, constant("i32", EXITED))
    if not everybody:
        outside = b.compare("icmp eq", b.op("and", _spread(b, members), _OWN), constant(_LANES, 0))
        suspect = b.op("or", suspect, b.any(b.op("and", outside, e.mask)))
    _settle(e, i, suspect, members, EXITED)
    e.gathered = max(e.gathered, int(everybody))
    return members


def meet_aligned(e: Lower, i: Instruction) -> None:
    """See that all 32 lanes are here: of an ``.aligned`` instruction that also no lane may have ended before."""
    if e.gathered < 2:
        suspect = e.b.compare("icmp ne", e.mask_bits, _ALL)
        _settle(e, i, suspect, _ALL, -1)
        e.gathered = 2


def meet_at_barrier(e: Lower, i: Instruction) -> None:
    """See that all lanes that live are here."""
    elsewhere = e.b.load("i32", e.other_slot, align=4)
    suspect = e.b.compare("icmp ne", elsewhere, constant("i32", EXITED))
    _settle(e, i, suspect, _ALL, EXITED, "barrier divergence")


def _members(e: Lower, mask: Operand) -> Value:
    if isinstance(mask, Immediate):
        return constant("i32", mask.bits)
    if isinstance(mask, Register) and mask in e.once and e.once[mask].text.lstrip("-").isdigit():
        return e.once[mask]
    return e.read(mask, "b32")


def _settle(
    e: Lower, i: Instruction, suspect: Value, members: Value, ended: int, kind: str = "warp divergence"
) -> None:
    b = e.b
    anywhere = holds(i)
    last = HELD - 1 if anywhere else e.flow.last_that_leads_to(e.number)
    with b.when(suspect, likely=False):
        pc, spread = b.load(_LANES, e.pc_slot, align=128), _spread(b, members)
        awaited = constant(_LANES, 0) if anywhere else b.load(_LANES, e.warp_place("awaited"), align=64)
        state = b.call(
            "i32", e.helper("members_state", _members_state),
            pc, awaited, spread, e.mask_bits, constant("i32", last), constant("i32", ended),
        )  # fmt: skip
        waits = b.compare("icmp eq", state, constant("i32", _WAITS))
        if anywhere:
            with b.when(waits):
                e.hold(b.op("and", spread, b.splat(b.bits(b.compare("icmp ne", pc, constant(_LANES, ended))), WARP)))
        elif e.current.instructions[0] is i:
            e.stay(waits, i)
        with b.when(b.compare("icmp ne", state, constant("i32", _HERE)), likely=False):
            e.missed(kind, spread, i)


def _members_state(b: Builder) -> str:
    """Of running lanes, whose members may come from blocks up to ``last``, unless they are held for the running."""
    pc, awaited, members = (Value(name, _LANES) for name in ("%pc", "%awaited", "%members"))
    running, last, ended = Value("%running", "i32"), Value("%last", "i32"), Value("%ended", "i32")
    asked = b.select(b.lanes(running), members, constant(_LANES, 0))
    named = b.call("i32", f"llvm.vector.reduce.or.v{WARP}i32", asked)
    live = b.bits(b.compare("icmp ne", pc, b.splat(ended, WARP)))
    missing = b.op("and", b.op("and", named, live), b.op("xor", running, _ALL))
    held = b.bits(b.compare("icmp uge", pc, constant(_LANES, HELD)))
    for_us = b.bits(b.compare("icmp ne", b.op("and", awaited, b.splat(running, WARP)), constant(_LANES, 0)))
    ahead = b.op("and", pc, constant(_LANES, HELD - 1))
    able = b.bits(b.compare("icmp sle", ahead, b.splat(last, WARP)))
    coming = b.op("and", b.op("and", missing, able), b.op("xor", b.op("and", held, for_us), _ALL))
    outside = b.bits(b.compare("icmp eq", b.op("and", members, _OWN), constant(_LANES, 0)))
    wrong = b.compare("icmp ne", b.op("and", outside, running), constant("i32", 0))
    late = b.select(_is_zero(b, coming), constant("i32", _DIVERGED), constant("i32", _WAITS))
    state = b.select(_is_zero(b, missing), constant("i32", _HERE), late)
    b.line(f"ret {b.select(wrong, constant('i32', _DIVERGED), state)}")
    parameters = f"{pc}, {awaited}, {members}, {running}, {last}, {ended}"
    return b.function(f"internal i32 @members_state({parameters})", attributes="noinline cold ")


def _spread(b: Builder, value: Value) -> Value:
    """As a vector of 32 lanes."""
    if lanes_of(value.type) == WARP:
        return value
    return constant(_LANES, value.text) if value.text.lstrip("-").isdigit() else b.splat(value, WARP)


def _like(b: Builder, value: Value, members: Value) -> Value:
    """A scalar, spread if the members differ from lane to lane."""
    return b.splat(value, lanes_of(members.type))


def _is_zero(b: Builder, value: Value) -> Value:
    return b.compare("icmp eq", value, constant(value.type, 0))


def _mode(e: Lower, i: Instruction, *modes: str) -> str:
    if "sync" not in i.modifiers:
        raise e.unsupported(why="without .sync it is gone since sm_70")
    if i.modifiers[0] != "sync" or i.modifiers[1] not in modes:
        raise e.unsupported()
    return i.modifiers[1]


def warp_barrier(e: Lower, i: Instruction) -> None:
    """``bar.warp.sync``: lanes that wait with one mask meet, whichever copy of it each has come to.

    They are held until the last member has come. One that lived when a lane began to wait, and ends elsewhere, is
    missed for good. Lanes that run together see what each has written.
    """
    meet(e, i, i.operands[0])


@lowers("activemask")
def activemask(e: Lower, i: Instruction) -> None:
    bits = e.mask_bits
    if i.guard is not None:
        bits = e.b.op("and", bits, e.b.bits(e.guard()))
    e.write(i.operands[0], bits, "b32")


# Shuffles


@lowers("shfl")
def shfl(e: Lower, i: Instruction) -> None:
    """With constant operands one ``shufflevector``."""
    b, mode = e.b, _mode(e, i, "up", "down", "bfly", "idx")
    target, a, lane, clamp, mask = i.operands
    meet(e, i, mask)
    value = e.read(a, "b32")
    first, second = pair(target)
    if isinstance(lane, Immediate) and isinstance(clamp, Immediate):
        sources = [_source(mode, own, lane.bits, clamp.bits) for own in range(WARP)]
        inside = ", ".join(f"i1 {'true' if good else 'false'}" for _, good in sources)
        result, good = b.shuffle(value, [source for source, _ in sources]), Value(f"<{inside}>", f"<{WARP} x i1>")
    else:
        source, good = _sources(e, mode, e.read(lane, "b32"), e.read(clamp, "b32"))
        result = b.call(_LANES, e.helper("shfl_take", _take), value, source)
    e.write(first, result, "b32")
    e.write(second, good, "pred")


def _source(mode: str, own: int, lane: int, clamp: int) -> tuple[int, bool]:
    """The lane that ``own`` reads, and whether it lies in the segment."""
    lane, segment, limit = lane & 31, clamp >> 8 & 31, clamp & 31
    lowest = own & segment
    highest = lowest | (limit & ~segment)
    if mode == "up":
        source = own - lane
        good = source >= highest
    else:
        source = {"down": own + lane, "bfly": own ^ lane, "idx": lowest | (lane & ~segment)}[mode]
        good = source <= highest
    return (source if good else own), good


def _sources(e: Lower, mode: str, lane: Value, clamp: Value) -> tuple[Value, Value]:
    """`_source` for operands that are known only when it runs."""
    b, own, low = e.b, e.lane_id, e.const("i32", 31)
    lane, limit = b.op("and", lane, low), b.op("and", clamp, low)
    segment = b.op("and", b.op("lshr", clamp, e.const("i32", 8)), low)
    beside = b.op("xor", segment, low)
    lowest = b.op("and", own, segment)
    highest = b.op("or", lowest, b.op("and", limit, beside))
    if mode == "idx":
        source = b.op("or", lowest, b.op("and", lane, beside))
    else:
        source = b.op({"up": "sub", "down": "add", "bfly": "xor"}[mode], own, lane)
    good = b.compare("icmp sge" if mode == "up" else "icmp sle", source, highest)
    return b.select(good, source, own), good


def _take(b: Builder) -> str:
    """The elements of one vector that another one counts."""
    values, source = Value("%values", _LANES), Value("%source", _LANES)
    places = [b.alloca(f"[{WARP} x i32]") for _ in range(3)]
    b.store(values, places[0], align=64)
    b.store(source, places[1], align=64)
    with b.count(constant("i32", WARP)) as lane:
        index = b.load("i32", b.at(places[1], lane, "i32"), align=4)
        b.store(b.load("i32", b.at(places[0], index, "i32"), align=4), b.at(places[2], lane, "i32"), align=4)
    b.line(f"ret {b.load(_LANES, places[2], align=64)}")
    return b.function(f"internal {_LANES} @shfl_take({values}, {source})", attributes="noinline ")


# Votes


@lowers("vote")
def vote(e: Lower, i: Instruction) -> None:
    b, mode = e.b, _mode(e, i, "all", "any", "uni", "ballot")
    target, predicate, mask = i.operands
    members = meet(e, i, mask)
    taking_part = b.op("and", _like(b, e.mask_bits, members), members)
    votes = b.op("and", _like(b, b.bits(e.read(predicate, "pred")), members), taking_part)
    if mode == "ballot":
        e.write(target, votes, "b32")
        return
    if mode == "any":
        result = b.compare("icmp ne", votes, constant(votes.type, 0))
    else:
        result = b.compare("icmp eq", votes, taking_part)
        if mode == "uni":
            result = b.op("or", result, _is_zero(b, votes))
    e.write(target, result, "pred")


@lowers("match")
def match(e: Lower, i: Instruction) -> None:
    """Who has the same value as a lane."""
    b, mode, type_ = e.b, i.modifiers[0], i.types[-1]
    if i.modifiers[1] != "sync" or mode not in ("any", "all"):
        raise e.unsupported()
    target, a, mask = i.operands
    members = _spread(b, meet(e, i, mask))
    taking_part = b.op("and", members, b.splat(e.mask_bits, WARP))
    name = f"match_{type_}"
    equal = b.call(_LANES, e.helper(name, lambda inner: _same(inner, name, type_)), e.read(a, type_), e.mask_bits)
    equal = b.op("and", equal, taking_part)
    if mode == "any":
        e.write(target, equal, "b32")
        return
    first, second = pair(target)
    all_ = b.compare("icmp eq", equal, taking_part)
    e.write(first, b.select(all_, taking_part, constant(_LANES, 0)), "b32")
    e.write(second, all_, "pred")


def _same(b: Builder, name: str, type_: str) -> str:
    """For each running lane, the lanes with an equal value."""
    values, running = Value("%values", f"<{WARP} x i{type_[1:]}>"), Value("%running", "i32")
    result = b.alloca(f"[{WARP} x i32]")
    with b.each_bit(running) as lane:
        equal = b.compare("icmp eq", values, b.splat(b.extract(values, lane), WARP))
        b.store(b.bits(equal), b.at(result, lane, "i32"), align=4)
    b.line(f"ret {b.load(_LANES, result, align=64)}")
    return b.function(f"internal {_LANES} @{name}({values}, {running})", attributes="noinline ")


# Reductions


# The vector reduction of LLVM, and the value that changes nothing.
_REDUCTIONS = {
    ("add", "u32"): ("add", 0),
    ("add", "s32"): ("add", 0),
    ("min", "u32"): ("umin", -1),
    ("max", "u32"): ("umax", 0),
    ("min", "s32"): ("smin", 0x7FFFFFFF),
    ("max", "s32"): ("smax", -(1 << 31)),
    ("and", "b32"): ("and", -1),
    ("or", "b32"): ("or", 0),
    ("xor", "b32"): ("xor", 0),
}


@lowers("redux")
def redux(e: Lower, i: Instruction) -> None:
    operation, type_ = _mode(e, i, "add", "min", "max", "and", "or", "xor"), i.types[-1]
    target, a, mask = i.operands
    reduction = _REDUCTIONS.get((operation, "s32" if type_ == "f32" and operation != "add" else type_))
    if reduction is None:
        raise e.unsupported()
    members = meet(e, i, mask)
    reduce = _float_reduced if type_ == "f32" else _reduced
    e.write(target, reduce(e, reduction, e.read(a, "b32"), members), "b32")


def _reduced(e: Lower, reduction: tuple[str, int], values: Value, members: Value) -> Value:
    """A scalar where the members are the same in all lanes."""
    b = e.b
    if lanes_of(members.type) == 1:
        return _reduce(b, reduction, values, b.op("and", e.mask_bits, members))
    name = f"redux_{reduction[0]}"
    helper = e.helper(name, lambda inner: _reduce_groups(inner, name, reduction))
    return b.call(_LANES, helper, values, members, e.mask_bits)


def _reduce(b: Builder, reduction: tuple[str, int], values: Value, taking_part: Value) -> Value:
    operation, neutral = reduction
    counted = b.select(b.lanes(taking_part), values, constant(_LANES, neutral))
    return b.call("i32", f"llvm.vector.reduce.{operation}.v{WARP}i32", counted)


def _reduce_groups(b: Builder, name: str, reduction: tuple[str, int]) -> str:
    """Each lane's own members."""
    values, members, running = Value("%values", _LANES), Value("%members", _LANES), Value("%running", "i32")
    result = b.alloca(f"[{WARP} x i32]")
    with b.each_bit(running) as lane:
        group = b.op("and", b.extract(members, lane), running)
        b.store(_reduce(b, reduction, values, group), b.at(result, lane, "i32"), align=4)
    b.line(f"ret {b.load(_LANES, result, align=64)}")
    return b.function(f"internal {_LANES} @{name}({values}, {members}, {running})", attributes="noinline ")


def _float_reduced(e: Lower, reduction: tuple[str, int], bits: Value, members: Value) -> Value:
    """Of f32, as integers of the same order: -0 comes before +0, and the neutral integer is that of a NaN."""
    b, modifiers = e.b, e.i.modifiers
    if "abs" in modifiers:
        bits = b.op("and", bits, e.const("i32", 0x7FFFFFFF))
    nan = _is_nan(b, bits)
    ordered = b.select(nan, e.const("i32", reduction[1]), _ordered(b, bits))
    result = _ordered(b, _reduced(e, reduction, ordered, members))
    canonical = _is_nan(b, result)
    if "NaN" in modifiers:
        taking_part = b.op("and", _like(b, e.mask_bits, members), members)
        found = b.op("and", _like(b, b.bits(nan), members), taking_part)
        canonical = b.op("or", canonical, b.compare("icmp ne", found, constant(found.type, 0)))
    return b.select(canonical, constant(result.type, 0x7FFFFFFF), result)


def _is_nan(b: Builder, bits: Value) -> Value:
    magnitude = b.op("and", bits, constant(bits.type, 0x7FFFFFFF))
    return b.compare("icmp ugt", magnitude, constant(bits.type, 0x7F800000))


def _ordered(b: Builder, bits: Value) -> Value:
    """The bits of f32 numbers as signed integers of the same order; its own inverse."""
    sign = b.op("ashr", bits, constant(bits.type, 31))
    return b.op("xor", bits, b.op("and", sign, constant(bits.type, 0x7FFFFFFF)))


@lowers("elect")
def elect(e: Lower, i: Instruction) -> None:
    """The lowest member."""
    if i.modifiers != ("sync",):
        raise e.unsupported()
    b = e.b
    target, mask = i.operands
    members = meet(e, i, mask)
    taking_part = b.op("and", _like(b, e.mask_bits, members), members)
    leader = _spread(b, b.intrinsic("cttz", taking_part, constant("i1", 0)))
    first, second = pair(target)
    e.write(first, leader, "b32")
    e.write(second, b.compare("icmp eq", leader, e.lane_id), "pred")
