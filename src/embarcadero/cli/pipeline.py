"""pipeline tier: a topic as a table. The other jobs are in jobs.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from embarcadero.cli.output import Brokers, DataDir, Json, connect, data_dir_or_default, note, print_json, print_table
from embarcadero.cli.settings import Verbs, settings

if TYPE_CHECKING:
    from pathlib import Path

    from embarcadero.config import Config
    from embarcadero.tier.engines import Engine
    from embarcadero.tier.job import Cycle, TierJob

_HELP = "Run jobs over topics: tier, audit, compact, replay, load, or one of your own."
app = Verbs(help=_HELP, no_args_is_help=True, rich_markup_mode=None)

_MASTER = "local[*]"


@app.command()
def tier(
    topic: Annotated[str, typer.Option(help="The topic to tier.")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
    take_over: Annotated[bool, typer.Option("--take-over", help="Depose another job that tiers this topic.")] = False,
    master: Annotated[
        str | None, typer.Option(show_default=False, help="Spark's master. Default: tier.master, else local[*].")
    ] = None,
    no_spark: Annotated[bool, typer.Option("--no-spark", help="Write the files in this process.")] = False,
    brokers: Brokers = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Keep a topic's durable records as Parquet files in an Iceberg table.

    What is in the table stays readable when brokers and replicas have given it up, after tier.hot_retention_s. Without
    --follow it ends when all that is durable now is in the table. It may be stopped or killed at any moment: the next
    one goes on from the table, and nothing is there twice. See `tier.*` in the configuration.

    Examples:

        embarcadero pipeline tier --topic orders

        embarcadero pipeline tier --topic orders --follow --master spark://10.0.0.7:7077
    """
    import os
    import signal
    from threading import Event

    from embarcadero.tier.engines import ProcessEngine
    from embarcadero.tier.job import TierJob
    from embarcadero.tier.settings import TierSettings

    config = cluster_config(data_dir)
    with connect(brokers, data_dir) as log:
        engine: Engine = ProcessEngine(log)
        if not no_spark:
            from embarcadero.spark.tiering import SparkEngine

            engine = SparkEngine(log.address, master or config.tier.master or _MASTER)
        where = TierSettings.of(config, data_dir_or_default(data_dir))
        holder = f"pipeline-{os.getpid()}"
        with TierJob(log, topic, where, engine, holder=holder, take_over=take_over) as job:
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
    """Ours, on top of that of the cluster in this folder, if one runs there."""
    from embarcadero.errors import NotRunning
    from embarcadero.node.cluster import ClusterFolder

    try:
        return settings(base=ClusterFolder(data_dir_or_default(data_dir)).require_running().config)
    except NotRunning:
        return settings()


def _facts(topic: str, cycles: list[Cycle]) -> dict[str, Any]:
    frontiers = {lane: {"index": index, "seq": seq} for lane, (index, seq) in cycles[-1].frontiers.items()}
    return {
        "topic": topic, "files": sum(each.files for each in cycles), "rows": sum(each.rows for each in cycles),
        "bytes": sum(each.bytes for each in cycles), "frontiers": frontiers, "trimmed": cycles[-1].trimmed,
        "collected": sum(len(each.collected) for each in cycles),
    }  # fmt: skip


def _print_done(job: TierJob, topic: str, cycles: list[Cycle], json: bool) -> None:
    facts = _facts(topic, cycles)
    if json:
        print_json(facts | {"table": job.table})
        return
    rows = [[lane, place["index"], place["seq"]] for lane, place in facts["frontiers"].items()]
    print_table(f"{topic} in {job.table}", ["lane", "below index", "below seq"], rows)
    print(f"{facts['rows']} records in {facts['files']} new files, {facts['bytes']} bytes")


def _print_cycle(topic: str, cycle: Cycle, json: bool) -> None:
    if json:
        print_json(_facts(topic, [cycle]))
    elif cycle.files:
        print(f"{topic}: {cycle.rows} records in {cycle.files} new files, {cycle.bytes} bytes", flush=True)
