"""Hyper-parameters of models whose layers attend to compressed latent rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from .rope import Yarn, cos_sin_table

__all__ = ["OVERLAP", "V4_FLASH", "V4_PRO", "Model"]

OVERLAP = {4: 2, 128: 1}  # by the ratio of a layer: of how many entries a token is a part; it has columns for each


@dataclass(frozen=True)
class Model:
    """Of DeepSeek V4.

    hidden: elements of a token between layers.
    heads: of queries; keys and values are one row for all of them.
    q_latent: elements that queries are projected from.
    groups, o_latent: of heads, and the elements that each is projected to on the way out.
    topk: entries that a query attends to where a layer has an indexer.
    ratios: of each layer, how many tokens an entry stands for, 4 or 128; 0: the layer has its window alone.
    window: tokens that a query sees uncompressed, its own among them.
    indexer_heads: of layers of ratio `indexed`, which choose their entries.
    theta: of layers that have their window alone.
    compressed_theta, yarn: of the others.

    All of them have rows of ``dim`` elements, the last ``rotary`` of which are turned by position, and keys of
    ``indexer_dim``.
    """

    name: str
    hidden: int
    heads: int
    q_latent: int
    groups: int
    o_latent: int
    topk: int
    ratios: tuple[int, ...]
    window: int = 128
    indexer_heads: int = 64
    theta: float = 10000.0
    compressed_theta: float = 160000.0
    yarn: Yarn = field(default_factory=Yarn)
    eps: float = 1e-6
    max_length: int = 2**20

    dim: ClassVar[int] = 512
    rotary: ClassVar[int] = 64
    indexed: ClassVar[int] = 4
    indexer_dim: ClassVar[int] = 128

    def __post_init__(self) -> None:
        for ratio in self.ratios:
            if ratio and ratio not in OVERLAP:
                raise ValueError(f"Model: ratios: {self.name}: wanted 0, 4 or 128 for each layer, got {ratio}")
        if self.groups < 1 or self.heads % self.groups:
            raise ValueError(f"Model: groups: {self.name}: {self.heads} heads are not {self.groups} groups of as many")

    def cos_sin(self, ratio: int, positions: int) -> NDArray[np.float32]:
        """The table of the layers of a ratio: for queries, window, entries and the indexer alike."""
        if ratio:
            return cos_sin_table(positions, theta=self.compressed_theta, rotary_dim=self.rotary, yarn=self.yarn)
        return cos_sin_table(positions, theta=self.theta, rotary_dim=self.rotary)


V4_PRO = Model("DeepSeek V4-Pro", 7168, 128, 1536, 16, 1024, topk=1024, ratios=(128, 128, *(4, 128) * 29, 4))
V4_FLASH = Model("DeepSeek V4-Flash", 4096, 64, 1024, 8, 1024, topk=512, ratios=(0, 0, *(4, 128) * 20, 4))
