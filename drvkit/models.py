"""Hyper-parameters of models whose layers attend to compressed latent rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .rope import Yarn, cos_sin_table

__all__ = ["HALVES", "V4_FLASH", "V4_PRO", "Model"]

# Of the columns that a compressor projects a token to, by ratio: an entry of 4 tokens is of the 4 before them too, so a
# token has half of its columns for the entry that it begins in, and half for the next.
HALVES = {4: 2, 128: 1}


@dataclass(frozen=True)
class Model:
    """Of DeepSeek V4.

    hidden: elements of a token between layers.
    heads: of queries; keys and values are one row for all of them.
    q_latent: elements that queries are projected from.
    groups, o_latent: of heads, and the elements that each is projected to on the way out.
    topk: entries that a query attends to where a layer has an indexer.
    ratios: of each layer, how many tokens an entry stands for; 0: the layer has its window alone.
    dim, rotary: elements of a row, and of these the last ones, which are turned by position.
    window: tokens that a query sees uncompressed, its own among them.
    indexer_heads, indexer_dim: of layers of ratio `indexed`, which choose their entries.
    theta: of layers that have their window alone.
    compressed_theta, yarn: of the others.
    """

    name: str
    hidden: int
    heads: int
    q_latent: int
    groups: int
    o_latent: int
    topk: int
    ratios: tuple[int, ...]
    dim: int = 512
    rotary: int = 64
    window: int = 128
    indexed: int = 4
    indexer_heads: int = 64
    indexer_dim: int = 128
    theta: float = 10000.0
    compressed_theta: float = 160000.0
    yarn: Yarn = field(default_factory=Yarn)
    eps: float = 1e-6
    max_length: int = 2**20

    def cos_sin(self, ratio: int, positions: int) -> NDArray[np.float32]:
        """The table of the layers of a ratio: for queries, window, entries and the indexer alike."""
        if ratio:
            return cos_sin_table(positions, theta=self.compressed_theta, rotary_dim=self.rotary, yarn=self.yarn)
        return cos_sin_table(positions, theta=self.theta, rotary_dim=self.rotary)


V4_PRO = Model("DeepSeek V4-Pro", 7168, 128, 1536, 16, 1024, topk=1024, ratios=(128, 128, *(4, 128) * 29, 4))
V4_FLASH = Model("DeepSeek V4-Flash", 4096, 64, 1024, 8, 1024, topk=512, ratios=(0, 0, *(4, 128) * 20, 4))
