"""Modules loaded by a process that only reads: each stream starts one, and each worker of a batch read is one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import embarcadero

ASKS = """
import sys
from embarcadero.spark.processes import shared_log
from embarcadero.spark.source import EmbarcaderoSource
from embarcadero.spark.read import readers, tasks
from pyspark_embarcadero import DefaultSource
print(" ".join(sys.modules))
"""
PUBLISHING = tuple(f"embarcadero.client.{name}" for name in ("publisher", "batches", "session", "intake", "encoding"))
ELSEWHERE = (
    "embarcadero.spark.sink",
    "embarcadero.spark.shape",
    "embarcadero.spark.jobs",
    "embarcadero.staging",
    "embarcadero.broker",
    "embarcadero.node",
    "embarcadero.sequencer",
    "embarcadero.storage",
    "pyiceberg",
)


def test_a_source_does_not_load_the_publishing_code() -> None:
    """Nor brokers, nor the code of tables, which only a topic with a table needs."""
    told = subprocess.run([sys.executable, "-c", ASKS], capture_output=True, text=True, check=True).stdout.split()

    assert "embarcadero.client.brokers" in told
    assert [name for name in told if name.startswith(PUBLISHING)] == []
    assert [name for name in told if name.startswith(ELSEWHERE)] == []


def test_the_search_for_data_sources_does_not_load_the_client() -> None:
    """Spark starts a process for each session that imports this package, and ends it."""
    looks = "import sys, pyspark_embarcadero; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", looks], capture_output=True, text=True, check=True).stdout.split()

    assert "embarcadero.spark.source" in found
    assert [name for name in found if name.startswith(("embarcadero.client.api", "embarcadero.client.net"))] == []


FOLDERS = ("spark", "tier", "staging", "audit")
PUBLIC = {
    "api.aio_calls", "api.aio_log", "api.aio_streams", "api.sync_log", "results", "arguments",
    "encoding",
}  # fmt: skip
"""Modules of the client with calls, their arguments and results, and those that make payloads for publish_encoded()."""


def test_spark_and_tables_use_public_calls_of_the_client() -> None:
    """No module of the client below its calls, and no internals of a Log."""
    source = Path(embarcadero.__file__).parent
    texts = [path.read_text() for folder in FOLDERS for path in (source / folder).rglob("*.py")]
    used = {name for text in texts for name in re.findall(r"embarcadero\.client\.([\w.]+) import", text)}

    assert used <= PUBLIC
    assert not [found for text in texts for found in re.findall(r"\blog\.(?:thread|twin|brokers|_\w+)\b", text)]
