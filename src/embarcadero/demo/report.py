"""The demo's report: one HTML page that needs nothing else: what happened, what came out, and whether it is right."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from embarcadero.demo.shop import CITIES
from embarcadero.errors import NotAvailable

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
    """How far everything was at one moment: records in all."""

    seconds: float
    published: int = 0
    aggregated: int = 0
    tiered: int = 0
    released: int = 0  # no longer on replicas' disks: only in the table


@dataclass(slots=True)
class Check:
    """One promise, looked at."""

    what: str
    holds: bool
    detail: str = ""


@dataclass(slots=True)
class Answer:
    """A question in SQL and its answer."""

    title: str
    query: str
    rows: pa.Table


@dataclass(slots=True)
class Facts:
    """Everything that the page tells."""

    samples: list[Sample] = field(default_factory=list)
    story: list[tuple[float, str]] = field(default_factory=list)
    kills: list[tuple[float, str]] = field(default_factory=list)
    cards: dict[str, str] = field(default_factory=dict)  # what -> figure
    checks: list[Check] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    sales: pa.Table | None = None
    seconds: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether everything that was looked at is right. Nothing looked at is not right."""
        return bool(self.checks) and all(check.holds for check in self.checks)


def write_report(facts: Facts, path: Path) -> Path:
    """Write the page; returns where it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(facts), encoding="utf-8")
    return path


def page(facts: Facts) -> str:
    """The whole page."""
    verdict = "All promises held." if facts.holds else "A promise did not hold."
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>Embarcadero demo</title>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<style>{_STYLE}</style></head><body><h1>One log, from publisher to table</h1>",
        f"<p class='lead'><span class='{'good' if facts.holds else 'bad'}'>{verdict}</span> Orders and payments of "
        "a shop went through a log, a streaming query on Spark and an Iceberg table. Processes were killed on the way."
        "</p>",
        "<div class='cards'>" + "".join(map(_card, facts.cards.items())) + "</div>",
        "<h2>What happened</h2>", _picture(_timeline, facts), _story(facts.story),
        "<h2>What the streaming query computed</h2>", _picture(_windows, facts),
        "<h2>Is it right?</h2>", _checks(facts.checks),
        *(part for answer in facts.answers for part in _answer(answer)),
        f"<footer>Made by <code>embarcadero demo</code> in {facts.seconds:.0f} s.</footer></body></html>",
    ]  # fmt: skip
    return "\n".join(parts)


def _card(item: tuple[str, str]) -> str:
    what, figure = item
    return f"<div class='card'><b>{html.escape(figure)}</b><span>{html.escape(what)}</span></div>"


def _story(story: Sequence[tuple[float, str]]) -> str:
    lines = (f"<li><time>{moment:.1f} s</time>{html.escape(line)}</li>" for moment, line in story)
    return f"<ol class='story'>{''.join(lines)}</ol>"


def _checks(checks: Sequence[Check]) -> str:
    rows = "".join(
        f"<tr><td class='{'good' if check.holds else 'bad'}'>{'yes' if check.holds else 'NO'}</td>"
        f"<td>{html.escape(check.what)}</td><td>{html.escape(check.detail)}</td></tr>"
        for check in checks
    )
    return f"<table id='checks'><tr><th></th><th>what was checked</th><th>found</th></tr>{rows}</table>"


def _answer(answer: Answer) -> list[str]:
    return [
        f"<h2>{html.escape(answer.title)}</h2><pre>{html.escape(answer.query.strip())}</pre>", table_of(answer.rows)
    ]  # fmt: skip


def table_of(rows: pa.Table, most: int = 20) -> str:
    """An Arrow table as an HTML one; numbers to the right, with commas."""
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
def _picture(draw: Any, facts: Facts) -> str:
    """A drawing as SVG within the page; nothing when there is nothing to draw."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise NotAvailable("no report: matplotlib is not installed", "pip install 'embarcadero[plots]'") from None
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


def _timeline(figure: Any, facts: Facts) -> bool:
    if len(facts.samples) < 2:
        return False
    axes = _axes(figure, "Records published, aggregated, in the table, and only in the table")
    times = [sample.seconds for sample in facts.samples]
    for number, name in enumerate(("published", "aggregated", "tiered", "released")):
        axes.plot(times, [getattr(sample, name) for sample in facts.samples], color=_LINES[number], linewidth=2,
                  label=name)  # fmt: skip
    top = max(sample.published for sample in facts.samples)
    for moment, what in facts.kills:
        axes.axvline(moment, color=_COLORS[3], linewidth=1, linestyle=(0, (4, 3)))
        axes.text(moment, top * 1.02, what, fontsize=8, color=_COLORS[3], rotation=20, va="bottom")
    axes.set_ylim(0, top * 1.2)
    axes.set_xlabel("seconds", fontsize=9, color=_INK)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return True


def _windows(figure: Any, facts: Facts) -> bool:
    if facts.sales is None or not facts.sales.num_rows:
        return False
    axes = _axes(figure, "Sales by city, in windows of 15 minutes of the shop's day")
    sales = facts.sales.sort_by("window_start")
    starts = sorted(set(sales.column("window_start").to_pylist()))
    place = {start: number for number, start in enumerate(starts)}
    heights = {city: [0.0] * len(starts) for city in CITIES}
    for row in sales.to_pylist():
        heights[row["city"]][place[row["window_start"]]] += row["amount_cents"] / 100
    axes.stackplot(range(len(starts)), heights.values(), labels=heights.keys(), colors=_COLORS, linewidth=0)
    every = max(1, len(starts) // 12)
    axes.set_xticks(range(0, len(starts), every), [f"{start:%H:%M}" for start in starts[::every]])
    axes.set_xlim(0, max(1, len(starts) - 1))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return True
