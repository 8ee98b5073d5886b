"""The log and the pending ring: entries on their way to the sequencer, and their outcomes on the way back.

`Ingest` reserves log space, receives, checks, and publishes a pending entry.

Order of stores: payload, flush, entry, flush, and only then the published frontier. Entries of one socket read are
staged, and written as one slice. A slot of the pending ring is promised at admission, so every received batch can be
published. A part of the ring is reserved for control entries.

`Relay` turns results of the sequencer into acks and answers. The rule: load the results, then check whether a later
epoch opened, and act only if none did. Every pending entry is answered once. After a takeover the new sequencer may
answer again; the relay ignores that. Acks that also wait for disks are passed to durable.py.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from embarcadero.broker.clients import Peer
from embarcadero.broker.durable import AwaitingLane, one_ack
from embarcadero.config import FabricSizes
from embarcadero.env import NO_STEPS, Steps
from embarcadero.errors import (
    Backpressure,
    EmbarcaderoError,
    SessionFenced,
    TooMany,
    UnknownSession,
    UnknownTopic,
    invariant,
)
from embarcadero.fabric.layout import (
    LINE,
    PENDING,
    BrokerLine,
    Entries,
    Line,
    RegionKind,
    fold_line,
    frontier_offset,
    pick,
)
from embarcadero.fabric.leader import LeaderView
from embarcadero.fabric.lines import FrontierWriter, create_ring
from embarcadero.fabric.log import LogWriter, Reservation, create_log
from embarcadero.fabric.region import Fabric, Region, pending_region
from embarcadero.limits import FRAME_BYTES_MAX
from embarcadero.steps import Step
from embarcadero.types import EntryKind, Member, Outcome, SessionKey, Span
from embarcadero.wire.codec import ACK
from embarcadero.wire.messages import Done, NameHeld, Opened

_ENTRY = struct.Struct("<QQQIIIIIIHHHBBII")
invariant(_ENTRY.size == PENDING.itemsize, "the packed entry matches the table's entry")


@dataclass(slots=True)
class Entry:
    """The fields of a pending entry that a broker sets."""

    kind: EntryKind
    lane: int
    session: int
    session_seq: int = 0
    low: int = 0
    location: int = 0
    size: int = 0
    count: int = 0
    crc: int = 0
    partition: int = 0
    schema: int = 0
    waits: bool = False  # its ack waits for disks: it leaves when a replica rings
    flags: int = 0  # of a SESSION_OPEN entry: OPEN_STRONG


class Ingest:
    """Log and pending ring of one broker incarnation, which is the only writer of both."""

    def __init__(
        self,
        fabric: Fabric,
        member: Member,
        sizes: FabricSizes,
        frame_bytes_max: int = FRAME_BYTES_MAX,
        steps: Steps = NO_STEPS,
    ) -> None:
        prefix, self._steps = member.region_prefix, steps
        self.frontiers, log = create_log(fabric, prefix, sizes, member.broker, member.incarnation)
        self.log = LogWriter(log, self.frontiers, steps)
        self._ring = create_ring(
            fabric,
            pending_region(prefix),
            RegionKind.PENDING,
            PENDING,
            sizes.pending_slots,
            "index",
            member.broker,
            member.incarnation,
        )
        self._handle = member.handle
        self._control_slots = max(4, sizes.pending_slots // 16)
        self._staged = bytearray()
        self._promised = 0  # slots promised to batches that are still arriving
        self.free_below = 0  # slots of pending indices below this are free, according to the sequencer
        self.frame_bytes_max = min(frame_bytes_max, sizes.chunk_bytes)

    def free(self, below: int) -> None:
        """Free the slots of lower indices, which the sequencer has read."""
        self.free_below = below

    @property
    def next(self) -> int:
        """Index of the next pending entry."""
        return self._ring.next + len(self._staged) // PENDING.itemsize

    @property
    def slots(self) -> int:
        """Number of slots of the pending ring."""
        return self._ring.slots

    @property
    def arriving(self) -> int:
        """Number of batches that are still arriving."""
        return self._promised

    @property
    def used_slots(self) -> int:
        """Number of pending slots that are taken or promised."""
        return self.next - self.free_below + self._promised

    def occupancy(self) -> float:
        """Return how full the ring or the log is, whichever is fuller: 0 to 1."""
        return max(self.used_slots / self._ring.slots, self.log.occupied())

    def reserve(self, size: int) -> Reservation | None:
        """Reserve log space and a slot for a batch. None if there is no capacity now."""
        if self.used_slots + self._control_slots >= self._ring.slots:
            return None
        reservation = self.log.reserve(size)
        if reservation is not None:
            self._promised += 1
        return reservation

    def abandon(self, reservation: Reservation) -> None:
        """Release a reservation whose batch will not arrive: its connection closed, or its bytes are wrong."""
        self._promised -= 1
        self.log.release(reservation.location)

    def stage_batch(self, reservation: Reservation, entry: Entry) -> int:
        """Flush a complete payload and stage its entry. Returns the pending index."""
        self.log.flush(reservation)
        self._steps.at(Step.INGEST_PAYLOAD)
        self._promised -= 1
        return self._stage(entry)

    def keep(self, reservation: Reservation) -> None:
        """Flush a complete payload whose entry goes to an own lane, and give its slot back."""
        self.log.flush(reservation)
        self._promised -= 1

    def stage_control(self, entry: Entry) -> int | None:
        """Stage a control entry without payload. None if even the reserved slots are taken."""
        return self._stage(entry) if self.used_slots < self._ring.slots else None

    def _stage(self, entry: Entry) -> int:
        index = self.next
        self._staged += _ENTRY.pack(
            index, entry.session_seq, entry.low, entry.lane, entry.session, entry.location, entry.size, entry.count,
            entry.crc, self._handle, entry.partition, entry.schema, entry.kind, entry.flags, entry.waits, 0,
        )  # fmt: skip
        return index

    def publish(self) -> bool:
        """Write all staged entries, flush, then move the frontier. Returns whether there were any."""
        if not self._staged:
            return False
        if len(self._staged) == LINE.size:
            self._ring.write_line(list(LINE.unpack(self._staged)), self.free_below)
        else:
            self._ring.write(np.frombuffer(self._staged, dtype=PENDING), self.free_below)
        self._staged = bytearray()
        self._steps.at(Step.INGEST_ENTRIES)
        self._ring.publish()
        self._steps.at(Step.INGEST_PUBLISHED)
        return True


_RESULTS_AT_ONCE = 4_096
_ENDED: Final = frozenset(map(int, (Outcome.CLOSED, Outcome.FENCED, Outcome.UNKNOWN_SESSION)))
"""After these outcomes a session takes no more batches."""


@dataclass(slots=True)
class Waiting:
    """A batch or request that waits for the outcome of a pending entry."""

    kind: EntryKind
    lane: int
    location: int | None  # location of its payload in the log, if it has one
    peer: Peer | None
    request: int = 0
    awaiting: AwaitingLane | None = None  # in a topic with replicas: keeps its payload until it is durable
    durable: bool = False  # whether its ack waits for that too


class OutcomeListener(Protocol):
    """Called with outcomes as they are relayed."""

    def relayed(self, results: Entries) -> None:
        """Handle many outcomes."""
        ...

    def relayed_one(self, pending: int, outcome: int) -> None:
        """Handle a single outcome."""
        ...

    @property
    def ended(self) -> Callable[[Peer, SessionKey], None]:
        """Called with a session (lane and number) that takes no more batches."""
        ...

    @property
    def opened(self) -> Callable[[Peer, SessionKey], None]:
        """Called with a session that was opened for a client."""
        ...

    def lost(self, lane: int) -> list[Span]:
        """Return a lane's LOST gaps."""
        ...


class NoListener:
    """A listener for relays without a broker."""

    def relayed(self, results: Entries) -> None:
        pass

    def relayed_one(self, pending: int, outcome: int) -> None:
        pass

    def ended(self, peer: Peer, session: SessionKey) -> None:
        pass

    def opened(self, peer: Peer, session: SessionKey) -> None:
        pass

    def lost(self, lane: int) -> list[Span]:  # noqa: ARG002 - the protocol's signature
        return []


NO_LISTENER: Final = NoListener()


class Relay:
    """Follows the results of this broker's entries in the current epoch."""

    def __init__(
        self,
        frontiers: Region,
        release: Callable[[int], None],
        waiting: dict[int, Waiting] | None = None,
        listener: OutcomeListener | None = None,
        steps: Steps = NO_STEPS,
    ) -> None:
        self._steps, self._listener = steps, listener or NO_LISTENER
        self._read = FrontierWriter(frontiers, frontier_offset(BrokerLine.RESULTS_READ))
        self._read_epoch = FrontierWriter(frontiers, frontier_offset(BrokerLine.RESULTS_EPOCH))
        self._release = release
        self.waiting = {} if waiting is None else waiting  # by pending index
        self.for_disks = 0  # how many of those will then wait for disks
        self._next = 0

    def wait(self, pending: int, waiting: Waiting) -> None:
        """Record the batch or request that waits for the outcome of a staged entry."""
        self.waiting[pending] = waiting
        self.for_disks += waiting.durable

    def poll(self, epoch: LeaderView) -> int:
        """Take new results and pass them on. Returns how many there were."""
        results = epoch.results()
        if results is None:
            return 0
        if self._read_epoch.value != epoch.number:
            self._next = 0
            self._read.restart(0)
            self._read_epoch.advance(epoch.number)
        frontier = results.frontier.load()
        if frontier <= self._next:
            return 0
        if frontier == self._next + 1 and self._pass_on_one(results.line(self._next), epoch):
            return 1
        found = results.read(self._next, min(frontier, self._next + _RESULTS_AT_ONCE))
        self._steps.at(Step.ACK_LOADED)
        if not len(found) or not epoch.may_act():
            return 0
        self._steps.at(Step.ACK_CHECKED)
        self._listener.relayed(found)
        self._pass_on(found)
        self._steps.at(Step.ACK_HANDED)
        self._next += len(found)
        self._read.advance(self._next)
        self._steps.at(Step.ACK_READ)
        return len(found)

    def _pass_on_one(self, line: Line, epoch: LeaderView) -> bool:
        """Pass on a single outcome without arrays: the usual case of publishers that wait for each ack."""
        waiting = self.waiting.get(line[1])
        if waiting is None or waiting.kind != EntryKind.BATCH or waiting.location is None:
            return False
        if line[6] >> 32 & 0xFF in _ENDED:
            return False
        self._steps.at(Step.ACK_LOADED)
        if line[0] != self._next or fold_line(line) != line[7] >> 32 or not epoch.may_act():
            return False
        self._steps.at(Step.ACK_CHECKED)
        del self.waiting[line[1]]
        self.for_disks -= waiting.durable
        self._listener.relayed_one(line[1], line[6] >> 32 & 0xFF)
        if waiting.awaiting is not None:
            self._one_for_disks(waiting, waiting.awaiting, line)
        else:
            self._release(waiting.location)
            self._ack_one(waiting, line)
        self._steps.at(Step.ACK_HANDED)
        self._next += 1
        self._read.advance(self._next)
        self._steps.at(Step.ACK_READ)
        return True

    @staticmethod
    def _ack_one(waiting: Waiting, line: Line) -> None:
        if waiting.peer is not None and not waiting.peer.gone:
            waiting.peer.send_ack(
                waiting.lane, line[6] & 0xFFFF_FFFF, line[4], line[2], line[3], line[5], line[6] >> 32 & 0xFF
            )

    def _one_for_disks(self, waiting: Waiting, awaiting: AwaitingLane, line: Line) -> None:
        """Do the same in a topic with replicas."""
        awaiting.answered(line[6] >> 32 & 0xFF, line[2], waiting.location or 0)
        if not waiting.durable:
            self._ack_one(waiting, line)
        elif waiting.peer is not None and not waiting.peer.gone:
            outcome = line[6] >> 32 & 0xFF
            acks = one_ack(waiting.lane, line[6] & 0xFFFF_FFFF, line[4], line[2], line[3], line[5], outcome)
            awaiting.hold_one(waiting.peer, outcome, line[2], acks)

    def _pass_on(self, results: Entries) -> None:
        """Free settled payloads, and send acks as one array per connection."""
        acks: dict[Peer, tuple[list[int], list[int]]] = {}
        for_disks: dict[tuple[Peer, AwaitingLane], list[int]] = {}
        outcomes = results["outcome"].tolist()
        for row, pending in enumerate(results["pending"].tolist()):
            waiting = self.waiting.pop(pending, None)
            if waiting is None:
                continue
            self.for_disks -= waiting.durable
            if waiting.location is not None:
                if waiting.awaiting is None:
                    self._release(waiting.location)
                else:
                    waiting.awaiting.answered(outcomes[row], int(results["index"][row]), waiting.location)
            peer = waiting.peer
            if peer is not None and outcomes[row] == Outcome.OPENED:
                self._listener.opened(peer, SessionKey(waiting.lane, int(results["session"][row])))
            if peer is None or peer.gone:
                continue
            if outcomes[row] in _ENDED:
                self._listener.ended(peer, SessionKey(waiting.lane, int(results["session"][row])))
            if waiting.awaiting is not None and waiting.durable:
                for_disks.setdefault((peer, waiting.awaiting), []).append(row)
            elif waiting.kind == EntryKind.BATCH:
                rows, lanes = acks.setdefault(peer, ([], []))
                rows.append(row)
                lanes.append(waiting.lane)
            else:
                self._answer(peer, waiting, results[row : row + 1])
        for peer, (rows, lanes) in acks.items():
            peer.send_acks(_acks(pick(results, np.array(rows)), lanes))
        for (peer, awaiting), rows in for_disks.items():
            waits = _acks(pick(results, np.array(rows)), [awaiting.lane] * len(rows))
            awaiting.hold(peer, waits)

    def _answer(self, peer: Peer, waiting: Waiting, result: Entries) -> None:
        outcome = Outcome(int(result["outcome"][0]))
        if outcome == Outcome.OPENED:
            *before, (lost_from, lost_to) = self._listener.lost(waiting.lane) or [Span(0, 0)]
            peer.answer(
                waiting.request,
                Opened(
                    lane=waiting.lane,
                    session=int(result["session"][0]),
                    index=int(result["index"][0]),
                    expected=int(result["extra"][0]),
                    low=int(result["seq"][0]),
                    lost_from=lost_from,
                    lost_to=lost_to,
                    lost_before=before,
                    reached=int(result["session_seq"][0]),
                    order=int(result["order"][0]),
                ),
            )
        elif outcome == Outcome.NAME_HELD:
            answer = NameHeld(session=int(result["session"][0]), expected=int(result["extra"][0]))
            peer.answer(waiting.request, answer)
        elif outcome in (Outcome.CLOSED, Outcome.NOTED):
            peer.answer(waiting.request, Done())
        else:
            peer.fail(waiting.request, refusal(outcome, bool(result["extra"][0])))


def _acks(results: Entries, lanes: list[int]) -> Entries:
    acks = np.zeros(len(results), dtype=ACK)
    acks["lane"] = lanes
    for name in ("session", "session_seq", "index", "seq", "extra", "outcome"):
        acks[name] = results[name]
    return acks


def refusal(outcome: Outcome, shared: bool = False) -> EmbarcaderoError:
    """Return the error of a refused session request. `shared`: the client's address used up its share."""
    if outcome == Outcome.UNKNOWN_TOPIC:
        return UnknownTopic("the topic was deleted", "create it again, or use another topic")
    if outcome == Outcome.TOO_MANY_SESSIONS and shared:
        return TooMany(
            "this address has reached its maximum number of sessions of the topic",
            "close idle publishers, or raise sequencer.sessions_per_peer_share",
        )
    if outcome == Outcome.TOO_MANY_SESSIONS:
        return TooMany("the topic has reached its maximum number of open sessions", "close idle publishers")
    if outcome == Outcome.BACKPRESSURE:
        return Backpressure("the cluster has no memory for the topic now", "make the fabric larger, or try again later")
    if outcome == Outcome.FENCED:
        return SessionFenced("the session was taken over by another holder", "open a new publisher")
    return UnknownSession(f"the session is unknown ({outcome.name})", "open a new session")
