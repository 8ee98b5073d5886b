"""Discovery for Prometheus: where the metrics of all processes of a cluster are now.

Every process serves the document at `/targets`, in the format of `http_sd_configs`, made from the files in which
processes say where they are. A process that was started again on another port is there as soon as it serves. One that
died stays where it was, so that Prometheus sees that it is down.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from embarcadero.watch.places import Place

ANY: Final = frozenset({"0.0.0.0", "::"})


class TargetGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One process: its address, and labels that all its metrics get."""

    targets: list[str]
    labels: dict[str, str]


_GROUPS: Final = msgspec.json.Decoder(list[TargetGroup])
NODE: Final = "node"
"""The label with the roles of a process, such as `broker:0`."""


def targets(places: Iterable[Place], asked: str) -> list[TargetGroup]:
    """All processes with metrics but those that left in order. `asked`: the host by which the peer reached this one."""
    return [
        TargetGroup(targets=[_reached(place, asked).address], labels={NODE: place.roles})
        for place in places
        if place.left is None and place.port
    ]


def _reached(place: Place, asked: str) -> Place:
    """A process that listens on all addresses is reached by the one that the peer knows."""
    return msgspec.structs.replace(place, host=asked) if place.host in ANY and asked else place


def places_of(document: bytes) -> list[Place]:
    """The processes in a document that `/targets` gave. Raises msgspec.MsgspecError."""
    found = []
    for group in _GROUPS.decode(document):
        for target in group.targets:
            host, _, port = target.rpartition(":")
            if port.isdigit():
                found.append(Place(roles=group.labels.get(NODE, ""), pid=0, host=host.strip("[]"), port=int(port)))
    return found
