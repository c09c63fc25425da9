"""NCCL's all-reduce through CuPy's binding, for ranks that share no memory: those of different hosts."""

from __future__ import annotations

import importlib
import os
import warnings
from functools import partial
from typing import Any, Self

import ml_dtypes
import numpy as np

from .device import Device, Stream
from .driver import multicast_refusal
from .graph import After, Graph
from .lifetime import Owned
from .memory import View, holder, view_of
from .node import Node
from .world import World, WorldError

__all__ = ["Nccl"]

TYPES = {  # their names in the binding
    np.dtype(ml_dtypes.bfloat16): "NCCL_BFLOAT16",
    np.dtype(np.float16): "NCCL_FLOAT16",
    np.dtype(np.float32): "NCCL_FLOAT32",
}


class Nccl:
    """A communicator of NCCL over all ranks of a world, a GPU each. Every rank makes it at the same time, and then the
    same calls in the same order.

    NCCL uses no multicast (NVLS), unless that is opted in to as for `SymmetricMemory`. Its waits have no deadline.
    Where a process has several ranks: NCCL waits on one device for work that this thread has yet to queue on another;
    what makes the host wait for the device, such as loading a module, comes before or behind the calls of all ranks.

    Attributes:
        world: whose it is.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        whole = len(world.ranks) == world.size
        unique, failure = "", None
        try:
            if world.virtual or any(device.driver.kind != "cuda" for device in world.devices):
                raise ValueError(f"Nccl: wanted ranks with a GPU each, got {world!r}")
            self._binding = binding()
            if world.ranks[0] == 0 and not whole:
                unique = self._binding.get_unique_id().hex()
        except Exception as error:
            failure = error
        said = world.gather([[failure and f"{failure}", unique]] * len(world.ranks), what="Nccl")
        if failure is not None:
            raise failure
        for rank, (why, _) in enumerate(said):
            if why is not None:
                raise WorldError(rank, f"rank {rank}: {why}")
        make = self._binding.NcclCommunicator
        with world.devices[0].context:
            if whole:
                made = make.initAll([device.ordinal for device in world.devices])
            else:
                made = [make(world.size, bytes.fromhex(said[0][1]), world.ranks[0])]
        self._ranks = [_Communicator(*each) for each in zip(world.devices, made, strict=True)]

    def allreduce(self, where: Stream | Graph, x: Any, *, after: After = None, name: str | None = None) -> Node | None:
        """``x = sum over ranks of x``, in NCCL's order and rounding; the same bits on every rank.

        Args:
            where: a stream of the rank's device, or a graph, of which what NCCL queues becomes a child: NCCL fails
                where it is captured into a graph that has a call of it already.
            x: a contiguous device array of bfloat16, float16 or float32.
        """
        if where.device not in self.world.devices:
            raise ValueError(f"Nccl: {where.device.id} is no device of this world's ranks here")
        rank = self._ranks[self.world.devices.index(where.device)]
        seen = _operand(where.device, x)
        if isinstance(where, Stream):
            if after is not None or name is not None:
                raise TypeError("Nccl: after= and name= are for nodes; a launch comes after what its stream has")
            self._launch(rank, where, x, seen)
            return None
        if not seen.size:
            return where.empty(after=after, name=name)
        box, outermost = rank._in_use(), where.root._in_use()
        with Graph(where.device, "nccl") as captured:
            with captured.capture(rank.stream, mode="relaxed", name="nccl") as stream:
                self._launch(rank, stream, x, seen)
            # To destroy a communicator is to wait for the end of all graphs that have its calls: it outlives them.
            outermost.owner = (outermost.owner, box)
            made = captured._in_use()
            made.owner = (made.owner, box)
            return where.child(captured, after=after, name=name)

    def _launch(self, rank: _Communicator, stream: Stream, x: Any, seen: View) -> None:
        box, binding = rank._in_use(), self._binding
        communicator, number = rank.communicator, getattr(binding, TYPES[seen.dtype])
        with stream.device.context:
            communicator.allReduce(seen.address, seen.address, seen.size, number, binding.NCCL_SUM, int(stream.handle))
        stream.hold((box, holder(x)))

    def close(self) -> None:
        """Refuse further use. It is destroyed when no graph has calls of it any more."""
        for rank in self._ranks:
            rank.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Communicator(Owned):
    """That of one rank of this process."""

    kind = "NCCL communicator"

    def __init__(self, device: Device, communicator: Any) -> None:
        self.communicator = communicator
        self.stream = device.stream()  # to capture on
        self._own(None, partial(device.context.call, communicator.destroy), f"on {device.id}")

    def close(self) -> None:
        super().close()
        self.stream.close()


def binding() -> Any:
    """CuPy's binding of NCCL, which reads its environment when the process makes its first communicator."""
    if multicast_refusal() is not None:
        os.environ["NCCL_NVLS_ENABLE"] = "0"
    # Else ranks are connected in the first call of a kind, which waits for the others: for ever, if they are of the
    # same thread.
    os.environ["NCCL_RUNTIME_CONNECT"] = "0"
    try:
        with warnings.catch_warnings():  # that there is no libnccl
            warnings.simplefilter("ignore")
            nccl = importlib.import_module("cupy.cuda.nccl")
    except ImportError as error:
        raise ImportError(f"Nccl needs CuPy, which cannot be imported here ({error})") from None
    if not nccl.available:
        raise ImportError("Nccl needs libnccl (package nvidia-nccl-cu13), which CuPy does not find here")
    return nccl


def _operand(device: Device, x: Any) -> View:
    seen = view_of(x)
    wanted = f"Nccl: x: wanted a contiguous array of {', '.join(map(str, TYPES))} on {device.id}"
    if seen is None or seen.on_host:
        raise TypeError(f"{wanted}, got {type(x).__name__}")
    if seen.dtype not in TYPES:
        raise TypeError(f"{wanted}, got {seen.dtype}")
    if not seen.contiguous:
        raise ValueError(f"{wanted}, got strides {seen.strides} of shape {seen.shape}")
    place = device.locate(seen.address) if seen.size else None
    if place not in (None, device.ordinal):
        raise ValueError(f"{wanted}, got one on device {place}")
    return seen
