"""Every metric, in one table; and what became of each metric of the seeds. docs/metrics.md is made from this."""

from __future__ import annotations

from typing import Final, NamedTuple


class Metric(NamedTuple):
    """One metric: a counter only grows, a gauge is as it is now, a histogram counts observations by size."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


_BROKER, _TOPIC = ("broker",), ("topic",)
_BOTH = ("broker", "topic")

NODE: Final = (
    Metric("embarcadero_up", "gauge", ("role", "version"), "1 for every role of this process"),
    Metric("process_cpu_seconds_total", "counter", (), "processor time of this process, user and system"),
    Metric("process_resident_memory_bytes", "gauge", (), "memory of this process, its part of the fabric included"),
    Metric("process_open_fds", "gauge", (), "open files and sockets of this process"),
    Metric("process_start_time_seconds", "gauge", (), "when this process started, seconds since 1970"),
)

BROKER: Final = (
    Metric("embarcadero_publish_bytes_total", "counter", _BOTH, "payload bytes of batches that came in"),
    Metric("embarcadero_publish_batches_total", "counter", _BOTH, "batches that came in"),
    Metric("embarcadero_publish_records_total", "counter", _BOTH, "records of batches that came in"),
    Metric("embarcadero_subscribe_bytes_total", "counter", _BOTH, "payload bytes served to readers"),
    Metric("embarcadero_subscribe_batches_total", "counter", _BOTH, "batches served to readers"),
    Metric("embarcadero_subscribe_records_total", "counter", _BOTH, "records served to readers"),
    Metric("embarcadero_publish_latency_seconds", "histogram", _BROKER, "from a whole batch at the broker to its outcome"),
    Metric("embarcadero_e2e_latency_seconds", "histogram", _BROKER, "from the append time to the answer of a waiting read"),
    Metric("embarcadero_outcomes_total", "counter", ("broker", "outcome"), "answers to batches and session requests, by outcome"),
    Metric("embarcadero_duplicates_rejected_total", "counter", _BROKER, "batches that were in the log already (DUP_OF, DUP)"),
    Metric("embarcadero_connections", "gauge", _BROKER, "clients connected now"),
    Metric("embarcadero_connections_total", "counter", _BROKER, "clients that ever connected"),
    Metric("embarcadero_connections_ended_total", "counter", ("broker", "error"), "connections that the broker ended, by the peer's mistake"),
    Metric("embarcadero_pending_entries", "gauge", _BROKER, "pending entries that the sequencer has not taken"),
    Metric("embarcadero_pending_slots", "gauge", _BROKER, "room for pending entries"),
    Metric("embarcadero_unresolved_entries", "gauge", _BROKER, "entries without an outcome"),
    Metric("embarcadero_published_index", "gauge", _BROKER, "frontier: pending entries below are published"),
    Metric("embarcadero_read_through_index", "gauge", _BROKER, "frontier: pending entries below were taken by the sequencer"),
    Metric("embarcadero_log_occupancy_ratio", "gauge", _BROKER, "share of the broker log that unresolved payloads keep"),
    Metric("embarcadero_credit_bytes", "gauge", _BROKER, "what all clients together may send now"),
    Metric("embarcadero_backpressure", "gauge", _BROKER, "1 while the broker grants no credit"),
    Metric("embarcadero_backpressure_total", "counter", _BROKER, "how often it stopped granting credit"),
    Metric("embarcadero_fetches_waiting", "gauge", _BROKER, "reads that wait for records"),
    Metric("embarcadero_readers", "gauge", _BOTH, "connections that read a topic"),
    Metric("embarcadero_reader_lag_batches", "gauge", _BOTH, "how far the slowest of them is behind the ordered frontier"),
    Metric("embarcadero_followed_epoch", "gauge", _BROKER, "the epoch that the broker follows; 0 before the first"),
)  # fmt: skip

SEQUENCER: Final = (
    Metric("embarcadero_epoch", "gauge", (), "the sequencer's epoch"),
    Metric("embarcadero_epoch_increments_total", "counter", (), "epochs opened since the fabric was made"),
    Metric("embarcadero_sequencer_failovers_total", "counter", (), "epochs opened after the first: each was a takeover"),
    Metric("embarcadero_broker_failures_total", "counter", (), "broker incarnations that this sequencer closed; also those that left in order"),
    Metric("embarcadero_rounds_total", "counter", (), "rounds, idle ones included"),
    Metric("embarcadero_entries_total", "counter", (), "pending entries decided on"),
    Metric("embarcadero_round_entries", "histogram", (), "entries of a round that had any"),
    Metric("embarcadero_sequencer_latency_seconds", "histogram", (), "duration of a round that had entries"),
    Metric("embarcadero_ordered_index", "gauge", _TOPIC, "frontier: batches and session entries below are ordered"),
    Metric("embarcadero_ordered_seq", "gauge", _TOPIC, "frontier: records below are ordered"),
    Metric("embarcadero_sessions", "gauge", ("topic", "state"), "sessions in the table: open, or fenced and kept for a while"),
    Metric("embarcadero_sessions_opened_total", "counter", _TOPIC, "sessions opened or continued"),
    Metric("embarcadero_sessions_closed_total", "counter", _TOPIC, "sessions closed by their publishers"),
    Metric("embarcadero_sessions_fenced_total", "counter", ("topic", "why"), "sessions fenced: gap, overflow, idle, replaced"),
    Metric("embarcadero_level5_clients_active", "gauge", (), "open sessions of all order-5 topics"),
    Metric("embarcadero_hold_buffer_entries", "gauge", (), "batches that wait for a gap to close"),
    Metric("embarcadero_hold_buffer_slots", "gauge", (), "room for them"),
    Metric("embarcadero_hold_buffer_timeouts_total", "counter", (), "gaps whose time was over"),
    Metric("embarcadero_gaps_skipped_total", "counter", (), "gaps declared lost (on_gap=skip)"),
    Metric("embarcadero_sequencer_hold_buffer_entries", "gauge", _TOPIC, "batches that wait for a gap to close, by topic"),
    Metric("embarcadero_sequencer_hold_buffer_age_ms", "gauge", _TOPIC, "age of the oldest gap; 0 without one"),
    Metric("embarcadero_sequencer_cascade_release_depth", "histogram", _TOPIC, "waiting batches released at once when a gap closed"),
    Metric("embarcadero_sequencer_skip_total", "counter", ("topic", "reason"), "SKIP entries; a full hold buffer fences instead, so the reason is always timeout"),
    Metric("embarcadero_sequencer_checkpoint_write_duration_us", "gauge", _TOPIC, "duration of the last checkpoint"),
    Metric("embarcadero_sequencer_checkpoint_age_sec", "gauge", _TOPIC, "age of the last checkpoint; 0 before the first"),
    Metric("embarcadero_sequencer_checkpoint_client_count", "gauge", _TOPIC, "sessions in the last checkpoint"),
)  # fmt: skip

ALL: Final = (*NODE, *BROKER, *SEQUENCER)
BY_NAME: Final = {metric.name: metric for metric in ALL}

_MAPPED = "the fabric is mapped memory: processors move the bytes, there is no call that could be counted or timed; see"

SEEDS: Final[dict[str, str]] = {
    "embarcadero_publish_bytes_total": "also by topic",
    "embarcadero_publish_batches_total": "also by topic",
    "embarcadero_subscribe_bytes_total": "also by topic",
    "embarcadero_publish_latency_seconds": "a histogram: take quantiles with histogram_quantile()",
    "embarcadero_e2e_latency_seconds": "a histogram, from the append time on; what a publisher waits is in the one above",
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
    "embarcadero_replication_lag_batches": "gone, because this version has no replicas; it comes with them",
    "embarcadero_replica_fsync_latency_seconds": "gone, because this version has no replicas; it comes with them",
    "embarcadero_broker_failures_total": "counted by the sequencer of the epoch",
    "embarcadero_sequencer_failovers_total": "",
    "embarcadero_epoch_increments_total": "",
    "embarcadero_cxl_read_bytes_total": f"gone, because {_MAPPED} embarcadero_subscribe_bytes_total",
    "embarcadero_cxl_write_bytes_total": f"gone, because {_MAPPED} embarcadero_publish_bytes_total",
    "embarcadero_cxl_read_latency_ns": f"gone, because {_MAPPED} embarcadero_e2e_latency_seconds",
    "embarcadero_cxl_write_latency_ns": f"gone, because {_MAPPED} embarcadero_publish_latency_seconds",
}
"""Metrics of the seeds' appendix C: a remark, or why it is gone."""
