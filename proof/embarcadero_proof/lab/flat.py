"""Whether the cost of a record stays the same at scale: CPU and memory over more records, sessions and brokers.

CPU is that of all processes of the cluster, and of publishers that use the client library. Memory is the anonymous
memory of the cluster's processes (for the sweep over brokers: of one broker). A row is the largest value of its curve
divided by the smallest, minus one.
"""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise

import uvloop

from embarcadero.client.api.aio_streams import Publisher, RecordAwaitable
from embarcadero.limits import BATCH_BYTES_DEFAULT
from embarcadero.node.local import LocalCluster
from embarcadero_proof.lab.processes import cluster_pids, cluster_with, cpu_seconds, private_bytes
from embarcadero_proof.lab.publish import records
from embarcadero_proof.lab.settings import RECORD_OVERHEAD_BYTES, SMALL_RECORD_BYTES, Settings
from embarcadero_proof.lab.team import Seat, Team
from embarcadero_proof.lab.trial import Announce, Trial

_ACK_S = 120.0
_IN_A_BATCH = BATCH_BYTES_DEFAULT // (SMALL_RECORD_BYTES + RECORD_OVERHEAD_BYTES)
_IN_A_SMALL_BATCH = 100
_AT_ONCE = 512  # batches of all sessions without an ack

Point = tuple[float, float]
"""CPU seconds per record, bytes of memory."""


def _publisher(seat: Seat, addresses: list[str], topic: str, parts: list[int]) -> float:
    """Publish several numbers of batches, one after the other; report own CPU time before each, and at the end."""
    import embarcadero as emb

    batch = records(_IN_A_BATCH, SMALL_RECORD_BYTES)
    with emb.connect(addresses) as log, log.publisher(topic, ack=1) as publisher:
        publisher.publish(batch).result(timeout=_ACK_S)
        for batches in parts:
            seat.meet(time.process_time())
            for _ in range(batches):
                last = publisher.publish(batch)
            last.result(timeout=_ACK_S)
            publisher.flush(timeout=_ACK_S)
        seat.meet(time.process_time())
    return time.process_time()


def _published(cluster: LocalCluster, topic: str, parts: list[int]) -> list[Point]:
    """Return the cost of each part: CPU of cluster and publisher per record, memory of the cluster afterwards."""
    pids = cluster_pids(cluster)
    used: list[float] = []
    memory: list[float] = []
    with Team() as team:
        publisher = team.add(_publisher, cluster.addresses, topic, parts)
        for _ in range(len(parts) + 1):
            used.append(publisher.ready(_ACK_S) + cpu_seconds(pids))
            memory.append(sum(map(private_bytes, pids)))
            publisher.go()
        publisher.result()
    costs = [after - before for before, after in pairwise(used)]
    return [
        (cost / (batches * _IN_A_BATCH), size)
        for cost, batches, size in zip(costs, parts, memory[1:], strict=True)
    ]  # fmt: skip


def _over_records(settings: Settings, announce: Announce) -> list[Point]:
    """Measure one long run; each point is the part since the point before. The first part only warms up."""
    announce("flat over records")
    ends = [-(-count // _IN_A_BATCH) for count in settings.flat_records]
    parts = [ends[0], *(max(1, end - before) for before, end in pairwise(ends))]
    with cluster_with(settings.brokers, flat=5) as cluster:
        return _published(cluster, "flat", [ends[0], *parts])[1:]


async def _sessions(seat: Seat, addresses: list[str], topic: str, sessions: int, batches: int) -> None:
    """Run many publishers in one process, with one batch each in turn; open their sessions before the measurement."""
    import embarcadero as emb

    batch = records(_IN_A_SMALL_BATCH, SMALL_RECORD_BYTES)
    async with await emb.aio.connect(addresses) as log:
        publishers: list[Publisher] = []
        while (missing := sessions - len(publishers)) > 0:
            more = (log.publisher(topic, ack=1, linger_ms=0) for _ in range(min(missing, _AT_ONCE)))
            publishers += (group := await asyncio.gather(*more))
            await _settled([await publisher.publish(batch) for publisher in group])
        seat.meet()
        for first in range(0, batches, _AT_ONCE):
            numbers = range(first, min(batches, first + _AT_ONCE))
            await _settled([await publishers[number % sessions].publish(batch) for number in numbers])
        seat.meet()


async def _settled(futures: list[RecordAwaitable]) -> None:
    async with asyncio.timeout(_ACK_S):
        for future in futures:
            await future


def _many_sessions(seat: Seat, addresses: list[str], topic: str, sessions: int, batches: int) -> None:
    uvloop.run(_sessions(seat, addresses, topic, sessions, batches))


def _over_sessions(settings: Settings, announce: Announce) -> list[Point]:
    """Measure one cluster, with a topic for each point."""
    topics = {f"flat{sessions}": 5 for sessions in settings.flat_sessions}
    points = []
    with cluster_with(settings.brokers, **topics) as cluster:
        for sessions in settings.flat_sessions:
            announce(f"flat over sessions: {sessions:,}")
            points.append(_with_sessions(settings, cluster, sessions))
    return points


def _with_sessions(settings: Settings, cluster: LocalCluster, sessions: int) -> Point:
    with Team() as team:
        pids = cluster_pids(cluster)
        publishers = team.add(_many_sessions, cluster.addresses, f"flat{sessions}", sessions, settings.flat_batches)
        publishers.ready(_ACK_S)
        used = cpu_seconds(pids)
        publishers.go()
        publishers.ready(_ACK_S)
        cost = cpu_seconds(pids) - used
        return cost / (settings.flat_batches * _IN_A_SMALL_BATCH), sum(map(private_bytes, pids))


def _with_brokers(settings: Settings, brokers: int) -> Point:
    """Measure a fixed number of records; memory is that of one broker, on average."""
    batches = -(-settings.flat_records[len(settings.flat_records) // 2] // _IN_A_BATCH)
    with cluster_with(brokers, flat=5) as cluster:
        _, (cost, _) = _published(cluster, "flat", [1 + batches // 4, batches])  # the first part warms up
        pids = [pid for role, pid in cluster.pids().items() if role.startswith("broker")]
        return cost, sum(map(private_bytes, pids)) / brokers


def measure(settings: Settings, trial: Trial, announce: Announce) -> None:
    """Measure three sweeps."""
    _keep(trial, "records", settings.flat_records, _over_records(settings, announce))
    _keep(trial, "sessions", settings.flat_sessions, _over_sessions(settings, announce))
    points = []
    for brokers in settings.flat_brokers:
        announce(f"flat over brokers: {brokers}")
        points.append(_with_brokers(settings, brokers))
    _keep(trial, "brokers", settings.flat_brokers, points)


def _keep(trial: Trial, sweep: str, at: tuple[int, ...], points: list[Point]) -> None:
    for kind, values in zip(("cpu", "memory"), zip(*points, strict=True), strict=True):
        trial.curves[f"flat_{sweep}_{kind}"] = [[float(x) for x in at], list(values)]
        trial.values[f"flat_{sweep}_{kind}"] = max(values) / min(values) - 1
