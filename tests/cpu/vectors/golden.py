"""What a GPU answered, in two small files: digests of exact results, and samples of those that are approximate.

A record is valid for one text and one set of inputs: `key` tells them from others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .case import AnyNaN, Case, Expected, Near
from .floats import Bits
from .run import Outputs, operands

HERE = Path(__file__).parent
SHORT = 1 << 12  # threads of the inputs that are replayed without a GPU
SAMPLE = 256  # outputs kept of an approximate result


@dataclass(frozen=True)
class Record:
    """Of one case."""

    key: str
    short: str  # digest of what is exact in the outputs for `SHORT` threads
    full: str  # the same for ``threads``
    threads: int


def key(case: Case) -> str:
    given = operands(case, SHORT)
    return _digest([case.ptx().encode(), *(array.tobytes() for array in given)])


def exact_digest(expected: Iterable[Expected], outputs: Outputs) -> str:
    """Of the outputs as they are, but for NaNs of no defined bits, and for approximate ones, which have no part."""
    parts = [
        (want.canonical(got) if isinstance(want, AnyNaN) else got).tobytes()
        for want, got in zip(expected, outputs, strict=True)
        if not isinstance(want, Near)
    ]
    return _digest(parts) if parts else ""


def oracle_agrees(case: Case, recorded: Record, threads: int) -> bool:
    """Whether the oracle says what a GPU answered, for the inputs of `SHORT` threads or of all that were recorded."""
    expected = case.expected(*operands(case, threads))
    told = tuple(
        want.bits if isinstance(want, AnyNaN) else want.want if isinstance(want, Near) else want for want in expected
    )
    if exact_digest(expected, told) != (recorded.short if threads == SHORT else recorded.full):
        return False
    for at, want in enumerate(expected):
        if threads == SHORT and isinstance(want, Near):
            part = Near(want.format, sample(want.want), sample(want.allowed), want.ftz)
            if not part.agrees(samples()[f"{case.name} {at}"]).all():
                return False
    return True


def sample(got: Bits) -> Bits:
    """`SAMPLE` elements, spread over all."""
    return got[:: max(1, len(got) // SAMPLE)][:SAMPLE]


def agreement(want: Expected, got: Bits) -> NDArray[np.bool_]:
    """Where an output is what the oracle says."""
    if isinstance(want, AnyNaN | Near):
        return want.agrees(got)
    return np.asarray(want == got)


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


@lru_cache(maxsize=1)
def records() -> dict[str, Record]:
    """All that were recorded, by the name of the case."""
    path = HERE / "golden.json"
    if not path.exists():
        return {}
    return {name: Record(**fields) for name, fields in json.loads(path.read_text())["cases"].items()}


@lru_cache(maxsize=1)
def samples() -> dict[str, Bits]:
    """Of approximate outputs, by the name of the case, a space and the number of the output."""
    path = HERE / "golden.npz"
    if not path.exists():
        return {}
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


def write(folder: Path, where: dict[str, str], made: dict[str, Record], outputs: dict[str, Bits]) -> None:
    """Both files; one line a case, so that two recordings can be compared."""
    lines = [f"  {json.dumps(name)}: {json.dumps(asdict(record))}" for name, record in made.items()]
    text = f'{{"recorded": {json.dumps(where)},\n "cases": {{\n' + ",\n".join(lines) + "\n}}\n"
    (folder / "golden.json").write_text(text)
    np.savez_compressed(folder / "golden.npz", **outputs)  # type: ignore[arg-type]  # taken for allow_pickle
