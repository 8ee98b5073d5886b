"""A target in its own process, so that the parent notices every effect of an input.

The child writes each input to shared memory before it runs it. If the child dies, or makes no progress for too long,
that input is a finding, and another child continues with another seed. Its address space is bounded.
"""

from __future__ import annotations

import faulthandler
import mmap
import multiprocessing
import os
import resource
import signal
import struct
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import msgspec

from embarcadero.limits import GIB
from embarcadero_proof.fuzz.campaign import Campaign, Finding, Tally
from embarcadero_proof.fuzz.guard import judge, watched
from embarcadero_proof.fuzz.scratch import use
from embarcadero_proof.fuzz.shrink import shrunk
from embarcadero_proof.fuzz.target import INPUT_BYTES_MAX, Target

SILENCE_S: Final = 60.0
"""A child whose input has not changed for this long hangs where no signal arrives."""
ADDRESS_BYTES: Final = 2 * GIB
"""Address space beyond the size of the process at its start: far above the needs of any input."""
_HEAD: Final = struct.Struct("<QQ")
_SHARED_BYTES: Final = _HEAD.size + 8 * INPUT_BYTES_MAX
_CRASH_ATTEMPTS: Final = 150
_RESTARTS_MAX: Final = 20

_context = multiprocessing.get_context("fork")


class Notes:
    """The current input, in memory shared by two processes."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _SHARED_BYTES)
        self._count = 0

    def note(self, data: bytes) -> None:
        """Record the next input."""
        self._count += 1
        kept = data[: _SHARED_BYTES - _HEAD.size]
        self._memory[_HEAD.size : _HEAD.size + len(kept)] = kept
        self._memory[: _HEAD.size] = _HEAD.pack(self._count, len(kept))

    @property
    def count(self) -> int:
        """Number of inputs so far."""
        return int(_HEAD.unpack(self._memory[: _HEAD.size])[0])

    @property
    def data(self) -> bytes:
        """The current input."""
        size = _HEAD.unpack(self._memory[: _HEAD.size])[1]
        return bytes(self._memory[_HEAD.size : _HEAD.size + size])


class Worker:
    """A running target: start it, then `poll` it until it has a tally."""

    def __init__(self, target: Target, seed: str, inputs: int | None, seconds: float | None, scratch: Path) -> None:
        self.target, self._seed, self._inputs, self._seconds = target, seed, inputs, seconds
        self._scratch = scratch / target.name
        self.tally = Tally(target=target.name, findings=[])
        self._began = time.monotonic()
        self._restarts = 0
        self._start()

    def _start(self) -> None:
        self._notes, self._progress = Notes(), (0, time.monotonic())
        self._link, theirs = _context.Pipe(duplex=False)
        remaining = None if self._inputs is None else max(1, self._inputs - self.tally.inputs)
        remaining_s = None if self._seconds is None else max(0.1, self._seconds - (time.monotonic() - self._began))
        seed = f"{self._seed}" if not self._restarts else f"{self._seed}.{self._restarts}"
        given = (self.target, seed, remaining, remaining_s, self._notes, theirs, self._scratch)
        self._process = _context.Process(target=_child, args=given)
        self._process.start()
        theirs.close()

    def poll(self) -> bool:
        """Return whether it is done; `tally` is then complete."""
        if self._link.poll(0.05):
            try:
                self._add(msgspec.msgpack.decode(self._link.recv_bytes(), type=Tally))
                self._process.join()
                return True
            except EOFError:
                return self._died()
        count, since = self._progress
        if self._notes.count != count:
            self._progress = self._notes.count, time.monotonic()
        elif time.monotonic() - since > SILENCE_S:
            self._process.kill()
            return self._died(silent=True)
        return False

    def _add(self, other: Tally) -> None:
        mine = self.tally
        self.tally = Tally(
            target=mine.target, inputs=mine.inputs + other.inputs, seconds=time.monotonic() - self._began,
            cpu_s=mine.cpu_s + other.cpu_s,
            success=mine.success + other.success, refused=mine.refused + other.refused, answers=other.answers,
            peak_bytes=max(mine.peak_bytes, other.peak_bytes), corpus=other.corpus,
            findings=[*mine.findings, *other.findings],
        )  # fmt: skip

    def _died(self, silent: bool = False) -> bool:
        """Record the current input, which ended the child, as a finding; shrink it, and start the next child."""
        self._process.join()
        code = self._process.exitcode or 0
        reason = f"silent for {SILENCE_S} s" if silent else _reason(code)
        data = self._notes.data
        if not silent:
            data = shrunk(data, self._crashes, self.target.archive, _CRASH_ATTEMPTS)
        found = Finding(
            kind="hang" if silent else "crash", outcome=f"the process: {reason}", where="", story=reason, data=data
        )
        self._add(Tally(target=self.target.name, inputs=self._notes.count, findings=[found]))
        over = self._seconds is not None and time.monotonic() - self._began >= self._seconds
        if over or self._restarts >= _RESTARTS_MAX or (self._inputs or 1 << 62) <= self.tally.inputs:
            return True
        self._restarts += 1
        self._start()
        return False

    def _crashes(self, data: bytes) -> bool:
        """Return whether an input ends a process."""
        process = _context.Process(target=_one, args=(self.target, data, self._scratch))
        process.start()
        process.join(SILENCE_S)
        if process.is_alive():
            process.kill()
            process.join()
        return process.exitcode != 0

    def stop(self) -> None:
        """End the child."""
        self._process.kill()
        self._process.join()


def _reason(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _bound() -> None:
    """Limit the address space, and switch off core files and messages on standard error."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + ADDRESS_BYTES, now + ADDRESS_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.disable()


def _child(
    target: Target, seed: str, inputs: int | None, seconds: float | None, notes: Notes, link: Connection, scratch: Path
) -> None:
    _bound()
    use(scratch)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    tally = Campaign(target, seed, notes.note).run(inputs, seconds)
    link.send_bytes(msgspec.msgpack.encode(tally))
    link.close()
    os._exit(0)


def _one(target: Target, data: bytes, scratch: Path) -> None:
    _bound()
    use(scratch)
    with watched():
        judge(target, data, measure=False)
    os._exit(0)
