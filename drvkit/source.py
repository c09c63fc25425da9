"""CUDA C++ text: found by name, closed over its includes, digested; and what its kernels' parameters are called.

A compiled kernel knows the size of each parameter but not its name. The names come from here: a small scanner reads
the declarations of `__global__` functions. It knows no macros and no preprocessor conditions; a kernel that it cannot
read with certainty is left out.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, takewhile
from pathlib import Path

__all__ = ["Header", "KernelDecl", "ParameterDecl", "Source"]

_PACKAGE = Path(__file__).resolve().parent
CUDA_SRC = (_PACKAGE / "cuda_src", _PACKAGE.parent / "cuda_src")  # in a wheel; in a checkout or an editable install


@dataclass(frozen=True)
class ParameterDecl:
    """One parameter as written: ``type`` is tidied (``const float*``, ``float[]``); an unnamed one has ``name`` ""."""

    type: str
    name: str


@dataclass(frozen=True)
class KernelDecl:
    """One ``__global__`` function; ``line`` counts from 1 in ``file``, a `Source.name` or a `Header.name`.

    ``template_parameters`` are the names of a template's parameters, "" for an unnamed one; a pack's ends with "...".
    """

    name: str
    qualified: str
    parameters: tuple[ParameterDecl, ...]
    extern_c: bool
    template: bool
    line: int
    file: str
    template_parameters: tuple[str, ...] = ()

    def bound(self, expression: str) -> dict[str, str]:
        """What a name expression (``"k<float,4>"``) gives for the template's parameters, by their names: for those
        before the first pack, and not for what is left to its default."""
        tokens = [match[0] for match in _TOKEN.finditer(_blanked(expression))]
        opening = tokens.index("<") if "<" in tokens else len(tokens)
        arguments = _pieces(tokens[opening + 1 : -1]) if tokens[-1:] == [">"] else None
        named = takewhile(lambda name: not name.endswith("..."), self.template_parameters)
        return {name: _spelled(piece) for name, piece in zip(named, arguments or (), strict=False) if name and piece}


@dataclass(frozen=True)
class Header:
    """One project header; ``name`` is how every include of the closure spells it."""

    name: str
    text: str
    path: Path


@dataclass(frozen=True)
class Source:
    """The text of a .cu file and of every project header that it can reach.

    ``#include "..."`` is looked for beside the including file, then in cuda_src, whether or not a preprocessor
    condition leaves it out. Each header has one name in the whole closure, and the includes in ``text`` and in the
    headers are respelled to it: NVRTC goes by the spelling alone. ``#include <...>`` belongs to the toolkit.
    """

    name: str
    text: str
    path: Path | None
    includes: tuple[Header, ...]

    @classmethod
    def find(cls, name: str | os.PathLike[str], *more_places: str | os.PathLike[str]) -> Source:
        """The source called ``name`` (".cu" may be left out) in ``more_places``, cuda_src or the current directory.

        A `Path`, and a string that starts with "/" or ".", is the file itself. `FileNotFoundError` says which places
        were looked in, also for a header that is missing.
        """
        if not isinstance(name, str | os.PathLike):
            raise TypeError(f"source: wanted a name or a path, got {name!r}")
        file = os.fspath(name)
        if not Path(file).name:
            raise ValueError(f"source: wanted a name or a path, got {name!r}")
        file = file if file.endswith(".cu") else file + ".cu"
        if isinstance(name, os.PathLike) or file.startswith(".") or os.path.isabs(file):
            places = [Path()]
        else:
            places = [*map(Path, more_places), *CUDA_SRC, Path()]
        for place in places:
            path = Path(os.path.abspath(place / file))
            if path.is_file():
                inside = path.name if place == Path() else Path(file).as_posix()
                return cls._closed(inside, path.read_text(encoding="utf-8"), path)
        known = {path.stem for place in places for path in (place / file).parent.glob("*.cu")}
        close = difflib.get_close_matches(Path(file).stem, sorted(known))
        raise FileNotFoundError(
            f"no {file} in: {', '.join(str(place.absolute()) for place in places)}"
            + (f"; there is {', '.join(close)}" if close else "")
        )

    @classmethod
    def from_text(cls, text: str, name: str = "kernel.cu") -> Source:
        """A source that is no file; its quoted includes are looked for in cuda_src."""
        for what, given in (("text", text), ("name", name)):
            if not isinstance(given, str):
                raise TypeError(f"source: {what}: wanted str, got {type(given).__name__}")
        return cls._closed(name, text, None)

    @classmethod
    def _closed(cls, name: str, text: str, path: Path | None) -> Source:
        closure = _Closure(path.parent if path else None)
        text = closure.respelled(text, name, path.parent if path else None)
        return cls(name, text, path, tuple(closure.headers))

    @cached_property
    def digest(self) -> str:
        """sha256 (hex) over all names and texts."""
        closure = [[self.name, self.text], *([header.name, header.text] for header in self.includes)]
        return hashlib.sha256(json.dumps(closure).encode()).hexdigest()

    def kernels(self) -> tuple[KernelDecl, ...]:
        """The ``__global__`` functions of the text, then of the headers; of several declarations, the definition."""
        return self._kernels

    def kernel(self, name: str, count: int | None = None) -> KernelDecl | None:
        """The kernel of this plain or qualified name; template arguments in it are ignored.

        Overloads are told apart by ``count``, their number of parameters. None if it is unknown or still ambiguous.
        """
        name = re.sub(r"\s", "", name.split("<")[0]).removeprefix("::")
        found = [
            kernel
            for kernel in self._kernels
            if name in (kernel.name, kernel.qualified) and count in (None, len(kernel.parameters))
        ]
        return found[0] if len(found) == 1 else None

    @cached_property
    def _kernels(self) -> tuple[KernelDecl, ...]:
        files = [(self.name, self.text), *((header.name, header.text) for header in self.includes)]
        blanked = [(file, _blanked(text)) for file, text in files]
        macros = frozenset(name for _, text in blanked for name in _DEFINE.findall(text))
        kernels: dict[tuple[str, tuple[str, ...]], KernelDecl] = {}
        defined = set()
        for file, text in blanked:
            for kernel, has_body in _declarations(text, file, macros):
                key = (kernel.qualified, tuple(parameter.type for parameter in kernel.parameters))
                if key not in kernels or (has_body and key not in defined):
                    kernels[key] = kernel
                if has_body:
                    defined.add(key)
        return tuple(kernels.values())


class _Closure:
    """Collects the headers that can be reached from one text, and gives each its one name."""

    def __init__(self, home: Path | None) -> None:
        self.headers: list[Header] = []
        self._home = home
        self._names: dict[Path, str] = {}

    def respelled(self, text: str, file: str, directory: Path | None) -> str:
        """The text with each quoted include spelled by its header's name; the headers are collected on the way."""
        pieces, end = [], 0
        for include in _INCLUDE.finditer(_blanked(text)):
            spelled = text[include.start(1) : include.end(1)]
            path = self._find(spelled, directory, f"{file}:{_line(text, include.start(1))}")
            pieces += [text[end : include.start(1)], self._name(path)]
            end = include.end(1)
        return "".join([*pieces, text[end:]])

    def _find(self, spelled: str, directory: Path | None, where: str) -> Path:
        places = [*([directory] if directory else []), *CUDA_SRC]
        for place in places:
            if (place / spelled).is_file():
                return Path(os.path.abspath(place / spelled))
        raise FileNotFoundError(
            f'{where}: no "{spelled}" in: {", ".join(map(str, places))} (a header of the toolkit is included with <>)'
        )

    def _name(self, path: Path) -> str:
        if path not in self._names:
            self._names[path] = name = self._new_name(path)  # known before it is read: headers may include each other
            text = path.read_text(encoding="utf-8")
            self.headers.append(Header(name, self.respelled(text, name, path.parent), path))
        return self._names[path]

    def _new_name(self, path: Path) -> str:
        name = path.as_posix()
        for place in [*CUDA_SRC, *([self._home] if self._home else [])]:
            if path.is_relative_to(place):
                name = path.relative_to(place).as_posix()
                break
        return name if name not in self._names.values() else path.as_posix()


# ---- the scanner --------------------------------------------------------------------------------------------------

_NUMBER = r"\b\d(?:'?[\w.])*"  # with digit separators, which would else begin a character
_OPAQUE = re.compile(
    rf"""(?P<keep>{_NUMBER}|"C")
    | //(?:\\[\s\S]|[^\\\n])* | /\*[\s\S]*?(?:\*/|\Z)
    | (?:u8|[uUL])?R"(?P<tag>[^\s()\\]{{0,16}})\([\s\S]*?\)(?P=tag)"
    | "(?:\\[\s\S]|[^"\\\n])*" | '(?:\\[\s\S]|[^'\\\n])*'""",
    re.VERBOSE,
)
_DIRECTIVE = re.compile(r"^[ \t]*#(?:\\\n|[^\n])*", re.MULTILINE)
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]*)"', re.MULTILINE)
_DEFINE = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)", re.MULTILINE)
_TOKEN = re.compile(rf'"C"|"\s*"|[A-Za-z_]\w*|{_NUMBER}|::|->|<<|<=|>=|&&|\.\.\.|\S')

_CLOSER = {"(": ")", "[": "]", "{": "}", "<": ">"}
# fmt: off
_WITH_ARGUMENTS = {  # what may stand before a parenthesis in a declaration and is not the function's name
    "__launch_bounds__", "__cluster_dims__", "__maxnreg__", "__block_size__", "__attribute__", "__align__", "alignas",
    "decltype", "noexcept", "requires",
}
_QUALIFIERS = {
    "const", "volatile", "__restrict__", "__restrict", "__grid_constant__", "struct", "class", "enum", "union",
    "typename",
}
_BUILTIN_TYPES = {
    "void", "bool", "char", "short", "int", "long", "float", "double", "signed", "unsigned", "auto",
}
# fmt: on


def _line(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1


def _blanked(text: str) -> str:
    """The text with comments and the insides of strings made spaces; offsets and lines stay."""

    def blank(match: re.Match[str]) -> str:
        found = match[0]
        if match["keep"]:
            return found
        spaces = re.sub(r"[^\n]", " ", found)
        return spaces if found[0] == "/" else f'"{spaces[1:-1]}"'

    return _OPAQUE.sub(blank, text)


def _is_word(token: str) -> bool:
    return token[0].isalpha() or token[0] == "_"


def _after(tokens: list[str], start: int) -> int:
    """The index behind the bracket that closes the one at ``start``; the end where none does."""
    kinds = "([{<" if tokens[start] == "<" else "([{"
    waiting: list[str] = []
    for index in range(start, len(tokens)):
        token = tokens[index]
        if token in kinds and not (token == "<" and waiting[-1:] not in ([], [">"])):  # in brackets < is less-than
            waiting.append(_CLOSER[token])
        elif waiting[-1:] == [token]:
            waiting.pop()
            if not waiting:
                return index + 1
    return len(tokens)


def _declarations(text: str, file: str, macros: frozenset[str]) -> Iterator[tuple[KernelDecl, bool]]:
    """The kernels declared in a blanked text, each with whether a body follows."""
    matches = list(_TOKEN.finditer(_DIRECTIVE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)))
    tokens = [match[0] for match in matches]
    scopes: list[tuple[str, bool]] = []  # namespace ("" if none), extern "C"
    start = index = 0
    while index < len(tokens):
        token, behind = tokens[index], index + 1
        if token in ("(", "[") or (token == "<" and index and tokens[index - 1] == "template"):
            behind = _after(tokens, index)
        elif token in ("{", "}", ";"):
            head = tokens[start:index]
            scope = _scope(head) if token == "{" else None
            if scope:
                scopes.append(scope)
            elif token == "}":
                del scopes[-1:]
            else:
                kernel = _kernel(head, scopes, macros)
                if kernel:
                    at, name, qualified, parameters, extern_c, template, names = kernel
                    line = _line(text, matches[start + at].start())
                    yield KernelDecl(name, qualified, parameters, extern_c, template, line, file, names), token == "{"
                if token == "{":
                    behind = _after(tokens, index)  # nothing in a body or a class is a kernel
            start = behind
        index = behind


def _scope(head: list[str]) -> tuple[str, bool] | None:
    """What a brace behind these tokens opens, if it is a namespace or an ``extern "C"`` block."""
    if head[-2:] == ["extern", '"C"']:
        return "", True
    if "namespace" in head:
        name = _without_attributes(head[head.index("namespace") + 1 :])
        return "".join(token for token in name if token != "inline"), False
    return None


def _kernel(
    head: list[str], scopes: list[tuple[str, bool]], macros: frozenset[str]
) -> tuple[int, str, str, tuple[ParameterDecl, ...], bool, bool, tuple[str, ...]] | None:
    """Reads one declaration: where its name stands, then what `KernelDecl` has of it, without line and file."""
    if "__global__" not in head:
        return None
    begin, template = 0, "template" in head
    names: tuple[str, ...] = ()
    if template:
        opening = head.index("template") + 1
        if head[opening : opening + 1] != ["<"]:
            return None  # an explicit instantiation
        begin = _after(head, opening)
        names = tuple(map(_template_parameter, _pieces(head[opening + 1 : begin - 1]) or ()))
    opening, index = 0, begin
    while index < len(head):
        if head[index] == "(" and index > begin and head[index - 1] not in _WITH_ARGUMENTS:
            opening = index
        index = _after(head, index) if head[index] in ("(", "[") else index + 1
    at = opening - 1
    if at < begin or not _is_word(head[at]) or head[at] in macros or "void" not in head[begin:at]:
        return None
    parameters = _parameters(head[opening + 1 : _after(head, opening) - 1], macros)
    if parameters is None:
        return None
    spelled, index = head[at], at
    while index - 2 >= begin and head[index - 1] == "::" and _is_word(head[index - 2]):
        index -= 2
        spelled = f"{head[index]}::{spelled}"
    qualified = "::".join([name for name, _ in scopes if name] + [spelled])
    extern_c = '"C"' in head or any(extern_c for _, extern_c in scopes)
    return at, head[at], qualified, parameters, extern_c, template, names


def _pieces(tokens: list[str]) -> list[list[str]] | None:
    """The tokens between the commas that are in no brackets; None if it is not certain what is a bracket."""
    pieces: list[list[str]] = [[]]
    index = 0
    while index < len(tokens):
        token = tokens[index]
        behind = _after(tokens, index) if token in _CLOSER else index + 1
        if token == ",":
            pieces.append([])
        elif token == "<" and tokens[behind - 1] != ">":
            return None  # a less-than, or a template that does not end here
        else:
            pieces[-1] += tokens[index:behind]
        index = behind
    return pieces


def _template_parameter(tokens: list[str]) -> str:
    """The name of one parameter of a template, as `KernelDecl.template_parameters` has it."""
    tokens = tokens[: tokens.index("=")] if "=" in tokens else tokens
    named = len(tokens) > 1 and _is_word(tokens[-1]) and tokens[-1] not in _QUALIFIERS | _BUILTIN_TYPES
    name = tokens[-1] if named and tokens[-2] != "::" else ""
    return f"{name}..." if "..." in tokens else name


def _parameters(tokens: list[str], macros: frozenset[str]) -> tuple[ParameterDecl, ...] | None:
    """The parameters between a kernel's parentheses; None where a macro may hide some."""
    pieces = _pieces(tokens)
    if pieces is None:
        return None
    if pieces in ([[]], [["void"]]):
        return ()
    parameters = []
    for piece in map(_without_attributes, pieces):
        if "=" in piece:
            piece = piece[: piece.index("=")]
        calls = any(word in macros and then == "(" for word, then in pairwise(piece))
        if not piece or calls or (len(piece) == 1 and piece[0] in macros):
            return None
        parameters.append(_parameter(piece, macros))
    return tuple(parameters)


def _parameter(tokens: list[str], macros: frozenset[str]) -> ParameterDecl:
    at = _name_position(tokens, macros)
    if at is None:
        return ParameterDecl(_spelled(tokens), "")
    return ParameterDecl(_spelled(tokens[:at] + tokens[at + 1 :]), tokens[at])


def _name_position(tokens: list[str], macros: frozenset[str]) -> int | None:
    """Where the parameter's own name stands among its tokens."""
    for index, (token, then) in enumerate(pairwise(tokens)):
        if token == "(" and then in ("*", "&", "&&"):  # a pointer to a function or an array
            inner = range(index + 1, _after(tokens, index))
            return next((at for at in inner if _is_word(tokens[at]) and tokens[at] not in _QUALIFIERS | macros), None)
    at = len(tokens) - 1
    while at > 0 and tokens[at] == "]":  # back over the extents of an array
        depth = 1
        while at > 0 and depth:
            at -= 1
            depth += (tokens[at] == "]") - (tokens[at] == "[")
        at -= 1
    before = tokens[:at]
    is_name = (
        at > 0
        and _is_word(tokens[at])
        and tokens[at] not in _QUALIFIERS | _BUILTIN_TYPES | macros
        and before[-1] not in ("::", "struct", "class", "enum", "union", "typename")
        and any(_is_word(token) and token not in _QUALIFIERS for token in before)
    )
    return at if is_name else None


def _without_attributes(tokens: list[str]) -> list[str]:
    """The tokens without ``[[...]]``."""
    kept: list[str] = []
    index = 0
    while index < len(tokens):
        if tokens[index : index + 2] == ["[", "["]:
            index = _after(tokens, index)
        else:
            kept.append(tokens[index])
            index += 1
    return kept


def _spelled(tokens: Iterable[str]) -> str:
    text = ""
    for token in tokens:
        spaced = text and (token[0].isalnum() or token[0] == "_") and (text[-1].isalnum() or text[-1] in "_>*&)],")
        text += " " + token if spaced else token
    return text
