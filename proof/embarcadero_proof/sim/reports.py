"""Results of one seed, and of many: counts, faults by kind, a verdict per promise, and speed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

import msgspec
from rich.table import Table

from embarcadero_proof.sim.checkers.ledger import Violation, ledger_of
from embarcadero_proof.sim.history import Delivered, Ended, Healed, History, Settled, TopicMade, Verdict

PROMISES: Final = ("P1", "P2", "P3", "P4", "P5", "P6", "P7", "P8", "P9", "RUN")
"""RUN: the run ended, had enough acks to show something, and each topic was read."""

FEW_ACKS: Final = 20
FEW_SHARE_MAX: Final = 0.15
FEW_FROM_SEEDS: Final = 500
"""So few acks before healing show little. Of so many runs at most this share may have no more."""

_SUMS: Final = ("sent", "stored", "failed", "unknown", "delivered", "tails", "primitives", "events")


def acks_in_trouble(history: History) -> int:
    """Count the batches acked before healing. Later acks show less, since no fault is active then."""
    healed_us = max((healed.at for healed in history.of(Healed)), default=0)
    return sum(settled.verdict is Verdict.STORED and settled.at <= healed_us for settled in history.of(Settled))


def unread(history: History) -> list[Violation]:
    """List topics with acked batches of which no reader got a batch after healing: the run shows nothing of them.

    New batches are sent after healing, and readers start at the beginning. So they find some, however much was trimmed.
    """
    ledger = ledger_of(history)
    healed_us = max((healed.at for healed in history.of(Healed)), default=0)
    acked = Counter(ack.lane for ack in history.of(Settled) if ack.verdict is Verdict.STORED and ack.index is not None)
    read = {found.lane for found in history.of(Delivered) if found.at >= healed_us}
    found: list[Violation] = []
    for topic in history.of(TopicMade):
        lanes = ledger.lanes_of(topic.lane)
        count = sum(acked[lane] for lane in lanes)
        if count and history.of(Ended) and read.isdisjoint(lanes):
            what = f"{count} batches of {topic.name} were acked, and no reader got any after healing"
            found.append(Violation("RUN", history.of(Ended)[-1].at, what))
    return found


class SeedReport(msgspec.Struct, kw_only=True):
    """Results of one seed."""

    seed: int
    trace: str
    violations: list[Violation]
    failures: list[str]  # tracebacks of roles
    simulated_us: int
    cpu_s: float
    events: int  # of the queue: arrivals, deadlines, wake-ups, faults
    sent: int
    stored: int
    failed: int
    unknown: int
    delivered: int
    tails: int
    faults: dict[str, int]
    primitives: int
    rest_us: int = 0  # of the simulated time: no client called
    durable: bool = False  # something durable was reported or read
    stored_in_trouble: int | None = None  # stored and acked before healing; None: not counted yet
    commit: str = ""

    @property
    def holds(self) -> bool:
        """Whether every promise was kept."""
        return not self.violations

    @property
    def first_violation(self) -> str:
        """The first violation in words; empty if every promise holds."""
        return "" if self.holds else f"{self.violations[0].promise}: {self.violations[0].sentence}"

    @property
    def checked(self) -> set[str]:
        """Promises that this run could have broken: it may have had no disks, or no deposed process."""
        deposed = any(count and ("zombie" in kind or "sequencer" in kind) for kind, count in self.faults.items())
        return set(PROMISES) - (set() if deposed else {"P5"}) - (set() if self.durable else {"P6"})

    @property
    def broken(self) -> set[str]:
        """Promises that the run broke."""
        return {violation.promise for violation in self.violations}


class PromiseVerdict(msgspec.Struct, kw_only=True):
    """The verdict on one promise."""

    checked: int  # seeds
    broken: int


class RunReport(msgspec.Struct, kw_only=True):
    """Results of many seeds."""

    commits: list[str]
    command: str
    first: int
    last: int
    seeds: int
    failing: dict[int, str]  # seed -> its first violation
    verdicts: dict[str, PromiseVerdict]
    simulated_hours: float
    resting_hours: float  # of these: no client called
    operations: int  # publishes, batches read, tails requested
    wall_s: float  # of this run
    cpu_s: float  # of all
    cpu_s_per_seed: float
    events_per_s: float  # on one core
    times_real: float  # on one core
    times_real_busy: float  # the same without rests
    sent: int
    stored: int
    failed: int
    unknown: int
    delivered: int
    tails: int
    primitives: int
    events: int
    faults: dict[str, int]
    faults_in_all: int
    stored_in_trouble: int  # acked before healing
    few: int  # runs with fewer than FEW_ACKS of these

    @property
    def good(self) -> bool:
        """Whether every seed kept every promise, and enough seeds had acks before healing."""
        return not self.failing and self.shows_enough

    @property
    def shows_enough(self) -> bool:
        """Whether the share of runs with hardly an ack before healing is small enough."""
        return self.seeds < FEW_FROM_SEEDS or self.few <= FEW_SHARE_MAX * self.seeds

    def table(self) -> Table:
        """A table for the terminal."""
        code = ", ".join(self.commits) or "unknown code"
        table = Table(title=f"{self.seeds:,} seeds of {code}, {self.simulated_hours:,.1f} simulated hours")
        table.add_column("figure")
        table.add_column("value", justify="right")
        table.add_row("operations", f"{self.operations:,}")
        for name in _SUMS:
            table.add_row(name, f"{getattr(self, name):,}")
        table.add_row("stored before healing", f"{self.stored_in_trouble:,}")
        few = f"{self.few:,} ({self.few / max(1, self.seeds):.1%})"
        table.add_row(f"runs with fewer than {FEW_ACKS} of these", few if self.shows_enough else f"[red]{few}")
        for kind, count in self.faults.items():
            table.add_row(f"fault: {kind}", f"{count:,}")
        table.add_row("faults in all", f"{self.faults_in_all:,}")
        for promise, verdict in self.verdicts.items():
            what = "[green]holds in all" if not verdict.broken else f"[red]broken by {verdict.broken:,}"
            table.add_row(promise, f"{what} of {verdict.checked:,} seeds")
        table.add_row("events/s on one core", f"{self.events_per_s:,.0f}")
        table.add_row("times real time on one core", f"{self.times_real:,.0f}")
        table.add_row("the same without rests", f"{self.times_real_busy:,.0f}")
        table.add_row("CPU seconds per seed", f"{self.cpu_s_per_seed:.2f}")
        return table


def summary(reports: Sequence[SeedReport], wall_s: float, command: str = "") -> RunReport:
    """Summarize all seeds in one report."""
    faults: Counter[str] = Counter()
    for report in reports:
        faults.update(report.faults)
    checked = Counter(promise for report in reports for promise in report.checked)
    broken = Counter(promise for report in reports for promise in report.broken)
    sums = {name: sum(getattr(report, name) for report in reports) for name in _SUMS}
    in_trouble = [acks for report in reports if (acks := report.stored_in_trouble) is not None]
    cpu_s = sum(report.cpu_s for report in reports)
    simulated_s = sum(report.simulated_us for report in reports) / 1e6
    resting_s = sum(report.rest_us for report in reports) / 1e6
    return RunReport(
        commits=sorted({report.commit for report in reports} - {""}),
        command=command,
        first=min((report.seed for report in reports), default=0),
        last=max((report.seed + 1 for report in reports), default=0),
        seeds=len(reports),
        failing={report.seed: report.first_violation for report in reports if not report.holds},
        verdicts={p: PromiseVerdict(checked=checked[p], broken=broken[p]) for p in PROMISES},
        simulated_hours=simulated_s / 3_600,
        resting_hours=resting_s / 3_600,
        operations=sums["sent"] + sums["delivered"] + sums["tails"],
        wall_s=wall_s,
        cpu_s=cpu_s,
        cpu_s_per_seed=cpu_s / max(1, len(reports)),
        events_per_s=sums["events"] / max(1e-9, cpu_s),
        times_real=simulated_s / max(1e-9, cpu_s),
        times_real_busy=(simulated_s - resting_s) / max(1e-9, cpu_s),
        faults=dict(sorted(faults.items())),
        faults_in_all=sum(faults.values()),
        stored_in_trouble=sum(in_trouble),
        few=sum(acks < FEW_ACKS for acks in in_trouble),
        **sums,
    )  # fmt: skip
