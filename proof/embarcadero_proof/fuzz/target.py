"""What is fuzzed: a target takes bytes and either succeeds or raises a typed error.

A target knows real inputs (made by our own encoders), how to change them so that deep code is reached, and how to run
one. Everything that is neither success nor an EmbarcaderoError is a finding; so is too much memory, and no end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from embarcadero.errors import EmbarcaderoError
from embarcadero.limits import KIB, MIB

INPUT_BYTES_MAX = 256 * KIB
"""No input is longer: what matters is in the structure, and short inputs are quick."""
HANG_CPU_S = 5.0
"""An input that takes more processor time than this hangs."""
MEMORY_BASE_BYTES = 8 * MIB
MEMORY_FACTOR = 64
"""An input of n bytes may take MEMORY_FACTOR * n + MEMORY_BASE_BYTES, and what its target's own limits allow."""

Inputs = list[bytes]
Mutate = Callable[[bytes, Random, Inputs], bytes]
Mend = Callable[[bytes, Random], bytes]


class Disagreement(Exception):
    """Two ways that must agree did not, or something wrong was served as right."""


class Hang(BaseException):
    """An input took too much processor time. Not an Exception: no handler on the way may swallow it."""


@dataclass(frozen=True, slots=True)
class Target:
    """One decoder, or one recovery. `run` raises EmbarcaderoError to refuse an input."""

    name: str
    what: str
    corpus: Callable[[], Inputs]
    run: Callable[[bytes], object]
    mutate: Mutate | None = None  # None: bytes are changed without knowing what they are
    mend: Mend | None = None  # makes lengths, counts and checksums fit again
    words: tuple[bytes, ...] = ()  # what such inputs are made of
    memory_bytes: int = 0  # what its own limits allow for any input
    archive: bool = False  # an input is a folder of files (archive.py)

    def allowed_bytes(self, size: int) -> int:
        """How much memory an input of this size may take at its peak."""
        return MEMORY_FACTOR * size + MEMORY_BASE_BYTES + self.memory_bytes


def agree(holds: bool, what: str) -> None:
    """Disagreement, unless something holds."""
    if not holds:
        raise Disagreement(what)


def told(error: EmbarcaderoError) -> tuple[str, str]:
    """An error as something that two runs can be compared by."""
    return type(error).__name__, error.message
