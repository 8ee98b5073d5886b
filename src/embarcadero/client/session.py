"""The session of a publisher: its settings, its handles, and what is remembered of batches that the cluster has acked.

An ack=1 holds for as long as the fabric lives. When the whole fabric is lost the cluster says which positions went with
it, and only the publisher knows which of those were its own. It remembers as many batches as may be ordered and not
durable at a time; older ones are safe.
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
"""Where its first record was, and how many records it had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherSettings:
    """The settings of a publisher.

    `durable`: batches are settled when they are durable (ack=2). `replicated`: the topic outlives the fabric.
    `order`: the topic's. `session_order`: what to ask for (None: as the topic). A session that exists under the name
    keeps its order; with `order_required` the publisher fails if that is another one.
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
        """Orders 0 and 1: acks name the lane, and no copy is ever refused."""
        return self.order <= Order.BROKER

    @property
    def pinned(self) -> bool:
        """One link takes all batches, so that the session's order holds there."""
        return self.order == Order.BROKER

    @property
    def flags(self) -> int:
        """Flags of every batch frame."""
        if self.durable:
            return WANT_DURABLE
        return 0 if self.acks or not self.ordered_by_brokers else NO_ACK


class Answer(Enum):
    """What an opened session is to its publisher."""

    OURS = "ours"
    ANOTHERS = "another's"  # our session is lost, and its handle was given to somebody else: look further
    STRANGE = "strange"  # a new one, and nothing shows that the old ones are lost


class ChainedSession(NamedTuple):
    """A session by its handle, and the index at which it was opened."""

    handle: int
    opened_at: int


class SessionChain:
    """Handles of sessions and the index at which each was opened, oldest first."""

    def __init__(self) -> None:
        self._links: list[ChainedSession] = []
        self._tried = 0  # how many of the newest are not known to the cluster
        self.whole = True  # the first session is among those kept

    @property
    def handle(self) -> int:
        """The newest session."""
        return self._links[-1].handle if self._links else NO_SESSION

    def resume(self) -> int | None:
        """The session to continue; None: open a new one."""
        return None if self._tried == len(self._links) else self._links[-1 - self._tried].handle

    def gone(self) -> bool:
        """The cluster does not know that session. Whether there is something else to try."""
        left = len(self._links) - self._tried
        self._tried += left > 0
        return left > 1 or (left == 1 and self.whole)

    def is_older_than(self, session: int) -> bool:
        """Whether this session was opened after our first one: handles only grow, whatever is lost."""
        return bool(self._links) and self._links[0].handle <= session != NO_SESSION

    def opened(self, session: int, index: int, lost: Sequence[Span]) -> Answer:
        """A session is open, at an index of its lane; `lost` has the lane's LOST gaps."""
        left = len(self._links) - self._tried
        if self._links:
            born = self._links[left - 1 if left else 0].opened_at
            is_lost = any(start <= born < stop for start, stop in lost)
            if is_lost and left:
                return Answer.ANOTHERS
            if not is_lost and not left:
                return Answer.STRANGE
        del self._links[len(self._links) - self._tried :]
        self._tried = 0
        self._links.append(ChainedSession(session, index))
        if len(self._links) > _KEPT:
            del self._links[0]
            self.whole = False
        return Answer.OURS


class PublisherSession:
    """The session of a publisher: its handle and lane once it is open, and how to open it, or open it again."""

    def __init__(self, settings: PublisherSettings) -> None:
        self._settings = settings
        self.lane = -1  # not known before the session is open
        self.handle = NO_SESSION
        self.found: int | None = None  # what the session expected when we opened it
        self.strong = settings.order == Order.STRONG  # the session's own order is known once it is open
        self.keeps_numbers = bool(settings.session_name)  # the caller knows which batch has which number
        self.chain = SessionChain()
        self._holder = NO_SESSION  # the holder of the name, as far as we know: it is taken from no other

    def keep_numbers(self) -> None:
        """The caller goes by the numbers of its batches from now on."""
        self.keeps_numbers = True

    @property
    def label(self) -> str:
        """The session in the words of an error."""
        return f"session {self._settings.session_name!r}" if self._settings.session_name else "this session"

    def request(self) -> OpenSession:
        """The request to open it, or to continue it."""
        asked = self._settings
        resume = self.chain.resume()  # None: there is nothing to continue
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
        """Take the handle and the lane. True if it is the first session of this publisher."""
        first = self.handle == NO_SESSION
        self.lane, self.handle = message.lane, message.session
        self.strong = (message.order or self._settings.order) == Order.STRONG
        if first:
            self.found = message.expected
        return first

    def held_by(self, holder: int) -> bool:
        """Note who holds the name, to take it from this holder. False if the holder came after us."""
        self._holder = holder
        return not self.chain.is_older_than(holder)

    def gone(self) -> bool:
        """The cluster does not know the session. Whether there is an earlier one to continue."""
        return self._settings.replicated and self.chain.gone()


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


class Losses:
    """Acked batches of one publisher: which of them may be lost, which are, and what its caller has not heard yet.

    `remembers`: batches that are acked as ordered may be lost later, and the publisher has their positions.
    """

    def __init__(self, topic: str, *, durable: bool, remembers: bool) -> None:
        self._topic, self._durable, self._remembers = topic, durable, remembers
        self.remembered = AckedBatches()
        self.doubts = AckedBatches()  # acked by an earlier generation; not known yet whether they are lost
        self._confirmed = False  # a broker answered after the last outcome: the memory that acked everything lives
        self._since_opened = False  # acked batches were lost, and the session was not opened since
        self._unreported: RecordsLost | None = None

    def note_acked(self, position: Position, count: int) -> None:
        """A batch is stored."""
        if self._remembers:
            self.remembered.add(position.lane, position.index, position.seq, count)

    def doubt_all(self) -> None:
        """The cluster was started anew: what its memory acked before may be lost."""
        self.doubts.absorb(self.remembered)

    def forget_doubts(self) -> None:
        """The topic is gone, and with it every question about its batches."""
        self.doubts = AckedBatches()

    def confirm(self) -> None:
        """The cluster that acked the last batch has answered."""
        self._confirmed = True

    @property
    def in_doubt(self) -> bool:
        """Whether acked batches may be lost with memory without this publisher knowing."""
        unconfirmed = bool(self.remembered) and not self._durable and not self._confirmed
        return bool(self.doubts) or unconfirmed

    def unknown(self) -> LossUnknown | None:
        """The error of a publisher that ends now, without having heard."""
        if not self.in_doubt or self._durable:
            return None
        return loss_unknown(self._topic, [*self.doubts.batches(), *self.remembered.batches()])

    def report(self, batches: list[LostBatch]) -> None:
        """These batches are lost: the caller has to hear of it."""
        self._since_opened |= bool(batches)
        if batches:
            self._unreported = merged(self._unreported, records_lost(self._topic, batches, self._durable))

    def take_report(self) -> RecordsLost | None:
        """What the caller has to hear, once."""
        lost, self._unreported = self._unreported, None
        return lost

    def take_lost_some(self) -> bool:
        """Whether acked batches were lost since the session was last opened."""
        lost_some, self._since_opened = self._since_opened, False
        return lost_some

    def lost_in(self, lane: int, spans: Sequence[Span]) -> None:
        """The log has LOST gaps: remembered batches in them are lost."""
        if self.remembered:
            self.report(self.remembered.take(lane, spans))

    def decide_by_ranges(self, lane: int, ranges: Sequence[Range]) -> None:
        """Compare with a topic's ranges: acked batches are in one, between two, or not recovered yet."""
        self.report(self.doubts.decide(lane, ranges))

    def decide_by_lanes(self, message: LanesAre) -> None:
        """Compare with where the lanes of an earlier generation end. One that is open has not been recovered yet.

        Nor has one that was closed before all memory was lost, and of which not all was durable.
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
