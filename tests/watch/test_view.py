"""The display of top: it fits the terminal, and shows problems."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from embarcadero.env import LATENCY_US, Histogram
from embarcadero.types import Member, Topic
from embarcadero.watch.endpoints import NodeEndpoint, Scrape, parse
from embarcadero.watch.metrics import Page
from embarcadero.watch.top import (
    BrokerRow,
    Latency,
    Picture,
    SequencerRow,
    StoreFacts,
    TopicRow,
    duration,
    picture,
    short,
    sparkline,
    view,
)

BUSY = {"connections": 9_999, "in_bytes_s": 1.25e9, "in_records_s": 1.2e6, "out_bytes_s": 9.99e8, "pending": 8_192,
        "credit_bytes": 16 << 20, "log_occupied": 0.83}  # fmt: skip
PICTURE = Picture(
    cluster="486cff2d",
    time="03:36:56Z",
    brokers=[
        BrokerRow(broker=0, incarnation=1, address="127.0.0.1:9092", state="live", **BUSY),  # type: ignore[arg-type]
        BrokerRow(broker=1, incarnation=12, address="127.0.0.1:9093", state="silent"),
        BrokerRow(broker=2, incarnation=2, address="127.0.0.1:9094", state="live", backpressure=True),
    ],
    topics=[
        TopicRow(topic="a-topic-with-a-very-long-name-" * 3, order=5, ordered_seq=123_456_789_012, lag=12_345),
        *(TopicRow(topic=f"t{n}", order=2) for n in range(30)),
    ],
    sequencer=SequencerRow(state="live", epoch=3, rounds_s=12_000, entries_per_round=812.5, sessions=100_000),
    latencies=[
        Latency(what="publish to ack", count=10, p50=0.0009, p99=0.012),
        Latency(what="round", count=0, p50=None, p99=None),
    ],
)


@pytest.mark.parametrize("width", [80, 140])
def test_it_fits_the_terminal(width: int) -> None:
    """Every line of a crowded cluster is whole at 80 and at 140 columns."""
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(view(PICTURE, [0.0, 5.0, 10.0] * 30, width))
    text = console.export_text()

    assert max(map(len, text.splitlines())) <= width
    assert ("123,456,789,012" in text, "12,345" in text, "silent" in text, "full" in text) == (True,) * 4
    assert "100,000 sessions" in text.replace("\n", " ")
    assert "and 11 more" in text
    assert ("127.0.0.1:9093" in text) == (width == 140)


def test_numbers_are_readable() -> None:
    """Three digits and a unit."""
    assert [short(n) for n in (0, 7.25, 99.96, 999.6, 1_234_567, 2.5e9)] == ["0", "7.25", "100", "1k", "1.23M", "2.5G"]
    assert [duration(s) for s in (None, 0.00005, 0.0123, 2.5)] == ["-", "50 µs", "12.3 ms", "2.5 s"]
    assert sparkline([0, 4, 8]) == "▁▅█"
    assert sparkline([0, 0]) == "▁▁"


def test_a_process_with_several_roles_counts_once() -> None:
    """All roles in one process: each broker has its own line, and latencies are not counted twice."""
    page = Page()
    seen = Histogram(LATENCY_US)
    seen.add(400)
    for broker in (0, 1):
        page.histogram("embarcadero_publish_latency_seconds", seen, 1e-6, broker=broker)
        page.put("embarcadero_connections", 3 + broker, broker=broker)
    page.put("embarcadero_epoch", 9)
    place = NodeEndpoint(roles="sequencer,broker:0,broker:1", pid=1, host="127.0.0.1", port=1)
    members = [Member(broker=n, incarnation=1, handle=n, host="127.0.0.1", port=1, pid=1) for n in (0, 1, 2)]
    facts = StoreFacts(cluster="c", members=members, topics=[Topic(name="t", lane=0)], epoch=9)
    shown = picture(facts, "now", {}, {place.roles: Scrape(place, 1.0, parse(page.text().decode()))})

    assert [(line.state, line.connections) for line in shown.brokers] == [("live", 3), ("live", 4), ("silent", 0)]
    assert (shown.sequencer.state, shown.sequencer.epoch) == ("live", 9)
    assert [latency.count for latency in shown.latencies] == [2, 0, 0]
    assert [(topic.topic, topic.lag) for topic in shown.topics] == [("t", None)]
