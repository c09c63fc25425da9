"""A kernel as blocks in the order in which a warp runs them.

Calls are inlined, guarded instructions with effects become branches, and a block ends where a warp may have to stop.
The blocks stand in reverse post-order with the blocks of a loop together: a warp that always runs its lowest block
meets again at post-dominators, and runs a loop until the last lane has left it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ..signature import kernel_label
from .ptx import (
    SIZES,
    Function,
    Immediate,
    Instruction,
    Label,
    Memory,
    Module,
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

__all__ = ["BUILT_IN", "Block", "Flow", "callee_of", "defined", "used"]

BUILT_IN = ("vprintf", "cudaGraphSetConditional", "__assertfail")  # functions that the device itself has
NOT_BUILT_IN = {  # and those that only a GPU has
    **dict.fromkeys(("malloc", "free"), "malloc on the device is"),
    **dict.fromkeys(
        (f"cuda{name}V2" for name in ("GetParameterBuffer", "LaunchDevice")), "launches from the device are"
    ),
}


def _opcodes(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Without a result: all their operands are read.
_NO_RESULT = _opcodes(
    "st red bar barrier membar fence bra brx ret exit trap call cp prefetch prefetchu discard "
    "applypriority nanosleep griddepcontrol stmatrix multimem mbarrier pmevent brkpt"
)
_POLLS = frozenset({"volatile", "acquire", "relaxed", "mmio"})
_TERMINATORS = frozenset({"bra", "brx", "ret", "exit", "trap"})
_MEETS = frozenset(["shfl", "vote", "match", "redux", "elect", "mma", "wgmma", "ldmatrix", "stmatrix", "movmatrix"])
# Without effects beyond their registers: a guard selects the result.
_PURE = _opcodes(
    "mov cvta cvt add sub mul mad mad24 mul24 fma div rem neg abs min max and or xor not cnot shl shr shf "
    "lop3 setp set selp slct popc clz bfind fns brev bfe bfi bmsk szext prmt dp4a dp2a sad testp copysign "
    "rcp sqrt rsqrt sin cos lg2 ex2 tanh addc subc madc isspacep mapa getctarank activemask vabsdiff4 "
    "vadd4 vsub4 vmin4 vmax4 vavrg4 vset4"
)


_MAY_BE_GUARDED = _PURE | _TERMINATORS - {"trap"}


def has_result(i: Instruction) -> bool:
    if i.opcode == "multimem":
        return i.form == "ld_reduce"
    if i.opcode == "mbarrier":
        if i.form in ("test_wait", "try_wait", "pending_count"):
            return True
        return i.form.startswith("arrive") and not isinstance(next(iter(i.operands), None), Memory | None)
    if i.opcode == "barrier_result":
        return True
    if i.opcode == "wgmma":
        return i.form == "mma_async"
    return i.opcode not in _NO_RESULT


def _registers(operand: Operand) -> Iterator[Register]:
    if isinstance(operand, Register):
        yield operand
    elif isinstance(operand, Memory):
        yield from _registers(operand.base)
        yield from _registers(operand.extra)
    elif isinstance(operand, Vector):
        for element in operand.elements:
            yield from _registers(element)
    elif isinstance(operand, Pair):
        yield from _registers(operand.first)
        yield from _registers(operand.second)
    elif isinstance(operand, Negated):
        yield from _registers(operand.operand)


def defined(i: Instruction) -> list[Register]:
    """The registers that it writes."""
    return list(_registers(i.operands[0])) if i.operands and has_result(i) else []


def used(i: Instruction) -> list[Register]:
    """The registers that it reads."""
    operands = i.operands[1:] if has_result(i) else i.operands
    found = [register for operand in operands for register in _registers(operand)]
    if i.guard is not None:
        found.append(i.guard)
    if i.guard is not None or i.opcode == "wgmma":  # where the guard is false the old value stays; wgmma adds to it
        found += defined(i)
    return found


def polls(i: Instruction) -> bool:
    """Whether it may see what others do: a loop around it must let them run."""
    if i.opcode == "ld" or i.form == "ld_reduce":
        return bool(_POLLS & set(i.modifiers))
    return i.opcode in ("atom", "nanosleep") or (i.opcode == "mbarrier" and i.form.endswith("_wait"))


def acts(i: Instruction) -> bool:
    """Whether it does more than compute registers."""
    return i.opcode not in _PURE


def _reads_clock(i: Instruction) -> bool:
    return any(isinstance(each, Special) and each.name.startswith(("%clock", "%globaltimer")) for each in i.operands)


def holds(i: Instruction) -> bool:
    """Whether lanes may have to wait at it while others of their warp run: it ends a block, after which they go on."""
    return i.opcode in ("bar", "barrier") and "warp" in i.modifiers


def suspends(i: Instruction) -> bool:
    """Whether the warp stops after it, until something else has happened."""
    if i.opcode in ("bar", "barrier"):
        return not {"warp", "arrive", "cluster"} & set(i.modifiers)
    if i.opcode == "call":
        return callee_of(i) != "cudaGraphSetConditional"
    return False


def stands(i: Instruction) -> bool:
    """Whether the warp stays at it until something has happened: it begins a block, to be looked at again."""
    return (i.opcode == "griddepcontrol" and i.form == "wait") or (
        i.opcode == "barrier" and i.modifiers[:2] == ("cluster", "wait")
    )


def meets(i: Instruction) -> bool:
    """Whether the lanes of a warp wait for each other at it."""
    return i.opcode in _MEETS or i.opcode in ("bar", "barrier")


def ordering(i: Instruction) -> bool:
    """Whether others may notice when it happens: where hostile schedules interrupt."""
    if i.opcode in ("ld", "st"):
        return bool(({"volatile", "acquire", "release", "relaxed", "mmio"}) & set(i.modifiers))
    return i.opcode in ("atom", "red", "fence", "membar", "multimem", "nanosleep") or i.opcode == "mbarrier"


def callee_of(i: Instruction) -> str:
    """The function that a call names."""
    return next(operand.name for operand in i.operands if isinstance(operand, Symbol))


@dataclass(eq=False)
class Block:
    """Instructions that run one after another."""

    instructions: list[Instruction] = field(default_factory=list)
    successors: list[int] = field(default_factory=list)  # of a conditional branch: if taken, if not
    goes_on: bool = False  # with what the one before it began, where lanes may have to wait in between
    live_in: frozenset[Register] = frozenset()
    live_out: frozenset[Register] = frozenset()

    @property
    def last(self) -> Instruction | None:
        return self.instructions[-1] if self.instructions else None


class Flow:
    """What the code generator needs to know of a kernel.

    Attributes:
        blocks: the first is the entry.
        variables: local and shared variables of the kernel and of what is inlined, by unique name.
        loops: blocks of each loop, by the number of its head.
        polling: back edges (from, to) of loops that wait for others.
        waiting: the blocks of these loops.
        timed: whether it reads a clock; and ``timers``, the heads of loops that do, and so may end by themselves.
        resumed: blocks that only go on with what one other block began: where lanes may have had to wait in between.
        uniform: registers that have one value in all threads of a launch at all times, in the order of definition.
    """

    def __init__(self, module: Module, kernel: Function, *, interruptible: bool = False) -> None:
        self.module, self.kernel = module, kernel
        self.variables: dict[str, Variable] = {}
        self.targets: dict[str, list[str]] = {}  # of indirect branches, by the name of their list
        self._labels = 0
        body = list(self._inlined(kernel, {}, {}, ""))
        body = list(self._unguarded(body))
        blocks, labels = self._split(body, interruptible)
        self._connect(blocks, labels)
        self._end_at_once(blocks)
        self._merge_back_edges(blocks)
        self._order(blocks)
        self._find_uniform()
        self._fold_constants()
        self._find_live()

    # One body

    def _inlined(
        self,
        function: Function,
        symbols: dict[str, str],
        registers: dict[Register, Register],
        suffix: str,
        callers: tuple[str, ...] = (),
    ) -> Iterator[Instruction | Label]:
        """The body with that of all callees in it. ``symbols`` and ``registers`` rename what is the callee's own."""
        for name, variable in function.variables.items():
            unique = name if variable.space == "shared" else f"{name}{suffix}"
            symbols[name] = unique
            self.variables[unique] = replace(variable, name=unique)
        end = f"end{suffix}"

        def renamed(operand: Operand) -> Operand:
            if isinstance(operand, Register):
                if not suffix:
                    return operand
                if operand not in registers:
                    registers[operand] = Register(f"{operand.name}{suffix}", operand.type)
                return registers[operand]
            if isinstance(operand, Symbol):
                return Symbol(symbols.get(operand.name, operand.name), operand.offset)
            if isinstance(operand, Memory):
                return Memory(renamed(operand.base), operand.offset, renamed(operand.extra))  # type: ignore[arg-type]
            if isinstance(operand, Vector):
                return Vector(tuple(map(renamed, operand.elements)))
            if isinstance(operand, Pair):
                return Pair(renamed(operand.first), renamed(operand.second))
            if isinstance(operand, Negated):
                return Negated(renamed(operand.operand))
            return operand

        for name in (item.name for item in function.body if isinstance(item, Label)):
            symbols[name] = f"{name}{suffix}"
        for name in function.targets:
            symbols[name] = f"{name}{suffix}"
            self.targets[f"{name}{suffix}"] = [f"{target}{suffix}" for target in function.targets[name]]
        for item in function.body:
            if isinstance(item, Label):
                yield Label(symbols[item.name])
                continue
            guard = renamed(item.guard)
            assert guard is None or isinstance(guard, Register)
            # A cache policy is a hint.
            operands = item.operands[:-1] if "L2::cache_hint" in item.modifiers else item.operands
            i = replace(item, operands=tuple(map(renamed, operands)), guard=guard)
            if suffix and i.opcode == "ret":
                yield replace(i, opcode="bra", modifiers=(), operands=(Symbol(end),))
            elif i.opcode == "call" and self._callee(i) not in BUILT_IN:
                yield from self._call(i, (*callers, function.name))
            else:
                yield i
        if suffix:
            yield Label(end)

    def _callee(self, i: Instruction) -> str:
        """What `callee_of` says, if it is a function that can be called."""
        if any(isinstance(operand, Register) for operand in i.operands):
            raise self.error(i, "calls through pointers are not executed")
        if not any(isinstance(operand, Symbol) for operand in i.operands):
            raise self.error(i, "a call names a function")
        name = callee_of(i)
        callee = self.module.functions.get(name)
        if name not in BUILT_IN and (callee is None or not callee.defined):
            what = NOT_BUILT_IN.get(name)
            why = f"calls {kernel_label(name)}, which is not defined" if what is None else f"{what} not executed"
            raise self.error(i, why)
        return name

    def error(self, i: Instruction, why: str) -> PtxError:
        return PtxError(f"{i.where}: kernel {self.kernel.label}: {why}")

    def _call(self, i: Instruction, callers: tuple[str, ...]) -> Iterator[Instruction | Label]:
        callee = self.module.functions[callee_of(i)]
        if callee.name in callers:
            raise self.error(i, f"{callee.label} calls itself: recursion is not executed")
        lists = [operand.elements for operand in i.operands if isinstance(operand, Vector)]
        results = lists[0] if callee.results else ()
        given = lists[-1] if callee.parameters else ()
        self._labels += 1
        suffix = f"^{self._labels}"
        symbols: dict[str, str] = {}
        for formal, actual in (*zip(callee.results, results, strict=True), *zip(callee.parameters, given, strict=True)):
            if not isinstance(actual, Symbol):
                raise self.error(i, "arguments of a call are parameters in memory")
            symbols[formal.name] = actual.name
        skip = Label(f"skip{suffix}")
        if i.guard is not None:
            yield replace(
                i, opcode="bra", modifiers=(), operands=(Symbol(skip.name),), guard_negated=not i.guard_negated
            )
        yield from self._inlined(callee, symbols, {}, suffix, callers)
        yield skip

    def _unguarded(self, body: list[Instruction | Label]) -> Iterator[Instruction | Label]:
        for item in body:
            if isinstance(item, Label) or item.guard is None or item.opcode in _MAY_BE_GUARDED:
                yield item
            else:
                self._labels += 1
                skip = f"skip^{self._labels}"
                yield replace(
                    item, opcode="bra", modifiers=(), operands=(Symbol(skip),), guard_negated=not item.guard_negated
                )
                yield replace(item, guard=None, guard_negated=False)
                yield Label(skip)

    # Blocks

    def _split(self, body: list[Instruction | Label], interruptible: bool) -> tuple[list[Block], dict[str, int]]:
        blocks, labels = [Block()], {}
        # Whether some lanes of a warp wait for others.
        waits = any(isinstance(item, Instruction) and (polls(item) or holds(item)) for item in body)
        for item in body:
            if isinstance(item, Label):
                if blocks[-1].instructions:
                    blocks.append(Block())
                labels[item.name] = len(blocks) - 1
                continue
            first_meeting = waits and meets(item) and not holds(item) and not any(map(meets, blocks[-1].instructions))
            if blocks[-1].instructions and (stands(item) or first_meeting):
                blocks.append(Block(goes_on=first_meeting))
            blocks[-1].instructions.append(item)
            if item.opcode in ("bar", "barrier") and "red" in item.modifiers:
                blocks.append(Block([replace(item, opcode="barrier_result")]))
            elif item.opcode in _TERMINATORS or suspends(item) or holds(item) or (interruptible and ordering(item)):
                blocks.append(Block(goes_on=holds(item)))
        if not blocks[-1].instructions:  # where labels at the very end point to
            last = next((item for item in reversed(body) if isinstance(item, Instruction)), None)
            if last is not None:
                blocks[-1].instructions.append(
                    replace(last, opcode="exit", modifiers=(), operands=(), guard=None, guard_negated=False)
                )
        return blocks, labels

    def _connect(self, blocks: list[Block], labels: dict[str, int]) -> None:
        def target(i: Instruction, name: str) -> int:
            if name not in labels:
                raise self.error(i, f"there is no label {name}")
            return labels[name]

        def named(i: Instruction) -> str:
            last = i.operands[-1] if i.operands else None
            if not isinstance(last, Symbol):
                raise self.error(i, f"{i.name}: no label is named")
            return last.name

        for number, block in enumerate(blocks):
            last, following = block.last, number + 1
            if last is not None and last.opcode == "bra":
                goal = target(last, named(last))
                block.successors = [goal] + ([following] if last.guard is not None else [])
            elif last is not None and last.opcode == "brx":
                block.successors = [target(last, name) for name in self.targets.get(named(last), [named(last)])]
            elif last is not None and last.opcode in ("ret", "exit"):
                block.successors = [following] if last.guard is not None else []
            elif last is not None and last.opcode == "trap":
                block.successors = []
            elif following < len(blocks):
                block.successors = [following]

    def _end_at_once(self, blocks: list[Block]) -> None:
        """A branch to a bare ``ret`` ends its lanes there, and other ways to one get one each.

        Where all returned at the same place, others would come to a barrier before those who have left early.
        """

        def bare(number: int) -> bool:
            instructions = blocks[number].instructions
            return len(instructions) == 1 and instructions[0].opcode in ("ret", "exit") and not instructions[0].guard

        def leaves(block: Block) -> bool:
            return block.last is not None and block.last.opcode == "bra" and any(map(bare, block.successors))

        while leaving := list(filter(leaves, blocks)):  # a branch to such a branch is one too
            for block in leaving:
                last, fallen = block.instructions[-1], not bare(block.successors[0])
                block.instructions[-1] = replace(
                    last, opcode="exit", modifiers=(), operands=(), guard_negated=last.guard_negated ^ fallen
                )
                del block.successors[int(fallen)]
        taken: set[int] = set()
        for block in list(blocks):
            for position, each in enumerate(block.successors):
                if bare(each):
                    if each in taken:
                        block.successors[position] = len(blocks)
                        blocks.append(replace(blocks[each]))
                    taken.add(each)

    def _merge_back_edges(self, blocks: list[Block]) -> None:
        """A loop with several back edges gets one block before its head, where lanes that go round meet."""
        _, loops = _natural_loops(blocks)
        for head, (_, sources) in loops.items():
            if len(sources) > 1:
                last = blocks[sources[-1]].last
                assert last is not None
                bra = replace(last, opcode="bra", modifiers=(), operands=(), guard=None, guard_negated=False)
                for source in sources:
                    followers = blocks[source].successors
                    blocks[source].successors = [len(blocks) if each == head else each for each in followers]
                blocks.append(Block([bra], [head]))

    def _order(self, blocks: list[Block]) -> None:
        order, natural = _natural_loops(blocks)
        loops = {head: inside for head, (inside, _) in natural.items()}
        aborts = _aborting(blocks)
        together: list[int] = []
        placed: set[int] = set()

        def place_all(members: set[int]) -> None:
            for block in order:
                if block in members and block not in placed:
                    placed.add(block)
                    together.append(block)
                    if block in loops:  # and what ends in a trap: who goes on may wait for its lanes meanwhile
                        place_all(loops[block] - {block} | _reached(blocks, loops[block], aborts))

        place_all(set(order))
        number = {block: index for index, block in enumerate(together)}
        self.blocks = [blocks[block] for block in together]
        for each in self.blocks:
            each.successors = [number[successor] for successor in each.successors]
        self.loops = {number[head]: {number[member] for member in inside} for head, inside in loops.items()}
        # An edge to an earlier or the same block closes a loop, also in a graph that is not reducible.
        self.back_edges = {(at, to) for at, each in enumerate(self.blocks) for to in each.successors if to <= at}
        entered = [to for each in self.blocks for to in each.successors]
        self.resumed = {at for at, each in enumerate(self.blocks) if each.goes_on and entered.count(at) == 1}
        self.polling, self.waiting, self.timers = set(), set[int](), set[int]()
        for at, to in self.back_edges:
            inside = self.loops.get(to, set(range(to, at + 1)))
            if any(polls(i) for member in inside for i in self.blocks[member].instructions):
                self.polling.add((at, to))
                self.waiting |= inside
            if any(_reads_clock(i) for member in inside for i in self.blocks[member].instructions):
                self.timers.add(to)
        self.timed = any(_reads_clock(i) for each in self.blocks for i in each.instructions)

    def last_that_leads_to(self, number: int) -> int:
        """The last block from which a way may lead to this one: the last of the loops around it, or itself."""
        return max((max(inside) for inside in self.loops.values() if number in inside), default=number)

    # Registers

    def _find_uniform(self) -> None:
        definitions: dict[Register, list[Instruction]] = {}
        for block in self.blocks:
            for i in block.instructions:
                for register in defined(i):
                    definitions.setdefault(register, []).append(i)
        parameters = {parameter.name for parameter in self.kernel.parameters}
        self.uniform: dict[Register, Instruction] = {}

        def constant(operand: Operand) -> bool:
            if isinstance(operand, Register):
                return operand in self.uniform
            if isinstance(operand, Special):
                return operand.name.startswith(("%ntid", "%nctaid", "%ctaid", "%nwarpid", "%nsmid"))
            if isinstance(operand, Symbol):
                variable = self.variables.get(operand.name)
                return variable is None or variable.space not in ("local", "param")
            if isinstance(operand, Vector):
                return all(map(constant, operand.elements))
            return operand is not None and not isinstance(operand, Memory | Pair)

        changed = True
        while changed:
            changed = False
            for block in self.blocks:
                for i in block.instructions:
                    target = i.operands[0] if len(i.operands) > 1 else None
                    if not isinstance(target, Register) or target in self.uniform or i.guard is not None:
                        continue
                    if not has_result(i) or "cc" in i.modifiers or len(definitions.get(target, ())) != 1:
                        continue
                    if i.opcode == "ld" and i.form == "param":
                        source = i.operands[1]
                        fixed = (
                            isinstance(source, Memory)
                            and isinstance(source.base, Symbol)
                            and source.base.name in parameters
                        )
                    elif i.opcode == "cvta":
                        fixed = bool({"global", "const", "param"} & set(i.modifiers)) and constant(i.operands[1])
                    else:
                        fixed = i.opcode in _UNIFORM and all(map(constant, i.operands[1:]))
                    if fixed:
                        self.uniform[target] = i
                        changed = True

    def _fold_constants(self) -> None:
        """Registers that hold a number for good are that number where they are read."""
        numbers: dict[Register, Immediate] = {}
        for register, i in self.uniform.items():
            source = i.operands[1]
            if i.opcode == "mov" and isinstance(source, Immediate) and register.type != "pred":
                wide = 8 * SIZES[register.type]
                if source.type == "int" or wide == {"f32": 32, "f64": 64, "bits": wide}[source.type]:
                    numbers[register] = Immediate(source.bits & (1 << wide) - 1, "bits")

        def folded(operand: Operand) -> Operand:
            if isinstance(operand, Register):
                return numbers.get(operand, operand)
            if isinstance(operand, Vector):
                return Vector(tuple(map(folded, operand.elements)))
            return operand

        def fold(i: Instruction) -> Instruction:
            first = 1 if has_result(i) else 0
            operands = (*i.operands[:first], *map(folded, i.operands[first:]))
            return i if operands == i.operands else replace(i, operands=operands)

        for block in self.blocks:
            block.instructions = [fold(i) for i in block.instructions]
        self.uniform = {register: fold(i) for register, i in self.uniform.items()}

    def _find_live(self) -> None:
        reads: list[set[Register]] = []
        writes: list[set[Register]] = []
        for block in self.blocks:
            read: set[Register] = set()
            written: set[Register] = set()
            for i in block.instructions:
                read |= {register for register in used(i) if register not in written and register not in self.uniform}
                written |= {register for register in defined(i) if register not in self.uniform}
            reads.append(read)
            writes.append(written)
        live_in = [set(read) for read in reads]
        changed = True
        while changed:
            changed = False
            for number in reversed(range(len(self.blocks))):
                out: set[Register] = set().union(*(live_in[each] for each in self.blocks[number].successors))
                needed = reads[number] | (out - writes[number])
                if needed != live_in[number]:
                    live_in[number] = needed
                    changed = True
        for number, block in enumerate(self.blocks):
            block.live_in = frozenset(live_in[number])
            block.live_out = frozenset().union(*(live_in[each] for each in block.successors))


# What may be computed once for the whole launch: cheap, and without state.
_UNIFORM = _opcodes("mov cvt add sub mul mad and or xor not shl shr neg min max selp setp div rem")


def _natural_loops(blocks: list[Block]) -> tuple[list[int], dict[int, tuple[set[int], list[int]]]]:
    """Blocks in reverse post-order; and for each head of a loop the blocks inside, and those that go back to it."""
    order = _reverse_post_order(blocks)
    place = {block: index for index, block in enumerate(order)}
    predecessors: dict[int, list[int]] = {block: [] for block in order}
    for block in order:
        for successor in blocks[block].successors:
            predecessors[successor].append(block)
    dominator = _dominators(order, place, predecessors)
    loops: dict[int, tuple[set[int], list[int]]] = {}
    for block in order:
        for head in dict.fromkeys(blocks[block].successors):
            if _dominates(dominator, head, block):
                inside, sources = loops.setdefault(head, ({head}, []))
                sources.append(block)
                pending = [block]
                while pending:
                    member = pending.pop()
                    if member not in inside:
                        inside.add(member)
                        pending += predecessors[member]
    return order, loops


def _reverse_post_order(blocks: list[Block]) -> list[int]:
    """Of the sides of a branch first the one from which no way leads to where threads meet.

    Its lanes come to what both sides share, or end, before others come to a barrier.
    """
    meeting = [max(map(_meeting, each.instructions), default=0) for each in blocks]
    changed = True
    while changed:
        changed = False
        for number in reversed(range(len(blocks))):
            most = max((meeting[each] for each in blocks[number].successors), default=0)
            if most > meeting[number]:
                meeting[number], changed = most, True

    def visits(block: int) -> Iterator[int]:  # what is visited first comes last
        return iter(sorted(blocks[block].successors, key=lambda each: -meeting[each]))

    seen = {0}
    post: list[int] = []
    stack: list[tuple[int, Iterator[int]]] = [(0, visits(0))]
    while stack:
        block, successors = stack[-1]
        for successor in successors:
            if successor not in seen:
                seen.add(successor)
                stack.append((successor, visits(successor)))
                break
        else:
            post.append(block)
            stack.pop()
    return post[::-1]


def _aborting(blocks: list[Block]) -> set[int]:
    """The blocks from which every way ends in a trap."""
    aborting: set[int] = set()
    size = -1
    while size < len(aborting):
        size = len(aborting)
        for number, block in enumerate(blocks):
            trap = block.last is not None and block.last.opcode == "trap"
            if trap or (block.successors and aborting.issuperset(block.successors)):
                aborting.add(number)
    return aborting


def _reached(blocks: list[Block], sources: set[int], within: set[int]) -> set[int]:
    """The blocks of ``within`` to which a way inside of it leads from ``sources``."""
    reached: set[int] = set()
    pending = [*sources]
    while pending:
        new = within.intersection(blocks[pending.pop()].successors) - reached
        reached |= new
        pending += new
    return reached


def _meeting(i: Instruction) -> int:
    """Who meets at it: 2 threads of a block, 1 those of a warp, 0 nobody."""
    return meets(i) and 1 + (i.opcode in ("bar", "barrier") and not holds(i))


def _dominators(order: list[int], place: dict[int, int], predecessors: dict[int, list[int]]) -> dict[int, int]:
    """The immediate dominator of each block (Cooper, Harvey and Kennedy, "A Simple, Fast Dominance Algorithm")."""
    dominator = {order[0]: order[0]}
    changed = True
    while changed:
        changed = False
        for block in order[1:]:
            known = [each for each in predecessors[block] if each in dominator]
            nearest = known[0]
            for other in known[1:]:
                while nearest != other:
                    while place[nearest] > place[other]:
                        nearest = dominator[nearest]
                    while place[other] > place[nearest]:
                        other = dominator[other]
            if dominator.get(block) != nearest:
                dominator[block] = nearest
                changed = True
    return dominator


def _dominates(dominator: dict[int, int], above: int, block: int) -> bool:
    while block != above and dominator[block] != block:
        block = dominator[block]
    return block == above
