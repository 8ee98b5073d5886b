"""Spark over the log, against Spark alone: each pair in turns, in one session, after both have run before.

The other side of each pair does the same in Spark, and nothing else. It is a source that repeats the same Arrow
batches, Spark's own reader of the same files, a sink that drops all rows, or Spark's own writer of Parquet. Values are
text of random digits, which compresses to about half. The session is in its own process (spark_session.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from embarcadero.limits import MIB
from embarcadero_proof.lab.processes import cluster_with
from embarcadero_proof.lab.publish import payload_bytes
from embarcadero_proof.lab.settings import Settings
from embarcadero_proof.lab.team import RESULT_S, Seat, Team
from embarcadero_proof.lab.trial import Announce, Trial

HOT: Final = "hot"
TIERED: Final = "tiered"
COPY: Final = "copy"
KEYED: Final = "keyed"
_BATCH_BYTES: Final = 1 * MIB


@dataclass(frozen=True, slots=True)
class Job:
    """The parameters of the process with the session."""

    addresses: list[str]
    data_dir: Path
    folder: Path
    records: int  # of a batch
    record_bytes: int
    batches: int
    rounds: int
    offsets: int
    first: int  # which side begins: the other one in each trial
    keyed_bytes: int  # of values that are compacted, SMALL_RECORD_BYTES each; a key for each KiB


def measure(settings: Settings, trial: Trial, announce: Announce) -> None:
    """Start a cluster, and Spark in its own process. NotAvailable without PySpark or Java."""
    from embarcadero.spark.processes import find_java
    from embarcadero.spark.versions import check_pyspark

    check_pyspark()
    find_java()
    count = settings.records_in(_BATCH_BYTES)
    total = max(8 * MIB, settings.total_bytes // 4)
    with cluster_with(settings.brokers, replicas=1, **dict.fromkeys((HOT, TIERED, COPY), 2)) as cluster, Team() as team:
        folder = cluster.data_dir / "bench"
        folder.mkdir()
        job = Job(
            cluster.addresses, cluster.data_dir, folder, count, settings.record_bytes,
            max(1, total // payload_bytes(count, settings.record_bytes)), settings.spark_rounds,
            max(20, settings.round_trips // 10), trial.number % 2, settings.total_bytes,
        )  # fmt: skip
        worker = team.add(_work, job)
        while (step := worker.ready(RESULT_S)) is not None:
            announce(step)
            worker.go()
        worker.go()  # None means that there is no further step
        trial.values |= worker.result()


def _work(seat: Seat, job: Job) -> dict[str, float]:
    import embarcadero as emb
    from embarcadero.spark import session
    from embarcadero_proof.lab.spark_session import Bench

    seat.meet("starting Spark")
    values: dict[str, float] = {}
    with emb.connect(job.addresses) as log:
        spark = session("bench", config={"spark.driver.memory": "2g"})
        bench = Bench(spark, log, job)
        for what, part in (
            ("Spark reads from memory", bench.reads_from_memory), ("offsets of a stream", bench.offsets),
            ("Spark writes a stream", bench.writes), ("Spark writes a batch", bench.batch_writes),
            ("commits of small writes", bench.commits), ("tiering, and reads of the table", bench.tier),
            ("compaction", bench.compacts),
        ):  # fmt: skip
            seat.meet(what)
            values |= part()
        spark.stop()
    seat.meet(None)
    return values
