"""What streams and graph nodes ask a device to do.

An operation never changes: a stream, a node and an exec may share it, and a launch in flight keeps what it had.

Source: CUDA Driver API; the numbers are those of its enums.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar, NamedTuple

from .fault import Fault
from .handles import RefusedError, handles
from .machine import Once, Outcome, Plain, Task, Work, machine
from .memory import memory
from .program import Function, Program, load

__all__ = [
    "WAIT",
    "Act",
    "Allocate",
    "Attribute",
    "Copy",
    "Empty",
    "Fill",
    "Free",
    "GraphMemory",
    "HostCall",
    "Kernel",
    "Launch",
    "Library",
    "LibraryKernel",
    "MemOp",
    "MemOps",
    "Module",
    "Operation",
    "Shared",
    "Side",
    "blocks_per_multiprocessor",
    "check_range",
]


class Operation:
    """Base of all. ``kind`` is the kind of node that it is in a graph, as ``CUgraphNodeType`` calls it."""

    kind: ClassVar[str]
    device: int

    def begin(self, work: Work) -> Task | None:
        """Its task, when its work may start."""
        raise NotImplementedError

    def check_update(self, old: Operation) -> str | None:
        """Why an exec that has ``old`` cannot have it instead, as ``CUgraphExecUpdateResult`` calls it."""
        return None

    @property
    def updatable(self) -> bool:
        """Whether kernels may change it, as a node of a graph."""
        return False

    @property
    def absent(self) -> int | None:
        """An address that it copies or fills where no launch of a graph has made the memory."""
        return None


# Kernels


@dataclass(eq=False)
class Module:
    """A loaded image. One that is of a library is unloaded with that alone."""

    device: int
    program: Program
    of_library: bool = False
    kernels: dict[str, Kernel] = field(default_factory=dict)
    closed: bool = False

    def __post_init__(self) -> None:
        self.handle = handles.add(self)

    def kernel(self, name: str) -> Kernel:
        if name not in self.program.functions:
            raise RefusedError("NOT_FOUND")
        if name not in self.kernels:
            self.kernels[name] = Kernel(self, self.program.functions[name])
        return self.kernels[name]

    def unload(self) -> None:
        handles.drop(self.handle)
        for kernel in self.kernels.values():
            handles.drop(kernel.handle)
        self.closed = True
        self.program.unload()


@dataclass(eq=False)
class Kernel:
    """A function of a module."""

    module: Module
    function: Function

    def __post_init__(self) -> None:
        self.handle = handles.add(self)


class Library:
    """An image of which each device has a module of its own, from its first use there on: only then is it looked at."""

    def __init__(self, image: bytes) -> None:
        self._image = image
        self.modules: dict[int, Module] = {}
        self._kernels: dict[str, LibraryKernel] = {}
        self.handle = handles.add(self)

    def on(self, device: int) -> Module:
        if device not in self.modules:
            self.modules[device] = Module(device, load(self._image), of_library=True)
        return self.modules[device]

    def kernel(self, name: str, device: int) -> LibraryKernel:
        """``device``: in whose module it is looked for."""
        if name not in self.on(device).program.functions:
            raise RefusedError("NOT_FOUND")
        if name not in self._kernels:
            self._kernels[name] = LibraryKernel(self, name)
        return self._kernels[name]

    def unload(self) -> None:
        handles.drop(self.handle)
        for kernel in self._kernels.values():
            handles.drop(kernel.handle)
        for module in self.modules.values():
            module.unload()


@dataclass(eq=False)
class LibraryKernel:
    """What the functions of one name are in the modules of a library."""

    library: Library
    name: str

    def __post_init__(self) -> None:
        self.handle = handles.add(self)

    def on(self, device: int) -> Kernel:
        return self.library.on(device).kernel(self.name)


class Attribute:
    """Numbers of ``CUlaunchAttributeID``."""

    COOPERATIVE = 2
    CLUSTER_DIMENSION = 4
    PROGRAMMATIC_STREAM_SERIALIZATION = 6
    PROGRAMMATIC_EVENT = 7
    PRIORITY = 8
    PREFERRED_CLUSTER_DIMENSION = 11
    LAUNCH_COMPLETION_EVENT = 12
    DEVICE_UPDATABLE_KERNEL_NODE = 13
    NVLINK_UTIL_CENTRIC_SCHEDULING = 16


Dim3 = tuple[int, int, int]

MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_BLOCK = (1024, 1024, 64)
MULTIPROCESSORS = 132
REGISTERS = 65536  # of a multiprocessor
SHARED_PER_MULTIPROCESSOR = 228 * 1024
SHARED_PER_BLOCK = 227 * 1024
SHARED_WITHOUT_ASKING = 48 * 1024
RESERVED_SHARED = 1024
LARGEST_CLUSTER, LARGEST_NON_PORTABLE_CLUSTER = 8, 16


class Launch(Operation):
    """A grid of a kernel. ``attributes`` are raw ``CUlaunchAttributeValue`` by their numbers."""

    kind = "kernel"
    __slots__ = ("attributes", "block", "device", "grid", "kernel", "params", "shared")

    def __init__(
        self,
        kernel: Kernel,
        grid: Dim3,
        block: Dim3,
        shared: int,
        params: bytes,
        attributes: Mapping[int, bytes] = MappingProxyType({}),
    ) -> None:
        self.kernel, self.grid, self.block, self.shared, self.params = kernel, grid, block, shared, params
        self.attributes = attributes
        self.device = kernel.module.device

    def having(self, attributes: Mapping[int, bytes]) -> Launch:
        """The same with other attributes."""
        return Launch(self.kernel, self.grid, self.block, self.shared, self.params, attributes)

    def integer(self, attribute: int, at: int = 0) -> int:
        """The integer at a byte of an attribute's value; 0 if it is not given."""
        raw = self.attributes.get(attribute)
        return 0 if raw is None else int(struct.unpack_from("=i", raw, at)[0])

    def _extents(self, attribute: int) -> Dim3 | None:
        """None where all of them are 0, too: that is as if it were not given."""
        raw = self.attributes.get(attribute)
        x, y, z = struct.unpack_from("=3I", raw) if raw is not None else (0, 0, 0)
        return (x, y, z) if x or y or z else None

    @property
    def cluster(self) -> Dim3:
        return self._extents(Attribute.CLUSTER_DIMENSION) or self.kernel.function.cluster or (1, 1, 1)

    @property
    def updatable(self) -> bool:
        return bool(self.attributes) and self.integer(Attribute.DEVICE_UPDATABLE_KERNEL_NODE) != 0

    @property
    def cooperative(self) -> bool:
        return bool(self.attributes) and self.integer(Attribute.COOPERATIVE) != 0

    def check(self) -> None:
        """`RefusedError` for what no device can launch."""
        function, threads = self.kernel.function, self.block[0] * self.block[1] * self.block[2]
        for extents, most in ((self.grid, MAX_GRID), (self.block, MAX_BLOCK)):
            if not all(0 < n <= limit for n, limit in zip(extents, most, strict=True)):
                raise RefusedError("INVALID_VALUE")
        if threads > function.max_threads:
            raise RefusedError("INVALID_VALUE")
        if self.shared > function.max_dynamic_shared:
            raise RefusedError("INVALID_VALUE")
        if not self.attributes and function.cluster is None:
            return
        self._check_clusters()
        if self.cooperative:
            x, y, z = self.grid
            if x * y * z > MULTIPROCESSORS * blocks_per_multiprocessor(function, threads, self.shared):
                raise RefusedError("COOPERATIVE_LAUNCH_TOO_LARGE")

    def _check_clusters(self) -> None:
        """A preferred cluster is made of clusters, side by side, whose extents are given. Whether there is one is the
        device's choice, so that it may be of any size, larger than devices have, too."""
        cluster, preferred = self.cluster, self._extents(Attribute.PREFERRED_CLUSTER_DIMENSION)
        required, given = self.kernel.function.cluster, self._extents(Attribute.CLUSTER_DIMENSION)
        non_portable = self.kernel.function.settings["NON_PORTABLE_CLUSTER_SIZE_ALLOWED"]
        most = LARGEST_NON_PORTABLE_CLUSTER if non_portable else LARGEST_CLUSTER

        def divides(whole: Dim3, part: Dim3) -> bool:
            return all(p and n % p == 0 for n, p in zip(whole, part, strict=True))

        if not divides(self.grid, cluster) or cluster[0] * cluster[1] * cluster[2] > most:
            raise RefusedError("INVALID_CLUSTER_SIZE")
        if required is not None and cluster != required:
            raise RefusedError("INVALID_CLUSTER_SIZE")
        if preferred is not None and not (
            (given or required)
            and divides(self.grid, preferred)
            and divides(preferred, cluster)
            and preferred[2] == cluster[2]
        ):
            raise RefusedError("INVALID_CLUSTER_SIZE")

    def begin(self, work: Work) -> Task | None:
        kernel = self.kernel
        if kernel.module.closed:
            raise Fault("CUDA_ERROR_LAUNCH_FAILED", f"{work}: its module was unloaded before it ran")
        return kernel.function.grid(
            self.grid,
            self.block,
            self.params,
            shared=self.shared,
            cluster=self.cluster,
            cooperative=self.cooperative,
            device=self.device,
            order=work.order,
        )

    def check_update(self, old: Operation) -> str | None:
        assert isinstance(old, Launch)
        if self.device != old.device:
            return "UNSUPPORTED_FUNCTION_CHANGE"
        return None if self.cooperative == old.cooperative else "ATTRIBUTES_CHANGED"

    def __str__(self) -> str:
        return f"kernel {self.kernel.function.label} with grid {self.grid} and block {self.block}"


def blocks_per_multiprocessor(function: Function, threads: int, shared: int) -> int:
    """How many blocks are resident at a time on a multiprocessor of compute capability 9.0.

    Shared memory counts as far as the kernel may ask for it; how many threads it was compiled for does not.
    """
    if not 0 < threads <= MAX_BLOCK[0] or shared > function.max_dynamic_shared:
        return 0
    warps = -(-threads // 32)
    registers: int = -(-function.registers * 32 // 256) * 256  # of a warp, which lie in one of four files
    used: int = function.shared_bytes + shared
    by_shared = SHARED_PER_MULTIPROCESSOR // (-(-used // 128) * 128 + RESERVED_SHARED)
    return min(32, 64 // warps, 4 * (REGISTERS // 4 // registers) // warps, by_shared)


# Copies and fills


class Side(NamedTuple):
    """One side of a copy, as ``CUDA_MEMCPY3D`` has it."""

    memory_type: int  # CUmemorytype
    address: int
    pitch: int
    height: int
    x: int = 0
    y: int = 0
    z: int = 0

    def row(self, z: int, y: int) -> int:
        return self.address + ((self.z + z) * self.height + self.y + y) * self.pitch + self.x


HOST, DEVICE, ARRAY, UNIFIED = 1, 2, 3, 4  # CUmemorytype


def device_of(address: int) -> int | None:
    """The device in whose context memory was allocated, pinned memory too; None for ordinary host memory."""
    allocation = memory.find(address) if address in memory else None
    return None if allocation is None else allocation.device


def _is_absent(address: int) -> bool:
    allocation = memory.find(address)
    return allocation is not None and allocation.absent


@dataclass(frozen=True)
class Copy(Operation):
    """A copy of a box of bytes."""

    kind = "memcpy"

    device: int
    target: Side
    source: Side
    width: int
    height: int = 1
    depth: int = 1

    def check(self) -> None:
        for side in (self.target, self.source):
            if side.memory_type not in (HOST, DEVICE, UNIFIED):
                raise RefusedError("NOT_SUPPORTED" if side.memory_type == ARRAY else "INVALID_VALUE")
            if self.height > 1 and side.pitch < self.width + side.x:
                raise RefusedError("INVALID_VALUE")
            if self.depth > 1 and side.height < self.height + side.y:
                raise RefusedError("INVALID_VALUE")
            if self.width and self.height and self.depth:
                on_host = side.memory_type != DEVICE
                check_range(side.row(0, 0), 1, on_host)
                check_range(side.row(self.depth - 1, self.height - 1) + self.width - 1, 1, on_host)

    @property
    def absent(self) -> int | None:
        return next(filter(_is_absent, (self.target.row(0, 0), self.source.row(0, 0))), None)

    @property
    def devices(self) -> tuple[int | None, int | None]:
        """Whose memory the target and the source are, as `device_of` says."""
        return device_of(self.target.row(0, 0)), device_of(self.source.row(0, 0))

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Bytes that lie together on both sides: target, source, how many."""
        to, from_ = self.target, self.source
        if self.height == 1 or to.pitch == from_.pitch == self.width:
            for z in range(self.depth):
                yield to.row(z, 0), from_.row(z, 0), self.width * self.height
            return
        for z in range(self.depth):
            for y in range(self.height):
                yield to.row(z, y), from_.row(z, y), self.width

    def begin(self, work: Work) -> Task | None:
        return Once(self.run)

    def run(self) -> None:
        for to, from_, nbytes in self.runs():
            memory.check(from_, nbytes, read=True, what=str(self))
            memory.check(to, nbytes, read=False, what=str(self))
            memory.copy(to, from_, nbytes)

    def check_update(self, old: Operation) -> str | None:
        """What is called memory of the host may be any of it; the rest stays of its device. All is called as before."""
        assert isinstance(old, Copy)
        if max(self.height, self.depth, old.height, old.depth) > 1:
            return "PARAMETERS_CHANGED"
        of, was_of = (
            [
                (side.memory_type, None if side.memory_type == HOST else device_of(side.row(0, 0)))
                for side in (copy.target, copy.source)
            ]
            for copy in (self, old)
        )
        return None if of == was_of else "PARAMETERS_CHANGED"

    def __str__(self) -> str:
        size = "x".join(str(n) for n in (self.width, self.height, self.depth)[: 3 if self.depth > 1 else 2])
        return f"copy of {size} bytes from {self.source.row(0, 0):#x} to {self.target.row(0, 0):#x}"


def check_range(address: int, nbytes: int, on_host: bool = False) -> None:
    """`RefusedError` for an address that no memory is at; of ordinary host memory nothing is known."""
    if on_host and address not in memory:
        if not address:
            raise RefusedError("INVALID_VALUE")
        return
    allocation = memory.find(address)
    if allocation is None or allocation.freed or address + nbytes > allocation.address + allocation.nbytes:
        raise RefusedError("INVALID_VALUE")
    if allocation.kind == "mapped" and not memory.allows(address):  # memory of a graph may be touched later
        raise RefusedError("INVALID_VALUE")


@dataclass(frozen=True)
class Fill(Operation):
    """Elements of 1, 2 or 4 bytes, set to what they have room for of a value: ``height`` rows of ``width`` elements."""

    kind = "memset"

    device: int
    address: int
    value: int
    element: int
    width: int
    height: int
    pitch: int

    def check(self) -> None:
        if self.element not in (1, 2, 4) or self.address % self.element:
            raise RefusedError("INVALID_VALUE")
        if self.height > 1 and (self.pitch < self.width * self.element or self.pitch % self.element):
            raise RefusedError("INVALID_VALUE")
        if self.width and self.height:
            check_range(self.address, 1)
            check_range(self.address + self.pitch * (self.height - 1) + self.width * self.element - 1, 1)

    @property
    def absent(self) -> int | None:
        return self.address if _is_absent(self.address) else None

    def begin(self, work: Work) -> Task | None:
        return Once(self.run)

    def run(self) -> None:
        pattern = self.value.to_bytes(4, "little")[: self.element]
        rows, width = (
            (1, self.width * self.height) if self.pitch == self.width * self.element else (self.height, self.width)
        )
        for y in range(rows):
            address = self.address + y * self.pitch
            memory.check(address, width * self.element, read=False, what=str(self))
            memory.fill(address, pattern, width)

    def check_update(self, old: Operation) -> str | None:
        assert isinstance(old, Fill)
        boxes = [(fill.element, fill.width, fill.height, fill.pitch) for fill in (self, old)]
        same = boxes[0] == boxes[1] or max(self.height, old.height) == 1
        return None if same and device_of(self.address) == device_of(old.address) else "PARAMETERS_CHANGED"

    def __str__(self) -> str:
        return f"fill of {self.width}x{self.height} elements of {self.element} bytes at {self.address:#x}"


# Others


@dataclass(frozen=True)
class Empty(Operation):
    """Nothing."""

    kind = "empty"

    device: int

    def begin(self, work: Work) -> Task | None:
        return None

    def __str__(self) -> str:
        return "empty node"


_HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@dataclass(frozen=True)
class HostCall(Operation):
    """A C function, called with its data on a thread of the device."""

    kind = "host"

    device: int
    function: int
    data: int

    def begin(self, work: Work) -> Task | None:
        return _Calling(work, self)

    def call(self) -> None:
        _HostFunction(self.function)(self.data)

    def __str__(self) -> str:
        return f"host function at {self.function:#x}"


class _Calling(Plain):
    def __init__(self, work: Work, call: HostCall) -> None:
        self.work: Work | None = work
        self.call = call

    def advance(self, fuel: int, /) -> Outcome:
        work, self.work = self.work, None
        if work is None:
            return "done"
        machine.call_host(work, self.call.call)
        return "parked"


# CUstreamBatchMemOpType
WAIT, WRITE = {1: 4, 4: 8}, {2: 4, 5: 8}  # with the bytes of the integer
BARRIER = 6

MOST_OPS = 255  # of a batch


_FLUSH_FIRST = 1 << 30  # CUstreamWaitValue_flags; the lowest two bits say how to compare


class MemOp(NamedTuple):
    """A wait for, or a write of, an integer; or a barrier, for what is in order here anyway."""

    operation: int  # CUstreamBatchMemOpType
    address: int
    value: int
    flags: int

    def check(self) -> None:
        waits = self.operation in WAIT
        flags = 3 | _FLUSH_FIRST if waits else 1 if self.operation == BARRIER else 0
        if self.flags & ~flags:
            raise RefusedError("INVALID_VALUE")
        if self.flags & _FLUSH_FIRST:  # as CAN_FLUSH_REMOTE_WRITES says
            raise RefusedError("NOT_SUPPORTED")
        if self.operation == BARRIER:
            return
        nbytes = self.nbytes
        if nbytes is None:  # a flush of remote writes, among others
            raise RefusedError("NOT_SUPPORTED")
        if self.address % nbytes:
            raise RefusedError("INVALID_VALUE")
        check_range(self.address, nbytes)

    @property
    def nbytes(self) -> int | None:
        return WAIT.get(self.operation) or WRITE.get(self.operation)

    def do(self) -> bool:
        """Whether it is done."""
        nbytes = self.nbytes
        if nbytes is None:
            return True
        memory.check(self.address, nbytes, read=self.operation in WAIT, what=str(self), strong=True)
        word = (ctypes.c_uint32 if nbytes == 4 else ctypes.c_uint64).from_address(self.address)
        if self.operation in WRITE:
            word.value = self.value
            memory.written(self.address, nbytes)
            return True
        found, mask = word.value, (1 << 8 * nbytes) - 1
        return (
            lambda: (found - self.value) & mask <= mask >> 1,
            lambda: found == self.value & mask,
            lambda: found & self.value & mask != 0,
            lambda: ~(found | self.value) & mask != 0,
        )[self.flags & 3]()

    def __str__(self) -> str:
        if self.nbytes is None:
            return f"memory operation {self.operation}"
        verb = f"wait until it is {('>=', '==', '&', 'nor')[self.flags & 3]}" if self.operation in WAIT else "write"
        return f"{verb} {self.value} at {self.address:#x}"


@dataclass(frozen=True)
class MemOps(Operation):
    """Waits and writes, in order."""

    kind = "batch_mem_op"

    device: int
    ops: tuple[MemOp, ...]
    flags: int = 0

    def check(self) -> None:
        if len(self.ops) > MOST_OPS or self.flags:
            raise RefusedError("INVALID_VALUE")
        for op in self.ops:
            op.check()

    def begin(self, work: Work) -> Task | None:
        return _InOrder(self.ops)

    def check_update(self, old: Operation) -> str | None:
        assert isinstance(old, MemOps)
        return None if [op.operation for op in self.ops] == [op.operation for op in old.ops] else "PARAMETERS_CHANGED"

    def __str__(self) -> str:
        return "memory operations"


class _InOrder(Plain):
    def __init__(self, ops: tuple[MemOp, ...]) -> None:
        self.left = list(reversed(ops))

    def advance(self, fuel: int, /) -> Outcome:
        before = len(self.left)
        while self.left and self.left[-1].do():
            self.left.pop()
        return "done" if not self.left else "running" if len(self.left) < before else "stalled"

    def waiting(self) -> list[str]:
        return [str(self.left[-1])]


@dataclass(frozen=True)
class Act(Operation):
    """A step that the driver itself takes in the order of a stream."""

    device: int
    what: str
    act: Callable[[], object]

    def begin(self, work: Work) -> Task | None:
        return Once(self.act)

    def __str__(self) -> str:
        return self.what


# Memory of graphs


class Shared:
    """Something that goes when the last of those who use it does."""

    users = 0

    def keep(self) -> None:
        self.users += 1

    def let_go(self) -> None:
        self.users -= 1
        if not self.users:
            self.release()

    def release(self) -> None:
        raise NotImplementedError


class GraphMemory(Shared):
    """What an alloc node makes: a range of addresses that is memory from the alloc node to the free node.

    It is ``held`` when a launch allocated it, and nothing that was called since frees it. ``forget`` is told its
    address when it is gone.
    """

    def __init__(self, device: int, nbytes: int, align: int, forget: Callable[[int], object]) -> None:
        self.device, self.nbytes, self._forget = device, nbytes, forget
        self._allocation = memory.allocate(nbytes, "graph", device, align=align)
        self._allocation.absent = True
        self.address = self._allocation.address
        memory.forbid(self.address, nbytes)

    @property
    def held(self) -> bool:
        return not self._allocation.absent

    def hold(self, held: bool) -> None:
        """Said when the launch is called: it counts as a user."""
        if held != self.held:
            self._allocation.absent = not held
            (self.keep if held else self.let_go)()

    def open(self) -> None:
        memory.allow(self.address, self.nbytes, written=False)
        self._touch()

    def shut(self) -> None:
        self._touch()
        memory.forbid(self.address, self.nbytes)

    def _touch(self) -> None:
        """Whoever uses it must come behind, or before, as of a write."""
        if memory.tracker is not None:
            memory.tracker.touch(self.address, self.nbytes, write=True)

    def release(self) -> None:
        memory.free(self.address)
        self._forget(self.address)


@dataclass(frozen=True)
class Allocate(Operation):
    kind = "mem_alloc"

    memory: GraphMemory

    @property
    def device(self) -> int:  # type: ignore[override]
        return self.memory.device

    def begin(self, work: Work) -> Task | None:
        return Once(self.memory.open)

    def check_update(self, old: Operation) -> str | None:
        assert isinstance(old, Allocate)
        return None if self.device == old.device else "PARAMETERS_CHANGED"

    def __str__(self) -> str:
        return f"allocation of {self.memory.nbytes} bytes at {self.memory.address:#x}"


@dataclass(frozen=True)
class Free(Operation):
    kind = "mem_free"

    memory: GraphMemory

    @property
    def device(self) -> int:  # type: ignore[override]
        return self.memory.device

    def begin(self, work: Work) -> Task | None:
        return Once(self.memory.shut)

    def check_update(self, old: Operation) -> str | None:
        assert isinstance(old, Free)
        return None if self.device == old.device else "PARAMETERS_CHANGED"

    def __str__(self) -> str:
        return f"end of the memory at {self.memory.address:#x}"
