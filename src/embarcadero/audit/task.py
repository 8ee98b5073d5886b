"""One task of an audit: read a span from wherever it is, look at it, and compare where there are two copies."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from embarcadero.audit.plan import AuditSpan, SpanReport
from embarcadero.audit.span import COLUMNS, Explained, SpanAudit
from embarcadero.client.batch import Batch
from embarcadero.client.sync import Log
from embarcadero.client.topics import TopicInfo
from embarcadero.errors import Corrupt, EmbarcaderoError
from embarcadero.tier.columns import rows
from embarcadero.tier.settings import parse_properties
from embarcadero.types import EntryKind, Gap, GapKind

_COMPARED_ROWS = 65_536


def look_at(log: Log, about: TopicInfo, span: AuditSpan) -> tuple[SpanReport, pa.RecordBatch]:
    """Look at a span. Whatever is wrong with it is in the report; only a bug raises."""
    lost = [*span.lane.lost, (span.start, span.stop)] if span.file else span.lane.lost
    audit = SpanAudit(span.lane.lane, span.start, span.stop, Explained(span.lane.start_index, lost))
    columns = None if span.table and span.log else list(COLUMNS)
    table = _table_rows(about, span, columns) if span.table else None
    held = _log_rows(log, about, span, columns)
    try:
        if table is None or not span.log:
            for part in held if table is None else table:
                _take(audit, part)
            _check_file(audit, about, span)
        else:
            _compare(audit, table, held)
        if span.table:
            _check_doubles(audit, about, span)
    except Corrupt as error:
        audit.failed("checksum", str(error))
    except EmbarcaderoError as error:
        audit.failed("unread", f"{type(error).__name__}: {error}")
    findings = audit.finish()
    report = SpanReport(
        lane=span.lane.lane, start=span.start, stop=span.stop, first_seq=audit.first_seq, next_seq=audit.next_seq,
        entries=audit.entries, batches=audit.batches, records=audit.records, lost=audit.lost, skipped=audit.skipped,
        in_table=audit.entries if span.table else 0, in_both=audit.entries if span.table and span.log else 0,
        hash=audit.hash.hex, findings=findings,
    )  # fmt: skip
    return report, audit.runs()


def _check_file(audit: SpanAudit, about: TopicInfo, span: AuditSpan) -> None:
    """A file says which entries it was written with: then a hole in it was lost before, and is no hole of the file."""
    if not span.file or about.tier is None:
        return
    from embarcadero.tier.cold import ColdTable

    footer = ColdTable(about.tier, parse_properties(span.properties)).footer(span.file)
    if footer is None or (footer.entries, footer.hash) != (audit.hash.entries, audit.hash.hex):
        audit.note("table", span.start, f"{span.file} has other entries than it was written with")


def _check_doubles(audit: SpanAudit, about: TopicInfo, span: AuditSpan) -> None:
    """No index is in two files of a table."""
    from embarcadero.tier.cold import ColdTable

    if about.tier is not None:
        table = ColdTable(about.tier, parse_properties(span.properties))
        for index, files in table.doubles(span.lane.lane, span.start, span.stop):
            audit.note("table", index, f"{files} both have it")


def _take(audit: SpanAudit, part: pa.RecordBatch | Gap) -> None:
    if isinstance(part, Gap):
        audit.add_gap(part)
    else:
        audit.add(part)


def _log_rows(log: Log, about: TopicInfo, span: AuditSpan, columns: list[str] | None) -> Iterator[pa.RecordBatch | Gap]:
    lane = span.lane.lane
    for batches in log.scan(about.name, lane=lane, start=span.start, stop=span.stop, control=True):
        waiting: list[Batch] = []
        for batch in batches:
            if batch.gap is not None and batch.gap.kind is not GapKind.SKIPPED:
                yield rows(lane, waiting, about.versions, columns, control=True)
                yield batch.gap
                waiting = []
            else:
                waiting.append(batch)
        yield rows(lane, waiting, about.versions, columns, control=True)


def _table_rows(about: TopicInfo, span: AuditSpan, columns: list[str] | None) -> Iterator[pa.RecordBatch]:
    from embarcadero.tier.cold import ColdTable  # wants PyIceberg, which only tiered topics need

    if about.tier is not None:
        table = ColdTable(about.tier, parse_properties(span.properties))
        yield from table.rows(span.lane.lane, span.start, span.stop, columns)


def _compare(
    audit: SpanAudit, table: Iterator[pa.RecordBatch], log: Iterator[pa.RecordBatch | Gap]
) -> None:
    """Both copies, row by row; the first difference is told, and the log's copy is looked at to the end."""
    differs = False
    copy = Rows(table)
    for part in log:
        _take(audit, part)
        if isinstance(part, Gap) or differs:
            continue
        for first in range(0, part.num_rows, _COMPARED_ROWS):
            mine = part.slice(first, _COMPARED_ROWS)
            if why := _difference(mine, copy.take(mine.num_rows)):
                audit.note("table", int(mine.column("_index")[0].as_py()), why)
                differs = True
                break
    if not differs and copy.take(1).num_rows:
        audit.note("table", audit.stop, "the table has more rows than the log")


def _difference(mine: pa.RecordBatch, theirs: pa.Table) -> str:
    """How the table's rows differ from the log's; a column that the table does not have yet is null there."""
    if theirs.num_rows < mine.num_rows:
        return f"the table has only {theirs.num_rows} of {mine.num_rows} rows from seq {mine.column('_seq')[0]} on"
    wrong = []
    for field, column in zip(mine.schema, mine.columns, strict=True):
        if field.name not in theirs.column_names:
            same = column.null_count == len(column)
        else:
            other = theirs.column(field.name).cast(field.type).combine_chunks()
            if field.name == "_skipped":  # older files do not keep flags of entries that open sessions
                unkept = pc.and_(pc.equal(mine.column("_kind"), int(EntryKind.SESSION_OPEN)), other.is_null())
                other = pc.if_else(unkept, column, other)
            same = other.equals(column)
        wrong += [] if same else [field.name]
    where = f"among {mine.num_rows} rows from seq {mine.column('_seq')[0]} on"
    return f"columns {', '.join(wrong)} differ {where}" if wrong else ""


class Rows:
    """Rows of a table, taken in the lengths that one asks for."""

    def __init__(self, parts: Iterator[pa.RecordBatch]) -> None:
        self._parts = parts
        self._left: pa.Table | None = None

    def take(self, count: int) -> pa.Table:
        """The next rows; fewer at the end."""
        while (self._left is None or self._left.num_rows < count) and (part := next(self._parts, None)) is not None:
            more = pa.Table.from_batches([part])
            self._left = more if self._left is None else pa.concat_tables([self._left, more])
        left = self._left if self._left is not None else pa.table({})
        self._left = left.slice(count)
        return left.slice(0, count)
