"""Places in a lane: where a seq or a time is, and where the lane starts once it is trimmed."""

from __future__ import annotations

from embarcadero.broker.reader import LaneReader
from embarcadero.env import Clock
from embarcadero.errors import BadValue, FuturePosition, Retriable, Trimmed
from embarcadero.wire import messages as m

_WAYS = ("index", "seq", "time")


def find(reader: LaneReader, ask: m.Find, clock: Clock) -> m.PlaceIs:
    """Index and seq of a place. Raises Trimmed below the start, FuturePosition beyond the end."""
    start = start_of(reader, clock)
    index, seq = _locate(reader, ask.by, ask.start)
    if index < start.index or seq is None:
        raise Trimmed(
            f"the batch at {ask.by} {ask.start} is trimmed: the first readable one has index {start.index}, "
            f"seq {start.seq}",
            "start there, or at None",
        )
    return m.PlaceIs(lane=reader.lane, index=index, seq=seq)


def trim_to(reader: LaneReader, ask: m.Trim, clock: Clock) -> int:
    """The index to start at: no batch is split, and one that holds what is to be kept stays whole."""
    if ask.by == "time" and ask.before > clock.wall_us():
        raise FuturePosition("a trim before a time that has not come", "trim before a time that is past")
    return _locate(reader, ask.by, ask.before)[0]


def start_of(reader: LaneReader, clock: Clock) -> m.PlaceIs:
    """The first readable batch."""
    tail = reader.tail(clock.now_us())
    if tail is None:
        raise Retriable("the start of the log can't be told while a sequencer takes over", "try again")
    _, _, index, seq = tail
    return m.PlaceIs(lane=reader.lane, index=index, seq=seq)


def _locate(reader: LaneReader, by: str, value: int) -> tuple[int, int | None]:
    if by not in _WAYS:
        raise BadValue(f"a place by {by!r}", f"by {', '.join(_WAYS)}")
    place = reader.locate(by, value)
    if place is None:
        raise Retriable("a place can't be told while a sequencer takes over", "try again")
    return place
