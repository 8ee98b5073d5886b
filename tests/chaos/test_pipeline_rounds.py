"""The rounds with operator failures: the differences that the final checks find, and how a dead driver is restarted."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest

from embarcadero.errors import ClusterError
from embarcadero_proof.chaos import pipeline_rounds as rounds
from embarcadero_proof.chaos.pipeline_rounds import differences


def table(*rows: tuple[int, int, str]) -> pa.Table:
    """Rows of id, file and stamp."""
    ids, files, stamps = zip(*rows, strict=True)
    return pa.table({"id": ids, "file": files, "stamp": stamps})


def test_each_kind_of_difference_is_found() -> None:
    """Rows that are missing or duplicated, two starts in one micro-batch, rows that a reader saw and that are gone."""
    whole = table((0, 0, "1.1"), (1, 0, "1.1"), (2, 1, "2.1"))
    seen = Counter({(0, "1.1"): 2, (1, "2.1"): 1})
    assert differences(whole, seen, 3) == []
    assert differences(whole, seen, 4) == ["3 rows, 3 of them different, instead of 4"]
    twice = table((0, 0, "1.1"), (1, 0, "1.1"), (1, 0, "1.1"))
    assert "3 rows, 2 of them different, instead of 3" in differences(twice, seen, 3)
    mixed = table((0, 0, "1.1"), (1, 0, "1.2"), (2, 1, "2.1"))
    assert "files [0] have rows of several starts of the query" in differences(mixed, seen, 3)
    seen[0, "1.0"] = 1
    assert differences(whole, seen, 3) == ["the reader has seen rows other than those in the topic"]


class Brief(rounds.Driver):
    """A driver that ends by itself immediately."""

    def start(self) -> None:
        self.lives += 1
        self._process = subprocess.Popen([sys.executable, "-c", ""])
        self._process.wait()


def test_a_driver_that_dies_repeatedly_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless a round completes in between: then it works."""
    monkeypatch.setattr(rounds, "_DEAD_S", 0.0)
    driver = Brief(tmp_path, tmp_path / "plan.json")
    driver.start()
    for _ in range(3):
        for _ in range(5):
            driver.check()
        driver.round_over()
    assert driver.lives == 16
    for _ in range(5):
        driver.check()
    with pytest.raises(ClusterError, match="does not stay alive"):
        driver.check()
