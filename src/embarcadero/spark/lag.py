"""The lag of streaming queries as a metric: a listener for `spark.streams.addListener`."""

from __future__ import annotations

import json
from threading import Lock
from typing import Any, Final, NamedTuple

from prometheus_client import REGISTRY, CollectorRegistry, Gauge
from pyspark.sql.streaming.listener import StreamingQueryListener

from embarcadero.errors import BadValue
from embarcadero.spark.read.options import Offset, parse_stream_offset
from embarcadero.types import count_outside

METRIC: Final = "embarcadero_spark_lag_records"


class Lag(NamedTuple):
    """Lag of one query in one topic, as of its last progress."""

    query: str  # its name, or its id if it has none
    topic: str
    records: int
    reader: str  # the name in `embarcadero status`


class LagListener(StreamingQueryListener):
    """Keeps the lag of every query that reads a topic: as a gauge for Prometheus, and by `lags()`.

        spark.streams.addListener(LagListener())
        prometheus_client.start_http_server(9400)
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._gauge = _gauge(REGISTRY if registry is None else registry)
        self._lags: dict[tuple[str, str], Lag] = {}
        self._lock = Lock()

    def lags(self) -> dict[tuple[str, str], Lag]:
        """Return the lags by id of the query and topic."""
        with self._lock:
            return dict(self._lags)

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802 - Spark's names, here and below
        """Do nothing: no progress is known yet."""

    def onQueryIdle(self, event: Any) -> None:  # noqa: N802
        """Do nothing: the lag has not changed."""

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802
        """Update the lags from the offsets of the query's sources."""
        progress = event.progress
        name = progress.name or str(progress.id)
        for source in progress.sources:
            for lag in lags_of(name, source.endOffset, source.latestOffset):
                with self._lock:
                    self._lags[str(progress.id), lag.topic] = lag
                self._gauge.labels(lag.query, lag.topic).set(lag.records)

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802
        """Remove the gauge of a query that has ended; `lags()` keeps its last values."""
        with self._lock:
            ended = [lag for (query, _), lag in self._lags.items() if query == str(event.id)]
        for lag in ended:
            self._gauge.remove(lag.query, lag.topic)


def lags_of(query: str, end: str | None, latest: str | None) -> list[Lag]:
    """Return the lag in each topic between two offsets as Spark reports them; none if another source wrote them."""
    try:
        read, there = (parse_stream_offset(json.loads(each or "null")) for each in (end, latest))
    except (BadValue, ValueError):
        return []
    found = []
    for name, each in there.topics.items():
        known = read.topics.get(name, Offset(name, read.reader))
        found.append(Lag(query, name, behind(known, each), read.reader))
    return found


def behind(read: Offset, there: Offset) -> int:
    """Count records between the read position and the end, without seqs that restarts skipped."""
    return sum(count_outside(read.of(lane).seq, end.position.seq, end.holes) for lane, end in there.lanes.items())


def _gauge(registry: CollectorRegistry) -> Gauge:
    """Return the gauge of this registry; listeners share it."""
    known = registry._names_to_collectors.get(METRIC)
    if isinstance(known, Gauge):
        return known
    what = "Records of a topic that a streaming query has not read yet"
    return Gauge(METRIC, what, ["query", "topic"], registry=registry)
