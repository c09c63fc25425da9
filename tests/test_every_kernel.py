"""Every kernel that is shipped compiles for every architecture, without a word from the compiler and without spilling.
No GPU is needed."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from drvkit.build import Image, build
from drvkit.source import Source

CUDA_SRC = Path(__file__).resolve().parent.parent / "cuda_src"
CUBINS = ("sm_80", "sm_90a", "sm_100a", "sm_120")

FLOATS = ("float", "__half", "__nv_bfloat16")
HALVES = ("__half", "__nv_bfloat16")
WIDE = ("float,4", "__half,8", "__nv_bfloat16,8")
QUANTS = ("dk::Q4_1", "dk::Q8_0", "dk::F32", "dk::F16", "dk::BF16")
INTEGERS = ("bool", "signed char", "unsigned char", "short", "unsigned short", "int", "unsigned")
WIDE_INTEGERS = ("long long", "unsigned long long")


def instances(kernel: str, *arguments: str) -> list[str]:
    return [f"{kernel}<{argument}>" for argument in arguments]


INSTANCES: dict[str, list[str]] = {
    "add": [*instances("add", *FLOATS, *WIDE), *instances("add_scalar", *FLOATS, *WIDE)],
    "allreduce_rmsnorm": instances(
        "allreduce_rmsnorm",
        *(f"__nv_bfloat16,__nv_bfloat16,{protocol},false,2,1" for protocol in range(4)),
        *(f"__half,__half,{protocol},true,4,4" for protocol in range(4)),
        *("__nv_bfloat16,__nv_fp8_e4m3,0,false,8,8", "float,float,3,false,8,8", "float,float,1,true,8,2"),
    ),
    "append_token": [],
    "collectives": [
        *instances("allreduce", "__nv_bfloat16,0,false,2,1", "__half,1,true,8,8", "float,2,false,4,2"),
        *instances("allreduce", "__nv_bfloat16,3,false,8,4"),
        *instances("reduce_scatter", "__nv_bfloat16,0,false,2,1", "float,0,false,8,8"),
        *instances("all_gather", "1,false,2", "1,true,8", "2,false,8", "2,true,3"),
        *instances("barrier", "2", "8"),
    ],
    "decode_attention": instances("decode_attention", "__half,64,3,8", "__half,64,3,1", "__nv_bfloat16,128,4,8"),
    "embedding": instances("embedding", *QUANTS),
    "indexer": [
        *instances("indexer_query", "__nv_bfloat16,2", "float,3", "float,4"),
        *instances("indexer_logits", "2", "3", "4"),
    ],
    "kv_compress": instances(
        "kv_compress",
        *("4,0,false,1", "4,1,false,1", "4,2,true,1", "4,3,false,1", "4,4,true,1", "128,0,false,8", "128,1,false,1"),
    ),
    "kv_write": instances(
        "kv_write",
        *(f"{t},{kv},{rotation}" for t in HALVES for kv in (t, "__nv_fp8_e4m3") for rotation in range(3)),
    ),
    "linear": instances("linear", "__nv_bfloat16,16", "__nv_bfloat16,32", "float,64"),
    "paged_attention": [
        *instances(
            "paged_attention",
            *("__nv_bfloat16,__nv_bfloat16,128,16,8,0,1,2,2", "__nv_bfloat16,__nv_bfloat16,256,128,8,0,1,3,1"),
            *("__nv_bfloat16,__nv_fp8_e4m3,128,16,8,15,2,3,2", "__half,__nv_fp8_e4m3,128,32,16,15,1,3,2"),
            *("__half,__half,64,64,16,15,1,3,2", "__half,__nv_fp8_e4m3,256,8,8,15,1,2,2"),
        ),
        *instances("merge_attention", *HALVES),
    ],
    "prefill_attention": instances(
        "prefill_attention",
        *("__nv_bfloat16,__nv_bfloat16,128,16,0", "__half,__half,64,8,15"),
        *("__nv_bfloat16,__nv_fp8_e4m3,128,16,12", "__nv_bfloat16,__nv_bfloat16,256,16,15"),
    ),
    "quantized_linear": [
        *instances(
            "quantized_linear_few",
            *("dk::Q4_1,float,float,kGated,1,3", "dk::Q8_0,float,float,kProduct,1,3", "dk::F32,float,float,kGated,2,3"),
            *("dk::Q4_1,float,float,kProduct,1,6", "dk::Q8_0,float,float,kGated,1,6"),
            *("dk::BF16,__half,float,kProduct,2,3", "dk::F16,float,__half,kProduct,2,3"),
        ),
        *instances(
            "quantized_linear_many",
            *("dk::Q4_1,float,float,kGated,4", "dk::Q8_0,float,float,kProduct,4", "dk::F32,__half,float,kProduct,2"),
            *("dk::F16,float,__half,kGated,1", "dk::BF16,float,float,kProduct,2"),
        ),
    ],
    "query_kv": instances("query_kv", "0", "1"),
    "rms_norm": instances("rms_norm", "1", "2"),
    "sample": instances("argmax", "1", "2", "8"),
    "scale": [
        *instances("scale", *FLOATS, *WIDE),
        *instances("scale_dynamic", *FLOATS, *WIDE),
        *instances("scale_padded", *FLOATS, "int"),
    ],
    "sparse_attention": instances("sparse_attention", "0,false", "0,true", "1,false", "1,true"),
    "step_tokens": [],
    "top_k": [*instances("top_k_short", "1", "4"), *instances("top_k_long", "1", "8")],
    "ulysses": [
        *instances("ulysses_to_heads", "1,2", "2,2", "1,8", "2,8"),
        *instances("ulysses_to_tokens", "1,2", "2,2", "1,8", "2,8"),
    ],
    "set_condition": [
        *instances("set_condition", *INTEGERS, *WIDE_INTEGERS),
        *instances("set_condition_above", *FLOATS, "double", "int"),
        *instances("set_condition_below_count", "int", "unsigned", "long long"),
    ],
}


@pytest.mark.parametrize("stem", sorted({path.stem for path in CUDA_SRC.glob("*.cu")} | set(INSTANCES)))
def test_every_kernel_has_its_instances_listed(stem: str) -> None:
    kernels = Source.find(stem).kernels()
    text = re.sub(r"//.*", "", (CUDA_SRC / f"{stem}.cu").read_text())
    assert len(kernels) == text.count("__global__"), "the source has a kernel that the scanner cannot read"
    listed = {name.split("<")[0] for name in INSTANCES.get(stem, ())}
    assert {kernel.qualified for kernel in kernels if kernel.template} == listed


@pytest.mark.parametrize("arch", CUBINS)
@pytest.mark.parametrize("stem", INSTANCES)
def test_a_cubin_is_made_without_warnings_or_spills(stem: str, arch: str) -> None:
    names = INSTANCES[stem]
    if len(names) > 5 and arch != "sm_90a" and stem not in ("scale", "add", "set_condition"):  # each takes seconds
        names = names[::2]
    image = build(Source.find(stem), names, arch=arch)
    assert not image.log
    frames = stack_frames(image)
    assert {name: frames[symbol] for name, symbol in image.lowered.items() if frames[symbol]} == {}


@pytest.mark.parametrize("stem", INSTANCES)
def test_ptx_has_every_kernel(stem: str) -> None:
    image = build(Source.find(stem), INSTANCES[stem], arch="compute_90a", kind="ptx")
    assert not image.log
    entries = set(re.findall(r"^\.(?:visible|weak) \.entry (\w+)\(", image.data.decode(), re.MULTILINE))
    assert entries >= set(image.lowered.values())


@pytest.mark.parametrize("arch", CUBINS)
def test_a_spill_would_be_seen(arch: str) -> None:
    source = Source.from_text(
        """
        __global__ void spills(float* x, int n) {
          float a[64];
          for (int i = 0; i < 64; ++i) a[i] = x[i * n];
          for (int j = 0; j < n; ++j)
            for (int i = 0; i < 64; ++i) a[i] = a[i] * x[j] + x[i + j];
          for (int i = 0; i < 64; ++i) x[i * n] = a[i];
        }"""
    )
    image = build(source, arch=arch, options=["--maxrregcount=24"])
    assert stack_frames(image)[image.symbol("spills")] > 64


def stack_frames(image: Image) -> dict[str, int]:
    """The bytes of each function's stack frame, where its spilled registers are: EIATTR_FRAME_SIZE in .nv.info."""
    data = image.data
    (start,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", data, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, start + i * size) for i in range(count)]

    def text(table: tuple[int, ...], offset: int) -> str:
        begin = table[4] + offset
        return data[begin : data.index(b"\0", begin)].decode()

    by_name = {text(sections[names_at], section[0]): section for section in sections}
    symbols, info = by_name[".symtab"], by_name[".nv.info"]
    frames, at, end = {}, info[4], info[4] + info[5]
    while at < end:
        form, attribute, length = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == 4:  # the value follows; in the other forms ``length`` is the value
            if attribute == 0x11:
                symbol, nbytes = struct.unpack_from("<II", data, at)
                (name,) = struct.unpack_from("<I", data, symbols[4] + 24 * symbol)
                frames[text(sections[symbols[6]], name)] = nbytes
            at += length
    return frames
