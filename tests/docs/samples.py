"""Runs the samples of a page of documentation. The convention is in CONTRIBUTING.md."""

from __future__ import annotations

import io
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from embarcadero.errors import NotRunning
from tests.docs.warm import Warm

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

ADDRESS = "127.0.0.1:9092"
"""Pages use this address; samples run against the address of the test's cluster."""

CATALOG = "http://127.0.0.1:8181"
"""The REST catalog of a page: one of examples/ runs for it."""

PATIENCE_S = 60.0
SHOWN_S = 60.0  # a command that is interrupted has this long to print its expected output
_PLAIN = re.compile(r"embarcadero ([^|<>&;$`*?~]*?)(?:  +#.*)?")
"""A command without any work for a shell."""
_FILE = re.compile(r"# ([\w.-]+\.(?:py|yaml))\n")

RUN = {"python", "yaml", "console"}
"""Languages of blocks that are run.

Text is the output of the previous block; blocks without a language are pictures.
"""


@dataclass(frozen=True)
class Block:
    """A fenced block: its first line, its language, its text."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        """For people: page and line."""
        return f"{self.page.name}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A command of a console block, its expected output, and whether the reader presses Ctrl-C then."""

    text: str
    shown: str
    interrupted: bool

    @property
    def fails(self) -> bool:
        """Whether an error is expected."""
        return re.search(r"^error:", self.shown, re.MULTILINE) is not None


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found: list[Block] = []
    begun: tuple[int, str] | None = None
    lines: list[str] = []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if not line.startswith("```"):
            lines.append(line)
        elif begun is None:
            begun, lines = (number, line[3:].strip()), []
        else:
            found.append(Block(page, *begun, "\n".join(lines) + "\n"))
            begun = None
    if begun is not None:
        raise AssertionError(f"{page.name}:{begun[0]}: a block that does not end")
    return found


def commands(block: Block) -> list[Command]:
    """The commands of a console block, each with its expected output."""
    found: list[Command] = []
    typed: list[str] = []
    shown: list[str] = []
    for line in [*block.text.splitlines(), "$ "]:
        if line.startswith("$ "):
            if typed:
                interrupted = bool(shown) and shown[-1] == "^C"
                found.append(Command("\n".join(typed), "\n".join(shown[: -1 if interrupted else None]), interrupted))
            typed, shown = [line[2:]], []
        elif typed and typed[-1].endswith("\\"):
            typed.append(line)
        elif not typed:
            raise AssertionError(f"{block.place}: a console block begins with a command: $ ...")
        else:
            shown.append(line)
    return found


def looks_like(shown: str, printed: str, *, begins: bool = False) -> bool:
    """Whether output is as expected: `...` stands for anything, and the amount of white space does not matter."""
    parts = [r"\s+".join(re.escape(word) for word in part.split()) for part in shown.split("...")]
    pattern = r"\s*" + r"\s*.*?\s*".join(parts) + r"\s*"
    match = re.match if begins else re.fullmatch
    return match(pattern, printed, re.DOTALL) is not None


@dataclass
class Runner:
    """Runs the blocks of one page in a folder of its own: one Python namespace, one shell environment."""

    folder: Path
    environment: dict[str, str]
    address: Callable[[], str]
    warm: Warm | None = None
    catalog: Callable[[], str] = lambda: CATALOG
    namespace: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})
    ran: int = 0

    def run(self, page: Sequence[Block]) -> None:
        """All blocks, in order; an AssertionError or the sample's own error names the wrong block."""
        for block, after in zip_longest(page, page[1:]):
            if block.language not in RUN | {"text", ""}:
                raise AssertionError(f"{block.place}: {block.language!r} blocks can't be run: see CONTRIBUTING.md")
            if block.language in ("python", "yaml") and (file := _FILE.match(block.text)):
                (self.folder / file[1]).write_text(self._here(block.text))
            elif block.language == "yaml":
                raise AssertionError(f"{block.place}: the first line of a yaml block names its file: # name.yaml")
            elif block.language == "python":
                self._python(block, after.text if after is not None and after.language == "text" else None)
            elif block.language == "console":
                self._console(block)
            else:
                continue
            self.ran += 1

    def _here(self, text: str) -> str:
        if CATALOG in text:
            text = text.replace(CATALOG, self.catalog())
        if ADDRESS not in text:
            return text
        with suppress(NotRunning):  # before `up`, or after `down`: the page only mentions the address
            return text.replace(ADDRESS, self.address())
        return text

    def _python(self, block: Block, shown: str | None) -> None:
        code = compile("\n" * block.line + self._here(block.text), str(block.page), "exec")
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(code, self.namespace)
        _compare(block.place, shown, printed.getvalue())

    def _console(self, block: Block) -> None:
        for command in commands(block):
            text = self._here(command.text)
            printed, code = self._interrupted(command, text) if command.interrupted else self._finished(text)
            if not command.interrupted and (code != 0) != command.fails:
                raise AssertionError(f"{block.place}: $ {command.text}\nended with {code}:\n{printed}")
            _compare(f"{block.place}: $ {command.text}", command.shown or None, printed)

    def _finished(self, text: str) -> tuple[str, int]:
        if self.warm is not None and (plain := _PLAIN.fullmatch(text)):
            return self.warm.run(shlex.split(plain[1]), self.folder, self.environment)
        done = subprocess.run(
            ["bash", "-c", text], cwd=self.folder, env=self.environment, text=True, check=False, timeout=PATIENCE_S,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        return done.stdout, done.returncode

    def _interrupted(self, command: Command, text: str) -> tuple[str, int]:
        """Run it until it has printed the expected output, then press Ctrl-C."""
        output = self.folder / "output"
        with output.open("w") as file:
            process = subprocess.Popen(
                ["bash", "-c", text], cwd=self.folder, env=self.environment, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            )  # fmt: skip
        try:
            give_up = time.monotonic() + SHOWN_S
            while not looks_like(command.shown, output.read_text(), begins=True):
                if process.poll() is not None or time.monotonic() > give_up:
                    break
                time.sleep(0.02)
            os.killpg(process.pid, signal.SIGINT)
            return output.read_text(), process.wait(PATIENCE_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _compare(place: str, shown: str | None, printed: str) -> None:
    if shown is not None and not looks_like(shown, printed):
        raise AssertionError(f"{place}\nis shown to print:\n{shown}\nand prints:\n{printed}")


def environment(data_dir: Path) -> dict[str, str]:
    """The environment of samples: a cluster's folder, free ports, little memory, a terminal of 100 columns."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("EMBARCADERO_")}
    return kept | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "COLUMNS": "100",
        "EMBARCADERO_DATA_DIR": str(data_dir),
        "EMBARCADERO_BROKER_PORT": "0",
        "EMBARCADERO_FABRIC_LOG_BYTES": "32MiB",
        "EMBARCADERO_SEQUENCER_TAKEOVER_AFTER_MS": "60000",  # pages show the first epoch, on slow machines as well
        "JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",  # Spark runs each plan once or twice here
    }


def indented(page: Path) -> Iterator[str]:
    """Lines of indented blocks: commands that are shown and not run."""
    inside = False
    for line in page.read_text().splitlines():
        inside ^= line.startswith("```")
        if not inside and line.startswith("    ") and line.strip():
            yield line.strip()
