"""Text to image: NVRTC makes a cubin or PTX of a `Source`, and a cache on disk keeps it.

An `Image` is what the driver (or the CPU device) loads. One that was made elsewhere can be read from a file.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cache as cached
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import platformdirs
from cuda import pathfinder  # type: ignore[import-untyped]

from .driver import DriverError, open_nvrtc
from .source import Source

__all__ = ["DEFAULT_CACHE", "Cache", "CompileError", "Image", "build", "tidy"]

# Without -rdc NVRTC knows the type of a conditional handle but not the function; the driver supplies it at load.
PRELUDE = 'extern "C" __device__ void cudaGraphSetConditional(cudaGraphConditionalHandle, unsigned int);\n'

_FORMAT = 1  # of a cache entry; counts up when its layout or the way that an image is made changes
_WHEELS = ("nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "nvidia-cuda-crt", "nvidia-cuda-cccl")
_REFUSED = {
    "arch": "say arch=",
    "gpu-architecture": "say arch=",
    "std": "say std=",
    "minimal": "it removes the type that cudaGraphSetConditional takes",
}
_READS_FILES = ("-I", "--include-path", "-include", "--pre-include")  # options with files that no digest covers

_EM_CUDA = 190
_FATBIN_MAGIC = bytes.fromhex("50ed55ba")


class CompileError(RuntimeError):
    """NVRTC refused a source, or a name expression names no kernel of it.

    The message has the log and, for each error in it, the lines around.

    Attributes:
        source, arch, options: what was compiled, and how.
        log: NVRTC's words.
        unresolved: the name expressions that name nothing, each with the reason.
    """

    def __init__(self, source: Source, arch: str, options: tuple[str, ...], log: str) -> None:
        self.source, self.arch, self.options, self.log = source, arch, options, log
        self.unresolved = {name.strip(): reason for reason, name in _UNRESOLVED.findall(log)}
        super().__init__("\n".join(self._message()))

    def __reduce__(self) -> tuple[type[CompileError], tuple[Source, str, tuple[str, ...], str]]:
        return type(self), (self.source, self.arch, self.options, self.log)

    def only_names(self) -> bool:
        """True if the text itself is right and only name expressions are wrong."""
        return bool(self.unresolved) and all(file == "__nv_name_map" for file, _ in _ERROR.findall(self.log))

    def _message(self) -> Iterator[str]:
        yield f"{self.source.name} for {self.arch} ({' '.join(self.options)}) does not compile"
        yield f"\n{self.log}" if self.log else "\nNVRTC made nothing and said nothing"
        if self.only_names():
            for name, reason in self.unresolved.items():
                yield f"name expression {name!r} is no kernel of {self.source.name}: {reason}"
            known = (kernel.qualified + "<...>" * kernel.template for kernel in self.source.kernels())
            yield f"its kernels: {', '.join(known) or 'none'}"
        for header in dict.fromkeys(_MISSING.findall(self.log)):
            yield _hint(header)
        texts = {_shown(self.source.path, self.source.name): self.source.text}
        texts |= {_shown(header.path, header.name): header.text for header in self.source.includes}
        for file, line in dict.fromkeys(_ERROR.findall(self.log)):
            if file in texts:
                yield f"\n{file}:"
                yield from _excerpt(texts[file], int(line))


@dataclass(frozen=True)
class Image:
    """Code as the driver loads it.

    ``arch`` is "sm_90a" for a cubin, "compute_90" for PTX; one that was read from a file lacks a cubin's "a" or "f",
    and is "" for a fatbin. PTX in ``data`` is text without a final NUL. ``lowered`` has the symbol of each name
    expression, spelled without needless spaces; it is empty for what was read from a file.
    """

    kind: Literal["cubin", "ptx", "fatbin"]
    arch: str
    data: bytes = field(repr=False)
    lowered: Mapping[str, str] = field(default_factory=dict, hash=False)
    source: Source | None = field(default=None, repr=False)
    log: str = field(default="", repr=False)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Image:
        """A cubin, fatbin or PTX file. `ValueError` where it is something else."""
        try:
            return cls.from_bytes(Path(path).read_bytes())
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from None

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Image:
        """A cubin, fatbin or PTX. `ValueError` where it is something else."""
        data = bytes(data)
        if data.startswith(_FATBIN_MAGIC):
            return cls("fatbin", "", data)
        if data.startswith(b"\x7fELF\x02") and len(data) >= 64:
            machine = int.from_bytes(data[18:20], "little")
            if machine != _EM_CUDA:
                raise ValueError(f"not a GPU image: an ELF file for machine {machine}; a cubin has {_EM_CUDA}")
            flags = int.from_bytes(data[48:52], "little")
            return cls("cubin", f"sm_{flags >> 8 & 0xFF if data[8] >= 8 else flags & 0xFF}", data)  # by ABI version
        text = data.rstrip(b"\0")
        target = re.search(rb"^\s*\.target\s+sm_(\w+)", text, re.MULTILINE)
        if target and b"\0" not in text and re.search(rb"^\s*\.version\s+\d", text, re.MULTILINE):
            return cls("ptx", f"compute_{target[1].decode()}", text)
        found = f"{len(data)} bytes that begin with {data[:16]!r}" if data else "no bytes"
        raise ValueError(f"not a GPU image: {found}; there are cubin, fatbin and PTX with .version and .target")

    def symbol(self, name: str) -> str:
        """The symbol of a name expression, however spaced; what was read from a file knows symbols only."""
        if self.source is None:
            return name
        try:
            return self.lowered[tidy(name)]
        except KeyError:
            raise KeyError(f"{name} is not among the names of {self.source.name}: {', '.join(self.lowered)}") from None


class Cache:
    """Images on disk, one file each; safe with any number of processes, never in the way.

    A file that is damaged counts as absent. Where the directory cannot be used nothing is kept, and ``problem`` says
    why. Above ``LIMIT_BYTES`` the files that were not used for longest go; a process looks at that with its first file,
    and whenever it has stored a sixteenth of the limit.
    """

    LIMIT_BYTES = 512 * 2**20
    _ENTRY, _TEMPORARY, _LOCK = ".image", ".image.tmp", ".lock"

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        """``directory`` is by default ``$DRVKIT_CACHE_DIR``, else the user's cache directory."""
        self._given = directory
        self.problem: str | None = None
        self._unlooked = 0  # bytes that may be stored before the directory is looked at again

    @property
    def directory(self) -> Path:
        given = self._given or os.environ.get("DRVKIT_CACHE_DIR")
        return Path(given).absolute() if given else platformdirs.user_cache_path("drvkit")

    def load(self, key: str) -> tuple[dict[str, Any], bytes] | None:
        """The header and the image stored under this key."""
        path = self.directory / (key + self._ENTRY)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self.problem = str(error)
            return None
        payload = content[32:]
        if hashlib.sha256(payload).digest() != content[:32]:
            return None
        end = 4 + int.from_bytes(payload[:4], "little")
        header: dict[str, Any] = json.loads(payload[4:end])
        if header.pop("key") != key:
            return None
        with suppress(OSError):
            os.utime(path)
        return header, payload[end:]

    def store(self, key: str, header: Mapping[str, Any], data: bytes) -> None:
        """Keeps a header (of what JSON has) and an image, in place of what the key had."""
        text = json.dumps({**header, "key": key}).encode()
        payload = len(text).to_bytes(4, "little") + text + data
        try:
            self._write(key + self._ENTRY, hashlib.sha256(payload).digest() + payload)
            self._unlooked -= len(payload)
            if self._unlooked < 0:
                self._prune()
                self._unlooked = self.LIMIT_BYTES // 16
        except OSError as error:
            self.problem = str(error)
        else:
            self.problem = None

    @contextmanager
    def alone(self, key: str) -> Iterator[None]:
        """While one process makes what this key is to have, others wait, and then find it: ranks that start together
        compile a kernel once. Blocks of several keys are not to be nested."""
        number = f"{zlib.crc32(key.encode()) % 256:02x}"  # as many files, which stay
        try:
            handle = os.open(self._made() / (number + self._LOCK), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
        except OSError:  # then nothing is kept either
            yield
            return
        try:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            with suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_UN)  # a fork may have it, too
            os.close(handle)

    def clear(self) -> None:
        """Removes all entries; whatever else is in the directory stays."""
        for path, _ in self._files():
            path.unlink(missing_ok=True)

    def _made(self) -> Path:
        directory = self.directory
        if not directory.is_absolute():  # a user without a home
            raise FileNotFoundError(f"no place for a cache: {directory} is not absolute")
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    def _write(self, name: str, content: bytes) -> None:
        directory = self._made()
        handle, temporary = tempfile.mkstemp(dir=directory, suffix=self._TEMPORARY)
        try:
            with open(handle, "wb") as file:
                file.write(content)
            os.replace(temporary, directory / name)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise

    def _prune(self) -> None:
        files = sorted(self._files(), key=lambda file: file[1].st_mtime_ns)
        total = sum(stat.st_size for _, stat in files)
        for path, stat in files:
            if total <= self.LIMIT_BYTES:
                break
            with suppress(OSError):
                path.unlink()
            total -= stat.st_size

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.directory) as entries:
            for entry in entries:
                if entry.name.endswith((self._ENTRY, self._TEMPORARY)):
                    with suppress(FileNotFoundError):
                        if entry.is_file(follow_symlinks=False):
                            yield Path(entry.path), entry.stat(follow_symlinks=False)


DEFAULT_CACHE = Cache()


def build(
    source: Source,
    names: Sequence[str] = (),
    *,
    arch: str,
    kind: Literal["cubin", "ptx"] | None = None,
    options: Sequence[str] = (),
    std: str = "c++17",
    lineinfo: bool = True,
    cache: Cache | None = DEFAULT_CACHE,
) -> Image:
    """Compiles a source, or finds it in the cache.

    Args:
        names: name expressions of what is wanted, ``"scale<float>"``. None means every kernel that is no template,
            save those that their name does not tell apart (overloads) or that a preprocessor condition leaves out.
        arch: ``"sm_90a"``; for PTX also ``"compute_90a"``.
        kind: by default PTX for a ``compute`` arch and a cubin for the others.
        options: further options of NVRTC, as they are. With ``-I`` or ``-include`` the cache is not used, because it
            cannot know what is read.
        cache: None for no cache.

    Raises:
        CompileError: with the log and the lines in question.
        ValueError: an arch or an option that cannot be.
        TypeError: an argument of another type, named.
    """
    if not isinstance(source, Source):
        hint = "; Source.find(name) gives one" if isinstance(source, str | os.PathLike) else ""
        raise TypeError(f"build: source: wanted a Source, got {source!r}{hint}")
    names, options = _texts("names", names), _texts("options", options)
    for what, text, example in (("arch", arch, "sm_90a"), ("std", std, "c++17")):
        if not isinstance(text, str):
            raise TypeError(f"build: {what}: wanted text such as {example!r}, got {text!r}")
    if cache is not None and not isinstance(cache, Cache):
        raise TypeError(f"build: cache: wanted a Cache or None, got {cache!r}")
    if kind is None:
        kind = "ptx" if isinstance(arch, str) and arch.startswith("compute_") else "cubin"
    if kind not in ("cubin", "ptx"):
        raise ValueError(f"kind: wanted cubin or ptx, got {kind!r}")
    arch = _checked_arch(arch, kind)
    flags = (f"--gpu-architecture={arch}", f"--std={std}", *(["-lineinfo"] if lineinfo else []), *_checked(options))
    automatic = not names
    if automatic:
        names = [kernel.qualified for kernel in source.kernels() if not kernel.template]
    names = sorted({tidy(name) for name in names})

    if any(option.startswith(_READS_FILES) for option in options):
        cache = None
    key = _key(source, names, automatic, kind, flags)
    entry = cache.load(key) if cache else None
    if entry is None:
        with cache.alone(key) if cache else nullcontext():
            entry = cache.load(key) if cache else None
            while entry is None:
                try:
                    data, lowered, log = _compile(source, names, arch, kind, flags)
                except CompileError as error:
                    if not automatic or not error.only_names():
                        raise
                    names = [name for name in names if name not in error.unresolved]
                    continue
                entry = {"lowered": lowered, "log": log}, data
                if cache:
                    cache.store(key, *entry)
    header, data = entry
    return Image(kind, arch, data, header["lowered"], source, header["log"])


def _texts(what: str, given: Sequence[str]) -> tuple[str, ...]:
    if isinstance(given, str):
        raise TypeError(f"build: {what}: a sequence of str is wanted, not the one str {given!r}")
    texts = tuple(given) if isinstance(given, Iterable) else (given,)
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"build: {what}: wanted a sequence of str, got {text!r}")
    return texts


def _key(source: Source, names: Sequence[str], automatic: bool, kind: str, flags: Sequence[str]) -> str:
    """sha256 (hex) over everything that makes the bytes of an image."""
    shown = [_shown(source.path, source.name), *(_shown(header.path, header.name) for header in source.includes)]
    compiler = [*open_nvrtc().nvrtcVersion(), _wheels()]
    parts = [_FORMAT, PRELUDE, source.digest, shown, list(names), automatic, kind, list(flags), compiler]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _compile(
    source: Source, names: Sequence[str], arch: str, kind: str, flags: tuple[str, ...]
) -> tuple[bytes, dict[str, str], str]:
    """The image, the symbol of each name, and the log."""
    nvrtc = open_nvrtc()
    text = PRELUDE + _line_directive(source.path, source.name) + source.text
    headers = [_line_directive(header.path, header.name) + header.text for header in source.includes]
    program = nvrtc.nvrtcCreateProgram(
        text.encode(),
        source.name.encode(),
        len(headers),
        [header.encode() for header in headers],
        [header.name.encode() for header in source.includes],
    )
    try:
        for name in names:
            nvrtc.nvrtcAddNameExpression(program, name.encode())
        options = [option.encode() for option in (*flags, *(f"-I{place}" for place in _toolkit_headers()))]
        failure = None
        try:
            nvrtc.nvrtcCompileProgram(program, len(options), options)
        except DriverError as error:
            failure = error
        log = _output(program, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
        data = b"" if failure else _output(program, "CUBIN" if kind == "cubin" else "PTX")
        if kind == "ptx" and source.path is None:  # NVRTC completes its name by the current directory
            data = data.replace(f'"{os.getcwd()}/{source.name}"'.encode(), f'"{source.name}"'.encode())
        if not data:  # also where an option (-dlto) asks for something else
            raise CompileError(source, arch, flags, log) from failure
        lowered = {name: nvrtc.nvrtcGetLoweredName(program, name.encode()).decode() for name in names}
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return data if kind == "cubin" else data.rstrip(b"\0"), lowered, log


def _output(program: Any, what: str) -> bytes:
    nvrtc = open_nvrtc()
    size = getattr(nvrtc, f"nvrtcGet{what}Size")(program)
    # The bindings fill bytes in place. Python shares the bytes of length 0 and 1 among all that use them: writing into
    # those would change b" " everywhere.
    buffer = bytes(size + 2)
    getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
    return buffer[:size]


@cached
def _toolkit_headers() -> tuple[str, ...]:
    """Where the toolkit's headers are; what is missing is told when a source needs it."""
    find = pathfinder.find_nvidia_header_directory
    places = [find("cudart"), find("cccl")]
    if (
        places[0] and not Path(places[0], "crt").is_dir()
    ):  # the wheel nvidia-cuda-crt is missing: a toolkit may be there
        places.append(find("nvcc"))
    return tuple(place for place in places if place)


@cached
def _wheels() -> dict[str, str | None]:
    """The versions of the packages that NVRTC and the headers come from; None for one that is not there."""
    versions: dict[str, str | None] = dict.fromkeys(_WHEELS)
    for wheel in _WHEELS:
        with suppress(metadata.PackageNotFoundError):
            versions[wheel] = metadata.version(wheel)
    return versions


def _checked_arch(arch: str, kind: str) -> str:
    """The arch as NVRTC wants it for this kind."""
    supported = open_nvrtc().nvrtcGetSupportedArchs()
    match = re.fullmatch(r"(sm|compute)_(\d+)([af]?)", arch)
    known = match and int(match[2]) in supported and int(match[2]) >= {"": 0, "a": 90, "f": 100}[match[3]]
    if not match or not known or (match[1] == "compute" and kind == "cubin"):
        raise ValueError(
            f"no arch {arch!r} for a {kind}; there are {', '.join(f'sm_{number}' for number in supported)}"
        )
    return arch if kind == "cubin" else f"compute_{match[2]}{match[3]}"


def _checked(options: Sequence[str]) -> Sequence[str]:
    for option in options:
        reason = _REFUSED.get(option.lstrip("-").split("=")[0])
        if reason:
            raise ValueError(f"option {option!r} is not taken: {reason}")
    return options


def tidy(name: str) -> str:
    """A name expression with spaces only between words."""
    return re.sub(r"\s*([^\w\s])\s*", r"\1", " ".join(name.split()))


# ---- what an error says -------------------------------------------------------------------------------------------

_ERROR = re.compile(r"^(.+?)\((\d+)\): (?:catastrophic )?error", re.MULTILINE)
_UNRESOLVED = re.compile(
    r"^__nv_name_map\(\d+\): error: (?!Error in parsing)(.*)\n\s*#pragma nv_mangled_name (.*)$", re.M
)
_MISSING = re.compile(r'(?:cannot|could not) open source file "([^"]+)"')
_HEADERS_OF = {
    "crt/": "nvidia-cuda-crt",
    **dict.fromkeys(("cuda/", "nv/", "cub/", "thrust/"), "nvidia-cuda-cccl"),
    **dict.fromkeys(("cuda", "cooperative_groups", "mma.h", "vector_"), "nvidia-cuda-runtime"),
}


def _shown(path: Path | None, name: str) -> str:
    """A file as NVRTC is told it: a profiler finds it by the line table, a reader by the log."""
    return path.as_posix() if path else name


def _line_directive(path: Path | None, name: str) -> str:
    return f"#line 1 {json.dumps(_shown(path, name), ensure_ascii=False)}\n"


def _hint(header: str) -> str:
    wheel = next((wheel for prefix, wheel in _HEADERS_OF.items() if header.startswith(prefix)), None)
    if wheel:
        return f"<{header}> belongs to {wheel} ({_wheels()[wheel] or 'not installed'})"
    return (
        f"<{header}> is not in the toolkit: NVRTC has no headers of the host (<cuda/std/cstdint> is there for "
        f'<cstdint>), and a header of the project is included with ""'
    )


def _excerpt(text: str, line: int) -> Iterator[str]:
    """The lines around one, numbered; that one is marked."""
    lines = text.split("\n")
    for number in range(max(line - 2, 1), min(line + 2, len(lines)) + 1):
        yield f"{'>' if number == line else ' '}{number:5} | {lines[number - 1]}".rstrip()
