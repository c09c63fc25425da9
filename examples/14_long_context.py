"""One sequence grows through layers of DeepSeek V4-Flash's three kinds, each of them one graph that serves every step.

The heads are the model's, 64 of 512; hidden states and latents are made small, and weights are random. Prompt and
decoding are launches of the same graphs: what changes is which tokens a step has, in device memory. Where an entry of 4
or of 128 tokens ends, the graph's IF node has it made; else what later entries need is saved. The last token of every
step is checked against numpy.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
from _common import open_device
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

import drvkit as dk
from drvkit.latent_attention import LatentAttention, Workspace
from drvkit.models import V4_FLASH, Model
from drvkit.ops.step_tokens import StepTokens, plan_tokens
from drvkit.ref.latent_attention import latent_attention
from drvkit.weights import Weights, random_weights

KINDS = {"window": 0, "CSA": 4, "HCA": 128}
BOUND = 2**-6  # of an output's error: a few roundings to bfloat16, and elements on the edge of two codes of e4m3
BOUND_OF_SCORES = 2**-6  # of the sum of what they are made of: elements of keys on the edge of two codes of e2m1


def error(got: NDArray[Any], want: NDArray[Any]) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def check_choice(chosen: NDArray[np.int32], scores: NDArray[Any], magnitudes: NDArray[Any], visible: int) -> None:
    """That no entry of those that a token sees was left out for a worse one. NaN: it sees so few that it takes all."""
    taken = chosen[chosen >= 0]
    if len(taken) != min(visible, len(chosen)) or len(set(taken.tolist())) != len(taken):
        raise ValueError(f"{len(taken)} of {visible} entries were chosen")
    left_out = np.setdiff1d(np.arange(visible), taken)
    if left_out.size and scores[left_out].max() - scores[taken].min() > BOUND_OF_SCORES * magnitudes[:visible].max():
        raise ValueError("an entry was left out for a worse one")


class Layer:
    """Of a kind: its weights and caches, its graph, and the hidden states of the sequence so far."""

    def __init__(self, model: Model, ratio: int, step: Workspace, room: dict[str, Any], counts: Any) -> None:
        self.model, self.ratio, self.step, tokens, dev = model, ratio, step, step.tokens, step.device
        self.weights: Weights = random_weights(model, ratio, np.random.default_rng(ratio))
        self.x = dev.zeros((tokens.max_tokens, model.hidden), ml_dtypes.bfloat16)
        self.y = dev.zeros((tokens.max_tokens, model.hidden), np.float32)
        self.seen = np.empty((0, model.hidden), ml_dtypes.bfloat16)
        cos_sin = dev.array(model.cos_sin(ratio, tokens.max_length))
        layer = LatentAttention(dev, model, ratio, self.weights, cos_sin)
        graph = dk.Graph(dev, f"layer of ratio {ratio}")
        listed = plan_tokens(graph, tokens, *counts, name="tokens")
        assert listed is not None
        layer.add(graph, step, self.x, self.y, layer.caches(**room), after=listed.port("programmatic"))
        self.nodes = sum(1 for _ in graph.walk())
        self.exe = graph.instantiate()

    def run(self, stream: dk.Stream, new: NDArray[Any]) -> tuple[float, float]:
        """Tokens come; gives the time of the launch in us, and how far the last one is off."""
        x = np.zeros(self.x.shape, ml_dtypes.bfloat16)
        x[: len(new)] = new
        self.seen = np.concatenate([self.seen, new])
        self.x.copy_from(x, stream)
        ms = self.exe.time_ms(stream)
        last, y = len(self.seen) - 1, self.y.numpy(stream)
        given = self.step.chosen.numpy(stream)[len(new) - 1, None] if self.ratio == 4 else None
        want = latent_attention(self.seen, self.weights, self.model, self.ratio, first=last, chosen=given)
        if given is not None and want.scores is not None and want.magnitudes is not None:
            check_choice(given[0], want.scores[0], want.magnitudes[0], (last + 1) // 4)
        if y[len(new) :].any():
            raise ValueError("a padded row is not zero")
        return ms * 1e3, error(y[len(new) - 1], want.y[0])


def main() -> None:
    dev = open_device()
    on_gpu = dev.driver.kind == "cuda"
    chunk, topk = (64, V4_FLASH.topk) if on_gpu else (32, 16)  # of 4 topk tokens on, entries are chosen
    ends = [64, 127, 128, 129, 255, 256, 257] + [2047, 2048, 2049, 2052, 2303, 2304] * on_gpu
    model = replace(V4_FLASH, hidden=256, q_latent=64, o_latent=64, topk=topk, ratios=tuple(KINDS.values()))

    tokens = StepTokens(dev, max_tokens=chunk, max_requests=1, max_length=4096 if on_gpu else 512)
    step = Workspace(model, tokens)
    counts = dev.zeros(2, np.int32), dev.zeros(1, np.int32)
    window, pages = 3, tokens.max_length // 256  # of the window a ring: 3 pages of 64 tokens are enough
    room: dict[str, Any] = {
        "window": (window, dev.array(np.arange(window, dtype=np.int32)[None])),
        "entries": (pages, dev.array(np.arange(pages, dtype=np.int32)[None])),
        "rings": (1, dev.zeros(1, np.int32)),
    }
    layers = {name: Layer(model, ratio, step, room, counts) for name, ratio in KINDS.items()}
    nodes = ", ".join(f"{name} {layer.nodes}" for name, layer in layers.items())
    print(f"{model.heads} heads of {model.dim}, top {model.topk}; nodes of a graph: {nodes}")

    columns = "tokens", "new", "entries made", "CSA sees", "HCA sees", *(f"{name}: us, off by" for name in KINDS)
    table = Table(*columns, title="steps of one sequence; the last token's output beside numpy's")
    rng = np.random.default_rng(0)
    length, steps, worst = 0, 0, 0.0
    with dev.stream() as stream:
        while length < ends[-1]:
            n = min(chunk, min(end for end in ends if end > length) - length)
            before, length, steps = length, length + n, steps + 1
            counts[0].copy_from(np.array([0, n], np.int32), stream)
            counts[1].copy_from(np.array([length], np.int32), stream)
            results = []
            for layer in layers.values():
                us, off = layer.run(stream, rng.normal(size=(n, model.hidden)).astype(ml_dtypes.bfloat16))
                worst = max(worst, off)
                results.append(f"{us:.0f}, {off:.1e}")
                if not off < BOUND:
                    raise ValueError(f"{length} tokens, ratio {layer.ratio}: off by {off}")
            made = " + ".join(str(length // ratio - before // ratio) for ratio in (4, 128))
            if length in ends:
                sees = f"{min(length // 4, topk)} of {length // 4}", str(length // 128)
                table.add_row(str(length), str(n), made, *sees, *results)
    Console(width=120).print(table)
    print(f"{steps} steps of {chunk} tokens at most; the worst output is off by {worst:.1e}")
    print("ok")


if __name__ == "__main__":
    main()
