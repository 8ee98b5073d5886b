"""Node processes as the supervisor's children: fork or start them, wait for them, restart and stop them.

The fork server is a process that has loaded all modules. Loading Python and numpy takes longer than the rest of a
node's start; a fork takes milliseconds. So a supervisor starts one fork server, which loads all roles and waits. On
request over a socket, it forks a node and reports its process id, and later its exit code. It has no threads, opens
nothing, and dies with its supervisor. Its nodes die with it.

    supervisor -> fork server   ForkRequest(roles, data_dir, log_path), as one datagram
    fork server -> supervisor   NodeForked(pid) or NotForked(reason), in the order of requests; Ended(pid, code)

A child that dies restarts immediately the first time. If it keeps dying soon after its start, or fails to start, the
delay grows each time, so that a broken machine is not busy with starting processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import os
import random
import select
import signal
import socket
import sys
import time
from asyncio.subprocess import Process
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from embarcadero.config.table import LogKeys
from embarcadero.errors import ClusterError, EmbarcaderoError
from embarcadero.limits import MIB
from embarcadero.node.folder import ClusterFolder
from embarcadero.node.process import Role, die_with, name_process, start_logging
from embarcadero.watch.logs import last_words

NodeMain = Callable[[Sequence[str]], int]
"""The main function of a node module: arguments -> exit code"""
NODE_MODULE: Final = "embarcadero.cli.processes"
"""The default module with the `main` of node processes; the proof passes its own."""
_MESSAGE_BYTES_MAX: Final = 16_384
_WITHOUT_THREADS: Final = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""Nodes use numpy without linear algebra: a thread pool would only make forking harder."""


class ForkRequest(msgspec.Struct, frozen=True, tag=True):
    """A request to fork a node."""

    roles: str
    data_dir: str
    log_path: str


class NodeForked(msgspec.Struct, frozen=True, tag=True):
    """The answer: the node runs."""

    pid: int


class NotForked(msgspec.Struct, frozen=True, tag=True):
    """The answer: the fork failed."""

    reason: str


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A report that a node ended; a negative code names the signal."""

    pid: int
    code: int


class ForkedNode:
    """The supervisor's view of a node process."""

    def __init__(self, pid: int, ended: asyncio.Future[int]) -> None:
        self.pid, self._ended = pid, ended

    async def wait(self) -> int:
        """Wait for the end of the process; return its exit code. A negative code names the signal."""
        return await asyncio.shield(self._ended)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal if the process still runs. Only the fork server reaps it, so the pid is not reused earlier."""
        if not self._ended.done():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class ForkServer:
    """The supervisor's side of the fork server. Use it from one event loop."""

    def __init__(self, log: LogKeys, node_module: str) -> None:
        self._log, self._node_module = log, node_module
        self._process: asyncio.subprocess.Process | None = None
        self._socket: socket.socket | None = None
        self._asked: deque[asyncio.Future[ForkedNode]] = deque()
        self._running: dict[int, asyncio.Future[int]] = {}
        self._starting = asyncio.Lock()

    async def start(self) -> socket.socket:
        """Start or restart the process. It loads modules while the caller continues."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "embarcadero.node.children", str(theirs.fileno()), str(os.getpid())),
                msgspec.json.encode(self._log).decode(),
                self._node_module,
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
                env=os.environ | _WITHOUT_THREADS,
            )
        ours.setblocking(False)
        self._socket = ours
        asyncio.get_running_loop().add_reader(ours.fileno(), self._hear, ours)
        return ours

    async def fork(self, roles: str, data_dir: Path, log_path: Path) -> ForkedNode:
        """Fork a node that hosts these roles."""
        async with self._starting:
            link = self._socket or await self.start()
        asked: asyncio.Future[ForkedNode] = asyncio.get_running_loop().create_future()
        self._asked.append(asked)
        wanted = ForkRequest(roles=roles, data_dir=str(data_dir), log_path=str(log_path))
        try:
            await asyncio.get_running_loop().sock_sendall(link, msgspec.json.encode(wanted))
        except OSError:
            if asked in self._asked:
                self._asked.remove(asked)  # the request was not sent: the next answer belongs to another request
            raise
        return await asked

    def _hear(self, link: socket.socket) -> None:
        while True:
            try:
                data = link.recv(_MESSAGE_BYTES_MAX)
            except BlockingIOError:
                return
            except ConnectionError:
                data = b""
            if not data:
                self._is_gone()
                return
            self._take(msgspec.json.decode(data, type=NodeForked | NotForked | Ended))

    def _take(self, news: NodeForked | NotForked | Ended) -> None:
        if isinstance(news, NodeForked):
            ended = self._running[news.pid] = asyncio.get_running_loop().create_future()
            asked = self._asked.popleft()
            if not asked.done():
                asked.set_result(ForkedNode(news.pid, ended))  # immediately: the next message may report its end
        elif isinstance(news, NotForked):
            asked = self._asked.popleft()
            if not asked.done():
                what = f"the fork server cannot fork: {news.reason}"
                asked.set_exception(ClusterError(what, "check this machine's limits on processes and memory"))
        elif news.pid in self._running:
            self._running.pop(news.pid).set_result(news.code)

    def _is_gone(self) -> None:
        """Handle the death of the fork server: the kernel has killed all its nodes."""
        self._close()
        for ended in self._running.values():
            ended.set_result(-signal.SIGKILL)
        self._running.clear()
        for asked in self._asked:
            if not asked.done():
                asked.set_exception(ClusterError("the fork server has died", "see the supervisor's log"))
        self._asked.clear()

    def _close(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None

    async def close(self) -> None:
        """Stop the fork server, after all nodes have ended."""
        self._close()
        if self._process is not None:
            await self._process.wait()


# --- children ---------------------------------------------------------------------------------------------------------
_CLIENTS: Final = NODE_MODULE  # also the program of client processes
_LIVED_LONG_S = 10.0
_BACK_OFF_S = 0.1
_BACK_OFF_S_MAX = 5.0
_LOG_BYTES_KEPT = 4 * MIB


class Child:
    """One node process, over all its incarnations."""

    def __init__(
        self, folder: ClusterFolder, roles: Sequence[Role], fork_server: ForkServer, rest_s: float = 0.0
    ) -> None:
        """`rest_s`: the delay before a restart, because the processes that take its place need the processor more."""
        self.roles, self._fork_server = list(roles), fork_server
        self.name = ",".join(map(str, roles))
        self.log_path = folder.log_of(self.name)
        self._data_dir = folder.path
        self._process: ForkedNode | Process | None = None
        self._failures = 0
        self._rest_s = rest_s

    @property
    def pid(self) -> int:
        """The process id; 0 while the process is down."""
        return self._process.pid if self._process else 0

    async def keep(
        self,
        stop: asyncio.Event,
        started: Callable[[], None],
        died: Callable[[Child, int, str], None],
        not_started: Callable[[Child, str], None],
    ) -> None:
        """Restart the process until `stop` is set. Each change calls `started`, `died` or `not_started`."""
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
        """Start the process in a session of its own: Ctrl-C reaches only the supervisor, which stops all in order."""
        roll_over(self.log_path)
        return await self._fork_server.fork(self.name, self._data_dir, self.log_path)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if the process runs."""
        if self._process is not None:
            self._process.send_signal(number)

    def last_words(self) -> str:
        """The last line of its log: usually the reason of its end."""
        return last_words(self.log_path)


class ClientChild(Child):
    """A client process of the cluster. It hosts no role, so it is started as a program and not forked."""

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
    """Describe an exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"


def roll_over(path: Path) -> None:
    """Rotate a log that is too large; keep one earlier file. Called at each start."""
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size > _LOG_BYTES_KEPT:
            path.replace(path.with_suffix(".log.1"))


def _child_main(main: NodeMain, wanted: ForkRequest, link: socket.socket, parent: int) -> int:
    """Run a node in a fork: release the fork server's resources, and send output to the node's log."""
    die_with(parent)
    link.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    os.setsid()
    log = os.open(wanted.log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    for standard in (1, 2):
        os.dup2(log, standard)
    random.seed()
    name_process(wanted.roles)
    return main(["--data-dir", wanted.data_dir, "--roles", wanted.roles, "--parent", str(parent)])


def _fork(main: NodeMain, wanted: ForkRequest, link: socket.socket) -> int:
    parent = os.getpid()
    if pid := os.fork():
        return pid
    code = 70
    try:
        code = _child_main(main, wanted, link, parent)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _try_fork(main: NodeMain, wanted: ForkRequest, link: socket.socket) -> NodeForked | NotForked:
    try:
        return NodeForked(_fork(main, wanted, link))
    except OSError as error:  # too many processes or too little memory: running nodes continue
        return NotForked(error.strerror or str(error))


def _reap() -> list[Ended]:
    ended = []
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended.append(Ended(found[0], os.waitstatus_to_exitcode(found[1])))
    return ended


def serve(link: socket.socket, main: NodeMain) -> None:
    """Fork on request, and report ended nodes, until the supervisor closes the socket."""
    bell, hammer = os.pipe()
    for end in (bell, hammer):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(hammer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    poll = select.poll()
    poll.register(link, select.POLLIN)
    poll.register(bell, select.POLLIN)
    while True:
        ready = {number for number, _ in poll.poll()}
        if bell in ready:
            os.read(bell, 4_096)
        for ended in _reap():
            link.send(msgspec.json.encode(ended))
        if link.fileno() in ready:
            data = link.recv(_MESSAGE_BYTES_MAX)
            if not data:
                return
            link.send(msgspec.json.encode(_try_fork(main, msgspec.json.decode(data, type=ForkRequest), link)))


def main(descriptor: int, parent: int, log: LogKeys, node_module: str) -> None:
    """Load all modules once, then serve. Nodes use this process's log settings until they read their configuration."""
    start_logging("fork-server", log)
    node: NodeMain = importlib.import_module(node_module).main
    importlib.import_module("numpy.ma")  # numpy would load that in the middle of a takeover
    die_with(parent)
    name_process("fork server")
    gc.collect()
    gc.freeze()  # keeps loaded pages shared: a collection would touch, and so copy, every page
    with contextlib.suppress(ConnectionError), socket.socket(fileno=descriptor) as link:
        serve(link, node)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), msgspec.json.decode(sys.argv[3], type=LogKeys), sys.argv[4])
