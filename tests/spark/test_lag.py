"""The lag of queries, from the offsets that Spark reports."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

from prometheus_client import CollectorRegistry, generate_latest

from embarcadero.spark.lag import Lag, LagListener, lags_of
from embarcadero.spark.read.options import LaneOffset, Offset, RecordPosition, StreamOffset

READ = Offset("orders", "spark-1", {0: LaneOffset(RecordPosition(3, 30)), 1: LaneOffset(RecordPosition(9, 90))})
THERE = Offset(
    "orders",
    "",
    {0: LaneOffset(RecordPosition(5, 55)), 1: LaneOffset(RecordPosition(9, 90)), 2: LaneOffset(RecordPosition(1, 7))},
)


def event(end: str | None, latest: str | None, name: str | None = "sums") -> SimpleNamespace:
    """A progress report of one query, as far as the listener looks at it."""
    source = SimpleNamespace(endOffset=end, latestOffset=latest)
    return SimpleNamespace(progress=SimpleNamespace(id="q", name=name, sources=[source]), id="q")


def test_the_lag_is_what_is_between_two_offsets() -> None:
    """Over all lanes, those that came since included."""
    end, latest = json.dumps(READ.json()), json.dumps(THERE.json())

    assert lags_of("sums", end, latest) == [Lag("sums", "orders", 25 + 7, "spark-1")]
    assert lags_of("sums", latest, end) == [Lag("sums", "orders", 0, "")]


def test_seqs_skipped_by_a_restart_are_no_lag() -> None:
    """The end of a topic includes its holes; a query that read up to a hole lags by the records above it."""
    holes = ((40, 4_294_967_296),)
    there = Offset("orders", "", {0: LaneOffset(RecordPosition(4_194_306, 4_294_967_299), holes=holes)})

    assert lags_of("sums", json.dumps(READ.json()), json.dumps(there.json())) == [Lag("sums", "orders", 13, "spark-1")]


def test_each_of_several_topics_has_its_lag() -> None:
    """A new topic counts from its beginning; a deleted topic has none."""
    clicks = Offset("clicks", "", {3: LaneOffset(RecordPosition(2, 20))}, 5)
    read = StreamOffset("spark-1", {"orders": replace(READ, topic_id=4)}, several=True)
    there = StreamOffset("", {"orders": replace(THERE, topic_id=4), "clicks": clicks}, several=True)

    assert lags_of("sums", json.dumps(read.json()), json.dumps(there.json())) == [
        Lag("sums", "clicks", 20, "spark-1"),
        Lag("sums", "orders", 32, "spark-1"),
    ]
    assert lags_of("sums", json.dumps(there.json()), json.dumps(read.json())) == [Lag("sums", "orders", 0, "")]


def test_offsets_of_other_sources_are_ignored() -> None:
    """A query may read more than one source; and before the first micro-batch there is none."""
    end = json.dumps(READ.json())
    foreign = [(None, end), (end, None), ('{"logOffset":0}', end), ("-", end)]

    assert [lags_of("q", *pair) for pair in foreign] == [[]] * 4


def test_the_listener_keeps_a_gauge_for_as_long_as_the_query_runs() -> None:
    """Two listeners share it; the last lag stays known."""
    registry = CollectorRegistry()
    listener, _ = LagListener(registry), LagListener(registry)
    listener.onQueryStarted(event(None, None))
    listener.onQueryIdle(event(None, None))
    listener.onQueryProgress(event(json.dumps(READ.json()), json.dumps(THERE.json())))
    line = b'embarcadero_spark_lag_records{query="sums",topic="orders"} 32.0'

    assert line in generate_latest(registry)
    listener.onQueryTerminated(event(None, None))
    assert line not in generate_latest(registry)
    assert listener.lags()["q", "orders"].records == 32
