"""Sequencers in the elections of a run: started, restarted, asked to hand over, wrong about each other."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from embarcadero_proof.sim.plan import SECOND_US
from embarcadero_proof.sim.roles import SequencerProcess

if TYPE_CHECKING:
    from embarcadero_proof.sim.world import World


class SimElections:
    """The leader and the standbys of one run. Its random generator is separate."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = random.Random(f"{world.seed}:standbys")
        self._processes: dict[int, SequencerProcess] = {}
        self._started = 0

    def start_all(self) -> None:
        """Start all that do not run; the first one is the sequencer until another one takes over."""
        for number in range(self._world.plan.sequencers):
            process = self._processes.get(number)
            if process is None or not process.alive:
                self._start(number)
        if not getattr(self._world, "sequencer", None) or not self._world.sequencer.alive:
            self._world.sequencer = self._processes[0]

    def _start(self, number: int) -> None:
        world = self._world
        self._started += 1
        host = self._rng.choice(world.hosts)
        process = SequencerProcess(world, f"sequencer-{number}#{self._started}", host, number)
        world.note(process.name, f"stands by on {host}")
        world.pollers[f"candidate-{number}"] = self._processes[number] = process
        process.start()

    def leads(self, process: SequencerProcess) -> None:
        """Make a standby that won an election the current sequencer."""
        self._world.sequencer = self._world.pollers["sequencer"] = process

    def died(self, process: SequencerProcess) -> None:
        """Start a dead sequencer again after a while; standbys on its host notice its end immediately."""
        number, world = process.number or 0, self._world
        world.queue.after(self._rng.randrange(50_000, 4 * SECOND_US), lambda: self._replace(number, process))
        for other in self._others(process):
            if other.host == process.host:
                other.wake(self._rng.randrange(5, 1_200))

    def _replace(self, number: int, process: SequencerProcess) -> None:
        if self._world.restarts.up and self._processes[number] is process:
            self._start(number)

    def _others(self, process: SequencerProcess) -> list[SequencerProcess]:
        return [other for other in self._processes.values() if other is not process and other.alive]

    def suspect(self, process: SequencerProcess) -> None:
        """Make some standbys, perhaps all together, believe that the leader they watch is dead, right or wrong."""
        for other in self._others(process):
            standby = other.standby
            if standby is not None and other.sequencer is None and self._rng.random() < 0.7:
                standby.process_ended(standby.watched)
                other.wake(self._rng.choice([1, 1, 5_000]))

    def hand_over(self) -> tuple[str, int] | None:
        """Ask for a planned move, as an operator does; the request may be lost, or come at the worst moment."""
        world = self._world
        others = [other for other in self._others(world.sequencer) if other.sequencer is None]
        if not others or not world.restarts.up:
            return None
        chosen = self._rng.choice(others)
        world.directory.elections.ask_hand_over(chosen.number or 0, world.directory.elections.started_epoch())
        if self._rng.random() < 0.7:
            chosen.wake(self._rng.randrange(5, 1_200))
        return chosen.name, SECOND_US
