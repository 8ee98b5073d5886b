"""One broker connection as the cores see it: credit, request numbers, and how long it has been silent.

A driver makes one Link per connection and shares it between all publishers and subscribers that use the connection.
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
    """What to do about a connection that owes us an answer."""

    FINE = "fine"
    ASK = "ask"  # quiet for a while: ping it, so that a live broker with nothing to tell is heard
    DEAD = "dead"  # quiet for too long in spite of the ping


class Link:
    """Shared state of one connection. `number` is the driver's name for it; a new connection gets a new number."""

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
        self.generation = generation  # of the cluster, by its broker's Welcome; 0: not known
        self.tables = False  # its broker reads tables of topics for clients
        self.references = False  # its broker takes batches by reference
        self.granted_bytes = 0
        self.sent_bytes = 0
        self.heard_us = now_us
        self.pinged_us = -1
        self._next_request = 1
        self._owners: dict[int, object] = {}

    def welcomed(self, welcome: Welcome) -> None:
        """The broker said what it can do."""
        self.generation, self.tables, self.references = welcome.generation, welcome.tables, welcome.references

    # --- credit: whole batch frames, counted since the connection began ---
    def room(self) -> int:
        """Bytes of batch frames that may be sent now."""
        return self.granted_bytes - self.sent_bytes

    def spend(self, size: int) -> None:
        """A batch frame of `size` bytes goes out."""
        invariant(size <= self.room(), "a batch frame fits the credit")
        self.sent_bytes += size

    def grant(self, total_bytes: int) -> None:
        """The broker granted `total_bytes` in all; telling it twice changes nothing."""
        self.granted_bytes = max(self.granted_bytes, total_bytes)

    # --- requests: answers go by their numbers to those who asked ---
    def ask(self, owner: object) -> int:
        """A fresh request number whose answer belongs to `owner`."""
        request = self._next_request
        self._next_request += 1
        self._owners[request] = owner
        return request

    def owner(self, request: int) -> object | None:
        """Whose answer this is; each request is answered once."""
        return self._owners.pop(request, None)

    def owners(self) -> list[object]:
        """All that still wait for an answer."""
        return list(self._owners.values())

    # --- silence ---
    def heard(self, now_us: int) -> None:
        """Something came in."""
        self.heard_us = max(self.heard_us, now_us)
        self.pinged_us = -1

    def pinged(self, now_us: int) -> None:
        """A ping goes out."""
        self.pinged_us = now_us

    def silence(self, since_us: int, now_us: int, limit_us: int) -> Silence:
        """How to judge the silence of a broker that has owed us an answer since `since_us`."""
        if now_us < self.silence_deadline(since_us, limit_us):
            return Silence.FINE
        return Silence.ASK if self.pinged_us < max(since_us, self.heard_us) else Silence.DEAD

    def silence_deadline(self, since_us: int, limit_us: int) -> int:
        """When `silence` may next say something new. Nobody is given up unasked, however late our timers run."""
        quiet_from = max(since_us, self.heard_us)
        if self.pinged_us < quiet_from:
            return quiet_from + limit_us // 2
        return self.pinged_us + limit_us - limit_us // 2


class RequestKey(NamedTuple):
    """A request by its connection and its number there."""

    conn: int
    request: int


class SoleRequest:
    """The one request of a reader that is under way, over any of its links; links take turns when one disappoints.

    A request whose link is gone is made again on another one.
    """

    def __init__(self, turn: int, silent_after_us: int) -> None:
        self.turn, self._silent_after_us = turn, silent_after_us
        self._links: dict[int, Link] = {}
        self.under_way: RequestKey | None = None
        self._since_us = 0
        self._from_us = 0  # the end of a back-off

    def connected(self, link: Link) -> None:
        """A connection is ready for use."""
        self._links[link.number] = link

    def disconnected(self, conn: int) -> None:
        """A connection is gone."""
        self._links.pop(conn, None)
        if self.under_way is not None and self.under_way.conn == conn:
            self.under_way = None

    def links(self) -> list[Link]:
        """All links."""
        return list(self._links.values())

    def heard(self, conn: int, now_us: int) -> None:
        """Something came in."""
        if (link := self._links.get(conn)) is not None:
            link.heard(now_us)

    # --- asking ---
    def may_begin(self, now_us: int) -> bool:
        """Whether a request can be made now."""
        return self.under_way is None and bool(self._links) and now_us >= self._from_us

    def next_link(self) -> Link:
        """The link whose turn it is."""
        links = self.links()
        return links[self.turn % len(links)]

    def begin(self, link: Link, owner: object, now_us: int) -> int:
        """A request of `owner` goes out: its number."""
        self.under_way, self._since_us = RequestKey(link.number, link.ask(owner)), now_us
        return self.under_way.request

    def answered_by(self, conn: int, request: int) -> bool:
        """Whether an answer is the one that is waited for."""
        return self.under_way == (conn, request)

    def end(self) -> None:
        """An answer that still comes changes nothing."""
        self.under_way = None

    def ask_elsewhere(self) -> None:
        """The next request goes to the next link."""
        self.turn += 1

    def back_off(self, until_us: int) -> None:
        """Wait, and ask the next link."""
        self._from_us = until_us
        self.ask_elsewhere()

    def begin_again(self) -> None:
        """Ask at once."""
        self._from_us = 0

    # --- time ---
    def overdue(self, now_us: int) -> tuple[Link, Silence] | None:
        """How to judge the silence of the link that owes the answer."""
        if self.under_way is None or (link := self._links.get(self.under_way.conn)) is None:
            return None
        return link, link.silence(self._since_us, now_us, self._silent_after_us)

    def on_timer(self, now_us: int) -> None:
        """Forget a back-off that is over."""
        if now_us >= self._from_us:
            self._from_us = 0

    @property
    def silence_us(self) -> int | None:
        """When `overdue` may next say something new."""
        if self.under_way is None or (link := self._links.get(self.under_way.conn)) is None:
            return None
        return link.silence_deadline(self._since_us, self._silent_after_us)

    @property
    def back_off_us(self) -> int | None:
        """When a back-off ends."""
        return self._from_us or None


class ClientCore:
    """A state machine without I/O: a publisher, or a reader of one lane or of several. Connections hand it what comes.

    What a driver is to do is taken from it: frames to write, connections to drop, the time of the next timer.
    """

    def __init__(self) -> None:
        self._output: dict[int, list[Any]] = {}
        self._abandoned: list[int] = []

    def take_output(self) -> list[tuple[int, list[Any]]]:
        """Frames to write, by connection."""
        output, self._output = self._output, {}
        return list(output.items())

    def take_abandoned(self) -> list[int]:
        """Connections given up: the driver drops them and connects again, under new numbers."""
        abandoned, self._abandoned = self._abandoned, []
        return abandoned

    def _write(self, conn: int, buffer: Any) -> None:
        self._output.setdefault(conn, []).append(buffer)

    def _judge(self, link: Link, silence: Silence, owner: object, now_us: int) -> None:
        """Ping a broker that owes an answer and is quiet; give up one that is quiet in spite of that."""
        if silence is Silence.ASK:
            link.pinged(now_us)
            self._write(link.number, control_frame(Ping(), link.ask(owner)))
        elif silence is Silence.DEAD:
            self._abandoned.append(link.number)
            self.on_disconnected(link.number, now_us)

    def on_connected(self, link: Link, now_us: int) -> None:
        """A connection is ready for use."""

    def on_disconnected(self, conn: int, now_us: int) -> None:
        """A connection is gone."""

    def on_control(self, conn: int, request: int, message: AnyMessage, now_us: int) -> None:
        """An answer to a request."""

    def on_timer(self, now_us: int) -> None:
        """Do what is due; calling it early is harmless."""

    def next_timer_us(self) -> int | None:
        """When `on_timer` has something to do, unless something else happens before."""


class FetchCore(ClientCore):
    """A core that fetches."""

    def on_fetched(self, conn: int, event: FetchedReceived, now_us: int) -> None:
        """The answer to a Fetch."""


class PublishCore(ClientCore):
    """A core that publishes, in a session of a lane."""

    @property
    def key(self) -> SessionKey:
        """The session that acks name."""
        return SessionKey(-1, NO_SESSION)

    def on_acks(self, conn: int, acks: npt.NDArray[np.void], now_us: int) -> None:
        """Outcomes of batches."""

    def on_credit(self, conn: int, total_bytes: int, now_us: int) -> None:
        """The broker granted bytes, of all publishers on the connection."""

    def on_full(self, conn: int, now_us: int, full: FullReceived) -> None:
        """The broker has had no room for long."""
