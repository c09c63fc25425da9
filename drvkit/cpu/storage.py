"""Memory that is more than one allocation: pools, physical memory that is mapped, and what processes share.

Physical memory is a file without a name; mapping it twice, or in another process, shows the same bytes.

Source: CUDA Driver API, "Virtual Memory Management", "Stream Ordered Memory Allocator", "Multicast Object Management".
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
from collections.abc import Callable, Iterator

from .handles import RefusedError, handles
from .machine import machine
from .memory import PAGE, Allocation, memory
from .operations import Shared

__all__ = [
    "GRANULARITY",
    "AddressSpace",
    "Heap",
    "Multicast",
    "Physical",
    "Pool",
    "Shareable",
    "addresses",
    "heap",
    "import_file",
]

GRANULARITY = 2 << 20  # of physical memory, and of where it is mapped


class Pool:
    """A stream-ordered memory pool. What it has reserved is only counted: freed memory waits in quarantine instead."""

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

    def allocate(self, nbytes: int) -> Allocation:
        if self.maximum and self.used + nbytes > self.maximum:
            raise RefusedError("OUT_OF_MEMORY")
        allocation = memory.allocate(nbytes, "pool", self.device)
        self.used += nbytes
        self.used_high = max(self.used_high, self.used)
        self.reserved = max(self.reserved, _rounded(self.used))
        self.reserved_high = max(self.reserved_high, self.reserved)
        return allocation

    def give_back(self, nbytes: int) -> None:
        """Said when the free is called."""
        self.used -= nbytes

    def trim(self, keep: int) -> None:
        self.reserved = min(self.reserved, max(_rounded(self.used), _rounded(keep)))


def _rounded(nbytes: int) -> int:
    return -(-nbytes // GRANULARITY) * GRANULARITY


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

    def members(self, offset: int, nbytes: int) -> list[int]:
        """Where this process sees the memory of each device of the team that is bound at a range."""
        found: dict[int, int] = {}
        entries, _ = self._head()
        for place in range(entries):
            live, process, fd, device, start, at, size = self._entry(place)
            if live and start <= offset and offset + nbytes <= start + size:
                if place not in self._seen:
                    self._seen[place] = _see(f"/proc/{process}/fd/{fd}", at, size, device)
                found[device] = self._seen[place] + offset - start
        return [found[device] for device in sorted(found)]

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
    memory.allow(address, nbytes)
    return address


def import_file(fd: int) -> Shareable:
    """What a file descriptor stands for that this or another process exported."""
    try:
        found = re.match(r"/memfd:drvkit-(memory:(\d+)|multicast)", os.readlink(f"/proc/self/fd/{fd}"))
        if found is None:
            raise RefusedError("INVALID_VALUE")
        if found[2] is not None:
            return Physical(int(found[2]), os.fstat(fd).st_size, os.dup(fd))
        nbytes, team, _, _ = Multicast._HEAD.unpack(os.pread(fd, Multicast._HEAD.size, 0))
        return Multicast(nbytes, team, os.dup(fd))
    except OSError:
        raise RefusedError("INVALID_VALUE") from None


# ---- addresses -------------------------------------------------------------------------------------------------------


class _Mapping:
    def __init__(self, address: int, nbytes: int, shared: Shareable, offset: int) -> None:
        self.address, self.nbytes, self.shared, self.offset = address, nbytes, shared, offset
        self.accessible: set[int] = set()  # by these devices


class AddressSpace:
    """Reserved ranges of addresses, and what is mapped there."""

    def __init__(self) -> None:
        self._reserved: dict[int, int] = {}
        self._mappings: dict[int, _Mapping] = {}

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
        """Let a range show a file; the range of a multicast object shows nothing to ordinary accesses."""
        room = any(start <= address and address + nbytes <= start + size for start, size in self._reserved.items())
        if not room or not nbytes or (address | nbytes | offset) % GRANULARITY or offset + nbytes > shared.nbytes:
            raise RefusedError("INVALID_VALUE")
        if any(self._inside(address, nbytes)):
            raise RefusedError("INVALID_VALUE")
        if isinstance(shared, Physical):
            memory.map_file(address, nbytes, shared.fd, offset)
            memory.adopt(address, nbytes, "mapped", shared.device)
        shared.keep()
        self._mappings[address] = _Mapping(address, nbytes, shared, offset)

    def unmap(self, address: int, nbytes: int) -> None:
        for mapping in self._exactly(address, nbytes):
            del self._mappings[mapping.address]
            if isinstance(mapping.shared, Physical):
                memory.disown(mapping.address)
                memory.unmap(mapping.address, mapping.nbytes)
            mapping.shared.let_go()

    def set_access(self, address: int, nbytes: int, devices: dict[int, bool]) -> None:
        """By device, whether it may touch the range; others stay as they were."""
        for mapping in self._exactly(address, nbytes):
            mapping.accessible |= {device for device, allowed in devices.items() if allowed}
            mapping.accessible -= {device for device, allowed in devices.items() if not allowed}
            if isinstance(mapping.shared, Physical):
                memory.allow(mapping.address, mapping.nbytes, bool(mapping.accessible))

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
        return mapping.shared.members(mapping.offset + address - mapping.address, nbytes)

    def _inside(self, address: int, nbytes: int) -> Iterator[_Mapping]:
        for mapping in self._mappings.values():
            if mapping.address < address + nbytes and address < mapping.address + mapping.nbytes:
                yield mapping

    def _exactly(self, address: int, nbytes: int) -> list[_Mapping]:
        """The mappings that make up a range, whole ones without gaps."""
        found = sorted(self._inside(address, nbytes), key=lambda mapping: mapping.address)
        at = address
        for mapping in found:
            if mapping.address != at:
                raise RefusedError("INVALID_VALUE")
            at += mapping.nbytes
        if at != address + nbytes or not nbytes:
            raise RefusedError("INVALID_VALUE")
        return found


addresses = AddressSpace()


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
