"""The table of cases is complete; the proxy shapes connections as configured; the store shows the lost records."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Iterator

import pytest

import embarcadero as emb
from embarcadero.errors import BadValue
from embarcadero.node.process import ReservedPorts
from embarcadero.types import Range, TopicLane
from embarcadero_proof.chaos.cases import CASES, find
from embarcadero_proof.chaos.disks import Books, lost_spans, with_losses
from embarcadero_proof.chaos.load import Actor
from embarcadero_proof.chaos.proxy import FAIR, Mood, Proxy, merged
from embarcadero_proof.chaos.troubles import KINDS
from embarcadero_proof.chaos.watch import Observer
from embarcadero_proof.sim.history import Ended, FabricLost, Fault, Healed, LaneMade, LostSpan, RoleFailed, Stopped

WAIT_S = 10


def test_every_case_can_run_and_has_a_description() -> None:
    """At least 25 cases, each with a name of its own, and no trouble without an implementation."""
    assert len(CASES) >= 25
    assert len({case.name for case in CASES}) == len(CASES)
    for case in CASES:
        assert case.words
        assert {trouble.kind for trouble in case.troubles} <= KINDS
    assert {trouble.kind for case in CASES for trouble in case.troubles} == KINDS


def test_cases_are_found_by_name() -> None:
    """No name means all; a wrong name is an error that names the list of cases."""
    assert [case.name for case in find(["storm", "calm"])] == ["storm", "calm"]
    assert find([]) == list(CASES)
    with pytest.raises(BadValue, match="no case 'typhoon'"):
        find(["typhoon"])


def test_an_observer_records_faults_where_they_started() -> None:
    """They are recorded when they are over; a lane is recorded once; lanes of topics are not."""
    times = iter(range(0, 1_000_000_000, 1_000_000))
    observer = Observer(lambda: next(times))
    began = observer.now_us()
    observer.saw(Healed)
    observer.broke("kill", "broker:0", began)
    for lane in (5, 1 << 40, 1 << 40):
        observer.saw_lane(lane, 1, 1)
    events = observer.history().events
    assert [type(event) for event in events] == [Fault, Healed, LaneMade]
    assert events == sorted(events, key=lambda event: event.at)


class Clumsy(Actor):
    """A member of the load with a fault of its own."""

    def act(self, log: emb.Log) -> None:
        raise KeyError("not an error of the client")


def test_every_failed_member_of_the_load_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing member makes a case weaker than its description."""
    monkeypatch.setattr(emb, "connect", lambda *_, **__: contextlib.nullcontext())
    observer = Observer()
    Clumsy("reader", observer, []).run()
    assert [failed.error for failed in observer.of(RoleFailed)] == ["KeyError: 'not an error of the client'"]


@contextlib.contextmanager
def proxied_echo() -> Iterator[tuple[Proxy, socket.socket, int]]:
    """An echo server, a proxy in front of it, and a connected client."""
    reserved = ReservedPorts(2)
    port = reserved.first
    server = socket.create_server(("127.0.0.1", port))

    def echo() -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = server.accept()
                threading.Thread(target=serve, args=(peer,), daemon=True).start()

    def serve(peer: socket.socket) -> None:
        with peer, contextlib.suppress(OSError):
            while data := peer.recv(65_536):
                peer.sendall(data)

    threading.Thread(target=echo, daemon=True).start()
    proxy = Proxy(port + 1, port, 1)
    proxy.start()
    try:
        with socket.create_connection(("127.0.0.1", port + 1), timeout=WAIT_S) as client:
            yield proxy, client, port + 1
    finally:
        proxy.stop()
        server.close()


def received(client: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (more := client.recv(size - len(data))):
        data += more
    return data


def test_the_proxy_carries_everything_unchanged() -> None:
    """Also when it drips or is slow; bytes it holds back in one direction arrive when it is fair again."""
    data = random.Random(1).randbytes(100_000)
    with proxied_echo() as (proxy, client, _):
        for mood in (FAIR, Mood(drip=True), Mood(delay_s=0.001)):
            proxy.treat(0, "test", mood)
            client.sendall(data)
            assert received(client, len(data)) == data
        for mood in (Mood(deaf=True), Mood(mute=True)):
            proxy.treat(0, "test", mood)
            client.sendall(b"held back")
            client.settimeout(0.1)
            with pytest.raises(TimeoutError):
                client.recv(1)
            client.settimeout(WAIT_S)
            proxy.treat(0, "test", FAIR)
            assert received(client, 9) == b"held back"


def test_the_proxy_cuts_and_refuses() -> None:
    """A cut is a reset; while it refuses, a new connection ends immediately; then connections work again."""
    with proxied_echo() as (proxy, client, port):
        client.sendall(b"x")
        assert client.recv(1) == b"x"
        proxy.treat(0, "test", Mood(refuse=True))
        with pytest.raises(ConnectionResetError):
            client.recv(1)
        with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as other:
            other.settimeout(WAIT_S)
            with contextlib.suppress(ConnectionResetError):
                assert other.recv(1) == b""
        proxy.treat(0, "test", FAIR)
        with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as other:
            other.sendall(b"y")
            assert other.recv(1) == b"y"


def test_moods_add_up() -> None:
    """Two troubles with one broker at the same time do not undo each other."""
    assert merged([Mood(deaf=True), Mood(delay_s=0.1), FAIR]) == Mood(deaf=True, delay_s=0.1)


def test_losses_with_the_fabric() -> None:
    """Between ranges, after the end of a lane that was open then, and records of a closed lane not on disks."""

    def span(lane: int, number: int, start: int, end: int | None) -> Range:
        return Range(lane=lane, number=number, start=start, start_seq=start, replicas=[], durable_on=1, end=end)

    def lane(number: int, end: int) -> TopicLane:
        return TopicLane(lane=number, topic=1, broker=0, incarnation=1, handle=1, end=end)

    known = Books(
        [span(1, 1, 0, 10), span(1, 2, 100, None), span(7, 1, 0, 5), span(8, 1, 0, 3)], [lane(7, 5), lane(8, 4)]
    )
    found = lost_spans(known, cut_short=[7])
    assert (1, 10, 100) in found
    assert (8, 3, 4) in found
    assert [(number, start) for number, start, stop in found if stop > 1 << 60] == [(7, 5)]


def test_each_loss_of_the_fabric_has_its_own_lost_spans() -> None:
    """Records that the store did not know yet when the fabric was lost again were lost the second time."""
    first, second = (1, 10, 100), (1, 120, 200)
    events = [
        Stopped(at=1, clean=False), FabricLost(at=2), Stopped(at=3, clean=False, lost=[first]), FabricLost(at=4),
        Ended(at=5),
    ]  # fmt: skip
    placed = with_losses(events, [first, second])
    assert [(span.at, span.start) for span in placed if isinstance(span, LostSpan)] == [(2, 10), (4, 120)]
    assert [event.at for event in placed] == [1, 2, 2, 3, 4, 4, 5]
    assert len(with_losses([Ended(at=5)], [first])) == 2
