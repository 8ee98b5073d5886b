"""A failing run is minimized, and printed as a story."""

from __future__ import annotations

from embarcadero_proof.sim.checkers.ledger import Violation
from embarcadero_proof.sim.plan import Plan, make_plan
from embarcadero_proof.sim.run import shrink
from embarcadero_proof.sim.shrink import Outcome, Shrinker, left_out


def test_an_injected_bug_shrinks_to_fewer_faults_and_still_fails_the_same_way() -> None:
    """Few faults of this run are enough; the story names them, and the broken promise."""
    shrinker, told = shrink(151, ["dedupe-off"], tries=5)
    assert shrinker is not None
    assert shrinker.outcome.faults < shrinker.first.faults
    assert shrinker.promise in {violation.promise for violation in shrinker.outcome.violations}
    assert f"BROKEN {shrinker.promise}" in told
    assert "sends batch" in told
    assert len(told.splitlines()) < 200


def test_everything_unneeded_is_left_out() -> None:
    """In a run where only the third fault and the second stream matter, little more than these remains."""
    whole = make_plan(4)
    needed = whole.streams[1].name

    def run(plan: Plan) -> Outcome:
        count = 9 if plan.faults_max is None else min(9, plan.faults_max)
        happened = tuple(number for number in range(count) if number not in plan.faults_off)
        broken = 2 in happened and any(stream.name == needed for stream in plan.streams)
        return Outcome([Violation("P1", 0, "a batch is gone")] if broken else [], happened, count)

    shrinker = Shrinker(4, run(whole), run)
    shrinker.shrink()
    smallest = shrinker.plan(shrinker.cuts)
    assert shrinker.outcome.happened == (2,)
    assert [stream.name for stream in smallest.streams] == [needed]
    assert (smallest.readers, smallest.brokers, smallest.hosts, smallest.rest_us) == ([], 1, 1, 0)
    assert smallest.fault_phase_us < 4_000_000
    assert "the rest at the end" in list(left_out(shrinker.cuts))


def test_tries_are_bounded() -> None:
    """However much could be left out."""
    always = Outcome([Violation("P1", 0, "a batch is gone")], tuple(range(1_000)), 1_000)
    shrinker = Shrinker(4, always, lambda _plan: always, tries=7)
    shrinker.shrink()
    assert shrinker.tries == 7
