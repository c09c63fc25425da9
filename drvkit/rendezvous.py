"""How the ranks of a world meet that are processes: over sockets or over MPI; and how they are spawned.

Sockets make a star: each rank is connected to a hub, a thread in the process that spawned the ranks, or in rank 0. The
hub answers when all have given a value. It is also who knows first that one cannot: a message says so, or its
connection ends, or the time is over; and it tells all the others at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import math
import pickle
import secrets
import signal
import socket
import struct
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import connection, get_context
from typing import Any, NamedTuple

from .device import Device
from .world import Transport, World, WorldError, default_device, named

START_S = 60.0  # what spawned ranks have besides to start: an interpreter, the imports of the function, a device
END_S = 5.0  # what ranks have to end by themselves once one has failed, and to exit once they returned
HELLO_S = 1.0  # whoever listens at a port and is silent for so long is no hub; whoever connects and is, no rank
LONGEST = 64 << 20  # bytes of a message
MAGIC = b"drvkit world 1\n\0"


class Endpoint(NamedTuple):
    """Where a hub is to be found, and what its ranks know."""

    host: str
    ports: Sequence[int]  # at one of these
    secret: str
    rank: int | None  # in whose process it is; None: in that which spawned them


def _frame(**message: Any) -> bytes:
    body = json.dumps(message).encode()
    if len(body) > LONGEST:
        raise ValueError(f"a message to the other ranks is {len(body)} bytes long; {LONGEST} are the most")
    return struct.pack("!I", len(body)) + body


def _proof(secret: str, nonce: bytes, rank: int) -> bytes:
    return hmac.new(secret.encode(), nonce + b"%d" % rank, hashlib.sha256).hexdigest().encode()


def _differences(places: dict[int, tuple[str, int]]) -> tuple[int, str] | None:
    """Whether ranks are at different operations: a rank that is, and what to say."""
    first = min(places)
    for rank, place in sorted(places.items()):
        if place != places[first]:
            at = [f"rank {r} is at {places[r][0]!r} (its operation {places[r][1]})" for r in (first, rank)]
            return rank, f"the ranks do different things: {', '.join(at)}"
    return None


class Hub:
    """Where ranks meet: a thread that takes one message of each and answers all of them.

    It speaks first, with a number for the ranks to sign: so they know it from other servers, and it them from
    strangers, and no secret travels. Once all have come it listens no more.
    """

    def __init__(self, size: int, host: str, ports: Sequence[int], secret: str) -> None:
        self.size, self.secret = size, secret
        self._ranks: dict[int, asyncio.StreamWriter] = {}  # those that have come
        self._tasks: set[asyncio.Task[Any]] = set()
        self._round: dict[int, dict[str, Any]] = {}  # the messages of those that wait
        self._timer: asyncio.TimerHandle | None = None
        self._failure = b""  # what there is to tell for ever
        self._listener = self._listen(host, ports)
        self.port: int = self._listener.getsockname()[1]
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="drvkit hub", daemon=True)
        self._thread.start()
        self._ready.wait()

    @staticmethod
    def _listen(host: str, ports: Sequence[int]) -> socket.socket:
        for port in ports:
            try:
                return socket.create_server((host, port), family=_family(host), backlog=128)
            except OSError as error:
                refused = error
        raise WorldError(0, f"rank 0 can listen at no port of {ports[0]} to {ports[-1]}: {refused}") from refused

    async def _run(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        self._server = await asyncio.start_server(self._serve, sock=self._listener)
        self._ready.set()
        await self._end.wait()
        self._server.close()
        self._end_round()
        for writer in self._ranks.values():
            writer.close()  # what it has still to say is sent
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def read(longest: int) -> Any:
            (size,) = struct.unpack("!I", await reader.readexactly(4))
            if size > longest:
                raise ValueError(f"{size} bytes")
            return json.loads(await reader.readexactly(size))

        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        rank, why = None, "its connection ended"
        try:
            nonce = secrets.token_bytes(16)
            writer.write(MAGIC + nonce)
            hello = await asyncio.wait_for(read(256), HELLO_S)  # so short that nesting does no harm
            wanted = hello["rank"]
            proven = hmac.compare_digest(hello["proof"].encode(), _proof(self.secret, nonce, wanted))
            if proven and wanted in self._ranks:
                writer.write(_frame(rank=wanted, reason=f"there is a rank {wanted} already"))
            elif proven and wanted in range(self.size):
                rank = wanted
                self._ranks[rank] = writer
                writer.write(_frame(welcome=rank) + self._failure)
                if len(self._ranks) == self.size:
                    self._server.close()
                while True:
                    self._take(rank, await read(LONGEST))
        except (OSError, EOFError, TimeoutError):
            pass
        except (ValueError, KeyError, TypeError, AttributeError) as error:  # no message of ours
            why = f"it sent garbage ({error!r})"
        finally:
            if rank is not None and not self._end.is_set():
                self._fail(rank, f"rank {rank} died: {why}")
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            self._tasks.discard(task)

    def _take(self, rank: int, message: dict[str, Any]) -> None:
        if "reason" in message:
            self._fail(rank, message["reason"])
        elif not self._failure:  # else its sender will read that before any answer
            if not self._round:
                self._timer = self._loop.call_later(message["timeout_s"], self._late)
            self._round[rank] = message
            differ = _differences({r: (each["what"], each["number"]) for r, each in self._round.items()})
            if differ is not None:
                self._fail(*differ)
            elif len(self._round) == self.size:
                values = [value for _, each in sorted(self._round.items()) for value in each["values"]]
                self._end_round()
                self._tell(_frame(values=values))

    def _tell(self, frame: bytes) -> None:
        for writer in self._ranks.values():
            if not writer.is_closing():
                writer.write(frame)

    def _end_round(self) -> None:
        self._round.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _late(self) -> None:
        message = next(iter(self._round.values()))
        late = [rank for rank in range(self.size) if rank not in self._round]
        never = [rank for rank in late if rank not in self._ranks]
        reason = f"{named(late)} did not come to {message['what']!r} within {message['timeout_s']:g} s, where "
        reason += f"{named(self._round)} waited" + (f"; {named(never)} never joined" if never else "")
        self._fail(late[0], reason)

    def _fail(self, rank: int | None, reason: str) -> None:
        if not self._failure:  # the first is the cause of the others
            self._failure = _frame(rank=rank, reason=reason)
            self._end_round()
            self._tell(self._failure)

    def fail(self, rank: int | None, reason: str) -> None:
        """For other threads: tell all ranks."""
        self._loop.call_soon_threadsafe(self._fail, rank, reason)

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join()


class Star:
    """A rank's connection to the hub. ``hub`` is the hub itself, where it is in this process."""

    def __init__(self, endpoint: Endpoint, rank: int, timeout_s: float, hub: Hub | None = None) -> None:
        self.endpoint, self.rank, self.timeout_s, self.hub = endpoint, rank, timeout_s, hub
        at = endpoint.rank
        self._where = "the process that spawned the ranks" if at is None else f"rank {at}, where the ranks meet,"
        self._number = 0
        try:
            self._connect(time.monotonic() + timeout_s)
        except BaseException:
            if hub is not None:
                hub.close()
            raise

    def _connect(self, deadline: float) -> None:
        host, ports, secret, at = self.endpoint
        heard = ""
        while time.monotonic() < deadline:
            for port in ports:
                with contextlib.ExitStack() as undo:
                    try:
                        self._socket = undo.enter_context(socket.create_connection((host, port), timeout=HELLO_S))
                        hello = self._exactly(len(MAGIC) + 16, time.monotonic() + HELLO_S)
                        if not hello.startswith(MAGIC):
                            raise ConnectionError("who listens is no hub")
                        proof = _proof(secret, hello[len(MAGIC) :], self.rank)
                        self._socket.sendall(_frame(rank=self.rank, proof=proof.decode()))
                        answer = self._read(deadline)
                        if "reason" in answer:
                            raise WorldError(answer["rank"], answer["reason"])
                        self.alarm: Sequence[socket.socket] = [self._socket]
                        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                        undo.pop_all()
                        return
                    except (OSError, EOFError, ValueError) as error:
                        heard = f"port {port}: {error}"
            time.sleep(0.02)
        raise WorldError(
            at, f"{self._where} was not found at {host} by rank {self.rank} within {self.timeout_s:g} s ({heard})"
        )

    def _exactly(self, count: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < count:
            self._socket.settimeout(max(deadline - time.monotonic(), 1e-3))
            part = self._socket.recv(min(count - len(data), 1 << 20))
            if not part:
                raise EOFError("the connection ended")
            data += part
        return bytes(data)

    def _read(self, deadline: float) -> Any:
        (size,) = struct.unpack("!I", self._exactly(4, deadline))
        return json.loads(self._exactly(size, deadline))

    def _send(self, frame: bytes) -> None:
        with contextlib.suppress(OSError):  # then there is something to read: why
            self._socket.settimeout(self.timeout_s)
            self._socket.sendall(frame)

    def gather(self, what: str, values: list[Any]) -> list[Any]:
        frame = _frame(what=what, number=self._number + 1, values=values, timeout_s=self.timeout_s)
        self._number += 1
        self._send(frame)
        try:
            answer = self._read(time.monotonic() + self.timeout_s + 1)  # the hub's clock is the one that counts
        except (OSError, EOFError) as error:
            how = "does not answer" if isinstance(error, TimeoutError) else f"ended ({error})"
            raise WorldError(self.endpoint.rank, f"{self._where} {how}") from None
        if "reason" in answer:
            raise WorldError(answer["rank"], answer["reason"])
        given: list[Any] = answer["values"]
        return given

    def fail(self, reason: str) -> None:
        if self.hub is None:
            self._send(_frame(reason=reason))
        else:  # which may be closed before it has read more
            self.hub.fail(self.rank, reason)

    def split(self, world: World, members: list[int]) -> Transport:
        """Each part has a hub of its own, in its first rank."""
        host, secret, hub = self._socket.getsockname()[0], secrets.token_hex(16), None
        if self.rank == members[0]:
            hub = Hub(len(members), host, [0], secret)
        try:
            places = world.gather([hub and [host, hub.port, secret]], what="split: where to meet")
        except BaseException:
            if hub is not None:
                hub.close()
            raise
        host, port, secret = places[members[0]]
        return Star(Endpoint(host, [port], secret, 0), members.index(self.rank), self.timeout_s, hub)

    def close(self, *, forked: bool) -> None:
        if not forked:
            self.fail(f"rank {self.rank} closed its world")
        self._socket.close()
        if self.hub is not None and not forked:
            self.hub.close()


class Mpi:
    """What MPI gathers. Its waits have no deadline, and what becomes of the others when a rank dies is its business."""

    alarm: Sequence[socket.socket] = ()

    def __init__(self, comm: Any) -> None:
        self.comm = comm
        self._number = 0
        self._reason: str | None = None  # why this rank failed: the others hear it where they meet next

    def gather(self, what: str, values: list[Any]) -> list[Any]:
        self._number += 1
        mine = json.dumps([[what, self._number], self._reason, values])
        given = [json.loads(text) for text in self.comm.allgather(mine)]
        for rank, (_, reason, _) in enumerate(given):
            if reason is not None:
                raise WorldError(rank, reason)
        differ = _differences({rank: (*place,) for rank, (place, *_) in enumerate(given)})
        if differ is not None:
            raise WorldError(*differ)
        return [value for *_, values in given for value in values]

    def fail(self, reason: str) -> None:
        self._reason = reason

    def split(self, world: World, members: list[int]) -> Transport:
        return Mpi(self.comm.Split(members[0], self.comm.Get_rank()))

    def close(self, *, forked: bool) -> None:
        pass


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


# ---- spawning ------------------------------------------------------------------------------------------------------


class Said(NamedTuple):
    """How the function ended in a rank."""

    value: bytes | None  # what it returned, pickled
    text: str = ""  # or the traceback,
    error: bytes | None = None  # the exception, if it can be pickled,
    blamed: tuple[int | None, str] | None = None  # and, if it is a WorldError, what that says


class Failure(NamedTuple):
    """Why a spawned world has no result."""

    follows: bool  # perhaps from another
    rank: int | None
    reason: str
    said: Said | None = None


def spawn(
    function: Callable[..., Any], size: int, args: Sequence[Any], devices: Sequence[str] | None, timeout_s: float
) -> list[Any]:
    secret = secrets.token_hex(16)
    hub = Hub(size, "127.0.0.1", [0], secret)
    endpoint = Endpoint("127.0.0.1", [hub.port], secret, None)
    context = get_context("spawn")  # whoever forks has no CUDA
    processes: list[Any] = []
    pipes: dict[Any, int] = {}
    try:
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            pipes[ours] = rank
            with theirs:
                what = (rank, size, function, args, devices and devices[rank], endpoint, timeout_s, theirs)
                process = context.Process(target=_rank, args=what, name=f"drvkit rank {rank}")
                process.start()
                processes.append(process)
        returned, failures = _hear(hub, processes, pipes)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(1)
            process.kill()
            process.join()
            process.close()
        for pipe in pipes:
            pipe.close()
        hub.close()
    if not failures:
        return [pickle.loads(returned[rank]) for rank in range(size)]
    failure = min(failures, key=lambda failure: failure.follows)
    cause, text = None, failure.reason
    if failure.said is not None:
        text += f"\n\n{failure.said.text}"
        with contextlib.suppress(Exception):
            cause = pickle.loads(failure.said.error or b"")
    raise WorldError(failure.rank, text) from cause


def _hear(hub: Hub, processes: Sequence[Any], pipes: dict[Any, int]) -> tuple[dict[int, bytes], list[Failure]]:
    """What the ranks have to say, until all have ended, or should have after one failed."""
    returned: dict[int, bytes] = {}
    failures: list[Failure] = []
    told: set[int] = set()
    deadline = math.inf
    while pipes and (left := deadline - time.monotonic()) > 0:
        ready: list[Any] = connection.wait(list(pipes), min(left, 3600))
        for pipe in ready:
            rank = pipes[pipe]
            try:
                said = Said(*pickle.loads(pipe.recv_bytes()))
            except EOFError:
                del pipes[pipe]
                pipe.close()
                processes[rank].join(END_S)
                code = processes[rank].exitcode
                if code == 0 and rank in told:
                    continue
                failure = Failure(False, rank, f"rank {rank} {_ended(code, rank in told)}")
            else:
                told.add(rank)
                if said.value is not None:
                    returned[rank] = said.value
                    continue
                last = said.text.strip().splitlines()[-1]
                who, reason = said.blamed or (rank, f"rank {rank} failed: {last}")
                failure = Failure(said.blamed is not None, who, reason, said)
            failures.append(failure)
            hub.fail(failure.rank, failure.reason)
            deadline = min(deadline, time.monotonic() + END_S)
    return returned, failures


def _ended(code: int | None, told: bool) -> str:
    its = "said how it went, but its process " if told else ""
    if code is None:
        return f"{its}did not end within {END_S:g} s"
    if code < 0:
        known = {each.value: each.name for each in signal.Signals}
        return f"{its}died by {known.get(-code, f'signal {-code}')}"
    return f"{its}ended with exit code {code}" + ("" if told else ", and what it printed says why")


def _rank(
    rank: int,
    size: int,
    function: Callable[..., Any],
    args: Sequence[Any],
    device: str | None,
    endpoint: Endpoint,
    timeout_s: float,
    pipe: Any,
) -> None:
    """What a spawned process does."""
    world = None
    try:
        made = default_device(rank, needed=size) if device is None else Device(device)
        star = Star(endpoint, rank, timeout_s + START_S)
        world = World.joined(star, rank, size, made, timeout_s)
        star.timeout_s = timeout_s
        said = Said(pickle.dumps(function(world, *args)))
    except BaseException as error:
        if world is not None:
            world.fail(error)
        blamed = (error.rank, error.reason) if isinstance(error, WorldError) else None
        said = Said(None, "".join(traceback.format_exception(error)), _pickled(error), blamed)
    if world is not None:
        world.close()
    with pipe, contextlib.suppress(BrokenPipeError):  # nobody may be left to hear it
        pipe.send_bytes(pickle.dumps(tuple(said)))


def _pickled(error: BaseException) -> bytes | None:
    with contextlib.suppress(Exception):
        data = pickle.dumps(error)
        pickle.loads(data)  # many can be written, but not read
        return data
    return None
