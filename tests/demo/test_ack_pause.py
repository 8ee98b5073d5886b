"""How the demo measures a pause of acks."""

from __future__ import annotations

import pytest

from embarcadero.demo.durable import ObservedTakeover, longest_pause


def test_the_pause_begins_with_the_last_ack_before_the_kill() -> None:
    """Acks in flight count as acks; the longest time between two of them is the pause."""
    assert longest_pause(5.0, [4.9, 5.01, 5.4, 5.45, 1.0]) == pytest.approx(0.39)
    assert longest_pause(5.0, [4.0, 5.5]) == pytest.approx(1.5)
    assert longest_pause(5.0, [5.25]) == pytest.approx(0.25)
    assert longest_pause(5.0, []) == 0.0


def test_a_takeover_in_words() -> None:
    """The text on the screen."""
    found = ObservedTakeover(7, "sequencer:1", 3, 0.0421)
    assert str(found) == "sequencer:1 took over in epoch 3; acks paused for 42 ms"
