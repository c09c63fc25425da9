"""The order of works: launches, nodes of graphs, copies, fills.

Each has a vector clock of what comes before it. Streams, events, edges and waiting host threads hand it on when they
happen. What the host has seen counts for all of its threads. `races.py` has what accesses make of it.
"""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from . import compiler
from .fault import Fault
from .memory import memory
from .races import CHAINS
from .state import Access, OrderEntry, OrderState

__all__ = ["Order", "Tracker", "tracker"]

_Clock = NDArray[np.uint32]

LAST_NUMBER = 1 << 27  # of works
TIDY = 1024  # works, after which those are forgotten that come before all that can still come


class Order:
    """Where a work stands among the others.

    Attributes:
        what: the work, for a report; it is asked for its text then.
        clock: for each chain, the index up to which works come before it, itself included; None before it has started.
        state: what its accesses are checked against.
    """

    __slots__ = (
        *("_before", "_partly", "_seen", "_unborn"),
        *("clock", "device", "early", "generation", "parent", "state", "what"),
    )

    def __init__(self, what: object, device: int) -> None:
        self.what, self.device = what, device
        self.parent: Order | None = None
        self.clock: _Clock | None = None
        self.early: _Clock | None = None
        self.state: OrderState | None = None
        self.generation = 0
        self._before: list[Order] = []  # it starts after their end
        self._partly: list[tuple[Order, bool]] = []  # it starts after they have started, or have triggered
        self._seen: _Clock | None = None  # what its parent, or else the host, knew when it was submitted
        self._unborn: list[Order] = []  # works that it is the parent of, and which were submitted before it started

    def after(self, other: Order, *, ended: bool, triggered: bool) -> None:
        if ended:
            self._before.append(other)
        else:
            self._partly.append((other, triggered))

    def learn(self, other: Order) -> None:
        """It knows from now on what another one knows, which has ended."""
        if other.clock is not None and self.clock is not None and other.generation == self.generation:
            np.maximum(self.clock, other.clock, out=self.clock)

    @property
    def address(self) -> int:
        """Of its state."""
        return ctypes.addressof(self.state) if self.state is not None else 0


class Tracker:
    """Knows the order of all works of the process, and who accessed which bytes of its address space last.

    All of it is called under the machine's lock.

    Attributes:
        on: works get an `Order`; what programs of the mode "raced" access is looked at.
        current: the work that runs.
    """

    def __init__(self) -> None:
        self.on = False
        self.current: Order | None = None
        self._number = 0
        self._generation = 0
        self._table = self._records = 0
        self._forget_all()

    def begin(self) -> None:
        """From now on works are tracked."""
        if not self._records:
            self._records = memory.room(3 * memory.nbytes)
            self._table = memory.room(LAST_NUMBER * ctypes.sizeof(OrderEntry))
        self.on = True
        memory.tracker = self

    def end(self) -> None:
        self.on = False
        self.current = None
        memory.tracker = None
        self._forget_all()

    def _forget_all(self) -> None:
        """All that was comes before all that comes."""
        self._generation += 1
        self._floor = self._number + 1
        self._host: _Clock = np.zeros(CHAINS, np.uint32)
        self._tails: _Clock = np.zeros(CHAINS, np.uint32)
        self._chains = 0
        self._known: dict[int, Order] = {}  # by number
        self._live: set[Order] = set()
        self._devices: dict[int, _Clock] = {}  # what comes before the end of all that has ended

    # The life of a work

    def order(self, what: object, device: int) -> Order:
        return Order(what, device)

    def run(self, order: Order | None) -> None:
        """It is the one that runs now."""
        self.current = order
        if order is not None and order.state is None:
            self._start(order)

    def submit(self, order: Order) -> None:
        parent = order.parent
        if parent is None:
            order._seen = self._host
        elif parent.clock is not None:
            order._seen = parent.clock.copy()
        else:
            parent._unborn.append(order)
        self._live.add(order)

    def _start(self, order: Order) -> None:
        """It starts; all that it waited for has happened."""
        order.generation = self._generation
        early = np.zeros(CHAINS, np.uint32) if order._seen is None else order._seen.copy()
        for other in order._before:
            if other.clock is not None and other.generation == self._generation:
                np.maximum(early, other.clock, out=early)
        for other, triggered in order._partly:  # what they come after came before this one
            if other.generation == self._generation and other.state is not None:
                known = other.clock if triggered and not other.state.triggered_early else other.early
                assert known is not None
                entry = self._entry(other.state.number)
                mine = int(early[entry.chain])
                np.maximum(early, known, out=early)
                early[entry.chain] = max(mine, min(int(early[entry.chain]), entry.index - 1))
        self._enter(order, early)
        order.early = order.clock = early
        if order._partly:
            order.clock = early.copy()
            for other, _ in order._partly:
                if other not in self._live:
                    order.learn(other)
        order.state = OrderState(
            number=self._number,
            floor=self._floor,
            clock=order.clock.ctypes.data,
            early=early.ctypes.data,
            works=self._table,
            writers=self._records - memory.base,
            readers=self._records - memory.base + memory.nbytes,
            others=self._records - memory.base + 2 * memory.nbytes,
        )
        self._entry(self._number).clock = order.clock.ctypes.data
        for child in order._unborn:
            child._seen = early.copy()
        order._before, order._partly, order._unborn, order._seen = [], [], [], None

    def _enter(self, order: Order, clock: _Clock) -> None:
        """Give it a number, and a place in a chain."""
        self._number += 1
        if self._number >= LAST_NUMBER:
            raise MemoryError(f"races are looked for among at most {LAST_NUMBER} works")
        self._known[self._number] = order
        count = self._chains
        ready = np.flatnonzero(clock[:count] >= self._tails[:count])
        chain = int(ready[0]) if len(ready) else count
        entry = self._entry(self._number)
        entry.chain, entry.index = min(chain, CHAINS - 1), 0
        if chain < CHAINS - 1:
            self._chains = max(count, chain + 1)
            entry.index = self._tails[chain] + 1
            self._tails[chain] = clock[chain] = entry.index
        if not self._number % TIDY:
            self._tidy()

    def _entry(self, number: int) -> OrderEntry:
        return OrderEntry.from_address(self._table + number * ctypes.sizeof(OrderEntry))

    def finish(self, order: Order) -> None:
        """It is over, whether it was done or dropped."""
        self._live.discard(order)
        if order.clock is None or order.generation != self._generation:
            return
        if order.parent is not None:
            order.parent.learn(order)
        old = self._devices.get(order.device)
        self._devices[order.device] = order.clock.copy() if old is None else np.maximum(old, order.clock)

    # What the host sees

    def saw(self, order: Order | None) -> None:
        """A host thread knows that a work is over."""
        if order is not None and order.clock is not None and order.generation == self._generation:
            self._see(order.clock)

    def saw_device(self, device: int) -> None:
        """A host thread knows that all works of a device are over."""
        seen = self._devices.get(device)
        if seen is not None:
            self._see(seen)

    def _see(self, clock: _Clock) -> None:
        self._host = np.maximum(self._host, clock)
        if not self._live and (self._host >= self._tails).all():
            self._forget_all()

    def _tidy(self) -> None:
        """Forget works that come before all that runs, waits or can still come."""
        known = self._host
        for order in self._live:
            clock = order.early if order.early is not None else order._seen
            if clock is not None:
                known = np.minimum(known, clock)
        for number in range(self._floor, self._number):
            entry = self._entry(number)
            if entry.index > known[entry.chain]:
                break
            entry.clock = 0
            del self._known[number]
            self._floor = number + 1

    # Accesses

    def touch(self, address: int, nbytes: int, *, write: bool, strong: bool = False) -> None:
        """The work that runs reads or writes a range, itself; `Fault` for a race. A strong read waits for whatever
        write there is: it comes after that."""
        order = self.current
        if order is None or order.state is None or not nbytes:
            return
        if strong and not write:
            record = ctypes.c_uint32.from_address(address // 4 * 4 + order.state.writers).value
            compiler.runtime().race_follow(order.address, record >> 5)
            return
        how = (Access.WRITES if write else Access.READS) | (Access.STRONG if strong else 0)
        if strong and write:
            how |= Access.READS
        if compiler.runtime().race_global(order.address, False, address, nbytes, how):
            state = order.state
            who = f"{order.what} {'writes' if write else 'reads'} {nbytes} bytes at {address:#x}"
            report = self.report(order, state.address, state.other, bool(state.other_wrote))
            raise Fault("CUDA_ERROR_LAUNCH_FAILED", f"race: {who}: {report}")

    def report(self, order: Order, address: int, other: int, wrote: bool) -> str:
        """Of a race with the work of number ``other``: where, who, and what is missing."""
        known = self._known.get(other)
        name = "an earlier work" if known is None else f"{known.what} on cpu:{known.device}"
        in_graph = known is not None and known.parent is not None and known.parent is order.parent
        missing = "edge" if in_graph else "edge, stream, event or wait of the host"
        return f"{memory.place(address)}, which {name} {'writes' if wrote else 'reads'}: no {missing} orders them"

    def renew(self, address: int, nbytes: int) -> None:
        """What was at a range is gone."""
        for number in range(3):
            memory.clear(self._records + number * memory.nbytes + address - memory.base, nbytes)


tracker = Tracker()
