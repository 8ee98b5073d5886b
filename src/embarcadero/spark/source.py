"""The data source `embarcadero`, Spark's entry point. Heavier modules load when they are needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from embarcadero.spark.versions import check_pyspark

try:
    from pyspark.sql.datasource import (
        DataSource,
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
except ImportError:
    check_pyspark()  # raises with the version that is needed
    raise

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


class EmbarcaderoSource(DataSource):
    """`spark.read`, `readStream`, `write` and `writeStream` of format "embarcadero"."""

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "embarcadero"

    def schema(self) -> StructType:
        """Return the columns of the topic, or those in the option `columns`."""
        check_pyspark()
        from embarcadero.spark.read.readers import frame_schema

        return frame_schema(self.options)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a batch."""
        check_pyspark()
        from embarcadero.spark.read.readers import batch_reader

        return batch_reader(self.options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Return the reader of a stream."""
        check_pyspark()
        from embarcadero.spark.read.readers import stream_reader

        return stream_reader(self.options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return the writer of a batch."""
        from embarcadero.spark.sink import batch_writer

        return batch_writer(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802 - Spark's name
        """Return the writer of a stream; Spark calls this for every micro-batch, and once more to commit it."""
        from embarcadero.spark.sink import stream_writer

        return stream_writer(self.options, schema, overwrite)
