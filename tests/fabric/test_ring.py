"""Rings against a simple model, on memory that is as bad as allowed."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embarcadero.errors import InvariantBroken
from embarcadero.fabric.layout import PENDING, Entries, RegionKind
from embarcadero.fabric.lines import RingReader, RingWriter, attach_ring, create_ring, ring_shape
from embarcadero_proof.sim.incoherent import IncoherentMemory

SLOTS = 8


def ring(seed: int = 0) -> tuple[RingWriter, RingReader, IncoherentMemory]:
    memory = IncoherentMemory(random.Random(seed), generation=1)
    writer = create_ring(memory.host("near"), "ring", RegionKind.PENDING, PENDING, SLOTS)
    return writer, attach_ring(memory.host("far"), "ring", PENDING), memory


def entries(first: int, count: int) -> Entries:
    made = np.zeros(count, dtype=PENDING)
    made["session_seq"] = np.arange(first, first + count) * 1000
    return made


def written(found: Entries) -> list[tuple[int, int]]:
    return list(zip(found["index"].tolist(), found["session_seq"].tolist(), strict=True))


def expected(start: int, stop: int) -> list[tuple[int, int]]:
    return [(index, index * 1000) for index in range(start, stop)]


@settings(deadline=None, max_examples=100)
@given(seed=st.integers(0, 2**32), steps=st.lists(st.tuples(st.integers(0, SLOTS), st.booleans()), max_size=30))
def test_readers_see_the_last_lap_and_nothing_else(seed: int, steps: list[tuple[int, bool]]) -> None:
    """After any writes, a reader finds exactly the entries of the last lap, under their own indices."""
    writer, reader, memory = ring(seed)
    total = published = 0
    for count, publish in steps:
        assert writer.write(entries(total, count), free_below=total) == total
        total += count
        if publish:
            writer.publish()
            published = total
        memory.churn(2)
        oldest = max(0, total - SLOTS)
        assert written(reader.read(oldest, total)) == expected(oldest, total)
        assert reader.valid_end(oldest) == total
        assert reader.frontier.load() == published
        if oldest:
            assert written(reader.read(oldest - 1, oldest)) == []


@pytest.mark.parametrize("free_below", [0, 3, 7])
def test_reuse_of_a_slot_that_is_not_free_is_refused(free_below: int) -> None:
    """Writing beyond the free slots is a bug that stops immediately, and leaves the ring unchanged."""
    writer, reader, _ = ring()
    writer.write(entries(0, SLOTS), free_below=0)
    with pytest.raises(InvariantBroken, match="reused only when it is free"):
        writer.write(entries(SLOTS, free_below + 1), free_below)
    assert written(reader.read(0, SLOTS)) == expected(0, SLOTS)
    writer.write(entries(SLOTS, free_below), free_below)
    assert writer.next == SLOTS + free_below


def test_unpublished_entries_are_below_the_valid_end_only() -> None:
    """Entries written but not published are found by valid_end (as at takeover) and not by the frontier."""
    writer, reader, _ = ring()
    writer.write(entries(0, 3), free_below=0)
    assert (reader.frontier.load(), reader.valid_end(0)) == (0, 3)
    writer.publish()
    assert reader.frontier.load() == 3


def test_a_damaged_entry_ends_the_readable_part() -> None:
    """One wrong byte in memory ends the valid prefix right before its entry."""
    writer, reader, _ = ring()
    writer.write(entries(0, 6), free_below=0)
    damaged = writer.region.data[-SLOTS * PENDING.itemsize :].view(PENDING)
    damaged["crc"][4] ^= 1
    writer.region.flush(0, writer.region.shape.size)
    assert written(reader.read(0, 6)) == expected(0, 4)


def test_more_than_one_lap_is_not_read_at_once() -> None:
    """A read of more than a lap is a bug."""
    _, reader, _ = ring()
    with pytest.raises(InvariantBroken, match="one lap"):
        reader.load(0, SLOTS + 1)


@pytest.mark.parametrize("slots", [0, 3, 12])
def test_the_number_of_slots_is_a_power_of_two(slots: int) -> None:
    """Other numbers of slots are refused when the ring is made."""
    with pytest.raises(InvariantBroken, match="power of two"):
        ring_shape(RegionKind.PENDING, PENDING, slots)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), stop_at=st.integers(1, 12))
def test_a_writer_that_dies_anywhere_leaves_whole_entries(seed: int, stop_at: int) -> None:
    """Wherever the writer's host dies, readers find a prefix of whole entries, at least up to the frontier they see."""
    writer, reader, memory = ring(seed)
    calls = 0

    def die(host: str) -> None:
        nonlocal calls
        calls += host == "near"
        if calls == stop_at:
            raise ConnectionAbortedError

    memory.interrupt = die
    try:
        for first in range(0, SLOTS, 2):
            writer.write(entries(first, 2), free_below=0)
            writer.publish()
    except ConnectionAbortedError:
        memory.crash("near")
    memory.interrupt = None
    end = reader.valid_end(0)
    assert written(reader.read(0, end)) == expected(0, end)
    assert reader.frontier.load() <= end
