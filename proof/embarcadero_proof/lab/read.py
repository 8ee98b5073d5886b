"""An ordered subscriber that takes batches as Arrow, against the publishing of the same data just before."""

from __future__ import annotations

import time

from embarcadero.errors import NotAvailable, TimedOut
from embarcadero.limits import LOG_BYTES
from embarcadero_proof.lab.processes import cluster_with
from embarcadero_proof.lab.publish import payload_bytes, publish_throughput
from embarcadero_proof.lab.settings import Settings
from embarcadero_proof.lab.team import Seat, alone
from embarcadero_proof.lab.trial import Announce, Trial

_POLL_S = 30.0
_PASSES = 3


def reader(
    seat: Seat,  # noqa: ARG001 - it does not wait for others
    addresses: list[str],
    topic: str,
    batches: int,
    passes: int = _PASSES,
    read: str = "ordered",
) -> float:
    """Return the bytes per second of several passes from the earliest batch on, each batch decoded."""
    import embarcadero as emb

    size, began = 0, 0.0
    with emb.connect(addresses) as log:
        began = time.perf_counter()
        for _ in range(passes):
            with log.subscribe(topic, start="earliest", read=read) as subscriber:
                for _ in range(batches):
                    batch = subscriber.poll(timeout=_POLL_S)
                    if batch is None:
                        raise TimedOut(f"nothing to read for {_POLL_S:g} s", "is the cluster up?")
                    if batch.gap is not None:
                        raise NotAvailable(f"the log was trimmed before it was read: {batch.gap}", "publish less")
                    batch.to_arrow()
                    size += batch.size
        return size / (time.perf_counter() - began)


def measure(settings: Settings, trial: Trial, announce: Announce) -> None:
    """Publish as much as the brokers certainly keep in memory, then read it."""
    batch_bytes = settings.batch_bytes[0]
    count = settings.records_in(batch_bytes)
    total = min(settings.total_bytes, settings.brokers * LOG_BYTES // 2)
    each = max(settings.brokers, total // settings.publishers // payload_bytes(count, settings.record_bytes))
    with cluster_with(settings.brokers, read=5) as cluster:
        announce("publish, to be read")
        published = publish_throughput(
            cluster.addresses, "read", settings.publishers, each, count, settings.record_bytes
        )
        announce("ordered subscriber")
        # each publisher published one more batch, to warm up
        read = alone(reader, cluster.addresses, "read", settings.publishers * (each + 1))
    trial.values |= {"read": read, "read_publish": published, "read_to_publish": read / published}
