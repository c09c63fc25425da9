"""A Llama in float32 numpy: the truth for the graphs of `drvkit.llama`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..gguf import GgufFile
from ..rope import cos_sin_table
from .kv_write import rotate

__all__ = ["Llama"]

Floats = NDArray[np.float32]


class Llama:
    """The weights of a file, dequantised; `step` adds tokens of one sequence to its keys and values."""

    def __init__(self, file: GgufFile) -> None:
        self.model = file.model
        self.weights = {name: tensor.dequantised() for name, tensor in file.tensors.items()}
        self.cos_sin = cos_sin_table(self.model.context, theta=self.model.theta, rotary_dim=self.model.dim)
        self.reset()

    def reset(self) -> None:
        """A new sequence."""
        shape = (self.model.layers, 2, 0, self.model.kv_heads, self.model.dim)
        self.kv = np.zeros(shape, np.float32)

    def step(self, tokens: Any, layers: list[Floats] | None = None) -> Floats:
        """Logits [tokens, vocabulary] behind each of some more tokens; what each layer gives is added to ``layers``."""
        model, w = self.model, self.weights
        ids = np.asarray(tokens)
        begin = self.kv.shape[2]
        positions = np.arange(begin, begin + len(ids), dtype=np.int32)
        h = w["token_embd.weight"][ids]
        new = np.empty((model.layers, 2, len(ids), model.kv_heads, model.dim), np.float32)
        for i in range(model.layers):
            of = f"blk.{i}."
            x = self._normed(h, w[of + "attn_norm.weight"])
            q, k, v = (self._heads(x @ w[f"{of}attn_{part}.weight"].T) for part in "qkv")
            q, new[i, 0] = (rotate(each, positions, self.cos_sin, "gptj") for each in (q, k))
            new[i, 1] = v
            keys, values = np.concatenate([self.kv[i], new[i]], axis=1)
            h = h + self._attention(q, keys, values, positions) @ w[of + "attn_output.weight"].T
            x = self._normed(h, w[of + "ffn_norm.weight"])
            gate, up = (x @ w[f"{of}ffn_{part}.weight"].T for part in ("gate", "up"))
            h = h + (gate / (1 + np.exp(-gate)) * up) @ w[of + "ffn_down.weight"].T
            if layers is not None:
                layers.append(h)
        self.kv = np.concatenate([self.kv, new], axis=2)
        head = w.get("output.weight", w["token_embd.weight"])
        logits: Floats = self._normed(h, w["output_norm.weight"]) @ head.T
        return logits

    def greedy(self, prompt: Any, count: int) -> tuple[list[int], list[Floats]]:
        """The most likely tokens behind a prompt, up to ``count`` or an end; and the logits that each was chosen by."""
        self.reset()
        logits, tokens = [self.step(prompt)[-1]], [0] * 0
        while True:
            tokens.append(int(logits[-1].argmax()))
            if len(tokens) == count or tokens[-1] in self.model.ends:
                return tokens, logits
            logits.append(self.step(tokens[-1:])[-1])

    def _normed(self, x: Floats, weight: Floats) -> Floats:
        mean = (x * x).mean(axis=-1, keepdims=True)
        normed: Floats = x / np.sqrt(mean + np.float32(self.model.eps)) * weight
        return normed

    def _heads(self, x: Floats) -> Floats:
        return x.reshape(len(x), -1, self.model.dim)

    def _attention(self, q: Floats, keys: Floats, values: Floats, positions: NDArray[np.int32]) -> Floats:
        group = self.model.heads // self.model.kv_heads
        keys, values = (np.repeat(each, group, axis=1) for each in (keys, values))
        x = np.einsum("qhd,thd->hqt", q, keys) * np.float32(self.model.dim**-0.5)
        x = np.where(np.arange(len(keys)) <= positions[:, None], x, -np.inf)
        p = np.exp(x - x.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        out: Floats = np.einsum("hqt,thd->qhd", p, values).reshape(len(q), -1)
        return out
