"""Integer and logic instructions, comparisons and selections.

Source: PTX ISA, "Integer Arithmetic Instructions", "Logic and Shift Instructions", "Comparison and Selection
Instructions".
"""

from __future__ import annotations

from ..ir import Value, element, lanes_of, vector
from ..ptx import SIZES, Instruction
from .bits import carrying
from .core import Lower, kind_of, lowers, pair, vector_elements
from .float import float_arithmetic, float_compare, flush, is_float, packed_set, packed_setp

_LOGIC = {"and": "and", "or": "or", "xor": "xor"}


@lowers("mov")
def mov(e: Lower, i: Instruction) -> None:
    """Also packs and unpacks: ``mov.b64 {lo, hi}, d`` and ``mov.b32 d, {a, b}``."""
    type_ = i.types[-1]
    target, source = i.operands
    targets, sources = vector_elements(target), vector_elements(source)
    if len(targets) == len(sources) == 1:
        e.write(targets[0], e.read(sources[0], type_), type_)
        return
    bits = 8 * SIZES[type_]
    whole = f"i{bits}"
    b = e.b
    if len(sources) > 1:
        part = bits // len(sources)
        value = e.const(whole, 0)
        for position, each in enumerate(sources):
            piece = b.resize(e.read(each, f"b{part}"), whole)
            value = b.op("or", value, b.op("shl", piece, e.const(whole, part * position)))
        e.write(target, value, type_)
        return
    value = e.read(source, type_)
    part = bits // len(targets)
    for position, each in enumerate(targets):
        piece = b.resize(b.op("lshr", value, e.const(whole, part * position)), f"i{part}")
        e.write(each, piece, f"b{part}")


@lowers("add", "sub", "mul", "mad", "fma", "min", "max", "neg", "abs", "div", "rem", "mul24", "mad24", "sad")
def arithmetic(e: Lower, i: Instruction) -> None:
    type_ = i.types[-1] if i.opcode != "fma" or len(i.types) < 2 else i.types[0]
    if is_float(i.types[0]):
        float_arithmetic(e, i)
        return
    if "cc" in i.modifiers:
        carrying(e, i)
        return
    if type_ in ("u16x2", "s16x2"):
        _packed(e, i, type_)
        return
    b, signed = e.b, type_[0] == "s"
    values = [e.read(operand, type_) for operand in i.operands[1:]]
    kind = kind_of(type_)
    bits = 8 * SIZES[type_]
    wide = f"i{2 * bits}"
    extend = "sext" if signed else "zext"
    opcode, mode = i.opcode, next((m for m in i.modifiers if m in ("lo", "hi", "wide")), "lo")
    if opcode in ("add", "sub"):
        result = b.op(opcode, *values)
        if "sat" in i.modifiers:
            result = b.intrinsic(f"{'s' if signed else 'u'}{opcode}.sat", *values)
    elif opcode in ("mul", "mad", "mul24", "mad24"):
        if opcode.endswith("24"):
            values[:2] = [_low24(e, value, signed) for value in values[:2]]
        if mode == "lo":
            result = b.op("mul", values[0], values[1])
        else:
            product = b.op("mul", b.cast(extend, values[0], wide), b.cast(extend, values[1], wide))
            if mode == "wide":
                if opcode.startswith("mad"):
                    third = e.read(i.operands[3], f"{type_[0]}{2 * bits}")
                    product = b.op("add", product, third)
                e.write(i.operands[0], product, f"{type_[0]}{2 * bits}")
                return
            shift = bits if not opcode.endswith("24") else 16
            result = b.cast("trunc", b.op("lshr", product, e.const(wide, shift)), kind)
        if opcode.startswith("mad"):
            if "sat" in i.modifiers:
                result = b.intrinsic("sadd.sat", result, values[2])
            else:
                result = b.op("add", result, values[2])
    elif opcode in ("min", "max"):
        result = b.intrinsic(f"{'s' if signed else 'u'}{opcode}", *values)
        if "relu" in i.modifiers:
            result = b.intrinsic("smax", result, e.const(kind, 0))
    elif opcode == "neg":
        result = b.op("sub", e.const(kind, 0), values[0])
    elif opcode == "abs":
        negative = b.compare("icmp slt", values[0], e.const(kind, 0))
        result = b.select(negative, b.op("sub", e.const(kind, 0), values[0]), values[0])
    elif opcode == "sad":
        less = b.compare(f"icmp {'s' if signed else 'u'}lt", values[0], values[1])
        difference = b.select(less, b.op("sub", values[1], values[0]), b.op("sub", values[0], values[1]))
        result = b.op("add", difference, values[2])
    else:
        result = _divide(e, opcode, values, kind, signed)
    e.write(i.operands[0], result, type_)


def _divide(e: Lower, opcode: str, values: list[Value], kind: str, signed: bool) -> Value:
    """Division by zero gives all ones, and the remainder the dividend; the most negative number by -1 gives itself."""
    b = e.b
    dividend, divisor = values
    zero = b.compare("icmp eq", divisor, e.const(kind, 0))
    bad = zero
    if signed:
        lowest = e.const(kind, 1 << (int(kind[1:]) - 1))
        overflow = b.op("and", b.compare("icmp eq", dividend, lowest), b.compare("icmp eq", divisor, e.const(kind, -1)))
        bad = b.op("or", zero, overflow)
    safe = b.select(bad, e.const(kind, 1), divisor)
    result = b.op(("s" if signed else "u") + opcode, dividend, safe)
    if opcode == "div":
        return b.select(zero, e.const(kind, -1), result)
    return b.select(zero, dividend, result)


def _low24(e: Lower, value: Value, signed: bool) -> Value:
    b = e.b
    moved = b.op("shl", value, e.const("i32", 8))
    return b.op("ashr" if signed else "lshr", moved, e.const("i32", 8))


def _packed(e: Lower, i: Instruction, type_: str) -> None:
    """Two 16-bit integers in one register."""
    b, signed = e.b, type_[0] == "s"
    wide = vector("i16", 2 * e.lanes)
    values = [b.value(wide, f"bitcast {e.read(operand, 'b32')} to {wide}") for operand in i.operands[1:]]
    if i.opcode in ("add", "sub"):
        if "sat" in i.modifiers:
            result = b.intrinsic(f"{'s' if signed else 'u'}{i.opcode}.sat", *values)
        else:
            result = b.op(i.opcode, *values)
    elif i.opcode in ("min", "max"):
        result = b.intrinsic(f"{'s' if signed else 'u'}{i.opcode}", *values)
        if "relu" in i.modifiers:
            result = b.intrinsic("smax", result, Value("zeroinitializer", wide))
    else:
        raise e.unsupported()
    back = e.type("b32")
    e.write(i.operands[0], b.value(back, f"bitcast {result} to {back}"), "b32")


@lowers("and", "or", "xor", "not", "cnot")
def logic(e: Lower, i: Instruction) -> None:
    b, type_ = e.b, i.types[-1]
    values = [e.read(operand, type_) for operand in i.operands[1:]]
    if i.opcode == "not":
        result = b.op("xor", values[0], e.const(kind_of(type_), -1))
    elif i.opcode == "cnot":
        result = b.cast("zext", b.compare("icmp eq", values[0], e.const(kind_of(type_), 0)), kind_of(type_))
    else:
        result = b.op(_LOGIC[i.opcode], *values)
    e.write(i.operands[0], result, type_)


@lowers("shl", "shr")
def shift(e: Lower, i: Instruction) -> None:
    """Counts beyond the width shift everything out."""
    b, type_ = e.b, i.types[-1]
    kind = kind_of(type_)
    bits = int(kind[1:])
    value, count = e.read(i.operands[1], type_), e.read(i.operands[2], "u32")
    signed = i.opcode == "shr" and type_[0] == "s"
    beyond = b.compare("icmp uge", count, e.const("i32", bits))
    inside = b.resize(b.select(beyond, e.const("i32", bits - 1 if signed else 0), count), kind)
    result = b.op("shl" if i.opcode == "shl" else "ashr" if signed else "lshr", value, inside)
    if not signed:
        result = b.select(beyond, e.const(kind, 0), result)
    e.write(i.operands[0], result, type_)


_INTEGER = {"eq": "eq", "ne": "ne", "lo": "ult", "ls": "ule", "hi": "ugt", "hs": "uge"}


def compared(e: Lower, i: Instruction, type_: str) -> Value:
    """The comparison of a `setp` or `set`, before it is combined."""
    comparison = i.modifiers[0]
    a, c = (e.read(operand, type_) for operand in i.operands[1:3])
    if is_float(type_):
        return float_compare(e, comparison, a, c, type_, "ftz" in i.modifiers)
    sign = "s" if type_[0] == "s" else "u"
    return e.b.compare(f"icmp {_INTEGER.get(comparison) or sign + comparison}", a, c)


@lowers("setp")
def setp(e: Lower, i: Instruction) -> None:
    b, type_ = e.b, i.types[-1]
    if type_ in ("f16x2", "bf16x2"):
        packed_setp(e, i, type_)
        return
    result = compared(e, i, type_)
    complement = b.op("xor", result, e.const("i1", 1))
    combine = next((m for m in i.modifiers[1:] if m in _LOGIC), None)
    if combine:
        other = e.read(i.operands[3], "pred")
        result, complement = b.op(combine, result, other), b.op(combine, complement, other)
    first, second = pair(i.operands[0])
    e.write(first, result, "pred")
    e.write(second, complement, "pred")


@lowers("set")
def set_(e: Lower, i: Instruction) -> None:
    """All ones, or 1.0, where the comparison holds."""
    b = e.b
    result_type, type_ = i.types[-2], i.types[-1]
    if type_ in ("f16x2", "bf16x2"):
        packed_set(e, i, result_type, type_)
        return
    result = compared(e, i, type_)
    combine = next((m for m in i.modifiers[1:] if m in _LOGIC), None)
    if combine:
        result = b.op(combine, result, e.read(i.operands[3], "pred"))
    kind = kind_of(result_type)
    if kind[0] == "i" and result_type != "bf16":
        e.write(i.operands[0], b.cast("sext", result, kind), result_type)
    else:
        one = {"f32": ("i32", 0x3F800000), "f16": ("i16", 0x3C00), "bf16": ("i16", 0x3F80)}[result_type]
        e.write(i.operands[0], b.select(result, e.const(*one), e.const(one[0], 0)), "b")


@lowers("selp")
def selp(e: Lower, i: Instruction) -> None:
    type_ = i.types[-1]
    condition = e.read(i.operands[3], "pred")
    e.write(i.operands[0], e.b.select(condition, e.read(i.operands[1], type_), e.read(i.operands[2], type_)), type_)


@lowers("slct")
def slct(e: Lower, i: Instruction) -> None:
    """``c >= 0 ? a : b``; NaN counts as negative."""
    b, type_, by = e.b, i.types[0], i.types[1]
    chooser = e.read(i.operands[3], by)
    if "ftz" in i.modifiers:
        chooser = flush(b, chooser, by)
    zero = e.const(element(chooser.type), 0)
    positive = b.compare("fcmp oge" if by == "f32" else "icmp sge", chooser, zero)
    e.write(i.operands[0], b.select(positive, e.read(i.operands[1], type_), e.read(i.operands[2], type_)), type_)


def bit_lanes(value: Value) -> int:
    return lanes_of(value.type)
