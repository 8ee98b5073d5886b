"""Restarts of whole clusters: all processes end together, and the fabric with them."""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING

from embarcadero.fabric.leader import create_epochs
from embarcadero.limits import DRAIN_CHECKPOINT_S_MAX, DRAIN_DURABLE_S_MAX
from embarcadero_proof.sim.history import FabricLost
from embarcadero_proof.sim.incoherent import IncoherentMemory
from embarcadero_proof.sim.mirrors import MIRROR
from embarcadero_proof.sim.plan import CLAIMED_FROM_SEED, SECOND_US
from embarcadero_proof.sim.process import Process

if TYPE_CHECKING:
    from embarcadero_proof.sim.world import World

_DRAIN_US_MAX = int((DRAIN_DURABLE_S_MAX + DRAIN_CHECKPOINT_S_MAX) * SECOND_US)
_CLOSED_SHARE = 0.3
_ARMED_US = 2 * SECOND_US


class Restarts:
    """Ends a cluster and begins the next generation on the same disks."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self._world, self._rng = world, rng
        self.up = True  # there is a cluster, and a process that dies is started again
        self.armed = False  # everything is lost with the next ack
        self._stopping = False  # asked to stop, and not gone yet

    def lose_everything(self) -> tuple[str, int] | None:
        """Kill all processes and lose the fabric; often the power too, with the unsynced data of disks."""
        if not self.up:
            return None
        if self._world.seed >= CLAIMED_FROM_SEED and not self.armed:
            self.armed = True  # so that a batch acked a moment before is lost more often
            self._world.queue.after(_ARMED_US, self.acked)
            return "cluster", _ARMED_US + 9 * SECOND_US
        self._lose(power_cut=self._rng.random() < 0.6)
        return "cluster", self._begin_later() + 5 * SECOND_US

    def acked(self) -> None:
        """Lose everything now, if armed: a publisher just learned that a batch is ordered."""
        if self.armed:
            self.armed = False
            if self.up:
                self._lose(power_cut=True)
                self._begin_later()

    def heal(self) -> None:
        """Lose nothing from here on, and begin the next generation if there is no cluster."""
        self.armed = False
        self.begin()

    def _lose(self, power_cut: bool) -> None:
        world = self._world
        world.see_frontiers()
        world.disks.see_stop(clean=False)
        world.disks.fabric_lost()
        world.mirrors.fabric_lost()
        world.seen(FabricLost(at=world.queue.now_us))
        self._end(power_cut)
        if world.seed >= CLAIMED_FROM_SEED:
            self._close_publishers()

    def _close_publishers(self) -> None:
        """Close some publishers while the cluster is down: their losses must be reported to them all the same."""
        queue, rng = self._world.queue, random.Random(f"{self._world.seed}:closes:{self._world.queue.now_us}")
        for publisher in self._world.live_publishers():
            if rng.random() < (_CLOSED_SHARE if publisher.busy else 1 - _CLOSED_SHARE):
                queue.after(rng.randrange(SECOND_US // 10), partial(publisher.submit, publisher.close))

    def _begin_later(self) -> int:
        down_us = self._rng.randrange(SECOND_US // 10, 4 * SECOND_US)
        self._world.queue.after(down_us, self.begin)
        return down_us

    # --- a clean stop -------------------------------------------------------------------------------------------------
    def stop_cleanly(self) -> tuple[str, int] | None:
        """Stop and start like `down` and `up`: brokers leave, the sequencer drains, replicas end; then start again."""
        world = self._world
        if not self.up:
            return None
        self.up, self._stopping = False, True  # no process is started again meanwhile
        world.note("cluster", "is told to stop")
        for broker in world.brokers.values():
            broker.leave()
        world.queue.after(2 * SECOND_US, self._brokers_gone)
        return "cluster", 15 * SECOND_US

    def _brokers_gone(self) -> None:
        world = self._world
        if not self._stopping:
            return
        for broker in world.brokers.values():
            broker.die()
            world.directory.members.mark_dead(broker.member.broker, broker.member.incarnation)
        world.directory.elections.end()
        world.sequencer.drain()
        self._wait_for_drain(world.queue.now_us + 2 * _DRAIN_US_MAX)

    def _wait_for_drain(self, until_us: int) -> None:
        """Wait for the drain. The stop may fail because of other faults: then it is one more loss of the fabric."""
        world = self._world
        if not self._stopping:
            return
        sequencer = world.sequencer
        if sequencer.alive and not sequencer.drained and world.queue.now_us < until_us:
            world.queue.after(SECOND_US // 10, lambda: self._wait_for_drain(until_us))
            return
        clean = not any(range_.open for range_ in world.directory.ranges.all())
        world.note("cluster", f"stops {'cleanly' if clean else 'with open ranges'}")
        if clean:
            world.see_frontiers()
            world.disks.see_stop(clean=True)
            self._end(power_cut=False)
        else:
            self._lose(power_cut=False)
        self._begin_later()

    def _end(self, power_cut: bool) -> None:
        world, self.up, self._stopping = self._world, False, False
        for process in self._roles():
            process.die(silently=power_cut)
        world.network.listening.clear()
        if power_cut:
            for disk in world.disks.devices.values():
                disk.lose_power()
        if "wipe" in world.plan.faults and not world.healed and self._rng.random() < 0.5:
            for victim in world.plan.durable.victims:
                world.disks.replace(victim)

    def _roles(self) -> list[Process]:
        world = self._world
        return [process for process in world.processes if process.alive and process.role in (
            "broker", "sequencer", "replica")]  # fmt: skip

    def begin(self) -> None:
        """Start the next generation, as `up` does on an old data folder.

        There is one cluster at a time: a cluster that is still stopping is killed first, and its fabric is lost.
        """
        world = self._world
        if self.up or world.over():
            return
        if self._stopping:
            self._lose(power_cut=False)
        self.up = True
        generation = world.directory.begin_generation(MIRROR if world.mirrors.on else "")
        world.note("cluster", f"begins generation {generation & 0xFFFF_FFFF}")
        memory = IncoherentMemory(random.Random(f"{world.seed}:memory:{generation}"), generation)
        memory.interrupt = world.memory.interrupt
        world.memory = memory
        world.mirrors.begin(generation)
        create_epochs(world.bare_fabric(world.hosts[0]))
        world.mirrors.interrupt(memory.interrupt)
        world.start_roles()
