"""The examples run as their docs say, each as a program of its own."""

from __future__ import annotations

import importlib.util
import re
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
    with emb.local(brokers=2) as log:
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
    """The folder's README names each file, and so does this module, or one of those that have Spark or tables."""
    readme, here = (EXAMPLES / "README.md").read_text(), Path(__file__).read_text()
    apart = ("spark/test_examples.py", "matrix/test_connect.py", "tier/test_rest_catalog.py")
    others = "".join((Path(__file__).parents[1] / name).read_text() for name in apart)

    for path in EXAMPLES.glob("*.py"):
        assert f"[{path.name}]({path.name})" in readme
        assert f'run("{path.name}"' in here or f'load("{path.stem}")' in others or f"examples.{path.stem} " in others


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
