"""Check each batch against limits and credit before storing a byte, and track the sessions of each connection.

Above the high water mark the broker grants no credit. Below the low one it grants credit again. Control frames always
pass.

A batch header reserves log space for its payload, and the bytes may then arrive slowly. Three rules keep a few
connections from excluding all others:

- A batch that is still arriving after `broker.frame_timeout_s` ends its connection.
- A batch that is still arriving after STALLED_S is stalled. While the log is filling up (`broker.water_low`), stalled
  batches keep at most an eighth of its chunks: the address that keeps most of them loses its oldest first.
- Batches that arrive from one address take at most `broker.arriving_share` of the log; the next one gets BACKPRESSURE.

Addresses are compared without their port. A connection without an address (a socket of the simulator) counts as an
address of its own and has no share. `sequencer/order/lane.py` limits each address's share of the session tables.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, NamedTuple

from embarcadero.broker.clients import Peer
from embarcadero.broker.durable import AwaitingDurability, BrokerView
from embarcadero.broker.lane_reader import LaneReaders
from embarcadero.broker.own_lanes import OwnLanes
from embarcadero.broker.pending import Entry, Ingest, Relay, Waiting
from embarcadero.broker.references import References
from embarcadero.config.table import BrokerKeys as BrokerSettings
from embarcadero.errors import Backpressure, BadFrame, ChecksumMismatch, FrameTooLarge, OverCredit, TimedOut
from embarcadero.fabric.layout import Entries
from embarcadero.fabric.log import Reservation
from embarcadero.limits import LINE_BYTES, STALLED_S
from embarcadero.types import NO_SESSION, EntryKind, Order, Outcome, SessionKey, Span
from embarcadero.wire.codec import (
    HEADER_BYTES,
    REFERENCE,
    WANT_DURABLE,
    BatchHeader,
    BatchReference,
    FrameKind,
    payload_crc,
)

_HEADER_BYTES: Final = HEADER_BYTES[FrameKind.BATCH]
_STALLED_PARTS: Final = 8


def peer_number(host: str) -> int:
    """Return the number by which the sequencer distinguishes addresses, or 0 without an address."""
    return int.from_bytes(blake2b(host.encode(), digest_size=4).digest(), "little") or 1 if host else 0


class _Arriving(NamedTuple):
    reservation: Reservation
    since_us: int


class ArrivingBatches:
    """Account for the batches that are arriving at one broker."""

    def __init__(self, settings: BrokerSettings, log_bytes: int, chunk_bytes: int) -> None:
        self._settings, self._log_bytes = settings, log_bytes
        self._chunk_lines = chunk_bytes // LINE_BYTES
        self._stalled_chunks_max = max(1, log_bytes // chunk_bytes // _STALLED_PARTS)
        self._arriving: dict[Peer, _Arriving] = {}
        self._bytes: Counter[str] = Counter()  # by address

    def received(self, peer: Peer, now_us: int) -> None:
        """Note when the batch of this connection began to arrive."""
        arriving, known = peer.arriving[0] if peer.arriving else None, self._arriving.get(peer)
        if known is not None and known.reservation is not arriving:
            self._forget(peer)
        if arriving is not None and (known is None or known.reservation is not arriving):
            self._arriving[peer] = _Arriving(arriving, now_us)
            self._bytes[peer.host] += arriving.size

    def disconnected(self, peer: Peer) -> None:
        """Forget a closed connection's batch."""
        self._forget(peer)

    def _forget(self, peer: Peer) -> None:
        if (known := self._arriving.pop(peer, None)) is not None:
            self._bytes[peer.host] -= known.reservation.size
            if not self._bytes[peer.host]:
                del self._bytes[peer.host]

    def may_send(self, peer: Peer, size: int) -> bool:
        """Return whether the log has space for another batch from this connection's address."""
        if not peer.host or peer.host not in self._bytes:
            return True
        return self._bytes[peer.host] + size <= self._settings.arriving_share * self._log_bytes

    def too_slow(self, now_us: int, occupied: float) -> list[Peer]:
        """Return the connections to end. `occupied`: the share of the log that is in use."""
        if not self._arriving:
            return []
        late_us = now_us - int(self._settings.frame_timeout_s * 1e6)
        ended = [peer for peer, one in self._arriving.items() if one.since_us <= late_us]
        if occupied >= self._settings.water_low:
            ended += self._stalled(now_us, set(ended))
        return ended

    def _stalled(self, now_us: int, excluded: set[Peer]) -> list[Peer]:
        """Return the connections to end so that stalled batches keep no more than their share of the log."""
        stalled_us = now_us - int(STALLED_S * 1e6)
        kept: dict[str, list[tuple[int, int, int, Peer]]] = defaultdict(list)  # by address, oldest last
        chunks: Counter[int] = Counter()
        for peer, one in self._arriving.items():
            if one.since_us <= stalled_us and peer not in excluded:
                chunk = one.reservation.location // self._chunk_lines
                address = peer.host or str(peer.number)
                kept[address].append((-one.since_us, -peer.number, chunk, peer))
                chunks[chunk] += 1
        for held in kept.values():
            held.sort(key=lambda one: one[:2])
        ended = []
        while len(chunks) > self._stalled_chunks_max:
            most = max(kept.values(), key=lambda held: (len({chunk for _, _, chunk, _ in held}), held[-1][:2]))
            _, _, chunk, peer = most.pop()
            ended.append(peer)
            chunks[chunk] -= 1
            chunks += Counter()  # drops zero counts
            kept = {address: held for address, held in kept.items() if held}
        return ended


class AttachedSessions:
    """Which connections feed which sessions.

    The sequencer is informed when the first connection attaches to a session, and when the last one leaves.
    """

    def __init__(self, ingest: Ingest, waiting: dict[int, Waiting], per_connection_max: int) -> None:
        self._ingest, self._waiting, self._per_connection_max = ingest, waiting, per_connection_max
        self.attached: dict[SessionKey, int] = {}  # how many connections feed a session
        self._owed: deque[Entry] = deque()  # detach entries that have no slot yet

    def request(self, peer: Peer, request: int, entry: Entry) -> None:
        """Pass a session request on to the sequencer. Its outcome becomes the answer."""
        pending = self._ingest.stage_control(entry)
        if pending is None:
            raise Backpressure("the broker has no space for session requests", "try again, or use another broker")
        self._waiting[pending] = Waiting(entry.kind, entry.lane, None, peer, request)

    def opened(self, peer: Peer, key: SessionKey) -> None:
        """Record an opened session. The sequencer counts it as connected here until a detach entry."""
        if peer.gone:
            self._owed.append(Entry(EntryKind.SESSION_DETACH, *key))
            return
        if key not in peer.sessions:
            self.attached[key] = self.attached.get(key, 0) + 1
            self._remember(peer, key)

    def attach(self, peer: Peer, lane: int, session: int) -> bool:
        """Inform the sequencer that a session's publisher is connected here. Returns False if no slot is free."""
        key = SessionKey(lane, session)
        if key in peer.sessions:
            return True
        if key not in self.attached:
            self.stage_owed()  # a detach of this session that was staged later would undo the attach
            entry = Entry(EntryKind.SESSION_ATTACH, lane, session)
            if self._owed or (pending := self._ingest.stage_control(entry)) is None:
                return False
            self._waiting[pending] = Waiting(EntryKind.SESSION_ATTACH, lane, None, None)
            self.attached[key] = 0
        self.attached[key] += 1
        self._remember(peer, key)
        return True

    def stage_owed(self) -> None:
        """Stage the detach entries that found no free slot earlier."""
        while self._owed and (pending := self._ingest.stage_control(self._owed[0])) is not None:
            entry = self._owed.popleft()
            self._waiting[pending] = Waiting(entry.kind, entry.lane, None, None)

    def _remember(self, peer: Peer, key: SessionKey) -> None:
        """Record that a connection feeds a session. Above the maximum, detach its oldest one until its next batch."""
        peer.sessions[key] = None
        if len(peer.sessions) > self._per_connection_max:
            self._leave(peer, next(iter(peer.sessions)))

    def _leave(self, peer: Peer, key: SessionKey) -> None:
        """Detach a connection from a session. The sequencer is informed if no other connection feeds the session."""
        self.forget(peer, key)
        if key not in self.attached:
            self._owed.append(Entry(EntryKind.SESSION_DETACH, *key))

    def forget(self, peer: Peer, key: SessionKey) -> None:
        """Forget a session that ended, or whose connection did. Another batch would attach it again."""
        if key not in peer.sessions:
            return
        del peer.sessions[key]
        self.attached[key] -= 1
        if not self.attached[key]:
            del self.attached[key]

    def disconnected(self, peer: Peer) -> None:
        """Detach a closed connection from all of its sessions."""
        for key in list(peer.sessions):
            self._leave(peer, key)


class OutcomeCounts:
    """Count relayed outcomes, and give the relay access to sessions and LOST gaps."""

    def __init__(self, view: BrokerView, sessions: AttachedSessions) -> None:
        self._counters, self._clock = view.context.counters, view.context.env.clock
        self._durable = view.durable
        self.opened, self.ended = sessions.opened, sessions.forget

    def relayed(self, results: Entries) -> None:
        """Count many outcomes."""
        self._counters.answered(results, self._clock.now_us())

    def relayed_one(self, pending: int, outcome: int) -> None:
        """Count a single outcome."""
        self._counters.answered_one(pending, outcome, self._clock.now_us())

    def lost(self, lane: int) -> list[Span]:
        """Return a lane's LOST gaps."""
        return self._durable.chain(lane).lost


@dataclass(frozen=True, slots=True)
class WritePath:
    """The parts that a batch passes through on its way in, and its outcome on its way back."""

    ingest: Ingest
    sessions: AttachedSessions
    relay: Relay
    awaiting: AwaitingDurability
    lanes: OwnLanes

    @property
    def largest_frame(self) -> int:
        """Size in bytes of the largest batch with its header."""
        return self.ingest.frame_bytes_max + _HEADER_BYTES


class CreditGranter:
    """Grant credit to clients: none above the high water mark, or while the disks of all their lanes lag."""

    def __init__(self, view: BrokerView, path: WritePath, peers: dict[int, Peer]) -> None:
        self._view, self._context, self._settings = view, view.context, view.context.settings
        self._path, self._peers = path, peers
        self._above_since_us: int | None = None
        self._reported_full_us = 0
        self._starving: dict[int, int] = {}  # connections without credit as the disks of their lanes lag: since when
        self._least_bytes = max(path.largest_frame, self._settings.credit_bytes // 2)
        self.leaving = False

    @property
    def full(self) -> bool:
        """Whether the broker is above its high water mark and grants no credit."""
        return self._above_since_us is not None

    @property
    def starving(self) -> int:
        """Number of connections without credit because the disks of their lanes lag."""
        return len(self._starving)

    def leave(self) -> None:
        """Stop granting credit."""
        self.leaving = True

    def _window(self) -> tuple[int, int]:
        """Return a connection's credit window and the least it keeps. The largest frame always fits."""
        share = self._context.sizes.log_bytes // 4 // max(1, len(self._peers))
        window = max(self._path.largest_frame, min(self._settings.credit_bytes, share))
        return window, max(self._path.largest_frame, window // 2)

    def grant(self, peer: Peer) -> None:
        """Top up a connection's credit, unless the broker is above the high water mark."""
        credit = peer.credit
        taken = credit.received - credit.staging
        remaining = credit.granted - taken
        if remaining >= self._least_bytes and peer.number not in self._starving:
            return  # enough, whatever the connection's share is
        if not peer.greeted or peer.closing or self._above_since_us is not None or self.leaving:
            return
        if (self._path.awaiting.pressed or self._starving) and self._behind_with_disks(peer):
            return
        window, least = self._window()
        if remaining < least:
            peer.grant(taken + window)

    def _behind_with_disks(self, peer: Peer) -> bool:
        """Return whether a connection gets no credit because all lanes that it feeds keep too much of the log."""
        lanes = peer.feeds
        behind = bool(lanes) and all(map(self._path.awaiting.without_credit, lanes))
        if behind:
            self._starving.setdefault(peer.number, self._context.env.clock.now_us())
        else:
            self._starving.pop(peer.number, None)
        return behind

    def _feed_starving(self, now_us: int) -> None:
        """Grant credit to clients whose lanes caught up, and report the stall to clients that have waited long."""
        patience_us = int(self._settings.backpressure_after_s * 1_000_000)
        for number, since_us in list(self._starving.items()):
            peer = self._peers.get(number)
            if peer is None:
                del self._starving[number]
                continue
            self.grant(peer)
            if number in self._starving and now_us - since_us >= patience_us:
                self._starving[number] = now_us
                for lane in peer.feeds:
                    self._send_stalled(peer, lane)

    def _report_stalled(self, now_us: int) -> None:
        """Report a lane whose disks make no progress to the clients that feed it, with the replica in trouble."""
        for lane in self._path.awaiting.stalled(now_us, int(self._settings.backpressure_after_s * 1_000_000)):
            for peer in self._peers.values():
                if lane in peer.feeds:
                    self._send_stalled(peer, lane)

    def _send_stalled(self, peer: Peer, lane: int) -> None:
        """Report to a client that the disks of a lane lag, with the replica in trouble."""
        peer.send_full(self._view.store.topic_lane(lane), *self._view.durable.trouble(lane))

    def regulate(self, now_us: int) -> None:
        """Stop granting credit above the high water mark, resume below the low one, and report both."""
        self._report_stalled(now_us)
        if self._starving:
            self._feed_starving(now_us)
        occupancy, journal = self._path.ingest.occupancy(), self._context.env.journal
        if self._above_since_us is None:
            if occupancy >= self._settings.water_high:
                self._above_since_us = self._reported_full_us = now_us
                self._context.counters.backpressure += 1
                unresolved = len(self._path.relay.waiting)
                journal.warn("backpressure on", occupied=round(occupancy, 3), unresolved=unresolved)
        elif occupancy <= self._settings.water_low:
            self._above_since_us = None
            journal.note("backpressure off", occupied=round(occupancy, 3))
            for peer in self._peers.values():
                self.grant(peer)
        elif now_us - self._reported_full_us >= self._settings.backpressure_after_s * 1_000_000:
            self._reported_full_us = now_us  # repeated each time: publishers keep waiting only while they get reports
            for peer in self._peers.values():
                if peer.greeted:
                    peer.send_full()


class Admission:
    """Admit batches, or refuse them with a reason. `announce` publishes the waiting counts before others can act."""

    def __init__(
        self,
        view: BrokerView,
        path: WritePath,
        readers: LaneReaders,
        peers: dict[int, Peer],
        announce: Callable[[], None],
    ) -> None:
        context = view.context
        self._context, self._store, self._epoch, self.path = context, view.store, view.epoch, path
        self._announce, self._clock = announce, context.env.clock
        self.credit = CreditGranter(view, path, peers)
        self.arriving = ArrivingBatches(context.settings, context.sizes.log_bytes, context.sizes.chunk_bytes)
        self.references = References(self, view, readers, path.ingest)

    # --- before a batch -----------------------------------------------------------------------------------------------
    def admit(self, peer: Peer, header: BatchHeader) -> memoryview | None:
        """Reserve log space for a batch's payload. None refuses only this batch; an error ends the connection."""
        outcome = self._check(peer, header)
        if outcome is None:
            reservation = self.path.ingest.reserve(header.length)
            if reservation is not None:
                peer.arriving.append(reservation)
                return reservation.view
            outcome = Outcome.BACKPRESSURE
        peer.refuse(header, outcome)
        return None

    def _check(self, peer: Peer, header: BatchHeader) -> Outcome | None:
        """Return the outcome that refuses a batch of `header.length` bytes, or None to accept it. Counts its credit."""
        credit, records_max = peer.credit, self._context.config.limits.records_per_batch
        credit.received += _HEADER_BYTES + header.length
        if credit.received > credit.granted:
            raise OverCredit(
                f"the client sent {credit.received} bytes, but {credit.granted} are granted", "wait for credit first"
            )
        if header.length > self.path.ingest.frame_bytes_max:
            raise FrameTooLarge(
                f"the batch has {header.length} bytes; the maximum is {self.path.ingest.frame_bytes_max}",
                "send smaller batches (batch_bytes)",
            )
        if header.count > records_max:
            raise FrameTooLarge(
                f"the batch has {header.count} records; the maximum is {records_max}", "send smaller batches"
            )
        outcome = self._refusal(peer, header)
        if outcome is None and not self.arriving.may_send(peer, header.length):
            outcome = Outcome.BACKPRESSURE
        return outcome

    def _refusal(self, peer: Peer, header: BatchHeader) -> Outcome | None:
        """Return the outcome that refuses a batch, from its header alone, or None to accept it."""
        topic = self._store.lanes.get(header.lane)
        if topic is None or header.partition >= topic.partitions or header.schema > topic.schema_version:
            self._store.refresh()  # the topic may be new, or altered since the last refresh
            if (topic := self._store.lanes.get(header.lane)) is None:
                return Outcome.UNKNOWN_TOPIC
        if header.partition >= topic.partitions:
            raise BadFrame(
                f"partition {header.partition} does not exist: topic {topic.name} has {topic.partitions}",
                "use a partition below that number",
            )
        if header.schema > topic.schema_version or bool(header.schema) != bool(topic.schema_version):
            return Outcome.UNKNOWN_SCHEMA
        if header.session == NO_SESSION:
            return Outcome.UNKNOWN_SESSION
        if header.flags & WANT_DURABLE and not topic.replicas:
            raise BadFrame(f"topic {topic.name} has no replicas, so it has no durable acks", "use ack=1")
        if topic.order <= Order.BROKER:
            return self.path.lanes.check(topic)
        if topic.replicas and self.path.awaiting.crowded(header.lane):
            return Outcome.BACKPRESSURE
        return None if self.path.sessions.attach(peer, header.lane, header.session) else Outcome.BACKPRESSURE

    # --- a batch ------------------------------------------------------------------------------------------------------
    def take_reference(self, peer: Peer, header: BatchHeader, reference: BatchReference) -> None:
        """Take a batch by reference. Its credit then counts the staged batch's size."""
        header = header._replace(length=reference.size, flags=header.flags & ~REFERENCE)
        outcome = self._check(peer, header)
        if outcome is None:
            self.references.received(peer, header, reference)
        else:
            peer.refuse(header, outcome)

    def take_arrived(self, peer: Peer, header: BatchHeader) -> None:
        """Take the batch whose bytes are now in the log."""
        arrived = peer.arriving[0]  # stays in the queue until it is taken: a hang-up then releases its memory
        if payload_crc(arrived.view) != header.crc:
            raise ChecksumMismatch(
                f"the payload of batch {header.session_seq} of session {header.session} has a wrong checksum",
                "the bytes changed in transit; send the batch again",
            )
        if not self.references.follows(peer, header, arrived):
            self.take(peer, header, arrived)
        peer.arriving.popleft()

    def take(self, peer: Peer, header: BatchHeader, arrived: Reservation) -> None:
        """Stage the entry of a complete batch whose checksum matches."""
        topic, path = self._store.lanes.get(header.lane), self.path
        if topic is not None and topic.order <= Order.BROKER:
            if path.lanes.take(peer, topic, header, arrived):
                self._context.counters.came_in[header.lane].add(1, header.count, header.length)
            return
        waiting = Waiting(EntryKind.BATCH, header.lane, arrived.location, peer)
        if topic is not None and topic.replicas:
            waiting.awaiting, waiting.durable = path.awaiting.of(header.lane), bool(header.flags & WANT_DURABLE)
        pending = path.ingest.stage_batch(
            arrived,
            Entry(
                EntryKind.BATCH, header.lane, header.session, header.session_seq, header.low, arrived.location,
                header.length, header.count, header.crc, header.partition, header.schema, waiting.durable,
            ),
        )  # fmt: skip
        path.relay.wait(pending, waiting)
        self._context.counters.came_in[header.lane].add(1, header.count, header.length)

    def drop(self, peer: Peer) -> None:
        """Release the log space of batches that will not arrive because their connection ends."""
        while peer.arriving:
            self.path.ingest.abandon(peer.arriving.popleft())
        self.references.drop(peer)

    # --- after a read of a socket -------------------------------------------------------------------------------------
    def after_receive(self, peer: Peer) -> None:
        """Publish the staged batches of one socket read, and top up credit."""
        self.arriving.received(peer, self._clock.now_us())
        if self.path.relay.for_disks:
            self._announce()  # before the sequencer can order the batches and replicas can sync them
        self.publish()
        if self.path.lanes.publish(peer):
            self._announce()
            self.path.awaiting.settle()  # for batches that became durable earlier: no replica rang for them
        self.credit.grant(peer)

    def publish(self) -> None:
        """Publish the staged entries."""
        ingest = self.path.ingest
        if not ingest.publish():
            return
        self._context.counters.published(ingest.next, self._clock.now_us())
        if self._epoch.sequencer_sleeps():
            self._context.env.bell.ring("sequencer")

    def end_slow(self, now_us: int) -> None:
        """End connections whose batch has held log space too long."""
        for peer in self.arriving.too_slow(now_us, self.path.ingest.occupancy()):
            peer.hang_up(TimedOut("a batch took too long to arrive", "use smaller batches, or a faster connection"))

    def disconnected(self, peer: Peer) -> None:
        """Detach a closed connection. The batches it sent are still processed."""
        self.arriving.disconnected(peer)
        self.path.awaiting.disconnected(peer)
        self.path.sessions.disconnected(peer)
        self.path.sessions.stage_owed()
        self.publish()
