"""Orders 0 and 1 on a real cluster: brokers are killed, their lanes end, and nothing acked is lost."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

import embarcadero as emb
from embarcadero.errors import BadValue, FuturePosition
from embarcadero.types import GapKind

pytestmark = pytest.mark.system
LOG_BYTES = 64 << 20


@pytest.fixture(scope="module")
def log() -> Iterator[Any]:
    with emb.local(brokers=3, log_bytes=LOG_BYTES) as log:
        yield log


def cli(log: Any, *arguments: str, stdin: str = "") -> str:
    command = [sys.executable, "-m", "embarcadero.cli.main", *arguments, "--data-dir", str(log.cluster.data_dir)]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def publish(log: Any, topic: str, values: range, **options: Any) -> dict[bytes, Any]:
    """Publish numbers in small batches; the position of each."""
    with log.publisher(topic, batch_bytes=1_000, **options) as publisher:
        futures = {b"%d" % n: publisher.send(b"%d" % n) for n in values}
        return {value: future.result(60) for value, future in futures.items()}


def follow(subscriber: Any, found: dict[tuple[int, int], bytes], count: int) -> list[int]:
    """Read until `count` positions are known; lanes that ended meanwhile."""
    ended = []
    while len(found) < count:
        batch = subscriber.poll(60)
        assert batch is not None
        if batch.gap is not None:
            assert batch.gap.kind is GapKind.END_OF_LANE
            ended.append(batch.lane)
        for record in batch.records():
            found[batch.lane, record.seq] = record.value
    return ended


@pytest.mark.parametrize("order", [0, 1])
def test_acked_records_survive_a_broker_and_readers_continue_in_its_new_lane(log: Any, order: int) -> None:
    """kill -9 in the middle: every position holds its record; END_OF_LANE; the next incarnation has its own lane."""
    topic = f"killed-{order}"
    log.create_topic(topic, order=order)
    found: dict[tuple[int, int], bytes] = {}
    with log.subscribe(topic) as subscriber, log.publisher(topic, batch_bytes=1_000, linger_ms=0) as publisher:
        futures = {}
        for n in range(2_000):
            futures[b"%d" % n] = publisher.send(b"%d" % n)
            if n == 600:
                futures[b"0"].result(60)
                victim = log.describe(topic).lanes[0]
                log.cluster.kill_broker(victim.broker)
        placed = {value: future.result(60) for value, future in futures.items()}
        total = log.tail(topic).seq
        ended = follow(subscriber, found, total)
        for value, position in placed.items():
            assert found[position.lane, position.seq] == value
        assert set(found.values()) == placed.keys()
        placed |= publish_until_new_lane(log, topic, victim)
        ended += follow(subscriber, found, log.tail(topic).seq)
        for value, position in placed.items():
            assert found[position.lane, position.seq] == value
        while victim.lane not in ended:
            batch = subscriber.poll(60)
            assert batch is not None
            assert batch.gap is not None
            ended.append(batch.lane)
    lanes = {lane.lane: lane for lane in log.describe(topic).lanes}
    assert lanes[victim.lane].end is not None
    for _ in range(5):  # the end of the lane may come together with its last batch, or after it
        assert log.read(topic, lane=victim.lane).num_rows == lanes[victim.lane].end_seq
    assert any(lane.broker == victim.broker and lane.incarnation > victim.incarnation for lane in lanes.values())
    if order == 1:
        assert_session_order(placed)
    table = log.read(topic)
    assert table.num_rows == log.tail(topic).seq
    assert set(table.column("value").to_pylist()) == placed.keys()


def publish_until_new_lane(log: Any, topic: str, victim: Any) -> dict[bytes, Any]:
    """Publish until the broker that was killed has a lane in its next incarnation."""
    placed: dict[bytes, Any] = {}
    while not any(
        lane.broker == victim.broker and lane.incarnation > victim.incarnation for lane in log.describe(topic).lanes
    ):
        placed |= publish(log, topic, range(10_000 + len(placed), 10_030 + len(placed)))
    return placed


def assert_session_order(placed: dict[bytes, Any]) -> None:
    """Numbers below 2,000 were sent by one session: in each lane they go up."""
    by_lane: dict[int, list[tuple[int, int]]] = {}
    for value, position in placed.items():
        if int(value) < 2_000:
            by_lane.setdefault(position.lane, []).append((position.seq, int(value)))
    for places in by_lane.values():
        numbers = [number for _, number in sorted(places)]
        assert numbers == sorted(numbers)


def test_order_0_stripes_and_order_1_stays_on_one_broker(log: Any) -> None:
    """Batches of one publisher are in all lanes, or in one."""
    for order in (0, 1):
        log.create_topic(f"stripes-{order}", order=order)
    assert len({position.lane for position in publish(log, "stripes-0", range(1_000)).values()}) == 3
    pinned = publish(log, "stripes-1", range(1_000))
    assert len({position.lane for position in pinned.values()}) == 1
    assert [position.seq for position in pinned.values()] == list(range(1_000))


def test_positions_seeks_and_bounded_reads_are_per_lane(log: Any) -> None:
    """A seq or an index is a position in one lane; earliest and latest are positions in all."""
    log.create_topic("places", order=0)
    placed = publish(log, "places", range(600))
    one = placed[b"300"]
    with log.subscribe("places") as subscriber:
        found: dict[tuple[int, int], bytes] = {}
        follow(subscriber, found, 600)
        end = {tail.lane: tail.index for tail in log.tail("places").lanes}
        assert subscriber.positions() == end
        with pytest.raises(BadValue):
            subscriber.position()
        with pytest.raises(BadValue):
            subscriber.seek(seq=5)
        with pytest.raises(BadValue):
            subscriber.seek(index=5, lane=1)
        subscriber.seek(one)
        batch = subscriber.poll(30)
        assert batch is not None
        assert (batch.lane, batch.index) == (one.lane, one.index)
        assert batch.records()[one.seq - batch.seq].value == b"300"
        subscriber.seek("latest")
        publish(log, "places", range(1_000, 1_001))
        last = subscriber.poll(30)
        assert last is not None
        assert [record.value for record in last] == [b"1000"]
    part = log.read("places", one.seq, one.seq + 1, lane=one.lane)
    assert part.column("value").to_pylist() == [b"300"]
    assert part.column("_lane").to_pylist() == [one.lane]
    for wrong in ({"start": 3}, {"start": 3, "lane": 1}):
        with pytest.raises(BadValue):
            log.read("places", **wrong)
    with pytest.raises(FuturePosition):
        log.read("places", 0, 10_000, lane=one.lane)
    with pytest.raises(BadValue):
        log.subscribe("places", start=7)
    with pytest.raises(BadValue):
        publish(log, "places", range(1), session="named")


def moment() -> datetime:
    """A time between everything acked so far and everything sent from now on."""
    time.sleep(0.002)
    now = datetime.now(UTC)
    time.sleep(0.002)
    return now


def values(table: pa.Table) -> set[bytes]:
    return set(table.column("value").to_pylist())


def test_a_time_is_a_position_in_every_lane(log: Any) -> None:
    """Subscribe, seek and read from a time in all lanes; a position in one lane needs the lane."""
    log.create_topic("times", order=0)
    publish(log, "times", range(300))
    between = moment()
    later = publish(log, "times", range(300, 600))
    for attempt in ("subscribe", "seek"):
        with log.subscribe("times", start=between if attempt == "subscribe" else "earliest") as subscriber:
            if attempt == "seek":
                subscriber.seek(time=between)
            found: dict[tuple[int, int], bytes] = {}
            follow(subscriber, found, 300)
        assert set(found.values()) == later.keys()
    assert values(log.read("times", start=between)) == later.keys()
    assert values(log.read("times", end=between)) == {b"%d" % n for n in range(300)}
    one = later[b"300"].lane
    assert log.position_at("times", between, lane=one).seq == log.read("times", end=between, lane=one).num_rows
    with pytest.raises(BadValue, match="lane"):
        log.position_at("times", between)


def test_trims_are_per_lane_and_by_time_of_all(log: Any) -> None:
    """By time every lane starts there; by seq one lane does; tail, reads and readers agree."""
    log.create_topic("trims", order=0)
    publish(log, "trims", range(300))
    between = moment()
    later = publish(log, "trims", range(300, 600))
    start = log.trim("trims", before_time=between)
    tail = log.tail("trims")
    assert (start.seq, tail.start_seq, tail.seq) == (300, 300, 600)
    assert values(log.read("trims")) == later.keys()
    with log.subscribe("trims", start="earliest") as subscriber:
        found: dict[tuple[int, int], bytes] = {}
        follow(subscriber, found, 300)
        assert set(found.values()) == later.keys()
    lane = tail.lanes[0]
    place = ("--before-seq", str(lane.seq), "--lane", str(lane.lane))
    trimmed = json.loads(cli(log, "topic", "trim", "trims", *place, "--json"))
    assert (trimmed["start_index"], trimmed["start_seq"]) == (lane.index, lane.seq)
    assert log.read("trims").num_rows == 300 - (lane.seq - lane.start_seq)
    assert log.read("trims", lane=lane.lane).num_rows == 0
    for wrong in ({"before_seq": 1}, {"before_index": 1}, {"before_seq": 1, "lane": 1}):
        with pytest.raises(BadValue, match="lane"):
            log.trim("trims", **wrong)


def test_typed_topics_have_lanes_too(log: Any) -> None:
    """The schema is checked, altered and read as in any other topic, by readers of all lanes."""
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False)])
    log.create_topic("typed", order=0, schema=schema)
    rows = lambda start: pa.RecordBatch.from_pydict({"id": range(start, start + 10)}, schema=schema)  # noqa: E731
    with log.publisher("typed") as publisher:
        for start in range(0, 100, 10):
            publisher.publish(rows(start))
    wider = schema.append(pa.field("note", pa.string()))
    log.alter_topic("typed", schema=wider)
    with log.publisher("typed") as publisher:
        publisher.publish([{"id": 100, "note": "new"}])
    table = log.read("typed")
    assert table.column_names == ["id", "note", "_seq", "_lane"]
    assert sorted(table.column("id").to_pylist()) == list(range(101))
    seen: list[int] = []
    with log.subscribe("typed") as subscriber:
        while len(seen) < 101:
            batch = subscriber.poll(30)
            assert batch is not None
            assert batch.to_arrow().schema.names == ["id", "note"]
            seen += batch.to_arrow().column("id").to_pylist()
    assert sorted(seen) == list(range(101))


def test_a_paused_reader_of_lanes_keeps_its_position(log: Any) -> None:
    """Nothing comes while it is paused; everything comes afterwards, once."""
    log.create_topic("pauses", order=0)
    publish(log, "pauses", range(100))
    with log.subscribe("pauses") as subscriber:
        found: dict[tuple[int, int], bytes] = {}
        follow(subscriber, found, 100)
        subscriber.pause()
        more = publish(log, "pauses", range(100, 300))
        assert subscriber.poll(0.2) is None
        subscriber.resume()
        follow(subscriber, found, 300)
    assert len(set(found.values())) == 300
    assert more.keys() <= set(found.values())


def test_without_acks_sends_do_not_wait_and_close_delivers_the_records(log: Any) -> None:
    """ack=0: futures end with None; after close all of it is in the log of a healthy cluster."""
    for order in (0, 1):
        log.create_topic(f"quiet-{order}", order=order)
        assert set(publish(log, f"quiet-{order}", range(3_000), ack=0).values()) == {None}
        assert log.tail(f"quiet-{order}").seq == 3_000


def test_an_empty_topic_has_no_lanes_and_reads_as_nothing(log: Any) -> None:
    """Lanes are made when the first batch comes; an earlier subscriber finds them."""
    log.create_topic("empty", order=0)
    assert log.describe("empty").lanes == []
    assert (log.tail("empty").seq, log.read("empty").num_rows) == (0, 0)
    with log.subscribe("empty", start="latest") as subscriber:
        publish(log, "empty", range(1))
        batch = subscriber.poll(30)
        assert batch is not None
        assert [record.value for record in batch] == [b"0"]


def test_the_asyncio_client_reads_lanes_too(log: Any) -> None:
    """Publish, subscribe, tail, read: over the same cluster."""

    async def main() -> None:
        async with await emb.aio.connect(log.address) as twin:
            await twin.create_topic("twin", order=0)
            async with await twin.publisher("twin", batch_bytes=200) as publisher:
                futures = [await publisher.send(b"%d" % n) for n in range(100)]
                places = {await future for future in futures}
            async with await twin.subscribe("twin") as subscriber:
                seen = set()
                while len(seen) < 100:
                    batch = await subscriber.poll(30)
                    assert batch is not None
                    seen |= {emb.Position(batch.lane, batch.index, record.seq) for record in batch}
                assert seen == places
                subscriber.seek(next(iter(places)))
                assert len(subscriber.positions()) == len((await twin.tail("twin")).lanes)
            assert (await twin.read("twin")).num_rows == 100

    asyncio.run(main())


def test_the_command_line_works_with_lanes(log: Any) -> None:
    """create, publish, tail, describe, list, status."""
    assert "order 0" in cli(log, "topic", "create", "lines", "--order", "0")
    published = json.loads(cli(log, "publish", "lines", "--json", stdin="".join(f"{n}\n" for n in range(50))))
    assert published["records"] == 50
    records = [json.loads(line) for line in cli(log, "tail", "lines", "--json").splitlines()]
    assert sorted(int(record["value"]) for record in records) == list(range(50))
    described = json.loads(cli(log, "topic", "describe", "lines", "--json"))
    assert described["next_seq"] == sum(lane["next_seq"] for lane in described["lanes"]) == 50
    assert {lane["state"] for lane in described["lanes"]} == {"open"}
    assert {record["lane"] for record in records} == {lane["lane"] for lane in described["lanes"] if lane["next_seq"]}
    status = json.loads(cli(log, "status", "--json"))
    [topic] = [topic for topic in status["topics"] if topic["name"] == "lines"]
    assert (topic["order"], topic["seq"]) == (0, 50)
    assert "lines" in cli(log, "topic", "describe", "lines")
