"""A standby sequencer: when it takes over, and when it does not. The tests advance the time."""

from __future__ import annotations

import asyncio
import random

import pytest

from embarcadero.config import FabricSizes
from embarcadero.env import Env
from embarcadero.errors import Backpressure, DiskFull, EmbarcaderoError, FabricFull
from embarcadero.fabric.leader import create_epochs
from embarcadero.fabric.region import Fabric, Region, Shape
from embarcadero.limits import EPOCHS_AHEAD_MAX
from embarcadero.placement.directory import Directory
from embarcadero.placement.store import MemoryStore
from embarcadero.sequencer.leader.leadership import ClusterParts
from embarcadero.sequencer.leader.sequencer import Sequencer, StandbySequencer, give_up_epoch, lead
from embarcadero.sequencer.leader.server import serve_standby
from embarcadero_proof.sim.incoherent import IncoherentMemory
from tests.clocks import ManualClock

AFTER_US = 2_000_000
SIZES = FabricSizes(
    pending_slots=16, order_slots=64, held_slots=16, log_bytes=1 << 16, chunk_bytes=1 << 14, sessions=8,
    round_entries=8, dead_log_bytes=0,
)  # fmt: skip


class Standing:
    """Standbys on hosts of their own, each with a clock of its own."""

    def __init__(self, count: int) -> None:
        self.directory = Directory(MemoryStore())
        self.memory = IncoherentMemory(random.Random(1), self.directory.generation)
        create_epochs(self.memory.host("admin"))
        self.clocks = [ManualClock() for _ in range(count)]
        for number, clock in enumerate(self.clocks):
            clock.us += 10**9 * number  # clocks of hosts have nothing in common
        self.candidates = [self.candidate(number) for number in range(count)]

    def candidate(self, number: int) -> StandbySequencer:
        fabric = self.memory.host(f"host-{number}")
        cluster = ClusterParts(fabric, self.directory, SIZES)
        return StandbySequencer(Env(self.clocks[number]), cluster, number, f"boot/{100 + number}/1", AFTER_US)

    def take(self, number: int, epoch: int) -> Sequencer:
        fabric, clock = self.memory.host(f"host-{number}"), self.clocks[number]
        return lead(Env(clock), fabric, self.directory, SIZES, epoch=epoch)

    def move_to(self, number: int) -> int | None:
        """A standby that is asked to take over polls, and need not hurry."""
        epoch = self.candidates[number].look()
        assert not self.candidates[number].hurries
        return epoch

    def first(self) -> Sequencer:
        """StandbySequencer 0 reigns, and everybody has seen it."""
        epoch = self.candidates[0].look()
        assert epoch == 1
        reigning = self.take(0, epoch)
        reigning.round()
        assert [candidate.look() for candidate in self.candidates[1:]] == [None] * (len(self.candidates) - 1)
        return reigning


def test_the_first_standby_starts_and_the_others_wait() -> None:
    """The choice of the first sequencer is not random; if it never comes, another one starts."""
    world = Standing(2)
    assert world.candidates[1].look() is None
    world.clocks[1].us += AFTER_US - 1
    assert world.candidates[1].look() is None
    world.clocks[1].us += 1
    assert world.candidates[1].look() == 1


def test_a_leader_with_heartbeats_is_left_alone() -> None:
    """However much time passes on the standby's own clock, each heartbeat restarts the timeout."""
    world = Standing(2)
    reigning = world.first()
    for _ in range(20):
        world.clocks[0].us += 200_000
        world.clocks[1].us += AFTER_US - 1
        reigning.round()
        assert world.candidates[1].look() is None


def test_a_silent_leader_is_replaced_by_the_observers_clock() -> None:
    """The leader's clock does not count: it may stand still, or run fast."""
    world = Standing(2)
    world.first()
    world.clocks[0].us += 100 * AFTER_US
    assert world.candidates[1].look() is None
    world.clocks[1].us += AFTER_US
    assert world.candidates[1].look() == 2


def test_a_process_that_ended_is_replaced_immediately() -> None:
    """No time passes. The end of a process that no longer leads means nothing."""
    world = Standing(2)
    world.first()
    second = world.candidates[1]
    second.process_ended("boot/100/999")  # its number, but not it
    assert second.look() is None
    assert second.watched == "boot/100/1"
    second.process_ended(second.watched)
    assert second.look() == 2
    reign = world.directory.elections.leadership()
    assert reign is not None
    assert (reign.epoch, reign.candidate, reign.mark, reign.pid) == (2, 1, "boot/101/1", 101)


def test_a_mistake_about_a_process_is_forgotten_with_its_leadership() -> None:
    """It was declared dead and lives: after another leader, it may lead again, and is left alone."""
    world = Standing(2)
    world.first()
    second = world.candidates[1]
    second.process_ended(second.watched)
    assert second.look() == 2
    world.take(1, 2).round()
    world.directory.elections.ask_hand_over(0, 2)
    assert world.move_to(0) == 3
    world.take(0, 3).round()
    assert second.look() is None


def test_of_two_that_notice_one_wins_and_the_other_waits_for_its_heartbeat() -> None:
    """The loser sees the winner's epoch, gives it time, and takes over only when the winner is silent, too."""
    world = Standing(3)
    world.first()
    for candidate in world.candidates[1:]:
        candidate.process_ended("boot/100/1")
    first, second = world.candidates[1:]
    assert first.look() == 2
    assert second.look() is None  # it has not read yet that another was faster: the store refused it
    winner = world.take(1, 2)
    winner.round()
    world.clocks[2].us += AFTER_US - 1
    assert second.look() is None
    world.clocks[2].us += AFTER_US
    assert second.look() == 3


def test_a_stale_view_loses_the_election() -> None:
    """Both decide on the same facts: one transaction goes through, the other changes nothing."""
    directory = Directory(MemoryStore())
    assert [directory.elections.elect(number, f"boot/{number}/1", over=0) for number in (0, 1)] == [1, None]
    assert directory.elections.newest_epochs().handed_out == 1


def test_a_winner_that_does_not_start_gets_twice_the_time() -> None:
    """So two standbys that both take the other for dead do not keep deposing each other."""
    world = Standing(3)
    world.first()
    world.clocks[1].us += AFTER_US
    assert world.candidates[1].look() == 2  # it never starts
    third = world.candidates[2]
    assert third.look() is None
    world.clocks[2].us += 2 * AFTER_US - 1
    assert third.look() is None
    world.clocks[2].us += 1
    assert third.look() == 3
    assert world.candidates[1].look() is None
    assert world.candidates[1].patience_us == 4 * AFTER_US


def test_a_hand_over_is_for_one_standby_and_one_epoch() -> None:
    """The other standbys wait; a request about a past epoch means nothing; it works once."""
    world = Standing(3)
    reigning = world.first()
    world.directory.elections.ask_hand_over(2, epoch=1)
    assert world.candidates[1].look() is None
    assert world.move_to(2) == 2
    assert world.directory.elections.asked_hand_over() is None
    successor = world.take(2, 2)
    assert not successor.deposed
    assert reigning.round() == 0
    assert reigning.deposed
    world.directory.elections.ask_hand_over(1, epoch=1)
    assert world.candidates[1].look() is None
    assert world.candidates[0].look() is None  # it is a standby now, and watches the new leader
    assert world.candidates[0].watched == "boot/102/1"


def test_only_a_planned_move_leaves_time_to_prepare() -> None:
    """While the leader works, a takeover need not hurry; after its death, also during the preparation, it must."""
    world = Standing(3)
    world.first()
    world.directory.elections.ask_hand_over(2, epoch=1)
    assert world.candidates[2].look() == 2
    assert not world.candidates[2].hurries
    world.take(2, 2)
    world.candidates[1].look()
    world.directory.elections.ask_hand_over(1, epoch=2)
    world.candidates[1].process_ended("boot/102/1")
    assert world.candidates[1].look() == 3
    assert world.candidates[1].hurries


def test_an_orderly_stop_ends_elections() -> None:
    """No standby takes over while the cluster stops; in the next generation one starts."""
    world = Standing(2)
    world.first()
    world.directory.elections.end()
    second = world.candidates[1]
    second.process_ended("boot/100/1")
    assert second.look() is None
    world.clocks[1].us += 10 * AFTER_US
    assert second.look() is None
    world.directory.begin_generation()
    assert (
        world.directory.elections.leadership(),
        world.directory.elections.candidates(),
        world.directory.elections.stopping,
    ) == (None, [], False)
    assert world.directory.elections.elect(0, "boot/1/1", over=0) == 1


def test_a_zombie_has_no_effect_and_stands_by_again() -> None:
    """A sequencer that wakes up after a takeover is deposed in its next round; its standby watches the new one."""
    world = Standing(2)
    zombie = world.first()
    world.clocks[1].us += AFTER_US
    epoch = world.candidates[1].look()
    assert epoch is not None
    world.take(1, epoch).round()
    before = {name: world.memory.host("reader").attach(name).data.tobytes() for name in _of(world, "epoch-2/")}
    world.clocks[0].us += 10 * AFTER_US
    assert (zombie.round(), zombie.deposed) == (0, True)
    assert world.candidates[0].look() is None
    assert world.candidates[0].leading == 2
    assert before == {name: world.memory.host("reader").attach(name).data.tobytes() for name in _of(world, "epoch-2/")}


def test_a_hundred_takeovers_leave_no_regions_behind() -> None:
    """Only the regions of the last two epochs exist, however many sequencers there were."""
    world = Standing(2)
    world.first()
    sizes = []
    for turn in range(100):
        number = 1 - turn % 2
        world.directory.elections.ask_hand_over(number, epoch=turn + 1)
        epoch = world.move_to(number)
        assert epoch == turn + 2
        successor = world.take(number, epoch)
        world.clocks[number].us += 1_000_000
        successor.round()
        sizes.append(len(_of(world, "epoch-")))
    assert sizes[-1] == sizes[1]
    assert {name.split("/")[0] for name in _of(world, "epoch-")} == {"epoch-100", "epoch-101"}


def _without_room_for(monkeypatch: pytest.MonkeyPatch, fabric: Fabric, part: str) -> None:
    create = fabric.create

    def full(name: str, shape: Shape) -> Region:
        if part in name:
            raise FabricFull("no room", "make it larger")
        return create(name, shape)

    monkeypatch.setattr(fabric, "create", full)


@pytest.mark.parametrize("part", ["/frontiers", "/held", "/order-0"])
def test_takeovers_without_space_leave_nothing_behind_and_use_up_no_epochs(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often it fails: once there is space, one of them leads."""
    world = Standing(2)
    world.directory.topics.create("t", order=5)
    reigning, candidate, fabric = world.first(), world.candidates[1], world.memory.host("host-1")
    for turn in range(2 * EPOCHS_AHEAD_MAX):
        assert candidate.look() is None
        world.clocks[1].us += candidate.patience_us
        epoch = candidate.look()
        assert epoch == turn + 2
        with monkeypatch.context() as patch:
            _without_room_for(patch, fabric, part)
            with pytest.raises(FabricFull):
                world.take(1, epoch)
        give_up_epoch(fabric, world.directory, epoch)
        assert {name.split("/")[0] for name in _of(world, "epoch-")} == {"epoch-1"}
    assert candidate.look() is None
    world.clocks[1].us += candidate.patience_us
    epoch = candidate.look()
    assert epoch is not None
    assert not world.take(1, epoch).deposed
    assert (reigning.round(), reigning.deposed) == (0, True)


def test_regions_of_a_started_epoch_are_not_removed() -> None:
    """It failed after its transaction: its entries are the order."""
    world = Standing(1)
    reigning = world.first()
    before = _of(world, "epoch-")
    give_up_epoch(world.memory.host("host-0"), world.directory, reigning.epoch)
    assert _of(world, "epoch-") == before


class Chair:
    """A factory of sequencers that fails at first."""

    def __init__(self, world: Standing, error: EmbarcaderoError, tries: int, stop: asyncio.Event) -> None:
        self.world, self.error, self.tries, self.stop = world, error, tries, stop
        self.failed: list[int] = []
        self.follow = lambda _: None
        self.prepare = lambda _: False
        self.successor = lambda: False
        self.give_up = lambda: None

    def take(self, epoch: int) -> tuple[Sequencer, Chair]:
        if len(self.failed) < self.tries:
            raise self.error
        return self.world.take(1, epoch), self

    def begin(self, sequencer: Sequencer) -> None:
        assert not sequencer.deposed
        self.stop.set()

    def fail(self, epoch: int, why: str) -> None:
        assert why == self.error.message
        self.failed.append(epoch)

    rung = False

    async def wait(self, timeout_s: float, on_ring: object = None) -> None:
        self.world.clocks[1].us += int(timeout_s * 1_000_000)
        await asyncio.sleep(0)


@pytest.mark.parametrize("error", [FabricFull("full", ""), Backpressure("locked", ""), DiskFull("full", "")])
def test_a_takeover_that_fails_temporarily_is_tried_again(error: EmbarcaderoError) -> None:
    """The process stands by again instead of ending; the very first one ends, with the reason."""
    world = Standing(2)
    world.first()

    async def stand(tries: int) -> Chair:
        stop = asyncio.Event()
        chair = Chair(world, error, tries, stop)
        await serve_standby(world.candidates[1], chair, chair, stop)
        return chair

    assert asyncio.run(stand(2)).failed == [2, 3]
    assert world.directory.elections.started_epoch() == 4
    world = Standing(2)
    with pytest.raises(type(error)):
        asyncio.run(stand(1))


def _of(world: Standing, prefix: str) -> list[str]:
    return [name for name in world.memory.host("reader").names() if name.startswith(prefix)]
