"""What all parts of one broker share: what its process gives it, what it knows of the store, and what it counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from embarcadero.broker.counters import BrokerCounters
from embarcadero.config import DEFAULTS, Config, FabricSizes
from embarcadero.config.table import BrokerKeys as BrokerSettings
from embarcadero.env import Env
from embarcadero.fabric.region import Fabric
from embarcadero.placement.directory import Directory, StoreChange, StoreWatch
from embarcadero.types import Member, MemberState, Topic, TopicLane
from embarcadero.wire import messages as m


def lane_slots(sizes: FabricSizes) -> int:
    """Slots of a lane's ring: fewer than a topic's one lane of orders 2 and 5 has, since every broker has one."""
    return sizes.order_slots // 2


def lane_margin(sizes: FabricSizes) -> int:
    """How many entries a broker may write beyond what it knows to be acked; readers keep that far from its lap."""
    return min(sizes.round_entries, lane_slots(sizes) // 4)


@dataclass(frozen=True, slots=True)
class BrokerContext:
    """Who this broker is, and what it has around it."""

    env: Env
    fabric: Fabric
    directory: Directory
    member: Member
    sizes: FabricSizes
    config: Config = DEFAULTS
    counters: BrokerCounters = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "counters", BrokerCounters(self.sizes.results_slots))

    @property
    def settings(self) -> BrokerSettings:
        """The configuration of brokers."""
        return self.config.broker


class StoreView:
    """Topics, members and trims, as the store had them when it was read last."""

    def __init__(self, directory: Directory, changed: Callable[[], None], moved: Callable[[int], object]) -> None:
        self._directory, self._changed, self._moved = directory, changed, moved
        self.topics: dict[str, Topic] = {}  # by name
        self.lanes: dict[int, Topic] = {}  # by their own lane
        self.trims: dict[int, int] = {}  # lane -> index below which it was trimmed
        self.members: list[Member] = []
        self.broker_lanes: dict[int, TopicLane] = {}  # lanes of orders 0 and 1, each with its broker
        self._watch = StoreWatch(directory)

    def refresh(self) -> None:
        """Learn from the store: topics, members, the newest epoch."""
        change = self._watch.look()
        if change is StoreChange.NOTHING:
            return
        if change is StoreChange.EVERYTHING:
            self._read_all()
        self._moved(self._directory.elections.started_epoch())
        self._watch.done()

    def _read_all(self) -> None:
        topics = {topic.name: topic for topic in self._directory.topics.all()}
        trims, members = self._directory.topics.trims(), self._directory.members.all()
        self.broker_lanes = {lane.lane: lane for lane in self._directory.lanes.all()}
        self.topics, self.trims, self.members = topics, trims, members
        self.lanes = {topic.lane: topic for topic in topics.values()}
        self._changed()

    def topic_lane(self, lane: int) -> int:
        """The number by which a lane's topic is known: lanes of brokers have numbers of their own."""
        of_broker = self.broker_lanes.get(lane)
        return lane if of_broker is None else of_broker.topic

    def topic_name(self, lane: int) -> str | None:
        """The topic that a lane belongs to."""
        topic = self.lanes.get(self.topic_lane(lane))
        return None if topic is None else topic.name

    def live(self) -> list[Member]:
        """Brokers that are alive, as far as the store knows."""
        return [member for member in self.members if member.state is MemberState.LIVE]

    def addresses(self, but: Member | None = None) -> list[m.BrokerAddress]:
        """Where clients find the live brokers, one left out."""
        return [
            m.BrokerAddress(broker=o.broker, incarnation=o.incarnation, host=o.host, port=o.port, handle=o.handle)
            for o in self.live()
            if but is None or o.handle != but.handle
        ]
