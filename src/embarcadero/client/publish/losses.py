"""What a publisher remembers of batches that the cluster has acked, so that it can tell which of them a restart lost.

An ack=1 holds for as long as the fabric lives. When the whole fabric is lost the cluster says which positions went with
it, and only the publisher knows which of those were its own. It remembers as many batches as may be ordered and not
durable at a time; older ones are safe.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from enum import Enum

import numpy as np
import numpy.typing as npt

from embarcadero.errors import EmbarcaderoError, LossUnknown, RecordsLost
from embarcadero.limits import ORDER_SLOTS
from embarcadero.types import NO_SESSION, Position, Range, lost_spans

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

    def absorb(self, other: AckedBatches) -> None:
        """Take over everything that another one remembers."""
        self._numbers.extend(other._numbers)
        other._numbers = array("Q")

    def batches(self) -> list[LostBatch]:
        """All that is remembered."""
        return [(Position(*row[:3]), row[3]) for row in self._table().tolist()]

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

    def decide(self, lane: int, ranges: Sequence[Range]) -> list[LostBatch]:
        """Batches between two ranges of a lane are lost, those in a sealed one are kept; both are forgotten.

        Those at or above the start of an open range stay: a generation that acks nothing there any more has not sealed
        it yet. (The next generation's range starts above everything that was acked before.)
        """
        if not ranges:
            return []
        lost = self.take(lane, lost_spans(ranges))
        last, table = ranges[-1], self._table()
        decided = last.start if last.end is None else last.end
        self._keep(table[(table[:, 0] != lane) | (table[:, 1] >= decided)])
        return lost

    def forget(self, lane: int) -> None:
        """What is left of a lane is durable."""
        table = self._table()
        self._keep(table[table[:, 0] != lane])

    def _table(self) -> npt.NDArray[np.uint64]:
        return np.array(self._numbers, dtype=np.uint64).reshape(-1, _COLUMNS)

    def _keep(self, table: npt.NDArray[np.uint64]) -> None:
        self._numbers = array("Q", table.tobytes())


def losses_first(problems: Iterable[EmbarcaderoError]) -> list[EmbarcaderoError]:
    """What several publishers report: all losses as one, then everything else."""
    lost: RecordsLost | None = None
    others: list[EmbarcaderoError] = []
    for problem in problems:
        if isinstance(problem, RecordsLost):
            lost = merged(lost, problem)
        else:
            others.append(problem)
    return others if lost is None else [lost, *others]


def records_lost(topic: str, batches: Iterable[LostBatch], durable: bool) -> RecordsLost:
    """The error that tells a publisher's caller what a loss of the fabric took."""
    lost = sorted(batches)
    what, many = _named(topic, lost)
    were, are = ("were", "are") if many else ("was", "is")
    if durable:
        problem = f"a broken promise: {what} had been acked as durable (ack=2) and {are} gone"
        hint = "report it: this is a bug, or more disks were lost than durable_on allows; publish what is gone again"
    else:
        problem = f"{what} had been acked as ordered (ack=1), {were} not durable yet, and {are} lost with the fabric"
        hint = "publish what is lost again; use ack=2 where that must not happen"
    return RecordsLost(problem, hint, positions=[at for at, _ in lost], counts=[count for _, count in lost])


def loss_unknown(topic: str, batches: Iterable[LostBatch]) -> LossUnknown:
    """The error of a publisher that ends without having heard whether the memory lives that acked its records."""
    acked = sorted(batches)
    what, many = _named(topic, acked)
    problem = f"{what} {'were' if many else 'was'} acked as ordered (ack=1), and no broker could say before the end "
    hint = "once the cluster is up, read the log: records at these positions that are missing are lost"
    problem += f"whether {'they are' if many else 'it is'} lost"
    return LossUnknown(problem, hint, [at for at, _ in acked], [count for _, count in acked])


def _named(topic: str, batches: list[LostBatch]) -> tuple[str, bool]:
    """Records in words, and whether there are several."""
    records = sum(count for _, count in batches)
    first, last = batches[0][0], batches[-1][0]
    where = f"lane {first.lane}, seq {first.seq}" + (f" to {last.seq + batches[-1][1] - 1}" if records > 1 else "")
    return f"{records} record{'s' if records > 1 else ''} of {topic!r} ({where})", records > 1


def merged(earlier: RecordsLost | None, later: RecordsLost) -> RecordsLost:
    """Two reports as one, for a caller that has heard of neither."""
    if earlier is None:
        return later
    message = f"{earlier.message}; {later.message}"
    return RecordsLost(message, later.hint, [*earlier.positions, *later.positions], [*earlier.counts, *later.counts])


_KEPT = 64


class Answer(Enum):
    """What an opened session is to its publisher."""

    OURS = "ours"
    ANOTHERS = "another's"  # our session is lost, and its handle was given to somebody else: look further
    STRANGE = "strange"  # a new one, and nothing shows that the old ones are lost


class SessionChain:
    """Handles of sessions and the index at which each was opened, oldest first."""

    def __init__(self) -> None:
        self._links: list[tuple[int, int]] = []
        self._tried = 0  # how many of the newest are not known to the cluster
        self.whole = True  # the first session is among those kept

    @property
    def handle(self) -> int:
        """The newest session."""
        return self._links[-1][0] if self._links else NO_SESSION

    def resume(self) -> int | None:
        """The session to continue; None: open a new one."""
        return None if self._tried == len(self._links) else self._links[-1 - self._tried][0]

    def gone(self) -> bool:
        """The cluster does not know that session. Whether there is something else to try."""
        left = len(self._links) - self._tried
        self._tried += left > 0
        return left > 1 or (left == 1 and self.whole)

    def is_older_than(self, session: int) -> bool:
        """Whether this session was opened after our first one: handles only grow, whatever is lost."""
        return bool(self._links) and self._links[0][0] <= session != NO_SESSION

    def opened(self, session: int, index: int, lost: Spans) -> Answer:
        """A session is open, at an index of its lane; `lost` has the lane's LOST gaps."""
        left = len(self._links) - self._tried
        if self._links:
            born = self._links[left - 1 if left else 0][1]
            is_lost = any(start <= born < stop for start, stop in lost)
            if is_lost and left:
                return Answer.ANOTHERS
            if not is_lost and not left:
                return Answer.STRANGE
        del self._links[len(self._links) - self._tried :]
        self._tried = 0
        self._links.append((session, index))
        if len(self._links) > _KEPT:
            del self._links[0]
            self.whole = False
        return Answer.OURS
