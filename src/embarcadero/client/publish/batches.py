"""A batch on its way out, and the errors it may end with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from embarcadero.errors import (
    Backpressure,
    BadReference,
    BadValue,
    Conflict,
    EmbarcaderoError,
    Lost,
    NotAvailable,
    OutcomeUnknown,
    Refused,
    Stale,
    TimedOut,
    UnknownSchema,
    UnknownTopic,
    Unreachable,
)
from embarcadero.limits import SESSION_WINDOW
from embarcadero.types import Outcome, Position, ReferenceFault, StagedBatch, health_in_words
from embarcadero.wire.codec import FullReceived

REFUSALS: dict[Outcome, tuple[type[EmbarcaderoError], str, str]] = {
    Outcome.CONFLICT: (Conflict, "was stored before with other bytes", "two publishers use one session's sequences"),
    Outcome.LOST: (Lost, "was declared lost before it came", "send the records again as a new batch"),
    Outcome.STALE: (Stale, "is below the session's window", "it was settled long ago"),
    Outcome.UNKNOWN_SCHEMA: (UnknownSchema, "has a schema that its topic has not", "open the publisher again"),
    Outcome.UNKNOWN_TOPIC: (UnknownTopic, "has no topic any more", "the topic was deleted"),
    Outcome.NO_REFERENCE: (BadReference, "names a staged batch that is not there", "stage its records again"),
}
FINAL_REFUSALS = frozenset({Outcome.CONFLICT, Outcome.LOST})
"""Refusals that hold for every copy of the batch that was ever sent."""


_FAULTS = {
    ReferenceFault.GONE: (
        "lane {0.lane} has no batch at index {0.index}: it was trimmed, or lost",
        "stage its records again",
    ),
    ReferenceFault.ANOTHER_TOPIC: (
        "lane {0.lane} is not one of the topic with id {0.topic_id:016x}: that was deleted, or made again",
        "stage its records again",
    ),
    ReferenceFault.DIFFERS: (
        "the batch at index {0.index} of lane {0.lane} has not the size {0.size}, the count {0.count} and the checksum "
        "{0.crc:08x}",
        "publish what `staged()` of its future returned, unchanged",
    ),
}


@dataclass(slots=True, eq=False)
class OutBatch:
    """One stamped batch. It ends exactly once: with a position (None: stored too long ago to name it) or an error."""

    sequence: int
    payload: Any
    size: int
    count: int
    partition: int
    schema: int
    crc: int
    added_us: int
    position: Position | None = None
    error: EmbarcaderoError | None = None
    done: bool = False
    token: Any = None
    link: int | None = None  # the connection it is in flight on
    sent: bool = False
    doubts: int = 0  # copies sent whose fate nobody told us
    refusals: int = 0  # times the cluster asked to send it again later
    reference: StagedBatch | None = None  # it names this one instead of carrying it: `payload` is the frame's body


def refusal(outcome: Outcome, batch: OutBatch, extra: int = 0) -> EmbarcaderoError:
    """The error of a batch that the cluster refused for good. `extra` is the ack's."""
    kind, problem, hint = REFUSALS[outcome]
    if outcome is Outcome.NO_REFERENCE and batch.reference is not None and extra in _FAULTS:
        why, hint = _FAULTS[ReferenceFault(extra)]
        problem = f"{problem}: {why.format(batch.reference)}"
    if batch.doubts and outcome not in FINAL_REFUSALS:
        unknown = f"batch {batch.sequence} {problem}, but nobody told what became of an earlier copy"
        return OutcomeUnknown(unknown, "read the log to find out")
    return kind(f"batch {batch.sequence} {problem}", hint)


def no_references(batch: OutBatch) -> EmbarcaderoError:
    """The error of a batch by reference when no connected broker takes any."""
    if batch.doubts:
        return OutcomeUnknown(
            f"batch {batch.sequence} was sent by reference, and the brokers that are left take no references",
            "read the log to find out",
        )
    return NotAvailable(
        f"batch {batch.sequence} names a staged batch, and no connected broker takes batches by reference",
        "upgrade the brokers, or publish the bytes themselves: publish_encoded(payload, count)",
    )


def beyond_window(batch: OutBatch) -> EmbarcaderoError:
    """The error of a batch that could not be recognised if it came again."""
    return BadValue(
        f"batch {batch.sequence} is the {SESSION_WINDOW + 1}th or a later one of a session opened at a sequence",
        f"send at most {SESSION_WINDOW} batches: make them larger, or spread the records over more sessions",
    )


def ended_with(cause: EmbarcaderoError, batch: OutBatch) -> EmbarcaderoError:
    """The error of an unsettled batch when its publisher ends: the cause itself only if no copy can be in the log."""
    if not batch.doubts and isinstance(cause, BadReference):
        return Refused(f"batch {batch.sequence} was not sent, as its session ended: {cause.message}", cause.hint)
    if not batch.doubts:
        return cause
    kind = TimedOut if isinstance(cause, TimedOut) else OutcomeUnknown
    return kind(
        f"batch {batch.sequence} was sent but its outcome is not known: {cause.message}", "read the log to find out"
    )


def no_room(topic: str, full: FullReceived) -> Backpressure:
    """The error of a call for whose record the cluster has had no room for long. The publisher goes on."""
    again = "the record was not taken, and nothing is lost; try again later"
    if full.lane < 0:
        problem, why = f"the brokers' memory has no room for a batch of {topic!r}", "publish less, or make it larger"
    elif full.replica < 0:
        problem, why = f"the replicas' disks do not keep up with {topic!r}", "see: embarcadero status"
    else:
        words = health_in_words(full.trouble) or ["in trouble"]
        problem = f"records of {topic!r} do not become durable: replica {full.replica}: {words[0].partition(': ')[0]}"
        why = words[0].partition(": ")[2] or "see: embarcadero status"
    return Backpressure(problem, f"{again}. {why}")


def undelivered(topic: str, oldest: OutBatch, timeout_us: int, usable: int, full: int) -> EmbarcaderoError:
    """Why a publisher ends whose oldest batch has waited too long. `usable`: links that its open session can use."""
    seconds = timeout_us / 1e6
    if oldest.doubts:
        return TimedOut(f"no outcome within {seconds:g} s", "see whether the cluster is up: embarcadero status")
    if not usable:
        return Unreachable(
            f"no broker took a batch of {topic!r} within {seconds:g} s", "see whether it is up: embarcadero status"
        )
    if oldest.reference is not None and oldest.refusals and not full:
        staged = f"the staged batch at index {oldest.reference.index} of lane {oldest.reference.lane}"
        return Backpressure(
            f"{staged} could not be read for {seconds:g} s, and was not published into {topic!r}",
            "it is not durable yet, or its replicas are in trouble: embarcadero status",
        )
    return Backpressure(
        f"the cluster had no room for a batch of {topic!r} for {seconds:g} s ({full} of {usable} brokers full)",
        "publish less, or make the brokers' logs larger",
    )
