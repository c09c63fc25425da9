"""Graphs and execs, as the driver has them.

A `Graph` is nodes and edges that can be changed. An `Exec` is made of one: it has its own copy of the structure, and
operations that can be replaced. A launch takes the operations as they are then.

Source: CUDA Driver API, "Graph Management".
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from .handles import RefusedError, handles
from .machine import END, START, TRIGGER, Once, Outcome, Plain, Task, Work, machine
from .memory import memory
from .operations import Allocate, Empty, Free, GraphMemory, Operation, Shared
from .races import tracker

if TYPE_CHECKING:
    from .streams import Event, Stream

__all__ = [
    "LAUNCH_ORDER",
    "PLAIN",
    "PROGRAMMATIC",
    "Child",
    "Condition",
    "Conditional",
    "EdgeData",
    "EventRecord",
    "EventWait",
    "Exec",
    "Graph",
    "InstantiateError",
    "Node",
    "UpdateError",
]

EdgeData = tuple[int, int, int]  # from_port, to_port and type of CUgraphEdgeData
PLAIN, PROGRAMMATIC, LAUNCH_ORDER = (0, 0, 0), (1, 0, 1), (2, 0, 0)
_MOMENTS = {PLAIN: END, PROGRAMMATIC: TRIGGER, LAUNCH_ORDER: START}

IF, WHILE, SWITCH = 0, 1, 2  # CUgraphConditionalNodeType
AUTO_FREE = 1  # CUgraphInstantiate_flags

# What the body of a conditional node may hold, and what can be disabled in an exec.
_IN_BODIES = ("kernel", "memcpy", "memset", "empty", "graph", "conditional")
_SWITCHABLE = ("kernel", "memcpy", "memset")


# ---- definitions ---------------------------------------------------------------------------------------------------


class Condition(Shared):
    """The value of a conditional node: 4 bytes, whose address is the handle that kernels get."""

    def __init__(self, graph: Graph, default: int | None) -> None:
        self.graph, self.default = graph, default
        self.address = memory.allocate(4, "condition", name="of a conditional node").address
        self.node: Node | None = None  # which tests it

    def release(self) -> None:
        memory.free(self.address)


class Child(Operation):
    """Another graph, as one node."""

    kind = "graph"

    def __init__(self, device: int, graph: Graph) -> None:
        self.device, self.graph = device, graph

    def __str__(self) -> str:
        return "child graph"


class Conditional(Operation):
    """Bodies of which one runs, or none, or one again and again."""

    kind = "conditional"

    def __init__(self, device: int, variety: int, condition: Condition, bodies: tuple[Graph, ...]) -> None:
        self.device, self.variety, self.condition, self.bodies = device, variety, condition, bodies

    def __str__(self) -> str:
        return f"conditional node ({('if', 'while', 'switch')[self.variety]})"


class _EventOperation(Operation):
    def __init__(self, device: int, event: Event) -> None:
        self.device, self.event = device, event


class EventRecord(_EventOperation):
    kind = "event_record"

    def __str__(self) -> str:
        return f"record of {self.event}"


class EventWait(_EventOperation):
    kind = "wait_event"

    def begin(self, work: Work) -> Task | None:
        return None  # its launch has let it wait

    def __str__(self) -> str:
        return f"wait for {self.event}"


class Node:
    """A node of a graph. ``dependencies`` and ``dependents`` are its edges, in the order in which they were made.

    ``said`` keeps alive what its parameters, once they were asked for, point to; ``name`` is for reports.
    """

    __slots__ = ("dependencies", "dependents", "graph", "handle", "name", "operation", "said")

    def __init__(self, graph: Graph, operation: Operation) -> None:
        self.graph, self.operation = graph, operation
        self.handle = handles.add(self)
        self.dependencies: dict[tuple[Node, EdgeData], None] = {}
        self.dependents: dict[tuple[Node, EdgeData], None] = {}
        self.said: object = None
        self.name = ""

    @property
    def kind(self) -> str:
        return self.operation.kind

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """The graphs inside of it."""
        if isinstance(self.operation, Child):
            return (self.operation.graph,)
        return self.operation.bodies if isinstance(self.operation, Conditional) else ()


class Graph:
    """Nodes and edges.

    Attributes:
        owner: the node that it is inside of.
        twins: of a clone: the nodes that stand for those of the original.
        execs: how many there are of it.
    """

    def __init__(self, owner: Node | None = None) -> None:
        self.handle = handles.add(self)
        self.owner = owner
        self.nodes: dict[Node, None] = {}
        self.conditions: list[Condition] = []
        self.twins: dict[Node, Node] = {}
        self.execs = 0

    def walk(self) -> Iterator[Node]:
        """All nodes, those inside of others too."""
        for node in self.nodes:
            yield node
            for graph in node.graphs:
                yield from graph.walk()

    def edges(self) -> list[tuple[Node, Node, EdgeData]]:
        return [(node, target, data) for node in self.nodes for target, data in node.dependents]

    def _is_exclusive(self) -> bool:
        """Whether there can be only one exec of it at a time, and no clone."""
        return any(node.kind in ("conditional", "mem_alloc", "mem_free") for node in self.walk())

    # Changing it

    def add(self, operation: Operation, edges: Iterable[tuple[Node, EdgeData]] = ()) -> Node:
        """A node that waits for others of this graph."""
        edges = list(edges)
        for source, data in edges:
            if source.graph is not self:
                raise RefusedError("INVALID_VALUE")
            _check_edge(source.kind, operation.kind, data)
        if len(dict(edges)) < len(edges):
            raise RefusedError("INVALID_VALUE")
        node = Node(self, operation)
        self.nodes[node] = None
        for source, data in edges:
            node.dependencies[source, data] = None
            source.dependents[node, data] = None
        if isinstance(operation, Allocate | Free):
            operation.memory.keep()
        for graph in node.graphs:
            graph.owner = node
        return node

    def add_condition(self, default: int | None) -> Condition:
        condition = Condition(self, default)
        condition.keep()
        self.conditions.append(condition)
        return condition

    def add_conditional(
        self, device: int, variety: int, condition: int, size: int, edges: Iterable[tuple[Node, EdgeData]]
    ) -> Node:
        """A node that tests a condition of this graph; its bodies are new graphs."""
        tested = next((known for known in self.conditions if known.address == condition), None)
        most = {IF: 2, WHILE: 1, SWITCH: 1 << 31}.get(variety, 0)
        if tested is None or tested.node is not None or not 0 < size <= most:
            raise RefusedError("INVALID_VALUE")
        bodies = tuple(Graph() for _ in range(size))
        try:
            tested.node = self.add(Conditional(device, variety, tested, bodies), edges)
        except RefusedError:
            for body in bodies:
                body.destroy()
            raise
        return tested.node

    def add_child(self, device: int, graph: Graph, edges: Iterable[tuple[Node, EdgeData]], *, move: bool) -> Node:
        """``graph``, or a clone of it, as a node."""
        if (graph.owner is not None and move) or self._is_inside(graph):
            raise RefusedError("INVALID_VALUE")
        if any(node.kind == "conditional" for node in graph.walk()) or (move and graph.execs):
            raise RefusedError("NOT_SUPPORTED")
        inner = graph if move else graph.clone()
        try:
            return self.add(Child(device, inner), edges)
        except RefusedError:
            if not move:
                inner.destroy()
            raise

    def _is_inside(self, graph: Graph) -> bool:
        inner: Graph | None = self
        while inner is not None:
            if inner is graph:
                return True
            inner = inner.owner.graph if inner.owner is not None else None
        return False

    def remove(self, node: Node) -> None:
        """Take a node out, its edges, and the graphs inside of it."""
        if any(other.kind in ("mem_alloc", "mem_free") for other in self.nodes):
            raise RefusedError("NOT_SUPPORTED")
        for source, data in node.dependencies:
            del source.dependents[node, data]
        for target, data in node.dependents:
            del target.dependencies[node, data]
        del self.nodes[node]
        self._forget(node)

    def _forget(self, node: Node) -> None:
        handles.drop(node.handle)
        if isinstance(node.operation, Allocate | Free):
            node.operation.memory.let_go()
        for graph in node.graphs:
            graph.destroy()

    def add_edge(self, source: Node, target: Node, data: EdgeData) -> None:
        if source.graph is not self or target.graph is not self or source is target:
            raise RefusedError("INVALID_VALUE")
        _check_edge(source.kind, target.kind, data)
        if (target, data) in source.dependents:
            raise RefusedError("INVALID_VALUE")
        source.dependents[target, data] = None
        target.dependencies[source, data] = None

    def remove_edge(self, source: Node, target: Node, data: EdgeData) -> None:
        if source.graph is not self or (target, data) not in source.dependents:
            raise RefusedError("INVALID_VALUE")
        if any(other.kind in ("mem_alloc", "mem_free") for other in self.nodes):
            raise RefusedError("NOT_SUPPORTED")
        del source.dependents[target, data]
        del target.dependencies[source, data]

    def clone(self) -> Graph:
        if self._is_exclusive():
            raise RefusedError("NOT_SUPPORTED")
        copy = Graph()
        for node in self.nodes:
            operation = node.operation
            if isinstance(operation, Child):
                operation = Child(operation.device, operation.graph.clone())
            copy.twins[node] = copy.add(operation)
            copy.twins[node].name = node.name
        for source, target, data in self.edges():
            copy.add_edge(copy.twins[source], copy.twins[target], data)
        return copy

    def destroy(self) -> None:
        handles.drop(self.handle)
        for node in self.nodes:
            self._forget(node)
        for condition in self.conditions:
            condition.let_go()
        self.nodes.clear()

    # The order in which an exec has its nodes

    def ordered(self) -> list[Node] | None:
        """Its nodes, each behind those that it waits for; None if there is a circle.

        The order follows from the structure and from the order in which nodes and edges were made, so that graphs that
        were made alike have their nodes in the same places.
        """
        missing = {node: len(node.dependencies) for node in self.nodes}
        order = [node for node, count in missing.items() if not count]
        for node in order:
            for target, _ in node.dependents:
                missing[target] -= 1
                if not missing[target]:
                    order.append(target)
        return order if len(order) == len(missing) else None


def _check_edge(source: str, target: str, data: EdgeData) -> None:
    if data not in _MOMENTS or (data != PLAIN and (source != "kernel" or target != "kernel")):
        raise RefusedError("INVALID_VALUE")


# ---- execs ---------------------------------------------------------------------------------------------------------


class InstantiateError(RefusedError):
    """``result`` is a number of ``CUgraphInstantiateResult``."""

    ERROR, INVALID_STRUCTURE, NODE_OPERATION_NOT_SUPPORTED, _, CONDITIONAL_HANDLE_UNUSED = range(1, 6)

    def __init__(self, code: str, result: int, node: Node | None = None) -> None:
        super().__init__(code)
        self.result, self.node = result, node


class UpdateError(RefusedError):
    """``result`` is a name of ``CUgraphExecUpdateResult``, ``node`` is of the graph that was to be taken over."""

    def __init__(self, result: str, node: Node | None = None, from_node: Node | None = None) -> None:
        super().__init__("GRAPH_EXEC_UPDATE_FAILURE")
        self.result, self.node, self.from_node = result, node, from_node


class Step(NamedTuple):
    """An operation of a launch. ``edges``: how many steps back what it waits for is, and for which moment of it.
    ``node`` is its node, if that has a name."""

    operation: Operation
    edges: tuple[tuple[int, int], ...]
    node: _Named | None = None


class _Named:
    """What a node with a name does, for reports."""

    __slots__ = ("name", "operation")

    def __init__(self, name: str, operation: Operation) -> None:
        self.name, self.operation = name, operation

    def __str__(self) -> str:
        return f"{self.name} ({self.operation})"


class _Item:
    """What an exec has for a node. ``edges``: the places of the items that it waits for."""

    __slots__ = ("edges", "enabled", "inside", "name", "operation", "structure")

    def __init__(self, structure: _Structure, node: Node, edges: tuple[tuple[int, EdgeData], ...]) -> None:
        self.structure, self.operation, self.edges, self.name = structure, node.operation, edges, node.name
        self.enabled = True
        self.inside = tuple(_Structure(graph, self) for graph in node.graphs)

    def put(self, operation: Operation) -> None:
        self.operation = operation
        self.structure.changed()


class _Structure:
    """What an exec has for a graph: items in the order of `Graph.ordered`, and the steps made of them."""

    def __init__(self, graph: Graph, around: _Item | None = None) -> None:
        self.around = around
        nodes = graph.ordered()
        if nodes is None:
            raise InstantiateError("INVALID_VALUE", InstantiateError.INVALID_STRUCTURE)
        self.nodes: tuple[Node, ...] = tuple(nodes)
        places = {node: place for place, node in enumerate(nodes)}
        self.items = [
            _Item(self, node, tuple((places[source], data) for source, data in node.dependencies)) for node in nodes
        ]
        self._steps: tuple[Step, ...] | None = None

    def changed(self) -> None:
        structure: _Structure | None = self
        while structure is not None:
            structure._steps = None
            structure = structure.around.structure if structure.around is not None else None

    def walk(self) -> Iterator[tuple[Node, _Item]]:
        for node, item in zip(self.nodes, self.items, strict=True):
            yield node, item
            for structure in item.inside:
                yield from structure.walk()

    @property
    def steps(self) -> tuple[Step, ...]:
        """What a launch does. A child's steps are in there, between two empty ones."""
        if self._steps is None:
            steps: list[Step] = []
            ends: list[int] = []  # where each item ends
            for item in self.items:
                edges = tuple((len(steps) - ends[place], _MOMENTS[data]) for place, data in item.edges)
                operation = item.operation
                if isinstance(operation, Child):
                    steps.append(Step(Empty(operation.device), edges))
                    steps += _framed(item.inside[0].steps, operation.device)
                else:
                    if not item.enabled:
                        operation = Empty(operation.device)
                    elif isinstance(operation, Conditional):
                        operation = _Choice(operation, tuple(body.steps for body in item.inside))
                    steps.append(Step(operation, edges, _Named(item.name, operation) if item.name else None))
                ends.append(len(steps) - 1)
            self._steps = tuple(steps)
        return self._steps

    def match(self, graph: Graph) -> list[tuple[_Item, Operation]]:
        """What to replace by what, to have the parameters of ``graph``; `UpdateError` if it is another structure."""
        nodes = graph.ordered()
        if nodes is None or len(nodes) != len(self.items):
            extra = nodes[len(self.items)] if nodes and len(nodes) > len(self.items) else None
            raise UpdateError("TOPOLOGY_CHANGED", extra)
        places = {node: place for place, node in enumerate(nodes)}
        for node, item in zip(nodes, self.items, strict=True):
            edges = {(places[source], data) for source, data in node.dependencies}
            if edges != set(item.edges):
                raise UpdateError("TOPOLOGY_CHANGED", node)
        changes: list[tuple[_Item, Operation]] = []
        for node, item in zip(nodes, self.items, strict=True):
            if node.kind != item.operation.kind:
                raise UpdateError("NODE_TYPE_CHANGED", node)
            why = _refusal(node.operation, item.operation)
            if why is not None:
                raise UpdateError(why, node)
            changes.append((item, node.operation))
            for structure, inner in zip(item.inside, node.graphs, strict=True):
                changes += structure.match(inner)
        return changes


def _refusal(new: Operation, old: Operation) -> str | None:
    if isinstance(new, Conditional) and isinstance(old, Conditional):
        same = (new.variety, len(new.bodies)) == (old.variety, len(old.bodies))
        return None if same else "PARAMETERS_CHANGED"
    return new.check_update(old)


def _framed(steps: tuple[Step, ...], device: int) -> list[Step]:
    """The steps of a child behind the empty one that stands for its beginning, and one that stands for its end."""
    framed = [step if step.edges else step._replace(edges=((i + 1, END),)) for i, step in enumerate(steps)]
    last = set(range(len(steps))) - {i - back for i, step in enumerate(steps) for back, _ in step.edges}
    end = tuple((len(steps) - i, END) for i in last) or ((1, END),)
    return [*framed, Step(Empty(device), end)]


class Exec:
    """A graph made executable.

    Attributes:
        flags: as it was instantiated with.
        last: its newest launch, which the next one waits for.
    """

    def __init__(self, graph: Graph, flags: int = 0) -> None:
        if graph.owner is not None:
            raise InstantiateError("INVALID_VALUE", InstantiateError.ERROR)
        self._structure = _Structure(graph)
        self._conditions = _check_conditions(graph)
        for node in graph.walk():
            if node.kind == "conditional":
                _check_bodies(node)
        if graph._is_exclusive() and graph.execs:
            raise InstantiateError("NOT_SUPPORTED", InstantiateError.ERROR)
        self.flags, self.graph = flags, graph
        self.last: Work | None = None
        self._items: Mapping[Node, _Item] = dict(self._structure.walk())
        self._memory: list[GraphMemory] = [
            node.operation.memory for node in self._items if isinstance(node.operation, Allocate | Free)
        ]
        for shared in (*self._conditions, *self._memory):
            shared.keep()
        graph.execs += 1
        self.handle = handles.add(self)

    # Changing it

    def item(self, node: Node) -> _Item:
        item = self._items.get(node)
        if item is None:
            raise RefusedError("INVALID_VALUE")
        return item

    def put(self, node: Node, operation: Operation) -> None:
        """Do ``operation`` instead of what the node was to do."""
        item = self.item(node)
        if operation.kind != item.operation.kind or operation.check_update(item.operation) is not None:
            raise RefusedError("INVALID_VALUE")
        item.put(operation)

    def put_child(self, node: Node, graph: Graph) -> None:
        """Take over the parameters of ``graph`` for a child node."""
        item = self.item(node)
        if not isinstance(item.operation, Child):
            raise RefusedError("INVALID_VALUE")
        try:
            changes = item.inside[0].match(graph)
        except UpdateError:
            raise RefusedError("INVALID_VALUE") from None
        self._apply(changes)

    def enable(self, node: Node, enabled: bool) -> None:
        item = self._switchable(node)
        item.enabled = enabled
        item.structure.changed()

    def is_enabled(self, node: Node) -> bool:
        return self._switchable(node).enabled

    def _switchable(self, node: Node) -> _Item:
        item = self.item(node)
        if item.operation.kind not in _SWITCHABLE:
            raise RefusedError("INVALID_VALUE")
        return item

    def update(self, graph: Graph) -> None:
        """Take over all parameters; `UpdateError` names the node that cannot be."""
        self._apply(self._structure.match(graph))

    def _apply(self, changes: list[tuple[_Item, Operation]]) -> None:
        for item, operation in changes:
            if isinstance(operation, Conditional) and isinstance(item.operation, Conditional):
                operation.condition.keep()
                self._conditions.remove(item.operation.condition)
                self._conditions.append(operation.condition)
                item.operation.condition.let_go()
            item.put(operation)

    # Launching it

    def launch(self, stream: Stream) -> None:
        self._claim_memory()
        steps = self._structure.steps
        work = Work(f"graph launch of {len(steps)} steps", stream.context.device)
        waits: dict[int, Work] = {}
        for place, step in enumerate(steps):
            if isinstance(step.operation, EventWait) and (tracker.on or not step.operation.event.reached):
                mark = step.operation.event.mark
                if mark is not None and mark.work is not None:
                    waits[place] = mark.work
        records: dict[int, Work] = {}
        work.task = _Replay(work, steps, waits, records, [(c.address, c.default) for c in self._conditions])
        work.after(self.last)
        for place, step in enumerate(steps):
            if isinstance(step.operation, EventRecord):
                mark = step.operation.event.new_mark()
                mark.work = records[place] = Work(step.operation, step.operation.device, mark.begin)
                mark.work.hold()
                machine.spawn(work, mark.work)
        stream.append(work)
        self.last = work

    def _claim_memory(self) -> None:
        """What it allocates must be free, and what it frees must be there."""
        operations = [item.operation for item in self._items.values()]
        made = {operation.memory for operation in operations if isinstance(operation, Allocate)}
        freed = {operation.memory for operation in operations if isinstance(operation, Free)}
        if any(known.held for known in made) and not self.flags & AUTO_FREE:
            raise RefusedError("INVALID_VALUE")
        if any(not known.held for known in freed - made):
            raise RefusedError("INVALID_VALUE")
        for known in made | freed:
            known.hold(known not in freed)

    def destroy(self) -> None:
        """It goes when its last launch is done."""
        handles.drop(self.handle)
        self.graph.execs -= 1
        work = Work("end of an exec", 0 if self.last is None else self.last.device, lambda _: Once(self._release))
        work.after(self.last)
        if work.blocked:
            machine.submit(work)
        else:
            self._release()

    def _release(self) -> None:
        for shared in (*self._conditions, *self._memory):
            shared.let_go()


def _check_conditions(graph: Graph) -> list[Condition]:
    """All conditions inside of a graph, each of which must be tested."""
    graphs = [graph, *(inner for node in graph.walk() for inner in node.graphs)]
    conditions = [condition for each in graphs for condition in each.conditions]
    if any(condition.node is None for condition in conditions):
        raise InstantiateError("INVALID_VALUE", InstantiateError.CONDITIONAL_HANDLE_UNUSED)
    return conditions


def _check_bodies(node: Node) -> None:
    for body in node.graphs:
        for inner in body.walk():
            if inner.kind not in _IN_BODIES:
                raise InstantiateError("INVALID_VALUE", InstantiateError.NODE_OPERATION_NOT_SUPPORTED, inner)


# ---- launches ------------------------------------------------------------------------------------------------------


def _spawn(
    parent: Work, steps: tuple[Step, ...], waits: Mapping[int, Work] = {}, records: Mapping[int, Work] = {}
) -> None:
    works: list[Work] = []
    for place, (operation, edges, node) in enumerate(steps):
        work = records.get(place) or Work(node or operation, operation.device, operation.begin)
        for back, moment in edges:
            work.after(works[place - back], moment)
        if place in waits:
            work.after(waits[place])
        if place in records:
            machine.release(work)
        else:
            machine.spawn(parent, work)
        works.append(work)


class _Replay(Plain):
    """A launch. ``waits``: the works that its event wait nodes wait for; ``records``: those of its record nodes."""

    def __init__(
        self,
        work: Work,
        steps: tuple[Step, ...],
        waits: Mapping[int, Work],
        records: Mapping[int, Work],
        defaults: list[tuple[int, int | None]],
    ) -> None:
        self.work, self.steps, self.waits, self.records, self.defaults = work, steps, waits, records, defaults

    def advance(self, fuel: int, /) -> Outcome:
        steps, self.steps = self.steps, ()
        if not steps:
            return "done"
        for address, default in self.defaults:
            if default is not None:
                memory.fill(address, default.to_bytes(4, "little"), 1)
        _spawn(self.work, steps, self.waits, self.records)
        return "parked"


class _Choice(Operation):
    """A conditional node of a launch."""

    kind = "conditional"

    def __init__(self, conditional: Conditional, bodies: tuple[tuple[Step, ...], ...]) -> None:
        self.device, self.conditional, self.bodies = conditional.device, conditional, bodies

    def begin(self, work: Work) -> Task | None:
        return _Choosing(work, self)

    def __str__(self) -> str:
        return str(self.conditional)


class _Choosing(Plain):
    def __init__(self, work: Work, choice: _Choice) -> None:
        self.work, self.choice = work, choice
        self.turns = 0

    def advance(self, fuel: int, /) -> Outcome:
        variety, bodies = self.choice.conditional.variety, self.choice.bodies
        if self.turns and variety != WHILE:
            return "done"
        address = self.choice.conditional.condition.address
        memory.check(address, 4, read=True, what=str(self.choice))
        value = ctypes.c_uint32.from_address(address).value
        place = value if variety == SWITCH else int(not value)
        if place >= len(bodies):
            return "done"
        self.turns += 1
        _spawn(self.work, bodies[place])
        return "parked" if bodies[place] else "running"
