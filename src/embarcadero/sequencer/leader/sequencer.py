"""The sequencer of one epoch: it takes over, does rounds, and between them what keeps the lanes in order.

`lead` is the usual way in. A process that stands by makes a Sequencer, which prefetches while another one may lead, and
calls `begin` when nobody has to wait any longer than needed.
"""

from __future__ import annotations

from embarcadero.config import DEFAULTS, FabricSizes
from embarcadero.config.table import SequencerKeys as Settings
from embarcadero.env import Env, Journal
from embarcadero.fabric.names import epoch_folder, writer_of
from embarcadero.fabric.region import Fabric
from embarcadero.placement.directory import Directory
from embarcadero.sequencer.leader.brokers import BrokerIncarnations
from embarcadero.sequencer.leader.lanes import LeaderLanes
from embarcadero.sequencer.leader.leadership import Leadership
from embarcadero.sequencer.leader.rounds import Rounds
from embarcadero.sequencer.leader.takeover import Takeover
from embarcadero.sequencer.leader.upkeep import Upkeep
from embarcadero.sequencer.order.lane import Lane
from embarcadero.sequencer.order.sessions import ReorderBuffer
from embarcadero.sequencer.ranges.keeper import RangeKeeper, SequencerCounters
from embarcadero.sequencer.ranges.recovery import Recovery
from embarcadero.sequencer.ranges.recovery_sources import Mirrors
from embarcadero.steps import Step


class Sequencer:
    """Leads one epoch. `deposed` is set when a later one has begun."""

    def __init__(
        self,
        env: Env,
        fabric: Fabric,
        directory: Directory,
        sizes: FabricSizes,
        settings: Settings = DEFAULTS.sequencer,
        epoch: int | None = None,
        mirrors: Mirrors | None = None,
    ) -> None:
        """Get ready. `begin` is called before anything else.

        `epoch`: one that was won in an election; without, it takes the next one, whoever leads.
        """
        self.leadership = leader = Leadership(env, fabric, directory, sizes, settings, epoch)
        self._lanes = LeaderLanes(leader, mirrors)
        self.brokers = BrokerIncarnations(env, fabric, directory, leader.epoch, sizes, leader.frontiers)
        self._upkeep = Upkeep(leader, self._lanes, self.brokers)
        self._rounds = Rounds(leader, self._lanes, self.brokers, self._upkeep)
        self._takeover = Takeover(leader, self._lanes, self.brokers, self._upkeep)
        leader.unless_deposed(self._takeover.prefetch, None)

    def begin(self) -> None:
        """Take over: from the moment that our epoch line is open others wait until we have started."""
        leader = self.leadership
        if not leader.deposed:
            leader.tick()
            leader.epochs.open(leader.epoch)
            leader.env.steps.at(Step.TAKEOVER_EPOCH_OPEN)
            leader.unless_deposed(self._takeover.begin, None)

    def round(self) -> int:
        """One pass over all rings. Returns how much there was to do: 0 when idle."""
        leader = self.leadership
        return 0 if leader.is_over() else leader.unless_deposed(self._round, 0)

    def _round(self) -> int:
        work = self._rounds.next()
        self._upkeep.be_seen()
        return work

    def drain(self) -> bool:
        """One step towards a clean stop: nothing more is ordered. True when this leadership may end."""
        return self.leadership.is_over() or self._upkeep.drain()

    # --- what the driver asks -----------------------------------------------------------------------------------------
    def behind(self) -> bool:
        """Whether more was published since the round began."""
        return self._rounds.behind()

    def awake(self, now: bool) -> bool:
        """Tell brokers whether we look by ourselves; True if that is news. After a no, look again before sleeping."""
        return self._upkeep.awake(now)

    def next_deadline_us(self) -> int | None:
        """When time will have something to do, at the earliest; None when it has not."""
        return self._rounds.next_deadline_us()

    @property
    def deposed(self) -> bool:
        """Whether a later epoch has begun."""
        return self.leadership.deposed

    @property
    def more(self) -> bool:
        """Whether the last round left published entries behind, for the next one."""
        return self._rounds.more

    @property
    def depth(self) -> int:
        """How many batches every publisher heard in the last round had in flight, at least."""
        return self._rounds.depth

    @property
    def problems(self) -> list[str]:
        """What is wrong with rings, for the log; the driver takes it out."""
        return self.leadership.problems

    @property
    def settings(self) -> Settings:
        """The sequencer's part of the configuration."""
        return self.leadership.settings

    @property
    def journal(self) -> Journal:
        """Where events go."""
        return self.leadership.env.journal

    # --- what others look at ------------------------------------------------------------------------------------------
    @property
    def epoch(self) -> int:
        """The epoch that is led."""
        return self.leadership.epoch

    @property
    def counters(self) -> SequencerCounters:
        """What is counted in this leadership."""
        return self.leadership.counters

    @property
    def lanes(self) -> dict[int, Lane]:
        """The lanes that are ordered here, by number."""
        return self._lanes.by_number

    @property
    def roomless(self) -> set[int]:
        """Lanes for which the fabric has no room."""
        return self._lanes.roomless

    @property
    def buffer(self) -> ReorderBuffer:
        """Batches that wait for a gap to close, of all lanes."""
        return self._lanes.buffer

    @property
    def ranges(self) -> RangeKeeper:
        """Open ranges."""
        return self._lanes.ranges

    @property
    def recovery(self) -> Recovery:
        """Lanes that are on their way back."""
        return self._lanes.recovery


def lead(
    env: Env,
    fabric: Fabric,
    directory: Directory,
    sizes: FabricSizes,
    settings: Settings = DEFAULTS.sequencer,
    epoch: int | None = None,
    mirrors: Mirrors | None = None,
) -> Sequencer:
    """Make a sequencer and take over at once."""
    sequencer = Sequencer(env, fabric, directory, sizes, settings, epoch, mirrors)
    sequencer.begin()
    return sequencer


def give_up_epoch(fabric: Fabric, directory: Directory, epoch: int) -> None:
    """Taking over in this epoch has failed: leave no memory behind, and let others try.

    Nobody reads regions of an epoch that has not started, and of those before ours none will: only the newest handed
    out starts.
    """
    started = directory.elections.started_epoch()
    if started >= epoch:
        return
    vain = {epoch_folder(number) for number in range(started + 1, epoch + 1)}
    for name in fabric.names():
        if writer_of(name) in vain:
            fabric.remove(name)
