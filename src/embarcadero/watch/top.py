"""The display of `top`: the state of the cluster, computed from two scrapes of its metrics."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from embarcadero.orders import order_name
from embarcadero.types import Member, MemberState, Order, Topic, TopicLane
from embarcadero.watch.endpoints import Change, Scrape, quantile


class BrokerRow(msgspec.Struct, frozen=True, kw_only=True):
    """One broker. `state`: live, silent (its process does not answer), or dead."""

    broker: int
    incarnation: int
    address: str
    state: str
    connections: int = 0
    in_bytes_s: float = 0.0
    in_records_s: float = 0.0
    out_bytes_s: float = 0.0
    out_records_s: float = 0.0
    pending: int = 0
    unresolved: int = 0
    credit_bytes: int = 0
    log_occupied: float = 0.0
    backpressure: bool = False


class TopicRow(msgspec.Struct, frozen=True, kw_only=True):
    """One topic. `lag`: batches that its slowest reader is behind; None without readers."""

    topic: str
    order: int
    in_records_s: float = 0.0
    in_bytes_s: float = 0.0
    out_records_s: float = 0.0
    ordered_index: int = 0
    ordered_seq: int = 0
    readers: int = 0
    lag: int | None = None
    sessions: int = 0
    held: int = 0


class SequencerRow(msgspec.Struct, frozen=True, kw_only=True):
    """The sequencer."""

    state: str
    epoch: int = 0
    rounds_s: float = 0.0
    entries_s: float = 0.0
    entries_per_round: float = 0.0
    held: int = 0
    held_slots: int = 0
    sessions: int = 0


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Quantiles in seconds; None without observations."""

    what: str
    count: int
    p50: float | None
    p99: float | None


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster at one moment, with the rates of the previous seconds."""

    cluster: str
    time: str
    brokers: list[BrokerRow]
    topics: list[TopicRow]
    sequencer: SequencerRow
    latencies: list[Latency]

    @property
    def in_records_s(self) -> float:
        """Records received by all brokers per second."""
        return sum(broker.in_records_s for broker in self.brokers)


class StoreFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Members, topics, lanes and epoch, from the store."""

    cluster: str
    members: list[Member]
    topics: list[Topic]
    lanes: list[TopicLane] = []
    epoch: int


def picture(facts: StoreFacts, time: str, before: dict[str, Scrape], now: dict[str, Scrape]) -> Picture:
    """Combine the facts of the store and the metrics of the nodes. Nodes that do not answer are shown as silent."""
    nodes = {name: Change(before.get(name), scrape) for name, scrape in now.items()}
    changes = {role: change for name, change in nodes.items() for role in name.split(",")}
    newest = {member.broker: member for member in facts.members}  # sorted by incarnation: the last one stays
    brokers = {number: changes.get(f"broker:{number}") for number in newest}
    sequencer = _leader(changes)
    known = list(nodes.values())
    return Picture(
        cluster=facts.cluster,
        time=time,
        brokers=[_broker(newest[number], change) for number, change in brokers.items()],
        topics=[_topic(topic, facts.lanes, brokers, sequencer) for topic in facts.topics],
        sequencer=_sequencer(facts.epoch, sequencer),
        latencies=[
            _latency("publish to ack", known, "embarcadero_publish_latency_seconds"),
            _latency("append to reader", known, "embarcadero_e2e_latency_seconds"),
            _latency("round", [sequencer] if sequencer else [], "embarcadero_sequencer_latency_seconds"),
        ],
    )


def _broker(member: Member, change: Change | None) -> BrokerRow:
    identity = {"broker": member.broker, "incarnation": member.incarnation, "address": member.address}
    if change is None or member.state is not MemberState.LIVE:
        state = "silent" if member.state is MemberState.LIVE else member.state.value
        return BrokerRow(**identity, state=state)  # type: ignore[arg-type]
    number = member.broker
    return BrokerRow(
        broker=number,
        incarnation=member.incarnation,
        address=member.address,
        state="live",
        connections=int(change.value("embarcadero_connections", broker=number)),
        in_bytes_s=change.rate("embarcadero_publish_bytes_total", broker=number),
        in_records_s=change.rate("embarcadero_publish_records_total", broker=number),
        out_bytes_s=change.rate("embarcadero_subscribe_bytes_total", broker=number),
        out_records_s=change.rate("embarcadero_subscribe_records_total", broker=number),
        pending=int(change.value("embarcadero_pending_entries", broker=number)),
        unresolved=int(change.value("embarcadero_unresolved_entries", broker=number)),
        credit_bytes=int(change.value("embarcadero_credit_bytes", broker=number)),
        log_occupied=change.value("embarcadero_log_occupancy_ratio", broker=number),
        backpressure=change.value("embarcadero_backpressure", broker=number) > 0,
    )


def _ordered(
    topic: Topic, lanes: list[TopicLane], brokers: dict[int, Change | None], sequencer: Change | None
) -> tuple[int, int]:
    """Next index and seq. For orders 0 and 1, the sums over all lanes; the store has the ends of closed lanes."""
    name = topic.name
    if topic.order > Order.BROKER:
        metrics = ("embarcadero_ordered_index", "embarcadero_ordered_seq")
        index, seq = (int(sequencer.value(metric, topic=name)) if sequencer else 0 for metric in metrics)
        return index, seq
    closed = [lane for lane in lanes if lane.topic == topic.lane and not lane.open]
    known = [(number, change) for number, change in brokers.items() if change is not None]
    index, seq = (
        sum(int(change.value(metric, broker=number, topic=name)) for number, change in known)
        for metric in ("embarcadero_lane_index", "embarcadero_lane_seq")
    )
    return index + sum(lane.end or 0 for lane in closed), seq + sum(lane.end_seq or 0 for lane in closed)


def _topic(
    topic: Topic, lanes: list[TopicLane], brokers: dict[int, Change | None], sequencer: Change | None
) -> TopicRow:
    name, (index, seq) = topic.name, _ordered(topic, lanes, brokers, sequencer)

    def over_brokers(metric: str) -> float:
        return sum(change.rate(metric, broker=n, topic=name) for n, change in brokers.items() if change is not None)

    def of_sequencer(metric: str, **labels: str) -> int:
        return int(sequencer.value(metric, topic=name, **labels)) if sequencer is not None else 0

    read = [
        (change.value("embarcadero_readers", **labels), change.value("embarcadero_reader_lag_batches", **labels))
        for number, change in brokers.items()
        if change is not None
        for labels in [{"broker": number, "topic": name}]
    ]
    return TopicRow(
        topic=name,
        order=topic.order,
        in_records_s=over_brokers("embarcadero_publish_records_total"),
        in_bytes_s=over_brokers("embarcadero_publish_bytes_total"),
        out_records_s=over_brokers("embarcadero_subscribe_records_total"),
        ordered_index=index,
        ordered_seq=seq,
        readers=int(sum(readers for readers, _ in read)),
        lag=max((int(lag) for readers, lag in read if readers), default=None),
        sessions=of_sequencer("embarcadero_sessions", state="open"),
        held=of_sequencer("embarcadero_sequencer_hold_buffer_entries"),
    )


def _leader(changes: dict[str, Change]) -> Change | None:
    """The sequencer of the newest epoch among the processes that answer; standbys report no epoch."""
    found = [change for role, change in changes.items() if role.partition(":")[0] == "sequencer"]
    return max(found, key=lambda change: change.value("embarcadero_epoch"), default=None)


def _sequencer(epoch: int, change: Change | None) -> SequencerRow:
    if change is None:
        return SequencerRow(state="silent", epoch=epoch)
    entries = change.rate("embarcadero_entries_total")
    worked = change.rate("embarcadero_round_entries_count")
    return SequencerRow(
        state="live",
        epoch=int(change.value("embarcadero_epoch")),
        rounds_s=change.rate("embarcadero_rounds_total"),
        entries_s=entries,
        entries_per_round=entries / worked if worked else 0.0,
        held=int(change.value("embarcadero_hold_buffer_entries")),
        held_slots=int(change.value("embarcadero_hold_buffer_slots")),
        sessions=int(change.value("embarcadero_sessions", state="open")),
    )


def _latency(what: str, changes: list[Change], metric: str) -> Latency:
    all_of_them: defaultdict[float, float] = defaultdict(float)
    for change in changes:
        for bound, count in change.buckets(metric).items():
            all_of_them[bound] += count
    return Latency(
        what=what,
        count=int(all_of_them.get(math.inf, 0)),
        p50=quantile(all_of_them, 0.5),
        p99=quantile(all_of_them, 0.99),
    )


# --- view -------------------------------------------------------------------------------------------------------------
# The terminal display: tables that fit the width, bars and a sparkline.
_WIDE: Final = 120
_SPARKS: Final = "▁▂▃▄▅▆▇█"
_TOPICS_SHOWN: Final = 20
_STATE: Final = {"live": "green", "silent": "yellow", "dead": "red"}


def view(shown: Picture, history: Sequence[float], width: int) -> RenderableType:
    """The whole display. `history`: received records per second, oldest first. Topics are last: there may be many."""
    wide = width >= _WIDE
    above = (_head(shown, history, wide), _sequencer_text(shown), _brokers(shown, wide), _latencies(shown))
    return Group(*above, _topics(shown, wide))


def _head(shown: Picture, history: Sequence[float], wide: bool) -> Text:
    text = Text.assemble(("embarcadero ", "bold"), (shown.cluster, "cyan"), f"  {shown.time}  in ")
    text.append(f"{short(shown.in_records_s)} records/s ", "bold")
    text.append(sparkline(history[-(60 if wide else 16) :]), "green")
    return text


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1), expand=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number > 1 else "left", no_wrap=number > 0, overflow="fold")
    return table


def _brokers(shown: Picture, wide: bool) -> Table:
    narrow = ["broker", "state", "conns", "in/s", "out/s", "pending", "credit", "log full"]
    more = ["incarnation", "address", "rec in/s", "rec out/s", "unresolved"]
    table = _table("brokers", [*narrow, *more] if wide else narrow)
    for broker in shown.brokers:
        table.add_row(*_broker_cells(broker, wide))
    return table


def _broker_cells(broker: BrokerRow, wide: bool) -> list[RenderableType]:
    state = Text("full" if broker.backpressure else broker.state)
    state.stylize("yellow" if broker.backpressure else _STATE.get(broker.state, ""))
    where = [str(broker.incarnation), broker.address]
    if broker.state != "live":
        return [str(broker.broker), state, *[""] * 6, *([*where, *[""] * 3] if wide else [])]
    cells: list[RenderableType] = [
        str(broker.broker),
        state,
        str(broker.connections),
        size(broker.in_bytes_s),
        size(broker.out_bytes_s),
        str(broker.pending),
        size(broker.credit_bytes),
        bar(broker.log_occupied),
    ]
    if wide:
        cells += [*where, short(broker.in_records_s), short(broker.out_records_s), str(broker.unresolved)]
    return cells


def _topics(shown: Picture, wide: bool) -> Table:
    narrow = ["topic", "order", "rec in/s", "in/s", "next seq", "readers", "lag"]
    table = _table("topics", [*narrow, "rec out/s", "next index", "sessions", "waiting"] if wide else narrow)
    busiest = sorted(shown.topics, key=lambda topic: (-topic.in_records_s - topic.out_records_s, topic.topic))
    for topic in busiest[:_TOPICS_SHOWN]:
        table.add_row(*_topic_cells(topic, wide))
    if len(busiest) > _TOPICS_SHOWN:
        table.add_row(f"... and {len(busiest) - _TOPICS_SHOWN} more")
    return table


def _topic_cells(topic: TopicRow, wide: bool) -> list[RenderableType]:
    lag = Text("" if topic.lag is None else f"{topic.lag:,}", "yellow" if topic.lag else "")
    cells: list[RenderableType] = [
        topic.topic,
        order_name(topic.order),
        short(topic.in_records_s),
        size(topic.in_bytes_s),
        f"{topic.ordered_seq:,}",
        str(topic.readers),
        lag,
    ]
    if wide:
        cells += [short(topic.out_records_s), f"{topic.ordered_index:,}", str(topic.sessions), str(topic.held)]
    return cells


def _sequencer_text(shown: Picture) -> Text:
    found = shown.sequencer
    first = Text.assemble(("sequencer ", "bold"), (found.state, _STATE.get(found.state, "")), f"  epoch {found.epoch}")
    if found.state == "live":
        first.append(f"  {short(found.rounds_s)} rounds/s  {found.entries_per_round:.1f} entries/round")
        first.append(f"  {found.sessions:,} sessions  {found.held:,} in the reorder buffer")
    return first


def _latencies(shown: Picture) -> Table:
    table = _table("latency", ["", "", "p50", "p99", "count"])
    longest = max((latency.p99 or 0.0 for latency in shown.latencies), default=0.0)
    for latency in shown.latencies:
        table.add_row(*_latency_cells(latency, longest))
    return table


def _latency_cells(latency: Latency, longest: float) -> list[RenderableType]:
    length = round(20 * (latency.p99 or 0.0) / longest) if longest else 0
    line = Text("━" * length, "magenta")
    return [latency.what, line, duration(latency.p50), duration(latency.p99), f"{latency.count:,}"]


# --- numbers for people -----------------------------------------------------------------------------------------------
def short(number: float) -> str:
    """Format 1234567 as 1.23M."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * unit:
            return f"{number / unit:.3g}{name}"
    return f"{number:.3g}" if number < 100 else f"{number:.0f}"


def size(number: float) -> str:
    """Format bytes, in powers of ten."""
    return f"{short(number)}B"


def duration(seconds: float | None) -> str:
    """Format seconds, with a suitable unit."""
    if seconds is None:
        return "-"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def bar(share: float, cells: int = 8) -> Text:
    """Draw a share of 1 as a bar."""
    filled = min(cells, round(share * cells))
    colour = "red" if share >= 0.8 else "yellow" if share >= 0.5 else "green"
    return Text.assemble(("█" * filled, colour), ("░" * (cells - filled), "dim"), f" {share:4.0%}")


def sparkline(values: Sequence[float]) -> str:
    """Draw values as a row of small bars; the highest value fills its cell."""
    highest = max(values, default=0.0)
    if highest <= 0:
        return _SPARKS[0] * len(values)
    return "".join(_SPARKS[min(7, int(8 * value / highest))] for value in values)
