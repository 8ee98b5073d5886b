"""The link: a broker connection as the cores see it, with credit, request numbers and silence.

A driver creates one Link per connection. All publishers and subscribers on the connection share it.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from embarcadero.errors import invariant
from embarcadero.types import NO_SESSION, SessionKey
from embarcadero.wire.codec import FetchedReceived, FullReceived, control_frame
from embarcadero.wire.messages import AnyMessage, Ping, Welcome


class Silence(Enum):
    """The judgement of a connection that owes an answer."""

    FINE = "fine"
    ASK = "ask"  # silent for a while: ping it, because a live broker may have nothing to send
    DEAD = "dead"  # silent for too long, also after the ping


class Link:
    """Shared state of one connection. `number` identifies it; a new connection gets a new number."""

    __slots__ = (
        "_next_request",
        "_owners",
        "generation",
        "granted_bytes",
        "heard_us",
        "number",
        "pinged_us",
        "references",
        "sent_bytes",
        "tables",
    )

    def __init__(self, number: int, now_us: int, generation: int = 0) -> None:
        self.number = number
        self.generation = generation  # of the cluster, from the broker's Welcome; 0: not known
        self.tables = False  # the broker reads tables of topics for clients
        self.references = False  # the broker accepts batches by reference
        self.granted_bytes = 0
        self.sent_bytes = 0
        self.heard_us = now_us
        self.pinged_us = -1
        self._next_request = 1
        self._owners: dict[int, object] = {}

    def welcomed(self, welcome: Welcome) -> None:
        """Take the generation and the abilities of the broker from its Welcome."""
        self.generation, self.tables, self.references = welcome.generation, welcome.tables, welcome.references

    # --- credit: whole batch frames, counted from the start of the connection ---
    def room(self) -> int:
        """Bytes of batch frames that may be sent now."""
        return self.granted_bytes - self.sent_bytes

    def spend(self, size: int) -> None:
        """Use credit for a batch frame of `size` bytes."""
        invariant(size <= self.room(), "a batch frame fits the credit")
        self.sent_bytes += size

    def grant(self, total_bytes: int) -> None:
        """Note that the broker has granted `total_bytes` in total. A repeated grant changes nothing."""
        self.granted_bytes = max(self.granted_bytes, total_bytes)

    # --- requests: the number of an answer leads to the owner of the request ---
    def ask(self, owner: object) -> int:
        """Return a new request number. The answer belongs to `owner`."""
        request = self._next_request
        self._next_request += 1
        self._owners[request] = owner
        return request

    def owner(self, request: int) -> object | None:
        """Take the owner of an answer. Each request has one answer."""
        return self._owners.pop(request, None)

    def owners(self) -> list[object]:
        """Return the owners of all open requests."""
        return list(self._owners.values())

    # --- silence ---
    def heard(self, now_us: int) -> None:
        """Note that bytes arrived."""
        self.heard_us = max(self.heard_us, now_us)
        self.pinged_us = -1

    def pinged(self, now_us: int) -> None:
        """Note that a ping is sent."""
        self.pinged_us = now_us

    def silence(self, since_us: int, now_us: int, limit_us: int) -> Silence:
        """Judge the silence of a broker that has owed an answer since `since_us`."""
        if now_us < self.silence_deadline(since_us, limit_us):
            return Silence.FINE
        return Silence.ASK if self.pinged_us < max(since_us, self.heard_us) else Silence.DEAD

    def silence_deadline(self, since_us: int, limit_us: int) -> int:
        """Return when the result of `silence` may change. A ping precedes every DEAD, even if timers run late."""
        quiet_from = max(since_us, self.heard_us)
        if self.pinged_us < quiet_from:
            return quiet_from + limit_us // 2
        return self.pinged_us + limit_us - limit_us // 2


class RequestKey(NamedTuple):
    """A request: its connection and its number there."""

    conn: int
    request: int


class SoleRequest:
    """The one open request of a reader, over any of its links. After a failure the next link is used.

    When a link is lost, its request is sent again on another link.
    """

    def __init__(self, turn: int, silent_after_us: int) -> None:
        self.turn, self._silent_after_us = turn, silent_after_us
        self._links: dict[int, Link] = {}
        self.under_way: RequestKey | None = None
        self._since_us = 0
        self._from_us = 0  # the end of a back-off

    def connected(self, link: Link) -> None:
        """Add a connection that is ready for use."""
        self._links[link.number] = link

    def disconnected(self, conn: int) -> None:
        """Remove a lost connection."""
        self._links.pop(conn, None)
        if self.under_way is not None and self.under_way.conn == conn:
            self.under_way = None

    def links(self) -> list[Link]:
        """Return all links."""
        return list(self._links.values())

    def heard(self, conn: int, now_us: int) -> None:
        """Note that bytes arrived."""
        if (link := self._links.get(conn)) is not None:
            link.heard(now_us)

    # --- asking ---
    def may_begin(self, now_us: int) -> bool:
        """Whether a request can be sent now."""
        return self.under_way is None and bool(self._links) and now_us >= self._from_us

    def next_link(self) -> Link:
        """Return the link for the next request."""
        links = self.links()
        return links[self.turn % len(links)]

    def begin(self, link: Link, owner: object, now_us: int) -> int:
        """Note that a request of `owner` is sent, and return its number."""
        self.under_way, self._since_us = RequestKey(link.number, link.ask(owner)), now_us
        return self.under_way.request

    def answered_by(self, conn: int, request: int) -> bool:
        """Whether this answers the open request."""
        return self.under_way == (conn, request)

    def end(self) -> None:
        """Close the request. A later answer is ignored."""
        self.under_way = None

    def ask_elsewhere(self) -> None:
        """Use the next link for the next request."""
        self.turn += 1

    def back_off(self, until_us: int) -> None:
        """Wait, then use the next link."""
        self._from_us = until_us
        self.ask_elsewhere()

    def begin_again(self) -> None:
        """End the back-off: ask immediately."""
        self._from_us = 0

    # --- time ---
    def overdue(self, now_us: int) -> tuple[Link, Silence] | None:
        """Judge the silence of the link that owes the answer."""
        if self.under_way is None or (link := self._links.get(self.under_way.conn)) is None:
            return None
        return link, link.silence(self._since_us, now_us, self._silent_after_us)

    def on_timer(self, now_us: int) -> None:
        """Clear a back-off that has ended."""
        if now_us >= self._from_us:
            self._from_us = 0

    @property
    def silence_us(self) -> int | None:
        """When the result of `overdue` may change."""
        if self.under_way is None or (link := self._links.get(self.under_way.conn)) is None:
            return None
        return link.silence_deadline(self._since_us, self._silent_after_us)

    @property
    def back_off_us(self) -> int | None:
        """When a back-off ends."""
        return self._from_us or None


class ClientCore:
    """A state machine without I/O: a publisher, or a reader of one or more lanes. Connections pass events to it.

    A driver takes its output: frames to write, connections to drop, and the time of the next timer.
    """

    def __init__(self) -> None:
        self._output: dict[int, list[Any]] = {}
        self._abandoned: list[int] = []

    def take_output(self) -> list[tuple[int, list[Any]]]:
        """Take the frames to write, by connection."""
        output, self._output = self._output, {}
        return list(output.items())

    def take_abandoned(self) -> list[int]:
        """Take the abandoned connections: the driver drops them and connects again, with new numbers."""
        abandoned, self._abandoned = self._abandoned, []
        return abandoned

    def _write(self, conn: int, buffer: Any) -> None:
        self._output.setdefault(conn, []).append(buffer)

    def _judge(self, link: Link, silence: Silence, owner: object, now_us: int) -> None:
        """Ping a silent broker that owes an answer. Abandon its connection if it stays silent."""
        if silence is Silence.ASK:
            link.pinged(now_us)
            self._write(link.number, control_frame(Ping(), link.ask(owner)))
        elif silence is Silence.DEAD:
            self._abandoned.append(link.number)
            self.on_disconnected(link.number, now_us)

    def on_connected(self, link: Link, now_us: int) -> None:
        """A connection is ready for use."""

    def on_disconnected(self, conn: int, now_us: int) -> None:
        """A connection was lost."""

    def on_control(self, conn: int, request: int, message: AnyMessage, now_us: int) -> None:
        """A request was answered."""

    def on_timer(self, now_us: int) -> None:
        """Do everything that is due. An early call does nothing."""

    def next_timer_us(self) -> int | None:
        """Return when `on_timer` must run, if no other event comes first."""


class FetchCore(ClientCore):
    """A core that fetches."""

    def on_fetched(self, conn: int, event: FetchedReceived, now_us: int) -> None:
        """A Fetch was answered."""


class PublishCore(ClientCore):
    """A core that publishes, in a session of a lane."""

    @property
    def key(self) -> SessionKey:
        """The lane and session in the acks of this publisher."""
        return SessionKey(-1, NO_SESSION)

    def on_acks(self, conn: int, acks: npt.NDArray[np.void], now_us: int) -> None:
        """Outcomes of batches arrived."""

    def on_credit(self, conn: int, total_bytes: int, now_us: int) -> None:
        """The broker granted bytes, for all publishers on the connection."""

    def on_full(self, conn: int, now_us: int, full: FullReceived) -> None:
        """The broker or a lane has been full for too long."""
