"""Results on record, one JSON line a seed: a long run can be stopped and gone on with, and several runs add up.

Results belong to the code that made them. In a folder each version of the code has a file of its own, so another
commit starts anew; a run that names a file goes on with that one.
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
    """The commit of this code; with a hash of the sources if they were changed since, or are in no repository."""
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
    """The results of one version of the code, or of whatever is in a file that was named."""

    def __init__(self, place: Path, version: str) -> None:
        self.version = version
        self.path = place if place.suffix == _SUFFIX else place / f"{version}{_SUFFIX}"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.reports = {report.seed: report for report in load(self.path, cut=True)} if self.path.exists() else {}
        self._encoder = msgspec.json.Encoder()

    def missing(self, first: int, last: int) -> list[int]:
        """Seeds of a span that have no result yet."""
        return [seed for seed in range(first, last) if seed not in self.reports]

    def add(self, report: SeedReport) -> None:
        """A seed is done. Once this returns, a stopped run knows it."""
        report.commit = self.version
        self.reports[report.seed] = report
        with self.path.open("ab") as file:
            file.write(self._encoder.encode(report) + b"\n")

    def all(self) -> list[SeedReport]:
        """All results, by seed."""
        return [self.reports[seed] for seed in sorted(self.reports)]


def load(path: Path, cut: bool = False) -> Iterator[SeedReport]:
    """The results in a file. A last line that was not written to its end does not count; `cut` removes it."""
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if cut and whole < len(data):
        with path.open("r+b") as file:
            file.truncate(whole)
    decoder = msgspec.json.Decoder(SeedReport)
    try:
        yield from map(decoder.decode, data[:whole].splitlines())
    except msgspec.DecodeError as error:
        raise Corrupt(f"{path} has a line that is no result of a seed: {error}", "move it away") from error


def newest(place: Path) -> Path:
    """The file that is meant: itself, or the one of a folder that was written last."""
    if place.is_file():
        return place
    found = sorted(place.glob(f"*{_SUFFIX}"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise BadValue(f"there are no results of seeds in {place}", "run embarcadero-proof sim with --results first")
    return found[-1]
