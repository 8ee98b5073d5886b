"""Run one input: record its error and its memory, and stop it if it hangs."""

from __future__ import annotations

import re
import signal
import traceback
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final, NamedTuple

import pyarrow as pa

from embarcadero.errors import EmbarcaderoError
from embarcadero_proof.fuzz.target import HANG_CPU_S, Disagreement, Hang, Target

SUCCESS: Final = "success"
REFUSED: Final = "refused"
FINDINGS: Final = ("untyped", "disagreement", "memory", "hang", "crash")
_SHOWN_CHARS: Final = 100
_NUMBERS = re.compile(r"-?\d\d+|'[^']*'|\"[^\"]*\"")


class Verdict(NamedTuple):
    """The result of an input. `outcome` is equal for inputs with similar ends; `where` is our innermost line."""

    kind: str
    outcome: str
    where: str = ""
    story: str = ""
    peak_bytes: int = 0

    @property
    def finding(self) -> bool:
        """Whether this result is a finding."""
        return self.kind in FINDINGS

    @property
    def key(self) -> tuple[str, str, str]:
        """Equal for inputs with the same finding."""
        return self.kind, self.outcome.partition(":")[0], self.where


def _alarm(_number: int, _frame: FrameType | None) -> None:
    raise Hang(f"more than {HANG_CPU_S} s of processor time")


@contextmanager
def watched() -> Iterator[None]:
    """Raise Hang for inputs that hang while the block runs."""
    before = signal.signal(signal.SIGPROF, _alarm)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def judge(target: Target, data: bytes, measure: bool = True) -> Verdict:
    """Run one input. `measure`: also measure its memory, which takes longer."""
    arrow = pa.default_memory_pool()
    arrow_before, arrow_most = arrow.bytes_allocated(), arrow.max_memory()
    if measure:
        tracemalloc.start()
    try:
        verdict = _run(target, data)
        peak = tracemalloc.get_traced_memory()[1] if measure else 0
    finally:
        if measure:
            tracemalloc.stop()
    if arrow.max_memory() > arrow_most:
        peak += arrow.max_memory() - arrow_before
    allowed = target.allowed_bytes(len(data))
    if peak > allowed and not verdict.finding:
        story = f"{peak} bytes for an input of {len(data)}; {allowed} are allowed; its result was: {verdict.outcome}"
        return Verdict("memory", f"too much memory: {verdict.outcome}", "", story, peak)
    return verdict._replace(peak_bytes=peak)


def _run(target: Target, data: bytes) -> Verdict:
    try:
        signal.setitimer(signal.ITIMER_PROF, HANG_CPU_S)
        found = target.run(data)
        return Verdict(SUCCESS, f"{SUCCESS}: {_alike(str(found))}")
    except EmbarcaderoError as error:
        if starved := _starved(error):
            return _finding("memory", starved)
        return Verdict(REFUSED, f"{type(error).__name__}: {_alike(error.message)}")
    except Disagreement as error:
        return _finding("disagreement", error)
    except Hang as error:
        return _finding("hang", error)
    except Exception as error:
        return _finding("memory" if isinstance(error, MemoryError) else "untyped", error)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _alike(text: str) -> str:
    """Replace the parts of a text that differ from input to input."""
    return _NUMBERS.sub("_", text)[:_SHOWN_CHARS]


def _starved(error: BaseException) -> MemoryError | None:
    """Return a MemoryError behind a typed error: the code asked for more memory than the process may have."""
    behind: BaseException | None = error
    while behind is not None:
        if isinstance(behind, MemoryError):
            return behind
        behind = behind.__cause__ or behind.__context__
    return None


def _finding(kind: str, error: BaseException) -> Verdict:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "embarcadero" in frame.filename]
    ours = [frame for frame in frames if "/fuzz/" not in frame.filename] or frames
    where = f"{ours[-1].filename.rpartition('embarcadero/')[2]}:{ours[-1].lineno}" if ours else ""
    story = "".join(traceback.format_exception(error))
    return Verdict(kind, f"{type(error).__name__}: {_alike(str(error))}", where, story)
