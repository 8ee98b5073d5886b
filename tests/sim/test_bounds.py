"""A world that never ends is a failure with a name, not a slow run."""

from __future__ import annotations

import pytest

from embarcadero_proof.sim import faults, world
from embarcadero_proof.sim.clients import ProbeProcess
from embarcadero_proof.sim.run import run_seed, story

BRIEF = 4_002
"""A world that is over soon, and does not rest."""


@pytest.mark.parametrize(("where", "bound"), [(world, "EVENTS_MAX"), (faults, "PRIMITIVES_MAX")])
def test_a_world_that_takes_too_much_is_given_up(
    monkeypatch: pytest.MonkeyPatch, where: object, bound: str
) -> None:  # fmt: skip
    """The violation says how much it took and who was busy; the story tells its last steps."""
    monkeypatch.setattr(where, bound, 3_000)
    first, *_ = run_seed(3).violations
    assert first.promise == "RUN"
    assert "does not come to an end" in first.sentence
    assert "the busiest is" in first.sentence
    told = story(3)
    assert first.sentence in told
    assert len(told.splitlines()) > 30


def test_a_world_in_which_somebody_waits_for_ever_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated time is bounded too."""
    monkeypatch.setattr(ProbeProcess, "waits", True)
    monkeypatch.setattr(world, "HEAL_US_MAX", 6_000_000)
    assert "does not come to an end" in run_seed(BRIEF).violations[0].sentence
