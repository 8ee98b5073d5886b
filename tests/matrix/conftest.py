"""The session and the cluster of tests/spark, in an environment with another PySpark."""

from __future__ import annotations

from tests.spark.conftest import log, spark, topic

__all__ = ["log", "spark", "topic"]
