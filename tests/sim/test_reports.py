"""A run, or a series of many, that shows too little is not taken for a good one."""

from __future__ import annotations

from rich.console import Console

from embarcadero_proof.sim.history import Delivered, Ended, Healed, History, LaneMade, Settled, TopicMade, Verdict
from embarcadero_proof.sim.reports import FEW_ACKS, FEW_FROM_SEEDS, SeedReport, acks_in_trouble, summary, unread


def report(seed: int, stored_in_trouble: int | None = None) -> SeedReport:
    return SeedReport(
        seed=seed, trace="00", violations=[], failures=[], simulated_us=1, cpu_s=0.5, events=1, sent=1, stored=1,
        failed=0, unknown=0, delivered=1, tails=1, faults={}, primitives=1, stored_in_trouble=stored_in_trouble,
    )  # fmt: skip


def test_a_series_with_hardly_any_acks_before_healing_is_not_good() -> None:
    """Single runs of this kind are reported; too many of them show too little.

    Records of earlier code did not count.
    """
    some = [report(seed, stored_in_trouble=80) for seed in range(FEW_FROM_SEEDS)]
    little = [report(seed, stored_in_trouble=FEW_ACKS - 1) for seed in range(1_000, 1_000 + FEW_FROM_SEEDS)]
    total = summary([*some, *little[:5], report(5_000)], 1.0)
    assert (total.few, total.stored_in_trouble) == (5, 80 * FEW_FROM_SEEDS + 5 * (FEW_ACKS - 1))
    assert total.good
    assert not summary([*some, *little], 1.0).good
    assert summary(little[:10], 1.0).good, "a few runs show nothing"
    screen = Console(record=True, width=100)
    screen.print(total.table())
    assert "stored before healing" in screen.export_text()


def test_acks_before_healing_are_counted_separately() -> None:
    """An ack of a batch that was not stored does not count."""
    sent = {"process": "a", "stream": "a", "lane": 0}
    acks = [Settled(at=at, number=at, verdict=Verdict.STORED, **sent) for at in (1, 5, 6)]
    refused = Settled(at=2, number=2, verdict=Verdict.FAILED, **sent)
    assert acks_in_trouble(History([acks[0], refused, acks[1], Healed(at=5), acks[2]])) == 2


def test_a_run_shows_nothing_about_a_topic_that_is_not_read_after_healing() -> None:
    """A topic without acks need not be read; reading only before healing does not help."""
    made = [TopicMade(at=0, lane=lane, name=f"t{lane}", order=2, on_gap="fence") for lane in (0, 1, 2)]
    acks = [Settled(at=1, process="a", stream="a", lane=lane, number=0, verdict=Verdict.STORED, index=0)
            for lane in (0, 1)]  # fmt: skip

    def got(at: int, lane: int) -> Delivered:
        return Delivered(at=at, reader="r", lane=lane, index=0, seq=0, count=1, session=0, session_seq=0, partition=0,
                         digest=lane)  # fmt: skip

    early, late, ends = [got(2, 0), got(2, 1)], [got(6, 0), got(6, 1)], [Ended(at=9)]
    assert unread(History([*made, *acks, *early, Healed(at=5), *late, *ends])) == []
    assert unread(History([*made, *acks, *early, Healed(at=5)])) == []
    found = unread(History([*made, *acks, *early, Healed(at=5), late[0], *ends]))
    assert [(violation.promise, "of t1 were acked" in violation.sentence) for violation in found] == [("RUN", True)]


def test_lanes_of_brokers_belong_to_their_topic() -> None:
    """Acks and reads of a topic of order 0 or 1 are in lanes of brokers."""
    made = [TopicMade(at=0, lane=0, name="t", order=0, on_gap="fence"), LaneMade(at=0, lane=4096, topic=0, order=0)]
    ack = Settled(at=1, process="a", stream="a", lane=4096, number=0, verdict=Verdict.STORED, index=0)
    got = Delivered(at=6, reader="r", lane=4096, index=0, seq=0, count=1, session=0, session_seq=0, partition=0,
                    digest=1)  # fmt: skip
    assert unread(History([*made, ack, Healed(at=5), got, Ended(at=9)])) == []
    assert unread(History([*made, ack, Healed(at=5), Ended(at=9)]))
