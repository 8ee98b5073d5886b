"""A short part of the matrix, on real processes: three cases of about three seconds. `make chaos` runs all of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from embarcadero.chaos.case import Performance
from embarcadero.chaos.cases import find
from embarcadero.chaos.cluster import runs

pytestmark = pytest.mark.system


@pytest.mark.parametrize("name", ["kill-any", "mute-broker", "zombie-replica"])
def test_promises_are_kept(name: str, tmp_path: Path) -> None:
    """Everything acked is there, once, in order, on enough disks; every call ended; no process is left."""
    performance = Performance(find([name])[0], tmp_path, seconds=3.0, calm_s=0.3)
    outcome = performance.run()
    print(f"{name}: {outcome.judgement.acked} acked, {outcome.judgement.faults}, {outcome.seconds} s")
    assert outcome.judgement.problems == []
    assert outcome.judgement.faults
    assert not [pid for pid in performance.cluster.ever if runs(pid)]
