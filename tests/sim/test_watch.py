"""A run of many seeds reports its progress, and names failing seeds immediately."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from embarcadero_proof.sim import watch
from embarcadero_proof.sim.watch import LINE_EVERY_S, Watch


class _Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_without_a_terminal_there_is_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    """Seeds done, events and simulated time per second, on stderr, when enough time has passed; never on stdout."""
    clock = _Clock()
    with Watch(Console(), 3, clock=clock) as seen:
        clock.now += 1
        seen.seed_done(7, 500, 60_000_000, "")
        assert capsys.readouterr().err == ""
        clock.now += LINE_EVERY_S - 1
        seen.seed_done(8, 500, 40_000_000, "")
    out, err = capsys.readouterr()
    assert err == "2 of 3 seeds, all hold, 100 events/s, 10 x real time\n"
    assert out == ""


def test_a_failing_seed_is_named_immediately(capsys: pytest.CaptureFixture[str]) -> None:
    """No time has passed, and yet it is reported."""
    with Watch(Console(), 2, clock=_Clock()) as seen:
        seen.seed_done(9, 500, 1_000_000, "P1: a batch is gone")
        assert capsys.readouterr().err == "seed 9 fails: P1: a batch is gone\n"
        assert seen.facts().startswith("1 failed")


def test_on_a_terminal_there_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar counts seeds, and no lines are left behind, however long it takes."""
    monkeypatch.setattr(watch, "LINE_EVERY_S", 0.0)
    screen = io.StringIO()
    with Watch(Console(file=screen, force_terminal=True, width=120), 2) as seen:
        seen.seed_done(1, 500, 1_000_000, "")
    assert "1/2" in screen.getvalue()
    assert "of 2 seeds" not in screen.getvalue()
