"""Reads of records that have left memory, against raw reads of the same files; and the time to restart."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Final

from embarcadero.limits import MIB
from embarcadero.node.local import LocalCluster
from embarcadero_proof.lab.processes import cluster_with
from embarcadero_proof.lab.publish import payload_bytes, publish_throughput
from embarcadero_proof.lab.read import reader
from embarcadero_proof.lab.settings import Settings
from embarcadero_proof.lab.team import alone
from embarcadero_proof.lab.trial import Announce, Trial

_LOG_BYTES: Final = 16 * MIB  # so small that nearly everything is read from disk
_READ: Final = 1 * MIB
_SECONDS_MAX: Final = 60.0


def _segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("replica-0/lane-*/range-*/*.log"))


def _forget(paths: list[Path]) -> None:
    """Ask the kernel to drop these files from its cache, so that both sides begin without it."""
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        os.fdatasync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def _read_raw(paths: list[Path]) -> float:
    """Return the bytes per second of reading files from beginning to end."""
    total, began = 0, time.perf_counter()
    for path in paths:
        file, offset = os.open(path, os.O_RDONLY), 0
        while data := os.pread(file, _READ, offset):
            offset += len(data)
        os.close(file)
        total += offset
    return total / (time.perf_counter() - began)


def measure_warm(settings: Settings, trial: Trial, announce: Announce) -> None:
    """Publish far more than fits in memory, then read it from the earliest batch on."""
    count = settings.records_in(settings.batch_bytes[0])
    total = max(settings.total_bytes // 2, 8 * settings.brokers * _LOG_BYTES)
    each = max(settings.brokers, total // settings.publishers // payload_bytes(count, settings.record_bytes))
    with cluster_with(settings.brokers, replicas=1, log_bytes=_LOG_BYTES, warm=5) as cluster:
        announce("publish, to be read from disk")
        publish_throughput(
            cluster.addresses, "warm", settings.publishers, each, count, settings.record_bytes, ack=2
        )  # fmt: skip
        files = _segments(cluster.data_dir)
        for what in trial.turned(("raw", "warm")):
            _forget(files)
            if what == "raw":
                announce("raw reads of the segments")
                raw = _read_raw(files)
            else:
                announce("warm scan")
                warm = alone(reader, cluster.addresses, "warm", settings.publishers * (each + 1), 1, "durable")
    trial.values |= {"warm_scan": warm, "warm_raw": raw, "warm_to_raw": warm / raw}


def measure_restart(settings: Settings, trial: Trial, announce: Announce) -> None:
    """Kill everything, and restart without a fabric: the time to the first ack=2, with little and much on disk."""
    import embarcadero as emb

    for name, batches in (("small", 8), ("large", max(64, settings.total_bytes // 8 // MIB))):
        announce(f"restart, {name} log")
        with tempfile.TemporaryDirectory(prefix="embarcadero-bench-") as folder:
            with LocalCluster(brokers=settings.brokers, replicas=1, data_dir=folder) as cluster:
                with emb.connect(cluster.addresses) as log:
                    log.create_topic("restart", order=5, replicas=1)
                count = settings.records_in(MIB)
                publish_throughput(cluster.addresses, "restart", 1, batches, count, settings.record_bytes, ack=2)
                cluster.kill_all()
            began = time.perf_counter()
            with LocalCluster(brokers=settings.brokers, replicas=1, data_dir=folder) as cluster:
                trial.values[f"restart_ready_{name}"] = time.perf_counter() - began
                with emb.connect(cluster.addresses) as log, log.publisher("restart", ack=2, linger_ms=0) as publisher:
                    publisher.send(b"first").result(timeout=_SECONDS_MAX)
                trial.values[f"restart_{name}"] = time.perf_counter() - began
