"""publish and tail: write lines to a topic as records, and print the records of a topic."""

from __future__ import annotations

import base64
import os
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from embarcadero.cli.output import BrokersOption, DataDir, Json, connect, note, print_json, stderr_is_terminal
from embarcadero.errors import Backpressure, BadValue, Conflict, OutcomeUnknown, Trimmed
from embarcadero.limits import DELIVERY_TIMEOUT_S, RECORD_BYTES_MAX, SESSION_WINDOW
from embarcadero.types import NO_SESSION, Ack, EntryKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from embarcadero.client.api.sync_log import Log, Publisher, Subscriber
    from embarcadero.client.results import Batch, Record, RecordFuture, TopicInfo
    from embarcadero.types import Position

_POLL_S = 0.5
_DURABLE_S = 10.0  # the longest wait for the end of the topic to become durable
_PROGRESS_EVERY = 256
_ROWS_AT_ONCE = 1_000
_CHUNK_BYTES = 1 << 20


class Read(StrEnum):
    """The records that tail prints."""

    DURABLE = "durable"
    ORDERED = "ordered"


class RecordFormat(StrEnum):
    """The output format of tail."""

    TEXT = "text"
    JSON = "json"


def publish(
    topic: Annotated[str, typer.Argument(help="Name of the topic.")],
    file: Annotated[Path | None, typer.Argument(help="File with one record per line. Default: standard input.")] = None,
    key_separator: Annotated[
        str, typer.Option(show_default=False, help="Separator between key and value in a line. Default: no keys.")
    ] = "",
    ack: Annotated[int, typer.Option(help="When a record counts as published. 0: sent. 1: ordered. 2: durable.")] = 1,
    session: Annotated[
        str | None,
        typer.Option(show_default=False, help="Name of a session: a second run with the same lines stores the rest."),
    ] = None,
    order: Annotated[
        str | None,
        typer.Option(show_default=False, help="strong: keep the order of lines. total: do not. Default: strong."),
    ] = None,
    compression: Annotated[str | None, typer.Option(show_default=False, help="lz4 or zstd. Default: none.")] = None,
    brokers: BrokersOption = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Publish each line of a file, or of standard input, as a record.

    In a topic with a schema each line is a row: a JSON object.

    Examples:

        seq 1 1000 | embarcadero publish orders

        embarcadero publish orders orders.csv --key-separator ,

        embarcadero publish payments --ack 2 < payments.txt

        echo '{"symbol": "EMB", "price": 12.5}' | embarcadero publish trades --compression zstd
    """
    with ExitStack() as stack:
        source: BinaryIO = sys.stdin.buffer if file is None else stack.enter_context(_open(file))
        advance = _progress(stack, source)
        sent = _Sent()
        log = stack.enter_context(connect(brokers, data_dir))
        about = log.describe(topic)
        lines = _lines(source)
        if session is not None:
            _check_unsplit(about, key_separator)
        with log.publisher(about, ack=ack, session=session, order=order, compression=compression) as publisher:
            if session is not None:
                stored = _stored_batches(log, publisher, about, session, durable=ack == Ack.DURABLE)
                sent.skipped = _skip_stored(stored, lines, about, session, key_separator)
            if session is not None or about.schema is not None:
                steps = _send_batches(publisher, lines, sent, about, key_separator)
            else:
                steps = _send_lines(publisher, lines, sent, key_separator)
            for _ in steps:
                advance(sent.bytes)
            publisher.flush()
        sent.settle_all()
        advance(sent.bytes)
    if json:
        print_json({"topic": topic, "records": sent.records, "bytes": sent.bytes, "last": sent.last})
    else:
        what = "last batch begins" if session is not None or about.schema is not None else "last is"
        where = f"; the {what} at seq {sent.last.seq}" if sent.last else ""
        before = f"; {sent.skipped:,} were stored before" if sent.skipped else ""
        print(f"published {sent.records:,} records ({sent.bytes:,} bytes) to {topic}{where}{before}")


def _send_lines(publisher: Publisher, lines: Iterator[bytes], sent: _Sent, key_separator: str) -> Iterator[None]:
    """Send each line as a raw record; yield regularly."""
    for line in lines:
        key, value = _split(line, key_separator.encode())
        sent.add(sent.take(publisher.send, value, key=key), 1, len(line))
        if sent.records % _PROGRESS_EVERY == 0:
            yield


def _send_batches(
    publisher: Publisher, lines: Iterator[bytes], sent: _Sent, about: TopicInfo, key_separator: str
) -> Iterator[None]:
    """Send lines as rows, many at once; yields after each batch."""
    for first, chunk in _chunks(lines, sent.skipped + 1):
        future = sent.take(publisher.publish, _rows(first, chunk, about, key_separator))
        sent.add(future, len(chunk), sum(map(len, chunk)))
        yield


def _chunks(lines: Iterator[bytes], first: int) -> Iterator[tuple[int, list[bytes]]]:
    """Group lines into lists of bounded length and size, each with the number of its first line."""
    chunk: list[bytes] = []
    size = 0
    for line in lines:
        if chunk and (len(chunk) == _ROWS_AT_ONCE or size + len(line) > _CHUNK_BYTES):
            yield first, chunk
            first, size, chunk = first + len(chunk), 0, []
        chunk.append(line)
        size += len(line)
    if chunk:
        yield first, chunk


def _rows(first: int, lines: list[bytes], about: TopicInfo, key_separator: str) -> Any:
    """Convert lines to data for `publish`; `first` is the number of the first line."""
    import pyarrow as pa

    if about.schema is not None:
        return [_row(first + at, line) for at, line in enumerate(lines)]
    pairs = [_split(line, key_separator.encode()) for line in lines]
    columns = {"value": [value for _, value in pairs], "key": [key for key, _ in pairs]}
    return pa.RecordBatch.from_pydict(columns, schema=pa.schema([("value", pa.binary()), ("key", pa.binary())]))


def _row(number: int, line: bytes) -> Any:
    import msgspec

    try:
        return msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadValue(f"line {number} is no JSON: {error}", "a topic with a schema takes JSON objects") from None


# --- named sessions ---------------------------------------------------------------------------------------------------
def _check_unsplit(about: TopicInfo, key_separator: str) -> None:
    """Refuse keys that spread lines over partitions: a crash between batches would store lines 1 and 3 without 2."""
    if about.partitions > 1 and (key_separator or about.key):
        what = "--key-separator" if key_separator else f"key={about.key!r}"
        raise BadValue(
            f"--session with {what} does not work in a topic of {about.partitions} partitions: batches are split by "
            "key, so the records of an interrupted run are not the first lines",
            "omit --session, or use a topic with one partition",
        )


def _skip_stored(
    stored: Iterator[Batch], lines: Iterator[bytes], about: TopicInfo, session: str, key_separator: str
) -> int:
    """Skip the lines that the session has stored, compare each with its record, and return their number."""
    skipped = 0
    for batch in stored:
        chunk = list(islice(lines, batch.count))
        if chunk and (differs := _first_difference(batch, _rows(skipped + 1, chunk, about, key_separator), about)):
            raise Conflict(
                f"line {skipped + differs} differs from the record that session {session!r} has stored at seq "
                f"{batch.seq + differs - 1}",
                "run again with the same lines and options, from the first line; use another name for other lines",
            )
        skipped += len(chunk)
        if len(chunk) < batch.count:
            break  # all lines are stored already
    return skipped


def _first_difference(batch: Batch, data: Any, about: TopicInfo) -> int:
    """Return the number of the first row (from 1) that differs from its record in a batch; 0 if all are equal."""
    import pyarrow as pa

    from embarcadero.client.encoding import fitted

    rows, stored = fitted(data, about.versions, 0), pa.Table.from_batches([batch.to_arrow()])
    rows = rows if isinstance(rows, pa.Table) else pa.Table.from_batches([rows])
    names = rows.schema.names if about.schema is not None else ["key", "value"]

    def same(at: int, count: int) -> bool:
        return all(rows[name].slice(at, count).equals(stored[name].slice(at, count)) for name in names)

    if same(0, rows.num_rows):
        return 0
    return next(at for at in range(rows.num_rows) if not same(at, 1)) + 1


def _stored_batches(
    log: Log, publisher: Publisher, about: TopicInfo, session: str, *, durable: bool
) -> Iterator[Batch]:
    """Yield all batches that a named session has stored, in their order. Raise OutcomeUnknown if one is missing.

    `durable`: yield each batch only once it is durable.
    """
    done = publisher.next_session_seq()
    if not done:
        return
    read, stop = "durable" if durable else "ordered", log.tail(about.name).index
    start, handles = _handles(log, about, publisher.pump.driver.core.session, stop, read)
    waiting: dict[int, Batch] = {}  # batches of a weak session may be out of order in the log
    number = 0
    for batches in log.scan(about.name, start=start, stop=stop, read=read):
        for batch in batches:
            if batch.gap is None and batch.session in handles:
                waiting[batch.session_seq] = batch
                while number in waiting:
                    yield waiting.pop(number)
                    number += 1
        if number == done or len(waiting) > SESSION_WINDOW:
            break
    if number < done:
        raise OutcomeUnknown(
            f"session {session!r} has stored {done} batches in topic {about.name!r}, but its batch {number} is not in "
            "the log: it was trimmed, skipped or lost, so the stored lines cannot be determined",
            "compare the lines with the topic, and publish the missing lines without --session or under another name",
        )


def _handles(log: Log, about: TopicInfo, session: int, stop: int, read: str) -> tuple[int | None, set[int]]:
    """The handles of a named session, and the index where the first was opened (None: no longer in the log).

    A publisher that opens the name gets a new handle. Its SESSION_OPEN entry names the handle that it continues.
    """
    opened: dict[int, tuple[int, int]] = {}
    for batches in log.scan(about.name, stop=stop, read=read, partitions=[], control=True):
        for entry in batches:
            if entry.kind is EntryKind.SESSION_OPEN:
                opened[entry.session] = entry.index, entry.schema_version << 16 | entry.partition
    start: int | None = None
    handles: set[int] = set()
    while session != NO_SESSION:
        handles.add(session)
        start, session = opened.pop(session, (None, NO_SESSION))
    return start, handles


class _Sent:
    """Counts sent records; raises the first error of a record."""

    def __init__(self) -> None:
        self.records = self.bytes = 0
        self.skipped = 0  # records that an earlier run with the same name has stored
        self.last: Position | None = None  # the highest so far
        self._open: deque[RecordFuture] = deque()
        self._noted = ""  # the last reported reason for backpressure

    def take(self, call: Callable[..., RecordFuture], *data: Any, **options: Any) -> RecordFuture:
        """Pass records to a publisher. While the cluster is full, report the reason once, and wait up to a limit."""
        try:
            return call(*data, **options)
        except Backpressure as error:
            if error.message != self._noted:
                self._noted = error.message
                note(f"waiting for capacity: {error.message}")
        return call(*data, timeout=DELIVERY_TIMEOUT_S, **options)

    def add(self, future: RecordFuture, records: int, size: int) -> None:
        self.records += records
        self.bytes += size
        self._open.append(future)
        while self._open and self._open[0].done():
            self._settle()

    def settle_all(self) -> None:
        while self._open:
            self._settle()

    def _settle(self) -> None:
        position = self._open.popleft().result()
        if position is not None and (self.last is None or position > self.last):
            self.last = position


def _open(file: Path) -> BinaryIO:
    try:
        return file.open("rb")
    except OSError as error:
        raise BadValue(f"cannot read {file}: {error.strerror}", "name a readable file") from error


def _lines(source: BinaryIO) -> Iterator[bytes]:
    """Yield lines without their ends. Only one record is in memory."""
    number = 0
    while line := source.readline(RECORD_BYTES_MAX + 1):
        number += 1
        if len(line) > RECORD_BYTES_MAX and not line.endswith(b"\n"):
            raise BadValue(f"line {number} has more than {RECORD_BYTES_MAX} bytes", "split it into smaller records")
        yield line.removesuffix(b"\n").removesuffix(b"\r")


def _split(line: bytes, separator: bytes) -> tuple[bytes | None, bytes]:
    if not separator:
        return None, line
    key, found, value = line.partition(separator)
    return (key, value) if found else (None, line)


def _progress(stack: ExitStack, source: BinaryIO) -> Callable[[int], None]:
    """Show a progress bar on a terminal; elsewhere do nothing."""
    if not stderr_is_terminal() or source.isatty():
        return lambda _: None
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn

    columns = (TextColumn("publishing"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeElapsedColumn())
    bar = stack.enter_context(Progress(*columns, console=Console(stderr=True)))
    size = os.fstat(source.fileno()).st_size
    task = bar.add_task("publishing", total=size or None)
    return lambda done: bar.update(task, completed=done)


def tail(
    topic: Annotated[str, typer.Argument(help="Name of the topic.")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for new records, until Ctrl-C.")] = False,
    start: Annotated[
        str, typer.Option("--from", help='earliest, latest, a seq, a time (2026-01-31T12:00:00Z), or "10m ago".')
    ] = "earliest",
    limit: Annotated[
        int | None, typer.Option("--limit", "-n", min=0, show_default=False, help="Stop after this number of records.")
    ] = None,
    read: Annotated[
        Read, typer.Option(help="durable: records that survive every crash. ordered: all records with a position.")
    ] = Read.DURABLE,
    form: Annotated[
        RecordFormat, typer.Option("--format", help="text: values. json: one object per line.")
    ] = RecordFormat.TEXT,
    brokers: BrokersOption = None,
    data_dir: DataDir = None,
    json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
) -> None:
    """Print the records of a topic in order.

    Without --follow, the command stops at the end that the topic had when the command started. Gaps are reported
    between records: trimmed, skipped by a publisher, or lost in a crash.

    Examples:

        embarcadero tail orders --limit 10

        embarcadero tail orders --follow --from latest --format json

        embarcadero tail orders --from "10m ago"

        embarcadero tail orders --from 2026-01-31T12:00:00Z
    """
    where = _start(start)
    show = _show_json if json or form is RecordFormat.JSON else _show_text
    shown = 0
    try:
        for batch, record in _records(topic, where, follow, read, brokers, data_dir):
            if shown == limit:
                return
            show(batch, record)
            shown += record is not None
    except KeyboardInterrupt:
        return


def _start(text: str) -> str | int | datetime:
    if text in {"earliest", "latest"}:
        return text
    if text.isascii() and text.isdigit():
        return int(text)
    try:
        from embarcadero.client.arguments import parse_time

        return parse_time(text)
    except BadValue as error:
        hint = f"use earliest, latest, the seq of a record, or a time: {error.hint}"
        raise BadValue(f"--from {text!r} is not a position in a log", hint) from None


def _at_durable_end(log: Log, topic: str, subscriber: Subscriber) -> bool:
    """Whether a reader has all durable records. If not, records or an error will still arrive."""
    at, tail = subscriber.positions(), log.tail(topic)
    return all((at.get(each.lane, each.durable_index) or 0) >= each.durable_index for each in tail.lanes or (tail,))


def _records(
    topic: str, start: str | int | datetime, follow: bool, read: Read, brokers: str | None, data_dir: Path | None
) -> Iterator[tuple[Batch, Record | None]]:
    """Yield the records of a topic with their batches; a gap is a batch without a record."""
    with connect(brokers, data_dir) as log:
        end = None if follow else log.tail(topic)
        if end is not None and isinstance(start, datetime):
            start = _seq_since(log, topic, start)
        if end is not None and (start == "latest" or end.seq == 0 or (isinstance(start, int) and start >= end.seq)):
            return
        unread = {tail.lane: tail for tail in (end.lanes or (end,)) if tail.seq} if end is not None else {}
        with log.subscribe(topic, start=start, read=read.value) as subscriber:
            patience_s = _DURABLE_S
            while unread or end is None:
                batch = subscriber.poll(timeout=_POLL_S)
                patience_s = patience_s - _POLL_S if batch is None else _DURABLE_S
                waited = end is not None and read is Read.DURABLE and patience_s < 0
                if waited and _at_durable_end(log, topic, subscriber):
                    note("-- the remaining records are ordered, but not durable yet: --read ordered prints them --")
                    return
                if batch is None:
                    at = subscriber.positions()  # a lane that is missing there is read to its end
                    unread = {lane: end for lane, end in unread.items() if (at.get(lane, end.index) or 0) < end.index}
                elif end is not None and batch.lane not in unread:
                    continue  # it is above the end at the start of the command
                elif batch.gap is not None:
                    yield batch, None
                else:
                    for record in batch.records():
                        if not isinstance(start, int) or record.seq >= start:
                            yield batch, record
                    if batch.lane in unread and batch.seq + batch.count >= unread[batch.lane].seq:
                        del unread[batch.lane]


def _seq_since(log: Log, topic: str, when: datetime) -> int | str:
    """The first seq appended since a time; "earliest" if some records of that time are trimmed."""
    try:
        return log.position_at(topic, when).seq
    except Trimmed as error:
        note(f"-- {error.message} --")
        return "earliest"


def _show_text(batch: Batch, record: Record | None) -> None:
    if record is None:
        note(f"-- {_gap_text(batch)} --")
        return
    value = record.value if isinstance(record.value, bytes) else _as_json(record.value)
    sys.stdout.buffer.write(value + b"\n")
    sys.stdout.buffer.flush()


def _show_json(batch: Batch, record: Record | None) -> None:
    if record is None:
        print_json({"gap": _gap_text(batch), "lane": batch.lane, "index": batch.index})
        return
    print_json(
        {
            "lane": batch.lane,
            "seq": record.seq,
            "index": batch.index,
            "session": batch.session,
            "session_seq": batch.session_seq,
            "partition": batch.partition,
            "broker": batch.broker,
            "append_time": batch.append_time,
            "timestamp": record.timestamp,
            "key": None if record.key is None else _readable(record.key),
            "value": _readable(record.value) if isinstance(record.value, bytes) else _plain(record.value),
            "headers": {name: _readable(value) for name, value in (record.headers or {}).items()},
        }
    )


def _as_json(row: Any) -> bytes:
    """Format a row of a topic with a schema as one line."""
    import msgspec

    return msgspec.json.encode(_plain(row))


def _plain(value: Any) -> Any:
    """Convert a value for JSON; bytes that are valid UTF-8 become text."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return _readable(value) if isinstance(value, bytes) else value


def _readable(value: bytes) -> Any:
    """Decode UTF-8 text; return other bytes as an object that names the encoding."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(value).decode()}


def _gap_text(batch: Batch) -> str:
    gap = batch.gap
    if gap is None:
        return ""
    if gap.kind.name == "END_OF_LANE":
        return f"end of lane {batch.lane}, after {gap.start} batches"
    what = "session sequences" if gap.kind.name == "SKIPPED" else "batches"
    return f"{gap.kind.name.lower().replace('_', ' ')}: {what} {gap.start} to {gap.stop - 1}"
