"""The source against a real cluster, called as Spark calls it but without Spark: starts, limits, plans, losses."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.datasource import EqualTo, GreaterThan, GreaterThanOrEqual, In, IsNotNull, LessThan, Not

import embarcadero as emb
from embarcadero.client.results import Batch
from embarcadero.errors import BadSchema, BadValue, FuturePosition, RecordsLost, Trimmed, UnknownTopic
from embarcadero.spark.read import readers
from embarcadero.spark.read.options import RecordPosition, TaskSpan
from embarcadero.spark.read.readers import PushingReader, UnlimitedReader
from embarcadero.types import Gap, GapKind
from tests.spark.sources import ALL, again, batch, column, micro_batches, source, stream, unlimited

COUNT = 500
PER_BATCH = 10


def fill(log: emb.Log, topic: str, count: int = COUNT, per_batch: int = PER_BATCH, first: int = 0) -> None:
    """Records in batches of the same size; their values are their numbers."""
    with log.publisher(topic, ack=2) as publisher:
        for number in range(first, first + count, per_batch):
            values = [b"%d" % each for each in range(number, min(number + per_batch, first + count))]
            publisher.publish(pa.record_batch({"value": pa.array(values, pa.binary())}), partition=None)
            publisher.flush()


def until_it_differs(look: Callable[[], Any], known: Any) -> None:
    """Poll again.

    A follower of a lane may still get records that a broker has, and each poll informs one more broker.
    """
    while look() == known:
        continue


@pytest.fixture(scope="module")
def filled(log: emb.Log) -> str:
    """A topic that no test changes: 500 records in 50 batches."""
    log.create_topic("filled", replicas=1)
    fill(log, "filled")
    return "filled"


@pytest.mark.parametrize(
    ("starting", "first"),
    [
        ({"startingOffsets": "earliest"}, 0), ({"startingOffsets": "latest"}, COUNT), ({"startingOffsets": "137"}, 137),
        ({"startingOffsets": "LANE:137"}, 137), ({"startingOffsets": 'LANE:{"seq": 140}'}, 140),
        ({"startingOffsets": 'LANE:{"index": 8}'}, 70), ({"startingOffsets": 'LANE:"latest"'}, COUNT),
        ({"startingOffsets": str(COUNT)}, COUNT), ({"startingTimestamp": "1"}, 0),
    ],
)  # fmt: skip
def test_reads_start_at_the_given_position(log: emb.Log, filled: str, starting: dict[str, str], first: int) -> None:
    """Batch reads and streams alike, to the record. (Index 0 opened the session: batch 8 has records 70 to 79.)"""
    lane = log.describe(filled).lane
    options = {name: value.replace("LANE:", f'{{"{lane}": ') for name, value in starting.items()}
    options = {name: value + ("}" if value.startswith("{") else "") for name, value in options.items()}
    wanted = list(range(first, COUNT))
    reader, flow = batch(log, filled, **options), stream(log, filled, **options)

    assert column(reader, reader.partitions()) == wanted
    assert micro_batches(flow, flow.initialOffset())[0] == ([wanted] if wanted else [])


def test_a_time_is_a_start(log: emb.Log, filled: str) -> None:
    """The first batch appended at or after it; all of the topic if it is older."""
    middle = next(found for batches in log.scan(filled) for found in batches if found.seq == 250)
    flow = stream(log, filled, startingTimestamp=middle.append_us)

    assert micro_batches(flow, flow.initialOffset())[0] == [list(range(250, COUNT))]


def test_reads_end_at_the_given_position(log: emb.Log, filled: str) -> None:
    """The end is exclusive, to the record; positions beyond or below the topic are refused."""
    reader = batch(log, filled, startingOffsets=13, endingOffsets=487, minPartitions=9)

    assert column(reader, reader.partitions()) == list(range(13, 487))
    assert len(reader.partitions()) >= 9
    assert batch(log, filled, startingOffsets=5, endingOffsets=5).partitions() == []
    with pytest.raises(BadValue, match=r"endingOffsets \(seq 5\) is before startingOffsets \(seq 6\)"):
        batch(log, filled, startingOffsets=6, endingOffsets=5).partitions()
    with pytest.raises(FuturePosition, match="'endingOffsets': seq 501 is beyond the end of lane"):
        batch(log, filled, endingOffsets=COUNT + 1).partitions()
    with pytest.raises(BadValue, match="names lane 77, but the lanes of topic 'filled' are"):
        batch(log, filled, startingOffsets='{"77": 1}').partitions()


@pytest.mark.parametrize("limit", [1, 7, 10, 64, 499, 500, 10_000])
def test_a_limit_on_records_is_exact(log: emb.Log, filled: str, limit: int) -> None:
    """Every micro-batch except the last has exactly this many, wherever batches end."""
    flow = stream(log, filled, startingOffsets=COUNT - min(COUNT, 5 * limit), maxRecordsPerTrigger=limit)
    found, _ = micro_batches(flow, flow.initialOffset())

    assert [seq for each in found for seq in each] == list(range(COUNT - min(COUNT, 5 * limit), COUNT))
    assert {len(each) for each in found[:-1]} <= {limit}


def test_a_limit_on_bytes_is_kept_in_whole_batches(log: emb.Log, filled: str) -> None:
    """No micro-batch is above it, unless one batch is; and none is far below."""
    sizes = {found.seq: found.size for batches in log.scan(filled) for found in batches}
    largest = max(sizes.values())
    for limit in (1, 3 * largest, 20 * largest):
        flow = stream(log, filled, startingOffsets="earliest", maxBytesPerTrigger=limit)
        found, _ = micro_batches(flow, flow.initialOffset())
        taken = [sum(sizes.get(seq, 0) for seq in each) for each in found]

        assert [seq for each in found for seq in each] == list(range(COUNT))
        assert max(taken) <= max(limit, largest)
        assert min(taken[:-1], default=limit) > limit - 2 * largest - limit // 16


def test_both_limits_hold_though_spark_knows_one(log: emb.Log, filled: str) -> None:
    """The limit that is reached first; neither when Spark wants all records."""
    largest = max(found.size for batches in log.scan(filled) for found in batches)
    flow = stream(log, filled, startingOffsets="earliest", maxRecordsPerTrigger=35, maxBytesPerTrigger=2 * largest)
    found, _ = micro_batches(flow, flow.initialOffset())
    assert {len(each) for each in found[:-1]} == {20}

    flow = stream(log, filled, startingOffsets="earliest", maxRecordsPerTrigger=15, maxBytesPerTrigger=20 * largest)
    found, _ = micro_batches(flow, flow.initialOffset())
    assert {len(each) for each in found[:-1]} == {15}
    assert len(micro_batches(flow, flow.initialOffset(), ALL)[0]) == 1


def test_available_now_ends_at_the_records_that_were_there(log: emb.Log) -> None:
    """Later records are left for the next run, which continues from the checkpoint."""
    log.create_topic("now", replicas=1)
    fill(log, "now", 95)
    flow = stream(log, "now", startingOffsets="earliest", maxRecordsPerTrigger=20)
    start = flow.initialOffset()
    flow.prepareForTriggerAvailableNow()
    fill(log, "now", 50, first=95)
    found, end = micro_batches(flow, start)
    assert [len(each) for each in found] == [20, 20, 20, 20, 15]
    assert flow.reportLatestOffset()[str(log.describe("now").lane)]["seq"] == 145

    later = stream(log, "now", startingOffsets="earliest", maxRecordsPerTrigger=20)
    later.prepareForTriggerAvailableNow()
    assert [len(each) for each in micro_batches(later, again(end))[0]] == [20, 20, 10]


def test_a_micro_batch_has_the_same_tasks_whenever_it_is_planned(log: emb.Log) -> None:
    """Its offsets define them, as long as the log between them is unchanged: more records make no difference."""
    log.create_topic("cuts", replicas=1)
    fill(log, "cuts", 100)
    flow = stream(log, "cuts", startingOffsets="earliest", minPartitions=7)
    start = flow.initialOffset()
    end = flow.latestOffset(start, ALL)
    tasks = [task.value for task in flow.partitions(start, end)]
    rows = [column(flow, [task]) for task in flow.partitions(start, end)]
    fill(log, "cuts", 500, first=100)
    other = stream(log, "cuts", startingOffsets="latest", minPartitions=7)

    assert len(tasks) >= 7
    assert "cuts" not in str({**end, "topic": ""})
    assert [seq for each in rows for seq in each] == list(range(100))
    assert [task.value for task in other.partitions(again(start), again(end))] == tasks
    assert [column(other, [task]) for task in other.partitions(again(start), again(end))] == rows


def test_a_checkpoint_of_the_previous_version_continues_with_its_tasks(log: emb.Log) -> None:
    """Its offsets have the cuts between them; later offsets have none."""
    log.create_topic("older", replicas=1)
    fill(log, "older", 100)
    flow = stream(log, "older", startingOffsets="earliest", maxRecordsPerTrigger=50)
    start = flow.initialOffset()
    end = flow.latestOffset(start, flow.getDefaultReadLimit())
    lane = str(log.describe("older").lane)
    planned = again({**end, lane: {**end[lane], "cuts": [[2, 10], [4, 30]]}})

    tasks = flow.partitions(start, planned)
    assert [column(flow, [task]) for task in tasks] == [[*range(10)], [*range(10, 30)], [*range(30, 50)]]
    found, last = micro_batches(flow, planned)
    assert found == [list(range(50, 100))]
    assert "cuts" not in last[lane]


def test_a_batch_of_many_records_is_shared_by_tasks(log: emb.Log) -> None:
    """minPartitions counts also where there is only one batch."""
    log.create_topic("single", replicas=1)
    fill(log, "single", 1_000, per_batch=1_000)
    reader = batch(log, "single", minPartitions=8, startingOffsets=3)
    tasks = reader.partitions()

    assert len(tasks) == 8
    assert column(reader, tasks) == list(range(3, 1_000))


def test_only_the_wanted_partitions_and_columns_are_read(log: emb.Log) -> None:
    """Partitions are filtered by brokers, columns are never built."""
    log.create_topic("parts", replicas=1, partitions=4)
    with log.publisher("parts", ack=2) as publisher:
        for number in range(40):
            batch_of_one = pa.record_batch({"value": pa.array([b"%d" % number], pa.binary())})
            publisher.publish(batch_of_one, partition=number % 4).result()
    made = source(log, "parts", partitions="1,3", columns="partition,seq,topic")
    reader = made.reader(made.schema())
    rows = pa.Table.from_batches([rows for task in reader.partitions() for rows in reader.read(task)])

    assert rows.column_names == ["partition", "seq", "topic"]
    assert rows["seq"].to_pylist() == [seq for seq in range(40) if seq % 4 in (1, 3)]
    assert set(rows["topic"].to_pylist()) == {"parts"}


def test_a_column_that_spark_adds_cannot_be_in_a_topics_schema(log: emb.Log) -> None:
    """Reported when the frame is loaded, with the reserved names."""
    log.create_topic("clash", schema=pa.schema([("_Timestamp", pa.int64())]))
    with pytest.raises(BadSchema, match="'_Timestamp' has the name of a column that every topic has"):
        source(log, "clash").schema()


# --- filters ----------------------------------------------------------------------------------------------------------
def pushing(log: emb.Log, topic: str, filters: list[Any], **options: Any) -> tuple[PushingReader, list[Any]]:
    """A reader after filters were pushed, and the filters that remain for Spark."""
    reader = PushingReader(batch(log, topic, **options)._reader)
    return reader, list(reader.pushFilters(filters))


def test_filters_narrow_the_read(log: emb.Log, filled: str) -> None:
    """By seq and index to the record; filters that are not applied exactly are left to Spark."""
    left = [Not(EqualTo(("seq",), 5)), EqualTo(("value",), b"5"), IsNotNull(("key",))]
    reader, unanswered = pushing(
        log, filled, [GreaterThanOrEqual(("seq",), 105), LessThan(("seq",), 222), IsNotNull(("seq",)), *left]
    )
    tasks = reader.partitions()

    assert unanswered == left
    assert [(task.value.start.seq, task.value.stop.seq) for task in tasks] == [(105, 222)]
    assert column(reader, tasks) == list(range(105, 222))
    reader, _ = pushing(log, filled, [GreaterThan(("index",), 8), LessThan(("index",), 11)], columns="seq,index")
    assert column(reader, reader.partitions()) == list(range(80, 100))
    reader, _ = pushing(log, filled, [In(("seq",), (3, None, 499, 1_000)), GreaterThan(("seq",), 3)])
    assert column(reader, reader.partitions()) == [499]
    for none in (GreaterThan(("seq",), 10_000), LessThan(("seq",), 0), EqualTo(("lane",), 4_000)):
        assert pushing(log, filled, [none], columns="seq,lane")[0].partitions() == []


def test_filters_on_partitions_and_times_are_applied(log: emb.Log) -> None:
    """A partition is left out by brokers; a time of appending becomes a position in the log."""
    log.create_topic("timed", replicas=1, partitions=3, schema=pa.schema([("n", pa.int64())]))
    with log.publisher("timed", ack=2) as publisher:
        for number in range(30):
            publisher.publish(pa.table({"n": [number]}), partition=number % 3).result()
    times = [found.append_us for batches in log.scan("timed") for found in batches]
    moment = datetime.fromtimestamp(times[12] // 1_000_000, UTC).replace(microsecond=times[12] % 1_000_000)
    later = sum(each >= times[12] for each in times)
    reader, left = pushing(
        log, "timed", [GreaterThanOrEqual(("_timestamp",), moment), EqualTo(("_partition",), 1)], partitions="0,1"
    )
    before, _ = pushing(log, "timed", [LessThan(("_timestamp",), moment)])

    assert left == []
    assert column(reader, reader.partitions(), "n") == [n for n in range(30 - later, 30) if n % 3 == 1]
    assert column(before, before.partitions(), "n") == list(range(30 - later))
    assert reader.partitions()[0].value.start.seq == 30 - later


def test_push_down_is_enabled_only_where_spark_asks_for_it(
    log: emb.Log, filled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And only if the user said that the frame is used once."""
    assert not readers.filters_are_pushed()
    monkeypatch.setattr(readers, "filters_are_pushed", lambda: True)
    assert type(batch(log, filled)) is readers.BatchReader
    assert type(batch(log, filled, pushFilters="true")) is PushingReader


# --- errors
# -------------------------------------------------------------------------------------------------------------
def test_trimmed_records_are_data_loss(log: emb.Log, caplog: pytest.LogCaptureFixture) -> None:
    """Under a running query, and under a named start; unless the user chooses to continue."""
    log.create_topic("trimmed", replicas=1)
    fill(log, "trimmed", 200)
    strict = stream(log, "trimmed", startingOffsets="earliest", maxRecordsPerTrigger=50)
    start = strict.initialOffset()
    end = strict.latestOffset(start, strict.getDefaultReadLimit())
    log.trim("trimmed", before_seq=120)

    with pytest.raises(Trimmed, match=r"records \[50, 120\) of lane .* were trimmed .*failOnDataLoss"):
        strict.latestOffset(end, ALL)
    with pytest.raises(Trimmed, match=r"of topic 'trimmed' were trimmed before they were read .*failOnDataLoss"):
        until_it_differs(lambda: column(strict, strict.partitions(start, end)), list(range(50)))
    with pytest.raises(Trimmed, match="'startingOffsets': records before seq 120"):
        stream(log, "trimmed", startingOffsets="7").initialOffset()

    loose = stream(log, "trimmed", startingOffsets="7", failOnDataLoss="false")
    with caplog.at_level(logging.WARNING, "embarcadero.spark"):
        assert micro_batches(loose, end)[0] == [list(range(120, 200))]
        assert column(loose, loose.partitions(start, end)) == []
    assert "were trimmed before they were read" in caplog.text
    assert micro_batches(loose, loose.initialOffset())[0] == [list(range(120, 200))]
    log.trim("trimmed", before_seq=200)
    assert micro_batches(loose, end)[0] == [[]]


def test_losses_of_a_crash_are_data_loss_for_a_stream(
    log: emb.Log, filled: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If it reads records before they are durable. Others, and those that chose to continue, are warned."""

    class Lossy:
        describe = log.describe

        def scan(self, *_: object, **__: object) -> list[list[Batch]]:
            return [[Batch.of_gap(0, Gap(GapKind.LOST, 7, 4_000), 60), Batch.of_gap(0, Gap(GapKind.SKIPPED, 1, 2), 60)]]

    monkeypatch.setattr("embarcadero.spark.read.tasks.shared_log", lambda *_: Lossy())
    span = TaskSpan(0, RecordPosition(0, 0), RecordPosition(50, 500), filled)
    with pytest.raises(RecordsLost, match=r"batches \[7, 4000\) of lane 0 .*were lost with the memory"):
        list(stream(log, filled, read="ordered")._reader.read(span))
    assert list(stream(log, filled)._reader.read(span)) == []
    assert list(batch(log, filled)._reader.read(span)) == []
    assert list(stream(log, filled, read="ordered", failOnDataLoss="false")._reader.read(span)) == []
    assert caplog.text.count("were lost") == 3


def test_a_deleted_or_recreated_topic_is_noticed(log: emb.Log) -> None:
    """A query must not continue in another log of the same name."""
    log.create_topic("gone", replicas=1)
    fill(log, "gone", 50)
    flow = stream(log, "gone", startingOffsets="earliest")
    before = flow.initialOffset()
    end = flow.latestOffset(before, ALL)
    log.delete_topic("gone")
    with pytest.raises(UnknownTopic, match="gone"):
        flow.latestOffset(end, ALL)

    log.create_topic("gone", replicas=1)
    fill(log, "gone", 20)
    with pytest.raises(RecordsLost, match=f"deleted and created again: the query read id {end['id']}"):
        flow.latestOffset(end, ALL)
    with pytest.raises(RecordsLost, match="deleted and created again"):  # a micro-batch that was planned before
        stream(log, "gone").partitions(before, end)
    older = {key: value for key, value in end.items() if key != "id"}  # as an earlier version wrote it
    with pytest.raises(RecordsLost, match="is gone, but was read only to seq 50: the topic was created again"):
        flow.latestOffset(older, ALL)
    with pytest.raises(RecordsLost, match=r"of topic 'gone' is gone, and its records \[0, 50\) were not read"):
        flow.partitions(flow.initialOffset(), older)
    loose = stream(log, "gone", failOnDataLoss="false")
    assert micro_batches(loose, end)[0] == [list(range(20))]


# --- PySpark 4.0 and 4.1 ----------------------------------------------------------------------------------------------
def whole(flow: UnlimitedReader, start: dict[str, Any], name: str = "seq") -> tuple[list[Any], dict[str, Any]]:
    """The micro-batch from `start` to the end of the topic, as Spark asks for it there; and that end."""
    end = again(flow.latestOffset())
    return column(flow, flow.partitions(again(start), end), name), end


def test_without_admission_control_a_micro_batch_has_all_available_records(log: emb.Log) -> None:
    """Over a restart, in as many tasks as requested; a session that opens and closes makes no empty micro-batch."""
    log.create_topic("unlimited", replicas=1)
    fill(log, "unlimited", 100)
    flow = unlimited(log, "unlimited", startingOffsets="earliest", minPartitions=4)
    rows, end = whole(flow, flow.initialOffset())
    assert rows == list(range(100))
    assert len(flow.partitions(flow.initialOffset(), end)) >= 4
    before = log.tail("unlimited").index
    log.publisher("unlimited", session="idle", order="strong").close()
    assert log.tail("unlimited").index > before
    latest = unlimited(log, "unlimited", startingOffsets="latest")
    for reader in (flow, latest, unlimited(log, "unlimited")):
        assert again(reader.latestOffset()) == end
    assert again(latest.initialOffset()) == end

    fill(log, "unlimited", 60, first=100)
    later = unlimited(log, "unlimited", startingOffsets="earliest")
    assert whole(later, end)[0] == list(range(100, 160))
    later.latestOffset()  # Spark asks again when the micro-batch is done
    until_it_differs(lambda: log.readers("unlimited"), [])
    assert {reader.reader: reader.lag for reader in log.readers("unlimited")} == {"spark": 0}


def test_without_admission_control_losses_are_found_when_tasks_are_planned(
    log: emb.Log, caplog: pytest.LogCaptureFixture
) -> None:
    """Trimmed records, a recreated topic, a lane that is gone; or the user chooses to continue."""
    log.create_topic("losing", replicas=1)
    fill(log, "losing", 100)
    flow = unlimited(log, "losing", startingOffsets="earliest")
    start = flow.initialOffset()
    log.trim("losing", before_seq=40)
    with pytest.raises(Trimmed, match=r"records \[0, 40\) of lane .* were trimmed .*failOnDataLoss"):
        whole(flow, start)
    loose = unlimited(log, "losing", startingOffsets="earliest", failOnDataLoss="false")
    rows, end = whole(loose, start)
    assert rows == list(range(40, 100))
    with pytest.raises(RecordsLost, match="lane 77 of topic 'losing' is gone, but was read only to seq 10"):
        whole(flow, end | {"77": {"index": 1, "seq": 10}})

    log.delete_topic("losing")
    log.create_topic("losing", replicas=1)
    fill(log, "losing", 20)
    with pytest.raises(RecordsLost, match=f"deleted and created again: the query read id {end['id']}"):
        whole(unlimited(log, "losing"), end)
    again_loose = unlimited(log, "losing", failOnDataLoss="false")
    assert whole(again_loose, end)[0] == list(range(20))
    assert caplog.text.count("deleted and created again") == 1


def test_topics_of_order_0_are_streams_of_lanes(log: emb.Log) -> None:
    """Limits are shared by lanes; a new lane is read from its beginning."""
    log.create_topic("lanes", order=0, replicas=1)
    flow = stream(log, "lanes", startingOffsets="latest", maxRecordsPerTrigger=30, minPartitions=4)
    start = flow.initialOffset()
    assert set(start) == {"topic", "reader", "id"}
    for first in range(0, 200, 50):
        fill(log, "lanes", 50, first=first)
    found, end = micro_batches(flow, start, name="value")

    assert {len(each) for each in found[:-1]} == {30}
    assert sorted(int(value) for each in found for value in each) == list(range(200))
    assert len(log.tail("lanes").lanes) == len(end) - 3 == 2
    with pytest.raises(BadValue, match=r'a seq is a position in one of its lanes .*use JSON by lane.*"seq": 1000'):
        stream(log, "lanes", startingOffsets="5").initialOffset()


def test_a_lane_that_is_gone_was_read_to_its_end_or_records_are_lost(log: emb.Log) -> None:
    """A lane that was read to its end can miss nothing: it is dropped."""
    log.create_topic("lanes-gone", order=0, replicas=1)
    fill(log, "lanes-gone", 25)
    flow = stream(log, "lanes-gone", startingOffsets="earliest")
    end = flow.latestOffset(flow.initialOffset(), ALL)
    read_to_its_end = {"78": {"index": 1, "seq": 10, "ended": True}}

    assert flow.latestOffset(end | read_to_its_end, ALL) == end
    lost = {"77": {"index": 1, "seq": 10}}
    with pytest.raises(RecordsLost, match="lane 77 of topic 'lanes-gone' is gone, but was read only to seq 10"):
        flow.latestOffset(end | lost, ALL)
    assert stream(log, "lanes-gone", failOnDataLoss="false").latestOffset(end | lost, ALL).keys() == end.keys()


def test_a_lane_whose_broker_died_is_read_to_its_end(log: emb.Log) -> None:
    """The stream continues in the new lanes, and each record comes once. (Keep it last: it kills a broker.)"""
    log.create_topic("mortal", order=0, replicas=1)
    for first in range(0, 100, 25):
        fill(log, "mortal", 25, first=first)
    flow = stream(log, "mortal", startingOffsets="earliest", minPartitions=3)
    found, end = micro_batches(flow, flow.initialOffset(), name="value")
    log.cluster.kill_broker(log.describe("mortal").lanes[0].broker)
    count = 100
    while all(lane.open for lane in log.describe("mortal").lanes):
        fill(log, "mortal", 25, first=count)
        more, end = micro_batches(flow, end, name="value")
        found, count = found + more, count + 25
    rest, end = micro_batches(flow, end, name="value")
    values = [int(value) for each in found + rest for value in each]

    assert set(values) == set(range(count))
    assert len(values) == sum(tail.seq for tail in log.tail("mortal").lanes)
