"""The command line against a real cluster: processes, signals, and the state afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from embarcadero.errors import AlreadyRunning, ClusterError
from embarcadero.limits import MIB
from embarcadero.node.folder import ClusterFolder
from embarcadero.node.local import LocalCluster

pytestmark = pytest.mark.system

UP = ["up", "--detach", "--port", "0", "--brokers", "2", "--log-mib", "32", "--json"]


class Shell:
    """Runs `embarcadero` as a user would, on one folder."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir
        self._environment = {k: v for k, v in os.environ.items() if not k.startswith("EMBARCADERO_")}
        self._environment["EMBARCADERO_DATA_DIR"] = str(data_dir)
        self._environment["EMBARCADERO_SEQUENCER_TAKEOVER_AFTER_MS"] = "60000"  # no new epochs on a slow machine

    def try_run(self, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "embarcadero.cli.main", *arguments]
        return subprocess.run(
            command, input=stdin, capture_output=True, text=True, env=self._environment, timeout=120, check=False
        )

    def run(self, *arguments: str, stdin: str = "") -> str:
        done = self.try_run(*arguments, stdin=stdin)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def json(self, *arguments: str, stdin: str = "") -> Any:
        return json.loads(self.run(*arguments, "--json", stdin=stdin))


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """A user's shell; everything that it started is stopped afterwards."""
    made = Shell(tmp_path / "cluster")
    yield made
    made.try_run("down")


def running(pid: int) -> bool:
    """Whether a process runs (a zombie process does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(what: Callable[[], Any]) -> Any:
    """Poll until the condition is true. The test's own timeout ends an endless wait."""
    while not (answer := what()):
        time.sleep(0.02)
    return answer


def pids_of(started: dict[str, Any]) -> list[int]:
    brokers = [broker["pid"] for broker in started["brokers"]]
    return [*brokers, started["sequencer"]["pid"], started["supervisor"]["pid"]]


def test_a_first_session(shell: Shell) -> None:
    """up, create, publish, tail, status, down: records are read in order, and nothing is left running."""
    started = json.loads(shell.run(*UP))
    assert [broker["id"] for broker in started["brokers"]] == [0, 1]
    assert started["data_dir"] == str(shell.data_dir)
    assert all(running(pid) for pid in pids_of(started))
    assert len(set(pids_of(started))) == 4

    assert shell.json("topic", "create", "orders", "--order", "5")["order"] == 5
    assert [topic["name"] for topic in shell.json("topic", "list")] == ["orders"]
    published = shell.json("publish", "orders", "--key-separator", ":", stdin="a:1\nb:2\nno key\n")
    assert (published["records"], published["last"]["seq"]) == (3, 2)

    records = [json.loads(line) for line in shell.run("tail", "orders", "--format", "json").splitlines()]
    assert [(r["seq"], r["key"], r["value"]) for r in records] == [(0, "a", "1"), (1, "b", "2"), (2, None, "no key")]
    assert shell.run("tail", "orders", "--from", "1", "--limit", "1") == "2\n"
    assert shell.run("tail", "orders", "--from", "latest") == ""
    assert shell.json("topic", "describe", "orders")["next_seq"] == 3

    status = shell.json("status")
    topics = [(topic["name"], topic["order"], topic["partitions"], topic["seq"]) for topic in status["topics"]]
    assert topics == [("orders", 5, 1, 3)]
    assert status["cluster"]["sequencer"]["epoch"] == 1
    assert "orders" in shell.run("status")
    shell.run("topic", "delete", "orders", "--yes")
    assert shell.json("topic", "list") == []

    down = shell.json("down")
    assert (down["killed"], down["unsettled"]) == ([], 0)
    assert not any(running(pid) for pid in pids_of(started))
    assert not Path(started["fabric"]).exists()
    assert shell.try_run("status").returncode == 1


def test_errors_of_the_cluster_reach_the_user(shell: Shell) -> None:
    """Refusals of a broker are one line with a hint, like errors found before anything was sent."""
    shell.run(*UP)
    shell.run("topic", "create", "orders")
    for arguments, code, says in [
        (["topic", "create", "orders"], 1, "topic 'orders' exists"),
        (["topic", "create", "bad name"], 2, "A-Z a-z 0-9"),
        (["topic", "create", "t", "--order", "3"], 2, "order '3' does not exist"),
        (["topic", "create", "t", "--replicas", "3"], 2, "3 replicas, and 1 are live"),
        (["topic", "describe", "nothing"], 1, "no topic 'nothing'"),
        (["publish", "nothing"], 1, "no topic 'nothing'"),
        (["tail", "nothing"], 1, "no topic 'nothing'"),
    ]:
        done = shell.try_run(*arguments, stdin="line\n")
        assert (done.returncode, done.stderr.count("error:")) == (code, 1), done.stderr
        assert says in done.stderr
        assert "Traceback" not in done.stderr


def test_killed_roles_are_restarted(shell: Shell) -> None:
    """After kill -9 a broker returns as a new incarnation and a sequencer in a new epoch; no record is lost."""
    started = json.loads(shell.run(*UP))
    shell.run("topic", "create", "numbers", "--order", "5")
    shell.run("publish", "numbers", stdin="".join(f"{n}\n" for n in range(1000)))

    os.kill(started["brokers"][0]["pid"], signal.SIGKILL)
    shell.run("publish", "numbers", stdin="".join(f"{n}\n" for n in range(1000, 2000)))

    def reborn() -> Any:
        first = shell.json("status")["cluster"]["brokers"][0]
        return first if (first["incarnation"], first["state"]) == (2, "live") else None

    again = until(reborn)
    assert again["pid"] != started["brokers"][0]["pid"]
    assert again["address"] == started["brokers"][0]["address"]

    os.kill(started["sequencer"]["pid"], signal.SIGKILL)
    shell.run("publish", "numbers", stdin="".join(f"{n}\n" for n in range(2000, 3000)))
    assert shell.json("status")["cluster"]["sequencer"]["epoch"] == 2
    assert shell.run("tail", "numbers").split() == [str(n) for n in range(3000)]


def test_a_stuck_process_does_not_keep_the_cluster_up(shell: Shell) -> None:
    """`down` also ends a node that does not react (SIGSTOP)."""
    started = json.loads(shell.run(*UP))
    stuck = started["brokers"][1]["pid"]
    os.kill(stuck, signal.SIGSTOP)
    assert shell.json("down")["killed"] == ["broker:1"]
    assert not any(running(pid) for pid in pids_of(started))


def test_a_killed_supervisor_takes_all_with_it(shell: Shell) -> None:
    """After kill -9 of the supervisor its nodes are gone; the next `up` has the topics and the durable records."""
    started = json.loads(shell.run(*UP))
    shell.run("topic", "create", "orders", "--partitions", "4")
    shell.run("publish", "orders", "--ack", "2", stdin="old\n")
    os.kill(started["supervisor"]["pid"], signal.SIGKILL)
    until(lambda: not any(running(pid) for pid in pids_of(started)))
    assert shell.try_run("status").returncode == 1

    again = json.loads(shell.run(*UP))
    assert set(pids_of(again)).isdisjoint(pids_of(started))
    assert shell.json("topic", "describe", "orders")["partitions"] == 4
    shell.run("publish", "orders", stdin="new\n")
    assert shell.run("tail", "orders") == "old\nnew\n"
    assert shell.json("status")["cluster"]["cluster"] == started["cluster"]


def test_one_process_hosts_everything(shell: Shell) -> None:
    """With --processes one all roles share a process; killed, all return in the next incarnation and epoch."""
    started = json.loads(shell.run(*UP, "--processes", "one"))
    assert len(set(pids_of(started))) == 2
    shell.run("topic", "create", "t")
    shell.run("publish", "t", stdin="before\n")
    os.kill(started["sequencer"]["pid"], signal.SIGKILL)
    shell.run("publish", "t", stdin="after\n")
    assert shell.run("tail", "t") == "before\nafter\n"
    assert shell.json("status")["cluster"]["sequencer"]["epoch"] == 2


def test_up_in_the_foreground_stops_with_ctrl_c(shell: Shell) -> None:
    """`up` prints when it is ready, runs until SIGINT, and ends with 0."""
    arguments = [argument for argument in UP if argument != "--detach"]
    command = [sys.executable, "-m", "embarcadero.cli.main", *arguments, "--data-dir", str(shell.data_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        started = json.loads(process.stdout.readline())
        assert started["supervisor"]["pid"] == process.pid
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0
    assert not any(running(pid) for pid in pids_of(started))


# --- LocalCluster -----------------------------------------------------------------------------------------------------


def test_a_local_cluster_leaves_nothing_behind() -> None:
    """After the block its processes, its fabric and its folder are gone."""
    with LocalCluster(brokers=2, log_bytes=32 * MIB) as cluster:
        pids, fabric = cluster.pids(), Path(cluster.report().fabric)
        assert sorted(pids) == ["broker:0", "broker:1", "sequencer", "sequencer:1", "supervisor"]
        assert all(running(pid) for pid in pids.values())
        assert len(cluster.addresses) == 2
        assert fabric.is_dir()
        with pytest.raises(ClusterError, match="no broker:7"):
            cluster.kill_broker(7)
    assert not any(running(pid) for pid in pids.values())
    assert not fabric.exists()
    assert not cluster.data_dir.exists()
    cluster.close()


def test_a_local_cluster_restarts_killed_roles() -> None:
    """kill_broker and kill_sequencer kill; both roles are restarted with other process ids."""
    with LocalCluster(brokers=1, log_bytes=32 * MIB) as cluster:
        broker, sequencer = cluster.kill_broker(0), cluster.kill_sequencer()
        until(lambda: cluster.pids()["broker:0"] not in {0, broker})
        until(lambda: cluster.pids()["sequencer"] not in {0, sequencer})
        until(lambda: cluster.report().sequencer.epoch >= 2)
        until(lambda: [(b.incarnation, b.state) for b in cluster.report().brokers] == [(2, "live")])


def test_a_local_cluster_keeps_a_given_folder(tmp_path: Path) -> None:
    """With data_dir the folder stays, a second cluster in it is refused while the first runs."""
    with LocalCluster(brokers=1, data_dir=tmp_path / "mine", log_bytes=32 * MIB):
        with pytest.raises(AlreadyRunning):
            LocalCluster(brokers=1, data_dir=tmp_path / "mine", log_bytes=32 * MIB)
        assert ClusterFolder(tmp_path / "mine").running_pid()
    assert (tmp_path / "mine" / "store.db").exists()
    assert ClusterFolder(tmp_path / "mine").running_pid() is None


OWNER = """
import sys, time
from embarcadero.node.local import LocalCluster
cluster = LocalCluster(brokers=1, log_bytes=32 << 20)
print(*cluster.pids().values(), flush=True)
time.sleep(600)
"""


def test_a_local_cluster_dies_with_its_owner() -> None:
    """kill -9 of the program that made a local cluster ends all of the cluster's processes."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    assert len(pids) == 4  # supervisor, broker, sequencer, standby
    owner.kill()
    owner.communicate()
    until(lambda: not any(running(pid) for pid in pids))


def test_publishing_again_under_a_session_name_stores_nothing_twice(shell: Shell) -> None:
    """The first run stored the beginning of the file, not a whole number of batches; the second one adds the rest."""
    shell.run(*UP)
    shell.run("topic", "create", "lines", "--order", "5")
    lines = [f"line {number}" for number in range(5_000)]
    first = shell.run("publish", "lines", "--session", "import-7", stdin="\n".join(lines[:1_500]) + "\n")
    assert "published 1,500 records" in first
    second = shell.run("publish", "lines", "--session", "import-7", stdin="\n".join(lines) + "\n")
    assert "published 3,500 records" in second
    assert "1,500 were stored before" in second
    assert shell.run("tail", "lines").splitlines() == lines
