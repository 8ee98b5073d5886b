"""A replicated key-value store: the log is the store, and every replica is a reader of it.

    python examples/key_value_store.py [ADDRESS]      # without an address: a private cluster

Three nodes write at the same time, each through all brokers, with hundreds of writes in flight. Order 5 keeps each
node's writes in the order in which it made them, and gives all nodes' writes one total order. Every replica that has
read up to the same position therefore has the same content. The log decides each conditional write by its position.
"""

from __future__ import annotations

import hashlib
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import embarcadero as emb

TOPIC = "key-value-store"
ABSENT = -1  # the version of a key that was never written
NODES, WRITES, KEYS = 3, 2_000, 500


class Replica(threading.Thread):
    """Applies the log, record by record, to a dictionary: key -> (version, value). A version is a position (seq)."""

    def __init__(self, subscriber: emb.Subscriber, name: str) -> None:
        super().__init__(daemon=True)
        self.name, self.content = name, dict[bytes, tuple[int, bytes]]()
        self._subscriber, self._moved = subscriber, threading.Condition()
        self._next, self._refused, self._problem = 0, set[int](), ""

    def run(self) -> None:
        for batch in self._subscriber:
            with self._moved:
                if batch.gap is not None:
                    self._problem = f"the log no longer has what this replica needs: {batch.gap}"
                for record in batch.records():
                    self._apply(record)
                self._moved.notify_all()

    def _apply(self, record: emb.Record) -> None:
        headers = record.headers or {}
        version, _ = self.content.get(record.key, (ABSENT, b""))
        if version == int(headers.get("if-version", version)):
            self.content[record.key] = (record.seq, record.value)
        elif headers.get("writer") == self.name.encode():
            self._refused.add(record.seq)  # only for our own writer, which requests it and takes it out
        self._next = record.seq + 1

    def wait_for(self, seq: int, timeout: float = 30.0) -> None:
        """Wait until the record at `seq` is applied."""
        with self._moved:
            if not self._moved.wait_for(lambda: self._next > seq or self._problem, timeout):
                raise TimeoutError(f"{self.name} is at {self._next}, and {seq} did not come in {timeout:g} s")
            if self._problem:
                raise RuntimeError(self._problem)

    def was_applied(self, seq: int) -> bool:
        """Whether this node's write at `seq` took effect."""
        self.wait_for(seq)
        with self._moved:
            refused = seq in self._refused
            self._refused.discard(seq)
        return not refused

    def digest(self) -> str:
        """A hash of the whole content; equal on all replicas that have read as far."""
        with self._moved:
            return hashlib.sha256(repr(sorted(self.content.items())).encode()).hexdigest()[:16]


class Write:
    """A write in flight. The next one can be made without waiting for it."""

    def __init__(self, future: emb.RecordFuture, replica: Replica) -> None:
        self._future, self._replica = future, replica

    def position(self) -> int:
        """Its position in the log, once it is there."""
        position = self._future.result(timeout=30)
        if position is None:
            raise RuntimeError("the log has it, but its position is unknown")
        return position.seq

    def took_effect(self) -> bool:
        """Wait for its turn: False if it was conditional and another write came first."""
        return self._replica.was_applied(self.position())


class Store:
    """One node: a publisher for its writes, a replica for its reads."""

    def __init__(self, log: emb.Log, name: str) -> None:
        self._log = log
        self._publisher = log.publisher(TOPIC, ack=1)
        self._subscriber = log.subscribe(TOPIC, start="earliest", read="ordered")
        self.replica = Replica(self._subscriber, name)
        self.replica.start()
        self._latest: Write | None = None

    def put(self, key: bytes, value: bytes, if_version: int | None = None) -> Write:
        """Write, only if the key still has that version when the write is applied. Returns immediately."""
        headers = {"writer": self.replica.name.encode()}
        if if_version is not None:
            headers["if-version"] = str(if_version).encode()
        self._latest = Write(self._publisher.send(value, key=key, headers=headers), self.replica)
        return self._latest

    def get(self, key: bytes) -> tuple[int, bytes]:
        """Version and value; includes all earlier writes of this node."""
        if self._latest is not None:
            self.replica.wait_for(self._latest.position())  # order 5: then all its earlier writes are there too
        return self.replica.content.get(key, (ABSENT, b""))

    def get_newest(self, key: bytes) -> tuple[int, bytes]:
        """Version and value; includes all writes of any node that completed before this call."""
        self.replica.wait_for(self._log.tail(TOPIC).seq - 1)
        return self.replica.content.get(key, (ABSENT, b""))

    def add(self, key: bytes, amount: int) -> int:
        """Add to a number that others add to as well: read, write if unchanged, else again. Returns the tries."""
        for tries in range(1, 1_000_000):
            version, value = self.get_newest(key)
            if self.put(key, str(int(value or b"0") + amount).encode(), if_version=version).took_effect():
                return tries
        raise RuntimeError("others were always faster")

    def close(self) -> None:
        self._publisher.close()
        self._subscriber.close()
        self.replica.join()


@contextmanager
def node(address: str, name: str) -> Iterator[Store]:
    """A node with a connection of its own, as if it ran elsewhere."""
    with emb.connect(address) as log:
        store = Store(log, name)
        try:
            yield store
        finally:
            store.close()


def work(store: Store, report: dict[str, str]) -> None:
    """The work of each node, all in parallel."""
    name = store.replica.name.encode()
    leads = store.put(b"leader", name, if_version=ABSENT)  # a race that one node wins
    for number in range(WRITES):
        store.put(b"key %d" % (number * 7 % KEYS), b"%s %d" % (name, number))
    store.put(b"mine " + name, b"done")
    if store.get(b"mine " + name)[1] != b"done":
        raise RuntimeError("a node does not see its own write")
    tries = sum(store.add(b"counter", 1) for _ in range(10))
    report[store.replica.name] = f"{'leads' if leads.took_effect() else 'follows'}, 10 additions in {tries} tries"


def run(address: str) -> bool:
    """Three nodes at work; whether all replicas ended equal."""
    with node(address, "node-0") as a, node(address, "node-1") as b, node(address, "node-2") as c:
        stores, report = [a, b, c], dict[str, str]()
        before = int(a.get_newest(b"counter")[1] or b"0")
        threads = [threading.Thread(target=work, args=(store, report)) for store in stores]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        took = time.perf_counter() - began
        leader, counter = a.get_newest(b"leader")[1], int(a.get_newest(b"counter")[1])
        for store in stores:
            store.get_newest(b"leader")  # every replica reads to the end
            print(f"{store.replica.name}: state {store.replica.digest()}, {report.get(store.replica.name, 'failed')}")
        equal = len({store.replica.digest() for store in stores}) == 1
    added = counter - before
    print(f"{NODES * WRITES:,} pipelined writes in {took:.1f} s; {leader.decode()} leads; {added} were added")
    ok = equal and len(report) == NODES and added == 10 * NODES
    print("all replicas are equal" if ok else "SOMETHING IS WRONG")
    return ok


def main(address: str = "") -> int:
    with emb.connect(address) if address else emb.local(brokers=4) as log:
        if TOPIC not in [topic.name for topic in log.topics()]:
            log.create_topic(TOPIC, order=5)
        return 0 if run(log.address) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
