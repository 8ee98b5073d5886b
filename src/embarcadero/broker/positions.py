"""Positions in a lane: its ends, where a seq or a time is, and a span cut into pieces of about the same size.

Pieces come from entries in memory, and from sparse indexes on disk. A trim moves the start of a lane.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

from embarcadero.broker.clients import Peer
from embarcadero.broker.context import BrokerContext, FairJobs, StoreView
from embarcadero.broker.disk_reads import FoundBatch, Segments, raise_unknown, typed
from embarcadero.broker.lane_reader import ON_DISK, Hot, KnownPosition, LaneReader, LaneReaders, StoredLane
from embarcadero.env import Clock
from embarcadero.errors import BadValue, Corrupt, FuturePosition, Retriable, Trimmed
from embarcadero.limits import INDEX_EVERY_BYTES, PIECES_MAX, TAIL_HOLES_MAX
from embarcadero.storage.segment import Point
from embarcadero.types import Cut, LanePosition, Span, Tier, united
from embarcadero.wire import messages as m
from embarcadero.wire.messages import Measure

WAYS_TO_FIND = ("index", "seq", "time")


def check_way(by: str) -> None:
    """Refuse what is no way to name a position."""
    if by not in WAYS_TO_FIND:
        raise BadValue(f"a place by {by!r}", f"by {', '.join(WAYS_TO_FIND)}")


def check_trim(ask: m.Trim, clock: Clock) -> None:
    """Refuse to trim what may still come."""
    if ask.by == "time" and ask.before > clock.wall_us():
        raise FuturePosition("a trim before a time that has not come", "trim before a time that is past")


def found(reader: LaneReader, start: FoundBatch, index: int, seq: int | None) -> m.PlaceIs:
    """Answer with the position of a batch. Raises Trimmed below the start: there its seq is not known any more."""
    if index < start.index or seq is None:
        raise Trimmed(
            f"the batch asked for is trimmed: the first readable one has index {start.index}, seq {start.seq}",
            "start there, or at None",
        )
    return position_is(reader, FoundBatch(index, seq))


def position_is(reader: LaneReader, position: FoundBatch) -> m.PlaceIs:
    """Answer with a position."""
    return m.PlaceIs(lane=reader.lane, index=position.index, seq=position.seq)


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
    return cuts(indices, seqs, sizes, LanePosition(stop, stop_seq), ask.piece_bytes, most)


def cuts(
    indices: npt.NDArray[np.int64],
    seqs: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    end: LanePosition,
    piece_bytes: int,
    pieces_max: int,
) -> list[Cut]:
    """Cut where the sum of sizes passes a multiple of a piece. Each number stands for what begins at its index.

    `end` is the position behind all. Of more than `pieces_max` pieces, the first ones.
    """
    if not len(indices):
        return [Cut(*end, 0)]
    before = np.cumsum(sizes) - sizes
    begins = np.flatnonzero(np.diff(before // piece_bytes)) + 1
    ends = zip([*indices[begins].tolist(), end.index], [*seqs[begins].tolist(), end.seq], strict=True)
    weights = np.add.reduceat(sizes, np.concatenate(([0], begins))).tolist()
    return [Cut(index, seq, size) for (index, seq), size in zip(ends, weights, strict=True)][:pieces_max]


class Positions:
    """Answers where something is: ends of lanes, positions by seq and time, pieces of spans. Moves a lane's start."""

    def __init__(self, context: BrokerContext, store: StoreView, readers: LaneReaders) -> None:
        self._clock, self._directory, self._calls = context.env.clock, context.directory, context.store_calls
        self._store, self._readers = store, readers

    # --- ends and positions -------------------------------------------------------------------------------------------
    def tail(self, peer: Peer, request: int, ask: m.GetTail) -> None:
        """Answer with both ends of a lane, and with where its readable part starts."""
        lane = ask.lane

        def answer(reader: LaneReader, start: FoundBatch) -> m.TailIs:
            ends = reader.ends()
            if ends is None:
                raise Retriable("the end of the log can't be told while a sequencer takes over", "try again")
            tier = self._readers.tier(lane)
            cold = _cold_start(tier, lane, start)
            hot = (None, None) if cold is start else (start.index, start.seq)
            tier_holes = () if tier is None else tier.holes.get(lane, ())
            in_table = [Span(hole.start_seq, hole.stop_seq) for hole in tier_holes]
            holes = [hole for hole in united([*in_table, *reader.seq_holes()]) if hole.stop > cold.seq]
            return m.TailIs(
                lane=lane,
                index=ends.index,
                seq=ends.seq,
                start_index=cold.index,
                start_seq=cold.seq,
                durable_index=ends.durable_index,
                durable_seq=ends.durable_seq,
                hot_index=hot[0],
                hot_seq=hot[1],
                holes=holes[-TAIL_HOLES_MAX:],
            )

        self._with_start(peer, request, lane, answer)

    def find(self, peer: Peer, request: int, ask: m.Find) -> None:
        """Answer with a position by index, seq or time."""
        if ask.table:
            self._find_in_table(peer, request, ask)
            return
        self._locate(peer, request, ask.lane, ask.by, ask.start, found)

    def _find_in_table(self, peer: Peer, request: int, ask: m.Find, last: bool = False) -> None:
        """Answer with a position in the topic's table; a table that changed meanwhile is asked once more."""
        check_way(ask.by)
        self._readers.fresh_reader(ask.lane)
        tables, tier = self._readers.tables.reader, self._readers.tier(ask.lane)

        def answer(found: tuple[int, int] | None) -> m.PlaceIs:
            index, seq = found or (0, 0)
            return m.PlaceIs(lane=ask.lane, index=index, seq=seq, table=True, missing=found is None)

        if tier is None:
            peer.answer(request, answer(None))
            return
        job = partial(tables.find, tier, ask.lane, ask.by, ask.start)
        again = None if last else partial(self._find_in_table, peer, request, ask, last=True)
        self._answer_later(peer, request, job, answer, again, self._readers.tables)

    def trim(self, peer: Peer, request: int, ask: m.Trim) -> None:
        """Move the start of a lane, and answer where it is then."""
        check_trim(ask, self._clock)

        def trimmed(_start: int) -> None:
            self._with_start(peer, request, ask.lane, self._start_is)

        def trim_it(_reader: LaneReader, start: FoundBatch, index: int, seq: int | None) -> None:
            if index < start.index:
                seq = ask.seq if ask.by == "index" and index == ask.before else None
            name = self._store.topic_name(ask.lane) or ""
            job = partial(
                self._directory.topics.trim, name, ask.lane, index, seq=seq, cold=ask.cold, topic_id=ask.topic_id
            )
            self._answer_later(peer, request, job, trimmed, None, self._calls)

        self._locate(peer, request, ask.lane, ask.by, ask.before, trim_it, trims=True)

    def _start_is(self, reader: LaneReader, start: FoundBatch) -> m.PlaceIs:
        """Where a lane starts for readers, whether brokers still have that or not."""
        return position_is(reader, _cold_start(self._readers.tier(reader.lane), reader.lane, start))

    def _with_start(
        self,
        peer: Peer,
        request: int,
        lane: int,
        answer: Callable[[LaneReader, FoundBatch], m.Message],
        last: bool = False,
    ) -> None:
        """Answer with what needs to know where the readable part of a lane starts."""
        reader = self._readers.fresh_reader(lane)

        if (stored := reader.stored) is None:
            peer.answer(request, answer(reader, self._memory_start(reader)))
            return
        segments = self._readers.segments(reader, stored)

        def with_first(first: FoundBatch | None) -> m.Message:
            message = answer(reader, first or self._start_above(reader, segments))
            self._check_unchanged(stored, segments)
            return message

        again = None if last else partial(self._with_start, peer, request, lane, answer, last=True)
        self._answer_later(peer, request, segments.first, with_first, again)

    def _memory_start(self, reader: LaneReader) -> FoundBatch:
        start = reader.start(self._clock.now_us())
        if start is None:
            raise Retriable("the start of the log can't be told while a sequencer takes over", "try again")
        return FoundBatch(*start)

    def _start_above(self, reader: LaneReader, segments: Segments) -> FoundBatch:
        """The start of a lane whose files have nothing below the bound of the search: it is in memory.

        Raises Retriable if memory starts above that bound: then the files between were not searched. It does so after
        a loss of memory, when the lane goes on at its ceiling, and when others counted more as durable than we did.
        """
        start = self._memory_start(reader)
        if not segments.reach(start.index, reader.trimmed):
            raise Retriable("the start of the log can't be told: its files were searched too early", "try again")
        return start

    def _check_unchanged(self, stored: StoredLane, segments: Segments) -> None:
        """Raise Retriable if the ranges have changed since they were read: files and memory are of two moments then.

        To be called once everything else is loaded. A lane goes on in memory only after the store has its new range.
        """
        self._store.refresh()
        if stored.chain.ranges != segments.chain.ranges:
            raise Retriable("the ranges of the log changed while they were looked at", "try again")

    def _locate(
        self,
        peer: Peer,
        request: int,
        lane: int,
        by: str,
        value: int,
        answer: Callable[[LaneReader, FoundBatch, int, int | None], m.Message | None],
        last: bool = False,
        trims: bool = False,
    ) -> None:
        """Answer with what depends on a position, and on where the lane starts.

        If no copy of the start can be read, only a trim goes on: it needs no seq there, and is how to get rid of it.
        """
        check_way(by)
        reader = self._readers.fresh_reader(lane)
        position, stored = reader.position(by, value), reader.stored
        if position is None:
            raise Retriable("a place can't be told while a sequencer takes over", "try again")
        if stored is None:
            message = answer(reader, self._memory_start(reader), *position)
            if message is not None:
                peer.answer(request, message)
            return
        segments = self._readers.segments(reader, stored)
        if by == "index" and value < max(reader.trimmed, stored.chain.start):
            position = KnownPosition(value, None)  # its files may be gone: it is not above all that is there
        on_disk = position.index == ON_DISK

        def look() -> tuple[FoundBatch | None, FoundBatch | None]:
            try:
                first = segments.first()
            except Corrupt:
                if not trims:
                    raise
                first = FoundBatch(max(reader.trimmed, stored.chain.start), 0)
            return first, segments.locate(by, value) if on_disk else None

        def with_positions(found: tuple[FoundBatch | None, FoundBatch | None]) -> m.Message | None:
            index, seq = position
            if on_disk:  # nothing as young: the end, as far as it is durable
                index, seq = segments.bound, stored.chain.seq_at(segments.bound)
            if found[1] is not None:
                index, seq = found[1].index, None if found[1].instead else found[1].seq
            start = found[0] or self._start_above(reader, segments)
            self._check_unchanged(stored, segments)
            return answer(reader, start, index, seq)

        again = None if last else partial(self._locate, peer, request, lane, by, value, answer, last=True, trims=trims)
        self._answer_later(peer, request, look, with_positions, again)

    def _answer_later(
        self,
        peer: Peer,
        request: int,
        job: Callable[[], object],
        answer: Callable[..., m.Message | None],
        again: Callable[[], None] | None,
        queue: FairJobs | None = None,
    ) -> None:
        """Run a job on segment files (or in another queue); its result becomes the answer.

        `again` asks once more if no copy was good: it may have been trimmed and dropped, or compacted, meanwhile.
        """

        def done(result: object) -> None:
            if peer.gone:
                return
            try:
                if isinstance(result, Corrupt) and again is not None:
                    again()
                    return
                if isinstance(result, Exception):
                    raise result
                message = answer(result)
            except Exception as error:
                peer.fail(request, typed(error))
                raise_unknown(error)
                return
            if message is not None:
                peer.answer(request, message)

        (queue or self._readers.disks).run(peer.number, job, done, lambda: not peer.full)

    def measure(self, peer: Peer, request: int, ask: m.Measure, last: bool = False) -> None:
        """Answer with pieces of a span."""
        if ask.table:
            self._measure_table(peer, request, ask)
            return
        reader = self._readers.fresh_reader(ask.lane)
        check_measure(ask, reader.trimmed)
        if (hot := reader.measured(ask.start, ask.stop)) is None:
            raise Retriable("a span can't be measured while a sequencer takes over", "try again")

        def answer(found: list[Cut]) -> m.PiecesAre:
            return m.PiecesAre(lane=ask.lane, cuts=found)

        if (stored := reader.stored) is None or hot.start <= ask.start:
            peer.answer(request, answer(pieces(ask, hot, None)))
            return
        segments = self._readers.segments(reader, stored)
        again = None if last else partial(self.measure, peer, request, ask, last=True)
        self._answer_later(peer, request, partial(pieces, ask, hot, segments), answer, again)

    def _measure_table(self, peer: Peer, request: int, ask: m.Measure, last: bool = False) -> None:
        """Answer with files of the topic's table; a table that changed meanwhile is asked once more."""
        self._readers.fresh_reader(ask.lane)
        check_measure(ask, 0)
        tables, tier = self._readers.tables.reader, self._readers.tier(ask.lane)

        def answer(cuts: list[Cut]) -> m.PiecesAre:
            return m.PiecesAre(lane=ask.lane, cuts=cuts[: ask.pieces_max], table=True)

        if tier is None:
            peer.answer(request, answer([]))
            return
        job = partial(tables.cuts, tier, ask.lane, ask.start, ask.stop, ask.piece_bytes)
        again = None if last else partial(self._measure_table, peer, request, ask, last=True)
        self._answer_later(peer, request, job, answer, again, self._readers.tables)


def _cold_start(tier: Tier | None, lane: int, hot: FoundBatch) -> FoundBatch:
    """Where the lane's part in the topic's table starts, if that is below what brokers have; else `hot` itself."""
    if tier is None or tier.start(lane) >= min(tier.frontier(lane), (hot.index, hot.seq)):
        return hot
    return FoundBatch(*tier.start(lane))
