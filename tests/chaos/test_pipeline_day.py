"""Supervision of the driver's process in the run with kills."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from embarcadero.errors import ClusterError
from embarcadero_proof.chaos import pipeline_day as kills


class Brief(kills.Driver):
    """A driver that ends by itself immediately."""

    def start(self) -> None:
        self.starts += 1
        if self.starts > 3:
            raise ClusterError("the driver does not stay alive", "see its log")
        self._process = subprocess.Popen([sys.executable, "-c", ""], text=True)
        self._process.wait()


def test_a_driver_that_ends_by_itself_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a delay, in which others may start it. Each restart is reported, and their number is limited."""
    told: list[str] = []
    pipeline: Any = SimpleNamespace(tell=told.append)
    driver = Brief(pipeline, tmp_path)
    driver.start()
    driver.check()
    assert (driver.starts, told) == (1, []), "the process that killed it restarts it"
    monkeypatch.setattr(kills, "_DEAD_S", 0.0)
    for _ in range(2):
        driver.check()
    assert driver.starts == 3
    assert len(told) == 2
    assert "by itself" in told[0]
    with pytest.raises(ClusterError, match="does not stay alive"):
        driver.check()
