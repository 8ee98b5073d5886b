"""What was seen from outside: the one list of events that all checkers read.

The simulator writes it, and so does anything that watches a real cluster: one observer, one clock (`at`, microseconds),
events in the order in which they were seen. It knows nothing of brokers, rings or epochs, only of calls and answers.

A *stream* is what one publisher means to write, in order: batches number 0, 1, 2, ... It outlives processes: when a
named session is opened again by a new process, that process goes on with the same stream and may send the same numbers
again, with the same content. A batch's number is its session sequence. `digest` is a hash of a batch's content;
contents of different batches differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import TypeVar

import msgspec


class Verdict(StrEnum):
    """How a publish ended for its caller."""

    STORED = "stored"  # it is in the log, at `index` (None: stored too long ago to name it)
    FAILED = "failed"  # it is not in the log and never will be
    UNKNOWN = "unknown"  # it may or may not be in the log


class Event(msgspec.Struct, kw_only=True, tag=True, omit_defaults=True):
    """Base of all events."""

    at: int


class TopicMade(Event):
    """A topic exists."""

    lane: int
    name: str
    order: int
    on_gap: str
    replicas: int = 0
    durable_on: int = 0


class LaneMade(Event):
    """A broker has made a lane for a topic of order 0 or 1; the topic is named by its own lane number."""

    lane: int
    topic: int
    order: int


class Began(Event):
    """A process begins to publish a stream, from its start or from where another process left it."""

    process: str
    stream: str
    strong: bool = False  # its sessions keep the order of its batches


class Sent(Event):
    """A process handed a batch to its publisher."""

    process: str
    stream: str
    lane: int
    number: int
    digest: int
    count: int = 1
    partition: int = 0


class Settled(Event):
    """The publisher reported to that process what became of the batch."""

    process: str
    stream: str
    lane: int
    number: int
    verdict: Verdict
    index: int | None = None
    seq: int | None = None
    error: str = ""
    ack: int = 1  # what it had asked for


class SessionOpened(Event):
    """A publisher got a session (again) for its stream."""

    process: str
    stream: str
    lane: int
    session: int
    expected: int


class Moved(Event):
    """A reader starts, or seeks: the next index it wants (None: wherever the log starts or ends)."""

    reader: str
    lane: int
    index: int | None
    partitions: tuple[int, ...] | None = None


class Delivered(Event):
    """A reader got a batch."""

    reader: str
    lane: int
    index: int
    seq: int
    count: int
    session: int
    session_seq: int
    partition: int
    digest: int
    append_us: int = 0  # when the lane's writer took it, by that writer's clock
    durable: bool = False  # it had asked for what is durable


class GapSeen(Event):
    """A reader got a typed gap. SKIPPED: sequences [start, stop) of `session`, reported at `index`; else indices.

    END_OF_LANE: the lane is closed, and ends at `start`.
    """

    reader: str
    lane: int
    kind: str
    start: int
    stop: int
    session: int | None = None
    index: int | None = None


class Passed(Event):
    """A reader has seen all that it asked for below `index`."""

    reader: str
    lane: int
    index: int


class TailRead(Event):
    """A process asked for the end of the log at `began` and got the answer now."""

    process: str
    began: int
    lane: int
    index: int
    seq: int
    durable_index: int = 0


class StartRead(Event):
    """A process asked at `began` where a lane starts and got the answer now: for all readers, and for those who read
    from brokers only (a tiering job, for example)."""

    process: str
    began: int
    lane: int
    index: int
    hot_index: int


class OrderedTo(Event):
    """An observer that sees everything (the simulator) saw the ordered frontier at `index`."""

    lane: int
    index: int


class EpochStarted(Event):
    """An observer of the store saw that an epoch has started, and where it says that each lane ended: lane -> index."""

    epoch: int
    ends: dict[int, int]


class StillThere(Event):
    """A reader learned that the batch at `index` is trimmed, or that the log begins above it; an observer of everything
    found it there."""

    reader: str
    lane: int
    index: int


class FabricLost(Event):
    """Every process was gone at once, and the fabric with them: what was not durable may be lost."""


class Stopped(Event):
    """The whole cluster has stopped, and this is what the store says to be lost: (lane, start, stop).

    Clean: it was asked to stop, and all that was ordered is durable. Else this is seen when the fabric is lost.
    """

    clean: bool
    lost: list[tuple[int, int, int]] = []
    numbered: bool = True  # clients can distinguish this cluster from the next one


class MirrorLeft(Event):
    """The fabric that was lost just now had a mirror, which is still there: all but the payloads."""


class WrittenTo(Event):
    """An observer of all caches found entries of a lane up to `index` when the fabric was lost."""

    lane: int
    index: int


class LostSpan(Event):
    """The store says that indices [start, stop) of a lane are lost: no batch is there, and none ever will be."""

    lane: int
    start: int
    stop: int


class LossTold(Event):
    """A publisher learned that a batch of its, acked at `index`, went with the fabric."""

    process: str
    lane: int
    index: int


class ByReference(Event):
    """A batch that was sent names a staged batch, at `index` of `lane`, instead of carrying its bytes.

    `right`: that batch has its content. One that is not right has to be refused.
    """

    process: str
    stream: str
    number: int
    lane: int
    index: int
    right: bool = True


class Numbered(Event):
    """The caller of this stream numbers its batches itself: batch n must be stored as session sequence n, or not."""

    stream: str


class PublisherEnded(Event):
    """A publisher ended by itself. `since`: when it was asked to close, or failed."""

    process: str
    since: int


class TieredTo(Event):
    """A tiering job has moved everything below `index` to the topic's table; brokers may give it up."""

    lane: int
    index: int


class TrimAsked(Event):
    """An operator asks for a trim of everything below `index`."""

    lane: int
    index: int


class TrimmedTo(Event):
    """The store says that everything below `index` is trimmed."""

    lane: int
    index: int


class Copies(Event):
    """Something durable was reported or read; an observer of all disks counts the replicas that synced it."""

    who: str
    lane: int
    index: int
    copies: int
    needed: int


class OnDisk(Event):
    """In the end the batch is synced on so many disks, byte for byte."""

    lane: int
    index: int
    digest: int
    copies: int


class DamageLeft(Event):
    """In the end a replica still has a damaged copy, and does not know it or has not repaired it."""

    replica: int
    path: str


class CopyDiffers(Event):
    """When all had time to catch up, a replica lacks a batch below the durable end, or has other bytes than a peer."""

    replica: int
    lane: int
    index: int
    what: str


class Asked(Event):
    """A process made a call other than a publish."""

    process: str
    call: str
    number: int


class Answered(Event):
    """That call ended; `error` is the error's type, if it failed."""

    process: str
    call: str
    number: int
    error: str = ""


class Died(Event):
    """A process is gone for ever; its calls need no end."""

    process: str


class Fault(Event):
    """Something was broken on purpose, until `until`."""

    kind: str
    target: str
    until: int


class Stuck(Event):
    """A stream has a hole that does not close before `until`: whatever it sent above the hole waits."""

    stream: str
    lane: int
    until: int


class Healed(Event):
    """No fault is active from here on."""


class Ended(Event):
    """The observer stopped looking: whatever should have ended has had its time."""


class PassingMade(Event):
    """A topic that will be deleted soon exists."""

    topic: int


class DeleteAsked(Event):
    """A client asks to delete the topic with this id."""

    topic: int


class PassingGone(Event):
    """The topic with this id is deleted."""

    topic: int


class Change(StrEnum):
    """What a client asks to happen to a topic."""

    ALTERED = "altered"
    TRIMMED = "trimmed"  # in one of its lanes


class ChangeAsked(Event):
    """A client asks to change the topic with this id."""

    topic: int
    change: Change


class PassingChanged(Event):
    """The topic with this id was changed."""

    topic: int
    change: Change


class Sampled(Event):
    """How full something is."""

    process: str
    what: str
    value: float
    bound: float


class RoleFailed(Event):
    """A role raised an error that it never may."""

    process: str
    error: str


AnyEvent = (
    TopicMade | LaneMade | Began | Sent | Settled | SessionOpened | Moved | Delivered | GapSeen | Passed | TailRead
    | StartRead | OrderedTo | EpochStarted | StillThere | FabricLost | Stopped | MirrorLeft | WrittenTo | LostSpan
    | LossTold | Numbered | PublisherEnded | ByReference
    | TieredTo | TrimAsked | TrimmedTo | Copies | OnDisk | DamageLeft | CopyDiffers | Asked
    | Answered | Died | Fault | Stuck | Healed | Ended | Sampled | RoleFailed
    | PassingMade | DeleteAsked | PassingGone | ChangeAsked | PassingChanged
)  # fmt: skip

Kind = TypeVar("Kind", bound=Event)


class History:
    """Events in the order in which they were seen, also by kind."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.events: list[Event] = []
        self._by_kind: dict[type[Event], list[Event]] = {}
        self.worked_out: dict[str, object] = {}  # what checkers keep for each other
        for event in events:
            self.add(event)

    def add(self, event: Event) -> None:
        """Append what was just seen."""
        self.events.append(event)
        self._by_kind.setdefault(type(event), []).append(event)

    def of(self, kind: type[Kind]) -> list[Kind]:
        """All events of one kind."""
        return self._by_kind.get(kind, [])  # type: ignore[return-value]

    def some(self, *kinds: type[Kind]) -> list[Kind]:
        """All events of these kinds, in the order in which they were seen: most are of no interest to most checkers."""
        wanted = frozenset(kinds)
        return [event for event in self.events if type(event) in wanted]  # type: ignore[misc]

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __len__(self) -> int:
        return len(self.events)


def dump(history: History) -> bytes:
    """JSON lines, one event each."""
    encoder = msgspec.json.Encoder()
    return b"".join(encoder.encode(event) + b"\n" for event in history)


def load(lines: bytes) -> History:
    """The history that `dump` wrote."""
    decoder = msgspec.json.Decoder(AnyEvent)
    return History(decoder.decode(line) for line in lines.splitlines() if line)
