"""Spark over the log, against Spark alone: each pair in turns, in one session, when both have run before.

What the log is compared with does the same in Spark and nothing else: a source that yields the same Arrow batches from
nothing, Spark's own reader of the same files, a sink that drops what it gets, Spark's own writer of Parquet. Values are
text of random digits, which compresses to about half.
"""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from embarcadero.bench.processes import cluster_with
from embarcadero.bench.publish import payload_bytes
from embarcadero.bench.settings import Settings
from embarcadero.bench.team import RESULT_S, Seat, Team
from embarcadero.bench.trial import Tell, Trial
from embarcadero.limits import MIB
from embarcadero.wire.payload import raw_batch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    import embarcadero as emb

_HOT: Final = "hot"
_TIERED: Final = "tiered"
_WRITTEN: Final = "written"
_WRITTEN_COLUMNS: Final = ("key", "value", "headers", "timestamp")
_BATCH_BYTES: Final = 1 * MIB
_ACK_S: Final = 120.0
_PAIR: Final = ("alone", "ours")


@dataclass(frozen=True, slots=True)
class Job:
    """What the process with the session is told."""

    addresses: list[str]
    folder: Path
    data_dir: Path
    records: int  # of a batch
    record_bytes: int
    batches: int
    rounds: int
    offsets: int
    first: int  # who begins: another one in each trial


def measure(settings: Settings, trial: Trial, tell: Tell) -> None:
    """Start a cluster and, in a process of its own, Spark. NotAvailable, if there is no PySpark or no Java."""
    from embarcadero.spark.java import find_java
    from embarcadero.spark.session import check_pyspark

    check_pyspark()
    find_java()
    count = settings.records_in(_BATCH_BYTES)
    total = max(8 * MIB, settings.total_bytes // 4)
    topics = {_HOT: 2, _TIERED: 2, _WRITTEN: 2}
    with cluster_with(settings.brokers, replicas=1, **topics) as cluster, Team() as team:
        folder = cluster.data_dir / "bench"
        folder.mkdir()
        job = Job(
            cluster.addresses, folder, cluster.data_dir, count, settings.record_bytes,
            total // payload_bytes(count, settings.record_bytes), settings.spark_rounds,
            max(20, settings.round_trips // 10), trial.number % 2,
        )  # fmt: skip
        worker = team.add(_work, job)
        while (step := worker.ready(RESULT_S)) is not None:
            tell(step)
            worker.go()
        trial.values |= worker.result()


def _work(seat: Seat, job: Job) -> dict[str, float]:
    import embarcadero as emb
    from embarcadero.bench.nothing import Nothing
    from embarcadero.spark import session

    seat.meet("starting Spark")
    with emb.connect(job.addresses) as log:
        spark = session("bench", config={"spark.driver.memory": "2g"})
        spark.dataSource.register(Nothing)
        bench = Bench(spark, log, job)
        values: dict[str, float] = {}
        for what, part in (
            ("Spark reads from memory", bench.reads_from_memory), ("offsets of a stream", bench.offsets),
            ("Spark writes a stream", bench.writes), ("tiering, and reads of the tier", bench.tier),
        ):  # fmt: skip
            seat.meet(what)
            values |= part()
        spark.stop()
    seat.meet(None)
    return values


class Bench:
    """The measurements of one session."""

    def __init__(self, spark: SparkSession, log: emb.Log, job: Job) -> None:
        self._spark, self._log, self._job = spark, log, job
        self._batch = _batch(job.records, job.record_bytes)
        self._bytes = job.batches * job.records * job.record_bytes

    # --- reading ------------------------------------------------------------------------------------------------------
    def reads_from_memory(self) -> dict[str, float]:
        """All columns of a topic whose records are in memory."""
        self._publish(_HOT)
        alone, share = self._nothing(_HOT)
        times = self._in_turns(lambda: _drop(alone()), lambda: _drop(self._topic(_HOT)))
        return _values("spark_read", "nothing", times, self._bytes, share)

    def _topic(self, topic: str) -> DataFrame:
        return self._spark.read.format("embarcadero").options(**self._options(topic)).load()

    def _options(self, topic: str) -> dict[str, str]:
        return {"brokers": ",".join(self._job.addresses), "topic": topic}

    def _nothing(self, topic: str) -> tuple[Callable[[], DataFrame], float]:
        """A frame of batches from nothing that look like those of a topic; and how much of the topic that is."""
        from embarcadero.bench.nothing import keep
        from embarcadero.spark.reading import batch_reader

        schema = self._topic(topic).schema
        reader = batch_reader(self._options(topic), schema)
        tasks = reader.partitions()
        batch = next(iter(reader.read(tasks[0])))
        path = self._job.folder / f"{topic}.arrow"
        keep(batch, str(path))
        records = self._job.batches * self._job.records
        each = max(1, round(records / len(tasks) / batch.num_rows))
        options = {"file": str(path), "tasks": str(len(tasks)), "batches": str(each)}
        frame = self._spark.read.format("nothing").schema(schema).options(**options)
        return frame.load, each * len(tasks) * batch.num_rows / records

    # --- streams ------------------------------------------------------------------------------------------------------
    def offsets(self) -> dict[str, float]:
        """What a stream asks for each micro-batch, when something has come each time."""
        from pyspark.sql.streaming.datasource import ReadAllAvailable

        from embarcadero.spark.streaming import stream_reader

        reader = stream_reader(self._options(_HOT), self._topic(_HOT).schema)
        start, times = reader.latestOffset(reader.initialOffset(), ReadAllAvailable()), []
        with self._log.publisher(_HOT, ack=2, linger_ms=0) as publisher:
            for _ in range(self._job.offsets):
                publisher.send(b"one more").result(timeout=_ACK_S)
                began = time.perf_counter()
                start = reader.latestOffset(start, ReadAllAvailable())
                reader.reportLatestOffset()
                times.append(time.perf_counter() - began)
        return {"spark_offsets_p50": float(np.quantile(times, 0.5)), "spark_offsets_p99": float(np.quantile(times, 0.99))}

    def writes(self) -> dict[str, float]:
        """A stream of one micro-batch from nothing into a topic, acked when it is durable; or dropped."""
        self._nothing(_HOT)
        path = self._job.folder / f"{_HOT}.arrow"
        with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as opened:
            rows = opened.read_next_batch().num_rows
        tasks = 4
        each = max(1, round(self._job.batches * self._job.records / tasks / rows))
        options = {"file": str(path), "tasks": str(tasks), "batches": str(each)}
        reader = self._spark.readStream.format("nothing").schema(self._topic(_HOT).schema).options(**options)

        def run(sink: str, settings: dict[str, str]) -> float:
            place = self._job.folder / f"checkpoint-{secrets.token_hex(4)}"
            started = (
                reader.load().select(*_WRITTEN_COLUMNS).writeStream.format(sink).options(**settings)
                .option("checkpointLocation", str(place)).trigger(availableNow=True).start()
            )  # fmt: skip
            started.awaitTermination()
            return sum(float(each["durationMs"].get("addBatch", 0)) for each in started.recentProgress) / 1e3

        times = self._in_turns(lambda: run("noop", {}), lambda: run("embarcadero", self._options(_WRITTEN)))
        return _values("spark_write", "noop", times, each * tasks * rows * self._job.record_bytes)

    # --- the tier -----------------------------------------------------------------------------------------------------
    def tier(self) -> dict[str, float]:
        """Tier a topic, piece by piece, each as large as what Spark writes to Parquet; then read all of it."""
        return {}

    # --- both ---------------------------------------------------------------------------------------------------------
    def _publish(self, topic: str) -> None:
        with self._log.publisher(topic, ack=2) as publisher:
            for future in [publisher.publish(self._batch) for _ in range(self._job.batches)]:
                future.result(timeout=_ACK_S)

    def _in_turns(self, alone: Callable[[], float], ours: Callable[[], float]) -> dict[str, list[float]]:
        """Seconds of both, each round, after one round that does not count: plans are compiled in it."""
        times: dict[str, list[float]] = {name: [] for name in _PAIR}
        for number in range(self._job.rounds + 1):
            pair = [("alone", alone), ("ours", ours)]
            for name, run in pair if (number + self._job.first) % 2 else reversed(pair):
                seconds = run()
                if number:
                    times[name].append(seconds)
        return times


def _batch(count: int, size: int) -> pa.RecordBatch:
    """Records whose values look like text: random digits."""
    digits = np.random.default_rng(0).bytes(count * size // 2 + size).hex().encode()
    values = [digits[number * size : (number + 1) * size] for number in range(count)]
    now_us = time.time_ns() // 1000
    return raw_batch([None] * count, values, [None] * count, [now_us] * count)


def _drop(frame: DataFrame) -> float:
    """Seconds in which Spark gets all rows of a frame, and drops them."""
    began = time.perf_counter()
    frame.write.format("noop").mode("overwrite").save()
    return time.perf_counter() - began


def _values(ours: str, alone: str, times: dict[str, list[float]], size: int, share: float = 1.0) -> dict[str, float]:
    """Bytes per second of both, and their ratio. `share`: what Spark alone had to do, if not the same."""
    medians = {name: statistics.median(times[name]) for name in _PAIR}
    speeds = {ours: size / medians["ours"], f"{ours}_{alone}": share * size / medians["alone"]}
    return {**speeds, f"{ours}_to_{alone}": speeds[ours] / speeds[f"{ours}_{alone}"]}
