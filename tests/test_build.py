"""`drvkit.build`: NVRTC makes images, errors show the lines, and the cache on disk never lies. No GPU is needed."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import re
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drvkit.build import DEFAULT_CACHE, Cache, CompileError, Image, build
from drvkit.source import Source

module = importlib.import_module("drvkit.build")

SCALE = Source.from_text("template <class T> __global__ void scale(T* x, T a) { x[threadIdx.x] *= a; }", "scale.cu")
PLAIN = Source.from_text("__global__ void plain(float* x) { *x = 1; }")


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def kept(cache: Cache) -> list[Path]:
    """What is in its directory besides locks."""
    return [path for path in cache.directory.iterdir() if path.suffix != ".lock"]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls of a compiler that takes no time and makes the image b"code"."""
    calls: list[Any] = []

    def compile_(*args: Any) -> tuple[bytes, dict[str, str], str]:
        calls.append(args)
        return b"code", {}, "a warning"

    monkeypatch.setattr(module, "_compile", compile_)
    return calls


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cuda_src."""
    root = tmp_path / "cuda_src"
    root.mkdir()
    monkeypatch.setattr("drvkit.source.CUDA_SRC", (root,))
    return root


def failure(text: str | Source, *names: str, **how: Any) -> CompileError:
    source = Source.from_text(text) if isinstance(text, str) else text
    with pytest.raises(CompileError) as error:
        build(source, names, arch="sm_90", cache=None, **how)
    return error.value


# ---- images -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_90a", "sm_100a", "sm_120"])
def test_a_cubin_is_for_its_arch(arch: str) -> None:
    image = build(PLAIN, arch=arch, cache=None)
    assert (image.kind, image.arch, image.lowered, image.log) == ("cubin", arch, {"plain": "_Z5plainPf"}, "")
    read = Image.from_bytes(image.data)
    assert (read.kind, read.arch) == ("cubin", arch.rstrip("a"))


@pytest.mark.parametrize("arch", ["sm_90", "compute_90"])
def test_ptx_is_for_a_compute_arch(arch: str) -> None:
    image = build(PLAIN, arch=arch, kind="ptx", cache=None)
    assert (image.kind, image.arch) == ("ptx", "compute_90")
    text = image.data.decode()
    assert ".version" in text
    assert ".target sm_90" in text
    assert not text.endswith("\0")
    assert Image.from_bytes(image.data).arch == "compute_90"


@pytest.mark.parametrize(
    ("arch", "kind"),
    [("sm_1", "cubin"), ("compute_90", "cubin"), ("sm_80a", "cubin"), ("sm_90f", "ptx"), ("90", "ptx")],
)
def test_an_arch_that_cannot_be_is_refused_with_those_that_can(arch: str, kind: Any) -> None:
    with pytest.raises(ValueError, match=rf"{arch}.*sm_80.*sm_90"):
        build(PLAIN, arch=arch, kind=kind, cache=None)


@pytest.mark.parametrize("option", ["-arch=sm_80", "--gpu-architecture=sm_80", "-std=c++20", "--std", "-minimal"])
def test_an_option_that_has_a_keyword_is_refused(option: str) -> None:
    with pytest.raises(ValueError, match=re.escape(option)):
        build(PLAIN, arch="sm_90", options=[option], cache=None)


def test_one_str_is_no_sequence_of_names() -> None:
    with pytest.raises(TypeError, match="scale"):
        build(SCALE, "scale<float>", arch="sm_90", cache=None)


def test_options_reach_the_compiler() -> None:
    source = Source.from_text("__global__ void k(int* x) { *x = VALUE; static_assert(__cplusplus > 201703L); }")
    assert b"4711" in build(source, arch="sm_90", kind="ptx", options=["-DVALUE=4711"], std="c++20", cache=None).data


def test_lineinfo_names_the_real_files(root: Path) -> None:
    (root / "dk").mkdir()
    (root / "dk" / "one.cuh").write_text("__device__ float one(float x) { return x * x + 1; }\n")
    (root / "x.cu").write_text('#include "dk/one.cuh"\n\n__global__ void k(float* x) {\n    *x = one(*x);\n}\n')
    text = build(Source.find("x"), arch="sm_90", kind="ptx", cache=None).data.decode()
    assert f'"{root / "x.cu"}"' in text
    assert f'"{root / "dk" / "one.cuh"}"' in text
    assert ".loc\t1 4 " in text
    assert ".loc" not in build(Source.find("x"), arch="sm_90", kind="ptx", lineinfo=False, cache=None).data.decode()


def test_files_are_recognised(tmp_path: Path) -> None:
    path = tmp_path / "image"
    cubin = build(PLAIN, arch="sm_90", cache=None).data
    for data, kind, arch in [
        (cubin, "cubin", "sm_90"),
        (cubin[:8] + b"\7" + cubin[9:48] + bytes.fromhex("5a055a00") + cubin[52:], "cubin", "sm_90"),
        (bytes.fromhex("50ed55ba") + bytes(60), "fatbin", ""),
        (b"// made by hand\n.version 8.0\n.target sm_90a, debug\n.address_size 64\n\0", "ptx", "compute_90a"),
    ]:
        path.write_bytes(data)
        image = Image.from_file(path)
        assert (image.kind, image.arch, dict(image.lowered), image.source) == (kind, arch, {}, None)
        assert image.data == (data.rstrip(b"\0") if kind == "ptx" else data)
        assert image.symbol("anything") == "anything"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "no bytes"),
        (b"__global__ void k() {}", "__global__ void "),
        (b"\x7fELF\x02\x01\x01" + bytes(11) + b"\x3e\0" + bytes(60), "machine 62"),
        (b"\x7fELF\x02", "5 bytes"),
    ],
)
def test_what_is_no_image_is_named(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "image.bin"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"image\.bin") as error:
        Image.from_file(path)
    assert said in str(error.value)


# ---- names --------------------------------------------------------------------------------------------------------


def test_templates_come_by_name_expression() -> None:
    text = f"#include <cuda_bf16.h>\n{SCALE.text}"
    image = build(Source.from_text(text), ["scale<float>", "scale< __nv_bfloat16 >"], arch="sm_90", cache=None)
    assert image.lowered == {
        "scale<float>": "_Z5scaleIfEvPT_S0_",
        "scale<__nv_bfloat16>": "_Z5scaleI13__nv_bfloat16EvPT_S1_",
    }
    assert all(symbol.encode() in image.data for symbol in image.lowered.values())


def test_spaces_in_a_name_do_not_matter() -> None:
    image = build(SCALE, ["scale< unsigned   int >", "scale<unsigned int>"], arch="sm_90", cache=None)
    assert list(image.lowered) == ["scale<unsigned int>"]
    assert image.symbol(" scale <unsigned int>") == "_Z5scaleIjEvPT_S0_"
    with pytest.raises(KeyError, match=r"scale<float>.*scale<unsigned int>"):
        image.symbol("scale<float>")


def test_without_names_every_kernel_that_is_no_template_is_named() -> None:
    text = """
    extern "C" __global__ void c(int) {}
    namespace ns { __global__ void a(int) {} namespace { __global__ void hidden(int) {} } }
    template <class T> __global__ void t(T*) {}
    __global__ void overloaded(int) {}
    __global__ void overloaded(float) {}
    #if 0
    __global__ void inactive(int) {}
    #endif
    """
    lowered = build(Source.from_text(text), arch="sm_90", cache=None).lowered
    assert set(lowered) == {"c", "ns::a", "ns::hidden"}
    assert (lowered["c"], lowered["ns::a"]) == ("c", "_ZN2ns1aEi")


def test_an_unknown_name_is_an_error_that_lists_the_kernels() -> None:
    error = failure(SCALE.text + "__global__ void plain() {}", "scale<float>", "nosuch", "scale")
    assert set(error.unresolved) == {"nosuch", "scale"}
    assert "name expression 'nosuch'" in str(error)
    assert "its kernels: scale<...>, plain" in str(error)


# ---- what is always there -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cubin", "ptx"])
@pytest.mark.parametrize("options", [[], ["-rdc=true"]], ids=["", "rdc"])
@pytest.mark.parametrize("include", ["", "#include <cuda_device_runtime_api.h>"], ids=["", "header"])
def test_graph_conditions_can_be_set(kind: Any, options: list[str], include: str) -> None:
    text = f"{include}\n__global__ void k(cudaGraphConditionalHandle h) {{ cudaGraphSetConditional(h, 1); }}"
    image = build(Source.from_text(text), arch="sm_90", kind=kind, options=options, cache=None)
    assert b"cudaGraphSetConditional" in image.data


def test_who_sets_no_condition_has_no_trace_of_it() -> None:
    assert b"cudaGraphSetConditional" not in build(PLAIN, arch="sm_90", kind="ptx", cache=None).data


@pytest.mark.parametrize(
    "header",
    ["cuda_bf16.h", "cuda_fp16.h", "cuda_fp8.h", "cuda_fp4.h", "mma.h", "cooperative_groups.h", "cuda/std/cstdint"],
)
def test_headers_of_the_toolkit_compile(header: str) -> None:
    build(Source.from_text(f"#include <{header}>\n__global__ void k() {{}}"), arch="sm_90", cache=None)


def test_headers_of_the_project_include_each_other(root: Path) -> None:
    for name, text in {
        "a.cuh": "constexpr int A = 1;",
        "dk/a.cuh": '#include "b.cuh"\n#include "../a.cuh"\nconstexpr int DK_A = A + B;',
        "dk/b.cuh": '#include "deep/c.cuh"\nconstexpr int B = C;',
        "dk/deep/c.cuh": '#include "../b.cuh"\n#include "../../a.cuh"\nconstexpr int C = 5;',
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"#pragma once\n{text}\n")
    source = Source.from_text(
        '#include "dk/b.cuh"\n#include "dk/a.cuh"\n__global__ void k() { static_assert(DK_A == 6); }'
    )
    build(source, arch="sm_90", cache=None)


# ---- errors -------------------------------------------------------------------------------------------------------


def test_an_error_shows_the_lines_of_the_file() -> None:
    error = failure("// 1\n// 2\n__global__ void k(int* x) {\n    *x = unknown;\n}\n// 6\n// 7\n", options=["-DX=1"])
    assert (error.arch, error.options[-1], error.source.name) == ("sm_90", "-DX=1", "kernel.cu")
    assert 'kernel.cu(4): error: identifier "unknown" is undefined' in error.log
    assert str(error).startswith("kernel.cu for sm_90 (--gpu-architecture=sm_90 --std=c++17 -lineinfo -DX=1)")
    assert error.log in str(error)
    assert str(error).endswith(
        "kernel.cu:\n     2 | // 2\n     3 | __global__ void k(int* x) {\n>    4 |     *x = unknown;\n"
        "     5 | }\n     6 | // 6"
    )
    assert not error.only_names()
    assert "name expression" not in str(error)


def test_an_error_in_a_header_shows_the_header(root: Path) -> None:
    (root / "bad.cuh").write_text("#pragma once\n\n__device__ int f() { return unknown; }\n")
    error = failure('#include "bad.cuh"\n__global__ void k() {}')
    assert f"\n{root / 'bad.cuh'}:\n" in str(error)
    assert ">    3 | __device__ int f() { return unknown; }" in str(error)


def test_an_error_in_an_instantiation_shows_the_template() -> None:
    error = failure("template <class T>\n__global__ void k(T x) {\n    x.nothing();\n}\n", "k<int>")
    assert ">    3 |     x.nothing();" in str(error)


def test_a_compile_error_survives_pickling() -> None:
    error = failure("__global__ void k() { unknown; }")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.log, again.source, again.arch) == (str(error), error.log, error.source, error.arch)


def test_headers_that_are_missing_say_where_they_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "<cuda/std/cstdint>" in str(failure("#include <cstdint>"))
    monkeypatch.setattr(module, "_toolkit_headers", lambda: ())
    monkeypatch.setattr(module, "_wheels", lambda: dict.fromkeys(module._WHEELS))
    assert "<cuda_fp16.h> belongs to nvidia-cuda-runtime (not installed)" in str(failure("#include <cuda_fp16.h>"))
    assert "<cuda/atomic> belongs to nvidia-cuda-cccl (not installed)" in str(failure("#include <cuda/atomic>"))
    assert "<crt/mma.h> belongs to nvidia-cuda-crt (not installed)" in str(failure("#include <crt/mma.h>"))


def test_options_that_nvrtc_refuses_and_those_that_make_nothing_are_errors() -> None:
    assert "-nosuch" in failure("__global__ void k() {}", options=["-nosuch"]).log
    assert "NVRTC made nothing" in str(failure("__global__ void k() {}", options=["-dlto"]))


# ---- the key ------------------------------------------------------------------------------------------------------


def test_a_second_build_comes_from_the_cache(cache: Cache, compiled: list[Any]) -> None:
    first, second = (build(PLAIN, arch="sm_90", cache=cache) for _ in range(2))
    assert len(compiled) == 1
    assert first == second
    assert (second.data, second.log, second.source) == (b"code", "a warning", PLAIN)


def test_what_the_cache_gives_is_what_was_compiled(cache: Cache) -> None:
    first, second = (build(SCALE, ["scale<float>"], arch="sm_90", cache=cache) for _ in range(2))
    assert first == second
    assert cache.problem is None


@pytest.mark.parametrize(
    "changed",
    [
        {"source": Source.from_text(SCALE.text + "\n", "scale.cu")},
        {"source": Source.from_text(SCALE.text, "other.cu")},
        {"names": ["scale<int>"]},
        {"names": ["scale<float>", "scale<int>"]},
        {"arch": "sm_90a"},
        {"kind": "ptx"},
        {"options": ["-DX"]},
        {"std": "c++20"},
        {"lineinfo": False},
    ],
    ids=lambda changed: "-".join(changed),
)
def test_changing_an_argument_changes_the_key(cache: Cache, compiled: list[Any], changed: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"source": SCALE, "names": ["scale<float>"], "arch": "sm_90"}
    for each in (arguments, arguments | changed, arguments, arguments | changed):
        build(**each, cache=cache)
    assert len(compiled) == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("_FORMAT", -1),
        ("PRELUDE", "// none\n"),
        ("_wheels", lambda: {"nvidia-cuda-nvrtc": "13.0.1"}),
        ("open_nvrtc", lambda: FakeNvrtc()),
    ],
)
def test_changing_the_compiler_changes_the_key(
    cache: Cache, compiled: list[Any], monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    build(PLAIN, arch="sm_90", cache=cache)
    monkeypatch.setattr(module, name, value)
    build(PLAIN, arch="sm_90", cache=cache)
    assert len(compiled) == 2


class FakeNvrtc:
    """NVRTC of another version."""

    def nvrtcVersion(self) -> tuple[int, int]:
        return 13, 99

    def nvrtcGetSupportedArchs(self) -> list[int]:
        return [90]


def test_changing_a_header_changes_the_key(cache: Cache, compiled: list[Any], root: Path) -> None:
    (root / "a.cuh").write_text("// 1")
    build(Source.from_text('#include "a.cuh"'), arch="sm_90", cache=cache)
    (root / "a.cuh").write_text("// 2")
    build(Source.from_text('#include "a.cuh"'), arch="sm_90", cache=cache)
    assert len(compiled) == 2


def test_the_same_text_in_another_file_is_another_image(cache: Cache, compiled: list[Any], tmp_path: Path) -> None:
    for directory in ("a", "b"):  # each has its own line table
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "x.cu").write_text(PLAIN.text)
        build(Source.find("x", tmp_path / directory), arch="sm_90", cache=cache)
    assert len(compiled) == 2


@pytest.mark.parametrize("option", ["-I/include", "--include-path=/include", "-include=x.h"])
def test_options_that_read_files_are_not_cached(cache: Cache, compiled: list[Any], option: str) -> None:
    for _ in range(2):
        build(PLAIN, arch="sm_90", options=[option], cache=cache)
    assert len(compiled) == 2
    assert not cache.directory.exists()


def test_without_a_cache_each_build_compiles(compiled: list[Any]) -> None:
    for _ in range(2):
        build(PLAIN, arch="sm_90", cache=None)
    assert len(compiled) == 2


# ---- the cache ----------------------------------------------------------------------------------------------------


def flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:20],
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: flip(data, 0),
        lambda data: flip(data, 33),
        lambda data: flip(data, 50),
        lambda data: flip(data, len(data) - 1),
    ],
)
def test_a_damaged_entry_is_compiled_again(cache: Cache, compiled: list[Any], damage: Callable[[bytes], bytes]) -> None:
    build(PLAIN, arch="sm_90", cache=cache)
    (entry,) = kept(cache)
    whole = entry.read_bytes()
    entry.write_bytes(damage(whole))
    assert build(PLAIN, arch="sm_90", cache=cache).data == b"code"
    assert len(compiled) == 2
    assert entry.read_bytes() == whole


def test_an_entry_under_a_foreign_name_is_not_believed(cache: Cache) -> None:
    cache.store("a", {}, b"data")
    (entry,) = kept(cache)
    entry.rename(entry.with_name(entry.name.replace("a", "b", 1)))
    assert cache.load("b") is None


def write_and_read(directory: Path, number: int) -> tuple[bytes, int]:
    """One of several processes: builds, then writes and reads entries that the others write too."""
    cache = Cache(directory)
    data = build(PLAIN, arch="sm_90", cache=cache).data
    good = 0
    for turn in range(100):
        key = f"{turn % 3}"
        cache.store(key, {"by": number}, bytes([number]) * 50_000)
        found = cache.load(key)
        good += found is not None and found[1] == bytes([found[0]["by"]]) * 50_000
    return data, good


def test_processes_that_write_at_once_never_read_a_half(cache: Cache) -> None:
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        results = pool.starmap(write_and_read, [(cache.directory, number) for number in range(4)], chunksize=1)
    assert [good for _, good in results] == [100] * 4
    assert len({data for data, _ in results}) == 1
    assert len(kept(cache)) == 3 + 1  # no temporary file is left


def test_a_place_that_cannot_be_is_no_hindrance(compiled: list[Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for cache in (Cache(tmp_path / "file"), Cache(tmp_path / "file" / "below")):
        assert build(PLAIN, arch="sm_90", cache=cache).data == b"code"
        assert "file" in str(cache.problem)
        cache.clear()


def test_a_read_only_place_still_gives_what_it_has(
    cache: Cache, compiled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "read-only")

    build(PLAIN, arch="sm_90", cache=cache)
    for name in ("os.utime", "os.replace", "tempfile.mkstemp"):
        monkeypatch.setattr(name, refuse)
        build(PLAIN, arch="sm_90", cache=cache)
    assert (len(compiled), cache.problem) == (1, None)
    build(SCALE, arch="sm_90", cache=cache)
    assert "read-only" in str(cache.problem)
    monkeypatch.undo()
    assert len(kept(cache)) == 1


def test_a_failed_write_leaves_nothing_behind(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    cache.store("key", {}, b"data")
    assert "No space left" in str(cache.problem)
    assert kept(cache) == []


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DRVKIT_CACHE_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: Path("~/.cache") / name)
    cache = Cache()
    cache.store("key", {}, b"data")
    assert "not absolute" in str(cache.problem)
    assert list(tmp_path.iterdir()) == []


def test_the_environment_places_the_default_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DRVKIT_CACHE_DIR", str(tmp_path))
    assert DEFAULT_CACHE.directory == tmp_path
    monkeypatch.delenv("DRVKIT_CACHE_DIR")
    assert DEFAULT_CACHE.directory.name == "drvkit"


def test_ptx_of_a_text_is_the_same_in_every_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [build(PLAIN, arch="compute_90", cache=None).data]
    monkeypatch.chdir(tmp_path)
    texts.append(build(PLAIN, arch="compute_90", cache=None).data)
    assert texts[0] == texts[1]
    assert re.findall(rb'\.file\s+\d+ "(.*)"', texts[0]) == [b"kernel.cu"]


def test_what_was_not_used_for_longest_goes_first(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    for age, key in enumerate(["new", "used", "old"]):
        cache.store(key, {}, bytes(1000))
        os.utime(cache.directory / f"{key}.image", (1000 - age, 1000 - age))
    (cache.directory / "foreign").write_bytes(bytes(5000))
    assert cache.load("used")
    monkeypatch.setattr(Cache, "LIMIT_BYTES", 2500)
    another = Cache(cache.directory)  # looks at the directory with its first file
    another.store("newest", {}, bytes(1000))
    assert {path.name for path in kept(cache)} == {"used.image", "newest.image", "foreign"}
    for i in range(50):
        another.store(str(i), {}, bytes(50))  # and again after a sixteenth of the limit
        assert sum(path.stat().st_size for path in cache.directory.glob("*.image")) < 2500 * 17 / 16 + 200


def test_clear_removes_the_entries_only(cache: Cache) -> None:
    cache.clear()
    cache.store("key", {}, b"data")
    (cache.directory / "foreign").touch()
    cache.clear()
    assert [path.name for path in kept(cache)] == ["foreign"]


def test_what_only_looks_like_an_entry_is_in_nobodys_way(cache: Cache, compiled: list[Any]) -> None:
    build(PLAIN, arch="sm_90", cache=cache)
    (entry,) = kept(cache)
    entry.unlink()
    entry.mkdir()
    (cache.directory / "link.image").symlink_to(cache.directory / "nowhere")
    assert build(PLAIN, arch="sm_90", cache=cache).data == b"code"
    assert "directory" in str(cache.problem)
    cache.store("key", {}, b"data")
    cache.clear()
    assert {path.name for path in kept(cache)} == {entry.name, "link.image"}
    assert len(compiled) == 2


def test_compiling_changes_no_bytes_that_others_share() -> None:
    build(Source.from_text("__global__ void k() {}"), arch="sm_90", cache=None)
    assert [bytes([value]) for value in range(256)] == [value.to_bytes(1, "little") for value in range(256)]
    assert struct.pack("b", 32) == b"\x20"
    assert bytes([32])[0] == 32


def test_a_kind_that_there_is_not() -> None:
    with pytest.raises(ValueError, match="kind: wanted cubin or ptx, got 'sass'"):
        build(Source.from_text("__global__ void k() {}"), arch="sm_90", kind="sass", cache=None)  # type: ignore[arg-type]


def test_who_comes_while_another_makes_it_finds_it(tmp_path: Path) -> None:
    """Threads stand for processes: a lock is of whoever has opened the file."""
    cache, made = Cache(tmp_path), list[str]()

    def work() -> None:
        if cache.load("key") is None:
            with cache.alone("key"):
                if cache.load("key") is None:
                    made.append("once")
                    time.sleep(0.1)
                    cache.store("key", {}, b"image")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == ["once"]
    assert cache.load("key") == ({}, b"image")
