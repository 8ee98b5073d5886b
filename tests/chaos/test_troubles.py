"""A trouble that hits nobody is not on record, and one that never struck, or could not, fails its case."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from embarcadero.chaos.cases import Trouble
from embarcadero.chaos.cluster import MortalCluster, runs
from embarcadero.chaos.troubles import KINDS, Stage
from embarcadero.chaos.watch import Observer
from embarcadero.sim.history import Fault

BRIEF_S = 0.15


class Sleepers(MortalCluster):
    """A cluster whose roles are processes that only sleep, as many as the test wants; none: it does not run."""

    names: dict[str, int] | None = None

    def pids(self) -> dict[str, int]:
        return super().pids() if self.names is None else self.names


def stage_at(folder: Path, names: dict[str, int] | None = None) -> Stage:
    cluster = Sleepers(folder / "nowhere", 3, 3, random.Random(1))
    cluster.names = names
    return Stage(cluster, None, Observer(), random.Random(2))


def struck(stage: Stage, trouble: Trouble) -> list[Fault]:
    """What is on record after it was tried for a moment."""
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
def test_what_hits_nobody_fails_the_case(kind: str, tmp_path: Path) -> None:
    """Of a cluster that does not run nothing can be broken: no fault is on record, and the case says so."""
    stage = stage_at(tmp_path)
    assert struck(stage, Trouble(kind=kind, target="replica:0", first_s=0.0)) == []
    assert len(stage.problems) == 1
    assert kind in stage.problems[0]
    assert stage.kills == 0


def test_what_hits_somebody_is_on_record(tmp_path: Path) -> None:
    """Killed, counted and noted; nothing is wrong with the case."""
    with sleeper() as pid:
        stage = stage_at(tmp_path, {"supervisor": 0, "broker:1": pid})
        found = struck(stage, Trouble(kind="kill", target="broker", first_s=0.0, every_s=60.0))
        assert [(fault.kind, fault.target) for fault in found] == [("kill", "broker:1")]
        assert (stage.kills, stage.problems) == (1, [])
        assert not runs(pid)


def test_the_dead_are_not_killed_again(tmp_path: Path) -> None:
    """A process that has ended is nobody, also while its parent has not looked."""
    with sleeper() as pid:
        stage = stage_at(tmp_path, {"broker:1": pid})
        trouble = Trouble(kind="kill", target="broker", first_s=0.0, every_s=0.02)
        assert len(struck(stage, trouble)) == stage.kills == 1


def test_a_pause_is_over_when_it_is_on_record(tmp_path: Path) -> None:
    """Stopped for as long as it says, and running again."""
    with sleeper() as pid:
        stage = stage_at(tmp_path, {"replica:0": pid})
        trouble = Trouble(kind="pause", target="replica", lasts_s=(0.05, 0.05), first_s=0.0, every_s=60.0)
        (fault,) = struck(stage, trouble)
        assert fault.until - fault.at >= 50_000
        assert runs(pid)


def test_an_unexpected_error_is_told(tmp_path: Path) -> None:
    """It does not end the thread without a word."""
    stage = stage_at(tmp_path, {"replica:0": 1 << 40})  # no process has such a number
    assert struck(stage, Trouble(kind="pause", target="replica:0", first_s=0.0)) == []
    assert "pause replica:0 failed: OverflowError" in stage.problems[0]


def test_a_trouble_without_time_is_told(tmp_path: Path) -> None:
    """So a case that is too short for one of its troubles is no success."""
    stage = stage_at(tmp_path)
    assert struck(stage, Trouble(kind="kill", target="broker", first_s=2 * BRIEF_S)) == []
    assert "kill broker never struck" in stage.problems[0]
    assert "no time" in stage.problems[0]


def test_what_ends_with_an_error_is_not_on_record(tmp_path: Path) -> None:
    """Only what was done."""
    stage = stage_at(tmp_path)
    with pytest.raises(ValueError, match="half"), stage.noting("kill", "broker:0"):
        raise ValueError("half of it")
    assert stage.observer.of(Fault) == []
    with stage.noting("kill", "broker:0"):
        pass
    assert len(stage.observer.of(Fault)) == 1
