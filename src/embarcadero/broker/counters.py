"""What a broker counts: plain numbers, touched once per batch, per fetch or per read of results, never per record."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Set as AbstractSet
from typing import Final

import numpy as np

from embarcadero.env import LATENCY_US, Histogram
from embarcadero.fabric.layout import Entries
from embarcadero.types import REQUEST_OUTCOMES, Outcome

_IS_BATCH: Final = np.ones(256, dtype=bool)
_IS_BATCH[list(REQUEST_OUTCOMES)] = False
_BATCH_OUTCOMES: Final = frozenset(np.flatnonzero(_IS_BATCH).tolist())
_FEW: Final = 8
"""Up to here, plain numbers are quicker than arrays."""


class Traffic:
    """Batches of one lane that came in or went out."""

    __slots__ = ("batches", "bytes", "records")

    def __init__(self) -> None:
        self.batches = self.records = self.bytes = 0

    def add(self, batches: int, records: int, size: int) -> None:
        """Count more of them."""
        self.batches += batches
        self.records += records
        self.bytes += size


class BrokerCounters:
    """All counters of one broker incarnation."""

    def __init__(self, unanswered_max: int) -> None:
        self.came_in: defaultdict[int, Traffic] = defaultdict(Traffic)  # by lane
        self.went_out: defaultdict[int, Traffic] = defaultdict(Traffic)
        self.outcomes: Counter[int] = Counter()
        self.hung_up: Counter[str] = Counter()  # connections that we ended, by the error's name
        self.connections = 0  # all that ever were
        self.backpressure = 0  # how often we stopped granting credit
        self.publish_us = Histogram(LATENCY_US)  # from a whole batch to its outcome
        self.delivery_us = Histogram(LATENCY_US)  # from the append time to the answer of a waiting read
        self._mask = (1 << (unanswered_max - 1).bit_length()) - 1
        self._since_us = array("q", bytes(8 * (self._mask + 1)))  # when a pending entry was published; 0: answered
        self._many_us = np.frombuffer(self._since_us, dtype=np.int64)
        self._next = 0

    def published(self, stop: int, now_us: int) -> None:
        """Pending entries below `stop` are published."""
        if stop - self._next == 1:
            self._since_us[self._next & self._mask] = now_us
        else:
            self._many_us[np.arange(self._next, stop) & self._mask] = now_us
        self._next = stop

    def answered_one(self, pending: int, outcome: int, now_us: int) -> None:
        """One result came alone."""
        self._answered(pending & self._mask, outcome, now_us)

    def answered(self, results: Entries, now_us: int) -> None:
        """Results came; those that a later sequencer repeats are counted once."""
        if len(results) <= _FEW:
            for pending, outcome in zip(results["pending"].tolist(), results["outcome"].tolist(), strict=True):
                self._answered(pending & self._mask, outcome, now_us)
            return
        at, outcomes = results["pending"].astype(np.int64) & self._mask, results["outcome"]
        since = self._many_us[at]
        self._many_us[at] = 0
        first = since > 0
        for outcome, count in enumerate(np.bincount(outcomes[first]).tolist()):
            if count:
                self.outcomes[outcome] += count
        self.publish_us.add_many(now_us - since[first & _IS_BATCH[outcomes]])

    def ordered_here(self, batches: int, took_us: int) -> None:
        """Batches of orders 0 and 1 are acked, that long after they were written."""
        self.outcomes[int(Outcome.ORDERED)] += batches
        self.publish_us.add(took_us, batches)

    def _answered(self, at: int, outcome: int, now_us: int) -> None:
        since_us, self._since_us[at] = self._since_us[at], 0
        if since_us:
            self.outcomes[outcome] += 1
            if outcome in _BATCH_OUTCOMES:
                self.publish_us.add(now_us - since_us)

    def keep(self, lanes: AbstractSet[int]) -> None:
        """Drop the counts of other lanes: their topics are gone, or a client made them up."""
        for counts in (self.came_in, self.went_out):
            for lane in counts.keys() - lanes:
                del counts[lane]
