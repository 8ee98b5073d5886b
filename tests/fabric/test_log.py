"""The broker's log against a simple model: a copy is the payload or None, and never another batch's bytes."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from embarcadero.config import FabricSizes
from embarcadero.errors import FrameTooLarge, InvariantBroken
from embarcadero.fabric.layout import BrokerLine, frontier_offset
from embarcadero.fabric.lines import FrontierWriter
from embarcadero.fabric.log import LogReader, LogWriter, Reservation, create_log
from embarcadero_proof.sim.incoherent import IncoherentMemory

CHUNK_BYTES, CHUNKS = 256, 4
SIZES = FabricSizes(log_bytes=CHUNKS * CHUNK_BYTES, chunk_bytes=CHUNK_BYTES)
NUMBERS = 1 << 30  # chunk numbers that a location can distinguish: 4 units a chunk leave 30 of 32 bits


class World:
    """A log with its writer on one host and a reader on another."""

    def __init__(self, seed: int = 0, first_lap: int = 0) -> None:
        self.memory = IncoherentMemory(random.Random(seed), generation=1)
        frontiers, log = create_log(self.memory.host("near"), "broker-0.1", SIZES, owner=0, incarnation=1)
        for slot in range(CHUNKS):
            FrontierWriter(frontiers, frontier_offset(BrokerLine.CHUNKS + slot)).advance(first_lap * CHUNKS + slot)
        self.writer = LogWriter(log, frontiers)
        far = self.memory.host("far")
        self.reader = LogReader(far.attach("broker-0.1/log"), far.attach("broker-0.1/frontiers"))
        self.stored: dict[int, bytes] = {}

    def store(self, size: int) -> Reservation | None:
        """Receive one payload, unlike any other."""
        reservation = self.writer.reserve(size)
        if reservation is not None:
            payload = np.random.default_rng(len(self.stored)).bytes(size)
            reservation.view[:] = payload
            self.writer.flush(reservation)
            self.stored[reservation.location] = payload
        return reservation

    def fill_chunk(self) -> int:
        """Store one payload that fills a whole chunk."""
        reservation = self.store(CHUNK_BYTES)
        assert reservation is not None
        return reservation.location


class LogMachine(RuleBasedStateMachine):
    """Random reserving, releasing and reading, compared with a model that remembers every payload."""

    @initialize(seed=st.integers(0, 2**32), first_lap=st.sampled_from([0, NUMBERS // CHUNKS - 1]))
    def start(self, seed: int, first_lap: int) -> None:
        self.world = World(seed, first_lap)
        self.unresolved: list[int] = []
        self.slots_in_use: dict[int, int] = {}

    @rule(size=st.integers(1, CHUNK_BYTES))
    def reserve(self, size: int) -> None:
        reservation = self.world.store(size)
        if reservation is None:
            held = {location >> 2 for location in self.unresolved}
            assert len(held) >= CHUNKS - 1, "refused though a chunk was free"
        else:
            assert reservation.size == len(reservation.view) == size
            assert reservation.location not in self.unresolved
            self.unresolved.append(reservation.location)

    @precondition(lambda self: self.unresolved)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        location = data.draw(st.sampled_from(self.unresolved))
        self.unresolved.remove(location)
        self.world.writer.release(location)

    @rule()
    def read_all(self) -> None:
        self.world.memory.churn(3)
        locations = list(self.world.stored)
        freed = self.world.reader.freed(np.array(locations, dtype=np.uint32))
        for location, gone in zip(locations, freed.tolist(), strict=True):
            payload = self.world.stored[location]
            found = self.world.reader.copy(location, len(payload))
            assert found == (None if gone else payload)
            assert not (gone and location in self.unresolved), "an unresolved payload was freed"

    @rule()
    def occupation(self) -> None:
        held = {location >> 2 for location in self.unresolved}
        assert (len(held) - 1) / CHUNKS < self.world.writer.occupied() + 1e-9 <= len(held) / CHUNKS + 1e-6


LogMachine.TestCase.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)
TestLog = LogMachine.TestCase


def test_payloads_are_kept_until_the_chunk_is_needed() -> None:
    """Resolved payloads stay readable for a whole lap; then the oldest chunk is reused first."""
    world = World()
    locations = [world.fill_chunk() for _ in range(CHUNKS)]
    for location in locations:
        world.writer.release(location)
    assert not world.reader.freed(np.array(locations, dtype=np.uint32)).any()
    world.fill_chunk()
    assert world.reader.freed(np.array(locations, dtype=np.uint32)).tolist() == [True, False, False, False]


def test_one_unresolved_payload_holds_only_its_chunk() -> None:
    """A chunk with an unresolved payload is skipped for as long as it takes; the others are reused in turn."""
    world = World()
    stuck = world.fill_chunk()
    for _ in range(3 * CHUNKS):
        world.writer.release(world.fill_chunk())
    assert world.reader.copy(stuck, CHUNK_BYTES) == world.stored[stuck]


def test_the_current_chunk_is_never_reused() -> None:
    """With all other chunks unresolved there is no space, even when the current chunk holds no unresolved payload."""
    world = World()
    for _ in range(CHUNKS):
        newest = world.fill_chunk()
    world.writer.release(newest)
    assert world.writer.reserve(1) is None
    assert world.reader.copy(newest, CHUNK_BYTES) == world.stored[newest]


def test_locations_outlive_the_wrap_of_chunk_numbers() -> None:
    """When chunk numbers outgrow the bits a location has for them, locations before and after still work."""
    world = World(first_lap=NUMBERS // CHUNKS - 1)
    old = [world.fill_chunk() for _ in range(CHUNKS)]
    world.writer.release(old[0])
    new = world.fill_chunk()
    assert (old[0], new) == ((NUMBERS - CHUNKS) << 2, 0)
    assert world.reader.freed(np.array([*old, new], dtype=np.uint32)).tolist() == [True, False, False, False, False]
    assert world.reader.copy(new, CHUNK_BYTES) == world.stored[new]
    world.writer.release(new)


@pytest.mark.parametrize("moment", [1, 2])
def test_a_chunk_freed_while_it_is_copied_is_reported_as_freed(moment: int) -> None:
    """When the writer reuses the chunk in the middle of a copy, before or after the bytes, the copy is not served."""
    world = World()
    first = world.fill_chunk()
    world.writer.release(first)
    for _ in range(CHUNKS - 1):
        world.fill_chunk()
    calls = 0

    def reuse(host: str) -> None:
        nonlocal calls
        calls += host == "far"
        if host == "far" and calls == moment:
            world.fill_chunk()

    world.memory.interrupt = reuse
    assert world.reader.copy(first, CHUNK_BYTES) is None
    assert calls == 2


def test_occupied_follows_the_unresolved_payloads() -> None:
    """An empty log is not occupied, a log full of unresolved payloads is, and releasing frees it."""
    world = World()
    assert world.writer.occupied() == 0
    locations = [world.fill_chunk() for _ in range(CHUNKS)]
    assert world.writer.occupied() == 1
    for location in locations:
        world.writer.release(location)
    assert world.writer.occupied() == 0


def test_payloads_start_on_their_own_line() -> None:
    """Two payloads never share a cache line."""
    world = World()
    locations = [reservation.location for size in (1, 64, 65) if (reservation := world.store(size))]
    assert locations == [0, 1, 2]
    assert world.store(1) is not None
    assert world.writer.reserve(1).location == 5  # type: ignore[union-attr]  # chunk 1: one payload fits after two units


@pytest.mark.parametrize("size", [0, -1, CHUNK_BYTES + 1])
def test_sizes_that_fit_no_chunk_are_refused(size: int) -> None:
    """A payload larger than a chunk is a typed error, not an endless wait."""
    with pytest.raises(FrameTooLarge, match=f"{size} bytes"):
        World().writer.reserve(size)


def test_releasing_twice_is_a_bug() -> None:
    """A reservation is released once, also if its chunk is gone."""
    world = World()
    location = world.fill_chunk()
    world.writer.release(location)
    with pytest.raises(InvariantBroken, match="once"):
        world.writer.release(location)
    for _ in range(CHUNKS):
        world.fill_chunk()
    with pytest.raises(InvariantBroken, match="live"):
        world.writer.release(location)


@settings(deadline=None, max_examples=50)
@given(location=st.integers(0, CHUNKS * 4 - 1), size=st.integers(-1, 2 * CHUNK_BYTES))
def test_a_read_beyond_a_chunk_is_refused(location: int, size: int) -> None:
    """A size that reaches beyond the chunk is a bug of the caller; all others give that many bytes."""
    world = World()
    if 0 < size <= CHUNK_BYTES - location % 4 * 64:
        assert len(world.reader.copy(location, size) or b"") == size
    else:
        with pytest.raises(InvariantBroken, match="one chunk"):
            world.reader.copy(location, size)
