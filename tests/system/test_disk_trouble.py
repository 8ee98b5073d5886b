"""Disk faults under real processes.

No durably acked record is lost, no wrong record is served, no call hangs, and `status` or a log names the cause and the
remedy.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import embarcadero as emb
from embarcadero.config import Config, load
from embarcadero.errors import Backpressure, ClusterError, Corrupt, Trimmed
from embarcadero.node.local import LocalCluster, RestartableCluster
from embarcadero.placement.directory import Directory
from embarcadero.placement.store import SqliteStore
from embarcadero.storage.disk import RealDisk
from embarcadero.storage.layout import FOOTER_BYTES, HEADER_BYTES, decode_footer, range_folder
from embarcadero.storage.verify import Severity, verify_folder
from embarcadero.types import GapKind

pytestmark = pytest.mark.system
WAIT_S = 60
KIB = 1 << 10
MIB = 1 << 20
COUNT = 320


def until(what: Callable[[], Any]) -> Any:
    """Wait for an action of other processes."""
    give_up = time.monotonic() + WAIT_S
    while not (found := what()):
        assert time.monotonic() < give_up, "it did not happen"
        time.sleep(0.02)
    return found


def small(**more: Any) -> Config:
    """Small segments, little memory, and a fast scrub."""
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
    """Every record, once, in order, with its bytes; and lookups lead to the correct ones."""
    assert values(log, topic) == [value(number) for number in range(count)]
    for number in range(0, count, 97):
        assert values(log, topic, start=number, end=number + 1) == [value(number)]


def well(cluster: LocalCluster) -> bool:
    report = cluster.report()
    return not report.degraded and all(lane.state in ("open", "sealed") for lane in report.lanes)


class Files:
    """The segment files of one topic's oldest range on one replica, and ways to damage them."""

    def __init__(self, data_dir: Path, topic: str, replica: int) -> None:
        with closing(SqliteStore(data_dir / "store.db")) as store:
            lane = next(one.lane for one in Directory(store).topics.all() if one.name == topic)
        self.folder = data_dir / f"replica-{replica}" / range_folder(lane, 1)

    def logs(self) -> list[Path]:
        return sorted(self.folder.glob("*.log"))

    def bytes(self) -> dict[str, bytes]:
        """Segments with records, without footers.

        A range that was sealed right after a roll-over may end with an empty segment. The footer before it then does
        not mark the last segment.
        """
        found = {path.name: self._less_footer(path.read_bytes()) for path in self.logs()}
        return {name: data for name, data in found.items() if len(data) > HEADER_BYTES}

    @staticmethod
    def _less_footer(data: bytes) -> bytes:
        return data[:-FOOTER_BYTES] if decode_footer(data[-FOOTER_BYTES:]) else data


def flip(path: Path, place: int) -> None:
    """Flip one bit in place: other processes have the file open."""
    with path.open("r+b") as file:
        file.seek(place)
        old = file.read(1)
        file.seek(place)
        file.write(bytes([old[0] ^ 16]))


def remove(folder: Path) -> None:
    """Remove a folder atomically: other processes may be writing to it."""
    shutil.rmtree(folder.rename(folder.with_suffix(".away")))


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
    "folder-deleted": lambda files: remove(files.folder),
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
    """Each topic suffers the fault in its name, on one of its three replicas."""
    harmed = {name: Files(data_dir, name, number % 3) for number, name in enumerate(HARMS)}
    for name, files in harmed.items():
        HARMS[name](files)
    return harmed


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folders of a cluster that was killed: a topic for each fault, each with several segments in its open range."""
    folder = tmp_path_factory.mktemp("filled") / "data"
    while not fill(folder):
        shutil.rmtree(folder)
    yield folder
    shutil.rmtree(folder)


def fill(folder: Path) -> bool:
    """Whether each topic is in one range: it is not, if the disk was so slow that a replica was declared silent."""
    with cluster_in(folder) as cluster:
        with emb.connect(cluster.addresses) as log:
            for name in HARMS:
                log.create_topic(name, order=5, replicas=3, durable_on=2)
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(lambda name: publish(log, name, 0, COUNT), HARMS))
        until(lambda: well(cluster) and all(replica.lag == 0 for replica in cluster.report().replicas))
        whole = all(ranges_of(cluster, name) == 1 for name in HARMS)
        cluster.kill_all()
    return whole


@pytest.fixture
def data_dir(filled: Path, tmp_path: Path) -> Path:
    """A copy to damage. It does not name its original, so `up` takes it for a folder of its own."""
    copy = Path(shutil.copytree(filled, tmp_path / "data", symlinks=True))
    info = json.loads((copy / "cluster.json").read_bytes())
    (copy / "cluster.json").write_text(json.dumps({key: value for key, value in info.items() if key != "home"}))
    return copy


def errors(data_dir: Path) -> list[Any]:
    """Errors about records in an offline check of all replicas."""
    reports = [verify_folder(RealDisk(data_dir / f"replica-{number}")) for number in range(3)]
    return [one for report in reports for one in report.findings if one.severity is Severity.ERROR]


def test_files_are_damaged_while_nothing_runs(data_dir: Path) -> None:
    """Everything is served correctly from the first moment; then the copies are repaired, and a check finds nothing."""
    harm_all(data_dir)
    with cluster_in(data_dir) as cluster:
        with emb.connect(cluster.addresses) as log:
            for name in HARMS:
                all_there(log, name, COUNT)
                publish(log, name, COUNT, 10)
        until(lambda: well(cluster) and not errors(data_dir))
    assert errors(data_dir) == []


def test_files_are_damaged_under_a_running_cluster(data_dir: Path) -> None:
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


# --- disks that refuse ------------------------------------------------------------------------------------------------
@contextmanager
def files_limited(pid: int, largest: int) -> Iterator[None]:
    """Limit the size of files of a process: the kernel writes up to the limit, and refuses the rest."""
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (largest, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


def replicas_of(cluster: LocalCluster, topic: str) -> list[int]:
    return next(lane.replicas for lane in cluster.report().lanes if lane.topic == topic)


def says(cluster: LocalCluster, *words: str) -> bool:
    """Whether `status` has a line with all these words."""
    return any(all(word in line for word in words) for line in cluster.report().degraded)


def test_full_disks(tmp_path: Path) -> None:
    """One of three: ack=2 continues, on the others. All of them: ack=1 continues, ack=2 waits until there is space."""
    with cluster_in(tmp_path, replica__segment_bytes=64 * MIB) as cluster, emb.connect(cluster.addresses) as log:
        log.create_topic("one", order=5, replicas=1, durable_on=1)
        log.create_topic("three", order=5, replicas=3, durable_on=2)
        for topic in ("one", "three"):
            publish(log, topic, 0, 10)
        (full,) = replicas_of(cluster, "one")
        with ExitStack() as limits, ExitStack() as publishers:
            limits.enter_context(files_limited(cluster.pids()[f"replica:{full}"], 50_001))
            for topic in ("one", "three"):
                publish(log, topic, 10, 90)
            until(lambda: says(cluster, f"replica {full}", "disk full", "free some space"))
            for other in {0, 1, 2} - {full}:
                limits.enter_context(files_limited(cluster.pids()[f"replica:{other}"], 50_001))
            waiting = {}
            for topic in ("one", "three"):
                publish(log, topic, 100, 90, ack=1)
                publisher = publishers.enter_context(log.publisher(topic, ack=2))
                waiting[topic] = publisher.send(value(190))
            until(lambda: all(says(cluster, f"replica {number}", "disk full") for number in range(3)))
            for topic, future in waiting.items():
                assert not future.done()
                end = log.tail(topic).durable_seq
                assert 100 <= end < 190
                assert values(log, topic, end=end) == [value(number) for number in range(end)]
            limits.close()
            assert [future.result(WAIT_S).seq for future in waiting.values()] == [190, 190]
        until(lambda: well(cluster))
        for topic in ("one", "three"):
            all_there(log, topic, 191)
        assert "DISK_FULL" in (tmp_path / "logs" / f"replica-{full}.log").read_text()


@pytest.mark.parametrize("size", [10_000, 200_000])
def test_full_disks_refuse_new_records_with_the_cause_and_the_publisher_lives(tmp_path: Path, size: int) -> None:
    """send() raises Backpressure, also long after the delivery timeout; nothing is lost, and it works again later."""
    with (
        cluster_in(tmp_path, replica__segment_bytes=64 * MIB, broker__backpressure_after_s=0.5) as cluster,
        emb.connect(cluster.addresses) as log,
    ):
        log.create_topic("t", order=5, replicas=3, durable_on=2)
        publisher = log.publisher("t", ack=2, linger_ms=0, delivery_timeout=5)
        taken = [publisher.send(b"first")]
        taken[0].result(WAIT_S)
        refusals: list[str] = []
        with ExitStack() as limits:
            for replica in range(3):
                limits.enter_context(files_limited(cluster.pids()[f"replica:{replica}"], 50_001))
            began = time.monotonic()
            while time.monotonic() < began + 15 or not refusals:
                try:
                    taken.append(publisher.send(b"x" * size))
                except Backpressure as error:
                    refusals.append(str(error))
                time.sleep(0.05)
            named = [refusal for refusal in refusals if "disk full" in refusal and "free some space" in refusal]
            assert named
            assert refusals[refusals.index(named[0]) :] == named
            assert "the record was not accepted" in refusals[-1]
        for future in taken:
            assert future.result(WAIT_S) is not None
        assert publisher.send(b"last").result(WAIT_S).seq == len(taken)
        publisher.close()
        assert log.read("t", timeout=WAIT_S).num_rows == len(taken) + 1


@contextmanager
def unwritable(folder: Path) -> Iterator[None]:
    """Files in a folder cannot be created or changed: not even by root, which ignores permissions."""
    folders = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
    change = [["chattr", "+i"], ["chattr", "-i"]] if os.geteuid() == 0 else [["chmod", "u-w"], ["chmod", "u+w"]]
    subprocess.run([*change[0], *folders], check=True)
    try:
        yield
    finally:
        subprocess.run([*change[1], *folders], check=True)


def test_a_folder_that_becomes_read_only(tmp_path: Path) -> None:
    """While it runs the others continue; after a restart it does not start, `up` does, and both are reported."""
    with cluster_in(tmp_path) as cluster, emb.connect(cluster.addresses) as log:
        log.create_topic("new", order=2, replicas=3, durable_on=2)
        publish(log, "new", 0, 20)
        with unwritable(tmp_path / "replica-1"):
            publish(log, "new", 20, 180)
            until(lambda: says(cluster, "replica 1", "read only", "make the folder writable"))
            all_there(log, "new", 200)
        until(lambda: well(cluster))
    with unwritable(tmp_path / "replica-1"), cluster_in(tmp_path) as cluster, emb.connect(cluster.addresses) as log:
        until(lambda: says(cluster, "replica 1", "down", str(tmp_path / "replica-1")))
        all_there(log, "new", 200)
        publish(log, "new", 200, 10)
        assert "make the folder writable" in (tmp_path / "logs" / "replica-1.log").read_text()


# --- folders with problems
# ----------------------------------------------------------------------------------------------
def logged(folder: Path, name: str, *words: str) -> bool:
    path = folder / "logs" / f"{name}.log"
    return path.exists() and any(all(word in line for word in words) for line in path.read_text().splitlines())


def test_folders_that_are_taken_foreign_or_gone(tmp_path: Path) -> None:
    """A second process, a folder under two names, a removed folder: refused, or created again; no data is harmed."""
    with cluster_in(tmp_path) as cluster, emb.connect(cluster.addresses) as log:
        log.create_topic("t", order=5, replicas=3, durable_on=2)
        publish(log, "t", 0, 100)
        second = subprocess.run(
            [sys.executable, "-m", "embarcadero.cli.processes", "--data-dir", tmp_path, "--roles", "replica:0",
             "--parent", str(os.getpid())],
            capture_output=True, text=True, timeout=WAIT_S, check=False,
        )  # fmt: skip
        assert second.returncode == 1
        assert "WrongFolder" in second.stderr
        assert "in use by another process" in second.stderr
        (tmp_path / "replica-7").symlink_to(tmp_path / "replica-0")
        until(lambda: logged(tmp_path, "replica-7", "WrongFolder", "two replicas can't share a folder"))
        (tmp_path / "replica-7").unlink()

        before = next(replica.disk for replica in cluster.report().replicas if replica.id == 2)
        remove(tmp_path / "replica-2")
        publish(log, "t", 100, 100)
        until(lambda: logged(tmp_path, "replica-2", "its folder is missing", "find out who removed it"))
        until(lambda: [r for r in cluster.report().replicas if r.id == 2 and r.disk != before and r.state == "live"])
        publish(log, "t", 200, 100)
        until(lambda: well(cluster))
        all_there(log, "t", 300)
        until(lambda: Files(tmp_path, "t", 2).bytes() == Files(tmp_path, "t", 0).bytes())


def test_a_start_with_one_foreign_folder(tmp_path: Path) -> None:
    """Of another replica, or damaged: refused with the remedy, the others serve; after the repair it is used again."""
    with cluster_in(tmp_path) as cluster, emb.connect(cluster.addresses) as log:
        log.create_topic("t", order=5, replicas=3, durable_on=2)
        publish(log, "t", 0, 100)
    mine = tmp_path / "replica-1" / "identity.json"
    right = mine.read_bytes()
    wrong = {
        "belongs to replica 0": (tmp_path / "replica-0" / "identity.json").read_bytes(),
        "identity.json is damaged": right.replace(b"a", b"b"),
    }
    for problem, data in wrong.items():
        mine.write_bytes(data)
        with cluster_in(tmp_path) as cluster, emb.connect(cluster.addresses) as log:
            assert logged(tmp_path, "replica-1", "WrongFolder", problem)
            until(lambda: says(cluster, "replica 1", "down"))
            all_there(log, "t", 100)
    mine.write_bytes(right)
    with cluster_in(tmp_path) as cluster, emb.connect(cluster.addresses) as log:
        publish(log, "t", 100, 10)
        until(lambda: well(cluster))
        all_there(log, "t", 110)


def test_replicas_of_another_cluster_do_not_start(tmp_path: Path) -> None:
    """The store was exchanged: no replica has a folder of this cluster, and `up` reports it instead of losing them."""
    with cluster_in(tmp_path / "one", replicas=1) as cluster, emb.connect(cluster.addresses) as log:
        log.create_topic("t", order=5)
        publish(log, "t", 0, 10)
    with cluster_in(tmp_path / "two", replicas=1):
        pass
    kept = {path: path.read_bytes() for path in (tmp_path / "one" / "replica-0").rglob("*.log")}
    shutil.copy(tmp_path / "two" / "store.db", tmp_path / "one" / "store.db")
    with pytest.raises(Corrupt, match="has lost its newest changes"):
        cluster_in(tmp_path / "one", replicas=1)
    for path in (tmp_path / "two").glob("store.db*"):
        shutil.copy(path, tmp_path / "one" / path.name)
    with pytest.raises(ClusterError, match="belongs to cluster"):
        cluster_in(tmp_path / "one", replicas=1)
    assert kept == {path: path.read_bytes() for path in (tmp_path / "one" / "replica-0").rglob("*.log")}


# --- replicas that are slow, dead, drained or new ---------------------------------------------------------------------
class Load:
    """A thread that publishes numbers with ack=2, one batch after another, until it is stopped."""

    def __init__(self, log: Any, topic: str) -> None:
        self._log, self._topic, self._stop = log, topic, threading.Event()
        self.acked, self.longest_s = 0, 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with self._log.publisher(self._topic, ack=2, batch_bytes=4 * KIB) as publisher:
            while not self._stop.is_set():
                began = time.monotonic()
                futures = [publisher.send(value(self.acked + number)) for number in range(4)]
                for future in futures:
                    future.result(WAIT_S)
                self.longest_s = max(self.longest_s, time.monotonic() - began)
                self.acked += len(futures)

    def more(self, count: int = 100) -> None:
        """Wait until it has published some more."""
        wanted = self.acked + count
        until(lambda: self.acked >= wanted or not self._thread.is_alive())
        assert self._thread.is_alive(), "a publisher never stops because of a disk"

    def stop(self) -> int:
        """The number of records."""
        self._stop.set()
        self._thread.join(WAIT_S)
        return self.acked


def ranges_of(cluster: LocalCluster, topic: str) -> int:
    return next(lane.ranges for lane in cluster.report().lanes if lane.topic == topic)


def test_replicas_come_and_go_under_load(tmp_path: Path) -> None:
    """One is paused and catches up, one is killed and replaced, one is drained. Publishing continues.

    All records exist, and a reader that starts late reads everything from files, over several ranges, meanwhile.
    """
    with cluster_in(tmp_path, replicas=4) as cluster, emb.connect(cluster.addresses) as log:
        log.create_topic("t", order=5, replicas=3, durable_on=2)
        load = Load(log, "t")
        load.more()
        slow, killed, _ = replicas_of(cluster, "t")
        pid = cluster.pids()[f"replica:{slow}"]
        os.kill(pid, signal.SIGSTOP)
        load.more()
        with suppress(ProcessLookupError):  # it was paused for so long that it was killed
            os.kill(pid, signal.SIGCONT)
        until(lambda: well(cluster) and max(replica.lag for replica in cluster.report().replicas) < 50)
        load.more()
        print(f"longest ack=2 with a slow replica: {load.longest_s:.3f} s")

        before, load.longest_s = ranges_of(cluster, "t"), 0.0
        cluster.kill_replica(killed)
        load.more(400)
        until(lambda: ranges_of(cluster, "t") > before)
        print(f"longest ack=2 over a killed replica: {load.longest_s:.3f} s")

        (left, *_) = replicas_of(cluster, "t")
        drained = subprocess.run(
            [sys.executable, "-m", "embarcadero.cli.main", "replica", "drain", str(left), "--data-dir", tmp_path],
            capture_output=True, text=True, timeout=WAIT_S, check=False,
        )  # fmt: skip
        assert drained.returncode == 0, drained.stderr
        assert left not in replicas_of(cluster, "t")
        load.more()

        with log.subscribe("t", start="earliest") as subscriber:
            seen: list[bytes] = []
            while len(seen) < load.acked:
                seen += [record.value for record in subscriber.poll(WAIT_S).records()]
                assert len(seen) < 1_000_000
        count = load.stop()
        assert seen == [value(number) for number in range(len(seen))]
        all_there(log, "t", count)
        until(lambda: well(cluster))
    assert errors(tmp_path) == []


def test_old_segments_are_dropped_and_readers_are_informed(tmp_path: Path) -> None:
    """By bytes, by age and by trims: whole segments; a TRIMMED gap for readers, Trimmed for lookups below."""
    with cluster_in(tmp_path, replica__segment_s=1.0) as cluster, emb.connect(cluster.addresses) as log:
        log.create_topic("bytes", order=5, replicas=3, durable_on=2, retention_bytes=128 * KIB)
        log.create_topic("age", order=2, replicas=3, durable_on=2, retention_s=1)
        log.create_topic("trim", order=0, replicas=3, durable_on=2)
        for topic in ("bytes", "age", "trim"):
            publish(log, topic, 0, 400)
        (lane,) = {position.lane for position in publish(log, "trim", 400, 1)}
        log.trim("trim", before_seq=200, lane=lane)
        until(lambda: all(log.tail(topic).start_seq > 100 for topic in ("bytes", "age")))
        for topic in ("bytes", "age"):
            with log.subscribe(topic, start=0) as subscriber:
                first = subscriber.poll(WAIT_S)
            assert first.gap is not None
            assert first.gap.kind is GapKind.TRIMMED
            left = None
            while left is None:
                with suppress(Trimmed):  # retention continues
                    left = values(log, topic, start=log.tail(topic).start_seq)
            assert left == [value(number) for number in range(400 - len(left), 400)]
        assert values(log, "trim")[-1] == value(400)
        with pytest.raises(Trimmed):
            log.read("trim", start=0, lane=lane, timeout=WAIT_S)


def test_a_clean_stop_keeps_sessions_of_connected_publishers(tmp_path: Path) -> None:
    """`down`, `up`: a named and an unnamed publisher continue their sessions; records acked with ack=1 are there."""
    cluster = RestartableCluster(tmp_path, brokers=2, replicas=1)
    cluster.start()
    try:
        with emb.connect(cluster.addresses) as log:
            log.create_topic("t", order=5, replicas=1)
            with log.publisher("t", session="somebody") as named, log.publisher("t") as unnamed:
                for life in range(2):
                    for number in range(20 * life, 20 * life + 20):
                        for publisher in (named, unnamed):
                            publisher.publish([{"value": value(number)}]).result(WAIT_S)
                    if not life:
                        cluster.stop()
                        cluster.start()
            table = log.read("t", timeout=WAIT_S)
            assert table.column("value").to_pylist() == [value(number) for number in range(40) for _ in range(2)]
            assert table.column("_seq").to_pylist() == list(range(80)), "no position was given up"
    finally:
        cluster.stop()


# --- the store --------------------------------------------------------------------------------------------------------
def known(path: Path) -> tuple[Any, ...]:
    """All values about topics and ranges in the store."""
    with closing(SqliteStore(path)) as store:
        directory = Directory(store)
        return directory.cluster_id, directory.topics.all(), directory.ranges.all(), directory.replicas.all()


def test_flipped_bits_in_the_store_are_noticed(tmp_path: Path) -> None:
    """Each is harmless, or `up` refuses to start and names the remedy. Records stay where they are."""
    rng, folder = random.Random(3), tmp_path / "data"
    with cluster_in(folder, replicas=1) as cluster, emb.connect(cluster.addresses) as log:
        log.create_topic("t", order=5)
        publish(log, "t", 0, 50)
    right, size = known(folder / "store.db"), (folder / "store.db").stat().st_size
    whole = {path.name: path.read_bytes() for path in folder.glob("store.db*")}
    refused: dict[int, str] = {}
    for number, place in enumerate(rng.sample(range(size), 60)):
        harmed = tmp_path / str(number)
        harmed.mkdir()
        for name, data in whole.items():
            (harmed / name).write_bytes(data)
        flip(harmed / "store.db", place)
        try:
            assert known(harmed / "store.db") == right
        except Corrupt as error:
            refused[place] = error.hint
    assert refused
    assert all(refused.values())
    flip(folder / "store.db", min(refused))
    with pytest.raises(Corrupt, match="store"):
        cluster_in(folder, replicas=1)
    for name, data in whole.items():
        (folder / name).write_bytes(data)
    with cluster_in(folder, replicas=1) as cluster, emb.connect(cluster.addresses) as log:
        all_there(log, "t", 50)


def test_a_cluster_whose_info_cannot_be_written_continues(tmp_path: Path) -> None:
    """A broker is killed while `cluster.json` can't be replaced: another one starts, and the memory stays.

    The file lists the running processes as soon as it can be written.
    """
    with cluster_in(tmp_path, replicas=0) as cluster, emb.connect(cluster.addresses) as log:
        log.create_topic("t", order=5, replicas=0)
        publish(log, "t", 0, COUNT, ack=1)
        hindrance = tmp_path / "cluster.json.new"
        hindrance.mkdir()
        before = cluster.pids()["broker:0"]
        os.kill(before, signal.SIGKILL)
        publish(log, "t", COUNT, 1, ack=1)
        assert cluster.pids()["broker:0"] == before
        hindrance.rmdir()
        now = until(lambda: (pid := cluster.pids()["broker:0"]) != before and pid)
        assert now == cluster.report().brokers[0].pid
        all_there(log, "t", COUNT + 1)
    assert "can't write cluster.json" in (tmp_path / "logs" / "supervisor.log").read_text()
