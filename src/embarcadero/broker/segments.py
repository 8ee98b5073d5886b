"""Looking into segment files: reads and lookups over all ranges of a lane and all replicas of each range.

Everything here may block and runs on a worker. It only touches what is durable (`bound`) and not trimmed, and what it
returns was checked by the reader of the files: entry checks, contiguous indices, CRC32C of payloads. A copy that is
missing or damaged is passed over; if no copy of a range is good, the answer is a typed error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

import numpy as np

from embarcadero.broker.chain import Chain
from embarcadero.broker.found import Found, wanted_entries
from embarcadero.errors import BadSegment, ClusterError, Corrupt, EmbarcaderoError, Trimmed
from embarcadero.fabric.layout import ORDER, Entries, pick
from embarcadero.limits import FETCH_ENTRIES_MAX
from embarcadero.storage.segment import Point
from embarcadero.types import Gap, GapKind, Range, ReplicaRef
from embarcadero.wire.messages import Fetch

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Place:
    """A batch: its index, and the seq of its first record."""

    index: int
    seq: int
    instead: bool = False  # the first one that is left: the batch that was asked for is trimmed, or dropped


class RangeFiles(Protocol):
    """One replica's copy of one range (storage.reading.RangeReader)."""

    @property
    def first(self) -> int | None:
        """The first index that is still there; None if nothing is."""
        ...

    def read(self, index: int, end: int, max_bytes: int) -> tuple[Entries, list[memoryview]]: ...
    def find_seq(self, seq: int) -> int | None: ...
    def find_time(self, us: int) -> int | None: ...
    def entry(self, index: int) -> Entries | None: ...
    def points(self, index: int, end: int, every: int, max_bytes: int) -> tuple[list[Point], int]: ...


class Copies(Protocol):
    """Where copies of ranges are."""

    def replicas(self, range_: Range) -> list[ReplicaRef]:
        """Who may have a copy, the best first."""
        ...

    def borrow(self, range_: Range, ref: ReplicaRef) -> RangeFiles:
        """A reader of one copy, for one user at a time."""
        ...

    def give_back(self, range_: Range, ref: ReplicaRef, files: RangeFiles, good: bool) -> None:
        """It is no longer used."""
        ...


class Segments:
    """The files of one lane, as far as they are durable: below `bound`, at or above `trimmed`."""

    def __init__(self, lane: int, chain: Chain, bound: int, trimmed: int, copies: Copies) -> None:
        self._lane, self.chain, self.bound, self._trimmed, self._copies = lane, chain, bound, trimmed, copies

    def fetch(self, ask: Fetch) -> Found:
        """Answer a fetch. Raises Corrupt when no copy is good."""
        if ask.by == "index":
            return self._read(ask.start, ask)
        place = self.locate(ask.by, ask.start)
        if place is None:  # nothing there: the end, as far as files can tell
            return Found(_nothing(), [], self.bound, self.bound, to_come=ask.by == "time")
        return self._read(place.index, ask)

    def locate(self, by: str, value: int) -> Place | None:
        """A place by index, seq or time, or the earliest one; None if it is at or above the bound."""
        if by == "earliest":
            return self.first()
        if by == "seq":
            return self._by_seq(value)
        if by == "time":
            return self._by_time(value)
        return self._at(self.chain.after_lost(value))

    def reach(self, index: int, trimmed: int) -> bool:
        """Whether the search covers every file below an index, or all that there are; below a trim nothing counts."""
        ranges = self.chain.ranges
        return not ranges or not ranges[-1].open or index <= max(self.bound, trimmed, self.chain.start)

    def first(self) -> Place | None:
        """The first batch that is neither trimmed nor dropped; None if there is none below the bound."""
        for range_ in self.chain.from_index(self._trimmed):
            start, stop = max(range_.start, self._trimmed), self._stop(range_)
            if start >= stop:
                continue
            found = self._best(range_, partial(self._first_of, start=start, stop=stop))
            if found is not None:
                return found
            if not self._dropped(range_, stop):
                raise self._no_good_copy(range_, start, ["no copy has it"])
        return None

    def _dropped(self, range_: Range, stop: int) -> bool:
        """Whether a copy says that everything below was dropped, and not just that it is not there."""
        begins = self._best(range_, lambda files: files.first)
        return begins is not None and begins >= stop

    def _first_of(self, files: RangeFiles, start: int, stop: int) -> Place | None:
        first = files.first
        return None if first is None or max(first, start) >= stop else self._place(files, max(first, start))

    # --- reading ------------------------------------------------------------------------------------------------------
    def _read(self, index: int, ask: Fetch) -> Found:
        """Batches from an index on, up to the end of its range."""
        range_ = self.chain.owner(index)
        if range_ is None or index >= self.bound:
            return Found(_nothing(), [], index, self.bound)
        problems, dropped, shorter = [], [], []
        stop = min(self._stop(range_), index + FETCH_ENTRIES_MAX, self.bound if ask.stop is None else ask.stop)
        if index >= stop:
            return Found(_nothing(), [], index, self.bound)
        for ref in self._copies.replicas(range_):
            try:
                with self._open(range_, ref) as files:
                    entries, payloads = files.read(index, stop, ask.max_bytes)
                    if len(entries):
                        return self._found(entries, payloads, ask)
                    shorter.append(f"replica {ref.replica}: its copy ends before")
            except Trimmed:
                dropped.append(ref)
            except (Corrupt, ClusterError) as error:
                problems.append(f"replica {ref.replica}: {error.message}")
        if dropped and not problems:  # retention took it; copies that end before are no better
            first = self.first()
            stop = self.chain.until_lost(index, self.bound if first is None else first.index)
            if stop > index:
                return Found(_nothing(), [], stop, self.bound, Gap(GapKind.TRIMMED, index, stop))
        raise self._no_good_copy(range_, index, problems + shorter)

    def _found(self, entries: Entries, payloads: list[memoryview], ask: Fetch) -> Found:
        """What the reader asked for."""
        rows, after = np.flatnonzero(wanted_entries(entries, ask)), int(entries["index"][-1]) + 1
        taken: list[bytes | memoryview] = [payloads[row] for row in rows.tolist()]
        if 2 * sum(map(len, taken)) < sum(map(len, payloads)):
            taken = list(map(bytes, taken))  # a view would keep in memory all that was read with it
        return Found(pick(entries, rows), taken, after, self.bound)

    # --- measuring ----------------------------------------------------------------------------------------------------
    def points(self, start: int, stop: int, every: int, max_bytes: int) -> tuple[list[Point], int]:
        """Batches of a span, about so many bytes apart, and where they end: at its end, or behind `max_bytes`."""
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
                raise self._no_good_copy(range_, at, ["no copy reaches it"])
            found += some[0]
            at, left = some[1], left - sum(point.bytes for point in some[0])
        return found, max(at, start)

    def seq_at(self, index: int) -> int | None:
        """The seq at which a batch begins, or would begin."""
        known = self.chain.seq_at(index)
        if known is not None:
            return known
        place = self._at(self.chain.after_lost(index))
        return None if place is None else place.seq

    # --- looking up ---------------------------------------------------------------------------------------------------
    def _at(self, index: int) -> Place | None:
        """An index with its seq."""
        range_ = self.chain.owner(index)
        if range_ is None or index >= self.bound:
            return None
        found = self._best(range_, lambda files: self._place(files, index))
        if found is None and index >= self._trimmed:
            raise self._no_good_copy(range_, index, ["no copy reaches it"])
        return found

    def _by_seq(self, seq: int) -> Place | None:
        """The batch that holds a record; the first one behind it where it is lost, or gone."""
        for range_ in reversed(self.chain.ranges):
            if range_.start_seq > seq or range_.start == range_.end:
                continue
            if range_.end_seq is not None and seq >= range_.end_seq:
                return self._after(range_)
            if range_.start >= self.bound:
                return None
            if self._stop(range_) <= self._trimmed:
                break  # all of it is trimmed, as far as it is durable
            found = self._best(range_, lambda files: self._place(files, files.find_seq(seq)))
            if found is None:
                raise self._no_good_copy(range_, range_.start, [f"no copy reaches seq {seq}"])
            return replace(found, instead=found.seq > seq)
        first = self.first()
        return None if first is None else replace(first, instead=True)

    def _by_time(self, us: int) -> Place | None:
        """The first batch appended at or after a time; the first that is left, where some of that time may be gone."""
        found = self._since(us)
        return found if found is None else replace(found, instead=self._may_be_gone(found, us))

    def _may_be_gone(self, found: Place, us: int) -> bool:
        """Whether batches since a time may have been trimmed: the first one left is younger, and none before it is
        known to be older."""
        first = self.first()
        if first is None or found.index > first.index or found.index <= self.chain.after_lost(0):
            return False
        own, before = self._time_of(found.index), self._time_of(found.index - 1)
        return (own is None or own > us) and (before is None or before >= us)

    def _time_of(self, index: int) -> int | None:
        """When a batch was appended, if a file still tells; it may be trimmed."""
        if (range_ := self.chain.owner(index)) is None:
            return None
        try:
            entry = self._best(range_, lambda files: files.entry(index))
        except Corrupt:
            return None
        return None if entry is None else int(entry["append_us"][0])

    def _since(self, us: int) -> Place | None:
        """The first batch that is left of those since a time. Append times never go back."""
        later: Place | None = None
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

    def _in_time(self, files: RangeFiles, us: int, stop: int) -> Place | None:
        """The first batch at or after a time. None is an answer only of a copy that reaches the end."""
        index = files.find_time(us)
        if index is None and files.entry(stop - 1) is None:
            raise BadSegment(f"its copy ends before {stop}", "the replica completes it from a peer")
        return self._place(files, index)

    def _place(self, files: RangeFiles, index: int | None) -> Place | None:
        """An index with its seq, if this copy has it and it may be told. A copy that ends there can't answer."""
        if index is None:
            return None
        index = max(index, self._trimmed)
        entry = files.entry(index) if index < self.bound else None
        return None if entry is None else Place(index, int(entry["seq"][0]))

    def _after(self, range_: Range) -> Place | None:
        """The first batch behind a sealed range."""
        following = next((r for r in self.chain.ranges if r.number > range_.number and r.start != r.end), None)
        return None if following is None else self._at(following.start)

    def _stop(self, range_: Range) -> int:
        """Nothing of a range is read at or above this: it was cut there, or is not known to be durable."""
        return self.bound if range_.end is None else min(range_.end, self.bound)

    # --- copies -------------------------------------------------------------------------------------------------------
    def _best(self, range_: Range, look: Callable[[RangeFiles], T | None]) -> T | None:
        """The first good copy's answer; None if those that are good have none."""
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
            "look at `embarcadero status`; the copy is served again once a replica has repaired it",
        )


def _points(files: RangeFiles, index: int, end: int, every: int, max_bytes: int) -> tuple[list[Point], int]:
    return files.points(index, end, every, max_bytes)


def _nothing() -> Entries:
    return np.zeros(0, dtype=ORDER)
