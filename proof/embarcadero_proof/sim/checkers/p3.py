"""P3: all readers see one order; a batch sent after another's ack comes after it; strong sessions keep their order."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from embarcadero.types import GapKind, OnGap, Order
from embarcadero_proof.sim.checkers.ledger import Ledger, Violation, covered, inside, ledger_of
from embarcadero_proof.sim.history import Began, Delivered, FabricLost, GapSeen, History, Settled, TopicMade, Verdict


def check(history: History) -> list[Violation]:
    """Return all violations of P3."""
    ledger = ledger_of(history)
    found = [*_readers_agree(history), *_stamps(ledger), *_time_never_goes_back(ledger), *_real_time(ledger)]
    strong = {began.stream for began in history.of(Began) if began.strong}
    for topic in history.of(TopicMade):
        if topic.order >= Order.TOTAL:
            found += _submission_order(ledger, topic, None if topic.order == Order.STRONG else strong)
    for made in ledger.broker_lanes.values():
        if made.order == Order.BROKER:
            found += _lane_order(ledger, made.lane)
    return found


def _readers_agree(history: History) -> list[Violation]:
    found: list[Violation] = []
    first: dict[tuple[int, int], Delivered] = {}
    for event in history.of(Delivered):
        other = first.setdefault((event.lane, event.index), event)
        if _entry(other) != _entry(event):
            found.append(Violation("P3", event.at, (
                f"readers disagree on index {event.index} of lane {event.lane}: {other.reader} saw session "
                f"{other.session} sequence {other.session_seq} seq {other.seq}, {event.reader} saw session "
                f"{event.session} sequence {event.session_seq} seq {event.seq}")))  # fmt: skip
    return found


def _entry(event: Delivered) -> tuple[int, ...]:
    return event.seq, event.count, event.session, event.session_seq, event.partition, event.digest


def _stamps(ledger: Ledger) -> list[Violation]:
    """A batch is found under its number: its sequence plus the lost batches of its stream before it."""
    found: list[Violation] = []
    memory_went = bool(ledger.history.of(FabricLost))
    gone = {lane: _lost(ledger, lane) if memory_went else {} for lane, _ in ledger.numbered}
    for (lane, session), pairs in ledger.numbered.items():
        lost = gone[lane].get(ledger.stream_of[lane, session], set())
        before = pairs[0] if memory_went else (0, 0)
        for sequence, number in pairs:
            ahead = (number - before[1]) - (sequence - before[0])
            explained = ahead and sum(between in lost for between in range(before[1] + 1, number))
            if number < sequence or not 0 <= ahead <= explained:
                found.append(Violation("P3", 0, (
                    f"batch {number} of session {session} into lane {lane} is under sequence {sequence}, where batch "
                    f"{before[1]} is under {before[0]}")))  # fmt: skip
            before = sequence, number
    return found


def _time_never_goes_back(ledger: Ledger) -> list[Violation]:
    """Append times never decrease along a lane."""
    found: list[Violation] = []
    times: dict[int, dict[int, Delivered]] = defaultdict(dict)
    for event in ledger.history.of(Delivered):
        if not ledger.is_lost(event.lane, event.index):
            times[event.lane].setdefault(event.index, event)
    for lane, at_index in times.items():
        for before, after in pairwise(sorted(at_index)):
            if at_index[after].append_us < at_index[before].append_us:
                found.append(Violation("P3", at_index[after].at, (
                    f"lane {lane}: index {after} has an earlier append time than index {before}")))  # fmt: skip
    return found


def _real_time(ledger: Ledger) -> list[Violation]:
    """A batch sent after another's ack comes after it."""
    found: list[Violation] = []
    lanes = {topic: ledger.lanes_of(topic) for topic in sorted({sent.lane for sent in ledger.first_sent.values()})}
    positions = {lane: ledger.index_of(lane) for several in lanes.values() for lane in several}
    found_at = ((ack, _index_of(ledger, positions, ack)) for ack in ledger.history.of(Settled))
    acks = [(ack, index) for ack, index in found_at if index is not None]
    acks.sort(key=lambda item: item[0].at)
    highest: dict[int, tuple[Settled, int]] = {}
    later = 0
    for batch, sent in sorted(ledger.first_sent.items(), key=lambda item: item[1].at):
        while later < len(acks) and acks[later][0].at < sent.at:
            (ack, position), later = acks[later], later + 1
            if ack.lane not in highest or highest[ack.lane][1] < position:
                highest[ack.lane] = ack, position
        for lane in lanes[sent.lane]:
            index = positions[lane].get(sent.digest)
            if lane in highest and index is not None and index < highest[lane][1]:
                before, position = highest[lane]
                found.append(Violation("P3", sent.at, (
                    f"batch {batch[1]} of {batch[0]} was sent after batch {before.number} of {before.stream} was "
                    f"acked at index {position} of lane {lane}, but is before it, at index {index}")))  # fmt: skip
    return found


def _index_of(ledger: Ledger, positions: dict[int, dict[int, int]], ack: Settled) -> int | None:
    """Return the position of an acked batch: from the ack or, without a position there, from readers."""
    if ack.verdict is not Verdict.STORED:
        return None
    if ack.index is not None or not ledger.lasts(ack):
        return ack.index
    return positions[ack.lane].get(ledger.first_sent[ack.stream, ack.number].digest)


def _lane_order(ledger: Ledger, lane: int) -> list[Violation]:
    """Order 1: in a lane, the first copies of a stream's batches are in the order of sending.

    A copy is known to be the first one if a reader has read everything before it.
    """
    found: list[Violation] = []
    seen = covered(ledger.history, lane)
    last: dict[str, tuple[int, int]] = {}  # stream -> (number, index)
    for digest, index in sorted(ledger.index_of(lane).items(), key=lambda position: position[1]):
        batch = ledger.batch_of.get(digest)
        if batch is None:
            continue
        number, before = last.get(batch[0], (-1, -1))
        if batch[1] < number and inside(seen, 0, index):
            found.append(Violation("P3", ledger.claims[lane][index][0].at, (
                f"lane {lane}: batch {batch[1]} of {batch[0]} (index {index}) comes after batch {number} "
                f"(index {before})")))  # fmt: skip
        last[batch[0]] = max(last.get(batch[0], (-1, -1)), (batch[1], index))
    return found


def _submission_order(ledger: Ledger, topic: TopicMade, strong: set[str] | None) -> list[Violation]:
    """Check the streams of strong sessions (None: all streams of the topic).

    Each stream's numbers increase with the index, from 0, without a hole unless a SKIPPED gap declares it."""
    found: list[Violation] = []
    skipped, lost = _skipped(ledger, topic.lane), _lost(ledger, topic.lane)
    spans = covered(ledger.history, topic.lane)
    stored: dict[str, list[tuple[int, int, int]]] = defaultdict(list)  # stream -> (index, number, at)
    for digest, index in ledger.index_of(topic.lane).items():
        batch = ledger.batch_of.get(digest)
        if batch is not None and (strong is None or batch[0] in strong):
            stored[batch[0]].append((index, batch[1], ledger.claims[topic.lane][index][0].at))
    for stream in sorted(stored):
        before = (-1, -1, 0)
        for index, number, at in sorted(stored[stream]):
            where = f"lane {topic.lane}: {stream}"
            if skipped[stream].get(number):
                found.append(Violation("P3", at, f"{where}: batch {number} was declared skipped, but is at {index}"))
            if number <= before[1]:
                found.append(Violation("P3", at, (
                    f"{where}: batch {number} (index {index}) comes after batch {before[1]} (index {before[0]})")))
            missing = [n for n in range(before[1] + 1, number) if n not in skipped[stream].keys() | lost[stream]]
            seen_all = index == before[0] + 1 or inside(spans, before[0] + 1, index)  # else it may just be trimmed
            if missing and seen_all:
                rule = "no SKIPPED gap reports it" if topic.on_gap == OnGap.SKIP else "the topic allows no holes"
                found.append(Violation("P3", at, (
                    f"{where}: batch {number} is at index {index}, batch {missing[0]} is not before it, and {rule}")))
            before = max(before, (index, number, at), key=lambda b: b[1])
    return found


def _skipped(ledger: Ledger, lane: int) -> dict[str, dict[int, bool]]:
    """Return the numbers in SKIPPED gaps by stream, and whether the gap exists or was itself lost with the fabric."""
    skipped: dict[str, dict[int, bool]] = defaultdict(dict)
    for gap in ledger.history.of(GapSeen):
        if gap.lane == lane and gap.kind == GapKind.SKIPPED.name and gap.session is not None:
            stream = ledger.stream_of.get((lane, gap.session))
            if stream is not None:
                least, most = ledger.ahead(lane, gap.session, gap.start)
                stands = least == most and (gap.index is None or not ledger.is_lost(lane, gap.index))
                for number in range(gap.start + least, gap.stop + most):
                    skipped[stream][number] = stands or skipped[stream].get(number, False)
    return skipped


def _lost(ledger: Ledger, lane: int) -> dict[str, set[int]]:
    """Return the numbers, by stream, of batches lost with the fabric: stored, or reported as failed, before."""
    lost: dict[str, set[int]] = defaultdict(set)
    for index, claims in ledger.claims[lane].items():
        for claim in claims if ledger.is_lost(lane, index) else ():
            batch = ledger.batch_of.get(claim.digest)
            if batch is not None:
                lost[batch[0]].add(batch[1])
    memory_went = max((event.at for event in ledger.history.of(FabricLost)), default=0)
    for event in ledger.history.of(Settled):
        if event.lane == lane and event.verdict is Verdict.FAILED and event.at < memory_went:
            lost[event.stream].add(event.number)
    return lost
