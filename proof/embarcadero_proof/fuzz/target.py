"""The definition of a target: it takes bytes, and either succeeds or raises a typed error.

A target has real inputs (made by our own encoders), changes to them that reach deep code, and a function that runs one.
Every result except success or an EmbarcaderoError is a finding; so are too much memory and a hang.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from embarcadero.errors import EmbarcaderoError
from embarcadero.limits import KIB, MIB

INPUT_BYTES_MAX = 256 * KIB
"""The largest input: only structure matters, and short inputs are fast."""
HANG_CPU_S = 5.0
"""An input that takes more processor time than this hangs."""
MEMORY_BASE_BYTES = 8 * MIB
MEMORY_FACTOR = 64
"""An input of n bytes may take MEMORY_FACTOR * n + MEMORY_BASE_BYTES, plus the limits of its target."""

Inputs = list[bytes]
Mutate = Callable[[bytes, Random, Inputs], bytes]
Mend = Callable[[bytes, Random], bytes]


class Disagreement(Exception):
    """Two results that must agree differ, or wrong data was served as right."""


class Hang(BaseException):
    """An input took too much processor time. Not an Exception: no handler in between may catch it."""


@dataclass(frozen=True, slots=True)
class Target:
    """One decoder, or one recovery. `run` raises EmbarcaderoError to refuse an input."""

    name: str
    what: str
    corpus: Callable[[], Inputs]
    run: Callable[[bytes], object]
    mutate: Mutate | None = None  # None: inputs are changed as plain bytes
    mend: Mend | None = None  # corrects lengths, counts and checksums
    words: tuple[bytes, ...] = ()  # typical parts of such inputs
    memory_bytes: int = 0  # memory that its own limits allow for any input
    archive: bool = False  # an input is a folder of files (archive.py)

    def allowed_bytes(self, size: int) -> int:
        """Return the most memory that an input of this size may take."""
        return MEMORY_FACTOR * size + MEMORY_BASE_BYTES + self.memory_bytes


def agree(holds: bool, what: str) -> None:
    """Raise Disagreement unless a condition holds."""
    if not holds:
        raise Disagreement(what)


def comparable(error: EmbarcaderoError) -> tuple[str, str]:
    """Return an error in a form that two runs can be compared by."""
    return type(error).__name__, error.message
