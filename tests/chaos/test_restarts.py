"""The first new ack after a restart is of a record that was sent after the kill, however late acks are counted."""

from __future__ import annotations

from pathlib import Path

from embarcadero.client.results import BatchResult, RecordFuture, Waitable
from embarcadero.errors import EmbarcaderoError, TimedOut
from embarcadero.types import Position
from embarcadero_proof.chaos.restarts import Restarts, Round, Settings
from embarcadero_proof.chaos.streams import Stream


def told(error: EmbarcaderoError | None = None) -> RecordFuture:
    """A record's future that has ended."""
    result = BatchResult(Waitable())
    result.settle(None if error else Position(0, 0, 0), error)
    return RecordFuture(result, 0)


def stream_with(sent: int) -> Stream:
    stream = Stream(0, [], "t", 64)
    stream.sent = sent
    return stream


def test_an_ack_that_is_counted_late_is_not_a_new_one() -> None:
    """It had arrived before the kill; only a record that was sent afterwards shows that the cluster is back."""
    stream = stream_with(8)
    stream._waiting.append((7, told()))
    awaited = stream.next_ack()
    stream._on_ack(7, told())
    stream._settle(256)
    assert len(stream.acked) == 1
    assert awaited.at_s is None
    stream._on_ack(8, told(TimedOut("it ended without an ack")))
    assert awaited.at_s is None
    stream._on_ack(9, told())
    first_s = awaited.at_s
    assert first_s is not None
    stream._on_ack(10, told())
    assert awaited.at_s == first_s
    assert stream.next_ack().at_s is None


def test_a_cluster_that_does_not_come_back_is_a_problem(tmp_path: Path) -> None:
    """The waiting time is not a measurement."""
    run = Restarts(Settings(), tmp_path)
    run.report.rounds = [Round(0, acks=100, came_back=True), Round(1, acks=100)]
    assert run.problems() == ["round 2: no ack within 60 s of the restart"]
