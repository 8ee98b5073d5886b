"""The first step of a process: configure logging."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from embarcadero.config.table import LogKeys
from embarcadero.errors import ClusterError
from embarcadero.node.process import start_logging


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """All global settings of a test are restored."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers = []
    yield
    for handler in root.handlers:
        handler.close()
    root.handlers, root.level = handlers, level


def test_lines_have_the_configured_level_format_and_file(tmp_path: Path) -> None:
    """log.level, log.format and log.file, together."""
    path = tmp_path / "x.log"
    start_logging("node", LogKeys(level="warning", format="json", file=str(path)))
    logging.getLogger("embarcadero.test").info("quiet")
    logging.getLogger("embarcadero.test").warning("loud")
    lines = [json.loads(line) for line in path.read_text().splitlines()]

    assert [(line["level"], line["event"]) for line in lines] == [("warning", "loud")]


def test_a_log_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    """With the file's name and the key to change."""
    with pytest.raises(ClusterError, match=r"can't write the log .*: Is a directory .*log\.file"):
        start_logging("node", LogKeys(file=str(tmp_path)))


def test_freed_memory_is_reused_without_asking_the_kernel() -> None:
    """Copies of a megabyte, made and dropped by turns, cost hardly a page fault; 256 each without it."""
    code = (
        "import resource\n"
        "from embarcadero.node.process import keep_freed_memory\n"
        "keep_freed_memory()\n"
        "source = bytes(1 << 20)\n"
        "def turn():\n"
        "    copies = [source[:-1] for _ in range(8)]\n"
        "turn()\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "for _ in range(20): turn()\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)\n"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(shown.stdout) < 20 * 8 * 256 // 4
