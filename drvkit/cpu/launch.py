"""A launch in flight."""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterator
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from . import compiler
from .fault import Fault
from .lower.core import FAULTS
from .lower.sync import told
from .memory import Allocation, memory
from .order import Order, tracker
from .ptx import SIZES
from .races import Clocks
from .state import (
    COPIES,
    EXITED,
    HELD,
    LOOKS,
    REGISTERS,
    SHARED_STRIDE,
    BlockState,
    BufferedStore,
    Code,
    CopyState,
    GridState,
    LookState,
    SlotState,
    StoreBuffer,
    WarpState,
    WarpStatus,
)
from .storage import addresses

if TYPE_CHECKING:
    from .explore import Held, Schedule
    from .program import Function, Place

__all__ = ["Grid"]

MULTIPROCESSORS = 132  # as an H200 has
FUEL = 1 << 15  # loop iterations of a warp, until others get their turn
LATEST = 1 << 61  # ns that a clock may be ahead
FIRST_WARP = -(-ctypes.sizeof(BlockState) // 64) * 64


SPARE = 64  # slots that a function keeps for later launches
STORES = 512  # that a store buffer holds
BUFFER_BYTES = ctypes.sizeof(StoreBuffer) + STORES * ctypes.sizeof(BufferedStore)


@cache
def _device_buffer(device: int) -> NDArray[np.uint8]:
    """Stores that the blocks of a device see, and nobody else."""
    buffer = np.zeros(BUFFER_BYTES, np.uint8)
    StoreBuffer.from_address(buffer.ctypes.data).capacity = STORES
    return buffer


class _InFlight:
    """The launches that are explored, and what they have stored."""

    def __init__(self) -> None:
        self.grids: list[Grid] = []
        self._buffers: dict[int, tuple[StoreBuffer, int, Grid]] = {}  # a device's only once; empty: to be listed anew
        self._delivered: object = None  # what was held the last time, and what then was left

    def moved(self) -> None:
        """Other blocks are resident than before."""
        self._buffers.clear()
        self._delivered = None

    def deliver(self, held: Held | None) -> None:
        """Send stores on their way, but those that are held; None holds all."""
        if held is None:
            return
        if not self._buffers:
            for grid in self.grids:
                found = {at: (StoreBuffer.from_address(at), number, grid) for at, number in grid._buffers()}
                self._buffers.update(found)
        if self._delivered == (held, *self._left()):
            return
        for at, (buffer, number, grid) in self._buffers.items():
            if buffer.count:
                grid.run.deliver(ctypes.addressof(grid.state), at, held.salt ^ number, held.shift, held.odds)
        self._delivered = held, *self._left()

    def _left(self) -> tuple[list[int], list[int]]:
        """As long as this is the same, all that is still on its way was there before."""
        return [buffer.count for buffer, _, _ in self._buffers.values()], [grid.state.stores for grid in self.grids]


_in_flight = _InFlight()


class Slot:
    """Room for a resident cluster."""

    def __init__(
        self,
        block_bytes: int,
        blocks: int,
        shared_bytes: int,
        local_bytes: int,
        copies_bytes: int,
        buffer_bytes: int,
        watched: tuple[int, int] | None,
    ) -> None:
        """``watched``: where races are looked for, the warps of a block and the bytes of a granule."""
        self.key = (block_bytes, blocks, shared_bytes, local_bytes, copies_bytes, buffer_bytes, watched)
        self.buffers = np.zeros(blocks * buffer_bytes, np.uint8)
        self.states = np.zeros(block_bytes * blocks + 64, np.uint8)
        self.copies = np.zeros(copies_bytes, np.uint8)
        self.address = -(-self.states.ctypes.data // 64) * 64
        self.shared: Allocation | None = None
        self.local: Allocation | None = None
        window = (blocks - 1) * SHARED_STRIDE + shared_bytes if shared_bytes else 0
        if shared_bytes:
            self.shared = memory.allocate(window, "shared", align=1024)
            memory.forbid(self.shared.address, window)
        if local_bytes:
            self.local = memory.allocate(local_bytes, "local")
        self.clocks: Clocks | None = None
        if watched is not None:
            warps, granule = watched
            at = self.shared.address if self.shared else 0
            self.clocks = Clocks(blocks, warps, window, granule.bit_length() - 1, at)

    def fill(self, state: SlotState) -> None:
        state.blocks = self.address
        state.shared = self.shared.address if self.shared else 0
        state.local = self.local.address if self.local else 0
        state.copies = self.copies.ctypes.data
        state.buffers = self.buffers.ctypes.data
        state.clocks = ctypes.addressof(self.clocks.state) if self.clocks else 0
        state.active = 0

    @property
    def worn(self) -> bool:
        return self.clocks is not None and self.clocks.worn

    def close(self) -> None:
        for allocation in (self.shared, self.local):
            if allocation is not None and not allocation.freed:
                memory.free(allocation.address)


@lru_cache(maxsize=256)
def _template(block: tuple[int, int, int]) -> NDArray[np.uint8]:
    """The warps of a block as they begin, without their registers."""
    x, y, z = block
    threads = x * y * z
    warps = -(-threads // 32)
    states = np.zeros((warps, REGISTERS), np.uint8)
    linear = np.arange(warps * 32, dtype=np.uint32).reshape(warps, 32)
    columns = {
        "pc": np.where(linear < threads, 0, EXITED).astype(np.uint32),
        "tid_x": linear % x,
        "tid_y": linear // x % y,
        "tid_z": linear // (x * y),
        "index": np.arange(warps, dtype=np.uint32)[:, None],
        "polled": np.full((warps, 1), 0xFFFFFFFF, np.uint32),
    }
    for name, values in columns.items():
        offset = getattr(WarpState, name).offset
        data = np.ascontiguousarray(values, np.uint32).view(np.uint8)
        states[:, offset : offset + data.shape[1]] = data
    return states.reshape(-1)


class Grid:
    """A launch, advanced bit by bit.

    Attributes:
        triggered: whether all blocks have let dependent launches begin, or have ended.
        dependencies_done: whether ``griddepcontrol.wait`` may pass.
    """

    _serial = 0

    def __init__(
        self,
        function: Function,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        params: bytes,
        *,
        shared: int,
        cluster: tuple[int, int, int],
        cooperative: bool,
        device: int,
        order: Order | None = None,
    ) -> None:
        compiled = function.compiled
        explored, raced = function.program.mode == "explored", function.program.mode == "raced"
        self.order = order
        self.function, self.grid, self.block, self.cluster = function, grid, block, cluster
        self.run, self.code = compiler.runtime(), function.address
        self._kernel = self.run.kernel(self.code)
        threads = block[0] * block[1] * block[2]
        warps = -(-threads // 32)
        blocks = cluster[0] * cluster[1] * cluster[2]
        clusters = grid[0] * grid[1] * grid[2] // blocks
        self.params = memory.allocate(max(len(params), 1), "param", written=True)
        memory.write(self.params.address, params)
        self._workspace = memory.allocate(8, "workspace") if cooperative else None
        if self._workspace:
            memory.write(self._workspace.address, np.array([8, 0], np.uint32).tobytes())
        variables = [function.program.variables[name][0] for name in compiled.globals]
        self._blocks = clusters * blocks
        self._globals = np.array([*variables, 0], np.uint64)
        self._multicast = addresses.multicast_ranges()
        self._template = _template(block)
        shared_bytes = compiled.dynamic_offset + shared if shared else compiled.shared_bytes
        copies = COPIES * ctypes.sizeof(CopyState) if compiled.uses_copies else 0
        block_bytes = FIRST_WARP + warps * compiled.warp_bytes
        self._slot_key = (
            block_bytes,
            blocks,
            shared_bytes,
            blocks * warps * 32 * compiled.local_bytes,
            blocks * warps * copies,
            BUFFER_BYTES if explored else 0,
            (warps, compiled.granule) if raced else None,
        )
        resident = MULTIPROCESSORS * max(1, min(32, 2048 // (warps * 32), 233472 // (shared_bytes + 1024)))
        self.capacity = clusters if cooperative else min(clusters, max(1, resident // blocks))
        self.slots: list[Slot] = []
        self._room = (SlotState * 1)()
        self.state = GridState(
            memory_base=memory.base,
            memory_bytes=memory.nbytes,
            shadow=memory.shadow,
            params=self.params.address,
            globals=self._globals.ctypes.data,
            grid=grid,
            block=block,
            cluster=cluster,
            threads=threads,
            warps=warps,
            cluster_blocks=blocks,
            shared_bytes=shared_bytes,
            dynamic_shared_bytes=shared,
            local_bytes=compiled.local_bytes,
            device=device,
            explicit_cluster=blocks > 1,
            dependencies_done=1,
            clusters=clusters,
            block_bytes=block_bytes,
            warp_bytes=compiled.warp_bytes,
            template=self._template.ctypes.data,
            fuel=FUEL,
            copies_bytes=copies,
            room=1,
            buffer_bytes=BUFFER_BYTES if explored else 0,
            device_buffer=_device_buffer(device).ctypes.data if explored else 0,
            watched=raced,
            order=order.address if order is not None and raced else 0,
            multicast=ctypes.addressof(self._multicast),
            multicast_count=len(self._multicast),
            workspace=self._workspace.address if self._workspace else 0,
        )
        Grid._serial += 1
        self.state.id = Grid._serial & 0xFFFFFFFF
        self.done = False
        self._ending: list[tuple[BlockState, WarpState]] = []  # explored, the last of their blocks: see `step`
        self._resident: list[tuple[BlockState, WarpState]] | None = None  # explored, as `_warps` found them
        self._stalled: tuple[int, bytes] | None = None  # how it was when it last looked in vain
        self._add_slot()
        for number in range(clusters if cooperative else 0):  # all of them are resident from the beginning
            self._begin_in(number)
        if explored:
            _in_flight.grids.append(self)
            _in_flight.moved()

    # Running

    def advance(self, fuel: int = 4096, *, passes: int = 8, step: int = 0) -> str:
        """Run on: "done", "running", or "stalled" if it looked again and is as it was. `Fault` when it failed.

        ``fuel`` counts turns of clusters. Where no warp stores anything they look again for so many ``passes``, and
        the device's clock jumps by ``step`` ns each time.
        """
        if self.done:
            return "done"
        address = ctypes.addressof(self.state)
        while True:
            code = self.run.run(address, self.code, fuel, passes, step)
            if code == Code.WAITING:
                self._add_slot()
                continue
            if code == Code.HOST:
                self._host_call()
                continue
            if code == Code.FAULT:
                fault = self._fault()
                self.close()
                raise fault
            if code == Code.DONE:
                self.close()
                return "done"
            if code == Code.SLICED:
                return "running"
            now = (self.state.stores, self.snapshot())
            same, self._stalled = now == self._stalled, now
            return "stalled" if same else "running"

    def step(self, schedule: Schedule) -> str:
        """One turn of one warp, as the schedule picks it, while it holds back what it likes of the buffered stores.

        For programs that are loaded to be explored. As `advance`, but "stalled" only says that the warp polled.
        """
        if self.done:
            return "done"
        state = self.state
        if state.next_cluster < state.clusters and (state.in_use < self.capacity or self._idle()) and not schedule(3):
            self._begin()
        if self._resident is None:
            self._resident = list(self._warps())
        ready = [pair for pair in self._resident if pair[1].status == WarpStatus.READY]
        if not ready and not self._ending:
            if state.next_cluster < state.clusters and (state.in_use < self.capacity or self._idle()):
                self._begin()
                return "running"
            return "stalled"
        _in_flight.deliver(schedule.held())
        for block, warp in self._ending:
            if not self._on_its_way(block):
                self._ending.remove((block, warp))
                return self._end(block, warp)
        if not ready:
            return "running"
        block, warp = ready[schedule(len(ready))]
        state.current, state.current_block = at = ctypes.addressof(warp), ctypes.addressof(block)
        code = self._kernel(*at, ctypes.addressof(state))
        if code == Code.DONE:
            if block.live > 1 or not self._on_its_way(block):
                return self._end(block, warp)
            warp.status = WarpStatus.DONE
            self._ending.append((block, warp))
        elif code == Code.HOST:
            self._host_call()
        elif code == Code.FAULT:
            fault = self._fault()
            self.close()
            raise fault
        return "stalled" if code == Code.POLLING else "running"

    def _end(self, block: BlockState, warp: WarpState) -> str:
        """A warp has ended, and perhaps all."""
        state = self.state
        self.run.ended(*map(ctypes.addressof, (state, block, warp)))
        if not BlockState.from_address(block.leader).cluster_live:
            self._slot_of(block.leader).active = 0
            self._moved()
            if state.next_cluster == state.clusters and not any(slot.active for slot in self._slot_states):
                self.close()
                return "done"
        return "running"

    def _on_its_way(self, block: BlockState) -> bool:
        """Whether there are stores of a block or its device that not everybody has seen."""
        return any(StoreBuffer.from_address(at).count for at in (block.buffer, self.state.device_buffer))

    def _idle(self) -> bool:
        return any(not slot.active for slot in self._slot_states[: self.state.in_use])

    def _slot_of(self, leader: int) -> SlotState:
        return next(slot for slot in self._slot_states if slot.blocks == leader)

    def _begin(self) -> None:
        """Put the next cluster into a slot: one that has become empty, or a new one."""
        states = self._slot_states
        empty = next((number for number in range(self.state.in_use) if not states[number].active), None)
        self._begin_in(self.state.in_use if empty is None else empty)

    def _begin_in(self, number: int) -> None:
        state = self.state
        if number == len(self.slots):
            self._add_slot()
        state.in_use = max(state.in_use, number + 1)
        self.run.begin(ctypes.addressof(state), ctypes.addressof(self._room[number]), state.next_cluster)
        state.next_cluster += 1
        self._moved()

    def _moved(self) -> None:
        """Other clusters are resident than before."""
        self._resident = None
        _in_flight.moved()

    def _buffers(self) -> Iterator[tuple[int, int]]:
        """The store buffers of its blocks and its device, each with a number of its own."""
        blocks = self.state.cluster_blocks
        for place, slot in enumerate(self._slot_states):
            if slot.active:
                for rank in range(blocks):
                    yield slot.buffers + rank * BUFFER_BYTES, self.state.id << 20 | place * blocks + rank
        yield self.state.device_buffer, self.state.device

    def _add_slot(self) -> None:
        spare = self.function.spare
        slot = next((each for each in spare if each.key == self._slot_key and not each.worn), None)
        if slot is None:
            slot = Slot(*self._slot_key)
        else:
            spare.remove(slot)
        self.slots.append(slot)
        count = len(self.slots)
        if count > len(self._room):
            room = (SlotState * (2 * count))()
            ctypes.memmove(room, self._room, ctypes.sizeof(self._room))
            self._room = room
        self.state.slots = ctypes.addressof(self._room)
        self.state.slot_count = count
        state = self._room[count - 1]
        slot.fill(state)
        for rank in range(self.state.cluster_blocks if self.state.buffer_bytes else 0):
            buffer = StoreBuffer.from_address(state.buffers + rank * BUFFER_BYTES)
            buffer.count, buffer.capacity, buffer.following = 0, STORES, self.state.device_buffer
        if count == self.capacity:
            self.state.room = 0  # no more of them

    @property
    def _slot_states(self) -> list[SlotState]:
        return self._room[: len(self.slots)]

    def close(self) -> None:
        """Give back what it used; it is over."""
        if self.done:
            return
        self.done = True
        if self in _in_flight.grids:
            _in_flight.grids.remove(self)
            self._moved()
        spare = self.function.spare
        spare += self.slots
        while len(spare) > SPARE:
            spare.pop().close()
        self.slots = []
        memory.free(self.params.address)
        if self._workspace:
            memory.free(self._workspace.address)

    # What others ask

    @property
    def triggered(self) -> bool:
        return self.done or self.state.triggered >= self._blocks

    @property
    def dependencies_done(self) -> bool:
        return bool(self.state.dependencies_done)

    @dependencies_done.setter
    def dependencies_done(self, value: bool) -> None:
        self.state.dependencies_done = value

    @property
    def stores(self) -> int:
        """Grows with every store."""
        return int(self.state.stores)

    def snapshot(self) -> bytes:
        """All that decides what it does next, besides memory."""
        return b"".join(slot.states.tobytes() for slot in self.slots)

    def _warps(self) -> Iterator[tuple[BlockState, WarpState]]:
        for slot, state in zip(self.slots, self._slot_states, strict=False):
            if not state.active:
                continue
            for rank in range(self.state.cluster_blocks):
                block_at = slot.address + rank * self.state.block_bytes
                block = BlockState.from_address(block_at)
                for number in range(self.state.warps):
                    at = block_at + FIRST_WARP + number * self.state.warp_bytes
                    yield block, WarpState.from_address(at)

    def skip_time(self) -> bool:
        """If a warp goes round and looks at a clock, let that jump, further each time; whether it did."""
        timers, late = self.function.compiled.timers, self.state.time_shift
        going_round = (warp for _, warp in self._warps() if warp.status == WarpStatus.READY)
        if late >= LATEST or not any(pc in timers for warp in going_round for pc in warp.pc):
            return False
        self.state.time_shift = 2 * late + 10**9
        return True

    def waiting(self) -> list[str]:
        """Who waits where, for what, and what is there; the first of many."""
        found: dict[str, list[str]] = {}
        for block, warp in self._warps():
            if warp.status == WarpStatus.DONE:
                continue
            live = sum(1 << lane for lane in range(32) if warp.pc[lane] != EXITED)
            whole = (1 << min(32, self.state.threads - 32 * warp.index)) - 1
            for mask, what in self._waits(block, warp, live):
                who = f"block {tuple(block.index)} warp {warp.index}" + (f" {_lanes(mask)}" if mask != whole else "")
                if who not in found.setdefault(what, []):  # a round may look at the same from the same line twice
                    found[what].append(who)
        lines = []
        for what, all_ in found.items():
            more = f" and {len(all_) - 4} more" if len(all_) > 4 else ""
            lines.append(f"kernel {self.function.label}: {', '.join(all_[:4])}{more}: {what}")
        return lines

    def _waits(self, block: BlockState, warp: WarpState, live: int) -> Iterator[tuple[int, str]]:
        """Lanes of a warp, and what each of these groups waits for."""
        place = self.function.place(warp.place)
        at = f"{place.where} ({place.name})"
        if warp.status == WarpStatus.WAITING:
            barrier = block.barriers[warp.barrier]
            expected = barrier.expected or 32 * block.live
            yield live, f"at barrier {warp.barrier}, {at}, where {barrier.arrived} of {expected} threads have arrived"
            return
        last = warp.polled if warp.together == EXITED else warp.together  # where those stand who ran last
        standing: dict[int, int] = {}
        for lane in range(32):
            if live >> lane & 1:
                standing[warp.pc[lane]] = standing.get(warp.pc[lane], 0) | 1 << lane
        here = standing.pop(last, live)
        yield from self._looks(warp)
        if not warp.looked:
            stands = place.name.startswith(("griddepcontrol", "barrier"))
            yield here, f"at {at}" if stands else f"in an endless loop, {at}: each round finds all as it was"
        for pc, mask in standing.items() if here != live else ():
            other = self._stand(pc)
            yield mask, f"at {other.where} ({other.name})"

    def _looks(self, warp: WarpState) -> Iterator[tuple[int, str]]:
        """What those lanes of a warp that ran last looked at in that round of their loop."""
        first = ctypes.addressof(warp) + self.function.compiled.looks_offset
        for number in range(min(warp.looked, LOOKS)):
            look = LookState.from_address(first + number * ctypes.sizeof(LookState))
            place = self.function.place(look.place)
            groups: dict[int, int] = {}
            for lane in range(32):
                if look.mask & 1 << lane:
                    groups[look.addresses[lane]] = groups.get(look.addresses[lane], 0) | 1 << lane
            for address, mask in groups.items():
                seen = f"it sees {_seen(place.name, address)} at {address:#x}, {self._where(address)}"
                yield mask, f"at {place.where} ({place.name}), {seen}"

    # Faults

    def _thread(self, lane: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        block = BlockState.from_address(self.state.current_block)
        warp = WarpState.from_address(self.state.current)
        return tuple(block.index), (warp.tid_x[lane], warp.tid_y[lane], warp.tid_z[lane])

    def _fault(self) -> Fault:
        state = self.state
        kind = FAULTS[state.fault_kind]
        place, lane, divergence = self.function.place(state.fault_place), state.fault_lane & 31, ""
        if kind.endswith("divergence"):
            place, lane, divergence = self._divergence(kind, lane)
        block, thread = self._thread(lane)
        who = f"kernel {self.function.label}, {place.where} ({place.name}), block {block}, thread {thread}"
        address, nbytes = state.fault_address, state.fault_bytes
        where = self._where(address)
        verb = "writes" if state.fault_verbs & 1 else "reads"
        access = f"{verb} {nbytes} bytes at {address:#x}"
        if kind == "not allocated":
            if place.name.startswith("multimem."):
                where += f"; {addresses.multicast_refusal(address)}"
            return Fault("CUDA_ERROR_ILLEGAL_ADDRESS", f"{who}: {access}: {where}")
        if kind == "misaligned":
            unfit = f"which is not a multiple of {nbytes}"
            if "bulk" in place.name.split("."):
                unfit = "but address and size have to be multiples of 16"
            return Fault("CUDA_ERROR_MISALIGNED_ADDRESS", f"{who}: {access}, {unfit}: {where}")
        if kind == "not written":
            late = "nothing was written"
            if self._copying(address):
                late = "a cp.async that was not waited for writes there"
            elif any(slot.shared and address in slot.shared for slot in self.slots):
                late += " yet (by a thread that comes later, if any: then a barrier is missing)"
            return Fault("CUDA_ERROR_ILLEGAL_ADDRESS", f"{who}: {access}, where {late}: {where}")
        if kind == "race":
            own, other = ("writes" if state.fault_verbs >> bit & 1 else "reads" for bit in (0, 1))
            rest = f"{self._warp(state.fault_other)} {other}, and no barrier or fence orders them"
            what = f"it {own} {nbytes} bytes at {address:#x}: {where}, which {rest}"
            return Fault("CUDA_ERROR_LAUNCH_FAILED", f"{who}: race: {what}")
        if kind == "no order":
            assert self.order is not None
            own = "writes" if state.fault_verbs & 1 else "reads"
            report = tracker.report(self.order, address, state.fault_other, bool(state.fault_verbs & 2))
            what = f"{self.order.what} {own} {nbytes} bytes at {address:#x}: {report}"
            return Fault("CUDA_ERROR_LAUNCH_FAILED", f"{who}: race: {what}")
        if kind in ("not begun", "ended"):
            peer = (address - BlockState.from_address(state.current_block).shared_base) // SHARED_STRIDE
            why = "may not have begun: no barrier of the cluster was before" if kind == "not begun" else "has ended"
            where = f"shared memory of block {peer} of the cluster, which {why}"
            return Fault("CUDA_ERROR_LAUNCH_FAILED", f"{who}: it reaches into {where}")
        if kind == "trap":
            return Fault("CUDA_ERROR_LAUNCH_FAILED", f"{who}: the kernel gave up (trap)")
        return Fault("CUDA_ERROR_LAUNCH_FAILED", f"{who}: {divergence or kind}")

    def _divergence(self, kind: str, first: int) -> tuple[Place, int, str]:
        """Where the ``first`` one and others wait, which of them waits in vain, and where those are that it misses."""
        warp, place = WarpState.from_address(self.state.current), self.function.place(self.state.fault_place)
        pcs, awaited = list(warp.pc), list(warp.awaited)
        held = [HELD <= pc < EXITED for pc in pcs]
        if held[first]:
            place = self._stand(pcs[first])
            together = [lane for lane in range(32) if held[lane] and awaited[lane] == awaited[first]]
        else:
            together = [lane for lane in range(32) if pcs[lane] == pcs[first]]
        here = sum(1 << lane for lane in together)
        ended = sum(1 << lane for lane in range(32) if pcs[lane] == EXITED)
        for lane in together:
            if not awaited[lane] >> lane & 1:
                return place, lane, f"it is not in its own mask, which names {_lanes(awaited[lane])}"
            missing = awaited[lane] & ~here
            if not held[first]:  # an ended lane counts only for what is aligned, where nothing else can be wrong
                missing = missing & ~ended or missing
            if missing:
                first = lane
                break
        groups: dict[str, int] = {}
        for lane in (lane for lane in range(32) if missing >> lane & 1):
            other = self._stand(pcs[lane]) if pcs[lane] != EXITED else None
            where = f"at {other.where} ({other.name})" if other else "ended"
            if held[lane]:
                where += f", where they wait for {_lanes(awaited[lane])}"
            groups[where] = groups.get(where, 0) | 1 << lane
        others = "; ".join(f"{_lanes(mask)} {where}" for where, mask in groups.items())
        if kind == "barrier divergence":
            return place, first, f"not all threads of the warp come to this barrier: {_lanes(here)} do; {others}"
        return place, first, f"lanes that its mask names are elsewhere: {others}"

    def _stand(self, pc: int) -> Place:
        """Where a lane is."""
        compiled = self.function.compiled
        return self.function.place(compiled.held[pc - HELD] if pc >= HELD else compiled.stands[pc])

    def _warp(self, number: int) -> str:
        """A warp of the running cluster."""
        rank, index = divmod(number, self.state.warps)
        if rank == self.state.cluster_blocks:
            return "a cp.async.bulk that was not waited for"
        last = min(32 * index + 32, self.state.threads) - 1
        block = f" of block {rank} of the cluster" if self.state.cluster_blocks > 1 else ""
        return f"warp {index}{block} (threads {32 * index} to {last})"

    def _where(self, address: int) -> str:
        for slot in self.slots:
            for window, name in ((slot.shared, "shared"), (slot.local, "local")):
                if window is not None and address in window:
                    offset = address - window.address
                    if name == "shared":
                        return f"byte {offset % SHARED_STRIDE} of {self.state.shared_bytes} bytes of shared memory"
                    return f"byte {offset % max(self.state.local_bytes, 1)} of a thread's local memory"
        return memory.place(address)

    def _copying(self, address: int) -> bool:
        """Whether a cp.async that is pending writes there."""
        if not self.function.compiled.uses_copies:
            return False
        for _, warp in self._warps():
            for number in range(warp.copies_done, warp.copies_begun):
                at = warp.copies + number % COPIES * ctypes.sizeof(CopyState)
                entry = CopyState.from_address(at)
                for lane in range(32):
                    if entry.mask >> lane & 1 and entry.target[lane] <= address < entry.target[lane] + entry.nbytes:
                        return True
        return False

    # Calls that Python answers

    def _host_call(self) -> None:
        warp = WarpState.from_address(self.state.current)
        for lane in range(32):
            if not warp.host_mask >> lane & 1:
                continue
            places = [at + lane * self.state.local_bytes for at in warp.host_args if at]
            values = [ctypes.c_uint64.from_address(at).value for at in places]
            if warp.host_call == 1:
                text, count = _formatted(values[0], values[1])
                sys.stdout.write(text)
                memory.write(places[2], count.to_bytes(4, "little"))
            else:
                message, file = (ctypes.string_at(value).decode(errors="replace") for value in values[:2])
                line = values[2] & 0xFFFFFFFF
                function = ctypes.string_at(values[3]).decode(errors="replace")
                block, thread = self._thread(lane)
                self.close()
                where = f"{file}:{line}: {function}: block {block}, thread {thread}"
                raise Fault("CUDA_ERROR_ASSERT", f"{where}: assertion `{message}` failed")


def _seen(opcode: str, address: int) -> str:
    """What is there that an instruction looks at."""
    if address not in memory or not memory.allows(address):  # of a kernel whose accesses are not looked at
        return "something"
    if opcode.startswith("mbarrier"):
        return told(ctypes.c_int64.from_address(address).value)
    _, *modifiers = opcode.split(".")
    type_, count = modifiers[-1], next((int(m[1:]) for m in modifiers if m in ("v2", "v4", "v8")), 1)
    size = SIZES[type_]
    values = []
    for raw in (ctypes.string_at(address + size * number, size) for number in range(count)):
        if type_ in ("f16", "f32", "f64"):
            values.append(str(np.frombuffer(raw, f"<f{size}")[0]))
        else:
            values.append(str(int.from_bytes(raw, "little", signed=type_[0] == "s")))
    return ", ".join(values)


def _lanes(mask: int) -> str:
    """As text: ``lanes 0-7, 9``."""
    bits = f"{mask:032b}"[::-1]
    runs = [(run.start(), run.end() - 1) for run in re.finditer("1+", bits)]
    return f"lanes {', '.join(f'{low}-{high}' if low < high else str(low) for low, high in runs)}"


_CONVERSION = re.compile(r"%([-+ #0]*)(\*|\d*)(\.\*|\.\d*)?(hh|h|ll|l|z|j|t)?([diouxXeEfFgGaAcsp%])")
_libc = ctypes.CDLL(None)


def _formatted(template: int, arguments: int) -> tuple[str, int]:
    """What a printf of the device writes, and how many arguments it took.

    They lie one after another, each aligned to its size. The host's C library formats them, as a driver has it done.
    """
    at, count = arguments, 0

    def take(kind: type[ctypes._SimpleCData[Any]]) -> ctypes._SimpleCData[Any]:
        nonlocal at, count
        size = ctypes.sizeof(kind)
        at = -(-at // size) * size + size
        count += 1
        return kind.from_address(at - size)

    def one(match: re.Match[str]) -> str:
        _, width, precision, length, kind = match.groups(default="")
        if kind == "%":
            return "%"
        values = [take(ctypes.c_int32) for given in (width, precision) if "*" in given]
        wide = length in ("l", "ll", "z", "j", "t")
        if kind in "eEfFgGaA":
            values.append(take(ctypes.c_double))
        elif kind in "sp":
            values.append(take(ctypes.c_void_p))
        else:
            values.append(take(ctypes.c_int64 if wide else ctypes.c_int32))
        how = match[0].encode()
        room = _libc.snprintf(None, 0, how, *values) + 1
        text = ctypes.create_string_buffer(room)
        _libc.snprintf(text, room, how, *values)
        return text.raw[:-1].decode(errors="replace")

    text = _CONVERSION.sub(one, ctypes.string_at(template).decode(errors="replace"))
    return text, count
