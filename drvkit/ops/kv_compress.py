"""Tokens of a step into entries of a compressed cache: pooled, normalised, turned by position, encoded, into pages.

Of 4 or of 128 tokens an entry is made, in the step that has the last one of them. What later steps need of a request's
tokens is in its ring. One launch for all; one node serves every step::

    entries = Pages(KV_FP8, pool, block_table, page_size=64)
    kv_compress(graph, tokens, ug, state, rings, ape, weight, cos_sin, entries, ratio=4, after=listed)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..memory import View
from ..models import OVERLAP
from ..records import KEY_BF16, KEY_FP8, KEY_MXFP4, KV_BF16, KV_FP8, Pages
from . import Where, aligned, angles, apart, array, device_of, eps_of, is_a, launch, paged, shaped, submit, whole
from .step_tokens import StepTokens

if TYPE_CHECKING:
    from ..graph import After
    from ..node import Node

__all__ = ["kv_compress", "kv_save"]

FLOAT32, INT32 = np.dtype(np.float32), np.dtype(np.int32)
FORMATS = {4: (KV_FP8, KV_BF16, KEY_MXFP4, KEY_FP8, KEY_BF16), 128: (KV_FP8, KV_BF16)}  # by tokens of an entry
CLUSTER = 8  # blocks that share the channels of an entry of 128 tokens
SHARED_BYTES = {4: 0, 128: 256 * 8 * 16}  # where values of 128 tokens wait: of each thread 8, of four channels
# A team of threads has ceil(max_tokens / FULL) rows of a step, MOST at most: of a prompt's rows one in 4 or in 128 ends
# an entry, and blocks that have nothing to do are not free.
FULL, MOST = {4: 1024, 128: 128}, {4: 4, 128: 32}


def kv_compress(
    where: Where,
    tokens: StepTokens,
    ug: Any,
    state: Any,
    rings: Any,
    ape: Any,
    weight: Any,
    cos_sin: Any,
    entries: Pages,
    *,
    ratio: int,
    hadamard: bool = False,
    eps: float = 1e-6,
    after: After = None,
    name: str | None = None,
) -> Node | None:
    """Make the entries that end in a step, and save what later ones need.

    Entry j of ``ratio`` tokens begins with token ``ratio * j``. Of each of its dim channels it is the sum of values u,
    weighted by the softmax of scores g + ape: over its tokens, if they are 128. If they are 4, a token has two halves
    of dim columns: an entry is of the second half of its tokens and of the first half of the 4 tokens before them; the
    first entry of its own alone. Then ``y = p / sqrt(mean(p^2) + eps) * weight``, and the last 64 elements are turned
    by position ``ratio * j``.

    Args:
        tokens: which token each row is, from `plan_tokens`.
        ug: float32 [max_tokens, 2 * columns]: u, then g, of ``columns`` = 2 * dim of 4 tokens, dim of 128.
        state: float32 [rings, cap, 2 * columns]: rows of ``ug``, of position p at place ``p % cap`` of a request's
            ring. cap is at least 2 * 4, or 128; where up to k tokens of a step may be taken back, so that the next step
            begins up to k positions before this one's end, k - 1 more. Nobody has to clear it.
        rings: int32 [max_requests]: the ring of each request, its own.
        ape: float32 [ratio, columns]: added to the scores of token ``ratio * j + i`` is row i.
        weight: float32 [dim].
        cos_sin: float32 [max_position, 64], see `cos_sin_table`; neighbours are pairs. A position that it lacks becomes
            the nearest that it has; the CPU device reports it.
        entries: where they go, entry j of a request at place j. KV_FP8 or KV_BF16; of 4 tokens also KEY_MXFP4, KEY_FP8
            or KEY_BF16. A table shorter than the request is a ring: entries of a step that a later one would replace
            are not written.
        ratio: 4 or 128.
        hadamard: whether the rows, of 128 elements, are transformed by ``H / sqrt(128)`` before they are encoded. The
            queries have to be, too.

    All in float32, of which a row's squares may not exceed the largest; rounded to bfloat16 once, before a row is
    encoded. An entry's bits depend on its tokens alone, not on the steps that they came in. A request without a ring:
    the CPU device reports it; on a GPU no row of it is saved, and no entry made that ends with such a row or needs one.
    """
    op = "kv_compress"
    saved, read = _checked(op, tokens, ug, state, rings, ratio)
    made = paged(op, "entries", entries, FORMATS[ratio], tokens.max_requests)
    read["entries.block_table"] = made.block_table
    dim = entries.format.dim
    columns = OVERLAP[ratio] * dim
    shaped(f"{op}: ug", read["ug"], (tokens.max_tokens, 2 * columns))
    for role, operand, shape in (("ape", ape, (ratio, columns)), ("weight", weight, (dim,))):
        read[role] = aligned(f"{op}: {role}", array(f"{op}: {role}", operand, [FLOAT32]))
        shaped(f"{op}: {role}", read[role], shape)
    table = read["cos_sin"] = angles(op, cos_sin)
    if hadamard and dim != 128:
        raise ValueError(f"{op}: hadamard is for rows of 128 elements, got {dim}")
    eps = eps_of(op, eps)
    for other, seen in read.items():
        apart(f"{op}: entries.pool", made.pool, other, seen)
        apart(f"{op}: state", saved, other, seen)
    apart(f"{op}: state", saved, "entries.pool", made.pool)

    cluster = CLUSTER if ratio == 128 and device_of(op, where).compute_capability >= (9, 0) else 1
    team_rows = min(-(-tokens.max_tokens // FULL[ratio]), MOST[ratio])
    teams, block = (4, 128) if dim == 128 else (1, 256)
    function = f"{op}<{ratio},{entries.format.number},{str(bool(hadamard)).lower()},{cluster}>"
    args = (
        *(tokens.rows, ug, state, rings, ape, weight, cos_sin, *made.args),
        *(tokens.max_tokens, team_rows, *saved.shape[:2], table.shape[0], eps),
    )
    grid = cluster * -(-tokens.max_tokens // (teams * team_rows))
    attributes: dict[str, Any] = {"shared_mem_bytes": SHARED_BYTES[ratio]}
    if cluster > 1:
        attributes["cluster"] = cluster
    return launch(where, op, function, grid, block, args, after=after, name=name, **attributes)


def kv_save(
    where: Where,
    tokens: StepTokens,
    ug: Any,
    state: Any,
    rings: Any,
    *,
    ratio: int,
    after: After = None,
    name: str | None = None,
) -> Node | None:
    """What `kv_compress` does to ``state``, alone: for steps in which no entry ends (`StepTokens.completed`)."""
    op = "kv_save"
    saved, read = _checked(op, tokens, ug, state, rings, ratio)
    for other, seen in read.items():
        apart(f"{op}: state", saved, other, seen)
    ring_count, cap, width = saved.shape
    args = (tokens.rows, ug, state, rings, tokens.max_tokens, (width // 4).bit_length() - 1, ring_count, cap)
    return submit(where, "kv_compress", op, tokens.max_tokens * (width // 4), args, after, name)


def _checked(op: str, tokens: StepTokens, ug: Any, state: Any, rings: Any, ratio: int) -> tuple[View, dict[str, View]]:
    """What both ops have: the state, and what is read."""
    is_a(StepTokens, op, "tokens", tokens)
    if whole(f"{op}: ratio", ratio) not in FORMATS:
        raise ValueError(f"{op}: ratio: wanted 4 or 128, got {ratio}")
    widths = sorted({2 * OVERLAP[ratio] * format.dim for format in FORMATS[ratio]})
    rows = aligned(f"{op}: ug", array(f"{op}: ug", ug, [FLOAT32]))
    if len(rows.shape) != 2 or rows.shape[0] != tokens.max_tokens or rows.shape[1] not in widths:
        wanted = " or ".join(map(str, widths))
        raise ValueError(f"{op}: ug: wanted shape ({tokens.max_tokens}, {wanted}), got {rows.shape}")
    saved = rings_of(f"{op}: state", state, ratio, rows.shape[1])
    numbers = array(f"{op}: rings", rings, [INT32])
    shaped(f"{op}: rings", numbers, (tokens.max_requests,))
    return saved, {"ug": rows, "rings": numbers, "tokens": array(f"{op}: tokens", tokens.rows, [INT32])}


def rings_of(label: str, state: Any, ratio: int, width: int) -> View:
    """The rings of a state with room for the tokens that an entry is made of; ``width`` is of a token's row."""
    seen = aligned(label, array(label, state, [FLOAT32]))
    least, shape = OVERLAP[ratio] * ratio, seen.shape
    if len(shape) != 3 or not shape[0] or shape[1] < least or shape[2] != width:
        raise ValueError(f"{label}: wanted shape (rings, {least} or more, {width}), got {shape}")
    return seen
