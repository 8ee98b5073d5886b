"""The facts of jobs that write into one topic, in a hidden topic beside it: what a job is, its steps, which are done.

A job is a named write of many epochs, one a step. Three kinds of facts describe it:

    begun       what the job does: its source, its range. Epoch 0.
    planned     what the step of an epoch reads, recorded before the step runs.
    done        the step of an epoch is in the topic, as a whole and durable.

Theory of operation. The hidden topic has one total order, and of each fact the first record counts: a process appends
its own version, waits until it is durable, reads the topic, and goes on with the version that came first. So all
processes of a job, now and after any crash, run the same steps over the same records, and the commit protocol
(commit.py) has each step in the target once. A job's frontier is in its newest plan, and that plan counts only once its
epoch is done: frontier and output move together.

The ledger keeps itself small. A checkpoint has all facts below a seq that are still needed; once it is durable, the
topic is trimmed below that seq. Of several checkpoints the one with the highest seq counts: no trim went beyond it.
"""

from __future__ import annotations

import time
from typing import Final, NamedTuple

import msgspec

from embarcadero.client.api.sync_log import Log
from embarcadero.client.results import TopicInfo
from embarcadero.errors import Corrupt, TopicExists, Trimmed, UnknownTopic
from embarcadero.staging.ledger import ack_of
from embarcadero.types import Order, jobs_topic

BEGUN: Final = "begun"
PLANNED: Final = "planned"
DONE: Final = "done"

CHECKPOINT_RECORDS: Final = 500
"""So many records of the ledger are replaced with a checkpoint."""

_TRIES: Final = 5  # a checkpoint may trim what is being read
_SECOND: Final = 1_000_000


class JobFact(msgspec.Struct, frozen=True, tag="fact"):
    """One fact of a job. `at_us` is the time of the process that recorded it, in microseconds since 1970."""

    job: str
    kind: str
    epoch: int
    body: bytes
    at_us: int


class JobCheckpoint(msgspec.Struct, frozen=True, tag="checkpoint"):
    """All facts that are recorded below seq `below` and still needed."""

    below: int
    facts: list[JobFact]


_DECODER: Final = msgspec.msgpack.Decoder(JobFact | JobCheckpoint)


class _Key(NamedTuple):
    job: str
    kind: str
    epoch: int


class JobLedger:
    """The facts of all jobs that write into one target topic, as one process has read them."""

    def __init__(self, log: Log, target: TopicInfo) -> None:
        self._log, self._target = log, target
        self._name = jobs_topic(target.id)
        self._next = 0
        self._facts: dict[_Key, JobFact] = {}
        self._newest: dict[str, JobFact] = {}  # by job: the newest epoch that is done

    # --- what is recorded ---------------------------------------------------------------------------------------------
    def get(self, job: str, kind: str, epoch: int = 0) -> JobFact | None:
        """Return a fact, if it was recorded before the last `refresh`."""
        return self._facts.get(_Key(job, kind, epoch))

    def newest_done(self, job: str) -> JobFact | None:
        """Return the newest epoch of a job that is done; None: no epoch is."""
        return self._newest.get(job)

    def refresh(self) -> None:
        """Read what came since the last time. Without a ledger there are no facts."""
        for _ in range(_TRIES):
            try:
                self._read()
                return
            except UnknownTopic:
                return
            except Trimmed:  # by a checkpoint that came meanwhile: it is read in the next round
                continue
        raise Corrupt(f"topic {self._name!r} is trimmed while it is read", "do not trim topics of the cluster by hand")

    def _read(self) -> None:
        tail = self._log.tail(self._name)
        if tail.start_seq > self._next:  # the checkpoint that allowed the trim is above
            self._next, self._facts, self._newest = tail.start_seq, {}, {}
        if tail.seq <= self._next:
            return
        table = self._log.read(self._name, self._next, tail.seq)
        seqs, values = table.column("_seq").to_pylist(), table.column("value").to_pylist()
        found = [(seq, _decode(value, self._name)) for seq, value in zip(seqs, values, strict=True)]
        checkpoints = [each for _, each in found if isinstance(each, JobCheckpoint)]
        newest = max(checkpoints, key=lambda each: each.below, default=None)
        if newest is not None and not self._facts:
            for fact in newest.facts:
                self._keep(fact)
            found = [(seq, each) for seq, each in found if seq >= newest.below]
        for _, each in found:
            if isinstance(each, JobFact):
                self._keep(each)
        self._next = tail.seq

    def _keep(self, fact: JobFact) -> None:
        """The first record of a fact counts."""
        kept = self._facts.setdefault(_Key(fact.job, fact.kind, fact.epoch), fact)
        newest = self._newest.get(fact.job)
        if fact.kind == DONE and (newest is None or newest.epoch < fact.epoch):
            self._newest[fact.job] = kept

    # --- recording ----------------------------------------------------------------------------------------------------
    def settle(self, job: str, kind: str, body: bytes, epoch: int = 0) -> JobFact:
        """Record a fact unless it is recorded. Return the one that counts, which another process may have recorded."""
        self.refresh()
        if (known := self.get(job, kind, epoch)) is not None:
            return known
        self._append(JobFact(job, kind, epoch, body, time.time_ns() // 1000))
        self.refresh()
        settled = self.get(job, kind, epoch)
        if settled is None:
            raise Corrupt(
                f"a fact of job {job!r} is not in topic {self._name!r} although it was acked",
                "look for lost records: embarcadero verify",
            )
        return settled

    def _append(self, record: JobFact | JobCheckpoint) -> None:
        with self._log.publisher(self._open(), ack=ack_of(self._target), linger_ms=0) as publisher:
            publisher.send(msgspec.msgpack.encode(record)).result()

    def _open(self) -> TopicInfo:
        """The ledger's topic; created, with the target's replicas, if it does not exist."""
        try:
            return self._log.describe(self._name)
        except UnknownTopic:
            target = self._target
            try:
                return self._log.create_topic(
                    self._name,
                    order=int(Order.TOTAL),
                    partitions=1,
                    replicas=target.replicas,
                    durable_on=target.durable_on,
                    retention_bytes=0,
                    retention_s=0,
                )
            except TopicExists:
                return self._log.describe(self._name)

    # --- staying small ------------------------------------------------------------------------------------------------
    def checkpoint(self, records: int = CHECKPOINT_RECORDS) -> None:
        """Replace the ledger's records with a checkpoint if there are more than so many."""
        self.refresh()
        try:
            start = self._log.tail(self._name).start_seq
        except UnknownTopic:
            return
        if self._next - start <= records:
            return
        below = self._next
        self._append(JobCheckpoint(below, self._needed()))
        self._log.trim(self._name, before_seq=below)

    def _needed(self) -> list[JobFact]:
        """Facts that a process may still ask for: not those of epochs before the newest one that is done."""
        newest = {job: fact.epoch for job, fact in self._newest.items()}
        return [fact for fact in self._facts.values() if fact.kind == BEGUN or fact.epoch >= newest.get(fact.job, 0)]


def age_s(fact: JobFact) -> float:
    """How long ago a fact was recorded, by the clocks of the two processes."""
    return (time.time_ns() // 1000 - fact.at_us) / _SECOND


def _decode(value: bytes, topic: str) -> JobFact | JobCheckpoint:
    try:
        record: JobFact | JobCheckpoint = _DECODER.decode(value)
        return record
    except msgspec.DecodeError as error:
        raise Corrupt(
            f"topic {topic!r} has a record that is no fact of a job: {error}",
            "a later version of Embarcadero wrote it, or another program: use that version, or delete the topic",
        ) from error
