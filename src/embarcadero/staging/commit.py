"""Commit one epoch of a write: stage, decide, publish, finish. Pure: all effects go through a Ledger.

Theory of operation. Tasks stage batches; no reader of the target sees them. The committer

1. appends the manifest, which names all staged batches of the epoch, and waits until it is durable;
2. decides: it moves `decided` to (epoch, digest of the manifest) by compare-and-move, and waits until the move is
   durable. Of several committers of one epoch exactly one moves it. All others drop their own manifest and continue
   with the decided one;
3. publishes the batches of that manifest in the session `data`, from the first sequence of the epoch on. The sequencer
   stores each sequence once, so several committers may do this, one after another or at the same time;
4. finishes: it moves `data` to the first sequence of the next epoch. The epoch is then done.

A committer that finds a decision also waits until the decision is durable. Otherwise a loss of memory could take the
decision between two batches, and another committer could decide on other rows.

A committer that dies before step 2 leaves nothing visible to a reader. If it dies later, the decision stays, and the
next committer of the write, or the sweep, completes it. An epoch is decided only when the last decided epoch is done,
so `data` never passes an incomplete epoch.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, Protocol

from embarcadero.client.api.aio_calls import HeldName
from embarcadero.errors import EmbarcaderoError, StagedGone, Stale
from embarcadero.staging.manifest import Decision, Dropped, Fact, Manifest, first_sequence


class Prepared(NamedTuple):
    """State of a write, as read while its manifest was appended."""

    before: int  # the number that this run had before; 0: none
    decided: HeldName
    data: HeldName
    gone: StagedGone | None = None  # set if some staged batches can't be read


class Ledger(Protocol):
    """The target topic and its staging topic, as a committer uses them."""

    async def append(self, fact: Fact) -> None:
        """Append a fact to the staging topic; return when it is durable."""

    async def prepare(self, manifest: Manifest, run: str | None) -> Prepared:
        """Append the manifest and return when it is durable.

        At the same time, in any order: check that all staged batches can still be read, record that the run commits
        this epoch, look at `decided` and `data`.
        """

    async def held(self, write: str) -> tuple[HeldName, HeldName]:
        """Look at `decided` and `data`."""

    async def decide(self, write: str, decision: Decision, holder: int) -> HeldName:
        """Move `decided` to a decision if `holder` still holds the name; return its current holder."""

    async def settle(self) -> None:
        """Wait until everything ordered in the target by now is durable, or lost."""

    async def find(self, write: str, decision: Decision) -> Manifest | None:
        """Look in the staging topic for the manifest of a decision."""

    async def publish(self, manifest: Manifest) -> None:
        """Publish all batches that are not yet published; return when they are durable."""

    async def finish(self, write: str, epoch: int) -> None:
        """Move `data` to the first sequence of the next epoch."""


class Committed(Enum):
    """Outcome of a commit."""

    MINE = "the rows of this commit are in the topic"
    EARLIER = "the epoch was decided before with other rows, which are in the topic"
    DONE = "the epoch was complete before"


async def commit(ledger: Ledger, manifest: Manifest, run: str | None = None) -> Committed:
    """Put one epoch into the topic, as a whole and once, whatever happened to earlier attempts.

    `run` names a run of a driver that commits epoch after epoch. Raises Stale if this run has committed an earlier
    epoch, and another driver has decided this one: then two drivers use copies of one checkpoint.
    """
    manifest.check()
    mine = Decision(manifest.epoch, manifest.digest)
    before, decided, data, gone = await ledger.prepare(manifest, run)
    looked = False  # whether the names were read again after `gone` was known
    while True:
        newest = Decision.of(decided.expected)
        if data.expected >= first_sequence(mine.epoch + 1) or newest.epoch > mine.epoch:
            _check_run(manifest, before)
            return Committed.DONE
        if newest.digest and not is_done(newest, data):
            if newest.epoch == mine.epoch and newest != mine:
                _check_run(manifest, before)
            if await _complete(ledger, decided, manifest) and newest.epoch == mine.epoch:
                return Committed.MINE if newest == mine else Committed.EARLIER
            decided, data = await ledger.held(manifest.write)
            continue
        if gone is None:
            held = await ledger.decide(manifest.write, mine, decided.session)
            decided, data = (held, data) if held.expected == mine.number else await ledger.held(manifest.write)
        elif looked:
            raise gone
        else:  # the sweep may have removed staged batches of an epoch that is done
            decided, data = await ledger.held(manifest.write)
            looked = True


def _check_run(manifest: Manifest, before: int) -> None:
    if 0 < before <= manifest.epoch:
        raise Stale(
            f"epoch {manifest.epoch} of write {manifest.write!r} was committed by another run, and this run has "
            f"committed epoch {before - 1}: two queries use copies of one checkpoint",
            "stop one of them; give each query a checkpoint of its own",
        )


def is_done(newest: Decision, data: HeldName) -> bool:
    """Whether all batches of a decision are published."""
    return data.expected >= first_sequence(newest.epoch + 1)


async def complete(ledger: Ledger, write: str) -> Decision | None:
    """Complete the newest decision of a write if it is not done. Return it; None if nothing was decided."""
    while True:
        decided, data = await ledger.held(write)
        newest = Decision.of(decided.expected)
        if not newest.digest:
            return None
        if is_done(newest, data) or await _complete(ledger, decided, None, write):
            return newest


async def _complete(ledger: Ledger, decided: HeldName, manifest: Manifest | None, write: str = "") -> bool:
    """Publish the decided manifest, then finish the epoch.

    Return False if the decision was lost or replaced before it was durable. `manifest` is used if it is the decided
    one.
    """
    decision, write = Decision.of(decided.expected), write if manifest is None else manifest.write
    wanted = (decision.epoch, decision.digest)
    if manifest is None or (manifest.epoch, manifest.digest) != wanted:
        manifest = await ledger.find(write, decision)
    if manifest is None:
        _, data = await ledger.held(write)
        if is_done(decision, data):
            return True  # another committer was faster, and the sweep has removed the manifest
        raise StagedGone(
            f"epoch {decision.epoch} of write {write!r} was decided, but the list of its batches is gone",
            "the staging topic was deleted or trimmed by hand; begin another write or checkpoint",
        )
    await ledger.settle()
    again, _ = await ledger.held(write)
    if again.session != decided.session:
        return False
    await ledger.publish(manifest)
    await ledger.finish(write, decision.epoch)
    return True


async def drop(ledger: Ledger, write: str, epoch: int, attempt: str = "") -> None:
    """Inform the sweep that an attempt has failed. A decided manifest is completed all the same. Never raises."""
    try:
        await ledger.append(Dropped(write, epoch, attempt))
    except (EmbarcaderoError, TimeoutError):
        return  # the sweep forgets a write without facts for STAGED_SILENT_S
