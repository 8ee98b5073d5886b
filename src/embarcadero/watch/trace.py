"""Follow a batch or a record through the fabric and to disk, by the trace that each stage leaves. Read-only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from embarcadero.errors import BadValue, EmbarcaderoError, FuturePosition, Refused, UnknownTopic
from embarcadero.fabric.layout import BrokerLine, Entries, SequencerLine, frontier_offset, pick
from embarcadero.fabric.log import LogReader
from embarcadero.fabric.region import (
    broker_frontiers_region,
    frontiers_region,
    held_region,
    log_region,
    order_region,
    pending_region,
    results_region,
)
from embarcadero.sequencer.order.batches import opened_facts
from embarcadero.sequencer.order.sessions import read_waiting
from embarcadero.types import REQUEST_OUTCOMES, EntryKind, Member, Order, Topic, TopicLane
from embarcadero.watch.regions import Facts, ReadOnlyFabric, ReplicaFolders, ring_of, rows, valid_entries
from embarcadero.wire.codec import payload_crc
from embarcadero.wire.schemas import RAW, TopicSchemas, decode_batch

_RECORDS_SHOWN = 5
_RAW_SHOWN = ("key", "value", "timestamp")
_BYTES_SHOWN = 64
_REQUEST_NAMES = frozenset(outcome.name for outcome in REQUEST_OUTCOMES)


@dataclass(frozen=True, slots=True)
class TraceSource:
    """A cluster to inspect: its fabric, and the facts of its store."""

    fabric: ReadOnlyFabric
    topics: list[Topic]
    members: list[Member]
    epoch: int
    lanes: list[TopicLane] = field(default_factory=list)
    disks: ReplicaFolders = field(default_factory=ReplicaFolders)
    schemas: Mapping[str, TopicSchemas] = field(default_factory=dict)
    """By topic: all versions of its schema. Topics that are not listed have raw records."""

    def topic(self, name: str) -> Topic:
        """Return a topic by name."""
        found = next((topic for topic in self.topics if topic.name == name), None)
        if found is None:
            raise UnknownTopic(f"there is no topic {name!r}", "see `embarcadero topic list`")
        return found

    def orders(self, topic: Topic) -> dict[int, Entries]:
        """The order entries of a topic that are still in the rings, by lane, oldest first."""
        if topic.order > Order.BROKER:
            return {topic.lane: valid_entries(ring_of(self.fabric.attach(order_region(self.epoch, topic.lane))))}
        found = {}
        for lane in self.lanes:
            if lane.topic == topic.lane and self.fabric.exists(lane.region):
                entries = valid_entries(ring_of(self.fabric.attach(lane.region)))
                found[lane.lane] = entries if lane.end is None else entries[entries["index"] < np.uint64(lane.end)]
        return found

    def order(self, topic: Topic, lane: int | None) -> tuple[int, Entries]:
        """The order entries of the topic's only lane, or of the given lane."""
        orders = self.orders(topic)
        if lane is None and topic.order <= Order.BROKER:
            hint = f"choose a lane with --lane: {sorted(orders)}"
            raise BadValue(f"topic {topic.name} has order {topic.order}: a position needs a lane", hint)
        number = topic.lane if lane is None else lane
        if number not in orders:
            raise BadValue(f"topic {topic.name} has no lane {number}", f"its lanes are {sorted(orders)}")
        return number, orders[number]

    def has(self, member: Member, part: str) -> bool:
        """Whether a region of this broker incarnation exists."""
        return self.fabric.exists(f"{member.region_prefix}/{part}")


# --- one batch --------------------------------------------------------------------------------------------------------
def find_batch(
    scene: TraceSource, name: str, *, seq: int | None = None, index: int | None = None, lane: int | None = None
) -> Facts:
    """Find the batch with record `seq`, or at `index`: its entry, its payload, its first records."""
    topic = scene.topic(name)
    number, entries = scene.order(topic, lane)
    if index is not None:
        found = entries[entries["index"] == np.uint64(index)]
    else:
        wanted, first = np.uint64(seq or 0), entries["seq"]
        found = entries[(first <= wanted) & (wanted < first + entries["count"])]
    if not len(found):
        found = scene.disks.find(number, index, seq)
    if not len(found):
        raise _not_here(topic, entries, f"index {index}" if index is not None else f"seq {seq}")
    entry = found[:1]
    return {"topic": name, "lane": number, "entry": rows(entry)[0], "payload": _payload(scene, topic, number, entry)}


def _not_here(topic: Topic, entries: Entries, what: str) -> EmbarcaderoError:
    if not len(entries):
        return FuturePosition(f"topic {topic.name} has no entries in memory", "publish records first")
    ends = f"index {int(entries['index'][0])} to {int(entries['index'][-1])}"
    last = int(entries["seq"][-1]) + int(entries["count"][-1]) - 1
    return Refused(f"{what} of topic {topic.name} is not in the order ring", f"the ring has {ends}, up to seq {last}")


def _payload(scene: TraceSource, topic: Topic, lane: int, entry: Entries) -> Facts:
    """Locate a batch's payload and decode it: from memory, else from disks."""
    schemas = scene.schemas.get(topic.name, RAW)
    facts = _in_memory(scene, entry, schemas)
    if facts["state"] != "freed" or (stored := scene.disks.payload(lane, entry)) is None:
        return facts
    contents = _contents(stored.payload, entry, schemas)
    return {"state": "on disk", "replicas": stored.replicas, "bytes": len(stored.payload), "crc_fits": True, **contents}


def _in_memory(scene: TraceSource, entry: Entries, schemas: TopicSchemas) -> Facts:
    if int(entry["kind"][0]) != EntryKind.BATCH:
        return {"state": "none", "why": "only batches have a payload"}
    handle, location, size = int(entry["origin"][0]), int(entry["location"][0]), int(entry["size"][0])
    member = next((m for m in scene.members if m.handle == handle), None)
    if member is None or not scene.has(member, "log"):
        return {"state": "freed", "why": "the log of its broker incarnation was removed"}
    prefix = member.region_prefix
    log = LogReader(scene.fabric.attach(log_region(prefix)), scene.fabric.attach(broker_frontiers_region(prefix)))
    if not 0 < size <= log.chunk_bytes:
        return {"state": "damaged", "why": f"its size {size} does not fit a chunk"}
    payload = log.copy(location, size)
    if payload is None:
        return {"state": "freed", "log": log_region(prefix), "why": "its chunk is used for newer batches"}
    crc = payload_crc(payload)
    facts: Facts = {"log": log_region(prefix), "bytes": size, "crc": crc, "crc_fits": crc == int(entry["crc"][0])}
    state = "readable" if facts["crc_fits"] else "damaged"
    return {"state": state, **facts, **_contents(payload, entry, schemas)}


def _contents(payload: bytes, entry: Entries, schemas: TopicSchemas) -> Facts:
    """Decode the first records of a payload, with the schema version of its batch."""
    try:
        batch = decode_batch(payload, schemas.of(int(entry["schema"][0])), int(entry["count"][0]), full=True)
    except EmbarcaderoError as problem:
        return {"records": None, "first_bytes": payload[:_BYTES_SHOWN].hex(" "), "note": problem.message}
    names = schemas.newest.names if schemas.typed else _RAW_SHOWN
    shown = batch.slice(0, _RECORDS_SHOWN).to_pylist()
    return {"records": [{name: _shown(row[name]) for name in names if name in row} for row in shown]}


def _shown(value: Any) -> Any:
    """Convert a value for people and JSON: numbers and booleans stay, the rest becomes text, cut if it is long."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, bytes):
        return _shown_bytes(value)
    text = str(value)
    return text if len(text) <= _BYTES_SHOWN else f"{text[:_BYTES_SHOWN]} ... ({len(text)} characters)"


def _shown_bytes(value: bytes) -> str:
    """Format bytes as text if printable, else as hexadecimal; long values are cut."""
    head = value[:_BYTES_SHOWN]
    more = f" ... ({len(value)} bytes)" if len(value) > _BYTES_SHOWN else ""
    text = head.decode("utf-8", errors="replace")
    return (text if text.isprintable() and "\ufffd" not in text else head.hex(" ")) + more


# --- one record, by session and sequence ------------------------------------------------------------------------------
def follow(scene: TraceSource, name: str, session: int, sequence: int) -> Facts:
    """All traces of the batch with this sequence of a session, or of a session that continues it, by stage."""
    topic = scene.topic(name)
    if topic.order <= Order.BROKER:
        return _follow_lanes(scene, topic, session, sequence)
    _, order = scene.order(topic, None)
    sessions = _chain(order, session)
    ordered = _of(order, sessions, sequence)
    ordered = ordered[ordered["kind"] == EntryKind.BATCH]
    stages = {
        "pending": _in_pending(scene, topic, sessions, sequence),
        "held": _in_held(scene, topic, sessions, sequence),
        "ordered": rows(ordered),
        "skipped": _skips(order, sessions, sequence),
        "results": _in_results(scene, topic, sessions, sequence, ordered),
        "payload": _payload(scene, topic, topic.lane, ordered[:1]) if len(ordered) else None,
    }
    return {
        "topic": name,
        "lane": topic.lane,
        "session": session,
        "sequence": sequence,
        "sessions": sessions,
        "session_entries": _session_entries(order, sessions),
        **stages,
        "verdict": _verdict(stages),
    }


def _follow_lanes(scene: TraceSource, topic: Topic, session: int, sequence: int) -> Facts:
    """Orders 0 and 1: brokers order and ack by themselves, so the order entries of a lane are the only trace.

    If an ack is lost with its broker, the publisher sends the batch again, so a batch may be in two lanes.
    """
    copies = {lane: _of(entries, [session], sequence) for lane, entries in scene.orders(topic).items()}
    first = next(((lane, entries[:1]) for lane, entries in copies.items() if len(entries)), None)
    ordered = [{"lane": lane, **row} for lane, entries in copies.items() for row in rows(entries)]
    payload = None if first is None else _payload(scene, topic, *first)
    verdict = "no trace: it never reached a broker, or all its entries have left the rings"
    if ordered:
        positions = " and ".join(f"lane {row['lane']} at index {row['index']}, seq {row['seq']}" for row in ordered)
        verdict = f"stored in {positions}; payload {(payload or {}).get('state', 'unknown')}"
    nothing: Facts = {stage: [] for stage in ("session_entries", "pending", "held", "skipped", "results")}
    return {
        "topic": topic.name,
        "lane": topic.lane,
        "session": session,
        "sequence": sequence,
        "sessions": [session],
        **nothing,
        "ordered": ordered,
        "payload": payload,
        "verdict": verdict,
    }


def _of(entries: Entries, sessions: list[int], sequence: int) -> Entries:
    match = np.isin(entries["session"], np.array(sessions, dtype=np.uint32))
    return pick(entries, match & (entries["session_seq"] == np.uint64(sequence)))


def _chain(order: Entries, session: int) -> list[int]:
    """The session, and the sessions that continue it, according to the entries in the ring."""
    found = [session]
    for entry in order[order["kind"] == EntryKind.SESSION_OPEN]:
        if opened_facts(entry).continued in found:
            found.append(int(entry["session"]))
    return found


def _session_entries(order: Entries, sessions: list[int]) -> list[Facts]:
    mine = np.isin(order["session"], np.array(sessions, dtype=np.uint32)) & (order["kind"] != EntryKind.BATCH)
    return [{what: row[what] for what in ("index", "kind", "session", "session_seq")} for row in rows(order[mine])]


def _in_pending(scene: TraceSource, topic: Topic, sessions: list[int], sequence: int) -> list[Facts]:
    frontiers = scene.fabric.attach(frontiers_region(scene.epoch))
    found = []
    for member in scene.members:
        if not scene.has(member, "pending"):
            continue
        ring = ring_of(scene.fabric.attach(pending_region(member.region_prefix)))
        published, entries = ring.frontier.load(), _of(valid_entries(ring), sessions, sequence)
        offset = frontier_offset(SequencerLine.BROKERS + member.handle)
        taken = int(frontiers.data[offset : offset + 8].view(np.uint64)[0])
        for row in rows(entries[(entries["lane"] == topic.lane) & (entries["kind"] == EntryKind.BATCH)]):
            index = row["index"]
            facts = {"broker": member.region_prefix, "published": index < published, "taken": index < taken}
            found.append(facts | {what: row[what] for what in ("index", "session", "size", "count", "crc")})
    return found


def _in_held(scene: TraceSource, topic: Topic, sessions: list[int], sequence: int) -> list[Facts]:
    entries = _of(read_waiting(scene.fabric, held_region(scene.epoch)), sessions, sequence)
    return rows(entries[entries["lane"] == topic.lane])


def _skips(order: Entries, sessions: list[int], sequence: int) -> list[Facts]:
    skips = order[(order["kind"] == EntryKind.SKIP) & np.isin(order["session"], np.array(sessions, dtype=np.uint32))]
    first = skips["session_seq"]
    covers = (first <= np.uint64(sequence)) & (np.uint64(sequence) < first + skips["location"])
    return rows(skips[covers])


def _in_results(scene: TraceSource, topic: Topic, sessions: list[int], sequence: int, ordered: Entries) -> list[Facts]:
    """Outcomes, and whether their broker has read them: then the ack is sent, or about to be sent.

    A result does not name its topic: it belongs to this topic if its position or its pending entry does.
    """
    found, positions = [], set(ordered["index"].tolist())
    for member in scene.members:
        name = results_region(scene.epoch, member)
        if not (scene.fabric.exists(name) and scene.has(member, "pending")):
            continue
        theirs = scene.fabric.attach(broker_frontiers_region(member.region_prefix))
        words = [
            int(theirs.data[frontier_offset(line) : frontier_offset(line) + 8].view(np.uint64)[0])
            for line in (BrokerLine.RESULTS_EPOCH, BrokerLine.RESULTS_READ)
        ]
        read = words[1] if words[0] == scene.epoch else 0
        pending = valid_entries(ring_of(scene.fabric.attach(pending_region(member.region_prefix))))
        ours = set(pending["index"][pending["lane"] == topic.lane].tolist())
        for row in rows(_of(valid_entries(ring_of(scene.fabric.attach(name))), sessions, sequence)):
            request = row["outcome"] in _REQUEST_NAMES
            if not request and (row["index"] in positions or row["pending"] in ours):
                facts = {"broker": member.region_prefix, "acked": row["position"] < read}
                found.append(facts | {what: row[what] for what in ("outcome", "index", "seq", "pending", "session")})
    return found


def _verdict(stages: dict[str, Any]) -> str:
    """Summarize the last stage in one sentence."""
    if stages["ordered"]:
        entry, payload = stages["ordered"][0], stages["payload"] or {}
        acked = "acked" if any(result["acked"] for result in stages["results"]) else "no trace of its ack"
        where = f"stored at index {entry['index']}, seq {entry['seq']}"
        return f"{where}; {acked}; payload {payload.get('state', 'unknown')}"
    if stages["skipped"]:
        return "declared lost: its gap was skipped before it arrived"
    if stages["held"]:
        return "waits in the reorder buffer until the gap before it closes"
    if stages["results"]:
        return f"answered {stages['results'][-1]['outcome']}, and not stored"
    if any(entry["published"] and not entry["taken"] for entry in stages["pending"]):
        return "published by its broker, and not yet taken by the sequencer"
    if stages["pending"]:
        return "taken by the sequencer; its outcome is no longer in the rings"
    return "no trace: it never reached a broker, or all its entries have left the rings"
