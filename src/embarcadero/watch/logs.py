"""Logs: one line for each event, plain or JSON, in UTC, with role and incarnation. Payloads are never logged.

    2026-11-16T03:17:10.123Z WARNING broker-0.3 backpressure on occupied=0.81 unresolved=120
    {"time":"2026-11-16T03:17:10.123Z","level":"warning","role":"broker-0.3","event":"backpressure on","occupied":0.81}

A repeated event is written a few times. Later repetitions are only counted, and the next written event has the count.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import msgspec

from embarcadero.config.secrets import MASK
from embarcadero.errors import BadValue, ClusterError
from embarcadero.limits import KIB, LOG_REPEATS_MAX, LOG_REPEATS_S

LEVELS: Final = ("debug", "info", "warning", "error")
_PLAIN: Final = re.compile(r"[\w.:/@+-]+")
_PREFIX: Final = re.compile(r"^\S+Z [A-Z]+ \S+ ")
_TEXT_CHARS_MAX: Final = 500
_LAST_WORDS_BYTES: Final = 4 * KIB
_EVENTS_REMEMBERED_MAX: Final = 1_024


class LogFormat(StrEnum):
    """The format of lines."""

    PLAIN = "plain"
    JSON = "json"


def check_logging(level: str, form: str) -> None:
    """Raise BadValue for an unknown level or format."""
    if level not in LEVELS:
        raise BadValue(f"log level {level!r} does not exist", f"use {', '.join(LEVELS)}")
    if form not in list(LogFormat):
        raise BadValue(f"log format {form!r} does not exist", f"use {', '.join(LogFormat)}")


def set_up_logging(
    role: str, level: str = "info", form: str = LogFormat.PLAIN.value, file: str = "", secrets: Sequence[str] = ()
) -> None:
    """Log to a file or to standard error. Lines without a role get `role`; `secrets` are masked in all lines.

    Uncaught exceptions of all threads, and Python's warnings, are logged too.
    """
    check_logging(level, form)
    try:
        handler = logging.FileHandler(file) if file else logging.StreamHandler(sys.stderr)
    except OSError as error:
        raise ClusterError(f"can't write the log {file}: {error.strerror}", "change log.file") from error
    handler.setFormatter(_Lines(role, LogFormat(form), secrets))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    sys.unraisablehook = lambda lost: _log_uncaught(lost.exc_type, lost.exc_value, lost.exc_traceback)
    threading.excepthook = lambda lost: _log_uncaught(lost.exc_type, lost.exc_value, lost.exc_traceback)


def _log_uncaught(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    logging.critical("uncaught %s: %s", kind.__name__, error, exc_info=(kind, error or kind(), trace))


class _Lines(logging.Formatter):
    def __init__(self, role: str, form: LogFormat, secrets: Sequence[str]) -> None:
        super().__init__()
        self._role, self._form, self._secrets = role, form, tuple(secrets)

    def format(self, record: logging.LogRecord) -> str:
        """Format a record as one line, even if the message has several."""
        return self._masked(self._line(record))

    def _masked(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, MASK)
        return text

    def _line(self, record: logging.LogRecord) -> str:
        role: str = getattr(record, "role", self._role)
        facts: dict[str, Any] = dict(getattr(record, "facts", {}))
        event = self._masked(record.getMessage())  # before encoding, which may change the characters of a secret
        if record.exc_info:
            facts["trace"] = self.formatException(record.exc_info)
        facts = {name: self._masked(fact) if isinstance(fact, str) else fact for name, fact in facts.items()}
        at = datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
        if self._form is LogFormat.JSON:
            line = {"time": at, "level": record.levelname.lower(), "role": role, "event": event}
            return msgspec.json.encode(line | facts, enc_hook=str).decode()
        fields = "".join(f" {name}={_readable(value)}" for name, value in facts.items())
        return f"{at} {record.levelname} {role} {_one_line(event)}{fields}"


def event_of(line: str) -> str:
    """The event of a log line, without time and role; a line in another format is returned unchanged."""
    if line.startswith("{"):
        with contextlib.suppress(msgspec.MsgspecError, KeyError, TypeError):
            return str(msgspec.json.decode(line)["event"])
    return _PREFIX.sub("", line)


def last_words(path: Path) -> str:
    """The event of the last line of a log: usually the reason why its process ended. Empty without a line."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LAST_WORDS_BYTES))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return event_of(lines[-1]) if lines else ""


def _one_line(text: str) -> str:
    return text.replace("\n", "\\n").replace("\r", "\\r")


def _readable(value: object) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else msgspec.json.encode(text).decode()


class LogJournal:
    """A role's journal, written to the log."""

    def __init__(self, role: str) -> None:
        self._role = role
        self._log = logging.getLogger("embarcadero.events")
        self._repeats: dict[str, tuple[float, int]] = {}  # event -> (start of counting, count)

    def rename(self, role: str) -> None:
        """Change the name of the role for later events."""
        self._role = role

    def note(self, event: str, /, **facts: object) -> None:
        """Write an event."""
        self._write(logging.INFO, event, facts)

    def warn(self, event: str, /, **facts: object) -> None:
        """Write an event that needs the attention of operators."""
        self._write(logging.WARNING, event, facts)

    def _write(self, level: int, event: str, facts: dict[str, object]) -> None:
        now = time.monotonic()
        key = f"{event}/{facts.get('error') or facts.get('why') or ''}"
        since, count = self._repeats.get(key, (now, 0))
        if now - since > LOG_REPEATS_S:
            since, count, untold = now, 0, max(0, count - LOG_REPEATS_MAX)
        else:
            untold = 0
        if len(self._repeats) >= _EVENTS_REMEMBERED_MAX:
            self._repeats.clear()
        self._repeats[key] = (since, count + 1)
        if count >= LOG_REPEATS_MAX:
            return
        written = {name: value[:_TEXT_CHARS_MAX] if isinstance(value, str) else value for name, value in facts.items()}
        if untold:
            written["not_written_before"] = untold
        self._log.log(level, event, extra={"role": self._role, "facts": written})
