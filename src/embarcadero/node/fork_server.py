"""The fork server: one process that has loaded everything already, and forks node processes.

Loading Python and numpy takes longer than all a node does until it serves; a fork takes milliseconds. So a supervisor
starts one fork server, which loads all roles and waits. Asked over a socket, it forks a node, reports its process id,
and reports later how it ended. It has no threads, opens nothing, and dies with its supervisor; its nodes die with it.

    supervisor -> fork server   ForkRequest(roles, data_dir, log_path), as one datagram
    fork server -> supervisor   NodeForked(pid) or NotForked(reason), in the order of requests; Ended(pid, code)
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
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from embarcadero.config.table import LogKeys
from embarcadero.errors import ClusterError
from embarcadero.node.process import die_with, name_process, start_logging

NodeMain = Callable[[Sequence[str]], int]
"""The main function of a node module: arguments -> exit code."""
NODE_MODULE: Final = "embarcadero.node.node"
"""The module whose `main` each node process runs, unless the proof names its own."""
_MESSAGE_BYTES_MAX: Final = 16_384
_WITHOUT_THREADS: Final = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""Nodes use numpy, but no linear algebra: a pool of threads would only make forking harder."""


class ForkRequest(msgspec.Struct, frozen=True, tag=True):
    """Ask for a node."""

    roles: str
    data_dir: str
    log_path: str


class NodeForked(msgspec.Struct, frozen=True, tag=True):
    """The node runs."""

    pid: int


class NotForked(msgspec.Struct, frozen=True, tag=True):
    """The node could not be forked."""

    reason: str


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A node ended; a code below zero: by that signal."""

    pid: int
    code: int


class ForkedNode:
    """A node process, as far as its supervisor is concerned."""

    def __init__(self, pid: int, ended: asyncio.Future[int]) -> None:
        self.pid, self._ended = pid, ended

    async def wait(self) -> int:
        """Its exit code, once it has ended; below zero: by that signal."""
        return await asyncio.shield(self._ended)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, if it still runs: only the fork server reaps it, so its number is its own until then."""
        if not self._ended.done():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class ForkServer:
    """The supervisor's side. Use it from one event loop."""

    def __init__(self, log: LogKeys, node_module: str) -> None:
        self._log, self._node_module = log, node_module
        self._process: asyncio.subprocess.Process | None = None
        self._socket: socket.socket | None = None
        self._asked: deque[asyncio.Future[ForkedNode]] = deque()
        self._running: dict[int, asyncio.Future[int]] = {}
        self._starting = asyncio.Lock()

    async def start(self) -> socket.socket:
        """Start it, or start it again. It loads while the caller goes on."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "embarcadero.node.fork_server", str(theirs.fileno()), str(os.getpid())),
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
                self._asked.remove(asked)  # nobody heard it: the next answer is for another one
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
                asked.set_result(ForkedNode(news.pid, ended))  # now: its end may be the next word, before anyone looks
        elif isinstance(news, NotForked):
            asked = self._asked.popleft()
            if not asked.done():
                asked.set_exception(ClusterError(f"can't fork: {news.reason}", "see the limits of this machine"))
        elif news.pid in self._running:
            self._running.pop(news.pid).set_result(news.code)

    def _is_gone(self) -> None:
        """It was killed, and all its nodes with it."""
        self._close()
        for ended in self._running.values():
            ended.set_result(-signal.SIGKILL)
        self._running.clear()
        for asked in self._asked:
            if not asked.done():
                asked.set_exception(ClusterError("the process that starts nodes is gone", "see the supervisor's log"))
        self._asked.clear()

    def _close(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None

    async def close(self) -> None:
        """End it, when all nodes have ended."""
        self._close()
        if self._process is not None:
            await self._process.wait()


# --- the process itself -----------------------------------------------------------------------------------------------
def _child_main(main: NodeMain, wanted: ForkRequest, link: socket.socket, parent: int) -> int:
    """What a forked node does: nothing of the fork server's is left, and its output goes to its log."""
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
    except OSError as error:  # too many processes, too little memory: the nodes that run go on
        return NotForked(error.strerror or str(error))


def _reap() -> list[Ended]:
    ended = []
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended.append(Ended(found[0], os.waitstatus_to_exitcode(found[1])))
    return ended


def serve(link: socket.socket, main: NodeMain) -> None:
    """Fork when asked, tell who ended, until the supervisor hangs up."""
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
    """Load everything once, then serve. Nodes log as this process does until they know their configuration."""
    start_logging("fork-server", log)
    node: NodeMain = importlib.import_module(node_module).main
    importlib.import_module("numpy.ma")  # numpy would load that in the middle of a takeover
    die_with(parent)
    name_process("fork server")
    gc.collect()
    gc.freeze()  # what is loaded stays shared: a collection would touch, and so copy, every page
    with contextlib.suppress(ConnectionError), socket.socket(fileno=descriptor) as link:
        serve(link, node)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), msgspec.json.decode(sys.argv[3], type=LogKeys), sys.argv[4])
