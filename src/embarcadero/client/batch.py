"""A batch as a reader gets it: where it is in the log, who wrote it, and its records, decoded only when asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import pyarrow as pa

from embarcadero.fabric.layout import ORDER
from embarcadero.invariants import invariant
from embarcadero.types import NO_INDEX, NO_SESSION, EntryKind, Gap, GapKind
from embarcadero.wire.payload import RAW_SCHEMA, decode_batch

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


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


class Record(NamedTuple):
    """One record of a batch."""

    seq: int
    key: bytes | None
    value: bytes
    headers: dict[str, bytes] | None
    timestamp: datetime


class Batch:
    """An immutable batch, or (when `gap` is set) a typed hole with no records.

    `session` and `session_seq` name the publisher's stream and the batch's number in it; `append_time` was set by the
    lane's writer and never goes back; `broker` is the broker that took the batch in.
    """

    __slots__ = (
        "_append_us", "_arrow", "broker", "count", "gap", "index", "lane", "partition", "payload", "seq", "session",
        "session_seq",
    )  # fmt: skip

    def __init__(self, lane: int, entry: OrderEntry, payload: Any, gap: Gap | None, brokers: Mapping[int, int]) -> None:
        self.lane, self.index, self.seq, self.count = lane, entry.index, entry.seq, entry.count
        self.session, self.session_seq, self.partition = entry.session, entry.session_seq, entry.partition
        self.broker = brokers.get(entry.origin, entry.origin)
        self.payload, self.gap = payload, gap
        self._append_us = entry.append_us
        self._arrow: pa.RecordBatch | None = None

    @classmethod
    def of_entry(cls, lane: int, entry: OrderEntry, payload: Any, brokers: Mapping[int, int]) -> Batch:
        """The batch of an order entry; a SKIP becomes a gap."""
        if entry.kind != EntryKind.SKIP:
            return cls(lane, entry, payload, None, brokers)
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
        return _EPOCH + timedelta(microseconds=self._append_us)

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
        """Its records as columns of wire.payload.RAW_SCHEMA, checked but not copied. A gap has none."""
        if self._arrow is None:
            if self.count:
                self._arrow = decode_batch(self.payload, RAW_SCHEMA, self.count, full=True)
            else:
                self._arrow = pa.RecordBatch.from_pylist([], schema=RAW_SCHEMA)
        return self._arrow

    def records(self) -> list[Record]:
        """Its records as named tuples."""
        if not self.count:
            return []
        key, value, headers, timestamp = self.to_arrow().columns
        seqs = range(self.seq, self.seq + self.count)
        return list(map(Record, seqs, _bytes(key), _bytes(value), _headers(headers), _times(timestamp)))

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records())

    def __len__(self) -> int:
        return self.count

    def __repr__(self) -> str:
        what = f"gap={self.gap}" if self.gap is not None else f"count={self.count}"
        return f"Batch(lane={self.lane}, index={self.index}, seq={self.seq}, {what})"


def _bytes(column: pa.Array) -> list[Any]:
    """Through numpy: several times faster than to_pylist."""
    found: list[Any] = column.to_numpy(zero_copy_only=False).tolist()
    return found


def _headers(column: pa.Array) -> list[dict[str, bytes] | None]:
    if column.null_count == len(column):
        return [None] * len(column)
    return [None if pairs is None else dict(pairs) for pairs in column.to_pylist()]


def _times(column: pa.Array) -> list[datetime]:
    return [_EPOCH + timedelta(0, 0, microseconds) for microseconds in column.view(pa.int64()).to_numpy().tolist()]
