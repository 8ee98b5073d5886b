"""`embarcadero publish --session`, repeated: every line is stored once, or an error explains why that is unknown."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner, Result

import embarcadero as emb
from embarcadero.cli.main import app
from embarcadero.config import load

pytestmark = pytest.mark.system

LINES = [f"line {number}" for number in range(3_000)]
TYPED = pa.schema([("user", pa.string()), ("number", pa.int64())])


@pytest.fixture(scope="module")
def log() -> Iterator[Any]:
    """Batches have at most 300 records, so that the command line's records become several batches."""
    config = load(None, {"limits.records_per_batch": 300})
    with emb.local(brokers=1, replicas=1, log_bytes=64 << 20, config=config) as log:
        yield log


def publish(log: Any, topic: str, lines: list[str], *options: str) -> Result:
    text = "".join(line + "\n" for line in lines)
    command = ["publish", topic, "--session", "job", "--brokers", log.address, *options]
    return CliRunner().invoke(app, command, input=text)


def published(log: Any, topic: str, lines: list[str], *options: str) -> tuple[int, int]:
    """How many lines a run has stored, and how many were stored before."""
    result = publish(log, topic, lines, *options)
    assert result.exit_code == 0, result.stderr
    words = result.stdout.replace(",", "").split()
    return int(words[1]), int(words[words.index("before") - 3]) if "before" in words else 0


def refused(log: Any, topic: str, lines: list[str], *options: str) -> str:
    """The reason why a run was refused; it has stored nothing."""
    before, result = log.tail(topic).seq, publish(log, topic, lines, *options)
    assert result.exit_code != 0
    assert log.tail(topic).seq == before
    return result.stderr


def stored(log: Any, topic: str) -> list[str]:
    return [value.decode() for value in log.read(topic, read="ordered").column("value").to_pylist()]


def test_added_lines_are_stored(log: Any) -> None:
    """1,500 lines, then all 3,000: 500 of them were never stored, and counted as stored before."""
    log.create_topic("grown", replicas=1)
    assert published(log, "grown", LINES[:1_500]) == (1_500, 0)
    assert published(log, "grown", LINES[:700]) == (0, 700)
    assert published(log, "grown", LINES[:1_501]) == (1, 1_500)
    assert published(log, "grown", LINES, "--ack", "2") == (1_499, 1_501)
    assert published(log, "grown", LINES) == (0, 3_000)
    assert stored(log, "grown") == LINES


def test_a_session_that_was_cut_in_other_ways_continues_after_its_records(log: Any) -> None:
    """Programs and 0.1.0 cut batches elsewhere; each holder of the name has another handle; others publish as well."""
    log.create_topic("foreign", partitions=4)
    sent = 0
    for counts in ((1, 2), (), (250,), (3,)):
        with log.publisher("foreign", session="job") as publisher, log.publisher("foreign") as other:
            for count in counts:
                publisher.publish([{"value": line.encode()} for line in LINES[sent : sent + count]])
                other.send(b"of another session")
                sent += count
    assert published(log, "foreign", LINES) == (3_000 - sent, sent)
    assert [value for value in stored(log, "foreign") if value != "of another session"] == LINES


def test_rows_of_a_schema_are_compared_as_rows(log: Any) -> None:
    """A column that was added since is null in earlier records."""
    log.create_topic("rows", schema=TYPED, partitions=2)
    rows = [json.dumps({"user": f"user {number % 5}", "number": number}) for number in range(2_000)]
    assert published(log, "rows", rows[:950]) == (950, 0)
    log.alter_topic("rows", schema=TYPED.append(pa.field("note", pa.string())))
    assert published(log, "rows", rows) == (1_050, 950)
    assert log.read("rows").column("number").to_pylist() == list(range(2_000))
    edited = [*rows[:600], json.dumps({"user": "nobody", "number": 600}), *rows[601:]]
    assert "line 601 differs from the record" in refused(log, "rows", edited)


@pytest.mark.parametrize("options", [(), ("--key-separator", " ")], ids=["other lines", "other keys"])
def test_lines_that_differ_from_the_stored_ones_are_refused(log: Any, options: tuple[str, ...]) -> None:
    """Another file under the same name used to be skipped as if it were stored."""
    topic = f"edited-{len(options)}"
    log.create_topic(topic)
    assert published(log, topic, LINES[:1_000]) == (1_000, 0)
    lines = LINES if options else [*LINES[:400], "edited", *LINES[401:]]
    why = refused(log, topic, lines, *options)
    assert ("line 1 differs" if options else "line 401 differs") in why
    assert "same lines" in why


def test_a_session_whose_beginning_is_trimmed_is_refused(log: Any) -> None:
    """The log no longer shows how many lines were in the trimmed part."""
    log.create_topic("trimmed")
    assert published(log, "trimmed", LINES[:1_000]) == (1_000, 0)
    log.trim("trimmed", before_seq=500)
    why = refused(log, "trimmed", LINES)
    assert "batch 0 is not in the log" in why
    assert "another name" in why


def test_keys_that_spread_over_partitions_are_refused(log: Any) -> None:
    """Lines of several partitions are several batches: an interrupted run did not store the first lines."""
    log.create_topic("keyed", schema=TYPED, partitions=4, key="user")
    log.create_topic("split", partitions=4)
    for topic, options in (("keyed", ()), ("split", ("--key-separator", " "))):
        assert "4 partitions" in refused(log, topic, LINES, *options)
