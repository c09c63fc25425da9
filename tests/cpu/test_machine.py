"""The machine of the CPU devices: works run in the order that they wait for, interleave, fail and deadlock as told.

Tasks of a few lines stand for kernels.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from drvkit.cpu.fault import Fault
from drvkit.cpu.machine import END, START, TRIGGER, Machine, Once, Plain, Until, Work


@pytest.fixture
def machine() -> Iterator[Machine]:
    machine = Machine()
    yield machine
    machine.background = False


class Steps(Plain):
    """A kernel of so many steps, which triggers after some of them."""

    def __init__(self, name: str, steps: int, log: list[str], trigger: int | None = None, waits: bool = False) -> None:
        self.name, self.left, self.log, self.waits = name, steps, log, waits
        self.trigger = trigger
        self.dependencies_done = True
        self.closed = False

    @property
    def triggered(self) -> bool:  # type: ignore[override]
        return self.trigger is not None and self.left <= self.trigger

    def advance(self, fuel: int, /) -> Any:
        if self.waits and not self.dependencies_done:
            return "stalled"
        self.log.append(self.name)
        self.left -= 1
        return "running" if self.left else "done"

    def waiting(self) -> list[str]:
        return [f"{self.name} waits"]

    def close(self) -> None:
        self.closed = True


def work(task: Any, device: int = 0, name: str = "work") -> Work:
    return Work(name, device, lambda _: task)


def steps(name: str, count: int, log: list[str], **how: Any) -> Work:
    return work(Steps(name, count, log, **how), name=name)


def run(machine: Machine, *works: Work) -> None:
    with machine:
        for each in works:
            machine.submit(each)
    machine.wait(lambda: all(each.over for each in works))


# ---- order ---------------------------------------------------------------------------------------------------------


def test_works_take_turns(machine: Machine) -> None:
    log: list[str] = []
    run(machine, steps("a", 3, log), steps("b", 3, log))
    assert log == ["a", "b", "a", "b", "a", "b"]


def test_what_waits_starts_after_the_end(machine: Machine) -> None:
    log: list[str] = []
    a, b, c = (steps(name, 2, log) for name in "abc")
    b.after(a)
    c.after(b)
    c.after(a)
    run(machine, c, b, a)
    assert "".join(log) == "aabbcc"


def test_what_is_over_is_not_waited_for(machine: Machine) -> None:
    log: list[str] = []
    a, b = steps("a", 1, log), steps("b", 1, log)
    run(machine, a)
    b.after(a)
    b.after(None)
    run(machine, b)
    assert log == ["a", "b"]


def test_a_trigger_lets_another_start_but_not_end(machine: Machine) -> None:
    log: list[str] = []
    a, b, c = steps("a", 4, log, trigger=3), steps("b", 1, log), steps("c", 1, log)
    b.after(a, TRIGGER)
    c.after(b)
    run(machine, a, b, c)
    assert "".join(log) == "aabaac"


def test_what_started_early_may_wait_for_all_before_it(machine: Machine) -> None:
    log: list[str] = []
    a, b, c = steps("a", 4, log, trigger=4), steps("b", 1, log, waits=True, trigger=1), steps("c", 1, log, waits=True)
    b.after(a, START)
    c.after(b, TRIGGER)
    run(machine, a, b, c)
    assert "".join(log) == "aaaabc"


def test_the_end_counts_as_a_trigger(machine: Machine) -> None:
    log: list[str] = []
    a, b = steps("a", 2, log), steps("b", 1, log)
    b.after(a, TRIGGER)
    run(machine, a, b)
    assert "".join(log) == "aab"


def test_a_parent_waits_for_what_it_spawns(machine: Machine) -> None:
    log: list[str] = []

    class Parent(Plain):
        turns = 0

        def advance(self, fuel: int, /) -> Any:
            log.append("parent")
            self.turns += 1
            if self.turns == 3:
                return "done"
            for _ in range(2):
                machine.spawn(parent, steps("child", 1, log))
            return "parked"

    parent, after = work(Parent()), steps("after", 1, log)
    after.after(parent)
    run(machine, parent, after)
    assert log == ["parent", "child", "child"] * 2 + ["parent", "after"]


def test_a_held_work_waits_for_its_release(machine: Machine) -> None:
    log: list[str] = []
    a, b = steps("a", 1, log), steps("b", 1, log)
    a.hold()
    with machine:
        machine.submit(a)
    run(machine, b)
    assert log == ["b"]
    with machine:
        machine.release(a)
    machine.wait(lambda: a.over)
    assert log == ["b", "a"]


@pytest.mark.parametrize("seed", range(5))
def test_a_chosen_schedule_keeps_the_order(machine: Machine, seed: int) -> None:
    rng, log = random.Random(seed), list[str]()
    machine.choose = rng.randrange
    machine.background = False
    works: list[Work] = []
    for i in range(30):
        each = steps(str(i), 2, log)
        for _ in range(2):
            if works:
                before = rng.randrange(len(works))
                each.after(works[before])
        works.append(each)
    run(machine, *works)
    assert len(log) == 60
    assert log != [str(i // 2) for i in range(60)]


def test_a_chosen_schedule_is_decided_by_its_choices() -> None:
    logs = []
    for _ in range(2):
        machine, log = Machine(), list[str]()
        machine.choose, machine.background = random.Random(7).randrange, False
        run(machine, *(steps(str(i), 5, log) for i in range(6)))
        logs.append(log)
    assert logs[0] == logs[1]


# ---- faults --------------------------------------------------------------------------------------------------------


def fails(code: str = "CUDA_ERROR_LAUNCH_FAILED") -> Callable[[], None]:
    def act() -> None:
        raise Fault(code, "it failed")

    return act


def test_a_fault_drops_the_work_of_its_device_and_what_waits_for_it(machine: Machine) -> None:
    log: list[str] = []
    bad, after = work(Once(fails())), steps("after", 1, log)
    beside = work(Steps("beside", 100, log), name="beside")
    other, elsewhere = work(Steps("other", 3, log), device=1), work(Steps("elsewhere", 1, log), device=2)
    after.after(bad)
    elsewhere.after(after)
    run(machine, bad, beside, after, other, elsewhere)
    assert set(log) <= {"other", "beside"}
    assert log.count("other") == 3
    assert {device: str(fault) for device, fault in machine.faults.items()} == {0: "it failed", 2: "it failed"}
    assert machine.newest_fault is machine.faults[0]
    machine.reset(0)
    run(machine, steps("again", 1, log))
    assert log[-1] == "again"
    assert set(machine.faults) == {2}


def test_what_is_dropped_is_closed(machine: Machine) -> None:
    task = Steps("a", 10**9, [])
    with machine:
        machine.submit(work(task))
    run(machine, work(Once(fails())))
    assert task.closed


def test_an_error_of_the_machine_itself_is_raised_where_somebody_waits(machine: Machine) -> None:
    with pytest.raises(ZeroDivisionError):
        run(machine, work(Once(lambda: 1 // 0)))
    assert "broke down" in str(machine.faults[0])
    machine.reset(0)
    with machine:
        machine.submit(work(Once(lambda: 1 // 0)))
    time.sleep(0.05)
    with pytest.raises(RuntimeError, match="broke down"):
        machine.wait(lambda: False)


# ---- deadlocks -----------------------------------------------------------------------------------------------------


def never() -> bool:
    return False


def test_a_deadlock_is_found_at_once_and_names_who_waits(machine: Machine) -> None:
    log: list[str] = []
    stuck = [work(Until(never, lambda name=name: f"{name} wants more"), name=name) for name in ("left", "right")]  # type: ignore[misc]
    behind = steps("behind", 1, log)
    behind.after(stuck[0])
    begin = time.perf_counter()
    run(machine, *stuck, behind)
    assert time.perf_counter() - begin < 1
    report = str(machine.faults[0])
    assert machine.faults[0].code == "CUDA_ERROR_LAUNCH_TIMEOUT"
    for said in ("deadlock", "left on cpu:0: left wants more", "right wants more", "behind on cpu:0 waits"):
        assert said in report


def test_what_only_looks_stuck_is_no_deadlock(machine: Machine) -> None:
    """One waits for the other, which comes to it late."""
    log: list[str] = []
    waits = work(Until(lambda: len(log) == 50, lambda: "for 50"))
    run(machine, waits, steps("a", 50, log))
    assert not machine.faults


def test_a_thread_that_may_still_act_is_waited_for(machine: Machine) -> None:
    seen: list[int] = []

    def act() -> None:
        time.sleep(0.7)
        seen.append(1)

    thread = threading.Thread(target=act)
    thread.start()
    run(machine, work(Until(lambda: bool(seen), lambda: "for the thread")))
    thread.join()
    assert not machine.faults


def test_a_thread_that_never_came_here_is_not_waited_for_long(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drvkit.cpu.machine.STRANGE_S", 0.3)
    read, write = os.pipe()
    thread = threading.Thread(target=os.read, args=(read, 1))
    thread.start()
    run(machine, work(Until(never, lambda: "for ever")))
    assert "for ever" in str(machine.faults[0])
    os.write(write, b"x")
    thread.join()
    os.close(read)
    os.close(write)


def test_threads_that_all_wait_are_a_deadlock(machine: Machine) -> None:
    failed: list[bool] = []

    def wait(number: int) -> None:
        run(machine, work(Until(never, lambda: "for ever"), device=number))
        failed.append(number in machine.faults)

    threads = [threading.Thread(target=wait, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert failed == [True] * 3


def test_a_host_function_that_runs_may_still_act(machine: Machine) -> None:
    seen: list[int] = []

    class Call(Plain):
        called = False

        def advance(self, fuel: int, /) -> Any:
            if self.called:
                return "done"
            self.called = True
            machine.call_host(caller, function)
            return "parked"

    def function() -> None:
        time.sleep(0.2)
        seen.append(threading.get_ident())

    caller = work(Call())
    run(machine, caller, work(Until(lambda: bool(seen), lambda: "for the function")))
    assert not machine.faults
    assert seen != [threading.get_ident()]


# ---- threads and signals -------------------------------------------------------------------------------------------


def test_works_go_on_while_nobody_waits(machine: Machine) -> None:
    log: list[str] = []
    with machine:
        machine.submit(steps("a", 100, log))
    deadline = time.monotonic() + 5
    while len(log) < 100 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert len(log) == 100


def test_without_its_thread_nothing_goes_on_by_itself(machine: Machine) -> None:
    log: list[str] = []
    machine.background = False
    with machine:
        machine.submit(steps("a", 3, log))
    time.sleep(0.05)
    assert log == []
    machine.poll()
    assert log == ["a"] * 3


def test_a_thread_that_queues_gets_its_turn(machine: Machine) -> None:
    """One waits for long, others queue meanwhile."""
    log: list[str] = []
    busy = work(Until(lambda: len(log) >= 200, lambda: ""))
    spinning = steps("spinning", 10**9, [])
    waited: list[float] = []

    def queue() -> None:
        for _ in range(200):
            begin = time.perf_counter()
            with machine:
                machine.submit(steps("a", 1, log))
            waited.append(time.perf_counter() - begin)
            time.sleep(0.0005)

    thread = threading.Thread(target=queue)
    thread.start()
    with machine:
        machine.submit(spinning)
    run(machine, busy)
    thread.join()
    with machine:
        machine.fail(Fault("CUDA_ERROR_UNKNOWN", "enough"), [0])
    assert sorted(waited)[100] < 0.05


def test_much_that_is_queued_is_done_meanwhile(machine: Machine) -> None:
    machine.background = False
    log: list[str] = []
    for _ in range(2000):
        with machine:
            machine.submit(steps("a", 1, log))
        machine.relieve()
    assert len(log) > 1500


def test_control_c_ends_a_wait_and_nothing_else(machine: Machine) -> None:
    log: list[str] = []
    pending = steps("a", 10**9, [])
    machine.background = False
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    outer = signal.signal(signal.SIGINT, signal.default_int_handler)  # where it is ignored, it comes all the same
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            run(machine, pending)
        timer.join()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, outer)
    with machine:
        machine.submit(steps("b", 3, log))
    machine.wait(lambda: len(log) == 3)
    assert not pending.over


def test_moments_are_told_apart() -> None:
    assert len({START, TRIGGER, END}) == 3


def test_nothing_is_collected_while_the_machine_is_taken(machine: Machine) -> None:
    """A finalizer may call the driver, which would then wait for itself."""
    assert gc.isenabled()
    collected: list[bool] = []

    class Loop:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            with machine:
                collected.append(True)

    threshold = gc.get_threshold()
    gc.collect()
    gc.set_threshold(1)
    try:
        with machine:
            Loop()
            _ = [[] for _ in range(1000)]
            assert not collected
        _ = [[] for _ in range(1000)]
        gc.collect()
    finally:
        gc.set_threshold(*threshold)
    assert collected
    gc.disable()
    try:
        with machine:
            pass
        assert not gc.isenabled(), "who disabled it wants it so"
    finally:
        gc.enable()
