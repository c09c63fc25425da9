"""Small GGUF files of random weights, for tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from drvkit.quants import F32, Q4_1, Q8_0, Quant

VOCABULARY, HIDDEN, HEADS, KV_HEADS, DIM, FFN, LAYERS = 320, 96, 3, 1, 64, 160, 2
END = 2
SHAPES: dict[str, tuple[int, ...]] = {
    "attn_q": (HEADS * DIM, HIDDEN),
    "attn_k": (KV_HEADS * DIM, HIDDEN),
    "attn_v": (KV_HEADS * DIM, HIDDEN),
    "attn_output": (HIDDEN, HEADS * DIM),
    "ffn_gate": (FFN, HIDDEN),
    "ffn_up": (FFN, HIDDEN),
    "ffn_down": (HIDDEN, FFN),
}
METADATA: dict[str, Any] = {
    "general.name": "small",
    "llama.block_count": LAYERS,
    "llama.context_length": 1024,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": FFN,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.key_length": DIM,
    "llama.attention.value_length": DIM,
    "llama.rope.dimension_count": DIM,
    "llama.rope.freq_base": 10000.0,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": VOCABULARY,
    "tokenizer.ggml.eos_token_id": END,
}


def write_model(
    path: Path,
    quant: Quant = Q4_1,
    *,
    of_embedding: Quant = Q8_0,
    head: bool = False,
    architecture: str = "llama",
    metadata: Mapping[str, Any] | None = None,
    tensor: Callable[[str, tuple[int, ...], Quant], tuple[tuple[int, ...], Quant] | None] | None = None,
    extra: Mapping[str, tuple[int, ...]] | None = None,
) -> Path:
    """A model whose tokens depend on all that came before.

    ``metadata`` changes entries, or leaves out those that are None; ``tensor`` gives another shape and format for a
    name, or None to leave it out; ``extra`` are more tensors.
    """
    import gguf

    rng = np.random.default_rng(5)
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (METADATA | dict(metadata or {})).items():
        if isinstance(value, bool | str | list):
            add_value: Any = {bool: writer.add_bool, str: writer.add_string, list: writer.add_array}[type(value)]
            add_value(key, value)
        elif value is not None:
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)

    def add(name: str, shape: tuple[int, ...], how: Quant) -> None:
        changed = tensor(name, shape, how) if tensor else (shape, how)
        if changed is None:
            return
        shape, how = changed
        values = rng.normal(size=shape).astype(np.float32)
        if len(shape) == 1 and how is F32:
            writer.add_tensor(name, 1 + values / 4)
            return
        values *= np.float32(1.5 / shape[-1] ** 0.5)
        writer.add_tensor(name, how.quantise(values), raw_dtype=gguf.GGMLQuantizationType[how.name])

    add("token_embd.weight", (VOCABULARY, HIDDEN), of_embedding)
    add("output_norm.weight", (HIDDEN,), F32)
    if head:
        add("output.weight", (VOCABULARY, HIDDEN), quant)
    for i in range(LAYERS):
        for norm in ("attn_norm", "ffn_norm"):
            add(f"blk.{i}.{norm}.weight", (HIDDEN,), F32)
        for name, of_name in SHAPES.items():
            add(f"blk.{i}.{name}.weight", of_name, quant)
    for name, shape in (extra or {}).items():
        add(name, shape, F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
