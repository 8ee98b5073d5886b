"""Sessions: opened, continued, taken over, closed, forgotten; handles and rows."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from embarcadero.limits import FENCED_KEPT_S
from embarcadero.limits import SESSION_WINDOW as W
from embarcadero.sequencer.order.batches import FenceReason
from embarcadero.sequencer.order.lane import fence
from embarcadero.sequencer.order.sessions import FREE, SessionTable
from embarcadero.types import NO_SESSION, EntryKind, Outcome
from tests.sequencer.harness import OneLane

OPEN, FENCE, CLOSE = EntryKind.SESSION_OPEN, EntryKind.SESSION_FENCE, EntryKind.SESSION_CLOSE


def outcome(result: object) -> Outcome:
    return Outcome(int(result["outcome"]))  # type: ignore[index]


def test_a_new_session_begins_at_zero() -> None:
    """The answer names the new handle, the next sequence, and the index of the session's entry."""
    lane = OneLane()
    lane.open()
    result = lane.request(OPEN)

    assert outcome(result) == Outcome.OPENED
    assert (int(result["session"]), int(result["extra"]), int(result["seq"]), int(result["index"])) == (1, 0, 0, 1)
    assert lane.kinds() == [OPEN, OPEN]


def test_a_name_opened_again_fences_its_holder_and_continues() -> None:
    """The earlier holder is out permanently; the new one continues its sequences, and duplicates are recognized."""
    lane = OneLane()
    first = lane.open(name=5)
    lane.send(first, 0, 1)
    second = lane.open(name=5)

    assert lane.kinds()[-2:] == [FENCE, OPEN]
    assert lane.send(first, 2) == [Outcome.FENCED]
    assert lane.send(second, 1, 2) == [Outcome.DUP_OF, Outcome.ORDERED]
    refused = lane.request(OPEN, first)
    assert outcome(refused) == Outcome.FENCED
    assert int(refused["extra"]) == 2


def test_a_name_is_opened_only_over_the_named_holder() -> None:
    """A late request does not take the name.

    Its answer names the holder, and the client may ask again over that one.
    """
    lane = OneLane()
    first = int(lane.request(OPEN, name=5, holder=NO_SESSION)["session"])
    late = lane.request(OPEN, name=5, holder=NO_SESSION)

    assert (outcome(late), int(late["session"])) == (Outcome.NAME_HELD, first)
    second = lane.request(OPEN, name=5, holder=first)
    assert outcome(second) == Outcome.OPENED
    later = lane.request(OPEN, name=5, holder=first)
    assert (outcome(later), int(later["session"])) == (Outcome.NAME_HELD, int(second["session"]))
    assert lane.send(int(second["session"]), 0) == [Outcome.ORDERED]
    assert lane.kinds() == [OPEN, FENCE, OPEN, EntryKind.BATCH]


def test_a_request_for_a_held_name_learns_the_next_sequence() -> None:
    """A caller that names another holder changes nothing, and learns the next sequence of the session."""
    lane = OneLane()
    session = int(lane.request(OPEN, name=5, holder=NO_SESSION)["session"])
    lane.send(session, 0, 1, 2)
    look = lane.request(OPEN, name=5, holder=NO_SESSION)

    assert (outcome(look), int(look["session"]), int(look["extra"])) == (Outcome.NAME_HELD, session, 3)
    assert lane.send(session, 3) == [Outcome.ORDERED]


def test_a_name_without_a_holder_is_opened_without_naming_one() -> None:
    """A request that names a former holder learns that there is none."""
    lane = OneLane()
    first = lane.open(name=5)
    lane.request(CLOSE, first)
    gone = lane.request(OPEN, name=5, holder=first)

    assert (outcome(gone), int(gone["session"])) == (Outcome.NAME_HELD, NO_SESSION)
    assert outcome(lane.request(OPEN, name=5, holder=NO_SESSION)) == Outcome.OPENED


def test_a_fenced_session_is_continued_by_its_handle() -> None:
    """After a fence the publisher continues under a new handle; waiting batches were refused, and can be sent again."""
    lane = OneLane()
    first = lane.open()
    lane.send(first, 0, 2)
    lane.later(1_000_000)
    result = lane.request(OPEN, first)

    second = int(result["session"])
    assert int(result["extra"]) == 1
    assert lane.send(second, 0, 1, 2) == [Outcome.DUP_OF, Outcome.ORDERED, Outcome.ORDERED]


def test_an_open_whose_answer_was_lost_can_be_asked_again() -> None:
    """Continuing the same session twice continues the newest of the chain."""
    lane = OneLane()
    first = lane.open()
    lane.send(first, 0)
    second = lane.open(resumed=first)
    lane.send(second, 1)
    third = lane.open(resumed=first)

    assert lane.send(second, 2) == [Outcome.FENCED]
    assert lane.send(third, 0, 1, 2) == [Outcome.DUP_OF, Outcome.DUP_OF, Outcome.ORDERED]


def test_a_chain_that_ended_cannot_be_continued() -> None:
    """When the newest session of a chain is closed, its predecessors cannot be continued."""
    lane = OneLane()
    first = lane.open()
    second = lane.open(resumed=first)
    lane.request(CLOSE, second)

    assert outcome(lane.request(OPEN, first)) == Outcome.UNKNOWN_SESSION


def test_unknown_sessions_cannot_be_continued() -> None:
    """Resuming an unknown session is refused."""
    assert outcome(OneLane().request(OPEN, 3)) == Outcome.UNKNOWN_SESSION


def test_order_2_continues_the_window_with_its_holes() -> None:
    """Unseen sequences of the earlier session can still be stored by the new one; `low` is reported."""
    lane = OneLane(2)
    first = lane.open(name=5)
    lane.send(first, 3, 5, low=3)
    result = lane.request(OPEN, name=5)

    assert (int(result["extra"]), int(result["seq"])) == (6, 3)
    second = int(result["session"])
    assert lane.send(second, 3, 4, 5, 2, low=3) == [
        Outcome.DUP_OF, Outcome.ORDERED, Outcome.DUP_OF, Outcome.STALE,
    ]  # fmt: skip


def test_closing_forgets_a_session_and_its_name() -> None:
    """A closed session is unknown, closing it again succeeds, and its name starts again."""
    lane = OneLane()
    session = lane.open(name=5)
    lane.send(session, 0, 2)

    assert outcome(lane.request(CLOSE, session)) == Outcome.CLOSED
    assert lane.outcome(3) == Outcome.FENCED
    assert lane.send(session, 1) == [Outcome.UNKNOWN_SESSION]
    assert outcome(lane.request(CLOSE, session)) == Outcome.CLOSED
    assert int(lane.request(OPEN, name=5)["extra"]) == 0
    assert lane.order.buffer.used == 0


def test_a_full_table_refuses_new_sessions() -> None:
    """At the bound a new session is refused; a closed one makes space."""
    lane = OneLane(sessions=4)
    handles = [lane.open() for _ in range(4)]

    assert outcome(lane.request(OPEN)) == Outcome.TOO_MANY_SESSIONS
    lane.request(CLOSE, handles[2])
    assert outcome(lane.request(OPEN)) == Outcome.OPENED


def test_a_full_table_forgets_the_oldest_fenced_session() -> None:
    """Fenced sessions are kept only while their rows are not needed."""
    lane = OneLane(sessions=3)
    first, second = lane.open(name=1), lane.open(name=2)
    lane.now_us += 10
    newer = lane.open(name=2)

    assert lane.send(second, 0) == [Outcome.FENCED]
    lane.open()
    assert lane.send(second, 0) == [Outcome.UNKNOWN_SESSION]
    assert lane.send(first, 0) == lane.send(newer, 0) == [Outcome.ORDERED]
    assert lane.kinds()[-3:-1] == [CLOSE, EntryKind.BATCH]


def test_a_session_can_be_continued_repeatedly_in_a_full_table() -> None:
    """While answers are lost, its publisher knows of no other: it is not forgotten for its own successors."""
    lane = OneLane(sessions=4)
    first, quiet = lane.open(), lane.open()
    lane.now_us += 10
    fence(lane.order, lane.order.table.row_of(quiet), lane.now_us, FenceReason.IDLE)
    lane.open()
    for _ in range(3):
        lane.now_us += 10
        newest = lane.open(resumed=first)

    assert lane.send(first, 0) == [Outcome.FENCED]
    assert lane.send(newest, 0) == [Outcome.ORDERED]
    assert lane.send(quiet, 0) == [Outcome.UNKNOWN_SESSION]


def test_continuing_a_session_leaves_the_previous_one() -> None:
    """However often a publisher continues, it has a few rows only, also if half of the answers are lost."""
    lane = OneLane(sessions=16)
    other, newest = lane.open(), lane.open()
    fence(lane.order, lane.order.table.row_of(other), lane.now_us, FenceReason.IDLE)
    for sequence in range(20):
        lane.send(newest, sequence)
        before, newest = newest, lane.open(resumed=newest)
        again = lane.open(resumed=before)

        assert lane.order.table.used <= 5
        assert lane.send(newest, sequence + 1) == [Outcome.FENCED]
        newest = again
    assert lane.send(lane.open(resumed=other), 0) == [Outcome.ORDERED]


def test_a_session_can_be_continued_in_a_full_table() -> None:
    """The new session takes the row of the one it continues."""
    lane = OneLane(sessions=2)
    first = lane.open()
    lane.open()
    lane.send(first, 0)
    second = lane.open(resumed=first)

    assert lane.send(second, 0, 1) == [Outcome.DUP_OF, Outcome.ORDERED]
    assert lane.send(first, 0) == [Outcome.UNKNOWN_SESSION]
    assert lane.order.table.used == 2


def test_an_idle_session_is_fenced_and_later_forgotten() -> None:
    """After session_ttl without a batch the session is fenced; an hour later it is gone."""
    lane = OneLane(session_ttl_s=100)
    idle, busy = lane.open(), lane.open()
    lane.later(60_000_000)
    lane.send(busy, 0)

    assert lane.later(40_000_000) == 1
    assert lane.send(idle, 0) == [Outcome.FENCED]
    assert lane.send(busy, 1) == [Outcome.ORDERED]
    for _ in range(FENCED_KEPT_S // 50):
        lane.send(busy, int(lane.order.table.expected[busy]))
        lane.later(50_000_000)
    assert lane.send(idle, 0) == [Outcome.UNKNOWN_SESSION]
    assert lane.send(busy, int(lane.order.table.expected[busy])) == [Outcome.ORDERED]


@given(seed=st.integers(0, 1 << 32))
@settings(deadline=None, max_examples=40)
def test_handles_grow_and_rows_are_never_shared(seed: int) -> None:
    """Whatever opens and closes: every handle is new, and two sessions never have the same row."""
    rng, table = random.Random(seed), SessionTable(6)
    rows: dict[int, int] = {}
    newest = -1
    for _ in range(200):
        if len(rows) < 6 and rng.random() < 0.6:
            handle = table.free_handle()
            assert handle is not None
            assert handle > newest
            newest = handle
            row = table.open(handle, 0, 0, None, False)
            assert row not in rows.values()
            rows[handle] = row
        elif rows:
            table.forget(rows.pop(rng.choice(list(rows))))
        assert {handle: table.row_of(handle) for handle in rows} == rows
        assert int((table.state != FREE).sum()) == table.used == len(rows)


def test_handles_are_not_reused_when_they_run_out() -> None:
    """Near 2**32 no free handle is found."""
    table = SessionTable(4)
    table.next_handle = NO_SESSION - 2
    assert table.free_handle() == NO_SESSION - 2
    table.next_handle = NO_SESSION - 1

    assert table.free_handle() is None


def test_the_window_is_per_session() -> None:
    """One session's window does not touch another's."""
    lane = OneLane()
    first, second = lane.open(), lane.open()
    lane.send(first, *range(W))

    assert lane.send(second, *range(W)) == [Outcome.ORDERED] * W
    assert lane.send(first, *range(W)) == [Outcome.DUP_OF] * W
