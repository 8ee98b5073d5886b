"""The clients of one broker: the target of their replies, and memory for answers that they have not read yet.

Theory of operation. An answer stays in the broker's memory until the client's socket has taken it. A client that sends
requests and does not read therefore occupies memory. Four rules bound that:

1. A connection with more than an eighth of `broker.send_queue_bytes` unread gets no further answer to a fetch.
2. An answer to a fetch has at most an eighth of the free part of `broker.unread_bytes`. More slow readers therefore get
   smaller answers, and never occupy all of it. A quarter is reserved for connections that read their last answer
   promptly.
3. Other requests are often much smaller than their answers. While a connection occupies more than `UNREAD_PAUSE_BYTES`,
   or more than an eighth of the free part, its requests stay unparsed, and its reads of indexes do not start.
4. While any request waits for memory, connections that did not read an answer within `broker.unread_s` are ended.

An answer to a fetch has at least one batch, so a fetch waits until the largest batch fits. A read of a file or a table
reserves at least as much from its start until its result arrives.

All output counts, including acks and credit, once a connection has more than SMALL_BYTES unread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import numpy as np

from embarcadero.broker.context import BrokerCounters
from embarcadero.config.table import BrokerKeys as BrokerSettings
from embarcadero.env import Clock
from embarcadero.errors import DiskFailed, DiskFull, EmbarcaderoError, Retriable, TooMany
from embarcadero.fabric.layout import Entries
from embarcadero.fabric.log import Reservation
from embarcadero.limits import KIB, STORE_CALLS_PER_CONNECTION_MAX, UNREAD_PAUSE_BYTES
from embarcadero.types import NO_INDEX, Outcome, SessionKey
from embarcadero.wire import messages as m
from embarcadero.wire.codec import (
    ACK,
    NO_ACK,
    BatchHeader,
    ack_frame,
    control_frame,
    credit_frame,
    full_frame,
    one_ack_frame,
)

SMALL_BYTES: Final = 4 * KIB
"""A connection with at most this much unread output is not counted: acks of clients that read are not worth it."""

_SHARE: Final = 8  # an answer may have 1/8 of the free memory
_KEPT: Final = 4  # 1/4 is reserved for connections that read promptly
_PROMPT_US: Final = 1_000_000


@dataclass(slots=True)
class _Holder:
    mark: int  # total bytes sent to the connection at `since_us`; once it has read them, the next mark is set
    since_us: int


class UnreadBytes:
    """Memory that all connections of one broker occupy: unread output, and reservations for running reads."""

    def __init__(self, settings: BrokerSettings, batch_bytes: int, clock: Clock) -> None:
        self.total_bytes = max(settings.unread_bytes, _KEPT * batch_bytes)
        self.send_queue_bytes = settings.send_queue_bytes
        self._batch_bytes, self._patience_us = batch_bytes, int(settings.unread_s * 1_000_000)
        self._pause_bytes = min(UNREAD_PAUSE_BYTES, settings.send_queue_bytes // _SHARE)
        self._clock = clock
        self._holders: dict[Peer, _Holder] = {}
        self._stopped: dict[Peer, None] = {}  # connections whose requests wait, in order of arrival
        self.used = 0  # as of the last count, plus later additions
        self.refused = 0  # fetches and requests that had to wait for memory since the last count
        self.waits = 0  # how often a fetch had to wait, in total

    # --- before an answer ---------------------------------------------------------------------------------------------
    def allowed(self, peer: Peer, wanted: int) -> int:
        """Return how many bytes the next answer to a fetch may have; 0 means not now."""
        free = self._free(peer)
        if free < self._batch_bytes:
            self.refused += 1
            self.waits += 1
            return 0
        return max(1, min(wanted, free // _SHARE))

    def full(self, peer: Peer) -> bool:
        """Return whether the requests of a connection wait until it has read more."""
        unread = peer.unread_bytes()
        if unread <= SMALL_BYTES:
            return False
        free = self._free(peer)
        if unread <= min(free // _SHARE, self._pause_bytes):
            return False
        self.refused += free < self._batch_bytes
        return True

    def stops(self, peer: Peer) -> bool:
        """Return whether the requests of a connection wait until it has read more, or until its store calls end.

        If so, `go_on` resumes the connection later.
        """
        if not self.full(peer) and peer.store_calls < STORE_CALLS_PER_CONNECTION_MAX:
            return False
        self._stopped[peer] = None
        self.hold(peer)
        return True

    def go_on(self) -> bool:
        """Resume the requests of connections that have read enough since. Returns whether there were any."""
        stopped, self._stopped = self._stopped, {}
        went_on = False
        for peer in stopped:
            if not peer.closing and not self.stops(peer):
                peer.go_on()
                went_on = True
        return went_on

    def _free(self, peer: Peer) -> int:
        free = self.total_bytes - self.used
        return free if peer.prompt else free - self.total_bytes // _KEPT

    # --- occupied memory ----------------------------------------------------------------------------------------------
    def given(self, peer: Peer, size: int) -> None:
        """Count `size` sent bytes."""
        self.used += size
        self.hold(peer)

    def reserve(self, peer: Peer, asked: int) -> None:
        """Reserve memory for the result of a read of a file or a table that starts now."""
        size = self.most(asked)
        peer.reading_bytes += asked
        peer.reserved_bytes += size
        self.given(peer, size)

    def release(self, peer: Peer, asked: int) -> None:
        """Release a reservation: the read failed, or its result counts as sent output from now on."""
        size = self.most(asked)
        peer.reading_bytes -= asked
        peer.reserved_bytes -= size
        self.used -= size

    def most(self, asked: int) -> int:
        """Return the most bytes that the result of a read of `asked` bytes may have. It has at least one batch."""
        return max(asked, self._batch_bytes)

    def hold(self, peer: Peer) -> None:
        """Watch from now on whether a connection reads: it has an answer to a fetch, or occupies memory."""
        if peer not in self._holders:
            self._holders[peer] = _Holder(peer.given_bytes, self._clock.now_us())

    def look(self, now_us: int) -> Peer | None:
        """Count unread output again. Returns the connection to end, which has not read for the longest time.

        Returns None while no request waits for memory, or while all connections read.
        """
        used, slowest, slowest_us = 0, None, now_us - self._patience_us
        for peer, holder in list(self._holders.items()):
            unread, held = peer.unread_bytes(), peer.held_bytes
            if peer.gone or not held:
                del self._holders[peer]
                peer.prompt |= not peer.gone
                continue
            used += held
            if peer.given_bytes - unread >= holder.mark:
                peer.prompt = peer.prompt or now_us - holder.since_us < _PROMPT_US
                holder.mark, holder.since_us = peer.given_bytes, now_us
            elif now_us - holder.since_us >= _PROMPT_US:
                peer.prompt = False
                if holder.since_us <= slowest_us and not peer.closing:
                    slowest, slowest_us = peer, holder.since_us
        short, self.used, self.refused = self.refused > 0, used, 0
        return slowest if short else None

    @property
    def holders(self) -> int:
        """Number of connections that occupy memory."""
        return len(self._holders)


def _ignored() -> None:
    """Do nothing: the default without a transport."""


def _no_bytes() -> int:
    """Return 0: the default for a transport without a buffer."""
    return 0


@dataclass(slots=True)
class Transport:
    """The transport of one client's frames: a socket, or a connection of the simulator."""

    on_output: Callable[[], None] = _ignored  # called when there is output to take
    socket_bytes: Callable[[], int] = _no_bytes  # bytes that the transport has and the peer's kernel has not
    address: str = ""  # host:port of the peer


class Door(Protocol):
    """The connection behind a peer, as other parts of the broker may use it."""

    @property
    def waiting_bytes(self) -> int:
        """Bytes of requests that arrived and are not parsed yet."""
        ...

    def go_on(self) -> None:
        """Resume the requests that waited until the peer has read more."""
        ...

    def hang_up(self, error: EmbarcaderoError) -> None:
        """Send the error to the peer, and end the connection."""
        ...

    def abort(self, error: EmbarcaderoError) -> None:
        """End the connection without sending the error: the peer does not read."""
        ...


class Replies(ABC):
    """Replies to one client, queued as frames until the transport takes them.

    `closing`: send the queued frames, then hang up. `aborted`: hang up immediately because the peer does not read.
    """

    def __init__(self, unread: UnreadBytes, counters: BrokerCounters, transport: Transport) -> None:
        self.closing = self.gone = self.aborted = False
        self.transport = transport
        self.given_bytes = 0  # total bytes sent
        self._output: list[bytes | memoryview] = []
        self._output_bytes = 0
        self._unread, self._counters = unread, counters

    def take_output(self) -> list[bytes | memoryview]:
        """Take the queued frames, in order."""
        output, self._output, self._output_bytes = self._output, [], 0
        return output

    def drop_output(self) -> None:
        """Drop the queued frames: the peer will not read them."""
        self._output.clear()
        self._output_bytes = 0

    def unread_bytes(self) -> int:
        """Return the bytes that were sent to the peer and have not left the process."""
        return self._output_bytes + self.transport.socket_bytes()

    def _send(self, *buffers: bytes | memoryview) -> None:
        if self.gone or self.aborted:
            return
        size = sum(map(len, buffers))
        self._output += buffers
        self._output_bytes += size
        self.given_bytes += size
        unread = self.unread_bytes()
        if unread <= SMALL_BYTES or self._may_hold(unread, size):
            self.transport.on_output()

    @abstractmethod
    def _may_hold(self, unread: int, size: int) -> bool:
        """Count `size` more bytes of a peer with `unread` unread bytes. False if that ended the peer."""

    def answer(self, request: int, message: m.Message) -> None:
        """Answer a control message, or push one (request 0)."""
        self._send(control_frame(message, request))

    def fail(self, request: int, error: EmbarcaderoError) -> None:
        """Send an error to the peer. Request 0 means the connection itself.

        A disk that fails here is the store's disk: unreadable copies were turned into Corrupt before. The call changed
        nothing, so the client may repeat it automatically.
        """
        kind = Retriable if isinstance(error, DiskFull | DiskFailed) else type(error)
        self.answer(request, m.Failed(code=kind.__name__, message=error.message, hint=error.hint))

    def refuse(self, header: BatchHeader, outcome: Outcome, extra: int = 0) -> None:
        """Report to the publisher that its batch was refused, unless it wants no acks."""
        if header.flags & NO_ACK:
            return
        ack = np.zeros(1, dtype=ACK)
        ack["lane"], ack["session"], ack["session_seq"] = header.lane, header.session, header.session_seq
        ack["index"] = ack["seq"] = NO_INDEX
        ack["outcome"], ack["extra"] = int(outcome), extra
        self._counters.outcomes[int(outcome)] += 1
        self.send_acks(ack)

    def send_acks(self, acks: Entries) -> None:
        """Send outcomes of this client's batches."""
        self._send(ack_frame(acks))

    def send_ack(self, lane: int, session: int, sequence: int, index: int, seq: int, extra: int, outcome: int) -> None:
        """Send the outcome of one batch."""
        self._send(one_ack_frame(lane, session, sequence, index, seq, extra, outcome))

    def send_full(self, lane: int = -1, replica: int = -1, trouble: int = 0) -> None:
        """Report that the broker or a lane has lacked capacity for too long. `full_frame` defines the arguments."""
        self._send(full_frame(lane, replica, trouble))

    def send_fetched(self, frame: list[bytes | memoryview]) -> None:
        """Send the answer to a fetch: `FetchResult.frame`."""
        self._send(*frame)


@dataclass(slots=True)
class Credit:
    """Total bytes of batches that a client has sent, and may send."""

    received: int = 0
    granted: int = 0
    staging: int = 0  # part of `received`: batches by reference that wait for their staged batch

    @property
    def taken(self) -> int:
        """Bytes received, without batches that wait for their staged batch."""
        return self.received - self.staging


class LastFetch(NamedTuple):
    """The last fetch of a client in one lane: the next index to fetch, and the time of the answer."""

    next_index: int
    at_us: int


class Peer(Replies):
    """One client as all parts of the broker see it: replies, credit, and the resources it occupies."""

    def __init__(
        self, number: int, door: Door, unread: UnreadBytes, counters: BrokerCounters, transport: Transport
    ) -> None:
        super().__init__(unread, counters, transport)
        self.number, self._door = number, door
        self.client = ""  # the client's own name for itself
        self.host = transport.address.rpartition(":")[0]
        self.greeted = False
        self.credit = Credit()
        self.arriving: deque[Reservation] = deque()  # log space reserved for incomplete batches, in order
        self.reading: dict[int, LastFetch] = {}  # by lane
        self.parked = 0  # waiting long polls
        self.acks_waiting = 0  # acks that wait for disks
        self.store_calls = 0  # requests that wait for the store
        self.lanes: set[int] = set()  # lanes of brokers that it feeds (orders 0 and 1)
        self.sessions: dict[SessionKey, None] = {}  # sessions that it feeds (orders 2 and 5), oldest first
        self.turns: dict[SessionKey, int] = {}  # order 1: the next sequence to accept
        self.reading_bytes = self.reserved_bytes = 0  # of reads of files: bytes requested, and bytes reserved
        self.prompt = False  # whether the peer read its last answer promptly

    @property
    def feeds(self) -> set[int]:
        """The lanes that its publishers feed."""
        return self.lanes | {lane for lane, _ in self.sessions}

    @property
    def held_bytes(self) -> int:
        """Memory it occupies: answers, reservations for running reads, and unparsed requests."""
        return self.unread_bytes() + self.reserved_bytes + self._door.waiting_bytes

    @property
    def full(self) -> bool:
        """Whether its requests wait until it has read more."""
        return self._unread.full(self)

    @property
    def clogged(self) -> bool:
        """Whether it gets no further answer to a fetch until it has read more."""
        return self.unread_bytes() + self.reading_bytes > self._unread.send_queue_bytes // 8

    def _may_hold(self, unread: int, size: int) -> bool:
        self._unread.given(self, size)
        if not self.closing and unread > self._unread.send_queue_bytes:
            self.abort(TooMany("the client does not read its answers"))
            return False
        return True

    def grant(self, granted_bytes: int) -> None:
        """Grant credit: the client may send this many bytes in total."""
        self.credit.granted = granted_bytes
        self._send(credit_frame(granted_bytes))

    def go_on(self) -> None:
        """Resume the requests that waited until the client has read more."""
        self._door.go_on()

    def hang_up(self, error: EmbarcaderoError) -> None:
        """Send the error to the client, and end its connection."""
        self._door.hang_up(error)

    def abort(self, error: EmbarcaderoError) -> None:
        """End the connection without sending the error: the client does not read."""
        self._door.abort(error)
