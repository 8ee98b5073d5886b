"""The watcher of the store: what a role reads again, and when."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from embarcadero.errors import Backpressure
from embarcadero.placement.directory import Directory, StoreChange, StoreWatch
from embarcadero.placement.store import Delete, MemoryStore, Outline, Put


class _CountingStore(MemoryStore):
    """Counts outlines; it can be made to fail the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.outlines = 0
        self.fails = False

    def outline(self, but: Sequence[str]) -> Outline:
        self.outlines += 1
        if self.fails:
            raise Backpressure("the store is locked", "try again")
        return super().outline(but)


@pytest.fixture
def store() -> _CountingStore:
    return _CountingStore()


@pytest.fixture
def directory(store: _CountingStore) -> Directory:
    return Directory(store)


def test_the_first_look_reports_everything(directory: Directory) -> None:
    """A reader that has read nothing yet has to read all of it."""
    watch = StoreWatch(directory)
    assert watch.look() is StoreChange.EVERYTHING
    watch.done()
    assert watch.look() is StoreChange.NOTHING


def test_a_look_at_an_unchanged_store_only_compares_revisions(directory: Directory, store: _CountingStore) -> None:
    """Roles look in every poll."""
    watch = StoreWatch(directory)
    watch.look()
    watch.done()
    before = store.outlines
    assert [watch.look() for _ in range(10)] == [StoreChange.NOTHING] * 10
    assert store.outlines == before


def test_an_election_is_not_everything(directory: Directory) -> None:
    """While a sequencer takes over, roles read epochs and nothing else."""
    watch = StoreWatch(directory)
    watch.look()
    watch.done()
    directory.elections.elect(1, "boot/1/1", over=0)
    directory.elections.start_epoch(1, {})
    assert watch.look() is StoreChange.ELECTIONS
    watch.done()
    directory.topics.create("t", order=5)
    assert watch.look() is StoreChange.EVERYTHING
    watch.done()
    assert watch.look() is StoreChange.NOTHING


def test_a_reader_that_failed_half_way_is_asked_to_read_again(directory: Directory) -> None:
    """Until it says that it has read everything, the change is reported, whatever comes after it."""
    watch = StoreWatch(directory)
    assert watch.look() is StoreChange.EVERYTHING
    assert watch.look() is StoreChange.EVERYTHING
    directory.elections.elect(1, "boot/1/1", over=0)
    assert watch.look() is StoreChange.EVERYTHING
    watch.done()
    directory.elections.elect(1, "boot/1/1", over=1)
    assert watch.look() is StoreChange.ELECTIONS
    assert watch.look() is StoreChange.ELECTIONS


def test_a_change_that_is_undone_half_way_is_reported_again(directory: Directory, store: _CountingStore) -> None:
    """The outline is the old one then, but the reader may have read a part of what was there between."""
    watch = StoreWatch(directory)
    directory.topics.create("kept", order=5)
    watch.look()
    watch.done()
    before = directory.outline()
    store.transact([], [Put("trims/77777", b"{}")])
    assert watch.look() is StoreChange.EVERYTHING
    store.transact([], [Delete("trims/77777")])
    assert directory.outline() == before
    assert watch.look() is StoreChange.EVERYTHING


def test_a_store_that_fails_while_it_is_looked_at_loses_no_change(directory: Directory, store: _CountingStore) -> None:
    """The look fails, and the next one reports the change."""
    watch = StoreWatch(directory)
    watch.look()
    watch.done()
    directory.topics.create("t", order=5)
    store.fails = True
    with pytest.raises(Backpressure):
        watch.look()
    store.fails = False
    assert watch.look() is StoreChange.EVERYTHING


def test_a_change_during_the_reading_is_reported_after_it(directory: Directory) -> None:
    """The reader may or may not have seen it."""
    watch = StoreWatch(directory)
    watch.look()
    directory.topics.create("t", order=5)
    watch.done()
    assert watch.look() is StoreChange.EVERYTHING


def test_a_reader_may_ask_for_everything_again(directory: Directory) -> None:
    """A role that could not act upon what it read has it reported once more."""
    watch = StoreWatch(directory)
    watch.look()
    watch.done()
    watch.reread()
    assert watch.look() is StoreChange.EVERYTHING
    watch.done()
    watch.reread()
    watch.done()
    assert watch.look() is StoreChange.NOTHING
