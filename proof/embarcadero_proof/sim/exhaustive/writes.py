"""Scopes "commit", "sweep" and "routed": the commit of a write, in all interleavings.

These parts run here: staging/commit.py (`commit`, `complete`), `OpenWrites` and `look_after` of staging/sweep.py. The
target is a list of entries, of which a prefix is durable; its named sessions follow from that list. The staging topic
is a list of facts.
- "commit": two committers of epoch 0 with different rows; the first may die at any time, and all that is not durable
  may be lost once.
- "sweep": a committer that may die at any time, the sweep, then the commit of epoch 1.
- "routed": as "commit", but the batches go into two targets, and the decision is in the log of a third.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Final, NamedTuple

from embarcadero.client.api.aio_calls import HeldName
from embarcadero.env import SilentJournal
from embarcadero.errors import SessionFenced, StagedGone, invariant
from embarcadero.staging.commit import Committed, Ledger, Prepared, commit
from embarcadero.staging.manifest import (
    Begun,
    Decision,
    Fact,
    InlineBatch,
    Manifest,
    ManifestPart,
    Target,
    first_sequence,
)
from embarcadero.staging.sweep import OpenWrites, look_after
from embarcadero_proof.sim.exhaustive.actor import Lines, Play, Stage
from embarcadero_proof.sim.exhaustive.explore import Facts, Scope

_WRITE: Final = "w"
_STEP_US: Final = 100_000_000  # between two facts: longer than the sweep's margin
_NOW_US: Final = 40 * _STEP_US  # the sweep finds every manifest old enough
_TRIES: Final = 2


def _manifest(name: str, epoch: int, *batches: int) -> Manifest:
    """Build a manifest with so many batches for each target."""
    parts = [
        ManifestPart(
            inline=[InlineBatch(f"{name}{target}{number}".encode(), 1, 0) for number in range(count)], target=target
        )
        for target, count in enumerate(batches)
    ]
    return Manifest(_WRITE, epoch, [Target(str(target), 1, 0) for target in range(len(batches))], parts)


class _Choices(NamedTuple):
    """The manifests that may be committed, and the sessions of their targets."""

    targets: tuple[str, ...]
    first: Manifest
    second: Manifest
    next: Manifest

    def of(self, digest: int) -> Manifest | None:
        """Return the manifest with a digest."""
        return {each.digest: each for each in (self.first, self.second, self.next)}.get(digest)

    def rows(self, manifest: Manifest) -> dict[str, list[str]]:
        """Return the rows of a manifest for each target."""
        return {target: _rows(manifest, number) for number, target in enumerate(self.targets)}


def _rows(manifest: Manifest, target: int) -> list[str]:
    return [batch.payload.decode() for batch in manifest.batches(target) if isinstance(batch, InlineBatch)]


_ONE: Final = _Choices(("data",), _manifest("a", 0, 2), _manifest("b", 0, 2), _manifest("c", 1, 1))
_TWO: Final = _Choices(("one", "two"), _manifest("a", 0, 1, 1), _manifest("b", 0, 1, 1), _manifest("c", 1, 1))


class _Entry(NamedTuple):
    """One entry of the target: a moved session (`row` is empty), or a batch."""

    name: str
    session: int
    expected: int  # afterwards
    row: str = ""


class _World(NamedTuple):
    """Target and staging topic, and the durable part of the target."""

    entries: tuple[_Entry, ...] = ()
    durable: int = 0
    facts: tuple[tuple[int, str, int, int], ...] = ()  # time, kind, epoch, digest; durable when they are appended
    trimmed_us: int = 0
    sessions: int = 0  # handles given out; they are never reused


def _held(world: _World, name: str) -> HeldName:
    """Return the session that holds a name."""
    found = [entry for entry in world.entries if entry.name == name]
    return HeldName(found[-1].session, found[-1].expected) if found else HeldName(-1, 0)


def _opened(world: _World, name: str, at: int, holder: int | None) -> tuple[_World, HeldName]:
    held = _held(world, name)
    if holder is not None and held.session != holder:
        return world, held
    entry = _Entry(name, world.sessions, max(held.expected, at))
    world = world._replace(entries=(*world.entries, entry), sessions=world.sessions + 1)
    return world, HeldName(entry.session, entry.expected)


class _ModelLedger:
    """The Ledger of an actor: each call is one step."""

    def __init__(self, stage: Stage, choices: _Choices, known: Any) -> None:
        self._stage, self._known, self._gone = stage, known, False  # `known`: other state of the actor
        self._choices = choices
        self._calls = 0  # of publish and finish

    async def append(self, fact: Fact) -> None:
        digest = fact.digest if isinstance(fact, Manifest) else 0
        self._stage.call("append", type(fact).__name__, fact.epoch, digest)

    async def prepare(self, manifest: Manifest, run: str | None) -> Prepared:
        invariant(run is None, "no runs here")
        decided, data = await self.held(manifest.write)
        staged = self._stage.call("staged", manifest.epoch)
        await self.append(manifest)
        self._gone = not staged
        return Prepared(0, decided, data, None if staged else StagedGone("the staged batches are gone", ""))

    async def held(self, write: str) -> tuple[HeldName, HeldName]:
        decided = self._stage.call("held", "decided")
        return decided, self._stage.call("held", "data")

    async def decide(self, write: str, decision: Decision, holder: int) -> HeldName:
        found: HeldName = self._stage.call("open", "decided", decision.number, holder)
        return found

    async def settle(self) -> None:
        self._stage.call("sync")

    async def find(self, write: str, decision: Decision) -> Manifest | None:
        digest = self._stage.call("find", decision.epoch, decision.digest)
        return self._choices.of(digest)

    async def publish(self, manifest: Manifest) -> None:
        for target, rows in self._choices.rows(manifest).items():
            self._publish(manifest, target, rows)

    def _publish(self, manifest: Manifest, target: str, rows: list[str]) -> None:
        first = first_sequence(manifest.epoch)
        for tries in range(_TRIES):
            self._calls += not tries
            self._stage.remembers("publish", self._calls, self._known, manifest.digest, tries, self._gone)
            session, expected = self._stage.call("open", target, first, None)
            if expected - first >= first_sequence(1):
                return
            waiting = range(expected - first, len(rows))
            stored = all(self._stage.call("store", target, session, first + number, rows[number]) for number in waiting)
            if stored and self._stage.call("sync", target, session, first + len(rows)):
                return
        raise SessionFenced("the session was taken over repeatedly", "")

    async def finish(self, write: str, epoch: int) -> None:
        self._calls += 1
        self._stage.remembers("finish", self._calls, self._known, epoch, self._gone)
        self._stage.call("open", "data", first_sequence(epoch + 1), None)


class _Writes:
    """The model of a scope, and its actors."""

    def __init__(self, choices: _Choices) -> None:
        self._choices = choices

    def begin(self, lines: Lines) -> Any:
        """Start with both committers staged and nothing decided."""
        return _World(facts=((_STEP_US, "Begun", 0, 0),))

    def call(self, world: _World, actor: str, asked: tuple[Any, ...]) -> tuple[_World, Any]:
        """Call the target, the staging topic, or the power."""
        what, *given = asked
        if what == "held":
            return world, _held(world, given[0])
        if what == "open":
            return _opened(world, *given)
        if what == "store":
            target, session, sequence, row = given
            if _held(world, target) != (session, sequence):
                return world, False
            return world._replace(entries=(*world.entries, _Entry(target, session, sequence + 1, row))), True
        if what == "sync":  # only existing entries become durable
            there = not given or _held(world, given[0]) == tuple(given[1:])
            return (world._replace(durable=len(world.entries)), True) if there else (world, False)
        if what == "lose":
            return world._replace(entries=world.entries[: world.durable]), None
        return self._staging(world, what, given)

    def _staging(self, world: _World, what: str, given: list[Any]) -> tuple[_World, Any]:
        if what == "append":
            kind, epoch, digest = given
            at_us = (1 + len(world.facts)) * _STEP_US + world.trimmed_us
            return world._replace(facts=(*world.facts, (at_us, kind, epoch, digest))), None
        if what == "staged":  # whether the batches staged since the epoch began exist
            return world, any(kind == "Begun" and epoch == given[0] for _, kind, epoch, _ in world.facts)
        if what == "find":
            found = [fact for fact in world.facts if fact[1] == "Manifest" and fact[2:4] == tuple(given)]
            return world, found[0][3] if found else 0
        if what == "facts":
            return world, world.facts
        kept = tuple(fact for fact in world.facts if fact[0] >= given[0])
        return world._replace(facts=kept, trimmed_us=max(world.trimmed_us, given[0])), None

    def first(self, stage: Stage) -> None:
        """Commit epoch 0."""
        _run(self._commit(stage, self._choices.first))

    def second(self, stage: Stage) -> None:
        """Commit epoch 0 with other rows."""
        _run(self._commit(stage, self._choices.second))

    def next(self, stage: Stage) -> None:
        """Stage and commit epoch 1, after the first committer has ended or died and the sweep is over."""
        stage.wait_for("alone")
        _run(self._commit(stage, self._choices.next))

    async def _commit(self, stage: Stage, manifest: Manifest) -> None:
        ledger: Ledger = _ModelLedger(stage, self._choices, manifest.epoch)
        if manifest.epoch:
            await ledger.append(Begun(_WRITE, manifest.epoch))
        try:
            committed = await commit(ledger, manifest)
        except SessionFenced:
            return  # two committers that keep taking over the session from each other: a real one waits longer
        stage.report("done" if committed is Committed.DONE else "committed", manifest.epoch)

    def sweep(self, stage: Stage) -> None:
        """Read the facts, complete decided writes, and trim facts that no write needs."""
        writes = OpenWrites()
        facts: tuple[tuple[int, str, int, int], ...] = stage.call("facts")
        for at_us, _, epoch, digest in facts:
            manifest = self._choices.of(digest)
            writes.take(Begun(_WRITE, epoch) if manifest is None else manifest, at_us)
        now_us = max((fact[0] for fact in facts), default=0) + _NOW_US // 40
        if _run(look_after(_ModelLedger(stage, self._choices, facts), writes, now_us, SilentJournal())):
            stage.call("sync")
        stage.call("trim", writes.horizon_us(now_us))

    def power(self, stage: Stage) -> None:
        """Lose all that is not durable."""
        stage.call("lose")
        stage.report("lost")

    def check(self, world: _World, facts: Facts) -> str:
        """An epoch has the first rows of one manifest, in each target; a committed epoch has all of them."""
        first, second, following = self._choices.first, self._choices.second, self._choices.next
        for epoch, manifests in ((0, (first, second)), (1, (following,))):
            low, high = first_sequence(epoch), first_sequence(epoch + 1)
            rows = {
                target: [row for name, _, at, row in world.entries if row and name == target and low < at <= high]
                for target in self._choices.targets
            }
            wholes = [self._choices.rows(manifest) for manifest in manifests]
            if not any(all(rows[name] == whole[name][: len(rows[name])] for name in rows) for whole in wholes):
                return f"epoch {epoch} has the rows {rows}"
            passed_over = _held(world, "decided").expected >= Decision(epoch + 1, 0).number  # it was never decided
            reported = ("committed", epoch) in facts or (("done", epoch) in facts and not passed_over)
            if reported and rows not in wholes:
                return f"epoch {epoch} was committed, and has the rows {rows}"
        return ""


def _run(steps: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that never really waits: a step of the model stops it from inside, or it ends."""
    try:
        steps.send(None)
    except StopIteration as ended:
        return ended.value
    finally:
        steps.close()
    raise AssertionError("a model of the ledger does not wait")


def commit_scope() -> Scope:
    """Two committers of epoch 0, the first of which may die at any time, and a loss of memory."""
    return _committers("two committers, a loss of memory", _ONE)


def routed_scope() -> Scope:
    """The same, where each committer has batches for two targets."""
    return _committers("two committers, two targets, a loss of memory", _TWO)


def _committers(name: str, choices: _Choices) -> Scope:
    world = _Writes(choices)
    plays: dict[str, Play] = {"first": world.first, "second": world.second, "power": world.power}
    return Scope(name, plays, world.begin, world.call, world.check, world.check, mortal=("first",))


def sweep_scope() -> Scope:
    """The committer of epoch 0 may die at any time, the sweep runs at any time; then another one commits epoch 1."""
    world = _Writes(_ONE)
    plays: dict[str, Play] = {"first": world.first, "sweep": world.sweep, "next": world.next}
    return Scope(
        "two epochs, a sweep",
        plays,
        world.begin,
        world.call,
        world.check,
        world.check,
        mortal=("first",),
        ready=lambda _name, ended: {"first", "sweep"} <= ended,
    )
