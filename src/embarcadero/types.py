"""The words of the system as types. No logic lives here.

topic: a named log.  lane: one append-only order index with one writer.  index: dense number of a batch in its lane.
seq: dense number of a record in its lane.  session: one publisher's idempotent stream into one topic.
incarnation: one run of a broker.  handle (of a region): the small number by which entries name a broker incarnation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag, StrEnum
from itertools import pairwise
from typing import Annotated, Final, NamedTuple

import msgspec

NO_SESSION = 0xFFFF_FFFF
"""A session handle that names no session."""

NO_INDEX = 0xFFFF_FFFF_FFFF_FFFF
"""An index or seq that names no position; 0 is a real position."""

NO_HANDLE = 0xFFFF
"""A region handle that names no broker incarnation."""


def public_names(found: object, inner: Collection[str] = ()) -> list[str]:
    """Return what `dir` and tab completion show of an object: its public names, without those for other modules."""
    names = (name for name in object.__dir__(found) if name not in inner)
    return sorted(name for name in names if not name.startswith("_") or name.startswith("__"))


class Order(IntEnum):
    """How strongly a topic, or one session in it, is ordered. `orders.py` has the names that users write."""

    NONE = 0
    BROKER = 1
    TOTAL = 2
    STRONG = 5


class Ack(IntEnum):
    """When a publish counts as done."""

    NONE = 0
    ORDERED = 1
    DURABLE = 2


class OnGap(StrEnum):
    """What is done when a gap of a strong session does not close in time."""

    FENCE = "fence"
    SKIP = "skip"


class EntryKind(IntEnum):
    """Kinds of entries. Those below 16 appear in the order index; the others only in pending rings."""

    BATCH = 1
    SESSION_OPEN = 2
    SESSION_FENCE = 3
    SESSION_CLOSE = 4
    SKIP = 5
    SESSION_ATTACH = 16
    SESSION_DETACH = 17


BATCH_KIND: Final = int(EntryKind.BATCH)
"""As a plain number: numpy compares with these several times as quickly as with members of enums."""


class Outcome(IntEnum):
    """What became of a pending entry. Those below 16 mean that the batch (or request) is in the log."""

    ORDERED = 1
    DUP_OF = 2  # stored before, at the index given
    DUP = 3  # stored before, too long ago to name the index
    OPENED = 4
    CLOSED = 5
    NOTED = 6  # an attach or detach was taken note of
    STALE = 16  # below the session's window; the publisher settled it long ago
    LOST = 17  # its sequence was skipped; it will never appear
    CONFLICT = 18  # the same sequence was stored with other bytes
    FENCED = 19  # the session is fenced; `extra` tells the next sequence expected
    UNKNOWN_SESSION = 20
    BACKPRESSURE = 21  # not stored: beyond the session's window, or bounds reached; send again later
    UNKNOWN_TOPIC = 22
    TOO_MANY_SESSIONS = 23
    UNKNOWN_SCHEMA = 24  # the topic has no such version of its schema
    NAME_HELD = 25  # not by the holder that the asker knows of; `session` tells by whom
    UNDECIDED = 26  # another copy waits, or it can't be told yet what became of it; send again later to learn it
    NO_REFERENCE = 27  # not stored: the staged batch that it names is not there; `extra` is a ReferenceFault

    @property
    def stored(self) -> bool:
        """True when the batch is in the log."""
        return self in (Outcome.ORDERED, Outcome.DUP_OF, Outcome.DUP)


class ReferenceFault(IntEnum):
    """Why a batch by reference was refused with NO_REFERENCE."""

    GONE = 1  # nothing can be read at its position: it was trimmed, or lost, or never was there
    ANOTHER_TOPIC = 2  # the lane is not one of that topic: the topic was deleted, or made again
    DIFFERS = 3  # the batch at its position has another size, count or checksum


REQUEST_OUTCOMES: Final = frozenset((Outcome.OPENED, Outcome.CLOSED, Outcome.NOTED, Outcome.NAME_HELD))
"""These are never the outcome of a batch."""


class GapKind(IntEnum):
    """Why a span of positions has no records."""

    SKIPPED = 1
    TRIMMED = 2
    LOST = 3
    END_OF_LANE = 4  # the lane is closed and ends here: nothing is missing, and nothing more will come
    NEVER_DURABLE = 5  # passed over by a restart: for a reader of durable records nothing was ever there


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """Where a batch or a record is: its lane, the batch's index, the record's seq."""

    lane: int
    index: int
    seq: int


U63 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""A number that signed 64-bit columns, and Java's long, hold."""


class LanePosition(NamedTuple):
    """A position in one lane: the index of a batch, and the seq of its first record. It compares like a tuple."""

    index: U63  # type: ignore[assignment]  # hides tuple.index
    seq: U63


FIRST_POSITION: Final = LanePosition(0, 0)
"""Where every lane starts."""


class SessionKey(NamedTuple):
    """A session of a lane. It compares like a tuple."""

    lane: int
    session: int


class Span(NamedTuple):
    """Numbers [start, stop): indices of batches, seqs of records, or sequences of a session; compares like a tuple."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class StagedBatch:
    """A batch in a topic of order 0 or 1, named so that it can be published elsewhere by reference.

    `topic_id`, `lane` and `index` say where it is; `size`, `count` and `crc` are those of its payload. `schema` is the
    version, in the topic that it is to be published into, by which the payload was encoded; 0: raw records.
    """

    topic_id: int
    lane: int
    index: int
    size: int
    count: int
    crc: int
    schema: int = 0


class Gap(NamedTuple):
    """A typed hole. SKIPPED: session sequences [start, stop) of `session`. TRIMMED, LOST, NEVER_DURABLE: indices.

    END_OF_LANE: `start` and `stop` are the index at which the lane ends.
    """

    kind: GapKind
    start: int
    stop: int
    session: int = NO_SESSION


Holes = Sequence[Span]
"""Spans of seqs that a restart passed over: no record can be read there, now or later."""


def count_outside(start: int, stop: int, holes: Holes) -> int:
    """How many positions of [start, stop) are in none of the holes, which do not overlap."""
    return max(0, stop - start - sum(max(0, min(stop, to) - max(start, from_)) for from_, to in holes))


def united(spans: Iterable[Span]) -> list[Span]:
    """The same positions as spans that neither overlap nor touch, in order."""
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1].stop:
            found[-1] = Span(found[-1].start, max(stop, found[-1].stop))
        else:
            found.append(Span(start, stop))
    return found


@dataclass(frozen=True, slots=True)
class Tail:
    """Where a lane ends: the next index and seq to be ordered, and to be durable; and where its readable part starts.

    `hot_index` and `hot_seq` are where the part begins that brokers serve: above the start, what is below is only in
    the topic's table. Of a topic of order 0 or 1 all count the batches and records of all lanes; `lanes` has the tail
    of each. `holes` are the spans of seqs above the start that restarts passed over: use `records` to count.
    """

    lane: int
    index: int
    seq: int
    start_index: int = 0
    start_seq: int = 0
    durable_index: int = 0
    durable_seq: int = 0
    hot_index: int = 0
    hot_seq: int = 0
    lanes: tuple[Tail, ...] = ()
    holes: tuple[Span, ...] = ()

    def records(self, start: int, stop: int) -> int:
        """How many records have start <= seq < stop: seqs in `holes` are none. Of one lane."""
        return count_outside(start, stop, self.holes)


class Cut(msgspec.Struct, frozen=True, array_like=True):
    """Where a piece of a lane ends: the index and seq after its last batch; and about how many bytes it has."""

    index: int
    seq: int
    bytes: int


class ReaderProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a reader says it is: by lane the next index and seq that it has not dealt with."""

    reader: str
    places: dict[int, LanePosition]
    ago_s: float = 0.0  # since it said so
    lag: int | None = None  # records between there and the end; None: not counted


class TopicLane(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One lane of a topic of order 0 or 1, as the store holds it: the batches that one broker incarnation took."""

    lane: int
    topic: int  # the lane number of its topic
    broker: int
    incarnation: int
    handle: int
    end: int | None = None  # where it ends; None while it is open
    end_seq: int | None = None
    removed: bool = False  # closed, and its memory was given back: nothing is left to read
    kept: int | None = None  # the fabric was lost, and [kept, end) with it

    @property
    def open(self) -> bool:
        """Whether its broker may still append to it."""
        return self.end is None

    @property
    def region(self) -> str:
        """Name of its order ring in the fabric."""
        return f"broker-{self.broker}.{self.incarnation}/order-{self.lane}"


MURMUR2 = "murmur2"
CRC32C = "crc32c"
PARTITIONERS = (MURMUR2, CRC32C)
"""How keys choose partitions: see `wire/partitioners.py`."""


def id_text(topic_id: int) -> str:
    """Print a topic's id as 16 hexadecimal digits: as a number, JavaScript would round it."""
    return f"{topic_id:016x}"


HIDDEN_PREFIX: Final = "__"
"""Names of topics that the cluster makes for itself begin with this. Lists leave them out unless asked for."""

STAGING_PREFIX: Final = HIDDEN_PREFIX + "staged."
"""The topic with this prefix and the id of another topic (16 hexadecimal digits) holds what is staged for that one."""
ROUTED_TOPIC: Final = HIDDEN_PREFIX + "routed"
"""The home of writes into several topics: its log has their decisions."""


JOBS_PREFIX: Final = HIDDEN_PREFIX + "jobs."
"""The topic with this prefix and the id of another topic holds the facts of jobs that write into that one."""


def staging_topic(topic_id: int) -> str:
    """Return the name of the topic that holds what is staged for the topic with this id."""
    return STAGING_PREFIX + id_text(topic_id)


def jobs_topic(topic_id: int) -> str:
    """Return the name of the topic that holds the facts of jobs that write into the topic with this id."""
    return JOBS_PREFIX + id_text(topic_id)


class Topic(msgspec.Struct, frozen=True, kw_only=True):
    """A topic as the store holds it. `lanes` is filled in for those who ask: orders 0 and 1 have one per broker."""

    name: str
    lane: int
    order: int = int(Order.TOTAL)
    partitions: int = 1
    replicas: int = 0
    durable_on: int = 0
    on_gap: str = OnGap.FENCE.value
    gap_timeout_ms: int = 30_000
    session_ttl_s: int = 86_400
    schema_version: int = 0  # newest version of its schema; 0: raw records
    retention_bytes: int = 0  # whole sealed segments go beyond this; 0: no bound
    retention_s: int = 0  # and after this long; 0: no bound
    id: int = 0  # random, 63 bits: another topic of the same name has another one; 0: not given yet
    had_no_id: bool = False  # an upgrade gave the id: session checkpoints on disk without an id may be this topic's
    partitioner: str = CRC32C  # how keys choose partitions; a record without this field is of a time without a choice
    key: str = ""  # the column whose values choose partitions; "": none, or raw records, which have keys of their own
    first_partitions: int = 0  # how many it was created with; 0: as many as now, or not known
    created_us: int = 0  # when, by the clock of the broker that was asked; 0: not known
    lanes: list[TopicLane] = []

    @property
    def checkpoint_ids(self) -> tuple[int, ...]:
        """The ids that session checkpoints of this topic on disk may carry."""
        return (self.id, 0) if self.had_no_id or not self.id else (self.id,)

    @property
    def hidden(self) -> bool:
        """Whether the cluster made it for itself."""
        return self.name.startswith(HIDDEN_PREFIX)


FROM_TABLE: Final = 0x80
"""A flag of a batch's entry as a broker sends it: the payload was encoded again from the columns of the topic's table.

`size` and `crc` are those of the payload that is sent; `location` is the CRC32C of the payload that was published.
"""


class Hole(msgspec.Struct, frozen=True, array_like=True):
    """Positions of a lane that a loss of memory passed over: indices [start, stop), seqs [start_seq, stop_seq).

    `never_durable`: nothing there ever was durable.
    """

    start: int
    stop: int
    start_seq: int
    stop_seq: int
    never_durable: bool = False


class Tier(msgspec.Struct, frozen=True, kw_only=True):
    """The table of a topic, as the store holds it. Positions are (index, seq) by lane.

    What is below a lane's frontier is in the table; what is below its start is gone for all readers. `metadata` is the
    file that describes the table as of these frontiers. Whoever writes the table does so in an epoch of its own.
    """

    id: str  # random, made with the table, of which it is a property: another table of the same name has another one
    warehouse: str
    table: str  # its identifier in the catalog
    metadata: str = ""
    frontiers: dict[int, LanePosition] = {}
    starts: dict[int, LanePosition] = {}
    hot_retention_s: int = 0  # so long brokers keep what is in the table
    epoch: int = 0
    holder: str = ""
    lease: int = 0
    advanced_us: int = 0  # when a frontier was last told, by the clock of the broker that was told
    topic_id: int = 0  # the id of the topic whose records it holds; 0: the topic had none when it was made
    properties: dict[str, str] = {}  # how the store is reached, without secrets: endpoint, region, addressing
    engine: str = ""  # what writes the files: "spark" or "process"; "auto" before it is known
    holes: dict[int, list[Hole]] = {}  # below the frontiers, oldest first: the ranges beside them are forgotten in time

    def frontier(self, lane: int) -> LanePosition:
        """The position below which a lane is in the table."""
        return LanePosition(*self.frontiers.get(lane, FIRST_POSITION))

    def start(self, lane: int) -> LanePosition:
        """The position at which a lane's part in the table starts; at its frontier if there is nothing."""
        return min(LanePosition(*self.starts.get(lane, FIRST_POSITION)), self.frontier(lane))

    def gap(self, lane: int, start: int, stop: int, durable: bool) -> Gap:
        """Positions that the table lacks: LOST. For a reader of durable records NEVER_DURABLE, if nothing there was."""
        at = start
        for hole in self.holes.get(lane, ()) if durable else ():
            if hole.never_durable and hole.start <= at:
                at = max(at, hole.stop)
        return Gap(GapKind.NEVER_DURABLE if at >= stop else GapKind.LOST, start, stop)

    @property
    def store(self) -> str:
        """The store of the table's files, for messages: its endpoint, if one is known, and the warehouse."""
        endpoint = next((value for key, value in self.properties.items() if key.endswith(".endpoint")), "")
        return f"{endpoint}, warehouse {self.warehouse}" if endpoint else f"warehouse {self.warehouse}"


class MemberState(StrEnum):
    """Life of one broker incarnation."""

    LIVE = "live"
    DEAD = "dead"  # replaced or gone; its regions still hold data
    REMOVED = "removed"  # its regions may be unlinked


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One incarnation of one broker as the store holds it."""

    broker: int
    incarnation: int
    handle: int
    host: str
    port: int
    pid: int
    state: MemberState = MemberState.LIVE

    @property
    def region_prefix(self) -> str:
        """The folder of its regions in the fabric."""
        return f"broker-{self.broker}.{self.incarnation}"

    @property
    def address(self) -> str:
        """host:port, as clients use it."""
        return f"{self.host}:{self.port}"


class ReplicaState(StrEnum):
    """Life of one replica incarnation."""

    LIVE = "live"
    DRAINING = "draining"  # takes no new ranges; its ranges move away
    DEAD = "dead"  # replaced or gone


class ReplicaRef(msgspec.Struct, frozen=True, kw_only=True):
    """One replica incarnation as a range names it. `disk` tells a wiped disk from the one that was there."""

    replica: int
    incarnation: int
    disk: str

    @property
    def region_prefix(self) -> str:
        """The folder of its regions in the fabric."""
        return f"replica-{self.replica}.{self.incarnation}"


class ReplicaMember(msgspec.Struct, frozen=True, kw_only=True):
    """One incarnation of one replica as the store holds it."""

    replica: int
    incarnation: int
    disk: str  # random, made with the replica's folder
    folder: str  # absolute path of its folder
    host: str
    pid: int
    state: ReplicaState = ReplicaState.LIVE

    @property
    def ref(self) -> ReplicaRef:
        """As ranges name it."""
        return ReplicaRef(replica=self.replica, incarnation=self.incarnation, disk=self.disk)


class Range(msgspec.Struct, frozen=True, kw_only=True):
    """A contiguous span of a lane with one replica set. Only a lane's last one is open; a sealed one never changes.

    `number` counts from 1 in its lane. Positions between the end of a range and the start of the next one are lost:
    with `never_durable`, nothing there ever was durable; else (ranges of earlier versions, and of a loss that an
    operator accepted) something may have been. One
    that is trimmed away is forgotten, or empty and without replicas as long as lost positions after it are to be told.
    """

    lane: int
    number: int
    start: int
    start_seq: int
    replicas: list[ReplicaRef]
    durable_on: int
    end: int | None = None
    end_seq: int | None = None
    never_durable: bool = False

    @property
    def key(self) -> RangeKey:
        """Its lane and number."""
        return RangeKey(self.lane, self.number)

    @property
    def open(self) -> bool:
        """Whether it may still grow."""
        return self.end is None


def lost_spans(ranges: Sequence[Range]) -> list[Span]:
    """Spans of indices [from, to) of one lane that are between its ranges: lost with the memory, oldest first."""
    return [Span(old.end, new.start) for old, new in pairwise(ranges) if old.end is not None and old.end < new.start]


class RangeKey(NamedTuple):
    """A range of a lane. No range has the number 0: it stands for the lane itself, or for its folder."""

    lane: int
    number: int


class Trouble(IntFlag):
    """Bits of the health word in a replica's durable lines; 0 is well."""

    DISK_FULL = 1
    DISK_FAILED = 2
    READ_ONLY = 4
    DAMAGED = 8  # a copy is incomplete or damaged, and being repaired


WHAT_TO_DO = {
    Trouble.DISK_FULL: "free some room; it goes on by itself",
    Trouble.DISK_FAILED: "look at the disk; `replica drain` moves its copies elsewhere",
    Trouble.READ_ONLY: "make the folder writable; it goes on by itself",
    Trouble.DAMAGED: "nothing, while other replicas have the records: it is repaired from them",
}
"""What an operator can do about each trouble."""


def health_in_words(word: int) -> list[str]:
    """Each trouble of a health word, with what to do about it."""
    return [f"{(bit.name or '').lower().replace('_', ' ')}: {WHAT_TO_DO[bit]}" for bit in Trouble if word & bit]
