"""sql, pipeline audit, pipeline run: jobs on Spark over the topics of a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from embarcadero.cli.output import Brokers, DataDir, Json, connect, note, print_json, print_table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from embarcadero.audit.report import AuditReport
    from embarcadero.client.sync import Log

Master = Annotated[
    str | None, typer.Option("--master", show_default=False, help="URL of a Spark master. Default: this machine.")
]


@contextmanager
def spark_and_log(brokers: str | None, data_dir: Path | None, master: str | None) -> Iterator[tuple[SparkSession, Log]]:
    """A client, then Spark (in that order: a cluster that is not there is told at once)."""
    from rich.console import Console

    from embarcadero.spark import session

    with connect(brokers, data_dir) as log:
        console = Console(stderr=True)
        with console.status("starting Spark ..."):
            spark = session("embarcadero", master)
        try:
            yield spark, log
        finally:
            spark.stop()


def sql(
    query: Annotated[str, typer.Argument(help="A query; every topic is a table of its name.")],
    limit: Annotated[int, typer.Option(min=1, help="Print at most so many rows.")] = 100,
    master: Master = None,
    brokers: Brokers = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Ask the log in SQL: topics are tables that are always current, in memory, on disks and in the tier.

    Raw topics have the columns topic, partition, seq, key, value, headers and timestamp; topics with a schema have
    their own, and _seq, _index, _timestamp and so on.

    Examples:

        embarcadero sql "select count(*) from orders"

        embarcadero sql "select city, sum(amount_cents) from orders group by city order by 2 desc" --json

        embarcadero sql "select cast(value as string) from events where seq >= 1000" --limit 10
    """
    from embarcadero.spark.sql import ask

    with spark_and_log(brokers, data_dir, master) as (spark, log):
        found = ask(spark, log, query).limit(limit + 1).toArrow()
    rows = found.slice(0, limit)
    if json:
        print_json([{name: _plain(value) for name, value in row.items()} for row in rows.to_pylist()])
    else:
        print_table("", rows.column_names, [[_shown(value) for value in row.values()] for row in rows.to_pylist()])
    if found.num_rows > limit:
        note(f"only the first {limit:,} rows are printed: --limit")


def _plain(value: Any) -> Any:
    """A value as JSON has it: bytes as text, where they are."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, dict):
        return {str(_plain(key)): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value


def _shown(value: Any) -> str:
    plain = _plain(value)
    return "" if plain is None else f"{plain:,.4g}" if isinstance(plain, float) else str(plain)


def audit(
    topic: Annotated[str, typer.Argument(help="Name of the topic.")],
    report: Annotated[Path | None, typer.Option(show_default=False, help="Write a JSON report to this file.")] = None,
    master: Master = None,
    brokers: Brokers = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Check the whole of a topic on Spark: positions, sessions, gaps, checksums, and the table against the log.

    It reads everything that is durable now. Exit code 0: all promises hold; 1: findings, each with its place.

    Examples:

        embarcadero pipeline audit orders

        embarcadero pipeline audit orders --report audit.json
    """
    import msgspec

    from embarcadero.spark.auditing import audit as run_audit

    with spark_and_log(brokers, data_dir, master) as (spark, log):
        found = run_audit(spark, log, topic)
    document = msgspec.json.encode({**msgspec.to_builtins(found), "holds": found.holds, "broken": found.broken})
    if report is not None:
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_bytes(document)
    if json:
        print(document.decode())
    else:
        print_audit(found)
    raise typer.Exit(0 if found.holds else 1)


def print_audit(found: AuditReport) -> None:
    """What was looked at, and what is wrong with it."""
    print_table(
        f"topic {found.topic}, order {found.order}",
        ["lane", "indices", "entries", "batches", "records", "sessions", "in table", "compared", "lost", "skipped"],
        [
            [
                lane.lane, f"{lane.start_index:,} to {lane.stop_index:,}", f"{lane.entries:,}", f"{lane.batches:,}",
                f"{lane.records:,}", f"{lane.sessions:,}", f"{lane.in_table:,}", f"{lane.in_both:,}",
                f"{lane.lost:,}", f"{lane.skipped:,}",
            ]
            for lane in found.lanes
        ],
    )  # fmt: skip
    if unknown := sum(lane.sessions_unknown for lane in found.lanes):
        print(f"order of {unknown:,} sessions not checked: nothing that was read says whether they are strong")
    if found.holds:
        print(f"all promises hold: {found.spans} spans, {found.seconds:.1f} s")
        return
    print_table(
        f"broken: {', '.join(found.broken)}",
        ["promise", "kind", "lane", "index", "what"],
        [[one.promise, one.kind, one.lane, one.index, one.detail] for one in found.findings[:100]],
    )


def run(
    file: Annotated[Path, typer.Argument(help="A Python file.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Its arguments, after --.")] = None,
    master: Master = None,
    brokers: Brokers = None,
    data_dir: DataDir = None,
) -> None:
    """Run your own job with `spark`, `log` and `brokers` ready, and every topic as a view.

    Examples:

        embarcadero pipeline run totals.py

        embarcadero pipeline run totals.py --master spark://10.0.0.7:7077 -- --day 2026-01-31
    """
    from embarcadero.spark.running import run_job

    with spark_and_log(brokers, data_dir, master) as (spark, log):
        run_job(spark, log, file, arguments or [])
