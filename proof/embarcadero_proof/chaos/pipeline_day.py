"""The pipeline under faults: the shop's day with kills of a broker, an executor, the driver, and the whole cluster.

The Spark driver is a separate process (pipeline_driver.py), and so are its executors. Every killed process is started
again on the same checkpoint. At the end the books of the shop, the audit, and DuckDB over the table's Parquet files
check that each record is there, once.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import embarcadero as emb
from embarcadero.demo.pipeline import (
    BROKERS,
    Pipeline,
    create_topics,
    kill_a_broker,
    kill_everything,
    look,
    sample,
    seen_all,
    sell,
    tell_figures,
    tier,
    wait_for_share,
)
from embarcadero.demo.shop import ShopCheck, write_report
from embarcadero.errors import ClusterError, NotAvailable
from embarcadero.node.local import RestartableCluster

MASTER: Final = "local-cluster[2,1,1024]"
_EXECUTOR: Final = "CoarseGrainedExecutorBackend"
_RESTARTS_MAX: Final = 5
_END_S: Final = 240.0
_DEAD_S: Final = 10.0


class Driver:
    """The driver's process, and its last reported seq. It is started again after each death."""

    def __init__(self, pipeline: Pipeline, folder: Path) -> None:
        self._pipeline, self._folder = pipeline, folder
        self.seq = -2  # nothing was reported yet
        self.starts = 0
        self._seen_s = time.monotonic()  # when it was last seen running
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start it on its checkpoint."""
        self.starts += 1
        if self.starts > _RESTARTS_MAX:
            raise ClusterError("the driver does not stay alive", f"see {self._folder / 'driver.log'}")
        path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"  # executors run the first python3 there
        environment = {**os.environ, "PATH": path, "SPARK_WORKER_DIR": str(self._folder / "workers")}
        with (self._folder / "driver.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "embarcadero_proof.chaos.pipeline_driver", MASTER),
                    *(",".join(self._pipeline.cluster.addresses), str(self._folder / "checkpoint")),
                ],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment,
                start_new_session=True, cwd=self._folder,
            )  # fmt: skip
        threading.Thread(target=self._listen, args=(self._process,), daemon=True).start()

    def _listen(self, process: subprocess.Popen[str]) -> None:
        for line in process.stdout or ():
            if line.strip().lstrip("-").isdigit():
                self.seq = max(self.seq, int(line))

    @property
    def running(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def check(self) -> None:
        """Start it again if it ended by itself: a query that begins while no broker answers fails immediately.

        The function that kills it also starts it, and needs no help.
        """
        if self.running:
            self._seen_s = time.monotonic()
        elif time.monotonic() - self._seen_s > _DEAD_S:
            self._seen_s = time.monotonic()
            self._pipeline.tell("the driver ended by itself; a new one continues from the checkpoint")
            self.start()

    def kill(self) -> int:
        """SIGKILL the driver, its JVM, executors and workers: all its descendants."""
        process = self._process
        if process is None:
            return 0
        members = descendants(process.pid)
        for pid in (process.pid, *members):
            kill_process(pid)
        process.wait()
        return 1 + len(members)

    def kill_executor(self) -> int | None:
        """SIGKILL one executor; Spark starts another one. Return None if there is none at the moment."""
        if self._process is None:
            return None
        for pid in descendants(self._process.pid):
            if _EXECUTOR in _command(pid):
                kill_process(pid)
                return pid
        return None

    def finish(self) -> None:
        """Let it process all available records, and end."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            if self._process.wait(_END_S):
                raise ClusterError("the driver failed at its end", f"see {self._folder / 'driver.log'}")


def kill_process(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def descendants(pid: int) -> list[int]:
    """Return the descendants of a process, the nearest first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found = list(children.get(pid, []))
    for one in found:
        found += children.get(one, [])
    return found


def direct(pipeline: Pipeline, driver: Driver) -> None:
    """Kill one part after the other while the shop sells."""
    wait_for_share(pipeline, 0.15)
    kill_a_broker(pipeline)
    wait_for_share(pipeline, 0.35)
    while (pid := driver.kill_executor()) is None and not pipeline.done_selling.is_set():
        time.sleep(0.1)
    pipeline.facts.kills.append((pipeline.elapsed, "executor"))
    pipeline.tell(f"an executor is killed (kill -9 of process {pid}); Spark starts another one")
    wait_for_share(pipeline, 0.55)
    killed = driver.kill()
    pipeline.facts.kills.append((pipeline.elapsed, "driver"))
    pipeline.tell(f"the driver is killed with all its descendants ({killed} processes)")
    driver.start()
    pipeline.tell("a new driver continues from the checkpoint")
    wait_for_share(pipeline, 0.75)
    kill_everything(pipeline)


def duckdb_check(pipeline: Pipeline) -> ShopCheck:
    """Check the table's files alone, with another engine: they have all orders, once."""
    try:
        import duckdb
    except ImportError:
        raise NotAvailable("DuckDB, which checks the table's files, is not installed", "pip install duckdb") from None
    files = str(pipeline.folder / "tier" / "warehouse" / "**" / "orders" / "data" / "*.parquet")
    question = (
        "select count(*), count(distinct order_id), coalesce(sum(amount_cents), 0)::bigint, "
        "count(distinct _seq) from read_parquet(?, union_by_name=true)"
    )
    found = duckdb.connect().execute(question, [files]).fetchone()
    books = pipeline.shop.books
    right = found == (books.orders, books.orders, int(books.cents.sum()), books.orders)
    return ShopCheck("DuckDB over the table's files counts and adds up the same orders", right, str(found))


def run(folder: Path, report: Path, steps: int, watch: Callable[[Pipeline], None]) -> Pipeline:
    """Run the whole day. Raises errors of the run; otherwise the report is written."""
    with ExitStack() as stack:
        cluster = RestartableCluster(folder / "cluster", BROKERS, 1)
        pipeline = Pipeline(cluster, folder, steps)
        stack.callback(cluster.stop)
        cluster.start()
        log = stack.enter_context(emb.connect(cluster.addresses))
        create_topics(log)
        driver = Driver(pipeline, folder)
        stack.callback(driver.kill)
        driver.start()
        while driver.seq < -1:
            driver.check()
            time.sleep(0.1)
        pipeline.tell("a streaming query follows the orders in two executors; the shop opens")
        pipeline.phase = "selling"
        parts = [pipeline.play(part) for part in (sell, tier, sample)]
        parts.append(pipeline.play(lambda one: direct(one, driver)))
        while not seen_all(pipeline, driver.seq, log):
            pipeline.check()
            driver.check()
            watch(pipeline)
            time.sleep(0.2)
        driver.finish()
        pipeline.tell(f"the query has seen every order; its driver was started {driver.starts} times")
        pipeline.stop_tiering.set()
        for part in parts:
            part.join(_END_S)
        pipeline.check()
        _look(pipeline, log)
        write_report(pipeline.facts, report)
    return pipeline


def _look(pipeline: Pipeline, log: emb.Log) -> None:
    from embarcadero.spark import session

    spark = session("shop, looked at", "local[2]", {"spark.sql.shuffle.partitions": "2"})
    try:
        pipeline.phase = "looking"
        look(pipeline, spark, log)
    finally:
        spark.stop()
    pipeline.facts.checks.append(duckdb_check(pipeline))
    tell_figures(pipeline)


def run_here(report: Path, steps: int, watch: Callable[[Pipeline], None]) -> Pipeline:
    """Run in a temporary folder; Spark's log is kept beside the report if the run failed."""
    with tempfile.TemporaryDirectory(prefix="embarcadero-kills-") as folder:
        try:
            return run(Path(folder), report, steps, watch)
        except BaseException:
            if (log := Path(folder) / "driver.log").exists():
                report.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(log, report.with_suffix(".driver.log"))
            raise
