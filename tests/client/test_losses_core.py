"""Every loss of an ack=1 record is reported, and no number that the caller knows moves.

Cores after a loss of memory.
"""

from __future__ import annotations

from typing import Any

import pytest

from embarcadero.client.session import AckedBatches
from embarcadero.errors import LossUnknown, OutcomeUnknown, SessionFenced, TimedOut, Unreachable
from embarcadero.types import Order, Position, Range
from embarcadero.wire import messages as m
from tests.client.fake_cluster import LANE, World
from tests.client.test_durable_core import DELIVERY_US, add, publishing, start_anew, stored


def cut_all(world: World) -> None:
    for number in list(world.wires):
        world.cut(number)


def lost_indices(world: World) -> list[int]:
    lost = world.core.take_losses()
    return [] if lost is None else [position.index for position in lost.positions]


# --- numbers (item 2) -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("order", [2, 5])
@pytest.mark.parametrize("named", [True, False])
def test_a_number_that_the_caller_knows_never_moves_to_the_position_of_a_lost_batch(order: int, named: bool) -> None:
    """Batches 2 and 3 are acked and lost: 4 and 5 are not sent as 2 and 3, and a new publisher continues at 2."""
    world = publishing(order, session_name="job" if named else "")
    world.core.keep_numbers()
    for n in range(4):
        add(world, b"%d" % n)
    world.settle()
    world.cluster.make_durable(below=2)
    cut_all(world)
    late = [add(world, b"%d" % n) for n in (4, 5)]
    world.cluster.start_anew()
    world.connect()
    world.settle()
    assert stored(world) == [b"0", b"1"]
    assert lost_indices(world) == [2, 3]
    assert isinstance(world.core.failed, SessionFenced)
    assert "continues at 2" in str(world.core.failed)
    assert [type(batch.error) for batch in late] == [SessionFenced] * 2, "they are not in the log"
    assert world.core.closed
    if named:
        again = publishing(order, session_name="job", wires=0)
        again.cluster = world.cluster
        again.connect()
        again.settle()
        assert again.core.first_sequence == 2


def test_an_acked_batch_that_is_unsettled_after_a_loss_is_not_called_failed() -> None:
    """Batch 1 is in the log, but its ack never came: its outcome is unknown, not 'nothing was stored'."""
    world = publishing(5, session_name="job", wires=1)
    add(world, b"0")
    world.settle()
    second = add(world, b"1")
    while world.wires[1].outward:
        world.outward(1)  # stored; the ack is on the wire
    third = add(world, b"2")
    while world.wires[1].outward:
        world.outward(1)
    world.core._losses.remembered.add(LANE, 2, 2, 1)  # batch 2 was acked: what is lost is 2
    world.core._settle(third, Position(LANE, 2, 2), None)
    world.cluster.make_durable(below=2)
    start_anew(world)
    world.settle()
    assert lost_indices(world) == [2]
    assert isinstance(world.core.failed, SessionFenced)
    assert isinstance(second.error, OutcomeUnknown)


@pytest.mark.parametrize("order", [2, 5])
def test_a_named_session_without_losses_keeps_its_numbers(order: int) -> None:
    """Unsettled batches are sent again after the restart, with the same numbers."""
    world = publishing(order, session_name="job")
    add(world, b"0")
    world.settle()
    world.cluster.make_durable()
    cut_all(world)
    late = add(world, b"1")
    world.cluster.start_anew()
    world.connect()
    world.settle()
    assert world.core.failed is None
    assert late.position is not None
    assert [entry.session_seq for entry in world.cluster.log if not entry.lost] == [0, 1]


# --- losses are always reported (item 3) ------------------------------------------------------------------------------
def test_the_old_holder_of_a_name_gets_its_losses_besides_being_fenced() -> None:
    """Another process reopened the session before the old holder came back."""
    world = publishing(session_name="job")
    batches = [add(world, b"%d" % n) for n in range(3)]
    world.settle()
    world.cluster.make_durable(below=1)
    cut_all(world)
    world.cluster.start_anew()
    assert isinstance(world.cluster.open(m.OpenSession(topic="t", name="job")), m.Opened)
    world.connect()
    world.settle()
    late = add(world, b"late")
    world.settle()
    assert isinstance(world.core.failed, SessionFenced)
    assert late.error is not None
    lost = world.core.take_losses()
    assert lost is not None
    assert lost.positions == tuple(batch.position for batch in batches[1:])


@pytest.mark.parametrize("order", [Order.NONE, 2, 5])
@pytest.mark.parametrize("name", ["", "job"])
def test_a_close_while_the_cluster_is_down_is_not_final_before_losses_are_known(order: int, name: str) -> None:
    """Nothing is unsettled, yet it is unknown whether the memory with the acked records is lost."""
    world = publishing(order, session_name=name)
    if order == Order.NONE:
        world.settle()
        world.core._losses.remembered.add(40, 3, 30, 10)
    else:
        add(world, b"0")
        world.settle()
    cut_all(world)
    world.core.close(world.now)
    world.collect()
    assert not world.core.closed
    world.core.give_up(TimedOut("not settled"))
    assert world.core.closed
    assert isinstance(world.core.unknown, LossUnknown)
    assert isinstance(world.core.unknown, TimedOut)
    lane = 40 if order == Order.NONE else LANE
    assert [position.lane for position in world.core.unknown.positions] == [lane]
    assert world.core.unknown.counts == ((10,) if order == Order.NONE else (1,))


def test_a_named_close_is_final_when_a_broker_of_the_same_generation_answers() -> None:
    """The memory lives, so nothing is lost: one request is enough."""
    world = publishing(session_name="job")
    add(world, b"0")
    world.settle()
    cut_all(world)
    world.core.close(world.now)
    world.collect()
    assert not world.core.closed
    world.connect()
    world.settle()
    assert world.core.closed
    assert world.core.failed is world.core.unknown is world.core.take_losses() is None


def test_a_named_close_after_a_restart_waits_for_recovery_and_reports_the_loss() -> None:
    """While the range is not sealed, its batches are neither kept nor lost; then they are."""
    world = publishing(session_name="job", wires=1)
    for n in range(3):
        add(world, b"%d" % n)
    world.settle()
    world.cluster.make_durable(below=2)
    cut_all(world)
    world.core.close(world.now)
    world.cluster.start_anew()
    world.cluster.recovering = True
    world.connect()
    for _ in range(5):
        world.settle()
        world.advance(300_000)
    assert not world.core.closed
    assert world.core.take_losses() is None
    world.cluster.recovering = False
    world.run(lambda: world.core.closed)
    assert lost_indices(world) == [2]
    assert world.core.failed is None


def test_a_publisher_that_failed_while_the_cluster_was_down_still_gets_its_losses() -> None:
    """Delivery timed out; the failure is immediate, and the fate of acked records is requested until it is known."""
    world = publishing(wires=1)
    add(world, b"acked")
    world.settle()
    cut_all(world)
    late = add(world, b"late")
    world.advance(DELIVERY_US + 1)
    assert isinstance(world.core.failed, Unreachable)
    assert isinstance(late.error, Unreachable)
    assert not world.core.closed
    assert world.core.next_timer_us() is None
    world.cluster.start_anew()
    world.connect()
    world.settle()
    assert world.core.closed
    assert lost_indices(world) == [0]
    assert add(world, b"more").error is not None


def test_losses_of_two_restarts_are_reported_even_if_the_first_was_never_noticed() -> None:
    """The second one comes before the answer about the first: both are in the report."""
    world = publishing(wires=1)
    add(world, b"0")
    world.settle()
    cut_all(world)
    world.cluster.start_anew(skipped=10)
    world.connect()  # the request is sent, and never answered
    cut_all(world)
    world.cluster.start_anew(skipped=10)
    world.connect()
    world.settle()
    assert lost_indices(world) == [0]
    after = add(world, b"after")
    world.settle()
    assert after.position is not None
    start_anew(world, end=after.position.index)
    world.settle()
    assert lost_indices(world) == [after.position.index]


def test_durable_acks_leave_nothing_to_wait_for_at_close() -> None:
    """ack=2: acked records can't be lost, so a named publisher closes without a cluster."""
    world = publishing(session_name="job", durable=True)
    world.cluster.at_once = True
    add(world, b"0")
    world.settle()
    cut_all(world)
    world.core.close(world.now)
    assert world.core.closed
    assert world.core.unknown is None


def ranges(*spans: tuple[int, int | None]) -> list[Range]:
    return [
        Range(lane=1, number=number, start=start, start_seq=0, replicas=[], durable_on=1, end=end)
        for number, (start, end) in enumerate(spans, 1)
    ]


@pytest.mark.parametrize(
    ("spans", "lost", "left"),
    [
        ([], [], [3, 7, 12]),
        ([(0, None)], [], [3, 7, 12]),  # not recovered
        ([(0, 5)], [], [7, 12]),  # sealed, and the next one is not open yet
        ([(0, 5), (5, None)], [], [7, 12]),  # another range of the same generation
        ([(0, 5), (10, None)], [7], [12]),  # two losses, the second one not recovered
        ([(0, 5), (10, 11), (20, None)], [7, 12], []),
        ([(0, 13), (13, None)], [], []),  # a clean stop
        ([(8, 11), (20, None)], [12], []),  # trimmed
    ],
)  # fmt: skip
def test_ranges_decide_about_acked_batches(spans: Any, lost: list[int], left: list[int]) -> None:
    """Between two ranges: lost. In a sealed one: kept. In an open one, or after all of them: not known yet."""
    acked = AckedBatches()
    for index in (3, 7, 12):
        acked.add(1, index, index, 1)
    assert [position.index for position, _ in acked.decide(1, ranges(*spans))] == lost
    assert [position.index for position, _ in acked.batches()] == left
