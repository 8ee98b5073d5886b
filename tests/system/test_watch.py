"""Monitoring of a real cluster: its metrics match its clients' work, its health matches the injected faults."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import pyarrow as pa
import pytest

import embarcadero as emb
from embarcadero.config import load
from embarcadero.node.background import start
from embarcadero.node.folder import ClusterFolder
from embarcadero.node.report import ClusterReport, report
from embarcadero.node.supervisor import UpOptions
from embarcadero.watch.endpoints import EndpointFiles, NodeEndpoint, parse
from embarcadero.watch.metrics import BY_NAME

pytestmark = pytest.mark.system
RECORDS = 5_000


class Watched:
    """A cluster of two brokers with JSON logs, its client, and its pages."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir, self.folder = data_dir, ClusterFolder(data_dir)
        flags = {"cluster.data_dir": data_dir, "cluster.brokers": 2, "broker.port": 0, "fabric.log_bytes": 32 << 20}
        config = load(flags=flags | {"log.format": "json", "cluster.standbys": 0})
        self.process, _ = start(UpOptions(config=config, stop_with_stdin=True))
        self.log = emb.connect(self.report().addresses)

    def report(self) -> ClusterReport:
        return report(self.folder)

    def place(self, role: str) -> NodeEndpoint:
        return next(place for place in EndpointFiles(self.data_dir).read() if place.roles == role)

    def page(self, role: str, path: str) -> tuple[int, Any]:
        """Status and body; (0, None) without an answer."""
        try:
            with urlopen(f"http://{self.place(role).address}{path}", timeout=10) as answer:
                body = answer.read().decode()
                return answer.status, body if path == "/metrics" else json.loads(body)
        except HTTPError as error:
            with error:
                return error.code, json.loads(error.read())
        except (URLError, ConnectionError):
            return 0, None

    def values(self, role: str) -> dict[str, list[tuple[dict[str, str], float]]]:
        return parse(self.page(role, "/metrics")[1])

    def total(self, name: str, *roles: str, **labels: str) -> float:
        found = [sample for role in roles for sample in self.values(role).get(name, [])]
        return sum(value for has, value in found if labels.items() <= has.items())

    def lines(self) -> list[dict[str, Any]]:
        """All log lines of all processes."""
        return [json.loads(line) for path in self.folder.logs.glob("*.log") for line in path.read_text().splitlines()]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "embarcadero.cli.main", *arguments, "--data-dir", str(self.data_dir)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    def json(self, *arguments: str) -> Any:
        done = self.run(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def close(self) -> None:
        self.log.close()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    made = Watched(tmp_path_factory.mktemp("watched") / "cluster")
    yield made
    made.close()


@pytest.fixture(scope="module")
def traffic(cluster: Watched) -> dict[str, Any]:
    """An order-5 topic with records that were published, and all of it read."""
    cluster.log.create_topic("orders", order=5)
    with cluster.log.publisher("orders", batch_bytes=20_000) as publisher:
        futures = [publisher.send(b"value %d" % n, key=b"k") for n in range(RECORDS)]
        positions = [future.result(30) for future in futures]
    read = []
    with cluster.log.subscribe("orders") as subscriber:
        while sum(batch.count for batch in read) < RECORDS:
            batch = subscriber.poll(30)
            assert batch is not None
            read.append(batch)
    return {"positions": positions, "batches": read}


@pytest.fixture(scope="module")
def loose(cluster: Watched) -> dict[str, Any]:
    """An order-0 topic with records that were published, and all of it read."""
    cluster.log.create_topic("loose", order=0)
    with cluster.log.publisher("loose", batch_bytes=2_000) as publisher:
        positions = [future.result(30) for future in [publisher.send(b"loose %d" % n) for n in range(RECORDS)]]
    read = []
    with cluster.log.subscribe("loose") as subscriber:
        while sum(batch.count for batch in read) < RECORDS:
            batch = subscriber.poll(30)
            assert batch is not None
            read.append(batch)
    return {"positions": positions, "batches": read}


def until(what: Callable[[], Any], limit_s: float = 60.0) -> Any:
    give_up = time.monotonic() + limit_s
    while not (found := what()):
        assert time.monotonic() < give_up, "it did not happen"
        time.sleep(0.05)
    return found


BROKERS = ("broker:0", "broker:1")
LEAVING = {"ready": False, "roles": {"broker-1.1": "leaving"}}


def test_counters_match_the_clients_work(cluster: Watched, traffic: dict[str, Any]) -> None:
    """Batches, records and bytes in and out, outcomes and frontiers are those of the publisher and the reader."""
    batches = len({position.index for position in traffic["positions"]})
    size = sum(batch.to_arrow().nbytes for batch in traffic["batches"])
    of_topic = {"topic": "orders"}

    assert cluster.total("embarcadero_publish_records_total", *BROKERS, **of_topic) == RECORDS
    assert cluster.total("embarcadero_publish_batches_total", *BROKERS, **of_topic) == batches
    assert cluster.total("embarcadero_subscribe_records_total", *BROKERS, **of_topic) == RECORDS
    assert cluster.total("embarcadero_subscribe_batches_total", *BROKERS, **of_topic) == batches
    came, went = (
        cluster.total(f"embarcadero_{way}_bytes_total", *BROKERS, **of_topic) for way in ("publish", "subscribe")
    )
    assert came == went > size * 0.9
    assert cluster.total("embarcadero_outcomes_total", *BROKERS, outcome="ORDERED") == batches
    assert cluster.total("embarcadero_publish_latency_seconds_count", *BROKERS) == batches
    assert cluster.total("embarcadero_ordered_seq", "sequencer", **of_topic) == RECORDS
    assert cluster.total("embarcadero_ordered_index", "sequencer", **of_topic) == cluster.log.tail("orders").index
    assert cluster.total("embarcadero_sessions_opened_total", "sequencer", **of_topic) == 1
    assert cluster.total("embarcadero_unresolved_entries", *BROKERS) == 0


def test_topics_of_order_0_are_watched_too(cluster: Watched, loose: dict[str, Any]) -> None:
    """Traffic, outcomes and the frontiers of all lanes; top adds them up; inspect requires the lane."""
    batches, of_topic = len(loose["batches"]), {"topic": "loose"}
    assert {batch.broker for batch in loose["batches"]} == {0, 1}
    for way in ("publish", "subscribe"):
        assert cluster.total(f"embarcadero_{way}_records_total", *BROKERS, **of_topic) == RECORDS
        assert cluster.total(f"embarcadero_{way}_batches_total", *BROKERS, **of_topic) == batches
    assert cluster.total("embarcadero_lane_index", *BROKERS, **of_topic) == batches
    assert cluster.total("embarcadero_lane_seq", *BROKERS, **of_topic) == RECORDS
    acked = cluster.total("embarcadero_outcomes_total", *BROKERS, outcome="ORDERED")
    assert acked == cluster.total("embarcadero_publish_latency_seconds_count", *BROKERS) >= batches
    assert cluster.total("embarcadero_unresolved_entries", *BROKERS) == 0

    def seen() -> dict[str, Any]:
        return next(topic for topic in cluster.json("top", "--once")["topics"] if topic["topic"] == "loose")

    with cluster.log.subscribe("loose", start="latest"):  # a closed one may never have fetched after its last answer
        until(lambda: seen()["lag"] == 0)
    line = seen()
    assert (line["order"], line["ordered_seq"], line["ordered_index"]) == (0, RECORDS, batches)

    batch = loose["batches"][-1]
    where = ["loose", "--seq", str(batch.seq)]
    found = cluster.json("inspect", "batch", *where, "--lane", str(batch.lane))
    assert (found["lane"], found["entry"]["index"], found["payload"]["state"]) == (batch.lane, batch.index, "readable")
    assert "--lane" in cluster.run("inspect", "batch", *where).stderr
    options = ["--session", str(batch.session), "--sequence", str(batch.session_seq)]
    way_of = cluster.json("inspect", "record", "loose", *options)
    place = f"lane {batch.lane} at index {batch.index}, seq {batch.seq}"
    assert way_of["verdict"] == f"stored in {place}; payload readable"


def test_records_not_in_a_table_yet_are_counted(cluster: Watched, traffic: dict[str, Any]) -> None:
    """A topic whose table was opened, with nothing in it: its lag is all durable records.

    Topics without a table have none.
    """
    log, lag = cluster.log, "embarcadero_tier_lag_batches"
    assert not any(cluster.total(lag, broker) for broker in BROKERS)
    log.open_tier("orders", "watch", table_id="1", warehouse="file:///nowhere", table="embarcadero.orders")
    lane, all_of_it = str(log.describe("orders").lane), log.tail("orders").durable_index

    assert all_of_it
    counted = [cluster.total("embarcadero_durable_index", broker, lane=lane) for broker in BROKERS]
    assert [cluster.total(lag, broker, lane=lane) for broker in BROKERS] == counted
    assert max(counted) == all_of_it  # a broker counts on request


def test_every_metric_of_the_catalog_is_served(
    cluster: Watched, traffic: dict[str, Any], loose: dict[str, Any]
) -> None:
    """And nothing else. The broker without readers has no reader's metrics; together they have all."""
    served = set()
    for role in (*BROKERS, "sequencer", "replica:0"):
        text = cluster.page(role, "/metrics")[1]
        served |= {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}

    assert served == BY_NAME.keys()


def test_every_process_is_discovered(cluster: Watched) -> None:
    """In the form of Prometheus: each group has targets and labels, and each target serves metrics."""
    for role in ("sequencer", "broker:1", "replica:0"):
        status, groups = cluster.page(role, "/targets")
        assert status == 200
        assert {group["labels"]["node"] for group in groups} == {*BROKERS, "sequencer", "replica:0"}
        for group in groups:
            (target,) = group["targets"]
            assert target == cluster.place(group["labels"]["node"]).address


def test_every_process_has_its_name(cluster: Watched) -> None:
    """In the list of processes, both the short name and the whole command line."""
    info = cluster.folder.require_running()
    names = {node.roles: Path(f"/proc/{node.pid}/cmdline").read_bytes().rstrip(b"\0").decode() for node in info.nodes}
    assert names == {
        "sequencer": "embarcadero sequencer", "broker:0": "embarcadero broker 0", "broker:1": "embarcadero broker 1",
        "replica:0": "embarcadero replica 0",
    }  # fmt: skip
    assert Path(f"/proc/{info.pid_of('broker:1')}/comm").read_text() == "emb-broker:1\n"
    supervisor = Path(f"/proc/{info.supervisor}/cmdline").read_bytes().decode()
    assert supervisor.startswith("embarcadero supervisor /")


def test_status_and_top_work_from_another_machine(
    cluster: Watched, traffic: dict[str, Any], tmp_path: Path
) -> None:
    """With only the address of a broker."""
    address = cluster.report().addresses[0]

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "embarcadero.cli.main", *arguments, "--brokers", address]
        environment = {**os.environ, "EMBARCADERO_DATA_DIR": str(tmp_path / "nothing")}
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    told = json.loads(run("status", "--json"))
    assert [broker["broker"] for broker in told["brokers"]] == [0, 1]
    assert {node["roles"] for node in told["nodes"]} == {*BROKERS, "sequencer", "replica:0"}
    assert [(topic["name"], topic["seq"]) for topic in told["topics"] if topic["name"] == "orders"] == [
        ("orders", RECORDS)
    ]
    seen = json.loads(run("top", "--once", "--json", "--interval", "0.1"))
    assert [(broker["broker"], broker["state"]) for broker in seen["brokers"]] == [(0, "live"), (1, "live")]
    assert next(topic["ordered_seq"] for topic in seen["topics"] if topic["topic"] == "orders") == RECORDS
    assert "broker 1" in run("status")


def test_missing_pages_are_refused(cluster: Watched) -> None:
    """Unknown paths and methods get a small JSON answer; malformed requests get none, and the port keeps working."""
    assert cluster.page("sequencer", "/secrets")[0] == 404
    place = cluster.place("sequencer")
    import socket

    for nonsense, answer in ((b"POST /metrics HTTP/1.1\r\n\r\n", b"HTTP/1.1 405"), (b"\0" * 20_000, b"")):
        with socket.create_connection((place.host, place.port), timeout=10) as peer:
            peer.sendall(nonsense)
            peer.shutdown(socket.SHUT_WR)
            try:
                assert peer.recv(100).startswith(answer)
            except ConnectionResetError:
                assert not answer
    assert cluster.page("sequencer", "/health")[0] == 200


def test_top_shows_the_cluster_once(cluster: Watched, traffic: dict[str, Any]) -> None:
    """--once --json is one object with brokers, topics, the sequencer and latencies; without --json it is a picture."""
    seen = cluster.json("top", "--once", "--interval", "0.1")

    assert [(broker["broker"], broker["state"]) for broker in seen["brokers"]] == [(0, "live"), (1, "live")]
    orders = next(topic for topic in seen["topics"] if topic["topic"] == "orders")
    assert (orders["order"], orders["ordered_seq"]) == (5, RECORDS)
    assert (seen["sequencer"]["state"], seen["sequencer"]["epoch"]) == ("live", 1)
    assert [latency["what"] for latency in seen["latencies"]] == ["publish to ack", "append to reader", "round"]
    assert "orders" in cluster.run("top", "--once", "--interval", "0.1").stdout


def test_top_stays_until_ctrl_c(cluster: Watched) -> None:
    """On a terminal it redraws repeatedly, and SIGINT ends it with 0."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "embarcadero.cli.main", "top", "--interval", "0.1", "--data-dir"]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    process = subprocess.Popen(
        [*command, str(cluster.data_dir)], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    seen = b""
    while seen.count(b"brokers") < 3:
        seen += os.read(ours, 65_536)
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(OSError):  # output of a terminal at its end
        while os.read(ours, 65_536):
            pass
    os.close(ours)

    assert process.wait(60) == 0
    assert b"Traceback" not in seen


def test_inspect_decodes_a_live_cluster(cluster: Watched, traffic: dict[str, Any]) -> None:
    """Regions, the batch of a seq, and one record through all stages; missing items are typed errors."""
    batch = traffic["batches"][-1]
    names = {region["name"] for region in cluster.json("inspect", "regions")}
    assert {"epochs", "epoch-1/held", "broker-0.1/pending"} <= names
    assert cluster.json("inspect", "region", "epochs")["rows"] == [{"epoch": 1, "open": True, "started": True}]

    found = cluster.json("inspect", "batch", "orders", "--seq", str(RECORDS - 1))
    assert (found["entry"]["index"], found["entry"]["count"]) == (batch.index, batch.count)
    assert (found["payload"]["state"], found["payload"]["crc_fits"]) == ("readable", True)
    assert found["payload"]["records"][0]["value"] == f"value {batch.seq}"

    options = ["--session", str(batch.session), "--sequence"]
    way = cluster.json("inspect", "record", "orders", *options, str(batch.session_seq))
    assert [entry["taken"] for entry in way["pending"]] == [True]
    assert [entry["index"] for entry in way["ordered"]] == [batch.index]
    assert [(result["outcome"], result["acked"]) for result in way["results"]] == [("ORDERED", True)]
    assert way["verdict"] == f"stored at index {batch.index}, seq {batch.seq}; acked; payload readable"
    assert cluster.json("inspect", "record", "orders", *options, "99999")["verdict"].startswith("no trace")

    cluster.log.create_topic("typed", schema=pa.schema([("city", pa.string()), ("sold", pa.int64())]))
    with cluster.log.publisher("typed") as publisher:
        publisher.publish(pa.table({"city": ["Recife"], "sold": [3]})).result(10)
    typed = cluster.json("inspect", "batch", "typed", "--seq", "0")["payload"]
    assert (typed["state"], typed["records"]) == ("readable", [{"city": "Recife", "sold": 3}])

    beyond = ["batch", "orders", "--seq", "77777"]
    for wrong, says in ((["region", "no-such"], "cannot read region"), (beyond, "not in the order ring")):
        done = cluster.run("inspect", *wrong)
        assert (done.returncode, says in done.stderr) == (1, True), done.stderr


def test_a_paused_sequencer_makes_brokers_unready(cluster: Watched) -> None:
    """They are healthy all the time, and ready again when it continues."""
    assert [cluster.page(role, "/ready")[0] for role in (*BROKERS, "sequencer")] == [200] * 3
    pid = cluster.report().sequencer.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        status, body = until(lambda: (found := cluster.page("broker:0", "/ready"))[0] == 503 and found)
        assert (status, body["ready"]) == (503, False)
        assert "silent" in body["roles"]["broker-0.1"]
        assert cluster.page("broker:0", "/health")[0] == 200
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: cluster.page("broker:0", "/ready")[0] == 200)


def test_a_broker_that_leaves_settles_its_batches(cluster: Watched, loose: dict[str, Any]) -> None:
    """SIGTERM with batches in flight: they are acked before it disconnects its clients, which use the other brokers.

    Its lanes in topics of order 0 end where their last batch does.
    """
    cluster.log.create_topic("load", order=5)
    leaving, sequencer = cluster.report().brokers[1].pid, cluster.report().sequencer.pid
    with cluster.log.publisher("load", batch_bytes=2_000) as publisher:
        futures = [publisher.send(b"%d" % n) for n in range(500)]
        publisher.flush()
        os.kill(sequencer, signal.SIGSTOP)  # nothing gets an outcome now
        try:
            futures += [publisher.send(b"%d" % n) for n in range(500, 1_500)]
            until(lambda: cluster.total("embarcadero_unresolved_entries", "broker:1") > 2)
            os.kill(leaving, signal.SIGTERM)
            until(lambda: cluster.page("broker:1", "/ready") == (503, LEAVING))
        finally:
            os.kill(sequencer, signal.SIGCONT)
        futures += [publisher.send(b"%d" % n) for n in range(1_500, 3_000)]
        seqs = [future.result(60).seq for future in futures]
    values = cluster.log.read("load").column("value").to_pylist()
    said = lambda: [line for line in cluster.lines() if (line["role"], line["event"]) == ("broker-1.1", "left")]  # noqa: E731
    (left,) = until(said)  # it disconnects its clients first

    assert seqs == list(range(3_000))
    assert values == [b"%d" % n for n in range(3_000)]
    assert (left["settled"] > 2, left["unsettled"], left["level"]) == (True, 0, "info")
    assert cluster.total("embarcadero_duplicates_rejected_total", *BROKERS) == 0  # no ack was lost, so none was resent
    until(lambda: cluster.report().brokers[1].incarnation == 2)
    lanes = until(lambda: [lane for lane in cluster.log.describe("loose").lanes if not lane.open])
    told = sum(batch.count for batch in loose["batches"] if batch.broker == 1)
    assert [(lane.broker, lane.incarnation, lane.end_seq) for lane in lanes] == [(1, 1, told)]
    assert cluster.log.read("loose").num_rows == RECORDS


def test_a_killed_broker_is_visible(cluster: Watched) -> None:
    """Its port is gone with it; the next incarnation has a page of its own, and the sequencer counted the failure."""
    before = cluster.place("broker:0")
    closed = cluster.total("embarcadero_broker_failures_total", "sequencer")
    os.kill(before.pid, signal.SIGKILL)

    until(lambda: cluster.place("broker:0").pid != before.pid)
    until(lambda: cluster.page("broker:0", "/ready") == (200, {"ready": True, "roles": {"broker-0.2": "ok"}}))
    assert cluster.total("embarcadero_broker_failures_total", "sequencer") == closed + 1
    assert cluster.total("embarcadero_publish_records_total", "broker:0") == 0


def test_a_takeover_is_counted(cluster: Watched) -> None:
    """After kill -9 of the sequencer the next one serves its epoch, and brokers follow it."""
    os.kill(cluster.report().sequencer.pid, signal.SIGKILL)
    until(lambda: cluster.page("sequencer", "/ready")[1] == {"ready": True, "roles": {"sequencer-2": "ok"}})

    assert cluster.total("embarcadero_sequencer_failovers_total", "sequencer") == 1
    until(lambda: cluster.total("embarcadero_followed_epoch", *BROKERS) == 4)


def test_a_restarted_process_is_discovered(cluster: Watched) -> None:
    """At its new port: the killed fork is gone from the document."""
    before = cluster.place("sequencer")
    os.kill(before.pid, signal.SIGKILL)
    until(lambda: cluster.place("sequencer").pid != before.pid)
    until(lambda: cluster.page("sequencer", "/health")[0] == 200)
    groups = cluster.page("broker:0", "/targets")[1]
    assert {group["labels"]["node"]: group["targets"] for group in groups}["sequencer"] == [
        cluster.place("sequencer").address
    ]


def test_a_process_that_stays_dead_is_still_a_target(tmp_path: Path) -> None:
    """Otherwise Prometheus would not know that it is down; only a clean stop removes it."""
    watched = Watched(tmp_path / "cluster")
    try:
        supervisor = watched.folder.require_running().supervisor
        os.kill(supervisor, signal.SIGSTOP)  # it restarts nothing
        try:
            killed, ended = watched.place("broker:1"), watched.place("replica:0")
            os.kill(killed.pid, signal.SIGKILL)
            shutil.rmtree(watched.folder.replica(0))  # its replica ends by itself
            until(lambda: not killed.running and watched.page("replica:0", "/health")[0] == 0)
            found = {group["labels"]["node"]: group["targets"] for group in watched.page("sequencer", "/targets")[1]}
            assert (found["broker:1"], found["replica:0"]) == ([killed.address], [ended.address])
        finally:
            os.kill(supervisor, signal.SIGCONT)
        until(lambda: watched.page("broker:1", "/health")[0] == watched.page("replica:0", "/health")[0] == 200)
    finally:
        watched.close()


def test_logs_record_the_events(cluster: Watched) -> None:
    """Every line is an object with time, level, role and event; the events above are there, and no payloads are."""
    lines = cluster.lines()
    events = {(line["role"], line["event"]) for line in lines}

    assert all(list(line)[:4] == ["time", "level", "role", "event"] for line in lines)
    assert {
        ("broker-0.1", "listening"), ("broker-0.1", "follows epoch"), ("broker-1.1", "left"),
        ("sequencer-1", "broker closed"), ("sequencer", "epoch started"),
    } <= events  # fmt: skip
    assert [line["reason"] for line in lines if line["event"] == "node ended"][-1] == "killed by SIGKILL"
    assert not any("value 1" in json.dumps(line) for line in lines)


def test_with_json_logs_all_output_is_json(tmp_path: Path) -> None:
    """Also the output of a foreground `up` when it is ready, and the reason if it did not start."""
    options = ["--log-format", "json", "--port", "0", "--brokers", "1", "--log-mib", "32"]
    command = [sys.executable, "-m", "embarcadero.cli.main", "up", *options, "--data-dir", str(tmp_path / "cluster")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        ready = first.stdout.readline()
        second = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        first.send_signal(signal.SIGINT)
        printed, logged = first.communicate(timeout=120)

    assert json.loads(ready)["brokers"]
    assert (first.returncode, second.returncode, printed + second.stdout) == (0, 1, "")
    lines = [json.loads(line) for line in (logged + second.stderr).splitlines()]
    assert any("a cluster is already running in" in line["event"] for line in lines)


def test_invalid_options_are_refused_in_json(tmp_path: Path) -> None:
    """With JSON logs; the exit code shows an error of the caller."""
    options = ["--log-format", "json", "--port", "9100", "--metrics-port", "9100"]
    command = [sys.executable, "-m", "embarcadero.cli.main", "up", *options, "--data-dir", str(tmp_path / "cluster")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    (line,) = [json.loads(line) for line in done.stderr.splitlines()]
    assert (done.returncode, done.stdout, line["level"]) == (2, "", "error")
    assert "can't share ports" in line["event"]


def test_a_dead_cluster_can_be_inspected_and_a_stopped_one_is_reported(tmp_path: Path) -> None:
    """After kill -9 of everything the fabric can still be inspected; after `down` it is gone."""
    dead = Watched(tmp_path / "dead")
    try:
        dead.log.create_topic("t")
        with dead.log.publisher("t") as publisher:
            publisher.send(b"last words").result(30)
    finally:
        dead.log.close()
        dead.process.kill()
        dead.process.communicate()
    until(lambda: not any(place.running for place in EndpointFiles(dead.data_dir).read()))

    found = dead.json("inspect", "batch", "t", "--seq", "0")
    assert found["payload"]["records"][0]["value"] == "last words"
    assert dead.run("top", "--once").returncode == 1
    assert dead.run("down").returncode == 1
    gone = dead.run("inspect", "regions")
    assert (gone.returncode, "there is no fabric" in gone.stderr) == (1, True)
