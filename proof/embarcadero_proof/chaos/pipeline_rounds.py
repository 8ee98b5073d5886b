"""`chaos pipeline --rounds`: an operator upstream of the sink fails, and processes are killed meanwhile.

Each round is one file, which becomes one micro-batch of a streaming query. The query's function raises in some attempts
of its tasks, and Spark then ends the rows of these tasks as if they were complete. The same round also kills a process:
the driver, a broker, the sequencer, the replica, or everything together. A round is over when its rows are durable.

At the end every row is in the topic once, and all rows of a micro-batch have the stamp of one start of the query: rows
of a failed start were never there. A reader that follows all the time has seen the same rows, and the audit holds.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

import embarcadero as emb
from embarcadero.demo.durable import kill_sequencer
from embarcadero.errors import ClusterError
from embarcadero.node.local import RestartableCluster, ended_by_signals
from embarcadero_proof.chaos.pipeline_day import descendants, kill_process
from embarcadero_proof.chaos.pipeline_query import Plan
from embarcadero_proof.machine import machine_facts

TOPIC: Final = "rounds"
SCHEMA: Final = pa.schema(
    [("id", pa.int64()), ("file", pa.int32()), ("text", pa.string()), ("stamp", pa.string())]
)  # fmt: skip
ROWS: Final = 3_000
SIZES: Final = (20, 1_500)  # of a text: small rows travel to the driver, large ones are staged
FAILING: Final = 0.5  # share of failing attempts of tasks; a query fails if both attempts of one task do
KINDS: Final = ("nothing", "driver", "broker", "sequencer", "replica", "everything")
_WEIGHTS: Final = (6, 3, 3, 2, 2, 1)
_LATEST_KILL_S: Final = 3.0
_ROUND_S: Final = 300.0
_DEAD_S: Final = 5.0
_DEATHS_MAX: Final = 5
_LOOK_S: Final = 0.2


@dataclass
class RoundsResult:
    """Events of the rounds, and problems."""

    rounds: int = 0
    rows: int = 0
    failures: int = 0  # of the operator
    starts: int = 0  # of the query that have rows in the topic
    drivers: int = 0  # processes started
    kills: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)


class Driver:
    """The process of the driver. It is started again after each death."""

    def __init__(self, folder: Path, plan: Path) -> None:
        self._folder, self._plan = folder, plan
        self.lives = 0
        self._died = 0  # by itself, since the last finished round
        self._process: subprocess.Popen[bytes] | None = None

    def round_over(self) -> None:
        """Note that a round is over, so the driver works."""
        self._died = 0

    def start(self) -> None:
        """Start it on its checkpoint."""
        self.lives += 1
        command = [sys.executable, "-m", "embarcadero_proof.chaos.pipeline_query", str(self._plan), str(self.lives)]
        with (self._folder / "driver.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self._folder, start_new_session=True
            )

    def kill(self) -> None:
        """SIGKILL the driver with its JVM and workers."""
        if self._process is not None:
            for pid in (self._process.pid, *descendants(self._process.pid)):
                kill_process(pid)
            self._process.wait()

    def check(self) -> None:
        """Start it again if it ended by itself: a query that begins while no broker answers fails immediately."""
        if self._process is not None and self._process.poll() is not None:
            self._died += 1
            if self._died > _DEATHS_MAX:
                raise ClusterError("the driver does not stay alive", f"see {self._folder / 'driver.log'}")
            time.sleep(_DEAD_S)
            self.start()


class Reader(threading.Thread):
    """Follows the topic all the time, and counts rows by file and stamp."""

    def __init__(self, addresses: list[str]) -> None:
        super().__init__(name="reader", daemon=True)
        self._addresses = addresses
        self.seen: Counter[tuple[int, str]] = Counter()
        self.rows = 0
        self.over = threading.Event()
        self.problem: BaseException | None = None

    def run(self) -> None:
        """Read durable records until asked to stop."""
        try:
            with emb.connect(self._addresses) as log, log.subscribe(TOPIC) as subscriber:
                while not self.over.is_set():
                    batch = subscriber.poll(_LOOK_S)
                    if batch is not None and batch.count:
                        rows = batch.to_arrow()
                        files, stamps = rows.column("file").to_pylist(), rows.column("stamp").to_pylist()
                        self.seen.update(zip(files, stamps, strict=True))
                        self.rows += batch.count
        except BaseException as error:
            self.problem = error


class Rounds:
    """A cluster, a driver, a reader, and the kills."""

    def __init__(self, folder: Path, seed: int, report: Callable[[str], None]) -> None:
        self.folder, self.seed, self.report = folder, seed, report
        self.rng = random.Random(seed)
        self.cluster = RestartableCluster(folder / "cluster", 2, 1)
        self.found = RoundsResult()
        plan = Plan(str(folder), self.cluster.addresses, TOPIC, seed, FAILING)
        (folder / "plan.json").write_bytes(msgspec.json.encode(plan))
        (folder / "in").mkdir()
        self.driver = Driver(folder, folder / "plan.json")

    def run(self, rounds: int) -> RoundsResult:
        """Run `rounds` rounds, then the checks."""
        began = time.monotonic()
        with ExitStack() as stack:
            stack.callback(self.cluster.end)
            self.cluster.start()
            log = stack.enter_context(emb.connect(self.cluster.addresses))
            log.create_topic(TOPIC, order=5, replicas=1, schema=SCHEMA)
            reader = Reader(self.cluster.addresses)
            reader.start()
            stack.callback(self.driver.kill)
            self.driver.start()
            for number in range(rounds):
                self._round(reader, number)
            reader.over.set()
            reader.join()
            self.driver.kill()
            self.found.drivers = self.driver.lives
            self._check(log, reader)
        self.found.seconds = time.monotonic() - began
        return self.found

    def _round(self, reader: Reader, number: int) -> None:
        """Run one round with one file and one kill; it is over when its rows are durable."""
        began, kind = time.monotonic(), self.rng.choices(KINDS, _WEIGHTS)[0]
        kind = KINDS[number] if number < len(KINDS) else kind  # every kind at least once
        self._feed(number)
        time.sleep(self.rng.uniform(0, _LATEST_KILL_S))
        self._kill(kind)
        self.found.kills[kind] = self.found.kills.get(kind, 0) + 1
        self._wait_for(reader)
        self.driver.round_over()
        self.found.rounds += 1
        self.report(f"round {number + 1}: killed {kind}; {self.found.rows:,} rows; {time.monotonic() - began:.1f} s")

    def _feed(self, number: int) -> None:
        """Add one file: first under a name that Spark does not see."""
        ids, size = range(number * ROWS, (number + 1) * ROWS), self.rng.choice(SIZES)
        columns = {"id": list(ids), "file": [number] * ROWS, "text": ["x" * size] * ROWS}
        table = pa.table(columns, schema=SCHEMA.remove(3))
        hidden, shown = self.folder / f"{number}.parquet", self.folder / "in" / f"{number:06}.parquet"
        pq.write_table(table, hidden)
        hidden.rename(shown)
        self.found.rows += ROWS

    def _kill(self, kind: str) -> None:
        if kind == "driver":
            self.driver.kill()
            self.driver.start()
        elif kind == "broker":
            self.cluster.kill_broker(self.rng.randrange(2))
        elif kind == "sequencer":
            kill_sequencer(self.cluster)
        elif kind == "replica":
            os.kill(self.cluster.pids()["replica:0"], signal.SIGKILL)
        elif kind == "everything":
            self.cluster.kill_all()
            self.cluster.start()

    def _wait_for(self, reader: Reader) -> None:
        give_up = time.monotonic() + _ROUND_S
        while reader.rows < self.found.rows and reader.problem is None:
            if time.monotonic() > give_up:
                raise ClusterError(f"a round did not end in {_ROUND_S:.0f} s", f"see {self.folder / 'driver.log'}")
            self.driver.check()
            time.sleep(_LOOK_S)

    def _check(self, log: emb.Log, reader: Reader) -> None:
        found, failures = self.found, self.folder / "failures"
        found.failures = len(failures.read_text().splitlines()) if failures.exists() else 0
        rows = log.read(TOPIC)
        found.starts = pc.count_distinct(rows.column("stamp")).as_py()
        if reader.problem is not None:
            found.wrong.append(f"the reader ended: {reader.problem}")
        found.wrong += differences(rows, reader.seen, found.rows) + audited(log)


# --- at the end -------------------------------------------------------------------------------------------------------
def differences(rows: pa.Table, seen: Mapping[tuple[int, str], int], total: int) -> list[str]:
    """Return problems with the rows of a topic. `seen`: rows of each file and stamp that a reader saw."""
    wrong = []
    ids = rows.column("id").to_pylist()
    if sorted(ids) != list(range(total)):
        wrong.append(f"{len(ids)} rows, {len(set(ids))} of them different, instead of {total}")
    now = Counter(zip(rows.column("file").to_pylist(), rows.column("stamp").to_pylist(), strict=True))
    mixed = [file for file, stamps in Counter(file for file, _ in now).items() if stamps > 1]
    if mixed:
        wrong.append(f"files {mixed} have rows of several starts of the query")
    if dict(seen) != dict(now):
        wrong.append("the reader has seen rows other than those in the topic")
    return wrong


def audited(log: emb.Log) -> list[str]:
    """Return the findings of the topic's audit."""
    from embarcadero.spark import session
    from embarcadero.spark.auditing import audit

    spark = session("rounds, looked at", "local[2]")
    try:
        return [f"audit: {one.kind}: {one.detail}" for one in audit(spark, log, TOPIC).findings[:5]]
    finally:
        spark.stop()


def run_cli(rounds: int, seed: int, report: Path, json_out: bool) -> int:
    """Run `rounds` rounds; return 0 when every row is there once and no failed write was ever visible."""
    console = Console(stderr=json_out)
    with tempfile.TemporaryDirectory(prefix="embarcadero-rounds-") as made, ended_by_signals():
        folder = Path(made)
        try:
            found = Rounds(folder, seed, lambda line: console.print(line, highlight=False)).run(rounds)
        except BaseException:
            if (log := folder / "driver.log").exists():
                report.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(log, report.with_suffix(".driver.log"))
            raise
    result: dict[str, Any] = {"ok": not found.wrong, "seed": seed} | msgspec.to_builtins(found)
    report.parent.mkdir(parents=True, exist_ok=True)
    report.write_text(json.dumps(result | {"machine": machine_facts()}, indent=2, default=str))
    if json_out:
        print(json.dumps(result))  # noqa: T201 - requested
    else:
        _print(console, found, report)
    return int(bool(found.wrong))


def _print(console: Console, found: RoundsResult, report: Path) -> None:
    table = Table("rounds", "rows", "failures of the operator", "starts with rows", "drivers", "kills", "seconds")
    kills = ", ".join(f"{name} {count}" for name, count in sorted(found.kills.items()))
    table.add_row(
        str(found.rounds), f"{found.rows:,}", str(found.failures), str(found.starts), str(found.drivers), kills,
        f"{found.seconds:.0f}",
    )  # fmt: skip
    console.print(table)
    for line in found.wrong:
        console.print(f"[red]wrong:[/] {line}")
    if not found.wrong:
        console.print("every row is there once, and no row of a failed attempt was ever visible")
    console.print(f"report: {report}")
