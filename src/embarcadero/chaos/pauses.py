"""What each kill cost, from a history: how long those waited for an ack whom it concerned.

| role | figure | streams |
| --- | --- | --- |
| sequencer | from the kill to the first ack of a batch sent after it | of ordered topics: others need no sequencer |
| broker | from the kill until every stream has an ack of a batch that it sent after it | all: each uses all brokers |
| replica | longest pause of acks that a stream had from the kill until all was whole again | with ack 2 |
| hand-over | the same, from the request until acks flow, and a moment more | with ack 1, of ordered topics |
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final

from embarcadero.chaos.timeline import Acks, acks_of, longest_pause_us, next_ack_us
from embarcadero.sim.history import Began, Fault, Healed, History, Sent, Settled, TopicMade
from embarcadero.types import Ack, Order

BOUNDS_MS: Final = {
    "sequencer": {"p50 at most": 100.0, "p99 at most": 250.0, "p50 goal": 30.0, "p99 goal": 100.0},
    "broker": {"p99 at most": 200.0, "p99 goal": 100.0},
    "replica": {"p99 at most": 200.0, "p99 goal": 50.0},
    "hand-over": {"p99 at most": 50.0, "p99 goal": 10.0},
}
"""What is asked for."""

ROLES: Final = tuple(BOUNDS_MS)
_CALM_US: Final = 100_000
_NEVER_US: Final = 1 << 62


def pauses_ms(history: History, role: str) -> list[float | None]:
    """What each kill cost, in milliseconds; None where no ack came afterwards."""
    return _pauses_at(history, role, history.of(Fault))


def calm_ms(history: History, role: str) -> list[float]:
    """The same, measured at moments when nothing was killed: what this machine does to acks all by itself."""
    calm = [
        Fault(at=one.until, kind="", target="", until=one.until + _CALM_US)
        for one, following in pairwise(history.of(Fault))
        if following.at - one.until > 2 * _CALM_US
    ]
    return [pause for pause in _pauses_at(history, role, calm) if pause is not None]


def concerned(history: History, role: str) -> list[str]:
    """The streams whose acks a role can hold up, of those that were there all the time."""
    healed_us = min((event.at for event in history.of(Healed)), default=_NEVER_US)
    orders = {topic.lane: topic.order for topic in history.of(TopicMade)}
    order_of = {event.stream: orders.get(event.lane, 0) for event in history.of(Sent)}
    ack_of = {event.stream: event.ack for event in history.of(Settled)}
    streams = sorted({event.stream for event in history.of(Began) if event.at < healed_us})
    return [stream for stream in streams if counts(role, order_of.get(stream, 0), ack_of.get(stream))]


def counts(role: str, order: int, ack: int | None) -> bool:
    """Whether a role can hold up the acks of such a stream."""
    if role in ("sequencer", "hand-over") and order < Order.TOTAL:
        return False
    wanted = {"replica": Ack.DURABLE, "hand-over": Ack.ORDERED}.get(role)
    return wanted is None or ack == wanted


def _pauses_at(history: History, role: str, faults: list[Fault]) -> list[float | None]:
    streams = concerned(history, role)
    if role == "sequencer":
        parts = [acks_of(history, streams=streams)]
    else:
        parts = [acks_of(history, streams=[stream]) for stream in streams]
    return [_pause_ms(role, fault, parts) for fault in faults]


def _pause_ms(role: str, fault: Fault, parts: list[Acks]) -> float | None:
    if role in ("sequencer", "broker"):
        found = [next_ack_us(acks, fault.at) for acks in parts]
    else:
        found = [longest_pause_us(acks, fault.at, fault.until) for acks in parts]
    known = [pause for pause in found if pause is not None]
    return max(known) / 1e3 if known and len(known) == len(found) else None
