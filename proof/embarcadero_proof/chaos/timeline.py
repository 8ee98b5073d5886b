"""A history as a time line: acks in bins, their latencies, and faults as spans; and pauses of acks, for figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from embarcadero_proof.sim.history import Ended, FabricLost, Fault, Healed, History, Sent, Settled, Verdict

BIN_US: Final = 100_000

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Acks:
    """Acked batches of some streams: when each was sent and acked (microseconds), and its number of records."""

    sent_us: npt.NDArray[np.int64]
    acked_us: npt.NDArray[np.int64]
    records: npt.NDArray[np.int64]

    @property
    def latency_ms(self) -> Numbers:
        """Latency of each ack."""
        return (self.acked_us - self.sent_us) / 1e3


@dataclass(frozen=True, slots=True)
class Span:
    """A fault, in seconds of the time line."""

    kind: str
    target: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The data of a plot. Time begins with the first batch sent."""

    began_us: int
    seconds: float
    healed_s: float | None
    lost_s: tuple[float, ...]
    acks: dict[int, Acks]  # by ack level, times as in the history
    faults: tuple[Span, ...]

    def per_bin(self, level: int) -> tuple[Numbers, Numbers]:
        """Return starts of bins in seconds, and records acked in each."""
        bins = int(self.seconds * 1e6) // BIN_US + 1
        acks = self.acks[level]
        bins_of = np.clip((acks.acked_us - self.began_us) // BIN_US, 0, bins - 1)
        counts = np.bincount(bins_of, weights=acks.records, minlength=bins).astype(np.float64)
        return np.arange(bins) * BIN_US / 1e6, counts


def acks_of(history: History, level: int | None = None, streams: Iterable[str] | None = None) -> Acks:
    """Return acked batches, of one level or of some streams, by the time of their ack."""
    sent = {(event.process, event.number): event for event in history.of(Sent)}
    wanted = None if streams is None else set(streams)
    rows = [
        (sent[event.process, event.number].at, event.at, sent[event.process, event.number].count)
        for event in history.of(Settled)
        if event.verdict is Verdict.STORED and (level is None or event.ack == level)
        and (wanted is None or event.stream in wanted)
    ]  # fmt: skip
    table = np.array(sorted(rows, key=lambda row: row[1]), dtype=np.int64).reshape(-1, 3)
    return Acks(table[:, 0], table[:, 1], table[:, 2])


def timeline(history: History) -> Timeline:
    """Convert a history to a time line."""
    began_us = min((event.at for event in history.of(Sent)), default=0)
    last = [event.at for event in (*history.of(Settled), *history.of(Healed))] or [e.at for e in history.of(Ended)]

    def seconds(at_us: int) -> float:
        return (at_us - began_us) / 1e6

    healed = history.of(Healed)
    return Timeline(
        began_us=began_us,
        seconds=max(seconds(max(last, default=began_us)), 0.1),
        healed_s=seconds(healed[-1].at) if healed else None,
        lost_s=tuple(seconds(event.at) for event in history.of(FabricLost)),
        acks={level: acks_of(history, level) for level in sorted({event.ack for event in history.of(Settled)})},
        faults=tuple(Span(f.kind, f.target, seconds(f.at), seconds(f.until)) for f in history.of(Fault)),
    )


# --- pauses -----------------------------------------------------------------------------------------------------------
def next_ack_us(acks: Acks, since_us: int) -> int | None:
    """Return the time from a moment to the first ack of a batch sent after it; None if none came."""
    later = acks.acked_us[acks.sent_us >= since_us]
    return int(later.min()) - since_us if len(later) else None


def longest_wait_us(acks: Acks, since_us: int) -> int | None:
    """Return the longest wait of any batch that was in flight at a moment, or was sent between it and the next ack.

    Time before the moment does not count. None if no ack came for a batch sent after it.
    """
    next_us = next_ack_us(acks, since_us)
    if next_us is None:
        return None
    concerned = (acks.acked_us >= since_us) & (acks.sent_us <= since_us + next_us)
    return int((acks.acked_us - np.maximum(acks.sent_us, since_us))[concerned].max())


def longest_pause_us(acks: Acks, start_us: int, stop_us: int) -> int | None:
    """Return the longest time without an ack that overlaps [start, stop]; None if no ack came after the start."""
    times = acks.acked_us
    first, last = np.searchsorted(times, start_us, "right") - 1, np.searchsorted(times, stop_us, "left")
    inside = times[max(first, 0) : last + 1]
    if not len(inside) or inside[-1] < start_us:
        return None
    edges = inside if first >= 0 else np.concatenate([[start_us], inside])
    return int(np.diff(edges).max()) if len(edges) > 1 else 0


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return p50, p99 and the maximum of some figures; each is a measured value."""
    ordered = sorted(values)
    if not ordered:
        return {}
    return {
        "p50": ordered[(len(ordered) - 1) // 2],
        "p99": ordered[min(len(ordered) - 1, -(-99 * len(ordered) // 100) - 1)],
        "max": ordered[-1],
    }
