"""Check one span of a lane: indices and record numbers are dense, gaps are explained, rows match their batches.

`look_at` is the work of one task: it reads the span from the table or from the brokers, and compares two copies if both
have it.

Sessions are checked over the whole log: the batches of a session are reduced to runs of sequences, which are small
enough to collect. A span has about one run for each session: sorted sequences without a hole. A run ends before the
first sequence that appears too early in the log, so disorder within a span shows as two overlapping runs. The runs of a
session from all spans, side by side, show whether a sequence is duplicated (P2), out of order, or missing (P3).

SESSION_OPEN begins the life of a session, with its first sequence; a reused handle begins another life. In order 2, the
entry also contains whether the session is strong. Only strong sessions have a promised order without holes. A session
without this information (its SESSION_OPEN was trimmed, or is in an older file of the table) counts as weak.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from embarcadero.audit.report import AuditFinding, AuditSpan, Collector, SpanReport
from embarcadero.client.api.sync_log import Log
from embarcadero.client.results import Batch, TopicInfo
from embarcadero.config.secrets import parse_properties
from embarcadero.errors import Corrupt, EmbarcaderoError
from embarcadero.fabric.layout import OPEN_STRONG
from embarcadero.tier.columns import EntriesHash, Int64s, rows
from embarcadero.types import NO_SESSION, EntryKind, Gap, GapKind, Span

# --- sessions ---------------------------------------------------------------------------------------------------------
RUNS: Final = pa.schema(
    [
        pa.field("lane", pa.int32(), nullable=False),
        pa.field("session", pa.int64(), nullable=False),
        pa.field("opens", pa.bool_(), nullable=False),  # a SESSION_OPEN: not a batch, but the first sequence
        pa.field("first_index", pa.int64(), nullable=False),
        pa.field("last_index", pa.int64(), nullable=False),
        pa.field("first_seq", pa.int64(), nullable=False),
        pa.field("stop_seq", pa.int64(), nullable=False),
        pa.field("strong", pa.bool_()),  # for a SESSION_OPEN: from its flags; null if they are not known
    ]
)
PROBLEMS: Final = pa.schema(
    [
        pa.field("kind", pa.string(), nullable=False),
        pa.field("lane", pa.int32(), nullable=False),
        pa.field("index", pa.int64(), nullable=False),
        pa.field("detail", pa.string(), nullable=False),
    ]
)
NO_FLAGS: Final = -1
"""The flags of an entry from a source that does not keep flags."""
_SESSIONS: Final = (EntryKind.BATCH, EntryKind.SESSION_OPEN, EntryKind.SKIP)


def runs_of(
    lane: int, indices: Int64s, kinds: Int64s, sessions: Int64s, sequences: Int64s, skipped: Int64s, flags: Int64s
) -> pa.RecordBatch:
    """The runs of a span's entries, which are in the order of the log. `flags`: NO_FLAGS if they are not known."""
    own = np.isin(kinds, _SESSIONS) & (sessions != NO_SESSION)
    indices, kinds, sessions, flags = indices[own], kinds[own], sessions[own], flags[own]
    starts, widths = sequences[own], np.where(kinds == EntryKind.SKIP, skipped[own], 1)
    opens = kinds == EntryKind.SESSION_OPEN
    widths[opens] = 0
    lives = _lives(sessions, opens)
    order = np.lexsort((indices, starts, ~opens, lives, sessions))
    sessions, lives, opens, indices, starts, widths, flags = (
        column[order] for column in (sessions, lives, opens, indices, starts, widths, flags)
    )
    if not len(indices):
        return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in RUNS], schema=RUNS)
    goes_on = (
        (sessions[1:] == sessions[:-1])
        & (lives[1:] == lives[:-1])
        & ~opens[1:]
        & ~opens[:-1]
        & (starts[1:] == starts[:-1] + widths[:-1])
    )
    early = np.flatnonzero(goes_on & (indices[1:] < indices[:-1]))
    _, first_early = np.unique(np.cumsum(~goes_on)[early], return_index=True)
    goes_on[early[first_early]] = False  # only the first of each run: weak sessions have few runs, too
    first = np.flatnonzero(np.concatenate(([True], ~goes_on)))
    last = np.concatenate((first[1:], [len(indices)])) - 1
    numbers: list[Any] = [
        np.full(len(first), lane, np.int32),
        sessions[first],
        opens[first],
        np.minimum.reduceat(indices, first),
        np.maximum.reduceat(indices, first),
        starts[first],
        starts[last] + widths[last],
    ]
    unknown = ~opens[first] | (flags[first] == NO_FLAGS)
    columns = [*map(pa.array, numbers), pa.array(flags[first] & OPEN_STRONG != 0, mask=unknown)]
    return pa.RecordBatch.from_arrays(columns, schema=RUNS)


def _lives(sessions: Int64s, opens: npt.NDArray[np.bool_]) -> Int64s:
    """For each entry: the number of earlier opens of its session in this span."""
    order = np.argsort(sessions, kind="stable")
    total = np.cumsum(opens[order])
    fresh = np.concatenate(([True], sessions[order][1:] != sessions[order][:-1])) if len(order) else np.zeros(0, bool)
    before = np.maximum.accumulate(np.where(fresh, total - opens[order], 0)) if len(order) else total
    lives = np.empty(len(sessions), np.int64)
    lives[order] = total - before
    return lives


def problems_of(runs: pa.Table, *, all_strong: bool, from_start: bool) -> pa.Table:
    """Find problems of sessions, given all their runs (of any spans, in any order).

    `all_strong`: every session is strong (order 5); otherwise its SESSION_OPEN decides. `from_start`: the log is
    complete from its beginning, so the SESSION_OPEN of each session must exist.
    """
    sorted_runs = runs.sort_by([("lane", "ascending"), ("session", "ascending"), ("first_index", "ascending")])
    lanes, sessions, firsts, lasts, starts, stops = (
        sorted_runs.column(name).to_numpy().astype(np.int64)
        for name in ("lane", "session", "first_index", "last_index", "first_seq", "stop_seq")
    )
    opens = sorted_runs.column("opens").to_numpy(zero_copy_only=False).astype(bool)
    found: list[tuple[str, int, int, str]] = []
    same = np.concatenate(([False], (lanes[1:] == lanes[:-1]) & (sessions[1:] == sessions[:-1])))[: len(lanes)]
    lives = np.cumsum(opens | ~same)
    known = sorted_runs.column("strong").fill_null(False).to_numpy(zero_copy_only=False).astype(bool)
    strong = all_strong | known[opens | ~same][lives - 1]  # from the first run of its life
    if from_start:
        for run in np.flatnonzero(~same & ~opens).tolist():
            what = f"session {sessions[run]} has batches before its SESSION_OPEN"
            found.append(("session-strange", int(lanes[run]), int(firsts[run]), what))
    by_sequence = np.lexsort((stops, starts, lives))
    _compare_runs(found, by_sequence, lives, (lanes, sessions, firsts, lasts, starts, stops, strong))
    return pa.Table.from_pylist([dict(zip(PROBLEMS.names, problem, strict=True)) for problem in found], schema=PROBLEMS)


def _compare_runs(
    found: list[tuple[str, int, int, str]], order: Int64s, lives: Int64s, columns: tuple[Any, ...]
) -> None:
    """Compare each run with the previous one in the same life of a session, by sequence."""
    lanes, sessions, firsts, lasts, starts, stops, strong = (column[order] for column in columns)
    together = lives[order][1:] == lives[order][:-1]
    reach = _reach(lives[order], stops)
    twice = together & (starts[1:] < reach[:-1])
    late = together & strong[1:] & ~twice & (firsts[1:] < lasts[:-1])
    hole = together & strong[1:] & (starts[1:] > reach[:-1])
    for run in np.flatnonzero(twice).tolist():
        again, first = starts[run + 1], firsts[run]
        what = f"session {sessions[run + 1]}: sequence {again} is duplicated, at or before index {first}"
        found.append(("session-twice", int(lanes[run + 1]), int(firsts[run + 1]), what))
    for run in np.flatnonzero(late).tolist():
        what = f"session {sessions[run + 1]}: sequence {starts[run + 1]} is before sequence {stops[run] - 1}"
        found.append(("session-order", int(lanes[run + 1]), int(firsts[run + 1]), what))
    for run in np.flatnonzero(hole).tolist():
        what = f"session {sessions[run + 1]}: sequences {reach[run]} to {starts[run + 1] - 1} are missing"
        found.append(("session-hole", int(lanes[run + 1]), int(firsts[run + 1]), what))


def _reach(lives: Int64s, stops: Int64s) -> Int64s:
    """For each run: the end of the sequences in it and in the earlier runs of the same life."""
    if not len(stops):
        return stops
    far = int(stops.max()) + 1
    return np.maximum.accumulate(stops + lives * far) - lives * far


# --- a span -----------------------------------------------------------------------------------------------------------
COLUMNS: Final = (
    "_index", "_seq", "_kind", "_count", "_session", "_session_seq", "_crc", "_partition", "_append_time", "_skipped",
    "_damage",
)  # fmt: skip
"""The columns that an audit needs."""

_COMPARED_ROWS = 65_536


class KnownLosses:
    """The explained holes of a lane: positions below its start, and positions between its ranges."""

    def __init__(self, start_index: int, lost: Sequence[Span]) -> None:
        self.start_index, self.lost = start_index, tuple(lost)

    def is_lost(self, start: int, stop: int) -> bool:
        """Whether all these positions were lost in a crash, according to the ranges."""
        return any(first <= start and stop <= last for first, last in self.lost)


class SpanAudit:
    """Checks the rows and gaps of [start, stop) in order, and collects findings."""

    def __init__(self, lane: int, start: int, stop: int, explained: KnownLosses) -> None:
        self.lane, self.start, self.stop = lane, start, stop
        self._explained = explained
        self._collector = Collector(lane)
        self._next_index, self._next_seq = start, -1
        self._entries: list[tuple[Int64s, ...]] = []
        self._open_rows = 0  # rows of the current entry so far
        self._open_index, self._open_count = -1, 0
        self._row_seq = -1  # the seq of the last row so far
        self.first_seq = -1
        self.batches = self.records = self.entries = self.lost = self.skipped = 0
        self.hash = EntriesHash()

    def add_gap(self, gap: Gap) -> None:
        """Add the next gap."""
        if gap.kind in (GapKind.LOST, GapKind.NEVER_DURABLE):
            if not self._explained.is_lost(gap.start, gap.stop):
                self.note("lost", gap.start, f"indices {gap.start} to {gap.stop - 1}")
            self.lost += gap.stop - max(gap.start, self._next_index)
        elif gap.kind is GapKind.TRIMMED and gap.stop > self._explained.start_index:
            self.note("trimmed", gap.start, f"indices {gap.start} to {gap.stop - 1}")
        if gap.kind in (GapKind.LOST, GapKind.NEVER_DURABLE, GapKind.TRIMMED):
            if gap.start > self._next_index:
                self.note("index-hole", self._next_index, f"indices {self._next_index} to {gap.start - 1}")
            self._next_index, self._next_seq = max(self._next_index, gap.stop), -1

    def add(self, rows: pa.RecordBatch) -> None:
        """Add the next rows, with `control`."""
        if not rows.num_rows:
            return
        indices = rows.column("_index").to_numpy()
        first = np.concatenate(([indices[0] != self._open_index], indices[1:] != indices[:-1]))
        firsts = np.flatnonzero(first)
        self._count_rows(indices, firsts, rows)
        seqs = self._numbers(rows, "_seq")
        before = np.concatenate(([self._row_seq], seqs[:-1]))
        for row in np.flatnonzero((seqs != before + 1) & ~first).tolist():
            self.note("row-order", int(indices[row]), f"seq {seqs[row]} follows seq {before[row]}")
        self._row_seq = int(seqs[-1])
        self.hash.add(rows)
        if not len(firsts):
            return
        column = {name: self._numbers(rows, name)[firsts] for name in COLUMNS if name not in ("_damage",)}
        self._dense(column)
        self._damage(rows, firsts)
        kinds, counts = column["_kind"], column["_count"]
        self.entries += len(firsts)
        self.batches += int((kinds == EntryKind.BATCH).sum())
        self.records += int(counts.sum())
        self.skipped += int(column["_skipped"][kinds == EntryKind.SKIP].sum())
        names = ("_index", "_kind", "_session", "_session_seq", "_skipped")
        flags = np.where(np.asarray(rows.column("_skipped").is_valid())[firsts], column["_skipped"], NO_FLAGS)
        self._entries.append((*(column[name] for name in names), flags))

    def finish(self) -> list[AuditFinding]:
        """Finish after the last row; return the findings."""
        self._close_rows()
        if self._next_index < self.stop:
            if self._explained.is_lost(self._next_index, self.stop):
                self.lost += self.stop - self._next_index
                self._next_seq = -1  # record numbers were lost with them
            else:
                self.note("index-hole", self._next_index, f"indices {self._next_index} to {self.stop - 1}")
        return self._collector.take()

    def failed(self, kind: str, why: str) -> None:
        """Record that the rest of the span could not be read."""
        self.note(kind, self._next_index, why)
        self._next_index, self._next_seq = self.stop, -1

    @property
    def next_seq(self) -> int:
        """The next record number after this span; -1 if it is not known."""
        return self._next_seq

    def runs(self) -> pa.RecordBatch:
        """The runs of its sessions."""
        empty = tuple(np.zeros(0, np.int64) for _ in range(6))
        columns = [np.concatenate(parts) for parts in zip(*(self._entries or [empty]), strict=True)]
        indices, kinds, sessions, sequences, skipped, flags = columns
        return runs_of(self.lane, indices, kinds, sessions, sequences, skipped, flags)

    # --- checks ---
    def _dense(self, column: dict[str, Int64s]) -> None:
        indices, seqs, counts = column["_index"], column["_seq"], column["_count"]
        wanted = np.concatenate(([self._next_index], indices[:-1] + 1))
        for row in np.flatnonzero(indices < wanted).tolist():
            self.note("index-twice", int(indices[row]), f"index {indices[row]} follows index {wanted[row] - 1}")
        for row in np.flatnonzero(indices > wanted).tolist():
            start, stop = int(wanted[row]), int(indices[row])
            if self._explained.is_lost(start, stop):
                self.lost += stop - start
            elif start < self._explained.start_index:
                continue
            else:
                self.note("index-hole", start, f"indices {start} to {stop - 1}")
        ends = np.concatenate(([self._next_seq], (seqs + counts)[:-1]))
        known = (ends >= 0) & (indices == wanted)
        for row in np.flatnonzero(known & (seqs != ends)).tolist():
            what = f"seq {seqs[row]} follows, but {ends[row]} is expected"
            self.note("seq-hole", int(indices[row]), what)
        if self.first_seq < 0:
            self.first_seq = int(seqs[0])
        self._next_index, self._next_seq = int(indices[-1]) + 1, int(seqs[-1] + counts[-1])

    def _count_rows(self, indices: Int64s, firsts: Int64s, rows: pa.RecordBatch) -> None:
        """Check that each batch has as many rows as records, and each other entry one row."""
        counts = self._numbers(rows, "_count")
        ends = np.concatenate((firsts, [len(indices)]))
        self._open_rows += int(ends[0])
        if not len(firsts):
            return
        self._close_rows()
        lengths = np.diff(ends)
        wanted = np.maximum(counts[firsts], 1)
        for row in np.flatnonzero(lengths[:-1] != wanted[:-1]).tolist():
            self._wrong_rows(int(indices[firsts[row]]), int(lengths[row]), int(wanted[row]))
        self._open_index, self._open_rows = int(indices[-1]), int(lengths[-1])
        self._open_count = int(wanted[-1])

    def _close_rows(self) -> None:
        if self._open_index >= 0 and self._open_rows != self._open_count:
            self._wrong_rows(self._open_index, self._open_rows, self._open_count)
        self._open_index = -1

    def _wrong_rows(self, index: int, found: int, wanted: int) -> None:
        self.note("rows", index, f"index {index} has {found} rows, but {wanted} are expected")

    def _damage(self, rows: pa.RecordBatch, firsts: Int64s) -> None:
        damage = rows.column("_damage")
        if damage.null_count == len(damage):
            return
        indices = rows.column("_index").to_numpy()
        for row in firsts.tolist():
            if (why := damage[row].as_py()) is not None:
                self.note("damage", int(indices[row]), why)

    def note(self, kind: str, index: int, detail: str) -> None:
        """Add a finding."""
        self._collector.add(kind, index, detail)

    @staticmethod
    def _numbers(rows: pa.RecordBatch, name: str) -> Int64s:
        column: Any = rows.column(name)
        if pa.types.is_timestamp(column.type):
            column = column.view(pa.int64())
        if column.null_count:
            column = column.fill_null(0)
        numbers: Int64s = column.to_numpy().astype(np.int64)
        return numbers


def look_at(log: Log, about: TopicInfo, span: AuditSpan) -> tuple[SpanReport, pa.RecordBatch]:
    """Check a span. All problems are in the report; only a bug raises an exception."""
    lost = [*span.lane.lost, Span(span.start, span.stop)] if span.file else span.lane.lost
    audit = SpanAudit(span.lane.lane, span.start, span.stop, KnownLosses(span.lane.start_index, lost))
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
        lane=span.lane.lane,
        start=span.start,
        stop=span.stop,
        first_seq=audit.first_seq,
        next_seq=audit.next_seq,
        entries=audit.entries,
        batches=audit.batches,
        records=audit.records,
        lost=audit.lost,
        skipped=audit.skipped,
        in_table=audit.entries if span.table else 0,
        in_both=audit.entries if span.table and span.log else 0,
        hash=audit.hash.hex,
        findings=findings,
    )
    return report, audit.runs()


def _check_file(audit: SpanAudit, about: TopicInfo, span: AuditSpan) -> None:
    """Compare a file with the hash in its footer: if it matches, a hole was lost before the file was written."""
    if not span.file or about.tier is None:
        return
    from embarcadero.tier.table_reads import TopicTable

    footer = TopicTable(about.tier, parse_properties(span.properties)).footer(span.file)
    if footer is None or (footer.entries, footer.hash) != (audit.hash.entries, audit.hash.hex):
        audit.note("table", span.start, f"{span.file} has different entries than its footer records")


def _check_doubles(audit: SpanAudit, about: TopicInfo, span: AuditSpan) -> None:
    """Check that no index is in two files of a table."""
    from embarcadero.tier.table_reads import TopicTable

    if about.tier is not None:
        table = TopicTable(about.tier, parse_properties(span.properties))
        for index, files in table.doubles(span.lane.lane, span.start, span.stop):
            audit.note("table", index, f"{files} both have index {index}")


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
    from embarcadero.tier.table_reads import TopicTable  # needs PyIceberg, and only tiered topics use it

    if about.tier is not None:
        table = TopicTable(about.tier, parse_properties(span.properties))
        yield from table.rows(span.lane.lane, span.start, span.stop, columns)


def _compare(audit: SpanAudit, table: Iterator[pa.RecordBatch], log: Iterator[pa.RecordBatch | Gap]) -> None:
    """Compare both copies row by row. Report the first difference, and check the log's copy to the end."""
    differs = False
    copy = CopiedRows(table)
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
    """Describe how the table's rows differ from the log's; a column that the table does not have yet counts as null."""
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


class CopiedRows:
    """Rows of a table, taken in the requested lengths."""

    def __init__(self, parts: Iterator[pa.RecordBatch]) -> None:
        self._parts = parts
        self._rest: pa.Table | None = None

    def take(self, count: int) -> pa.Table:
        """The next rows; fewer at the end."""
        while (self._rest is None or self._rest.num_rows < count) and (part := next(self._parts, None)) is not None:
            more = pa.Table.from_batches([part])
            self._rest = more if self._rest is None else pa.concat_tables([self._rest, more])
        rest = self._rest if self._rest is not None else pa.table({})
        self._rest = rest.slice(count)
        return rest.slice(0, count)
