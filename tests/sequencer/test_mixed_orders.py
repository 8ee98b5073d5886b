"""Strong and weak sessions in one lane of order 2: each keeps its own rules, and no session waits for another."""

from __future__ import annotations

import random

import numpy as np
import pytest

from embarcadero.fabric.layout import LINE, OPEN_STRONG, OPEN_TAKEN, ORDER, seal
from embarcadero.sequencer.leader.takeover import readmit
from embarcadero.sequencer.order.batches import LaneOrder, OpenedFacts, open_entry, opened_facts, order_one
from embarcadero.sequencer.order.checkpoint import CheckpointWriter, read_checkpoint, restore
from embarcadero.sequencer.order.sessions import ReorderBuffer, SessionTable
from embarcadero.types import EntryKind, Order, Outcome
from embarcadero_proof.sim.incoherent import IncoherentMemory
from tests.sequencer.harness import GAP_MS, OneLane, pending

ORDERED = Outcome.ORDERED


def both(on_gap: str = "fence") -> tuple[OneLane, int, int]:
    """A lane of order 2 with a weak and a strong session."""
    lane = OneLane(order=2, on_gap=on_gap)
    return lane, lane.open(), lane.open(strong=True)


def test_only_the_strong_session_waits_for_its_gap() -> None:
    """Both miss sequence 1 in the same step: the weak session's next batch is ordered, the strong one's waits."""
    lane, weak, strong = both()
    batches = [lane.batch(session, seq) for seq in (0, 2) for session in (weak, strong)]
    assert lane.step(batches) == [ORDERED, ORDERED, ORDERED, None]
    assert (lane.stored(weak), lane.stored(strong)) == ([0, 2], [0])
    assert lane.send(weak, 1, 3) == [ORDERED, ORDERED]
    assert lane.send(strong, 1) == [ORDERED]
    assert (lane.stored(weak), lane.stored(strong)) == ([0, 2, 1, 3], [0, 1, 2])


def test_a_step_in_order_is_taken_as_it_came() -> None:
    """Sessions of both kinds interleave in the log as their batches arrived."""
    lane, weak, strong = both()
    came = [(strong, 0), (weak, 5), (strong, 1), (weak, 0), (strong, 2)]
    assert lane.step([lane.batch(session, seq) for session, seq in came]) == [ORDERED] * 5
    batches = lane.log[lane.log["kind"] == EntryKind.BATCH]
    assert list(zip(batches["session"].tolist(), batches["session_seq"].tolist(), strict=True)) == came


@pytest.mark.parametrize("on_gap", ["fence", "skip"])
def test_a_gap_ends_the_strong_session_only(on_gap: str) -> None:
    """on_gap is for strong sessions; a weak one has no gaps."""
    lane, weak, strong = both(on_gap)
    lane.step([lane.batch(session, 1) for session in (weak, strong)])
    lane.later(GAP_MS * 1000)
    assert lane.send(weak, 0) == [ORDERED]
    if on_gap == "fence":
        assert lane.send(strong, 0) == [Outcome.FENCED]
    else:
        assert lane.stored(strong) == [1]
        assert lane.send(strong, 0) == [Outcome.LOST]


@pytest.mark.parametrize("strong", [True, False])
def test_a_continued_session_keeps_its_order(strong: bool) -> None:
    """By handle and by name, whatever the next request asks for; the answer contains its order."""
    lane = OneLane(order=2)
    first = lane.open(name=7, strong=strong)
    again = lane.request(EntryKind.SESSION_OPEN, first, strong=not strong)
    taken = lane.request(EntryKind.SESSION_OPEN, name=7, strong=not strong)
    expected = Order.STRONG if strong else Order.TOTAL
    assert [int(again["order"]), int(taken["order"])] == [expected, expected]
    assert lane.send(int(taken["session"]), 1) == [None if strong else ORDERED]


def test_entries_of_earlier_versions_have_the_topics_order() -> None:
    """Flags 0 and 1 of a SESSION_OPEN keep their meaning; the order is a bit of its own."""
    entry = np.zeros(1, dtype=ORDER)
    for flags, taken, strong in ((0, False, False), (1, True, False), (2, False, True), (3, True, True)):
        entry["flags"] = flags
        facts = opened_facts(entry[0])
        assert (facts.taken, facts.strong) == (taken, strong)
        assert int(open_entry(3, 0, facts)["flags"][0]) == flags
    assert (OPEN_TAKEN, OPEN_STRONG) == (1, 2)
    assert opened_facts(open_entry(3, 9, OpenedFacts(77, 5, taken=True, strong=True))[0]) == (77, 5, True, True)


@pytest.mark.parametrize(("order", "strong"), [(2, False), (5, True)])
def test_a_checkpoint_of_an_earlier_version_has_the_topics_order(order: int, strong: bool) -> None:
    """Its rows have 0 in the field of the order: sessions have the order of their topic."""
    lane, memory = OneLane(order=order), IncoherentMemory(random.Random(1), 1)
    session = lane.open()
    lane.send(session, *range(5))
    CheckpointWriter(memory.host("sequencer"), "checkpoint", lane.order.table.capacity).write(lane.order, lane.now_us)
    checkpoint = read_checkpoint(memory.host("successor"), "checkpoint")
    assert checkpoint is not None
    assert checkpoint.rows["strong"].tolist() == [int(strong)]
    checkpoint.rows["strong"] = 0
    made = LaneOrder(lane.order.topic, SessionTable(16), ReorderBuffer(4))
    restore(made, checkpoint, 0)
    assert bool(made.table.strong[session]) is strong


def test_a_takeover_holds_batches_of_strong_sessions_only() -> None:
    """Waiting batches are decided again, unless their session is strong and its gap still open."""
    lane, weak, strong = both()
    waiting = pending([lane.batch(session, 1) for session in (weak, strong)])
    waiting["lane"] = lane.order.topic.lane
    undecided = readmit({lane.order.topic.lane: lane.order}, lane.order.buffer, waiting, lane.now_us)
    assert lane.order.buffer.entries["session"][undecided].tolist() == [weak]
    assert lane.order.table.waiting.count[[weak, strong]].tolist() == [0, 1]


def test_a_lone_batch_is_decided_by_its_sessions_order() -> None:
    """In plain numbers: any new batch of a weak session, the next one only of a strong session."""
    lane, weak, strong = both()

    def alone(session: int, seq: int) -> bool:
        line = list(LINE.unpack(seal(pending([lane.batch(session, seq)])).tobytes()))
        return order_one(lane.order, line, lane.now_us) is not None

    assert [alone(weak, 3), alone(strong, 3), alone(strong, 0), alone(weak, 0), alone(strong, 1)] == [
        True, False, True, True, True,
    ]  # fmt: skip
