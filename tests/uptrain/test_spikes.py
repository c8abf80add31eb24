"""Spikes of the gradient norm."""

import math

import numpy as np
import pytest

from uptrain.training import spikes
from uptrain.training.spikes import SPIKE_WINDOW, SpikeDetector


def recorded(detector, norms):
    return [detector.record(float(norm)) for norm in norms]


@pytest.mark.parametrize("sigma", [3, 6, 20])
def test_a_rise_that_lasts_is_no_spike(sigma):
    """Else all further updates would be left out. A single spike does not hide the next."""
    rng, detector = np.random.default_rng(0), SpikeDetector(sigma, [])
    assert not any(recorded(detector, 1 + 0.01 * rng.standard_normal(SPIKE_WINDOW)))
    assert recorded(detector, [1e9, 1e9]) == [True, True]
    assert sum(recorded(detector, 2 + 0.01 * rng.standard_normal(2000))) < SPIKE_WINDOW
    assert recorded(detector, [1e9]) == [True]


def test_the_limit_is_of_a_full_window(monkeypatch):
    """A norm at the limit is no spike; one above it is recorded as the limit."""
    monkeypatch.setattr(spikes, "SPIKE_WINDOW", 4)
    detector = SpikeDetector(2.0, [])
    assert recorded(detector, [1, 3, 1000]) == [False] * 3
    assert detector.limit() == math.inf
    detector = SpikeDetector(2.0, [1.0, 3.0, 1.0, 3.0])  # mean 2, standard deviation 1
    assert detector.limit() == 4.0
    assert not detector.record(4.0)
    assert detector.norms == [3.0, 1.0, 3.0, 4.0]
    limit = detector.limit()
    assert detector.record(1e9)
    assert detector.norms == [1.0, 3.0, 4.0, limit]


def test_without_sigma_nothing_is_a_spike():
    detector = SpikeDetector(None, [])
    assert recorded(detector, [1.0] * SPIKE_WINDOW + [1e9]) == [False] * (SPIKE_WINDOW + 1)
    assert detector.norms == []
