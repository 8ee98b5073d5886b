"""Node processes as children: restarted when they die, stopped on request."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from embarcadero.config.table import LogKeys
from embarcadero.errors import BadValue, ClusterError
from embarcadero.node import children as module
from embarcadero.node.children import NODE_MODULE, Child, ForkServer, exit_reason, roll_over
from embarcadero.node.folder import ClusterFolder
from embarcadero.node.process import SEQUENCER, Role, die_with, parse_roles


class Program(Child):
    """A child that runs a small program instead of a node."""

    program = "import time; time.sleep(600)"

    async def _start(self) -> Any:
        return await asyncio.create_subprocess_exec(sys.executable, "-c", self.program)


def child(tmp_path: Path, program: str = Program.program) -> Program:
    made = Program(ClusterFolder(tmp_path), [Role(0)], ForkServer(LogKeys(), NODE_MODULE))
    made.program = program
    return made


def test_a_killed_child_is_restarted(tmp_path: Path) -> None:
    """After kill -9 another process runs, its death was reported with its pid, and stopping ends it permanently."""

    async def run() -> tuple[list[int], list[tuple[int, str]], int]:
        kept, stop = child(tmp_path), asyncio.Event()
        pids: list[int] = []
        deaths: list[tuple[int, str]] = []
        twice = asyncio.Event()

        def started() -> None:
            pids.append(kept.pid)
            if len(pids) == 1:
                os.kill(kept.pid, signal.SIGKILL)
            else:
                twice.set()

        died = lambda _, pid, why: deaths.append((pid, why))  # noqa: E731
        keeper = asyncio.create_task(kept.keep(stop, started, died, pytest.fail))
        await twice.wait()
        stop.set()
        kept.signal(signal.SIGTERM)
        await keeper
        return pids, deaths, kept.pid

    pids, deaths, after = asyncio.run(run())
    assert len(set(pids)) == 2
    assert deaths == [(pids[0], "killed by SIGKILL")]
    assert after == 0


def test_a_crash_loop_backs_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that always dies immediately is restarted after delays that grow up to a bound."""
    waits: list[float] = []

    async def no_wait(future: object, timeout_s: float) -> None:
        waits.append(timeout_s)
        assert hasattr(future, "close")
        future.close()
        raise TimeoutError

    async def run() -> list[str]:
        kept, stop = child(tmp_path, "raise SystemExit(3)"), asyncio.Event()
        deaths: list[str] = []

        def died(_: Child, pid: int, reason: str) -> None:
            deaths.append(reason)
            if len(deaths) == 9:
                stop.set()

        monkeypatch.setattr(module.asyncio, "wait_for", no_wait)
        await kept.keep(stop, lambda: None, died, pytest.fail)
        return deaths

    assert asyncio.run(run()) == ["exit code 3"] * 9
    assert waits == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]


def test_a_child_that_cannot_be_started_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever keeps it from starting: it is retried after a delay, as after a death, until it runs."""
    troubles = [BlockingIOError(11, "no processes"), ClusterError("no fork server", ""), BrokenPipeError(32, "gone")]
    waits: list[float] = []

    class Hindered(Program):
        async def _start(self) -> Any:
            if troubles:
                raise troubles.pop(0)
            return await super()._start()

    async def no_wait(future: Any, timeout_s: float) -> None:
        waits.append(timeout_s)
        future.close()
        raise TimeoutError

    async def run() -> list[str]:
        kept, stop = Hindered(ClusterFolder(tmp_path), [Role(0)], ForkServer(LogKeys(), NODE_MODULE)), asyncio.Event()
        reasons: list[str] = []

        def started() -> None:
            stop.set()
            kept.signal(signal.SIGKILL)

        monkeypatch.setattr(module.asyncio, "wait_for", no_wait)
        await kept.keep(stop, started, pytest.fail, lambda _, reason: reasons.append(reason))
        return reasons

    assert asyncio.run(run()) == ["no processes", "no fork server", "gone"]
    assert waits == [0.2, 0.4]


def test_exit_codes_have_descriptions() -> None:
    """A signal is named; an unknown one still has its number."""
    assert [exit_reason(code) for code in (1, -9, -222)] == ["exit code 1", "killed by SIGKILL", "killed by signal 222"]


def test_logs_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log that has grown is rotated at the next start; only one predecessor is kept."""
    monkeypatch.setattr(module, "_LOG_BYTES_KEPT", 10)
    log = tmp_path / "x.log"
    roll_over(log)
    for text in ("short", "first long one", "second long one"):
        log.write_text(text)
        roll_over(log)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["second long one"]


def test_last_words_are_the_last_line(tmp_path: Path) -> None:
    """The reason for an end is the last line of the log, if there is one."""
    folder = ClusterFolder(tmp_path)
    folder.create()
    quiet = Child(folder, [SEQUENCER], ForkServer(LogKeys(), NODE_MODULE))
    assert quiet.last_words() == ""
    quiet.log_path.write_text("x" * 10_000 + "\nfirst\nthe reason\n")
    assert quiet.last_words() == "the reason"


def test_an_orphan_refuses_to_run() -> None:
    """A node does not start if its supervisor died before the node could be tied to it."""
    pid = os.fork()
    if pid == 0:
        try:
            die_with(parent=1 if os.getppid() != 1 else 2)
        except ClusterError:
            os._exit(42)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 42


def test_roles_are_read() -> None:
    """Roles are read as the supervisor writes them."""
    roles = parse_roles("broker:0, broker:63,sequencer")
    assert roles == [Role(0), Role(63), SEQUENCER]
    assert ",".join(map(str, roles)) == "broker:0,broker:63,sequencer"


@pytest.mark.parametrize("text", ["", "broker", "broker:", "broker:64", "broker:-1", "broker:٣", "sequencer:0", "a,,b"])
def test_invalid_roles_are_refused(text: str) -> None:
    """The error for an unknown role lists the known ones."""
    with pytest.raises(BadValue, match="broker:0 to broker:63"):
        parse_roles(text)


def test_a_role_is_named_once() -> None:
    """The same role twice in one process is invalid."""
    with pytest.raises(BadValue, match="twice"):
        parse_roles("sequencer,broker:1,sequencer")
