"""topic create, list, describe, delete."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from embarcadero.cli.output import Brokers, DataDir, Json, connect, print_json, print_table
from embarcadero.types import Order

if TYPE_CHECKING:
    from embarcadero.types import Tail, Topic, TopicLane

app = typer.Typer(help="Create, list, describe and delete topics.", no_args_is_help=True, rich_markup_mode=None)

Name = Annotated[str, typer.Argument(help="Name of the topic: A-Z a-z 0-9 . _ -")]
_ORDER_HELP = "2: one total order. 5: and each session's order, gap-free. 0: an order per broker. 1: and per session."
_COLUMNS = ["name", "order", "partitions", "on gap", "gap timeout ms", "lane"]
_LANE_COLUMNS = ["lane", "broker", "incarnation", "state", "end", "next index", "next seq"]


def _row(topic: Topic) -> list[object]:
    lanes = str(topic.lane) if topic.order > Order.BROKER else f"{len(topic.lanes)} lanes"
    return [topic.name, topic.order, topic.partitions, topic.on_gap, topic.gap_timeout_ms, lanes]


@app.command()
def create(
    name: Name,
    order: Annotated[int, typer.Option(help=_ORDER_HELP)] = 2,
    partitions: Annotated[int, typer.Option(help="Tags that group members share the log by.")] = 1,
    replicas: Annotated[int, typer.Option(help="Copies on disk.")] = 0,
    durable_on: Annotated[int, typer.Option(help="Copies that make a record durable.")] = 0,
    on_gap: Annotated[str, typer.Option(help="Order 5, a gap that stays: fence the session, or skip it.")] = "fence",
    gap_timeout_ms: Annotated[
        int | None, typer.Option(show_default=False, help="How long a gap may stay. Default: 30000 (fence), 5 (skip).")
    ] = None,
    brokers: Brokers = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Create a topic.

    Examples:

        embarcadero topic create orders

        embarcadero topic create ticks --order 5 --on-gap skip --gap-timeout-ms 20
    """
    with connect(brokers, data_dir) as log:
        topic = log.create_topic(
            name,
            order=order,
            partitions=partitions,
            replicas=replicas,
            durable_on=durable_on,
            on_gap=on_gap,
            gap_timeout_ms=gap_timeout_ms,
        )
    if json:
        print_json(topic)
    else:
        print(f"created topic {topic.name} (order {topic.order})")


@app.command("list")
def list_topics(brokers: Brokers = None, data_dir: DataDir = None, json: Json = False) -> None:
    """List all topics."""
    with connect(brokers, data_dir) as log:
        topics = log.topics()
    if json:
        print_json(topics)
    else:
        print_table("topics", _COLUMNS, [_row(topic) for topic in topics])


@app.command()
def describe(name: Name, brokers: Brokers = None, data_dir: DataDir = None, json: Json = False) -> None:
    """Show a topic: what it promises, and where it ends; of orders 0 and 1 also its lanes."""
    import msgspec

    with connect(brokers, data_dir) as log:
        topic, end = log.describe(name), log.tail(name)
    facts: dict[str, Any] = msgspec.to_builtins(topic) | {"next_index": end.index, "next_seq": end.seq}
    ends = {tail.lane: tail for tail in end.lanes}
    facts["lanes"] = [_lane_facts(lane, ends.get(lane.lane)) for lane in topic.lanes]
    if json:
        print_json(facts)
        return
    lanes = facts.pop("lanes")
    print_table(f"topic {name}", ["what", "value"], list(facts.items()))
    if topic.order <= Order.BROKER:
        print_table("lanes", _LANE_COLUMNS, [list(lane.values()) for lane in lanes])


def _lane_facts(lane: TopicLane, end: Tail | None) -> dict[str, Any]:
    state = "open" if lane.open else "removed" if lane.removed else "closed"
    return {
        "lane": lane.lane,
        "broker": lane.broker,
        "incarnation": lane.incarnation,
        "state": state,
        "end": lane.end,
        "next_index": end.index if end else lane.end,
        "next_seq": end.seq if end else lane.end_seq,
    }


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
