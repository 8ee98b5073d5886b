"""The simulated fabric is as bad as the rules allow, and no worse."""

from __future__ import annotations

import random

import numpy as np
import pytest

from embarcadero.errors import InvariantBroken
from embarcadero.fabric.layout import RegionKind
from embarcadero.fabric.region import Shape
from embarcadero_proof.sim.incoherent import IncoherentMemory, IncoherentRegion

SIZE, DATA, FLAG = 1024, 256, 512
SEEDS = range(200)


class World:
    """Host a writes, host b reads; words are 8 bytes."""

    def __init__(self, seed: int = 0) -> None:
        self.memory = IncoherentMemory(random.Random(seed), generation=1)
        self.writer = self.memory.host("a").create("r", Shape(RegionKind.LOG, SIZE))
        self.reader = self.memory.host("b").attach("r")

    @staticmethod
    def words(
        region: IncoherentRegion, offset: int = DATA, count: int = 8
    ) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        return region.data[offset : offset + 8 * count].view(np.uint64)

    def load(self, offset: int = DATA, count: int = 8) -> list[int]:
        """Fresh words, as host b sees them."""
        self.reader.invalidate(offset, 8 * count)
        return [int(word) for word in self.words(self.reader, offset, count)]


def test_a_store_is_visible_after_flush_and_invalidate_only() -> None:
    """Neither flush nor invalidate alone shows a store to another host; flush, then invalidate, does."""
    world = World()
    world.words(world.writer)[:] = 7
    assert world.load() == [0] * 8
    world.writer.flush(DATA, 64)
    assert world.words(world.reader).tolist() == [0] * 8
    assert world.load() == [7] * 8


def test_primitives_touch_only_their_lines() -> None:
    """Flush and invalidate work on whole lines, and on no other line."""
    world = World()
    world.words(world.writer, DATA, 24)[:] = 7
    world.writer.flush(DATA + 64, 1)
    assert world.load(DATA, 24) == [0] * 8 + [7] * 8 + [0] * 8
    world.writer.flush(DATA, 192)
    world.reader.invalidate(DATA + 63, 1)
    assert world.words(world.reader, DATA, 24).tolist() == [7] * 16 + [0] * 8


def test_invalidate_never_discards() -> None:
    """Invalidating dirty lines writes them back."""
    world = World()
    world.words(world.writer)[:] = 7
    world.writer.invalidate(DATA, 64)
    assert world.words(world.writer).tolist() == [7] * 8
    assert world.load() == [7] * 8


def test_a_new_mapping_is_as_stale_as_can_be() -> None:
    """A host that maps a region late still sees zeros until it invalidates; the superblock is fresh."""
    world = World()
    world.words(world.writer)[:] = 7
    world.writer.flush(DATA, 64)
    late = world.memory.host("late").attach("r")
    assert late.shape.kind is RegionKind.LOG
    assert world.words(late).tolist() == [0] * 8


def test_roles_on_one_host_share_its_cache() -> None:
    """On one host a store is visible immediately, through a mapping that cannot write."""
    world = World()
    neighbour = world.memory.host("a").attach("r")
    world.words(world.writer)[:] = 7
    assert world.words(neighbour).tolist() == [7] * 8
    with pytest.raises(ValueError, match="read-only"):
        neighbour.data[DATA] = 1
    world.writer.data[DATA] = 1


def test_churn_shows_stores_sometimes() -> None:
    """Without flush and invalidate, churn alone makes a store visible in some runs and not in others."""
    seen = set()
    for seed in SEEDS:
        world = World(seed)
        world.words(world.writer, count=1)[0] = 7
        world.memory.churn(5)
        seen.add(int(world.words(world.reader, count=1)[0]))
    assert seen == {0, 7}


def test_churn_loses_nothing() -> None:
    """However much a cache does on its own, a flush still writes every stored word."""
    for seed in SEEDS:
        world = World(seed)
        world.words(world.writer)[:] = range(1, 9)
        world.memory.churn(10)
        world.writer.flush(DATA, 64)
        assert world.load() == list(range(1, 9))


def test_lines_tear_at_words_only() -> None:
    """Churn writes back any mix of old and new words of a line, and no word is ever torn."""
    old, new = 0x1111_1111_1111_1111, 0x2222_2222_2222_2222
    mixes = set()
    for seed in SEEDS:
        world = World(seed)
        world.words(world.writer)[:] = old
        world.writer.flush(DATA, 64)
        world.words(world.writer)[:] = new
        world.memory.churn(1)
        found = world.load()
        assert set(found) <= {old, new}
        mixes.add(tuple(found))
    assert len(mixes) > 20


def test_a_crash_loses_some_unflushed_words() -> None:
    """A crash keeps all flushed words; each other word is kept or lost, by chance."""
    kept = []
    for seed in SEEDS:
        world = World(seed)
        world.words(world.writer)[:] = 7
        world.writer.flush(DATA, 64)
        world.words(world.writer, FLAG)[:] = 9
        world.memory.crash("a")
        assert world.load(DATA) == [7] * 8
        kept.append(world.load(FLAG).count(9))
    assert {0, 8} & set(kept)
    assert 0.4 < sum(kept) / (8 * len(SEEDS)) < 0.6


def test_a_crashed_host_has_no_further_effect() -> None:
    """Later actions of a crashed host's roles have no effect; the restarted host maps memory as it is."""
    world = World()
    world.memory.crash("a")
    world.words(world.writer)[:] = 7
    world.writer.flush(DATA, 64)
    world.writer.invalidate(DATA, 64)
    world.memory.churn(50)
    assert world.load() == [0] * 8
    again = world.memory.host("a").attach("r", writable=True)
    world.words(again)[:] = 8
    again.flush(DATA, 64)
    assert world.load() == [8] * 8


def test_a_crash_in_the_middle_of_a_step() -> None:
    """A simulator can stop a role before any primitive: here before the flush, which then never happens."""

    class HostCrashed(Exception): ...

    def crash(host: str) -> None:
        world.memory.interrupt = None
        world.memory.crash(host)
        raise HostCrashed

    lost = 0
    for seed in SEEDS:
        world = World(seed)
        world.words(world.writer, count=1)[0] = 7
        world.memory.interrupt = crash
        with pytest.raises(HostCrashed):
            world.writer.flush(DATA, 8)
        lost += world.load(count=1) == [0]
    assert 0 < lost < len(SEEDS)


def test_every_primitive_can_be_interrupted() -> None:
    """The simulator's moment comes before each flush, invalidate and fence, with the host's name."""
    world = World()
    calls: list[str] = []
    world.memory.interrupt = calls.append
    world.writer.flush(DATA, 8)
    world.reader.invalidate(DATA, 8)
    world.memory.host("a").fence()
    assert calls == ["a", "b", "a"]


def trace(seed: int) -> list[tuple[int, ...]]:
    world = World(seed)
    script = random.Random(1)
    seen = []
    for step in range(1, 200):
        world.words(world.writer, script.randrange(128, SIZE - 64, 64))[script.randrange(8)] = step
        world.memory.churn(script.randrange(3))
        if step % 50 == 0:
            world.memory.crash("b")
            world.reader = world.memory.host("b").attach("r")
        seen.append(tuple(world.words(world.reader, 128, 112).tolist()))
    return seen


def test_the_same_seed_gives_the_same_run() -> None:
    """Everything random comes from the seed."""
    assert trace(5) == trace(5)
    assert trace(5) != trace(6)


def broken_promises(sabotage: set[str]) -> int:
    """In how many runs a reader that sees the flag does not see the data, or never sees the flag at all."""
    broken = 0
    for seed in SEEDS:
        world = World(seed)
        world.memory.sabotage = sabotage
        world.words(world.writer)[:] = 7
        world.writer.flush(DATA, 64)
        world.words(world.writer, FLAG, 1)[0] = 1
        world.memory.churn(2)
        world.writer.flush(FLAG, 8)
        flag, data = world.load(FLAG, 1), world.load(DATA)
        broken += flag != [1] or data != [7] * 8
    return broken


def test_sabotage_makes_a_difference() -> None:
    """Publishing by the rules works in every run; with flush or invalidate sabotaged it fails in many."""
    assert broken_promises(set()) == 0
    assert broken_promises({"flush"}) > len(SEEDS) // 4
    assert broken_promises({"invalidate"}) > len(SEEDS) // 4


def test_two_writers_of_different_words_do_not_disturb_each_other() -> None:
    """A write-back writes dirty words only, so lines of several writers (the epoch table) never roll back."""
    world = World()
    other = world.memory.host("b").attach("r", writable=True)
    world.words(world.writer)[0] = 1
    world.words(other)[1] = 2
    world.writer.flush(DATA, 64)
    other.flush(DATA, 64)
    assert world.load()[:2] == [1, 2]


@pytest.mark.parametrize(("offset", "length"), [(-1, 4), (SIZE - 1, 2), (0, -1), (SIZE + 1, 0)])
def test_spans_outside_a_region_are_bugs(offset: int, length: int) -> None:
    """A primitive on a span outside the region stops the role immediately."""
    world = World()
    for primitive in (world.writer.flush, world.reader.invalidate):
        with pytest.raises(InvariantBroken, match="outside region r"):
            primitive(offset, length)


def test_regions_need_not_be_whole_lines() -> None:
    """A region whose size is no multiple of a line works to its last byte."""
    memory = IncoherentMemory(random.Random(0), generation=1)
    writer = memory.host("a").create("odd", Shape(RegionKind.LOG, 1001))
    writer.data[1000] = 7
    writer.flush(1000, 1)
    reader = memory.host("b").attach("odd")
    reader.invalidate(1000, 1)
    assert len(reader.data) == 1001
    assert int(reader.data[1000]) == 7


def test_churn_reaches_far_lines_once_they_are_used() -> None:
    """In a large region churn affects lines that were used before: also at the far end of it."""
    far = 4 << 20
    seen = set()
    for seed in range(40):
        memory = IncoherentMemory(random.Random(seed), generation=1)
        writer = memory.host("a").create("large", Shape(RegionKind.EPOCHS, far + 64))
        reader = memory.host("b").attach("large")
        writer.data[far] = 7
        writer.flush(far, 1)
        memory.churn(2)
        seen.add(int(reader.data[far]))
    assert seen == {0, 7}
