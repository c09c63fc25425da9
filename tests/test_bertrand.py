"""The orbits of `examples/bertrand.py`: its theory against closed forms, the device against its theory."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from drvkit.device import Device

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture(scope="module")
def bertrand() -> Iterator[ModuleType]:
    sys.path.insert(0, str(EXAMPLES))
    spec = importlib.util.spec_from_file_location("bertrand", EXAMPLES / "bertrand.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bertrand"] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(EXAMPLES))
    del sys.modules["bertrand"]


@pytest.mark.parametrize("eccentricity", [0.01, 0.3, 0.9])
def test_theory_is_kepler_for_an_inverse_square(bertrand: ModuleType, eccentricity: float) -> None:
    inner = 1.3
    outer, angle, half = bertrand.turning(inner, math.sqrt((1 + eccentricity) / inner), -2.0)
    axis = inner / (1 - eccentricity)
    assert outer == pytest.approx(axis * (1 + eccentricity), rel=1e-13)
    assert angle == pytest.approx(math.pi, rel=1e-12)
    assert half == pytest.approx(math.pi * axis**1.5, rel=1e-12)


def test_theory_is_an_ellipse_about_its_centre_for_a_spring(bertrand: ModuleType) -> None:
    outer, angle, half = bertrand.turning(0.7, 2.0, 1.0)  # x = 0.7 cos t, y = 2 sin t
    assert (outer, angle, half) == pytest.approx((2.0, math.pi / 2, math.pi / 2), rel=1e-12)


def test_theory_is_half_a_turn_over_beta_near_circles(bertrand: ModuleType) -> None:
    for n in bertrand.LAWS:
        _, angle, _ = bertrand.turning(1.0, 1 + 1e-3, n)
        assert angle == pytest.approx(math.pi / math.sqrt(3 + n), rel=1e-5)


def test_an_orbit_without_turning_points_is_refused(bertrand: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"n = -2: at 1\.5 from 1 on an orbit has no outer turning point"):
        bertrand.turning(1.0, 1.5, -2.0)
    with pytest.raises(ValueError, match=r"n = 1: at 0\.5 from 1 on an orbit does not begin at an inner turning point"):
        bertrand.turning(1.0, 0.5, 1.0)


def test_the_device_measures_what_theory_says(bertrand: ModuleType, device: Device) -> None:
    batch = bertrand.Batch(laws=(-2.25, -1.0, 0.75), speeds=(0.1, 0.8), sizes=(0.6, 2.0))
    found = bertrand.measure(device, batch, points=3)
    assert np.abs(found.angles / batch.theory.angle - 1).max() < 1e-9
    assert found.drift.max() < 1e-9
    first = found.trace[:, 0]
    np.testing.assert_allclose(first, batch.states[:, :2], rtol=1e-7)
    places = np.hypot(found.trace[..., 0], found.trace[..., 1])
    assert (np.nanmax(places, axis=1) < 1.0001 * batch.theory.outer).all()
    assert (np.nanmin(places, axis=1) > 0.9999 * batch.inner).all()


def test_a_step_that_is_too_long_is_seen(bertrand: ModuleType, device: Device) -> None:
    batch = bertrand.Batch(laws=(-2.0,), speeds=(0.75,), sizes=(1.0,))
    batch.steps = 20 * batch.steps
    with pytest.raises(ValueError, match=r"orbit 0 \(n = -2, speed .*\): the angle is off by"):
        bertrand.check(batch, bertrand.measure(device, batch))


def test_an_orbit_that_does_not_come_round_is_named(bertrand: ModuleType, device: Device) -> None:
    batch = bertrand.Batch(laws=(-2.0, 1.0), speeds=(0.5,), sizes=(1.0,))
    needs = bertrand.measure(device, batch, points=2).steps
    assert needs[0] > needs[1] + 10
    message = r"orbit 0 \(n = -2, speed 1\.22474 at 1\) has not had 2 turning points after"
    with pytest.raises(ValueError, match=message):
        bertrand.measure(device, batch, points=2, most=int(needs[1]) + 5)


def test_a_law_closes_only_if_all_of_its_orbits_do(bertrand: ModuleType, device: Device) -> None:
    batch = bertrand.Batch(laws=(-2.0, 1.0, 6.0), speeds=(0.02, 0.5), sizes=(1.0,))
    found = bertrand.measure(device, batch, points=2)
    assert [closes for _, _, closes in bertrand.verdicts(batch, found)] == [True, True, False]
    near, far = bertrand.verdicts(batch, found)[2][1]
    assert near == pytest.approx(1 / 3, rel=1e-4), "of circles it is a third of a half turn"
    assert abs(far - 1 / 3) > 1e-3


def test_a_picture_is_drawn(bertrand: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib (extra `examples`)")
    batch = bertrand.Batch(laws=(-2.0, -1.0, 1.0), sizes=(1.0,))
    shape = (batch.count, bertrand.PLACES, 2)
    trace = np.cumsum(np.random.default_rng(1).normal(size=shape), axis=1).astype(np.float32)
    found = bertrand.Measured(batch.theory.angle, np.zeros((batch.count, 2)), trace, np.ones(batch.count, np.int32))
    bertrand.draw(batch, found, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "a.png").stat().st_size > 20_000
