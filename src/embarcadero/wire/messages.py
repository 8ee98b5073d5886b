"""Control messages: one msgpack struct each, tagged by its class name. Answers carry their question's frame number.

question                answer                 who asks
Hello                   Welcome                client, first of all
OpenSession             Opened, or NameHeld    publisher
CloseSession            Done                   publisher
CreateTopic             TopicIs                anyone
AlterTopic              TopicIs                anyone
DescribeTopic           TopicIs                anyone
ListTopics              TopicsAre              anyone
DeleteTopic             Done                   anyone
Fetch                   a FETCHED frame        subscriber
GetTail                 TailIs                 anyone
Find                    PlaceIs                anyone
Trim                    PlaceIs                anyone
OpenTier                TierIs                 a job that writes a topic's table
AdvanceTier             TierIs                 the same
KeepTier                Done                   the same
CloseTier               Done                   the same
Measure                 PiecesAre              who wants to share a span among several readers
NoteProgress            Done                   a reader that wants others to see how far it is
GetReaders              ReadersAre             anyone
RemoveReader            Done                   anyone
GetLanes                LanesAre               subscriber of a topic of order 0 or 1; waits for new lanes
GetStatus               StatusIs               anyone
Ping                    Pong                   either side
any                     Failed                 when it can't be done
-                       MembersAre             pushed by a broker when brokers come and go
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from embarcadero.limits import FRAME_BYTES_MAX, RECORD_BYTES_MAX, RECORDS_PER_BATCH_MAX, SESSION_SEQUENCE_MAX
from embarcadero.types import NO_HANDLE, U63, Cut, LanePosition, Range, ReaderProgress, Span, Tier, Topic, TopicLane

U16 = Annotated[int, msgspec.Meta(ge=0, le=0xFFFF)]
U32 = Annotated[int, msgspec.Meta(ge=0, le=0xFFFF_FFFF)]
SessionSequence = Annotated[int, msgspec.Meta(ge=0, le=SESSION_SEQUENCE_MAX)]
"""Numbers from outside are in range once decoded."""

# `topic_id` of a request names the topic that the client means. A broker refuses it with TopicReplaced once that topic
# is deleted, even if another one has its name by then. 0, as old clients send it: any topic of that name.


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of all control messages."""


class BrokerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a live broker listens."""

    broker: int
    incarnation: int
    host: str
    port: int
    handle: int = NO_HANDLE  # by which order entries name this incarnation


class Hello(Message, frozen=True, kw_only=True):
    """First message of a client."""

    versions: list[int]
    client: str = ""


class Welcome(Message, frozen=True, kw_only=True):
    """The broker's answer: who it is, and who else there is."""

    version: int
    cluster: str
    broker: int
    incarnation: int
    brokers: list[BrokerAddress]
    frame_bytes_max: int = FRAME_BYTES_MAX  # the largest payload of a batch that this cluster takes
    record_bytes_max: int = RECORD_BYTES_MAX  # and the largest record
    records_max: int = RECORDS_PER_BATCH_MAX  # and the most records in a batch
    generation: int = 0  # grows when the cluster starts anew, with an empty fabric; 0: not told
    tables: bool = False  # this broker reads tables of topics for its clients (Fetch.table)
    references: bool = False  # this broker takes batches by reference


class MembersAre(Message, frozen=True, kw_only=True):
    """All live brokers, pushed on change."""

    brokers: list[BrokerAddress]


class OpenSession(Message, frozen=True, kw_only=True):
    """Open a session: new, under a name (fencing that name's earlier holder), or continuing a fenced one.

    `at`: its next sequence becomes this one, unless it is further on already.
    `holder`: open the name only if this session holds it (NO_SESSION: only if none does). So a request that comes late,
    through another broker, takes the name from nobody: not even from its own sender, who has asked again and has it.
    `lane`: only if the topic still has this lane. One that was deleted and made again has sessions of its own, and so
    has one without replicas after a loss of memory.
    `order`: the order of a new session, 2 (weak) or 5 (strong); None: as the topic. A session that continues another
    keeps that one's order.
    """

    topic: str
    name: str = ""
    resume: U32 | None = None
    at: SessionSequence | None = None
    holder: U32 | None = None
    lane: U32 | None = None
    topic_id: U63 = 0
    order: int | None = None


class Opened(Message, frozen=True, kw_only=True):
    """The session is open. `expected`: the next sequence (0 if new); `low`: the lowest that may be sent again.

    `reached`: what was expected before, when `at` was asked for. `order`: the session's (0: not told, as the topic's).

    Batches [lost_from, lost_to) of the lane are its newest LOST gap (both 0: it has none); `lost_before`: earlier ones.
    """

    lane: U32
    session: U32
    index: U63
    expected: U63
    low: U63
    lost_from: U63 = 0
    lost_to: U63 = 0
    lost_before: list[Span] = []
    reached: U63 = 0
    order: int = 0


class NameHeld(Message, frozen=True, kw_only=True):
    """The name was not opened: another session than the one named holds it. To take it, ask again and name this one.

    `expected`: the next sequence of the session that holds it; None: a broker of an earlier version does not say.
    """

    session: U32
    expected: U63 | None = None


class CloseSession(Message, frozen=True, kw_only=True):
    """The publisher is done; nothing of it is in flight."""

    lane: U32
    session: U32


class CreateTopic(Message, frozen=True, kw_only=True):
    """Create a topic; lane and defaults (None) are the cluster's."""

    name: str
    order: int | None = None
    partitions: int | None = None
    replicas: int | None = None
    durable_on: int | None = None
    on_gap: str | None = None
    gap_timeout_ms: int | None = None
    session_ttl_s: int | None = None
    retention_bytes: int | None = None
    retention_s: int | None = None
    columns: bytes = b""  # its schema as an Arrow message; empty: raw records
    partitioner: str | None = None  # None: "crc32c", which a client that does not know of partitioners uses
    key: str = ""  # the column whose values choose partitions


class AlterTopic(Message, frozen=True, kw_only=True):
    """Change what is given of a topic; what can't change is refused, with the reason."""

    name: str
    order: int | None = None
    partitions: int | None = None
    replicas: int | None = None
    durable_on: int | None = None
    on_gap: str | None = None
    gap_timeout_ms: int | None = None
    session_ttl_s: int | None = None
    retention_bytes: int | None = None
    retention_s: int | None = None
    columns: bytes = b""  # its next schema
    topic_id: U63 = 0


class DescribeTopic(Message, frozen=True, kw_only=True):
    """Ask for one topic."""

    name: str


class TopicIs(Message, frozen=True, kw_only=True):
    """One topic. `columns`: its newest schema; `widths`: how many of these columns each version has, from 1 on.

    `ranges`: where it is on disks, oldest first by lane; of very many, the newest. `age_us`: how long ago the topic was
    created; None: not known.
    """

    topic: Topic
    columns: bytes = b""
    widths: list[int] = []
    ranges: list[Range] = []
    tier: Tier | None = None  # its table, if it has one
    age_us: U63 | None = None


class ListTopics(Message, frozen=True, kw_only=True):
    """Ask for all topics."""


class TopicsAre(Message, frozen=True, kw_only=True):
    """All topics."""

    topics: list[Topic]


class DeleteTopic(Message, frozen=True, kw_only=True):
    """Delete a topic with all its records."""

    name: str
    topic_id: U63 = 0


class Fetch(Message, frozen=True, kw_only=True):
    """Read from a lane. `start` is an index, a seq, a time (microseconds since 1970), or ignored for the others."""

    lane: U32
    by: str = "index"  # index | seq | time | earliest | latest
    start: U63 = 0
    max_bytes: U63
    wait_ms: U63 = 0
    partitions: list[U16] | None = None
    read: str = "durable"  # durable | ordered: the frontier that nothing is served above
    control: bool = False  # entries that open, fence and close sessions come too
    stop: U63 | None = None  # the index at which the reader stops: nothing at or above is sent, or waited for
    table: bool = False  # records that only the topic's table still has are read there, too
    never_durable: bool = False  # the client knows gaps of this kind; else they are LOST to it


class GetTail(Message, frozen=True, kw_only=True):
    """Ask for the linearizable end of a lane."""

    lane: U32


class TailIs(Message, frozen=True, kw_only=True):
    """The end of a lane, its earliest readable index and seq, and how far it is durable.

    `hot_index`, `hot_seq`: where the part begins that brokers serve, if it is not at the start (None). `holes`: seqs
    [from, to) above the start that restarts passed over, the newest ones.
    """

    lane: int
    index: int
    seq: int
    start_index: int
    start_seq: int
    durable_index: int = 0
    durable_seq: int = 0
    hot_index: int | None = None
    hot_seq: int | None = None
    holes: list[Span] = []


class Find(Message, frozen=True, kw_only=True):
    """Ask where a position in a lane is: by index, seq or time as in Fetch. `table`: in the topic's table alone."""

    lane: U32
    by: str
    start: U63
    table: bool = False


class Trim(Message, frozen=True, kw_only=True):
    """Move the start of a lane up to a position, given as in Find. Going back changes nothing.

    `seq`: with an index below what brokers have: the seq that belongs to it. Without `cold` only the part that brokers
    have gets another start, at most where the topic's table ends.
    """

    lane: U32
    by: str
    before: U63
    seq: U63 | None = None
    cold: bool = True
    topic_id: U63 = 0


class PlaceIs(Message, frozen=True, kw_only=True):
    """A position in a lane: the batch found, or the first one that is readable after a trim.

    `table`: the broker looked in the topic's table; `missing`: the table does not have it.
    """

    lane: int
    index: int
    seq: int
    table: bool = False
    missing: bool = False


class Measure(Message, frozen=True, kw_only=True):
    """Ask for the batches [start, stop) of a lane in pieces of about so many bytes, each of whole batches.

    `table`: only the part that the topic's table has, in pieces of whole files.
    """

    lane: U32
    start: U63
    stop: U63
    piece_bytes: U63
    pieces_max: U63
    table: bool = False


class PiecesAre(Message, frozen=True, kw_only=True):
    """The pieces, in order; the first `pieces_max` of them if there are more: the last one then ends before `stop`.

    `table`: they are files of the topic's table, as it was asked for; the last one may end behind `stop`.
    """

    lane: int
    cuts: list[Cut]
    table: bool = False


class NoteProgress(Message, frozen=True, kw_only=True):
    """A reader tells how far it is: by lane, the index and seq behind all that it has dealt with."""

    topic: str
    reader: str
    places: dict[U32, LanePosition]
    topic_id: U63 = 0


class GetReaders(Message, frozen=True, kw_only=True):
    """Ask which readers of a topic told how far they are."""

    topic: str


class ReadersAre(Message, frozen=True, kw_only=True):
    """The readers of a topic, those heard of last first; of very many, the newest."""

    topic: str
    readers: list[ReaderProgress]


class RemoveReader(Message, frozen=True, kw_only=True):
    """Forget what a reader of a topic told. One that is alive comes back with what it tells next."""

    topic: str
    reader: str
    topic_id: U63 = 0


class OpenTier(Message, frozen=True, kw_only=True):
    """Begin an epoch of writing a topic's table. `id`, `warehouse` and `table` count if it has none yet.

    `properties` say how clients reach the store: endpoint, region, addressing. Secrets are not among them.
    """

    topic: str
    holder: str
    id: str
    warehouse: str
    table: str
    hot_retention_s: U63 | None = None  # None: as it is
    take_over: bool = False
    topic_id: U63 = 0
    properties: dict[str, str] = {}
    engine: str = ""  # what writes the files, for `status`


class AdvanceTier(Message, frozen=True, kw_only=True):
    """All below these positions of lanes is in the table, as `metadata` describes it."""

    topic: str
    epoch: U63
    metadata: str
    frontiers: dict[U32, LanePosition]
    starts: dict[U32, LanePosition] = {}  # of lanes that are new to the table
    topic_id: U63 = 0
    engine: str = ""  # what wrote the files, for `status`


class KeepTier(Message, frozen=True, kw_only=True):
    """The holder of an epoch is there."""

    topic: str
    epoch: U63
    topic_id: U63 = 0


class CloseTier(Message, frozen=True, kw_only=True):
    """The holder of an epoch leaves."""

    topic: str
    epoch: U63
    topic_id: U63 = 0


class TierIs(Message, frozen=True, kw_only=True):
    """The table of a topic."""

    tier: Tier


class GetLanes(Message, frozen=True, kw_only=True):
    """Ask for the lanes of a topic (given by its lane number) with a number above `above`; wait for one to come."""

    lane: U32
    above: U32 = 0
    wait_ms: U63 = 0


class LanesAre(Message, frozen=True, kw_only=True):
    """The lanes asked for. `unsure` (not told to who waits): of these it is not known yet how much disks have."""

    lane: int
    lanes: list[TopicLane]
    unsure: list[int] = []


class GetStatus(Message, frozen=True, kw_only=True):
    """Ask a broker about itself."""


class StatusIs(Message, frozen=True, kw_only=True):
    """What a broker says about itself."""

    facts: dict[str, Any]


class Ping(Message, frozen=True, kw_only=True):
    """Are you there?"""


class Pong(Message, frozen=True, kw_only=True):
    """Yes."""


class Done(Message, frozen=True, kw_only=True):
    """It is done."""


class Failed(Message, frozen=True, kw_only=True):
    """It was not done. `code` is the name of an error class of the error tree."""

    code: str
    message: str
    hint: str = ""


AnyMessage = (
    Hello | Welcome | MembersAre | OpenSession | Opened | NameHeld | CloseSession | CreateTopic | AlterTopic
    | DescribeTopic | OpenTier | AdvanceTier | KeepTier | CloseTier | TierIs
    | TopicIs | ListTopics | TopicsAre | DeleteTopic | Fetch | GetTail | TailIs | Find | Trim | PlaceIs | Measure
    | PiecesAre | NoteProgress | GetReaders | ReadersAre | RemoveReader | GetLanes | LanesAre | GetStatus | StatusIs
    | Ping | Pong | Done | Failed
)  # fmt: skip
