"""Makes `format("embarcadero")` known to every Spark session: packages `pyspark_*` are looked through for it."""

from __future__ import annotations

from embarcadero.spark.source import EmbarcaderoSource as DefaultSource

__all__ = ["DefaultSource"]
