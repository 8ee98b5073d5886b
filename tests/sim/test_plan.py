"""The plan drawn for a seed."""

from __future__ import annotations

from embarcadero.limits import SESSION_WINDOW
from embarcadero.types import Order
from embarcadero_proof.bugs.table import injected
from embarcadero_proof.sim.checkers import check_all
from embarcadero_proof.sim.history import Delivered, FabricLost, Healed
from embarcadero_proof.sim.plan import LONG_FROM_SEED, StreamPlan, make_plan
from embarcadero_proof.sim.run import run_world
from embarcadero_proof.sim.world import World

ROUND_AND_ROUND = 70_063
"""A run with a long stream that is over soon."""

BRIEF = 4_003
"""A run with replicas that is over soon."""


def long_streams(first: int, count: int) -> list[StreamPlan]:
    plans = [make_plan(seed) for seed in range(first, first + count)]
    return [stream for plan in plans for stream in plan.streams if stream.batches > SESSION_WINDOW]


def test_from_some_seed_on_a_third_of_the_runs_has_a_stream_that_is_longer_than_two_windows() -> None:
    """Of an ordered topic: others have no windows. Runs before that stay as they were."""
    found = long_streams(LONG_FROM_SEED, 120)
    assert 25 <= len(found) <= 55
    assert all(stream.batches > 2 * SESSION_WINDOW and stream.topic.order > Order.BROKER for stream in found)
    assert {stream.topic.order for stream in found} == {Order.TOTAL, Order.STRONG}
    assert long_streams(LONG_FROM_SEED - 60, 60) == []


def test_a_session_goes_round_its_window_twice() -> None:
    """And every promise holds."""
    world = run_world(ROUND_AND_ROUND)
    assert max(found.session_seq for found in world.history.of(Delivered)) > 2 * SESSION_WINDOW
    assert check_all(world.history) == []


def test_nothing_is_lost_once_all_is_healed() -> None:
    """Also not where a loss was planned for the next ack: batches read from then on are final."""
    plan = make_plan(BRIEF)
    with injected() as wrap:
        world = World(plan, wrap)
        world.queue.at(plan.fault_phase_us - 1, lambda: setattr(world.restarts, "armed", True))
        world.run()
    [healed] = world.history.of(Healed)
    assert all(lost.at <= healed.at for lost in world.history.of(FabricLost))
    assert check_all(world.history) == []
