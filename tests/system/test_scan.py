"""Scans and pieces against a real cluster: each position of a span once, from memory and from files; both clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from itertools import pairwise
from threading import Event, Thread
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner

import embarcadero as emb
from embarcadero import EntryKind, GapKind
from embarcadero.cli.main import app
from embarcadero.errors import BadValue, Closed, FuturePosition, TimedOut, Trimmed, UnknownTopic

pytestmark = pytest.mark.system

RECORDS = 50
BATCHES = 400


@pytest.fixture(scope="module")
def log() -> Iterator[Any]:
    """Memory is small, so that most records are read from segment files."""
    with emb.local(brokers=2, replicas=1, log_bytes=32 << 20) as log:
        yield log


@pytest.fixture(scope="module")
def topic(log: Any) -> str:
    """Batches of 50 records of 2 KiB, whose values name them: 40 MB, more than a broker keeps."""
    log.create_topic("large", replicas=1, partitions=2)
    with log.publisher("large", ack=2) as publisher:
        for number in range(BATCHES):
            values = [b"%d" % (number * RECORDS + record) + b"." * 2_000 for record in range(RECORDS)]
            publisher.publish(pa.record_batch({"value": values}), partition=number % 2)
    return "large"


def _numbers(batches: list[Any]) -> list[int]:
    return [int(value.split(b".")[0]) for batch in batches for value in batch.to_arrow().column("value").to_pylist()]


def _scanned(log: Any, topic: str, **options: Any) -> list[Any]:
    return [batch for batches in log.scan(topic, **options) for batch in batches]


def test_a_scan_has_every_record_of_its_span_once_in_order(log: Any, topic: str) -> None:
    """By default all records durable now; with ends, exactly those between them; the asyncio client gives the same."""
    batches = _scanned(log, topic)
    assert sorted(_numbers(batches)) == list(range(BATCHES * RECORDS))
    assert [batch.seq for batch in batches] == [number * RECORDS for number in range(BATCHES)]
    some = _scanned(log, topic, start=100, stop=200)
    assert [batch.index for batch in some] == list(range(100, 200))

    async def twin() -> list[Any]:
        async with await emb.aio.connect(log.address) as other:
            return [batch async for found in other.scan(topic, start=100, stop=200) for batch in found]

    assert _numbers(asyncio.run(twin())) == _numbers(some)


def test_a_scan_with_control_has_every_index(log: Any, topic: str) -> None:
    """The session's opening and end are there, with kind, CRC and append time; times never go back."""
    tail = log.tail(topic)
    batches = _scanned(log, topic, control=True)
    assert [batch.index for batch in batches] == list(range(tail.durable_index))
    kinds = [batch.kind for batch in batches]
    assert (kinds[0], kinds.count(EntryKind.BATCH)) == (EntryKind.SESSION_OPEN, BATCHES)
    assert EntryKind.SESSION_CLOSE in kinds
    assert all(one.append_us <= other.append_us for one, other in pairwise(batches))
    assert all(batch.crc for batch in batches if batch.kind is EntryKind.BATCH)


def test_a_scan_may_be_of_some_partitions(log: Any, topic: str) -> None:
    """Only their batches come, and the scan ends although the last index is of another one."""
    assert sorted(_numbers(_scanned(log, topic, partitions=[1]))) == [
        number for number in range(BATCHES * RECORDS) if number // RECORDS % 2 == 1
    ]


def test_pieces_of_a_span_are_read_in_parallel(log: Any, topic: str) -> None:
    """Measured pieces are about equal and meet exactly: scans of all of them give every record once."""
    stop = log.tail(topic).durable_index
    cuts = log.measure(topic, 0, stop, 4 << 20)
    assert 8 <= len(cuts) <= 12
    assert (cuts[-1].index, cuts[-1].seq) == (stop, BATCHES * RECORDS)
    found = []
    for start, cut in zip([0, *(cut.index for cut in cuts)], cuts, strict=False):
        piece = _scanned(log, topic, start=start, stop=cut.index)
        assert piece[-1].seq + piece[-1].count == cut.seq
        assert sum(batch.size for batch in piece) < 6 << 20
        found += piece
    assert [batch.seq for batch in found] == [number * RECORDS for number in range(BATCHES)]


def test_a_scan_that_is_left_stops_fetching(log: Any, topic: str) -> None:
    """Leaving the loop ends the scan; the log continues normally."""
    for _batches in log.scan(topic):
        break
    del _batches
    asyncio.run(_left(log.address, topic))
    assert len(_scanned(log, topic, start=5, stop=10)) == 5


async def _left(address: str, topic: str) -> None:
    async with await emb.aio.connect(address) as log:
        scan = log.scan(topic)
        await anext(scan)
        assert len(log.brokers._drivers) == 1
        await scan.aclose()
        assert not log.brokers._drivers


def test_a_trimmed_part_is_one_gap_within_the_span(log: Any) -> None:
    """Gaps are clipped to the requested span, and a scan from None starts where the topic does."""
    log.create_topic("trimmed", replicas=1)
    with log.publisher("trimmed", ack=2) as publisher:
        for number in range(20):
            publisher.publish(pa.record_batch({"value": [b"%d" % number]})).result(30)
    log.trim("trimmed", before_index=11)
    while _scanned(log, "trimmed", start=2, stop=3)[0].gap is None or _scanned(log, "trimmed")[0].index != 11:
        pass  # each broker learns of it in its own time
    span = _scanned(log, "trimmed", start=2, stop=6)
    assert [(batch.kind, batch.gap) for batch in span] == [(None, emb.Gap(GapKind.TRIMMED, 2, 6))]
    over = _scanned(log, "trimmed", start=2, stop=13)
    assert [batch.gap for batch in over] == [emb.Gap(GapKind.TRIMMED, 2, 11), None, None]
    assert _scanned(log, "trimmed")[0].index == 11
    assert _scanned(log, "trimmed", stop=5) == []
    with pytest.raises(Trimmed):
        log.measure("trimmed", 2, 6, 100)


def test_a_scan_waits_for_future_records_and_times_out_without_progress(log: Any) -> None:
    """A stop beyond the end is waited for; without progress it is TimedOut; an invalid span is refused immediately."""
    log.create_topic("later", replicas=1)
    with pytest.raises(TimedOut):
        _scanned(log, "later", stop=2, timeout=0.2)
    found: list[Any] = []
    begun = Event()

    def reader() -> None:
        begun.set()
        found.extend(_scanned(log, "later", start=0, stop=4, control=True, timeout=30))

    thread = Thread(target=reader)
    thread.start()
    begun.wait(30)
    with log.publisher("later") as publisher:
        for _ in range(3):
            publisher.send(b"x").result(30)
    thread.join(30)
    assert [batch.index for batch in found] == [0, 1, 2, 3]
    for wrong in ({"start": 3, "stop": 2}, {"start": -1}, {"read": "tea leaves"}):
        with pytest.raises(BadValue):
            log.scan("later", **wrong)
    with pytest.raises(UnknownTopic):
        next(log.scan("nothing"))
    with pytest.raises(FuturePosition):
        log.measure("later", 0, 1_000, 10)


def test_a_lane_of_a_broker_is_scanned_by_its_number(log: Any) -> None:
    """Orders 0 and 1: the lane must be given; all lanes together have every record; each can be measured."""
    log.create_topic("lanes", order=0, replicas=1)
    with log.publisher("lanes", ack=2) as publisher:
        for number in range(40):
            publisher.publish(pa.record_batch({"value": [b"%d" % number]}))
    with pytest.raises(BadValue):
        next(log.scan("lanes"))
    lanes = [lane.lane for lane in log.describe("lanes").lanes]
    found = {lane: _scanned(log, "lanes", lane=lane) for lane in lanes}
    assert sorted(number for batches in found.values() for number in _numbers(batches)) == list(range(40))
    for lane, batches in found.items():
        cuts = log.measure("lanes", 0, len(batches), 500, lane=lane)
        assert (cuts[-1].index, cuts[-1].seq) == (len(batches), len(batches))
        assert sum(cut.bytes for cut in cuts) == sum(batch.size for batch in batches)


def test_closing_the_log_ends_a_scan(log: Any) -> None:
    """A waiting scan learns that the log was closed."""
    other = emb.connect(log.address)
    log.create_topic("endless", replicas=1)
    ended: list[Exception] = []
    begun = Event()

    def reader() -> None:
        try:
            begun.set()
            _scanned(other, "endless", stop=10, timeout=None)
        except Exception as error:
            ended.append(error)

    thread = Thread(target=reader)
    thread.start()
    begun.wait(30)
    other.close()
    thread.join(30)
    assert [type(error) for error in ended] == [Closed]


def test_the_progress_of_a_reader_is_visible(log: Any, topic: str) -> None:
    """note_progress is shown by readers, with the lag in records, and by `topic describe` and `status`."""
    half = next(iter(log.scan(topic, start=200, stop=201)))[0]
    log.note_progress(topic, "billing", {half.lane: (half.index, half.seq)})
    while not log.readers(topic):
        continue
    (reader,) = log.readers(topic)
    assert (reader.reader, reader.places) == ("billing", {half.lane: (half.index, half.seq)})
    assert (reader.lag, reader.ago_s < 60) == (BATCHES * RECORDS - half.seq, True)
    folder = ["--data-dir", str(log.cluster.data_dir)]
    told = json.loads(CliRunner().invoke(app, ["topic", "describe", topic, "--json", *folder]).stdout)
    assert [(one["reader"], one["lag"]) for one in told["readers"]] == [("billing", reader.lag)]
    assert "billing" in CliRunner().invoke(app, ["status", *folder]).stdout
    assert "billing" in CliRunner().invoke(app, ["topic", "describe", topic, *folder]).stdout

    log.note_progress(topic, "daily sums", {half.lane: (half.index, half.seq)})
    names: set[str] = set()
    while names != {"billing", "daily sums"}:  # other brokers learn of it within a second
        told = json.loads(CliRunner().invoke(app, ["topic", "readers", topic, "--json", *folder]).stdout)
        names = {one["reader"] for one in told}
    assert [one["lag"] for one in told] == [reader.lag, reader.lag]
    done = CliRunner().invoke(app, ["topic", "remove-reader", topic, "billing", *folder])
    assert (done.exit_code, "removed reader billing" in done.stdout) == (0, True)
    shown = CliRunner().invoke(app, ["topic", "readers", topic, *folder]).stdout
    assert ("daily sums" in shown, "billing" in shown) == (True, False)
    log.remove_reader(topic, "daily sums")
    with pytest.raises(BadValue, match=rf"topic '{topic}' has no reader 'daily sums' .*topic readers {topic}"):
        log.remove_reader(topic, "daily sums")
    log.note_progress(topic, "billing", {half.lane: (half.index, half.seq)})
    while [each.reader for each in log.readers(topic)] != ["billing"]:  # it is alive, and returns
        continue


def test_the_batch_of_a_record_or_an_index_is_found(log: Any, topic: str) -> None:
    """In memory and in files, by both clients; beyond the end is an error, the end itself is a position."""
    lane, end = log.describe(topic).lane, log.tail(topic)
    first = log.position_of(topic, seq=0)

    assert [log.position_of(topic, seq=seq).seq for seq in (49, 50, 137, 19_999)] == [0, 50, 100, 19_950]
    assert log.position_of(topic, index=first.index + 3) == emb.Position(lane, first.index + 3, 3 * RECORDS)
    assert log.position_of(topic, seq=end.seq) == emb.Position(lane, end.index, end.seq)
    with pytest.raises(FuturePosition):
        log.position_of(topic, seq=end.seq + 1)
    with pytest.raises(BadValue, match="exactly one position"):
        log.position_of(topic)

    async def found() -> emb.Position:
        async with await emb.aio.connect(log.address) as other:
            return await other.position_of(topic, seq=137)

    assert asyncio.run(found()) == log.position_of(topic, seq=137)
