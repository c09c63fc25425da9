"""Matrix instructions of a warpgroup: ``wgmma``.

Four warps make D of 64 rows together. Warp w of them has rows 16 w to 16 w + 15, which depend on these rows of A and on
all of B, so each warp makes its part, whole and at once, when it comes to the product.

A tile is 8 rows of A, or 8 columns of B, of 16 bytes along k: as a register of `matrix` has it. Two of them, side by
side along k, are a pair, and a warp has two pairs of A. In shared memory a tile is 8 times 16 bytes, each read by one
lane: the rows, or, if the matrix is MN-major, for each k the numbers of all rows. D is as in `matrix`: of its first 8
columns rows 0 to 7, then rows 8 to 15, and so on.

Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions".
"""

from __future__ import annotations

from collections.abc import Iterator

from ..ir import Builder, Value, constant, lanes_of, vector
from ..ptx import Immediate, Instruction, Operand, Vector
from .access import load_bytes
from .core import WARP, Lower, lowers
from .matrix import Form, accumulator, numbers, parts, transposed
from .warp import meet_aligned

# Types of A and B that go together, their k, and the types of D.
_FORMS = (
    (("f16",), 16, ("f16", "f32")),
    (("bf16",), 16, ("f32",)),
    (("tf32",), 8, ("f32",)),
    (("e4m3", "e5m2"), 32, ("f16", "f32")),
)
_TILE = 4 * WARP  # bytes
_LANES = f"<{WARP} x i32>"


@lowers("wgmma.fence", "wgmma.commit_group", "wgmma.wait_group")
def wait(e: Lower, i: Instruction) -> None:
    """Products are made at once."""
    meet_aligned(e, i)


@lowers("wgmma.mma_async")
def mma_async(e: Lower, i: Instruction) -> None:
    b, form = e.b, _form(e, i)
    d, a, b_, scale, *rest = i.operands
    of_a, of_b, *majors = map(_integer, rest)
    mn_major = [False, False, *map(bool, majors)][-2:]  # of A and B; of whom it is not said is K-major
    assert isinstance(d, Vector)
    pairs = int(form.shape[4 : form.shape.index("k")]) // 8  # of B
    each = 1 if form.accumulator == "f16" else 2  # registers of a tile of D
    if len(d.elements) != 2 * pairs * each or (isinstance(a, Vector) and len(a.elements) != 4):
        raise e.unsupported(why="not as many registers as the shape has")
    meet_aligned(e, i)
    warp = e.warp_field("index")
    fourth = b.op("or", warp, constant("i32", 3))
    with b.when(b.compare("icmp uge", fourth, e.grid_field("warps")), likely=False):
        e.fault("not all warps of the warpgroup are there", i)
    tiles = e.buffer(f"[{_TILE} x i8]", 4 + 2 * pairs)  # those of A, then those of B
    if isinstance(a, Vector):
        for number, register in enumerate(a.elements):
            along_k, pair = divmod(number, 2)
            b.store(e.read(register, "b32"), b.at(tiles, _TILE * (2 * pair + along_k)), align=64)
    else:
        first = b.op("mul", b.op("and", warp, constant("i32", 3)), constant("i32", 2))
        _load(e, a, first, 2, tiles, mn_major=mn_major[0])
    _load(e, b_, constant("i32", 0), pairs, b.at(tiles, 4 * _TILE), mn_major=mn_major[1])
    registers = e.buffer("i32", WARP * len(d.elements))
    for number, register in enumerate(d.elements):
        b.store(e.read(register, "b32"), b.at(registers, 4 * WARP * number), align=64)
    negative = of_a != of_b
    name = f"wg{form.name}_{mn_major[0]:d}{mn_major[1]:d}" + "_negative" * negative
    helper = e.helper(name, lambda inner: _multiply(inner, name, form, pairs, mn_major, negative=negative))
    b.call("void", helper, tiles, registers, _of_all(e, scale, "pred"))
    for number, register in enumerate(d.elements):
        e.write(register, b.load(_LANES, b.at(registers, 4 * WARP * number), align=64), "b32")


def _form(e: Lower, i: Instruction) -> Form:
    _, *how, shape, d, a, b = i.modifiers
    for types, depth, accumulators in _FORMS:
        shapes = [f"m64n{columns}k{depth}" for columns in range(8, 257, 8)]
        if how == ["sync", "aligned"] and shape in shapes and a in types and b in types and d in accumulators:
            return Form(shape, a, b, d, saturates=False)
    raise e.unsupported()


def _integer(operand: Operand) -> int:
    assert isinstance(operand, Immediate)
    return operand.bits


def _of_all(e: Lower, operand: Operand, type_: str) -> Value:
    """An operand that is the same in all lanes, as a scalar."""
    value = e._read(operand, type_)
    return value if lanes_of(value.type) == 1 else e.b.extract(value, 0)


# Tiles in memory


def _load(e: Lower, descriptor: Operand, first: Value, pairs: int, tiles: Value, *, mn_major: bool) -> None:
    """Some pairs from the ``first`` one on, two at a time."""
    b = e.b
    name = f"wgmma_places_{'mn' if mn_major else 'k'}"
    helper = e.helper(name, lambda inner: _places(inner, name, mn_major=mn_major))
    matrix = _of_all(e, descriptor, "b64")
    window = b.op("add", e.shared_base, b.cast("zext", e.shared_offset, "i64"))
    with b.count(constant("i32", -(-pairs // 2))) as step:
        done = b.op("mul", step, constant("i32", 2))
        places = b.cast("zext", b.call(_LANES, helper, matrix, b.op("add", first, done)), "i64")
        both = b.compare("icmp ult", done, constant("i32", pairs - 1))
        lanes = b.select(both, constant("i32", -1), constant("i32", (1 << WARP // 2) - 1))
        addresses = b.op("add", places, b.splat(window, WARP))
        load_bytes(e, addresses, 16, lanes, into=b.at(tiles, step, f"[{4 * _TILE} x i8]"))


def _places(b: Builder, name: str, *, mn_major: bool) -> str:
    """A function that tells where in a block's shared memory the lanes read a pair (the first 16) and the next one.

    What the strides of a descriptor separate depends on how the matrix lies, and on the swizzle: bits 4 and up of an
    address are changed by bits 7 and up, of as many as the rows have 16-byte chunks that change places.
    """
    matrix, pair = Value("%matrix", "i64"), Value("%pair", "i32")

    def const(value: int) -> Value:
        return constant(_LANES, value)

    def lanes(values: list[int]) -> Value:
        return Value(f"<{', '.join(f'i32 {value}' for value in values)}>", _LANES)

    def field(at: int, bits: int) -> Value:
        moved = b.cast("trunc", b.op("lshr", matrix, constant("i64", at)), "i32")
        return b.splat(b.op("and", moved, constant("i32", (1 << bits) - 1)), WARP)

    def times(index: Value, stride: Value) -> Value:
        return b.op("mul", index, stride)

    start, leading, stride = (b.op("shl", field(at, 14), const(4)) for at in (0, 16, 32))
    base, swizzle = field(49, 3), field(62, 2)
    plain = b.compare("icmp eq", swizzle, const(0))
    narrow = b.op("and", b.op("sub", swizzle, const(1)), const(3))  # rows of 128 bytes, shifted right by it
    swapped = b.op("lshr", const(7), narrow)  # the bits that change
    row, along_k = lanes([lane % 8 for lane in range(WARP)]), lanes([lane // 8 % 2 for lane in range(WARP)])
    pairs = b.op("add", b.splat(pair, WARP), lanes([lane // 16 for lane in range(WARP)]))
    place = b.op("add", start, times(row, b.op("lshr", const(128), narrow)))
    if mn_major:
        panel, chunk = b.op("lshr", pairs, b.op("sub", const(3), narrow)), b.op("and", pairs, swapped)
        panels, steps = b.select(plain, stride, leading), b.select(plain, leading, stride)
        place = b.op("add", b.op("add", place, times(panel, panels)), times(chunk, const(16)))
    else:
        steps = b.select(plain, leading, const(16))
        place = b.op("add", place, times(pairs, stride))
    place = b.op("add", place, times(along_k, steps))
    pattern = b.op("sub", b.op("lshr", place, const(7)), base)
    place = b.op("xor", place, b.op("shl", b.op("and", pattern, swapped), const(4)))
    b.line(f"ret {place}")
    return b.function(f"internal {_LANES} @{name}({matrix}, {pair})", attributes="noinline ")


# Products


def _multiply(b: Builder, name: str, form: Form, pairs: int, mn_major: list[bool], *, negative: bool) -> str:
    """A function of tiles, A's and then B's, and of the registers of D in memory, which count if it ``adds``."""
    tiles, registers, adds = Value("%tiles", "ptr"), Value("%registers", "ptr"), Value("%adds", "i1")
    numbers_of_d, numbers_of_b = vector("float", 64), vector("float", 8)
    rows = b.alloca(f"[2 x [{form.depth} x {numbers_of_d}]]")  # each number of A as often as there are columns
    columns = b.alloca(f"[{form.depth} x {numbers_of_b}]")
    for half in range(2):
        for k, down in enumerate(_along_k(b, b.at(tiles, 2 * half * _TILE), form.a, mn_major=mn_major[0])):
            factor = b.shuffle(down, [g for g in range(8) for _ in range(8)])
            factor = b.value(factor.type, f"fneg {factor}") if negative else factor
            b.store(factor, b.at(rows, form.depth * half + k, numbers_of_d), align=64)
    each = 1 if form.accumulator == "f16" else 2
    with b.count(constant("i32", pairs)) as pair:
        here = b.at(b.at(tiles, 4 * _TILE), pair, f"[{2 * _TILE} x i8]")
        for k, across in enumerate(_along_k(b, here, form.b, mn_major=mn_major[1])):
            b.store(across, b.at(columns, k, numbers_of_b), align=32)
        for half in range(2):
            at = b.at(b.at(registers, pair, f"[{2 * each * _TILE} x i8]"), half * each * _TILE)
            places = [b.at(at, number * _TILE) for number in range(each)]
            total = b.alloca(numbers_of_d)
            b.store(b.select(adds, accumulator(b, form, places), constant(numbers_of_d, "0.0")), total, align=64)
            with b.count(constant("i32", form.depth)) as step:
                factor = b.load(numbers_of_d, b.at(b.at(rows, form.depth * half, numbers_of_d), step, numbers_of_d))
                across = b.load(numbers_of_b, b.at(columns, step, numbers_of_b), align=32)
                across = b.shuffle(across, [n for _ in range(8) for n in range(8)])
                b.store(b.intrinsic("fma", factor, across, b.load(numbers_of_d, total, align=64)), total, align=64)
            for place, words in zip(places, parts(b, form, b.load(numbers_of_d, total, align=64)), strict=True):
                b.store(words, place, align=64)
    b.line("ret void")
    parameters = f"ptr noalias {tiles.text}, ptr noalias {registers.text}, {adds}"
    return b.function(f"internal void @{name}({parameters})", attributes="noinline ")


def _along_k(b: Builder, pair: Value, type_: str, *, mn_major: bool) -> Iterator[Value]:
    """The numbers of a pair of tiles: for each k those of the 8 rows."""
    for tile in range(2):
        words = b.load(_LANES, b.at(pair, tile * _TILE), align=64)
        words = transposed(b, words) if mn_major else words
        for t in range(4):
            word = b.shuffle(words, range(t, WARP, 4))
            for position in range({"f16": 2, "bf16": 2, "tf32": 1}.get(type_, 4)):
                yield numbers(b, word, position, type_)
