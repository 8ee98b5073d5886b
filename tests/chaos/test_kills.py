"""What a kill costs, measured on real processes: few times, to see that the measure works and the checkers agree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from embarcadero.chaos.kills import Settings, run_cli
from embarcadero.errors import BadValue

pytestmark = pytest.mark.system


@pytest.mark.parametrize(("role", "kills"), [("hand-over", 0), ("replica", 2)])
def test_each_time_is_measured_and_all_is_checked(role: str, kills: int, tmp_path: Path) -> None:
    """Pauses of both times, calm moments to compare with, and every acked batch is there."""
    report = tmp_path / "kills.json"
    assert run_cli(Settings(role=role, times=2, brokers=1, apart_s=0.5, report=report), json_out=True) == 0
    found = json.loads(report.read_text())
    assert (found["good"], found["kills"], found["brokers"], len(found["pauses_ms"])) == (True, kills, 1, 2)
    assert min(found["pauses_ms"]) > 0
    assert found["calm_ms"]
    assert "--brokers 1" in found["command"]


def test_roles_that_nobody_plays(tmp_path: Path) -> None:
    """Refused, with those that there are."""
    with pytest.raises(BadValue, match="no role 'captain'"):
        run_cli(Settings(role="captain", report=tmp_path / "kills.json"), json_out=True)
