"""Every metric, in one table; and what became of each metric of the seeds. docs/metrics.md is made from this."""

from __future__ import annotations

import itertools
import re
import sys
from collections import defaultdict
from typing import Final, NamedTuple

from embarcadero.env import Histogram
from embarcadero.errors import invariant


class Metric(NamedTuple):
    """One metric: a counter only grows, a gauge is as it is now, a histogram counts observations by size."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


def _table(text: str) -> tuple[Metric, ...]:
    """Metrics, a line each: kind, name with labels, what it tells."""
    rows = re.findall(r"^(\w+) (\w+)(?:\{([\w,]+)\})?: (.+)$", text, re.MULTILINE)
    return tuple(Metric(name, kind, tuple(filter(None, labels.split(","))), what) for kind, name, labels, what in rows)


NODE: Final = _table("""
gauge embarcadero_up{role,version}: 1 for every role of this process
counter process_cpu_seconds_total: processor time of this process, user and system
gauge process_resident_memory_bytes: memory of this process, its part of the fabric included
gauge process_open_fds: open files and sockets of this process
gauge process_start_time_seconds: when this process started, seconds since 1970
""")

BROKER: Final = _table("""
counter embarcadero_publish_bytes_total{broker,topic}: payload bytes of batches that came in
counter embarcadero_publish_batches_total{broker,topic}: batches that came in
counter embarcadero_publish_records_total{broker,topic}: records of batches that came in
counter embarcadero_subscribe_bytes_total{broker,topic}: payload bytes served to readers
counter embarcadero_subscribe_batches_total{broker,topic}: batches served to readers
counter embarcadero_subscribe_records_total{broker,topic}: records served to readers
histogram embarcadero_publish_latency_seconds{broker}: from a whole batch at the broker to its outcome
histogram embarcadero_e2e_latency_seconds{broker}: from the append time to the answer of a waiting read
counter embarcadero_outcomes_total{broker,outcome}: answers to batches and session requests
counter embarcadero_duplicates_rejected_total{broker}: batches that were in the log already (DUP_OF, DUP)
gauge embarcadero_connections{broker}: clients connected now
counter embarcadero_connections_total{broker}: clients that ever connected
counter embarcadero_connections_ended_total{broker,error}: connections that the broker ended because of the peer
gauge embarcadero_pending_entries{broker}: pending entries that the sequencer has not taken
gauge embarcadero_pending_slots{broker}: room for pending entries
gauge embarcadero_unresolved_entries{broker}: entries without an outcome
gauge embarcadero_published_index{broker}: frontier: pending entries below are published
gauge embarcadero_read_through_index{broker}: frontier: pending entries below were taken by the sequencer
gauge embarcadero_log_occupancy_ratio{broker}: share of the broker log that unresolved payloads keep
gauge embarcadero_credit_bytes{broker}: what all clients together may send now
gauge embarcadero_backpressure{broker}: 1 while the broker grants no credit
counter embarcadero_backpressure_total{broker}: how often it stopped granting credit
gauge embarcadero_fetches_waiting{broker}: reads that wait for records
gauge embarcadero_unread_bytes{broker}: what clients have not read yet, and room for reads of files and tables
gauge embarcadero_unread_connections{broker}: connections that hold such answers
counter embarcadero_unread_waits_total{broker}: how often a read had to wait for the memory of answers
counter embarcadero_references_copied_total{broker}: batches by reference whose staged bytes were copied
gauge embarcadero_references_waiting{broker}: batches that wait for a staged one to be read from a file
gauge embarcadero_acks_waiting_for_disks{broker}: acks (ack=2) that wait until their batch is durable
gauge embarcadero_log_kept_for_disks_ratio{broker}: share of the broker log that is kept for replicas
gauge embarcadero_durable_index{broker,lane}: frontier: batches of the lane below are durable, as counted by the broker
gauge embarcadero_tier_lag_batches{broker,lane}: durable batches of the lane that are not in its topic's table yet
gauge embarcadero_warm_reads{broker}: reads of segment files that run or wait
counter embarcadero_warm_reads_total{broker}: reads of segment files
counter embarcadero_warm_reads_ahead_total{broker}: fetches whose segment file was read before they came
gauge embarcadero_readers{broker,topic}: connections that read a topic, and asked for records in the last minute
gauge embarcadero_reader_lag_batches{broker,topic}: how far the slowest of them is behind the ordered frontier
gauge embarcadero_lane_index{broker,topic}: orders 0 and 1, frontier of the broker's own lane: batches below are in it
gauge embarcadero_lane_seq{broker,topic}: the same: records below are in it
gauge embarcadero_followed_epoch{broker}: the epoch that the broker follows; 0 before the first
""")

SEQUENCER: Final = _table("""
gauge embarcadero_sequencer_standby{candidate}: 1 while this process stands by, 0 while it reigns and has the others
gauge embarcadero_epoch: the sequencer's epoch
counter embarcadero_epoch_increments_total: epochs opened since the fabric was made
counter embarcadero_sequencer_failovers_total: epochs opened after the first: each was a takeover
counter embarcadero_broker_failures_total: broker incarnations that this sequencer closed, whatever their end was
counter embarcadero_rounds_total: rounds, idle ones included
counter embarcadero_entries_total: pending entries decided on
histogram embarcadero_round_entries: entries of a round that had any
histogram embarcadero_sequencer_latency_seconds: duration of a round that had entries
gauge embarcadero_ordered_index{topic}: frontier: batches and session entries below are ordered
gauge embarcadero_ordered_seq{topic}: frontier: records below are ordered
gauge embarcadero_sessions{topic,state}: sessions in the table: open, or fenced and kept for a while
counter embarcadero_sessions_opened_total{topic}: sessions opened or continued
counter embarcadero_sessions_closed_total{topic}: sessions closed by their publishers
counter embarcadero_sessions_fenced_total{topic,why}: sessions fenced: gap, overflow, idle, replaced, restart
gauge embarcadero_level5_clients_active: open sessions that are strong
gauge embarcadero_hold_buffer_entries: batches that wait for a gap to close
gauge embarcadero_hold_buffer_slots: room for them
counter embarcadero_hold_buffer_timeouts_total: gaps whose time was over
counter embarcadero_gaps_skipped_total: gaps declared lost (on_gap=skip)
gauge embarcadero_sequencer_hold_buffer_entries{topic}: batches that wait, by topic
gauge embarcadero_sequencer_hold_buffer_age_ms{topic}: age of the oldest gap; 0 without one
histogram embarcadero_sequencer_cascade_release_depth{topic}: waiting batches released at once
counter embarcadero_sequencer_skip_total{topic,reason}: SKIP entries; the reason is always timeout
gauge embarcadero_sequencer_checkpoint_write_duration_us{topic}: duration of the last checkpoint
gauge embarcadero_sequencer_checkpoint_age_sec{topic}: age of the last checkpoint; 0 before the first
gauge embarcadero_sequencer_checkpoint_client_count{topic}: sessions in the last checkpoint
gauge embarcadero_sequencer_durable_index{topic}: batches and session entries below are on enough disks, as last counted
counter embarcadero_sequencer_roomless_total{topic}: entries refused because too much is not durable yet
counter embarcadero_ranges_sealed_total: ranges sealed by this sequencer, usually because a replica had to be replaced
counter embarcadero_range_seals_failed_total: attempts to do so that came to nothing
gauge embarcadero_lanes_recovering: lanes that wait for replicas after a restart
counter embarcadero_lanes_recovered_total: lanes that came back from disk
gauge embarcadero_recovery_seconds: from the start of this epoch to the last lane that came back; 0 without one
""")

REPLICA: Final = _table("""
counter embarcadero_replica_entries_total{replica}: entries appended from the fabric
counter embarcadero_replica_bytes_total{replica}: payload bytes appended from the fabric
counter embarcadero_replica_commits_total{replica}: commits: each is one fdatasync for whatever had come
histogram embarcadero_replica_commit_entries{replica}: entries of a commit
histogram embarcadero_replica_fsync_latency_seconds{replica}: duration of a commit's fdatasync
counter embarcadero_replica_repaired_entries_total{replica}: entries copied from other replicas' files
counter embarcadero_replica_repaired_bytes_total{replica}: payload bytes copied from other replicas' files
counter embarcadero_replica_damage_total{replica}: damaged pieces found in its files
counter embarcadero_replica_disk_errors_total{replica}: writes, syncs and opens that failed
counter embarcadero_replica_checkpoints_total{replica}: session checkpoints written to disk
counter embarcadero_replica_dropped_bytes_total{replica}: bytes of segments given up by trims and retention
counter embarcadero_replica_scrubbed_bytes_total{replica}: bytes of old segments read and checked
gauge embarcadero_replica_trouble{replica,trouble}: 1 while it has it: disk_full, disk_failed, read_only, damaged
gauge embarcadero_replica_ranges{replica,state}: its ranges: open, complete, incomplete, not opened yet
gauge embarcadero_replica_disk_bytes{replica}: bytes of its segments
gauge embarcadero_replica_disk_free_bytes{replica}: room on its disk
gauge embarcadero_replication_lag_batches{replica,topic,lane}: how far its durable line is behind the ordered frontier
""")

ALL: Final = (*NODE, *BROKER, *SEQUENCER, *REPLICA)
BY_NAME: Final = {metric.name: metric for metric in ALL}

_MAPPED = "the fabric is mapped memory: processors move the bytes, there is no call that could be counted or timed; see"

SEEDS: Final[dict[str, str]] = {
    "embarcadero_publish_bytes_total": "also by topic",
    "embarcadero_publish_batches_total": "also by topic",
    "embarcadero_subscribe_bytes_total": "also by topic",
    "embarcadero_publish_latency_seconds": "a histogram: take quantiles with histogram_quantile()",
    "embarcadero_e2e_latency_seconds": "a histogram, from the append time on; the one above has what a publisher waits",
    "embarcadero_sequencer_latency_seconds": "a histogram",
    "embarcadero_level5_clients_active": "",
    "embarcadero_hold_buffer_entries": "",
    "embarcadero_hold_buffer_timeouts_total": "",
    "embarcadero_gaps_skipped_total": "",
    "embarcadero_duplicates_rejected_total": "by broker; a duplicate is answered with the first copy's position",
    "embarcadero_sequencer_hold_buffer_entries": "by topic: the sequencer has no shards",
    "embarcadero_sequencer_hold_buffer_age_ms": "by topic; of the oldest gap, without quantiles",
    "embarcadero_sequencer_cascade_release_depth": "by topic; a histogram",
    "embarcadero_sequencer_skip_total": "by topic; the reason is always timeout",
    "embarcadero_sequencer_nop_entries_total": "gone, because there are no NOP entries: results resolve duplicates",
    "embarcadero_sequencer_checkpoint_write_duration_us": "by topic",
    "embarcadero_sequencer_checkpoint_age_sec": "by topic",
    "embarcadero_sequencer_checkpoint_client_count": "by topic",
    "embarcadero_replication_lag_batches": "by replica and lane",
    "embarcadero_replica_fsync_latency_seconds": "a histogram, by replica",
    "embarcadero_broker_failures_total": "counted by the sequencer of the epoch",
    "embarcadero_sequencer_failovers_total": "",
    "embarcadero_epoch_increments_total": "",
    "embarcadero_cxl_read_bytes_total": f"gone, because {_MAPPED} embarcadero_subscribe_bytes_total",
    "embarcadero_cxl_write_bytes_total": f"gone, because {_MAPPED} embarcadero_publish_bytes_total",
    "embarcadero_cxl_read_latency_ns": f"gone, because {_MAPPED} embarcadero_e2e_latency_seconds",
    "embarcadero_cxl_write_latency_ns": f"gone, because {_MAPPED} embarcadero_publish_latency_seconds",
}
"""Metrics of the seeds' appendix C: a remark, or why it is gone."""


# --- page -------------------------------------------------------------------------------------------------------------
# A page of metrics in the Prometheus text format.
#
# Written here, and not by a library, because it is made in a broker's event loop: this takes a tenth of the time.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Page:
    """Samples, grouped by metric."""

    def __init__(self) -> None:
        self._lines: defaultdict[str, list[str]] = defaultdict(list)

    def put(self, name: str, value: float, **labels: object) -> None:
        """One value of a counter or gauge."""
        invariant(BY_NAME[name].labels == tuple(labels), f"{name} has its labels")
        self._lines[name].append(f"{name}{_braces(labels)} {value}")

    def histogram(self, name: str, found: Histogram, unit: float = 1, **labels: object) -> None:
        """A histogram whose bounds and sum are multiplied by `unit`."""
        invariant(BY_NAME[name].labels == tuple(labels), f"{name} has its labels")
        lines, sums = self._lines[name], list(itertools.accumulate(found.counts))
        for bound, count in zip([f"{bound * unit:g}" for bound in found.bounds] + ["+Inf"], sums, strict=True):
            lines.append(f"{name}_bucket{_braces(labels | {'le': bound})} {count}")
        lines.append(f"{name}_sum{_braces(labels)} {found.total * unit}")
        lines.append(f"{name}_count{_braces(labels)} {sums[-1]}")

    def text(self) -> bytes:
        """The page."""
        made = []
        for name, lines in self._lines.items():
            metric = BY_NAME[name]
            made += [f"# HELP {name} {metric.text}", f"# TYPE {name} {metric.kind}", *lines]
        return ("\n".join(made) + "\n").encode()


def _braces(labels: dict[str, object]) -> str:
    """Labels as text. Their values are numbers and names of ours: nothing in them needs an escape."""
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}" if labels else ""


# --- docs -------------------------------------------------------------------------------------------------------------
# docs/metrics.md, made from the catalog: `python -m embarcadero.watch.metrics > docs/metrics.md`.
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
