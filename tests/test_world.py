"""Worlds: ranks meet, agree, hand each other files, and hear of each other's ends."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pickle
import re
import resource
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest

from drvkit import rendezvous
from drvkit import world as worlds
from drvkit.device import Device
from drvkit.lifetime import ClosedError
from drvkit.rendezvous import Endpoint, Hub, Star
from drvkit.world import World, WorldError

ROOT = Path(__file__).resolve().parent.parent
LOCAL = "127.0.0.1"


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def hub(size: int) -> Iterator[Endpoint]:
    secret = secrets.token_hex(16)
    made = Hub(size, LOCAL, [0], secret)
    yield Endpoint(LOCAL, [made.port], secret, None)
    made.close()


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """What each gives or raises, each in a thread."""
    results: list[Any] = [None] * len(calls)

    def run(place: int) -> None:
        try:
            results[place] = calls[place]()
        except Exception as error:
            results[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def join(endpoint: Endpoint, rank: int, size: int, timeout_s: float = 20) -> World:
    return World.joined(Star(endpoint, rank, timeout_s), rank, size, Device("cpu"), timeout_s)


def meet(*functions: Callable[[World], Any], timeout_s: float = 20) -> list[Any]:
    """What each function gives or raises as a rank of one world, over sockets; the worlds are closed after all."""

    def rank(rank: int) -> Any:
        try:
            world = join(endpoint, rank, len(functions), timeout_s)
            stack.callback(world.close)
            return functions[rank](world)
        finally:
            ended.wait()

    ended = threading.Barrier(len(functions))
    with hub(len(functions)) as endpoint, contextlib.ExitStack() as stack:
        return at_once(*(lambda r=r: rank(r) for r in range(len(functions))))


def reasons(results: list[Any]) -> set[tuple[int | None, str]]:
    assert all(isinstance(result, WorldError) for result in results), results
    return {(result.rank, result.reason) for result in results}


# ---- one process ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("virtual", [False, True])
def test_ranks_of_one_process_give_a_value_each(virtual: bool) -> None:
    with World.of_virtual("cpu", 2) if virtual else World.of_devices(["cpu:0", Device("cpu:1")]) as world:
        assert (world.size, world.ranks, world.virtual) == (2, (0, 1), virtual)
        assert [device.id for device in world.devices] == ["cpu:0", "cpu:0" if virtual else "cpu:1"]
        assert world.gather([(1, 2), {"a": 3.5}]) == [[1, 2], {"a": 3.5}]
        world.agree("nothing", [])
        world.barrier()
        with pytest.raises(ValueError, match="a value for each of 2 ranks, got 3"):
            world.gather([1, 2, 3])
        with world.split(["all", "all"]) as part:
            assert (part.size, part.ranks, part.virtual) == (2, (0, 1), virtual)
        with pytest.raises(ValueError, match="different colors"):
            world.split([0, 1])
        world.fail(KeyError("lost"))
        for _ in range(2):
            with pytest.raises(WorldError, match="ranks 0, 1 failed: KeyError: 'lost'"):
                world.barrier()
    with pytest.raises(ClosedError, match="World of 2: ranks 0, 1 on cpu"):
        world.barrier()
    world.close()


def test_files_in_one_process_are_new_for_each_rank(tmp_path: Path) -> None:
    before = open_fds()
    files = [os.open(tmp_path / name, os.O_RDWR | os.O_CREAT) for name in "ab"]
    for file, text in zip(files, (b"first", b"second"), strict=True):
        os.write(file, text)
    with World.of_virtual("cpu", 2) as world:
        given = world.exchange_fds(files)
        with pytest.raises(OSError, match="Bad file descriptor"):
            world.exchange_fds([files[0], 1 << 20])
    every = [fd for fds in given for fd in fds]
    assert len({*every, *files}) == 6
    assert [os.pread(fd, 9, 0) for fd in every] == [b"first", b"second"] * 2
    for fd in (*every, *files):
        os.close(fd)
    assert open_fds() == before


def test_worlds_that_make_no_sense_are_refused() -> None:
    device = Device("cpu")
    with pytest.raises(ValueError, match="different ones, got \\['cpu:0', 'cpu:0'\\]"):
        World.of_devices([device, device])
    with pytest.raises(ValueError, match="different ones"):
        World.of_devices([])
    for size in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match="at least 1"):
            World.of_virtual(device, size)  # type: ignore[arg-type]
    for timeout_s in (0, -1.0, float("inf"), float("nan"), "1"):
        with pytest.raises(ValueError, match="timeout_s"):
            World.of_virtual(device, 2, timeout_s=timeout_s)  # type: ignore[arg-type]


def test_a_forked_child_may_not_use_the_world() -> None:
    script = """
import os, drvkit
world = drvkit.World.of_virtual("cpu", 2)
if child := os.fork():
    world.barrier()
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
try:
    world.barrier()
except drvkit.WorldError as error:
    assert f"is of process {os.getppid()}: a forked child cannot use it" in str(error), error
    world.close()
    os._exit(7)
"""
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", script], cwd=ROOT, timeout=60).returncode == 7


def test_an_error_of_a_world_goes_from_process_to_process() -> None:
    error = pickle.loads(pickle.dumps(WorldError(3, "rank 3 died")))
    assert (error.rank, error.reason, str(error)) == (3, "rank 3 died", "rank 3 died")


# ---- over sockets --------------------------------------------------------------------------------------------------


def test_values_come_in_the_order_of_ranks() -> None:
    def rank(world: World) -> list[Any]:
        given = []
        for turn in range(30):
            time.sleep(0.001 * (secrets.randbelow(3) == 0))
            given.append(world.gather([[world.ranks[0], turn, "x" * 1000 * turn]]))
        return given

    wanted = [[[r, turn, "x" * 1000 * turn] for r in range(4)] for turn in range(30)]
    assert meet(rank, rank, rank, rank) == [wanted] * 4


def test_a_message_of_megabytes_arrives() -> None:
    assert meet(*[lambda world: len(world.gather(["x" * (3 << 20)])[1])] * 2) == [3 << 20] * 2


def test_what_is_not_json_is_an_error_of_its_rank_alone() -> None:
    def wrong(world: World) -> Any:
        with pytest.raises(TypeError, match="not JSON serializable"):
            world.gather([b"bytes"])
        return world.gather([1])

    assert meet(wrong, lambda world: world.gather([2])) == [[1, 2]] * 2


def test_ranks_that_do_different_things_are_told_so() -> None:
    def other(world: World) -> Any:
        world.barrier()
        return world.agree("sizes", 3)

    def rank(world: World) -> Any:
        world.barrier()
        with pytest.raises(WorldError) as first:
            world.barrier()
        with pytest.raises(WorldError) as again:
            world.gather([0])
        assert again.value.reason == first.value.reason
        raise first.value

    ((who, reason),) = reasons(meet(rank, rank, other))
    assert who == 2
    places = r"rank [01] is at 'barrier' \(its operation 3\), rank 2 is at 'agree on sizes' \(its operation 3\)"
    assert re.fullmatch(f"the ranks do different things: {places}", reason)


def test_a_disagreement_names_who_gave_what_and_does_no_harm() -> None:
    def rank(world: World) -> Any:
        world.agree("layout", {"b": 1, "a": [2]} if world.ranks[0] else {"a": [2], "b": 1})
        with pytest.raises(WorldError) as told:
            world.agree("hash", "abd" if world.ranks[0] == 1 else "abc")
        world.barrier()
        raise told.value

    reason = 'the ranks do not agree on hash: ranks 0, 2: "abc"; rank 1: "abd"'
    assert reasons(meet(rank, rank, rank)) == {(1, reason)}


def test_a_late_rank_is_named_to_all_at_the_deadline() -> None:
    def rank(world: World) -> float:
        began = time.monotonic()
        with pytest.raises(WorldError) as told:
            world.barrier()
        assert (told.value.rank, told.value.reason) == (
            1,
            "rank 1 did not come to 'barrier' within 0.5 s, where ranks 0, 2 waited",
        )
        return time.monotonic() - began

    def late(world: World) -> float:
        time.sleep(1.2)
        return rank(world)

    first, hers, second = meet(rank, late, rank, timeout_s=0.5)
    assert 0.3 < first < 1.5
    assert 0.3 < second < 1.5
    assert hers < 0.5, "she was told at once"


def test_a_rank_that_never_comes_is_named() -> None:
    with hub(3) as endpoint:
        results = at_once(*(lambda r=r: join(endpoint, r, 3, 0.5) for r in (0, 2)))
    reason = "rank 1 did not come to 'agree on the size of the world' within 0.5 s, where ranks 0, 2 waited"
    assert reasons(results) == {(1, f"{reason}; rank 1 never joined")}


def test_a_rank_comes_once() -> None:
    with hub(2) as endpoint:

        def second() -> None:
            time.sleep(0.3)
            try:
                with pytest.raises(WorldError, match="there is a rank 0 already"):
                    Star(endpoint, 0, 20)
            finally:
                join(endpoint, 1, 2).close()

        first, told = at_once(lambda: join(endpoint, 0, 2), second)
        assert told is None
        first.close()


def test_a_hub_that_is_not_there_is_named() -> None:
    with socket.create_server((LOCAL, 0)) as silent:
        endpoint = Endpoint(LOCAL, [silent.getsockname()[1]], "secret", 0)
        with pytest.raises(WorldError, match="rank 0, where the ranks meet, was not found") as told:
            join(endpoint, 1, 2, 0.2)
    assert told.value.rank == 0


def test_a_rank_that_fails_is_named_to_those_that_wait() -> None:
    def rank(world: World) -> Any:
        return world.barrier()

    def failing(world: World) -> Any:
        with contextlib.suppress(KeyError), world:
            time.sleep(0.1)
            raise KeyError("lost")

    *told, _ = meet(rank, rank, failing)
    assert reasons(told) == {(2, "rank 2 failed: KeyError: 'lost'")}


def test_a_rank_whose_connection_ends_is_named() -> None:
    def dying(world: World) -> None:
        world.barrier()
        time.sleep(0.1)
        star: Any = world._transport
        star._socket.close()

    def rank(world: World) -> Any:
        world.barrier()
        return world.barrier()

    *told, _ = meet(rank, rank, dying)
    assert reasons(told) == {(2, "rank 2 died: its connection ended")}


def test_a_rank_that_closes_is_named_to_those_that_still_wait_for_it() -> None:
    def closing(world: World) -> None:
        world.barrier()
        time.sleep(0.1)
        world.close()
        world.close()
        with pytest.raises(ClosedError, match="World of 3: rank 0 on cpu:0> is closed"):
            world.barrier()

    def rank(world: World) -> Any:
        world.barrier()
        return world.barrier()

    _, *told = meet(closing, rank, rank)
    assert reasons(told) == {(0, "rank 0 closed its world")}


def test_strangers_at_the_port_do_no_harm() -> None:
    with hub(2) as endpoint, contextlib.ExitStack() as stack:

        def stranger(*frames: bytes) -> None:
            connection = stack.enter_context(socket.create_connection((LOCAL, endpoint.ports[0])))
            for frame in frames:
                connection.sendall(frame)

        stranger()
        stranger(b"GET / HTTP/1.1\r\n\r\n")
        stranger(b"\xff\xff\xff\xff" + bytes(100))
        stranger(b"\0\0\0\x02[]")
        stranger(b"\0\0\0\xf0" + b"[" * 240)
        for rank in (0, "0", -1, 2, None, [1]):
            stranger(rendezvous._frame(rank=rank, proof="0" * 64))
        stranger(rendezvous._frame(rank=0, proof=None))
        with pytest.raises(WorldError, match="was not found"):
            join(endpoint._replace(secret="wrong"), 0, 2, 0.3)
        made = at_once(*(lambda r=r: join(endpoint, r, 2) for r in range(2)))
        assert at_once(*(lambda w=w: w.gather(w.ranks) for w in made)) == [[0, 1]] * 2
        with pytest.raises(ConnectionError):
            socket.create_connection((LOCAL, endpoint.ports[0]))  # all have come: it listens no more
        for world in made:
            world.close()


def test_many_worlds_leave_nothing() -> None:
    def rank(world: World) -> Any:
        return world.gather([1])

    meet(rank, rank)
    before, threads = open_fds(), threading.active_count()
    for _ in range(50):
        assert meet(rank, rank) == [[1, 1]] * 2
    assert (open_fds(), threading.active_count()) == (before, threads)


def test_parts_of_a_world_count_their_ranks_anew() -> None:
    def rank(world: World) -> Any:
        mine = world.ranks[0]
        with world.split(["ab"[mine in (1, 2, 4)]]) as part:
            given = [part.size, part.ranks[0], part.gather([mine])]
            world.barrier()
        return given

    def wanted(*ranks: int) -> list[Any]:
        return [[len(ranks), place, list(ranks)] for place in range(len(ranks))]

    (a, d), (b, c, e) = wanted(0, 3), wanted(1, 2, 4)
    assert meet(*[rank] * 5) == [a, b, c, d, e]


def test_a_failure_in_a_world_reaches_its_parts() -> None:
    def rank(world: World) -> Any:
        with world.split([0]) as part:
            part.barrier()
            if world.ranks[0] == 2:
                time.sleep(0.1)
                world.fail(ValueError("boom"))
                return world.barrier()
            with pytest.raises(WorldError) as told:
                part.barrier()
        raise told.value

    assert reasons(meet(rank, rank, rank)) == {(2, "rank 2 failed: ValueError: boom")}


# ---- files ---------------------------------------------------------------------------------------------------------


def memory_file(text: str) -> int:
    fd = os.memfd_create("test")
    os.write(fd, text.encode())
    return fd


def read_and_close(fds: list[int]) -> list[str]:
    given = [os.pread(fd, 100, 0).decode() for fd in fds]
    for fd in fds:
        os.close(fd)
    return given


def exchange(world: World) -> list[str]:
    """What is in the files of all ranks, of which each gives one."""
    fd = memory_file(f"of rank {world.ranks[0]}")
    try:
        return read_and_close(world.exchange_fds([fd])[0])
    finally:
        os.close(fd)


def unix_sockets() -> set[bytes]:
    names = (line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines())
    return {b"\0" + name[1:].encode() for name in names if name.startswith("@drvkit-")}


def test_files_go_to_all_ranks_and_none_stays_open() -> None:
    before = open_fds()
    assert meet(*[exchange] * 3) == [["of rank 0", "of rank 1", "of rank 2"]] * 3
    assert open_fds() == before


def test_a_file_that_cannot_be_sent_is_an_error_of_all_and_leaves_none_open() -> None:
    def closed(world: World) -> Any:
        return world.exchange_fds([1 << 20])

    before = open_fds()
    told = reasons(meet(exchange, exchange, closed))
    assert told == {(2, "exchange_fds: rank 2 failed: OSError: [Errno 9] Bad file descriptor")}
    assert open_fds() == before


@pytest.mark.parametrize("dies", [False, True])
def test_a_file_that_does_not_come_is_an_error_of_all_and_leaves_none_open(dies: bool) -> None:
    def keeping(world: World) -> Any:
        """It tells where to send to, but sends nothing."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            name = f"\0drvkit-{secrets.token_hex(16)}"
            listener.bind(name)
            listener.listen()
            world.gather([[None, [worlds.this_host(), name, "token"]]], what="exchange_fds")
            if dies:
                world.close()
            return world.gather([[None, None]], what="exchange_fds: whether all came")

    def rank(world: World) -> Any:
        began = time.monotonic()
        with pytest.raises(WorldError) as told:
            exchange(world)
        assert time.monotonic() - began < 2.5
        raise told.value

    before = open_fds()
    first, second, last = meet(rank, keeping, rank, timeout_s=20 if dies else 1)
    if dies:
        assert reasons([first, last]) == {(1, "rank 1 closed its world")}
    else:
        assert reasons([first, last]) == {
            (0, "exchange_fds: rank 0 failed: OSError: the fds of rank 1 did not come in time")
        }
        assert [failed is None for failed, _ in second] == [False, True, False]
    assert open_fds() == before


def test_ranks_of_several_hosts_exchange_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worlds, "this_host", lambda: [threading.current_thread().name])
    before = open_fds()
    told = reasons(meet(exchange, exchange))
    assert told == {
        (1, "exchange_fds: rank 1 cannot be reached: on other hosts, or in other network namespaces, than rank 0")
    }
    assert open_fds() == before


def test_what_strangers_send_in_place_of_files_is_dropped() -> None:
    others, visited = unix_sockets(), threading.Event()

    def late(world: World) -> list[str]:
        visited.wait()
        return exchange(world)

    def stranger() -> None:
        while not (names := unix_sockets() - others):
            time.sleep(0.01)
        with open("/dev/null") as null:
            for name in names:  # those of other tests that run now may be among them, and bear it too
                for text in (b"", b"[1]", b"\xff", b'{"token": 5, "rank": 1}', b'{"token": "\xc3\xa9", "rank": 1}'):
                    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sender:
                        sender.connect(name)
                        socket.send_fds(sender, [text], [null.fileno()] * 3)
        visited.set()

    before = open_fds()
    _, given = at_once(stranger, lambda: meet(exchange, late))
    assert given == [["of rank 0", "of rank 1"]] * 2
    assert open_fds() == before


def test_a_file_that_finds_no_free_number_is_not_lost_in_silence() -> None:
    with World.of_virtual("cpu", 2) as world, contextlib.ExitStack() as stack:
        here, there = (stack.enter_context(end) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        socket.send_fds(here, [json.dumps({"token": "t", "rank": 1}).encode()], [0])
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            with pytest.raises(OSError, match="the fd of rank 1 was lost"):
                world._take_fd(there, "t", {}, [])
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# ---- spawned -------------------------------------------------------------------------------------------------------


def everything(world: World, factor: int) -> Any:
    rank = world.ranks[0]
    given = world.gather([rank * factor])
    with world.split([rank % 2]) as part:
        together = part.gather([rank])
    return given, exchange(world), together, world.devices[0].id, complex(rank, os.getppid())


def test_spawned_ranks_work_together() -> None:
    resource_tracker.ensure_running()  # Python's own process, which stays
    before, threads = open_fds(), threading.active_count()
    files = ["of rank 0", "of rank 1", "of rank 2"]
    assert World.spawn(everything, 3, 7, devices=["cpu:2", "cpu:1", "cpu:0"]) == [
        ([0, 7, 14], files, [0, 2] if rank != 1 else [1], f"cpu:{2 - rank}", complex(rank, os.getpid()))
        for rank in range(3)
    ]
    assert (open_fds(), threading.active_count()) == (before, threads)
    assert not multiprocessing.active_children()


def device_name(world: World) -> str:
    return world.devices[0].id


def test_spawned_ranks_take_what_devices_there_are(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DRVKIT_DEVICE", raising=False)
    names = World.spawn(device_name, 2)
    assert names in (["cpu:0", "cpu:1"], ["cuda:0", "cuda:1"])
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("drvkit: ")]
    assert [line.endswith("the ranks are on CPU devices") for line in lines] == [True] * (names[0] == "cpu:0")


def ending(world: World, how: str, place: str) -> None:
    """Rank 1 ends in some way while 0 and 2 wait for it, and 3 does not."""
    rank = world.ranks[0]
    world.barrier()
    if rank == 1:
        time.sleep(0.2)
        Path(place, "ended").write_text(str(time.time()))
        if how == "raise":
            raise LookupError("boom")
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 3:
        time.sleep(60)
    try:
        world.barrier()
    except WorldError as error:
        Path(place, str(rank)).write_text(f"{time.time()} {error.rank} {error}")
        raise


@pytest.mark.parametrize(
    ("how", "told", "raised"),
    [
        ("raise", "rank 1 failed: LookupError: boom", "rank 1 failed: LookupError: boom"),
        ("kill", "rank 1 died", "rank 1 died by SIGKILL"),
        ("exit", "rank 1 (died|ended)", "rank 1 ended with exit code 3, and what it printed says why"),
    ],
)
def test_the_end_of_a_spawned_rank_reaches_all(
    how: str, told: str, raised: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "END_S", 2.0)
    with pytest.raises(WorldError) as caught:
        World.spawn(ending, 4, how, str(tmp_path), devices="cpu", timeout_s=30)
    ended = float((tmp_path / "ended").read_text())
    assert time.time() - ended < 20, "rank 3 was not waited for"
    for rank in ("0", "2"):
        when, _, what = (tmp_path / rank).read_text().partition(" ")
        assert re.match(f"1 {told}", what)  # the end of its connection may be seen first, or that of its process
        assert float(when) - ended < 5
    assert caught.value.rank == 1
    assert caught.value.reason.startswith(raised)
    assert not multiprocessing.active_children()
    if how == "raise":
        assert isinstance(caught.value.__cause__, LookupError)
        assert 'in ending\n    raise LookupError("boom")' in caught.value.reason


def sleeping(world: World) -> None:
    if world.ranks[0] == 1:
        time.sleep(60)
    world.barrier()


def never_exiting(world: World) -> None:
    threading.Thread(target=time.sleep, args=(60,)).start()


@pytest.mark.parametrize(
    ("function", "who", "reason"),
    [
        (sleeping, 1, "rank 1 did not come to 'barrier' within 0.5 s, where rank 0 waited"),
        (never_exiting, 0, "rank 0 said how it went, but its process did not end within 0.7 s"),
    ],
)
def test_a_spawned_rank_that_hangs_is_named_and_ended(
    function: Callable[..., None], who: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "END_S", 0.7)
    began = time.monotonic()
    with pytest.raises(WorldError) as told:
        World.spawn(function, who + 1, devices="cpu", timeout_s=0.5)
    assert (told.value.rank, told.value.reason.splitlines()[0]) == (who, reason)
    assert time.monotonic() - began < 30
    assert not multiprocessing.active_children()


class UnspeakableError(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__("cannot be made again")


def raise_unspeakable(world: World) -> None:
    raise UnspeakableError(1, 2)


def test_an_exception_that_cannot_travel_is_told_in_words() -> None:
    with pytest.raises(WorldError, match=r"rank 0 failed: .*UnspeakableError: cannot be made again") as caught:
        World.spawn(raise_unspeakable, 1, devices="cpu")
    assert caught.value.__cause__ is None


def test_what_new_processes_cannot_import_is_refused() -> None:
    def inner(world: World) -> None: ...

    for function in (inner, lambda world: None):
        with pytest.raises(ValueError, match="a function at the top of a module"):
            World.spawn(function, 2)
    script = "import drvkit\ndef f(world): pass\ndrvkit.World.spawn(f, 2)\n"
    done = subprocess.run([sys.executable], input=script, cwd=ROOT, text=True, capture_output=True, timeout=60)
    assert "ValueError: World.spawn: f is defined in an interactive session" in done.stderr


def test_spawning_wants_a_device_for_each_rank() -> None:
    with pytest.raises(ValueError, match="wanted 2 names, got \\['cpu:0'\\]"):
        World.spawn(device_name, 2, devices=["cpu:0"])
    with pytest.raises(ValueError, match="wanted 'cpu', 'cuda' or a name for each rank, got 'cpu:0'"):
        World.spawn(device_name, 2, devices="cpu:0")


# ---- started by others ---------------------------------------------------------------------------------------------

VARIABLES = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": LOCAL, "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        *((name, None, f"{name} is not set") for name in VARIABLES),
        ("RANK", "2", "RANK is '2', wanted an integer from 0 to 1"),
        ("RANK", "one", "RANK is 'one'"),
        ("WORLD_SIZE", "0", "WORLD_SIZE is '0'"),
        ("LOCAL_RANK", "-1", "LOCAL_RANK is '-1'"),
        ("MASTER_PORT", "65536", "MASTER_PORT is '65536', wanted an integer from 1 to 65535"),
        ("MASTER_ADDR", "no host", "MASTER_ADDR is 'no host'"),
    ],
)
def test_a_variable_that_is_missing_or_wrong_is_named(
    name: str, value: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other, right in VARIABLES.items():
        monkeypatch.setenv(other, right)
    if value is None:
        monkeypatch.delenv(name)
    else:
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"World.from_environment: {said}"):
        World.from_environment()


STARTED = """
import os, sys
import drvkit
for turn in range(2):
    with drvkit.World.from_environment(timeout_s=30) as world:
        print(world.gather([[turn, world.ranks[0], world.devices[0].id]]))
        world.barrier()
try:
    with drvkit.World.from_environment(timeout_s=30) as world:
        if world.ranks[0] == 0:
            os._exit(0)  # before or after the other has heard that all are there
        world.barrier()
except drvkit.WorldError as error:
    print(error.rank, error)
"""


def test_ranks_that_others_started_meet_though_the_port_is_taken() -> None:
    with socket.create_server((LOCAL, 0)) as taken:  # as by torchrun's agent
        port = taken.getsockname()[1]
        processes = []
        for rank in range(2):
            variables = VARIABLES | {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port)}
            variables |= {"TORCHELASTIC_RUN_ID": "tested", "DRVKIT_DEVICE": "cpu"}
            command = [sys.executable, "-W", "error", "-c", STARTED]
            processes.append(
                subprocess.Popen(command, cwd=ROOT, env=os.environ | variables, stdout=subprocess.PIPE, text=True)
            )
        first, second = (process.communicate(timeout=60)[0].splitlines() for process in processes)
    turns = [f"[[{turn}, 0, 'cpu:0'], [{turn}, 1, 'cpu:1']]" for turn in range(2)]
    assert first == turns
    assert second[:2] == turns
    assert second[2].startswith("0 rank 0, where the ranks meet, ended")


class Communicator:
    """What worlds ask of MPI, among threads."""

    def __init__(self, rank: int, given: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.given, self.barrier = rank, given, barrier

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return len(self.given)

    def allgather(self, value: Any) -> list[Any]:
        self.given[self.rank] = value
        self.barrier.wait(10)
        everything = list(self.given)
        self.barrier.wait(10)
        return everything


def test_ranks_of_mpi_work_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRVKIT_DEVICE", "cpu")
    given, barrier = [None, None], threading.Barrier(2)

    def rank(rank: int) -> Any:
        with World.from_mpi(Communicator(rank, given, barrier)) as world:
            results = [world.gather([rank * 2]), exchange(world), world.devices[0].id]
            if rank == 1:
                world.fail(ValueError("boom"))
            with pytest.raises(WorldError) as told:
                world.barrier()
            return [*results, (told.value.rank, told.value.reason)]

    told = (1, "rank 1 failed: ValueError: boom")
    wanted = [[[0, 2], ["of rank 0", "of rank 1"], f"cpu:{r}", told] for r in range(2)]
    assert at_once(lambda: rank(0), lambda: rank(1)) == wanted

    def different(rank: int) -> Any:
        world = World.from_mpi(Communicator(rank, given, barrier))
        return world.agree("it", 1) if rank else world.barrier()

    reason = "the ranks do different things: rank 0 is at 'barrier' (its operation 2), rank 1 is at 'agree on it' (its "
    assert reasons(at_once(lambda: different(0), lambda: different(1))) == {(1, reason + "operation 2)")}


def test_without_mpi4py_there_are_no_worlds_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)
    with pytest.raises(ImportError, match=r"World\.from_mpi needs mpi4py"):
        World.from_mpi()
