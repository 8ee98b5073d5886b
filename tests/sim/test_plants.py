"""Every planted bug is caught by some seed: the net has no hole there."""

from __future__ import annotations

import pytest

from embarcadero import plants
from embarcadero.errors import BadValue
from embarcadero.sim.exhaustive.scopes import VARIANTS
from embarcadero.sim.plants import PLANTS, planted
from embarcadero.sim.run import hunt_all

SEEDS = 40


IMPORTANT = (
    "missing-flush", "missing-invalidate", "lane-ack-unchecked", "frontier-before-entries", "dedupe-off",
    "durable-before-sync", "ack-before-durable", "serve-above-durable", "old-range-counts", "damage-cut",
    "failover-statistic", "positions-reused",
)  # fmt: skip
"""One of each kind. All of them are hunted by `make plants`; those of small scopes are in test_exhaustive.py too."""


@pytest.mark.timeout(900)
def test_planted_bugs_are_caught() -> None:
    """Each planted bug breaks a promise in a world that keeps all of them without it.

    Seeds that are known to catch a bug come first; others are tried only if all of those have ceased to.
    """
    found = {plant.name: plant.caught for plant in hunt_all(seeds=SEEDS, names=IMPORTANT)}
    assert found.keys() == set(IMPORTANT)
    assert [name for name, caught in found.items() if not caught] == []


def test_the_table_is_whole() -> None:
    """Each planted bug has a patch point, and a seed or a scope that catches it; scopes know how to leave it out."""
    for name, plant in PLANTS.items():
        assert plant.where
        assert plant.witnesses or plant.scope
        assert not plant.scope or VARIANTS[name].case == plant.scope


def test_nothing_is_planted_unless_asked_for() -> None:
    """Plants are gone when their world is over, even if it ended badly."""
    with pytest.raises(BadValue), planted(["dedupe-off"]):
        raise BadValue(f"planted: {sorted(plants.ACTIVE)}")
    assert not plants.ACTIVE


def test_an_unknown_plant_is_refused() -> None:
    """A misspelt name is an error, not a bug that nobody planted."""
    with pytest.raises(BadValue, match="no-such-bug"), planted(["no-such-bug"]):
        pass
