"""`replica drain` over a store and folders that a test made; no processes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner, Result

from embarcadero.cli import cluster as module
from embarcadero.cli.main import app
from embarcadero.node.folder import ClusterFolder
from embarcadero.placement.directory import Directory
from embarcadero.placement.store import SqliteStore
from embarcadero.storage.layout import range_folder
from tests.cli.folders import COUNT, StoppedCluster


class Drained:
    """Replica 0 is dead, and has the only copy of a sealed range; replica 1 could take it."""

    def __init__(self, path: Path) -> None:
        self.path, self.stopped = path, StoppedCluster(path, replicas=1)
        self.range = self.stopped.range.lane, self.stopped.range.number
        with self.directory() as directory:
            directory.replicas.register(1, "disk-1", str(path / "replica-1"), "here", 0)
            directory.replicas.mark_dead(0, 1)

    @contextmanager
    def directory(self) -> Iterator[Directory]:
        with closing(SqliteStore(self.stopped.folder.store_path)) as store:
            yield Directory(store)

    def lose(self) -> None:
        shutil.rmtree(self.stopped.folder.replica(0) / range_folder(*self.range))

    def move(self) -> None:
        """Replica 1 has copied the range."""
        with self.directory() as directory:
            new = next(member.ref for member in directory.replicas.all() if member.replica == 1)
            assert directory.ranges.replace_in_sealed(*self.range, 0, new)

    def drain(self, *more: str) -> Result:
        return CliRunner().invoke(app, ["replica", "drain", "0", "--data-dir", str(self.path), *more])


@pytest.fixture
def drained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Drained:
    monkeypatch.setattr(ClusterFolder, "require_running", lambda _self: None)
    monkeypatch.setattr(module, "_LOOK_S", 0.01)
    return Drained(tmp_path)


def test_a_drain_that_cannot_end_reports_the_remaining_ranges(drained: Drained) -> None:
    """It also lists remedies, and ends with an error instead of waiting without end. Other ranges were moved before."""
    drained.lose()
    shown = drained.drain()
    assert shown.exit_code == 1
    assert "1 ranges stay on replica 0: no copy of them is complete" in shown.stderr
    assert f"no copy of 1 sealed range (batches 0 to {COUNT - 1})" in shown.stderr
    assert f"`embarcadero topic trim orders --before-index {COUNT}`" in shown.stderr
    with drained.directory() as directory:
        assert directory.replicas.draining() == {0}


def test_a_drain_that_does_not_wait_names_them_immediately(drained: Drained) -> None:
    """For programs as a number."""
    drained.lose()
    shown = drained.drain("--no-wait")
    assert shown.exit_code == 0
    assert "no copy of 1 sealed range" in shown.stderr
    told = msgspec.json.decode(drained.drain("--no-wait", "--json").stdout)
    assert told == {"replica": 0, "draining": True, "ranges": 1, "unreadable": 1}


def test_a_drain_continues_once_the_files_are_back(drained: Drained, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that were missing a moment ago are no reason to give up."""
    drained.lose()
    looks: list[object] = []
    usual = module._unreadable

    def look(*what: Any) -> list[Any]:
        looks.append(what)
        found = usual(*what)
        if len(looks) == 1:
            monkeypatch.undo()
            monkeypatch.setattr(ClusterFolder, "require_running", lambda _self: None)
            drained.move()
        return found

    monkeypatch.setattr(module, "_unreadable", look)
    shown = drained.drain()
    assert shown.exit_code == 0, shown.output
    assert "replica 0 is drained: 0 ranges are on it" in shown.stdout


def test_a_drain_without_progress_is_reported(drained: Drained, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy is there but may be damaged: only replicas can find that."""
    monkeypatch.setattr(module, "_STILL_S", 0.0)
    naps: list[float] = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 5:
            drained.move()

    monkeypatch.setattr("embarcadero.cli.cluster.time.sleep", sleep)
    shown = drained.drain()
    assert shown.exit_code == 0, shown.output
    assert shown.stderr.count("no range moved for 0 s") == 1
    assert "`can't complete a copy`" in shown.stderr
