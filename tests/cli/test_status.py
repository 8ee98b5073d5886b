"""The part of `status` about topics when brokers can't report everything about them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from embarcadero.cli.cluster import _topics_of
from embarcadero.errors import Corrupt, Retriable
from embarcadero.types import Tail


class Log:
    """Three topics; asking for the end of the second one fails."""

    def __init__(self, problem: Exception) -> None:
        self.problem = problem

    def topics(self, timeout: float) -> list[Any]:
        return [SimpleNamespace(name=name, order=5, partitions=1) for name in "abc"]

    def tail(self, name: str, timeout: float) -> Tail:
        if name == "b":
            raise self.problem
        return Tail(3, 20, 200)

    def readers(self, name: str, timeout: float) -> list[Any]:
        return []

    def describe(self, name: str, timeout: float) -> Any:
        return SimpleNamespace(tier=None)


@pytest.mark.parametrize(
    ("problem", "ends", "words"),
    [
        (Corrupt("no good copy of index 0", "look"), [20, None, 20], "topic b: no good copy of index 0"),
        (Retriable("not now", "wait"), [20, None], "no broker answers for the ends of topics: not now"),
    ],
)
def test_a_topic_whose_start_cannot_be_read_hides_no_other(
    problem: Exception, ends: list[int | None], words: str
) -> None:
    """It is named, and the others are shown: `status` is where an operator finds the problem."""
    log: Any = Log(problem)
    topics, silence = _topics_of(log, set())
    assert [topic["index"] for topic in topics] == ends
    assert silence == words
