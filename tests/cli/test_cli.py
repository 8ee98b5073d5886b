"""The command line: help that teaches, errors in one line, nothing heavy before it is needed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from embarcadero.cli import main as module
from embarcadero.cli.main import app
from embarcadero.cli.output import find_brokers
from embarcadero.config import Config
from embarcadero.node.folder import ClusterFolder, ClusterInfo
from embarcadero.placement.directory import Directory
from embarcadero.placement.store import SqliteStore

VERBS = ["bench", "up", "down", "node", "status", "topic", "publish", "tail", "verify", "config", "demo"]
TOPIC_VERBS = ["create", "list", "describe", "alter", "trim", "delete", "recover"]
COMMANDS = [[verb] for verb in VERBS] + [["topic", verb] for verb in TOPIC_VERBS]
COMMANDS += [["inspect", verb] for verb in ("regions", "region", "batch", "entry", "record", "segments", "segment")]
COMMANDS += [["config", verb] for verb in ("show", "check", "reference", "example")]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test sees the user's own cluster."""
    monkeypatch.setenv("EMBARCADERO_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.delenv("EMBARCADERO_BROKERS", raising=False)
    monkeypatch.delenv("EMBARCADERO_DEBUG", raising=False)
    return tmp_path / "data"


def run(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=stdin)


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_help_lists_every_verb() -> None:
    """The first help shows all verbs and a first session to copy."""
    shown = run("--help")
    assert shown.exit_code == 0
    assert all(verb in shown.stdout for verb in VERBS)
    assert "embarcadero up --detach" in shown.stdout


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_each_verb_has_help(command: list[str]) -> None:
    """Every verb has help text, which begins with the effect of the verb."""
    shown = run(*command, "--help")
    assert shown.exit_code == 0
    assert f"Usage: root {' '.join(command)}" in shown.stdout
    assert shown.stdout.count("\n") > 5


def test_help_is_light() -> None:
    """Showing help loads neither pyarrow nor numpy nor uvloop nor the client."""
    program = (
        "import sys\nfrom embarcadero.cli.main import app\n"
        "try:\n    app(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'pyarrow', 'numpy', 'uvloop', 'embarcadero.client.api.sync_log'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["fly"],
        ["up", "--brokers", "many"],
        ["topic", "create"],
        ["publish"],
        ["tail", "t", "--format", "x"],
        ["node"],
        ["up", "--processes", "two"],
        ["config", "show", "--config"],
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_with_two(arguments: list[str]) -> None:
    """Arguments that the parser refuses end with exit code 2 and no traceback."""
    shown = run(*arguments)
    assert shown.exit_code == 2
    assert "Traceback" not in shown.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["up", "--brokers", "0"], "use 1 to 64"),
        (["up", "--port", "65535", "--brokers", "2"], "--port: broker.port is 65535, cluster.brokers is 2"),
        (["up", "--log-mib", "100"], "power of two"),
        (["up", "--host", "0.0.0.0"], "--host"),
        (["tail", "t", "--from", "yesterday"], "earliest, latest"),
        (["tail", "t", "--from", "-1"], "earliest, latest"),
        (["publish", "t", "no-such-file"], "no-such-file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_values_are_one_line_and_a_hint(arguments: list[str], says: str) -> None:
    """A value out of range exits with 2, one error line, one hint, no traceback."""
    shown = run(*arguments)
    assert shown.exit_code == 2
    assert says in shown.stderr
    assert "Traceback" not in shown.output


@pytest.mark.parametrize("verb", ["status", "down"])
def test_no_cluster_is_an_error_with_a_hint(verb: str, own_folder: Path) -> None:
    """Without a running cluster the folder is named, and the exit code is 1."""
    shown = run(verb)
    assert shown.exit_code == 1
    assert f"error: no cluster is running in {own_folder}" in shown.stderr
    assert "hint:" in shown.stderr


def test_node_needs_a_cluster() -> None:
    """A node can't be started without a supervisor's cluster, and invalid roles are refused first."""
    assert "no cluster is running" in run("node", "--roles", "broker:0").stderr
    assert "is not a role" in run("node", "--roles", "king").stderr


def test_a_port_in_use_is_reported(own_folder: Path) -> None:
    """`up --detach` on a port that is taken names it, exits with 1, and leaves nothing running."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        shown = run("up", "--detach", "--brokers", "1", "--port", str(port))
    assert shown.exit_code == 1
    assert f"error: port {port} on 127.0.0.1 is in use" in shown.stderr
    assert ClusterFolder(own_folder).running_pid() is None


def test_a_second_up_is_refused(own_folder: Path) -> None:
    """While a supervisor holds the folder, `up` names its process and exits with 1."""
    folder = ClusterFolder(own_folder)
    folder.create()
    with folder.locked():
        shown = run("up", "--detach", "--port", "0")
    assert shown.exit_code == 1
    assert f"supervisor pid {os.getpid()}" in shown.stderr


def test_a_damaged_store_is_reported(own_folder: Path) -> None:
    """`up` over a damaged store names the file and the remedy, without a traceback."""
    folder = ClusterFolder(own_folder)
    folder.create()
    folder.store_path.write_bytes(b"not a database" * 1000)
    shown = run("up", "--detach", "--port", "0")
    assert shown.exit_code == 1
    assert f"error: the store {folder.store_path} is damaged" in shown.stderr


@pytest.mark.parametrize(
    "arguments", [["topic", "list"], ["topic", "create", "t"], ["publish", "t"], ["tail", "t"]], ids=" ".join
)
def test_no_broker_is_an_error_with_a_hint(arguments: list[str]) -> None:
    """Where no broker listens, every client command reports that and exits with 1."""
    shown = run(*arguments, "--brokers", f"127.0.0.1:{closed_port()}", stdin="line\n")
    assert shown.exit_code == 1
    assert "error:" in shown.stderr
    assert "Traceback" not in shown.output


def test_addresses_come_from_the_flag_then_the_cluster(own_folder: Path) -> None:
    """--brokers wins; else the running cluster's live brokers."""
    assert find_brokers("a:1, b:2", None) == ["a:1", "b:2"]
    folder = ClusterFolder(own_folder)
    folder.create()
    store = SqliteStore(folder.store_path)
    directory = Directory(store)
    for port in (5, 6, 7):
        directory.members.register(port - 5, "10.0.0.1", port, 1)
    directory.members.mark_dead(1, 1)
    store.close()
    folder.write_info(
        ClusterInfo(
            version="0", id=directory.cluster_id, generation=0, fabric="", config=Config(), supervisor=1, nodes=[],
        )
    )  # fmt: skip
    with folder.locked():
        assert find_brokers(None, own_folder) == ["10.0.0.1:5", "10.0.0.1:7"]


def test_a_bug_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """An unexpected error is one line that asks for a report; EMBARCADERO_DEBUG=1 shows the traceback."""

    def broken() -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(module, "app", broken)
    with pytest.raises(SystemExit) as end:
        module.main()
    assert end.value.code == 1
    assert "error: ZeroDivisionError: oops" in capsys.readouterr().err
    monkeypatch.setenv("EMBARCADERO_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        module.main()


def test_deleting_asks_first() -> None:
    """`topic delete` without --yes asks, and a "no" ends it before anything is sent."""
    shown = run("topic", "delete", "orders", stdin="n\n")
    assert shown.exit_code == 1
    assert "Delete topic orders" in shown.output
