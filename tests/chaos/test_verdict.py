"""Histories of real clusters under the simulator's checkers: a correct one passes, each violation is caught."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from embarcadero_proof.chaos.verdict import acked_in_trouble, judge
from embarcadero_proof.sim.history import Copies, Delivered, Event, History, OnDisk, RoleFailed, Settled, TailRead
from tests.chaos.worlds import BATCHES, LANE, digest, honest, read

Lie = Callable[[list[Event]], list[Event]]
VICTIM = 20


def replaced(kind: type[Event], match: Callable[[Event], bool], **changes: object) -> Lie:
    """Change the matching items."""

    def lie(events: list[Event]) -> list[Event]:
        return [
            msgspec.structs.replace(event, **changes) if isinstance(event, kind) and match(event) else event
            for event in events
        ]

    return lie


def dropped(match: Callable[[Event], bool]) -> Lie:
    """Leave out the matching items."""
    return lambda events: [event for event in events if not match(event)]


def is_read(event: Event, reader: str | None = None, index: int = VICTIM) -> bool:
    return isinstance(event, Delivered) and event.index == index and reader in (None, event.reader)


def swapped(events: list[Event]) -> list[Event]:
    """Two batches are swapped in the results of every reader."""
    changed = []
    for event in events:
        if isinstance(event, Delivered) and event.index in (VICTIM, VICTIM + 1):
            other = 2 * VICTIM + 1 - event.index
            number = other - 1
            event = msgspec.structs.replace(event, digest=digest(number), session_seq=number)  # noqa: PLW2901
        changed.append(event)
    return changed


def doubled(events: list[Event]) -> list[Event]:
    """A batch is in the log a second time, at its end."""
    end = BATCHES + 1
    again = msgspec.structs.replace(
        read("again", VICTIM, events[-1].at), index=end, seq=BATCHES * 4, append_us=events[-1].at
    )
    return [*events[:-1], again, events[-1]]


LIES: dict[str, tuple[str, Lie]] = {
    "an acked batch is gone": ("P1", dropped(is_read)),
    "a reader skips one": ("P4", dropped(lambda event: is_read(event, "live"))),
    "two are swapped": ("P2", swapped),
    "one is there twice": ("P2", doubled),
    "content that was never sent": ("P7", replaced(Delivered, is_read, digest=7)),
    "readers disagree": ("P3", replaced(Delivered, lambda e: is_read(e, "live"), session_seq=99)),
    "the tail is too low": ("P4", replaced(TailRead, lambda _: True, index=10, durable_index=10)),
    "durable on one disk": ("P6", replaced(Copies, lambda e: getattr(e, "index", 0) == VICTIM, copies=1)),
    "durable on no disk": ("P1", dropped(lambda event: isinstance(event, OnDisk) and event.index == VICTIM)),
    "a publish never ends": ("P8", dropped(lambda event: isinstance(event, Settled) and event.number == VICTIM)),
    "a client gives up": ("P8", lambda events: [*events, RoleFailed(at=events[-1].at, process="s", error="Closed")]),
}


def test_a_correct_history_passes() -> None:
    """All promises are kept, and everything is counted."""
    found = judge(History(honest()), acks_least=10)
    assert found.problems == []
    assert found.good
    assert (found.sent, found.acked, found.delivered) == (BATCHES, BATCHES, 2 * BATCHES)
    assert found.faults == {"kill": 1}


@pytest.mark.parametrize("name", LIES)
def test_each_violation_is_caught(name: str) -> None:
    """The checker of the broken promise reports it."""
    promise, lie = LIES[name]
    found = judge(History(lie(honest())), acks_least=10)
    assert not found.good
    assert found.promises[promise], found.problems


def test_too_few_acks_count_as_failed() -> None:
    """A case without acks breaks no promise, but it is not a success."""
    found = judge(History(honest()), acks_least=BATCHES + 1)
    assert not any(found.promises.values())
    assert not found.good
    assert "proves nothing" in found.problems[0]


def test_acks_before_the_first_fault_and_after_healing_do_not_count() -> None:
    """Only acks while something was broken show that the cluster survived it."""
    events = [msgspec.structs.replace(e, at=301_000) if type(e).__name__ == "Fault" else e for e in honest()]
    assert acked_in_trouble(History(events)) == BATCHES - 30
    assert LANE == 3
