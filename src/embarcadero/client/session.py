"""The session of a publisher: its settings, its handles, and the positions of its acked batches.

An ack=1 is valid as long as the fabric exists. When the whole fabric is lost, the cluster reports the lost positions,
and only the publisher knows which of them were its own. It remembers as many batches as may be ordered and not durable
at the same time. Older batches are durable.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from embarcadero.errors import (
    EmbarcaderoError,
    LossUnknown,
    RecordsLost,
)
from embarcadero.limits import ORDER_SLOTS
from embarcadero.types import (
    NO_INDEX,
    NO_SESSION,
    Order,
    Position,
    Range,
    Span,
    lost_spans,
)
from embarcadero.wire.codec import NO_ACK, WANT_DURABLE
from embarcadero.wire.messages import LanesAre, Opened, OpenSession

_COLUMNS = 4  # lane, index, seq, count
_ROOM = ORDER_SLOTS + ORDER_SLOTS // 4
_KEPT = 64  # sessions of a chain
LostBatch = tuple[Position, int]
"""The position of its first record, and its number of records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherSettings:
    """The settings of a publisher.

    `durable`: batches are settled when they are durable (ack=2). `replicated`: the topic has replicas, so its records
    survive a loss of the fabric. `order`: of the topic. `session_order`: the order to request (None: as the topic). An
    existing session keeps its order; with `order_required` the publisher fails if it differs.
    """

    topic: str
    topic_id: int = 0
    order: int = int(Order.TOTAL)
    replicated: bool = False
    acks: bool = True
    durable: bool = False
    session_name: str = ""
    session_at: int | None = None
    session_order: int | None = None
    order_required: bool = False
    window_bytes: int
    resend_after_us: int
    delivery_timeout_us: int

    @property
    def ordered_by_brokers(self) -> bool:
        """Orders 0 and 1: acks have the lane, and no copy is ever refused."""
        return self.order <= Order.BROKER

    @property
    def pinned(self) -> bool:
        """Order 1: one link carries all batches, so that the session keeps its order there."""
        return self.order == Order.BROKER

    @property
    def flags(self) -> int:
        """The flags of every batch frame."""
        if self.durable:
            return WANT_DURABLE
        return 0 if self.acks or not self.ordered_by_brokers else NO_ACK


class Answer(Enum):
    """How an opened session relates to the earlier sessions of its publisher."""

    OURS = "ours"
    REASSIGNED = "reassigned"  # our session is lost, and another publisher got its handle: try an earlier session
    UNRELATED = "unrelated"  # a new session, although our earlier sessions are not known to be lost


class ChainedSession(NamedTuple):
    """The handle of a session, and the index at which it was opened."""

    handle: int
    opened_at: int


class SessionChain:
    """The sessions of a publisher, oldest first: the handle and the index at which each was opened."""

    def __init__(self) -> None:
        self._links: list[ChainedSession] = []
        self._tried = 0  # how many of the newest sessions the cluster does not know
        self.whole = True  # the first session is still in the chain

    @property
    def handle(self) -> int:
        """The handle of the newest session."""
        return self._links[-1].handle if self._links else NO_SESSION

    def resume(self) -> int | None:
        """Return the session to continue. None: open a new one."""
        return None if self._tried == len(self._links) else self._links[-1 - self._tried].handle

    def gone(self) -> bool:
        """Note that the cluster does not know this session. Return whether there is another way to continue."""
        untried = len(self._links) - self._tried
        self._tried += untried > 0
        return untried > 1 or (untried == 1 and self.whole)

    def is_older_than(self, session: int) -> bool:
        """Whether this session was opened after our first one. Handles only grow, also after losses."""
        return bool(self._links) and self._links[0].handle <= session != NO_SESSION

    def opened(self, session: int, index: int, lost: Sequence[Span]) -> Answer:
        """Note a session that was opened at an index of its lane. `lost` has the LOST gaps of the lane."""
        untried = len(self._links) - self._tried
        if self._links:
            opened_at = self._links[untried - 1 if untried else 0].opened_at
            is_lost = any(start <= opened_at < stop for start, stop in lost)
            if is_lost and untried:
                return Answer.REASSIGNED
            if not is_lost and not untried:
                return Answer.UNRELATED
        del self._links[len(self._links) - self._tried :]
        self._tried = 0
        self._links.append(ChainedSession(session, index))
        if len(self._links) > _KEPT:
            del self._links[0]
            self.whole = False
        return Answer.OURS


class PublisherSession:
    """The session of a publisher: its handle and lane once it is open, and the request that opens or continues it."""

    def __init__(self, settings: PublisherSettings) -> None:
        self._settings = settings
        self.lane = -1  # not known before the session is open
        self.handle = NO_SESSION
        self.found: int | None = None  # the next sequence of the session when we opened it
        self.strong = settings.order == Order.STRONG  # the real order of the session is known once it is open
        self.keeps_numbers = bool(settings.session_name)  # the caller knows the sequences of its batches
        self.chain = SessionChain()
        self._holder = NO_SESSION  # the known holder of the name: a request takes the name only from this one

    def keep_numbers(self) -> None:
        """Fix the sequences: the caller relies on them from now on."""
        self.keeps_numbers = True

    @property
    def label(self) -> str:
        """The session, for error messages."""
        return f"session {self._settings.session_name!r}" if self._settings.session_name else "this session"

    def request(self) -> OpenSession:
        """Return the request that opens or continues the session."""
        asked = self._settings
        resume = self.chain.resume()  # None: there is no session to continue
        return OpenSession(
            topic=asked.topic,
            topic_id=asked.topic_id,
            name=asked.session_name,
            resume=resume,
            at=asked.session_at,
            holder=self._holder if asked.session_name and resume is None else None,
            lane=None if self.lane < 0 else self.lane,
            order=asked.session_order,
        )

    def opened(self, message: Opened) -> bool:
        """Take handle and lane from the answer. Return whether this is the first session of the publisher."""
        first = self.handle == NO_SESSION
        self.lane, self.handle = message.lane, message.session
        self.strong = (message.order or self._settings.order) == Order.STRONG
        if first:
            self.found = message.expected
        return first

    def held_by(self, holder: int) -> bool:
        """Note the holder of the name, to take the name from it. False if the holder opened it after us."""
        self._holder = holder
        return not self.chain.is_older_than(holder)

    def gone(self) -> bool:
        """Note that the cluster does not know the session. Return whether there is another way to continue."""
        return self._settings.replicated and self.chain.gone()


class AckedBatches:
    """Positions of acked batches, at least the newest ORDER_SLOTS. One array of numbers: 32 bytes per batch."""

    def __init__(self) -> None:
        self._numbers = array("Q")

    def __len__(self) -> int:
        return len(self._numbers) // _COLUMNS

    def add(self, lane: int, index: int, seq: int, count: int) -> None:
        """Remember an acked batch."""
        self._numbers.extend((lane, index, seq, count))
        if len(self._numbers) > _ROOM * _COLUMNS:
            del self._numbers[: -ORDER_SLOTS * _COLUMNS]

    def absorb(self, other: AckedBatches) -> None:
        """Move all batches of another object here."""
        self._numbers.extend(other._numbers)
        other._numbers = array("Q")

    def batches(self) -> list[LostBatch]:
        """Return all batches."""
        return [(Position(*row[:3]), row[3]) for row in self._table().tolist()]

    def lanes(self) -> set[int]:
        """Return the lanes of all batches."""
        return set(self._table()[:, 0].tolist())

    def take(self, lane: int, spans: Sequence[Span]) -> list[LostBatch]:
        """Remove and return the batches of a lane with an index in one of the spans [start, stop)."""
        table = self._table()
        found = np.zeros(len(table), dtype=bool)
        for start, stop in spans:
            found |= (table[:, 0] == lane) & (table[:, 1] >= start) & (table[:, 1] < stop)
        self._keep(table[~found])
        return [(Position(*row[:3]), row[3]) for row in table[found].tolist()]

    def decide(self, lane: int, ranges: Sequence[Range]) -> list[LostBatch]:
        """Return the lost batches of a lane, which are between two ranges. Forget them, and those in sealed ranges.

        Batches at or above the start of an open range stay. Its generation acks no batch there any more, but has not
        sealed the range yet. The range of the next generation starts above every batch that was acked before.
        """
        if not ranges:
            return []
        lost = self.take(lane, [Span(*each) for each in lost_spans(ranges)])
        last, table = ranges[-1], self._table()
        decided = last.start if last.end is None else last.end
        self._keep(table[(table[:, 0] != lane) | (table[:, 1] >= decided)])
        return lost

    def forget(self, lane: int) -> None:
        """Forget the remaining batches of a lane: they are durable."""
        table = self._table()
        self._keep(table[table[:, 0] != lane])

    def _table(self) -> npt.NDArray[np.uint64]:
        return np.array(self._numbers, dtype=np.uint64).reshape(-1, _COLUMNS)

    def _keep(self, table: npt.NDArray[np.uint64]) -> None:
        self._numbers = array("Q", table.tobytes())


class Losses:
    """Acked batches of a publisher that may be lost, that are lost, and that are not reported to the caller yet.

    `remembers`: keep the positions of batches that were acked as ordered, because they may be lost later.
    """

    def __init__(self, topic: str, *, durable: bool, remembers: bool) -> None:
        self._topic, self._durable, self._remembers = topic, durable, remembers
        self.remembered = AckedBatches()
        self.doubts = AckedBatches()  # acked by an earlier generation, and maybe lost
        self._confirmed = False  # a broker answered after the last outcome: the memory with all acked batches exists
        self._since_opened = False  # acked batches were lost after the session was last opened
        self._unreported: RecordsLost | None = None

    def note_acked(self, position: Position, count: int) -> None:
        """Remember a stored batch."""
        if self._remembers:
            self.remembered.add(position.lane, position.index, position.seq, count)

    def doubt_all(self) -> None:
        """Note that the cluster has restarted: all batches that its memory acked before may be lost."""
        self.doubts.absorb(self.remembered)

    def forget_doubts(self) -> None:
        """Forget the batches in doubt: their topic was deleted."""
        self.doubts = AckedBatches()

    def confirm(self) -> None:
        """Note that the cluster that acked the last batch has answered."""
        self._confirmed = True

    @property
    def in_doubt(self) -> bool:
        """Whether acked batches may be lost with memory, and the publisher does not know it yet."""
        unconfirmed = bool(self.remembered) and not self._durable and not self._confirmed
        return bool(self.doubts) or unconfirmed

    def unknown(self) -> LossUnknown | None:
        """Return the error of a publisher that ends now, before the losses are known."""
        if not self.in_doubt or self._durable:
            return None
        return loss_unknown(self._topic, [*self.doubts.batches(), *self.remembered.batches()])

    def report(self, batches: list[LostBatch]) -> None:
        """Report lost batches to the caller."""
        self._since_opened |= bool(batches)
        if batches:
            self._unreported = merged(self._unreported, records_lost(self._topic, batches, self._durable))

    def take_report(self) -> RecordsLost | None:
        """Take the losses that were not reported yet."""
        lost, self._unreported = self._unreported, None
        return lost

    def take_lost_some(self) -> bool:
        """Return whether acked batches were lost after the session was last opened."""
        lost_some, self._since_opened = self._since_opened, False
        return lost_some

    def lost_in(self, lane: int, spans: Sequence[Span]) -> None:
        """Report the remembered batches in LOST gaps of the log."""
        if self.remembered:
            self.report(self.remembered.take(lane, spans))

    def decide_by_ranges(self, lane: int, ranges: Sequence[Range]) -> None:
        """Compare with the ranges of a topic: acked batches are in a range, between two, or not recovered yet."""
        self.report(self.doubts.decide(lane, ranges))

    def decide_by_lanes(self, message: LanesAre) -> None:
        """Compare with the ends of the lanes of an earlier generation. An open lane has not been recovered yet.

        `unsure` names lanes that were closed before all memory was lost, and were not durable up to their ends. They
        have not been recovered yet either.
        """
        lanes = {lane.lane: lane for lane in message.lanes}
        for number in self.doubts.lanes() - set(message.unsure):
            lane = lanes.get(number)
            if lane is not None and lane.end is None:
                continue
            if lane is not None and lane.end is not None:
                kept = lane.end if lane.kept is None else min(lane.kept, lane.end)
                self.report(self.doubts.take(number, [Span(kept, NO_INDEX)]))
            self.doubts.forget(number)


def losses_first(problems: Iterable[EmbarcaderoError]) -> list[EmbarcaderoError]:
    """Combine the reports of several publishers: all losses as one error, then the other errors."""
    lost: RecordsLost | None = None
    others: list[EmbarcaderoError] = []
    for problem in problems:
        if isinstance(problem, RecordsLost):
            lost = merged(lost, problem)
        else:
            others.append(problem)
    return others if lost is None else [lost, *others]


def records_lost(topic: str, batches: Iterable[LostBatch], durable: bool) -> RecordsLost:
    """Return the error for batches that are lost with the fabric."""
    lost = sorted(batches)
    what, many = _named(topic, lost)
    were, are = ("were", "are") if many else ("was", "is")
    if durable:
        problem = f"a promise is broken: {what} {were} acked as durable (ack=2) and {are} lost"
        hint = "report it: this is a bug, or more disks were lost than durable_on allows; publish the records again"
    else:
        problem = f"{what} {were} acked as ordered (ack=1), {were} not durable yet, and {are} lost with the fabric"
        hint = "publish them again; use ack=2 for records that must not be lost"
    return RecordsLost(problem, hint, positions=[at for at, _ in lost], counts=[count for _, count in lost])


def loss_unknown(topic: str, batches: Iterable[LostBatch]) -> LossUnknown:
    """Return the error of a publisher that ends before it knows whether the memory with its acked records exists."""
    acked = sorted(batches)
    what, many = _named(topic, acked)
    problem = f"{what} {'were' if many else 'was'} acked as ordered (ack=1) and may be lost: no broker answered in time"
    hint = "once the cluster is up, read the log at these positions: records that are missing there are lost"
    return LossUnknown(problem, hint, [at for at, _ in acked], [count for _, count in acked])


def _named(topic: str, batches: list[LostBatch]) -> tuple[str, bool]:
    """Describe the records, and return whether there are several."""
    records = sum(count for _, count in batches)
    first, last = batches[0][0], batches[-1][0]
    where = f"lane {first.lane}, seq {first.seq}" + (f" to {last.seq + batches[-1][1] - 1}" if records > 1 else "")
    return f"{records} record{'s' if records > 1 else ''} of {topic!r} ({where})", records > 1


def merged(earlier: RecordsLost | None, later: RecordsLost) -> RecordsLost:
    """Combine two reports that no caller has received yet."""
    if earlier is None:
        return later
    message = f"{earlier.message}; {later.message}"
    return RecordsLost(message, later.hint, [*earlier.positions, *later.positions], [*earlier.counts, *later.counts])
