"""What a new user types first, and what the command line message to mistakes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import embarcadero as emb
from embarcadero.cli import topic as topic_verbs
from embarcadero.cli.main import app
from embarcadero.cli.output import in_shell_words, option_names
from embarcadero.demo import durable, screen
from embarcadero.errors import BadValue, NotAvailable
from embarcadero.placement.directory import Directory
from embarcadero.placement.store import MemoryStore


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the user's own cluster."""
    monkeypatch.setenv("EMBARCADERO_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.delenv("EMBARCADERO_BROKERS", raising=False)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def test_the_version_is_printed() -> None:
    """By the installed program, too."""
    assert run("--version").stdout == f"embarcadero {emb.__version__}\n"


# --- durations --------------------------------------------------------------------------------------------------------
class Log:
    """Keeps the options of the last call."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None: ...

    def create_topic(self, name: str, **options: Any) -> Any:
        self.asked = options
        return SimpleNamespace(name=name, order=2, replicas=0, durable_on=0)

    def alter_topic(self, name: str, **options: Any) -> Any:
        self.asked = options
        return SimpleNamespace(name=name, schema_version=0, replicas=0, durable_on=0)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    log = Log()
    monkeypatch.setattr(topic_verbs, "connect", lambda *_: log)
    return log


@pytest.mark.parametrize("verb", ["create", "alter"])
@pytest.mark.parametrize(
    ("options", "asked"),
    [
        (["--retention", "7d"], {"retention_s": 604_800}),
        (["--retention", "10m"], {"retention_s": 600}),
        (["--retention", "P1D"], {"retention_s": 86_400}),
        (["--retention", "3600"], {"retention_s": 3_600}),
        (["--gap-timeout", "20ms"], {"gap_timeout_ms": 20}),
        (["--gap-timeout-ms", "20"], {"gap_timeout_ms": 20}),
        (["--gap-timeout-ms", "1m"], {"gap_timeout_ms": 60_000}),
        (["--session-ttl", "2 hours"], {"session_ttl_s": 7_200}),
        (["--session-ttl-s", "60"], {"session_ttl_s": 60}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_topics_take_durations(log: Log, verb: str, options: list[str], asked: dict[str, int]) -> None:
    """Old options keep working."""
    shown = run("topic", verb, "t", *options)
    assert shown.exit_code == 0, shown.output
    assert {name: value for name, value in log.asked.items() if value is not None} == asked


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["topic", "create", "t", "--retention", "soon"], "--retention: 'soon' is not a number"),
        (["topic", "create", "t", "--gap-timeout", "5 parsecs"], "'parsecs' is not a valid unit; use us, ms, s, m"),
        (["topic", "create", "t", "--retention", "1.5"], "not a whole number"),
        (["top", "--interval", "often"], "'often' is not a number"),
        (["top", "--interval", "2h"], "use 0.1 to 60 s"),
        (["bench", "--seconds", "-5s"], "at least 0 s"),
        (["topic", "trim", "t", "--before-time", "7d"], 'write "7d ago"'),
        (["tail", "t", "--from", "2 hours"], 'write "2 hours ago"'),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_duration_is_one_line(arguments: list[str], message: str) -> None:
    """With a form that works, and exit code 2."""
    shown = run(*arguments)
    assert shown.exit_code == 2
    assert message in shown.output.replace("hint: ", "; ").replace("\n; ", "; ")
    assert "Traceback" not in shown.output


@pytest.mark.parametrize("command", [["topic", "create"], ["top"], ["bench"], ["demo"], ["pipeline", "compact"]])
def test_help_shows_that_durations_have_units(command: list[str]) -> None:
    """As the kind of the value, with examples."""
    assert "DURATION" in run(*command, "--help").stdout


# --- hints ------------------------------------------------------------------------------------------------------------
def test_hints_name_options_instead_of_keywords(monkeypatch: pytest.MonkeyPatch) -> None:
    """`use ack=1` is Python; in a shell it is `--ack 1`."""

    def refused(*_: Any) -> Any:
        raise BadValue("ack=2 waits, and topic 't' has no replicas", "create it with replicas=..., or use ack=1")

    monkeypatch.setattr("embarcadero.cli.records.connect", refused)
    shown = run("publish", "t", "--ack", "2")
    assert "error: --ack 2 waits" in shown.stderr
    assert "hint: create it with --replicas ..., or use --ack 1" in shown.stderr


def test_options_are_known_by_their_python_names() -> None:
    """Of the command that was called, and of `topic create`, which hints name."""
    from typer.main import get_command

    options = option_names(get_command(app), ["topic", "trim", "t", "--before-seq", "5"])
    assert options["before_seq"] == "--before-seq"
    assert options["replicas"] == "--replicas"
    assert "ack" not in options
    hint = "use before_seq=..., before_index=... or before_time=..."
    assert in_shell_words(hint, options) == "use --before-seq ..., --before-index ... or --before-time ..."
    assert in_shell_words("order==2 and s3.endpoint=x", {"endpoint": "--endpoint"}) == "order==2 and s3.endpoint=x"


def test_existing_topics_are_listed_and_counted() -> None:
    """The list of five did not say that it was cut, and named topics of the cluster itself."""
    directory = Directory(MemoryStore())
    with pytest.raises(emb.errors.UnknownTopic) as caught:
        directory.topics.described("orders")
    assert "there is no topic yet" in caught.value.hint
    for number in range(8):
        directory.topics.create(f"orders-{number}", replicas=0)
    directory.topics.create("__jobs.0123456789abcdef", replicas=0)
    with pytest.raises(emb.errors.UnknownTopic) as caught:
        directory.topics.described("order-7")
    assert "did you mean orders-7?" in caught.value.hint
    assert "and 3 more: `embarcadero topic list` lists them all" in caught.value.hint
    assert "__jobs" not in caught.value.hint


def test_brackets_of_a_hint_are_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`pip install "embarcadero[spark]"` lost its brackets to a markup language."""

    def missing(*_: Any) -> Any:
        raise NotAvailable("PySpark is not installed", 'pip install "embarcadero[spark]"')

    monkeypatch.setattr(durable, "run_cli", lambda *_: 0)
    monkeypatch.setattr(screen, "_second_act", missing)
    assert screen.run_cli(1, 1.0, 20, Path("report.html"), False) == 0
    assert 'pip install "embarcadero[spark]"' in capsys.readouterr().out


# --- other systems ----------------------------------------------------------------------------------------------------
def test_a_cluster_elsewhere_than_on_linux_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one line that message what runs where."""
    monkeypatch.setattr(sys, "platform", "darwin")
    for call in (emb.local, emb.errors.require_linux):
        with pytest.raises(NotAvailable, match="run on Linux, and this is darwin"):
            call()
    shown = run("up")
    assert (shown.exit_code, "clients run here" in shown.stderr) == (1, True)


def test_the_command_line_starts_without_modules_of_linux() -> None:
    """Help, version, and a client command that finds no broker."""
    program = (
        "import sys\n"
        "import numpy, pyarrow, asyncio, ctypes, sysconfig; sysconfig.get_config_vars()\n"
        "for name in ('uvloop', 'fcntl', 'resource', 'pwd'):\n    sys.modules[name] = None\n"
        "sys.platform = 'darwin'\n"
        "from embarcadero.cli.main import main\n"
        "sys.argv[1:] = {arguments}\n"
        "main()\n"
    )
    for arguments, code, message in (
        (["--version"], 0, "embarcadero "),
        (["topic", "list", "--brokers", "127.0.0.1:1"], 1, "no broker answered at 127.0.0.1:1"),
        (["status"], 1, "the processes of a cluster run on Linux"),
        (["down"], 1, "the processes of a cluster run on Linux"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", program.replace("{arguments}", repr(arguments))],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert (done.returncode, message in done.stdout + done.stderr) == (code, True), done.stderr
