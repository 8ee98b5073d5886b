"""The source as Spark would call it, without Spark: fast, and every detail can be inspected."""

from __future__ import annotations

import json
import pickle
from typing import Any

from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit

import embarcadero as emb
from embarcadero.spark.read.readers import BatchReader, LimitedReader, StreamReader, UnlimitedReader
from embarcadero.spark.source import EmbarcaderoSource


def source(log: emb.Log, topic: str | None, **options: Any) -> EmbarcaderoSource:
    """The source with these options; without a topic, one of them chooses topics."""
    chosen = {} if topic is None else {"topic": topic}
    given = {"brokers": log.address} | chosen | {name: str(value) for name, value in options.items()}
    return EmbarcaderoSource(CaseInsensitiveDict(given))


def batch(log: emb.Log, topic: str | None, **options: Any) -> BatchReader:
    """A batch reader."""
    made = source(log, topic, **options)
    reader = made.reader(made.schema())
    assert isinstance(reader, BatchReader)
    return reader


def stream(log: emb.Log, topic: str | None, **options: Any) -> LimitedReader:
    """A stream reader."""
    made = source(log, topic, **options)
    reader = made.streamReader(made.schema())
    assert isinstance(reader, LimitedReader)
    return reader


def unlimited(log: emb.Log, topic: str | None, **options: Any) -> UnlimitedReader:
    """A stream reader as PySpark 4.0 and 4.1 have it."""
    return UnlimitedReader(stream(log, topic, **options)._reader)


def column(reader: BatchReader | StreamReader, tasks: list[Any], name: str = "seq") -> list[Any]:
    """A column of the tasks' results, in workers that got the reader and the task as Spark sends them."""
    sent = pickle.loads(pickle.dumps(reader))
    return [
        value for task in tasks for rows in sent.read(pickle.loads(pickle.dumps(task)))
        for value in rows.column(name).to_pylist()
    ]  # fmt: skip


def again(offset: Any) -> Any:
    """An offset as read back from the checkpoint."""
    return json.loads(json.dumps(offset))


def micro_batches(
    reader: LimitedReader, start: dict[str, Any], limit: ReadLimit | None = None, name: str = "seq"
) -> tuple[list[list[Any]], dict[str, Any]]:
    """All micro-batches until there is nothing more, and the last offset."""
    found = []
    while True:
        end = again(reader.latestOffset(again(start), limit or reader.getDefaultReadLimit()))
        if end == start:
            return found, end
        found.append(column(reader, reader.partitions(again(start), end), name))
        start = end


ALL = ReadAllAvailable()
