"""P1: an acked batch is readable at its acked position until trimmed: ack 1 while the fabric lives, ack 2 always."""

from __future__ import annotations

from collections import defaultdict

from embarcadero.types import Ack, GapKind
from embarcadero_proof.sim.checkers.ledger import Ledger, Violation, inside, ledger_of, merge
from embarcadero_proof.sim.history import (
    ByReference,
    Delivered,
    Died,
    Ended,
    FabricLost,
    GapSeen,
    Healed,
    History,
    LossTold,
    LostSpan,
    MirrorLeft,
    Moved,
    OnDisk,
    PublisherEnded,
    Settled,
    Stopped,
    TrimAsked,
    TrimmedTo,
    Verdict,
    WrittenTo,
)

_LOSSES = frozenset({GapKind.LOST.name, GapKind.NEVER_DURABLE.name})


def check(history: History) -> list[Violation]:
    """Return all violations of P1."""
    ledger = ledger_of(history)
    lanes = ledger.replicated
    found = [*_losses_have_a_cause(ledger), *_gaps_are_true(history, lanes), *_durable_is_not_lost(ledger)]
    found += [*_trims_were_requested(history), *_losses_are_reported(ledger), *_ends_are_known(ledger)]
    found += [*_no_end_hides_a_loss(ledger), *_references_find_kept_batches(ledger)]
    ended, healed = history.of(Ended), history.of(Healed)
    if ended and healed:
        found += [*_read_back(ledger, lanes), *_unnamed_are_stored(ledger, lanes), *_readers_learn_losses(ledger)]
    return found


def _losses_have_a_cause(ledger: Ledger) -> list[Violation]:
    """Positions are lost only with the fabric, never by a clean stop."""
    return [
        Violation("P1", loss.known_us, (
            f"indices {start} to {stop} of lane {lane} are lost, but the fabric never was, or not since a clean stop"))
        for (lane, start, stop), loss in ledger.losses.items()
        if loss.cause_us is None
    ]  # fmt: skip


def _trims_were_requested(history: History) -> list[Violation]:
    """Trims go no further than requested."""
    found: list[Violation] = []
    asked: dict[int, int] = defaultdict(int)
    for event in history.some(TrimAsked, TrimmedTo):
        if isinstance(event, TrimAsked):
            asked[event.lane] = max(asked[event.lane], event.index)
        elif isinstance(event, TrimmedTo) and event.index > asked[event.lane]:
            found.append(Violation("P1", event.at, (
                f"lane {event.lane} is trimmed below {event.index}; the highest request was {asked[event.lane]}")))
    return found


def _gaps_are_true(history: History, lanes: set[int]) -> list[Violation]:
    """Readers get LOST and (with replicas) TRIMMED only for lost or trimmed entries."""
    found: list[Violation] = []
    trimmed: dict[int, int] = defaultdict(int)
    lost: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for event in history.some(TrimmedTo, LostSpan, GapSeen):
        if isinstance(event, TrimmedTo):
            trimmed[event.lane] = max(trimmed[event.lane], event.index)
        elif isinstance(event, LostSpan):
            lost[event.lane] = merge([*lost[event.lane], (event.start, event.stop)])
        elif isinstance(event, GapSeen) and event.lane in lanes and event.start < event.stop:
            what = f"reader {event.reader} got a gap: indices {event.start} to {event.stop} of lane {event.lane} are"
            if event.kind == GapKind.TRIMMED.name and event.stop > trimmed[event.lane]:
                found.append(Violation("P1", event.at, f"{what} trimmed; only indices below {trimmed[event.lane]} are"))
            elif event.kind in _LOSSES and not inside(lost[event.lane], event.start, event.stop):
                found.append(Violation("P1", event.at, f"{what} lost; they are not"))
    return found + _readers_of_durable(history)


def _readers_of_durable(history: History) -> list[Violation]:
    """Only a reader of durable records gets NEVER_DURABLE: another reader may have received the lost records."""
    others = {(event.reader, event.lane) for event in history.of(Delivered) if not event.durable}
    return [
        Violation("P1", e.at, (
            f"reader {e.reader} of ordered records got the gap NEVER_DURABLE for indices {e.start} to {e.stop} of lane "
            f"{e.lane}, and not LOST"))
        for e in history.of(GapSeen)
        if e.kind == GapKind.NEVER_DURABLE.name and (e.reader, e.lane) in others
    ]  # fmt: skip


def _durable_is_not_lost(ledger: Ledger) -> list[Violation]:
    """Batches acked or read as durable are never lost. Batches acked or sent after a loss are not part of it."""
    found: list[Violation] = []
    for s in ledger.history.of(Settled):
        if s.verdict is not Verdict.STORED or s.index is None or not ledger.is_lost(s.lane, s.index):
            continue
        what = f"batch {s.number} of {s.stream}, acked at index {s.index} of lane {s.lane} (ack {s.ack}), is lost"
        went_us = ledger.went_us(s.lane, s.index)
        if s.ack == Ack.DURABLE:
            found.append(Violation("P1", s.at, what))
        elif went_us is not None and ledger.given_after(s, went_us):
            found.append(Violation("P1", s.at, f"{what}, with a fabric that was lost before the ack"))
    for d in ledger.history.of(Delivered):
        if not ledger.is_lost(d.lane, d.index):
            continue
        what = f"reader {d.reader} read index {d.index} of lane {d.lane}"
        went_us, batch = ledger.went_us(d.lane, d.index), ledger.batch_of.get(d.digest)
        if d.durable:
            found.append(Violation("P1", d.at, f"{what} as durable, and it is lost"))
        elif went_us is not None and batch is not None and ledger.first_sent[batch].at > went_us:
            found.append(Violation("P1", d.at, f"{what}, lost with a fabric that was lost before it was sent"))
    return found


def _references_find_kept_batches(ledger: Ledger) -> list[Violation]:
    """A batch by reference is refused only if the staged batch is gone, or is not the batch that was meant."""
    refused = {(s.process, s.number): s.at for s in ledger.history.of(Settled) if s.error == "BadReference"}
    found: list[Violation] = []
    for event in ledger.history.of(ByReference):
        at = refused.get((event.process, event.number))
        if at is not None and event.right and ledger.is_kept(event.lane, event.index):
            found.append(Violation("P1", at, (
                f"batch {event.number} of {event.process} was refused, as if index {event.index} of lane {event.lane} "
                "were gone, or were another batch")))  # fmt: skip
    return found


def _losses_are_reported(ledger: Ledger) -> list[Violation]:
    """A publisher that continues after a loss gets a report of its lost acked batches, and of no others.

    If it continues in the same lane, the report comes first; with orders 0 and 1 it continues in others, and the report
    may come later.
    """
    history, sent_last = ledger.history, _sent_last(ledger)
    unnumbered_us = max((stop.at for stop in history.of(Stopped) if not stop.numbered), default=-1)
    reported = {(event.process, event.lane, event.index) for event in history.of(LossTold)}
    found = [
        Violation("P1", t.at, f"{t.process} got a report that index {t.index} of lane {t.lane} is lost; it is not")
        for t in history.of(LossTold)
        if not ledger.is_lost(t.lane, t.index)
    ]
    stored = [event for event in history.of(Settled) if event.verdict is Verdict.STORED and event.index is not None]
    newest: dict[tuple[str, int], int] = defaultdict(int)
    for event in stored:
        newest[event.process, event.lane] = max(newest[event.process, event.lane], event.index or 0)
    for event in stored:
        stop = ledger.lost_until(event.lane, event.index or 0)
        goes_on = stop is not None and newest[event.process, event.lane] >= stop  # an earlier ack may come late
        if stop is not None and event.lane in ledger.broker_lanes:
            went_us = ledger.went_us(event.lane, event.index or 0)
            notices = event.at > unnumbered_us  # an earlier process cannot distinguish the generations
            goes_on = notices and went_us is not None and sent_last.get(event.process, 0) > went_us
        if goes_on and (event.process, event.lane, event.index or 0) not in reported:
            found.append(Violation("P1", event.at, (
                f"batch {event.number} of {event.process}, acked at index {event.index} of lane {event.lane}, is lost, "
                "and its publisher continued without a report")))  # fmt: skip
    return found


def _no_end_hides_a_loss(ledger: Ledger) -> list[Violation]:
    """A publisher that is asked to close, or fails, after a loss has reported that loss when it has ended."""
    history = ledger.history
    unnumbered_us = max((stop.at for stop in history.of(Stopped) if not stop.numbered), default=-1)
    reported = {(event.process, event.lane, event.index) for event in history.of(LossTold)}
    since = {event.process: event.since for event in history.of(PublisherEnded)}
    found: list[Violation] = []
    for event in history.of(Settled):
        if event.verdict is not Verdict.STORED or event.index is None or event.at <= unnumbered_us:
            continue
        went_us = ledger.went_us(event.lane, event.index)
        if went_us is None or event.process not in since or since[event.process] <= went_us:
            continue
        if (event.process, event.lane, event.index) not in reported:
            found.append(Violation("P1", event.at, (
                f"batch {event.number} of {event.process}, acked at index {event.index} of lane {event.lane}, is lost, "
                "and its publisher ended without a report")))  # fmt: skip
    return found


def _sent_last(ledger: Ledger) -> dict[str, int]:
    """Return when each publisher that works at the end sent its last stored batch."""
    settled = ledger.history.of(Settled)
    ended_badly = {event.process for event in settled if event.verdict is not Verdict.STORED}
    ended_badly |= {event.process for event in ledger.history.of(Died)}
    if not ledger.history.of(Ended):
        return {}
    times: dict[str, int] = {}
    for event in settled:
        sent = ledger.sent_by.get((event.process, event.number))
        if sent is not None and event.process not in ended_badly:
            times[event.process] = max(sent.at, times.get(event.process, 0))
    return times


def _ends_are_known(ledger: Ledger) -> list[Violation]:
    """With a mirror only ordered entries are lost: a LOST gap ends one position after the lane's last entry.

    The additional position makes readers at the end of the lane notice the loss.
    """
    history = ledger.history
    if len(history.of(MirrorLeft)) < len(history.of(FabricLost)):
        return []  # without its mirror the end of a lane need not be known
    spans: dict[int, list[LostSpan]] = defaultdict(list)
    for span in history.of(LostSpan):
        spans[span.lane].append(span)
    written: dict[int, int] = {}
    newest: dict[int, int] = {}
    found: list[Violation] = []
    for event in history.some(WrittenTo, Delivered, Settled, FabricLost):
        if isinstance(event, WrittenTo):
            written[event.lane] = max(event.index, written.get(event.lane, 0))
        elif isinstance(event, Delivered | Settled) and event.index is not None:
            newest[event.lane] = max(event.index, newest.get(event.lane, 0))
        elif isinstance(event, FabricLost):
            found += [
                Violation("P1", event.at, (
                    f"index {index} of lane {lane} was reported before the fabric was lost, and is in a LOST gap up to "
                    f"{span.stop}; its mirror had the lane's end at {written.get(lane, 0)}"))
                for lane, index in newest.items()
                for span in spans[lane]
                if span.start <= index < span.stop and span.stop > written.get(lane, 0) + 1
            ]  # fmt: skip
    return found


def _readers_learn_losses(ledger: Ledger) -> list[Violation]:
    """A reader of lost records learns of all of them: by a gap that begins no later, or by the end of the lane."""
    unaware: dict[tuple[str, int], Delivered] = {}  # the first lost batch that each reader received
    for event in ledger.reads:
        key = event.reader, event.lane
        if isinstance(event, Delivered) and ledger.is_lost(event.lane, event.index):
            unaware.setdefault(key, event)
        elif isinstance(event, Moved) or (isinstance(event, GapSeen) and _reports(event, unaware.get(key))):
            unaware.pop(key, None)
    return [
        Violation("P1", d.at, f"reader {d.reader} got index {d.index} of lane {d.lane}; it got no gap there")
        for d in unaware.values()
    ]


def _reports(gap: GapSeen, read: Delivered | None) -> bool:
    """Whether a gap reports that a batch is gone. The end of a closed lane reports that all above it is lost."""
    if read is None:
        return True
    if gap.kind == GapKind.END_OF_LANE.name:
        return gap.start <= read.index
    reported = gap.session is None and gap.kind != GapKind.NEVER_DURABLE.name
    return reported and gap.start <= read.index < gap.stop


def _read_back(ledger: Ledger, lanes: set[int]) -> list[Violation]:
    """After healing, readers find every acked batch of a topic with replicas, and the disks have it."""
    history, found = ledger.history, []
    healed_us = history.of(Healed)[-1].at
    read = {(d.lane, d.index, d.digest) for d in history.of(Delivered) if d.at >= healed_us}
    disks = {(stored.lane, stored.index, stored.digest) for stored in history.of(OnDisk) if stored.copies}
    for ack in history.of(Settled):
        if ack.verdict is not Verdict.STORED or ack.index is None or ack.lane not in lanes:
            continue
        if ack.index < ledger.trimmed[ack.lane] or ledger.is_lost(ack.lane, ack.index):
            continue
        position = (ack.lane, ack.index, ledger.first_sent[ack.stream, ack.number].digest)
        what = f"batch {ack.number} of {ack.stream}, acked at index {ack.index} of lane {ack.lane} (ack {ack.ack})"
        if position not in read:
            found.append(Violation("P1", ack.at, f"{what}, was not found there when all was read back"))
        if ack.ack == Ack.DURABLE and position not in disks:
            found.append(Violation("P1", ack.at, f"{what}, is on no disk at the end"))
    return found


def _unnamed_are_stored(ledger: Ledger, lanes: set[int]) -> list[Violation]:
    """Check acks without a position (the batch was stored too long ago): the batch is somewhere in the lane."""
    history, found = ledger.history, []
    healed_us = history.of(Healed)[-1].at
    read = {d.digest for d in history.of(Delivered) if d.at >= healed_us and not ledger.is_lost(d.lane, d.index)}
    disks = {s.digest for s in history.of(OnDisk) if s.copies and not ledger.is_lost(s.lane, s.index)}
    for ack in history.of(Settled):
        if ack.verdict is not Verdict.STORED or ack.index is not None or ack.lane not in lanes:
            continue
        sent = ledger.first_sent[ack.stream, ack.number]
        if not ledger.lasts(ack) or ledger.may_be_trimmed(ack.lane, sent):
            continue
        what = f"batch {ack.number} of {ack.stream}, acked without a position (ack {ack.ack})"
        if sent.digest not in read:
            found.append(Violation("P1", ack.at, f"{what}, was not found anywhere when all was read back"))
        if ack.ack == Ack.DURABLE and sent.digest not in disks:
            found.append(Violation("P1", ack.at, f"{what}, is on no disk at the end"))
    return found
