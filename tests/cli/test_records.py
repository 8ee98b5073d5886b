"""publish: lines of a file become records, also while the cluster is full."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from embarcadero.cli.records import _Sent, _stored_batches
from embarcadero.client.results import Batch, OrderEntry
from embarcadero.errors import Backpressure, OutcomeUnknown
from embarcadero.limits import SESSION_WINDOW
from embarcadero.types import NO_SESSION, EntryKind


class Crowded:
    """A publisher to a full cluster: a call with a time limit succeeds."""

    def __init__(self, reasons: list[str]) -> None:
        self._reasons = reasons
        self.taken: list[bytes] = []

    def send(self, value: bytes, *, key: bytes | None, timeout: float | None = None) -> Any:
        if timeout is None and self._reasons:
            raise Backpressure(self._reasons.pop(0), "try again later")
        self.taken.append(value)
        return None


def test_publish_waits_for_capacity_and_reports_each_reason_once(capsys: pytest.CaptureFixture[str]) -> None:
    """It used to end in the middle of a file; without --session it was unknown where to continue."""
    publisher, sent = Crowded(["disk full", "disk full", "no memory"]), _Sent()
    for number in range(5):
        sent.take(publisher.send, b"%d" % number, key=None)
    assert publisher.taken == [b"0", b"1", b"2", b"3", b"4"]
    expected = ["waiting for capacity: disk full", "waiting for capacity: no memory"]
    assert capsys.readouterr().err.splitlines() == expected


FIRST, EARLIER, OURS, OTHER = 4, 5 << 16 | 1, 9 << 16 | 2, 7
"""Handles of sessions: the first of a name, its continuation, the publisher's own, and another name's."""


def entry(index: int, kind: EntryKind, session: int, session_seq: int, earlier: int = 0) -> Batch:
    """An entry of the log; a SESSION_OPEN names the session that it continues in `schema` and `partition`."""
    fields = dict.fromkeys(OrderEntry._fields, 0) | {"index": index, "kind": int(kind), "session": session}
    fields |= {"session_seq": session_seq, "schema": earlier >> 16, "partition": earlier & 0xFFFF}
    return Batch.of_entry(3, OrderEntry(**fields), b"", {})


class Stored:
    """A log of one topic, and the publisher of a session. For each stored batch: its handle and session_seq."""

    def __init__(self, batches: list[tuple[int, int]], done: int) -> None:
        opens = [(OTHER, NO_SESSION), (FIRST, NO_SESSION), (EARLIER, FIRST), (OURS, EARLIER)]
        self._opens = [entry(at, EntryKind.SESSION_OPEN, one, 0, before) for at, (one, before) in enumerate(opens)]
        self._batches = [entry(4 + at, EntryKind.BATCH, *batch) for at, batch in enumerate(batches)]
        self._done = done
        self.reads: set[str] = set()
        self.pump = SimpleNamespace(driver=SimpleNamespace(core=SimpleNamespace(session=OURS)))

    def next_session_seq(self) -> int:
        return self._done

    def tail(self, _: str) -> Any:
        return SimpleNamespace(index=4 + len(self._batches))

    def scan(
        self, _: str, *, stop: int, read: str, start: int | None = None, partitions: Any = None, control: bool = False
    ) -> Any:
        assert stop == 4 + len(self._batches)
        assert (start, partitions, control) in ((1, None, False), (None, [], True))
        self.reads.add(read)
        return iter([self._opens] if control else [self._batches[:2], self._batches[2:]])

    def found(self, durable: bool = False) -> list[int]:
        about: Any = SimpleNamespace(name="t")
        log: Any = self
        return [batch.session_seq for batch in _stored_batches(log, log, about, "job", durable=durable)]


def test_batches_of_all_holders_of_a_name_are_found_in_their_order() -> None:
    """Batches of a weak session may be in the log in another order; those of other sessions do not count."""
    stored = Stored([(FIRST, 1), (OTHER, 0), (FIRST, 0), (EARLIER, 3), (EARLIER, 2), (OTHER, 4)], 4)
    assert stored.found() == [0, 1, 2, 3]
    assert stored.reads == {"ordered"}
    assert stored.found(durable=True) == [0, 1, 2, 3]
    assert stored.reads == {"ordered", "durable"}
    assert Stored([(OTHER, 0)], 0).found() == []


MISSING = {
    "in between": (1, [(FIRST, 0), (FIRST, 2)], 3),
    "at the end": (1, [(FIRST, 0)], 2),
    "all of them": (0, [], 2),
    "skipped by open_session": (0, [(FIRST, 4096 + at) for at in range(SESSION_WINDOW + 2)], 4096 + SESSION_WINDOW + 2),
}


@pytest.mark.parametrize("name", MISSING)
def test_a_batch_that_is_not_in_the_log_is_an_error(name: str) -> None:
    """The number of lines in it is unknown."""
    number, batches, done = MISSING[name]
    with pytest.raises(OutcomeUnknown, match=f"its batch {number} is not in the log"):
        Stored(batches, done).found()
