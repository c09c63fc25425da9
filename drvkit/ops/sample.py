"""The next token of each row of logits, for a decode loop on the device: the best one, or one drawn from the best.

All that changes from step to step is the contents of device memory, so one node serves every step::

    best = top_k(graph, logits, widths, candidates, after=projected)
    sample(
        graph, logits, candidates, tokens,
        temperature=temperature, top_p=top_p, seeds=seeds, counters=lengths, after=best,
    )

In both a larger logit comes before a smaller one, of equal ones that of the smaller index; -0 equals +0. NaN and -inf
are never taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..memory import View
from . import Where, apart, array, device_of, launch, shaped, span, token_rows, token_stride
from .top_k import blocks_of_row

if TYPE_CHECKING:
    from ..graph import After
    from ..node import Node

__all__ = ["argmax", "sample"]

FLOAT32, INT32, UINT64 = (np.dtype(t) for t in (np.float32, np.int32, np.uint64))
THREADS, MOST_CANDIDATES = 512, 1024  # of a block of argmax; of a row, each with a thread


def argmax(
    where: Where, logits: Any, tokens: Any, *, counts: Any = None, after: After = None, name: str | None = None
) -> Node | None:
    """The index of the best logit of each row; -1 where none can be taken.

    Args:
        logits: float32 [rows, vocabulary]; rows start at multiples of 16 bytes and may be longer than ``vocabulary``.
        tokens: int32 [rows], written.
        counts: int32 [rows]; a row with 0 or less is padding: its token is -1, and nothing of its logits is read.
    """
    op = "argmax"
    device = device_of(op, where)
    table = _rows(op, logits)
    rows, vocabulary = table.shape
    result = _of_rows(op, "tokens", tokens, INT32, rows)
    apart(f"{op}: tokens", result, "logits", table)
    if counts is not None:
        apart(f"{op}: tokens", result, "counts", _of_rows(op, "counts", counts, INT32, rows))

    blocks = blocks_of_row(device, rows, vocabulary)
    attributes = {"cluster": blocks} if blocks > 1 else {}
    args = (span(logits, table), counts, tokens, vocabulary, token_stride(table))
    function = f"{op}<{blocks}>"
    return launch(where, "sample", function, rows * blocks, THREADS, args, after=after, name=name, op=op, **attributes)


def sample(
    where: Where,
    logits: Any,
    candidates: Any,
    tokens: Any,
    *,
    temperature: Any,
    top_p: Any,
    seeds: Any,
    counters: Any,
    after: After = None,
    name: str | None = None,
) -> Node | None:
    """One of the candidates of each row, drawn by their logits; -1 where none can be taken.

    Args:
        logits: float32 [rows, vocabulary], as for `argmax`. Only those of candidates are read.
        candidates: int32 [rows, k], k up to 1024, as `top_k` gives them, but in any order; negative for none. One
            beyond the vocabulary is none too; the CPU device reports it.
        tokens: int32 [rows], written.
        temperature: float32 [rows]. 0 or less, or NaN, takes the best candidate.
        top_p: float32 [rows]. Kept are the best candidates with together at least so much of the probability of all: as
            few as have it, and at least one. 1 or more, or NaN, keeps all.
        seeds: uint64 [rows].
        counters: int32 [rows], such as the row's length: what is to change from step to step. With 0 or less a row is
            padding: its token is -1, and nothing else of it is read.

    Candidate i in their order, with logit l[i], has the weight ``round(2^30 * exp((l[i] - l[0]) / temperature))``, and
    the token is the first of the kept whose sum with those before is above ``u`` times the sum of the kept. ``u`` in
    [0, 1) is the upper 24 bits of the first word of Philox4x32-10 with key ``seeds[r]`` and counter
    ``(counters[r], 0, 0, 0)``: rows with the same two draw the same. Where each step rounds is said by
    `drvkit.ref.sample`, which gives the same tokens; so does every device.
    """
    op = "sample"
    table = _rows(op, logits)
    rows, vocabulary = table.shape
    chosen = array(f"{op}: candidates", candidates, [INT32])
    if len(chosen.shape) != 2 or chosen.shape[0] != rows or not 1 <= chosen.shape[1] <= MOST_CANDIDATES:
        raise ValueError(f"{op}: candidates: wanted shape ({rows}, 1 to {MOST_CANDIDATES}), got {chosen.shape}")
    read = {"logits": table, "candidates": chosen}
    for role, operand, dtype in (
        ("temperature", temperature, FLOAT32),
        ("top_p", top_p, FLOAT32),
        ("seeds", seeds, UINT64),
        ("counters", counters, INT32),
    ):
        read[role] = _of_rows(op, role, operand, dtype, rows)
    result = _of_rows(op, "tokens", tokens, INT32, rows)
    for role, seen in read.items():
        apart(f"{op}: tokens", result, role, seen)

    k = chosen.shape[1]
    block = max(32, 1 << (k - 1).bit_length())
    per_row = (candidates, temperature, top_p, seeds, counters, tokens)
    args = (span(logits, table), *per_row, vocabulary, k, token_stride(table))
    return launch(where, op, op, rows, block, args, after=after, name=name)


def _rows(op: str, logits: Any) -> View:
    seen = token_rows(f"{op}: logits", logits, [FLOAT32], axes=("rows", "vocabulary"))
    rows, vocabulary = seen.shape
    if vocabulary >= 2**30 or rows >= 2**31:
        raise ValueError(f"{op}: logits: wanted fewer than 2**31 rows of fewer than 2**30, got {seen.shape}")
    return seen


def _of_rows(op: str, role: str, operand: Any, dtype: np.dtype[Any], rows: int) -> View:
    seen = array(f"{op}: {role}", operand, [dtype])
    shaped(f"{op}: {role}", seen, (rows,))
    return seen
