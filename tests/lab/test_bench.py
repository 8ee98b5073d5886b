"""`embarcadero-proof bench`: the report has its shape and its files. The figures themselves are never a test."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from embarcadero.errors import BadValue, EmbarcaderoError, NotAvailable, UnknownTopic
from embarcadero_proof.lab import plots, report
from embarcadero_proof.lab.rows import Row, rows_for, targets_as_markdown
from embarcadero_proof.lab.run import measure
from embarcadero_proof.lab.settings import FAMILIES, FULL, QUICK, USUAL, Settings, chosen
from embarcadero_proof.lab.team import Seat, Team, alone
from embarcadero_proof.lab.trial import Trial

ROOT = Path(__file__).parent.parent.parent
BENCH = [sys.executable, "-m", "embarcadero_proof", "bench"]
PNG = b"\x89PNG"


def made_up(settings: Settings) -> list[Trial]:
    """Trials with a value for every row, and all curves."""
    curves = {f"latency_{name}": [[0.0, 0.5, 0.99], [1e-4, 2e-4, 9e-4]] for name in ("ack", "echo", "ack_sync")}
    for sweep in ("records", "sessions", "brokers"):
        curves |= {f"flat_{sweep}_{kind}": [[1.0, 10.0], [2e-6, 3e-6]] for kind in ("cpu", "memory")}
    values = {row.key: 0.7 for row in rows_for(settings)}
    return [Trial(n, {key: value + n for key, value in values.items()}, dict(curves)) for n in range(settings.trials)]


@pytest.mark.system
def test_a_quick_run_leaves_a_table_and_all_files(tmp_path: Path) -> None:
    """One real row family, through the command line: table, JSON with all trials, CSV, Markdown, pictures."""
    out = tmp_path / "out"
    done = subprocess.run(
        [*BENCH, "--quick", "--only", "latency", "--trials", "2", "--brokers", "1", "--out", str(out)],
        capture_output=True, text=True, check=False, timeout=170,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr

    assert "ack=1 / uvloop echo" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100
    saved = json.loads((out / "report.json").read_text())
    assert {"commit", "machine", "configuration", "settings", "rows", "trials"} == set(saved)
    assert saved["settings"]["brokers"] == 1
    assert all(len(trial["values"]) == len(saved["rows"]) for trial in saved["trials"])
    assert all(row["min"] <= row["median"] <= row["max"] for row in saved["rows"])
    lines = list(csv.DictReader((out / "figures.csv").read_text().splitlines()))
    assert [line["key"] for line in lines] == [row["key"] for row in saved["rows"]]
    assert all(float(line["trial_1"]) > 0 and float(line["trial_2"]) > 0 for line in lines)
    assert "| ack=1 / uvloop echo" in (out / "figures.md").read_text()
    assert all((out / name).read_bytes().startswith(PNG) for name in ("targets.png", "latency.png"))


@pytest.mark.system
def test_publishing_is_measured_in_all_orders(tmp_path: Path) -> None:
    """Every row of the publish family has a value."""
    settings = chosen(QUICK, only=("publish",), total_bytes=4 << 20, brokers=1, publishers=1)
    from rich.progress import Progress

    trials = measure(settings, Progress(disable=True))
    found = report.build(settings, trials)["rows"]

    assert not trials[0].failed
    assert [row["key"] for row in found if row["median"] is None or row["why"]] == []
    assert {"order0_1048576", "order5_to_order0_1048576"} <= {row["key"] for row in found}


@pytest.mark.system
def test_an_interrupted_run_leaves_no_process(tmp_path: Path) -> None:
    """Ctrl-C goes to the whole group; no process is left, and the user does not see a traceback."""
    command = [*BENCH, "--quick", "--only", "send", "--brokers", "1", "--out", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as bench:
        assert bench.stderr is not None
        while len(started := descendants(bench.pid)) < 5:  # a supervisor, a sequencer, a broker, and workers
            time.sleep(0.02)
        os.killpg(bench.pid, signal.SIGINT)
        told = bench.stderr.read()

    assert bench.returncode == 130
    assert "Traceback" not in told
    assert not started & set(parents())


def parents() -> dict[int, int]:
    """Running processes and their parents."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rsplit(")", 1)[1].split()[:2]
        except OSError:
            continue  # it ended meanwhile
        if state != "Z":
            found[int(path.parent.name)] = int(parent)
    return found


def descendants(pid: int) -> set[int]:
    """Processes that a process started, directly or not."""
    parent_of, found = parents(), {pid}
    while more := {child for child, parent in parent_of.items() if parent in found} - found:
        found |= more
    return found - {pid}


def test_every_picture_can_be_drawn(tmp_path: Path) -> None:
    """From a report alone, also after it was read back from its file."""
    trials = made_up(USUAL)
    saved = json.loads(json.dumps(report.build(USUAL, trials)))

    drawn = plots.draw(saved, tmp_path)

    assert [path.name for path in drawn] == ["targets.png", "latency.png", "throughput.png", "flatness.png"]
    assert all(path.read_bytes().startswith(PNG) for path in drawn)


def test_without_matplotlib_the_user_is_informed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots are an extra."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    with pytest.raises(NotAvailable, match="matplotlib") as caught:
        plots.draw(report.build(USUAL, made_up(USUAL)), tmp_path)
    assert "embarcadero[plots]" in caught.value.hint


@pytest.mark.parametrize("settings", [QUICK, USUAL, FULL], ids=["quick", "usual", "full"])
def test_rows_have_names_of_their_own_and_fit_the_table(settings: Settings) -> None:
    """Keys are unique, every family has a row, and no label is longer than its column."""
    rows = rows_for(settings)

    assert len({row.key for row in rows}) == len(rows)
    assert {row.family for row in rows} == set(FAMILIES) - {"stress"}
    assert max(len(row.what) for row in rows) <= 34


def test_every_measured_family_has_rows_by_name() -> None:
    """`--only` accepts each family, also the family that is measured by name only."""
    for family in FAMILIES:
        assert {row.family for row in rows_for(chosen(USUAL, only=(family,)))} == {family}


def test_targets_are_shown_without_idle_zeros() -> None:
    """0.50 is 0.5, 1.00 M/s is 1 M/s, and tens stay tens."""
    shown = {row.key: row.bound(row.goal) for row in rows_for(USUAL) if row.goal is not None}

    assert [shown[key] for key in ("order5_1048576_to_raw", "send", "ack_p99", "memory", "idle")] == [
        "> 0.8", "> 1 M/s", "< 0.3 ms", "< 80 MB", "< 1 %",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("less", "value", "verdict"),
    [(False, 0.4, "misses"), (False, 0.5, "holds"), (False, 0.8, "goal"), (True, 0.9, "misses"), (True, 0.8, "holds"),
     (True, 0.5, "goal")],
)  # fmt: skip
def test_a_verdict_knows_the_direction_of_a_row(less: bool, value: float, verdict: str) -> None:
    """More is better, unless less is."""
    least, goal = (0.8, 0.5) if less else (0.5, 0.8)
    row = Row(key="k", family="f", what="w", unit="ratio", at_least=least, goal=goal, less=less)

    assert row.verdict(value) == verdict
    assert (row.score(value) >= 1) == (verdict != "misses")


def test_a_failing_family_is_reported_and_the_others_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run ends with the results so far."""
    from rich.progress import Progress

    from embarcadero_proof.lab import run

    def fails(settings: Settings, trial: Trial, tell: Any) -> None:
        raise UnknownTopic("no such topic", "")

    def works(settings: Settings, trial: Trial, tell: Any) -> None:
        trial.values["idle"] = 0.02

    monkeypatch.setitem(run.MEASURES, "read", run.Family(fails, 1))
    monkeypatch.setitem(run.MEASURES, "idle", run.Family(works, 1))
    settings = chosen(QUICK, only=("read", "idle"))
    trials = measure(settings, Progress(disable=True))
    rows = {row["key"]: row for row in report.build(settings, trials)["rows"]}

    assert trials[0].failed == {"read": "no such topic"}
    assert (rows["read"]["verdict"], rows["read"]["why"]) == ("failed", "no such topic")
    assert rows["idle"]["verdict"] == "holds"


@pytest.mark.parametrize(
    "changes",
    [{"trials": 0}, {"brokers": 0}, {"publishers": -1}, {"record_bytes": 0}, {"batch_bytes": (1 << 40,)},
     {"only": ("speed",)}, {"total_bytes": 1}],
    ids=str,
)  # fmt: skip
def test_invalid_settings_are_refused(changes: dict[str, Any]) -> None:
    """By name, before anything is started."""
    with pytest.raises(BadValue):
        chosen(USUAL, **changes)


def test_quick_and_full_exclude_each_other() -> None:
    """A caller's mistake has exit code 2."""
    done = subprocess.run([*BENCH, "--quick", "--full"], capture_output=True, text=True, check=False)

    assert (done.returncode, "exclude" in done.stderr) == (2, True)


def add(seat: Seat, first: int) -> int:
    """Work for a worker."""
    seat.meet(first)
    return first + 1


def fail(seat: Seat, typed: bool) -> None:
    """Work that fails."""
    raise UnknownTopic("gone", "hint") if typed else ZeroDivisionError("oops")


def vanish(seat: Seat) -> None:
    """A worker that is killed."""
    os.kill(os.getpid(), signal.SIGKILL)


def test_workers_meet_and_answer() -> None:
    """Values come in the order in which the workers were added."""
    with Team() as team:
        for number in (10, 20):
            team.add(add, number)

        assert team.meet() == [10, 20]
        assert team.results() == [11, 21]


def test_a_worker_that_fails_or_dies_is_an_error_and_not_a_wait() -> None:
    """Its error arrives unchanged; a worker that vanished is named."""
    with pytest.raises(UnknownTopic, match="gone"):
        alone(fail, True)
    with pytest.raises(EmbarcaderoError, match="ZeroDivisionError: oops"):
        alone(fail, False)
    with pytest.raises(EmbarcaderoError, match="ended too early"):
        alone(vanish)


def test_the_docs_have_the_targets_of_the_code() -> None:
    """docs/performance.md shows the table that the code has."""
    assert targets_as_markdown() in (ROOT / "docs" / "performance.md").read_text()
