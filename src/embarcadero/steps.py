"""The steps of the protocol, by name: one table, with who gets there and what is true at that very point.

Role code says `steps.at(Step.X)` at each of them. In production that does nothing. The simulator ends or pauses a
process there, and real processes stop themselves there when they are asked to (node/steps.py), so that a test can go
through all steps and show that whoever crashes, or wakes up as a zombie, just there changes nothing that others read.
A step is reached once per batch, round or rarer event, never once per record.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Self

SEQUENCER: Final = "sequencer"
BROKER: Final = "broker"
REPLICA: Final = "replica"


class Step(StrEnum):
    """A named point in role code. The value is its name; `role` gets there; `truth` is what holds just then."""

    role: str
    truth: str

    def __new__(cls, name: str, role: str, truth: str) -> Self:
        step = str.__new__(cls, name)
        step._value_ = name
        step.role, step.truth = role, truth
        return step

    # --- taking over --------------------------------------------------------------------------------------------------
    TAKEOVER_EPOCH_GIVEN = "takeover.epoch-given", SEQUENCER, "the store gave the epoch; no line of the fabric says so"
    TAKEOVER_FORESEEN = "takeover.foreseen", SEQUENCER, "lanes are re-issued so far; the predecessor may add to them"
    TAKEOVER_EPOCH_OPEN = "takeover.epoch-open", SEQUENCER, "the epoch line is open: nobody acts on earlier ones"
    TAKEOVER_MARKS_READ = "takeover.marks-read", SEQUENCER, "the predecessor's read-through marks are known, no more"
    TAKEOVER_HELD_READ = "takeover.held-read", SEQUENCER, "and its waiting batches"
    TAKEOVER_ANSWERS_READ = "takeover.answers-read", SEQUENCER, "and its answers"
    TAKEOVER_READ = "takeover.read", SEQUENCER, "and a lane's order ring; nothing of it is re-issued"
    TAKEOVER_REISSUED = "takeover.reissued", SEQUENCER, "all lanes are re-issued in rings of our own, flushed"
    TAKEOVER_HELD = "takeover.held", SEQUENCER, "and batches that still wait are in our held slots"
    TAKEOVER_ANSWERED = "takeover.answered", SEQUENCER, "unread answers are in our rings too; not started"
    TAKEOVER_DECIDED = "takeover.decided", SEQUENCER, "the store has our start; no line of the fabric says so"
    TAKEOVER_STARTED = "takeover.started", SEQUENCER, "the start line says so too; nobody was rung"
    TAKEOVER_SWEPT = "takeover.swept", SEQUENCER, "what epochs before the predecessor left is unlinked"
    # --- a round ------------------------------------------------------------------------------------------------------
    ROUND_TAKEN = "round.taken", SEQUENCER, "entries are read from pending rings; nothing is decided"
    ROUND_ENTRIES = "round.entries", SEQUENCER, "order entries are flushed; no answer, no frontier"
    ROUND_RESULTS = "round.results", SEQUENCER, "answers are flushed; no frontier"
    ROUND_FRONTIERS = "round.frontiers", SEQUENCER, "frontiers moved; waiting batches are not saved"
    ROUND_HELD = "round.held", SEQUENCER, "waiting batches are saved; read-through marks are old"
    ROUND_READ_THROUGH = "round.read-through", SEQUENCER, "marks moved; slots of batches that left are not cleared"
    # --- checkpoints, room, ceilings ----------------------------------------------------------------------------------
    CHECKPOINT_ROWS = "checkpoint.rows", SEQUENCER, "rows of the older slot are overwritten; its header is not"
    CHECKPOINT_WRITTEN = "checkpoint.written", SEQUENCER, "the header vouches for them; slots below may be reused"
    SLOT_REUSED = "slot.reused", SEQUENCER, "an order slot that readers knew is overwritten, flushed; no frontier"
    CEILING_WANTED = "ceiling.wanted", SEQUENCER, "the order nears the ceiling; the store was not asked"
    CEILING_RAISED = "ceiling.raised", SEQUENCER, "the store has the higher ceiling; nothing is ordered by it"
    # --- seals --------------------------------------------------------------------------------------------------------
    SEAL_CLOSING = "seal.closing", SEQUENCER, "the range word says closing, flushed, fenced; no line is read"
    SEAL_LINES = "seal.lines", SEQUENCER, "the end is known from the lines; the store was not told"
    SEAL_DECIDED = "seal.decided", SEQUENCER, "the store has the end and the next range; the word says closing"
    SEAL_OPENED = "seal.opened", SEQUENCER, "the word names the next range"
    SEAL_LAST_CLOSING = "seal.last-closing", SEQUENCER, "the last range of a lane is closing, durable through its end"
    SEAL_LAST_DECIDED = "seal.last-decided", SEQUENCER, "the store has its end; the word says closing"
    # --- lanes that come back from disk -------------------------------------------------------------------------------
    RECOVERY_CLOSING = "recovery.closing", SEQUENCER, "a lane that comes back is closing; no reply is read"
    RECOVERY_TARGET = "recovery.target", SEQUENCER, "replicas know how far they have to copy"
    RECOVERY_DECIDED = "recovery.decided", SEQUENCER, "the store has the end and the next range; the lane has not begun"
    RECOVERY_BEGUN = "recovery.begun", SEQUENCER, "the lane has begun"
    # --- brokers that are gone ----------------------------------------------------------------------------------------
    CLOSING_SAID = "closing.said", SEQUENCER, "a line says that an incarnation is closing; its ring is not read"
    CLOSING_READ = "closing.read", SEQUENCER, "the end of its pending ring is known"
    CLOSING_LANES_READ = "closing.lanes-read", SEQUENCER, "and the ends of its lanes; the store was not told"
    CLOSING_LANES_TOLD = "closing.lanes-told", SEQUENCER, "the store has the ends of its lanes"
    BURIAL_TOLD = "burial.told", SEQUENCER, "the store says REMOVED; its regions are there"
    BURIAL_DONE = "burial.done", SEQUENCER, "its regions are unlinked"
    # --- publishing ---------------------------------------------------------------------------------------------------
    INGEST_PAYLOAD = "ingest.payload", BROKER, "a payload is flushed; its entry is not written"
    INGEST_ENTRIES = "ingest.entries", BROKER, "pending entries are flushed; the frontier is old"
    INGEST_PUBLISHED = "ingest.published", BROKER, "the frontier moved; nobody was rung"
    SLOTS_FREE = "slots.free", BROKER, "pending slots are known to be free; none is reused"
    CHUNK_FREED = "chunk.freed", BROKER, "a chunk's line has its next number; no byte is overwritten"
    # --- acks ---------------------------------------------------------------------------------------------------------
    ACK_LOADED = "ack.loaded", BROKER, "outcomes are loaded; the epoch was not asked"
    ACK_CHECKED = "ack.checked", BROKER, "no later epoch was open after that; nothing is passed on"
    ACK_HANDED = "ack.handed", BROKER, "acks are at their connections, or wait for disks; the read mark is old"
    ACK_READ = "ack.read", BROKER, "the read mark moved"
    # --- what is durable ----------------------------------------------------------------------------------------------
    COUNT_WORD = "count.word", BROKER, "the range word is loaded, and open; no line is"
    COUNT_LINES = "count.lines", BROKER, "durable lines are loaded; the word was not looked at again"
    COUNT_CHECKED = "count.checked", BROKER, "word and epoch are as they were: it is counted, and not acted on"
    ACK_DURABLE = "ack.durable", BROKER, "durable acks are at their connections, payloads below are given back"
    # --- lanes of brokers ---------------------------------------------------------------------------------------------
    LANE_MADE = "lane.made", BROKER, "the store has a lane of this incarnation; its ring is not there"
    LANE_STAGED = "lane.staged", BROKER, "batches have their places in our lane; no entry is written"
    LANE_PUBLISHED = "lane.published", BROKER, "entries of our lane are flushed, its frontier moved; no ack"
    LANE_CHECKED = "lane.checked", BROKER, "no sequencer counted us as closed after that; no ack has left"
    # --- reads --------------------------------------------------------------------------------------------------------
    READ_FRONTIER = "read.frontier", BROKER, "frontier and bound of a fetch are loaded; no entry is"
    READ_ENTRIES = "read.entries", BROKER, "entries are loaded; no payload is"
    READ_PAYLOAD = "read.payload", BROKER, "payloads are copied; the epoch was not asked"
    READ_CHECKED = "read.checked", BROKER, "no later epoch was open after that; nothing is sent"
    READ_ENDS = "read.ends", BROKER, "both ends of a lane are loaded; the epoch was not asked"
    READ_DISK = "read.disk", BROKER, "records came from segment files; nothing is sent"
    # --- replicas -----------------------------------------------------------------------------------------------------
    REPLICA_LOADED = "replica.loaded", REPLICA, "entries and payloads are copied; the epoch was not asked"
    REPLICA_CHECKED = "replica.checked", REPLICA, "no later epoch was open after that; nothing is appended"
    REPLICA_APPENDED = "replica.appended", REPLICA, "they are in the segment; not synced"
    REPLICA_SYNCED = "replica.synced", REPLICA, "fdatasync returned; the durable line is old"
    REPLICA_LINE = "replica.line", REPLICA, "the durable line moved; nobody was rung"
    REPLICA_COUNTING = "replica.counting", REPLICA, "a copy has its first line in the table"
    REPLICA_CHECKPOINT_READ = "replica.checkpoint-read", REPLICA, "a checkpoint is loaded; the epoch was not asked"
    REPLICA_CHECKPOINT = "replica.checkpoint", REPLICA, "it is on disk; the line does not say so"
    REPLICA_SEALING = "replica.sealing", REPLICA, "a range is known to be sealed; nothing above its end is cut"
    REPLICA_SEALED = "replica.sealed", REPLICA, "the copy of a sealed range is whole, and finished"


BY_NAME: Final = {step.value: step for step in Step}
"""Steps by name."""
