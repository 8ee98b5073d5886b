"""Operators' tools on real clusters: verify after kill -9 of everything, status with problems, topic recover."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import embarcadero as emb
from embarcadero.cli.main import app
from embarcadero.node.local import LocalCluster
from embarcadero.types import GapKind
from tests.cli.folders import flip

pytestmark = pytest.mark.system
WAIT_S = 60


def until(what: Callable[[], Any], limit_s: float = WAIT_S) -> Any:
    give_up = time.monotonic() + limit_s
    while not (found := what()):
        assert time.monotonic() < give_up, "it did not happen"
        time.sleep(0.05)
    return found


def run(folder: Path, *arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, [*arguments, "--data-dir", str(folder)])


def publish(cluster: LocalCluster, count: int, **settings: int) -> None:
    """Records 0 to count, acked with ack=2."""
    with emb.connect(cluster.addresses) as log:
        log.create_topic("orders", order=5, **settings)
        with log.publisher("orders", ack=2, batch_bytes=4_096) as publisher:
            for future in [publisher.send(b"%d" % number) for number in range(count)]:
                future.result(timeout=WAIT_S)


def copied(folder: Path) -> bool:
    """Whether both replicas have as much: the second one copies the durable records of the first."""
    logs = [(folder / f"replica-{number}").glob("lane-*/range-*/*.log") for number in range(2)]
    return len({sum(path.stat().st_size for path in found) for found in logs}) == 1


def test_verify_after_a_kill_of_everything(tmp_path: Path) -> None:
    """Refused while it runs; intact after the kill; a flipped bit is found; a start repairs it from the peers."""
    with LocalCluster(brokers=1, replicas=3, data_dir=tmp_path) as cluster:
        publish(cluster, 2_000, replicas=3, durable_on=2)
        refused = run(tmp_path, "verify")
        until(lambda: all(replica.lag == 0 for replica in cluster.report().replicas))
        cluster.kill_all()
    assert refused.exit_code == 1
    assert "embarcadero down" in refused.stderr
    sound = run(tmp_path, "verify")
    assert sound.exit_code == 0, sound.output
    assert "3 replicas, 3 ranges" in sound.stdout

    path = next((tmp_path / "replica-1").glob("lane-*/range-*/*.log"))
    flip(path, path.stat().st_size // 2)
    damaged = run(tmp_path, "verify", "--json")
    assert damaged.exit_code == 1
    wrong = [one for one in json.loads(damaged.stdout)["findings"] if one["severity"] == "error"]
    assert [one["file"] for one in wrong] == [str(path.relative_to(tmp_path))]

    with LocalCluster(brokers=1, replicas=3, data_dir=tmp_path) as cluster:
        with emb.connect(cluster.addresses) as log:
            assert log.read("orders", timeout=WAIT_S).column("value").to_pylist() == [b"%d" % n for n in range(2_000)]
        until(lambda: not cluster.report().degraded)
    repaired = run(tmp_path, "verify")
    assert repaired.exit_code == 0, repaired.output


def test_a_disk_that_never_comes_back(tmp_path: Path) -> None:
    """Durable on 1 of 2, all memory and one disk lost: the topic waits and reports it.

    It continues once the loss is accepted.
    """
    with LocalCluster(brokers=1, replicas=2, data_dir=tmp_path) as cluster:
        publish(cluster, 100, replicas=2, durable_on=1)
        until(lambda: copied(tmp_path))
        cluster.kill_all()
    shutil.rmtree(tmp_path / "replica-1")
    assert run(tmp_path, "verify").exit_code == 1

    with LocalCluster(brokers=1, replicas=2, data_dir=tmp_path) as cluster:
        said = until(lambda: [one for one in cluster.report().degraded if "--accept-loss" in one])
        assert "replica 1 (its disk was replaced)" in said[0]
        shown = run(tmp_path, "status")
        assert shown.exit_code == 0, shown.output
        assert "recovering" in shown.stdout
        assert "--accept-loss" in shown.stderr
        asked = run(tmp_path, "topic", "recover", "orders")
        assert asked.exit_code == 0
        assert "replica 1" in asked.stdout
        assert [lane.state for lane in cluster.report().lanes] == ["recovering"]
        done = run(tmp_path, "topic", "recover", "orders", "--accept-loss", "--yes")
        assert done.exit_code == 0, done.output
        with emb.connect(cluster.addresses) as log:
            with log.publisher("orders", ack=2) as publisher:
                publisher.send(b"again").result(timeout=WAIT_S)
            with log.subscribe("orders", start="earliest") as subscriber:
                seen: list[bytes] = []
                gaps: list[int] = []
                while b"again" not in seen:
                    batch = subscriber.poll(timeout=WAIT_S)
                    assert batch is not None
                    gaps += [batch.gap.kind] if batch.gap else []
                    seen += [] if batch.gap else [record.value for record in batch.records()]
        assert seen == [*(b"%d" % number for number in range(100)), b"again"]
        assert GapKind.LOST in gaps
        assert run(tmp_path, "topic", "recover", "orders").stdout.strip() == "topic orders does not wait for recovery"


def test_status_names_a_stopped_replica(tmp_path: Path) -> None:
    """Its process and its lease exist, but it sends no heartbeats: others continue, and status reports it."""
    with LocalCluster(brokers=1, replicas=2, data_dir=tmp_path) as cluster:
        publish(cluster, 10, replicas=2, durable_on=1)
        pid = cluster.pids()["replica:1"]
        os.kill(pid, signal.SIGSTOP)
        try:
            told = json.loads(run(tmp_path, "status", "--json").stdout)
        finally:
            with suppress(ProcessLookupError):  # it was paused for so long that it was killed
                os.kill(pid, signal.SIGCONT)
        assert any(one.startswith("replica 1: silent") for one in told["cluster"]["degraded"])
        until(lambda: not json.loads(run(tmp_path, "status", "--json").stdout)["cluster"]["degraded"])
