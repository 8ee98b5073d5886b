"""pipeline tier, audit, compact, replay, load, run, and sql: jobs over topics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from embarcadero.cli.output import (
    BrokersOption,
    DataDir,
    Json,
    Verbs,
    connect,
    data_dir_or_default,
    duration_option,
    note,
    print_json,
    print_table,
    settings,
)

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from embarcadero.audit.report import AuditReport
    from embarcadero.client.api.sync_log import Log
    from embarcadero.config import Config
    from embarcadero.spark.jobs import JobProgress, ProgressReport
    from embarcadero.spark.loading import FilesSource, TableSource
    from embarcadero.tier.job import Cycle, Engine, TierJob


_HELP = "Run jobs over topics: tier, audit, compact, replay, load, or your own job."
app = Verbs(help=_HELP, no_args_is_help=True, rich_markup_mode=None)

_MASTER = "local[*]"


@app.command()
def tier(
    topic: Annotated[str, typer.Option(help="The topic to tier.")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue until Ctrl-C.")] = False,
    take_over: Annotated[bool, typer.Option("--take-over", help="Replace another job that tiers this topic.")] = False,
    master: Annotated[
        str | None, typer.Option(show_default=False, help="Spark's master. Default: tier.master, else local[*].")
    ] = None,
    no_spark: Annotated[bool, typer.Option("--no-spark", help="Write the files in this process.")] = False,
    brokers: BrokersOption = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Keep a topic's durable records as Parquet files in an Iceberg table.

    Records in the table stay readable after brokers and replicas have removed them (tier.hot_retention_s). Without
    --follow, the job ends when all records that are durable now are in the table. It can be stopped or killed at any
    time: the next run continues from the table, and no record is duplicated. See `tier.*` in the configuration.

    Examples:

        embarcadero pipeline tier --topic orders

        embarcadero pipeline tier --topic orders --follow --master spark://10.0.0.7:7077
    """
    import os
    import signal
    from threading import Event

    from embarcadero.tier.job import ProcessEngine, TierJob
    from embarcadero.tier.storage import TierSettings

    config = cluster_config(data_dir)
    with connect(brokers, data_dir) as log:
        engine: Engine = ProcessEngine(log)
        if not no_spark:
            from embarcadero.spark.tiering import SparkEngine

            engine = SparkEngine(log.address, master or config.tier.master or _MASTER)
        where = TierSettings.of(config, data_dir_or_default(data_dir))
        holder = f"pipeline-{os.getpid()}"
        job = TierJob(log, topic, where, engine, holder=holder)
        job.open(take_over=take_over)
        with job:
            if not follow:
                _print_done(job, topic, job.run_once(), json)
                return
            stop = Event()
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: stop.set())
            if not json:
                note(f"tiering {topic} to {job.table}; Ctrl-C stops it")
            job.follow(stop, lambda cycle: _print_cycle(topic, cycle, json))


def cluster_config(data_dir: Path | None) -> Config:
    """The configuration of this command, on top of the configuration of the folder's running cluster, if any."""
    from embarcadero.errors import NotRunning
    from embarcadero.node.folder import ClusterFolder

    try:
        return settings(base=ClusterFolder(data_dir_or_default(data_dir)).require_running().config)
    except NotRunning:
        return settings()


def _facts(topic: str, cycles: list[Cycle]) -> dict[str, Any]:
    frontiers = {lane: {"index": index, "seq": seq} for lane, (index, seq) in cycles[-1].frontiers.items()}
    return {
        "topic": topic,
        "files": sum(each.files for each in cycles),
        "rows": sum(each.rows for each in cycles),
        "bytes": sum(each.bytes for each in cycles),
        "frontiers": frontiers,
        "trimmed": cycles[-1].trimmed,
        "collected": sum(len(each.collected) for each in cycles),
    }


def _print_done(job: TierJob, topic: str, cycles: list[Cycle], json: bool) -> None:
    facts = _facts(topic, cycles)
    if json:
        print_json(facts | {"table": job.table})
        return
    rows = [[lane, position["index"], position["seq"]] for lane, position in facts["frontiers"].items()]
    print_table(f"{topic} in {job.table}", ["lane", "below index", "below seq"], rows)
    print(f"{facts['rows']} records in {facts['files']} new files, {facts['bytes']} bytes")


def _print_cycle(topic: str, cycle: Cycle, json: bool) -> None:
    if json:
        print_json(_facts(topic, [cycle]))
    elif cycle.files:
        print(f"{topic}: {cycle.rows} records in {cycle.files} new files, {cycle.bytes} bytes", flush=True)


# --- jobs -------------------------------------------------------------------------------------------------------------
# sql, pipeline audit, pipeline run: jobs on Spark over the topics of a cluster.
Master = Annotated[
    str | None, typer.Option("--master", show_default=False, help="URL of a Spark master. Default: this machine.")
]


@contextmanager
def spark_and_log(brokers: str | None, data_dir: Path | None, master: str | None) -> Iterator[tuple[SparkSession, Log]]:
    """Connect a client, then start Spark, in this order: an unreachable cluster is reported immediately."""
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
    query: Annotated[str, typer.Argument(help="A query; every topic is a table with the topic's name.")],
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of rows to print.")] = 100,
    master: Master = None,
    brokers: BrokersOption = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Query the log in SQL: each topic is a table over memory, disks and the tier, and always current.

    Raw topics have the columns topic, partition, seq, key, value, headers and timestamp. Topics with a schema have
    their own columns, and _seq, _index, _timestamp and so on.

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
        note(f"only the first {limit:,} rows are printed; use --limit for more")


def _plain(value: Any) -> Any:
    """Convert a value for JSON; bytes become text."""
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
    brokers: BrokersOption = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Check a whole topic on Spark: positions, sessions, gaps, checksums, and the table against the log.

    The audit reads all records that are durable now. Exit code 0: all promises hold. 1: findings, with positions.

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
    """Print the checked spans, and the findings."""
    print_table(
        f"topic {found.topic}, order {found.order}",
        ["lane", "indices", "entries", "batches", "records", "sessions", "in table", "compared", "lost", "skipped"],
        [
            [
                lane.lane,
                f"{lane.start_index:,} to {lane.stop_index:,}",
                f"{lane.entries:,}",
                f"{lane.batches:,}",
                f"{lane.records:,}",
                f"{lane.sessions:,}",
                f"{lane.in_table:,}",
                f"{lane.in_both:,}",
                f"{lane.lost:,}",
                f"{lane.skipped:,}",
            ]
            for lane in found.lanes
        ],
    )
    if unknown := sum(lane.sessions_unknown for lane in found.lanes):
        print(f"the order of {unknown:,} sessions was not checked: it is unknown whether they are strong")
    if found.holds:
        print(f"all promises hold: {found.spans} spans, {found.seconds:.1f} s")
        return
    print_table(
        f"broken: {', '.join(found.broken)}",
        ["promise", "kind", "lane", "index", "detail"],
        [[one.promise, one.kind, one.lane, one.index, one.detail] for one in found.findings[:100]],
    )


def run(
    file: Annotated[Path, typer.Argument(help="A Python file.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Its arguments, after --.")] = None,
    master: Master = None,
    brokers: BrokersOption = None,
    data_dir: DataDir = None,
) -> None:
    """Run your own job with `spark`, `log` and `brokers` ready, and every topic as a view.

    Examples:

        embarcadero pipeline run totals.py

        embarcadero pipeline run totals.py --master spark://10.0.0.7:7077 -- --day 2026-01-31
    """
    from embarcadero.spark.sql import run_job

    with spark_and_log(brokers, data_dir, master) as (spark, log):
        run_job(spark, log, file, arguments or [])


# --- copies -----------------------------------------------------------------------------------------------------------
# pipeline compact, replay, load: jobs that write a topic on Spark, and continue after a kill.
_INTERRUPTED = 130


@contextmanager
def _progress(what: str, unit: str) -> Iterator[ProgressReport]:
    """Show progress on standard error while a job runs; on Ctrl-C, print how to continue."""
    from rich.console import Console

    console = Console(stderr=True)
    with console.status(f"{what} ...") as status:

        def report(progress: JobProgress) -> None:
            status.update(f"{what}: {progress.done:,} of {progress.total:,} {unit}, steps now: {progress.steps:,}")

        try:
            yield report
        except KeyboardInterrupt:
            status.stop()
            note("stopped; the same command continues from here, without duplicates")
            raise typer.Exit(_INTERRUPTED) from None


def compact(
    topic: Annotated[str, typer.Argument(help="The topic to compact; its records have keys.")],
    into: Annotated[str | None, typer.Option(show_default=False, help="The target. Default: TOPIC_latest.")] = None,
    deletes: Annotated[
        str | None,
        typer.Option(
            show_default=False,
            help="Records that delete their key: none; a boolean column; COLUMN=VALUE. Default: an empty value; in a "
            "topic with a schema, nulls in all columns except the key.",
        ),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Rewrite the target: one record for each live key.")] = False,
    keep_s: Annotated[
        float,
        typer.Option(
            "--keep",
            "--keep-s",
            parser=duration_option(),
            metavar="DURATION",
            help="Time to keep the records that a rewrite replaced: 3600, 30m, 2h.",
        ),
    ] = 3600,
    master: Master = None,
    brokers: BrokersOption = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Keep TOPIC_latest: the newest record of each key. Each run reads only the records since the last run.

    Run it as often as the target should be updated. It can be killed at any time: the next run continues, and the
    target has no duplicates. Concurrent runs are safe.

    Examples:

        embarcadero pipeline compact customers

        embarcadero pipeline compact customers --deletes op=d --full --keep 0
    """
    from embarcadero.spark.compaction import compact as run_compact

    with spark_and_log(brokers, data_dir, master) as (spark, log), _progress(f"compacting {topic}", "records") as show:
        found = run_compact(spark, log, topic, into=into, deletes=deletes, full=full, keep_s=keep_s, report=show)
    if json:
        print_json(_job_facts(found))
    else:
        counts = f"records: {found.records:,}, steps now: {found.steps:,}"
        print(f"{found.into} follows {topic} up to seq {found.seq:,} ({counts})")


def replay(
    topic: Annotated[str, typer.Argument(help="The topic to copy from.")],
    into: Annotated[str, typer.Option(help="The topic to copy into; created like the source if missing.")],
    start: Annotated[
        str, typer.Option("--from", help='First record: earliest, latest, a seq, a time, or "2h ago".')
    ] = "earliest",
    end: Annotated[
        str, typer.Option("--to", help="End: latest, a seq (exclusive), or a time. The first run decides.")
    ] = "latest",
    rate: Annotated[
        int | None, typer.Option(min=1, show_default=False, help="Maximum number of records per second.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(show_default=False, help="Name of this job. Default: from the topic and the range.")
    ] = None,
    master: Master = None,
    brokers: BrokersOption = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Copy a range of a topic into another topic, each record once, with its key, headers, time and columns.

    After a kill, the same command continues. When all records are copied, it does nothing. Times are ISO with a zone,
    or relative: 2026-01-31T12:00:00Z, 10m ago. With --rate, the records of a second appear together.

    Examples:

        embarcadero pipeline replay orders --into orders_test

        embarcadero pipeline replay orders --from "2h ago" --to 120000 --into orders_test --rate 1000
    """
    from embarcadero.spark.replay import replay as run_replay

    with spark_and_log(brokers, data_dir, master) as (spark, log), _progress(f"replaying {topic}", "records") as show:
        found = run_replay(spark, log, topic, into=into, start=start, end=end, rate=rate, name=name, report=show)
    if json:
        print_json(_job_facts(found))
        return
    for lane, (low, high) in found.ends.items():
        print(f"{into} has seq {low:,} to {high:,} of {topic} (lane {lane})")
    print(f"records in total: {found.records:,}, steps now: {found.steps:,}")


def load(
    into: Annotated[str, typer.Argument(help="The topic; created with the columns of the source if missing.")],
    files: Annotated[
        list[str] | None, typer.Option(show_default=False, help="A file, folder or pattern; repeat for more.")
    ] = None,
    table: Annotated[str | None, typer.Option(show_default=False, help="An Iceberg table: namespace.name.")] = None,
    format: Annotated[
        str | None, typer.Option(show_default=False, help="parquet, csv or json. Default: from the names of files.")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(show_default=False, help="An option of Spark's reader, key=value: sep=;")
    ] = None,
    catalog: Annotated[
        list[str] | None,
        typer.Option(show_default=False, help="A property of the catalog, key=value. Default: tier.properties."),
    ] = None,
    snapshot: Annotated[
        int | None, typer.Option(show_default=False, help="A snapshot of the table. Default: the newest.")
    ] = None,
    columns: Annotated[str, typer.Option(help="Load only these columns, separated by commas.")] = "",
    key: Annotated[str | None, typer.Option(show_default=False, help="The key column of a new topic.")] = None,
    name: Annotated[
        str | None, typer.Option(show_default=False, help="Name of this job. Default: from the source and the topic.")
    ] = None,
    master: Master = None,
    brokers: BrokersOption = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Load files (Parquet, CSV, JSON) or an Iceberg table into a topic, each row once.

    After a kill, the same command continues. When all rows are loaded, it does nothing. Files must not change after the
    first start; for a table, the job loads the snapshot of the first start. Put the keys of an object store in the
    environment.

    Examples:

        embarcadero pipeline load orders --files /data/orders/ --format parquet --key id

        embarcadero pipeline load orders --files "/data/*.csv" --option "sep=;"

        embarcadero pipeline load orders --table shop.orders --catalog type=rest --catalog uri=http://catalog:8181
    """
    from embarcadero.spark.loading import load as run_load

    source = _source(files, table, format, option, catalog, snapshot, data_dir)
    names = [each.strip() for each in columns.split(",") if each.strip()]
    with spark_and_log(brokers, data_dir, master) as (spark, log), _progress(f"loading {into}", "files") as show:
        found = run_load(spark, log, into, source, key=key, columns=names, name=name, report=show)
    if json:
        print_json(_job_facts(found))
    else:
        print(f"{into} has all rows of the source (files: {found.files:,}, steps now: {found.steps:,})")


def _source(
    files: list[str] | None,
    table: str | None,
    format: str | None,
    option: list[str] | None,
    catalog: list[str] | None,
    snapshot: int | None,
    data_dir: Path | None,
) -> FilesSource | TableSource:
    from embarcadero.config.secrets import parse_properties
    from embarcadero.errors import BadValue
    from embarcadero.spark.loading import FilesSource, TableSource
    from embarcadero.tier.storage import TierSettings

    if (files is None) == (table is None):
        raise BadValue("exactly one of --files and --table is needed", "give --files or --table")
    if files is not None:
        if catalog or snapshot is not None:
            raise BadValue("--catalog and --snapshot need --table", "omit them")
        return FilesSource(paths=files, format=format, options=parse_properties(option or [], "--option"))
    if format is not None or option:
        raise BadValue("--format and --option need --files", "omit them")
    usual = TierSettings.of(cluster_config(data_dir), data_dir_or_default(data_dir)).catalog
    given = parse_properties(catalog, "--catalog") if catalog else usual
    return TableSource(name=table or "", catalog=given, snapshot=snapshot)


def _job_facts(found: Any) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(found)
