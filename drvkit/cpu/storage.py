"""Memory that is more than one allocation: pools, physical memory that is mapped, and what processes share.

Physical memory is a file without a name; mapping it twice, or in another process, shows the same bytes.

Source: CUDA Driver API, "Virtual Memory Management", "Stream Ordered Memory Allocator", "Multicast Object Management".
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import struct
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import ClassVar

from .handles import RefusedError, handles
from .machine import machine
from .memory import PAGE, Allocation, memory
from .operations import Shared
from .state import MulticastRange

__all__ = [
    "GRANULARITY",
    "AddressSpace",
    "Heap",
    "Multicast",
    "Physical",
    "Pool",
    "Records",
    "Shareable",
    "addresses",
    "heap",
    "import_file",
    "shares",
]

GRANULARITY = 2 << 20  # of physical memory, and of where it is mapped
POOL_GROWTH = 32 << 20  # by so much a pool grows


class Pool:
    """A stream-ordered memory pool. What it has reserved is only counted: freed memory waits in quarantine instead.

    Attributes:
        used: what was allocated, without what was freed in the order of a stream. Memory that ``cuMemFree`` freed goes
            on to count, as on an H200.
        reserved: what the pool keeps for itself; also what was freed in the order of a stream, until the host has seen
            that it is free.
    """

    _all: ClassVar[weakref.WeakSet[Pool]] = weakref.WeakSet()

    def __init__(self, device: int, *, maximum: int = 0) -> None:
        self.device, self.maximum = device, maximum
        self.handle = handles.add(self)
        self.attributes: dict[str, int] = {
            "REUSE_FOLLOW_EVENT_DEPENDENCIES": 1,
            "REUSE_ALLOW_OPPORTUNISTIC": 1,
            "REUSE_ALLOW_INTERNAL_DEPENDENCIES": 1,
            "RELEASE_THRESHOLD": 0,
        }
        self.used = self.used_high = self.reserved = self.reserved_high = 0
        self._live = self._unseen = 0  # in use, for all that was called; and freed, but perhaps not yet
        self._all.add(self)

    def allocate(self, nbytes: int) -> Allocation:
        if self.maximum and self._live + nbytes > self.maximum:
            raise RefusedError("OUT_OF_MEMORY")
        allocation = memory.allocate(nbytes, "pool", self.device)
        self._live += nbytes
        self.used += nbytes
        self.used_high = max(self.used_high, self.used)
        self.reserved = max(self.reserved, _rounded(self._live, POOL_GROWTH))
        self.reserved_high = max(self.reserved_high, self.reserved)
        return allocation

    def give_back(self, nbytes: int, *, in_order: bool) -> None:
        """Said when the free is called. ``in_order``: it is one in the order of a stream."""
        self._live -= nbytes
        if in_order:
            self.used -= nbytes
            self._unseen += nbytes
        else:
            self._release()

    def trim(self, keep: int) -> None:
        self.reserved = min(self.reserved, _rounded(max(self._live + self._unseen, keep), POOL_GROWTH))

    def _release(self) -> None:
        self._unseen = 0
        self.trim(self.attributes["RELEASE_THRESHOLD"])

    @classmethod
    def release(cls, device: int) -> None:
        """The host waited for a device: its pools keep no more than they shall."""
        for pool in cls._all:
            if pool.device == device:
                pool._release()


def _rounded(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


# ---- physical memory -------------------------------------------------------------------------------------------------


class Shareable(Shared):
    """A file that processes share. Each handle, mapping and binding is a user."""

    def __init__(self, nbytes: int, fd: int, *, shareable: bool) -> None:
        self.nbytes, self.fd, self.shareable = nbytes, fd, shareable

    def release(self) -> None:
        os.close(self.fd)


class Physical(Shareable):
    """Physical memory of a device."""

    def __init__(
        self,
        device: int,
        nbytes: int,
        fd: int | None = None,
        *,
        shareable: bool = True,
        released: Callable[[], None] | None = None,
    ) -> None:
        if fd is None:
            fd = os.memfd_create(f"drvkit-memory:{device}", os.MFD_CLOEXEC)
            os.ftruncate(fd, nbytes)
        super().__init__(nbytes, fd, shareable=shareable)
        self.device, self._released = device, released

    def release(self) -> None:
        super().release()
        if self._released is not None:
            self._released()


class Multicast(Shareable):
    """Memory of several devices behind one range of addresses.

    Its file is a table that all processes of the team read: what is bound where. The memory itself is opened through
    the process that bound it.
    """

    _HEAD = struct.Struct("=QIIQ")  # bytes, devices of the team, entries, devices that were added (as bits)
    _ENTRY = struct.Struct("=IIIIQQQ")  # live, process, file descriptor, device; offset, offset in the memory, bytes

    def __init__(self, nbytes: int, team: int, fd: int | None = None, *, shareable: bool = True) -> None:
        if fd is None:
            fd = os.memfd_create("drvkit-multicast", os.MFD_CLOEXEC)
            os.pwrite(fd, self._HEAD.pack(nbytes, team, 0, 0), 0)
        super().__init__(nbytes, fd, shareable=shareable)
        self.team = team
        self._bound: dict[int, Physical] = {}  # by entry: what this process bound
        self._seen: dict[int, int] = {}  # by entry: where this process sees the memory

    def _head(self) -> tuple[int, int]:
        """Entries, and the devices that were added."""
        _, _, entries, devices = self._HEAD.unpack(os.pread(self.fd, self._HEAD.size, 0))
        return entries, devices

    def _write_head(self, entries: int, devices: int) -> None:
        os.pwrite(self.fd, self._HEAD.pack(self.nbytes, self.team, entries, devices), 0)

    def _entry(self, place: int) -> tuple[int, ...]:
        return self._ENTRY.unpack(os.pread(self.fd, self._ENTRY.size, self._HEAD.size + place * self._ENTRY.size))

    def _write_entry(self, place: int, *values: int) -> None:
        os.pwrite(self.fd, self._ENTRY.pack(*values), self._HEAD.size + place * self._ENTRY.size)

    def _locked(self) -> _FileLock:
        return _FileLock(self.fd)

    def add_device(self, device: int) -> None:
        with self._locked():
            entries, devices = self._head()
            if devices >> device & 1 or devices.bit_count() == self.team:
                raise RefusedError("INVALID_VALUE")
            self._write_head(entries, devices | 1 << device)

    def is_complete(self) -> bool:
        """Whether all devices of the team were added."""
        return self._head()[1].bit_count() == self.team

    def bind(self, offset: int, physical: Physical, at: int, nbytes: int) -> None:
        if not nbytes or (offset | at | nbytes) % GRANULARITY:
            raise RefusedError("INVALID_VALUE")
        if offset + nbytes > self.nbytes or at + nbytes > physical.nbytes:
            raise RefusedError("INVALID_VALUE")
        with self._locked():
            entries, devices = self._head()
            if not devices >> physical.device & 1:
                raise RefusedError("INVALID_DEVICE")
            for place in range(entries):
                live, _, _, device, start, _, size = self._entry(place)
                if live and device == physical.device and start < offset + nbytes and offset < start + size:
                    raise RefusedError("INVALID_VALUE")
            self._write_entry(entries, 1, os.getpid(), physical.fd, physical.device, offset, at, nbytes)
            self._write_head(entries + 1, devices)
        physical.keep()
        self._bound[entries] = physical

    def unbind(self, device: int, offset: int, nbytes: int) -> None:
        with self._locked():
            for place, physical in self._bound.items():
                _, process, fd, at_device, start, at, size = self._entry(place)
                if (at_device, start, size) == (device, offset, nbytes):
                    self._write_entry(place, 0, process, fd, at_device, start, at, size)
                    del self._bound[place]
                    physical.let_go()
                    return
        raise RefusedError("INVALID_VALUE")

    def table(self) -> bytes:
        """What is bound where, to be compared with what was."""
        return os.pread(self.fd, os.fstat(self.fd).st_size, 0)

    def members(self, offset: int, nbytes: int) -> dict[int, int]:
        """By device of the team, where this process sees its memory that is bound at a range."""
        found: dict[int, int] = {}
        entries, _ = self._head()
        for place in range(entries):
            live, process, fd, device, start, at, size = self._entry(place)
            if live and start <= offset and offset + nbytes <= start + size:
                seen = self._where(place, f"/proc/{process}/fd/{fd}", at, size, device)
                if seen is not None:
                    found[device] = seen + offset - start
        return dict(sorted(found.items()))

    def _where(self, place: int, path: str, at: int, size: int, device: int) -> int | None:
        """Where this process sees the memory of an entry: where it is mapped, as races are found by address; or else
        somewhere. None if the process that bound it has ended."""
        mapped = addresses.showing(path)
        if mapped is not None:
            return mapped + at
        if place not in self._seen:
            try:
                self._seen[place] = _see(path, at, size, device)
            except RefusedError:
                return None
        return self._seen[place]

    def whole(self) -> Iterator[tuple[int, int, list[int]]]:
        """The ranges at which all devices of the team have memory: where they begin, their bytes, and the memory."""
        entries, _ = self._head()
        bound = [(start, start + size) for live, *_, start, _, size in map(self._entry, range(entries)) if live]
        for start, end in pairwise(sorted({place for ends in bound for place in ends})):
            members = self.members(start, end - start)
            if len(members) == self.team:
                yield start, end - start, list(members.values())

    def missing(self, offset: int) -> list[int]:
        """The devices of the team that have no memory at a place."""
        _, devices = self._head()
        bound = self.members(offset, 1)
        return [device for device in range(64) if devices >> device & 1 and device not in bound]

    def release(self) -> None:
        for place in list(self._bound):
            _, _, _, device, start, _, size = self._entry(place)
            self.unbind(device, start, size)
        for address in self._seen.values():
            allocation = memory.disown(address)
            memory.unmap(address, allocation.nbytes)
        super().release()


class _FileLock:
    """Keeps other processes from a table while it changes."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __enter__(self) -> None:
        os.lockf(self.fd, os.F_LOCK, 0)

    def __exit__(self, *_: object) -> None:
        os.lockf(self.fd, os.F_ULOCK, 0)


def _see(path: str, offset: int, nbytes: int, device: int) -> int:
    """Map part of a file of this or of another process, somewhere."""
    try:
        fd = os.open(path, os.O_RDWR)
    except OSError:
        raise RefusedError("INVALID_VALUE") from None
    try:
        address = memory.reserve(nbytes)
        memory.map_file(address, nbytes, fd, offset)
    finally:
        os.close(fd)
    memory.adopt(address, nbytes, "mapped", device)
    memory.allow(address, nbytes, written=True)
    return address


def import_file(fd: int) -> Shareable:
    """What a file descriptor stands for that this or another process exported."""
    try:
        found = re.match(r"/memfd:drvkit-(memory:(\d+)|multicast)", os.readlink(f"/proc/self/fd/{fd}"))
        if found is None:
            raise RefusedError("UNKNOWN")
        if found[2] is not None:
            return Physical(int(found[2]), os.fstat(fd).st_size, os.dup(fd))
        nbytes, team, _, _ = Multicast._HEAD.unpack(os.pread(fd, Multicast._HEAD.size, 0))
        return Multicast(nbytes, team, os.dup(fd))
    except OSError:
        raise RefusedError("UNKNOWN") from None


# ---- addresses -------------------------------------------------------------------------------------------------------


class _Mapping:
    def __init__(self, address: int, shared: Shareable) -> None:
        self.address, self.nbytes, self.shared = address, shared.nbytes, shared
        self.accessible: set[int] = set()  # by these devices


class AddressSpace:
    """Reserved ranges of addresses, and what is mapped there."""

    def __init__(self) -> None:
        self._reserved: dict[int, int] = {}
        self._mappings: dict[int, _Mapping] = {}
        self._changes = 0
        self._multicast: tuple[object, ctypes.Array[MulticastRange]] = (None, (MulticastRange * 0)())

    def reserve(self, nbytes: int, align: int) -> int:
        if not nbytes or nbytes % GRANULARITY or align & (align - 1):
            raise RefusedError("INVALID_VALUE")
        address = memory.reserve(nbytes, max(align, GRANULARITY))
        self._reserved[address] = nbytes
        return address

    def free(self, address: int, nbytes: int) -> None:
        if self._reserved.get(address) != nbytes or any(self._inside(address, nbytes)):
            raise RefusedError("INVALID_VALUE")
        memory.release(address, nbytes)
        del self._reserved[address]

    def map(self, address: int, nbytes: int, shared: Shareable, offset: int) -> None:
        """Let a range show all of a file; that of a multicast object is for multimem instructions alone."""
        if offset or nbytes != shared.nbytes:
            raise RefusedError("NOT_SUPPORTED")
        room = any(start <= address and address + nbytes <= start + size for start, size in self._reserved.items())
        if not room or address % GRANULARITY or any(self._inside(address, nbytes)):
            raise RefusedError("INVALID_VALUE")
        if isinstance(shared, Physical):
            memory.map_file(address, nbytes, shared.fd)
        device = shared.device if isinstance(shared, Physical) else 0
        memory.adopt(address, nbytes, "mapped" if isinstance(shared, Physical) else "multicast", device)
        shared.keep()
        self._mappings[address] = _Mapping(address, shared)
        self._changes += 1

    def unmap(self, address: int, nbytes: int) -> None:
        for mapping in self._whole(address, nbytes):
            del self._mappings[mapping.address]
            memory.disown(mapping.address)
            if isinstance(mapping.shared, Physical):
                memory.unmap(mapping.address, mapping.nbytes)
            mapping.shared.let_go()
            self._changes += 1

    def set_access(self, address: int, nbytes: int, devices: dict[int, bool]) -> None:
        """By device, whether it may touch the range; others stay as they were."""
        for mapping in self._whole(address, nbytes):
            mapping.accessible |= {device for device, allowed in devices.items() if allowed}
            mapping.accessible -= {device for device, allowed in devices.items() if not allowed}
            if isinstance(mapping.shared, Physical):
                if mapping.accessible:  # the same pages may have been written elsewhere
                    memory.allow(mapping.address, mapping.nbytes, written=True)
                else:
                    memory.forbid(mapping.address, mapping.nbytes)
            self._changes += 1

    def at(self, address: int) -> _Mapping:
        for mapping in self._mappings.values():
            if mapping.address <= address < mapping.address + mapping.nbytes:
                return mapping
        raise RefusedError("INVALID_VALUE")

    def multicast_members(self, address: int, nbytes: int) -> list[int]:
        """Where the bytes behind an address of a multicast object are, device by device; none if it is no such one."""
        try:
            mapping = self.at(address)
        except RefusedError:
            return []
        if not isinstance(mapping.shared, Multicast) or not mapping.accessible:
            return []
        return list(mapping.shared.members(address - mapping.address, nbytes).values())

    def multicast_ranges(self) -> ctypes.Array[MulticastRange]:
        """All addresses that multimem instructions can use now."""
        mapped = [
            (each.address, each.shared)
            for each in self._mappings.values()
            if isinstance(each.shared, Multicast) and each.accessible
        ]
        state = self._changes, [shared.table() for _, shared in mapped]
        if state != self._multicast[0]:
            found = [
                MulticastRange(address + start, nbytes, len(members), tuple(members))
                for address, shared in mapped
                for start, nbytes, members in shared.whole()
            ]
            self._multicast = state, (MulticastRange * len(found))(*found)
        return self._multicast[1]

    def multicast_refusal(self, address: int) -> str:
        """Why multimem instructions cannot use an address, for a report."""
        for mapping in self._inside(address, 1):
            if isinstance(mapping.shared, Multicast) and mapping.accessible:
                missing = mapping.shared.missing(address - mapping.address)
                return f"no memory of {', '.join(f'cpu:{device}' for device in missing)} is bound there"
        return "this is no multicast address that a device may access"

    def showing(self, path: str) -> int | None:
        """Where a file is mapped so that kernels may touch it, if it is."""
        with contextlib.suppress(OSError):
            file = os.stat(path)
            for mapping in self._mappings.values():
                if mapping.accessible and os.path.samestat(os.fstat(mapping.shared.fd), file):
                    return mapping.address
        return None

    def _inside(self, address: int, nbytes: int) -> Iterator[_Mapping]:
        for mapping in self._mappings.values():
            if mapping.address < address + nbytes and address < mapping.address + mapping.nbytes:
                yield mapping

    def _whole(self, address: int, nbytes: int) -> list[_Mapping]:
        """The mappings in a range, which has none in part; between them may be gaps."""
        found = list(self._inside(address, nbytes))
        if not found:
            raise RefusedError("INVALID_VALUE")
        for mapping in found:
            if mapping.address < address or mapping.address + mapping.nbytes > address + nbytes:
                raise RefusedError("INVALID_VALUE")
        return found


addresses = AddressSpace()


def shares() -> bool:
    """Whether another process may see what this one writes."""
    return machine.shared or bool(addresses._mappings) or any(handles.all(Shareable))


class Heap:
    """Ordinary allocations that other processes open: their pages move to a file, of which every page has its place."""

    _HANDLE = struct.Struct("=IIIQQ")  # of a CUipcMemHandle: process, file descriptor, device, offset, bytes

    def __init__(self) -> None:
        self._fd: int | None = None
        self._moved: set[int] = set()  # pages
        self._opened: dict[bytes, list[int]] = {}  # address, its first page, bytes, how often it was opened

    def export(self, allocation: Allocation) -> bytes:
        """A handle by which another process opens an allocation."""
        if self._fd is None:
            self._fd = os.memfd_create("drvkit-heap", os.MFD_CLOEXEC)
            os.ftruncate(self._fd, memory.nbytes)
        for page in range(allocation.address // PAGE * PAGE, allocation.address + allocation.nbytes, PAGE):
            if page not in self._moved:
                self._moved.add(page)
                os.pwrite(self._fd, ctypes.string_at(page, PAGE), page - memory.base)
                memory.map_file(page, PAGE, self._fd, page - memory.base)
        memory.written(allocation.address, allocation.nbytes)  # by whom is not known from now on
        machine.shared = True
        offset = allocation.address - memory.base
        return self._HANDLE.pack(os.getpid(), self._fd, allocation.device, offset, allocation.nbytes)

    def open(self, handle: bytes) -> int:
        opened = self._opened.get(handle)
        if opened is not None:
            opened[3] += 1
            return opened[0]
        process, fd, device, offset, nbytes = self._HANDLE.unpack(handle[: self._HANDLE.size])
        if process == os.getpid():
            raise RefusedError("INVALID_CONTEXT")
        first = offset // PAGE * PAGE
        size = -(-(offset + nbytes - first) // PAGE) * PAGE
        pages = _see(f"/proc/{process}/fd/{fd}", first, size, device)
        machine.shared = True
        self._opened[handle] = [pages + offset - first, pages, size, 1]
        return self._opened[handle][0]

    def close(self, address: int) -> None:
        for handle, opened in self._opened.items():
            if opened[0] == address:
                opened[3] -= 1
                if not opened[3]:
                    memory.disown(opened[1])
                    memory.unmap(opened[1], opened[2])
                    del self._opened[handle]
                return
        raise RefusedError("INVALID_VALUE")


heap = Heap()


class Records:
    """The records of an event that processes share: a file with their number, and a byte for each, which is 1 when it
    was reached. Streams of any process reach them, in any order."""

    _HEAD = struct.Struct("=Q")
    _HANDLE = struct.Struct("=IIQ")  # of a CUipcEventHandle: process, file descriptor, inode

    def __init__(self, fd: int | None = None) -> None:
        """Of an event of this process; or of another's, whose file was opened."""
        self._ours = fd is None
        if fd is None:
            fd = os.memfd_create("drvkit-event", os.MFD_CLOEXEC)
            os.pwrite(fd, self._HEAD.pack(0), 0)
        self._fd = fd
        weakref.finalize(self, os.close, fd)  # work in flight uses it longer than the event

    @classmethod
    def open(cls, handle: bytes) -> Records:
        process, fd, inode = cls._HANDLE.unpack(handle[: cls._HANDLE.size])
        if process == os.getpid():
            raise RefusedError("INVALID_CONTEXT")
        try:
            opened = cls(os.open(f"/proc/{process}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC))
        except OSError:
            raise RefusedError("MAP_FAILED") from None
        if os.fstat(opened._fd).st_ino != inode:  # it was closed, and its number is another file's
            raise RefusedError("MAP_FAILED")
        machine.shared = True
        return opened

    def export(self) -> bytes:
        """A handle by which another process opens it."""
        if not self._ours:
            raise RefusedError("INVALID_HANDLE")
        machine.shared = True
        return self._HANDLE.pack(os.getpid(), self._fd, os.fstat(self._fd).st_ino)

    @property
    def newest(self) -> int:
        """The number of the newest record; 0 if there is none."""
        number: int = self._HEAD.unpack(os.pread(self._fd, self._HEAD.size, 0))[0]
        return number

    def add(self) -> int:
        with _FileLock(self._fd):
            number = self.newest + 1
            os.pwrite(self._fd, self._HEAD.pack(number), 0)
        return number

    def reach(self, number: int) -> None:
        os.pwrite(self._fd, b"\1", self._HEAD.size + number)

    def is_reached(self, number: int) -> bool:
        return os.pread(self._fd, 1, self._HEAD.size + number) == b"\1"
