"""What became of the keys and variables that the first designs had: each is a key here, or gone for a reason."""

from __future__ import annotations

from typing import Final

from embarcadero.config.table import KEYS

_ARRAYS: Final = "one sequencer orders whole rounds as arrays"
_REPLICAS: Final = "copies belong to a topic: `replicas` and `durable_on` of create_topic"
_BENCH: Final = "it is an option of `embarcadero bench`"

GONE: Final = {
    "cluster.name": "a cluster is its folder (cluster.data_dir) and has an id of its own",
    "cxl.numa_node": "mount cluster.fabric_dir with the memory policy you want, and pin processes with cluster.pin",
    "sequencer.mode": _ARRAYS + "; there are no modes to choose from",
    "sequencer.collectors": _ARRAYS + "; nobody collects for it",
    "sequencer.num_shards": _ARRAYS + "; it has no shards",
    "sequencer.spsc_queue_capacity": _ARRAYS + "; brokers' pending rings (fabric.pending_slots) are the only queues",
    "ordering.order5_enabled": "order 5 is always there; each topic chooses its order",
    "recovery.checkpoint_interval_sec": "checkpoints are taken by entries written, not by time: takeovers are bounded",
    "recovery.checkpoint_location": "checkpoints are in the fabric, beside what they cover",
    "recovery.goi_replay_entries": "a takeover replays what follows the newest checkpoint, and there always is one",
    "safety.goi_wraparound_high_pct": "an order slot is reused only when a checkpoint covers it; brokers stop at "
    "broker.water_high",
    "safety.goi_wraparound_low_pct": "see safety.goi_wraparound_high_pct; brokers go on at broker.water_low",
    "safety.stuck_slot_timeout_sec": "a broker publishes a slot only when it is whole, so none is ever stuck",
    "safety.committed_seq_reconcile_sec": "one writer writes a contiguous index, so there is nothing to reconcile",
    "replication.factor": _REPLICAS,
    "network.io_threads": "a broker has one event loop; run more brokers (cluster.brokers) instead of more threads",
    "EMBARCADERO_ACK_DRAIN_US": "a doorbell wakes brokers when there are acks to send",
    "TOTAL_MESSAGE_SIZE": _BENCH,
    "NUM_ITERATIONS": _BENCH,
}
"""Names without a key here, and why."""

STANDS_FOR: Final = {name: key for key in KEYS.values() for name in key.rule.stands_for}
"""Names that have a key here."""

SEEDS: Final = {name: f"it is {key} here" for name, key in STANDS_FOR.items() if name != str(key)} | {
    name: f"it is gone: {reason}" for name, reason in GONE.items()
}
"""What to tell somebody who uses an old name."""
