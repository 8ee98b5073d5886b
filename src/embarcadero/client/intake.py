"""The way in: records of many callers become batches, in order. Thread-safe; no event loop, no sockets.

Records gather in one open builder per partition. A builder is sealed when it is full, or when it lingered long enough,
or on demand; sealed batches leave in the order of sealing. A record is one tuple in one list, so an exception between
two instructions (Ctrl-C) can't leave half a record behind. `pending_bytes` counts everything from `add` until its batch
is settled: that is the window, and whoever adds waits while it is full.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any

from embarcadero.client.futures import BatchResult, RecordFuture
from embarcadero.client.tables import by_partition, partition_of, pieces, raw_table
from embarcadero.client.waiting import Waitable
from embarcadero.errors import BadValue, EmbarcaderoError
from embarcadero.limits import RECORD_BYTES_MAX, RECORDS_PER_BATCH_MAX
from embarcadero.wire.payload import encode_batch, raw_batch

Record = tuple[bytes | None, bytes, Mapping[str, bytes] | None, int]
Headers = Mapping[str, bytes]

FRAME_OVERHEAD_BYTES = 8 * 1024
"""What an Arrow message adds to a batch's columns, at most."""
_RECORD_OVERHEAD_BYTES = 32  # offsets and time stamp
_HEADER_OVERHEAD_BYTES = 24
_NO_MORE = 1 << 62  # bytes of a sealed builder: whatever comes, it is full
_ANY = -1  # a partition that is chosen when the batch takes its place in the order
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


class Builder:
    """Records of one batch to be."""

    __slots__ = ("bytes", "opened_s", "partition", "records", "result", "sealed")

    def __init__(self, partition: int, result: BatchResult) -> None:
        self.partition, self.result = partition, result
        self.records: list[Record] = []
        self.bytes = 0
        self.sealed = False
        self.opened_s = time.monotonic()


class Sealed:
    """A batch that gets no more records. `cost` is what it takes of the window."""

    def __init__(self, records: list[Record], partition: int, result: BatchResult, count: int, cost: int) -> None:
        self.partition, self.result, self.count, self.cost = partition, result, count, cost
        self._records = records

    @cached_property
    def payload(self) -> memoryview:
        """Its bytes, encoded when first asked for: in the event loop's thread, not in the caller's."""
        records, self._records = self._records, []
        keys, values, headers, times = zip(*records, strict=True)
        return memoryview(encode_batch(raw_batch(keys, values, headers, times)))

    @property
    def size(self) -> int:
        """Bytes of its payload."""
        return self.payload.nbytes


class Intake:
    """Gathers records into batches for one publisher."""

    def __init__(
        self,
        *,
        partitions: int,
        batch_bytes: int,
        frame_bytes_max: int,
        window_bytes: int,
        future: type[RecordFuture] = RecordFuture,
    ) -> None:
        self._future = future
        self.condition = Waitable()
        self.lock = self.condition.lock
        self.sealed_total = 0  # batches sealed so far: each takes one sequence of the session
        self._partitions = partitions
        self._payload_bytes_max = frame_bytes_max
        self._batch_bytes = min(batch_bytes, frame_bytes_max - FRAME_OVERHEAD_BYTES)
        self._record_bytes_max = min(RECORD_BYTES_MAX, frame_bytes_max - FRAME_OVERHEAD_BYTES)
        self.window_bytes = window_bytes
        self._open: dict[int, Builder] = {}
        self._keyless = 0  # partition of records without a key; moves on with each batch
        self._sealed: deque[Sealed] = deque()
        self.unsettled: dict[BatchResult, None] = {}
        self.pending_bytes = 0
        self.news = False  # a batch was begun or sealed since the event loop was last told
        self.refusal: EmbarcaderoError | None = None  # why nothing more is taken

    # --- all below: call with `lock` held; `condition` is where to wait, without it ---
    @property
    def full(self) -> bool:
        """Whether adding has to wait."""
        return self.pending_bytes >= self.window_bytes and self.refusal is None

    @property
    def gathering(self) -> bool:
        """Whether any record waits for its batch to be sealed."""
        return bool(self._open)

    def add(self, record: Record, size: int) -> RecordFuture:
        """Put a record into its batch, as the last one. Every record comes through here: it is written to be quick."""
        builder = self._open.get(0 if self._partitions == 1 else self._partition_for(record[0]))
        if builder is None or builder.bytes + size > self._batch_bytes:
            builder = self._next_builder(record[0], builder)
        builder.bytes += size
        self.pending_bytes += size
        records = builder.records
        number = len(records)
        records.append(record)
        if builder.bytes >= self._batch_bytes or number + 1 >= RECORDS_PER_BATCH_MAX:
            self._seal(builder)
        return self._future(builder.result, number)

    def _partition_for(self, key: bytes | None) -> int:
        return self._keyless if key is None else partition_of(key, self._partitions)

    def _next_builder(self, key: bytes | None, full: Builder | None) -> Builder:
        """A builder with room; sealing the full one may have moved keyless records on to another partition."""
        if full is not None:
            self._seal(full)
        partition = self._partition_for(key)
        builder = self._open.get(partition)
        if builder is None:
            builder = self._open[partition] = Builder(partition, BatchResult(self.condition))
            self.unsettled[builder.result] = None
            self.news = True
        return builder

    def _seal(self, builder: Builder) -> None:
        """Ctrl-C may end any call here: what is done again next time loses no batch and queues none twice."""
        records = builder.records
        self.news = True
        if not records:  # interrupted before its first record
            self.unsettled.pop(builder.result, None)
            self.pending_bytes, builder.bytes = self.pending_bytes - builder.bytes, 0
        elif not builder.sealed:
            sealed = Sealed(records, builder.partition, builder.result, len(records), builder.bytes)
            builder.sealed, builder.bytes = True, _NO_MORE
            self.sealed_total += 1
            self._sealed.append(sealed)
        if self._open.pop(builder.partition, None) is not None and builder.partition == self._keyless:
            self._keyless = (self._keyless + 1) % self._partitions

    def seal(self, opened_before_s: float = float("inf")) -> None:
        """Seal builders that were opened before a time; all of them by default."""
        for builder in [b for b in self._open.values() if b.opened_s <= opened_before_s]:
            self._seal(builder)

    def oldest_s(self) -> float | None:
        """When the oldest open builder was opened."""
        return min((builder.opened_s for builder in self._open.values()), default=None)

    def add_piece(self, piece: Sealed) -> None:
        """Put a piece of a table behind everything added before."""
        self.seal()
        if piece.partition == _ANY:
            piece.partition, self._keyless = self._keyless, (self._keyless + 1) % self._partitions
        self.pending_bytes += piece.cost
        self.unsettled[piece.result] = None
        self.news = True
        self.sealed_total += 1
        self._sealed.append(piece)

    @property
    def has_sealed(self) -> bool:
        """Whether there is something to take."""
        return bool(self._sealed)

    def take_sealed(self) -> list[Sealed]:
        """All sealed batches, in order."""
        sealed, self._sealed = self._sealed, deque()
        return list(sealed)

    def settled(self, sealed: Sealed) -> None:
        """A batch was settled: its bytes are free again."""
        self.pending_bytes -= sealed.cost
        self.unsettled.pop(sealed.result, None)
        self.condition.notify_all()

    # --- no lock needed ---
    def checked(self, value: Any, key: Any, headers: Any, timestamp: Any) -> tuple[Record, int]:
        """A record, and how many bytes it counts for. BadValue before anything is sent."""
        if type(value) is not bytes:
            value = _bytes("value", value)
        size = len(value)
        if key is not None:
            if type(key) is not bytes:
                key = _bytes("key", key)
            size += len(key)
        if headers is not None:
            headers = dict(headers) if isinstance(headers, Mapping) else headers  # the caller may go on changing it
            size += _headers_size(headers)
        if size > self._record_bytes_max:
            raise BadValue(f"a record of {size} bytes", f"records have at most {self._record_bytes_max} bytes")
        when = time.time_ns() // 1000 if timestamp is None else _microseconds(timestamp)
        return (key, value, headers, when), size + _RECORD_OVERHEAD_BYTES

    def pieces(self, data: Any, partition: int | None) -> Iterator[Sealed]:
        """A table as sealed batches, one by one, so that a large one needs no second copy of itself."""
        if partition is not None and not 0 <= partition < self._partitions:
            raise BadValue(f"partition {partition} of {self._partitions}", f"use 0 to {self._partitions - 1}")
        table = raw_table(data, time.time_ns() // 1000)
        groups = by_partition(table, self._partitions) if partition is None else [(partition, table)]
        for group, rows in groups:
            for piece, payload in pieces(rows, self._payload_bytes_max):
                place = _ANY if group is None else group
                sealed = Sealed([], place, BatchResult(self.condition), piece.num_rows, payload.size)
                sealed.payload = memoryview(payload)  # fills the cached property
                yield sealed


def _bytes(what: str, value: Any) -> bytes:
    if isinstance(value, bytearray | memoryview | bytes):
        return bytes(value)
    hint = "encode it: text.encode()" if isinstance(value, str) else "keys and values are bytes"
    raise BadValue(f"the {what} of a record is {type(value).__name__}, not bytes", hint)


def _headers_size(headers: Any) -> int:
    if not isinstance(headers, Mapping):
        raise BadValue(f"headers are {type(headers).__name__}", "headers map str to bytes")
    size = 0
    for name, value in headers.items():
        if not isinstance(name, str) or not isinstance(value, bytes):
            raise BadValue(f"header {name!r}: {type(value).__name__}", "headers map str to bytes")
        size += len(name.encode()) + len(value) + _HEADER_OVERHEAD_BYTES
    return size


def _microseconds(timestamp: Any) -> int:
    if isinstance(timestamp, datetime):
        if timestamp.tzinfo is None:
            raise BadValue("a timestamp without a time zone", "use datetime.now(UTC)")
        return (timestamp - _EPOCH) // _MICROSECOND
    if isinstance(timestamp, int) and -(1 << 63) <= timestamp < 1 << 63:
        return timestamp
    raise BadValue(f"timestamp {timestamp!r}", "use a datetime with a time zone, or microseconds since 1970")
