"""Tables of topics in a simulated run, written by a tiering job, with the interface through which brokers read them.

The name of its metadata identifies a table, as in a real store: a commit makes a new one, and old ones may be collected
while a broker still reads them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from embarcadero.broker.disk_reads import FetchResult, wanted_entries
from embarcadero.errors import BadTable, EmbarcaderoError, NotAvailable, TierUnavailable
from embarcadero.fabric.layout import ORDER, Entries
from embarcadero.limits import BROKER_LANES_FIRST, FETCH_ENTRIES_MAX
from embarcadero.types import BATCH_KIND, Cut, Gap, GapKind, LanePosition, Order, Tier
from embarcadero.wire.messages import AdvanceTier, Fetch, OpenTier
from embarcadero.wire.schemas import TopicSchemas
from embarcadero_proof.sim.history import OnDisk, TieredTo

if TYPE_CHECKING:
    from embarcadero.broker.broker import Broker
    from embarcadero.client.lanes import LanesCore
    from embarcadero.client.subscriber import SubscriberCore
    from embarcadero_proof.sim.plan import TopicPlan
    from embarcadero_proof.sim.world import World


STAGED: Final = b"staged:"
"""First bytes of payloads that are staged in a lane of a broker, for publishing elsewhere by reference."""


def digest_of(payload: Any, lane: int = 0) -> int:
    """Hash a batch's content, as in histories. A staged batch counts as another batch than the published one."""
    digest = int.from_bytes(blake2b(payload, digest_size=7).digest(), "little")
    return digest ^ 1 if lane >= BROKER_LANES_FIRST and bytes(payload[: len(STAGED)]) == STAGED else digest


@dataclass(slots=True)
class SimLane:
    """A table's part of one lane: entries by index, with payloads."""

    entries: Entries = field(default_factory=lambda: np.zeros(0, dtype=ORDER))
    payloads: list[bytes] = field(default_factory=list)


class SimTables:
    """The store of all tables. `trouble` is called before each read: it may raise, as an unreachable store does."""

    def __init__(self, trouble: Callable[[], None] = lambda: None) -> None:
        self.trouble = trouble
        self._tables: dict[str, dict[int, SimLane]] = {}
        self.reads = 0

    def commit(self, before: str, metadata: str, lane: int, entries: Entries, payloads: list[bytes]) -> None:
        """Add batches after those of the table `before`, under a new name."""
        lanes = dict(self._tables.get(before, {}))
        known = lanes.get(lane, SimLane())
        lanes[lane] = SimLane(np.concatenate([known.entries, entries]), known.payloads + payloads)
        self._tables[metadata] = lanes

    def collect(self, metadata: str) -> None:
        """Remove the files of a table that is no longer referenced."""
        self._tables.pop(metadata, None)

    def everything(self, metadata: str, lane: int) -> list[tuple[int, bytes]]:
        """Return index and payload of all batches of a lane."""
        found = self._tables.get(metadata, {}).get(lane, SimLane())
        rows = zip(found.entries["index"].tolist(), found.entries["kind"].tolist(), found.payloads, strict=True)
        return [(index, payload) for index, kind, payload in rows if kind == BATCH_KIND]

    def _lane(self, tier: Tier, lane: int) -> SimLane:
        self.reads += 1
        self.trouble()
        if tier.metadata not in self._tables:
            raise BadTable(f"{tier.metadata} is missing", "it was collected")
        return self._tables[tier.metadata].get(lane, SimLane())

    def fetch(self, tier: Tier, schemas: TopicSchemas, ask: Fetch, stop: int) -> FetchResult:  # noqa: ARG002 - the seam's
        """Return batches from index `ask.start` on and below `stop`, within the requested bytes."""
        found = self._lane(tier, ask.lane)
        first = int(np.searchsorted(found.entries["index"], ask.start))
        last = min(int(np.searchsorted(found.entries["index"], stop)), first + FETCH_ENTRIES_MAX)
        at, room = ask.start, ask.max_bytes
        rows: list[int] = []
        payloads: list[bytes] = []
        wanted = wanted_entries(found.entries[first:last], ask)
        for row in range(first, last):
            index, payload = int(found.entries["index"][row]), found.payloads[row]
            if index > at:
                gap = Gap(GapKind.LOST, at, index)
                return self._answer(found, rows, payloads, index if not rows else at, None if rows else gap)
            if wanted[row - first]:
                if payloads and len(payload) > room:
                    return self._answer(found, rows, payloads, at)
                rows.append(row)
                payloads.append(payload)
                room = max(0, room - len(payload))
            at = index + 1
        if not rows and at < stop and last - first < FETCH_ENTRIES_MAX:
            return self._answer(found, rows, payloads, stop, Gap(GapKind.LOST, at, stop))
        return self._answer(found, rows, payloads, at)

    @staticmethod
    def _answer(found: SimLane, rows: list[int], payloads: list[bytes], at: int, gap: Gap | None = None) -> FetchResult:
        return FetchResult(found.entries[np.array(rows, dtype=np.intp)], list(payloads), at, 0, gap)

    def find(self, tier: Tier, lane: int, by: str, value: int) -> tuple[int, int] | None:
        """Find a position; None if the table does not have it."""
        entries = self._lane(tier, lane).entries
        low, high = tier.start(lane)[0], tier.frontier(lane)[0]
        entries = entries[(entries["index"] >= low) & (entries["index"] < high)]
        hits = {
            "index": entries["index"] >= value,
            "seq": (entries["seq"] + entries["count"] > value) & (entries["count"] > 0),
            "time": entries["append_us"] >= value,
        }[by]
        if not hits.any():
            return None
        row = int(np.argmax(hits))
        return int(entries["index"][row]), int(entries["seq"][row])

    def cuts(self, tier: Tier, lane: int, start: int, stop: int, piece_bytes: int) -> list[Cut]:
        """Return one piece with all entries of the span."""
        entries = self._lane(tier, lane).entries
        part = entries[(entries["index"] >= start) & (entries["index"] < stop)]
        if not len(part):
            return []
        end = int(part["index"][-1]) + 1, int(part["seq"][-1]) + int(part["count"][-1])
        return [Cut(*end, min(piece_bytes, int(part["size"].sum())))]


class Tiering:
    """The tiering job of a run, and the store of its tables. It does nothing in a plan without the fault "tier"."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.on = "tier" in world.plan.durable.faults
        self.tables = SimTables(self._trouble)
        self.lanes: dict[int, int] = {}  # lanes with entries in a table, and the end of these
        self._away_until_us = 0
        self._commits = 0
        self._rng = random.Random(f"{world.seed}:tiering")

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of readers."""
        return {"table": True} if self.on else {}

    def start_of(self, topic: TopicPlan) -> str:
        """Return how a reader asks for all records: brokers alone do not know where a table starts."""
        return "index" if self.on and topic.replicas and topic.order > Order.BROKER else "earliest"

    def frontier(self, lane: int) -> int:
        """Return the index below which all entries are in the table of the lane's topic."""
        return self.lanes.get(lane, 0)

    def read_us(self) -> int:
        """Draw how long the next read of a table takes: a store is slow sometimes."""
        return self._rng.randrange(1, self._rng.choice([2_000, 50_000, 2_000_000]))

    def _trouble(self) -> None:
        if self._world.queue.now_us < self._away_until_us:
            raise TierUnavailable("the store of the tables is away", "it comes back")

    def lose_store(self, rng: random.Random) -> tuple[str, int]:
        """Make the store of the tables unreachable for a while."""
        for_us = rng.randrange(100_000, 8_000_000)
        self._away_until_us = self._world.queue.now_us + for_us
        return "store", for_us

    def heal(self) -> None:
        """Make the store reachable permanently."""
        self._away_until_us = 0

    def tier(self, rng: random.Random) -> tuple[str, int] | None:
        """Move durable batches of a lane to its table, and trim some of them from the brokers."""
        world = self._world
        topics = [topic for topic in world.plan.topics if topic.replicas and topic.order > Order.BROKER]
        brokers = [process.broker for process in world.brokers.values() if process.alive and process.broker is not None]
        if not topics or not brokers or world.queue.now_us < self._away_until_us:
            return None
        topic = rng.choice(topics)
        try:
            self._move(rng.choice(brokers), topic.name, topic.lane)
            index = rng.randrange(self.frontier(topic.lane) + 1)
            world.disks.see_gaps()
            if index:
                world.directory.topics.trim(topic.name, topic.lane, index, cold=False)
        except EmbarcaderoError as error:
            world.note("tiering", f"fails: {error}")
            return None
        return f"lane {topic.lane}", 0

    def _move(self, broker: Broker, topic: str, lane: int) -> None:
        """Copy durable batches that a broker can read on disks, and commit them."""
        directory, reader = self._world.directory, broker.readers.reader(lane)
        if reader.stored is None:
            return
        known = directory.tiers.get(topic)
        segments = broker.readers.durable_files(lane)
        at, seq = (0, 0) if known is None else known.frontier(lane)
        for _ in range(self._rng.randint(1, 4)):
            if at >= segments.bound:
                return
            if (gap := reader.stored.chain.lost_at(at)) is not None:
                at = gap.stop
                continue
            found = segments.fetch(Fetch(lane=lane, by="index", start=at, max_bytes=1 << 20, control=True))
            if not len(found.entries):
                return
            if known is None:
                ask = OpenTier(topic=topic, holder="job", id="sim", warehouse="sim://", table=topic)
                known = directory.tiers.open(ask)
            self._commits += 1
            before, name = known.metadata, f"{topic}-{self._commits}"
            entries = np.array(found.entries)
            self.tables.commit(before, name, lane, entries, [bytes(payload) for payload in found.payloads])
            at, seq = found.next_index, int(entries["seq"][-1]) + int(entries["count"][-1])
            known = directory.tiers.advance(AdvanceTier(
                topic=topic, epoch=known.epoch, metadata=name, frontiers={lane: LanePosition(at, seq)}
            ), self._world.queue.now_us)  # fmt: skip
            self.lanes[lane] = at
            self._world.seen(TieredTo(at=self._world.queue.now_us, lane=lane, index=at))
            self._world.queue.after(self._rng.randrange(1, 3_000_000), lambda old=before: self.tables.collect(old))  # type: ignore[misc]

    def see_all(self) -> None:
        """Record at the end which batches are in tables."""
        for topic in self._world.plan.topics:
            tier = self._world.directory.tiers.get(topic.name) if self.on else None
            if tier is not None:
                for index, payload in self.tables.everything(tier.metadata, topic.lane):
                    digest = digest_of(payload)
                    self._world.seen(
                        OnDisk(at=self._world.queue.now_us, lane=topic.lane, index=index, digest=digest, copies=1)
                    )


def no_table(core: SubscriberCore | LanesCore, now_us: int) -> None:
    """Act as a client without PyIceberg: it cannot read tables itself, and polls again after the store was away."""
    for ask in core.take_table_asks():
        if ask.by == "span":
            ask.core.on_table_failed(ask, NotAvailable("no PyIceberg here"), now_us)
        else:
            ask.core.on_table_position(ask, None, now_us)  # as brokers know it
    core.retry(now_us)
