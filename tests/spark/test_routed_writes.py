"""Rows that choose their topic: one decision for all topics of a commit, so a write is in all of them or in none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pytest

import embarcadero as emb
from embarcadero.client.results import TopicInfo
from embarcadero.errors import BadSchema, BadValue, TopicReplaced, UnknownTopic
from embarcadero.spark import sink
from embarcadero.spark.shape import Routes, WriteOptions, check_frame, shape_of
from embarcadero.spark.sink import StagedMessage, TaskWriter, WriteWork
from embarcadero.staging.ledger import Publication, open_home
from embarcadero.types import ROUTED_TOPIC, staging_topic
from tests.spark.test_staged_writes import dies, sweep

FRAME = pa.schema([("topic", pa.string()), ("key", pa.string()), ("value", pa.string())])
LITTLE, MUCH = "x" * 50, "x" * 5_000


@pytest.fixture
def names(log: emb.Log, topic: str) -> list[str]:
    """Three topics: of both orders, one with partitions."""
    made = [f"{topic}.{letter}" for letter in "abc"]
    for name, order, partitions in zip(made, (2, 5, 2), (1, 1, 3), strict=True):
        log.create_topic(name, order=order, partitions=partitions, replicas=1)
    return made


def writer(log: emb.Log, frame: pa.Schema = FRAME, **options: Any) -> TaskWriter:
    """A writer without the option `topic`."""
    given = WriteOptions(brokers=log.address, topic=None, batch_bytes=2_000, **options)
    check_frame(frame, given)
    return TaskWriter(given, Routes(log.thread.wait(open_home(log.twin)), frame, given, 0))


def rows(names: Sequence[str | None], numbers: range, text: str) -> Iterator[pa.RecordBatch]:
    """Rows that take turns among the topics."""
    columns = {
        "topic": [names[number % len(names)] for number in numbers],
        "key": [str(number) for number in numbers],
        "value": [f"{number} {text}" for number in numbers],
    }
    yield pa.RecordBatch.from_pydict(columns, schema=FRAME)


def staged(
    log: emb.Log, names: Sequence[str | None], *tasks: range, write: str, epoch: int = 0, text: str = LITTLE
) -> list[StagedMessage]:
    """The tasks' messages to the driver."""
    task, work = writer(log), WriteWork(write, epoch, "attempt")
    return [StagedMessage(task.write(work, number, rows(names, numbers, text))) for number, numbers in enumerate(tasks)]


def stored(log: emb.Log, name: str) -> list[int]:
    """The numbers in a topic, in their order."""
    if not log.tail(name).seq:
        return []
    return [int(value.split()[0]) for value in log.read(name).column("value").to_pylist()]


@pytest.mark.parametrize("text", [LITTLE, MUCH], ids=["little", "much"])
def test_each_row_goes_to_the_topic_that_it_names(log: emb.Log, names: list[str], text: str) -> None:
    """Once, in the order of its task, when the driver commits. The topic that has the decisions is hidden."""
    messages = staged(log, names, range(300), range(300, 500), range(0), write=names[0], text=text)
    assert [stored(log, name) for name in names] == [[], [], []]
    for _ in range(2):
        sink.publish(writer(log), messages)
    for number, name in enumerate(names[:2]):
        assert stored(log, name) == list(range(number, 500, 3))
    assert sorted(stored(log, names[2])) == list(range(2, 500, 3))
    sink.publish(writer(log), staged(log, names[:1], range(900, 910), write=names[0], epoch=1))
    assert [len(stored(log, name)) for name in names] == [177, 167, 166]
    assert ROUTED_TOPIC not in [each.name for each in log.topics()]


@pytest.mark.parametrize("text", [LITTLE, MUCH], ids=["little", "much"])
@pytest.mark.parametrize("moment", ["decide", "publish", "second", "finish"])
@pytest.mark.parametrize("helper", ["driver", "sweep"])
def test_a_driver_that_dies_leaves_all_or_nothing(
    log: emb.Log, names: list[str], monkeypatch: pytest.MonkeyPatch, moment: str, text: str, helper: str
) -> None:
    """Also between two topics. The next driver, with other rows, or the sweep completes a decided write."""
    if moment == "second":
        whole, count = Publication.publish, []

        async def dead(publication: Publication, topic: TopicInfo) -> TopicInfo:
            count.append(topic)
            if len(count) == 2:
                raise RuntimeError("killed")
            return await whole(publication, topic)

        monkeypatch.setattr(Publication, "publish", dead)
    else:
        dies(monkeypatch, moment)
    with pytest.raises(RuntimeError, match="killed"):
        sink.publish(writer(log), staged(log, names, range(200), write=names[0], text=text))
    monkeypatch.undo()
    assert [bool(stored(log, name)) for name in names] == [moment in ("second", "finish"), *[moment == "finish"] * 2]

    decided = moment not in ("append", "decide")
    if helper == "sweep":
        sweep(log)
    else:
        sink.publish(writer(log), staged(log, names, range(500, 600), write=names[0], text=text))
    wanted = range(200) if decided else range(500, 600) if helper == "driver" else range(0)
    assert sorted(number for name in names for number in stored(log, name)) == list(wanted)


def test_the_option_wins_over_the_column(log: emb.Log, names: list[str]) -> None:
    """And a write into one topic differs from a routed write of the same name: neither hides the other."""
    given = WriteOptions(brokers=log.address, topic=names[0])
    plain = TaskWriter(given, shape_of(log.describe(names[0]), FRAME, given, 0))
    sink.publish(
        plain, [StagedMessage(plain.write(WriteWork("same", 0, "x"), 0, rows(["nowhere"], range(10), LITTLE)))]
    )
    sink.publish(writer(log), staged(log, names, range(30, 60), write="same"))
    assert stored(log, names[0]) == [*range(10), *range(30, 60, 3)]


def test_a_topic_that_is_deleted_after_the_decision_does_not_block_the_others(
    log: emb.Log, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the decision it is an error, and nothing is visible."""
    messages = staged(log, names, range(30), write=names[0])
    dies(monkeypatch, "publish")
    with pytest.raises(RuntimeError, match="killed"):
        sink.publish(writer(log), messages)
    log.delete_topic(names[1])
    sweep(log)
    assert [stored(log, names[0]), sorted(stored(log, names[2]))] == [[*range(0, 30, 3)], [*range(2, 30, 3)]]

    log.create_topic(names[1], replicas=1)
    messages = staged(log, names, range(30, 60), write=names[1])
    log.delete_topic(names[1])
    with pytest.raises(UnknownTopic):
        sink.publish(writer(log), messages)
    log.create_topic(names[1], replicas=1)
    with pytest.raises(TopicReplaced, match="nothing of the write is visible"):
        sink.publish(writer(log), messages)
    assert [len(stored(log, name)) for name in names] == [10, 0, 10]


def test_rows_that_name_no_topic_fail_the_task(log: emb.Log, names: list[str]) -> None:
    """Each error names the value and the remedy; nothing of the write is visible."""
    log.create_topic(f"{names[0]}.weak", order=0)
    log.create_topic(f"{names[0]}.typed", schema=pa.schema([("id", pa.int64())]))
    staging = staging_topic(log.describe(names[0]).id)
    for bad, kind, words in (
        (None, BadValue, "10 rows have no topic: column 'topic' is null, first in key '1', value '1 x"),
        ("nowhere", UnknownTopic, "there is no topic 'nowhere', named in column 'topic'"),
        (staging, BadValue, "is a hidden topic of the cluster"),
        (ROUTED_TOPIC, BadValue, "is a hidden topic of the cluster"),
        (f"{names[0]}.weak", BadValue, "has order 0"),
        (f"{names[0]}.typed", BadSchema, "has a schema"),
    ):
        with pytest.raises(kind) as caught:
            staged(log, [names[0], bad], range(20), write="bad")
        assert words in str(caught.value)
    assert stored(log, names[0]) == []


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (FRAME.remove(0), "option 'topic' is missing, and the frame has no column 'topic'"),
        (FRAME.set(0, pa.field("topic", pa.int64())), "column 'topic' is int64, not a string"),
        (FRAME.set(0, pa.field("topic", pa.int64())).remove(2), "column 'value' is missing; column 'topic' is int64"),
    ],
)
def test_a_frame_that_cannot_be_routed_is_refused_before_any_task(
    log: emb.Log, frame: pa.Schema, words: str
) -> None:
    """On the driver."""
    with pytest.raises(BadValue) as caught:
        writer(log, frame)
    assert words in str(caught.value)
