"""Programs that end without `close()`: their records are stored, or a line on stderr has the number that were not."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

import embarcadero as emb
from embarcadero.client import lifetime
from tests.client.fake_server import FakeServer

RECORDS = 1_000


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer(order=5) as server:
        yield server


def run(server: FakeServer, program: str, code: int = 0) -> str:
    """Run a program with the addresses of the fake brokers; return its stderr."""
    start = f"import asyncio, os, sys, threading\nimport embarcadero as emb\naddress = {','.join(server.addresses)!r}\n"
    command = [sys.executable, "-c", start + program]
    done = subprocess.run(command, capture_output=True, check=False, timeout=120, text=True)
    assert done.returncode == code, done.stderr
    return done.stderr


def stored(server: FakeServer) -> list[bytes]:
    with emb.connect(server.addresses) as log:
        return log.read("t").column("value").to_pylist()


WANTED = [b"%d" % n for n in range(RECORDS)]
SEND = f"""
def work(log):
    publisher = log.publisher("t", linger_ms=60_000)
    for n in range({RECORDS}):
        publisher.send(b"%d" % n)
    return publisher
"""

ENDINGS = {
    "the end of the main module": (SEND + "log = emb.connect(address)\npublisher = work(log)", 0, ""),
    "sys.exit": (SEND + "log = emb.connect(address)\npublisher = work(log)\nsys.exit(3)", 3, ""),
    "an unhandled exception": (SEND + "log = emb.connect(address)\npublisher = work(log)\n1 / 0", 1, "ZeroDivision"),
    "Ctrl-C": (SEND + "log = emb.connect(address)\npublisher = work(log)\nraise KeyboardInterrupt", -2, "KeyboardInt"),
    "objects that were dropped": (SEND + "import gc\nwork(emb.connect(address))\ngc.collect()", 0, ""),
    "objects that wait for the garbage collector": (SEND + "work(emb.connect(address))", 0, ""),
    "a dropped publisher of an open log": (SEND + "log = emb.connect(address)\nwork(log)", 0, ""),
    "a thread that outlives the main one": (
        SEND + "log = emb.connect(address)\nmain = threading.main_thread()\n"
        "threading.Thread(target=lambda: (main.join(), work(log))).start()", 0, "",
    ),
    "a child of multiprocessing": (
        SEND + "import multiprocessing\nprocess = multiprocessing.get_context('fork').Process(target=lambda: "
        "work(emb.connect(address)))\nprocess.start()\nprocess.join()", 0, "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDINGS)
def test_records_are_stored_when_the_program_ends_by(server: FakeServer, name: str) -> None:
    """Without `close()` and without `flush()`."""
    program, code, message = ENDINGS[name]

    said = run(server, program, code)

    assert message in said
    assert "not stored" not in said
    assert stored(server) == WANTED


AIO = f"""
async def work():
    log = await emb.aio.connect(address)
    publisher = await log.publisher("t", linger_ms=60_000)
    for n in range({RECORDS}):
        await publisher.send(b"%d" % n)
    return log, publisher
"""
AIO_ENDINGS = {
    "asyncio.run": (AIO + "kept = asyncio.run(work())", 0),
    "an exception in asyncio.run": (
        AIO + "async def main():\n    kept = await work()\n    1 / 0\nasyncio.run(main())", 1,
    ),
    "asyncio.run, all objects dropped": (
        AIO + "import gc\nasync def main():\n    await work()\n    gc.collect()\nasyncio.run(main())", 0,
    ),
    "a loop in a daemon thread": (
        AIO + "loop = asyncio.new_event_loop()\nthreading.Thread(target=loop.run_forever, daemon=True).start()\n"
        "kept = asyncio.run_coroutine_threadsafe(work(), loop).result()", 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", AIO_ENDINGS)
def test_records_of_asyncio_are_stored_when_the_program_ends_by(server: FakeServer, name: str) -> None:
    """`asyncio.run` cancels all tasks and waits for them: the client stores its records in that time."""
    program, code = AIO_ENDINGS[name]

    said = run(server, program, code)

    assert "not stored" not in said
    assert stored(server) == WANTED


def test_a_loop_that_was_closed_under_its_publisher_is_reported(server: FakeServer) -> None:
    """`run_until_complete` and `close` give the client no time: the program gets a report of unstored records."""
    said = run(server, AIO + "loop = asyncio.new_event_loop()\nkept = loop.run_until_complete(work())\nloop.close()")

    assert f"{RECORDS} records for topic 't' were not stored" in said
    assert "close()" in said


def test_records_that_could_not_be_stored_at_exit_are_reported(server: FakeServer) -> None:
    """The wait at exit is bounded; then a line on stderr names the topic and the number of records."""
    silence = "\nfrom embarcadero.client import lifetime\nlifetime.EXIT_FLUSH_S = 0.5\n"
    program = SEND + "log = emb.connect(address)\npublisher = work(log)\nprint(flush=True)\nsys.stdin.read()" + silence
    start = f"import sys\nimport embarcadero as emb\naddress = {','.join(server.addresses)!r}\n"
    child = subprocess.Popen(
        [sys.executable, "-c", start + program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with child:
        assert child.stdout is not None
        child.stdout.readline()
        server.deaf = True
        _, said = child.communicate(timeout=120)

    assert f"{RECORDS} records for topic 't' were not stored".encode() in said
    assert b"close()" in said


CANCELLED = """
async def main():
    log = await emb.aio.connect(address)
    publisher = await log.publisher("t")
    await (await publisher.send(b"acked with ack=1"))
    print(flush=True)
    sys.stdin.read()
    try:
        async with asyncio.timeout(0.2):
            await publisher.close()
    except TimeoutError:
        pass
asyncio.run(main())
"""


def test_a_close_that_was_cancelled_is_reported_at_the_end_of_the_program() -> None:
    """It raised nothing: the caller's own time limit ended it. The end of the program was silent as well."""
    with FakeServer(order=5, replicas=1) as server:
        start = f"import asyncio, sys\nimport embarcadero as emb\naddress = {','.join(server.addresses)!r}\n"
        pipe = subprocess.PIPE
        with subprocess.Popen([sys.executable, "-c", start + CANCELLED], stdin=pipe, stdout=pipe, stderr=pipe) as child:
            assert child.stdout is not None
            child.stdout.readline()
            server.deaf = True
            _, said = child.communicate(timeout=120)

    assert b"1 record of 't'" in said
    assert b"no broker answered in time" in said


def test_loops_that_do_not_answer_share_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound of the wait at exit is for all of them together, not for each."""
    now = 100.0

    class Stuck:
        """A pump whose event loop never gets to closing it, and the event that is waited for."""

        def __init__(self) -> None:
            self.loop = object()

        def wait(self, timeout: float) -> bool:
            nonlocal now
            now += timeout
            return False

    reported: list[Any] = []
    pumps = {Stuck(), Stuck(), Stuck()}
    monkeypatch.setattr(lifetime, "_OPEN", set(pumps))
    monkeypatch.setattr(lifetime, "_start_closing", lambda loop, pumps, patience_s: (pumps[0], pumps))
    monkeypatch.setattr(lifetime, "_report", reported.append)
    monkeypatch.setattr(time, "monotonic", lambda: now)

    lifetime.close_all()

    assert now == 100.0 + lifetime.EXIT_FLUSH_S + lifetime._MARGIN_S
    assert set(reported) == pumps


def test_a_dropped_log_is_closed_and_warned_of(server: FakeServer) -> None:
    """Its records are stored in the background, its thread ends, and Python's usual warning names the remedy."""
    log = emb.connect(server.addresses)
    thread, future = log.thread, log.publisher("t", linger_ms=60_000).send(b"dropped")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del log
        gc.collect()
    assert future.result(30) is not None
    while thread.alive:
        time.sleep(0.01)
    assert [w.category for w in caught] == [ResourceWarning]
    assert "'t'" in str(caught[0].message)


def test_a_dropped_asyncio_log_is_closed_and_warned_of(server: FakeServer) -> None:
    """The same in an event loop."""

    async def work() -> list[Any]:
        log: Any = await emb.aio.connect(server.addresses)
        brokers, future = log.brokers, await (await log.publisher("t", linger_ms=60_000)).send(b"dropped")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            del log
            gc.collect()
        assert await future is not None
        while brokers.live():  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.01)
        return list(caught)

    assert [w.category for w in asyncio.run(work())] == [ResourceWarning]


def test_a_closed_publisher_is_not_warned_of(server: FakeServer) -> None:
    """Programs that close their objects, directly or with their log, get no warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        with emb.connect(server.addresses) as log:
            publisher = log.publisher("t")
            publisher.send(b"x")
            publisher.close()
            last = log.publisher("t")
            last.send(b"y")
        del publisher, last, log
        gc.collect()
    assert not caught
