"""A client opened before a fork: supported and refused calls in the child, and an undisturbed parent."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

import embarcadero as emb
from embarcadero import forks
from embarcadero.wire.schemas import plain_batch
from tests.client.fake_server import FakeServer


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer(order=5) as server:
        yield server


@pytest.fixture(params=["uvloop", "asyncio"])
def without(request: pytest.FixtureRequest) -> str:
    """The first lines of a program: uvloop is there, or it is not, as on Windows."""
    return "" if request.param == "uvloop" else "import sys\nsys.modules['uvloop'] = None\n"


Run = Callable[[FakeServer, str], tuple[list[str], str]]


@pytest.fixture
def run(without: str) -> Run:
    """The code that runs a program with the event loop of the test."""
    return lambda server, program: run_program(server, without, program)


def run_program(server: FakeServer, without: str, program: str) -> tuple[list[str], str]:
    """Run a program with the addresses of the fake brokers; return its printed lines and its stderr.

    It has `in_child(function)`: run a function in a forked child, print the result or the exception, and end the child
    as multiprocessing does; with `exit` like a program.
    """
    start = f"""
import asyncio, gc, multiprocessing, os, sys, threading
{without}
import embarcadero as emb
address = {",".join(server.addresses)!r}

def in_child(function, exit=False):
    pid = os.fork()
    if pid:
        assert os.waitpid(pid, 0)[1] == 0
        return
    try:
        print(function(), flush=True)
    except emb.errors.EmbarcaderoError as error:
        print(type(error).__name__, str(error), flush=True)
    except BaseException as error:
        print(repr(error), flush=True)
    if exit:
        sys.exit(0)
    os._exit(0)
"""
    command = [sys.executable, "-c", start + program]
    done = subprocess.run(command, capture_output=True, check=False, timeout=120, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines(), done.stderr


def stored(server: FakeServer) -> list[bytes]:
    with emb.connect(server.addresses) as log:
        return log.read("t").column("value").to_pylist()


def test_a_log_connects_again_in_the_child(server: FakeServer, run: Run) -> None:
    """A Log only connects to the cluster: the child makes its own connections, the parent keeps its own."""
    lines, said = run(
        server,
        """
log = emb.connect(address)
def work():
    with log.publisher("t") as publisher:
        publisher.send(b"child").result(30)
    return log.describe("t").name
in_child(work)
in_child(work, exit=True)
print(log.describe("t").name)
with log.publisher("t") as publisher:
    publisher.send(b"parent").result(30)
log.close()
""",
    )
    assert lines == ["t", "t", "t"]
    assert not said
    assert stored(server) == [b"child", b"child", b"parent"]


def test_a_log_connects_again_in_a_child_of_multiprocessing(server: FakeServer, run: Run) -> None:
    """The child's own records are stored at its end, as usual; the parent's are stored once."""
    _, said = run(
        server,
        """
log = emb.connect(address)
publisher = log.publisher("t", linger_ms=60_000)
publisher.send(b"parent")
def work():
    global own
    own = log.publisher("t", linger_ms=60_000)
    own.send(b"child")
process = multiprocessing.get_context("fork").Process(target=work)
process.start()
process.join()
assert process.exitcode == 0
""",
    )
    assert not said
    assert stored(server) == [b"child", b"parent"]


USES = {
    "send": "publisher.send(b'x')",
    "send with a key": "publisher.send(b'x', key=b'k')",
    "publish": "publisher.publish([{'value': b'x'}])",
    "flush": "publisher.flush()",
    "next_session_seq": "publisher.next_session_seq()",
    "result": "future.result()",
    "poll": "subscriber.poll()",
    "iterate": "next(iter(subscriber))",
    "seek": "subscriber.seek('earliest')",
    "position": "subscriber.position()",
    "pause": "subscriber.pause()",
    "resume": "subscriber.resume()",
    "scan": "next(scan)",
}


@pytest.mark.parametrize("name", USES)
def test_objects_with_a_position_in_the_log_refuse_to_work_in_the_child(
    server: FakeServer, run: Run, name: str
) -> None:
    """A session has one publisher and a position one reader: the error names the object to open in the child."""
    server.cluster.put(stored_value(b"first"))
    lines, _ = run(
        server,
        f"""
log = emb.connect(address)
publisher = log.publisher("t", linger_ms=60_000)
future = publisher.send(b"parent")
subscriber = log.subscribe("t")
subscriber.poll(30)
scan = log.scan("t", stop=5)
next(scan)
in_child(lambda: {USES[name]})
publisher.close()
""",
    )
    assert lines[0].startswith("Forked ")
    assert "in the child" in lines[0]
    assert stored(server)[-1] == b"parent"


def test_closing_in_the_child_leaves_the_parent_alone(server: FakeServer, run: Run) -> None:
    """`with` blocks entered before the fork end in the child, too: no object of the parent is closed or sends."""
    lines, said = run(
        server,
        """
log = emb.connect(address)
publisher, subscriber = log.publisher("t", linger_ms=60_000), log.subscribe("t")
publisher.send(b"one")
def work():
    publisher.close(), subscriber.close(), log.close()
    globals().update(publisher=None, subscriber=None, log=None)
    gc.collect()
in_child(work, exit=True)
publisher.send(b"two")
publisher.close()
print(subscriber.poll(30).count)
log.close()
""",
    )
    assert lines == ["None", "2"]
    assert not said
    assert stored(server) == [b"one", b"two"]


def test_a_child_that_lives_on_does_not_keep_the_parents_connections(server: FakeServer, without: str) -> None:
    """When the parent disconnects, brokers notice it, although the child inherited the sockets."""
    program = f"""
import os, sys
{without}
import embarcadero as emb
log = emb.connect({",".join(server.addresses)!r})
log.describe("t")
if os.fork():
    log.close()
    os._exit(0)
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as child:
        assert child.wait(60) == 0
        try:
            with emb.connect(server.addresses) as log:
                while len(server.sockets) > len(log.brokers.live()):
                    log.describe("t")
        finally:
            assert child.stdin is not None
            child.stdin.close()


def test_an_asyncio_log_connects_again_in_the_childs_loop(server: FakeServer, run: Run) -> None:
    """Its publishers and subscribers refuse to work there; closing them does nothing."""
    lines, said = run(
        server,
        """
async def prepare():
    global log, publisher, subscriber
    log = await emb.aio.connect(address)
    publisher, subscriber = await log.publisher("t", linger_ms=60_000), await log.subscribe("t")
    await publisher.send(b"parent")
async def child():
    for use in (publisher.send(b"x"), publisher.flush(), publisher.next_session_seq(), subscriber.poll(30)):
        try:
            await use
        except emb.errors.Forked as error:
            print(error.message)
    await publisher.close()
    await subscriber.close()
    async with log:
        async with await log.publisher("t") as own:
            await own.send(b"child")
        return (await log.describe("t")).name
async def parent():
    await publisher.send(b"again")
    await publisher.close()
    await log.close()
loop = asyncio.new_event_loop()
loop.run_until_complete(prepare())
in_child(lambda: asyncio.run(child()), exit=True)
loop.run_until_complete(parent())
loop.close()
""",
    )
    assert len(lines) == 5
    assert lines[-1] == "t"
    assert not said
    assert stored(server) == [b"child", b"parent", b"again"]


def test_an_object_that_fails_after_a_fork_does_not_keep_others_from_being_informed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop over them used to end at the first error, and the others used sockets of the parent."""
    told: list[str] = []

    class Object:
        def __init__(self, name: str) -> None:
            self._name = name

        def _after_fork(self) -> None:
            told.append(self._name)
            if self._name == "broken":
                raise RuntimeError("broken")

    monkeypatch.setattr(forks, "_KNOWN", [Object("one"), Object("broken"), Object("two")])
    with pytest.raises(ExceptionGroup, match="may not work") as caught:
        forks._in_child()
    assert told == ["one", "broken", "two"]
    assert [str(error) for error in caught.value.exceptions] == ["broken"]


def stored_value(value: bytes) -> bytes:
    return plain_batch([value], [0.0]).serialize().to_pybytes()
