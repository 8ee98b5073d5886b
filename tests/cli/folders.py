"""A cluster's folder as a stopped cluster leaves it, made without a cluster: a store, replicas' folders, records."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from embarcadero.node.folder import ClusterFolder
from embarcadero.placement.directory import Directory
from embarcadero.placement.store import SqliteStore
from embarcadero.storage.disk import RealDisk
from embarcadero.storage.folder import open_folder, write_checkpoint
from embarcadero.storage.layout import lane_folder, range_folder
from embarcadero.storage.range_log import RangeLog
from embarcadero.storage.segment import RangeSettings
from embarcadero.types import Range, Topic
from tests.storage.records import Source

COUNT = 60


class StoppedCluster:
    """Topic `orders` on all replicas, with one range that a clean stop sealed at index COUNT."""

    def __init__(self, path: Path, replicas: int = 2, durable_on: int = 1, clean: bool = True) -> None:
        self.folder = ClusterFolder(path)
        self.folder.create()
        with closing(SqliteStore(self.folder.store_path)) as store:
            directory = Directory(store)
            directory.begin_generation()
            cluster, epoch = directory.cluster_id, directory.elections.next_epoch()
            for number in range(replicas):
                disk = RealDisk(self.folder.replica(number), create=True)
                identity = open_folder(disk, cluster, number, 1)
                directory.replicas.register(number, identity.disk, str(self.folder.replica(number)), "here", 0)
                disk.close()
            self.topic: Topic = directory.topics.create("orders", replicas=replicas, durable_on=durable_on)
            opened = directory.ranges.open_range(self.topic.lane)
            assert opened is not None
            self.range: Range = opened
            ends = {self._fill(number, cluster) for number in range(replicas)}
            (end_seq,) = ends
            if clean:
                assert directory.ranges.seal_clean(opened.lane, opened.number, COUNT, end_seq, epoch)

    def _fill(self, number: int, cluster: str) -> int:
        disk = RealDisk(self.folder.replica(number))
        place = self.topic.lane, self.range.number
        settings = RangeSettings(cluster=cluster, segment_bytes=16_384)
        log = RangeLog.create(disk, range_folder(*place), *place, 0, 0, settings)
        log.append(*Source(start=0, start_seq=0).span(0, COUNT))
        log.sync_job()()
        end_seq = log.end_seq
        log.close()
        write_checkpoint(disk, lane_folder(place[0]), COUNT // 2, b"sessions", 0)
        return end_seq

    def segments(self, number: int) -> list[Path]:
        """A replica's segments, oldest first."""
        place = range_folder(self.topic.lane, self.range.number)
        return sorted((self.folder.replica(number) / place).glob("*.log"))


def flip(path: Path, offset: int) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
