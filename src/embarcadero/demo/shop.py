"""A shop with orders and payments: a realistic event stream, and the books against which the demo checks every answer.

The shop has its own clock, which is much faster than real time; a step is one minute of it. Some orders are late: the
shop publishes them minutes after their event time. Amounts are whole cents, so sums are exact, and two different sums
prove an error.
"""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from embarcadero.errors import NotAvailable

OPENS = datetime(2026, 1, 31, 8, 0, tzinfo=UTC)
STEP_S = 60
WINDOW_S = 15 * 60
LATE_S = 5 * 60
"""The maximum delay between event time and publishing; a watermark above this loses no order."""

LATE_SHARE = 0.05
CITIES = ("Lisbon", "Utrecht", "Oakland", "Kyoto", "Nairobi", "Recife", "Tartu", "Hobart")
PRODUCTS = ("espresso", "flat white", "green tea", "sourdough", "almond cake", "soup", "grain bowl", "lemonade")
METHODS = ("card", "phone", "cash", "voucher")

_TIME = pa.timestamp("us", tz="UTC")
ORDERS = pa.schema(
    [
        pa.field("order_id", pa.int64(), nullable=False),
        pa.field("customer", pa.int32(), nullable=False),
        pa.field("city", pa.string(), nullable=False),
        pa.field("product", pa.string(), nullable=False),
        pa.field("quantity", pa.int32(), nullable=False),
        pa.field("amount_cents", pa.int64(), nullable=False),
        pa.field("event_time", _TIME, nullable=False),
    ]
)
PAYMENTS = pa.schema(
    [
        pa.field("payment_id", pa.int64(), nullable=False),
        pa.field("order_id", pa.int64(), nullable=False),
        pa.field("method", pa.string(), nullable=False),
        pa.field("amount_cents", pa.int64(), nullable=False),
        pa.field("event_time", _TIME, nullable=False),
    ]
)
SALES = pa.schema(
    [
        pa.field("window_start", _TIME, nullable=False),
        pa.field("city", pa.string(), nullable=False),
        pa.field("orders", pa.int64(), nullable=False),
        pa.field("amount_cents", pa.int64(), nullable=False),
    ]
)

IntColumn = npt.NDArray[np.int64]
_OPENS_US = int(OPENS.timestamp()) * 1_000_000
_PRICES = np.array([280, 390, 310, 650, 420, 780, 1150, 340], dtype=np.int64)
_TASTES = np.array([22, 18, 8, 10, 12, 9, 13, 8]) / 100
_SIZES = np.array([20, 15, 18, 14, 11, 10, 7, 5]) / 100


@dataclass(slots=True)
class Books:
    """The true sales: counts and cents, both as rows of windows by columns of cities."""

    counts: IntColumn = field(default_factory=lambda: np.zeros((0, len(CITIES)), dtype=np.int64))
    cents: IntColumn = field(default_factory=lambda: np.zeros((0, len(CITIES)), dtype=np.int64))
    paid_cents: int = 0
    orders: int = 0
    payments: int = 0
    late: int = 0

    def note(self, times_us: IntColumn, cities: IntColumn, cents: IntColumn) -> None:
        """Add orders."""
        windows = (times_us - _OPENS_US) // (WINDOW_S * 1_000_000)
        missing = int(windows.max()) + 1 - len(self.counts)
        if missing > 0:
            self.counts, self.cents = (np.pad(table, ((0, missing), (0, 0))) for table in (self.counts, self.cents))
        np.add.at(self.counts, (windows, cities), 1)
        np.add.at(self.cents, (windows, cities), cents)
        self.orders += len(cents)


class Shop:
    """Orders and payments, step by step. The same seed gives the same day."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._steps = 0
        self.books = Books()

    @property
    def clock_us(self) -> int:
        """The shop's time."""
        return _OPENS_US + self._steps * STEP_S * 1_000_000

    def step(self, count: int) -> tuple[pa.Table, pa.Table]:
        """Return the orders of one minute, and their payments."""
        rng, books = self._rng, self.books
        busy = 0.6 + 0.4 * np.sin(self._steps / 40.0)  # mornings, lunch, afternoons
        count = max(1, int(count * (0.4 + busy)))
        times = self.clock_us + np.sort(rng.integers(0, STEP_S * 1_000_000, count))
        late = rng.random(count) < LATE_SHARE
        times[late] -= rng.integers(0, LATE_S * 1_000_000, int(late.sum()))
        times = np.maximum(times, _OPENS_US)
        cities = rng.choice(len(CITIES), count, p=_SIZES)
        products = rng.choice(len(PRODUCTS), count, p=_TASTES)
        quantities = 1 + rng.poisson(0.7, count)
        cents = _PRICES[products] * quantities
        first = books.orders
        orders = pa.table(
            [
                pa.array(np.arange(first, first + count)),
                pa.array(rng.integers(0, 20_000, count, dtype=np.int32)),
                pa.array(np.array(CITIES, dtype=object)[cities], pa.string()),
                pa.array(np.array(PRODUCTS, dtype=object)[products], pa.string()),
                pa.array(quantities.astype(np.int32)),
                pa.array(cents),
                pa.array(times).cast(_TIME),
            ],
            schema=ORDERS,
        )
        books.note(times, cities, cents)
        books.late += int(late.sum())
        payments = self._payments(np.arange(first, first + count), cents, times)
        self._steps += 1
        return orders, payments

    def _payments(self, orders: IntColumn, cents: IntColumn, times: IntColumn) -> pa.Table:
        """Make payments: within seconds for most orders, never for some."""
        rng, books = self._rng, self.books
        paid = rng.random(len(orders)) < 0.97
        count = int(paid.sum())
        first, books.payments = books.payments, books.payments + count
        books.paid_cents += int(cents[paid].sum())
        methods = np.array(METHODS, dtype=object)[rng.choice(len(METHODS), count, p=[0.55, 0.25, 0.15, 0.05])]
        return pa.table(
            [
                pa.array(np.arange(first, first + count)),
                pa.array(orders[paid]),
                pa.array(methods, pa.string()),
                pa.array(cents[paid]),
                pa.array(times[paid] + rng.integers(0, 20_000_000, count)).cast(_TIME),
            ],
            schema=PAYMENTS,
        )

    def closing(self) -> pa.Table:
        """Return a last order, far enough in the shop's future to close every earlier window."""
        time_us = self.clock_us + 4 * WINDOW_S * 1_000_000
        row = [self.books.orders, 0, CITIES[0], PRODUCTS[0], 1, 0, time_us]
        columns = [pa.array([value], kind) for value, kind in zip(row[:-1], ORDERS.types[:-1], strict=True)]
        self.books.orders += 1
        return pa.table([*columns, pa.array([time_us]).cast(_TIME)], schema=ORDERS)


def window_start(number: int) -> datetime:
    """The start of a window."""
    return datetime.fromtimestamp(_OPENS_US // 1_000_000 + number * WINDOW_S, UTC)


def differences(books: Books, sales: pa.Table) -> list[str]:
    """Differences between a table of sales and the books: missing, duplicate or wrong windows. Empty if all agree."""
    windows = (sales.column("window_start").cast(pa.int64()).to_numpy() - _OPENS_US) // (WINDOW_S * 1_000_000)
    names = {city: number for number, city in enumerate(CITIES)}
    cities = np.array([names[city] for city in sales.column("city").to_pylist()], dtype=np.int64)
    times, counts, cents = (np.zeros_like(books.counts) for _ in range(3))
    inside = windows < len(books.counts)
    where = (windows[inside], cities[inside])
    np.add.at(times, where, 1)
    np.add.at(counts, where, sales.column("orders").to_numpy()[inside])
    np.add.at(cents, where, sales.column("amount_cents").to_numpy()[inside])
    wanted = (books.counts > 0).astype(np.int64)
    problems = [
        (times < wanted, "is missing"),
        (times > wanted, "appears more than once"),
        (counts != books.counts, "has a wrong number of orders"),
        (cents != books.cents, "has a wrong sum"),
    ]
    found = []
    for wrong, what in problems:
        for window, city in np.argwhere(wrong).tolist():
            found.append(f"{CITIES[city]} at {window_start(window):%H:%M} {what}")
    return found


# --- report -----------------------------------------------------------------------------------------------------------
# The demo's report: one self-contained HTML page with the events, the results and the checks.
_INK, _FAINT = "#24292f", "#8b949e"
_COLORS: Final = ("#2f6fb0", "#d8a33f", "#45a5a1", "#c4432b", "#7b5ea7", "#5d8a3c", "#b5651d", "#6e7781")
_LINES: Final = ("#2f6fb0", "#d8a33f", "#45a5a1", "#7b5ea7")
_STYLE: Final = """
body { font: 16px/1.55 system-ui, sans-serif; color: #24292f; max-width: 62rem; margin: 2.5rem auto; padding: 0 1.2rem }
h1 { font-size: 1.7rem; margin: 0 0 .2rem } h2 { font-size: 1.15rem; margin: 2.4rem 0 .6rem }
p.lead { color: #57606a; margin: 0 0 1.4rem }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(10.5rem, 1fr)); gap: .8rem }
.card { border: 1px solid #d0d7de; border-radius: .6rem; padding: .7rem .9rem }
.card b { display: block; font-size: 1.35rem } .card span { color: #57606a; font-size: .85rem }
table { border-collapse: collapse; width: 100%; font-size: .9rem }
td, th { text-align: left; padding: .32rem .7rem }
th { border-bottom: 2px solid #d0d7de } td { border-bottom: 1px solid #eaeef2 }
td.number { text-align: right; width: 1% }
.good { color: #1a7f37; font-weight: 600 } .bad { color: #c4432b; font-weight: 600 }
pre { background: #f6f8fa; padding: .7rem .9rem; border-radius: .4rem; overflow-x: auto; font-size: .85rem }
svg { width: 100%; height: auto } ol.story { padding-left: 0; list-style: none; font-size: .92rem }
ol.story time { display: inline-block; width: 4.5rem; color: #57606a; font-variant-numeric: tabular-nums }
footer { margin: 3rem 0; color: #8b949e; font-size: .85rem }
"""


@dataclass(slots=True)
class Sample:
    """The progress at one moment, as total numbers of records."""

    seconds: float
    published: int = 0
    aggregated: int = 0
    tiered: int = 0
    released: int = 0  # removed from replicas' disks: only in the table


@dataclass(slots=True)
class ShopCheck:
    """A check of one promise."""

    what: str
    holds: bool
    detail: str = ""


@dataclass(slots=True)
class SqlAnswer:
    """A question in SQL and its answer."""

    title: str
    query: str
    rows: pa.Table


@dataclass(slots=True)
class RunFacts:
    """The content of the report."""

    samples: list[Sample] = field(default_factory=list)
    story: list[tuple[float, str]] = field(default_factory=list)
    kills: list[tuple[float, str]] = field(default_factory=list)
    cards: dict[str, str] = field(default_factory=dict)  # what -> figure
    checks: list[ShopCheck] = field(default_factory=list)
    answers: list[SqlAnswer] = field(default_factory=list)
    sales: pa.Table | None = None
    seconds: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether all checks passed. Without checks this is False."""
        return bool(self.checks) and all(check.holds for check in self.checks)


def write_report(facts: RunFacts, path: Path) -> Path:
    """Write the page; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(facts), encoding="utf-8")
    return path


def page(facts: RunFacts) -> str:
    """The whole page."""
    verdict = "All promises held." if facts.holds else "A promise did not hold."
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>Embarcadero demo</title>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<style>{_STYLE}</style></head><body><h1>One log, from publisher to table</h1>",
        f"<p class='lead'><span class='{'good' if facts.holds else 'bad'}'>{verdict}</span> Orders and payments of "
        "a shop went through a log, a streaming query on Spark and an Iceberg table. Meanwhile, the demo killed "
        "processes.</p>",
        "<div class='cards'>" + "".join(map(_card, facts.cards.items())) + "</div>",
        "<h2>What happened</h2>",
        _picture(_timeline, facts),
        _story(facts.story),
        "<h2>Result of the streaming query</h2>",
        _picture(_windows, facts),
        "<h2>Checks</h2>",
        _checks(facts.checks),
        *(part for answer in facts.answers for part in _answer(answer)),
        f"<footer>Made by <code>embarcadero demo</code> in {facts.seconds:.0f} s.</footer></body></html>",
    ]
    return "\n".join(parts)


def _card(item: tuple[str, str]) -> str:
    what, figure = item
    return f"<div class='card'><b>{html.escape(figure)}</b><span>{html.escape(what)}</span></div>"


def _story(story: Sequence[tuple[float, str]]) -> str:
    lines = (f"<li><time>{moment:.1f} s</time>{html.escape(line)}</li>" for moment, line in story)
    return f"<ol class='story'>{''.join(lines)}</ol>"


def _checks(checks: Sequence[ShopCheck]) -> str:
    rows = "".join(
        f"<tr><td class='{'good' if check.holds else 'bad'}'>{'yes' if check.holds else 'NO'}</td>"
        f"<td>{html.escape(check.what)}</td><td>{html.escape(check.detail)}</td></tr>"
        for check in checks
    )
    return f"<table id='checks'><tr><th></th><th>check</th><th>result</th></tr>{rows}</table>"


def _answer(answer: SqlAnswer) -> list[str]:
    return [
        f"<h2>{html.escape(answer.title)}</h2><pre>{html.escape(answer.query.strip())}</pre>",
        table_of(answer.rows),
    ]


def table_of(rows: pa.Table, most: int = 20) -> str:
    """Convert an Arrow table to HTML; numbers are right-aligned, with commas."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in rows.column_names)
    body = "".join(f"<tr>{''.join(map(_cell, row.values()))}</tr>" for row in rows.slice(0, most).to_pylist())
    more = f"<p>and {rows.num_rows - most:,} more rows</p>" if rows.num_rows > most else ""
    return f"<table><tr>{head}</tr>{body}</table>{more}"


def _cell(value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        text = f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"
        return f"<td class='number'>{text}</td>"
    return f"<td>{html.escape(str(value))}</td>"


# --- pictures ---------------------------------------------------------------------------------------------------------
def _picture(draw: Any, facts: RunFacts) -> str:
    """Draw a figure as SVG for the page; empty if there is nothing to draw."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        what = "the report needs matplotlib, which is not installed"
        raise NotAvailable(what, "pip install 'embarcadero[plots]'") from None
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "embarcadero", "font.family": "sans-serif"}):
        figure: Any = Figure(figsize=(10, 3.6), layout="constrained")
        if not draw(figure, facts):
            return ""
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def _axes(figure: Any, title: str) -> Any:
    axes = figure.subplots()
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=_INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_FAINT)
    axes.tick_params(colors=_INK, labelsize=9)
    axes.grid(axis="y", color="#eaeef2")
    axes.set_axisbelow(True)
    return axes


def _timeline(figure: Any, facts: RunFacts) -> bool:
    if len(facts.samples) < 2:
        return False
    axes = _axes(figure, "Records published, aggregated, in the table, and only in the table")
    times = [sample.seconds for sample in facts.samples]
    for number, name in enumerate(("published", "aggregated", "tiered", "released")):
        axes.plot(
            times, [getattr(sample, name) for sample in facts.samples], color=_LINES[number], linewidth=2, label=name
        )
    top = max(sample.published for sample in facts.samples)
    for moment, what in facts.kills:
        axes.axvline(moment, color=_COLORS[3], linewidth=1, linestyle=(0, (4, 3)))
        axes.text(moment, top * 1.02, what, fontsize=8, color=_COLORS[3], rotation=20, va="bottom")
    axes.set_ylim(0, top * 1.2)
    axes.set_xlabel("seconds", fontsize=9, color=_INK)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return True


def _windows(figure: Any, facts: RunFacts) -> bool:
    if facts.sales is None or not facts.sales.num_rows:
        return False
    axes = _axes(figure, "Sales by city, in windows of 15 minutes of the shop's day")
    sales = facts.sales.sort_by("window_start")
    starts = sorted(set(sales.column("window_start").to_pylist()))
    column = {start: number for number, start in enumerate(starts)}
    heights = {city: [0.0] * len(starts) for city in CITIES}
    for row in sales.to_pylist():
        heights[row["city"]][column[row["window_start"]]] += row["amount_cents"] / 100
    axes.stackplot(range(len(starts)), heights.values(), labels=heights.keys(), colors=_COLORS, linewidth=0)
    every = max(1, len(starts) // 12)
    axes.set_xticks(range(0, len(starts), every), [f"{start:%H:%M}" for start in starts[::every]])
    axes.set_xlim(0, max(1, len(starts) - 1))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return True
