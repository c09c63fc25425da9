"""Which central forces close every orbit? Bertrand's theorem (1873), measured: only those of 1/r^2 and of r.

Of a force -r^n an orbit goes between an inner and an outer distance, and turns from one to the other by the apsidal
angle. A near-circular one turns by pi / beta, beta = sqrt(3 + n); it closes if that is a rational part of pi, and all
orbits of a law close only if the angle is the same for every energy and angular momentum. Here orbits of many laws are
integrated in one graph launch: a WHILE node takes some steps of all, as long as any has turning points to come.

    python examples/bertrand.py [--png bertrand.png]
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from _common import open_device
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

import drvkit as dk

LAWS = (-2.5, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0, 6.0)  # n of the force -r^n
SPEEDS = (0.02, 0.25, 0.5, 0.75)  # how far the speed at the inner point is above that of a circle; see Batch
SIZES = (0.8, 1.0, 1.25)  # inner distances
POINTS = 8  # turning points that an orbit has: four radial periods
STEPS, MOST, STRIDE, PLACES = 500, 200_000, 8, 700
BLOCK = 32

CLOSED = 1e-8  # of pi: two apsidal angles that are nearer than this are one
PRECISION = 1e-9  # of an apsidal angle, beside that of the quadrature


@dataclass(frozen=True)
class Turning:
    """What theory says of orbits: outer distances, apsidal angles, and the times of half a radial period."""

    outer: NDArray[np.float64]
    angle: NDArray[np.float64]
    half_period: NDArray[np.float64]


def potential(r: Any, n: float) -> Any:
    return np.log(r) if n == -1 else r ** (n + 1) / (n + 1)


def turning(inner: float, speed: float, n: float, nodes: int = 400) -> tuple[float, float, float]:
    """The outer distance, apsidal angle and half radial period of an orbit that goes by its inner point at ``speed``.

    With u = 1 / r the angle is the integral of du / sqrt(G), G = 2 (E - V(1 / u)) / L^2 - u^2, which is 0 at both ends:
    with u = m + h cos(t) that of dt / sqrt(g), g = G / ((inner - u) (u - outer)), which is smooth and periodic, so that
    the mean over evenly spaced t is exact but for rounding. It is in long double, as near the ends G is a difference.
    """
    long = np.longdouble
    a, momentum = long(inner), long(inner) * long(speed)
    energy = long(speed) ** 2 / 2 + potential(a, n)

    def radial(u: Any) -> Any:
        return 2 * (energy - potential(1 / u, n)) / momentum**2 - u * u

    if n < -1 and energy >= 0:
        raise ValueError(f"n = {n:g}: at {speed:g} from {inner:g} on an orbit has no outer turning point: wanted less")
    circle = momentum ** (-long(2) / (n + 3))  # where G is largest: the distance of the circle with this momentum
    low, high = circle, circle
    while radial(low) > 0:
        low /= 2
    if not radial(1 / a * (1 - long(1e-6))) > 0:
        raise ValueError(f"n = {n:g}: at {speed:g} from {inner:g} on an orbit does not begin at an inner turning point")
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if radial(middle) < 0 else (low, middle)
    top, bottom = 1 / a, high
    t = (np.arange(nodes, dtype=long) + long(0.5)) * long(np.pi) / nodes
    u = (top + bottom) / 2 + (top - bottom) / 2 * np.cos(t)
    root = np.sqrt(radial(u) / ((top - u) * (u - bottom)))
    angle, half_period = np.mean(1 / root), np.mean(1 / (root * momentum * u * u))
    return float(1 / bottom), float(angle) * math.pi, float(half_period) * math.pi


class Batch:
    """Orbits of every law, speed and size, each at its inner turning point on the x axis.

    A circle has the speed ``sqrt(inner^(n + 1))``. Above it an orbit has its outer point further out; where n < -1,
    from ``sqrt(-2 / (n + 1))`` times that on there is none, and ``speeds`` are parts of the way there, in squares; of
    other laws they are parts of the way to 1.6 times a circle's.
    """

    def __init__(
        self, laws: tuple[float, ...] = LAWS, speeds: tuple[float, ...] = SPEEDS, sizes: tuple[float, ...] = SIZES
    ) -> None:
        self.laws, self.of_speeds, self.shape = laws, speeds, (len(laws), len(speeds), len(sizes))
        rows = [(n, part, inner) for n in laws for part in speeds for inner in sizes]
        self.exponents, self.parts, self.inner = (np.array(column) for column in zip(*rows, strict=True))
        most = np.array([-(n + 3) / (n + 1) if n < -1 else 1.5 for n in self.exponents])
        self.speeds = np.sqrt((1 + self.parts * most) * self.inner ** (self.exponents + 1))
        found = [turning(*each) for each in zip(self.inner, self.speeds, self.exponents, strict=True)]
        self.theory = Turning(*(np.array(column) for column in zip(*found, strict=True)))
        zeros = np.zeros(self.count)
        self.states = np.stack([self.inner, zeros, zeros, self.speeds], axis=1)
        energies = [
            v * v / 2 + potential(r, n) for r, v, n in zip(self.inner, self.speeds, self.exponents, strict=True)
        ]
        self.start = np.stack([energies, self.inner * self.speeds], axis=1)
        # Fine enough for the inner point, where the orbit is fastest, and for the way.
        self.steps = np.minimum(self.theory.half_period / 150, 0.025 * self.inner / self.speeds)

    @property
    def count(self) -> int:
        return len(self.exponents)

    def name(self, i: int) -> str:
        return f"orbit {i} (n = {self.exponents[i]:g}, speed {self.speeds[i]:g} at {self.inner[i]:g})"


@dataclass(frozen=True)
class Measured:
    """What the device found: apsidal angles [orbits], drifts of energy and momentum [orbits, 2], places [orbits,
    PLACES, 2] (NaN behind the last), steps taken [orbits], and turns of the WHILE."""

    angles: NDArray[np.float64]
    drift: NDArray[np.float64]
    trace: NDArray[np.float32]
    steps: NDArray[np.int32]


def measure(dev: dk.Device, batch: Batch, *, points: int = POINTS, most: int = MOST, show: bool = False) -> Measured:
    """Integrate all orbits until each has had ``points`` turning points, in one launch. `ValueError` names one that has
    not, after ``most`` steps."""
    orbits = dev.module(dk.Source.find(Path(__file__).with_suffix(".cu"))).kernel("orbits")
    count = batch.count
    states, exponents, steps_of, start = (
        dev.array(each) for each in (batch.states, batch.exponents, batch.steps, batch.start)
    )
    left = dev.array(np.full(count, points, np.int32))
    turns, taken = dev.zeros(count, np.int32), dev.zeros(count, np.int32)
    angles, drift = dev.zeros(count, np.float64), dev.zeros((count, 2), np.float64)
    trace = dev.array(np.full((count, PLACES, 2), np.nan, np.float32))

    graph = dk.Graph(dev, "bertrand")
    go_on = graph.condition(name="any goes on")
    first = graph.set_condition_above(go_on, left, 0, name="any at first")
    body = graph.while_(go_on, after=first, name="integrate")
    arrays = (states, exponents, steps_of, left, turns, taken, angles, start, drift, trace)
    numbers = (count, STEPS, most, STRIDE, PLACES)
    moved = body.kernel(orbits, grid=-(-count // BLOCK), block=BLOCK, args=(*arrays, *numbers), name="orbits")
    body.set_condition_above(go_on, left, 0, after=moved, name="any goes on")
    if show:
        print(graph)
    with graph.instantiate() as exe, dev.stream() as stream:
        exe.launch(stream)
        unfinished = np.flatnonzero(left.numpy(stream))
        if unfinished.size:
            raise ValueError(f"{batch.name(unfinished[0])} has not had {points} turning points after {most} steps")
        return Measured(angles.numpy(stream) / points, drift.numpy(stream), trace.numpy(stream), taken.numpy(stream))


def check(batch: Batch, found: Measured) -> None:
    """Refuse an angle that is not that of the quadrature, a near-circular one that is not pi / beta, and a drift."""
    wrong = np.abs(found.angles / batch.theory.angle - 1)
    if wrong.max() > PRECISION:
        raise ValueError(f"{batch.name(int(wrong.argmax()))}: the angle is off by {wrong.max():.1e} of itself")
    print(f"checked: {batch.count} apsidal angles are those of the integral, but for {wrong.max():.1e} of themselves")
    near = batch.parts == batch.parts.min()
    n, inner, outer = batch.exponents[near], batch.inner[near], batch.theory.outer[near]
    width = (outer - inner) / (outer + inner)
    second = (n - 1) * (n + 2) / 24 * width**2  # why no other law closes near-circular orbits of every width
    of_circle = np.abs(found.angles[near] * np.sqrt(3 + n) / math.pi - 1 - second)
    if (of_circle > width**3).any():
        worst = int(np.flatnonzero(near)[(of_circle - width**3).argmax()])
        raise ValueError(f"{batch.name(worst)}: the angle is not near pi / beta")
    formula = "pi / sqrt(3 + n) * (1 + (n - 1) (n + 2) / 24 * e^2)"
    print(f"checked: near circles they are {formula}, but for {of_circle.max():.1e}")
    energy, momentum = found.drift.max(axis=0)
    if energy > 1e-9 or momentum > 1e-9:
        raise ValueError(f"{batch.name(int(found.drift.max(axis=1).argmax()))}: energy or momentum drifts")
    print(f"checked: energies drift by at most {energy:.1e} of themselves, momenta by {momentum:.1e}")


def verdicts(batch: Batch, found: Measured) -> list[tuple[float, NDArray[np.float64], bool]]:
    """Of each law: n, the angles over pi by speed (means of all sizes), and whether all are the same rational one."""
    angles = (found.angles / math.pi).reshape(batch.shape)
    laws = []
    for n, of_law in zip(batch.laws, angles, strict=True):
        rational = Fraction(float(of_law.mean())).limit_denominator(12)
        laws.append((n, of_law.mean(axis=1), bool((np.abs(of_law - float(rational)) < CLOSED).all())))
    return laws


def table(batch: Batch, found: Measured) -> Table:
    shown = Table(
        "force", "pi / beta", *(f"{part:.0%}" for part in batch.of_speeds), "", title="apsidal angle, in units of pi"
    )
    for n, angles, closes in verdicts(batch, found):
        verdict = "[bold green]every orbit closes" if closes else "precesses"
        shown.add_row(f"r^{n:g}", f"{1 / math.sqrt(3 + n):.6f}", *(f"{angle:.6f}" for angle in angles), verdict)
    return shown


def can_draw(path: Path) -> None:
    """Refuse, before all the work, what `draw` could not do."""
    if importlib.util.find_spec("matplotlib") is None:
        sys.exit("bertrand.py: --png needs matplotlib: pip install matplotlib")
    if path.suffix != ".png" or not path.parent.is_dir():
        sys.exit(f"bertrand.py: --png: wanted a file .png in a folder that there is, got {path}")


def draw(batch: Batch, found: Measured, path: Path) -> None:
    """Orbits of some laws, and the angles of all."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import patches, pyplot

    figure = pyplot.figure(figsize=(13, 7.5), layout="constrained", facecolor="#fbfaf7")
    halves: Any = figure.subfigures(1, 2, width_ratios=[1.45, 1])
    panels, plot = halves
    closing = {n for n, _, closes in verdicts(batch, found) if closes}
    shown = [n for n in (-2.5, -2.0, -1.0, 0.0, 1.0, 3.0) if n in batch.laws]
    part, size = batch.shape[1] // 2, batch.shape[2] // 2
    for axes, n in zip(np.ravel(panels.subplots(2, 3)), shown, strict=False):
        i = int(np.ravel_multi_index((batch.laws.index(n), part, size), batch.shape))
        places = found.trace[i][~np.isnan(found.trace[i, :, 0])]
        colour = "#1a7f4b" if n in closing else "#b5482a"
        for radius in (batch.inner[i], batch.theory.outer[i]):
            axes.add_patch(patches.Circle((0, 0), radius, fill=False, color="#bbb6aa", lw=0.8, ls=(0, (3, 3))))
        axes.plot(*places.T, color=colour, lw=1.3)
        axes.plot(0, 0, "o", color="#333", ms=4)
        reach = 1.08 * batch.theory.outer[i]
        axes.set(aspect="equal", xlim=(-reach, reach), ylim=(-reach, reach))
        axes.set_title(f"force $r^{{{n:g}}}$: {'closes' if n in closing else 'precesses'}", color=colour, fontsize=11)
        axes.axis("off")
    axes = plot.subplots()
    for n, angles, closes in verdicts(batch, found):
        colour, width = ("#1a7f4b", 2.4) if closes else ("#b5482a", 1.1)
        axes.plot(batch.of_speeds, angles, "o-", ms=3.5, color=colour, lw=width)
        axes.annotate(
            f"$r^{{{n:g}}}$", (batch.of_speeds[-1], angles[-1]), (6, -3), textcoords="offset points", fontsize=9
        )
    axes.set(xlabel="speed at the inner point, of the way from circle to escape", ylabel=r"apsidal angle / $\pi$")
    axes.set_title("the same for every orbit: only $r^{-2}$ and $r$", fontsize=11)
    axes.set_xlim(0, 0.84)
    axes.grid(alpha=0.25)
    axes.set_facecolor("#fbfaf7")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=140)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--png", type=Path, help="draw orbits and angles into this file")
    args = parser.parse_args()
    if args.png:
        can_draw(args.png)
    dev = open_device()
    batch = Batch()
    laws, speeds, sizes = batch.shape
    print(f"{batch.count} orbits: {laws} laws, {speeds} speeds, {sizes} sizes; {POINTS} turning points of each")
    found = measure(dev, batch, show=True)
    print(f"one launch: {found.steps.sum():,} steps in {-(-int(found.steps.max()) // STEPS)} turns of the loop")
    check(batch, found)
    Console(width=110).print(table(batch, found))
    closing = [n for n, _, closes in verdicts(batch, found) if closes]
    if closing != [-2.0, 1.0]:
        raise ValueError(f"every orbit closes for n = {closing}; Bertrand's theorem says -2 and 1")
    if args.png:
        draw(batch, found, args.png)
        print(f"drawn: {args.png}")
    print("ok")


if __name__ == "__main__":
    main()
