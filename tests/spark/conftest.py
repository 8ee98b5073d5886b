"""Shared by all tests with Spark: one session per pytest process, one small cluster with replicas per test file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

import embarcadero as emb
from embarcadero.limits import MIB
from embarcadero.spark import processes

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

QUICK_START = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto"
"""Tests run each plan once: compiling it well takes longer than it saves."""


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """The Spark session of this process, on two cores. Change only settings that you set back."""
    from embarcadero.spark import session

    config = {"spark.driver.extraJavaOptions": QUICK_START, "spark.sql.shuffle.partitions": "2"}
    made = session("tests", "local[2]", config)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def log() -> Iterator[emb.Log]:
    """A client of a cluster of two brokers and one replica, for all tests of a file."""
    with emb.local(brokers=2, replicas=1, log_bytes=32 * MIB) as made:
        yield made
        while processes._CLIENTS:  # else they look for this cluster until the process ends
            processes._CLIENTS.popitem()[1].close()


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A topic name for this test; the test creates the topic as it needs."""
    return str(request.node.name).replace("[", "-").replace("]", "")[:100]
