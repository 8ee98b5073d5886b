"""Real processes on real disks: durably acked records are there after kill -9 of everything, and positions stay."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import embarcadero as emb
from embarcadero.client.results import RecordFuture
from embarcadero.errors import EmbarcaderoError
from embarcadero.node.local import LocalCluster
from embarcadero.node.report import ClusterReport
from embarcadero.types import Position

pytestmark = pytest.mark.system
WAIT_S = 60


def until(what: Callable[[], Any], limit_s: float = WAIT_S) -> Any:
    give_up = time.monotonic() + limit_s
    while not (found := what()):
        assert time.monotonic() < give_up, "it did not happen"
        time.sleep(0.05)
    return found


class Load:
    """A thread that publishes numbered records with ack=2 until its cluster is gone, and records the acks."""

    def __init__(self, cluster: LocalCluster, topic: str, first: int) -> None:
        self.acked: dict[int, Position] = {}
        self.sent = first
        self._log = emb.connect(cluster.addresses)
        self._thread = threading.Thread(target=self._run, args=(topic,), daemon=True)
        self._stop = threading.Event()
        self._thread.start()

    def _run(self, topic: str) -> None:
        try:
            publisher = self._log.publisher(topic, ack=2, batch_bytes=4_096, linger_ms=0.5)
            while not self._stop.is_set():
                number = self.sent
                future = publisher.send(b"%d" % number)
                self.sent += 1
                future.add_done_callback(lambda done, number=number: self._note(number, done))
                if number % 50 == 0:
                    time.sleep(0.001)
        except EmbarcaderoError:
            pass  # the cluster is gone

    def _note(self, number: int, done: RecordFuture) -> None:
        if done.exception() is None:
            self.acked[number] = done.result()

    def end(self) -> dict[int, Position]:
        """Stop; return the records acked until now."""
        acked = dict(self.acked)
        self._stop.set()
        killer = threading.Thread(target=self._close, daemon=True)
        killer.start()
        killer.join(WAIT_S)
        self._thread.join(WAIT_S)
        return acked

    def _close(self) -> None:
        with contextlib.suppress(EmbarcaderoError):
            self._log.close(timeout=0.5)


def everything(cluster: LocalCluster, topic: str, order: int) -> dict[int, tuple[int, int]]:
    """(lane, seq) of each durable record, by its number; orders 2 and 5 have none twice."""
    with emb.connect(cluster.addresses) as log:
        table = log.read(topic, read="durable", timeout=WAIT_S)
        lane = log.describe(topic).lane
    numbers = [int(value) for value in table.column("value").to_pylist()]
    lanes = table.column("_lane").to_pylist() if order < 2 else [lane] * len(numbers)
    assert order < 2 or len(set(numbers)) == len(numbers), "a record is there twice"
    places = zip(lanes, table.column("_seq").to_pylist(), strict=True)
    return dict(zip(numbers, places, strict=True))


def there(found: dict[int, tuple[int, int]], number: int, at: Position, order: int) -> bool:
    """Whether a record is at the position of its ack. Orders 0 and 1 may have it twice: it is there at least once."""
    return found.get(number) == (at.lane, at.seq) if order >= 2 else number in found


def ready(cluster: LocalCluster) -> bool:
    lanes = cluster.report().lanes
    return all(lane.state in ("open", "sealed") for lane in lanes)


@pytest.mark.parametrize("order", [5, 0])
def test_ack_2_survives_kill_9_of_everything(tmp_path: Path, order: int) -> None:
    """Twice: load, SIGKILL of all processes at a random moment, restart on the same folder. Nothing is missing."""
    rng = random.Random(order)
    acked: dict[int, Position] = {}
    next_number = 0
    for life in range(3):
        with LocalCluster(brokers=2, replicas=3, data_dir=tmp_path) as cluster:
            if life == 0:
                with emb.connect(cluster.addresses) as log:
                    log.create_topic("t", order=order, replicas=3, durable_on=2)
            until(lambda: ready(cluster))
            found = everything(cluster, "t", order)
            missing = {number: at for number, at in acked.items() if not there(found, number, at, order)}
            assert not missing, dict(list(missing.items())[:5])
            if life < 2:
                load = Load(cluster, "t", next_number)
                until(lambda: len(load.acked) > 100)  # noqa: B023
                time.sleep(rng.random() * 0.5)
                cluster.kill_all()
                acked |= load.end()
                next_number = load.sent
    assert len(acked) > 200


def test_a_clean_stop_keeps_everything(tmp_path: Path) -> None:
    """`down` and `up`: records acked with ack=1 are there too, positions continue without a gap."""
    with LocalCluster(brokers=2, replicas=1, data_dir=tmp_path) as cluster, emb.connect(cluster.addresses) as log:
        log.create_topic("t", order=5, replicas=1, durable_on=1)
        with log.publisher("t", ack=1) as publisher:
            before = [publisher.send(b"%d" % number) for number in range(1_000)]
        last = before[-1].result(WAIT_S)
    with LocalCluster(brokers=2, replicas=1, data_dir=tmp_path) as cluster:
        assert len(everything(cluster, "t", 5)) == 1_000
        with emb.connect(cluster.addresses) as log, log.publisher("t", ack=2) as publisher:
            assert publisher.send(b"1000").result(WAIT_S).seq == last.seq + 1


def test_a_dead_replica_is_replaced_and_comes_back_complete(tmp_path: Path) -> None:
    """ack=2 continues meanwhile; the sealed range is completed on the replica that was away."""
    with LocalCluster(brokers=2, replicas=3, data_dir=tmp_path) as cluster, emb.connect(cluster.addresses) as log:
        log.create_topic("t", order=2, replicas=3, durable_on=2)
        with log.publisher("t", ack=2, batch_bytes=2_000) as publisher:
            for number in range(500):
                publisher.send(b"%d" % number)
            cluster.kill_replica(1)
            futures = [publisher.send(b"%d" % number) for number in range(500, 1_000)]
            assert all(future.result(WAIT_S) for future in futures)
        until(lambda: [r for r in cluster.report().replicas if r.id == 1 and r.state == "live"])
        assert len(everything(cluster, "t", 2)) == 1_000
        until(lambda: not cluster.report().degraded)


def test_a_wiped_replica_does_not_lose_records_of_the_others(tmp_path: Path) -> None:
    """kill -9 of all, one disk wiped, restart: 2-of-3 is still all there, and the wiped one is filled again."""
    with LocalCluster(brokers=2, replicas=3, data_dir=tmp_path) as cluster:
        with emb.connect(cluster.addresses) as log:
            log.create_topic("t", order=5, replicas=3, durable_on=2)
            with log.publisher("t", ack=2) as publisher:
                futures = [publisher.send(b"%d" % number) for number in range(2_000)]
                assert all(future.result(WAIT_S) for future in futures)
        cluster.kill_all()
    shutil.rmtree(tmp_path / "replica-1")
    with LocalCluster(brokers=2, replicas=3, data_dir=tmp_path) as cluster:
        until(lambda: ready(cluster))
        assert len(everything(cluster, "t", 5)) == 2_000

        def filled() -> bool:
            files = {path.relative_to(tmp_path / "replica-0") for path in (tmp_path / "replica-0").rglob("*.log")}
            theirs = {path.relative_to(tmp_path / "replica-1") for path in (tmp_path / "replica-1").rglob("*.log")}
            return files == theirs

        until(filled)
        until(lambda: not cluster.report().degraded)


def disk_of(report: ClusterReport, number: int) -> Path:
    return Path(next(replica.folder for replica in report.replicas if replica.id == number))


def test_a_replica_of_another_cluster_is_refused_and_the_rest_continues(tmp_path: Path) -> None:
    """Its folder belongs to another cluster: it does not start, `up` does, and the log has the reason."""
    with LocalCluster(brokers=1, replicas=1, data_dir=tmp_path / "other"):
        pass
    shutil.copytree(tmp_path / "other" / "replica-0", tmp_path / "mine" / "replica-1")
    with LocalCluster(brokers=1, replicas=1, data_dir=tmp_path / "mine") as cluster:
        assert [replica.id for replica in cluster.report().replicas] == [0]
        assert "WrongFolder" in (tmp_path / "mine" / "logs" / "replica-1.log").read_text()


def test_a_stopped_replica_blocks_neither_ack(tmp_path: Path) -> None:
    """SIGSTOP of one of three: ack=1 and ack=2 continue."""
    with LocalCluster(brokers=1, replicas=3, data_dir=tmp_path) as cluster, emb.connect(cluster.addresses) as log:
        log.create_topic("t", order=2, replicas=3, durable_on=2)
        pid = cluster.pids()["replica:2"]
        os.kill(pid, signal.SIGSTOP)
        try:
            with log.publisher("t", ack=2) as publisher:
                assert [publisher.send(b"%d" % number).result(WAIT_S) for number in range(50)]
        finally:
            with contextlib.suppress(ProcessLookupError):  # it was paused for so long that it was killed
                os.kill(pid, signal.SIGCONT)
