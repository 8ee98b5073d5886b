"""Each outcome of a batch, and each bound of waiting."""

from __future__ import annotations

import numpy as np
import pytest

from embarcadero.limits import SESSION_SEQUENCE_MAX
from embarcadero.limits import SESSION_WINDOW as W
from embarcadero.sequencer.order.batches import LaneTerms
from embarcadero.types import NO_INDEX, EntryKind, Outcome
from tests.sequencer.harness import GAP_MS, OneLane, pending, topic
from tests.sequencer.model import Batch

ORDERED, DUP_OF, DUP, STALE, LOST = Outcome.ORDERED, Outcome.DUP_OF, Outcome.DUP, Outcome.STALE, Outcome.LOST
CONFLICT, FENCED, BACKPRESSURE = Outcome.CONFLICT, Outcome.FENCED, Outcome.BACKPRESSURE


# --- both orders ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("order", [2, 5])
def test_new_batches_get_dense_positions(order: int) -> None:
    """Indices count batches and requests; seqs count records only."""
    lane = OneLane(order)
    session = lane.open()
    lane.step([lane.batch(session, 0, count=3), lane.batch(session, 1, count=4)])

    assert lane.log["index"].tolist() == [0, 1, 2]
    assert lane.log["seq"].tolist() == [0, 0, 3]
    assert lane.order.next_seq == 7


@pytest.mark.parametrize("order", [2, 5])
def test_a_second_copy_gets_the_position_of_the_first(order: int) -> None:
    """In the same round or later, a duplicate gets the position of the original."""
    lane = OneLane(order)
    session = lane.open()
    first, second, third = (lane.batch(session, 0) for _ in range(3))

    assert lane.step([first, second]) == [ORDERED, DUP_OF]
    assert lane.step([third]) == [DUP_OF]
    original = lane.answers[first.number]
    for copy in (second, third):
        assert lane.answers[copy.number]["index"] == original["index"]
        assert lane.answers[copy.number]["seq"] == original["seq"]


@pytest.mark.parametrize("order", [2, 5])
def test_other_bytes_under_a_stored_sequence_are_a_conflict(order: int) -> None:
    """A duplicate with another CRC is refused."""
    lane = OneLane(order)
    session = lane.open()
    lane.send(session, 0, crc=1)

    assert lane.send(session, 0, crc=2) == [CONFLICT]


@pytest.mark.parametrize("order", [2, 5])
def test_a_session_never_opened_is_unknown(order: int) -> None:
    """Unknown handles are refused, whatever their row holds."""
    lane = OneLane(order)
    session = lane.open()

    assert lane.send(session + lane.order.table.capacity, 0) == [Outcome.UNKNOWN_SESSION]


@pytest.mark.parametrize("order", [2, 5])
def test_beyond_the_window_is_backpressure(order: int) -> None:
    """A sequence W or more ahead is refused for now, and nothing about it is remembered."""
    lane = OneLane(order)
    session = lane.open()

    assert lane.send(session, W) == [BACKPRESSURE]
    assert lane.send(session, *range(W)) == [ORDERED] * W
    assert lane.send(session, W, low=1) == [ORDERED]


@pytest.mark.parametrize("order", [2, 5])
def test_absurd_sequences_do_not_disturb_a_session(order: int) -> None:
    """Sequences near 2**64 are refused, and the session continues."""
    lane = OneLane(order)
    session = lane.open()
    absurd = [SESSION_SEQUENCE_MAX + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]

    assert lane.step([lane.batch(session, seq, low=seq) for seq in absurd]) == [BACKPRESSURE] * 4
    assert lane.send(session, 0, 1) == [ORDERED, ORDERED]


def test_the_append_time_is_the_lanes() -> None:
    """Entries carry the time that the lane was given."""
    lane = OneLane()
    lane.order.append_us = 123
    lane.open()

    assert lane.log["append_us"].tolist() == [123]


# --- order 2 ----------------------------------------------------------------------------------------------------------
def test_order_2_keeps_the_order_of_arrival() -> None:
    """Order 2 does not wait for anything."""
    lane = OneLane(2)
    session = lane.open()
    lane.send(session, 5, 0, 3)

    assert lane.stored(session) == [5, 0, 3]


def test_order_2_refuses_sequences_below_the_low_mark() -> None:
    """A sequence settled by the publisher is stale, also when its low mark comes in the same round."""
    lane = OneLane(2)
    session = lane.open()

    assert lane.step([lane.batch(session, 3), lane.batch(session, 9, low=5)]) == [STALE, ORDERED]
    assert lane.send(session, 4, low=0) == [STALE]


def test_order_2_window_moves_with_the_low_mark() -> None:
    """[low, low + W) may be sent, and a slot is used again W later."""
    lane = OneLane(2)
    session = lane.open()
    lane.send(session, 0)

    assert lane.send(session, W) == [BACKPRESSURE]
    assert lane.send(session, W, low=1) == [ORDERED]
    assert lane.send(session, 0) == [STALE]


# --- order 5 ----------------------------------------------------------------------------------------------------------
def test_order_5_sorts_within_a_round() -> None:
    """A session's batches are ordered by sequence, however they came."""
    lane = OneLane(5)
    first, second = lane.open(), lane.open()
    lane.step([lane.batch(s, seq) for seq in (3, 0, 2, 1) for s in (second, first)])

    assert lane.stored(first) == lane.stored(second) == [0, 1, 2, 3]


def test_order_5_in_order_rounds_keep_arrival_order() -> None:
    """When every batch follows its predecessor, the round is appended as it came."""
    lane = OneLane(5)
    first, second = lane.open(), lane.open()
    lane.step([lane.batch(s, seq) for seq in range(3) for s in (second, first)])

    assert lane.log["session"][2:].tolist() == [second, first] * 3


def test_order_5_holds_batches_ahead_of_a_gap_and_releases_them() -> None:
    """Batches after a gap wait; when it is filled, all of them follow immediately, answered as ordered."""
    lane = OneLane(5)
    session = lane.open()
    ahead = [lane.batch(session, seq) for seq in (1, 3, 2, 5)]

    assert lane.step(ahead) == [None] * 4
    assert lane.order.buffer.used == 4
    assert lane.send(session, 0) == [ORDERED]
    assert [lane.outcome(batch) for batch in ahead] == [ORDERED, ORDERED, ORDERED, None]
    assert lane.stored(session) == [0, 1, 2, 3]
    assert lane.order.buffer.used == lane.order.table.waiting.total == int(lane.order.buffer.by_origin.sum()) == 1


def test_order_5_copies_of_a_waiting_batch_must_be_sent_later() -> None:
    """The outcome of a copy of a waiting batch is not decided; with other bytes it is a conflict."""
    lane = OneLane(5)
    session = lane.open()
    lane.send(session, 2, crc=1)

    assert lane.send(session, 2, crc=1) == [Outcome.UNDECIDED]
    assert lane.send(session, 2, crc=3) == [CONFLICT]
    lane.send(session, 0, 1, crc=1)
    assert lane.send(session, 2, crc=1) == [DUP_OF]


@pytest.mark.parametrize(("on_gap", "outcome"), [("fence", DUP), ("skip", STALE)])
def test_order_5_forgets_positions_after_a_window(on_gap: str, outcome: Outcome) -> None:
    """W later a duplicate is still recognized, but its position is no longer known."""
    lane = OneLane(5, on_gap)
    session = lane.open()
    lane.send(session, *range(W))
    lane.send(session, *range(W, W + 10))

    assert lane.send(session, 9, 10) == [outcome, DUP_OF]


# --- gaps -------------------------------------------------------------------------------------------------------------
def test_a_gap_that_stays_open_fences_the_session() -> None:
    """At the timeout all waiting batches are refused with the sequence to continue at.

    An entry records it; new batches are refused.
    """
    lane = OneLane(5)
    session = lane.open()
    lane.send(session, 0)
    ahead = lane.batch(session, 2)
    lane.step([ahead])

    assert lane.later(GAP_MS * 1000 - 1) == 0
    assert lane.later(1) == 1
    assert lane.outcome(ahead) == FENCED
    assert lane.answers[ahead.number]["extra"] == 1
    assert lane.kinds()[-1] == EntryKind.SESSION_FENCE
    assert lane.send(session, 1, 0) == [FENCED, DUP_OF]
    assert lane.order.buffer.used == 0


def test_the_gap_clock_starts_again_when_the_session_moves() -> None:
    """Filling one hole gives the next one its full time."""
    lane = OneLane(5)
    session = lane.open()
    lane.send(session, 1, 3)
    lane.later(GAP_MS * 900)
    lane.send(session, 0)

    assert lane.later(GAP_MS * 900) == 0
    assert lane.later(GAP_MS * 100) == 1


def test_a_closed_gap_never_times_out() -> None:
    """Without waiting batches, no clock runs."""
    lane = OneLane(5)
    session = lane.open()
    lane.send(session, 1)
    lane.send(session, 0)

    assert lane.later(GAP_MS * 10_000) == 0
    assert lane.send(session, 2) == [ORDERED]


def test_an_altered_topic_applies_its_new_time_to_waiting_batches() -> None:
    """A shorter timeout ends an older gap; a longer one gives it more time."""
    lane = OneLane(5)
    session = lane.open()
    lane.send(session, 1)
    lane.order.alter(topic(gap_timeout_ms=GAP_MS * 3))
    assert lane.later(GAP_MS * 2000) == 0
    lane.order.alter(topic(gap_timeout_ms=GAP_MS))
    assert lane.later(1) == 1
    assert lane.kinds()[-1] == EntryKind.SESSION_FENCE


def test_an_altered_topic_keeps_the_time_of_departed_sessions() -> None:
    """sequencer.departed_gap_timeout_ms holds for the topic as it is altered, too, up to its gap_timeout_ms."""
    lane = OneLane(5)
    lane.order.begin(LaneTerms(departed_timeout_ms=7), lambda _count: None)
    assert lane.order.departed_timeout_us == 7_000
    lane.order.alter(topic(gap_timeout_ms=GAP_MS))
    assert lane.order.departed_timeout_us == 7_000
    lane.order.alter(topic(gap_timeout_ms=5))
    assert lane.order.departed_timeout_us == 5_000


def test_an_altered_topic_skips_from_then_on() -> None:
    """on_gap may become skip: the open gap is skipped at its time."""
    lane = OneLane(5)
    session = lane.open()
    lane.send(session, 1)
    lane.order.alter(topic(on_gap="skip"))
    assert lane.later(GAP_MS * 1000) == 1
    assert lane.kinds()[-2:] == [EntryKind.SKIP, EntryKind.BATCH]
    assert lane.send(session, 0) == [LOST]


def test_an_altered_topic_ends_idle_sessions_by_its_new_time() -> None:
    """A shorter session_ttl takes effect without waiting for the old one."""
    lane = OneLane(5)
    lane.open()
    assert lane.later(2_000_000) == 0
    lane.order.alter(topic(session_ttl_s=1))
    assert lane.later(1) == 1


def test_skipping_declares_the_missing_sequences_lost() -> None:
    """on_gap=skip: a SKIP entry names the missing sequences, waiting batches follow, late batches are lost."""
    lane = OneLane(5, "skip")
    session = lane.open()
    ahead = [lane.batch(session, seq) for seq in (2, 3, 6)]
    lane.step(ahead)
    lane.later(GAP_MS * 1000)

    assert [lane.outcome(batch) for batch in ahead] == [ORDERED, ORDERED, None]
    skip = lane.log[lane.log["kind"] == EntryKind.SKIP]
    assert (int(skip["session_seq"][0]), int(skip["location"][0]), int(skip["count"][0])) == (0, 2, 0)
    assert lane.send(session, 0, 1, 4) == [LOST, LOST, ORDERED]
    lane.later(GAP_MS * 1000)
    assert lane.stored(session) == [2, 3, 4, 6]
    assert lane.outcome(ahead[2]) == ORDERED


def test_a_departed_session_has_a_second_to_close_its_gap() -> None:
    """Once no broker has a connection of it, the short timeout counts, from its departure on."""
    lane = OneLane(5, gap_timeout_ms=30_000)
    session = lane.open()
    lane.send(session, 1)
    lane.later(5_000_000)
    lane.request(EntryKind.SESSION_ATTACH, session, origin=2)
    lane.request(EntryKind.SESSION_DETACH, session, origin=1)

    assert lane.later(2_000_000) == 0
    lane.request(EntryKind.SESSION_DETACH, session, origin=2)
    assert lane.later(999_999) == 0
    assert lane.later(1) == 1


def test_a_session_that_comes_back_has_the_full_time_again() -> None:
    """A new connection cancels the short timeout."""
    lane = OneLane(5, gap_timeout_ms=30_000)
    session = lane.open()
    lane.send(session, 1)
    lane.request(EntryKind.SESSION_DETACH, session)
    lane.request(EntryKind.SESSION_ATTACH, session, origin=3)

    assert lane.later(29_000_000) == 0
    assert lane.later(1_000_000) == 1


# --- bounds -----------------------------------------------------------------------------------------------------------
def test_a_session_holds_less_than_a_window() -> None:
    """At most W - 1 batches of a session wait; no more are possible, so no more are stored."""
    lane = OneLane(5, held=10 * W)
    session = lane.open()

    assert lane.send(session, *range(1, W + 5)) == [None] * (W - 1) + [BACKPRESSURE] * 5
    assert lane.order.buffer.used == W - 1


def test_at_the_total_bound_further_batches_get_backpressure() -> None:
    """Without a session to fence, a batch without a slot is refused for now.

    It leaves no wrong position in the window.
    """
    lane = OneLane(5, held=3)
    session = lane.open()
    lane.send(session, *range(W - 6))

    assert lane.send(session, *range(W, W + 5)) == [None] * 3 + [BACKPRESSURE] * 2
    assert lane.send(session, 3, 4) == [DUP, DUP]
    assert lane.send(session, *range(W - 6, W)) == [ORDERED] * 6
    assert lane.send(session, W + 3, 4) == [ORDERED, DUP]


def test_requests_do_not_disturb_a_round() -> None:
    """A kind that is no request and no batch is refused."""
    lane = OneLane(5)

    assert lane.request(EntryKind.SKIP)["outcome"] == Outcome.UNKNOWN_SESSION


def test_answers_name_the_entry_and_its_session() -> None:
    """A result carries the pending index, session and sequence it answers; refusals name no position."""
    lane = OneLane(5)
    session = lane.open()
    batch = Batch(77, session, W, 1)
    lane.order.order(pending([batch], origin=9), lane.now_us)
    origins, results = lane.order.out.take_answers()[0]

    assert origins.tolist() == [9]
    assert (int(results["pending"][0]), int(results["session"][0]), int(results["session_seq"][0])) == (77, session, W)
    assert int(results["index"][0]) == int(results["seq"][0]) == NO_INDEX
    assert results.dtype.itemsize == 64
    assert np.all(results["outcome"] == BACKPRESSURE)
