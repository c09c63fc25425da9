"""From the blocks of a kernel to one LLVM function that runs a warp.

``LOWERINGS`` has a function for each opcode: it reads operands from a `Lower`, writes IR, and writes the result back.
The same function serves vectors of 32 lanes and scalars, which stand for registers that have one value in a launch.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..flow import Block, Flow, acts, holds, ordering, polls
from ..ir import BRANCH_WEIGHTS, Builder, Value, constant, element, lanes_of, vector
from ..ptx import (
    SIZES,
    Immediate,
    Instruction,
    Memory,
    Negated,
    Operand,
    Pair,
    PtxError,
    Register,
    Special,
    Symbol,
    Variable,
    Vector,
)
from ..state import EXITED, HELD, LOOKS, REGISTERS, BlockState, Code, GridState, LookState, WarpState

__all__ = ["LOWERINGS", "WARP", "Lower", "UnsupportedError", "kind_of", "lowers"]

WARP = 32
SAVES = 1000  # registers times blocks from which on each register has its place in the warp's state
LOWERINGS: dict[str, Callable[[Lower, Instruction], None]] = {}


class UnsupportedError(PtxError):
    """An instruction that the CPU device does not execute."""


def lowers(*opcodes: str) -> Callable[[Callable[[Lower, Instruction], None]], Callable[[Lower, Instruction], None]]:
    """The decorated function writes the IR of these opcodes; one with a modifier (``st.async``) goes before."""

    def register(function: Callable[[Lower, Instruction], None]) -> Callable[[Lower, Instruction], None]:
        for opcode in opcodes:
            assert opcode not in LOWERINGS, opcode
            LOWERINGS[opcode] = function
        return function

    return register


_FLOATS = {"f16": "half", "f32": "float", "f64": "double", "pred": "i1"}


def kind_of(type_: str) -> str:
    """How LLVM calls a PTX type; what has no type there (bf16, packed types) is an integer."""
    return _FLOATS.get(type_) or f"i{8 * SIZES[type_]}"


class Lower:
    """A kernel on its way to IR.

    Attributes:
        b: what is written so far.
        reaches: whether it makes addresses of other blocks' shared memory.
        lanes: of the instruction that is lowered now: 32, or 1 for a register with one value in a launch.
        mask: the lanes that run the current block (<32 x i1>), and ``mask_bits``, the same as an i32.
        gathered: what is known of this block: 1 if all lanes that live run it, 2 if all 32 do.
        weak: whether stores are buffered, and the warp stops where others may notice something.
        raced: whether races are looked for.
        places: instructions that may fault or stop, by the number that the runtime gets.
        stands: of each block, the place of the first instruction that does more than compute.
        held: of each block, the place of the bar.warp.sync after which lanes go on with it, or -1.
    """

    def __init__(self, flow: Flow, variables: dict[str, Variable], symbol: str, *, mode: str) -> None:
        self.flow, self.symbol, self.mode = flow, symbol, mode
        self.checks, self.weak, self.raced = mode != "unchecked", mode == "explored", mode == "raced"
        self.granule = 4  # bytes: the least that an access touches, but no more than 4
        self.b = Builder()
        self.helpers: dict[str, str] = {}  # functions that only this kernel uses: name -> text
        self.places: list[Instruction] = []
        self.module_variables = variables
        self.globals = [name for name, variable in variables.items() if variable.space in ("global", "const")]
        self.uses_copies = False  # cp.async
        self.reaches = any(i.opcode == "mapa" for block in flow.blocks for i in block.instructions)
        self.buffers: dict[str, Value] = {}
        self.lanes = WARP
        self.i: Instruction  # that is lowered now
        self.carry: Value | None = None  # the condition code, where the current block has set it
        self.flushed: dict[Register, Value] = {}  # values in ``env`` that have no subnormal f32 numbers
        self.gathered = 0
        self._lay_out()

    # Memory that the kernel needs

    def _lay_out(self) -> None:
        """Places of shared and local variables in their windows, and of parameters."""
        self.offsets: dict[str, int] = {}
        self.shared_bytes = self.local_bytes = 0
        variables = {**self._shared_of_module(), **self.flow.variables}
        dynamic = [name for name, variable in variables.items() if variable.space == "shared" and not variable.nbytes]
        for name, variable in variables.items():
            if name in dynamic:
                continue
            if variable.space == "shared":
                self.offsets[name] = _aligned(self.shared_bytes, variable.align)
                self.shared_bytes = self.offsets[name] + variable.nbytes
            elif variable.space in ("local", "param"):
                self.offsets[name] = _aligned(self.local_bytes, variable.align)
                self.local_bytes = self.offsets[name] + max(variable.nbytes, 1)
        self.local_bytes = _aligned(self.local_bytes, 16)
        self.dynamic_offset = _aligned(self.shared_bytes, max((variables[name].align for name in dynamic), default=16))
        self.offsets |= dict.fromkeys(dynamic, self.dynamic_offset)
        self.parameters: dict[str, int] = {}
        self.params_bytes = 0
        for parameter in self.flow.kernel.parameters:
            self.parameters[parameter.name] = _aligned(self.params_bytes, parameter.align)
            self.params_bytes = self.parameters[parameter.name] + parameter.nbytes

    def _shared_of_module(self) -> dict[str, Variable]:
        """Those that the kernel names."""
        named: set[str] = set()

        def look(operand: Operand) -> None:
            if isinstance(operand, Symbol):
                named.add(operand.name)
            elif isinstance(operand, Memory):
                look(operand.base)
            elif isinstance(operand, Vector):
                for each in operand.elements:
                    look(each)

        for block in self.flow.blocks:
            for i in block.instructions:
                for operand in i.operands:
                    look(operand)
        return {n: v for n, v in self.module_variables.items() if v.space == "shared" and n in named}

    # The function

    def text(self) -> str:
        """The module's IR."""
        b = self.b
        flow = self.flow
        self.crossing = sorted(
            frozenset().union(*(block.live_in for block in flow.blocks)), key=lambda register: register.name
        )
        # What crosses blocks is kept in slots that LLVM makes registers of, and saved wherever the warp may stop. In a
        # long kernel that is a long piece of code at very many places: there the slots are what would be saved.
        self.in_place = len(self.crossing) * len(flow.blocks) > SAVES
        self.register_offsets: dict[Register, int] = {}
        offset = REGISTERS
        for register in self.crossing:
            self.register_offsets[register] = offset
            offset += -(-max(SIZES[register.type], 1) * WARP // 64) * 64
        self.looks_offset = offset
        self.warp_bytes = -(-(offset + (LOOKS * ctypes.sizeof(LookState) if self.flow.polling else 0)) // 64) * 64
        self.starts = {0}  # blocks at which a warp may stop with all its lanes
        self._entry()
        self._dispatch()
        for number, block in enumerate(flow.blocks):
            self._block(number, block)
        self._start()
        self.stands = [
            self.place(next(filter(acts, block.instructions), block.instructions[0])) for block in flow.blocks
        ]
        self.held = [-1] * len(flow.blocks)
        for block in flow.blocks:
            if block.last is not None and holds(block.last):
                self.held[block.successors[0]] = self.place(block.last)
        b.label("fault")
        b.line(f"ret i32 {Code.FAULT}")
        body = b.function(f"i32 @{self.symbol}(ptr noalias %warp, ptr noalias %block, ptr noalias %grid)")
        declarations = "\n".join(text for name, text in b.declared.items() if name not in self.helpers)
        return "\n".join([BRANCH_WEIGHTS, declarations, *self.helpers.values(), body])

    def _entry(self) -> None:
        b = self.b
        self.warp, self.block, self.grid = Value("%warp", "ptr"), Value("%block", "ptr"), Value("%grid", "ptr")
        self.slots = {
            register: b.at(self.warp, offset) if self.in_place else b.alloca(vector(self.kind(register), WARP), 64)
            for register, offset in self.register_offsets.items()
        }
        self.pc_slot = b.alloca(f"<{WARP} x i32>", 128)
        self.mask_slot = b.alloca(f"<{WARP} x i1>", 8)
        self.other_slot = b.alloca("i32", 4)  # the lowest pc of the lanes that do not run
        self.fuel_slot = b.alloca("i64", 8)
        b.store(b.load(f"<{WARP} x i32>", self.warp, align=64), self.pc_slot, align=128)
        b.store(self.grid_field("fuel"), self.fuel_slot, align=8)
        self.lane_id = Value(f"<{', '.join(f'i32 {lane}' for lane in range(WARP))}>", f"<{WARP} x i32>")
        self.shared_base = self.block_field("shared_base")
        self.shared_offset = self.block_field("shared_offset")
        self.env: dict[Register, Value] = {}
        self.once: dict[Register, Value] = {}  # registers with one value in the launch
        self.specials: dict[tuple[str, int], Value] = {}
        self.lanes = 1
        for i in self.flow.uniform.values():
            self.i = i
            self._lower(i)
        self.lanes = WARP
        for name in ("%tid.x", "%tid.y", "%tid.z"):
            self.special(name)
        if self.local_bytes:
            base = b.splat(self.warp_field("local"), WARP)
            steps = b.op(
                "mul",
                b.cast("zext", self.lane_id, "i64"),
                b.splat(b.cast("zext", self.grid_field("local_bytes"), "i64"), WARP),
            )
            self.local_base = b.op("add", base, steps)
        b.jump("start")

    def _dispatch(self) -> None:
        """Which block runs next, where the lanes may stand apart."""
        b = self.b
        b.label("dispatch")
        pc = b.load(f"<{WARP} x i32>", self.pc_slot, align=128)
        lowest = b.call("i32", f"llvm.vector.reduce.umin.v{WARP}i32", pc)
        # Those who polled last come last, and of many who poll the next: one of them may wait for another.
        after = b.compare("icmp sgt", pc, b.splat(self.warp_field("polled"), WARP))
        following = b.select(after, pc, constant(pc.type, EXITED))
        following = b.call("i32", f"llvm.vector.reduce.umin.v{WARP}i32", following)
        none = b.compare("icmp eq", following, constant("i32", EXITED))
        chosen = b.select(none, lowest, following)
        chosen_lanes = b.compare("icmp eq", pc, b.splat(chosen, WARP))
        others = b.select(chosen_lanes, constant(pc.type, EXITED), pc)
        other = b.call("i32", f"llvm.vector.reduce.umin.v{WARP}i32", others)
        b.store(constant("i32", -1), self.warp_place("polled"), align=4)
        b.store(chosen_lanes, self.mask_slot, align=4)
        b.store(other, self.other_slot, align=4)
        cases = " ".join(f"i32 {number}, label %B{number}" for number in range(len(self.flow.blocks)))
        b.line(f"switch {chosen}, label %done [{cases}]")
        b.label("done")
        if any(holds(i) for block in self.flow.blocks for i in block.instructions):
            with b.when(b.compare("icmp ne", chosen, constant("i32", EXITED)), likely=False):
                self._release(pc)
        b.line(f"ret i32 {Code.DONE}")

    def _release(self, pc: Value) -> None:
        """Let those lanes go on that are held and need not wait any more; if nobody can go on, it is a fault."""
        b = self.b
        after = b.call(
            pc.type, self.helper("released", _released), pc, b.load(pc.type, self.warp_place("awaited"), align=64)
        )
        b.store(after, self.pc_slot, align=128)
        lowest = b.call("i32", f"llvm.vector.reduce.umin.v{WARP}i32", after)
        stuck = b.name("stuck")
        b.branch(b.compare("icmp ult", lowest, constant("i32", HELD)), "dispatch", stuck)
        b.label(stuck)
        b.store(after, self.warp_place("pc"), align=64)
        lanes = b.compare("icmp ne", after, constant(pc.type, EXITED))
        lane = b.call("i32", "llvm.cttz.i32", b.bits(lanes), constant("i1", 0))
        self._fault("warp divergence", constant("i32", 0), lane)

    def _start(self) -> None:
        """Where the warp goes on: with the registers that its block needs, or, if lanes stand apart, with all."""
        b = self.b
        cases = " ".join(f"i32 {number}, label %start{number}" for number in sorted(self.starts))
        b.label("start")
        b.line(f"switch {self.warp_field('together')}, label %apart [{cases}]")
        b.label("apart")
        self._restore(self.crossing)
        b.jump("dispatch")
        for number in sorted(self.starts):
            b.label(f"start{number}")
            self._restore(self._needed(number))
            pc = b.load(f"<{WARP} x i32>", self.pc_slot, align=128)
            b.store(b.compare("icmp eq", pc, self.pcs(number)), self.mask_slot, align=4)
            b.store(constant("i32", EXITED), self.other_slot, align=4)
            b.jump(f"B{number}")

    def _needed(self, number: int) -> list[Register]:
        return [register for register in self.crossing if register in self.flow.blocks[number].live_in]

    def _restore(self, registers: Sequence[Register]) -> None:
        b = self.b
        for register in () if self.in_place else registers:
            place = b.at(self.warp, self.register_offsets[register])
            if register.type == "pred":
                loaded = b.lanes(b.load("i32", place, align=4))
            else:
                loaded = b.load(vector(self.kind(register), WARP), place, align=min(64, SIZES[register.type] * WARP))
            b.store(loaded, self.slots[register], align=64)

    def _block(self, number: int, block: Block) -> None:
        b = self.b
        b.label(f"B{number}")
        self.env = {}
        self.carry = None
        self.mask = b.load(f"<{WARP} x i1>", self.mask_slot, align=4)
        self.mask_bits = b.bits(self.mask)
        self.gathered = 0
        self._instructions(number, block)
        if number not in self.flow.resumed:  # those are for lanes that had to wait; others come straight from here
            while not self.ended and len(block.successors) == 1 and block.successors[0] in self.flow.resumed:
                number, block = block.successors[0], self.flow.blocks[block.successors[0]]
                self._instructions(number, block)
        if self.ended:
            return
        last = block.last
        self._write_back(block.live_out)
        if self.weak and last is not None and ordering(last):
            self.suspend(Code.INTERRUPTED, last)
            return
        if last is not None and last.opcode == "trap":
            self.fault("trap", last)
            return
        if last is not None and last.opcode in ("ret", "exit"):
            self._exit(last, block)
        elif last is not None and last.opcode == "bra" and last.guard is not None:
            self._branch(last, block)
        elif last is not None and last.opcode == "brx":
            self._indirect(last, block)
        else:
            self.go(block.successors[0])

    def _instructions(self, number: int, block: Block) -> None:
        self.number, self.current, self.ended = number, block, False
        for i in block.instructions:
            if i is block.last and i.opcode in ("bra", "brx", "ret", "exit", "trap"):
                break
            for register in i.operands[:1] if i.operands else ():
                if isinstance(register, Register) and register in self.flow.uniform:
                    break
            else:
                self.i = i
                self._lower(i)
                if self.ended:
                    return

    def _lower(self, i: Instruction) -> None:
        lowering = LOWERINGS.get(".".join((i.opcode, *i.modifiers[:1]))) or LOWERINGS.get(i.opcode)
        if lowering is None:
            raise self.unsupported(i)
        try:
            lowering(self, i)
        except PtxError:
            raise
        except Exception as error:  # lowerings take it for granted that instructions are as the ISA has them
            raise self.flow.error(i, f"{i.name}: these operands and modifiers are not understood") from error

    def unsupported(self, i: Instruction | None = None, why: str = "") -> UnsupportedError:
        i = i or self.i
        reason = f" ({why})" if why else ""
        return UnsupportedError(f"{i.where}: kernel {self.flow.kernel.label}: {i.name} is not supported{reason}")

    # Control flow

    def _write_back(self, needed: frozenset[Register]) -> None:
        """What other blocks read goes to its slot, for the lanes that ran: if those are all that live, as a whole."""
        b = self.b
        for register in sorted(self.env, key=lambda register: register.name):
            if register in needed and register in self.slots:
                slot, value = self.slots[register], self.env[register]
                if not self.gathered:
                    value = b.select(self.mask, value, b.load(value.type, slot, align=64))
                b.store(value, slot, align=64)

    def _set_pc(self, target: Value) -> None:
        b = self.b
        pc = b.load(f"<{WARP} x i32>", self.pc_slot, align=128)
        b.store(b.select(self.mask, target, pc), self.pc_slot, align=128)

    def pcs(self, number: int) -> Value:
        return constant(f"<{WARP} x i32>", number)

    def go(self, target: int) -> None:
        """All lanes that run go to a block: at once if no other lane has to come first."""
        b = self.b
        if (self.number, target) in self.flow.back_edges:
            self._loop(target)
        if self.gathered:
            b.jump(f"B{target}")
            return
        other = b.load("i32", self.other_slot, align=4)
        straight, detour = b.name("go"), b.name("detour")
        b.branch(b.compare("icmp ult", constant("i32", target), other), straight, detour, likely=True)
        b.label(detour)
        self._set_pc(self.pcs(target))
        b.jump("dispatch")
        b.label(straight)
        b.jump(f"B{target}")

    def _branch(self, i: Instruction, block: Block) -> None:
        b = self.b
        taken, fallen = block.successors
        assert i.guard is not None
        condition = self.read(i.guard, "pred")
        if i.guard_negated:
            taken, fallen = fallen, taken
        bits = b.op("and", b.bits(condition), self.mask_bits)
        nobody, split, all_ = b.name("fallen"), b.name("split"), b.name("taken")
        some = b.name("some")
        b.branch(b.compare("icmp eq", bits, constant("i32", 0)), nobody, some)
        b.label(some)
        b.branch(b.compare("icmp eq", bits, self.mask_bits), all_, split)
        b.label(nobody)
        self.go(fallen)
        b.label(all_)
        self.go(taken)
        b.label(split)
        self._set_pc(b.select(condition, self.pcs(taken), self.pcs(fallen)))
        for target in (taken, fallen):
            if (self.number, target) in self.flow.polling:
                self.stop(Code.POLLING, polled=target)
                return
        b.jump("dispatch")

    def _indirect(self, i: Instruction, block: Block) -> None:
        b = self.b
        index = self.read(i.operands[0], "u32")
        target = self.pcs(block.successors[-1])
        for position, successor in enumerate(block.successors[:-1]):
            here = b.compare("icmp eq", index, constant(index.type, position))
            target = b.select(here, self.pcs(successor), target)
        self._set_pc(target)
        b.jump("dispatch")

    def _exit(self, i: Instruction, block: Block) -> None:
        b = self.b
        if i.guard is None:
            self._set_pc(self.pcs(EXITED))
            b.jump("dispatch")
            return
        ends = self.guard(i)
        nobody, some = b.name("nobody"), b.name("some")
        bits = b.op("and", b.bits(ends), self.mask_bits)
        b.branch(b.compare("icmp eq", bits, constant("i32", 0)), nobody, some)
        b.label(nobody)
        self.go(block.successors[0])
        b.label(some)
        self._set_pc(b.select(ends, self.pcs(EXITED), self.pcs(block.successors[0])))
        b.jump("dispatch")

    def _loop(self, head: int) -> None:
        """Before a back edge that all running lanes take."""
        b = self.b
        if (self.number, head) in self.flow.polling:
            self.stop_at(head, Code.POLLING, polled=head)
            b.label(b.name("never"))
            return
        fuel = b.op("sub", b.load("i64", self.fuel_slot, align=8), constant("i64", 1))
        b.store(fuel, self.fuel_slot, align=8)
        with b.when(b.compare("icmp slt", fuel, constant("i64", 0)), likely=False):
            self.stop_at(head, Code.SLICED)

    def stop(self, code: int, *, polled: int | None = None, i: Instruction | None = None) -> None:
        """Leave the function; the warp goes on where its lanes' pcs stand."""
        if polled is not None:
            self.b.store(constant("i32", polled), self.warp_place("polled"), align=4)
        self._leave(code, EXITED, self.crossing, i)

    def stop_at(self, target: int, code: int, *, polled: int | None = None, i: Instruction | None = None) -> None:
        """`stop`, where all running lanes go on with one block: if no other lane lives, save what that needs only."""
        b = self.b
        self._set_pc(self.pcs(target))
        self.starts.add(target)
        together = b.compare("icmp eq", b.load("i32", self.other_slot, align=4), constant("i32", EXITED))
        with b.when(together, likely=True):
            self._leave(code, target, self._needed(target), i)
        self.stop(code, polled=polled, i=i)

    def _leave(self, code: int, together: int, saved: Sequence[Register], i: Instruction | None) -> None:
        b = self.b
        b.store(b.load(f"<{WARP} x i32>", self.pc_slot, align=128), self.warp, align=64)
        b.store(constant("i32", together), self.warp_place("together"), align=4)
        b.store(constant("i32", self.place(i or self.current.last or self.i)), self.warp_place("place"), align=4)
        if self.flow.polling and code in (Code.POLLING, Code.SLICED):
            looks = self.warp_field("looking") if code == Code.POLLING and i is None else constant("i32", 0)
            b.store(looks, self.warp_place("looked"), align=4)
            b.store(constant("i32", 0), self.warp_place("looking"), align=4)
        for register in () if self.in_place else saved:
            place = b.at(self.warp, self.register_offsets[register])
            value = b.load(vector(self.kind(register), WARP), self.slots[register], align=64)
            if register.type == "pred":
                b.store(b.bits(value), place, align=4)
            else:
                b.store(value, place, align=min(64, SIZES[register.type] * WARP))
        b.line(f"ret i32 {code}")

    def suspend(self, code: int, i: Instruction) -> None:
        """End the block here: the warp stops, and goes on with the next block."""
        self._write_back(self.current.live_out)
        self.stop_at(self.current.successors[0], code, i=i)
        self.ended = True

    def look(self, addresses: Value) -> None:
        """The current instruction looks at memory: where a loop waits for what others do there, a report tells it."""
        if self.number not in self.flow.waiting or not polls(self.i):
            return
        b, count = self.b, self.warp_field("looking")
        index = b.call("i32", "llvm.umin.i32", count, constant("i32", LOOKS - 1))
        offset = b.op("mul", index, constant("i32", ctypes.sizeof(LookState)))
        entry = b.at(b.at(self.warp, self.looks_offset), b.cast("zext", offset, "i64"))
        b.store(constant("i32", self.place(self.i)), self._place(entry, LookState, "place", 0), align=4)
        b.store(self.mask_bits, self._place(entry, LookState, "mask", 0), align=4)
        b.store(addresses, self._place(entry, LookState, "addresses", 0), align=8)
        b.store(b.op("add", count, constant("i32", 1)), self.warp_place("looking"), align=4)

    def stay(self, condition: Value, i: Instruction) -> None:
        """Stop at the beginning of this block as long as ``condition`` (an i1) holds."""
        with self.b.when(condition):
            self._write_back(self.current.live_in)
            self.stop_at(self.number, Code.POLLING, polled=self.number, i=i)

    def place(self, i: Instruction) -> int:
        """The number by which the runtime knows an instruction."""
        if not self.places or self.places[-1] is not i:
            self.places.append(i)
        return len(self.places) - 1

    def fault(self, kind: str, i: Instruction) -> None:
        """End with a fault of the first running lane."""
        lane = self.b.call("i32", "llvm.cttz.i32", self.mask_bits, constant("i1", 0))
        self._fault(kind, constant("i32", self.place(i)), lane)

    def _fault(self, kind: str, place: Value, lane: Value) -> None:
        b = self.b
        b.store(constant("i32", FAULTS.index(kind)), self.grid_place("fault_kind"), align=4)
        b.store(place, self.grid_place("fault_place"), align=4)
        b.store(lane, self.grid_place("fault_lane"), align=4)
        b.jump("fault")

    def hold(self, members: Value) -> None:
        """End the block here, for lanes that go on when all ``members`` of each (<32 x i32>) wait for the same."""
        self._write_back(self.current.live_out)
        self._await(members)
        self._set_pc(self.pcs(HELD + self.current.successors[0]))
        self.b.jump("dispatch")

    def missed(self, kind: str, members: Value, i: Instruction) -> None:
        """A fault, since some ``members`` of a lane will not come; where everybody is then can be seen in the state."""
        b = self.b
        self._await(members)
        self._set_pc(self.pcs(self.number))
        b.store(b.load(members.type, self.pc_slot, align=128), self.warp_place("pc"), align=64)
        self.fault(kind, i)

    def _await(self, members: Value) -> None:
        b, place = self.b, self.warp_place("awaited")
        b.store(b.select(self.mask, members, b.load(members.type, place, align=64)), place, align=64)

    # Fields of the state

    def grid_place(self, field: str, index: int = 0) -> Value:
        return self._place(self.grid, GridState, field, index)

    def block_place(self, field: str, index: int = 0) -> Value:
        return self._place(self.block, BlockState, field, index)

    def warp_place(self, field: str, index: int = 0) -> Value:
        return self._place(self.warp, WarpState, field, index)

    def _place(self, base: Value, structure: type[ctypes.Structure], field: str, index: int) -> Value:
        offset, _, size = field_of(structure, field)
        return self.b.at(base, offset + size * index)

    def grid_field(self, field: str, index: int = 0) -> Value:
        return self._field(self.grid, GridState, field, index)

    def block_field(self, field: str, index: int = 0) -> Value:
        return self._field(self.block, BlockState, field, index)

    def warp_field(self, field: str, index: int = 0) -> Value:
        return self._field(self.warp, WarpState, field, index)

    def _field(self, base: Value, structure: type[ctypes.Structure], field: str, index: int) -> Value:
        _, kind, size = field_of(structure, field)
        return self.b.load(kind, self._place(base, structure, field, index), align=size)

    # Operands

    def kind(self, register: Register) -> str:
        return kind_of(register.type)

    def type(self, ptx_type: str) -> str:
        """The LLVM type of a value of the current instruction."""
        return vector(kind_of(ptx_type), self.lanes)

    def const(self, kind: str, value: int | str) -> Value:
        """A constant of LLVM kind ``kind`` in all lanes of the current instruction."""
        return constant(vector(kind, self.lanes), value)

    def read(self, operand: Operand, type_: str) -> Value:
        """An operand as a PTX type of the current instruction's lanes."""
        value = self._read(operand, type_)
        return self.b.splat(value, self.lanes) if lanes_of(value.type) != self.lanes else value

    def _read(self, operand: Operand, type_: str) -> Value:
        b = self.b
        want = kind_of(type_)
        if isinstance(operand, Register):
            value = self.once.get(operand)
            if value is None:
                value = self.env.get(operand)
                if value is None:
                    if operand not in self.slots:  # never written: any value will do
                        value = constant(vector(self.kind(operand), WARP), 0)
                    else:
                        value = b.load(vector(self.kind(operand), WARP), self.slots[operand], align=64)
                    self.env[operand] = value
            return self.reinterpret(value, want)
        if isinstance(operand, Immediate):
            return self._immediate(operand, type_)
        if isinstance(operand, Special):
            value = self.special(operand.name)
            have = element(value.type)
            if have[0] == "i" and want[0] == "i" and have != want:
                return b.resize(value, want)
            return self.reinterpret(value, want)
        if isinstance(operand, Symbol):
            return self.reinterpret(self.symbol_address(operand), want)
        if isinstance(operand, Negated):
            value = self.read(operand.operand, type_)
            return b.op("xor", value, constant(value.type, 1))
        raise self.unsupported(why=f"operand {operand!r}")

    def reinterpret(self, value: Value, kind: str) -> Value:
        """The bits of a value as another kind; the lower ones, if that is narrower."""
        b = self.b
        have = element(value.type)
        if have == kind:
            return value
        have_bits, want_bits = bits_of(have), bits_of(kind)
        if have_bits != want_bits:
            value = b.cast("bitcast", value, f"i{have_bits}")
            value = b.resize(value, f"i{want_bits}")
        return b.cast("bitcast", value, kind)

    def _immediate(self, immediate: Immediate, type_: str) -> Value:
        kind = kind_of(type_)
        bits = immediate.bits
        if immediate.type == "int" and kind in ("float", "double"):
            bits = _float_bits(float(bits), kind)
        elif immediate.type == "f64" and kind == "float":
            (number,) = struct.unpack("<d", struct.pack("<Q", bits))
            bits = _float_bits(number, "float")
        elif immediate.type == "f32" and kind == "double":
            (number,) = struct.unpack("<f", struct.pack("<I", bits))
            bits = _float_bits(number, "double")
        return bit_constant(kind, bits)

    def symbol_address(self, symbol: Symbol) -> Value:
        """What the name of a variable stands for: an address in its own window, or that of the variable."""
        b = self.b
        if symbol.name in self.parameters and symbol.name not in self.flow.variables:
            base = self.grid_field("params")
            return b.op("add", base, constant("i64", self.parameters[symbol.name] + symbol.offset))
        if symbol.name in self.offsets:
            space = self.space_of(symbol.name)
            offset = constant("i64", self.offsets[symbol.name] + symbol.offset)
            return b.op("add", b.cast("zext", self.shared_offset, "i64"), offset) if space == "shared" else offset
        if symbol.name in self.globals:
            place = b.value("ptr", f"inttoptr {self.grid_field('globals')} to ptr")
            address = b.load("i64", b.at(place, 8 * self.globals.index(symbol.name)), align=8)
            return b.op("add", address, constant("i64", symbol.offset))
        raise self.unsupported(why=f"there is no variable {symbol.name}")

    def space_of(self, name: str) -> str:
        variable = self.flow.variables.get(name) or self.module_variables.get(name)
        return variable.space if variable is not None else "param"

    def write(self, operand: Operand, value: Value, type_: str) -> None:
        """The result of the current instruction. A guard leaves the register as it was in other lanes."""
        if operand is None:
            return
        if not isinstance(operand, Register):
            raise self.unsupported(why=f"result {operand!r}")
        b = self.b
        kind = self.kind(operand)
        have = bits_of(element(value.type))
        if have < bits_of(kind):
            value = b.cast("bitcast", value, f"i{have}")
            value = b.resize(value, f"i{bits_of(kind)}", signed=type_[0] == "s")
        value = self.reinterpret(value, kind)
        if self.lanes == 1:
            self.once[operand] = value
            return
        if lanes_of(value.type) == 1:
            value = b.splat(value, WARP)
        if self.i.guard is not None:
            value = b.select(self.guard(), value, self.read(operand, operand.type))
        self.env[operand] = value

    def guard(self, i: Instruction | None = None) -> Value:
        """The lanes in which the guard of an instruction, by default the current one, holds."""
        i = i or self.i
        assert i.guard is not None
        condition = self.read(i.guard, "pred")
        return self.b.op("xor", condition, constant(condition.type, 1)) if i.guard_negated else condition

    # Special registers

    def special(self, name: str) -> Value:
        from .special import read_special

        return read_special(self, name)

    # Addresses

    def address(self, operand: Operand, space: str) -> Value:
        """A memory operand's address in the host's address space, for every lane (<32 x i64>)."""
        if not isinstance(operand, Memory):
            raise self.unsupported(why=f"address {operand!r}")
        b = self.b
        base = operand.base
        own = isinstance(base, Symbol) and base.name in self.offsets
        if own:
            assert isinstance(base, Symbol)
            space = {"param": "local"}.get(self.space_of(base.name), self.space_of(base.name))
        if isinstance(base, Symbol):
            address = self.symbol_address(Symbol(base.name, operand.offset))
        elif base is None:
            address = constant("i64", operand.offset)
        else:
            address = self._read(base, "u32" if SIZES[base.type] == 4 else "u64")
            if element(address.type) == "i32":
                address = b.cast("zext", address, "i64")
            if operand.offset:
                address = b.op("add", address, constant(address.type, operand.offset))
        if lanes_of(address.type) == 1:
            address = b.splat(address, WARP)
        if space.startswith("shared"):
            address = b.op("add", address, b.splat(self.shared_base, WARP))
        elif space == "local":
            address = b.op("add", address, self.local_base)
        may_reach = not space or (space == "shared" and "shared::cluster" in self.i.modifiers)
        if self.checks and self.reaches and may_reach:
            at = self.buffer("i64", WARP + 2)
            b.store(address, at, align=64)
            place = constant("i32", self.place(self.i))
            self.fail_if(b.call("i32", "drvkit_peers", self.grid, self.block, at, self.mask_bits, place))
        return address

    # Helpers

    def helper(self, name: str, write: Callable[[Builder], str]) -> str:
        """A function of this kernel's own, written when it is first asked for."""
        if name not in self.helpers:
            inner = Builder()
            self.helpers[name] = write(inner)
            for function, declaration in inner.declared.items():
                self.b.declared.setdefault(function, declaration)
        return name

    def outlined(self, name: str, result: str, operands: list[Value], compute: Callable[[list[Value]], Value]) -> Value:
        """What ``compute`` makes of operands, by a function of this kernel's own: for what takes much code."""

        def write(inner: Builder) -> str:
            outer, self.b = self.b, inner
            places = [Value(f"%x{position}", operand.type) for position, operand in enumerate(operands)]
            inner.line(f"ret {compute(places)}")
            self.b = outer
            return inner.function(f"internal {result} @{name}({', '.join(map(str, places))})", attributes="noinline ")

        return self.b.call(result, self.helper(name, write), *operands)

    @contextmanager
    def active(self, mask_bits: Value) -> Iterator[Value]:
        """A loop over the running lanes; gives the lane as an i32."""
        with self.b.each_bit(mask_bits) as lane:
            yield lane

    def buffer(self, kind: str, count: int = WARP) -> Value:
        """Memory of this call for one value a lane. The same one for all uses of a kind: values do not stay there."""
        key = f"{kind}x{count}"
        if key not in self.buffers:
            self.buffers[key] = self.b.alloca(f"[{count} x {kind}]", 128)
        return self.buffers[key]

    def fail_if(self, result: Value) -> None:
        """A runtime function says that it has recorded a fault."""
        b = self.b
        good = b.name("good")
        b.branch(b.compare("icmp eq", result, constant("i32", 0)), good, "fault", likely=True)
        b.label(good)


FAULTS = (
    "none",
    "not allocated",
    "misaligned",
    "not written",
    "trap",
    "barrier divergence",
    "warp divergence",
    "assert",
    "too many copies",
    "barrier",
    "no such block",
    "copy not awaited",
    "race",
    "no order",
    "not all warps of the warpgroup are there",
    "not begun",
    "ended",
)


def _released(b: Builder) -> str:
    """The pcs of lanes, where those are not held any more whose members are all held with the same members."""
    pc, awaited = (Value(name, f"<{WARP} x i32>") for name in ("%pc", "%awaited"))
    live = b.bits(b.compare("icmp ne", pc, constant(pc.type, EXITED)))
    marked = b.bits(b.compare("icmp uge", pc, constant(pc.type, HELD)))
    held = b.op("and", live, marked)
    ready = b.alloca("i32", 4)
    b.store(constant("i32", 0), ready, align=4)
    with b.each_bit(held) as lane:
        members = b.extract(awaited, lane)
        same = b.op("and", held, b.bits(b.compare("icmp eq", awaited, b.splat(members, WARP))))
        complete = b.compare("icmp eq", b.op("and", members, same), members)
        bit = b.op("shl", b.cast("zext", complete, "i32"), lane)
        b.store(b.op("or", b.load("i32", ready, align=4), bit), ready, align=4)
    goes_on = b.lanes(b.load("i32", ready, align=4))
    b.line(f"ret {b.select(goes_on, b.op('sub', pc, constant(pc.type, HELD)), pc)}")
    return b.function(f"internal {pc.type} @released({pc}, {awaited})", attributes="noinline cold ")


def _aligned(offset: int, align: int) -> int:
    return -(-offset // align) * align


def field_of(structure: type[ctypes.Structure], field: str) -> tuple[int, str, int]:
    """Offset, LLVM kind and bytes of a field; of an array's element, if it is one."""
    offset = getattr(structure, field).offset
    kind: Any = dict(structure._fields_)[field]  # type: ignore[arg-type]
    kind = getattr(kind, "_type_", kind) if hasattr(kind, "_length_") else kind
    size = ctypes.sizeof(kind)
    return offset, f"i{8 * size}", size


def bits_of(kind: str) -> int:
    return {"float": 32, "double": 64, "half": 16}.get(kind) or int(kind[1:])


def _float_bits(number: float, kind: str) -> int:
    code, back = ("<f", "<I") if kind == "float" else ("<d", "<Q")
    return int(struct.unpack(back, struct.pack(code, number))[0])


def bit_constant(kind: str, bits: int) -> Value:
    """A scalar constant from its bits."""
    if kind == "float":  # LLVM writes a float as the double of the same value, and so cannot write signaling NaNs
        (number,) = struct.unpack("<f", struct.pack("<I", bits & 0xFFFFFFFF))
        if number == number or bits & 1 << 22:
            return Value(f"0x{struct.unpack('<Q', struct.pack('<d', number))[0]:016X}", "float")
        return Value(f"bitcast (i32 {bits & 0xFFFFFFFF} to float)", "float")
    if kind == "double":
        return Value(f"0x{bits & (1 << 64) - 1:016X}", "double")
    if kind == "half":
        return Value(f"0xH{bits & 0xFFFF:04X}", "half")
    return constant(kind, bits)


def splat_constant(kind: str, bits: int, lanes: int) -> Value:
    scalar = bit_constant(kind, bits)
    if lanes == 1:
        return scalar
    return Value(f"<{', '.join([str(scalar)] * lanes)}>", vector(kind, lanes))


def vector_elements(operand: Operand) -> Sequence[Operand]:
    return operand.elements if isinstance(operand, Vector) else (operand,)


def pair(operand: Operand) -> tuple[Operand, Operand]:
    return (operand.first, operand.second) if isinstance(operand, Pair) else (operand, None)
