"""The table of configuration keys: name, type, default, range and meaning of each. Other modules derive from it.

Defaults and hard limits are in limits.py. Names of times and sizes have a unit; values may be written in another unit
(`linger_ms: 1s`). After the keys come the relations between values, and the replacements of names in the first designs.
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
    """A condition on the values of several keys. `holds` gets one value per key, and `message` states it."""

    keys: tuple[str, ...]
    holds: Callable[..., bool]
    message: str


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
    """Return the default size of a chunk: small enough that a log has free chunks while others fill."""
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
        "Folder for the fabric: on tmpfs, or on a DAX mount. hugetlbfs does not work.",
        default_text="/dev/shm if it has enough space, else data_dir", stands_for=("cxl.primary_device",),
    )] = ""
    brokers: Annotated[int, count(
        "Number of brokers.", 1, limits.BROKERS_MAX, stands_for=("cluster.brokers",),
    )] = limits.BROKERS_DEFAULT
    replicas: Annotated[int, count(
        "Number of replicas, which keep topics on disk. Replicas that have a folder in data_dir start as well.",
        0, limits.REPLICAS_MAX, stands_for=("cluster.replicas",),
    )] = limits.REPLICAS_DEFAULT
    standbys: Annotated[int, count(
        "Number of standby sequencers, ready to take over immediately. With one_process there are none.",
        0, limits.CANDIDATES_MAX - 1,
    )] = limits.STANDBYS_DEFAULT
    one_process: Annotated[bool, flag("All roles in a single process, instead of one process per role.")] = False
    hugepages: Annotated[bool, flag(
        "Advise huge pages for the fabric. Linux uses them if /sys/kernel/mm/transparent_hugepage/shmem_enabled is "
        "`advise`, or on a tmpfs that is mounted with `huge=advise`.",
    )] = False
    pin: Annotated[str, text(
        "Cores for the sequencer and the brokers, in rotation, such as `0,1`. Replicas begin with the last core.",
        default_text="any core",
    )] = ""


class BrokerKeys(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of each broker."""

    host: Annotated[str, text(
        "Address to listen on. The default is reachable from this machine only.",
    )] = limits.HOST_DEFAULT
    port: Annotated[int, count(
        "Port of broker 0. The other brokers use the next ports. 0: free ports.",
        0, 65_535, stands_for=("network.broker_port",),
    )] = limits.PORT_DEFAULT
    advertised_host: Annotated[str, text(
        "Address that brokers publish to clients, if it differs.", default_text="broker.host",
    )] = ""
    advertised_port: Annotated[int, count(
        "Port of broker 0 that clients get, if it differs. The other brokers use the next ports.",
        0, 65_535, default_text="broker.port",
    )] = 0
    max_connections: Annotated[int, count(
        "Connections of one broker, if its limit of open files allows. Above that, TooMany.",
        1, 100_000, stands_for=("network.max_connections",),
    )] = limits.CONNECTIONS_PER_BROKER_MAX
    credit_bytes: Annotated[int, size(
        "Bytes that a connection may send ahead. At least the size of the largest batch.",
        64 * KIB, GIB, stands_for=("network.recv_buffer_mb",),
    )] = limits.CREDIT_BYTES
    water_high: Annotated[float, share(
        "Above this share of ring or log in use, the broker grants no credit.",
        0.05, 0.99, stands_for=("broker.pbr_high_watermark_pct",),
    )] = limits.WATER_HIGH
    water_low: Annotated[float, share(
        "Below this share, the broker grants credit again.",
        0.01, 0.98, stands_for=("broker.pbr_low_watermark_pct",),
    )] = limits.WATER_LOW
    backpressure_after_s: Annotated[float, seconds(
        "Waiting sessions get BACKPRESSURE after this time above water_high.",
        0.01, 3_600, stands_for=("broker.backpressure_reject_after_sec",),
    )] = limits.BACKPRESSURE_AFTER_S
    send_queue_bytes: Annotated[int, size(
        "A peer that does not read is disconnected above this queue size.", MIB, 4 * GIB,
    )] = limits.SEND_QUEUE_BYTES_MAX
    unread_bytes: Annotated[int, size(
        "Memory for answers that clients have not read yet, of all connections. Slow readers get smaller answers. "
        "At least four times the largest batch.", 32 * MIB, 64 * GIB,
    )] = limits.UNREAD_BYTES_MAX
    unread_s: Annotated[float, seconds(
        "While reads wait for that memory, a peer that needs more time than this to read an answer is disconnected.",
        0.1, 3_600,
    )] = limits.UNREAD_S_MAX
    hello_timeout_s: Annotated[float, seconds(
        "A peer that has not sent Hello after this time is disconnected.", 0.05, 60,
    )] = limits.HELLO_TIMEOUT_S
    frame_timeout_s: Annotated[float, seconds(
        "If a batch takes longer than this to arrive, its connection is closed.", 0.1, 3_600,
    )] = limits.FRAME_TIMEOUT_S
    arriving_share: Annotated[float, share(
        "Share of the log for batches that are arriving from one address. Above that, BACKPRESSURE.",
        0.01, 1,
    )] = limits.ARRIVING_SHARE
    sessions_per_connection: Annotated[int, count(
        "Sessions that one connection keeps open. Above that, its oldest session counts as disconnected until it "
        "sends again.", 1, limits.SESSIONS_PER_TOPIC_MAX,
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
    """Sizes of the regions of shared memory, and the mirror. A change takes effect after `down` and `up`."""

    log_bytes: Annotated[int, size(
        "Memory for payloads, per broker. In a topic without replicas, older records are removed.",
        64 * KIB, 64 * GIB, power_of_two=True, stands_for=("cxl.size_gb",),
    )] = limits.LOG_BYTES
    chunk_bytes: Annotated[int, size(
        "A broker frees its log in chunks of this size. A batch fits into one chunk.",
        16 * KIB, 256 * MIB, power_of_two=True,
        default_text="16 MiB, or a quarter of log_bytes if that is less", stands_for=("storage.segment_size",),
    )] = limits.CHUNK_BYTES
    pending_slots: Annotated[int, count(
        "Batches of a broker that wait for the sequencer.", 16, 1 << 20, power_of_two=True,
        stands_for=("storage.batch_headers_size",),
    )] = limits.PENDING_SLOTS
    order_slots: Annotated[int, count(
        "Entries of a topic's order index in memory.", 64, 1 << 24, power_of_two=True,
    )] = limits.ORDER_SLOTS
    held_slots: Annotated[int, count(
        "Size of the reorder buffer: batches of all sessions that wait for a gap to close. If it is full, the session "
        "with the oldest gap is fenced.", 16, 1 << 22, stands_for=("ordering.hold_buffer_size",),
    )] = limits.HELD_TOTAL_MAX
    sessions: Annotated[int, count(
        "Open sessions of a topic.", 1, limits.SESSIONS_PER_TOPIC_MAX,
        stands_for=("ordering.max_clients",),
    )] = limits.SESSIONS_PER_TOPIC_MAX
    round_entries: Annotated[int, count(
        "Entries that the sequencer takes from all brokers in one round.", 1, 1 << 20,
    )] = limits.ROUND_ENTRIES_MAX
    dead_log_bytes: Annotated[int, size(
        "Memory for the logs of dead brokers, which readers can still read.", 0, 64 * GIB,
    )] = limits.DEAD_LOG_BYTES_MAX
    mirror: Annotated[str, path(
        "Folder for a second fabric, on another memory module. All metadata is written there first, so that a loss of "
        "the fabric loses no ordered entry.",
        default_text="none", stands_for=("cxl.secondary_device",),
    )] = ""

    def __post_init__(self) -> None:
        problems = [*map(self._power_of_two, ("pending_slots", "order_slots", "chunk_bytes", "log_bytes"))]
        problems += [broken.message for broken in FABRIC_RELATIONS if not broken.holds(*self._values(broken.keys))]
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
        """Slots for the answers to all entries of a broker that can be unanswered."""
        need = 2 * self.pending_slots + self.held_slots
        return 1 << (need - 1).bit_length()


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a cluster. Layouts and the protocol set the upper bounds: values can be lowered, not raised."""

    record_bytes: Annotated[int, size(
        "Largest record: key, value and headers.", KIB, limits.RECORD_BYTES_MAX,
    )] = limits.RECORD_BYTES_MAX
    frame_bytes: Annotated[int, size(
        "Largest batch. It must fit into fabric.chunk_bytes as well.", 16 * KIB, limits.FRAME_BYTES_MAX,
    )] = limits.FRAME_BYTES_MAX
    records_per_batch: Annotated[int, count(
        "Records in a batch.", 1, limits.RECORDS_PER_BATCH_MAX,
    )] = limits.RECORDS_PER_BATCH_MAX
    topics: Annotated[int, count("Number of topics.", 1, limits.TOPICS_MAX)] = limits.TOPICS_MAX
    partitions: Annotated[int, count("Partitions of a topic.", 1, limits.PARTITIONS_MAX)] = limits.PARTITIONS_MAX
    session_window: Annotated[int, count(
        "Batches of a session without an outcome.",
        1, 1 << 30, fixed="the layout of session tables has this number of slots",
        stands_for=("ordering.dedupe_window",),
    )] = limits.SESSION_WINDOW
    lanes: Annotated[int, count(
        "Lanes of one run: all created topics, also deleted ones.",
        1, 1 << 30, fixed="the frontiers have this number of lines",
    )] = limits.LANES_MAX
    control_bytes: Annotated[int, size(
        "Largest control message.", 1, GIB, fixed="it is a constant of the protocol",
    )] = limits.CONTROL_BYTES_MAX
    fetch_bytes: Annotated[int, size(
        "Bytes that a client may request in one Fetch.", 1, GIB, fixed="it is a constant of the protocol",
    )] = limits.FETCH_BYTES_MAX
    session_name_bytes: Annotated[int, size(
        "Longest name of a session.", 1, GIB, fixed="it is a constant of the protocol",
    )] = limits.SESSION_NAME_BYTES_MAX
    topic_name_chars: Annotated[int, count(
        "Longest name of a topic.", 1, 1 << 30, fixed="names are file names",
    )] = limits.TOPIC_NAME_CHARS_MAX


class ClientKeys(msgspec.Struct, frozen=True, kw_only=True):
    """Defaults of publishers and subscribers. A program can override them."""

    brokers: Annotated[list[str], several(
        "Addresses host:port of one or more brokers.",
        variable="EMBARCADERO_BROKERS", default_text="the cluster of cluster.data_dir, else broker.port on broker.host",
    )] = []
    ack: Annotated[int, choice(
        "When a record is acknowledged. 0: sent. 1: ordered. 2: durable.", "0", "1", "2",
        stands_for=("replication.ack_level",),
    )] = limits.ACK_DEFAULT
    batch_bytes: Annotated[int, size(
        "A batch is sent when it reaches this size.", 1, limits.FRAME_BYTES_MAX, stands_for=("storage.batch_size",),
    )] = limits.BATCH_BYTES_DEFAULT
    linger_ms: Annotated[float, milliseconds(
        "How long a record may wait for others.", 0, 60_000,
    )] = limits.LINGER_MS_DEFAULT
    window_bytes: Annotated[int, size(
        "Bytes without an outcome. Above that, callers wait.", 1, 64 * GIB,
    )] = limits.WINDOW_BYTES_DEFAULT
    compression: Annotated[str, choice("Compression of batches.", "none", "lz4", "zstd")] = "none"
    delivery_timeout_s: Annotated[float, seconds(
        "A publisher fails if a batch has no outcome after this time.",
        0.01, 7 * _DAY_S, stands_for=("EMBARCADERO_ACK_TIMEOUT_SEC",),
    )] = limits.DELIVERY_TIMEOUT_S
    connect_timeout_s: Annotated[float, seconds(
        "Timeout of a broker's answer to Hello, and of `connect` without a `timeout`.", 0.01, 3_600,
    )] = limits.CONNECT_TIMEOUT_S
    request_timeout_s: Annotated[float, seconds(
        "Timeout of requests without a `timeout`.", 0.01, _DAY_S,
    )] = limits.REQUEST_TIMEOUT_S
    resend_after_s: Annotated[float, seconds(
        "The connection to a broker that is silent for this time is closed; its batches go to another broker.",
        0.05, 3_600,
    )] = limits.RESEND_AFTER_S
    fetch_bytes: Annotated[int, size(
        "Bytes that a subscriber requests in one Fetch.", 1, limits.FETCH_BYTES_MAX,
    )] = limits.FETCH_BYTES_DEFAULT
    fetch_wait_ms: Annotated[int, milliseconds(
        "How long a broker may wait for records before it answers without records.", 0, limits.FETCH_WAIT_MS_MAX,
    )] = limits.FETCH_WAIT_MS_DEFAULT
    prefetch: Annotated[int, count(
        "Read-ahead of a subscriber, in Fetches.", 1, 64,
    )] = limits.PREFETCH_FETCHES


class TopicKeys(msgspec.Struct, frozen=True, kw_only=True):
    """Defaults of new topics. `create_topic` can override them."""

    order: Annotated[int, choice(
        "0, none: an order per broker. 1, local: an order per broker that keeps the order of each session. 2, total: "
        "one order for all; each publisher chooses whether it keeps its own order. 5, strong: one order that keeps the "
        "order of every publisher.",
        "0", "1", "2", "5", *ORDER_NAMES, stands_for=("ordering.default_order",),
        numbers=tuple((name, int(order)) for name, order in ORDER_NAMES.items()),
    )] = limits.ORDER_DEFAULT
    partitions: Annotated[int, count("Partitions: tags by which subscribers filter.", 1, limits.PARTITIONS_MAX)] = 1
    on_gap: Annotated[str, choice(
        "If a gap in a strong session does not close: fence the session (no loss), or skip the gap (low delay).",
        "fence", "skip",
    )] = "fence"
    gap_timeout_fence_ms: Annotated[int, milliseconds(
        "Time until a gap counts as not closed, with on_gap=fence.", 1, limits.GAP_TIMEOUT_MS_MAX,
    )] = limits.GAP_TIMEOUT_FENCE_MS
    gap_timeout_skip_ms: Annotated[int, milliseconds(
        "Time until a gap counts as not closed, with on_gap=skip.",
        1, limits.GAP_TIMEOUT_MS_MAX, stands_for=("ordering.base_timeout_ms",),
    )] = limits.GAP_TIMEOUT_SKIP_MS
    session_ttl_s: Annotated[int, seconds(
        "A session that is idle for this time is fenced.",
        1, limits.SESSION_TTL_S_MAX, stands_for=("ordering.client_ttl_sec",),
    )] = limits.SESSION_TTL_S
    replicas: Annotated[str, choice(
        f"Copies on disk. auto: the number of live replicas, at most {limits.COPIES_DEFAULT}. 0: memory only.",
        "auto", *map(str, range(limits.COPIES_MAX + 1)),
    )] = "auto"
    durable_on: Annotated[str, choice(
        "Copies that make a record durable, at most all of them. majority: 1 of 1, 2 of 2, 2 of 3.",
        "majority", *map(str, range(1, limits.COPIES_MAX + 1)),
    )] = "majority"
    retention_bytes: Annotated[int, size(
        "Above this size, the oldest segments of a topic are removed. 0: no limit.", 0, limits.RETENTION_BYTES_MAX,
    )] = 0
    retention_s: Annotated[int, seconds(
        "Segments of a topic are removed after this time. 0: no limit.", 0, limits.RETENTION_S_MAX,
    )] = 0


class SequencerKeys(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the sequencer. The size of a round is fabric.round_entries."""

    gather_ms: Annotated[float, milliseconds(
        "While all publishers have several batches in flight, entries gather for at most this time.",
        0, 100, stands_for=("sequencer.epoch_us",),
    )] = limits.GATHER_MS_MAX
    idle_wait_ms: Annotated[float, milliseconds(
        "Longest sleep of an idle sequencer; a doorbell usually wakes it sooner.", 0.1, 1_000,
    )] = limits.IDLE_WAIT_S_MAX * 1_000
    controls_per_round: Annotated[int, count(
        "Session requests in one round.", 1, 65_536,
    )] = limits.CONTROLS_PER_ROUND_MAX
    departed_gap_timeout_ms: Annotated[int, milliseconds(
        "Time until a gap counts as not closed, after its publisher has closed all connections.",
        1, limits.GAP_TIMEOUT_MS_MAX,
    )] = limits.GAP_TIMEOUT_DEPARTED_MS
    sessions_per_peer_share: Annotated[float, share(
        "Sessions of one address in a topic, as a share of fabric.sessions. Above that, TooMany. Named sessions count "
        "until they end.", 0.0001, 1,
    )] = limits.SESSIONS_PER_PEER_SHARE
    takeover_after_ms: Annotated[float, milliseconds(
        "A standby takes over when the leader's heartbeat stops for this time, and immediately when its process ends.",
        200, 600_000,
    )] = limits.TAKEOVER_AFTER_S * 1_000
    nice: Annotated[int, count(
        "Priority (nice value) of the leading sequencer, if the system permits it. -20 is the highest, 0 is usual.",
        -20, 19,
    )] = limits.SEQUENCER_NICE


class ReplicaKeys(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of replicas, which keep records on disk."""

    segment_bytes: Annotated[int, size(
        "A segment file is closed at this size. Trims and retention remove whole segments.",
        64 * KIB, limits.SEGMENT_BYTES_MAX,
    )] = limits.SEGMENT_BYTES
    segment_s: Annotated[float, seconds(
        "A segment file is closed at this age.", 1, 366 * _DAY_S,
    )] = limits.SEGMENT_AGE_S
    cached: Annotated[bool, flag(
        "Keep written records in the system's page cache. Off: they are dropped after the sync. Brokers have the "
        "newest records in memory, and older ones are read from the disk.",
    )] = False
    scrub_bytes_per_s: Annotated[int, size(
        "Bytes of closed segments that are read and checked per second of idle time. 0: none.", 0, GIB,
    )] = limits.SCRUB_BYTES_PER_S
    repair_bytes_per_s: Annotated[int, size(
        "Bytes per second that are copied from other replicas to complete closed ranges.", 64 * KIB, 64 * GIB,
    )] = limits.REPAIR_BYTES_PER_S
    idle_wait_ms: Annotated[float, milliseconds(
        "Longest sleep of an idle replica; a doorbell usually wakes it sooner.", 0.1, 1_000,
    )] = limits.IDLE_WAIT_S_MAX * 1_000
    store_poll_ms: Annotated[float, milliseconds(
        "How often ranges and topics are looked up in the store.", 1, 10_000,
    )] = limits.STORE_POLL_S * 1_000


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Placement of copies."""

    replace_after_s: Annotated[float, seconds(
        "Sealed ranges of a replica that is dead for this time are copied to a live replica.", 0.1, 366 * _DAY_S,
    )] = limits.REPLACE_AFTER_S


class TierKeys(msgspec.Struct, frozen=True, kw_only=True):
    """Tables of durable records. `pipeline tier` or `up` writes them."""

    enabled: Annotated[bool, flag("`up` runs a job that tiers topics, and restarts it when it dies.")] = False
    topics: Annotated[list[str], several(
        "Topics that the job tiers.", default_text="all topics with replicas",
    )] = []
    warehouse: Annotated[str, text(
        "Location of tables: a URL such as `file:///srv/warehouse` or `s3://bucket/folder`.",
        default_text="data_dir/tier/warehouse",
    )] = ""
    properties: Annotated[list[str], several(
        "Properties of PyIceberg for its catalog and its files, such as `uri=...`, `s3.endpoint=...`. Their values are "
        "masked in all output. Keys to a store may also be in the environment (`AWS_ACCESS_KEY_ID`, ...).",
        default_text="a catalog in data_dir/tier/catalog.db", secret=True,
    )] = []
    engine: Annotated[str, choice(
        "Writer of the files of `up --tier`. spark: Spark's workers. process: the job's own process. auto: Spark "
        "if more than 256 MiB of a topic wait, otherwise the job's own process.",
        "spark", "process", "auto",
        default_text="spark where PySpark and Java are installed, process elsewhere",
    )] = ""
    master: Annotated[str, text(
        "Spark's master, such as `local[2]` or `spark://host:7077`: its workers write the files.",
        default_text="local[*]",
    )] = ""
    hot_retention_s: Annotated[int, seconds(
        "How long brokers and replicas keep records that are in the table.", 0, limits.RETENTION_S_MAX,
    )] = limits.HOT_RETENTION_S
    file_bytes: Annotated[int, size(
        "Approximate size of the payloads in one Parquet file.", 64 * KIB, 2 * GIB,
    )] = limits.TIER_FILE_BYTES
    interval_s: Annotated[float, seconds(
        "Interval at which the job looks for records to tier.", 0.1, _DAY_S,
    )] = limits.TIER_INTERVAL_S


class LogKeys(msgspec.Struct, frozen=True, kw_only=True):
    """Logs of all processes."""

    level: Annotated[str, choice(
        "Least severe level that is logged.", "debug", "info", "warning", "error",
    )] = "info"
    format: Annotated[str, choice("Plain text, or one JSON object per line.", "plain", "json")] = "plain"
    file: Annotated[str, path(
        "Log file, to which lines are appended. Empty: standard error.",
        default_text="standard error; for processes that `up` starts, data_dir/logs",
    )] = ""


class Metrics(msgspec.Struct, frozen=True, kw_only=True):
    """The Prometheus endpoint of each node, with `/health` and `/ready`."""

    enabled: Annotated[bool, flag("Serve metrics.")] = True
    host: Annotated[str, text(
        "Address to listen on. The default is reachable from this machine only.",
    )] = limits.HOST_DEFAULT
    port: Annotated[int, count(
        "Port of the sequencer's process. Brokers use the next ports, then replicas. Standby sequencers begin 64 ports "
        "after the first replica. 0: free ports.", 0, 65_535,
    )] = 0


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """A complete configuration, with one attribute per section."""

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
"""All keys by full name, such as `broker.port`, in the order of the reference page."""


# --- values that must fit together ------------------------------------------------------------------------------------
EVERY_ADDRESS: Final = frozenset({"", "0.0.0.0", "::"})
"""Addresses on which a broker can listen, and to which no client can connect."""

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
        "advertised ports need fixed ports to listen on: set broker.port",
    ),
    Relation(
        ("broker.host", "broker.advertised_host"),
        lambda host, advertised: host not in EVERY_ADDRESS or advertised not in EVERY_ADDRESS,
        "clients need an address to connect to: set broker.advertised_host (--advertised-host) or broker.host (--host) "
        "to an address of this machine",
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
    "cluster.name": "a cluster is identified by its folder (cluster.data_dir) and its id",
    "cxl.numa_node": "mount cluster.fabric_dir with the memory policy you want, and pin processes with cluster.pin",
    "sequencer.mode": _ARRAYS + "; there are no modes",
    "sequencer.collectors": _ARRAYS + "; there are no collectors",
    "sequencer.num_shards": _ARRAYS + "; it has no shards",
    "sequencer.spsc_queue_capacity": _ARRAYS + "; brokers' pending rings (fabric.pending_slots) are the only queues",
    "ordering.order5_enabled": "order 5 is always available; each topic chooses its order",
    "recovery.checkpoint_interval_sec": "checkpoints depend on written entries, not on time, so a takeover is bounded",
    "recovery.checkpoint_location": "checkpoints are in the fabric, like the entries that they cover",
    "recovery.goi_replay_entries": "a takeover replays the entries after the newest checkpoint, which always exists",
    "safety.goi_wraparound_high_pct": "an order slot is reused only when a checkpoint covers it; brokers stop at "
    "broker.water_high",
    "safety.goi_wraparound_low_pct": "see safety.goi_wraparound_high_pct; brokers continue at broker.water_low",
    "safety.stuck_slot_timeout_sec": "a broker publishes only complete slots, so no slot is ever stuck",
    "safety.committed_seq_reconcile_sec": "one writer writes a contiguous index, so there is nothing to reconcile",
    "replication.factor": _REPLICAS,
    "network.io_threads": "a broker has one event loop; run more brokers (cluster.brokers) instead of more threads",
    "EMBARCADERO_ACK_DRAIN_US": "a doorbell wakes brokers when there are acks to send",
    "TOTAL_MESSAGE_SIZE": _BENCH,
    "NUM_ITERATIONS": _BENCH,
}
"""Old names without a key, and the reason."""

STANDS_FOR: Final = {name: key for key in KEYS.values() for name in key.rule.stands_for}
"""Old names with a key."""

SEEDS: Final = {name: f"use {key}" for name, key in STANDS_FOR.items() if name != str(key)} | {
    name: f"it was removed: {reason}" for name, reason in GONE.items()
}
"""The hint for each old name."""
