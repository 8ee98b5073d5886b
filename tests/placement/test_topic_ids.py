"""Topics have ids: another topic of the same name has another id, and requests name the topic they mean."""

from __future__ import annotations

from itertools import count

import msgspec
import pytest

from embarcadero.errors import Deposed, TopicReplaced, UnknownTopic
from embarcadero.placement.directory import Directory
from embarcadero.placement.records import ReaderNote
from embarcadero.placement.store import Check, MemoryStore, Put
from embarcadero.types import Tier, Topic
from embarcadero.wire.messages import AdvanceTier, AlterTopic, OpenTier


def with_replica() -> Directory:
    directory = Directory(MemoryStore(), ids=count(101).__next__)
    directory.begin_generation()
    directory.replicas.register(0, disk="d0", folder="/r0", host="h", pid=1)
    return directory


def made_again(directory: Directory, name: str = "t") -> tuple[Topic, Topic]:
    """A topic that was deleted, and the next one of its name."""
    first = directory.topics.create(name, replicas=1)
    directory.topics.delete(name, first.id)
    return first, directory.topics.create(name, replicas=1)


def test_every_topic_has_an_id_of_its_own() -> None:
    """It is drawn when the topic is created, and fits a signed column of 64 bits."""
    directory = Directory(MemoryStore())
    ids = {directory.topics.create(f"t{number}", replicas=0).id for number in range(50)}
    assert len(ids) == 50
    assert all(0 < each < 1 << 63 for each in ids)
    kept = directory.topics.get("t0").id
    directory.begin_generation()
    assert directory.topics.get("t0").id == kept


def test_a_late_delete_leaves_the_next_topic_of_that_name_alone() -> None:
    """It names the topic that it means."""
    directory = with_replica()
    first, second = made_again(directory)
    with pytest.raises(TopicReplaced, match=f"{second.id:016x}"):
        directory.topics.delete("t", first.id)
    assert directory.topics.get("t") == second
    directory.topics.delete("t", second.id)
    with pytest.raises(UnknownTopic):
        directory.topics.get("t")


def test_a_late_alter_or_trim_leaves_the_next_topic_of_that_name_alone() -> None:
    """They name the topic, too; a request of an old client names none, and is accepted as before."""
    directory = with_replica()
    first, second = made_again(directory)
    with pytest.raises(TopicReplaced):
        directory.topics.alter(AlterTopic(name="t", partitions=4, topic_id=first.id))
    with pytest.raises(TopicReplaced):
        directory.topics.trim("t", second.lane, 5, topic_id=first.id)
    assert directory.topics.get("t") == second
    assert directory.topics.trims() == {}
    assert directory.topics.alter(AlterTopic(name="t", partitions=4)).partitions == 4
    assert directory.topics.alter(AlterTopic(name="t", partitions=8, topic_id=second.id)).partitions == 8


def test_a_tiering_job_of_a_deleted_topic_does_not_report_to_the_next_one() -> None:
    """Epochs of the next topic's table start at 1 again: the number alone does not identify the job."""
    directory = with_replica()
    first = directory.topics.create("t", replicas=1)
    ask = OpenTier(topic="t", holder="a", id="x", warehouse="w", table="n.t", topic_id=first.id)
    old = directory.tiers.open(ask)
    directory.topics.delete("t")
    second = directory.topics.create("t", replicas=1)
    with pytest.raises(TopicReplaced):
        directory.tiers.open(ask)
    new = directory.tiers.open(msgspec.structs.replace(ask, topic_id=second.id, holder="b"))
    assert (new.epoch, new.topic_id) == (old.epoch, second.id)

    late = AdvanceTier(topic="t", epoch=1, metadata="m", frontiers={second.lane: (9, 9)}, topic_id=first.id)
    with pytest.raises((TopicReplaced, Deposed)):
        directory.tiers.advance(late, 0)
    assert not directory.tiers.keep_alive("t", 1, first.id)
    directory.tiers.close("t", 1, first.id)
    assert directory.tiers.keep_alive("t", 1, second.id)
    assert directory.tiers.get("t") == new


def test_a_note_of_a_reader_of_a_deleted_topic_is_not_kept() -> None:
    """Its positions belong to another topic."""
    directory = with_replica()
    first, second = made_again(directory)
    notes = {
        ("t", "old"): ReaderNote(reader="old", places={0: (9, 9)}, at_us=1, topic_id=first.id),
        ("t", "new"): ReaderNote(reader="new", places={0: (1, 1)}, at_us=1, topic_id=second.id),
    }
    directory.readers.note(notes, 1)
    assert [note.reader for note in directory.readers.of("t", 2)] == ["new"]


@pytest.mark.parametrize("begin", [True, False])
def test_topics_of_an_earlier_version_get_their_ids_when_they_are_first_opened(begin: bool) -> None:
    """Its records have no such field. With the next generation, or when a process of this one starts."""
    directory = with_replica()
    made = directory.topics.create("t", replicas=1)
    directory.topics.create("new", replicas=1)
    directory.tiers.open(OpenTier(topic="t", holder="a", id="x", warehouse="w", table="n.t"))
    _forget_ids(directory)
    assert directory.topics.get("t").id == 0
    assert directory.topics.get("t").checkpoint_ids == (0, 0)
    directory.topics.delete("new")  # as before

    if begin:
        directory.begin_generation()
    else:
        directory.topics.give_ids()
    topic, tier = directory.topics.get("t"), directory.tiers.get("t")
    assert topic.id not in (0, made.id)
    assert topic.had_no_id
    assert tier is not None
    assert tier.topic_id == topic.id
    assert msgspec.structs.replace(topic, id=made.id, had_no_id=False) == made
    directory.topics.give_ids()
    assert directory.topics.get("t") == topic
    assert not directory.topics.create("later", replicas=0).had_no_id


def _forget_ids(directory: Directory) -> None:
    """Write records as the previous version wrote them."""
    store = directory._decider.store
    for item in (*store.list("topics/"), *store.list("tiers/")):
        record = msgspec.json.decode(item.value)
        for field in ("id", "had_no_id") if item.key.startswith("topics/") else ("topic_id",):
            del record[field]
        assert store.transact([Check(item.key, item.revision)], [Put(item.key, msgspec.json.encode(record))])
    assert isinstance(directory.tiers.get("t"), Tier)
