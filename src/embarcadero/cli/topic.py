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
        help="Time to keep an idle session: 12h, 7d, or seconds. Default: 1d.",
    ),
]
GapTimeout = Annotated[
    str | None,
    typer.Option(
        "--gap-timeout",
        "--gap-timeout-ms",
        metavar="DURATION",
        show_default=False,
        help="Timeout of a gap: 20ms, 1m, or milliseconds. Default: 30s (fence), 5ms (skip).",
    ),
]
ReplicasOption = Annotated[
    int | None,
    typer.Option(show_default=False, help="Copies on disk. Default: the number of live replicas, at most 3."),
]
DurableOn = Annotated[
    int | None, typer.Option(show_default=False, help="Copies that make a record durable. Default: the majority.")
]
RetentionBytes = Annotated[
    str | None, typer.Option(show_default=False, help="Remove the oldest records above this size: 10GiB. 0: never.")
]
RetentionTime = Annotated[
    str | None,
    typer.Option(
        "--retention",
        metavar="DURATION",
        show_default=False,
        help="Remove records after this time: 12h, 7d, 4w, or seconds. 0: never.",
    ),
]
_ORDER_HELP = (
    "total (2, default): one order for the topic; each publisher's order is kept, unless it opts out. strong (5): "
    "each publisher's order is always kept. none (0): one order per broker. local (1): like none, and a publisher "
    "stays with one broker."
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
    """Parse sizes and durations such as 10GiB or 7d for `create_topic` and `alter_topic`. Raises BadValue."""
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
    """Convert a topic for output, with its schemas as text."""
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
        int | None, typer.Option(show_default=False, help="Tags by which subscribers can filter. Default: 1.")
    ] = None,
    key: Annotated[
        str | None, typer.Option(show_default=False, help="Column of the schema whose values choose partitions.")
    ] = None,
    partitioner: Annotated[
        str | None, typer.Option(show_default=False, help="Hash of keys: murmur2 (default, as in Kafka) or crc32c.")
    ] = None,
    replicas: ReplicasOption = None,
    durable_on: DurableOn = None,
    retention_bytes: RetentionBytes = None,
    retention: RetentionTime = None,
    on_gap: Annotated[
        str | None,
        typer.Option(show_default=False, help="After the gap timeout: fence the session (default), or skip the gap."),
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
    hidden: Annotated[bool, typer.Option("--hidden", help="Include the cluster's internal topics.")] = False,
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
    """Show a topic: settings, start and end, ranges on disk, readers; for orders 0 and 1 also its lanes."""
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
    partitions: Annotated[
        int | None, typer.Option(show_default=False, help="A whole multiple of the present number.")
    ] = None,
    on_gap: Annotated[str | None, typer.Option(show_default=False, help="fence can change to skip.")] = None,
    gap_timeout_ms: GapTimeout = None,
    session_ttl_s: Ttl = None,
    replicas: Annotated[
        int | None, typer.Option(show_default=False, help="Copies on disk, from the next range on.")
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
    """Change the given settings of a topic.

    --replicas and --durable-on take effect with the next range: the sequencer seals the open range within seconds. More
    copies are refused while fewer replicas are live. Any other change of copies is refused while fewer replicas are
    live than make a record durable.

    A schema can get new nullable columns. Old and new publishers and readers keep working.

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
            since = "from the next range on, within seconds: " if topic.replicas else ""
            print(f"  {since}{price(topic.replicas, topic.durable_on)}")


@app.command()
def trim(
    name: Name,
    before_seq: Annotated[int | None, typer.Option(show_default=False, help="The first record to keep.")] = None,
    before_index: Annotated[int | None, typer.Option(show_default=False, help="The first batch to keep.")] = None,
    before_time: Annotated[
        str | None, typer.Option(show_default=False, help='Keep records since: "2026-01-31T12:00:00Z" or "7d ago".')
    ] = None,
    lane: Annotated[
        int | None, typer.Option(show_default=False, help="Orders 0 and 1: the lane to trim. Default: all, by time.")
    ] = None,
    brokers: BrokersOption = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Remove the oldest records of a topic. A batch is never split.

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
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
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
    """List the readers that report their progress: Spark streams, and programs that call `note_progress`.

    A reader without a report for a day is removed.

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
    """Remove a reader from `status` and `topic describe`.

    This removes only its reported progress. A query keeps its checkpoint. A running query appears again with its next
    report, within 30 seconds.

    Example:

        embarcadero topic remove-reader orders daily-sums
    """
    with connect(brokers, data_dir) as log:
        log.remove_reader(name, reader)
    if json:
        print_json({"topic": name, "removed": reader})
    else:
        print(f"removed reader {reader} of topic {name}; if it still runs, it appears again with its next report")


# --- recover ----------------------------------------------------------------------------------------------------------
# topic recover: show the copies that recovery of a topic's lanes waits for, and accept their loss.
_RECOVERY_COLUMNS = ["lane", "range", "copies", "needed", "answered", "missing"]
_POLL_S = 0.1
_WAIT_S = 60.0


@app.command()
def recover(
    name: Annotated[str, typer.Argument(help="Name of the topic.")],
    accept_loss: Annotated[
        bool, typer.Option("--accept-loss", help="Continue with the available copies. Records may be lost: see above.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    wait: Annotated[bool, typer.Option(help="Return when the topic accepts records again.")] = True,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Show the copies that a topic waits for after a loss of memory; with --accept-loss, continue without them.

    After a loss of memory, a lane recovers once enough of its replicas have reported their ends, so that no durable
    record can be missing. If the missing disks are permanently lost, --accept-loss recovers the records of the other
    replicas. Records that were acked with ack=2 may then be lost. Their positions become a LOST gap, and are never used
    again.

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
                without = f"without {_missing(short)}" if short else "on fewer disks than configured"
                question = f"Recover topic {name} {without}? Records acked with ack=2 may be lost."
                typer.confirm(question, abort=True, err=True)
            for lane in waiting:
                directory.ranges.accept_loss(lane["lane"])
            if wait:
                _until_recovered(folder, info, directory, name)
    _print(name, waiting, short, accept_loss, json)


def _waiting(info: ClusterInfo, directory: Directory, name: str) -> list[dict[str, Any]]:
    """The topic's lanes in recovery, with the number of replicas that answered, and the missing ones with reasons."""
    from pathlib import Path

    from embarcadero.fabric.shared import SharedFabric
    from embarcadero.node.cluster_view import ClusterView, LaneState

    scene = ClusterView(SharedFabric(Path(info.fabric), info.generation), directory)
    if name not in {topic.name for topic in scene.topics.values()}:
        raise UnknownTopic(f"there is no topic {name}", "`embarcadero topic list` lists all topics")
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
            raise TimedOut(f"topic {name} did not recover within {_WAIT_S:.0f} s", f"see {folder.logs}/sequencer.log")
        time.sleep(_POLL_S)
        folder.require_running()


def _print(name: str, waiting: list[dict[str, Any]], short: list[dict[str, Any]], accepted: bool, json: bool) -> None:
    if json:
        print_json({"topic": name, "waiting": waiting, "accepted": bool(accepted and waiting)})
        return
    if not waiting:
        print(f"topic {name} does not wait for recovery")
        return
    rows = [[*list(lane.values())[:-1], _missing([lane])] for lane in waiting]
    print_table(f"topic {name}", _RECOVERY_COLUMNS, rows)
    if accepted:
        print(f"topic {name} continues with the records of the other replicas")
    elif not short:
        print("enough copies have answered: the topic recovers by itself once they are complete")
    else:
        note("start the missing replicas; if their disks are permanently lost, use --accept-loss")


def price(replicas: int, durable_on: int) -> str:
    """Describe the costs and the safety of a choice of replicas in one sentence."""
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
