"""A picture of the cluster for the terminal: tables that fit its width, bars and a sparkline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from embarcadero.orders import order_name
from embarcadero.watch.top import BrokerLine, Latency, Picture, TopicLine

_WIDE: Final = 120
_SPARKS: Final = "▁▂▃▄▅▆▇█"
_TOPICS_SHOWN: Final = 20
_STATE: Final = {"live": "green", "silent": "yellow", "dead": "red"}


def view(shown: Picture, history: Sequence[float], width: int) -> RenderableType:
    """Everything; `history` is how many records a second came in, oldest first. Topics come last: there may be many."""
    wide = width >= _WIDE
    above = (_head(shown, history, wide), _sequencer(shown), _brokers(shown, wide), _latencies(shown))
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


def _broker_cells(broker: BrokerLine, wide: bool) -> list[RenderableType]:
    state = Text("full" if broker.backpressure else broker.state)
    state.stylize("yellow" if broker.backpressure else _STATE.get(broker.state, ""))
    where = [str(broker.incarnation), broker.address]
    if broker.state != "live":
        return [str(broker.broker), state, *[""] * 6, *([*where, *[""] * 3] if wide else [])]
    cells: list[RenderableType] = [
        str(broker.broker), state, str(broker.connections), size(broker.in_bytes_s), size(broker.out_bytes_s),
        str(broker.pending), size(broker.credit_bytes), bar(broker.log_occupied),
    ]  # fmt: skip
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


def _topic_cells(topic: TopicLine, wide: bool) -> list[RenderableType]:
    lag = Text("" if topic.lag is None else f"{topic.lag:,}", "yellow" if topic.lag else "")
    cells: list[RenderableType] = [
        topic.topic, order_name(topic.order), short(topic.in_records_s), size(topic.in_bytes_s),
        f"{topic.ordered_seq:,}", str(topic.readers), lag,
    ]  # fmt: skip
    if wide:
        cells += [short(topic.out_records_s), f"{topic.ordered_index:,}", str(topic.sessions), str(topic.held)]
    return cells


def _sequencer(shown: Picture) -> Text:
    found = shown.sequencer
    first = Text.assemble(("sequencer ", "bold"), (found.state, _STATE.get(found.state, "")), f"  epoch {found.epoch}")
    if found.state == "live":
        first.append(f"  {short(found.rounds_s)} rounds/s  {found.entries_per_round:.1f} entries/round")
        first.append(f"  {found.sessions:,} sessions  {found.held:,} held")
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
    """1234567 as 1.2M."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * unit:
            return f"{number / unit:.3g}{name}"
    return f"{number:.3g}" if number < 100 else f"{number:.0f}"


def size(number: float) -> str:
    """Bytes, in powers of ten."""
    return f"{short(number)}B"


def duration(seconds: float | None) -> str:
    """Seconds, with a unit that fits."""
    if seconds is None:
        return "-"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def bar(share: float, cells: int = 8) -> Text:
    """A share of 1 as a bar."""
    filled = min(cells, round(share * cells))
    colour = "red" if share >= 0.8 else "yellow" if share >= 0.5 else "green"
    return Text.assemble(("█" * filled, colour), ("░" * (cells - filled), "dim"), f" {share:4.0%}")


def sparkline(values: Sequence[float]) -> str:
    """Values as a row of small bars; the highest fills its cell."""
    highest = max(values, default=0.0)
    if highest <= 0:
        return _SPARKS[0] * len(values)
    return "".join(_SPARKS[min(7, int(8 * value / highest))] for value in values)
