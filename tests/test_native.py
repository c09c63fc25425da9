"""C functions as Python functions, compiled or through ctypes."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import drvkit.native
from drvkit.native import how, native

ADDRESS = (1 << 64) - 1


@pytest.fixture(params=["compiled", "ctypes"])
def bind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Callable[..., int]]:
    """`native`, of a Python function that is called through C."""
    if request.param == "ctypes":
        monkeypatch.setattr(drvkit.native, "_compiler", lambda: None)
    kept = []

    def make(function: Callable[..., int], parameters: int) -> Callable[..., int]:
        callback = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * parameters)(function)
        kept.append(callback)
        return native("function", ctypes.cast(callback, ctypes.c_void_p).value or 0, parameters)

    return make


def alone(code: str, **environment: str) -> str:
    """What a process of its own prints; ``labs`` is an address there."""
    before = "import ctypes, gc, sys, threading; import drvkit.native as native; libc = ctypes.CDLL(None)\n"
    before += "labs = ctypes.cast(libc.labs, ctypes.c_void_p).value\n"
    others = {name: value for name, value in os.environ.items() if name != "DRVKIT_NATIVE"}
    done = subprocess.run(
        [sys.executable, "-c", before + code], env=others | environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout.strip()


CALL = "print(native.how(), type(native.native('labs', labs, 1)).__name__, native.native('labs', labs, 1)(5))\n"


def test_calls_are_compiled() -> None:
    assert alone(CALL) == "compiled builtin_function_or_method 5"


def test_an_environment_variable_forces_ctypes() -> None:
    assert alone(CALL, DRVKIT_NATIVE="0") == "ctypes CFunctionType 5"
    assert alone(CALL, DRVKIT_NATIVE="1").startswith("compiled ")


@pytest.mark.parametrize(
    "missing",
    [
        "sys.modules['llvmlite'] = None\n",
        "import llvmlite.binding\ndef fails(): raise OSError('no libllvmlite.so')\n"
        "llvmlite.binding.initialize_native_target = fails\n",
        # PR_SET_MDWE: memory that was written is no code. Kernels before 6.3 do not know it: there calls are compiled.
        "if libc.prctl(65, 1, 0, 0, 0): print('ctypes CFunctionType 5'); sys.exit()\n",
    ],
    ids=["package", "library", "right to make code"],
)
def test_ctypes_takes_the_place_of_what_is_missing(missing: str) -> None:
    assert alone(missing + CALL) == "ctypes CFunctionType 5"


def test_threads_that_come_first_share_a_compiler_that_lives() -> None:
    code = """
sys.setswitchinterval(1e-6)
made, functions, count = [], [], 8
make = native._Compiler.__init__
def counted(self):
    make(self)
    made.append(self)
native._Compiler.__init__ = counted
barrier = threading.Barrier(count)
def work(number):
    barrier.wait()
    functions.append(native.native(f"labs{number}", labs, 1))
threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(made), len(functions))
made.clear()
gc.collect()
more = [native.native("labs", labs, 1) for _ in range(20)]
print(sum(function(5) for function in functions + more))
"""
    assert alone(code).split() == ["1", "8", str(5 * 28)]


def test_it_says_how(bind: Any) -> None:
    assert how() in ("compiled", "ctypes")
    assert type(bind(lambda: 0, 0)).__name__ == {"compiled": "builtin_function_or_method"}.get(how(), "CFunctionType")


@pytest.mark.parametrize("parameters", [0, 1, 2, 5, 9])
def test_arguments_arrive_in_their_order(bind: Any, parameters: int) -> None:
    seen: list[tuple[int, ...]] = []

    def function(*args: int) -> int:
        seen.append(args)
        return 7

    args = tuple(range(1, parameters + 1))
    assert bind(function, parameters)(*args) == 7
    assert seen == [args]


@pytest.mark.parametrize("value", [0, 1, 1 << 40, (1 << 63) - 1, 1 << 63, ADDRESS])
def test_an_argument_has_64_bits(bind: Any, value: int) -> None:
    assert bind(lambda x: x == value, 1)(value) == 1


@pytest.mark.parametrize("result", [0, 1, 300, 999, -1, -(1 << 31), (1 << 31) - 1])
def test_the_result_has_32_bits_and_a_sign(bind: Any, result: int) -> None:
    assert bind(lambda: result, 0)() == result


@pytest.mark.parametrize("args", [(), ("1",), (None,), (1.0,)])
def test_what_does_not_fit_is_not_called(bind: Any, args: tuple[Any, ...]) -> None:
    called: list[int] = []

    def note(x: int) -> int:
        called.append(x)
        return 0

    with pytest.raises((TypeError, ctypes.ArgumentError)):
        bind(note, 1)(*args)
    assert called == []


@pytest.mark.parametrize("args", [(1, 2), (-1,), (1 << 64,)])
def test_a_compiled_function_takes_no_more_than_it_can(args: tuple[int, ...]) -> None:
    never = native("never", 0, 1)
    with pytest.raises((TypeError, OverflowError)):
        never(*args)


def test_nothing_leaks(bind: Any) -> None:
    value = int("9" * 18)
    function = bind(lambda a, b: 1000, 2)
    function(value, 1 << 50)
    before = sys.getrefcount(value)
    for _ in range(1000):
        function(value, 1 << 50)
    gc.collect()
    assert sys.getrefcount(value) == before


def test_other_threads_run_meanwhile() -> None:
    """A launch may wait for a host callback, which needs the interpreter."""
    libc = ctypes.CDLL(None)
    sleep = native("usleep", ctypes.cast(libc.usleep, ctypes.c_void_p).value or 0, 1)
    thread = threading.Thread(target=sleep, args=(300_000,))
    begin = time.monotonic()
    thread.start()
    ticks = 0
    while thread.is_alive():
        ticks += 1
        time.sleep(0.001)
    assert ticks > 20, f"{ticks} in {time.monotonic() - begin:.2f} s"
