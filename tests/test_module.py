"""Modules and kernels on a device: images from anywhere, what is in them, and every way of launching."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernels import SOURCE, ints

import drvkit as dk
from drvkit.build import build

N = 1000
X = np.arange(N, dtype=np.float32)
GENERIC = dk.Source.from_text(
    """
    template <class T> __global__ void twice(const T* x, T* y) { *y = *x + *x; }
    namespace inner { template <int k> __global__ void constant(int* y) { *y = k; } }
    """,
    "generic.cu",
)


def check_scale(kernel: dk.Kernel, device: dk.Device, stream: dk.Stream, **how: Any) -> None:
    """That a launch of ``scale`` scales."""
    x, y = device.array(X), device.zeros(N, np.float32)
    given: dict[str, Any] = {"grid": 4, "block": 256} | how
    kernel.launch(stream, args=(x, y, N, 2.0), **given)
    stream.synchronize()
    np.testing.assert_array_equal(y.numpy(), X * 2)


# ---- images --------------------------------------------------------------------------------------------------------


def test_what_is_wrong_with_ptx_is_told_once(device: dk.Device) -> None:
    text = b".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry k() { frob.u32 1; }"
    with pytest.raises(dk.DriverError) as told:
        device.module(dk.Image.from_bytes(text))
    assert str(told.value).count("frob") == 1


@pytest.mark.parametrize("kind", ["cubin", "ptx"])
@pytest.mark.parametrize("given", ["image", "bytes", "path", "text"])
def test_an_image_from_anywhere(device: dk.Device, stream: dk.Stream, tmp_path: Path, kind: Any, given: str) -> None:
    if kind == "cubin" and device.driver.kind == "cpu":
        pytest.skip("the CPU device takes PTX")
    image = build(SOURCE, arch=device.arch, kind=kind)
    path = tmp_path / f"kernels.{kind}"
    path.write_bytes(image.data)
    source: Any = {"image": image, "bytes": image.data, "path": path, "text": str(path)}[given]
    with dk.Module(device, source) as module:
        assert {"scale", "plain", "spin", "every_type"} <= set(module.names())
        assert module.loaded[0].image.kind == kind
        kernel = module.kernel("scale")
        assert module.kernel("_Z5scalePKfPfif").symbol == kernel.symbol
        check_scale(kernel, device, stream)


def test_a_fatbin(device: dk.Device, stream: dk.Stream, tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None or device.driver.kind == "cpu":
        pytest.skip("needs a GPU, and nvcc to make a fatbin")
    text, path = tmp_path / "store.cu", tmp_path / "store.fatbin"
    text.write_text("__global__ void store(int* to, int value) { *to = value; }")
    subprocess.run([nvcc, "-fatbin", f"-arch={device.arch}", "-o", path, text], check=True)
    for source in (path, path.read_bytes()):
        with dk.Module(device, source) as module:
            assert (module.loaded[0].image.kind, module.names()) == ("fatbin", ["store"])
            x = ints(device, 0)
            module.kernel("store").launch(stream, grid=1, block=1, args=(x, 5))
            assert x.numpy(stream).tolist() == [5]


def test_an_image_for_another_gpu_is_refused(device: dk.Device) -> None:
    other = "sm_100" if device.compute_capability[0] < 10 else "sm_90"
    with pytest.raises(dk.DriverError, match=rf"\(module 'image', cubin for {other}, on {device.arch}\)"):
        device.module(build(SOURCE, arch=other))


def test_a_source_that_does_not_compile(device: dk.Device) -> None:
    before = len(dk.live())
    with pytest.raises(dk.CompileError, match="wrong"):
        device.module(dk.Source.from_text("__global__ void k() { wrong }"))
    assert len(dk.live()) == before


def test_templates_are_compiled_when_they_are_asked_for(device: dk.Device, stream: dk.Stream) -> None:
    with device.module(GENERIC) as module:
        assert module.loaded == []
        y = ints(device, 0)
        module.kernel("inner::constant<7>").launch(stream, grid=1, block=1, args=(y,))
        assert y.numpy(stream).tolist() == [7]
        module.kernel("twice< int >").launch(stream, grid=1, block=1, args=(y, y))
        assert y.numpy(stream).tolist() == [14]
        assert len(module.loaded) == 2
        assert module.names() == ["inner::constant<7>", "twice<int>"]
        assert module.kernel("twice<int>") is module.kernel("twice< int >")
        with pytest.raises(ValueError, match=r"module 'generic.cu' is 2 images: see .loaded"):
            module.handle  # noqa: B018 - the look-up is what fails


def test_templates_are_compiled_together(device: dk.Device, stream: dk.Stream) -> None:
    with device.module(GENERIC, ["twice<float>", "twice<double>"]) as module:
        assert len(module.loaded) == 1
        assert int(module.handle)
        for dtype, name in ((np.float32, "twice<float>"), (np.float64, "twice<double>")):
            x = device.array(np.array([1.5], dtype))
            module.kernel(name).launch(stream, grid=1, block=1, args=(x, x))
            assert x.numpy(stream).tolist() == [3.0]
        assert len(module.loaded) == 1


# ---- what is in a module -------------------------------------------------------------------------------------------


def test_variables_are_memory(device: dk.Device, stream: dk.Stream) -> None:
    y = device.zeros(1, np.float32)
    with device.module(SOURCE) as module:
        counters, factor = module.variable("counters", 4, np.int32), module.variable("factor", (), np.float32)
        assert (counters.where, counters.numpy().tolist(), float(factor.numpy())) == ("foreign", [1, 2, 3, 4], 2.0)
        assert module.variable("counters").shape == (16,)
        kernel = module.kernel("use_variables")
        kernel.launch(stream, grid=1, block=1, args=(y,))
        assert y.numpy(stream) == [4.0]
        counters[1:3].fill(5)
        factor.copy_from(np.array(3.0, np.float32))
        kernel.launch(stream, grid=1, block=1, args=(y,))
        assert y.numpy(stream) == [15.0]
    assert counters.numpy().tolist() == [1, 5, 5, 4], "it keeps its image"


def test_each_module_has_its_own_variables(device: dk.Device) -> None:
    with device.module(SOURCE) as first, device.module(SOURCE) as second:
        first.variable("counters", 4, np.int32).fill(9)
        assert second.variable("counters", 4, np.int32).numpy().tolist() == [1, 2, 3, 4]


def test_what_a_kernel_uses(device: dk.Device, module: dk.Module) -> None:
    scale, shared = module.kernel("scale"), module.kernel("static_shared")
    assert 1 <= scale.registers <= 255
    assert (scale.shared_bytes, shared.shared_bytes) == (0, 400)
    assert scale.local_bytes == 0
    assert (scale.max_threads, shared.max_threads) == (1024, 128)
    major, minor = device.compute_capability
    assert scale.attribute("BINARY_VERSION") == 10 * major + minor


def test_occupancy(device: dk.Device, module: dk.Module) -> None:
    reverse = module.kernel("reverse")
    limit = min(device.attribute("MAX_THREADS_PER_MULTIPROCESSOR"), 65536 // max(reverse.registers, 32))
    assert 1 <= reverse.occupancy(1024) <= limit // 1024
    assert reverse.occupancy(256) == reverse.occupancy((16, 4, 4)) > reverse.occupancy(1024)
    whole = device.attribute("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR")
    assert reverse.occupancy(32, 100_000) == whole // (100_000 + device.attribute("RESERVED_SHARED_MEMORY_PER_BLOCK"))
    assert reverse.max_active_clusters(8, 32, cluster=2) >= reverse.max_active_clusters(8, 1024, 100_000, cluster=2) > 0


# ---- launching -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 12_000, 25_600, 50_000])
def test_dynamic_shared_memory(device: dk.Device, module: dk.Module, stream: dk.Stream, n: int) -> None:
    host = np.arange(n, dtype=np.int32)
    x, y = device.array(host), device.zeros(n, np.int32)
    module.kernel("reverse").launch(stream, grid=1, block=256, args=(x, y, n), shared_mem_bytes=4 * n)
    np.testing.assert_array_equal(y.numpy(stream), host[::-1])


def test_the_extents_of_a_launch(device: dk.Device, module: dk.Module, stream: dk.Stream) -> None:
    count, total = ints(device, 0), 0
    extents: list[tuple[Any, Any]] = [(1, 1), (3, 5), ((2, 3), 7), ((2, 3, 4), (5, 6, 7)), ((2, 2), np.int64(8))]
    for grid, block in [*extents, ((1, 65535), 1)]:
        module.kernel("count_threads").launch(stream, grid=grid, block=block, args=(count,))
        total += int(np.prod(grid) * np.prod(block))
        assert count.numpy(stream).tolist() == [total]


def test_clusters(device: dk.Device, module: dk.Module, stream: dk.Stream) -> None:
    extents = ints(device, 0, 0, 0)
    for cluster, want in ((2, [2, 1, 1]), ((2, 2), [2, 2, 1]), ((1, 2, 4), [1, 2, 4])):
        kernel = module.kernel("cluster_extents")
        kernel.launch(stream, grid=(4, 4, 4), block=1, args=(extents,), cluster=cluster)
        assert extents.numpy(stream).tolist() == want


def test_a_cooperative_launch_has_all_blocks_at_once(device: dk.Device, module: dk.Module, stream: dk.Stream) -> None:
    blocks = module.kernel("meet").occupancy(1) * device.multiprocessors
    arrived, seen = ints(device, 0), device.zeros(blocks, np.int32)
    module.kernel("meet").launch(stream, grid=blocks, block=1, args=(arrived, seen), cooperative=True)
    assert set(seen.numpy(stream).tolist()) == {blocks}


ATTRIBUTES: list[dict[str, Any]] = [
    {"priority": -1},
    {"cluster": 2, "cluster_scheduling": "load_balancing"},
    {"mem_sync_domain": "remote"},
    {"mem_sync_domain_map": (0, 1)},
    {"shared_carveout_percent": 50},
    {"programmatic": True, "priority": 0},
    {"cooperative": True},
]


@pytest.mark.parametrize("given", ATTRIBUTES, ids=str)
def test_a_launch_takes_attributes(
    device: dk.Device, module: dk.Module, stream: dk.Stream, given: dict[str, Any]
) -> None:
    check_scale(module.kernel("scale"), device, stream, **given)


def test_a_launch_takes_an_access_policy_window(device: dk.Device, module: dk.Module, stream: dk.Stream) -> None:
    window = dk.AccessPolicyWindow(device.zeros(N, np.float32), 0.5, "persisting", "streaming")
    check_scale(module.kernel("scale"), device, stream, access_policy_window=window)


@pytest.mark.parametrize("given", [{"cluster": 1, "preferred_cluster": 2}, {"nvlink_centric": True}], ids=str)
def test_what_not_every_gpu_has_works_or_is_refused_by_name(
    device: dk.Device, module: dk.Module, stream: dk.Stream, given: dict[str, Any]
) -> None:
    try:
        check_scale(module.kernel("scale"), device, stream, **given)
    except dk.DriverError as error:
        refusal = str(error)
    else:
        return
    assert "kernel scale: grid (4, 1, 1)" in refusal
    assert all(name in refusal for name in given)


def test_events_of_a_launch(device: dk.Device, module: dk.Module, stream: dk.Stream) -> None:
    value, result = ints(device, 0), ints(device, 0)
    started, triggered = device.event(timing=False), device.event(timing=False)
    with device.stream() as other:
        module.kernel("early_trigger").launch(
            stream,
            grid=1,
            block=1,
            args=(value, 5),
            launch_completion_event=started,
            programmatic_event=dk.ProgrammaticEvent(triggered),
        )
        other.wait(started)
        other.wait(triggered)
        other.synchronize()
        assert started.done
        assert triggered.done
        stream.synchronize()
        result.copy_from(value)
    assert result.numpy().tolist() == [5]


def test_a_programmatic_launch_starts_early_and_still_sees_the_result(
    device: dk.Device, module: dk.Module, stream: dk.Stream
) -> None:
    value, results = ints(device, -1), ints(device, *[-1] * 5)
    for i in range(5):
        module.kernel("early_trigger").launch(stream, grid=1, block=1, args=(value, 10 * i))
        module.kernel("late_reader").launch(stream, grid=1, block=1, args=(value, results[i]), programmatic=True)
    assert results.numpy(stream).tolist() == [1, 11, 21, 31, 41]


def test_a_prepared_launch(device: dk.Device, module: dk.Module, stream: dk.Stream) -> None:
    x, y, z = device.array(X), device.zeros(N, np.float32), device.zeros(N, np.float32)
    ready = module.kernel("scale").prepare(stream, grid=4, block=256, args=(x, y, N, 2.0))
    ready()
    np.testing.assert_array_equal(y.numpy(stream), X * 2)
    ready.set(alpha=3.0, y=z)
    ready()
    np.testing.assert_array_equal(z.numpy(stream), X * 3)
    np.testing.assert_array_equal(y.numpy(), X * 2)


# ---- templates whose names say little ------------------------------------------------------------------------------

TEMPLATES = dk.Source.from_text(
    """
    #include <cuda/std/complex>
    namespace dk { template <class T, int N> struct V { T v[N]; }; template <class T> struct Pair { T a, b; }; }
    template <class T> struct same { using type = T; };
    template <class... Ts> __global__ void many(float* y, Ts... xs) { *y = (float(xs) + ... + 0.0f); }
    template <class T, int N> __global__ void dot(dk::V<T, N> v, const T* x, T* y, T alpha) {
      *y = 0;
      for (int i = 0; i < N; ++i) *y += v.v[i] * x[i] * alpha;
    }
    template <template <class> class A, class T> __global__ void total(A<T> a, T* y) { *y = a.a + a.b; }
    template <class T> __global__ void copy(const typename same<T>::type* x, typename same<T>::type* y) { *y = *x; }
    __global__ void turned(const cuda::std::complex<float>* x, cuda::std::complex<float>* y,
                           cuda::std::complex<float> by) { *y = *x * by; }
    """,
    "templates.cu",
)


@pytest.fixture(scope="module")
def templates(device: dk.Device) -> Iterator[dk.Module]:
    names = ["many<>", "many<int,double>", "dot<float,4>", "total<dk::Pair,float>", "copy<double>", "turned"]
    with device.module(TEMPLATES, names) as templates:
        yield templates


def run(kernel: dk.Kernel, stream: dk.Stream, *args: Any) -> None:
    kernel.launch(stream, grid=1, block=1, args=args)
    stream.synchronize()


def test_a_parameter_pack(device: dk.Device, templates: dk.Module, stream: dk.Stream) -> None:
    y = device.zeros(1, np.float32)
    kernel = templates.kernel("many<int,double>")
    assert str(kernel.signature) == "(float*, int, double)"
    run(kernel, stream, y, 3, 0.5)
    assert y.numpy().tolist() == [3.5]
    with pytest.raises(dk.ArgumentError, match=r"args\[1\] wanted int32"):
        run(kernel, stream, y, 3.0, 0.5)
    assert str(templates.kernel("many<>").signature) == "(float*)"
    run(templates.kernel("many<>"), stream, y)
    assert y.numpy().tolist() == [0]


def test_a_type_with_a_value_for_an_argument(device: dk.Device, templates: dk.Module, stream: dk.Stream) -> None:
    x, y, v = device.array(X), device.zeros(1, np.float32), np.array([1, 2, 3, 4], np.float32)
    kernel = templates.kernel("dot<float,4>")
    assert str(kernel.signature) == "(16 bytes v, const float* x, float* y, float alpha)"
    run(kernel, stream, v.tobytes(), x, y, 2)
    assert y.numpy().tolist() == [2 * np.dot(v, X[:4])]
    with pytest.raises(dk.ArgumentError, match=r"args\[1\] 'x' wanted const float\*, a device array of float32"):
        run(kernel, stream, v.tobytes(), device.zeros(4, np.float64), y, 2.0)
    with pytest.raises(dk.ArgumentError, match=r"args\[3\] 'alpha' wanted float32, a number"):
        run(kernel, stream, v.tobytes(), x, y, "2")


def test_a_template_for_an_argument(device: dk.Device, templates: dk.Module, stream: dk.Stream) -> None:
    y, pair = device.zeros(1, np.float32), np.array([1.5, 2], np.float32).tobytes()
    run(templates.kernel("total<dk::Pair,float>"), stream, pair, y)
    assert y.numpy().tolist() == [3.5]
    with pytest.raises(dk.ArgumentError, match=r"args\[1\] 'y' wanted float\*, a device array of float32"):
        run(templates.kernel("total<dk::Pair,float>"), stream, pair, device.zeros(1, np.int32))


def test_a_dependent_type(device: dk.Device, templates: dk.Module, stream: dk.Stream) -> None:
    x, y = device.array(np.array([0.1])), device.zeros(1, np.float64)
    run(templates.kernel("copy<double>"), stream, x, y)
    assert y.numpy().tolist() == [0.1]


def test_complex_numbers(device: dk.Device, templates: dk.Module, stream: dk.Stream) -> None:
    x, y = device.array(np.array([1 + 2j], np.complex64)), device.zeros(1, np.complex64)
    run(templates.kernel("turned"), stream, x, y, 1j)
    assert y.numpy().tolist() == [-2 + 1j]
    with pytest.raises(dk.ArgumentError, match=r"wanted cuda::std::complex<float>\*, a device array of complex64"):
        run(templates.kernel("turned"), stream, x, device.zeros(1, np.complex128), 1j)


# ---- kernels without a mangled name --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bare(device: dk.Device, module: dk.Module) -> Iterator[dk.Module]:
    """The same kernels, as if nobody knew the source."""
    with device.module(dk.Image.from_bytes(module.loaded[0].image.data)) as bare:
        yield bare


def test_its_source_tells_the_types(device: dk.Device, module: dk.Module, stream: dk.Stream) -> None:
    kernel, x, y = module.kernel("plain"), device.array(X), device.zeros(N, np.float32)
    assert str(kernel.signature) == "(const float* x, float* y, unsigned int n)"
    kernel.launch(stream, grid=4, block=256, args=(x, y, N))
    np.testing.assert_array_equal(y.numpy(stream), X + 1)


def test_its_caller_declares_the_types(device: dk.Device, bare: dk.Module, stream: dk.Stream) -> None:
    kernel = bare.kernel("plain", signature="const float* __restrict__ x, float* y, unsigned n")
    x, y = device.array(X), device.zeros(N, np.float32)
    assert str(kernel.signature) == "(const float* x, float* y, unsigned int n)"
    kernel.launch(stream, grid=4, block=256, args=(x, y, N))
    np.testing.assert_array_equal(y.numpy(stream), X + 1)
    with pytest.raises(dk.ArgumentError, match="args\\[0\\] 'x' wanted const float"):
        kernel.launch(stream, grid=4, block=256, args=(device.zeros(N, np.int32), y, N))


def test_its_sizes_are_known_at_least(device: dk.Device, bare: dk.Module, stream: dk.Stream) -> None:
    kernel, x, y = bare.kernel("plain"), device.array(X), device.zeros(N, np.float32)
    assert str(kernel.signature) == "(8 bytes, 8 bytes, 4 bytes)"
    kernel.launch(stream, grid=4, block=256, args=(x, y, np.uint32(N)))
    np.testing.assert_array_equal(y.numpy(stream), X + 1)
    with pytest.raises(dk.ArgumentError, match="wanted a typed value of 4 bytes"):
        kernel.launch(stream, grid=4, block=256, args=(x, y, N))


def test_a_mangled_name_tells_types_but_no_names(device: dk.Device, bare: dk.Module, stream: dk.Stream) -> None:
    kernel = bare.kernel("scale")
    assert str(kernel.signature) == "(const float*, float*, int, float)"
    check_scale(kernel, device, stream)
