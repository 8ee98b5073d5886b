"""A tiering job in a few lines, for tests of reading: tests control the frontier, and which records it drops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from embarcadero.tier.parquet import FileSpan, write_span
from embarcadero.tier.storage import TierSettings
from embarcadero.tier.table import TierTable, table_name


class Tierer:
    """Writes the table of one topic."""

    def __init__(self, log: Any, topic: str, folder: Path) -> None:
        self.log, self.topic = log, topic
        self.about = log.describe(topic)
        self.settings = TierSettings.local(folder)
        self.table = TierTable(self.settings, table_name(topic))
        self.table.create(topic, f"id-{topic}", self.about.versions)
        tier = log.open_tier(
            topic, "test", table_id=f"id-{topic}", warehouse=self.settings.warehouse, table=self.table.identifier
        )
        self.epoch = tier.epoch

    def tier(self, lane: int, stop: int, stop_seq: int) -> None:
        """Have the lane in the table up to a position, in one more file."""
        now = self.table.load()
        assert now is not None
        start, start_seq = now.frontiers.get(lane, (0, 0))
        if stop <= start:
            return
        span = FileSpan(lane=lane, start=start, stop=stop, start_seq=start_seq, stop_seq=stop_seq)
        scan = self.log.scan(self.topic, lane=lane, start=start, stop=stop, control=True, timeout=30)
        facts = write_span(
            self.table.storage, now.table.location(), span, self.epoch, self.about.versions, scan, now.entries_location
        )
        after = now.frontiers | {lane: (stop, stop_seq)}
        starts = now.starts | {lane: now.starts.get(lane, (0, 0))}
        done = self.table.commit(now.frontiers, [facts], after, starts, self.about.versions, self.epoch)
        self.log.advance_tier(self.topic, self.epoch, metadata=done.metadata, frontiers=after, starts=starts)

    def tier_all(self, lane: int) -> tuple[int, int]:
        """Have all durable records of the lane in the table; return the end."""
        tail = self.log.tail(self.topic)
        ends = {each.lane: each for each in tail.lanes or (tail,)}[lane]
        self.tier(lane, ends.durable_index, ends.durable_seq)
        return ends.durable_index, ends.durable_seq

    def forget(self, lane: int, index: int) -> None:
        """Have brokers drop all records below this position, as far as the table has them."""
        self.log.trim(self.topic, before_index=index, lane=lane, cold=False)
