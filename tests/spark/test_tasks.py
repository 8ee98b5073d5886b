"""What tasks do in a worker, without Spark."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pyarrow as pa
import pytest

from embarcadero.spark.read import tasks
from embarcadero.spark.read.frame import Shaper, arrow_schema, spark_schema
from embarcadero.spark.read.offsets import LanePosition, TaskSpan
from embarcadero.spark.read.options import read_options
from embarcadero.spark.read.tasks import SpanReader
from embarcadero.wire.schemas import RAW


class FromMemory(SpanReader):
    """A reader of two batches that it has."""

    def _rows(self, span: TaskSpan, shaper: Shaper) -> Iterator[pa.RecordBatch]:
        row = dict.fromkeys(self.schema.names)
        for _ in range(2):
            yield pa.RecordBatch.from_pylist([row], arrow_schema(RAW))


def test_imports_are_left_out_of_garbage_collection_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark collects garbage after each task of a worker. Only the first task freezes: later garbage is to go."""
    frozen: list[int] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(len(frozen)))
    tasks._freeze.cache_clear()
    options = read_options({"brokers": "127.0.0.1:1", "topic": "t"}, streaming=False)
    reader = FromMemory(options, RAW, spark_schema(RAW, None), fail_on_lost=False)

    for _ in range(3):
        assert len(list(reader.read(TaskSpan(0, LanePosition(0, 0), LanePosition(2, 2), "t")))) == 2

    assert frozen == [0]
