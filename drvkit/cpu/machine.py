"""What the CPU devices have to do, and who does it.

All that is queued becomes `Work`, which waits for other work: streams, events and the edges of graphs say for which.
One `Machine` does the work of all devices of the process, a slice of one work at a time, so that kernels, streams,
devices and host threads interleave. A host thread that waits does it; while none does, a thread of the machine.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what `signal` wraps, whose enums cost more than a short wait
import atexit
import gc
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, ClassVar, Literal, Protocol

from .fault import Fault
from .order import tracker

__all__ = ["END", "START", "TRIGGER", "Machine", "Once", "Outcome", "Plain", "Task", "Until", "Work", "machine"]

Outcome = Literal["done", "running", "stalled", "parked"]

# Moments in the life of a work, for which others can wait.
START, TRIGGER, END = 1, 2, 4  # every block has begun; has let dependent launches begin; all is done

SLICE_S = 100e-6  # how long a slice should take: fuel is given accordingly
MOST_FUEL = 1 << 30
BUDGET_S = 200e-6  # of slices, before other threads that want the machine have their turn
HAND_OVER_S = 20e-6  # a lock that is released and taken again at once never reaches another thread
AWAY_S = 1e-3  # a host thread that stays away so long leaves the work to the machine's thread
DOZE = 20  # times that the machine's thread looks for work in vain, until it must be woken
REST_S = 200e-6  # until work that is stalled looks again, at first
LONGEST_REST_S = 2e-3
POLLED_SLICES = 32  # at most, of a poll whose schedule is chosen
CROWD = 256  # works that are not over, from which on who queues more does some of them
PATIENT_STEPS = 20_000  # of explored kernels without a store, until they count as stalled
IDLE_S = 0.5  # how long nothing may change while other threads only wait for each other
STRANGE_S = 5.0  # and while there are threads that never came here


class Task(Protocol):
    """How a work is done.

    ``advance`` does some of it: "done"; "running" if there is more; "stalled" if it looked for something that only
    others can change; "parked" if it waits for works that it spawned, or for `Machine.resume`.

    Attributes:
        triggered: what waits for its trigger may start.
        dependencies_done: what it started before the end of has ended; the machine says so.
    """

    @property
    def triggered(self) -> bool: ...

    @property
    def dependencies_done(self) -> bool: ...

    @dependencies_done.setter
    def dependencies_done(self, done: bool) -> None: ...

    def advance(self, fuel: int, /) -> str: ...

    def skip_time(self) -> bool:
        """If it waits for a clock, let that jump; whether it did."""
        ...

    def waiting(self) -> list[str]:
        """Who waits where and for what, for the report of a deadlock."""
        ...

    def close(self) -> None:
        """It is dropped."""


class Plain:
    """A task that does not start early, nor lets others."""

    triggered = False
    dependencies_done = True

    def skip_time(self) -> bool:
        return False

    def waiting(self) -> list[str]:
        return []

    def close(self) -> None:
        pass


class Once(Plain):
    """A task of one step."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act

    def advance(self, fuel: int, /) -> Outcome:
        self._act()
        return "done"


class Until(Plain):
    """A task that is over as soon as something holds."""

    def __init__(self, holds: Callable[[], bool], says: Callable[[], str]) -> None:
        self._holds, self._says = holds, says

    def advance(self, fuel: int, /) -> Outcome:
        return "done" if self._holds() else "stalled"

    def waiting(self) -> list[str]:
        return [self._says()]


class Work:
    """Something that a device does after other work.

    Args:
        what: says what it is, in a report.
        device: the number of the device whose error it would be.
        begin: makes the task as soon as the work may start; None if there is nothing to do.
    """

    __slots__ = (
        *("_at", "_begin", "_blockers", "_children", "_fuel", "_held", "_reached", "_stalled_at", "_unended"),
        *("device", "order", "over", "parent", "task", "what"),
    )

    def __init__(self, what: object, device: int, begin: Callable[[Work], Task | None] | None = None) -> None:
        self.what, self.device = what, device
        self.task: Task | None = None
        self.order = tracker.order(what, device) if tracker.on else None
        self.parent: Work | None = None  # which waits for it
        self.over = False  # done or dropped
        self._begin = begin
        self._reached = 0
        self._blockers = 0  # moments that it waits for before it starts
        self._unended = 0  # works that it starts before the end of, and which must end before it does
        self._children = 0
        self._fuel = 1  # of the next slice
        self._stalled_at = -1  # the change after which it looked in vain
        self._at: dict[int, list[Work]] = {}  # works that start at a moment
        self._held: list[Work] = []  # works that may start earlier, but not end before this one

    def after(self, other: Work | None, moment: int = END) -> None:
        """Start when ``other`` has reached a moment, and do not end before it does. Only before it is submitted."""
        if other is not None and self.order is not None and other.order is not None:
            self.order.after(other.order, ended=moment == END, triggered=moment == TRIGGER)
        if other is None or other.over:
            return
        if not other._reached & moment:
            other._at.setdefault(moment, []).append(self)
            self._blockers += 1
        if moment != END:
            other._held.append(self)
            self._unended += 1

    def hold(self) -> None:
        """Do not start before `Machine.release`."""
        self._blockers += 1

    @property
    def blocked(self) -> bool:
        """Whether it waits for something before it starts."""
        return self._blockers > 0

    def followers(self) -> list[Work]:
        """The works that wait for it, in whatever way."""
        parent = [self.parent] if self.parent is not None else []
        return [work for works in self._at.values() for work in works] + self._held + parent

    def __str__(self) -> str:
        return f"{self.what} on cpu:{self.device}"


class _Stall:
    """What a thread that waits knows of a time in which nothing moves."""

    def __init__(self) -> None:
        self.progress = -1  # of the machine, when it began
        self.since = 0.0
        self.sure = False
        self._rest = REST_S

    def begin(self, progress: int) -> None:
        self.progress, self.since, self.sure, self._rest = progress, time.monotonic(), False, REST_S

    def rest(self) -> float:
        """Until the next look: longer and longer."""
        now, self._rest = self._rest, min(self._rest * 1.5, LONGEST_REST_S)
        return now


class _Lock:
    """A lock during which nothing is collected: a finalizer may call the driver, which would want the lock again.

    A thread that was interrupted while it took or gave the lock, and so has it still, can go on.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._collects = False

    def __enter__(self) -> None:
        self._lock.acquire()
        self._collects |= gc.isenabled()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        if self._collects:
            self._collects = False
            gc.enable()
        self._lock.release()


class Machine:
    """Does works in turn. All its state changes under its lock: ``with machine:``.

    Attributes:
        tracks: the order of its works is kept, where races are looked for.
        choose: ``choose(n)`` picks one of n things that may happen next: which work goes on, and, in kernels that are
            loaded for that, which warp. None: one after another, for slices of some time.
        background: whether the machine's own thread goes on while host threads are away.
        patience_s: for how long nothing may change before that counts as a deadlock, where another process may still
            change something.
        shared: memory is shared with other processes.
        left: by device, how many works are not over.
        faults: by device, what went wrong there.
        newest_fault: the last of them.
    """

    _own: ClassVar[set[int]] = set()  # threads of machines

    def __init__(self, *, tracks: bool = False) -> None:
        self.tracks = tracks
        self.choose: Callable[[int], int] | None = None
        self.background = True
        self.patience_s = 10.0
        self.shared = False
        self.left: dict[int, int] = {}
        self.faults: dict[int, Fault] = {}
        self.newest_fault: Fault | None = None
        self._lock = _Lock()
        self._callers: deque[None] = deque()  # threads that want the lock
        self._touched = 0  # how often host threads had it
        self._active: deque[Work] = deque()  # can go on
        self._pending: dict[Work, None] = {}  # all that are not over, in the order in which they came
        self._changes = 0
        self._barren = 0  # active works that looked in vain since the last change
        self._progress = 0  # slices that were not in vain, and works that became active
        self._patience_left = PATIENT_STEPS
        self._resting = 0  # threads that wait for news
        self._news = threading.Event()
        self._users: set[int] = set()  # threads that were ever here
        self._waiting: dict[int, Callable[[], bool]] = {}  # those that wait, and until when
        self._hosts: dict[int, SimpleQueue[tuple[Work, Callable[[], None]]]] = {}
        self._calling = 0  # host functions that run or will
        self._bug: BaseException | None = None  # of the device itself, met by the machine's thread
        self._wake = threading.Event()
        self._awake = False
        self._thread: threading.Thread | None = None

    # Access

    def __enter__(self) -> Machine:
        self._users.add(threading.get_ident())
        self._callers.append(None)
        try:
            self._lock.__enter__()
        finally:
            self._callers.pop()
        return self

    def __exit__(self, *_: object) -> None:
        self._touched += 1
        wake = bool(self._pending) and not self._awake and self.background
        self._awake |= wake
        self._lock.__exit__()
        if wake:
            self._start_thread()
            self._wake.set()

    # Queueing

    def submit(self, work: Work) -> Work:
        """It is done when what it waits for is."""
        self._pending[work] = None
        if work.order is not None:
            if self.tracks:
                tracker.submit(work.order)
            else:
                work.order = None
        self.left[work.device] = self.left.get(work.device, 0) + 1
        if not work._blockers:
            self._activate(work)
        return work

    def spawn(self, parent: Work, work: Work) -> None:
        """Submit a work that ``parent``, which runs now, waits for when it parks."""
        work.parent = parent
        if work.order is not None:
            work.order.parent = parent.order
        parent._children += 1
        self.submit(work)

    def release(self, work: Work) -> None:
        """A work that was held may start, as far as that goes."""
        self._unblock([work])

    def resume(self, work: Work) -> None:
        """What a parked work waited for has come."""
        if not work.over:
            self._activate(work)

    # Host functions

    def call_host(self, work: Work, function: Callable[[], None]) -> None:
        """Let a thread of the device call ``function``, and then resume ``work``, which parks."""
        self._calling += 1
        self.host_thread(work.device).put((work, function))

    def host_thread(self, device: int) -> SimpleQueue[tuple[Work, Callable[[], None]]]:
        """The queue of the thread that calls the host functions of a device; it starts when it is first asked for."""
        queue = self._hosts.get(device)
        if queue is None:
            queue = self._hosts[device] = SimpleQueue()
            threading.Thread(target=self._serve, args=(queue,), name=f"cpu:{device} calls", daemon=True).start()
        return queue

    def _serve(self, queue: SimpleQueue[tuple[Work, Callable[[], None]]]) -> None:
        self._own.add(threading.get_ident())
        while True:
            work, function = queue.get()
            try:
                function()
            finally:
                with self:
                    self._calling -= 1
                    self.resume(work)
            del work, function

    def is_own_thread(self) -> bool:
        """Whether the calling thread is one of the machine's: it calls host functions."""
        return threading.get_ident() in self._own

    # Faults

    def fail(self, fault: Fault, devices: Iterable[int]) -> None:
        """Drop all that these devices have to do, and what waits for it on others."""
        failed = set(devices)
        doomed = [work for work in self._pending if work.device in failed]
        children: dict[Work, list[Work]] = {}
        for work in self._pending:
            if work.parent is not None:
                children.setdefault(work.parent, []).append(work)
        while doomed:
            work = doomed.pop()
            if not work.over:
                failed.add(work.device)
                doomed += work.followers() + children.get(work, [])
                if work.task is not None:
                    work.task.close()
                self._retire(work)
        self._active = deque(work for work in self._active if not work.over)
        self._change()
        self.newest_fault = fault
        for device in failed:
            self.faults.setdefault(device, fault)

    def reset(self, device: int) -> None:
        """Forget what a device has to do, and what went wrong there."""
        if self.left.get(device):
            newest = self.newest_fault
            self.fail(Fault("CUDA_ERROR_CONTEXT_IS_DESTROYED", f"cpu:{device} was reset"), [device])
            self.newest_fault = newest
        tracker.saw_device(device)
        self.faults.pop(device, None)

    def _deadlock(self) -> None:
        stuck = list(self._active)
        lines = [f"{work}: {line}" for work in stuck for line in (work.task and work.task.waiting()) or ["it waits"]]
        behind = [work for work in self._pending if work.task is None]
        lines += [f"{work} waits for what is stuck" for work in behind[:8]]
        if len(behind) > 8:
            lines.append(f"{len(behind) - 8} more wait for what is stuck")
        lines.insert(0, "deadlock: nothing in flight can go on, and nobody is left who could change that")
        report = "\n  ".join(lines)
        self.fail(Fault("CUDA_ERROR_LAUNCH_TIMEOUT", report), {work.device for work in self._pending})

    # Waiting

    def wait(self, over: Callable[[], bool]) -> None:
        """Do work until ``over()``, which is asked under the lock. Not to be called under it."""
        stall = _Stall()
        with self._as_waiter(over) as interrupted:
            while True:
                with self:
                    self._tell_bug()
                    if self._run(over):
                        return
                    stuck = self._barren >= len(self._active)
                    if stuck and self._is_deadlock(stall):
                        if not self._skip_time():
                            self._deadlock()
                        continue
                    if stuck:
                        self._news.clear()
                        self._resting += 1
                if stuck:
                    self._rest(stall.rest())
                elif self._callers:
                    time.sleep(HAND_OVER_S)
                interrupted()

    def _is_deadlock(self, stall: _Stall) -> bool:
        """Whether what is stuck is so for good: nothing has moved for long enough, and nobody may be about to act."""
        if stall.progress != self._progress or self._calling:
            stall.begin(self._progress)
        if self._calling or time.monotonic() - stall.since < self._patience():
            return False
        if not stall.sure:
            # Who was seen to be idle may have changed something just before: all must look in vain once more.
            stall.sure = True
            self._change()
            self._run(_never)
            return stall.progress == self._progress and self._barren >= len(self._active) and self._is_deadlock(stall)
        return True

    def _skip_time(self) -> bool:
        """Where all else is stuck, let clocks jump that somebody waits for."""
        skipped = [work.task.skip_time() for work in self._active if work.task is not None]
        if any(skipped):
            self._progress += 1
            self._change()
        return any(skipped)

    def _rest(self, seconds: float) -> None:
        """Wait for news, for so long."""
        try:
            self._news.wait(seconds)
        finally:
            with self:
                self._resting -= 1
                self._change()  # also those may have written to memory who do not tell

    def relieve(self) -> None:
        """Do some work if there is much of it: a host thread that queues more and more must not outrun the devices. Not
        to be called under the lock."""
        if len(self._pending) > CROWD:
            self.poll()

    def poll(self) -> None:
        """Do some work, because a host thread asks whether it is done. Not to be called under the lock."""
        if self._pending:
            with _uninterrupted() as interrupted:
                with self:
                    self._tell_bug()
                    if self.choose is None:
                        self._run(_never)
                    else:  # time decides nothing
                        for _ in range(self.choose(POLLED_SLICES)):
                            if self._active:
                                self._slice()
                    self._change()
                interrupted()

    @contextmanager
    def _as_waiter(self, over: Callable[[], bool]) -> Iterator[Callable[[], None]]:
        me = threading.get_ident()
        outer = self._waiting.get(me)  # a collected object may wait within a wait
        with _uninterrupted() as interrupted:
            self._waiting[me] = over
            try:
                yield interrupted
            finally:
                if outer is None:
                    del self._waiting[me]
                else:
                    self._waiting[me] = outer

    def _patience(self) -> float:
        """For how long nothing may change before that is a deadlock: forever, if a thread may be about to act."""
        frames, longest = sys._current_frames(), self.patience_s if self.shared else 0.0
        if any(over() for over in list(self._waiting.values())):
            return float("inf")  # it is about to go on
        for thread in threading.enumerate():
            frame = frames.get(thread.ident or 0)
            if frame is None or thread.ident in self._waiting or thread.ident in self._own:
                continue
            if frame.f_code.co_filename == threading.__file__:  # it waits for another thread
                longest = max(longest, IDLE_S)
            elif thread.ident in self._users:
                return float("inf")
            else:
                longest = max(longest, STRANGE_S)
        return longest

    def _tell_bug(self) -> None:
        bug, self._bug = self._bug, None
        if bug is not None:
            raise RuntimeError("the CPU device broke down") from bug

    # Doing

    def _run(self, over: Callable[[], bool]) -> bool:
        """Slices until ``over()``, or others want the machine, or nothing changes any more: whether it is over."""
        end = 0.0
        while not over():
            if self._barren >= len(self._active):
                return False
            self._slice()
            now = time.perf_counter()
            end = end or now + BUDGET_S - SLICE_S
            if self._callers or now > end:
                return over()
        return True

    def _slice(self) -> None:
        active = self._active
        place = self.choose(len(active)) if self.choose is not None else 0
        work = active[place]
        del active[place]
        task = work.task
        if tracker.on:
            tracker.run(work.order)
        try:
            if task is None and work._begin is not None:
                task = work.task = work._begin(work)
                if task is not None and work._unended:
                    task.dependencies_done = False
            outcome = self._advance(work, task) if task is not None else "done"
        except Fault as fault:
            self.fail(fault, [work.device])
            return
        except BaseException as bug:
            self.fail(Fault("CUDA_ERROR_UNKNOWN", f"the CPU device broke down in {work}: {bug!r}"), [work.device])
            raise
        if outcome in ("stalled", "running"):  # a choice of the same place is one of the same work
            active.insert(place if self.choose is not None else len(active), work)
        if outcome == "stalled":
            self._barren += work._stalled_at != self._changes
            work._stalled_at = self._changes
        else:
            self._change()
            if outcome == "done":
                self._reach(work, START | TRIGGER | END)
                return
        if not work._reached & START:
            self._reach(work, START)
        if not work._reached & TRIGGER and task is not None and task.triggered:
            self._reach(work, TRIGGER)

    def _advance(self, work: Work, task: Task) -> str:
        if self.choose is not None and hasattr(task, "step"):
            return self._step(work, task)
        begin = time.perf_counter()
        outcome = task.advance(work._fuel)
        taken = time.perf_counter() - begin
        if taken > SLICE_S and work._fuel > 1:
            work._fuel >>= 1
        elif taken < SLICE_S / 4 and work._fuel < MOST_FUEL:
            work._fuel <<= 1
        return outcome

    def _step(self, work: Work, task: Any) -> str:
        """A step of a kernel that is explored. A warp that looks in vain runs on and on: what counts are stores."""
        stores = task.stores
        outcome: str = task.step(self.choose)
        if outcome == "done" or task.stores != stores:
            self._patience_left = PATIENT_STEPS
            return "done" if outcome == "done" else "running"
        self._patience_left -= 1
        return "running" if self._patience_left > 0 else "stalled"

    def _change(self) -> None:
        """What looked in vain may look again."""
        self._changes += 1
        self._barren = 0

    def _tell(self) -> None:
        """There is something to do, or over, for threads that rest."""
        if self._resting:
            self._news.set()

    def _activate(self, work: Work) -> None:
        self._active.append(work)
        self._progress += 1
        self._change()
        self._tell()

    def _unblock(self, works: Iterable[Work]) -> None:
        for work in works:
            work._blockers -= 1
            if not work._blockers and not work.over:
                self._activate(work)

    def _reach(self, work: Work, moments: int) -> None:
        new = moments & ~work._reached
        work._reached |= new
        if new & END and not work._unended:
            self._end(work)
            return
        for moment in (START, TRIGGER):
            if new & moment and moment in work._at:
                self._unblock(work._at.pop(moment))

    def _end(self, work: Work) -> None:
        """It is done, and so is all that has to end before it."""
        ended = [work]
        while ended:
            work = ended.pop()
            at, held, parent = work._at, work._held, work.parent
            self._retire(work)
            for followers in at.values():
                self._unblock(followers)
            for follower in held:
                if follower.order is not None and work.order is not None:
                    follower.order.learn(work.order)
                follower._unended -= 1
                if follower._unended or follower.over:
                    continue
                if follower._reached & END:
                    ended.append(follower)
                elif follower.task is not None:
                    follower.task.dependencies_done = True
            if parent is not None:
                parent._children -= 1
                if not parent._children:
                    self.resume(parent)

    def _retire(self, work: Work) -> None:
        work.over = True
        if work.order is not None:
            tracker.finish(work.order)
        work.task = work._begin = work.parent = None
        work._at, work._held = {}, []
        self.left[work.device] -= 1
        del self._pending[work]
        self._tell()

    # The machine's own thread

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._go_on, name="cpu devices", daemon=True)
            self._thread.start()
            atexit.register(self._stop)

    def _go_on(self) -> None:
        """Work while host threads are away."""
        self._own.add(threading.get_ident())
        while True:
            self._wake.wait()
            self._wake.clear()
            idle = 0
            while True:
                touched = self._touched
                time.sleep(AWAY_S)
                with self._lock:
                    idle = 0 if self._pending else idle + 1
                    if idle > DOZE or not self.background:
                        self._awake = False
                        break
                if self._pending and touched == self._touched and not self._waiting:
                    self._work_alone(touched)

    def _work_alone(self, touched: int) -> None:
        while touched == self._touched and not self._waiting and self._pending and self.background:
            with self._lock:
                try:
                    self._run(_never)
                except BaseException as bug:
                    self._bug = bug
                stuck = self._barren >= len(self._active)
                self._change()
            if stuck:
                time.sleep(LONGEST_REST_S)
            elif self._callers:  # a sleep, be it of no time, takes half as long as what was done before it
                time.sleep(HAND_OVER_S)

    def _stop(self) -> None:
        """The process ends: no slice may be under way then. Host threads that still wait do what is left to do."""
        with self:
            self.background = False


_INTERRUPTS = tuple(int(number) for number in (signal.SIGINT, signal.SIGALRM, signal.SIGTERM))


def _never() -> bool:
    return False


@contextmanager
def _uninterrupted() -> Iterator[Callable[[], None]]:
    """A block in which signal handlers, which may raise, run when what it gives is called, and at its end."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    came: list[tuple[int, Any]] = []
    handlers: dict[int, Callable[[int, Any], Any]] = {}

    def later(number: int, frame: Any) -> None:
        came.append((number, frame))

    def now() -> None:
        while came:
            number, frame = came.pop(0)
            handlers[number](number, frame)

    for number in _INTERRUPTS:
        handler = _signal.getsignal(number)
        if callable(handler):
            handlers[number] = handler
            _signal.signal(number, later)
    try:
        yield now
    finally:
        for number, handler in handlers.items():
            _signal.signal(number, handler)
        now()


machine = Machine(tracks=True)
