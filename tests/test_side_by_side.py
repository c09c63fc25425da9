"""Both devices in one process: every shipped kernel gives the same bits on the CPU device and on a GPU."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from compare import assert_equal_bits
from test_every_kernel import INSTANCES

import drvkit as dk
from drvkit.device import NO_GPU
from drvkit.driver import open_driver

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
