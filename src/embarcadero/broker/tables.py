"""The seam through which a broker reads tables of topics: what it asks, and the queue in which the questions wait.

A broker imports nothing of tables. The node gives it a reader (`node/tables.py`), the simulator another one. Reads run
on workers of their own, a few at once and fair over clients: an object store that does not answer holds up other reads
of tables, but neither reads of disks nor publishers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from embarcadero.broker.warm import FairJobs
from embarcadero.env import Workers
from embarcadero.errors import NotAvailable
from embarcadero.limits import TABLE_JOBS_MAX
from embarcadero.types import Cut, Tier
from embarcadero.wire.messages import Fetch
from embarcadero.wire.schemas import TopicSchemas

if TYPE_CHECKING:
    from embarcadero.broker.found import Found


class TableReader(Protocol):
    """Reads tables of topics. Called on workers. Raises TierUnavailable, BadTable, or NotAvailable."""

    def fetch(self, tier: Tier, schemas: TopicSchemas, ask: Fetch, stop: int) -> Found:
        """Batches of the table from index `ask.start` on and below `stop`, at most `ask.max_bytes` but for the first.

        `stop` is at most the table's frontier. A hole in the table is a LOST gap. A batch has the payload as Arrow
        encodes its columns now: its entry says so (`FROM_TABLE`).
        """
        ...

    def find(self, tier: Tier, lane: int, by: str, value: int) -> tuple[int, int] | None:
        """Index and seq of the batch with an index, with a seq in it, or of the first since a time; None: not there."""
        ...

    def cuts(self, tier: Tier, lane: int, start: int, stop: int, piece_bytes: int) -> list[Cut]:
        """Files with batches [start, stop), joined to pieces of about `piece_bytes`."""
        ...


class TableJobs(FairJobs):
    """Reads of tables for all clients of one broker."""

    def __init__(self, workers: Workers, reader: TableReader | None) -> None:
        super().__init__(workers, TABLE_JOBS_MAX)
        self._reader = reader

    @property
    def offered(self) -> bool:
        """Whether this broker reads tables for its clients."""
        return self._reader is not None

    @property
    def reader(self) -> TableReader:
        """The reader. Raises NotAvailable without one."""
        if self._reader is None:
            raise NotAvailable(
                "this broker can't read tables of topics", 'install "embarcadero[spark]" where brokers run'
            )
        return self._reader
