"""Graphs and execs, as the driver has them.

A `Graph` is nodes and edges that can be changed. An `Exec` is made of one: it has its own copy of the structure, and
operations that can be replaced. A launch takes the operations as they are then.

Source: CUDA Driver API, "Graph Management".
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from .handles import RefusedError, handles
from .machine import END, START, TRIGGER, Once, Outcome, Plain, Task, Work, machine
from .memory import memory
from .operations import Allocate, Copy, Empty, Free, Launch, Operation, Shared
from .order import tracker

if TYPE_CHECKING:
    from .streams import Event, Stream

__all__ = [
    "LAUNCH_ORDER",
    "MOMENTS",
    "PLAIN",
    "PROGRAMMATIC",
    "PROGRAMMATIC_START",
    "UPLOAD",
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
    "check_port",
]

EdgeData = tuple[int, int, int]  # from_port, to_port and type of CUgraphEdgeData
PLAIN, PROGRAMMATIC, PROGRAMMATIC_START, LAUNCH_ORDER = (0, 0, 0), (1, 0, 1), (2, 0, 1), (2, 0, 0)
MOMENTS = {PLAIN: END, PROGRAMMATIC: TRIGGER, PROGRAMMATIC_START: START, LAUNCH_ORDER: START}

IF, WHILE, SWITCH = 0, 1, 2  # CUgraphConditionalNodeType
AUTO_FREE, UPLOAD, DEVICE_LAUNCH, NODE_PRIORITY = 1, 2, 4, 8  # CUgraphInstantiate_flags

_ONCE = ("conditional", "mem_alloc", "mem_free")  # what is in no two graphs, and in one exec at a time
_WORK = ("kernel", "memcpy", "memset")  # what runs in a context; in an exec it can be disabled
_DEVICE_LAUNCHED = (*_WORK, "graph")
_IN_BODIES = (*_DEVICE_LAUNCHED, "empty", "conditional")


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

    def check_update(self, old: Operation) -> str | None:
        assert isinstance(old, Conditional)
        same = (self.variety, len(self.bodies)) == (old.variety, len(old.bodies))
        return None if same else "NOT_SUPPORTED"

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
    """A node of a graph. ``dependencies`` and ``dependents`` are its edges, in the order in which they were made:
    there is one at most between two nodes, whatever its data.

    ``said`` keeps alive what its parameters, once they were asked for, point to; ``name`` is for reports.
    ``device_handle`` is what kernels call it, if they may change it: a copy says that of the original.
    """

    __slots__ = ("dependencies", "dependents", "device_handle", "graph", "handle", "name", "operation", "said")

    def __init__(self, graph: Graph, operation: Operation) -> None:
        self.graph, self.operation = graph, operation
        self.handle = self.device_handle = handles.add(self)
        self.dependencies: dict[Node, EdgeData] = {}
        self.dependents: dict[Node, EdgeData] = {}
        self.said: object = None
        self.name = ""

    @property
    def kind(self) -> str:
        return self.operation.kind

    @property
    def updatable(self) -> bool:
        """Whether kernels may change it, and not what it is a copy of."""
        return self.operation.updatable and self.device_handle == self.handle

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
        destroyed: it has nothing any more. A body can be that before its node: a broken capture takes its graph along.
    """

    def __init__(self, owner: Node | None = None) -> None:
        self.handle = handles.add(self)
        self.owner = owner
        self.nodes: dict[Node, None] = {}
        self.conditions: list[Condition] = []
        self.twins: dict[Node, Node] = {}
        self.execs = 0
        self.destroyed = False

    def walk(self) -> Iterator[Node]:
        """All nodes, those inside of others too."""
        for node in self.nodes:
            yield node
            for graph in node.graphs:
                yield from graph.walk()

    def around(self) -> Iterator[Graph]:
        """It, and the graphs that it is inside of."""
        graph: Graph | None = self
        while graph is not None:
            yield graph
            graph = graph.owner.graph if graph.owner is not None else None

    def within(self) -> Iterator[Graph]:
        """It, and the graphs inside of it."""
        yield self
        for node in self.walk():
            yield from node.graphs

    def edges(self) -> list[tuple[Node, Node, EdgeData]]:
        return [(node, target, data) for node in self.nodes for target, data in node.dependents.items()]

    def _is_exclusive(self) -> bool:
        """Whether there can be only one exec of it at a time, and no clone."""
        return self._holds(*_ONCE) or any(node.updatable for node in self.walk())

    def _holds(self, *kinds: str) -> bool:
        return any(node.kind in kinds for node in self.walk())

    def _has_memory(self) -> bool:
        return any(node.kind in ("mem_alloc", "mem_free") for node in self.nodes)

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
            self.connect(source, node, data)
        for shared in _shared_by(operation):
            shared.keep()
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
        """A node that tests a condition of this graph, or of any that has the same one around it; its bodies are new
        graphs."""
        *_, outermost = self.around()
        known = (known for graph in outermost.within() for known in graph.conditions)
        tested = next((each for each in known if each.address == condition), None)
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
        """``graph``, or a copy of it, as a node."""
        if graph in self.around():
            raise RefusedError("INVALID_VALUE")
        if graph.owner is not None or graph._holds(*(("conditional",) if move else _ONCE)):
            raise RefusedError("NOT_SUPPORTED")
        if move and graph.execs and graph._is_exclusive():
            raise RefusedError("NOT_SUPPORTED")
        inner = graph if move else graph._copy()
        try:
            return self.add(Child(device, inner), edges)
        except RefusedError:
            if not move:
                inner.destroy()
            raise

    def remove(self, node: Node) -> None:
        """Take a node out, its edges, and the graphs inside of it."""
        if self._has_memory() or node.updatable:
            raise RefusedError("NOT_SUPPORTED")
        for source in node.dependencies:
            del source.dependents[node]
        for target in node.dependents:
            del target.dependencies[node]
        del self.nodes[node]
        self._forget(node)

    def _forget(self, node: Node) -> None:
        handles.drop(node.handle)
        for shared in _shared_by(node.operation):
            shared.let_go()
        if isinstance(node.operation, Conditional):
            node.operation.condition.node = None
        for graph in node.graphs:
            graph.destroy()

    def add_edge(self, source: Node, target: Node, data: EdgeData) -> None:
        if source.graph is not self or target.graph is not self or source is target:
            raise RefusedError("INVALID_VALUE")
        _check_edge(source.kind, target.kind, data)
        if target in source.dependents:
            raise RefusedError("INVALID_VALUE")
        self.connect(source, target, data)

    def connect(self, source: Node, target: Node, data: EdgeData) -> None:
        """An edge that is known to be allowed."""
        source.dependents[target] = target.dependencies[source] = data

    def remove_edge(self, source: Node, target: Node) -> None:
        if source.graph is not self or target not in source.dependents:
            raise RefusedError("INVALID_VALUE")
        if self._has_memory():
            raise RefusedError("NOT_SUPPORTED")
        del source.dependents[target], target.dependencies[source]

    def clone(self) -> Graph:
        """A copy of it; not of a body."""
        if (self.owner is not None and self.owner.kind == "conditional") or self._is_exclusive():
            raise RefusedError("NOT_SUPPORTED")
        return self._copy()

    def _copy(self) -> Graph:
        copy = Graph()
        for node in self.nodes:
            operation = node.operation
            if isinstance(operation, Child):
                operation = Child(operation.device, operation.graph._copy())
            twin = copy.twins[node] = copy.add(operation)
            twin.name = node.name
            if operation.updatable:
                twin.device_handle = node.device_handle
        for source, target, data in self.edges():
            copy.connect(copy.twins[source], copy.twins[target], data)
        return copy

    def destroy(self) -> None:
        if self.destroyed:
            return
        self.destroyed = True
        handles.drop(self.handle)
        for node in self.nodes:
            self._forget(node)
        for condition in self.conditions:
            condition.let_go()
        self.nodes.clear()

    # For execs

    @property
    def exits(self) -> list[Node]:
        """The nodes that none waits for."""
        return [node for node in self.nodes if not node.dependents]

    def ordered(self) -> list[Node]:
        """Its nodes, each behind those that it waits for; `InstantiateError` names one of a circle, or whose body is
        gone."""
        if self.destroyed:
            raise InstantiateError(InstantiateError.INVALID_STRUCTURE, self.owner)
        missing = {node: len(node.dependencies) for node in self.nodes}
        order = [node for node, count in missing.items() if not count]
        for node in order:
            for target in node.dependents:
                missing[target] -= 1
                if not missing[target]:
                    order.append(target)
        if len(order) < len(missing):
            node, passed = next(node for node, count in missing.items() if count), set[Node]()
            while node not in passed:
                passed.add(node)
                node = next(source for source in node.dependencies if missing[source])
            raise InstantiateError(InstantiateError.INVALID_STRUCTURE, node)
        return order


def _check_edge(source: str, target: str, data: EdgeData) -> None:
    """Only to a kernel an edge can be made programmatic: a capture makes others, too."""
    check_port(source, data)
    if data in (PROGRAMMATIC, PROGRAMMATIC_START) and target != "kernel":
        raise RefusedError("INVALID_VALUE")


def check_port(source: str, data: EdgeData) -> None:
    """Only kernels have ports."""
    if data not in MOMENTS or (data != PLAIN and source != "kernel"):
        raise RefusedError("INVALID_VALUE")


def _moment(data: EdgeData, operation: Operation) -> int:
    """What an operation waits for: only a kernel can begin before what it depends on ends, and wait for that later."""
    programmatic = data in (PROGRAMMATIC, PROGRAMMATIC_START)
    return END if programmatic and not isinstance(operation, Launch) else MOMENTS[data]


# ---- execs ---------------------------------------------------------------------------------------------------------


class InstantiateError(RefusedError):
    """``result`` is a number of ``CUgraphInstantiateResult``."""

    INVALID_STRUCTURE, OPERATION_NOT_SUPPORTED, MULTIPLE_CONTEXTS, CONDITIONAL_HANDLE_UNUSED = range(2, 6)

    def __init__(self, result: int, node: Node | None = None) -> None:
        super().__init__("INVALID_VALUE")
        self.result, self.node = result, node


class UpdateError(RefusedError):
    """``result`` is a name of ``CUgraphExecUpdateResult``, "" where that says no more; ``node`` is of the graph that
    was to be taken over."""

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
        self.nodes = tuple(graph.ordered())
        places = {node: place for place, node in enumerate(self.nodes)}
        self.items = [
            _Item(self, node, tuple((places[source], data) for source, data in node.dependencies.items()))
            for node in self.nodes
        ]
        self.exits = [places[node] for node in graph.exits]
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
                edges = tuple((len(steps) - ends[place], _moment(data, item.operation)) for place, data in item.edges)
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
        changes: list[tuple[_Item, Operation]] = []
        for node, place in self._pair(graph).items():
            item = self.items[place]
            if node.kind != item.operation.kind:
                raise UpdateError("NODE_TYPE_CHANGED", node)
            if node.operation.updatable or item.operation.updatable:
                raise RefusedError("NOT_SUPPORTED")
            why = node.operation.check_update(item.operation)
            if why is not None:
                raise UpdateError(why, node)
            if node.operation.absent is not None:
                raise UpdateError("", node)
            changes.append((item, node.operation))
            for structure, inner in zip(item.inside, node.graphs, strict=True):
                changes += structure.match(inner)
        return changes

    def _pair(self, graph: Graph) -> dict[Node, int]:
        """The place of the item for each node: exits are paired from the last one on, and from there on backwards what
        two wait for, in the order of their edges."""
        exits = graph.exits[::-1]
        if len(graph.nodes) != len(self.items) or len(exits) < len(self.exits):
            raise UpdateError("TOPOLOGY_CHANGED")
        if len(exits) > len(self.exits):
            raise UpdateError("TOPOLOGY_CHANGED", exits[len(self.exits)])
        places = dict(zip(exits, reversed(self.exits), strict=True))
        nodes = {place: node for node, place in places.items()}
        for node in exits:  # and what is appended
            edges = self.items[places[node]].edges
            if len(node.dependencies) != len(edges):
                raise UpdateError("TOPOLOGY_CHANGED", node)
            for (source, data), (place, known_data) in zip(node.dependencies.items(), edges, strict=True):
                if source not in places and place not in nodes:
                    places[source], nodes[place] = place, source
                    exits.append(source)
                if data != known_data or places.get(source) != place:
                    raise UpdateError("TOPOLOGY_CHANGED", node, source)
        if len(places) < len(self.items):  # in a circle
            raise UpdateError("TOPOLOGY_CHANGED")
        return places


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
        if flags & ~(AUTO_FREE | UPLOAD | DEVICE_LAUNCH | NODE_PRIORITY):
            raise RefusedError("INVALID_VALUE")
        if flags & AUTO_FREE and flags & DEVICE_LAUNCH:
            raise RefusedError("INVALID_VALUE")
        if graph.owner is not None:
            raise RefusedError("NOT_SUPPORTED")
        self._structure = _Structure(graph)
        _check_conditions(graph)
        for node in graph.walk():
            if node.kind == "conditional":
                for body in node.graphs:
                    _check_device_side(body, node.operation.device, _IN_BODIES, InstantiateError.MULTIPLE_CONTEXTS)
        if flags & DEVICE_LAUNCH:
            devices = [node.operation.device for node in graph.walk() if node.kind in _WORK]
            device = devices[0] if devices else 0
            _check_device_side(graph, device, _DEVICE_LAUNCHED, InstantiateError.OPERATION_NOT_SUPPORTED)
            if not devices:
                raise RefusedError("INVALID_VALUE")
        if graph._is_exclusive() and graph.execs:
            raise RefusedError("NOT_SUPPORTED")
        self.flags, self.graph = flags, graph
        self.last: Work | None = None
        self._items: Mapping[Node, _Item] = dict(self._structure.walk())
        for shared in self._shared():
            shared.keep()
        graph.execs += 1
        self.handle = handles.add(self)

    def _shared(self) -> Iterator[Shared]:
        """What must be there as long as it is."""
        for item in self._items.values():
            yield from _shared_by(item.operation)

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
        self._apply(item.inside[0].match(graph))

    def enable(self, node: Node, enabled: bool) -> None:
        item = self._switchable(node)
        item.enabled = enabled
        item.structure.changed()

    def is_enabled(self, node: Node) -> bool:
        return self._switchable(node).enabled

    def _switchable(self, node: Node) -> _Item:
        item = self.item(node)
        if item.operation.kind not in _WORK:
            raise RefusedError("INVALID_VALUE")
        return item

    def update(self, graph: Graph) -> None:
        """Take over all parameters; `UpdateError` names the node that cannot be."""
        self._apply(self._structure.match(graph))

    def _apply(self, changes: list[tuple[_Item, Operation]]) -> None:
        replaced = [shared for item, _ in changes for shared in _shared_by(item.operation)]
        for item, operation in changes:
            for shared in _shared_by(operation):
                shared.keep()
            item.put(operation)
        self._let_go(replaced)

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
        defaults = [(known.address, known.default) for known in self._shared() if isinstance(known, Condition)]
        work.task = _Replay(work, steps, waits, records, defaults)
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
        self._let_go(list(self._shared()))

    def _let_go(self, things: Sequence[Shared]) -> None:
        """When the launches so far are done."""

        def let_go() -> None:
            for shared in things:
                shared.let_go()

        if not things or self.last is None or self.last.over:
            let_go()
        else:
            work = Work("end of what an exec had", self.last.device, lambda _: Once(let_go))
            work.after(self.last)
            machine.submit(work)


def _shared_by(operation: Operation) -> tuple[Shared, ...]:
    if isinstance(operation, Allocate | Free):
        return (operation.memory,)
    return (operation.condition,) if isinstance(operation, Conditional) else ()


def _check_conditions(graph: Graph) -> None:
    """All conditions inside of a graph must be tested."""
    if any(condition.node is None for each in graph.within() for condition in each.conditions):
        raise InstantiateError(InstantiateError.CONDITIONAL_HANDLE_UNUSED)


def _check_device_side(graph: Graph, device: int, kinds: Sequence[str], pageable: int) -> None:
    """What no host takes part in is all in one context, and ordinary host memory is in none: ``pageable`` says what
    copies of that are called."""
    for node in graph.walk():
        operation = node.operation
        if operation.kind not in kinds:
            raise InstantiateError(InstantiateError.OPERATION_NOT_SUPPORTED, node)
        if isinstance(operation, Copy) and None in operation.devices:
            raise InstantiateError(pageable, node)
        if operation.kind in _WORK and operation.device != device:
            raise InstantiateError(InstantiateError.MULTIPLE_CONTEXTS, node)


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


_LONG = 256  # turns of a loop, from which on it is asked whether they change anything


def _depends_on_memory_alone(bodies: Iterable[tuple[Step, ...]]) -> bool:
    """Whether what these do is decided by what is in the devices' memory: not by a clock, nor by what a host has."""
    for operation in (step.operation for body in bodies for step in body):
        if isinstance(operation, Launch) and operation.kernel.function.compiled.timed:
            return False
        if isinstance(operation, Copy) and None in operation.devices:
            return False
        if isinstance(operation, _Choice) and not _depends_on_memory_alone(operation.bodies):
            return False
    return True


class _Choosing(Plain):
    def __init__(self, work: Work, choice: _Choice) -> None:
        self.work, self.choice = work, choice
        self.turns = 0
        self._before: bytes | None = None  # a digest of all memory before the last turn of a loop

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
        if variety == WHILE and self._in_vain():
            return "stalled"
        self.turns += 1
        _spawn(self.work, bodies[place])
        return "parked" if bodies[place] else "running"

    def _in_vain(self) -> bool:
        """Whether the last turn has left all memory as it was, and so will the next one until others change some."""
        asks = self.turns >= _LONG and not self.turns & (self.turns - 1)
        if self._before is None and not (asks and _depends_on_memory_alone(self.choice.bodies)):
            return False
        before, now = self._before, memory.digest()
        if now is not None and now == before:
            return True
        self._before = now if asks else None
        return False

    def waiting(self) -> list[str]:
        if self._before is None:
            return []
        return [f"its body has run {self.turns} times, and leaves the condition and all other memory as it was"]
