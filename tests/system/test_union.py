"""Memory, files and the table are one log: every reader gets each position once, wherever it is stored."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pyarrow as pa
import pytest

import embarcadero as emb
from embarcadero import EntryKind, Gap, GapKind
from embarcadero.config import load
from embarcadero.errors import BadTable, Trimmed
from embarcadero.tier.storage import TierSettings
from tests.system.tiering import Tierer

pytestmark = pytest.mark.system

BATCHES, RECORDS = 120, 3
COLD, TABLE = 25, 30  # brokers have batches from COLD on, the table has those below TABLE


@pytest.fixture(scope="module")
def lake(tmp_path_factory: Any) -> Path:
    """The folder of the cluster's tables."""
    return Path(tmp_path_factory.mktemp("tier"))


@pytest.fixture(scope="module")
def log(lake: Path) -> Iterator[Any]:
    """Its rings are short, so that positions have to be looked up on disks, too. Its brokers read tables."""
    rings = {"fabric.order_slots": 64, "fabric.round_entries": 16}
    config = load(None, rings | {"tier.warehouse": TierSettings.local(lake).warehouse})
    with emb.local(brokers=2, replicas=1, log_bytes=32 << 20, config=config) as log:
        yield log


def _publish(log: Any, topic: str, first: int, count: int) -> None:
    with log.publisher(topic, ack=2) as publisher:
        for number in range(first, first + count):
            values = [b"%d" % (number * RECORDS + record) for record in range(RECORDS)]
            publisher.publish(pa.record_batch({"value": values}), partition=number % 2).result(30)


@pytest.fixture(scope="module")
def topic(log: Any, lake: Path) -> str:
    """Of 120 batches 25 are only in the table, five in both, the others only with brokers."""
    log.create_topic("orders", order=5, replicas=1, partitions=2)
    _publish(log, "orders", 0, BATCHES)
    tierer = Tierer(log, "orders", lake)
    lane = tierer.about.lane
    for stop in (10, 20, TABLE):
        tierer.tier(lane, stop, (stop - 1) * RECORDS)  # index 0 opened the session
    tierer.forget(lane, COLD)
    return "orders"


def _numbers(batches: Any) -> list[int]:
    return [int(value) for batch in batches for value in batch.to_arrow().column("value").to_pylist()]


def _table_numbers(table: pa.Table) -> list[int]:
    return [int(value) for value in table.column("value").to_pylist()]


def _polled(subscriber: Any, records: int) -> list[Any]:
    found: list[Any] = []
    while sum(batch.count for batch in found) < records:
        found.append(subscriber.poll(30))
        assert found[-1] is not None
    return found


def test_the_topic_starts_where_its_table_does(log: Any, topic: str) -> None:
    """tail returns the start for readers, and the start of the brokers' part."""
    tail = log.tail(topic)
    assert (tail.start_index, tail.start_seq) == (0, 0)
    assert (tail.hot_index, tail.hot_seq) == (COLD, (COLD - 1) * RECORDS)


def test_a_subscriber_reads_from_the_table_and_continues_with_brokers(log: Any, topic: str) -> None:
    """From the earliest record on, each once, in order, without a gap; sync and asyncio, by partition, too."""
    everything = list(range(BATCHES * RECORDS))
    with log.subscribe(topic) as subscriber:
        found = _polled(subscriber, len(everything))
        assert _numbers(found) == everything
        assert [batch.gap for batch in found] == [None] * BATCHES
        assert [batch.index for batch in found] == list(range(1, BATCHES + 1))
        assert [record.seq for record in found[3]] == [9, 10, 11]
    with log.subscribe(topic, partitions=[1]) as subscriber:
        odd = [number for number in everything if number // RECORDS % 2]
        assert _numbers(_polled(subscriber, len(odd))) == odd

    async def twin() -> list[Any]:
        async with await emb.aio.connect(log.address) as other:
            subscriber = await other.subscribe(topic)
            return [await subscriber.poll(30) for _ in range(BATCHES)]

    assert _numbers(asyncio.run(twin())) == everything


def test_a_subscriber_starts_and_seeks_anywhere(log: Any, topic: str) -> None:
    """By seq, index, time, earliest, latest: in the table, at its edge, with brokers; from a fresh or an old reader."""
    times = [batch.append_time for batches in log.scan(topic) for batch in batches]
    for number in (0, 7, COLD - 2, COLD - 1, TABLE, BATCHES - 1):
        for start in (number * RECORDS + 1, times[number]):
            with log.subscribe(topic, start=start) as subscriber:
                assert subscriber.poll(30).index == number + 1, (number, start)
    with log.subscribe(topic, start="latest") as subscriber:
        for number in (30, 3, 24):
            subscriber.seek(seq=number * RECORDS)
            assert subscriber.poll(30).index == number + 1
            subscriber.seek(time=times[number])
            assert subscriber.poll(30).index == number + 1
            subscriber.seek(index=number + 1)
            assert _numbers(_polled(subscriber, 9))[:9] == list(range(number * RECORDS, number * RECORDS + 9))
        subscriber.seek("earliest")
        assert subscriber.poll(30).index == 1
        subscriber.seek("latest")
        assert subscriber.poll(0.2) is None


def test_a_scan_with_control_has_every_index_of_the_union(log: Any, topic: str) -> None:
    """Kinds, seqs and checksums are as they were when brokers had all of it."""
    found = [batch for batches in log.scan(topic, control=True) for batch in batches]
    assert [batch.index for batch in found] == list(range(BATCHES + 2))
    assert [batch.kind for batch in found] == [
        EntryKind.SESSION_OPEN, *([EntryKind.BATCH] * BATCHES), EntryKind.SESSION_CLOSE,
    ]  # fmt: skip
    assert all(batch.crc for batch in found[1:-1])
    part = [batch for batches in log.scan(topic, start=5, stop=COLD + 2) for batch in batches]
    assert [batch.index for batch in part] == list(range(5, COLD + 2))
    assert [batch.index for batches in log.scan(topic, start=3, stop=8) for batch in batches] == [3, 4, 5, 6, 7]


def test_read_gives_the_union(log: Any, topic: str) -> None:
    """All of it, a part of the table, a part across the edge; by seq and by time."""
    times = [batch.append_time for batches in log.scan(topic) for batch in batches]
    assert _table_numbers(log.read(topic)) == list(range(BATCHES * RECORDS))
    for first, stop in ((4, 11), (70, 80), (100, 120), (0, 1)):
        part = log.read(topic, first, stop)
        assert _table_numbers(part) == part.column("_seq").to_pylist() == list(range(first, stop))
    assert _table_numbers(log.read(topic, times[5], times[27])) == list(range(5 * RECORDS, 27 * RECORDS))
    assert log.position_at(topic, times[5]).seq == 5 * RECORDS
    assert log.position_at(topic, times[COLD - 1]).index == COLD
    assert log.position_at(topic, times[35]).index == 36


def test_the_union_is_cut_into_pieces(log: Any, topic: str) -> None:
    """Pieces of the table are files, those of brokers spans of batches; they meet, and respect the stop."""
    stop = log.tail(topic).durable_index
    for first, last in ((0, stop), (5, 15), (12, 28), (COLD, stop)):
        cuts = log.measure(topic, first, last, 500)
        ends = [cut.index for cut in cuts]
        assert (ends[-1], ends) == (last, sorted(set(ends)))
        assert [cut.seq for cut in cuts] == [min(BATCHES, cut.index - 1) * RECORDS for cut in cuts]
    assert [cut.index for cut in log.measure(topic, 0, stop, 1)][:3] == [10, 20, TABLE]


def test_a_trim_by_the_user_stays_a_gap(log: Any, tmp_path: Path) -> None:
    """Records trimmed by a user are gone for all readers, in the table as well; records trimmed by the job are not."""
    log.create_topic("given-up", replicas=1, partitions=2)
    _publish(log, "given-up", 0, 20)
    tierer = Tierer(log, "given-up", tmp_path)
    lane = tierer.about.lane
    tierer.tier(lane, 15, 14 * RECORDS)
    tierer.forget(lane, 12)
    assert log.trim("given-up", before_index=6).index == 6
    assert log.tail("given-up").start_index == 6
    found = [batch for batches in log.scan("given-up", start=2) for batch in batches]
    assert found[0].gap == Gap(GapKind.TRIMMED, 2, 6)
    assert [batch.index for batch in found[1:]] == list(range(6, 21))
    assert _table_numbers(log.read("given-up"))[0] == 5 * RECORDS
    with pytest.raises(Trimmed):
        log.read("given-up", 3, 30)
    times = [batch.append_time for batch in found[1:]]
    assert log.trim("given-up", before_seq=4).index == 6  # less than before
    assert log.trim("given-up", before_index=3).index == 6
    with log.subscribe("given-up", start=4) as subscriber:
        assert [batch.index for batch in _polled(subscriber, RECORDS) if batch.gap is None] == [6]
    assert log.trim("given-up", before_time=times[3]).index == 9
    assert log.trim("given-up", before_seq=10 * RECORDS).seq == 10 * RECORDS
    with log.subscribe("given-up") as subscriber:
        assert subscriber.poll(30).seq == 10 * RECORDS
    index, seq = tierer.tier_all(lane)
    tierer.forget(lane, index)  # brokers have nothing: a future time is the end nevertheless
    later = datetime.now(UTC) + timedelta(hours=1)
    assert (log.position_at("given-up", later).seq, log.read("given-up", later).num_rows) == (seq, 0)
    with log.subscribe("given-up", start=later) as subscriber:
        assert subscriber.poll(0.3) is None
    assert _table_numbers(log.read("given-up")) == list(range(10 * RECORDS, 20 * RECORDS))


def test_each_position_comes_once_while_the_job_runs(log: Any, tmp_path: Path) -> None:
    """Publishing, tiering, dropping and reading in parallel: all readers and scans get every record."""
    log.create_topic("busy", replicas=1, partitions=2)
    total, stop = 150, Event()
    tierer = Tierer(log, "busy", tmp_path)
    lane = tierer.about.lane
    problems: list[BaseException] = []

    def job() -> None:
        try:
            while not stop.is_set() or log.tail("busy").hot_seq < total * RECORDS:
                tierer.forget(lane, tierer.tier_all(lane)[0])
        except BaseException as error:
            problems.append(error)

    subscribers = [log.subscribe("busy"), log.subscribe("busy", start="latest")]
    subscribers[1].seek("earliest")
    threads = [Thread(target=job), Thread(target=lambda: (_publish(log, "busy", 0, total), stop.set()))]
    for thread in threads:
        thread.start()
    found = _polled(subscribers[0], total * RECORDS)
    scans = 0
    while threads[0].is_alive() or not scans:
        seen = _numbers(batch for batches in log.scan("busy") for batch in batches)
        assert seen == list(range(len(seen)))
        scans += 1
    for thread in threads:
        thread.join(60)
    assert problems == []
    assert _numbers(found) == _numbers(_polled(subscribers[1], total * RECORDS)) == list(range(total * RECORDS))
    assert [batch.gap for batch in found if batch.gap] == []
    assert log.tail("busy").hot_seq == total * RECORDS
    assert _table_numbers(log.read("busy")) == list(range(total * RECORDS))


def test_a_slow_reader_is_overtaken_repeatedly(log: Any, tmp_path: Path) -> None:
    """Each time it reaches the end of its records, brokers have dropped the next ones: the table has them.

    The state of the table at the reader's last look would not.
    """
    log.create_topic("slow", replicas=1, partitions=2)
    tierer = Tierer(log, "slow", tmp_path)
    lane, rounds, found = tierer.about.lane, 4, []
    _publish(log, "slow", 0, 5)
    tierer.forget(lane, tierer.tier_all(lane)[0])
    with emb.connect(log.address, config=load(None, {"client.prefetch": 1})) as other:
        subscriber = other.subscribe("slow")
        for number in range(1, rounds + 1):
            found += _polled(subscriber, 4 * RECORDS)  # the fifth is fetched: nothing more is requested
            _publish(log, "slow", 5 * number, 5)
            tierer.forget(lane, tierer.tier_all(lane)[0])
            found += _polled(subscriber, RECORDS)
        found += _polled(subscriber, 5 * RECORDS)
    assert [batch.gap for batch in found if batch.gap] == []
    assert _numbers(found) == list(range(5 * (rounds + 1) * RECORDS))


def test_lanes_of_brokers_are_read_from_the_table_too(log: Any, tmp_path: Path) -> None:
    """Order 0: each lane has its part of the table, also a lane whose broker is gone; all readers give all of it."""
    log.create_topic("lanes", order=0, replicas=1, partitions=2)
    _publish(log, "lanes", 0, 30)
    assert {log.tail("lanes").durable_index for _ in range(4)} == {30}  # every broker has the lane's memory now
    log.cluster.kill_broker(1)
    _publish(log, "lanes", 30, 10)
    tierer = Tierer(log, "lanes", tmp_path)
    everything = list(range(40 * RECORDS))
    for part in (2, 1):  # then all of it: brokers have none left
        for lane in [lane.lane for lane in log.describe("lanes").lanes]:
            index, _ = tierer.tier_all(lane)
            tierer.forget(lane, index // part)
        assert sorted(_table_numbers(log.read("lanes"))) == everything
        with log.subscribe("lanes") as subscriber:
            assert sorted(_numbers(_polled(subscriber, len(everything)))) == everything
        for lane in [lane.lane for lane in log.describe("lanes").lanes]:
            found = [batch for batches in log.scan("lanes", lane=lane, control=True) for batch in batches]
            assert [batch.index for batch in found] == list(range(len(found)))


def test_a_damaged_or_missing_file_is_an_error_that_names_it(log: Any, tmp_path: Path) -> None:
    """Never a gap, never other bytes."""
    log.create_topic("damaged", replicas=1, partitions=2)
    _publish(log, "damaged", 0, 10)
    tierer = Tierer(log, "damaged", tmp_path)
    tierer.tier(tierer.about.lane, 8, 7 * RECORDS)
    tierer.forget(tierer.about.lane, 6)
    files = sorted(tmp_path.rglob("*.parquet"))
    assert [file.parent.parent.name for file in files] == ["damaged", "damaged__entries"]
    for file in files:
        file.rename(file.with_suffix(".away"))
        with log.subscribe("damaged") as subscriber, pytest.raises(BadTable, match=file.name):
            subscriber.poll(30)
        with pytest.raises(BadTable, match=file.name):
            log.read("damaged")
        file.with_suffix(".away").rename(file)
    assert _table_numbers(log.read("damaged")) == list(range(10 * RECORDS))


def test_a_client_without_the_extra_reads_the_table_through_brokers(log: Any, topic: str) -> None:
    """Records, positions of seqs and times, and sizes: a client without PyIceberg gets them all from brokers."""
    code = (
        "import sys; sys.modules['pyiceberg'] = None\n"
        "import embarcadero as emb\n"
        f"log = emb.connect({log.address!r})\n"
        f"print(log.read({topic!r}, 100, 110).num_rows)\n"
        f"print(log.read({topic!r}).num_rows)\n"
        f"print(log.position_of({topic!r}, seq=10).index, log.measure({topic!r}, 0, 60, 1 << 30)[-1].index)\n"
        "log.close()\n"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines() == ["10", str(BATCHES * RECORDS), "4 60"]
