"""What runs twice is stored once: tasks on a real cluster, without Spark, at every moment that Spark might choose."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import embarcadero as emb
from embarcadero.errors import BadValue, Conflict, EmbarcaderoError, SessionFenced, Stale
from embarcadero.limits import SESSION_WINDOW
from embarcadero.spark import work as works
from embarcadero.spark import writing
from embarcadero.spark.connections import shared_log
from embarcadero.spark.shape import shape_of
from embarcadero.spark.sink import Message, complete
from embarcadero.spark.work import Work, begin, claim, digest_of
from embarcadero.spark.write_options import WriteOptions
from embarcadero.spark.writing import TaskWriter, Written

SCHEMA = pa.schema([("id", pa.int64()), ("text", pa.string())])
TEXT = "x" * 50


@pytest.fixture(params=[2, 5], ids=["order2", "order5"])
def name(request: pytest.FixtureRequest, log: emb.Log, topic: str) -> str:
    """A topic of both orders that know sessions."""
    log.create_topic(topic, order=request.param, replicas=1, partitions=2, schema=SCHEMA)
    return topic


def writer(log: emb.Log, name: str, batch_bytes: int = 1000) -> TaskWriter:
    """A writer of small batches."""
    options = WriteOptions(brokers=log.address, topic=name, batch_bytes=batch_bytes)
    return TaskWriter(options, shape_of(log.describe(name), SCHEMA, options, None))


def rows(*ids: int, text: str = TEXT) -> Iterator[pa.RecordBatch]:
    """Rows in two Arrow batches."""
    whole = pa.RecordBatch.from_pydict({"id": list(ids), "text": [text] * len(ids)})
    yield whole.slice(0, len(ids) // 3)
    yield whole.slice(len(ids) // 3)


def stored(log: emb.Log, name: str) -> list[int]:
    """The ids in the topic, sorted."""
    return sorted(log.read(name).column("id").to_pylist()) if log.tail(name).seq else []


def half_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next task sends half of its batches, and fails."""
    whole = works._send

    def half(publisher: emb.Publisher, batches: list[works.Encoded]) -> None:
        monkeypatch.setattr(works, "_send", whole)
        whole(publisher, batches[: len(batches) // 2])
        raise RuntimeError("planted")

    monkeypatch.setattr(works, "_send", half)


def test_a_task_that_failed_after_half_of_it_is_done_again(
    log: emb.Log, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second attempt gets its rows in another order; every row is there once."""
    half_of(monkeypatch)
    task, work = writer(log, name), Work("q", 3, 0, "run")
    with pytest.raises(RuntimeError, match="planted"):
        task.write(work, rows(*range(100)))
    assert 0 < len(stored(log, name)) < 100
    task.write(work, rows(*reversed(range(100))))

    assert stored(log, name) == list(range(100))


def test_other_rows_are_refused_before_any_of_them_is_written(
    log: emb.Log, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row more, one less, one that differs, none at all: Conflict, and the topic stays as it is."""
    half_of(monkeypatch)
    task, work = writer(log, name), Work("q", 3, 0, "run")
    with pytest.raises(RuntimeError):
        task.write(work, rows(*range(100)))
    before = stored(log, name)
    for other in (rows(*range(101)), rows(*range(99)), rows(*range(99), 555), rows()):
        with pytest.raises(Conflict, match="task 0 of batch 3 of 'q' was written before with other rows"):
            task.write(work, other)

    assert stored(log, name) == before
    task.write(work, rows(*range(100)))
    assert stored(log, name) == list(range(100))


def test_two_at_the_same_time_write_each_row_once(log: emb.Log, name: str) -> None:
    """Speculative attempts take the session from each other, and both come to an end."""
    task, work, failures = writer(log, name), Work("q", 0, 0, "run"), list[EmbarcaderoError]()
    start = threading.Barrier(3)

    def attempt() -> None:
        start.wait()
        try:
            task.write(work, rows(*range(1000)))
        except EmbarcaderoError as error:
            failures.append(error)

    threads = [threading.Thread(target=attempt) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert failures == []
    assert stored(log, name) == list(range(1000))


def test_a_session_that_is_always_taken_away_is_given_up(
    log: emb.Log, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says what to look for."""

    def taken(*_: object) -> None:
        raise SessionFenced("somebody else")

    monkeypatch.setattr(works, "_send", taken)
    monkeypatch.setattr(works, "_BACK_OFF_S", 0)
    with pytest.raises(SessionFenced, match="two queries run with copies of one checkpoint"):
        writer(log, name).write(Work("q", 0, 0, "run"), rows(1))


def test_works_follow_one_another_and_never_go_back(log: emb.Log, name: str) -> None:
    """A task of an earlier micro-batch that comes late writes nothing."""
    task = writer(log, name)
    task.write(Work("q", 4, 0, "run"), rows(1, 2))
    task.write(Work("q", 5, 0, "run"), rows(3))
    with pytest.raises(Stale, match="batch 5 was begun"):
        task.write(Work("q", 4, 0, "run"), rows(1, 2))
    with pytest.raises(Stale):
        task.write(Work("q", 4, 1, "run"), rows(9))

    assert stored(log, name) == [1, 2, 3]


def test_writes_and_tasks_do_not_meddle(log: emb.Log, name: str) -> None:
    """The same rows by other tasks and other writes are other rows."""
    task = writer(log, name)
    for work in (Work("q", 0, 0, "run"), Work("q", 0, 1, "run"), Work("p", 0, 0, "run"), Work("r", 0, 0, None)):
        task.write(work, rows(7))

    assert stored(log, name) == [7] * 4


# --- other numbers of tasks ---
def run_again(log: emb.Log, name: str, cut: list[list[int]], run: str) -> list[Written]:
    """What a driver's tasks do, one after the other, as with one core."""
    task = writer(log, name)
    return [task.write(Work("q", 0, number, run), rows(*ids)) for number, ids in enumerate(cut)]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for neighbours: tasks run one after the other here."""
    monkeypatch.setattr(works, "SPARK_EVIDENCE_S", 0.0)


@pytest.mark.usefixtures("impatient")
def test_fewer_tasks_than_before_are_refused_and_nothing_is_written(log: emb.Log, name: str) -> None:
    """Task 2 of the first run wrote; the second run has no such task, and its rows are in others."""
    writer(log, name).write(Work("q", 0, 2, "first"), rows(5, 6))
    told = run_again(log, name, [[1, 2, 5], [3, 4, 6]], "second")
    assert stored(log, name) == [5, 6]
    with pytest.raises(Conflict, match="was begun by 3 tasks or more, and now it has 2"):
        complete(writer(log, name), [Message(written) for written in told])

    assert stored(log, name) == [5, 6]


@pytest.mark.usefixtures("impatient")
def test_more_tasks_than_before_are_refused_where_rows_differ(log: emb.Log, name: str) -> None:
    """Task 0 of the first run had more rows than that of the second."""
    writer(log, name).write(Work("q", 0, 0, "first"), rows(1, 2, 5))
    with pytest.raises(Conflict):
        run_again(log, name, [[1, 2], [5, 3], [4, 6]], "second")

    assert stored(log, name) == [1, 2, 5]


@pytest.mark.usefixtures("impatient")
def test_the_driver_completes_what_tasks_could_not_know(log: emb.Log, name: str) -> None:
    """As many tasks as before: those that ran before it was known are written by the commit, once, however often."""
    writer(log, name).write(Work("q", 0, 2, "first"), rows(5, 6))
    told = run_again(log, name, [[1, 2], [3, 4], [5, 6]], "second")
    assert [written.staged is not None for written in told] == [True, True, False]
    assert stored(log, name) == [5, 6]
    for _ in range(2):
        complete(writer(log, name), [Message(written) for written in told])

    assert stored(log, name) == [1, 2, 3, 4, 5, 6]


def test_neighbours_that_run_at_the_same_time_are_waited_for(
    log: emb.Log, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is left to the driver if the other task shows up."""
    monkeypatch.setattr(works, "SPARK_EVIDENCE_S", 60.0)
    writer(log, name).write(Work("q", 0, 1, "first"), rows(5, 6))
    told: list[Written] = []
    first = threading.Thread(
        target=lambda: told.append(writer(log, name).write(Work("q", 0, 0, "second"), rows(1, 2)))
    )
    first.start()
    told.append(writer(log, name).write(Work("q", 0, 1, "second"), rows(5, 6)))
    first.join()

    assert [written.staged for written in told] == [None, None]
    assert stored(log, name) == [1, 2, 5, 6]


@pytest.mark.usefixtures("impatient")
def test_too_much_for_the_driver_is_refused(log: emb.Log, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what to do about it."""
    writer(log, name).write(Work("q", 0, 2, "first"), rows(5, 6))
    monkeypatch.setattr(writing, "SPARK_STAGED_BYTES_MAX", 10)
    with pytest.raises(BadValue, match="as many cores as before"):
        run_again(log, name, [[1, 2]], "second")


# --- bounds ---
def test_more_batches_than_can_be_recognised_are_refused(log: emb.Log, name: str) -> None:
    """Before anything is sent."""
    many = [works.Encoded(pa.py_buffer(b"x"), 1, 0)] * (SESSION_WINDOW + 1)
    with pytest.raises(BadValue, match="repartition"):
        works.send(log, log.describe(name), Work("q", 0, 0, "run"), many)
    assert stored(log, name) == []


def test_numbers_of_works_and_tasks_are_bounded() -> None:
    """They share a sequence with other numbers."""
    with pytest.raises(BadValue, match="begin a new one"):
        Work("q", 1 << 40, 0, None)
    with pytest.raises(BadValue):
        Work("q", 0, 1 << 20, None)


def test_a_large_task_stays_within_the_window(log: emb.Log, name: str) -> None:
    """A hundred times more rows than its batches were asked to have."""
    written = writer(log, name, batch_bytes=100).write(Work("q", 0, 0, "run"), rows(*range(20_000)))
    assert 0 < written.batches <= SESSION_WINDOW
    assert stored(log, name) == list(range(20_000))


def test_what_was_stored_is_known_after_a_restart_of_everything(tmp_path: Path) -> None:
    """All processes end, memory is lost: the work that is done again is recognised from what is on disk."""
    folder = str(tmp_path / "data")
    work, ids = Work("q", 9, 0, "run"), range(100)

    def attempt(ids: range, check: Callable[[emb.Log], None]) -> None:
        with emb.local(brokers=1, replicas=1, data_dir=folder) as log:
            if not [one for one in log.topics() if one.name == "kept"]:
                log.create_topic("kept", replicas=1, schema=SCHEMA)
            check(log)
            writer(log, "kept").write(work, rows(*ids))
            assert stored(log, "kept") == list(range(100))
            shared_log(log.address).close()

    def other_rows(log: emb.Log) -> None:
        assert stored(log, "kept") == list(range(100))
        with pytest.raises(Conflict):
            writer(log, "kept").write(work, rows(*range(99)))
        publisher = begin(log, log.describe("kept"), work)
        assert publisher.already_in() > 1
        publisher.close()

    attempt(ids, lambda log: None)
    attempt(ids, other_rows)


def test_the_digest_tells_rows_order_and_partitions_apart() -> None:
    """Any change of the batches changes it."""
    one, two = works.Encoded(pa.py_buffer(b"x"), 1, 0), works.Encoded(pa.py_buffer(b"y"), 1, 0)
    moved = works.Encoded(pa.py_buffer(b"x"), 1, 1)
    found = {digest_of(batches) for batches in ([], [one], [two], [one, two], [two, one], [moved], [one, one])}
    assert len(found) == 7
    assert all(0 < digest < 1 << 28 for digest in found)


def test_a_claim_whose_answer_was_lost_can_be_made_again(log: emb.Log, name: str) -> None:
    """It finds its own digest, and nobody else's."""
    work = Work("q", 0, 0, "run")
    assert claim(log, name, work, 77) == 0
    assert claim(log, name, work, 77) == 0
    for other in (76, 78):
        with pytest.raises(Conflict):
            claim(log, name, work, other)
    assert claim(log, name, work, 77) == 0
