"""Further faults: partitions, swizzled clogging, lost acks, jumping clocks, an unreachable store, changing members.

The generator is separate: the random choices of other faults do not depend on it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from embarcadero.errors import BadValue
from embarcadero.types import ReplicaState
from embarcadero_proof.sim.garbage import litter
from embarcadero_proof.sim.network import Partition
from embarcadero_proof.sim.plan import SECOND_US
from embarcadero_proof.sim.roles import BrokerProcess, Poller, ReplicaProcess

if TYPE_CHECKING:
    from embarcadero_proof.sim.disk_faults import Done
    from embarcadero_proof.sim.world import World

_SPANS_US = (SECOND_US // 5, 2 * SECOND_US, 8 * SECOND_US)
_JUMP_US_MAX = 288 * SECOND_US
_STROBES = 20
_STROBE_US = 50_000
_ADDED_MAX = 2
_FOLDERS_SHARE = 0.3

FOLDERS_FROM_SEED = 10_000
"""From this seed on some lost files are lost together with their whole folder."""


class SwarmFaults:
    """The further kinds of faults, by name."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.rng = random.Random(f"{world.seed}:swarm-faults")
        self._added = 0
        self._littered: set[str] = set()
        self.kinds: dict[str, Callable[[], Done]] = {
            "partition": self._partition,
            "swizzle": self._swizzle,
            "acks-lost": self._lose_acks,
            "clock-jump": self._jump,
            "clock-frozen": self._freeze,
            "clock-strobe": self._strobe,
            "store-locked": lambda: self._store("locked_until_us"),
            "store-down": lambda: self._store("down_until_us"),
            "rolling-restart": self._rolling_restart,
            "garbage": self._garbage,
            "replica-drain": self._drain,
            "replica-add": self._add,
            "lost-file": self._lose_file,
            "swapped-files": lambda: self._spoil_disk("swap_files"),
            "wrong-sector": lambda: self._spoil_disk("misplace_a_sector"),
        }

    def _span_us(self) -> int:
        return self.rng.randint(1, self.rng.choice(_SPANS_US))

    # --- the network --------------------------------------------------------------------------------------------------
    def _partition(self) -> Done:
        """Cut off one broker, one client, or half of all: in both directions, or in one."""
        world, rng = self._world, self.rng
        brokers = sorted(b.name for b in world.brokers.values() if b.alive)
        clients = sorted({wire.client.name for wire in world.network.wires.values()})
        if not brokers or not clients:
            return None
        shape = rng.choice(["broker", "client", "halves"])
        cut_brokers = None if shape == "client" else frozenset(
            rng.sample(brokers, 1 if shape == "broker" else (len(brokers) + 1) // 2))  # fmt: skip
        cut_clients = None if shape == "broker" else frozenset(
            rng.sample(clients, 1 if shape == "client" else (len(clients) + 1) // 2))  # fmt: skip
        for_us, way = self._span_us(), rng.choice(["up", "down", "both", "both"])
        world.network.part(Partition(world.queue.now_us + for_us, cut_clients, cut_brokers, way))
        who = ", ".join(sorted(cut_brokers or cut_clients or ()))
        return f"{who} ({way})", for_us

    def _swizzle(self) -> Done:
        """Clog some connections one by one, and unclog them in another order."""
        world, rng = self._world, self.rng
        wires = list(world.network.wires.values())
        if not wires:
            return None
        for_us, chosen = self._span_us(), rng.sample(wires, rng.randint(1, len(wires)))
        began_us = world.queue.now_us
        for number, wire in enumerate(chosen):
            clog_us = for_us * number // (2 * len(chosen))
            until_us = began_us + rng.randint(for_us // 2, for_us)
            world.queue.after(clog_us, lambda wire=wire, until_us=until_us: (  # type: ignore[misc]
                None if world.healed else wire.clog("both", until_us)))  # fmt: skip
        return f"{len(chosen)} wires", for_us

    def _lose_acks(self) -> Done:
        """Lose a broker's acks: batches are stored, and the publisher does not know."""
        world, rng = self._world, self.rng
        brokers = [broker for broker in world.brokers.values() if broker.alive]
        if not brokers:
            return None
        broker, for_us = rng.choice(brokers), self._span_us()
        for wire in world.network.wires.values():
            if wire.broker is broker:
                wire.loses_acks_until_us = world.queue.now_us + for_us
        return broker.name, for_us

    # --- clocks -------------------------------------------------------------------------------------------------------
    def _clocks(self) -> tuple[str, list[Callable[[int], None]]]:
        """Return a host, and the functions that shift the dates of its processes."""
        host = self.rng.choice(self._world.hosts)
        return host, [p.clock.shift for p in self._world.processes if p.host == host and p.alive]

    def _jump(self) -> Done:
        host, shifts = self._clocks()
        by_us = self.rng.randint(-_JUMP_US_MAX, _JUMP_US_MAX)
        for shift in shifts:
            shift(by_us)
        return f"{host} by {by_us} us", 0

    def _freeze(self) -> Done:
        """Freeze the date for a while; then it is correct again."""
        host, for_us = self.rng.choice(self._world.hosts), self._span_us()
        for process in self._world.processes:
            if process.host == host and process.alive:
                process.clock.freeze(self._world.queue.now_us + for_us)
        return host, for_us

    def _strobe(self) -> Done:
        """Move the date to and fro."""
        host, shifts = self._clocks()
        by_us = self.rng.randint(1, _JUMP_US_MAX)
        for number in range(_STROBES):
            for shift in shifts:
                sign = -1 if number % 2 else 1
                self._world.queue.after(number * _STROBE_US, lambda s=shift, by=sign * by_us: s(by))  # type: ignore[misc]
        return host, _STROBES * _STROBE_US

    # --- the store ----------------------------------------------------------------------------------------------------
    def _store(self, what: str) -> Done:
        """Keep some processes from writing to the store, or from reaching it."""
        world, rng, for_us = self._world, self.rng, self._span_us()
        pollers = [p for p in world.processes if isinstance(p, Poller) and p.alive]
        if not pollers:
            return None
        chosen = pollers if rng.random() < 0.4 else rng.sample(pollers, min(len(pollers), rng.randint(1, 2)))
        for process in chosen:
            setattr(world.store_of(process), what, world.queue.now_us + for_us)
        return ", ".join(process.name for process in chosen), for_us

    # --- the cluster --------------------------------------------------------------------------------------------------
    def _rolling_restart(self) -> Done:
        """Restart all processes one after the other: brokers leave first, other roles just end."""
        world, step_us = self._world, self.rng.randint(SECOND_US // 2, 3 * SECOND_US)
        processes = [p for p in world.processes if isinstance(p, Poller) and p.alive and p.role != "sequencer"]
        processes += [world.sequencer] if world.sequencer_may_crash else []
        for number, process in enumerate(processes):
            world.queue.after(number * step_us, lambda process=process: self._restart(process))  # type: ignore[misc]
        return f"{len(processes)} processes", (len(processes) + 3) * step_us

    def _restart(self, process: Poller) -> None:
        world = self._world
        if world.healed or not process.alive or not world.restarts.up or not world.may_crash(process):
            return
        if isinstance(process, BrokerProcess):
            process.leave()
            world.queue.after(SECOND_US // 3, lambda: self._has_left(process))
        else:
            process.die()

    def _has_left(self, process: BrokerProcess) -> None:
        """End a process that has left. If the run has healed meanwhile, replace it immediately."""
        process.die()
        if self._world.healed:
            self._world.replace_broker(process)

    def _garbage(self) -> Done:
        """Fill free lines in the memory of a dead broker with anything but zeros."""
        world = self._world
        gone = sorted({p.name for p in world.processes if isinstance(p, BrokerProcess) and not p.alive}
                      - self._littered)  # fmt: skip
        if not gone:
            return None
        name = self.rng.choice(gone)
        self._littered.add(name)
        return f"{name}, {litter(world.memory, name, self.rng)} slots", 0

    # --- members ------------------------------------------------------------------------------------------------------
    def _drain(self) -> Done:
        """Drain a replica. If all its ranges have moved in time, it leaves, and joins again with an empty disk."""
        world = self._world
        live = [r.replica for r in world.directory.replicas.all() if r.state is ReplicaState.LIVE]
        if len(live) < 2 or not world.restarts.up:
            return None
        number, for_us = self.rng.choice(sorted(live)), 3 * self._span_us()
        if world.directory.replicas.drain_blocked(number):
            return None
        world.directory.replicas.drain(number)
        world.queue.after(for_us, lambda: self._drained(number))
        return f"replica {number}", for_us

    def _drained(self, number: int) -> None:
        world = self._world
        known = {r.replica: r for r in world.directory.replicas.all()}
        if world.healed or number not in known:
            return
        process = world.replicas[number]
        if world.directory.replicas.ranges_on(number) or not process.alive or not world.restarts.up:
            world.directory.replicas.undrain(number)
            return
        world.note(process.name, "has no range any more: it is removed, and joins anew")
        world.directory.replicas.remove(number)
        process.die(silently=True)
        world.disks.replace(number)

    def _add(self) -> Done:
        """Let a new replica join."""
        world = self._world
        if self._added >= _ADDED_MAX or not world.restarts.up:
            return None
        self._added += 1
        number = max(world.replicas, default=-1) + 1
        world.start_replica(number)
        return f"replica {number}", 0

    def _lose_file(self) -> Done:
        folder = self._world.seed >= FOLDERS_FROM_SEED and self.rng.random() < _FOLDERS_SHARE
        return self._spoil_disk("lose_a_folder" if folder else "lose_a_file")

    def _spoil_disk(self, what: str) -> Done:
        """Damage a file of a range on a victim's disk."""
        world = self._world
        victims = [r for r in world.replicas.values()
                   if isinstance(r, ReplicaProcess) and r.number in world.plan.durable.victims]  # fmt: skip
        if not victims:
            return None
        replica = self.rng.choice(victims)
        path = getattr(replica.device, what)(lambda path: "/range-" in path)
        return None if path is None else (f"{replica.name} {path}", SECOND_US)

    def heal(self) -> None:
        """Undrain all replicas. The store is reachable again."""
        for number in self._world.replicas if "replica-drain" in self._world.plan.faults else ():
            with suppress(BadValue):  # a replica that ended before it registered
                self._world.directory.replicas.undrain(number)
