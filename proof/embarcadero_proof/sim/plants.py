"""Bugs planted on purpose. Each must be caught by some seed, which shows that the net has no hole there.

Two kinds: rules that role code leaves out when told so (`embarcadero.plants.ACTIVE`), and memory primitives that one
role forgets on one kind of region (its fabric is wrapped).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from embarcadero.errors import BadValue
from embarcadero.fabric.layout import SLOTS_OFFSET, BrokerLine, frontier_offset
from embarcadero.fabric.region import Bytes, Fabric, Region, Shape
from embarcadero.plants import ACTIVE
from embarcadero_proof.sim.durable import Bias

Wrap = Callable[[str, Fabric], Fabric]
"""(role, its host's fabric) -> the fabric that the role gets"""


ROLE: Final = "a role"
"""In place of a promise: a role looks for just this, and fails or says so before anybody is told anything wrong."""


@dataclass(frozen=True, slots=True)
class Leak:
    """One primitive that one role forgets, on regions whose name has `region` in it, from byte `first` on."""

    role: str
    primitive: str
    region: str
    first: int = 0

    def forgets(self, primitive: str, name: str, offset: int) -> bool:
        """Whether this call is left out."""
        return primitive == self.primitive and self.region in name and offset >= self.first


@dataclass(frozen=True, slots=True)
class Plant:
    """A planted bug."""

    name: str
    what: str
    by: str = ""  # the promises whose checkers have to catch it, each of them; or ROLE
    leak: Leak | None = None  # None: role code leaves a rule out by itself
    lanes: bool = False  # it needs a world with a topic of order 0 or 1
    bias: Bias | None = None  # it needs a world with replicas, and this trouble
    witnesses: tuple[int, ...] = ()  # seeds that are known to catch it, the cheapest first
    scope: str = ""  # it has to be caught in this scope of sim/exhaustive, too; or there only: worlds have a second net

    @property
    def checkers(self) -> list[str]:
        """Each of these has to catch it."""
        return self.by.split(", ") if self.by else []

    @property
    def where(self) -> str:
        """Where it is planted."""
        if self.leak is not None:
            return f"{self.leak.role}: {self.leak.primitive} of {self.leak.region.strip('/-')}"
        return PATCH_POINTS[self.name]


_POWER: Final = Bias(("power-cut", "slow-disk"), copies=(2, 2))
_SEALS: Final = Bias(("replica-crash", "replica-pause", "slow-disk"), every_s=2.0)
_LOSS: Final = Bias(("cluster-loss", "replica-crash"), job_us=100_000)
_WIPES: Final = Bias(("cluster-loss", "wipe", "replica-crash"), job_us=20_000)
_ROT: Final = Bias(("bit-flip", "cluster-loss", "replica-crash"))
_REIGNS: Final = Bias(("sequencer-crash-inside",), interrupt_rate=0.05)
_STRIKES: Final = Bias(("sequencer-crash-inside", "sequencer-zombie"), interrupt_rate=0.05)
_MOVES: Final = Bias(("hand-over", "sequencer-zombie"), every_s=1.0, interrupt_rate=0.05)
_TRIMS: Final = Bias(("trim", "replica-crash"), every_s=1.0)
_TABLES: Final = Bias(("tier", "store-away", "broker-crash"), every_s=1.0)
_HOLDERS: Final = Bias(("publisher-zombie",), every_s=1.0)
_MIRROR: Final = Bias(("cluster-loss", "replica-crash"), job_us=100_000, mirror=True)
_ENDS: Final = Bias(("broker-crash-inside", "broker-zombie"), interrupt_rate=0.05)
_SLOW: Final = Bias(("slow-disk", "replica-pause"), every_s=2.0)
_LATE: Final = Bias(("cluster-loss", "slow-disk", "replica-pause"), every_s=3.0, job_us=400_000)
_ENDED: Final = Bias(("broker-crash", "cluster-loss", "slow-disk", "replica-pause"), every_s=2.0, job_us=400_000)
_DEATHS: Final = Bias(("replica-crash", "power-cut"), copies=(1, 1), every_s=1.0, replace_after_s=0.2)

PLANTS: Final = {
    plant.name: plant
    for plant in (
        Plant("missing-flush", "the sequencer does not flush order entries", ROLE,
              Leak("sequencer", "flush", "/order-", SLOTS_OFFSET), witnesses=(151,)),
        Plant("missing-flush-results", "the sequencer does not flush results", "P8",
              Leak("sequencer", "flush", "/results-", SLOTS_OFFSET), witnesses=(90, 0)),
        Plant("missing-flush-pending", "brokers do not flush pending entries", ROLE,
              Leak("broker", "flush", "/pending", SLOTS_OFFSET), witnesses=(0,)),
        Plant("missing-flush-payload", "brokers do not flush payloads", "P4",
              Leak("broker", "flush", "/log"), witnesses=(90,)),
        Plant("missing-invalidate", "brokers read order entries from their cache", "P8",
              Leak("broker", "invalidate", "/order-", SLOTS_OFFSET), witnesses=(135,)),
        Plant("missing-invalidate-payload", "brokers read payloads from their cache", "P4",
              Leak("broker", "invalidate", "/log"), witnesses=(90,)),
        Plant("missing-invalidate-pending", "the sequencer reads pending entries from its cache", ROLE,
              Leak("sequencer", "invalidate", "/pending", SLOTS_OFFSET), witnesses=(0,)),
        Plant("missing-flush-held", "the sequencer does not flush batches that wait", "P9",
              Leak("sequencer", "flush", "/held"), witnesses=(103,)),
        Plant("missing-flush-checkpoint", "the sequencer does not flush checkpoints", ROLE,
              Leak("sequencer", "flush", "/checkpoint-"), witnesses=(4,)),
        Plant("missing-flush-freed", "brokers do not flush that a chunk is freed", "P4",
              Leak("broker", "flush", "/frontiers", frontier_offset(BrokerLine.CHUNKS)), witnesses=(90,)),
        Plant("missing-flush-lane", "brokers do not flush entries of their lanes", ROLE,
              Leak("broker", "flush", "/order-", SLOTS_OFFSET), lanes=True, witnesses=(135,)),
        Plant("lane-ack-unchecked", "a broker acks batches of its lanes without looking whether it was closed", "P4",
              lanes=True, witnesses=(97,)),
        Plant("lane-frontier-before-entries", "a lane's frontier moves before its entries are flushed", ROLE,
              lanes=True, bias=_ENDS, witnesses=(37,)),
        Plant("slot-reused-early", "pending slots are freed before what they hold is safe", "P9", witnesses=(14,)),
        Plant("frontier-before-entries", "the ordered frontier moves before the entries are flushed", ROLE,
              bias=_REIGNS, witnesses=(8,)),
        Plant("dedupe-off", "a sequence seen before is ordered again", "P2", witnesses=(2,)),
        Plant("earliest-too-late", "a reader that asks for the earliest begins one behind it", "P4",
              witnesses=(26, 1)),
        Plant("laps-forgotten", "a checkpoint takes a session's window for one that has not gone round yet", "P2",
              witnesses=(70_246, 70_065)),
        Plant("held-forgotten", "batches that wait for a gap are lost when it closes", "P3", witnesses=(90, 0)),
        Plant("strong-forgotten-in-checkpoint", "a restored checkpoint takes strong sessions of order 2 for weak ones",
              "P3", bias=_REIGNS, witnesses=(90_000,)),
        Plant("strong-forgotten-at-replay", "a takeover takes strong sessions of order 2 for weak ones", "P3",
              bias=_REIGNS, witnesses=(90_000,)),
        Plant("weak-held", "a weak session's batch waits behind a gap", "P9", witnesses=(90_004,)),
        Plant("durable-before-sync", "a replica's durable line moves before the sync", "P6", bias=_POWER,
              witnesses=(0,)),
        Plant("ack-before-durable", "a broker acks as durable what is only ordered", "P6", bias=_POWER, witnesses=(0,)),
        Plant("serve-above-durable", "a broker serves as durable what is only ordered", "P6", bias=_POWER,
              witnesses=(0,)),
        Plant("old-incarnation-counts", "a durable line of an earlier incarnation counts", "P6", bias=_SEALS,
              witnesses=(12,)),
        Plant("old-range-counts", "a durable line of an earlier range counts", "P6", bias=_SEALS, witnesses=(0,)),
        Plant("seal-at-frontier", "a range is sealed at what is ordered, not at what is durable", "P6", bias=_SEALS,
              witnesses=(147, 90, 43)),
        Plant("cut-left-out", "a replica keeps what it has above the end of a sealed range", "P7", bias=_SEALS,
              witnesses=(90,)),
        Plant("copy-counted-early", "a range names its new copy before that copy is whole", "P1", bias=_DEATHS,
              witnesses=(0,)),
        Plant("damage-cut", "recovery cuts a log at damage in its middle", "P7", bias=_ROT, witnesses=(3, 0)),
        Plant("failover-statistic", "after a loss of the fabric the smallest reply is the end", "P1", bias=_LOSS,
              witnesses=(1,)),
        Plant("too-few-replies", "after a loss of the fabric one reply is enough", "P1", bias=_LOSS, witnesses=(6,)),
        Plant("forgetful-counts", "a replica that says nothing of a range is taken for one with an empty copy", "P1",
              bias=_WIPES, witnesses=(13,)),
        Plant("positions-reused", "after a loss of the fabric positions are handed out again", "P2", bias=_LOSS,
              witnesses=(1,)),
        Plant("checkpoint-above-end", "a session checkpoint on disk speaks of more than is durable", "P1", bias=_LATE,
              witnesses=(1,)),
        Plant("checkpoint-says-more", "a restored checkpoint calls more sequences stored than are", "P1",
              bias=_LOSS, witnesses=(17, 6)),
        Plant("mirror-after-primary", "the fabric's mirror is written some time after the fabric", "P1", bias=_MIRROR,
              witnesses=(4,)),
        Plant("order-slot-reused-early", "order slots are reused before they are durable", ROLE, bias=_SLOW,
              witnesses=(43,)),
        Plant("reissue-left-out", "a takeover does not issue again what readers may still ask for", "P8", bias=_REIGNS,
              witnesses=(4,)),
        Plant("held-not-read", "a takeover forgets batches that wait for a gap to close", "P9", bias=_REIGNS,
              witnesses=(2, 1)),
        Plant("foreseen-is-the-end", "a takeover takes what it read before its epoch line was open for all there is",
              "P2, P5", witnesses=(1019, 1058, 1004)),
        Plant("loss-not-told", "a publisher is not told which of its acked batches are lost", "P1", bias=_LOSS,
              witnesses=(17,)),
        Plant("end-unconfirmed", "a publisher ends without asking whether the memory lives that acked its batches",
              "P1", bias=_LATE, witnesses=(110_021, 110_000)),
        Plant("claimed-number-moved", "after a loss, a batch takes the number of another that its caller knows", "P2",
              bias=_LATE, witnesses=(110_000, 110_030)),
        Plant("lost-gap-untold", "a subscriber passes over what is lost without telling its reader", "P1", bias=_LOSS,
              witnesses=(1,)),
        Plant("lost-gap-from-reader", "a LOST gap begins where the reader is, though what it read before is lost",
              "P1", bias=_LOSS, witnesses=(1,)),
        Plant("end-above-loss", "a reader at the end of a broker's lane does not hear what of it is lost", "P1",
              lanes=True, bias=_ENDED, witnesses=(46,)),
        Plant("lost-called-never-durable", "a reader of what is ordered hears that nothing which it read is lost",
              "P1", bias=_LOSS, witnesses=(0,)),
        Plant("start-unsearched", "a broker takes memory for the start of a lane whose files it has not searched", "P4",
              bias=_LOSS, witnesses=(80_020, 80_027, 80_046)),
        Plant("trimmed-gap-too-long", "a broker tells one index more than there are as trimmed", "P1", bias=_TRIMS,
              witnesses=(7, 2)),
        Plant("table-frontier-too-high", "a broker goes on one index behind what it read in a table", "P4",
              bias=_TABLES, witnesses=(0,)),
        Plant("trim-too-far", "a replica drops segments above the trim", "P1", bias=_TRIMS, witnesses=(0,)),
        Plant("unknown-told-as-failed", "a publisher that ends calls failed what it can't know", "P2", witnesses=(8,)),
        Plant("filter-left-out", "a broker serves all partitions, whatever was asked for", "P4", witnesses=(6, 15)),
        Plant("tail-too-low", "a broker tells the durable end for the ordered one", "P4", bias=_POWER, witnesses=(1,)),
        Plant("damage-left", "a replica does not repair what is damaged", "P7", bias=_ROT, witnesses=(0,)),
        Plant("append-time-goes-back", "a sequencer believes its own clock, whatever its predecessor wrote", "P3",
              bias=_REIGNS, witnesses=(2, 1)),
        Plant("holder-not-fenced", "who opens a session again does not end the one who had it", "P5", bias=_HOLDERS,
              witnesses=(12, 7)),
        Plant("end-recorded-low", "the store is told that the order ended one batch earlier", "P5", bias=_REIGNS,
              witnesses=(1,)),
        Plant("gap-stops-all", "nothing is ordered while a batch waits for its gap to close", "P9", witnesses=(105,)),
        Plant("regions-left", "a sequencer does not remove what epochs before its predecessor left", "P9", bias=_REIGNS,
              witnesses=(2, 1)),
        Plant("copies-left", "a replica keeps copies of ranges that are not its own any more", "P9", bias=_TRIMS,
              witnesses=(10, 1)),
        Plant("topic-id-unchecked", "a request for a deleted topic changes the next one of its name", "P5",
              witnesses=(150_000,)),
        Plant("late-alter-done", "a late request for a deleted topic alters the next one of its name", "P5",
              witnesses=(160_000,)),
        Plant("late-trim-done", "a late request for a deleted topic trims the next one of its name", "P5",
              witnesses=(160_000,)),
        Plant("deleted-memory-left", "a replica keeps the checkpoint regions of a deleted topic open", "P9",
              witnesses=(150_004, 150_000)),
        Plant("deleted-ring-left", "a sequencer keeps the rings of a deleted topic", "P9", witnesses=(150_000,)),
        Plant("deleted-checkpoints-left", "a replica keeps the session checkpoints of a deleted topic", "P9",
              witnesses=(150_001, 150_002)),
        Plant("reference-unchecked", "a broker does not compare a staged batch with what its reference says", "P2",
              witnesses=(170_015, 170_000)),
        Plant("reference-not-durable", "a broker publishes by reference what is only ordered", "P6", bias=_POWER,
              witnesses=(170_002, 170_003)),
        Plant("connections-left", "a broker does not forget connections that are gone", "P9", witnesses=(1, 0)),
        Plant("epoch-opened-late", "a takeover reads first, and opens its epoch line then", "P2, P5", bias=_MOVES,
              witnesses=(160,), scope="ack"),
        Plant("epoch-checked-first", "a broker looks at epoch lines first, and loads results then", scope="ack"),
        Plant("epoch-not-checked", "a broker acts on results without looking at epoch lines", scope="ack"),
        Plant("epoch-not-fenced", "a takeover reads without a fence after it opened its epoch line",
              scope="ack, one host"),
        Plant("ordered-end-from-frontier", "a takeover takes the frontier for the end of the order", scope="ack"),
        Plant("results-before-entries", "a round answers before its entries are flushed", "P2, P5", bias=_STRIKES,
              witnesses=(0,), scope="ack"),
        Plant("answers-not-repeated", "a takeover does not repeat answers that were not read yet", scope="answers"),
        Plant("takeover-reads-forwards", "a takeover reads how far pending rings were read after what was answered",
              scope="answers, one host"),
        Plant("range-not-rechecked", "who counts as durable does not look at the range word again",
              scope="seal, one host"),
        Plant("closing-not-fenced", "a sealer reads durable lines without a fence after its closing word",
              scope="seal, one host"),
        Plant("closing-said-late", "a sealer reads durable lines first, and says closing then", scope="seal, one host"),
        Plant("published-before-decided", "a committer publishes its batches before they are decided", scope="commit"),
        Plant("decided-before-manifest", "a committer decides before its manifest is durable", scope="commit"),
        Plant("published-before-durable", "a committer publishes before the decision is durable", scope="commit"),
        Plant("done-before-published", "an epoch is done before its batches are published", scope="commit"),
        Plant("newer-manifest-published", "a committer publishes its own manifest, whatever was decided",
              scope="commit"),
        Plant("sweep-drops-decided", "the sweep gives up what is staged for writes that are open", scope="sweep"),
    )
}  # fmt: skip


PATCH_POINTS: Final = {
    "published-before-decided": "staging/commit.py",
    "decided-before-manifest": "staging/commit.py",
    "published-before-durable": "staging/commit.py",
    "done-before-published": "staging/commit.py",
    "newer-manifest-published": "staging/commit.py",
    "sweep-drops-decided": "staging/open_writes.py",
    "mirror-after-primary": "fabric/mirror.py",
    "lane-ack-unchecked": "broker/lanes.py",
    "lane-frontier-before-entries": "broker/lane_writer.py",
    "slot-reused-early": "sequencer/sources.py",
    "frontier-before-entries": "sequencer/lane.py",
    "dedupe-off": "sequencer/order.py",
    "held-forgotten": "sequencer/order.py",
    "earliest-too-late": "broker/reader.py",
    "laps-forgotten": "sequencer/checkpoint.py",
    "strong-forgotten-in-checkpoint": "sequencer/checkpoint.py",
    "strong-forgotten-at-replay": "sequencer/replay.py",
    "weak-held": "sequencer/order.py",
    "durable-before-sync": "replica/copies.py",
    "ack-before-durable": "broker/durable.py",
    "serve-above-durable": "broker/stored.py",
    "old-incarnation-counts": "fabric/durability.py",
    "old-range-counts": "fabric/durability.py",
    "seal-at-frontier": "sequencer/ranges.py",
    "cut-left-out": "replica/ranges.py",
    "copy-counted-early": "replica/moving.py",
    "damage-cut": "storage/scan.py",
    "failover-statistic": "sequencer/recovery.py",
    "too-few-replies": "sequencer/recovery.py",
    "forgetful-counts": "sequencer/recovery.py",
    "positions-reused": "sequencer/recovery.py",
    "checkpoint-above-end": "replica/sessions.py",
    "checkpoint-says-more": "sequencer/checkpoint.py",
    "order-slot-reused-early": "sequencer/room.py",
    "reissue-left-out": "sequencer/lane.py",
    "held-not-read": "sequencer/takeover.py",
    "foreseen-is-the-end": "sequencer/takeover.py",
    "loss-not-told": "client/publisher.py",
    "end-unconfirmed": "client/publisher.py",
    "claimed-number-moved": "client/publisher.py",
    "lost-gap-untold": "client/subscriber.py",
    "lost-gap-from-reader": "broker/chain.py",
    "end-above-loss": "broker/lane_reader.py",
    "lost-called-never-durable": "broker/stored.py",
    "start-unsearched": "broker/reads.py",
    "trimmed-gap-too-long": "broker/stored.py",
    "table-frontier-too-high": "broker/reads.py",
    "trim-too-far": "replica/retention.py",
    "unknown-told-as-failed": "client/outbatch.py",
    "filter-left-out": "broker/found.py",
    "tail-too-low": "broker/reads.py",
    "damage-left": "replica/repair.py",
    "append-time-goes-back": "sequencer/lane.py",
    "holder-not-fenced": "sequencer/control.py",
    "end-recorded-low": "sequencer/state.py",
    "gap-stops-all": "sequencer/state.py",
    "regions-left": "sequencer/sweeping.py",
    "copies-left": "replica/ranges.py",
    "topic-id-unchecked": "placement/decisions.py",
    "late-alter-done": "placement/topics.py",
    "late-trim-done": "placement/topics.py",
    "deleted-memory-left": "replica/sessions.py",
    "deleted-ring-left": "sequencer/state.py",
    "deleted-checkpoints-left": "replica/ranges.py",
    "reference-unchecked": "broker/references.py",
    "reference-not-durable": "broker/references.py",
    "connections-left": "broker/state.py",
    "epoch-opened-late": "sequencer/state.py",
    "epoch-checked-first": "broker/relay.py",
    "epoch-not-checked": "broker/epoch.py",
    "epoch-not-fenced": "fabric/epochs.py",
    "ordered-end-from-frontier": "sequencer/takeover.py",
    "results-before-entries": "sequencer/state.py",
    "answers-not-repeated": "sequencer/takeover.py",
    "takeover-reads-forwards": "sequencer/takeover.py",
    "range-not-rechecked": "fabric/durability.py",
    "closing-not-fenced": "sequencer/ranges.py",
    "closing-said-late": "sequencer/ranges.py",
}
"""Modules in which role code asks whether a bug is planted."""


class LeakyRegion:
    """A region of which one primitive is forgotten."""

    def __init__(self, region: Region, leak: Leak) -> None:
        self._region, self._leak = region, leak
        self.name, self.shape = region.name, region.shape
        self.data: Bytes = region.data
        self.close, self.reserve = region.close, region.reserve

    def flush(self, offset: int, length: int) -> None:
        if not self._leak.forgets("flush", self.name, offset):
            self._region.flush(offset, length)

    def invalidate(self, offset: int, length: int) -> None:
        if not self._leak.forgets("invalidate", self.name, offset):
            self._region.invalidate(offset, length)


class LeakyFabric:
    """A fabric whose user forgets a primitive."""

    def __init__(self, fabric: Fabric, leak: Leak) -> None:
        self._fabric, self._leak = fabric, leak
        self.generation, self.coherent_only = fabric.generation, fabric.coherent_only
        self.exists, self.names, self.remove, self.fence = fabric.exists, fabric.names, fabric.remove, fabric.fence

    def create(self, name: str, shape: Shape) -> Region:
        return LeakyRegion(self._fabric.create(name, shape), self._leak)

    def attach(self, name: str, writable: bool = False) -> Region:
        return LeakyRegion(self._fabric.attach(name, writable), self._leak)


def _wrap(leaks: list[Leak]) -> Wrap:
    def wrap(role: str, fabric: Fabric) -> Fabric:
        for leak in leaks:
            if leak.role == role:
                fabric = LeakyFabric(fabric, leak)
        return fabric

    return wrap


def bias_of(names: Sequence[str]) -> Bias | None:
    """What the worlds are like in which these bugs are looked for."""
    return next((PLANTS[name].bias for name in names if name in PLANTS and PLANTS[name].bias is not None), None)


@contextmanager
def planted(names: Sequence[str]) -> Iterator[Wrap]:
    """Plant these bugs for a while. Gives what wraps the fabrics of roles."""
    unknown = [name for name in names if name not in PLANTS]
    if unknown:
        raise BadValue(f"there are no planted bugs {unknown}", f"choose from {sorted(PLANTS)}")
    chosen = [PLANTS[name] for name in names]
    flags = {plant.name for plant in chosen if plant.leak is None}
    ACTIVE.update(flags)
    try:
        yield _wrap([plant.leak for plant in chosen if plant.leak is not None])
    finally:
        ACTIVE.difference_update(flags)
