"""Recorded results, one JSON line a seed: a long run can be stopped and continued, and several runs add up.

Results belong to one version of the code. In a folder each version has a file of its own, so another commit starts
from the beginning. A run with a file name continues that file.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Final

import msgspec

import embarcadero
from embarcadero.errors import BadValue, Corrupt
from embarcadero_proof.sim.reports import SeedReport

_SUFFIX: Final = ".jsonl"
_PACKAGE: Final = Path(embarcadero.__file__).parent


def code_version() -> str:
    """Return the commit of this code. Changed sources, or sources outside a repository, add a hash."""
    commit = _git("rev-parse", "--short=12", "HEAD")
    if commit and not _git("status", "--porcelain", "--", str(_PACKAGE)):
        return commit
    content = blake2b(digest_size=4)
    for path in sorted(_PACKAGE.rglob("*.py")):
        content.update(path.relative_to(_PACKAGE).as_posix().encode() + path.read_bytes())
    return f"{commit or 'source'}+{content.hexdigest()}"


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False, cwd=_PACKAGE)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


class Record:
    """The results of one version of the code, or of a file given by name."""

    def __init__(self, location: Path, version: str) -> None:
        self.version = version
        self.path = location if location.suffix == _SUFFIX else location / f"{version}{_SUFFIX}"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.reports = {report.seed: report for report in load(self.path, cut=True)} if self.path.exists() else {}
        self._encoder = msgspec.json.Encoder()

    def missing(self, first: int, last: int) -> list[int]:
        """List the seeds of a span that have no result yet."""
        return [seed for seed in range(first, last) if seed not in self.reports]

    def add(self, report: SeedReport) -> None:
        """Record a finished seed. After the return, a stopped run does not repeat it."""
        report.commit = self.version
        self.reports[report.seed] = report
        with self.path.open("ab") as file:
            file.write(self._encoder.encode(report) + b"\n")

    def all(self) -> list[SeedReport]:
        """List all results by seed."""
        return [self.reports[seed] for seed in sorted(self.reports)]


def load(path: Path, cut: bool = False) -> Iterator[SeedReport]:
    """Yield the results in a file. An incomplete last line does not count; `cut` removes it."""
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if cut and whole < len(data):
        with path.open("r+b") as file:
            file.truncate(whole)
    decoder = msgspec.json.Decoder(SeedReport)
    try:
        yield from map(decoder.decode, data[:whole].splitlines())
    except msgspec.DecodeError as error:
        raise Corrupt(f"{path} has a line that is no result of a seed: {error}", "move the file away") from error


def newest(location: Path) -> Path:
    """Return the file itself, or the newest results file of a folder."""
    if location.is_file():
        return location
    found = sorted(location.glob(f"*{_SUFFIX}"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise BadValue(f"there are no results of seeds in {location}", "run embarcadero-proof sim with --results first")
    return found[-1]
