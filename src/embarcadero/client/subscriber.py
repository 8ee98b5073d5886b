"""The subscriber, sans I/O: it asks brokers for what comes next in a lane and hands on checked batches, in order.

Theory of operation. One Fetch is under way at a time; the next one goes out as soon as its answer is here, unless the
buffer is full, so a reader that keeps up never waits for a round trip. Any broker serves any read: when a link goes,
or is silent, the same index is asked for elsewhere. An answer counts only if it goes on exactly where the last one
ended: indices grow, record numbers have no holes but typed gaps, and every payload fits its CRC (which is computed
when the batch is taken, while the broker sends what follows). Anything else is asked for once more, from another
broker, and then is an error; a wrong batch is never handed on (P4, P7). After a loss
of the whole fabric a reader goes on at its index: a LOST gap leads to where the lane goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from embarcadero.client.batch import Batch, OrderEntry
from embarcadero.client.link import Link, Silence
from embarcadero.errors import (
    BadFrame,
    BadValue,
    ChecksumMismatch,
    Corrupt,
    EmbarcaderoError,
    FuturePosition,
    OutcomeUnknown,
    ProtocolError,
    Retriable,
    TooMany,
    from_wire,
)
from embarcadero.limits import FETCH_BYTES_DEFAULT, FETCH_WAIT_MS_DEFAULT, PREFETCH_FETCHES
from embarcadero.types import EntryKind, Gap, GapKind
from embarcadero.wire.codec import control_frame, payload_crc
from embarcadero.wire.messages import AnyMessage, Failed, Fetch, Ping
from embarcadero.wire.receiver import FetchedReceived
from embarcadero.wire.schemas import RAW, TopicSchemas

_BACKOFF_FIRST_US = 5_000
_BACKOFF_LAST_US = 500_000


class SubscriberCore:
    """One reader of one lane."""

    def __init__(
        self,
        *,
        lane: int,
        by: str = "index",
        start: int = 0,
        partitions: list[int] | None = None,
        read: str = "durable",
        silent_after_us: int,
        wait_ms: int = FETCH_WAIT_MS_DEFAULT,
        max_bytes: int = FETCH_BYTES_DEFAULT,
        prefetch: int = PREFETCH_FETCHES,
        brokers: Mapping[int, int] | None = None,
        turn: int = 0,
        schemas: TopicSchemas = RAW,
        owner: object | None = None,  # whom answers belong to, if not to this core itself
    ) -> None:
        self._owner = self if owner is None else owner
        self.ended = False  # the lane is closed, and its end was handed on
        self.lane, self._partitions, self._read = lane, partitions, read
        self._silent_after_us, self._wait_ms, self._max_bytes = silent_after_us, wait_ms, max_bytes
        self._prefetch = prefetch
        self._brokers = {} if brokers is None else brokers  # region handle -> broker
        self._schemas = schemas  # by which batches are read
        self.failed: EmbarcaderoError | None = None
        self._links: dict[int, Link] = {}
        self._turn = turn  # which link to ask; moves on when one disappoints
        self._asked: tuple[int, int] | None = None  # connection and request of the Fetch under way
        self._asked_us = 0
        self._ask_from_us = 0
        self._disappointments = 0
        self._suspected: tuple[str, int] | None = None  # the place for which an answer could not be right
        self._ready: deque[Batch] = deque()
        self._sums: deque[int | None] = deque()  # CRCs that the payloads of those must have
        self._ready_bytes = 0
        self._output: dict[int, list[Any]] = {}
        self._abandoned: list[int] = []
        self._by, self._next = by, start
        self._led = False  # the cluster itself has led us to `_next`
        self.paused = False
        self._next_seq: int | None = None  # seq at which the next batch must begin, where that is known

    # --- what the driver asks for ---
    @property
    def position(self) -> int | None:
        """Index of the next batch to be taken; None while the cluster has not yet said where we are."""
        if self._ready:
            return self._ready[0].index
        return self._next if self._by == "index" else None

    @property
    def ready(self) -> int:
        """How many batches (and gaps) can be taken now."""
        return len(self._ready)

    def take_batches(self, most: int, now_us: int) -> list[Batch]:
        """Up to `most` batches (and gaps) in order. When it gives none, `failed` tells whether there will be more."""
        taken: list[Batch] = []
        while self._ready and len(taken) < most:
            batch, crc = self._ready[0], self._sums[0]
            if crc is not None and payload_crc(batch.payload) != crc:
                self._damaged(batch)
                break
            taken.append(batch)
            self._ready.popleft()
            self._sums.popleft()
            self._ready_bytes -= batch.size
        self._pump(now_us)
        return taken

    def _damaged(self, batch: Batch) -> None:
        """A payload is wrong: what was fetched from there on is asked for once more."""
        self._drop_ready()
        self._by, self._next, self._next_seq, self.ended = "index", batch.index, batch.seq, False
        self._suspect(
            ChecksumMismatch(
                f"the payload at index {batch.index} of lane {self.lane} is damaged",
                "it was asked for twice; seek past it to go on",
            )
        )

    def _drop_ready(self) -> None:
        """Drop what was fetched, and what is on its way."""
        self._ready.clear()
        self._sums.clear()
        self._ready_bytes = 0
        self._asked = None

    def positions(self) -> dict[int, int | None]:
        """By lane: index of the next batch to be taken."""
        return {self.lane: self.position}

    def seek(self, by: str, value: int, now_us: int, lane: int | None = None) -> None:
        """Go on elsewhere: by "index", "seq", "time", "earliest" or "latest". What was fetched ahead is dropped."""
        if lane not in (None, self.lane):
            raise BadValue(f"lane {lane} is not a lane of this topic", f"its lane is {self.lane}")
        self.ended = False
        self._by, self._next, self._next_seq, self._led = by, value, None, False
        self._drop_ready()
        self._ask_from_us = self._disappointments = 0
        self.failed = self._suspected = None
        self._pump(now_us)

    def pause(self) -> None:
        """Ask for nothing more. What is on its way is kept for later."""
        self.paused = True

    def resume(self, now_us: int) -> None:
        """Go on where we paused."""
        self.paused = False
        self._pump(now_us)

    def take_output(self) -> list[tuple[int, list[Any]]]:
        """Frames to write, by connection."""
        output, self._output = self._output, {}
        return list(output.items())

    def take_abandoned(self) -> list[int]:
        """Connections given up: the driver drops them and connects again, under new numbers."""
        abandoned, self._abandoned = self._abandoned, []
        return abandoned

    # --- what the connections tell ---
    def on_connected(self, link: Link, now_us: int) -> None:
        """A connection is ready for use."""
        self._links[link.number] = link
        self._pump(now_us)

    def on_disconnected(self, conn: int, now_us: int) -> None:
        """A connection is gone; its answer is asked for elsewhere."""
        self._links.pop(conn, None)
        self._output.pop(conn, None)
        if self._asked is not None and self._asked[0] == conn:
            self._asked = None
        self._pump(now_us)

    def on_control(self, conn: int, request: int, message: AnyMessage, now_us: int) -> None:
        """A Failed for our Fetch, or a Pong."""
        if (link := self._links.get(conn)) is not None:
            link.heard(now_us)
        if self._asked != (conn, request) or not isinstance(message, Failed):
            return
        self._asked = None
        error = from_wire(message.code, message.message, message.hint)
        recovering = isinstance(error, FuturePosition) and self._led  # we were there: it has to be found again
        if isinstance(error, Retriable | OutcomeUnknown | TooMany) or recovering:
            self._disappointed(now_us)
        elif isinstance(error, Corrupt):
            self._suspect(error)
        else:
            self.failed = error
        self._pump(now_us)

    def on_fetched(self, conn: int, event: FetchedReceived, now_us: int) -> None:
        """The answer to a Fetch; one that we no longer wait for is ignored."""
        if (link := self._links.get(conn)) is not None:
            link.heard(now_us)
        if self._asked != (conn, event.request):
            return
        self._asked = None
        try:
            self._take(event)
            self._disappointments = 0
            if not event.payloads:
                self._suspected = None
        except (Corrupt, ProtocolError) as error:
            self._suspect(error)
        self._pump(now_us)

    # --- time ---
    def on_timer(self, now_us: int) -> None:
        """Do what is due; calling it early is harmless."""
        if self._asked is not None and (link := self._links.get(self._asked[0])) is not None:
            silence = link.silence(self._asked_us, now_us, self._silent_after_us)
            if silence is Silence.ASK:
                link.pinged(now_us)
                self._write(link.number, control_frame(Ping(), link.ask(self._owner)))
            elif silence is Silence.DEAD:
                self._abandoned.append(link.number)
                self.on_disconnected(link.number, now_us)
        if now_us >= self._ask_from_us:
            self._ask_from_us = 0
        self._pump(now_us)

    def next_timer_us(self) -> int | None:
        """When `on_timer` has something to do, unless something else happens before."""
        if self._asked is not None and (link := self._links.get(self._asked[0])) is not None:
            return link.silence_deadline(self._asked_us, self._silent_after_us)
        return self._ask_from_us or None

    # --- asking ---
    def _pump(self, now_us: int) -> None:
        """Ask for more unless that is under way, or there is enough, or asking makes no sense."""
        enough = self._ready_bytes > (self._prefetch - 1) * self._max_bytes
        if self._asked is not None or enough or self.ended or not self._links:
            return
        if self.failed is not None or self.paused or now_us < self._ask_from_us:
            return
        links = list(self._links.values())
        link = links[self._turn % len(links)]
        # "latest" is asked without waiting: it is then an index, and a lost link can't make it a later one
        wait_ms = 0 if self._by == "latest" else self._wait_ms
        ask = Fetch(
            lane=self.lane, by=self._by, start=self._next, max_bytes=self._max_bytes, wait_ms=wait_ms,
            partitions=self._partitions, read=self._read,
        )  # fmt: skip
        request = link.ask(self._owner)
        self._asked, self._asked_us = (link.number, request), now_us
        self._write(link.number, control_frame(ask, request))

    def _disappointed(self, now_us: int) -> None:
        """This broker can't answer now: wait a little longer each time, and ask the next one."""
        wait_us = min(_BACKOFF_LAST_US, _BACKOFF_FIRST_US << min(self._disappointments, 16))
        self._disappointments += 1
        self._ask_from_us = now_us + wait_us
        self._turn += 1

    def _suspect(self, error: EmbarcaderoError) -> None:
        """An answer that can't be right is asked for once more, from another broker; then it is an error."""
        self._turn += 1
        place = (self._by, self._next)
        if self._suspected == place:
            self.failed = error
        self._suspected = place

    def _write(self, conn: int, buffer: Any) -> None:
        self._output.setdefault(conn, []).append(buffer)

    # --- checking ---
    def _take(self, event: FetchedReceived) -> None:
        """Hand on what goes on from where we are. On an error, what came before it has been handed on."""
        if event.gap is not None:
            self._take_gap(event.gap)
        for fields, payload in zip(event.entries.tolist(), event.payloads, strict=True):
            entry = OrderEntry._make(fields)
            self._check(entry)
            crc = entry.crc if entry.kind == EntryKind.BATCH else None
            self._put(Batch.of_entry(self.lane, entry, payload, self._brokers, self._schemas), crc)
            self._by, self._next, self._next_seq = "index", entry.index + 1, entry.seq + entry.count
        if self._by == "index" and event.next_index < self._next:
            raise BadFrame(f"a broker goes back from index {self._next} to {event.next_index}", "report it: a bug")
        if self._by == "time" and event.next_index == event.tail_index:
            return  # that time has not come in this log: ask for it again, so that nothing older slips in
        self._by, self._next, self._led = "index", event.next_index, True

    def _take_gap(self, gap: Gap) -> None:
        """A typed hole. One that begins below our place tells that what was read there is lost."""
        filtered = self._partitions is not None  # then, what is before the gap may be left out
        jumps = gap.start > self._next and not filtered and gap.kind is not GapKind.LOST  # or be entries of sessions
        if self._by == "index" and (jumps or (gap.start < self._next and not self._may_lose(gap))):
            raise BadFrame(f"a gap at index {gap.start} where {self._next} comes next", "report it: this is a bug")
        self._put(Batch.of_gap(self.lane, gap, self._next_seq if gap.start == self._next else None))
        self.ended = gap.kind is GapKind.END_OF_LANE
        self._by, self._next, self._next_seq = "index", gap.stop, None

    def _may_lose(self, gap: Gap) -> bool:
        """Whether what is below our place may be gone: what is ordered and not durable goes with the fabric."""
        if gap.kind is GapKind.LOST:
            return gap.stop > self._next
        return gap.kind is GapKind.END_OF_LANE and self._read == "ordered"

    def _check(self, entry: OrderEntry) -> None:
        if self._by == "index" and entry.index < self._next:
            raise BadFrame(f"index {entry.index} was served where {self._next} comes next", "report it: this is a bug")
        if self._partitions is None and self._next_seq is not None and entry.seq != self._next_seq:
            raise BadFrame(
                f"index {entry.index} begins at seq {entry.seq} where {self._next_seq} comes next",
                "report it: this is a bug",
            )

    def _put(self, batch: Batch, crc: int | None = None) -> None:
        self._ready.append(batch)
        self._sums.append(crc)
        self._ready_bytes += batch.size
