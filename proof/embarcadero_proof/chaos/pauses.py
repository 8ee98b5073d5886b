"""The cost of each kill, from a history: how long the affected streams waited for an ack.

| role | pause | streams |
| --- | --- | --- |
| sequencer | from the kill until every stream has an ack of a batch that it sent after the kill | of ordered topics |
| broker | the same | all: each uses all brokers |
| replica | longest pause of a stream's acks from the kill until the cluster is whole again | with ack 2 |
| hand-over | the same, from the request until acks flow, and a moment more | with ack 1, of ordered topics |

The wait, for all of them: the longest wait of any batch that was in flight at the kill, or was sent before its stream's
next ack. It counts from the kill, or from the time of sending if that was later.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final, NamedTuple

from embarcadero.types import Ack, Order
from embarcadero_proof.chaos.timeline import Acks, acks_of, longest_pause_us, longest_wait_us, next_ack_us
from embarcadero_proof.sim.history import Began, Fault, Healed, History, Sent, Settled, TopicMade

BOUNDS_MS: Final = {
    "sequencer": {"p50 at most": 100.0, "p99 at most": 250.0, "p50 goal": 30.0, "p99 goal": 100.0},
    "broker": {"p99 at most": 200.0, "p99 goal": 100.0},
    "replica": {"p99 at most": 200.0, "p99 goal": 50.0},
    "hand-over": {"p99 at most": 50.0, "p99 goal": 10.0},
}
"""Required bounds, and goals."""

ROLES: Final = tuple(BOUNDS_MS)
PAUSE_WORDS: Final = {
    "sequencer": "kill -9 to next ack (last stream)",
    "broker": "kill -9 to next ack (last stream)",
    "replica": "longest pause of ack 2",
    "hand-over": "longest pause of acks",
}
WAIT_WORDS: Final = "longest wait of a batch"
_CALM_US: Final = 100_000
_NEVER_US: Final = 1 << 62


class Cost(NamedTuple):
    """The cost of one kill, in milliseconds."""

    pause_ms: float
    wait_ms: float


def costs(history: History, role: str) -> list[Cost | None]:
    """Return the cost of each kill; None where a stream had no ack afterwards."""
    return _costs_at(history, role, history.of(Fault))


def calm_costs(history: History, role: str) -> list[Cost]:
    """Return the same costs at moments without a kill: pauses of acks that this machine causes by itself.

    Moments right after a kill do not count: a pause that lasts until then belongs to the kill.
    """
    calm = [
        Fault(at=one.until + _CALM_US, kind="", target="", until=one.until + 2 * _CALM_US)
        for one, following in pairwise(history.of(Fault))
        if following.at - one.until > 2 * _CALM_US
    ]
    return [cost for cost in _costs_at(history, role, calm) if cost is not None]


def concerned(history: History, role: str) -> list[str]:
    """Return the streams whose acks a role can delay, among those that were there all the time."""
    healed_us = min((event.at for event in history.of(Healed)), default=_NEVER_US)
    orders = {topic.lane: topic.order for topic in history.of(TopicMade)}
    order_of = {event.stream: orders.get(event.lane, 0) for event in history.of(Sent)}
    ack_of = {event.stream: event.ack for event in history.of(Settled)}
    streams = sorted({event.stream for event in history.of(Began) if event.at < healed_us})
    return [stream for stream in streams if counts(role, order_of.get(stream, 0), ack_of.get(stream))]


def counts(role: str, order: int, ack: int | None) -> bool:
    """Whether a role can delay the acks of such a stream."""
    if role in ("sequencer", "hand-over") and order < Order.TOTAL:
        return False
    wanted = {"replica": Ack.DURABLE, "hand-over": Ack.ORDERED}.get(role)
    return wanted is None or ack == wanted


def _costs_at(history: History, role: str, faults: list[Fault]) -> list[Cost | None]:
    parts = [acks_of(history, streams=[stream]) for stream in concerned(history, role)]
    return [_cost(role, fault, parts) for fault in faults]


def _cost(role: str, fault: Fault, parts: list[Acks]) -> Cost | None:
    """Return the worst cost of all streams: a fast stream proves nothing about the others."""
    if role in ("sequencer", "broker"):
        pauses = [next_ack_us(acks, fault.at) for acks in parts]
    else:
        pauses = [longest_pause_us(acks, fault.at, fault.until) for acks in parts]
    known = [pause for pause in pauses if pause is not None]
    waits = [wait for acks in parts if (wait := longest_wait_us(acks, fault.at)) is not None]
    if not parts or len(known) < len(parts) or len(waits) < len(parts):
        return None
    return Cost(max(known) / 1e3, max(waits) / 1e3)
