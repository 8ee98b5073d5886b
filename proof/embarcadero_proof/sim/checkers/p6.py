"""P6: durable means synced on A of the R replicas of the range that owns the batch. Never fewer, never declared."""

from __future__ import annotations

from embarcadero_proof.sim.checkers.ledger import Violation, ledger_of
from embarcadero_proof.sim.history import ByReference, Copies, CopyDiffers, History, OnDisk, Settled, TailRead, Verdict


def check(history: History) -> list[Violation]:
    """Return all violations of P6."""
    found = [*_enough_copies(history), *_tails(history), *_copies_agree(history), *_copies_are_equal(history)]
    return found + _only_durable_is_referenced(history)


def _enough_copies(history: History) -> list[Violation]:
    return [
        Violation("P6", c.at, (
            f"{c.who} took index {c.index} of lane {c.lane} as durable; {c.copies} replicas of its range have synced "
            f"it, and {c.needed} are needed"))
        for c in history.of(Copies)
        if c.copies < c.needed
    ]  # fmt: skip


def _only_durable_is_referenced(history: History) -> list[Violation]:
    """A staged batch that was published by reference was durable before, so it is never lost."""
    ledger = ledger_of(history) if history.of(ByReference) else None
    stored = {(s.process, s.number): s.at for s in history.of(Settled) if s.verdict is Verdict.STORED}
    return [
        Violation("P6", stored[event.process, event.number], (
            f"batch {event.number} of {event.process} was published from index {event.index} of lane {event.lane}, "
            "which was not durable: it is lost"))
        for event in history.of(ByReference)
        if ledger is not None and event.right and (event.process, event.number) in stored
        and ledger.is_lost(event.lane, event.index)
    ]  # fmt: skip


def _copies_are_equal(history: History) -> list[Violation]:
    """After all had time to catch up, every copy has the same bytes below the durable end."""
    return [
        Violation("P6", c.at, f"replica {c.replica} {c.what} index {c.index} of lane {c.lane}, below the durable end")
        for c in history.of(CopyDiffers)
    ]


def _tails(history: History) -> list[Violation]:
    """The durable end is never above the ordered end."""
    return [
        Violation("P6", t.at, (
            f"{t.process} got {t.durable_index} as the durable end of lane {t.lane}, but its ordered end is only "
            f"{t.index}"))
        for t in history.of(TailRead)
        if t.durable_index > t.index
    ]  # fmt: skip


def _copies_agree(history: History) -> list[Violation]:
    """One position is one batch on all disks, whatever was lost meanwhile."""
    found: list[Violation] = []
    first: dict[tuple[int, int], OnDisk] = {}
    for stored in history.of(OnDisk):
        other = first.setdefault((stored.lane, stored.index), stored)
        if other.digest != stored.digest:
            found.append(Violation("P6", stored.at, (
                f"two disks have two different batches at index {stored.index} of lane {stored.lane}")))  # fmt: skip
    return found
