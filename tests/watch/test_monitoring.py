"""The scrape configuration, alert rules and dashboard: valid for Prometheus and Grafana, about existing metrics."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from embarcadero.watch.metrics import BY_NAME

FOLDER = Path(__file__).parent.parent.parent / "docs" / "monitoring"
DURATION = re.compile(r"(\d+(ms|[smhdwy]))+")
FUNCTIONS = {
    "abs", "absent", "histogram_quantile", "max_over_time", "predict_linear", "rate", "increase", "sum", "max", "min",
    "count", "by", "and", "or", "offset", "on", "unless", "up", "job", "clamp_max",
}  # fmt: skip


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"] for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    return json.loads((FOLDER / "grafana.json").read_text())  # type: ignore[no-any-return]


def expressions() -> Iterator[str]:
    yield from (rule["expr"] for rule in rules())
    yield from (target["expr"] for panel in dashboard()["panels"] for target in panel["targets"])


def problems(expression: str, recorded: set[str]) -> list[str]:
    """Problems of an expression: names, labels of our metrics, brackets, functions."""
    found = []
    stripped = re.sub(r'"[^"]*"', '""', expression).replace("$__rate_interval", "5m")
    for opening, closing in ("()", "[]", "{}"):
        if stripped.count(opening) != stripped.count(closing):
            found.append(f"{opening} without {closing}")
    found += [
        f"{text} is no duration" for text in re.findall(r"\[([^\]]*)\]", stripped) if not DURATION.fullmatch(text)
    ]
    labels = set(re.findall(r"\{(\w+)=", stripped))
    for clause in re.findall(r"\b(?:by|on) \(([^)]*)\)", stripped):
        labels |= {label.strip() for label in clause.split(",")}
    plain = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\b(?:by|on) \([^)]*\)|\boffset \w+", " ", stripped)
    names = {name for name in re.findall(r"[a-zA-Z_:][\w:]*", plain) if name not in FUNCTIONS and name != "e9"}
    known: set[str] = {"le", "job", "node"}
    for name in names:
        metric = BY_NAME.get(name) or BY_NAME.get(re.sub(r"_(bucket|count|sum)$", "", name))
        if metric is None and name not in recorded:
            found.append(f"{name} is no metric")
        elif metric is not None:
            known |= set(metric.labels)
            if metric.kind == "histogram" and name == metric.name:
                found.append(f"{name} is a histogram: use its buckets")
            if metric.kind == "counter" and not re.search(rf"(rate|increase)\(\s*{name}\b", stripped):
                found.append(f"{name} is a counter: use its rate")
        else:
            known |= {"broker", "topic"}
    return found + [f"{label} is no label of {names}" for label in labels - known]


@pytest.mark.parametrize("expression", list(expressions()))
def test_expressions_use_existing_metrics(expression: str) -> None:
    """With their labels, as Prometheus reads them."""
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    assert problems(expression, recorded) == []


@pytest.mark.parametrize(
    "wrong",
    [
        "embarcadero_reader_lag > 1", "rate(embarcadero_publish_bytes_total[5x])", "sum(embarcadero_connections",
        "embarcadero_publish_bytes_total", "sum by (replica) (embarcadero_connections)",
        "embarcadero_publish_latency_seconds", "nonsense(embarcadero_connections)",
    ],
)  # fmt: skip
def test_wrong_expressions_are_found(wrong: str) -> None:
    """The check can fail."""
    assert problems(wrong, set()) != []


def test_alert_rules_are_valid_for_prometheus() -> None:
    """Fields of a rule and no others; lag in seconds, degraded topics, disks and fail-overs are there."""
    for rule in rules():
        assert ("alert" in rule) != ("record" in rule)
        assert set(rule) <= {"alert", "record", "expr", "for", "labels", "annotations"}
        assert DURATION.fullmatch(rule.get("for", "1m"))
        if "alert" in rule:
            assert rule["labels"]["severity"] in {"info", "warning", "critical"}
            assert set(rule["annotations"]) == {"summary", "action"}
    names = [rule["alert"] for rule in rules() if "alert" in rule]
    assert len(set(names)) == len(names)
    assert {f"Embarcadero{what}" for what in ("ReaderLag", "TopicsDegraded", "DiskFillsUp", "Failover")} <= {*names}


def test_lag_in_seconds_does_not_depend_on_other_readers() -> None:
    """A stuck reader beside many others lags by the records published since, whatever the others read."""
    (lag,) = [rule["expr"] for rule in rules() if rule.get("record") == "embarcadero:reader_lag_seconds"]
    assert set(re.findall(r"embarcadero_\w+", lag)) == {
        "embarcadero_reader_lag_batches", "embarcadero_publish_batches_total", "embarcadero_lane_index",
    }  # fmt: skip


def test_the_dashboard_is_valid_for_grafana() -> None:
    """Panels with ids of their own that fit the grid, each with a data source, a unit and queries."""
    page = dashboard()
    assert (page["title"], page["uid"], page["schemaVersion"]) == ("Embarcadero", "embarcadero", 39)
    variables = {variable["name"] for variable in page["templating"]["list"]}
    assert len({panel["id"] for panel in page["panels"]}) == len(page["panels"])
    taken = set()
    for panel in page["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken
        taken |= cells
        assert panel["type"] in {"timeseries", "stat"}
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        for used in re.findall(r"\$\{?(\w+)\}?", json.dumps(panel)):
            assert used in variables | {"__rate_interval"}


def test_the_scrape_configuration_discovers_all_processes() -> None:
    """It scrapes the processes of the unit on the page, and the page shows the same."""
    loaded = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
    (job,) = loaded["scrape_configs"]
    urls = [one["url"] for one in job["http_sd_configs"]]
    assert job["job_name"] == "embarcadero"
    assert urls == ["http://127.0.0.1:9100/targets", "http://127.0.0.1:9101/targets"]
    assert all((FOLDER / name).exists() for name in loaded["rule_files"])
    page = (FOLDER.parent / "operations-systemd.md").read_text()
    assert all(f"- url: {url}" in page for url in urls)
