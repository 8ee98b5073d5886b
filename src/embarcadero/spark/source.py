"""The data source `embarcadero`: what Spark asks first. Everything heavier loads when it is asked for."""

from __future__ import annotations

from pyspark.sql.datasource import DataSource


class EmbarcaderoSource(DataSource):
    """`spark.read`, `readStream`, `write` and `writeStream` of format "embarcadero"."""

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "embarcadero"
