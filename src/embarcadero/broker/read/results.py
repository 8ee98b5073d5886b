"""What reads find: answers to fetches, entries in memory; and the seam through which a broker reads tables of topics.

A broker imports nothing of tables. The node gives it a reader (`cli/processes.py`), the simulator another one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from embarcadero.errors import Corrupt, EmbarcaderoError
from embarcadero.fabric.layout import ORDER, Entries
from embarcadero.fabric.ring import RingReader
from embarcadero.types import BATCH_KIND, Cut, EntryKind, Gap, Tier
from embarcadero.wire.messages import Fetch
from embarcadero.wire.schemas import TopicSchemas

_SKIP_KIND: Final = int(EntryKind.SKIP)  # a plain number, see BATCH_KIND


@dataclass(slots=True)
class FetchResult:
    """What a fetch found: entries with their payloads, and where to go on."""

    entries: Entries
    payloads: list[bytes | memoryview]
    next_index: int
    tail_index: int
    gap: Gap | None = None
    to_come: bool = False  # nothing was appended since the time that was asked for
    elsewhere: Fetch | None = None  # memory does not have it: what segment files are to be asked

    def over(self, ask: Fetch) -> bool:
        """Whether the reader has all that it will ever ask for."""
        return ask.stop is not None and self.elsewhere is None and self.next_index >= ask.stop

    @property
    def empty(self) -> bool:
        """Nothing to tell the reader yet."""
        return not self.payloads and self.gap is None


class FetchSource(Enum):
    """Where the batches are that a fetch asks for."""

    MEMORY = "memory"
    DISK = "disk"
    GAP = "gap"
    """Nowhere: they were trimmed, or are lost."""
    END = "end"
    """Nowhere: nothing of the lane is above."""


@dataclass(slots=True)
class Location:
    """Where a fetch is answered."""

    source: FetchSource
    index: int  # MEMORY: where to start; GAP and END: where to go on
    bound: int  # nothing at or above this is served
    gap: Gap | None = None
    ask: Fetch | None = None  # DISK: what segment files are to be asked
    ring: RingReader | None = None  # what memory was looked at; None: this rests on what the store says alone
    ordered: int = 0

    def result(self) -> FetchResult:
        """The answer, of what is not in memory."""
        return FetchResult(np.zeros(0, dtype=ORDER), [], self.index, self.bound, self.gap, elsewhere=self.ask)


def wanted_entries(entries: Entries, ask: Fetch) -> npt.NDArray[np.bool_]:
    """Which entries a reader gets: batches (of its partitions) and skips; those of sessions if it asks for them."""
    if ask.partitions is None and ask.control:
        return np.ones(len(entries), dtype=bool)
    kinds = entries["kind"]
    wanted: npt.NDArray[np.bool_] = kinds == BATCH_KIND
    if ask.partitions is not None:
        wanted &= np.isin(entries["partition"], np.array(ask.partitions, dtype=np.uint16))
    wanted |= (kinds != BATCH_KIND) if ask.control else (kinds == _SKIP_KIND)
    return wanted


@dataclass(frozen=True, slots=True)
class Hot:
    """Entries of a span that are in memory, from `start` on; `stop_seq` is the seq at its end, if memory knows it."""

    start: int
    entries: Entries
    stop_seq: int | None


class TableReader(Protocol):
    """Reads tables of topics. Called on workers. Raises TierUnavailable, BadTable, or NotAvailable."""

    def fetch(self, tier: Tier, schemas: TopicSchemas, ask: Fetch, stop: int) -> FetchResult:
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


def typed(error: Exception) -> EmbarcaderoError:
    """What a client is told: also of an error that nobody thought of, for nobody else answers it."""
    if isinstance(error, EmbarcaderoError):
        return error
    return Corrupt(f"this can't be read: {error!r}", "look at the broker's log, and report it: this is a bug")


def raise_unknown(error: Exception) -> None:
    """Let what is a bug be seen: on an event loop that is a line in the log, with its place."""
    if not isinstance(error, EmbarcaderoError):
        raise error


def at_index(ask: Fetch, index: int) -> Fetch:
    """The same fetch from an index on."""
    return msgspec.structs.replace(ask, by="index", start=index)
