"""The cost of durability, against the bare disk: writes and fdatasync, in the same folder, in the same run.

The bare disk writes the same bytes as three replicas, one after the other, in pieces of 16 MiB. Round trips alternate
with a bare 1 KiB write and fdatasync, so that both have the same noise.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np
import uvloop

from embarcadero.limits import MIB
from embarcadero_proof.lab.processes import cluster_with
from embarcadero_proof.lab.publish import payload_bytes, publish_throughput
from embarcadero_proof.lab.settings import Settings
from embarcadero_proof.lab.team import Seat, alone
from embarcadero_proof.lab.trial import Announce, Trial

_PIECE: Final = 16 * MIB
_TURN: Final = 50
_WARM_UP_TURNS: Final = 2
_COPIES: Final = 3
_POINTS: Final = [*np.linspace(0, 0.99, 100).tolist(), 0.995, 0.999]


@contextmanager
def _file(folder: Path, name: str) -> Iterator[int]:
    path = folder / name
    file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    try:
        yield file
    finally:
        os.close(file)
        path.unlink()


def bare_writes(folder: Path, total: int, copies: int) -> float:
    """Return the bytes per second of `total` bytes, written and synced `copies` times, one after the other."""
    piece = np.random.default_rng(0).bytes(_PIECE)
    began = time.perf_counter()
    for copy in range(copies):
        with _file(folder, f"bare-{copy}") as file:
            for _ in range(-(-total // _PIECE)):
                os.write(file, piece)
                os.fdatasync(file)
    return -(-total // _PIECE) * _PIECE / (time.perf_counter() - began)


def measure(settings: Settings, trial: Trial, announce: Announce) -> None:
    """Publish with ack 2 on 2 of 3 replicas on one disk; then round trips on 1 of 1 and on 2 of 3."""
    size = settings.batch_bytes[0]
    count = settings.records_in(size)
    frame = payload_bytes(count, settings.record_bytes)
    total = max(settings.total_bytes // 4, _PIECE)
    each = max(settings.brokers, total // settings.publishers // frame)
    with cluster_with(settings.brokers, replicas=_COPIES, durable=5) as cluster:
        for what in trial.turned(("bare", "durable")):
            if what == "bare":
                announce("bare writes, three times")
                bare = bare_writes(cluster.data_dir, each * settings.publishers * frame, _COPIES)
            else:
                announce("publish, ack 2, 2 of 3")
                published = publish_throughput(
                    cluster.addresses, "durable", settings.publishers, each, count, settings.record_bytes, ack=2
                )
        _round_trips(settings, trial, announce, cluster.addresses, cluster.data_dir, "2of3")
    trial.values |= {"bare_thrice": bare, "durable_publish": published, "durable_to_bare": published / bare}
    with cluster_with(settings.brokers, replicas=1, durable=5) as cluster:
        _round_trips(settings, trial, announce, cluster.addresses, cluster.data_dir, "1of1")


def _round_trips(
    settings: Settings, trial: Trial, announce: Announce, addresses: list[str], folder: Path, name: str
) -> None:
    announce(f"ack 2 round trips, {name}")
    acks, bare = alone(_in_turns, addresses, str(folder), settings.record_bytes, settings.round_trips)
    values = trial.values
    for kind, times in (("ack2", acks), ("bare_sync", bare)):
        key = f"{kind}_{name}"
        values[f"{key}_p50"], values[f"{key}_p999"] = map(float, np.quantile(times, [0.5, 0.999]))
        trial.curves[f"latency_{key}"] = [_POINTS, np.quantile(times, _POINTS).tolist()]
    for quantile in ("p50", "p999"):
        values[f"ack2_{name}_to_bare_{quantile}"] = (
            values[f"ack2_{name}_{quantile}"] / values[f"bare_sync_{name}_{quantile}"]
        )


def _in_turns(seat: Seat, addresses: list[str], folder: str, size: int, rounds: int) -> tuple[list[float], list[float]]:  # noqa: ARG001 - it does not wait for others
    return uvloop.run(_take_turns(addresses, Path(folder), size, rounds))


async def _take_turns(addresses: list[str], folder: Path, size: int, rounds: int) -> tuple[list[float], list[float]]:
    """Return the seconds of each round trip: acks, and bare write with fdatasync."""
    import embarcadero as emb

    message, clock = bytes(size), time.perf_counter
    acks: list[float] = []
    bare: list[float] = []
    with _file(folder, "bare-sync") as file:
        async with (
            await emb.aio.connect(addresses) as log,
            await log.publisher("durable", ack=2, linger_ms=0) as publisher,
        ):
            for _ in range(_WARM_UP_TURNS + -(-rounds // _TURN)):
                for _ in range(_TURN):
                    began = clock()
                    os.write(file, message)
                    os.fdatasync(file)
                    bare.append(clock() - began)
                for _ in range(_TURN):
                    began = clock()
                    await (await publisher.send(message))
                    acks.append(clock() - began)
    return acks[_WARM_UP_TURNS * _TURN :], bare[_WARM_UP_TURNS * _TURN :]
