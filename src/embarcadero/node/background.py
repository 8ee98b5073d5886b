"""Start and stop a supervisor that runs as a process of its own.

The starter passes a pipe and waits for one line: "ready" (with a note), or the error that prevented the start. If the
pipe ends without a line, the supervisor died, and its log has the reason.
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
    """Start a supervisor in the background, wait until the cluster is ready, and return its process and a note.

    With `stop_with_stdin`, the supervisor stops when `process.stdin` is closed, by the caller or by the caller's death.
    """
    options.check()
    folder = ClusterFolder(options.data_dir)
    folder.create()
    log_path = folder.logs / "supervisor.log"
    roll_over(log_path)
    reading, writing = os.pipe()
    given = os.memfd_create("embarcadero-options")  # not an argument: every user can read those, and this has secrets
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
            raise ClusterError("the supervisor died during its start", f"see {log_path}")
        if started.code:
            raise from_wire(started.code, started.message, started.hint)
    except BaseException:
        _end(process)
        raise
    return process, started.note


def _write_all(descriptor: int, data: bytes) -> None:
    """Write a file, and seek to its start for the process that inherits it."""
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
    """Stop the supervisor of a folder with all its processes; return its pid. Raise NotRunning if none runs."""
    pid = folder.running_pid()
    if pid is None:
        _remove_fabric(folder)
        raise NotRunning(f"no cluster is running in {folder.path}", "nothing to stop")
    for number in (signal.SIGTERM, signal.SIGKILL):
        if _ends(folder, pid, number):
            _remove_fabric(folder)
            return pid
    raise ClusterError(f"the supervisor (pid {pid}) does not stop", f"see {folder.logs}")


def _ends(folder: ClusterFolder, pid: int, number: signal.Signals) -> bool:
    """Signal a supervisor and wait for the end of its process, which follows shortly after the release of its lock."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        if folder.running_pid() != pid:  # it ended, and another process may have its pid already
            return True
        signal.pidfd_send_signal(process, number)
        end = select.poll()
        end.register(process, select.POLLIN)
        return bool(end.poll(STOP_S_MAX * 1000))
    finally:
        os.close(process)


def _remove_fabric(folder: ClusterFolder) -> None:
    """Remove the fabric of a killed supervisor. Never remove a fabric in use: this folder may be a copy."""
    with contextlib.suppress(EmbarcaderoError):
        info = folder.read_info()
        if Path(info.fabric).name == fabric_name(info.id):
            remove_unowned(Path(info.fabric))


def main(descriptor: int) -> int:
    """Run the background process. `descriptor`: an open file with its UpOptions."""
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
        logging.error("%s", error)  # noqa: TRY400 - a typed error needs no traceback
        if not ready:
            report(Started(code=type(error).__name__, message=error.message, hint=error.hint))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
