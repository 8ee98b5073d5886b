"""The subscriber, sans I/O: it fetches the next batches of a lane from brokers and delivers checked batches, in order.

Theory of operation. One Fetch is open at a time. The next Fetch is sent as soon as the answer arrives, unless the
read-ahead buffer is full, so a reader that keeps up never waits for a round trip. Any broker serves any read: if a link
is lost or silent, the same index is fetched from another broker.

Checks. An answer is accepted only if it continues exactly after the last one: indices grow, seqs have no holes except
typed gaps, and every payload matches its CRC. The CRC is computed when the batch is taken, while the broker sends the
next batches. A wrong answer is fetched once more, from another broker, and is then an error. A wrong batch is never
delivered (P4, P7). After a loss of the whole fabric a reader continues at its index: a LOST gap leads to the position
where the lane continues.

Tables. A topic with replicas may have a table as well. A broker that offers it (Welcome.tables) reads the table for its
clients, and its answers are like any other. For other brokers, the client itself reads TRIMMED positions from the table
(`take_table_asks`). The driver looks up the table in the store after the broker's answer. Brokers drop only records
that the table has, so each position appears once. A position that the table does not have either stays a gap.

Retries. If a store does not answer, the reader tries both ways in turn, with growing pauses, for `TABLE_RETRY_S` since
the first failed request was sent. Then `failed` is a TierUnavailable. `retry` starts again at the same position.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from embarcadero.client.arguments import FIRST_INDEX, Lookup
from embarcadero.client.link import FetchCore, Link, SoleRequest
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
from embarcadero.wire.codec import FetchedReceived, control_frame, payload_crc
from embarcadero.wire.messages import AnyMessage, Failed, Fetch
from embarcadero.wire.schemas import RAW, TopicSchemas

_BACKOFF_FIRST_US = 5_000
_BACKOFF_LAST_US = 500_000
_TABLE_BACKOFF_FIRST_US = 100_000
_TABLE_BACKOFF_LAST_US = 1_000_000
_TABLE_TRIES_MIN = 2  # by a broker, and by this client itself
_LOSSES = frozenset({GapKind.LOST, GapKind.NEVER_DURABLE})
_AHEAD_MAX = 2 * FETCH_ENTRIES_MAX
"""Limit of batches and gaps in the read-ahead buffer. It also limits those without a payload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderSettings:
    """The settings of a reader.

    `table`: the topic may have a table; records that brokers no longer have are read from it. `tiered`: the topic has a
    table; positions are looked up there as well. `in_table`: the lanes with records in the table. `turn`: the first
    link of the rotation.
    """

    silent_after_us: int
    read: str = "durable"
    partitions: list[int] | None = None
    control: bool = False  # deliver entries of sessions as well
    stop: int | None = None  # read only below this index
    wait_ms: int = FETCH_WAIT_MS_DEFAULT
    max_bytes: int = FETCH_BYTES_DEFAULT
    prefetch: int = PREFETCH_FETCHES
    schemas: TopicSchemas = RAW  # to decode batches
    brokers: Mapping[int, int] = field(default_factory=dict)  # region handle -> broker
    turn: int = 0
    table: bool = False
    tiered: bool = False
    in_table: frozenset[int] = frozenset()


@dataclass(slots=True, eq=False)
class TableAsk:
    """A read of the topic's table for one lane: the batches of a span, or a position."""

    core: SubscriberCore
    lane: int
    by: str  # span | earliest | seq | time
    start: int
    stop: int
    partitions: list[int] | None
    control: bool
    schemas: TopicSchemas
    durable: bool


class ReadAhead:
    """The read-ahead buffer: batches and gaps that are not taken yet, with the expected CRCs of their payloads."""

    def __init__(self, settings: ReaderSettings) -> None:
        self._bytes_max = (settings.prefetch - 1) * settings.max_bytes
        self._batches: deque[Batch] = deque()
        self._sums: deque[int | None] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def has_room(self) -> bool:
        """Whether the buffer is not full."""
        return self._bytes <= self._bytes_max and len(self._batches) < _AHEAD_MAX

    @property
    def first(self) -> Batch:
        """The next batch."""
        return self._batches[0]

    def put(self, batch: Batch, crc: int | None) -> None:
        """Add a batch. `crc` is the expected CRC of its payload."""
        self._batches.append(batch)
        self._sums.append(crc)
        self._bytes += batch.size

    def damaged(self) -> bool:
        """Whether the payload of the first batch does not match its CRC."""
        crc = self._sums[0]
        return crc is not None and payload_crc(self._batches[0].payload) != crc

    def take(self) -> Batch:
        """Take the first batch."""
        self._sums.popleft()
        batch = self._batches.popleft()
        self._bytes -= batch.size
        return batch

    def clear(self) -> None:
        """Drop everything."""
        self._batches.clear()
        self._sums.clear()
        self._bytes = 0


class TableAccess:
    """A reader's access to its topic's table: the open read, the way to the table, and failures."""

    def __init__(self, settings: ReaderSettings) -> None:
        self._possible = settings.table
        self.resolves = settings.tiered  # the table may have the start position
        self._ask: TableAsk | None = None
        self._taken = False  # the driver has taken the read
        self._offered = False  # the broker of the newest connection reads tables for its clients
        self._direct = False  # this client reads the table itself, although brokers offer it
        self.through_broker = False  # the open Fetch asks for records of the table as well
        self.trouble: EmbarcaderoError | None = None  # the error of the last read of the table
        self._broker_trouble: EmbarcaderoError | None = None  # why a broker could not read the table
        self._failures, self._failing_us = 0, 0  # consecutive failures, and the time of the first
        self._asked_us: int | None = None  # when the table was last asked; None: it has answered

    # --- the open read ---
    @property
    def asked(self) -> bool:
        """Whether a read is open."""
        return self._ask is not None

    def ask(self, question: TableAsk) -> None:
        """Queue a read of the table for the driver."""
        self._ask, self._taken = question, False

    def take(self) -> list[TableAsk]:
        """Take the read that the driver must do. Each is returned once."""
        if self._ask is None or self._taken:
            return []
        self._taken = True
        return [self._ask]

    def waits_for(self, ask: TableAsk) -> bool:
        """Whether this read is still open."""
        return self._ask is ask

    def drop(self) -> None:
        """Close the read. A later answer is ignored."""
        self._ask = None

    def on_seek(self) -> None:
        """Note that the reader continues at another position."""
        self.resolves = self._possible
        self._failures = 0

    def resolved(self) -> None:
        """Note that the start position is known, or that brokers know it."""
        self._ask, self.resolves = None, False

    # --- the way: through a broker, or by this client ---
    def connected(self, link: Link) -> None:
        """A connection is ready for use."""
        self._offered = link.tables

    def begins(self, now_us: int) -> None:
        """Note the time of a request."""
        self._asked_us = now_us

    def fetches(self, link: Link) -> bool:
        """Choose and return whether a Fetch on a link asks for records of the table as well."""
        self.through_broker = self._possible and link.tables and not self._direct
        return self.through_broker

    def reads_itself(self) -> bool:
        """Whether this client reads TRIMMED positions from the table itself."""
        return self._possible and not self.through_broker

    # --- failures ---
    def broker_failed(self, error: EmbarcaderoError) -> None:
        """Note that a broker could not read the table: the client tries next."""
        self._broker_trouble, self._direct = error, True

    def client_failed(self, ask: TableAsk, error: EmbarcaderoError, links: list[Link]) -> tuple[EmbarcaderoError, bool]:
        """Note that this client cannot read the table; a broker may. Return the error, and whether it is final."""
        self._ask = None
        trouble = self._broker_trouble
        offered = any(link.tables for link in links) or (self._offered and not links)
        self._direct = not offered
        if isinstance(error, Retriable | OutcomeUnknown | TooMany):
            return error, False
        if ask.by == "span" and offered and (trouble is None or isinstance(trouble, Retriable)):
            return trouble or error, False  # brokers were not asked yet, or may succeed later
        damaged = isinstance(error, NotAvailable) and isinstance(trouble, Corrupt)
        return trouble if damaged and trouble is not None else error, True

    def failed(self, error: EmbarcaderoError, now_us: int) -> int | None:
        """Note a failure. Return the end of a growing back-off. None: report the error."""
        self.trouble = error
        self._failures += 1
        if self._failures == 1:
            self._failing_us = now_us if self._asked_us is None else self._asked_us
        long_enough = now_us - self._failing_us >= TABLE_RETRY_S * 1e6
        if long_enough and self._failures >= _TABLE_TRIES_MIN and isinstance(error, TierUnavailable):
            return None
        return now_us + min(_TABLE_BACKOFF_LAST_US, _TABLE_BACKOFF_FIRST_US << min(self._failures - 1, 16))

    def works(self) -> None:
        """Note that the table was read, or is not needed any more."""
        self._failures = 0
        self.trouble = self._broker_trouble = self._asked_us = None

    def try_again(self) -> None:
        """Count failures from zero, after a failure was reported."""
        self._failures = 0

    @property
    def deadline_us(self) -> int | None:
        """Until when to wait for a broker that reads the table, after the store did not answer. None: no limit."""
        if not self.through_broker or not self._failures or not isinstance(self.trouble, TierUnavailable):
            return None
        return self._failing_us + int(TABLE_RETRY_S * 1e6)


class SubscriberCore(FetchCore):
    """A reader of one lane. `owner` gets the answers; by default this core."""

    def __init__(
        self, settings: ReaderSettings, lane: int, start: Lookup = FIRST_INDEX, owner: object | None = None
    ) -> None:
        super().__init__()
        self._settings, self.lane = settings, lane
        self._owner = self if owner is None else owner
        self._request = SoleRequest(settings.turn, settings.silent_after_us)
        self._table = TableAccess(settings)
        self._ahead = ReadAhead(settings)
        self.failed: EmbarcaderoError | None = None
        self.paused = False
        self.ended = False  # the lane is closed, and its end was delivered
        self._by, self._next = start
        self._next_seq: int | None = None  # expected seq of the next batch, if known
        self._confirmed = False  # an answer of the cluster has led to `_next`
        self._taken = start.value if start.by == "index" else 0  # all batches below were taken, or are not wanted
        self._failed_fetches = 0  # consecutive failures
        self._suspect_position: Lookup | None = None  # an answer for this position was wrong

    # --- for the driver ---
    @property
    def position(self) -> int | None:
        """Index of the next batch; None while it is not known."""
        if self._ahead:
            return max(self._taken, self._ahead.first.index)  # a gap of lost batches may begin below `_taken`
        return self._next if self._by == "index" else None

    @property
    def ready(self) -> int:
        """Number of batches (and gaps) that can be taken now."""
        return len(self._ahead)

    def take_batches(self, most: int, now_us: int) -> list[Batch]:
        """Take up to `most` batches (and gaps), in order. If there are none, `failed` may have the reason."""
        taken: list[Batch] = []
        while self._ahead and len(taken) < most:
            if self._ahead.damaged():
                self._damaged(self._ahead.first)
                break
            batch = self._ahead.take()
            taken.append(batch)
            hole = batch.gap if batch.kind is None else None
            self._taken = batch.index + 1 if hole is None else hole.stop
        self._pump(now_us)
        return taken

    def _damaged(self, batch: Batch) -> None:
        """A payload is wrong: fetch again from there on."""
        self._drop_ahead()
        self._by, self._next, self._next_seq, self.ended = "index", batch.index, batch.seq, False
        self._suspect(
            ChecksumMismatch(
                f"the payload at index {batch.index} of lane {self.lane} does not match its checksum",
                "it was fetched twice; seek past it to continue",
            )
        )

    def _drop_ahead(self) -> None:
        """Drop the read-ahead buffer, and ignore the answers to open requests."""
        self._ahead.clear()
        self._request.end()
        self._table.drop()

    def positions(self) -> dict[int, int | None]:
        """Return, by lane, the index of the next batch."""
        return {self.lane: self.position}

    def seek(self, by: str, value: int, now_us: int, lane: int | None = None) -> None:
        """Continue at another "index", "seq" or "time", or at "earliest" or "latest". Drop the read-ahead buffer."""
        if lane not in (None, self.lane):
            raise BadValue(f"lane {lane} is not a lane of this topic", f"use {self.lane}, or no lane")
        self.ended = False
        self._table.on_seek()
        self._by, self._next, self._next_seq, self._confirmed = by, value, None, False
        self._taken = value if by == "index" else 0
        self._drop_ahead()
        self._request.begin_again()
        self._failed_fetches = 0
        self.failed = self._suspect_position = None
        self._pump(now_us)

    def pause(self) -> None:
        """Stop fetching. The answer to the open Fetch is kept for later."""
        self.paused = True

    def resume(self, now_us: int) -> None:
        """Continue after `pause`, at the same position."""
        self.paused = False
        self._pump(now_us)

    # --- events of connections ---
    def on_connected(self, link: Link, now_us: int) -> None:
        """A connection is ready for use."""
        self._request.connected(link)
        self._table.connected(link)
        self._pump(now_us)

    def on_disconnected(self, conn: int, now_us: int) -> None:
        """A connection was lost: send its request to another broker."""
        self._output.pop(conn, None)
        self._request.disconnected(conn)
        self._pump(now_us)

    def on_control(self, conn: int, request: int, message: AnyMessage, now_us: int) -> None:
        """Handle a Failed for the open Fetch, or a Pong."""
        self._request.heard(conn, now_us)
        if not self._request.answered_by(conn, request) or not isinstance(message, Failed):
            return
        self._request.end()
        error = from_wire(message.code, message.message, message.hint)
        recovering = isinstance(error, FuturePosition) and self._confirmed  # it existed before: recovery will find it
        if self._table.through_broker and isinstance(error, TierUnavailable | BadTable | NotAvailable):
            self._table.broker_failed(error)
            self._table_failed(error, now_us)
        elif isinstance(error, Retriable | OutcomeUnknown | TooMany) or recovering:
            self._fetch_failed(now_us)
        elif isinstance(error, Corrupt):
            self._suspect(error)
        else:
            self.failed = error
        self._pump(now_us)

    def on_fetched(self, conn: int, event: FetchedReceived, now_us: int) -> None:
        """Handle the answer to the open Fetch. Other answers are ignored."""
        self._request.heard(conn, now_us)
        if not self._request.answered_by(conn, event.request):
            return
        self._request.end()
        try:
            self._take(event)
            self._failed_fetches = 0
            if not self._table.asked and (self._table.through_broker or event.payloads):  # was read, or is not needed
                self._table_works()
            if not event.payloads:
                self._suspect_position = None
        except (Corrupt, ProtocolError) as error:
            self._suspect(error)
        self._pump(now_us)

    # --- time ---
    def on_timer(self, now_us: int) -> None:
        """Do everything that is due. An early call does nothing."""
        if (overdue := self._request.overdue(now_us)) is not None:
            self._judge(*overdue, self._owner, now_us)
        if (deadline_us := self._table_deadline_us) is not None and now_us >= deadline_us:
            self._request.end()
            self.failed = self._table.trouble
        self._request.on_timer(now_us)
        self._pump(now_us)

    def next_timer_us(self) -> int | None:
        """Return when `on_timer` must run, if no other event comes first."""
        if (silence_us := self._request.silence_us) is not None:
            return min(silence_us, self._table_deadline_us or silence_us)
        return self._request.back_off_us

    @property
    def _table_deadline_us(self) -> int | None:
        return None if self._request.under_way is None else self._table.deadline_us

    # --- asking ---
    def _pump(self, now_us: int) -> None:
        """Send the next request, unless one is open, the buffer is full, or the reader is at its end."""
        if not self._request.may_begin(now_us) or self._table.asked or not self.has_room or self.ended:
            return
        if self.failed is not None or self.paused or self._at_stop:
            return
        self._table.begins(now_us)
        if self._table.resolves and self._by not in ("index", "latest"):
            self._ask_table(self._by, self._next, 0)
            return
        link, settings = self._request.next_link(), self._settings
        ask = Fetch(
            lane=self.lane,
            by=self._by,
            start=self._next,
            max_bytes=settings.max_bytes,
            # "latest" does not wait: the answer fixes the index, so that a lost link cannot move it
            wait_ms=0 if self._by == "latest" else settings.wait_ms,
            partitions=settings.partitions,
            read=settings.read,
            control=settings.control,
            stop=settings.stop,
            table=self._table.fetches(link),
            never_durable=True,
        )
        request = self._request.begin(link, self._owner, now_us)
        self._write(link.number, control_frame(ask, request))

    @property
    def has_room(self) -> bool:
        """Whether the read-ahead buffer is not full."""
        return self._ahead.has_room

    @property
    def trouble(self) -> EmbarcaderoError | None:
        """The last error of the topic's table, until the table can be read again."""
        return self._table.trouble

    @property
    def _at_stop(self) -> bool:
        return self._settings.stop is not None and self._by == "index" and self._next >= self._settings.stop

    def _fetch_failed(self, now_us: int) -> None:
        """A broker cannot answer now: back off with growing pauses, and ask the next broker."""
        wait_us = min(_BACKOFF_LAST_US, _BACKOFF_FIRST_US << min(self._failed_fetches, 16))
        self._failed_fetches += 1
        self._request.back_off(now_us + wait_us)

    def _suspect(self, error: EmbarcaderoError) -> None:
        """Fetch once more from another broker after a wrong answer. The second wrong answer is an error."""
        self._request.ask_elsewhere()
        position = Lookup(self._by, self._next)
        if self._suspect_position == position:
            self.failed = error
        self._suspect_position = position

    # --- checking ---
    def _take(self, event: FetchedReceived) -> None:
        """Check and buffer an answer. After an error, the batches before it are in the buffer."""
        if event.gap is not None:
            self._take_gap(event.gap)
        for fields, payload in zip(event.entries.tolist(), event.payloads, strict=True):
            entry = OrderEntry._make(fields)
            self._check(entry)
            crc = entry.crc if entry.kind == EntryKind.BATCH else None
            if entry.flags & FROM_TABLE and crc is not None:
                entry = entry._replace(crc=entry.location, location=0, flags=entry.flags & ~FROM_TABLE)
            self._put(Batch.of_entry(self.lane, entry, payload, self._settings.brokers, self._settings.schemas), crc)
            self._by, self._next, self._next_seq = "index", entry.index + 1, entry.seq + entry.count
        if self._table.asked:
            return  # the lane continues after the table's part
        if self._by == "index" and event.next_index < self._next:
            problem = f"a broker went back from index {self._next} to {event.next_index}"
            raise BadFrame(problem, "report it: this is a bug")
        if self._by == "time" and event.next_index == event.tail_index:
            return  # no batch has this time yet: keep asking by time, so that no older batch is delivered
        self._by, self._next, self._confirmed = "index", event.next_index, True

    def _take_gap(self, gap: Gap) -> None:
        """Check and buffer a gap. A gap that begins below the position reports that batches read there are lost."""
        filtered = self._settings.partitions is not None  # then batches before the gap may be left out
        jumps = gap.start > self._next and not filtered and gap.kind not in _LOSSES  # or be entries of sessions
        if self._by == "index" and (jumps or (gap.start < self._next and not self._may_lose(gap))):
            problem = f"a broker sent a gap at index {gap.start}, and index {self._next} comes next"
            raise BadFrame(problem, "report it: this is a bug")
        if gap.kind is GapKind.TRIMMED and self._table.reads_itself():
            if self._by != "index" or gap.start != self._next:
                self._next_seq = None
            self._by, self._next, self._confirmed = "index", gap.start, True
            stop = self._settings.stop
            self._ask_table("span", gap.start, gap.stop if stop is None else min(gap.stop, stop))
            return
        self._put(Batch.of_gap(self.lane, gap, self._next_seq if gap.start == self._next else None))
        self.ended = gap.kind is GapKind.END_OF_LANE
        self._by, self._next, self._next_seq = "index", gap.stop, None

    def _may_lose(self, gap: Gap) -> bool:
        """Whether batches below the position may be lost: batches that are not durable are lost with the fabric."""
        if gap.kind in _LOSSES:
            return gap.stop > self._next
        return gap.kind is GapKind.END_OF_LANE and self._settings.read == "ordered"

    def _check(self, entry: OrderEntry) -> None:
        if entry.kind != EntryKind.BATCH and (entry.count or entry.size):
            problem = f"entry {entry.index} of kind {entry.kind} has records, and only batches may have records"
            raise BadFrame(problem, "report it: this is a bug")
        if self._by == "index" and entry.index < self._next:
            problem = f"a broker served index {entry.index}, and index {self._next} comes next"
            raise BadFrame(problem, "report it: this is a bug")
        whole = self._settings.partitions is None
        if self._settings.control and whole and self._by == "index" and entry.index > self._next:
            problem = f"a broker served index {entry.index} and left out index {self._next}"
            raise BadFrame(problem, "report it: this is a bug")
        if whole and self._next_seq is not None and entry.seq != self._next_seq:
            problem = f"the batch at index {entry.index} begins at seq {entry.seq}, and seq {self._next_seq} comes next"
            raise BadFrame(problem, "report it: this is a bug")

    def _put(self, batch: Batch, crc: int | None = None) -> None:
        self._ahead.put(batch, crc)

    # --- the topic's table ---
    def _ask_table(self, by: str, start: int, stop: int) -> None:
        asked = self._settings
        durable = asked.read == "durable"
        self._table.ask(
            TableAsk(self, self.lane, by, start, stop, asked.partitions, asked.control, asked.schemas, durable)
        )

    def take_table_asks(self) -> list[TableAsk]:
        """Take the read of the table that the driver must do. Each is returned once."""
        return self._table.take()

    def wants(self, ask: TableAsk) -> bool:
        """Whether this read is still open."""
        return self._table.waits_for(ask)

    def on_table_position(self, ask: TableAsk, index: int | None, now_us: int) -> None:
        """Take the index of a position. None: brokers know it."""
        if not self.wants(ask):
            return
        self._table.resolved()
        if index is not None:
            self._by, self._next, self._confirmed = "index", index, True
        self._pump(now_us)

    def on_table_batches(self, ask: TableAsk, batches: Iterable[Batch]) -> None:
        """Check and buffer batches and gaps from the table."""
        if not self.wants(ask):
            return
        for batch in batches:
            hole = batch.gap is not None and batch.kind is None
            if batch.index < self._next or (
                not hole and self._settings.partitions is None and self._next_seq not in (None, batch.seq)
            ):
                self._table.drop()
                self.failed = Corrupt(
                    f"the table of lane {self.lane} has {batch!r}, and index {self._next}, seq {self._next_seq} "
                    "comes next",
                    "check the table: another program has written to it",
                )
                return
            self._put(batch)
            self._next = batch.gap.stop if hole and batch.gap is not None else batch.index + 1
            self._next_seq = None if hole else batch.seq + batch.count
        self._table_works()

    def on_table_end(self, ask: TableAsk, reached: int, now_us: int) -> None:
        """End a read of a span: positions from `reached` on exist neither in the table nor at brokers."""
        if not self.wants(ask):
            return
        self._table.drop()
        if reached < ask.stop:
            gap = Gap(GapKind.TRIMMED, reached, ask.stop)
            self._put(Batch.of_gap(self.lane, gap, self._next_seq if reached == self._next else None))
            self._next_seq = None
        self._next = ask.stop
        self._pump(now_us)

    def on_table_failed(self, ask: TableAsk, error: EmbarcaderoError, now_us: int) -> None:
        """This client cannot read the table, now or permanently. A broker may succeed."""
        if not self.wants(ask):
            return
        reason, final = self._table.client_failed(ask, error, self._request.links())
        if final:
            self.failed = reason
        else:
            self._table_failed(reason, now_us)

    def _table_failed(self, error: EmbarcaderoError, now_us: int) -> None:
        """Back off after a failed read of the table, or report the error."""
        until_us = self._table.failed(error, now_us)
        if until_us is None:
            self.failed = error
        else:
            self._request.back_off(until_us)

    def _table_works(self) -> None:
        self._failed_fetches = 0
        self._table.works()

    def retry(self, now_us: int) -> None:
        """Continue at the same position after a store did not answer. Other failures are final."""
        if isinstance(self.failed, TierUnavailable):
            self.failed = None
            self._table.try_again()
            self._pump(now_us)
