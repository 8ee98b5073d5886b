"""Batches by reference: find the staged batch, copy it into the broker's own log, and stage it like any other.

The staged batch belongs to a topic of order 0 or 1, in any broker's lane. It is read as a fetch would read it: from
shared memory immediately, otherwise from segment files on a worker. In a topic with replicas only durable batches are
read. The batch must have the size, count and CRC32C of the frame. After that it is treated like a batch that arrived
with its bytes.

Order: while a batch of a session waits for a file, later batches of that session on the same connection wait behind it,
including those that arrived with their bytes. One job at a time reads for a session, about one frame at most. Credit
limits the waiting batches: it is granted again once a batch is staged or refused (`Credit.staging`).

    received --in memory--> staged or refused
       `----on disk, or behind such a batch--> queue --job--> staged or refused; dropped with its connection
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple, Protocol

from embarcadero.broker.clients import Peer
from embarcadero.broker.disk_reads import FetchResult, Segments
from embarcadero.broker.durable import BrokerView
from embarcadero.broker.lane_reader import LaneReaders
from embarcadero.broker.pending import Ingest
from embarcadero.errors import EmbarcaderoError, FuturePosition, TooMany, UnknownTopic
from embarcadero.fabric.log import Reservation
from embarcadero.limits import REFERENCES_WAITING_MAX
from embarcadero.types import BATCH_KIND, Outcome, ReferenceFault, SessionKey
from embarcadero.wire.codec import HEADER_BYTES, BatchHeader, BatchReference, FrameKind
from embarcadero.wire.messages import Fetch

_HEADER_BYTES: Final = HEADER_BYTES[FrameKind.BATCH]
_READ_AT_ONCE: Final = 64  # most batches that one job reads


@dataclass(slots=True, eq=False)
class _Waiting:
    """A batch that waits for its turn. Without a reference, its bytes are already in the log."""

    header: BatchHeader
    reference: BatchReference | None
    arrived: Reservation | None

    @property
    def cost(self) -> int:
        return _HEADER_BYTES + self.header.length


class _Refused(NamedTuple):
    outcome: Outcome
    fault: int = 0


class _OnDisk(NamedTuple):
    """A staged batch that left memory: its files, and the fetch to run on them."""

    segments: Segments
    ask: Fetch


_Answer = bytes | memoryview | _Refused
_LATER: Final = _Refused(Outcome.BACKPRESSURE)


def _refused(fault: ReferenceFault) -> _Refused:
    return _Refused(Outcome.NO_REFERENCE, int(fault))


class BatchTaker(Protocol):
    """Takes batches whose bytes are in the log: the broker's admission."""

    def take(self, peer: Peer, header: BatchHeader, arrived: Reservation) -> None:
        """Stage the entry of a complete batch."""
        ...

    def after_receive(self, peer: Peer) -> None:
        """Publish the entries that were staged for a client."""
        ...


class References:
    """Copies staged batches for all connections of one broker. `taker` stages the complete batches."""

    def __init__(self, taker: BatchTaker, view: BrokerView, readers: LaneReaders, ingest: Ingest) -> None:
        self._taker, self._clock = taker, view.context.env.clock
        self._store, self._readers = view.store, readers
        self._ingest = ingest
        self._queues: dict[Peer, dict[SessionKey, deque[_Waiting]]] = {}
        self.copied = 0  # total of copied batches
        self.waiting = 0  # batches in all queues

    # --- batches come -------------------------------------------------------------------------------------------------
    def received(self, peer: Peer, header: BatchHeader, reference: BatchReference) -> None:
        """Take a batch by reference that passed its checks. `header.length` is the size of its payload."""
        if self._queue(peer, header) is None:
            answer = self._look(header, reference)
            if not isinstance(answer, _OnDisk):
                self._end(peer, header, answer)
                return
        queue = self._enqueue(peer, _Waiting(header, reference, None))
        if queue is not None and len(queue) == 1:
            self._continue(peer, SessionKey(header.lane, header.session))

    def follows(self, peer: Peer, header: BatchHeader, arrived: Reservation) -> bool:
        """Queue a batch that arrived with its bytes behind waiting ones of its session. False if none waits."""
        if not self._queues or self._queue(peer, header) is None:
            return False
        if self._enqueue(peer, _Waiting(header, None, arrived)) is None:
            self._ingest.abandon(arrived)
        return True

    def drop(self, peer: Peer) -> None:
        """Drop the waiting batches of a connection that ends, and release their log space."""
        for queue in self._queues.pop(peer, {}).values():
            for waiting in queue:
                self._leave(peer, waiting)
                if waiting.arrived is not None:
                    self._ingest.abandon(waiting.arrived)

    def _queue(self, peer: Peer, header: BatchHeader) -> deque[_Waiting] | None:
        queues = self._queues.get(peer)
        return None if queues is None else queues.get(SessionKey(header.lane, header.session))

    def _enqueue(self, peer: Peer, waiting: _Waiting) -> deque[_Waiting] | None:
        """Queue a batch behind the others of its session. None: too many wait, and it was refused."""
        queues = self._queues.setdefault(peer, {})
        if sum(map(len, queues.values())) >= REFERENCES_WAITING_MAX:
            peer.refuse(waiting.header, Outcome.BACKPRESSURE)
            return None
        queue = queues.setdefault(SessionKey(waiting.header.lane, waiting.header.session), deque())
        queue.append(waiting)
        self.waiting += 1
        peer.credit.staging += waiting.cost
        return queue

    def _leave(self, peer: Peer, waiting: _Waiting) -> None:
        self.waiting -= 1
        peer.credit.staging -= waiting.cost

    # --- the queues ---------------------------------------------------------------------------------------------------
    def _continue(self, peer: Peer, session: SessionKey) -> None:
        """Stage or refuse batches from the head of a queue, until a batch must be read from files."""
        queue = self._queues[peer][session]
        while queue:
            waiting = queue[0]
            if waiting.reference is not None:
                answer = self._look(waiting.header, waiting.reference)
                if isinstance(answer, _OnDisk) and self._read(peer, session, queue, answer):
                    return
                if isinstance(answer, _OnDisk):
                    answer = _LATER
                self._end(peer, waiting.header, answer)
            elif waiting.arrived is not None:
                self._taker.take(peer, waiting.header, waiting.arrived)
            self._leave(peer, queue.popleft())
        del self._queues[peer][session]
        if not self._queues[peer]:
            del self._queues[peer]

    def _read(self, peer: Peer, session: SessionKey, queue: deque[_Waiting], head: _OnDisk) -> bool:
        """Read the head of a queue on a worker, with the following batches that are in files too. False: not now."""
        parts, budget = [head], self._ingest.frame_bytes_max - queue[0].header.length
        for waiting in list(queue)[1:_READ_AT_ONCE]:
            budget -= waiting.header.length
            answer = None if waiting.reference is None or budget < 0 else self._look(waiting.header, waiting.reference)
            if not isinstance(answer, _OnDisk):
                break
            parts.append(answer)
        try:
            done = partial(self._read_done, peer, session, queue)
            self._readers.disks.run(peer.number, partial(_read_all, parts), done)
        except TooMany:
            return False
        return True

    def _read_done(
        self, peer: Peer, session: SessionKey, queue: deque[_Waiting], results: list[FetchResult | Exception]
    ) -> None:
        """Stage or refuse the batches that a job read, unless the connection is closed."""
        if peer.closing or self._queues.get(peer, {}).get(session) is not queue:
            return
        unknown: Exception | None = None
        try:
            for result in results:
                header, reference = queue[0].header, queue[0].reference
                if isinstance(result, Exception):
                    unknown = unknown if isinstance(result, EmbarcaderoError) else result
                    answer: _Answer = _LATER  # no copy is good now, or its range was sealed or trimmed meanwhile
                else:
                    answer = _judged(header, reference, result)
                self._end(peer, header, answer)
                self._leave(peer, queue.popleft())
            self._continue(peer, session)
        except EmbarcaderoError as error:
            peer.hang_up(error)
        self._taker.after_receive(peer)
        if unknown is not None:
            raise unknown  # a bug: the event loop logs it with a traceback

    def _end(self, peer: Peer, header: BatchHeader, answer: _Answer) -> None:
        """Copy a payload into the log and stage its entry, or refuse the batch."""
        if isinstance(answer, _Refused):
            peer.refuse(header, *answer)
            return
        reservation = self._ingest.reserve(header.length)
        if reservation is None:
            peer.refuse(header, Outcome.BACKPRESSURE)
            return
        try:
            reservation.view[:] = answer
            self._taker.take(peer, header, reservation)
        except BaseException:
            self._ingest.abandon(reservation)
            raise
        self.copied += 1

    # --- finding ------------------------------------------------------------------------------------------------------
    def _look(self, header: BatchHeader, reference: BatchReference) -> _Answer | _OnDisk:
        """Find a staged batch without using a disk."""
        try:
            if not self._is_of_topic(reference):
                self._store.refresh()  # its lane may be new
                if not self._is_of_topic(reference):
                    return _refused(ReferenceFault.ANOTHER_TOPIC)
            reader = self._readers.reader(reference.lane)
            ask = Fetch(
                lane=reference.lane,
                start=reference.index,
                stop=reference.index + 1,
                max_bytes=reference.size,
                read="durable",
            )
            found = reader.fetch(ask, self._clock.now_us())
            if found is not None and found.elsewhere is not None and reader.stored is not None:
                segments = self._readers.segments(reader, reader.stored, found.tail_index)
                return _OnDisk(segments, found.elsewhere)
            if found is not None and found.empty and reader.ordered() == reference.index:
                return _refused(ReferenceFault.GONE)  # the lane ends there, and no acked batch is at or above its end
        except FuturePosition:
            return _refused(ReferenceFault.GONE)
        except UnknownTopic:
            return _refused(ReferenceFault.ANOTHER_TOPIC)
        except EmbarcaderoError:
            return _LATER  # the store is unavailable, or its disk fails
        return _LATER if found is None else _judged(header, reference, found)

    def _is_of_topic(self, reference: BatchReference) -> bool:
        """Return whether the lane belongs to the referenced topic. A new topic of the same name has another id."""
        lane = self._store.broker_lanes.get(reference.lane)
        topic = None if lane is None else self._store.lanes.get(lane.topic)
        return topic is not None and topic.id == reference.topic_id


def _judged(header: BatchHeader, reference: BatchReference | None, found: FetchResult) -> _Answer:
    """Return the payload if it is the batch of the frame. Its bytes were checked against its entry before."""
    if not found.payloads:  # no gap: the batch is not durable yet, or was overwritten during the search
        return _LATER if found.gap is None else _refused(ReferenceFault.GONE)
    entry, payload = found.entries[0], found.payloads[0]
    seen = tuple(int(entry[name]) for name in ("kind", "size", "count", "crc", "index"))
    if reference is None or seen != (BATCH_KIND, header.length, header.count, header.crc, reference.index):
        return _refused(ReferenceFault.DIFFERS)
    return payload


def _read_all(parts: list[_OnDisk]) -> list[FetchResult | Exception]:
    """Read staged batches from their files. An unreadable one does not delay the others."""
    results: list[FetchResult | Exception] = []
    for segments, ask in parts:
        try:
            results.append(segments.fetch(ask))
        except Exception as error:
            results.append(error)
    return results
