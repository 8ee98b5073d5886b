"""Sessions opened at a sequence: repeated work under the same name and number is stored once, or refused."""

from __future__ import annotations

import random

import pytest

from embarcadero.limits import FENCED_KEPT_S
from embarcadero.limits import SESSION_WINDOW as W
from embarcadero.sequencer.order.checkpoint import CheckpointWriter
from embarcadero.types import EntryKind, Outcome
from embarcadero_proof.sim.incoherent import IncoherentMemory
from tests.sequencer.harness import OneLane
from tests.sequencer.test_checkpoint import rebuilt

OPEN, FENCE, CLOSE = EntryKind.SESSION_OPEN, EntryKind.SESSION_FENCE, EntryKind.SESSION_CLOSE
STEP = 1 << 20
both_orders = pytest.mark.parametrize("order", [2, 5])


@both_orders
def test_repeated_work_is_recognized_batch_by_batch(order: int) -> None:
    """A second holder that starts at the same sequence gets DUP_OF for stored batches, CONFLICT for other bytes."""
    lane = OneLane(order)
    first = lane.open(name=5, at=STEP)
    lane.send(first, STEP, STEP + 1, STEP + 2, low=STEP)
    result = lane.request(OPEN, name=5, at=STEP)
    second = int(result["session"])

    assert (int(result["session_seq"]), int(result["extra"])) == (STEP + 3, STEP + 3)
    assert lane.send(first, STEP + 3, low=STEP) == [Outcome.UNKNOWN_SESSION]
    assert lane.send(second, STEP, STEP + 1, low=STEP) == [Outcome.DUP_OF, Outcome.DUP_OF]
    assert lane.send(second, STEP + 2, crc=8, low=STEP) == [Outcome.CONFLICT]
    assert lane.send(second, STEP + 3, low=STEP) == [Outcome.ORDERED]


@both_orders
def test_a_whole_window_is_recognized_again(order: int) -> None:
    """As many batches as fit in a window are distinguished from new ones; one more is not accepted (order 2)."""
    lane = OneLane(order)
    everything = range(STEP, STEP + W)
    lane.send(lane.open(name=5, at=STEP), *everything, low=STEP)
    second = lane.open(name=5, at=STEP)

    assert lane.send(second, *everything, low=STEP) == [Outcome.DUP_OF] * W
    if order == 2:
        assert lane.send(second, STEP + W, low=STEP) == [Outcome.BACKPRESSURE]


@both_orders
def test_skipped_numbers_are_never_called_stored(order: int) -> None:
    """A batch with a sequence below the newest `at` that is not stored is STALE and no duplicate."""
    lane = OneLane(order)
    lane.send(lane.open(name=5, at=STEP), STEP, STEP + 1, low=STEP)
    result = lane.request(OPEN, name=5, at=2 * STEP)
    session = int(result["session"])

    assert (int(result["session_seq"]), int(result["extra"])) == (STEP + 2, 2 * STEP)
    assert lane.send(session, STEP + 2, low=STEP) == [Outcome.STALE]
    assert lane.send(session, 2 * STEP, low=2 * STEP) == [Outcome.ORDERED]
    assert lane.stored(session) == [2 * STEP]


@both_orders
def test_opening_lower_changes_nothing(order: int) -> None:
    """The session keeps its position, and reports it."""
    lane = OneLane(order)
    lane.open(name=5, at=2 * STEP)
    result = lane.request(OPEN, name=5, at=STEP)

    assert (int(result["session_seq"]), int(result["extra"])) == (2 * STEP, 2 * STEP)


def test_a_session_that_moves_on_leaves_nothing_behind() -> None:
    """However often it is opened, it takes one row; its entries contain the rest."""
    lane = OneLane(sessions=4)
    for number in range(50):
        lane.open(name=5, at=number * STEP)

    assert lane.order.table.used == 1
    assert lane.kinds()[:4] == [OPEN, FENCE, OPEN, CLOSE]


@both_orders
@pytest.mark.parametrize("checkpoint_at", [0, 1, 2, 3])
def test_a_successor_knows_where_sessions_were_opened(order: int, checkpoint_at: int) -> None:
    """Whichever part is in the checkpoint and which after it, a replay gives the same answers."""
    lane, memory = OneLane(order), IncoherentMemory(random.Random(1), 1)
    writer = CheckpointWriter(memory.host("sequencer"), "checkpoint", lane.order.table.capacity)
    steps = [
        lambda: lane.send(lane.open(name=5, at=STEP), STEP, STEP + 1, low=STEP),
        lambda: lane.send(lane.open(name=5, at=STEP), STEP + 1, STEP + 2, low=STEP),
        lambda: lane.open(name=5, at=2 * STEP),
    ]
    for number, step in enumerate(steps):
        if number == checkpoint_at:
            writer.write(lane.order, lane.now_us)
        step()
    lane.order = rebuilt(lane, memory, 0)
    lane.order.idle_due_us = 0

    result = lane.request(OPEN, name=5, at=STEP)
    session = int(result["session"])
    assert (int(result["session_seq"]), int(result["extra"])) == (2 * STEP, 2 * STEP)
    assert lane.send(session, STEP + 3, low=STEP) == [Outcome.STALE]
    assert lane.send(session, 2 * STEP, 2 * STEP + 1, low=2 * STEP) == [Outcome.ORDERED] * 2


def test_a_fenced_session_with_a_name_is_kept_as_long_as_an_open_one() -> None:
    """After a restart all sessions are fenced; a name that is opened a day later still knows its stored batches."""
    lane = OneLane(session_ttl_s=86_400)
    named, nameless = lane.open(name=5), lane.open()
    for session in (named, nameless):
        lane.send(session, 0)
        lane.send(session, 2)  # a gap that does not close fences it
    lane.later(1_000_000)
    lane.later((FENCED_KEPT_S + 1) * 1_000_000)

    assert int(lane.request(OPEN, name=5)["extra"]) == 1
    assert Outcome(int(lane.request(OPEN, nameless)["outcome"])) == Outcome.UNKNOWN_SESSION
