"""What is wrong with a configuration: where it came from, what is wrong, what would be right."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import NamedTuple

from embarcadero.errors import BadConfiguration


class Problem(NamedTuple):
    """One thing that is wrong."""

    where: str  # file:line, a variable, a flag
    key: str  # empty when it is about all of a source
    what: str
    right: str

    def __str__(self) -> str:
        subject = f"{self.where}: {self.key}" if self.key and self.key != self.where else self.where
        return f"{subject}: {self.what}; {self.right}"


def as_error(problems: Sequence[Problem]) -> BadConfiguration:
    """All problems in one error."""
    if len(problems) == 1:
        message = str(problems[0])
    else:
        message = "\n".join([f"the configuration has {len(problems)} problems:", *(f"  {one}" for one in problems)])
    return BadConfiguration(message, "`embarcadero config reference` lists every key")


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name that a wrong one most likely means."""
    return next(iter(get_close_matches(name, list(known), n=1, cutoff=cutoff)), None)
