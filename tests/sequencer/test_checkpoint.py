"""A checkpoint and the entries after it give back the session table."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embarcadero.errors import Corrupt
from embarcadero.fabric.layout import ORDER
from embarcadero.limits import SESSION_SEQUENCE_MAX
from embarcadero.sequencer.order.batches import LaneOrder
from embarcadero.sequencer.order.checkpoint import CheckpointWriter, learn_positions, read_checkpoint, replay, restore
from embarcadero.sequencer.order.sessions import FREE, LOST, ReorderBuffer, SessionTable, W
from embarcadero.types import NO_INDEX, EntryKind
from embarcadero_proof.sim.incoherent import IncoherentMemory, IncoherentRegion
from tests.sequencer.harness import OneLane
from tests.sequencer.test_order_model import KINDS_OF_TOPICS, Pair

Known = dict[int, tuple[int, int, int] | str]


def known(order: LaneOrder, row: int) -> Known:
    """The state of each sequence in a row's window: position and CRC, or that it is lost."""
    table, expected, low = order.table, int(order.table.expected[row]), int(order.table.low[row])
    windows = table.windows
    found: Known = {}
    for seq in range(max(0, expected - W), expected) if table.strong[row] else range(low, low + W):
        slot = row * W + seq % W
        if int(windows.tag[slot]) == seq + 1:
            index = int(windows.index[slot])
            found[seq] = "lost" if index == LOST else (index, int(windows.seq[slot]), int(windows.crc[slot]))
    return found


def rebuilt(lane: OneLane, memory: IncoherentMemory, ring_start: int) -> LaneOrder:
    """The lane as a successor on another host finds it, with entries from `ring_start` on in the ring."""
    live = lane.order
    order = LaneOrder(live.topic, SessionTable(live.table.sessions_max), ReorderBuffer(live.buffer.slots))
    checkpoint = read_checkpoint(memory.host("successor"), "checkpoint")
    start = 0
    if checkpoint is not None:
        restore(order, checkpoint, lane.now_us)
        start = checkpoint.index
        learn_positions(order, lane.log[min(ring_start, start) : start])
    replay(order, lane.log[start:], lane.now_us)
    return order


def compare(live: LaneOrder, made: LaneOrder, ring_start: int) -> None:
    """The rebuilt table is the live one; positions are known as far as the ring reaches."""
    mine, theirs = live.table, made.table
    assert (live.next_index, live.next_seq, mine.used) == (made.next_index, made.next_seq, theirs.used)
    assert (mine.next_handle, mine.by_name) == (theirs.next_handle, theirs.by_name)
    for column in ("handle", "live", "state", "strong", "expected", "successor", "name"):
        used = mine.state != FREE
        assert getattr(mine, column)[used].tolist() == getattr(theirs, column)[used].tolist(), column
    for row in np.flatnonzero(mine.state != FREE).tolist():
        if not mine.strong[row]:
            assert int(mine.expected[row]) - W <= int(theirs.low[row]) <= int(mine.low[row])
            theirs.low[row] = mine.low[row]
        found = known(made, row)
        for seq, fact in known(live, row).items():
            if isinstance(fact, str) or fact[0] >= ring_start:
                assert found[seq] == fact
            else:
                where = found[seq]
                assert isinstance(where, tuple)
                assert where == fact or where[0] == NO_INDEX


@pytest.mark.parametrize(("order", "on_gap", "strong_share"), KINDS_OF_TOPICS)
@given(seed=st.integers(0, 1 << 32))
@settings(deadline=None, max_examples=30)
def test_restore_and_replay_give_the_live_table(order: int, on_gap: str, strong_share: float, seed: int) -> None:
    """For any history, any number of checkpoints, and any remaining part of the ring."""
    rng = random.Random(seed)
    pair, memory = Pair(order, on_gap, rng, strong_share), IncoherentMemory(rng, 1)
    lane = pair.real
    writer = CheckpointWriter(memory.host("sequencer"), "checkpoint", lane.order.table.capacity)
    for _ in range(16):
        pair.act()
        if rng.random() < 0.25:
            writer.write(lane.order, lane.now_us)
    ring_start = rng.randint(0, len(lane.log))
    compare(lane.order, rebuilt(lane, memory, min(ring_start, writer.index)), min(ring_start, writer.index))


def test_skipped_sequences_are_still_lost_after_a_restore() -> None:
    """Whether the skip is in the checkpoint or after it, late batches are lost, not new."""
    for checkpoint_first in (True, False):
        lane, memory = OneLane(5, "skip"), IncoherentMemory(random.Random(1), 1)
        writer = CheckpointWriter(memory.host("sequencer"), "checkpoint", lane.order.table.capacity)
        session = lane.open()
        if checkpoint_first:
            writer.write(lane.order, lane.now_us)
        lane.send(session, 2, 3)
        lane.later(1_000_000)
        if not checkpoint_first:
            writer.write(lane.order, lane.now_us)
        order = rebuilt(lane, memory, 0)

        compare(lane.order, order, 0)
        assert [known(order, session)[seq] for seq in (0, 1)] == ["lost", "lost"]


def history(lane: OneLane, session: int, writer: CheckpointWriter) -> None:
    """Some batches, then a checkpoint."""
    first = int(lane.order.table.expected[session])
    lane.send(session, *range(first, first + 5))
    lane.now_us += 1
    writer.write(lane.order, lane.now_us)


def test_a_torn_checkpoint_is_not_used() -> None:
    """When the newest slot is damaged anywhere, the previous one is used; with both damaged there is none."""
    lane, memory = OneLane(), IncoherentMemory(random.Random(1), 1)
    writer = CheckpointWriter(memory.host("sequencer"), "checkpoint", lane.order.table.capacity)
    session = lane.open()
    for _ in range(2):
        history(lane, session, writer)
    words = memory.regions["checkpoint"].words
    rows = lane.order.table.capacity + 1
    newest, older = 16, 16 + rows * 16

    assert read_checkpoint(memory.host("a"), "checkpoint").index == 11  # type: ignore[union-attr]
    words[newest + 16 + 2] ^= np.uint64(1)  # `expected` of its first row
    assert read_checkpoint(memory.host("b"), "checkpoint").index == 6  # type: ignore[union-attr]
    words[older + 3] ^= np.uint64(1)  # `index` of its header
    assert read_checkpoint(memory.host("c"), "checkpoint") is None


def test_idle_times_survive_a_restore() -> None:
    """A session that was quiet for long is still the oldest, by the clock of another host."""
    lane, memory = OneLane(), IncoherentMemory(random.Random(1), 1)
    writer = CheckpointWriter(memory.host("sequencer"), "checkpoint", lane.order.table.capacity)
    quiet, busy = lane.open(), lane.open()
    lane.now_us += 5_000_000
    lane.send(busy, 0)
    writer.write(lane.order, lane.now_us)
    order = LaneOrder(lane.order.topic, SessionTable(16), ReorderBuffer(4))
    checkpoint = read_checkpoint(memory.host("successor"), "checkpoint")
    assert checkpoint is not None
    restore(order, checkpoint, 77)

    assert 77 - order.table.active_us[[quiet, busy]] == pytest.approx([5_000_000, 0])


def test_written_rows_were_reserved_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The region is sparse: writing a row without memory would be a SIGBUS, a failed reservation is a typed error."""
    reserved: set[int] = set()
    write_back = IncoherentRegion.flush

    def reserve(region: IncoherentRegion, offset: int, length: int) -> None:
        reserved.update(range(offset // 64, (offset + length) // 64))

    def flush(region: IncoherentRegion, offset: int, length: int) -> None:
        assert reserved.issuperset(range(offset // 64, (offset + length) // 64))
        write_back(region, offset, length)

    monkeypatch.setattr(IncoherentRegion, "reserve", reserve)
    lane, memory = OneLane(sessions=2_000), IncoherentMemory(random.Random(1), 1)
    writer = CheckpointWriter(memory.host("sequencer"), "checkpoint", lane.order.table.capacity)
    monkeypatch.setattr(IncoherentRegion, "flush", flush)
    for many in (1, 600, 1_300):
        for _ in range(many - lane.order.table.used):
            lane.open()
        writer.write(lane.order, lane.now_us)
        writer.write(lane.order, lane.now_us)
    assert len(reserved) > 2 * 1_300 * 128 // 64


@pytest.mark.parametrize("kind", [EntryKind.BATCH, EntryKind.SESSION_OPEN])
@pytest.mark.parametrize("sequence", [SESSION_SEQUENCE_MAX + 2, 1 << 63, (1 << 64) - 1])
def test_an_impossible_sequence_is_damage(kind: EntryKind, sequence: int) -> None:
    """Though the entry's check fits: a takeover does not continue with it."""
    entries = np.zeros(1, dtype=ORDER)
    entries["kind"], entries["session_seq"] = kind, sequence
    with pytest.raises(Corrupt, match="exceeds the maximum"):
        replay(OneLane().order, entries, 0)
