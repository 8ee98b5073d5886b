"""The table of rows: measured figures, their units, and our targets. Table, plots and docs are made from it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from embarcadero.limits import KIB, MIB
from embarcadero_proof.lab.settings import USUAL, Settings

STRONG_PERCENTS: Final = (0, 10, 100)
"""Share of strong sessions in a topic of order 2."""

UNITS: Final[dict[str, Callable[[float], str]]] = {
    "ratio": lambda v: f"{v:.2f}",
    "times": lambda v: f"{v:.1f}x" if v % 1 else f"{v:.0f}x",
    "bytes/s": lambda v: f"{v / 1e9:.2f} GB/s",
    "records/s": lambda v: f"{v / 1e6:.2f} M/s",
    "batches/s": lambda v: f"{v / 1e6:.2f} M/s",
    "seconds": lambda v: f"{v * 1e3:.2f} ms",
    "cores": lambda v: f"{v * 100:.1f} %",
    "bytes": lambda v: f"{v / 1e6:.1f} MB" if v < 10e6 else f"{v / 1e6:.0f} MB",
    "spread": lambda v: f"{v * 100:.0f} %",
}
"""Units, and the text of a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure. Without `at_least` it only explains others. `less`: smaller is better, and bounds are upper."""

    key: str
    family: str
    what: str
    unit: str
    at_least: float | None = None
    goal: float | None = None
    less: bool = False

    def show(self, value: float | None) -> str:
        """Return a value in this row's unit."""
        return "" if value is None else UNITS[self.unit](value)

    def bound(self, value: float | None) -> str:
        """Return a target in this row's unit."""
        return "" if value is None else f"{'<' if self.less else '>'} {_short(self.show(value))}"

    def verdict(self, value: float | None) -> str:
        """Return `goal`, `holds` or `misses`; nothing for rows without a target."""
        if value is None or self.at_least is None:
            return ""
        return "goal" if self.reaches(value, self.goal) else "holds" if self.reaches(value, self.at_least) else "misses"

    def reaches(self, value: float, target: float | None) -> bool:
        """Return whether a value is as good as a target."""
        return target is not None and (value <= target if self.less else value >= target)

    def score(self, value: float | None) -> float:
        """Return the value as a multiple of `at_least`: 1 is just enough, and more is better for all rows."""
        if self.at_least is None or value is None:
            return 1.0
        return (self.at_least / value if value > 0 else math.inf) if self.less else value / self.at_least


def _short(number: str) -> str:
    """Remove trailing zeros: 0.50 is 0.5, 4.00 M/s is 4 M/s."""
    return re.sub(r"\.(?=\D|$)", "", re.sub(r"(\.\d*?)0+(?=\D|$)", r"\1", number))


def size_name(size: int) -> str:
    """Return the text of a batch size."""
    return f"{size // MIB} MiB" if size % MIB == 0 else f"{size / KIB:g} KiB"


def count_name(count: int) -> str:
    """Return the text of a round number."""
    return f"{count / 1e6:g} M" if count >= 100_000 else f"{count:,}"


def rows_for(settings: Settings) -> list[Row]:
    """Return all rows of a run, in the order of their display."""
    rows = [row for size in settings.batch_bytes for row in _publish_rows(size)]
    rows += [*_CLIENT_ROWS, *_latency_rows(), *_SEQUENCER_ROWS, *_MIRROR_ROWS, *_resource_rows(settings)]
    rows += [*_flat_rows(settings), *_DURABLE_ROWS, *_WARM_ROWS, *_spark_rows(), *_STRESS_ROWS]
    return [row for row in rows if settings.wants(row.family)]


def _publish_rows(size: int) -> list[Row]:
    name = size_name(size)
    rows = [Row(key=f"raw_{size}", family="publish", what=f"raw TCP {name}", unit="bytes/s")]
    for order in (5, 2, 0):
        key, what = f"order{order}_{size}", f"publish {name}, order {order}"
        rows.append(Row(key=key, family="publish", what=what, unit="bytes/s"))
        if order:
            rows.append(_ratio(f"{key}_to_raw", f"{what} / raw TCP", 0.5, 0.8))
    for percent in STRONG_PERCENTS:
        what = f"publish {name}, {percent}% strong"
        rows.append(Row(key=f"strong{percent}_{size}", family="publish", what=what, unit="bytes/s"))
        if percent:
            at_least = 0.95 if percent < 100 else 0.85
            rows.append(_ratio(f"strong{percent}_to_weak_{size}", f"{what} / 0%", at_least, 1.0))
    return [*rows, _ratio(f"order5_to_order0_{size}", f"publish {name}, order 5 / order 0", 0.86, 0.95)]


def _ratio(key: str, what: str, at_least: float, goal: float) -> Row:
    return Row(key=key, family="publish", what=what, unit="ratio", at_least=at_least, goal=goal)


_CLIENT_ROWS: Final = (
    Row(
        key="read_to_publish", family="read", what="ordered subscriber / publish", unit="ratio", at_least=0.5, goal=1.0
    ),
    Row(key="read", family="read", what="ordered subscriber, as Arrow", unit="bytes/s"),
    Row(key="read_publish", family="read", what="publish of the same data", unit="bytes/s"),
    Row(
        key="send", family="send", what="send(), 100-byte records", unit="records/s",
        at_least=300e3, goal=1e6,
    ),
    Row(
        key="records", family="send", what="Batch.records(), 100-byte records", unit="records/s",
        at_least=1e6, goal=3e6,
    ),
)  # fmt: skip


def _latency_rows() -> list[Row]:
    plain = [
        ("ack_p50", "ack=1 round trip, p50"),
        ("echo_p50", "uvloop echo, p50"),
        ("echo_p99", "uvloop echo, p99"),
        ("ack_sync_p50", "ack=1 with threads, p50"),
        ("ack_sync_p99", "ack=1 with threads, p99"),
    ]
    return [
        Row(
            key="ack_to_echo_p50", family="latency", what="ack=1 / uvloop echo, p50", unit="times",
            at_least=8, goal=3, less=True,
        ),
        Row(
            key="ack_p99", family="latency", what="ack=1 round trip, p99", unit="seconds",
            at_least=1.5e-3, goal=0.3e-3, less=True,
        ),
        *(Row(key=key, family="latency", what=what, unit="seconds", less=True) for key, what in plain),
    ]  # fmt: skip


_SEQUENCER_ROWS: Final = (
    Row(
        key="sequencer_order5", family="sequencer", what="sequencer, in order", unit="batches/s",
        at_least=4e6, goal=8e6,
    ),
    Row(
        key="sequencer_order5_reordered", family="sequencer", what="sequencer, half reordered",
        unit="batches/s", at_least=2e6, goal=4e6,
    ),
    Row(key="sequencer_order2", family="sequencer", what="sequencer, order 2", unit="batches/s"),
)  # fmt: skip


_MIRROR_ROWS: Final = (
    Row(key="mirror_publish", family="mirror", what="publish, with mirror / without", unit="ratio"),
    Row(key="mirror_ack_p50", family="mirror", what="ack=1 p50, with mirror / without", unit="times", less=True),
    Row(key="mirror_cpu", family="mirror", what="CPU a batch, with mirror / without", unit="times", less=True),
    Row(key="mirrored_cpu", family="mirror", what="CPU of the cluster a batch", unit="seconds", less=True),
    Row(key="plain_cpu", family="mirror", what="the same, without a mirror", unit="seconds", less=True),
    Row(key="mirrored_publish", family="mirror", what="publish with a mirror", unit="bytes/s"),
    Row(key="plain_publish", family="mirror", what="publish beside it, without", unit="bytes/s"),
    Row(key="mirrored_ack_p50", family="mirror", what="ack=1 with a mirror, p50", unit="seconds", less=True),
    Row(key="plain_ack_p50", family="mirror", what="ack=1 beside it, without, p50", unit="seconds", less=True),
)


def _resource_rows(settings: Settings) -> list[Row]:
    return [
        Row(
            key="idle", family="idle", what=f"CPU of {settings.brokers} idle brokers, of a core", unit="cores",
            at_least=0.05, goal=0.01, less=True,
        ),
        Row(
            key="memory", family="memory", what=f"broker memory, {settings.connections:,} connections", unit="bytes",
            at_least=150e6, goal=80e6, less=True,
        ),
        Row(key="memory_before", family="memory", what="broker memory without connections", unit="bytes", less=True),
    ]  # fmt: skip


def _ack2_rows(name: str, what: str) -> list[Row]:
    targets = {"p50": (5.0, 2.5), "p999": (5.0, 2.0)}
    rows = [
        Row(
            key=f"ack2_{name}_to_bare_{quantile}", family="durable", unit="times", less=True,
            what=f"ack=2 {what} / fdatasync, {quantile}", at_least=least, goal=goal,
        )
        for quantile, (least, goal) in targets.items()
    ]  # fmt: skip
    plain = [(f"ack2_{name}", f"ack=2 round trip {what}"), (f"bare_sync_{name}", f"fdatasync beside {what}")]
    rows += [
        Row(key=f"{key}_{quantile}", family="durable", what=f"{text}, {quantile}", unit="seconds", less=True)
        for key, text in plain
        for quantile in targets
    ]
    return rows


_DURABLE_ROWS: Final = (
    Row(
        key="durable_to_bare", family="durable", what="publish ack 2, 2 of 3 / bare disk", unit="ratio",
        at_least=0.5, goal=0.8,
    ),
    Row(key="durable_publish", family="durable", what="publish ack 2, 2 of 3, one disk", unit="bytes/s"),
    Row(key="bare_thrice", family="durable", what="bare disk: three times 16 MiB", unit="bytes/s"),
    *_ack2_rows("1of1", "1 of 1"),
    *_ack2_rows("2of3", "2 of 3"),
)  # fmt: skip

_WARM_ROWS: Final = (
    Row(
        key="warm_to_raw", family="warm", what="warm scan / raw reads of the files", unit="ratio",
        at_least=0.4, goal=0.7,
    ),
    Row(key="warm_scan", family="warm", what="warm scan, as Arrow", unit="bytes/s"),
    Row(key="warm_raw", family="warm", what="raw reads of the same files", unit="bytes/s"),
    Row(
        key="restart_large", family="restart", what="restart of all to first ack=2", unit="seconds",
        at_least=10.0, goal=2.0, less=True,
    ),
    Row(key="restart_small", family="restart", what="the same, little on disk", unit="seconds", less=True),
    Row(key="restart_ready_large", family="restart", what="restart of all to ready", unit="seconds", less=True),
    Row(key="restart_ready_small", family="restart", what="to ready, little on disk", unit="seconds", less=True),
    Row(
        key="recovery_100", family="recovery", what="start-up with 100 sealed segments", unit="seconds",
        at_least=1.0, goal=1.0, less=True,
    ),
    Row(key="recovery_10", family="recovery", what="start-up with 10 sealed segments", unit="seconds", less=True),
    Row(key="recovery_growth", family="recovery", what="100 segments / 10 segments", unit="times", less=True),
)  # fmt: skip

_STRESS_ROWS: Final = (
    Row(key="shuffled", family="stress", what="order 5, all out of order, 64-record batches", unit="bytes/s"),
    Row(key="beside_stuck", family="stress", what="throughput beside a stuck session / without", unit="ratio"),
)


def _spark_rows() -> list[Row]:
    pairs: list[tuple[str, str, str, str, float | None, float | None]] = [
        ("spark_read", "spark read, memory", "nothing", "nothing", 0.6, 0.9),
        ("spark_cold", "spark read, tiered", "parquet", "parquet", 0.4, 0.8),
        ("spark_write", "spark stream, ack 2", "noop", "noop", 0.3, 0.6),
        ("spark_write_all", "spark stream with headers", "noop", "noop", None, None),
        ("spark_batch", "spark batch write, ack 2", "noop", "noop", None, None),
        ("spark_python", "spark, dropped in python", "noop", "noop", None, None),
        ("spark_tier", "tiering", "parquet", "spark to parquet", 0.4, 0.8),
        ("spark_compact", "compact", "parquet", "parquet, group, write", 0.5, 0.8),
    ]
    rows = [
        Row(
            key="spark_offsets_p50", family="spark", what="latest offsets of a stream, p50", unit="seconds",
            at_least=10e-3, goal=2e-3, less=True,
        ),
        Row(
            key="spark_offsets_p99", family="spark", what="latest offsets of a stream, p99", unit="seconds", less=True,
        ),
        Row(
            key="spark_commit_added", family="spark", what="commit of 1,000 rows, added",
            unit="seconds", at_least=30e-3, goal=10e-3, less=True,
        ),
        Row(key="spark_commit_p50", family="spark", what="commit of 1,000 rows, p50", unit="seconds", less=True),
    ]  # fmt: skip
    for key, what, alone, name, least, goal in pairs:
        rows += [
            Row(
                key=f"{key}_to_{alone}", family="spark", what=f"{what} / {name}", unit="ratio",
                at_least=least, goal=goal,
            ),
            Row(key=key, family="spark", what=what, unit="bytes/s"),
            Row(key=f"{key}_{alone}", family="spark", what=f"its pair: {name}", unit="bytes/s"),
        ]  # fmt: skip
    return rows


def _flat_rows(settings: Settings) -> list[Row]:
    sweeps = {
        "records": settings.flat_records, "sessions": settings.flat_sessions, "brokers": settings.flat_brokers,
    }  # fmt: skip
    return [
        Row(
            key=f"flat_{sweep}_{kind}", family="flat", unit="spread", at_least=0.20, goal=0.05, less=True,
            what=f"{what}, {count_name(points[0])}-{count_name(points[-1])} {sweep}",
        )
        for sweep, points in sweeps.items()
        for kind, what in (("cpu", "CPU a record"), ("memory", "memory"))
    ]  # fmt: skip


def targets_as_markdown() -> str:
    """Return the rows with targets of a usual run, for the docs."""
    lines = ["| row | `--only` | at least | goal |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {row.what} | {row.family} | {row.bound(row.at_least)} | {row.bound(row.goal)} |"
        for row in rows_for(USUAL)
        if row.at_least is not None
    ]
    return "\n".join(lines) + "\n"
