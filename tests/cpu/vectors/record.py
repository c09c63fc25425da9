"""Record what a GPU answers: ``python -m tests.cpu.vectors.record --into FOLDER``.

Runs every case on a GPU, compares it with its oracle, and writes ``golden.json``, ``golden.npz`` and, in
``report.txt``, all that was refused or was not as the oracle says. With ``--device cpu --replay`` the CPU device runs
the same inputs, and what differs from the recording is told; then nothing is written. With ``--oracles`` the oracles
are compared with all that was recorded, on no device.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from drvkit.device import Device
from drvkit.driver import DriverError

from . import golden
from .case import AnyNaN, Case, Near
from .cases import CASES, by_group
from .floats import Bits
from .run import Outputs, launch, loaded, operands

EXAMPLES = 6  # shown of each disagreement


@dataclass
class Findings:
    """Of one case."""

    case: Case
    record: golden.Record
    samples: dict[str, Bits]
    differs: int  # outputs that are not as the oracle says
    lines: list[str] = field(default_factory=list)


def judged(case: Case, short: Outputs, full: Outputs, threads: int) -> Findings:
    """One case against its oracle."""
    given = operands(case, threads)
    expected, expected_short = case.expected(*given), case.expected(*operands(case, golden.SHORT))
    lines, differs, error = list[str](), 0, 0.0
    for at, (want, got) in enumerate(zip(expected, full, strict=True)):
        wrong = np.flatnonzero(~golden.agreement(want, got))
        differs += len(wrong)
        if isinstance(want, Near):
            error = max(error, want.error_ulp(got))
        if len(wrong):
            lines.append(f"{case.name}: output {at}: {len(wrong)} of {len(got)} differ")
            lines += [f"    {_example(given, want, got, int(i))}" for i in _varied(wrong)]
        elif isinstance(want, AnyNaN):
            lines += _nans(case, at, want, given, got)
    if error:
        lines.append(f"{case.name}: at most {error:.3f} ulp from the real number")
    record = golden.Record(
        golden.key(case),
        golden.exact_digest(expected_short, short),
        golden.exact_digest(expected, full),
        threads,
    )
    kept = {
        f"{case.name} {at}": golden.sample(got)
        for at, (want, got) in enumerate(zip(expected_short, short, strict=True))
        if isinstance(want, Near)
    }
    return Findings(case, record, kept, differs, lines)


def _varied(wrong: Bits) -> Bits:
    """Some from the front, where the special values are, and some from all over."""
    half = EXAMPLES // 2
    return np.unique(np.concatenate([wrong[:half], wrong[:: max(1, len(wrong) // half)][:half]]))


def _example(given: Sequence[Bits], want: object, got: Bits, at: int) -> str:
    threads = len(got)
    inputs = " ".join(_hex(x.reshape(-1)[at * len(x) // threads]) for x in given)
    if isinstance(want, Near):
        wanted = f"{want.want[at]!r} +- {want.allowed[at]!r}"
        value = want.format.value(np.ascontiguousarray(got[at : at + 1]).view(want.format.word))
        return f"[{at}] {inputs} -> got {_hex(got[at])} {value}, want {wanted}"
    bits = want.bits if isinstance(want, AnyNaN) else want
    assert isinstance(bits, np.ndarray)
    return f"[{at}] {inputs} -> got {_hex(got[at])}, want {_hex(bits[at])}"


def _nans(case: Case, at: int, want: AnyNaN, given: Sequence[Bits], got: Bits) -> list[str]:
    """Which bits the NaNs have that the ISA leaves open."""
    if got.dtype != np.dtype(want.format.word):
        return []
    where = np.flatnonzero(want.format.is_nan(got))
    patterns, first = np.unique(got[where], return_index=True)
    if not len(patterns):
        return []
    lines = [f"{case.name}: output {at}: {len(patterns)} patterns of NaN"]
    return lines + [f"    {_example(given, want, got, int(where[i]))}" for i in first[:EXAMPLES]]


def _hex(value: np.unsignedinteger) -> str:
    return f"{int(value):0{2 * value.dtype.itemsize}x}"


def record(device: Device, chosen: str, threads: int) -> tuple[list[Findings], list[str]]:
    """All cases whose names match, and what went wrong outside of them."""
    pending: dict[str, Future[Findings]] = {}
    troubles: list[str] = []
    workers = os.cpu_count() or 1
    with ThreadPoolExecutor(workers) as pool, device.stream() as stream:
        for group, cases in by_group().items():
            cases = [case for case in cases if re.search(chosen, case.name)]
            start = time.perf_counter()
            with loaded(device, cases) as (kernels, refused):
                took = time.perf_counter() - start
                troubles += [f"REFUSED {name}: {why}" for name, why in refused.items()]
                for case in cases:
                    if case.name not in kernels:
                        continue
                    count = min(threads, case.most)
                    try:
                        short, full = (
                            launch(kernels[case.name], stream, case, operands(case, n)) for n in (golden.SHORT, count)
                        )
                    except DriverError as error:
                        troubles.append(f"FAILED {case.name}, and with it the context: {error}")
                        return settled(pending, troubles), troubles
                    while sum(not future.done() for future in pending.values()) > 2 * workers:
                        time.sleep(0.001)
                    pending[case.name] = pool.submit(judged, case, short, full, count)
            print(f"{group}: {len(cases)} cases, {len(refused)} refused, loaded in {took:.1f} s", flush=True)
        return settled(pending, troubles), troubles


def settled(pending: dict[str, Future[Findings]], troubles: list[str]) -> list[Findings]:
    """All findings; an oracle that broke is a trouble, and does not cost the rest."""
    findings = []
    for name, future in pending.items():
        try:
            findings.append(future.result())
        except Exception as error:
            troubles.append(f"BROKEN ORACLE {name}: {type(error).__name__}: {error}")
    return findings


def replayed(device: Device, chosen: str, threads: int) -> int:
    """How many cases differ from the recording."""
    findings, troubles = record(device, chosen, threads)
    recorded, bad = golden.records(), len(troubles)
    print("\n".join(troubles))
    for each in findings:
        was = recorded.get(each.case.name)
        if was is None or was.key != each.record.key or was.threads != each.record.threads:
            print(f"NOT RECORDED {each.case.name}")
        elif (was.short, was.full) != (each.record.short, each.record.full) or each.differs:
            bad += 1
            print("\n".join([f"DIFFERS {each.case.name}", *each.lines]))
    return bad


def oracles(chosen: str) -> int:
    """How many oracles do not say what was recorded, for all the inputs."""
    cases, recorded = [case for case in CASES if re.search(chosen, case.name)], golden.records()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        agree = pool.map(lambda case: golden.oracle_agrees(case, was := recorded[case.name], was.threads), cases)
        wrong = [case.name for case, good in zip(cases, agree, strict=True) if not good]
    print("\n".join([*(f"DIFFERS {name}" for name in wrong), f"{len(cases)} oracles, {len(wrong)} differ"]))
    return len(wrong)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--threads", type=int, default=1 << 20, help="at most, for each case")
    parser.add_argument("--only", default="", metavar="PATTERN", help="cases whose names match")
    parser.add_argument("--into", type=Path, default=golden.HERE, metavar="FOLDER")
    parser.add_argument("--replay", action="store_true", help="compare with the recording instead")
    parser.add_argument("--oracles", action="store_true", help="compare the oracles with the recording instead")
    options = parser.parse_args()
    if options.oracles:
        return min(oracles(options.only), 1)
    device = Device(options.device)
    start = time.perf_counter()
    if options.replay:
        return min(replayed(device, options.only, options.threads), 1)
    findings, troubles = record(device, options.only, options.threads)
    where = {"device": device.name, "arch": device.arch, "numpy": np.__version__, "python": platform.python_version()}
    where["driver"] = str(device.driver.cuDriverGetVersion())
    made = {each.case.name: each.record for each in findings}
    outputs = {name: bits for each in findings for name, bits in each.samples.items()}
    options.into.mkdir(parents=True, exist_ok=True)
    golden.write(options.into, where, made, outputs)
    differing = [each for each in findings if each.differs]
    others = [each for each in findings if not each.differs and each.lines]
    report = [*troubles, *(line for each in [*differing, *others] for line in each.lines)]
    (options.into / "report.txt").write_text("\n".join(report) + "\n")
    print("\n".join([*troubles, *(line for each in differing for line in each.lines)]))
    spent = time.perf_counter() - start
    print(f"{len(findings)} cases, {len(differing)} differ, {len(troubles)} refused or failed, {spent:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
