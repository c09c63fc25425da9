"""PTX text -> functions of instructions, each with its place in the text and in the source.

Both of NVRTC's dialects are read: that of compute_75 to compute_90, and that of compute_100 and later, whose registers
and parameters have untyped ``.bN`` types.

Source: PTX ISA 9.0, "Syntax", "State Spaces, Types, and Variables".
"""

from __future__ import annotations

import re
import struct
from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ..signature import kernel_label

__all__ = [
    "Function",
    "Immediate",
    "Instruction",
    "Label",
    "Location",
    "Memory",
    "Module",
    "Negated",
    "Operand",
    "Pair",
    "PtxError",
    "Register",
    "Special",
    "Symbol",
    "Variable",
    "Vector",
    "parse",
]

# Bytes of a value of each type; those that only modify an instruction (.tf32, .e4m3x2) stand for a container.
SIZES = {
    **{f"{kind}{bits}": bits // 8 for kind in "bus" for bits in (8, 16, 32, 64, 128)},
    "f16": 2,
    "bf16": 2,
    "f16x2": 4,
    "bf16x2": 4,
    "f32": 4,
    "tf32": 4,
    "f64": 8,
    "f32x2": 8,
    "u16x2": 4,
    "s16x2": 4,
    "e4m3": 1,
    "e5m2": 1,
    "e4m3x2": 2,
    "e5m2x2": 2,
    "e2m1x2": 1,
    "ue8m0x2": 2,
    "pred": 0,
}


class PtxError(ValueError):
    """The text is not PTX that is understood."""


class Location(NamedTuple):
    """A place in the source, as ``.loc`` tells it; for one in another file than the kernel, where it was inlined."""

    file: str
    line: int
    inlined_at: Location | None = None  # the innermost call in the kernel's file

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f" inlined at {self.inlined_at}" if self.inlined_at else "")


@dataclass(frozen=True, eq=False, slots=True)
class Register:
    """A register of a function. The same object wherever it is named."""

    name: str
    type: str

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Immediate:
    """A number: the bits of an f32 or f64, an integer, which may be negative, or bits of whatever type is read."""

    bits: int
    type: str  # "int", "f32", "f64", "bits"


@dataclass(frozen=True, slots=True)
class Symbol:
    """The address of a variable, plus bytes; or a function, or a label."""

    name: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Special:
    """A special register: ``%tid.x``."""

    name: str


@dataclass(frozen=True, slots=True)
class Memory:
    """``[base + offset]``; ``extra`` is what else stands in the brackets (the coordinates of a tensor copy)."""

    base: Register | Symbol | None
    offset: int
    extra: Operand = None


@dataclass(frozen=True, slots=True)
class Vector:
    """``{a, b}``, or the parenthesized lists of a call."""

    elements: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """``d|p``."""

    first: Operand
    second: Operand


@dataclass(frozen=True, slots=True)
class Negated:
    """``!p``."""

    operand: Operand


Operand = Register | Immediate | Symbol | Special | Memory | Vector | Pair | Negated | None  # None: the sink ``_``


@dataclass(slots=True)
class Instruction:
    """One instruction."""

    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Register | None
    guard_negated: bool
    line: int  # in the PTX
    location: Location | None

    @property
    def name(self) -> str:
        """With its modifiers, as it is written."""
        return ".".join((self.opcode, *self.modifiers))

    @property
    def form(self) -> str:
        """The first modifier, by which several instructions of one opcode differ; "" if there is none."""
        return self.modifiers[0] if self.modifiers else ""

    @property
    def types(self) -> tuple[str, ...]:
        return tuple(modifier for modifier in self.modifiers if modifier in SIZES)

    @property
    def where(self) -> str:
        """For messages."""
        return f"{self.location}" if self.location else f"PTX line {self.line}"

    def __str__(self) -> str:
        guard = f"@{'!' * self.guard_negated}{self.guard} " if self.guard else ""
        return f"{guard}{self.name}"


@dataclass(frozen=True, slots=True)
class Label:
    name: str


@dataclass(slots=True)
class Variable:
    """A variable of a module or function, or a parameter."""

    name: str
    space: str  # "global", "const", "shared", "local", "param"
    type: str
    nbytes: int  # 0 for an array without a size
    align: int
    initial: tuple[int | Symbol, ...] = ()  # one a element, the rest is zero; a symbol stands for its generic address

    @property
    def element_bytes(self) -> int:
        return SIZES[self.type]


@dataclass(slots=True)
class Function:
    """A kernel or a device function. Without a body it is only declared."""

    name: str
    entry: bool
    parameters: list[Variable] = field(default_factory=list)
    results: list[Variable] = field(default_factory=list)
    registers: dict[str, Register] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    body: list[Instruction | Label] = field(default_factory=list)
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)  # "maxntid": (256, 1, 1)
    targets: dict[str, tuple[str, ...]] = field(default_factory=dict)  # of indirect branches
    defined: bool = False

    @property
    def label(self) -> str:
        """What people call it, for messages."""
        return kernel_label(self.name)


@dataclass(slots=True)
class Module:
    """What one text holds."""

    version: str = ""
    target: str = ""
    variables: dict[str, Variable] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)

    @property
    def entries(self) -> Iterator[Function]:
        return (function for function in self.functions.values() if function.entry)


_TOKEN = re.compile(
    r"""0[fF][0-9a-fA-F]{8} | 0[dD][0-9a-fA-F]{16} | 0[xX][0-9a-fA-F]+U? | 0[bB][01]+U? | \d+\.\d+(?:[eE][-+]?\d+)?
    | \d+U? | [%]?[A-Za-z_$][\w$]*(?:\.\w+(?:::\w+)*)* | \.[A-Za-z]\w*(?:::\w+)* | "(?:[^"\\]|\\.)*" | \S""",
    re.VERBOSE,
)
_LINKAGE = (".visible", ".extern", ".weak", ".common")
_SPACES = (".global", ".const", ".shared", ".local", ".param")
_ENDS = ("bra", "brx", "ret", "exit")


def parse(text: str) -> Module:
    """The functions and variables of a PTX text. `PtxError` tells the line that is not understood."""
    return _Parser(text).module()


class _Parser:
    def __init__(self, text: str) -> None:
        text = re.sub(r"/\*.*?\*/", lambda match: "\n" * match[0].count("\n"), text, flags=re.S)
        self.files: dict[int, str] = {}
        self.tokens: list[str] = []
        self.lines: list[int] = []
        self.locations: list[Location | None] = []
        location: Location | None = None
        calls: dict[tuple[str, ...], Location] = {}  # of file, line, column: the innermost place in the kernel's file
        in_section = False  # of debug data, which ends with a brace on a line of its own
        for number, line in enumerate(text.rstrip("\0").split("\n"), 1):
            code = line.split("//")[0] if '"' not in line else line
            words = code.split()
            if not words:
                continue
            if in_section:
                in_section = words[0] != "}"
                continue
            if words[0] == ".loc":
                # The file's number until all files are known.
                places = [tuple(each.split()[-3:]) for each in code.split(",")]
                own, at = places[0], places[-1]
                location = call = Location(own[0], int(own[1]))
                if len(places) > 1:
                    above = calls.get(at) or Location(at[0], int(at[1]))
                    if above.file != location.file:
                        call, location = above, location._replace(inlined_at=above)
                calls[own] = call
                continue
            if words[0] == ".file":
                self.files[int(words[1])] = code.split('"')[1]
                continue
            if words[0] == ".section":
                in_section = True
                continue
            found = _TOKEN.findall(code)
            self.tokens += found
            self.lines += [number] * len(found)
            self.locations += [location] * len(found)
        shown = _shown(self.files)

        def named(place: Location) -> Location:
            call = named(place.inlined_at) if place.inlined_at else None
            return Location(shown.get(int(place.file), place.file), place.line, call)

        names = {place: named(place) for place in set(self.locations) if place}
        self.locations = [names[place] if place else None for place in self.locations]
        self.at = 0

    # Tokens

    def peek(self, ahead: int = 0) -> str:
        return self.tokens[self.at + ahead] if self.at + ahead < len(self.tokens) else ""

    def next(self) -> str:
        if self.at >= len(self.tokens):
            raise PtxError("the text ends in the middle of a statement")
        self.at += 1
        return self.tokens[self.at - 1]

    def eat(self, token: str) -> bool:
        found = self.peek() == token
        self.at += found
        return found

    def need(self, token: str) -> None:
        if not self.eat(token):
            raise self.error(f"wanted {token!r}, got {self.peek()!r}")

    def error(self, why: str) -> PtxError:
        line = self.lines[min(self.at, len(self.lines) - 1)] if self.lines else 0
        return PtxError(f"PTX line {line}: {why}")

    def integer(self) -> int:
        negative = self.eat("-")
        try:
            value = int(self.next().rstrip("U"), 0)
        except ValueError:
            self.at -= 1
            raise self.error(f"wanted an integer, got {self.peek()!r}") from None
        return -value if negative else value

    # The module

    def module(self) -> Module:
        module = Module()
        self.result = module
        while self.at < len(self.tokens):
            word = self.next()
            if word == ".version":
                module.version = self.next()
            elif word == ".target":
                module.target = self.next()
                while self.eat(","):
                    self.next()
            elif word == ".address_size":
                if self.integer() != 64:
                    raise self.error("addresses of 64 bits are wanted")
            elif word in _LINKAGE or word == ";":
                continue
            elif word in _SPACES:
                for variable in self.variables(word[1:]):
                    module.variables[variable.name] = variable
            elif word in (".entry", ".func"):
                function = self.function(word == ".entry")
                if function.defined or function.name not in module.functions:
                    module.functions[function.name] = function
            elif word in (".pragma", ".alias"):
                while not self.eat(";"):
                    self.next()
            else:
                self.at -= 1
                raise self.error(f"directive {word!r} is not known")
        if not module.version or not module.target:
            raise PtxError("no .version or no .target: this is not PTX")
        return module

    def variables(self, space: str) -> Iterator[Variable]:
        """One declaration, which may have several variables."""
        align, kind, lanes = 0, "b8", 1
        while self.peek().startswith("."):
            word = self.next()
            if word == ".align":
                align = self.integer()
            elif word in (".v2", ".v4", ".v8"):
                lanes = int(word[2:])
            elif word[1:] in SIZES:
                kind = word[1:]
            elif word == ".ptr":
                while self.peek() in (".global", ".const", ".shared", ".local", ".param", ".align"):
                    if self.next() == ".align":
                        self.integer()
            elif word != ".attribute":
                raise self.error(f"{word!r} in a declaration is not known")
        while True:
            name = self.next()
            count = self.repeat() if self.peek() == "<" else 1
            elements, sized = lanes, True
            while self.eat("["):
                if self.peek() == "]":
                    sized = False
                else:
                    elements *= self.integer()
                self.need("]")
            initial = self.initial() if self.eat("=") else ()
            if initial and not sized:
                elements, sized = len(initial), True
            size = SIZES[kind]
            for index in range(count):
                full = name if count == 1 and self.peek(-1) != ">" else f"{name}{index}"
                yield Variable(full, space, kind, elements * size if sized else 0, align or size * lanes, initial)
            if not self.eat(","):
                break
            if space == "param" and self.peek().startswith("."):
                raise self.error("parameters are declared one by one")
        self.eat(";")

    def repeat(self) -> int:
        self.need("<")
        count = self.integer()
        self.need(">")
        return count

    def initial(self) -> tuple[int | Symbol, ...]:
        values: list[int | Symbol] = []
        depth = 0
        while True:
            if self.eat("{"):
                depth += 1
            elif self.eat("}"):
                depth -= 1
            elif depth and self.eat(","):
                continue
            else:
                values.append(self.initial_value())
            if not depth:
                return tuple(values)

    def initial_value(self) -> int | Symbol:
        operand = self.operand({})
        if isinstance(operand, Immediate):
            return operand.bits
        if isinstance(operand, Symbol):
            if operand.name == "generic" and self.eat("("):
                inner = self.operand({})
                self.need(")")
                operand = inner if isinstance(inner, Symbol) else operand
            if self.eat("+"):
                operand = Symbol(operand.name, operand.offset + self.integer())
            return operand
        raise self.error("an initial value is a number or an address")

    # A function

    def function(self, entry: bool) -> Function:
        function = Function("", entry)
        if not entry and self.eat("("):
            function.results = self.parameters()
        function.name = self.next()
        if self.eat("("):
            function.parameters = self.parameters()
        while self.peek().startswith("."):
            word = self.next()
            values = []
            while self.peek()[:1].isdigit():
                values.append(self.integer())
                self.eat(",")
            function.directives[word[1:]] = tuple(values)
        if self.eat(";"):
            return function
        self.need("{")
        function.defined = True
        self.body(function)
        return function

    def parameters(self) -> list[Variable]:
        found: list[Variable] = []
        while not self.eat(")"):
            space = self.next()
            if space not in (".param", ".reg"):
                raise self.error(f"wanted a parameter, got {space!r}")
            align, kind, lanes = 0, "b8", 1
            while self.peek().startswith("."):
                word = self.next()
                if word == ".align":
                    align = self.integer()
                elif word in (".v2", ".v4"):
                    lanes = int(word[2:])
                elif word[1:] in SIZES:
                    kind = word[1:]
                elif word in (".ptr", ".global", ".const", ".shared", ".local", ".param"):
                    continue
                else:
                    raise self.error(f"{word!r} in a parameter is not known")
            name, elements = self.next(), lanes
            while self.eat("["):
                elements *= self.integer()
                self.need("]")
            size = SIZES[kind]
            found.append(Variable(name, "param", kind, elements * size, align or size * lanes))
            self.eat(",")
        return found

    def body(self, function: Function) -> None:
        scopes: list[dict[str, str]] = [{}]  # what a name is called in the function as a whole
        self.current = function
        while True:
            word = self.peek()
            if word == "{":
                self.at += 1
                scopes.append({})
            elif word == "}":
                self.at += 1
                scopes.pop()
                if not scopes:
                    return
            elif word == ".reg":
                self.at += 1
                self.registers(function, scopes)
            elif word in _SPACES:
                self.at += 1
                for variable in self.variables(word[1:]):
                    self.declare(scopes, variable.name, function.variables)
                    variable.name = scopes[-1][variable.name]
                    function.variables[variable.name] = variable
            elif word == ".pragma":
                while not self.eat(";"):
                    self.next()
            elif self.peek(1) == ":":
                self.label(function, scopes)
            elif not word:
                raise PtxError(f"the text ends in the middle of function {function.label}")
            else:
                function.body.append(self.instruction(ChainMap(*reversed(scopes))))

    def declare(self, scopes: list[dict[str, str]], name: str, taken: dict[str, object] | dict[str, Variable]) -> str:
        full = name
        while full in taken or full in self.current.registers:
            full += "'"
        scopes[-1][name] = full
        return full

    def registers(self, function: Function, scopes: list[dict[str, str]]) -> None:
        kind = self.next()[1:]
        if kind in ("v2", "v4") or kind not in SIZES:
            raise self.error(f"registers of type .{kind} are not known")
        while True:
            name = self.next()
            several = self.peek() == "<"
            names = [f"{name}{index}" for index in range(self.repeat())] if several else [name]
            for each in names:
                full = self.declare(scopes, each, function.variables)
                function.registers[full] = Register(full, kind)
            if not self.eat(","):
                break
        self.need(";")

    def label(self, function: Function, scopes: list[dict[str, str]]) -> None:
        name = self.next()
        self.need(":")
        if self.peek() in (".branchtargets", ".callprototype", ".calltargets"):
            self.at += 1
            listed = []
            while not self.eat(";"):
                listed.append(self.next())
            function.targets[name] = tuple(word for word in listed if word != ",")
            return
        function.body.append(Label(name))

    # An instruction

    def instruction(self, names: Mapping[str, str]) -> Instruction:
        line, location = self.lines[self.at], self.locations[self.at]
        guard, negated = None, False
        if self.eat("@"):
            negated = self.eat("!")
            operand = self.operand(names)
            if not isinstance(operand, Register):
                raise self.error("a guard is a register")
            guard = operand
        word = self.next()
        opcode, *modifiers = word.split(".")
        if not opcode.isidentifier():
            self.at -= 1
            raise self.error(f"{word!r} is no instruction")
        while self.peek().startswith("."):
            modifiers.append(self.next()[1:])
        operands = []
        while not self.eat(";"):
            operands.append(self.operand(names))
            if not self.eat(",") and self.peek() != ";":
                raise self.error(f"wanted ',' or ';' after an operand of {word}, got {self.peek()!r}")
        return Instruction(opcode, tuple(modifiers), tuple(operands), guard, negated, line, location)

    def operand(self, names: Mapping[str, str]) -> Operand:
        word = self.next()
        if word in ("{", "("):
            elements = []
            while not self.eat("}" if word == "{" else ")"):
                elements.append(self.operand(names))
                self.eat(",")
            return Vector(tuple(elements))
        if word == "[":
            return self.memory(names)
        if word == "!":
            return Negated(self.operand(names))
        if word == "-":
            number = self.number()
            if number.type == "int":
                return Immediate(-number.bits, "int")
            return Immediate(number.bits ^ (1 << (31 if number.type == "f32" else 63)), number.type)
        if word[0].isdigit():
            self.at -= 1
            return self.number()
        first = self.named(word, names)
        if self.eat("|"):
            return Pair(first, self.operand(names))
        if isinstance(first, Symbol) and self.peek() in ("+", "-") and self.peek(1)[:1].isdigit():
            self.eat("+")
            return Symbol(first.name, self.integer())
        return first

    def number(self) -> Immediate:
        try:
            return _number(self.next())
        except ValueError:
            self.at -= 1
            raise self.error(f"wanted a number, got {self.peek()!r}") from None

    def named(self, word: str, names: Mapping[str, str]) -> Operand:
        if word == "_":
            return None
        full = names.get(word)
        if full is not None:
            return self.current.registers.get(full) or Symbol(full)
        if word.startswith("%"):
            base = word.split(".")[0]
            if base in names:
                raise self.error(f"an element of a vector register, {word}, is not known")
            return Special(word)
        if word == "WARP_SZ":
            return Immediate(32, "int")
        return Symbol(word)

    def memory(self, names: Mapping[str, str]) -> Memory:
        base: Operand = self.operand(names)
        offset = 0
        if isinstance(base, Symbol):
            base, offset = Symbol(base.name), base.offset
        elif isinstance(base, Immediate):
            offset, base = base.bits, None
        elif not isinstance(base, Register):
            raise self.error("an address is a register, a variable or a number")
        if self.eat("+") or self.peek() == "-":
            offset += self.integer()
        extra = self.operand(names) if self.eat(",") else None
        self.need("]")
        return Memory(base, offset, extra)


def _shown(files: dict[int, str]) -> dict[int, str]:
    """Each path cut down to as many of its last parts as no other one ends with."""
    shown = {}
    for number, path in files.items():
        parts = path.split("/")
        tails = ("/".join(parts[-count:]) for count in range(1, len(parts)))
        others = [f"/{other}" for other in files.values() if other != path]
        shown[number] = next((tail for tail in tails if not any(o.endswith(f"/{tail}") for o in others)), path)
    return shown


def _number(word: str) -> Immediate:
    if word[:2] in ("0f", "0F"):
        return Immediate(int(word[2:], 16), "f32")
    if word[:2] in ("0d", "0D"):
        return Immediate(int(word[2:], 16), "f64")
    if "." in word:
        (bits,) = struct.unpack("<Q", struct.pack("<d", float(word)))
        return Immediate(bits, "f64")
    return Immediate(int(word.rstrip("U"), 0), "int")
