"""Failing writes, with every PySpark and on three kinds of masters.

Exactly the right rows are there, once, and no row of a failed write was ever visible.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pytest

import embarcadero as emb
from embarcadero.spark import session
from tests.spark.conftest import QUICK_START
from tests.spark.test_sink import feed, ids, refusal, save

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROOT: Final = Path(__file__).parents[2]
SCHEMA: Final = pa.schema([("id", pa.int64()), ("name", pa.string())])
ROWS: Final = 20_000  # much more than fits in the messages of its tasks
SPECULATION: Final = {
    "spark.speculation": "true", "spark.speculation.interval": "100ms", "spark.speculation.multiplier": "1.1",
    "spark.speculation.quantile": "0.5", "spark.speculation.minTaskRuntime": "100ms",
}  # fmt: skip
_KINDS: Final = ["local[2,4]", "local-cluster[2,1,1024]", "standalone"]

Rows = Iterator[pa.RecordBatch]


def free_port() -> int:
    """A port without a listener."""
    with closing(socket.socket()) as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def standalone(stack: ExitStack, folder: Path) -> str:
    """Start a master and a worker of Spark's own cluster manager; its URL."""
    import pyspark

    from embarcadero.spark.processes import find_java

    runs = str(Path(pyspark.__file__).parent / "bin" / "spark-class")
    deploy, port = "org.apache.spark.deploy", free_port()
    url = f"spark://127.0.0.1:{port}"
    environ = os.environ | {"JAVA_HOME": str(find_java()), "SPARK_LOG_DIR": str(folder)}
    common = ["--host", "127.0.0.1", "--webui-port", "0"]
    for command in (
        [runs, f"{deploy}.master.Master", *common, "--port", str(port)],
        [runs, f"{deploy}.worker.Worker", *common, "--cores", "2", "--memory", "1g", "--work-dir", str(folder), url],
    ):
        with (folder / f"{command[1].rpartition('.')[2]}.log").open("wb") as log:
            process = subprocess.Popen(command, env=environ, stdout=log, stderr=log)
        stack.callback(process.wait)
        stack.callback(process.terminate)
    return url


@pytest.fixture(scope="module", params=_KINDS, ids=["local", "cluster", "standalone"])
def spark(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session on each kind of master, in which a task may fail three times; with speculation, where Spark has it."""
    folder = tmp_path_factory.mktemp("spark")
    config = {
        "spark.driver.extraJavaOptions": QUICK_START, "spark.sql.shuffle.partitions": "2",
        "spark.executor.memory": "512m", "spark.executorEnv.PYTHONPATH": f"{ROOT}:{ROOT / 'src'}",
    }  # fmt: skip
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")  # executors run its python3
        patch.setenv("SPARK_WORKER_DIR", str(folder / "workers"))
        master = standalone(stack, folder) if request.param == "standalone" else request.param
        if not master.startswith("local["):
            config |= SPECULATION | {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
        made = session("writes", master, config)
        yield made
        made.stop()


def failing(folder: Path, times: int, task: int | None = None) -> Callable[[Rows], Rows]:
    """A function for mapInArrow that fails this many times, in one task or in all, after most rows were passed on."""

    def passed_on(batches: Rows) -> Rows:
        from pathlib import Path

        from pyspark import TaskContext

        context = TaskContext.get()
        here = context.partitionId()
        for number, batch in enumerate(batches):
            yield batch
            flag = Path(folder) / f"failed-{here}-{context.attemptNumber()}"
            if number >= 1 and task in (None, here) and context.attemptNumber() < times:
                flag.touch()
                raise ValueError("planted")

    return passed_on


def slow_at_first(batches: Rows) -> Rows:
    """The first attempt of the first task pauses in the middle."""
    import time

    from pyspark import TaskContext

    context = TaskContext.get()
    for number, batch in enumerate(batches):
        if number == 1 and context.partitionId() == 0 and context.attemptNumber() == 0:
            time.sleep(20)
        yield batch


def table(spark: SparkSession, tasks: int = 4) -> DataFrame:
    """Rows in this many tasks."""
    return spark.range(0, ROWS, 1, tasks).selectExpr("id", "concat('a name that is long enough ', id) name")


def test_an_operator_that_fails_at_first(spark: SparkSession, log: emb.Log, topic: str, tmp_path: Path) -> None:
    """In all tasks, and in one of them: they are tried again, and each row is there once."""
    for number, task in enumerate((None, 2)):
        log.create_topic(f"{topic}{number}", replicas=1, schema=SCHEMA)
        folder = tmp_path / str(number)
        folder.mkdir()
        frame = table(spark)
        save(log, f"{topic}{number}", frame.mapInArrow(failing(folder, 1, task), frame.schema))
        assert len(list(folder.iterdir())) == (4 if task is None else 1)
        assert ids(log, f"{topic}{number}") == list(range(ROWS))


def test_an_operator_that_always_fails(spark: SparkSession, log: emb.Log, topic: str, tmp_path: Path) -> None:
    """In all tasks, or in one of many: no row is ever there. A row that does not fit the topic is such a failure."""
    log.create_topic(topic, replicas=1, schema=pa.schema([pa.field("id", pa.int64(), nullable=False), SCHEMA.field(1)]))
    for task in (None, 3):
        frame = table(spark)
        assert "planted" in refusal(
            lambda frame=frame, task=task: save(log, topic, frame.mapInArrow(failing(tmp_path, 9, task), frame.schema))
        )
    bad = table(spark).selectExpr(f"if(id = {ROWS - 1}, null, id) id", "name")
    assert "column 'id' has nulls" in refusal(lambda: save(log, topic, bad))
    assert log.tail(topic).seq == 0


def test_rows_that_differ_between_attempts(spark: SparkSession, log: emb.Log, topic: str, tmp_path: Path) -> None:
    """`rand()`, a shuffle, and another number of tasks when a task is run again: each id is there once."""
    log.create_topic(topic, replicas=1, schema=SCHEMA)
    frame = table(spark).selectExpr("id", "concat(name, rand()) name").repartition(3)
    save(log, topic, frame.mapInArrow(failing(tmp_path, 2, 1), frame.schema))
    assert ids(log, topic) == list(range(ROWS))


def test_speculation(spark: SparkSession, log: emb.Log, topic: str) -> None:
    """Two attempts of a task run in parallel, and both stage rows: those of one attempt are there."""
    if spark.sparkContext.master.startswith("local["):
        pytest.skip("Spark does not speculate in one process")
    log.create_topic(topic, replicas=1, schema=SCHEMA)
    frame = table(spark, 6)
    save(log, topic, frame.mapInArrow(slow_at_first, frame.schema))
    assert ids(log, topic) == list(range(ROWS))


def run(log: emb.Log, topic: str, frame: DataFrame, folder: Path, **options: Any) -> None:
    """Read the existing rows to the end, with the checkpoint of a folder."""
    given = {"brokers": log.address, "topic": topic, "checkpointLocation": str(folder / "checkpoint")} | options
    frame.writeStream.format("embarcadero").options(**given).trigger(availableNow=True).start().awaitTermination()


def test_a_stream_whose_function_fails(spark: SparkSession, log: emb.Log, topic: str, tmp_path: Path) -> None:
    """The query ends. Started again, with the same or corrected code, it continues.

    Corrected code may make other rows in other tasks. No row of the failed micro-batch was visible.
    """
    for number in range(2):
        name, folder = f"{topic}{number}", tmp_path / str(number)
        folder.mkdir()
        log.create_topic(name, replicas=1, schema=SCHEMA)
        feed(spark, folder, 0, ROWS)
        files = spark.readStream.schema("id bigint, name string").parquet(str(folder / "in"))
        broken = files.repartition(3, "id").mapInArrow(failing(folder, 9), files.schema)
        assert "planted" in refusal(lambda name=name, broken=broken, folder=folder: run(log, name, broken, folder))
        assert log.tail(name).seq == 0
        corrected = files.selectExpr("id + 100000 id", "string(rand()) name").repartition(2)
        run(log, name, corrected if number else files.repartition(3, "id"), folder)
        first = 100_000 * number
        assert ids(log, name) == list(range(first, first + ROWS))


def test_an_empty_frame(spark: SparkSession, log: emb.Log, topic: str, tmp_path: Path) -> None:
    """Nothing is written, in a batch and in a micro-batch; later rows are."""
    log.create_topic(topic, replicas=1, schema=SCHEMA)
    save(log, topic, table(spark).where("id < 0"), writeId="empty")
    feed(spark, tmp_path, 0, 10)
    files = spark.readStream.schema("id bigint, name string").parquet(str(tmp_path / "in"))
    run(log, topic, files.where("id >= 10"), tmp_path)
    assert log.tail(topic).seq == 0
    feed(spark, tmp_path, 10, 10)
    run(log, topic, files.where("id >= 10"), tmp_path)
    assert ids(log, topic) == list(range(10, 20))


def test_routed_rows_and_new_columns(spark: SparkSession, log: emb.Log, topic: str, tmp_path: Path) -> None:
    """The column `topic` chooses; `addColumns` adds."""
    for name in "ab":
        log.create_topic(f"{topic}.{name}", replicas=1)
    feed(spark, tmp_path, 0, 600)
    files = spark.readStream.schema("id bigint, name string").parquet(str(tmp_path / "in"))
    routed = files.selectExpr(f"concat('{topic}.', if(id % 3 = 0, 'a', 'b')) topic", "name value")
    options = {"brokers": log.address, "checkpointLocation": str(tmp_path / "checkpoint")}
    routed.writeStream.format("embarcadero").options(**options).trigger(availableNow=True).start().awaitTermination()
    assert [log.tail(f"{topic}.{name}").durable_seq for name in "ab"] == [200, 400]

    log.create_topic(topic, replicas=1, schema=SCHEMA)
    wide = table(spark).selectExpr("id", "name", "id % 7 as `left over`", "array(name) names")
    save(log, topic, wide, addColumns="true")
    assert log.read(topic).schema.names[:4] == ["id", "name", "left over", "names"]
    assert ids(log, topic) == list(range(ROWS))
