"""The tiering job on a real cluster: killed anywhere, it leaves nothing twice and nothing missing."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from embarcadero.client.api.sync_log import Log
from embarcadero.errors import BadTable, BadValue, Corrupt, Deposed, TierBusy, TierUnavailable
from embarcadero.tier.job import STEPS, Engine, ProcessEngine, SpanWork, TierJob, checked_facts
from embarcadero.tier.parquet import FileFacts, FileSpan
from embarcadero.tier.storage import TierSettings
from embarcadero.tier.table import TierTable
from embarcadero_proof.bugs.table import injected
from tests.tier.rewriting import add
from tests.tier.truth import Truth


class Crash(BaseException):
    """End the job's process here."""


def crash_at(step: str, occurrence: int = 1) -> Callable[[str], None]:
    seen = 0

    def hook(name: str) -> None:
        nonlocal seen
        seen += name == step
        if name == step and seen == occurrence:
            raise Crash

    return hook


@pytest.fixture
def truth(log: Log, tmp_path: Path, request: pytest.FixtureRequest) -> Truth:
    topic = request.node.name.replace("[", "-").strip("]")[:60]
    log.create_topic(topic, order=5)
    return Truth(log, topic, TierSettings.local(tmp_path, file_bytes=65_536, hot_retention_s=0))


@pytest.fixture
def inject() -> Iterator[Any]:
    with ExitStack() as stack:
        yield lambda name: stack.enter_context(injected(name))


class Hooked(TierJob):
    """A job that is interrupted at its steps."""

    def __init__(self, truth: Truth, hook: Callable[[str], None], holder: str, engine: Engine | None) -> None:
        super().__init__(truth.log, truth.topic, truth.settings, engine, holder=holder)
        self._hook = hook

    def step(self, name: str) -> None:
        self._hook(name)


def job(
    truth: Truth,
    holder: str = "a",
    *,
    engine: Engine | None = None,
    take_over: bool = False,
    step: Callable[[str], None] = lambda _name: None,
) -> TierJob:
    made = Hooked(truth, step, holder, engine)
    if take_over:
        made.open(take_over=True)
    return made


def run_through(dying: TierJob) -> None:
    dying.open()
    dying.cycle()


def test_killed_at_every_step(truth: Truth) -> None:
    """One job after the other dies a step later; the next starts immediately with the leftovers."""
    places = [(step, 1) for step in STEPS]
    places[STEPS.index("write") + 1 : 1] = [("write", 2), ("write", 3)]
    for step, occurrence in places:
        truth.publish(900)
        dying = job(truth, step=crash_at(step, occurrence))
        with pytest.raises(Crash):
            run_through(dying)
        if step not in ("open", "create"):  # before that there is no table
            assert truth.problems() == []
    assert truth.data_files() > truth.named_files()
    with job(truth) as last:
        truth.publish(10)
        last.run_once()
    assert truth.problems() == []
    assert len(truth.rows()) == len(truth.records) == 900 * len(places) + 10
    assert truth.data_files() == truth.named_files()
    assert truth.log.tail(truth.topic).hot_seq == len(truth.records)


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("swaps", [1, 2], ids=["entries", "records"])
def test_killed_at_the_swap_of_the_catalog(truth: Truth, swaps: int, done: bool) -> None:
    """With the manifests written, and with the swap done but not reported: of either table."""
    truth.publish(300)
    dying = job(truth)
    dying.open()
    catalog: Any = dying._table.catalog()
    swap, left = catalog.commit_table, [None] * swaps

    def commit_table(*arguments: Any) -> Any:
        left.pop()
        done_now = swap(*arguments) if left or done else None
        if not left:
            raise Crash
        return done_now

    catalog.commit_table = commit_table
    with pytest.raises(Crash):
        dying.cycle()
    with job(truth) as last:
        assert last.cycle().rows == (0 if done and swaps == 2 else 300)
    assert truth.problems() == []
    assert len(truth.rows()) == 300


KILLED = """
import os, signal, sys
import embarcadero as emb
from contextlib import ExitStack
from pathlib import Path
from embarcadero.tier.job import TierJob
from embarcadero.tier.storage import TierSettings
address, topic, folder, at = sys.argv[1:]
class Killed(TierJob):
    def step(self, name):
        if name == at:
            os.kill(os.getpid(), signal.SIGKILL)
with emb.connect(address) as log:
    settings = TierSettings.local(Path(folder), file_bytes=65_536, hot_retention_s=0)
    with Killed(log, topic, settings, holder="doomed") as job:
        job.cycle()
"""


def test_a_process_that_is_really_killed(truth: Truth, tmp_path: Path) -> None:
    """Between the files and the commit. Its lease lives on: others must ask, or wait."""
    truth.publish(300)
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, truth.log.address, truth.topic, str(tmp_path), "commit"], timeout=60, check=False
    )
    assert ended.returncode == -signal.SIGKILL
    with pytest.raises(TierBusy, match="'doomed' tiers"):
        job(truth).open()
    with job(truth, take_over=True) as last:
        truth.publish(5)
        last.cycle()
    assert truth.problems() == []
    assert len(truth.rows()) == 305
    assert truth.data_files() == truth.named_files()


def test_a_second_tierer_and_a_stale_one(truth: Truth) -> None:
    """A job that was deposed while it wrote learns it at its commit, or before; its files are garbage."""
    truth.publish(300)

    def take_over(name: str) -> None:
        if name == "commit":
            with job(truth, "fresh", take_over=True) as fresh:
                assert fresh.cycle().rows == 300

    stale = job(truth, "stale", step=take_over)
    stale.open()
    with pytest.raises(Deposed):
        stale.cycle()
    with pytest.raises(Deposed, match="epoch 1"):
        truth.log.advance_tier(truth.topic, 1, metadata="x", frontiers={})
    stale.close()
    truth.publish(3)
    with job(truth) as last:
        last.cycle()
    assert truth.problems() == []
    assert truth.data_files() == truth.named_files()


def test_another_writer_of_the_table_deposes_no_job(truth: Truth) -> None:
    """A commit of another engine between ours and the swap: nothing was added, and the next cycle adds it."""
    truth.publish(50)
    with job(truth) as running:
        catalog: Any = running._table.catalog()
        swap = catalog.commit_table

        def commit_table(*arguments: Any) -> Any:
            catalog.commit_table = swap
            other = TierTable(truth.settings, running.table).load()
            assert other is not None
            add(other.table, other.table.scan().to_arrow())
            return swap(*arguments)

        catalog.commit_table = commit_table
        with pytest.raises(TierUnavailable, match="another program"):
            running.cycle()
        assert running.cycle().rows == 50
    assert truth.problems() == []


def test_a_trim_before_the_commit_would_lose_records(truth: Truth, inject: Any) -> None:
    """The order of steps matters: with the injected bug a crash before the commit loses the trimmed records.

    The same check notices it. The store's own rule (no trim above the frontier) has to be disabled for that.
    """
    truth.publish(300)
    inject("tier-trim-before-commit")
    dying = job(truth, step=crash_at("commit"))
    with pytest.raises(Crash):
        run_through(dying)
    assert truth.log.tail(truth.topic).hot_seq == 0  # the brokers' store refused; it has no injected bug
    assert truth.problems() == []
    truth.log.trim(truth.topic, before_seq=200)  # what such a store would have let happen
    assert any("is missing" in problem for problem in truth.problems())


def test_an_outdated_catalog(truth: Truth, tmp_path: Path) -> None:
    """Restored from an old copy, or another one: nothing is written on top, and the error names the correct file."""
    catalog = tmp_path / "catalog.db"
    truth.publish(50)
    with job(truth) as first:
        first.cycle()
    shutil.copy(catalog, tmp_path / "old.db")
    truth.publish(50)
    with job(truth) as second:
        second.cycle()
    newest = truth.log.describe(truth.topic).tier.metadata  # type: ignore[union-attr]
    shutil.copy(tmp_path / "old.db", catalog)
    with pytest.raises(BadTable, match="the catalog is behind") as caught:
        job(truth).open()
    assert newest in caught.value.hint
    catalog.unlink()
    with pytest.raises(BadTable, match="is not in the catalog") as caught:
        job(truth).open()
    assert newest in caught.value.hint
    with pytest.raises(BadTable):  # and no other job has to wait for it
        job(truth, "another").open()


def test_a_topic_that_is_created_again_gets_a_table_of_its_own(truth: Truth) -> None:
    """The old one's table is another topic's, whatever its name."""
    truth.publish(20)
    with job(truth) as first:
        first.cycle()
    truth.log.delete_topic(truth.topic)
    truth.log.create_topic(truth.topic, order=5)
    truth.records.clear()
    truth.publish(7)
    with job(truth) as second:
        second.cycle()
    assert truth.problems() == []
    assert len(truth.rows()) == 7


def test_columns_added_while_the_job_runs(log: Log, tmp_path: Path) -> None:
    """Each batch is tiered with the schema it has; older ones have nulls."""
    schema = pa.schema([("price", pa.float16())])
    log.create_topic("evolving", schema=schema)
    truth = Truth(log, "evolving", TierSettings.local(tmp_path, hot_retention_s=0))
    with job(truth) as running:
        for names in (["price"], ["price", "note"]):
            with log.publisher("evolving", ack=2) as publisher:
                publisher.publish(pa.table({name: pa.array([None], pa.null()).cast(kind_of(name)) for name in names}))
            running.cycle()
            if names == ["price"]:
                log.alter_topic("evolving", schema=schema.append(pa.field("note", pa.large_string())))
    now = TierTable(truth.settings, "embarcadero.evolving").load()
    assert now is not None
    assert now.table.scan().to_arrow().schema.names[:3] == ["price", "note", "_seq"]
    assert log.tail("evolving").hot_seq == 2


def kind_of(name: str) -> pa.DataType:
    return pa.float16() if name == "price" else pa.large_string()


def test_lanes_of_brokers(log: Log, tmp_path: Path) -> None:
    """A topic of order 0 has a lane for each broker; all are in one table, each with its own frontier."""
    log.create_topic("striped", order=0)
    with log.publisher("striped", ack=2, batch_bytes=500) as publisher:
        for number in range(200):
            publisher.send(b"%d" % number)
    truth = Truth(log, "striped", TierSettings.local(tmp_path, hot_retention_s=0))
    with job(truth) as running:
        done = running.cycle()
    lanes = log.tail("striped").lanes
    assert done.rows == 200 == sum(lane.seq for lane in lanes)
    assert done.frontiers == {lane.lane: (lane.index, lane.seq) for lane in lanes}
    assert sorted(value for _, _, value in truth.rows()) == sorted(b"%d" % number for number in range(200))


def test_brokers_keep_recent_records(truth: Truth) -> None:
    """With a hot retention no recent record is dropped."""
    truth.publish(50)
    truth.settings = TierSettings(truth.settings.warehouse, truth.settings.properties, hot_retention_s=3_600)
    with job(truth) as running:
        done = running.cycle()
        assert (done.rows, done.trimmed) == (50, {})
        assert running.cycle().files == 0
    assert truth.log.tail(truth.topic).hot_seq == 0
    assert truth.problems() == []


def test_a_trim_below_the_brokers_records(truth: Truth) -> None:
    """By seq, index or time, into the part that only the table has: the start moves, and readers see it trimmed."""
    truth.publish(100)
    with job(truth) as running:
        running.cycle()
    lane = truth.log.tail(truth.topic).lane
    assert truth.log.tail(truth.topic).hot_seq == 100
    assert truth.log.trim(truth.topic, before_seq=30).seq in range(1, 31)
    start = truth.log.tail(truth.topic)
    assert (start.start_index, start.start_seq) == truth.log.describe(truth.topic).tier.start(lane)  # type: ignore[union-attr]
    assert truth.log.trim(truth.topic, before_index=start.start_index + 2).index == start.start_index + 2
    assert truth.log.trim(truth.topic, before_seq=5).index == start.start_index + 2
    begin = truth.log.tail(truth.topic).start_seq
    assert truth.log.read(truth.topic).column("_seq").to_pylist() == list(range(begin, 100))
    assert truth.log.trim(truth.topic, before_seq=100).seq == 100


def test_files_below_the_start_are_dropped(truth: Truth, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole files only; the store learns of the new metadata file, readers continue, and old snapshots expire."""
    truth.publish(1_200)
    with job(truth) as running:
        assert running.cycle().files > 2
        before = truth.named_files()
        truth.log.trim(truth.topic, before_seq=700)
        truth.publish(5)
        running.cycle()
        after = truth.named_files()
        assert before - after
        assert before & after
        start = truth.log.tail(truth.topic).start_seq
        assert truth.log.read(truth.topic).column("_seq").to_pylist() == list(range(start, 1_205))
        monkeypatch.setattr("embarcadero.tier.table.TIER_SNAPSHOTS_KEPT", 0)
        monkeypatch.setattr("embarcadero.tier.table.TIER_ORPHANS_S", -60.0)
        truth.publish(5)
        running.cycle()
        assert truth.data_files() == truth.named_files()
        assert len(TierTable(truth.settings, running._table.name).load().table.metadata.snapshots) == 1  # type: ignore[union-attr]
        truth.publish(5)
        running.cycle()
    assert truth.log.read(truth.topic).column("_seq").to_pylist() == list(range(start, 1_215))


def test_retention_by_age_applies_to_the_table_too(truth: Truth) -> None:
    """Older records are dropped for all readers, also from the table; younger ones stay."""
    truth.publish(100)
    with job(truth) as running:
        running.cycle()
        truth.log.alter_topic(truth.topic, retention_s=3_600)
        running.cycle()
        assert truth.log.tail(truth.topic).start_seq == 0
        truth.log.alter_topic(truth.topic, retention_s=1)
        deadline = datetime.now(UTC) + timedelta(seconds=60)
        while truth.named_files() and datetime.now(UTC) < deadline:  # the session's last entry is a little younger
            running.cycle()
        assert truth.log.tail(truth.topic).start_seq == 100
    assert truth.named_files() == set()


def test_an_ordinary_trim_moves_the_start_for_all(truth: Truth) -> None:
    """Above the frontier: the table never gets the trimmed records; the rest follows."""
    truth.publish(100)
    with job(truth) as running:
        running.cycle()
        truth.publish(100)
        truth.log.trim(truth.topic, before_seq=150)
        running.cycle()
    tail = truth.log.tail(truth.topic)
    start = truth.log.describe(truth.topic).tier.start(tail.lane)  # type: ignore[union-attr]
    assert 100 < start[1] <= 150
    assert (tail.start_index, tail.start_seq) == start or tail.start_seq == tail.hot_seq


def test_files_that_do_not_fit_the_plan_are_not_committed(truth: Truth) -> None:
    """A span that was written twice, or not at all; and temporary trouble of the object store."""
    spans = [FileSpan(lane=0, start=n, stop=n + 1, start_seq=n, stop_seq=n + 1) for n in range(2)]
    one, two = (FileFacts(span=span, paths=["p"]) for span in spans)
    assert checked_facts(spans, [two, one]) == [one, two]
    for facts in ([one], [one, one], [one, two, two]):
        with pytest.raises(Corrupt, match="2 spans"):
            checked_facts(spans, facts)
    truth.publish(20)
    failing = [True]

    class Failing(ProcessEngine):
        def write(self, works: list[SpanWork]) -> Iterator[FileFacts]:
            if failing.pop() if failing else False:
                raise TierUnavailable("the store refused")
            yield from super().write(works)

    with job(truth, engine=Failing(truth.log)) as running:
        with pytest.raises(TierUnavailable):
            running.cycle()
        assert running.cycle().rows == 20
    assert truth.problems() == []


def test_topics_that_cannot_be_tiered(log: Log, tmp_path: Path) -> None:
    """Records in memory only; a topic with a column that no table can have."""
    log.create_topic("memory", replicas=0)
    settings = TierSettings.local(tmp_path)
    with pytest.raises(BadValue, match="no replicas"):
        TierJob(log, "memory", settings, holder="a").open()
    log.create_topic("intervals", schema=pa.schema([("every", pa.month_day_nano_interval())]))
    with pytest.raises(BadValue, match="'every'"):
        TierJob(log, "intervals", settings, holder="a").open()
    assert log.describe("intervals").tier is None
    assert os.listdir(tmp_path) in ([], ["catalog.db"])
