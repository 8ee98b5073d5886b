"""A short part of the matrix, on real processes: three cases of about three seconds. `make chaos` runs all of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.progress import Progress

from embarcadero.errors import PortInUse
from embarcadero.node.local import runs
from embarcadero_proof.chaos import matrix
from embarcadero_proof.chaos.case import Performance
from embarcadero_proof.chaos.cases import find

pytestmark = pytest.mark.system


@pytest.mark.parametrize("name", ["kill-any", "mute-broker", "zombie-replica"])
def test_promises_are_kept(name: str, tmp_path: Path) -> None:
    """Every acked record is there, once, in order, on enough disks; every call ended; no process remains."""
    performance = Performance(find([name])[0], tmp_path, seconds=3.0, calm_s=0.3)
    outcome = performance.run()
    print(f"{name}: {outcome.judgement.acked} acked, {outcome.judgement.faults}, {outcome.seconds} s")
    assert outcome.judgement.problems == []
    assert outcome.judgement.faults
    assert not [pid for pid in performance.cluster.ever if runs(pid)]


def test_an_impossible_case_fails_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error is in the report, and the next case runs."""

    def run(performance: Performance) -> None:
        raise PortInUse(f"{performance.case.name} finds its port taken")

    monkeypatch.setattr(Performance, "run", run)
    settings = matrix.Settings(cases=tuple(find(["calm", "kill-any"])), report=tmp_path / "matrix.json")
    found = matrix.run(settings, Progress(disable=True))
    assert not found["good"]
    assert [case["problems"] for case in found["cases"]] == [
        ["PortInUse: calm finds its port taken [docs/errors.md#portinuse]"],
        ["PortInUse: kill-any finds its port taken [docs/errors.md#portinuse]"],
    ]  # fmt: skip
