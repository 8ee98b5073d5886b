"""Every key of the configuration, once: name, type, default, range, meaning. All else is derived from this table.

Defaults and hard bounds are those of limits.py. Times and sizes have their unit in their name; values may be written
in another one (`linger_ms: 1s`). The keys are followed by values that must fit together, and by what became of the
names of the first designs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Final, NamedTuple, get_type_hints

import msgspec

from embarcadero import limits
from embarcadero.config.key import (
    Key,
    Rule,
    choice,
    count,
    flag,
    milliseconds,
    path,
    seconds,
    several,
    share,
    size,
    text,
)
from embarcadero.errors import BadValue
from embarcadero.limits import GIB, KIB, MIB, REPLICAS_MAX
from embarcadero.orders import ORDER_NAMES


class Relation(NamedTuple):
    """What must hold between keys of one section or of several; `given` has one value for each key."""

    keys: tuple[str, ...]
    holds: Callable[..., bool]
    says: str


FABRIC_RELATIONS: Final = (
    Relation(
        ("fabric.log_bytes", "fabric.chunk_bytes"),
        lambda log_bytes, chunk_bytes: 2 <= log_bytes // max(1, chunk_bytes) <= limits.CHUNKS_MAX,
        f"log_bytes must make 2 to {limits.CHUNKS_MAX} chunks",
    ),
    Relation(
        ("fabric.order_slots", "fabric.round_entries"),
        lambda order_slots, round_entries: 4 * round_entries <= order_slots,
        "order_slots must be at least 4 * round_entries",
    ),
)


def usual_chunk_bytes(log_bytes: int) -> int:
    """Chunks small enough that some of a log can be free while others fill."""
    return min(limits.CHUNK_BYTES, max(1, log_bytes // 4))


# fmt: off

_DAY_S: Final = 86_400


class ClusterKeys(msgspec.Struct, frozen=True, kw_only=True):
    """The processes that `up` runs on this machine."""

    data_dir: Annotated[str, path(
        "The cluster's folder: its store and its logs.",
        variable="EMBARCADERO_DATA_DIR", default_text="~/.local/state/embarcadero/default",
    )] = ""
    fabric_dir: Annotated[str, path(
        "Folder for the fabric: on tmpfs, or on a DAX mount. hugetlbfs can't hold it.",
        default_text="/dev/shm if it has room, else data_dir", stands_for=("cxl.primary_device",),
    )] = ""
    brokers: Annotated[int, count(
        "How many brokers.", 1, limits.BROKERS_MAX, stands_for=("cluster.brokers",),
    )] = limits.BROKERS_DEFAULT
    replicas: Annotated[int, count(
        "How many replicas keep topics on disk; those that have a folder in data_dir are started too.",
        0, limits.REPLICAS_MAX, stands_for=("cluster.replicas",),
    )] = limits.REPLICAS_DEFAULT
    standbys: Annotated[int, count(
        "How many sequencers stand by to take over at once; none with one_process.", 0, limits.CANDIDATES_MAX - 1,
    )] = limits.STANDBYS_DEFAULT
    one_process: Annotated[bool, flag("All roles in a single process, instead of one process per role.")] = False
    hugepages: Annotated[bool, flag(
        "Advise huge pages for the fabric. Linux follows it if /sys/kernel/mm/transparent_hugepage/shmem_enabled says "
        "`advise`, or in a tmpfs that is mounted with `huge=advise`.",
    )] = False
    pin: Annotated[str, text(
        "Cores for the sequencer and the brokers, in turn, such as `0,1`; replicas begin with the last one.",
        default_text="any core",
    )] = ""


class BrokerKeys(msgspec.Struct, frozen=True, kw_only=True):
    """What each broker does."""

    host: Annotated[str, text(
        "Address to listen on. The default is reachable from this machine only.",
    )] = limits.HOST_DEFAULT
    port: Annotated[int, count(
        "Port of broker 0; the others follow. 0 takes free ports.", 0, 65_535, stands_for=("network.broker_port",),
    )] = limits.PORT_DEFAULT
    advertised_host: Annotated[str, text(
        "Address that clients are told, if it is another one.", default_text="broker.host",
    )] = ""
    advertised_port: Annotated[int, count(
        "Port of broker 0 that clients are told, if it is another one; the others follow.",
        0, 65_535, default_text="broker.port",
    )] = 0
    max_connections: Annotated[int, count(
        "Connections of one broker, if its open files allow; one more is refused with TooMany.",
        1, 100_000, stands_for=("network.max_connections",),
    )] = limits.CONNECTIONS_PER_BROKER_MAX
    credit_bytes: Annotated[int, size(
        "What a connection may send ahead; never less than the largest batch.",
        64 * KIB, GIB, stands_for=("network.recv_buffer_mb",),
    )] = limits.CREDIT_BYTES
    water_high: Annotated[float, share(
        "Above this share of ring or log in use, no credit is granted.",
        0.05, 0.99, stands_for=("broker.pbr_high_watermark_pct",),
    )] = limits.WATER_HIGH
    water_low: Annotated[float, share(
        "Below this share, credit is granted again.", 0.01, 0.98, stands_for=("broker.pbr_low_watermark_pct",),
    )] = limits.WATER_LOW
    backpressure_after_s: Annotated[float, seconds(
        "After this long above the mark, waiting sessions get BACKPRESSURE.",
        0.01, 3_600, stands_for=("broker.backpressure_reject_after_sec",),
    )] = limits.BACKPRESSURE_AFTER_S
    send_queue_bytes: Annotated[int, size(
        "A peer that does not read is disconnected above this.", MIB, 4 * GIB,
    )] = limits.SEND_QUEUE_BYTES_MAX
    unread_bytes: Annotated[int, size(
        "Memory for answers that clients have not read yet, of all connections. Slow readers get smaller answers; "
        "never less than four of the largest batches.", 32 * MIB, 64 * GIB,
    )] = limits.UNREAD_BYTES_MAX
    unread_s: Annotated[float, seconds(
        "While reads wait for that memory, a peer that took longer than this to read an answer is disconnected.",
        0.1, 3_600,
    )] = limits.UNREAD_S_MAX
    hello_timeout_s: Annotated[float, seconds(
        "A peer that has not said hello by then is disconnected.", 0.05, 60,
    )] = limits.HELLO_TIMEOUT_S
    frame_timeout_s: Annotated[float, seconds(
        "A batch that has taken this long to arrive is given up with its connection.", 0.1, 3_600,
    )] = limits.FRAME_TIMEOUT_S
    arriving_share: Annotated[float, share(
        "Batches that are arriving from one address take at most this share of the log; one more gets BACKPRESSURE.",
        0.01, 1,
    )] = limits.ARRIVING_SHARE
    sessions_per_connection: Annotated[int, count(
        "Sessions that one connection keeps open; of one more, the first counts as left until it sends again.",
        1, limits.SESSIONS_PER_TOPIC_MAX,
    )] = limits.SESSIONS_OPEN_PER_CONNECTION_MAX
    idle_wait_ms: Annotated[float, milliseconds(
        "Longest sleep of an idle broker; a doorbell usually wakes it sooner.",
        0.1, 1_000, stands_for=("EMBARCADERO_ACK_SPIN_US",),
    )] = limits.IDLE_WAIT_S_MAX * 1_000
    store_poll_ms: Annotated[float, milliseconds(
        "How often topics and members are looked up in the store.", 1, 10_000,
    )] = limits.STORE_POLL_S * 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricSizes:
    """How large the regions of shared memory are, and their mirror: for one run of a cluster (`down`, then `up`)."""

    log_bytes: Annotated[int, size(
        "Payloads that each broker keeps in memory; readers find what is older gone.",
        64 * KIB, 64 * GIB, power_of_two=True, stands_for=("cxl.size_gb",),
    )] = limits.LOG_BYTES
    chunk_bytes: Annotated[int, size(
        "A broker's log is freed chunk by chunk; a batch fits one chunk.", 16 * KIB, 256 * MIB, power_of_two=True,
        default_text="16 MiB, or a quarter of log_bytes if that is less", stands_for=("storage.segment_size",),
    )] = limits.CHUNK_BYTES
    pending_slots: Annotated[int, count(
        "Batches of a broker that wait for the sequencer.", 16, 1 << 20, power_of_two=True,
        stands_for=("storage.batch_headers_size",),
    )] = limits.PENDING_SLOTS
    order_slots: Annotated[int, count(
        "Entries of a topic's order index that are kept in memory.", 64, 1 << 24, power_of_two=True,
    )] = limits.ORDER_SLOTS
    held_slots: Annotated[int, count(
        "Batches of all sessions that may wait for a gap to close; beyond, the oldest gap's session is fenced.",
        16, 1 << 22, stands_for=("ordering.hold_buffer_size",),
    )] = limits.HELD_TOTAL_MAX
    sessions: Annotated[int, count(
        "Sessions that a topic can have open at once.", 1, limits.SESSIONS_PER_TOPIC_MAX,
        stands_for=("ordering.max_clients",),
    )] = limits.SESSIONS_PER_TOPIC_MAX
    round_entries: Annotated[int, count(
        "Entries that the sequencer takes from all brokers in one round.", 1, 1 << 20,
    )] = limits.ROUND_ENTRIES_MAX
    dead_log_bytes: Annotated[int, size(
        "Logs of brokers that died are kept for readers up to this.", 0, 64 * GIB,
    )] = limits.DEAD_LOG_BYTES_MAX
    mirror: Annotated[str, path(
        "Folder for a second fabric, on another memory module: all but payloads is written there first, so that losing "
        "the fabric loses no ordered entry.",
        default_text="none", stands_for=("cxl.secondary_device",),
    )] = ""

    def __post_init__(self) -> None:
        problems = [*map(self._power_of_two, ("pending_slots", "order_slots", "chunk_bytes", "log_bytes"))]
        problems += [broken.says for broken in FABRIC_RELATIONS if not broken.holds(*self._values(broken.keys))]
        if not 0 < self.sessions <= limits.SESSIONS_PER_TOPIC_MAX:
            problems.append(f"sessions must be 1 to {limits.SESSIONS_PER_TOPIC_MAX}")
        if found := [problem for problem in problems if problem]:
            raise BadValue("; ".join(found), "change the sizes in the configuration")

    def _values(self, keys: tuple[str, ...]) -> list[Any]:
        return [getattr(self, key.partition(".")[2]) for key in keys]

    def _power_of_two(self, name: str) -> str:
        value = getattr(self, name)
        return "" if value > 0 and value & (value - 1) == 0 else f"{name} must be a power of two, not {value}"

    @property
    def results_slots(self) -> int:
        """Room for an answer to everything a broker can have unanswered."""
        need = 2 * self.pending_slots + self.held_slots
        return 1 << (need - 1).bit_length()


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a cluster accepts. Layouts and the protocol set the bounds: values can be lowered, not raised."""

    record_bytes: Annotated[int, size(
        "Largest record: key, value and headers.", KIB, limits.RECORD_BYTES_MAX,
    )] = limits.RECORD_BYTES_MAX
    frame_bytes: Annotated[int, size(
        "Largest batch. Not more than fabric.chunk_bytes either.", 16 * KIB, limits.FRAME_BYTES_MAX,
    )] = limits.FRAME_BYTES_MAX
    records_per_batch: Annotated[int, count(
        "Most records in a batch.", 1, limits.RECORDS_PER_BATCH_MAX,
    )] = limits.RECORDS_PER_BATCH_MAX
    topics: Annotated[int, count("Most topics.", 1, limits.TOPICS_MAX)] = limits.TOPICS_MAX
    partitions: Annotated[int, count("Most partitions of a topic.", 1, limits.PARTITIONS_MAX)] = limits.PARTITIONS_MAX
    session_window: Annotated[int, count(
        "Batches of a session that may be without an outcome at once.",
        1, 1 << 30, fixed="the layout of session tables has this many slots", stands_for=("ordering.dedupe_window",),
    )] = limits.SESSION_WINDOW
    lanes: Annotated[int, count(
        "Lanes of one run: topics made, deleted ones included.",
        1, 1 << 30, fixed="the frontiers have this many lines",
    )] = limits.LANES_MAX
    control_bytes: Annotated[int, size(
        "Largest control message.", 1, GIB, fixed="both sides of the protocol know it",
    )] = limits.CONTROL_BYTES_MAX
    fetch_bytes: Annotated[int, size(
        "Most that a client may ask for at once.", 1, GIB, fixed="both sides of the protocol know it",
    )] = limits.FETCH_BYTES_MAX
    session_name_bytes: Annotated[int, size(
        "Longest name of a session.", 1, GIB, fixed="both sides of the protocol know it",
    )] = limits.SESSION_NAME_BYTES_MAX
    topic_name_chars: Annotated[int, count(
        "Longest name of a topic.", 1, 1 << 30, fixed="names are file names",
    )] = limits.TOPIC_NAME_CHARS_MAX


class ClientKeys(msgspec.Struct, frozen=True, kw_only=True):
    """Publishers and subscribers: what they do unless the program says otherwise."""

    brokers: Annotated[list[str], several(
        "Addresses host:port of one or several brokers.",
        variable="EMBARCADERO_BROKERS", default_text="the cluster of cluster.data_dir, else broker.port on broker.host",
    )] = []
    ack: Annotated[int, choice(
        "When a record counts as published. 0: sent. 1: ordered. 2: durable.", "0", "1", "2",
        stands_for=("replication.ack_level",),
    )] = limits.ACK_DEFAULT
    batch_bytes: Annotated[int, size(
        "A batch is sent when it has this many bytes.", 1, limits.FRAME_BYTES_MAX, stands_for=("storage.batch_size",),
    )] = limits.BATCH_BYTES_DEFAULT
    linger_ms: Annotated[float, milliseconds(
        "How long a record may wait for others.", 0, 60_000,
    )] = limits.LINGER_MS_DEFAULT
    window_bytes: Annotated[int, size(
        "How much may be without an outcome before callers have to wait.", 1, 64 * GIB,
    )] = limits.WINDOW_BYTES_DEFAULT
    compression: Annotated[str, choice("How batches are compressed.", "none", "lz4", "zstd")] = "none"
    delivery_timeout_s: Annotated[float, seconds(
        "A publisher gives up a batch after this long.", 0.01, 7 * _DAY_S, stands_for=("EMBARCADERO_ACK_TIMEOUT_SEC",),
    )] = limits.DELIVERY_TIMEOUT_S
    connect_timeout_s: Annotated[float, seconds(
        "For a broker to answer a hello; `connect` without a `timeout` takes no longer.", 0.01, 3_600,
    )] = limits.CONNECT_TIMEOUT_S
    request_timeout_s: Annotated[float, seconds(
        "For an answer to a call without a `timeout`.", 0.01, _DAY_S,
    )] = limits.REQUEST_TIMEOUT_S
    resend_after_s: Annotated[float, seconds(
        "A broker silent for this long is given up; batches go to another one.", 0.05, 3_600,
    )] = limits.RESEND_AFTER_S
    fetch_bytes: Annotated[int, size(
        "A subscriber asks for this much at once.", 1, limits.FETCH_BYTES_MAX,
    )] = limits.FETCH_BYTES_DEFAULT
    fetch_wait_ms: Annotated[int, milliseconds(
        "How long a broker may wait for records before it answers that there are none.", 0, limits.FETCH_WAIT_MS_MAX,
    )] = limits.FETCH_WAIT_MS_DEFAULT
    prefetch: Annotated[int, count(
        "Fetches that a subscriber keeps ready for its program.", 1, 64,
    )] = limits.PREFETCH_FETCHES


class TopicKeys(msgspec.Struct, frozen=True, kw_only=True):
    """New topics, where `create_topic` does not say otherwise."""

    order: Annotated[int, choice(
        "0, none: an order per broker. 1, local: and each session's. 2, total: one order for all; publishers choose "
        "whether it keeps their own. 5, strong: it always does.",
        "0", "1", "2", "5", *ORDER_NAMES, stands_for=("ordering.default_order",),
        numbers=tuple((name, int(order)) for name, order in ORDER_NAMES.items()),
    )] = limits.ORDER_DEFAULT
    partitions: Annotated[int, count("Tags that group members share a topic by.", 1, limits.PARTITIONS_MAX)] = 1
    on_gap: Annotated[str, choice(
        "A strong session's gap that stays: fence the session (nothing is lost), or skip it (low delay).",
        "fence", "skip",
    )] = "fence"
    gap_timeout_fence_ms: Annotated[int, milliseconds(
        "How long a gap may stay, on_gap=fence.", 1, limits.GAP_TIMEOUT_MS_MAX,
    )] = limits.GAP_TIMEOUT_FENCE_MS
    gap_timeout_skip_ms: Annotated[int, milliseconds(
        "How long a gap may stay, on_gap=skip.",
        1, limits.GAP_TIMEOUT_MS_MAX, stands_for=("ordering.base_timeout_ms",),
    )] = limits.GAP_TIMEOUT_SKIP_MS
    session_ttl_s: Annotated[int, seconds(
        "A session idle for this long is fenced.", 1, limits.SESSION_TTL_S_MAX, stands_for=("ordering.client_ttl_sec",),
    )] = limits.SESSION_TTL_S
    replicas: Annotated[str, choice(
        f"Copies on disk. auto: as many as replicas are live, at most {limits.COPIES_DEFAULT}. 0: memory only.",
        "auto", *map(str, range(limits.COPIES_MAX + 1)),
    )] = "auto"
    durable_on: Annotated[str, choice(
        "Copies that make a record durable; never more than there are. majority: 1 of 1, 2 of 2, 2 of 3.",
        "majority", *map(str, range(1, limits.COPIES_MAX + 1)),
    )] = "majority"
    retention_bytes: Annotated[int, size(
        "Beyond this, a topic's oldest segments go. 0: no bound.", 0, limits.RETENTION_BYTES_MAX,
    )] = 0
    retention_s: Annotated[int, seconds(
        "After this long, a topic's oldest segments go. 0: no bound.", 0, limits.RETENTION_S_MAX,
    )] = 0


class SequencerKeys(msgspec.Struct, frozen=True, kw_only=True):
    """How the sequencer works. The size of a round is fabric.round_entries."""

    gather_ms: Annotated[float, milliseconds(
        "While all publishers have much in flight, entries gather for at most this long.",
        0, 100, stands_for=("sequencer.epoch_us",),
    )] = limits.GATHER_MS_MAX
    idle_wait_ms: Annotated[float, milliseconds(
        "Longest sleep of an idle sequencer; a doorbell usually wakes it sooner.", 0.1, 1_000,
    )] = limits.IDLE_WAIT_S_MAX * 1_000
    controls_per_round: Annotated[int, count(
        "Session requests taken in one round.", 1, 65_536,
    )] = limits.CONTROLS_PER_ROUND_MAX
    departed_gap_timeout_ms: Annotated[int, milliseconds(
        "How long a gap may stay once its publisher has closed all connections.", 1, limits.GAP_TIMEOUT_MS_MAX,
    )] = limits.GAP_TIMEOUT_DEPARTED_MS
    sessions_per_peer_share: Annotated[float, share(
        "Sessions that one address may have, as a share of fabric.sessions, for each topic; one more is refused with "
        "TooMany. Named sessions count until they end.", 0.0001, 1,
    )] = limits.SESSIONS_PER_PEER_SHARE
    takeover_after_ms: Annotated[float, milliseconds(
        "A standby takes over when the sequencer's heart stands still for this long; at once, when its process ends.",
        200, 600_000,
    )] = limits.TAKEOVER_AFTER_S * 1_000
    nice: Annotated[int, count(
        "Priority of the sequencer that reigns, if the system permits it: -20 before all others; 0 as they are.",
        -20, 19,
    )] = limits.SEQUENCER_NICE


class ReplicaKeys(msgspec.Struct, frozen=True, kw_only=True):
    """How replicas keep records on disk."""

    segment_bytes: Annotated[int, size(
        "A segment file is closed when it has this many bytes; trims and retention give up whole segments.",
        64 * KIB, limits.SEGMENT_BYTES_MAX,
    )] = limits.SEGMENT_BYTES
    segment_s: Annotated[float, seconds(
        "A segment file that began this long ago is closed.", 1, 366 * _DAY_S,
    )] = limits.SEGMENT_AGE_S
    cached: Annotated[bool, flag(
        "Leave what was written in the system's page cache. Off: it is dropped once it is synced; brokers have it in "
        "memory, and whoever reads further back reads it from the disk.",
    )] = False
    scrub_bytes_per_s: Annotated[int, size(
        "How much of the closed segments is read and checked in a second of idle time; 0: none.", 0, GIB,
    )] = limits.SCRUB_BYTES_PER_S
    repair_bytes_per_s: Annotated[int, size(
        "How much is copied from other replicas in a second, to complete closed ranges.", 64 * KIB, 64 * GIB,
    )] = limits.REPAIR_BYTES_PER_S
    idle_wait_ms: Annotated[float, milliseconds(
        "Longest sleep of an idle replica; a doorbell usually wakes it sooner.", 0.1, 1_000,
    )] = limits.IDLE_WAIT_S_MAX * 1_000
    store_poll_ms: Annotated[float, milliseconds(
        "How often ranges and topics are looked up in the store.", 1, 10_000,
    )] = limits.STORE_POLL_S * 1_000


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Where copies are."""

    replace_after_s: Annotated[float, seconds(
        "Sealed ranges of a replica that is dead for this long are copied to another live one.", 0.1, 366 * _DAY_S,
    )] = limits.REPLACE_AFTER_S


class TierKeys(msgspec.Struct, frozen=True, kw_only=True):
    """Tables that keep what is durable: written by `pipeline tier`, or by `up` itself."""

    enabled: Annotated[bool, flag("`up` runs a job that tiers topics, and starts it again when it dies.")] = False
    topics: Annotated[list[str], several(
        "Topics that it tiers.", default_text="all that have replicas",
    )] = []
    warehouse: Annotated[str, text(
        "Where tables are: a URL such as `file:///srv/warehouse` or `s3://bucket/folder`.",
        default_text="data_dir/tier/warehouse",
    )] = ""
    properties: Annotated[list[str], several(
        "Properties of PyIceberg for its catalog and its files, such as `uri=...`, `s3.endpoint=...`. Their values are "
        "masked wherever they are shown. Keys to a store may also be in the environment (`AWS_ACCESS_KEY_ID`, ...).",
        default_text="a catalog in data_dir/tier/catalog.db", secret=True,
    )] = []
    engine: Annotated[str, choice(
        "What writes the files of `up --tier`. spark: Spark's workers. process: the job's own process. auto: Spark "
        "when more than 256 MiB of a topic wait, else the job's own process.",
        "spark", "process", "auto",
        default_text="spark where PySpark and Java are installed, process elsewhere",
    )] = ""
    master: Annotated[str, text(
        "Spark's master, such as `local[2]` or `spark://host:7077`: its workers write the files.",
        default_text="local[*]",
    )] = ""
    hot_retention_s: Annotated[int, seconds(
        "Brokers and replicas keep what is in the table for this long.", 0, limits.RETENTION_S_MAX,
    )] = limits.HOT_RETENTION_S
    file_bytes: Annotated[int, size(
        "Payloads in one Parquet file, about.", 64 * KIB, 2 * GIB,
    )] = limits.TIER_FILE_BYTES
    interval_s: Annotated[float, seconds(
        "Between two looks for what can be tiered.", 0.1, _DAY_S,
    )] = limits.TIER_INTERVAL_S


class LogKeys(msgspec.Struct, frozen=True, kw_only=True):
    """Log lines of all processes."""

    level: Annotated[str, choice(
        "The least severe lines that are written.", "debug", "info", "warning", "error",
    )] = "info"
    format: Annotated[str, choice("Lines for people, or a JSON object a line.", "plain", "json")] = "plain"
    file: Annotated[str, path(
        "Append to this file; empty: standard error.",
        default_text="standard error; for processes that `up` starts, data_dir/logs",
    )] = ""


class Metrics(msgspec.Struct, frozen=True, kw_only=True):
    """The Prometheus endpoint of each node, with `/health` and `/ready`."""

    enabled: Annotated[bool, flag("Serve metrics.")] = True
    host: Annotated[str, text(
        "Address to listen on. The default is reachable from this machine only.",
    )] = limits.HOST_DEFAULT
    port: Annotated[int, count(
        "Port of the sequencer's process; those of brokers follow, then replicas, and 64 ports after the first of "
        "these sequencers that stand by. 0 takes free ports.", 0, 65_535,
    )] = 0


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """A whole configuration: one attribute per section."""

    cluster: ClusterKeys = ClusterKeys()
    broker: BrokerKeys = BrokerKeys()
    fabric: FabricSizes = FabricSizes()
    limits: Limits = Limits()
    client: ClientKeys = ClientKeys()
    topic: TopicKeys = TopicKeys()
    sequencer: SequencerKeys = SequencerKeys()
    replica: ReplicaKeys = ReplicaKeys()
    placement: Placement = Placement()
    tier: TierKeys = TierKeys()
    log: LogKeys = LogKeys()
    metrics: Metrics = Metrics()


# fmt: on
SECTIONS: Final[dict[str, Any]] = {field.name: field.type for field in msgspec.structs.fields(Config)}
DEFAULTS: Final = Config()


def _keys() -> dict[str, Key]:
    found: dict[str, Key] = {}
    for section, kind in SECTIONS.items():
        for name, hint in get_type_hints(kind, include_extras=True).items():
            rule = next(part for part in hint.__metadata__ if isinstance(part, Rule))
            default = getattr(getattr(DEFAULTS, section), name)
            key = Key(section, name, rule, default, integral=hint.__origin__ is int)
            found[str(key)] = key
    return found


KEYS: Final = _keys()
"""All keys by their full name, such as `broker.port`, in the order of the reference page."""


# --- values that must fit together ------------------------------------------------------------------------------------
EVERY_ADDRESS: Final = frozenset({"", "0.0.0.0", "::"})
"""Addresses to listen on that nobody can connect to."""

RELATIONS: Final = (
    *FABRIC_RELATIONS,
    Relation(
        ("broker.water_low", "broker.water_high"), lambda low, high: low < high, "water_low must be below water_high"
    ),
    Relation(
        ("broker.port", "cluster.brokers"),
        lambda port, brokers: port + brokers <= 65_536,
        "the ports of all brokers must exist: use a lower port, or 0 for free ones",
    ),
    Relation(
        ("broker.advertised_port", "cluster.brokers"),
        lambda port, brokers: port + brokers <= 65_536,
        "the ports of all brokers must exist: use a lower port",
    ),
    Relation(
        ("broker.advertised_port", "broker.port"),
        lambda advertised, port: port > 0 or advertised == 0,
        "ports that clients are told need fixed ports to listen on: set broker.port",
    ),
    Relation(
        ("broker.host", "broker.advertised_host"),
        lambda host, advertised: host not in EVERY_ADDRESS or advertised not in EVERY_ADDRESS,
        "clients are told where to connect: set broker.advertised_host (--advertised-host) to an address of this "
        "machine, or broker.host (--host)",
    ),
    Relation(
        ("metrics.port", "cluster.brokers", "cluster.replicas"),
        lambda port, brokers, replicas: port + brokers + replicas <= 65_535,
        "the ports of all processes must exist: use a lower port, or 0 for free ones",
    ),
    Relation(
        ("metrics.port", "cluster.brokers", "cluster.standbys"),
        lambda port, brokers, standbys: not standbys or port + brokers + REPLICAS_MAX + standbys <= 65_535,
        "the ports of all processes must exist: use a lower port, or 0 for free ones",
    ),
    Relation(
        ("client.window_bytes", "client.batch_bytes"),
        lambda window, batch: batch <= window,
        "the window must hold at least one batch",
    ),
)


# --- names of the first designs ---------------------------------------------------------------------------------------
_ARRAYS: Final = "one sequencer orders whole rounds as arrays"
_REPLICAS: Final = "copies belong to a topic: `replicas` and `durable_on` of create_topic"
_BENCH: Final = "it is an option of `embarcadero bench`"

GONE: Final = {
    "cluster.name": "a cluster is its folder (cluster.data_dir) and has an id of its own",
    "cxl.numa_node": "mount cluster.fabric_dir with the memory policy you want, and pin processes with cluster.pin",
    "sequencer.mode": _ARRAYS + "; there are no modes to choose from",
    "sequencer.collectors": _ARRAYS + "; nobody collects for it",
    "sequencer.num_shards": _ARRAYS + "; it has no shards",
    "sequencer.spsc_queue_capacity": _ARRAYS + "; brokers' pending rings (fabric.pending_slots) are the only queues",
    "ordering.order5_enabled": "order 5 is always there; each topic chooses its order",
    "recovery.checkpoint_interval_sec": "checkpoints are taken by entries written, not by time: takeovers are bounded",
    "recovery.checkpoint_location": "checkpoints are in the fabric, beside what they cover",
    "recovery.goi_replay_entries": "a takeover replays what follows the newest checkpoint, and there always is one",
    "safety.goi_wraparound_high_pct": "an order slot is reused only when a checkpoint covers it; brokers stop at "
    "broker.water_high",
    "safety.goi_wraparound_low_pct": "see safety.goi_wraparound_high_pct; brokers go on at broker.water_low",
    "safety.stuck_slot_timeout_sec": "a broker publishes a slot only when it is whole, so none is ever stuck",
    "safety.committed_seq_reconcile_sec": "one writer writes a contiguous index, so there is nothing to reconcile",
    "replication.factor": _REPLICAS,
    "network.io_threads": "a broker has one event loop; run more brokers (cluster.brokers) instead of more threads",
    "EMBARCADERO_ACK_DRAIN_US": "a doorbell wakes brokers when there are acks to send",
    "TOTAL_MESSAGE_SIZE": _BENCH,
    "NUM_ITERATIONS": _BENCH,
}
"""Names without a key here, and why."""

STANDS_FOR: Final = {name: key for key in KEYS.values() for name in key.rule.stands_for}
"""Names that have a key here."""

SEEDS: Final = {name: f"it is {key} here" for name, key in STANDS_FOR.items() if name != str(key)} | {
    name: f"it is gone: {reason}" for name, reason in GONE.items()
}
"""What to tell somebody who uses an old name."""
