"""Each checker rejects histories that break its promise and accepts histories that keep it."""

from __future__ import annotations

import pytest

from embarcadero_proof.sim import history as h
from embarcadero_proof.sim.checkers import CHECKERS, p9
from embarcadero_proof.sim.history import Event, History, Verdict

LANE = 0
SECOND = 1_000_000


def topic(order: int = 2, on_gap: str = "fence", replicas: int = 0) -> h.TopicMade:
    return h.TopicMade(at=0, lane=LANE, name="t", order=order, on_gap=on_gap, replicas=replicas, durable_on=replicas)


def lane(order: int = 0) -> h.LaneMade:
    """The lane that all events here are in belongs to a broker."""
    return h.LaneMade(at=0, lane=LANE, topic=LANE, order=order)


def broker_lanes() -> list[Event]:
    """A topic of order 0 with two of them: the usual one, and lane 9."""
    return [topic(0, replicas=2), lane(0), h.LaneMade(at=0, lane=9, topic=LANE, order=0)]


def digest(stream: str, number: int) -> int:
    return sum(stream.encode()) * 10_000 + number


def sent(at: int, number: int, stream: str = "a", partition: int = 0, process: str = "") -> h.Sent:
    return h.Sent(at=at, process=process or stream, stream=stream, lane=LANE, number=number,
                  digest=digest(stream, number), partition=partition)  # fmt: skip


def settled(at: int, number: int, index: int | None = None, stream: str = "a", verdict: Verdict = Verdict.STORED,
            seq: int | None = None, process: str = "", ack: int = 1, lane: int = LANE,
            error: str = "") -> h.Settled:  # fmt: skip
    return h.Settled(at=at, process=process or stream, stream=stream, lane=lane, number=number, verdict=verdict,
                     index=index, seq=index if seq is None else seq, ack=ack, error=error)  # fmt: skip


def named(at: int, number: int, index: int, right: bool = True) -> h.ByReference:
    """The bytes of a batch are those at an index of the same lane."""
    return h.ByReference(at=at, process="a", stream="a", number=number, lane=LANE, index=index, right=right)


def refused(at: int, number: int) -> h.Settled:
    """A batch by reference ends: its source is missing."""
    return settled(at, number, verdict=Verdict.FAILED, error="BadReference")


def opened(at: int, stream: str = "a") -> h.SessionOpened:
    return h.SessionOpened(at=at, process=stream, stream=stream, lane=LANE, session=7, expected=0)


def moved(at: int, index: int | None, reader: str = "r", partitions: tuple[int, ...] | None = None) -> h.Moved:
    return h.Moved(at=at, reader=reader, lane=LANE, index=index, partitions=partitions)


def got(at: int, index: int, number: int, stream: str = "a", reader: str = "r", **fields: int) -> h.Delivered:
    facts = {"seq": index, "count": 1, "session": 1 if stream == "a" else 2, "session_seq": number, "partition": 0,
             "digest": digest(stream, number), "durable": False} | fields  # fmt: skip
    return h.Delivered(at=at, reader=reader, lane=LANE, index=index, **facts)


def passed(at: int, index: int, reader: str = "r") -> h.Passed:
    return h.Passed(at=at, reader=reader, lane=LANE, index=index)


def gap(
    at: int, kind: str, start: int, stop: int, session: int | None = None, reader: str = "r", index: int | None = None
) -> h.GapSeen:
    return h.GapSeen(at=at, reader=reader, lane=LANE, kind=kind, start=start, stop=stop, session=session, index=index)


def tail(began: int, at: int, index: int) -> h.TailRead:
    return h.TailRead(at=at, process="x", began=began, lane=LANE, index=index, seq=index)


def lost(at: int, start: int, stop: int, written: int | None = None) -> list[Event]:
    """The fabric is lost, and with it a span; `written`: its mirror has the end of the lane."""
    known = [] if written is None else [h.WrittenTo(at=at, lane=LANE, index=written), h.MirrorLeft(at=at)]
    return [*known, h.FabricLost(at=at), h.LostSpan(at=at, lane=LANE, start=start, stop=stop)]


def stopped(at: int, *spans: tuple[int, int], clean: bool = True) -> h.Stopped:
    """The cluster stops, and these spans are known to be lost."""
    return h.Stopped(at=at, clean=clean, lost=[(LANE, start, stop) for start, stop in spans])


def lost_span(at: int, start: int, stop: int) -> h.LostSpan:
    return h.LostSpan(at=at, lane=LANE, start=start, stop=stop)


def trimmed(at: int, index: int, asked: int | None = None) -> list[Event]:
    """A lane is trimmed on request."""
    ask = h.TrimAsked(at=at, lane=LANE, index=index if asked is None else asked)
    return [ask, h.TrimmedTo(at=at, lane=LANE, index=index)]


def copies(at: int, index: int, count: int, needed: int = 2) -> h.Copies:
    return h.Copies(at=at, who="a", lane=LANE, index=index, copies=count, needed=needed)


def on_disk(at: int, index: int, number: int, stream: str = "a", count: int = 2) -> h.OnDisk:
    return h.OnDisk(at=at, lane=LANE, index=index, digest=digest(stream, number), copies=count)


def start(began: int, at: int, index: int, hot_index: int | None = None) -> h.StartRead:
    hot = index if hot_index is None else hot_index
    return h.StartRead(at=at, process="x", began=began, lane=LANE, index=index, hot_index=hot)


def ordered(at: int, index: int) -> h.OrderedTo:
    return h.OrderedTo(at=at, lane=LANE, index=index)


def epoch(at: int, end: int, number: int = 2) -> h.EpochStarted:
    return h.EpochStarted(at=at, epoch=number, ends={LANE: end})


def ended(at: int) -> h.Ended:
    return h.Ended(at=at)


def fault(at: int) -> h.Fault:
    return h.Fault(at=at, kind="pause", target="broker-0", until=at + 1)


def stuck(at: int, until: int, stream: str = "b") -> h.Stuck:
    return h.Stuck(at=at, stream=stream, lane=LANE, until=until)


GOOD: dict[str, dict[str, list[Event]]] = {
    "P1": {
        "a reference to a trimmed batch is refused": [
            topic(replicas=2), sent(1, 0), named(1, 0, 3), *trimmed(2, 4), refused(3, 0)],
        "a reference to a lost batch is refused": [
            topic(replicas=2), sent(1, 0), named(1, 0, 3), *lost(2, 3, 9), refused(3, 0)],
        "a wrong reference is refused": [topic(replicas=2), sent(1, 0), named(1, 0, 3, right=False), refused(3, 0)],
        "a reader hears that all it got of a lost span is lost": [
            topic(replicas=2), sent(1, 0), sent(1, 1), moved(1, 4), got(2, 4, 0), got(2, 5, 1), *lost(3, 4, 900),
            h.Healed(at=5), gap(6, "LOST", 4, 900), ended(9)],
        "a durable reader learns that the rest never was durable": [
            topic(replicas=2), sent(1, 0), moved(1, 4), got(2, 4, 0, durable=True), *lost(3, 5, 900),
            gap(6, "NEVER_DURABLE", 5, 900)],
        "one gap of two losses in a row": [
            topic(replicas=2), moved(1, 4), *lost(3, 4, 900), *lost(4, 900, 1_000), gap(6, "LOST", 4, 1_000)],
        "acked batches are read back": [
            topic(replicas=2), sent(1, 0), settled(2, 0, 0), h.Healed(at=5), moved(6, 0), got(7, 0, 0), ended(9)],
        "a durably acked batch is read back and on disk": [
            topic(replicas=2), sent(1, 0), settled(2, 0, 0, ack=2), h.FabricLost(at=3), h.Healed(at=5), moved(6, 0),
            got(7, 0, 0), on_disk(8, 0, 0), ended(9)],
        "ack 1 does not outlive the fabric": [
            topic(replicas=2), sent(1, 0), settled(2, 0, 4), *lost(3, 4, 900), h.Healed(at=5), moved(6, 4),
            gap(7, "LOST", 4, 900), ended(9)],
        "trimmed batches need not be there": [
            topic(replicas=2), sent(1, 0), settled(2, 0, 0, ack=2), *trimmed(3, 1), h.Healed(at=5), moved(6, 0),
            gap(7, "TRIMMED", 0, 1), ended(9)],
        "a publisher that continues after a loss is informed": [
            topic(replicas=2), sent(1, 0), settled(2, 0, 4), *lost(3, 4, 900),
            h.LossTold(at=4, process="a", lane=LANE, index=4), sent(5, 1), settled(6, 1, 900)],
        "a publisher that is closed after a loss is informed": [
            topic(replicas=2), sent(1, 0), settled(2, 0, 4), *lost(3, 4, 900),
            h.LossTold(at=5, process="a", lane=LANE, index=4), h.PublisherEnded(at=6, process="a", since=4)],
        "a publisher was closing when the loss came": [
            topic(replicas=2), sent(1, 0), settled(2, 0, 4), *lost(3, 4, 900),
            h.PublisherEnded(at=4, process="a", since=2)],
        "a publisher that continues in another lane of a broker is informed": [
            *broker_lanes(), sent(1, 0), settled(2, 0, 4), *lost(3, 4, 1 << 62), sent(4, 1), settled(5, 1, 0, lane=9),
            h.LossTold(at=6, process="a", lane=LANE, index=4), ended(9)],
        "a publisher that continues in another lane is not informed yet": [
            *broker_lanes(), sent(1, 0), settled(2, 0, 4), *lost(3, 4, 1 << 62), sent(4, 1), settled(5, 1, 0, lane=9)],
        "a publisher that continues in another lane dies before it is informed": [
            *broker_lanes(), sent(1, 0), settled(2, 0, 4), *lost(3, 4, 1 << 62), sent(4, 1), settled(5, 1, 0, lane=9),
            h.Died(at=6, process="a"), ended(9)],
        "a publisher of lanes of brokers that has sent nothing since the loss": [
            *broker_lanes(), sent(1, 0), sent(1, 1), settled(2, 0, 4), *lost(3, 4, 1 << 62), settled(5, 1, 0, lane=9),
            ended(9)],
        "a publisher of lanes of brokers that can't know that the cluster is another one": [
            *broker_lanes(), sent(1, 0), settled(2, 0, 4), h.Stopped(at=3, clean=False, numbered=False),
            *lost(3, 4, 1 << 62), sent(4, 1), settled(5, 1, 0, lane=9), ended(9)],
        "an ack from before the loss that comes after it": [
            topic(replicas=2), sent(1, 0), sent(1, 1), settled(2, 0, 4), *lost(3, 4, 900), settled(6, 1, 5)],
        "without replicas, memory is all there is": [
            topic(), sent(1, 0), settled(2, 0, 0), h.Healed(at=5), moved(6, 0), gap(7, "TRIMMED", 0, 1), ended(9)],
        "a history that has not ended yet": [topic(replicas=2), sent(1, 0), settled(2, 0, 0, ack=2)],
        "with a mirror the gap ends with the order": [
            topic(replicas=2), sent(1, 0), settled(2, 0, 4), *lost(3, 4, 7, written=6)],
        "a loss that readers learn of only after a clean stop": [
            topic(replicas=2), h.FabricLost(at=3), stopped(5, (4, 9)), lost_span(6, 4, 9), moved(6, 4),
            gap(7, "LOST", 4, 9)],
        "a clean stop, and then the fabric is lost": [
            topic(replicas=2), sent(1, 0), settled(2, 0, 0), stopped(3), sent(5, 1), settled(6, 1, 4),
            stopped(7, clean=False), *lost(7, 4, 9)],
        "batches acked between two losses go with the second": [
            topic(replicas=2), *lost(3, 4, 9), sent(5, 0), settled(6, 0, 10), stopped(7, (4, 9), clean=False),
            *lost(7, 10, 900)],
        "a trim below the requested position": [topic(replicas=2), *trimmed(1, 3, asked=4)],
        "a batch acked without a position is somewhere": [
            topic(replicas=2), sent(1, 0), h.FabricLost(at=2), opened(3), settled(4, 0, ack=2), h.Healed(at=5),
            moved(6, 0), got(7, 3, 0), on_disk(8, 3, 0), ended(9)],
        "a late ack without a position, of a batch lost with the fabric": [
            topic(replicas=2), sent(1, 0), *lost(3, 4, 900), settled(4, 0), opened(5), h.Healed(at=6), ended(9)],
        "an ack without a position of a batch lost later with the fabric": [
            topic(replicas=2), sent(1, 0), opened(1), settled(2, 0), *lost(3, 4, 900), h.Healed(at=6), ended(9)],
        "an ack without a position of a batch trimmed before any read": [
            topic(replicas=2), sent(1, 0), settled(2, 0, ack=2), *trimmed(3, 1), h.Healed(at=5), ended(9)],
        "a reader that learns that its records are lost": [
            topic(1, replicas=2), lane(1), sent(1, 0), moved(1, 4), got(2, 4, 0), *lost(3, 4, 99), h.Healed(at=4),
            gap(5, "END_OF_LANE", 4, 4), ended(9)],
        "a reader that learns it after a durable reader learned the recorded end": [
            topic(1, replicas=2), lane(1), sent(1, 0), moved(1, 4), got(2, 4, 0), *lost(3, 3, 5), h.Healed(at=4),
            gap(5, "END_OF_LANE", 5, 5, reader="s"), gap(6, "END_OF_LANE", 3, 3), ended(9)],
    },
    "P2": {
        "a reader that starts at the end of a lane that lost acked batches": [
            topic(0), lane(), sent(1, 0), settled(2, 0, 0), *lost(3, 0, 4), moved(4, None),
            gap(5, "END_OF_LANE", 0, 0), passed(6, 4)],
        "a right reference is stored": [topic(), sent(1, 0), named(1, 0, 3), settled(2, 0, 5)],
        "a wrong reference is refused": [topic(), sent(1, 0), named(1, 0, 3, right=False), refused(2, 0)],
        "a batch that its caller numbered has its number": [
            topic(), h.Numbered(at=0, stream="a"), sent(1, 3), moved(1, 0), got(2, 0, 3)],
        "an acked batch is where readers find it": [topic(), sent(1, 0), settled(2, 0, 5), moved(3, 5), got(4, 5, 0)],
        "two readers find the same": [topic(), sent(1, 0), got(2, 0, 0, reader="r"), got(3, 0, 0, reader="s")],
        "an unknown outcome may be in the log": [
            topic(), sent(1, 0), settled(2, 0, verdict=Verdict.UNKNOWN), moved(2, 0), got(4, 0, 0)],
        "a duplicate too old to be named has no index": [topic(), sent(1, 0), settled(2, 0), moved(2, 0), got(4, 3, 0)],
        "a new process resends a stream's batch and gets the same position": [
            topic(), sent(1, 0, process="a.1"), sent(2, 0, process="a.2"), settled(3, 0, 1, process="a.2"), moved(3, 1),
            got(4, 1, 0)],
        "seqs go on after a batch of several records": [
            topic(), sent(1, 0), sent(1, 1), moved(2, 0), got(2, 0, 0, seq=0, count=7), got(3, 1, 1, seq=7)],
        "a refused batch that a second call stored": [
            topic(), sent(1, 0, process="a.1"), settled(2, 0, verdict=Verdict.FAILED, process="a.1"),
            sent(3, 0, process="a.2"), settled(4, 0, 1, process="a.2"), moved(5, 1), got(6, 1, 0)],
        "a batch that was read, went with the fabric, and is refused when it is sent again": [
            topic(replicas=2), sent(1, 0), moved(1, 4), got(2, 4, 0), *lost(3, 4, 9),
            settled(5, 0, verdict=Verdict.FAILED)],
        "an acked batch that was trimmed before anyone looked": [
            topic(), sent(1, 0), settled(2, 0, 0), moved(3, 0), gap(4, "TRIMMED", 0, 3), passed(5, 3)],
        "orders 0 and 1 may store resent batches": [
            topic(0), lane(), sent(1, 0), settled(2, 0, 0), moved(2, 0), got(3, 0, 0), got(4, 1, 0)],
        "a batch that was lost with the fabric is stored again": [
            topic(replicas=2), sent(1, 0), settled(2, 0, 4), moved(2, 4), got(3, 4, 0), *lost(4, 4, 900),
            sent(5, 0, process="a.2"), settled(6, 0, 900, process="a.2"), moved(7, 900), got(8, 900, 0)],
    },
    "P3": {
        "a batch that its publisher knows to be lost, before that knowledge went with the fabric": [
            topic(5, "skip"), sent(1, 0), sent(1, 1), sent(1, 2), moved(2, 0), got(2, 0, 0),
            settled(3, 1, verdict=Verdict.FAILED), *lost(4, 1, 1), h.Healed(at=5), got(7, 1, 2)],
        "a batch that was skipped, which went with the fabric, is stored": [
            topic(5, "skip", replicas=2), sent(1, 0), sent(1, 1), moved(2, 0), got(2, 0, 0),
            gap(3, "SKIPPED", 1, 2, 1, index=1), *lost(4, 1, 900), h.Healed(at=5), moved(6, 900), got(7, 900, 1)],
        "a hole where batches were lost with the fabric": [
            topic(5, replicas=2), *(sent(1, n) for n in range(3)), settled(2, 0, 0), settled(2, 1, 1), *lost(3, 1, 9),
            moved(4, 0), got(5, 0, 0), gap(6, "LOST", 1, 9), got(7, 9, 2), passed(8, 10)],
        "after a loss sequences stay behind numbers": [
            topic(5, replicas=2), *(sent(1, n) for n in range(4)), settled(2, 0, 0), settled(2, 1, 1), *lost(3, 1, 9),
            moved(4, 0), got(5, 0, 0), gap(6, "LOST", 1, 9), got(7, 9, 2, session=7, session_seq=1),
            got(7, 10, 3, session=7, session_seq=2)],
        "after a loss a session renumbers after batches acked in between": [
            topic(5, replicas=2), *(sent(1, n) for n in range(3)), settled(2, 1, 1), *lost(3, 0, 9), moved(4, 0),
            gap(6, "LOST", 0, 9), got(7, 9, 0, session=7, session_seq=0), got(7, 10, 2, session=7, session_seq=1)],
        "two readers agree": [topic(), sent(1, 0), sent(1, 0, "b"), got(2, 0, 0), got(2, 1, 0, "b"),
                              got(3, 0, 0, reader="s"), got(3, 1, 0, "b", reader="s")],
        "order 2 may reorder one stream": [topic(2), sent(1, 0), sent(1, 1), moved(2, 0), got(2, 0, 1), got(3, 1, 0)],
        "order 5 in submission order": [topic(5), sent(1, 0), sent(1, 1), moved(2, 0), got(2, 0, 0), got(3, 1, 1)],
        "a hole that a SKIPPED gap declares": [
            topic(5, "skip"), sent(1, 0), sent(1, 1), sent(1, 2), moved(2, 0), got(2, 0, 0), gap(3, "SKIPPED", 1, 2, 1),
            got(4, 2, 2)],
        "a hole in a part trimmed before any read": [
            topic(5), sent(1, 0), sent(1, 1), settled(2, 1, 9), moved(3, 0), gap(3, "TRIMMED", 0, 9), got(4, 9, 1)],
        "append times that stand still": [
            topic(), sent(1, 0), sent(1, 1), moved(1, 0), got(2, 0, 0, append_us=9), got(2, 1, 1, append_us=9)],
        "overlapping sends may come in any order": [
            topic(), sent(1, 0), sent(2, 0, "b"), settled(3, 0, 1), settled(4, 0, 0, "b")],
        "an ack without a position, of a batch lost and stored again": [
            topic(replicas=2), sent(1, 0), settled(2, 0), sent(3, 0, "b"), *lost(4, 4, 9), settled(5, 0, 9, "b"),
            moved(6, 9), got(7, 10, 0)],
        "one after the other, in that order": [
            topic(), sent(1, 0), settled(2, 0, 0), sent(3, 0, "b"), settled(4, 0, 1, "b")],
        "order 0 keeps no stream's order": [
            topic(0), lane(0), sent(1, 0), sent(1, 1), moved(2, 0), got(2, 0, 1), got(3, 1, 0)],
        "order 1 with holes and copies": [
            topic(1), lane(1), *(sent(1, n) for n in range(4)), moved(2, 0), got(2, 0, 1), got(3, 1, 3), got(4, 2, 1)],
        "a broker's lane whose first copies were never read": [
            topic(1), lane(1), sent(1, 0), sent(1, 1), moved(1, 1), got(2, 1, 1), got(3, 2, 0), got(4, 3, 1)],
    },
    "P4": {
        "a reader goes on index by index": [topic(), sent(1, 0), sent(1, 1), moved(2, 0), got(2, 0, 0), got(3, 1, 1)],
        "control entries between batches are no holes": [topic(), sent(1, 0), sent(1, 1), moved(2, 0), got(2, 1, 0),
                                                         got(3, 4, 1), passed(4, 9)],
        "a seek goes back": [topic(), sent(1, 0), moved(2, 0), got(2, 0, 0), moved(3, 0), got(4, 0, 0)],
        "a trimmed span is declared": [
            topic(), sent(1, 0), sent(1, 1), moved(2, 0), got(2, 0, 0), moved(2, 0, "s"),
            gap(3, "TRIMMED", 0, 1, None, "s"), got(4, 1, 1, reader="s")],
        "a filter leaves out other partitions": [
            topic(), sent(1, 0, partition=0), sent(1, 1, partition=1), moved(2, 0), got(2, 0, 0),
            got(2, 1, 1, partition=1), moved(3, 0, "s", (1,)), got(3, 1, 1, reader="s", partition=1)],
        "a start at the first acked batch": [topic(replicas=2), sent(1, 0), settled(2, 0, 4), start(3, 4, 4)],
        "a start above the trim": [
            topic(replicas=2), sent(1, 0), settled(2, 0, 4), h.TrimAsked(at=3, lane=LANE, index=5), start(4, 5, 5)],
        "a start above a loss": [
            topic(replicas=2), sent(1, 0), settled(2, 0, 4), *lost(3, 4, 900), start(4, 5, 900)],
        "a start above a batch acked after the request": [
            topic(replicas=2), sent(1, 0), settled(4, 0, 4), start(3, 5, 9)],
        "memory of a topic without replicas starts anywhere": [
            topic(), sent(1, 0), settled(2, 0, 4), start(3, 4, 9)],
        "a tail read sees all acks before it": [topic(), sent(1, 0), settled(2, 0, 4), tail(3, 4, 5)],
        "a tail before a batch in flight to a reader when the fabric was lost": [
            topic(1, replicas=2), lane(1), sent(1, 0), moved(1, 4), *lost(3, 4, 1 << 62), got(4, 4, 0), tail(5, 6, 4)],
        "a tail read need not see acks that came while it was asked": [
            topic(), sent(1, 0), tail(1, 4, 0), settled(2, 0, 4)],
        "a broker's lane that ends below the loss of the fabric": [
            topic(1, replicas=2), lane(1), sent(1, 0), sent(1, 1), settled(2, 0, 3, ack=2), settled(2, 1, 4),
            tail(3, 4, 5), *lost(5, 4, 99), tail(6, 7, 4)],
        "a reader that gets the end below its position, after a loss": [
            topic(1, replicas=2), lane(1), sent(1, 0), moved(1, 4), got(2, 4, 0), *lost(3, 4, 99),
            gap(4, "END_OF_LANE", 4, 4), passed(5, 4)],
        "a reader that gets the sealed end at the recorded one, after a loss": [
            topic(1, replicas=2), lane(1), sent(1, 0), moved(1, 4), got(2, 4, 0), *lost(3, 4, 5),
            gap(4, "END_OF_LANE", 5, 5, reader="s"), gap(4, "END_OF_LANE", 4, 4), passed(5, 5)],
        "a question about a broker's lane that the loss of the fabric overtakes": [
            topic(1, replicas=2), lane(1), sent(1, 0), settled(2, 0, 4), tail(3, 6, 4), *lost(5, 4, 99)],
        "only ordered batches are read": [topic(), sent(1, 0), ordered(2, 1), moved(2, 0), got(3, 0, 0)],
        "a lane that ends behind its last batch": [
            topic(0), lane(), sent(1, 0), settled(2, 0, 0), moved(2, 0), got(3, 0, 0), gap(4, "END_OF_LANE", 1, 1)],
    },
    "P5": {
        "an epoch starts where the last one ended": [
            topic(), sent(1, 0), settled(2, 0, 4), moved(2, 4), got(3, 4, 0), tail(3, 4, 5), epoch(5, 5)],
        "an epoch starts above all reported ones": [topic(), sent(1, 0), settled(2, 0, 4), epoch(3, 9)],
        "what the new epoch orders": [topic(), epoch(3, 4), sent(4, 0), settled(5, 0, 4), epoch(6, 5, 3)],
        "a lane that an epoch does not have yet": [
            topic(), sent(1, 0), settled(2, 0, 4), h.EpochStarted(at=3, epoch=2, ends={LANE + 1: 0})],
        "a session goes on with another": [
            topic(), sent(1, 0), sent(1, 1), sent(1, 2), moved(1, 0), got(2, 0, 0), got(3, 2, 1),
            got(4, 5, 2, session=3)],
        "sessions of two streams side by side": [
            topic(), sent(1, 0), sent(1, 1), sent(1, 0, "b"), moved(1, 0), got(2, 0, 0), got(3, 1, 0, "b"),
            got(4, 2, 1)],
        "a broker's lane has sessions side by side": [
            topic(1), lane(1), sent(1, 0), sent(1, 1), sent(1, 2), moved(1, 0), got(2, 0, 0), got(3, 1, 1, session=3),
            got(4, 2, 2)],
        "a deleted topic is gone, and its late request changes nothing": [
            h.PassingMade(at=1, topic=1), h.DeleteAsked(at=2, topic=1), h.PassingGone(at=3, topic=1),
            h.PassingMade(at=4, topic=2), h.DeleteAsked(at=5, topic=1)],
        "a topic is changed as asked": [
            h.PassingMade(at=1, topic=1), h.ChangeAsked(at=2, topic=1, change=h.Change.ALTERED),
            h.PassingChanged(at=3, topic=1, change=h.Change.ALTERED)],
    },
    "P6": {
        "a reference to a lasting batch is stored": [
            topic(replicas=2), sent(1, 0), named(1, 0, 3), settled(2, 0, 1), *lost(3, 4, 9)],
        "a reference to a lost batch is not stored": [
            topic(replicas=2), sent(1, 0), named(1, 0, 3), refused(2, 0), *lost(3, 3, 9)],
        "enough disks": [copies(1, 0, 2), copies(1, 1, 3)],
        "a topic without replicas": [copies(1, 0, 0, needed=0)],
        "a durable tail below the ordered one": [
            h.TailRead(at=2, process="x", began=1, lane=LANE, index=5, seq=5, durable_index=4)],
        "a tail that knows nothing of durability": [tail(1, 2, 3)],
        "disks that agree": [on_disk(1, 0, 0), on_disk(1, 1, 1), on_disk(2, 0, 0)],
    },
    "P7": {
        "sent bytes are read": [sent(1, 0), got(2, 0, 0)],
        "sent bytes are read twice": [sent(1, 0), got(2, 0, 0), got(3, 0, 0, reader="s")],
        "sent bytes are on disk": [sent(1, 0), on_disk(2, 0, 0)],
        "no reader reads": [sent(1, 0)],
        "a partition is kept": [sent(1, 0, partition=3), got(2, 0, 0, partition=3)],
    },
    "P8": {
        "a reference is refused though nothing broke": [topic(), sent(1, 0), named(1, 0, 3), refused(2, 0), ended(9)],
        "every publish ends": [sent(1, 0), settled(2, 0, 0), ended(9)],
        "an unknown outcome is an end": [fault(0), sent(1, 0), settled(2, 0, verdict=Verdict.UNKNOWN), ended(9)],
        "what a topic that skips gaps has skipped": [
            topic(5, "skip"), sent(1, 0), settled(2, 0, verdict=Verdict.FAILED, error="Lost"), ended(9)],
        "the dead need no answer": [sent(1, 0), h.Died(at=2, process="a"), ended(9)],
        "a reader reaches the tail": [moved(1, 0), tail(2, 3, 4), got(4, 2, 0), passed(5, 4), ended(9)],
        "a tail that was lost since": [moved(1, 0), tail(2, 3, 9), *lost(4, 5, 1 << 62), passed(6, 5), ended(9)],
        "calls started during faults may fail later, with all later ones": [
            fault(0), h.Began(at=1, process="a", stream="a"), opened(1), sent(1, 0), h.Healed(at=2), sent(3, 1),
            settled(4, 0, verdict=Verdict.UNKNOWN), settled(4, 1, verdict=Verdict.UNKNOWN), ended(9)],
        "a stream of which a batch went astray may fail later": [
            stuck(0, 1, "a"), h.Began(at=1, process="a", stream="a"), opened(1), h.Healed(at=2), sent(3, 0),
            settled(4, 0, verdict=Verdict.UNKNOWN), ended(9)],
        "a history that has not ended yet": [sent(1, 0)],
        "a question is answered": [h.Asked(at=1, process="x", call="tail", number=0),
                                   h.Answered(at=2, process="x", call="tail", number=0), ended(9)],
    },
    "P9": {
        "all is below its bound": [h.Sampled(at=1, process="b", what="pending", value=32, bound=32)],
        "others go on while one is stuck": [
            stuck(0, 10 * SECOND), sent(SECOND, 0), settled(2 * SECOND, 0, 0), ended(20 * SECOND)],
        "the stuck stream itself waits": [stuck(0, 10 * SECOND), sent(SECOND, 0, "b"), ended(20 * SECOND)],
        "too late in the stuck time to be judged": [
            stuck(0, 10 * SECOND), sent(9 * SECOND, 0), settled(15 * SECOND, 0, 0), ended(20 * SECOND)],
        "something else was broken too": [
            h.Fault(at=0, kind="pause", target="broker-0", until=SECOND), stuck(SECOND, 10 * SECOND), sent(SECOND, 0),
            settled(9 * SECOND, 0, 0), ended(20 * SECOND)],
        "the dead get no answer": [
            stuck(0, 10 * SECOND), sent(SECOND, 0), h.Died(at=SECOND, process="a"), ended(20 * SECOND)],
    },
}  # fmt: skip

BAD: dict[str, dict[str, list[Event]]] = {
    "P1": {
        "a reference to an existing batch is refused": [
            topic(replicas=2), sent(1, 0), named(1, 0, 4), *trimmed(2, 4), refused(3, 0)],
        "a reader that got lost records, and gets an end above them": [
            topic(1, replicas=2), lane(1), sent(1, 0), moved(1, 4), got(2, 4, 0), *lost(3, 3, 5), h.Healed(at=4),
            gap(5, "END_OF_LANE", 5, 5), ended(9)],
        "an ordered reader that gets the answer of a durable one": [
            topic(replicas=2), sent(1, 0), moved(1, 4), got(2, 4, 0), *lost(3, 5, 900),
            gap(6, "NEVER_DURABLE", 5, 900)],
        "existing positions, reported as never durable": [
            topic(replicas=2), moved(1, 4), *lost(3, 5, 900), gap(6, "NEVER_DURABLE", 4, 900)],
        "a reader that learns of only a part of its lost records": [
            topic(replicas=2), sent(1, 0), sent(1, 1), moved(1, 4), got(2, 4, 0), got(2, 5, 1), *lost(3, 4, 900),
            h.Healed(at=5), gap(6, "LOST", 6, 900), ended(9)],
        "with a mirror positions are lost that were never ordered": [
            topic(replicas=2), sent(1, 0), settled(2, 0, 4), *lost(3, 4, 8, written=6)],
        "an acked batch that no reader finds in the end": [
            topic(replicas=2), sent(1, 0), settled(2, 0, 0), moved(2, 0), got(3, 0, 0), h.Healed(at=5), moved(6, 0),
            ended(9)],
        "an acked batch in whose place is another": [
            topic(replicas=2), sent(1, 0), sent(1, 1), settled(2, 0, 0), h.Healed(at=5), moved(6, 0), got(7, 0, 1),
            ended(9)],
        "a durable batch that is on no disk": [
            topic(replicas=2), sent(1, 0), settled(2, 0, 0, ack=2), h.Healed(at=5), moved(6, 0), got(7, 0, 0),
            ended(9)],
        "a durable batch that went with the fabric": [
            topic(replicas=2), sent(1, 0), settled(2, 0, 4, ack=2), *lost(3, 4, 900)],
        "a batch read as durable that went with the fabric": [
            topic(replicas=2), sent(1, 0), moved(1, 4), got(2, 4, 0, durable=True), *lost(3, 4, 900)],
        "a loss that its publisher does not learn": [
            topic(replicas=2), sent(1, 0), settled(2, 0, 4), *lost(3, 4, 900), sent(5, 1), settled(6, 1, 900)],
        "a batch acked without a position after a loss, and is nowhere": [
            topic(replicas=2), sent(1, 0), *lost(2, 4, 900), opened(3), settled(4, 0), h.Healed(at=5), ended(9)],
        "a batch acked without a position, only in the lost part": [
            topic(replicas=2), sent(1, 0), moved(1, 4), got(1, 4, 0), *lost(2, 4, 900), opened(3), settled(4, 0),
            h.Healed(at=5), gap(6, "LOST", 4, 900), ended(9)],
        "a batch sent after a loss and acked without a position, and nowhere": [
            topic(replicas=2), *lost(2, 4, 900), sent(3, 0), settled(4, 0), h.Healed(at=5), ended(9)],
        "durably acked without a position, and lost with the fabric": [
            topic(replicas=2), sent(1, 0), settled(2, 0, ack=2), *lost(3, 4, 900), h.Healed(at=5), ended(9)],
        "durably acked without a position, and on no disk": [
            topic(replicas=2), sent(1, 0), settled(2, 0, ack=2), h.Healed(at=5), moved(6, 0), got(7, 3, 0), ended(9)],
        "acked without a position, above the trim, and nowhere": [
            topic(replicas=2), sent(1, 0), settled(1, 0, 4, ack=2), sent(2, 1), settled(3, 1), *trimmed(3, 5),
            h.Healed(at=5), ended(9)],
        "a publisher that continues in another lane of a broker is never informed": [
            *broker_lanes(), sent(1, 0), settled(2, 0, 4), *lost(3, 4, 1 << 62), sent(4, 1), settled(5, 1, 0, lane=9),
            ended(9)],
        "the same, of a lane that was closed before all of it was durable": [
            *broker_lanes(), sent(1, 0), settled(2, 0, 4), *lost(3, 4, 5), sent(4, 1), settled(5, 1, 0, lane=9),
            ended(9)],
        "a publisher learns of one lost batch in a lane of a broker, not of the other": [
            *broker_lanes(), sent(1, 0), sent(1, 1), settled(2, 0, 4), settled(2, 1, 5), *lost(3, 4, 1 << 62),
            sent(4, 2), settled(5, 2, 0, lane=9), h.LossTold(at=6, process="a", lane=LANE, index=5), ended(9)],
        "a publisher that is closed, or fails, after a loss is never informed": [
            topic(replicas=2), sent(1, 0), settled(2, 0, 4), *lost(3, 4, 900),
            h.PublisherEnded(at=5, process="a", since=4)],
        "a loss that is none": [topic(replicas=2), h.LossTold(at=4, process="a", lane=LANE, index=4)],
        "a reader that never learns that its records are lost": [
            topic(1, replicas=2), lane(1), sent(1, 0), moved(1, 4), got(2, 4, 0), *lost(3, 4, 99), h.Healed(at=4),
            passed(5, 5), ended(9)],
        "a loss without a cause": [topic(replicas=2), lost_span(3, 4, 9)],
        "a LOST gap over existing batches": [
            topic(replicas=2), *lost(3, 4, 9), moved(4, 0), gap(5, "LOST", 3, 9)],
        "a TRIMMED gap over batches that were not trimmed": [
            topic(replicas=2), *trimmed(1, 3), moved(4, 0), gap(5, "TRIMMED", 0, 4)],
        "a trim without a request": [topic(replicas=2), h.TrimmedTo(at=1, lane=LANE, index=3)],
        "a trim of more than was asked for": [topic(replicas=2), *trimmed(1, 3), *trimmed(2, 5, asked=4)],
        "a loss after a clean stop, although the fabric was lost before": [
            topic(replicas=2), *lost(3, 4, 9), stopped(5, (4, 9)), lost_span(6, 20, 30)],
        "a loss by a clean stop that is seen only when the fabric is lost": [
            topic(replicas=2), stopped(5), stopped(7, (4, 9), clean=False), h.FabricLost(at=7), lost_span(8, 4, 9)],
        "a batch sent after the loss of the fabric is lost with it": [
            topic(replicas=2), *lost(3, 4, 900), sent(5, 0), settled(6, 0, 800)],
        "a batch acked in a session opened after the loss is lost with it": [
            topic(replicas=2), sent(2, 0), *lost(3, 4, 900), opened(5), settled(6, 0, 800)],
        "lost with one fabric, though sent and acked between that and the next": [
            topic(replicas=2), *lost(3, 4, 900), sent(5, 0), settled(6, 0, 800), stopped(7, (4, 900), clean=False),
            h.FabricLost(at=7)],
        "a reader gets a batch sent after the loss of the fabric that takes it": [
            topic(replicas=2), *lost(3, 4, 900), sent(5, 0), moved(6, 800), got(7, 800, 0)],
    },
    "P2": {
        "a wrong reference is stored": [topic(), sent(1, 0), named(1, 0, 3, right=False), settled(2, 0, 5)],
        "a batch that its caller numbered has the number of another": [
            topic(), h.Numbered(at=0, stream="a"), sent(1, 3), moved(1, 0), got(2, 0, 3, session_seq=2)],
        "a position names two batches": [
            topic(), sent(1, 0), sent(1, 1), got(2, 0, 0), got(3, 0, 1, reader="s")],
        "a batch has two positions": [topic(), sent(1, 0), moved(1, 0), got(2, 0, 0), got(3, 1, 0)],
        "an ack names another position than readers find": [
            topic(), sent(1, 0), settled(2, 0, 4), moved(2, 5), got(3, 5, 0)],
        "two acks of one batch name two positions": [
            topic(), sent(1, 0, process="a.1"), settled(2, 0, 4, process="a.1"), sent(3, 0, process="a.2"),
            settled(4, 0, 5, process="a.2")],
        "an acked position that a reader found empty": [
            topic(), sent(1, 0), settled(2, 0, 0), moved(3, 0), passed(4, 5)],
        "a refused batch that appears": [
            topic(), sent(1, 0), settled(2, 0, verdict=Verdict.FAILED), moved(2, 0), got(3, 0, 0)],
        "a refused batch that appears, and then goes with the fabric": [
            topic(replicas=2), sent(1, 0), settled(2, 0, verdict=Verdict.FAILED), moved(2, 4), got(3, 4, 0),
            *lost(4, 4, 9)],
        "a refused batch that is still there after a loss": [
            topic(replicas=2), sent(1, 0), moved(1, 3), got(2, 3, 0), *lost(3, 4, 9),
            settled(5, 0, verdict=Verdict.FAILED)],
        "one session sequence at two positions": [
            topic(), sent(1, 0), sent(1, 1), moved(1, 0), got(2, 0, 0, session_seq=3), got(3, 1, 1, session_seq=3)],
        "records that overlap": [
            topic(), sent(1, 0), sent(1, 1), moved(2, 0), got(2, 0, 0, seq=0, count=7), got(3, 1, 1, seq=6)],
        "a position of a lost span that names two batches": [
            topic(replicas=2), sent(1, 0), sent(1, 1), settled(2, 0, 4), *lost(3, 4, 9), settled(4, 1, 4)],
        "a position of a broker's lane that names two batches": [
            topic(0), lane(), sent(1, 0), sent(1, 1), got(2, 0, 0), got(3, 0, 1, reader="s")],
        "an ack with another seq": [topic(), sent(1, 0), settled(2, 0, 5, seq=9), moved(3, 5), got(4, 5, 0, seq=8)],
    },
    "P3": {
        "readers see two orders": [
            topic(), sent(1, 0), sent(1, 0, "b"), got(2, 0, 0), got(2, 1, 0, "b"), got(3, 0, 0, "b", reader="s")],
        "readers see two seqs of one entry": [topic(), sent(1, 0), got(2, 0, 0), got(3, 0, 0, reader="s", seq=1)],
        "order 5 reorders a stream": [topic(5), sent(1, 0), sent(1, 1), moved(2, 0), got(2, 0, 1), got(3, 1, 0)],
        "order 5 with a hole": [topic(5), sent(1, 0), sent(1, 1), sent(1, 2), moved(2, 0), got(2, 0, 0), got(3, 1, 2)],
        "order 5 that does not begin at 0": [topic(5), sent(1, 0), sent(1, 1), moved(2, 0), got(3, 0, 1)],
        "a batch that its publisher took for lost only after the fabric went": [
            topic(5, "skip"), sent(1, 0), sent(1, 1), sent(1, 2), moved(2, 0), got(2, 0, 0), *lost(3, 1, 1),
            settled(4, 1, verdict=Verdict.FAILED), h.Healed(at=5), got(7, 1, 2)],
        "a hole that is larger than its SKIPPED gap": [
            topic(5, "skip"), *(sent(1, n) for n in range(4)), moved(2, 0), got(2, 0, 0), gap(3, "SKIPPED", 1, 2, 1),
            got(4, 2, 3)],
        "a skipped batch that appears after all, though something else was lost": [
            topic(5, "skip", replicas=2), sent(1, 0), sent(1, 1), moved(2, 0), got(2, 0, 0),
            gap(3, "SKIPPED", 1, 2, 1, index=1), *lost(4, 2, 900), h.Healed(at=5), moved(6, 900), got(7, 900, 1)],
        "a skipped batch that appears after all": [
            topic(5, "skip"), sent(1, 0), sent(1, 1), moved(2, 0), got(2, 0, 0), gap(3, "SKIPPED", 1, 2, 1),
            got(4, 2, 1)],
        "a session that counts on wrongly after a loss": [
            topic(2, replicas=2), *(sent(1, n) for n in range(4)), *lost(3, 1, 9), moved(4, 0),
            got(7, 9, 2, session=7, session_seq=1), got(7, 10, 3, session=7, session_seq=1)],
        "a session that closes up though nothing was lost in between": [
            topic(2, replicas=2), *(sent(1, n) for n in range(3)), *lost(3, 0, 9), moved(4, 0),
            got(7, 9, 0, session=7, session_seq=0), got(7, 10, 2, session=7, session_seq=1)],
        "a batch under another sequence": [topic(), sent(1, 0), moved(1, 0), got(2, 0, 0, session_seq=1)],
        "order 1 reorders a stream": [
            topic(1), lane(1), sent(1, 0), sent(1, 1), moved(2, 0), got(2, 0, 1), got(3, 1, 0)],
        "a later send that comes first in a broker's lane": [
            topic(0), lane(), sent(1, 0), settled(2, 0, 1), sent(3, 0, "b"), settled(4, 0, 0, "b")],
        "append times that go back": [
            topic(), sent(1, 0), sent(1, 1), moved(1, 0), got(2, 0, 0, append_us=9), got(2, 1, 1, append_us=8)],
        "a later send that comes first": [
            topic(), sent(1, 0), settled(2, 0, 1), sent(3, 0, "b"), settled(4, 0, 0, "b")],
        "a later send before a batch acked without a position": [
            topic(), sent(1, 0), settled(2, 0), sent(3, 0, "b"), settled(4, 0, 0, "b"), moved(5, 1), got(6, 1, 0)],
    },
    "P4": {
        "a reader goes back": [topic(), sent(1, 0), sent(1, 1), moved(2, 0), got(2, 1, 1), got(3, 0, 0)],
        "a reader skips what another found": [
            topic(), sent(1, 0), sent(1, 1), got(2, 0, 0, reader="s"), moved(2, 0), got(3, 1, 1)],
        "a reader skips acked batches": [topic(), sent(1, 0), sent(1, 1), settled(2, 0, 0), moved(2, 0), got(3, 1, 1)],
        "a reader passes over a batch at the end": [topic(), sent(1, 0), settled(2, 0, 3), moved(2, 0), passed(3, 5)],
        "a prefix changes": [topic(), sent(1, 0), sent(1, 1), moved(1, 0), got(2, 0, 0), moved(3, 0), got(4, 0, 1)],
        "a start above an acked batch": [topic(replicas=2), sent(1, 0), settled(2, 0, 4, ack=2), start(3, 4, 900)],
        "a start above batches that were read, in brokers only": [
            topic(replicas=2), sent(1, 0), moved(1, 4), got(2, 4, 0), start(3, 4, 4, hot_index=900)],
        "a tail before an acked batch": [topic(), sent(1, 0), settled(2, 0, 4), tail(3, 4, 4)],
        "a tail before an earlier tail": [tail(1, 2, 7), tail(3, 4, 6)],
        "a tail before batches that were read": [topic(), sent(1, 0), moved(1, 3), got(2, 3, 0), tail(3, 4, 3)],
        "a tail before an acked batch that is lost only later": [
            topic(1, replicas=2), lane(1), sent(1, 0), settled(2, 0, 4), tail(3, 4, 4), *lost(5, 4, 99)],
        "a tail before a durably acked batch, after a loss": [
            topic(1, replicas=2), lane(1), sent(1, 0), settled(2, 0, 4, ack=2), *lost(3, 4, 99), tail(5, 6, 4)],
        "a tail before a durable one, after a loss": [
            topic(1, replicas=2), lane(1),
            h.TailRead(at=2, process="x", began=1, lane=LANE, index=6, seq=6, durable_index=5), *lost(3, 4, 99),
            tail(5, 6, 4)],
        "a tail of a topic's lane that goes back with the fabric": [
            topic(replicas=2), sent(1, 0), settled(2, 0, 4), *lost(3, 4, 99), tail(5, 6, 4)],
        "a batch above the frontier": [topic(), sent(1, 0), ordered(2, 3), moved(2, 3), got(3, 3, 0)],
        "a frontier that goes back": [ordered(2, 3), ordered(3, 2)],
        "an ack above the end of a lane": [
            topic(0), lane(), sent(1, 0), settled(2, 0, 1), moved(2, 0), gap(4, "END_OF_LANE", 1, 1)],
        "a lane with two ends, of which not all between them is lost": [
            topic(1, replicas=2), lane(1), *lost(3, 4, 5), gap(4, "END_OF_LANE", 6, 6, reader="s"),
            gap(4, "END_OF_LANE", 4, 4)],
        "a lane with two ends": [
            topic(0), lane(), moved(2, 0), gap(4, "END_OF_LANE", 1, 1), gap(4, "END_OF_LANE", 2, 2, reader="s")],
        "a reader that reaches the end of a lane without all of it": [
            topic(0), lane(), sent(1, 0), settled(2, 0, 0), moved(2, 0), gap(4, "END_OF_LANE", 1, 1)],
        "a partition without a request": [topic(), sent(1, 0), moved(2, 0, partitions=(1,)), got(3, 0, 0)],
    },
    "P5": {
        "an ack above the end of the order": [topic(), sent(1, 0), settled(2, 0, 4), epoch(3, 4)],
        "a batch read above the end of the order": [topic(), sent(1, 0), moved(1, 4), got(2, 4, 0), epoch(3, 4)],
        "a tail above the end of the order": [topic(), tail(1, 2, 5), epoch(3, 4)],
        "an epoch that forgets what the last one ordered": [
            topic(), epoch(1, 4), sent(2, 0), settled(3, 0, 4), epoch(5, 4, 3)],
        "a batch of a fenced session after its continuation": [
            topic(), sent(1, 0), sent(1, 1), sent(1, 2), moved(1, 0), got(2, 0, 0), got(3, 1, 1, session=3),
            got(4, 2, 2)],
        "the only batch of a fenced session, after all of its continuation": [
            topic(), sent(1, 0), sent(1, 1), moved(1, 0), got(2, 0, 0, session=3), got(3, 1, 1)],
        "the same, as another reader sees it": [
            topic(), sent(1, 0), sent(1, 1), sent(1, 2), moved(1, 0), got(2, 0, 0), got(3, 1, 1, session=3),
            got(4, 2, 2, reader="s")],
        "a late request deletes the next topic of that name": [
            h.PassingMade(at=1, topic=1), h.DeleteAsked(at=2, topic=1), h.PassingGone(at=3, topic=1),
            h.PassingMade(at=4, topic=2), h.DeleteAsked(at=5, topic=1), h.PassingGone(at=6, topic=2)],
        "a late request alters the next topic of that name": [
            h.ChangeAsked(at=2, topic=1, change=h.Change.ALTERED), h.PassingMade(at=4, topic=2),
            h.PassingChanged(at=6, topic=2, change=h.Change.ALTERED)],
        "a topic is trimmed, though it was only to be altered": [
            h.PassingMade(at=1, topic=1), h.ChangeAsked(at=2, topic=1, change=h.Change.ALTERED),
            h.PassingChanged(at=3, topic=1, change=h.Change.TRIMMED)],
    },
    "P6": {
        "a reference to a lost batch is stored": [
            topic(replicas=2), sent(1, 0), named(1, 0, 3), settled(2, 0, 1), *lost(3, 3, 9)],
        "a copy that is not as the others after a rest": [
            h.CopyDiffers(at=5, replica=1, lane=0, index=3, what="lacks")],
        "an ack before a sync": [copies(1, 0, 0, needed=1)],
        "one disk too few": [copies(1, 0, 2), copies(2, 1, 1)],
        "two of three where three were asked for": [copies(1, 0, 2, needed=3)],
        "a durable tail above the ordered one": [
            h.TailRead(at=2, process="x", began=1, lane=LANE, index=5, seq=5, durable_index=6)],
        "disks that disagree": [on_disk(1, 0, 0), on_disk(1, 0, 1)],
    },
    "P7": {
        "content that was never sent": [sent(1, 0), got(2, 0, 7)],
        "content that was never sent, on a disk": [sent(1, 0), on_disk(2, 0, 7)],
        "a batch with another number of records": [sent(1, 0), got(2, 0, 0, count=2)],
        "a batch of another partition": [sent(1, 0, partition=3), got(2, 0, 0)],
        "damage that is never repaired": [h.DamageLeft(at=1, replica=0, path="lane-0000000000/x.log")],
    },
    "P8": {
        "a publish without an end": [sent(1, 0), ended(9)],
        "a publish of a second process without an end": [
            sent(1, 0, process="a.1"), settled(2, 0, 0, process="a.1"), sent(3, 0, process="a.2"), ended(9)],
        "a publish with two ends": [
            sent(1, 0), settled(2, 0, 0), settled(3, 0, verdict=Verdict.UNKNOWN), ended(9)],
        "a question without an answer": [h.Asked(at=1, process="x", call="tail", number=0), ended(9)],
        "a reader that stops before the tail": [moved(1, 0), got(2, 2, 0), tail(2, 3, 4), ended(9)],
        "a reader that never starts": [moved(1, 0), tail(2, 3, 4), ended(9)],
        "a reader that stops before a loss": [
            moved(1, 0), tail(2, 3, 9), *lost(4, 5, 1 << 62), passed(6, 4), ended(9)],
        "a reader that stops at a loss": [
            moved(1, 0), tail(2, 3, 9), *lost(4, 5, 20), passed(6, 5), tail(7, 8, 21), ended(9)],
        "a stream that begins when all is well and fails": [
            fault(0), h.Healed(at=1), h.Began(at=2, process="a", stream="a"), sent(3, 0),
            settled(4, 0, verdict=Verdict.UNKNOWN), ended(9)],
        "a stream that began before that, had nothing under way, and fails": [
            fault(0), h.Began(at=1, process="a", stream="a"), opened(1), sent(1, 0), settled(2, 0, 0), h.Healed(at=3),
            sent(4, 1), settled(5, 1, verdict=Verdict.UNKNOWN), ended(9)],
        "nothing is broken, and a batch fails": [
            topic(5, "skip"), sent(1, 0), settled(2, 0, verdict=Verdict.UNKNOWN), ended(9)],
        "nothing is broken, and a batch is lost in a topic that skips nothing": [
            topic(5), sent(1, 0), settled(2, 0, verdict=Verdict.FAILED, error="Lost"), ended(9)],
        "a role that fails": [h.RoleFailed(at=1, process="broker-0.1", error="InvariantBroken: oh")],
    },
    "P9": {
        "a ring over its bound": [h.Sampled(at=1, process="b", what="pending", value=33, bound=32)],
        "a log over its bound": [h.Sampled(at=1, process="b", what="log", value=1.01, bound=1.0)],
        "another stream waits while one is stuck": [
            stuck(0, 10 * SECOND), sent(SECOND, 0), settled(9 * SECOND, 0, 0), ended(20 * SECOND)],
        "another stream never gets an answer": [stuck(0, 10 * SECOND), sent(SECOND, 0), ended(20 * SECOND)],
        "a fault long before does not excuse it": [
            h.Fault(at=0, kind="pause", target="broker-0", until=SECOND), stuck(SECOND + p9.CALM_US, 20 * SECOND),
            sent(5 * SECOND, 0), settled(9 * SECOND, 0, 0), ended(30 * SECOND)],
    },
}  # fmt: skip


def cases(table: dict[str, dict[str, list[Event]]]) -> list[object]:
    return [pytest.param(p, events, id=f"{p}: {name}") for p, named in table.items() for name, events in named.items()]


@pytest.mark.parametrize(("promise", "events"), cases(GOOD))
def test_a_history_that_keeps_the_promise_is_accepted(promise: str, events: list[Event]) -> None:
    """A checker finds nothing in a history that keeps its promise."""
    assert CHECKERS[promise](History(events)) == []


@pytest.mark.parametrize(("promise", "events"), cases(BAD))
def test_a_history_that_breaks_the_promise_is_rejected(promise: str, events: list[Event]) -> None:
    """A checker finds the violation, names its promise, and describes it."""
    found = CHECKERS[promise](History(events))
    assert found
    assert all(violation.promise == promise and len(violation.sentence) > 20 for violation in found)


@pytest.mark.parametrize("promise", sorted(CHECKERS))
def test_each_checker_has_enough_histories_of_its_own(promise: str) -> None:
    """At least five histories to accept and five to reject."""
    assert len(GOOD[promise]) >= 5
    assert len(BAD[promise]) >= 5


def test_a_history_survives_being_written_down() -> None:
    """Events dumped as JSON lines are loaded as the same events."""
    events = [event for table in (GOOD, BAD) for named in table.values() for case in named.values() for event in case]
    assert h.load(h.dump(History(events))).events == events
