"""topic create, list, describe, alter, trim, delete, readers, remove-reader, recover."""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from embarcadero.cli.output import (
    READER_COLUMNS,
    BrokersOption,
    DataDir,
    Json,
    Verbs,
    connect,
    data_dir_or_default,
    note,
    print_json,
    print_table,
    reader_row,
)
from embarcadero.errors import BadValue, TimedOut, UnknownTopic
from embarcadero.orders import order_label, order_name
from embarcadero.types import Order

if TYPE_CHECKING:
    from embarcadero.client.results import TopicInfo
    from embarcadero.node.folder import ClusterFolder, ClusterInfo
    from embarcadero.placement.directory import Directory
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
    str | None,
    typer.Option(
        "--session-ttl",
        "--session-ttl-s",
        metavar="DURATION",
        show_default=False,
        help="How long an idle session is kept: 12h, 7d, or seconds. Default: 1d.",
    ),
]
GapTimeout = Annotated[
    str | None,
    typer.Option(
        "--gap-timeout",
        "--gap-timeout-ms",
        metavar="DURATION",
        show_default=False,
        help="How long a gap may stay: 20ms, 1m, or milliseconds. Default: 30s (fence), 5ms (skip).",
    ),
]
ReplicasOption = Annotated[
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
    str | None,
    typer.Option(
        "--retention",
        metavar="DURATION",
        show_default=False,
        help="Records are deleted after this long: 12h, 7d, 4w, or seconds. 0: never.",
    ),
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
        topic.name,
        order_label(topic.order),
        topic.partitions,
        topic.on_gap,
        topic.gap_timeout_ms,
        topic.schema_version,
        _copies(topic),
        lanes,
    ]


def _copies(topic: Topic) -> str:
    return f"durable on {topic.durable_on} of {topic.replicas}" if topic.replicas else "in memory"


def _limits(
    retention_bytes: str | None, retention: str | None, gap_timeout: str | None, session_ttl: str | None
) -> dict[str, int | None]:
    """Sizes and durations as people write them, as `create_topic` and `alter_topic` take them. Raises BadValue."""
    from embarcadero.client.arguments import whole_in_unit
    from embarcadero.config.key import BYTES, BadQuantity, quantity, whole

    try:
        size = None if retention_bytes is None else quantity(retention_bytes, BYTES, 1, "10GiB")
        most = None if size is None else whole(size, retention_bytes, "bytes")
    except BadQuantity as error:
        raise BadValue(f"--retention-bytes: {error.what}", error.right) from None
    return {
        "retention_bytes": most,
        "retention_s": whole_in_unit("--retention", retention, 1.0),
        "gap_timeout_ms": whole_in_unit("--gap-timeout", gap_timeout, 1e-3),
        "session_ttl_s": whole_in_unit("--session-ttl", session_ttl, 1.0),
    }


def _parsed(schema: str | None) -> Any:
    from embarcadero.client.arguments import parse_schema

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
    replicas: ReplicasOption = None,
    durable_on: DurableOn = None,
    retention_bytes: RetentionBytes = None,
    retention: RetentionTime = None,
    on_gap: Annotated[
        str | None,
        typer.Option(show_default=False, help="A strong session's gap that stays: fence it (default), or skip."),
    ] = None,
    gap_timeout_ms: GapTimeout = None,
    session_ttl_s: Ttl = None,
    schema: Schema = None,
    brokers: BrokersOption = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Create a topic.

    Examples:

        embarcadero topic create orders

        embarcadero topic create ticks --order strong --on-gap skip --gap-timeout 20ms

        embarcadero topic create audit --replicas 3 --durable-on 2 --retention 30d

        embarcadero topic create trades --schema "symbol:string!, price:float64, at:timestamp[us, UTC]"

        embarcadero topic create visits --partitions 8 --schema "user:string!, page:string" --key user
    """
    columns, bounds = _parsed(schema), _limits(retention_bytes, retention, gap_timeout_ms, session_ttl_s)
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
            schema=columns,
            **bounds,
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
    brokers: BrokersOption = None,
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
def describe(name: Name, brokers: BrokersOption = None, data_dir: DataDir = None, json: Json = False) -> None:
    """Show a topic: what it promises, where it starts and ends, its ranges on disk; of orders 0 and 1 its lanes."""
    with connect(brokers, data_dir) as log:
        topic, end, readers = log.describe(name), log.tail(name), log.readers(name)
    ends = {tail.lane: tail for tail in end.lanes}
    facts = _facts(topic) | {
        "start_index": end.start_index,
        "start_seq": end.start_seq,
        "next_index": end.index,
        "next_seq": end.seq,
        "lanes": [_lane_facts(lane, ends.get(lane.lane)) for lane in topic.lanes],
        "readers": readers,
    }
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
    gap_timeout_ms: GapTimeout = None,
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
    brokers: BrokersOption = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Change a topic: only what is given.

    Other copies hold for what is published from the next range on: the open range is sealed within seconds, and the
    next one has them. More copies are refused while fewer replicas are live than that; any other change of copies,
    while fewer are live than make a record durable.

    A schema may get columns that may be null; old and new publishers and readers go on.

    Examples:

        embarcadero topic alter orders --gap-timeout 1m

        embarcadero topic alter orders --retention-bytes 100GiB --retention 30d

        embarcadero topic alter trades --schema "symbol:string!, price:float64, at:timestamp[us, UTC], venue:string"
    """
    given: dict[str, Any] = {
        "schema": _parsed(schema),
        "partitions": partitions,
        "on_gap": on_gap,
        "replicas": replicas,
        "durable_on": durable_on,
        **_limits(retention_bytes, retention, gap_timeout_ms, session_ttl_s),
    }
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
        str | None, typer.Option(show_default=False, help='Oldest time to keep: "2026-01-31T12:00:00Z" or "7d ago".')
    ] = None,
    lane: Annotated[
        int | None, typer.Option(show_default=False, help="Orders 0 and 1: the lane to trim. Default: all, by time.")
    ] = None,
    brokers: BrokersOption = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Give up the oldest records of a topic. No batch is split.

    Examples:

        embarcadero topic trim orders --before-seq 1000000

        embarcadero topic trim orders --before-time "7d ago"
    """
    from embarcadero.client.arguments import parse_time

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
    brokers: BrokersOption = None,
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
def readers(name: Name, brokers: BrokersOption = None, data_dir: DataDir = None, json: Json = False) -> None:
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
    brokers: BrokersOption = None,
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


# --- recover ----------------------------------------------------------------------------------------------------------
# topic recover: what keeps a topic's lanes from coming back, and an operator's word that losing it is better.
_RECOVERY_COLUMNS = ["lane", "range", "copies", "needed", "answered", "missing"]
_POLL_S = 0.1
_WAIT_S = 60.0


@app.command()
def recover(
    name: Annotated[str, typer.Argument(help="Name of the topic.")],
    accept_loss: Annotated[
        bool, typer.Option("--accept-loss", help="Go on with the copies that are there. The price: see above.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
    wait: Annotated[bool, typer.Option(help="Return when the topic takes records again.")] = True,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Show which copies a topic waits for after a loss of memory; with --accept-loss, go on without them.

    A lane whose memory was lost comes back once enough of its replicas have said what they have: so many that no
    durable record can be missing. If those disks are gone for good, --accept-loss recovers what the others have. The
    price: records that were acked with ack=2 may be lost. Their positions become a LOST gap, and are never used again.

    Examples:

        embarcadero topic recover orders

        embarcadero topic recover orders --accept-loss
    """
    from embarcadero.node.folder import ClusterFolder
    from embarcadero.placement.directory import Directory
    from embarcadero.placement.store import open_store

    folder = ClusterFolder(data_dir_or_default(data_dir))
    info = folder.require_running()
    with closing(open_store(folder.store_path)) as store:
        directory = Directory(store)
        waiting = _waiting(info, directory, name)
        short = [lane for lane in waiting if lane["answered"] < lane["needed"]]
        if accept_loss and waiting:
            if not yes:
                without = f"without {_missing(short)}" if short else "on fewer disks than it wants"
                question = f"Recover topic {name} {without}? Records acked with ack=2 may be lost."
                typer.confirm(question, abort=True, err=True)
            for lane in waiting:
                directory.ranges.accept_loss(lane["lane"])
            if wait:
                _until_recovered(folder, info, directory, name)
    _print(name, waiting, short, accept_loss, json)


def _waiting(info: ClusterInfo, directory: Directory, name: str) -> list[dict[str, Any]]:
    """The topic's lanes that are being recovered: who has answered, who is missing and why."""
    from pathlib import Path

    from embarcadero.fabric.shared import SharedFabric
    from embarcadero.node.cluster_view import ClusterView, LaneState

    scene = ClusterView(SharedFabric(Path(info.fabric), info.generation), directory)
    if name not in {topic.name for topic in scene.topics.values()}:
        raise UnknownTopic(f"there is no topic {name}", "`embarcadero topic list` lists them")
    found = []
    for range_ in scene.last.values():
        if scene.topic(range_.lane) != name or scene.state(range_) is not LaneState.RECOVERING:
            continue
        silent = {ref.replica: why for ref in range_.replicas if (why := scene.silence(range_, ref))}
        copies = len(range_.replicas)
        found.append(
            {
                "lane": range_.lane,
                "range": range_.number,
                "copies": copies,
                "needed": copies - range_.durable_on + 1,
                "answered": copies - len(silent),
                "missing": silent,
            }
        )
    return found


def _missing(lanes: list[dict[str, Any]]) -> str:
    found = {number: why for lane in lanes for number, why in lane["missing"].items()}
    return ", ".join(f"replica {number} ({why})" for number, why in sorted(found.items()))


def _until_recovered(folder: ClusterFolder, info: ClusterInfo, directory: Directory, name: str) -> None:
    give_up = time.monotonic() + _WAIT_S
    while _waiting(info, directory, name):
        if time.monotonic() > give_up:
            raise TimedOut(f"topic {name} did not come back within {_WAIT_S:.0f} s", f"see {folder.logs}/sequencer.log")
        time.sleep(_POLL_S)
        folder.require_running()


def _print(name: str, waiting: list[dict[str, Any]], short: list[dict[str, Any]], accepted: bool, json: bool) -> None:
    if json:
        print_json({"topic": name, "waiting": waiting, "accepted": bool(accepted and waiting)})
        return
    if not waiting:
        print(f"topic {name} waits for nothing")
        return
    rows = [[*list(lane.values())[:-1], _missing([lane])] for lane in waiting]
    print_table(f"topic {name}", _RECOVERY_COLUMNS, rows)
    if accepted:
        print(f"topic {name} goes on with what the others have")
    elif not short:
        print("enough copies have answered: it comes back by itself, once they are complete")
    else:
        note("start the replicas that are missing; if their disks are gone for good: --accept-loss")


def price(replicas: int, durable_on: int) -> str:
    """What a choice of replicas costs and gives, in one sentence."""
    if replicas == 0:
        return "records are in memory only: they end with the cluster's memory"
    needed = replicas - durable_on + 1
    which = (
        "its one replica"
        if replicas == 1
        else "both replicas"
        if needed == replicas == 2
        else f"all {replicas} replicas"
        if needed == replicas
        else f"any {needed} of {replicas} replicas"
    )
    recovery = f"after a loss of memory, recovery needs {which}"
    if durable_on < replicas:
        return f"durable records are on {durable_on} of {replicas} disks; {recovery}"
    disks = "one disk" if replicas == 1 else f"all {replicas} disks, so the slowest one sets the pace"
    return f"durable records are on {disks}; {recovery}"
