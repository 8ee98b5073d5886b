"""Parquet files of a table: one span of one lane each, under a name that no other attempt uses.

A file tells in its name and in its footer which span it has. It is written whole, synced, and known to nobody until a
commit names it; what a crash leaves behind is garbage with a name that says so (gc.py).
"""

from __future__ import annotations

import re
import secrets
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from hashlib import blake2b
from itertools import chain
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from embarcadero.client.batch import Batch
from embarcadero.errors import BadTable, Corrupt, EmbarcaderoError, Trimmed
from embarcadero.limits import KIB, RECORDS_PER_BATCH_MAX, TIER_GROUP_DECODED_BYTES, TIER_ROW_GROUP_BYTES
from embarcadero.tier.columns import EntriesHash, rows, table_schema
from embarcadero.tier.storage import Storage, typed_errors
from embarcadero.types import GapKind
from embarcadero.wire.codec import payload_crc
from embarcadero.wire.schemas import TopicSchemas

_NAME: Final = re.compile(r"(\d+)-(\d+)-(\d+)-(\d+)-(\d+)-(\d+)-[0-9a-f]{16}\.parquet")
_FOOTER: Final = b"embarcadero"
_PIECE_BYTES: Final = 256 * KIB
_PIECE_BATCHES: Final = 1_024


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Batches [start, stop) of a lane, which are its records [start_seq, stop_seq)."""

    lane: int
    start: int
    stop: int
    start_seq: int
    stop_seq: int


class FileFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A file that was written: its span, where it is (nowhere, if the span has no entries), and what is in it."""

    span: Span
    path: str
    rows: int = 0
    entries: int = 0
    bytes: int = 0
    hash: str = ""


class Footer(msgspec.Struct, frozen=True, kw_only=True):
    """What a file says about itself, with a checksum: Parquet's own footer has none, and readers rely on it."""

    span: Span
    rows: int
    entries: int
    hash: str  # of the entries: columns.EntriesHash
    groups: list[tuple[int, int, int]]  # row groups: first and last index, rows
    schema: str  # a digest of the file's columns and types
    decoded: list[int] = []  # bytes of the columns of each row group, decoded; older files do not tell

    def seal(self) -> str:
        """As text, behind its checksum."""
        text = msgspec.json.encode(self)
        return f"{payload_crc(text):08x}{text.decode()}"

    @classmethod
    def unseal(cls, sealed: bytes, path: str) -> Footer:
        """The footer in such a text. BadTable, if it is not what was written."""
        try:
            if int(sealed[:8], 16) != payload_crc(sealed[8:]):
                raise ValueError("its checksum differs")
            return msgspec.json.decode(sealed[8:], type=cls)
        except (ValueError, msgspec.MsgspecError) as error:
            raise BadTable(f"the footer of {path} is damaged: {error}", "restore it from a copy") from None


def schema_digest(schema: pa.Schema) -> str:
    """A short text that is another one for other columns or types."""
    return blake2b(str(schema.remove_metadata()).encode(), digest_size=8).hexdigest()


def read_footer(parquet: pq.ParquetFile, path: str) -> Footer | None:
    """What a file of ours says about itself, checked against Parquet's own footer; None for the files of others."""
    sealed = (parquet.metadata.metadata or {}).get(_FOOTER)
    if sealed is None:
        if span_of(path) is not None:
            raise BadTable(f"the footer of {path} is damaged: it lacks our part", "restore it from a copy")
        return None
    footer, facts = Footer.unseal(sealed, path), parquet.metadata
    counts = [facts.row_group(number).num_rows for number in range(facts.num_row_groups)]
    names_match = footer.schema == schema_digest(parquet.schema_arrow)
    sizes_match = len(footer.decoded) in (0, len(counts))
    counts_match = counts == [rows for _, _, rows in footer.groups] and sum(counts) == facts.num_rows
    if not (names_match and sizes_match and counts_match):
        raise BadTable(f"the footer of {path} is damaged: it contradicts itself", "restore it from a copy")
    return footer


def data_folder(location: str) -> str:
    """Where a table has its files."""
    return f"{location.rstrip('/')}/data"


def new_path(location: str, span: Span, epoch: int) -> str:
    """A name for a file of a table that no other attempt uses."""
    numbers = (span.lane, span.start, span.stop, span.start_seq, span.stop_seq, epoch)
    return f"{data_folder(location)}/{'-'.join(map(str, numbers))}-{secrets.token_hex(8)}.parquet"


def span_of(path: str) -> Span | None:
    """The span that a file's name tells; None for files that are not ours."""
    found = _NAME.fullmatch(path.rsplit("/", 1)[-1])
    if found is None:
        return None
    lane, start, stop, start_seq, stop_seq, _ = map(int, found.groups())
    return Span(lane=lane, start=start, stop=stop, start_seq=start_seq, stop_seq=stop_seq)


def write_span(
    storage: Storage, location: str, span: Span, epoch: int, schemas: TopicSchemas, scan: Iterable[list[Batch]]
) -> FileFacts:
    """Write what a scan of a span gives into one new file, and have it on disk. The lists of the scan are emptied.

    Raises Trimmed if a part of the span is gone, Corrupt if the scan is not exactly the span. Nothing is left behind
    then; what a crash leaves behind is collected later.
    """
    path, digest = new_path(location, span, epoch), EntriesHash()
    written: list[tuple[int, int, int]] = []
    decoded: list[int] = []
    groups = _row_groups(span, schemas, scan)
    first = next(groups, None)
    if first is None:
        return FileFacts(span=span, path="")
    stream = storage.create(path)
    try:
        with typed_errors(path), stream, _writer(stream, schemas) as writer:
            for group in chain([first], groups):
                for piece in group:
                    digest.add(piece)
                count = sum(piece.num_rows for piece in group)
                writer.write_table(pa.Table.from_batches(group), row_group_size=count)
                written.append((_index_at(group[0], 0), _index_at(group[-1], -1), count))
                decoded.append(sum(piece.nbytes for piece in group))
            footer = Footer(
                span=span, rows=sum(count for _, _, count in written), entries=digest.entries, hash=digest.hex,
                groups=written, schema=schema_digest(_as_read(table_schema(schemas, control=True))), decoded=decoded,
            )  # fmt: skip
            writer.add_key_value_metadata({_FOOTER: footer.seal()})
    except BaseException:
        _abandon(storage, path)
        raise
    storage.sync([path])
    size = _size(storage, path)
    return FileFacts(span=span, path=path, rows=footer.rows, entries=footer.entries, bytes=size, hash=footer.hash)


def _as_read(schema: pa.Schema) -> pa.Schema:
    """The columns as a reader of the file sees them: what Parquet makes of Arrow's types."""
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, schema, store_schema=False):
        pass
    return pq.read_schema(pa.BufferReader(sink.getvalue()))


def _writer(stream: Any, schemas: TopicSchemas) -> pq.ParquetWriter:
    schema = table_schema(schemas, control=True)
    plain = {"_payload", "_seq"} if schemas.typed else {"_payload", "_seq", "value"}
    return pq.ParquetWriter(
        stream, schema, compression="zstd", write_statistics=True, write_page_checksum=True, store_schema=False,
        use_dictionary=[name for name in schema.names if name not in plain],
    )  # fmt: skip


def _abandon(storage: Storage, path: str) -> None:
    """What went wrong first is told; a file that can't be deleted is garbage that is found later."""
    with suppress(Exception):
        storage.delete(path)


def _size(storage: Storage, path: str) -> int:
    fs, inner = storage.place(path)
    with typed_errors(path):
        return int(fs.get_file_info(inner).size)


def _index_at(piece: pa.RecordBatch, row: int) -> int:
    return int(piece.column("_index")[row].as_py())


def _row_groups(span: Span, schemas: TopicSchemas, scan: Iterable[list[Batch]]) -> Iterator[list[pa.RecordBatch]]:
    """Rows of all entries of a span, in groups of a bounded size; the scan is checked to be the span.

    What counts is what a reader decodes, and not only payloads: one that is compressed, or whose values are equal, is
    small in a file and large in memory.
    """
    group: list[pa.RecordBatch] = []
    size = decoded = count = 0
    for held in _pieces(_checked(span, scan)):
        piece = rows(span.lane, held, schemas, control=True)
        if group and decoded + piece.nbytes > TIER_GROUP_DECODED_BYTES:
            yield group
            group, size, decoded, count = [], 0, 0, 0
        group.append(piece)
        size, decoded = size + sum(batch.size for batch in held), decoded + piece.nbytes
        count += piece.num_rows
        if size >= TIER_ROW_GROUP_BYTES or count >= RECORDS_PER_BATCH_MAX:
            yield group
            group, size, decoded, count = [], 0, 0, 0
    if group:
        yield group


def _pieces(batches: Iterable[Batch]) -> Iterator[list[Batch]]:
    """Small batches are made rows together, which costs a copy; large ones alone, which costs none."""
    held: list[Batch] = []
    size = 0
    for batch in batches:
        held.append(batch)
        size += _decoded_bytes(batch)
        if size >= _PIECE_BYTES or len(held) >= _PIECE_BATCHES:
            yield held
            held, size = [], 0
    if held:
        yield held


def _decoded_bytes(batch: Batch) -> int:
    """Bytes of a batch's records as columns; of its payload, if there are none or they can't be decoded."""
    if not batch.count:
        return batch.size
    try:
        return max(batch.size, int(batch.to_arrow().nbytes))
    except EmbarcaderoError:  # it is kept as it is, or whoever makes rows of it says what is wrong
        return batch.size


def _checked(span: Span, scan: Iterable[list[Batch]]) -> Iterator[Batch]:
    """The entries of a scan. Each index of the span comes once, or was lost; seqs are dense but for what was lost."""
    at, seq = span.start, span.start_seq
    lost = False
    for batches in scan:
        left = deque(batches)
        batches.clear()  # a batch that was decoded keeps its columns: nobody holds it once it is written
        while left:
            batch = left.popleft()
            if batch.gap is not None and batch.gap.kind is not GapKind.SKIPPED:
                if batch.gap.kind is GapKind.END_OF_LANE:
                    continue
                if batch.gap.kind is GapKind.TRIMMED or batch.gap.start > at:
                    raise Trimmed(f"batches {batch.gap.start} to {batch.gap.stop} of {span} are gone", "plan again")
                at, lost = batch.gap.stop, True
                continue
            if batch.index != at or (batch.seq < seq if lost else batch.seq != seq) or at >= span.stop:
                raise Corrupt(f"{batch!r} where index {at}, seq {seq} of {span} should be", "report it: this is a bug")
            at, seq, lost = at + 1, batch.seq + batch.count, False
            yield batch
    if at != span.stop or (seq > span.stop_seq if lost else seq != span.stop_seq):
        raise Corrupt(f"{span} was read up to index {at}, seq {seq}", "report it: this is a bug")
