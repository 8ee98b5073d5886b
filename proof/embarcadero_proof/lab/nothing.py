"""A Spark data source that reads nothing: it repeats the same few Arrow batches, to measure the cost of Spark alone.

It has the shape of the source that it is compared with: as many tasks, as many batches in each, and its own batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType


def keep(batches: Sequence[pa.RecordBatch], path: str) -> None:
    """Write batches to a file for `Nothing`."""
    with pa.OSFile(path, "wb") as file, pa.ipc.new_stream(file, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


class Nothing(DataSource):
    """Options: `file` with Arrow batches, how many `tasks`, and how many `batches` each of them yields."""

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "nothing"

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002 - Spark's signature, here and below
        """Return the reader of a batch."""
        return _Batches(self.options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: ARG002, N802
        """Return the reader of a stream with one micro-batch."""
        return _Stream(self.options)


class _Batches(DataSourceReader):
    def __init__(self, options: Any) -> None:
        self._file, self._tasks, self._batches = options["file"], int(options["tasks"]), int(options["batches"])

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(number) for number in range(self._tasks)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:  # noqa: ARG002
        with pa.memory_map(self._file) as file, pa.ipc.open_stream(file) as reader:
            yield from islice(cycle(reader), self._batches)


class _Stream(DataSourceStreamReader):
    def __init__(self, options: Any) -> None:
        self._batches = _Batches(options)

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        return {"read": 0}

    def latestOffset(self) -> dict[str, int]:  # type: ignore[override]  # noqa: N802
        return {"read": 1}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        return self._batches.partitions() if start != end else []

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self._batches.read(partition)
