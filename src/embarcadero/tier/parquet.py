"""Parquet files of a table: each has one span of one lane, and a name that no other attempt uses.

The name of a file and its footer contain its span. A file is written and synced before a commit adds it to the table.
Files of a crashed attempt are garbage, which their names reveal (table.py).
"""

from __future__ import annotations

import re
import secrets
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from hashlib import blake2b
from typing import Any, Final, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from embarcadero.client.results import Batch
from embarcadero.errors import BadTable, Corrupt, EmbarcaderoError, Trimmed
from embarcadero.limits import KIB, RECORDS_PER_BATCH_MAX, TIER_GROUP_DECODED_BYTES, TIER_ROW_GROUP_BYTES
from embarcadero.tier.columns import (
    EntriesHash,
    Layout,
    day_of,
    entries_file,
    entries_schema,
    file_schema,
    records_file,
    rows,
    split,
)
from embarcadero.tier.storage import Storage, typed_errors
from embarcadero.types import GapKind
from embarcadero.wire.codec import payload_crc
from embarcadero.wire.schemas import TopicSchemas

_NAME: Final = re.compile(r"(\d+)-(\d+)-(\d+)-(\d+)-(\d+)-(\d+)-[0-9a-f]{16}\.parquet")
_FOOTER: Final = b"embarcadero"
_PIECE_BYTES: Final = 256 * KIB
_PIECE_BATCHES: Final = 1_024


class FileSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Batches [start, stop) of a lane, with records [start_seq, stop_seq)."""

    lane: int
    start: int
    stop: int
    start_seq: int
    stop_seq: int


class FileFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The files of a span (none if the span has no entries), and their contents.

    `paths` are files of the topic's table, one for each day; `entries_path` is the file of control entries, if any. If
    one table has everything, `rows` includes control entries.
    """

    span: FileSpan
    paths: list[str] = []
    entries_path: str = ""
    rows: int = 0
    entries: int = 0
    bytes: int = 0

    @property
    def written(self) -> bool:
        """Whether there are files to commit."""
        return bool(self.paths or self.entries_path)


class SpanFooter(msgspec.Struct, frozen=True, kw_only=True):
    """Our part of a file's footer, with a checksum: Parquet's own footer has none, and readers rely on it."""

    span: FileSpan
    rows: int
    entries: int
    hash: str  # the hash of the entries: columns.EntriesHash
    groups: list[tuple[int, int, int]]  # row groups: first and last index, rows
    schema: str  # a digest of the file's columns and types
    decoded: list[int] = []  # bytes of the columns of each row group, decoded; older files lack it

    def seal(self) -> str:
        """Encode it as text, after its checksum."""
        text = msgspec.json.encode(self)
        return f"{payload_crc(text):08x}{text.decode()}"

    @classmethod
    def unseal(cls, sealed: bytes, path: str) -> SpanFooter:
        """Decode such a text. BadTable if it is damaged."""
        try:
            if int(sealed[:8], 16) != payload_crc(sealed[8:]):
                raise ValueError("its checksum differs")
            return msgspec.json.decode(sealed[8:], type=cls)
        except (ValueError, msgspec.MsgspecError) as error:
            raise BadTable(f"the footer of {path} is damaged: {error}", "restore it from a copy") from None


def schema_digest(schema: pa.Schema) -> str:
    """A short digest of columns and types."""
    return blake2b(str(schema.remove_metadata()).encode(), digest_size=8).hexdigest()


def read_footer(parquet: pq.ParquetFile, path: str) -> SpanFooter | None:
    """Read our part of the footer, and check it against Parquet's own; None for files of other programs."""
    sealed = (parquet.metadata.metadata or {}).get(_FOOTER)
    if sealed is None:
        if span_of(path) is not None:
            what = f"the footer of {path} is damaged: Embarcadero's part is missing"
            raise BadTable(what, "restore it from a copy")
        return None
    footer, facts = SpanFooter.unseal(sealed, path), parquet.metadata
    counts = [facts.row_group(number).num_rows for number in range(facts.num_row_groups)]
    names_match = footer.schema == schema_digest(parquet.schema_arrow)
    sizes_match = len(footer.decoded) in (0, len(counts))
    counts_match = counts == [rows for _, _, rows in footer.groups] and sum(counts) == facts.num_rows
    if not (names_match and sizes_match and counts_match):
        raise BadTable(f"the footer of {path} is damaged: it contradicts itself", "restore it from a copy")
    return footer


def data_folder(location: str) -> str:
    """The folder of a table's data files."""
    return f"{location.rstrip('/')}/data"


def new_path(location: str, span: FileSpan, epoch: int) -> str:
    """Make a path for a file of a table that no other attempt uses."""
    numbers = (span.lane, span.start, span.stop, span.start_seq, span.stop_seq, epoch)
    return f"{data_folder(location)}/{'-'.join(map(str, numbers))}-{secrets.token_hex(8)}.parquet"


def span_of(path: str) -> FileSpan | None:
    """The span in a file's name; None for files of other programs."""
    found = _NAME.fullmatch(path.rsplit("/", 1)[-1])
    if found is None:
        return None
    lane, start, stop, start_seq, stop_seq, _ = map(int, found.groups())
    return FileSpan(lane=lane, start=start, stop=stop, start_seq=start_seq, stop_seq=stop_seq)


def write_span(
    storage: Storage,
    location: str,
    span: FileSpan,
    epoch: int,
    schemas: TopicSchemas,
    scan: Iterable[list[Batch]],
    entries_location: str = "",
) -> FileFacts:
    """Write the scan of a span to new files, and sync them. This empties the lists of the scan.

    With `entries_location` (of the table of control entries), records and control entries go to separate files, with a
    file for each day. Without it, one file has everything.

    Raises Trimmed if a part of the span was removed, Corrupt if the scan does not match the span. Then no files remain;
    files of a crashed attempt are garbage-collected later.
    """
    writer = _SpanWriter(_SpanTarget(storage, location, entries_location, epoch), span, schemas)
    try:
        for held in _pieces(_checked(span, scan), by_day=bool(entries_location)):
            writer.add(held)
        return writer.finish()
    except BaseException:
        writer.abandon()
        raise


class _SpanFile:
    """A file in progress, written row group by row group. `span` is in its name, and starts at its first row."""

    def __init__(self, storage: Storage, location: str, span: FileSpan, epoch: int, schema: pa.Schema) -> None:
        self.storage, self.schema, self.span = storage, schema, span
        self.path = new_path(location, span, epoch)
        self._groups: list[tuple[int, int, int]] = []
        self._decoded: list[int] = []
        self._waiting: list[pa.RecordBatch] = []
        self._size = self._bytes = self._count = 0  # of waiting rows: bytes of payloads, decoded bytes, number
        self._stream: Any = None
        self._writer: pq.ParquetWriter | None = None

    @property
    def rows(self) -> int:
        """The number of rows so far."""
        return sum(count for _, _, count in self._groups) + self._count

    def add(self, piece: pa.RecordBatch, payload_bytes: int) -> None:
        """Add rows of whole batches. A row group is written when it is large enough.

        The decoded size counts as well as the payloads: a group with compressed or equal values is small in the file
        and large in memory.
        """
        if self._waiting and self._bytes + piece.nbytes > TIER_GROUP_DECODED_BYTES:
            self._flush()
        self._waiting.append(piece)
        self._size, self._bytes = self._size + payload_bytes, self._bytes + piece.nbytes
        self._count += piece.num_rows
        if self._size >= TIER_ROW_GROUP_BYTES or self._count >= RECORDS_PER_BATCH_MAX:
            self._flush()

    def _flush(self) -> None:
        group = self._waiting
        if not group:
            return
        with typed_errors(self.path):
            if self._writer is None:
                self._stream = self.storage.create(self.path)
                self._writer = _writer(self._stream, self.schema)
            self._writer.write_table(pa.Table.from_batches(group), row_group_size=self._count)
        self._groups.append((_index_at(group[0], 0), _index_at(group[-1], -1), self._count))
        self._decoded.append(self._bytes)
        self._waiting, self._size, self._bytes, self._count = [], 0, 0, 0

    def close(self, span: FileSpan, digest: EntriesHash) -> int:
        """Write the footer, sync the file, and return its size. `digest`: the hash of all entries of `span`."""
        self._flush()
        footer = SpanFooter(
            span=span,
            rows=self.rows,
            entries=digest.entries,
            hash=digest.hex,
            groups=self._groups,
            schema=schema_digest(_as_read(self.schema)),
            decoded=self._decoded,
        )
        with typed_errors(self.path):
            if self._writer is not None:
                self._writer.add_key_value_metadata({_FOOTER: footer.seal()})
                self._writer.close()
                self._stream.close()
        self.storage.sync([self.path])
        return _size(self.storage, self.path)

    def abandon(self) -> None:
        """Delete the file. Errors are ignored: the first error is reported, and a remaining file is collected later."""
        with suppress(Exception):
            if self._writer is not None:
                self._writer.close()
            if self._stream is not None:
                self._stream.close()
        with suppress(Exception):
            self.storage.delete(self.path)


class _SpanTarget(NamedTuple):
    """The target of a span's files. `entries_location`: of the table of control entries; empty if there is none."""

    storage: Storage
    location: str
    entries_location: str
    epoch: int


class _SpanWriter:
    """Writes the files of one span: a file of records for each day, and one of control entries; or a single file."""

    def __init__(self, target: _SpanTarget, span: FileSpan, schemas: TopicSchemas) -> None:
        self._target, self._span, self._schemas = target, span, schemas
        self._layout = Layout.SPLIT if target.entries_location else Layout.WHOLE
        self._files: list[_SpanFile] = []
        self._records: _SpanFile | None = None  # the current file of records
        self._entries = (
            _SpanFile(target.storage, target.entries_location, span, target.epoch, entries_schema())
            if target.entries_location
            else None
        )
        self._day: int | None = None  # the day of the records in the current file
        self._at = span.start, span.start_seq  # the start of the next file
        self._digest, self._entries_digest = EntriesHash(), EntriesHash()
        self._total = self._bytes = 0

    def add(self, held: list[Batch]) -> None:
        """Add entries of one day, in order."""
        found = rows(self._span.lane, held, self._schemas, control=True)
        size = sum(batch.size for batch in held)
        if self._entries is None:
            self._digest.add(found)
            self._file().add(found, size)
            return
        records, entries = split(found)
        if records.num_rows:
            self._begin_day(held)
            self._file().add(records_file(records), size)
        if entries.num_rows:
            self._entries.add(entries_file(entries), 0)
            self._entries_digest.add(entries)
        self._digest.add(found)

    def _begin_day(self, held: list[Batch]) -> None:
        """Begin a new file if these records are of another day than the previous ones."""
        day = day_of(next(batch.append_us for batch in held if batch.count))
        if self._day is not None and day != self._day:
            self._end_file(held[0].index, held[0].seq)
        self._day = day

    def _file(self) -> _SpanFile:
        if self._records is None:
            start, start_seq = self._at
            span = msgspec.structs.replace(self._span, start=start, start_seq=start_seq)
            schema = file_schema(self._schemas, self._layout)
            self._records = _SpanFile(self._target.storage, self._target.location, span, self._target.epoch, schema)
            self._files.append(self._records)
        return self._records

    def _end_file(self, stop: int, stop_seq: int) -> None:
        if self._records is not None:
            span = msgspec.structs.replace(self._records.span, stop=stop, stop_seq=stop_seq)
            self._bytes += self._records.close(span, self._digest)
            self._at, self._records = (stop, stop_seq), None
            self._total += self._digest.entries
            self._digest = EntriesHash()

    def finish(self) -> FileFacts:
        """Close all files after the last entry of the span."""
        self._end_file(self._span.stop, self._span.stop_seq)
        total, entries_path = self._total + self._digest.entries, ""
        if self._entries is not None and self._entries.rows:
            self._bytes += self._entries.close(self._span, self._entries_digest)
            entries_path = self._entries.path
        return FileFacts(
            span=self._span,
            paths=[file.path for file in self._files],
            entries_path=entries_path,
            rows=sum(file.rows for file in self._files),
            entries=total,
            bytes=self._bytes,
        )

    def abandon(self) -> None:
        """Delete all files of the span."""
        for file in [*self._files, *([] if self._entries is None else [self._entries])]:
            file.abandon()


def _as_read(schema: pa.Schema) -> pa.Schema:
    """The columns that a reader of the file gets, after Parquet's conversion of Arrow types."""
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, schema, store_schema=False):
        pass
    return pq.read_schema(pa.BufferReader(sink.getvalue()))


def _writer(stream: Any, schema: pa.Schema) -> pq.ParquetWriter:
    values = {field.name for field in schema if field.name == "value" and pa.types.is_binary(field.type)}
    plain = {"_payload", "_seq"} | values
    return pq.ParquetWriter(
        stream,
        schema,
        compression="zstd",
        write_statistics=True,
        write_page_checksum=True,
        store_schema=False,
        use_dictionary=[name for name in schema.names if name not in plain],
    )


def _size(storage: Storage, path: str) -> int:
    fs, inner = storage.place(path)
    with typed_errors(path):
        return int(fs.get_file_info(inner).size)


def _index_at(piece: pa.RecordBatch, row: int) -> int:
    return int(piece.column("_index")[row].as_py())


def _pieces(batches: Iterable[Batch], *, by_day: bool) -> Iterator[list[Batch]]:
    """Group batches for conversion: small batches together, which needs a copy; large ones alone, without a copy.

    `by_day`: records of different days are in different lists.
    """
    held: list[Batch] = []
    size = 0
    day: int | None = None
    for batch in batches:
        if by_day and batch.count:
            before, day = day, day_of(batch.append_us)
            if held and before is not None and day != before:
                yield held
                held, size = [], 0
        held.append(batch)
        size += _decoded_bytes(batch)
        if size >= _PIECE_BYTES or len(held) >= _PIECE_BATCHES:
            yield held
            held, size = [], 0
    if held:
        yield held


def _decoded_bytes(batch: Batch) -> int:
    """The decoded size of a batch's records; the size of its payload if it has none or cannot be decoded."""
    if not batch.count:
        return batch.size
    try:
        return max(batch.size, int(batch.to_arrow().nbytes))
    except EmbarcaderoError:  # the conversion to rows keeps the payload, or raises the error
        return batch.size


def _checked(span: FileSpan, scan: Iterable[list[Batch]]) -> Iterator[Batch]:
    """Yield the entries of a scan, and check them: each index of the span once, or lost; seqs dense, except losses."""
    at, seq = span.start, span.start_seq
    lost = False
    for batches in scan:
        left = deque(batches)
        batches.clear()  # a decoded batch keeps its columns: release it once it is written
        while left:
            batch = left.popleft()
            if batch.gap is not None and batch.gap.kind is not GapKind.SKIPPED:
                if batch.gap.kind is GapKind.END_OF_LANE:
                    continue
                if batch.gap.kind is GapKind.TRIMMED or batch.gap.start > at:
                    raise Trimmed(f"batches {batch.gap.start} to {batch.gap.stop} of {span} were removed", "plan again")
                at, lost = batch.gap.stop, True
                continue
            if batch.index != at or (batch.seq < seq if lost else batch.seq != seq) or at >= span.stop:
                what = f"the scan has {batch!r} instead of index {at}, seq {seq} of {span}"
                raise Corrupt(what, "report it: this is a bug")
            at, seq, lost = at + 1, batch.seq + batch.count, False
            yield batch
    if at != span.stop or (seq > span.stop_seq if lost else seq != span.stop_seq):
        raise Corrupt(f"the scan of {span} ended at index {at}, seq {seq}", "report it: this is a bug")
