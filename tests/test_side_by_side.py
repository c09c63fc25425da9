"""Both devices in one process: every shipped kernel gives the same on the CPU device and on a GPU: the same bits, but
where the hardware's products of fragments and its exp2 leave room."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from compare import assert_close, assert_equal_bits
from test_every_kernel import INSTANCES

import drvkit as dk
from drvkit.device import NO_GPU
from drvkit.driver import open_driver
from drvkit.ops.kv_write import kv_write, slot_mapping
from drvkit.ops.paged_attention import DecodePlan, merge_attention, paged_attention, plan_decode
from drvkit.ops.prefill_attention import PrefillPlan, plan_prefill, prefill_attention

N = 100_003
DTYPES: dict[str, Any] = {"__half": np.float16, "__nv_bfloat16": ml_dtypes.bfloat16, "bool": np.bool_}


@pytest.fixture(scope="module")
def pair() -> tuple[dk.Device, dk.Device]:
    try:
        open_driver("cuda")
    except dk.DriverError as error:
        if error.code not in NO_GPU:
            raise
        pytest.skip("needs a GPU, to stand beside the CPU device")
    return dk.Device("cuda"), dk.Device("cpu")


def values(parameter: Any, rng: np.random.Generator) -> Any:
    """An argument for a parameter: random bits for a pointer, a number for the rest."""
    dtype = np.dtype(DTYPES.get(parameter.type.base) or parameter.type.dtype)
    if parameter.type.pointers and parameter.name != "alpha":
        return rng.integers(0, 256, N * dtype.itemsize, np.uint8).view(dtype)
    if parameter.type.pointers:
        return np.array([1.7], np.float32)
    if parameter.name == "n":
        return N
    return dtype.type(3) if dtype.kind == "i" else dtype.type(rng.normal() * 3)


ELEMENTWISE = [(stem, name) for stem in ("scale", "add") for name in INSTANCES[stem]]


@pytest.mark.parametrize("options", [("-fmad=false",), ()], ids=["no fmad", "default"])
@pytest.mark.parametrize(("stem", "name"), ELEMENTWISE, ids=lambda value: str(value))
def test_an_elementwise_kernel(
    pair: tuple[dk.Device, dk.Device], rng: np.random.Generator, stem: str, name: str, options: tuple[str, ...]
) -> None:
    width = int(re.search(r",(\d+)>", name)[1]) if "," in name else 1  # type: ignore[index]
    given: list[Any] | None = None
    results = []
    for device in pair:
        with device.module(stem, [name], options=options) as module, device.stream() as stream:
            kernel = module.kernel(name)
            given = given or [values(parameter, rng) for parameter in kernel.signature.parameters]
            args = [device.array(value) if isinstance(value, np.ndarray) else value for value in given]
            kernel.launch(stream, grid=-(-N // (256 * width)), block=256, args=tuple(args))
            results.append([arg.numpy(stream) for arg in args if isinstance(arg, dk.Buffer)])
    for gpu, cpu in zip(*results, strict=True):
        assert_equal_bits(cpu, gpu, any_nan=True)


def test_a_graph_that_branches_and_loops(pair: tuple[dk.Device, dk.Device], rng: np.random.Generator) -> None:
    x = rng.uniform(1, 1000, 1000).astype(np.float32)
    for flag in (True, False):
        results = []
        for device in pair:
            scale, add = device.module("scale").kernel("scale<float>"), device.module("add").kernel("add_scalar<float>")
            h, y, choice = device.array(x), device.zeros(1000, np.float32), device.array(np.array([flag]))
            how: dict[str, Any] = {"grid": 4, "block": 256}
            with dk.Graph(device, "both") as graph, device.stream() as stream:
                again = graph.condition(default=1)
                body = graph.while_(again, name="halve until below ten")
                half = body.kernel(scale, args=(h, h, 1000, 0.5), **how)
                body.set_condition_above(again, h, 10.0, after=half)
                chosen = graph.condition(default=0)
                decide = graph.set_condition(chosen, choice, after=body.node)
                yes, no = graph.if_else(chosen, after=decide)
                yes.kernel(add, args=(h, y, 1000, 1.0), **how)
                no.kernel(add, args=(h, y, 1000, -1.0), **how)
                with graph.instantiate() as exe:
                    exe.launch(stream)
                    results.append(y.numpy(stream))
        assert_equal_bits(*results)
        assert results[0].max() <= 11


# ---- attention -----------------------------------------------------------------------------------------------------

bf16, f16, e4m3 = ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn
KV_HEADS, GROUP, DIM, PAGE = 2, 4, 128, 16
WHY = "products of fragments are added up otherwise, exp2 is approximate, and results are rounded"


def normal(rng: np.random.Generator, dtype: Any, *shape: int) -> Any:
    return rng.normal(size=shape).astype(np.float32).astype(dtype)


@pytest.mark.parametrize("style", [None, "neox", "gptj"])
@pytest.mark.parametrize(("dtype", "kv_dtype"), [(bf16, bf16), (f16, f16), (bf16, e4m3), (f16, e4m3)])
def test_keys_and_values_are_written(
    pair: tuple[dk.Device, dk.Device], rng: np.random.Generator, dtype: Any, kv_dtype: Any, style: str | None
) -> None:
    tokens, pages = 50, 7
    rows = rng.integers(0, 256, (2, tokens, KV_HEADS, 2 * DIM), np.uint8).view(dtype)
    q = rng.integers(0, 256, (tokens, KV_HEADS * GROUP, 2 * DIM), np.uint8).view(dtype)
    positions = rng.permutation(pages * PAGE)[:tokens].astype(np.int32)  # of two tokens at one place either may stay
    table = rng.permutation(pages).astype(np.int32).reshape(1, pages)
    scales = np.exp2(rng.uniform(-9, 2, (2, KV_HEADS))).astype(np.float32)
    cos_sin = rng.uniform(-1, 1, (pages * PAGE, DIM)).astype(np.float32)
    results = []
    for device in pair:
        k, v, k_scale, v_scale = (device.array(each) for each in (*rows, *scales))
        k_pool, v_pool = (device.zeros((pages, KV_HEADS, PAGE, DIM), kv_dtype) for _ in range(2))
        at, slots = device.array(positions), device.zeros(tokens, np.int64)
        how: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale} if kv_dtype is e4m3 else {}
        turned = device.array(q)
        if style:
            how |= {"q": turned, "cos_sin": device.array(cos_sin), "positions": at, "style": style}
        with device.stream() as stream:
            slot_mapping(stream, device.array(table), slots, page_size=PAGE, positions=at)
            kv_write(stream, k, v, k_pool, v_pool, slots, **how)
            results.append([each.numpy(stream) for each in (slots, turned, k_pool, v_pool)])
    for gpu, cpu in zip(*results, strict=True):
        assert_equal_bits(cpu, gpu, any_nan=cpu.dtype.kind != "i")


@pytest.mark.parametrize("kv_dtype", [bf16, e4m3])
def test_attention(pair: tuple[dk.Device, dk.Device], rng: np.random.Generator, kv_dtype: Any) -> None:
    lengths = np.array([0, 1, 77, 300], np.int32)
    width = 20
    shape: dict[str, Any] = {"q_heads": KV_HEADS * GROUP, "kv_heads": KV_HEADS, "dim": DIM, "page_size": PAGE}
    shape |= {"table_width": width, "kv_dtype": kv_dtype}
    table = rng.permutation(4 * width).astype(np.int32).reshape(4, width)
    pools = [normal(rng, kv_dtype, 4 * width, KV_HEADS, PAGE, DIM) for _ in range(2)]
    queries = normal(rng, bf16, 4, 1, KV_HEADS * GROUP, DIM)
    starts = np.array([0, 0, 1, 40, 100], np.int32)  # of a prefill: none, 1, 39 and 60 queries
    prompt = normal(rng, bf16, 110, KV_HEADS * GROUP, DIM)
    sinks = normal(rng, np.float32, KV_HEADS * GROUP)
    results = []
    for device in pair:
        k, v, pages, tokens, sink = (device.array(each) for each in (*pools, table, lengths, sinks))
        made = []
        with (
            device.stream() as stream,
            DecodePlan(device, requests=4, batch_invariant=True, **shape) as decode,
            PrefillPlan(device, max_tokens=110, max_requests=4, **shape) as prefill,
        ):
            for plan, q in ((decode, device.array(queries)), (prefill, device.array(prompt))):
                out, lse = device.zeros(q.shape, bf16), device.zeros(q.shape[:-1], np.float32)
                if plan is decode:
                    plan_decode(stream, decode, tokens)
                    paged_attention(stream, decode, q, k, v, pages, out, lse=lse, sinks=sink)
                else:
                    plan_prefill(stream, prefill, device.array(starts), tokens)
                    prefill_attention(stream, prefill, q, k, v, pages, out, lse=lse, sinks=sink)
                    tiles = prefill.schedule.numpy(stream)
                made += [out, lse]
            outs = device.array(normal(np.random.default_rng(0), bf16, 3, 40, DIM))
            lses = device.array(normal(np.random.default_rng(1), np.float32, 3, 40))
            merged, whole = device.zeros((40, DIM), bf16), device.zeros(40, np.float32)
            merge_attention(stream, outs, lses, merged, whole)
            results.append([each.numpy(stream) for each in (*made, merged, whole)])
            results[-1].append(tiles)
    for gpu, cpu in zip(*results, strict=True):
        if cpu.dtype.kind == "i":
            assert_equal_bits(cpu, gpu)
        else:
            close = 2**-7 if cpu.dtype == bf16 else 2**-16
            assert_close(cpu, gpu, rtol=close, atol=close, why=WHY)
