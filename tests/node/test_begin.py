"""What a process does first with its configuration: log as it says."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from embarcadero.config.table import Log
from embarcadero.errors import ClusterError
from embarcadero.node.begin import start_logging


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """Whatever a test sets up is taken back."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers = []
    yield
    for handler in root.handlers:
        handler.close()
    root.handlers, root.level = handlers, level


def test_lines_have_the_level_format_and_file_that_were_set(tmp_path: Path) -> None:
    """log.level, log.format and log.file, in one go."""
    path = tmp_path / "x.log"
    start_logging("node", Log(level="warning", format="json", file=str(path)))
    logging.getLogger("embarcadero.test").info("quiet")
    logging.getLogger("embarcadero.test").warning("loud")
    lines = [json.loads(line) for line in path.read_text().splitlines()]

    assert [(line["level"], line["event"]) for line in lines] == [("warning", "loud")]


def test_a_log_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    """With the file's name and the key to change."""
    with pytest.raises(ClusterError, match=r"can't write the log .*: Is a directory .*log\.file"):
        start_logging("node", Log(file=str(tmp_path)))
