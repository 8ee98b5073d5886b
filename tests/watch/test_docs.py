"""The systemd unit and its page name existing things."""

from __future__ import annotations

import configparser
import re
import shlex
from pathlib import Path

from typer.main import get_command

from embarcadero.cli.main import app

DOCS = Path(__file__).parent.parent.parent / "docs"
SOURCE = Path(__file__).parent.parent.parent / "src" / "embarcadero"


def test_the_unit_starts_a_command_with_existing_options() -> None:
    """ExecStart is a valid command line of `embarcadero`, and only the supervisor gets the signal to stop."""
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[method-assign,assignment]
    unit.read(DOCS / "embarcadero.service")
    program, verb, *arguments = shlex.split(unit["Service"]["ExecStart"])
    command = get_command(app).commands[verb]  # type: ignore[attr-defined]

    assert (Path(program).name, unit["Service"]["KillMode"]) == ("embarcadero", "mixed")
    with command.make_context(verb, arguments) as context:
        assert (context.params["brokers"], context.params["metrics_port"]) == (4, 9100)


NO_ROLES = ("audit", "demo")
"""Folders whose events are not in the log of a process."""


def test_every_event_of_the_table_is_logged_somewhere() -> None:
    """And every event that a role logs is in the table."""
    text = (DOCS / "operations-systemd.md").read_text()
    table = text.partition("| event | role | meaning |")[2].partition("\n\n")[0]
    listed = set(re.findall(r"`([a-z' ]+)`", "\n".join(line.split("|")[1] for line in table.splitlines()[2:])))
    source = "\n".join(path.read_text() for path in SOURCE.rglob("*.py") if path.parent.name not in NO_ROLES)
    told = set(re.findall(r"""(?:\.note|\.warn|tell|tell_once|report_once)\(\s*"([a-z' ]+)",?""", source))

    assert listed - told == set()
    assert told - listed == {"can't mark members dead", "nodes did not end"}
