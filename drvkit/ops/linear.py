"""A matrix of weights times the tokens of a step: by a kernel that reads the weights once, or by cuBLAS.

`linear` is for few tokens, as in decoding, where all that counts is how fast the weights are read. Up to 64 tokens it
reads them once. More it takes 64 at a time, which is right and slow: on a GPU `library_linear` is for these. Neither
ever becomes the other::

    project = linear if max_tokens <= 64 else partial(library_linear, workspace=workspace)
    project(graph, x, weight, out, after=normed)
"""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np
from cuda import pathfinder  # type: ignore[import-untyped]

from ..device import Device, Stream
from ..graph import Graph
from ..memory import View, holder
from . import FLOATS, Where, aligned, apart, array, device_of, launch, shaped, span, token_rows, token_stride

if TYPE_CHECKING:
    from ..graph import After
    from ..node import Node

__all__ = ["library_linear", "linear"]

BFLOAT16, FLOAT32, UINT8 = (np.dtype(t) for t in (ml_dtypes.bfloat16, np.float32, np.uint8))
MOST = 2**20  # inputs, outputs

# By the tokens of a block: rows of weights, threads, bytes of shared memory; see cuda_src/linear.cu.
TILES = {16: (64, 256, 94208), 32: (128, 512, 163840), 64: (128, 512, 229376)}
MOST_TOKENS = 65535 * min(TILES)  # as many blocks as a grid has one above the other
MOST_SPLITS = 8  # blocks of a cluster, which share the inputs
LEAST_INPUTS = 512  # of each, so that adding up costs less than it gains
RESIDENT = 2  # blocks of 64 rows that a multiprocessor holds

# Of cuBLAS (cublas_api.h, library_types.h).
OP_N, OP_T, GEMM_DEFAULT, COMPUTE_32F = 0, 1, -1, 68
DISALLOW_REDUCED_PRECISION_REDUCTION = 16
DATA_TYPES = {FLOAT32: 0, BFLOAT16: 14}
LEAST_WORKSPACE = 16384  # bytes


def linear(where: Where, x: Any, weight: Any, out: Any, *, after: After = None, name: str | None = None) -> Node | None:
    """``out[t][n] = sum over k of x[t][k] * weight[n][k]``, in float32, rounded once.

    Args:
        x: bfloat16 [tokens, inputs]. Tokens may be parts of wider rows.
        weight: bfloat16 [outputs, inputs].
        out: bfloat16 or float32 [tokens, outputs], tokens likewise. It overlaps neither ``x`` nor ``weight``.

    Inputs and outputs are multiples of 8. The bits of a token's results depend on that token, on ``weight`` and on how
    many multiprocessors the device has, whatever the other tokens are and however many.
    """
    op = "linear"
    given = _checked(op, where, x, weight, out)
    tokens, (outputs, inputs) = given.x.shape[0], given.weight.shape
    room = given.device.attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
    fitting = [tile for tile, (_, _, shared) in TILES.items() if shared <= room]
    tile = next((tile for tile in fitting if tokens <= tile), fitting[-1])
    rows, threads, shared = TILES[tile]
    splits = _splits(given.device, outputs, inputs)
    grid = (splits, -(-tokens // tile), -(-outputs // rows)) if tokens else 0
    args = (
        *(span(x, given.x), weight, span(out, given.out), tokens, inputs, outputs),
        *(token_stride(given.x), token_stride(given.out)),
    )
    how: dict[str, Any] = {"shared_mem_bytes": shared, "after": after, "name": name}
    if splits > 1:
        how["cluster"] = (splits, 1, 1)
    return launch(where, op, f"{op}<{FLOATS[given.out.dtype]},{tile}>", grid, threads, args, **how)


def library_linear(
    where: Where,
    x: Any,
    weight: Any,
    out: Any,
    *,
    workspace: Any,
    after: After = None,
    name: str | None = None,
) -> Node | None:
    """`linear` by cuBLAS (package ``nvidia-cublas``), for many tokens: sums in float32, rounded once, in an order that
    depends on the number of tokens. In a graph it is a child: cuBLAS chooses its kernels when the node is added.

    Args:
        x, weight, out: as for `linear`. Tokens of ``x`` do not overlap.
        workspace: uint8 [n], n at least 16384, at a multiple of 256 bytes. Whatever else works at the same time needs
            another one. NVIDIA recommends 32 MiB for compute capability 9.0; with less it has fewer ways to choose
            from. All else that cuBLAS needs is made by the first call on a device, for all of them.

    `ImportError` where cuBLAS is not found, `ValueError` on the CPU device.
    """
    op = "library_linear"
    given = _checked(op, where, x, weight, out)
    tokens, inputs = given.x.shape
    if token_stride(given.x) < inputs:
        raise ValueError(f"{op}: x: tokens overlap: strides {given.x.strides} of shape {given.x.shape}")
    room = array(f"{op}: workspace", workspace, [UINT8])
    if room.address % 256 or room.nbytes < LEAST_WORKSPACE:
        wanted = f"{LEAST_WORKSPACE} bytes or more at a multiple of 256"
        raise ValueError(f"{op}: workspace: wanted {wanted}, got {room.nbytes} at {room.address:#x}")
    for role, seen in (("x", given.x), ("weight", given.weight), ("out", given.out)):
        apart(f"{op}: workspace", room, role, seen)
    if given.device.driver.kind != "cuda":
        raise ValueError(f"{op}: {given.device.id} has no cuBLAS: wanted a GPU")
    cublas = _cublas(given.device)

    def multiply(stream: Stream) -> None:
        cublas.multiply(stream, given, room)
        stream.hold(tuple(holder(operand) for operand in (x, weight, out, workspace)))

    if isinstance(where, Stream):
        if after is not None or name is not None:
            raise TypeError(f"{op}: after= and name= are for nodes; a launch comes after what its stream has")
        if tokens:
            multiply(where)
        return None
    if not tokens:
        return where.empty(after=after, name=name)
    with Graph(given.device, op) as captured, given.device.stream() as stream:
        with captured.capture(stream, mode="relaxed", name=op):  # cuBLAS loads its kernels meanwhile
            multiply(stream)
        return where.child(captured, after=after, name=name)


class _Checked(NamedTuple):
    device: Device
    x: View  # [tokens, inputs]
    weight: View  # [outputs, inputs]
    out: View  # [tokens, outputs]


def _checked(op: str, where: Where, x: Any, weight: Any, out: Any) -> _Checked:
    """What the operands show of themselves, where they fit."""
    device = device_of(op, where)
    rows = token_rows(f"{op}: x", x, [BFLOAT16], axes=("tokens", "dim"))
    tokens, inputs = rows.shape
    matrix = aligned(f"{op}: weight", array(f"{op}: weight", weight, [BFLOAT16]))
    outputs = matrix.shape[0] if len(matrix.shape) == 2 else 0
    if matrix.shape != (outputs, inputs):
        raise ValueError(f"{op}: weight: wanted shape (outputs, {inputs}), got {matrix.shape}")
    for role, extent in (("inputs", inputs), ("outputs", outputs)):
        if extent % 8 or not 0 < extent <= MOST:
            raise ValueError(f"{op}: {role}: wanted a multiple of 8 from 8 to {MOST}, got {extent}")
    if tokens > MOST_TOKENS:
        raise ValueError(f"{op}: x: wanted at most {MOST_TOKENS} tokens, got {tokens}")
    result = token_rows(f"{op}: out", out, [BFLOAT16, FLOAT32], axes=("tokens", "dim"))
    shaped(f"{op}: out", result, (tokens, outputs))
    if token_stride(result) < outputs:
        raise ValueError(f"{op}: out: tokens overlap: strides {result.strides} of shape {result.shape}")
    for role, seen in (("x", rows), ("weight", matrix)):
        apart(f"{op}: out", result, role, seen)
    return _Checked(device, rows, matrix, result)


def _splits(device: Device, outputs: int, inputs: int) -> int:
    """Blocks of a cluster: while multiprocessors have none. It decides the order of sums, so it does not depend on the
    number of tokens."""
    blocks, splits = -(-outputs // 64), 1
    if device.compute_capability < (9, 0):
        return splits
    most = min(MOST_SPLITS, inputs // LEAST_INPUTS, RESIDENT * device.multiprocessors // blocks)
    while 2 * splits <= most:
        splits *= 2
    return splits


class _Cublas:
    """cuBLAS for one device. Like the device's primary context it is there until the process ends."""

    def __init__(self, device: Device) -> None:
        try:
            found = pathfinder.load_nvidia_dynamic_lib("cublas")
        except (RuntimeError, OSError) as error:
            raise ImportError(f"library_linear needs cuBLAS (package nvidia-cublas), not found here: {error}") from None
        self.library = ctypes.CDLL(found.abs_path)
        self.library.cublasGetStatusString.restype = ctypes.c_char_p
        self.device, self.lock, self.handle = device, threading.Lock(), ctypes.c_void_p()
        with device.context:
            self._call("cublasCreate_v2", ctypes.byref(self.handle))
            self._call("cublasSetMathMode", self.handle, DISALLOW_REDUCED_PRECISION_REDUCTION)

    def multiply(self, stream: Stream, given: _Checked, workspace: View) -> None:
        """Queue it on ``stream``."""
        (tokens, inputs), outputs = given.x.shape, given.weight.shape[0]
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        big, pointer, kind = ctypes.c_int64, ctypes.c_void_p, DATA_TYPES
        # It has matrices column by column: for it they are all transposed.
        with self.device.context, self.lock:
            self._call("cublasSetStream_v2", self.handle, pointer(int(stream.handle)))  # forgets the workspace
            self._call(
                *("cublasSetWorkspace_v2", self.handle, pointer(workspace.address)), ctypes.c_size_t(workspace.nbytes)
            )
            self._call(
                *("cublasGemmEx_64", self.handle, OP_T, OP_N, big(outputs), big(tokens), big(inputs)),
                *(ctypes.byref(one), pointer(given.weight.address), kind[BFLOAT16], big(inputs)),
                *(pointer(given.x.address), kind[BFLOAT16], big(token_stride(given.x)), ctypes.byref(zero)),
                *(pointer(given.out.address), kind[given.out.dtype], big(token_stride(given.out))),
                *(COMPUTE_32F, GEMM_DEFAULT),
            )

    def _call(self, function: str, *args: Any) -> None:
        if status := getattr(self.library, function)(*args):
            raise RuntimeError(f"{function}: {self.library.cublasGetStatusString(status).decode()}")


_cublas = cache(_Cublas)
