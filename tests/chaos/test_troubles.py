"""A trouble without a target is not recorded. If it never struck, or a zombie was not replaced, its case fails."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from embarcadero.liveness import process_mark
from embarcadero.node.local import RestartableCluster, halt, runs, state_of
from embarcadero.placement.directory import Directory
from embarcadero.placement.store import SqliteStore
from embarcadero_proof.chaos import troubles
from embarcadero_proof.chaos.cases import Trouble
from embarcadero_proof.chaos.replacement import is_replaced
from embarcadero_proof.chaos.troubles import KINDS, Stage
from embarcadero_proof.chaos.watch import Observer
from embarcadero_proof.sim.history import Fault
from tests.placement.worlds import add_broker, directory_with

BRIEF_S = 0.15


class Sleepers(RestartableCluster):
    """A cluster whose roles are sleeping processes, as many as the test wants; none: it does not run."""

    names: dict[str, int] | None = None

    def pids(self) -> dict[str, int]:
        return super().pids() if self.names is None else self.names


def stage_at(folder: Path, names: dict[str, int] | None = None) -> Stage:
    cluster = Sleepers(folder / "nowhere", 3, 3)
    cluster.names = names
    return Stage(cluster, None, Observer(), random.Random(2))


def struck(stage: Stage, trouble: Trouble) -> list[Fault]:
    """The records after trying it for a moment."""
    stage.keep_striking(trouble, time.monotonic() + BRIEF_S)
    return stage.observer.of(Fault)


@contextmanager
def sleeper() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_trouble_without_a_target_fails_the_case(kind: str, tmp_path: Path) -> None:
    """In a cluster that does not run nothing can be broken: no fault is recorded, and the case fails."""
    stage = stage_at(tmp_path)
    assert struck(stage, Trouble(kind=kind, target="replica:0", first_s=0.0)) == []
    assert len(stage.problems) == 1
    assert kind in stage.problems[0]
    assert stage.kills == 0


def test_a_trouble_with_a_target_is_recorded(tmp_path: Path) -> None:
    """Killed, counted and recorded; the case is correct."""
    with sleeper() as pid:
        stage = stage_at(tmp_path, {"supervisor": 0, "broker:1": pid})
        found = struck(stage, Trouble(kind="kill", target="broker", first_s=0.0, every_s=60.0))
        assert [(fault.kind, fault.target) for fault in found] == [("kill", "broker:1")]
        assert (stage.kills, stage.problems) == (1, [])
        assert not runs(pid)


def test_the_dead_are_not_killed_again(tmp_path: Path) -> None:
    """A process that has ended is no target, even before its parent has reaped it."""
    with sleeper() as pid:
        stage = stage_at(tmp_path, {"broker:1": pid})
        trouble = Trouble(kind="kill", target="broker", first_s=0.0, every_s=0.02)
        assert len(struck(stage, trouble)) == stage.kills == 1


def test_a_pause_is_over_when_it_is_recorded(tmp_path: Path) -> None:
    """Stopped for the given time, and running again."""
    with sleeper() as pid:
        stage = stage_at(tmp_path, {"replica:0": pid})
        trouble = Trouble(kind="pause", target="replica", lasts_s=(0.05, 0.05), first_s=0.0, every_s=60.0)
        (fault,) = struck(stage, trouble)
        assert fault.until - fault.at >= 50_000
        assert runs(pid)


def test_a_halted_process_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the signal takes time: the next steps may rely on it."""
    send = os.kill
    with sleeper() as pid, monkeypatch.context() as patch:
        patch.setattr(os, "kill", lambda *signalled: threading.Timer(0.05, send, signalled).start())
        halt(pid)
        assert state_of(pid) == "T"


def test_a_dead_process_is_not_waited_for() -> None:
    """It neither stops nor continues."""
    with sleeper() as pid:
        os.kill(pid, signal.SIGKILL)
        halt(pid)
        assert not runs(pid)
    with pytest.raises(ProcessLookupError):
        halt(pid)


def test_an_unexpected_error_is_reported(tmp_path: Path) -> None:
    """It does not end the thread silently."""
    stage = stage_at(tmp_path, {"replica:0": 1 << 40})  # no process has such a number
    assert struck(stage, Trouble(kind="pause", target="replica:0", first_s=0.0)) == []
    assert "pause replica:0 failed: OverflowError" in stage.problems[0]


def test_a_trouble_without_time_to_run_is_reported(tmp_path: Path) -> None:
    """So a case that is too short for one of its troubles does not succeed."""
    stage = stage_at(tmp_path)
    assert struck(stage, Trouble(kind="kill", target="broker", first_s=2 * BRIEF_S)) == []
    assert "kill broker never struck" in stage.problems[0]
    assert "no time" in stage.problems[0]


def test_a_trouble_that_ends_with_an_error_is_not_recorded(tmp_path: Path) -> None:
    """Only completed actions are recorded."""
    stage = stage_at(tmp_path)
    with pytest.raises(ValueError, match="half"), stage.noting("kill", "broker:0"):
        raise ValueError("half of it")
    assert stage.observer.of(Fault) == []
    with stage.noting("kill", "broker:0"):
        pass
    assert len(stage.observer.of(Fault)) == 1


# --- zombies ----------------------------------------------------------------------------------------------------------
def test_a_broker_is_replaced_when_it_is_closed() -> None:
    """Identified by its process number: a new incarnation is not the stopped process."""
    directory = directory_with(0)
    old = add_broker(directory)
    assert not is_replaced(directory, "broker:0", old.pid)
    directory.members.mark_dead(0, old.incarnation)
    assert is_replaced(directory, "broker:0", old.pid)
    new = directory.members.register(0, "127.0.0.1", 9_092, old.pid + 1)
    assert not is_replaced(directory, "broker:0", new.pid)


def test_a_replica_is_replaced_when_all_its_ranges_continue_without_it() -> None:
    """One sealed range is not enough while it counts in another."""
    directory = directory_with(4)
    lanes = [directory.topics.create(name, order=5, replicas=3).lane for name in ("one", "two")]
    epoch = directory.elections.next_epoch()
    members = {member.replica: member for member in directory.replicas.all()}
    gone = directory.ranges.all(lanes[0])[0].replicas[0].replica
    pid, others = members[gone].pid, [member.ref for number, member in members.items() if number != gone]
    for lane in lanes:
        assert not is_replaced(directory, f"replica:{gone}", pid)
        if any(ref.replica == gone for ref in directory.ranges.all(lane)[0].replicas):
            directory.ranges.seal_and_open(lane, 1, 0, 0, others, epoch)
    assert is_replaced(directory, f"replica:{gone}", pid)


def test_a_sequencer_is_replaced_when_another_has_started() -> None:
    """An election is not enough: the epoch has to begin."""
    directory = directory_with(0)
    with sleeper() as other:
        directory.elections.elect(0, process_mark(os.getpid()), 0)
        directory.elections.start_epoch(1, {})
        assert not is_replaced(directory, "sequencer", os.getpid())
        directory.elections.elect(1, process_mark(other), 1)
        assert not is_replaced(directory, "sequencer", os.getpid())
        directory.elections.start_epoch(2, {})
        assert is_replaced(directory, "sequencer", os.getpid())
        assert not is_replaced(directory, "sequencer:1", other)


def zombie_broker(folder: Path, meanwhile: Callable[[Directory, int], None]) -> Stage:
    """A process that the store takes for broker 1 is stopped; the test decides what happens meanwhile."""
    (folder / "nowhere").mkdir()
    with sleeper() as pid, sleeper() as supervisor:
        stage = stage_at(folder, {"supervisor": supervisor, "broker:1": pid})
        with closing(SqliteStore(stage.cluster.folder.store_path)) as store:
            directory = Directory(store)
            directory.members.register(1, "127.0.0.1", 9_093, pid)

            def act() -> None:
                while state_of(pid) != "T":
                    time.sleep(0.01)
                assert state_of(supervisor) == "T"
                meanwhile(directory, pid)

            thread = threading.Thread(target=act)
            thread.start()
            found = struck(stage, Trouble(kind="zombie", target="broker", first_s=0.0, every_s=60.0))
            thread.join()
        assert [(fault.kind, fault.target) for fault in found] == [("zombie", "broker:1")]
        assert state_of(supervisor) != "T"
        return stage


def test_a_zombie_wakes_up_after_it_was_replaced(tmp_path: Path) -> None:
    """The case succeeds."""
    assert zombie_broker(tmp_path, lambda directory, _: directory.members.mark_dead(1, 1)).problems == []


def test_a_zombie_that_was_not_replaced_fails_the_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was only a pause."""
    monkeypatch.setattr(troubles, "_REPLACED_S", 0.2)
    stage = zombie_broker(tmp_path, lambda *_: None)
    assert "broker:1 was stopped" in stage.problems[0]


def test_a_zombie_that_was_woken_or_killed_too_early_fails_the_case(tmp_path: Path) -> None:
    """A process that does not wake up after it was replaced can do no harm."""

    def kill(directory: Directory, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        while runs(pid):
            time.sleep(0.01)
        directory.members.mark_dead(1, 1)

    assert zombie_broker(tmp_path, kill).problems == ["broker:1 was not stopped until it was replaced"]


def test_a_trouble_is_never_shorter_than_declared(tmp_path: Path) -> None:
    """Even if the time of the case is over."""
    with sleeper() as pid:
        stage = stage_at(tmp_path, {"replica:0": pid})
        trouble = Trouble(kind="pause", target="replica", lasts_s=(2 * BRIEF_S, 3 * BRIEF_S), first_s=0.0)
        (fault,) = struck(stage, trouble)
        assert fault.until - fault.at >= 2 * BRIEF_S * 1e6
