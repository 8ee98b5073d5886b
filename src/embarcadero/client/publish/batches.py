"""Batches of a publisher: on their way out, the errors they may end with, and what is remembered of acked ones.

An ack=1 holds for as long as the fabric lives. When the whole fabric is lost the cluster says which positions went with
it, and only the publisher knows which of those were its own. It remembers as many batches as may be ordered and not
durable at a time; older ones are safe.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from embarcadero.errors import (
    Backpressure,
    BadReference,
    BadValue,
    Conflict,
    EmbarcaderoError,
    LossUnknown,
    Lost,
    NotAvailable,
    OutcomeUnknown,
    RecordsLost,
    Refused,
    Stale,
    TimedOut,
    UnknownSchema,
    UnknownTopic,
    Unreachable,
)
from embarcadero.limits import ORDER_SLOTS, SESSION_WINDOW
from embarcadero.types import (
    NO_SESSION,
    Outcome,
    Position,
    Range,
    ReferenceFault,
    Span,
    StagedBatch,
    health_in_words,
    lost_spans,
)
from embarcadero.wire.receiver import FullReceived

_COLUMNS = 4  # lane, index, seq, count
_ROOM = ORDER_SLOTS + ORDER_SLOTS // 4
_KEPT = 64  # sessions of a chain
LostBatch = tuple[Position, int]
"""Where its first record was, and how many records it had."""

REFUSALS: dict[Outcome, tuple[type[EmbarcaderoError], str, str]] = {
    Outcome.CONFLICT: (Conflict, "was stored before with other bytes", "two publishers use one session's sequences"),
    Outcome.LOST: (Lost, "was declared lost before it came", "send the records again as a new batch"),
    Outcome.STALE: (Stale, "is below the session's window", "it was settled long ago"),
    Outcome.UNKNOWN_SCHEMA: (UnknownSchema, "has a schema that its topic has not", "open the publisher again"),
    Outcome.UNKNOWN_TOPIC: (UnknownTopic, "has no topic any more", "the topic was deleted"),
    Outcome.NO_REFERENCE: (BadReference, "names a staged batch that is not there", "stage its records again"),
}
FINAL_REFUSALS = frozenset({Outcome.CONFLICT, Outcome.LOST})
"""Refusals that hold for every copy of the batch that was ever sent."""


_FAULTS = {
    ReferenceFault.GONE: (
        "lane {0.lane} has no batch at index {0.index}: it was trimmed, or lost",
        "stage its records again",
    ),
    ReferenceFault.ANOTHER_TOPIC: (
        "lane {0.lane} is not one of the topic with id {0.topic_id:016x}: that was deleted, or made again",
        "stage its records again",
    ),
    ReferenceFault.DIFFERS: (
        "the batch at index {0.index} of lane {0.lane} has not the size {0.size}, the count {0.count} and the checksum "
        "{0.crc:08x}",
        "publish what `staged()` of its future returned, unchanged",
    ),
}


@dataclass(slots=True, eq=False)
class OutBatch:
    """One stamped batch. It ends exactly once: with a position (None: stored too long ago to name it) or an error."""

    sequence: int
    payload: Any
    size: int
    count: int
    partition: int
    schema: int
    crc: int
    added_us: int
    position: Position | None = None
    error: EmbarcaderoError | None = None
    done: bool = False
    token: Any = None
    link: int | None = None  # the connection it is in flight on
    sent: bool = False
    doubts: int = 0  # copies sent whose fate nobody told us
    refusals: int = 0  # times the cluster asked to send it again later
    reference: StagedBatch | None = None  # it names this one instead of carrying it: `payload` is the frame's body


def refusal(outcome: Outcome, batch: OutBatch, extra: int = 0) -> EmbarcaderoError:
    """The error of a batch that the cluster refused for good. `extra` is the ack's."""
    kind, problem, hint = REFUSALS[outcome]
    if outcome is Outcome.NO_REFERENCE and batch.reference is not None and extra in _FAULTS:
        why, hint = _FAULTS[ReferenceFault(extra)]
        problem = f"{problem}: {why.format(batch.reference)}"
    if batch.doubts and outcome not in FINAL_REFUSALS:
        unknown = f"batch {batch.sequence} {problem}, but nobody told what became of an earlier copy"
        return OutcomeUnknown(unknown, "read the log to find out")
    return kind(f"batch {batch.sequence} {problem}", hint)


def no_references(batch: OutBatch) -> EmbarcaderoError:
    """The error of a batch by reference when no connected broker takes any."""
    if batch.doubts:
        return OutcomeUnknown(
            f"batch {batch.sequence} was sent by reference, and the brokers that are left take no references",
            "read the log to find out",
        )
    return NotAvailable(
        f"batch {batch.sequence} names a staged batch, and no connected broker takes batches by reference",
        "upgrade the brokers, or publish the bytes themselves: publish_encoded(payload, count)",
    )


def beyond_window(batch: OutBatch) -> EmbarcaderoError:
    """The error of a batch that could not be recognised if it came again."""
    return BadValue(
        f"batch {batch.sequence} is the {SESSION_WINDOW + 1}th or a later one of a session opened at a sequence",
        f"send at most {SESSION_WINDOW} batches: make them larger, or spread the records over more sessions",
    )


def ended_with(cause: EmbarcaderoError, batch: OutBatch) -> EmbarcaderoError:
    """The error of an unsettled batch when its publisher ends: the cause itself only if no copy can be in the log."""
    if not batch.doubts and isinstance(cause, BadReference):
        return Refused(f"batch {batch.sequence} was not sent, as its session ended: {cause.message}", cause.hint)
    if not batch.doubts:
        return cause
    kind = TimedOut if isinstance(cause, TimedOut) else OutcomeUnknown
    return kind(
        f"batch {batch.sequence} was sent but its outcome is not known: {cause.message}", "read the log to find out"
    )


def no_room(topic: str, full: FullReceived) -> Backpressure:
    """The error of a call for whose record the cluster has had no room for long. The publisher goes on."""
    again = "the record was not taken, and nothing is lost; try again later"
    if full.lane < 0:
        problem, why = f"the brokers' memory has no room for a batch of {topic!r}", "publish less, or make it larger"
    elif full.replica < 0:
        problem, why = f"the replicas' disks do not keep up with {topic!r}", "see: embarcadero status"
    else:
        words = health_in_words(full.trouble) or ["in trouble"]
        problem = f"records of {topic!r} do not become durable: replica {full.replica}: {words[0].partition(': ')[0]}"
        why = words[0].partition(": ")[2] or "see: embarcadero status"
    return Backpressure(problem, f"{again}. {why}")


def undelivered(topic: str, oldest: OutBatch, timeout_us: int, usable: int, full: int) -> EmbarcaderoError:
    """Why a publisher ends whose oldest batch has waited too long. `usable`: links that its open session can use."""
    seconds = timeout_us / 1e6
    if oldest.doubts:
        return TimedOut(f"no outcome within {seconds:g} s", "see whether the cluster is up: embarcadero status")
    if not usable:
        return Unreachable(
            f"no broker took a batch of {topic!r} within {seconds:g} s", "see whether it is up: embarcadero status"
        )
    if oldest.reference is not None and oldest.refusals and not full:
        staged = f"the staged batch at index {oldest.reference.index} of lane {oldest.reference.lane}"
        return Backpressure(
            f"{staged} could not be read for {seconds:g} s, and was not published into {topic!r}",
            "it is not durable yet, or its replicas are in trouble: embarcadero status",
        )
    return Backpressure(
        f"the cluster had no room for a batch of {topic!r} for {seconds:g} s ({full} of {usable} brokers full)",
        "publish less, or make the brokers' logs larger",
    )


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

    def take(self, lane: int, spans: Sequence[Span]) -> list[LostBatch]:
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
        lost = self.take(lane, [Span(*each) for each in lost_spans(ranges)])
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

    def opened(self, session: int, index: int, lost: Sequence[Span]) -> Answer:
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
