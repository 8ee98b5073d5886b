"""Record by record in Python: `send()` of small records until all are acked, and `Batch.records()` of read batches."""

from __future__ import annotations

import time
from itertools import repeat

from embarcadero.errors import TimedOut
from embarcadero.limits import BATCH_BYTES_DEFAULT
from embarcadero_proof.lab.processes import cluster_with
from embarcadero_proof.lab.publish import records
from embarcadero_proof.lab.settings import RECORD_OVERHEAD_BYTES, SMALL_RECORD_BYTES, Settings
from embarcadero_proof.lab.team import Seat, alone
from embarcadero_proof.lab.trial import Announce, Trial

_PATIENCE_S = 60.0
_IN_A_BATCH = BATCH_BYTES_DEFAULT // (SMALL_RECORD_BYTES + RECORD_OVERHEAD_BYTES)


def _send(seat: Seat, addresses: list[str], count: int) -> float:  # noqa: ARG001 - it does not wait for others
    """Return the records per second from the first `send()` to the last ack."""
    import embarcadero as emb

    value = bytes(SMALL_RECORD_BYTES)
    with emb.connect(addresses) as log, log.publisher("sent", ack=1) as publisher:
        send = publisher.send
        send(value).result(timeout=_PATIENCE_S)
        began = time.perf_counter()
        for _ in repeat(None, count):
            send(value)
        publisher.flush(timeout=_PATIENCE_S)
        return count / (time.perf_counter() - began)


def _records(seat: Seat, addresses: list[str], count: int) -> float:  # noqa: ARG001 - it does not wait for others
    """Return the records per second of `Batch.records()` alone, on batches from a subscriber."""
    import embarcadero as emb

    batches = max(2, count // _IN_A_BATCH)
    batch = records(_IN_A_BATCH, SMALL_RECORD_BYTES)
    spent, seen = 0.0, 0
    with emb.connect(addresses) as log:
        with log.publisher("read", ack=1) as publisher:
            for _ in range(batches):
                publisher.publish(batch)
        with log.subscribe("read", start="earliest", read="ordered") as subscriber:
            for _ in range(batches):
                found = subscriber.poll(timeout=_PATIENCE_S)
                if found is None:
                    raise TimedOut(f"nothing to read for {_PATIENCE_S:g} s", "is the cluster up?")
                began = time.perf_counter()
                seen += len(found.records())
                spent += time.perf_counter() - began
    return seen / spent


def measure(settings: Settings, trial: Trial, announce: Announce) -> None:
    """Measure both in one cluster, one Python process at a time."""
    with cluster_with(settings.brokers, sent=5, read=5) as cluster:
        announce("send()")
        trial.values["send"] = alone(_send, cluster.addresses, settings.send_records)
        announce("Batch.records()")
        trial.values["records"] = alone(_records, cluster.addresses, settings.send_records)
