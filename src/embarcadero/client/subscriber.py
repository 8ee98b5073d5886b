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
itself (`take_table_asks`): the driver reads the table as the store knows it after the brokers said so. Brokers drop
only what is in the table, so each position comes once; what the table does not have either stays a gap.

A store that can't be reached is tried again, by both ways in turn and with growing pauses, for `TABLE_RETRY_S` since
the first question that failed was asked. Then `failed` is a TierUnavailable, and `retry` begins anew: the position is
kept.
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
"""Batches and gaps that are fetched ahead: those without a payload are bounded, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderSettings:
    """How a reader reads.

    `table`: the topic may have a table, and what brokers have no longer is looked for there. `tiered`: it has one, and
    positions are looked for there, too; `in_table` are the lanes of which it has something. `turn`: where to begin with
    links.
    """

    silent_after_us: int
    read: str = "durable"
    partitions: list[int] | None = None
    control: bool = False  # entries of sessions are handed on too
    stop: int | None = None  # nothing from this index on is asked for
    wait_ms: int = FETCH_WAIT_MS_DEFAULT
    max_bytes: int = FETCH_BYTES_DEFAULT
    prefetch: int = PREFETCH_FETCHES
    schemas: TopicSchemas = RAW  # by which batches are read
    brokers: Mapping[int, int] = field(default_factory=dict)  # region handle -> broker
    turn: int = 0
    table: bool = False
    tiered: bool = False
    in_table: frozenset[int] = frozenset()


@dataclass(slots=True, eq=False)
class TableAsk:
    """What a reader of a lane wants of the topic's table: the batches of a span, or where a position is."""

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
    """Batches and gaps that were fetched and not taken, with the CRCs that their payloads must have."""

    def __init__(self, settings: ReaderSettings) -> None:
        self._bytes_max = (settings.prefetch - 1) * settings.max_bytes
        self._batches: deque[Batch] = deque()
        self._sums: deque[int | None] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def has_room(self) -> bool:
        """Whether there is less ahead than there may be."""
        return self._bytes <= self._bytes_max and len(self._batches) < _AHEAD_MAX

    @property
    def first(self) -> Batch:
        """The batch that is taken next."""
        return self._batches[0]

    def put(self, batch: Batch, crc: int | None) -> None:
        """Add a batch; `crc` is what its payload must have."""
        self._batches.append(batch)
        self._sums.append(crc)
        self._bytes += batch.size

    def damaged(self) -> bool:
        """Whether the payload of the first batch is not the right one."""
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
    """How a reader gets at its topic's table: the question under way, the way that is open, and what failed."""

    def __init__(self, settings: ReaderSettings) -> None:
        self._possible = settings.table
        self.resolves = settings.tiered  # the position that is looked for may be in the table
        self._ask: TableAsk | None = None
        self._taken = False  # the driver has the question
        self._offered = False  # the broker that was connected last reads tables for its clients
        self._direct = False  # this client reads the table itself, although brokers would
        self.through_broker = False  # the Fetch under way asks for records of the table, too
        self.trouble: EmbarcaderoError | None = None  # why the table did not answer when it was last asked
        self._broker_trouble: EmbarcaderoError | None = None  # why a broker could not read the table
        self._failures, self._failing_us = 0, 0  # in a row, and since when
        self._asked_us: int | None = None  # when the table was asked; None: it has answered since

    # --- the question ---
    @property
    def asked(self) -> bool:
        """Whether a question is under way."""
        return self._ask is not None

    def ask(self, question: TableAsk) -> None:
        """Have the driver look into the table."""
        self._ask, self._taken = question, False

    def take(self) -> list[TableAsk]:
        """What is to be asked of the table, once."""
        if self._ask is None or self._taken:
            return []
        self._taken = True
        return [self._ask]

    def waits_for(self, ask: TableAsk) -> bool:
        """Whether an answer is still waited for."""
        return self._ask is ask

    def drop(self) -> None:
        """An answer that still comes changes nothing."""
        self._ask = None

    def sought(self) -> None:
        """The reader goes on elsewhere."""
        self.resolves = self._possible
        self._failures = 0

    def resolved(self) -> None:
        """The position is known, or brokers know it."""
        self._ask, self.resolves = None, False

    # --- the way ---
    def connected(self, link: Link) -> None:
        """A connection is ready for use."""
        self._offered = link.tables

    def begins(self, now_us: int) -> None:
        """The reader asks for something."""
        self._asked_us = now_us

    def fetches(self, link: Link) -> bool:
        """Whether a Fetch on a link asks for records of the table, too."""
        self.through_broker = self._possible and link.tables and not self._direct
        return self.through_broker

    def reads_itself(self) -> bool:
        """Whether this client looks into the table for what brokers say is trimmed."""
        return self._possible and not self.through_broker

    # --- failures ---
    def broker_failed(self, error: EmbarcaderoError) -> None:
        """A broker could not read the table: the client tries."""
        self._broker_trouble, self._direct = error, True

    def client_failed(self, ask: TableAsk, error: EmbarcaderoError, links: list[Link]) -> tuple[EmbarcaderoError, bool]:
        """This client can't read the table, now or at all; a broker may. The error, and whether it is final."""
        self._ask = None
        trouble = self._broker_trouble
        offered = any(link.tables for link in links) or (self._offered and not links)
        self._direct = not offered
        if isinstance(error, Retriable | OutcomeUnknown | TooMany):
            return error, False
        if ask.by == "span" and offered and (trouble is None or isinstance(trouble, Retriable)):
            return trouble or error, False  # brokers were not asked yet, or may be able to later
        damaged = isinstance(error, NotAvailable) and isinstance(trouble, Corrupt)
        return trouble if damaged and trouble is not None else error, True

    def failed(self, error: EmbarcaderoError, now_us: int) -> int | None:
        """The table could not be read: until when to wait, a little longer each time. None: report it."""
        self.trouble = error
        self._failures += 1
        if self._failures == 1:
            self._failing_us = now_us if self._asked_us is None else self._asked_us
        long_enough = now_us - self._failing_us >= TABLE_RETRY_S * 1e6
        if long_enough and self._failures >= _TABLE_TRIES_MIN and isinstance(error, TierUnavailable):
            return None
        return now_us + min(_TABLE_BACKOFF_LAST_US, _TABLE_BACKOFF_FIRST_US << min(self._failures - 1, 16))

    def works(self) -> None:
        """The table was read, or is not needed any more."""
        self._failures = 0
        self.trouble = self._broker_trouble = self._asked_us = None

    def try_again(self) -> None:
        """Begin anew after a failure was reported."""
        self._failures = 0

    @property
    def deadline_us(self) -> int | None:
        """How long a broker that reads the table is waited for, once the store could not be reached. None: any time."""
        if not self.through_broker or not self._failures or not isinstance(self.trouble, TierUnavailable):
            return None
        return self._failing_us + int(TABLE_RETRY_S * 1e6)


class SubscriberCore(FetchCore):
    """One reader of one lane. `owner`: whom answers belong to, if not to this core itself."""

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
        self.ended = False  # the lane is closed, and its end was handed on
        self._by, self._next = start
        self._next_seq: int | None = None  # seq at which the next batch must begin, where that is known
        self._confirmed = False  # the cluster itself has led us to `_next`
        self._taken = start.value if start.by == "index" else 0  # everything below was taken, or is not wanted
        self._failed_fetches = 0  # in a row
        self._suspect_position: Lookup | None = None  # an answer for this position could not be right

    # --- what the driver asks for ---
    @property
    def position(self) -> int | None:
        """Index of the next batch to be taken; None while the cluster has not yet said where we are."""
        if self._ahead:
            return max(self._taken, self._ahead.first.index)  # a gap may begin below what was taken: that is lost
        return self._next if self._by == "index" else None

    @property
    def ready(self) -> int:
        """How many batches (and gaps) can be taken now."""
        return len(self._ahead)

    def take_batches(self, most: int, now_us: int) -> list[Batch]:
        """Up to `most` batches (and gaps) in order. When it gives none, `failed` tells whether there will be more."""
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
        """A payload is wrong: what was fetched from there on is asked for once more."""
        self._drop_ahead()
        self._by, self._next, self._next_seq, self.ended = "index", batch.index, batch.seq, False
        self._suspect(
            ChecksumMismatch(
                f"the payload at index {batch.index} of lane {self.lane} is damaged",
                "it was asked for twice; seek past it to go on",
            )
        )

    def _drop_ahead(self) -> None:
        """Drop what was fetched, and what is on its way."""
        self._ahead.clear()
        self._request.end()
        self._table.drop()

    def positions(self) -> dict[int, int | None]:
        """By lane: index of the next batch to be taken."""
        return {self.lane: self.position}

    def seek(self, by: str, value: int, now_us: int, lane: int | None = None) -> None:
        """Go on elsewhere: by "index", "seq", "time", "earliest" or "latest". What was fetched ahead is dropped."""
        if lane not in (None, self.lane):
            raise BadValue(f"lane {lane} is not a lane of this topic", f"its lane is {self.lane}")
        self.ended = False
        self._table.sought()
        self._by, self._next, self._next_seq, self._confirmed = by, value, None, False
        self._taken = value if by == "index" else 0
        self._drop_ahead()
        self._request.begin_again()
        self._failed_fetches = 0
        self.failed = self._suspect_position = None
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
        self._request.connected(link)
        self._table.connected(link)
        self._pump(now_us)

    def on_disconnected(self, conn: int, now_us: int) -> None:
        """A connection is gone; its answer is asked for elsewhere."""
        self._output.pop(conn, None)
        self._request.disconnected(conn)
        self._pump(now_us)

    def on_control(self, conn: int, request: int, message: AnyMessage, now_us: int) -> None:
        """A Failed for our Fetch, or a Pong."""
        self._request.heard(conn, now_us)
        if not self._request.answered_by(conn, request) or not isinstance(message, Failed):
            return
        self._request.end()
        error = from_wire(message.code, message.message, message.hint)
        recovering = isinstance(error, FuturePosition) and self._confirmed  # we were there: it has to be found again
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
        """The answer to a Fetch; one that we no longer wait for is ignored."""
        self._request.heard(conn, now_us)
        if not self._request.answered_by(conn, event.request):
            return
        self._request.end()
        try:
            self._take(event)
            self._failed_fetches = 0
            if not self._table.asked and (self._table.through_broker or event.payloads):  # read, or not needed any more
                self._table_works()
            if not event.payloads:
                self._suspect_position = None
        except (Corrupt, ProtocolError) as error:
            self._suspect(error)
        self._pump(now_us)

    # --- time ---
    def on_timer(self, now_us: int) -> None:
        """Do what is due; calling it early is harmless."""
        if (overdue := self._request.overdue(now_us)) is not None:
            self._judge(*overdue, self._owner, now_us)
        if (deadline_us := self._table_deadline_us) is not None and now_us >= deadline_us:
            self._request.end()
            self.failed = self._table.trouble
        self._request.on_timer(now_us)
        self._pump(now_us)

    def next_timer_us(self) -> int | None:
        """When `on_timer` has something to do, unless something else happens before."""
        if (silence_us := self._request.silence_us) is not None:
            return min(silence_us, self._table_deadline_us or silence_us)
        return self._request.back_off_us

    @property
    def _table_deadline_us(self) -> int | None:
        return None if self._request.under_way is None else self._table.deadline_us

    # --- asking ---
    def _pump(self, now_us: int) -> None:
        """Ask for more unless that is under way, or there is enough, or asking makes no sense."""
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
            # "latest" is asked without waiting: it is then an index, and a lost link can't make it a later one
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
        """Whether there is less ahead than there may be."""
        return self._ahead.has_room

    @property
    def trouble(self) -> EmbarcaderoError | None:
        """Why the topic's table could not be read when it was last asked."""
        return self._table.trouble

    @property
    def _at_stop(self) -> bool:
        return self._settings.stop is not None and self._by == "index" and self._next >= self._settings.stop

    def _fetch_failed(self, now_us: int) -> None:
        """This broker can't answer now: wait a little longer each time, and ask the next one."""
        wait_us = min(_BACKOFF_LAST_US, _BACKOFF_FIRST_US << min(self._failed_fetches, 16))
        self._failed_fetches += 1
        self._request.back_off(now_us + wait_us)

    def _suspect(self, error: EmbarcaderoError) -> None:
        """An answer that can't be right is asked for once more, from another broker; then it is an error."""
        self._request.ask_elsewhere()
        position = Lookup(self._by, self._next)
        if self._suspect_position == position:
            self.failed = error
        self._suspect_position = position

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
            self._put(Batch.of_entry(self.lane, entry, payload, self._settings.brokers, self._settings.schemas), crc)
            self._by, self._next, self._next_seq = "index", entry.index + 1, entry.seq + entry.count
        if self._table.asked:
            return  # it goes on behind what the table has
        if self._by == "index" and event.next_index < self._next:
            raise BadFrame(f"a broker goes back from index {self._next} to {event.next_index}", "report it: a bug")
        if self._by == "time" and event.next_index == event.tail_index:
            return  # that time has not come in this log: ask for it again, so that nothing older slips in
        self._by, self._next, self._confirmed = "index", event.next_index, True

    def _take_gap(self, gap: Gap) -> None:
        """A typed hole. One that begins below our position tells that what was read there is lost."""
        filtered = self._settings.partitions is not None  # then, what is before the gap may be left out
        jumps = gap.start > self._next and not filtered and gap.kind not in _LOSSES  # or be entries of sessions
        if self._by == "index" and (jumps or (gap.start < self._next and not self._may_lose(gap))):
            raise BadFrame(f"a gap at index {gap.start} where {self._next} comes next", "report it: this is a bug")
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
        """Whether what is below our position may be gone: what is ordered and not durable goes with the fabric."""
        if gap.kind in _LOSSES:
            return gap.stop > self._next
        return gap.kind is GapKind.END_OF_LANE and self._settings.read == "ordered"

    def _check(self, entry: OrderEntry) -> None:
        if entry.kind != EntryKind.BATCH and (entry.count or entry.size):
            raise BadFrame(f"entry {entry.index} of kind {entry.kind} has records", "only batches have: report it")
        if self._by == "index" and entry.index < self._next:
            raise BadFrame(f"index {entry.index} was served where {self._next} comes next", "report it: this is a bug")
        whole = self._settings.partitions is None
        if self._settings.control and whole and self._by == "index" and entry.index > self._next:
            raise BadFrame(f"index {entry.index} was served, {self._next} was left out", "report it: this is a bug")
        if whole and self._next_seq is not None and entry.seq != self._next_seq:
            raise BadFrame(
                f"index {entry.index} begins at seq {entry.seq} where {self._next_seq} comes next",
                "report it: this is a bug",
            )

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
        """What is to be asked of the table, once."""
        return self._table.take()

    def wants(self, ask: TableAsk) -> bool:
        """Whether an answer is still waited for."""
        return self._table.waits_for(ask)

    def on_table_position(self, ask: TableAsk, index: int | None, now_us: int) -> None:
        """Where the position is that was asked for; None: brokers know better."""
        if not self.wants(ask):
            return
        self._table.resolved()
        if index is not None:
            self._by, self._next, self._confirmed = "index", index, True
        self._pump(now_us)

    def on_table_batches(self, ask: TableAsk, batches: Iterable[Batch]) -> None:
        """Batches and gaps out of the table, which go on from where we are."""
        if not self.wants(ask):
            return
        for batch in batches:
            hole = batch.gap is not None and batch.kind is None
            if batch.index < self._next or (
                not hole and self._settings.partitions is None and self._next_seq not in (None, batch.seq)
            ):
                self._table.drop()
                self.failed = Corrupt(
                    f"the table of lane {self.lane} has {batch!r} where index {self._next}, seq {self._next_seq} "
                    "comes next",
                    "look at the table: somebody else has written to it",
                )
                return
            self._put(batch)
            self._next = batch.gap.stop if hole and batch.gap is not None else batch.index + 1
            self._next_seq = None if hole else batch.seq + batch.count
        self._table_works()

    def on_table_end(self, ask: TableAsk, reached: int, now_us: int) -> None:
        """The table has no more of the span: what is from `reached` on is nowhere any more."""
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
        """This client can't read the table: now, or at all. A broker may be able to."""
        if not self.wants(ask):
            return
        reason, final = self._table.client_failed(ask, error, self._request.links())
        if final:
            self.failed = reason
        else:
            self._table_failed(reason, now_us)

    def _table_failed(self, error: EmbarcaderoError, now_us: int) -> None:
        """The table could not be read: wait, then report it."""
        until_us = self._table.failed(error, now_us)
        if until_us is None:
            self.failed = error
        else:
            self._request.back_off(until_us)

    def _table_works(self) -> None:
        self._failed_fetches = 0
        self._table.works()

    def retry(self, now_us: int) -> None:
        """Go on at the same position after a store could not be reached. Other failures are final."""
        if isinstance(self.failed, TierUnavailable):
            self.failed = None
            self._table.try_again()
            self._pump(now_us)
