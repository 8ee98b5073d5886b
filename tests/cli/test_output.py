"""The cluster that a command works with."""

from __future__ import annotations

from pathlib import Path

import pytest

from embarcadero.cli.output import find_brokers
from embarcadero.errors import NotRunning


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in ("EMBARCADERO_BROKERS", "EMBARCADERO_DATA_DIR", "EMBARCADERO_CONFIG"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.chdir(tmp_path)


def test_a_folder_without_a_running_cluster_never_means_another_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`topic delete x --data-dir a` deleted x of the cluster that happened to listen on port 9092."""
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(NotRunning):
            find_brokers(None, folder)
    monkeypatch.setenv("EMBARCADERO_BROKERS", "127.0.0.1:9092")
    with pytest.raises(NotRunning):
        find_brokers(None, tmp_path)
    assert find_brokers("other:1", tmp_path) == ["other:1"]
    monkeypatch.delenv("EMBARCADERO_BROKERS")
    monkeypatch.setenv("EMBARCADERO_DATA_DIR", str(tmp_path))
    with pytest.raises(NotRunning):
        find_brokers(None, None)


def test_without_a_folder_the_usual_address_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new user who started a cluster elsewhere on this machine reaches it."""
    assert find_brokers(None, None) == ["127.0.0.1:9092"]
    monkeypatch.setenv("EMBARCADERO_BROKERS", "one:1,two:2")
    assert find_brokers(None, None) == ["one:1", "two:2"]
