"""What the caches of latent attention take: in bfloat16, and as the kernels write them; beside DeepSeek V3.2."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from .models import OVERLAP, V4_FLASH, V4_PRO, Model
from .records import KEY_BF16, KEY_FP8, KEY_MXFP4, KV_BF16, KV_FP8, Format

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["MODELS", "Account", "Cache", "Kind", "account", "size", "table"]

WINDOW_PAGE = 64  # rows
PAGES = {4: 64, 128: 2}  # entries: those of 256 tokens
NAMES = {0: "window alone", 4: "CSA / 4", 128: "HCA / 128"}

V3_2 = "DeepSeek V3.2"
V3_2_ROW = Format("bf16", KV_BF16.number, 576, 2 * 576, 0, 16)  # no kernel here has it
MODELS: dict[str, Model | None] = {"v4-pro": V4_PRO, "v4-flash": V4_FLASH, "v3.2": None}


class Cache(NamedTuple):
    """The formats of its rows: those that queries attend to, and the indexer's keys."""

    kv: Format
    keys: Format

    def __str__(self) -> str:
        return self.kv.name if self.kv.name == "bf16" else f"{self.kv.name}, {self.keys.name}"


class Kind(NamedTuple):
    """Layers of a kind, and what each keeps of a request."""

    name: str  # and how many tokens an entry stands for
    layers: int
    window: int  # rows
    entries: int
    keys: int
    page_size: int  # of entries, and of keys
    state: int  # bytes: of tokens that no entry has yet, or that another entry needs again

    def nbytes(self, cache: Cache, *, in_pages: bool = False) -> int:
        """Of all rows of a layer, or of the pages that they are in."""
        total = 0
        for form, rows, page_size in (
            (cache.kv, self.window, WINDOW_PAGE),
            (cache.kv, self.entries, self.page_size),
            (cache.keys, self.keys, self.page_size),
        ):
            total += -(-rows // page_size) * form.page_bytes(page_size) if in_pages else rows * form.nbytes
        return total


class Account(NamedTuple):
    """Of a request."""

    name: str
    kinds: tuple[Kind, ...]
    caches: tuple[Cache, ...]  # that there is a choice of, bfloat16 first

    def nbytes(self, cache: Cache, *, in_pages: bool = False) -> int:
        return sum(kind.layers * kind.nbytes(cache, in_pages=in_pages) for kind in self.kinds)

    @property
    def state(self) -> int:
        return sum(kind.layers * kind.state for kind in self.kinds)


def account(model: Model | None, tokens: int) -> Account:
    """What a request of so many tokens takes; of DeepSeek V3.2, without a model."""
    if model is None:
        every = Kind("DSA / 1", 61, 0, tokens, tokens, 64, 0)
        return Account(V3_2, (every,), (Cache(V3_2_ROW, KEY_BF16),))
    kinds = []
    for ratio, layers in sorted(Counter(model.ratios).items()):
        entries = tokens // ratio if ratio else 0
        is_indexed = ratio == model.indexed
        # Rows of projections and scores in float32, of as many tokens as an entry is made of.
        overlap = OVERLAP.get(ratio, 0)
        elements = model.dim + model.indexer_dim * is_indexed
        state = (overlap * ratio) * (2 * overlap * elements) * 4
        rows = (min(tokens, model.window), entries, entries * is_indexed)
        kinds.append(Kind(NAMES[ratio], layers, *rows, PAGES.get(ratio, 1), state))
    caches = (Cache(KV_BF16, KEY_BF16), Cache(KV_FP8, KEY_MXFP4), Cache(KV_FP8, KEY_FP8))
    return Account(model.name, tuple(kinds), caches)


def size(nbytes: int) -> str:
    """In the largest unit of which it is one or more, exactly where that takes few digits, else to two places."""
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    short = f"{value:g}"
    return f"{short if float(short) == value else f'{value:.2f}'} {unit}"


def table(model: Model | None, tokens: int, requests: int = 1) -> Table:
    """The account of so many requests, to be printed: a line for each kind of layers, then what they take in all."""
    from rich.table import Table

    own, old = account(model, tokens), account(None, tokens)
    many = f"{requests:,} requests" if requests > 1 else "1 request"
    title = f"{own.name}: {many} of {tokens:,} tokens"
    shown = Table(title=title, title_justify="left", min_width=len(title))
    shown.add_column("layers / ratio")
    for cache in own.caches:
        shown.add_column(str(cache), justify="right")
    for kind in own.kinds:
        for name, layers in ((f"{kind.layers} {kind.name}", kind.layers), ("  each", 1)):
            shown.add_row(name, *(size(requests * layers * kind.nbytes(cache)) for cache in own.caches))
    shown.add_section()
    totals = [requests * own.nbytes(cache) for cache in own.caches]
    shown.add_row("all", *map(size, totals))
    if model is not None:
        paged = [requests * own.nbytes(cache, in_pages=True) for cache in own.caches]
        padding = (size(pages - rows) for pages, rows in zip(paged, totals, strict=True))
        shown.add_row("+ page padding", *padding)
        shown.add_row("+ compressor state", *[size(requests * own.state)] * len(totals))
        shown.add_section()
        before = requests * old.nbytes(old.caches[0])
        shown.add_row(f"{old.name}, {before / totals[0]:.1f}x", size(before))
    return shown
