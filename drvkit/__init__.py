"""drvkit: CUDA modules, launches and explicit graphs in the driver's own terms.

The way of the data, file by file: source -> build -> module -> graph -> replay. Importing this loads no driver.
"""

from .attributes import AccessPolicyWindow, Attributes, ProgrammaticEvent
from .buckets import BucketError, Buckets, Key, Pad
from .build import Cache, CompileError, Image, build
from .device import Device, Event, Stream
from .driver import DriverError
from .graph import Condition, Edge, Graph, GraphError
from .lifetime import ClosedError, Live, live
from .memory import Buffer, MemoryPool
from .module import Kernel, Launch, Module
from .nccl import Nccl
from .node import Node, Port, WaitValue, WriteValue
from .replay import Exec
from .signature import ArgumentError
from .source import Source
from .symmetric import PeerMemory, SymmetricMemory
from .world import World, WorldError

__all__ = [
    "AccessPolicyWindow",
    "ArgumentError",
    "Attributes",
    "BucketError",
    "Buckets",
    "Buffer",
    "Cache",
    "ClosedError",
    "CompileError",
    "Condition",
    "Device",
    "DriverError",
    "Edge",
    "Event",
    "Exec",
    "Graph",
    "GraphError",
    "Image",
    "Kernel",
    "Key",
    "Launch",
    "Live",
    "MemoryPool",
    "Module",
    "Nccl",
    "Node",
    "Pad",
    "PeerMemory",
    "Port",
    "ProgrammaticEvent",
    "Source",
    "Stream",
    "SymmetricMemory",
    "WaitValue",
    "World",
    "WorldError",
    "WriteValue",
    "build",
    "live",
]
__version__ = "0.1.0"
