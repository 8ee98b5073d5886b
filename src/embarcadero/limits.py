"""Every maximum, size and timeout, with its unit in its name. Relations between them are checked at import."""

from __future__ import annotations

from embarcadero.errors import invariant

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

# --- wire -------------------------------------------------------------------------------------------------------------
FRAME_BYTES_MAX = 8 * MIB  # payload of one batch frame
RECORD_BYTES_MAX = 4 * MIB
RECORD_OVERHEAD_BYTES = 32  # of a record in a batch: offsets and time stamp
TAIL_HOLES_MAX = 1_000  # spans of seqs that restarts passed over, in one answer: the newest
CONTROL_BYTES_MAX = 512 * KIB  # one control message; a list of all topics with the longest names fits
HELLO_BYTES_MAX = 4 * KIB  # all that a peer may make us hold before its hello is done
HELLO_TIMEOUT_S = 2.0
FRAME_TIMEOUT_S = 30.0  # a batch that has taken this long to arrive is given up
RECORDS_PER_BATCH_MAX = 1_000_000
DECODED_BYTES_MAX = 64 * MIB  # what the buffers of a batch may unpack to, in all
BATCH_BUFFERS_MAX = 16_384  # Arrow buffers in a batch, and columns with those within them
LIST_ENTRIES_MAX = FRAME_BYTES_MAX  # in all lists and maps of a batch: one for each byte of the largest frame
HEADERS_PER_BATCH_MAX = FRAME_BYTES_MAX // 8  # in all records of a batch without a schema; each has 8 bytes of offsets
ACKS_PER_FRAME_MAX = 65_536
REFERENCES_WAITING_MAX = 1_024  # batches of one connection that wait for files of staged batches
SCRATCH_BYTES = 64 * KIB  # receive buffer shared by all connections of one event loop
FETCH_BYTES_MAX = 32 * MIB
FETCH_BYTES_DEFAULT = 8 * MIB
FETCH_WAIT_MS_MAX = 30_000
FETCH_ENTRIES_MAX = 4_096
FETCHES_PARKED_PER_CONNECTION_MAX = 256
PIECES_MAX = 4_096  # of a span that is measured, in one answer
SEND_QUEUE_BYTES_MAX = 64 * MIB  # a peer that does not read is disconnected above this
UNREAD_BYTES_MAX = 256 * MIB  # answers of one broker that its clients have not read
UNREAD_S_MAX = 5.0  # a client that reads no answer for this long is disconnected, if others wait for the memory
UNREAD_PAUSE_BYTES = 1 * MIB  # above this, requests of a client that does not read are not taken
FETCH_WAIT_MS_DEFAULT = 5_000
CONNECTIONS_PER_BROKER_MAX = 10_000
HOST_DEFAULT = "127.0.0.1"  # reachable from this machine only
PORT_DEFAULT = 9_092
FREED_BYTES_KEPT = 64 * MIB  # by a process of a cluster, for what it copies next
FILES_SPARE = 512  # open files that a process keeps for everything but connections: a region is one
FILES_PER_REPLICA = 16_384  # open files that one may need at worst: some for each range that is not complete

# --- names and counts -------------------------------------------------------------------------------------------------
TOPIC_NAME_CHARS_MAX = 249
SESSION_NAME_BYTES_MAX = 255
TOPICS_MAX = 1_024
LANES_MAX = 4_096  # lanes are numbered for life; deleted topics leave theirs behind
BROKER_LANES_FIRST = LANES_MAX  # lanes of brokers (orders 0 and 1) are numbered from here on, never twice
BROKER_LANES_KEPT_MAX = 64  # of a topic: lanes of which nothing is left to read, but whose end is still told
RANGES_LISTED_MAX = 512  # of a topic that is described: the newest
LANES_LISTED_MAX = 1_024  # in one list of topics; `describe` tells them all
BROKERS_MAX = 64
BROKERS_DEFAULT = 4
CANDIDATES_MAX = 16  # sequencers that stand for election; one of them reigns
STANDBYS_DEFAULT = 1
PARTITIONS_MAX = 65_535
SESSIONS_PER_TOPIC_MAX = 100_000
SESSIONS_PER_CONNECTION_MAX = 1_024  # of order 1: whose turn a broker remembers; the one that came first makes room
SCHEMA_BYTES_MAX = 64 * KIB  # a topic's newest schema as an Arrow message; older versions are its first columns
SCHEMA_COLUMNS_MAX = 1_024  # so also of versions: each adds a column
SCHEMA_DEPTH_MAX = 16  # types within types
SCHEMA_ROW_BYTES_MAX = 64 * KIB  # of a row, in all columns of fixed width: also nulls in records of before a column
REGION_HANDLES = 65_535
READER_NAME_BYTES_MAX = 255
READER_LANES_MAX = 1_024  # of one reader of a topic of order 0 or 1
READERS_PER_TOPIC_MAX = 1_000  # of which the place is kept; the one that was silent for longest goes first
READER_KEPT_S = 86_400  # the place of a reader that was silent for so long is forgotten
READER_NOTES_S = 1.0  # a broker writes the places of readers to the store at most this often
READERS_ANSWER_BYTES_MAX = 256 * KIB  # about; of very many readers the newest are told

# --- ordering ---------------------------------------------------------------------------------------------------------
SESSION_SEQUENCE_MAX = (1 << 62) - 1  # far from where 64-bit sums would wrap
SESSION_WINDOW = 256  # sequences of a session that may be unsettled at once; a power of two
HELD_PER_SESSION_MAX = SESSION_WINDOW - 1
HELD_TOTAL_MAX = 65_536
ORDER_DEFAULT = 2
ROUND_ENTRIES_MAX = 16_384  # entries taken from all brokers in one round
GAP_TIMEOUT_FENCE_MS = 30_000
GAP_TIMEOUT_SKIP_MS = 5
GAP_TIMEOUT_MS_MAX = 86_400_000
GAP_TIMEOUT_DEPARTED_MS = 1_000  # once the publisher has closed all its connections
SESSION_TTL_S = 86_400
SESSION_TTL_S_MAX = 366 * 86_400
FENCED_KEPT_S = 3_600  # a fenced session can be continued for this long, if its row is not needed before
GATHER_MS_MAX = 8.0  # while all publishers have much in flight: a round costs the same for one entry or a hundred
CONTROLS_PER_ROUND_MAX = 256  # session requests taken in one round; they cost a thousand times what a batch costs
EXPIRED_PER_ROUND_MAX = 256  # sessions whose time is over, in one round and lane

# --- configuration ----------------------------------------------------------------------------------------------------
CONFIG_BYTES_MAX = 256 * KIB  # of a file; far more than all keys with comments
CONFIG_BRACKETS_MAX = 256  # that a file opens: the YAML parser's time grows with the square of how deep they are

# --- fabric -----------------------------------------------------------------------------------------------------------
LINE_BYTES = 64
FRONTIER_BYTES = 128  # two lines: the prefetcher pulls neighbours
PENDING_SLOTS = 8_192
ORDER_SLOTS = 131_072
LOG_BYTES = 256 * MIB
CHUNK_BYTES = 16 * MIB
CHUNKS_MAX = 1_024
EPOCHS_MAX = 65_536
EPOCHS_AHEAD_MAX = 4  # epochs that may be handed out beyond the last started one
PAST_GENERATIONS_MAX = 16  # lost fabrics whose mirrors are kept until all lanes are recovered
DEAD_LOG_BYTES_MAX = 1 * GIB  # regions of dead incarnations kept for readers

# --- replicas ---------------------------------------------------------------------------------------------------------
REPLICAS_MAX = 64  # of a cluster
REPLICAS_DEFAULT = 1
COPIES_MAX = 7  # of a topic
COPIES_DEFAULT = 3  # of a topic that does not say, if so many replicas are live
RETENTION_BYTES_MAX = 1 << 60
RETENTION_S_MAX = 100 * 366 * 86_400
DURABLE_LINES = 65_536  # (lane, range) pairs that one replica incarnation may ever count; then it begins anew
RANGE_LINES = 65_536  # lanes with ranges in one epoch
CEILING_AHEAD = 1 << 22  # positions reserved ahead of ordering, in batches
CEILING_AHEAD_SEQ = CEILING_AHEAD * 1_024  # and in records
CEILING_AHEAD_HANDLES = 1 << 16  # handles of sessions reserved ahead of opening; more if the session table is larger
REPAIR_BYTES_PER_S = 256 * MIB  # copied from other replicas to complete closed ranges
REPAIR_STEP_BYTES = 4 * MIB  # at once
KEPT_SHARE_CREDIT = 0.375  # of a broker's log, kept for disks: above, who feeds a lane that is behind gets no credit
KEPT_SHARE_MAX = 0.625  # above, its batches are answered BACKPRESSURE; what was granted fits in between
DURABLE_ACKS_PER_CONNECTION_MAX = 65_536  # acks of one client that wait for disks
WARM_JOBS_MAX = 2  # reads of segment files that one broker does at once
WARM_JOBS_QUEUED_MAX = 1_024  # of one connection
WARM_READERS_MAX = 64  # open readers of ranges that one broker keeps for the next read
WARM_AHEAD_BYTES_MAX = 64 * MIB  # read ahead for all readers of one broker
STORE_CALLS_MAX = 1  # of clients, that one broker makes at once
STORE_CALLS_PER_CONNECTION_MAX = 8  # with those that wait for their turn; further requests stay unparsed
TABLE_JOBS_MAX = 2  # reads of tables that one broker does at once: they wait for an object store, not for a disk
TABLE_CACHE_BYTES = 64 * MIB  # row groups that one process keeps decoded for the next read of the table
TABLE_FOOTERS_MAX = 1_024  # footers of files of tables that it keeps
TABLE_GROUP_BYTES_MAX = 256 * MIB  # a row group that a broker reads; readers of larger ones read the table themselves
TABLE_PIECE_BYTES = 16 * MIB  # text and bytes that are copied out of the dictionaries of a row group at once
TABLE_RETRY_S = 5.0  # a reader tries again for this long before it reports that a table can't be read
BROKER_SILENT_S = 10.0  # a broker whose heart stands still for this long is replaced; longer than a wait for the store
REPLICA_SILENT_S = 3.0  # a replica whose heartbeat stands still for this long is replaced in its ranges
REPLICA_LAG_ENTRIES_MAX = 65_536  # a replica further behind than this, while others keep up, is late
REPLICA_LAG_SHARE = 0.5  # likewise, as a share of the order ring
REPLICA_LAG_S = 3.0  # one that is late for this long is replaced
REPLICA_LATE_S = 60.0  # and for this long it gets no range of that lane
RANGE_GRACE_S = 1.0  # how long fewer replicas than asked for are put up with before a range changes because of it
RANGE_CHANGES_SHARE = 50  # of all lanes, one in so many may change its range at a time, if nothing waits for that
REPLACE_AFTER_S = 600.0  # sealed ranges of a replica that is dead for this long are copied to another one
RANGE_RETRY_S = 0.2  # between two attempts to find a better set of replicas for one range
CHECKPOINT_S = 5.0  # between two checkpoints of a lane with replicas that grows
SEALS_PER_LOOK_MAX = 4  # a seal is a transaction of the store: ordering goes on in between
RECOVERY_REPLIES_S = 1.0  # once enough replicas have told how far they are, the others may still do so for this long
RECOVERY_STUCK_S = 20.0  # without a step ahead in copying: then what surely never was durable is given up
RECOVERY_RETRY_S = 0.5  # between two attempts to read what replicas have on disk
DRAIN_DURABLE_S_MAX = 8.0  # of DRAIN_S_MAX, for everything ordered to be durable
DRAIN_CHECKPOINT_S_MAX = 1.0  # and for the last checkpoints to be on a disk

# --- tier -------------------------------------------------------------------------------------------------------------
TIER_LEASE_S = 30.0  # a tiering job that is silent for this long may be replaced by another one
TIER_TEXT_BYTES_MAX = 2 * KIB  # a location, a table's identifier, the name of a holder
TIER_HOLES_MAX = 1_000  # of one lane, that losses of memory left in its table: the newest
TIER_LANES_MAX = 4_096  # of one topic: lanes that its table has something of
TIER_FILE_BYTES = 128 * MIB  # payloads in one file of a table
TIER_FILES_MAX = 64  # written before they are committed
TIER_ROW_GROUP_BYTES = 16 * MIB  # payloads in one row group
TIER_GROUP_DECODED_BYTES = 32 * MIB  # its columns, decoded, unless one batch has more: what a reader has in memory
TIER_SPARK_BYTES = 256 * MIB  # payloads of a topic that wait: with the engine `auto`, Spark writes them from here on
TIER_SPARK_IDLE_S = 300.0  # a Spark session that wrote nothing for this long is ended: its JVM takes a GB
TIER_INTERVAL_S = 60.0  # between two looks for what can be tiered
TIER_ORPHANS_S = 3_600.0  # metadata files that nothing names are left alone for this long, and old snapshots
TIER_SNAPSHOTS_KEPT = 100  # of a table, however old
HOT_RETENTION_S = 86_400  # what is in the table stays with the brokers for this long

# --- storage ----------------------------------------------------------------------------------------------------------
SEGMENT_BYTES = 64 * MIB
SEGMENT_BYTES_MAX = 4 * GIB - 64 * MIB  # positions in a segment fit 32 bits
SEGMENT_AGE_S = 3_600.0  # an older segment makes room for the next, so that retention by age can drop it
INDEX_EVERY_BYTES = 4 * KIB  # at most one index entry for so many bytes of log
SECTOR_BYTES = 512  # what a disk writes whole or not at all
PAGE_BYTES = 4 * KIB  # what the system caches whole or not at all
UNCACHED_BYTES_MIN = 1 * MIB  # synced bytes that leave the page cache at once; lone records are not worth the call
WRITE_PARTS_MAX = 1_024  # buffers in one gathered write
SCAN_BYTES = 4 * MIB  # read at once when a whole segment is looked through
READ_BYTES = 4 * MIB  # read and checked at once by readers: more would leave the processor's cache
LOCATE_BYTES = 16 * KIB  # read at once when a position is looked for
SESSIONS_FILE_BYTES_MAX = 256 * MIB  # an on-disk checkpoint of sessions
SCRUB_BYTES_PER_S = 8 * MIB
SCRUB_ROUND_S = 10.0  # a round over all segments begins at most this often: little data is not read all the time
SCRUB_STEP_BYTES = 1 * MIB  # checked at once; a step is short beside everything else that the disk does

# --- flow -------------------------------------------------------------------------------------------------------------
WATER_HIGH = 0.80
WATER_LOW = 0.50
STALLED_S = 1.0  # a batch that is under way for longer is stalled: such batches keep a small part of the log only
ARRIVING_SHARE = 0.5  # of a broker's log, for batches under way from one address
SESSIONS_OPEN_PER_CONNECTION_MAX = 12_288  # that count as connected; the one that came first makes room
SESSIONS_PER_PEER_SHARE = 0.5  # of a topic's session table, for sessions opened from one address
ABANDONED_S = 5.0  # a session without a connection for this long makes room for another one, if the table is full
CREDIT_BYTES = 16 * MIB  # credit of one connection
BACKPRESSURE_AFTER_S = 10.0

# --- client -----------------------------------------------------------------------------------------------------------
ACK_DEFAULT = 1
BATCH_BYTES_DEFAULT = 1 * MIB
LINGER_MS_DEFAULT = 2.0
WINDOW_BYTES_DEFAULT = 64 * MIB
RESEND_AFTER_S = 3.0  # a broker silent for this long with batches of ours is given up
DELIVERY_TIMEOUT_S = 120.0
CONNECT_TIMEOUT_S = 5.0
REQUEST_TIMEOUT_S = 30.0  # in that time a broker that hangs is closed, and the ends of its lanes are known again
CLOSE_TIMEOUT_S = 30.0  # for the outcomes of what was sent before
EXIT_FLUSH_S = 10.0  # for publishers that were not closed, at the end of a program or of an event loop
CLOSE_INTERRUPTED_S = 2.0  # likewise, when Ctrl-C or a cancellation ended the block
PREFETCH_FETCHES = 2

# --- Spark ------------------------------------------------------------------------------------------------------------
SPARK_TASK_BYTES = 32 * MIB  # payload that one task reads, if there is much
SPARK_TASK_BYTES_MIN = 4 * MIB  # and if there is little: smaller tasks cost more than they save
SPARK_TASKS_USUAL = 4  # into so many tasks little is cut, if none is too small then; or a multiple of the cores
SPARK_RECONNECT_S = 30.0  # so long a task waits for a cluster that is down
SPARK_TASKS_MAX = 4_096  # of one read or micro-batch: their ends are part of its offset
STAGED_BATCHES_BITS = 20  # of a sequence: which batch of an epoch it is; the rest counts the epochs
STAGED_DIGEST_BITS = 28  # of a sequence: which manifest was decided; the rest counts the epochs
STAGED_INLINE_BYTES = 256 * KIB  # so little of a task travels to the driver instead of being staged
STAGED_INLINE_ALL_BYTES = 2 * MIB  # and so little of all tasks travels in the manifest
STAGED_FENCED_TRIES = 12  # how often a session may be taken over from a committer while nothing is published
STAGED_SILENT_S = 86_400.0  # what a write staged is given up after so long without a word of it
STAGED_TTL_S_MIN = 600  # of a topic's sessions: the decision on a write must outlive the death of its committer
STAGED_PATIENCE_S = 600.0  # so long a commit waits for a cluster that is away
WRITE_NAME_BYTES_MAX = 128  # names of sessions have it, and more
SPARK_ROWS_BYTES = 4 * MIB  # payload that becomes one Arrow batch for Spark, unless a batch is larger

# --- waiting ----------------------------------------------------------------------------------------------------------
IDLE_WAIT_S_MAX = 0.05  # longest sleep of a poller; a doorbell usually wakes it sooner
STORE_POLL_S = 0.05
STORE_BUSY_S = 5.0  # longest wait for another process's transaction
HEARTBEAT_S = 0.1
STOPPED_S = 15.0  # a process that is stopped for this long is killed: while it holds the store's lock, all others wait
PEER_SILENT_S = 30  # a connection on which nothing comes for this long is asked for a sign of life, by the system
PEER_PROBE_S = 10  # and again after this long
PEER_PROBES = 3  # and given up after so many without an answer
SILENT_S = 2.0  # a role whose heartbeat stands still for this long is not ready
TAKEOVER_AFTER_S = 2.0  # a standby waits this long for a heartbeat, by its own clock, unless it sees the process gone
SEQUENCER_NICE = -10
STANDBY_LOOKS = 8  # how often it looks in that time
STANDBY_SPARE_BYTES_MAX = 128 * MIB  # regions that a standby has ready, so that a takeover need not make them
HAND_OVER_S_MAX = 10.0  # a planned move that has not happened by then is called off
SETTLE_S_MAX = 1.5  # a broker that leaves waits this long for the outcomes of what it took
DRAIN_S_MAX = 10.0  # a sequencer that leaves waits this long for replicas to have on disk what is ordered
GOODBYE_S_MAX = 0.5  # and this long for its clients to hang up

# --- watching ---------------------------------------------------------------------------------------------------------
WATCH_REQUEST_BYTES_MAX = 8 * KIB  # one HTTP request to a node's metrics port
WATCH_REQUEST_S_MAX = 5.0
WATCH_CONNECTIONS_MAX = 64
LOG_REPEATS_MAX = 5  # equal events a role may log within LOG_REPEATS_S; the rest is counted
LOG_REPEATS_S = 10.0

invariant(SESSION_WINDOW & (SESSION_WINDOW - 1) == 0, "the session window is a power of two")
invariant(FRAME_BYTES_MAX <= CHUNK_BYTES, "a batch fits into one chunk of the log")
invariant(CHUNK_BYTES // LINE_BYTES * CHUNKS_MAX <= 1 << 32, "a location fits 32 bits")
invariant(SCHEMA_BYTES_MAX * 2 <= CONTROL_BYTES_MAX, "a topic with its schema fits a control message")
invariant(SCHEMA_COLUMNS_MAX * 32 <= SCHEMA_ROW_BYTES_MAX, "a schema may have any numbers, times and decimals")
invariant(RECORD_BYTES_MAX < FRAME_BYTES_MAX, "a record fits a frame")
invariant(ROUND_ENTRIES_MAX * 4 <= ORDER_SLOTS, "a round is a small part of the order ring")
invariant(SEGMENT_BYTES <= SEGMENT_BYTES_MAX, "a segment of the usual size is allowed")
invariant(SEGMENT_BYTES_MAX + FRAME_BYTES_MAX + 2 * LINE_BYTES < 1 << 32, "positions in a segment fit 32 bits")
invariant(HELLO_BYTES_MAX <= 4 * KIB, "a stranger can't make us hold more than 4 KiB")
invariant(STOPPED_S > BROKER_SILENT_S, "a stopped broker is closed before it is killed, if the store can be written")
invariant(
    REQUEST_TIMEOUT_S > BROKER_SILENT_S + 3 * STORE_BUSY_S,
    "a question is answered though a broker hangs, and the store is locked for once, and left alone then",
)
invariant(DRAIN_DURABLE_S_MAX + DRAIN_CHECKPOINT_S_MAX < DRAIN_S_MAX, "a clean stop seals before its time is over")
