"""Run the same tests with every PySpark, each version in an environment of its own: `make matrix`.

Environments are below build/matrix: the packages of requirements.lock, with another PySpark. They are made once, and
again when the lock changes. The newest version is that of the lock, and runs in the environment of this process.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final
from xml.etree import ElementTree as Xml

ROOT: Final = Path(__file__).parents[2]
BUILD: Final = ROOT / "build" / "matrix"
LOCK: Final = ROOT / "requirements.lock"
REPORT: Final = ROOT / "docs" / "reports" / "pyspark.md"
PINNED: Final = re.compile(r"(?m)^pyspark==(\S+) \\\n(?:    --hash\S+(?: \\)?\n)+(?:    #.*\n)*")
QUIET: Final = ["ResourceWarning", "DeprecationWarning", "FutureWarning", "UserWarning"]
"""Warnings of older versions of PySpark, and objects they leave open when they end."""


USUAL: Final = ("test_pyspark.py", "test_writes.py")


@dataclass(frozen=True, slots=True)
class Version:
    """One PySpark, and the tests that run with it."""

    pyspark: str
    sha256: str  # of its source distribution; empty: the version of the lock
    tests: tuple[str, ...] = USUAL

    @property
    def name(self) -> str:
        """As users write it: 4.1."""
        return self.pyspark.rpartition(".")[0]


def versions() -> list[Version]:
    """All of them, oldest first."""
    pinned = PINNED.search(LOCK.read_text())
    if pinned is None:
        sys.exit("requirements.lock does not pin pyspark: make lock")
    return [
        Version("3.5.9", "ea27adc39ddac9413b8951e45aa748cbed6c785971b81386efc41938f6243d93", ("test_refused.py",)),
        Version("4.0.5", "a0d44b0e7faf0458ad83b7aa664e7ed8b96beed8a55d66ce3b0dfac2309dfca6"),
        Version(
            "4.1.4", "bcbd5e18690cf79d438e97210ad06fb8d451a251bb77becc2b0418868d2acd73",
            (*USUAL, "test_iceberg.py", "test_lakehouse.py", "test_connect.py"),
        ),
        Version(
            "4.2.1", "d79b7c8ee41e66a9202fe6f600ca90b931ca571ae9dbdf31c58d2672e5102da0",
            (*USUAL, "test_delta.py"),
        ),
        Version(pinned[1], "", (*USUAL, "test_connect.py", "test_slow_writes.py")),
    ]  # fmt: skip


def environment(version: Version) -> Path:
    """The Python of a version, which is installed if it is missing."""
    if not version.sha256:
        return Path(sys.executable)
    home = BUILD / version.name
    python, stamp = home / "bin" / "python", home / "made-of"
    rest = PINNED.sub("", LOCK.read_text())
    spark = f"pyspark=={version.pyspark} --hash=sha256:{version.sha256}\n"
    wanted = hashlib.sha256((rest + spark + "with the proof").encode()).hexdigest()
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    print(f"PySpark {version.pyspark}: making {home.relative_to(ROOT)}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    for name, text in (("rest.lock", rest), ("pyspark.lock", spark)):
        (home / name).write_text(text)
        subprocess.run([*pip, "--require-hashes", "-r", str(home / name)], check=True)
    subprocess.run([*pip, "--no-build-isolation", "-e", str(ROOT), "-e", str(ROOT / "proof")], check=True)
    stamp.write_text(wanted)
    return python


def run(version: Version, python: Path) -> dict[str, tuple[bool, float]]:
    """Whether each test passed, and in how many seconds; by its name."""
    found: dict[str, tuple[bool, float]] = {}
    environ = os.environ | {"MATRIX_PYSPARK": version.pyspark}
    ignored = [f"ignore::{name}" for name in (*QUIET, "pytest.PytestUnraisableExceptionWarning")]
    for file in version.tests:  # a process each: a JVM has one set of jars
        results = BUILD / f"{version.name}-{file}.xml"
        results.unlink(missing_ok=True)
        command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=900"]
        command += [f"--junitxml={results}", *(word for warning in ignored for word in ("-W", warning))]
        subprocess.run([*command, f"tests/matrix/{file}"], cwd=ROOT, env=environ, check=False)
        cases = [case for case in Xml.parse(results).iter("testcase") if applies(case)] if results.is_file() else []
        told = {_title(file, case.get("name", "")): _told(case) for case in cases}
        found |= told or {_title(file, "did not run"): (False, 0.0)}
    return found


def _title(file: str, name: str) -> str:
    """`iceberg: append stream and merge` of a test in test_iceberg.py."""
    what = name.removeprefix("test_").replace("_", " ")
    kind = file.removeprefix("test_").removesuffix(".py")
    return what if kind in ("pyspark", "refused", "connect") else f"{kind}: {what}"


def applies(case: Xml.Element) -> bool:
    """Whether a test ran, and was not skipped."""
    return case.find("skipped") is None


def _told(case: Xml.Element) -> tuple[bool, float]:
    return not (case.findall("failure") or case.findall("error")), float(case.get("time", "0"))


def table(ran: dict[str, dict[str, tuple[bool, float]]]) -> str:
    """A row for each test, a column for each version, in Markdown."""
    names = list(dict.fromkeys(name for found in ran.values() for name in found))
    lines = [f"| | {' | '.join(ran)} |", "| --- |" + " --- |" * len(ran)]
    for name in names:
        cells = [_cell(found.get(name)) for found in ran.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(told: tuple[bool, float] | None) -> str:
    if told is None:
        return ""
    return f"{told[1]:.1f} s" if told[0] else "**failed**"


def report(ran: dict[str, dict[str, tuple[bool, float]]]) -> str:
    """The table with the machine it was measured on."""
    java = subprocess.run(["java", "-version"], capture_output=True, text=True, check=False).stderr.splitlines()
    where = f"Python {platform.python_version()}, {java[0] if java else 'no Java on the PATH'}, {os.cpu_count()} cores"
    return f"""# PySpark 4.0 to 4.3

`make matrix` on {datetime.now(UTC):%Y-%m-%d}: {where}.
Seconds of each test, the first with the start of the JVM; empty: does not apply. Iceberg is its
Spark runtime 1.12.0 for Spark 4.1, Delta is 4.4.0 for Spark 4.2; both in one session with embarcadero.

{table(ran)}
"""


def main() -> int:
    """The exit code: 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="make matrix", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", help="versions to run, for example 4.1; then no report is saved")
    only = parser.parse_args().only
    BUILD.mkdir(parents=True, exist_ok=True)
    ran: dict[str, dict[str, tuple[bool, float]]] = {}
    for version in versions():
        if only is None or version.name in only:
            ran[version.pyspark] = run(version, environment(version))
    print(table(ran))
    if only is None:
        REPORT.write_text(report(ran))
        print(f"saved in {REPORT.relative_to(ROOT)}")
    return int(not all(passed for found in ran.values() for passed, _ in found.values()))


if __name__ == "__main__":
    sys.exit(main())
