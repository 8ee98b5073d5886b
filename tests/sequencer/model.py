"""A model of the order of one lane, one batch at a time in plain Python: slow, obvious, and independent of numpy.

A step of batches is decided as a whole, as in the sequencer: windows stay where they are when the step starts. The
model gives the outcome of each batch, the batches that enter the log, and their order per session. Positions in the log
are the implementation's choice: sessions may interleave in any way.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from embarcadero.limits import SESSION_WINDOW as W
from embarcadero.types import NO_SESSION, Outcome

LOST = "lost"


@dataclass
class Batch:
    """One batch; `number` is its pending index."""

    number: int
    session: int
    seq: int
    crc: int
    low: int = 0
    count: int = 1


@dataclass
class Session:
    """The model's state of one session."""

    name: int = 0
    open: bool = True
    expected: int = 0
    low: int = 0
    known: dict[int, tuple[object, int]] = field(default_factory=dict)  # sequence -> (batch number or LOST, crc)
    held: dict[int, Batch] = field(default_factory=dict)
    gap_us: int | None = None
    successor: int | None = None
    taken: bool = False
    active_us: int = 0
    strong: bool = False


class Model:
    """One lane."""

    def __init__(self, order: int, skips: bool, gap_us: int) -> None:
        self.all_strong, self.skips, self.gap_timeout_us = order == 5, skips, gap_us
        self.sessions: dict[int, Session] = {}
        self.names: dict[int, int] = {}  # the newest session of each name
        self.log: list[tuple[str, int, int]] = []  # (kind, session, sequence), in an order that the real log shares
        self.answers: dict[int, tuple[Outcome, object, int]] = {}  # number -> (outcome, original's number, extra)

    # --- batches ---
    def step(self, batches: list[Batch], now_us: int) -> None:
        """Decide on a round of batches."""
        fresh = self._fresh(batches)
        for batch in fresh:
            self._displace(self.sessions[batch.session], batch.seq)
            self.sessions[batch.session].active_us = now_us
        for batch in batches:
            if (session := self.sessions.get(batch.session)) and session.open:
                session.active_us = now_us
        for batch in fresh:
            if not self.sessions[batch.session].strong:
                self._ordered(batch)
        self._strong([batch for batch in fresh if self.sessions[batch.session].strong], now_us)
        waiting = {b.number for s in self.sessions.values() for b in s.held.values()}
        for batch in batches:
            if batch.number not in self.answers and batch.number not in waiting:
                self.answers[batch.number] = self._settle(batch)

    @staticmethod
    def _displace(session: Session, seq: int) -> None:
        """An entry of a window replaces the entry a whole number of windows before it."""
        for old in [old for old in session.known if old < seq and (seq - old) % W == 0]:
            del session.known[old]

    def _fresh(self, batches: list[Batch]) -> list[Batch]:
        for batch in batches:
            session = self.sessions.get(batch.session)
            if session and session.open and not session.strong:
                session.low = max(session.low, min(batch.low, batch.seq))
        fresh: list[Batch] = []
        seen: set[tuple[int, int]] = set()
        for batch in batches:
            session = self.sessions.get(batch.session)
            if session is None or not session.open or (batch.session, batch.seq) in seen:
                continue
            first = session.expected if session.strong else session.low
            if first <= batch.seq < first + W and batch.seq not in session.held and batch.seq not in session.known:
                seen.add((batch.session, batch.seq))
                fresh.append(batch)
        return fresh

    def _strong(self, fresh: list[Batch], now_us: int) -> None:
        arrived: dict[int, dict[int, Batch]] = {}
        for batch in fresh:
            arrived.setdefault(batch.session, {})[batch.seq] = batch
        for handle, mine in arrived.items():
            session = self.sessions[handle]
            had_gap = bool(session.held)
            moved = self._drain(session, mine)
            session.held.update(mine)
            self._clock(session, moved or not had_gap, now_us)

    def _drain(self, session: Session, mine: dict[int, Batch]) -> bool:
        before = session.expected
        while (batch := mine.pop(session.expected, None) or session.held.pop(session.expected, None)) is not None:
            self._ordered(batch)
        return session.expected > before

    @staticmethod
    def _clock(session: Session, restart: bool, now_us: int) -> None:
        if not session.held:
            session.gap_us = None
        elif restart or session.gap_us is None:
            session.gap_us = now_us

    def _ordered(self, batch: Batch) -> None:
        session = self.sessions[batch.session]
        session.expected = max(session.expected, batch.seq + 1)
        session.known[batch.seq] = (batch.number, batch.crc)
        self.log.append(("batch", batch.session, batch.seq))
        self.answers[batch.number] = (Outcome.ORDERED, batch.number, 0)

    def _settle(self, batch: Batch) -> tuple[Outcome, object, int]:
        session = self.sessions.get(batch.session)
        if session is None:
            return Outcome.UNKNOWN_SESSION, None, 0
        if not session.strong and batch.seq < session.low:
            return Outcome.STALE, None, 0
        if (not session.strong or batch.seq < session.expected) and batch.seq in session.known:
            where, crc = session.known[batch.seq]
            if where == LOST:
                return Outcome.LOST, None, 0
            return (Outcome.DUP_OF, where, 0) if crc == batch.crc else (Outcome.CONFLICT, None, 0)
        if session.strong and batch.seq < session.expected:
            return Outcome.STALE if self.skips or batch.seq < session.low else Outcome.DUP, None, 0
        if not session.open:
            return Outcome.FENCED, None, session.expected
        if batch.seq in session.held and session.held[batch.seq].crc != batch.crc:
            return Outcome.CONFLICT, None, 0
        return Outcome.UNDECIDED if batch.seq in session.held else Outcome.BACKPRESSURE, None, 0

    # --- sessions ---
    def open(
        self, handle: int, name: int = 0, resumed: int = NO_SESSION, now_us: int = 0, at: int | None = None,
        strong: bool = False,
    ) -> Outcome:  # fmt: skip
        """Open `handle` (chosen by the implementation), unless that is refused."""
        earlier = None
        if resumed != NO_SESSION:
            earlier = resumed if resumed in self.sessions else None
            while earlier is not None and self.sessions[earlier].successor is not None:
                successor = self.sessions[earlier].successor
                earlier = successor if successor in self.sessions else None
            if earlier is None:
                return Outcome.UNKNOWN_SESSION
            if self.sessions[earlier].taken:
                return Outcome.FENCED
        elif name:
            earlier = self.names.get(name)
        made = Session(name=name, active_us=now_us, strong=strong or self.all_strong)
        if earlier is not None:
            old = self.sessions[earlier]
            if old.open:
                self.fence(earlier, now_us)
            made.name, made.strong = name or old.name, old.strong
            made.expected, made.low, made.known = old.expected, old.low, dict(old.known)
            old.active_us = now_us
            if resumed == NO_SESSION:
                old.taken = True
            else:
                old.successor = handle
        self.sessions[handle] = made
        if made.name:
            self.names[made.name] = handle
        if at is not None and at > made.expected:
            made.expected = made.low = at
        self.log.append(("open", handle, made.expected))
        if at is not None and earlier is not None and resumed == NO_SESSION:
            self.close(earlier)
        for outlived in self._before(resumed)[:2]:
            self.close(outlived)
        return Outcome.OPENED

    def _before(self, handle: int) -> list[int]:
        """The sessions that were continued up to this one, the oldest first."""
        before = [other for other, session in self.sessions.items() if session.successor == handle]
        return self._before(before[0]) + before if before else []

    def fence(self, handle: int, now_us: int) -> None:
        """Take no more batches of this session."""
        session = self.sessions[handle]
        self._refuse(session)
        session.open, session.active_us = False, now_us
        self.log.append(("fence", handle, session.expected))

    def _refuse(self, session: Session) -> None:
        for batch in session.held.values():
            self.answers[batch.number] = (Outcome.FENCED, None, session.expected)
        session.held.clear()
        session.gap_us = None

    def close(self, handle: int) -> None:
        """Forget this session."""
        if handle in self.sessions:
            self._refuse(self.sessions[handle])
            self.log.append(("close", handle, self.sessions[handle].expected))
            if self.names.get(self.sessions[handle].name) == handle:
                del self.names[self.sessions[handle].name]
            del self.sessions[handle]

    def expire(self, now_us: int) -> None:
        """End gaps that are too old."""
        for handle, session in self.sessions.items():
            if session.gap_us is None or now_us < session.gap_us + self.gap_timeout_us:
                continue
            if self.skips:
                front = min(session.held)
                self.log.append(("skip", handle, session.expected))
                for seq in range(session.expected, front):
                    self._displace(session, seq)
                    session.known[seq] = (LOST, 0)
                session.expected = front
                self._drain(session, {})
                self._clock(session, True, now_us)
            else:
                self.fence(handle, now_us)
