"""What kernels print."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

import drvkit as dk

SOURCE = r"""
__global__ void plain(const char* text) { printf("nothing\n"); printf("%s and %d%%\n", "text", threadIdx.x); }
__global__ void diverged(int n) {
  if (threadIdx.x < n) printf("low %d\n", threadIdx.x);
  else if (threadIdx.x % 2) printf("odd %d %.1f\n", threadIdx.x, threadIdx.x / 2.);
  for (int i = 0; i < threadIdx.x % 3; i++)
    if (threadIdx.x > 28) printf("%d turns %d\n", threadIdx.x, i);
}
__global__ void types(void* pointer, float x) {
  printf("%d %i %u %x %#o %5d|%-5d|%05d %+d %hhd %c", -1, -2, -3, 255, 8, 7, 7, 7, 7, 257, 'z');
  printf("; %ld %lld %llu %llx", -1l, -5ll, ~0ull, 1ull << 40);
  printf("; %f %.3f %e %G %a %F %8.2f", x, x, x, x, x, 1.0 / 0.0, -x);
  printf("; %s %.2s %5s %p %p %*.*f %*d\n", "s", "cut", "pad", pointer, (void*)0, 8, 3, x, 4, 9);
}
__global__ void many(int a, double b) {
  printf("%d %f %d %f %d %f %lld %d %f %d %d %f %d %d %s %d %f %d %d %d\n",
         a, b, a + 1, b + 1, a + 2, b + 2, 1ll << 33, a + 3, b + 3, a + 4, a + 5, b + 4, a + 6, a + 7, "end", a + 8,
         b + 5, a + 9, a + 10, a + 11);
}
__global__ void results(int* y) {
  y[0] = printf("none\n");
  y[1] = printf("%d %s 100%%\n", 1, "x");
  y[2] = printf("%*d\n", 3, 1);
}
"""


@pytest.fixture(scope="module")
def module() -> Any:
    with dk.Device("cpu").module(dk.Source.from_text(SOURCE, "printing.cu")) as module:
        yield module


@pytest.fixture
def printed(module: dk.Module, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(name: str, *args: Any, block: int = 1) -> str:
        with module.device.stream() as stream:
            module.kernel(name).launch(stream, grid=1, block=block, args=args)
            stream.synchronize()
        return capsys.readouterr().out

    return run


def test_threads_print_one_after_another(printed: Any) -> None:
    lines = [f"text and {thread}%\n" for thread in range(3)]
    assert printed("plain", None, block=3) == "nothing\n" * 3 + "".join(lines)


@pytest.mark.parametrize("n", [0, 5, 32])
def test_lanes_that_stand_apart_print(printed: Any, n: int) -> None:
    low = [f"low {t}" for t in range(n)]
    odd = [f"odd {t} {t / 2:.1f}" for t in range(n, 32) if t % 2]
    turns = [f"{t} turns {i}" for t in (29, 30, 31) for i in range(t % 3)]
    assert sorted(printed("diverged", n, block=32).splitlines()) == sorted(low + odd + turns)


def test_conversions_are_those_of_c(printed: Any) -> None:
    x = np.float32(-1234.5678)
    parts = printed("types", ctypes.c_void_p(0x1234), float(x)).split("; ")
    assert parts[0] == "-1 -2 4294967293 ff 010     7|7    |00007 +7 1 z"
    assert parts[1] == "-1 -5 18446744073709551615 10000000000"
    exact = float(x)
    assert parts[2] == f"{exact:f} {exact:.3f} {exact:e} {exact:G} -0x1.34a456p+10 INF {-exact:8.2f}"
    assert parts[3] == f"s cu   pad 0x1234 (nil) {exact:8.3f}    9\n"


def test_many_arguments_are_taken_in_their_order(printed: Any) -> None:
    a, b = 10, 0.5
    want = [a, b, a + 1, b + 1, a + 2, b + 2, 1 << 33, a + 3, b + 3, a + 4, a + 5, b + 4, a + 6, a + 7, "end", a + 8]
    want += [b + 5, a + 9, a + 10, a + 11]
    assert printed("many", a, b) == " ".join(f"{x:f}" if isinstance(x, float) else str(x) for x in want) + "\n"


def test_a_printf_gives_the_number_of_its_arguments(printed: Any, module: dk.Module) -> None:
    with module.device.zeros(3, np.int32) as y:
        assert printed("results", y) == "none\n1 x 100%\n  1\n"
        np.testing.assert_array_equal(y.numpy(), [0, 2, 2])
