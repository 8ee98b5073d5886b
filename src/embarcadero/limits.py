"""Maximums, sizes and timeouts, with the unit in each name. Relations between them are checked at import."""

from __future__ import annotations

from embarcadero.errors import invariant

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

# --- wire -------------------------------------------------------------------------------------------------------------
FRAME_BYTES_MAX = 8 * MIB  # payload of one batch frame
RECORD_BYTES_MAX = 4 * MIB
RECORD_OVERHEAD_BYTES = 32  # of a record in a batch: offsets and timestamp
TAIL_HOLES_MAX = 1_000  # spans of seqs that restarts skipped, in one answer: the newest
CONTROL_BYTES_MAX = 512 * KIB  # one control message; a list of all topics with the longest names fits
HELLO_BYTES_MAX = 4 * KIB  # memory that a peer can occupy before its Hello is complete
HELLO_TIMEOUT_S = 2.0
FRAME_TIMEOUT_S = 30.0  # if a batch takes longer to arrive, its connection is closed
RECORDS_PER_BATCH_MAX = 1_000_000
DECODED_BYTES_MAX = 64 * MIB  # unpacked size of all buffers of a batch
BATCH_BUFFERS_MAX = 16_384  # Arrow buffers in a batch, and columns including nested ones
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
PIECES_MAX = 4_096  # in one answer to Measure
SEND_QUEUE_BYTES_MAX = 64 * MIB  # a peer that does not read is disconnected above this
UNREAD_BYTES_MAX = 256 * MIB  # answers of one broker that its clients have not read
UNREAD_S_MAX = 5.0  # a client that reads no answer for this time is disconnected, if others wait for the memory
UNREAD_PAUSE_BYTES = 1 * MIB  # above this, the broker takes no requests of a client that does not read
FETCH_WAIT_MS_DEFAULT = 5_000
CONNECTIONS_PER_BROKER_MAX = 10_000
HOST_DEFAULT = "127.0.0.1"  # reachable from this machine only
PORT_DEFAULT = 9_092
FREED_BYTES_KEPT = 64 * MIB  # memory that a process of a cluster keeps for its next copies
FILES_SPARE = 512  # open files that a process reserves for everything except connections: a region is one
FILES_PER_REPLICA = 16_384  # open files of a replica in the worst case: some for each incomplete range

# --- names and counts -------------------------------------------------------------------------------------------------
TOPIC_NAME_CHARS_MAX = 249
SESSION_NAME_BYTES_MAX = 255
TOPICS_MAX = 1_024
LANES_MAX = 4_096  # lane numbers are never reused, also after a topic is deleted
BROKER_LANES_FIRST = LANES_MAX  # lanes of brokers (orders 0 and 1) are numbered from here on, never twice
BROKER_LANES_KEPT_MAX = 64  # of a topic: lanes without readable records whose end is still reported
RANGES_LISTED_MAX = 512  # of a described topic: the newest
LANES_LISTED_MAX = 1_024  # in one list of topics; `describe` returns all
BROKERS_MAX = 64
BROKERS_DEFAULT = 4
CANDIDATES_MAX = 16  # sequencers: the leader and its standbys
STANDBYS_DEFAULT = 1
PARTITIONS_MAX = 65_535
SESSIONS_PER_TOPIC_MAX = 100_000
SESSIONS_PER_CONNECTION_MAX = 1_024  # of order 1: sessions whose turn a broker remembers; the oldest is forgotten first
SCHEMA_BYTES_MAX = 64 * KIB  # a topic's newest schema as an Arrow message; older versions are its first columns
SCHEMA_COLUMNS_MAX = 1_024  # also the limit of versions: each adds a column
SCHEMA_DEPTH_MAX = 16  # nesting of types
SCHEMA_ROW_BYTES_MAX = 64 * KIB  # of a row, in all columns of fixed width: also nulls in records older than a column
REGION_HANDLES = 65_535
READER_NAME_BYTES_MAX = 255
READER_LANES_MAX = 1_024  # of one reader of a topic of order 0 or 1
READERS_PER_TOPIC_MAX = 1_000  # readers with a stored position; the reader with the oldest report is removed first
READER_KEPT_S = 86_400  # a reader without a report for this time is removed
READER_NOTES_S = 1.0  # shortest interval at which a broker writes positions of readers to the store
READERS_ANSWER_BYTES_MAX = 256 * KIB  # approximate; of very many readers the newest are listed

# --- ordering ---------------------------------------------------------------------------------------------------------
SESSION_SEQUENCE_MAX = (1 << 62) - 1  # small enough that 64-bit sums do not overflow
SESSION_WINDOW = 256  # unsettled sequences of a session; a power of two
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
FENCED_KEPT_S = 3_600  # a fenced session can be continued for this time, if its row is not needed earlier
GATHER_MS_MAX = 8.0  # while all publishers have several batches in flight: a round costs the same for 1 or 100 entries
CONTROLS_PER_ROUND_MAX = 256  # session requests in one round; they cost a thousand times more than a batch
EXPIRED_PER_ROUND_MAX = 256  # expired sessions, in one round and lane

# --- configuration ----------------------------------------------------------------------------------------------------
CONFIG_BYTES_MAX = 256 * KIB  # of a file; much more than all keys with comments
CONFIG_BRACKETS_MAX = 256  # open brackets in a file: the YAML parser's time grows with the square of their depth

# --- fabric -----------------------------------------------------------------------------------------------------------
LINE_BYTES = 64
FRONTIER_BYTES = 128  # two lines: the prefetcher pulls neighbours
PENDING_SLOTS = 8_192
ORDER_SLOTS = 131_072
LOG_BYTES = 256 * MIB
CHUNK_BYTES = 16 * MIB
CHUNKS_MAX = 1_024
EPOCHS_MAX = 65_536
EPOCHS_AHEAD_MAX = 4  # epochs that may be assigned above the last started one
PAST_GENERATIONS_MAX = 16  # lost fabrics whose mirrors are kept until all lanes are recovered
DEAD_LOG_BYTES_MAX = 1 * GIB  # regions of dead incarnations kept for readers

# --- replicas ---------------------------------------------------------------------------------------------------------
REPLICAS_MAX = 64  # of a cluster
REPLICAS_DEFAULT = 1
COPIES_MAX = 7  # of a topic
COPIES_DEFAULT = 3  # of a topic by default, if this number of replicas is live
RETENTION_BYTES_MAX = 1 << 60
RETENTION_S_MAX = 100 * 366 * 86_400
DURABLE_LINES = 65_536  # (lane, range) pairs of one replica incarnation; then the replica starts another incarnation
RANGE_LINES = 65_536  # lanes with ranges in one epoch
CEILING_AHEAD = 1 << 22  # positions reserved ahead of ordering, in batches
CEILING_AHEAD_SEQ = CEILING_AHEAD * 1_024  # and in records
CEILING_AHEAD_HANDLES = 1 << 16  # handles of sessions reserved ahead of opening; more if the session table is larger
REPAIR_BYTES_PER_S = 256 * MIB  # copied from other replicas to complete closed ranges
REPAIR_STEP_BYTES = 4 * MIB  # in one step
KEPT_SHARE_CREDIT = 0.375  # of a broker's log, kept for disks: above, publishers into a slow lane get no credit
KEPT_SHARE_MAX = 0.625  # above, their batches get BACKPRESSURE; granted credit fits between the two
DURABLE_ACKS_PER_CONNECTION_MAX = 65_536  # acks of one client that wait for disks
WARM_JOBS_MAX = 2  # concurrent reads of segment files of one broker
WARM_JOBS_QUEUED_MAX = 1_024  # of one connection
WARM_READERS_MAX = 64  # open readers of ranges that one broker keeps for the next read
WARM_AHEAD_BYTES_MAX = 64 * MIB  # read-ahead for all readers of one broker
STORE_CALLS_MAX = 1  # concurrent store calls for clients, of one broker
STORE_CALLS_PER_CONNECTION_MAX = 8  # including waiting ones; further requests are not parsed
TABLE_JOBS_MAX = 2  # concurrent reads of tables of one broker: they wait for an object store, not for a disk
TABLE_CACHE_BYTES = 64 * MIB  # decoded row groups that one process keeps for the next read of the table
TABLE_FOOTERS_MAX = 1_024  # footers of table files that it keeps
TABLE_GROUP_BYTES_MAX = 256 * MIB  # a row group that a broker reads; clients read larger ones themselves
TABLE_PIECE_BYTES = 16 * MIB  # text and bytes that are copied out of the dictionaries of a row group in one step
TABLE_RETRY_S = 5.0  # a reader retries for this time before it reports that it cannot read a table
BROKER_SILENT_S = 10.0  # a broker whose heartbeat stops for this time is replaced; longer than a wait for the store
REPLICA_SILENT_S = 3.0  # a replica whose heartbeat stops for this time is replaced in its ranges
REPLICA_LAG_ENTRIES_MAX = 65_536  # a replica with a larger lag, while others keep up, is late
REPLICA_LAG_SHARE = 0.5  # likewise, as a share of the order ring
REPLICA_LAG_S = 3.0  # a replica that is late for this time is replaced
REPLICA_LATE_S = 60.0  # and gets no range of that lane for this time
RANGE_GRACE_S = 1.0  # how long a range may have too few replicas before it changes
RANGE_CHANGES_SHARE = 50  # one in 50 lanes may change its range at the same time, if the change is not urgent
REPLACE_AFTER_S = 600.0  # sealed ranges of a replica that is dead for this time are copied to another replica
RANGE_RETRY_S = 0.2  # between two attempts to find a better set of replicas for one range
CHECKPOINT_S = 5.0  # between two checkpoints of a growing lane with replicas
SEALS_PER_LOOK_MAX = 4  # a seal is a transaction of the store: ordering continues between seals
RECOVERY_REPLIES_S = 1.0  # how long recovery waits for more replicas after enough of them have replied
RECOVERY_STUCK_S = 20.0  # without progress in copying: then records that were never durable are given up
RECOVERY_RETRY_S = 0.5  # between two attempts to read the disks of replicas
DRAIN_DURABLE_S_MAX = 8.0  # of DRAIN_S_MAX, until all ordered records are durable
DRAIN_CHECKPOINT_S_MAX = 1.0  # and until the last checkpoints are on a disk

# --- tier -------------------------------------------------------------------------------------------------------------
TIER_LEASE_S = 30.0  # a tiering job that is silent for this time may be replaced by another job
TIER_TEXT_BYTES_MAX = 2 * KIB  # a location, a table's identifier, the name of a holder
TIER_HOLES_MAX = 1_000  # of one lane, from losses of memory, in its table: the newest
TIER_LANES_MAX = 4_096  # of one topic: lanes with records in its table
TIER_FILE_BYTES = 128 * MIB  # payloads in one file of a table
TIER_FILES_MAX = 64  # written before they are committed
TIER_ROW_GROUP_BYTES = 16 * MIB  # payloads in one row group
TIER_GROUP_DECODED_BYTES = 32 * MIB  # its decoded columns, unless one batch has more: the memory of a reader
TIER_SPARK_BYTES = 256 * MIB  # waiting payloads of a topic: above this, the engine `auto` uses Spark
TIER_SPARK_IDLE_S = 300.0  # a Spark session that is idle for this time is ended: its JVM uses a GB
TIER_INTERVAL_S = 60.0  # between two looks for records to tier
TIER_ORPHANS_S = 3_600.0  # unreferenced metadata files, and old snapshots, are kept for this time
TIER_SNAPSHOTS_KEPT = 100  # of a table, of any age
HOT_RETENTION_S = 86_400  # records in the table stay at the brokers for this time

# --- storage ----------------------------------------------------------------------------------------------------------
SEGMENT_BYTES = 64 * MIB
SEGMENT_BYTES_MAX = 4 * GIB - 64 * MIB  # positions in a segment fit 32 bits
SEGMENT_AGE_S = 3_600.0  # an older segment is closed, so that retention by age can remove it
INDEX_EVERY_BYTES = 4 * KIB  # at most one index entry for this number of bytes
SECTOR_BYTES = 512  # unit of atomic writes of a disk
PAGE_BYTES = 4 * KIB  # unit of the system's page cache
UNCACHED_BYTES_MIN = 1 * MIB  # synced bytes that are dropped from the page cache in one call; less is not worth it
WRITE_PARTS_MAX = 1_024  # buffers in one gathered write
SCAN_BYTES = 4 * MIB  # read in one step of a scan over a whole segment
READ_BYTES = 4 * MIB  # read and checked in one step by readers: more would not fit the processor's cache
LOCATE_BYTES = 16 * KIB  # read in one step of a search for a position
SESSIONS_FILE_BYTES_MAX = 256 * MIB  # an on-disk checkpoint of sessions
SCRUB_BYTES_PER_S = 8 * MIB
SCRUB_ROUND_S = 10.0  # shortest interval between rounds over all segments: little data is not read all the time
SCRUB_STEP_BYTES = 1 * MIB  # checked in one step, which is short compared to other work of the disk

# --- flow -------------------------------------------------------------------------------------------------------------
WATER_HIGH = 0.80
WATER_LOW = 0.50
STALLED_S = 1.0  # a batch that takes longer to arrive is stalled: such batches may use only a small part of the log
ARRIVING_SHARE = 0.5  # of a broker's log, for arriving batches from one address
SESSIONS_OPEN_PER_CONNECTION_MAX = 12_288  # sessions that count as connected; above that, the oldest does not count
SESSIONS_PER_PEER_SHARE = 0.5  # of a topic's session table, for sessions opened from one address
ABANDONED_S = 5.0  # if the table is full, a session without a connection for this time can be replaced
CREDIT_BYTES = 16 * MIB  # credit of one connection
BACKPRESSURE_AFTER_S = 10.0

# --- client -----------------------------------------------------------------------------------------------------------
ACK_DEFAULT = 1
BATCH_BYTES_DEFAULT = 1 * MIB
LINGER_MS_DEFAULT = 2.0
WINDOW_BYTES_DEFAULT = 64 * MIB
RESEND_AFTER_S = 3.0  # a connection whose broker owes an answer and is silent for this time is closed
DELIVERY_TIMEOUT_S = 120.0
CONNECT_TIMEOUT_S = 5.0
REQUEST_TIMEOUT_S = 30.0  # enough to close a broker that hangs, and to know the ends of its lanes again
CLOSE_TIMEOUT_S = 30.0  # for the outcomes of sent records
EXIT_FLUSH_S = 10.0  # for open publishers, at the end of a program or of an event loop
CLOSE_INTERRUPTED_S = 2.0  # likewise, when Ctrl-C or a cancellation ended the block
PREFETCH_FETCHES = 2

# --- Spark ------------------------------------------------------------------------------------------------------------
SPARK_TASK_BYTES = 32 * MIB  # payload of one task, for large reads
SPARK_TASK_BYTES_MIN = 4 * MIB  # and for small reads: smaller tasks cost more than they save
SPARK_TASKS_USUAL = 4  # tasks of a small read, or a multiple of the cores, if no task becomes too small
SPARK_RECONNECT_S = 30.0  # how long a task waits for a cluster that is down
SPARK_TASKS_MAX = 4_096  # of one read or micro-batch: their ends are part of its offset
STAGED_BATCHES_BITS = 20  # of a sequence: the number of a batch in its epoch; the other bits count the epochs
STAGED_DIGEST_BITS = 28  # of a sequence: the digest of the decided manifest; the other bits count the epochs
STAGED_INLINE_BYTES = 256 * KIB  # rows of a task up to this size travel to the driver instead of being staged
STAGED_INLINE_ALL_BYTES = 2 * MIB  # and rows of all tasks up to this size travel in the manifest
STAGED_FENCED_TRIES = 12  # how often a committer may lose its session while no batch is published
STAGED_SILENT_S = 86_400.0  # the staged batches of a write are given up after this time without a sign of life
STAGED_TTL_S_MIN = 600  # of a topic's sessions: the decision on a write must outlive the death of its committer
STAGED_PATIENCE_S = 600.0  # how long a commit waits for a cluster that is down
WRITE_NAME_BYTES_MAX = 128  # it is a part of session names
SPARK_ROWS_BYTES = 4 * MIB  # payload that becomes one Arrow batch for Spark, unless a batch is larger

# --- waiting ----------------------------------------------------------------------------------------------------------
IDLE_WAIT_S_MAX = 0.05  # longest sleep of a poller; a doorbell usually wakes it sooner
STORE_POLL_S = 0.05
STORE_BUSY_S = 5.0  # longest wait for another process's transaction
HEARTBEAT_S = 0.1
STOPPED_S = 15.0  # a process that is stopped for this time is killed: it may hold the store's lock and block all others
PEER_SILENT_S = 30  # the system probes a connection without traffic for this time
PEER_PROBE_S = 10  # interval of the probes
PEER_PROBES = 3  # probes without an answer after which the connection is closed
SILENT_S = 2.0  # a role whose heartbeat stops for this time is not ready
TAKEOVER_AFTER_S = 2.0  # a standby waits this long for a heartbeat, by its own clock, unless the process has ended
SEQUENCER_NICE = -10
STANDBY_LOOKS = 8  # how often it looks in that time
STANDBY_SPARE_BYTES_MAX = 128 * MIB  # regions that a standby has ready, so that a takeover need not create them
HAND_OVER_S_MAX = 10.0  # a planned hand-over that takes longer is cancelled
SETTLE_S_MAX = 1.5  # how long a leaving broker waits for the outcomes of its batches
DRAIN_S_MAX = 10.0  # how long a leaving sequencer waits until all ordered records are on the disks of replicas
GOODBYE_S_MAX = 0.5  # and until its clients disconnect

# --- watching ---------------------------------------------------------------------------------------------------------
WATCH_REQUEST_BYTES_MAX = 8 * KIB  # one HTTP request to a node's metrics port
WATCH_REQUEST_S_MAX = 5.0
WATCH_CONNECTIONS_MAX = 64
LOG_REPEATS_MAX = 5  # equal events that a role logs within LOG_REPEATS_S; further ones are counted
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
invariant(HELLO_BYTES_MAX <= 4 * KIB, "an unknown peer can occupy at most 4 KiB")
invariant(STOPPED_S > BROKER_SILENT_S, "a stopped broker is closed before it is killed, if the store can be written")
invariant(
    REQUEST_TIMEOUT_S > BROKER_SILENT_S + 3 * STORE_BUSY_S,
    "a request is answered although a broker hangs and the store is locked once",
)
invariant(DRAIN_DURABLE_S_MAX + DRAIN_CHECKPOINT_S_MAX < DRAIN_S_MAX, "a clean stop seals before its timeout")
