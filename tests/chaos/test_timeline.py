"""Arithmetic of timelines: bins, next acks, longest pauses, percentiles; the charts and the page are drawn."""

from __future__ import annotations

import gc
import sys
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import pytest

from embarcadero.errors import BadValue
from embarcadero.types import Order
from embarcadero_proof.chaos.kills import no_pauses_of_our_own
from embarcadero_proof.chaos.page import index_page
from embarcadero_proof.chaos.pauses import Cost, calm_costs, concerned, costs
from embarcadero_proof.chaos.plots import draw_histogram, draw_timeline
from embarcadero_proof.chaos.timeline import (
    Acks,
    acks_of,
    longest_pause_us,
    longest_wait_us,
    next_ack_us,
    percentiles,
    timeline,
)
from embarcadero_proof.sim.history import Began, Fault, History, Sent, Settled, TopicMade
from tests.chaos.worlds import BATCHES, RECORDS, STEP_US, honest


def acks(*pairs: tuple[int, int]) -> Acks:
    """Batches sent and acked at these times."""
    table = np.array(sorted(pairs, key=lambda pair: pair[1]), dtype=np.int64).reshape(-1, 2)
    return Acks(table[:, 0], table[:, 1], np.ones(len(table), dtype=np.int64))


def test_records_are_counted_in_bins_of_100_ms() -> None:
    """Ten batches in each bin; all of them are counted; latency is from send to ack."""
    line = timeline(History(honest()))
    starts, counts = line.per_bin(2)
    assert counts.sum() == BATCHES * RECORDS
    assert counts[1] == 100_000 // STEP_US * RECORDS
    assert starts[1] == pytest.approx(0.1)
    assert set(line.acks[2].latency_ms) == {2.0}
    assert [(span.kind, span.target) for span in line.faults] == [("kill", "broker:0")]
    assert line.healed_s == pytest.approx((1_000 + BATCHES * STEP_US) / 1e6)


def test_the_next_ack_is_of_a_batch_sent_after_the_kill() -> None:
    """Acks of batches that were in flight before are no evidence about the killed role."""
    some = acks((0, 5), (8, 12), (11, 40), (13, 30))
    assert next_ack_us(some, 10) == 20
    assert next_ack_us(some, 14) is None


def test_the_longest_wait_is_of_the_unluckiest_batch() -> None:
    """In flight at the kill, or sent before the next ack; counted from the kill, or from when it was sent."""
    lucky = [(0, 5), (8, 12), (11, 40), (13, 30)]  # the next ack comes at 30, the last of those in between at 40
    assert longest_wait_us(acks(*lucky), 10) == 29
    assert longest_wait_us(acks(*lucky, (9, 3_000)), 10) == 2_990  # in flight
    assert longest_wait_us(acks(*lucky, (30, 3_000)), 10) == 2_970  # sent before the next ack
    assert longest_wait_us(acks(*lucky, (31, 3_000)), 10) == 29  # sent after it: not caused by the kill
    assert longest_wait_us(acks(*lucky, (1, 9)), 10) == 29  # over before
    assert longest_wait_us(acks((0, 5), (8, 12)), 10) is None


def test_the_longest_pause_overlaps_the_kill() -> None:
    """From the last ack before it, over all acks since, up to the first one after the end; and no earlier ones."""
    some = acks((0, 0), (0, 1_000), (0, 1_010), (0, 1_050), (0, 1_060), (0, 9_000))
    assert longest_pause_us(some, 1_020, 1_055) == 40
    assert longest_pause_us(some, 1_020, 2_000) == 9_000 - 1_060
    assert longest_pause_us(acks((0, 5)), 10, 20) is None
    assert longest_pause_us(acks((0, 15)), 10, 20) == 5


def test_percentiles_are_measured_values() -> None:
    """p99 of a hundred is the second largest, of a few the largest."""
    assert percentiles([]) == {}
    assert percentiles([float(n) for n in range(1, 101)]) == {"p50": 50.0, "p99": 99.0, "max": 100.0}
    assert percentiles([3.0, 1.0]) == {"p50": 1.0, "p99": 3.0, "max": 3.0}


@pytest.mark.parametrize("role", ["sequencer", "broker", "replica", "hand-over"])
def test_the_cost_of_a_kill(role: str) -> None:
    """After a kill in the middle of a steady flow the pause is one step, as in calm moments."""
    ack = 1 if role == "hand-over" else 2
    events = [event for event in honest(ack) if not isinstance(event, Fault)]
    kills = [Fault(at=at, kind="kill", target=role, until=at + 1_000) for at in (100_500, 400_500)]
    history = History(sorted([*events, *kills], key=lambda event: event.at))
    for found in (costs(history, role), calm_costs(history, role)):
        assert all(cost is not None and 2.0 <= cost.pause_ms <= 2 * STEP_US / 1e3 for cost in found)
        assert all(cost is not None and 0.0 < cost.wait_ms <= 2.0 for cost in found)
    assert len(costs(history, role)) == 2
    assert len(calm_costs(history, role)) == 1


def test_a_pause_that_lasts_until_recovery_counts_for_the_kill_only() -> None:
    """Otherwise it would be counted twice: as a kill's cost and as a pause of the machine without a kill."""
    kills = [Fault(at=at, kind="kill", target="replica:0", until=at + 1_000) for at in (100_500, 400_500)]
    paused = range(kills[0].at, kills[0].until + 40_000)
    events = [
        msgspec.structs.replace(event, at=paused.stop) if isinstance(event, Settled) and event.at in paused else event
        for event in honest() if not isinstance(event, Fault)
    ]  # fmt: skip
    history = History(sorted([*events, *kills], key=lambda event: event.at))
    assert [cost.pause_ms > 40 for cost in costs(history, "replica") if cost is not None] == [True, False]
    assert [cost.pause_ms > 40 for cost in calm_costs(history, "replica")] == [False]


@pytest.mark.parametrize("role", ["sequencer", "broker"])
def test_the_stream_with_the_worst_luck_is_the_figure(role: str) -> None:
    """Another stream's ack does not hide a waiting stream, and neither does a batch that was sent after the kill."""
    kill = Fault(at=100_500, kind="kill", target=role, until=101_500)
    late = 50_000
    slow = [
        msgspec.structs.replace(
            event, process="slow", stream="slow",
            at=event.at + late * (isinstance(event, Settled) and event.at > kill.at),
        )
        for event in honest() if isinstance(event, Began | Sent | Settled)
    ]  # fmt: skip
    lucky = [event for event in honest() if not isinstance(event, Fault)]
    history = History(sorted([*lucky, *slow, kill], key=lambda event: event.at))
    assert costs(history, role) == [Cost(pause_ms=late / 1e3 + 2.5, wait_ms=late / 1e3 + 2.0)]
    assert costs(History(sorted([*lucky, kill], key=lambda event: event.at)), role) == [Cost(2.5, 2.0)]


def test_only_streams_count_that_a_role_can_delay() -> None:
    """A stream with ack 2 does not measure a hand-over's own pause, a stream with ack 1 does not measure replicas."""
    assert concerned(History(honest(ack=2)), "replica") == ["s"]
    assert concerned(History(honest(ack=1)), "replica") == []
    assert concerned(History(honest(ack=2)), "hand-over") == []
    assert concerned(History(honest(ack=1)), "hand-over") == ["s"]
    pinned = [msgspec.structs.replace(e, order=Order.BROKER) if isinstance(e, TopicMade) else e for e in honest()]
    assert concerned(History(pinned), "sequencer") == []
    assert concerned(History(pinned), "broker") == ["s"]


def test_a_kill_without_a_recovery_has_no_figure() -> None:
    """It is counted, not left out."""
    late = msgspec.structs.replace(Fault(at=0, kind="kill", target="x", until=0), at=10_000_000, until=10_000_001)
    assert costs(History([*honest(), late]), "broker")[-1] is None


def test_charts_and_page(tmp_path: Path) -> None:
    """Both kinds of plots are drawn, and the page names every case and every problem, as text."""
    draw_timeline(timeline(History(honest())), "a case", "fine", True, tmp_path / "case.png")
    series = {"pauses": [1.0, 2.0, 30.0], "waits": [3.0, 3_000.0]}
    draw_histogram(series, "a role killed", {"goal": 10.0}, "somewhere", tmp_path / "pauses.png")
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.glob("*.png"))
    case = {
        "case": "storm", "words": "all at once", "good": False, "faults": {"kill": 2}, "kills": 2, "acked": 5,
        "acked_in_trouble": 3, "unknown": 0, "seconds": 1.0, "problems": ["P1: <gone>"], "plot": "matrix/storm.png",
    }  # fmt: skip
    page = index_page({
        "cases": [case], "machine": {"cores": 2, "cpu": "x", "when": "now"}, "kills": 2, "acked": 5, "delivered": 9,
        "seconds": 1.0, "commit": "abc", "command": "embarcadero-proof chaos matrix",
    })  # fmt: skip
    assert "0 of 1 cases" in page
    assert "P1: &lt;gone&gt;" in page
    assert 'src="matrix/storm.png"' in page


def test_acks_of_some_streams_only() -> None:
    """Streams and ack levels are distinguished."""
    history = History(honest())
    assert len(acks_of(history, streams=["s"]).acked_us) == BATCHES
    assert len(acks_of(history, streams=["other"]).acked_us) == 0
    assert len(acks_of(history, level=1).acked_us) == 0


def test_the_observer_makes_no_pauses_and_leaves_the_interpreter_as_it_was() -> None:
    """Also when the observed code fails."""
    turn_s = sys.getswitchinterval()
    with suppress(BadValue), no_pauses_of_our_own():
        assert not gc.isenabled()
        assert sys.getswitchinterval() < turn_s
        raise BadValue("anything")
    assert gc.isenabled()
    assert sys.getswitchinterval() == turn_s
