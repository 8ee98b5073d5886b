"""Hot, warm and cold records as one for Spark: each once, from the table or from brokers, whatever moves meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pytest

import embarcadero as emb
from embarcadero.errors import BadTable, Corrupt, RecordsLost, Trimmed
from embarcadero.spark.read import tasks as reads
from embarcadero.spark.read.options import RecordPosition, TaskSpan
from tests.spark.sources import ALL, batch, column, micro_batches, source, stream
from tests.spark.test_source import fill, pushing
from tests.system.tiering import Tierer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COUNT = 600


@pytest.fixture(scope="module", autouse=True)
def _small_row_groups() -> pytest.MonkeyPatch:
    """Files of several row groups, without megabytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("embarcadero.tier.parquet.TIER_ROW_GROUP_BYTES", 2_000)
        yield patch


def tiered(log: emb.Log, topic: str, folder: Path, *, below: int = 300, forgotten: int = 200) -> Tierer:
    """600 records; those below a seq are in the table, in two files, and brokers have dropped some of them."""
    log.create_topic(topic, replicas=1, partitions=2)
    fill(log, topic, COUNT)
    tierer, lane = Tierer(log, topic, folder), log.describe(topic).lane
    for seq in (below // 2, below):
        tierer.tier(lane, log.position_of(topic, seq=seq).index, seq)
    if forgotten:
        tierer.forget(lane, log.position_of(topic, seq=forgotten).index)
    return tierer


@pytest.fixture(scope="module")
def filled(log: emb.Log, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiered topic that no test changes."""
    tiered(log, "filled", tmp_path_factory.mktemp("tier"))
    return "filled"


@pytest.mark.parametrize("tasks", [1, 7, 64])
def test_a_table_and_brokers_are_one_frame(log: emb.Log, filled: str, tasks: int) -> None:
    """Each record once, in order, with all metadata of the log."""
    reader = batch(log, filled, minPartitions=tasks, columns="topic,seq,index,value,session")
    plan = reader.partitions()
    rows = pa.Table.from_batches([rows for task in plan for rows in reader.read(task)])
    known = [each for batches in log.scan(filled) for each in batches if each.count]

    assert len(plan) >= tasks
    assert rows["seq"].to_pylist() == list(range(COUNT))
    assert [int(value) for value in rows["value"].to_pylist()] == list(range(COUNT))
    assert rows["index"].to_pylist() == [each.index for each in known for _ in range(each.count)]
    assert rows["session"].to_pylist() == [each.session for each in known for _ in range(each.count)]
    assert set(rows["topic"].to_pylist()) == {filled}


def test_a_table_in_an_inaccessible_folder_is_read_through_brokers(
    log: emb.Log, filled: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """A folder of another machine: planning and tasks go through brokers, and a warning reports it."""
    assert reads.table_visible("1", "s3://lake/v1.metadata.json", "t")
    assert not reads.table_visible("2", f"file://{tmp_path}/v1.metadata.json", "t")
    assert "can't read" in caplog.text
    (tmp_path / "v1.metadata.json").touch()
    assert reads.table_visible("3", f"file://{tmp_path}/v1.metadata.json", "t")

    def unseen(*_: object) -> bool:
        return False

    def unopened(*_: object) -> None:
        raise AssertionError("the table was opened")

    reader = batch(log, filled)
    expected = column(reader, reader.partitions())
    monkeypatch.setattr(reads, "table_visible", unseen)
    monkeypatch.setattr(reads, "open_table", unopened)
    reader = batch(log, filled, minPartitions=3)
    assert column(reader, reader.partitions()) == expected == list(range(COUNT))
    streamed = stream(log, filled, startingOffsets="earliest", maxBytesPerTrigger=2_000)
    found, _ = micro_batches(streamed, streamed.initialOffset())
    assert [seq for each in found for seq in each] == expected
    assert len(found) > 1



@pytest.mark.parametrize(("start", "stop"), [(0, 5), (17, 142), (149, 151), (295, 305), (150, 300), (13, 588)])
def test_reads_start_and_stop_at_records_of_the_table(log: emb.Log, filled: str, start: int, stop: int) -> None:
    """Inside batches, files, and across the frontier."""
    reader = batch(log, filled, startingOffsets=start, endingOffsets=stop, minPartitions=3)

    assert column(reader, reader.partitions()) == list(range(start, stop))


def test_filters_and_partitions_apply_to_the_table(log: emb.Log, filled: str) -> None:
    """As they do for brokers."""
    known = {each.seq: each for batches in log.scan(filled) for each in batches if each.count}
    wanted = [seq for first, each in known.items() if each.partition == 1 for seq in range(first, first + each.count)]
    reader = batch(log, filled, partitions="1")
    pushed, _ = pushing(log, filled, [])

    assert column(reader, reader.partitions()) == wanted
    assert column(pushed, pushed.partitions()) == list(range(COUNT))


def test_a_stream_continues_from_the_table_to_brokers(log: emb.Log, filled: str) -> None:
    """Limits are exact there, too."""
    records = stream(log, filled, startingOffsets="earliest", maxRecordsPerTrigger=70)
    found, _ = micro_batches(records, records.initialOffset())
    assert [seq for each in found for seq in each] == list(range(COUNT))
    assert {len(each) for each in found[:-1]} == {70}

    sizes = {each.seq: each.size for batches in log.scan(filled) for each in batches if each.count}
    limit = 4 * max(sizes.values())
    some = stream(log, filled, startingOffsets="earliest", maxBytesPerTrigger=limit)
    found, _ = micro_batches(some, some.initialOffset())
    assert [seq for each in found for seq in each] == list(range(COUNT))
    assert max(sum(sizes.get(seq, 0) for seq in each) for each in found) <= limit
    all_of_it = stream(log, filled, startingOffsets="earliest")
    assert [len(each) for each in micro_batches(all_of_it, all_of_it.initialOffset(), ALL)[0]] == [COUNT]


def test_records_that_move_between_planning_and_reading_are_read_once(log: emb.Log, tmp_path: Path) -> None:
    """Tiered and dropped after the tasks were planned, between two of them, and within one."""
    tierer = tiered(log, "moving", tmp_path, below=100, forgotten=0)
    lane = log.describe("moving").lane
    reader = batch(log, "moving", minPartitions=6)
    tasks = reader.partitions()
    spans = [task.value for task in tasks]
    found: list[int] = []
    for task in tasks:
        middle = (task.value.start.seq + task.value.stop.seq) // 20 * 10
        if middle > 100:  # the frontier is within the span, and above the planned one
            tierer.tier(lane, log.position_of("moving", seq=middle).index, middle)
        for rows in reader.read(task):
            found += rows.column("seq").to_pylist()
            tierer.forget(lane, log.position_of("moving", seq=min(middle, 590)).index)
    assert max(span.stop.seq - span.start.seq for span in spans) > 50
    tierer.forget(lane, tierer.tier_all(lane)[0])

    assert found == list(range(COUNT))
    assert column(reader, tasks) == list(range(COUNT))


def test_a_column_younger_than_the_table_is_null(log: emb.Log, tmp_path: Path) -> None:
    """The table learns of a new column when new records are tiered; readers may need it before."""
    schema = pa.schema([("n", pa.uint32()), ("at", pa.time32("s"))])
    log.create_topic("young", replicas=1, schema=schema)
    with log.publisher("young", ack=2) as publisher:
        publisher.publish(pa.table({"n": [1, 2], "at": [3, 4]}, schema)).result()
    tierer, lane = Tierer(log, "young", tmp_path), log.describe("young").lane
    tierer.forget(lane, tierer.tier_all(lane)[0])
    wider = schema.append(pa.field("name", pa.string()))
    log.alter_topic("young", schema=wider)
    with log.publisher("young", ack=2) as publisher:
        publisher.publish(pa.table({"n": [3], "at": [5], "name": ["three"]}, wider)).result()
    made = source(log, "young", columns="n,name,at,_seq")
    reader = made.reader(made.schema())
    rows = pa.Table.from_batches([rows for task in reader.partitions() for rows in reader.read(task)])

    assert rows.to_pylist() == [
        {"n": 1, "name": None, "at": 3_000_000, "_seq": 0}, {"n": 2, "name": None, "at": 4_000_000, "_seq": 1},
        {"n": 3, "name": "three", "at": 5_000_000, "_seq": 2},
    ]  # fmt: skip


def test_records_missing_from_the_table_are_data_loss(log: emb.Log, tmp_path: Path) -> None:
    """Trimmed for all, or a missing file: named, never skipped."""
    tierer = tiered(log, "holes", tmp_path)
    flow = stream(log, "holes", startingOffsets="earliest")
    start = flow.initialOffset()
    end = flow.latestOffset(start, ALL)
    log.trim("holes", before_seq=50)
    with pytest.raises(Trimmed, match="were trimmed before they were read"):
        column(flow, flow.partitions(start, end))
    loose = stream(log, "holes", failOnDataLoss="false")
    assert column(loose, loose.partitions(start, end)) == list(range(50, COUNT))

    newest = max(Path(tmp_path).rglob("data/*.parquet"), key=lambda path: path.stat().st_mtime)
    newest.unlink()
    with pytest.raises(BadTable, match=newest.name):
        column(loose, loose.partitions(start, end))
    assert tierer.topic == "holes"


def test_holes_and_damage_in_a_table_are_reported() -> None:
    """A hole in the index is the loss of a crash; a batch that was damaged when it was tiered is no row of nulls."""
    assert reads._holes(np.array([5, 5, 6, 9, 9, 12]), 3) == [(3, 5), (7, 9), (10, 12)]

    rows = pa.record_batch({"_index": [1, 2], "_damage": pa.array([None, "no Arrow"], pa.string())})
    with pytest.raises(Corrupt, match="the batch at index 2 is damaged: no Arrow"):
        reads._check_damage(rows)


def test_rows_are_passed_on_as_slices_or_copied_together() -> None:
    """Few runs are slices, many are one copy; the rows are the same."""
    group = pa.record_batch({"_kind": [1] * 200, "_seq": list(range(200)), "_partition": [0, 1] * 100})
    span = TaskSpan(0, RecordPosition(0, 10), RecordPosition(9, 190), "t")
    few = list(reads._runs(group, reads._wanted(group, span, None)))
    many = list(reads._runs(group, reads._wanted(group, span, [1])))

    assert [rows.num_rows for rows in few] == [180]
    assert few[0].column("_seq").buffers()[1].address == group.column("_seq").buffers()[1].address
    assert [rows.column("_seq").to_pylist() for rows in many] == [list(range(11, 190, 2))]


@pytest.mark.parametrize(("most", "sizes"), [(1 << 20, [100]), (500, [50, 50]), (300, [34, 34, 32]), (1, [1] * 100)])
def test_a_row_group_goes_to_java_in_portions(monkeypatch: pytest.MonkeyPatch, most: int, sizes: list[int]) -> None:
    """Of about the same size, without a copy, and all of it."""
    monkeypatch.setattr(reads, "SPARK_ROWS_BYTES", most)
    group = pa.record_batch({"_seq": list(range(150))}).slice(20, 100)
    portions = list(reads._portions(group))

    assert [rows.num_rows for rows in portions] == sizes
    assert pa.Table.from_batches(portions) == pa.Table.from_batches([group])
    assert {rows.column("_seq").buffers()[1].address for rows in portions} == {
        group.column("_seq").buffers()[1].address
    }


def test_a_lost_part_of_a_table_stops_a_stream(log: emb.Log, filled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it would if brokers had reported it: a stream that reads records before they are durable."""
    flow = stream(log, filled, startingOffsets="earliest", read="ordered")
    start = flow.initialOffset()
    tasks = flow.partitions(start, flow.latestOffset(start, ALL))
    holes = reads._holes
    monkeypatch.setattr(reads, "_holes", lambda indices, at: holes(indices, at - 3))
    with pytest.raises(RecordsLost, match="were lost with the memory of the cluster"):
        column(flow, tasks)


def test_spark_reads_hot_and_cold_as_one_table(spark: SparkSession, log: emb.Log, filled: str) -> None:
    """Workers read Parquet below the frontier and ask brokers above it."""
    frame = spark.read.format("embarcadero").options(brokers=log.address, minPartitions=4).load(filled)
    found = frame.selectExpr("count(*)", "count(distinct seq)", "min(seq)", "max(seq)", "sum(int(string(value)))")

    assert found.first() == (COUNT, COUNT, 0, COUNT - 1, sum(range(COUNT)))
