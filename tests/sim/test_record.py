"""Results of seeds are recorded: a run continues where it stopped, and several runs add up."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from embarcadero.errors import BadValue, Corrupt
from embarcadero_proof.sim import run
from embarcadero_proof.sim.checkers.ledger import Violation
from embarcadero_proof.sim.record import Record, code_version, load, newest
from embarcadero_proof.sim.reports import RunReport, SeedReport, summary


def _report(seed: int, **changes: object) -> SeedReport:
    report = SeedReport(
        seed=seed, trace="00", violations=[], failures=[], simulated_us=100_000_000, cpu_s=0.5, events=5_000, sent=10,
        stored=8, failed=1, unknown=1, delivered=20, tails=3, faults={"broker-zombie": 2}, primitives=7,
        rest_us=60_000_000,
    )  # fmt: skip
    return msgspec.structs.replace(report, **changes)


def test_a_stopped_run_continues_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C after two seeds; the same command again runs the other three, and all five are in the report."""
    ran: list[int] = []

    def seeds(left: list[int], _jobs: int) -> object:
        for seed in left:
            if len(ran) == 2 and not tmp_path.joinpath("again").exists():
                raise KeyboardInterrupt
            ran.append(seed)
            yield _report(seed)

    monkeypatch.setattr(run, "run_seeds", seeds)
    results, report = tmp_path / "results", tmp_path / "report.json"
    run.run_cli(0, 5, results=results, report=report, json=True)
    assert msgspec.json.decode(report.read_bytes(), type=RunReport).seeds == 2
    tmp_path.joinpath("again").touch()
    assert run.run_cli(0, 5, results=results, report=report, json=True) == 0
    assert ran == [0, 1, 2, 3, 4]
    total = msgspec.json.decode(report.read_bytes(), type=RunReport)
    assert (total.seeds, total.first, total.last, total.operations) == (5, 0, 5, 5 * 33)
    assert total.commits == [code_version()]
    assert len(list(load(newest(results)))) == 5


def test_another_commit_starts_again_unless_a_file_is_named(tmp_path: Path) -> None:
    """In a folder each version has its own file; a named file is continued."""
    first = Record(tmp_path, "aaa")
    first.add(_report(1))
    assert Record(tmp_path, "bbb").missing(0, 3) == [0, 1, 2]
    named = Record(tmp_path / "aaa.jsonl", "bbb")
    assert named.missing(0, 3) == [0, 2]
    named.add(_report(2))
    assert summary(named.all(), 1.0).commits == ["aaa", "bbb"]


def test_an_incomplete_line_does_not_count(tmp_path: Path) -> None:
    """A killed run leaves at most one at the end; it is cut, and that seed is run again."""
    record = Record(tmp_path, "aaa")
    record.add(_report(1))
    with record.path.open("ab") as file:
        file.write(b'{"seed": 2, "tra')
    again = Record(tmp_path, "aaa")
    assert again.missing(1, 3) == [2]
    again.add(_report(2))
    assert [report.seed for report in load(again.path)] == [1, 2]
    again.path.write_bytes(b"what is this\n")
    with pytest.raises(Corrupt, match="no result of a seed"):
        list(load(again.path))


def test_the_report_has_a_verdict_per_promise_and_the_speed(tmp_path: Path) -> None:
    """P5 counts where a process may have been deposed, P6 where records were durable; the others are distinguished."""
    broken = [Violation("P1", 5, "a batch is gone")]
    total = summary([_report(1), _report(2, violations=broken), _report(3, faults={}, durable=True)], 1.0)
    assert total.failing == {2: "P1: a batch is gone"}
    verdicts = {promise: (verdict.checked, verdict.broken) for promise, verdict in total.verdicts.items()}
    assert (verdicts["P1"], verdicts["P5"], verdicts["P6"], verdicts["P8"]) == ((3, 1), (2, 0), (1, 0), (3, 0))
    assert (total.events_per_s, total.times_real, total.times_real_busy) == (10_000, 200, 80)
    screen = Console(record=True, width=100)
    screen.print(total.table())
    assert "broken by 1 of 3 seeds" in screen.export_text()
    with pytest.raises(BadValue, match="no results"):
        newest(tmp_path)
