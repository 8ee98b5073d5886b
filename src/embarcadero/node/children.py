"""Node processes as the supervisor's children: started, waited for, started again, stopped.

A child that dies is started again at once, the first time; one that keeps dying soon after its start, or can't be
started, waits longer each time, so that a broken machine is not kept busy with starting processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from embarcadero.errors import EmbarcaderoError
from embarcadero.limits import MIB
from embarcadero.node.folder import ClusterFolder
from embarcadero.node.fork_server import ForkedNode, ForkServer
from embarcadero.node.roles import Role
from embarcadero.watch.logs import last_words

_CLIENTS: Final = "embarcadero.cli.clients"  # the program of processes that are clients
_LIVED_LONG_S = 10.0
_BACK_OFF_S = 0.1
_BACK_OFF_S_MAX = 5.0
_LOG_BYTES_KEPT = 4 * MIB


class Child:
    """One node process, over all its incarnations."""

    def __init__(
        self, folder: ClusterFolder, roles: Sequence[Role], fork_server: ForkServer, rest_s: float = 0.0
    ) -> None:
        """`rest_s`: how long it stays down after a death: processes that take its place need the processor more."""
        self.roles, self._fork_server = list(roles), fork_server
        self.name = ",".join(map(str, roles))
        self.log_path = folder.log_of(self.name)
        self._data_dir = folder.path
        self._process: ForkedNode | Process | None = None
        self._failures = 0
        self._rest_s = rest_s

    @property
    def pid(self) -> int:
        """Its process id; 0 while it is down."""
        return self._process.pid if self._process else 0

    async def keep(
        self,
        stop: asyncio.Event,
        started: Callable[[], None],
        died: Callable[[Child, int, str], None],
        not_started: Callable[[Child, str], None],
    ) -> None:
        """Keep the process running until told to stop; `started`, `died` and `not_started` hear of every change."""
        while not stop.is_set():
            began = time.monotonic()
            try:
                process = self._process = await self._start()
            except (OSError, EmbarcaderoError) as error:
                if stop.is_set():
                    return
                not_started(
                    self, error.message if isinstance(error, EmbarcaderoError) else error.strerror or str(error)
                )
            else:
                if stop.is_set():
                    self.signal(signal.SIGTERM)
                started()
                code = await process.wait()
                self._process = None
                if stop.is_set():
                    return
                died(self, process.pid, exit_reason(code))
            self._failures = 0 if time.monotonic() - began > _LIVED_LONG_S else self._failures + 1
            await self._rest(stop)

    async def _rest(self, stop: asyncio.Event) -> None:
        delay = self._rest_s
        if self._failures > 1:
            delay = max(delay, min(_BACK_OFF_S * 2 ** (self._failures - 1), _BACK_OFF_S_MAX))
        if delay:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), delay)

    async def _start(self) -> ForkedNode | Process:
        """In a session of its own: Ctrl-C is for the supervisor, which stops the rest in order."""
        roll_over(self.log_path)
        return await self._fork_server.fork(self.name, self._data_dir, self.log_path)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if it runs."""
        if self._process is not None:
            self._process.send_signal(number)

    def last_words(self) -> str:
        """What the last line of its log says: usually the reason it ended."""
        return last_words(self.log_path)


class ClientChild(Child):
    """A process that is a client of the cluster: it has no role there, so it is a program of its own, not a fork."""

    def __init__(self, folder: ClusterFolder, fork_server: ForkServer, name: str) -> None:
        super().__init__(folder, [], fork_server)
        self.name = name
        self.log_path = folder.log_of(self.name)

    async def _start(self) -> Process:
        roll_over(self.log_path)
        with self.log_path.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                _CLIENTS,
                self.name,
                str(self._data_dir),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


def exit_reason(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"


def roll_over(path: Path) -> None:
    """Keep a log and its predecessor, each bounded between two starts."""
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size > _LOG_BYTES_KEPT:
            path.replace(path.with_suffix(".log.1"))
