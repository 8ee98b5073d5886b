"""Control messages: one msgpack struct each, tagged by its class name. An answer has the frame number of its request.

request                 answer                 sender of the request
Hello                   Welcome                client, as its first message
OpenSession             Opened, or NameHeld    publisher
CloseSession            Done                   publisher
CreateTopic             TopicIs                any client
AlterTopic              TopicIs                any client
DescribeTopic           TopicIs                any client
ListTopics              TopicsAre              any client
DeleteTopic             Done                   any client
Fetch                   a FETCHED frame        subscriber
GetTail                 TailIs                 any client
Find                    PlaceIs                any client
Trim                    PlaceIs                any client
OpenTier                TierIs                 a job that writes a topic's table
AdvanceTier             TierIs                 the same
KeepTier                Done                   the same
CloseTier               Done                   the same
Measure                 PiecesAre              a client that divides a span among several readers
NoteProgress            Done                   a reader that publishes its progress
GetReaders              ReadersAre             any client
RemoveReader            Done                   any client
GetLanes                LanesAre               subscriber of a topic of order 0 or 1; waits for new lanes
GetStatus               StatusIs               any client
Ping                    Pong                   client or broker
any                     Failed                 the answer if the request fails
-                       MembersAre             a broker sends it when the set of live brokers changes
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from embarcadero.limits import FRAME_BYTES_MAX, RECORD_BYTES_MAX, RECORDS_PER_BATCH_MAX, SESSION_SEQUENCE_MAX
from embarcadero.types import NO_HANDLE, U63, Cut, LanePosition, Range, ReaderProgress, Span, Tier, Topic, TopicLane

U16 = Annotated[int, msgspec.Meta(ge=0, le=0xFFFF)]
U32 = Annotated[int, msgspec.Meta(ge=0, le=0xFFFF_FFFF)]
SessionSequence = Annotated[int, msgspec.Meta(ge=0, le=SESSION_SEQUENCE_MAX)]
"""Numbers from peers. Decoding checks their range."""

# `topic_id` of a request identifies the topic. A broker refuses the request with TopicReplaced once that topic is
# deleted, even if another topic has its name. 0, which old clients send: any topic with the name.


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base class of all control messages."""


class BrokerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The address of a live broker."""

    broker: int
    incarnation: int
    host: str
    port: int
    handle: int = NO_HANDLE  # of this incarnation, in order entries


class Hello(Message, frozen=True, kw_only=True):
    """The first message of a client."""

    versions: list[int]
    client: str = ""


class Welcome(Message, frozen=True, kw_only=True):
    """The broker's answer to Hello: its identity, and all live brokers."""

    version: int
    cluster: str
    broker: int
    incarnation: int
    brokers: list[BrokerAddress]
    frame_bytes_max: int = FRAME_BYTES_MAX  # the largest payload of a batch that this cluster accepts
    record_bytes_max: int = RECORD_BYTES_MAX  # the largest record
    records_max: int = RECORDS_PER_BATCH_MAX  # the largest number of records in a batch
    generation: int = 0  # grows when the cluster starts with an empty fabric; 0: not known
    tables: bool = False  # this broker reads tables of topics for its clients (Fetch.table)
    references: bool = False  # this broker accepts batches by reference


class MembersAre(Message, frozen=True, kw_only=True):
    """All live brokers. A broker sends it when they change."""

    brokers: list[BrokerAddress]


class OpenSession(Message, frozen=True, kw_only=True):
    """Open a session: a new one, one with a name (which fences the name's earlier holder), or continue a fenced one.

    `at`: its next sequence becomes this one, unless it is higher already.
    `holder`: open the name only if this session holds it (NO_SESSION: only if no session does). A delayed duplicate
    through another broker therefore cannot take the name, not even from its own sender, which has asked again.
    `lane`: only if the topic still has this lane. A topic that was deleted and created again has other sessions, and so
    has a topic without replicas after a loss of memory.
    `order`: the order of a new session, 2 (weak) or 5 (strong); None: as the topic. A continued session keeps its
    order.
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

    `reached`: with `at`, the next sequence before the request. `order`: of the session (0: not known, as the topic).

    Batches [lost_from, lost_to) of the lane are its newest LOST gap (both 0: none); `lost_before` has earlier gaps.
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
    """The name was not opened, because another session than `holder` has it. To take it, ask again with this holder.

    `expected`: the next sequence of the session that has the name; None from brokers of an earlier version.
    """

    session: U32
    expected: U63 | None = None


class CloseSession(Message, frozen=True, kw_only=True):
    """Close a session. No batch of it is in flight."""

    lane: U32
    session: U32


class CreateTopic(Message, frozen=True, kw_only=True):
    """Create a topic. The cluster chooses the lane and the defaults (None)."""

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
    partitioner: str | None = None  # None: "crc32c", the partitioner of clients without this field
    key: str = ""  # the column whose values choose partitions


class AlterTopic(Message, frozen=True, kw_only=True):
    """Change the given options of a topic. A change that is not possible is refused with the reason."""

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
    """Look up a topic."""

    name: str


class TopicIs(Message, frozen=True, kw_only=True):
    """A topic. `columns`: its newest schema; `widths`: the number of these columns in each version, from 1 on.

    `ranges`: its ranges on disks, oldest first by lane; of very many, the newest. `age_us`: the time since the topic
    was created; None: not known.
    """

    topic: Topic
    columns: bytes = b""
    widths: list[int] = []
    ranges: list[Range] = []
    tier: Tier | None = None  # its table, if it has one
    age_us: U63 | None = None


class ListTopics(Message, frozen=True, kw_only=True):
    """List all topics."""


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
    read: str = "durable"  # durable | ordered: the end up to which records are served
    control: bool = False  # include entries that open, fence and close sessions
    stop: U63 | None = None  # the index at which the reader stops: the broker does not send or wait for later ones
    table: bool = False  # also read records that only the topic's table has
    never_durable: bool = False  # the client knows this kind of gap; otherwise it gets LOST


class GetTail(Message, frozen=True, kw_only=True):
    """Get the linearizable end of a lane."""

    lane: U32


class TailIs(Message, frozen=True, kw_only=True):
    """The ordered end of a lane, its earliest readable index and seq, and its durable end.

    `hot_index`, `hot_seq`: the start of the part that brokers serve, if it differs from the start (None: it does not).
    `holes`: seqs [from, to) above the start that restarts skipped, the newest ones.
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
    """Find a position in a lane, by index, seq or time as in Fetch. `table`: only in the topic's table."""

    lane: U32
    by: str
    start: U63
    table: bool = False


class Trim(Message, frozen=True, kw_only=True):
    """Move the start of a lane up to a position, given as in Find. A position below the start changes nothing.

    `seq`: the seq of the index, if brokers no longer have that index. Without `cold`, only the part at the brokers gets
    another start, at most the end of the topic's table.
    """

    lane: U32
    by: str
    before: U63
    seq: U63 | None = None
    cold: bool = True
    topic_id: U63 = 0


class PlaceIs(Message, frozen=True, kw_only=True):
    """A position in a lane: the batch that was found, or the first readable batch after a trim.

    `table`: the broker searched the topic's table; `missing`: the table does not have the position.
    """

    lane: int
    index: int
    seq: int
    table: bool = False
    missing: bool = False


class Measure(Message, frozen=True, kw_only=True):
    """Divide the batches [start, stop) of a lane into pieces of about `piece_bytes`, each of whole batches.

    `table`: only the part in the topic's table, in pieces of whole files.
    """

    lane: U32
    start: U63
    stop: U63
    piece_bytes: U63
    pieces_max: U63
    table: bool = False


class PiecesAre(Message, frozen=True, kw_only=True):
    """The pieces, in order. If there are more than `pieces_max`, only the first ones: the last then ends before `stop`.

    `table`: they are files of the topic's table, as requested; the last one may end after `stop`.
    """

    lane: int
    cuts: list[Cut]
    table: bool = False


class NoteProgress(Message, frozen=True, kw_only=True):
    """Publish the progress of a reader: by lane, the index and seq after the last record that it has processed."""

    topic: str
    reader: str
    places: dict[U32, LanePosition]
    topic_id: U63 = 0


class GetReaders(Message, frozen=True, kw_only=True):
    """List the readers of a topic that have published their progress."""

    topic: str


class ReadersAre(Message, frozen=True, kw_only=True):
    """The readers of a topic, the newest report first; of very many, only the newest."""

    topic: str
    readers: list[ReaderProgress]


class RemoveReader(Message, frozen=True, kw_only=True):
    """Remove a reader from the list of a topic. An active reader appears again with its next report."""

    topic: str
    reader: str
    topic_id: U63 = 0


class OpenTier(Message, frozen=True, kw_only=True):
    """Begin an epoch of writing a topic's table. `id`, `warehouse` and `table` are used if it has no table yet.

    `properties` are how clients reach the store: endpoint, region, addressing. They have no secrets.
    """

    topic: str
    holder: str
    id: str
    warehouse: str
    table: str
    hot_retention_s: U63 | None = None  # None: unchanged
    take_over: bool = False
    topic_id: U63 = 0
    properties: dict[str, str] = {}
    engine: str = ""  # the writer of the files, for `status`


class AdvanceTier(Message, frozen=True, kw_only=True):
    """Announce that the table has every record below these positions, as `metadata` describes it."""

    topic: str
    epoch: U63
    metadata: str
    frontiers: dict[U32, LanePosition]
    starts: dict[U32, LanePosition] = {}  # of lanes that are new to the table
    topic_id: U63 = 0
    engine: str = ""  # the writer of the files, for `status`


class KeepTier(Message, frozen=True, kw_only=True):
    """Renew the lease of an epoch."""

    topic: str
    epoch: U63
    topic_id: U63 = 0


class CloseTier(Message, frozen=True, kw_only=True):
    """End an epoch."""

    topic: str
    epoch: U63
    topic_id: U63 = 0


class TierIs(Message, frozen=True, kw_only=True):
    """The table of a topic."""

    tier: Tier


class GetLanes(Message, frozen=True, kw_only=True):
    """List the lanes of a topic (given by its lane number) above the number `above`. Wait until there is one."""

    lane: U32
    above: U32 = 0
    wait_ms: U63 = 0


class LanesAre(Message, frozen=True, kw_only=True):
    """The requested lanes. `unsure`: lanes whose durable end is not known yet; an answer after a wait has none."""

    lane: int
    lanes: list[TopicLane]
    unsure: list[int] = []


class GetStatus(Message, frozen=True, kw_only=True):
    """Get the status of a broker."""


class StatusIs(Message, frozen=True, kw_only=True):
    """The status of a broker."""

    facts: dict[str, Any]


class Ping(Message, frozen=True, kw_only=True):
    """Check that the peer is alive."""


class Pong(Message, frozen=True, kw_only=True):
    """The answer to Ping."""


class Done(Message, frozen=True, kw_only=True):
    """The request was carried out."""


class Failed(Message, frozen=True, kw_only=True):
    """The request was not carried out. `code` is the name of a class in the error tree."""

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
