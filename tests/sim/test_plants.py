"""Every planted bug is caught by the checker that is there for it: the net has no hole there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from embarcadero import plants
from embarcadero.errors import BadValue
from embarcadero_proof.sim.checkers import CHECKERS, check_all
from embarcadero_proof.sim.exhaustive.scopes import VARIANTS
from embarcadero_proof.sim.history import Ended, History, RoleFailed, Sent
from embarcadero_proof.sim.plants import PLANTS, ROLE, planted
from embarcadero_proof.sim.run import PlantReport, PlantsReport, caught_by, hunt, hunt_all

SEEDS = 40


IMPORTANT = (
    "missing-flush", "missing-invalidate", "lane-ack-unchecked", "frontier-before-entries", "dedupe-off",
    "durable-before-sync", "ack-before-durable", "serve-above-durable", "old-range-counts", "damage-cut",
    "failover-statistic", "positions-reused", "too-few-replies", "append-time-goes-back", "end-recorded-low",
    "cut-left-out", "gap-stops-all", "connections-left", "loss-not-told", "end-unconfirmed", "claimed-number-moved",
    "unknown-told-as-failed", "weak-held", "strong-forgotten-at-replay", "late-trim-done", "deleted-memory-left",
    "reference-unchecked", "reference-not-durable",
)  # fmt: skip
"""One of each kind, and for each promise one that nothing but its checker notices. All of them are hunted by `make
plants`; those of small scopes are in test_exhaustive.py too."""


@pytest.mark.timeout(900)
def test_planted_bugs_are_caught() -> None:
    """Each planted bug breaks its promise in a world that keeps all of them without it; and no checker can be missed.

    Seeds that are known to catch a bug come first; others are tried only if all of those have ceased to.
    """
    found = PlantsReport(plants=list(hunt_all(seeds=SEEDS, names=IMPORTANT)))
    assert {plant.name for plant in found.plants} == set(IMPORTANT)
    assert {plant.name: plant.broken for plant in found.plants if not plant.caught} == {}
    assert not found.idle


def test_another_checker_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug that breaks a promise counts as caught only if it is the one that it has to break."""
    assert hunt("dedupe-off", seeds=0).caught
    monkeypatch.setitem(PLANTS, "dedupe-off", replace(PLANTS["dedupe-off"], by="P2, P7"))
    found = hunt("dedupe-off", seeds=0)
    assert not found.caught
    assert "P2" in found.broken
    assert not PlantsReport(plants=[found]).good


def test_a_checker_that_could_be_turned_off_is_told() -> None:
    """All bugs are caught, but one promise is never the only one that is broken: that is not enough."""
    every = [PlantReport(name=promise, seed=0, promise=promise, broken={promise: 1}) for promise in CHECKERS]
    assert PlantsReport(plants=every).good
    every[4].broken = {"P5": 1, "P2": 1}
    assert PlantsReport(plants=every).idle == ["P5"]
    assert not PlantsReport(plants=every).good


def test_a_role_that_fails_is_not_a_checker_of_promises() -> None:
    """What a role notices by itself is told apart from calls that do not end."""
    failed = RoleFailed(at=1, process="sequencer-1", error="Corrupt: a hole")
    assert [*caught_by(History([failed]), check_all(History([failed])))] == [ROLE]
    sent = Sent(at=2, process="s.1", stream="s", lane=0, number=0, digest=1)
    history = History([failed, sent, Ended(at=3)])
    assert {*caught_by(history, check_all(history))} == {ROLE, "P8"}


def test_the_table_is_whole() -> None:
    """Each planted bug has a patch point, and a seed or a scope that catches it; scopes know how to leave it out."""
    for name, plant in PLANTS.items():
        assert plant.where
        assert plant.witnesses or plant.scope
        assert bool(plant.witnesses) == bool(plant.by)
        assert {*plant.checkers} <= {*CHECKERS, ROLE}
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
