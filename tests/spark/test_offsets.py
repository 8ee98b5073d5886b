"""Options, offsets and plans: pure functions, tested exhaustively."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embarcadero.errors import BadValue
from embarcadero.limits import MIB, SPARK_TASKS_MAX
from embarcadero.spark.read.options import (
    EARLIEST,
    LATEST,
    READ_OPTIONS,
    LaneOffset,
    Offset,
    RecordPosition,
    StreamOffset,
    TaskSpan,
    Where,
    WhereBy,
    parse_offset,
    parse_stream_offset,
    read_options,
    spans,
)
from embarcadero.spark.read.view import (
    cut_positions,
    fair_shares,
    finer,
    lane_shares,
    shares,
    task_bytes,
    tightened,
    within_bytes,
)
from embarcadero.types import Cut

GIVEN = {"brokers": "127.0.0.1:9092", "topic": "orders"}


# --- options ----------------------------------------------------------------------------------------------------------
def test_every_option_is_understood() -> None:
    """Names in any case; the topic also as a path, as `load("orders")` gives it."""
    options = read_options(
        {
            "BROKERS": "127.0.0.1:9092, [::1]:9093",
            "path": "orders",
            "startingoffsets": '{"0": {"seq": 5}, "1": 7}',
            "maxRecordsPerTrigger": "10",
            "maxBytesPerTrigger": "20",
            "minPartitions": "3",
            "partitions": "2, 0",
            "columns": "seq, value",
            "read": "ordered",
            "failOnDataLoss": "FALSE",
        },
        streaming=True,
    )

    assert options.starting == Where(WhereBy.LANES, lanes=((0, Where(WhereBy.SEQ, 5)), (1, Where(WhereBy.SEQ, 7))))
    assert (options.brokers, options.topics) == ("127.0.0.1:9092,::1:9093", ("orders",))
    assert (options.max_records, options.max_bytes, options.min_partitions) == (10, 20, 3)
    assert (options.partitions, options.columns, options.read) == ((0, 2), ("seq", "value"), "ordered")
    assert options.fail_on_data_loss is False


def test_a_table_starts_at_its_beginning_and_a_stream_at_the_end() -> None:
    """By default."""
    assert read_options(GIVEN, streaming=False).starting == EARLIEST
    assert read_options(GIVEN, streaming=True).starting == LATEST
    assert read_options(GIVEN | {"startingTimestamp": "2026-01-31T12:00:00+01:00"}, streaming=True).starting == Where(
        WhereBy.TIME, 1_769_857_200_000_000
    )
    assert read_options(GIVEN | {"startingTimestamp": "1769857200000000"}, streaming=True).starting.by == WhereBy.TIME


def test_what_a_progress_report_shows_can_be_given_back() -> None:
    """An offset of a query is a start for another one, exactly."""
    told = Offset("orders", "spark-1", {0: LaneOffset(RecordPosition(7, 75, 5), (RecordPosition(3, 30),))}).json()
    options = read_options(GIVEN | {"startingOffsets": json.dumps(told)}, streaming=True)

    assert options.starting.lanes == ((0, Where(WhereBy.SEQ, 75)),)


def test_several_topics_are_named_or_matched() -> None:
    """A pattern matches whole names; positions are given by topic, then by lane."""
    given = {"brokers": "127.0.0.1:9092"}
    for name in ("topic", "topics", "path"):
        options = read_options(given | {name: "orders, clicks"}, streaming=True)
        assert (options.topics, options.several) == (("orders", "clicks"), True)
        assert options.chosen(["clicks", "views", "orders"]) == ["clicks", "orders"]
    assert not read_options(given | {"topics": "orders"}, streaming=True).several
    options = read_options(given | {"topicPattern": "shop[.].*|orders"}, streaming=True)
    assert options.several
    assert options.chosen(["shop.b", "xshop.a", "shop.a", "orders2", "orders"]) == ["orders", "shop.a", "shop.b"]

    places = {"orders": {"0": {"seq": 5}, "7": "latest"}, "clicks": "earliest"}
    wanted = (("orders", Where(WhereBy.LANES, lanes=((0, Where(WhereBy.SEQ, 5)), (7, LATEST)))), ("clicks", EARLIEST))
    for choice in ({"topics": "orders,clicks"}, {"topicPattern": ".*"}):
        options = read_options(given | choice | {"startingOffsets": json.dumps(places)}, streaming=True)
        assert options.starting == Where(WhereBy.TOPICS, topics=wanted)
    one = read_options(GIVEN | {"startingOffsets": '{"orders": {"0": 5}}'}, streaming=True)
    assert one.starting.lanes == ((0, Where(WhereBy.SEQ, 5)),)
    assert read_options(GIVEN | {"startingOffsets": '{"orders": "latest"}'}, streaming=True).starting == LATEST
    offset = Offset("orders", "r", {0: LaneOffset(RecordPosition(7, 75))}, 3)
    report = json.dumps(StreamOffset("r", {"orders": offset}, several=True).json())
    options = read_options(given | {"topicPattern": ".*", "startingOffsets": report}, streaming=True)
    assert options.starting.topics == (("orders", Where(WhereBy.LANES, lanes=((0, Where(WhereBy.SEQ, 75)),))),)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"topic": "a", "topics": "b"}, "'topic' and 'topics' both choose topics .*give one of topic, topics, topicP"),
        ({"topic": "a", "topicPattern": "b"}, "'topic' and 'topicPattern' both choose topics"),
        ({"topicPattern": "a("}, r"'topicPattern' is 'a\(': it is not a regular expression: missing \)"),
        ({"topicPattern": " "}, "'topicPattern' is ' ': it is empty"),
        ({"topics": "a,,b"}, "'topics' is 'a,,b': it has an empty"),
        ({"topics": ",".join(f"t{n}" for n in range(1_025))}, "it has 1025 topics, but a cluster has at most 1024"),
        (
            {"topics": "a,b", "startingOffsets": "5"},
            "it is a seq, which names a record of one topic, but several .*JSON by",
        ),
        ({"topics": "a,b", "startingOffsets": '{"0": {"seq": 5}}'}, "names topic '0', but this read has a, b"),
        ({"topics": "a,b", "startingOffsets": '{"a": 5}'}, "topic 'a' has 5, which is neither positions by lane, nor"),
        ({"topicPattern": ".*", "startingOffsets": '{"a": {"x": 5}}'}, "'x' is not the number of a lane"),
        ({"topic": "a", "startingOffsets": '{"a": -5}'}, "topic 'a' has -5, which is neither positions by lane"),
    ],
)
def test_an_invalid_choice_of_topics_is_reported(wrong: dict[str, str], says: str) -> None:
    """With the allowed choices."""
    with pytest.raises(BadValue, match=says):
        read_options({"brokers": "127.0.0.1:9092"} | wrong, streaming=True)


def test_a_time_ends_a_batch_read() -> None:
    """One end only, after the start, and not in the future."""
    ends = {"endingTimestamp": "2026-01-31T12:00:00Z"}
    assert read_options(GIVEN | ends, streaming=False).ending == Where(WhereBy.TIME, 1_769_860_800_000_000)
    with pytest.raises(BadValue, match=r"'endingTimestamp' can't be used with a stream .*batch reads only"):
        read_options(GIVEN | ends, streaming=True)
    with pytest.raises(BadValue, match="endingOffsets and endingTimestamp are both given"):
        read_options(GIVEN | ends | {"endingOffsets": "5"}, streaming=False)
    with pytest.raises(BadValue, match="endingTimestamp '2026-01-31T12:00:00Z' is before startingTimestamp '2026-02"):
        read_options(GIVEN | ends | {"startingTimestamp": "2026-02-01T00:00:00Z"}, streaming=False)
    with pytest.raises(BadValue, match=r"'endingTimestamp' is .*it is in the future"):
        read_options(GIVEN | {"endingTimestamp": "2126-01-31T12:00:00Z"}, streaming=False)


@pytest.mark.parametrize("name", ["", "a b", "a/b", "é", "x" * 256])
def test_the_name_of_a_reader_is_checked(name: str) -> None:
    """It is shown, and operators type it to remove it."""
    assert read_options(GIVEN | {"reader": "daily.sums-1"}, streaming=True).reader == "daily.sums-1"
    with pytest.raises(BadValue, match=r"option 'reader' is .*it is not a valid name of a reader .*1 to 255 of A-Z"):
        read_options(GIVEN | {"reader": name}, streaming=True)
    with pytest.raises(BadValue, match="'reader' can't be used with a batch read"):
        read_options(GIVEN | {"reader": "sums"}, streaming=False)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"tpoic": "x"}, r"'tpoic' does not exist .*did you mean 'topic'\?.*options are brokers, topic, topics,"),
        ({"zzz": "x"}, r"option 'zzz' does not exist \(options are"),
        ({"path": "other"}, "option 'topic' is given twice"),
        ({"topic": ""}, "option 'topic' is missing"),
        ({"brokers": "localhost"}, "option 'brokers': 'localhost' is no broker address"),
        ({"startingOffsets": "-5"}, "it is JSON, but not an object"),
        ({"startingOffsets": "[1]"}, "it is JSON, but not an object"),
        ({"startingOffsets": '{"a": 1}'}, "'a' is not the number of a lane"),
        ({"startingOffsets": '{"0": -1}'}, "the seq of lane 0 is -1"),
        ({"startingOffsets": '{"0": {"at": 1}}'}, "lane 0 has {'at': 1}"),
        ({"startingOffsets": '{"0": true}'}, "lane 0 has True"),
        ({"startingOffsets": str(1 << 63)}, "a seq is 9223372036854775808"),
        ({"startingOffsets": "earliest", "startingTimestamp": "0"}, "are both given"),
        ({"startingTimestamp": "yesterday"}, "'yesterday' is not a time"),
        ({"startingTimestamp": "2026-01-31"}, "has no time zone"),
        ({"startingTimestamp": "9999999999999999"}, "it is in the future"),
        ({"maxRecordsPerTrigger": "0"}, "it is not a number above 0"),
        ({"maxBytesPerTrigger": "10MB"}, "it is not a number above 0"),
        ({"minPartitions": str(SPARK_TASKS_MAX + 1)}, f"more than {SPARK_TASKS_MAX}"),
        ({"partitions": "1,x"}, "it is not a list of partitions"),
        ({"columns": "a,,b"}, "it has an empty or a repeated name"),
        ({"columns": "a,a"}, "it has an empty or a repeated name"),
        ({"read": "latest"}, r"'read' is 'latest': it is not a read mode \(durable or ordered\)"),
        ({"failOnDataLoss": "no"}, "neither true nor false"),
        ({"endingOffsets": "5"}, "'endingOffsets' can't be used with a stream"),
    ],
)
def test_an_invalid_option_is_named(wrong: dict[str, str], says: str) -> None:
    """With the allowed values."""
    with pytest.raises(BadValue, match=says):
        read_options(GIVEN | wrong, streaming=True)


def test_options_of_streams_do_not_go_with_batch_reads() -> None:
    """They would silently have no effect."""
    for name in ("maxRecordsPerTrigger", "maxBytesPerTrigger"):
        with pytest.raises(BadValue, match=f"{name!r} can't be used with a batch read"):
            read_options(GIVEN | {name: "1"}, streaming=False)
        assert read_options(GIVEN | {name: "1"}, streaming=None)
    assert "topic" in READ_OPTIONS


# --- offsets ----------------------------------------------------------------------------------------------------------
def _places(numbers: list[tuple[int, int, int]]) -> list[RecordPosition]:
    """Growing positions: each step is some batches, some records, some of them within a batch."""
    found, at = [], RecordPosition(0, 0)
    for batches, records, within in numbers:
        at = RecordPosition(at.index + batches, at.seq + records, min(within, records))
        found.append(at)
    return found


STEPS = st.tuples(st.integers(1, 9), st.integers(1, 99), st.integers(0, 9))
PLACES = st.lists(STEPS, min_size=2, max_size=6).map(_places)


@given(st.dictionaries(st.integers(0, 5_000), PLACES, max_size=4))
def test_offsets_survive_the_checkpoint_and_define_the_same_tasks(lanes: dict[int, list[RecordPosition]]) -> None:
    """Tasks are the pieces between cuts: all of it, nothing twice, in order."""
    start = Offset("t", "r", {lane: LaneOffset(places[0]) for lane, places in lanes.items()})
    end = Offset("t", "r", {lane: LaneOffset(places[-1], tuple(places[1:-1])) for lane, places in lanes.items()})
    start_again, end_again = (parse_offset(json.loads(json.dumps(each.json())), "t") for each in (start, end))

    assert (start_again, end_again) == (start, end)
    tasks = spans(start_again, end_again)
    assert tasks == [TaskSpan(lane, low, high, "t") for lane in sorted(lanes) for low, high in pairwise(lanes[lane])]
    assert spans(end, end) == []


def test_a_new_lane_is_read_from_its_beginning() -> None:
    """And a lane that is gone from the end has no tasks."""
    start = Offset("t", "r", {4_096: LaneOffset(RecordPosition(3, 30), ended=True)})
    end = Offset("t", "r", {4_097: LaneOffset(RecordPosition(2, 20))})

    assert spans(start, end) == [TaskSpan(4_097, RecordPosition(0, 0), RecordPosition(2, 20), "t")]
    assert parse_offset(start.json()).lanes[4_096].ended


def test_an_offset_contains_its_topic() -> None:
    """As 16 hexadecimal digits: JSON readers round large numbers. Offsets of earlier versions do not have it."""
    offset = Offset("t", "r", {0: LaneOffset(RecordPosition(3, 30))}, topic_id=(1 << 63) - 1)
    told = json.loads(json.dumps(offset.json()))
    assert told["id"] == "7fffffffffffffff"
    assert parse_offset(told, "t") == offset
    del told["id"]
    assert parse_offset(told, "t").topic_id == 0


def test_offsets_of_several_topics_name_them_by_id() -> None:
    """And an offset of one topic stays as it was."""
    orders = Offset("orders", "r", {0: LaneOffset(RecordPosition(3, 30))}, 0xABC)
    clicks = Offset("clicks", "r", {9: LaneOffset(RecordPosition(5, 52, 2), first=RecordPosition(2, 20))}, 0xDEF)
    offset = StreamOffset("r", {"orders": orders, "clicks": clicks}, several=True)
    told = json.loads(json.dumps(offset.json()))

    assert list(told["topics"]) == ["0000000000000def", "0000000000000abc"]  # by name: equal offsets are equal texts
    assert told["topics"]["0000000000000def"]["9"] == {"index": 5, "seq": 52, "within": 2, "first": [2, 20]}
    assert parse_stream_offset(told) == offset
    assert clicks.firsts() == {9: LaneOffset(RecordPosition(2, 20))}
    assert clicks.without_cuts().firsts() == {}
    assert parse_stream_offset(orders.json()) == StreamOffset("r", {"orders": orders})
    assert StreamOffset("r", {"orders": orders}).json() == orders.json()
    assert parse_stream_offset(StreamOffset("r", several=True).json()).topics == {}


@pytest.mark.parametrize(
    "told",
    [
        {"reader": 5, "topics": {}},
        {"topics": {"5": {"topic": "t"}}},
        {"reader": "r", "topics": {"x": {"topic": "t"}}},
        {"reader": "r", "topics": {"5": {"0": {"index": 1, "seq": 2}}}},
        {"reader": "r", "topics": {"5": {"topic": "t", "id": "6"}}},
        {"reader": "r", "topics": {"5": ["t"]}},
        {"reader": "r", "topics": {"5": {"topic": "t"}, "6": {"topic": "t"}}},
        {"reader": "r", "topics": {"5": {"topic": "t"}, "05": {"topic": "u"}}},
        {"reader": "r", "topics": {"5": {"topic": "t", "0": {"index": 1, "seq": 2, "first": [1]}}}},
    ],
)
def test_invalid_offsets_of_several_topics_are_refused(told: object) -> None:
    """As those of one topic are."""
    with pytest.raises(BadValue, match=r"not an offset of this source|twice"):
        parse_stream_offset(told)


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({"topic": "t", "reader": "r", "id": "x"}, "not an offset of this source"),
        ({"topic": "t", "reader": "r", "id": 7}, "not an offset of this source"),
        ({"topic": "other", "reader": "r"}, "reads topic 'other', but this query reads 't'"),
        ({"logOffset": 5}, "not an offset of this source"),
        ({"topic": "t", "reader": "r", "0": {"index": 1}}, "not an offset of this source"),
        ({"topic": "t", "reader": "r", "x": {"index": 1, "seq": 2}}, "not an offset of this source"),
        ({"topic": "t", "reader": "r", "0": {"index": 1, "seq": 2, "cuts": [[1]]}}, "not an offset of this source"),
        ([], "not an offset of this source"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(told: object, says: str) -> None:
    """A query that was changed must not continue at a wrong position."""
    with pytest.raises(BadValue, match=says):
        parse_offset(told, "t")


# --- plans ------------------------------------------------------------------------------------------------------------
@given(st.integers(1, 10_000), st.dictionaries(st.integers(0, 9), st.integers(1, 5_000), min_size=1))
def test_shares_add_up_to_the_limit(limit: int, waiting: dict[int, int]) -> None:
    """Or to all records; no share exceeds its backlog, and none is off by more than one."""
    given_out = shares(limit, waiting)
    total = sum(waiting.values())

    assert sum(given_out.values()) == min(limit, total)
    assert all(0 <= given_out[lane] <= waiting[lane] for lane in waiting)
    if limit < total:
        assert all(abs(given_out[lane] - limit * waiting[lane] / total) < 1 for lane in waiting)


@given(st.integers(1, 1_000), st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 500), min_size=1))
def test_a_limit_is_shared_evenly_by_topics(limit: int, waiting: dict[str, int]) -> None:
    """No topic gets more than another that is not served in full, except for the rest of a division."""
    given_out = fair_shares(limit, waiting)

    assert sum(given_out.values()) == min(limit, sum(waiting.values()))
    hungry = [given_out[topic] for topic in waiting if given_out[topic] < waiting[topic]]
    assert max(given_out.values()) - min(hungry, default=limit) <= 1
    if limit < len(waiting):  # then the longest backlogs move
        assert max(waiting.values()) == max(waiting[topic] for topic in waiting if given_out[topic])


def test_lanes_share_the_part_of_their_topic() -> None:
    """In proportion to their backlogs."""
    waiting = {("big", 0): 9_000, ("big", 1): 1_000, ("small", 2): 7}
    assert lane_shares(107, waiting) == {("big", 0): 90, ("big", 1): 10, ("small", 2): 7}


def test_tasks_are_neither_tiny_nor_huge() -> None:
    """4 to 32 MiB, unless more tasks are requested or there would be too many."""
    assert task_bytes(1 * MIB, None) == 4 * MIB
    assert task_bytes(80 * MIB, None) == 20 * MIB
    assert task_bytes(32_000 * MIB, None) == 32 * MIB
    assert task_bytes(64 * MIB * 8_192, None) == 128 * MIB
    assert task_bytes(1 * MIB, 8) == MIB // 8
    assert task_bytes(3, 8) == 1


@given(st.integers(1, 100_000 * MIB), st.integers(1, 64))
def test_tasks_come_in_multiples_of_the_cores(total: int, cores: int) -> None:
    """So that all cores are busy until the end; a small amount is not cut into tiny tasks for that."""
    size = task_bytes(total, None, cores)
    tasks = -(-total // size)
    assert 4 * MIB <= size <= 32 * MIB
    assert tasks <= cores or size == 4 * MIB or -(-total // (-(-tasks // cores) * cores)) == size
    if total >= 32 * MIB * cores:
        assert tasks % cores == 0


def test_a_limit_on_bytes_is_kept_in_whole_pieces() -> None:
    """At least one piece is read, however small the limit."""
    pieces = [Cut(10, 100, 50), Cut(20, 200, 50), Cut(30, 300, 1)]

    assert [within_bytes(pieces, limit).index for limit in (1, 50, 99, 100, 101)] == [10, 10, 10, 20, 30]
    assert [within_bytes(pieces, limit).bytes for limit in (1, 99, 100, 101)] == [50, 50, 100, 101]


def test_cuts_are_between_start_and_stop() -> None:
    """Also when both are inside batches, and never too many."""
    pieces = [Cut(index, index * 10, 1) for index in range(1, 8)]

    assert cut_positions(RecordPosition(2, 25, 5), RecordPosition(5, 52, 2), pieces) == (
        RecordPosition(3, 30),
        RecordPosition(4, 40),
        RecordPosition(5, 50),
    )
    assert cut_positions(RecordPosition(2, 20), RecordPosition(4, 40), pieces) == (RecordPosition(3, 30),)
    idle = [Cut(3, 30, 1), Cut(4, 40, 1), Cut(5, 40, 0), Cut(6, 50, 1), Cut(7, 50, 0)]
    assert cut_positions(RecordPosition(2, 30), RecordPosition(7, 50), idle) == (RecordPosition(4, 40),)
    assert tightened(RecordPosition(7, 50), idle) == RecordPosition(6, 50)
    many = [Cut(index, index, 1) for index in range(1, 3 * SPARK_TASKS_MAX)]
    assert (
        len(cut_positions(RecordPosition(0, 0), RecordPosition(3 * SPARK_TASKS_MAX, 3 * SPARK_TASKS_MAX), many))
        < SPARK_TASKS_MAX
    )


@given(st.integers(0, 9), st.integers(1, 50), st.integers(1, 80))
def test_one_batch_is_cut_by_seq_when_more_tasks_are_requested(within: int, records: int, tasks: int) -> None:
    """As many tasks as requested, if there are that many records; together they cover the whole."""
    start, stop = RecordPosition(3, 30 + within, within), RecordPosition(4, 30 + within + records)
    cuts = finer(start, stop, (), tasks)

    assert len(cuts) + 1 == min(tasks, records)
    assert all(low.seq < high.seq for low, high in pairwise((start, *cuts, stop)))
    assert all(cut.index == 3 and cut.seq - cut.within == 30 for cut in cuts)
