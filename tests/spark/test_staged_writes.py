"""A write is in its topic as a whole or not at all: tasks and commits on a real cluster that die at every moment.

Without Spark. Includes the sweep that cleans up after them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import embarcadero as emb
from embarcadero.client.results import TopicInfo
from embarcadero.env import SilentJournal
from embarcadero.errors import (
    BadReference,
    BadValue,
    EmbarcaderoError,
    SessionFenced,
    StagedGone,
    Stale,
    TopicReplaced,
    UnknownTopic,
)
from embarcadero.limits import STAGED_FENCED_TRIES
from embarcadero.spark import sink
from embarcadero.spark.jobs import JobLedger
from embarcadero.spark.processes import shared_log
from embarcadero.spark.shape import WriteOptions, shape_of
from embarcadero.spark.sink import StagedMessage, TaskWriter, WriteWork
from embarcadero.staging import ledger
from embarcadero.staging import manifest as manifests
from embarcadero.staging import sweep as sweeping
from embarcadero.staging.commit import Committed, commit, complete
from embarcadero.staging.ledger import Publication, TopicLedger
from embarcadero.staging.manifest import Decision, InlineBatch, Manifest, ManifestPart, Target, data_name
from embarcadero.staging.sweep import COMPLETE_AFTER_S, SILENT_S, StagingSweep, StagingSweeper
from embarcadero.types import jobs_topic, staging_topic

SCHEMA = pa.schema([("id", pa.int64()), ("text", pa.string())])
LITTLE, MUCH = "x" * 50, "x" * 5_000  # a task's message to the driver, and its staged batches
MOMENTS = ["append", "decide", "settle", "publish", "half", "finish"]


@pytest.fixture(params=[2, 5], ids=["order2", "order5"])
def name(request: pytest.FixtureRequest, log: emb.Log, topic: str) -> str:
    """A topic of both orders that know sessions."""
    log.create_topic(topic, order=request.param, replicas=1, partitions=2, schema=SCHEMA)
    return topic


@pytest.fixture
def strong(log: emb.Log, topic: str) -> str:
    """A topic of order 5."""
    log.create_topic(topic, order=5, replicas=1, schema=SCHEMA)
    return topic


def writer(log: emb.Log, name: str, batch_bytes: int = 1000) -> TaskWriter:
    """A writer of small batches."""
    options = WriteOptions(brokers=log.address, topic=name, batch_bytes=batch_bytes)
    return TaskWriter(options, shape_of(log.describe(name), SCHEMA, options, 0))


def rows(*ids: int, text: str = LITTLE) -> Iterator[pa.RecordBatch]:
    """Rows in two Arrow batches."""
    whole = pa.RecordBatch.from_pydict({"id": list(ids), "text": [text] * len(ids)})
    yield whole.slice(0, len(ids) // 3)
    yield whole.slice(len(ids) // 3)


def staged(
    log: emb.Log, name: str, *tasks: range, epoch: int = 0, run: str | None = "run", text: str = LITTLE
) -> list[StagedMessage]:
    """The messages of tasks with these ids to the driver."""
    task, work = writer(log, name, 20 * len(text)), WriteWork("q", epoch, run or "alone", run)
    return [StagedMessage(task.write(work, number, rows(*ids, text=text))) for number, ids in enumerate(tasks)]


def publish(log: emb.Log, name: str, messages: list[StagedMessage]) -> None:
    """The commit of a driver."""
    sink.publish(writer(log, name), messages)


def stored(log: emb.Log, name: str) -> list[int]:
    """The ids in the topic, in their order."""
    return list(log.read(name).column("id").to_pylist()) if log.tail(name).seq else []


def dies(monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """End the next commit at a step ("half": after half of its batches), as if its process was killed."""
    step = "publish" if moment == "half" else moment
    whole = getattr(TopicLedger, step)

    async def dead(ledger: TopicLedger, *given: Any) -> None:
        monkeypatch.setattr(TopicLedger, step, whole)
        if moment == "half":
            made: Manifest = given[0]
            batches = [*made.batches()][: made.count // 2]
            monkeypatch.setattr(Manifest, "batches", lambda _, target: iter(batches))
            await whole(ledger, made)
            monkeypatch.undo()
        raise RuntimeError("killed")

    monkeypatch.setattr(TopicLedger, step, dead)


def sweep(log: emb.Log, *, complete_after_s: float = 0.0, trims: bool = False, silent_s: float = SILENT_S) -> None:
    """Two rounds of the sweep, which treats writes of this age as old."""

    async def rounds() -> None:
        sweeper = StagingSweeper(log.twin, SilentJournal())
        await sweeper.round()
        await sweeper.round()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweeping, "COMPLETE_AFTER_S", complete_after_s)
        patch.setattr(sweeping, "SILENT_S", silent_s)
        patch.setattr(sweeping, "_MARGIN_S", 0.0 if trims else 60.0)
        log.thread.wait(rounds())


# --- whole, or not at all ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("text", [LITTLE, MUCH], ids=["little", "much"])
def test_rows_are_visible_when_the_driver_commits_them(log: emb.Log, name: str, text: str) -> None:
    """Before that none are; then all are, each once, those of a task in their order."""
    messages = staged(log, name, range(100), range(100, 300), range(0), text=text)
    parts = [[bool(part.references) for part in each.staged.parts] for each in messages]
    assert parts == [[text is MUCH], [text is MUCH], []]
    assert stored(log, name) == []
    publish(log, name, messages)

    found = stored(log, name)
    assert sorted(found) == list(range(300))
    assert [each for each in found if each < 100] == list(range(100))
    publish(log, name, messages)
    assert len(stored(log, name)) == 300


@pytest.mark.parametrize("text", [LITTLE, MUCH], ids=["little", "much"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_commit_that_died_is_completed_or_leaves_nothing(
    log: emb.Log, strong: str, monkeypatch: pytest.MonkeyPatch, moment: str, text: str
) -> None:
    """The driver starts again with other rows: before the decision they count, after it the decided ones."""
    dies(monkeypatch, moment)
    with pytest.raises(RuntimeError, match="killed"):
        publish(log, strong, staged(log, strong, range(200), run="first", text=text))
    decided = moment not in ("append", "decide")
    assert bool(stored(log, strong)) == (moment in ("half", "finish"))
    publish(log, strong, staged(log, strong, range(500, 600), run="second", text=text))

    assert stored(log, strong) == list(range(200)) if decided else list(range(500, 600))
    publish(log, strong, staged(log, strong, range(900, 901), epoch=1, run="second"))
    assert stored(log, strong)[-1] == 900


def test_a_failed_write_is_never_visible(log: emb.Log, strong: str) -> None:
    """Its tasks staged, and Spark gave it up: another epoch comes, and the sweep gives up the rest."""
    messages = staged(log, strong, range(200), text=MUCH)
    sink.give_up(writer(log, strong), messages)
    sweep(log, trims=True)
    publish(log, strong, staged(log, strong, range(5), epoch=1))
    assert stored(log, strong) == list(range(5))
    again = [StagedMessage(replace(each.staged, work=replace(each.staged.work, write="other"))) for each in messages]
    with pytest.raises(StagedGone, match="nothing of the write is visible"):
        publish(log, strong, again)
    assert stored(log, strong) == list(range(5))


def test_an_epoch_without_rows_needs_no_commit(log: emb.Log, strong: str) -> None:
    """It may be run again with rows."""
    publish(log, strong, staged(log, strong, range(0)))
    assert log.tail(strong).index == 0
    publish(log, strong, staged(log, strong, range(3)))
    assert stored(log, strong) == [0, 1, 2]


# --- several committers -----------------------------------------------------------------------------------------------
def test_one_of_two_concurrent_committers_succeeds(log: emb.Log, name: str) -> None:
    """Both finish, and the rows of one of them are there, once."""
    choices = [staged(log, name, range(2_000), run=None, text="a"), staged(log, name, range(5_000, 7_000), run=None)]
    start, failures = threading.Barrier(2), list[Exception]()

    def attempt(messages: list[StagedMessage]) -> None:
        start.wait()
        try:
            publish(log, name, messages)
        except EmbarcaderoError as error:
            failures.append(error)

    threads = [threading.Thread(target=attempt, args=(messages,)) for messages in choices]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert failures == []
    assert sorted(stored(log, name)) in (list(range(2_000)), list(range(5_000, 7_000)))


def test_a_run_that_another_driver_has_overtaken_is_informed(log: emb.Log, strong: str) -> None:
    """Two queries with copies of one checkpoint: the first decision of an epoch counts, and the other query ends."""
    publish(log, strong, staged(log, strong, range(3), epoch=0, run="one"))
    publish(log, strong, staged(log, strong, range(3, 6), epoch=1, run="two"))
    with pytest.raises(Stale, match="copies of one checkpoint"):
        publish(log, strong, staged(log, strong, range(6, 9), epoch=1, run="one"))

    assert stored(log, strong) == list(range(6))
    publish(log, strong, staged(log, strong, range(7, 9), epoch=1, run="three"))  # a restart: nothing to do
    assert stored(log, strong) == list(range(6))


def test_an_earlier_epoch_never_comes_back(log: emb.Log, strong: str) -> None:
    """A late committer finds that a later epoch was decided."""
    late = staged(log, strong, range(50, 60), epoch=3, run=None)
    publish(log, strong, staged(log, strong, range(5), epoch=4, run=None))
    publish(log, strong, late)
    assert stored(log, strong) == list(range(5))


def manifest(*ids: int, write: str = "w", epoch: int = 0) -> Manifest:
    """A manifest of one batch."""
    payload = pa.RecordBatch.from_pydict({"id": list(ids), "text": ["t"] * len(ids)}, schema=SCHEMA).serialize()
    return Manifest(
        write, epoch, [Target("t", 1, 1)], [ManifestPart(inline=[InlineBatch(payload.to_pybytes(), len(ids), 0)])]
    )


def test_the_outcome_of_a_commit(log: emb.Log, strong: str) -> None:
    """Its own manifest, an earlier one, or done before."""
    ledger = TopicLedger(log.twin, log.describe(strong))

    def run(made: Manifest) -> Committed:
        return log.thread.wait(commit(ledger, made))

    assert run(manifest(1, 2)) is Committed.MINE
    assert run(manifest(3)) is Committed.DONE
    decided, _ = log.thread.wait(ledger.held("v"))
    first = manifest(4, write="v")
    log.thread.wait(ledger.append(first))
    decision = Decision(first.epoch, first.digest)
    assert log.thread.wait(ledger.decide("v", decision, decided.session)).expected == decision.number
    assert run(manifest(5, write="v")) is Committed.EARLIER
    assert stored(log, strong) == [1, 2, 4]


# --- the sweep --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("moment", ["publish", "half", "finish"])
def test_the_sweep_completes_decided_writes(
    log: emb.Log, strong: str, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """No driver comes back. It leaves the committer some time, and later drops the staged batches."""
    dies(monkeypatch, moment)
    with pytest.raises(RuntimeError):
        publish(log, strong, staged(log, strong, range(200), text=MUCH))
    before = stored(log, strong)
    sweep(log, complete_after_s=COMPLETE_AFTER_S)
    assert stored(log, strong) == before
    sweep(log)
    assert stored(log, strong) == list(range(200))
    sweep(log, trims=True)
    name = staging_topic(log.describe(strong).id)
    assert all(lane.start_index == lane.index for lane in log.tail(name).lanes)


def test_the_sweep_keeps_the_batches_of_an_open_write(log: emb.Log, strong: str) -> None:
    """A write may stage for hours; after a day without activity it is forgotten."""
    messages = staged(log, strong, range(200), text=MUCH)
    name = staging_topic(log.describe(strong).id)
    sweep(log, trims=True)
    assert all(lane.start_index == 0 for lane in log.tail(name).lanes)
    publish(log, strong, messages)
    assert stored(log, strong) == list(range(200))

    staged(log, strong, range(10), epoch=1, text=MUCH * 10)
    sweep(log, trims=True, silent_s=0)
    assert all(lane.start_index == lane.index for lane in log.tail(name).lanes)


def test_a_manifest_that_was_not_decided_has_no_effect(
    log: emb.Log, strong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver died between the two; the sweep must not decide for it."""
    dies(monkeypatch, "decide")
    with pytest.raises(RuntimeError):
        publish(log, strong, staged(log, strong, range(200), text=MUCH))
    sweep(log)
    assert stored(log, strong) == []


def test_the_staging_topic_goes_with_its_topic(log: emb.Log, strong: str) -> None:
    """So do the facts of jobs. Both are hidden, and none of them counts after the topic was recreated."""
    publish(log, strong, staged(log, strong, range(200), text=MUCH))
    target = log.describe(strong)
    JobLedger(log, target).settle("job", "begun", b"")
    names = {staging_topic(target.id), jobs_topic(target.id)}
    assert not names & {each.name for each in log.topics()}
    assert names <= {each.name for each in log.topics(hidden=True)}
    sweep(log)
    assert names <= {each.name for each in log.topics(hidden=True)}
    log.delete_topic(strong)
    log.create_topic(strong, order=5, replicas=1, schema=SCHEMA)
    sweep(log)
    assert not names & {each.name for each in log.topics(hidden=True)}
    publish(log, strong, staged(log, strong, range(200, 300), text=MUCH))
    assert stored(log, strong) == list(range(200, 300))


# --- faults
# --------------------------------------------------------------------------------------------------------------
def test_a_staging_topic_that_is_deleted_under_a_write_is_named(
    log: emb.Log, strong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the decision nothing is visible, and the write can be repeated.

    After it, the error names the lost batches.
    """
    messages = staged(log, strong, range(200), text=MUCH)
    log.delete_topic(staging_topic(log.describe(strong).id))
    with pytest.raises(StagedGone, match="run it again"):
        publish(log, strong, messages)
    assert stored(log, strong) == []
    dies(monkeypatch, "publish")
    with pytest.raises(RuntimeError):
        publish(log, strong, staged(log, strong, range(200), text=MUCH))
    log.delete_topic(staging_topic(log.describe(strong).id))
    with pytest.raises(StagedGone, match="the list of its batches is gone"):
        publish(log, strong, staged(log, strong, range(300), text=MUCH))


def test_a_staging_topic_that_is_trimmed_under_a_write_is_named(
    log: emb.Log, strong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand. Before the decision nothing is visible.

    After it the brokers' remaining batches are published; if one is gone there too, the error names the remedy.
    """
    name = staging_topic(log.describe(strong).id)
    messages = staged(log, strong, range(200), text=MUCH)
    log.trim(name, before_time=datetime.now(UTC))
    with pytest.raises(StagedGone, match="nothing of the write is visible"):
        publish(log, strong, messages)
    assert stored(log, strong) == []

    async def gone(*_: object) -> None:
        raise BadReference("it is not there", "")

    monkeypatch.setattr(Publication, "_publish_rest", gone)
    with pytest.raises(StagedGone, match="is gone after the write was decided"):
        publish(log, strong, staged(log, strong, range(200), text=MUCH))


def test_a_target_that_is_deleted_under_a_write_is_named(log: emb.Log, strong: str) -> None:
    """Also when another topic has its name by now: that one stays empty."""
    messages = staged(log, strong, range(200), text=MUCH)
    task = writer(log, strong)
    log.delete_topic(strong)
    with pytest.raises(UnknownTopic):
        sink.publish(task, messages)
    log.create_topic(strong, order=5, replicas=1, schema=SCHEMA)
    for again in (task, writer(log, strong)):
        with pytest.raises(TopicReplaced):
            sink.publish(again, messages)
    sink.give_up(writer(log, strong), messages)
    assert log.tail(strong).seq == 0


def test_batches_staged_too_long_ago_are_not_decided(log: emb.Log, strong: str) -> None:
    """The sweep could drop them at any moment."""
    messages = [
        StagedMessage(replace(each.staged, announced_s=each.staged.announced_s - SILENT_S))
        for each in staged(log, strong, range(200), range(200, 400), text=MUCH)
    ]
    with pytest.raises(StagedGone, match="nothing of the write is visible"):
        publish(log, strong, messages)
    assert stored(log, strong) == []


def test_a_write_with_too_many_batches_is_refused(
    log: emb.Log, strong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any of it is visible, with the remedy."""
    monkeypatch.setattr(manifests, "BATCHES_MAX", 5)
    with pytest.raises(BadValue, match="larger batches"):
        publish(log, strong, staged(log, strong, range(200), text=MUCH))
    assert stored(log, strong) == []


def test_a_decided_write_keeps_its_schema(log: emb.Log, strong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A column is added between the decision and its completion."""
    for text in (LITTLE, MUCH):
        dies(monkeypatch, "publish")
        with pytest.raises(RuntimeError):
            publish(log, strong, staged(log, strong, range(200), epoch=len(text), text=text))
        log.alter_topic(strong, schema=log.describe(strong).schema.append(pa.field(f"c{len(text)}", pa.int32())))
        sweep(log)
    assert stored(log, strong) == [*range(200), *range(200)]


def test_topics_in_memory_are_written_too(log: emb.Log, topic: str) -> None:
    """Without replicas nothing is durable, and a write is still complete or absent.

    It is staged on disks, if there are any: its published batches must not push its staged batches out of memory.
    """
    log.create_topic(topic, replicas=0, schema=SCHEMA)
    publish(log, topic, staged(log, topic, range(200), range(200, 400), text=MUCH))
    assert sorted(stored(log, topic)) == list(range(400))
    assert log.describe(staging_topic(log.describe(topic).id)).replicas == 1


def test_topics_of_orders_0_and_1_are_refused(log: emb.Log, topic: str) -> None:
    """Duplicate batches are not detected there."""
    log.create_topic(topic, order=0, replicas=1)
    with pytest.raises(BadValue, match="order 0"):
        TopicLedger(log.twin, log.describe(topic))


def test_a_decision_survives_a_restart_of_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All processes end after the decision, memory is lost: the next commit finds it on disk, and completes it."""
    folder = str(tmp_path / "data")
    with emb.local(brokers=1, replicas=1, data_dir=folder) as log:
        log.create_topic("kept", replicas=1, schema=SCHEMA)
        dies(monkeypatch, "publish")
        with pytest.raises(RuntimeError):
            publish(log, "kept", staged(log, "kept", range(200), run="first", text=MUCH))
        shared_log(log.address).close()
    with emb.local(brokers=1, replicas=1, data_dir=folder) as log:
        assert stored(log, "kept") == []
        publish(log, "kept", staged(log, "kept", range(500, 600), run="second", text=MUCH))
        assert stored(log, "kept") == list(range(200))
        publish(log, "kept", staged(log, "kept", range(500, 600), epoch=1, run="second", text=MUCH))
        assert stored(log, "kept") == [*range(200), *range(500, 600)]
        shared_log(log.address).close()


def test_a_session_that_is_always_taken_over_is_given_up(
    log: emb.Log, strong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the likely cause."""

    async def taken(*_: object) -> None:
        raise SessionFenced("taken over", "")

    monkeypatch.setattr(Publication, "_publish_rest", taken)
    monkeypatch.setattr(ledger, "_PAUSE_S", 0)
    with pytest.raises(SessionFenced, match="two queries run with copies of one checkpoint"):
        publish(log, strong, staged(log, strong, range(5)))


def test_a_committer_waits_while_another_makes_progress(
    log: emb.Log, strong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often the session of a large write is taken over: it is given up only when nothing is published."""
    whole, fenced = Publication._publish_rest, [0]

    async def taken(publication: Publication, topic: TopicInfo) -> None:
        fenced[0] += 1
        if fenced[0] <= 2 * STAGED_FENCED_TRIES:
            batches = publication._batches
            publication._batches = batches[: fenced[0]]
            await whole(publication, topic)
            publication._batches = batches
            raise SessionFenced("taken over", "")
        await whole(publication, topic)

    monkeypatch.setattr(Publication, "_publish_rest", taken)
    monkeypatch.setattr(ledger, "_PAUSE_S", 0)
    publish(log, strong, staged(log, strong, range(1_500), text=MUCH))
    assert stored(log, strong) == list(range(1_500))


def test_nothing_is_trimmed_before_the_end_of_an_epoch_is_durable(
    log: emb.Log, strong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss of memory could bring the epoch back, and its manifest is needed then."""
    settled = [False, False, True]

    async def answer(sweep: StagingSweep) -> bool:
        return sweep._target != strong or settled.pop(0)

    monkeypatch.setattr(StagingSweep, "_settled", answer)
    publish(log, strong, staged(log, strong, range(200), text=MUCH))
    name = staging_topic(log.describe(strong).id)

    async def rounds() -> list[bool]:
        sweeper, found = StagingSweeper(log.twin, SilentJournal()), []
        for _ in range(3):
            await sweeper.round()
            found.append(any(lane.start_index for lane in (await log.twin.tail(name)).lanes))
        return found

    monkeypatch.setattr(sweeping, "_MARGIN_S", 0.0)
    assert log.thread.wait(rounds()) == [False, False, True]


def test_a_paused_committer_has_no_effect(log: emb.Log, strong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was paused after the decision; the sweep completed the epoch, and the next one came. Then it continues."""
    whole, asleep, awake = TopicLedger.publish, threading.Event(), threading.Event()

    async def slow(ledger: TopicLedger, made: Manifest) -> None:
        monkeypatch.setattr(TopicLedger, "publish", whole)
        asleep.set()
        await asyncio.to_thread(awake.wait)
        await whole(ledger, made)

    monkeypatch.setattr(TopicLedger, "publish", slow)
    messages = staged(log, strong, range(200), text=MUCH)
    zombie = threading.Thread(target=publish, args=(log, strong, messages))
    zombie.start()
    assert asleep.wait(60)
    sweep(log)
    publish(log, strong, staged(log, strong, range(500, 510), epoch=1))
    awake.set()
    zombie.join()

    assert stored(log, strong) == [*range(200), *range(500, 510)]
    target = log.describe(strong)
    assert log.thread.wait(complete(TopicLedger(log.twin, target), "q")) is not None
    assert log.thread.wait(log.twin.held_name(strong, data_name("q"))).expected == 2 << 20
