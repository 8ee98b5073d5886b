"""config show, check, reference, example; and --config on commands that work with a cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from embarcadero.cli.main import app
from embarcadero.config.table import KEYS


@pytest.fixture(autouse=True)
def no_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the user's own file or cluster."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("EMBARCADERO_DATA_DIR", str(tmp_path / "data"))
    for variable in ("EMBARCADERO_BROKERS", "EMBARCADERO_DEBUG", "EMBARCADERO_CONFIG", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(variable, raising=False)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_show_names_the_origin_of_each_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key is there, with its value and its origin."""
    Path("embarcadero.yaml").write_text("broker:\n  port: 9000\n")
    monkeypatch.setenv("EMBARCADERO_CLIENT_LINGER_MS", "1s")
    shown = {fact["key"]: fact for fact in json.loads(run("config", "show", "--json").stdout)}

    assert list(shown) == list(KEYS)
    assert (shown["broker.port"]["value"], shown["broker.port"]["from"]) == (9000, "embarcadero.yaml:2")
    linger = shown["client.linger_ms"]
    assert (linger["value"], linger["unit"], linger["from"]) == (1000.0, "ms", "$EMBARCADERO_CLIENT_LINGER_MS")
    assert shown["cluster.brokers"]["from"] == "default"


def test_show_can_show_one_section() -> None:
    """--section leaves the others out; an unknown section is refused."""
    shown = run("config", "show", "--section", "broker")

    assert "broker.port" in shown.stdout
    assert "client.linger_ms" not in shown.stdout
    assert "there is no section 'brok'" in run("config", "show", "--section", "brok").stderr


def test_show_masks_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the table and in JSON; properties without a secret are shown."""
    monkeypatch.setenv("EMBARCADERO_TIER_PROPERTIES", "s3.region=eu-west-1,s3.secret-access-key=hush-hush")
    table, text = run("config", "show", "--section", "tier").stdout, run("config", "show", "--json").stdout

    assert "hush-hush" not in table + text
    (fact,) = [fact for fact in json.loads(text) if fact["key"] == "tier.properties"]
    assert fact["value"] == ["s3.region=eu-west-1", "s3.secret-access-key=***"]


def test_show_refuses_a_wrong_configuration() -> None:
    """An invalid configuration is not shown as if it were valid."""
    Path("embarcadero.yaml").write_text("broker:\n  port: x\n  prot: 1\n")
    shown = run("config", "show")

    assert shown.exit_code == 2
    assert "the configuration has 2 problems" in shown.stderr


def test_check_names_all_problems_and_exits_with_one(tmp_path: Path) -> None:
    """On standard output, a line each; as JSON for programs."""
    Path("bad.yaml").write_text("broker:\n  port: x\n  prot: 1\n")
    shown = run("config", "check", "bad.yaml")

    assert shown.exit_code == 1
    assert shown.stdout.splitlines() == [
        "bad.yaml:3: broker.prot: is not a key; did you mean broker.port?",
        "bad.yaml:2: broker.port: 'x' is not a number; write a number such as 9092",
    ]
    told = run("config", "check", "bad.yaml", "--json")
    assert told.exit_code == 1
    assert [problem["key"] for problem in json.loads(told.stdout)["problems"]] == ["broker.prot", "broker.port"]


def test_check_reports_valid_sources() -> None:
    """With a file and without one."""
    assert "there is no file; the environment is valid: 1 values are set" in run("config", "check").stdout
    Path("embarcadero.yaml").write_text("broker: {port: 9000}")
    shown = run("config", "check")

    assert shown.exit_code == 0
    assert shown.stdout.startswith("embarcadero.yaml and the environment are valid: 2 values are set")
    assert json.loads(run("config", "check", "--json").stdout)["ok"] is True


def test_check_requires_its_file() -> None:
    """A missing file is a problem."""
    shown = run("config", "check", "none.yaml")

    assert shown.exit_code == 1
    assert "none.yaml: can't be read: No such file or directory" in shown.stdout


def test_reference_and_example_print_their_texts() -> None:
    """Both are ready to be saved to a file."""
    assert run("config", "reference").stdout.startswith("# Configuration\n")
    assert "#   port: 9092" in run("config", "example").stdout


@pytest.mark.parametrize(
    "command",
    [["up"], ["down"], ["node", "--roles", "broker:0"], ["status"], ["topic", "list"], ["publish", "t"], ["tail", "t"]],
    ids=" ".join,
)
def test_commands_take_a_configuration(command: list[str]) -> None:
    """--config FILE is read first: a wrong one ends the command with all its problems."""
    Path("bad.yaml").write_text("broker: {prot: 1}\nlog: {level: loud}\n")
    shown = run(*command, "--config", "bad.yaml")

    assert shown.exit_code == 2
    assert "bad.yaml:1: broker.prot: is not a key" in shown.stderr
    assert "bad.yaml:2: log.level: 'loud' is not a choice of this key" in shown.stderr
    assert "--config FILE" in run(*command, "--help").stdout


def test_flags_are_named_in_problems() -> None:
    """An invalid option is reported by its name, together with problems of other sources."""
    Path("embarcadero.yaml").write_text("log: {level: loud}\n")
    shown = run("up", "--brokers", "0", "--log-mib", "100")

    assert shown.exit_code == 2
    for says in ("--brokers: cluster.brokers: 0 is out of range", "--log-mib: fabric.log_bytes:", "log.level: 'loud'"):
        assert says in shown.stderr


def test_brokers_come_from_the_configuration() -> None:
    """Without --brokers and without a running cluster the file names the brokers."""
    Path("embarcadero.yaml").write_text("client: {brokers: ['127.0.0.1:1'], connect_timeout_s: 1s}\n")
    shown = run("topic", "list")

    assert shown.exit_code == 1
    assert "127.0.0.1:1" in shown.stderr
