"""What caches take: the published figures, rows and pages by hand, and the command."""

from __future__ import annotations

import re

import numpy as np
import pytest
from compare import assert_equal_bits

from drvkit.__main__ import main
from drvkit.account import MODELS, account, size
from drvkit.models import V4_FLASH, V4_PRO, Model
from drvkit.records import KEY_BF16, KEY_FP8, KEY_MXFP4, KV_BF16, KV_FP8
from drvkit.rope import Yarn, cos_sin_table

MILLION = 2**20
GIB = 2**30


def test_layers_are_as_the_models_have_them() -> None:
    assert [V4_PRO.ratios.count(ratio) for ratio in (0, 4, 128)] == [0, 30, 31]
    assert [V4_FLASH.ratios.count(ratio) for ratio in (0, 4, 128)] == [2, 21, 20]
    assert (len(V4_PRO.ratios), V4_PRO.ratios[:4], V4_PRO.ratios[-1]) == (61, (128, 128, 4, 128), 4)
    assert (len(V4_FLASH.ratios), V4_FLASH.ratios[:4], V4_FLASH.ratios[-1]) == (43, (0, 0, 4, 128), 4)
    for model in (V4_PRO, V4_FLASH):
        assert model.heads // model.groups == 8
        assert (model.dim, KV_FP8.dim, model.indexer_dim, KEY_FP8.dim) == (512, 512, 128, 128)


def test_a_ratio_has_its_own_angles() -> None:
    assert_equal_bits(V4_PRO.cos_sin(0, 500), cos_sin_table(500, theta=10000.0))
    yarn = cos_sin_table(500, theta=160000.0, yarn=Yarn(16, 65536, 32, 1))
    for ratio in (4, 128):
        assert_equal_bits(V4_PRO.cos_sin(ratio, 500), yarn)
    assert not np.array_equal(yarn, V4_PRO.cos_sin(0, 500))


@pytest.mark.parametrize(
    ("model", "bf16", "mxfp4", "fp8"), [(V4_PRO, 9.6246, 4.92, 5.39), (V4_FLASH, 6.72, 3.43, 3.76)]
)
def test_a_million_tokens_take_what_is_published(model: Model, bf16: float, mxfp4: float, fp8: float) -> None:
    of = account(model, MILLION)
    sizes = [of.nbytes(cache) / GIB for cache in of.caches]
    assert sizes == pytest.approx([bf16, mxfp4, fp8], abs=0.005)
    (before,) = account(None, MILLION).caches
    assert account(None, MILLION).nbytes(before) == 1408 * MILLION * 61 == 83.875 * GIB


def test_rows_and_pages_by_hand() -> None:
    csa, hca = account(V4_PRO, 1000).kinds
    bf16, mxfp4, fp8 = account(V4_PRO, 1000).caches
    assert (bf16, mxfp4, fp8) == ((KV_BF16, KEY_BF16), (KV_FP8, KEY_MXFP4), (KV_FP8, KEY_FP8))
    assert (csa.window, csa.entries, csa.keys) == (128, 250, 250)
    assert (hca.window, hca.entries, hca.keys) == (128, 7, 0)
    assert csa.nbytes(bf16) == (128 + 250) * 1024 + 250 * 256
    assert csa.nbytes(mxfp4) == (128 + 250) * 584 + 250 * 68
    assert hca.nbytes(fp8) == (128 + 7) * 584
    assert csa.nbytes(mxfp4, in_pages=True) == (2 + 4) * 37440 + 4 * 4352  # of 64 rows
    assert csa.nbytes(fp8, in_pages=True) == (2 + 4) * 37440 + 4 * 8448
    assert hca.nbytes(mxfp4, in_pages=True) == 2 * 37440 + 4 * 1728  # of 64 rows, and of 2
    assert hca.nbytes(bf16, in_pages=True) == 2 * 65536 + 4 * 2048


@pytest.mark.parametrize(
    ("tokens", "rows"), [(0, (0, 0)), (3, (3, 0)), (4, (4, 1)), (127, (127, 31)), (128, (128, 32))]
)
def test_short_requests_have_no_more_rows_than_tokens(tokens: int, rows: tuple[int, int]) -> None:
    csa, hca = account(V4_PRO, tokens).kinds
    assert (csa.window, csa.entries) == rows
    assert (hca.window, hca.entries) == (rows[0], tokens // 128)


def test_a_state_has_the_tokens_that_an_entry_still_needs() -> None:
    csa, hca = account(V4_PRO, 1).kinds
    assert csa.state == 8 * (8192 + 2048)  # rows of 2 * 2 * 512 and of 2 * 2 * 128 float32
    assert hca.state == 128 * 4096
    assert account(V4_PRO, 1).state == 30 * 80 * 1024 + 31 * 512 * 1024
    assert account(V4_FLASH, 1).kinds[0].state == 0


@pytest.mark.parametrize(
    ("nbytes", "said"),
    [
        *((0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (2**20 + 1, "1.00 MiB")),
        *((83875 * GIB // 1000, "83.875 GiB"), (10334431232, "9.62 GiB"), (5 * 2**50, "5120 TiB")),
    ],
)
def test_sizes_are_said_exactly_where_that_is_short(nbytes: int, said: str) -> None:
    assert size(nbytes) == said


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            "v4-pro",
            [
                "9.62 GiB",
                "4.92 GiB",
                "5.39 GiB",
                "DeepSeek V3.2, 8.7x",
                "83.875 GiB",
                "17.84 MiB",
                "320.125 MiB",
                "163.07 MiB",
            ],
        ),
        ("v4-flash", ["6.72 GiB", "3.43 GiB", "DeepSeek V3.2, 12.5x"]),
        ("v3.2", ["DeepSeek V3.2", "83.875 GiB"]),
    ],
)
def test_the_command_prints_the_account(capsys: pytest.CaptureFixture[str], model: str, said: list[str]) -> None:
    assert main(["kvcache", "--model", model, "--tokens", "1048576"]) == 0
    out = capsys.readouterr().out
    assert [each for each in said if each not in out] == []
    assert re.search("1 request of 1,048,576 tokens", out)


def test_requests_multiply(capsys: pytest.CaptureFixture[str]) -> None:
    main(["kvcache", "--tokens", "4096", "--requests", "256"])
    out = capsys.readouterr().out
    of = account(MODELS["v4-pro"], 4096)
    assert "256 requests of 4,096 tokens" in out
    for cache in of.caches:
        assert size(256 * of.nbytes(cache)) in out
        assert size(256 * (of.nbytes(cache, in_pages=True) - of.nbytes(cache))) in out
    assert size(256 * of.state) in out


@pytest.mark.parametrize(
    "wrong", [["--tokens", "0"], ["--tokens", "x"], ["--model", "v5"], ["--requests", "-1"], ["script.py"]]
)
def test_a_wrong_command_line_is_told(capsys: pytest.CaptureFixture[str], wrong: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["kvcache", *wrong])
    assert "error" in capsys.readouterr().err
