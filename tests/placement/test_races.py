"""Several directories race over one store: in any interleaving, chains and ceilings keep their promises."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embarcadero.errors import Backpressure, BadValue, TooMany
from embarcadero.placement.directory import Directory
from embarcadero.placement.store import Check, MemoryStore, SqliteStore, Write
from embarcadero.types import Range, lost_spans
from tests.placement.worlds import add_replica, directory_with


def check_chain(ranges: list[Range]) -> None:
    """Numbers without a hole; only the last open; each starts at the end of the previous one, or above it."""
    assert [r.number for r in ranges] == list(range(ranges[0].number, ranges[0].number + len(ranges)))
    assert all(not r.open for r in ranges[:-1])
    for old, new in pairwise(ranges):
        assert old.end is not None
        assert old.end_seq is not None
        assert (old.start, old.start_seq) <= (old.end, old.end_seq)
        assert new.start >= old.end
        assert new.start_seq >= old.end_seq


class Interleaved(MemoryStore):
    """A store that lets another process act between a decision and its transaction, as the test defines."""

    def __init__(self) -> None:
        super().__init__()
        self.others: list[object] = []

    def transact(self, checks: Sequence[Check], writes: Sequence[Write]) -> bool:
        if self.others:
            self.others.pop()()  # type: ignore[operator]
        return super().transact(checks, writes)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["seal", "recover", "clean", "reopen", "raise", "elect", "restart", "replica", "trim", "loss"]),
        st.integers(0, 2),  # which of three sequencers
        st.integers(0, 40),  # how far
    ),
    max_size=25,
)


class Sequencers:
    """Three that all believe to lead, each with its last epoch, over one store with one lane."""

    def __init__(self) -> None:
        self.store = Interleaved()
        first = directory_with(3, self.store)
        first.topics.create("t", order=5, replicas=3, durable_on=2)
        self.directories = [first, Directory(self.store), Directory(self.store)]
        self.epochs = [first.elections.next_epoch(), 0, 0]
        self.ceilings = [first.ranges.ceiling(0)]
        self.sealed: dict[int, Range] = {}
        self.lost: set[tuple[int, int]] = set()
        self.started = {range_.number: range_.start for range_ in first.ranges.all(0)}
        self.handed_out = 0

    def reigns(self, who: int) -> bool:
        newest = max(range(3), key=lambda n: (self.directories[n].generation, self.epochs[n]))
        return who == newest

    def act(self, what: str, who: int, far: int) -> None:
        """One step of one of them; those that do not lead must change nothing."""
        directory, epoch, reigned = self.directories[who], self.epochs[who], self.reigns(who)
        before = directory.ranges.all(0), directory.ranges.ceiling(0)
        last = before[0][-1]
        end, end_seq = last.start + far, last.start_seq + far * 10
        chosen = directory.replicas.choose(3)
        done: object = None
        match what:
            case "seal":
                done = directory.ranges.seal_and_open(0, last.number, end, end_seq, chosen, epoch)
            case "recover":
                done = directory.ranges.seal_recovered(0, last.number, end, end_seq, chosen, epoch)
                if done:
                    assert directory.ranges.all(0)[-1].start >= before[1][0], "below a ceiling everything may be taken"
            case "clean":
                done = directory.ranges.seal_clean(0, last.number, end, end_seq, epoch)
            case "reopen":
                done = directory.ranges.reopen(0, chosen, epoch)
            case "raise":
                done = directory.ranges.raise_ceiling(0, before[1][0] + far, before[1][1] + far, epoch)
            case _:
                self.other(what, who, far)
                return
        if not reigned:
            assert not done
        if not done:
            assert (directory.ranges.all(0), directory.ranges.ceiling(0)) == before

    def other(self, what: str, who: int, far: int) -> None:
        """Actions that are open to every process."""
        directory = self.directories[who]
        match what:
            case "elect":
                try:
                    epoch = directory.elections.next_epoch(superseded=0)
                except TooMany:
                    return
                self.epochs = [0 if d.generation == directory.generation else e for d, e in self.pairs()]
                self.epochs[who] = epoch
                self.directories[who] = Directory(self.store)
            case "restart":
                fresh = Directory(self.store)
                fresh.begin_generation()
                self.directories[who], self.epochs[who] = fresh, 0
            case "replica":
                add_replica(directory, far % 3)
            case "trim":
                directory.topics.trim("t", 0, max(0, directory.ranges.all(0)[-1].start - far))
            case "loss":
                directory.ranges.accept_loss(0)

    def pairs(self) -> list[tuple[Directory, int]]:
        return list(zip(self.directories, self.epochs, strict=True))

    def check(self) -> None:
        """What must hold after every step."""
        ranges, ceiling = self.directories[0].ranges.all(0), self.directories[0].ranges.ceiling(0)
        check_chain(ranges)
        assert ceiling[0] >= self.ceilings[-1][0]
        assert ceiling[1] >= self.ceilings[-1][1]
        self.ceilings.append(ceiling)
        trimmed = self.directories[0].topics.trims().get(0, 0)
        for range_ in ranges:
            if not range_.replicas:
                sealed = self.sealed.get(range_.number, range_)
                assert (range_.start, range_.end, range_.end_seq) == (sealed.end, sealed.end, sealed.end_seq)
                assert sealed.end is not None
                assert sealed.end <= trimmed, "it was emptied, and not all of it is trimmed"
                continue
            assert self.started.setdefault(range_.number, range_.start) == range_.start
            if not range_.open:
                assert self.sealed.setdefault(range_.number, range_) == range_, "a sealed range changed"
        self.lost |= set(lost_spans(ranges))
        assert {span for span in self.lost if span[1] > trimmed} <= set(lost_spans(ranges)), "a loss was forgotten"
        assert ceiling[0] > ranges[-1].start, "an open range can be written"


@settings(deadline=None, max_examples=150)
@given(steps=STEPS)
def test_chains_and_ceilings_hold_over_any_series_of_steps(steps: list[tuple[str, int, int]]) -> None:
    """Elections, restarts, zombies, seals of every kind: contiguous or with gaps upward, sealed is sealed."""
    world = Sequencers()
    for what, who, far in steps:
        world.act(what, who, far)
        world.check()


@settings(deadline=None, max_examples=150)
@given(
    before=STEPS.map(lambda steps: steps[:4]),
    mine=st.sampled_from(["seal", "recover", "clean", "reopen", "raise"]),
    theirs=st.sampled_from(["elect", "restart", "seal", "recover", "clean", "raise", "trim", "replica"]),
    far=st.integers(0, 40),
)
def test_a_change_between_a_decision_and_its_transaction_is_noticed(
    before: list[tuple[str, int, int]], mine: str, theirs: str, far: int
) -> None:
    """An election, a restart or another's seal at that moment: the decision is made again, or not at all."""
    world = Sequencers()
    for what, who, distance in before:
        world.act(what, who, distance)
    reigning = max(range(3), key=lambda n: (world.directories[n].generation, world.epochs[n]))
    directory, epoch = world.directories[reigning], world.epochs[reigning]
    other = (reigning + 1) % 3
    if theirs in ("elect", "restart"):
        world.store.others = [lambda: world.other(theirs, other, far)]
    else:
        world.store.others = [lambda: world.act(theirs, reigning, far)]
    last = directory.ranges.all(0)[-1]
    end, end_seq, chosen = last.start + far, last.start_seq + far * 10, directory.replicas.choose(3)
    happened = {
        "seal": lambda: directory.ranges.seal_and_open(0, last.number, end, end_seq, chosen, epoch),
        "recover": lambda: directory.ranges.seal_recovered(0, last.number, end, end_seq, chosen, epoch),
        "clean": lambda: directory.ranges.seal_clean(0, last.number, end, end_seq, epoch),
        "reopen": lambda: directory.ranges.reopen(0, chosen, epoch),
        "raise": lambda: directory.ranges.raise_ceiling(0, 1 << 50, 1 << 60, epoch),
    }[mine]()
    acted = not world.store.others and theirs in ("elect", "restart")
    if acted and (world.directories[other].generation != directory.generation or world.epochs[other] > epoch):
        assert not happened
    world.store.others = []
    world.check()


@pytest.fixture(params=["memory", "sqlite"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> list[MemoryStore | SqliteStore]:
    """Four users of one store."""
    if request.param == "memory":
        return [MemoryStore()] * 4
    return [SqliteStore(tmp_path / "store.db") for _ in range(4)]


def test_one_of_two_sealers_wins(stores: list[MemoryStore | SqliteStore]) -> None:
    """Threads of the same epoch seal the same ranges at other ends: each range once, each chain whole."""
    first = Directory(stores[0])
    for replica in range(3):
        add_replica_without_process(first, replica)
    first.topics.create("t", replicas=3)
    epoch = first.elections.next_epoch()
    wins: list[tuple[int, int]] = []
    start = threading.Barrier(4)

    def seal(name: int) -> None:
        directory = Directory(stores[name])
        chosen = directory.replicas.choose(3)
        start.wait()
        for number in range(1, 11):
            end = number * 100 + name
            try:
                if directory.ranges.seal_and_open(0, number, end, end, chosen, epoch) is not None:
                    wins.append((number, end))
            except (BadValue, Backpressure):
                pass

    threads = [threading.Thread(target=seal, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ranges = first.ranges.all(0)
    check_chain(ranges)
    assert sorted(wins) == [(r.number, r.end) for r in ranges if not r.open]
    for store in stores:
        store.close()


def add_replica_without_process(directory: Directory, replica: int) -> None:
    """A process that the store does not look for on this machine."""
    directory.replicas.register(replica, f"disk-{replica}", "/f", f"host-{replica}", pid=0)
