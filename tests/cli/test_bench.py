"""bench: figures of a running cluster, the requested bounds, and nothing left behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner, Result

import embarcadero as emb
from embarcadero.cli.bench import Load, Measurement, Meter
from embarcadero.cli.main import app
from embarcadero.limits import MIB
from embarcadero.node.local import LocalCluster

FIELDS = ["measured", "records", "bytes", "seconds", "mb_s", "records_s", "p50_ms", "p99_ms", "max_ms", "complete"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """One broker with a replica."""
    with LocalCluster(brokers=1, replicas=1, log_bytes=32 * MIB) as cluster:
        yield cluster


@pytest.fixture
def log(cluster: LocalCluster) -> Iterator[emb.Log]:
    with emb.connect(cluster.addresses) as log:
        yield log


def bench(cluster: LocalCluster, *arguments: str) -> Result:
    brokers = ",".join(cluster.addresses)
    return CliRunner().invoke(app, ["bench", "--brokers", brokers, *arguments])


def measured(result: Result) -> dict[str, dict[str, Any]]:
    assert result.exit_code == 0, result.output
    return {one["measured"]: one for one in json.loads(result.stdout)["measured"]}


def test_all_three_are_measured_and_the_topic_is_gone(cluster: LocalCluster, log: emb.Log) -> None:
    """Each has its figures; latencies where there are acks; the fresh topic is deleted."""
    found = measured(bench(cluster, "--records", "2000", "--batch-kib", "64", "--json"))

    assert list(found) == ["publish", "read", "round-trip"]
    assert all(list(one) == FIELDS and one["complete"] and one["seconds"] > 0 for one in found.values())
    assert (found["publish"]["records"], found["publish"]["bytes"]) == (2_000, 2_000_000)
    assert found["read"]["records"] >= 2_000
    assert found["read"]["p50_ms"] is None
    assert found["round-trip"]["records"] == 1_000
    assert 0 < found["round-trip"]["p50_ms"] <= found["round-trip"]["p99_ms"] <= found["round-trip"]["max_ms"]
    assert log.topics() == []


@pytest.mark.parametrize("order", ["none", "local", "total", "strong"])
def test_topics_of_each_order_are_measured(cluster: LocalCluster, order: str) -> None:
    """By several publishers, with acks from the disk."""
    found = measured(
        bench(cluster, "--order", order, "--ack", "2", "--publishers", "3", "--bytes", "256KiB", "--batch-kib", "16",
              "--record-bytes", "100", "--only", "publish", "--only", "read", "--json")
    )  # fmt: skip

    assert list(found) == ["publish", "read"]
    assert found["publish"]["records"] == 2_622
    assert found["publish"]["max_ms"] > 0


def test_a_time_ends_each_measurement(cluster: LocalCluster) -> None:
    """A table shows the results."""
    began = time.monotonic()
    shown = bench(cluster, "--seconds", "0.3")

    assert shown.exit_code == 0
    assert time.monotonic() - began < 30
    lines = shown.stdout.splitlines()
    assert "order 2 (total), ack=1, publishers: 1" in lines[0]
    assert lines[2].split()[:4] == ["measured", "records", "seconds", "MB/s"]
    assert [line.split()[0] for line in lines[3:]] == ["publish", "read", "round-trip"]
    assert max(map(len, lines)) <= 80


def test_a_named_topic_keeps_its_records(cluster: LocalCluster, log: emb.Log) -> None:
    """Also when only reads are measured."""
    log.create_topic("kept")
    measured(bench(cluster, "--topic", "kept", "--records", "10", "--only", "publish", "--json"))
    found = measured(bench(cluster, "--topic", "kept", "--records", "100", "--only", "read", "--json"))

    assert found["read"]["records"] == 100
    assert log.tail("kept").seq == 10
    log.delete_topic("kept")


def test_an_impossible_measurement_is_refused(cluster: LocalCluster, log: emb.Log) -> None:
    """In one line, with a hint, before anything is created."""
    log.create_topic("empty")
    log.create_topic("typed", schema=pa.schema([("price", pa.float64())]))
    for arguments, words in [
        (["--ack", "0"], "--ack 0"),
        (["--record-bytes", "0"], "--record-bytes 0"),
        (["--batch-kib", "9000"], "--batch-kib 9000"),
        (["--publishers", "0"], "--publishers 0"),
        (["--seconds", "0"], "--seconds 0"),
        (["--bytes", "many"], "'many' is not a number"),
        (["--records", "0"], "needs at least one record"),
        (["--only", "read"], "a temporary topic has no records to read"),
        (["--topic", "empty", "--only", "read"], "topic empty has no records to read"),
        (["--topic", "typed"], "topic typed has a schema"),
        (["--topic", "empty", "--order", "strong"], "--order is for the temporary topic"),
        (["--order", "sideways"], "sideways"),
    ]:
        shown = bench(cluster, *arguments)
        assert shown.exit_code == 2, (arguments, shown.output)
        assert words in shown.output
        assert "hint: " in shown.output
    shown = bench(cluster, "--topic", "missing")
    assert (shown.exit_code, "there is no topic 'missing'" in shown.output) == (1, True)
    assert {topic.name for topic in log.topics()} == {"empty", "typed"}
    log.delete_topic("empty")
    log.delete_topic("typed")


def test_a_missing_cluster_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """As by every other verb."""
    shown = CliRunner().invoke(app, ["bench", "--data-dir", str(tmp_path)])

    assert shown.exit_code == 1
    assert "no cluster" in shown.output


def test_ctrl_c_prints_the_results_so_far(cluster: LocalCluster, log: emb.Log) -> None:
    """And the fresh topic is deleted nevertheless."""
    command = [sys.executable, "-m", "embarcadero.cli.main", "bench", "--seconds", "60", "--json"]
    process = subprocess.Popen(
        [*command, "--brokers", ",".join(cluster.addresses)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while not [topic for topic in log.topics() if log.tail(topic.name).seq]:
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    told, remark = process.communicate(timeout=60)

    assert process.returncode == 130, remark
    facts = json.loads(told)
    assert facts["complete"] is False
    assert [one["measured"] for one in facts["measured"]] == ["publish"]
    assert facts["measured"][0]["records"] > 0
    assert "these are the figures so far" in remark
    assert log.topics() == []


def test_a_meter_ends_at_the_first_bound() -> None:
    """Records are handed out up to the bound, then none."""
    meter = Meter(Load(100, 1, 1, 1, records=15, seconds=60))

    assert [meter.claim(10), meter.claim(10), meter.claim(10)] == [10, 5, 0]
    assert Meter(Load(100, 1, 1, 1, records=None, seconds=1e-9)).figures(Measurement.READ).records == 0


def test_a_failure_ends_a_measurement() -> None:
    """The first error is kept."""
    meter = Meter(Load(100, 1, 1, 1, records=None, seconds=60))
    meter.fail(ValueError("one"))
    meter.fail(ValueError("two"))

    assert str(meter.error) == "one"
    assert meter.claim(1) == 0
