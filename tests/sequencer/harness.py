"""Helpers for tests of one lane without a fabric."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from embarcadero.fabric.layout import OPEN_STRONG, ORDER, PENDING, Entries, join
from embarcadero.sequencer.order.batches import LaneOrder
from embarcadero.sequencer.order.lane import control, expire
from embarcadero.sequencer.order.sessions import ReorderBuffer, SessionTable
from embarcadero.types import NO_SESSION, EntryKind, Outcome, Topic
from tests.sequencer.model import Batch

GAP_MS = 100


def topic(order: int = 5, on_gap: str = "fence", lane: int = 0, **options: Any) -> Topic:
    """A topic with short time-outs."""
    return Topic(name=f"t{lane}", lane=lane, order=order, on_gap=on_gap, **({"gap_timeout_ms": GAP_MS} | options))


def pending(batches: Iterable[Batch], origin: int = 1) -> Entries:
    """Pending entries of batches."""
    rows = list(batches)
    made = np.zeros(len(rows), dtype=PENDING)
    made["kind"], made["origin"] = EntryKind.BATCH, origin
    for name, values in {
        "index": [b.number for b in rows], "session": [b.session for b in rows], "session_seq": [b.seq for b in rows],
        "crc": [b.crc for b in rows], "low": [b.low for b in rows], "count": [b.count for b in rows],
    }.items():  # fmt: skip
        made[name] = values
    return made


def request(
    kind: EntryKind, number: int, session: int = NO_SESSION, name: int = 0, origin: int = 1, at: int | None = None,
    holder: int | None = None, strong: bool = False,
) -> Entries:  # fmt: skip
    """A pending entry that is not a batch."""
    made = np.zeros(1, dtype=PENDING)
    made["kind"], made["index"], made["session"], made["session_seq"] = kind, number, session, name
    made["origin"], made["low"] = origin, 0 if at is None else at + 1
    made["crc"], made["flags"] = 0 if holder is None else min(holder + 1, NO_SESSION), OPEN_STRONG if strong else 0
    return made


class OneLane:
    """A lane, its outcomes, and the entries it appended."""

    def __init__(
        self, order: int = 5, on_gap: str = "fence", held: int = 4096, sessions: int = 16, **options: Any
    ) -> None:
        self.order = LaneOrder(topic(order, on_gap, **options), SessionTable(sessions), ReorderBuffer(held))
        self.order.idle_due_us = 0
        self.now_us = 1_000
        self.numbers = 0
        self.answers: dict[int, Any] = {}
        self.log: Entries = np.empty(0, dtype=ORDER)

    # --- requests ---
    def batch(self, session: int, seq: int, crc: int = 7, low: int = 0, count: int = 1) -> Batch:
        """A batch with the next pending index."""
        self.numbers += 1
        return Batch(self.numbers, session, seq, crc, low, count)

    def step(self, batches: list[Batch]) -> list[Outcome | None]:
        """Order batches; their outcomes (None: waits)."""
        self.order.order(pending(batches), self.now_us)
        self.collect()
        return [self.outcome(batch) for batch in batches]

    def send(self, session: int, *seqs: int, crc: int = 7, low: int = 0) -> list[Outcome | None]:
        """Batches of one session in one step."""
        return self.step([self.batch(session, seq, crc, low) for seq in seqs])

    def request(
        self, kind: EntryKind, session: int = NO_SESSION, name: int = 0, origin: int = 1, at: int | None = None,
        holder: int | None = None, strong: bool = False,
    ) -> Any:  # fmt: skip
        """Execute a request; its result."""
        self.numbers += 1
        control(self.order, request(kind, self.numbers, session, name, origin, at, holder, strong), self.now_us)
        self.collect()
        return self.answers[self.numbers]

    def open(self, name: int = 0, resumed: int = NO_SESSION, at: int | None = None, strong: bool = False) -> int:
        """Open a session; its handle."""
        result = self.request(EntryKind.SESSION_OPEN, resumed, name, at=at, strong=strong)
        assert result["outcome"] == Outcome.OPENED, Outcome(int(result["outcome"]))
        return int(result["session"])

    def later(self, us: int) -> int:
        """Advance the time."""
        self.now_us += us
        done = expire(self.order, self.now_us)
        self.collect()
        return done

    # --- observations ---
    def collect(self) -> None:
        """Collect the decisions; nothing is answered twice."""
        blocks = self.order.out.take_order()
        self.log = join([self.log, *blocks])
        for _, results in self.order.out.take_answers():
            for result in results:
                number = int(result["pending"])
                assert number not in self.answers, f"{number} was answered twice"
                self.answers[number] = result

    def outcome(self, batch: Batch | int) -> Outcome | None:
        """The outcome of a batch; None: it waits."""
        number = batch if isinstance(batch, int) else batch.number
        return Outcome(int(self.answers[number]["outcome"])) if number in self.answers else None

    def stored(self, session: int) -> list[int]:
        """Sequences of a session in the log, in log order."""
        mine = self.log[(self.log["kind"] == EntryKind.BATCH) & (self.log["session"] == session)]
        return [int(seq) for seq in mine["session_seq"]]

    def kinds(self) -> list[EntryKind]:
        """Kinds of all log entries."""
        return [EntryKind(int(kind)) for kind in self.log["kind"]]
