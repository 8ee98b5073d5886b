"""The cost of a cluster without work, and the memory of a broker with many connections."""

from __future__ import annotations

import random
import time

import uvloop

from embarcadero.wire.schemas import encode_batch
from embarcadero_proof.lab.processes import cluster_pids, cluster_with, cpu_seconds, private_bytes
from embarcadero_proof.lab.publish import records
from embarcadero_proof.lab.settings import Settings
from embarcadero_proof.lab.striped import StripedSession
from embarcadero_proof.lab.team import Seat, Team
from embarcadero_proof.lab.trial import Announce, Trial

_SETTLE_S = 1.0


def measure_idle(settings: Settings, trial: Trial, announce: Announce) -> None:
    """Measure CPU seconds per second of all processes of a cluster with a topic, after its start has settled."""
    with cluster_with(settings.brokers, idle=5) as cluster:
        announce("idle cluster")
        time.sleep(_SETTLE_S)
        pids = cluster_pids(cluster)
        began, used = time.perf_counter(), cpu_seconds(pids)
        time.sleep(settings.idle_s)
        trial.values["idle"] = (cpu_seconds(pids) - used) / (time.perf_counter() - began)


async def _connect(seat: Seat, address: str, topic: str, count: int, record_bytes: int) -> None:
    """Open connections, and use each: a session, and a record in it."""
    payload = bytes(memoryview(encode_batch(records(1, record_bytes))))
    sessions = [StripedSession(payload, 1, random.Random(number)) for number in range(count)]
    for session in sessions:
        await session.open([address], topic)
        await session.send([0])
    for session in sessions:
        await session.settle(0)
    seat.meet()
    for session in sessions:
        session.close()


def _crowd(seat: Seat, address: str, topic: str, count: int, record_bytes: int) -> None:
    uvloop.run(_connect(seat, address, topic, count, record_bytes))


def measure_memory(settings: Settings, trial: Trial, announce: Announce) -> None:
    """Measure RssAnon of one broker before and with many connections to it."""
    with cluster_with(settings.brokers, crowd=5) as cluster, Team() as team:
        announce(f"{settings.connections:,} connections")
        broker = next(found for found in cluster.report().brokers if found.id == 0)
        trial.values["memory_before"] = private_bytes(broker.pid)
        crowd = team.add(_crowd, broker.address, "crowd", settings.connections, settings.record_bytes)
        crowd.ready()
        trial.values["memory"] = private_bytes(broker.pid)
        crowd.go()
        crowd.result()
