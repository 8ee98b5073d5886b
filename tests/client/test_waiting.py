"""Waiting for a change: a wait that times out leaves nothing behind."""

from __future__ import annotations

import threading
import time

import pytest

from embarcadero.client import results
from embarcadero.client.results import Waitable


def test_nothing_accumulates_while_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither waits that time out nor the slices of a long one."""
    monkeypatch.setattr(results, "_SLICE_S", 0.001)
    idle = Waitable()
    for timeout in (0, 0.0005, 0.02):
        assert not idle.wait_for(lambda: False, timeout)
    assert idle._waiters == []


def test_other_waits_continue_when_one_times_out() -> None:
    """Each removes only its own entry, and a change wakes all the others."""
    shared, changed = Waitable(), False
    found: list[bool] = []
    threads = [
        threading.Thread(target=lambda: found.append(shared.wait_for(lambda: changed, 20)), daemon=True)
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    while len(shared._waiters) < 3:
        time.sleep(0.001)
    assert not shared.wait_for(lambda: False, 0.01)
    with shared.lock:
        changed = True
        shared.notify_all()
    for thread in threads:
        thread.join(10)
    assert found == [True] * 3
