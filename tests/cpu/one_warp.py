"""A few PTX instructions run by one warp on the CPU device, below the driver."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from drvkit.cpu.memory import memory
from drvkit.cpu.program import load

Words = NDArray[np.uint32]

_KERNEL = """
.version 8.6
.target sm_90a
.address_size 64
.visible .entry warp(.param .u64 given, .param .u64 results)
{{
    .reg .b32 %a<{given}>, %d<{results}>, %r<32>, %lane;
    .reg .f32 %f<32>;
    .reg .b64 %w<64>;
    .reg .f64 %g<32>;
    .reg .pred %p<16>;
    .reg .b64 %base, %out, %offset;
    .shared .align 16 .b8 tile[2048];
    ld.param.u64 %base, [given];
    ld.param.u64 %out, [results];
    mov.u32 %lane, %tid.x;
    mul.wide.u32 %offset, %lane, 4;
    add.s64 %base, %base, %offset;
    add.s64 %out, %out, %offset;
{loads}
{body}
{stores}
    ret;
}}
"""


def kernel(body: str, given: int, results: int, threads: int = 32) -> bytes:
    """PTX: ``body`` finds its words in %a0, %a1, ... and leaves results in %d0, %d1, ...; %lane counts the threads."""
    loads = "\n".join(f"    ld.global.b32 %a{n}, [%base+{4 * threads * n}];" for n in range(given))
    stores = "\n".join(f"    st.global.b32 [%out+{4 * threads * n}], %d{n};" for n in range(results))
    return _KERNEL.format(given=max(given, 1), results=max(results, 1), loads=loads, body=body, stores=stores).encode()


def run(
    body: str, given: Words | None = None, results: int = 1, *, threads: int = 32, mode: str | None = None
) -> Words:
    """What the threads leave in %d0, %d1, ...: an array of (results, threads). ``given`` is one of (words, threads)."""
    given = np.zeros((0, threads), np.uint32) if given is None else np.ascontiguousarray(given, np.uint32)
    assert given.shape[1:] == (threads,)
    program = load(kernel(body, len(given), results, threads), mode=mode)
    nbytes = 4 * max(results, 1) * threads
    source = memory.allocate(max(given.nbytes, 4), "device")
    target = memory.allocate(nbytes, "device")
    try:
        memory.write(source.address, given.tobytes())
        memory.write(target.address, b"\xee" * nbytes)
        params = source.address.to_bytes(8, "little") + target.address.to_bytes(8, "little")
        grid = program.functions["warp"].grid((1, 1, 1), (threads, 1, 1), params)
        while (state := grid.advance()) == "running":
            pass
        assert state == "done", grid.waiting()
        return np.frombuffer(ctypes.string_at(target.address, nbytes), np.uint32).reshape(-1, threads)[:results].copy()
    finally:
        memory.free(source.address)
        memory.free(target.address)
        program.unload()
