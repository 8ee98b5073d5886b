"""The engine that writes the files of `up --tier`: as configured, as installed, and by the size of the backlog."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from typer.testing import CliRunner

from embarcadero.cli.main import app
from embarcadero.client.api.sync_log import Log
from embarcadero.config import load
from embarcadero.errors import NotAvailable, OutcomeUnknown
from embarcadero.spark import processes, tiering
from embarcadero.spark.tiering import chosen_kind, engine_of
from embarcadero.tier.job import AutoEngine, EngineKind, ProcessEngine, SpanWork, TierJob, TierJobs
from embarcadero.tier.parquet import FileFacts, FileSpan
from embarcadero.tier.storage import TierSettings
from tests.tier.test_many import Told
from tests.tier.truth import Truth


def kind(**keys: str) -> EngineKind:
    return chosen_kind(load(None, {f"tier.{key}": value for key, value in keys.items()}).tier)


def without(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Have PySpark, or Java, not installed."""
    if what == "PySpark":
        monkeypatch.setattr(processes.util, "find_spec", lambda _name: None)
        return

    def missing() -> Path:
        raise NotAvailable("Spark needs Java 17 or newer, and none is installed", "install Java 17 or 21")

    monkeypatch.setattr(processes, "find_java", missing)


def test_spark_is_the_default_where_it_is_installed() -> None:
    assert kind() is kind(engine="spark") is kind(master="local[2]") is EngineKind.SPARK
    assert kind(engine="auto") is EngineKind.AUTO
    assert kind(engine="process") is kind(engine="process", master="local[2]") is EngineKind.PROCESS


@pytest.mark.parametrize("what", ["PySpark", "Java"])
def test_without_spark(monkeypatch: pytest.MonkeyPatch, what: str, tmp_path: Path) -> None:
    """The process takes over, unless Spark was requested by name: then `up` starts nothing."""
    without(monkeypatch, what)
    assert kind() is kind(engine="auto") is kind(engine="process") is EngineKind.PROCESS
    for keys, said in (({"engine": "spark"}, "tier.engine is spark"), ({"master": "local[2]"}, "tier.master is local")):
        with pytest.raises(NotAvailable, match=f"{said}.*{what}") as caught:
            kind(**keys)
        assert "set tier.engine to process" in caught.value.hint
    environ = {"EMBARCADERO_TIER_ENGINE": "spark"}
    done = CliRunner().invoke(app, ["up", "--tier", "--data-dir", str(tmp_path / "new")], env=environ)
    assert done.exit_code == 1
    assert what in done.stderr
    assert not (tmp_path / "new").exists()


def test_a_version_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, why in (("3.5.8", "no Python data sources"), ("5.0.0", "works with 4.0 to 4.x")):
        monkeypatch.setattr(processes.metadata, "version", lambda _name, found=version: found)
        with pytest.raises(NotAvailable, match=why):
            kind(engine="spark")
        assert kind() is EngineKind.PROCESS


class Noted:
    """An engine that records its calls."""

    def __init__(self, name: str, told: list[str], idle: list[float | None] | None = None) -> None:
        self.name, self._told, self._idle = name, told, idle or []

    def write(self, works: list[SpanWork]) -> Iterable[FileFacts]:
        self._told.append(f"{self.name} writes {len(works)}")
        return []

    def release_idle(self) -> float | None:
        self._told.append(f"{self.name} may rest")
        return self._idle.pop(0) if self._idle else None

    def close(self) -> None:
        self._told.append(f"{self.name} ends")


def work(size: int) -> SpanWork:
    span = FileSpan(lane=0, start=0, stop=1, start_seq=0, stop_seq=1)
    return SpanWork(topic="t", span=span, location="l", epoch=1, properties={}, waiting=size)


def test_auto_leaves_large_amounts_to_spark() -> None:
    """`status` reports which of the two it was."""
    told: list[str] = []
    auto = AutoEngine(Noted("spark", told), Noted("process", told), limit_bytes=100)
    assert auto.name == "auto"
    names = []
    for waiting in ([100, 100], [101, 101], [1]):
        auto.write([work(size) for size in waiting])
        names.append(auto.name)
    assert names == ["process", "spark", "process"]
    assert auto.release_idle() is None
    auto.close()
    assert told == ["process writes 2", "spark writes 2", "process writes 1", "spark may rest", "spark ends"]


def test_a_job_reports_its_backlog_and_its_engine(
    log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole backlog counts, however little one cycle takes.

    The engine's name reaches the store with each commit.
    """
    monkeypatch.setattr("embarcadero.tier.job.TIER_FILES_MAX", 1)
    log.create_topic("sized", order=5)
    truth, seen = Truth(log, "sized", TierSettings.local(tmp_path, file_bytes=8_192)), list[int]()
    truth.publish(200)

    class Watching(ProcessEngine):
        def write(self, works: list[SpanWork]) -> Any:
            seen.append(works[0].waiting)
            return super().write(works)

    engine = AutoEngine(Noted("spark", []), Watching(log))
    with TierJob(log, "sized", truth.settings, engine, holder="a") as job:
        assert log.describe("sized").tier.engine == "auto"  # type: ignore[union-attr]
        assert sum(cycle.rows for cycle in job.run_once()) == 200
    assert log.describe("sized").tier.engine == "process"  # type: ignore[union-attr]
    assert len(seen) > 3
    assert seen[0] > 200 * 160 > seen[-1]
    assert truth.problems() == []
    made = engine_of(EngineKind.AUTO, log, load(None, {}).tier)
    assert (made.name, made.release_idle()) == ("auto", None)
    made.close()


def test_spark_that_died_is_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever error a library raises when its Java process is gone: the job continues with a new process."""
    begun, ended = list[str](), list[object]()

    def session(*_: object) -> str:
        begun.append(f"session {len(begun)}")
        return begun[-1]

    def dies(spark: object, *_: object) -> None:
        raise ConnectionRefusedError(f"of {spark}")

    monkeypatch.setattr("embarcadero.spark.processes.session", session)
    monkeypatch.setattr("embarcadero.spark.processes.end_session", ended.append)
    monkeypatch.setattr(tiering, "_written", dies)
    engine = tiering.SparkEngine("127.0.0.1:9", idle_s=60, clock=lambda: 0.0)
    for number in range(2):
        with pytest.raises(OutcomeUnknown, match=f"does not answer: ConnectionRefusedError: of session {number}"):
            engine.write([work(1)])
        assert (len(begun), ended) == (number + 1, begun)
    assert engine.release_idle() is None
    monkeypatch.setattr(tiering, "_written", lambda *_: [])
    assert engine.write([work(1)]) == []
    assert engine.release_idle() == 60
    engine.close()
    engine.close()
    assert ended == ["session 0", "session 1", "session 2"]


def test_an_engine_may_rest_between_two_polls(log: Log, tmp_path: Path) -> None:
    """However long it is to the next poll; at the end it ends."""
    told: list[str] = []
    log.create_topic("resting", order=5)
    settings = TierSettings.local(tmp_path, interval_s=3_600.0, topics=["resting"])
    stop = Event()

    class Stopping(Noted):
        def release_idle(self) -> float | None:
            found = super().release_idle()
            if found is None:
                stop.set()
            return found

    engine = Stopping("spark", told, [0.01, 0.01])
    TierJobs(log, settings, Told(), holder="rest", engine=engine).follow(stop)
    assert told == ["spark may rest"] * 3 + ["spark ends"]
