"""One target for a while: real inputs first, then changes of inputs that had a new answer.

The answer to an input is the kind and message of its error, or the target's summary of a success. It is a cheap
substitute for coverage: inputs with a new answer are kept and changed further. Everything follows from the seed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random
from typing import Final

import msgspec

from embarcadero_proof.fuzz.guard import REFUSED, SUCCESS, Verdict, judge, watched
from embarcadero_proof.fuzz.mutate import mutated
from embarcadero_proof.fuzz.shrink import shrunk
from embarcadero_proof.fuzz.target import INPUT_BYTES_MAX, Target

MEASURED_EVERY = 8
"""Memory is measured for one input in this many, and for all inputs with a new answer."""
_KEPT_MAX: Final = 512
_MENDED: Final = 0.7

Notice = Callable[[bytes], None]


class Finding(msgspec.Struct, kw_only=True):
    """An input with a wrong result."""

    kind: str
    outcome: str
    where: str
    story: str
    data: bytes
    times: int = 1
    command: str = ""


class Tally(msgspec.Struct, kw_only=True):
    """Counts of a target's inputs and answers."""

    target: str
    inputs: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0  # of its process, independent of other programs
    success: int = 0
    refused: int = 0
    answers: int = 0  # different answers
    peak_bytes: int = 0
    corpus: int = 0
    findings: list[Finding] = []

    @property
    def per_s(self) -> float:
        """Inputs a second."""
        return self.inputs / self.seconds if self.seconds else 0.0

    @property
    def per_cpu_s(self) -> float:
        """Inputs for each second of processor time."""
        return self.inputs / self.cpu_s if self.cpu_s else 0.0


class Campaign:
    """A target, and its known answers so far."""

    def __init__(self, target: Target, seed: str, notice: Notice = lambda _data: None) -> None:
        self.target, self.tally = target, Tally(target=target.name, findings=[])
        self._rng = Random(f"{target.name}/{seed}")
        self._notice = notice
        self._seen: set[str] = set()
        self._found: dict[tuple[str, str, str], Finding] = {}
        self._corpus = target.corpus()
        self._pool = list(self._corpus)
        self.tally.corpus = len(self._corpus)

    def run(self, inputs: int | None, seconds: float | None) -> Tally:
        """Run `inputs` inputs, or for `seconds`, whichever ends first."""
        began, began_cpu = time.monotonic(), time.process_time()
        with watched():
            for data in self._corpus:
                self.give(data)
            while (inputs is None or self.tally.inputs < inputs) and (
                seconds is None or time.monotonic() - began < seconds
            ):
                self.give(self.next())
        self.tally.seconds, self.tally.cpu_s = time.monotonic() - began, time.process_time() - began_cpu
        return self.tally

    def next(self) -> bytes:
        """Make another input."""
        target, rng = self.target, self._rng
        data = rng.choice(self._pool if rng.random() < 0.7 else self._corpus)
        if target.mutate is not None:
            data = target.mutate(data, rng, self._pool)
        else:
            data = mutated(data, rng, self._pool, target.words)
        if target.mend is not None and rng.random() < _MENDED:
            data = target.mend(data, rng)
        return data[:INPUT_BYTES_MAX] if not target.archive else data

    def give(self, data: bytes) -> Verdict:
        """Run one input, and record its answer."""
        tally = self.tally
        self._notice(data)
        verdict = judge(self.target, data, measure=tally.inputs % MEASURED_EVERY == 0)
        tally.inputs += 1
        tally.success += verdict.kind == SUCCESS
        tally.refused += verdict.kind == REFUSED
        tally.peak_bytes = max(tally.peak_bytes, verdict.peak_bytes)
        if verdict.outcome not in self._seen and not verdict.finding:
            self._seen.add(verdict.outcome)
            tally.answers = len(self._seen)
            if len(self._pool) < _KEPT_MAX:
                self._pool.append(data)
            verdict = judge(self.target, data)
        if verdict.finding:
            self._take(data, verdict)
        return verdict

    def _take(self, data: bytes, verdict: Verdict) -> None:
        if (known := self._found.get(verdict.key)) is not None:
            known.times += 1
            return

        def still(candidate: bytes) -> bool:
            self._notice(candidate)
            return judge(self.target, candidate, measure=verdict.kind == "memory").key == verdict.key

        small = data if verdict.kind == "hang" else shrunk(data, still, self.target.archive)
        final = judge(self.target, small)
        story = final.story if final.key == verdict.key else verdict.story
        found = Finding(kind=verdict.kind, outcome=verdict.outcome, where=verdict.where, story=story, data=small)
        self._found[verdict.key] = found
        self.tally.findings.append(found)
