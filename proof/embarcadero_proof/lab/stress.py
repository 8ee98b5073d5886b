"""Two stress runs: ten gigabytes out of order over small rings, and one stuck session.

Both use a real cluster. They give ratios within one run where a comparison exists.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import Final

import uvloop

from embarcadero.limits import HELD_PER_SESSION_MAX
from embarcadero.wire.schemas import encode_batch
from embarcadero_proof.lab.processes import cluster_with
from embarcadero_proof.lab.publish import records
from embarcadero_proof.lab.settings import Settings
from embarcadero_proof.lab.striped import StripedSession
from embarcadero_proof.lab.team import Seat, Team
from embarcadero_proof.lab.trial import Announce, Trial

_BATCH_RECORDS: Final = 64


async def _shuffled(addresses: list[str], topic: str, batches: int, payload: bytes, seed: int) -> None:
    session = StripedSession(payload, _BATCH_RECORDS, random.Random(seed))
    await session.open(addresses, topic)
    await session.send_shuffled(0, batches)
    session.close()


def _shuffling(
    seat: Seat, addresses: list[str], topic: str, batches: int, record_bytes: int, seed: int
) -> tuple[float, float, int]:
    payload = bytes(memoryview(encode_batch(records(_BATCH_RECORDS, record_bytes))))
    seat.meet()
    began = time.perf_counter()
    uvloop.run(_shuffled(addresses, topic, batches, payload, seed))
    return began, time.perf_counter(), batches * len(payload)


def out_of_order(addresses: list[str], topic: str, settings: Settings, total_bytes: int) -> float:
    """Return the bytes per second of publishers that send in shuffled windows, from first send to last ack."""
    batches = max(1, total_bytes // (_BATCH_RECORDS * settings.record_bytes) // settings.publishers)
    with Team() as team:
        for seed in range(settings.publishers):
            team.add(_shuffling, addresses, topic, batches, settings.record_bytes, seed)
        team.meet()
        spans = team.results()
    return float(sum(size for *_, size in spans) / (max(span[1] for span in spans) - min(span[0] for span in spans)))


async def _stuck(seat: Seat, addresses: list[str], topic: str, record_bytes: int) -> None:
    """Open a session whose first batch never comes: all later batches wait in the reorder buffer."""
    payload = bytes(memoryview(encode_batch(records(1, record_bytes))))
    session = StripedSession(payload, 1, random.Random(0))
    await session.open(addresses, topic)
    await session.send(list(range(1, HELD_PER_SESSION_MAX)))
    await asyncio.to_thread(seat.meet)
    session.close()


def _stick(seat: Seat, addresses: list[str], topic: str, record_bytes: int) -> None:
    uvloop.run(_stuck(seat, addresses, topic, record_bytes))


def beside_a_stuck_session(addresses: list[str], topic: str, settings: Settings, total_bytes: int) -> float:
    """Return the throughput beside one session that waits for a lost batch, divided by throughput without it."""
    without = out_of_order(addresses, topic, settings, total_bytes)
    with Team() as team:
        stuck = team.add(_stick, addresses, topic, settings.record_bytes)
        stuck.ready()
        beside = out_of_order(addresses, topic, settings, total_bytes)
        stuck.go()
        stuck.result()
    return beside / without


def measure(settings: Settings, trial: Trial, announce: Announce) -> None:
    """Measure small batches in shuffled windows over rings of 8,192 slots; a tenth of it beside a stuck session."""
    with cluster_with(settings.brokers, shuffled=5, stuck=5) as cluster:
        announce("everything out of order")
        trial.values["shuffled"] = out_of_order(cluster.addresses, "shuffled", settings, settings.total_bytes)
        announce("beside a stuck session")
        trial.values["beside_stuck"] = beside_a_stuck_session(
            cluster.addresses, "stuck", settings, settings.total_bytes // 10
        )
