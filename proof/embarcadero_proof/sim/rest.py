"""A long rest after all is healed and settled: no client calls for minutes, then all clients return.

Clients are stopped like a closed laptop; roles do their background work. Afterwards readers continue at their
positions, new publishers need a working cluster, and everything has to settle once more (P8).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from embarcadero_proof.sim.clients import ClientProcess
from embarcadero_proof.sim.leftovers import see_leftovers
from embarcadero_proof.sim.plan import SECOND_US, StreamPlan
from embarcadero_proof.sim.roles import Poller

if TYPE_CHECKING:
    from embarcadero_proof.sim.world import World

SLEEP_US: Final = 20 * SECOND_US
"""How long roles sleep while no client calls: long enough that minutes cost little."""

LIGHT_SLEEP_US: Final = SECOND_US // 2
"""The same in runs with standby sequencers, which would take a longer sleep for death."""

_JOB_US: Final = 10 * SECOND_US
"""Disks are slow in a rest: replicas scrub their segments again and again, and that need not be often."""

_SAMPLE_US: Final = 2 * SECOND_US
_BATCHES: Final = 4


class Rest:
    """The rest of one run; at most one."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.taken = world.plan.rest_us == 0
        self.taken_us = 0
        self.sample_every_us = _SAMPLE_US

    def begin(self) -> None:
        """Put all roles and clients to sleep."""
        world, self.taken = self._world, True
        sleep_us = LIGHT_SLEEP_US if world.plan.sequencers else SLEEP_US
        self.sample_every_us = 5 * sleep_us
        world.note("cluster", f"rests for {world.plan.rest_us // SECOND_US} s")
        for process in world.processes:
            if isinstance(process, ClientProcess) and process.alive and not process.finished:
                process.pause(world.plan.rest_us)
        usual = world.plan.sleep_max_us, world.plan.durable.job_us
        world.plan.sleep_max_us, world.plan.durable.job_us = sleep_us, _JOB_US
        world.queue.after(world.plan.rest_us, lambda: self._end(*usual))

    def _end(self, sleep_max_us: int, job_us: int) -> None:
        world = self._world
        see_leftovers(world)
        world.plan.durable.job_us = job_us
        self.taken_us = world.plan.rest_us
        world.plan.sleep_max_us, self.sample_every_us = sleep_max_us, _SAMPLE_US
        world.note("cluster", "is called again")
        for process in world.processes:
            if isinstance(process, Poller) and process.alive:
                process.wake(0)  # else the processes that are awake would take this one for silent
        for number, topic in enumerate(world.plan.topics):
            ack = 2 if topic.replicas and number % 2 else 1
            plan = StreamPlan(f"rested-{number}", topic, False, _BATCHES, 100_000, 4, 1 << 16, 0, 0.0, ack=ack)
            world.start_stream(plan)
        world.settle_by(7 * SECOND_US)
