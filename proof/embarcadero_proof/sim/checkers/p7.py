"""P7: wrong bytes are never served, and a damaged copy is repaired from a good one."""

from __future__ import annotations

from embarcadero_proof.sim.checkers.ledger import Ledger, Violation, ledger_of
from embarcadero_proof.sim.history import DamageLeft, Delivered, History, OnDisk


def check(history: History) -> list[Violation]:
    """Return all violations of P7."""
    ledger = ledger_of(history)
    return [*_nothing_unsent(ledger), *_as_sent(ledger), *_disks_hold_only_sent_batches(ledger), *_repaired(history)]


def _nothing_unsent(ledger: Ledger) -> list[Violation]:
    return [
        Violation("P7", d.at, f"reader {d.reader} found at index {d.index} of lane {d.lane} content never sent")
        for d in ledger.history.of(Delivered)
        if d.digest not in ledger.batch_of
    ]


def _as_sent(ledger: Ledger) -> list[Violation]:
    """Not only the bytes are right, but also the number of records and the partition."""
    found: list[Violation] = []
    for event in ledger.history.of(Delivered):
        batch = ledger.batch_of.get(event.digest)
        sent = ledger.first_sent[batch] if batch is not None else None
        if sent is not None and (event.count, event.partition) != (sent.count, sent.partition):
            found.append(Violation("P7", event.at, (
                f"reader {event.reader} got {ledger.name(event.digest)} as {event.count} records of partition "
                f"{event.partition}; it was sent as {sent.count} of partition {sent.partition}")))  # fmt: skip
    return found


def _disks_hold_only_sent_batches(ledger: Ledger) -> list[Violation]:
    return [
        Violation("P7", d.at, f"a disk has at index {d.index} of lane {d.lane} content never sent")
        for d in ledger.history.of(OnDisk)
        if d.digest not in ledger.batch_of
    ]


def _repaired(history: History) -> list[Violation]:
    return [
        Violation("P7", d.at, f"replica {d.replica} has a wrong copy of {d.path}, though all had time to heal")
        for d in history.of(DamageLeft)
    ]
