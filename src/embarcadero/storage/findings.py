"""What an offline verification found, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

FROM_PEERS: Final = "start the replica: it gets these records from its peers"


class Severity(StrEnum):
    """How bad a finding is."""

    ERROR = "error"  # records that should be there are missing or wrong
    WARNING = "warning"  # a cache or a spare is wrong, or a copy that others make up for; no record is missing
    NOTE = "note"  # as a crash may leave it; the next start sees to it


class Finding(NamedTuple):
    """Something that is not as it should be, and what to do."""

    severity: Severity
    file: str
    problem: str
    advice: str


class Copy(NamedTuple):
    """A range's copy: indices [first, end), and whether nothing in between is damaged or missing."""

    first: int
    end: int
    whole: bool


@dataclass(slots=True)
class Report:
    """What was looked at, and what was found."""

    findings: list[Finding] = field(default_factory=list)
    replicas: int = 0
    ranges: int = 0
    segments: int = 0
    batches: int = 0
    bytes: int = 0
    disks: dict[str, str] = field(default_factory=dict)
    """Replica's folder -> the id of the disk that it is."""
    copies: dict[tuple[str, int, int], Copy] = field(default_factory=dict)
    """(replica's folder, lane, range) -> its copy."""
    begun: set[tuple[str, int, int]] = field(default_factory=set)
    """The same of copies that were there once, whether they still are or not."""

    @property
    def errors(self) -> int:
        """How many findings speak of records."""
        return sum(finding.severity is Severity.ERROR for finding in self.findings)

    @property
    def ok(self) -> bool:
        """Whether no record is missing or wrong."""
        return self.errors == 0

    def add(self, severity: Severity, file: str, problem: str, advice: str) -> None:
        """Take note of a finding."""
        self.findings.append(Finding(severity, file, problem, advice))
