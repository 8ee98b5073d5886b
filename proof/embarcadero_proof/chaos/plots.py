"""Pictures of chaos, as PNG files: a time line of each case, and a histogram of pauses. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from embarcadero.errors import NotAvailable
from embarcadero_proof.chaos.timeline import Span, Timeline, percentiles

_INK, _FAINT, _BAND = "#24292f", "#8b949e", "#eaeef2"
_GOOD, _BAD = "#1a7f37", "#c4432b"
_ACKS: Final = {1: ("ack 1", "#2f6fb0"), 2: ("ack 2", "#d8a33f")}
_FAULT: Final = "#c4432b"
_SHORT_S: Final = 0.04
"""A shorter fault is drawn this long, so that it is visible."""


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise NotAvailable("no plots: matplotlib is not installed", "pip install 'embarcadero[plots]'") from None
    return Figure(figsize=(width, height), layout="constrained", dpi=120)


def _plain(axes: Any) -> None:
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_FAINT)
    axes.tick_params(colors=_INK, labelsize=8, length=0)
    axes.set_axisbelow(True)
    axes.grid(axis="y", color=_BAND, linewidth=0.8)


def draw_timeline(line: Timeline, title: str, verdict: str, good: bool, path: Path) -> None:
    """Draw faults at the top, acked records below them, and the latency of each ack."""
    rows = _rows(line.faults)
    figure = _figure(10, 4.6 + 0.2 * len(rows))
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold", color=_INK)
    figure.text(0.99, 0.985, verdict, ha="right", va="top", fontsize=8.5, color=_GOOD if good else _BAD)
    heights = [max(0.35, 0.2 * len(rows)), 1.6, 1.9]
    faults, acked, latency = figure.subplots(3, 1, sharex=True, height_ratios=heights)
    _draw_faults(faults, rows)
    _draw_acked(acked, line)
    _draw_latency(latency, line)
    for axes in (faults, acked, latency):
        for span in line.faults:
            axes.axvspan(span.start_s, max(span.end_s, span.start_s + _SHORT_S), color=_FAULT, alpha=0.06, linewidth=0)
        for at in line.lost_s:
            axes.axvline(at, color=_BAD, linewidth=1, linestyle=(0, (2, 2)))
        if line.healed_s is not None:
            axes.axvline(line.healed_s, color=_GOOD, linewidth=1)
    if line.healed_s is not None:
        latency.annotate(
            "healed", (line.healed_s, 0.02), xycoords=("data", "axes fraction"), xytext=(3, 0),
            textcoords="offset points", fontsize=7.5, color=_GOOD,
        )  # fmt: skip
    latency.set_xlim(0, line.seconds)
    latency.xaxis.set_major_formatter(lambda value, _: f"{value:g} s")
    figure.savefig(path, facecolor="white")


def _rows(faults: Sequence[Span]) -> dict[str, list[Span]]:
    """Group faults by kind, and by target if there are few targets."""
    targets = {f"{span.kind} {span.target}" for span in faults}
    found: dict[str, list[Span]] = {}
    for span in faults:
        name = f"{span.kind} {span.target}" if len(targets) <= 8 else span.kind
        found.setdefault(name if len(name) < 48 else f"{name[:45]}...", []).append(span)
    return found


def _draw_faults(axes: Any, rows: dict[str, list[Span]]) -> None:
    _plain(axes)
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)
    for row, spans in enumerate(rows.values()):
        bars = [(span.start_s, max(span.end_s - span.start_s, _SHORT_S)) for span in spans]
        axes.broken_barh(bars, (row - 0.36, 0.72), color=_FAULT, linewidth=0)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_ylim(max(len(rows), 1) - 0.4, -0.6)
    if not rows:
        axes.set_yticks([0], ["no faults"])


def _draw_acked(axes: Any, line: Timeline) -> None:
    _plain(axes)
    below = None
    for level, (label, color) in _ACKS.items():
        if level in line.acks:
            starts, counts = line.per_bin(level)
            base = counts * 0 if below is None else below
            top = base + counts
            axes.fill_between(starts, base, top, step="post", color=color, alpha=0.85, linewidth=0, label=label)
            below = top
    axes.set_ylim(bottom=0)
    axes.set_ylabel("records acked\nin 100 ms", fontsize=8, color=_INK)
    axes.locator_params(axis="y", nbins=4)
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 0.97), ncols=2, frameon=False, fontsize=8, borderaxespad=0.1)


def _draw_latency(axes: Any, line: Timeline) -> None:
    _plain(axes)
    for level, (_, color) in _ACKS.items():
        if level in line.acks:
            acks = line.acks[level]
            at = (acks.acked_us - line.began_us) / 1e6
            axes.plot(at, acks.latency_ms, ".", color=color, markersize=2, alpha=0.5, rasterized=True)
    axes.set_yscale("log")
    axes.set_ylabel("from send to ack", fontsize=8, color=_INK)
    low, high = axes.get_ylim()
    ticks = [tick for tick in (1, 10, 100, 1_000, 10_000) if low <= tick <= high]
    axes.set_yticks(ticks, [f"{tick} ms" if tick < 1_000 else f"{tick // 1_000} s" for tick in ticks])
    axes.minorticks_off()


def draw_histogram(
    series: Mapping[str, Sequence[float]], title: str, bounds: dict[str, float], footer: str, path: Path
) -> None:
    """Draw histograms of durations, one above the other, with the goals of the first one as lines."""
    figure = _figure(8.5, 1.2 + 3.0 * len(series))
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold", color=_INK)
    many = figure.subplots(len(series), 1, squeeze=False)[:, 0]
    for number, (axes, (what, values)) in enumerate(zip(many, series.items(), strict=True)):
        _draw_histogram(axes, what, values, {} if number else bounds)
    figure.text(0.995, 0.005, footer, ha="right", va="bottom", fontsize=6.5, color=_FAINT)
    figure.get_layout_engine().set(rect=(0, 0.03, 1, 0.97))
    figure.savefig(path, facecolor="white")


def _draw_histogram(axes: Any, what: str, values_ms: Sequence[float], bounds: dict[str, float]) -> None:
    _plain(axes)
    summary = ", ".join(f"{name} {value:.0f} ms" for name, value in percentiles(values_ms).items())
    axes.set_title(f"{what}; {len(values_ms)} times: {summary}", loc="left", fontsize=8.5, color=_INK)
    most = max([*values_ms, *bounds.values(), 1.0]) * 1.05
    axes.hist(values_ms, bins=60, range=(0, most), color=_ACKS[1][1])
    for value in sorted(set(bounds.values())):
        name = ", ".join(name for name, other in bounds.items() if other == value)
        axes.axvline(value, color=_FAINT, linestyle=(0, (4, 4)), linewidth=1)
        axes.annotate(
            f"{name} {value:g} ms", (value, 1), xycoords=("data", "axes fraction"), xytext=(-3, -4), rotation=90,
            textcoords="offset points", ha="right", va="top", fontsize=7.5, color=_FAINT,
        )  # fmt: skip
    axes.set_xlim(0, most)
    axes.set_ylabel("how often", fontsize=8, color=_INK)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g} ms")


def draw_series(
    kinds: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]], title: str, path: Path
) -> None:
    """Draw the resources of each role over time: one picture per kind, one line per role."""
    figure = _figure(10, 0.6 + 1.9 * len(kinds))
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold", color=_INK)
    many = figure.subplots(len(kinds), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (kind, roles) in zip(many, kinds.items(), strict=True):
        _plain(axes)
        axes.set_title(kind, loc="left", fontsize=8.5, color=_INK)
        for role, (at_s, values) in roles.items():
            axes.plot(at_s, values, linewidth=1.2, label=role)
        axes.set_ylim(bottom=0)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=7)
    many[-1].xaxis.set_major_formatter(lambda value, _: f"{value:g} s")
    figure.savefig(path, facecolor="white")
