"""The one door to the driver: the only file that imports ``cuda.bindings``.

`Driver` has the names of the driver API. Calling one checks its result code and gives what is left of the result:
nothing, one value, or a tuple. Enums and structs pass through as they are::

    driver = open_driver("cuda")
    stream = driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)

Whatever goes wrong (a result code, no libcuda, a function that this driver does not have) is a `DriverError` that
names the call, the code and its meaning.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

from .native import native

RAW_VERSION = 13000  # CUDA version of the C prototypes that `Driver.raw` callers are written against

__all__ = ["Driver", "DriverError", "Nvrtc", "open_driver", "open_nvrtc"]


class DriverError(RuntimeError):
    """A call through the door failed.

    Attributes:
        call: the function, as the manual names it (``cuMemAlloc``).
        code: the result code's name (``CUDA_ERROR_OUT_OF_MEMORY``), ``NO_LIBRARY`` where the shared library is
            missing, ``NO_FUNCTION`` where the library or the bindings lack the function.
        meaning: what the code means, in words.
    """

    def __init__(self, call: str, code: str, meaning: str) -> None:
        self.call, self.code, self.meaning = call, code, meaning
        super().__init__(f"{call}: {code}: {meaning}")

    def __reduce__(self) -> tuple[type[DriverError], tuple[str, str, str]]:
        return type(self), (self.call, self.code, self.meaning)


class _Door:
    """A bindings module whose functions are checked; made attribute by attribute, on first use."""

    prefix: str  # what the names of its functions begin with
    needs: str  # what has to be installed for them to work

    def __init__(self, api: ModuleType) -> None:
        self.api = api

    def __getattr__(self, name: str) -> Any:
        try:
            member = getattr(self.api, name)
        except AttributeError:
            raise DriverError(name, "NO_FUNCTION", f"{self.api.__name__} has no such name") from None
        if name.startswith(self.prefix) and name[len(self.prefix) : len(self.prefix) + 1].isupper():
            member = self._checked(name, member)
        self.__dict__[name] = member  # found directly from now on
        return member

    def _checked(self, name: str, function: Callable[..., tuple[Any, ...]]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            try:
                result = function(*args)
            except RuntimeError as error:
                missing = self._missing(name, error)
                if missing is None:
                    raise
                raise missing from None
            if result[0]:  # the zero of every result enum is success
                raise self.error(name, result[0])
            return result[1] if len(result) == 2 else result[1:] or None

        call.__name__ = call.__qualname__ = name
        return call

    def _missing(self, name: str, error: RuntimeError) -> DriverError | None:
        """How the bindings say that a library or a function is missing; None for what says something else."""
        kind, reason = type(error).__name__, str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        if kind == "FunctionNotFoundError" or re.search(r'Function "\w+" not found', reason):
            return DriverError(name, "NO_FUNCTION", f"this {self.needs} does not have it ({reason})")
        if kind.startswith("DynamicLib") or "dlopen" in reason:
            return DriverError(name, "NO_LIBRARY", f"{self.needs} was not found ({reason})")
        return None

    def error(self, call: str, code: Any) -> DriverError:
        """The error that stands for a result code other than success."""
        raise NotImplementedError


class _InCapture(threading.local):
    refused: DriverError | None = None  # the newest call of this thread that was refused because a stream was captured


class _Entered(threading.local):
    """What drvkit made current in this thread."""

    def __init__(self) -> None:
        self.context: object = None  # the newest
        self.outer: list[object] = []  # those around the blocks that are being executed
        self.releasing = False  # something is given back, and nobody is told what goes wrong


class Driver(_Door):
    """The driver API for one kind of device.

    ``kind`` is the device kind it drives, as in ``"cuda:0"``. A second driver (the CPU device) is a second module
    with the names and signatures of ``cuda.bindings.driver``, reusing its enums and structs.
    """

    prefix = "cu"
    needs = "libcuda (NVIDIA's driver)"

    def __init__(self, kind: str, api: ModuleType) -> None:
        super().__init__(api)
        self.kind = kind
        self.in_capture = _InCapture()
        self.entered = _Entered()
        self._raw: dict[tuple[str, int], Callable[..., int]] = {}
        self._raw_lock = threading.RLock()

    def __getattr__(self, name: str) -> Any:
        _refuse_multicast(name)
        return super().__getattr__(name)

    def create_multicast(self, properties: Any, *, enable: bool = False) -> Any:
        """``cuMulticastCreate``. On a host that others use too it can take GPUs out of their service.

        So it is opted in to twice, by ``enable=True`` and by ``DRVKIT_ENABLE_MULTICAST=1`` in the environment;
        else, or where the environment forbids it to other libraries, it is a `DriverError` (``NOT_ENABLED``).
        """
        why = multicast_refusal() if enable else "it wants enable=True"
        if why:
            raise DriverError("cuMulticastCreate", "NOT_ENABLED", why)
        return self._checked("cuMulticastCreate", self.api.cuMulticastCreate)(properties)

    def error(self, call: str, code: Any) -> DriverError:
        """The `DriverError` for a result code, given as the enum or as the number that a raw function returned."""
        try:
            code = self.api.CUresult(code)
        except ValueError:
            return DriverError(call, str(code), "a result code that these bindings do not know")
        status, text = self.api.cuGetErrorString(code)
        meaning = text.decode() if not status and text else "no description"
        explain = getattr(self.api, "explain", None)  # the CPU device knows more
        report = explain(code, told=not self.entered.releasing) if explain is not None else None
        if report:
            meaning += f": {report}"
        error = DriverError(call, code.name, meaning)
        if code.name.startswith("CUDA_ERROR_STREAM_CAPTURE"):
            self.in_capture.refused = error
        return error

    def raw(self, name: str, parameters: int) -> Callable[..., int]:
        """The C function itself, for the few calls whose host cost counts or whose outputs the bindings drop.

        It takes ``parameters`` integers (handles and addresses) and returns the result code as an int, which the caller
        must check. It releases the GIL: a launch may wait for a host callback that needs it.
        """
        function = self._raw.get((name, parameters))
        if function is None:
            with self._raw_lock:  # one function for all threads
                function = self._raw.get((name, parameters))
                if function is None:
                    function = self._raw[name, parameters] = self._bound(name, parameters)
        return function

    def _bound(self, name: str, parameters: int) -> Callable[..., int]:
        _refuse_multicast(name)
        code, address, status = self.api.cuGetProcAddress(name.encode(), RAW_VERSION, 0)
        if code or not address:
            raise DriverError(name, "NO_FUNCTION", f"this {self.needs} does not have it ({status or code})")
        return native(name, int(address), parameters)


def _refuse_multicast(name: str) -> None:
    if name == "cuMulticastCreate":
        raise DriverError(name, "NOT_ENABLED", "multicast objects are made by create_multicast alone")


def multicast_refusal() -> str | None:
    """Why the environment does not allow multicast objects; None if it does."""
    for name, value in (("NCCL_NVLS_ENABLE", "0"), ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")):
        if os.environ.get(name) == value:
            return f"{name}={value} forbids multicast objects"
    return None if os.environ.get("DRVKIT_ENABLE_MULTICAST") == "1" else "it wants DRVKIT_ENABLE_MULTICAST=1"


class Nvrtc(_Door):
    """NVRTC, the run-time compiler, through the same kind of door."""

    prefix = "nvrtc"
    needs = "libnvrtc (package nvidia-cuda-nvrtc)"

    def error(self, call: str, code: Any) -> DriverError:
        status, text = self.api.nvrtcGetErrorString(code)
        return DriverError(call, code.name, text.decode() if not status and text else "no description")


@cache
def open_driver(kind: str = "cuda") -> Driver:
    """The driver for a device kind; ``cuInit`` is done. `DriverError` where it cannot be used here."""
    if kind == "cuda":
        from cuda.bindings import driver as api
    elif kind == "cpu":
        from .cpu import driver as api
    else:
        raise ValueError(f"no driver for device kind {kind!r}; there are 'cuda' and 'cpu'")
    driver = Driver(kind, api)
    driver.cuInit(0)
    return driver


@cache
def open_nvrtc() -> Nvrtc:
    """The run-time compiler. The library itself is looked for at the first call."""
    from cuda.bindings import nvrtc as api

    return Nvrtc(api)
