"""compact, replay, load on a real cluster: correct results, each record once, whatever dies between two starts."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import csv

import embarcadero as emb
from embarcadero.errors import BadName, BadSchema, BadTable, BadValue, EmbarcaderoError, Stale, Trimmed, UnknownTopic
from embarcadero.spark import compaction, jobs
from embarcadero.spark.compaction import compact, latest
from embarcadero.spark.jobs import BEGUN, DONE, PLANNED, JobFact, JobLedger
from embarcadero.spark.loading import FilesSource, TableSource, load
from embarcadero.spark.replay import replay
from embarcadero.staging.ledger import TopicLedger
from embarcadero.tier.storage import sqlite_catalog
from embarcadero.types import jobs_topic
from tests.spark.conftest import QUICK_START

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROOT = Path(__file__).parent.parent.parent
CUSTOMERS = pa.schema([
    pa.field("id", pa.uint64(), nullable=False), ("city", pa.string()), ("seen", pa.timestamp("ns")),
])  # fmt: skip
MOMENTS = ["planned", "append", "decide", "publish", "finish", "done"]
"""The steps of a job at which tests end it: before each of them, and (planned, done) when it is recorded."""


class Died(Exception):
    """Ends a job where a kill would: only the next start follows."""


def dies(monkeypatch: pytest.MonkeyPatch, moment: str, step: int = 0) -> None:
    """The next job ends at a moment of a step, once."""
    if moment in (PLANNED, DONE):
        whole = JobLedger.settle

        def settle(ledger: JobLedger, job: str, kind: str, body: bytes, epoch: int = 0) -> Any:
            if (kind, epoch) != (moment, step):
                return whole(ledger, job, kind, body, epoch)
            monkeypatch.setattr(JobLedger, "settle", whole)
            if kind == PLANNED:
                whole(ledger, job, kind, body, epoch)
            raise Died

        monkeypatch.setattr(JobLedger, "settle", settle)
        return
    inner, counted = getattr(TopicLedger, moment), iter(range(100))

    async def dead(ledger: TopicLedger, *given: Any) -> Any:
        if next(counted) < step:
            return await inner(ledger, *given)
        monkeypatch.setattr(TopicLedger, moment, inner)
        raise Died

    monkeypatch.setattr(TopicLedger, moment, dead)


def fails(call: Callable[[], object]) -> None:
    """The call ends because its job died."""
    with pytest.raises((Died, EmbarcaderoError), match=r"^$|Died"):
        call()


# --- facts ------------------------------------------------------------------------------------------------------------
def test_the_first_of_two_recordings_of_a_fact_counts_permanently(log: emb.Log, topic: str) -> None:
    """Also after checkpoints that two processes make at the same time; facts that are no longer needed are removed."""
    target = log.create_topic(topic, order=5, replicas=1)
    one, other = JobLedger(log, target), JobLedger(log, target)
    assert one.newest_done("job") is None
    assert one.settle("job", BEGUN, b"mine").body == b"mine"
    other._append(JobFact("job", BEGUN, 0, b"other", 0))  # recorded at the same time: it had not seen the first
    assert other.settle("job", BEGUN, b"other").body == b"mine"
    for each in (one, JobLedger(log, target)):
        each.refresh()
        fact = each.get("job", BEGUN)
        assert fact is not None
        assert fact.body == b"mine"
    late = JobLedger(log, target)
    late.refresh()
    for epoch in range(5):
        assert one.settle("job", PLANNED, b"plan %d" % epoch, epoch).body == b"plan %d" % epoch
        one.settle("job", DONE, b"done %d" % epoch, epoch)
    other.settle("other", PLANNED, b"open", 0)
    one.refresh()
    for each in (one, other):
        each.checkpoint(records=3)
    late._append(next(iter(one._facts.values())))  # in flight from a slow process
    assert log.tail(jobs_topic(target.id)).start_seq >= 12

    for each in (late, JobLedger(log, target)):
        each.refresh()
        newest = each.newest_done("job")
        assert newest is not None
        assert (newest.epoch, newest.body) == (4, b"done 4")
        assert each.settle("job", BEGUN, b"new").body == b"mine"
        assert each.settle("other", PLANNED, b"new", 0).body == b"open"
        assert each.settle("job", PLANNED, b"next", 5).body == b"next"
    fresh = JobLedger(log, target)
    fresh.refresh()
    assert fresh.get("job", PLANNED, 3) is None


# --- compact ----------------------------------------------------------------------------------------------------------
@dataclass
class Customers:
    """A topic of keyed records, and the newest record of each key."""

    log: emb.Log
    topic: str
    typed: bool
    random: random.Random = field(default_factory=lambda: random.Random(7))
    newest: dict[Any, Any] = field(default_factory=dict)
    version: int = 0

    def create(self) -> Customers:
        """With partitions, so that the order is that of the topic and not of a partition."""
        kind = {"schema": CUSTOMERS, "key": "id"} if self.typed else {}
        self.log.create_topic(self.topic, replicas=1, partitions=2, **kind)
        return self

    def change(self, count: int, keys: int) -> None:
        """This many changes of random keys, some of them deletes, in small batches."""
        rows: list[tuple[Any, Any, bool]] = []
        for _ in range(count):
            self.version += 1
            number = self.random.randrange(keys)
            gone = self.random.random() < 0.2
            key = number + (1 << 63) if self.typed else b"%d" % number
            value: Any = (f"city {self.version}", 1000 * self.version + 1) if self.typed else b"%d" % self.version
            self.newest.pop(key, None)
            if not gone:
                self.newest[key] = value
            rows.append((key, value, gone))
        with self.log.publisher(self.topic, ack=2, batch_bytes=2_000) as publisher:
            if self.typed:
                cities = [None if gone else value[0] for _, value, gone in rows]
                times = pa.array([None if gone else value[1] for _, value, gone in rows], pa.int64())
                numbers = pa.array([key for key, _, _ in rows], pa.uint64())
                columns = [numbers, pa.array(cities), times.view(pa.timestamp("ns"))]
                whole = pa.RecordBatch.from_arrays(columns, schema=CUSTOMERS)
                for start in range(0, count, 50):
                    publisher.publish(whole.slice(start, 50))
            else:
                publisher.send(b"no key")
                for key, value, gone in rows:
                    publisher.send(b"" if gone else value, key=key, headers={"n": value})
            publisher.flush()

    def folded(self, table: pa.Table) -> dict[Any, Any]:
        """Records of a topic folded by key."""
        found: dict[Any, Any] = {}
        key_and_value = ["id", "city"] if self.typed else ["key", "value"]
        for row in table.select(key_and_value).to_pylist():
            key, value = (row["id"], row["city"]) if self.typed else (row["key"], row["value"] or None)
            found.pop(key, None)
            if value is not None:
                found[key] = value
        return found

    def values(self) -> dict[Any, Any]:
        """The expected newest records."""
        return {key: value[0] if self.typed else value for key, value in self.newest.items()}

    def seen(self, frame: DataFrame) -> list[tuple[Any, Any]]:
        """Keys and values of a frame."""
        rows = frame.collect()
        return sorted(
            (int(row.id), row.city) if self.typed else (bytes(row.key), bytes(row.value)) for row in rows
        )  # fmt: skip


@pytest.fixture(params=[False, True], ids=["raw", "schema"])
def customers(request: pytest.FixtureRequest, log: emb.Log, topic: str) -> Customers:
    """Both kinds of topics."""
    return Customers(log, topic, request.param).create()


def stored(log: emb.Log, topic: str) -> pa.Table:
    """All records of a topic from its start."""
    return log.read(topic, log.tail(topic).start_seq)


def test_the_newest_record_of_each_key_is_kept(
    spark: SparkSession, customers: Customers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over several runs, deletes among them: one row for each live key.

    A run reads only records that came since the last one; a full one leaves one record for each live key, equal to the
    original to the nanosecond.
    """
    log, topic = customers.log, customers.topic
    read: list[tuple[int, int]] = []
    write = compaction._Compaction.write

    def noted(self: Any, epoch: int, plan: bytes) -> None:
        step = json.loads(plan)
        read.append((step["start"][1], step["stop"][1]))
        write(self, epoch, plan)

    monkeypatch.setattr(compaction._Compaction, "write", noted)
    ends = [0]
    for count in (400, 60, 60):
        customers.change(count, 100)
        ends.append(log.tail(topic).seq)
        done = compact(spark, log, topic)
        assert done.seq == ends[-1]
        assert customers.folded(stored(log, topic + "_latest")) == customers.values()
        assert customers.seen(latest(spark, log, topic)) == sorted(customers.values().items())
    assert read == [*pairwise(ends)]
    assert compact(spark, log, topic).steps == 0

    many = log.tail(topic + "_latest").seq
    assert many > len(customers.newest) + 60  # the first run's records, and deltas
    full = compact(spark, log, topic, full=True)
    assert (full.steps, full.records) == (1, many + len(customers.newest))
    assert compact(spark, log, topic, keep_s=0).records == len(customers.newest)
    table = stored(log, topic + "_latest")
    assert table.num_rows == len(customers.newest)
    if customers.typed:
        times = dict(zip(table["id"].to_pylist(), table["seen"].cast(pa.int64()).to_pylist(), strict=True))
        assert times == {key: value[1] for key, value in customers.newest.items()}
    else:
        assert [dict(pairs)["n"] for pairs in table["headers"].to_pylist()] == table["value"].to_pylist()
    assert compact(spark, log, topic, full=True).steps == 0  # nothing would change


@pytest.mark.parametrize("moment", [PLANNED, "publish", DONE])
def test_a_compaction_that_dies_is_completed_by_the_next(
    spark: SparkSession, log: emb.Log, topic: str, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """In the middle of its second step: each of its rows is there once, and nothing is missing."""
    customers = Customers(log, topic, typed=False).create()
    customers.change(100, 30)
    compact(spark, log, topic)
    before = log.tail(topic + "_latest").seq
    start = log.tail(topic).seq
    customers.change(50, 30)
    changed = set(log.read(topic, start)["key"].to_pylist()) - {None}
    with monkeypatch.context() as patch:
        dies(patch, moment, 1 if moment in (PLANNED, DONE) else 0)
        fails(lambda: compact(spark, log, topic))
    customers.change(20, 30)  # later records belong to the next step
    more = set(log.read(topic, start + 51)["key"].to_pylist()) - {None}
    compact(spark, log, topic)

    assert customers.folded(stored(log, topic + "_latest")) == customers.values()
    assert log.tail(topic + "_latest").seq == before + len(changed) + len(more)


def test_two_parallel_compactions_do_nothing_twice(
    spark: SparkSession, log: emb.Log, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parallel; and one job paused while another did its step, rewrote the target and trimmed it."""
    customers = Customers(log, topic, typed=False).create()
    customers.change(200, 30)
    problems: list[BaseException] = []

    def run() -> None:
        try:
            with emb.connect(log.address) as own:
                compact(spark, own, topic)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert log.tail(topic + "_latest").seq == len(customers.newest)

    customers.change(50, 30)
    write = compaction._Compaction.write

    def slept(self: Any, epoch: int, plan: bytes) -> None:
        monkeypatch.setattr(compaction._Compaction, "write", write)
        compact(spark, log, topic)
        compact(spark, log, topic, full=True, keep_s=0)
        write(self, epoch, plan)

    monkeypatch.setattr(compaction._Compaction, "write", slept)
    compact(spark, log, topic, full=True)
    assert customers.folded(stored(log, topic + "_latest")) == customers.values()
    assert stored(log, topic + "_latest").num_rows == len(customers.newest)


def test_invalid_compactions_are_refused(spark: SparkSession, log: emb.Log, topic: str) -> None:
    """No keys, no order, itself, foreign records, other deletes, another topic of that name, records that are gone."""
    schema = pa.schema([("id", pa.int64()), pa.field("n", pa.int64(), nullable=False), ("op", pa.string())])
    log.create_topic(f"{topic}-values", replicas=1)
    with log.publisher(f"{topic}-values", ack=2) as publisher:
        publisher.send(b"no key").result(30)
    log.create_topic(f"{topic}-columns", replicas=1, schema=schema)
    log.create_topic(f"{topic}-striped", order=0, replicas=1)
    keyed = log.create_topic(f"{topic}-keyed", replicas=1, schema=schema, key="id").name
    refused: list[tuple[str, dict[str, Any], type[Exception], str]] = [
        (f"{topic}-values", {}, BadValue, "none of its 1 records has one"),
        (f"{topic}-columns", {}, BadValue, "its schema has no key column"),
        (f"{topic}-striped", {}, BadValue, "order 0"),
        (f"{topic}-keyed", {"into": f"{topic}-keyed"}, BadValue, "into itself"),
        (f"{topic}-keyed", {"into": "__jobs.0000000000000000"}, BadName, "topic of the cluster"),
        (f"{topic}-keyed", {"into": f"{topic}-values"}, BadSchema, "columns or a key other than"),
        (f"{topic}-keyed", {"deletes": "gone"}, BadValue, "no column 'gone'"),
        (f"{topic}-keyed", {"deletes": "n"}, BadValue, "not bool"),
        (f"{topic}-keyed", {"deletes": "nulls"}, BadValue, "is not nullable"),
        (f"{topic}-nowhere", {}, UnknownTopic, "nowhere"),
    ]
    for name, more, kind, problem in refused:
        with pytest.raises(kind, match=problem):
            compact(spark, log, name, **more)
    with pytest.raises(UnknownTopic, match="compact it first"):
        latest(spark, log, keyed)

    with log.publisher(keyed, ack=2) as publisher:
        publisher.publish([{"id": n % 5, "n": n, "op": "d" if n == 9 else "u"} for n in range(10)])
    compact(spark, log, keyed, deletes="op=d")
    assert sorted((row.id, row.n) for row in latest(spark, log, keyed).collect()) == [(0, 5), (1, 6), (2, 7), (3, 8)]
    with pytest.raises(BadValue, match="begun with deletes 'op=d', not 'none'"):
        compact(spark, log, keyed)
    with log.publisher(keyed, ack=2) as publisher:
        publisher.publish([{"id": 1, "n": 1, "op": "u"}])
    with log.publisher(keyed, ack=2) as publisher:
        publisher.publish([{"id": 2, "n": 1, "op": "u"}])
    log.trim(keyed, before_seq=11)
    with pytest.raises(Trimmed, match=r"records 10 to 11 .* were trimmed before they were compacted"):
        compact(spark, log, keyed, deletes="op=d")
    log.delete_topic(keyed)
    log.create_topic(keyed, replicas=1, schema=schema, key="id")
    with pytest.raises(Stale, match="follows another topic"):
        compact(spark, log, keyed, deletes="op=d")


# --- replay -----------------------------------------------------------------------------------------------------------
def publish(log: emb.Log, topic: str, numbers: range) -> None:
    """Records with keys, headers and times, in small batches."""
    with log.publisher(topic, ack=2, batch_bytes=500) as publisher:
        for number in numbers:
            when = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=number)
            key = b"%d" % (number % 7) if number % 3 else None
            publisher.send(b"%d" % number, key=key, headers={"n": b"%d" % number}, timestamp=when)
        publisher.flush()


def records(log: emb.Log, topic: str, start: int = 0, end: int | None = None) -> pa.Table:
    """Everything about records except their positions."""
    return log.read(topic, start, end).drop_columns(["_seq"])


def test_a_range_is_copied_unchanged(spark: SparkSession, log: emb.Log, topic: str) -> None:
    """In its order, with keys, headers and times, in the same partitions. The end is that of the first start."""
    log.create_topic(topic, replicas=1, partitions=3)
    publish(log, topic, range(500))
    done = replay(spark, log, topic, into=f"{topic}-a", start=10, step_bytes=6_000)
    assert done.steps > 2
    assert done.ends == {log.describe(topic).lane: (10, 500)}
    assert records(log, f"{topic}-a").equals(records(log, topic, 10))
    partitions = [
        [(batch.partition, value) for batches in log.scan(name) for batch in batches if batch.count
         for value in batch.to_arrow()["value"].to_pylist()]
        for name in (topic, f"{topic}-a")
    ]  # fmt: skip
    assert partitions[0][10:] == partitions[1]

    between = datetime.now(UTC)
    publish(log, topic, range(500, 520))
    assert replay(spark, log, topic, into=f"{topic}-a", start=10).steps == 0
    replay(spark, log, topic, into=f"{topic}-b", start=between)
    assert records(log, f"{topic}-b").equals(records(log, topic, 500))
    replay(spark, log, topic, into=f"{topic}-b", start=between, name="again")
    assert log.tail(f"{topic}-b").seq == 40
    began = datetime.now(UTC)
    assert replay(spark, log, topic, into=f"{topic}-c", end=50, rate=20).steps == 3
    assert datetime.now(UTC) - began >= timedelta(seconds=2)  # the third portion begins two seconds after the first
    assert records(log, f"{topic}-c").equals(records(log, topic, 0, 50))


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_replay_that_dies_continues(
    spark: SparkSession, log: emb.Log, topic: str, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """At every moment of its second step; later records are not in the range. Its steps may change size."""
    log.create_topic(topic, order=5, replicas=1, schema=CUSTOMERS)
    with log.publisher(topic, ack=2) as publisher:
        for number in range(20):
            publisher.publish([{"id": 20 * number + n, "city": "Oslo" * 50} for n in range(20)])
    with monkeypatch.context() as patch:
        dies(patch, moment, 1)
        fails(lambda: replay(spark, log, topic, into=f"{topic}-to", name="mine", step_bytes=20_000))
    assert 0 < log.tail(f"{topic}-to").seq < 400
    with log.publisher(topic, ack=2) as publisher:
        publisher.publish([{"id": 1, "city": "late"}])
    replay(spark, log, topic, into=f"{topic}-to", name="mine", step_bytes=40_000)

    assert log.read(f"{topic}-to")["id"].to_pylist() == list(range(400))


def test_invalid_replays_are_refused(
    spark: SparkSession, log: emb.Log, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into itself, into other columns, invalid ranges, another range by the same name.

    Also a job that was paused for so long that its target may have forgotten it.
    """
    log.create_topic(topic, replicas=1)
    publish(log, topic, range(50))
    log.create_topic(f"{topic}-typed", replicas=1, schema=CUSTOMERS)
    log.create_topic(f"{topic}-striped", order=0, replicas=1)
    describe = emb.Log.describe
    refused: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"into": topic}, BadValue, "it is the same topic"),
        ({"into": f"{topic}-typed"}, BadSchema, "has columns other than"),
        ({"into": f"{topic}-striped"}, BadValue, "order 0"),
        ({"into": "__jobs.0000000000000000"}, BadName, "topic of the cluster"),
        ({"into": f"{topic}-to", "start": 20, "end": 10}, BadValue, "ends .at seq 10. before it starts .at seq 20."),
        ({"into": f"{topic}-to", "start": "tomorrow"}, BadValue, "use earliest, latest, a seq, or a time"),
        ({"into": f"{topic}-to", "end": 51}, EmbarcaderoError, "beyond the end"),
        ({"into": f"{topic}-to", "rate": 0}, BadValue, "rate is 0"),
        ({"into": f"{topic}-to", "name": "a/b"}, BadName, "not a valid name of a job"),
    ]
    for more, kind, problem in refused:
        with pytest.raises(kind, match=problem):
            replay(spark, log, topic, **more)
    with monkeypatch.context() as patch:  # another name that leads to the same topic
        patch.setattr(emb.Log, "describe", lambda log, name, **_: describe(log, topic if name == "alias" else name))
        with pytest.raises(BadValue, match="it is the same topic"):
            replay(spark, log, topic, into="alias")

    with monkeypatch.context() as patch:
        dies(patch, "decide")
        fails(lambda: replay(spark, log, topic, into=f"{topic}-to", end=20, name="one"))
    with pytest.raises(
        BadValue, match=r"was begun with .* from earliest to 20, but this call asks for .* from earliest to 30"
    ):
        replay(spark, log, topic, into=f"{topic}-to", end=30, name="one")
    with monkeypatch.context() as patch:
        patch.setattr(jobs, "age_s", lambda _: 86_400.0)
        with pytest.raises(Stale, match="it is unknown whether the step is in the topic"):
            replay(spark, log, topic, into=f"{topic}-to", end=20, name="one")
    replay(spark, log, topic, into=f"{topic}-to", end=20, name="one")
    assert records(log, f"{topic}-to").equals(records(log, topic, 0, 20))


# --- load -------------------------------------------------------------------------------------------------------------
def some(start: int, count: int) -> pa.Table:
    """Rows for files and tables."""
    numbers = list(range(start, start + count))
    first = datetime(2026, 1, 1, tzinfo=UTC)
    days = pa.array([first + timedelta(days=n) for n in numbers], pa.timestamp("us", tz="UTC"))
    return pa.table({"id": pa.array(numbers, pa.int64()), "city": [f"city {n}" for n in numbers], "day": days})


def write_files(kind: str, folder: Path) -> None:
    """Three files of a format."""
    folder.mkdir()
    for number in range(3):
        part, file = some(100 * number, 100), folder / f"{number}.{kind}"
        if kind == "parquet":
            inside = folder / f"part={number}"
            inside.mkdir()
            pq.write_table(part, inside / file.name)
        elif kind == "csv":
            csv.write_csv(part, file)
        else:
            lines = [json.dumps({**row, "day": row["day"].isoformat()}) for row in part.to_pylist()]
            file.write_text("\n".join(lines))


@pytest.mark.parametrize("kind", ["parquet", "csv", "json"])
def test_files_are_loaded_once(
    spark: SparkSession, log: emb.Log, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Into a new topic with their columns, also those in names of folders; from where a load died.

    No file that changed meanwhile is loaded.
    """
    write_files(kind, tmp_path / "in")
    source = FilesSource(paths=[str(tmp_path / "in")], format=kind)
    with monkeypatch.context() as patch:
        dies(patch, DONE, 1)
        fails(lambda: load(spark, log, topic, source, key="id", step_bytes=1))
    assert log.tail(topic).seq == 200
    assert load(spark, log, topic, source, key="id", step_bytes=1).steps == 2
    assert load(spark, log, topic, source, key="id").steps == 0
    table = log.read(topic).sort_by("id")
    assert table["id"].to_pylist() == list(range(300))
    assert table["city"].to_pylist() == [f"city {n}" for n in range(300)]
    assert log.describe(topic).key == "id"
    if kind == "parquet":
        assert table["part"].to_pylist() == sorted([0, 1, 2] * 100)
    if kind != "json":
        assert table["day"].to_pylist() == some(0, 300)["day"].to_pylist()

    late = tmp_path / "in" / ("part=0" if kind == "parquet" else "") / "late.csv"
    late.write_text("id\n5\n")
    with pytest.raises(BadValue, match=r"1 files were added, removed or changed .*late\.csv"):
        load(spark, log, topic, source, key="id")


def test_invalid_loads_are_refused(spark: SparkSession, log: emb.Log, topic: str, tmp_path: Path) -> None:
    """No files, no format, an invalid row, other columns than the topic's, another key: none of its rows is loaded."""
    (tmp_path / "bad.json").write_text('{"id": 1}\n{"id": \n')
    (tmp_path / "good.csv").write_text("city;id\nOslo;1\n")
    (tmp_path / "other.csv").write_text("id;city\n2;Rome\n")
    log.create_topic(topic, replicas=1, schema=pa.schema([("id", pa.int64()), ("city", pa.string())]))
    files = {name: str(tmp_path / name) for name in ("bad.json", "good.csv", "other.csv")}
    refused: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"paths": []}, {}, "no files"),
        ({"paths": [str(tmp_path / "nothing.csv")]}, {}, "nothing.csv"),
        ({"paths": [str(tmp_path / "what")]}, {}, "set format to one of: parquet, csv, json"),
        ({"paths": [files["bad.json"]]}, {}, ""),
        ({"paths": [files["good.csv"]]}, {}, "does not fit topic"),
        ({"paths": [files["good.csv"], files["other.csv"]], "options": {"sep": ";"}}, {}, "header"),
        ({"paths": [files["good.csv"]], "options": {"sep": ";"}}, {"key": "id"}, "as its key"),
        ({"paths": [files["good.csv"]], "options": {"sep": ";"}}, {"columns": ["what"]}, "what"),
    ]
    for number, (given, more, problem) in enumerate(refused):
        with pytest.raises(EmbarcaderoError, match=f"(?i){problem}"):
            load(spark, log, topic, FilesSource(**given), name=str(number), **more)
    assert log.tail(topic).seq == 0
    load(spark, log, topic, FilesSource(paths=[files["good.csv"]], options={"sep": ";"}))
    assert log.read(topic)["city"].to_pylist() == ["Oslo"]


def test_a_snapshot_of_a_table_is_loaded_once(
    spark: SparkSession, log: emb.Log, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The snapshot of the first start: rows that were added or deleted since are not in it."""
    from pyiceberg.catalog import load_catalog

    properties = sqlite_catalog(tmp_path) | {"warehouse": f"file://{tmp_path / 'warehouse'}"}
    catalog = load_catalog("mine", **properties)
    properties["name"] = "mine"
    catalog.create_namespace("shop")
    table = catalog.create_table("shop.orders", some(0, 1).schema)
    for start in (0, 100):
        table.append(some(start, 100))
    table.delete("id = 7")
    source = TableSource(name="shop.orders", catalog=properties)
    with monkeypatch.context() as patch:
        dies(patch, DONE)
        fails(lambda: load(spark, log, topic, source, columns=["id", "city"], step_bytes=1))
    table.append(some(200, 100))
    table.delete("id >= 150")
    load(spark, log, topic, source, columns=["id", "city"])
    found = log.read(topic).sort_by("id")
    assert found["id"].to_pylist() == [n for n in range(200) if n != 7]
    assert found.schema.names == ["id", "city", "_seq"]
    assert load(spark, log, topic, source, columns=["id", "city"], name="now").steps > 0
    assert log.tail(topic).seq == 199 + 149

    for kind, problem, name, snapshot in (
        (BadValue, "no table 'shop.nothing'", "shop.nothing", None), (BadTable, "no snapshot 5", "shop.orders", 5),
    ):  # fmt: skip
        with pytest.raises(kind, match=problem):
            load(spark, log, topic, TableSource(name=name, catalog=properties, snapshot=snapshot))


# --- kill -------------------------------------------------------------------------------------------------------------
@pytest.fixture
def plan(log: emb.Log, topic: str, tmp_path: Path) -> Path:
    """The plan of job_driver: replay a topic in steps."""
    log.create_topic(topic, replicas=1)
    publish(log, topic, range(300))
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"brokers": log.address, "topic": topic, "step_bytes": 8_000, "java": QUICK_START}))
    return path


@pytest.mark.timeout(300)
def test_a_job_whose_process_is_killed_continues(spark: SparkSession, log: emb.Log, topic: str, plan: Path) -> None:
    """kill -9 when its second step is decided and half of it may be published; then it runs in another process."""
    command = [sys.executable, "-m", "tests.spark.job_driver", str(plan)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    killed = subprocess.run(command, env=environment, cwd=plan.parent, capture_output=True, timeout=200, check=False)
    assert killed.returncode == -9, killed.stderr.decode()[-2000:]
    assert 0 < log.tail(f"{topic}-to").seq < 300
    replay(spark, log, topic, into=f"{topic}-to", step_bytes=8_000)

    assert records(log, f"{topic}-to").equals(records(log, topic))
