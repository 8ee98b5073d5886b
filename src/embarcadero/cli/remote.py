"""A cluster seen from another machine: what its brokers and its metrics tell, without its folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import msgspec

from embarcadero.errors import BadFrame, OutcomeUnknown, Retriable, Unreachable
from embarcadero.types import Member
from embarcadero.watch.places import Place
from embarcadero.watch.targets import ANY, places_of
from embarcadero.watch.top import Facts

if TYPE_CHECKING:
    from embarcadero.client.sync import Log

_ASK_S = 3.0
_BYTES_MAX = 1 << 20


@contextmanager
def connected(brokers: str) -> Iterator[Log]:
    """A client of brokers that were named with commas."""
    import embarcadero
    from embarcadero.cli.output import find_brokers
    from embarcadero.cli.settings import settings

    with embarcadero.connect(find_brokers(brokers, None), config=settings(), timeout=_ASK_S) as log:
        yield log


def statuses(log: Log) -> list[dict[str, Any]]:
    """What all live brokers say about themselves, by number. Unreachable if none answers."""
    found = {str(status["address"]): status for status in log.status(timeout=_ASK_S)}
    if not found:
        raise Unreachable(f"no broker answered within {_ASK_S:g} s", "check the addresses, and `status` over there")
    others = {str(address) for status in found.values() for address in status.get("brokers", ())} - found.keys()
    for address in sorted(others):
        with suppress(Retriable, OutcomeUnknown), connected(address) as other:  # one that is silent is left out
            found |= {str(status["address"]): status for status in other.status(timeout=_ASK_S)}
    return sorted(found.values(), key=lambda status: int(status["broker"]))


def remote_places(found: list[dict[str, Any]]) -> list[Place]:
    """Where all processes serve their metrics, as the first one that can be reached tells; empty: none can.

    On loopback only if brokers are: a loopback address of another machine leads to a cluster on this one.
    """
    for status in found:
        broker = str(status["address"]).rpartition(":")[0]
        host, _, port = str(status.get("metrics") or "").rpartition(":")
        if host.strip("[]") in ANY:
            host = broker
        here = _on_loopback(broker)
        with suppress(OSError, ValueError, msgspec.MsgspecError):  # the next one may be reached
            if port and (here or not _on_loopback(host)):
                places = _ask(f"http://{host}:{port}/targets")
                if reached := [place for place in places if here or not _on_loopback(place.host)]:
                    return reached
    return []


def _on_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ip_address(host.strip("[]")).is_loopback
    return host == "localhost"


def _ask(url: str) -> list[Place]:
    with urlopen(url, timeout=_ASK_S) as answer:
        return places_of(answer.read(_BYTES_MAX))


def remote_facts(log: Log, found: list[dict[str, Any]]) -> Facts:
    """What `top` needs to know beside metrics."""
    topics = [log.describe(topic.name, timeout=_ASK_S) for topic in log.topics(timeout=_ASK_S)]
    return Facts(
        cluster="", members=[_member(status) for status in found], topics=list(topics),
        lanes=[lane for topic in topics for lane in topic.lanes], epoch=max(int(status["epoch"]) for status in found),
    )  # fmt: skip


def _member(status: dict[str, Any]) -> Member:
    host, _, port = str(status["address"]).rpartition(":")
    if not port.isdigit():
        raise BadFrame(f"broker {status['broker']} says that its address is {status['address']!r}", "see its version")
    return Member(
        broker=int(status["broker"]), incarnation=int(status["incarnation"]), handle=0, host=host, port=int(port), pid=0
    )
