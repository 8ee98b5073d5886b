"""Times, trims, pauses and explicit sequences against a real cluster, with the sync and the asyncio client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner, Result

import embarcadero as emb
from embarcadero.cli.main import app
from embarcadero.errors import BadValue, FuturePosition, OutOfSequence, Trimmed, UnknownTopic

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def log() -> Iterator[Any]:
    with emb.local(brokers=3, log_bytes=32 << 20) as log:
        yield log


@pytest.fixture
def topic(log: Any, request: Any) -> str:
    """A topic with three batches of two records: a0 a1, b0 b1, c0 c1."""
    name = "t-" + "".join(c if c.isalnum() else "-" for c in request.node.name)[:60]
    log.create_topic(name, order=5)
    with log.publisher(name) as publisher:
        for letter in (b"a", b"b", b"c"):
            publisher.publish(pa.table({"value": [letter + b"0", letter + b"1"]})).result(30)
    return name


def _values(table: pa.Table) -> list[bytes]:
    return table.column("value").to_pylist()


def _batches(log: Any, topic: str, **options: Any) -> list[Any]:
    """All batches and gaps from a start to the end of the topic."""
    end, found = log.tail(topic), []
    with log.subscribe(topic, **options) as subscriber:
        while not found or (found[-1].gap or found[-1].seq + found[-1].count < end.seq):
            found.append(subscriber.poll(30))
            assert found[-1] is not None
    return found


def test_reading_since_a_time(log: Any, topic: str) -> None:
    """subscribe, seek and read start at the first batch appended at or after a time, in any time zone."""
    times = [batch.append_time for batch in _batches(log, topic)]
    assert times == sorted(times)
    assert _values(log.read(topic, times[1])) == [b"b0", b"b1", b"c0", b"c1"]
    assert _values(log.read(topic, times[0], times[2])) == [b"a0", b"a1", b"b0", b"b1"]
    assert _values(log.read(topic, end=datetime.now(UTC))) == _values(log.read(topic))
    assert log.read(topic, datetime.now(UTC) + timedelta(days=1)).num_rows == 0
    elsewhere = times[2].astimezone(timezone(timedelta(hours=5, minutes=30)))
    assert [batch.seq for batch in _batches(log, topic, start=elsewhere)] == [4]
    assert log.position_at(topic, times[1]).seq == 2
    with log.subscribe(topic, start=times[2]) as subscriber:
        assert subscriber.poll(30).seq == 4
        subscriber.seek(time=times[0] - timedelta(seconds=1))
        assert subscriber.poll(30).seq == 0


def test_a_future_time_is_waited_for(log: Any, topic: str) -> None:
    """Nothing older is delivered meanwhile."""
    with log.publisher(topic, linger_ms=0) as publisher, ExitStack() as subscribers:
        lead_ms = 300
        while True:  # until the machine is fast enough for its lead
            later = datetime.now(UTC) + timedelta(milliseconds=lead_ms)
            subscriber = subscribers.enter_context(log.subscribe(topic, start=later))
            publisher.send(b"too early").result(30)
            if datetime.now(UTC) < later:
                break
            lead_ms *= 2
        assert subscriber.poll(0.05) is None
        while datetime.now(UTC) < later:
            assert subscriber.poll(0.05) is None
        publisher.send(b"in time").result(30)
        assert [record.value for record in subscriber.poll(30).records()] == [b"in time"]


def test_invalid_times_are_refused_with_advice(log: Any, topic: str) -> None:
    """Naive, before 1970, or no datetime at all: nothing is sent."""
    naive = datetime(2026, 1, 31)
    for wrong, words in ((naive, "time zone"), (datetime(1969, 12, 31, tzinfo=UTC), "1970"), ("yesterday", "datetime")):
        with pytest.raises(BadValue, match=words):
            log.subscribe(topic, start=wrong)
    with pytest.raises(BadValue, match="time zone"):
        log.read(topic, naive)
    with pytest.raises(BadValue, match="time zone"):
        log.trim(topic, before_time=naive)
    with log.subscribe(topic) as subscriber:
        with pytest.raises(BadValue, match="not a time"):
            subscriber.seek(time=5)
        with pytest.raises(BadValue, match="exactly one position"):
            subscriber.seek(seq=1, time=datetime.now(UTC))


def test_trim_drops_old_records(log: Any, topic: str) -> None:
    """It returns the new start; all readers see a typed gap or error below it, on every broker."""
    assert log.trim(topic, before_seq=3) == emb.Position(log.describe(topic).lane, log.tail(topic).start_index, 2)
    for _ in range(6):
        assert _values(log.read(topic)) == [b"b0", b"b1", b"c0", b"c1"]
        with pytest.raises(Trimmed, match="seq 2"):
            log.read(topic, 0, 3)
        assert [batch.seq for batch in _batches(log, topic)] == [2, 4]
    gap, *rest = _batches(log, topic, start=0)
    assert (gap.gap.kind, gap.gap.stop) == (emb.GapKind.TRIMMED, log.tail(topic).start_index)
    assert [batch.seq for batch in rest] == [2, 4]
    assert log.trim(topic, before_seq=0).seq == 2
    assert log.trim(topic, before_index=rest[1].index).seq == 4
    assert log.trim(topic, before_time=rest[1].append_time + timedelta(microseconds=1)).seq == 6
    assert log.read(topic).num_rows == 0


def test_an_impossible_trim_is_refused(log: Any, topic: str) -> None:
    """Beyond the end, before a future time, without a position or with two, or of nothing: nothing changes."""
    for wrong, error in (
        ({"before_seq": 7}, FuturePosition),
        ({"before_index": 1_000}, FuturePosition),
        ({"before_time": datetime.now(UTC) + timedelta(hours=1)}, FuturePosition),
        ({}, BadValue),
        ({"before_seq": 1, "before_index": 1}, BadValue),
        ({"before_seq": -1}, BadValue),
    ):
        with pytest.raises(error):
            log.trim(topic, **wrong)
    with pytest.raises(UnknownTopic):
        log.trim("nothing", before_seq=1)
    assert log.tail(topic).start_seq == 0


def test_a_trim_survives_brokers_and_sequencer(log: Any, topic: str) -> None:
    """The start is in the store: new incarnations and the next epoch know it."""
    log.trim(topic, before_seq=4)
    log.cluster.kill_broker(0)
    log.cluster.kill_sequencer()
    with log.publisher(topic) as publisher:
        publisher.send(b"d").result(60)
    tail = log.tail(topic)
    assert tail.start_seq >= 4
    with pytest.raises(Trimmed):
        log.read(topic, 0)


def test_a_paused_subscriber_keeps_its_position(log: Any, topic: str) -> None:
    """Polls end with their timeout; another thread or a seek does not wake it; resume continues."""
    with log.subscribe(topic) as subscriber:
        assert subscriber.poll(30).seq == 0
        subscriber.pause()
        assert subscriber.paused
        position = subscriber.position()
        assert subscriber.poll(0.2) is None
        assert subscriber.position() == position
        subscriber.seek(seq=4)
        assert subscriber.poll(0.2) is None
        subscriber.resume()
        assert subscriber.poll(30).seq == 4


def test_an_explicit_sequence_continues_the_session_or_is_refused(log: Any, topic: str) -> None:
    """A gap and a step back are OutOfSequence and store nothing.

    The next holder of the name knows the stored batches.
    """
    def row(text: bytes) -> pa.Table:
        return pa.table({"value": [text]})

    first = log.publisher(topic, session="job")
    assert first.next_session_seq() == 0
    first.publish(row(b"0"), session_seq=0)
    first.publish(row(b"1"))
    for wrong in (0, 1, 3):
        with pytest.raises(OutOfSequence, match="is 2"):
            first.publish(row(b"x"), session_seq=wrong)
    first.publish(row(b"2"), session_seq=2).result(30)
    with log.publisher(topic, session="job") as publisher:
        with pytest.raises(OutOfSequence, match=r"goes back.*is 3"):
            publisher.publish(row(b"2"), session_seq=2)
        publisher.publish(row(b"3"), session_seq=publisher.next_session_seq()).result(30)
    with log.publisher(topic, session="job") as again:  # the name outlives its holders, also those that closed
        assert again.next_session_seq() == 4
    assert _values(log.read(topic, 6)) == [b"0", b"1", b"2", b"3"]
    sequences = [batch.session_seq for batch in _batches(log, topic, start=6)]
    assert sequences == [0, 1, 2, 3]


def test_the_asyncio_client_does_all_of_it(log: Any, topic: str) -> None:
    """The same calls, awaited."""
    async def body() -> None:
        async with await emb.aio.connect(log.cluster.addresses, timeout=20) as twin:
            async with await twin.subscribe(topic, timeout=20) as subscriber:
                times = [(await subscriber.poll(30)).append_time for _ in range(3)]
                subscriber.pause()
                subscriber.seek(time=times[1])
                assert await subscriber.poll(0.1) is None
                subscriber.resume()
                assert (await subscriber.poll(30)).seq == 2
            assert (await twin.position_at(topic, times[2])).seq == 4
            assert (await twin.trim(topic, before_time=times[1])).seq == 2
            with pytest.raises(Trimmed):
                await twin.read(topic, 0)
            assert _values(await twin.read(topic, times[1], times[2])) == [b"b0", b"b1"]
            async with await twin.publisher(topic) as publisher:
                assert await publisher.next_session_seq() == 0
                with pytest.raises(OutOfSequence):
                    await publisher.publish(pa.table({"value": [b"x"]}), session_seq=1)
                await (await publisher.publish(pa.table({"value": [b"x"]}), session_seq=0))

    asyncio.run(body())


def test_the_command_line_reads_from_a_time_and_trims(log: Any, topic: str) -> None:
    """tail --from and topic trim; a time without a zone is one line of advice."""
    def run(*words: str) -> Result:
        return CliRunner().invoke(app, [*words, "--brokers", log.address])

    times = [batch.append_time for batch in _batches(log, topic)]
    assert run("tail", topic, "--from", times[1].isoformat()).stdout.split() == ["b0", "b1", "c0", "c1"]
    assert run("tail", topic, "--from", "1h ago").stdout.split()[0] == "a0"
    assert run("tail", topic, "--from", "2100-01-01T00:00:00Z").stdout == ""
    for wrong in ("2026-01-31T12:00:00", "10 parsecs ago", "now"):
        shown = run("tail", topic, "--from", wrong)
        assert shown.exit_code != 0
        assert "ago" in shown.stderr
    shown = run("topic", "trim", topic, "--before-time", times[2].isoformat(), "--json")
    assert json.loads(shown.stdout) == {"topic": topic, "start_index": log.tail(topic).start_index, "start_seq": 4}
    shown = run("tail", topic, "--from", times[1].isoformat())
    assert shown.stdout.split() == ["c0", "c1"]
    assert "trimmed" in shown.stderr
    assert run("topic", "trim", topic, "--before-seq", "99").exit_code != 0
