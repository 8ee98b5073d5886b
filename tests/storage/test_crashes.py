"""Crashes at any moment: synced records are there, no wrong record is served, and the log continues."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from embarcadero.errors import DiskFailed, EmbarcaderoError
from embarcadero.storage.repair import copy_span, heal_tails
from tests.storage.crash_disk import Died, World
from tests.storage.records import FOLDER, SMALL, START, Source, fill, matches, open_log, open_reader

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 40)),
        st.tuples(st.just("sync"), st.just(0)),
        st.tuples(st.just("crash"), st.just(0)),
        st.tuples(st.just("kill"), st.just(0)),
        st.tuples(st.just("die"), st.integers(0, 6)),
        st.tuples(st.just("fail"), st.integers(1, 3)),
        st.tuples(st.just("full"), st.integers(0, 9_000)),
        st.tuples(st.just("cut"), st.integers(0, 30)),
        st.tuples(st.just("drop"), st.integers(0, 60)),
        st.tuples(st.just("roll"), st.just(0)),
    ),
    max_size=30,
)


class Model:
    """A log under test, and its promises."""

    def __init__(self, seed: int) -> None:
        self.world, self.source = World(seed), Source(seed)
        self.disk = self.world.disk()
        self.log = open_log(self.disk)
        self.promised = START
        self.clock_us = 0

    def append(self, count: int) -> None:
        fill(self.log, self.source, count, sync=False)

    def sync(self, _: int = 0) -> None:
        self.promised = max(self.promised, self.log.sync_job()())

    def crash(self, _: int = 0) -> None:
        self.world.crash()
        self.reopen()

    def die(self, syncs: int) -> None:
        """Crash the host in the middle of a sync job."""
        self.append(30)
        self.world.syncs_to_live = syncs
        with suppress(Died):
            self.sync()
        self.world.syncs_to_live = None
        self.crash()

    def kill(self, _: int = 0) -> None:
        self.reopen()

    def reopen(self) -> None:
        self.world.syncs_to_fail, self.world.room = 0, None
        self.disk = self.world.disk()
        self.log = open_log(self.disk)
        assert not self.log.damage, self.log.notes
        assert self.log.end >= self.promised
        self.promised = self.log.synced

    def fail(self, count: int) -> None:
        """A sync fails: the log reports it until it is cut to its certain end."""
        self.world.syncs_to_fail = count
        self.append(3)
        with pytest.raises(DiskFailed):
            self.log.sync_job()()
        self.world.syncs_to_fail = 0
        with pytest.raises(DiskFailed):
            self.append(1)
        self.log.cut(self.log.synced)

    def full(self, room: int) -> None:
        """The disk is full for a while."""
        self.world.room = room
        try:
            self.append(20)
            self.sync()
        except EmbarcaderoError:
            pass
        self.world.room = None
        if self.log.failed:
            self.log.cut(self.log.synced)

    def cut(self, back: int) -> None:
        end = max(self.log.first, self.log.end - back)
        self.log.cut(end)
        self.promised = min(self.promised, end)
        assert self.log.end <= max(end, self.log.synced)

    def drop(self, back: int) -> None:
        self.log.drop_below(self.log.end - back)

    def roll(self, _: int) -> None:
        self.log.roll_if_due(self.clock_us)
        self.clock_us += 4_000_000_000

    def check(self) -> None:
        reader = open_reader(self.disk)
        assert reader.first == self.log.first
        assert matches(reader, self.source, self.log.first, self.log.end)
        infos = self.log.segments
        assert all(one.end_index == two.base_index for one, two in pairwise(infos))


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(STEPS, st.integers(0, 1 << 30))
def test_synced_records_survive_everything(steps: list[tuple[str, int]], seed: int) -> None:
    """Random appends, syncs, crashes, kills, failed syncs, full disks, cuts and drops: promises hold after each."""
    model = Model(seed)
    for name, argument in steps:
        getattr(model, name)(argument)
        model.check()
    model.sync()
    model.crash()
    model.check()


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(1, 120), st.integers(0, 60))
def test_damage_is_never_served_and_never_cut(seed: int, synced: int, more: int) -> None:
    """A flipped bit anywhere in a synced file: records are correct, or missing with a typed error.

    A peer repairs it.
    """
    world, source = World(seed), Source(seed)
    log = open_log(world.disk())
    fill(log, source, synced)
    fill(log, source, more, sync=False)
    log.close()
    paths = sorted(path for path, node in world.names.items() if node is not None and path.startswith(FOLDER))
    path = world.random.choice(paths)
    node = world.names[path]
    if node.data:
        place = world.random.randrange(len(node.safe) if node.safe else len(node.data))
        node.data[place] ^= 1 << world.random.randrange(8)
        node.safe[place : place + 1] = node.data[place : place + 1]

    damaged = open_log(world.disk(), SMALL)

    end = START + synced
    assert damaged.end >= end or damaged.damage
    reader = open_reader(world.disk())
    entries, payloads = source.span(START, START + synced + more)
    for index in range(START, end):
        try:
            found, got = reader.read(index, index + 1, 10)
        except EmbarcaderoError:
            continue
        if len(found):
            assert found.tobytes() == entries[index - START : index - START + 1].tobytes()
            assert bytes(got[0]) == payloads[index - START]
    if damaged.end < end:
        peer = open_log(World(1).disk())
        fill(peer, source, synced)
        copy_span(open_reader(peer.disk), damaged, end)
        damaged.sync_job()()
        heal_tails(damaged, end)
        assert damaged.end == end
        assert not damaged.damage


@pytest.mark.parametrize("syncs", range(5))
def test_no_footer_vouches_for_unsynced_records(syncs: int) -> None:
    """Crashes between all steps of a roll-over: a start that trusted a footer too early would serve holes."""
    for seed in range(40):
        model = Model(seed)
        model.die(syncs)
        model.check()
