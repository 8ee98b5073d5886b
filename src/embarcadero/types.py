"""The terms of the system as types, without logic.

- topic: a named log.
- lane: an append-only order index with one writer.
- index: the dense number of a batch in its lane.
- seq: the dense number of a record in its lane.
- session: the idempotent stream of one publisher into one topic.
- incarnation: one run of a broker.
- handle (of a region): the small number of a broker incarnation in entries.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag, StrEnum
from itertools import pairwise
from typing import Annotated, Final, NamedTuple

import msgspec

NO_SESSION = 0xFFFF_FFFF
"""The session handle for no session."""

NO_INDEX = 0xFFFF_FFFF_FFFF_FFFF
"""The index or seq for no position; 0 is a real position."""

NO_HANDLE = 0xFFFF
"""The region handle for no broker incarnation."""


def public_names(found: object, inner: Collection[str] = ()) -> list[str]:
    """Return what `dir` and tab completion show of an object: its public names, without those for other modules."""
    names = (name for name in object.__dir__(found) if name not in inner)
    return sorted(name for name in names if not name.startswith("_") or name.startswith("__"))


class Order(IntEnum):
    """The order of a topic, or of a session in it. `orders.py` has the names for users."""

    NONE = 0
    BROKER = 1
    TOTAL = 2
    STRONG = 5


class Ack(IntEnum):
    """When a publish is acknowledged."""

    NONE = 0
    ORDERED = 1
    DURABLE = 2


class OnGap(StrEnum):
    """The action when a gap of a strong session does not close in time."""

    FENCE = "fence"
    SKIP = "skip"


class EntryKind(IntEnum):
    """Kinds of entries. Kinds below 16 appear in the order index; the others only in pending rings."""

    BATCH = 1
    SESSION_OPEN = 2
    SESSION_FENCE = 3
    SESSION_CLOSE = 4
    SKIP = 5
    SESSION_ATTACH = 16
    SESSION_DETACH = 17


BATCH_KIND: Final = int(EntryKind.BATCH)
"""As a plain number: numpy compares with plain numbers several times faster than with enum members."""


class Outcome(IntEnum):
    """The outcome of a pending entry. Values below 16 mean that the batch (or request) is in the log."""

    ORDERED = 1
    DUP_OF = 2  # stored before, at the given index
    DUP = 3  # stored before, too long ago to know the index
    OPENED = 4
    CLOSED = 5
    NOTED = 6  # an attach or detach was noted
    STALE = 16  # below the session's window: the publisher settled it long ago
    LOST = 17  # its sequence was skipped; it will never appear
    CONFLICT = 18  # the same sequence was stored with other bytes
    FENCED = 19  # the session is fenced; `extra` is its next expected sequence
    UNKNOWN_SESSION = 20
    BACKPRESSURE = 21  # not stored: above the session's window, or a limit is reached; send again later
    UNKNOWN_TOPIC = 22
    TOO_MANY_SESSIONS = 23
    UNKNOWN_SCHEMA = 24  # the topic does not have this version of its schema
    NAME_HELD = 25  # by another session than the request names; `session` is the holder
    UNDECIDED = 26  # another copy waits, or its outcome is not known yet; send again later to get the outcome
    NO_REFERENCE = 27  # not stored: the staged batch of the reference does not exist; `extra` is a ReferenceFault

    @property
    def stored(self) -> bool:
        """True when the batch is in the log."""
        return self in (Outcome.ORDERED, Outcome.DUP_OF, Outcome.DUP)


class ReferenceFault(IntEnum):
    """Why a batch by reference was refused with NO_REFERENCE."""

    GONE = 1  # its position has no readable batch: it was trimmed, was lost, or never existed
    ANOTHER_TOPIC = 2  # the lane does not belong to that topic: the topic was deleted, or created again
    DIFFERS = 3  # the batch at its position has another size, count or checksum


REQUEST_OUTCOMES: Final = frozenset((Outcome.OPENED, Outcome.CLOSED, Outcome.NOTED, Outcome.NAME_HELD))
"""Outcomes of requests, never of batches."""


class GapKind(IntEnum):
    """Why a span of positions has no records."""

    SKIPPED = 1
    TRIMMED = 2
    LOST = 3
    END_OF_LANE = 4  # the lane is closed and ends here: no record is missing, and no more will follow
    NEVER_DURABLE = 5  # skipped by a restart: for a reader of durable records, no record ever existed there


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """The position of a batch or a record: its lane, the batch's index, the record's seq."""

    lane: int
    index: int
    seq: int


U63 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""A number that fits signed 64-bit columns and Java's long."""


class LanePosition(NamedTuple):
    """A position in a lane: the index of a batch, and the seq of its first record. It compares like a tuple."""

    index: U63  # type: ignore[assignment]  # hides tuple.index
    seq: U63


FIRST_POSITION: Final = LanePosition(0, 0)
"""The start of every lane."""


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
    """A reference to a batch in a topic of order 0 or 1, to publish it into another topic.

    `topic_id`, `lane` and `index` are its position; `size`, `count` and `crc` are facts of its payload. `schema` is the
    version of the target topic's schema with which the payload was encoded; 0: raw records.
    """

    topic_id: int
    lane: int
    index: int
    size: int
    count: int
    crc: int
    schema: int = 0


class Gap(NamedTuple):
    """A typed gap. SKIPPED: session sequences [start, stop) of `session`. TRIMMED, LOST, NEVER_DURABLE: indices.

    END_OF_LANE: `start` and `stop` are the index at which the lane ends.
    """

    kind: GapKind
    start: int
    stop: int
    session: int = NO_SESSION


Holes = Sequence[Span]
"""Spans of seqs that a restart skipped: no record is readable there, now or later."""


def count_outside(start: int, stop: int, holes: Holes) -> int:
    """Count the positions of [start, stop) outside all holes, which do not overlap."""
    return max(0, stop - start - sum(max(0, min(stop, to) - max(start, from_)) for from_, to in holes))


def united(spans: Iterable[Span]) -> list[Span]:
    """Merge spans: the same positions, as ordered spans that neither overlap nor touch."""
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1].stop:
            found[-1] = Span(found[-1].start, max(stop, found[-1].stop))
        else:
            found.append(Span(start, stop))
    return found


@dataclass(frozen=True, slots=True)
class Tail:
    """The ends of a lane, and the start of its readable part.

    - `index`, `seq`: the ordered end, which is the next position to be ordered.
    - `durable_index`, `durable_seq`: the durable end.
    - `start_index`, `start_seq`: the start of the readable part.
    - `hot_index`, `hot_seq`: the start of the part that brokers serve. Records below it are only in the topic's table.
    - `lanes`: in a topic of order 0 or 1, the tail of each lane; the other numbers are then sums over the lanes.
    - `holes`: spans of seqs above the start that restarts skipped. `records` counts without them.
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
        """Count the records with start <= seq < stop in one lane. Seqs in `holes` are not records."""
        return count_outside(start, stop, self.holes)


class Cut(msgspec.Struct, frozen=True, array_like=True):
    """The end of a piece of a lane: the index and seq after its last batch, and its approximate size."""

    index: int
    seq: int
    bytes: int


class ReaderProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The progress that a reader has reported: by lane, the next index and seq that it has not processed."""

    reader: str
    places: dict[int, LanePosition]
    ago_s: float = 0.0  # since the report
    lag: int | None = None  # records between the reported position and the end; None: not counted


class TopicLane(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A lane of a topic of order 0 or 1, as in the store: the batches that one broker incarnation received."""

    lane: int
    topic: int  # the lane number of its topic
    broker: int
    incarnation: int
    handle: int
    end: int | None = None  # the index of its end; None while it is open
    end_seq: int | None = None
    removed: bool = False  # closed, and its memory was freed: it has no readable record
    kept: int | None = None  # the fabric was lost, and [kept, end) with it

    @property
    def open(self) -> bool:
        """Whether its broker may still append to it."""
        return self.end is None

    @property
    def region(self) -> str:
        """The name of its order ring in the fabric."""
        return f"broker-{self.broker}.{self.incarnation}/order-{self.lane}"


MURMUR2 = "murmur2"
CRC32C = "crc32c"
PARTITIONERS = (MURMUR2, CRC32C)
"""How keys choose partitions: see `wire/partitioners.py`."""


def id_text(topic_id: int) -> str:
    """Print a topic's id as 16 hexadecimal digits: JavaScript would round a number."""
    return f"{topic_id:016x}"


HIDDEN_PREFIX: Final = "__"
"""The prefix of topics that the cluster creates for its own use. By default, lists do not include them."""

STAGING_PREFIX: Final = HIDDEN_PREFIX + "staged."
"""The topic with this prefix and the id of another topic (16 hexadecimal digits) has batches staged for that topic."""
ROUTED_TOPIC: Final = HIDDEN_PREFIX + "routed"
"""The topic with the decisions on writes into several topics."""


JOBS_PREFIX: Final = HIDDEN_PREFIX + "jobs."
"""A topic with this prefix and the id of another topic has the facts of jobs that write into that topic."""


def staging_topic(topic_id: int) -> str:
    """Return the name of the topic with the batches that are staged for the topic with this id."""
    return STAGING_PREFIX + id_text(topic_id)


def jobs_topic(topic_id: int) -> str:
    """Return the name of the topic with the facts of jobs that write into the topic with this id."""
    return JOBS_PREFIX + id_text(topic_id)


class Topic(msgspec.Struct, frozen=True, kw_only=True):
    """A topic, as in the store. Answers fill in `lanes` for orders 0 and 1: one per broker incarnation."""

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
    retention_bytes: int = 0  # whole sealed segments are removed above this size; 0: no limit
    retention_s: int = 0  # and after this time; 0: no limit
    id: int = 0  # random, 63 bits: differs between topics with the same name; 0: not assigned yet
    had_no_id: bool = False  # an upgrade assigned the id: session checkpoints on disk without an id may belong to it
    partitioner: str = CRC32C  # how keys choose partitions; stored topics without this field are older than the choice
    key: str = ""  # the column whose values choose partitions; "": none, or raw records, which have their own keys
    first_partitions: int = 0  # its number of partitions when it was created; 0: the current number, or not known
    created_us: int = 0  # time of creation, by the clock of the creating broker; 0: not known
    lanes: list[TopicLane] = []

    @property
    def checkpoint_ids(self) -> tuple[int, ...]:
        """The ids that session checkpoints of this topic on disk may have."""
        return (self.id, 0) if self.had_no_id or not self.id else (self.id,)

    @property
    def hidden(self) -> bool:
        """Whether the cluster created it for its own use."""
        return self.name.startswith(HIDDEN_PREFIX)


FROM_TABLE: Final = 0x80
"""A flag of a batch's entry that a broker sends: the payload was encoded again from the columns of the topic's table.

`size` and `crc` belong to the sent payload; `location` is the CRC32C of the published payload.
"""


class Hole(msgspec.Struct, frozen=True, array_like=True):
    """Positions of a lane that a loss of memory skipped: indices [start, stop), seqs [start_seq, stop_seq).

    `never_durable`: no record there was ever durable.
    """

    start: int
    stop: int
    start_seq: int
    stop_seq: int
    never_durable: bool = False


class Tier(msgspec.Struct, frozen=True, kw_only=True):
    """The table of a topic, as in the store. Positions are (index, seq) by lane.

    The table has all records of a lane below its frontier. Records below its start are removed for all readers.
    `metadata` is the file that describes the table as of these frontiers. Each writer of the table has its own epoch.
    """

    id: str  # random, a property of the table: differs between tables with the same name
    warehouse: str
    table: str  # its identifier in the catalog
    metadata: str = ""
    frontiers: dict[int, LanePosition] = {}
    starts: dict[int, LanePosition] = {}
    hot_retention_s: int = 0  # how long brokers keep records that are in the table
    epoch: int = 0
    holder: str = ""
    lease: int = 0
    advanced_us: int = 0  # time of the last announced frontier, by the clock of the broker that received it
    topic_id: int = 0  # the id of its topic; 0: the topic had no id when the table was created
    properties: dict[str, str] = {}  # how to reach the store, without secrets: endpoint, region, addressing
    engine: str = ""  # the writer of the files: "spark" or "process"; "auto" before it is known
    holes: dict[int, list[Hole]] = {}  # below the frontiers, oldest first: they outlive the ranges around them

    def frontier(self, lane: int) -> LanePosition:
        """Return the position below which the table has all records of a lane."""
        return LanePosition(*self.frontiers.get(lane, FIRST_POSITION))

    def start(self, lane: int) -> LanePosition:
        """Return the start of a lane's part in the table. It is the frontier if the table has no record of the lane."""
        return min(LanePosition(*self.starts.get(lane, FIRST_POSITION)), self.frontier(lane))

    def gap(self, lane: int, start: int, stop: int, durable: bool) -> Gap:
        """Return a gap for positions that the table lacks: LOST, or for readers of durable records NEVER_DURABLE.

        It is NEVER_DURABLE only if no record there was ever durable.
        """
        at = start
        for hole in self.holes.get(lane, ()) if durable else ():
            if hole.never_durable and hole.start <= at:
                at = max(at, hole.stop)
        return Gap(GapKind.NEVER_DURABLE if at >= stop else GapKind.LOST, start, stop)

    @property
    def store(self) -> str:
        """The store of the table's files, for messages: its endpoint, if known, and the warehouse."""
        endpoint = next((value for key, value in self.properties.items() if key.endswith(".endpoint")), "")
        return f"{endpoint}, warehouse {self.warehouse}" if endpoint else f"warehouse {self.warehouse}"


class MemberState(StrEnum):
    """The state of a broker incarnation."""

    LIVE = "live"
    DEAD = "dead"  # replaced or ended; its regions still have data
    REMOVED = "removed"  # its regions may be unlinked


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """An incarnation of a broker, as in the store."""

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
    """The state of a replica incarnation."""

    LIVE = "live"
    DRAINING = "draining"  # gets no new ranges; its ranges move to other replicas
    DEAD = "dead"  # replaced or ended


class ReplicaRef(msgspec.Struct, frozen=True, kw_only=True):
    """A replica incarnation, as in a range. `disk` distinguishes a wiped disk from the original one."""

    replica: int
    incarnation: int
    disk: str

    @property
    def region_prefix(self) -> str:
        """The folder of its regions in the fabric."""
        return f"replica-{self.replica}.{self.incarnation}"


class ReplicaMember(msgspec.Struct, frozen=True, kw_only=True):
    """An incarnation of a replica, as in the store."""

    replica: int
    incarnation: int
    disk: str  # random, created with the replica's folder
    folder: str  # absolute path of its folder
    host: str
    pid: int
    state: ReplicaState = ReplicaState.LIVE

    @property
    def ref(self) -> ReplicaRef:
        """Its reference in ranges."""
        return ReplicaRef(replica=self.replica, incarnation=self.incarnation, disk=self.disk)


class Range(msgspec.Struct, frozen=True, kw_only=True):
    """A contiguous span of a lane with one set of replicas. Only the last range of a lane is open.

    A sealed range never changes. `number` counts from 1 in the lane.

    Positions between the end of a range and the start of the next one are lost. With `never_durable`, no record there
    was ever durable. Otherwise (ranges of earlier versions, and losses that an operator accepted) a record may have
    been durable.

    A range that is completely trimmed is removed. It stays, empty and without replicas, as long as readers must get the
    gap of lost positions after it.
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
    """Return the spans of indices between the ranges of a lane, oldest first. They are lost with the memory."""
    return [Span(old.end, new.start) for old, new in pairwise(ranges) if old.end is not None and old.end < new.start]


class RangeKey(NamedTuple):
    """A range of a lane. The number 0 means the lane itself, or its folder."""

    lane: int
    number: int


class Trouble(IntFlag):
    """Bits of the health word in a replica's durable lines; 0 means healthy."""

    DISK_FULL = 1
    DISK_FAILED = 2
    READ_ONLY = 4
    DAMAGED = 8  # a copy is incomplete or damaged, and is being repaired


WHAT_TO_DO = {
    Trouble.DISK_FULL: "free some space; the replica then continues by itself",
    Trouble.DISK_FAILED: "check the disk; `replica drain` moves its copies to other replicas",
    Trouble.READ_ONLY: "make the folder writable; the replica then continues by itself",
    Trouble.DAMAGED: "no action is needed while other replicas have the records: they repair it",
}
"""The action of an operator for each trouble."""


def health_in_words(word: int) -> list[str]:
    """Describe each trouble of a health word, with the action for it."""
    return [f"{(bit.name or '').lower().replace('_', ' ')}: {WHAT_TO_DO[bit]}" for bit in Trouble if word & bit]
