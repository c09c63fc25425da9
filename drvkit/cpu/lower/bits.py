"""Bits, bytes, and sums that carry.

Source: PTX ISA, "Integer Arithmetic Instructions", "Extended-Precision Integer Arithmetic Instructions", "Logic and
Shift Instructions", "prmt", "SIMD Video Instructions".
"""

from __future__ import annotations

from ..ir import Builder, Value, constant, element, lanes_of, mangled, vector
from ..ptx import Immediate, Instruction
from .core import Lower, kind_of, lowers, pair

__all__ = ["carrying"]


def _like(value: Value, number: int) -> Value:
    return constant(value.type, number)


def _low_ones(b: Builder, count: Value, bits: int) -> Value:
    """Masks of ``count`` low bits; of all, from ``bits`` on."""
    all_ = b.compare("icmp uge", count, _like(count, bits))
    one = b.op("shl", _like(count, 1), b.select(all_, _like(count, 0), count))
    return b.select(all_, _like(count, -1), b.op("sub", one, _like(count, 1)))


def _shifted(b: Builder, opcode: str, value: Value, count: Value) -> Value:
    """A shift in which counts from the width on shift everything out."""
    bits = int(element(value.type)[1:])
    beyond = b.compare("icmp uge", count, _like(count, bits))
    if opcode == "ashr":
        return b.op(opcode, value, b.select(beyond, _like(count, bits - 1), count))
    return b.select(beyond, _like(value, 0), b.op(opcode, value, b.select(beyond, _like(count, 0), count)))


# Counting and finding


@lowers("popc", "clz", "brev")
def count_bits(e: Lower, i: Instruction) -> None:
    b, type_ = e.b, i.types[0]
    value = e.read(i.operands[1], type_)
    if i.opcode == "brev":
        e.write(i.operands[0], b.intrinsic("bitreverse", value), type_)
        return
    result = b.intrinsic("ctpop", value) if i.opcode == "popc" else _leading_zeros(b, value)
    e.write(i.operands[0], b.resize(result, "i32"), "u32")


def _leading_zeros(b: Builder, value: Value) -> Value:
    return b.call(value.type, f"llvm.ctlz.{mangled(value.type)}", value, constant("i1", 0))


@lowers("bfind")
def bfind(e: Lower, i: Instruction) -> None:
    """The highest bit that is not like the sign; -1 if there is none."""
    b, type_ = e.b, i.types[0]
    bits = int(type_[1:])
    value = e.read(i.operands[1], type_)
    if type_[0] == "s":
        value = b.op("xor", value, b.op("ashr", value, _like(value, bits - 1)))
    zeros = _leading_zeros(b, value)
    result = zeros if "shiftamt" in i.modifiers else b.op("sub", _like(zeros, bits - 1), zeros)
    result = b.select(b.compare("icmp eq", value, _like(value, 0)), _like(value, -1), result)
    e.write(i.operands[0], b.resize(result, "i32"), "u32")


@lowers("fns")
def fns(e: Lower, i: Instruction) -> None:
    """The n-th bit that is set, from a bit on, upwards or, for a negative n, downwards."""
    operands = [e.read(operand, "b32") for operand in i.operands[1:]]
    result = e.outlined("fns", operands[0].type, operands, lambda values: _nth_set_bit(e.b, *values))
    e.write(i.operands[0], result, "u32")


def _nth_set_bit(b: Builder, mask: Value, base: Value, offset: Value) -> Value:
    type_ = mask.type
    zero, one, top = _like(mask, 0), _like(mask, 1), _like(mask, 31)
    down = b.compare("icmp slt", offset, zero)  # is upwards in the reversed word
    bits = b.select(down, b.intrinsic("bitreverse", mask), mask)
    here = _shifted(b, "shl", one, b.select(down, b.op("sub", top, base), base))
    from_here = b.op("sub", zero, here)  # nothing for a base that is no bit
    here_only = b.compare("icmp eq", offset, zero)
    place = b.alloca(type_)
    b.store(b.op("and", bits, b.select(here_only, here, from_here)), place, align=64)
    more = b.op("sub", b.select(down, b.op("sub", zero, offset), offset), one)
    more = b.select(here_only, zero, more)
    with b.count(constant("i32", 31)) as step:
        left = b.load(type_, place, align=64)
        fewer = b.op("and", left, b.op("sub", left, one))
        again = b.compare("icmp ult", b.splat(step, lanes_of(type_)), more)
        b.store(b.select(again, fewer, left), place, align=64)
    left = b.select(b.compare("icmp ugt", more, top), zero, b.load(type_, place, align=64))
    found = b.call(type_, f"llvm.cttz.{mangled(type_)}", left, constant("i1", 0))
    found = b.select(down, b.op("sub", top, found), found)
    return b.select(b.compare("icmp eq", left, zero), _like(mask, -1), found)


# Bit fields


def _byte(e: Lower, i: Instruction, position: int) -> Value:
    """The low byte of an operand, which counts bits."""
    return e.b.op("and", e.read(i.operands[position], "u32"), e.const("i32", 0xFF))


@lowers("bfe")
def bfe(e: Lower, i: Instruction) -> None:
    b, type_ = e.b, i.types[0]
    kind, bits = kind_of(type_), int(type_[1:])
    value = e.read(i.operands[1], type_)
    start, length = (b.resize(_byte(e, i, position), kind) for position in (2, 3))
    if type_[0] == "u":
        result = b.op("and", _shifted(b, "lshr", value, start), _low_ones(b, length, bits))
    else:
        field = _shifted(b, "ashr", value, start)
        whole = b.compare("icmp uge", length, _like(length, bits))
        unused = b.select(whole, _like(length, 0), b.op("sub", _like(length, bits), length))
        result = _shifted(b, "ashr", _shifted(b, "shl", field, unused), unused)
        result = b.select(b.compare("icmp eq", length, _like(length, 0)), _like(result, 0), result)
    e.write(i.operands[0], result, type_)


@lowers("bfi")
def bfi(e: Lower, i: Instruction) -> None:
    b, type_ = e.b, i.types[0]
    kind, bits = kind_of(type_), int(type_[1:])
    value, into = e.read(i.operands[1], type_), e.read(i.operands[2], type_)
    start, length = (b.resize(_byte(e, i, position), kind) for position in (3, 4))
    mask = _shifted(b, "shl", _low_ones(b, length, bits), start)
    moved = _shifted(b, "shl", value, start)
    changed = b.op("and", b.op("xor", into, moved), mask)
    e.write(i.operands[0], b.op("xor", into, changed), type_)


@lowers("bmsk")
def bmsk(e: Lower, i: Instruction) -> None:
    b = e.b
    start, length = (e.read(operand, "u32") for operand in i.operands[1:])
    if "wrap" in i.modifiers:
        start, length = (b.op("and", value, e.const("i32", 31)) for value in (start, length))
    e.write(i.operands[0], _shifted(b, "shl", _low_ones(b, length, 32), start), "b32")


@lowers("szext")
def szext(e: Lower, i: Instruction) -> None:
    b, type_ = e.b, i.types[0]
    value, length = e.read(i.operands[1], type_), e.read(i.operands[2], "u32")
    if "wrap" in i.modifiers:
        length = b.op("and", length, e.const("i32", 31))
    if type_[0] == "u":
        result = b.op("and", value, _low_ones(b, length, 32))
    else:
        whole = b.compare("icmp uge", length, e.const("i32", 32))
        unused = b.select(whole, e.const("i32", 0), b.op("sub", e.const("i32", 32), length))
        result = _shifted(b, "ashr", _shifted(b, "shl", value, unused), unused)
    e.write(i.operands[0], result, type_)


# Logic, shifts and bytes


@lowers("lop3")
def lop3(e: Lower, i: Instruction) -> None:
    b, table = e.b, i.operands[4]
    if not isinstance(table, Immediate):
        raise e.unsupported(why="a table that is no number")
    target, predicate = pair(i.operands[0])
    result = _logic(b, table.bits & 0xFF, [e.read(operand, "b32") for operand in i.operands[1:4]])
    e.write(target, result, "b32")
    if i.modifiers[0] in ("and", "or"):
        some = b.compare("icmp ne", result, _like(result, 0))
        e.write(predicate, b.op(i.modifiers[0], some, e.read(i.operands[5], "pred")), "pred")


def _logic(b: Builder, table: int, variables: list[Value]) -> Value:
    """A function of bits: bit k of the table is its value where the variables are the digits of k."""
    first, rest = variables[0], variables[1:]
    size = 1 << len(rest)
    ones = (1 << size) - 1
    if_set, if_clear = table >> size, table & ones
    if not rest:
        inverted = b.op("xor", first, _like(first, -1)) if table == 1 else first
        return _like(first, -if_set) if if_set == if_clear else inverted
    if if_set == if_clear:
        return _logic(b, if_set, rest)
    if if_set == if_clear ^ ones:
        return first if if_set == ones else b.op("xor", first, _logic(b, if_clear, rest))
    if if_set in (0, ones):
        other = _logic(b, if_clear, rest)
        return b.op("or", first, other) if if_set else b.op("and", b.op("xor", first, _like(first, -1)), other)
    if if_clear == 0:
        return b.op("and", first, _logic(b, if_set, rest))
    if if_clear == ones:
        return b.op("or", b.op("xor", first, _like(first, -1)), _logic(b, if_set, rest))
    change = b.op("and", first, _logic(b, if_set ^ if_clear, rest))
    return b.op("xor", change, _logic(b, if_clear, rest))


@lowers("shf")
def shf(e: Lower, i: Instruction) -> None:
    """A shift of two words."""
    b, left = e.b, i.modifiers[0] == "l"
    low, high, count = (e.read(operand, "b32") for operand in i.operands[1:])
    result = b.intrinsic("fshl" if left else "fshr", high, low, count)  # by the count modulo 32
    if "clamp" in i.modifiers:
        result = b.select(b.compare("icmp ugt", count, _like(count, 31)), low if left else high, result)
    e.write(i.operands[0], result, "b32")


_SELECTORS = {  # for each value of the low two bits the selectors of four bytes, the lowest first
    "f4e": (0x3210, 0x4321, 0x5432, 0x6543),
    "b4e": (0x5670, 0x6701, 0x7012, 0x0123),
    "rc8": (0x0000, 0x1111, 0x2222, 0x3333),
    "ecl": (0x3210, 0x3211, 0x3222, 0x3333),
    "ecr": (0x0000, 0x1110, 0x2210, 0x3210),
    "rc16": (0x1010, 0x3232, 0x1010, 0x3232),
}


@lowers("prmt")
def prmt(e: Lower, i: Instruction) -> None:
    selection = i.operands[3]
    a, c = (e.read(operand, "b32") for operand in i.operands[1:3])
    table = _SELECTORS.get(i.modifiers[-1])
    if isinstance(selection, Immediate):
        chosen = table[selection.bits & 3] if table else selection.bits
        if not chosen & 0x8888:
            e.write(i.operands[0], _picked(e, a, c, [chosen >> 4 * place & 7 for place in range(4)]), "b32")
            return
    operands = [a, c, e.read(selection, "b32")]
    result = e.outlined(i.name, a.type, operands, lambda values: _permuted(e.b, table, *values))
    e.write(i.operands[0], result, "b32")


def _permuted(b: Builder, table: tuple[int, ...] | None, a: Value, c: Value, selector: Value) -> Value:
    if table:
        row = b.op("and", selector, _like(selector, 3))
        selector = _like(selector, table[3])
        for number, selectors in enumerate(table[:3]):
            selector = b.select(b.compare("icmp eq", row, _like(row, number)), _like(row, selectors), selector)
    low, high = (b.cast("zext", value, "i64") for value in (a, c))
    both = b.op("or", low, b.op("shl", high, _like(high, 32)))
    result = _like(a, 0)
    for place in range(4):
        nibble = b.op("lshr", selector, _like(selector, 4 * place))
        by = b.op("shl", b.op("and", nibble, _like(nibble, 7)), _like(nibble, 3))
        byte = b.cast("trunc", b.op("lshr", both, b.cast("zext", by, "i64")), "i32")
        byte = b.op("and", byte, _like(byte, 0xFF))
        if not table:
            sign = b.op("mul", b.op("lshr", byte, _like(byte, 7)), _like(byte, 0xFF))
            spread = b.compare("icmp ne", b.op("and", nibble, _like(nibble, 8)), _like(nibble, 0))
            byte = b.select(spread, sign, byte)
        result = b.op("or", result, b.op("shl", byte, _like(byte, 8 * place)))
    return result


def _picked(e: Lower, a: Value, c: Value, selectors: list[int]) -> Value:
    """Four of the eight bytes of each lane."""
    size = 4 * e.lanes
    indices = [4 * lane + selector % 4 + size * (selector // 4) for lane in range(e.lanes) for selector in selectors]
    return _joined(e, e.b.shuffle(_bytes(e, a), indices, _bytes(e, c)))


def _bytes(e: Lower, value: Value) -> Value:
    type_ = vector("i8", 4 * e.lanes)
    return e.b.value(type_, f"bitcast {value} to {type_}")


def _joined(e: Lower, parts: Value) -> Value:
    type_ = vector("i32", e.lanes)
    return e.b.value(type_, f"bitcast {parts} to {type_}")


# Sums of small parts


def _part(b: Builder, value: Value, number: int, bits: int, signed: bool) -> Value:
    """A part of each word, extended to a word."""
    top = b.op("shl", value, _like(value, 32 - bits * (number + 1)))
    return b.op("ashr" if signed else "lshr", top, _like(value, 32 - bits))


@lowers("dp4a", "dp2a")
def dot_product(e: Lower, i: Instruction) -> None:
    a_signed, b_signed = (type_[0] == "s" for type_ in i.types)
    count = int(i.opcode[2])
    first = 2 if i.modifiers[0] == "hi" else 0

    def total(values: list[Value]) -> Value:
        b, (a, c, result) = e.b, values
        for number in range(count):
            left, right = _part(b, a, number, 32 // count, a_signed), _part(b, c, first + number, 8, b_signed)
            result = b.op("add", result, b.op("mul", left, right))
        return result

    operands = [e.read(operand, "b32") for operand in i.operands[1:]]
    e.write(i.operands[0], e.outlined(i.name, operands[0].type, operands, total), "u32")


@lowers("vadd4", "vsub4", "vabsdiff4", "vmin4", "vmax4")
def four_bytes(e: Lower, i: Instruction) -> None:
    """Byte by byte; with ``.add`` the sum of the four results and the last operand."""
    b = e.b
    extras = set(i.modifiers[3:])
    if not extras <= {"sat", "add"} or len(extras) > 1:
        raise e.unsupported(why=".".join(i.modifiers[3:]))
    signed, a_signed, b_signed = (type_[0] == "s" for type_ in i.types)
    a = b.cast("sext" if a_signed else "zext", _bytes(e, e.read(i.operands[1], "b32")), "i16")
    c = b.cast("sext" if b_signed else "zext", _bytes(e, e.read(i.operands[2], "b32")), "i16")
    if i.opcode in ("vadd4", "vsub4"):
        result = b.op(i.opcode[1:4], a, c)
    else:
        low, high = b.intrinsic("smin", a, c), b.intrinsic("smax", a, c)
        result = {"vmin4": low, "vmax4": high}.get(i.opcode) or b.op("sub", high, low)
    if "add" in extras:
        total = e.read(i.operands[3], "b32")
        for number in range(4):
            each = b.shuffle(result, range(number, 4 * e.lanes, 4))
            total = b.op("add", total, b.cast("sext", each, "i32"))
        e.write(i.operands[0], total, i.types[0])
        return
    if "sat" in extras:
        least, most = (-128, 127) if signed else (0, 255)
        result = b.intrinsic("smax", b.intrinsic("smin", result, _like(result, most)), _like(result, least))
    e.write(i.operands[0], _joined(e, b.cast("trunc", result, "i8")), i.types[0])


# Carries


@lowers("addc", "subc", "madc")
def carrying(e: Lower, i: Instruction) -> None:
    """Sums that take a carry in (``addc``), give one out (``.cc``), or both. A carry does not leave its block."""
    b, type_ = e.b, i.types[0]
    values = [e.read(operand, type_) for operand in i.operands[1:]]
    if i.opcode.startswith("mad"):
        product = _product(b, values[0], values[1], i.modifiers[0], signed=type_[0] == "s")
        values = [product, values[2]]
    opcode = "sub" if i.opcode.startswith("sub") else "add"
    result, carry = _carried(b, opcode, values[0], values[1])
    if i.opcode.endswith("c"):
        if e.carry is None:
            raise e.unsupported(why="no instruction of the same block gives the carry")
        result, second = _carried(b, opcode, result, b.cast("zext", e.carry, kind_of(type_)))
        carry = b.op("or", carry, second)
    if "cc" in i.modifiers:
        if i.guard is not None:
            carry = b.select(e.guard(), carry, e.carry or _like(carry, 0))
        e.carry = carry
    e.write(i.operands[0], result, type_)


def _product(b: Builder, x: Value, y: Value, part: str, *, signed: bool) -> Value:
    if part == "lo":
        return b.op("mul", x, y)
    bits = int(element(x.type)[1:])
    x, y = (b.cast("sext" if signed else "zext", value, f"i{2 * bits}") for value in (x, y))
    product = b.op("mul", x, y)
    return b.cast("trunc", b.op("lshr", product, _like(product, bits)), f"i{bits}")


def _carried(b: Builder, opcode: str, x: Value, y: Value) -> tuple[Value, Value]:
    """A sum or difference, and whether it left the range."""
    result = b.op(opcode, x, y)
    return result, b.compare("icmp ult", result, x) if opcode == "add" else b.compare("icmp ult", x, y)
