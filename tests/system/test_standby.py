"""Standby sequencers, in real processes: killed, stopped and asked to hand over under load."""

from __future__ import annotations

import os
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

import embarcadero as emb
from embarcadero.config import load
from embarcadero.errors import BadValue, ClusterError, NotRunning
from embarcadero.limits import MIB, SEQUENCER_NICE
from embarcadero.liveness import process_mark
from embarcadero.node.folder import ClusterFolder
from embarcadero.node.local import LocalCluster
from embarcadero.node.report import SequencerReport
from embarcadero.node.standby import hand_over


def until(what: Callable[[], Any]) -> Any:
    """Poll until the condition is true. The test's own timeout ends an endless wait."""
    while not (answer := what()):
        time.sleep(0.02)
    return answer


class Load:
    """A publisher at work, and the outcome of all its records."""

    def __init__(self, log: emb.Log, topic: str) -> None:
        self._log, self._topic = log, topic
        self._stop = threading.Event()
        self.sent: list[bytes] = []
        self.seqs: list[int] = []
        log.create_topic(topic, order=5)
        self._thread = threading.Thread(target=self._work)

    def _work(self) -> None:
        with self._log.publisher(self._topic, batch_bytes=1_000, linger_ms=0) as publisher:
            futures = []
            while not self._stop.wait(0.002):
                self.sent.append(b"%d" % len(self.sent))
                futures.append(publisher.send(self.sent[-1]))
            self.seqs = [future.result(60).seq for future in futures]

    def __enter__(self) -> Load:
        self._thread.start()
        until(lambda: len(self.sent) > 20)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def check(self) -> None:
        """Every future has its position; each record is there once, in the order of sending."""
        assert self.seqs == list(range(len(self.sent)))
        assert self._log.read(self._topic).column("value").to_pylist() == self.sent


@pytest.fixture(scope="module")
def log() -> Iterator[emb.Log]:
    with emb.local(brokers=2, log_bytes=32 * MIB) as log:
        yield log


def reigning(log: emb.Log) -> SequencerReport:
    return log.cluster.report().sequencer


def standing_by(log: emb.Log) -> SequencerReport:
    """The leader, once another sequencer stands by."""
    return until(lambda: (found := reigning(log)).pid and any(s.state == "stands by" for s in found.standbys) and found)


def test_a_killed_sequencer_is_succeeded_under_load(log: emb.Log) -> None:
    """kill -9, twice: futures complete later, nothing is lost or duplicated, and the dead one stands by again."""
    with Load(log, "killed") as load:
        for _ in range(2):
            before = standing_by(log)
            os.kill(before.pid, signal.SIGKILL)
            after = until(lambda before=before: (found := reigning(log)).epoch > before.epoch and found)  # type: ignore[misc]
            assert after.candidate != before.candidate
    load.check()
    assert standing_by(log).pid


def test_a_hand_over_disturbs_no_client(log: emb.Log) -> None:
    """A planned move there and back: the other sequencer leads, and stands by again after the second move."""
    first = standing_by(log)
    with Load(log, "moved") as load:
        there = hand_over(log.cluster.folder)
        back = hand_over(log.cluster.folder, to=first.candidate)
    load.check()
    assert (there.before, back.now) == (first.candidate, first.candidate)
    assert there.now == back.before != first.candidate
    assert reigning(log).pid == first.pid  # the same process: nothing was started


def test_only_the_leader_has_priority(log: emb.Log) -> None:
    """Where the system permits it: after a hand-over the old leader has normal priority again."""
    nice = SEQUENCER_NICE if os.geteuid() == 0 else 0
    for _ in range(2):
        before = standing_by(log)
        hand_over(log.cluster.folder)
        after = reigning(log)
        until(lambda before=before: os.getpriority(os.PRIO_PROCESS, before.pid) == 0)  # type: ignore[misc]
        assert os.getpriority(os.PRIO_PROCESS, after.pid) == nice
        assert after.pid != before.pid


def test_a_stopped_sequencer_stands_by_when_it_continues(log: emb.Log) -> None:
    """SIGSTOP: another one takes over; SIGCONT: it has no effect, and watches the new leader."""
    stopped = standing_by(log)
    with Load(log, "stopped") as load:
        os.kill(stopped.pid, signal.SIGSTOP)
        try:
            after = until(lambda: (found := reigning(log)).epoch > stopped.epoch and found)
            assert after.pid != stopped.pid
        finally:
            os.kill(stopped.pid, signal.SIGCONT)
        sent = len(load.sent)
        until(lambda: len(load.sent) > sent + 50)
    load.check()
    role = "sequencer" if stopped.candidate == 0 else f"sequencer-{stopped.candidate}"
    path = log.cluster.data_dir / "logs" / f"{role}.log"
    until(lambda: f"sequencer-{stopped.epoch} deposed" in path.read_text())
    until(lambda: stopped.pid in {(found := reigning(log)).pid, *(standby.pid for standby in found.standbys)})


def test_a_stopped_broker_is_replaced(log: emb.Log) -> None:
    """SIGSTOP and nothing else: the sequencer misses its heartbeat, the supervisor starts another; nothing is lost."""
    stopped = log.cluster.report().brokers[0]
    with Load(log, "halted") as load:
        os.kill(stopped.pid, signal.SIGSTOP)
        until(lambda: (found := log.cluster.report().brokers[0]).incarnation > stopped.incarnation and found.pid)
        sent = len(load.sent)
        until(lambda: len(load.sent) > sent + 50)
    load.check()
    assert "broker was silent" in (log.cluster.data_dir / "logs" / "supervisor.log").read_text()


def test_a_stopped_process_is_killed_although_the_store_is_locked(log: emb.Log) -> None:
    """As if it was stopped in a transaction: its death cannot be recorded, and still it is replaced."""
    stopped = standing_by(log)
    with Load(log, "locked") as load:
        with closing(sqlite3.connect(log.cluster.folder.store_path, isolation_level=None)) as store:
            store.execute("BEGIN IMMEDIATE")
            for pid in (stopped.pid, stopped.standbys[0].pid, log.cluster.report().brokers[0].pid):
                os.kill(pid, signal.SIGSTOP)
            until(lambda: not process_mark(stopped.pid))  # a lock of its own would go with it
        sent = len(load.sent)
        until(lambda: len(load.sent) > sent + 50)
    load.check()
    assert "node was stopped" in (log.cluster.data_dir / "logs" / "supervisor.log").read_text()
    standing_by(log)


def test_a_sequencer_that_is_asked_to_end_hands_over_first(log: emb.Log) -> None:
    """SIGTERM to its process alone: nothing is drained, another one leads, and it comes back."""
    before = standing_by(log)
    with Load(log, "ended") as load:
        os.kill(before.pid, signal.SIGTERM)
        until(lambda: reigning(log).candidate != before.candidate)
        until(lambda: [s for s in reigning(log).standbys if s.state == "stands by" and s.pid != before.pid])
    load.check()


def test_a_standby_can_be_watched(log: emb.Log) -> None:
    """Its page reports that it stands by, and has no metrics of a sequencer."""
    found = standing_by(log)
    pages = {}
    for number, address in [(found.candidate, found.metrics), *((s.candidate, s.metrics) for s in found.standbys)]:
        with urlopen(f"http://{address}/metrics", timeout=10) as answer:
            pages[number] = answer.read().decode()
    other = found.standbys[0].candidate
    assert f'embarcadero_sequencer_standby{{candidate="{found.candidate}"}} 0' in pages[found.candidate]
    assert f"embarcadero_epoch {found.epoch}" in pages[found.candidate]
    assert f'embarcadero_sequencer_standby{{candidate="{other}"}} 1' in pages[other]
    assert "embarcadero_epoch " not in pages[other]


def test_an_impossible_hand_over_is_refused_with_the_reason(log: emb.Log, tmp_path: Path) -> None:
    """To the leader, to a missing sequencer, in a cluster that does not run or has no other sequencer."""
    found = standing_by(log)
    with pytest.raises(BadValue, match="is already the leader"):
        hand_over(log.cluster.folder, to=found.candidate)
    with pytest.raises(BadValue, match="sequencer 7 is not a standby"):
        hand_over(log.cluster.folder, to=7)
    with pytest.raises(NotRunning):
        hand_over(ClusterFolder(tmp_path))
    with (
        LocalCluster(brokers=1, log_bytes=32 * MIB, standbys=0) as alone,
        pytest.raises(ClusterError, match="the cluster has no standby sequencer"),
    ):
        hand_over(alone.folder)


def test_no_standby_takes_over_while_the_cluster_stops(tmp_path: Path) -> None:
    """`down`: the leader drains and ends; the other one just leaves. Durable records are there afterwards."""
    patient = load(None, {"sequencer.takeover_after_ms": 60_000})
    with LocalCluster(brokers=1, replicas=1, log_bytes=32 * MIB, data_dir=tmp_path, config=patient) as cluster:
        with emb.connect(cluster.addresses) as log:
            log.create_topic("kept", replicas=1)
            with log.publisher("kept", ack=2) as publisher:
                publisher.send(b"value").result(60)
        elected = sum(path.read_text().count(" elected ") for path in cluster.folder.logs.glob("sequencer*.log"))
    texts = [path.read_text() for path in cluster.folder.logs.glob("sequencer*.log")]
    assert len(texts) == 2
    assert sum(text.count(" elected ") for text in texts) == elected
    assert sum(text.count(" left ") for text in texts) == 1
