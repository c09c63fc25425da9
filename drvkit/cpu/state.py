"""What compiled kernels read and write besides memory: of a launch, of a block, of a warp.

The code generator takes the places of the fields from here, so these structures are the only description.
"""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_int32, c_int64, c_uint32, c_uint64

__all__ = [
    "EXITED",
    "HELD",
    "Access",
    "BarrierState",
    "BlockState",
    "ClockState",
    "Code",
    "CopyState",
    "GridState",
    "LookState",
    "MulticastRange",
    "OrderEntry",
    "OrderState",
    "SlotState",
    "WarpState",
    "WarpStatus",
]

EXITED = 0x7FFFFFFF  # the pc of a lane that has ended; of a warp whose lanes stand apart
HELD = 1 << 30  # beside the pc of a lane that waits at a bar.warp.sync: where it goes on afterwards
SHARED_STRIDE = 1 << 18  # between the windows of a cluster's blocks


class Code:
    """What a call of a warp gives back."""

    DONE = 0  # all lanes have ended
    WAITING = 1  # for a barrier; whoever completes it makes the warp ready
    POLLING = 2  # it looked for something that was not there
    FAULT = 3
    SLICED = 4  # it has run long enough
    HOST = 5  # a call that Python answers
    INTERRUPTED = 6  # where hostile schedules interrupt


class WarpStatus:
    READY = 0
    WAITING = 1
    DONE = 2


class GridState(Structure):
    """A launch."""

    _fields_ = [
        ("memory_base", c_uint64),
        ("memory_bytes", c_uint64),
        ("shadow", c_int64),  # the distance of a byte's shadow
        ("params", c_uint64),
        ("globals", c_uint64),  # addresses of the module's variables
        ("grid", c_uint32 * 3),
        ("block", c_uint32 * 3),
        ("cluster", c_uint32 * 3),
        ("threads", c_uint32),  # of a block
        ("warps", c_uint32),  # of a block
        ("cluster_blocks", c_uint32),
        ("shared_bytes", c_uint32),  # static and dynamic
        ("dynamic_shared_bytes", c_uint32),
        ("local_bytes", c_uint32),  # of a lane
        ("id", c_uint32),
        ("device", c_uint32),
        ("explicit_cluster", c_uint32),
        ("stores", c_uint64),  # grows with every store; atomics that leave memory as it was leave this so, too
        ("time_shift", c_int64),  # ns that the device's clock is ahead
        ("dependencies_done", c_uint32),
        ("triggered", c_uint32),  # blocks that let dependent launches begin, or ended
        ("fault_kind", c_uint32),
        ("fault_place", c_uint32),  # index of the instruction
        ("fault_lane", c_uint32),
        ("fault_bytes", c_uint32),
        ("fault_address", c_uint64),
        ("current", c_uint64),  # the warp that runs
        ("current_block", c_uint64),
        # The runner's
        ("next_cluster", c_uint64),
        ("clusters", c_uint64),
        ("slots", c_uint64),  # each holds a cluster
        ("slot_bytes", c_uint64),
        ("block_bytes", c_uint64),  # of one block in a slot: its state and its warps'
        ("warp_bytes", c_uint64),
        ("in_use", c_uint32),  # slots
        ("slot_count", c_uint32),
        ("template", c_uint64),  # a block's warps as they begin
        ("fuel", c_int64),  # of a warp, until it is sliced
        ("copies_bytes", c_uint64),  # of a warp's queue of copies
        ("device_buffer", c_uint64),  # the device's StoreBuffer, where memory is weak
        ("buffer_bytes", c_uint64),  # of a block's
        ("room", c_uint32),  # whether another slot may be asked for
        ("watched", c_uint32),  # for races
        ("order", c_uint64),  # the launch's OrderState; 0: only races inside of clusters are looked for
        ("fault_other", c_uint32),  # of a race: who else, a warp of the cluster or a work
        ("fault_verbs", c_uint32),  # bit 0, it wrote; bit 1, of a race: the other one wrote
        ("multicast", c_uint64),  # each MulticastRange
        ("multicast_count", c_uint64),
        ("workspace", c_uint64),  # of a cooperative launch: its size, and a word for a barrier of the grid
    ]


class MulticastRange(Structure):
    """Multicast addresses behind which each device of a team has memory."""

    _fields_ = [
        ("start", c_uint64),
        ("nbytes", c_uint64),
        ("count", c_uint64),  # devices
        ("members", c_uint64 * 64),  # where the memory of each begins
    ]


class SlotState(Structure):
    """Room for a cluster of blocks that is resident."""

    _fields_ = [
        ("blocks", c_uint64),  # their states
        ("shared", c_uint64),  # their window of shared memory
        ("local", c_uint64),  # windows of local memory of all their lanes
        ("copies", c_uint64),  # their warps' queues of copies
        ("buffers", c_uint64),  # their store buffers
        ("clocks", c_uint64),  # their ClockState, where races are looked for
        ("active", c_uint32),
        ("reserved", c_uint32),
    ]


class BarrierState(Structure):
    _fields_ = [
        ("arrived", c_uint32),  # threads
        ("expected", c_uint32),  # threads; 0: all that live
        ("votes", c_uint32),  # of bar.red
        ("threads", c_uint32),  # that took part
    ]


class BlockState(Structure):
    """A block (CTA)."""

    _fields_ = [
        ("index", c_uint32 * 3),  # %ctaid
        ("cluster_index", c_uint32 * 3),  # %cluster_ctaid
        ("cluster_rank", c_uint32),
        ("cluster_id", c_uint32 * 3),
        ("shared_offset", c_uint32),  # of its window in the cluster's
        ("live", c_uint32),  # warps that have not ended
        ("shared_base", c_uint64),  # of the cluster's window
        ("buffer", c_uint64),  # its StoreBuffer, where memory is weak
        ("leader", c_uint64),  # the BlockState of the cluster's first block
        ("cluster_arrived", c_uint32),  # warps, at the cluster barrier; in the leader
        ("cluster_phase", c_uint32),  # in the leader
        ("cluster_live", c_uint32),  # warps; in the leader
        ("triggered", c_uint32),
        ("met", c_uint32),  # whether a warp has come out of a barrier of the cluster: all its blocks have begun
        ("reserved", c_uint32),
        ("number", c_uint64),  # counted over the grid, x fastest
        ("clocks", c_uint64),  # the cluster's ClockState
        ("barriers", BarrierState * 16),
    ]


class WarpState(Structure):
    """A warp; its registers follow."""

    _fields_ = [
        ("pc", c_int32 * 32),  # block of the kernel in which each lane stands
        ("tid_x", c_uint32 * 32),
        ("tid_y", c_uint32 * 32),
        ("tid_z", c_uint32 * 32),
        ("awaited", c_uint32 * 32),  # of a lane that is held: the lanes for which it waits
        ("index", c_uint32),  # in its block
        ("status", c_uint32),
        ("barrier", c_uint32),  # for which it waits
        ("votes", c_uint32),  # what bar.red gave
        ("participants", c_uint32),  # threads that took part
        ("polled", c_int32),  # the loop head at which it polled last
        ("place", c_uint32),  # the instruction at which it stopped
        ("cluster_phase", c_uint32),  # of the cluster barrier, after the one in which it arrived last
        ("sliced", c_uint64),  # a digest of all that it had before it, when it was sliced last
        ("local", c_uint64),  # windows of its lanes, one after another
        ("copies", c_uint64),  # cp.async: the queue
        ("copies_begun", c_uint32),  # entries
        ("copies_done", c_uint32),
        ("groups_committed", c_uint32),
        ("host_call", c_uint32),
        ("host_mask", c_uint32),
        ("together", c_uint32),  # the block at which all lanes that live stand, with no more saved than it needs
        ("looking", c_uint32),  # looks since it polled last
        ("looked", c_uint32),  # looks of the round before
        ("host_args", c_uint64 * 4),
    ]


class LookState(Structure):
    """Where a warp looked for what others do. A warp has `LOOKS` of them behind its registers, if its kernel polls."""

    _fields_ = [
        ("place", c_uint32),
        ("mask", c_uint32),
        ("addresses", c_uint64 * 32),
    ]


class CopyState(Structure):
    """A pending cp.async of a warp."""

    _fields_ = [
        ("mask", c_uint32),
        ("nbytes", c_uint32),
        ("group", c_uint32),
        ("place", c_uint32),
        ("target", c_uint64 * 32),
        ("source", c_uint64 * 32),
        ("source_bytes", c_uint32 * 32),
    ]


class BufferedStore(Structure):
    """A store that not everybody sees."""

    _fields_ = [
        ("address", c_uint64),
        ("value", c_uint64),
        ("nbytes", c_uint32),  # at most 8
        ("reserved", c_uint32),
    ]


class StoreBuffer(Structure):
    """Stores on their way, oldest first; they follow."""

    _fields_ = [
        ("count", c_uint32),
        ("capacity", c_uint32),
        ("following", c_uint64),  # the StoreBuffer that they go to; 0: memory
    ]


class Access:
    """Bits that tell how memory is accessed, where races are looked for."""

    WRITES, READS, STRONG = 1, 2, 4  # strong as in the ISA: atomics, volatile, relaxed, acquire, release
    ACQUIRE, RELEASE = 8, 16
    APART = 32  # what it orders is said elsewhere


class ClockState(Structure):
    """What is known of the order in a cluster: vector clocks, and who accessed which granule of shared memory when.

    A clock has an element for each warp of the cluster, one for its bulk copies, and one that says whether the grids
    before this one have ended. Clocks go on from one cluster of the slot to the next: all of the old is up to ``base``.
    """

    _fields_ = [
        ("warps", c_uint64),  # each warp's clock
        ("fenced", c_uint64),  # as they were at its last fence
        ("pending", c_uint64),  # what its next fence makes it know
        ("barriers", c_uint64),  # who has arrived: 16 of each block
        ("cluster_barrier", c_uint64),  # two, by phase
        ("arrived", c_uint64),  # by address, modulo: who has arrived at an mbarrier
        ("released", c_uint64),  # by address, modulo: what is known to who sees its newest value or phase
        ("writes", c_uint64),  # of each granule: the writer << 32 | its clock << 1 | strong
        ("reads", c_uint64),  # of each who reads, of each granule: its clock << 1 | not strong
        ("reader_bytes", c_uint64),  # from one reader's to the next one's
        ("window", c_uint64),  # the address of the first granule
        ("window_bytes", c_uint64),
        ("width", c_uint32),  # elements of a clock
        ("count", c_uint32),  # warps; the element of copies is that, the next one is that of the grids before
        ("blocks", c_uint32),
        ("shift", c_uint32),  # of a granule, 1, 2 or 4 bytes
        ("base", c_uint32),
        ("copies", c_uint32),  # the clock of the newest bulk copy
    ]


class OrderEntry(Structure):
    """Where a work stands: works of one chain come one after another."""

    _fields_ = [
        ("chain", c_uint32),
        ("index", c_uint32),  # in the chain
        ("clock", c_uint64),  # what comes before it: of each chain, an index
    ]


class OrderState(Structure):
    """A work that runs, and what comes before it.

    Each 4-byte granule of the address space has three records, at fixed distances: of its writer and of two readers. A
    record is the number of a work << 5 | the bytes that it touched << 1 | strong.
    """

    _fields_ = [
        ("number", c_uint32),
        ("floor", c_uint32),  # works of lower numbers come before all
        ("clock", c_uint64),
        ("early", c_uint64),  # the same before the grids that it depends on have ended
        ("works", c_uint64),  # the OrderEntry of each work
        ("writers", c_int64),  # distances
        ("readers", c_int64),
        ("others", c_int64),
        ("other", c_uint32),  # of a race: the other work
        ("other_wrote", c_uint32),
        ("address", c_uint64),  # of a race
        ("triggered_early", c_uint32),  # it let others begin before it knew that the grids before it had ended
        ("reserved", c_uint32),
    ]


COPIES = 64  # entries of a warp's queue
LOOKS = 4  # of a round in a loop; the last one stands for those beyond
REGISTERS = -(-ctypes.sizeof(WarpState) // 64) * 64  # where they begin
