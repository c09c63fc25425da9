"""Modules and kernels: an image on a device, what is in it, and launching it.

A `Module` of a source compiles what is asked for, when it is asked for. A `Kernel` knows its signature, its limits and
what it uses; ``kernel.launch`` checks and packs its arguments, ``kernel.prepare`` does so once for many launches.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import numpy as np
from numpy.typing import DTypeLike

from .attributes import Attributes, dim3, encode, held
from .build import Image, build, tidy
from .device import HELD_PER_BATCH, Device, Stream
from .driver import Driver, DriverError
from .lifetime import Box, ClosedError, Live, Owned, caller
from .memory import Buffer, holder
from .scalars import said
from .signature import UNFIT, ArgumentError, Arguments, CType, Signature, declared_types, kernel_label, mangled_types
from .source import Source

__all__ = ["Kernel", "Launch", "Module"]

BINARY_SUFFIXES = (".cubin", ".ptx", ".fatbin")
DEFAULT_SHARED_BYTES = 48 * 1024  # dynamic shared memory that a kernel may use without asking


class Loaded(NamedTuple):
    """One image in the driver's hands."""

    image: Image
    box: Box  # the CUmodule


class Module(Owned):
    """Kernels and variables on a device.

    Args:
        device: where.
        source: a name to be found in ``cuda_src``, a path to a ``.cu``, ``.cubin``, ``.ptx`` or ``.fatbin`` file, the
            bytes of one of the last three, a `Source` or an `Image`.
        names: template instantiations of a source to compile at once; those not named here are compiled, each to an
            image of its own, when `kernel` asks for them.
        options: more NVRTC options of a source.
    """

    kind = "module"

    def __init__(
        self,
        device: Device,
        source: str | os.PathLike[str] | bytes | Source | Image,
        names: Sequence[str] = (),
        *,
        options: Sequence[str] = (),
    ) -> None:
        if not isinstance(source, str | os.PathLike | bytes | Source | Image):
            raise TypeError(f"module: wanted a name, a path, bytes, a Source or an Image, got {source!r}")
        self.device = device
        self.options = tuple(options)
        self.source: Source | None = None
        self.loaded: list[Loaded] = []
        self._kernels: dict[tuple[str, str | None], Kernel] = {}
        path = Path(source) if isinstance(source, str | os.PathLike) else None
        if path is not None and path.suffix not in BINARY_SUFFIXES:
            source = Source.find(os.fspath(path))
        label = path.name if path is not None else type(source).__name__.lower()
        if isinstance(source, Source):
            self.source, label = source, source.name
        self.info = Live(self.kind, repr(label), caller())
        self.box = Box(None, None, self.info)  # each image is counted by itself
        if self.source is not None:
            if names or any(not kernel.template for kernel in self.source.kernels()):
                self._compile(names)
            return
        if names or options:
            raise TypeError(f"module {self.name}: names and options are for sources, not for what is compiled already")
        if path is not None:
            image = Image.from_file(path)
            self._load(image, partial(device.driver.cuModuleLoad, os.fsencode(path)))
        else:
            self._load(source if isinstance(source, Image) else Image.from_bytes(source))  # type: ignore[arg-type]

    def _compile(self, names: Sequence[str]) -> None:
        assert self.source is not None
        checks = ["-DDRVKIT_CPU_DEVICE"] if self.device.driver.kind == "cpu" else []  # what a GPU need not look at
        self._load(build(self.source, names, arch=self.device.arch, options=(*checks, *self.options)))

    def _load(self, image: Image, load: Any = None) -> None:
        driver = self.device.driver
        with self.device.context:
            try:
                handle = load() if load else driver.cuModuleLoadData(image.data)
            except DriverError as error:
                what = f"{image.kind} for {image.arch}" if image.arch else image.kind
                meaning = f"{error.meaning} (module {self.name}, {what}, on {self.device.arch})"
                log = _jit_log(driver, image.data) if image.kind == "ptx" else ""
                if log and log not in error.meaning:  # the CPU device has told all
                    meaning += f"\n{log}"
                raise DriverError(error.call, error.code, meaning) from None
        release = partial(self.device.context.call, driver.cuModuleUnload, handle)
        self.loaded.append(Loaded(image, Box(handle, release, self.info)))

    @property
    def handle(self) -> Any:
        """The raw ``CUmodule``, of a module that is one image."""
        self._check_open()
        if len(self.loaded) != 1:
            raise ValueError(f"module {self.name} is {len(self.loaded)} images: see .loaded")
        return self.loaded[0].box.handle

    def close(self) -> None:
        """Refuse further use of it and of its kernels; its images are unloaded when no graph or launch uses them."""
        super().close()
        for kernel in self._kernels.values():
            kernel._close()
        self._kernels.clear()
        self.loaded.clear()

    # Looking up

    def kernel(self, name: str, *, signature: str | None = None) -> Kernel:
        """The kernel called ``name``: a function, an instantiation (``"scale<float>"``), or a symbol of the image.

        ``signature`` declares the parameters of an ``extern "C"`` kernel that came without a source, as in C++:
        ``"const float* x, float* y, int n"``. `KeyError` lists what there is.
        """
        self._check_open()
        if not isinstance(name, str):
            raise TypeError(f"module {self.name}: wanted the name of a kernel, got {name!r}")
        name = tidy(name)
        if (name, signature) not in self._kernels:
            self._kernels[name, signature] = self._find(name, signature)
        return self._kernels[name, signature]

    def _find(self, name: str, signature: str | None) -> Kernel:
        if self.source is not None and not any(name in loaded.image.lowered for loaded in self.loaded):
            self._compile([name])
        driver = self.device.driver
        for loaded in self.loaded:
            symbol = loaded.image.lowered.get(name, None if self.source is not None else self._symbol(loaded, name))
            if symbol is not None:
                function = driver.cuModuleGetFunction(loaded.box.handle, symbol.encode())
                return Kernel(self, loaded, name, symbol, function, signature)
        raise KeyError(f"module {self.name} has no kernel {name!r}; it has {', '.join(self.names()) or 'none'}")

    def _symbol(self, loaded: Loaded, name: str) -> str | None:
        symbols = self._symbols(loaded)
        matches = [symbol for symbol in symbols if symbol == name or tidy(kernel_label(symbol)) == name]
        if len(matches) > 1:
            raise KeyError(f"module {self.name} has several kernels {name!r}: {', '.join(matches)}; give the symbol")
        return matches[0] if matches else None

    def _symbols(self, loaded: Loaded) -> list[str]:
        driver = self.device.driver
        count = driver.cuModuleGetFunctionCount(loaded.box.handle)
        functions = driver.cuModuleEnumerateFunctions(count, loaded.box.handle) if count else []
        return [driver.cuFuncGetName(function).decode() for function in functions]

    def names(self) -> list[str]:
        """The kernels of the images loaded so far, by the names that `kernel` takes."""
        names: set[str] = set()
        for loaded in self.loaded:
            symbols = self._symbols(loaded)
            expressions = {symbol: name for name, symbol in loaded.image.lowered.items()}
            names |= {expressions.get(symbol) or tidy(kernel_label(symbol)) for symbol in symbols}
        return sorted(names)

    def variable(self, name: str, shape: int | Sequence[int] | None = None, dtype: DTypeLike = np.uint8) -> Buffer:
        """A ``__device__`` or ``__constant__`` variable as a Buffer: its bytes, or ``shape`` of ``dtype``.

        `KeyError` if no image has it, `ValueError` if the size differs or if several images each have their own.
        """
        self._check_open()
        driver, found = self.device.driver, []
        for loaded in self.loaded:
            try:
                address, nbytes = driver.cuModuleGetGlobal(loaded.box.handle, name.encode())
            except DriverError as error:
                if error.code != "CUDA_ERROR_NOT_FOUND":
                    raise
                continue
            found.append((int(address), int(nbytes), loaded))
        if not found:
            raise KeyError(f"module {self.name} has no variable {name!r}")
        if len(found) > 1:
            raise ValueError(f"module {self.name}: {len(found)} images have their own {name!r}; compile them together")
        address, nbytes, loaded = found[0]
        buffer = Buffer.borrow(self.device, address, nbytes if shape is None else shape, dtype, owner=loaded.box)
        if buffer.nbytes != nbytes:
            got = f"{buffer.dtype} of shape {buffer.shape} has {buffer.nbytes}"
            raise ValueError(f"variable {name!r} of module {self.name} has {nbytes} bytes, {got}")
        return buffer


def _jit_log(driver: Driver, ptx: bytes) -> str:
    """What the driver's own compiler says of PTX that it refused."""
    log = ctypes.create_string_buffer(1 << 14)
    names = driver.CUjit_option
    options = (ctypes.c_int * 2)(int(names.CU_JIT_ERROR_LOG_BUFFER), int(names.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES))
    values = (ctypes.c_void_p * 2)(ctypes.addressof(log), len(log))
    handle = ctypes.c_void_p()
    load = driver.raw("cuModuleLoadDataEx", 5)
    text = ctypes.create_string_buffer(ptx)
    at = ctypes.addressof
    if not load(at(handle), at(text), len(options), at(options), at(values)):  # it went through this time
        driver.cuModuleUnload(driver.CUmodule(handle.value))
    return log.value.decode(errors="replace").strip()


def shared_module(device: Device, source: str) -> Module:
    """The one module of a source in ``cuda_src`` that all share who want it as it is; it goes with the last of them."""
    module = device.ready_made.get(source)
    if module is None or module.closed:
        module = device.ready_made[source] = Module(device, source)
    return module


class Config(NamedTuple):
    """A checked launch configuration."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_mem_bytes: int
    attributes: Mapping[str, Any]


_NOTHING = object()  # no stream, also no closed one, and no extent


class Block(Arguments):
    """Packed arguments of one kernel, and the structs in which a launch and a graph node take them.

    A launch takes one that no other thread is using, so the structs stay filled from launch to launch. The driver's
    functions are called with their addresses.
    """

    __slots__ = (
        *("_launch_extents", "_node_extents", "launch_config", "node_params"),
        *("launch_config_address", "node_params_address", "nodes", "nodes_address"),
        *("block", "config", "grid", "node_block", "node_config", "node_grid", "node_shared", "shared", "stream"),
    )

    def __init__(self, signature: Signature, driver: Driver, function: Any) -> None:
        super().__init__(signature)
        self.node_params = driver.CUDA_KERNEL_NODE_PARAMS()
        self.node_params.func = function
        self.node_params.kernelParams = self.address
        self.launch_config = driver.CUlaunchConfig()
        self.node_params_address = int(self.node_params.getPtr())
        self.launch_config_address = int(self.launch_config.getPtr())
        self._node_extents = (ctypes.c_char * 36).from_address(self.node_params_address)
        self._launch_extents = (ctypes.c_char * 28).from_address(self.launch_config_address)
        self.nodes = (ctypes.c_uint64 * 2)()  # CUgraphNodes: where a new one comes out, and one that it waits for
        self.nodes_address = ctypes.addressof(self.nodes)
        # What the structs are filled for, as the caller gave it: the same objects again need no second look.
        self.stream: object = _NOTHING  # `Stream.raw`: holding the Stream would keep it open
        self.grid: Any = _NOTHING
        self.block: Any = _NOTHING
        self.shared: Any = _NOTHING
        self.config: Config | None = None
        self.node_grid: Any = None
        self.node_block: Any = None
        self.node_shared: Any = None
        self.node_config: Config | None = None

    # gridDimX..Z, blockDimX..Z, sharedMemBytes: at the start of CUlaunchConfig, and behind the CUfunction of
    # CUDA_KERNEL_NODE_PARAMS. Written in one go: the bindings take as long for each field.

    def configure_launch(self, stream: Stream, grid: Any, block: Any, shared: Any, config: Config) -> None:
        """Make ``launch_config`` that of a launch without attributes."""
        self.stream = self.grid = self.block = self.shared = _NOTHING
        _EXTENTS.pack_into(self._launch_extents, 0, *config.grid, *config.block, config.shared_mem_bytes)
        self.launch_config.hStream = stream.handle
        self.config = config
        if all(map(_is_frozen, (grid, block, shared))):
            self.grid, self.block, self.shared, self.stream = grid, block, shared, stream.raw

    def configure_node(self, config: Config, grid: Any = None, block: Any = None, shared: Any = None) -> None:
        """Make ``node_params`` that of a node."""
        self.node_config = None
        _EXTENTS.pack_into(self._node_extents, 8, *config.grid, *config.block, config.shared_mem_bytes)
        if not config.attributes and all(map(_is_frozen, (grid, block, shared))):  # attributes hold what they refer to
            self.node_grid, self.node_block, self.node_shared, self.node_config = grid, block, shared, config


def _is_frozen(extent: Any) -> bool:
    """Whether the same object is the same extent for ever."""
    return extent.__class__ is int or (extent.__class__ is tuple and all(n.__class__ is int for n in extent))


_EXTENTS = struct.Struct("=7I")


class Kernel:
    """A function on a device.

    Attributes:
        name: as it was asked for.
        symbol: in the image.
        signature: its parameters.
    """

    def __init__(
        self, module: Module, loaded: Loaded, name: str, symbol: str, function: Any, declared: str | None
    ) -> None:
        self.device, self.name, self.symbol = module.device, name, symbol
        self._function: Any = function
        self._entry = int(function)
        self._launch = self.device.driver.raw("cuLaunchKernelEx", 4)
        self._closed_as = f"{module.info} is closed, and kernel {name!r} with it"
        self.image_box: Box | None = loaded.box
        self.signature = self._read_signature(loaded, declared)
        self._attributes: dict[str, int] = {}
        self._configs: dict[tuple[Any, ...], Config] = {}  # checked, without attributes
        self._free_blocks: list[Block] = []  # not in use by a launch: threads each take their own

    def _read_signature(self, loaded: Loaded, declared: str | None) -> Signature:
        driver = self.device.driver
        layout: list[tuple[int, int]] = []
        while True:  # the driver tells the end by an error
            code, offset, size = driver.api.cuFuncGetParamInfo(self._function, len(layout))
            if code:
                if code.name != "CUDA_ERROR_INVALID_VALUE":
                    raise driver.error("cuFuncGetParamInfo", code)
                break
            layout.append((int(offset), int(size)))
        types: Sequence[CType | None] | None = mangled_types(self.symbol)
        names = None
        source = loaded.image.source
        declaration = source.kernel(self.name, len(layout)) if source is not None else None
        if declared is not None:
            declaration = Source.from_text(f"__global__ void declared({declared}) {{}}").kernel("declared")
            if declaration is None:
                raise ValueError(f"kernel {self.name}: signature {declared!r} is no list of C++ parameters")
            types = None
        if declaration is not None:
            names = [parameter.name for parameter in declaration.parameters]
            if types is None:
                arguments = declaration.bound(self.name)
                types = declared_types([parameter.type for parameter in declaration.parameters], arguments)
        return Signature(self.name, types, names, layout, self.device.id, self.device.locate)

    def _new_block(self) -> Block:
        return Block(self.signature, self.device.driver, self.handle)

    def _close(self) -> None:
        self._function = self.image_box = None
        self._entry = 0
        self._free_blocks = []  # they know the function; a launch that is under way gives its own back to the old list

    @property
    def handle(self) -> Any:
        """The raw ``CUfunction``."""
        function = self._function
        if function is None:
            raise ClosedError(self._closed_as)
        return function

    def image_in_use(self) -> Box:
        """``image_box``, to hold while the driver works with the function: it may be closed meanwhile."""
        image = self.image_box
        if image is None:
            raise ClosedError(self._closed_as)
        return image

    # What it uses

    def attribute(self, name: str) -> int:
        """A function attribute by the manual's name without its prefix: ``kernel.attribute("NUM_REGS")``."""
        driver = self.device.driver
        try:
            attribute = driver.CUfunction_attribute.__members__[f"CU_FUNC_ATTRIBUTE_{name}"]
        except KeyError:
            raise ValueError(f"no function attribute CU_FUNC_ATTRIBUTE_{name}") from None
        return int(driver.cuFuncGetAttribute(attribute, self.handle))

    @property
    def registers(self) -> int:
        """Of each thread."""
        return self.attribute("NUM_REGS")

    @property
    def shared_bytes(self) -> int:
        """Static shared memory of a block."""
        return self.attribute("SHARED_SIZE_BYTES")

    @property
    def local_bytes(self) -> int:
        """Local memory of a thread; spilled registers are there."""
        return self.attribute("LOCAL_SIZE_BYTES")

    @property
    def max_threads(self) -> int:
        """The largest block it can be launched with."""
        return self._fixed("MAX_THREADS_PER_BLOCK")

    def _fixed(self, name: str) -> int:
        if name not in self._attributes:
            self._attributes[name] = self.attribute(name)
        return self._attributes[name]

    def occupancy(self, block: int | tuple[int, ...], shared_mem_bytes: int = 0) -> int:
        """Blocks of this size that fit on one multiprocessor at a time."""
        x, y, z = dim3(block, f"kernel {self.name}: block")
        shared_mem_bytes = self._shared(shared_mem_bytes)
        with self.device.context:
            self._allow_shared(shared_mem_bytes)
            count = self.device.driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                self.handle, x * y * z, shared_mem_bytes
            )
        return int(count)

    def max_active_clusters(
        self,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        shared_mem_bytes: int = 0,
        **attributes: Unpack[Attributes],
    ) -> int:
        """Clusters of this launch that fit on the device at a time."""
        config = self.config(grid, block, shared_mem_bytes, attributes)
        with self.device.context:
            return int(self.device.driver.cuOccupancyMaxActiveClusters(self.handle, self._launch_config(config, None)))

    # Launching

    def launch(
        self,
        stream: Any,
        *,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        args: Sequence[Any] = (),
        shared_mem_bytes: int = 0,
        **attributes: Unpack[Attributes],
    ) -> None:
        """Queue it on ``stream`` (drvkit's, or any with ``__cuda_stream__``).

        Args:
            grid, block: one to three extents; nothing is clamped.
            args: one value a parameter, checked against `signature`; what they refer to is held until the stream has
                passed the launch.
            shared_mem_bytes: dynamic shared memory of a block; above 48 KB the kernel's limit is raised to it.
            attributes: see `Attributes`.

        `ArgumentError` names the argument, `ValueError` the extent, that does not fit. What goes wrong in the kernel
        is raised by the next synchronize.
        """
        if attributes:
            Launch(self, self.device.as_stream(stream), self.config(grid, block, shared_mem_bytes, attributes), args)()
            return
        if stream.__class__ is not Stream:
            stream = self.device.as_stream(stream)
        if args.__class__ is not tuple:
            args = self.arguments(args)
        image = self.image_box  # as `image_in_use`
        if image is None:
            raise ClosedError(self._closed_as)
        free = self._free_blocks
        ready = free.pop() if free else self._new_block()
        if (
            ready.stream is not stream.raw
            or ready.grid is not grid
            or ready.block is not block
            or ready.shared is not shared_mem_bytes
        ):
            config = self.config(grid, block, shared_mem_bytes)
            ready.configure_launch(self.device.as_stream(stream), grid, block, shared_mem_bytes, config)
        try:
            references = self.signature.write(args, ready.memory, ready.base, image)
        except UNFIT:
            raise self.signature.explain(args) from None
        code = self._launch(ready.launch_config_address, self._entry, ready.address, 0)
        free.append(ready)
        if code:
            raise self.refusal("cuLaunchKernelEx", code, ready.config)
        pending = stream.pending
        pending.append(references)
        if len(pending) > HELD_PER_BATCH:
            stream.settle()

    def prepare(
        self,
        stream: Any,
        *,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        args: Sequence[Any] = (),
        shared_mem_bytes: int = 0,
        **attributes: Unpack[Attributes],
    ) -> Launch:
        """A launch, checked and packed now, to be called many times: ``ready = kernel.prepare(...); ready()``."""
        config = self.config(grid, block, shared_mem_bytes, attributes)
        return Launch(self, self.device.as_stream(stream), config, args)

    def refusal(self, call: str, code: Any, config: Config | None) -> Exception:
        """What to raise for a launch or a node that the driver refused."""
        if self._function is None:
            return ClosedError(self._closed_as)
        error = self.device.driver.error(call, code)
        if config is None:
            return error
        extents = f"grid {config.grid}, block {config.block}, {config.shared_mem_bytes} bytes of shared memory"
        extra = f", {dict(config.attributes)}" if config.attributes else ""
        return DriverError(call, error.code, f"{error.meaning} (kernel {self.name}: {extents}{extra})")

    def config(self, grid: Any, block: Any, shared_mem_bytes: int = 0, attributes: Mapping[str, Any] = {}) -> Config:
        """A checked configuration. Refuses what the driver would refuse without saying why."""
        config = Config(
            dim3(grid, f"kernel {self.name}: grid"),
            dim3(block, f"kernel {self.name}: block"),
            self._shared(shared_mem_bytes),
            dict(attributes),
        )
        if attributes:
            self._check(config)
            return config
        known = self._configs.get(config[:3])
        if known is None:
            self._check(config)
            if len(self._configs) >= 1024:
                self._configs.clear()
            known = self._configs[config[:3]] = config
        return known

    def arguments(self, args: Any) -> tuple[Any, ...]:
        """``args`` as a tuple; `ArgumentError` for what has no order, or is text."""
        if isinstance(args, (str, bytes, Mapping, Set)) or not isinstance(args, Iterable):
            raise ArgumentError(self.name, None, None, f"a tuple of arguments {self.signature}", said(args))
        return tuple(args)

    def _shared(self, nbytes: Any) -> int:
        if isinstance(nbytes, bool) or not hasattr(nbytes, "__index__"):
            raise TypeError(f"kernel {self.name}: shared_mem_bytes: wanted an integer, got {nbytes!r}")
        if nbytes < 0:
            raise ValueError(f"kernel {self.name}: shared_mem_bytes is {nbytes}")
        return int(nbytes)

    def _check(self, config: Config) -> None:
        device = self.device
        for what, extents in (("grid", config.grid), ("block", config.block)):
            for axis, extent in zip("XYZ", extents, strict=True):
                limit = device.attribute(f"MAX_{what.upper()}_DIM_{axis}")
                if extent > limit:
                    raise ValueError(f"kernel {self.name}: {what} {extents}: {axis.lower()} is at most {limit}")
        x, y, z = config.block
        if x * y * z > self.max_threads:
            raise ValueError(
                f"kernel {self.name}: block {config.block} is {x * y * z} threads; this kernel, "
                f"with {self.registers} registers a thread, takes at most {self.max_threads}"
            )
        self._allow_shared(config.shared_mem_bytes)
        if config.attributes:
            for _ in encode(device.driver, config.attributes, node="device_updatable" in config.attributes):
                pass  # checks each
        cluster = config.attributes.get("cluster")
        if cluster is not None:
            for n, c in zip(config.grid, dim3(cluster, f"kernel {self.name}: cluster"), strict=True):
                if n % c:
                    raise ValueError(f"kernel {self.name}: grid {config.grid} is no multiple of cluster {cluster}")
        if config.attributes.get("cooperative"):
            resident = self.occupancy(config.block, config.shared_mem_bytes) * device.multiprocessors
            gx, gy, gz = config.grid
            if gx * gy * gz > resident:
                raise ValueError(
                    f"kernel {self.name}: a cooperative grid of {gx * gy * gz} blocks, of which {resident} fit on "
                    f"{device.id} at a time"
                )

    def _allow_shared(self, nbytes: int) -> None:
        if nbytes <= self._attributes.get("dynamic shared", DEFAULT_SHARED_BYTES - self._fixed("SHARED_SIZE_BYTES")):
            return
        limit = self.device.attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN") - self._fixed("SHARED_SIZE_BYTES")
        if nbytes > limit:
            raise ValueError(
                f"kernel {self.name}: {nbytes} bytes of dynamic shared memory; at most {limit} beside its "
                f"{self._fixed('SHARED_SIZE_BYTES')} static bytes on {self.device.id}"
            )
        driver = self.device.driver
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        if nbytes > self.attribute(
            "MAX_DYNAMIC_SHARED_SIZE_BYTES"
        ):  # never lowered: others may launch the function too
            driver.cuFuncSetAttribute(self.handle, attribute, nbytes)
        self._attributes["dynamic shared"] = nbytes

    def _launch_config(self, config: Config, stream: Stream | None) -> Any:
        driver = self.device.driver
        to = driver.CUlaunchConfig()
        to.gridDimX, to.gridDimY, to.gridDimZ = config.grid
        to.blockDimX, to.blockDimY, to.blockDimZ = config.block
        to.sharedMemBytes = config.shared_mem_bytes
        if stream is not None:
            to.hStream = stream.handle
        attributes = []
        for identity, value in encode(driver, config.attributes, node=False):
            attribute = driver.CUlaunchAttribute()
            attribute.id, attribute.value = identity, value
            attributes.append(attribute)
        to.attrs = attributes
        to.numAttrs = len(attributes)  # assigning the list does not count it
        return to

    def __repr__(self) -> str:
        return f"<Kernel {self.name}{self.signature} on {self.device.id}{' closed' if self._function is None else ''}>"


class Launch:
    """A prepared launch: calling it queues it, at the cost of the driver's call alone."""

    def __init__(self, kernel: Kernel, stream: Stream, config: Config, args: Sequence[Any]) -> None:
        self.kernel, self.stream, self.config = kernel, stream, config
        args, image = kernel.arguments(args), kernel.image_in_use()
        self._arguments = kernel._new_block()
        pointers = (p.index for p in kernel.signature.parameters if p.is_pointer)
        # By parameter; a set makes a new one, so that launches in flight keep what they had.
        self._held: dict[object, object] = dict(zip(pointers, self._arguments.pack(args), strict=True))
        self._held["kernel"] = image, held(config.attributes)
        self._address = self._arguments.address
        self._launch_config = kernel._launch_config(config, stream)
        self._launch_config_address = int(self._launch_config.getPtr())
        self._launch = stream.in_thread(kernel._launch)
        kernel.image_in_use()  # an argument may have closed it

    def __call__(self) -> None:
        stream, kernel = self.stream, self.kernel
        if stream.box is None:
            raise ClosedError(f"{stream.info} is closed")
        code = self._launch(self._launch_config_address, kernel._entry, self._address, 0)
        if code:
            raise kernel.refusal("cuLaunchKernelEx", code, self.config)
        if stream.newest is not self._held:
            stream.hold(self._held)

    def set(self, **arguments: Any) -> None:
        """Change arguments, by their names in the source, for the launches to come.

        `ArgumentError` names the one that does not fit; then none is changed.
        """
        signature = self.kernel.signature
        changes = [(signature.locate(name), value) for name, value in arguments.items()]
        packed = [signature.value(index, value) for index, value in changes]
        self._held = self._held | {i: holder(value) for i, value in changes if signature.parameters[i].is_pointer}
        for (index, _), raw in zip(changes, packed, strict=True):
            self._arguments.swap(index, raw)

    def __repr__(self) -> str:
        return f"<Launch of {self.kernel.name}, grid {self.config.grid}, block {self.config.block}>"
