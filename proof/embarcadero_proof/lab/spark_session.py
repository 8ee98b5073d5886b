"""The measurements of the family `spark` in one Spark session: pairs, in turns, all in one process."""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import StructType

from embarcadero.client.api.sync_log import Log
from embarcadero.config import load
from embarcadero.errors import BadTable
from embarcadero.limits import KIB, MIB
from embarcadero.spark.compaction import compact, latest_name
from embarcadero.spark.read.readers import batch_reader, stream_reader
from embarcadero.spark.shape import WriteOptions, shape_of
from embarcadero.spark.sink import StagedMessage, TaskWriter, WriteWork, publish
from embarcadero.spark.tiering import SparkEngine
from embarcadero.tier.columns import rows
from embarcadero.tier.job import TierJob
from embarcadero.tier.storage import TierSettings
from embarcadero.tier.table_reads import TopicTable
from embarcadero.wire.schemas import RAW_SCHEMA, raw_batch
from embarcadero_proof.lab.nothing import Nothing, keep
from embarcadero_proof.lab.settings import SMALL_RECORD_BYTES
from embarcadero_proof.lab.spark import COPY, HOT, KEYED, TIERED, Job

_TASKS: Final = 4
_WRITE_TASKS: Final = 16  # of a micro-batch: 16 MiB each, several in turn on each core
_SMALL_ROWS: Final = 1_000  # of a small micro-batch
_FEW: Final = 4  # batches of the log in a batch that represents many
_KEYED_RECORDS: Final = 10_000  # of a batch for compaction,
_KEYED_BATCHES: Final = 64  # and the batches in a Parquet file
_COMPACTIONS: Final = 2  # the most rounds: each takes about 20 s
_ACK_S: Final = 120.0
_WARM_ROUNDS: Final = 5  # of short queries, until the JVM has compiled them
_PAIR: Final = ("alone", "ours")
_USUAL: Final = "key binary, value binary, timestamp timestamp"
_RAW: Final = f"{_USUAL}, headers map<string, binary>"


class Bench:
    """The measurements of one session."""

    def __init__(self, spark: SparkSession, log: Log, job: Job) -> None:
        self._spark, self._log, self._job = spark, log, job
        spark.dataSource.register(Nothing)
        self._batch = _batch(job.records, job.record_bytes)
        self._bytes = job.batches * job.records * job.record_bytes

    # --- reading ------------------------------------------------------------------------------------------------------
    def reads_from_memory(self) -> dict[str, float]:
        """Read all columns of a topic whose records are in memory."""
        self._publish(HOT)
        frame = self._topic(HOT)
        reader = batch_reader(self._options(HOT), frame.schema)
        tasks = reader.partitions()
        batch = next(iter(reader.read(tasks[0])))
        alone, size = self._nothing([batch], frame.schema, len(tasks))
        times = self._in_turns(lambda: _drop(alone(self._spark.read)), lambda: _drop(self._topic(HOT)))
        return _values("spark_read", self._bytes, "nothing", size, times)

    def _topic(self, topic: str, **more: str) -> DataFrame:
        return self._spark.read.format("embarcadero").options(**self._options(topic), **more).load()

    def _options(self, topic: str) -> dict[str, str]:
        return {"brokers": ",".join(self._job.addresses), "topic": topic}

    def _nothing(
        self, batches: Sequence[pa.RecordBatch], schema: Any, tasks: int
    ) -> tuple[Callable[[Any], DataFrame], int]:
        """Return a frame that repeats these batches, with about as many records as a topic; and its bytes of values."""
        path, kept = str(self._job.folder / f"{secrets.token_hex(4)}.arrow"), to_arrow_schema(schema, timezone="UTC")
        keep([pa.RecordBatch.from_arrays(batch.columns, schema=kept) for batch in batches], path)
        each = max(1, round(self._job.batches * self._job.records / tasks / batches[0].num_rows))
        options = {"file": path, "tasks": str(tasks), "batches": str(each)}
        size = each * tasks * batches[0].num_rows * self._job.record_bytes
        return lambda read: read.format("nothing").schema(schema).options(**options).load(), size

    # --- streams ------------------------------------------------------------------------------------------------------
    def offsets(self) -> dict[str, float]:
        """Ask for offsets as a stream does for each micro-batch, with a new record each time."""
        reader = stream_reader(self._options(HOT), self._topic(HOT).schema)
        start, times = reader.latestOffset(reader.initialOffset(), ReadAllAvailable()), []
        with self._log.publisher(HOT, ack=2, linger_ms=0) as publisher:
            for _ in range(self._job.offsets):
                publisher.send(b"one more").result(timeout=_ACK_S)
                began = time.perf_counter()
                start = reader.latestOffset(start, ReadAllAvailable())
                reader.reportLatestOffset()
                times.append(time.perf_counter() - began)
        p50, p99 = map(float, np.quantile(times, [0.5, 0.99]))
        return {"spark_offsets_p50": p50, "spark_offsets_p99": p99}

    def writes(self) -> dict[str, float]:
        """Write a stream of one micro-batch of made rows into a topic, durably; or drop it.

        Also drop it in Python, to which Spark has to pass the rows first: no sink in Python can be faster. No two rows
        of a task are equal, as usual.
        """
        numbers = range(max(1, self._job.batches // _WRITE_TASKS))
        batches = [_batch(self._job.records, self._job.record_bytes, number) for number in numbers]

        def run(sink: str, made: DataFrame, **options: str) -> float:
            checkpoint = self._job.folder / f"checkpoint-{secrets.token_hex(4)}"
            writer = made.writeStream.format(sink).options(**options)
            query = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
            query.awaitTermination()
            return sum(float(each["durationMs"].get("addBatch", 0)) for each in query.recentProgress) / 1e3

        options, values = self._options(COPY), dict[str, float]()
        for name, ddl in (("spark_write_all", _RAW), ("spark_write", _USUAL)):
            schema = cast(StructType, StructType.fromDDL(ddl))
            frame, size = self._nothing([batch.select(schema.names) for batch in batches], schema, _WRITE_TASKS)
            plan = frame(self._spark.readStream)
            times = self._in_turns(partial(run, "noop", plan), partial(run, "embarcadero", plan, **options))
            values |= _values(name, size, "noop", size, times)
        dropping = plan.mapInArrow(_none_of, plan.schema)
        best = self._in_turns(partial(run, "noop", plan), partial(run, "noop", dropping))
        return values | _values("spark_python", size, "noop", size, best)

    # --- batch writes and commits -------------------------------------------------------------------------------------
    def batch_writes(self) -> dict[str, float]:
        """Write made rows with `df.write` into a topic, durable at the end; or drop them."""
        schema = cast(StructType, StructType.fromDDL(_USUAL))
        numbers = range(max(1, self._job.batches // _WRITE_TASKS))
        batches = [_batch(self._job.records, self._job.record_bytes, number) for number in numbers]
        frame, size = self._nothing([batch.select(schema.names) for batch in batches], schema, _WRITE_TASKS)
        plan = frame(self._spark.read)

        def ours() -> float:
            began = time.perf_counter()
            plan.write.format("embarcadero").options(**self._options(COPY)).mode("append").save()
            return time.perf_counter() - began

        return _values("spark_batch", size, "noop", size, self._in_turns(lambda: _drop(plan), ours))

    def commits(self) -> dict[str, float]:
        """Stage and commit 1,000 rows of two tasks; compare with publishing them.

        Without Spark's own part of a micro-batch: tasks and commit run in this process, already warm.
        """
        address = ",".join(self._job.addresses)
        options = WriteOptions(brokers=address, topic=COPY)
        batch = _batch(_SMALL_ROWS, 100)
        halves = [batch.slice(0, _SMALL_ROWS // 2), batch.slice(_SMALL_ROWS // 2)]
        times: dict[str, list[float]] = {name: [] for name in _PAIR}
        with self._log.publisher(COPY, ack=2, linger_ms=0) as publisher:
            for number in range(self._job.offsets):
                began = time.perf_counter()
                shape = shape_of(self._log.describe(COPY), batch.schema, options, 0)
                writer, work = TaskWriter(options, shape), WriteWork("bench", number, "bench")
                publish(
                    writer, [StagedMessage(writer.write(work, task, iter([half]))) for task, half in enumerate(halves)]
                )
                times["ours"].append(time.perf_counter() - began)
                began = time.perf_counter()
                for future in [publisher.publish(half) for half in halves]:
                    future.result(timeout=_ACK_S)
                times["alone"].append(time.perf_counter() - began)
        p50, alone = (statistics.median(times[name]) for name in ("ours", "alone"))
        return {"spark_commit_p50": p50, "spark_commit_added": p50 - alone}

    # --- the tier -----------------------------------------------------------------------------------------------------
    def tier(self) -> dict[str, float]:
        """Tier a topic piece by piece, alternating with Spark's own writing; then read the first piece of the table."""
        tier_settings = TierSettings.of(load(), self._job.data_dir)
        tier_settings = replace(tier_settings, hot_retention_s=0, file_bytes=max(MIB, self._bytes // _TASKS))
        self._publish(TIERED)
        about = self._log.describe(TIERED)
        batches = next(iter(self._log.scan(TIERED, lane=about.lane)))[:_FEW]
        batch = rows(about.lane, batches, about.versions, control=True)
        alone, size = self._nothing([batch], from_arrow_schema(batch.schema), _TASKS)
        pieces: list[int] = []

        def ours() -> float:
            if pieces:
                self._publish(TIERED)
            began = time.perf_counter()
            pieces.append(job.run_once()[-1].frontiers[about.lane][1])
            return time.perf_counter() - began

        def theirs() -> float:
            writer = alone(self._spark.read).write.option("compression", "zstd").mode("overwrite")
            began = time.perf_counter()
            writer.parquet(str(self._job.folder / "parquet"))
            return time.perf_counter() - began

        engine = SparkEngine(self._log.address, spark=self._spark)
        with TierJob(self._log, TIERED, tier_settings, engine, holder="bench") as job:
            values = _values("spark_tier", self._bytes, "parquet", size, self._in_turns(theirs, ours))
        return values | self._reads_of_the_table(about.lane, pieces[0])

    def _reads_of_the_table(self, lane: int, seq: int) -> dict[str, float]:
        tier = self._log.describe(TIERED).tier
        if tier is None:
            raise BadTable(f"topic {TIERED!r} has no table", "report it: this is a bug")
        found = TopicTable(tier, {}).files(lane, 0, tier.frontier(lane)[0])
        files = [file.path for file in found if file.stop_seq <= seq]
        times = self._in_turns(
            lambda: _drop(self._spark.read.parquet(*files)),
            lambda: _drop(self._topic(TIERED, endingOffsets=str(seq))),
            _WARM_ROUNDS,
        )
        return _values("spark_cold", self._bytes, "parquet", self._bytes, times)

    # --- compaction ---------------------------------------------------------------------------------------------------
    def compacts(self) -> dict[str, float]:
        """Compact the newest record of each key into a topic, durably; or from Parquet files into others.

        Both have the same records: about ten records of 100 bytes for each key, at random.
        """
        batches = -(-self._job.keyed_bytes // SMALL_RECORD_BYTES // _KEYED_RECORDS)
        keys = max(1, self._job.keyed_bytes // KIB)
        source, into = self._job.folder / "keyed", self._job.folder / "newest"
        source.mkdir()
        self._log.create_topic(KEYED, order=2, replicas=1)
        with self._log.publisher(KEYED, ack=2) as publisher:
            for start in range(0, batches, _KEYED_BATCHES):
                found = [_keyed_batch(keys, number) for number in range(start, min(batches, start + _KEYED_BATCHES))]
                seqs = np.arange(start * _KEYED_RECORDS, (start + len(found)) * _KEYED_RECORDS)
                whole = pa.Table.from_batches(found).append_column("seq", pa.array(seqs))
                pq.write_table(whole, source / f"{start}.parquet")
                for rows in found:
                    publisher.publish(rows)
            publisher.flush()

        def theirs() -> float:
            began = time.perf_counter()
            newest = f.max_by(f.struct("key", "value", "headers", "timestamp"), "seq").alias("newest")
            latest = self._spark.read.parquet(str(source)).groupBy("key").agg(newest).select("newest.*")
            latest.write.mode("overwrite").parquet(str(into))
            return time.perf_counter() - began

        def ours() -> float:
            began = time.perf_counter()
            compact(self._spark, self._log, KEYED)
            seconds = time.perf_counter() - began
            self._log.delete_topic(latest_name(KEYED))
            return seconds

        size = batches * _KEYED_RECORDS * SMALL_RECORD_BYTES
        return _values("spark_compact", size, "parquet", size, self._in_turns(theirs, ours, most=_COMPACTIONS))

    # --- both ---------------------------------------------------------------------------------------------------------
    def _publish(self, topic: str) -> None:
        with self._log.publisher(topic, ack=2) as publisher:
            for future in [publisher.publish(self._batch) for _ in range(self._job.batches)]:
                future.result(timeout=_ACK_S)

    def _in_turns(
        self, alone: Callable[[], float], ours: Callable[[], float], warm: int = 1, most: int | None = None
    ) -> dict[str, list[float]]:
        """Return the seconds of both in each round, after `warm` rounds without a result, in which the JVM compiles.

        The number of measured rounds is `most`, or that of the job if it is lower.
        """
        times: dict[str, list[float]] = {name: [] for name in _PAIR}
        for number in range(min(self._job.rounds, most or self._job.rounds) + warm):
            pair = [("alone", alone), ("ours", ours)]
            for name, run in pair if (number + self._job.first) % 2 else reversed(pair):
                seconds = run()
                if number >= warm:
                    times[name].append(seconds)
        return times


def _batch(count: int, size: int, number: int = 0) -> pa.RecordBatch:
    """Make records whose values look like text: random digits, different for each number."""
    digits = np.random.default_rng(number).bytes(count * size // 2 + size).hex().encode()
    values = [digits[number * size : (number + 1) * size] for number in range(count)]
    now_us = time.time_ns() // 1000
    return raw_batch([None] * count, values, [None] * count, [now_us] * count)


def _keyed_batch(keys: int, number: int) -> pa.RecordBatch:
    """Make records of 100 bytes with random keys, different for each number."""
    count = _KEYED_RECORDS
    random = np.random.default_rng(number)
    digits = pa.py_buffer(random.bytes(count * SMALL_RECORD_BYTES // 2).hex().encode())
    ends = pa.py_buffer(np.arange(0, (count + 1) * SMALL_RECORD_BYTES, SMALL_RECORD_BYTES, dtype=np.int32))
    now = np.full(count, time.time_ns() // 1000)
    columns = [
        pa.array(random.integers(0, keys, count)).cast(pa.string()).cast(pa.binary()),
        pa.Array.from_buffers(pa.binary(), count, [None, ends, digits]),
        pa.nulls(count, RAW_SCHEMA.field("headers").type),
        pa.array(now).view(RAW_SCHEMA.field("timestamp").type),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=RAW_SCHEMA)


def _none_of(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Read all rows, and yield none."""
    for _ in batches:
        yield from ()


def _drop(frame: DataFrame) -> float:
    """Return the seconds in which Spark gets all rows of a frame, and drops them."""
    began = time.perf_counter()
    frame.write.format("noop").mode("overwrite").save()
    return time.perf_counter() - began


def _values(ours: str, size: int, alone: str, size_alone: int, times: dict[str, list[float]]) -> dict[str, float]:
    """Return the bytes per second of both, and their ratio: medians of all rounds."""
    mine, theirs = size / statistics.median(times["ours"]), size_alone / statistics.median(times["alone"])
    return {ours: mine, f"{ours}_{alone}": theirs, f"{ours}_to_{alone}": mine / theirs}
