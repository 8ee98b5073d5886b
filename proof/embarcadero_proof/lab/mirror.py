"""The cost of a mirror: the same load on a cluster without and on one with a mirror, side by side."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from embarcadero.config import load
from embarcadero.limits import MIB
from embarcadero.node.fabric_folder import SHARED_MEMORY
from embarcadero.node.local import LocalCluster
from embarcadero_proof.lab.latency import with_threads
from embarcadero_proof.lab.processes import cluster_pids, cpu_seconds
from embarcadero_proof.lab.publish import payload_bytes, publish_throughput
from embarcadero_proof.lab.settings import Settings
from embarcadero_proof.lab.trial import Announce, Trial

_LOG_BYTES = 64 * MIB  # of each broker: there are two clusters at a time


def measure(settings: Settings, trial: Trial, announce: Announce) -> None:
    """Measure publish throughput of order 5 and round trips with ack 1; the order changes with each trial."""
    parent = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    with (
        tempfile.TemporaryDirectory(dir=parent) as folder,
        _cluster(settings, "") as plain,
        _cluster(settings, folder) as mirrored,
    ):
        for name, cluster in trial.turned([("plain", plain), ("mirrored", mirrored)]):
            announce(f"publish and round trips, {name}")
            _measure_one(settings, trial, name, cluster)
    values = trial.values
    values["mirror_publish"] = values["mirrored_publish"] / values["plain_publish"]
    values["mirror_cpu"] = values["mirrored_cpu"] / values["plain_cpu"]
    values["mirror_ack_p50"] = values["mirrored_ack_p50"] / values["plain_ack_p50"]


@contextmanager
def _cluster(settings: Settings, mirror: str) -> Iterator[LocalCluster]:
    """Run a private cluster with topics for both measurements."""
    import embarcadero as emb

    config = load(None, {"fabric.mirror": mirror})
    with LocalCluster(brokers=settings.brokers, log_bytes=_LOG_BYTES, config=config) as cluster:
        with emb.connect(cluster.addresses) as log:
            for name in ("load", "latency"):
                log.create_topic(name, order=5)
        yield cluster


def _measure_one(settings: Settings, trial: Trial, name: str, cluster: LocalCluster) -> None:
    count = settings.records_in(settings.batch_bytes[0])
    frame = payload_bytes(count, settings.record_bytes)
    batches = max(settings.brokers, settings.total_bytes // settings.publishers // frame)
    before = cpu_seconds(cluster_pids(cluster))
    trial.values[f"{name}_publish"] = publish_throughput(
        cluster.addresses, "load", settings.publishers, batches, count, settings.record_bytes
    )
    spent = cpu_seconds(cluster_pids(cluster)) - before
    trial.values[f"{name}_cpu"] = spent / (batches * settings.publishers)
    times = with_threads(cluster.addresses, settings.record_bytes, settings.round_trips)
    trial.values[f"{name}_ack_p50"] = float(np.quantile(times, 0.5))
