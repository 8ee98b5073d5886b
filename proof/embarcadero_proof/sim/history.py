"""The history of a run as seen from outside: the one list of events that all checkers read.

The simulator writes it, and so do observers of real clusters: one observer, one clock (`at`, microseconds), events in
the order of observation. A history contains only calls and answers, no brokers, rings or epochs.

A *stream* is the sequence of batches of one publisher: batches number 0, 1, 2, ... It outlives processes: a new process
that opens a named session again continues the same stream. It may send the same numbers again, with the same content.
A batch's number is its session sequence. `digest` is a hash of a batch's content; different batches have different
contents.
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
    """A broker has made a lane for a topic of order 0 or 1; `topic` is the topic's own lane number."""

    lane: int
    topic: int
    order: int


class Began(Event):
    """A process begins to publish a stream, from its start or where another process stopped."""

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
    """The publisher reported the outcome of a batch to that process."""

    process: str
    stream: str
    lane: int
    number: int
    verdict: Verdict
    index: int | None = None
    seq: int | None = None
    error: str = ""
    ack: int = 1  # the requested ack


class SessionOpened(Event):
    """A publisher got a session (again) for its stream."""

    process: str
    stream: str
    lane: int
    session: int
    expected: int


class Moved(Event):
    """A reader starts, or seeks: its next index (None: wherever the log starts or ends)."""

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
    durable: bool = False  # the reader had asked for durable records


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
    """A reader has read all records below `index` that it asked for."""

    reader: str
    lane: int
    index: int


class TailRead(Event):
    """A process asked for the end of the log at `began`. This is the moment of the answer."""

    process: str
    began: int
    lane: int
    index: int
    seq: int
    durable_index: int = 0


class StartRead(Event):
    """A process asked at `began` for the start of a lane. This is the moment of the answer: `index` for all readers,
    `hot_index` for readers of brokers only (a tiering job, for example)."""

    process: str
    began: int
    lane: int
    index: int
    hot_index: int


class OrderedTo(Event):
    """An observer of everything (the simulator) saw the ordered frontier at `index`."""

    lane: int
    index: int


class EpochStarted(Event):
    """An observer of the store saw the start of an epoch, and the end of each lane in the store: lane -> index."""

    epoch: int
    ends: dict[int, int]


class StillThere(Event):
    """A reader learned that the batch at `index` is trimmed, or that the log begins above it. An observer of everything
    found the batch still there."""

    reader: str
    lane: int
    index: int


class FabricLost(Event):
    """Every process ended at once, and the fabric is lost: records that were not durable may be lost."""


class Stopped(Event):
    """The whole cluster has stopped. `lost` has the lost spans according to the store: (lane, start, stop).

    Clean: it was asked to stop, and all ordered records are durable. Else the event is the loss of the fabric.
    """

    clean: bool
    lost: list[tuple[int, int, int]] = []
    numbered: bool = True  # clients can distinguish this cluster from the next generation


class MirrorLeft(Event):
    """The fabric that was just lost had a mirror, which still exists: all but the payloads."""


class WrittenTo(Event):
    """An observer of all caches found entries of a lane up to `index` when the fabric was lost."""

    lane: int
    index: int


class LostSpan(Event):
    """Indices [start, stop) of a lane are lost according to the store: no batch is there, and none ever will be."""

    lane: int
    start: int
    stop: int


class LossTold(Event):
    """A publisher learned that its batch, acked at `index`, was lost with the fabric."""

    process: str
    lane: int
    index: int


class ByReference(Event):
    """A batch names a staged batch, at `index` of `lane`, instead of carrying its bytes.

    `right`: the staged batch has the content of this one. If it has not, the batch has to be refused.
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
    """A tiering job has moved all batches below `index` to the topic's table; brokers may drop them."""

    lane: int
    index: int


class TrimAsked(Event):
    """An operator asks for a trim below `index`."""

    lane: int
    index: int


class TrimmedTo(Event):
    """The lane is trimmed below `index` according to the store."""

    lane: int
    index: int


class Copies(Event):
    """A durable batch was reported or read; an observer of all disks counts the replicas that have synced it."""

    who: str
    lane: int
    index: int
    copies: int
    needed: int


class OnDisk(Event):
    """At the end the batch is synced on so many disks, byte for byte."""

    lane: int
    index: int
    digest: int
    copies: int


class DamageLeft(Event):
    """At the end a replica still has a damaged copy, which it has not noticed or not repaired."""

    replica: int
    path: str


class CopyDiffers(Event):
    """After all had time to catch up, a replica lacks a batch below the durable end, or has other bytes than a peer."""

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
    """A process has ended permanently; its calls need no end."""

    process: str


class Fault(Event):
    """A fault was injected, and lasts until `until`."""

    kind: str
    target: str
    until: int


class Stuck(Event):
    """A stream has a hole that does not close before `until`: its batches above the hole wait."""

    stream: str
    lane: int
    until: int


class Healed(Event):
    """No fault is active from here on."""


class Ended(Event):
    """The observer stopped looking: every call has had the time to end."""


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
    """Changes of a topic that a client may ask for."""

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
    """How full a resource is."""

    process: str
    what: str
    value: float
    bound: float


class RoleFailed(Event):
    """A role raised an error that must never happen."""

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
    """Events in the order of observation, also by kind."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.events: list[Event] = []
        self._by_kind: dict[type[Event], list[Event]] = {}
        self.worked_out: dict[str, object] = {}  # results that checkers share
        for event in events:
            self.add(event)

    def add(self, event: Event) -> None:
        """Append an event."""
        self.events.append(event)
        self._by_kind.setdefault(type(event), []).append(event)

    def of(self, kind: type[Kind]) -> list[Kind]:
        """List all events of one kind."""
        return self._by_kind.get(kind, [])  # type: ignore[return-value]

    def some(self, *kinds: type[Kind]) -> list[Kind]:
        """List all events of these kinds in the order of observation. Most checkers need only a few kinds."""
        wanted = frozenset(kinds)
        return [event for event in self.events if type(event) in wanted]  # type: ignore[misc]

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __len__(self) -> int:
        return len(self.events)


def dump(history: History) -> bytes:
    """Encode a history as JSON lines, one event each."""
    encoder = msgspec.json.Encoder()
    return b"".join(encoder.encode(event) + b"\n" for event in history)


def load(lines: bytes) -> History:
    """Decode the history that `dump` wrote."""
    decoder = msgspec.json.Decoder(AnyEvent)
    return History(decoder.decode(line) for line in lines.splitlines() if line)
