"""The steps of the protocol, by name: one table with the role of each step, and the facts that are true there.

Role code calls `steps.at(Step.X)` at each step. In production this does nothing. The simulator ends or pauses a process
there, and real processes stop there on request (node/steps.py). So tests can go through all steps, and show that a
process that crashes there, or wakes up there after it was deposed, changes nothing that other processes read. A step
is reached once per batch, round or rarer event, never once per record.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Self

SEQUENCER: Final = "sequencer"
BROKER: Final = "broker"
REPLICA: Final = "replica"


class Step(StrEnum):
    """A named point in the code of a role. The value is its name; `truth` is true at that point."""

    role: str
    truth: str

    def __new__(cls, name: str, role: str, truth: str) -> Self:
        step = str.__new__(cls, name)
        step._value_ = name
        step.role, step.truth = role, truth
        return step

    # --- taking over --------------------------------------------------------------------------------------------------
    TAKEOVER_EPOCH_GIVEN = "takeover.epoch-given", SEQUENCER, "the store has the epoch; no line of the fabric has it"
    TAKEOVER_FORESEEN = "takeover.foreseen", SEQUENCER, "lanes are prefetched; the predecessor may still add to them"
    TAKEOVER_EPOCH_OPEN = "takeover.epoch-open", SEQUENCER, "the epoch line is open: no process acts on earlier epochs"
    TAKEOVER_MARKS_READ = "takeover.marks-read", SEQUENCER, "only the predecessor's read-through watermarks are read"
    TAKEOVER_HELD_READ = "takeover.held-read", SEQUENCER, "and its reorder buffer"
    TAKEOVER_ANSWERS_READ = "takeover.answers-read", SEQUENCER, "and its results"
    TAKEOVER_READ = "takeover.read", SEQUENCER, "and the order ring of a lane; no entry of it is re-issued"
    TAKEOVER_REISSUED = "takeover.reissued", SEQUENCER, "all lanes are re-issued in the new leader's rings, flushed"
    TAKEOVER_HELD = "takeover.held", SEQUENCER, "and waiting batches are in the new leader's reorder buffer"
    TAKEOVER_ANSWERED = "takeover.answered", SEQUENCER, "and unread results are in its rings; it has not started"
    TAKEOVER_DECIDED = "takeover.decided", SEQUENCER, "the store has the start; no line of the fabric has it"
    TAKEOVER_STARTED = "takeover.started", SEQUENCER, "the start line is written; no doorbell was rung"
    TAKEOVER_SWEPT = "takeover.swept", SEQUENCER, "regions of epochs before the predecessor's are unlinked"
    # --- a round ------------------------------------------------------------------------------------------------------
    ROUND_TAKEN = "round.taken", SEQUENCER, "entries are read from pending rings; no outcome is decided"
    ROUND_ENTRIES = "round.entries", SEQUENCER, "order entries are flushed; results and frontiers are not written"
    ROUND_RESULTS = "round.results", SEQUENCER, "results are flushed; frontiers have not moved"
    ROUND_FRONTIERS = "round.frontiers", SEQUENCER, "frontiers moved; the reorder buffer is not saved"
    ROUND_HELD = "round.held", SEQUENCER, "the reorder buffer is saved; read-through watermarks are old"
    ROUND_READ_THROUGH = "round.read-through", SEQUENCER, "watermarks moved; free slots of the buffer are not cleared"
    # --- checkpoints, capacity, ceilings ------------------------------------------------------------------------------
    CHECKPOINT_ROWS = "checkpoint.rows", SEQUENCER, "rows of the older slot are overwritten; its header is not"
    CHECKPOINT_WRITTEN = "checkpoint.written", SEQUENCER, "the header confirms them; order slots below may be reused"
    SLOT_REUSED = "slot.reused", SEQUENCER, "a readable order slot is overwritten, flushed; the frontier is old"
    CEILING_WANTED = "ceiling.wanted", SEQUENCER, "the order is near the ceiling; the store has no request yet"
    CEILING_RAISED = "ceiling.raised", SEQUENCER, "the store has the higher ceiling; no batch is ordered above the old"
    # --- seals --------------------------------------------------------------------------------------------------------
    SEAL_CLOSING = "seal.closing", SEQUENCER, "the range word is closing, flushed, fenced; no line is read"
    SEAL_LINES = "seal.lines", SEQUENCER, "the end is known from the lines; the store does not have it"
    SEAL_DECIDED = "seal.decided", SEQUENCER, "the store has the end and the next range; the word is closing"
    SEAL_OPENED = "seal.opened", SEQUENCER, "the word has the next range"
    SEAL_LAST_CLOSING = "seal.last-closing", SEQUENCER, "the last range of a lane is closing, durable through its end"
    SEAL_LAST_DECIDED = "seal.last-decided", SEQUENCER, "the store has its end; the word is closing"
    # --- recovery of lanes from disks ---------------------------------------------------------------------------------
    RECOVERY_CLOSING = "recovery.closing", SEQUENCER, "a lane in recovery is closing; no reply is read"
    RECOVERY_TARGET = "recovery.target", SEQUENCER, "replicas know the target up to which they copy"
    RECOVERY_DECIDED = "recovery.decided", SEQUENCER, "the store has the end and the next range; the lane has not begun"
    RECOVERY_BEGUN = "recovery.begun", SEQUENCER, "the lane has begun"
    # --- dead brokers -------------------------------------------------------------------------------------------------
    CLOSING_SAID = "closing.said", SEQUENCER, "a line has an incarnation as closing; its ring is not read"
    CLOSING_READ = "closing.read", SEQUENCER, "the end of its pending ring is known"
    CLOSING_LANES_READ = "closing.lanes-read", SEQUENCER, "and the ends of its lanes; the store does not have them"
    CLOSING_LANES_TOLD = "closing.lanes-told", SEQUENCER, "the store has the ends of its lanes"
    BURIAL_TOLD = "burial.told", SEQUENCER, "the store has it as REMOVED; its regions still exist"
    BURIAL_DONE = "burial.done", SEQUENCER, "its regions are unlinked"
    # --- publishing ---------------------------------------------------------------------------------------------------
    INGEST_PAYLOAD = "ingest.payload", BROKER, "a payload is flushed; its entry is not written"
    INGEST_ENTRIES = "ingest.entries", BROKER, "pending entries are flushed; the frontier is old"
    INGEST_PUBLISHED = "ingest.published", BROKER, "the frontier moved; no doorbell was rung"
    SLOTS_FREE = "slots.free", BROKER, "pending slots are known to be free; none is reused"
    CHUNK_FREED = "chunk.freed", BROKER, "a chunk's line has its next number; no byte is overwritten"
    # --- acks ---------------------------------------------------------------------------------------------------------
    ACK_LOADED = "ack.loaded", BROKER, "outcomes are loaded; the epoch is not checked"
    ACK_CHECKED = "ack.checked", BROKER, "no later epoch was open after that; no ack has left"
    ACK_HANDED = "ack.handed", BROKER, "acks are at their connections, or wait for disks; the read watermark is old"
    ACK_READ = "ack.read", BROKER, "the read watermark moved"
    # --- counting durable copies --------------------------------------------------------------------------------------
    COUNT_WORD = "count.word", BROKER, "the range word is loaded, and open; no line is loaded"
    COUNT_LINES = "count.lines", BROKER, "durable lines are loaded; the word is not loaded again"
    COUNT_CHECKED = "count.checked", BROKER, "word and epoch did not change: the end is counted, and not acted on"
    ACK_DURABLE = "ack.durable", BROKER, "durable acks are at their connections, payloads below are released"
    # --- lanes of brokers ---------------------------------------------------------------------------------------------
    LANE_MADE = "lane.made", BROKER, "the store has a lane of this incarnation; its ring does not exist"
    LANE_STAGED = "lane.staged", BROKER, "batches have their positions in the broker's lane; no entry is written"
    LANE_PUBLISHED = "lane.published", BROKER, "entries of the lane are flushed, its frontier moved; no ack has left"
    LANE_CHECKED = "lane.checked", BROKER, "the sequencer counted the broker as open after that; no ack has left"
    # --- reads --------------------------------------------------------------------------------------------------------
    READ_FRONTIER = "read.frontier", BROKER, "frontier and bound of a fetch are loaded; no entry is"
    READ_ENTRIES = "read.entries", BROKER, "entries are loaded; no payload is"
    READ_PAYLOAD = "read.payload", BROKER, "payloads are copied; the epoch is not checked"
    READ_CHECKED = "read.checked", BROKER, "no later epoch was open after that; no answer is sent"
    READ_ENDS = "read.ends", BROKER, "both ends of a lane are loaded; the epoch is not checked"
    READ_DISK = "read.disk", BROKER, "records are read from segment files; no answer is sent"
    # --- replicas -----------------------------------------------------------------------------------------------------
    REPLICA_LOADED = "replica.loaded", REPLICA, "entries and payloads are copied; the epoch is not checked"
    REPLICA_CHECKED = "replica.checked", REPLICA, "no later epoch was open after that; no entry is appended"
    REPLICA_APPENDED = "replica.appended", REPLICA, "they are in the segment; not synced"
    REPLICA_SYNCED = "replica.synced", REPLICA, "fdatasync returned; the durable line is old"
    REPLICA_LINE = "replica.line", REPLICA, "the durable line moved; no doorbell was rung"
    REPLICA_COUNTING = "replica.counting", REPLICA, "a copy has its first line in the table"
    REPLICA_CHECKPOINT_READ = "replica.checkpoint-read", REPLICA, "a checkpoint is loaded; the epoch is not checked"
    REPLICA_CHECKPOINT = "replica.checkpoint", REPLICA, "the checkpoint is on disk; the line does not have it"
    REPLICA_SEALING = "replica.sealing", REPLICA, "a range is known to be sealed; no record above its end is cut"
    REPLICA_SEALED = "replica.sealed", REPLICA, "the copy of a sealed range is complete and finished"


BY_NAME: Final = {step.value: step for step in Step}
"""Steps by name."""
