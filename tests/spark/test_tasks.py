"""Tasks in a worker, without Spark."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from types import ModuleType

import pyarrow as pa
import pytest

from embarcadero.spark.read import tasks
from embarcadero.spark.read.options import RecordPosition, TaskSpan, read_options
from embarcadero.spark.read.tasks import Shaper, SpanReader, arrow_schema, spark_schema
from embarcadero.wire.schemas import RAW


class FromMemory(SpanReader):
    """A reader with two batches of its own."""

    def _rows(self, span: TaskSpan, shaper: Shaper) -> Iterator[pa.RecordBatch]:
        row = dict.fromkeys(self.schema.names)
        for _ in range(2):
            yield pa.RecordBatch.from_pylist([row], arrow_schema(RAW))


def frozen(monkeypatch: pytest.MonkeyPatch) -> int:
    """How often a process freezes in three tasks."""
    times: list[str] = []
    monkeypatch.setattr(gc, "freeze", lambda: times.append("frozen"))
    tasks._freeze.cache_clear()
    options = read_options({"brokers": "127.0.0.1:1", "topic": "t"}, streaming=False)
    reader = FromMemory(options, RAW, spark_schema(RAW, None), fail_on_lost=False)
    for _ in range(3):
        assert len(list(reader.read(TaskSpan(0, RecordPosition(0, 0), RecordPosition(2, 2), "t")))) == 2
    return len(times)


def test_a_worker_leaves_imports_out_of_garbage_collection_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark collects garbage after each task of a worker.

    Only the first task freezes: later garbage has to be collected.
    """
    monkeypatch.setitem(sys.modules, "pyspark.worker", ModuleType("pyspark.worker"))

    assert frozen(monkeypatch) == 1


def test_other_processes_do_not_freeze(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may read in the process itself, and would get reports of leaks when they end."""
    monkeypatch.delitem(sys.modules, "pyspark.worker", raising=False)

    assert frozen(monkeypatch) == 0
