"""Fetches of clients, including those that wait.

The lane's reader locates a fetch (`LaneReader.locate`). The answer comes from memory if possible, otherwise from
segment files (disk_reads.py). Clients that request it get the rest from the topic's table. A fetch that waits, or whose
file is being read, is parked here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from embarcadero.broker.clients import LastFetch, Peer, UnreadBytes
from embarcadero.broker.disk_reads import FetchResult, at_index, raise_unknown, typed
from embarcadero.broker.durable import BrokerView
from embarcadero.broker.lane_reader import LaneReader, LaneReaders, StoredLane
from embarcadero.errors import (
    BadFrame,
    BadTable,
    BadValue,
    Corrupt,
    EmbarcaderoError,
    Retriable,
    TimedOut,
    TooMany,
)
from embarcadero.limits import FETCH_BYTES_MAX, FETCH_WAIT_MS_MAX, FETCHES_PARKED_PER_CONNECTION_MAX
from embarcadero.steps import Step
from embarcadero.types import Gap, GapKind, Tier
from embarcadero.wire import messages as m
from embarcadero.wire.schemas import decode_versions

_WAYS = ("index", "seq", "time", "earliest", "latest")
_MODES = ("durable", "ordered")
_NOT_TRIED = -1


@dataclass(slots=True, eq=False)
class Parked:
    """A fetch that waits for records, or for a file."""

    peer: Peer
    request: int
    ask: m.Fetch
    deadline_us: int
    begun: int | None = None  # the requested index, if the fetch was by index
    seen: int = _NOT_TRIED  # frontier at the last try
    on_disk: bool = False  # its file is being read
    done: bool = False


@dataclass(slots=True)
class _Read:
    """A fetch from a file or a table, and the memory reserved for its result."""

    unread: UnreadBytes
    peer: Peer
    ask: m.Fetch
    started: bool = False

    def may_start(self) -> bool:
        """Reserve memory for at least one batch, and limit the read to the reserved size."""
        budget = 0 if self.peer.clogged else self.unread.allowed(self.peer, self.ask.max_bytes)
        if budget:
            self.ask, self.started = _limited(self.ask, budget), True
            self.unread.reserve(self.peer, budget)
        return self.started

    def end(self) -> None:
        """Release the reservation: the result counts as sent output from now on."""
        if self.started:
            self.unread.release(self.peer, self.ask.max_bytes)


class Fetches:
    """Fetches of all clients, including those that wait."""

    def __init__(
        self, view: BrokerView, readers: LaneReaders, unread: UnreadBytes, announce: Callable[[], None]
    ) -> None:
        context = view.context
        self._clock, self._steps, self._counters = context.env.clock, context.env.steps, context.counters
        self._directory, self._store, self._durable = context.directory, view.store, view.durable
        self._readers, self._unread, self._announce = readers, unread, announce
        self._parked: list[Parked] = []
        self._for_disks: dict[Parked, None] = {}  # in order of arrival: the order of a set differs between processes

    def disconnected(self, peer: Peer) -> None:
        """Drop the fetches of a closed connection."""
        self._parked = [parked for parked in self._parked if parked.peer is not peer]
        self._for_disks = {parked: None for parked in self._for_disks if parked.peer is not peer}
        self._readers.disconnected(peer)

    @property
    def tables_offered(self) -> bool:
        """Whether this broker reads tables for its clients."""
        return self._readers.tables.offered

    @property
    def waiting(self) -> int:
        """Number of waiting fetches."""
        return len(self._parked)

    @property
    def waiting_for_disks(self) -> int:
        """Number of waiting fetches that need a higher durable frontier."""
        return len(self._for_disks)

    def next_deadline_us(self) -> int | None:
        """Return when the next waiting fetch gives up."""
        return min((parked.deadline_us for parked in self._parked if not parked.on_disk), default=None)

    def _waits_for_disks(self, parked: Parked) -> bool:
        reader = self._readers.known(parked.ask.lane)
        return reader is not None and reader.stored is not None and parked.ask.read == "durable"

    # --- fetches ------------------------------------------------------------------------------------------------------
    def fetch(self, peer: Peer, request: int, ask: m.Fetch) -> None:
        """Answer a fetch immediately, or when records arrive, or when the client's wait ends."""
        if not 0 < ask.max_bytes <= FETCH_BYTES_MAX or not 0 <= ask.wait_ms <= FETCH_WAIT_MS_MAX or ask.start < 0:
            raise BadFrame(
                f"the fetch asks for {ask.max_bytes} bytes from {ask.start}, waiting {ask.wait_ms} ms",
                f"ask for 1 to {FETCH_BYTES_MAX} bytes from 0 or above, and wait at most {FETCH_WAIT_MS_MAX} ms",
            )
        if peer.parked >= FETCHES_PARKED_PER_CONNECTION_MAX:
            raise TooMany(f"{peer.parked} fetches of this connection wait, the maximum", "wait for an answer")
        if ask.read not in _MODES or ask.by not in _WAYS:
            raise BadValue(
                f"can't fetch by {ask.by!r} with read={ask.read!r}",
                f"use by {', '.join(_WAYS)}; read {' or '.join(_MODES)}",
            )
        if ask.by != "index":
            self._store.refresh()  # a new reader sees every trim that was acknowledged before
        now_us = self._clock.now_us()
        begun = ask.start if ask.by == "index" else None
        parked = Parked(peer, request, ask, now_us + ask.wait_ms * 1000, begun)
        if not self._try(parked, now_us):
            peer.parked += 1
            self._parked.append(parked)
            if self._waits_for_disks(parked):
                self._for_disks[parked] = None
        self._announce()

    def retry(self, now_us: int) -> bool:
        """Try all waiting fetches. Returns whether any was answered."""
        self._readers.disks.poll(now_us)
        if (slowest := self._unread.look(now_us)) is not None:
            slowest.abort(TimedOut(f"the client does not read {slowest.unread_bytes()} bytes that wait for it"))
        went_on = self._unread.go_on()
        self._readers.disks.start()
        self._readers.tables.start()
        if not self._parked:
            return went_on
        for lane in {parked.ask.lane for parked in self._for_disks}:
            self._durable.through(lane)
        waiting, self._parked = self._parked, []
        for parked in waiting:
            try:
                done = parked.done or self._try(parked, now_us)
            except EmbarcaderoError as error:
                parked.peer.fail(parked.request, error)
                done = True
            if done:
                parked.peer.parked -= 1
                self._for_disks.pop(parked, None)
            else:
                self._parked.append(parked)
        return went_on or len(self._parked) != len(waiting)

    def _try(self, parked: Parked, now_us: int) -> bool:
        """Answer a fetch if there is an answer, or if its time is over."""
        if parked.peer.clogged or parked.on_disk:
            return False
        reader, ask = self._readers.reader(parked.ask.lane), parked.ask
        over = now_us >= parked.deadline_us
        if not over and reader.news(ask.read) == parked.seen:
            return False
        budget = self._unread.allowed(parked.peer, ask.max_bytes)
        if not budget:
            return False
        ask = _limited(ask, budget)
        found = reader.fetch(ask, now_us)
        if found is None:
            if over:
                raise Retriable("the log can't be read while a sequencer takes over", "try again")
            return False
        return self._answer(parked, reader, ask, found, now_us)

    def _answer(self, parked: Parked, reader: LaneReader, ask: m.Fetch, found: FetchResult, now_us: int) -> bool:
        """Use the fetch result: read files or the table, wait for more, or answer. True if the fetch is answered."""
        if found.elsewhere is not None and reader.stored is not None:
            self._from_disk(parked, reader, reader.stored, found, found.elsewhere)
            return parked.done
        if found.empty and now_us < parked.deadline_us and not found.over(ask):
            self._wait_for_more(parked, found)
            return False
        if self._from_table(parked, ask, found):
            return parked.done
        self._send(parked, found, now_us)
        parked.done = True
        return True

    @staticmethod
    def _wait_for_more(parked: Parked, found: FetchResult) -> None:
        parked.seen = found.tail_index
        if not found.to_come:
            parked.ask = at_index(parked.ask, found.next_index)

    def _send(self, parked: Parked, found: FetchResult, now_us: int) -> None:
        if found.gap is not None and parked.begun is not None and found.gap.start > parked.begun:
            # entries that readers do not get came first: the gap begins at the reader's position
            found = FetchResult(found.entries[:0], [], found.gap.start, found.tail_index)
        parked.peer.send_fetched(found.frame(parked.request))
        self._unread.hold(parked.peer)
        lane, entries = parked.ask.lane, found.entries
        parked.peer.reading[lane] = LastFetch(found.next_index, now_us)
        if len(entries):
            size, topic = int(entries["size"].sum()), self._store.topic_lane(lane)
            self._counters.went_out[topic].add(len(entries), int(entries["count"].sum()), size)
            if parked.seen >= 0:  # it waited, so the records are new
                self._counters.delivery_us.add(max(0, self._clock.wall_us() - int(entries["append_us"][0])))

    def _from_disk(
        self, parked: Parked, reader: LaneReader, stored: StoredLane, found: FetchResult, ask: m.Fetch
    ) -> None:
        """Answer a fetch from segment files."""
        segments, tail = self._readers.segments(reader, stored, found.tail_index), found.tail_index
        chain, trimmed, parked.on_disk = stored.chain, reader.trimmed, True
        read = _Read(self._unread, parked.peer, ask)

        def done(result: FetchResult | Exception) -> None:
            read.end()
            parked.on_disk, now_us = False, self._clock.now_us()
            self._steps.at(Step.READ_DISK)
            if parked.peer.gone or parked.done:
                return
            try:
                if isinstance(result, Corrupt) and (self._changed(stored, chain) or reader.trimmed > trimmed):
                    parked.seen = _NOT_TRIED  # the range was sealed meanwhile, or trimmed: try again
                elif isinstance(result, Exception):
                    raise result
                elif not parked.peer.clogged and reader.trimmed <= _first_index(result):
                    self._answer_from_disk(parked, reader, read.ask, result, tail, now_us)
                else:
                    parked.seen = _NOT_TRIED  # read it again
            except Exception as error:
                self._fail(parked, error)

        self._readers.disks.fetch(parked.peer, read, segments, done)

    # --- tables -------------------------------------------------------------------------------------------------------
    def _from_table(self, parked: Parked, ask: m.Fetch, found: FetchResult) -> bool:
        """Answer a fetch from the topic's table if brokers dropped the records. False: brokers answer.

        Load the tier after `found`: brokers drop only records below the frontier that the store had before.
        """
        gap = found.gap
        if not ask.table or not self._readers.tables.offered or gap is None or gap.kind is not GapKind.TRIMMED:
            return False
        if (tier := self._readers.tier(ask.lane)) is None:
            return False
        start, frontier = tier.start(ask.lane).index, tier.frontier(ask.lane).index
        if gap.start < start:  # trimmed from the table too
            found.gap = Gap(GapKind.TRIMMED, gap.start, min(start, gap.stop))
            found.next_index = found.gap.stop
            return False
        stop = min(gap.stop, frontier, gap.stop if ask.stop is None else ask.stop)
        if gap.start >= stop:
            return False
        tables, name = self._readers.tables.reader, self._store.topic_name(ask.lane) or ""
        read = _Read(self._unread, parked.peer, at_index(ask, gap.start))

        def fetch() -> FetchResult:
            _, schema = self._directory.topics.described(name)
            return tables.fetch(tier, decode_versions(schema.columns, schema.widths), read.ask, stop)

        parked.on_disk = True
        done = partial(self._table_read, parked, read, tier, found.tail_index)
        self._readers.tables.run(parked.peer.number, fetch, done, read.may_start)
        return True

    def _table_read(self, parked: Parked, read: _Read, tier: Tier, tail: int, result: FetchResult | Exception) -> None:
        """Send the batches read from a table. If the table or its start changed meanwhile, read again."""
        read.end()
        parked.on_disk = False
        if parked.peer.gone or parked.done:
            return
        try:
            now = self._readers.tier(parked.ask.lane)
            moved = now is None or now.metadata != tier.metadata
            if isinstance(result, BadTable) and moved:
                parked.seen = _NOT_TRIED  # files were compacted or deleted after the read was planned
            elif isinstance(result, Exception):
                raise result
            elif parked.peer.clogged or now is None or now.start(parked.ask.lane).index > _first_index(result):
                parked.seen = _NOT_TRIED
            else:
                result.tail_index = max(result.tail_index, tail)
                self._send(parked, result, self._clock.now_us())
                parked.done = True
        except Exception as error:
            self._fail(parked, error)

    def _changed(self, stored: StoredLane, chain: object) -> bool:
        self._store.refresh()
        return stored.chain is not chain

    def _answer_from_disk(
        self, parked: Parked, reader: LaneReader, ask: m.Fetch, found: FetchResult, tail: int, now_us: int
    ) -> None:
        found.tail_index = max(found.tail_index, tail)
        found.to_come = found.to_come and not reader.closed  # a closed lane continues at its end, which is reported
        if not self._answer(parked, reader, ask, found, now_us):
            if not parked.on_disk and not found.to_come:
                parked.seen = _NOT_TRIED
            return
        stored, following = reader.stored, at_index(ask, found.next_index)
        if stored is None or not found.payloads or stored.chain.owner(found.next_index) is None or found.over(ask):
            return
        segments = self._readers.segments(reader, stored, tail)
        if found.next_index < min(segments.bound, reader.memory_from(now_us) or segments.bound):
            self._readers.disks.read_ahead(parked.peer, following, segments, now_us, self._unread.most(ask.max_bytes))

    @staticmethod
    def _fail(parked: Parked, error: Exception) -> None:
        if not parked.done:
            parked.peer.fail(parked.request, typed(error))
            parked.done = True
        raise_unknown(error)


def _limited(ask: m.Fetch, budget: int) -> m.Fetch:
    """Limit a fetch to at most `budget` bytes."""
    return ask if ask.max_bytes <= budget else msgspec.structs.replace(ask, max_bytes=budget)


def _first_index(found: FetchResult) -> int:
    """Return where an answer begins. Records that were trimmed since must not be in it."""
    return int(found.entries["index"][0]) if len(found.entries) else found.next_index
