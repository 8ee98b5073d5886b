"""Logs: one line an event, as text or JSON, with repeats counted."""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
import warnings
from collections.abc import Iterator

import pytest

from embarcadero.errors import BadValue
from embarcadero.limits import LOG_REPEATS_MAX
from embarcadero.watch import logs
from embarcadero.watch.logs import LogJournal, event_of, set_up_logging


@pytest.fixture(autouse=True)
def root() -> Iterator[None]:
    before, level = logging.root.handlers[:], logging.root.level
    hooks = sys.excepthook, sys.unraisablehook, threading.excepthook
    yield
    sys.excepthook, sys.unraisablehook, threading.excepthook = hooks
    logging.captureWarnings(False)
    logging.root.handlers[:] = before
    logging.root.setLevel(level)


def test_json_lines_parse_and_have_role_and_time(capsys: pytest.CaptureFixture[str]) -> None:
    """Events of roles and plain messages are objects with the same four fields first."""
    set_up_logging("node-7", "info", "json")
    LogJournal("broker-0.3").warn("backpressure on", occupied=0.81, reason='two\nlines and a "quote"')
    logging.getLogger("other").info("plain message")
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("other").exception("it failed")
    first, second, third = map(json.loads, capsys.readouterr().err.splitlines())

    assert list(first)[:4] == ["time", "level", "role", "event"]
    assert (first["level"], first["role"], first["event"]) == ("warning", "broker-0.3", "backpressure on")
    assert (first["occupied"], first["reason"]) == (0.81, 'two\nlines and a "quote"')
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first["time"])
    assert (second["role"], second["event"]) == ("node-7", "plain message")
    assert "ValueError: broken" in third["trace"]


@pytest.mark.parametrize("form", ["json", "plain"])
def test_secrets_are_masked_in_lines(capsys: pytest.CaptureFixture[str], form: str) -> None:
    """In the event, in its facts and in tracebacks, also where encoding would change their characters."""
    secret = 'hush"\\hush'
    set_up_logging("node-7", form=form, secrets=[secret])
    LogJournal("tier").warn(f"no access with {secret}", reason=f"bad key {secret}")
    try:
        raise ValueError(secret)
    except ValueError:
        logging.getLogger("other").exception("it failed")
    found = capsys.readouterr().err

    assert "hush" not in found
    assert found.count("***") == 3


def test_all_output_of_python_becomes_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Uncaught exceptions, also of threads and of destructors, and warnings."""

    class Bad:
        def __del__(self) -> None:
            raise ValueError("in a destructor")

    def fail() -> None:
        raise ValueError("in a thread")

    set_up_logging("node-7", form="json")
    sys.excepthook(ValueError, ValueError("at the top"), None)
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    Bad()
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        logging.captureWarnings(False)
        logging.captureWarnings(True)
        warnings.warn("be careful", stacklevel=1)
    events = [json.loads(line)["event"] for line in capsys.readouterr().err.splitlines()]

    assert events[:3] == [f"uncaught ValueError: {where}" for where in ("at the top", "in a thread", "in a destructor")]
    assert "be careful" in events[3]


def test_plain_lines_stay_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever a peer's name contains, it does not get a line of its own."""
    set_up_logging("node-7")
    LogJournal("sequencer-2").note("session fenced", client="evil\n2026 INFO forged", session=7)
    (line,) = capsys.readouterr().err.splitlines()

    assert line.split(" ", 1)[1] == 'INFO sequencer-2 session fenced client="evil\\n2026 INFO forged" session=7'


def test_repeats_are_counted_instead_of_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first few are written; the next one after a while has the number of the others.

    Other events are not affected.
    """
    now = 100.0
    monkeypatch.setattr(logs.time, "monotonic", lambda: now)
    set_up_logging("node-7", form="json")
    journal = LogJournal("broker-0.1")
    for _ in range(LOG_REPEATS_MAX + 40):
        journal.warn("connection ended", error="BadMagic")
    journal.warn("connection ended", error="OverCredit")
    now += 60
    journal.warn("connection ended", error="BadMagic")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]

    assert [line["error"] for line in lines] == ["BadMagic"] * LOG_REPEATS_MAX + ["OverCredit", "BadMagic"]
    assert lines[-1]["not_written_before"] == 40
    assert "not_written_before" not in lines[-2]


@pytest.mark.parametrize("form", ["plain", "json"])
def test_the_message_of_a_line_can_be_repeated(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The supervisor prints the reason why a process did not start, whatever the format of its log."""
    set_up_logging("node-7", "info", form)
    logging.getLogger("other").error("port 9092 is in use (choose another)")

    assert event_of(capsys.readouterr().err.strip()) == "port 9092 is in use (choose another)"
    assert event_of('{"not": "ours"}') == '{"not": "ours"}'


def test_levels_and_formats_are_checked() -> None:
    """An unknown value is a typed error that lists the known ones."""
    with pytest.raises(BadValue, match="debug, info"):
        set_up_logging("x", "loud")
    with pytest.raises(BadValue, match="plain, json"):
        set_up_logging("x", "info", "xml")
