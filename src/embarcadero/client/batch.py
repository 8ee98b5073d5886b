"""A batch as a reader gets it: where it is in the log, who wrote it, and its records, decoded only when asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from itertools import repeat
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa

from embarcadero.errors import BadValue, Corrupt
from embarcadero.fabric.layout import ORDER
from embarcadero.invariants import invariant
from embarcadero.types import NO_INDEX, NO_SESSION, EntryKind, Gap, GapKind
from embarcadero.wire.payload import decode_batch
from embarcadero.wire.schemas import RAW, TopicSchemas

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_KINDS: list[EntryKind | None] = [EntryKind(number) if number in list(EntryKind) else None for number in range(256)]


class OrderEntry(NamedTuple):
    """An order entry as plain numbers; see fabric/layout.py."""

    index: int  # type: ignore[assignment]  # hides tuple.index
    seq: int
    session_seq: int
    append_us: int
    session: int
    location: int
    size: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    crc: int
    origin: int
    partition: int
    schema: int
    kind: int
    flags: int
    check: int


invariant(OrderEntry._fields == ORDER.names, "an OrderEntry has the fields of the layout")


class Record(msgspec.Struct, frozen=True, gc=False):
    """One record of a batch. In a topic with a schema `value` is the row as a dict, and there is no key or header.

    Made in C and unknown to the garbage collector, which would take most of the time when there are millions.
    """

    seq: int
    key: bytes | None
    value: Any
    headers: dict[str, bytes] | None
    timestamp_us: int  # microseconds since 1970

    @property
    def timestamp(self) -> datetime:
        """The publisher's time in UTC (with a schema: when the batch was ordered)."""
        return _datetime(self.timestamp_us)


class Batch:
    """An immutable batch, or (when `gap` is set) a typed hole with no records.

    `session` and `session_seq` name the publisher's stream and the batch's number in it; `append_time` (`append_us` in
    microseconds since 1970) was set by the lane's writer and never goes back; `broker` is the broker that took the
    batch in; `schema_version` is the version of the topic's schema that its publisher used (0: raw records); `crc` is
    the CRC32C of the payload. `kind` is the kind of its entry, None for a hole in the log itself. One who reads with
    control=True also gets the entries that open, fence and close sessions: no records, and fields as in their entry.
    """

    __slots__ = (
        "_arrow", "_schemas", "append_us", "broker", "count", "crc", "flags", "gap", "index", "kind", "lane",
        "partition", "payload", "schema_version", "seq", "session", "session_seq",
    )  # fmt: skip

    def __init__(
        self, lane: int, entry: OrderEntry, payload: Any, gap: Gap | None, brokers: Mapping[int, int],
        schemas: TopicSchemas = RAW,
    ) -> None:  # fmt: skip
        self.lane, self.index, self.seq, self.count = lane, entry.index, entry.seq, entry.count
        self.session, self.session_seq, self.partition = entry.session, entry.session_seq, entry.partition
        self.broker = brokers.get(entry.origin, entry.origin)
        self.payload, self.gap = payload, gap
        self.schema_version, self._schemas = entry.schema, schemas
        self.append_us, self.crc, self.flags, self.kind = entry.append_us, entry.crc, entry.flags, _KINDS[entry.kind]
        self._arrow: pa.RecordBatch | None = None

    @classmethod
    def of_entry(
        cls, lane: int, entry: OrderEntry, payload: Any, brokers: Mapping[int, int], schemas: TopicSchemas = RAW
    ) -> Batch:
        """The batch of an order entry; a SKIP becomes a gap."""
        if entry.kind != EntryKind.SKIP:
            return cls(lane, entry, payload, None, brokers, schemas)
        skipped = Gap(GapKind.SKIPPED, entry.session_seq, entry.session_seq + entry.location, entry.session)
        return cls(lane, entry, b"", skipped, brokers)

    @classmethod
    def of_gap(cls, lane: int, gap: Gap, seq: int | None) -> Batch:
        """A hole in the log itself; `seq` is where it begins, if known."""
        fields = dict.fromkeys(OrderEntry._fields, 0)
        fields |= {"index": gap.start, "seq": NO_INDEX if seq is None else seq, "session": NO_SESSION}
        return cls(lane, OrderEntry(**fields), b"", gap, {})

    @property
    def append_time(self) -> datetime:
        """When it was ordered, in UTC."""
        return _datetime(self.append_us)

    @property
    def size(self) -> int:
        """Bytes of its payload."""
        return len(self.payload)

    def seq_of(self, i: int) -> int:
        """The seq of its record number `i`."""
        if not 0 <= i < self.count:
            raise IndexError(f"record {i} of a batch of {self.count}")
        return self.seq + i

    def to_arrow(self) -> pa.RecordBatch:
        """Its records as columns of the newest schema that its reader knows; those added since are null.

        Fully checked once, so a hostile publisher can't harm whoever reads the columns; not copied unless compressed.
        A gap has no rows. Corrupt, if the payload is not what its entry says.

            batch.to_arrow().column("price")        # a pyarrow Array
        """
        if self._arrow is None:
            self._arrow = self._decoded()
        return self._arrow

    def _decoded(self) -> pa.RecordBatch:
        newest = self._schemas.newest
        if not self.count:
            return pa.RecordBatch.from_pylist([], schema=newest)
        schema = self._schemas.of(self.schema_version)
        batch = decode_batch(self.payload, schema, self.count, full=True)
        if len(schema) == len(newest):
            return batch
        added = list(newest)[len(schema) :]
        nulls = pa.nulls(self.count, pa.struct(added))  # its columns share their buffers
        columns = [*batch.columns, *map(nulls.field, range(len(added)))]
        return pa.RecordBatch.from_arrays(columns, schema=newest)

    def records(self) -> list[Record]:
        """Its records as objects, at a few million a second; `to_arrow` is far quicker still.

            for record in batch.records():
                print(record.seq, record.key, record.value, record.timestamp)
        """
        if not self.count:
            return []
        seqs = range(self.seq, self.seq + self.count)
        if self._schemas.typed:
            rows = self._rows()
            return list(map(Record, seqs, repeat(None), rows, repeat(None), repeat(self.append_us)))
        key, value, headers, timestamp = self.to_arrow().columns
        times = timestamp.view(pa.int64()).to_numpy().tolist()
        return list(map(Record, seqs, _bytes(key), _bytes(value), _headers(headers), times))

    def _rows(self) -> list[dict[str, Any]]:
        columns = self.to_arrow()
        try:
            found: list[dict[str, Any]] = columns.to_pylist()
        except (pa.ArrowException, ArithmeticError, ValueError, TypeError, LookupError, ImportError) as error:
            raise BadValue(f"{self!r} has a value that Python's types can't hold: {error}", "use to_arrow()") from None
        return found

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records())

    def __len__(self) -> int:
        return self.count

    def __repr__(self) -> str:
        what = f"gap={self.gap}" if self.gap is not None else f"count={self.count}"
        return f"Batch(lane={self.lane}, index={self.index}, seq={self.seq}, {what})"


def _bytes(column: pa.Array) -> Iterable[Any]:
    """Through numpy: several times faster than to_pylist."""
    if column.null_count == len(column):
        return repeat(None)
    found: list[Any] = column.to_numpy(zero_copy_only=False).tolist()
    return found


def _headers(column: pa.Array) -> Iterable[dict[str, bytes] | None]:
    if column.null_count == len(column):
        return repeat(None)
    return [None if pairs is None else dict(pairs) for pairs in column.to_pylist()]


def _datetime(microseconds: int) -> datetime:
    try:
        return _EPOCH + timedelta(0, 0, microseconds)
    except OverflowError:
        raise Corrupt(f"a time of {microseconds} us is beyond the years 1 to 9999", "see timestamp_us") from None
