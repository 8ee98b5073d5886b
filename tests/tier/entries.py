"""Batches made by hand for tests of the tier."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from embarcadero.client.encoding import encoded
from embarcadero.client.results import Batch, OrderEntry
from embarcadero.types import EntryKind, Gap, GapKind
from embarcadero.wire.codec import payload_crc
from embarcadero.wire.schemas import RAW, TopicSchemas, raw_batch


def entry(index: int, seq: int, **fields: int) -> OrderEntry:
    """An order entry; omitted fields are 0."""
    return OrderEntry(**{**dict.fromkeys(OrderEntry._fields, 0), "index": index, "seq": seq, **fields})


def batch_of(
    data: pa.RecordBatch, index: int, seq: int, schemas: TopicSchemas = RAW, payload: bytes | None = None, **fields: int
) -> Batch:
    """A batch with these rows."""
    sent: Any = encoded(data, None) if payload is None else payload
    facts: dict[str, int] = {
        "kind": EntryKind.BATCH, "count": data.num_rows, "size": len(sent), "crc": payload_crc(sent),
        "append_us": 1_700_000_000_000_000 + index, "session": 3, "session_seq": index, "schema": schemas.version,
    }  # fmt: skip
    return Batch.of_entry(0, entry(index, seq, **{**facts, **fields}), sent, {}, schemas)


def control_of(index: int, seq: int, kind: EntryKind, **fields: int) -> Batch:
    """An entry without records; `location` of a SKIP is how many sequences it skips."""
    facts = {"append_us": 1_700_000_000_000_000 + index, **fields}
    return Batch.of_entry(0, entry(index, seq, kind=kind, **facts), b"", {})


def hole(start: int, stop: int, kind: GapKind = GapKind.LOST) -> Batch:
    """Positions without entries."""
    return Batch.of_gap(0, Gap(kind, start, stop), None)


def raw(values: Iterable[bytes], keys: Iterable[bytes | None] | None = None) -> pa.RecordBatch:
    """Raw records."""
    found = list(values)
    given = [None] * len(found) if keys is None else list(keys)
    return raw_batch(given, found, [{"trace": b"1"}] + [None] * (len(found) - 1), list(range(1, len(found) + 1)))
