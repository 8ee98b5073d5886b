"""Open writes: a fold of facts in any order, and the sweep's action on each write."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

import pytest

from embarcadero.client.api.aio_calls import HeldName
from embarcadero.env import SilentJournal
from embarcadero.errors import StagedGone, Unreachable
from embarcadero.staging.commit import Prepared
from embarcadero.staging.manifest import (
    Begun,
    Decision,
    Dropped,
    Fact,
    InlineBatch,
    Manifest,
    ManifestPart,
    Target,
    first_sequence,
)
from embarcadero.staging.sweep import COMPLETE_AFTER_S, SILENT_S, OpenWrites, look_after

S = 1_000_000
MARGIN = 60 * S
DAY = int(SILENT_S * S)


def manifest(epoch: int = 0, write: str = "w", attempt: str = "") -> Manifest:
    return Manifest(write, epoch, [Target("t", 7, 1)], [ManifestPart(inline=[InlineBatch(b"x", 1, 0)])], attempt)


def fold(facts: Sequence[tuple[int, Fact]]) -> OpenWrites:
    writes = OpenWrites()
    for at_s, fact in facts:
        writes.take(fact, at_s * S)
    return writes


# --- the fold ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("facts", "needed_since"),
    [
        ([(100, Begun("a", 0, "x")), (9_000, Begun("a", 0, "x"))], 100),
        ([(100, Begun("a", 0, "x")), (200, Dropped("a", 0, "x"))], None),
        ([(100, Begun("a", 0, "x")), (200, Dropped("a", 0, "x")), (300, Begun("a", 0, "y"))], 300),
        ([(100, Begun("a", 0, "x")), (200, manifest(0, "a", "x")), (300, Dropped("a", 0, "x"))], 100),
        ([(100, Begun("a", 0, "x")), (150, Begun("b", 0, "y")), (200, Dropped("a", 0, "x"))], 150),
    ],
)
def test_facts_count_in_any_order(facts: list[tuple[int, Fact]], needed_since: int | None) -> None:
    """They come from several lanes, one lane after the other.

    A failure may be read before the work, and a late task before an early one.
    """
    now = 10_000 * S
    wanted = now - MARGIN if needed_since is None else needed_since * S - MARGIN
    for order in itertools.permutations(facts):
        assert fold(order).horizon_us(now) == wanted, order


def test_facts_before_the_oldest_open_write_are_garbage() -> None:
    """Completed epochs need nothing, also those that the sweep learns of late."""
    facts = [(100 * (epoch + 1), Begun("a", epoch)) for epoch in range(3)]
    writes = fold([*facts, (101, manifest(0, "a")), (201, manifest(1, "a")), (301, manifest(2, "a"))])
    assert writes.horizon_us(400 * S) == 100 * S - MARGIN
    writes.done("a", 1)
    writes.take(Begun("a", 1), 150 * S)
    assert writes.horizon_us(400 * S) == 300 * S - MARGIN
    writes.take(Begun("b", 0), 250 * S)
    assert writes.horizon_us(400 * S) == 250 * S - MARGIN
    writes.done("b", 0)
    writes.done("a", 2)
    assert writes.horizon_us(400 * S) == 400 * S - MARGIN


def test_a_write_that_was_silent_for_long_is_forgotten() -> None:
    """An active write stays, however old it is, and so does a needed one."""
    begun = [Begun(name, 0) for name in ("old", "busy", "decided", "over")]
    writes = fold([(0, fact) for fact in begun])
    writes.take(Begun("busy", 0), DAY)
    writes.done("over", 0)
    writes.forget(DAY, {"decided"})
    assert [*writes.writes] == ["old", "busy", "decided"]
    writes.forget(DAY + 1, {"decided"})
    assert [*writes.writes] == ["busy", "decided"]
    assert writes.horizon_us(DAY + 1) == -MARGIN


# --- the sweep --------------------------------------------------------------------------------------------------------
class Held:
    """A ledger of one write: the decision, the published part, and the sweep's actions."""

    def __init__(self, decided: Decision | None, published: int = 0, error: Exception | None = None) -> None:
        self.decided, self.published, self.error = decided, published, error
        self.completed = 0

    async def held(self, write: str) -> tuple[HeldName, HeldName]:
        assert write == "w"
        return HeldName(0, 0 if self.decided is None else self.decided.number), HeldName(1, self.published)

    async def append(self, fact: Fact) -> None:
        raise NotImplementedError

    async def prepare(self, manifest: Manifest, run: str | None) -> Prepared:
        raise NotImplementedError

    async def decide(self, write: str, decision: Decision, holder: int) -> HeldName:
        raise NotImplementedError

    async def settle(self) -> None: ...

    async def find(self, write: str, decision: Decision) -> Manifest | None:
        return manifest()

    async def publish(self, manifest: Manifest) -> None:
        self.completed += 1
        if self.error is not None:
            raise self.error

    async def finish(self, write: str, epoch: int) -> None:
        self.published = first_sequence(epoch + 1)


def look(ledger: Held, writes: OpenWrites, now_s: float) -> bool:
    return asyncio.run(look_after(ledger, writes, int(now_s * S), SilentJournal()))


def test_a_committer_that_makes_progress_is_left_alone() -> None:
    """However long it takes to publish a large write. A stalled committer is helped."""
    writes, ledger = fold([(0, Begun("w", 0)), (10, manifest())]), Held(Decision(0, 5))
    for number in range(1, 100):
        ledger.published = number
        assert not look(ledger, writes, 10 + 10 * number)
    assert ledger.completed == 0
    assert not look(ledger, writes, 1_000 + COMPLETE_AFTER_S - 1)
    assert look(ledger, writes, 1_000 + COMPLETE_AFTER_S)
    assert ledger.completed == 1
    assert writes.horizon_us(2_000 * S) == 2_000 * S - MARGIN


def test_a_completed_epoch_is_noticed_immediately() -> None:
    """Its staged batches need not wait."""
    writes = fold([(0, Begun("w", 0)), (10, manifest())])
    assert look(Held(Decision(0, 5), first_sequence(1)), writes, 11)
    assert writes.horizon_us(1_000 * S) == 1_000 * S - MARGIN


def test_a_manifest_that_is_not_decided_is_no_decision() -> None:
    """It is kept until the write was silent for a day."""
    writes, ledger = fold([(0, Begun("w", 0)), (10, manifest())]), Held(None)
    assert not look(ledger, writes, 1_000)
    assert writes.horizon_us(1_000 * S) == -MARGIN
    look(ledger, writes, SILENT_S + 11)
    assert (ledger.completed, [*writes.writes]) == (0, [])


@pytest.mark.parametrize("error", [Unreachable("no answer", ""), TimeoutError()])
def test_a_decided_write_is_kept_until_it_is_complete(error: Exception) -> None:
    """The cluster, or the target's part of it, was away for days: the staged batches are still needed."""
    writes, ledger = fold([(0, Begun("w", 0)), (10, manifest())]), Held(Decision(0, 5), error=error)
    for day in range(1, 4):
        assert not look(ledger, writes, day * SILENT_S + 100)
        assert writes.horizon_us(day * DAY + 100 * S) == -MARGIN
    ledger.error = None
    assert look(ledger, writes, 4 * SILENT_S)


def test_a_decided_write_whose_batches_are_gone_is_forgotten_in_the_end() -> None:
    """They were deleted: the write cannot be completed."""
    writes, ledger = fold([(0, Begun("w", 0)), (10, manifest())]), Held(Decision(0, 5), error=StagedGone("gone", ""))
    assert not look(ledger, writes, 100)
    assert [*writes.writes] == ["w"]
    look(ledger, writes, SILENT_S + 11)
    assert [*writes.writes] == []
