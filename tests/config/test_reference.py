"""The reference page can't go stale, and no name of the first designs is forgotten."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from embarcadero.config.key import Kind
from embarcadero.config.reference import example_file, page
from embarcadero.config.sources import resolve
from embarcadero.config.table import DEFAULTS, GONE, KEYS, SECTIONS, STANDS_FOR

ROOT = Path(__file__).parent.parent.parent

SEED_NAMES = {
    "cluster.name", "cluster.brokers", "cluster.replicas",
    "cxl.primary_device", "cxl.secondary_device", "cxl.size_gb", "cxl.numa_node",
    "sequencer.mode", "sequencer.epoch_us", "sequencer.collectors", "sequencer.num_shards",
    "sequencer.spsc_queue_capacity",
    "ordering.default_order", "ordering.order5_enabled", "ordering.max_clients", "ordering.hold_buffer_size",
    "ordering.base_timeout_ms", "ordering.dedupe_window", "ordering.client_ttl_sec",
    "recovery.checkpoint_interval_sec", "recovery.checkpoint_location", "recovery.goi_replay_entries",
    "safety.goi_wraparound_high_pct", "safety.goi_wraparound_low_pct", "safety.stuck_slot_timeout_sec",
    "safety.committed_seq_reconcile_sec",
    "replication.factor", "replication.ack_level",
    "broker.pbr_high_watermark_pct", "broker.pbr_low_watermark_pct", "broker.backpressure_reject_after_sec",
    "network.broker_port", "network.max_connections", "network.recv_buffer_mb", "network.io_threads",
    "storage.batch_size", "storage.batch_headers_size", "storage.segment_size",
    "EMBARCADERO_ACK_TIMEOUT_SEC", "EMBARCADERO_ACK_SPIN_US", "EMBARCADERO_ACK_DRAIN_US",
    "TOTAL_MESSAGE_SIZE", "NUM_ITERATIONS",
}  # fmt: skip
"""All keys of the first designs' configuration reference, and the walk-through's keys and variables."""


def test_the_page_is_the_output_of_the_code() -> None:
    """docs/configuration.md is the output of `embarcadero config reference`."""
    assert (ROOT / "docs" / "configuration.md").read_text() == page()


def test_every_initial_name_is_accounted_for() -> None:
    """Each has a key here or a reason for its removal, never both, and the page names it."""
    assert {*STANDS_FOR, *GONE} == SEED_NAMES
    assert not STANDS_FOR.keys() & GONE.keys()
    assert all(f"| `{name}` | " in page() for name in SEED_NAMES)


@pytest.mark.parametrize("key", KEYS.values(), ids=str)
def test_every_key_is_fully_documented(key: object) -> None:
    """A meaning in a sentence, a default, a range where numbers are compared, and its variable."""
    full = KEYS[str(key)]
    rule = full.rule

    assert rule.meaning.endswith(".")
    assert rule.default_text or full.show(full.default) or rule.kind in {Kind.TEXT, Kind.PATH}
    assert full.range or rule.kind in {Kind.TEXT, Kind.PATH, Kind.LIST}
    assert f"| `{full}` | " in page()
    assert f"`EMBARCADERO_{full.section.upper()}_{full.name.upper()}`" in page()


def test_variables_are_distinct() -> None:
    """No two keys share a variable."""
    variables = [variable for key in KEYS.values() for variable in key.variables]

    assert len(set(variables)) == len(variables)


def test_defaults_are_valid() -> None:
    """The defaults alone are a configuration without problems."""
    found = resolve(environ={})

    assert not found.problems
    assert found.config() == DEFAULTS


def test_the_example_is_a_configuration(tmp_path: Path) -> None:
    """As printed it changes nothing; with all comments removed it contains the defaults."""
    path = tmp_path / "embarcadero.yaml"
    path.write_text(example_file())
    assert resolve(path, environ={}).config() == DEFAULTS

    lines = [line.removeprefix("# ").removeprefix("#") for line in example_file().splitlines()[1:]]
    path.write_text("\n".join(lines))
    found = resolve(path, environ={})
    assert found.config() == DEFAULTS
    assert set(yaml.safe_load(path.read_text())) == set(SECTIONS)
    assert {full for full, origin in found.origins.items() if origin != "default"} == {
        full for full, key in KEYS.items() if not key.rule.fixed
    }


def test_every_key_is_used() -> None:
    """An unused key would promise an effect that it does not have."""
    sources = [path for path in (ROOT / "src" / "embarcadero").rglob("*.py") if path.parent.name != "config"]
    read = {name for path in sources for name in re.findall(r"(?<=\w)\.(\w+)", path.read_text())}

    assert {str(key) for key in KEYS.values() if not key.rule.fixed and key.name not in read} == set()
