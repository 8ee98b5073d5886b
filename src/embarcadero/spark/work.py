"""A task's work and its names in the log: the same work is stored once, other work under its names is refused.

Theory of operation. A write is a series of works (a stream's micro-batches; a batch write has one), each done by tasks.
Task p of a write has a session, `spark/<write>/<p>`; batch n of its work w has the sequence (w << 20) + n there. So
whatever runs again (a task, its speculative twin, a driver) sends the same batches under the same numbers, and the
sequencer stores each of them once. Three more names are numbers that only grow; who moves one on learns where it was:

`spark/<write>/<p>/rows`     (w << 28) + digest of the task's batches, all of them, before the first one is sent. Rows
                             that differ from those of an earlier attempt are refused before any of them is written.
`spark/<write>/tasks`        (w << 20) + p + 1: the highest task that ever began this work, in any run of the driver.
`spark/<write>/tasks/<run>`  the same, in this run.

A driver that runs again may cut the work into fewer tasks, and tasks are not told how many there are. What an earlier
run's task wrote would then be there twice: no task of the same number compares it. So a task writes what is new only
if it knows that its own run has a task as high as the highest one ever. If it does not learn that within a moment, it
hands its batches to the driver, which knows the number of tasks when it commits: it refuses the whole, or writes them
under the very same numbers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from random import random
from typing import Final

import pyarrow as pa

from embarcadero.client.sync import Log, Publisher
from embarcadero.client.topics import TopicInfo
from embarcadero.errors import BadValue, Conflict, SessionFenced, Stale, UnknownSession
from embarcadero.limits import (
    DELIVERY_TIMEOUT_S,
    SESSION_WINDOW,
    SPARK_BATCHES_BITS,
    SPARK_DIGEST_BITS,
    SPARK_EVIDENCE_S,
    SPARK_FENCED_TRIES,
)
from embarcadero.spark.write_options import WORK_MAX
from embarcadero.types import Ack
from embarcadero.wire.codec import payload_crc

_LOOK_S: Final = 0.1  # between two looks for neighbours
_BACK_OFF_S: Final = 0.05  # after the session was taken away, the first time
_AGAIN: Final = (
    "rows must be the same, in as many tasks, when they are computed again: no rand(), no limit without an order, and "
    "no current_timestamp() in batch writes; other rows need another writeId, or a new checkpoint"
)


@dataclass(frozen=True, slots=True)
class Encoded:
    """One batch as it is sent."""

    payload: pa.Buffer
    count: int
    partition: int


@dataclass(frozen=True, slots=True)
class Work:
    """One task's part of one work of a write. `run`: which run of the driver; None: there is only one, ever."""

    write: str
    number: int
    task: int
    run: str | None
    order: int | None = None  # of its session; None: the usual one

    def __post_init__(self) -> None:
        if not 0 <= self.number <= WORK_MAX or not 0 <= self.task < (1 << SPARK_BATCHES_BITS) - 1:
            raise BadValue(
                f"work {self.number}, task {self.task}",
                f"a write has at most {WORK_MAX} works of {(1 << SPARK_BATCHES_BITS) - 1} tasks; begin a new one",
            )

    @property
    def session(self) -> str:
        """The name of the session into which its batches go."""
        return f"spark/{self.write}/{self.task}"

    @property
    def at(self) -> int:
        """The sequence of its first batch."""
        return self.number << SPARK_BATCHES_BITS

    @property
    def everyone(self) -> str:
        """The name of the highest task in all runs."""
        return f"spark/{self.write}/tasks"

    @property
    def told(self) -> str:
        """This task in words."""
        return f"task {self.task} of batch {self.number} of {self.write!r}"


def digest_of(batches: Sequence[Encoded]) -> int:
    """A number from 1 on for all of these, in their order."""
    facts = [f"{payload_crc(batch.payload)}/{batch.payload.size}/{batch.count}/{batch.partition}" for batch in batches]
    found = int.from_bytes(blake2b(",".join(facts).encode(), digest_size=8).digest(), "little")
    return 1 + found % ((1 << SPARK_DIGEST_BITS) - 1)


# --- claiming ---------------------------------------------------------------------------------------------------------
def claim(log: Log, topic: str, work: Work, digest: int) -> int:
    """Put the work's names where they belong. Conflict or Stale, if it can't be this one.

    Returns how many tasks this run must have, at least, for what is new to be written; 0: it is known to have them.
    """
    return log.thread.wait(_claim(log, topic, work, digest))


async def _claim(log: Log, topic: str, work: Work, digest: int) -> int:
    # Asked in two rounds: whoever sees us in the roll of all runs must also see us in that of ours.
    rows, _ = await asyncio.gather(_rows_known(log, topic, work), _call_roll(log, topic, work, work.run))
    confirmed, highest = await asyncio.gather(_confirm(log, topic, work, rows, digest), _highest(log, topic, work))
    if not confirmed:
        raise Conflict(f"{work.told} was written before with other rows", _AGAIN)
    return highest


async def _move(log: Log, topic: str, name: str, at: int) -> tuple[int, int]:
    return await log.twin.open_session(topic, name, at)


async def _rows_known(log: Log, topic: str, work: Work) -> int:
    """The digest that an earlier attempt left; 0: none did."""
    base = work.number << SPARK_DIGEST_BITS
    _, now = await _move(log, topic, f"{work.session}/rows", base)
    if now - base >= 1 << SPARK_DIGEST_BITS:
        raise Stale(
            f"{work.told} comes too late: batch {now >> SPARK_DIGEST_BITS} was begun",
            "the checkpoint is older than what is in the topic; go on with the newest, or begin with an empty one",
        )
    return now - base


async def _confirm(log: Log, topic: str, work: Work, known: int, digest: int) -> bool:
    """Whether ours is the digest of this work. The first one to leave it there decides, unless two are as quick."""
    if known:
        return known == digest
    base = work.number << SPARK_DIGEST_BITS
    before, now = await _move(log, topic, f"{work.session}/rows", base + digest)
    return before in (base, base + digest) and now == base + digest


async def _call_roll(log: Log, topic: str, work: Work, run: str | None) -> int:
    """Say that this task of this run is there; how many tasks there are, at least."""
    if run is None:
        return 0
    _, now = await _move(log, topic, f"{work.everyone}/{run}", work.at + work.task + 1)
    return now - work.at


async def _highest(log: Log, topic: str, work: Work) -> int:
    """How many tasks this work had in any run, if it is not known yet that this run has as many; else 0."""
    if work.run is None:
        return 0
    _, now = await _move(log, topic, work.everyone, work.at + work.task + 1)
    highest = now - work.at
    if highest >= 1 << SPARK_BATCHES_BITS:
        raise Stale(f"{work.told} comes too late: a later batch was begun", "it was completed before")
    if highest == work.task + 1 or await _call_roll(log, topic, work, work.run) >= highest:
        return 0
    return highest


def wait_for_neighbours(log: Log, topic: str, work: Work, tasks: int) -> bool:
    """Whether this run turns out to have that many tasks, within a moment."""
    deadline = time.monotonic() + SPARK_EVIDENCE_S
    while time.monotonic() < deadline:
        if log.thread.wait(_call_roll(log, topic, work, work.run)) >= tasks:
            return True
        time.sleep(_LOOK_S)
    return False


# --- sending ----------------------------------------------------------------------------------------------------------
def begin(log: Log, topic: TopicInfo, work: Work) -> Publisher:
    """A publisher for this work. Its session opens while the caller does something else."""
    ack = Ack.DURABLE if topic.replicas else Ack.ORDERED
    return log.publisher(
        topic, session=work.session, session_at=work.at, order=work.order, ack=int(ack), linger_ms=0, compression=None
    )


def send(
    log: Log, topic: TopicInfo, work: Work, batches: Sequence[Encoded], publisher: Publisher | None = None
) -> None:
    """Have these batches in the log, each once, durable where the topic has replicas.

    Another attempt of the same task may take the session away. It has the same rows, so we take it back after a while:
    whatever either of them got in stays in, and both come to an end.
    """
    check_count(batches, work)
    for tries in range(SPARK_FENCED_TRIES):
        try:
            _send(publisher or begin(log, topic, work), batches)
            return
        except (SessionFenced, UnknownSession):
            publisher = None
            time.sleep(_BACK_OFF_S * (1 << min(tries, 6)) * (0.5 + random()))
    raise SessionFenced(
        f"others took the session of {work.told} away {SPARK_FENCED_TRIES} times",
        "see whether two queries run with copies of one checkpoint",
    )


def _send(publisher: Publisher, batches: Sequence[Encoded]) -> None:
    with publisher:
        futures = [
            publisher.publish_encoded(batch.payload, batch.count, partition=batch.partition, timeout=DELIVERY_TIMEOUT_S)
            for batch in batches
        ]
        publisher.flush()
        for future in futures:
            future.result()


def check_count(batches: Sequence[Encoded], work: Work) -> None:
    """BadValue, if there are more batches than can be recognised when they come again."""
    if len(batches) > SESSION_WINDOW:
        raise BadValue(
            f"{work.told} has {len(batches)} batches, and at most {SESSION_WINDOW} can be recognised again",
            "repartition the frame into more tasks, or, for a topic with many partitions, by its key",
        )
