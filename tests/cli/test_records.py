"""publish: lines of a file become records, also while the cluster has no room."""

from __future__ import annotations

from typing import Any

import pytest

from embarcadero.cli.records import _Sent
from embarcadero.errors import Backpressure


class Crowded:
    """A publisher into a cluster without room: a call that brings time is served."""

    def __init__(self, reasons: list[str]) -> None:
        self._reasons = reasons
        self.taken: list[bytes] = []

    def send(self, value: bytes, *, key: bytes | None, timeout: float | None = None) -> Any:
        if timeout is None and self._reasons:
            raise Backpressure(self._reasons.pop(0), "try again later")
        self.taken.append(value)
        return None


def test_publish_waits_for_room_and_reports_each_reason_once(capsys: pytest.CaptureFixture[str]) -> None:
    """It ended in the middle of a file; without --session nobody knew where to go on."""
    publisher, sent = Crowded(["disk full", "disk full", "no memory"]), _Sent()
    for number in range(5):
        sent.take(publisher.send, b"%d" % number, key=None)
    assert publisher.taken == [b"0", b"1", b"2", b"3", b"4"]
    assert capsys.readouterr().err.splitlines() == ["waiting for room: disk full", "waiting for room: no memory"]
