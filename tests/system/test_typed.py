"""Topics with a schema on a real cluster: publish, evolve, read; compression; altering while programs run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from typer.testing import CliRunner

import embarcadero as emb
from embarcadero.cli.main import app
from embarcadero.client.encoding import encoded
from embarcadero.client.intake import Sealed
from embarcadero.client.results import BatchResult, RecordFuture
from embarcadero.errors import BadSchema, BadValue, Corrupt, Trimmed, UnknownSchema
from embarcadero.limits import DECODED_BYTES_MAX
from embarcadero.wire.partitioners import partition_of

pytestmark = pytest.mark.system

V1 = pa.schema([pa.field("symbol", pa.string(), nullable=False), ("price", pa.float64())])
V2 = V1.append(pa.field("venue", pa.string()))


@pytest.fixture(scope="module")
def log() -> Iterator[Any]:
    with emb.local(brokers=2, log_bytes=64 << 20) as log:
        yield log


def rows(log: Any, topic: str) -> list[dict[str, Any]]:
    return log.read(topic).drop_columns("_seq").to_pylist()


def test_a_typed_topic_accepts_matching_data_and_returns_its_schema(log: Any) -> None:
    """Arrow, rows, columns and frames all become the same columns; other data never leaves the program."""
    created = log.create_topic("ticks", order=5, schema=V1)
    assert (created.schema, created.schema_version, created.schemas) == (V1, 1, {1: V1})
    row = {"symbol": "EMB", "price": 1.5}
    with log.publisher("ticks") as publisher:
        for data in (
            pa.table({"price": [1.5], "symbol": ["EMB"]}),
            pa.RecordBatch.from_pylist([row], schema=V1),
            [row],
            {"symbol": ["EMB"], "price": [1.5]},
            pd.DataFrame([row]),
            pl.DataFrame([row]),
        ):
            publisher.publish(data)
        with pytest.raises(BadSchema, match="'price' is int64, not double"):
            publisher.publish(pa.table({"symbol": ["EMB"], "price": [1]}))
        with pytest.raises(BadSchema, match="use publish"):
            publisher.send(b"raw")
    assert rows(log, "ticks") == [row] * 6
    assert log.read("ticks").schema == V1.append(pa.field("_seq", pa.uint64(), nullable=False))
    with log.subscribe("ticks") as subscriber:
        batch = subscriber.poll(30)
        assert (batch.schema_version, batch.to_arrow().schema) == (1, V1)
        assert [record.value for record in batch] == [row]


def test_old_and_new_publishers_and_readers_continue_when_a_schema_grows(log: Any) -> None:
    """Every batch has its version; readers get all of them in the newest schema that they knew when they started."""
    log.create_topic("grows", order=5, schema=V1)
    with log.publisher("grows") as old, log.subscribe("grows") as old_reader:
        old.publish([{"symbol": "A", "price": 1.0}]).result(30)
        assert log.alter_topic("grows", schema=V2).schemas == {1: V1, 2: V2}
        with log.publisher("grows") as new:
            new.publish([{"symbol": "B", "price": 2.0, "venue": "X"}]).result(30)
        old.publish([{"symbol": "C", "price": 3.0}]).result(30)
        with pytest.raises(BadSchema, match=r"'venue' is unknown.*version 1"):
            old.publish([{"symbol": "D", "venue": "X"}])
        seen = [old_reader.poll(30) for _ in range(3)]
    assert [batch.schema_version for batch in seen] == [1, 2, 1]
    assert all(batch.to_arrow().schema == V1 for batch in seen)
    assert [row["venue"] for row in rows(log, "grows")] == [None, "X", None]
    assert log.read("grows").schema.names == ["symbol", "price", "venue", "_seq"]
    assert log.describe("grows").schema == V2
    with pytest.raises(BadSchema, match="'price' can't be removed"):
        log.alter_topic("grows", schema=pa.schema([V1.field("symbol")]))
    log.create_topic("plain")
    with pytest.raises(BadSchema, match="raw records"):
        log.alter_topic("plain", schema=V1)


def test_typed_records_are_found_by_time_and_trimmed_like_others(log: Any) -> None:
    """Subscribers and bounded reads from a time give the newest schema; session_seq counts tables."""
    began = datetime.now(UTC)
    log.create_topic("timed", order=5, schema=V1)
    with log.publisher("timed") as publisher:
        publisher.publish([{"symbol": "OLD", "price": 1.0}], session_seq=0).result(30)
        kept = publisher.publish([{"symbol": "NEW", "price": 2.0}], session_seq=1).result(30)
    log.alter_topic("timed", schema=V2)
    new = {"symbol": "NEW", "price": 2.0, "venue": None}

    assert log.read("timed", start=began).column("symbol").to_pylist() == ["OLD", "NEW"]
    assert log.trim("timed", before_seq=kept.seq).seq == kept.seq
    assert rows(log, "timed") == [new]
    with log.subscribe("timed", start="earliest") as subscriber:
        assert subscriber.poll(30).to_arrow().to_pylist() == [new]
    with pytest.raises(Trimmed):
        log.position_at("timed", began)


def test_a_version_that_the_cluster_does_not_know_is_refused(log: Any) -> None:
    """Its future ends with UnknownSchema; nothing is stored."""
    log.create_topic("unknown", schema=V1)
    publisher = log.publisher("unknown", linger_ms=0)
    publisher.pump.driver._schema = 9
    with pytest.raises(UnknownSchema):
        publisher.publish([{"symbol": "A"}]).result(30)
    publisher.close()
    assert log.tail("unknown").seq == 0


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_compressed_batches_are_smaller_and_read_back(log: Any, compression: str) -> None:
    """Raw records and tables, through the same publisher option."""
    topic, table = f"small-{compression}", pa.table({"symbol": ["EMB"] * 50_000, "price": [1.0] * 50_000})
    log.create_topic(topic, order=5)
    log.create_topic(topic + "-typed", order=5, schema=V1)
    with log.publisher(topic, compression=compression) as publisher:
        for _ in range(1_000):
            publisher.send(bytes(100))
    with log.publisher(topic + "-typed", compression=compression, batch_bytes=100_000) as publisher:
        assert publisher.publish(table).result(30).seq == 0
    assert log.read(topic).column("value").to_pylist() == [bytes(100)] * 1_000
    assert log.read(topic + "-typed").drop_columns("_seq").to_pydict() == table.to_pydict()
    batch = log.subscribe(topic).poll(30)
    assert batch.size < batch.count * 20
    with pytest.raises(BadValue, match="lz4"):
        log.publisher(topic, compression="gzip")


def test_a_compression_bomb_has_no_effect(log: Any) -> None:
    """A hostile publisher's few bytes that unpack to too much are an error for their readers, and nothing else."""
    log.create_topic("bomb", schema=pa.schema([("x", pa.binary())]))
    bomb = pa.record_batch({"x": pa.array([bytes(DECODED_BYTES_MAX)])})
    with log.publisher("bomb") as publisher:
        with pytest.raises(BadValue, match="limit of a batch"):
            publisher.publish(bomb)
        _publish_bytes(publisher, encoded(bomb, "zstd"), 1)
        publisher.publish([{"x": b"after"}]).result(30)
    with log.subscribe("bomb") as subscriber:
        first, second = subscriber.poll(30), subscriber.poll(30)
        with pytest.raises(Corrupt, match="unpacks to"):
            first.to_arrow()
        assert second.records()[0].value == {"x": b"after"}
    with pytest.raises(Corrupt):
        log.read("bomb")


def test_wrong_offsets_are_corrupt(log: Any) -> None:
    """A column whose offsets point outside is detected before it is read."""
    log.create_topic("lies", schema=pa.schema([("x", pa.string())]))
    offsets = pa.py_buffer(b"".join(n.to_bytes(4, "little") for n in (0, 1 << 30, 2)))
    lies = pa.RecordBatch.from_arrays([pa.StringArray.from_buffers(2, offsets, pa.py_buffer(b"ab"))], names=["x"])
    with log.publisher("lies") as publisher:
        _publish_bytes(publisher, lies.serialize(), 2)
    with log.subscribe("lies") as subscriber, pytest.raises(Corrupt):
        subscriber.poll(30).records()


def _publish_bytes(publisher: Any, payload: pa.Buffer, count: int) -> None:
    """Publish like a client without checks."""
    intake = publisher._intake
    result = BatchResult(intake.condition)
    with intake.lock:
        intake.add_piece(Sealed(0, result, count, payload.size, lambda: payload))
    publisher._thread.call(publisher.pump.poke)
    RecordFuture(result, 0).result(30)


def test_times_out_of_range_are_refused_and_survived(log: Any) -> None:
    """send() refuses them; a stored one affects only its own `timestamp`."""
    log.create_topic("times")
    with log.publisher("times") as publisher:
        for wrong in (1 << 62, -(1 << 62), 1 << 70, datetime(2024, 1, 1), "now"):
            with pytest.raises(BadValue):
                publisher.send(b"x", timestamp=wrong)
        publisher.send(b"first", timestamp=datetime.min.replace(tzinfo=UTC))
        publisher.send(b"last", timestamp=datetime.max.replace(tzinfo=UTC))
    found = [record.timestamp for record in log.subscribe("times").poll(30)]
    assert found == [datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)]
    with pytest.raises(Corrupt, match="timestamp_us"):
        _ = emb.Record(0, None, b"", None, 1 << 62).timestamp


def partitions_by_key(log: Any, topic: str, count: int) -> dict[Any, list[tuple[int, int]]]:
    """By key: the partition of each row, and its number, in the order of the log."""
    found: dict[Any, list[tuple[int, int]]] = {}
    with log.subscribe(topic) as subscriber:
        while count:
            batch = subscriber.poll(30)
            for row in batch.to_arrow().to_pylist():
                found.setdefault(row["user"], []).append((batch.partition, row["n"]))
            count -= batch.count
    return found


def test_rows_go_to_the_partition_of_their_key_column(log: Any) -> None:
    """In any form, in their order; rows without a key take turns, and an explicit partition is obeyed."""
    schema = pa.schema([("user", pa.string()), pa.field("n", pa.int64(), nullable=False)])
    made = log.create_topic("visits", order=5, partitions=4, schema=schema, key="user")
    assert (made.key, made.partitioner, made.first_partitions) == ("user", "murmur2", 4)
    users = [f"user-{n % 10}" for n in range(400)]
    table = pa.table({"user": users, "n": range(400)}, schema=schema)
    with log.publisher("visits", batch_bytes=1_000) as publisher:
        publisher.publish(table).result(30)
        publisher.publish(table.to_batches()[0].slice(200)).result(30)
        for _ in range(4):
            publisher.publish([{"user": None, "n": 0}]).result(30)
    found = partitions_by_key(log, "visits", 604)
    assert {partition for partition, _ in found.pop(None)} == {0, 1, 2, 3}
    assert {partition for rows in found.values() for partition, _ in rows} == {0, 1, 2, 3}
    for user, rows in found.items():
        assert {partition for partition, _ in rows} == {partition_of(user.encode(), 4, "murmur2")}
        mine = [n for n in range(400) if users[n] == user]
        assert [n for _, n in rows] == mine + [n for n in mine if n >= 200]
    with log.publisher("visits") as publisher:
        position = publisher.publish([{"user": "user-1", "n": 1}], partition=3).result(30)
    with log.subscribe("visits", start=position.seq) as subscriber:
        assert subscriber.poll(30).partition == 3


def test_the_command_line_creates_and_shows_keys(log: Any) -> None:
    """`--key` and `--partitioner`; an invalid key is refused."""
    create = ["topic", "create", "clicks", "--schema", "user:int64!, page:string", "--brokers", log.address]
    wrong = CliRunner().invoke(app, [*create, "--key", "nowhere"])
    assert wrong.exit_code
    assert "not a column of the schema" in wrong.output
    assert not CliRunner().invoke(app, [*create, "--key", "user", "--partitioner", "crc32c"]).exit_code
    told = CliRunner().invoke(app, ["topic", "describe", "clicks", "--json", "--brokers", log.address]).output
    facts = json.loads(told)
    assert (facts["key"], facts["partitioner"], facts["first_partitions"]) == ("user", "crc32c", 1)
    with pytest.raises(BadValue, match="cannot change"):
        log.alter_topic("clicks", key="page")


def test_topics_are_altered_while_programs_run(log: Any) -> None:
    """More partitions are used by new publishers; old ones continue; refused changes have a reason."""
    log.create_topic("altered", order=5)
    with log.publisher("altered") as old:
        old.send(b"1").result(30)
        assert log.alter_topic("altered", partitions=3, gap_timeout_ms=100, session_ttl_s=60).partitions == 3
        with log.publisher("altered") as new:
            new.publish([{"value": b"2"}], partition=2).result(30)
        old.send(b"3").result(30)
    assert log.read("altered").column("value").to_pylist() == [b"1", b"2", b"3"]
    for changes in ({"order": 2}, {"partitions": 1}, {"partitions": 4}, {}, {"name_": 1}):
        with pytest.raises(BadValue):
            log.alter_topic("altered", **changes)
    assert log.describe("altered").gap_timeout_ms == 100


def test_the_asyncio_client_has_it_all(log: Any) -> None:
    """Create, publish, alter, subscribe, read."""

    async def main() -> None:
        async with await emb.aio.connect(log.address) as twin:
            assert (await twin.create_topic("twin", schema=V1)).schema == V1
            async with await twin.publisher("twin", compression="lz4") as publisher:
                assert (await (await publisher.publish([{"symbol": "A"}] * 100))).seq == 0
                with pytest.raises(BadSchema):
                    await publisher.send(b"raw")
            assert (await twin.alter_topic("twin", schema=V2)).schema_version == 2
            async with await twin.subscribe("twin") as subscriber:
                assert (await subscriber.poll(30)).to_arrow().schema == V2
            assert (await twin.read("twin", 0, 10)).num_rows == 10

    asyncio.run(main())


def test_the_command_line_creates_alters_publishes_and_prints(log: Any, tmp_path: Path) -> None:
    """Rows are JSON lines in both directions."""

    def run(*arguments: str, stdin: str | None = None) -> str:
        result = CliRunner().invoke(app, [*arguments, "--brokers", log.address], input=stdin, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.stdout

    run("topic", "create", "cli", "--schema", "id:int64!, name:string")
    run("publish", "cli", "--compression", "zstd", stdin='{"id": 1, "name": "a"}\n{"id": 2}\n')
    file = tmp_path / "schema.json"
    file.write_text(json.dumps({"id": "int64!", "name": "string", "at": "timestamp[us, UTC]"}))
    assert "schema version 2" in run("topic", "alter", "cli", "--schema", str(file))
    facts = json.loads(run("topic", "describe", "cli", "--json"))
    first = "id: int64!, name: string"
    assert facts["schemas"] == {"1": first, "2": f"{first}, at: timestamp[us, tz=UTC]"}
    assert run("tail", "cli").splitlines() == ['{"id":1,"name":"a","at":null}', '{"id":2,"name":null,"at":null}']
    assert json.loads(run("tail", "cli", "--json", "--limit", "1"))["value"] == {"id": 1, "name": "a", "at": None}
    assert "2" in run("topic", "list")
