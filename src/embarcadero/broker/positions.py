"""Positions in a lane: its ends, lookups by seq and time, and a span cut into pieces of about the same size.

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
    """Check the way in which a position is named. Raises BadValue."""
    if by not in WAYS_TO_FIND:
        raise BadValue(f"unknown way to find a position: {by!r}", f"use {', '.join(WAYS_TO_FIND)}")


def check_trim(ask: m.Trim, clock: Clock) -> None:
    """Check that a trim does not cover records that may still arrive. Raises FuturePosition."""
    if ask.by == "time" and ask.before > clock.wall_us():
        raise FuturePosition("the time to trim to is in the future", "use a time in the past")


def found(reader: LaneReader, start: FoundBatch, index: int, seq: int | None) -> m.PlaceIs:
    """Answer with the position of a batch. Raises Trimmed below the start, where its seq is no longer known."""
    if index < start.index or seq is None:
        raise Trimmed(
            f"the batch is trimmed; the first readable batch has index {start.index}, seq {start.seq}",
            "start there, or pass None to start at the first batch",
        )
    return position_is(reader, FoundBatch(index, seq))


def position_is(reader: LaneReader, position: FoundBatch) -> m.PlaceIs:
    """Answer with a position."""
    return m.PlaceIs(lane=reader.lane, index=position.index, seq=position.seq)


_POINTS_PER_PIECE = 8
"""Files are sampled this finely per piece: pieces differ by at most this fraction of their size."""


def check_measure(ask: Measure, trimmed: int) -> None:
    """Check the span, sizes and counts. Raises BadValue, or Trimmed if the whole span is trimmed."""
    if ask.start > ask.stop or not ask.piece_bytes or not ask.pieces_max:
        raise BadValue(
            f"can't cut [{ask.start}, {ask.stop}) into at most {ask.pieces_max} pieces of {ask.piece_bytes} bytes",
            "use start <= stop, and sizes and counts of at least 1",
        )
    if ask.start < ask.stop <= trimmed:
        raise _trimmed(ask.stop)


def _trimmed(stop: int) -> Trimmed:
    return Trimmed(f"batches before index {stop} are trimmed", "measure from the start that tail() returns")


def pieces(ask: Measure, hot: Hot, segments: Segments | None) -> list[Cut]:
    """Return the pieces of a span. With `segments` it may block: parts that left memory are looked up in files."""
    points: list[Point] = []
    stop, stop_seq, entries, most = ask.stop, hot.stop_seq, hot.entries, min(ask.pieces_max, PIECES_MAX)
    if segments is not None and ask.start < (until := min(ask.stop, hot.start)):
        every = max(INDEX_EVERY_BYTES, ask.piece_bytes // _POINTS_PER_PIECE)
        points, reached = segments.points(ask.start, until, every, ask.piece_bytes * most)
        if reached < until:  # the pieces are enough
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
    """Cut where the sum of sizes passes a multiple of a piece. Each size belongs to the batches from its index on.

    `end` is the position after all batches. Only the first `pieces_max` pieces are returned.
    """
    if not len(indices):
        return [Cut(*end, 0)]
    before = np.cumsum(sizes) - sizes
    begins = np.flatnonzero(np.diff(before // piece_bytes)) + 1
    ends = zip([*indices[begins].tolist(), end.index], [*seqs[begins].tolist(), end.seq], strict=True)
    weights = np.add.reduceat(sizes, np.concatenate(([0], begins))).tolist()
    return [Cut(index, seq, size) for (index, seq), size in zip(ends, weights, strict=True)][:pieces_max]


class Positions:
    """Answers requests for ends of lanes, positions by seq and time, and pieces of spans. Moves a lane's start."""

    def __init__(self, context: BrokerContext, store: StoreView, readers: LaneReaders) -> None:
        self._clock, self._directory, self._calls = context.env.clock, context.directory, context.store_calls
        self._store, self._readers = store, readers

    # --- ends and positions -------------------------------------------------------------------------------------------
    def tail(self, peer: Peer, request: int, ask: m.GetTail) -> None:
        """Answer with both ends of a lane, and the start of its readable part."""
        lane = ask.lane

        def answer(reader: LaneReader, start: FoundBatch) -> m.TailIs:
            ends = reader.ends()
            if ends is None:
                raise Retriable("the end of the log is unknown while a sequencer takes over", "try again")
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
        """Answer with a position in the topic's table. If the table changed meanwhile, try once more."""
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
        """Move the start of a lane, and answer with the new start."""
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
        """Answer with the start of a lane for readers, on brokers or in the table."""
        return position_is(reader, _cold_start(self._readers.tier(reader.lane), reader.lane, start))

    def _with_start(
        self,
        peer: Peer,
        request: int,
        lane: int,
        answer: Callable[[LaneReader, FoundBatch], m.Message],
        last: bool = False,
    ) -> None:
        """Answer with a message that depends on the start of the readable part of a lane."""
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
            raise Retriable("the start of the log is unknown while a sequencer takes over", "try again")
        return FoundBatch(*start)

    def _start_above(self, reader: LaneReader, segments: Segments) -> FoundBatch:
        """Return the start of a lane whose files have no batch below the bound of the search: it is in memory.

        Raises Retriable if memory starts above that bound, because the files between were not searched. This happens
        after a loss of memory, when the lane continues at its ceiling, and when other brokers counted more as durable.
        """
        start = self._memory_start(reader)
        if not segments.reach(start.index, reader.trimmed):
            raise Retriable("the start of the log is unknown: its files were searched too early", "try again")
        return start

    def _check_unchanged(self, stored: StoredLane, segments: Segments) -> None:
        """Raise Retriable if the ranges changed since they were read: files and memory are then of different moments.

        Call this after everything else is loaded. A lane continues in memory only after the store has its new range.
        """
        self._store.refresh()
        if stored.chain.ranges != segments.chain.ranges:
            raise Retriable("the ranges of the log changed during the search", "try again")

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
        """Answer with a message that depends on a position and on the start of the lane.

        If no copy of the start is readable, only a trim continues. It needs no seq there, and removes the unreadable
        part.
        """
        check_way(by)
        reader = self._readers.fresh_reader(lane)
        position, stored = reader.position(by, value), reader.stored
        if position is None:
            raise Retriable("positions are unknown while a sequencer takes over", "try again")
        if stored is None:
            message = answer(reader, self._memory_start(reader), *position)
            if message is not None:
                peer.answer(request, message)
            return
        segments = self._readers.segments(reader, stored)
        if by == "index" and value < max(reader.trimmed, stored.chain.start):
            position = KnownPosition(value, None)  # its files may be gone, although the index is below the end
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
            if on_disk:  # no batch is as recent: the durable end
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
        """Run a job on segment files (or in another queue) and answer with its result.

        `again` tries once more if no copy was good: the data may have been trimmed, dropped or compacted meanwhile.
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
            raise Retriable("the span can't be measured while a sequencer takes over", "try again")

        def answer(found: list[Cut]) -> m.PiecesAre:
            return m.PiecesAre(lane=ask.lane, cuts=found)

        if (stored := reader.stored) is None or hot.start <= ask.start:
            peer.answer(request, answer(pieces(ask, hot, None)))
            return
        segments = self._readers.segments(reader, stored)
        again = None if last else partial(self.measure, peer, request, ask, last=True)
        self._answer_later(peer, request, partial(pieces, ask, hot, segments), answer, again)

    def _measure_table(self, peer: Peer, request: int, ask: m.Measure, last: bool = False) -> None:
        """Answer with files of the topic's table. If the table changed meanwhile, try once more."""
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
    """Return the lane's start in the topic's table if it is below `hot`, the brokers' start; otherwise `hot`."""
    if tier is None or tier.start(lane) >= min(tier.frontier(lane), (hot.index, hot.seq)):
        return hot
    return FoundBatch(*tier.start(lane))
