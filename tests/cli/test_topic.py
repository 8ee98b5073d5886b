"""`topic create` and `topic describe` with replicas: the requested options, their cost, and where the copies are."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner, Result

from embarcadero.cli import topic as module
from embarcadero.cli.main import app
from embarcadero.client.results import TopicInfo
from embarcadero.types import Range, ReplicaRef, Tail
from embarcadero.wire.schemas import decode_versions

REFS = [ReplicaRef(replica=number, incarnation=7, disk="d") for number in (4, 5)]
RANGES = [
    Range(lane=3, number=1, start=0, start_seq=0, replicas=REFS, durable_on=1, end=10, end_seq=100),
    Range(lane=3, number=2, start=10, start_seq=100, replicas=REFS, durable_on=1),
]


class Log:
    """A cluster with one topic, as the command line sees it."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None: ...

    def create_topic(self, name: str, **settings: Any) -> TopicInfo:
        self.asked = settings
        return self.topic(name, settings["replicas"], settings["durable_on"])

    def alter_topic(self, name: str, **settings: Any) -> TopicInfo:
        self.asked = settings
        return self.topic(name, 2, 1)

    def describe(self, name: str) -> TopicInfo:
        return self.topic(name, 2, 1)

    def tail(self, name: str) -> Tail:
        return Tail(3, 20, 200)

    def readers(self, name: str) -> list[Any]:
        return []

    @staticmethod
    def topic(name: str, replicas: int | None, durable_on: int | None) -> TopicInfo:
        return TopicInfo(
            name=name, lane=3, replicas=replicas or 0, durable_on=durable_on or 0, retention_s=60,
            versions=decode_versions(b"", []), ranges=RANGES,
        )  # fmt: skip


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    made = Log()
    monkeypatch.setattr(module, "connect", lambda *_: made)
    monkeypatch.setenv("COLUMNS", "200")
    return made


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["topic", *arguments])


def test_create_reports_the_cost_of_a_choice(log: Log) -> None:
    """In a line of its own, and as a field for programs; sizes and times as people write them."""
    copies = ["--replicas", "2", "--durable-on", "1"]
    shown = run("create", "t", *copies, "--retention", "7d", "--retention-bytes", "10GiB")
    assert shown.exit_code == 0, shown.output
    assert "created topic t" in shown.stdout
    assert "after a loss of memory, recovery needs both replicas" in shown.stdout
    assert (log.asked["replicas"], log.asked["durable_on"]) == (2, 1)
    assert (log.asked["retention_s"], log.asked["retention_bytes"]) == (7 * 86_400, 10 << 30)
    told = msgspec.json.decode(run("create", "t", *copies, "--json").stdout)
    assert "both replicas" in told["price"]


def test_omitted_options_are_left_to_the_cluster(log: Log) -> None:
    """None: the cluster's default; a topic in memory has no output about disks."""
    shown = run("create", "t")
    assert shown.stdout == "created topic t (order 2, total)\n"
    names = ("replicas", "durable_on", "retention_s", "retention_bytes")
    assert [log.asked[name] for name in names] == [None] * 4


@pytest.mark.parametrize(("option", "value"), [("--retention", "soon"), ("--retention-bytes", "5 parsecs")])
def test_an_invalid_size_or_time_is_an_error(log: Log, option: str, value: str) -> None:
    """The message names a valid form."""
    shown = run("create", "t", option, value)
    assert shown.exit_code == 2
    assert "such as" in shown.stderr


def test_describe_shows_copies_retention_and_ranges(log: Log) -> None:
    """For people as tables, for programs as raw values."""
    shown = run("describe", "t").stdout
    assert "both replicas" in shown
    second = ("2", "10", "open", "1 of 2", "4.7, 5.7")
    for row in (("replicas", "2"), ("durable_on", "1"), ("retention_s", "60"), second):
        assert any(all(f" {cell} " in f" {line} " for cell in row) for line in shown.splitlines()), row
    told = msgspec.json.decode(run("describe", "t", "--json").stdout)
    assert [range_["number"] for range_ in told["ranges"]] == [1, 2]


def test_alter_accepts_them_too(log: Log) -> None:
    """Only the given options."""
    shown = run("alter", "t", "--replicas", "3", "--durable-on", "2", "--retention", "1h")
    assert shown.exit_code == 0, shown.output
    names = ("replicas", "durable_on", "retention_s", "retention_bytes", "partitions")
    assert [log.asked[name] for name in names] == [3, 2, 3_600, None, None]


def test_alter_reports_from_when_copies_apply(log: Log) -> None:
    """The open range keeps the old ones until the next range starts; other changes apply immediately."""
    shown = run("alter", "t", "--durable-on", "1").stdout
    assert "from the next range on, within seconds: durable records are on 1 of 2 disks" in shown
    assert "range" not in run("alter", "t", "--retention", "1h").stdout
    told = run("alter", "--help").stdout
    assert "next record" not in told
    assert "within seconds" in told
