"""`up --tier`: a process that tiers all topics with replicas, restarted when it dies; and `pipeline tier`."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import embarcadero as emb
from embarcadero.cli.main import app
from embarcadero.client.api.sync_log import Log
from embarcadero.config import Config, load
from embarcadero.node.folder import ClusterFolder
from embarcadero.node.local import LocalCluster
from embarcadero.tier.storage import TierSettings
from tests.tier.truth import Truth


@pytest.fixture(scope="module")
def config() -> Config:
    return load(
        None, {
            "tier.enabled": True, "tier.hot_retention_s": 0, "tier.interval_s": 0.2, "tier.file_bytes": 65_536,
            "tier.engine": "process",
        },
    )  # fmt: skip


@pytest.fixture(scope="module")
def cluster(config: Config) -> Iterator[LocalCluster]:
    with LocalCluster(1, config=config, replicas=1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def tiered(cluster: LocalCluster) -> Iterator[Log]:
    with emb.connect(cluster.addresses) as log:
        yield log


def until(done: Callable[[], Any]) -> None:
    give_up = time.monotonic() + 60
    while not done():
        assert time.monotonic() < give_up, "it took too long"
        time.sleep(0.05)


def frontier(log: Log, topic: str) -> int:
    about = log.describe(topic)
    return 0 if about.tier is None else about.tier.frontier(about.lane)[1]


def test_up_tiers_all_topics(cluster: LocalCluster, tiered: Log, config: Config) -> None:
    """Later topics as well; killed, it is restarted and continues; the log is one, wherever it is stored."""
    settings = TierSettings.of(config, cluster.data_dir)
    topics = []
    for name in ("first", "second"):
        tiered.create_topic(name, order=5)
        topics.append(Truth(tiered, name, settings))
        topics[-1].publish(300)
    until(lambda: all(frontier(tiered, truth.topic) == 300 for truth in topics))
    info = ClusterFolder(cluster.data_dir).require_running()
    os.kill(info.pid_of("tier"), signal.SIGKILL)
    for truth in topics:
        truth.publish(300)
    until(lambda: all(frontier(tiered, truth.topic) == 600 for truth in topics))
    for truth in topics:
        assert truth.problems() == []
        until(lambda truth=truth: tiered.tail(truth.topic).hot_seq == 600)
        assert tiered.read(truth.topic).column("_seq").to_pylist() == list(range(600))
    epochs = [tiered.describe(truth.topic).tier.epoch for truth in topics]  # type: ignore[union-attr]
    assert all(epoch >= 2 for epoch in epochs)


def test_status_reports_the_progress_of_the_table(cluster: LocalCluster, tiered: Log) -> None:
    """In words and as JSON: the table, its frontier, and the number of records that are not in it yet."""
    tiered.create_topic("seen", order=5)
    Truth(tiered, "seen", TierSettings("", {})).publish(50)
    until(lambda: frontier(tiered, "seen") == 50)
    shown = CliRunner().invoke(app, ["status", "--data-dir", str(cluster.data_dir), "--json"])
    topic = next(each for each in json.loads(shown.stdout)["topics"] if each["name"] == "seen")
    assert topic["tier"]["table"] == "embarcadero.seen"
    assert (topic["tier"]["seq"], topic["tier"]["lag"]) == (50, 0)
    words = CliRunner().invoke(app, ["status", "--data-dir", str(cluster.data_dir)]).stdout
    assert "tables" in words
    assert "holder" in words
    assert topic["tier"]["engine"] == "process"
    assert "engine" in words


def test_pipeline_tier(log: Log, tmp_path: Path) -> None:
    """Once, without Spark, to a warehouse of its own; a second run that finds nothing to do; and refused options."""
    log.create_topic("piped", order=5)
    config = tmp_path / "embarcadero.yaml"
    config.write_text(
        f"tier:\n  warehouse: file://{tmp_path}/w\n  hot_retention_s: 0\n"
        f"  properties: ['type=sql', 'uri=sqlite:///{tmp_path}/c.db']\n"
    )
    settings = TierSettings(f"file://{tmp_path}/w", {"type": "sql", "uri": f"sqlite:///{tmp_path}/c.db"})
    truth = Truth(log, "piped", settings)
    truth.publish(100)
    arguments = [
        "pipeline",
        "tier",
        "--topic",
        "piped",
        "--no-spark",
        "--brokers",
        log.address,
        "--config",
        str(config),
    ]
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    assert (json.loads(done.stdout)["rows"], json.loads(done.stdout)["table"]) == (100, "embarcadero.piped")
    assert truth.problems() == []
    assert "0 records in 0 new files" in CliRunner().invoke(app, arguments).stdout
    arguments[3] = "nobody"
    assert CliRunner().invoke(app, arguments).exit_code == 1
