"""Topics have ids: another topic of the same name has another one, and requests say which topic they mean."""

from __future__ import annotations

from itertools import count

import msgspec
import pytest

from embarcadero.errors import Deposed, TopicReplaced, UnknownTopic
from embarcadero.placement.directory import Directory
from embarcadero.placement.memory import MemoryStore
from embarcadero.placement.progress import ReaderNote
from embarcadero.placement.store import Check, Put
from embarcadero.types import Tier, Topic
from embarcadero.wire.messages import AdvanceTier, AlterTopic, OpenTier


def with_replica() -> Directory:
    directory = Directory(MemoryStore(), ids=count(101).__next__)
    directory.begin_generation()
    directory.register_replica(0, disk="d0", folder="/r0", host="h", pid=1)
    return directory


def made_again(directory: Directory, name: str = "t") -> tuple[Topic, Topic]:
    """A topic that was deleted, and the next one of its name."""
    first = directory.create_topic(name, replicas=1)
    directory.delete_topic(name, first.id)
    return first, directory.create_topic(name, replicas=1)


def test_every_topic_has_an_id_of_its_own() -> None:
    """It is drawn when the topic is created, and fits a signed column of 64 bits."""
    directory = Directory(MemoryStore())
    ids = {directory.create_topic(f"t{number}", replicas=0).id for number in range(50)}
    assert len(ids) == 50
    assert all(0 < each < 1 << 63 for each in ids)
    kept = directory.topic("t0").id
    directory.begin_generation()
    assert directory.topic("t0").id == kept


def test_a_late_delete_leaves_the_next_topic_of_that_name_alone() -> None:
    """It names the topic that it means."""
    directory = with_replica()
    first, second = made_again(directory)
    with pytest.raises(TopicReplaced, match=f"{second.id:016x}"):
        directory.delete_topic("t", first.id)
    assert directory.topic("t") == second
    directory.delete_topic("t", second.id)
    with pytest.raises(UnknownTopic):
        directory.topic("t")


def test_a_late_alter_or_trim_leaves_the_next_topic_of_that_name_alone() -> None:
    """They name the topic, too; a request of an old client names none, and is taken as before."""
    directory = with_replica()
    first, second = made_again(directory)
    with pytest.raises(TopicReplaced):
        directory.alter_topic(AlterTopic(name="t", partitions=4, topic_id=first.id))
    with pytest.raises(TopicReplaced):
        directory.trim("t", second.lane, 5, topic_id=first.id)
    assert directory.topic("t") == second
    assert directory.trims() == {}
    assert directory.alter_topic(AlterTopic(name="t", partitions=4)).partitions == 4
    assert directory.alter_topic(AlterTopic(name="t", partitions=8, topic_id=second.id)).partitions == 8


def test_a_tiering_job_of_a_deleted_topic_tells_the_next_one_nothing() -> None:
    """Epochs of the next topic's table begin at 1 again: the number alone does not tell the jobs apart."""
    directory = with_replica()
    first = directory.create_topic("t", replicas=1)
    ask = OpenTier(topic="t", holder="a", id="x", warehouse="w", table="n.t", topic_id=first.id)
    old = directory.open_tier(ask)
    directory.delete_topic("t")
    second = directory.create_topic("t", replicas=1)
    with pytest.raises(TopicReplaced):
        directory.open_tier(ask)
    new = directory.open_tier(msgspec.structs.replace(ask, topic_id=second.id, holder="b"))
    assert (new.epoch, new.topic_id) == (old.epoch, second.id)

    late = AdvanceTier(topic="t", epoch=1, metadata="m", frontiers={second.lane: (9, 9)}, topic_id=first.id)
    with pytest.raises((TopicReplaced, Deposed)):
        directory.advance_tier(late, 0)
    assert not directory.keep_tier("t", 1, first.id)
    directory.close_tier("t", 1, first.id)
    assert directory.keep_tier("t", 1, second.id)
    assert directory.tier("t") == new


def test_a_note_of_a_reader_of_a_deleted_topic_is_not_kept() -> None:
    """It speaks of positions of another topic."""
    directory = with_replica()
    first, second = made_again(directory)
    notes = {
        ("t", "old"): ReaderNote(reader="old", places={0: (9, 9)}, at_us=1, topic_id=first.id),
        ("t", "new"): ReaderNote(reader="new", places={0: (1, 1)}, at_us=1, topic_id=second.id),
    }
    directory.note_progress(notes, 1)
    assert [note.reader for note in directory.readers("t", 2)] == ["new"]


@pytest.mark.parametrize("begin", [True, False])
def test_topics_of_an_earlier_version_get_their_ids_when_they_are_first_opened(begin: bool) -> None:
    """Its records have no such field. With the next generation, or when a process of this one starts."""
    directory = with_replica()
    made = directory.create_topic("t", replicas=1)
    directory.create_topic("new", replicas=1)
    directory.open_tier(OpenTier(topic="t", holder="a", id="x", warehouse="w", table="n.t"))
    _forget_ids(directory)
    assert directory.topic("t").id == 0
    assert directory.topic("t").checkpoint_ids == (0, 0)
    directory.delete_topic("new")  # as before

    if begin:
        directory.begin_generation()
    else:
        directory.give_ids()
    topic, tier = directory.topic("t"), directory.tier("t")
    assert topic.id not in (0, made.id)
    assert topic.had_no_id
    assert tier is not None
    assert tier.topic_id == topic.id
    assert msgspec.structs.replace(topic, id=made.id, had_no_id=False) == made
    directory.give_ids()
    assert directory.topic("t") == topic
    assert not directory.create_topic("later", replicas=0).had_no_id


def _forget_ids(directory: Directory) -> None:
    """Write records as the version before wrote them."""
    store = directory._store
    for item in (*store.list("topics/"), *store.list("tiers/")):
        record = msgspec.json.decode(item.value)
        for field in ("id", "had_no_id") if item.key.startswith("topics/") else ("topic_id",):
            del record[field]
        assert store.transact([Check(item.key, item.revision)], [Put(item.key, msgspec.json.encode(record))])
    assert isinstance(directory.tier("t"), Tier)
