"""The directory: topics, lanes, ranges, members and elections, as decisions over a store.

Theory of operation. Every method that changes something reads the values on which its decision rests, and then asks the
store for one transaction that is conditional on exactly these. If another process was faster, the method reads and
decides again. So several processes may share a directory without a lock. Permanent numbers (lanes, incarnations,
ranges, region handles, epochs) come from counters in the store, and are never handed out twice while anything may still
refer to them.

The directory itself has the cluster's identity and its generations. Each of its parts is an object of its own. The
elections are in this file too. `records.py` lists the keys.
"""

from __future__ import annotations

import math
import secrets
import shutil
import tempfile
from collections.abc import Set as AbstractSet
from contextlib import closing
from enum import Enum
from pathlib import Path
from typing import NamedTuple

import msgspec

from embarcadero.env import Ids, random_id
from embarcadero.errors import BadValue, DiskFailed, TooMany
from embarcadero.limits import CANDIDATES_MAX, EPOCHS_AHEAD_MAX, EPOCHS_MAX, LANES_MAX, PAST_GENERATIONS_MAX, TOPICS_MAX
from embarcadero.placement.members import Members, ReplicaMembers
from embarcadero.placement.ranges import BrokerLanes, RangeChains
from embarcadero.placement.records import (
    NOT_WORKED_BY,
    CandidateNote,
    ClusterRecord,
    Decider,
    DecisionPlan,
    EarlierGeneration,
    Epochs,
    EpochStart,
    HandOver,
    Incarnation,
    LaneStart,
    LeadershipRecord,
    MirroredEnd,
    Presence,
    Retired,
    Stopping,
    candidate_key,
    trim_key,
)
from embarcadero.placement.store import Outline, Store, open_store
from embarcadero.placement.tiers import Tiers
from embarcadero.placement.topics import Readers, Topics, forget_readers, next_lane
from embarcadero.types import Member, Range, ReplicaMember, ReplicaState, Tier, TopicLane


class Directory:
    """All decisions of a cluster. Any number of processes may have a directory over the same store.

    It belongs to the generation in which it was made: epochs of another generation decide nothing through it.
    """

    def __init__(
        self, store: Store, cluster_id: str | None = None, topics_max: int = TOPICS_MAX, ids: Ids = random_id
    ) -> None:
        decider = self._decider = Decider(store, cluster_id or secrets.token_hex(4))
        self.members = Members(decider)
        self.replicas = ReplicaMembers(decider)
        self.elections = Elections(decider)
        self.topics = Topics(decider, self.replicas, topics_max, ids)
        self.lanes = BrokerLanes(decider, self.replicas)
        self.ranges = RangeChains(decider)
        self.tiers = Tiers(decider)
        self.readers = Readers(decider)

    @property
    def cluster_id(self) -> str:
        """Eight hexadecimal digits, for the life of the store."""
        return self._decider.cluster.id

    @property
    def generation(self) -> int:
        """Number of the fabric: the cluster's id in the high half, the count of generations in the low half."""
        return int(self._decider.cluster.id, 16) << 32 | self._decider.cluster.generation

    def revision(self) -> int:
        """The store's revision. It grows with every change, and is cheap to read."""
        return self._decider.store.revision()

    def outline(self) -> Outline:
        """Outline all values that brokers, sequencers and replicas work with. Elections do not change it."""
        return self._decider.store.outline(NOT_WORKED_BY)

    def expire(self) -> bool:
        """Raise the revision for members whose lease has ended. True if there were any. Call it periodically."""
        return self._decider.store.expire()

    @property
    def log_id(self) -> str:
        """The id in segments of this cluster: its own, or that of the original of a restored copy."""
        return self._decider.cluster.log or self._decider.cluster.id

    @property
    def copied_from(self) -> tuple[str, ...]:
        """During a restore, the ids that folders of replicas may still have; otherwise empty."""
        return self._decider.cluster.copied_from

    def restore(self) -> tuple[str, str]:
        """Give the store of a copied folder its own identity. Returns the ids before and after.

        Recorded ports and mirrors belong to the original, so they are cleared. Tables belong to the original too: the
        copy reads them, but each gets a new id, which prevents the copy's tiering job from writing them. `copied_from`
        stays until `finish_restore`.
        """
        after = secrets.token_hex(4)

        def plan_it(plan: DecisionPlan) -> ClusterRecord:
            before = plan.cluster()
            restored = msgspec.structs.replace(
                before,
                id=after,
                log=before.log or before.id,
                copied_from=(*before.copied_from, before.id),
                mirror="",
                past=tuple(msgspec.structs.replace(past, mirror="") for past in before.past),
            )
            for key, last in plan.list("incarnations/", Incarnation):
                plan.put(key, msgspec.structs.replace(last, port=0))
            for key, tier in plan.list("tiers/", Tier):
                plan.put(key, msgspec.structs.replace(tier, id=secrets.token_hex(8)))
            plan.put("cluster", restored)
            return restored

        return self._decider.decide_cluster(plan_it).copied_from[-1], after

    def finish_restore(self) -> None:
        """End a restore: all folders of replicas have the new id."""

        def plan_it(plan: DecisionPlan) -> ClusterRecord:
            finished = msgspec.structs.replace(plan.cluster(), copied_from=())
            plan.put("cluster", finished)
            return finished

        self._decider.decide_cluster(plan_it)

    def begin_generation(self, mirror: str = "", data_dir: str = "") -> int:
        """Begin a generation with an empty fabric: members and epochs are forgotten, topics stay.

        `mirror` is the location of the fabric's mirror. It is remembered until a later generation has recovered all
        lanes. `data_dir` is the cluster's current folder. Folders of replicas are in it, even if it has moved.

        Topics with replicas keep their lanes, ranges, ceilings and trims. The others are empty and get new lanes, not
        those of the previous generation. So a client that was paused during the restart gets "unknown" instead of
        reading or writing another topic. Topics that an earlier version made get their ids.
        """

        def plan_it(plan: DecisionPlan) -> ClusterRecord:
            cluster = plan.cluster()
            topics = self.topics.all_with_ids(plan)
            kept = {topic.lane for topic in topics if topic.replicas}
            begun = msgspec.structs.replace(
                cluster,
                generation=cluster.generation + 1,
                lanes_left=LANES_MAX - len(topics),
                mirror=mirror,
                past=_earlier_generations(plan, cluster, mirror),
            )
            retired = list(plan.list("retired/", Retired))
            for key, _ in retired:
                plan.delete(key)
            begun = msgspec.structs.replace(
                begun,
                first_lane=begun.next_lane,
                last_range=max([begun.last_range, *(each.last for _, each in retired)]),
            )
            for topic in topics:
                if not topic.replicas:
                    lane = next_lane(begun.next_lane, kept)
                    begun = msgspec.structs.replace(begun, next_lane=(lane + 1) % LANES_MAX)
                    plan.put(f"topics/{topic.name}", msgspec.structs.replace(topic, lane=lane))
                    forget_readers(plan, topic.name)
            _keep_lanes(plan, kept)
            _end_members(plan, data_dir)
            plan.put("epochs", Epochs(generation=begun.generation))
            plan.put("cluster", begun)
            return begun

        self._decider.decide_cluster(plan_it)
        return self.generation

    # --- earlier generations ------------------------------------------------------------------------------------------
    def earlier_generations(self) -> tuple[EarlierGeneration, ...]:
        """Generations whose lanes have not all been recovered yet, oldest first."""
        return (self._decider.one("cluster", ClusterRecord) or self._decider.cluster).past

    def forget_earlier_generations(self, epoch: int) -> bool:
        """Forget earlier generations and their mirrors, because all lanes are recovered. Only the leader may do it."""

        def plan_it(plan: DecisionPlan) -> bool:
            cluster = plan.cluster()
            if not plan.leads(epoch):
                return False
            if cluster.past:
                plan.put("cluster", msgspec.structs.replace(cluster, past=()))
            return True

        return self._decider.decide(plan_it)

    def mirrored_ends(self) -> list[MirroredEnd]:
        """The ends of lanes that were found in mirrors of earlier generations."""
        return self._decider.all("saved/", MirroredEnd)


def _keep_lanes(plan: DecisionPlan, kept: AbstractSet[int]) -> None:
    """Forget lanes of brokers, and trims, except in topics that are on disk."""
    lanes = set(kept)
    for key, lane in plan.list("lanes/", TopicLane):
        if lane.topic in kept:
            lanes.add(lane.lane)
        else:
            plan.delete(key)
    keys = {trim_key(lane) for lane in lanes}
    for key, _ in plan.list("trims/", LaneStart):
        if key not in keys:
            plan.delete(key)


def _end_members(plan: DecisionPlan, data_dir: str) -> None:
    """End all members of the previous generation: its processes do not count any more, whatever they still do."""
    for prefix, kind in (("members/", Member), ("starts/", EpochStart), ("saved/", MirroredEnd)):
        for key, _ in plan.list(prefix, kind):
            plan.delete(key)
    for key, replica in plan.list("replicas/", ReplicaMember):
        folder = f"{data_dir}/replica-{replica.replica}" if data_dir else replica.folder
        ended = msgspec.structs.replace(replica, state=ReplicaState.DEAD, folder=folder)
        if ended != replica:
            plan.put(key, ended)
    for key, _ in plan.list("present/", Presence):
        plan.delete(key)
    forget_elections(plan)
    plan.read("epochs", Epochs)


def _earlier_generations(plan: DecisionPlan, cluster: ClusterRecord, mirror: str) -> tuple[EarlierGeneration, ...]:
    """Add the generation that ends now to the earlier ones, if mirrors are in use and it has started an epoch.

    Without a started epoch it has ordered nothing. If there are too many, the oldest ones are dropped. The oldest one
    that stays loses its mirror: a lane that no later generation began may have been ordered in a dropped one.
    """
    epochs = plan.read("epochs", Epochs)
    begun = epochs is not None and epochs.started and epochs.generation == cluster.generation
    if epochs is None or not begun or not (mirror or cluster.mirror or cluster.past):
        return cluster.past
    ended = EarlierGeneration(generation=cluster.generation, epoch=epochs.started, mirror=cluster.mirror)
    past = (*cluster.past, ended)[-PAST_GENERATIONS_MAX:]
    dropped = len(past) <= len(cluster.past)
    return (msgspec.structs.replace(past[0], mirror=""), *past[1:]) if dropped else past


# --- watching the store -----------------------------------------------------------------------------------------------
class StoreChange(Enum):
    """The kind of change in the store since a role read it last."""

    NOTHING = "nothing"
    ELECTIONS = "elections"  # epochs and elections only
    EVERYTHING = "everything"


class StoreWatch:
    """Reports to one reader of the store which values to read again.

    Call `look` at any rate: while nothing has changed it only compares revisions. Then read the values that it names,
    and call `done`. Until `done` is called the change is reported again, so values stay marked as unread if the store
    fails during the reading. The revision is loaded before the values, so a later change of them is reported too.

        change = watch.look()
        if change is not StoreChange.NOTHING:
            ...  # read from the directory
            watch.done()

    After an election roles read only epochs. All roles do that at the same moment, and acks wait meanwhile.
    """

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._read: tuple[int, Outline] | None = None  # revision and outline as of the last complete reading
        self._seen: tuple[int, Outline] | None = None  # the same, as of the last look

    def look(self) -> StoreChange:
        """Report the change since the last reading that ended with `done`."""
        revision = self._directory.revision()
        if self._read is not None and self._read[0] == revision:
            return StoreChange.NOTHING
        outline = self._directory.outline()
        self._seen = revision, outline
        if self._read is not None and self._read[1] == outline:
            return StoreChange.ELECTIONS
        self._read = None  # a reader that fails from here on has a mixture of old and new values
        return StoreChange.EVERYTHING

    def done(self) -> None:
        """Note that all values named by the last `look` were read."""
        self._read = self._seen

    def reread(self) -> None:
        """Report everything as changed at the next look, unless `done` is called before."""
        self._read = None


# --- elections --------------------------------------------------------------------------------------------------------
STARTS_KEPT = 16
"""Number of started epochs whose ends are kept, for roles that read them late."""


class Elections:
    """Epochs, standbys, and elections of the sequencer that leads in the next epoch.

    An epoch is a number for one sequencer, and only the newest epoch handed out may start or decide. Epochs end with
    the memory that they refer to: after a power loss the next generation begins without them. So a takeover waits for
    no disk. A later decision of a sequencer that must survive a power loss is synced, together with all earlier ones.

    An election is one conditional transaction: it hands out the next epoch, if the standby's view of the newest epoch
    is current, and names the standby. A second standby finds that this epoch is already handed out, and continues to
    stand by. Only speed depends on having one winner: any number of standbys may take epochs, and only the newest epoch
    handed out can start.
    """

    def __init__(self, decider: Decider) -> None:
        self._decider = decider
        self._lease: int | None = None  # lease of the standby that was registered here

    def next_epoch(self, superseded: int | None = None) -> int:
        """Hand out the next epoch. Only a few may be ahead of the last started one, since all roles check their lines.

        `superseded` is an epoch for which the caller saw the line of a later one open, among the lines that all roles
        check. If `superseded` is the last started epoch, no role acts on its leader's writes, and more may be ahead.
        """

        return self._decider.decide(lambda plan: _hand_out(plan, superseded))

    def start_epoch(self, epoch: int, ends: dict[int, int]) -> bool:
        """Start an epoch at these ends (lane -> index). False, without a change, unless it is the newest handed out."""

        def plan_it(plan: DecisionPlan) -> bool:
            epochs = plan.read("epochs", Epochs) or Epochs()
            if not plan.leads(epoch) or epoch <= epochs.started:
                return False
            plan.put("epochs", msgspec.structs.replace(epochs, started=epoch), volatile=True)
            plan.put(f"starts/{epoch:010}", EpochStart(ends), volatile=True)
            for key, _ in list(plan.list("starts/", EpochStart))[: -STARTS_KEPT + 1]:
                plan.delete(key, volatile=True)
            return True

        return self._decider.decide(plan_it)

    def started_epoch(self) -> int:
        """The newest started epoch; 0 when none has started."""
        return (self._decider.one("epochs", Epochs) or Epochs()).started

    def newest_epochs(self) -> Epochs:
        """The newest epoch that was handed out, and the newest started one."""
        return self._decider.one("epochs", Epochs) or Epochs()

    def generation_holds(self) -> bool:
        """Whether this directory's generation is still that of the cluster."""
        return self.newest_epochs().generation == self._decider.generation

    def epoch_ends(self, epoch: int) -> dict[int, int] | None:
        """The end of each lane when this epoch started. None if it never started, or started long ago."""
        start = self._decider.one(f"starts/{epoch:010}", EpochStart)
        return None if start is None else start.ends

    # --- standbys -----------------------------------------------------------------------------------------------------
    def register(self, candidate: int, mark: str, pid: int) -> None:
        """Register a sequencer process that may become the leader, for as long as `pid` lives (0: forever)."""
        if not 0 <= candidate < CANDIDATES_MAX:
            raise BadValue(f"sequencer {candidate} is out of range", f"use 0 to {CANDIDATES_MAX - 1}")
        lease = self._lease = self._decider.store.grant(math.inf, pid)
        note = CandidateNote(candidate, mark)
        self._decider.decide(lambda plan: plan.put(candidate_key(candidate), note, lease, volatile=True))

    def withdraw(self) -> None:
        """Withdraw the standby that this directory registered."""
        if self._lease is not None:
            self._decider.store.revoke(self._lease)
            self._lease = None

    def candidates(self) -> list[CandidateNote]:
        """All live sequencer processes, by number, the leader included."""
        return self._decider.all("candidates/", CandidateNote)

    def elect(self, candidate: int, mark: str, over: int, superseded: int | None = None) -> int | None:
        """Give this standby the epoch after `over`. None if another standby was faster, or the cluster stops.

        `superseded` is the same as for `next_epoch`.
        """

        def plan_it(plan: DecisionPlan) -> int | None:
            epochs = plan.read("epochs", Epochs) or Epochs()
            if epochs.handed_out != over or self._stops(plan.read("stopping", Stopping)):
                return None
            epoch = _hand_out(plan, superseded)
            plan.put("reign", LeadershipRecord(epoch, candidate, mark), volatile=True)
            plan.delete("hand-over", volatile=True)
            return epoch

        return self._decider.decide(plan_it)

    def leadership(self) -> LeadershipRecord | None:
        """The winner of the last election; None before the first."""
        return self._decider.one("reign", LeadershipRecord)

    def ask_hand_over(self, to: int, epoch: int) -> None:
        """Ask a standby to take over from the sequencer of this epoch. The standby does so at its next look."""
        self._decider.decide(lambda plan: plan.put("hand-over", HandOver(to, epoch), volatile=True))

    def asked_hand_over(self) -> HandOver | None:
        """The requested hand-over, if it has not begun."""
        return self._decider.one("hand-over", HandOver)

    def call_off_hand_over(self) -> None:
        """Withdraw the request for a hand-over."""
        self._decider.decide(lambda plan: plan.delete("hand-over", volatile=True))

    def end(self) -> None:
        """Begin a clean stop of the cluster: the leader is the last one of this generation."""
        self._decider.decide(lambda plan: plan.put("stopping", Stopping(self._decider.generation)))

    @property
    def stopping(self) -> bool:
        """Whether a clean stop of the cluster has begun."""
        return self._stops(self._decider.one("stopping", Stopping))

    def _stops(self, found: Stopping | None) -> bool:
        return found is not None and found.generation == self._decider.generation


def _hand_out(plan: DecisionPlan, superseded: int | None) -> int:
    epochs = plan.read("epochs", Epochs) or Epochs()
    epoch = epochs.handed_out + 1
    if epoch > epochs.started + EPOCHS_AHEAD_MAX and superseded != epochs.started:
        raise TooMany(
            f"{EPOCHS_AHEAD_MAX} sequencers took an epoch after {epochs.started}, and none of them started",
            "see the sequencers' logs, then restart the cluster",
        )
    if epoch >= EPOCHS_MAX - 1:  # the table's last line stays empty: a role checks the line after its own
        raise TooMany(f"all {EPOCHS_MAX - 2} epochs of this fabric are used", "restart the cluster")
    plan.put("epochs", msgspec.structs.replace(epochs, handed_out=epoch), volatile=True)
    return epoch


def forget_elections(plan: DecisionPlan) -> None:
    """Forget the leader, its standbys, and a requested hand-over."""
    plan.delete("reign")
    plan.delete("hand-over")
    for key, _ in plan.list("candidates/", CandidateNote):
        plan.delete(key)


# --- stores that no process has open ----------------------------------------------------------------------------------
_FILES = ("", "-wal", "-revision")


class Stored(NamedTuple):
    """The facts of a store about records on disk."""

    cluster: str
    ranges: list[Range]
    trims: dict[int, int]  # lane -> its start
    topics: dict[int, str]  # lane -> name of its topic


def read_stored(path: Path) -> Stored:
    """Read a store that no process has open. Raises Corrupt if it is damaged, and DiskFailed if it is unreadable."""
    with tempfile.TemporaryDirectory(prefix="embarcadero-") as folder:
        copy = Path(folder) / path.name
        try:
            for suffix in _FILES:
                if (source := path.with_name(path.name + suffix)).exists():
                    shutil.copyfile(source, copy.with_name(copy.name + suffix))
        except OSError as error:
            raise DiskFailed(f"the store {path} can't be read: {error.strerror}", "check its disk") from error
        with closing(open_store(copy)) as store:
            return stored(Directory(store))


def stored(directory: Directory) -> Stored:
    """Read the same facts from an open directory."""
    topics = {topic.lane: topic.name for topic in directory.topics.all()}
    topics |= {lane.lane: topics[lane.topic] for lane in directory.lanes.all() if lane.topic in topics}
    return Stored(directory.cluster_id, directory.ranges.all(), directory.topics.trims(), topics)
