"""topic create, list, describe, alter, trim, delete, readers, remove-reader; `recover` has a file of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from embarcadero.cli import recover
from embarcadero.cli.output import (
    READER_COLUMNS,
    Brokers,
    DataDir,
    Json,
    connect,
    print_json,
    print_table,
    reader_row,
)
from embarcadero.cli.settings import Verbs
from embarcadero.client.times import parse_time
from embarcadero.errors import BadValue
from embarcadero.orders import order_label, order_name
from embarcadero.placement.rules import price
from embarcadero.types import Order

if TYPE_CHECKING:
    from collections.abc import Mapping

    from embarcadero.client.topics import TopicInfo
    from embarcadero.types import Range, Tail, Topic, TopicLane

app = Verbs(
    help="Create, list, describe, alter, trim, delete and recover topics; list and remove their readers.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Name = Annotated[str, typer.Argument(help="Name of the topic: A-Z a-z 0-9 . _ -")]
Schema = Annotated[
    str | None,
    typer.Option(show_default=False, help='Columns: "id:int64!, name:string", or a .json or .arrow file.'),
]
Ttl = Annotated[
    int | None, typer.Option(show_default=False, help="How long an idle session is kept. Default: 86400.")
]
Replicas = Annotated[
    int | None,
    typer.Option(show_default=False, help="Copies on disk. Default: as many as replicas are live, at most 3."),
]
DurableOn = Annotated[
    int | None, typer.Option(show_default=False, help="Copies that make a record durable. Default: the majority.")
]
RetentionBytes = Annotated[
    str | None, typer.Option(show_default=False, help="Beyond this, the oldest records go: 10GiB. 0: never.")
]
RetentionTime = Annotated[
    str | None, typer.Option("--retention", show_default=False, help="After this long, records go: 7d. 0: never.")
]
_ORDER_HELP = (
    "total (2, default): one order for all; a publisher's own order is kept unless it opts out. strong (5): always. "
    "none (0): an order per broker. local (1): and per publisher."
)
_COLUMNS = ["name", "order", "partitions", "on gap", "gap timeout ms", "schema version", "copies", "lane"]
_RANGE_COLUMNS = ["lane", "range", "start", "end", "durable on", "replicas"]
_LANE_COLUMNS = ["lane", "broker", "incarnation", "state", "end", "start seq", "next index", "next seq"]


def _row(topic: Topic) -> list[object]:
    lanes = str(topic.lane) if topic.order > Order.BROKER else f"{len(topic.lanes)} lanes"
    return [
        topic.name, order_label(topic.order), topic.partitions, topic.on_gap, topic.gap_timeout_ms,
        topic.schema_version, _copies(topic), lanes,
    ]  # fmt: skip


def _copies(topic: Topic) -> str:
    return f"durable on {topic.durable_on} of {topic.replicas}" if topic.replicas else "in memory"


def _quantity(text: str | None, units: Mapping[str, float], unit: str, example: str) -> int | None:
    """A size or a time as people write it; BadValue when it makes no sense."""
    from embarcadero.config.units import BadQuantity, quantity, whole

    try:
        return None if text is None else whole(quantity(text, units, 1, example), text, unit)
    except BadQuantity as error:
        raise BadValue(error.what, error.right) from None


def _retention(retention_bytes: str | None, retention: str | None) -> dict[str, int | None]:
    from embarcadero.config.units import BYTES, SECONDS

    return {
        "retention_bytes": _quantity(retention_bytes, BYTES, "bytes", "10GiB"),
        "retention_s": _quantity(retention, SECONDS, "seconds", "7d"),
    }


def _parsed(schema: str | None) -> Any:
    from embarcadero.client.schema_text import parse_schema

    return None if schema is None else parse_schema(schema)


def _facts(topic: TopicInfo) -> dict[str, Any]:
    """A topic for printing; its schemas as text."""
    import msgspec

    from embarcadero.types import id_text
    from embarcadero.wire.schemas import named

    settings = {name: getattr(topic, name) for name in topic.__struct_fields__ if name != "versions"}
    facts: dict[str, Any] = msgspec.to_builtins(settings)
    del facts["had_no_id"]
    facts["id"] = id_text(topic.id)
    if topic.tier is not None:
        facts["tier"]["topic_id"] = id_text(topic.tier.topic_id)
    return facts | {"schemas": {str(version): named(schema) for version, schema in topic.schemas.items()}}


@app.command()
def create(
    name: Name,
    order: Annotated[str | None, typer.Option(show_default=False, help=_ORDER_HELP)] = None,
    partitions: Annotated[
        int | None, typer.Option(show_default=False, help="Tags that group members share the log by. Default: 1.")
    ] = None,
    key: Annotated[
        str | None, typer.Option(show_default=False, help="Column of the schema whose values choose partitions.")
    ] = None,
    partitioner: Annotated[
        str | None, typer.Option(show_default=False, help="How keys choose: murmur2 (default, as Kafka) or crc32c.")
    ] = None,
    replicas: Replicas = None,
    durable_on: DurableOn = None,
    retention_bytes: RetentionBytes = None,
    retention: RetentionTime = None,
    on_gap: Annotated[
        str | None,
        typer.Option(show_default=False, help="A strong session's gap that stays: fence it (default), or skip."),
    ] = None,
    gap_timeout_ms: Annotated[
        int | None, typer.Option(show_default=False, help="How long a gap may stay. Default: 30000 (fence), 5 (skip).")
    ] = None,
    session_ttl_s: Ttl = None,
    schema: Schema = None,
    brokers: Brokers = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Create a topic.

    Examples:

        embarcadero topic create orders

        embarcadero topic create ticks --order strong --on-gap skip --gap-timeout-ms 20

        embarcadero topic create audit --replicas 3 --durable-on 2 --retention 30d

        embarcadero topic create trades --schema "symbol:string!, price:float64, at:timestamp[us, UTC]"

        embarcadero topic create visits --partitions 8 --schema "user:string!, page:string" --key user
    """
    columns, kept = _parsed(schema), _retention(retention_bytes, retention)
    with connect(brokers, data_dir) as log:
        topic = log.create_topic(
            name,
            order=order,
            partitions=partitions,
            key=key,
            partitioner=partitioner,
            replicas=replicas,
            durable_on=durable_on,
            on_gap=on_gap,
            gap_timeout_ms=gap_timeout_ms,
            session_ttl_s=session_ttl_s,
            schema=columns,
            **kept,
        )
    what_it_costs = price(topic.replicas, topic.durable_on)
    if json:
        print_json(_facts(topic) | {"price": what_it_costs})
    else:
        print(f"created topic {topic.name} (order {topic.order}, {order_name(topic.order)})")
        if topic.replicas:
            print(what_it_costs)


@app.command("list")
def list_topics(
    hidden: Annotated[bool, typer.Option("--hidden", help="Also those that the cluster made for itself.")] = False,
    brokers: Brokers = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """List all topics."""
    with connect(brokers, data_dir) as log:
        topics = log.topics(hidden=hidden)
    if json:
        print_json(topics)
    else:
        print_table("topics", _COLUMNS, [_row(topic) for topic in topics])


@app.command()
def describe(name: Name, brokers: Brokers = None, data_dir: DataDir = None, json: Json = False) -> None:
    """Show a topic: what it promises, where it starts and ends, its ranges on disk; of orders 0 and 1 its lanes."""
    with connect(brokers, data_dir) as log:
        topic, end, readers = log.describe(name), log.tail(name), log.readers(name)
    ends = {tail.lane: tail for tail in end.lanes}
    facts = _facts(topic) | {
        "start_index": end.start_index, "start_seq": end.start_seq, "next_index": end.index, "next_seq": end.seq,
        "lanes": [_lane_facts(lane, ends.get(lane.lane)) for lane in topic.lanes], "readers": readers,
    }  # fmt: skip
    if json:
        print_json(facts)
        return
    lanes, _, _ = facts.pop("lanes"), facts.pop("ranges"), facts.pop("readers")
    if topic.replicas:
        facts["price"] = price(topic.replicas, topic.durable_on)
    facts["order"] = order_label(topic.order)
    print_table(f"topic {name}", ["what", "value"], list(facts.items()))
    if topic.ranges:
        print_table("ranges", _RANGE_COLUMNS, [_range_row(range_) for range_ in topic.ranges])
    if topic.order <= Order.BROKER:
        print_table("lanes", _LANE_COLUMNS, [list(lane.values()) for lane in lanes])
    if readers:
        print_table("readers", READER_COLUMNS, [reader_row(reader) for reader in readers])


def _range_row(range_: Range) -> list[object]:
    replicas = ", ".join(f"{ref.replica}.{ref.incarnation}" for ref in range_.replicas)
    end = "open" if range_.open else range_.end
    return [range_.lane, range_.number, range_.start, end, f"{range_.durable_on} of {len(range_.replicas)}", replicas]


def _lane_facts(lane: TopicLane, end: Tail | None) -> dict[str, Any]:
    state = "open" if lane.open else "removed" if lane.removed else "closed"
    return {
        "lane": lane.lane,
        "broker": lane.broker,
        "incarnation": lane.incarnation,
        "state": state,
        "end": lane.end,
        "start_seq": end.start_seq if end else lane.end_seq,
        "next_index": end.index if end else lane.end,
        "next_seq": end.seq if end else lane.end_seq,
    }


@app.command()
def alter(
    name: Name,
    schema: Schema = None,
    partitions: Annotated[int | None, typer.Option(show_default=False, help="They grow by whole multiples.")] = None,
    on_gap: Annotated[str | None, typer.Option(show_default=False, help="fence may become skip.")] = None,
    gap_timeout_ms: Annotated[int | None, typer.Option(show_default=False, help="How long a gap may stay.")] = None,
    session_ttl_s: Ttl = None,
    replicas: Annotated[
        int | None, typer.Option(show_default=False, help="Copies of what is published from the next range on.")
    ] = None,
    durable_on: Annotated[
        int | None,
        typer.Option(show_default=False, help="Copies that make a record durable. A majority stays a majority."),
    ] = None,
    retention_bytes: RetentionBytes = None,
    retention: RetentionTime = None,
    brokers: Brokers = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Change a topic: only what is given.

    Other copies hold for what is published from the next range on: the open range is sealed within seconds, and the
    next one has them. More copies are refused while fewer replicas are live than that; any other change of copies,
    while fewer are live than make a record durable.

    A schema may get columns that may be null; old and new publishers and readers go on.

    Examples:

        embarcadero topic alter orders --gap-timeout-ms 60000

        embarcadero topic alter orders --retention-bytes 100GiB --retention 30d

        embarcadero topic alter trades --schema "symbol:string!, price:float64, at:timestamp[us, UTC], venue:string"
    """
    given: dict[str, Any] = {
        "schema": _parsed(schema), "partitions": partitions, "on_gap": on_gap, "gap_timeout_ms": gap_timeout_ms,
        "session_ttl_s": session_ttl_s, "replicas": replicas, "durable_on": durable_on,
        **_retention(retention_bytes, retention),
    }  # fmt: skip
    with connect(brokers, data_dir) as log:
        topic = log.alter_topic(name, **given)
    if json:
        print_json(_facts(topic))
    else:
        version = f" (schema version {topic.schema_version})" if topic.schema_version else ""
        print(f"altered topic {topic.name}{version}")
        if replicas is not None or durable_on is not None:
            since = "of what is published from the next range on, within seconds: " if topic.replicas else ""
            print(f"  {since}{price(topic.replicas, topic.durable_on)}")


@app.command()
def trim(
    name: Name,
    before_seq: Annotated[int | None, typer.Option(show_default=False, help="The first record to keep.")] = None,
    before_index: Annotated[int | None, typer.Option(show_default=False, help="The first batch to keep.")] = None,
    before_time: Annotated[
        str | None, typer.Option(show_default=False, help='Keep what came since: "2026-01-31T12:00:00Z" or "7d ago".')
    ] = None,
    lane: Annotated[
        int | None, typer.Option(show_default=False, help="Orders 0 and 1: the lane to trim. Default: all, by time.")
    ] = None,
    brokers: Brokers = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Give up the oldest records of a topic. No batch is split.

    Examples:

        embarcadero topic trim orders --before-seq 1000000

        embarcadero topic trim orders --before-time "7d ago"
    """
    when = None if before_time is None else parse_time(before_time)
    with connect(brokers, data_dir) as log:
        start = log.trim(name, before_seq=before_seq, before_index=before_index, before_time=when, lane=lane)
    if json:
        print_json({"topic": name, "start_index": start.index, "start_seq": start.seq})
    else:
        print(f"topic {name} starts at seq {start.seq} (batch {start.index})")


@app.command()
def delete(
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
    brokers: Brokers = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Delete a topic with all its records.

    Example:

        embarcadero topic delete orders --yes
    """
    if not yes:
        typer.confirm(f"Delete topic {name} with all its records?", abort=True, err=True)
    with connect(brokers, data_dir) as log:
        log.delete_topic(name)
    if json:
        print_json({"deleted": name})
    else:
        print(f"deleted topic {name}")


@app.command()
def readers(name: Name, brokers: Brokers = None, data_dir: DataDir = None, json: Json = False) -> None:
    """List the readers that told how far they are: streams of Spark, and programs that call `note_progress`.

    A reader that is silent for a day is forgotten.

    Example:

        embarcadero topic readers orders
    """
    with connect(brokers, data_dir) as log:
        found = log.readers(name)
    if json:
        print_json(found)
    else:
        print_table("readers", READER_COLUMNS, [reader_row(reader) for reader in found])


@app.command()
def remove_reader(
    name: Name,
    reader: Annotated[str, typer.Argument(help="Name of the reader, as `topic readers` shows it.")],
    brokers: Brokers = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Forget a reader: `status` and `topic describe` show it no more.

    Only the note of how far it was goes. A query keeps its checkpoint, and one that still runs comes back with its next
    report, within 30 seconds.

    Example:

        embarcadero topic remove-reader orders daily-sums
    """
    with connect(brokers, data_dir) as log:
        log.remove_reader(name, reader)
    if json:
        print_json({"topic": name, "removed": reader})
    else:
        print(f"removed reader {reader} of topic {name}; one that still runs comes back with its next report")


app.command()(recover.recover)
