"""Pictures of a report, as PNG files. Needs matplotlib, which is an optional extra; everything else works without."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from embarcadero.errors import NotAvailable
from embarcadero_proof.lab.rows import Row, count_name, size_name

_INK, _FAINT, _BAND = "#24292f", "#8b949e", "#eaeef2"
_GOOD, _FINE, _BAD = "#1a7f37", "#2f6fb0", "#c4432b"
_VERDICTS: Final = {"goal": _GOOD, "holds": _FINE, "misses": _BAD}
_SERIES: Final = {
    "raw": ("raw TCP", "#afb8c1"), "order5": ("order 5", "#2f6fb0"), "order2": ("order 2", "#45a5a1"),
    "order0": ("order 0", "#d8a33f"),
}  # fmt: skip
_LATENCIES: Final = {
    "latency_echo": ("uvloop echo", "#8b949e"), "latency_ack": ("ack=1, asyncio", "#2f6fb0"),
    "latency_ack_sync": ("ack=1, threads", "#d8a33f"),
}  # fmt: skip
_SCORE_LEAST, _SCORE_MOST = 0.05, 20.0

Report = dict[str, Any]


def draw(report: Report, folder: Path) -> list[Path]:
    """Draw the plots for which the report has figures. Raises NotAvailable without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise NotAvailable(
            "no plots: matplotlib is not installed", "pip install 'embarcadero[plots]', or --no-plots"
        ) from None
    pictures: dict[str, Callable[[Any, Report], bool]] = {
        "targets.png": _targets, "latency.png": _latency, "throughput.png": _throughput, "flatness.png": _flatness,
    }  # fmt: skip
    drawn = []
    for name, picture in pictures.items():
        figure: Any = Figure(layout="constrained", dpi=130)
        if picture(figure, report):
            figure.text(0.995, 0.005, _footer(report), ha="right", va="bottom", fontsize=6.5, color=_FAINT)
            figure.get_layout_engine().set(rect=(0, 0.03, 1, 0.97))
            figure.savefig(folder / name, facecolor="white")
            drawn.append(folder / name)
    return drawn


def _footer(report: Report) -> str:
    machine = report["machine"]
    return f"Embarcadero {report['commit']}, {machine['cores']} cores, {machine['cpu']}, {machine['when']}"


def _plain(axes: Any, title: str, pad: float = 10, size: float = 11) -> None:
    """Apply the common style of all charts."""
    axes.set_title(title, loc="left", fontsize=size, fontweight="bold", color=_INK, pad=pad)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_FAINT)
    axes.tick_params(colors=_INK, labelsize=8.5, length=0)
    axes.set_axisbelow(True)


def _row_of(found: Report) -> Row:
    return Row(
        key=found["key"], family=found["family"], what=found["what"], unit=found["unit"], at_least=found["at_least"],
        goal=found["goal"], less=found["less_is_better"],
    )  # fmt: skip


# --- figures against their targets ------------------------------------------------------------------------------------
def _targets(figure: Any, report: Report) -> bool:
    """Draw one line per row: median and range as multiples of "at least"; the goal is a hollow diamond."""
    rows = [(_row_of(found), found) for found in report["rows"] if found["at_least"] and found["median"] is not None]
    if not rows:
        return False
    figure.set_size_inches(10, 1.5 + 0.36 * len(rows))
    axes = figure.subplots()
    _plain(axes, 'Figures as multiples of "at least" (right is better; a diamond is the goal)')
    axes.axvspan(_SCORE_LEAST / 2, 1, color="#fbf1ef", zorder=0)
    axes.axvline(1, color=_BAD, linewidth=1)
    for line, (row, found) in enumerate(rows):
        color = _VERDICTS[found["verdict"]]
        low, middle, high = (_clipped(row.score(found[name])) for name in ("min", "median", "max"))
        axes.plot([low, high], [line, line], color=color, linewidth=5, alpha=0.3, solid_capstyle="round")
        axes.plot(middle, line, "o", color=color, markersize=7)
        axes.plot(_clipped(row.score(row.goal)), line, "D", mfc="white", mec=_FAINT, markersize=6)
        text = f"{row.show(found['median'])}   {row.bound(row.at_least)}, goal {row.bound(row.goal)[2:]}"
        axes.text(1.01, line, text, transform=axes.get_yaxis_transform(), va="center", fontsize=8, color=color)
        if line and rows[line - 1][0].family != row.family:
            axes.axhline(line - 0.5, color=_BAND, linewidth=1)
    axes.set_yticks(range(len(rows)), [row.what for row, _ in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xscale("log")
    scores = [_clipped(row.score(value)) for row, found in rows for value in (found["min"], found["max"], row.goal)]
    least, most = min(0.5, *scores) / 1.25, max(2.0, *scores) * 1.25
    ticks = [tick for tick in (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20) if least <= tick <= most]
    axes.set_xlim(least, most)
    axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    axes.minorticks_off()
    axes.grid(axis="x", color=_BAND, linewidth=0.8)
    return True


def _clipped(score: float) -> float:
    return max(_SCORE_LEAST, min(_SCORE_MOST, score))


# --- round trips ------------------------------------------------------------------------------------------------------
def _latency(figure: Any, report: Report) -> bool:
    """Draw the share of round trips below each duration: median over trials, range as a band."""
    found = {name: _curves(report, name) for name in _LATENCIES}
    if not any(found.values()):
        return False
    figure.set_size_inches(8.5, 4.8)
    axes = figure.subplots()
    _plain(axes, f"Round trips of one {size_name(report['settings']['record_bytes'])} record (p50, p99)", pad=30)
    for name, (label, color) in _LATENCIES.items():
        if not (curves := found[name]):
            continue
        shares = curves[0][0]
        times = [[ms * 1e3 for ms in at] for at in zip(*(times for _, times in curves), strict=True)]
        middle = [statistics.median(at) for at in times]
        axes.fill_betweenx(shares, [min(at) for at in times], [max(at) for at in times], color=color, alpha=0.2, lw=0)
        summary = f"{label} ({_at(0.5, shares, middle):.2f}, {_at(0.99, shares, middle):.2f} ms)"
        axes.plot(middle, shares, color=color, linewidth=2, label=summary)
    bound = next((row for row in report["rows"] if row["key"] == "ack_p99"), None)
    for name, label in (("at_least", "p99 at most"), ("goal", "goal for p99")):
        if bound and bound[name]:
            at = bound[name] * 1e3
            axes.axvline(at, color=_FAINT, linestyle=(0, (4, 4)), linewidth=1)
            text = f"{label} {at:g} ms"
            axes.text(at / 1.02, 0.03, text, rotation=90, ha="right", va="bottom", fontsize=8, color=_FAINT)
    axes.set_xscale("log")
    least, most = axes.get_xlim()
    ticks = [tick for tick in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if least <= tick <= most]
    axes.set_xticks(ticks, [f"{tick:g} ms" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(0, 1.01)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.grid(color=_BAND, linewidth=0.8)
    axes.legend(loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=3, frameon=False, fontsize=8.5, columnspacing=1.5)
    return True


def _at(share: float, shares: list[float], times: list[float]) -> float:
    return min(zip(shares, times, strict=True), key=lambda pair: abs(pair[0] - share))[1]


def _curves(report: Report, name: str) -> list[list[list[float]]]:
    return [trial["curves"][name] for trial in report["trials"] if name in trial["curves"]]


# --- throughput -------------------------------------------------------------------------------------------------------
def _throughput(figure: Any, report: Report) -> bool:
    """Draw GB/s by batch size: raw TCP and each order, side by side, with their ranges."""
    rows = {row["key"]: row for row in report["rows"] if row["median"] is not None}
    sizes = [size for size in sorted(report["settings"]["batch_bytes"]) if f"raw_{size}" in rows]
    if not sizes:
        return False
    shown = [name for name in _SERIES if any(f"{name}_{size}" in rows for size in sizes)]
    figure.set_size_inches(max(5.5, 1.8 + 2.4 * len(sizes)), 4.4)
    axes = figure.subplots()
    _plain(axes, "Publish throughput by order and batch size")
    width = 0.8 / len(shown)
    for bar, name in enumerate(shown):
        label, color = _SERIES[name]
        for group, size in enumerate(sizes):
            if (row := rows.get(f"{name}_{size}")) is None:
                continue
            low, middle, high = (row[key] / 1e9 for key in ("min", "median", "max"))
            at = group + (bar - (len(shown) - 1) / 2) * width
            axes.bar(at, middle, width * 0.9, color=color, label=label if not group else None)
            axes.plot([at, at], [low, high], color=_INK, linewidth=1)
            axes.annotate(
                f"{middle:.2f}", (at, high), xytext=(0, 3), textcoords="offset points", ha="center", fontsize=8
            )
    axes.set_xticks(range(len(sizes)), [f"{size_name(size)} batches" for size in sizes])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} GB/s" if value else "0")
    axes.grid(axis="y", color=_BAND, linewidth=0.8)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8.5)
    axes.margins(y=0.12)
    axes.locator_params(axis="y", nbins=6)
    return True


# --- flatness ---------------------------------------------------------------------------------------------------------
def _flatness(figure: Any, report: Report) -> bool:
    """Draw CPU per record and memory over records, sessions and brokers; the band is 20 % around the middle."""
    sweeps = [name for name in ("records", "sessions", "brokers") if _curves(report, f"flat_{name}_cpu")]
    if not sweeps:
        return False
    figure.set_size_inches(3.5 * len(sweeps), 6)
    figure.suptitle(
        "The cost of a record at scale (the green band is 20 % wide)", x=0.01, ha="left", fontsize=11,
        fontweight="bold", color=_INK,
    )  # fmt: skip
    figure.get_layout_engine().set(h_pad=0.12)
    grid = figure.subplots(2, len(sweeps), squeeze=False)
    kinds = (("cpu", "CPU a record", 1e6, "µs"), ("memory", "memory", 1e-6, "MB"))
    for line, (kind, what, scale, unit) in enumerate(kinds):
        for column, sweep in enumerate(sweeps):
            owner = " of a broker" if (kind, sweep) == ("memory", "brokers") else ""
            axes = grid[line][column]
            _plain(axes, f"{what}{owner}, by {sweep}", size=9.5)
            _sweep(axes, _curves(report, f"flat_{sweep}_{kind}"), scale, unit)
    return True


def _sweep(axes: Any, curves: list[list[list[float]]], scale: float, unit: str) -> None:
    xs = curves[0][0]
    ys = [statistics.median(at) * scale for at in zip(*(values for _, values in curves), strict=True)]
    middle = (min(ys) * max(ys)) ** 0.5
    axes.axhspan(middle / 1.2**0.5, middle * 1.2**0.5, color="#e6f0e8", zorder=0)
    color = _BAD if max(ys) > 1.2 * min(ys) else _FINE
    axes.plot(xs, ys, "o-", color=color, linewidth=1.8, markersize=5)
    axes.set_xscale("log")
    axes.set_xticks(xs, [count_name(int(x)) for x in xs], fontsize=7.5)
    axes.minorticks_off()
    axes.set_ylim(0, max(ys) * 1.35)
    axes.locator_params(axis="y", nbins=5)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} {unit}" if value else "0")
    axes.annotate(
        f"{max(ys) / min(ys) - 1:.0%} between least and most", (0.02, 0.06), xycoords="axes fraction", fontsize=8,
        color=color,
    )  # fmt: skip
    axes.grid(axis="y", color=_BAND, linewidth=0.8)
