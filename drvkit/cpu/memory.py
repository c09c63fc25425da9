"""The address space of all CPU devices of the process.

Device addresses are host addresses inside one reserved range. Each byte has a shadow byte at a fixed distance, which
kernels look at with every access: whether the byte may be touched, and whether it was ever written.
"""

from __future__ import annotations

import bisect
import ctypes
import hashlib
import mmap
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..lifetime import caller
from .fault import Fault

if TYPE_CHECKING:
    from .order import Tracker

__all__ = ["ALLOCATED", "WRITTEN", "Allocation", "Memory", "memory"]

ALLOCATED, WRITTEN = 1, 2  # bits of a shadow byte
GAP = 256  # bytes between allocations, that nobody may touch
MOST_DIGESTED = 1 << 30  # bytes
_PASSING = ("shared", "local", "param", "workspace", "multicast")  # of a launch, or not there to be read
QUARANTINE = 64  # freed allocations that are not used again yet, so that a late access is known as one

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

MAP_FIXED, MAP_NORESERVE, MADV_DONTNEED = 0x10, 0x4000, 4
PAGE = mmap.PAGESIZE


def _map(address: int, nbytes: int, flags: int, fd: int = -1, offset: int = 0) -> int:
    found = _libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, offset)
    if found in (None, ctypes.c_void_p(-1).value):
        error = ctypes.get_errno()
        raise OSError(error, f"mmap of {nbytes} bytes: {os.strerror(error)}")
    return int(found)


@dataclass(eq=False)
class Allocation:
    """A range that may be touched."""

    address: int
    nbytes: int
    kind: str  # "device", "pinned", "pool", "graph", "shared", ...
    device: int
    name: str
    made_at: str
    room: int  # bytes up to the next allocation
    freed: bool = False
    freed_at: str = ""  # where the caller gave it back, which may be before it is free
    absent: bool = False  # of a graph, when no launch that was called has it

    def __contains__(self, address: int) -> bool:
        """Whether it is here, or between this and the next allocation."""
        return self.address <= address < self.address + self.room

    def __str__(self) -> str:
        what = f"{self.nbytes}-byte {self.kind} {'variable' if self.kind == 'module' else 'allocation'}"
        if self.name:
            what += f" {self.name}"
        return f"{what} made at {self.made_at}" if self.made_at else what


class Memory:
    """Allocations, and the shadow of their bytes.

    Args:
        nbytes: of address space; physical memory is taken page by page, when it is touched.

    Attributes:
        tracker: is told who accesses what, where races are looked for.
    """

    def __init__(self, nbytes: int = 1 << 38) -> None:
        while True:
            try:
                self.base = _map(0, 2 * nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
                break
            except OSError:
                nbytes >>= 1
                if nbytes < 1 << 28:
                    raise
        self.nbytes = nbytes
        self.shadow = nbytes  # the distance of a byte's shadow
        self._starts: list[int] = []  # of what is in `_known`, in order
        self._known: dict[int, Allocation] = {}  # live and in quarantine
        self._free: dict[int, list[int]] = {}  # by room: addresses that can be used again
        self._quarantine: deque[Allocation] = deque()
        self._top = self.base + PAGE
        self.tracker: Tracker | None = None

    # Allocations

    def allocate(
        self, nbytes: int, kind: str, device: int = 0, *, align: int = 256, name: str = "", written: bool = False
    ) -> Allocation:
        """A range of its own; its bytes count as never written, unless ``written``."""
        room = -(-max(nbytes, 1) // GAP) * GAP + GAP
        if room > PAGE:
            room = -(-room // PAGE) * PAGE
        spare = self._free.get(room)
        fitting = [at for at in spare[-4:] if at % align == 0] if spare else []
        if spare and fitting:
            address = fitting[-1]
            spare.remove(address)
        else:
            address = -(-self._top // align) * align
            if address + room > self.base + self.nbytes:
                raise MemoryError(f"{nbytes} bytes: the address space of the CPU devices is used up")
            self._top = address + room
        allocation = Allocation(address, nbytes, kind, device, name, caller(), room)
        self._known[address] = allocation
        bisect.insort(self._starts, address)
        self._mark(address, nbytes, ALLOCATED | WRITTEN if written else ALLOCATED)
        return allocation

    def free(self, address: int) -> Allocation:
        """Give it back. `LookupError` if no live allocation starts there."""
        allocation = self._known.get(address)
        if allocation is None or allocation.freed:
            raise LookupError(f"{address:#x} is not the start of an allocation")
        allocation.freed = True
        self._mark(address, allocation.nbytes, 0)
        if self.tracker is not None:
            self.tracker.renew(address, allocation.nbytes)
        self._quarantine.append(allocation)
        if len(self._quarantine) > QUARANTINE:
            self._forget(self._quarantine.popleft())
        if allocation.nbytes >= 1 << 20:
            self._drop_pages(allocation)
        return allocation

    def _forget(self, allocation: Allocation) -> None:
        del self._known[allocation.address]
        del self._starts[bisect.bisect_left(self._starts, allocation.address)]
        self._free.setdefault(allocation.room, []).append(allocation.address)

    def _drop_pages(self, allocation: Allocation) -> None:
        """Hand physical memory back."""
        start = -(-allocation.address // PAGE) * PAGE
        end = (allocation.address + allocation.nbytes) // PAGE * PAGE
        for address in (start, start + self.shadow):
            _libc.madvise(address, end - start, MADV_DONTNEED)

    def room(self, nbytes: int) -> int:
        """Zeros that are no part of the address space; physical memory is taken page by page, when it is touched."""
        return _map(0, nbytes + PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)

    def clear(self, address: int, nbytes: int) -> None:
        """Zeros again, of such room."""
        start, end = -(-address // PAGE) * PAGE, (address + nbytes) // PAGE * PAGE
        if end - start < 1 << 20:
            ctypes.memset(address, 0, nbytes)
            return
        ctypes.memset(address, 0, start - address)
        ctypes.memset(end, 0, address + nbytes - end)
        _libc.madvise(start, end - start, MADV_DONTNEED)

    def find(self, address: int) -> Allocation | None:
        """The allocation that contains it; a freed one too, as long as it is known."""
        at = bisect.bisect_right(self._starts, address) - 1
        if at >= 0:
            allocation = self._known[self._starts[at]]
            if address < allocation.address + max(allocation.nbytes, 1):
                return allocation
        return None

    def live(self) -> Iterator[Allocation]:
        return (allocation for allocation in self._known.values() if not allocation.freed)

    def __contains__(self, address: int) -> bool:
        return self.base <= address < self.base + self.nbytes

    # Address space

    def reserve(self, nbytes: int, align: int = PAGE) -> int:
        """Pages that may not be touched until something is mapped there."""
        address = -(-self._top // max(align, PAGE)) * max(align, PAGE)
        nbytes = -(-nbytes // PAGE) * PAGE
        if address + nbytes > self.base + self.nbytes:
            raise MemoryError(f"{nbytes} bytes: the address space of the CPU devices is used up")
        self._top = address + nbytes + PAGE
        return address

    def release(self, address: int, nbytes: int) -> None:
        """Nothing may be mapped there any more. The addresses are not used again."""
        self._mark(address, nbytes, 0)

    def map_file(self, address: int, nbytes: int, fd: int, offset: int = 0) -> None:
        """Put a file's pages there, which other processes may map too: all of it counts as written."""
        _map(address, nbytes, mmap.MAP_SHARED | MAP_FIXED, fd, offset)

    def unmap(self, address: int, nbytes: int) -> None:
        """Take a file's pages away again."""
        _map(address, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED)
        self._mark(address, nbytes, 0)
        if self.tracker is not None:
            self.tracker.renew(address, nbytes)

    def allow(self, address: int, nbytes: int, *, written: bool) -> None:
        """From now on kernels may touch a range, whose bytes count as written, or else as never written."""
        self._mark(address, nbytes, ALLOCATED | WRITTEN if written else ALLOCATED)

    def forbid(self, address: int, nbytes: int) -> None:
        """From now on nobody may touch a range."""
        self._mark(address, nbytes, 0)

    def allows(self, address: int) -> bool:
        """Whether kernels may touch it now."""
        return bool(ctypes.c_uint8.from_address(address + self.shadow).value & ALLOCATED)

    def adopt(self, address: int, nbytes: int, kind: str, device: int = 0, name: str = "") -> Allocation:
        """Know a mapped range as an allocation."""
        allocation = Allocation(address, nbytes, kind, device, name, caller(), nbytes)
        self._known[address] = allocation
        bisect.insort(self._starts, address)
        return allocation

    def disown(self, address: int) -> Allocation:
        """Forget a range that was adopted."""
        allocation = self._known.pop(address)
        del self._starts[bisect.bisect_left(self._starts, address)]
        return allocation

    # Contents

    def _mark(self, address: int, nbytes: int, state: int) -> None:
        if state:
            ctypes.memset(address + self.shadow, state, nbytes)
        else:  # of many bytes no page stays: addresses may not be used again
            self.clear(address + self.shadow, nbytes)

    def digest(self) -> bytes | None:
        """Of what is in all that kernels and hosts share; None if that is very much."""
        kept = [each for each in self._known.values() if not each.freed and each.kind not in _PASSING]
        if sum(each.nbytes for each in kept) > MOST_DIGESTED:
            return None
        total = hashlib.blake2b(digest_size=16)
        for each in kept:
            total.update(b"%d %d " % (each.address, each.nbytes))
            total.update((ctypes.c_char * each.nbytes).from_address(each.address))
        return total.digest()

    def written(self, address: int, nbytes: int) -> None:
        """Count it as written."""
        if nbytes and address in self:
            self._mark(address, nbytes, ALLOCATED | WRITTEN)

    def write(self, address: int, data: bytes) -> None:
        """Bytes of the host's."""
        ctypes.memmove(address, data, len(data))
        self.written(address, len(data))

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Bytes from anywhere to anywhere; what was never written stays so."""
        ctypes.memmove(target, source, nbytes)
        if target in self:
            if source in self:
                ctypes.memmove(target + self.shadow, source + self.shadow, nbytes)
            else:
                self.written(target, nbytes)

    def fill(self, address: int, pattern: bytes, count: int) -> None:
        """``pattern``, so many times."""
        if len(set(pattern)) == 1:
            ctypes.memset(address, pattern[0], len(pattern) * count)
        else:
            done = min(count, 4096)
            ctypes.memmove(address, pattern * done, done * len(pattern))
            while done < count:
                more = min(done, count - done)
                ctypes.memmove(address + done * len(pattern), address, more * len(pattern))
                done += more
        self.written(address, len(pattern) * count)

    def check(self, address: int, nbytes: int, *, read: bool, what: str, strong: bool = False) -> None:
        """`Fault` if a range of the address space may not be touched; memory outside of it is the host's business."""
        if not nbytes or address not in self:
            return
        state = ctypes.string_at(address + self.shadow, nbytes)
        if 0 in state:
            at = address + state.index(0)
            verb = "reads" if read else "writes"
            raise Fault("CUDA_ERROR_ILLEGAL_ADDRESS", f"{what} {verb} {nbytes} bytes at {address:#x}: {self.place(at)}")
        if self.tracker is not None:
            self.tracker.touch(address, nbytes, write=not read, strong=strong)

    def place(self, address: int) -> str:
        """Where an address is, for a report."""
        if address not in self:
            return "no device memory" if address >= PAGE else "a null pointer"
        allocation = self.find(address)
        if allocation is not None:
            inside = f"{address - allocation.address} bytes into a {allocation}"
            if allocation.freed:
                return f"{inside}, which was freed" + (f" at {allocation.freed_at}" if allocation.freed_at else "")
            if allocation.kind == "multicast":
                return f"{inside}, which multimem instructions alone may access"
            if not self.allows(address):
                return f"{inside}, which was freed by its graph, or is not allocated yet"
            return inside
        at = bisect.bisect_right(self._starts, address) - 1
        if at >= 0:
            before = self._known[self._starts[at]]
            past = address - before.address - before.nbytes
            if past < 1 << 16:
                return f"{past} bytes past the end of a {before}" + (", which was freed" if before.freed else "")
        if at + 1 < len(self._starts):
            behind = self._known[self._starts[at + 1]]
            if behind.address - address < 1 << 16:
                return f"{behind.address - address} bytes before a {behind}"
        return "memory that is not allocated"


memory = Memory()
