"""Files of a topic's table: damaged Parquet, and our own footer in it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Final

import pyarrow as pa

from embarcadero.client.results import Batch, OrderEntry
from embarcadero.limits import MIB
from embarcadero.tier.columns import table_schema
from embarcadero.tier.parquet import FileSpan, SpanFooter, write_span
from embarcadero.tier.snapshots import TableFile
from embarcadero.tier.storage import Storage
from embarcadero.tier.table_reads import TopicTable
from embarcadero.types import LanePosition, Tier
from embarcadero.wire.codec import payload_crc
from embarcadero.wire.schemas import RAW
from embarcadero_proof.fuzz.mutate import mutated
from embarcadero_proof.fuzz.samples import entries_for, raw_payload
from embarcadero_proof.fuzz.scratch import folder
from embarcadero_proof.fuzz.target import Inputs, Target, agree

_COUNTS: Final = [3, 0, 5, 40]
_CHECK_CHARS: Final = 8


@cache
def _written() -> tuple[Path, Any, bytes]:
    """Write a real file of a table; return its path, its description, its bytes."""
    payloads = [raw_payload(count) if count else b"" for count in _COUNTS]
    entries = entries_for(payloads, _COUNTS)
    batches = [
        Batch.of_entry(0, OrderEntry._make(entry), payload, {}, RAW)
        for entry, payload in zip(entries.tolist(), payloads, strict=True)
    ]
    first, stop = 100, 100 + len(_COUNTS)
    span = FileSpan(lane=0, start=first, stop=stop, start_seq=1_000, stop_seq=1_000 + sum(_COUNTS))
    (folder() / "data").mkdir(exist_ok=True)
    facts = write_span(Storage({}), f"file://{folder()}", span, 1, RAW, [batches[:2], batches[2:]])
    path = Path(facts.paths[0].removeprefix("file://"))
    file = TableFile(facts.paths[0], facts.bytes, 0, first, stop, span.start_seq, span.stop_seq, facts.rows)
    return path, file, path.read_bytes()


class _Table(TopicTable):
    """A table of one file, without the metadata that would normally name it."""

    @property
    def schema(self) -> pa.Schema:
        """Columns of all tables of raw records."""
        return table_schema(RAW, control=True)


def _rows(columns: list[str]) -> pa.Table:
    tier = Tier(id="t", warehouse="w", table="t", frontiers={0: LanePosition(200, 2_000)})
    file = _written()[1]
    found = list(_Table(tier).file_rows(file, file.first_index, file.stop_index, columns))
    return pa.Table.from_batches(found) if found else None


@cache
def _truth() -> pa.Table:
    path, _, data = _written()
    path.write_bytes(data)
    return _rows(_COLUMNS)


_COLUMNS: Final = ["_index", "_seq", "_kind", "_session", "key", "value", "timestamp"]


def _other_footer(data: bytes) -> bool:
    """Return whether more than one byte of Parquet's footer differs. The footer has no checksum: it may name pages of
    another column, which are whole. A single wrong byte must be noticed."""
    whole = _written()[2]
    size = int.from_bytes(whole[-8:-4], "little") + 8
    mine, theirs = whole[-size:], data[-size:]
    return len(mine) != len(theirs) or sum(one != other for one, other in zip(mine, theirs, strict=True)) > 1


def _file(data: bytes) -> str:
    """Read the true rows, or raise a typed error that names the file."""
    _truth()
    _written()[0].write_bytes(data)
    found = _rows(_COLUMNS)
    if _other_footer(data):
        return "another footer"
    agree(found is not None and found.equals(_truth()), "rows that were never written")
    return "true rows"


def _footers() -> Inputs:
    made = SpanFooter(
        span=FileSpan(lane=0, start=1, stop=5, start_seq=10, stop_seq=50), rows=40, entries=4, hash="ab", schema="cd",
        groups=[(1, 2, 20), (3, 4, 20)],
    )  # fmt: skip
    return [made.seal().encode()]


def _mend_footer(data: bytes, _rng: Random) -> bytes:
    text = data[_CHECK_CHARS:]
    return f"{payload_crc(text):08x}".encode() + text


def _footer(data: bytes) -> str:
    found = SpanFooter.unseal(data, "x.parquet")
    agree(SpanFooter.unseal(found.seal().encode(), "x.parquet") == found, "a footer changes when it is written again")
    return f"{min(len(found.groups), 3)} groups"


def _mutate(data: bytes, rng: Random, pool: Inputs) -> bytes:
    """Change a file, half of the time in Parquet's own footer: the rest has checksums."""
    if rng.random() < 0.5 and len(data) > 12:
        size = int.from_bytes(data[-8:-4], "little")
        at = max(4, len(data) - 8 - size)
        return data[:at] + mutated(data[at:-8], rng, [data[at:]]) + data[-8:]
    return mutated(data, rng, pool)


TIER: Final = (
    Target("tier-files", "Parquet files of a topic's table", lambda: [_written()[2]], _file, _mutate,
           memory_bytes=128 * MIB),
    Target("tier-footers", "our own footer in a file of a table", _footers, _footer, mend=_mend_footer),
)  # fmt: skip
