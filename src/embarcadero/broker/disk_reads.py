"""Reads outside memory: segment files of replicas and tables of topics, on workers.

`Segments` reads files over all ranges of a lane and all replicas of each range.

Everything here may block and runs on a worker. It only reads records that are durable (`bound`) and not trimmed. The
reader of the files checks all results: entry checks, contiguous indices, CRC32C of payloads. A missing or damaged copy
is skipped. If no copy of a range is good, the answer is a typed error.

Jobs run a few at a time, fair over clients, so that a disk never delays a publisher. Each client takes its turn,
however many jobs it has. For a sequential reader, the next span is read ahead while the client takes this one, if there
is memory for that.

Reads of tables run on workers of their own, a few at a time and fair over clients. An object store that does not answer
delays other reads of tables, but neither reads of disks nor publishers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from embarcadero.broker.clients import Peer
from embarcadero.broker.context import FairJobs, JobDone
from embarcadero.broker.durable import LaneRanges
from embarcadero.env import Disk, Workers
from embarcadero.errors import (
    BadSegment,
    ClusterError,
    Corrupt,
    DiskFailed,
    EmbarcaderoError,
    NotAvailable,
    Trimmed,
)
from embarcadero.fabric.layout import ORDER, Entries, pick
from embarcadero.limits import (
    FETCH_ENTRIES_MAX,
    TABLE_JOBS_MAX,
    WARM_AHEAD_BYTES_MAX,
    WARM_JOBS_MAX,
    WARM_READERS_MAX,
)
from embarcadero.storage.layout import range_folder
from embarcadero.storage.reading import RangeReader
from embarcadero.storage.segment import Point
from embarcadero.types import (
    BATCH_KIND,
    Cut,
    EntryKind,
    Gap,
    GapKind,
    Range,
    ReplicaMember,
    ReplicaRef,
    Tier,
)
from embarcadero.wire.codec import PAYLOAD_ALIGN, fetched_header
from embarcadero.wire.messages import Fetch
from embarcadero.wire.schemas import TopicSchemas

T = TypeVar("T")

_PADDING: Final = bytes(PAYLOAD_ALIGN)
_SKIP_KIND: Final = int(EntryKind.SKIP)  # a plain number, see BATCH_KIND


@dataclass(slots=True)
class FetchResult:
    """The result of a fetch: entries with their payloads, and the next index."""

    entries: Entries
    payloads: list[bytes | memoryview]
    next_index: int
    tail_index: int
    gap: Gap | None = None
    to_come: bool = False  # nothing was appended since the requested time
    elsewhere: Fetch | None = None  # not in memory: the fetch to run on segment files

    def over(self, ask: Fetch) -> bool:
        """Return whether the reader has reached the end it asked for."""
        return ask.stop is not None and self.elsewhere is None and self.next_index >= ask.stop

    @property
    def empty(self) -> bool:
        """Whether there is no answer for the reader yet."""
        return not self.payloads and self.gap is None

    def frame(self, request: int) -> list[bytes | memoryview]:
        """Return the buffers of the answer to a request, in order."""
        body: list[bytes | memoryview] = []
        for payload in self.payloads:
            body.append(payload)
            if pad := -len(payload) % PAYLOAD_ALIGN:
                body.append(_PADDING[:pad])
        entries = self.entries.tobytes()
        header = fetched_header(
            request=request,
            next_index=self.next_index,
            tail_index=self.tail_index,
            count=len(self.entries),
            gap=self.gap,
            length=len(entries) + sum(map(len, body)),
        )
        return [header, entries, *body]


def wanted_entries(entries: Entries, ask: Fetch) -> npt.NDArray[np.bool_]:
    """Select the entries a reader gets: batches (of its partitions) and skips; session entries if it asks for them."""
    if ask.partitions is None and ask.control:
        return np.ones(len(entries), dtype=bool)
    kinds = entries["kind"]
    wanted: npt.NDArray[np.bool_] = kinds == BATCH_KIND
    if ask.partitions is not None:
        wanted &= np.isin(entries["partition"], np.array(ask.partitions, dtype=np.uint16))
    wanted |= (kinds != BATCH_KIND) if ask.control else (kinds == _SKIP_KIND)
    return wanted


class TableReader(Protocol):
    """Reads tables of topics. Called on workers. Raises TierUnavailable, BadTable, or NotAvailable."""

    def fetch(self, tier: Tier, schemas: TopicSchemas, ask: Fetch, stop: int) -> FetchResult:
        """Read batches of the table from index `ask.start` to below `stop`.

        The result has at most `ask.max_bytes`, except that it always has the first batch. `stop` is at most the table's
        frontier. A hole in the table is a LOST gap. The payload of a batch is its columns, encoded as Arrow now;
        `FROM_TABLE` in its entry marks this.
        """
        ...

    def find(self, tier: Tier, lane: int, by: str, value: int) -> tuple[int, int] | None:
        """Find the batch with an index or a seq, or the first one since a time. None if the table has no such batch."""
        ...

    def cuts(self, tier: Tier, lane: int, start: int, stop: int, piece_bytes: int) -> list[Cut]:
        """Return files with batches [start, stop), joined to pieces of about `piece_bytes`."""
        ...


def typed(error: Exception) -> EmbarcaderoError:
    """Return the error that a client gets; an unexpected one is Corrupt."""
    if isinstance(error, EmbarcaderoError):
        return error
    return Corrupt(f"the data can't be read: {error!r}", "this is a bug: see the broker's log, and report it")


def raise_unknown(error: Exception) -> None:
    """Raise unexpected errors again, so that the event loop logs them with a traceback."""
    if not isinstance(error, EmbarcaderoError):
        raise error


def at_index(ask: Fetch, index: int) -> Fetch:
    """Return the same fetch, starting at an index."""
    return msgspec.structs.replace(ask, by="index", start=index)


@dataclass(frozen=True, slots=True)
class FoundBatch:
    """A batch: its index, and the seq of its first record."""

    index: int
    seq: int
    instead: bool = False  # the batch asked for is trimmed or dropped: this is the first remaining one


class RangeFiles(Protocol):
    """One replica's copy of one range (storage.reading.RangeReader)."""

    @property
    def first(self) -> int | None:
        """The first remaining index, or None if the copy is empty."""
        ...

    def read(self, index: int, end: int, max_bytes: int) -> tuple[Entries, list[memoryview]]: ...
    def find_seq(self, seq: int) -> int | None: ...
    def find_time(self, us: int) -> int | None: ...
    def entry(self, index: int) -> Entries | None: ...
    def points(self, index: int, end: int, every: int, max_bytes: int) -> tuple[list[Point], int]: ...


class CopiesOfRanges(Protocol):
    """Access to the copies of ranges."""

    def replicas(self, range_: Range) -> list[ReplicaRef]:
        """Return the replicas that may have a copy, the best first."""
        ...

    def borrow(self, range_: Range, ref: ReplicaRef) -> RangeFiles:
        """Return a reader of one copy, for one user at a time."""
        ...

    def give_back(self, range_: Range, ref: ReplicaRef, files: RangeFiles, good: bool) -> None:
        """Return a borrowed reader."""
        ...


class Segments:
    """The durable files of one lane: positions below `bound`, at or above `trimmed`."""

    def __init__(self, lane: int, chain: LaneRanges, bound: int, trimmed: int, copies: CopiesOfRanges) -> None:
        self._lane, self.chain, self.bound, self._trimmed, self._copies = lane, chain, bound, trimmed, copies

    def fetch(self, ask: Fetch) -> FetchResult:
        """Answer a fetch. Raises Corrupt when no copy is good."""
        if ask.by == "index":
            return self._read(ask.start, ask)
        position = self.locate(ask.by, ask.start)
        if position is None:  # nothing found: the end, as far as files show
            return FetchResult(_nothing(), [], self.bound, self.bound, to_come=ask.by == "time")
        return self._read(position.index, ask)

    def locate(self, by: str, value: int) -> FoundBatch | None:
        """Find a position by index, seq or time, or the earliest one. None if it is at or above the bound."""
        if by == "earliest":
            return self.first()
        if by == "seq":
            return self._by_seq(value)
        if by == "time":
            return self._by_time(value)
        return self._at(self.chain.after_lost(value))

    def reach(self, index: int, trimmed: int) -> bool:
        """Return whether the search covered every existing file below an index. Files below a trim do not count."""
        ranges = self.chain.ranges
        return not ranges or not ranges[-1].open or index <= max(self.bound, trimmed, self.chain.start)

    def first(self) -> FoundBatch | None:
        """Return the first batch that is neither trimmed nor dropped, or None if there is none below the bound."""
        for range_ in self.chain.from_index(self._trimmed):
            start, stop = max(range_.start, self._trimmed), self._stop(range_)
            if start >= stop:
                continue
            found = self._best(range_, partial(self._first_of, start=start, stop=stop))
            if found is not None:
                return found
            if not self._dropped(range_, stop):
                raise self._no_good_copy(range_, start, ["no copy has the batch"])
        return None

    def _dropped(self, range_: Range, stop: int) -> bool:
        """Return whether a copy proves that everything below `stop` was dropped, and is not merely missing."""
        begins = self._best(range_, lambda files: files.first)
        return begins is not None and begins >= stop

    def _first_of(self, files: RangeFiles, start: int, stop: int) -> FoundBatch | None:
        first = files.first
        return None if first is None or max(first, start) >= stop else self._position(files, max(first, start))

    # --- reading ------------------------------------------------------------------------------------------------------
    def _read(self, index: int, ask: Fetch) -> FetchResult:
        """Read batches from an index on, up to the end of its range."""
        range_ = self.chain.owner(index)
        if range_ is None or index >= self.bound:
            return FetchResult(_nothing(), [], index, self.bound)
        problems, dropped, shorter = [], [], []
        stop = min(self._stop(range_), index + FETCH_ENTRIES_MAX, self.bound if ask.stop is None else ask.stop)
        if index >= stop:
            return FetchResult(_nothing(), [], index, self.bound)
        for ref in self._copies.replicas(range_):
            try:
                with self._open(range_, ref) as files:
                    entries, payloads = files.read(index, stop, ask.max_bytes)
                    if len(entries):
                        return self._found(entries, payloads, ask)
                    shorter.append(f"replica {ref.replica}: its copy ends before this index")
            except Trimmed:
                dropped.append(ref)
            except (Corrupt, ClusterError) as error:
                problems.append(f"replica {ref.replica}: {error.message}")
        if dropped and not problems:  # removed by retention; copies that end before the index are no better
            first = self.first()
            stop = self.chain.until_lost(index, self.bound if first is None else first.index)
            if stop > index:
                return FetchResult(_nothing(), [], stop, self.bound, Gap(GapKind.TRIMMED, index, stop))
        raise self._no_good_copy(range_, index, problems + shorter)

    def _found(self, entries: Entries, payloads: list[memoryview], ask: Fetch) -> FetchResult:
        """Select the batches that the reader asked for."""
        rows, after = np.flatnonzero(wanted_entries(entries, ask)), int(entries["index"][-1]) + 1
        taken: list[bytes | memoryview] = [payloads[row] for row in rows.tolist()]
        if 2 * sum(map(len, taken)) < sum(map(len, payloads)):
            taken = list(map(bytes, taken))  # a view would keep everything that was read with it in memory
        return FetchResult(pick(entries, rows), taken, after, self.bound)

    # --- measuring ----------------------------------------------------------------------------------------------------
    def points(self, start: int, stop: int, every: int, max_bytes: int) -> tuple[list[Point], int]:
        """Return batches of a span, about `every` bytes apart, and the index where they end.

        They end at the end of the span, or after `max_bytes`.
        """
        found: list[Point] = []
        at, left = max(start, self._trimmed, self.chain.start), max_bytes
        while at < stop and left > 0:
            range_ = self.chain.owner(at)
            if range_ is None:
                at = self.chain.after_lost(at)
                continue
            until = min(stop, range_.end or stop)
            some = self._best(range_, partial(_points, index=at, end=until, every=every, max_bytes=left))
            if some is None:
                raise self._no_good_copy(range_, at, ["no copy reaches this index"])
            found += some[0]
            at, left = some[1], left - sum(point.bytes for point in some[0])
        return found, max(at, start)

    def seq_at(self, index: int) -> int | None:
        """Return the seq at which a batch begins, or would begin."""
        known = self.chain.seq_at(index)
        if known is not None:
            return known
        position = self._at(self.chain.after_lost(index))
        return None if position is None else position.seq

    # --- looking up ---------------------------------------------------------------------------------------------------
    def _at(self, index: int) -> FoundBatch | None:
        """Return an index with its seq."""
        range_ = self.chain.owner(index)
        if range_ is None or index >= self.bound:
            return None
        found = self._best(range_, lambda files: self._position(files, index))
        if found is None and index >= self._trimmed:
            raise self._no_good_copy(range_, index, ["no copy reaches this index"])
        return found

    def _by_seq(self, seq: int) -> FoundBatch | None:
        """Find the batch that contains a record, or the next batch if that one is lost, trimmed or dropped."""
        for range_ in reversed(self.chain.ranges):
            if range_.start_seq > seq or range_.start == range_.end:
                continue
            if range_.end_seq is not None and seq >= range_.end_seq:
                return self._after(range_)
            if range_.start >= self.bound:
                return None
            if self._stop(range_) <= self._trimmed:
                break  # everything durable in this range is trimmed
            found = self._best(range_, lambda files: self._position(files, files.find_seq(seq)))
            if found is None:
                raise self._no_good_copy(range_, range_.start, [f"no copy reaches seq {seq}"])
            return replace(found, instead=found.seq > seq)
        first = self.first()
        return None if first is None else replace(first, instead=True)

    def _by_time(self, us: int) -> FoundBatch | None:
        """Find the first batch appended at or after a time, or the first remaining one if a match may be gone."""
        found = self._since(us)
        return found if found is None else replace(found, instead=self._may_be_gone(found, us))

    def _may_be_gone(self, found: FoundBatch, us: int) -> bool:
        """Return whether batches since a time may have been trimmed.

        This is so if the first remaining batch is newer than `us`, and the batch before it is not known to be older.
        """
        first = self.first()
        if first is None or found.index > first.index or found.index <= self.chain.after_lost(0):
            return False
        own, before = self._time_of(found.index), self._time_of(found.index - 1)
        return (own is None or own > us) and (before is None or before >= us)

    def _time_of(self, index: int) -> int | None:
        """Return when a batch was appended, if a file still has it. The batch may be trimmed."""
        if (range_ := self.chain.owner(index)) is None:
            return None
        try:
            entry = self._best(range_, lambda files: files.entry(index))
        except Corrupt:
            return None
        return None if entry is None else int(entry["append_us"][0])

    def _since(self, us: int) -> FoundBatch | None:
        """Find the first remaining batch since a time. Append times never decrease."""
        later: FoundBatch | None = None
        for range_ in reversed(list(self.chain.from_index(self._trimmed))):
            if max(range_.start, self._trimmed) >= self._stop(range_):
                continue
            found = self._best(range_, partial(self._in_time, us=us, stop=self._stop(range_)))
            if found is None:
                return later
            later = found
            if found.index > max(range_.start, self._trimmed):
                return later
        return later

    def _in_time(self, files: RangeFiles, us: int, stop: int) -> FoundBatch | None:
        """Find the first batch at or after a time. Only a copy that reaches the end may answer None."""
        index = files.find_time(us)
        if index is None and files.entry(stop - 1) is None:
            raise BadSegment(f"the copy ends before index {stop}", "the replica completes it from a peer")
        return self._position(files, index)

    def _position(self, files: RangeFiles, index: int | None) -> FoundBatch | None:
        """Return an index with its seq, if it is in this copy and below the bound. None: this copy ends before it."""
        if index is None:
            return None
        index = max(index, self._trimmed)
        entry = files.entry(index) if index < self.bound else None
        return None if entry is None else FoundBatch(index, int(entry["seq"][0]))

    def _after(self, range_: Range) -> FoundBatch | None:
        """Return the first batch after a sealed range."""
        following = next((r for r in self.chain.ranges if r.number > range_.number and r.start != r.end), None)
        return None if following is None else self._at(following.start)

    def _stop(self, range_: Range) -> int:
        """Return the end of the readable part of a range: its seal, or the durable bound."""
        return self.bound if range_.end is None else min(range_.end, self.bound)

    # --- copies -------------------------------------------------------------------------------------------------------
    def _best(self, range_: Range, look: Callable[[RangeFiles], T | None]) -> T | None:
        """Return the first good copy's answer, or None if no good copy has one."""
        problems, answered = [], False
        for ref in self._copies.replicas(range_):
            try:
                with self._open(range_, ref) as files:
                    found = look(files)
            except (Corrupt, ClusterError) as error:
                problems.append(f"replica {ref.replica}: {error.message}")
                continue
            except Trimmed:
                found = None
            if found is not None:
                return found
            answered = True
        if problems and not answered:
            raise self._no_good_copy(range_, range_.start, problems)
        return None

    @contextmanager
    def _open(self, range_: Range, ref: ReplicaRef) -> Iterator[RangeFiles]:
        files = self._copies.borrow(range_, ref)
        try:
            yield files
        except EmbarcaderoError:
            self._copies.give_back(range_, ref, files, good=False)
            raise
        self._copies.give_back(range_, ref, files, good=True)

    def _no_good_copy(self, range_: Range, index: int, problems: list[str]) -> Corrupt:
        return Corrupt(
            f"no good copy of index {index} of lane {self._lane} (range {range_.number}): {'; '.join(problems)}",
            "check `embarcadero status`; the copy is served again once a replica has repaired it",
        )


def _points(files: RangeFiles, index: int, end: int, every: int, max_bytes: int) -> tuple[list[Point], int]:
    return files.points(index, end, every, max_bytes)


def _nothing() -> Entries:
    return np.zeros(0, dtype=ORDER)


_AHEAD_KEPT_US = 2_000_000


def no_disks(member: ReplicaMember) -> Disk:
    """Raise DiskFailed: this broker has no access to replicas' disks."""
    raise DiskFailed(f"this broker can't access the disk of replica {member.replica}", "run it on the replica's host")


class DiskCopies:
    """Copies of ranges in replicas' folders. Readers are cached for later jobs; each has one user at a time."""

    def __init__(self, disks: Callable[[ReplicaMember], Disk]) -> None:
        self._disks = disks
        self.members: dict[int, ReplicaMember] = {}  # the newest incarnation of each replica; replaced as a whole
        self._open: dict[tuple[str, int], Disk] = {}
        self._idle: dict[tuple[int, int, int, str], list[RangeReader]] = {}
        self._good: dict[tuple[int, int], int] = {}  # (lane, range) -> the replica that answered last
        self._lanes: AbstractSet[int] | None = None  # existing lanes; None: not known yet

    def keep(self, lanes: AbstractSet[int], members: dict[int, ReplicaMember]) -> None:
        """Update the known lanes and replicas, and close the files of removed lanes.

        A worker may be about to borrow a reader: the thread that pops it from its list owns it. A borrowed one is
        closed when it is given back.
        """
        self._lanes, self.members = lanes, members
        for key in [key for key in list(self._idle) if key[0] not in lanes]:
            self._close_all(self._idle.pop(key, []))
        self._good = {key: replica for key, replica in list(self._good.items()) if key[0] in lanes}
        live = {(member.folder, member.incarnation) for member in members.values()}
        self._open = {key: disk for key, disk in list(self._open.items()) if key in live}

    def replicas(self, range_: Range) -> list[ReplicaRef]:
        """Return the replicas that may have a copy: the replica that answered last first, then the others."""
        best = self._good.get((range_.lane, range_.number))
        return sorted(range_.replicas, key=lambda ref: ref.replica != best)

    def borrow(self, range_: Range, ref: ReplicaRef) -> RangeReader:
        """Return a reader of one copy. Raises DiskFailed if the folder of that replica is not known."""
        member = self.members.get(ref.replica)
        if member is None:
            raise DiskFailed(f"replica {ref.replica} is not known", "start the replica with its folder")
        try:
            files = self._idle[self._key(range_, member)].pop()
        except (KeyError, IndexError):
            folder = range_folder(range_.lane, range_.number)
            return RangeReader(self._disk(member), folder, range_.lane, range_.number, range_.start)
        files.refresh()
        return files

    def give_back(self, range_: Range, ref: ReplicaRef, files: RangeFiles, good: bool) -> None:
        """Keep a reader for later jobs, or close it after an error."""
        member = self.members.get(ref.replica)
        if not isinstance(files, RangeReader):
            return
        if not good or member is None or (self._lanes is not None and range_.lane not in self._lanes):
            files.close()
            return
        self._good[range_.lane, range_.number] = ref.replica
        self._idle.setdefault(self._key(range_, member), []).append(files)
        if sum(map(len, list(self._idle.values()))) > WARM_READERS_MAX:
            self._close_oldest()

    @staticmethod
    def _key(range_: Range, member: ReplicaMember) -> tuple[int, int, int, str]:
        return range_.lane, range_.number, member.replica, member.disk

    def _disk(self, member: ReplicaMember) -> Disk:
        key = (member.folder, member.incarnation)
        if key not in self._open:
            self._open[key] = self._disks(member)
        return self._open[key]

    def _close_oldest(self) -> None:
        """Close the readers of the copy that was opened first, and limit the memory of which replica answered last.

        Another worker may be about to borrow one of these readers: the thread that pops it from the list owns it.
        """
        for oldest in list(self._idle)[:1]:
            self._close_all(self._idle.pop(oldest, []))
        if len(self._good) > 16 * WARM_READERS_MAX:
            self._good.clear()

    @staticmethod
    def _close_all(idle: list[RangeReader]) -> None:
        with suppress(IndexError):
            while True:
                idle.pop().close()


@dataclass(slots=True, eq=False)
class _Span:
    """A span that is read ahead for one client: the next one of a lane."""

    key: tuple[object, ...]
    reserved: int
    at_us: int
    result: FetchResult | Exception | None = None
    done: JobDone | None = None  # set if the client asked for the span before its read ended
    dropped: bool = False


def _answer_key(ask: Fetch) -> tuple[object, ...]:
    """Return a key that is equal for fetches with the same answer."""
    partitions = None if ask.partitions is None else tuple(ask.partitions)
    return ask.by, ask.start, ask.max_bytes, partitions, ask.control, ask.stop


class PlannedRead(Protocol):
    """A fetch from a file or a table. At its start it reserves memory for its result, and limits its size to that."""

    ask: Fetch

    def may_start(self) -> bool: ...


class DiskReads(FairJobs):
    """Jobs on segment files, for all clients of one broker."""

    def __init__(self, workers: Workers, copies: DiskCopies) -> None:
        super().__init__(workers, WARM_JOBS_MAX)
        self.copies = copies
        self._ahead: dict[tuple[int, int], _Span] = {}  # by connection and lane
        self._ahead_bytes = 0
        self.ahead_used = 0  # fetches whose span was read ahead, or was being read

    def fetch(self, peer: Peer, read: PlannedRead, segments: Segments, done: JobDone) -> None:
        """Read from segment files, or use the span that was read ahead."""
        ask = read.ask
        span = self._ahead.pop((peer.number, ask.lane), None)
        if span is not None and span.key == _answer_key(ask) and not isinstance(span.result, Exception):
            self.ahead_used += 1
            self._ahead_bytes -= span.reserved
            read.may_start()  # from now on it counts as a normal read
            if span.result is None:
                span.done = done
            else:
                done(span.result)
            return
        if span is not None:
            self._drop(span)
        self.run(peer.number, lambda: segments.fetch(read.ask), done, read.may_start)

    def read_ahead(self, peer: Peer, ask: Fetch, segments: Segments, now_us: int, most: int) -> None:
        """Read the span that a client is likely to fetch next. The result has at most `most` bytes."""
        key = (peer.number, ask.lane)
        if key in self._ahead or self._ahead_bytes + most > WARM_AHEAD_BYTES_MAX:
            return
        if peer.number in self._queues:
            return  # this client has enough jobs waiting
        span = self._ahead[key] = _Span(_answer_key(ask), most, now_us)
        self._ahead_bytes += span.reserved
        job, done = lambda: None if span.dropped else segments.fetch(ask), lambda result: self._read_done(span, result)
        self.run(peer.number, job, done)

    def poll(self, now_us: int) -> None:
        """Drop spans that no client asked for in time."""
        for key, span in list(self._ahead.items()):
            if now_us - span.at_us > _AHEAD_KEPT_US:
                self._drop(self._ahead.pop(key))

    def disconnected(self, client: int) -> None:
        """Drop the jobs of a closed connection, and the spans that were read ahead for it."""
        super().disconnected(client)
        for key in [key for key in self._ahead if key[0] == client]:
            self._drop(self._ahead.pop(key))

    def _read_done(self, span: _Span, result: Any) -> None:
        span.result = result
        if span.done is not None:
            span.done(result)
        elif not span.dropped:
            size = result.entries.nbytes + sum(map(len, result.payloads)) if isinstance(result, FetchResult) else 0
            self._ahead_bytes += size - span.reserved
            span.reserved = size

    def _drop(self, span: _Span) -> None:
        span.dropped = True
        self._ahead_bytes -= span.reserved


class TableJobs(FairJobs):
    """Reads of tables for all clients of one broker."""

    def __init__(self, workers: Workers, reader: TableReader | None) -> None:
        super().__init__(workers, TABLE_JOBS_MAX)
        self._reader = reader

    @property
    def offered(self) -> bool:
        """Whether this broker reads tables for its clients."""
        return self._reader is not None

    @property
    def reader(self) -> TableReader:
        """The table reader. Raises NotAvailable if there is none."""
        if self._reader is None:
            raise NotAvailable(
                "this broker can't read tables of topics", 'install "embarcadero[iceberg]" on the brokers\' host'
            )
        return self._reader
