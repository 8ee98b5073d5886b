"""Trouble with disks under real processes. Nothing that was acked as durable is lost, nothing wrong is served, nothing
hangs, and `status` or a log says what is wrong and what to do."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import embarcadero as emb
from embarcadero.config import Config, load
from embarcadero.node.local import LocalCluster
from embarcadero.placement.directory import Directory
from embarcadero.placement.embedded import SqliteStore
from embarcadero.storage.layout import HEADER_BYTES, range_folder
from embarcadero.storage.real import RealDisk
from embarcadero.storage.verify import Severity, verify_folder

pytestmark = pytest.mark.system
WAIT_S = 20
KIB = 1 << 10
MIB = 1 << 20
COUNT = 320


def until(what: Callable[[], Any]) -> Any:
    """Wait for something that other processes do."""
    give_up = time.monotonic() + WAIT_S
    while not (found := what()):
        assert time.monotonic() < give_up, "it did not happen"
        time.sleep(0.02)
    return found


def small(**more: Any) -> Config:
    """Small segments, little memory, and a scrub that is soon round."""
    flags = {
        "replica.segment_bytes": 64 * KIB, "replica.scrub_bytes_per_s": 256 * MIB, "replica.idle_wait_ms": 5,
        "fabric.log_bytes": 16 * MIB,
    }  # fmt: skip
    return load(None, flags | {key.replace("__", "."): value for key, value in more.items()})


def cluster_in(folder: Path, replicas: int = 3, **more: Any) -> LocalCluster:
    return LocalCluster(brokers=1, replicas=replicas, data_dir=folder, config=small(**more))


def value(number: int) -> bytes:
    return (b"%07d " % number) * 100


def publish(log: Any, topic: str, first: int, count: int, ack: int = 2) -> list[Any]:
    """Publish numbers in batches of some; all are acked on return."""
    with log.publisher(topic, ack=ack, batch_bytes=4 * KIB) as publisher:
        futures = [publisher.send(value(number)) for number in range(first, first + count)]
        return [future.result(WAIT_S) for future in futures]


def values(log: Any, topic: str, **options: Any) -> list[bytes]:
    found: list[bytes] = log.read(topic, timeout=WAIT_S, **options).column("value").to_pylist()
    return found


def all_there(log: Any, topic: str, count: int) -> None:
    """Every record, once, in order, with its bytes; and lookups lead to the right ones."""
    assert values(log, topic) == [value(number) for number in range(count)]
    for number in range(0, count, 97):
        assert values(log, topic, start=number, end=number + 1) == [value(number)]


def well(cluster: LocalCluster) -> bool:
    report = cluster.report()
    return not report.degraded and all(lane.state in ("open", "sealed") for lane in report.lanes)


class Files:
    """The segment files of one topic's oldest range on one replica, and what can be done to them."""

    def __init__(self, data_dir: Path, topic: str, replica: int) -> None:
        with closing(SqliteStore(data_dir / "store.db")) as store:
            lane = next(one.lane for one in Directory(store).topics() if one.name == topic)
        self.folder = data_dir / f"replica-{replica}" / range_folder(lane, 1)

    def logs(self) -> list[Path]:
        return sorted(self.folder.glob("*.log"))

    def bytes(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.logs()}


def flip(path: Path, place: int) -> None:
    """One bit, where it is: others have the file open."""
    with path.open("r+b") as file:
        file.seek(place)
        old = file.read(1)
        file.seek(place)
        file.write(bytes([old[0] ^ 16]))


def exchange(one: Path, two: Path) -> None:
    spare = one.with_suffix(".spare")
    one.rename(spare)
    two.rename(one)
    spare.rename(two)


def foreign(files: Files) -> None:
    """A file of another lane."""
    others = files.folder.parent.parent.glob("lane-*/range-0000000001")
    other = next(path for path in sorted(others) if path != files.folder)
    shutil.copy(sorted(other.glob("*.log"))[0], files.logs()[0])


def index_of_another(files: Files) -> None:
    for suffix in (".index", ".timeindex"):
        shutil.copy(files.logs()[2].with_suffix(suffix), files.logs()[1].with_suffix(suffix))


HARMS: dict[str, Callable[[Files], object]] = {
    "first-deleted": lambda files: files.logs()[0].unlink(),
    "middle-deleted": lambda files: files.logs()[2].unlink(),
    "last-deleted": lambda files: files.logs()[-1].unlink(),
    "folder-deleted": lambda files: shutil.rmtree(files.folder),
    "swapped": lambda files: exchange(files.logs()[1], files.logs()[3]),
    "foreign": foreign,
    "index-of-another": index_of_another,
    "index-deleted": lambda files: files.logs()[1].with_suffix(".index").unlink(),
    "index-flipped": lambda files: flip(files.logs()[1].with_suffix(".index"), 9),
    "payload-flipped": lambda files: flip(files.logs()[2], HEADER_BYTES + 300),
    "entry-flipped": lambda files: flip(files.logs()[2], HEADER_BYTES + 10),
    "header-flipped": lambda files: flip(files.logs()[1], 40),
    "footer-flipped": lambda files: flip(files.logs()[1], files.logs()[1].stat().st_size - 20),
    "last-flipped": lambda files: flip(files.logs()[-1], HEADER_BYTES + 900),
    "start-flipped": lambda files: flip(files.folder / "start", 20),
    "cut-short": lambda files: os.truncate(files.logs()[1], 30 * KIB),
}  # fmt: skip


def harm_all(data_dir: Path) -> dict[str, Files]:
    """Each topic suffers what it is named for, on one of its three replicas."""
    harmed = {name: Files(data_dir, name, number % 3) for number, name in enumerate(HARMS)}
    for name, files in harmed.items():
        HARMS[name](files)
    return harmed


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folders of a cluster that was killed: a topic for each harm, each with several segments in its open range."""
    folder = tmp_path_factory.mktemp("filled") / "data"
    with cluster_in(folder) as cluster:
        with emb.connect(cluster.addresses) as log:
            for name in HARMS:
                log.create_topic(name, order=5, replicas=3, durable_on=2)
                publish(log, name, 0, COUNT)
        until(lambda: well(cluster) and all(replica.lag == 0 for replica in cluster.report().replicas))
        cluster.kill_all()
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def data_dir(filled: Path, tmp_path: Path) -> Path:
    """A copy to do harm to."""
    return Path(shutil.copytree(filled, tmp_path / "data", symlinks=True))


def errors(data_dir: Path) -> list[Any]:
    """What an offline check of all replicas finds wrong with records."""
    reports = [verify_folder(RealDisk(data_dir / f"replica-{number}")) for number in range(3)]
    return [one for report in reports for one in report.findings if one.severity is Severity.ERROR]


def test_files_are_harmed_while_nothing_runs(data_dir: Path) -> None:
    """Everything is served right from the first moment; then the copies are repaired, and a check finds nothing."""
    harm_all(data_dir)
    with cluster_in(data_dir) as cluster:
        with emb.connect(cluster.addresses) as log:
            for name in HARMS:
                all_there(log, name, COUNT)
                publish(log, name, COUNT, 10)
        until(lambda: well(cluster) and not errors(data_dir))
    assert errors(data_dir) == []


def test_files_are_harmed_under_a_running_cluster(data_dir: Path) -> None:
    """Readers never notice; a scrub does, and has the very same bytes written again."""
    rng = random.Random(1)
    with cluster_in(data_dir) as cluster, emb.connect(cluster.addresses) as log:
        until(lambda: well(cluster))
        harmed = harm_all(data_dir)
        for name in rng.sample(list(HARMS), len(HARMS)):
            all_there(log, name, COUNT)
            publish(log, name, COUNT, 10)
        for number, (name, files) in enumerate(harmed.items()):
            peer = Files(data_dir, name, (number + 1) % 3)
            until(lambda files=files, peer=peer: files.bytes() == peer.bytes())
        until(lambda: well(cluster) and not errors(data_dir))
    assert errors(data_dir) == []
