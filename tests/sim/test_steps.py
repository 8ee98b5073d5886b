"""A process that crashes at a named step, or pauses there beyond every lease and continues, breaks no promise.

`embarcadero-proof sim --steps` covers all of them; here are the most important ones.
"""

from __future__ import annotations

from embarcadero.steps import Step
from embarcadero_proof.sim.plan import SECOND_US, make_plan
from embarcadero_proof.sim.step_run import CASES, run_step, run_steps
from embarcadero_proof.sim.steps import Way, draw_step_faults

PAUSED = (
    Step.TAKEOVER_EPOCH_OPEN, Step.TAKEOVER_READ, Step.TAKEOVER_DECIDED, Step.ROUND_ENTRIES, Step.ACK_CHECKED,
    Step.COUNT_LINES, Step.SEAL_CLOSING, Step.CLOSING_SAID, Step.REPLICA_CHECKED,
)  # fmt: skip
CRASHED = (Step.TAKEOVER_REISSUED, Step.ROUND_FRONTIERS, Step.SEAL_DECIDED, Step.REPLICA_SYNCED)


def test_a_fault_at_a_step_breaks_no_promise() -> None:
    """Each run reaches its step, a process is hit there, and all checkers are satisfied."""
    cases = [*((step, Way.PAUSE) for step in PAUSED), *((step, Way.CRASH) for step in CRASHED)]
    reports = list(run_steps(cases, jobs=1))
    assert {f"{report.step} {report.way}": report.violations for report in reports if not report.good} == {}
    assert all(report.reached for report in reports)


def test_an_omitted_rule_is_noticed_at_its_step() -> None:
    """A broker stops after it moved its frontier and before it wrote the entries."""
    assert run_step(Step.LANE_STAGED, Way.CRASH).good
    assert run_step(Step.LANE_STAGED, Way.CRASH, bugs=["lane-frontier-before-entries"]).broken


def test_every_step_is_covered_both_ways() -> None:
    """The long run leaves none out."""
    assert len(CASES) == len(Step) * len(Way)


def test_ordinary_runs_draw_such_faults_now_and_then() -> None:
    """Some do, the same ones each time, and quiet ones never."""
    drawn = {seed: draw_step_faults(seed, 10 * SECOND_US) for seed in range(300)}
    share = sum(bool(faults) for faults in drawn.values()) / len(drawn)
    assert 0.03 < share < 0.2
    assert drawn == {seed: draw_step_faults(seed, 10 * SECOND_US) for seed in range(300)}
    assert all(not plan.steps for plan in map(make_plan, range(60)) if not plan.faults)
