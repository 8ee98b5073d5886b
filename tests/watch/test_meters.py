"""Histograms, pages and quantiles agree with each other and with a plain computation."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from embarcadero.env import LATENCY_US, Histogram
from embarcadero.watch.endpoints import Change, NodeEndpoint, Scrape, parse, quantile
from embarcadero.watch.metrics import Page

VALUES = st.lists(st.integers(0, 20_000_000), max_size=40)
PLACE = NodeEndpoint(roles="broker:0", pid=1, host="127.0.0.1", port=1)


@given(VALUES, VALUES)
def test_many_together_count_like_one_by_one(first: list[int], second: list[int]) -> None:
    """The fast path over arrays and the plain path give the same counts."""
    together, alone = Histogram(LATENCY_US), Histogram(LATENCY_US)
    together.add_many(np.array(first, dtype=np.int64))
    together.add_many(np.array(second, dtype=np.int64))
    for value in first + second:
        alone.add(value)

    assert (together.counts, together.total) == (alone.counts, alone.total)
    assert sum(alone.counts) == len(first + second)


@given(VALUES)
def test_a_page_is_valid_for_prometheus(values: list[int]) -> None:
    """A histogram on a page has cumulative buckets, a sum and a count; a counter its value."""
    found = Histogram(LATENCY_US)
    found.add_many(np.array(values, dtype=np.int64))
    page = Page()
    page.histogram("embarcadero_publish_latency_seconds", found, 1e-6, broker=3)
    page.put("embarcadero_publish_bytes_total", 12, broker=3, topic="t")
    samples = parse(page.text().decode())

    assert samples["embarcadero_publish_bytes_total"] == [({"broker": "3", "topic": "t"}, 12.0)]
    assert samples["embarcadero_publish_latency_seconds_count"][0][1] == len(values)
    for labels, count in samples["embarcadero_publish_latency_seconds_bucket"]:
        assert count == sum(value <= float(labels["le"]) * 1e6 * (1 + 1e-9) for value in values)


@given(st.lists(st.integers(0, 9_000_000), min_size=1, max_size=40), st.sampled_from([0.5, 0.99]))
def test_a_quantile_lies_in_the_bucket_of_the_true_one(values: list[int], share: float) -> None:
    """It is not further off than the bounds around it."""
    found = Histogram(LATENCY_US)
    found.add_many(np.array(values, dtype=np.int64))
    sums = np.cumsum(found.counts)
    buckets = dict(zip([*map(float, LATENCY_US), float("inf")], map(float, sums), strict=True))
    true = sorted(values)[max(0, int(np.ceil(share * len(values))) - 1)]
    guess = quantile(buckets, share)
    above = next((bound for bound in LATENCY_US if bound >= true), LATENCY_US[-1])
    below = max((bound for bound in LATENCY_US if bound < true), default=0)

    assert guess is not None
    assert below <= guess <= above


def test_rates_cover_the_time_between_and_restart_with_a_process() -> None:
    """Twice as much after two seconds is a rate; a new process starts from zero."""

    def at(when: float, value: float, pid: int) -> Scrape:
        place = NodeEndpoint(roles="broker:0", pid=pid, host="127.0.0.1", port=1)
        return Scrape(place, when, {"x_total": [({"topic": "a"}, value), ({"topic": "b"}, 1.0)]})

    assert Change(at(1.0, 10, 7), at(3.0, 30, 7)).rate("x_total") == 10
    assert Change(at(1.0, 10, 7), at(3.0, 30, 7)).rate("x_total", topic="b") == 0
    assert Change(at(1.0, 10, 7), at(3.0, 4, 8)).rate("x_total", topic="a") == 2
    assert Change(None, at(3.0, 4, 8)).rate("x_total") == 0
    assert quantile({}, 0.5) is None
