"""What a cluster under measurement is, and what its processes cost: CPU time and memory of other processes."""

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
    """A private cluster with default settings, the same for all rows, and a topic for each name=order."""
    import embarcadero as emb

    with LocalCluster(brokers=brokers, replicas=replicas, log_bytes=log_bytes) as cluster:
        with emb.connect(cluster.addresses) as log:
            for name, order in orders.items():
                log.create_topic(name, order=order, replicas=replicas)
        yield cluster


def cluster_pids(cluster: LocalCluster) -> list[int]:
    """Process ids of the supervisor, the sequencer and all brokers."""
    return [pid for pid in cluster.pids().values() if pid]


def cpu_seconds(pids: list[int]) -> float:
    """CPU time (user and system, all threads) that these processes have used so far."""
    return sum(time.clock_gettime((~pid << 3) | _CPU_CLOCK) for pid in pids)


def private_bytes(pid: int) -> int:
    """Anonymous memory of a process that is in RAM (RssAnon): what it needs beyond the shared fabric."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * KIB
    return 0


def allow_many_files() -> None:
    """Raise our own limit of open files as far as we may; a cluster that we start inherits it."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if most == resource.RLIM_INFINITY else min(_FILES, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(now, wanted), most))
