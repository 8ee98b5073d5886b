"""A run that never ends is a failure with a name, not a slow test."""

from __future__ import annotations

import pytest

from embarcadero_proof.sim import faults, world
from embarcadero_proof.sim.clients import ProbeProcess
from embarcadero_proof.sim.run import run_seed, story

BRIEF = 4_002
"""A run that is over soon, and has no quiet phase."""


@pytest.mark.parametrize(("where", "bound"), [(world, "EVENTS_MAX"), (faults, "PRIMITIVES_MAX")])
def test_a_run_that_takes_too_much_is_given_up(
    monkeypatch: pytest.MonkeyPatch, where: object, bound: str
) -> None:  # fmt: skip
    """The violation names the amount and the busiest roles; the story has its last steps."""
    monkeypatch.setattr(where, bound, 3_000)
    first, *_ = run_seed(3).violations
    assert first.promise == "RUN"
    assert "does not end" in first.sentence
    assert "the busiest is" in first.sentence
    told = story(3)
    assert first.sentence in told
    assert len(told.splitlines()) > 30


def test_a_run_in_which_a_process_waits_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated time is bounded too."""
    monkeypatch.setattr(ProbeProcess, "waits", True)
    monkeypatch.setattr(world, "HEAL_US_MAX", 6_000_000)
    assert "does not end" in run_seed(BRIEF).violations[0].sentence
