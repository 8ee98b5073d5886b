"""Several topics in one read, against a real cluster, called as Spark calls the source but without Spark."""

from __future__ import annotations

import json
import logging
from collections import Counter
from typing import Any

import pyarrow as pa
import pytest

import embarcadero as emb
from embarcadero.errors import BadSchema, BadValue, RecordsLost, Trimmed, UnknownTopic
from embarcadero.spark.read.readers import StreamReader, UnlimitedReader
from tests.spark.sources import ALL, again, batch, column, micro_batches, source, stream, unlimited
from tests.spark.test_source import fill

Rows = list[tuple[str, int]]


def made(log: emb.Log, counts: dict[str, int], **options: Any) -> None:
    """Topics with this many records each."""
    for name, count in counts.items():
        log.create_topic(name, replicas=1, **options)
        fill(log, name, count)


def rows(reader: StreamReader, start: Any, end: Any) -> Rows:
    """Topic and seq of each record between two offsets, as returned by tasks."""
    tasks = reader.partitions(again(start), again(end))
    return list(zip(column(reader, tasks, "topic"), column(reader, tasks), strict=True))


def all_of(counts: dict[str, int]) -> Rows:
    """Topic and seq of all records, in the order in which a read has them: by name, then by seq."""
    return [(name, seq) for name in sorted(counts) for seq in range(counts[name])]


def test_a_batch_read_has_the_records_of_all_topics(log: emb.Log) -> None:
    """Each topic in its order; with positions by topic; of several lanes, too; hidden topics never match."""
    counts = {"b-orders": 50, "b-clicks": 30, "b-views": 20}
    made(log, {name: count for name, count in counts.items() if name != "b-views"})
    made(log, {"b-views": counts["b-views"]}, order=0)
    hidden = "__staged.0123456789abcdef"
    log.create_topic(hidden, order=0, replicas=1)

    for choice in ({"topics": ",".join(counts)}, {"topicPattern": "(b-|__).*"}):
        reader = batch(log, None, columns="topic,seq", minPartitions=6, **choice)
        tasks = reader.partitions()
        assert len(tasks) >= 6
        assert sorted(zip(column(reader, tasks, "topic"), column(reader, tasks), strict=True)) == all_of(counts)
    begun = stream(log, None, topicPattern="(b-|__).*").initialOffset()
    assert [each["topic"] for each in begun["topics"].values()] == sorted(counts)
    log.delete_topic(hidden)

    lane = log.describe("b-orders").lane
    places = json.dumps({"b-orders": {str(lane): {"seq": 44}}, "b-clicks": "latest"})
    reader = batch(log, None, topicPattern="b-.*", startingOffsets=places)
    assert Counter(column(reader, reader.partitions(), "topic")) == {"b-orders": 6, "b-views": 20}
    places = json.dumps({"b-orders": {str(lane): 7}, "b-clicks": "earliest"})
    reader = batch(log, "b-orders,b-clicks", endingOffsets=places)
    assert column(reader, reader.partitions()) == list(range(7))

    with pytest.raises(
        BadValue, match="'startingOffsets' names topic 'nothing', but the topics are b-clicks, b-orders"
    ):
        batch(log, None, topicPattern="b-.*", startingOffsets='{"nothing": "latest"}').partitions()
    with pytest.raises(UnknownTopic, match="there is no topic 'nothing'"):
        source(log, "b-orders,nothing").schema()
    with pytest.raises(UnknownTopic, match=r"no topic matches the pattern 'nothing\.\*'"):
        batch(log, None, topicPattern="nothing.*").partitions()


def test_a_time_ends_a_read_of_each_topic(log: emb.Log) -> None:
    """The first batch appended at that time or later is not read; a range by time is the same whenever it is read."""
    made(log, {"time-a": 30, "time-b": 30})
    fill(log, "time-a", 20, first=30)
    moments = {name: [each for batches in log.scan(name) for each in batches] for name in ("time-a", "time-b")}
    moment = moments["time-b"][1].append_us
    wanted = {name: sum(each.count for each in found if each.append_us < moment) for name, found in moments.items()}
    assert wanted["time-a"] in (30, 40)
    assert wanted["time-b"] == 10

    reader = batch(log, "time-a,time-b", endingTimestamp=moment)
    assert Counter(column(reader, reader.partitions(), "topic")) == wanted
    start = moments["time-a"][1].append_us
    reader = batch(log, "time-a", startingTimestamp=start, endingTimestamp=moment)
    assert column(reader, reader.partitions()) == list(range(10, wanted["time-a"]))
    assert batch(log, "time-a", startingTimestamp=start, endingTimestamp=start).partitions() == []
    reader = batch(log, "time-a", endingTimestamp=moments["time-a"][-1].append_us + 1)
    assert column(reader, reader.partitions()) == list(range(50))
    with pytest.raises(BadValue, match=r"endingTimestamp \(seq 10\) is before startingOffsets \(seq 15\) in lane"):
        batch(log, "time-b", startingOffsets=15, endingTimestamp=moment).partitions()


def test_a_topic_with_a_schema_is_refused_by_name(log: emb.Log) -> None:
    """When the frame is loaded, and when a new topic matches the pattern."""
    made(log, {"t-raw": 10})
    flow = stream(log, None, topicPattern="t-.*", startingOffsets="earliest")
    start = flow.initialOffset()
    log.create_topic("t-typed", schema=pa.schema([("n", pa.int64())]))
    says = "topic 't-typed' has a schema, and a read of several topics takes raw topics only .*one by one"
    for choice in ({"topics": "t-raw,t-typed"}, {"topicPattern": "t-.*"}):
        with pytest.raises(BadSchema, match=says):
            source(log, None, **choice).schema()
    with pytest.raises(BadSchema, match=says):
        flow.latestOffset(start, ALL)


def test_a_stream_reads_several_topics_and_new_ones(log: emb.Log, caplog: pytest.LogCaptureFixture) -> None:
    """Each record once, in order, over a restart; a new topic from its earliest record; a deleted one is named."""
    counts = {"s-a": 40, "s-b": 25}
    made(log, counts)
    flow = stream(log, None, topicPattern="s-.", startingOffsets="earliest", reader="shop")
    start = flow.initialOffset()
    first = again(flow.latestOffset(start, ALL))
    assert start["reader"] == first["reader"] == "shop"
    assert rows(flow, start, first) == all_of(counts)
    assert flow.latestOffset(first, ALL) == first

    made(log, {"s-c": 60, "s-xx": 10})
    log.trim("s-c", before_seq=20)
    second = again(flow.latestOffset(first, ALL))
    assert rows(flow, first, second) == [("s-c", seq) for seq in range(20, 60)]
    fill(log, "s-a", 10, first=40)
    later = stream(log, None, topicPattern="s-.", startingOffsets="earliest", reader="shop")  # a restart
    assert rows(later, first, second) == [("s-c", seq) for seq in range(20, 60)]
    third = again(later.latestOffset(second, ALL))
    assert rows(later, second, third) == [("s-a", seq) for seq in range(40, 50)]
    assert "first" not in json.dumps(third)
    renamed = stream(log, None, topicPattern="s-.", reader="mart")
    assert again(renamed.latestOffset(second, ALL)) == third | {"reader": "mart"}
    assert later.latestOffset(third, ALL) == third  # which reports its progress to the cluster
    while not all([(each.reader, each.lag) for each in log.readers(name)] == [("shop", 0)] for name in ("s-a", "s-c")):
        later.commit(third)
    assert [each["topic"] for each in later.reportLatestOffset()["topics"].values()] == ["s-a", "s-b", "s-c"]

    log.trim("s-c", before_seq=50)  # the second micro-batch began below: this is not a new topic's start
    with pytest.raises(Trimmed, match=r"records \[20, 50\) of lane .* of topic 's-c' were trimmed"):
        rows(stream(log, None, topicPattern="s-."), first, second)

    gone = log.describe("s-b").id
    log.delete_topic("s-b")
    with pytest.raises(RecordsLost, match=rf"topic 's-b' \(id {gone:016x}\) was deleted during this .*failOnDataL"):
        later.latestOffset(third, ALL)
    with pytest.raises(RecordsLost, match=r"topic 's-b' .* was deleted"):
        rows(later, start, first)
    loose = stream(log, None, topicPattern="s-.", failOnDataLoss="false")
    fill(log, "s-a", 5, first=50)
    with caplog.at_level(logging.WARNING, "embarcadero.spark"):
        fourth = again(loose.latestOffset(third, ALL))
        assert rows(loose, third, fourth) == [("s-a", seq) for seq in range(50, 55)]
    assert caplog.text.count("topic 's-b'") == 1
    made(log, {"s-b": 7})  # another topic of that name
    assert rows(loose, fourth, loose.latestOffset(fourth, ALL)) == [("s-b", seq) for seq in range(7)]
    with pytest.raises(RecordsLost, match="topic 's-b' was deleted and created again"):
        later.latestOffset(third, ALL)


def test_limits_are_shared_by_topics(log: emb.Log) -> None:
    """To the record.

    A backlog of one topic does not delay the others; AvailableNow ends at the records that were there.
    """
    counts = {"l-big": 400, "l-mid": 60, "l-small": 10}
    made(log, counts)
    flow = stream(log, None, topicPattern="l-.*", startingOffsets="earliest", maxRecordsPerTrigger=50)
    at = flow.initialOffset()
    flow.prepareForTriggerAvailableNow()
    fill(log, "l-small", 10, first=10)
    made(log, {"l-new": 10})
    found = []
    while (end := again(flow.latestOffset(again(at), flow.getDefaultReadLimit()))) != at:
        found.append(rows(flow, at, end))
        at = end
    assert [len(each) for each in found] == [50] * 9 + [20]
    assert Counter(name for name, _ in found[0]) == {"l-small": 10, "l-mid": 20, "l-big": 20}
    for name, count in counts.items():
        assert [seq for each in found for topic, seq in each if topic == name] == list(range(count))
    assert not [name for each in found for name, _ in each if name == "l-new"]

    sizes = {each.size for batches in log.scan("l-big") for each in batches}
    flow = stream(log, "l-big,l-mid,l-small", startingOffsets="earliest", maxBytesPerTrigger=max(sizes) * 9)
    start = flow.initialOffset()
    end = flow.latestOffset(start, flow.getDefaultReadLimit())
    taken = Counter(name for name, _ in rows(flow, start, end))
    assert taken["l-small"] == 20
    assert 20 <= taken["l-mid"] <= taken["l-big"] <= 50
    assert sum(taken.values()) <= 90
    assert sorted(seq for each in micro_batches(flow, end)[0] for seq in each) == sorted(
        seq for name, count in {**counts, "l-small": 20}.items() for seq in range(taken[name], count)
    )


@pytest.mark.parametrize("kind", ["limited", "unlimited"])
def test_a_query_of_one_topic_continues_with_several(log: emb.Log, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """From an offset of one topic, with an id and without; an omitted topic is missed; other topics are refused."""
    one, two = f"one-{kind}", f"two-{kind}"
    made(log, {one: 30, two: 20})
    make, latest = (stream, lambda flow, at: flow.latestOffset(at, ALL)) if kind == "limited" else (
        unlimited, lambda flow, _: flow.latestOffset()
    )  # fmt: skip
    flow = make(log, one, startingOffsets="earliest")
    start = flow.initialOffset()
    assert set(start) == {"topic", "reader", "id", str(log.describe(one).lane)}
    end = again(latest(flow, start))
    fill(log, one, 10, first=30)
    for old in (end, {key: value for key, value in end.items() if key != "id"}):
        both = make(log, None, topics=f"{one},{two}")
        last = again(latest(both, old))
        assert rows(both, old, last) == [(one, seq) for seq in range(30, 40)] + [(two, seq) for seq in range(20)]
        assert {each["topic"] for each in last["topics"].values()} == {one, two}
        assert again(latest(both, last)) == last

    with pytest.raises(BadValue, match=f"of a query that reads topic '{two}', but this query reads '{one}'"):
        rows(make(log, one), last, last)
    with pytest.raises(BadValue, match=f"reads topic '{one}', but this query reads topics that match 'x'"):
        rows(make(log, None, topicPattern="x"), last, last)
    made(log, {f"three-{kind}": 5})
    other = f"{two},three-{kind}"
    with pytest.raises(BadValue, match=f"also reads topic '{one}', but this query does not .*read this topic, too"):
        rows(make(log, other), last, last)
    loose = make(log, other, failOnDataLoss="false")
    assert rows(loose, last, latest(loose, last)) == [(f"three-{kind}", seq) for seq in range(5)]
    assert "also reads topic" in caplog.text


def test_without_admission_control_topics_come_and_go_as_well(log: emb.Log) -> None:
    """As PySpark 4.0 and 4.1 ask: a new topic from its earliest record, no empty micro-batch, a deleted one named."""
    counts = {"u-a": 30, "u-b": 20}
    made(log, counts)
    flow = unlimited(log, None, topicPattern="u-.*", startingOffsets="earliest")
    assert isinstance(flow, UnlimitedReader)
    start = flow.initialOffset()
    first = again(flow.latestOffset())
    assert rows(flow, start, first) == all_of(counts)
    assert again(flow.latestOffset()) == first
    made(log, {"u-c": 50})
    log.trim("u-c", before_seq=10)
    later = unlimited(log, None, topicPattern="u-.*")
    second = again(later.latestOffset())
    assert rows(later, first, second) == [("u-c", seq) for seq in range(10, 50)]
    assert again(unlimited(log, None, topicPattern="u-.*", startingOffsets="latest").initialOffset()) == second

    log.delete_topic("u-a")
    with pytest.raises(RecordsLost, match=r"topic 'u-a' .* was deleted during this query"):
        rows(later, second, later.latestOffset())
    loose = unlimited(log, None, topicPattern="u-.*", failOnDataLoss="false")
    fill(log, "u-b", 5, first=20)
    assert rows(loose, second, loose.latestOffset()) == [("u-b", seq) for seq in range(20, 25)]


def test_a_pattern_may_match_nothing_yet(log: emb.Log) -> None:
    """A stream waits for topics; a topic that was there counts from where the query starts."""
    for make in (stream, unlimited):
        name = f"later-{make.__name__}"
        flow = make(log, None, topicPattern=f"{name}.*", startingOffsets="latest")
        start = again(flow.initialOffset())
        assert start["topics"] == {}
        given = (start, ALL) if make is stream else ()
        assert again(flow.latestOffset(*given)) == start
        made(log, {name: 15})
        assert rows(flow, start, flow.latestOffset(*given)) == [(name, seq) for seq in range(15)]
