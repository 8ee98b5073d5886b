"""Scope "seal": a range is sealed while replicas append, sync and report, and a broker counts durable entries.

These parts run here: fabric/leader.py (the counter), `RangeKeeper.seal` of sequencer/ranges (the sealer), and the order
of replica/copies.py for replicas: append, sync, and only then the durable line, with the tables of fabric/lines.py. A
disk is two numbers, appended and synced; a crash loses the unsynced part. The store holds the seal.
"""

from __future__ import annotations

from typing import Any, Final

from embarcadero.env import Env, SystemClock
from embarcadero.fabric.layout import frontier_offset
from embarcadero.fabric.leader import Durability, DurableLines, EpochTable, create_durable, create_epochs, create_ranges
from embarcadero.fabric.lines import FIRST_LINE, FrontierWriter, TaggedWriter
from embarcadero.fabric.region import EPOCHS_REGION, durable_region, ranges_region
from embarcadero.sequencer.ranges.keeper import LaneRange, RangeKeeper, Replicas, SequencerCounters
from embarcadero.types import Range, RangeKey, ReplicaRef, Topic
from embarcadero_proof.bugs.table import is_injected
from embarcadero_proof.sim.exhaustive.actor import Lines, Play, Stage
from embarcadero_proof.sim.exhaustive.explore import Facts, Scope
from embarcadero_proof.sim.exhaustive.regions import FirstFabric

_TOPIC: Final = Topic(name="t", lane=0, replicas=2, durable_on=1)


def _range(replicas: int, durable_on: int) -> Range:
    refs = [ReplicaRef(replica=r, incarnation=1, disk=f"d{r}") for r in range(replicas)]
    return Range(lane=0, number=1, start=0, start_seq=0, replicas=refs, durable_on=durable_on)


class _Lane:
    """The part of a lane that a seal needs: everything is ordered."""

    def __init__(self, entries: int) -> None:
        self.order = self
        self.next_index = entries

    def seq_at(self, index: int) -> int:
        return index

    def wake(self, _replicas: Any, _first: Any) -> None:
        pass


class _Directory:
    """The part of the directory that a seal needs: `ranges` and `replicas`."""

    def __init__(self, stage: Stage, range_: Range) -> None:
        self._stage, self._range = stage, range_
        self.ranges = self.replicas = self

    def all(self) -> list[Any]:
        return []

    def seal_and_open(self, lane: int, number: int, end: int, end_seq: int, refs: Any, epoch: int) -> Range | None:
        self._stage.call("seal", end)
        self._stage.report("sealed", end)
        return Range(lane=0, number=number + 1, start=end, start_seq=end_seq, replicas=refs, durable_on=1)


class _Seal:
    """Replicas follow `entries` entries; a broker counts; the range is sealed at some time."""

    def __init__(self, entries: int, replicas: int, durable_on: int) -> None:
        self._entries, self._range = entries, _range(replicas, durable_on)

    def begin(self, lines: Lines) -> Any:
        """Open the range with nothing appended. The model: the end of the seal, and the disks."""
        fabric = FirstFabric(lines)
        create_epochs(fabric)
        table = EpochTable(fabric, fabric.attach(EPOCHS_REGION))
        table.open(1)
        table.start(1)
        create_ranges(fabric, 1).add(RangeKey(0, 0), 1 << 1)
        for ref in self._range.replicas:
            create_durable(fabric, ref).add(RangeKey(0, 1), 0)
        return (None, ((0, 0),) * len(self._range.replicas))

    def call(self, world: Any, actor: str, asked: tuple[Any, ...]) -> tuple[Any, Any]:
        """Call the store, or a disk."""
        sealed, disks = world
        if asked[0] == "seal":
            return (asked[1], disks), None
        at = int(actor.removeprefix("replica-"))
        appended, synced = disks[at]
        disk = (appended + 1, synced) if asked[0] == "append" else (appended, appended)
        return (sealed, (*disks[:at], disk, *disks[at + 1 :])), None

    def replica(self, number: int) -> Play:
        """Append, sync, report."""

        def play(stage: Stage) -> None:
            region = stage.attach(durable_region(self._range.replicas[number]), writable=True)
            line = FrontierWriter(region, frontier_offset(FIRST_LINE) + 16)
            for end in range(1, self._entries + 1):
                stage.remembers(end)
                stage.call("append")
                if is_injected("durable-before-sync"):
                    line.advance(end)
                stage.call("sync")
                line.advance(end)

        return play

    def counter(self, stage: Stage) -> None:
        """Count once, at any time."""
        epochs = EpochTable(stage, stage.attach(EPOCHS_REGION))
        durability = Durability(stage, epochs, lambda _lane, number: self._range if number == 1 else None)
        durability.follow(1)
        stage.report("counted", durability.through(0))

    def sealer(self, stage: Stage) -> None:
        """Seal once, at any time."""
        keeper = RangeKeeper.__new__(RangeKeeper)
        _prepare(keeper, stage, self._range)
        keeper.seal(LaneRange(self._range, _TOPIC, _Lane(self._entries)), self._range.replicas, "")  # type: ignore[arg-type]

    def check(self, world: Any, facts: Facts) -> str:
        """Counted entries are on enough disks and below the seal; entries below the seal are on enough disks, too."""
        sealed, disks = world
        needed, synced = self._range.durable_on, [synced for _, synced in disks]
        counted = max((fact[1] for fact in facts if fact[0] == "counted"), default=0)
        if sum(end >= counted for end in synced) < needed:
            return f"{counted} entries were counted as durable, and disks have {synced}"
        if sealed is not None and counted > sealed:
            return f"{counted} entries were counted as durable, and the range was sealed at {sealed}"
        if sealed is not None and sum(end >= sealed for end in synced) < needed:
            return f"the range was sealed at {sealed}, and disks have {synced}"
        return ""


def seal_scope(entries: int, replicas: int, durable_on: int) -> Scope:
    """Build the scope. One replica may crash at any time."""
    world = _Seal(entries, replicas, durable_on)
    plays: dict[str, Play] = {f"replica-{number}": world.replica(number) for number in range(replicas)}
    return Scope(
        f"seal against append, {replicas} replicas, {durable_on} count",
        plays | {"sealer": world.sealer, "counter": world.counter}, world.begin, world.call, world.check, world.check,
        mortal=("replica-0",),
    )  # fmt: skip


def _prepare(keeper: RangeKeeper, stage: Stage, range_: Range) -> None:
    """Prepare a keeper that has kept this range for a while: its words are in memory, and it has no other lane."""
    words = TaggedWriter(stage.attach(ranges_region(1), writable=True))
    at = frontier_offset(FIRST_LINE)
    words._values[RangeKey(0, 0)] = (
        FrontierWriter(stage.attach(ranges_region(1)), at + 16), FrontierWriter(stage.attach(ranges_region(1)), at + 24)
    )  # fmt: skip
    keeper._env, keeper._fabric, keeper._epoch = Env(SystemClock()), stage, 1
    keeper._directory, keeper._now_us = _Directory(stage, range_), 0  # type: ignore[assignment]
    keeper._counters, keeper._words, keeper._unsettled = SequencerCounters(), words, {}
    keeper._changing, keeper._wakes = [], True
    keeper.lines = DurableLines(stage)
    keeper.replicas = Replicas(keeper.lines, 0)
