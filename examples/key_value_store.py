"""A replicated key-value store: a state machine over the log.

    python examples/key_value_store.py [ADDRESS]      # without an address: a private cluster

A write is a record in the log. Each replica reads the log from its start and applies the records, one by one. The
result depends only on the content so far and the record. Replicas that have read up to the same position therefore
have the same content, and a new replica gets it by replaying the log. For a long log, store a snapshot of the content
with its position, and start from there: `replay.py` stores both in one transaction.

Three nodes write at the same time, each through all brokers, with hundreds of writes in flight. Order 5 keeps the
writes of each node in the order in which the node made them, and puts the writes of all nodes into one total order.
That order also decides conditional writes (compare and set). Of two writes that expect the same version, the first one
in the log takes effect, on every replica.
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
    """The state machine: applies the log to a dictionary, key -> (version, value). A version is a position (seq)."""

    def __init__(self, subscriber: emb.Subscriber, name: str) -> None:
        super().__init__(daemon=True)
        self.name, self.content = name, dict[bytes, tuple[int, bytes]]()
        self._subscriber, self._moved = subscriber, threading.Condition()
        self._next, self._refused, self._problem = 0, set[int](), ""

    def run(self) -> None:
        for batch in self._subscriber:
            with self._moved:
                if batch.gap is not None:
                    self._problem = f"the log no longer has all records that this replica needs: {batch.gap}"
                for record in batch.records():
                    self._apply(record)
                self._moved.notify_all()

    def _apply(self, record: emb.Record) -> None:
        headers = record.headers or {}
        version, _ = self.content.get(record.key, (ABSENT, b""))
        if version == int(headers.get("if-version", version)):
            self.content[record.key] = (record.seq, record.value)
        elif headers.get("writer") == self.name.encode():
            self._refused.add(record.seq)  # only writes of this node: `was_applied` removes them
        self._next = record.seq + 1

    def wait_for(self, seq: int, timeout: float = 30.0) -> None:
        """Wait until the record at `seq` is applied."""
        with self._moved:
            if not self._moved.wait_for(lambda: self._next > seq or self._problem, timeout):
                raise TimeoutError(f"{self.name} is at seq {self._next}, and did not reach {seq} in {timeout:g} s")
            if self._problem:
                raise RuntimeError(self._problem)

    def was_applied(self, seq: int) -> bool:
        """Return whether this node's write at `seq` took effect."""
        self.wait_for(seq)
        with self._moved:
            refused = seq in self._refused
            self._refused.discard(seq)
        return not refused

    def digest(self) -> str:
        """Return a hash of the content. It is equal on all replicas that have read up to the same position."""
        with self._moved:
            return hashlib.sha256(repr(sorted(self.content.items())).encode()).hexdigest()[:16]


class Write:
    """A write in flight. The node can start the next write without waiting for this one."""

    def __init__(self, future: emb.RecordFuture, replica: Replica) -> None:
        self._future, self._replica = future, replica

    def position(self) -> int:
        """Wait until the write is in the log, and return its position."""
        position = self._future.result(timeout=30)
        if position is None:
            raise RuntimeError("the write is in the log, but its position is unknown")
        return position.seq

    def took_effect(self) -> bool:
        """Wait until this node's replica reads the write. False: it was conditional, and another write came first."""
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
        """Start a write and return immediately. With `if_version` it takes effect only if the key has that version."""
        headers = {"writer": self.replica.name.encode()}
        if if_version is not None:
            headers["if-version"] = str(if_version).encode()
        self._latest = Write(self._publisher.send(value, key=key, headers=headers), self.replica)
        return self._latest

    def get(self, key: bytes) -> tuple[int, bytes]:
        """Return version and value, including all earlier writes of this node (read your writes)."""
        if self._latest is not None:
            self.replica.wait_for(self._latest.position())  # order 5: all earlier writes of this node are before it
        return self.replica.content.get(key, (ABSENT, b""))

    def get_newest(self, key: bytes) -> tuple[int, bytes]:
        """Return version and value, including all writes that any node completed before this call (linearizable)."""
        self.replica.wait_for(self._log.tail(TOPIC).seq - 1)
        return self.replica.content.get(key, (ABSENT, b""))

    def add(self, key: bytes, amount: int) -> int:
        """Add to a counter that several nodes share: read it, write if unchanged, else try again. Return the tries."""
        for tries in range(1, 1_000_000):
            version, value = self.get_newest(key)
            if self.put(key, str(int(value or b"0") + amount).encode(), if_version=version).took_effect():
                return tries
        raise RuntimeError("another node was faster every time")

    def close(self) -> None:
        self._publisher.close()
        self._subscriber.close()
        self.replica.join()


@contextmanager
def node(address: str, name: str) -> Iterator[Store]:
    """A node with its own connection, as on another machine."""
    with emb.connect(address) as log:
        store = Store(log, name)
        try:
            yield store
        finally:
            store.close()


def work(store: Store, report: dict[str, str]) -> None:
    """Write, read and add, as each node does in parallel."""
    name = store.replica.name.encode()
    leads = store.put(b"leader", name, if_version=ABSENT)  # a race that one node wins
    for number in range(WRITES):
        store.put(b"key %d" % (number * 7 % KEYS), b"%s %d" % (name, number))
    store.put(b"mine " + name, b"done")
    if store.get(b"mine " + name)[1] != b"done":
        raise RuntimeError("a node does not read its own write")
    tries = sum(store.add(b"counter", 1) for _ in range(10))
    report[store.replica.name] = f"{'leads' if leads.took_effect() else 'follows'}, 10 additions in {tries} tries"


def run(address: str) -> bool:
    """Run three nodes. Return whether all replicas end with the same content."""
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
            store.get_newest(b"leader")  # the replica reads to the end of the log
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
