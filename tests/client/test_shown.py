"""What people see of the objects of the client: their repr, and the names that tab completion offers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

import embarcadero as emb
from embarcadero.client.results import Batch
from embarcadero.errors import Conflict
from embarcadero.types import Gap, GapKind
from tests.client.fake_server import FakeServer


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer(order=5) as server:
        yield server


def names(found: object) -> set[str]:
    """The names that tab completion offers."""
    return {name for name in dir(found) if not name.startswith("__")}


def test_the_objects_of_the_client_describe_themselves(server: FakeServer) -> None:
    """Their kind, their topic or address, and their state."""
    with emb.connect(server.addresses) as log:
        assert repr(log).startswith(f"<embarcadero.Log of {log.address}, connected to ")
        publisher = log.publisher("t", session="job-7")
        assert repr(publisher) == (
            "<embarcadero.Publisher into topic 't', ack=1, session 'job-7', 0 records without an outcome>"
        )
        publisher.close()
        assert repr(publisher).endswith(", closed>")
        with log.publisher("t", linger_ms=500) as publisher:
            future = publisher.send(b"1")
            assert repr(future) == "<RecordFuture waiting for the outcome>"
            assert "1 record without an outcome" in repr(publisher)
            position = future.result(10)
            assert repr(future) == f"<RecordFuture {position!r}>"
        with log.subscribe("t") as subscriber:
            batch = subscriber.poll(10)
            assert batch is not None
            assert repr(batch).startswith("Batch(lane=")
            assert "count=1" in repr(batch)
            assert repr(batch.records()[0]).startswith("Record(seq=0, key=None, value=b'1'")
            assert repr(subscriber) == f"<embarcadero.Subscriber of topic 't', at index {batch.index + 1}>"
            subscriber.pause()
        assert repr(subscriber) == "<embarcadero.Subscriber of topic 't', closed>"
        about = repr(log.describe("t"))
        assert about.startswith("TopicInfo(name='t', order=5 (strong), partitions=1, ")
        assert about.endswith("schema=None)")
    assert repr(log) == f"<embarcadero.Log of {log.address}, closed>"


def test_their_asyncio_twins_describe_themselves(server: FakeServer) -> None:
    """With the module in their name; a call that opened nothing yet shows how to open it."""

    async def main() -> None:
        opening = emb.aio.connect(server.addresses)
        assert repr(opening) == "<Opening of a Log: use it with 'async with', or await it>"
        async with opening as log:
            assert repr(log).startswith(f"<embarcadero.aio.Log of {log.address}, connected to ")
            async with log.publisher("t") as publisher:
                assert repr(publisher).startswith("<embarcadero.aio.Publisher into topic 't', ack=1, 0 records")
                future = await publisher.send(b"1")
                assert repr(future) == "<RecordAwaitable waiting for the outcome>"
                assert repr(await future) in repr(future)
            async with log.subscribe("t") as subscriber:
                assert repr(subscriber).startswith("<embarcadero.aio.Subscriber of topic 't', ")
                assert not {name for name in names(subscriber) if name.startswith("_")}
        assert repr(log).endswith(", closed>")

    asyncio.run(main())


def test_a_failed_future_and_gaps_describe_themselves() -> None:
    """With the error, and the kind of the gap."""
    from embarcadero.client.results import BatchResult, RecordFuture, Waitable

    result = BatchResult(Waitable())
    result.settle(None, Conflict("other bytes"))
    assert repr(RecordFuture(result, 0)) == "<RecordFuture failed with Conflict: other bytes>"
    empty = BatchResult(Waitable())
    empty.settle(None, None)
    assert repr(RecordFuture(empty, 0)) == "<RecordFuture done, position not known>"
    assert "gap=TRIMMED 2 to 7" in repr(Batch.of_gap(3, Gap(GapKind.TRIMMED, 2, 7), None))


def test_tab_completion_offers_the_public_names_only(server: FakeServer) -> None:
    """Names with an underscore, and names for other modules of the package, are left out."""
    assert dir(emb) == sorted(emb.__all__)
    assert sorted(dir(emb.aio)) == sorted(emb.aio.__all__)
    assert all(issubclass(getattr(emb.errors, name), emb.EmbarcaderoError) for name in dir(emb.errors))
    with emb.connect(server.addresses) as log, log.publisher("t", linger_ms=0) as publisher:
        future = publisher.send(b"1")
        future.result(10)
        with log.subscribe("t") as subscriber:
            batch = subscriber.poll(10)
            shown: list[Any] = [log, publisher, subscriber, future, batch, log.describe("t")]
            for found in shown:
                assert not {name for name in names(found) if name.startswith("_")}, found
        inner = {"brokers", "thread", "pump", "payload", "of_entry", "of_gap", "versions", "had_no_id"}
        assert not inner & set().union(*map(names, shown))
        assert {"create_topic", "publisher", "subscribe", "read", "address"} <= names(log)
        assert {"send", "publish", "flush", "close"} <= names(publisher)
        assert {"result", "exception", "done"} <= names(future)
        assert {"schema", "name", "order"} <= names(log.describe("t"))


def test_a_schema_is_part_of_the_description() -> None:
    """With the types of its columns."""
    from embarcadero.client.results import TopicInfo
    from embarcadero.wire.schemas import decode_versions, encode_schema

    columns = encode_schema(pa.schema([pa.field("id", pa.int64(), nullable=False)]))
    about = TopicInfo(name="t", lane=1, schema_version=1, versions=decode_versions(columns, [1]))
    assert "schema=" in repr(about)
    assert "int64" in repr(about)
