"""The subscriber, sans I/O: it asks brokers for what comes next in a lane and hands on checked batches, in order.

Theory of operation. One Fetch is under way at a time; the next one goes out as soon as its answer is here, unless the
buffer is full, so a reader that keeps up never waits for a round trip. Any broker serves any read: when a link goes,
or is silent, the same index is asked for elsewhere. An answer counts only if it goes on exactly where the last one
ended: indices grow, record numbers have no holes but typed gaps, and every payload fits its CRC (which is computed
when the batch is taken, while the broker sends what follows). Anything else is asked for once more, from another
broker, and then is an error; a wrong batch is never handed on (P4, P7). After a loss
of the whole fabric a reader goes on at its index: a LOST gap leads to where the lane goes on.

A topic on disks may have a table as well. A broker that offers it (Welcome.tables) reads the table for its clients:
its answer is like any other. Of other brokers, what they say is TRIMMED is looked for in the table by this client
itself (`take_cold`): the driver reads the table as the store knows it after the brokers said so. Brokers drop only what
is in the table, so each position comes once; what the table does not have either stays a gap.

A store that can't be reached is tried again, by both ways in turn and with growing pauses, for `TABLE_RETRY_S` since
the first question that failed was asked. Then `failed` is a TierUnavailable, and `retry` begins anew: the position is
kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from embarcadero.client.link import FetchCore, Link, Silence
from embarcadero.client.results import Batch, OrderEntry
from embarcadero.errors import (
    BadFrame,
    BadTable,
    BadValue,
    ChecksumMismatch,
    Corrupt,
    EmbarcaderoError,
    FuturePosition,
    NotAvailable,
    OutcomeUnknown,
    ProtocolError,
    Retriable,
    TierUnavailable,
    TooMany,
    from_wire,
)
from embarcadero.limits import (
    FETCH_BYTES_DEFAULT,
    FETCH_ENTRIES_MAX,
    FETCH_WAIT_MS_DEFAULT,
    PREFETCH_FETCHES,
    TABLE_RETRY_S,
)
from embarcadero.types import FROM_TABLE, EntryKind, Gap, GapKind
from embarcadero.wire.codec import control_frame, payload_crc
from embarcadero.wire.messages import AnyMessage, Failed, Fetch, Ping
from embarcadero.wire.receiver import FetchedReceived
from embarcadero.wire.schemas import RAW, TopicSchemas

_BACKOFF_FIRST_US = 5_000
_BACKOFF_LAST_US = 500_000
_TABLE_BACKOFF_FIRST_US = 100_000
_TABLE_BACKOFF_LAST_US = 1_000_000
_TABLE_TRIES_MIN = 2  # by a broker, and by this client itself
_LOSSES = frozenset({GapKind.LOST, GapKind.NEVER_DURABLE})
_AHEAD_MAX = 2 * FETCH_ENTRIES_MAX
"""Batches and gaps that are fetched ahead: those without a payload are bounded, too."""


@dataclass(slots=True, eq=False)
class ColdAsk:
    """What a reader of a lane wants of the topic's table: the batches of a span, or where a place is."""

    core: SubscriberCore
    lane: int
    by: str  # span | earliest | seq | time
    start: int
    stop: int
    partitions: list[int] | None
    control: bool
    schemas: TopicSchemas
    durable: bool


class SubscriberCore(FetchCore):
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
        control: bool = False,  # entries of sessions are handed on too
        stop: int | None = None,  # nothing from this index on is asked for
        table: bool = False,  # the topic may have a table: what brokers have no longer is looked for there
        tiered: bool = False,  # it has one: places are, too
    ) -> None:
        super().__init__()
        self._control, self._stop = control, stop
        self._table, self._resolve = table, tiered
        self._cold: ColdAsk | None = None  # what the table is asked for
        self._cold_taken = False  # the driver knows
        self.trouble: EmbarcaderoError | None = None  # why the table did not answer when it was last asked
        self._offered = False  # the broker that was connected last reads tables for its clients
        self._direct = False  # this client reads the table itself, although brokers would
        self._through_broker = False  # the Fetch under way asks for records of the table, too
        self._broker_trouble: EmbarcaderoError | None = None  # why a broker could not read the table
        self._table_failures, self._table_failing_us = 0, 0  # in a row, and since when
        self._table_asked_us: int | None = None  # when the table was asked; None: it has answered since
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
        self._by, self._next = by, start
        self._taken = start if by == "index" else 0  # everything below was taken, or is not wanted
        self._led = False  # the cluster itself has led us to `_next`
        self.paused = False
        self._next_seq: int | None = None  # seq at which the next batch must begin, where that is known

    # --- what the driver asks for ---
    @property
    def position(self) -> int | None:
        """Index of the next batch to be taken; None while the cluster has not yet said where we are."""
        if self._ready:
            return max(self._taken, self._ready[0].index)  # a gap may begin below what was taken: that is lost
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
            hole = batch.gap if batch.kind is None else None
            self._taken = batch.index + 1 if hole is None else hole.stop
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
        self._asked = self._cold = None

    def positions(self) -> dict[int, int | None]:
        """By lane: index of the next batch to be taken."""
        return {self.lane: self.position}

    def seek(self, by: str, value: int, now_us: int, lane: int | None = None) -> None:
        """Go on elsewhere: by "index", "seq", "time", "earliest" or "latest". What was fetched ahead is dropped."""
        if lane not in (None, self.lane):
            raise BadValue(f"lane {lane} is not a lane of this topic", f"its lane is {self.lane}")
        self.ended = False
        self._resolve = self._table
        self._by, self._next, self._next_seq, self._led = by, value, None, False
        self._taken = value if by == "index" else 0
        self._drop_ready()
        self._ask_from_us = self._disappointments = self._table_failures = 0
        self.failed = self._suspected = None
        self._pump(now_us)

    def pause(self) -> None:
        """Ask for nothing more. What is on its way is kept for later."""
        self.paused = True

    def resume(self, now_us: int) -> None:
        """Go on where we paused."""
        self.paused = False
        self._pump(now_us)

    # --- what the connections tell ---
    def on_connected(self, link: Link, now_us: int) -> None:
        """A connection is ready for use."""
        self._links[link.number] = link
        self._offered = link.tables
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
        if self._through_broker and isinstance(error, TierUnavailable | BadTable | NotAvailable):
            self._broker_trouble, self._direct = error, True
            self._table_failed(error, now_us)
        elif isinstance(error, Retriable | OutcomeUnknown | TooMany) or recovering:
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
            if self._cold is None and (self._through_broker or event.payloads):  # read, or not needed any more
                self._table_works()
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
        if (deadline_us := self._table_deadline_us) is not None and now_us >= deadline_us:
            self._asked, self.failed = None, self.trouble
        if now_us >= self._ask_from_us:
            self._ask_from_us = 0
        self._pump(now_us)

    def next_timer_us(self) -> int | None:
        """When `on_timer` has something to do, unless something else happens before."""
        if self._asked is not None and (link := self._links.get(self._asked[0])) is not None:
            silence_us = link.silence_deadline(self._asked_us, self._silent_after_us)
            return min(silence_us, self._table_deadline_us or silence_us)
        return self._ask_from_us or None

    @property
    def _table_deadline_us(self) -> int | None:
        """How long a broker that reads the table is waited for, once the store could not be reached. None: any time."""
        if self._asked is None or not self._through_broker or not self._table_failures:
            return None
        away = isinstance(self.trouble, TierUnavailable)
        return self._table_failing_us + int(TABLE_RETRY_S * 1e6) if away else None

    # --- asking ---
    def _pump(self, now_us: int) -> None:
        """Ask for more unless that is under way, or there is enough, or asking makes no sense."""
        if self._asked is not None or self._cold is not None or not self.has_room or self.ended or not self._links:
            return
        if self.failed is not None or self.paused or now_us < self._ask_from_us or self._at_stop:
            return
        self._table_asked_us = now_us
        if self._resolve and self._by not in ("index", "latest"):
            self._ask_table(self._by, self._next, 0)
            return
        links = list(self._links.values())
        link = links[self._turn % len(links)]
        # "latest" is asked without waiting: it is then an index, and a lost link can't make it a later one
        wait_ms = 0 if self._by == "latest" else self._wait_ms
        self._through_broker = self._table and link.tables and not self._direct
        ask = Fetch(
            lane=self.lane,
            by=self._by,
            start=self._next,
            max_bytes=self._max_bytes,
            wait_ms=wait_ms,
            partitions=self._partitions,
            read=self._read,
            control=self._control,
            stop=self._stop,
            table=self._through_broker,
            never_durable=True,
        )
        request = link.ask(self._owner)
        self._asked, self._asked_us = (link.number, request), now_us
        self._write(link.number, control_frame(ask, request))

    @property
    def has_room(self) -> bool:
        """Whether there is less ahead than there may be."""
        return self._ready_bytes <= (self._prefetch - 1) * self._max_bytes and len(self._ready) < _AHEAD_MAX

    @property
    def _at_stop(self) -> bool:
        return self._stop is not None and self._by == "index" and self._next >= self._stop

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

    # --- checking ---
    def _take(self, event: FetchedReceived) -> None:
        """Hand on what goes on from where we are. On an error, what came before it has been handed on."""
        if event.gap is not None:
            self._take_gap(event.gap)
        for fields, payload in zip(event.entries.tolist(), event.payloads, strict=True):
            entry = OrderEntry._make(fields)
            self._check(entry)
            crc = entry.crc if entry.kind == EntryKind.BATCH else None
            if entry.flags & FROM_TABLE and crc is not None:
                entry = entry._replace(crc=entry.location, location=0, flags=entry.flags & ~FROM_TABLE)
            self._put(Batch.of_entry(self.lane, entry, payload, self._brokers, self._schemas), crc)
            self._by, self._next, self._next_seq = "index", entry.index + 1, entry.seq + entry.count
        if self._cold is not None:
            return  # it goes on behind what the table has
        if self._by == "index" and event.next_index < self._next:
            raise BadFrame(f"a broker goes back from index {self._next} to {event.next_index}", "report it: a bug")
        if self._by == "time" and event.next_index == event.tail_index:
            return  # that time has not come in this log: ask for it again, so that nothing older slips in
        self._by, self._next, self._led = "index", event.next_index, True

    def _take_gap(self, gap: Gap) -> None:
        """A typed hole. One that begins below our place tells that what was read there is lost."""
        filtered = self._partitions is not None  # then, what is before the gap may be left out
        jumps = gap.start > self._next and not filtered and gap.kind not in _LOSSES  # or be entries of sessions
        if self._by == "index" and (jumps or (gap.start < self._next and not self._may_lose(gap))):
            raise BadFrame(f"a gap at index {gap.start} where {self._next} comes next", "report it: this is a bug")
        if gap.kind is GapKind.TRIMMED and self._table and not self._through_broker:
            if self._by != "index" or gap.start != self._next:
                self._next_seq = None
            self._by, self._next, self._led = "index", gap.start, True
            self._ask_table("span", gap.start, gap.stop if self._stop is None else min(gap.stop, self._stop))
            return
        self._put(Batch.of_gap(self.lane, gap, self._next_seq if gap.start == self._next else None))
        self.ended = gap.kind is GapKind.END_OF_LANE
        self._by, self._next, self._next_seq = "index", gap.stop, None

    def _may_lose(self, gap: Gap) -> bool:
        """Whether what is below our place may be gone: what is ordered and not durable goes with the fabric."""
        if gap.kind in _LOSSES:
            return gap.stop > self._next
        return gap.kind is GapKind.END_OF_LANE and self._read == "ordered"

    def _check(self, entry: OrderEntry) -> None:
        if entry.kind != EntryKind.BATCH and (entry.count or entry.size):
            raise BadFrame(f"entry {entry.index} of kind {entry.kind} has records", "only batches have: report it")
        if self._by == "index" and entry.index < self._next:
            raise BadFrame(f"index {entry.index} was served where {self._next} comes next", "report it: this is a bug")
        if self._control and self._partitions is None and self._by == "index" and entry.index > self._next:
            raise BadFrame(f"index {entry.index} was served, {self._next} was left out", "report it: this is a bug")
        if self._partitions is None and self._next_seq is not None and entry.seq != self._next_seq:
            raise BadFrame(
                f"index {entry.index} begins at seq {entry.seq} where {self._next_seq} comes next",
                "report it: this is a bug",
            )

    def _put(self, batch: Batch, crc: int | None = None) -> None:
        self._ready.append(batch)
        self._sums.append(crc)
        self._ready_bytes += batch.size

    # --- the topic's table ---
    def _ask_table(self, by: str, start: int, stop: int) -> None:
        durable = self._read == "durable"
        self._cold = ColdAsk(self, self.lane, by, start, stop, self._partitions, self._control, self._schemas, durable)
        self._cold_taken = False

    def take_cold(self) -> list[ColdAsk]:
        """What is to be asked of the table, once."""
        if self._cold is None or self._cold_taken:
            return []
        self._cold_taken = True
        return [self._cold]

    def wants(self, ask: ColdAsk) -> bool:
        """Whether an answer is still waited for."""
        return self._cold is ask

    def on_place(self, ask: ColdAsk, index: int | None, now_us: int) -> None:
        """Where the place is that was asked for; None: brokers know better."""
        if self._cold is not ask:
            return
        self._cold, self._resolve = None, False
        if index is not None:
            self._by, self._next, self._led = "index", index, True
        self._pump(now_us)

    def on_cold(self, ask: ColdAsk, batches: Iterable[Batch]) -> None:
        """Batches and gaps out of the table, which go on from where we are."""
        if self._cold is not ask:
            return
        for batch in batches:
            hole = batch.gap is not None and batch.kind is None
            if batch.index < self._next or (
                not hole and self._partitions is None and self._next_seq not in (None, batch.seq)
            ):
                self._cold, self.failed = (
                    None,
                    Corrupt(
                        f"the table of lane {self.lane} has {batch!r} where index {self._next}, seq {self._next_seq} "
                        "comes next",
                        "look at the table: somebody else has written to it",
                    ),
                )
                return
            self._put(batch)
            self._next = batch.gap.stop if hole and batch.gap is not None else batch.index + 1
            self._next_seq = None if hole else batch.seq + batch.count
        self._table_works()

    def on_cold_end(self, ask: ColdAsk, reached: int, now_us: int) -> None:
        """The table has no more of the span: what is from `reached` on is nowhere any more."""
        if self._cold is not ask:
            return
        self._cold = None
        if reached < ask.stop:
            gap = Gap(GapKind.TRIMMED, reached, ask.stop)
            self._put(Batch.of_gap(self.lane, gap, self._next_seq if reached == self._next else None))
            self._next_seq = None
        self._next = ask.stop
        self._pump(now_us)

    def on_cold_failed(self, ask: ColdAsk, error: EmbarcaderoError, now_us: int) -> None:
        """This client can't read the table: now, or at all. A broker may be able to."""
        if self._cold is not ask:
            return
        self._cold = None
        trouble = self._broker_trouble
        offered = any(link.tables for link in self._links.values()) or (self._offered and not self._links)
        self._direct = not offered
        if isinstance(error, Retriable | OutcomeUnknown | TooMany):
            self._table_failed(error, now_us)
        elif ask.by == "span" and offered and (trouble is None or isinstance(trouble, Retriable)):
            self._table_failed(trouble or error, now_us)  # brokers were not asked yet, or may be able to later
        else:
            self.failed = trouble if isinstance(error, NotAvailable) and isinstance(trouble, Corrupt) else error

    def _table_failed(self, error: EmbarcaderoError, now_us: int) -> None:
        """The table could not be read: wait a little longer each time, then report it."""
        self.trouble = error
        self._table_failures += 1
        if self._table_failures == 1:
            self._table_failing_us = now_us if self._table_asked_us is None else self._table_asked_us
        wait_us = min(_TABLE_BACKOFF_LAST_US, _TABLE_BACKOFF_FIRST_US << min(self._table_failures - 1, 16))
        long_enough = now_us - self._table_failing_us >= TABLE_RETRY_S * 1e6
        if long_enough and self._table_failures >= _TABLE_TRIES_MIN and isinstance(error, TierUnavailable):
            self.failed = error
            return
        self._ask_from_us = now_us + wait_us
        self._turn += 1

    def _table_works(self) -> None:
        self._disappointments = self._table_failures = 0
        self.trouble = self._broker_trouble = self._table_asked_us = None

    def retry(self, now_us: int) -> None:
        """Go on at the same position after a store could not be reached. Other failures are final."""
        if isinstance(self.failed, TierUnavailable):
            self.failed = None
            self._table_failures = 0
            self._pump(now_us)
