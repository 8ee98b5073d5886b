"""Places in a lane: where a seq or a time is, and where the lane starts once it is trimmed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from embarcadero.broker.read.disk import Place, Segments
from embarcadero.broker.read.lane_reader import LaneReader
from embarcadero.broker.read.results import Hot
from embarcadero.env import Clock
from embarcadero.errors import BadValue, FuturePosition, Trimmed
from embarcadero.limits import INDEX_EVERY_BYTES, PIECES_MAX
from embarcadero.storage.segment import Point
from embarcadero.types import Cut
from embarcadero.wire import messages as m
from embarcadero.wire.messages import Measure

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


_POINTS_PER_PIECE = 8
"""How finely files are looked at: pieces differ by at most this part of their size."""


def check_measure(ask: Measure, trimmed: int) -> None:
    """Refuse what is no span or no size, or is wholly trimmed."""
    if ask.start > ask.stop or not ask.piece_bytes or not ask.pieces_max:
        raise BadValue(
            f"pieces of {ask.piece_bytes} bytes of [{ask.start}, {ask.stop}), at most {ask.pieces_max}",
            "start is at most stop; sizes and counts are at least 1",
        )
    if ask.start < ask.stop <= trimmed:
        raise _trimmed(ask.stop)


def _trimmed(stop: int) -> Trimmed:
    return Trimmed(f"batches before index {stop} are trimmed", "measure what tail() says is there")


def pieces(ask: Measure, hot: Hot, segments: Segments | None) -> list[Cut]:
    """The pieces of a span. With `segments` it may block: what memory does not have is looked for in files."""
    points: list[Point] = []
    stop, stop_seq, entries, most = ask.stop, hot.stop_seq, hot.entries, min(ask.pieces_max, PIECES_MAX)
    if segments is not None and ask.start < (until := min(ask.stop, hot.start)):
        every = max(INDEX_EVERY_BYTES, ask.piece_bytes // _POINTS_PER_PIECE)
        points, reached = segments.points(ask.start, until, every, ask.piece_bytes * most)
        if reached < until:  # there is enough
            stop, stop_seq, entries = reached, None, entries[:0]
        if stop_seq is None:
            stop_seq = segments.seq_at(stop)
    if stop_seq is None:
        raise _trimmed(stop)
    in_files = np.array(points, dtype=np.int64).reshape(len(points), 3).T
    in_memory = [entries[name].astype(np.int64) for name in ("index", "seq", "size")]
    indices, seqs, sizes = (np.concatenate(parts) for parts in zip(in_files, in_memory, strict=True))
    return cuts(indices, seqs, sizes, (stop, stop_seq), ask.piece_bytes, most)


def cuts(
    indices: npt.NDArray[np.int64], seqs: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], end: tuple[int, int],
    piece_bytes: int, pieces_max: int,
) -> list[Cut]:  # fmt: skip
    """Cut where the sum of sizes passes a multiple of a piece. Each number stands for what begins at its index.

    `end` is the index and seq behind all. Of more than `pieces_max` pieces, the first ones.
    """
    if not len(indices):
        return [Cut(*end, 0)]
    before = np.cumsum(sizes) - sizes
    begins = np.flatnonzero(np.diff(before // piece_bytes)) + 1
    ends = zip([*indices[begins].tolist(), end[0]], [*seqs[begins].tolist(), end[1]], strict=True)
    weights = np.add.reduceat(sizes, np.concatenate(([0], begins))).tolist()
    return [Cut(index, seq, size) for (index, seq), size in zip(ends, weights, strict=True)][:pieces_max]
