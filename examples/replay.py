"""Keep totals of a topic in a database, and replay the topic when the program had a bug.

    python examples/replay.py [ADDRESS]      # without an address: a private cluster

One transaction adds the records of a batch to the totals and stores the index of the next batch. A program that dies
at any moment therefore continues where it stopped, and counts each record once.

A replay is the corrected program, which reads the topic again from its start. It writes its own version of the totals.
Readers use the old version until the replay has caught up; then one transaction switches to the new version.
"""

from __future__ import annotations

import sqlite3
import sys
import tempfile
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import embarcadero as emb

TOPIC = "card-payments"
CUSTOMERS = (b"ann", b"bob", b"eve")
TABLES = """
create table if not exists totals (version text, customer text, cents integer, primary key (version, customer));
create table if not exists progress (version text primary key, next_index integer);
create table if not exists current (only integer primary key check (only = 1), version text);
"""
ADD = "insert into totals values (?, ?, ?) on conflict do update set cents = cents + excluded.cents"
Cents = Callable[[bytes], int]


def cents_with_a_bug(amount: bytes) -> int:
    """Convert 0.29 to 28: the product is 28.999..., and `int` cuts it off."""
    return int(float(amount) * 100)


def cents(amount: bytes) -> int:
    """Convert 0.29 to 29."""
    return int(Decimal(amount.decode()) * 100)


class Totals:
    """One version of the totals: cents by customer, and the index of the next batch to read."""

    def __init__(self, database: Path, version: str, cents: Cents) -> None:
        self.version, self._cents = version, cents
        self._connection = sqlite3.connect(database)
        self._connection.executescript(TABLES)

    def next_index(self) -> int | None:
        """Return the index at which to continue. None: begin at the start of the topic."""
        question = "select next_index from progress where version = ?"
        found = self._connection.execute(question, (self.version,)).fetchone()
        return None if found is None else int(found[0])

    def add(self, batch: emb.Batch) -> None:
        """Add a batch and move the position, in one transaction."""
        if batch.gap is not None and batch.gap.kind in (emb.GapKind.TRIMMED, emb.GapKind.LOST):
            raise RuntimeError(f"the topic no longer has all records that these totals need: {batch.gap}")
        with self._connection:
            for record in batch:
                row = (self.version, (record.key or b"").decode(), self._cents(record.value))
                self._connection.execute(ADD, row)
            self._connection.execute("insert or replace into progress values (?, ?)", (self.version, batch.index + 1))

    def switch(self) -> None:
        """Switch readers to this version, and delete the others."""
        with self._connection:
            self._connection.execute("insert or replace into current values (1, ?)", (self.version,))
            for table in ("totals", "progress"):
                self._connection.execute(f"delete from {table} where version <> ?", (self.version,))

    def close(self) -> None:
        self._connection.close()


def current(database: Path) -> dict[str, int]:
    """Return the totals as readers see them."""
    connection = sqlite3.connect(database)
    try:
        return dict(connection.execute("select customer, cents from totals join current using (version) order by 1"))
    finally:
        connection.close()


def catch_up(log: emb.Log, totals: Totals) -> int:
    """Add all records that are durable now. Return their number."""
    records = 0
    for batches in log.scan(TOPIC, start=totals.next_index(), stop=log.tail(TOPIC).durable_index):
        for batch in batches:
            totals.add(batch)
            records += batch.count
    return records


def replay(log: emb.Log, database: Path, version: str, cents: Cents) -> int:
    """Build a version of the totals from the start of the topic, then switch to it. Return the number of records."""
    totals = Totals(database, version, cents)
    try:
        records = catch_up(log, totals)
        records += catch_up(log, totals)  # the records that arrived meanwhile: now the new version is almost current
        totals.switch()
    finally:
        totals.close()
    return records


def pay(log: emb.Log, payments: int) -> None:
    with log.publisher(TOPIC, ack=2) as publisher:
        for number in range(payments):
            publisher.send(b"0.29", key=CUSTOMERS[number % 3])


def main(address: str = "") -> None:
    with (
        emb.connect(address) if address else emb.local(brokers=2, replicas=1) as log,
        tempfile.TemporaryDirectory() as folder,
    ):
        if TOPIC not in [topic.name for topic in log.topics()]:
            log.create_topic(TOPIC)
        database = Path(folder) / "totals.db"
        first = Totals(database, "1", cents_with_a_bug)
        first.switch()
        for _ in range(2):
            pay(log, 300)
            print(f"version 1 read {catch_up(log, first)} payments: {current(database)}")
        print(f"version 2 read {replay(log, database, '2', cents)} payments: {current(database)}")
        first.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
