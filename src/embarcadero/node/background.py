"""Start and stop a supervisor that runs as a process of its own.

The starter gives it a pipe and waits: one line comes back, "ready" (with a note) or the error that kept it from
starting; the end of the pipe without a line means that it died, and its log says why.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import msgspec

from embarcadero.config.secrets import secret_values
from embarcadero.errors import ClusterError, EmbarcaderoError, NotRunning, from_wire
from embarcadero.node.children import roll_over
from embarcadero.node.fabric_folder import FabricChoice, fabric_name, remove_unowned
from embarcadero.node.folder import ClusterFolder
from embarcadero.node.process import be_private, name_process, start_logging
from embarcadero.node.supervisor import STOP_S_MAX, Supervisor, UpOptions


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """The line that a background supervisor sends. No `code` means ready."""

    note: str = ""
    code: str = ""
    message: str = ""
    hint: str = ""


def start(options: UpOptions) -> tuple[subprocess.Popen[bytes], str]:
    """Start a supervisor in the background; returns, when the cluster is ready, its process and a note for the user.

    With `stop_with_stdin` it stops when the pipe in `process.stdin` is closed, by us or by our death.
    """
    options.check()
    folder = ClusterFolder(options.data_dir)
    folder.create()
    log_path = folder.logs / "supervisor.log"
    roll_over(log_path)
    reading, writing = os.pipe()
    given = os.memfd_create("embarcadero-options")  # not an argument: everyone may read those, and options have secrets
    try:
        with log_path.open("ab") as log_file:
            _write_all(given, msgspec.json.encode(msgspec.structs.replace(options, ready_fd=writing)))
            process = subprocess.Popen(
                [sys.executable, "-m", "embarcadero.node.background", str(given)],
                stdin=subprocess.PIPE if options.stop_with_stdin else subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                pass_fds=[writing, given],
                start_new_session=True,
            )
    finally:
        os.close(writing)
        os.close(given)
    try:
        with os.fdopen(reading, "rb") as pipe:
            line = pipe.readline()
        started = msgspec.json.decode(line, type=Started) if line else None
        if started is None:
            raise ClusterError("the supervisor died while it started", f"see {log_path}")
        if started.code:
            raise from_wire(started.code, started.message, started.hint)
    except BaseException:
        _end(process)
        raise
    return process, started.note


def _write_all(descriptor: int, data: bytes) -> None:
    """Fill a file that its next holder reads from the start."""
    with os.fdopen(descriptor, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()
    process.terminate()
    try:
        process.wait(STOP_S_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def stop(folder: ClusterFolder) -> int:
    """Stop the supervisor of a folder and all it started; returns its process id. NotRunning if there is none."""
    pid = folder.running_pid()
    if pid is None:
        _remove_fabric(folder)
        raise NotRunning(f"no cluster is running in {folder.path}", "nothing to stop")
    for number in (signal.SIGTERM, signal.SIGKILL):
        if _ends(folder, pid, number):
            _remove_fabric(folder)
            return pid
    raise ClusterError(f"the supervisor (pid {pid}) does not end", f"see {folder.logs}")


def _ends(folder: ClusterFolder, pid: int, number: signal.Signals) -> bool:
    """Signal a supervisor and wait for its very end: its lock is free a moment before the process is gone."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        if folder.running_pid() != pid:  # it ended, and its number may be another's already
            return True
        signal.pidfd_send_signal(process, number)
        end = select.poll()
        end.register(process, select.POLLIN)
        return bool(end.poll(STOP_S_MAX * 1000))
    finally:
        os.close(process)


def _remove_fabric(folder: ClusterFolder) -> None:
    """Remove the fabric that a killed supervisor left. Never a running one's: this folder may be a copy."""
    with contextlib.suppress(EmbarcaderoError):
        info = folder.read_info()
        if Path(info.fabric).name == fabric_name(info.id):
            remove_unowned(Path(info.fabric))


def main(descriptor: int) -> int:
    """The background process itself. `descriptor`: an open file with its UpOptions."""
    with os.fdopen(descriptor, "rb") as file:
        options = msgspec.json.decode(file.read(), type=UpOptions)
    be_private()
    name_process(f"supervisor {options.data_dir}")
    start_logging("supervisor", options.config.log, secret_values(options.config))

    def report(line: Started) -> None:
        if options.ready_fd is not None:
            with contextlib.suppress(BrokenPipeError), os.fdopen(options.ready_fd, "wb") as pipe:
                pipe.write(msgspec.json.encode(line) + b"\n")

    ready = False

    def on_ready(fabric: FabricChoice) -> None:
        nonlocal ready
        ready = True
        report(Started(note=fabric.note))

    try:
        asyncio.run(Supervisor(options).run(on_ready))
    except EmbarcaderoError as error:
        logging.error("%s", error)  # noqa: TRY400 - a typed error says it all
        if not ready:
            report(Started(code=type(error).__name__, message=error.message, hint=error.hint))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
