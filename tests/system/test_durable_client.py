"""Clients and durability with real processes: ack=2, both ends, and a restart of everything under running clients."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

import embarcadero as emb
from embarcadero.config import load
from embarcadero.errors import RecordsLost, Retriable
from embarcadero.node.background import start
from embarcadero.node.folder import ClusterFolder
from embarcadero.node.process import ReservedPorts
from embarcadero.node.supervisor import UpOptions
from embarcadero.types import GapKind, Position

pytestmark = pytest.mark.system

BROKERS = 2
PATIENCE_S = 60


class Cluster:
    """A cluster with replicas on ports that stay the same, so that clients find it again."""

    def __init__(self, folder: Path, replicas: int = 1) -> None:
        self.folder = ClusterFolder(folder)
        self._ports = ReservedPorts(BROKERS)
        self._port = self._ports.first
        self._replicas = replicas
        self._process: subprocess.Popen[bytes] | None = None

    def up(self) -> None:
        flags = {
            "cluster.brokers": BROKERS, "cluster.replicas": self._replicas, "fabric.log_bytes": 32 << 20,
            "broker.port": self._port, "metrics.port": 0, "cluster.data_dir": self.folder.path,
        }  # fmt: skip
        self._process, _ = start(UpOptions(config=load(None, flags), stop_with_stdin=True))

    @property
    def address(self) -> str:
        return ",".join(f"127.0.0.1:{self._port + number}" for number in range(BROKERS))

    def pids(self) -> list[int]:
        info = self.folder.require_running()
        return [pid for pid in {info.supervisor, *(node.pid for node in info.nodes)} if pid]

    def stop_replica(self, number: int) -> None:
        """Connected and idle."""
        os.kill(self.folder.require_running().pid_of(f"replica:{number}"), signal.SIGSTOP)

    def kill_all(self) -> None:
        """SIGKILL every process; then remove the fabric."""
        pids, fabric = self.pids(), self.folder.require_running().fabric
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.down()
        until(lambda: not any(_runs(pid) for pid in pids))
        shutil.rmtree(fabric)

    def down(self) -> None:
        """A clean stop."""
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            process.stdin.close()
            process.wait(PATIENCE_S)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition: Callable[[], Any]) -> None:
    """Wait for an event in another process."""
    give_up = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up, "it never happened"
        time.sleep(0.02)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path / "data")
    made.up()
    try:
        yield made
    finally:
        made.down()


@pytest.fixture
def log(cluster: Cluster) -> Iterator[Any]:
    with emb.connect(cluster.address) as log:
        yield log


class Publishing:
    """A thread that publishes numbers until it is stopped; its acked records, and those reported as lost."""

    def __init__(self, log: Any, topic: str, ack: int) -> None:
        self._publisher = log.publisher(topic, ack=ack, linger_ms=1)
        self._stop = Event()
        self.futures: list[Any] = []
        self.lost: list[Position] = []
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._calling(lambda: self.futures.append(self._publisher.send(b"%d" % len(self.futures))))
            self._stop.wait(0.001)

    def _calling(self, call: Callable[[], Any]) -> None:
        while True:
            try:
                call()
            except RecordsLost as error:
                self.lost += error.positions
            else:
                return

    @property
    def acked(self) -> int:
        return sum(future.done() for future in self.futures)

    def stop(self) -> dict[bytes, Position]:
        """The position of each record, or its position when it was acked."""
        self._stop.set()
        self._thread.join(PATIENCE_S)
        self._calling(lambda: self._publisher.flush(PATIENCE_S))
        self._calling(self._publisher.close)
        return {b"%d" % n: future.result() for n, future in enumerate(self.futures)}


class Reading:
    """A thread that reads until it has seen a record."""

    def __init__(self, log: Any, topic: str, read: str = "durable") -> None:
        self._subscriber = log.subscribe(topic, read=read)
        self.seen: list[tuple[bytes, Position]] = []
        self.gaps: list[Any] = []
        self._last: bytes | None = None
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self._last is None or not self.seen or self.seen[-1][0] != self._last:
            batch = self._subscriber.poll(timeout=0.1)
            if batch is None:
                continue
            if batch.gap is not None:
                self.gaps.append(batch.gap)
            self.seen += [(r.value, Position(batch.lane, batch.index, r.seq)) for r in batch.records()]

    def up_to(self, last: bytes) -> list[tuple[bytes, Position]]:
        self._last = last
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "it did not see the last record"
        self._subscriber.close()
        return self.seen


def test_ack_2_tail_and_durable_reads(log: Any) -> None:
    """Records acked with ack=2 are durable: a durable reader gets them immediately, and the tail includes them."""
    for order in (0, 1, 2, 5):
        topic = f"order-{order}"
        info = log.create_topic(topic, order=order, replicas=1)
        assert (info.replicas, info.durable_on) == (1, 1)
        with log.publisher(topic, ack=2) as publisher:
            places = [publisher.send(b"%d" % n).result(PATIENCE_S) for n in range(20)]
            tail = log.tail(topic)
            assert tail.durable_seq == tail.seq == 20
            ends = {each.lane: each.durable_index for each in tail.lanes or (tail,)}
            assert all(place.index < ends[place.lane] for place in places)
        assert sorted(log.read(topic).column("value").to_pylist(), key=int) == [b"%d" % n for n in range(20)]
        with log.subscribe(topic) as subscriber:
            seen: list[bytes] = []
            while len(seen) < 20:
                seen += [record.value for record in subscriber.poll(PATIENCE_S).records()]
            assert sorted(seen, key=int) == [b"%d" % n for n in range(20)]


@pytest.mark.parametrize("order", [2, 5])
def test_everything_is_killed_under_a_running_publisher_and_subscriber(cluster: Cluster, log: Any, order: int) -> None:
    """ack=2: nothing is lost, stored twice or out of order; the subscriber sees all of it once, over LOST gaps."""
    log.create_topic("t", order=order, replicas=1)
    publishing, reading = Publishing(log, "t", ack=2), Reading(log, "t")
    for round_ in range(1, 3):
        until(lambda: publishing.acked > 200 * round_)  # noqa: B023 - called in this round
        cluster.kill_all()
        cluster.up()
    before = publishing.acked
    until(lambda: publishing.acked > before + 200)
    places = publishing.stop()
    assert publishing.lost == []
    last = max(places, key=lambda value: places[value])
    seen = reading.up_to(last)
    assert len(seen) == len(places)
    assert dict(seen) == places
    assert {gap.kind for gap in reading.gaps} <= {GapKind.NEVER_DURABLE}
    assert [at for _, at in seen] == sorted(at for _, at in seen)
    if order == 5:
        assert [value for value, _ in seen] == [b"%d" % n for n in range(len(seen))]
    table = log.read("t")
    assert dict(zip(table.column("value").to_pylist(), table.column("_seq").to_pylist(), strict=True)) == {
        value: at.seq for value, at in places.items()
    }


@pytest.mark.parametrize("order", [0, 1, 2, 5])
def test_losses_of_ack_1_are_reported_and_nothing_else_is_missing(cluster: Cluster, log: Any, order: int) -> None:
    """Each acked record is at its position, or was reported to its publisher as lost."""
    log.create_topic("t", order=order, replicas=1)
    publishing = Publishing(log, "t", ack=1)
    until(lambda: publishing.acked > 100)
    cluster.stop_replica(0)  # nothing is durable from here on
    durable = publishing.acked
    until(lambda: publishing.acked > durable + 100)
    cluster.kill_all()
    cluster.up()
    before = publishing.acked
    until(lambda: publishing.acked > before + 100)
    places = publishing.stop()
    assert publishing.lost
    lost = {(at.lane, at.index) for at in publishing.lost}
    kept = {value: at for value, at in places.items() if (at.lane, at.index) not in lost}
    table = log.read("t", timeout=PATIENCE_S)
    lanes = table.column("_lane").to_pylist() if order <= 1 else [places[b"0"].lane] * table.num_rows
    there = set(zip(table.column("value").to_pylist(), lanes, table.column("_seq").to_pylist(), strict=True))
    expected = {(value, at.lane, at.seq) for value, at in kept.items()}
    assert expected <= there
    if order >= 2:
        assert expected == there, "a lost record is gone, and nothing is there twice"
    else:
        assert {value for value, _, _ in there} <= places.keys()


def test_a_clean_stop_keeps_records_acked_with_ack_1(cluster: Cluster, log: Any) -> None:
    """down, then up: nothing is lost, no gap, and the same publisher continues in the same session."""
    log.create_topic("t", order=5, replicas=1)
    publisher = log.publisher("t")
    places = [publisher.send(b"%d" % n).result(PATIENCE_S) for n in range(50)]
    cluster.down()
    cluster.up()
    places += [publisher.send(b"%d" % n).result(PATIENCE_S) for n in range(50, 60)]
    publisher.close()
    assert [at.seq for at in places] == list(range(60))
    assert log.read("t", timeout=PATIENCE_S).column("value").to_pylist() == [b"%d" % n for n in range(60)]


def test_calls_end_while_nothing_runs(cluster: Cluster, log: Any) -> None:
    """Everything is dead: requests end with a retriable error, and work again afterwards."""
    log.create_topic("t", replicas=1)
    with log.publisher("t", ack=2) as publisher:
        publisher.send(b"x").result(PATIENCE_S)
        cluster.kill_all()
        with pytest.raises((Retriable, emb.OutcomeUnknown)):
            log.tail("t", timeout=0.5)
        future = publisher.send(b"y")
        with pytest.raises(emb.OutcomeUnknown):
            future.result(0.2)
        cluster.up()
        assert future.result(PATIENCE_S) is not None
    assert log.read("t", timeout=PATIENCE_S).column("value").to_pylist() == [b"x", b"y"]


def test_the_command_line_waits_for_disks_and_reports_losses(cluster: Cluster, log: Any) -> None:
    """`publish --ack 2`, `tail --read`, and the hole that a crash leaves."""

    def run(*arguments: str, lines: str = "") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "embarcadero.cli.main", *arguments, "--brokers", cluster.address]
        done = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert done.returncode == 0, done.stderr
        return done

    log.create_topic("t", order=5, replicas=1)
    assert "seq 1" in run("publish", "t", "--ack", "2", lines="one\ntwo\n").stdout
    cluster.stop_replica(0)
    publisher = log.publisher("t")
    lost = publisher.send(b"three").result(PATIENCE_S)
    assert run("tail", "t", "--read", "ordered").stdout == "one\ntwo\nthree\n"
    cluster.kill_all()
    cluster.up()
    with pytest.raises(RecordsLost) as caught:
        publisher.close()
    assert caught.value.positions == (lost,)
    shown = run("tail", "t")
    assert shown.stdout == "one\ntwo\n"
    assert "-- never durable: batches" in shown.stderr
    assert "-- lost: batches" in run("tail", "t", "--read", "ordered").stderr
    end = log.tail("t")
    log.note_progress("t", "reader", {end.lane: (end.start_index, end.start_seq)})
    assert end.seq > 1 << 30
    assert [reader.lag for reader in log.readers("t")] == [2], "lag counts records, and not seqs"
    gaps = [line for line in run("tail", "t", "--json").stdout.splitlines() if '"gap"' in line]
    assert len(gaps) == 1
