"""P2: a position never names two batches, a batch has at most one position, and an ack names the right one."""

from __future__ import annotations

from embarcadero_proof.sim.checkers.ledger import Batch, Claim, Ledger, Violation, covered, inside, ledger_of
from embarcadero_proof.sim.history import ByReference, Delivered, FabricLost, History, Numbered, Sent, Settled, Verdict


def check(history: History) -> list[Violation]:
    """Return all violations of P2."""
    ledger = ledger_of(history)
    return [
        *_one_batch_per_position(ledger),
        *_one_position_per_batch(ledger),
        *_one_position_per_sequence(ledger),
        *_numbers_never_move(ledger),
        *_records_do_not_overlap(ledger),
        *_refused_never_appear(ledger),
        *_acked_is_there(ledger),
        *_wrong_references_are_refused(history),
    ]


def _one_batch_per_position(ledger: Ledger) -> list[Violation]:
    found = []
    for lane, at_index in ledger.claims.items():
        for index, claims in at_index.items():
            first = claims[0]
            for claim in claims[1:]:
                if claim.digest != first.digest:
                    found.append(Violation("P2", max(first.at, claim.at), (
                        f"index {index} of lane {lane} names two batches: {ledger.name(first.digest)} ({first.who}) "
                        f"and {ledger.name(claim.digest)} ({claim.who})")))  # fmt: skip
                elif claim.seq != first.seq and -1 not in (claim.seq, first.seq):
                    found.append(Violation("P2", max(first.at, claim.at), (
                        f"index {index} of lane {lane} has two seqs: {first.seq} ({first.who}) and {claim.seq} "
                        f"({claim.who})")))  # fmt: skip
    return found


def _one_position_per_batch(ledger: Ledger) -> list[Violation]:
    found: list[Violation] = []
    seen: dict[tuple[int, int], Claim] = {}
    for lane, at_index in ledger.claims.items():
        if lane in ledger.broker_lanes:
            continue
        for index, claims in at_index.items():
            for claim in claims if not ledger.is_lost(lane, index) else ():
                key = (lane, claim.digest)
                other = seen.setdefault(key, claim)
                if other.index != index:
                    found.append(Violation("P2", max(other.at, claim.at), (
                        f"{ledger.name(claim.digest)} has two positions in lane {lane}: index {other.index} "
                        f"({other.who}) and {index} ({claim.who})")))  # fmt: skip
    return found


def _numbers_never_move(ledger: Ledger) -> list[Violation]:
    """A batch that its caller numbered is stored under that number. Else another batch is lost, or stored twice."""
    streams = {event.stream for event in ledger.history.of(Numbered)}
    found: list[Violation] = []
    for event in ledger.history.of(Delivered) if streams else ():
        batch = ledger.batch_of.get(event.digest)
        if batch is not None and batch[0] in streams and event.session_seq != batch[1]:
            found.append(Violation("P2", event.at, (
                f"batch {batch[1]} of {batch[0]}, numbered by its caller, is stored as {event.session_seq} "
                f"(index {event.index} of lane {event.lane})")))  # fmt: skip
    return found


def _one_position_per_sequence(ledger: Ledger) -> list[Violation]:
    found: list[Violation] = []
    seen: dict[tuple[int, int, int], Delivered] = {}
    for event in ledger.history.of(Delivered):
        if ledger.is_lost(event.lane, event.index):
            continue
        other = seen.setdefault((event.lane, event.session, event.session_seq), event)
        if other.index != event.index and event.lane not in ledger.broker_lanes:
            found.append(Violation("P2", event.at, (
                f"session {event.session} of lane {event.lane} has its sequence {event.session_seq} at two positions: "
                f"index {other.index} (reader {other.reader}) and {event.index} (reader {event.reader})")))  # fmt: skip
    return found


def _records_do_not_overlap(ledger: Ledger) -> list[Violation]:
    """Seqs are dense: each batch starts at the end of the batch before."""
    found: list[Violation] = []
    by_lane: dict[int, dict[int, Delivered]] = {}
    for event in ledger.history.of(Delivered):
        by_lane.setdefault(event.lane, {}).setdefault(event.index, event)
    for lane, at_index in by_lane.items():
        before: Delivered | None = None
        for index in sorted(at_index):
            now = at_index[index]
            if before is not None:
                end = before.seq + before.count
                if now.seq < end or (index == before.index + 1 and now.seq != end):
                    found.append(Violation("P2", max(before.at, now.at), (
                        f"lane {lane}: index {before.index} holds seqs {before.seq} to {end}, but index {index} starts "
                        f"at {now.seq}")))  # fmt: skip
            before = now
    return found


def _refused_never_appear(ledger: Ledger) -> list[Violation]:
    """A batch is not in the log if all calls that sent it definitely failed, unless it was there before a loss."""
    found: list[Violation] = []
    lost_us = min((lost.at for lost in ledger.history.of(FabricLost)), default=None)
    failed = {(s.process, s.number): s for s in ledger.history.of(Settled) if s.verdict is Verdict.FAILED}
    refusals: dict[Batch, Settled | None] = {}
    for sent in ledger.history.of(Sent):
        batch = (sent.stream, sent.number)
        refusals[batch] = failed.get((sent.process, sent.number)) if refusals.get(batch, sent) is not None else None
    for event in ledger.history.of(Delivered):
        found_batch = ledger.batch_of.get(event.digest)
        refused = refusals.get(found_batch) if found_batch is not None else None
        if refused is None:
            continue
        if lost_us is None or refused.at < lost_us or not ledger.is_lost(event.lane, event.index):
            found.append(Violation("P2", max(event.at, refused.at), (
                f"{ledger.name(event.digest)} was refused ({refused.error}), but reader {event.reader} found it at "
                f"index {event.index} of lane {event.lane}")))  # fmt: skip
    return found


def _wrong_references_are_refused(history: History) -> list[Violation]:
    """A batch that names a staged batch with other bytes is not stored, unless an earlier copy of it was."""
    sent = history.of(ByReference)
    right = {(event.stream, event.number) for event in sent if event.right}
    wrong = {(event.process, event.number): event for event in sent if not event.right}
    return [
        Violation("P2", s.at, (
            f"batch {s.number} of {s.process} was stored, though index {named.index} of lane {named.lane}, which it "
            "named, is another batch"))
        for s in history.of(Settled)
        if s.verdict is Verdict.STORED and (named := wrong.get((s.process, s.number))) is not None
        and (s.stream, s.number) not in right
    ]  # fmt: skip


def _acked_is_there(ledger: Ledger) -> list[Violation]:
    """A reader without a gap at a position found every batch that was acked there."""
    found: list[Violation] = []
    delivered = {(d.lane, d.index) for d in ledger.history.of(Delivered)}
    lanes = sorted({ack.lane for ack in ledger.history.of(Settled)})
    spans = {lane: covered(ledger.history, lane) for lane in lanes}
    for ack in ledger.history.of(Settled):
        if ack.verdict is not Verdict.STORED or ack.index is None or (ack.lane, ack.index) in delivered:
            continue
        if inside(spans[ack.lane], ack.index, ack.index + 1):
            found.append(Violation("P2", ack.at, (
                f"batch {ack.number} of {ack.stream} was acked at index {ack.index} of lane {ack.lane}, but a reader "
                "that passed there found nothing")))  # fmt: skip
    return found
