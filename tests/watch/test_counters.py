"""A broker's counters: every answer counts once, and latencies are those of batches."""

from __future__ import annotations

import numpy as np
import pytest

from embarcadero.broker.context import BrokerCounters
from embarcadero.fabric.layout import RESULT
from embarcadero.types import Outcome


def results(*rows: tuple[int, Outcome]) -> np.ndarray:
    made = np.zeros(len(rows), dtype=RESULT)
    made["pending"], made["outcome"] = [r[0] for r in rows], [int(r[1]) for r in rows]
    return made


@pytest.mark.parametrize("count", [3, 40])
def test_answers_count_once_and_only_batches_have_a_latency(count: int) -> None:
    """A successor's repeated answers change nothing; opens and attaches have no latency. Few or many: the same."""
    counters = BrokerCounters(64)
    counters.published(1, 1_000)
    counters.published(1 + count, 2_000)
    batches = [(1 + n, Outcome.ORDERED) for n in range(count)]
    for _ in range(2):
        counters.answered(results((0, Outcome.OPENED), *batches), 2_500)

    assert counters.outcomes == {Outcome.OPENED: 1, Outcome.ORDERED: count}
    assert (sum(counters.publish_us.counts), counters.publish_us.total) == (count, 500 * count)


def test_slots_are_reused() -> None:
    """Pending entries far apart share a slot, one after the other."""
    counters = BrokerCounters(4)
    for index in range(20):
        counters.published(index + 1, 100 * (index + 1))
        counters.answered(results((index, Outcome.DUP_OF)), 100 * (index + 1) + 7)

    assert counters.outcomes == {Outcome.DUP_OF: 20}
    assert counters.publish_us.total == 140
