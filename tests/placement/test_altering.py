"""Altering topics: which changes are allowed, which are refused and why, and schemas in the store."""

from __future__ import annotations

from typing import Any

import msgspec
import pyarrow as pa
import pytest

from embarcadero.errors import BadSchema, BadValue, UnknownTopic
from embarcadero.limits import PARTITIONS_MAX
from embarcadero.placement.directory import Directory
from embarcadero.placement.store import MemoryStore
from embarcadero.placement.topics import altered
from embarcadero.types import Topic
from embarcadero.wire.messages import AlterTopic
from embarcadero.wire.schemas import encode_schema

V1 = pa.schema([("id", pa.int64())])
V2 = V1.append(pa.field("name", pa.string()))


@pytest.fixture
def directory() -> Directory:
    return Directory(MemoryStore())


def alter(directory: Directory, **changes: Any) -> Any:
    return directory.topics.alter(AlterTopic(name="t", **changes))


def test_only_the_given_options_change(directory: Directory) -> None:
    """And the change is in the store, where brokers and sequencers find it."""
    before = directory.topics.create("t", order=5, partitions=2)
    after = alter(directory, partitions=4, gap_timeout_ms=7, session_ttl_s=60, order=5, replicas=0)
    assert (after.partitions, after.gap_timeout_ms, after.session_ttl_s) == (4, 7, 60)
    assert (before.first_partitions, after.first_partitions) == (2, 2)
    assert (after.lane, after.order, after.on_gap) == (before.lane, before.order, before.on_gap)
    assert directory.topics.get("t") == after


def test_a_change_that_changes_nothing_is_no_change(directory: Directory) -> None:
    """A new revision of the store makes every process read it; here nothing is new."""
    directory.topics.create("t", columns=encode_schema(V1))
    revision = directory.revision()
    alter(directory, partitions=1, columns=encode_schema(V1))
    assert directory.revision() == revision


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"order": 2}, "order of topic 't' can't change"),
        ({"replicas": 3}, "replicas of topic 't' can't become 3: its records are in memory only"),
        ({"durable_on": 2}, "durable_on 2 needs replicas"),
        ({"retention_bytes": -1}, "retention_bytes -1"),
        ({"retention_s": -1}, "retention_s -1"),
        ({"partitions": 1}, "2 partitions and can't have 1"),
        ({"partitions": 3}, "whole multiples, up to 65535: 4, 6, 8"),
        ({"partitions": PARTITIONS_MAX + 1}, "can't have 65536"),
        ({"gap_timeout_ms": 0}, "gap_timeout_ms 0"),
        ({"session_ttl_s": 0}, "session_ttl_s 0"),
        ({"session_ttl_s": 1 << 40}, "session_ttl_s"),
        ({"on_gap": "ignore"}, "on_gap 'ignore'"),
        ({"columns": encode_schema(V1)}, "raw records"),
        ({"columns": b"noise"}, "raw records"),
    ],
)
def test_unchangeable_options_are_refused_with_the_reason(directory: Directory, changes: Any, words: str) -> None:
    """The rest of the same request has no effect either."""
    before = directory.topics.create("t", order=5, partitions=2)
    with pytest.raises(BadValue, match=words):
        alter(directory, **({"gap_timeout_ms": 9} | changes))
    assert directory.topics.get("t") == before


def test_on_gap_may_become_skip_and_not_go_back(directory: Directory) -> None:
    """With the default timeout of its kind, unless one is given."""
    directory.topics.create("t", order=5)
    assert alter(directory, on_gap="skip").gap_timeout_ms == 5
    with pytest.raises(BadValue, match="not remembered"):
        alter(directory, on_gap="fence")
    assert alter(directory, on_gap="skip", gap_timeout_ms=9).gap_timeout_ms == 9


def test_an_unknown_topic_can_not_be_altered(directory: Directory) -> None:
    """As for every other request."""
    with pytest.raises(UnknownTopic):
        alter(directory, partitions=2)


def test_schemas_have_versions_and_go_with_their_topic(directory: Directory) -> None:
    """The newest schema and the width of each version; a topic of the same name starts again."""
    assert directory.topics.create("t", columns=encode_schema(V1)).schema_version == 1
    assert alter(directory, columns=encode_schema(V2)).schema_version == 2
    assert alter(directory, columns=encode_schema(V2)).schema_version == 2
    topic, schema = directory.topics.described("t")
    assert (topic.schema_version, schema.widths, schema.columns) == (2, [1, 2], encode_schema(V2))
    with pytest.raises(BadSchema, match="'name' can't be removed"):
        alter(directory, columns=encode_schema(V1))
    with pytest.raises(BadSchema, match="not an Arrow schema"):
        alter(directory, columns=b"noise")
    directory.begin_generation()
    assert directory.topics.described("t")[1] == schema
    directory.topics.delete("t")
    directory.topics.create("t")
    assert directory.topics.described("t")[1].widths == []


def test_a_schema_from_outside_is_checked(directory: Directory) -> None:
    """A client with its own implementation of the protocol is refused by the same rules."""
    twice = pa.schema([("a", pa.int8()), ("a", pa.int8())]).serialize().to_pybytes()
    for columns in (b"noise", twice, bytes(1 << 20)):
        with pytest.raises(BadSchema):
            directory.topics.create("t", columns=columns)
    assert directory.topics.all() == []


def test_a_topic_of_an_older_version_remembers_its_first_partitions_when_it_is_altered(directory: Directory) -> None:
    """Its record has neither a partitioner nor a first count: it stays with CRC32C."""
    made = directory.topics.create("t", partitions=2)
    old = msgspec.json.decode(msgspec.json.encode({"name": "t", "lane": made.lane, "partitions": 2}), type=Topic)
    assert (old.partitioner, old.key, old.first_partitions) == ("crc32c", "", 0)
    assert altered(old, AlterTopic(name="t", partitions=6)).first_partitions == 2


@pytest.mark.parametrize(
    ("settings", "problem", "words"),
    [
        ({"partitioner": "md5"}, BadValue, "'murmur2' or 'crc32c'"),
        ({"key": "a"}, BadSchema, "raw records"),
        ({"key": "c", "columns": encode_schema(V1)}, BadSchema, "not a column of the schema"),
        ({"key": "f", "columns": encode_schema(pa.schema([("f", pa.float64())]))}, BadSchema, "has type double"),
    ],
)
def test_a_key_is_a_column_that_can_be_hashed(
    directory: Directory, settings: dict[str, Any], problem: type[Exception], words: str
) -> None:
    """The refusal lists the allowed types; nothing was created."""
    with pytest.raises(problem, match=words):
        directory.topics.create("t", **settings)
    assert directory.topics.all() == []


@pytest.mark.parametrize("kind", [pa.binary(), pa.string(), pa.large_string(), pa.int8(), pa.uint64()])
def test_bytes_text_and_integers_may_be_keys(directory: Directory, kind: pa.DataType) -> None:
    """The topic keeps the column's name and the partitioner."""
    made = directory.topics.create("t", key="k", partitioner="murmur2", columns=encode_schema(pa.schema([("k", kind)])))
    assert (made.key, made.partitioner) == ("k", "murmur2")
