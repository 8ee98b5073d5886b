"""Places in a lane: where a seq or a time is, and where the lane starts once it is trimmed."""

from __future__ import annotations

from embarcadero.broker.reader import LaneReader
from embarcadero.broker.segments import Place
from embarcadero.env import Clock
from embarcadero.errors import BadValue, FuturePosition, Trimmed
from embarcadero.wire import messages as m

_WAYS = ("index", "seq", "time")


def check_way(by: str) -> None:
    """Refuse what is no way to name a place."""
    if by not in _WAYS:
        raise BadValue(f"a place by {by!r}", f"by {', '.join(_WAYS)}")


def check_trim(ask: m.Trim, clock: Clock) -> None:
    """Refuse to trim what may still come."""
    if ask.by == "time" and ask.before > clock.wall_us():
        raise FuturePosition("a trim before a time that has not come", "trim before a time that is past")


def found(reader: LaneReader, start: Place, index: int, seq: int | None) -> m.PlaceIs:
    """A place that was asked for. Raises Trimmed below the start: there its seq is not known any more."""
    if index < start.index or seq is None:
        raise Trimmed(
            f"the batch asked for is trimmed: the first readable one has index {start.index}, seq {start.seq}",
            "start there, or at None",
        )
    return place_is(reader, Place(index, seq))


def place_is(reader: LaneReader, place: Place) -> m.PlaceIs:
    """A place, as an answer."""
    return m.PlaceIs(lane=reader.lane, index=place.index, seq=place.seq)
