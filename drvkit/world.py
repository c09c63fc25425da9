"""Ranks that work together.

A `World` is a group of ranks: processes that have a device each (made by `World.spawn`, torchrun or MPI), devices of
one process, or virtual ranks on one device. All that it can do rests on one operation: every rank gives a value, every
rank gets the values of all.

Every wait for other ranks has a deadline. What cannot go on (a rank is late, died, failed, closed its world, or does
something else than the others) is told to all at once, as a `WorldError` that names the rank. The world is of no use
after that: every later call raises the same. Only a disagreement (`World.agree`) leaves it as it was.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import importlib
import json
import math
import os
import secrets
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import connection
from typing import Any, Protocol, Self

from .device import NO_GPU, Device
from .driver import DriverError, open_driver
from .lifetime import ClosedError

__all__ = ["World", "WorldError"]

TIMEOUT_S = 60.0
PORTS = 16  # torchrun's agent may have MASTER_PORT itself: then ranks meet at one of the next


class WorldError(RuntimeError):
    """The ranks of a world could not do something together.

    Attributes:
        rank: who caused it, the first if there are several; None if it was no rank.
        reason: what happened, in words.
    """

    def __init__(self, rank: int | None, reason: str) -> None:
        self.rank, self.reason = rank, reason
        super().__init__(reason)

    def __reduce__(self) -> tuple[type[WorldError], tuple[int | None, str]]:
        return type(self), (self.rank, self.reason)


class Transport(Protocol):
    """All ranks give values, all get all of them; how depends on where they are."""

    alarm: Sequence[socket.socket]  # can be read from between operations when the world has failed

    def gather(self, what: str, values: list[Any]) -> list[Any]: ...

    def fail(self, reason: str) -> None:
        """Tell the others; wait for nobody."""

    def split(self, world: World, members: list[int]) -> Transport: ...

    def close(self, *, forked: bool) -> None: ...


class Alone:
    """All ranks are of this process."""

    alarm: Sequence[socket.socket] = ()
    failure: str | None = None

    def gather(self, what: str, values: list[Any]) -> list[Any]:
        if self.failure is not None:
            raise WorldError(None, self.failure)
        given: list[Any] = json.loads(json.dumps(values))  # as it would come from another process
        return given

    def fail(self, reason: str) -> None:
        self.failure = reason

    def split(self, world: World, members: list[int]) -> Transport:
        return Alone()

    def close(self, *, forked: bool) -> None:
        pass


class World:
    """Ranks that work together: processes with a device each, devices of one process, or virtual ranks on one device.

    One operation at a time: each is done by all ranks, in the same order. A world belongs to the process that made it.

    Attributes:
        size: how many ranks there are.
        ranks: those of this process.
        devices: one for each of them; the same one several times for virtual ranks.
        virtual: whether all ranks are on one device (rank = blockIdx.y of one cooperative launch).
        timeout_s: how long any wait for another rank lasts at most.
    """

    def __init__(
        self,
        size: int,
        ranks: Sequence[int],
        devices: Sequence[Device],
        transport: Transport,
        timeout_s: float,
        *,
        virtual: bool = False,
    ) -> None:
        self.size, self.ranks, self.devices = size, tuple(ranks), tuple(devices)
        self.virtual, self.timeout_s = virtual, timeout_s
        self._transport: Transport | None = transport
        self._failure: WorldError | None = None
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._parts: weakref.WeakSet[World] = weakref.WeakSet()  # what `split` made: they fail with it

    # How it is made

    @classmethod
    def of_devices(cls, devices: Sequence[Device | str], *, timeout_s: float = TIMEOUT_S) -> World:
        """Several devices of this process, a rank each."""
        made = [Device(device) if isinstance(device, str) else device for device in devices]
        names = [device.id for device in made]
        if not made or len(set(names)) < len(names):
            raise ValueError(f"a world of devices: wanted different ones, got {names} (of_virtual has ranks on one)")
        return cls(len(made), range(len(made)), made, Alone(), seconds(timeout_s))

    @classmethod
    def of_virtual(cls, device: Device | str, size: int, *, timeout_s: float = TIMEOUT_S) -> World:
        """So many ranks on one device: rank is blockIdx.y of one cooperative launch."""
        device = Device(device) if isinstance(device, str) else device
        return cls(_size(size), range(size), [device] * size, Alone(), seconds(timeout_s), virtual=True)

    @classmethod
    def from_environment(cls, device: Device | None = None, *, timeout_s: float = TIMEOUT_S) -> World:
        """This process's rank of a world that torchrun, or whoever sets the same variables, has started.

        RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; TORCHELASTIC_RUN_ID and TORCHELASTIC_RESTART_COUNT
        keep runs apart where they are set. ``device`` is by default the GPU of number LOCAL_RANK, or the CPU device of
        that number where there is no GPU, which rank 0 of the host says in a line. Returns once all ranks are there.
        """
        from .rendezvous import Endpoint, Hub, Star

        timeout_s = seconds(timeout_s)
        size = _variable("WORLD_SIZE", 1, 1 << 20)
        rank, local = _variable("RANK", 0, size - 1), _variable("LOCAL_RANK", 0, size - 1)
        host, port = os.environ.get("MASTER_ADDR"), _variable("MASTER_PORT", 1, 65535)
        if not host:
            raise ValueError("World.from_environment: MASTER_ADDR is not set")
        try:
            address = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
        except OSError as error:
            raise ValueError(f"World.from_environment: MASTER_ADDR is {host!r}: {error}") from None
        run = [os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RUN_ID", "RESTART_COUNT")]
        secret = hashlib.sha256(json.dumps([host, port, size, *run]).encode()).hexdigest()
        endpoint = Endpoint(host, range(port, min(port + PORTS, 65536)), secret, 0)
        device = device or default_device(local, needed=1)
        if not address.startswith(("127.", "::1")):  # others may know this host by an address that it does not know
            address = "::" if ":" in address else "0.0.0.0"
        hub = Hub(size, address, endpoint.ports, secret) if rank == 0 else None
        return cls.joined(Star(endpoint, rank, timeout_s, hub), rank, size, device, timeout_s)

    @classmethod
    def from_mpi(cls, comm: Any = None, device: Device | None = None, *, timeout_s: float = TIMEOUT_S) -> World:
        """This process's rank of an MPI communicator, by default mpi4py's COMM_WORLD.

        ``device`` is chosen as by `from_environment`, by the rank among those of this host. Waits are MPI's, and have
        no deadline.
        """
        from .rendezvous import Mpi

        timeout_s = seconds(timeout_s)
        if comm is None:
            try:
                comm = importlib.import_module("mpi4py.MPI").COMM_WORLD
            except ImportError as error:
                raise ImportError(f"World.from_mpi needs mpi4py, which cannot be imported here ({error})") from None
        rank, size = int(comm.Get_rank()), int(comm.Get_size())
        hosts = [json.loads(text) for text in comm.allgather(json.dumps(this_host()))]
        device = device or default_device(hosts[:rank].count(hosts[rank]), needed=1)
        return cls.joined(Mpi(comm), rank, size, device, timeout_s)

    @classmethod
    def joined(cls, transport: Transport, rank: int, size: int, device: Device, timeout_s: float) -> World:
        """All ranks are there, or none has a world."""
        world = cls(size, [rank], [device], transport, timeout_s)
        try:
            world.agree("the size of the world", size)
        except BaseException:
            world.close()
            raise
        return world

    @staticmethod
    def spawn(
        function: Callable[..., Any],
        size: int,
        *args: Any,
        devices: str | Sequence[str] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> list[Any]:
        """Call ``function(world, *args)`` in ``size`` new processes, a rank each; gives what they returned, in order.

        ``devices`` is ``"cuda"``, ``"cpu"`` or a name for each rank; by default GPUs where there are enough, else CPU
        devices, which rank 0 says in a line. What one rank raises reaches the others where they wait for it, and is
        raised here as a `WorldError` from the original. No process is left when this returns or raises.
        """
        from .rendezvous import spawn

        _importable(function)
        size = _size(size)
        if isinstance(devices, str):
            if devices not in ("cpu", "cuda"):
                raise ValueError(f"World.spawn: devices: wanted 'cpu', 'cuda' or a name for each rank, got {devices!r}")
            devices = [f"{devices}:{rank}" for rank in range(size)]
        if devices is not None and len(devices) != size:
            raise ValueError(f"World.spawn: devices: wanted {size} names, got {list(devices)}")
        return spawn(function, size, args, devices, seconds(timeout_s))

    # What its ranks do together

    def gather(self, values: Sequence[Any], *, what: str = "gather") -> list[Any]:
        """One value (anything of JSON) for each rank of this process; gives one for each rank of the world, in order.

        ``what`` names the operation: ranks that do different ones are told so.
        """
        if len(values) != len(self.ranks):
            raise ValueError(f"{what}: wanted a value for each of {len(self.ranks)} ranks, got {len(values)}")
        json.dumps(list(values))  # what is not JSON is the caller's error, and no rank has to hear of it
        with self._lock:
            transport = self._in_use()
            if self._failure is not None:
                raise WorldError(self._failure.rank, self._failure.reason)
            try:
                return transport.gather(what, list(values))
            except WorldError as error:
                self._failure = WorldError(error.rank, error.reason)  # without what a traceback holds
                raise
            except BaseException as error:
                self._failure = WorldError(None, f"{what} was interrupted by {error!r}")
                raise

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.gather([None] * len(self.ranks), what="barrier")

    def agree(self, what: str, value: Any) -> None:
        """Every rank must give the same ``value`` (anything of JSON): else every rank raises who gave what."""
        given = self.gather([value] * len(self.ranks), what=f"agree on {what}")
        said: dict[str, list[int]] = {}
        for rank, each in enumerate(given):
            said.setdefault(json.dumps(each, sort_keys=True), []).append(rank)
        if len(said) > 1:
            usual = max(said.values(), key=len)  # the first of them, which has the lowest rank, if there are several
            differ = min(rank for ranks in said.values() if ranks is not usual for rank in ranks)
            values = "; ".join(f"{named(ranks)}: {text:.200}" for text, ranks in said.items())
            raise WorldError(differ, f"the ranks do not agree on {what}: {values}")

    def exchange_fds(self, fds: Sequence[int]) -> list[list[int]]:
        """Files to all ranks: one open ``fd`` for each rank of this process.

        Gives, for each rank of this process, new fds of the files of all ranks, in order; the caller closes them. All
        ranks get all, or every rank raises and none has any.
        """
        if len(fds) != len(self.ranks):
            raise ValueError(f"exchange_fds: wanted an fd for each of {len(self.ranks)} ranks, got {len(fds)}")
        held: list[int] = []
        try:
            if len(self.ranks) == self.size:
                self.barrier()
                for fd in [*fds] * self.size:
                    held.append(os.dup(fd))
                return [held[i : i + self.size] for i in range(0, len(held), self.size)]
            return [self._exchange(fds[0], held)]
        except BaseException:
            for fd in held:
                os.close(fd)
            raise

    def _exchange(self, fd: int, held: list[int]) -> list[int]:
        """`exchange_fds` of processes. Whatever is open is in ``held``.

        Each has a socket whose name, 128 random bits, nobody can guess or be in the way of; as everybody on the host
        can list such names, a message counts only with the token that goes with it, and from the same user.
        """
        what, rank, why = "exchange_fds", self.ranks[0], None
        name, token = f"\0drvkit-{secrets.token_hex(16)}", secrets.token_hex(16)
        with contextlib.ExitStack() as stack:
            try:
                got = {rank: os.dup(fd)}
                held.append(got[rank])
                listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                listener.bind(name)
                listener.listen(self.size + 16)
            except OSError as error:
                why = error
            places = self._outcome(what, why, [this_host(), name, token])
            far = [r for r, (host, *_) in enumerate(places) if host != places[0][0]]
            if far:
                where = "on other hosts, or in other network namespaces, than rank 0"
                raise WorldError(far[0], f"{what}: {named(far)} cannot be reached: {where}")
            deadline = time.monotonic() + self.timeout_s / 2  # the others wait as long to hear how it went
            try:
                for _, there, theirs in places[:rank] + places[rank + 1 :]:
                    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sender:
                        sender.settimeout(self.timeout_s / 2)
                        sender.connect(there)
                        socket.send_fds(sender, [json.dumps({"token": theirs, "rank": rank}).encode()], [fd])
                while missing := set(range(self.size)) - set(got):
                    left = max(deadline - time.monotonic(), 0)
                    if listener not in connection.wait([listener, *self._in_use().alarm], left):
                        raise OSError(f"the fds of {named(missing)} did not come in time")
                    sender, _ = listener.accept()
                    with sender:
                        self._take_fd(sender, token, got, held)
            except OSError as error:
                why = error
        self._outcome(f"{what}: whether all came", why, None)
        return [got[rank] for rank in range(self.size)]

    def _outcome(self, what: str, error: OSError | None, value: Any) -> list[Any]:
        """The values of all ranks, if none had an error."""
        given = self.gather([[error and f"{type(error).__name__}: {error}", value]], what=what)
        for rank, (failed, _) in enumerate(given):
            if failed is not None:
                raise WorldError(rank, f"exchange_fds: rank {rank} failed: {failed}")
        return [value for _, value in given]

    def _take_fd(self, sender: socket.socket, token: str, got: dict[int, int], held: list[int]) -> None:
        """What strangers send is dropped."""
        credentials = sender.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        if struct.unpack("iII", credentials)[1] != os.getuid():
            return
        came: list[int] = []
        try:
            sender.settimeout(1)
            data, came, flags, _ = socket.recv_fds(sender, 256, 4, socket.MSG_CMSG_CLOEXEC)
            said = json.loads(data)
            rank = said["rank"]
            if hmac.compare_digest(said["token"].encode(), token.encode()) and rank in range(self.size):
                if flags & socket.MSG_CTRUNC or len(came) != 1:
                    raise OSError(f"the fd of rank {rank} was lost: too many are open here")
                if rank not in got:
                    got[rank] = came.pop()
                    held.append(got[rank])
        except (TimeoutError, ConnectionError, ValueError, KeyError, TypeError, AttributeError):
            pass
        finally:
            for fd in came:
                os.close(fd)

    def fail(self, error: BaseException | str) -> None:
        """Tell all other ranks that this one failed: their waits raise it. Waits for nobody."""
        for world in (self, *self._parts):
            if world._transport is not None and world._process == os.getpid():
                text = f"{type(error).__name__}: {error}" if isinstance(error, BaseException) else error
                world._transport.fail(f"{named(world.ranks)} failed: {text}")

    def split(self, colors: Sequence[Any]) -> World:
        """The world of those ranks that give the same color as the rank of this process, in order, counted from 0.

        Every rank has to be there. Ranks of one process can only stay together: what `of_devices` and `of_virtual`
        made is split by making smaller ones.
        """
        if any(color != colors[0] for color in colors):
            raise ValueError(f"split: the ranks {list(self.ranks)} of this process have different colors {colors}")
        given = self.gather(colors, what="split")
        mine = given[self.ranks[0]]
        members = [rank for rank, color in enumerate(given) if color == mine]
        transport, ranks = self._in_use().split(self, members), [members.index(rank) for rank in self.ranks]
        part = World(len(members), ranks, self.devices, transport, self.timeout_s, virtual=self.virtual)
        self._parts.add(part)
        return part

    # Its end

    @property
    def closed(self) -> bool:
        return self._transport is None

    def _in_use(self) -> Transport:
        if self._transport is None:
            raise ClosedError(f"{self!r} is closed")
        if self._process != os.getpid():
            raise WorldError(
                None, f"{self!r} is of process {self._process}: a forked child cannot use it; spawn instead"
            )
        return self._transport

    def close(self) -> None:
        """Leave it. Waits for nobody: a rank that still waits for this one is told. Closing twice is fine."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close(forked=self._process != os.getpid())

    def __enter__(self) -> Self:
        self._in_use()
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        if error is not None:
            self.fail(error)
        self.close()

    def __repr__(self) -> str:
        return f"<World of {self.size}: {named(self.ranks)} on {', '.join(sorted({d.id for d in self.devices}))}>"


def seconds(timeout_s: float) -> float:
    """Refuse what is no time to wait."""
    if not isinstance(timeout_s, (int, float)) or not 0 < timeout_s < math.inf:
        raise ValueError(f"timeout_s: wanted a number of seconds above 0, got {timeout_s!r}")
    return float(timeout_s)


def _size(size: int) -> int:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"the size of a world: wanted an integer of at least 1, got {size!r}")
    return size


def _variable(name: str, least: int, most: int) -> int:
    text = os.environ.get(name)
    if text is None:
        raise ValueError(f"World.from_environment: {name} is not set")
    if not text.isdecimal() or not least <= int(text) <= most:
        raise ValueError(f"World.from_environment: {name} is {text!r}, wanted an integer from {least} to {most}")
    return int(text)


def this_host() -> list[Any]:
    """The same for those that see each other's abstract sockets."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return [file.read().strip(), os.stat("/proc/self/ns/net").st_ino]


def default_device(number: int, needed: int) -> Device:
    kind = os.environ.get("DRVKIT_DEVICE", "").partition(":")[0]
    if not kind:
        try:
            there = open_driver("cuda").cuDeviceGetCount()
            why = f"{there} GPUs here for {needed} ranks"
        except DriverError as error:
            if error.code not in NO_GPU:
                raise
            there, why = 0, f"no GPU here ({error})"
        kind = "cuda" if there >= needed else "cpu"
        if kind == "cpu" and number == 0:
            print(f"drvkit: {why}; the ranks are on CPU devices", file=sys.stderr)
    return Device(f"{kind}:{number}")


def named(ranks: Iterable[int]) -> str:
    names = [str(rank) for rank in sorted(ranks)]
    return f"rank{'s' * (len(names) > 1)} {', '.join(names)}"


def _importable(function: Callable[..., Any]) -> None:
    """New processes import what they call: refuse early what they would not find."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    main = sys.modules.get("__main__")
    if not callable(function) or not module or not name or "<" in name:
        raise ValueError(f"World.spawn: {function!r}: wanted a function at the top of a module, which can be imported")
    if module == "__main__" and not os.path.exists(getattr(main, "__file__", None) or ""):
        raise ValueError(
            f"World.spawn: {name} is defined in an interactive session, or in text without a file, from which new "
            "processes cannot import it; put it into a module"
        )
