"""The cost of a kill, measured on real processes: a few times, to see that the measure works and the checkers agree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from embarcadero.errors import BadValue
from embarcadero_proof.chaos.kills import Settings, run_cli

pytestmark = pytest.mark.system


@pytest.mark.parametrize(("role", "kills", "replicas"), [("hand-over", 0, 1), ("replica", 2, 3)])
def test_each_time_is_measured_and_all_is_checked(role: str, kills: int, replicas: int, tmp_path: Path) -> None:
    """Pauses of both times, calm moments to compare with, and every acked batch is there."""
    report = tmp_path / "kills.json"
    settings = Settings(role=role, times=2, brokers=1, replicas=replicas, apart_s=0.5, report=report)
    assert run_cli(settings, json_out=True) == 0
    found = json.loads(report.read_text())
    assert (found["good"], found["kills"], found["brokers"], len(found["pauses_ms"])) == (True, kills, 1, 2)
    assert min(found["pauses_ms"]) > 0
    assert min(found["waits_ms"]) > 0
    assert len(found["waits_ms"]) == 2
    assert found["calm_ms"]
    assert found["wait_calm_ms"]
    assert f"--brokers 1 --replicas {replicas}" in found["command"]


def test_unknown_roles_are_refused(tmp_path: Path) -> None:
    """The error lists the known roles. Killing too many replicas for durable acks is refused, too."""
    with pytest.raises(BadValue, match="no role 'captain'"):
        run_cli(Settings(role="captain", report=tmp_path / "kills.json"), json_out=True)
    with pytest.raises(BadValue, match="can't continue without"):
        run_cli(Settings(role="replica", replicas=2, report=tmp_path / "kills.json"), json_out=True)
