"""Read tables in brokers, for their clients: batches for FETCHED frames, positions, and pieces of spans.

Implements `broker.disk_reads.TableReader`, and runs on a broker's workers. The payload of a batch is encoded from the
columns of the table, with the columns of the batch's schema version. A payload that the table kept is sent unchanged.
Page checksums of Parquet are verified. Row groups are cached for the next fetch, up to `TABLE_CACHE_BYTES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from time import monotonic
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from embarcadero.broker.disk_reads import FetchResult
from embarcadero.client.encoding import encoded
from embarcadero.client.results import Batch
from embarcadero.config.secrets import public_properties
from embarcadero.errors import BadTable, NotAvailable, TierUnavailable
from embarcadero.fabric.layout import ORDER, seal
from embarcadero.limits import FETCH_ENTRIES_MAX, FRAME_BYTES_MAX, TABLE_GROUP_BYTES_MAX
from embarcadero.tier.row_groups import GroupCache
from embarcadero.tier.storage import FOR_READERS, Properties, Storage, why_away
from embarcadero.tier.table_reads import TableBatch, TopicTable, naming_the_store, table_batches, table_cuts
from embarcadero.types import BATCH_KIND, FROM_TABLE, Cut, EntryKind, Gap, GapKind, LanePosition, Tier
from embarcadero.wire.codec import payload_crc
from embarcadero.wire.messages import Fetch
from embarcadero.wire.schemas import TopicSchemas

_DOWN_S: Final = 0.5  # the pause after a store did not answer; longer if the failed request took longer
_FIELDS: Final = ("index", "seq", "session_seq", "append_us", "session", "count", "partition")


class _Down(NamedTuple):
    """A store that could not be reached."""

    until_s: float  # no read asks the store before this time
    took_s: float  # the duration of the last attempt
    why: str


class TableServer:
    """Reads the tables of one warehouse for a broker.

    `properties` (`tier.properties`) and `warehouse` are the broker's own. The topic's record is written by clients, so
    it decides neither where the broker sends its keys nor which files it opens: files outside the warehouse are refused
    with NotAvailable, whether they exist or not.
    """

    def __init__(
        self,
        properties: Properties,
        warehouse: str,
        cache: GroupCache | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._cache, self._clock = cache or GroupCache(), clock
        self._storage = Storage({**FOR_READERS, **properties}, warehouse)
        self._public = public_properties(properties)
        self._down: _Down | None = None
        self._lock = Lock()

    def _table(self, tier: Tier) -> TopicTable:
        return TopicTable(tier, None, self._cache, TABLE_GROUP_BYTES_MAX, self._storage)

    @contextmanager
    def _of_store(self, tier: Tier) -> Iterator[None]:
        """Name the store in errors. While it does not answer, only one read at a time tries it: other reads would only
        wait, and occupy the workers of this broker.
        """
        with naming_the_store(msgspec.structs.replace(tier, properties=self._public)):
            if tier.metadata:
                self._storage.io.check(tier.metadata)
            began_s = self._clock()
            self._check_up(began_s)
            try:
                yield
            except TierUnavailable as error:
                if (why := why_away(error)) is not None:
                    self._set_down(why, self._clock() - began_s)
                raise
            except BadTable:
                self._down = None  # the store answered
                raise
            self._down = None

    def _check_up(self, now_s: float) -> None:
        with self._lock:
            if (down := self._down) is None:
                return
            if now_s >= down.until_s:
                self._down = down._replace(until_s=now_s + max(_DOWN_S, down.took_s))
                return
        raise TierUnavailable(f"the store did not answer a moment ago ({down.why})", "try again in a few seconds")

    def _set_down(self, why: str, took_s: float) -> None:
        with self._lock:
            self._down = _Down(self._clock() + max(_DOWN_S, took_s), took_s, why)

    def fetch(self, tier: Tier, schemas: TopicSchemas, ask: Fetch, stop: int) -> FetchResult:
        """Read batches of the table with ask.start <= index < stop: see `broker.disk_reads.TableReader`."""
        answer, durable = _FetchAnswer(ask, schemas), ask.read == "durable" and ask.never_durable
        end, stop = stop, min(stop, ask.start + FETCH_ENTRIES_MAX)
        with self._of_store(tier):
            table = self._table(tier)
            lists = table_batches(
                table,
                ask.lane,
                ask.start,
                stop,
                schemas,
                partitions=ask.partitions,
                control=ask.control,
                durable=durable,
            )
            for batches in lists:
                if not all(map(answer.add, batches)):
                    if answer.reached == stop < end:  # the gap may continue beyond `stop`
                        answer.add_rest(_gap_from(table, ask.lane, ask.start, stop, end, durable))
                    return answer.found()
        return answer.found(stop)

    def find(self, tier: Tier, lane: int, by: str, value: int) -> LanePosition | None:
        """Find a position in the table; None if it is not below the frontier."""
        with self._of_store(tier):
            return self._table(tier).find(lane, by, value)

    def cuts(self, tier: Tier, lane: int, start: int, stop: int, piece_bytes: int) -> list[Cut]:
        """Group files with batches [start, stop) into pieces of about `piece_bytes`."""
        with self._of_store(tier):
            return table_cuts(self._table(tier), lane, start, min(stop, tier.frontier(lane)[0]), piece_bytes)


def _gap_from(table: TopicTable, lane: int, start: int, known: int, stop: int, durable: bool) -> Gap:
    """The whole gap that begins at `start` and reaches at least `known`: below the table's start, or between rows."""
    low = table.tier.start(lane)[0]
    if start < low:
        return Gap(GapKind.TRIMMED, start, min(low, stop))
    indices = (rows.column("_index") for rows in table.rows(lane, known, stop, ["_index"]) if rows.num_rows)
    first = next(indices, None)
    return table.tier.gap(lane, start, stop if first is None else int(first[0].as_py()), durable)


class _FetchAnswer:
    """Collects the answer to a fetch."""

    def __init__(self, ask: Fetch, schemas: TopicSchemas) -> None:
        self._schemas, self._capacity, self._next = schemas, ask.max_bytes, ask.start
        self._rows: list[tuple[Batch, int, int]] = []  # with size and checksum of the payload to send
        self._payloads: list[bytes | memoryview] = []
        self._gap: Any = None

    def add(self, batch: Batch) -> bool:
        """Add a batch or a gap. False: it does not fit, and belongs to the next fetch."""
        if batch.gap is not None and batch.gap.kind is not GapKind.SKIPPED:
            if not self._rows:
                self._gap, self._next = batch.gap, batch.gap.stop
            else:
                self._next = batch.gap.start
            return False
        payload = self._payload(batch)
        if self._rows and len(payload) > self._capacity:
            self._next = batch.index
            return False
        self._rows.append((batch, len(payload), payload_crc(payload) if batch.count else batch.crc))
        self._payloads.append(payload)
        self._capacity = max(0, self._capacity - len(payload))
        self._next = batch.index + 1
        return True

    @property
    def reached(self) -> int:
        """The start of the next fetch."""
        return self._next

    def add_rest(self, gap: Gap) -> None:
        """Replace the gap in the answer by a longer one."""
        self._gap, self._next = gap, gap.stop

    def _payload(self, batch: Batch) -> bytes | memoryview:
        """The payload of a batch: the kept payload, or its columns, encoded by Arrow."""
        if not isinstance(batch, TableBatch):
            return b""
        if batch.kept is not None:
            return memoryview(batch.kept)
        records = batch.to_arrow().select(self._schemas.of(batch.schema_version).names)
        payload = encoded(records, None)
        if payload.size > FRAME_BYTES_MAX:
            payload = encoded(records, "zstd")
        if payload.size > FRAME_BYTES_MAX:
            raise NotAvailable(
                f"the batch at index {batch.index} needs {payload.size} bytes; a frame has at most {FRAME_BYTES_MAX}",
                'read the table in the client: install "embarcadero[iceberg]"',
            )
        return memoryview(payload)

    def found(self, reached: int | None = None) -> FetchResult:
        """Return the result for the broker. `reached`: all batches below it are in the answer, or filtered out."""
        entries = np.zeros(len(self._rows), dtype=ORDER)
        for name in _FIELDS:
            entries[name] = [getattr(batch, name) for batch, _, _ in self._rows]
        entries["origin"] = [batch.broker for batch, _, _ in self._rows]
        entries["schema"] = [batch.schema_version for batch, _, _ in self._rows]
        entries["kind"] = [int(batch.kind or EntryKind.BATCH) for batch, _, _ in self._rows]
        entries["size"] = [size for _, size, _ in self._rows]
        entries["crc"] = [crc for _, _, crc in self._rows]
        skipped = [batch.gap.stop - batch.gap.start if batch.gap is not None else 0 for batch, _, _ in self._rows]
        batches = entries["kind"] == BATCH_KIND
        entries["location"] = np.where(batches, [batch.crc for batch, _, _ in self._rows], skipped)
        entries["flags"] = np.where(batches, FROM_TABLE, [batch.flags for batch, _, _ in self._rows])
        seal(entries)
        next_index = self._next if reached is None else max(self._next, reached)
        return FetchResult(entries, self._payloads, next_index, 0, self._gap)
