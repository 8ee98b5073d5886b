"""Every planted bug is caught by some seed: the net has no hole there."""

from __future__ import annotations

import pytest

from embarcadero import plants
from embarcadero.errors import BadValue
from embarcadero.sim.plants import PLANTS, planted
from embarcadero.sim.run import hunt_all

SEEDS = 40


@pytest.mark.timeout(900)
def test_every_planted_bug_is_caught() -> None:
    """Each planted bug breaks a promise in a world that keeps all of them without it.

    Seeds that are known to catch a bug come first; others are tried only if all of those have ceased to.
    """
    seeds = {plant.name: plant.seed for plant in hunt_all(seeds=SEEDS)}
    assert seeds.keys() == PLANTS.keys()
    assert [name for name, seed in seeds.items() if seed is None] == []


def test_nothing_is_planted_unless_asked_for() -> None:
    """Plants are gone when their world is over, even if it ended badly."""
    with pytest.raises(BadValue), planted(["dedupe-off"]):
        raise BadValue(f"planted: {sorted(plants.ACTIVE)}")
    assert not plants.ACTIVE


def test_an_unknown_plant_is_refused() -> None:
    """A misspelt name is an error, not a bug that nobody planted."""
    with pytest.raises(BadValue, match="no-such-bug"), planted(["no-such-bug"]):
        pass
