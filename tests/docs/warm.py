"""A process that has loaded the command line and forks for each command: loading takes longer than most commands.

Reads jobs as JSON, one a line, and answers with the exit code of each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


class Warm:
    """The process, from outside."""

    def __init__(self, environment: dict[str, str]) -> None:
        command = [sys.executable, "-m", "tests.docs.warm"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
            cwd=Path(__file__).parent.parent.parent,
        )  # fmt: skip

    def run(self, arguments: list[str], folder: Path, environment: dict[str, str]) -> tuple[str, int]:
        """Run `embarcadero` with arguments; return its output and its exit code."""
        output = folder / "output"
        job = {"arguments": arguments, "folder": str(folder), "environment": environment, "output": str(output)}
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(job) + "\n")
        stdin.flush()
        code = int(stdout.readline())
        return output.read_text(), code

    def close(self) -> None:
        """End it."""
        with self._process:
            if self._process.stdin is not None:
                self._process.stdin.close()


def _child(job: dict[str, Any]) -> int:
    from embarcadero.cli.main import main

    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["environment"])
    output = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number, descriptor in enumerate((os.open(os.devnull, os.O_RDONLY), output, output)):
        os.dup2(descriptor, number)
    sys.argv = ["embarcadero", *job["arguments"]]
    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def serve() -> None:
    """Fork for each job, until the input ends."""
    import embarcadero.cli.main
    import embarcadero.client.api.sync_log
    import embarcadero.node.supervisor  # noqa: F401

    for line in sys.stdin:
        if not (pid := os.fork()):
            code = 70
            try:
                code = _child(json.loads(line))
            finally:
                os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
