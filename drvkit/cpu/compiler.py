"""IR -> machine code in this process, by llvmlite, kept on disk."""

from __future__ import annotations

import ctypes
import hashlib
from functools import cache
from pathlib import Path
from typing import Any

from ..build import DEFAULT_CACHE
from ..native import lock

__all__ = ["LONG", "digest", "link", "machine_code", "runtime"]

LONG = 40_000  # characters of PTX from which on a kernel is compiled in half the time, and runs an eighth longer


class _Host:
    """LLVM for this processor."""

    def __init__(self) -> None:
        import llvmlite.binding as llvm

        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        self.llvm = llvm
        self.cpu = llvm.get_host_cpu_name()
        self.features = llvm.get_host_cpu_features().flatten()
        self.target = llvm.Target.from_default_triple()
        self.engines: list[Any] = []  # code that was linked stays

    def machine(self, level: int = 2) -> Any:
        return self.target.create_target_machine(cpu=self.cpu, features=self.features, opt=level, jit=True)


@cache
def _host() -> _Host:
    return _Host()


@cache
def _engine_digest() -> bytes:
    """Of all that turns PTX into code."""
    here = Path(__file__).parent
    total = hashlib.sha256()
    for path in sorted([*here.glob("*.py"), *here.glob("lower/*.py")]):
        total.update(path.name.encode() + path.read_bytes())
    with lock:
        host = _host()
    total.update(repr((host.llvm.llvm_version_info, host.target.triple, host.cpu, host.features)).encode())
    return total.digest()


def digest(*parts: str) -> str:
    """The name in the cache of what is made from these texts."""
    total = hashlib.sha256(_engine_digest())
    for part in parts:
        total.update(len(part).to_bytes(8, "little") + part.encode())
    return "cpu-" + total.hexdigest()


def machine_code(ir: str, *, hurry: bool = False) -> bytes:
    """An object file; in half the time with ``hurry``."""
    with lock:
        host = _host()
        module = host.llvm.parse_assembly(ir)
        machine = host.machine(0 if hurry else 2)
        options = host.llvm.create_pipeline_tuning_options(speed_level=1 if hurry else 2)
        options.loop_vectorization = options.slp_vectorization = False  # the code is made of vectors already
        passes = host.llvm.create_pass_builder(machine, options)
        passes.getModulePassManager().run(module, passes)
        code: bytes = machine.emit_object(module)
        return code


def link(code: bytes, *names: str) -> list[int]:
    """Load an object file; the addresses of some of its functions."""
    with lock:
        host = _host()
        engine = host.llvm.create_mcjit_compiler(host.llvm.parse_assembly(""), host.machine())
        engine.add_object_file(host.llvm.ObjectFileRef.from_data(code))
        engine.finalize_object()
        host.engines.append(engine)
        return [engine.get_function_address(name) for name in names]


class Runtime:
    """The runtime's functions that the host calls; see runtime.py and weak.py."""

    def __init__(self, addresses: dict[str, int]) -> None:
        pointer, whole, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32

        def function(name: str, result: Any, *arguments: Any) -> Any:
            return ctypes.CFUNCTYPE(result, *arguments)(addresses[f"drvkit_{name}"])

        self.run = function("run", number, pointer, pointer, whole, whole, whole)
        self.begin = function("begin", None, pointer, pointer, whole)
        self.ended = function("ended", None, pointer, pointer, pointer)
        self.deliver = function("deliver", None, pointer, pointer, whole, number, number)
        self.race_global = function("race_global", number, pointer, number, whole, whole, number)
        self.race_follow = function("race_follow", None, pointer, number)
        self.kernel = ctypes.CFUNCTYPE(number, pointer, pointer, pointer)  # of a kernel's address


@cache
def runtime() -> Runtime:
    """The runtime, which kernels can call from now on."""
    with lock:
        key = digest("runtime")
        entry = DEFAULT_CACHE.load(key)
        if entry is None:
            from .runtime import runtime_ir

            ir, names = runtime_ir()
            code = machine_code(ir)
            DEFAULT_CACHE.store(key, {"names": names}, code)
        else:
            names, code = entry[0]["names"], entry[1]
        addresses = link(code, *names)
        for name, address in zip(names, addresses, strict=True):
            _host().llvm.add_symbol(name, address)
        return Runtime(dict(zip(names, addresses, strict=True)))
