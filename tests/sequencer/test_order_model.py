"""The vectorized order agrees with a plain model, for any mixture of sessions, reorderings, duplicates and gaps."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embarcadero.limits import SESSION_WINDOW as W
from embarcadero.types import NO_INDEX, NO_SESSION, EntryKind, Outcome
from tests.sequencer.harness import GAP_MS, OneLane
from tests.sequencer.model import Batch, Model

KINDS = {
    EntryKind.BATCH: "batch", EntryKind.SESSION_OPEN: "open", EntryKind.SESSION_FENCE: "fence",
    EntryKind.SESSION_CLOSE: "close", EntryKind.SKIP: "skip",
}  # fmt: skip


class Pair:
    """The implementation and the model, with the same input."""

    def __init__(self, order: int, on_gap: str, rng: random.Random, strong_share: float = 0.0) -> None:
        self.strong_share = strong_share  # of the sessions that ask to be strong
        self.strong: dict[int, bool] = {}  # by handle
        self.real = OneLane(order, on_gap)
        self.model = Model(order, on_gap == "skip", GAP_MS * 1000)
        self.rng = rng
        self.sent: list[Batch] = []

    def act(self) -> None:
        """One random action."""
        what = self.rng.choice(["step"] * 6 + ["open", "name", "at", "resume", "close", "time", "time"])
        known = list(self.model.sessions)
        if what == "open" and len(known) < 12:
            self.open()
        elif what == "name" and len(known) < 12:
            self.open(name=self.rng.choice([11, 12]))
        elif what == "at" and len(known) < 12:
            self.open(name=self.rng.choice([11, 12]), at=self.rng.choice([0, 3, W, 1000, 1000, 1 << 20]))
        elif what == "resume" and known and len(known) < 12:
            self.open(resumed=self.rng.choice([*known, 77]))
        elif what == "close" and known:
            self.model.close(handle := self.rng.choice([*known, 78]))
            self.real.request(EntryKind.SESSION_CLOSE, handle)
        elif what == "time":
            self.real.now_us += self.rng.choice([GAP_MS * 100, GAP_MS * 1000])
            self.model.expire(self.real.now_us)
            self.real.later(0)
        else:
            self._step(known)

    def open(self, name: int = 0, resumed: int = NO_SESSION, at: int | None = None) -> None:
        strong = self.rng.random() < self.strong_share
        result = self.real.request(EntryKind.SESSION_OPEN, resumed, name, at=at, strong=strong)
        expected = self.model.open(int(result["session"]), name, resumed, self.real.now_us, at, strong)
        assert Outcome(int(result["outcome"])) == expected
        if expected == Outcome.OPENED:
            session = self.model.sessions[int(result["session"])]
            assert int(result["extra"]) == session.expected
            assert int(result["order"]) == (5 if session.strong else 2)
            self.strong[int(result["session"])] = session.strong

    def _step(self, known: list[int]) -> None:
        self.real.now_us += self.rng.randrange(2000)
        batches: list[Batch] = []
        for handle in self.rng.sample(known, min(len(known), self.rng.randrange(1, 4))) or [5]:
            batches += self._stretch(handle)
        shuffle = self.rng.random()
        if shuffle < 0.4:
            self.rng.shuffle(batches)
        elif shuffle < 0.6:
            batches.sort(key=lambda batch: batch.seq)
        for batch in batches:
            self.real.numbers += 1
            batch.number = self.real.numbers
        self.sent += batches
        self.model.step(batches, self.real.now_us)
        self.real.step(batches)

    def _stretch(self, handle: int) -> list[Batch]:
        """Sequences of one session near its current position."""
        rng, session = self.rng, self.model.sessions.get(handle)
        start = session.expected if session else 0
        if rng.random() < 0.3:
            start = max(0, start + rng.choice([-W - 3, -W, -5, 1, 2, W - 2, W, W + 1]))
        low = max(0, start - rng.choice([0, 3, W - 1, W, 2 * W]))
        count = rng.choice([1, 2, 5, 20, W - 1, W + 10])
        batches = [Batch(0, handle, seq, seq % 251, low, 1 + seq % 3) for seq in range(start, start + count)]
        if rng.random() < 0.4:
            batches = [batch for batch in batches if rng.random() > rng.choice([0.05, 0.5])]
        for batch in rng.sample(batches, min(len(batches), rng.choice([0, 0, 1, 3]))):
            batches.append(Batch(0, handle, batch.seq, batch.crc + rng.choice([0, 0, 1]), low, batch.count))
        return batches

    def compare(self) -> None:
        """Same outcomes, same log up to how sessions interleave, dense positions."""
        log, positions = self.real.log, {}
        mine: dict[int, list[tuple[str, int]]] = {}
        for at, entry in enumerate(log):
            assert int(entry["index"]) == at
            key = (int(entry["session"]), int(entry["session_seq"]))
            mine.setdefault(key[0], []).append((KINDS[EntryKind(int(entry["kind"]))], key[1]))
            if entry["kind"] == EntryKind.BATCH:
                assert key not in positions
                positions[key] = (at, int(entry["seq"]))
        theirs: dict[int, list[tuple[str, int]]] = {}
        for kind, handle, seq in self.model.log:
            theirs.setdefault(handle, []).append((kind, seq))
        for handle in mine.keys() | theirs.keys():
            found, told = mine.get(handle, []), theirs.get(handle, [])
            assert found == told if self.strong[handle] else sorted(found) == sorted(told)
        where = {batch.number: positions.get((batch.session, batch.seq)) for batch in self.sent}
        for batch in self.sent:
            self._compare_answer(batch, where)
        seqs = [int(entry["seq"]) for entry in log]
        ends = [int(entry["seq"]) + int(entry["count"]) for entry in log]
        assert seqs == [0, *ends][: len(seqs)]

    def _compare_answer(self, batch: Batch, where: dict[int, tuple[int, int] | None]) -> None:
        expected = self.model.answers.get(batch.number)
        assert self.real.outcome(batch) == (expected[0] if expected else None), batch
        if expected is None:
            return
        outcome, original, extra = expected
        result = self.real.answers[batch.number]
        position = (int(result["index"]), int(result["seq"]))
        assert int(result["session_seq"]) == batch.seq
        assert int(result["session"]) == batch.session
        assert int(result["extra"]) == extra
        if outcome in (Outcome.ORDERED, Outcome.DUP_OF):
            assert position == where[original]  # type: ignore[index]
        else:
            assert position == (NO_INDEX, NO_INDEX)


KINDS_OF_TOPICS = [(5, "fence", 0.0), (5, "skip", 0.0), (2, "fence", 0.0), (2, "fence", 0.5), (2, "skip", 0.5)]
"""Order, the handling of gaps, and which part of the sessions asks to be strong."""


@pytest.mark.parametrize(("order", "on_gap", "strong_share"), KINDS_OF_TOPICS)
@given(seed=st.integers(0, 1 << 32))
@settings(deadline=None, max_examples=60)
def test_any_history_is_decided_as_the_model_decides_it(
    order: int, on_gap: str, strong_share: float, seed: int
) -> None:
    """Outcomes, order per session, positions and gaps are those of the model."""
    pair = Pair(order, on_gap, random.Random(seed), strong_share)
    pair.open()
    for _ in range(14):
        pair.act()
    pair.compare()
