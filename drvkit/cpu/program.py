"""Loaded images: functions that can be launched, and variables in memory."""

from __future__ import annotations

import os
import pickle
import re
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..build import DEFAULT_CACHE
from ..signature import kernel_label
from . import compiler
from .fault import ImageError
from .flow import Flow
from .lower import Lower
from .machine import machine
from .memory import Allocation, memory
from .ptx import SIZES, Module, PtxError, Symbol, parse
from .ptx import Function as PtxFunction

if TYPE_CHECKING:
    from .launch import Grid
    from .order import Order

__all__ = ["Function", "Program", "load", "usual_mode"]

MAX_THREADS = 1024
DEFAULT_SHARED_BYTES = 48 * 1024
SYMBOL = "kernel"  # of the code: each has an object file of its own


@dataclass
class Place:
    """An instruction, for reports."""

    name: str
    where: str  # "scale.cu:12"


@dataclass
class Compiled:
    """What is known of a kernel without its code."""

    parameters: list[tuple[int, int]]
    params_bytes: int
    shared_bytes: int
    dynamic_offset: int
    local_bytes: int
    warp_bytes: int
    registers: int
    uses_copies: bool
    timed: bool
    timers: list[int]
    granule: int
    globals: list[str]
    places: list[tuple[str, str]] = field(repr=False)
    stands: list[int] = field(repr=False)
    held: list[int] = field(repr=False)
    looks_offset: int


class Program:
    """A PTX text, compiled for this processor as its functions are used.

    Attributes:
        target: the architecture that the text is for: 90.
        functions: the kernels by name.
        variables: address and bytes of each ``__device__`` and ``__constant__`` variable.
    """

    def __init__(self, text: str, name: str, mode: str) -> None:
        self.name, self.text, self.mode = name, text, mode
        try:
            self.ptx = self._outline()
        except PtxError as error:
            raise ImageError("CUDA_ERROR_INVALID_PTX", str(error)) from None
        target = re.match(r"sm_(\d+)", self.ptx.target)
        if target is None or int(target[1]) > 90:
            why = f"PTX for {self.ptx.target}: the CPU device executes PTX of up to sm_90"
            raise ImageError("CUDA_ERROR_INVALID_PTX", why)
        self.target = int(target[1])
        self.allocations: list[Allocation] = []
        self.variables: dict[str, tuple[int, int]] = {}
        self.functions: dict[str, Function] = {}
        try:
            for entry in self.ptx.entries:
                if entry.defined:
                    self.functions[entry.name] = Function(self, entry)
        except PtxError as error:
            raise ImageError("CUDA_ERROR_INVALID_PTX", str(error)) from error
        self.__dict__.pop("parsed", None)  # whoever needs it has had it
        self._place_variables()

    def _outline(self) -> Module:
        """The text without the bodies of its functions, kept on disk: to read a long text takes a second."""
        key = compiler.digest("outline", self.text)
        entry = DEFAULT_CACHE.load(key)
        if entry is not None:
            outline: Module = pickle.loads(entry[1])
            return outline
        bare = {
            name: PtxFunction(each.name, each.entry, each.parameters, directives=each.directives, defined=each.defined)
            for name, each in self.parsed.functions.items()
        }
        outline = replace(self.parsed, functions=bare)
        DEFAULT_CACHE.store(key, {}, pickle.dumps(outline))
        return outline

    @cached_property
    def parsed(self) -> Module:
        return parse(self.text)

    def _place_variables(self) -> None:
        variables = [v for v in self.ptx.variables.values() if v.space in ("global", "const")]
        for variable in variables:
            align = max(variable.align, 256)
            allocation = memory.allocate(
                max(variable.nbytes, 1), "module", name=variable.name, align=align, written=True
            )
            self.allocations.append(allocation)
            memory.fill(allocation.address, b"\0", max(variable.nbytes, 1))
            self.variables[variable.name] = (allocation.address, variable.nbytes)
        for variable in variables:
            size = SIZES[variable.type]
            data = bytearray()
            for value in variable.initial:
                if isinstance(value, Symbol):
                    if value.name not in self.variables:
                        is_function = value.name in self.ptx.functions
                        why = "calls through pointers are not executed" if is_function else "that is no variable"
                        name = kernel_label(value.name)
                        why = f"variable {kernel_label(variable.name)} holds the address of {name}: {why}"
                        raise ImageError("CUDA_ERROR_INVALID_PTX", why)
                    value = self.variables[value.name][0] + value.offset
                data += (value & (1 << 8 * size) - 1).to_bytes(size, "little")
            address, _ = self.variables[variable.name]
            memory.write(address, bytes(data))

    def unload(self) -> None:
        """Give back its variables and the room of its launches."""
        for allocation in self.allocations:
            memory.free(allocation.address)
        self.allocations.clear()
        for function in self.functions.values():
            function.give_back()


_linked: dict[str, int] = {}  # where the code of kernels is


class Function:
    """A kernel.

    Attributes:
        name: in the image.
        label: what people call it, for reports.
        cluster_compiled_in: it has extents of clusters that stay.
        explicit_cluster: it was compiled for launches with clusters only.
        max_dynamic_shared: what a launch may ask for; can be set.
        settings: other attributes that can be set, as ``CUfunction_attribute`` calls them.
    """

    def __init__(self, program: Program, ptx: PtxFunction) -> None:
        self.program, self.name, self.label = program, ptx.name, ptx.label
        directives = ptx.directives
        threads = directives.get("reqntid") or directives.get("maxntid")
        self.max_threads = MAX_THREADS
        if threads:
            self.max_threads = min(MAX_THREADS, _product(threads))
        required = directives.get("reqnctapercluster") or (0,)
        self.cluster_compiled_in = any(required)
        width, height, depth = (*required, 1, 1)[:3] if self.cluster_compiled_in else (0, 0, 0)
        self.explicit_cluster = "explicitcluster" in directives
        self._hurry = len(program.text) > compiler.LONG
        self._key = compiler.digest("kernel", str(self._hurry), program.text, ptx.name, program.mode)
        self._code: bytes | None = None
        self._ir: str | None = None
        entry = DEFAULT_CACHE.load(self._key)
        if entry is not None:
            header, self._code = entry
            self.compiled = Compiled(**header)
            self.compiled.parameters = [(offset, size) for offset, size in self.compiled.parameters]
        else:
            self.compiled, self._ir = _lower(program.parsed, ptx.name, program.mode)
        self.spare: list[Any] = []  # slots of earlier launches
        self.max_dynamic_shared = max(0, DEFAULT_SHARED_BYTES - self.shared_bytes)
        self.settings = {
            "REQUIRED_CLUSTER_WIDTH": width,
            "REQUIRED_CLUSTER_HEIGHT": height,
            "REQUIRED_CLUSTER_DEPTH": depth,
            "PREFERRED_SHARED_MEMORY_CARVEOUT": -1,
            "NON_PORTABLE_CLUSTER_SIZE_ALLOWED": 0,
            "CLUSTER_SCHEDULING_POLICY_PREFERENCE": 0,
        }

    parameters = property(lambda self: self.compiled.parameters)
    params_bytes = property(lambda self: self.compiled.params_bytes)
    shared_bytes = property(lambda self: self.compiled.shared_bytes)
    local_bytes = property(lambda self: self.compiled.local_bytes)
    registers = property(lambda self: self.compiled.registers)

    @property
    def cluster(self) -> tuple[int, int, int] | None:
        """The one of all its launches, where that is set or was compiled in."""
        width, height, depth = (self.settings[f"REQUIRED_CLUSTER_{axis}"] for axis in ("WIDTH", "HEIGHT", "DEPTH"))
        return (width, height, depth) if width or height or depth else None

    @property
    def const_bytes(self) -> int:
        return sum(v.nbytes for v in self.program.ptx.variables.values() if v.space == "const")

    @cached_property
    def address(self) -> int:
        """Of the machine code: made now, found on disk, or here already for another module of the same text."""
        compiler.runtime()
        if self._key not in _linked:
            if self._code is None:
                assert self._ir is not None
                with DEFAULT_CACHE.alone(self._key):
                    entry = DEFAULT_CACHE.load(self._key)
                    if entry is not None:
                        self._code = entry[1]
                    else:
                        self._code = compiler.machine_code(self._ir, hurry=self._hurry)
                        DEFAULT_CACHE.store(self._key, vars(self.compiled), self._code)
            (_linked[self._key],) = compiler.link(self._code, SYMBOL)
        return _linked[self._key]

    def place(self, number: int) -> Place:
        return Place(*self.compiled.places[number])

    def grid(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        params: bytes,
        *,
        shared: int = 0,
        cluster: tuple[int, int, int] = (1, 1, 1),
        cooperative: bool = False,
        device: int = 0,
        order: Order | None = None,
    ) -> Grid:
        """A launch of it, of which nothing is done yet. ``shared`` is dynamic shared memory in bytes."""
        from .launch import Grid

        return Grid(
            self,
            grid,
            block,
            params,
            shared=shared,
            cluster=cluster,
            cooperative=cooperative,
            device=device,
            order=order,
        )

    def give_back(self) -> None:
        while self.spare:
            self.spare.pop().close()


def _product(numbers: tuple[int, ...]) -> int:
    result = 1
    for number in numbers:
        result *= number
    return result


def _lower(module: Module, name: str, mode: str) -> tuple[Compiled, str]:
    ptx = module.functions[name]
    flow = Flow(module, ptx, interruptible=mode == "explored")
    lower = Lower(flow, module.variables, SYMBOL, mode=mode)
    ir = lower.text()
    parameters = [(lower.parameters[parameter.name], parameter.nbytes) for parameter in ptx.parameters]
    live = [sum(max(SIZES[register.type], 1) for register in each.live_in) for each in flow.blocks]
    compiled = Compiled(
        parameters=parameters,
        params_bytes=lower.params_bytes,
        shared_bytes=lower.shared_bytes,
        dynamic_offset=lower.dynamic_offset,
        local_bytes=lower.local_bytes,
        warp_bytes=lower.warp_bytes,
        registers=min(255, 16 + max(live, default=0) // 4),
        uses_copies=lower.uses_copies,
        timed=flow.timed,
        timers=sorted(flow.timers),
        granule=lower.granule,
        globals=lower.globals,
        places=[(i.name, i.where) for i in lower.places],
        stands=lower.stands,
        held=lower.held,
        looks_offset=lower.looks_offset,
    )
    return compiled, ir


NEWEST_VERSION = (9, 0)  # of the PTX ISA in CUDA 13.0
_VERSION = re.compile(r"(?>\s+|//[^\n]*|/\*.*?\*/)*+\.version\s+(\d+)\.(\d+)\b", re.DOTALL)

MODES = ("checked", "unchecked", "explored", "raced")


def usual_mode() -> str:
    """How programs are loaded where nothing else is said: what ``DRVKIT_CPU_MODE`` in the environment says."""
    mode = _known(os.environ.get("DRVKIT_CPU_MODE") or "checked")
    if mode == "explored" and machine.choose is None:  # buffered stores would never be seen
        how = "run `python -m drvkit explore SCRIPT`, with `--seed S` for one run, or mark the test drvkit_explore"
        raise ValueError(f"DRVKIT_CPU_MODE=explored, but there is no schedule to follow: {how}")
    return mode


def _known(mode: str) -> str:
    if mode not in MODES:
        raise ValueError(f"DRVKIT_CPU_MODE: wanted one of {', '.join(MODES)}, got {mode!r}")
    return mode


def load(data: bytes, name: str = "", *, mode: str | None = None) -> Program:
    """A PTX text. `ImageError` for what is none, or has what the CPU device does not execute.

    ``mode``: with "unchecked" memory accesses are not looked at, which is faster; "explored" is for hostile schedules
    and weak memory; with "raced" races are looked for, from the first such program on, or, where that is the
    `usual_mode`, which is the default, from the first context on.
    """
    mode = _known(mode) if mode else usual_mode()
    if data[:4] == b"\x7fELF" or data[:4] == b"\x50\xed\x55\xba":
        kind = "a cubin" if data[:4] == b"\x7fELF" else "a fatbin"
        raise ImageError("CUDA_ERROR_NO_BINARY_FOR_GPU", f"{kind} is GPU code: the CPU device executes PTX")
    try:
        text = data.rstrip(b"\0").decode()
    except UnicodeDecodeError:
        text = ""
    first = _VERSION.match(text)
    if first is None:
        raise ImageError("CUDA_ERROR_INVALID_IMAGE", "neither PTX, which begins with .version, nor GPU code")
    if (int(first[1]), int(first[2])) > NEWEST_VERSION:
        why = f"PTX ISA {first[1]}.{first[2]}, where a driver of CUDA 13.0 knows 9.0"
        raise ImageError("CUDA_ERROR_UNSUPPORTED_PTX_VERSION", why)
    if mode == "raced":
        from .order import tracker

        tracker.begin()
    return Program(text, name, mode)
