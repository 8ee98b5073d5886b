"""The examples run as their docs say, each as a program of its own."""

from __future__ import annotations

import importlib.util
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import embarcadero as emb

pytestmark = pytest.mark.system

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


@pytest.fixture(scope="module")
def log() -> Iterator[emb.Log]:
    """One cluster for all examples that are given an address."""
    with emb.local(brokers=2, replicas=1) as log:
        yield log


def run(name: str, *arguments: str, typed: str = "") -> str:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, input=typed, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_listed_and_tested() -> None:
    """The folder's README and the page of examples name each file, and a test runs it."""
    tests = Path(__file__).parents[1]
    readme, page = (EXAMPLES / "README.md").read_text(), (tests.parent / "docs" / "examples.md").read_text()
    apart = ("spark/test_examples.py", "matrix/test_connect.py", "tier/test_rest_catalog.py")
    files = [*(tests / "examples").glob("test_*.py"), *(tests / name for name in apart)]
    text = "".join(file.read_text() for file in files)

    for path in [*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.ipynb")]:
        assert f"[{path.name}]({path.name})" in readme
        assert f"[{path.name}](../examples/{path.name})" in page
        assert any(use in text for use in (f'"{path.name}"', f'load("{path.stem}")', f"examples.{path.stem} ")), path


def test_replicas_of_the_store_end_equal_and_a_late_one_catches_up(log: emb.Log) -> None:
    """Three nodes in parallel, then a fourth that replays the whole log: all have the same content."""
    shown = run("key_value_store.py", log.address)

    states = set(re.findall(r"state ([0-9a-f]{16})", shown))
    assert "all replicas are equal" in shown
    assert shown.count(", leads, ") == 1
    with load("key_value_store").node(log.address, "late") as store:
        assert store.get_newest(b"counter")[1] == b"30"
        assert {store.replica.digest()} == states


def test_a_conditional_write_has_one_outcome(log: emb.Log) -> None:
    """Of two writes that expect the same version, the first in the log takes effect, and both nodes know."""
    module = load("key_value_store")
    with module.node(log.address, "one") as one, module.node(log.address, "two") as two:
        writes = [store.put(b"seat", store.replica.name.encode(), if_version=module.ABSENT) for store in (one, two)]
        outcomes = [write.took_effect() for write in writes]
        first = min((0, 1), key=lambda number: writes[number].position())

        assert outcomes == [first == 0, first == 1]
        version, value = one.get_newest(b"seat")
        assert (version, value) == (writes[first].position(), (b"one", b"two")[first])
        assert two.get_newest(b"seat") == (version, value)
        assert two.put(b"seat", b"later", if_version=version).took_effect()
        assert two.get(b"seat")[1] == b"later"


def test_a_chat_by_itself_shows_its_messages() -> None:
    """With a cluster of its own; the end of the input is the end of the chat."""
    shown = run("chat.py", "ann", typed="hello\nis anybody there?\n")

    assert [line.split(" ", 1)[1] for line in shown.splitlines()[1:]] == ["ann: hello", "ann: is anybody there?"]
    assert len((EXAMPLES / "chat.py").read_text().splitlines()) <= 30


def test_a_new_participant_sees_earlier_messages(log: emb.Log) -> None:
    """In the order of the log."""
    run("chat.py", "ann", log.address, typed="first\n")
    shown = run("chat.py", "bob", log.address, typed="second\n")

    assert [line.split(" ", 1)[1] for line in shown.splitlines()[1:]] == ["ann: first", "bob: second"]


def test_the_firehose_counts_everything(log: emb.Log) -> None:
    """All measurements are seen once, in lanes of both brokers."""
    assert "400,000 of 400,000 measurements" in run("firehose.py", log.address)
    topic = log.describe("metrics")
    assert (topic.order, {lane.broker for lane in topic.lanes}) == (0, {0, 1})


# --- import of a file -------------------------------------------------------------------------------------------------
KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv.pop(1))
import import_file

def chunks(file, real=import_file.chunks):
    for number, lines in enumerate(real(file)):
        if number == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        yield lines

import_file.chunks = chunks
import_file.main(*sys.argv[1:])
"""


def test_an_import_that_is_killed_continues_where_it_stopped(log: emb.Log, tmp_path: Path) -> None:
    """Every line is in the topic once, in the order of the file; a third run adds nothing."""
    lines = [b"line %06d of the file, followed by some more text" % number for number in range(60_000)]
    (tmp_path / "file.txt").write_bytes(b"\n".join(lines))
    arguments = (str(tmp_path / "file.txt"), log.address)

    killed = subprocess.run([sys.executable, "-c", KILLED, str(EXAMPLES), *arguments], check=False, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    found = re.search(r": (\d+) chunks were added, (\d+) were in", run("import_file.py", *arguments))

    assert found is not None
    added, before = map(int, found.groups())
    assert added + before == 12
    assert before <= 7
    assert log.read("lines").column("value").to_pylist() == lines
    assert "0 chunks were added, 12 were in" in run("import_file.py", *arguments)


def test_a_changed_file_is_another_import(log: emb.Log, tmp_path: Path) -> None:
    """All of its lines are added. The last line needs no line break, and carriage returns are removed."""
    before = log.tail("lines").seq
    for content in (b"one\r\ntwo", b"one\ntwo\n\nthree"):
        (tmp_path / "file.txt").write_bytes(content)
        run("import_file.py", str(tmp_path / "file.txt"), log.address)

    values = log.read("lines", before).column("value").to_pylist()
    assert values == [b"one", b"two", b"one", b"two", b"", b"three"]


# --- replay -----------------------------------------------------------------------------------------------------------
def test_a_replay_corrects_the_totals(log: emb.Log) -> None:
    """The program with the bug loses a cent of each payment; the corrected one reads all payments again."""
    shown = run("replay.py", log.address).splitlines()

    assert shown == [
        "version 1 read 300 payments: {'ann': 2800, 'bob': 2800, 'eve': 2800}",
        "version 1 read 300 payments: {'ann': 5600, 'bob': 5600, 'eve': 5600}",
        "version 2 read 600 payments: {'ann': 5800, 'bob': 5800, 'eve': 5800}",
    ]


def test_totals_count_each_record_once_after_a_failure(log: emb.Log, tmp_path: Path) -> None:
    """The program fails in the middle of a batch, and starts again: the batch is counted as a whole, or not at all."""
    example, database, read = load("replay"), tmp_path / "totals.db", [0]
    begins = log.tail("card-payments").seq
    for _ in range(4):
        example.pay(log, 30)

    def fails(amount: bytes) -> int:
        read[0] += 1
        if read[0] == begins + 45:
            raise ZeroDivisionError
        return int(example.cents(amount))

    first = example.Totals(database, "1", fails)
    first.switch()
    with pytest.raises(ZeroDivisionError):
        example.catch_up(log, first)
    first.close()
    again = example.Totals(database, "1", example.cents)
    example.catch_up(log, again)
    again.close()

    records = log.tail("card-payments").seq
    assert sum(example.current(database).values()) == 29 * records


def test_totals_refuse_a_topic_without_its_oldest_records(log: emb.Log, tmp_path: Path) -> None:
    """They continue at their position; if records from there on were trimmed, the totals would be wrong."""
    example = load("replay")
    log.create_topic("card-payments-trimmed")
    example.TOPIC = "card-payments-trimmed"
    for _ in range(3):
        example.pay(log, 3)
    totals = example.Totals(tmp_path / "totals.db", "1", example.cents)
    [[first, *_], *_] = log.scan("card-payments-trimmed")
    totals.add(first)
    log.trim("card-payments-trimmed", before_seq=9)

    with pytest.raises(RuntimeError, match="no longer has all records"):
        example.catch_up(log, totals)
    totals.close()
