"""The supervisor's reaction to nodes that can't be started or are stopped, and to an unreadable store."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from embarcadero.config import load
from embarcadero.errors import ClusterError, DiskFailed
from embarcadero.limits import MIB, STOPPED_S
from embarcadero.liveness import ticks_if_stopped
from embarcadero.node.children import Child
from embarcadero.node.fabric_folder import FabricChoice, Home, make_mirror
from embarcadero.node.folder import ClusterFolder
from embarcadero.node.process import SEQUENCER
from embarcadero.node.supervisor import (
    _STOP_S,
    STOP_S_MAX,
    Generation,
    NodeProcesses,
    RunningCluster,
    UpOptions,
    Watchdog,
)
from embarcadero.placement.directory import Directory
from embarcadero.placement.records import EarlierGeneration
from embarcadero.watch.logs import LogJournal
from tests.placement.worlds import directory_with

LOOK_US = 500_000
LOOKS = int(STOPPED_S * 1_000_000) // LOOK_US


def processes_in(folder: Path) -> NodeProcesses:
    options = UpOptions(config=load(None, {"cluster.data_dir": folder}))
    return NodeProcesses(options, ClusterFolder(folder), LogJournal("test"))


def running(folder: Path) -> RunningCluster:
    """A cluster, none of whose processes was started."""
    generation = Generation(directory_with(0), Home.of(folder), FabricChoice(folder), None, ())
    return RunningCluster(processes_in(folder), generation, LogJournal("test"))


@pytest.mark.parametrize("ready", [False, True])
def test_only_a_first_start_that_fails_stops_the_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ready: bool
) -> None:
    """`up` reports the reason why a node does not start; a running cluster tries again, and keeps its fabric."""
    tries = 0

    async def main() -> RunningCluster:
        cluster = running(tmp_path)
        cluster.ready = ready
        processes = cluster._processes

        async def cannot(_: Child) -> None:
            nonlocal tries
            tries += 1
            if tries == 2:
                processes.stop.set()
            raise BlockingIOError(11, "Resource temporarily unavailable")

        monkeypatch.setattr(Child, "_start", cannot)
        processes._keep(processes.nodes[0], cluster)
        await processes._keepers[processes.nodes[0]]
        return cluster

    cluster = asyncio.run(asyncio.wait_for(main(), 60))
    if ready:
        assert (tries, cluster.failure) == (2, None)
    else:
        assert tries == 1
        assert isinstance(cluster.failure, ClusterError)
        assert cluster.failure.message == "cannot start sequencer: Resource temporarily unavailable"


def test_an_orderly_stop_has_the_time_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if each step takes its full time: the waiting command and systemd do not kill it earlier."""
    waits: list[float] = []

    async def end(_: NodeProcesses, __: list[Child], ___: signal.Signals, wait_s: float) -> None:
        waits.append(wait_s)

    monkeypatch.setattr(NodeProcesses, "_end", end)
    asyncio.run(running(tmp_path).stop())
    tierer_s = 2 * _STOP_S
    assert tierer_s + sum(waits) < STOP_S_MAX
    unit = Path(__file__).parent.parent.parent / "docs" / "embarcadero.service"
    (patience,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit.read_text(), re.MULTILINE)
    assert int(patience) > STOP_S_MAX


def test_memory_of_topics_is_counted(tmp_path: Path) -> None:
    """An order ring in this epoch, in the previous one, and prepared by the standby, which keeps 128 MiB at most."""
    options = UpOptions(config=load(None, {"cluster.data_dir": tmp_path, "cluster.standbys": 1}))
    alone = options.fabric_bytes()
    assert options.fabric_bytes(10) - alone == 10 * 3 * 8 * MIB
    assert options.fabric_bytes(1_000) - alone == 1_000 * 2 * 8 * MIB + 128 * MIB


class Halted(Child):
    """A child of which only the process is known."""

    process: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        return self.process.pid

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


@pytest.fixture
def halted(tmp_path: Path) -> Iterator[tuple[Watchdog, subprocess.Popen[bytes]]]:
    """A supervisor's watchdog; the one process is stopped."""
    processes = processes_in(tmp_path)
    child = Halted(processes.folder, [SEQUENCER], processes._fork_server)
    processes.nodes[:] = [child]
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        child.process = process
        halt(process)
        yield Watchdog(processes, directory_with(0), LogJournal("test")), process
        process.kill()


def halt(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)


def look_on(watchdog: Watchdog, first_us: int, looks: int) -> int:
    """Look twice a second. Returns when the next look would be."""
    for number in range(looks):
        watchdog.look(first_us + number * LOOK_US)
    return first_us + looks * LOOK_US


def test_a_process_that_stays_stopped_is_killed(halted: tuple[Watchdog, subprocess.Popen[bytes]]) -> None:
    """Not before its time is over, whatever its role."""
    watchdog, process = halted
    next_us = look_on(watchdog, 0, LOOKS)
    assert ticks_if_stopped(process.pid) is not None
    look_on(watchdog, next_us, 1)
    assert process.wait() == -signal.SIGKILL


def test_a_process_that_went_on_in_between_is_not_killed(halted: tuple[Watchdog, subprocess.Popen[bytes]]) -> None:
    """Its time begins anew."""
    watchdog, process = halted
    next_us = look_on(watchdog, 0, LOOKS)
    process.send_signal(signal.SIGCONT)
    os.waitid(os.P_PID, process.pid, os.WCONTINUED)
    next_us = look_on(watchdog, next_us, 1)
    halt(process)
    look_on(watchdog, next_us, LOOKS)
    assert ticks_if_stopped(process.pid) is not None


def test_a_pause_of_the_supervisor_does_not_count(halted: tuple[Watchdog, subprocess.Popen[bytes]]) -> None:
    """All were stopped, and it goes on first: others have time to do so, too."""
    watchdog, process = halted
    look_on(watchdog, 0, 1)
    look_on(watchdog, 1_000 * LOOK_US, 1)
    assert ticks_if_stopped(process.pid) is not None


class NoStore(Directory):
    """A directory whose store can't be read."""

    def __init__(self) -> None:
        """It has none."""

    def earlier_generations(self) -> tuple[EarlierGeneration, ...]:
        raise DiskFailed("the store can't be read", "check its disk")


def test_old_mirrors_wait_while_the_store_cannot_be_read(tmp_path: Path) -> None:
    """They are needed, as far as anybody knows, and a cluster that runs goes on."""
    mirror = make_mirror(str(tmp_path / "mirrors"), 1)
    needed = (EarlierGeneration(generation=1, epoch=1, mirror=str(tmp_path / "mirrors")),)
    generation = Generation(NoStore(), Home.of(tmp_path), FabricChoice(tmp_path), None, needed)
    generation.remove_old_mirrors()
    assert mirror.is_dir()
    assert generation.recovery_sources == needed
