"""Publishers that stage batches in a topic of order 0 or 1, and others that publish these by reference.

Staged and acked batches go into a pool. A publisher by reference takes its next batch from the pool and keeps it for
the stream, whichever process sends it. It sends the batch by reference, or with its bytes after a broker has reported
that the staged batch is gone. Sometimes it names a wrong batch on purpose, and has to be refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from embarcadero.client.batches import OutBatch
from embarcadero.errors import BadReference
from embarcadero.types import StagedBatch
from embarcadero_proof.sim.history import ByReference
from embarcadero_proof.sim.tables import digest_of
from embarcadero_proof.sim.workload import Content, PublisherProcess, Stream

if TYPE_CHECKING:
    from embarcadero_proof.sim.world import World

_WRONG_RATE: Final = 0.02
_PROMPT_RATE: Final = 0.3


class Staged(NamedTuple):
    """A batch that is staged and acked."""

    batch: StagedBatch
    content: Content


class ReferencingStream(Stream):
    """A stream of staged batches, in the order in which it took them from the pool."""

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream.plan, stream._seed, stream._chunk_bytes)
        self.taken: dict[int, Staged] = {}
        self.gone: set[int] = set()  # batches that must carry their bytes, since the staged ones are gone
        self.own: set[int] = set()  # batches that were never staged, whichever process sends them

    def take(self, number: int, staged: Staged) -> None:
        """Use a staged batch as batch `number` of this stream."""
        self.taken[number] = staged
        content = staged.content
        partition = content.partition % self.plan.topic.partitions
        self._contents[number] = content._replace(partition=partition, digest=digest_of(content.payload))


class StagingProcess(PublisherProcess):
    """Stages batches that others publish."""

    def _settled(self, batch: OutBatch) -> None:
        position = batch.position
        if position is not None:
            staged = StagedBatch(
                self.stream.plan.topic.id, position.lane, position.index, batch.size, batch.count, batch.crc
            )
            self.world.staged.append(Staged(staged, self.stream.content(batch.token)))
            if self.rng.random() < _PROMPT_RATE:
                self.world.queue.after(self.rng.randrange(1, 2_000), self._publish_soon)

    def _publish_soon(self) -> None:
        """Have a batch published by reference as soon as it is acked: its disks may be behind."""
        waiting = [each for each in self.world.live_publishers() if isinstance(each, ReferencingProcess)]
        if waiting:
            process = self.rng.choice(waiting)
            process.submit(process.publish_one)


class ReferencingProcess(PublisherProcess):
    """Publishes staged batches by reference. After healing, when none remains, it sends batches of its own."""

    stream: ReferencingStream

    def _next_content(self, number: int) -> Content | None:
        if number not in self.stream.taken and number not in self.stream.own:
            if self.world.staged:
                self.stream.take(number, self.world.staged.pop(0))
            elif self.world.healed:
                self.stream.own.add(number)
            else:
                return None
        return self.stream.content(number)

    def _add(self, number: int, content: Content) -> OutBatch:
        taken = self.stream.taken.get(number)
        if taken is None or number in self.stream.gone:
            return super()._add(number, content)
        named, others = taken.batch, [other for other in self.stream.taken.values() if other is not taken]
        right = not (others and self.rng.random() < _WRONG_RATE)
        if not right:  # it names another batch than its own
            another = self.rng.choice(others).batch
            named = replace(named, lane=another.lane, index=another.index)
        self.world.seen(ByReference(
            at=self.world.queue.now_us, process=self.name, stream=self.stream.plan.name, number=number,
            lane=named.lane, index=named.index, right=right))  # fmt: skip
        return self._publisher.add_reference(named, content.partition, self.clock.now_us())

    def publish_one(self) -> None:
        """Publish the next batch now, if there is one and all earlier batches were sent."""
        if not (self.finished or self._closing or self._publisher.failed):
            self._send_next()

    def _settled(self, batch: OutBatch) -> None:
        named = batch.reference
        if isinstance(batch.error, BadReference):
            self.stream.gone.add(batch.token)
        elif named is not None and batch.position is not None:
            digest = digest_of(self.stream.content(batch.token).payload, named.lane)
            self.world.disks.see_copies(self.name, named.lane, named.index, digest)


def stream_of(stream: Stream) -> Stream:
    """Return the same stream, as publishers by reference need it."""
    return ReferencingStream(stream) if stream.plan.by_reference else stream


def publisher_of(world: World, stream: Stream) -> PublisherProcess:
    """Return a process that writes a stream as its plan requires."""
    if isinstance(stream, ReferencingStream):
        return ReferencingProcess(world, stream)
    return (StagingProcess if stream.plan.staging else PublisherProcess)(world, stream)
