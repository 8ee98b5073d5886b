"""The index page of a matrix: every case with its verdict and its time line, in one HTML file beside the plots."""

from __future__ import annotations

from html import escape
from typing import Any

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #24292f; max-width: 1080px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin: 2.5rem 0 .2rem; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid #eaeef2; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
.good { color: #1a7f37; } .bad { color: #c4432b; font-weight: 600; }
img { max-width: 100%; margin-top: .4rem; } p { margin: .2rem 0; } .faint { color: #6e7781; font-size: 13px; }
a { color: inherit; } li { color: #c4432b; }
"""


def index_page(report: dict[str, Any]) -> str:
    """Return the page of a matrix's report."""
    cases = report["cases"]
    good = sum(case["good"] for case in cases)
    machine = report["machine"]
    head = (
        f"<h1>Chaos: {good} of {len(cases)} cases kept all promises</h1>"
        f"<p>{report['kills']:,} processes killed, {report['acked']:,} batches acked, {report['delivered']:,} read, "
        f"in {report['seconds']:,.0f} s.</p>"
        f"<p class=faint>Commit {escape(report['commit'])}, {machine['cores']} cores, {escape(machine['cpu'])}, "
        f"{machine['when']}; <code>{escape(report['command'])}</code>. Red: faults. Green line: no faults from "
        "here on. Dotted red line: all memory was lost.</p>"
    )
    rows = "".join(_row(case) for case in cases)
    table = (
        "<table><tr><th>case<th>verdict<th class=n>faults<th class=n>kill -9<th class=n>acked<th class=n>while faults "
        f"went on<th class=n>unknown<th class=n>seconds</tr>{rows}</table>"
    )
    parts = "".join(_part(case) for case in cases)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Chaos matrix</title>'
        f"<style>{_STYLE}</style>{head}{table}{parts}</html>\n"
    )


def _verdict(case: dict[str, Any]) -> str:
    kept = "all promises kept" if case["good"] else f"{len(case['problems'])} problems"
    return f"<span class={'good' if case['good'] else 'bad'}>{kept}</span>"


def _row(case: dict[str, Any]) -> str:
    name = escape(case["case"])
    return (
        f'<tr><td><a href="#{name}">{name}</a><td>{_verdict(case)}<td class=n>{sum(case["faults"].values())}'
        f"<td class=n>{case['kills']}<td class=n>{case['acked']:,}<td class=n>{case['acked_in_trouble']:,}"
        f"<td class=n>{case['unknown']}<td class=n>{case['seconds']:.0f}</tr>"
    )


def _part(case: dict[str, Any]) -> str:
    name = escape(case["case"])
    problems = "".join(f"<li>{escape(problem)}" for problem in case["problems"][:20])
    picture = f'<img src="{escape(case["plot"])}" alt="time line of {name}" loading="lazy">' if case["plot"] else ""
    return f'<h2 id="{name}">{name}</h2><p>{escape(case["words"])}. {_verdict(case)}</p><ul>{problems}</ul>{picture}'
