"""Faults: at random moments, and in the middle of role code, between any two memory primitives."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from embarcadero_proof.sim.disk_faults import DiskFaults
from embarcadero_proof.sim.history import Fault
from embarcadero_proof.sim.plan import CALM_KINDS, SECOND_US
from embarcadero_proof.sim.process import INTERRUPT_DEPTH_MAX, Crash, Process
from embarcadero_proof.sim.roles import BrokerProcess, SequencerProcess
from embarcadero_proof.sim.swarm_faults import SwarmFaults

if TYPE_CHECKING:
    from embarcadero_proof.sim.world import World

_JUST_AFTER_US = 20_000
_PAUSES_US = (SECOND_US // 10, SECOND_US, 5 * SECOND_US, 20 * SECOND_US, 60 * SECOND_US)


class Faults:
    """The plan's faults, one after the other, until the run heals."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.rng = random.Random(f"{world.seed}:faults")
        self.counts: Counter[str] = Counter()
        self.numbered = 0  # faults that were due
        self.happened: list[int] = []  # numbers of the faults that happened
        self._kinds: dict[str, Callable[[], tuple[str, int] | None]] = {
            "broker-crash": self._broker_crash,
            "broker-pause": lambda: self._pause(self._brokers()),
            "broker-zombie": self._broker_zombie,
            "host-crash": self._host_crash,
            "publisher-crash": self._publisher_crash,
            "publisher-pause": lambda: self._pause(list(world.live_publishers())),
            "publisher-zombie": self._publisher_zombie,
            "lost-batch": self._lose_batch,
            "cut": self._cut,
            "one-way-hole": self._hole,
            "clog": self._clog,
            "sequencer-pause": lambda: self._pause([world.sequencer], 5 * SECOND_US),
            "sequencer-crash": self._sequencer_crash,
            "sequencer-zombie": lambda: self.make_zombie(world.sequencer),
            "hand-over": world.elections.hand_over,
        } | DiskFaults(world, self.rng).kinds
        self.swarm = SwarmFaults(world)

    def start(self) -> None:
        """Plan the first fault of each kind."""
        for kind in self._world.plan.faults:
            if kind in self._kinds or kind in self.swarm.kinds:
                self._next(kind)

    def _next(self, kind: str) -> None:
        rng = self.rng if kind in self._kinds else self.swarm.rng
        wait_us = int(rng.expovariate(1.0) * self._world.plan.faults[kind] * SECOND_US)
        self._world.queue.after(wait_us, lambda: self._happen(kind))

    def _happen(self, kind: str) -> None:
        if self._world.healed:
            return
        if (number := self.claim()) is None:
            self._next(kind)
            return
        done = (self._kinds.get(kind) or self.swarm.kinds[kind])()
        if done is not None:
            self.happened.append(number)
        if done is not None and kind in CALM_KINDS:
            self.counts[kind] += 1
        elif done is not None:
            self.record(kind, *done)
        self._next(kind)

    def claim(self) -> int | None:
        """Return the number of the next fault; None if a shrunk run leaves this fault out."""
        plan, number = self._world.plan, self.numbered
        self.numbered += 1
        wanted = number not in plan.faults_off and (plan.faults_max is None or number < plan.faults_max)
        return number if wanted else None

    def record(self, kind: str, target: str, for_us: int) -> None:
        """Record a fault."""
        now_us = self._world.queue.now_us
        self.counts[kind] += 1
        self._world.note(target, f"FAULT {kind} for {for_us} us")
        self._world.seen(Fault(at=now_us, kind=kind, target=target, until=now_us + for_us))

    # --- choosing -----------------------------------------------------------------------------------------------------
    def _brokers(self) -> list[BrokerProcess]:
        return [broker for broker in self._world.brokers.values() if broker.alive]

    def _pick_broker(self) -> BrokerProcess | None:
        brokers = self._brokers()
        return self.rng.choice(brokers) if len(brokers) > 1 else None

    def _span_us(self, most_us: int) -> int:
        """Draw a duration: short ones often, long ones now and then."""
        return self.rng.randint(1, min(most_us, self.rng.choice(_PAUSES_US)))

    # --- processes ----------------------------------------------------------------------------------------------------
    def _broker_crash(self) -> tuple[str, int] | None:
        broker = self._pick_broker()
        if broker is None:
            return None
        broker.die()
        return broker.name, SECOND_US

    def _pause(self, processes: Sequence[Process], most_us: int = 60 * SECOND_US) -> tuple[str, int] | None:
        if not processes:
            return None
        process = self.rng.choice(processes)
        for_us = self._span_us(most_us)
        process.pause(for_us)
        return process.name, for_us

    def _broker_zombie(self) -> tuple[str, int] | None:
        broker = self._pick_broker()
        return self.make_zombie(broker) if broker is not None else None

    def make_zombie(self, process: Process) -> tuple[str, int]:
        """Pause a process, let another one replace it, and wake the old one up again: often just after that."""
        world, for_us = self._world, self._span_us(20 * SECOND_US)
        replace_us = self.rng.randint(0, for_us)
        if self.rng.random() < 0.5:
            for_us = replace_us + self.rng.randrange(_JUST_AFTER_US)
        process.pause(for_us)
        if isinstance(process, BrokerProcess):
            world.queue.after(replace_us, lambda: world.replace_broker(process))
        elif isinstance(process, SequencerProcess):
            world.queue.after(replace_us, lambda: world.replace_sequencer(process))
        return process.name, for_us

    def _publisher_crash(self) -> tuple[str, int] | None:
        publishers = list(self._world.live_publishers())
        if not publishers:
            return None
        publisher = self.rng.choice(publishers)
        publisher.die()
        return publisher.name, SECOND_US

    def _publisher_zombie(self) -> tuple[str, int] | None:
        """Pause a publisher with a named session while another process continues that session."""
        named = [publisher for publisher in self._world.live_publishers() if publisher.stream.plan.named]
        if not named:
            return None
        publisher = self.rng.choice(named)
        for_us = self._span_us(20 * SECOND_US)
        publisher.pause(for_us)
        self._world.queue.after(self.rng.randint(0, for_us), lambda: self._world.succeed_publisher(publisher))
        return publisher.name, for_us

    def _host_crash(self) -> tuple[str, int] | None:
        """End a host with brokers and its cache, without a reset to any peer."""
        world = self._world
        hosts = sorted({broker.host for broker in self._brokers()})
        if not world.sequencer_may_crash:
            hosts = [host for host in hosts if host != world.sequencer.host]
        if not hosts:
            return None
        host = self.rng.choice(hosts)
        world.crash_host(host)
        return host, 2 * SECOND_US

    def _sequencer_crash(self) -> tuple[str, int] | None:
        self._world.sequencer.die()
        return self._world.sequencer.name, SECOND_US

    # --- connections --------------------------------------------------------------------------------------------------
    def _lose_batch(self) -> tuple[str, int] | None:
        """Lose the next batch on some publisher's connection without an error: its stream has a hole."""
        wires = [wire for wire in self._world.network.wires.values() if wire.client.role == "publisher"]
        if not wires:
            return None
        wire = self.rng.choice(wires)
        wire.loses_next = True
        return f"wire-{wire.number}", 0

    def _cut(self) -> tuple[str, int] | None:
        network = self._world.network
        if not network.wires:
            return None
        wire = self.rng.choice(list(network.wires.values()))
        late = [None if self.rng.random() < 0.1 else self.rng.randrange(1, 2 * SECOND_US) for _ in range(2)]
        wire.cut(late[0], late[1])
        return f"wire-{wire.number}", SECOND_US

    def _hole(self) -> tuple[str, int] | None:
        """Block one direction; then everything gets through (TCP sends it again), or the connection ends."""
        network = self._world.network
        if not network.wires:
            return None
        wire = self.rng.choice(list(network.wires.values()))
        for_us = self._span_us(20 * SECOND_US)
        half = self.rng.choice([wire.up, wire.down])
        half.stuck_until_us = max(half.stuck_until_us, self._world.queue.now_us + for_us)
        if self.rng.random() < 0.5:
            self._world.queue.after(for_us, lambda: wire.cut(1_000, 1_000))
        return f"wire-{wire.number}", for_us

    def _clog(self) -> tuple[str, int] | None:
        """Block all connections of one broker for a while, in both directions."""
        broker = self._pick_broker()
        if broker is None:
            return None
        for_us = self._span_us(5 * SECOND_US)
        until_us = self._world.queue.now_us + for_us
        for wire in self._world.network.wires.values():
            if wire.broker is broker:
                wire.up.stuck_until_us = wire.down.stuck_until_us = until_us
        return broker.name, for_us


PRIMITIVES_MAX = 4_000_000
"""A run uses tens of thousands, few use some hundred thousand. A run that exceeds this limit will not end."""


class Interrupts:
    """Actions between two memory primitives: caches evict or refresh, others run, or the process ends right there."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = random.Random(f"{world.seed}:interrupts")
        plan = world.plan
        self._rate = plan.churn_rate + plan.interrupt_rate
        self._churn_share = plan.churn_rate / self._rate  # caches are never idle
        self._next_at = self._left = self._gap()

    def _gap(self) -> int:
        return 1 + int(self._rng.expovariate(self._rate))

    @property
    def primitives(self) -> int:
        """The number of primitives so far."""
        return self._next_at - self._left

    def before_primitive(self, host: str) -> None:
        """Act before a primitive of `host`, or not; the memory calls this before each one."""
        self._left -= 1
        if self._left > 0:
            return
        if self.primitives > PRIMITIVES_MAX and self._world.running:
            self._world.give_up()
            raise Crash
        self._left = self._gap()
        self._next_at += self._left
        world, rng = self._world, self._rng
        if rng.random() < self._churn_share:
            world.memory.churn(1)
            world.mirrors.churn()
            return
        if not world.running or len(world.running) > INTERRUPT_DEPTH_MAX:
            return
        process = world.running[-1]
        if not world.healed and world.may_crash(process):
            self._strike(process)
        world.note(process.name, f"is interrupted on {host}")
        process.interrupt(rng.choice([10, 200, 5_000, 60_000]))

    def _strike(self, process: Process) -> None:
        """End the process right here, stop it here until another one replaces it, or do nothing."""
        world, faults = self._world, self._world.plan.faults
        crash, zombie = f"{process.role}-crash-inside", f"{process.role}-zombie"
        if crash in faults and self._rng.random() < 0.1 and (number := world.faults.claim()) is not None:
            world.faults.happened.append(number)
            world.faults.record(crash, process.name, SECOND_US)
            raise Crash
        if zombie in faults and self._rng.random() < 0.25 and (number := world.faults.claim()) is not None:
            world.faults.happened.append(number)
            world.faults.record(f"{zombie}-inside", *world.faults.make_zombie(process))
