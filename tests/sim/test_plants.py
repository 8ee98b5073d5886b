"""Every planted bug is caught by some seed: the net has no hole there."""

from __future__ import annotations

import pytest

from embarcadero import plants
from embarcadero.errors import BadValue
from embarcadero.sim.plants import PLANTS, planted
from embarcadero.sim.run import hunt


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sorted(PLANTS))
def test_a_planted_bug_is_caught(name: str) -> None:
    """Some seed within the bound breaks a promise when this bug is planted."""
    assert hunt(name).seed is not None


def test_nothing_is_planted_unless_asked_for() -> None:
    """Plants are gone when their world is over, even if it ended badly."""
    with pytest.raises(BadValue), planted(["dedupe-off"]):
        raise BadValue(f"planted: {sorted(plants.ACTIVE)}")
    assert not plants.ACTIVE


def test_an_unknown_plant_is_refused() -> None:
    """A misspelt name is an error, not a bug that nobody planted."""
    with pytest.raises(BadValue, match="no-such-bug"), planted(["no-such-bug"]):
        pass
