"""The cluster of a measurement, and the CPU time and memory of its processes."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from embarcadero.limits import KIB
from embarcadero.node.local import LocalCluster

_CPU_CLOCK: Final = 2  # of all threads of a process: CPUCLOCK_SCHED in the kernel's numbering
_FILES: Final = 65_536


@contextmanager
def cluster_with(
    brokers: int, *, replicas: int = 0, log_bytes: int | None = None, **orders: int
) -> Iterator[LocalCluster]:
    """Run a private cluster with default settings, the same for all rows, and a topic for each name=order."""
    import embarcadero as emb

    with LocalCluster(brokers=brokers, replicas=replicas, log_bytes=log_bytes) as cluster:
        with emb.connect(cluster.addresses) as log:
            for name, order in orders.items():
                log.create_topic(name, order=order, replicas=replicas)
        yield cluster


def cluster_pids(cluster: LocalCluster) -> list[int]:
    """Return the process ids of the supervisor, the sequencer and all brokers."""
    return [pid for pid in cluster.pids().values() if pid]


def cpu_seconds(pids: list[int]) -> float:
    """Return the CPU time (user and system, all threads) of these processes so far."""
    return sum(time.clock_gettime((~pid << 3) | _CPU_CLOCK) for pid in pids)


def private_bytes(pid: int) -> int:
    """Return the anonymous memory of a process in RAM (RssAnon): its memory beyond the shared fabric."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * KIB
    return 0


def allow_many_files() -> None:
    """Raise this process's limit of open files as far as possible; a cluster started by it inherits the limit."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if most == resource.RLIM_INFINITY else min(_FILES, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(now, wanted), most))
