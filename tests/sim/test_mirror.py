"""Runs whose fabric has a mirror."""

from __future__ import annotations

from embarcadero_proof.sim.history import FabricLost, LostSpan, MirrorLeft
from embarcadero_proof.sim.plan import make_plan
from embarcadero_proof.sim.run import run_seed, run_world


def test_a_reader_that_had_read_everything_learns_of_the_loss() -> None:
    """Seed 17: without a position left out after the loss it would have continued as if nothing had happened."""
    assert make_plan(17).durable.mirror
    assert not run_seed(17).violations


def test_mirrored_runs_lose_positions_exactly() -> None:
    """Their LOST gaps are short, where others' reach up to a ceiling far above; the same seed is the same run."""
    world = run_world(10)
    assert len(world.history.of(MirrorLeft)) == len(world.history.of(FabricLost)) > 1
    lost = [span.stop - span.start for span in world.history.of(LostSpan) if span.stop < 1 << 62]
    assert lost
    assert max(lost) < 2 * world.sizes.order_slots
    assert run_world(10).trace.digest() == world.trace.digest()


def test_only_runs_that_lose_their_fabric_have_one() -> None:
    """Some of them; and few of these lose the mirror with it now and then."""
    plans = [make_plan(seed) for seed in range(400)]
    having = [plan.durable for plan in plans if plan.durable.mirror]
    assert all("cluster-loss" in plan.faults for plan in having)
    assert len(having) > 10
    assert 0 < sum(plan.mirror_dies > 0 for plan in having) < len(having) // 2
