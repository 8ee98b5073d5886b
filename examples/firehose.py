"""A metrics firehose: as much as the brokers take, on order 0.

    python examples/firehose.py [ADDRESS]      # without an address: a private cluster

Measurements need no order among each other, so the topic has order 0: each broker stores and acks its batches by
itself, without a sequencer. Hosts publish whole columns; a dashboard reads columns and adds them up.
"""

from __future__ import annotations

import sys
import threading
import time

import numpy as np
import pyarrow as pa

import embarcadero as emb

TOPIC = "metrics"
HOSTS, BATCHES, ROWS = 4, 50, 2_000


def measurements(host: int, number: int) -> pa.RecordBatch:
    """A second of one host's life: the host, its value (8 bytes, a float), and the time."""
    loads = np.random.default_rng(host * BATCHES + number).normal(host + 1.0, 0.1, ROWS)
    start_us = time.time_ns() // 1000
    columns = [
        pa.array([f"host-{host}".encode()] * ROWS, pa.binary()),
        pa.array(loads).view(pa.binary(8)).cast(pa.binary()),
        pa.nulls(ROWS, emb.RAW_SCHEMA.field("headers").type),
        pa.array(np.arange(start_us, start_us + ROWS)).view(emb.RAW_SCHEMA.field("timestamp").type),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=emb.RAW_SCHEMA)


def publish(log: emb.Log, host: int) -> None:
    with log.publisher(TOPIC, ack=1) as publisher:  # closing waits for every ack
        for number in range(BATCHES):
            publisher.publish(measurements(host, number))


class Dashboard:
    """Count, mean and maximum by host, updated batch by batch."""

    def __init__(self) -> None:
        self.rows = 0
        self._hosts: dict[bytes, tuple[int, float, float]] = {}

    def add(self, batch: emb.Batch) -> None:
        columns = batch.to_arrow()
        loads = columns.column("value").cast(pa.binary(8)).view(pa.float64())
        table = pa.table({"host": columns.column("key"), "load": loads})
        for row in table.group_by("host").aggregate([("load", "count"), ("load", "sum"), ("load", "max")]).to_pylist():
            count, total, most = self._hosts.get(row["host"], (0, 0.0, 0.0))
            self._hosts[row["host"]] = (
                count + row["load_count"], total + row["load_sum"], max(most, row["load_max"]),
            )  # fmt: skip
        self.rows += columns.num_rows

    def show(self) -> None:
        for host, (count, total, most) in sorted(self._hosts.items()):
            print(f"{host.decode()}: {count:,} measurements, mean {total / count:.2f}, most {most:.2f}")


def run(log: emb.Log) -> bool:
    """All hosts in parallel, and one dashboard; whether it saw everything."""
    dashboard, wanted = Dashboard(), HOSTS * BATCHES * ROWS
    hosts = [threading.Thread(target=publish, args=(log, host)) for host in range(HOSTS)]
    with log.subscribe(TOPIC, start="latest", read="ordered") as subscriber:
        began = time.perf_counter()
        for thread in hosts:
            thread.start()
        while dashboard.rows < wanted:
            batch = subscriber.poll(timeout=30)
            if batch is None:
                break
            if batch.gap is None:
                dashboard.add(batch)
        took = time.perf_counter() - began
    for thread in hosts:
        thread.join()
    dashboard.show()
    print(f"{dashboard.rows:,} of {wanted:,} measurements in {took:.1f} s")
    return dashboard.rows == wanted


def main(address: str = "") -> int:
    with emb.connect(address) if address else emb.local(brokers=4) as log:
        if TOPIC not in [topic.name for topic in log.topics()]:
            log.create_topic(TOPIC, order=0)
        return 0 if run(log) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
