"""The amount of work in a run: three sizes (quick, usual, full), and changes of the caller."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from embarcadero.errors import BadValue
from embarcadero.limits import BROKERS_MAX, FRAME_BYTES_MAX, KIB, MIB, RECORD_BYTES_MAX, RECORDS_PER_BATCH_MAX

SMALL_RECORD_BYTES: Final = 100
RECORD_OVERHEAD_BYTES: Final = 24  # offsets, time stamp and validity of a record in a batch, rounded up

STRESS: Final = "stress"
FAMILIES: Final = (
    "publish",
    "read",
    "send",
    "latency",
    "sequencer",
    "mirror",
    "idle",
    "memory",
    "flat",
    "durable",
    "warm",
    "restart",
    "recovery",
    "spark",
    STRESS,
)
"""Rows that are measured together, in this order."""


def _within(what: str, value: int, least: int, most: int) -> str | None:
    return None if least <= value <= most else f"{what} must be {least:,} to {most:,}, not {value:,}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of one run. All problems are reported together."""

    trials: int = 3
    total_bytes: int = 1024 * MIB  # of each publish measurement
    record_bytes: int = 1 * KIB
    batch_bytes: tuple[int, ...] = (1 * MIB, 4 * MIB)
    brokers: int = 4
    publishers: int = 2
    only: tuple[str, ...] = ()  # families of rows; none: all
    send_records: int = 500_000
    round_trips: int = 2_000
    sequencer_s: float = 2.0
    idle_s: float = 10.0
    connections: int = 1_000
    flat_records: tuple[int, ...] = (1_000_000, 2_000_000, 5_000_000, 10_000_000, 20_000_000)
    flat_sessions: tuple[int, ...] = (10, 100, 1_000)
    flat_brokers: tuple[int, ...] = (1, 2, 4, 8)
    flat_batches: int = 4_000  # of each point of the sweep over sessions
    spark_rounds: int = 5  # of each pair of the spark rows, in every trial

    def __post_init__(self) -> None:
        problems = [
            _within("trials", self.trials, 1, 1_000),
            _within("total bytes", self.total_bytes, 1 * MIB, 1 << 40),
            _within("record bytes", self.record_bytes, 1, RECORD_BYTES_MAX),
            *(_within("batch bytes", size, 1 * KIB, FRAME_BYTES_MAX) for size in self.batch_bytes),
            _within("brokers", self.brokers, 1, BROKERS_MAX),
            _within("publishers", self.publishers, 1, 64),
            *(f"there are no {name!r} rows" for name in self.only if name not in FAMILIES),
            None if self.batch_bytes else "there is no batch size",
        ]
        if found := [problem for problem in problems if problem]:
            raise BadValue("; ".join(found), f"rows are {', '.join(FAMILIES)}")

    def records_in(self, batch_bytes: int) -> int:
        """Return the number of records in a batch of about this size."""
        return max(1, min(RECORDS_PER_BATCH_MAX, batch_bytes // (self.record_bytes + RECORD_OVERHEAD_BYTES)))

    def wants(self, family: str) -> bool:
        """Return whether the rows of a family are requested; stress only by name."""
        return family in self.only if self.only else family != STRESS

    def as_dict(self) -> dict[str, Any]:
        """Return the settings for the report."""
        return asdict(self)


QUICK: Final = Settings(
    trials=1, total_bytes=128 * MIB, batch_bytes=(1 * MIB,), brokers=2, send_records=50_000, round_trips=300,
    sequencer_s=0.3, idle_s=2.0, flat_records=(100_000, 200_000, 500_000), flat_sessions=(10, 100),
    flat_brokers=(1, 2), flat_batches=500, spark_rounds=1,
)  # fmt: skip
USUAL: Final = Settings()
FULL: Final = Settings(
    trials=5, total_bytes=4096 * MIB, batch_bytes=(256 * KIB, 1 * MIB, 4 * MIB), send_records=2_000_000,
    round_trips=10_000, sequencer_s=5.0, idle_s=20.0,
    flat_records=(1_000_000, 2_000_000, 5_000_000, 10_000_000, 20_000_000, 35_000_000, 50_000_000),
    flat_sessions=(10, 100, 1_000, 10_000), flat_batches=20_000, spark_rounds=9,
)  # fmt: skip


def chosen(base: Settings, **changes: Any) -> Settings:
    """Apply changes of the caller to a size of run; None and empty tuples change nothing."""
    return replace(base, **{name: value for name, value in changes.items() if value not in (None, ())})
