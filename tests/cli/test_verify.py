"""verify: a stopped cluster's folder, from the command line. Problems are named; nothing is changed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from embarcadero.cli.main import app
from embarcadero.storage.layout import lane_folder, range_folder
from tests.cli.folders import COUNT, StoppedCluster, flip


def verify(cluster: StoppedCluster, *more: str) -> Result:
    before = digest(cluster.folder.path)
    shown = CliRunner().invoke(app, ["verify", "--data-dir", str(cluster.folder.path), *more])
    assert digest(cluster.folder.path) == before, "verify changed something"
    return shown


def digest(path: Path) -> dict[str, str]:
    return {str(one): hashlib.sha256(one.read_bytes()).hexdigest() for one in path.rglob("*") if one.is_file()}


def findings(cluster: StoppedCluster) -> tuple[int, dict[str, tuple[str, str]]]:
    """The exit code, and severity and problem by file."""
    shown = verify(cluster, "--json")
    told: dict[str, Any] = json.loads(shown.stdout)
    assert told["ok"] is (shown.exit_code == 0)
    assert all(finding["advice"] for finding in told["findings"])
    return shown.exit_code, {one["file"]: (one["severity"], one["problem"]) for one in told["findings"]}


@pytest.mark.parametrize("clean", [True, False])
def test_a_sound_folder(tmp_path: Path, clean: bool) -> None:
    """After a clean stop, and after a kill: exit code 0, and the amount of data checked."""
    cluster = StoppedCluster(tmp_path / "data", clean=clean)
    shown = verify(cluster)

    assert shown.exit_code == 0, shown.output
    segments = sum(len(cluster.segments(number)) for number in range(2))
    assert f"2 replicas, 2 ranges, {segments} segments, {2 * COUNT} batches" in shown.stdout
    assert "no record is missing or wrong" in shown.stdout
    assert findings(cluster) == (0, {})


@pytest.mark.parametrize("number", [0, -1])
def test_a_flipped_bit_in_a_segment(tmp_path: Path, number: int) -> None:
    """Finished or active: the file is named, and the exit code is 1."""
    cluster = StoppedCluster(tmp_path / "data")
    path = cluster.segments(1)[number]
    flip(path, 400)
    code, found = findings(cluster)
    shown = verify(cluster)

    assert code == shown.exit_code == 1
    name = str(path.relative_to(cluster.folder.path))
    assert found[name][0] == "error"
    assert "damaged" in found[name][1]
    assert "1 errors" in shown.stdout
    assert "peers" in shown.stdout


def test_caches_and_checkpoints_are_warnings(tmp_path: Path) -> None:
    """Wrong indexes and session checkpoints cost no record."""
    cluster = StoppedCluster(tmp_path / "data")
    index = cluster.segments(0)[0].with_suffix(".index")
    flip(index, 3)
    checkpoint = next((cluster.folder.replica(1) / lane_folder(cluster.topic.lane)).glob("sessions-*.checkpoint"))
    flip(checkpoint, 70)
    code, found = findings(cluster)

    assert code == 0
    assert {severity for severity, _ in found.values()} == {"warning"}
    assert len(found) == 2
    assert "2 warnings and notes" in verify(cluster).stdout


def test_a_lost_disk(tmp_path: Path) -> None:
    """One of two whole copies is enough for a sealed range; an open one needs both if one disk made it durable."""
    sealed, open_ = StoppedCluster(tmp_path / "sealed"), StoppedCluster(tmp_path / "open", clean=False)
    for cluster in (sealed, open_):
        shutil.rmtree(cluster.folder.replica(1))
    where = f"lane {sealed.topic.lane} range {sealed.range.number}"
    code, found = findings(sealed)

    assert (code, found[where][0]) == (0, "warning")
    code, found = findings(open_)
    assert (code, found[where][0]) == (1, "error")
    assert "recovery needs 2" in found[where][1]
    assert "--accept-loss" in "".join(verify(open_).stdout.split())


def test_the_store(tmp_path: Path) -> None:
    """A damaged store is an error with the store's own advice; without a store, files are still checked."""
    cluster = StoppedCluster(tmp_path / "data")
    path = cluster.folder.store_path
    whole = path.read_bytes()
    path.write_bytes(b"no store at all" * 100)
    assert findings(cluster)[1]["store.db"][0] == "error"
    path.write_bytes(whole)
    assert findings(cluster) == (0, {})
    for left in cluster.folder.path.glob("store.db*"):
        left.unlink()
    assert findings(cluster)[1]["store.db"][0] == "warning"
    cluster.segments(0)[0].unlink()
    assert findings(cluster)[0] == 1


def test_a_running_cluster_is_refused(tmp_path: Path) -> None:
    """Its files grow: a torn end may be a write in progress. A replica whose supervisor is gone is refused likewise."""
    cluster = StoppedCluster(tmp_path / "data")
    with cluster.folder.locked():
        shown = CliRunner().invoke(app, ["verify", "--data-dir", str(cluster.folder.path)])
        assert shown.exit_code == 1
        assert f"supervisor pid {os.getpid()}" in shown.stderr
        assert "embarcadero down" in shown.stderr
    from embarcadero.storage.disk import RealDisk

    disk = RealDisk(cluster.folder.replica(1))
    disk.lock("lock")
    shown = CliRunner().invoke(app, ["verify", "--data-dir", str(cluster.folder.path)])
    disk.close()
    assert shown.exit_code == 1
    assert "replica 1" in shown.stderr
    assert verify(cluster).exit_code == 0


def test_a_folder_that_is_no_cluster(tmp_path: Path) -> None:
    """It is named in the error."""
    shown = CliRunner().invoke(app, ["verify", "--data-dir", str(tmp_path)])
    assert shown.exit_code == 1
    assert "neither a store" in shown.stderr


# --- inspect ----------------------------------------------------------------------------------------------------------
def inspect(cluster: StoppedCluster, *arguments: str) -> Any:
    shown = CliRunner().invoke(app, ["inspect", *arguments, "--data-dir", str(cluster.folder.path), "--json"])
    assert shown.exit_code == 0, shown.output
    return json.loads(shown.stdout)


def test_inspect_segments(tmp_path: Path) -> None:
    """Every segment of every replica: its owner, its start, whether it grows; also a damaged segment."""
    cluster = StoppedCluster(tmp_path / "data")
    found = inspect(cluster, "segments", "--topic", "orders")

    for number in range(2):
        mine = [one for one in found if one["replica"] == number]
        assert [Path(one["file"]).name for one in mine] == [path.name for path in cluster.segments(number)]
        assert sum(one["batches"] for one in mine) == COUNT
        assert [one["state"] for one in mine] == ["sealed"] * (len(mine) - 1) + ["active"]
        assert [one["bytes"] for one in mine] == [path.stat().st_size for path in cluster.segments(number)]
        assert mine[0]["first_time"] <= mine[0]["last_time"] <= mine[-1]["last_time"]
    flip(cluster.segments(1)[0], 10)
    shown = CliRunner().invoke(app, ["inspect", "segments", "--data-dir", str(cluster.folder.path)])
    assert shown.stdout.count("damaged") == 2
    shown = CliRunner().invoke(app, ["inspect", "segments", "--topic", "x", "--data-dir", str(cluster.folder.path)])
    assert shown.exit_code == 1


def test_inspect_segment(tmp_path: Path) -> None:
    """Header, footer, entries from an index on, and whether the indexes agree."""
    cluster = StoppedCluster(tmp_path / "data")
    first, *_, last = cluster.segments(0)
    name = str(first.relative_to(cluster.folder.path))
    found = inspect(cluster, "segment", name, "--from", "3", "--limit", "2")

    assert (found["base_index"], found["state"], found["problems"]) == (0, "sealed", [])
    assert found["footer"]["end_index"] == found["end_index"]
    assert found["indexes"] == {"index": "agrees", "timeindex": "agrees"}
    assert [row["index"] for row in found["rows"]] == [3, 4]
    found = inspect(cluster, "segment", str(last), "--limit", "2")
    assert (found["state"], found["footer"], found["end_index"]) == ("active", None, COUNT)
    assert [row["index"] for row in found["rows"]] == [COUNT - 2, COUNT - 1]
    shown = CliRunner().invoke(app, ["inspect", "segment", str(first), "--limit", "1"])
    assert shown.exit_code == 0
    assert "indexes:" in shown.stdout


def test_inspect_a_damaged_segment(tmp_path: Path) -> None:
    """In the middle: which entries. A wrong index: which. The header, or another file: a clear error."""
    cluster = StoppedCluster(tmp_path / "data")
    path = cluster.segments(0)[0]
    flip(path, 400)
    flip(path.with_suffix(".timeindex"), 0)
    found = inspect(cluster, "segment", str(path))
    assert "damaged" in found["problems"][0]
    assert found["indexes"]["index"] == "agrees"
    assert found["indexes"]["timeindex"] != "agrees"
    flip(path, 10)
    for wrong in (path, path.with_suffix(".index"), tmp_path / "nowhere.log"):
        shown = CliRunner().invoke(app, ["inspect", "segment", str(wrong)])
        assert shown.exit_code == 1
        assert "error:" in shown.stderr


def test_batches_that_left_memory_are_found_on_disk(tmp_path: Path) -> None:
    """By index and by seq, on every replica with a correct copy."""
    from embarcadero.storage.disk import RealDisk
    from embarcadero.storage.reading import RangeReader
    from embarcadero.watch.regions import ReplicaFolders

    cluster = StoppedCluster(tmp_path / "data")
    disks = ReplicaFolders([cluster.range], {number: cluster.folder.replica(number) for number in range(3)})
    lane = cluster.topic.lane
    entry = disks.find(lane, 7, None)
    seq = int(entry["seq"][0])
    assert int(entry["index"][0]) == 7
    assert int(disks.find(lane, None, seq)["index"][0]) == 7
    assert len(disks.find(lane, COUNT, None)) == len(disks.find(lane, None, 1 << 40)) == 0
    assert len(disks.find(lane + 1, 7, None)) == 0

    place = range_folder(lane, cluster.range.number)
    _, payloads = RangeReader(RealDisk(cluster.folder.replica(0)), place, lane, 1, 0).read(7, 8, 1)
    stored = disks.payload(lane, entry)
    assert stored is not None
    assert (stored.payload, stored.replicas) == (bytes(payloads[0]), [0, 1])
    shutil.rmtree(cluster.folder.replica(0))
    stored = disks.payload(lane, entry)
    assert stored is not None
    assert stored.replicas == [1]
