"""What a publisher remembers of batches that the cluster has acked, so that it can tell which of them a restart lost.

An ack=1 holds for as long as the fabric lives. When the whole fabric is lost the cluster says which positions went with
it, and only the publisher knows which of those were its own. It remembers as many batches as may be ordered and not
durable at a time; older ones are safe.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from embarcadero.errors import RecordsLost
from embarcadero.limits import ORDER_SLOTS
from embarcadero.types import Position

_COLUMNS = 4  # lane, index, seq, count
_ROOM = ORDER_SLOTS + ORDER_SLOTS // 4
LostBatch = tuple[Position, int]
"""Where its first record was, and how many records it had."""

Spans = list[tuple[int, int]]


class AckedBatches:
    """Positions of acked batches, the newest ORDER_SLOTS or more. Numbers in one array: 32 bytes a batch."""

    def __init__(self) -> None:
        self._numbers = array("Q")

    def __len__(self) -> int:
        return len(self._numbers) // _COLUMNS

    def add(self, lane: int, index: int, seq: int, count: int) -> None:
        """A batch was acked."""
        self._numbers.extend((lane, index, seq, count))
        if len(self._numbers) > _ROOM * _COLUMNS:
            del self._numbers[: -ORDER_SLOTS * _COLUMNS]

    def lanes(self) -> set[int]:
        """The lanes of what is remembered."""
        return set(self._table()[:, 0].tolist())

    def take(self, lane: int, spans: Spans) -> list[LostBatch]:
        """The batches of a lane with an index in one of the spans [start, stop); they are remembered no longer."""
        table = self._table()
        found = np.zeros(len(table), dtype=bool)
        for start, stop in spans:
            found |= (table[:, 0] == lane) & (table[:, 1] >= start) & (table[:, 1] < stop)
        self._keep(table[~found])
        return [(Position(*row[:3]), row[3]) for row in table[found].tolist()]

    def forget(self, lane: int) -> None:
        """What is left of a lane is durable."""
        table = self._table()
        self._keep(table[table[:, 0] != lane])

    def _table(self) -> npt.NDArray[np.uint64]:
        return np.array(self._numbers, dtype=np.uint64).reshape(-1, _COLUMNS)

    def _keep(self, table: npt.NDArray[np.uint64]) -> None:
        self._numbers = array("Q", table.tobytes())


def records_lost(topic: str, batches: Iterable[LostBatch], durable: bool) -> RecordsLost:
    """The error that tells a publisher's caller what a loss of the fabric took."""
    lost = sorted(batches)
    records = sum(count for _, count in lost)
    first, last = lost[0][0], lost[-1][0]
    where = f"lane {first.lane}, seq {first.seq}" + (f" to {last.seq + lost[-1][1] - 1}" if records > 1 else "")
    what = f"{records} record{'s' if records > 1 else ''} of {topic!r} ({where})"
    were, are = ("were", "are") if records > 1 else ("was", "is")
    if durable:
        problem = f"a broken promise: {what} had been acked as durable (ack=2) and {are} gone"
        hint = "report it: this is a bug, or more disks were lost than durable_on allows; publish what is gone again"
    else:
        problem = f"{what} had been acked as ordered (ack=1), {were} not durable yet, and {are} lost with the fabric"
        hint = "publish what is lost again; use ack=2 where that must not happen"
    return RecordsLost(problem, hint, positions=[at for at, _ in lost], counts=[count for _, count in lost])


def merged(earlier: RecordsLost | None, later: RecordsLost) -> RecordsLost:
    """Two reports as one, for a caller that has heard of neither."""
    if earlier is None:
        return later
    message = f"{earlier.message}; {later.message}"
    return RecordsLost(
        message, later.hint, [*earlier.positions, *later.positions], [*earlier.counts, *later.counts]
    )  # fmt: skip
