"""The catalog of metrics: complete, and in agreement with the documentation."""

from __future__ import annotations

from pathlib import Path

from embarcadero.watch.metrics import ALL, BY_NAME, SEEDS, metrics_page

DOCS = Path(__file__).parent.parent.parent / "docs"

APPENDIX_C = """
publish_bytes_total publish_batches_total subscribe_bytes_total publish_latency_seconds e2e_latency_seconds
sequencer_latency_seconds level5_clients_active hold_buffer_entries hold_buffer_timeouts_total gaps_skipped_total
duplicates_rejected_total sequencer_hold_buffer_entries sequencer_hold_buffer_age_ms
sequencer_cascade_release_depth sequencer_skip_total sequencer_nop_entries_total
sequencer_checkpoint_write_duration_us sequencer_checkpoint_age_sec sequencer_checkpoint_client_count
replication_lag_batches replica_fsync_latency_seconds broker_failures_total sequencer_failovers_total
epoch_increments_total cxl_read_bytes_total cxl_write_bytes_total cxl_read_latency_ns cxl_write_latency_ns
"""


def test_every_initial_metric_is_accounted_for() -> None:
    """It is there under its name, or the table has the reason for its removal."""
    assert SEEDS.keys() == {f"embarcadero_{name}" for name in APPENDIX_C.split()}
    assert all((name in BY_NAME) != remark.startswith("gone, because ") for name, remark in SEEDS.items())


def test_names_and_kinds_are_well_formed() -> None:
    """Names are unique; counters, and only they, end in _total."""
    assert len(BY_NAME) == len(ALL)
    assert {metric.kind for metric in ALL} == {"counter", "gauge", "histogram"}
    assert [m.name for m in ALL if (m.kind == "counter") != m.name.endswith("_total")] == []


def test_the_page_in_docs_is_made_from_the_catalog() -> None:
    """After a change: python -m embarcadero.watch.metrics > docs/metrics.md."""
    assert (DOCS / "metrics.md").read_text() == metrics_page()
