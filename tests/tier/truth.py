"""The reference for tests of the tier: published records, at the positions of their acks."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import duckdb

from embarcadero.client.api.sync_log import Log
from embarcadero.tier.columns import Layout
from embarcadero.tier.storage import TierSettings
from embarcadero.tier.table import TierTable, collect_data
from embarcadero.tier.table_reads import TopicTable, table_batches


def await_durable(log: Log, topic: str) -> None:
    """Wait until all ordered entries are durable: the close of a session is acked as soon as it is ordered."""
    while (tail := log.tail(topic)).durable_index != tail.index:
        time.sleep(0.01)


class Truth:
    """Records that were acked as durable, by seq."""

    def __init__(self, log: Log, topic: str, settings: TierSettings) -> None:
        self.log, self.topic, self.settings = log, topic, settings
        self.records: dict[int, bytes] = {}

    def publish(self, count: int) -> None:
        """Records in a session of their own, in several batches."""
        with self.log.publisher(self.topic, ack=2, batch_bytes=2_000) as publisher:
            sent = [(b"%08d" % number * 20, publisher.send(b"%08d" % number * 20)) for number in range(count)]
            for value, future in sent:
                position = future.result(10)
                assert position is not None
                self.records[position.seq] = value
        await_durable(self.log, self.topic)

    def rows(self) -> list[tuple[int, int, bytes]]:
        """(index, seq, value) of all records in the files that the table names, as DuckDB reads them."""
        now = TierTable(self.settings, self.log.describe(self.topic).tier.table).load()  # type: ignore[union-attr]
        assert now is not None
        paths = [task.file.file_path.removeprefix("file://") for task in now.table.scan().plan_files()]
        kind = "where _kind = 1" if now.layout is Layout.WHOLE else ""
        query = f"select _index, _seq, value from read_parquet(?) {kind} order by _index, _seq"
        return duckdb.execute(query, [paths]).fetchall() if paths else []

    def problems(self) -> list[str]:
        """Records that are duplicated, missing or wrong: in the table below its frontier, with the brokers above it."""
        tier = self.log.describe(self.topic).tier
        assert tier is not None
        found, told = self.rows(), []
        told += [f"seq {seq} is there {n} times" for seq, n in Counter(seq for _, seq, _ in found).items() if n > 1]
        tail = self.log.tail(self.topic)
        tier = self.log.describe(self.topic).tier  # again: a tierer may have continued, and the brokers with it
        assert tier is not None
        if tail.hot_index > tier.frontier(tail.lane)[0]:
            told.append(f"brokers forgot up to {tail.hot_index}, the table ends at {tier.frontier(tail.lane)}")
        hot = self.log.read(self.topic, tail.hot_seq)
        held = {seq: value for _, seq, value in found}
        held |= dict(zip(hot.column("_seq").to_pylist(), hot.column("value").to_pylist(), strict=True))
        told += [f"seq {seq} is missing" for seq in self.records.keys() - held.keys()]
        told += [f"seq {seq} is wrong" for seq, value in self.records.items() if held.get(seq, value) != value]
        versions = self.log.describe(self.topic).versions
        cold = [
            batch
            for batches in table_batches(TopicTable(tier), tail.lane, 0, 1 << 62, versions)
            for batch in batches
        ]
        told += [f"{batch!r} in the table" for batch in cold if batch.gap is not None]
        return told

    def data_files(self) -> set[str]:
        """Files in the table's folder."""
        folder = Path(self.settings.warehouse.removeprefix("file://"))
        return {path.name for path in folder.rglob("data/*.parquet")}

    def named_files(self) -> set[str]:
        """Files that the table names, and that of its control entries."""
        made = TierTable(self.settings, self.log.describe(self.topic).tier.table)  # type: ignore[union-attr]
        now: Any = made.load()
        tables = [now.table, *([made.entries(now).load()] if now.entries_table else [])]
        return {task.file.file_path.rsplit("/", 1)[-1] for table in tables for task in table.scan().plan_files()}

    def collect(self) -> list[str]:
        """Garbage, now."""
        return collect_data(TierTable(self.settings, self.log.describe(self.topic).tier.table))  # type: ignore[union-attr]
