"""Every call ends: Ctrl-C in a real process, closing with dead, paused and unsettled clusters."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest

import embarcadero as emb
from embarcadero.errors import Closed, EmbarcaderoError, OutcomeUnknown, Unreachable
from embarcadero.node.local import LocalCluster

pytestmark = pytest.mark.system

CHILD = """
import sys
import embarcadero as emb

log = emb.connect(sys.argv[1])
publisher = log.publisher("t", window_bytes=1_000, linger_ms=0)
publisher.send(b"first").result(30)
subscriber = log.subscribe("quiet")
blocked = emb.connect(sys.argv[1])
lost = blocked.publisher("t", linger_ms=0)
lost.send(b"open").result(30)

def send():
    while True:
        publisher.send(b"x" * 100)

calls = {
    "poll": lambda: subscriber.poll(),
    "iterate": lambda: next(iter(subscriber)),
    "send": send,
    "flush": lambda: (publisher.send(b"x"), publisher.flush()),
    "result": lambda: lost.send(b"x").result(),
    "read": lambda: log.read("t", timeout=None),
    "create": lambda: log.create_topic("other", timeout=None),
    "connect": lambda: emb.connect(sys.argv[1], timeout=None),
    "close": lambda: blocked.close(None),
}
for name, call in calls.items():
    try:
        print(name, flush=True)
        while True:
            try:
                call()
                break
            except (emb.errors.OutcomeUnknown, emb.errors.Unreachable):
                pass  # a call may end by itself before the signal comes
        print("ended", flush=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
print("still here", flush=True)
sys.stdin.readline()
publisher.send(b"last").result(60)
log.close()
try:
    blocked.close(0)  # the signal may have come before closing began
except emb.EmbarcaderoError:
    pass
print(log.thread.alive or blocked.thread.alive, flush=True)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(brokers=1, log_bytes=32 << 20) as cluster, emb.connect(cluster.addresses) as log:
        log.create_topic("t", order=5)
        log.create_topic("quiet")
        yield cluster


@contextmanager
def paused(cluster: LocalCluster, *roles: str) -> Iterator[None]:
    """SIGSTOP processes of a cluster for a while."""
    pids = [cluster.pids()[role] for role in roles]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):  # it was paused for so long that it was killed
                os.kill(pid, signal.SIGCONT)


def test_ctrl_c_interrupts_every_call_of_a_real_process(cluster: LocalCluster) -> None:
    """Each call waits for a broker that is stopped; a signal ends it; when the broker is back the client continues."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, cluster.addresses[0]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdin is not None
        assert child.stdout.readline() == "poll\n"
        with paused(cluster, "broker:0"):
            for following in ("iterate", "send", "flush", "result", "read", "create", "connect", "close", "still here"):
                child.send_signal(signal.SIGINT)
                assert child.stdout.readline() == "interrupted\n"
                assert child.stdout.readline() == following + "\n"
        child.stdin.write("go on\n")
        child.stdin.flush()
        assert child.stdout.readline() == "False\n"
        assert child.wait(30) == 0
    finally:
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()


def test_close_ends_beside_a_paused_broker(cluster: LocalCluster) -> None:
    """Unsettled records get an unknown outcome; both timeouts are typed; closing twice is allowed."""
    log = emb.connect(cluster.addresses)
    publisher = log.publisher("t", linger_ms=0)
    publisher.send(b"open").result(30)
    with paused(cluster, "broker:0"):
        future = publisher.send(b"unsettled")
        with pytest.raises(OutcomeUnknown):
            log.close(timeout=0.5)
        with pytest.raises(OutcomeUnknown):
            future.result(0)
        log.close()
        with pytest.raises(Closed):
            publisher.send(b"late")
        with pytest.raises(Closed):
            log.topics()
        publisher.close()


def test_close_ends_from_another_thread_while_calls_wait(cluster: LocalCluster) -> None:
    """A poll, a send and a request of other threads end with Closed, or with the reason for their failure."""
    log = emb.connect(cluster.addresses)
    publisher = log.publisher("t", window_bytes=100, linger_ms=0)
    subscriber = log.subscribe("t", start="latest")
    publisher.send(b"open").result(30)
    ended: list[BaseException] = []

    def endless(call: Any) -> None:
        try:
            while True:
                call()
        except EmbarcaderoError as error:
            ended.append(error)

    with paused(cluster, "broker:0"):
        calls = (lambda: publisher.send(b"x" * 100), subscriber.poll, lambda: log.read("t", timeout=None))
        threads = [threading.Thread(target=endless, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        with pytest.raises(OutcomeUnknown):
            log.close(timeout=0.5)
        for thread in threads:
            thread.join(30)
    assert [type(error) for error in ended] == [Closed] * 3


def test_ctrl_c_in_a_block_is_raised_and_waits_only_briefly(cluster: LocalCluster) -> None:
    """Although there are unsettled batches and the broker is paused."""
    with ExitStack() as stack:
        futures = []

        def block() -> None:
            with emb.connect(cluster.addresses) as log, log.publisher("t") as publisher:
                publisher.send(b"open").result(30)
                stack.enter_context(paused(cluster, "broker:0"))
                futures.append(publisher.send(b"unsettled"))
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            block()
        assert isinstance(futures[0].exception(0), OutcomeUnknown)


def test_close_and_calls_end_with_a_dead_cluster() -> None:
    """Everything is gone: calls end in time with a typed error, close with the unknown records."""
    with LocalCluster(brokers=1, log_bytes=32 << 20) as cluster:
        log = emb.connect(cluster.addresses)
        log.create_topic("t")
        publisher = log.publisher("t", linger_ms=0)
        subscriber = log.subscribe("t")
        publisher.send(b"stored").result(30)
        assert subscriber.poll(30) is not None
        addresses = cluster.addresses
    future = publisher.send(b"lost")
    assert subscriber.poll(0.1) is None
    with pytest.raises(Unreachable):
        log.topics(timeout=0.2)
    with pytest.raises(Unreachable):
        emb.connect(addresses, timeout=5)
    with pytest.raises(EmbarcaderoError):
        log.close(timeout=0.3)
    assert isinstance(future.exception(0), EmbarcaderoError)


UNCLOSED = """
import atexit, os, sys
atexit.register(lambda: print([future.exception(0) for future in futures] == [None] * 1_000))  # runs after the client's
import embarcadero as emb

log = emb.local(brokers=1, log_bytes=32 << 20)
log.create_topic("t")
publisher = log.publisher("t", linger_ms=60_000)
futures = [publisher.send(b"x") for _ in range(1_000)]
child = os.fork()
if not child:
    print(log.describe("t").name, flush=True)
    log.close()
    os._exit(0)
os.waitpid(child, 0)
print(log.describe("t").name, flush=True)
"""


def test_a_private_cluster_survives_a_forked_child_and_the_flush_at_exit() -> None:
    """The child can use it and does not stop it; the parent ends without `close()` and its records are stored."""
    done = subprocess.run([sys.executable, "-c", UNCLOSED], capture_output=True, check=False, timeout=120, text=True)
    assert (done.stdout.split(), done.stderr) == (["t", "t", "True"], "")
