"""pipeline compact, replay, load: jobs that write a topic on Spark, and go on where they were killed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from embarcadero.cli.jobs import Master, spark_and_log
from embarcadero.cli.output import Brokers, DataDir, Json, data_dir_or_default, note, print_json
from embarcadero.cli.pipeline import cluster_config

if TYPE_CHECKING:
    from embarcadero.spark.jobs import Progress, Report
    from embarcadero.spark.loading import FilesSource, TableSource

_INTERRUPTED = 130


@contextmanager
def _going_on(what: str, unit: str) -> Iterator[Report]:
    """Progress on standard error while a job runs; Ctrl-C ends it with a word on how to go on."""
    from rich.console import Console

    console = Console(stderr=True)
    with console.status(f"{what} ...") as status:

        def report(progress: Progress) -> None:
            status.update(f"{what}: {progress.done:,} of {progress.total:,} {unit}, steps now: {progress.steps:,}")

        try:
            yield report
        except KeyboardInterrupt:
            status.stop()
            note("stopped; the same command goes on from here, and nothing is there twice")
            raise typer.Exit(_INTERRUPTED) from None


def compact(
    topic: Annotated[str, typer.Argument(help="The topic to compact; its records have keys.")],
    into: Annotated[str | None, typer.Option(show_default=False, help="The target. Default: TOPIC_latest.")] = None,
    deletes: Annotated[
        str | None,
        typer.Option(
            show_default=False,
            help="Which records delete their key: none; a boolean column; COLUMN=VALUE. Default: an empty value; in a "
            "topic with a schema, nulls in all columns but the key.",
        ),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Rewrite the target: one record for each live key.")] = False,
    keep_s: Annotated[float, typer.Option(min=0, help="Trim what a rewrite replaced after so many seconds.")] = 3600,
    master: Master = None,
    brokers: Brokers = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Keep TOPIC_latest: the newest record of each key. Only what came since the last run is read.

    Run it as often as the target should be brought up to date. It may be killed at any moment: the next run goes on,
    and nothing is in the target twice. Two at once do no harm.

    Examples:

        embarcadero pipeline compact customers

        embarcadero pipeline compact customers --deletes op=d --full --keep-s 0
    """
    from embarcadero.spark.compaction import compact as run_compact

    with spark_and_log(brokers, data_dir, master) as (spark, log), _going_on(f"compacting {topic}", "records") as tell:
        found = run_compact(spark, log, topic, into=into, deletes=deletes, full=full, keep_s=keep_s, report=tell)
    if json:
        print_json(_facts(found))
    else:
        counts = f"records: {found.records:,}, steps now: {found.steps:,}"
        print(f"{found.into} follows {topic} up to seq {found.seq:,} ({counts})")


def replay(
    topic: Annotated[str, typer.Argument(help="The topic to copy from.")],
    into: Annotated[str, typer.Option(help="The topic to copy into; created like the first one if missing.")],
    start: Annotated[
        str, typer.Option("--from", help="First record: earliest, latest, a seq, or a time.")
    ] = "earliest",
    end: Annotated[
        str, typer.Option("--to", help="Where to end: latest, a seq (exclusive), or a time. Kept from the first start.")
    ] = "latest",
    rate: Annotated[
        int | None, typer.Option(min=1, show_default=False, help="At most so many records a second.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(show_default=False, help="A name of this job. Default: made of topic and range.")
    ] = None,
    master: Master = None,
    brokers: Brokers = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Copy a range of a topic into another one, each record once: keys, headers, times and columns as they are.

    The same command goes on where it was killed, and does nothing when all is copied. Times are ISO with a zone, or so
    long ago: 2026-01-31T12:00:00Z, 10m ago. With --rate, the records of a second appear at once.

    Examples:

        embarcadero pipeline replay orders --into orders_test

        embarcadero pipeline replay orders --from "2h ago" --to 120000 --into orders_test --rate 1000
    """
    from embarcadero.spark.replay import replay as run_replay

    with spark_and_log(brokers, data_dir, master) as (spark, log), _going_on(f"replaying {topic}", "records") as tell:
        found = run_replay(spark, log, topic, into=into, start=start, end=end, rate=rate, name=name, report=tell)
    if json:
        print_json(_facts(found))
        return
    for lane, (low, high) in found.ends.items():
        print(f"{into} has seq {low:,} to {high:,} of {topic} (lane {lane})")
    print(f"records in all: {found.records:,}, steps now: {found.steps:,}")


def load(
    into: Annotated[str, typer.Argument(help="The topic; created with the columns of the source if missing.")],
    files: Annotated[
        list[str] | None, typer.Option(show_default=False, help="A file, folder or pattern; give it again for more.")
    ] = None,
    table: Annotated[str | None, typer.Option(show_default=False, help="An Iceberg table: namespace.name.")] = None,
    format: Annotated[
        str | None, typer.Option(show_default=False, help="parquet, csv or json. Default: by the names of files.")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(show_default=False, help="An option of Spark's reader, key=value: sep=;")
    ] = None,
    catalog: Annotated[
        list[str] | None,
        typer.Option(show_default=False, help="A property of its catalog, key=value. Default: tier.properties."),
    ] = None,
    snapshot: Annotated[
        int | None, typer.Option(show_default=False, help="A snapshot of the table. Default: the newest one.")
    ] = None,
    columns: Annotated[str, typer.Option(help="Load only these columns, with commas.")] = "",
    key: Annotated[str | None, typer.Option(show_default=False, help="The key column of a new topic.")] = None,
    name: Annotated[
        str | None, typer.Option(show_default=False, help="A name of this job. Default: made of what is loaded.")
    ] = None,
    master: Master = None,
    brokers: Brokers = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Load files (Parquet, CSV, JSON) or an Iceberg table into a topic, each row once.

    The same command goes on where it was killed, and does nothing when all is loaded. Files must stay as they were at
    the first start; of a table, the snapshot of the first start is loaded. Keys of a store belong in the environment.

    Examples:

        embarcadero pipeline load orders --files /data/orders/ --format parquet --key id

        embarcadero pipeline load orders --files "/data/*.csv" --option "sep=;"

        embarcadero pipeline load orders --table shop.orders --catalog type=rest --catalog uri=http://catalog:8181
    """
    from embarcadero.spark.loading import load as run_load

    source = _source(files, table, format, option, catalog, snapshot, data_dir)
    names = [each.strip() for each in columns.split(",") if each.strip()]
    with spark_and_log(brokers, data_dir, master) as (spark, log), _going_on(f"loading {into}", "files") as tell:
        found = run_load(spark, log, into, source, key=key, columns=names, name=name, report=tell)
    if json:
        print_json(_facts(found))
    else:
        print(f"{into} has all rows of the source (files: {found.files:,}, steps now: {found.steps:,})")


def _source(
    files: list[str] | None, table: str | None, format: str | None, option: list[str] | None,
    catalog: list[str] | None, snapshot: int | None, data_dir: Path | None,
) -> FilesSource | TableSource:  # fmt: skip
    from embarcadero.errors import BadValue
    from embarcadero.spark.loading import FilesSource, TableSource
    from embarcadero.tier.settings import TierSettings, parse_properties

    if (files is None) == (table is None):
        raise BadValue("files and a table are two sources, and one is needed", "give --files or --table")
    if files is not None:
        if catalog or snapshot is not None:
            raise BadValue("--catalog and --snapshot go with --table", "leave them out")
        return FilesSource(paths=files, format=format, options=parse_properties(option or [], "--option"))
    if format is not None or option:
        raise BadValue("--format and --option go with --files", "leave them out")
    usual = TierSettings.of(cluster_config(data_dir), data_dir_or_default(data_dir)).catalog
    given = parse_properties(catalog, "--catalog") if catalog else usual
    return TableSource(name=table or "", catalog=given, snapshot=snapshot)


def _facts(found: Any) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(found)
