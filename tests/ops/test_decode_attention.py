"""A decode step's attention in one launch: the reference by hand, the checks of the op, the kernel against the
reference."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from compare import assert_close, assert_equal_bits
from numpy.typing import NDArray
from standins import Foreign

from drvkit import ops
from drvkit.device import Device, Stream
from drvkit.driver import DriverError
from drvkit.graph import Graph
from drvkit.ops import decode_attention as op
from drvkit.ops.decode_attention import decode_attention
from drvkit.ref import decode_attention as ref
from drvkit.rope import cos_sin_table

bfloat16, float16, float32, int32 = ml_dtypes.bfloat16, np.float16, np.float32, np.int32
POISON = 77.0
NOBODY = 0x7FFFFFFF  # a page that no kernel may follow


def test_the_reference_by_hand() -> None:
    """Two tokens of one head of two elements: the new one's key, turned by a right angle, is that of the query."""
    cos_sin = np.array([[1, 0], [0, 1]], float32)  # no turn at position 0, a quarter at 1
    k_pool, v_pool = np.zeros((1, 1, 8, 2), float16), np.zeros((1, 1, 8, 2), float16)
    k_pool[0, 0, 0], v_pool[0, 0, 0] = [0, 1], [8, 0]
    qkv = np.array([[[1, 0], [1, 0], [0, 4]]], float32)
    table, lengths = np.array([[0]], int32), np.array([2], int32)
    out, k, v = ref.decode_attention(qkv, k_pool, v_pool, table, lengths, cos_sin, q_heads=1)
    assert (k[0, 0, 1].tolist(), v[0, 0, 1].tolist()) == ([0, 1], [0, 4])
    assert out.tolist() == [[[4, 2]]], "both keys are the query's: the mean of both values"
    assert not k_pool[0, 0, 1].any(), "the reference changes nothing in place"


# ---- the op's checks -------------------------------------------------------------------------------------------------


def fit(**changes: Any) -> dict[str, Any]:
    """Operands that fit, far from each other, save for ``changes``."""
    operands = {
        "qkv": Foreign((5, 10, 64), float32, 1 << 20),
        "k_pool": Foreign((9, 2, 16, 64), float16, 2 << 20),
        "v_pool": Foreign((9, 2, 16, 64), float16, 3 << 20),
        "block_table": Foreign((5, 7), int32, 4 << 20),
        "lengths": Foreign((5,), int32, 5 << 20),
        "cos_sin": Foreign((100, 64), float32, 6 << 20),
        "out": Foreign((5, 6, 64), float32, 7 << 20),
    }
    return operands | changes


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "float16": ({"qkv": Foreign((5, 10, 64), float16)}, TypeError, "qkv: .*float32, got float16"),
    "float16 out": ({"out": Foreign((5, 6, 64), float16)}, TypeError, "out: .*float32, got float16"),
    "no keys": ({"out": Foreign((5, 10, 64), float32, 7 << 20)}, ValueError, "qkv: 10 heads for 10 queries: wanted"),
    "more keys than values": (
        {"out": Foreign((5, 5, 64), float32, 7 << 20)},
        ValueError,
        "qkv: 10 heads for 5 queries",
    ),
    "large groups": (
        {"qkv": Foreign((5, 12, 64), float32, 1 << 20), "out": Foreign((5, 10, 64), float32, 7 << 20)},
        ValueError,
        "qkv: 12 heads for 10 queries: wanted .*1 to 4 times as many",
    ),
    "another dim": (
        {"qkv": Foreign((5, 10, 96), float32, 1 << 20), "out": Foreign((5, 6, 96), float32, 7 << 20)},
        ValueError,
        r"qkv: wanted shape \(up to 65535 requests, heads, 64 or 128\), got \(5, 10, 96\)",
    ),
    "other requests": (
        {"out": Foreign((4, 6, 64), float32)},
        ValueError,
        r"out: wanted shape \(5, 6, 64\), got \(4, 6",
    ),
    "8-bit pools": (
        {"k_pool": Foreign((9, 2, 16, 64), np.uint8)},
        TypeError,
        "k_pool: .*float16 or bfloat16, got uint8",
    ),
    "other heads": (
        {"k_pool": Foreign((9, 3, 16, 64), float16)},
        ValueError,
        r"k_pool: wanted shape \(pages, 2, a page",
    ),
    "pages of 12": (
        {"k_pool": Foreign((9, 2, 12, 64), float16)},
        ValueError,
        r"k_pool: wanted shape \(pages, 2, a page",
    ),
    "pools that differ": (
        {"v_pool": Foreign((9, 2, 16, 64), np.uint16)},
        ValueError,
        "v_pool has dtype bfloat16, k_pool",
    ),
    "other tables": (
        {"block_table": Foreign((4, 7), int32)},
        ValueError,
        r"block_table: wanted shape \(5, table_width\)",
    ),
    "long tables": (
        {"block_table": Foreign((5, 2**26), int32, 1 << 40)},
        ValueError,
        r"block_table: .*2\*\*30 or more",
    ),
    "other lengths": ({"lengths": Foreign((4,), int32)}, ValueError, r"lengths: wanted shape \(5,\), got \(4,\)"),
    "half a rotation": (
        {"cos_sin": Foreign((100, 32), float32)},
        ValueError,
        r"cos_sin: wanted shape \(max_position, 64",
    ),
    "scale": ({"scale": 0}, ValueError, "scale: wanted None or a positive number, got 0"),
    "requests in each other": (
        {"out": Foreign((5, 6, 64), float32, 7 << 20, (512, 256, 4))},
        ValueError,
        r"out: requests overlap: strides \(512, 256, 4\)",
    ),
    "out in qkv": ({"out": Foreign((5, 6, 64), float32, 1 << 20)}, ValueError, "out at .* overlaps qkv at"),
    "one pool for both": (
        {"v_pool": Foreign((9, 2, 16, 64), float16, 2 << 20)},
        ValueError,
        "k_pool at .* overlaps v_pool",
    ),
    "lengths in a pool": ({"lengths": Foreign((5,), int32, 2 << 20)}, ValueError, "k_pool at .* overlaps lengths at"),
}


@pytest.mark.parametrize(("changes", "error", "message"), WRONG.values(), ids=WRONG)
def test_operands_that_do_not_fit_are_refused(
    recorder: Any, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^decode_attention: .*{message}"):
        decode_attention(recorder, **fit(**changes))
    assert not recorder.calls


def of_requests(count: int) -> dict[str, Any]:
    return fit(
        qkv=Foreign((count, 10, 64), float32, 1 << 30),
        out=Foreign((count, 6, 64), float32, 2 << 30),
        lengths=Foreign((count,), int32, 5 << 20),
        block_table=Foreign((count, 7), int32, 4 << 20),
    )


@pytest.mark.parametrize(
    ("requests", "blocks"), [(1, 8), (16, 8), (17, 4), (33, 4), (34, 2), (66, 2), (67, 1), (500, 1)]
)
def test_a_cluster_has_a_request_and_head(recorder: Any, requests: int, blocks: int) -> None:
    node = decode_attention(recorder, **of_requests(requests), after="before", name="n")
    assert node == "kernel node"  # type: ignore[comparison-overlap]
    ((kernel, how),) = recorder.calls
    assert kernel == f"decode_attention: decode_attention<__half,64,3,{blocks}>"
    assert (how["grid"], how["block"]) == ((blocks, 2, requests), 128)
    assert how.get("cluster", (1, 1, 1)) == (blocks, 1, 1)
    assert (how["after"], how["name"]) == ("before", "n")


# ---- the kernel ------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    qkv: NDArray[Any]
    k_pool: NDArray[Any]
    v_pool: NDArray[Any]
    block_table: NDArray[np.int32]
    lengths: NDArray[np.int32]
    cos_sin: NDArray[np.float32]


def case(
    rng: np.random.Generator,
    lengths: list[int],
    *,
    q_heads: int = 3,
    kv_heads: int = 1,
    dim: int = 64,
    page: int = 16,
    dtype: Any = float16,
) -> Case:
    """Requests in shuffled pages; what is not theirs is NaN, and no page."""
    counts = [-(-max(length, 0) // page) for length in lengths]
    pages, width = sum(counts) + 2, max([*counts, 1]) + 1
    numbers = rng.permutation(pages)
    table = np.full((len(lengths), width), NOBODY, int32)
    pools = [np.full((pages, kv_heads, page, dim), np.nan, dtype) for _ in range(2)]
    used = 0
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        table[row, :count] = numbers[used : used + count]
        used += count
        for token in range(length - 1):  # the new one is not there yet
            at = table[row, token // page], slice(None), token % page
            for pool in pools:
                pool[at] = rng.normal(size=(kv_heads, dim)).astype(dtype)
    qkv = rng.normal(size=(len(lengths), q_heads + 2 * kv_heads, dim)).astype(float32)
    cos_sin = cos_sin_table(max(*lengths, 2), theta=1000.0, rotary_dim=dim)
    return Case(qkv, pools[0], pools[1], table, np.array(lengths, int32), cos_sin)


def attended(
    device: Device, stream: Stream, of: Case, q_heads: int, **how: Any
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """What the kernel makes of it, in wider rows, of which nobody may read or write the rest."""
    requests, heads, dim = of.qkv.shape
    with ExitStack() as stack:

        def on_device(values: NDArray[Any]) -> Any:
            return stack.enter_context(device.array(values))

        wide = stack.enter_context(device.empty((requests, heads + 1, dim), float32))
        for row in range(requests):
            if of.lengths[row] > 0:
                wide[row, :heads].copy_from(of.qkv[row])
        k, v, table, lengths, cos_sin = (on_device(each) for each in of[1:])
        out = on_device(np.full((requests, q_heads + 1, dim), POISON, float32))
        decode_attention(stream, wide[:, :heads], k, v, table, lengths, cos_sin, out[:, :q_heads], **how)
        got = out.numpy(stream)
        assert (got[:, q_heads:] == POISON).all()
        return got[:, :q_heads], k.numpy(stream), v.numpy(stream)


def assert_attended(
    of: Case, got: tuple[NDArray[Any], NDArray[Any], NDArray[Any]], *, within: float = 2e-5, **how: Any
) -> None:
    out, k, v = ref.decode_attention(*of, q_heads=got[0].shape[1], **how)
    why = "exponentials by ex2.approx (2^-22), float32 sums of terms of the size of 1"
    assert_close(got[0].astype(np.float64), out, rtol=within, atol=within, why=why)
    assert_equal_bits(got[1], k, any_nan=True)
    assert_equal_bits(got[2], v, any_nan=True)


@pytest.mark.parametrize("lengths", [[1], [2], [130], [128, 0, 129, -4], [17, 1, 300, 64]])
def test_outputs_and_pools_are_those_of_the_reference(
    device: Device, stream: Stream, rng: np.random.Generator, lengths: list[int]
) -> None:
    of = case(rng, lengths)
    assert_attended(of, attended(device, stream, of, 3))


@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "dim", "page", "dtype"),
    [(2, 2, 128, 8, bfloat16), (8, 2, 128, 128, float16), (6, 3, 64, 32, bfloat16)],
)
def test_heads_dims_pages_and_dtypes(
    device: Device,
    stream: Stream,
    rng: np.random.Generator,
    q_heads: int,
    kv_heads: int,
    dim: int,
    page: int,
    dtype: Any,
) -> None:
    of = case(rng, [33, 90], q_heads=q_heads, kv_heads=kv_heads, dim=dim, page=page, dtype=dtype)
    assert_attended(of, attended(device, stream, of, q_heads, scale=0.3), scale=0.3)


def test_large_logits_and_equal_ones(device: Device, stream: Stream, rng: np.random.Generator) -> None:
    of = case(rng, [70, 70])
    of.qkv[0, :3] *= 200
    of.qkv[1, :3] = 0
    assert_attended(of, attended(device, stream, of, 3), within=2e-3)  # logits of 1000 are off by 1e-4 in float32


def test_logits_far_below_zero(device: Device, stream: Stream, rng: np.random.Generator) -> None:
    """All alike: the mean of the values, also where streams have fewer tokens than others."""
    of = case(rng, [70])
    key = rng.normal(size=64).astype(float16).astype(float32)
    of.k_pool[~np.isnan(of.k_pool)] = 0
    of.k_pool[...] = np.where(np.isnan(of.k_pool), np.nan, key)
    of.qkv[0, :3], of.qkv[0, 3] = -60 * key, key
    of.cos_sin[:, :32], of.cos_sin[:, 32:] = 1, 0  # nothing is turned
    assert_attended(of, attended(device, stream, of, 3), within=2e-3)


def test_bits_do_not_depend_on_the_other_requests(device: Device, stream: Stream, rng: np.random.Generator) -> None:
    of = case(rng, [200, 5, 131])
    together, _, _ = attended(device, stream, of, 3)
    for row in range(3):
        some = slice(row, row + 1)
        alone = of._replace(qkv=of.qkv[some], block_table=of.block_table[some], lengths=of.lengths[some])
        assert_equal_bits(attended(device, stream, alone, 3)[0], together[some])


@pytest.mark.parametrize("blocks", [1, 2, 4, 8])
def test_any_number_of_blocks_shares_a_request(
    device: Device, stream: Stream, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, blocks: int
) -> None:
    if blocks > 1 and device.compute_capability < (9, 0):
        pytest.skip("needs clusters")
    monkeypatch.setattr(op, "MOST_BLOCKS", blocks)
    of = case(rng, [150, 0, 1])
    assert_attended(of, attended(device, stream, of, 3))


def test_one_graph_serves_every_step(device: Device, stream: Stream, graph: Graph, rng: np.random.Generator) -> None:
    of = case(rng, [40, 40])
    pools, want = [of.k_pool.copy(), of.v_pool.copy()], of
    for pool in pools:
        pool[:] = 0  # here nothing is there at first
    with ExitStack() as stack:
        qkv, k, v, table, lengths, cos_sin = (
            stack.enter_context(device.array(each)) for each in (of.qkv, *pools, *of[3:])
        )
        out = stack.enter_context(device.zeros((2, 3, 64), float32))
        decode_attention(graph, qkv, k, v, table, lengths, cos_sin, out)
        with graph.instantiate() as exe:
            ops.release()  # the node holds what it uses
            for step in range(1, 8):
                new = rng.normal(size=of.qkv.shape).astype(float32)
                counts = np.array([step, step - 3], int32)
                qkv.copy_from(new)
                lengths.copy_from(counts)
                exe.launch(stream)
                want = Case(new, pools[0], pools[1], of.block_table, counts, of.cos_sin)
                assert_attended(want, (out.numpy(stream), k.numpy(stream), v.numpy(stream)))
                _, *pools = ref.decode_attention(*want, q_heads=3)
        del exe


def test_a_length_beyond_the_table_is_told_by_the_cpu_device(
    capfd: pytest.CaptureFixture[str], rng: np.random.Generator
) -> None:
    victim = Device("cpu:5")
    of = case(rng, [40])
    arrays: Any = [victim.array(each) for each in of._replace(lengths=np.array([70], int32))]
    out = victim.zeros((1, 3, 64), float32)
    operands: Any = (*arrays, out)
    with pytest.raises(DriverError, match="LAUNCH_FAILED"), victim.stream() as stream:
        decode_attention(stream, *operands)
    victim.driver.cuDevicePrimaryCtxReset(victim.handle)
    ops.release(victim)
    for each in (*arrays, out):
        each.close()
    assert "lengths[0] is 70: the block table and cos_sin have room for 40" in capfd.readouterr().out


def test_without_requests_nothing_is_done(device: Device, stream: Stream, graph: Graph) -> None:
    with ExitStack() as stack:
        shapes = (((0, 5, 64), float32), *[((1, 1, 16, 64), float16)] * 2, ((0, 4), int32), ((0,), int32))
        arrays = [
            stack.enter_context(device.zeros(*each)) for each in (*shapes, ((9, 64), float32), ((0, 3, 64), float32))
        ]
        assert decode_attention(stream, *arrays) is None
        node = decode_attention(graph, *arrays)
        assert node is not None
        assert node.kind == "empty"


@pytest.mark.drvkit_check
def test_no_two_warps_race() -> None:
    device = Device("cpu")
    of = case(np.random.default_rng(1), [70, 3])
    with device.stream() as stream:
        attended(device, stream, of, 3)
