"""Brokers read tables for their clients, behind a seam: one log over memory, disks and table; bounded, fair, typed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embarcadero.broker.disk_reads import TableJobs
from embarcadero.config.secrets import public_properties
from embarcadero.env import Inline
from embarcadero.errors import TierUnavailable
from embarcadero.fabric.layout import ORDER, seal
from embarcadero.limits import TABLE_JOBS_MAX
from embarcadero.types import Gap, GapKind, Range
from embarcadero.wire import messages as m
from embarcadero_proof.bugs.table import injected
from embarcadero_proof.sim.tables import SimTables
from tests.broker.disks import DiskWorld, Later, fill, payload, scan
from tests.broker.harness import Client

BATCHES = 60


class TableWorld:
    """A topic of 60 batches, the first of which a job has moved to a table."""

    def __init__(self, path: Path, workers: Any = None, size: int = 100) -> None:
        self.world, self.tables = DiskWorld(path), SimTables()
        self.range: Range = self.world.topic()
        self.lane = self.range.lane
        fill(self.world, self.range, BATCHES, size)
        self.client = Client(self.world.brokers[0])
        everything = self._everything()
        ask = m.OpenTier(topic="t", holder="job", id="1", warehouse="s3://w", table="ns.t")
        self.epoch = self.world.directory.tiers.open(ask).epoch
        self.everything, self.metadata = everything, ""
        for broker in self.world.brokers:
            broker.readers.tables = TableJobs(workers or Inline(), self.tables)

    def _everything(self) -> tuple[Any, list[bytes]]:
        rows, payloads, at = [], [], 0
        while at < BATCHES:
            found = self.world.fetch(self.client, self.lane, by="index", start=at, control=True)
            rows.append(np.array(found.entries))
            payloads += [bytes(text) for text in found.payloads]
            at = found.next_index
        return np.concatenate(rows), payloads

    def tier(self, start: int, stop: int, name: str) -> None:
        """Move batches to the table, under a new name."""
        entries, payloads = self.everything
        part = seal(np.ascontiguousarray(entries[start:stop], dtype=ORDER))
        self.tables.commit(self.metadata, name, self.lane, part, payloads[start:stop])
        self.metadata = name
        self.advance(stop)

    def advance(self, stop: int) -> None:
        """Record in the store how far the table reaches."""
        frontiers = {self.lane: (stop, int(self.everything[0]["seq"][stop]))}
        ask = m.AdvanceTier(topic="t", epoch=self.epoch, metadata=self.metadata, frontiers=frontiers)
        self.world.directory.tiers.advance(ask, 0)

    def forget(self, index: int, cold: bool = False) -> None:
        """Drop batches from the brokers; with `cold`, from the table too."""
        seq = int(self.everything[0]["seq"][index])
        self.world.directory.topics.trim("t", self.lane, index, seq=seq, cold=cold)
        self.world.run()

    def scan(self, **options: Any) -> tuple[list[bytes], list[Gap]]:
        """Read everything, fetch by fetch."""
        return scan(self.world, self.client, self.lane, **({"table": True, "max_bytes": 500} | options))

    def fetch(self, **options: Any) -> Any:
        """One fetch from the start."""
        return self.world.fetch(self.client, self.lane, by="index", start=0, **({"table": True} | options))


EXPECTED = [payload(number, 100) for number in range(BATCHES)]


@pytest.fixture
def tiered(tmp_path: Path) -> TableWorld:
    """30 batches are in the table; brokers have batches from 25 on."""
    world = TableWorld(tmp_path)
    world.tier(0, 30, "m1")
    world.forget(25)
    return world


def test_a_reader_of_tables_gets_each_position_once_across_the_boundary(tiered: TableWorld) -> None:
    """Table, disks and memory are one log, without a gap; a client that reads tables itself gets TRIMMED."""
    assert tiered.scan() == (EXPECTED, [])
    assert tiered.tables.reads > 1
    assert tiered.scan(table=False) == (EXPECTED[25:], [Gap(GapKind.TRIMMED, 0, 25)])


def test_a_frontier_that_is_too_high_by_one_is_detected(tiered: TableWorld) -> None:
    """The injected bug loses the batch after each answer of the table."""
    with injected("table-frontier-too-high"):
        assert tiered.scan()[0] != EXPECTED


def test_records_that_neither_brokers_nor_the_table_have_are_a_gap(tiered: TableWorld) -> None:
    """A trim by a user also applies to the table; the gap names the position at which the reader continues."""
    tiered.forget(10, cold=True)
    assert tiered.scan() == (EXPECTED[10:], [Gap(GapKind.TRIMMED, 0, 10)])
    bare = tiered.world.brokers[1]
    bare.readers.tables = TableJobs(Inline(), None)
    client = Client(bare)
    assert scan(tiered.world, client, tiered.lane, table=True)[1] == [Gap(GapKind.TRIMMED, 0, 25)]


def test_an_unreachable_store_is_a_typed_error_and_the_next_fetch_continues(tiered: TableWorld) -> None:
    """The client gets the error immediately: it decides how often to try."""

    def away() -> None:
        raise TierUnavailable("s3://w does not answer", "start it")

    tiered.tables.trouble = away
    answer = tiered.fetch()
    assert (answer.code, answer.hint) == ("TierUnavailable", "start it")
    tiered.tables.trouble = lambda: None
    assert tiered.scan() == (EXPECTED, [])


def test_files_removed_between_planning_and_reading_are_read_from_the_newest_metadata(tmp_path: Path) -> None:
    """A commit and a garbage collection happen while a read waits for a worker: it is planned again."""
    later = Later()
    tiered = TableWorld(tmp_path, later)
    tiered.tier(0, 30, "m1")
    tiered.forget(25)
    assert tiered.fetch() is None
    tiered.tier(30, 40, "m2")
    tiered.tables.collect("m1")
    later.step()
    tiered.world.run(2, tiered.client)
    assert len(later.jobs) == 1
    later.step()
    tiered.world.run(2, tiered.client)
    found = tiered.client.fetched[max(tiered.client.fetched)]
    assert found.next_index == 25
    assert [bytes(text) for text in found.payloads] == EXPECTED[:25]

    request = tiered.client.ask(m.Fetch(lane=tiered.lane, start=0, max_bytes=1 << 20, table=True))
    tiered.tables.collect("m2")
    later.step()
    tiered.client.pump()
    assert tiered.client.answers[request].code == "BadTable"  # the store has no newer metadata


def test_reads_of_tables_are_bounded_and_leave_disks_alone(tmp_path: Path) -> None:
    """A few run at once, others wait in turn; a read of a disk continues; reads of a client that left are dropped."""
    later = Later()
    tiered = TableWorld(tmp_path, later)
    tiered.tier(0, 30, "m1")
    tiered.forget(25)
    broker = tiered.world.brokers[0]
    others = [Client(broker) for _ in range(3)]
    for client in (tiered.client, *others):
        for _ in range(3):
            client.ask(m.Fetch(lane=tiered.lane, start=0, max_bytes=1 << 20, table=True))
    assert len(later.jobs) == broker.readers.tables.running == TABLE_JOBS_MAX
    assert broker.readers.tables.waiting == 12 - TABLE_JOBS_MAX
    assert tiered.world.fetch(tiered.client, tiered.lane, by="index", start=26, table=True).payloads
    broker.fetches.disconnected(others[0].peer)
    assert broker.readers.tables.waiting <= 12 - TABLE_JOBS_MAX - 2
    while later.jobs:
        later.step()
    assert later.most == TABLE_JOBS_MAX
    assert broker.readers.tables.running == 0


def test_positions_and_pieces_of_the_table_are_found(tiered: TableWorld) -> None:
    """Find and Measure with `table`; a broker without a reader refuses, and names the package to install."""
    world, client, lane = tiered.world, tiered.client, tiered.lane
    place = world.ask(client, m.Find(lane=lane, by="seq", start=9, table=True))
    assert (place.index, place.seq, place.table, place.missing) == (4, 8, True, False)
    assert world.ask(client, m.Find(lane=lane, by="seq", start=99, table=True)).missing
    measure = m.Measure(lane=lane, start=0, stop=20, piece_bytes=1 << 20, pieces_max=9, table=True)
    pieces = world.ask(client, measure)
    assert pieces.table
    assert [cut.index for cut in pieces.cuts] == [20]
    world.brokers[0].readers.tables = TableJobs(Inline(), None)
    assert world.ask(client, measure).code == "NotAvailable"


def test_clients_get_the_address_of_the_store_and_no_secret() -> None:
    """Only the settings that a client needs to find it are sent; user info in an endpoint is removed."""
    properties = public_properties({
        "s3.endpoint": "http://me:secret@store:9000", "s3.region": "eu", "s3.secret-access-key": "x",
        "s3.session-token": "y", "uri": "sqlite:///secret", "s3.access-key-id": "z",
    })  # fmt: skip
    assert properties == {"s3.endpoint": "http://store:9000", "s3.region": "eu"}
    assert public_properties({"s3.endpoint": "http://me:sec/r@t@store:9000"}) == {"s3.endpoint": "http://store:9000"}
