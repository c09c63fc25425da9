"""What compiled kernels read and write besides memory: of a launch, of a block, of a warp.

The code generator takes the places of the fields from here, so these structures are the only description.
"""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_int32, c_int64, c_uint32, c_uint64

__all__ = [
    "EXITED",
    "BarrierState",
    "BlockState",
    "Code",
    "CopyState",
    "GridState",
    "SlotState",
    "WarpState",
    "WarpStatus",
]

EXITED = 0x7FFFFFFF  # the pc of a lane that has ended
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
        ("stores", c_uint64),  # grows with every store: whether anything has changed
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
        ("reserved", c_uint32),
    ]


class SlotState(Structure):
    """Room for a cluster of blocks that is resident."""

    _fields_ = [
        ("blocks", c_uint64),  # their states
        ("shared", c_uint64),  # their window of shared memory
        ("local", c_uint64),  # windows of local memory of all their lanes
        ("copies", c_uint64),  # their warps' queues of copies
        ("buffers", c_uint64),  # their store buffers
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
        ("number", c_uint64),  # counted over the grid, x fastest
        ("barriers", BarrierState * 16),
    ]


class WarpState(Structure):
    """A warp; its registers follow."""

    _fields_ = [
        ("pc", c_int32 * 32),  # block of the kernel in which each lane stands
        ("tid_x", c_uint32 * 32),
        ("tid_y", c_uint32 * 32),
        ("tid_z", c_uint32 * 32),
        ("index", c_uint32),  # in its block
        ("status", c_uint32),
        ("barrier", c_uint32),  # for which it waits
        ("votes", c_uint32),  # what bar.red gave
        ("participants", c_uint32),  # threads that took part
        ("polled", c_int32),  # the loop head at which it polled last
        ("place", c_uint32),  # the instruction at which it stopped
        ("cluster_phase", c_uint32),  # of the cluster barrier, when it arrived
        ("polled_address", c_uint64),
        ("local", c_uint64),  # windows of its lanes, one after another
        ("copies", c_uint64),  # cp.async: the queue
        ("copies_begun", c_uint32),  # entries
        ("copies_done", c_uint32),
        ("groups_committed", c_uint32),
        ("host_call", c_uint32),
        ("host_mask", c_uint32),
        ("reserved", c_uint32),
        ("host_args", c_uint64 * 4),
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


COPIES = 64  # entries of a warp's queue
REGISTERS = -(-ctypes.sizeof(WarpState) // 64) * 64  # where they begin
