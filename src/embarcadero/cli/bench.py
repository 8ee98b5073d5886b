"""bench: measure publishing, reading and the round trip of one record, through the client."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple
from uuid import uuid4

import typer

from embarcadero.cli.output import (
    BrokersOption,
    DataDir,
    Json,
    connect,
    duration_option,
    note,
    print_json,
    stderr_is_terminal,
)
from embarcadero.errors import Backpressure, BadValue, EmbarcaderoError
from embarcadero.limits import KIB, MIB, RECORD_BYTES_MAX
from embarcadero.orders import order_label
from embarcadero.types import Ack

if TYPE_CHECKING:
    import pyarrow as pa

    from embarcadero.client.api.sync_log import Log
    from embarcadero.client.results import RecordFuture, TopicInfo

_INTERRUPTED: Final = 130
_SECONDS: Final = 5.0
_TRIPS_MAX: Final = 1_000
_READ_BYTES: Final = 128 * MIB
"""The size of the topic's end that is read repeatedly: it is in the memory of the brokers."""
_BATCH_KIB_MAX: Final = 4_096
_PUBLISHERS_MAX: Final = 64
_LOOK_S: Final = 0.1
_PATIENCE_S: Final = 1.0
_COLUMNS: Final = ("measured", "records", "seconds", "MB/s", "records/s", "p50 ms", "p99 ms", "max ms")
_WIDTHS: Final = (-10, 11, 7, 8, 9, 7, 7, 7)


class Measurement(StrEnum):
    """The measurements."""

    PUBLISH = "publish"
    READ = "read"
    ROUND_TRIP = "round-trip"


class Load(NamedTuple):
    """The load, and the bounds of each measurement: it ends at the first one."""

    record_bytes: int
    batch_kib: int
    ack: int
    publishers: int
    records: int | None
    seconds: float | None

    @property
    def rows(self) -> int:
        """Records in a batch."""
        return max(1, self.batch_kib * KIB // self.record_bytes)


class Figures(NamedTuple):
    """The result of a measurement. Latencies in ms, or None; `complete` is False after Ctrl-C."""

    measured: str
    records: int
    bytes: int
    seconds: float
    mb_s: float
    records_s: float
    p50_ms: float | None
    p99_ms: float | None
    max_ms: float | None
    complete: bool

    def line(self) -> str:
        """Format the figures as a row below _COLUMNS."""
        latencies = ("" if ms is None else f"{ms:,.2f}" for ms in (self.p50_ms, self.p99_ms, self.max_ms))
        rates = f"{self.mb_s:,.2f}", f"{self.records_s:,.0f}"
        return _aligned((self.measured, f"{self.records:,}", f"{self.seconds:.2f}", *rates, *latencies))


def _aligned(cells: Iterable[str]) -> str:
    return "  ".join(
        cell.ljust(-width) if width < 0 else cell.rjust(width) for cell, width in zip(cells, _WIDTHS, strict=True)
    ).rstrip()


class Meter:
    """Counts the progress of a measurement. Threads may add to it concurrently."""

    def __init__(self, load: Load) -> None:
        self._records_max, self._seconds = load.records, load.seconds
        self._lock = threading.Lock()
        self._began = self._last = time.perf_counter()
        self._latencies: list[float] = []
        self._claimed = 0
        self.records = self.bytes = 0
        self.stopped = threading.Event()
        self.error: BaseException | None = None

    def claim(self, records: int) -> int:
        """Return how many of these records may still be sent or read; 0: the measurement is over."""
        now = time.perf_counter()
        with self._lock:
            if not self._claimed:
                self._began = self._last = now  # the time before the first claim was preparation
            late = self._seconds is not None and now - self._began >= self._seconds
            if late or self.stopped.is_set() or self.error is not None:
                return 0
            taken = records if self._records_max is None else min(records, self._records_max - self._claimed)
            self._claimed += taken
            return taken

    def add(self, records: int, size: int, began: float | None = None) -> None:
        """Count completed records; `began`: the time when their batch was passed to the publisher."""
        now = time.perf_counter()
        with self._lock:
            self.records += records
            self.bytes += size
            self._last = now
            if began is not None:
                self._latencies.append((now - began) * 1_000)

    def fail(self, error: BaseException) -> None:
        """Record the first error, which ends the measurement."""
        with self._lock:
            self.error = self.error or error

    def figures(self, part: Measurement) -> Figures:
        """The figures so far."""
        with self._lock:
            seconds = max(self._last - self._began, 1e-9)
            ordered = sorted(self._latencies)
            return Figures(
                measured=part.value,
                records=self.records,
                bytes=self.bytes,
                seconds=seconds,
                mb_s=self.bytes / 1e6 / seconds,
                records_s=self.records / seconds,
                p50_ms=_quantile(ordered, 0.5),
                p99_ms=_quantile(ordered, 0.99),
                max_ms=ordered[-1] if ordered else None,
                complete=not self.stopped.is_set(),
            )

    def line(self) -> str:
        """A line of progress."""
        seconds = max(time.perf_counter() - self._began, 1e-9)
        return f"{self.records:,} records, {self.bytes / 1e6:,.0f} MB, {self.bytes / 1e6 / seconds:,.1f} MB/s"


def _quantile(ordered: Sequence[float], share: float) -> float | None:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def bench(
    only: Annotated[
        list[Measurement] | None, typer.Option(show_default=False, help="Measure only this; repeatable.")
    ] = None,
    topic: Annotated[
        str | None,
        typer.Option(show_default=False, help="An existing topic; it keeps the records. Default: a temporary topic."),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            parser=duration_option(),
            metavar="DURATION",
            show_default=False,
            help="Duration of each measurement: 20, 30s, 2m. Default: 5.",
        ),
    ] = None,
    records: Annotated[
        int | None, typer.Option(show_default=False, help="End each measurement after this number of records.")
    ] = None,
    size: Annotated[
        str | None, typer.Option("--bytes", show_default=False, help="End each after this volume, such as 2GiB.")
    ] = None,
    record_bytes: Annotated[int, typer.Option(help="Size of a record in bytes.")] = 1_000,
    batch_kib: Annotated[int, typer.Option(help="Size of a batch in KiB.")] = 1_024,
    ack: Annotated[int, typer.Option(help="When a batch counts as published. 1: ordered. 2: durable.")] = 1,
    order: Annotated[
        str | None,
        typer.Option(show_default=False, help="Order of the temporary topic: total (default), strong, none, local."),
    ] = None,
    publishers: Annotated[int, typer.Option(help="Number of concurrent publishers.")] = 1,
    brokers: BrokersOption = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Measure a running cluster through its client: publish, read from memory, round trip.

    `publish`: MB/s and records/s of whole batches, and the latency of acks. `read`: one reader reads the newest
    records repeatedly, from the memory of brokers. `round-trip`: send one record and wait for its ack, at most 1,000
    times. Each measurement ends at the first of --seconds, --records and --bytes. A megabyte is a million bytes. The
    client shares the machine with the cluster, unless you run it elsewhere with --brokers. Ctrl-C prints the figures
    so far.

    Examples:

        embarcadero bench

        embarcadero bench --seconds 20 --ack 2 --publishers 4 --record-bytes 100

        embarcadero bench --only round-trip --brokers log.example.com:9092 --json
    """
    load = _checked(Load(record_bytes, batch_kib, ack, publishers, _records(records, size, record_bytes), seconds))
    parts = _parts(only, topic, order)
    found: list[Figures] = []
    with connect(brokers, data_dir) as log, _topic(log, topic, order) as about:
        for part in parts:
            found.append(_measure(log, about, load, part))
            if not found[-1].complete:
                break
    _print(about, load, found, json=json)
    if not found[-1].complete:
        note("stopped by Ctrl-C: these are the figures so far")
        raise typer.Exit(_INTERRUPTED)


def _print(about: TopicInfo, load: Load, found: Sequence[Figures], *, json: bool) -> None:
    if json:
        facts = {"topic": about.name, "order": int(about.order), "durable_on": about.durable_on, **load._asdict()}
        print_json(facts | {"measured": [one._asdict() for one in found], "complete": found[-1].complete})
    else:
        print(f"topic {about.name}: order {order_label(about.order)}, ack={load.ack}, publishers: {load.publishers}")
        print(f"records of {load.record_bytes:,} bytes, batches of {load.rows:,} records")
        print("\n".join([_aligned(_COLUMNS), *(one.line() for one in found)]))
    if load.ack == Ack.DURABLE and not about.replicas:
        note(f"topic {about.name} has no copies on disk, so ack=2 means ack=1")


def _parts(only: list[Measurement] | None, topic: str | None, order: str | None) -> list[Measurement]:
    """The measurements, in order. Raise BadValue for options that exclude each other."""
    if topic is not None and order is not None:
        raise BadValue("--order is for the temporary topic, but --topic names an existing one", "omit one of them")
    parts = [part for part in Measurement if not only or part in only]
    if topic is None and Measurement.READ in parts and Measurement.PUBLISH not in parts:
        raise BadValue("a temporary topic has no records to read", "add --only publish, or name a --topic with records")
    return parts


def _records(records: int | None, size: str | None, record_bytes: int) -> int | None:
    """Combine --records and --bytes into a limit in records."""
    from embarcadero.config.key import BYTES, BadQuantity, quantity, whole

    try:
        limit = None if size is None else whole(quantity(size, BYTES, 1, "2GiB"), size, "bytes")
    except BadQuantity as error:
        raise BadValue(error.what, error.right) from None
    if limit is not None:
        limit = -(-limit // max(1, record_bytes))
    return min((bound for bound in (records, limit) if bound is not None), default=None)


def _checked(load: Load) -> Load:
    """Return the load with its default bound. Raise BadValue for a value outside its limits."""
    if not 1 <= load.record_bytes <= RECORD_BYTES_MAX:
        raise BadValue(f"--record-bytes {load.record_bytes} is out of range", f"use 1 to {RECORD_BYTES_MAX}")
    if not 1 <= load.batch_kib <= _BATCH_KIB_MAX:
        raise BadValue(f"--batch-kib {load.batch_kib} is out of range", f"use 1 to {_BATCH_KIB_MAX}")
    if load.ack not in (Ack.ORDERED, Ack.DURABLE):
        raise BadValue(f"--ack {load.ack} cannot be measured", "use 1 (ordered) or 2 (durable)")
    if not 1 <= load.publishers <= _PUBLISHERS_MAX:
        raise BadValue(f"--publishers {load.publishers} is out of range", f"use 1 to {_PUBLISHERS_MAX}")
    if load.records is not None and load.records < 1:
        raise BadValue("a measurement needs at least one record", "use at least 1 record, or 1 byte")
    if load.seconds is not None and not load.seconds > 0:
        raise BadValue(f"--seconds {load.seconds:g} is out of range", "use seconds above 0")
    return load if load.records is not None or load.seconds is not None else load._replace(seconds=_SECONDS)


@contextlib.contextmanager
def _topic(log: Log, name: str | None, order: str | None) -> Iterator[TopicInfo]:
    """The topic with this name; without a name, a temporary topic that is deleted afterwards."""
    if name is not None:
        about = log.describe(name)
        if about.schema is not None:
            raise BadValue(f"topic {name} has a schema, but bench writes raw records", "name another --topic, or none")
        yield about
        return
    about = log.create_topic(f"bench-{uuid4().hex[:12]}", order=order)
    try:
        yield about
    finally:
        try:
            log.delete_topic(about.name)
        except EmbarcaderoError as error:
            note(f"topic {about.name} was not deleted: {error.message}; `embarcadero topic delete {about.name}`")


def _measure(log: Log, about: TopicInfo, load: Load, part: Measurement) -> Figures:
    """Run one measurement; Ctrl-C ends it early. Raises the first error of a thread."""
    works: dict[Measurement, Callable[[Log, TopicInfo, Load, Meter], None]] = {
        Measurement.PUBLISH: _publish,
        Measurement.READ: _read,
        Measurement.ROUND_TRIP: _round_trip,
    }
    threads = load.publishers if part is Measurement.PUBLISH else 1
    if part is Measurement.ROUND_TRIP:
        trips = min(_TRIPS_MAX, load.records or _TRIPS_MAX)
        load = load._replace(records=trips, seconds=load.seconds or _SECONDS)
    meter = Meter(load)

    def work() -> None:
        try:
            works[part](log, about, load, meter)
        except BaseException as error:
            meter.fail(error)

    workers = [threading.Thread(target=work, name=f"bench-{part}-{number}", daemon=True) for number in range(threads)]
    for worker in workers:
        worker.start()
    _wait(workers, part, meter)
    if meter.error is not None:
        raise meter.error
    return meter.figures(part)


def _wait(workers: Sequence[threading.Thread], part: Measurement, meter: Meter) -> None:
    """Wait for the threads of a measurement, and show its progress on a terminal; Ctrl-C asks them to stop."""
    with contextlib.ExitStack() as stack:
        show: Callable[[str], Any] = lambda _: None  # noqa: E731
        if stderr_is_terminal():
            from rich.console import Console

            show = stack.enter_context(Console(stderr=True).status(f"{part} ...")).update
        for worker in workers:
            while worker.is_alive():
                try:
                    worker.join(_LOOK_S)
                    show(f"{part}: {meter.line()}")
                except KeyboardInterrupt:
                    if meter.stopped.is_set():
                        raise
                    meter.stopped.set()


# --- measurements -----------------------------------------------------------------------------------------------------
def _batch(load: Load) -> pa.RecordBatch:
    """Make a batch of random records, which do not compress."""
    import pyarrow as pa

    values = os.urandom(load.rows * load.record_bytes)
    cuts = range(0, len(values), load.record_bytes)
    return pa.record_batch({"value": pa.array([values[at : at + load.record_bytes] for at in cuts], pa.binary())})


def _publish(log: Log, about: TopicInfo, load: Load, meter: Meter) -> None:
    """Publish batches until the measurement is over, and wait for their acks."""
    batch = _batch(load)
    with log.publisher(about, ack=load.ack) as publisher:
        while (rows := meter.claim(batch.num_rows)) > 0:
            piece, began = batch.slice(0, rows), time.perf_counter()
            future = None
            while future is None and not meter.stopped.is_set():
                with contextlib.suppress(Backpressure):  # not accepted within the timeout: the window is full
                    future = publisher.publish(piece, timeout=_PATIENCE_S)
            if future is not None:
                future.add_done_callback(_counter(meter, rows, rows * load.record_bytes, began))
        publisher.flush()


def _counter(meter: Meter, rows: int, size: int, began: float) -> Callable[[RecordFuture], None]:
    """Return a callback that counts a batch when its outcome is known."""

    def count(future: RecordFuture) -> None:
        error = future.exception()
        if error is None:
            meter.add(rows, size, began)
        else:
            meter.fail(error)

    return count


def _read(log: Log, about: TopicInfo, load: Load, meter: Meter) -> None:
    """Read the newest batches of all lanes repeatedly."""
    tail = log.tail(about.name)
    lanes = tail.lanes or (tail,)
    batches = max(1, _READ_BYTES // (load.batch_kib * KIB) // len(lanes))
    spans = [(one.lane, max(one.start_index, one.hot_index, one.index - batches), one.index) for one in lanes]
    if not any(start < stop for _, start, stop in spans):
        raise BadValue(f"topic {about.name} has no records to read", "publish first, or omit --only")
    while True:
        before = meter.records
        for lane, start, stop in spans:
            if start < stop and not _read_lane(log, about, (lane, start, stop), meter):
                return
        if meter.records == before:
            raise BadValue(f"the newest batches of topic {about.name} have no records", "publish records first")


def _read_lane(log: Log, about: TopicInfo, span: tuple[int, int, int], meter: Meter) -> bool:
    """Read (lane, start, stop) once; return False when the measurement is over."""
    lane, start, stop = span
    for batches in log.scan(about.name, lane=lane, start=start, stop=stop, read="ordered"):
        for batch in batches:
            if batch.gap is None:
                if not meter.claim(batch.count):
                    return False
                meter.add(batch.count, batch.size)
    return True


def _round_trip(log: Log, about: TopicInfo, load: Load, meter: Meter) -> None:
    """Repeatedly send one record and wait for its ack, without linger."""
    value = os.urandom(load.record_bytes)
    with log.publisher(about, ack=load.ack, linger_ms=0) as publisher:
        while meter.claim(1):
            began = time.perf_counter()
            publisher.send(value).result()
            meter.add(1, len(value), began)
