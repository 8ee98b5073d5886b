"""docs/metrics.md, made from the catalog: `python -m embarcadero.watch.docs > docs/metrics.md`."""

from __future__ import annotations

import sys

from embarcadero.watch.catalog import BROKER, NODE, REPLICA, SEEDS, SEQUENCER, Metric

_HEAD = """# Metrics

Every node process serves four pages over HTTP: `/metrics` in the Prometheus text format, `/health` and `/ready` as
small JSON, and `/targets`, the addresses of all processes of the cluster for Prometheus's `http_sd_configs`
([operations-systemd](operations-systemd.md) has the scrape configuration, alert rules and a dashboard). A process that
died stays in `/targets` until it runs again, so Prometheus has `up == 0` for it; one that was stopped in order leaves.
`embarcadero status` tells the addresses. `embarcadero up --metrics-port 9100` makes them fixed: the first sequencer's
is 9100, broker 0's 9101, and so on, replicas after the last broker; with `--processes one` there is only 9100. When a
sequencer that stands by takes over, its process serves the metrics of the sequencer, so let Prometheus discover ports.
They are on loopback unless `--metrics-host` says otherwise; nobody is asked for a password, so keep it to networks you
trust.

| page | 200 when | else |
| --- | --- | --- |
| `/health` | all roles of the process run | 503, and which does not |
| `/ready` of a broker | it is a member and the sequencer's heart beats | 503, and why |
| of the sequencer | its epoch is the newest | 503, and why |
| of a replica | it is a member and its disk takes what is written | 503, and why |

A page costs its process about a millisecond, and nothing while nobody asks: roles keep plain counters, touched once per
batch or per round. Counters start from zero with every incarnation. A reader that moved to another broker may be
counted at the earlier one for a minute. A reader that asks for nothing for a minute is not counted any more, nor is its
lag: whether it ended, or is stuck in its own work, a broker can't tell. For a topic that must be read, also alert on
`embarcadero_readers`, or look at the places of named readers (`embarcadero topic describe`).
"""


def metrics_page() -> str:
    """The whole page."""
    parts = [_HEAD]
    tables = {"Of every process": NODE, "Of a broker": BROKER, "Of the sequencer": SEQUENCER, "Of a replica": REPLICA}
    for title, metrics in tables.items():
        parts.append(f"\n## {title}\n\n| name | kind | labels | what |\n| --- | --- | --- | --- |\n")
        parts += [_row(metric) for metric in metrics]
    parts.append("\n## What became of the metrics of the first design\n\n| name there | here |\n| --- | --- |\n")
    parts += [f"| `{name}` | {remark or 'as it was'} |\n" for name, remark in SEEDS.items()]
    return "".join(parts)


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.name}` | {metric.kind} | {labels} | {metric.text} |\n"


if __name__ == "__main__":
    sys.stdout.write(metrics_page())
