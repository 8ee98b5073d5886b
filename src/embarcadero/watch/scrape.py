"""Reads the metrics of all nodes of a cluster, each with a time-out: one that does not answer is left out."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple
from urllib.request import urlopen

from embarcadero.limits import MIB
from embarcadero.watch.places import Place

_TIMEOUT_S: Final = 1.5
_PAGE_BYTES_MAX: Final = 16 * MIB

Labels = dict[str, str]


class Scrape(NamedTuple):
    """What one node told: samples by name."""

    place: Place
    at: float
    samples: dict[str, list[tuple[Labels, float]]]


def scrape_all(places: Iterable[Place]) -> dict[str, Scrape]:
    """The nodes that answer, by their roles."""
    running = [place for place in places if place.port]
    if not running:
        return {}
    with ThreadPoolExecutor(max_workers=min(16, len(running))) as pool:
        return {found.place.roles: found for found in pool.map(_scrape, running) if found is not None}


def _scrape(place: Place) -> Scrape | None:
    try:
        with urlopen(place.url, timeout=_TIMEOUT_S) as answer:
            text = answer.read(_PAGE_BYTES_MAX).decode()
        return Scrape(place, time.monotonic(), parse(text))
    except (OSError, ValueError):
        return None


def parse(text: str) -> dict[str, list[tuple[Labels, float]]]:
    """A page of metrics as samples by name."""
    from prometheus_client.parser import text_string_to_metric_families

    found: defaultdict[str, list[tuple[Labels, float]]] = defaultdict(list)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name].append((sample.labels, sample.value))
    return dict(found)


class Change:
    """The same node, earlier and now: values, and rates in between. A node that started anew began from zero."""

    def __init__(self, before: Scrape | None, now: Scrape) -> None:
        same = before is not None and before.place.pid == now.place.pid
        self._before, self._now = (before if same else None), now
        self._seconds = max(1e-6, now.at - before.at) if before is not None else 0.0

    def value(self, name: str, **labels: object) -> float:
        """The sum of all samples with these labels, as they are now."""
        return _sum(self._now, name, labels)

    def rate(self, name: str, **labels: object) -> float:
        """How fast it grew, a second."""
        if not self._seconds:
            return 0.0
        return max(0.0, self.value(name, **labels) - _sum(self._before, name, labels)) / self._seconds

    def labels(self, name: str, label: str) -> set[str]:
        """All values of a label."""
        return {labels[label] for labels, _ in self._now.samples.get(name, [])}

    def buckets(self, name: str) -> dict[float, float]:
        """Observations at or below each bound since the earlier look; all of them when there is none."""
        grown: defaultdict[float, float] = defaultdict(float)
        for scrape, sign in ((self._now, 1), (self._before, -1)):
            for labels, count in scrape.samples.get(f"{name}_bucket", []) if scrape else []:
                grown[float(labels["le"])] += sign * count
        return grown


def _sum(scrape: Scrape | None, name: str, wanted: dict[str, object]) -> float:
    if scrape is None:
        return 0.0
    wanted_text = {label: str(value) for label, value in wanted.items()}
    return sum(value for labels, value in scrape.samples.get(name, []) if wanted_text.items() <= labels.items())


def quantile(buckets: dict[float, float], share: float) -> float | None:
    """The value below which this share of observations lies, straight between bounds; None without any."""
    total = buckets.get(math.inf, 0.0)
    if total <= 0:
        return None
    wanted, low, below = share * total, 0.0, 0.0
    for bound in sorted(buckets):
        if buckets[bound] >= wanted:
            inside = buckets[bound] - below
            return low if math.isinf(bound) or not inside else low + (bound - low) * (wanted - below) / inside
        low, below = bound, buckets[bound]
    return low
